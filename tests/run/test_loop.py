"""The loop over rounds and its listeners, with a program that counts instead of training."""

import contextlib
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import TrainingError
from fedjax_ssl.data.npz import read_arrays
from fedjax_ssl.engine.dispatch import Dispatch
from fedjax_ssl.engine.interface import State
from fedjax_ssl.engine.round import RoundResult
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.lines import METRICS, TIMINGS
from fedjax_ssl.records.snapshots import snapshot_files
from fedjax_ssl.records.workdir import Workdir
from fedjax_ssl.run import loop
from fedjax_ssl.run.feed import WholeFeed
from fedjax_ssl.run.loop import Listener, Run, RunsTogether, run_rounds
from fedjax_ssl.run.machine import find_machine
from fedjax_ssl.run.observe.listeners import KeepBest, SaveCheckpoints, SaveSnapshots, StopOnFailure, WriteRecords
from fedjax_ssl.run.signals import Signals
from fedjax_ssl.run.train import group_runs
from fedjax_ssl.run.wire import Traffic
from tests.helpers.runs import make_tiny_config


class Every(Listener):
    """Is due every so many rounds, and notes its turns."""

    def __init__(self, rounds=None, log=None, name=""):
        self.rounds, self.turns, self.log, self.name = rounds, [], log, name

    def next_due(self, done):
        return None if self.rounds is None else next(n for n in itertools.count(done + 1) if n % self.rounds == 0)

    def take(self, turn):
        self.turns.append(turn)
        if self.log is not None:
            self.log.append((turn.done, self.name))


def state_at(done, value):
    return State(jnp.int32(done), Model({"w": jnp.float32(value)}, {}), {}, {})


def one_round_later(state):
    return state._replace(round=state.round + 1, model=Model({"w": value_of(state) + 1}, {}))


def value_of(state):
    return state.model.params["w"]


@pytest.fixture
def counting(tmp_path):
    """Makes (machine, feed, group, states, traffic) of runs whose model is rounds + 100 times the seed."""
    traffic = Traffic(jobs=4, down=3, up=3, statistics_down=1, statistics_up=0)
    with contextlib.ExitStack() as stack:

        def make(seeds=(0,), begun=0, unhealthy=(), **fields):
            runs = []
            for seed in seeds:
                config = make_tiny_config(seed=seed, **fields)
                experiment = types.SimpleNamespace(
                    problem=types.SimpleNamespace(config=config),
                    dataset=types.SimpleNamespace(domains=()),
                    method=types.SimpleNamespace(wire_bytes=None),
                    data=None,
                    state_shape=None,
                )
                folder = stack.enter_context(contextlib.closing(Workdir(tmp_path / f"{seed}", config.to_dict())))
                folder.begin(begun)
                runs.append(Run(experiment, folder, state_at(begun, begun + 100 * seed)))
            group = RunsTogether(runs, types.SimpleNamespace(test_inputs=None, test_labels=None), None)
            sizes = []

            def dispatch(state, data, hidden_labels, rounds):
                sizes.append(int(rounds))
                results = []
                for _ in range(int(rounds)):
                    state = one_round_later(state)
                    number = int(np.ravel(state.round)[0])
                    healthy = np.array([(seed, number) not in unhealthy for seed in seeds])
                    each = {"uploads": 4, "dropped_uploads": 0, "test_accuracy": 0.5}
                    metrics = {name: jnp.full(state.round.shape, value) for name, value in each.items()}
                    metrics |= {"round": state.round, "a_loss": value_of(state)}
                    results.append(RoundResult(metrics, state.round + 10, healthy if len(seeds) > 1 else healthy[0]))
                    if not healthy.all():
                        break
                stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *results)
                return Dispatch(state, stacked, jnp.int32(len(results)), jnp.bool_(True))

            feed = WholeFeed(lambda tree: tree, dispatch, None, None)
            return (find_machine(config), feed, group, [run.state for run in runs], traffic), sizes

        yield make


def test_a_dispatch_ends_where_the_first_listener_is_due(counting):
    arguments, sizes = counting(num_rounds=20, rounds_per_dispatch=5)
    log = []
    fours, sixes, never = Every(4, log, "fours"), Every(6, log, "sixes"), Every(None, log, "never")
    (state,) = run_rounds(*arguments, [never, fours, sixes])
    # One round to measure its time, then five at a time, cut at 4, 6, 8, 12, 16, 18 and the end.
    assert sizes == [1, 3, 2, 2, 4, 4, 2, 2]
    done = [0, 1, 4, 6, 8, 12, 16, 18, 20]
    assert log == [(number, name) for number in done for name in ("never", "fours", "sixes")]
    assert int(state.round) == 20 and float(value_of(state)) == 20
    assert [turn.is_last for turn in never.turns] == [False] * 8 + [True]
    # Every listener receives each round's line once, in order.
    for kind in ("lines", "timings"):
        rounds = [line["round"] for turn in sixes.turns for line in getattr(turn, kind)[0]]
        assert rounds == list(range(1, 21))


def snapshot(model, images, labels):
    return {"w": model.params["w"]}


def test_runs_in_one_program_have_their_own_records_snapshots_and_checkpoints(counting, monkeypatch):
    clock = itertools.count(step=6.0)  # a dispatch takes six seconds
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    arguments, sizes = counting(seeds=(1, 2), num_rounds=7, rounds_per_dispatch=50)
    group = arguments[2]
    signals = Signals()
    stores = [Checkpoints(run.folder.path / "checkpoints") for run in group.runs]
    listeners = [
        WriteRecords(group.runs),
        SaveSnapshots(group, {"test": snapshot}, (0, 2, 5, 99)),
        SaveCheckpoints(group, stores, [None, None], 3, signals, KeepBest(group, [])),
    ]
    assert [listener.next_due(2) for listener in listeners] == [None, 5, 3]
    assert [listener.next_due(99) for listener in listeners] == [None, None, 102]
    states = run_rounds(*arguments, listeners)
    assert sizes == [1, 1, 1, 2, 1, 1]  # up to 1, 2, 3, 5, 6, 7
    for run, store, seed in zip(group.runs, stores, (1, 2)):
        lines = run.folder.read(METRICS)
        assert [line["a_loss"] for line in lines] == [100 * seed + number for number in range(1, 8)]
        assert (lines[0]["bytes_down"], lines[0]["bytes_up"]) == (4 * 3 + 1, 4 * 3)
        timings = run.folder.read(TIMINGS)
        assert [line["lane_steps"] for line in timings if "seconds" in line] == list(range(11, 18))
        # Of each round, and of one of two seeds.
        assert [line["seconds"] for line in timings if "seconds" in line] == [3, 3, 3, 1.5, 1.5, 3, 3]
        assert {line["seeds"] for line in timings if "seconds" in line} == {2}
        assert [line["round"] for line in timings if "checkpoint_seconds" in line] == [3, 6, 7]
        files = snapshot_files(run.folder.path / "snapshots")
        snapshots = {number: read_arrays(str(file), ("w",)) for number, file in files.items()}
        assert {number: float(each["w"]) for number, each in snapshots.items()} == {
            number: 100 * seed + number for number in (0, 2, 5, 7)
        }
        assert store.rounds() == [6, 7]  # 3 was removed
        assert float(value_of(store.restore(state_at(0, 0)).state)) == 100 * seed + 7
    assert [float(value_of(state)) for state in states] == [107, 207]


def test_a_failure_is_raised_after_its_line_and_before_a_checkpoint(counting):
    arguments, _ = counting(seeds=(1, 2), num_rounds=9, rounds_per_dispatch=4, unhealthy={(2, 3)})
    group, later = arguments[2], Every(1000)
    with pytest.raises(TrainingError) as caught:
        run_rounds(*arguments, [WriteRecords(group.runs), StopOnFailure(group.runs), later])
    assert str(caught.value) == "seed 2, round 3: the global state is not finite (a_loss 203.0)"
    assert [line["round"] for line in group.runs[0].folder.read(METRICS)] == [1, 2, 3]
    assert [turn.done for turn in later.turns] == [0, 1]


ACCURACIES = [0.3, 0.5, 0.4, 0.5, 0.45, 0.6, 0.6, 0.5]  # of rounds 1, 2, ...
UPLOADS = [1, 2, 3, 4, 4, 1, 1, 1]


def has_no_test(rounds, every):
    return (rounds % every != 0) & (rounds != 1) & (rounds != len(ACCURACIES))


def measured(arguments):
    """The same arguments, but each round has a validation accuracy from `ACCURACIES` and uploads from `UPLOADS`."""
    machine, feed, group, states, traffic = arguments
    every = group.runs[0].experiment.problem.config.eval_every

    class Measured(WholeFeed):
        def dispatch(self, state, done, rounds):
            result = feed.dispatch(state, done, rounds)
            of_rounds = done + np.arange(int(result.rounds_done))
            metrics = {
                **result.results.metrics,
                "validation_accuracy": np.array(ACCURACIES)[of_rounds],
                "uploads": np.array(UPLOADS)[of_rounds],
            }
            lacks = {"validation_accuracy": has_no_test(of_rounds + 1, every)}
            return result._replace(results=result.results._replace(metrics=metrics, lacks=lacks))

    return machine, Measured(None, None, None, None), group, states, traffic


@pytest.mark.parametrize("stop, ends", [
    ({"stop.patience": 3}, 5),  # 0.5 of round 2 is not reached again before
    ({"stop.patience": 4, "stop.bytes": 1e6}, 8),  # 0.6 of round 6 is never exceeded, but then all rounds are done
    ({"stop.patience": 1, "eval_every": 2}, 4),  # not in round 3, which has no test
    ({"stop.patience": 2, "eval_every": 2, "stop.bytes": 16 + 19 + 22}, 3),  # bytes do not wait for a test
    ({"stop.patience": 3, "eval_every": 2}, 8),  # in round 4 it is two rounds since 0.5, and round 6 has 0.6
    # Bytes per round: 13 for the message to four clients and the statistics, 3 for each upload.
    ({"stop.bytes": 16 + 19 + 22 + 22}, 4),  # a fourth round could use 22 bytes, like the third
    ({"stop.bytes": 16 + 19 + 22 + 22 - 1}, 3),
    ({"stop.bytes": 16 + 19 + 22 + 25 + 25 + 16 + 25 - 1}, 6),  # and a seventh 25, like the fourth
    ({"stop.bytes": 1}, 1),
])  # fmt: skip
def test_patience_and_bytes_end_a_run_in_the_same_round_however_it_is_cut(counting, stop, ends):
    """Compares dispatches of several rounds, and a run resumed after its second round."""
    for begun in (0, 2):
        if begun >= ends:
            continue
        arguments, _ = counting(seeds=(begun,), begun=begun, num_rounds=8, rounds_per_dispatch=5, **stop)
        folder, listener = arguments[2].runs[0].folder, Every()
        before = [{"round": n, "validation_accuracy": ACCURACIES[n - 1], "bytes_down": 13} for n in range(1, begun + 1)]
        folder.append(METRICS, [{**line, "bytes_up": 3 * line["round"]} for line in before])
        run_rounds(*measured(arguments), [WriteRecords(arguments[2].runs), listener])
        assert [turn.done for turn in listener.turns if turn.is_last] == [ends]
        assert [line["round"] for line in folder.read(METRICS)] == list(range(1, ends + 1))


def test_seconds_end_a_start_after_a_dispatch_and_the_next_one_goes_on(counting, monkeypatch):
    clock = itertools.count(step=2.0)
    monkeypatch.setattr("fedjax_ssl.run.stopping.time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    for begun, ends in ((0, 3), (3, 6)):
        arguments, _ = counting((begun,), begun, num_rounds=20, rounds_per_dispatch=1, **{"stop.seconds": 5.0})
        listener = Every()
        run_rounds(*arguments, [listener])
        assert [turn.done for turn in listener.turns if turn.is_last] == [ends]


@pytest.mark.parametrize("stop", [{}, {"stop.patience": 2}, {"stop.bytes": 1e6}, {"stop.seconds": 1.0}])
def test_seeds_of_other_shapes_and_those_that_may_be_stopped_train_apart(stop):
    problem = types.SimpleNamespace(config=make_tiny_config(**{"data.validation": 20, **stop}))
    runs = [
        types.SimpleNamespace(experiment=types.SimpleNamespace(problem=problem, views=None, shapes=shapes), round=0)
        for shapes in (1, 1, 2, 2)
    ]
    assert [len(group) for group in group_runs(len(runs), runs)] == ([1, 1, 1, 1] if stop else [2, 2])
