"""The nodes of a run: which client is at which node, and messages to nodes."""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedjax_ssl.base.errors import TrainingError, UserError, say
from fedjax_ssl.flower.answers import Hello, read_hello
from fedjax_ssl.flower.messages import app as flower_app
from fedjax_ssl.run.observe.clock import doing

EVERY_SECONDS = 2.0  # between checks for new nodes
AGAIN_SECONDS = 60.0  # until a node that is not taken is asked again


class Roster:
    """Keeps track of which node has which client.

    To Flower, a node that reconnects is a new node, except if its key is registered. It takes over its clients once the
    old node is no longer connected; no node can take the clients of a connected node.
    """

    def __init__(
        self, grid: Any, num_clients: int, digest: str, facts: str, wait: float, timeout: float, num_classes: int = 0
    ):
        """Sends nothing yet.

        Args:
            digest: of the configuration; a node with another configuration is refused.
            facts: what nodes are told about the server's images.
            wait: seconds until every client must have a node.
            timeout: seconds until an answer must arrive; later answers are lost.
            num_classes: nodes are asked how many labels of each of these classes they have; 0: they are not asked.
        """
        self._grid, self._digest, self._num_classes = grid, digest, num_classes
        self._facts = flower_app.ConfigRecord({"json": facts, "asks-for-labels": int(num_classes > 0)})
        self._wait, self._timeout = wait, timeout
        self._node_of: dict[int, int] = {}
        self._ask_at: dict[int, float] = {}  # each connected node -> when to ask it who it is; infinity: it was asked
        self._awaited: dict[str, int] = {}  # the node of each message that has no answer yet
        self._classes_at: dict[int, list[int]] = {}
        self.sizes, self.labelled = np.zeros(num_clients, np.int32), np.zeros(num_clients, np.int32)

    def wait_for_all(self) -> None:
        """Waits until every client has a node. Raises TrainingError if some have none in time."""
        end = time.monotonic() + self._wait
        while True:
            self.welcome()
            missing = [client for client in range(len(self.sizes)) if self._node_of.get(client) not in self._ask_at]
            if not missing:
                return
            if time.monotonic() > end:
                raise TrainingError(
                    f"after {self._wait:g} seconds {len(missing)} of num_clients = {len(self.sizes)} clients have no "
                    f"node: {_listed(missing)}; start flower-supernode --node-config 'partition-id={missing[0]}'"
                )
            time.sleep(EVERY_SECONDS)

    def welcome(self) -> None:
        """Asks new nodes for their clients, and adds the nodes that have answered.

        It does not wait: a later call reads later answers. A node is asked again if it has gone in between, or if it
        gave no answer in a round, since it may have been restarted; with a registered key it then has the same id. One
        that is not taken is asked again after `AGAIN_SECONDS`. A node that restarts between two calls and answers in
        time is not asked again.
        """
        connected, now = set(self._grid.get_node_ids()), time.monotonic()
        self._ask_at = {node: self._ask_at.get(node, now) for node in connected}
        new = sorted(node for node, when in self._ask_at.items() if when <= now)
        # Answers of nodes that have gone are not read, nor those to a question that is asked again.
        self._awaited = {sent: node for sent, node in self._awaited.items() if self._ask_at.get(node, now) > now}
        self._ask_at.update(dict.fromkeys(new, math.inf))
        if new:
            hellos = [self._message(node, {"facts": self._facts}, "query.hello", 0) for node in new]
            sent = zip(self._grid.push_messages(hellos), new)
            self._awaited.update({message: node for message, node in sent if message})
        for answer in self._grid.pull_messages(list(self._awaited)) if self._awaited else []:
            node = self._awaited.pop(answer.metadata.reply_to_message_id)
            self._node_of = {client: other for client, other in self._node_of.items() if other != node}
            try:
                if answer.has_error():
                    raise UserError(f"it cannot say who it is: {answer.error.reason}")
                self._take(node, read_hello(answer.content, self._digest, len(self.sizes), self._num_classes))
            except UserError as error:
                self._ask_at[node] = now + AGAIN_SECONDS
                say(f"node {node} is not taken: {error}")

    def _take(self, node: int, hello: Hello) -> None:
        """Assigns its clients to a node; raises a UserError if one is at another node that is connected."""
        for client in hello.clients:
            if (other := self._node_of.get(client)) in self._ask_at:
                raise UserError(f"client {client} is at node {other}, which is connected")
        for client, size, labelled in zip(hello.clients, hello.sizes, hello.labelled):
            self._node_of[client], self.sizes[client], self.labelled[client] = node, size, labelled
        self._classes_at[node] = hello.classes
        say(f"clients {_listed(hello.clients)} are at node {node}")

    def labels(self) -> Any:
        """How many labels of each class all clients have, float32 [C]; None if nodes were not asked."""
        told = [self._classes_at[node] for node in set(self._node_of.values())]
        return np.sum(told, axis=0).astype(np.float32) if self._num_classes else None

    def nodes_of(self, clients: Iterable[int]) -> dict[int, list[int]]:
        """Node -> the positions of its clients in `clients`. A client without a node is left out."""
        found: dict[int, list[int]] = {}
        for place, client in enumerate(clients):
            if (node := self._node_of.get(int(client))) is not None:
                found.setdefault(node, []).append(place)
        return found

    def send(self, contents: Mapping[int, Mapping[str, Any]], kind: str, number: int) -> dict[int, Any]:
        """Sends each node its records and waits for answers. Prints a line for each failure and each missing answer.

        `kind` is Flower's type of message, `number` that of the round, from 1 on; 0 before the first.
        """
        messages = [self._message(node, content, kind, number) for node, content in contents.items()]
        found = {}
        with doing(f"round {number}: waiting for {len(contents)} nodes, {_listed(list(contents))} ({kind})"):
            answers = self._grid.send_and_receive(messages, timeout=self._timeout) if messages else []
        for answer in answers:
            if answer.has_error():
                say(f"a node failed in round {number} ({kind}): {answer.error.reason}")
            else:
                found[answer.metadata.src_node_id] = answer.content
        for node in contents:
            if node not in found:
                say(f"node {node} gave no answer in round {number} ({kind})")
                self._ask_at[node] = 0.0
        return {node: found[node] for node in contents if node in found}

    def _message(self, node: int, content: Mapping[str, Any], kind: str, number: int) -> Any:
        records = flower_app.RecordDict(dict(content))
        return flower_app.Message(records, node, kind, ttl=self._timeout, group_id=str(number))


def _listed(ids: list[int]) -> str:
    """The first ten."""
    return ", ".join(map(str, ids[:10])) + ", ..." * (len(ids) > 10)
