"""A step's views of labelled and unlabelled images through the network; shared by FixMatch and its relatives."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.client.deck import Deck, Examples
from fedjax_ssl.client.labels import labelling_logits
from fedjax_ssl.client.steps import At, Batches, Loss, MakePlan, Plan
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.data.labels import clients_may_have_labels
from fedjax_ssl.engine.interface import Broadcast, Cohort, Previous, Problem
from fedjax_ssl.models import Outputs
from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.losses import cross_entropy, mean_present
from fedjax_ssl.ops.sgd import Model


def train_views(
    network: Network, model: Model, groups: list[tuple[list[jax.Array], jax.Array]], together: bool = False
) -> tuple[list[Outputs], Model]:
    """Passes views through the network in training mode: the Outputs of each, and the model with its new statistics.

    A group has the views [B, ...] of one batch, which share a pass, and its mask, bool [B]; one without views is
    skipped. With `together` all views share one pass and one set of batch statistics; else each view has its own.
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


class Passed(NamedTuple):
    """Outputs in training mode of the labelled images' weak views and of the unlabelled ones' weak and strong views."""

    labelled: Outputs | None  # None: no client has labels
    weak: Outputs | None  # None: weak views have no training pass
    strong: Outputs
    # Logits of the weak views that may make labels, float32 [B, C], without gradient; XLA removes what is not read.
    by_received: jax.Array  # by the received model
    by_local: jax.Array  # by the model in training
    scores: jax.Array  # one of the two, by `confidence.labels_from`
    labelled_by_received: jax.Array | None  # as `by_received`, of the labelled images
    model: Model  # with its statistics after the passes


def passes(problem: Problem, model: Model, batch: Batches, at: At, label_mode: str = "train") -> Passed:
    """Passes a step's views through the network, labels by `confidence.labels_from`.

    If clients have labels, all views of a step share batch statistics; else each kind has its own. With the
    `label_mode` 'train' the model in training labels with the statistics of the batch, with 'eval' with its own; the
    received model always uses its own.
    """
    network, unlabelled, labels_from = problem.network, batch.unlabelled, problem.config.confidence.labels_from
    together = batch.labelled is not None  # as in reference codes with labels at clients
    weak_key, strong_key, labelled_key = jax.random.split(at.key, 3)
    weak = problem.weak(weak_key, unlabelled.inputs)

    def scores(logits: jax.Array, rows: jax.Array = unlabelled.rows) -> jax.Array:
        return labelling_logits(at, logits, rows)

    # With separate statistics, weak views that the received model labels need no training pass.
    trained = [weak] * (label_mode == "train" and (together or labels_from != "received"))
    groups = [([*trained, problem.strong(strong_key, unlabelled.inputs)], unlabelled.mask)]
    of_labelled = of_weak = known_by_received = None
    by_received = scores(network.predict(at.received.model, weak).logits)
    if batch.labelled:
        known = problem.weak(labelled_key, batch.labelled.inputs)
        known_by_received = scores(network.predict(at.received.model, known).logits, batch.labelled.rows)
        groups.insert(0, ([known], batch.labelled.mask))
    outputs, after = train_views(network, model, groups, together)
    if batch.labelled:
        of_labelled = outputs.pop(0)
    if trained:
        of_weak = outputs.pop(0)
    by_local = scores((of_weak or network.predict(model, weak)).logits)
    chosen = by_received if labels_from == "received" else by_local
    return Passed(of_labelled, of_weak, outputs[0], by_received, by_local, chosen, known_by_received, after)


def total(
    problem: Problem,
    batch: Batches,
    seen: Passed,
    unlabelled_loss: jax.Array,
    weights: jax.Array,
    further: jax.Array | float = 0.0,
) -> Loss:
    """L = H(y, f(a(x))) + lambda_u L_u + a further term, float32 [] each, and the share of confident images.

    These are the unlabelled ones with a weight, float32 [B], above 0; `seen` is what the network made of the batch.
    """
    known, mask = batch.labelled, batch.unlabelled.mask
    metrics = {"unlabelled_loss": unlabelled_loss, "confident_share": mean_present(weights > 0, mask)}
    value = problem.config.consistency.unlabelled_weight * unlabelled_loss + further
    if known:
        metrics["labelled_loss"] = cross_entropy(seen.labelled.logits, known.labels, known.mask)
        value = metrics["labelled_loss"] + value
    return Loss(value, seen.model.batch_stats, {**metrics, "client_loss": value})


def both_kinds(problem: Problem) -> tuple[MakePlan, dict[str, int]]:
    """(plan, sizes) for `local_training`: epochs over unlabelled examples, and beside them over labelled ones.

    With `consistency.include_labelled` the labelled examples are among the unlabelled ones, too. If no client can have
    labels, there is no labelled batch.
    """
    config, options, where = problem.config.client, problem.config.consistency, problem.config.data
    sizes = {"unlabelled": options.unlabelled_ratio * config.batch_size, "labelled": config.batch_size}
    with_labels = clients_may_have_labels(where) or where.reveal_labels or where.centralised
    fixed_length = options.epoch_length == "unlabelled"

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples = Examples.of(data, cohort)
        included = examples.present if options.include_labelled else examples.unlabelled
        passes = config.epochs * (options.unlabelled_ratio if fixed_length else 1)
        decks = {"unlabelled": Deck.shuffled(examples, included, examples.keys, passes)}
        if with_labels:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(examples.keys)
            decks["labelled"] = Deck.shuffled(examples, examples.labelled, keys, config.epochs)
        # The shorter deck repeats.
        steps = jnp.max(jnp.stack([deck.num_steps(sizes[name]) for name, deck in decks.items()]), axis=0)
        if fixed_length:
            size = decks["unlabelled"].size
            length = jnp.maximum(size // config.batch_size, 1)  # our choice: a small client takes one step
            steps = jnp.where(size > 0, config.epochs * length, steps)
        return Plan(decks, steps)

    return plan, sizes


def check_both_label(problem: Problem, name: str) -> None:
    """Raises a UserError if a method that labels by two models is to label by the received one only."""
    if problem.config.confidence.labels_from == "received":
        raise UserError(f"confidence.labels_from='received' is for a method that labels by one model; {name} has both")
