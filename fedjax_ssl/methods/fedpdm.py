"""FedPDM: Progressive Distribution Matching for Federated Semi-Supervised Learning.

Liao et al., AAAI 2025. For clients with labels for all, a few or none of their images. What differs from FedAvg with
FixMatch:
  1. a client estimates the class shares of its unlabelled images: the histogram of the received model's labels,
     averaged over rounds, uniform at first;
  2. before pseudo-labels are made, the received model's probabilities of all unlabelled images are matched to the
     shares estimated so far, by optimal transport: a class that is predicted too often loses images to the others;
  3. an upload is weighted by the number of labels, given and accepted, that it was trained on.

The paper's text was not available: this follows its abstract and its public code (ldpbuaa/FedPDM, commit 0b835db);
docs/methods/fedpdm.md has the differences.
"""

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, is_on, real, share
from fedjax_ssl.client import (
    At,
    Batches,
    Confidence,
    Deck,
    Examples,
    Loss,
    Plan,
    class_counts,
    local_training,
    make_confidence,
    threshold_of,
    train_views,
)
from fedjax_ssl.client.labels import label_by_scores, told_scores
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Broadcast, Cohort, Finished, Label, Labels, Method, Phase, Previous, Problem
from fedjax_ssl.methods.entry import Entry, Variants, one_mean
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import moving_average, repeated, where
from fedjax_ssl.server import fedavg
from fedjax_ssl.server.aggregation import most_examples, weights_told

FIELDS = {"data.labels": "clients"}
VARIANTS: Variants = {"code": {"fedpdm.ema_decay": 0.999}}
SHARES = "unlabelled_shares"  # a client's memory: the estimated class shares of its unlabelled images
LABELS = "labels_trained_on"  # metadata of an upload
SHARPNESS = 10.0  # for matched probabilities: 1 / the transport's regularisation
MOST_ITERATIONS, TOLERANCE = 20, 0.01  # of Sinkhorn, which ends once the columns' sums miss by less than this share
SHARES_DECAY = 0.01  # weight of earlier rounds in the class shares
WARM_UP_ROUNDS = 1  # first rounds, without matching


def defaults() -> Section:
    section = Section()
    section.adjustment = real(0.0, least=0)  # factor of log class shares in both losses; rises to this over all rounds
    # Decay of the average of the models of a round's steps, which a client with unlabelled images uploads (code:
    # 0.999); 0: no averaging.
    section.ema_decay = share(0.0)
    return section


def fedpdm(problem: Problem) -> Method:
    """FedPDM as a Method."""
    options = problem.config.fedpdm
    rule = make_confidence(problem, threshold_of(problem))
    uniform = jnp.full(problem.num_classes, 1 / problem.num_classes)
    phase = on_both_batches(problem)
    return alternating(
        problem,
        (averaged(phase, options.ema_decay) if is_on(options.ema_decay) else phase,),
        own=lambda data, model: {SHARES: repeated(uniform, len(data.ids))},
        label=matched_labels(problem, rule),
        rule=rule,
        aggregation=fedavg(
            problem, weighted_by=weights_told(LABELS, lambda received: 2 * most_examples(problem, received))
        ),
    )


def matched_labels(problem: Problem, rule: Confidence) -> Label:
    """Labels of unlabelled images by matched probabilities. `Labels.own` has the class shares for the next round."""

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        examples = Examples.of(data, cohort)
        found, unlabelled = told_scores(problem, received.model, data, examples, num_views=1), examples.unlabelled
        r, number = examples.own[SHARES], jnp.sum(unlabelled, axis=1, keepdims=True)
        predicted = class_counts(jnp.where(unlabelled, jnp.argmax(found, axis=-1), -1), problem.num_classes)
        r_next = SHARES_DECAY * r + (1 - SHARES_DECAY) * predicted / jnp.maximum(number, 1)
        r_next = jnp.where(number > 0, r_next, r)

        matched = jax.vmap(match)(found, unlabelled, r)
        is_warm_up = examples.round < WARM_UP_ROUNDS
        matched = jnp.where(is_warm_up[:, None, None], found, matched)
        made = label_by_scores(problem, matched, examples._replace(present=unlabelled), rule)
        report = made.report._replace(qualified=made.report.qualified | examples.labelled)
        return made._replace(report=report, own={SHARES: r_next, **made.own}, more=())

    return label


def on_both_batches(problem: Problem) -> Phase:
    """Steps on a labelled and an unlabelled batch. Unlabelled images make the epoch."""
    config, options, network = problem.config.client, problem.config.fedpdm, problem.network

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        """Its work is added to logits, float32 [M, 2, C], in the first epoch and in later ones."""
        examples = Examples.of(data, cohort)
        unlabelled = examples.unlabelled
        deck = Deck.shuffled(examples, unlabelled, examples.keys, config.epochs)
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(examples.keys)
        labelled = Deck.shuffled(examples, examples.labelled, keys, config.epochs)
        steps = jnp.where(deck.size > 0, deck.num_steps(config.batch_size), labelled.num_steps(config.batch_size))
        r, r_next, number = examples.own[SHARES], cohort.labels.own[SHARES], jnp.sum(unlabelled, axis=1, keepdims=True)
        given = class_counts(examples.labels, problem.num_classes)
        q = jnp.stack([given + number * shares for shares in (r, r_next)], axis=1)
        q /= jnp.maximum(jnp.sum(q, axis=-1, keepdims=True), 1)
        t = options.adjustment * (examples.round + 1) / problem.config.num_rounds
        return Plan({"unlabelled": deck, "labelled": labelled}, steps, t[:, None, None] * jnp.log(q + 1e-12))

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        """CE(labelled, weak) + CE(confident, strong), both means over their whole batch."""
        known, unlabelled, (weak_key, strong_key) = batch.labelled, batch.unlabelled, jax.random.split(at.key)
        views = problem.weak(weak_key, known.inputs), problem.strong(strong_key, unlabelled.inputs)
        groups = [([view], mask) for view, mask in zip(views, (known.mask, unlabelled.mask))]
        (of_labelled, of_strong), after = train_views(network, model, groups, together=True)
        adjustment = at.work[jnp.minimum(unlabelled.epoch, 1)]
        labels, weights = (leaf[unlabelled.positions] for leaf in (at.labels.report.labels, at.labels.weights))
        labelled_loss = cross_entropy(of_labelled.logits + adjustment, known.labels, known.mask)
        pseudo_loss = cross_entropy(of_strong.logits + adjustment, labels, unlabelled.mask, weights)
        number = jnp.sum(known.mask) + jnp.sum(unlabelled.mask & (weights > 0))
        metrics = {"labelled_loss": labelled_loss, "unlabelled_loss": pseudo_loss}
        value = labelled_loss + pseudo_loss
        return Loss(value, after.batch_stats, metrics, sums={LABELS: number.astype(jnp.float32)})

    return local_training(problem, plan, loss, dict.fromkeys(("unlabelled", "labelled"), config.batch_size))


def match(probabilities: jax.Array, mask: jax.Array, shares: jax.Array) -> jax.Array:
    """The probabilities of a client's images, changed so that classes have about the given shares.

    Let s be `SHARPNESS` and l(x, c) = log softmax_c of the *probabilities* of x, as in the code. The result is

        softmax of (v_c + s l(x, c), v_0) over the classes c and an additional class 0

    without the additional class, which takes images that fit no class. v scales the columns of the transport plan
    exp(u_x + v_c + s l(x, c)). Its rows are n images of mass 1 and an additional row of mass C + 1; its columns are
    classes of mass 1 + n shares and the additional class of mass 1.

    Probabilities are float32 [n_max, C]; the mask, bool [n_max], has the images that take part; the shares, float32
    [C], sum to 1. The result is float32 [n_max, C], with sums of at most 1.
    """
    number, num_classes = jnp.sum(mask), len(shares)
    plan = SHARPNESS * jax.nn.log_softmax(probabilities)
    plan = jnp.pad(jnp.where(mask[:, None], plan, 0.0), ((0, 1), (0, 1)))  # the additional row and column cost nothing
    rows = jnp.append(jnp.where(mask, 0.0, -jnp.inf), jnp.log(num_classes + 1.0))  # log of their masses
    columns = jnp.log(jnp.append(1 + number * shares, 1.0))

    def u_of(v: jax.Array) -> jax.Array:
        return rows - jax.nn.logsumexp(plan + v, axis=1)

    def iteration(_, carry):
        u, _, missed = carry
        v = columns - jax.nn.logsumexp(plan + u[:, None], axis=0)
        v -= jnp.mean(v[:-1])
        u = u_of(v)
        sums = jnp.sum(jnp.exp(plan + u[:, None] + v), axis=0)
        miss = jnp.sum(jnp.abs(sums - jnp.exp(columns))) / jnp.sum(jnp.exp(columns))
        going = missed >= TOLERANCE
        return jax.tree.map(lambda a, b: jnp.where(going, a, b), (u, v, miss), carry)

    nothing = jnp.zeros(num_classes + 1)
    start = u_of(nothing).at[-1].set(0.0), nothing, jnp.inf
    _, v, _ = jax.lax.fori_loop(0, MOST_ITERATIONS, iteration, start)
    return jax.nn.softmax(plan[:-1] + v)[:, :-1]


def averaged(phase: Phase, decay: float) -> Phase:
    """A phase of `local_training` that uploads the moving average of its models, including normalisation statistics.

    The average begins as the received model. A client without unlabelled images uploads its last model, as in the code.
    """

    def start(received: Broadcast, data: FederatedData, work, own):
        training = phase.start(received, data, work, own)
        return training, training.learner.model

    def step(received: Broadcast, data: FederatedData, work, carry, index, key):
        training, average = phase.step(received, data, work, carry[0], index, key), carry[1]
        return training, moving_average(average, training.learner.model, decay)

    def finish(received: Broadcast, work, carry, num_steps) -> Finished:
        (training, average), learner = carry, carry[0].learner
        learner = learner._replace(model=where(work.decks["unlabelled"].size > 0, average, learner.model))
        return phase.finish(received, work, training._replace(learner=learner), num_steps)

    return phase._replace(start=start, step=step, finish=finish)


ENTRY = Entry(
    fedpdm,
    title="FedPDM",
    paper="https://doi.org/10.1609/aaai.v39i5.32551",
    settings=("clients", "some_clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=("kind", "threshold"),
    mislabels=True,
    advice=one_mean,
    tiny={"confidence.threshold": 0.2, "fedpdm.adjustment": 1.0, "fedpdm.ema_decay": 0.5},
)
