"""The ServerApp: the server's stages of a round, with Flower's nodes as clients."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.errors import TrainingError, UserError, say
from fedjax_ssl.engine.cohort import CohortResult, train_cohort
from fedjax_ssl.engine.evaluation import is_tested, measure_model
from fedjax_ssl.engine.interface import Received, State
from fedjax_ssl.engine.round import aggregate_uploads, before_clients, init_key, round_keys
from fedjax_ssl.engine.tracing import one_job
from fedjax_ssl.engine.turns import Sent
from fedjax_ssl.engine.untrusted.screening import accepted_rows, longest_update
from fedjax_ssl.flower import flower
from fedjax_ssl.flower.answers import Figures, Reply, read_reply, read_statistics
from fedjax_ssl.flower.client import one_device
from fedjax_ssl.flower.messages import app as flower_app
from fedjax_ssl.flower.messages import array_bytes, to_record
from fedjax_ssl.flower.records import Records
from fedjax_ssl.flower.roster import Roster
from fedjax_ssl.flower.settings import RUN, digest, run_config
from fedjax_ssl.flower.supported import asks_for_labels, check_supported
from fedjax_ssl.flower.views import facts_text, outline, server_view
from fedjax_ssl.ops.trees import all_finite, tree_bytes
from fedjax_ssl.run.experiment import Experiment, make_method
from fedjax_ssl.run.machine import find_machine, use_compilation_cache
from fedjax_ssl.server.statistics import BATCH_SIZE, Sums, asked_clients, make_statistics, num_passes

app = flower("flwr.serverapp").ServerApp()
_on_host: Any = np.asarray  # in place of a JAX array; the next compiled stage moves it to the device


@app.main()
def main(grid: Any, context: Any) -> None:
    """Trains the run that Flower's run config describes; the workdir gets records as in a simulation."""
    use_compilation_cache()
    given = {**RUN, **context.run_config}
    config = run_config(given)
    experiment = outline(config)
    check_supported(experiment)
    with contextlib.closing(Records(given["workdir"] or None, experiment)) as folder:
        limits = float(given["wait"]), float(given["timeout"])
        num_classes = experiment.problem.num_classes if asks_for_labels(experiment) else 0
        roster = Roster(grid, config.num_clients, digest(config), facts_text(experiment), *limits, num_classes)
        roster.wait_for_all()
        server = Server(experiment, roster)
        state = server.first_state()
        folder.begin(state)
        for _ in range(config.num_rounds):
            began = time.monotonic()
            state, metrics, healthy = server.round(state)
            folder.add(state, metrics, time.monotonic() - began, healthy)
            if not healthy:
                raise TrainingError(f"round {int(state.round)}: the global state is not finite, or no upload is")
        folder.conclude(state, server.tested(state) if config.data.validation else {})


class Server:
    """The server's side of a run: the compiled stages, and the messages between them."""

    def __init__(self, experiment: Experiment, roster: Roster):
        """Compiles nothing yet. The run's data may be shapes; the server keeps its own part. All nodes are known."""
        self._roster = roster
        self._problem = problem = experiment.problem._replace(told_labels=roster.labels())
        made = make_method(problem)
        # Bytes are counted when messages are sent; messages are dense here, even if the method counts sparse ones.
        self._method = method = made._replace(wire_bytes=None)
        self._wire_bytes = made.wire_bytes
        self._data, self._hidden_labels = server_view(experiment, roster.sizes, roster.labelled)
        shapes = experiment.state_shape, experiment.data
        # Of a round.
        self._num_jobs = len(jax.eval_shape(lambda *of: one_job(problem, method, *of)[0].clients, *shapes))
        self._turns = 0  # in all rounds so far
        self._counted = np.zeros(problem.config.num_clients, int)  # the turn of each client's last accepted upload
        self._down = self._up = 0  # bytes of a round
        self._reply_like = jax.eval_shape(self._one_reply, *shapes)
        keys = lambda state, data: round_keys(data.seed, state.round)  # noqa: E731

        def before(state, data):
            return before_clients(problem, method, state, data, keys(state, data))

        def after(state, data, sent, result, received):
            all_keys = keys(state, data)
            state, metrics, usable = aggregate_uploads(problem, method, state, data, sent, result, received, all_keys)
            state, more = method.server_after(state, data, all_keys.server_after)
            return state, {**metrics, **more}, usable

        def one_pass(state, data, gathered):
            """One pass of the exchange of statistics, without other stages of the method."""
            network = problem.network._replace(gathered=gathered)
            return make_statistics(network, problem.config)(state, data, jnp.zeros(0, jnp.int32), None)

        def with_statistics(state, data, clients, key, gathered):
            of_clients = method if gathered is None else make_method(problem, gathered=gathered)
            return of_clients.statistics(state, data, clients, key)

        def finish(state, data, clients, key, gathered):
            state = with_statistics(state, data, clients, key, gathered)
            return state._replace(round=state.round + 1), all_finite(state.model)

        def measure(state, data, hidden_labels):
            return measure_model(problem, state.model, data, hidden_labels)

        jit = find_machine(one_device(problem.config)).jit
        self._init = jit(lambda data: method.init(data, init_key(data.seed))._replace(clients={}))
        self._before, self._after, self._finish, self._measure = map(jit, (before, after, finish, measure))
        self._one_pass, self._statistics = jit(one_pass), jit(with_statistics)
        self._screen = jit(accepted_rows, static_argnums=2)

    def first_state(self) -> State:
        """The state before the first round, without the clients' memory, which clients make themselves."""
        state, nobody = self._init(self._data), np.zeros(0, np.int32)
        state, gathered = self._gather(state, nobody, nobody, -1)
        return self._statistics(state, self._data, jnp.asarray(nobody), init_key(self._data.seed), gathered)

    def round(self, state: State) -> tuple[State, dict[str, np.ndarray], bool]:
        """A round: the state, the metrics by their names in metrics.jsonl, and whether it left a usable state."""
        self._down = self._up = 0  # as in the simulation, bytes before the first round belong to no round
        self._roster.welcome()
        told = {"client_size": self._roster.sizes, "labelled_size": self._roster.labelled}  # of new nodes, too
        self._data = self._data._replace(**jax.tree.map(jnp.asarray, told))
        number = int(state.round)
        key = round_keys(self._data.seed, state.round).statistics
        state, sent, before = self._before(state, self._data)
        result, received = self._train(jax.device_get(sent), number)
        state, from_clients, usable = self._after(state, self._data, sent, result, received)
        absent = np.setdiff1d(result.clients[~result.present], result.clients[result.present])
        state, gathered = self._gather(state, result.clients[result.present], absent, number)
        clients = sent.selection.clients
        state, finite = self._finish(state, self._data, clients, key, gathered)
        is_due = is_tested(self._problem.config, number + 1)
        measured = self._measure(state, self._data, self._hidden_labels) if is_due else {}
        metrics = {"round": state.round, **measured, **before, **from_clients}
        traffic = {"bytes_down": np.int64(self._down), "bytes_up": np.int64(self._up)}
        return state, {**jax.device_get(metrics), **traffic}, bool(finite & usable)

    def tested(self, state: State) -> dict[str, np.ndarray]:
        """The model's figures on the test set, by their names in summary.json."""
        data = self._data._replace(validation_index=jnp.zeros(0, int))
        return jax.device_get(self._measure(state, data, self._hidden_labels))

    def _one_reply(self, state, data) -> Reply:
        """A client's reply to a job, to trace its shapes."""
        method = self._method
        _, broadcast, cohort = one_job(self._problem, method, state, data)
        result = train_cohort(method.phases, broadcast, data, cohort, lanes=0, label=method.label)
        upload, metrics = jax.tree.map(lambda leaf: leaf[0], (result.upload, result.metrics))
        zero = jnp.int32(0)
        return Reply(Figures(zero, zero, zero, zero, metrics), upload)

    def _train(self, sent: Sent, number: int) -> tuple[CohortResult, Received]:
        """The clients' part of a round: in each turn, a message to each node that has a job in it."""
        selection, turns = sent.selection, int(sent.selection.turns)
        rows = np.arange(len(selection.clients)).reshape(turns, -1)
        if turns > 1 and selection.group is None:
            selection = selection._replace(group=_on_host(np.repeat(np.arange(turns), len(rows[0]))))
        if selection.present is None:
            selection = selection._replace(present=_on_host(np.ones(rows.size, bool)))
        sent = sent._replace(selection=selection)
        replies: dict[int, Reply] = {}
        accepted = []
        for of_turn in rows:
            clients = selection.clients[of_turn]
            if len(set(clients)) < len(clients):
                raise TrainingError(f"round {number + 1} draws a client twice for one turn, which no node can do yet")
            self._turns += 1
            replies |= self._ask(sent, of_turn, number)
            result = self._stack(sent, of_turn, replies)[0]
            accepted.append(np.asarray(self._screen(result, sent.broadcast, longest_update(self._problem.config))))
            self._counted[clients[accepted[-1]]] = self._turns
        if self._down and not replies:
            raise TrainingError(f"round {number + 1}: no node sent anything of use; the lines above say why")
        result, figures = self._stack(sent, rows.ravel(), replies)
        counts = figures.num_examples, figures.num_qualified
        all_accepted = _on_host(np.concatenate(accepted))
        return result, Received(result.upload, all_accepted, result.clients, result.group, *counts)

    def _ask(self, sent: Sent, of_turn: np.ndarray, number: int) -> dict[int, Reply]:
        """Sends a turn's jobs and waits for answers; returns the usable replies, by the jobs' rows."""
        clients, group = sent.selection.clients, sent.selection.group
        goes, broadcast = self._receives(sent), to_record(sent.broadcast)
        contents, whose = {}, {}
        for node, places in self._roster.nodes_of(clients[of_turn]).items():
            mine = of_turn[places][goes[of_turn[places]]]
            if not len(mine):
                continue
            jobs = {
                "clients": clients[mine].tolist(),
                "groups": [] if group is None else group[mine].tolist(),
                "counted": self._counted[clients[mine]].tolist(),
                "turn": self._turns,
            }
            contents[node] = {"broadcast": broadcast, "jobs": flower_app.ConfigRecord(jobs)}
            if jax.tree.leaves(sent.personal):
                contents[node]["personal"] = to_record(jax.tree.map(lambda leaf, mine=mine: leaf[mine], sent.personal))
            whose[node] = mine
        replies = {}
        for node, content in self._send(contents, "train", number).items():
            for place, job in enumerate(whose[node].tolist()):
                size = int(self._roster.sizes[clients[job]])
                try:
                    reply = read_reply(content, place, size, self._reply_like, self._turns, self._num_jobs)
                except UserError as error:
                    say(f"what client {clients[job]} at node {node} sent is not used: {error}")
                    continue
                self._up += tree_bytes(reply.upload)
                replies[job] = reply
        return replies

    def _receives(self, sent: Sent) -> Any:
        """Which jobs get a message, bool [M]: those present, except those to which the method sends nothing."""
        present = np.asarray(sent.selection.present)
        if self._wire_bytes is None:
            return present
        down = jax.vmap(lambda one: self._wire_bytes.down(sent.broadcast, one), axis_size=len(present))(sent.personal)
        return present & (np.asarray(down) > 0)

    def _stack(self, sent: Sent, rows: np.ndarray, replies: Mapping[int, Reply]) -> tuple[CohortResult, Figures]:
        """A cohort's result on one device, with the figures of its jobs; a job without an upload took no part.

        `rows`, int [R], are the jobs' rows in the selection; `replies` are by row.
        """
        selection = sent.selection
        nothing: Reply = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._reply_like)
        told = [replies.get(row, nothing._replace(upload=None)) for row in rows.tolist()]
        filled = [one if one.upload is not None else one._replace(upload=nothing.upload) for one in told]
        stacked: Any = jax.tree.map(lambda *of_jobs: np.stack(of_jobs), *filled)
        result = CohortResult(
            upload=stacked.upload,
            job=_on_host(np.arange(len(rows), dtype=np.int32)),
            clients=selection.clients[rows],
            group=None if selection.group is None else selection.group[rows],
            present=selection.present[rows],
            took_part=_on_host([one.upload is not None for one in told]),
            num_steps=stacked.figures.num_steps,
            report=None,
            metrics=stacked.figures.metrics,
            memory_of_labels={},
            memory_of_steps={},
            lane_steps=_on_host(np.int32(0)),
        )
        return result, stacked.figures

    def _gather(self, state: State, cohort: Any, absent: Any, number: int) -> tuple[State, Sums | None]:
        """Exchanges normalisation statistics: returns each client's sums, None if the policy asks no clients.

        With several passes, the sums are those of the last pass, and the state has the statistics of earlier passes.

        Args:
            cohort: the clients of this round, int [n]; none before the first round.
            absent: clients that only fill up the selection, int [n]. They are not asked, as in the simulation.
            number: rounds done; -1: the first state, which messages call round 0.
        """
        section, network = self._problem.config.model, self._problem.network
        asked = asked_clients(section.statistics, len(self._data.server_index), cohort, len(self._roster.sizes))
        if network.normalisation != "static" or asked is None:
            return state, None
        gathered, passes = None, 1
        most = max(len(asked), self._num_jobs)  # as many rows in every round, so that a stage is compiled once
        asked = np.asarray(asked)[~np.isin(asked, absent)]
        if section.statistics == "moments":
            passes = num_passes(network, section.statistics_passes, state.model, before=len(cohort) == 0)
        for number_of_pass in range(passes):
            if number_of_pass:
                state = self._one_pass(state, self._data, gathered)
            # Clients that did not answer lack the parameters, and are not asked again.
            gathered, asked = self._told(state, asked, most, number, first=number_of_pass == 0)
        return state, gathered

    def _told(self, state: State, asked: np.ndarray, most: int, number: int, first: bool) -> tuple[Sums, np.ndarray]:
        """One pass of `_gather`: sends the parameters if it is the first, and statistics with 'moments'; gets sums.

        Returns the sums of each client that was asked, [most, ...] with further rows of 0; and the clients that gave
        usable ones.
        """
        section = self._problem.config.model
        down = {"params": to_record(state.model.params)} if first else {}
        if section.statistics == "moments":
            down["batch_stats"] = to_record(state.model.batch_stats)
        places = self._roster.nodes_of(asked)
        contents = {
            node: {**down, "asked": flower_app.ConfigRecord({"clients": asked[mine].tolist()})}
            for node, mine in places.items()
        }
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state.model.batch_stats)
        by_images = section.statistics == "moments" or section.statistics_weights == "samples"
        told: dict[int, Sums] = {}  # by position in `asked`
        for node, content in self._send(contents, "query.statistics", number).items():
            for place, row in enumerate(places[node]):
                size = int(self._roster.sizes[asked[row]])
                count = size if by_images else -(-size // BATCH_SIZE)
                try:
                    told[row] = read_statistics(content, place, zeros, count)
                except UserError as error:
                    say(f"the statistics of client {asked[row]} at node {node} are not used: {error}")
                    continue
                self._up += tree_bytes(told[row].total)
        if len(asked) and not any(sums.count for sums in told.values()):
            raise TrainingError(f"round {number + 1}: no node sent statistics of use; the lines above say why")
        nothing = Sums(zeros, _on_host(np.float32(0)))
        rows: Any = jax.tree.map(lambda *each: np.stack(each), *(told.get(row, nothing) for row in range(most)))
        # A pass does not compute statistics of the network's companions, which therefore keep theirs.
        companions = {name: state.model.batch_stats[name] for name in zeros if name in self._problem.network.companions}
        kept = jax.tree.map(lambda leaf: np.multiply.outer(rows.count, np.asarray(leaf)), companions)
        return rows._replace(total={**rows.total, **kept}), asked[sorted(told)]

    def _send(self, contents: dict[int, dict[str, Any]], kind: str, number: int) -> dict[int, Any]:
        """Sends each node its message and counts the bytes; returns the contents of the answers, by node."""
        self._down += sum(map(array_bytes, contents.values()))
        return self._roster.send(contents, kind, number + 1)
