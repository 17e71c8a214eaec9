"""Compares rounds with FedJAX's for clients' images on the disk: its SQLite file against a memory-mapped npz.

    pip install fedjax                                     # in an environment with this library
    python benchmarks/fedjax_sqlite.py --folder=/tmp/beside

Random images of 32x32x3 at --clients clients, one to 500 images each with a heavy tail; 10 clients a round, the same
for both. Both train FedAvg on all labels with the small CNN: one epoch in batches of 10, SGD with momentum, no
normalisation, no augmentation. Ours also tests the model on 200 images. Both run on one core, in turn, after an untimed
run of each round. Prints medians over the rounds, with CPU seconds beside seconds:

load        the images of the round's clients, from the disk (its pages are in memory) to the device
round       a round, including reading its images
"""

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable

import fedjax
import giant
import jax
import numpy as np
import optax
from fedjax.algorithms import fed_avg
from harness import hold_to_one_core

from fedjax_ssl.config import apply_arguments, base_config
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.run.experiment import Experiment, build_experiment
from fedjax_ssl.run.feed import cohort_of, make_feed
from fedjax_ssl.run.machine import use_machine
from fedjax_ssl.run.programs import compile_program

jax.tree_map = jax.tree.map  # FedJAX 0.0.17 uses this name, which JAX has removed
MOST, COHORT, BATCH_SIZE, LEARNING_RATE, MOMENTUM = 500, 10, 10, 0.03, 0.9


def config_of(folder: pathlib.Path, clients: int):
    """FedAvg on all labels, with images on the host."""
    config = apply_arguments(base_config(), "supervised,all_labels,no_server,no_pretraining")
    config.update_from_flattened_dict({
        "data.source": "npz", "data.path": str(folder / "data.npz"),
        "data.partition_file": str(folder / "partition.npz"), "data.examples_per_client": 0,
        "data.server_labels": giant.SERVER, "num_clients": clients, "clients_per_round": COHORT, "devices": 1,
        "client.epochs": 1, "client.batch_size": BATCH_SIZE, "client.learning_rate": LEARNING_RATE,
        "client.momentum": MOMENTUM, "client.weight_decay": 0.0, "client.clip_norm": 0.0, "schedule": "constant",
        "model.name": "cnn", "model.normalisation": "none", "augment.padding": 0, "augment.flavour": "none",
        "residence.data": "host",
    })  # fmt: skip
    return config


def write_sqlite(experiment: Experiment, path: pathlib.Path) -> None:
    """Writes the same clients in FedJAX's format, an example per row of each array."""
    held = experiment.views.held
    with fedjax.SQLiteFederatedDataBuilder(str(path)) as file:
        file.add_many(
            (name_of(client), {"x": held.inputs[rows], "y": held.hidden_labels[rows]})
            for client, rows in ((client, held.rows_of(client)) for client in range(len(held.sizes)))
        )


def name_of(client: int) -> bytes:
    """FedJAX's id of a client."""
    return b"%08d" % client


def their_round(experiment: Experiment, params, data: fedjax.FederatedData) -> Callable:
    """A round of FedJAX's FedAvg, as a function of the clients' ids."""
    network = experiment.problem.network

    def loss(params, batch, rng):
        del rng
        logits = network.predict(Model(params, {}), batch["x"]).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    optimizer = fedjax.optimizers.create_optimizer_from_optax(optax.sgd(LEARNING_RATE, MOMENTUM))
    algorithm = fed_avg.federated_averaging(
        jax.grad(loss),
        optimizer,
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH_SIZE, num_epochs=1, drop_remainder=False),
    )
    state = algorithm.init(params)

    def run(clients: np.ndarray):
        nonlocal state
        chosen = data.get_clients([name_of(client) for client in clients])
        state, _ = algorithm.apply(state, [(*client, jax.random.key(0)) for client in chosen])
        return state.params

    return run


def main() -> None:
    """Makes the federation, runs both in turn, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--clients", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    hold_to_one_core()
    sizes = np.minimum(MOST, 1 + 20 * np.random.default_rng(0).pareto(1.3, options.clients)).astype(int)
    giant.make(giant.Case(sizes, 32, 3), options.folder)
    config = config_of(options.folder, options.clients)
    config.num_rounds = 2 * options.rounds
    experiment = build_experiment(config)
    file = options.folder / "clients_of_fedjax.sqlite"
    if not file.exists():
        write_sqlite(experiment, file)
    theirs = fedjax.SQLiteFederatedData.new(str(file))
    cohort = cohort_of(experiment.problem, experiment.method, experiment.data)
    cohorts = [cohort(number) for number in range(2 * options.rounds)]

    def our_load(number: int):
        clients = cohort(number)
        return experiment.views.of(clients, experiment.views.width_for(clients))

    def their_load(number: int):
        chosen = theirs.get_clients([name_of(client) for client in cohorts[number]])
        return [jax.device_put(examples.all_examples()) for _, examples in chosen]

    with use_machine(config, experiment.data) as machine:
        program = compile_program(machine, [experiment], with_init=True, given=None)
        state = program.init(experiment.data, None)
        run_theirs = their_round(experiment, jax.device_get(state.model.params), theirs)
        with make_feed(machine, program.dispatch, experiment, experiment.data, experiment.hidden_labels, None) as feed:

            def our_round(number: int):
                nonlocal state
                state = feed.dispatch(state, number, 1).state
                return state.model

            sides = {
                "load, ours": our_load,
                "load, FedJAX": their_load,
                "round, ours": our_round,
                "round, FedJAX": lambda number: run_theirs(cohorts[number]),
            }
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
            for number in range(2 * options.rounds):
                for name, side in sides.items():
                    before = time.perf_counter(), time.process_time()
                    jax.block_until_ready(side(number))
                    times[name].append((time.perf_counter() - before[0], time.process_time() - before[1]))
    images = statistics.mean(int(sizes[clients].sum()) for clients in cohorts[options.rounds :])
    print(f"{options.clients} clients, {sizes.sum()} images, {COHORT} clients and {images:.0f} images a round")
    for name, found in times.items():
        seconds, cpu = (statistics.median(column) for column in zip(*found[options.rounds :]))
        print(f"{name:14} {1e3 * seconds:8.1f} ms {1e3 * cpu:8.1f} CPU-ms")


if __name__ == "__main__":
    main()
