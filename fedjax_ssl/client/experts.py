"""Labels of the surer of two experts, and what the other one says (FedLabel, eq. 3, 4 and 7)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Choice(NamedTuple):
    """What two experts say about some images.

    Attributes:
        labels: int32 [...], of the chosen expert.
        probability: float32 [...], that of this label.
        other: float32 [..., C], logarithms of the other expert's probabilities.
        agrees: bool [...], whether both experts have this label; False where one labels alone.
        ratio: float32 [...], h(other) / h(chosen), from 0 to 1 if the surer one was chosen.
    """

    labels: jax.Array
    probability: jax.Array
    other: jax.Array
    agrees: jax.Array
    ratio: jax.Array


def variance(log_probabilities: jax.Array) -> jax.Array:
    """h, the unbiased variance of the C entries, [..., C] to [...]: 0 for a uniform prediction, 1/C for a sure one."""
    return jnp.var(jnp.exp(log_probabilities), axis=-1, ddof=1)


def inverse_entropy(log_probabilities: jax.Array) -> jax.Array:
    """h, 1 / (H + 1e-5), [..., C] to [...] (FedLabel, Figure 9)."""
    return 1.0 / (1e-5 - jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1))


CONFIDENCES = {"variance": variance, "entropy": inverse_entropy}
EXPERTS = ("both", "local", "global")


def choose(of_global: jax.Array, of_local: jax.Array, confidence: str, experts: str = "both") -> Choice:
    """The expert that labels each image.

    Args:
        of_global, of_local: float32 [..., C], logits of the received model, and of the client's.
        confidence: h, a key of `CONFIDENCES`.
        experts: 'both', the surer one, a tie goes to the global one; 'local' or 'global': always that one.
    """
    of_global, of_local = jax.nn.log_softmax(of_global), jax.nn.log_softmax(of_local)
    h_global, h_local = CONFIDENCES[confidence](of_global), CONFIDENCES[confidence](of_local)
    takes_local = h_local > h_global if experts == "both" else jnp.full(h_local.shape, experts == "local")
    chosen = jnp.where(takes_local[..., None], of_local, of_global)
    h_chosen, h_other = jnp.where(takes_local, h_local, h_global), jnp.where(takes_local, h_global, h_local)
    other = jnp.where(takes_local[..., None], of_global, of_local)
    labels = jnp.argmax(chosen, axis=-1).astype(jnp.int32)
    return Choice(
        labels=labels,
        probability=jnp.exp(jnp.max(chosen, axis=-1)),
        other=other,
        agrees=(jnp.argmax(other, axis=-1) == labels) & (experts == "both"),
        ratio=jnp.where(h_chosen > 0, h_other / jnp.where(h_chosen > 0, h_chosen, 1.0), 1.0),
    )
