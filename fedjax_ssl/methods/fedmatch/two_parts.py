"""Disjoint learning (FedMatch): parameters theta = sigma + psi, two parts as large as the model, trained in turn."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.learning.losses import proximal_term
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import add_up

SIGMA, PSI = "sigma", "psi"  # the entries of `params`: what labelled images train, and what unlabelled ones train


def merged(model: Model) -> Model:
    """The model of theta = sigma + psi, from one of the two parts; leaves may have further axes in front."""
    return Model(jax.tree.map(jnp.add, model.params[SIGMA], model.params[PSI]), model.batch_stats)


def divided(params: Any, is_sum: bool) -> dict[str, Any]:
    """Two parts to begin with: psi is a fifth of sigma. Fresh weights are sigma; given ones are the sum."""
    sigma = jax.tree.map(lambda leaf: leaf / 1.2, params) if is_sum else params
    return {SIGMA: sigma, PSI: jax.tree.map(lambda leaf: 0.2 * leaf, sigma)}


def distances(params: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """|psi|_1 and |sigma - psi|_2^2, sums over all entries: float32 [] each."""
    l1 = add_up(jnp.sum(jnp.abs(psi)) for psi in jax.tree.leaves(params[PSI]))
    return l1, 2 * proximal_term(params[SIGMA], params[PSI])
