"""Local training on a fix set and a mix set (FedAnchor, appendix B; SemiFL, section 3.2).

Pseudo-labels are made once a round. The accepted examples are the fix set, which is trained on with strong
augmentation. Each of them is also mixed with an example drawn from all of the client's examples, confident or not.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.augment.mixup import MIX_ORDERS, lambda_of, mix_inputs
from fedjax_ssl.client.deck import Batch, Deck, Examples
from fedjax_ssl.client.labels import Labelled
from fedjax_ssl.client.local_sgd import At, Loss, local_sgd
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import (
    CLASSIFIER,
    Augmentation,
    Broadcast,
    Cohort,
    Jobs,
    Phase,
    Previous,
    Problem,
    job_keys,
)
from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.batches import draw_with_replacement, num_batches
from fedjax_ssl.learning.devices import platform
from fedjax_ssl.learning.losses import cross_entropy, mixup_cross_entropy
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.models import check_mixtures

PARTNERS = ("round", "epoch")  # how often the mix set is drawn


class FixMix(NamedTuple):
    """What one client trains on this round; positions index the client's examples, 0 to n_max - 1."""

    deck: Deck  # the fix set
    labels: jax.Array  # int32 [n_max], pseudo-labels of all examples
    weights: jax.Array  # float32 [n_max], weight of each image in the loss
    # int32 [1, n_max], the mix set's positions, drawn once a round; or [E, n_max], drawn for each epoch.
    mix: jax.Array
    # float32 [S], lambda of each step; None: each step draws its lambda.
    mixing: jax.Array | None = None


def fix_mix_phase(
    problem: Problem,
    label: Callable[[Broadcast, FederatedData, Examples], Labelled],
    *,
    parts: tuple[str, ...] = CLASSIFIER,
    view: Augmentation | None = None,
    mixup_alpha: float = 0.0,
    mix_weight: float = 1.0,
    mix_order: str = "mix_then_augment",
    partners: str = "round",
) -> Phase:
    """Makes the phase: label all examples once, train on the fix and the mix set, upload the trained parts.

    Args:
        problem: the run's `Problem`.
        label: (received, data, examples) -> Labelled. An image's weight multiplies its part of both losses; a mixture
            has the weight of its first image. Means are over the images of the batch.
        parts: the parts of the model that are trained and uploaded.
        view: the fix set's augmentation, by default the strong one.
        mixup_alpha: a in lambda ~ Beta(a, a), FedAnchor eq. 8, one lambda for each batch; 0 trains without mixup.
        mix_weight: b in L_fix + b L_mix, FedAnchor eq. 10.
        mix_order: 'mix_then_augment', alpha(lambda x + (1 - lambda) x') as in FedAnchor (eq. 8, 9), or
            'augment_then_mix', lambda alpha(x) + (1 - lambda) alpha(x') as in SemiFL.
        partners: how often mixing partners are drawn, one of `PARTNERS`: once a 'round', as in both papers, or in each
            local 'epoch'.

    Raises:
        UserError: for an unknown mix order, or a user's backbone that cannot take mixtures.
    """
    if mix_order not in MIX_ORDERS:
        raise UserError(f"unknown mix order {mix_order!r}; known: {', '.join(MIX_ORDERS)}")
    network, config, view = problem.network, problem.config.client, view or problem.strong
    with_mixup = mixup_alpha > 0
    if with_mixup:
        check_mixtures(problem.config.model.name, network)

    def mixings(cohort: Cohort, steps: int) -> jax.Array | None:
        """Draws every lambda of a cohort, [M, S]; None: each step draws its own, with the same values up to rounding.

        Lambda is drawn by rejection sampling. Its loops slow down the steps of accelerators; on a CPU they are cheaper
        in the steps.
        """
        if not with_mixup or platform() == "cpu" or cohort.step_key is None:
            return None

        def of_step(key, step):
            return lambda_of(jax.random.split(jax.random.fold_in(key, step))[1], mixup_alpha)

        keys = job_keys(cohort.step_key, cohort.clients, cohort.group)
        return jax.vmap(lambda key: jax.vmap(of_step, (None, 0))(key, jnp.arange(steps)))(keys)

    def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
        del previous
        label_keys, shuffle_keys, mix_keys = jax.vmap(lambda k: jax.random.split(k, 3), out_axes=1)(cohort.keys())
        examples = Examples.of(data, cohort, label_keys)
        labelled = label(received, data, examples)
        qualified = labelled.report.qualified & examples.present
        weights = qualified if labelled.weights is None else labelled.weights
        sizes, n_max = jnp.sum(examples.present, axis=1), examples.rows.shape[1]
        draws = config.epochs if partners == "epoch" else 1
        mix = jax.vmap(draw_with_replacement, in_axes=(0, 0, None))(mix_keys, sizes, draws * n_max)  # eq. 6
        work = FixMix(
            deck=Deck.shuffled(examples, qualified, shuffle_keys, config.epochs),
            labels=labelled.report.labels,
            weights=weights.astype(jnp.float32),
            mix=mix.reshape(-1, draws, n_max),
            mixing=mixings(cohort, config.epochs * num_batches(n_max, config.batch_size)),
        )
        report = labelled.report._replace(qualified=qualified)
        return Jobs(work.deck.num_steps(config.batch_size), work, report, labelled.own)

    def loss(model: Model, batch: Batch, at: At) -> Loss:
        strong_key, mix_key = jax.random.split(at.key)
        x_fix, y_fix, weights = batch.inputs, at.work.labels[batch.positions], at.work.weights[batch.positions]
        views = (view(strong_key, x_fix),)
        if with_mixup:
            drawn = at.work.mix[batch.epoch % len(at.work.mix), batch.places]
            x_mix, y_mix = at.data.inputs[at.work.deck.rows[drawn]], at.work.labels[drawn]
            kind, weak = network.inputs, problem.weak
            mixing = None if at.work.mixing is None else at.work.mixing[at.step]
            mixture, mixing = mix_inputs(kind, weak, mix_key, x_fix, x_mix, mixup_alpha, mix_order, mixing)
            views += (mixture,)

        outputs, batch_stats = network.train(model, views, batch.mask)
        fix_loss = cross_entropy(outputs[0].logits, y_fix, batch.mask, weights)  # eq. 7
        if not with_mixup:
            return Loss(fix_loss, batch_stats, {"client_loss": fix_loss, "fix_loss": fix_loss})
        mix_loss = mixup_cross_entropy(outputs[1].logits, y_fix, y_mix, mixing, batch.mask, weights)  # eq. 9
        value = fix_loss + mix_weight * mix_loss  # eq. 10
        return Loss(value, batch_stats, {"client_loss": value, "fix_loss": fix_loss, "mix_loss": mix_loss})

    return local_sgd(problem, prepare, loss, parts)
