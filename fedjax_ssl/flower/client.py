"""The ClientApp: trains clients with the server's messages, their own images and their own memory.

A client's memory stays at its node, in Flower's `Context.state`. What a turn's training adds to it counts only if the
server accepts the upload. The next message says so; until then the addition is kept beside the memory.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data import FederatedData, dataset_facts
from fedjax_ssl.data.content import checksums, what_differs
from fedjax_ssl.data.federated import Holdings
from fedjax_ssl.data.views import Views
from fedjax_ssl.engine.cohort import CohortResult, train_cohort
from fedjax_ssl.engine.interface import Cohort, Method, Problem
from fedjax_ssl.engine.round import init_key, round_keys
from fedjax_ssl.engine.tracing import one_job
from fedjax_ssl.engine.untrusted.delivery import clipped
from fedjax_ssl.flower import flower
from fedjax_ssl.flower.answers import Figures
from fedjax_ssl.flower.messages import app as flower_app
from fedjax_ssl.flower.messages import from_record, to_record
from fedjax_ssl.flower.settings import digest, node_settings, run_config
from fedjax_ssl.flower.views import node_holdings, own_holdings
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import row
from fedjax_ssl.run.experiment import make_method, make_problem
from fedjax_ssl.run.machine import find_machine, use_compilation_cache
from fedjax_ssl.server.statistics import BATCH_SIZE, Sums, sum_statistics

FACTS = "facts"  # facts about the server's data, in `Context.state`
# For each client, by its id, in `Context.state`: its memory, what its last training adds, and that training's turn.
MEMORY, PENDING, TURN = "memory", "pending", "turn"
EXCHANGED = "exchanged"  # the parameters during an exchange of statistics

app = flower("flwr.clientapp").ClientApp()


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of the federation, and what it computes."""

    config: ConfigDict  # the run's
    clients: tuple[int, ...]  # its clients' ids
    problem: Problem  # the run's
    method: Method  # the run's
    held: Holdings  # its clients' images
    content: Mapping[str, str] | None  # the configured data set's `checksums`; None: it has images of its own

    @functools.cached_property
    def views(self) -> Views:
        """Views of one of its clients at a time."""
        return Views(self.held, (self.held.width,), 1, on_device=True)

    @functools.cached_property
    def shapes(self) -> tuple[Any, Any, Any, Model]:
        """Shapes of the broadcast, of the messages to single clients, of a client's memory and of the model."""

        def of_a_round(data: FederatedData) -> tuple[Any, Any, Any, Model]:
            state = self.method.init(data, init_key(data.seed))
            _, broadcast, cohort = one_job(self.problem, self.method, state, data)
            return broadcast, cohort.personal, row(cohort.own, 0), state.model

        return jax.eval_shape(of_a_round, self.views.first()[0])

    @functools.cached_property
    def programs(self) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """Three programs, compiled when they are called, as in a run on one device.

        From a client's data to its memory before its first round; `train_one` of the run's method; from a model,
        images, rows and a mask to `sum_statistics`.
        """
        section = self.config.model

        def sums(model: Model, images: Any, rows: Any, present: Any) -> Sums:
            how = section.statistics_weights, section.statistics == "moments"
            return sum_statistics(self.problem.network, model, images, rows, present, *how)

        jit = find_machine(one_device(self.config)).jit
        first_memory = jit(lambda data: row(self.method.init(data, init_key(data.seed)).clients, 0))
        return first_memory, jit(functools.partial(train_one, self.problem, self.method)), jit(sums)

    def batches(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's rows in batches, int32 [n, B], and a mask of real rows, bool [n, B]; n is that of all clients."""
        width, rows = self.held.width, self.held.rows_of(client)
        size = min(BATCH_SIZE, width)
        padded = np.pad(rows, (0, width - len(rows) + -width % size), constant_values=-1).reshape(-1, size)
        return np.maximum(padded, 0), padded >= 0


def one_device(config: ConfigDict) -> ConfigDict:
    """The configuration with one device and one lane: a node trains one client at a time."""
    config = config.copy_and_resolve_references()
    config.devices = config.lanes = 1
    return config


def open_node(context: Any) -> Node:
    """Builds a node from its context. This is repeated for each message, since Flower starts a process for each.

    Raises UserError if the configuration or the node's data cannot be used, or the node was restarted since `hello`.
    """
    use_compilation_cache()
    config = run_config(context.run_config)
    clients, file = node_settings(context.node_config, config.num_clients)
    if file:
        if FACTS not in context.state:
            raise UserError("it was restarted, and does not know the server's images; the server tells it again")
        facts = json.loads(context.state[FACTS]["json"])
        held = own_holdings(config, clients[0], file, facts)
        lacks_labels, sums = True, None
    else:
        held, dataset = node_holdings(config, clients)
        facts, lacks_labels, sums = dataset_facts(dataset), dataset.lacks_labels, checksums(dataset)
    problem = make_problem(config, facts, lacks_labels)
    return Node(config, clients, problem, make_method(problem), held, sums)


@app.query("hello")
def hello(message: Any, context: Any) -> Any:
    """Answers who the node is: its clients' ids, how many images each has, and how many of these have labels.

    If the method's first state depends on it, also how many labels of each class all its clients have. Raises UserError
    if the node's copy of the configured data set is not that of the server.
    """
    context.state[FACTS] = message.content[FACTS]
    node, facts = open_node(context), json.loads(message.content[FACTS]["json"])
    # Not the test set, which only the server reads.
    of_server = facts.get("content", node.content)
    if node.content and (odd := what_differs(of_server, node.content, ("train_inputs", "train_labels"))):
        raise UserError(f"its data set is not the server's: {odd}")
    who = {
        "clients": list(node.clients),
        "sizes": node.held.sizes[list(node.clients)].tolist(),
        "labelled": node.held.labelled_size[list(node.clients)].tolist(),
        "digest": digest(node.config),
    }
    if message.content[FACTS]["asks-for-labels"]:
        who["classes"] = node.held.given_labels.astype(int).tolist()
    return flower_app.Message(flower_app.RecordDict({"node": flower_app.ConfigRecord(who)}), reply_to=message)


@app.train()
def train(message: Any, context: Any) -> Any:
    """Trains the node's clients that take part in a turn, one after the other.

    The message has the broadcast and the turn's number; for each job, it has the client's id, its group, the turn of
    its last accepted upload, and its personal message. The reply has each job's upload and figures.
    """
    node, content = open_node(context), message.content
    jobs, round_number = content["jobs"], int(message.metadata.group_id) - 1
    broadcast_like, personal_like, memory_like, _ = node.shapes
    broadcast = from_record(content["broadcast"], broadcast_like, "the broadcast")
    personal = from_record(content.get("personal", {}), personal_like, "the message to a client")
    first_memory, train_client, _ = node.programs
    reply = {}
    for job, client in enumerate(jobs["clients"]):
        data, _ = node.views.of(np.array([client]), node.held.width)
        memory = _remembered(context.state, client, jobs["counted"][job], memory_like)
        if memory is None:
            memory = jax.device_get(first_memory(data))
        group = jnp.int32(jobs["groups"][job]) if jobs["groups"] else None
        told = row(personal, job)
        result = train_client(broadcast, data, memory, jnp.int32(client), group, told, jnp.int32(round_number))
        result = jax.device_get(row(result._replace(lane_steps=()), 0))
        memory = {**memory, **result.memory_of_labels}
        if memory:
            context.state[f"{MEMORY}-{client}"] = to_record(memory)
            context.state[f"{PENDING}-{client}"] = to_record(result.memory_of_steps)
            context.state[f"{TURN}-{client}"] = flower_app.ConfigRecord({"turn": jobs["turn"]})
        if result.took_part:
            reply[f"upload-{job}"] = to_record(result.upload)
        size = node.held.sizes[client]
        qualified = np.int32(size if result.report is None else np.sum(result.report.qualified))
        figures = Figures(np.int32(jobs["turn"]), size, qualified, result.num_steps, result.metrics)
        reply[f"figures-{job}"] = to_record(figures)
    return flower_app.Message(flower_app.RecordDict(reply), reply_to=message)


@app.query("statistics")
def statistics(message: Any, context: Any) -> Any:
    """Answers with sums of normalisation statistics over the images of each of the node's clients that is asked.

    With 'moments', the statistics so far arrive in each pass. The parameters arrive in the first pass and are kept.
    """
    node, content = open_node(context), message.content
    params, batch_stats = node.shapes[-1]
    if "params" in content:
        context.state[EXCHANGED] = content["params"]
    params = from_record(context.state[EXCHANGED], params, "the model")
    if "batch_stats" in content:
        batch_stats = from_record(content["batch_stats"], batch_stats, "the model")
    else:
        batch_stats = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), batch_stats)
    images, reply = node.views.first()[0].inputs, {}
    for place, client in enumerate(content["asked"]["clients"]):
        found = node.programs[-1](Model(params, batch_stats), images, *node.batches(client))
        reply[f"sums-{place}"] = to_record(row(found._replace(count=found.count.astype(jnp.float32)), 0))
    return flower_app.Message(flower_app.RecordDict(reply), reply_to=message)


def train_one(
    problem: Problem, method: Method, broadcast: Any, data: FederatedData, memory: Mapping[str, Any], client: jax.Array,
    group: jax.Array | None, personal: Any, round_number: jax.Array,
) -> CohortResult:  # fmt: skip
    """Runs one job of a round as a cohort of one client, with the same PRNG keys as in the simulation.

    Memory, id, group (or None) and personal message are the client's, without a leading axis; `round_number` counts the
    rounds done before this one. The result's leaves are [1, ...].
    """
    own, personal = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (memory, personal))
    key = round_keys(data.seed, round_number).clients
    cohort = Cohort(client[None], own, key, None if group is None else group[None], personal, round_number[None])
    result = train_cohort(method.phases, broadcast, data, cohort, 1, label=method.label)
    if bound := problem.config.aggregation.clip_norm:
        model = clipped(result.upload.model, broadcast.model, bound)
        result = result._replace(upload=result.upload._replace(model=model))
    return result


def _remembered(state: Any, client: int, counted: int, like: Any) -> dict[str, Any] | None:
    """A client's memory, with what its last training added if the server counted that turn; None before its first one.

    `state` is Flower's `Context.state`, `like` has the memory's shapes.
    """
    if f"{MEMORY}-{client}" not in state:
        return None if jax.tree.leaves(like) else {}
    memory = from_record(state[f"{MEMORY}-{client}"], like, "a client's memory")
    waiting = state[f"{PENDING}-{client}"]
    if state[f"{TURN}-{client}"]["turn"] != counted:
        return memory
    trained = {name: like[name] for name in like if any(path.startswith(f"['{name}']") for path in waiting)}
    return {**memory, **from_record(waiting, trained, "a client's memory")}
