"""Draws a partition: who holds which rows of the training set, and which labels are visible.

It is a pure NumPy function of the labels, the configuration and the seed.
"""

from typing import Any

import numpy as np

from fedjax_ssl.data.labels import (
    SERVER_DRAWS,
    check_labels,
    clients_may_have_labels,
    draw_balanced,
    draw_labelled_rows,
    draw_labelled_tail,
    draw_server_labels,
    draw_validation,
    server_has_labels,
)
from fedjax_ssl.data.long_tail import cut_to_tail
from fedjax_ssl.data.owners import NO_ROWS, UNKNOWN, Partition, hold_out
from fedjax_ssl.data.partition_file import check_labelled_clients, load_for
from fedjax_ssl.data.partition_schemes import PARTITIONS
from fedjax_ssl.data.unknown import deal_unknown
from fedjax_ssl.errors import UserError, known_are

LABEL_STREAM = 2  # number of the seed's random stream for clients' labels


def make_partition(
    labels: np.ndarray, num_classes: int, config: Any, num_clients: int, seed: int, owners: np.ndarray | None = None
) -> Partition:
    """Splits the training set over server and clients, and draws whose labels are visible.

    The draws have separate streams of random numbers and this order:

    1. Validation images, which are removed.
    2. The server's labelled images, which are removed, if `labels` is 'server' or 'profile'; otherwise it has none.
    3. With `num_labelled`: the clients' labelled images. The partition divides them and the other images separately.
    4. The division of the remaining images by the partition.
    5. Without `num_labelled`: the labelled images among the clients' images, which thus do not depend on this draw.

    A long tail is cut directly after step 1. If labelled images have their own tail, they are drawn before the others
    are cut: as `server_labels`, as `num_labelled`, or, with 'some_clients', for the first clients. In the last case the
    partition divides the labelled images among the first clients and the other images among the other clients.

    With `client_test_share` each client's own test images are taken from its share before labels are drawn; with
    `num_labelled` never from labelled images that are divided separately.

    If the data set itself lacks some labels, the clients' labels are not drawn: with `labels` 'clients' or 'profile'
    every label is visible; with 'some_clients' each client must have labels for all its examples or for none. Only
    examples with a label are drawn for the server and for validation. For partitions by labels, examples without a
    label are a class of their own.

    Args:
        labels: int [N], labels of the training set; -1 for missing labels; `UNKNOWN` for images of no class, which are
          dealt to clients after all others, see `deal_unknown`.
        num_classes: number of classes.
        config: the `data` section. It reads

          * `validation`, the number of validation images;
          * `labels` (one of `LABELS`) with the fields of `draw_labelled_rows`; for 'clients' also `num_labelled`, drawn
            in equal numbers of each class (0: labels are drawn last); for 'server' and 'profile' `server_labels` and
            `server_draw` ('balanced' or 'random');
          * `imbalance` and `largest_class`, and the same fields for labelled images alone, see `long_tail`;
          * `partition` (one of `PARTITIONS`, or 'natural') with its own fields, such as `alpha`, `classes_per_client`
            or `labels_per_class`;
          * `examples_per_client`, the largest number of a client's examples, taken at random from its share, but
            first from labelled images that are divided separately (0: all);
          * `partition_file`, a saved partition that is used unchanged instead ('': none), if no client has more than
            `examples_per_client`.
        num_clients: number of clients K.
        seed: seed of the draw. Validation images and the server's images depend on their own fields only, so that
          partitions can be compared.
        owners: int [N], the client of each example, for the partition 'natural'; None: the data set has no owners.

    Returns:
        The partition.

    Raises:
        UserError: a field has an impossible value, there are not enough examples, or the saved partition does not match
          the configuration.
    """
    known = np.flatnonzero(np.asarray(labels) != UNKNOWN).astype(np.int32)
    if len(known) < len(labels):
        of_known = make_partition(np.asarray(labels)[known], num_classes, config, num_clients, seed)
        divided = Partition(
            known[of_known.server_index],
            [known[rows] for rows in of_known.client_rows],
            known[of_known.labelled_rows],
            known[of_known.validation_index],
            tuple(known[rows] for rows in of_known.client_test_rows),
        )
        return deal_unknown(np.asarray(labels), divided, config, seed)
    if num_clients < 1:
        raise UserError(f"num_clients={num_clients} must be at least 1")
    check_labels(config, num_clients)
    if config.partition_file:
        return load_for(config, len(labels), num_clients, np.random.default_rng([seed, LABEL_STREAM]))
    known_words = (*PARTITIONS, "natural")
    if config.partition not in known_words:
        raise UserError(f"data.partition is {config.partition!r}{known_are(config.partition, known_words)}")
    if config.server_draw not in SERVER_DRAWS:
        raise UserError(f"data.server_draw is {config.server_draw!r}{known_are(config.server_draw, SERVER_DRAWS)}")
    if config.examples_per_client < 0:
        raise UserError(f"data.examples_per_client={config.examples_per_client} must be 0 (all) or more")
    if seed < 0:
        raise UserError(f"seed={seed} must not be negative")

    labels = np.asarray(labels)
    has_label = labels >= 0
    _check_owners(config, owners, num_clients)
    if not has_label.all():
        _check_unlabelled(config)
    streams = [np.random.default_rng([seed, stream]) for stream in range(6)]
    server_rng, client_rng, label_rng, validation_rng, tail_rng, profile_rng = streams
    validation = draw_validation(labels, config.validation, num_classes, validation_rng)
    rest = np.setdiff1d(np.arange(len(labels)), validation)
    own_tail = config.labelled_largest_class > 0

    def cut(rows: np.ndarray) -> np.ndarray:
        return rows[cut_to_tail(labels[rows], num_classes, config.imbalance, config.largest_class, tail_rng)]

    if not own_tail and has_label.all():
        rest = cut(rest)
    at_server = NO_ROWS
    if server_has_labels(config):
        balanced = config.server_draw == "balanced"
        if own_tail:
            drawn = draw_labelled_tail(labels[rest], num_classes, config, server_rng)
            at_server = rest[drawn].astype(np.int32)
        else:
            known = rest[has_label[rest]]
            drawn = draw_server_labels(labels[known], config.server_labels, num_classes, server_rng, balanced)
            at_server = known[drawn].astype(np.int32)
        rest = np.setdiff1d(rest, at_server)
    apart = NO_ROWS
    if config.labels != "server" and own_tail:
        apart = rest[draw_labelled_tail(labels[rest], num_classes, config, label_rng)]
    elif config.labels == "clients" and config.num_labelled:
        apart = rest[draw_balanced(labels[rest], config.num_labelled, num_classes, label_rng, "data.num_labelled")]
    rest = np.setdiff1d(rest, apart)
    if own_tail:
        rest = cut(rest)
    if num_clients > len(rest):
        counts = {"validation": len(validation), "server": len(at_server), "labelled": len(apart)}
        taken = " and ".join(f"{number} {name} images" for name, number in counts.items() if number)
        what = f"examples that {taken} leave of {len(labels)}" if taken else "training examples"
        raise UserError(f"num_clients={num_clients} is more than the {len(rest)} {what}; lower it")

    def divide(rows: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        if config.partition == "natural":
            own = owners[rows]
            ends = np.cumsum(np.bincount(own, minlength=num_clients))
            shares = np.split(np.argsort(own, kind="stable"), ends[:-1])
        else:
            shares = PARTITIONS[config.partition](kinds[rows], num_clients, config, rng)
        return [rows[rng.permutation(share)[:limit]].astype(np.int32) for share in shares]

    limit, kinds = config.examples_per_client or len(labels), np.where(has_label, labels, num_classes)
    if own_tail and config.labels == "some_clients":
        known = divide(apart, config.labelled_clients, label_rng)
        others = divide(rest, num_clients - config.labelled_clients, client_rng)
        rows, tests = hold_out(known + others, config.client_test_share)
        return Partition(at_server, rows, np.concatenate(rows[: len(known)]), validation, tests)
    client_rows, tests = hold_out(divide(rest, num_clients, client_rng), config.client_test_share)
    if len(apart):
        room = [limit - len(held_out) for held_out in tests or [()] * num_clients]
        known = [own[:most] for own, most in zip(divide(apart, num_clients, label_rng), room)]
        both = [label_rng.permutation(np.concatenate(pair)[:most]) for *pair, most in zip(known, client_rows, room)]
        return Partition(at_server, both, np.concatenate(known), validation, tests)
    if not clients_may_have_labels(config):
        labelled = NO_ROWS
    elif not has_label.all():
        labelled = _where_they_are(has_label, client_rows, config)
    else:
        labelled = draw_labelled_rows(labels, client_rows, config, label_rng, profile_rng)
    return Partition(at_server, client_rows, labelled, validation, tests)


def _check_owners(config: Any, owners: np.ndarray | None, num_clients: int) -> None:
    """Raises a UserError unless the data set names owners exactly if the partition is 'natural', and may keep them."""
    natural = config.partition == "natural"
    if natural and config.labels == "some_clients" and config.labelled_largest_class:
        raise UserError(
            f"data.labelled_largest_class={config.labelled_largest_class} with data.labels='some_clients' divides "
            "images anew, but data.partition='natural' keeps each client's; change one"
        )
    if natural and owners is None:
        raise UserError("data.partition='natural' needs data.client_column, the column that names the client")
    if owners is None:
        return
    if not natural:
        raise UserError(f"data.client_column is given, but data.partition={config.partition!r}; set it to 'natural'")
    number = int(owners.max()) + 1
    if number != num_clients:
        raise UserError(
            f"data.client_column has {number} clients with training rows, but num_clients={num_clients}; set it to "
            f"{number}"
        )


def _check_unlabelled(config: Any) -> None:
    """Raises a UserError for fields that draw labels, which are not for data sets that lack some labels."""
    drawn = {"num_labelled": 0, "imbalance": 1.0, "largest_class": 0, "labelled_largest_class": 0}
    for field, default in {**drawn, "client_test_share": 0.0}.items():
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
