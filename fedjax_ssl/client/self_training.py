"""The two phases of a client with or without labels: training on labels, then on pseudo-labels from weak views.

A rule of confidence weights the pseudo-labels, or ACR makes its own, see `acr.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import is_on
from fedjax_ssl.client import acr
from fedjax_ssl.client.by_role import labelled_phase, unlabelled_phase
from fedjax_ssl.client.confidence import MEMORY, Confidence, make_confidence, states_at_start, threshold_of
from fedjax_ssl.client.deck import Examples
from fedjax_ssl.client.labels import as_told, debiased, score_cohort, without_prior
from fedjax_ssl.client.steps import At, Batches, Loss, LossFunction
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import CLASSIFIER, Broadcast, Cohort, Label, Labels, Phase, Previous, Problem, Report
from fedjax_ssl.models import Outputs
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import BatchStats, Model
from fedjax_ssl.ops.trees import repeated, row

ACCEPTED = "accepted"  # metadata of every upload: the number of pseudo-labels behind it, see `confidence.accepted`
# (outputs, examples, confident) -> further metadata that each client of a cohort sends, by name, leaves [M, ...]. The
# outputs are the received model's for weak views of all the cohort's images, leaves [M, n_max, ...]; confident images,
# bool [M, n_max], have a probability of at least `confidence.threshold`.
Tell = Callable[[Outputs, Examples, jax.Array], Mapping[str, jax.Array]]


def is_acr(problem: Problem) -> bool:
    """Whether the run has ACR. Then the broadcast's `extra` is the class shares of all labels, float32 [C]."""
    return problem.config.confidence.kind == "acr"


def trained_parts_of(problem: Problem) -> tuple[str, ...]:
    """The parts of the model that clients train and upload."""
    return (*CLASSIFIER, acr.STANDARD) if is_acr(problem) else CLASSIFIER


def own_states(problem: Problem, data: FederatedData) -> dict[str, Any]:
    """The entry of `State.clients` for the state of the rule or of ACR, every leaf [K, ...]."""
    num_clients, n_max = data.client_index.shape
    first = acr.first_estimate(problem) if is_acr(problem) else rule_of(problem).init(n_max)
    return {MEMORY: repeated(first, num_clients)}


def rule_of(problem: Problem):
    """The rule of `config.confidence` with its threshold."""
    return make_confidence(problem, threshold_of(problem))


def states_of_round(problem: Problem, examples: Examples) -> dict[str, Any]:
    """The entry of the clients' memory with these states at the beginning of a round, leaves [M, ...]."""
    if is_acr(problem):
        return {MEMORY: jax.vmap(acr.next_round(problem))(examples.own[MEMORY])}
    return {MEMORY: states_at_start(problem, rule_of(problem), examples)}


def self_training(problem: Problem, tell: Tell | None = None) -> tuple[Label, tuple[Phase, Phase]]:
    """The labelling and two phases: `client.epochs` passes over labelled images, then as many over unlabelled images.

    By default the received model, in evaluation mode, labels one weak view of each image before the first step. With
    `confidence.labels_from='local'` the model in training labels a weak view in each step. Training is on strong views;
    a weak view joins the forward pass if it is needed. `tell` computes metadata besides `ACCEPTED`. Raises a
    UserError if a field is set that ACR ignores.
    """
    config, parts, label = problem.config.client, trained_parts_of(problem), label_views(problem, tell)
    if not is_acr(problem):
        return label, (labelled_phase(problem), unlabelled_phase(problem, loss_by_confidence(problem)))
    if is_on(config.logit_adjustment) or is_on(config.share_offset) or config.labelled_views != "weak":
        raise UserError(
            "confidence.kind='acr' has a loss of its own on labelled images; leave client.logit_adjustment and "
            "client.share_offset 0, and client.labelled_views 'weak'"
        )
    if problem.config.confidence.debias != "none":
        raise UserError("confidence.kind='acr' adjusts its labels itself; leave confidence.debias 'none'")
    on_labels = labelled_phase(problem, acr.loss_on_labels(problem, "labelled_loss"), parts)
    return label, (on_labels, unlabelled_phase(problem, loss_by_acr(problem), parts))


def label_views(problem: Problem, tell: Tell | None) -> Label:
    """The received model labels a weak view of each image; `confidence.labels_from='local'` only reports these labels.

    `Labels.more` is the model's outputs for these views, leaves [M, n_max, ...], without features; () with 'local'.
    """
    options, network, heads = problem.config.confidence, problem.network, trained_parts_of(problem)[len(CLASSIFIER) :]

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        examples = Examples.of(data, cohort)

        def scores(images) -> Outputs:
            outputs = network.predict(received.model, images)
            return outputs if tell is not None else outputs._replace(features=())

        seen = told_outputs(data, examples.rows, score_cohort(problem, scores, data.inputs, examples, 1), heads)
        logits, prior = without_prior(options.debias, seen.logits, examples.unlabelled)
        probabilities = jax.nn.softmax(logits)
        confident = examples.unlabelled & (jnp.max(probabilities, axis=-1) >= threshold_of(problem))
        labels = jnp.argmax(probabilities, axis=-1).astype(jnp.int32)
        return Labels(
            Report(labels, confident | examples.labelled),
            own=states_of_round(problem, examples),
            tells={} if tell is None else tell(seen._replace(logits=logits), examples, confident),
            size=jnp.sum(examples.unlabelled, axis=1),
            prior=prior,
            more=seen._replace(features=()) if options.labels_from != "local" else (),
        )

    return label


def told_outputs(data: FederatedData, rows: jax.Array, outputs: Outputs, heads: tuple[str, ...]) -> Outputs:
    """`as_told` for the logits of the classifier and of the named heads."""
    false = {name: as_told(data, rows, outputs.heads[name]) for name in heads}
    return outputs._replace(logits=as_told(data, rows, outputs.logits), heads={**outputs.heads, **false})


class Seen(NamedTuple):
    """A step's views of unlabelled images."""

    labelling: Outputs  # outputs that give the labels, [B, ...]; no gradient
    strong: list[Outputs]  # of each strong view, in training mode
    batch_stats: BatchStats  # the model's statistics after the pass


def pass_views(problem: Problem, model: Model, batch: Batches, at: At, strong_views: int = 1) -> Seen:
    """Passes a weak view, where it is needed, and strong views of the batch `unlabelled` through the network."""
    images, mask = batch.unlabelled.inputs, batch.unlabelled.mask
    weak_key, *strong_keys = jax.random.split(at.key, 1 + strong_views)
    by_received = problem.config.confidence.labels_from != "local"
    with_weak = not by_received or problem.network.normalisation == "running"
    views = [problem.weak(weak_key, images)] if with_weak else []
    views += [problem.strong(strong_key, images) for strong_key in strong_keys]
    outputs, batch_stats = problem.network.train(model, tuple(views), mask)
    if by_received:
        labelling = row(at.labels.more, batch.unlabelled.positions)
    else:
        heads = trained_parts_of(problem)[len(CLASSIFIER) :]
        labelling = told_outputs(at.data, batch.unlabelled.rows, jax.lax.stop_gradient(outputs[0]), heads)
    labelling = labelling._replace(logits=debiased(labelling.logits, at.labels.prior))
    return Seen(labelling, list(outputs[-strong_views:]), batch_stats)


def loss_by_confidence(problem: Problem) -> LossFunction:
    """The most probable class as label of a strong view, weighted by the rule, whose state every batch changes."""
    rule = rule_of(problem)

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        seen = pass_views(problem, model, batch, at)
        (strong,) = seen.strong
        value, weights, state = loss_by_rule(rule, batch, at, seen.labelling.logits, strong.logits)
        return pseudo_loss(problem, batch, seen, value, weights, state)

    return loss


def loss_by_rule(
    rule: Confidence, batch: Batches, at: At, labelling: jax.Array, trained: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
    """The loss of logits towards the labels of others, [B, C] each, the labels' weights and the rule's state."""
    unlabelled, p = batch.unlabelled, jax.nn.softmax(labelling)
    weights, state = rule.step(at.own[MEMORY], p, unlabelled.mask, unlabelled.positions, at.labels.size)
    labels = jnp.argmax(labelling, axis=-1).astype(jnp.int32)
    value = cross_entropy(trained, labels, unlabelled.mask, weights)
    if rule.regulariser is not None:
        value = value + rule.regulariser(state, trained, weights)
    return value, weights, state


def loss_by_acr(problem: Problem) -> LossFunction:
    """The labels of ACR's two classifiers for two strong views of each image."""
    targets_of = acr.targets(problem)

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        mask, seen = batch.unlabelled.mask, pass_views(problem, model, batch, at, strong_views=2)
        balanced, standard, state = targets_of(at.own[MEMORY], seen.labelling, mask, at.received.extra)
        losses = [
            cross_entropy(logits, labels, mask, weights)
            for view in seen.strong
            for logits, (labels, weights) in ((view.logits, balanced), (view.heads[acr.STANDARD], standard))
        ]
        return pseudo_loss(problem, batch, seen, sum(losses[1:], start=losses[0]) / 2, balanced.weights, state)

    return loss


def pseudo_loss(problem: Problem, batch: Batches, seen: Seen, value: jax.Array, weights: jax.Array, state: Any) -> Loss:
    """The loss with its metrics, the state to remember, and the number of accepted labels."""
    options, mask = problem.config.confidence, batch.unlabelled.mask
    weight = jnp.sum(weights)
    confident = jnp.sum(mask & (jnp.max(jax.nn.softmax(seen.labelling.logits), axis=-1) >= threshold_of(problem)))
    accepted = weight if options.accepted == "trained_on" else confident.astype(jnp.float32)
    metrics = {"unlabelled_loss": value, "mean_weight": weight / jnp.maximum(jnp.sum(mask), 1)}
    return Loss(value, seen.batch_stats, metrics, remember={MEMORY: state}, sums={ACCEPTED: accepted})
