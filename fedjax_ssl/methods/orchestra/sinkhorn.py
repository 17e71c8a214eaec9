"""Balanced soft assignments of vectors to clusters by the Sinkhorn-Knopp iteration."""

import jax
import jax.numpy as jnp

SHARPNESS = 25.0
LOOK_EVERY, TOLERANCE = 10, 1e-2  # the change of the scaling is tested in every tenth iteration, from the first


def sinkhorn(scores: jax.Array, present: jax.Array, max_iterations: int) -> jax.Array:
    """Assignments close to softmax(25 scores) that give all clusters the same total weight.

    P = softmax(25 scores) over the clusters is scaled to r_j P_ij c_i with alternating r = (1/G) / (c P) and
    c = (1/N) / (P r), starting from c = 1/N, until the change sum_i |c_i / c_i' - 1| is less than 0.01.

    Args:
        scores: float32 [N, G], similarities to the clusters.
        present: bool [N], False for rows that do not count.
        max_iterations: the most iterations.

    Returns:
        float32 [N, G], rows that sum to 1; 0 for rows that do not count.

    Source: Cuturi, "Sinkhorn Distances", NIPS 2013, as in Orchestra's public code.
    """
    kernel = jnp.where(present[:, None], jax.nn.softmax(SHARPNESS * scores, axis=1), 0.0)
    count, num_clusters = jnp.maximum(jnp.sum(present), 1), scores.shape[1]

    def product(one: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.matmul(one, other, precision="highest")

    def iterate(carry):
        number, _, samples, change = carry
        clusters = 1 / num_clusters / product(samples, kernel)
        new = jnp.where(present, 1 / count / product(kernel, clusters), 0.0)
        moved = jnp.sum(jnp.where(present, jnp.abs(samples / jnp.where(present, new, 1.0) - 1), 0.0))
        return number + 1, clusters, new, jnp.where(number % LOOK_EVERY == 0, moved, change)

    def goes_on(carry):
        number, _, _, change = carry
        return (number < max_iterations) & (change >= TOLERANCE)

    start = jnp.int32(0), jnp.ones(num_clusters), jnp.where(present, 1 / count, 0.0), jnp.float32(jnp.inf)
    _, clusters, samples, _ = jax.lax.while_loop(goes_on, iterate, start)
    return count * kernel * clusters * samples[:, None]
