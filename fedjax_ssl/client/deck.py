"""A client's examples, and the order in which its local epochs go through them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Cohort
from fedjax_ssl.learning.batches import epoch_orders, num_batches


class Examples(NamedTuple):
    """The examples of a cohort, for work on all of them in large batches."""

    rows: jax.Array  # int32 [M, n_max], of the image table
    present: jax.Array  # bool [M, n_max], False beyond a client's size
    labels: jax.Array  # int32 [M, n_max], the visible ones, else -1
    keys: jax.Array  # [M], one for each job; it does not depend on the rest of the cohort
    own: dict[str, Any]  # the clients' memory, leaves [M, ...]

    @classmethod
    def of(cls, data: FederatedData, cohort: Cohort, keys: jax.Array | None = None) -> "Examples":
        """The examples of the cohort's clients; keys by default are the cohort's."""
        rows, sizes = data.rows_of(cohort.clients), data.client_size[cohort.clients]
        present = jnp.arange(rows.shape[1]) < sizes[:, None]
        labels = jnp.where(present, data.visible_labels[rows], -1)
        return cls(rows, present, labels, cohort.keys() if keys is None else keys, cohort.own)

    @property
    def labelled(self) -> jax.Array:
        """bool [M, n_max], which of them have a visible label."""
        return self.labels >= 0

    @property
    def unlabelled(self) -> jax.Array:
        """bool [M, n_max], which of them are present and have no visible label."""
        return self.present & (self.labels < 0)


class Batch(NamedTuple):
    """One step's examples, B at the most."""

    rows: jax.Array  # int32 [B], of the image table
    positions: jax.Array  # int32 [B], among the client's examples, 0 to n_max - 1
    places: jax.Array  # int32 [B], in the epoch's list, the same in every epoch
    mask: jax.Array  # bool [B], False for the padding of a short batch
    epoch: jax.Array  # int32 [], local epoch, from 0
    inputs: Any = None  # [B, ...], the examples as they are stored, see `read`
    labels: Any = None  # int32 [B], their visible labels; -1 for an example without one

    def read(self, data: FederatedData) -> "Batch":
        """The batch with its inputs and labels."""
        return self._replace(inputs=data.inputs[self.rows], labels=data.visible_labels[self.rows])


class Deck(NamedTuple):
    """Some of a client's examples, shuffled anew for each local epoch. In `prepare` all leaves have a leading [M]."""

    rows: jax.Array  # int32 [n_max], all of the client's rows of the image table
    # int32 [E, n_max], positions of the examples in the deck in random order; the others follow. [E, B] if an epoch is
    # one batch, see `drawn`.
    order: jax.Array
    size: jax.Array  # int32 [], how many are in the deck

    @classmethod
    def shuffled(cls, examples: Examples, included: jax.Array, keys: jax.Array, epochs: int) -> "Deck":
        """The decks of a cohort, of the included examples, bool [M, n_max]."""
        order = jax.vmap(lambda key, chosen: epoch_orders(key, chosen, epochs))(keys, included)
        return cls(examples.rows, order, jnp.sum(included, axis=1))

    @classmethod
    def drawn(cls, examples: Examples, included: jax.Array, keys: jax.Array, steps: int, batch_size: int) -> "Deck":
        """The decks of so many steps, each on a batch drawn uniformly and without replacement from all included.

        An epoch of such a deck is one batch. If fewer examples are included than a batch has, it has all of them.
        """
        deck = cls.shuffled(examples, included, keys, steps)
        width = min(batch_size, included.shape[-1])
        return cls(deck.rows, deck.order[..., :width], jnp.minimum(deck.size, width))

    def of_whole_batches(self, batch_size: int) -> "Deck":
        """Without the last, short batch of each epoch, unless it is the only one; the left-out examples differ."""
        whole = self.size // batch_size * batch_size
        return self._replace(size=jnp.where(whole > 0, whole, self.size))

    def num_steps(self, batch_size: int) -> jax.Array:
        """Local steps of all epochs, a short last batch included: int32 of `size`'s shape."""
        return self.order.shape[-2] * num_batches(self.size, batch_size)

    def batch(self, index: jax.Array, batch_size: int) -> Batch:
        """The batch of local step `index`; after the last epoch the deck starts again with the first."""
        return self.cut(index, num_batches(self.size, batch_size), batch_size, batch_size)

    def cut(self, index: jax.Array, batches: jax.Array, size: jax.Array | int, room: int) -> Batch:
        """The batch of local step `index` where each client has its number of batches in an epoch, and their size.

        Args:
            index: int32 [], local step, from 0.
            batches: int32 [], batches of an epoch; examples beyond them have no step.
            size: int32 [], examples of a batch, at most `room`.
            room: B, the length of the batch's arrays.
        """
        epoch, number = jnp.divmod(index, jnp.maximum(batches, 1))
        places = number * size + jnp.arange(room)
        mask = (places < self.size) & (jnp.arange(room) < size)
        places = jnp.minimum(places, self.order.shape[-1] - 1)
        positions = self.order[epoch % len(self.order), places]
        return Batch(self.rows[positions], positions, places, mask, epoch)


class Work(NamedTuple):
    """What a client trains on that needs nothing but its images, as `local_sgd` takes it."""

    deck: Deck
