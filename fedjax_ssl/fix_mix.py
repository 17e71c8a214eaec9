"""The client's local training on a fix set and a mix set (FedAnchor, appendix B; SemiFL, section 3.2).

Pseudo-labels are made once a round. The qualified examples are the fix set, trained on strongly augmented; each is
also mixed with an example drawn from the whole client, whatever its score.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import sgd
from fedjax_ssl.augment import mixup
from fedjax_ssl.batches import batch_positions
from fedjax_ssl.clients import Finished, Jobs, Phase
from fedjax_ssl.errors import UserError
from fedjax_ssl.losses import cross_entropy, mixup_cross_entropy
from fedjax_ssl.method import Problem, Report

MIX_ORDERS = ("mix_then_augment", "augment_then_mix")


class FixMixWork(NamedTuple):
    """What one client trains on this round; positions count its own examples, 0 to n_max - 1.

    Attributes:
        rows: int32 [n_max], its rows of the image table.
        labels: int32 [n_max], its pseudo-labels.
        num_fix: int32 [], size of the fix set.
        fix_order: int32 [E, n_max], for each local epoch the fix set's positions in random order, first.
        mix: int32 [n_max], the mix set's positions, drawn once a round.
    """

    rows: jax.Array
    labels: jax.Array
    num_fix: jax.Array
    fix_order: jax.Array
    mix: jax.Array


class _Training(NamedTuple):
    learner: sgd.Learner
    metric_sums: dict[str, jax.Array]


def fix_mix_phase(
    problem: Problem,
    label: Callable[..., Report],
    *,
    mixup_alpha: float,
    mix_weight: float,
    mix_order: str,
    parts: tuple[str, ...],
) -> Phase:
    """The phase: label everything once, train on the fix and the mix set, upload the trained parts.

    Args:
        problem: the run.
        label: (broadcast, data, rows [M, n_max], keys [M]) -> Report with leaves [M, n_max].
        mixup_alpha: a in lambda ~ Beta(a, a), FedAnchor eq. 8, one lambda a batch; 0 trains without mixup.
        mix_weight: b in L_fix + b L_mix, FedAnchor eq. 10.
        mix_order: 'mix_then_augment', alpha(lambda x + (1 - lambda) x') as FedAnchor writes it (eq. 8, 9), or
            'augment_then_mix', lambda alpha(x) + (1 - lambda) alpha(x') as SemiFL does.
        parts: the parts of the model that are trained and uploaded.

    Returns:
        A phase whose broadcast has `params`, `batch_stats` and `learning_rate`.

    Raises:
        UserError: for an unknown mix order.
    """
    if mix_order not in MIX_ORDERS:
        raise UserError(f"unknown mix order {mix_order!r}; known: {', '.join(MIX_ORDERS)}")
    network, config = problem.network, problem.config.client
    with_mixup = mixup_alpha > 0

    def prepare(broadcast, data, cohort, previous) -> Jobs:
        del previous
        rows, sizes = data.client_index[cohort.clients], data.client_size[cohort.clients]
        label_keys, shuffle_keys, mix_keys = jax.vmap(lambda k: jax.random.split(k, 3), out_axes=1)(cohort.keys())
        report = label(broadcast, data, rows, label_keys)
        qualified = report.qualified & (jnp.arange(rows.shape[1]) < sizes[:, None])
        work = FixMixWork(
            rows=rows,
            labels=next(iter(report.pseudo_labels.values())),
            num_fix=jnp.sum(qualified, axis=1),
            fix_order=jax.vmap(lambda k, q: _orders(k, q, config.epochs))(shuffle_keys, qualified),
            mix=jax.vmap(_draw_with_replacement, in_axes=(0, 0, None))(mix_keys, sizes, rows.shape[1]),
        )
        return Jobs(config.epochs * _steps_per_epoch(work.num_fix), work, report._replace(qualified=qualified))

    def start(broadcast, work, state) -> _Training:
        del work, state
        optimizer = sgd.make_optimizer(config, broadcast.learning_rate)
        zero = jnp.zeros(())
        names = ("client_loss", "fix_loss", "mix_loss") if with_mixup else ("client_loss", "fix_loss")
        return _Training(
            sgd.start(optimizer, broadcast.params, broadcast.batch_stats, parts), dict.fromkeys(names, zero)
        )

    def step(broadcast, data, work, carry, index, key) -> _Training:
        epoch, batch = jnp.divmod(index, _steps_per_epoch(work.num_fix))
        positions, mask = batch_positions(batch, config.batch_size, work.num_fix)
        positions = jnp.minimum(positions, len(work.rows) - 1)
        strong_key, mix_key = jax.random.split(key)

        fix = work.fix_order[epoch, positions]
        x_fix, y_fix = data.images[work.rows[fix]], work.labels[fix]
        views = (problem.strong(strong_key, x_fix),)
        if with_mixup:
            mix = work.mix[positions]
            x_mix, y_mix = data.images[work.rows[mix]], work.labels[mix]
            mixture, mixing = mix_images(problem, mix_key, x_fix, x_mix, mixup_alpha, mix_order)
            views += (mixture,)

        def loss_fn(params, batch_stats):
            outputs, batch_stats = network.train(params, batch_stats, views, mask)
            fix_loss = cross_entropy(outputs[0].logits, y_fix, mask)  # eq. 7
            if not with_mixup:
                return fix_loss, (batch_stats, {"client_loss": fix_loss, "fix_loss": fix_loss})
            mix_loss = mixup_cross_entropy(outputs[1].logits, y_fix, y_mix, mixing, mask)  # eq. 9
            loss = fix_loss + mix_weight * mix_loss  # eq. 10
            return loss, (batch_stats, {"client_loss": loss, "fix_loss": fix_loss, "mix_loss": mix_loss})

        optimizer = sgd.make_optimizer(config, broadcast.learning_rate)
        learner, metrics = sgd.step(loss_fn, optimizer, carry.learner, parts)
        return _Training(learner, jax.tree.map(jnp.add, carry.metric_sums, metrics))

    def finish(broadcast, work, carry, num_steps) -> Finished:
        del broadcast, work
        upload = model_upload(network, carry.learner, parts)
        return Finished(upload, (), jax.tree.map(lambda total: total / num_steps, carry.metric_sums))

    def _steps_per_epoch(num_fix):
        return -(-num_fix // config.batch_size)

    return Phase(prepare, start, step, finish)


class ModelUpload(NamedTuple):
    """A client's model as it travels up.

    Attributes:
        params: the parts that the client trained.
        batch_stats: its running averages under the 'running' policy, else ().
    """

    params: Any
    batch_stats: Any


def model_upload(network, model: Any, parts: tuple[str, ...]) -> ModelUpload:
    """The named parts of a Learner's or a State's model, and its statistics where the policy aggregates them."""
    statistics = model.batch_stats if network.normalisation == "running" else ()
    return ModelUpload(sgd.select(model.params, parts), statistics)


def mix_images(
    problem: Problem, key: jax.Array, images: jax.Array, partners: jax.Array, alpha: float, mix_order: str
) -> tuple[jax.Array, jax.Array]:
    """Mixtures of two batches [B, H, W, C], weakly augmented, float32 in 0..255, and the lambda of the batch."""
    lambda_key, weak_key, partner_key = jax.random.split(key, 3)
    mixing = mixup.sample_lambda(lambda_key, alpha)
    if mix_order == "mix_then_augment":
        return problem.weak(weak_key, mixup.mix(images, partners, mixing)), mixing
    augmented = problem.weak(weak_key, images), problem.weak(partner_key, partners)
    return mixup.mix(*augmented, mixing), mixing


def _orders(key: jax.Array, qualified: jax.Array, epochs: int) -> jax.Array:
    """For each epoch a random order of the qualified positions, the others behind them: int32 [E, n_max]."""
    draws = jax.random.uniform(key, (epochs, len(qualified)))
    return jnp.argsort(jnp.where(qualified, draws, jnp.inf), axis=1)


def _draw_with_replacement(key: jax.Array, size: jax.Array, count: int) -> jax.Array:
    """FedAnchor eq. 6: `count` positions drawn from 0..size-1; as many are used as the fix set has."""
    return jnp.minimum(jnp.floor(jax.random.uniform(key, (count,)) * size).astype(jnp.int32), size - 1)
