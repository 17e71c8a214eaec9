"""The ServerApp: the server's stages of a round, with Flower's nodes as clients."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.errors import TrainingError, UserError
from fedjax_ssl.data.views import narrowest, widths_of
from fedjax_ssl.engine.cohort import CohortResult, train_cohort
from fedjax_ssl.engine.evaluation import measure_model
from fedjax_ssl.engine.interface import Received, State
from fedjax_ssl.engine.round import aggregate_uploads, before_clients, init_key, round_keys
from fedjax_ssl.engine.tracing import one_job
from fedjax_ssl.engine.turns import Sent
from fedjax_ssl.engine.untrusted.screening import accepted_rows, longest_update
from fedjax_ssl.flower import flower
from fedjax_ssl.flower.answers import Reply, read_compiling, read_reply, read_statistics
from fedjax_ssl.flower.client import one_device
from fedjax_ssl.flower.messages import app as flower_app
from fedjax_ssl.flower.messages import array_bytes, to_record
from fedjax_ssl.flower.records import Records
from fedjax_ssl.flower.roster import Roster, say
from fedjax_ssl.flower.settings import RUN, digest, run_config
from fedjax_ssl.flower.supported import asks_for_labels, check_supported
from fedjax_ssl.flower.views import facts_text, outline, server_view
from fedjax_ssl.ops.trees import all_finite, tree_bytes
from fedjax_ssl.run.experiment import Experiment, make_method
from fedjax_ssl.run.machine import find_machine, use_compilation_cache
from fedjax_ssl.server.statistics import Sums, asked_clients, make_statistics, num_passes

app = flower("flwr.serverapp").ServerApp()


@app.main()
def main(grid: Any, context: Any) -> None:
    """Trains the run that Flower's run config describes; the workdir gets records as in a simulation."""
    use_compilation_cache()
    given = {**RUN, **context.run_config}
    config = run_config(given)
    experiment = outline(config)
    check_supported(experiment)
    with Records(given["workdir"] or None, experiment) as folder:
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
            folder.add(state, metrics, time.monotonic() - began, server.compiling, healthy)
            if not healthy:
                raise TrainingError(f"round {int(state.round)}: the global state is not finite, or no upload was")
        folder.conclude(state, server.tested(state) if config.data.validation else {})


class Server:
    """The server's side of a run: the compiled stages, and the messages between them."""

    def __init__(self, experiment: Experiment, roster: Roster):
        """Compiles nothing yet.

        Attributes:
            compiling: seconds of compiling in the last round, by the slowest node of each turn.

        Args:
            experiment: the run; its data may be shapes. The server keeps its own part of the data.
            roster: the nodes, which are all known.
        """
        self._roster = roster
        self.compiling = 0.0
        self._problem = problem = experiment.problem._replace(told_labels=roster.labels())
        made = make_method(problem)
        # Bytes are counted when messages are sent; messages are dense here, even if the method counts sparse ones.
        self._method, self._wire_bytes = made._replace(wire_bytes=None), made.wire_bytes
        method = self._method
        self._data, self._hidden_labels = server_view(experiment, roster.sizes, roster.labelled)
        shapes = experiment.state_shape, experiment.data
        drawn = jax.eval_shape(lambda state, data: one_job(problem, method, state, data)[0].clients, *shapes)
        # From the partition, not from the nodes' answers: a false size would cost all other nodes memory.
        self._sizes = np.array([len(rows) for rows in experiment.partition.client_rows])
        self._num_jobs = len(drawn)  # of a round
        self._widths = widths_of(self._sizes, self._num_jobs)
        self._turns = 0  # in all rounds so far
        self._counted = np.zeros(problem.config.num_clients, int)  # the turn of each client's last accepted upload
        self._down = self._up = 0  # bytes of a round
        self._result_like = jax.eval_shape(self._one_result, *shapes)
        machine = find_machine(one_device(problem.config))
        keys = lambda state, data: round_keys(data.seed, state.round)  # noqa: E731

        def before(state, data):
            return before_clients(problem, method, state, data, keys(state, data))

        def after(state, data, sent, result, received):
            all_keys = keys(state, data)
            state, metrics, usable = aggregate_uploads(problem, method, state, data, sent, result, received, all_keys)
            state, more = method.server_after(state, data, all_keys.server_after)
            return state, {**metrics, **more}, usable

        def finish(state, data, clients, key, gathered, hidden_labels):
            state = self._with_statistics(state, data, clients, key, gathered)
            measured = measure_model(problem, state.model, data, hidden_labels)
            return state._replace(round=state.round + 1), measured, all_finite(state.model)

        def tested(state, data, hidden_labels):
            return measure_model(problem, state.model, data._replace(validation_index=jnp.zeros(0, int)), hidden_labels)

        self._init = machine.jit(lambda data: method.init(data, init_key(data.seed))._replace(clients={}))
        self._one_pass = machine.jit(self._pass)
        self._statistics = machine.jit(self._with_statistics)
        self._before, self._after, self._finish, self._tested = map(machine.jit, (before, after, finish, tested))
        self._screen = machine.jit(accepted_rows, static_argnums=2)

    def first_state(self) -> State:
        """The state before the first round, without the clients' memory, which clients make themselves."""
        state, nobody = self._init(self._data), np.zeros(0, np.int32)
        state, gathered = self._gather(state, nobody, nobody, -1)
        self._down = self._up = 0  # as in the simulation, bytes before the first round belong to no round
        return self._statistics(state, self._data, jnp.asarray(nobody), init_key(self._data.seed), gathered)

    def round(self, state: State) -> tuple[State, dict[str, np.ndarray], bool]:
        """Runs one round.

        Returns:
            The state, the metrics by their names in metrics.jsonl, and whether the round left a usable state.
        """
        self._down = self._up = 0
        self.compiling = 0.0
        self._roster.welcome()
        told = {"client_size": self._roster.sizes, "labelled_size": self._roster.labelled}  # of new nodes, too
        self._data = self._data._replace(**jax.tree.map(jnp.asarray, told))
        number = int(state.round)
        key = round_keys(self._data.seed, state.round).statistics
        state, sent, before = self._before(state, self._data)
        result, received = self._clients(jax.device_get(sent), number)
        state, from_clients, usable = self._after(state, self._data, sent, result, received)
        clients, present = np.asarray(sent.selection.clients), _present(sent)
        absent = np.setdiff1d(clients[~present], clients[present])
        state, gathered = self._gather(state, clients[present], absent, number)
        state, measured, finite = self._finish(state, self._data, clients, key, gathered, self._hidden_labels)
        metrics = {"round": state.round, **measured, **before, **from_clients}
        traffic = {"bytes_down": np.int64(self._down), "bytes_up": np.int64(self._up)}
        return state, {**jax.device_get(metrics), **traffic}, bool(finite & usable)

    def tested(self, state: State) -> dict[str, np.ndarray]:
        """The model's figures on the test set, by their names in summary.json."""
        return jax.device_get(self._tested(state, self._data, self._hidden_labels))

    def _with_statistics(self, state, data, clients, key, gathered: Sums | None) -> State:
        method = self._method if gathered is None else make_method(self._problem, gathered=gathered)
        return method.statistics(state, data, clients, key)

    def _pass(self, state, data, gathered: Sums) -> State:
        """One pass of the exchange of statistics, without other stages of the method."""
        network = self._problem.network._replace(gathered=gathered)
        return make_statistics(network, self._problem.config.model)(state, data, jnp.zeros(0, jnp.int32), None)

    def _one_result(self, state, data) -> CohortResult:
        _, broadcast, cohort = one_job(self._problem, self._method, state, data)
        method = self._method
        result = train_cohort(method.phases, broadcast, data, cohort, lanes=0, label=method.label)
        return result._replace(report=None)

    def _clients(self, sent: Sent, number: int) -> tuple[CohortResult, Received]:
        """The clients' part of a round: in each turn, a message to each node that has a job in it."""
        selection, turns = sent.selection, int(sent.selection.turns)
        rows = np.arange(len(selection.clients)).reshape(turns, -1)
        group: Any = (
            np.repeat(np.arange(turns), len(rows[0])) if turns > 1 and selection.group is None else selection.group
        )
        broadcast, present = to_record(sent.broadcast), _present(sent)
        replies, accepted = [], []
        for of_turn in rows:
            if len(set(selection.clients[of_turn])) < len(of_turn):
                raise TrainingError(f"round {number + 1} draws a client twice for one turn, which no node can do yet")
            self._turns += 1
            told = self._ask(of_turn, selection.clients, group, broadcast, sent, number)
            of_group = None if group is None else group[of_turn]
            result = self._stack(told, selection.clients[of_turn], of_group, present[of_turn])
            longest = longest_update(self._problem.config)
            accepted.append(np.asarray(self._screen(result, sent.broadcast, longest)))
            self._counted[selection.clients[of_turn][accepted[-1]]] = self._turns
            replies += told
        if self._down and not any(reply.figures for reply in replies):
            raise TrainingError(f"round {number + 1}: no node sent anything of use; the lines above say why")
        result = self._stack(replies, selection.clients, group, present)
        all_accepted = _on_host(np.concatenate(accepted))
        counts = _figures(replies, "num-examples"), _figures(replies, "num-qualified")
        received = Received(result.upload, all_accepted, selection.clients, group, *counts)
        return result, received

    def _ask(self, of_turn, clients, group, broadcast, sent: Sent, number: int) -> list[Reply]:
        """Sends a turn's jobs and waits for answers; returns a reply for each row."""
        contents, whose = {}, {}
        goes = self._receives(sent, of_turn)
        for node, places in self._roster.nodes_of(clients[of_turn]).items():
            mine = [of_turn[place] for place in places if goes[place]]
            if not mine:
                continue
            jobs = {
                "clients": [int(clients[job]) for job in mine],
                "groups": [] if group is None else [int(group[job]) for job in mine],
                "counted": [int(self._counted[clients[job]]) for job in mine],
                "turn": self._turns,
                "width": self._width(clients),
            }
            personal = jax.tree.map(lambda leaf, mine=mine: leaf[np.array(mine)], sent.personal)
            contents[node] = {"broadcast": broadcast, "jobs": flower_app.ConfigRecord(jobs)}
            if jax.tree.leaves(personal):
                contents[node]["personal"] = to_record(personal)
            whose[node] = mine
        found = self._send(contents, "train", number)
        compiling = {node: read_compiling(content) for node, content in found.items()}
        self.compiling += max(compiling.values(), default=0.0)
        if line := compiled_at(compiling):
            say(f"round {number + 1}: {len(found)} of {len(contents)} nodes answered; {line}")
        replies = dict.fromkeys(of_turn.tolist(), Reply())
        for node, content in found.items():
            for place, job in enumerate(whose[node]):
                replies[int(job)] = self._read(content, place, int(clients[job]), node)
        return list(replies.values())

    def _read(self, content: Any, place: int, client: int, node: int) -> Reply:
        """Reads a job's reply. If it is not valid, prints a line and returns an empty reply."""
        try:
            size = int(self._roster.sizes[client])
            reply = read_reply(content, place, size, self._result_like, self._turns, self._num_jobs)
        except UserError as error:
            say(f"what client {client} at node {node} sent is not used: {error}")
            return Reply()
        self._up += tree_bytes(reply.upload)
        return reply

    def _width(self, clients: np.ndarray) -> int:
        """The width to which the rows of a round's clients are padded, as in the simulation."""
        return narrowest(self._widths, self._sizes[clients])

    def _receives(self, sent: Sent, rows: np.ndarray) -> np.ndarray:
        """Which jobs get a message: those that are present, except those to which the method sends nothing."""
        present = _present(sent)[rows]
        if self._wire_bytes is None:
            return present
        personal = jax.tree.map(lambda leaf: leaf[rows], sent.personal)
        down = jax.vmap(lambda one: self._wire_bytes.down(sent.broadcast, one), axis_size=len(rows))(personal)
        return present & (np.asarray(down) > 0)

    def _gather(self, state: State, cohort: Any, absent: Any, number: int) -> tuple[State, Sums | None]:
        """Exchanges normalisation statistics: returns the clients' sums, None if the policy asks no clients.

        With several passes, the sums are those of the last pass, and the state has the statistics of earlier passes.

        Args:
            state: of the server.
            cohort: the clients of this round, int [n]; none before the first round.
            absent: clients that only fill up the selection, int [n]. They are not asked, as in the simulation.
            number: rounds done; -1: the first state, which messages call round 0.
        """
        section, network = self._problem.config.model, self._problem.network
        asked = asked_clients(section.statistics, len(self._data.server_index), cohort, len(self._roster.sizes))
        if network.normalisation != "static" or asked is None:
            return state, None
        gathered, passes, width = None, 1, self._width(np.append(asked, absent))
        asked = np.asarray(asked)[~np.isin(asked, absent)]
        if section.statistics == "moments":
            passes = num_passes(network, section.statistics_passes, state.model, before=len(cohort) == 0)
        for number_of_pass in range(passes):
            if number_of_pass:
                state = self._one_pass(state, self._data, gathered)
            # Clients that did not answer lack the parameters, and are not asked again.
            gathered, asked = self._told(state, asked, width, number, first=number_of_pass == 0)
        return state, gathered

    def _told(self, state: State, asked: np.ndarray, width: int, number: int, first: bool) -> tuple[Sums, np.ndarray]:
        """One pass of `_gather`: sends the parameters if it is the first, and statistics with 'moments'; gets sums.

        Returns:
            The total of the usable sums, and the clients of the nodes that sent them.
        """
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state.model.batch_stats)
        down = {"params": to_record(state.model.params)} if first else {}
        if self._problem.config.model.statistics == "moments":
            down["batch_stats"] = to_record(state.model.batch_stats)
        whose = {node: asked[places] for node, places in self._roster.nodes_of(asked).items()}
        contents = {
            node: {**down, "asked": flower_app.ConfigRecord({"clients": clients.tolist(), "width": width})}
            for node, clients in whose.items()
        }
        total, count, answered = zeros, 0.0, [np.zeros(0, int)]
        for node, content in self._send(contents, "query.statistics", number).items():
            try:
                sums, counted = read_statistics(content, zeros, int(self._roster.sizes[whose[node]].sum()))
            except UserError as error:
                say(f"the statistics of node {node} are not used: {error}")
                continue
            self._up += tree_bytes(sums)
            answered.append(whose[node])
            total, count = jax.tree.map(np.add, total, sums), count + counted
        if len(asked) and not count:
            raise TrainingError(f"round {number + 1}: no node sent statistics of use; the lines above say why")
        # A pass does not compute statistics of the network's companions, which therefore keep theirs.
        kept = {name: state.model.batch_stats[name] for name in total if name in self._problem.network.companions}
        total = {**total, **jax.tree.map(lambda leaf: np.asarray(leaf) * np.float32(count), kept)}
        return Sums(total, jnp.float32(count)), np.concatenate(answered)

    def _send(self, contents: dict[int, dict[str, Any]], kind: str, number: int) -> dict[int, Any]:
        """Sends each node its message and counts the bytes; returns the contents of the answers, by node."""
        self._down += sum(map(array_bytes, contents.values()))
        return self._roster.send(contents, kind, number + 1)

    def _stack(self, replies: Iterable[Reply], clients: Any, group: Any, present: Any) -> CohortResult:
        """Stacks replies into a cohort's result on one device; a client without an upload took no part."""
        replies, like = list(replies), self._result_like
        number = len(replies)
        rows = [
            one.upload if one.upload is not None else jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:]), like.upload)
            for one in replies
        ]
        metrics = []
        for phase, (names, _) in enumerate(like.metrics):
            of_phase = {name: _figures(replies, f"metric-{phase}-{name}", np.float32) for name in names}
            metrics.append((of_phase, _figures(replies, f"stepped-{phase}") > 0))
        return CohortResult(
            upload=jax.tree.map(lambda leaf, *of_rows: np.stack(of_rows).astype(leaf.dtype), like.upload, *rows),
            job=_on_host(np.arange(number, dtype=np.int32)),
            clients=clients,
            group=group,
            present=present,
            took_part=_on_host([one.upload is not None for one in replies]),
            num_steps=_figures(replies, "num-steps"),
            report=None,
            metrics=tuple(metrics),
            memory_of_labels={},
            memory_of_steps={},
            lane_steps=_on_host(np.int32(0)),
        )


def _present(sent: Sent) -> Any:
    """The rows of the selection that are jobs, bool [M]."""
    selection = sent.selection
    return np.ones(len(selection.clients), bool) if selection.present is None else np.asarray(selection.present)


def compiled_at(seconds: Mapping[int, float]) -> str:
    """Which nodes compiled for a second or longer, the slowest first; '' if none did."""
    slow = sorted((node for node, took in seconds.items() if took >= 1), key=lambda node: -seconds[node])
    shown = ", ".join(f"node {node} compiled {seconds[node]:.1f} s" for node in slow[:3])
    return shown + f" and {len(slow) - 3} more" * (len(slow) > 3)


def _on_host(values: Any, dtype: Any = None) -> Any:
    """A NumPy array in place of a JAX array; the next compiled stage moves it to the device."""
    return np.asarray(values, dtype)


def _figures(replies: Sequence[Reply], name: str, dtype: Any = np.int32) -> Any:
    """A figure of each job, as a NumPy array [R]; 0 for jobs without it."""
    return _on_host([one.figures.get(name, 0) for one in replies], dtype)
