"""ACR as a local trainer: two classifiers, and labels adjusted to how far a client's images are from the labelled ones.

Wei and Gan, "Towards Realistic Long-Tailed Semi-Supervised Learning: Consistency Is All You Need", CVPR 2023.
One classifier, the head `STANDARD`, learns the labelled images' distribution of classes; the other, which is tested, is
balanced. In a federation the unlabelled images are each client's own, and so is the estimate of their distribution; the
labelled images' shares of classes pi are sent down (C numbers), in which a class that no labelled client has counts as
`client.absent_class` images. The paper's epoch is a round.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client.confidence import moved
from fedjax_ssl.client.deck import Batch
from fedjax_ssl.client.local_sgd import At, Loss, LossFunction
from fedjax_ssl.client.trainers import Seen, Target, Trainer
from fedjax_ssl.engine.interface import Problem
from fedjax_ssl.learning.losses import cross_entropy
from fedjax_ssl.learning.sgd import Model

STANDARD = "standard"  # the head h; the classifier is the balanced h_b


class Estimate(NamedTuple):
    """The state of a client."""

    shares: jax.Array  # float32 [C], u, the estimated shares of classes among its unlabelled images
    distances: jax.Array  # float32 [3], summed over the steps of its round: of u to pi, to uniform and to reversed pi
    steps: jax.Array  # float32 [], of these
    strength: jax.Array  # float32 [], tau of the standard classifier's labels in this round
    rounds: jax.Array  # int32 [], in which it took part before this one; -1 before the first


def adjustment(prior: jax.Array, strength: jax.Array | float) -> jax.Array:
    """log(pi_c^tau + 1e-12) of shares float32 [..., C], by which logits are adjusted: float32 [..., C].

    Near a share of 0 it is -27.6 for every tau, and would decide every label: `Broadcast.extra` has no such share, see
    `class_shares`.
    """
    return jnp.log(jnp.power(prior, strength) + 1e-12)


def reversed_shares(prior: jax.Array) -> jax.Array:
    """The shares with the most frequent class's and the rarest's exchanged, and so on: float32 [C]."""
    order = jnp.argsort(prior)
    return jnp.zeros_like(prior).at[order].set(prior[order[::-1]])


def distance(one: jax.Array, other: jax.Array) -> jax.Array:
    """1/2 KL(a || b) + 1/2 KL(b || a) of shares float32 [..., C], each with 1e-12 added."""
    one, other = one + 1e-12, other + 1e-12
    return 0.5 * jnp.sum((one - other) * (jnp.log(one) - jnp.log(other)), axis=-1)


def acr(options, num_classes: int) -> Trainer:
    """The rule: what both classifiers are trained towards.

        q  = softmax(h - tau_t log pi)    label of h,   counts if max q >= t or max softmax(h) >= t
        q2 = softmax(h - tau log pi)      label of h_b, counts if max q2 >= t or max softmax(h_b) >= t

    tau is `trainer.strength`, and tau_t = tau exp(K_con) / (exp K_con + exp K_uni + exp K_rev) by the mean `distance`
    of the estimate u to pi, to uniform and to reversed pi in the client's last round: the further its images are from
    the labelled ones, the more their labels are adjusted. u moves by the histogram of the confident labels of h_b, once
    the client has taken part in `trainer.estimate_from` rounds; before that tau_t = tau. The estimate's first round has
    no distances before it, so that tau_t = tau / 3 (train.py:467-473 of the code, github.com/Gank0078/ACR, commit
    9a8f421, whose epochs count from 0). The estimate always survives rounds.

    Distances are summed over the steps with a confident image, and divided by the number of all steps, as in the code.

    The histogram counts labels. The public code adds to an index several times at once, which keeps what one image of
    each class writes, confident or not; that depends on the order of a batch, and is not built.
    """

    def targets(old: Estimate, seen: Seen) -> tuple[tuple[Target, ...], Estimate]:
        standard, balanced, mask = seen.outputs.heads[STANDARD], seen.outputs.logits, seen.batch.mask
        p = [
            jax.nn.softmax(logits)
            for logits in (
                standard - adjustment(seen.prior, old.strength),
                standard,
                standard - adjustment(seen.prior, options.strength),
                balanced,
            )
        ]
        sure = [jnp.max(each, axis=-1) >= options.threshold for each in p]
        labels = [jnp.argmax(each, axis=-1).astype(jnp.int32) for each in p]
        weights = [jnp.where(mask & one, 1.0, 0.0) for one in (sure[2] | sure[3], sure[0] | sure[1])]
        confident = mask & sure[3]
        counts = jnp.sum(jax.nn.one_hot(labels[3], num_classes) * confident[:, None], axis=0)
        histogram = counts / jnp.maximum(jnp.sum(counts), 1.0)
        estimates = old.rounds >= options.estimate_from
        counted = estimates & jnp.any(confident)
        shares = moved(old.shares, histogram, options.estimate_momentum, counted)
        anchors = jnp.stack([seen.prior, jnp.full(num_classes, 1.0 / num_classes), reversed_shares(seen.prior)])
        state = old._replace(
            shares=shares,
            distances=old.distances + jnp.where(counted, distance(shares, anchors), 0.0),
            steps=old.steps + (estimates & jnp.any(mask)),
        )
        return (Target(labels[2], weights[0]), Target(labels[0], weights[1])), state

    def next_round(old: Estimate) -> Estimate:
        share = jax.nn.softmax(old.distances / jnp.maximum(old.steps, 1.0))[0]
        rounds = old.rounds + 1
        strength = jnp.where(rounds >= options.estimate_from, options.strength * share, old.strength)
        return Estimate(old.shares, jnp.zeros(3), jnp.float32(0.0), strength, rounds)

    start = Estimate(
        jnp.full(num_classes, 1.0 / num_classes),
        jnp.zeros(3),
        jnp.float32(0.0),
        jnp.float32(options.strength),
        jnp.int32(-1),
    )
    return Trainer(
        lambda n_max: start,
        targets,
        next_round=next_round,
        heads=(STANDARD,),
        strong_views=2,
        needs_prior=True,
    )


def loss_of_both(problem: Problem, metric: str) -> LossFunction:
    """l(h(x), y) + l(h_b(x) + tau log pi, y) on a weak view, of the labelled phase; pi is `Broadcast.extra`."""
    strength = problem.config.trainer.strength

    def loss(model: Model, batch: Batch, at: At) -> Loss:
        images, labels = problem.weak(at.key, batch.inputs), batch.labels

        (outputs,), batch_stats = problem.network.train(model, (images,), batch.mask)
        balanced = outputs.logits + adjustment(at.received.extra, strength)
        value = cross_entropy(outputs.heads[STANDARD], labels, batch.mask)
        value += cross_entropy(balanced, labels, batch.mask)
        return Loss(value, batch_stats, {metric: value})

    return loss
