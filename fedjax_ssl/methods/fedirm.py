"""FedIRM: clients without labels match the relations between classes that clients with labels found.

Liu et al., "Federated Semi-supervised Medical Image Classification via Inter-client Relation Matching", MICCAI 2021
(arXiv 2106.08600). Some clients have labels for all their images, the others for none. What differs from FedAvg:
  1. a client with labels also uploads its relation matrix: for each class the softened mean prediction for its images;
  2. the server averages these matrices, and sends the mean with the next broadcast;
  3. a client without labels has its own mean teacher, and minimises the squared error to its probabilities;
  4. it also makes a relation matrix from the batch's confident predictions, and matches it to the received one. Both
     terms are ramped up.

This follows the public code, liuquande/FedIRM, as only the abstract was available; docs/methods/fedirm.md has more.
"""

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, real, whole
from fedjax_ssl.client import LABELLED, At, Batches, Loss, Plan, global_model, labelled_phase, unlabelled_phase
from fedjax_ssl.client.by_role import unlabelled_plan
from fedjax_ssl.client.confidence import threshold_of
from fedjax_ssl.client.mean_teacher import TEACHER, follow, own_teachers, teacher_of
from fedjax_ssl.client.steps import LossFunction
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Broadcast, Cohort, Method, Phase, Previous, Problem, State
from fedjax_ssl.methods.entry import Entry, Variants, labels_alone
from fedjax_ssl.methods.frames import BY_ROLE, alternating, two_smoothed_views
from fedjax_ssl.ops.losses import mean_present, symmetric_divergence
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.server import fedavg
from fedjax_ssl.server.aggregation import Flow, Given, Link

FIELDS = {**BY_ROLE, "client.persistent": True}
VARIANTS: Variants = {
    "code": {"fedirm.weight": 15.0, "aggregation.weights": "uniform"},  # with Adam, which depends on no such factor
    "consistency": {"fedirm.relation_weight": 0.0},  # the mean teacher alone
}
RELATIONS = "relations"  # float32 [C, C]: metadata of uploads, and the server's memory, 0 before it has any
EPOCHS = "epochs"  # sent with them: local epochs before this round
TEMPERATURE = 2.0  # of the relations
MOST_ENTROPY = 2.0  # of a confident prediction, in nats
LARGEST_DECAY = 0.99  # of the teacher, see `follow`


def defaults() -> Section:
    section = Section()
    section.warm_up_rounds = whole(21, least=0)  # first rounds, in which only clients with labels train
    section.weight = real(0.1, least=0)  # of the loss of clients without labels, after the ramp; 15 in the code (Adam)
    section.relation_weight = real(1.0, least=0)  # of the relations, relative to the consistency
    section.ramp_epochs = whole(30, least=1)  # R, epochs until the loss has its weight
    return section


def fedirm(problem: Problem) -> Method:
    """Its algorithm as a Method."""
    phases = labelled_phase(problem, on_labels(problem)), without_labels(problem)
    aggregation = fedavg(problem, after_mean=(mean_relations(problem.num_classes),))

    def broadcast(state: State, data: FederatedData, key: jax.Array) -> Broadcast:
        extra = {RELATIONS: state.server[RELATIONS], EPOCHS: state.round * problem.config.client.epochs}
        return global_model(problem, state, extra)

    return alternating(problem, phases, own_teachers, aggregation=aggregation)._replace(broadcast=broadcast)


def mean_relations(num_classes: int) -> Link:
    """Stores the plain mean of the relations of clients with labels, which send the sum over their steps."""

    def apply(flow: Flow, given: Given) -> Flow:
        told = given.received.uploads.metadata
        known = (flow.shares > 0) & (told[LABELLED] > 0)
        sums = jnp.maximum(told[RELATIONS], jnp.finfo(jnp.float32).tiny)
        mean = mean_present(sums / jnp.sum(sums, axis=-1, keepdims=True), known)
        return flow._replace(memory={**flow.memory, RELATIONS: jnp.where(jnp.any(known), mean, flow.memory[RELATIONS])})

    return Link(apply, lambda params: {RELATIONS: jnp.zeros((num_classes, num_classes))})


def on_labels(problem: Problem) -> LossFunction:
    """The sum of cross-entropies of two weak views, with smoothed labels; the first one gives the relations."""

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, labels, mask = batch.labelled.inputs, batch.labelled.labels, batch.labelled.mask
        value, first, batch_stats = two_smoothed_views(problem, model, images, labels, mask, at.key)
        sums = {RELATIONS: relations_of(first.logits, labels, mask)}
        return Loss(value, batch_stats, {"labelled_loss": value}, sums=sums)

    return loss


def relations_of(logits: jax.Array, labels: jax.Array, counted: jax.Array) -> jax.Array:
    """Row c of the relation matrix, float32 [C, C]: softmax(zbar_c / T), zbar_c the mean logits of the class's images.

    Logits are float32 [B, C], labels int32 [B]; images that do not count, bool [B], are left out. The row of a class
    without images is uniform.
    """
    members = jax.nn.one_hot(jnp.where(counted, labels, -1), logits.shape[-1])
    means = jnp.matmul(members.T, logits, precision="highest") / (jnp.sum(members, axis=0)[:, None] + 1e-8)
    return jax.nn.softmax(means / TEMPERATURE)


def without_labels(problem: Problem) -> Phase:
    """The phase of a client without labels, after `labelled_phase`; it makes the upload of both.

    The loss is weight e^(-5 (1 - t / R)^2) (sum_i |p(x_i') - p_T(x_i'')|^2 / B + relation_weight D) in the client's
    epoch t <= R. The teacher predicts p_T in training mode; D is the `symmetric_divergence` of sent and own relations.
    """
    config, options, network = problem.config, problem.config.fedirm, problem.network
    after_warm_up = unlabelled_plan(problem, options.warm_up_rounds)

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        planned = after_warm_up(received, data, cohort, previous)
        return planned._replace(tells={RELATIONS: previous.upload.metadata[RELATIONS]})

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, mask, (first_key, second_key) = batch.unlabelled.inputs, batch.unlabelled.mask, jax.random.split(at.key)
        teacher = teacher_of(at, "received")
        (seen,), _ = network.train(teacher, (problem.weak(second_key, images),), mask)
        epoch = at.received.extra[EPOCHS] + at.step * config.client.epochs // jnp.maximum(at.num_steps, 1)
        ramp = jnp.exp(-5 * jnp.square(1 - jnp.minimum(epoch / options.ramp_epochs, 1.0)))

        (outputs,), batch_stats = network.train(model, (problem.weak(first_key, images),), mask)
        p, target = jax.nn.softmax(outputs.logits), jax.nn.softmax(seen.logits)
        consistency = mean_present(jnp.sum(jnp.square(p - jax.lax.stop_gradient(target)), axis=-1), mask)
        entropy = jnp.sum(jax.scipy.special.entr(jax.lax.stop_gradient(p)), axis=-1)
        confident = mask & (jnp.max(p, axis=-1) >= threshold_of(problem, 0.3)) & (entropy < MOST_ENTROPY)
        relations, given = relations_of(outputs.logits, jnp.argmax(p, axis=-1), confident), at.received.extra[RELATIONS]
        apart = jnp.mean(symmetric_divergence(relations, jnp.where(given > 0, given, jax.lax.stop_gradient(relations))))
        value = options.weight * ramp * (consistency + options.relation_weight * apart)
        metrics = {"unlabelled_loss": value, "consistency": consistency, "relation_divergence": apart}
        return Loss(value, batch_stats, metrics, remember={TEACHER: teacher})

    return unlabelled_phase(problem, loss, plan=plan, after=lambda own, model: follow(own, model, LARGEST_DECAY))


ENTRY = Entry(
    fedirm,
    title="FedIRM",
    paper="https://arxiv.org/abs/2106.08600",
    settings=("some_clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=("threshold",),
    advice=lambda config: labels_alone(config, "fedirm.warm_up_rounds"),
    tiny={"fedirm.warm_up_rounds": 0, "clients_per_round": 8, "data.labelled_clients": 2},
)
