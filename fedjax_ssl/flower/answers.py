"""Reads and checks the answers of nodes, which anybody may have sent.

A reader raises a UserError that says what is wrong with an answer. The server then prints why it does not use this
answer, and goes on with the others.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.cohort import CohortResult
from fedjax_ssl.engine.interface import Upload
from fedjax_ssl.flower.messages import from_record
from fedjax_ssl.ops.sgd import BatchStats

MOST = 2**31 - 1  # the largest int32
# Limit on means of a layer's input, far above those in training; its square times all images is finite in float32.
LARGEST_MEAN = 1e12


class Hello(NamedTuple):
    """Who a node is."""

    clients: list[int]  # its clients' ids
    sizes: list[int]  # how many images each has
    labelled: list[int]  # how many of these have labels
    classes: list[int] | None  # how many labels of each class all its clients have; None if the node was not asked


class Reply(NamedTuple):
    """A job's part of the answer to `train`."""

    upload: Upload | None = None  # its arrays; None if the client took no part, or nothing usable came
    figures: Mapping[str, float] = {}  # of `client._figures`; {} if nothing usable came


def read_hello(content: Any, digest: str, num_clients: int, num_classes: int) -> Hello:
    """Reads the answer to `query.hello`.

    Args:
        content: the answer's.
        digest: of the server's configuration.
        num_clients: K.
        num_classes: C; 0 if the node was not asked for labels.

    Raises:
        UserError: the node has another configuration, or its answer is not possible.
    """
    who = content.get("node", {})
    if who.get("digest") != digest:
        raise UserError(
            f"it has another configuration ({_short(who.get('digest'))}, the server's is {digest}): another version of "
            "the library, of the config file or of data.partition_file"
        )
    clients, sizes, labelled = (_counts(who, name) for name in ("clients", "sizes", "labelled"))
    if not clients or len(set(clients)) < len(clients) or max(clients) >= num_clients:
        raise UserError(f"its clients are {_short(clients)}, which are not different ids below {num_clients}")
    if not len(clients) == len(sizes) == len(labelled) or any(some > all_ for some, all_ in zip(labelled, sizes)):
        raise UserError(f"of {len(clients)} clients it tells {_short(sizes)} images, {_short(labelled)} with labels")
    classes = _counts(who, "classes") if num_classes else None
    if num_classes and len(classes) != num_classes:
        raise UserError(f"it tells the labels of {len(classes)} classes, of which there are {num_classes}")
    if num_classes and sum(classes) != sum(labelled):
        raise UserError(f"it tells {sum(classes)} labels of all classes, of {sum(labelled)} images with labels")
    return Hello(clients, sizes, labelled, classes)


def read_reply(content: Any, place: int, size: int, like: CohortResult, turn: int, num_jobs: int) -> Reply:
    """Reads a job's part of the answer to `train`. A client without an upload took no part.

    Args:
        content: the answer's.
        place: the job's position among the node's jobs.
        size: how many images its client has, by the node's first answer.
        like: a cohort's result, leaves [1, ...].
        turn: the expected turn; answers of earlier turns are refused. This proves nothing, since a node may lie.
        num_jobs: of a round, whose steps are added as int32.

    Raises:
        UserError: the upload or the figures do not fit the configuration, or are of another turn.
    """
    told, figures = content.get(f"figures-{place}", {}), {}
    if told.get("turn") != turn:
        raise UserError(f"it is of turn {_short(told.get('turn'))} of the run, not of turn {turn}")
    for name in (
        "num-examples",
        "num-qualified",
        "num-steps",
        *(f"stepped-{phase}" for phase in range(len(like.metrics))),
    ):
        figures[name] = _count(told.get(name), name)
    if figures["num-examples"] != size or figures["num-qualified"] > size:
        counts = f"{figures['num-examples']} images, {figures['num-qualified']} with labels in use"
        raise UserError(f"it tells {counts}, of a client with {size} images")
    for name in (f"metric-{phase}-{name}" for phase, (names, _) in enumerate(like.metrics) for name in names):
        if not isinstance(told.get(name), int | float):
            raise UserError(f"{name} is {_short(told.get(name))}, not a number")
        figures[name] = told[name]
    if figures["num-steps"] > MOST // num_jobs:
        raise UserError(f"it tells {figures['num-steps']} steps")
    upload = content.get(f"upload-{place}")
    if upload is not None:
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), like.upload)
        upload = from_record(upload, one, "the upload", shapes=True)
    return Reply(upload, figures)


def read_compiling(content: Any) -> float:
    """The seconds for which a node says that it compiled; 0 if the value is not valid."""
    seconds = content.get("seconds", {}).get("compiling")
    return float(seconds) if isinstance(seconds, int | float) and 0 <= seconds <= MOST else 0.0


def read_statistics(content: Any, like: BatchStats, num_images: int) -> tuple[BatchStats, float]:
    """Reads the sums in the answer to `query.statistics`, and their count.

    Args:
        content: the answer's.
        like: the sums' shapes.
        num_images: how many images the asked clients have; a batch has at least one.

    Raises:
        UserError: they cannot be sums of the statistics of this number of images.
    """
    total = from_record(content.get("sums", {}), like, "the answer", shapes=True)
    count = content.get("count", {}).get("count")
    if not isinstance(count, int | float) or not min(1, num_images) <= count <= num_images:
        raise UserError(f"{num_images} images count {_short(count)}")
    for path, leaf in jax.tree.leaves_with_path(total):
        name = jax.tree_util.keystr(path)
        least, most = (0, LARGEST_MEAN**2) if name.endswith("['var']") else (-LARGEST_MEAN, LARGEST_MEAN)
        if not np.all((leaf >= least * count) & (leaf <= most * count)):  # also rejects NaN
            raise UserError(f"{name} has numbers that are no sum of statistics")
    return total, float(count)


def _counts(record: Mapping[str, Any], name: str) -> list[int]:
    values = record.get(name)
    if not isinstance(values, list):
        raise UserError(f"{name} is {_short(values)}, not a list")
    return [_count(value, name) for value in values]


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise UserError(f"{name} has {_short(value)}, which is not a count")
    return value


def _short(value: Any) -> str:
    return f"{value!r:.60}"
