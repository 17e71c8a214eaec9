"""Global proxy tuning (ProxyFL): the server trains each class's proxy towards all clients' proxies of the class."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.ops.batches import batch_positions, epoch_orders, num_batches
from fedjax_ssl.server.aggregation import Flow, Given, Link


def tune_proxies(**how: Any) -> Link:
    """Global proxy tuning after the mean. The classifier's kernel is trained; its bias stays the mean.

    Args:
        how: the keywords of `tuned_proxies`.
    """

    def apply(flow: Flow, given: Given) -> Flow:
        params = flow.model.params
        classifier, uploads = params["classifier"], given.received.uploads.model.params
        uploaded = jnp.swapaxes(uploads["classifier"]["kernel"], 1, 2)
        tuned = tuned_proxies(classifier["kernel"].T, uploaded, flow.weights > 0, given.key, **how).T
        params = {**params, "classifier": {**classifier, "kernel": tuned}}
        return flow._replace(model=flow.model._replace(params=params))

    return Link(apply)


def tuned_proxies(
    average: jax.Array,
    proxies: jax.Array,
    active: jax.Array,
    key: jax.Array,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    largest_margin: float = 0.0,
) -> jax.Array:
    """Global proxy tuning (ProxyFL): plain SGD on the points (omega_m^c, c) of all clients m and classes c.

        l(m, c) = -log( exp(-d_c) / sum_j exp(-d_j) )
        d_j = |omega_m^c - Omega^j|

    A margin is added to the true distance d_c: the distance of the most isolated averaged proxy to its nearest
    neighbour, at most `largest_margin`.

    Args:
        average: float32 [C, F], the averaged proxies, from which the global proxies Omega start.
        proxies: float32 [R, C, F], the clients' proxies.
        active: bool [R], which rows are present; others are ignored.
        key: for shuffling in each epoch.
        epochs: Q; 0 returns the average.
        batch_size: points per step; a short last batch is trained on.
        learning_rate: SGD's learning rate.
        largest_margin: 0: no margin.

    Returns:
        float32 [C, F].
    """
    rows, num_classes = proxies.shape[:2]
    if epochs == 0:
        return average
    proxies = jnp.where(active[:, None, None], proxies, 0.0)
    clients, classes = jnp.divmod(jnp.arange(rows * num_classes), num_classes)
    present = active[clients]
    orders = epoch_orders(key, present, epochs)
    gaps = jnp.where(jnp.eye(num_classes, dtype=bool), jnp.inf, distances(average[:, None], average))
    margin = jnp.minimum(jnp.max(jnp.min(gaps, axis=1)), largest_margin)

    def step(current: jax.Array, index: jax.Array):
        epoch, batch = jnp.divmod(index, steps)
        places, mask = batch_positions(batch, batch_size, jnp.sum(present))
        points = orders[epoch, jnp.minimum(places, len(classes) - 1)]
        of_client, labels = proxies[clients[points]], classes[points]

        def loss(tuned):
            d = distances(of_client[jnp.arange(len(points)), labels][:, None], tuned)
            logits = -(d + margin * jax.nn.one_hot(labels, num_classes))
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.sum(jnp.where(mask, losses, 0.0)) / jnp.maximum(jnp.sum(mask), 1)

        return current - learning_rate * jax.grad(loss)(current), None

    steps = num_batches(len(classes), batch_size)
    return jax.lax.scan(step, average, jnp.arange(epochs * steps))[0]


def distances(a: jax.Array, b: jax.Array) -> jax.Array:
    """Euclidean distances along the last axis; equal vectors have distance 0 and a zero gradient."""
    squared = jnp.sum(jnp.square(a - b), axis=-1)
    positive = squared > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squared, 1.0)), 0.0)
