"""ACR as a local trainer: it has two classifiers and adjusts pseudo-labels to a client's class distribution.

Wei and Gan, "Towards Realistic Long-Tailed Semi-Supervised Learning: Consistency Is All You Need", CVPR 2023. One
classifier, the head `STANDARD`, learns the class distribution of the labelled images; the other is balanced, and is
the one that is tested. In a federation each client estimates its own class distribution. The server sends the class
shares pi of the labelled images (C numbers). An epoch of the paper is a round here.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client.confidence import moved, threshold_of
from fedjax_ssl.client.steps import At, Batches, Loss, LossFunction
from fedjax_ssl.engine.interface import Problem
from fedjax_ssl.models import Outputs
from fedjax_ssl.ops.losses import cross_entropy, symmetric_divergence
from fedjax_ssl.ops.sgd import Model

ESTIMATE_FROM = 6  # a client estimates its class shares after this many rounds: `epoch > 5` of the code, from 0
ESTIMATE_MOMENTUM = 0.99  # momentum of the estimate, over batches
STANDARD = "standard"  # the head h; the classifier is the balanced h_b


class Estimate(NamedTuple):
    """The state of a client."""

    shares: jax.Array  # float32 [C], u, the estimated class shares of its unlabelled images
    distances: jax.Array  # float32 [3], from u to pi, uniform shares and reversed pi, summed over the round's steps
    steps: jax.Array  # float32 [], number of these steps
    strength: jax.Array  # float32 [], tau_t, for the standard classifier's labels in this round
    rounds: jax.Array  # int32 [], earlier rounds in which the client took part; -1 before its first round


def adjustment(prior: jax.Array, strength: jax.Array | float) -> jax.Array:
    """The logit adjustment log(pi_c^tau + 1e-12) for shares float32 [..., C]: float32 [..., C].

    For a share near 0 it is -27.6 at every tau and would decide every label. `Broadcast.extra` has no such share, see
    `class_shares`.
    """
    return jnp.log(jnp.power(prior, strength) + 1e-12)


def reversed_shares(prior: jax.Array) -> jax.Array:
    """The shares in reversed order: the most frequent class gets the share of the rarest, and so on; float32 [C]."""
    order = jnp.argsort(prior)
    return jnp.zeros_like(prior).at[order].set(prior[order[::-1]])


def distance(one: jax.Array, other: jax.Array) -> jax.Array:
    """Symmetric KL divergence of shares float32 [..., C], each plus 1e-12."""
    return symmetric_divergence(one + 1e-12, other + 1e-12)


class Target(NamedTuple):
    """The targets of one classifier for the strong views."""

    labels: jax.Array  # int32 [B]
    weights: jax.Array  # float32 [B], from 0 to 1; 0 for padding


# (state, outputs of the labelling model, mask bool [B], class shares of all labels float32 [C]) -> the targets of the
# balanced and of the standard classifier, and the state after the batch.
Targets = Callable[[Estimate, Outputs, jax.Array, jax.Array], tuple[Target, Target, Estimate]]


def targets(problem: Problem) -> Targets:
    """Makes the targets of both classifiers.

        q  = softmax(h - tau_t log pi)    label of h,   counts if max q >= t or max softmax(h) >= t
        q2 = softmax(h - tau log pi)      label of h_b, counts if max q2 >= t or max softmax(h_b) >= t

    t is `confidence.threshold` and tau is `confidence.strength`. tau_t = tau exp K_con / (exp K_con + exp K_uni +
    exp K_rev), where K are the mean distances from the estimate u to pi, to uniform and to reversed pi in the client's
    last round: the more a client's class shares differ from pi, the more its labels are adjusted. Once the client has
    taken part in `ESTIMATE_FROM` rounds, u is a moving average of the histogram of h_b's confident labels; before that
    tau_t = tau. The first round with an estimate has no earlier distances, so tau_t = tau / 3 (train.py:467-473 of
    the code, github.com/Gank0078/ACR, commit 9a8f421). The estimate is always kept between rounds. Distances are
    summed over the steps with a confident image but divided by the number of all steps, as in the code.

    The histogram counts labels. The public code assigns to repeated indices instead, so the last image of each class
    decides, confident or not; this depends on the order in a batch.
    """
    options, num_classes, t = problem.config.confidence, problem.num_classes, threshold_of(problem)

    def of_batch(old: Estimate, seen: Outputs, mask: jax.Array, prior: jax.Array) -> tuple[Target, Target, Estimate]:
        h, h_b = seen.heads[STANDARD], seen.logits
        logits = h - adjustment(prior, old.strength), h, h - adjustment(prior, options.strength), h_b
        p = [jax.nn.softmax(each) for each in logits]
        of_q, _, of_q2, of_h_b = (jnp.argmax(each, axis=-1).astype(jnp.int32) for each in p)
        q_is_sure, h_is_sure, q2_is_sure, h_b_is_sure = (jnp.max(each, axis=-1) >= t for each in p)
        balanced = Target(of_q2, jnp.where(mask & (q2_is_sure | h_b_is_sure), 1.0, 0.0))
        standard = Target(of_q, jnp.where(mask & (q_is_sure | h_is_sure), 1.0, 0.0))

        confident = mask & h_b_is_sure
        counts = jnp.sum(jax.nn.one_hot(of_h_b, num_classes) * confident[:, None], axis=0)
        histogram = counts / jnp.maximum(jnp.sum(counts), 1.0)
        estimates = old.rounds >= ESTIMATE_FROM
        counted = estimates & jnp.any(confident)
        shares = moved(old.shares, histogram, ESTIMATE_MOMENTUM, counted)
        anchors = jnp.stack([prior, jnp.full(num_classes, 1.0 / num_classes), reversed_shares(prior)])
        state = old._replace(
            shares=shares,
            distances=old.distances + jnp.where(counted, distance(shares, anchors), 0.0),
            steps=old.steps + (estimates & jnp.any(mask)),
        )
        return balanced, standard, state

    return of_batch


def first_estimate(problem: Problem) -> Estimate:
    """The state of a client that has not taken part yet."""
    uniform = jnp.full(problem.num_classes, 1.0 / problem.num_classes)
    strength = jnp.float32(problem.config.confidence.strength)
    return Estimate(uniform, jnp.zeros(3), jnp.float32(0.0), strength, jnp.int32(-1))


def next_round(problem: Problem) -> Callable[[Estimate], Estimate]:
    """The state at the beginning of a client's next round, see `targets`."""
    options = problem.config.confidence

    def begun(old: Estimate) -> Estimate:
        share = jax.nn.softmax(old.distances / jnp.maximum(old.steps, 1.0))[0]
        rounds = old.rounds + 1
        strength = jnp.where(rounds >= ESTIMATE_FROM, options.strength * share, old.strength)
        return Estimate(old.shares, jnp.zeros(3), jnp.float32(0.0), strength, rounds)

    return begun


def loss_on_labels(problem: Problem, metric: str) -> LossFunction:
    """Loss of the labelled phase: l(h(x), y) + l(h_b(x) + tau log pi, y) on a weak view; pi is `Broadcast.extra`."""
    strength = problem.config.confidence.strength

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        known = batch.labelled
        (outputs,), batch_stats = problem.network.train(model, (problem.weak(at.key, known.inputs),), known.mask)
        balanced = outputs.logits + adjustment(at.received.extra, strength)
        value = cross_entropy(outputs.heads[STANDARD], known.labels, known.mask)
        value += cross_entropy(balanced, known.labels, known.mask)
        return Loss(value, batch_stats, {metric: value})

    return loss
