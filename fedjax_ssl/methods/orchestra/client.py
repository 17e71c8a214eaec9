"""A client's memory of projections, and its clusters of about equal size, whose centroids it sends."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client.deck import Examples
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Broadcast, Cohort, Finished, Images, Jobs, Phase, Previous, Upload
from fedjax_ssl.methods.orchestra.sinkhorn import sinkhorn
from fedjax_ssl.ops.losses import unit_vectors
from fedjax_ssl.ops.sgd import Model

PROJECTIONS = "projections"  # the entry of the clients' memory, a `Ring`
CENTROIDS = "centroids"  # metadata of an upload, float32 [L, D]; the server's entry has the same name
ROUNDS_OF_CLUSTERING = 5
MAX_ITERATIONS = 10  # of Sinkhorn-Knopp


class Ring(NamedTuple):
    """The last projections of a client."""

    rows: jax.Array  # float32 [N, D], unit vectors
    oldest: jax.Array  # int32 [], the row that is replaced next


def pushed(ring: Ring, rows: jax.Array, present: jax.Array) -> Ring:
    """Replaces the oldest rows of the ring by new ones.

    Args:
        ring: has N rows.
        rows: float32 [B, D].
        present: bool [B], which rows are new. If there are more than N, the last ones are kept.
    """
    number, count = len(ring.rows), jnp.sum(present)
    rank = jnp.cumsum(present) - 1
    enters = present & (rank >= count - number)
    places = jnp.where(enters, (ring.oldest + rank) % number, number)  # out of bounds: dropped
    return Ring(ring.rows.at[places].set(rows, mode="drop"), (ring.oldest + count) % number)


def local_centroids(key: jax.Array, memory: jax.Array, number: int) -> jax.Array:
    """Orchestra's local clustering: each centroid is the direction of the mean of its rows.

    Centroids start as rows drawn without replacement. In each of five iterations every row is assigned to its largest
    cluster by `sinkhorn`; a cluster without rows gets a random row.

    Args:
        key: a JAX random key.
        memory: float32 [N, D], unit vectors.
        number: number of clusters, at most N.

    Returns:
        float32 [number, D], unit vectors.
    """
    first_key, empty_key = jax.random.split(key)
    everyone = jnp.ones(len(memory), bool)

    def cluster(index: jax.Array, centroids: jax.Array) -> jax.Array:
        assignments = sinkhorn(jnp.matmul(memory, centroids.T, precision="highest"), everyone, MAX_ITERATIONS)
        members = jax.nn.one_hot(jnp.argmax(assignments, axis=1), number)
        spare = jax.random.randint(jax.random.fold_in(empty_key, index), (number,), 0, len(memory))
        sums = jnp.matmul(members.T, memory, precision="highest")
        is_empty = jnp.sum(members, axis=0)[:, None] == 0
        return unit_vectors(jnp.where(is_empty, memory[spare], sums))

    chosen = jax.random.choice(first_key, len(memory), (number,), replace=False)
    return jax.lax.fori_loop(0, ROUNDS_OF_CLUSTERING, cluster, memory[chosen])


def filled(
    project: Callable[[jax.Array, Images, jax.Array], jax.Array],
    images: Images,
    examples: Examples,
    rings: Ring,
    batch_size: int,
) -> Ring:
    """The rings of a cohort after one pass over each client's first images, as many as a ring has rows.

    Args:
        project: (key, images [B, H, W, C], mask bool [B]) -> unit vectors [B, D], of one batch.
        images: uint8 [N, H, W, C], the flat table.
        examples: the cohort's examples.
        rings: leaves [M, ...].
        batch_size: B.
    """
    batches = -(-min(rings.rows.shape[1], examples.rows.shape[1]) // batch_size)

    def cut(leaf: jax.Array) -> jax.Array:
        """[n] as [batches, B], padded with 0."""
        padding = (0, max(batches * batch_size - len(leaf), 0))
        return jnp.pad(leaf, padding)[: batches * batch_size].reshape(batches, batch_size)

    def of_client(job):
        rows, present, key, ring = job

        def push(ring, batch):
            rows, present, number = batch
            projections = project(jax.random.fold_in(key, number), images[rows], present)
            return pushed(ring, projections, present), None

        batch = cut(rows), cut(present), jnp.arange(batches)
        return jax.lax.scan(push, ring, batch)[0]

    return jax.lax.map(of_client, (examples.rows, examples.present, examples.keys, rings))


class Clustered(NamedTuple):
    """What one client uploads."""

    model: Model
    centroids: jax.Array


def centroids_phase(number: int) -> Phase:
    """A phase without steps, after one that trains: each client clusters its memory and sends the centroids.

    Args:
        number: number of centroids.
    """

    def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
        del received, data
        centroids = jax.vmap(lambda key, memory: local_centroids(key, memory, number))(
            cohort.keys(), cohort.own[PROJECTIONS].rows
        )
        work = Clustered(previous.upload.model, centroids)
        return Jobs(jnp.zeros_like(cohort.clients), work, takes_part=previous.took_part)

    return Phase(
        prepare,
        start=lambda received, data, work, own: (),
        step=lambda received, data, work, carry, index, key: carry,
        finish=lambda received, work, carry, num_steps: Finished(
            Upload(work.model, {CENTROIDS: work.centroids}), {}, {}
        ),
    )
