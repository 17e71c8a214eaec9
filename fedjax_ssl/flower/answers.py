"""Reads and checks the answers of nodes, which anybody may have sent.

A reader raises a UserError that says what is wrong with an answer. The server then prints why it does not use this
answer, and goes on with the others.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.interface import Metrics
from fedjax_ssl.flower.messages import from_record
from fedjax_ssl.ops.sgd import BatchStats
from fedjax_ssl.server.statistics import Sums

MOST = 2**31 - 1  # the largest int32
# Limit on means of a layer's input, far above those in training; its square times all images is finite in float32.
LARGEST_MEAN = 1e12


class Hello(NamedTuple):
    """Who a node is."""

    clients: list[int]  # its clients' ids
    sizes: list[int]  # how many images each has
    labelled: list[int]  # how many of these have labels
    classes: list[int]  # how many labels of each class all its clients have; [] if the node was not asked


class Figures(NamedTuple):
    """What a client tells of a job besides its upload, as NumPy scalars."""

    turn: Any  # int32, of all turns of the run
    num_examples: Any  # int32, its images
    num_qualified: Any  # int32, those with a label in use
    num_steps: Any  # int32, of all phases
    metrics: tuple[tuple[Metrics, Any], ...]  # of each phase: means, and whether the client took a step in it


class Reply(NamedTuple):
    """A job's part of the answer to `train`."""

    figures: Figures
    upload: Any  # its arrays; None if the client took no part


def read_hello(content: Any, digest: str, num_clients: int, num_classes: int) -> Hello:
    """Reads the answer to `query.hello`; `num_classes` is 0 if the node was not asked for labels.

    Raises UserError if the node's configuration has another digest, or its answer is not possible.
    """
    told = content.get("node", {})
    if told.get("digest") != digest:
        raise UserError(
            f"it has another configuration ({told.get('digest')!r:.60}, the server's is {digest}): another version of "
            "the library, of the config file or of data.partition_file"
        )
    clients, sizes, labelled = (told.get(name) for name in ("clients", "sizes", "labelled"))
    classes = told.get("classes") if num_classes else []
    hello = Hello(clients, sizes, labelled, classes)
    is_possible = (
        all(isinstance(counts, list) and all(map(_is_count, counts)) for counts in hello)
        and 0 < len(set(clients)) == len(clients) == len(sizes) == len(labelled)
        and max(clients) < num_clients
        and all(some <= all_ for some, all_ in zip(labelled, sizes))
        and len(classes) == num_classes
        and sum(classes) == (sum(labelled) if num_classes else 0)
    )
    if not is_possible:
        raise UserError(f"{hello!r:.300} cannot be right for {num_clients} clients and {num_classes} asked classes")
    return hello


def read_reply(content: Any, place: int, size: int, like: Reply, turn: int, num_jobs: int) -> Reply:
    """Reads a job's part of the answer to `train`. A client without an upload took no part.

    Raises a UserError if the upload or the figures do not fit the configuration, or are of another turn.

    Args:
        content, place: the answer's; the job's position among the node's jobs.
        size: how many images its client has, by the node's first answer.
        like: shapes.
        turn: the expected turn; answers of earlier turns are refused. This proves nothing, since a node may lie.
        num_jobs: of a round, whose steps are added as int32.
    """
    figures = from_record(content.get(f"figures-{place}", {}), like.figures, "the answer", shapes=True)
    if figures.turn != turn:
        raise UserError(f"it is of turn {figures.turn} of the run, not of turn {turn}")
    counts = figures.num_examples, figures.num_qualified, figures.num_steps
    if not (0 <= counts[1] <= counts[0] == size and 0 <= counts[2] <= MOST // num_jobs):
        told = "{} images, {} of them with labels in use, and {} steps".format(*counts)
        raise UserError(f"it tells {told}, of a client with {size} images")
    upload = content.get(f"upload-{place}")
    if upload is not None:
        upload = from_record(upload, like.upload, "the upload", shapes=True)
    return Reply(figures, upload)


def read_statistics(content: Any, place: int, like: BatchStats, count: int) -> Sums:
    """Reads a client's part of the answer to `query.statistics`.

    Raises a UserError if they cannot be sums of the statistics of this client's images.

    Args:
        content: the answer's.
        place: the client's position among those that the node was asked for.
        like: shapes of a client's sums.
        count: the weight that the client must have: its number of images, or of their batches.
    """
    number: Any = jax.ShapeDtypeStruct((), np.float32)
    told = from_record(content.get(f"sums-{place}", {}), Sums(like, number), "the answer", shapes=True)
    if told.count != np.float32(count):
        raise UserError(f"it counts {told.count}, not {count}")
    for path, leaf in jax.tree.leaves_with_path(told.total):
        name = jax.tree_util.keystr(path)
        least, most = (0, LARGEST_MEAN**2) if name.endswith("['var']") else (-LARGEST_MEAN, LARGEST_MEAN)
        if not np.all((leaf >= least * told.count) & (leaf <= most * told.count)):  # also rejects NaN
            raise UserError(f"{name} has numbers that are no sum of statistics")
    return told


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST
