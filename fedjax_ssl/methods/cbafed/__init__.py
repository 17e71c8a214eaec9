"""CBAFed: Class Balanced Adaptive Pseudo Labeling for Federated Semi-Supervised Learning.

Li, Li and Wang, CVPR 2023. Some clients have labels for all their images, the others for none. What differs from
FedAvg:
  1. in the first stage only clients with labels train, an epoch in each round (`cbafed.warm_up_rounds`);
  2. in the second stage all clients take part. Once a round the received model labels weak views. Each class has a
     threshold: the higher the class's share of all given labels and of the last round's pseudo-labels, the higher the
     threshold. An image below the threshold gets its second most likely class if that class is rare;
  3. clients without labels make one pass over the same views that were labelled; clients with labels make several
     passes over all their images. An upload's weight is the number of labels that it was trained on;
  4. every few epochs a labelled client's model is averaged with an earlier record of itself, and every few rounds the
     global model is.

docs/methods/cbafed.md has the differences to the public code.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, real, share, whole
from fedjax_ssl.client import (
    At,
    Batches,
    Deck,
    Examples,
    Loss,
    Plan,
    class_counts,
    global_model,
    labelled_phase,
    labelled_plan,
    score_cohort,
    unlabelled_phase,
    weak_views,
)
from fedjax_ssl.client.deck import split_keys
from fedjax_ssl.client.labels import without_prior
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import (
    CLASSIFIER,
    Broadcast,
    Cohort,
    Label,
    Labels,
    Method,
    Metrics,
    Phase,
    Previous,
    Problem,
    Received,
    Report,
    State,
    trained_parts,
)
from fedjax_ssl.methods.cbafed.client import Acceptance, accept, acceptance
from fedjax_ssl.methods.cbafed.residual import RECORD, residual_over_rounds, with_residual
from fedjax_ssl.methods.entry import Entry, Variants, few_labels, labels_alone
from fedjax_ssl.methods.frames import BY_ROLE, TEN_CLIENTS, alternating, given_labels, labelled_images
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import with_rows
from fedjax_ssl.server import fedavg, own_weights
from fedjax_ssl.server.aggregation import counts_told

COUNTS = "class_counts"  # accepted pseudo-labels of each class: sent by clients, kept at the server
GIVEN = "given_labels"  # labels of each class, kept at the server
FIELDS = {**BY_ROLE, "client.persistent": True}
VARIANTS: Variants = {
    "paper": {  # the setting of its experiments, with the epochs and rounds of its code
        **TEN_CLIENTS,
        "num_rounds": 1002,
        "cbafed.warm_up_rounds": 501,
        "model.name": "resnet18_imagenet",  # for 32x32 pixels too; the argument resnet18 has a stem for those
        "client.unlabelled_learning_rate": 0.02,
        "client.clip_norm": 5.0,
    },
    "svhn": {"cbafed.cap": 0.9, "cbafed.second_labels": False},
    "cifar100": {"num_rounds": 2002, "cbafed.warm_up_rounds": 1001},
    "isic": {"cbafed.cap": 0.9, "cbafed.second_labels": False, "cbafed.labelled_factor": 10.0},
    "code": {"cbafed.second_labels": True},
}


def defaults() -> Section:
    section = Section()
    # First rounds, in which only clients with labels train, client.epochs each; 501 in the paper.
    section.warm_up_rounds = whole(0, least=0)
    # Epochs of a client with labels in later rounds; other clients make client.epochs.
    section.labelled_epochs = whole(11, least=1)
    section.cap = share(0.95)  # largest threshold of a class, see `acceptance`
    section.second_labels = True  # whether an image below its threshold may get its second most likely class
    section.labelled_factor = real(1.0, least=0)  # factor of the given labels in an upload's weight
    section.residual_every = whole(5, least=1)  # epochs, or rounds, between two such averagings
    return section


class CBAFedExtra(NamedTuple):
    """What the server sends to clients besides the model."""

    acceptance: Acceptance  # which labels count
    second_stage: jax.Array  # bool [], whether clients without labels train


def cbafed(problem: Problem) -> Method:
    """Both stages as a Method."""
    config, options = problem.config, problem.config.cbafed

    def memory(data: FederatedData, model: Model) -> dict[str, Any]:
        return {
            GIVEN: given_labels(problem, data),
            COUNTS: jnp.zeros((config.num_clients, problem.num_classes)),
            RECORD: trained_parts(problem.network, model, CLASSIFIER),
        }

    def broadcast(state: State, data: FederatedData, key: jax.Array) -> Broadcast:
        counts = state.server[GIVEN] + jnp.sum(state.server[COUNTS], axis=0)
        by = acceptance(counts, options.cap)
        return global_model(problem, state, CBAFedExtra(by, state.round >= options.warm_up_rounds))

    def aggregate(state: State, data: FederatedData, received: Received, key: jax.Array) -> tuple[State, Metrics]:
        state, metrics = aggregation.aggregate(state, data, received, key)
        told = jnp.where(received.accepted[:, None], counts_told(received, COUNTS, received.sizes), 0.0)
        counts = with_rows(state.server[COUNTS], received.clients, 0.0, received.sizes > 0)
        counts = counts.at[received.clients].add(told)  # a client may have two rows, of which one at most is accepted
        return state._replace(server={**state.server, COUNTS: counts}), metrics

    def number_of_labels(received: Received) -> jax.Array:
        """Weight of an upload: its number of labels, with a factor for given ones; float32 [R]."""
        labels = jnp.sum(counts_told(received, COUNTS, received.sizes), axis=1)
        return options.labelled_factor * labelled_images(received) + labels

    # In the first stage a round is an epoch, so the global model has a labelled client's residual connection.
    residual = residual_over_rounds(options.warm_up_rounds, options.residual_every)
    aggregation = fedavg(problem, weighted_by=own_weights(number_of_labels), after_mean=(residual,))
    phases = on_given_labels(problem), on_accepted_labels(problem)
    method = alternating(problem, phases, server=memory, label=label_views(problem), aggregation=aggregation)
    return method._replace(broadcast=broadcast, aggregate=aggregate)


def on_given_labels(problem: Problem) -> Phase:
    """Epochs of cross-entropy with the residual connection; `client.epochs` of them in the first stage."""
    config, options = problem.config.client, problem.config.cbafed
    most = max(options.labelled_epochs, config.epochs)
    longest = labelled_plan(problem, most)

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        planned = longest(received, data, cohort, previous)
        epochs = jnp.where(received.extra.second_stage, options.labelled_epochs, config.epochs)
        return planned._replace(num_steps=planned.num_steps // most * epochs)

    phase = labelled_phase(problem, plan=plan)
    return with_residual(phase, config.batch_size, options.residual_every)


def label_views(problem: Problem) -> Label:
    """The received model labels a weak view of each image; the class's threshold decides.

    `Labels.more` is the raw keys of these views, on which clients train.
    """
    options, network = problem.config.cbafed, problem.network

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        view_keys, _ = split_keys(cohort)
        examples = Examples.of(data, cohort, view_keys)
        logits_of = lambda images: network.predict(received.model, images).logits  # noqa: E731
        logits = score_cohort(problem, logits_of, data.inputs, examples, num_views=1)
        logits, _ = without_prior(problem.config.confidence.debias, logits, examples.unlabelled)
        labels, accepted = accept(jax.nn.softmax(logits), received.extra.acceptance, options.second_labels)
        accepted &= examples.unlabelled & received.extra.second_stage
        counts = class_counts(jnp.where(accepted, labels, -1), problem.num_classes)
        return Labels(Report(labels, accepted), tells={COUNTS: counts}, more=jax.random.key_data(view_keys))

    return label


def on_accepted_labels(problem: Problem) -> Phase:
    """Trains on the views that were labelled, and makes the upload of both phases."""
    config, network = problem.config.client, problem.network

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        accepted, (_, order_keys) = cohort.labels.report.qualified, split_keys(cohort)
        deck = Deck.shuffled(Examples.of(data, cohort), accepted, order_keys, config.epochs)
        # Skips a last batch of one image, as in the code.
        deck = deck._replace(size=deck.size - (deck.size % config.batch_size == 1))
        num_steps = deck.num_steps(config.batch_size)
        return Plan({"unlabelled": deck}, num_steps, takes_part=jnp.any(accepted, axis=1))

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        unlabelled = batch.unlabelled
        keys = jnp.broadcast_to(jax.random.wrap_key_data(at.labels.more), unlabelled.positions.shape)
        images = weak_views(problem.weak, keys, unlabelled.positions, unlabelled.inputs)

        (outputs,), batch_stats = network.train(model, (images,), unlabelled.mask)
        labels = at.labels.report.labels[unlabelled.positions]
        value = cross_entropy(outputs.logits, labels, unlabelled.mask)
        return Loss(value, batch_stats, {"unlabelled_loss": value})

    return unlabelled_phase(problem, loss, plan=plan)


ENTRY = Entry(
    cbafed,
    title="CBAFed",
    paper="https://openaccess.thecvf.com/content/CVPR2023/html/"
    "Li_Class_Balanced_Adaptive_Pseudo_Labeling_for_Federated_Semi-Supervised_Learning_CVPR_2023_paper.html",
    settings=("some_clients", "clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=("debias",),
    advice=lambda config: labels_alone(config, "cbafed.warm_up_rounds") or few_labels(config),
    tiny={"cbafed.labelled_epochs": 3, "cbafed.cap": 0.12, "cbafed.residual_every": 1, "clients_per_round": 8},
)
