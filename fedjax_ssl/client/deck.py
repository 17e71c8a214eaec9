"""A client's examples, and the order in which its local epochs pass over them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Cohort
from fedjax_ssl.ops.batches import epoch_orders, num_batches


class Examples(NamedTuple):
    """The examples of a cohort, for computations on all of them in large batches."""

    rows: jax.Array  # int32 [M, n_max], rows of the image table
    present: jax.Array  # bool [M, n_max], False beyond a client's size
    labels: jax.Array  # int32 [M, n_max], the visible labels, else -1
    keys: jax.Array  # [M], a PRNG key for each job; it does not depend on the rest of the cohort
    own: dict[str, Any]  # the clients' memory, leaves [M, ...]
    round: jax.Array | None = None  # int32 [M], rounds done before this one
    largest_size: jax.Array | None = None  # int32 [], see `epoch_orders`; None: n_max

    @classmethod
    def of(cls, data: FederatedData, cohort: Cohort, keys: jax.Array | None = None) -> "Examples":
        """The examples of the cohort's clients; by default with the cohort's keys."""
        rows, sizes = data.rows_of(cohort.clients), data.client_size[cohort.clients]
        present = jnp.arange(rows.shape[1]) < sizes[:, None]
        labels = jnp.where(present, data.visible_labels[rows], -1)
        keys, largest = cohort.keys() if keys is None else keys, jnp.minimum(data.largest_size, data.width)
        return cls(rows, present, labels, keys, cohort.own, cohort.round, largest)

    @property
    def labelled(self) -> jax.Array:
        """bool [M, n_max], the examples with a visible label."""
        return self.labels >= 0

    @property
    def unlabelled(self) -> jax.Array:
        """bool [M, n_max], the examples that are present and have no visible label."""
        return self.present & (self.labels < 0)


def split_keys(cohort: Cohort, number: int = 2) -> tuple[jax.Array, ...]:
    """So many PRNG keys of each job, [M] each: for the views that are labelled, for the order of training, ..."""
    return tuple(jax.vmap(lambda key: jax.random.split(key, number), out_axes=1)(cohort.keys()))


class Batch(NamedTuple):
    """The examples of one step, at most B."""

    rows: jax.Array  # int32 [B], rows of the image table
    positions: jax.Array  # int32 [B], indices among the client's examples, 0 to n_max - 1
    mask: jax.Array  # bool [B], False for the padding of a short batch
    epoch: jax.Array  # int32 [], local epoch, from 0
    inputs: Any = None  # [B, ...], the examples as they are stored; set by `read`
    labels: Any = None  # int32 [B], their visible labels; -1 for an example without one

    def read(self, data: FederatedData) -> "Batch":
        """The batch with its inputs and labels."""
        return self._replace(inputs=data.inputs[self.rows], labels=data.visible_labels[self.rows])


class Deck(NamedTuple):
    """Some of a client's examples, reshuffled for each local epoch. In `prepare` all leaves have a leading axis M."""

    rows: jax.Array  # int32 [n_max], all of the client's rows of the image table
    order: jax.Array  # int32 [E, n_max], positions of the deck's examples in random order, then all other positions
    size: jax.Array  # int32 [], number of examples in the deck

    @classmethod
    def shuffled(cls, examples: Examples, included: jax.Array, keys: jax.Array, epochs: int) -> "Deck":
        """The decks of a cohort, with the examples that are `included`, bool [M, n_max]."""
        order = jax.vmap(lambda key, chosen: epoch_orders(key, chosen, epochs, examples.largest_size))(keys, included)
        return cls(examples.rows, order, jnp.sum(included, axis=1))

    def num_steps(self, batch_size: int) -> jax.Array:
        """The number of local steps over all epochs, including short last batches: int32 with the shape of `size`."""
        return self.order.shape[-2] * num_batches(self.size, batch_size)

    def batch(self, index: jax.Array, batch_size: int) -> Batch:
        """The batch of local step `index`; after the last epoch the first epoch repeats."""
        epoch, number = jnp.divmod(index, jnp.maximum(num_batches(self.size, batch_size), 1))
        return self.at(epoch, number * batch_size + jnp.arange(batch_size))

    def at(self, epoch: jax.Array, places: jax.Array) -> Batch:
        """The examples at some places, int32 [B], of an epoch's shuffled list; places beyond `size` are padding.

        Padding repeats the deck's examples, because a view may take values from other rows.
        """
        positions = self.order[epoch % len(self.order), places % jnp.maximum(self.size, 1)]
        return Batch(self.rows[positions], positions, places < self.size, epoch)


def of_whole_batches(deck: Deck, batch_size: int) -> Deck:
    """A deck without each epoch's short last batch, unless it is the only batch; the omitted examples vary."""
    whole = deck.size // batch_size * batch_size
    return deck._replace(size=jnp.where(whole > 0, whole, deck.size))
