"""Local SGD on a labelled and an unlabelled batch in each step.

The phase of FixMatch, UDA, SAGE, ProxyFL and FedOpenMatch.

The strong view of an unlabelled image is trained towards a label that is made from its weak view in the same step.
Labelled images, if the client has any, add their cross-entropy. All clients take the same step, whether all, none or a
few of their examples have labels. Methods differ in their `Rule`.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client.confidence import Confidence
from fedjax_ssl.client.deck import Batch, Deck, Examples
from fedjax_ssl.client.labels import as_told, debiased, states_and_report
from fedjax_ssl.client.local_sgd import At, Loss, local_sgd
from fedjax_ssl.data import FederatedData, clients_may_have_labels
from fedjax_ssl.engine.interface import CLASSIFIER, Broadcast, Cohort, Jobs, Phase, Previous, Problem
from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.losses import cross_entropy
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.models import Outputs
from fedjax_ssl.models.network import Network


class Views(NamedTuple):
    """Images of a step, with the outputs of the received model and of the model in training.

    XLA removes what a rule does not read. With `confidence.debias` the logits are debiased, see `debiased`.
    """

    mask: jax.Array  # bool [B], False for padding, and in `Rule.loss` for unlabelled images without a strong view
    labels: jax.Array  # int32 [B], the visible labels
    by_received: jax.Array  # float32 [B, C], logits of the weak views by the received model with its own statistics
    # by_local: float32 [B, C], logits of the weak views by the model in training, without gradient. It uses its own
    # statistics if `label_mode` is 'eval' or the weak views have no training pass, else batch statistics.
    # logits: `by_received` or `by_local`, as `consistency.labels_from` says. Both are None for labelled images.
    by_local: jax.Array | None = None
    logits: jax.Array | None = None
    # weak and strong: Outputs of these views in training mode, [B, ...]; None if they have no training pass.
    weak: Outputs | None = None
    strong: Outputs | None = None


# Probabilities, float32 [B, C] -> the most probable class, int32 [B], and its weight by the phase's `confidence`,
# float32 [B].
Weigh = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


class Rule(NamedTuple):
    """What a method computes for the unlabelled images of a step."""

    # (images, weigh) -> (targets, a pytree with leaves [B, ...]; weight of each image in the loss, float32 [B]). It is
    # called before the forward pass of the strong views.
    label: Callable[[Views, Weigh], tuple[Any, jax.Array]]
    # (images, targets, weights) -> L_u, float32 [].
    loss: Callable[[Views, Any, jax.Array], jax.Array]
    # (model, labelled images, unlabelled images, at, targets, weights) -> a further Loss, which is added; its
    # `batch_stats` are ignored. The labelled images have B = 0 if no client has any. None: no further loss.
    further: Callable[[Model, Views, Views, At, Any, jax.Array], Loss] | None = None


class ConsistencyWork(NamedTuple):
    """What one client trains on."""

    deck: Deck  # its unlabelled examples; with `consistency.include_labelled` the labelled ones too
    labelled: Deck | None  # its labelled examples; None if no client has any
    confidence: Any  # the rule's state, see `states_and_report`
    num_steps: jax.Array  # int32 [], steps of all local epochs
    # float32 [C], the prior by which both models' probabilities are divided, see `debiased`; None: no division.
    prior: jax.Array | None = None


def consistency_phase(
    problem: Problem,
    rule: Rule,
    confidence: Confidence,
    label_mode: str = "train",
    loss_over: str = "batch",
    parts: tuple[str, ...] = CLASSIFIER,
) -> Phase:
    """Makes the phase with the loss L = H(y, f(a(x))) + lambda_u L_u and the options of `config.consistency`.

    Args:
        problem: the run's `Problem`.
        rule: targets and loss of the unlabelled images.
        confidence: the rule for which labels count. Once a round its state is computed from the received model's labels
            of all images.
        label_mode: the normalisation statistics of the model in training for a weak view: 'train', those of the batch;
            'eval', its own. The received model always uses its own.
        loss_over: 'batch': every unlabelled image has a strong view. 'confident': only images with a weight above 0
            have one and enter its batch statistics. A step without such an image and without labels is skipped.
        parts: the parts of the model that are trained and uploaded.

    Raises:
        UserError: `loss_over='confident'` with one pass for all views.
    """
    network, config, options = problem.network, problem.config.client, problem.config.consistency
    where = problem.config.data
    clients_have_labels = clients_may_have_labels(where) or where.reveal_labels or where.centralised
    only_confident = loss_over == "confident"
    together = options.batch_norm == "together" or (
        options.batch_norm == "auto" and clients_have_labels and not only_confident
    )
    if together and only_confident:
        raise UserError("consistency.batch_norm='together' needs a strong view of every image, not of confident ones")
    # With separate statistics, weak views that the received model labels need no training pass.
    weak_in_training = label_mode == "train" and (together or options.labels_from == "local")
    unlabelled_size = options.unlabelled_ratio * config.batch_size
    fixed_length = options.epoch_length == "unlabelled"

    def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
        del previous
        examples = Examples.of(data, cohort)
        included = examples.present if options.include_labelled else examples.unlabelled
        made = states_and_report(problem, received.model, data, examples, included, confidence)
        passes = config.epochs * (options.unlabelled_ratio if fixed_length else 1)
        deck = Deck.shuffled(examples, included, examples.keys, passes)
        num_steps, labelled = deck.num_steps(unlabelled_size), None
        if clients_have_labels:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(examples.keys)
            labelled = Deck.shuffled(examples, examples.labelled, keys, config.epochs)
            # The shorter deck repeats.
            num_steps = jnp.maximum(num_steps, labelled.num_steps(config.batch_size))
        if fixed_length:
            length = jnp.maximum(deck.size // config.batch_size, 1)  # our choice: a small client takes one step
            num_steps = jnp.where(deck.size > 0, config.epochs * length, num_steps)
        return Jobs(
            num_steps, ConsistencyWork(deck, labelled, made.confidence, num_steps, made.prior), made.report, made.own
        )

    def loss(model: Model, batch: Batch, at: At) -> Loss:
        weak_key, strong_key, labelled_key = jax.random.split(at.key, 3)
        weak, strong = problem.weak(weak_key, batch.inputs), problem.strong(strong_key, batch.inputs)

        def labelling_logits(logits: jax.Array, rows: jax.Array) -> jax.Array:
            return debiased(as_told(at.data, rows, jax.lax.stop_gradient(logits)), at.work.prior)

        def views_of(images: jax.Array, batch: Batch) -> Views:
            logits = network.predict(at.received.model, images).logits
            return Views(batch.mask, batch.labels, labelling_logits(logits, batch.rows))

        unlabelled = views_of(weak, batch)
        if clients_have_labels:
            known = at.work.labelled.batch(at.step, config.batch_size).read(at.data)
            known_weak = problem.weak(labelled_key, known.inputs)
            labelled, groups = views_of(known_weak, known), [([known_weak], known.mask)]
        else:
            labelled, groups = Views(jnp.zeros(0, bool), jnp.zeros(0, jnp.int32), unlabelled.by_received[:0]), []

        # The confident images are known only after the weak views' pass.
        views = [weak] * weak_in_training + [strong] * (not only_confident)
        passed, after = train_views(network, model, [*groups, (views, batch.mask)], together)
        of_labelled = passed.pop(0) if clients_have_labels else None
        of_weak = passed.pop(0) if weak_in_training else None
        by_local = labelling_logits((of_weak or network.predict(model, weak)).logits, batch.rows)
        logits = unlabelled.by_received if options.labels_from == "received" else by_local
        unlabelled = unlabelled._replace(by_local=by_local, logits=logits, weak=of_weak)
        targets, weights = rule.label(unlabelled, lambda p: confidence.label(at.work.confidence, p, at.work.deck.size))

        share = jnp.sum((weights > 0) & batch.mask) / jnp.maximum(jnp.sum(batch.mask), 1)
        mask, counts = batch.mask, None
        if only_confident:
            mask &= weights > 0
            passed, after = train_views(network, after, [([strong], mask)])
            counts = jnp.any(mask) | jnp.any(labelled.mask)
        (of_strong,) = passed
        unlabelled = unlabelled._replace(mask=mask, strong=of_strong)
        labelled = labelled._replace(weak=of_labelled or jax.tree.map(lambda leaf: leaf[:0], of_strong))

        unlabelled_loss = rule.loss(unlabelled, targets, weights)
        value = options.unlabelled_weight * unlabelled_loss
        metrics = {"confident_share": share, "unlabelled_loss": unlabelled_loss}
        sums: Mapping[str, jax.Array] = {}
        if rule.further is not None:
            further = rule.further(model, labelled, unlabelled, at, targets, weights)
            value, sums, metrics = value + further.value, further.sums, metrics | further.metrics
        labelled_loss = cross_entropy(labelled.weak.logits, labelled.labels, labelled.mask)
        metrics["client_loss"] = value = labelled_loss + value
        if clients_have_labels:
            metrics["labelled_loss"] = labelled_loss
        return Loss(value, after.batch_stats, metrics, counts=counts, sums=sums)

    return local_sgd(problem, prepare, loss, parts, unlabelled_size)


def check_both_label(problem: Problem, name: str) -> None:
    """Checks the configuration of a method that labels by both the received model and the model in training.

    Raises:
        UserError: `consistency.labels_from` asks for labels by the received model only.
    """
    if problem.config.consistency.labels_from != "local":
        raise UserError(f"consistency.labels_from='received' is for a method that labels by one model; {name} has both")


def train_views(
    network: Network, model: Model, groups: list[tuple[list[jax.Array], jax.Array]], together: bool = False
) -> tuple[list[Outputs], Model]:
    """Passes views through the network in training mode, group by group; the views of a group share a forward pass.

    Args:
        network: the architecture.
        model: the model in training.
        groups: each has the views [B, H, W, C] of one batch and its mask, bool [B]; a group without views is skipped.
        together: whether all views share one forward pass and one set of batch statistics; else each view has its own
            statistics.

    Returns:
        The Outputs of each view in order, and the model with its statistics after the passes.
    """
    if together:
        views, masks = zip(*((view, mask) for views, mask in groups for view in views))
        (outputs,), batch_stats = network.train(model, (jnp.concatenate(views),), jnp.concatenate(masks))
        ends = [0, *itertools.accumulate(map(len, views))]
        of_views = [jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], outputs) for a, b in itertools.pairwise(ends)]
        return of_views, model._replace(batch_stats=batch_stats)
    passed: list[Outputs] = []
    for views, mask in groups:
        if views:
            outputs, batch_stats = network.train(model, tuple(views), mask)
            passed += outputs
            model = model._replace(batch_stats=batch_stats)
    return passed, model
