"""What the server trains by itself: epochs over its labelled anchors."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl import sgd
from fedjax_ssl.batches import batch_positions
from fedjax_ssl.network import BatchStats, Params


def train_epochs(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    params: Params,
    batch_stats: BatchStats,
    rows: jax.Array,
    *,
    parts: tuple[str, ...],
    epochs: int,
    batch_size: int,
    key: jax.Array,
) -> tuple[Params, BatchStats, dict[str, jax.Array]]:
    """SGD over the given rows, shuffled anew in each epoch, starting with a fresh optimiser.

    Args:
        loss_fn: (params, batch_stats, rows [B], mask [B], key) -> (loss, (batch_stats, metrics)).
        optimizer: of the parts that are trained.
        params, batch_stats: the model to start from.
        rows: int32 [S], the server's examples.
        parts: names of the top-level entries of `params` to train.
        epochs: passes over the rows.
        batch_size: the last batch of an epoch may be short; its padding is masked.
        key: of this training.

    Returns:
        The trained parameters, the statistics, and each metric's mean over the steps of the last epoch.
    """
    batch_size = min(batch_size, len(rows))
    steps_per_epoch = -(-len(rows) // batch_size)

    shuffle_key, steps_key = jax.random.split(key)
    orders = jax.vmap(lambda k: jax.random.permutation(k, rows))(jax.random.split(shuffle_key, epochs))

    def step(learner, index):
        epoch, batch = jnp.divmod(index, steps_per_epoch)
        positions, mask = batch_positions(batch, batch_size, len(rows))
        batch_rows = orders[epoch, jnp.minimum(positions, len(rows) - 1)]
        step_key = jax.random.fold_in(steps_key, index)
        return sgd.step(
            lambda params, stats: loss_fn(params, stats, batch_rows, mask, step_key),
            optimizer,
            learner,
            parts,
        )

    learner = sgd.start(optimizer, params, batch_stats, parts)
    learner, metrics = jax.lax.scan(step, learner, jnp.arange(epochs * steps_per_epoch))
    last_epoch = jax.tree.map(lambda metric: jnp.mean(metric[-steps_per_epoch:]), metrics)
    return learner.params, learner.batch_stats, last_epoch
