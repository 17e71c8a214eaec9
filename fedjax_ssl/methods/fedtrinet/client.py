"""Pseudo-labels for good: where the sum of several models' probabilities reaches a threshold, once (FedTriNet)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client.deck import Examples
from fedjax_ssl.client.labels import logits_of_each, without_prior
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Problem
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import add_up


class Accepted(NamedTuple):
    """A client's memory of its pseudo-labels."""

    labels: jax.Array  # int32 [n_max], -1 for an image that has none
    rounds: jax.Array  # int32 [], how many rounds brought enough new ones


def no_labels(data: FederatedData) -> Accepted:
    """That of all clients before the first round, leaves [K, ...]."""
    return Accepted(jnp.full(data.client_index.shape, -1, jnp.int32), jnp.zeros(len(data.client_index), jnp.int32))


def vote(problem: Problem, received: Model, own: Sequence[Model], images: jax.Array, examples: Examples) -> jax.Array:
    """The sum of the probabilities of the received model and of models of each client's own.

    Args:
        problem: the run; with `confidence.debias` each model's predictions are freed of its prior.
        received, own, images, examples: see `logits_of_each`.

    Returns:
        float32 [M, n_max, C].
    """
    each = logits_of_each(problem, received, own, images, examples)
    debias = problem.config.confidence.debias
    return add_up(jax.nn.softmax(without_prior(debias, logits, examples.unlabelled)) for logits in each)


def accept(
    old: Accepted, votes: jax.Array, threshold: jax.Array, candidates: jax.Array, enough: int
) -> tuple[Accepted, jax.Array]:
    """A round's new labels.

    Args:
        old: leaves [M, ...]; who has a label keeps it.
        votes: float32 [M, n_max, C].
        threshold: float32 [], which the largest of an image's votes must reach.
        candidates: bool [M, n_max], images that may get a label.
        enough: new labels of a round for it to be counted.

    Returns:
        The Accepted after the round; and the class of the largest vote, accepted or not, int32 [M, n_max].
    """
    chosen = jnp.argmax(votes, axis=-1).astype(jnp.int32)
    new = candidates & (old.labels < 0) & (jnp.max(votes, axis=-1) >= threshold)
    rounds = old.rounds + (jnp.sum(new, axis=1) >= enough).astype(jnp.int32)
    return Accepted(jnp.where(new, chosen, old.labels), rounds), chosen
