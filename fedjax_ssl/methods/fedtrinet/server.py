"""How sure a model is of a set of images: the mean of its largest probability."""

import jax
import jax.numpy as jnp

from fedjax_ssl.engine.interface import Problem
from fedjax_ssl.learning.batches import map_batches
from fedjax_ssl.learning.sgd import Model


def mean_confidence(problem: Problem, model: Model, images: jax.Array, counted: jax.Array) -> jax.Array:
    """The mean of max_c p(c | x) over the images that count: float32 []; 0 without any.

    Args:
        problem: the run; `eval_batch_size` images are scored at a time.
        model: in evaluation mode.
        images: uint8 [N, H, W, C].
        counted: bool [N].
    """
    largest = map_batches(
        lambda rows: jnp.max(problem.network.probabilities(model, images[rows]), axis=-1),
        jnp.arange(len(images)),
        problem.config.eval_batch_size,
    )
    return jnp.sum(jnp.where(counted, largest, 0.0)) / jnp.maximum(jnp.sum(counted), 1)
