"""FedDB: Estimating before Debiasing, a Bayesian Approach to Detaching Prior Bias.

Zhu et al., IJCAI 2024 (arXiv 2405.19789). For clients with labels for a few of their images. What differs from FedAvg:
  1. a client estimates the prior by which its model is biased, P_k(c) (APP-U): the mean of the received model's
     probabilities over its images, including labelled ones;
  2. pseudo-labels are made once a round by p(c | x) / P_k(c), normalised: `confidence.debias` = 'app_u';
  3. a local epoch is one step, on all labelled images and all images with a confident label;
  4. after each step P_k moves towards the mean probability of the images with a confident label;
  5. clients send P_k, and the server averages the models with weights a for which sum_k a_k P_k is near uniform.

The paper's text was not available: this follows its abstract and its public code (GuogangZhu/FedDB, commit 9f9248e).
"""

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, word
from fedjax_ssl.client import (
    At,
    Batches,
    Confidence,
    Deck,
    Examples,
    Loss,
    LossFunction,
    Plan,
    local_training,
    make_confidence,
    threshold_of,
    train_views,
)
from fedjax_ssl.client.labels import label_by_scores, mean_prediction, told_scores
from fedjax_ssl.client.steps import MakePlan
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Broadcast, Cohort, Label, Labels, Method, Previous, Problem, Received
from fedjax_ssl.methods.entry import Entry, Variants, one_mean
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.server import fedavg
from fedjax_ssl.server.aggregation import counts_told, own_weights

FIELDS = {"data.labels": "clients", "confidence.debias": "app_u"}
VARIANTS: Variants = {
    "paper": {  # its public code on CIFAR-10, Dir(0.3)
        "num_rounds": 800,
        "schedule": "cosine",
        "data.num_labelled": 4000,
        "data.partition": "dirichlet_clients",
        "data.alpha": 0.3,
        "model.name": "wrn28_2",
        "model.classifier_init": "torch",
        "augment.flavour": "semifl",  # inferred: the call is SemiFL's, the file with the operations is not public
        "client.batch_size": 64,
        "client.nesterov": True,
        "client.persistent": True,
        "aggregation.optimizer": "fedavgm",
    },
    "no_debiasing": {"confidence.debias": "none"},
    "plain_mean": {"feddb.solver": "none"},
}
APP_U = "app_u"  # metadata of uploads: P_k
MOMENTUM = 0.5  # m, the share of P_k that each step keeps, as in the code


def defaults() -> Section:
    section = Section()
    section.solver = word("code", "none")  # the weights of uploads: by the 'code's steps; 'none': `aggregation.weights`
    return section


def feddb(problem: Problem) -> Method:
    """FedDB as a Method."""
    options, weighted_by = problem.config.feddb, None
    rule, sizes = make_confidence(problem, threshold_of(problem)), {"labelled": problem.config.client.batch_size}
    if options.solver == "code":
        weighted_by = own_weights(balancing)
    return alternating(
        problem,
        (local_training(problem, plan(problem), loss_of_all(problem), sizes),),
        label=labels_once(problem, rule),
        rule=rule,
        aggregation=fedavg(problem, weighted_by=weighted_by),
    )


def labels_once(problem: Problem, rule: Confidence) -> Label:
    """Debiased labels of all images by the received model, and P_k, float32 [M, C], in `Labels.more`."""

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        examples = Examples.of(data, cohort)
        scores = told_scores(problem, received.model, data, examples, num_views=1)
        made = label_by_scores(problem, scores, examples, rule)
        report = made.report._replace(qualified=made.report.qualified | examples.labelled)
        return made._replace(report=report, more=mean_prediction(scores, examples.present))

    return label


def plan(problem: Problem) -> MakePlan:
    """An epoch is one step; without a confident label it is a pass over labelled images. The work is visible labels."""
    config = problem.config.client

    def of_cohort(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples = Examples.of(data, cohort)
        deck = Deck.shuffled(examples, examples.labelled, examples.keys, config.epochs)
        confident = jnp.any(cohort.labels.weights > 0, axis=1)
        num_steps = jnp.where(confident, config.epochs, deck.num_steps(config.batch_size))
        return Plan({"labelled": deck}, num_steps, examples.labels)

    return of_cohort


def loss_of_all(problem: Problem) -> LossFunction:
    """CE(labelled, weak) + CE(confident, strong); without a confident label, CE of the labelled batch."""
    network = problem.network

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, known, known_labels = at.data.inputs[at.decks["labelled"].rows], batch.labelled, at.work
        labels, weights = at.labels.report.labels, at.labels.weights
        labelled_key, weak_key, strong_key = jax.random.split(at.key, 3)
        confident = weights > 0
        in_batch = jnp.zeros_like(confident).at[known.positions].max(known.mask)
        labelled = (known_labels >= 0) & (jnp.any(confident) | in_batch)
        views = [problem.weak(weak_key, images), problem.strong(strong_key, images)]

        groups = [([problem.weak(labelled_key, images)], labelled), (views, confident)]
        (of_labelled, of_weak, of_strong), after = train_views(network, model, groups)
        labelled_loss = cross_entropy(of_labelled.logits, known_labels, labelled)
        pseudo_loss = cross_entropy(of_strong.logits, labels, confident, weights)
        metrics = {"labelled_loss": labelled_loss, "unlabelled_loss": pseudo_loss}

        # P_k after E steps is m^E P_k + (1 - m) sum_i m^(E - i) (mean prediction of step i): a sum over the steps.
        seen = mean_prediction(jax.lax.stop_gradient(jax.nn.softmax(of_weak.logits)), confident)
        kept = jnp.where(jnp.any(confident), MOMENTUM, 1.0)
        told = (1 - kept) * kept ** (at.num_steps - 1 - at.step) * seen
        told += jnp.where(at.step == 0, kept**at.num_steps, 0.0) * at.labels.more
        return Loss(labelled_loss + pseudo_loss, after.batch_stats, metrics, sums={APP_U: told})

    return loss


# --- Server. ----------------------------------------------------------------------------------------------------------


def balancing(received: Received) -> jax.Array:
    """The weights a of the uploads, float32 [R], for which sum_k a_k P_k is near uniform; 0 for rejected uploads.

        a = argmin 1/C sum_c (sum_k a_k P_k(c) - 1/C)^2    over the simplex

    As in the code 100 times a := softmax(a - 1.9 (gradient + 0.9 a)), which is one step of SGD from rest at rate 1 with
    Nesterov's momentum 0.9 and weight decay 0.9. From equal weights these steps hardly move.
    """
    counted = received.accepted
    priors = jnp.where(counted[:, None], counts_told(received, APP_U, 1.0), 0.0)
    num_classes = priors.shape[1]

    def gradient(weights: jax.Array) -> jax.Array:
        missing = jnp.matmul(weights, priors, precision="highest") - 1 / num_classes
        return 2 / num_classes * jnp.matmul(priors, missing, precision="highest")

    def softmax(numbers: jax.Array) -> jax.Array:
        shifted = numbers - jnp.max(jnp.where(counted, numbers, -jnp.inf))
        powers = jnp.where(counted, jnp.exp(jnp.where(counted, shifted, 0.0)), 0.0)
        return powers / jnp.maximum(jnp.sum(powers), 1e-30)

    def as_in_code(_, weights):
        return softmax(weights - 1.9 * (gradient(weights) + 0.9 * weights))

    number = jnp.maximum(jnp.sum(counted), 1)
    return jax.lax.fori_loop(0, 100, as_in_code, counted / number)


ENTRY = Entry(
    feddb,
    title="FedDB",
    paper="https://arxiv.org/abs/2405.19789",
    settings=("clients", "some_clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    mislabels=True,
    advice=one_mean,
    tiny={"confidence.threshold": 0.2, "confidence.debias": "app_u"},
)
