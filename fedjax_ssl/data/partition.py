"""Draws a partition: who holds which rows of the training set, and which labels are visible.

It is a pure NumPy function of the labels, the configuration and the seed.
"""

from typing import Any

import jax
import numpy as np

from fedjax_ssl.base.errors import UserError, known_are
from fedjax_ssl.data.labels import (
    check_labels,
    clients_may_have_labels,
    draw_balanced,
    draw_labelled_rows,
    draw_server_labels,
    server_has_labels,
)
from fedjax_ssl.data.long_tail import cut_to_tail
from fedjax_ssl.data.owners import NO_ROWS, UNKNOWN, Partition, hold_out, leave_out
from fedjax_ssl.data.partition_file import check_labelled_clients, load_for
from fedjax_ssl.data.partition_schemes import PARTITIONS, Shares, by_domain
from fedjax_ssl.data.unknown import deal_unknown


def make_partition_of(dataset: Any, config: Any, num_clients: int, seed: int) -> Partition:
    """`make_partition` of a `Dataset`, without the client that `left_out` names."""
    labels, of_train = dataset.y_train, dataset.domains and dataset.domains[0]
    partition = make_partition(labels, dataset.num_classes, config, num_clients, seed, dataset.owners, of_train)
    return leave_out(partition, config.left_out)


def make_partition(
    labels: np.ndarray, num_classes: int, config: Any, num_clients: int, seed: int, owners: np.ndarray | None = None,
    domains: Any = (),
) -> Partition:  # fmt: skip
    """Splits the training set over server and clients, and draws whose labels are visible.

    The draws have separate streams of random numbers and this order:

    1. Validation images, which are removed. A long tail is cut directly after that.
    2. The server's labelled images, which are removed, if `labels` is 'server' or 'profile'; otherwise it has none.
       With `server_domain` they are of this domain, whose other images are then nobody's.
    3. With `num_labelled`: the clients' labelled images. The partition divides them and the other images separately.
    4. The division of the remaining images by the partition.
    5. Without `num_labelled`: the labelled images among the clients' images, which thus do not depend on this draw.

    With `client_test_share` each client's own test images are taken from its share before labels are drawn; with
    `num_labelled` never from labelled images that are divided separately.

    If the data set itself lacks some labels, the clients' labels are not drawn: with `labels` 'clients' or 'profile'
    every label is visible; with 'some_clients' each client must have labels for all its examples or for none. Only
    examples with a label are drawn for the server and for validation. For partitions by labels, examples without a
    label are a class of their own.

    Args:
        labels: int [N], labels of the training set; -1 for missing labels; `UNKNOWN` for images of no class, which are
            dealt to clients after all others, see `deal_unknown`.
        num_classes, num_clients: the number of classes, and that of clients, K.
        config: the `data` section. A client has at most `examples_per_client` examples, taken at random from its share,
            but first from labelled images that are divided separately. A `partition_file` is used unchanged instead.
        seed: seed of the draw. Validation images and the server's images depend on their own fields only, so that
            partitions can be compared.
        owners: int [N], the client of each example, for the partition 'natural'; None: the data set has no owners.
        domains: str [N], the name of each example's domain; (): the data set names none.

    Raises:
        UserError: fields exclude each other, examples are too few, or the saved partition does not fit the fields.
    """
    labels = np.asarray(labels)
    if (labels == UNKNOWN).any():
        return _with_unknown(labels, num_classes, config, num_clients, seed, domains)
    check_labels(config, num_clients)
    if config.partition_file:
        return load_for(config, labels, num_classes, num_clients)
    _check_owners(config, owners, num_clients)
    _check_domains(config, domains, num_clients)
    if (labels < 0).any():
        _check_unlabelled(config)
    streams = [np.random.default_rng([seed, stream]) for stream in range(6)]
    _, client_rng, label_rng, _, _, profile_rng = streams
    validation, at_server, apart, rest = _draw_held_out(labels, num_classes, config, streams, domains)
    if num_clients > len(rest):
        counts = {"validation": validation, "server": at_server, "labelled": apart}
        taken = " and ".join(f"{len(rows)} {name} images" for name, rows in counts.items() if len(rows))
        what = f"examples that {taken} leave of {len(labels)}" if taken else "training examples"
        raise UserError(f"num_clients={num_clients} is more than the {len(rest)} {what}; lower it")
    shares = _divide(rest, labels, config, num_clients, owners, domains, client_rng)
    client_rows, tests = hold_out(shares, config.client_test_share)
    if len(apart):
        known = _divide(apart, labels, config, num_clients, owners, domains, label_rng)
        client_rows, labelled = _joined(known, client_rows, tests, config.examples_per_client or len(labels), label_rng)
    elif not clients_may_have_labels(config):
        labelled = NO_ROWS
    elif (labels < 0).any():
        labelled = _where_they_are(labels >= 0, client_rows, config)
    else:
        labelled = draw_labelled_rows(labels, client_rows, config, label_rng, profile_rng)
    return Partition(at_server, client_rows, labelled, validation, tests)


def _with_unknown(
    labels: np.ndarray, num_classes: int, config: Any, num_clients: int, seed: int, domains: Any
) -> Partition:
    """The partition of the images of known classes, to whose clients the others are dealt."""
    known = np.flatnonzero(labels != UNKNOWN).astype(np.int32)
    of_domains = domains[known] if len(domains) else ()
    of_known = make_partition(labels[known], num_classes, config, num_clients, seed, domains=of_domains)
    divided = jax.tree.map(lambda rows: known[rows], of_known)
    return deal_unknown(labels, divided, config, seed)


def _draw_held_out(
    labels: np.ndarray, num_classes: int, config: Any, streams: list[np.random.Generator], domains: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows for validation, for the server, of labelled images that are divided separately, and all others."""
    server_rng, _, label_rng, validation_rng, tail_rng, _ = streams
    has_label = labels >= 0
    validation = draw_balanced(labels, config.validation, num_classes, validation_rng, "data.validation")
    rest = np.setdiff1d(np.arange(len(labels)), validation)
    if has_label.all():
        rest = rest[cut_to_tail(labels[rest], num_classes, config.imbalance, tail_rng)]
    at_server, apart, of_server = NO_ROWS, NO_ROWS, rest
    if config.server_domain:
        is_own = domains[rest] == config.server_domain
        of_server, rest = rest[is_own], rest[~is_own]
    if server_has_labels(config):
        known, balanced = of_server[has_label[of_server]], config.server_draw == "balanced"
        drawn = draw_server_labels(labels[known], config.server_labels, num_classes, server_rng, balanced)
        at_server = known[drawn].astype(np.int32)
        rest = np.setdiff1d(rest, at_server)
    if config.labels == "clients" and config.num_labelled:
        apart = rest[draw_balanced(labels[rest], config.num_labelled, num_classes, label_rng, "data.num_labelled")]
        rest = np.setdiff1d(rest, apart)
    return validation, at_server, apart, rest


def _divide(
    rows: np.ndarray, labels: np.ndarray, config: Any, num_clients: int, owners: Any, domains: Any,
    rng: np.random.Generator,
) -> Shares:  # fmt: skip
    """Divides rows among the clients: K arrays int32 [n_k]. Rows without a label are a class of their own."""
    if config.partition == "natural":
        own = owners[rows]
        ends = np.cumsum(np.bincount(own, minlength=num_clients))
        shares = np.split(np.argsort(own, kind="stable"), ends[:-1])
    elif config.partition == "domains":
        shares = by_domain(domains[rows], _of_clients(domains, config), num_clients, rng)
    else:
        classes = np.where(labels[rows] >= 0, labels[rows], labels.max() + 1)
        shares = PARTITIONS[config.partition](classes, num_clients, config, rng)
    most = config.examples_per_client or len(labels)
    return [rows[rng.permutation(share)[:most]].astype(np.int32) for share in shares]


def _joined(
    known: Shares, others: Shares, tests: tuple[np.ndarray, ...], limit: int, rng: np.random.Generator
) -> tuple[Shares, np.ndarray]:
    """Each client's labelled rows followed by others, at most `limit` with its test rows, and all labelled rows."""
    room = [limit - len(held_out) for held_out in tests or [()] * len(others)]
    known = [own[:most] for own, most in zip(known, room)]
    both = [rng.permutation(np.concatenate(pair)[:most]) for *pair, most in zip(known, others, room)]
    return both, np.concatenate(known)


def _check_owners(config: Any, owners: np.ndarray | None, num_clients: int) -> None:
    """Raises a UserError if the partition is 'natural', but the data set does not name these owners."""
    if config.partition == "natural" and (owners is None or owners.max() >= num_clients):
        which = "a folder, csv, parquet or Hugging Face data set with data.client_column, or an npz with client_train"
        needs = f"data that name each example's client, here of num_clients={num_clients}"
        raise UserError(f"data.partition='natural' needs {needs}: {which}")


def _of_clients(domains: np.ndarray, config: Any) -> list[str]:
    """The domains that clients hold."""
    return [str(name) for name in np.unique(domains) if name != config.server_domain]


def _check_domains(config: Any, domains: Any, num_clients: int) -> None:
    """Raises a UserError if the data name no domains, or not those that the fields need."""
    own, is_by_domain = config.server_domain, config.partition == "domains"
    if (own or is_by_domain) and not len(domains):
        field = f"server_domain={own}" if own else "partition='domains'"
        which = "by data.domain_column, or an npz's domain_train and domain_test"
        raise UserError(f"data.{field} needs data that name each example's domain, {which}")
    if own and own not in domains:
        raise UserError(f"data.server_domain is {own!r}{known_are(own, np.unique(domains).tolist())}")
    number = len(_of_clients(domains, config))
    if is_by_domain and not 0 < number <= num_clients:
        raise UserError(f"data.partition='domains': num_clients={num_clients} clients cannot hold {number} domains")


def _check_unlabelled(config: Any) -> None:
    """Raises a UserError for fields that draw labels, which are not for data sets that lack some labels."""
    for field, default in {"num_labelled": 0, "imbalance": 1.0, "client_test_share": 0.0}.items():
        if config[field] != default:
            raise UserError(f"data.{field}={config[field]} is not for data with empty labels, which stay as they are")


def _where_they_are(has_label: np.ndarray, client_rows: list[np.ndarray], config: Any) -> np.ndarray:
    """The clients' rows that have a label, int32 [L], for a data set that lacks some labels."""
    rows = np.concatenate([of_client[has_label[of_client]] for of_client in client_rows]).astype(np.int32)
    if not len(rows) and not server_has_labels(config):
        raise UserError(f"no client has a label (data.labels={config.labels!r}); set data.labels to 'server'")
    if config.labels == "some_clients":
        check_labelled_clients("the data", rows, client_rows, config.labelled_clients)
    return rows
