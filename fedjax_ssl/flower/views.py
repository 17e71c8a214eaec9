"""The federation as one side sees it: the server without clients' images, a node with its own clients' images only.

Neither side has a table of all clients' rows. Random numbers of some methods depend on the width to which a client's
rows are padded. It is the largest client's size in the configured partition, or in the node's own file. Nodes compute
the same as the simulation, up to rounding.
"""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data import Dataset, FederatedData, Partition, clients_may_have_labels, dataset_facts, make_partition_of
from fedjax_ssl.data.federated import Here, Holdings, hold, shapes_of, small_arrays
from fedjax_ssl.data.kinds import IMAGE, kind_name, kind_of
from fedjax_ssl.data.npz import known_labels, read_arrays
from fedjax_ssl.data.partition_file import check_data
from fedjax_ssl.data.table import image_table
from fedjax_ssl.run.decided import decisions
from fedjax_ssl.run.experiment import Experiment, initialiser, make_method, make_problem
from fedjax_ssl.run.features import read_data
from fedjax_ssl.run.observe.clock import doing


def outline(config: Any) -> Experiment:
    """The parts of a run, with shapes in place of the federation's data: nothing is put on the device.

    Raises UserError if the data are missing or do not fit the configuration, or a name is unknown.
    """
    dataset, partition = _read(config)
    held = _hold(config, dataset, partition)
    problem = make_problem(config, dataset_facts(dataset), dataset.lacks_labels)
    method = make_method(problem)
    init = initialiser(problem)
    rows = jax.ShapeDtypeStruct((config.num_clients, held.width), jnp.int32)
    data = shapes_of(held, rows)
    truth: Any = held.hidden_labels
    return Experiment(problem, method, data, truth, partition, dataset, init, jax.eval_shape(init, data, None))


def server_view(experiment: Experiment, sizes: np.ndarray, labelled: np.ndarray) -> tuple[FederatedData, jax.Array]:
    """What the server has: its labelled images, validation and test images, and the labels of all.

    No client is `here`. `sizes`, int [K], are the clients' numbers of images as the nodes told, `labelled` how many of
    these have a label.
    """
    held = _hold(experiment.problem.config, experiment.dataset, experiment.partition)
    owned = np.concatenate([held.server_index, held.validation_index])
    rows = owned if len(owned) else np.zeros(1, np.int32)  # a table needs at least one row
    view = small_arrays(held)._replace(
        inputs=image_table(held.inputs[rows]),
        visible_labels=jax.device_put(held.visible_labels[rows]),
        client_index=jnp.zeros((1, 1), jnp.int32),
        client_size=jax.device_put(np.asarray(sizes, np.int32)),
        labelled_size=jax.device_put(np.asarray(labelled, np.int32)),
        server_index=jnp.arange(len(held.server_index), dtype=jnp.int32),
        validation_index=jnp.arange(len(held.server_index), len(owned), dtype=jnp.int32),
        test_inputs=image_table(held.test_inputs),
        test_labels=jax.device_put(held.test_labels),
        here=Here(
            jnp.array([len(sizes)], jnp.int32),  # the id of no client
            jnp.arange(len(sizes), dtype=jnp.int32),  # the server's records are of all clients
        ),
        unknown_inputs=image_table(held.unknown_inputs),
    )
    return view, jax.device_put(held.hidden_labels[rows])


def node_holdings(config: Any, clients: tuple[int, ...]) -> tuple[Holdings, Dataset]:
    """What a node has of the configured federation: its clients' holdings, see `of_clients`; and the data set."""
    dataset, partition = _read(config)
    held = _hold(config, dataset, partition)
    images = {client: held.inputs[held.rows_of(client)] for client in clients}
    labels = {client: held.visible_labels[held.rows_of(client)] for client in clients}
    own = of_clients(config, images, labels, len(held.server_index), dataset.num_classes)
    return own._replace(largest_size=held.largest_size, width=held.width), dataset


def of_clients(
    config: Any, images: dict[int, np.ndarray], labels: dict[int, np.ndarray], server_labels: int, num_classes: int
) -> Holdings:
    """A federation in which only some clients have images; row 0 belongs to no client.

    By the ids of these clients, `images` are [n, ...] as they are stored, and `labels` int32 [n], -1 if hidden. True
    labels are the visible ones only. Shapes depend on S, `server_labels`; the server's images are not included.
    """
    order, sizes = sorted(images), np.zeros(config.num_clients, np.int64)
    labelled = np.zeros(config.num_clients, np.int32)
    for client in order:
        sizes[client], labelled[client] = len(labels[client]), np.count_nonzero(labels[client] >= 0)
    some = images[order[0]]
    nobody = np.zeros((1, *some.shape[1:]), some.dtype)
    visible = np.concatenate([[-1], *(labels[client] for client in order)]).astype(np.int32)
    return Holdings(
        inputs=np.concatenate([nobody, *(images[client] for client in order)]),
        hidden_labels=visible,
        visible_labels=visible,
        rows=np.arange(1, len(visible), dtype=np.int32),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        labelled_size=labelled,
        largest_size=int(sizes.max()),
        width=int(sizes.max()),
        server_index=np.zeros(server_labels, np.int32),
        validation_index=np.zeros(0, np.int32),
        test_inputs=some[:0],
        test_labels=np.zeros(0, np.int32),
        seed=config.seed,
        attackers=None,
        given_labels=np.bincount(visible[visible >= 0], minlength=num_classes).astype(np.float32),
        unknown_inputs=None,
    )


def own_holdings(config: Any, client: int, file: str, facts: dict[str, Any]) -> Holdings:
    """The holdings of a node with images of its own.

    Raises a UserError if there is no such file, or its arrays are not as above.

    Args:
        config: the run's; if it gives clients no labels, the file's labels are ignored.
        client: the node's client.
        file: an npz with `images`, uint8 [n, H, W] or [n, H, W, C], and optionally `labels` [n], see `read_labels`.
        facts: of the server's data set, with `server_labels`, the number of its labelled images.
    """
    if kind_name(facts) != IMAGE:
        raise UserError(f"--node-config data is for images; the server's data are {kind_of(facts).noun}")
    arrays = read_arrays(file, ("images",), "--node-config data", optional=("labels",))
    images, shape, classes = arrays["images"], tuple(facts["image_shape"]), facts["num_classes"]
    images = images[..., np.newaxis] if images.ndim == 3 else images
    if images.dtype != np.uint8 or images.shape[1:] != shape or not images.size:
        raise UserError(f"{file}: images are {images.dtype} {images.shape}; the server's are uint8 {('n', *shape)}")
    own = np.full(len(images), -1, np.int32)
    if "labels" in arrays:
        names = facts.get("class_names") or list(map(str, range(classes)))
        found = known_labels(file, "labels", arrays["labels"], images, names)
        own = found if clients_may_have_labels(config.data) or config.data.reveal_labels else own
    return of_clients(config, {client: images}, {client: own}, facts["server_labels"], classes)


def facts_text(experiment: Experiment) -> str:
    """What a node must know about the server's data, as JSON."""
    return json.dumps({**dataset_facts(experiment.dataset), "server_labels": len(experiment.data.server_index)})


def _read(config: Any) -> tuple[Dataset, Partition]:
    """The data set that a configuration names, and who owns which rows of it."""
    with doing("reading the data") as task:
        dataset = read_data(config, functools.partial(setattr, task, "text"))
    if found := decisions(config, dataset):
        fields = " ".join(f"--config.{field}={value}" for field, value in found.items())
        raise UserError(f"every node must know what the data decide: add {fields} to overrides in --run-config")
    if config.data.partition_file:
        check_data(config.data.partition_file, dataset)
    return dataset, make_partition_of(dataset, config.data, config.num_clients, config.seed)


def _hold(config: Any, dataset: Dataset, partition: Partition) -> Holdings:
    return hold(dataset, partition, config.seed, config.data.reveal_labels, config.data.centralised)
