"""As many batches of unlabelled images in an epoch as of labelled ones, of whatever size that makes them (FedMatch)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.client.deck import Batch, Deck, Examples
from fedjax_ssl.engine.interface import Problem
from fedjax_ssl.learning.batches import num_batches

# Of `data.partition`: every client has the same number of images, to within one; of labelled ones divided apart, too.
EQUAL_SHARES = ("dirichlet_pairs", "iid", "lda", "stratified")
EACH_CLASS = ("profiles", "stratified")  # and so many of each class, if it has them


class PairedDecks(NamedTuple):
    """The images of one client; in `prepare` all leaves have a leading [M]."""

    deck: Deck  # its unlabelled examples
    batches: jax.Array  # int32 [], of an epoch
    size: jax.Array  # int32 [], unlabelled examples of a batch
    labelled: Deck | None  # its labelled examples; None if only unlabelled ones are trained on


def pair_decks(problem: Problem, examples: Examples, keys: jax.Array, room: int, with_labels: bool) -> PairedDecks:
    """The decks of a cohort, shuffled for each of `client.epochs`.

    Args:
        problem: the run; a labelled batch has `client.batch_size` examples.
        examples: of the cohort.
        keys: [M], of the orders.
        room: the most unlabelled examples of a batch. Where that is too few, an epoch has more batches than the
            labelled examples make.
        with_labels: whether labelled examples are trained on. If not, all batches have `room` unlabelled ones.
    """
    config = problem.config.client
    deck, labelled = Deck.shuffled(examples, examples.unlabelled, keys, config.epochs), None
    batches, size = whole_batches(deck.size, room), jnp.full_like(deck.size, room)
    if with_labels:
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
        labelled = Deck.shuffled(examples, examples.labelled, keys, config.epochs)
        batches = jnp.maximum(whole_batches(labelled.size, config.batch_size), num_batches(deck.size, room))
        size = -(-deck.size // batches)
    return PairedDecks(deck, batches, size, labelled)


def labelled_batch(deck: Deck, index: jax.Array, size: int) -> Batch:
    """The batch of labelled examples of local step `index`; the deck is gone round again."""
    return deck.cut(index, whole_batches(deck.size, size), size, size)


def whole_batches(count: jax.Array, size: int) -> jax.Array:
    """Batches of an epoch: count / size to the nearest whole number (of two the even one), at least one."""
    return jnp.maximum(jnp.round(count / size).astype(jnp.int32), 1)


def largest_batch(problem: Problem, n_max: int) -> int:
    """The most unlabelled images in a batch of any client with labels, as far as the configuration tells.

    Where it does not tell how many labels a client of n images has at least, that is all n_max images.

    Args:
        problem: the run.
        n_max: of any client.
    """
    config, size = problem.config, problem.config.client.batch_size
    data, num_classes, images = config.data, problem.num_classes, np.arange(1, n_max + 1)
    labelled = np.zeros_like(images)
    if data.reveal_labels:
        labelled = images
    elif data.labels == "clients" and not data.partition_file:
        if data.num_labelled and data.partition in EQUAL_SHARES:
            labelled = np.minimum(images, data.num_labelled // config.num_clients)
        elif data.labels_per_class and not data.num_labelled and data.partition in EACH_CLASS:
            labelled = num_classes * np.minimum(images // num_classes, data.labels_per_class)
        elif not data.labels_per_class and not data.num_labelled:
            labelled = np.floor(data.labelled_share * images + 0.5).astype(int)
    batches = np.maximum(np.round(labelled / size), 1)
    return max(int(np.max(np.ceil((images - labelled) / batches))), 1)
