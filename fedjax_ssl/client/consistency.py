"""Local SGD on a labelled and an unlabelled batch in each step, as in FixMatch and UDA.

The strong view of an unlabelled image is trained towards a model's prediction of its weak view, made in the same step;
labelled images, if the client has any, add their cross-entropy. Which examples have a label is data: a client with
labels only, with none, or with a few goes through the same step.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client.deck import Batch, Deck, Examples
from fedjax_ssl.client.labels import debiased, label_cohort
from fedjax_ssl.client.local_sgd import Loss, local_sgd
from fedjax_ssl.engine.interface import CLASSIFIER, Jobs, Phase, Problem
from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.losses import cross_entropy
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.models import Outputs
from fedjax_ssl.models.network import Network


class Rule(NamedTuple):
    """Targets and loss of a method, from the two views.

    Attributes:
        target: (logits of the weak views [B, C], thresholds [C]) -> (targets, a pytree with leaves [B, ...]; and
            weights, bool or float32 [B], of each image in the loss).
        loss: (logits of the strong views [B, C], targets, weights [B], mask [B]) -> float32 [].
        by_both: whether `target` takes the logits of both models, (local [B, C], received [B, C], thresholds [C]).
        also: (received, model, Step) -> Loss, without statistics, a further loss of what the step has passed; None:
            none. It needs `by_both`.
        metrics: names of its metrics.
        sums: shapes of its `sums`, by name, see `local_sgd`.
    """

    target: Callable[..., tuple[Any, jax.Array]]
    loss: Callable[..., jax.Array]
    by_both: bool = False
    also: Callable[..., Loss] | None = None
    metrics: tuple[str, ...] = ()
    sums: Mapping[str, tuple[int, ...]] = {}


class Step(NamedTuple):
    """What one step has passed through the model in training, for a further loss.

    Attributes:
        weak, strong: Outputs of the unlabelled images' views, [B, ...].
        local, received: float32 [B, C], logits of the weak views by both models, as labels take them; no gradient.
        mask: bool [B].
        given: Outputs of the labelled images' weak views, [B', ...]; None if no client has labels.
        labels: int32 [B'].
        given_received: float32 [B', C], their logits by the received model.
        given_mask: bool [B'].
        thresholds: float32 [C].
        last_epoch: bool [], whether the step is one of the last local epoch.
    """

    weak: Outputs
    strong: Outputs
    local: jax.Array
    received: jax.Array
    mask: jax.Array
    given: Outputs | None
    labels: jax.Array | None
    given_received: jax.Array | None
    given_mask: jax.Array | None
    thresholds: jax.Array
    last_epoch: jax.Array


class Work(NamedTuple):
    """What one client trains on.

    Attributes:
        deck: its unlabelled examples, and the labelled ones too under `consistency.include_labelled`.
        labelled: its labelled ones; None if no client has any.
        thresholds: float32 [C], for each class.
        num_steps: int32 [], of all local epochs.
        prior: float32 [C], by which both models' probabilities are divided, see `debiased`; None: by nothing.
    """

    deck: Deck
    labelled: Deck | None
    thresholds: jax.Array
    num_steps: jax.Array
    prior: jax.Array | None = None


def consistency_phase(
    problem: Problem,
    rule: Rule,
    threshold: float,
    label_mode: str = "train",
    loss_over: str = "batch",
    parts: tuple[str, ...] = CLASSIFIER,
) -> Phase:
    """L = H(y, f(a(x))) + lambda_u L_u: the phase, with `config.consistency`'s fields.

    Args:
        problem: the run.
        rule: targets and loss of the unlabelled images.
        threshold: see `label_cohort`.
        label_mode: how the model in training sees a weak view: 'train', by the statistics of the batch; 'eval', by its
            own. The received model (`labels_from`) always takes its own.
        loss_over: 'batch', every unlabelled image has a strong view; 'confident', only those of weight above 0 have
            one and enter its batch statistics, and a step in which no image counts is skipped.
        parts: of the model that are trained and uploaded.

    Raises:
        UserError: `loss_over='confident'` with one pass for all views; one model's labels for a rule of both;
            `code_normalisation` of grey images.
    """
    config, options = problem.config.client, problem.config.consistency
    if options.code_normalisation:
        problem = _normalised_as_the_code_does(problem)
    network = problem.network
    where = problem.config.data
    clients_have_labels = where.labels != "server" or where.reveal_labels or where.centralised
    only_confident, by_received = loss_over == "confident", options.labels_from == "received"
    together = options.batch_norm == "together" or (
        options.batch_norm == "auto" and clients_have_labels and not only_confident
    )
    if together and only_confident:
        raise UserError("consistency.batch_norm='together' needs a strong view of every image, not of confident ones")
    if rule.by_both and by_received:
        raise UserError("consistency.labels_from='received' is for a method that labels by one model, not by both")
    unlabelled_size = options.unlabelled_ratio * config.batch_size
    fixed_length = options.epoch_length == "unlabelled"

    def prepare(received, data, cohort, previous) -> Jobs:
        del previous
        examples = Examples.of(data, cohort)
        # Labels of the received model, for the thresholds that adapt and for the report.
        included = examples.present if options.include_labelled else examples.unlabelled
        unlabelled = examples._replace(present=included)
        made = label_cohort(
            problem,
            lambda images: network.probabilities(received.model, images),
            data,
            unlabelled,
            threshold=threshold,
            num_views=int(problem.config.threshold.debias != "none"),  # APP-U is of weak views
        )
        passes = config.epochs * (options.unlabelled_ratio if fixed_length else 1)
        deck = Deck.shuffled(examples, included, examples.keys, passes)
        num_steps, labelled = deck.num_steps(unlabelled_size), None
        if clients_have_labels:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(examples.keys)
            labelled = Deck.shuffled(examples, examples.labelled, keys, config.epochs)
            # The shorter deck is gone round again.
            num_steps = jnp.maximum(num_steps, labelled.num_steps(config.batch_size))
        if fixed_length:
            length = jnp.maximum(deck.size // config.batch_size, 1)  # ours: a client of a few images takes a step
            num_steps = jnp.where(deck.size > 0, config.epochs * length, num_steps)
        report = made.report._replace(qualified=made.report.qualified | examples.labelled)
        return Jobs(num_steps, Work(deck, labelled, made.thresholds, num_steps, made.prior), report, made.own)

    def loss(received, data, work: Work, batch: Batch, own, key):
        del own
        weak_key, strong_key, labelled_key = jax.random.split(key, 3)
        images = data.images[batch.rows]
        weak, strong = problem.weak(weak_key, images), problem.strong(strong_key, images)
        of_received = None
        if by_received or rule.by_both:
            of_received = network.predict(received.model, weak).logits
        given = []  # the labelled images' views, and which of them are present
        if work.labelled is not None:
            known = work.labelled.batch(batch.index, config.batch_size)
            known_weak = problem.weak(labelled_key, data.images[known.rows])
            given = [([known_weak], known.mask)]

        def of(model) -> Loss:
            of_weak = of_received if by_received else None
            if label_mode == "eval" and not by_received:
                of_weak = network.predict(model, weak).logits
            in_training = [weak] if of_weak is None else []
            # The confident images are known only after their weak views have passed.
            views = in_training if only_confident else [*in_training, strong]
            passed, after = train_views(network, model, [*given, (views, batch.mask)], together)
            of_given = passed.pop(0) if given else None
            weak_passed = passed.pop(0) if in_training else None
            of_weak = jax.lax.stop_gradient(weak_passed.logits if of_weak is None else of_weak)
            labelling = (of_weak, of_received) if rule.by_both else (of_weak,)
            if work.prior is not None:
                labelling = tuple(debiased(logits, work.prior) for logits in labelling)
            targets, weights = rule.target(*labelling, work.thresholds)
            counted = batch.mask
            if only_confident:
                counted = batch.mask & (weights > 0)
                passed, after = train_views(network, after, [([strong], counted)])
            unlabelled_loss = rule.loss(passed[0].logits, targets, weights, counted)
            value = options.unlabelled_weight * unlabelled_loss
            metrics = {"confident_share": jnp.sum((weights > 0) & batch.mask) / jnp.maximum(jnp.sum(batch.mask), 1)}
            if given:
                labelled_loss = cross_entropy(of_given.logits, data.visible_labels[known.rows], known.mask)
                value = labelled_loss + value
                metrics |= {"labelled_loss": labelled_loss, "unlabelled_loss": unlabelled_loss}
            counts = jnp.any(jnp.concatenate([counted, *(mask for _, mask in given)])) if only_confident else None
            sums = {}
            if rule.also is not None:
                last_epoch = batch.index >= work.num_steps - work.num_steps // config.epochs
                labelled = (None,) * 4
                if given:
                    by_both = network.predict(received.model, known_weak).logits
                    labelled = of_given, data.visible_labels[known.rows], by_both, known.mask
                step = Step(weak_passed, passed[0], *labelling, batch.mask, *labelled, work.thresholds,
                            last_epoch)  # fmt: skip
                further = rule.also(received, model, step)
                value, metrics, sums = value + further.value, {**metrics, **further.metrics}, further.sums
            return Loss(value, after.batch_stats, {"client_loss": value, **metrics}, counts=counts, sums=sums)

        return of

    metrics = ("client_loss", "confident_share")
    metrics += ("labelled_loss", "unlabelled_loss") if clients_have_labels else ()
    metrics += rule.metrics
    return local_sgd(problem, prepare, loss, metrics=metrics, parts=parts, batch_size=unlabelled_size, sums=rule.sums)


def _normalised_as_the_code_does(problem: Problem) -> Problem:
    """A problem whose network takes pixels as the clients of SAGE's code do."""
    network = problem.network
    if len(network.mean) != 3:
        raise UserError(
            f"consistency.code_normalisation is of images with 3 channels; those of {problem.config.data.source} have "
            f"{len(network.mean)}"
        )
    return problem._replace(network=network._replace(mean=(0.4914, 0.4822, 0.4465), std=(0.2471, 0.2435, 0.2616)))


def train_views(
    network: Network, model: Model, groups: list[tuple[list[jax.Array], jax.Array]], together: bool = False
) -> tuple[list[Outputs], Model]:
    """Views in training mode, group after group; a group's views share a pass, and each has its own statistics.

    Args:
        network: the architecture.
        model: in training.
        groups: each some views [B, H, W, C] of one batch, and its mask, bool [B]; an empty one is no pass.
        together: one pass for all, with the statistics of all views as one batch.

    Returns:
        The Outputs of each view in their order, and the model with its statistics after the passes.
    """
    if together:
        views, masks = zip(*((view, mask) for views, mask in groups for view in views))
        (outputs,), batch_stats = network.train(model, (jnp.concatenate(views),), jnp.concatenate(masks))
        ends = [0, *itertools.accumulate(map(len, views))]
        of_views = [jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], outputs) for a, b in itertools.pairwise(ends)]
        return of_views, model._replace(batch_stats=batch_stats)
    passed = []
    for views, mask in groups:
        if views:
            outputs, batch_stats = network.train(model, tuple(views), mask)
            passed += outputs
            model = model._replace(batch_stats=batch_stats)
    return passed, model
