"""The nodes of a run: which client is where, and messages to them."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_ssl.errors import TrainingError
from fedjax_ssl.flower.messages import app as flower_app

EVERY_SECONDS = 2.0  # between two looks for nodes that have come


class Roster:
    """Which node has which client. A node that comes back is another one to Flower, and takes its clients over."""

    def __init__(
        self,
        grid: Any,
        num_clients: int,
        digest: str,
        facts: str,
        wait: float,
        timeout: float,
        asks_for_labels: bool = False,
    ):
        """Asks nobody yet.

        Args:
            grid: Flower's.
            num_clients: K.
            digest: of the configuration; a node with another one is not taken.
            facts: what a node is told of the server's images.
            wait: seconds until every client must have a node.
            timeout: seconds until an answer must have come; what comes later is lost.
            asks_for_labels: whether nodes are asked how many labels of each class their clients have.
        """
        self._grid, self._digest = grid, digest
        self._facts = flower_app.ConfigRecord({"json": facts, "asks-for-labels": int(asks_for_labels)})
        self._wait, self._timeout = wait, timeout
        self._node_of: dict[int, int] = {}
        self._asked: set[int] = set()
        self._classes_at: dict[int, list[int]] = {}
        self.sizes, self.labelled = np.zeros(num_clients, np.int32), np.zeros(num_clients, np.int32)

    def wait_for_all(self) -> None:
        """Waits until every client has a node.

        Raises:
            TrainingError: some have none in time, or a node has another configuration.
        """
        end = time.monotonic() + self._wait
        while True:
            self.welcome()
            missing = sorted(set(range(len(self.sizes))) - set(self._node_of))
            if not missing:
                return
            if time.monotonic() > end:
                some = ", ".join(map(str, missing[:10])) + ", ..." * (len(missing) > 10)
                raise TrainingError(
                    f"after {self._wait:g} seconds {len(missing)} of num_clients = {len(self.sizes)} clients have no "
                    f"node: {some}; start flower-supernode --node-config 'partition-id={missing[0]}'"
                )
            time.sleep(EVERY_SECONDS)

    def welcome(self) -> None:
        """Asks nodes that have come since who they are.

        Raises:
            TrainingError: a node has another configuration.
        """
        new = [node for node in self._grid.get_node_ids() if node not in self._asked]
        for node, content in self.send({node: {"facts": self._facts} for node in new}, "query.hello", 0).items():
            self._asked.add(node)
            who = content["node"]
            if who["digest"] != self._digest:
                raise TrainingError(
                    f"the node of clients {who['clients']} has another configuration ({who['digest']}, the server's is "
                    f"{self._digest}): another version of the library, or of the config file"
                )
            for client, size, labelled in zip(who["clients"], who["sizes"], who["labelled"]):
                self._node_of[client], self.sizes[client], self.labelled[client] = node, size, labelled
            if "classes" in who:
                self._classes_at[node] = who["classes"]
            say(f"clients {', '.join(map(str, who['clients']))} are at node {node}")

    def labels(self) -> np.ndarray | None:
        """How many labels of each class all clients have, float32 [C]; None if they were not asked."""
        told = [self._classes_at[node] for node in set(self._node_of.values()) if node in self._classes_at]
        return np.sum(told, axis=0).astype(np.float32) if told else None

    def nodes_of(self, clients: Sequence[int]) -> dict[int, list[int]]:
        """The nodes of some clients, each with the places among `clients` that are its own."""
        found: dict[int, list[int]] = {}
        for place, client in enumerate(clients):
            found.setdefault(self._node_of[int(client)], []).append(place)
        return found

    def send(self, contents: Mapping[int, Mapping[str, Any]], kind: str, number: int) -> dict[int, Any]:
        """Sends each node its message, and waits for the answers; a line says which node gave none, and why.

        Args:
            contents: the records for each node.
            kind: Flower's type of message.
            number: of the round, from 1 on; 0 before the first.
        """
        messages = [
            flower_app.Message(
                flower_app.RecordDict(dict(content)), node, kind, ttl=self._timeout, group_id=str(number)
            )
            for node, content in contents.items()
        ]
        found = {}
        answers = self._grid.send_and_receive(messages, timeout=self._timeout) if messages else []
        for answer in answers:
            if answer.has_error():
                say(f"a node failed in round {number} ({kind}): {answer.error.reason}")
            else:
                found[answer.metadata.src_node_id] = answer.content
        for node in contents:
            if node not in found:
                say(f"node {node} gave no answer in round {number} ({kind})")
        return {node: found[node] for node in contents if node in found}


def say(line: str) -> None:
    """A line for whoever watches the run."""
    print(line, file=sys.stderr, flush=True)
