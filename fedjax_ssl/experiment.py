"""A run from its configuration to its trained model: `train(config, workdir)`."""

import contextlib
import functools
import importlib.metadata
import os
import pathlib
import platform
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.augment import strong_augment, weak_augment
from fedjax_ssl.checkpoints import Checkpoints
from fedjax_ssl.clients import Cohort, train_cohort
from fedjax_ssl.config import validate
from fedjax_ssl.data import (
    FederatedData,
    Partition,
    federate,
    load_dataset,
    load_partition,
    make_partition,
    save_partition,
)
from fedjax_ssl.errors import TrainingError
from fedjax_ssl.evaluation import tree_bytes
from fedjax_ssl.method import Method, Problem, State
from fedjax_ssl.methods import METHODS
from fedjax_ssl.network import build_network
from fedjax_ssl.progress import RoundProgress
from fedjax_ssl.rounds import init_key, make_dispatch, make_round
from fedjax_ssl.statistics import num_exchanging
from fedjax_ssl.workdir import CHECKPOINTS, METRICS, PARTITION, TIMINGS, Workdir

# On a CPU one lane at a time: convolutions under vmap become grouped ones, which its backend runs several times
# slower. Elsewhere the whole cohort side by side.
DEFAULT_LANES = {"cpu": 1}
DISPATCH_CAPACITY = 50  # rounds in one dispatch at the most
DISPATCH_SECONDS = 1.0  # aimed at: how long a progress bar stands still and a signal waits


class Experiment(NamedTuple):
    """Everything that a run is made of, before anything is trained or written.

    Attributes:
        problem: the fixed part.
        method: the method.
        data: the federation, on the device.
        hidden_labels: int32 [N], the truth, for scoring only.
        partition: who owns which rows.
    """

    problem: Problem
    method: Method
    data: FederatedData
    hidden_labels: jax.Array
    partition: Partition


def train(config: ConfigDict, workdir: str | os.PathLike | None = None) -> State:
    """Trains what a configuration describes, or takes the run in `workdir` up where it was left.

    Args:
        config: see `fedjax_ssl.config.base_config`.
        workdir: the run's folder; by default a fresh one under runs/. It gets config.json, partition.npz,
            metrics.jsonl (a line a round, the same whatever the clock says), timings.jsonl, summary.json and
            checkpoints/.

    Returns:
        The state after the last round.

    Raises:
        UserError: the configuration, the data or the folder is not usable; nothing has been written.
        TrainingError: the global state is no longer finite, or every upload of a round was dropped.
        KeyboardInterrupt, SystemExit: after SIGINT or SIGTERM, with a checkpoint written.
    """
    validate(config)
    use_compilation_cache()
    with contextlib.closing(Workdir(workdir, config.to_dict())) as folder:
        experiment = build_experiment(config, folder.path / PARTITION if folder.is_begun else None)
        # Tracing meets whatever is still wrong; compiling, which takes longer, waits until the folder is ours.
        started = time.monotonic()
        init = jax.jit(functools.partial(initialise, experiment)).trace(experiment.data)
        like = init.out_info
        round_fn = make_round(experiment.problem, experiment.method, default_lanes(config))
        dispatch = jax.jit(make_dispatch(round_fn, config.rounds_per_dispatch or DISPATCH_CAPACITY), donate_argnums=0)
        dispatch = dispatch.lower(like, experiment.data, experiment.hidden_labels, jnp.int32(1))
        state = restore_newest(folder, like)

        # From here on things are written.
        first_round = 0 if state is None else int(state.round)
        folder.begin(first_round)
        with (
            contextlib.closing(Checkpoints(folder.path / CHECKPOINTS)) as checkpoints,
            RoundProgress(config.num_rounds, first_round) as progress,
            _Signals() as signals,
        ):
            progress.say(f"workdir {folder.path}" + (f", from round {first_round}" if first_round else ""))
            if not (folder.path / PARTITION).exists():
                save_partition(folder.path / PARTITION, experiment.partition)
            dispatch = dispatch.compile()
            init = init.lower().compile() if state is None else None
            folder.append(TIMINGS, [{"round": first_round, "compile_seconds": time.monotonic() - started}])
            if state is None:
                state = init(experiment.data)
                checkpoints.save(0, state)
            state = _run_rounds(experiment, dispatch, state, folder, checkpoints, progress, signals)
        folder.write_summary(summarise(experiment, folder))
    return state


def restore_newest(folder: Workdir, like: State) -> State | None:
    """The state of a run's newest checkpoint; None for a run that has none yet."""
    if not folder.is_begun:
        return None
    with contextlib.closing(Checkpoints(folder.path / CHECKPOINTS)) as checkpoints:
        return None if checkpoints.latest_round() is None else checkpoints.restore(like)


def build_experiment(config: ConfigDict, partition_file: pathlib.Path | None = None) -> Experiment:
    """Everything that a run is made of.

    Args:
        config: a valid configuration.
        partition_file: the partition of a run that is taken up again, where there is one.

    Raises:
        UserError: the data are not there or not what the configuration needs, or a name is unknown.
    """
    dataset = load_dataset(config.data)
    if partition_file is not None and partition_file.exists():
        partition = load_partition(partition_file, len(dataset.y_train), config.num_clients)
    else:
        partition = make_partition(dataset.y_train, dataset.num_classes, config.data, config.num_clients, config.seed)
    data, hidden_labels = federate(dataset, partition, config.seed)
    weak = functools.partial(weak_augment, flip=dataset.flip, padding=config.augment.padding)
    strong = functools.partial(
        strong_augment,
        flip=dataset.flip,
        padding=config.augment.padding,
        flavour=config.augment.flavour,
        num_ops=config.augment.num_ops,
        magnitude=config.augment.magnitude,
    )
    problem = Problem(config, build_network(config, dataset), weak, strong, dataset.num_classes)
    return Experiment(problem, METHODS[config.method](problem), data, hidden_labels, partition)


def initialise(experiment: Experiment, data: FederatedData) -> State:
    """The state before the first round: initialised, pre-trained, with statistics from the server's images."""
    state = experiment.method.init(data, init_key(data.seed))
    return experiment.method.statistics(state, data, jnp.zeros((0,), jnp.int32))


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX has been told where, or not to."""
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "fedjax_ssl" / "xla"))


def default_lanes(config: ConfigDict) -> int:
    """How many clients train side by side, where the configuration leaves it to the backend."""
    lanes = config.lanes or DEFAULT_LANES.get(jax.default_backend(), config.clients_per_round)
    return min(lanes, config.clients_per_round)


def _run_rounds(
    experiment: Experiment,
    dispatch: Callable,
    state: State,
    folder: Workdir,
    checkpoints: Checkpoints,
    progress: RoundProgress,
    signals: "_Signals",
) -> State:
    """Dispatches rounds until all are done; between dispatches the metrics, checkpoints and signals have their turn."""
    config = experiment.problem.config
    done, num_rounds = int(state.round), config.num_rounds
    traffic = bytes_per_client(experiment, state)
    rounds = 1  # the first dispatch tells how long a round takes
    signals.act()
    while done < num_rounds:
        to_checkpoint = config.checkpoint_every - done % config.checkpoint_every
        rounds = min(rounds, num_rounds - done, to_checkpoint)
        before = time.monotonic()
        result = dispatch(state, experiment.data, experiment.hidden_labels, jnp.int32(rounds))
        state, metrics = result.state, jax.device_get(result.metrics)
        ran = int(result.rounds_done)
        seconds = (time.monotonic() - before) / ran

        lines = [to_record(metrics, index, traffic, config) for index in range(ran)]
        folder.append(METRICS, lines)
        folder.append(TIMINGS, [{"round": line["round"], "seconds": seconds} for line in lines])
        progress.update(lines[-1])
        if not result.healthy:
            raise TrainingError(_what_went_wrong(lines[-1]))
        done += ran
        if done % config.checkpoint_every == 0 or done == num_rounds or signals.received:
            checkpoints.save(done, jax.device_get(state))
        signals.act()
        rounds = config.rounds_per_dispatch or int(np.clip(DISPATCH_SECONDS / seconds, 1, DISPATCH_CAPACITY))
    return state


def bytes_per_client(experiment: Experiment, state: State) -> dict[str, int]:
    """Bytes that one client sends or receives in a round, from the leaves of what travels."""
    method, data, config = experiment.method, experiment.data, experiment.problem.config

    def exchange(state, data):
        broadcast = method.broadcast(state, data)
        cohort = Cohort(jnp.zeros((1,), jnp.int32), jax.tree.map(lambda x: x[:1], state.clients), jax.random.key(0))
        return broadcast, train_cohort(method.phases, broadcast, data, cohort, 1).finished.upload

    broadcast, upload = jax.eval_shape(exchange, state, data)
    network = experiment.problem.network
    exchanging = num_exchanging(network, config.model.statistics, config.clients_per_round, config.num_clients)
    return {
        "down": tree_bytes(broadcast),
        "up": tree_bytes(upload),
        "statistics_down": exchanging * tree_bytes(state.params),
        "statistics_up": exchanging * tree_bytes(state.batch_stats),
    }


def to_record(metrics: dict[str, np.ndarray], index: int, traffic: dict[str, int], config) -> dict[str, Any]:
    """The line of metrics.jsonl for entry `index` of a dispatch's buffer."""
    record = {name: values[index].item() for name, values in metrics.items()}
    return {
        "round": record.pop("round"),
        **record,
        "bytes_down": traffic["down"] * config.clients_per_round + traffic["statistics_down"],
        "bytes_up": traffic["up"] * record["uploads"] + traffic["statistics_up"],
    }


def summarise(experiment: Experiment, folder: Workdir) -> dict[str, Any]:
    """What summary.json holds, from the records in the folder."""
    lines, timings = folder.read(METRICS), folder.read(TIMINGS)
    last = lines[-1]
    best = max(lines, key=lambda line: line["test_accuracy"])
    labels = {name: last[name] for name in last if name.startswith(("pseudo_label", "qualified"))}
    return {
        "method": experiment.problem.config.method,
        "seed": experiment.problem.config.seed,
        "rounds": last["round"],
        "test_accuracy": last["test_accuracy"],
        "best_test_accuracy": best["test_accuracy"],
        "best_round": best["round"],
        **labels,
        "seconds": sum(line.get("seconds", 0.0) for line in timings),
        "compile_seconds": sum(line.get("compile_seconds", 0.0) for line in timings),
        "bytes_down": sum(line["bytes_down"] for line in lines),
        "bytes_up": sum(line["bytes_up"] for line in lines),
        "dropped_uploads": sum(line["dropped_uploads"] for line in lines),
        "device": f"{jax.devices()[0].device_kind} x {jax.device_count()}",
        "backend": jax.default_backend(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("fedjax_ssl", "jax", "flax", "optax")},
        },
    }


def _what_went_wrong(line: dict[str, Any]) -> str:
    losses = ", ".join(f"{name} {line[name]}" for name in line if name.endswith("_loss"))
    if line["dropped_uploads"] and line["dropped_uploads"] == line["uploads"]:
        return f"round {line['round']}: none of the {line['uploads']} uploads is finite ({losses})"
    return f"round {line['round']}: the global state is not finite ({losses})"


class _Signals:
    """SIGINT and SIGTERM wait for the end of a dispatch; a second one of the same kind does not."""

    def __init__(self):
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        def remember(number, _):
            self.received = number
            signal.signal(number, self._before[number])

        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, remember)
        except ValueError:  # not in the main thread: whoever started it takes the signals
            pass
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def act(self) -> None:
        """Ends the run as the signal asks, once the state is safe."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(128 + self.received)
