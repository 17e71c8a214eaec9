"""The parts of a run, built from its configuration: data, partition, network, method; and its first state."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_ssl.client.confidence import import_rule
from fedjax_ssl.data import (
    Dataset,
    FederatedData,
    Partition,
    dataset_facts,
    federate,
    load_dataset,
    load_partition,
    make_partition,
)
from fedjax_ssl.encoders import backbone_of
from fedjax_ssl.engine.delivery import first_memory, has_memory
from fedjax_ssl.engine.interface import Method, Problem, State
from fedjax_ssl.engine.round import init_key, trace_exchange
from fedjax_ssl.errors import UserError
from fedjax_ssl.kinds import IMAGE, kind_name, kind_of
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.methods import find_method
from fedjax_ssl.models.network import build_network
from fedjax_ssl.run.features import through_encoder
from fedjax_ssl.run.hosts import tree_from_first
from fedjax_ssl.run.privacy import check_private


class Experiment(NamedTuple):
    """The parts of a run, before anything is trained or written."""

    problem: Problem  # the fixed part
    method: Method  # the method
    data: FederatedData  # the federation, on the device
    hidden_labels: jax.Array  # int32 [N], the truth, for scoring only
    partition: Partition  # who owns which rows
    dataset: Dataset  # on the host
    # The state before the first round, of data; of this problem and method, see `initialiser`.
    init: Callable[[FederatedData], State]
    state_shape: State  # a state's shapes


def build_experiment(config: ConfigDict, partition_file: pathlib.Path | None = None) -> Experiment:
    """The parts of one run; see `build_experiments`."""
    return build_experiments([config], [partition_file])[0]


def build_experiments(configs: list[ConfigDict], partition_files: list[pathlib.Path | None]) -> list[Experiment]:
    """The parts of the runs of one configuration with several seeds, with arrays of the same shapes.

    Args:
        configs: valid configurations that differ in nothing but the seed.
        partition_files: the partitions of runs that are resumed; None for a run that begins.

    Raises:
        UserError: the data are missing or do not fit the configuration, or a name is unknown.
    """
    config = configs[0]
    dataset = through_encoder(config, load_dataset(config.data))

    def find_partitions() -> list[Partition]:
        return [
            load_partition(file, len(dataset.y_train), config.num_clients)
            if file is not None and file.exists()
            else make_partition(
                dataset.y_train, dataset.num_classes, config.data, config.num_clients, c.seed, dataset.owners
            )
            for c, file in zip(configs, partition_files)
        ]

    partitions = tree_from_first(find_partitions, [Partition._make((0, [0] * config.num_clients, 0, 0))] * len(configs))
    width = max(len(rows) for partition in partitions for rows in partition.client_rows)
    shared = make_problem(config, dataset_facts(dataset))
    experiments: list[Experiment] = []
    first = None
    for c, partition in zip(configs, partitions):
        problem = shared._replace(config=c)
        method = make_method(problem)
        data, hidden_labels = federate(
            dataset,
            partition,
            c.seed,
            max(1, width),
            first,
            config.data.reveal_labels,
            config.data.centralised,
            c.attack,
        )
        first = first or data
        if experiments:
            init, shape = experiments[0].init, experiments[0].state_shape
        else:
            _check_delivery(config, method)
            init = initialiser(problem, method)
            shape = jax.eval_shape(init, data)
            check_private(problem, method, shape, data)
        experiments.append(Experiment(problem, method, data, hidden_labels, partition, dataset, init, shape))
    return experiments


def make_problem(config: ConfigDict, facts: Mapping[str, Any]) -> Problem:
    """What is fixed in a run, from its configuration and what is known of the inputs, see `dataset_facts`.

    Raises:
        UserError: a name is unknown, a field does not fit the inputs, or the method is not for them.
    """
    entry, kind = find_method(config.method), kind_of(facts)
    if entry.images_alone and kind_name(facts) != IMAGE:
        raise UserError(f"method={config.method} {entry.images_alone}, but the data are {kind.noun}")
    views = kind.views(config, facts)
    network = build_network(
        config, facts, entry.heads_of(config), entry.embedding, entry.companions, backbone_of(config)
    )
    rule = import_rule(config.confidence.kind)
    return Problem(config, network, views.weak, views.strong, facts["num_classes"], views.pair, own_rule=rule)


def make_method(problem: Problem, **of_network: Any) -> Method:
    """The run's method.

    Args:
        problem: the run.
        of_network: fields of the network that the method's has otherwise, such as `given`: whatever it makes of the
            first model, such as copies of it, it makes of that one.
    """
    network = problem.network._replace(**of_network)
    return find_method(problem.config.method).factory(problem._replace(network=network))


def _check_delivery(config: ConfigDict, method: Method) -> None:
    """Raises a UserError if a method's uploads cannot have what befalls them on their way."""
    if config.compression.kind != "none" and method.wire_bytes is not None:
        raise UserError(
            f"compression.kind={config.compression.kind!r} is not for {config.method}, which counts its bytes itself"
        )
    if method.personal is not None:
        for field, value in {"attack.kind": config.attack.kind, "availability.late": config.availability.late}.items():
            if value not in ("none", "labels", "poison", 0.0):
                raise UserError(
                    f"{field}={value!r} is not for {config.method}: what a client changes is not told from the model "
                    "that went to all"
                )


def initialise(experiment: Experiment, data: FederatedData, given: Model | None = None) -> State:
    """The state before the first round: initialised, pre-trained, with statistics from the server's images.

    Args:
        experiment: the run.
        data: its data.
        given: parts of a model to begin with in place of fresh ones.
    """
    if given is None:
        return experiment.init(data)
    problem = experiment.problem
    return initialiser(problem, make_method(problem, given=given))(data)


def initialiser(problem: Problem, method: Method) -> Callable[[FederatedData], State]:
    """The first state of data; jitted, so that one trace serves whoever asks for its shapes, and whoever compiles."""

    @jax.jit
    def init(data: FederatedData) -> State:
        key = init_key(data.seed)
        state = method.init(data, key)
        if method.phases and has_memory(problem.config):
            exchange = trace_exchange(problem, method, state, data)
            clients, server = first_memory(problem.config, exchange.upload, exchange.selection)
            state = state._replace(clients={**state.clients, **clients}, server={**state.server, **server})
        return method.statistics(state, data, jnp.zeros((0,), jnp.int32), key)

    return init
