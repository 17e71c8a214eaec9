"""Paired batches (FedMatch): an epoch has as many unlabelled as labelled batches, which sets their size."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.client.deck import Batch, Deck, Examples
from fedjax_ssl.engine.interface import Problem

# Values of `data.partition` that give every client the same number of images and of labelled images, to within one.
EQUAL_SHARES = ("dirichlet_pairs", "iid", "lda", "stratified")
EACH_CLASS = ("profiles", "stratified")  # the same number of labels of each class, if a client has as many


class PairedDecks(NamedTuple):
    """What one client trains on; in `prepare` all leaves have a leading [M]."""

    unlabelled: Deck  # its unlabelled examples
    batches: jax.Array  # int32 [], batches per epoch
    size: jax.Array  # int32 [], unlabelled examples per batch
    labelled: Deck | None  # its labelled examples; None if only unlabelled ones are trained on
    personal: Any = ()  # the message to this client


def pair_decks(problem: Problem, examples: Examples, room: int, with_labels: bool) -> PairedDecks:
    """The decks of a cohort, shuffled for each of `client.epochs`; a labelled batch has `client.batch_size` examples.

    `room` is the most unlabelled examples in a batch: `largest_batch`. Without labels all batches have so many.
    """
    config = problem.config.client
    deck, labelled = Deck.shuffled(examples, examples.unlabelled, examples.keys, config.epochs), None
    batches, size = whole_batches(deck.size, room), jnp.full_like(deck.size, room)
    if with_labels:
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(examples.keys)
        labelled = Deck.shuffled(examples, examples.labelled, keys, config.epochs)
        batches = whole_batches(labelled.size, config.batch_size)
        size = -(-deck.size // batches)
    return PairedDecks(deck, batches, size, labelled)


def cut(deck: Deck, index: jax.Array, batches: jax.Array, size: jax.Array | int, room: int) -> Batch:
    """The batch of local step `index` if each client has its own batch size and number of batches per epoch.

    An epoch has so many batches, each of `size` examples, int32 [] each. The batch's arrays have the length `room`.
    """
    epoch, number = jnp.divmod(index, jnp.maximum(batches, 1))
    batch = deck.at(epoch, number * size + jnp.arange(room))
    return batch._replace(mask=batch.mask & (jnp.arange(room) < size))


def whole_batches(count: jax.Array, size: int) -> jax.Array:
    """Batches of an epoch: count / size, rounded half to even, at least 1."""
    return jnp.maximum(jnp.round(count / size).astype(jnp.int32), 1)


def largest_batch(problem: Problem, n_max: int) -> int:
    """The most unlabelled images in a batch of any client with labels, if the configuration determines it.

    The result is n_max if the data lack labels, or the configuration does not say how many labels a client with n
    images has at least. It does not with `labels_per_class` if clients hold out test images, which may have them.
    """
    config, size = problem.config, problem.config.client.batch_size
    data, num_classes, images = config.data, problem.num_classes, np.arange(1, n_max + 1)
    if problem.lacks_labels:
        return n_max
    labelled = np.zeros_like(images)
    if data.reveal_labels:
        labelled = images
    elif data.labels == "clients" and not data.partition_file:
        if data.num_labelled and data.partition in EQUAL_SHARES:
            labelled = np.minimum(images, data.num_labelled // config.num_clients)
        elif data.labels_per_class and not data.num_labelled and data.partition in EACH_CLASS:
            if not data.client_test_share:
                labelled = num_classes * np.minimum(images // num_classes, data.labels_per_class)
        elif not data.labels_per_class and not data.num_labelled:
            labelled = np.floor(data.labelled_share * images + 0.5).astype(int)
    elif data.labels == "profile" and not data.partition_file and not isinstance(data.label_profile[0], str):
        labelled = np.floor(min(data.label_profile) * images + 0.5).astype(int)
    batches = np.maximum(np.round(labelled / size), 1)
    return max(int(np.max(np.ceil((images - labelled) / batches))), 1)
