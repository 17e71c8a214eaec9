"""The parts of a run, built from its configuration: data, partition, network, method; and its first state."""

import functools
import pathlib
import traceback
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.client.confidence import import_rule
from fedjax_ssl.client.personal import with_own_parts
from fedjax_ssl.config import numbers_of, replace_numbers
from fedjax_ssl.data import Dataset, FederatedData, Partition, dataset_facts
from fedjax_ssl.data.federated import Holdings, hold, put_whole, shapes_of, small_arrays, table_width
from fedjax_ssl.data.kinds import IMAGE, kind_name, kind_of
from fedjax_ssl.data.views import MOST_ENTRIES, Views, widths_of
from fedjax_ssl.engine.interface import Method, Problem, State
from fedjax_ssl.engine.round import init_key, select_of
from fedjax_ssl.engine.tracing import trace_exchange
from fedjax_ssl.engine.untrusted.delivery import first_memory, has_memory
from fedjax_ssl.engine.untrusted.privacy import NUM_KEYS
from fedjax_ssl.methods import find_method
from fedjax_ssl.models.encoders import backbone_of
from fedjax_ssl.models.network import build_network
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.records.words import labels_revealed
from fedjax_ssl.run.decided import decide, find_partitions
from fedjax_ssl.run.features import read_data
from fedjax_ssl.run.machine import find_machine, memory_limit, use
from fedjax_ssl.run.observe.clock import doing
from fedjax_ssl.run.privacy import check_private, secret_of
from fedjax_ssl.run.residence import Residence, choose, memory_bytes

_NO_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Experiment(NamedTuple):
    """The parts of a run, before anything is trained or written."""

    problem: Problem  # the fixed part
    method: Method  # the method
    data: FederatedData  # the federation, on the device; with `views` the first view
    hidden_labels: jax.Array  # int32 [N], the truth, for scoring only
    partition: Partition  # who owns which rows
    dataset: Dataset  # on the host
    init: Callable[..., State]  # see `initialiser`
    # A state's shapes. With `views`, rows of clients are those of a view of the largest width, as `data` is.
    state_shape: State
    views: Views | None = None  # makes views of a round's clients; None: `data` is the whole federation
    residence: Residence = Residence("device", "device", True)
    secret: bytes = b""  # see `secret_of`

    @property
    def largest(self) -> FederatedData:
        """The largest data of a round, or their shapes."""
        return self.data if self.views is None else self.views.shapes(self.views.widths[-1])[0]

    @property
    def examples(self) -> str:
        """How many classes, clients and examples there are, and how many have visible labels, in a line."""
        owned, number = self.partition, sum(map(len, self.partition.client_rows))
        labelled = number if labels_revealed(self.problem.config) else len(owned.labelled_rows)
        classes, clients, at_server = self.dataset.num_classes, len(owned.client_rows), len(owned.server_index)
        at_clients = f"{clients:,} clients with {number:,} training examples, {labelled:,} labelled"
        tests = f"{len(owned.validation_index):,} for validation, {len(self.dataset.y_test):,} for testing"
        return f"{classes} classes; {at_clients}; {at_server:,} labelled at the server, {tests}"

    @property
    def test_width(self) -> int:
        """The length of a client's test images with padding, see `table_width`; 0: no client has any."""
        sizes = np.array([len(rows) for rows in self.partition.client_test_rows])
        return table_width(sizes) if sizes.any() else 0

    @property
    def shapes(self) -> Hashable:
        """All shapes that differ between seeds. Seeds of equal shapes share their programs."""
        rounds = self.data if self.views is None else [self.views.shapes(width) for width in self.views.widths]
        leaves, structure = jax.tree.flatten(rounds)
        return self.test_width, structure, *((leaf.shape, leaf.dtype) for leaf in leaves)


def build_experiment(config: ConfigDict) -> Experiment:
    """The parts of one run; see `build_experiments`."""
    return build_experiments([config], [None])[0]


def build_whole(config: ConfigDict, reader: str) -> Experiment:
    """The parts of one run whose federation is on the device as a whole.

    Raises a UserError as `build_experiments` does, or if the federation lies elsewhere, see `config.residence`.
    """
    experiment = build_experiment(config)
    if experiment.views is not None:
        raise UserError(
            f"{reader} takes a federation that is on the device as a whole, and this one is not: residence.data is "
            f"{experiment.residence.images!r}, residence.clients {experiment.residence.clients!r}"
        )
    return experiment


def build_experiments(
    configs: list[ConfigDict], partition_files: list[pathlib.Path | None], secrets: list[bytes] | None = None
) -> list[Experiment]:
    """The parts of runs whose configurations differ in the seed and in numbers alone.

    A seed has the shapes that it would have alone, and so equal results to the bit. Raises a UserError if the data are
    missing or do not fit the configuration, or a name is unknown.

    `partition_files` are of runs that are resumed, None for a run that begins. For `secrets` see `secret_of`; None: new
    ones.
    """
    with doing("reading the data") as task:
        dataset = read_data(configs[0], functools.partial(setattr, task, "text"))
    drawn = next((str(file) for file in partition_files if file is not None and file.exists()), "")
    configs = decide(configs, dataset, drawn)
    config = configs[0]
    partitions = find_partitions(configs, partition_files, dataset)
    told = config.data.reveal_labels, config.data.centralised
    secrets = secrets or [secret_of(c) for c in configs]
    helds = [
        hold(dataset, partition, c.seed, *told, c.attack)._replace(
            numbers=numbers_of(c), secret=np.frombuffer(secret, np.uint32).reshape(NUM_KEYS, 2) if secret else None
        )
        for c, partition, secret in zip(configs, partitions, secrets)
    ]
    shared = make_problem(config, dataset_facts(dataset), dataset.lacks_labels)
    method = make_method(shared)
    init = initialiser(shared)
    experiments: list[Experiment] = []
    first: FederatedData | None = None
    for c, partition, held, secret in zip(configs, partitions, helds, secrets):
        problem, (residence, views) = shared._replace(config=c), _placed(shared, method, init, held)
        data, hidden_labels = put_whole(held, first) if views is None else views.first()
        first = first or data
        shape = _shape_of_first_state(config, init, data)
        own = make_method(problem)
        if not experiments or held.numbers != helds[len(experiments) - 1].numbers:
            _check_delivery(c, own, has_rows=views is not None and bool(jax.tree.leaves(shape.records)))
            check_private(problem, own, shape, data)
        parts = problem, own, data, hidden_labels, partition, dataset, init, shape, views, residence, secret
        experiments.append(Experiment(*parts))
    return experiments


def _shape_of_first_state(config: ConfigDict, init: Callable[..., State], data: FederatedData) -> State:
    with use(find_machine(config)):  # where it will be made: JAX takes the same trace for its program
        return jax.eval_shape(init, data, None)


def _placed(
    problem: Problem, method: Method, init: Callable[[FederatedData], State], held: Holdings
) -> tuple[Residence, Views | None]:
    """Chooses a seed's residence from sizes alone, before anything is compiled; with views if it is not whole."""
    config = problem.config
    small = small_arrays(held)
    select = select_of(problem, method)
    begins, by_state = State(jnp.int32(0), Model({}, ())), False
    try:
        clients = len(jax.eval_shape(lambda data: select(begins, data, jax.random.key(0)).clients, small))
    except (KeyError, TypeError, AttributeError):
        clients, by_state = config.num_clients, True
    widths = widths_of(held.sizes, clients)
    room = memory_limit()
    if config.num_clients * widths[-1] > MOST_ENTRIES:  # too large even to trace the tables of all clients
        example = Views(held, widths, clients, on_device=False).shapes(widths[-1])[0]
    else:
        example = shapes_of(held, jax.ShapeDtypeStruct((config.num_clients, widths[-1]), jnp.int32))
    shape = _shape_of_first_state(config, init, example)
    _check_state(config.method, shape, example)
    needed = memory_bytes(shape, config.num_clients)
    residence = choose(config, held, needed, room, widths[-1])
    if by_state and not residence.whole:
        raise UserError(
            f"method={config.method} draws its clients by the state of the round before, so all must be on the device: "
            "residence.data='device', residence.clients='device'"
        )
    if residence.whole:
        return residence, None
    recalled = 0
    if method.recalls is not None:
        recalled = jax.eval_shape(method.recalls, shape, jax.ShapeDtypeStruct((clients,), jnp.int32)).size
    return residence, Views(held, widths, clients, residence.images == "device", recalled)


def make_problem(config: ConfigDict, facts: Mapping[str, Any], lacks_labels: bool) -> Problem:
    """Builds the fixed part of a run on inputs with these facts, see `dataset_facts`.

    Raises a UserError if a name is unknown, or a field or the method does not fit the inputs.
    """
    entry, kind = find_method(config.method), kind_of(facts)
    if entry.images_alone and kind_name(facts) != IMAGE:
        raise UserError(f"method={config.method} {entry.images_alone}, but the data are {kind.noun}")
    views = kind.views(config, facts)
    network = build_network(
        config, facts, kind, entry.heads_of(config), entry.embedding, entry.companions, backbone_of(config)
    )
    return Problem(
        config,
        network,
        views.weak,
        views.strong,
        facts["num_classes"],
        views.pair,
        own_rule=import_rule(config.confidence, facts["num_classes"]),
        lacks_labels=lacks_labels,
    )


def make_method(problem: Problem, **of_network: Any) -> Method:
    """The run's method, with `personal_parts` if the configuration names any.

    `of_network` are fields to replace in the network. With `given`, the method makes copies and other models from this
    model instead of a fresh one.
    """
    problem = problem._replace(network=problem.network._replace(**of_network))
    method = find_method(problem.config.method).factory(problem)
    return with_own_parts(problem, method) if problem.config.personal_parts else method


def _check_state(name: str, shape: State, data: FederatedData) -> None:
    """Raises a UserError if checkpoints cannot hold the first state, or if not every client has a row in it."""
    for path, leaf in jax.tree.leaves_with_path(shape):
        entry = f"method={name}: in its first state {jax.tree_util.keystr(path)[1:]}"
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise UserError(f"{entry} is a PRNG key, which no checkpoint can hold: fold keys from the round instead")
        if not leaf.size:
            raise UserError(f"{entry} has the shape {leaf.shape}: no checkpoint can hold an array without numbers")
    for part, ids in {"clients": data.ids, "records": data.record_ids}.items():
        for path, leaf in jax.tree.leaves_with_path(getattr(shape, part)):
            if leaf.shape[:1] != ids.shape:
                raise UserError(
                    f"method={name}: in its first state {part}{jax.tree_util.keystr(path)} has the shape {leaf.shape}; "
                    f"it needs a row for each client, as many as data.{'ids' if part == 'clients' else 'record_ids'}"
                )


def _check_delivery(config: ConfigDict, method: Method, has_rows: bool) -> None:
    """Raises a UserError if attacks, compression or delays are set that the method's uploads do not allow.

    `has_rows`: whether the device has the server's records of a round's clients only.
    """
    late = config.availability.late if config.availability.late_weight else 0.0  # of uploads that count
    if has_rows and late:
        raise UserError(
            f"availability.late={late:g} with availability.late_weight above 0 needs {config.method}'s records of all "
            "clients on the device: set residence.data='device' and residence.clients='device'"
        )
    if config.stop.bytes and not method.phases:
        raise UserError(f"stop.bytes={config.stop.bytes:g} is not for {config.method}, which sends nothing to clients")
    if config.compression.kind != "none" and method.wire_bytes is not None:
        raise UserError(
            f"compression.kind={config.compression.kind!r} is not for {config.method}, which counts its bytes itself"
        )
    if method.personal is not None:
        for field, value in {"attack.kind": config.attack.kind, "availability.late": late}.items():
            if value not in ("none", "labels", "poison", 0.0):
                raise UserError(
                    f"{field}={value!r} is not for {config.method}: what a client changes is not told from the model "
                    "that went to all"
                )


def with_numbers(
    problem: Problem, make: Callable[[Problem, Method], Callable[..., Any]], **of_network: Any
) -> Callable[..., Any]:
    """The function that `make` returns for a run's problem and method, with numbers that come with the data.

    The configuration's numbers are then arguments of a compiled program, see `numbers_of`. One argument of the function
    is a FederatedData. For `of_network` see `make_method`. Raises a UserError when the function is traced, if the
    method branches on a number.
    """

    def function(*arguments: Any) -> Any:
        data = next(one for one in arguments if isinstance(one, FederatedData))
        made: list[Any] = []  # the last numbers, and the problem and method with them: one trace serves equal numbers

        def of_data(data: FederatedData) -> tuple[Problem, Method]:
            numbers = jax.tree.leaves(data.numbers)
            if not made or any(a is not b for a, b in zip(numbers, made[0])):
                traced = problem._replace(config=replace_numbers(problem.config, data.numbers))
                made[:] = numbers, traced, make_method(traced, **of_network)
            return made[1], made[2]

        try:
            traced, method = of_data(data)
            return make(traced, method._replace(of_data=lambda data: of_data(data)[1]))(*arguments)
        except (UserError, *_NO_VALUE) as error:
            cause = error.__cause__ or error
            if not isinstance(cause, _NO_VALUE):
                raise
            frames = [f for f in traceback.extract_tb(cause.__traceback__) if "site-packages" not in f.filename]
            where = f"line {frames[-1].lineno} of {frames[-1].filename}"
            raise UserError(
                f"method={problem.config.method}: {where} needs a value while the program is traced. If it is a number "
                "of the configuration, write is_on(number) for 'neither 0 nor None', or declare the field with "
                "static=True"
            ) from error

    return function


def initialiser(problem: Problem) -> Callable[..., State]:
    """Makes the function (data, given=None) -> the first state; `given` are parts of a model that replace fresh ones.

    It is jitted, so that one trace gives both the shapes and the program on a single device: pass `given`, even None.
    """

    @jax.jit
    def init(data: FederatedData, given: Model | None = None) -> State:
        of_network = {} if given is None else {"given": given}
        return with_numbers(problem, lambda *run: functools.partial(first_state, *run), **of_network)(data)

    return init


def first_state(problem: Problem, method: Method, data: FederatedData) -> State:
    """The state before the first round: initialised, pre-trained, with statistics from the server's images."""
    key = init_key(data.seed)
    state = method.init(data.seen, key)
    if method.phases and has_memory(problem.config):
        exchange = trace_exchange(problem, method, state, data)
        clients, server = first_memory(problem.config, exchange.upload, exchange.selection, len(data.ids))
        state = state._replace(clients={**state.clients, **clients}, server={**state.server, **server})
    return method.statistics(state, data.seen, jnp.zeros((0,), jnp.int32), key)
