"""Labels without a client's prior: probabilities divided by their mean over its images.

Zhu et al., "Estimating Before Debiasing: A Bayesian Approach to Detaching Prior Bias in Federated Semi-Supervised
Learning" (FedDB), IJCAI 2024 (arXiv 2405.19789).
"""

import jax
import jax.numpy as jnp

DEBIASING = ("none", "app_u")  # of `config.confidence.debias`
LEAST_PRIOR = 1e-6  # of a class; a smaller one would make any probability the largest


def mean_prediction(probabilities: jax.Array, present: jax.Array) -> jax.Array:
    """P_k(c), the mean of p(c | x) over a client's images.

    Args:
        probabilities: float32 [..., n, C].
        present: bool [..., n].

    Returns:
        float32 [..., C]; 0 for a client without images.
    """
    total = jnp.sum(jnp.where(present[..., None], probabilities, 0.0), axis=-2)
    return total / jnp.maximum(jnp.sum(present, axis=-1, keepdims=True), 1)


def without_prior(kind: str, logits: jax.Array, present: jax.Array) -> jax.Array:
    """A model's logits of each client's images: by 'app_u' `debiased`.

    Args:
        kind: of `DEBIASING`.
        logits: float32 [..., n, C].
        present: bool [..., n], the images over which the model's mean prediction is taken.

    Returns:
        float32 [..., n, C].
    """
    prior = prior_of(kind, logits, present)
    return logits if prior is None else debiased(logits, prior[..., None, :])


def prior_of(kind: str, logits: jax.Array, present: jax.Array) -> jax.Array | None:
    """P_k of each client, see `mean_prediction`; None where the kind of debiasing is 'none'."""
    if kind == "none":
        return None
    return mean_prediction(jax.nn.softmax(logits), present)


def debiased(logits: jax.Array, prior: jax.Array | None) -> jax.Array:
    """Logits of p'(c | x) = (p(c | x) / P_k(c)) / sum_j p(j | x) / P_k(j).

    A client's model prefers the classes that the client has most of, right or wrong; the division takes that from its
    labels.

    Args:
        logits: float32 [..., C], of p.
        prior: float32 [..., C], P_k, or `LEAST_PRIOR` where it is below; None: the logits stay as they are.
    """
    if prior is None:
        return logits
    return logits - jnp.log(jnp.maximum(prior, LEAST_PRIOR))
