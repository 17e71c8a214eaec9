"""The client's local training on a fix set and a mix set (FedAnchor, appendix B; SemiFL, section 3.2).

Pseudo-labels are made once a round. The qualified examples are the fix set, trained on strongly augmented; each is
also mixed with an example drawn from the whole client, whatever its score.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.augment.mixup import MIX_ORDERS, mix_images
from fedjax_ssl.client import local_sgd
from fedjax_ssl.client.labels import CohortExamples
from fedjax_ssl.client.local_sgd import Training
from fedjax_ssl.engine.interface import Augmentation, Finished, Jobs, Phase, Problem, Report
from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.batches import batch_positions, draw_with_replacement, epoch_orders, num_batches
from fedjax_ssl.learning.losses import cross_entropy, mixup_cross_entropy


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


class Labelled(NamedTuple):
    """What labelling a cohort gives.

    Attributes:
        report: leaves [M, n_max]; the first rule's labels are trained on.
        kept: entries of the clients' own states that the rule brought up to date, leaves [M, ...].
    """

    report: Report
    kept: dict[str, Any]


def fix_mix_phase(
    problem: Problem,
    label: Callable[..., Labelled],
    *,
    parts: tuple[str, ...],
    view: Augmentation | None = None,
    mixup_alpha: float = 0.0,
    mix_weight: float = 1.0,
    mix_order: str = "mix_then_augment",
) -> Phase:
    """The phase: label everything once, train on the fix and the mix set, upload the trained parts.

    Args:
        problem: the run.
        label: (broadcast, data, examples) -> Labelled.
        parts: the parts of the model that are trained and uploaded.
        view: the fix set's augmentation, by default the strong one.
        mixup_alpha: a in lambda ~ Beta(a, a), FedAnchor eq. 8, one lambda a batch; 0 trains without mixup.
        mix_weight: b in L_fix + b L_mix, FedAnchor eq. 10.
        mix_order: 'mix_then_augment', alpha(lambda x + (1 - lambda) x') as FedAnchor writes it (eq. 8, 9), or
            'augment_then_mix', lambda alpha(x) + (1 - lambda) alpha(x') as SemiFL does.

    Returns:
        A phase whose broadcast has `model` and `learning_rate`.

    Raises:
        UserError: for an unknown mix order.
    """
    if mix_order not in MIX_ORDERS:
        raise UserError(f"unknown mix order {mix_order!r}; known: {', '.join(MIX_ORDERS)}")
    network, config = problem.network, problem.config.client
    with_mixup = mixup_alpha > 0
    metric_names = ("client_loss", "fix_loss", "mix_loss") if with_mixup else ("client_loss", "fix_loss")
    view = view or problem.strong

    def prepare(broadcast, data, cohort, previous) -> Jobs:
        del previous
        label_keys, shuffle_keys, mix_keys = jax.vmap(lambda k: jax.random.split(k, 3), out_axes=1)(cohort.keys())
        examples = CohortExamples.of(data, cohort, label_keys)
        rows, sizes = examples.rows, jnp.sum(examples.there, axis=1)
        report, kept = label(broadcast, data, examples)
        qualified = report.qualified & examples.there
        work = FixMixWork(
            rows=rows,
            labels=next(iter(report.pseudo_labels.values())),
            num_fix=jnp.sum(qualified, axis=1),
            fix_order=jax.vmap(lambda k, q: epoch_orders(k, q, config.epochs))(shuffle_keys, qualified),
            mix=jax.vmap(draw_with_replacement, in_axes=(0, 0, None))(mix_keys, sizes, rows.shape[1]),  # eq. 6
        )
        num_steps = config.epochs * num_batches(work.num_fix, config.batch_size)
        return Jobs(num_steps, work, report._replace(qualified=qualified), kept)

    def start(broadcast, work, states) -> Training:
        del work
        return local_sgd.start(config, broadcast, states, parts, metric_names)

    def step(broadcast, data, work, carry, index, key) -> Training:
        epoch, batch = jnp.divmod(index, num_batches(work.num_fix, config.batch_size))
        positions, mask = batch_positions(batch, config.batch_size, work.num_fix)
        positions = jnp.minimum(positions, len(work.rows) - 1)
        strong_key, mix_key = jax.random.split(key)

        fix = work.fix_order[epoch, positions]
        x_fix, y_fix = data.images[work.rows[fix]], work.labels[fix]
        views = (view(strong_key, x_fix),)
        if with_mixup:
            mix = work.mix[positions]
            x_mix, y_mix = data.images[work.rows[mix]], work.labels[mix]
            mixture, mixing = mix_images(problem.weak, mix_key, x_fix, x_mix, mixup_alpha, mix_order)
            views += (mixture,)

        def loss_fn(model):
            outputs, batch_stats = network.train(model, views, mask)
            fix_loss = cross_entropy(outputs[0].logits, y_fix, mask)  # eq. 7
            if not with_mixup:
                return fix_loss, (batch_stats, {"client_loss": fix_loss, "fix_loss": fix_loss})
            mix_loss = mixup_cross_entropy(outputs[1].logits, y_fix, y_mix, mixing, mask)  # eq. 9
            loss = fix_loss + mix_weight * mix_loss  # eq. 10
            return loss, (batch_stats, {"client_loss": loss, "fix_loss": fix_loss, "mix_loss": mix_loss})

        return local_sgd.step(config, broadcast, carry, loss_fn, parts)

    def finish(broadcast, work, carry, num_steps) -> Finished:
        del broadcast, work
        return local_sgd.finish(problem, carry, {}, num_steps, parts)

    return Phase(prepare, start, step, finish)
