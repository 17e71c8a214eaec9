"""The clusters of Orchestra, all of about equal size: a client's, of its memory of projections, and the server's."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client.deck import Examples
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Broadcast, Cohort, Finished, Images, Jobs, Phase, Previous, Upload
from fedjax_ssl.ops.losses import mean_present, unit_vectors
from fedjax_ssl.ops.trees import with_rows

PROJECTIONS = "projections"  # the entry of the clients' memory, a `Ring`
CENTROIDS = "centroids"  # metadata of an upload, float32 [L, D]; the server's entry has the same name
# Of the code: the assignments to clusters, the iterations of Sinkhorn-Knopp, and the server's SGD.
TEMPERATURE, SHARPNESS = 0.1, 25.0
LOOK_EVERY, TOLERANCE = 10, 1e-2  # the change of the scaling is tested in every tenth iteration, from the first
LOCAL_ROUNDS, LOCAL_ITERATIONS, GLOBAL_ITERATIONS = 5, 10, 100
STEPS, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 500, 0.01, 0.9, 1e-4


def sinkhorn(scores: jax.Array, present: jax.Array, max_iterations: int) -> jax.Array:
    """Assignments close to softmax(25 scores) that give all clusters the same total weight: float32 [N, G].

    P = softmax(25 scores) over the clusters is scaled to r_j P_ij c_i with alternating r = (1/G) / (c P) and c = (1/N)
    / (P r), starting from c = 1/N, until the change sum_i |c_i / c_i' - 1| is less than 0.01, at most `max_iterations`
    times. Rows sum to 1; those that are not present, bool [N], are 0.

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


# --- A client. --------------------------------------------------------------------------------------------------------


class Ring(NamedTuple):
    """The last projections of a client."""

    rows: jax.Array  # float32 [N, D], unit vectors
    oldest: jax.Array  # int32 [], the row that is replaced next


def pushed(ring: Ring, rows: jax.Array, present: jax.Array) -> Ring:
    """Replaces the oldest rows of the ring by the present ones, bool [B], of new rows, float32 [B, D].

    If there are more than the ring's rows, the last ones are kept.
    """
    number, count = len(ring.rows), jnp.sum(present)
    rank = jnp.cumsum(present) - 1
    enters = present & (rank >= count - number)
    rows = with_rows(ring.rows, (ring.oldest + rank) % number, rows, enters)
    return Ring(rows, (ring.oldest + count) % number)


def local_centroids(key: jax.Array, memory: jax.Array, number: int) -> jax.Array:
    """Orchestra's local clustering of unit vectors, float32 [N, D]: `number` <= N centroids, float32 [number, D].

    Each is a unit vector in the direction of the mean of its rows. Centroids start as rows drawn without replacement.
    In each of five iterations every row is assigned to its largest cluster by `sinkhorn`; a cluster without rows gets a
    random row.
    """
    first_key, empty_key = jax.random.split(key)
    everyone = jnp.ones(len(memory), bool)

    def cluster(index: jax.Array, centroids: jax.Array) -> jax.Array:
        assignments = sinkhorn(jnp.matmul(memory, centroids.T, precision="highest"), everyone, LOCAL_ITERATIONS)
        members = jax.nn.one_hot(jnp.argmax(assignments, axis=1), number)
        spare = jax.random.randint(jax.random.fold_in(empty_key, index), (number,), 0, len(memory))
        sums = jnp.matmul(members.T, memory, precision="highest")
        is_empty = jnp.sum(members, axis=0)[:, None] == 0
        return unit_vectors(jnp.where(is_empty, memory[spare], sums))

    chosen = jax.random.choice(first_key, len(memory), (number,), replace=False)
    return jax.lax.fori_loop(0, LOCAL_ROUNDS, cluster, memory[chosen])


def filled(
    project: Callable[[jax.Array, Images, jax.Array], jax.Array],
    images: Images,
    examples: Examples,
    rings: Ring,
    batch_size: int,
) -> Ring:
    """The rings of a cohort, leaves [M, ...], after a pass over each client's first images, as many as a ring has rows.

    `project` is a function (key, images [B, H, W, C], mask bool [B]) -> unit vectors [B, D], of one batch of the image
    table, uint8 [N, H, W, C].
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


def centroids_phase(number: int) -> Phase:
    """A phase without steps, after one that trains: each client clusters its memory and sends so many centroids."""

    def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
        cluster = jax.vmap(functools.partial(local_centroids, number=number))
        centroids = cluster(cohort.keys(), cohort.own[PROJECTIONS].rows)
        upload = Upload(previous.upload.model, {CENTROIDS: centroids})
        return Jobs(jnp.zeros_like(cohort.clients), upload, takes_part=previous.took_part)

    return Phase(
        prepare,
        start=lambda received, data, work, own: (),
        step=lambda received, data, work, carry, index, key: carry,
        finish=lambda received, work, carry, num_steps: Finished(work, {}, {}),
    )


# --- The server. ------------------------------------------------------------------------------------------------------


def global_centroids(centroids: jax.Array, vectors: jax.Array, present: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Global centroids, float32 [G, D], whose softmax assignments are close to balanced ones; and the last step's loss.

    Each of 500 SGD steps, with momentum and weight decay, minimises -mean_n cos(S_n, softmax(z_n / |z_n| . c / 0.1)). S
    are the assignments by `sinkhorn` to the centroids before the step. After the step centroids are normalised to
    length 1.

    The clients' centroids z are float32 [N, D], of which those count that are present, bool [N]. Without any the
    centroids do not change.
    """

    def similarities(vectors, centroids):
        return jnp.matmul(vectors, centroids.T, precision="highest")

    def loss(centroids: jax.Array) -> jax.Array:
        balanced = jax.lax.stop_gradient(sinkhorn(similarities(vectors, centroids), present, GLOBAL_ITERATIONS))
        predicted = jax.nn.softmax(similarities(unit_vectors(vectors), centroids) / TEMPERATURE)
        cosines = jnp.sum(unit_vectors(balanced) * unit_vectors(predicted), axis=1)
        return -mean_present(cosines, present)

    def step(carry, _):
        centroids, velocity = carry
        value, gradient = jax.value_and_grad(loss)(centroids)
        velocity = MOMENTUM * velocity + gradient + WEIGHT_DECAY * centroids
        return (unit_vectors(centroids - LEARNING_RATE * velocity), velocity), value

    (moved, _), losses = jax.lax.scan(step, (centroids, jnp.zeros_like(centroids)), length=STEPS)
    return jnp.where(jnp.any(present), moved, centroids), losses[-1]
