"""The server's clustering of all clients' centroids (Orchestra)."""

import jax
import jax.numpy as jnp

from fedjax_ssl.methods.orchestra.sinkhorn import sinkhorn
from fedjax_ssl.ops.losses import unit_vectors

LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 1e-4
MAX_ITERATIONS = 100  # of Sinkhorn-Knopp


def global_centroids(
    centroids: jax.Array, vectors: jax.Array, present: jax.Array, steps: int, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Global centroids whose softmax assignments are close to balanced ones.

    Each step of SGD, with momentum and weight decay, minimises -mean_n cos(S_n, softmax(z_n / |z_n| . c / tau)), where
    S are the assignments by `sinkhorn` to the centroids before the step. After the step centroids are normalised to
    length 1.

    Args:
        centroids: float32 [G, D], initial values.
        vectors: float32 [N, D], the clients' centroids z.
        present: bool [N], which of them count. Without any the centroids do not change.
        steps: number of SGD steps.
        temperature: tau.

    Returns:
        float32 [G, D], and the loss of the last step.
    """

    def similarities(vectors, centroids):
        return jnp.matmul(vectors, centroids.T, precision="highest")

    def loss(centroids: jax.Array) -> jax.Array:
        balanced = jax.lax.stop_gradient(sinkhorn(similarities(vectors, centroids), present, MAX_ITERATIONS))
        predicted = jax.nn.softmax(similarities(unit_vectors(vectors), centroids) / temperature)
        cosines = jnp.sum(unit_vectors(balanced) * unit_vectors(predicted), axis=1)
        return -jnp.sum(jnp.where(present, cosines, 0.0)) / jnp.maximum(jnp.sum(present), 1)

    def step(carry, _):
        centroids, velocity = carry
        value, gradient = jax.value_and_grad(loss)(centroids)
        velocity = MOMENTUM * velocity + gradient + WEIGHT_DECAY * centroids
        return (unit_vectors(centroids - LEARNING_RATE * velocity), velocity), value

    (moved, _), losses = jax.lax.scan(step, (centroids, jnp.zeros_like(centroids)), length=steps)
    return jnp.where(jnp.any(present), moved, centroids), losses[-1]
