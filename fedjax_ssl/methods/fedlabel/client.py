"""Labels from the more confident of two experts, and the other expert's prediction (FedLabel, eq. 3, 4 and 7)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client.deck import Deck, Examples
from fedjax_ssl.client.labels import logits_of_each, without_prior
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Problem
from fedjax_ssl.ops.sgd import Model


class ExpertChoice(NamedTuple):
    """The experts' choice of labels for some images."""

    labels: jax.Array  # int32 [...], of the chosen expert
    probability: jax.Array  # float32 [...], of this label
    other: jax.Array  # float32 [..., C], log-probabilities of the other expert
    agrees: jax.Array  # bool [...], whether both experts predict this label; False if only one expert labels
    ratio: jax.Array  # float32 [...], h(other) / h(chosen), from 0 to 1 if the more confident one was chosen


def variance(log_probabilities: jax.Array) -> jax.Array:
    """h, the unbiased variance of C entries, [..., C] to [...]: 0 for a uniform prediction, 1/C for a certain one."""
    return jnp.var(jnp.exp(log_probabilities), axis=-1, ddof=1)


def inverse_entropy(log_probabilities: jax.Array) -> jax.Array:
    """h, 1 / (H + 1e-5), [..., C] to [...] (FedLabel, Figure 9)."""
    return 1.0 / (1e-5 - jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1))


CONFIDENCES = {"variance": variance, "entropy": inverse_entropy}
EXPERTS = ("both", "local", "global")


def choose(of_global: jax.Array, of_local: jax.Array, confidence: str, experts: str = "both") -> ExpertChoice:
    """Chooses the expert that labels each image, from logits of the received model and of the client's own, [..., C].

    Of 'both' experts the one with the larger `confidence` labels, in a tie the global one; else the one that is named.
    """
    of_global, of_local = jax.nn.log_softmax(of_global), jax.nn.log_softmax(of_local)
    h_global, h_local = CONFIDENCES[confidence](of_global), CONFIDENCES[confidence](of_local)
    takes_local = h_local > h_global if experts == "both" else jnp.full(h_local.shape, experts == "local")
    chosen = jnp.where(takes_local[..., None], of_local, of_global)
    h_chosen, h_other = jnp.where(takes_local, h_local, h_global), jnp.where(takes_local, h_global, h_local)
    other = jnp.where(takes_local[..., None], of_global, of_local)
    labels = jnp.argmax(chosen, axis=-1).astype(jnp.int32)
    return ExpertChoice(
        labels=labels,
        probability=jnp.exp(jnp.max(chosen, axis=-1)),
        other=other,
        agrees=(jnp.argmax(other, axis=-1) == labels) & (experts == "both"),
        ratio=jnp.where(h_chosen > 0, h_other / jnp.where(h_chosen > 0, h_chosen, 1.0), 1.0),
    )


def drawn_deck(examples: Examples, included: jax.Array, steps: int, batch_size: int) -> Deck:
    """Decks for a number of steps, each on a batch drawn uniformly and without replacement from the included examples.

    An epoch of such a deck is one batch, and its `order` is [steps, B]. If fewer than B examples are included, bool
    [M, n_max], each batch has all of them.
    """
    deck, width = Deck.shuffled(examples, included, examples.keys, steps), min(batch_size, included.shape[-1])
    return deck._replace(order=deck.order[..., :width], size=jnp.minimum(deck.size, width))


def score_drawn(
    problem: Problem, received: Model, local: Model, data: FederatedData, examples: Examples, deck: Deck
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Both experts' logits for the images that are used in this round, or for all images if that costs no more.

    The experts are w and w_L, with leaves [M, ...]. Their logits are float32 [M, n_max, C], debiased by
    `confidence.debias`, and 0 for other images; the third result, bool [M, n_max], says which images they are for.
    """
    (num_jobs, n_max), place = examples.rows.shape, jnp.arange(examples.rows.shape[1])
    positions = deck.order.reshape(num_jobs, -1)
    if positions.shape[1] >= n_max:
        positions = jnp.broadcast_to(place, (num_jobs, n_max))
    drawn = examples._replace(rows=jnp.take_along_axis(examples.rows, positions, axis=1))
    put = jax.vmap(lambda at, values: jnp.zeros((n_max, *values.shape[1:]), values.dtype).at[at].set(values))
    made = put(positions, jnp.ones(positions.shape, bool)) & examples.present
    each = logits_of_each(problem, received, (local,), data.inputs, drawn)
    known = made & examples.unlabelled
    debias = problem.config.confidence.debias
    of_global, of_local = (without_prior(debias, put(positions, scores), known)[0] for scores in each)
    return of_global, of_local, made
