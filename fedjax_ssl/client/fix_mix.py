"""Local training on a fix set and a mix set (FedAnchor, appendix B; SemiFL, section 3.2).

Pseudo-labels are made once a round. The accepted examples are the fix set, which is trained on with strong
augmentation. Each of them is also mixed with an example drawn from all of the client's examples, confident or not.
"""

import jax
import jax.numpy as jnp

from fedjax_ssl.base.devices import platform
from fedjax_ssl.client.deck import Deck, Examples, split_keys
from fedjax_ssl.client.steps import At, Batches, Loss, Plan, local_training
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import CLASSIFIER, Broadcast, Cohort, Phase, Previous, Problem, job_keys
from fedjax_ssl.ops.augment.mixup import lambda_of, mix_inputs
from fedjax_ssl.ops.batches import draw_with_replacement, in_epochs, num_batches
from fedjax_ssl.ops.losses import cross_entropy, mixup_cross_entropy
from fedjax_ssl.ops.sgd import Model


def label_keys(cohort: Cohort) -> jax.Array:
    """The PRNG keys, [M], with which a cohort's images are labelled in a method with this phase."""
    return split_keys(cohort, 3)[0]


def mixings(cohort: Cohort, steps: int, alpha: float) -> jax.Array:
    """Every lambda of a cohort, float32 [M, S], which each step otherwise draws, with the same values up to rounding.

    Lambda is drawn by rejection sampling. Its loops slow down the steps of accelerators; on a CPU they are cheaper in
    the steps.
    """

    def of_step(key, step):
        return lambda_of(jax.random.split(jax.random.fold_in(key, step))[1], alpha)

    keys = job_keys(cohort.step_key, cohort.clients, cohort.group)
    return jax.vmap(lambda key: jax.vmap(of_step, (None, 0))(key, jnp.arange(steps)))(keys)


def fix_mix_phase(
    problem: Problem,
    *,
    parts: tuple[str, ...] = CLASSIFIER,
    mixup_alpha: float = 0.0,
    mix_weight: float = 1.0,
    mix_order: str = "mix_then_augment",
    partners: str = "round",
) -> Phase:
    """Makes the phase: train on the fix and the mix set of the labels of this round, upload the trained parts.

    An image's weight multiplies its part of both losses; a mixture has the weight of its first image. Means are over
    the images of the batch. `mixup_alpha` is a in lambda ~ Beta(a, a), FedAnchor eq. 8, one lambda for each batch; 0
    trains without mixup. `mix_weight` is b in L_fix + b L_mix, eq. 10. Images are mixed by 'mix_then_augment',
    alpha(lambda x + (1 - lambda) x') as in FedAnchor (eq. 8, 9), or by 'augment_then_mix', lambda alpha(x) +
    (1 - lambda) alpha(x') as in SemiFL; partners are drawn once a 'round', as in both papers, or in each 'epoch'.
    """
    network, config = problem.network, problem.config.client
    with_mixup = mixup_alpha > 0

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        _, shuffle_keys, mix_keys = split_keys(cohort, 3)
        examples = Examples.of(data, cohort)
        sizes, n_max = jnp.sum(examples.present, axis=1), examples.rows.shape[1]
        fix = Deck.shuffled(examples, cohort.labels.report.qualified, shuffle_keys, config.epochs)
        draws = config.epochs if partners == "epoch" else 1
        mix = jax.vmap(draw_with_replacement, in_axes=(0, 0, None))(mix_keys, sizes, draws * n_max)  # eq. 6
        partner_places = jax.vmap(lambda drawn: in_epochs(drawn, draws, examples.largest_size))(mix)
        decks = {"fix": fix, "mix": fix._replace(order=partner_places)}
        mixing = None
        if with_mixup and platform() != "cpu" and cohort.step_key is not None:
            mixing = mixings(cohort, config.epochs * num_batches(n_max, config.batch_size), mixup_alpha)
        return Plan(decks, fix.num_steps(config.batch_size), mixing)

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        strong_key, mix_key = jax.random.split(at.key)
        x_fix, mask, labels = batch.fix.inputs, batch.fix.mask, at.labels.report.labels
        y_fix, weights = labels[batch.fix.positions], at.labels.weights[batch.fix.positions]
        views = (problem.strong(strong_key, x_fix),)
        if with_mixup:
            kind, weak, y_mix = network.inputs, problem.weak, labels[batch.mix.positions]
            mixing = None if at.work is None else at.work[at.step]
            mixture, mixing = mix_inputs(kind, weak, mix_key, x_fix, batch.mix.inputs, mixup_alpha, mix_order, mixing)
            views += (mixture,)

        outputs, batch_stats = network.train(model, views, mask)
        fix_loss = cross_entropy(outputs[0].logits, y_fix, mask, weights)  # eq. 7
        if not with_mixup:
            return Loss(fix_loss, batch_stats, {"client_loss": fix_loss, "fix_loss": fix_loss})
        mix_loss = mixup_cross_entropy(outputs[1].logits, y_fix, y_mix, mixing, mask, weights)  # eq. 9
        value = fix_loss + mix_weight * mix_loss  # eq. 10
        return Loss(value, batch_stats, {"client_loss": value, "fix_loss": fix_loss, "mix_loss": mix_loss})

    sizes = dict.fromkeys(("fix", "mix") if with_mixup else ("fix",), config.batch_size)
    return local_training(problem, plan, loss, sizes, parts=parts)
