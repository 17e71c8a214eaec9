"""A partition drawn: who holds which training examples, and whose labels are visible, as rows of the training set.

Pure NumPy, a function of the labels, the configuration and the seed.
"""

from typing import Any

import numpy as np

from fedjax_ssl.data.labels import (
    SERVER_DRAWS,
    check_labels,
    draw_balanced,
    draw_labelled_rows,
    draw_labelled_tail,
    draw_server_labels,
    draw_validation,
)
from fedjax_ssl.data.long_tail import cut_to_tail
from fedjax_ssl.data.owners import NO_ROWS, Partition
from fedjax_ssl.data.partition_file import load_for
from fedjax_ssl.data.partition_schemes import PARTITIONS
from fedjax_ssl.errors import UserError, known_are


def make_partition(labels: np.ndarray, num_classes: int, config: Any, num_clients: int, seed: int) -> Partition:
    """Splits the training set over server and clients, and draws whose labels are visible.

    Validation images are drawn first and removed, from a stream of random numbers that nothing else uses. With
    `labels` = 'server' the server's labelled images are drawn next and removed. Otherwise it has none, and the
    clients' labelled examples are drawn last, from their own stream, so that the clients' shares do not depend on
    them. The exception is `num_labelled`: those are drawn before the shares, and both they and the others are divided
    by the partition, each by draws of its own.

    A long tail is cut after the validation images are drawn, and before anything else. Where the labelled images have
    a tail of their own they are drawn before the others are cut: as `server_labels`, or as `num_labelled` are, or of
    'some_clients' for the first clients. The partition divides them among those, and the others among the other
    clients.

    Args:
        labels: int [N], labels of the training set.
        num_classes: number of classes.
        config: the `data` section. Read are `validation`, the number of validation images; `labels` (a name of
          `LABELS`) with the fields of `draw_labelled_rows`, of 'clients' or instead `num_labelled`, as many of each
          class (0 = none apart), of 'server' `server_labels` and `server_draw` ('balanced' or 'random'); `imbalance`
          and `largest_class`, and the same of labelled images alone (see `long_tail`); `partition` (a
          name of `PARTITIONS`) with its own fields `alpha`, `classes_per_client` or `labels_per_class`;
          `examples_per_client`, at most so many for a client, taken at random from its share, but of labelled
          examples apart these first (0 = all); and `partition_file`, a saved partition that is used as it is instead
          ('' = none), if no client has more.
        num_clients: number of clients K.
        seed: seed of the draw. Validation images and the server's depend on no other field than their own, so that
          partitions can be compared.

    Returns:
        The partition.

    Raises:
        UserError: a field has an impossible value, there are not enough examples, or the saved partition is not
          of this configuration.
    """
    if num_clients < 1:
        raise UserError(f"num_clients={num_clients} must be at least 1")
    check_labels(config, num_clients)
    if config.partition_file:
        return load_for(config, len(labels), num_clients)
    if config.partition not in PARTITIONS:
        raise UserError(f"data.partition is {config.partition!r}{known_are(config.partition, PARTITIONS)}")
    if config.server_draw not in SERVER_DRAWS:
        raise UserError(f"data.server_draw is {config.server_draw!r}{known_are(config.server_draw, SERVER_DRAWS)}")
    if config.examples_per_client < 0:
        raise UserError(f"data.examples_per_client={config.examples_per_client} must be 0 (all) or more")
    if seed < 0:
        raise UserError(f"seed={seed} must not be negative")

    labels = np.asarray(labels)
    streams = [np.random.default_rng([seed, stream]) for stream in range(5)]
    server_rng, client_rng, label_rng, validation_rng, tail_rng = streams
    validation = draw_validation(labels, config.validation, num_classes, validation_rng)
    rest = np.setdiff1d(np.arange(len(labels)), validation)
    own_tail = config.labelled_largest_class > 0

    def cut(rows: np.ndarray) -> np.ndarray:
        return rows[cut_to_tail(labels[rows], num_classes, config.imbalance, config.largest_class, tail_rng)]

    if not own_tail:
        rest = cut(rest)
    at_server = NO_ROWS
    if config.labels == "server":
        balanced = config.server_draw == "balanced"
        if own_tail:
            drawn = draw_labelled_tail(labels[rest], num_classes, config, server_rng)
        else:
            drawn = draw_server_labels(labels[rest], config.server_labels, num_classes, server_rng, balanced)
        at_server = rest[drawn].astype(np.int32)
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
        shares = PARTITIONS[config.partition](labels[rows], num_clients, config, rng)
        return [rows[rng.permutation(share)[:limit]].astype(np.int32) for share in shares]

    limit = config.examples_per_client or len(labels)
    if own_tail and config.labels == "some_clients":
        known = divide(apart, config.labelled_clients, label_rng)
        others = divide(rest, num_clients - config.labelled_clients, client_rng)
        return Partition(at_server, known + others, np.concatenate(known), validation)
    client_rows = divide(rest, num_clients, client_rng)
    if len(apart):
        known = divide(apart, num_clients, label_rng)
        both = [np.concatenate(pair)[:limit] for pair in zip(known, client_rows)]
        return Partition(at_server, list(map(label_rng.permutation, both)), np.concatenate(known), validation)
    labelled = NO_ROWS
    if config.labels != "server":
        labelled = draw_labelled_rows(labels, client_rows, config, label_rng)
    return Partition(at_server, client_rows, labelled, validation)
