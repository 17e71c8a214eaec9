"""Spliced networks, and permanent pseudo-labels once the sum of several models is confident (FedTriNet)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.client.deck import Examples
from fedjax_ssl.client.labels import logits_of_each, without_prior
from fedjax_ssl.client.steps import MakeOptimizer
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Problem
from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.batches import map_batches
from fedjax_ssl.ops.losses import mean_present
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import add_up

# From a client's first round with this many new labels on, it also trains on batches of accepted images (the code).
ENOUGH = 10


def head_part(network: Network, blocks: int = 1) -> tuple[str, ...]:
    """The names of the entries among a backbone's parameters that are the head part, its first `blocks` blocks.

    In the order in which the backbone creates its parameters, a block is an entry with a kernel (an array with two or
    more axes) and what follows until the next one, such as its normalisation.
    """
    order = []

    def note_order():  # JAX sorts the entries of a returned dict
        for name, entry in network.init(jax.random.key(0)).params["backbone"].items():
            order.append((name, any(leaf.ndim > 1 for leaf in jax.tree.leaves(entry))))

    jax.eval_shape(note_order)
    begun, names = 0, []
    for name, has_kernel in order:
        begun += has_kernel
        names += [name] if begun <= blocks else []
    return tuple(names)


def splice(head: tuple[str, ...], one: Model, other: Model) -> Model:
    """A model with the `head` of `one` and the rest of `other`, both parameters and statistics."""

    def with_head(rest, theirs):
        if "backbone" not in rest:
            return rest
        taken = {name: theirs["backbone"][name] for name in head if name in rest["backbone"]}
        return {**rest, "backbone": {**rest["backbone"], **taken}}

    return Model(with_head(other.params, one.params), with_head(other.batch_stats, one.batch_stats))


def freezing(head: tuple[str, ...], optimizer: MakeOptimizer) -> MakeOptimizer:
    """The optimizer, for which the head has no gradient, no share in gradient norms, and no weight decay."""

    def is_head(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[0].key == "backbone" and path[1].key in head, params
        )

    # Before the optimizer, so that norms and momentum exclude the head's gradient; and after it, against weight decay.
    frozen = optax.masked(optax.set_to_zero(), is_head)
    return lambda rate: optax.chain(frozen, optimizer(rate), frozen)


class Accepted(NamedTuple):
    """A client's memory of its pseudo-labels."""

    labels: jax.Array  # int32 [n_max], -1 for none
    rounds: jax.Array  # int32 [], number of rounds with at least `ENOUGH` new labels


def no_labels(data: FederatedData) -> Accepted:
    """The memory of all clients before the first round, leaves [K, ...]."""
    return Accepted(jnp.full(data.client_index.shape, -1, jnp.int32), jnp.zeros(len(data.client_index), jnp.int32))


def vote(problem: Problem, received: Model, own: Sequence[Model], images: jax.Array, examples: Examples) -> jax.Array:
    """The sum of the probabilities by the received model and by each client's own models, float32 [M, n_max, C].

    With `confidence.debias` each model's predictions are divided by its prior. Arguments as in `logits_of_each`.
    """
    each = logits_of_each(problem, received, own, images, examples)
    debias = problem.config.confidence.debias
    return add_up(jax.nn.softmax(without_prior(debias, logits, examples.unlabelled)[0]) for logits in each)


def accept(old: Accepted, votes: jax.Array, threshold: jax.Array, candidates: jax.Array) -> tuple[Accepted, jax.Array]:
    """The labels after a round, and the class with the largest vote, accepted or not, int32 [M, n_max].

    A candidate, bool [M, n_max], without a label gets one if its largest vote, of float32 [M, n_max, C], reaches the
    threshold.
    """
    chosen = jnp.argmax(votes, axis=-1).astype(jnp.int32)
    new = candidates & (old.labels < 0) & (jnp.max(votes, axis=-1) >= threshold)
    rounds = old.rounds + (jnp.sum(new, axis=1) >= ENOUGH).astype(jnp.int32)
    return Accepted(jnp.where(new, chosen, old.labels), rounds), chosen


def mean_confidence(
    network: Network, model: Model, images: jax.Array, counted: jax.Array, batch_size: int | None
) -> jax.Array:
    """The mean of max_c p(c | x) over the counted images, bool [N], of uint8 [N, H, W, C]: float32 []; 0 without any.

    The model is in evaluation mode; for the batch size see `map_batches`.
    """
    largest = map_batches(
        lambda rows: jnp.max(network.probabilities(model, images[rows]), axis=-1), jnp.arange(len(images)), batch_size
    )
    return mean_present(largest, counted)
