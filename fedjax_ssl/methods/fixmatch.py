"""FedAvg+FixMatch: FixMatch at each client, the server's supervised training beside it.

Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence", NeurIPS 2020 (arXiv
2001.07685), as the baseline of SemiFL (its Table 4) and FedAnchor (Tables 1 and 2). What differs from FedAvg:
  1. the pseudo-label of an image is made in the very step that trains on it, by the client's current model;
  2. the strong view of an image is trained towards the label of its weak view where that is confident;
  3. the server trains in alternation (FedAnchor's form), or in parallel from the same global model, and then has half
     the weight in the mean (SemiFL's).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_ssl.client import local_sgd
from fedjax_ssl.client.labels import CohortExamples, score_cohort
from fedjax_ssl.client.local_sgd import GlobalModel, Training
from fedjax_ssl.client.thresholds import class_thresholds, own_thresholds, qualify
from fedjax_ssl.engine.interface import CLASSIFIER, Finished, Jobs, Method, Phase, Problem, Report, unchanged
from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.batches import batch_positions, epoch_orders, num_batches
from fedjax_ssl.learning.losses import fixmatch_loss
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.server.aggregation import make_aggregation
from fedjax_ssl.server.training import SERVER_MODEL, train_server_model, with_server_model

VARIANTS = {"parallel": {"fixmatch.server": "parallel"}}  # SemiFL's Table 4
SERVERS = ("alternate", "parallel")
LABEL_MODES = ("train", "eval")
LOSS_OVER = ("batch", "confident")


def defaults() -> ConfigDict:
    """The section `config.fixmatch`."""
    section = ConfigDict()
    section.threshold = 0.95  # tau; a label counts from it on
    section.server = "alternate"  # or 'parallel'
    # Batch statistics in labelling: 'train', those of the weak batch, in one pass with the strong one, as the reference
    # code does; 'eval', the model's running or static ones.
    section.label_mode = "train"
    # The loss is the mean over the whole 'batch' (FixMatch, eq. 4), or over its 'confident' images (SemiFL's code): the
    # others have no strong view and no part in its batch statistics, and a batch without any is no step.
    section.loss_over = "batch"
    return section


class Work(NamedTuple):
    """What one client trains on: all its examples.

    Attributes:
        rows: int32 [n_max], of the image table.
        size: int32 [], its examples.
        order: int32 [E, n_max], their positions, shuffled for each epoch.
        thresholds: float32 [C], for each class.
    """

    rows: jax.Array
    size: jax.Array
    order: jax.Array
    thresholds: jax.Array


def fixmatch(problem: Problem) -> Method:
    """FedAvg+FixMatch as a Method."""
    options = problem.config.fixmatch
    for field, known in {"server": SERVERS, "label_mode": LABEL_MODES, "loss_over": LOSS_OVER}.items():
        if options[field] not in known:
            raise UserError(f"fixmatch.{field} is {options[field]!r}; known: {', '.join(known)}")
    phases = (_phase(problem),)
    method = alternating(problem, phases, own_states=lambda data: own_thresholds(problem))
    if options.server == "alternate":
        return method

    aggregation = make_aggregation(problem, CLASSIFIER, beside=lambda state: state.server[SERVER_MODEL])
    return method._replace(
        init=lambda data, key: with_server_model(method.init(data, key)),
        server_before=lambda state, data, key: train_server_model(problem, state, data, key),
        aggregate=aggregation.aggregate,
        server_after=unchanged,
    )


def _phase(problem: Problem) -> Phase:
    network, config, options = problem.network, problem.config.client, problem.config.fixmatch
    only_confident = options.loss_over == "confident"
    one_pass = options.label_mode == "train" and not only_confident

    def prepare(broadcast: GlobalModel, data, cohort, previous) -> Jobs:
        del previous
        keys = cohort.keys()
        examples = CohortExamples.of(data, cohort, keys)

        def probabilities(images):
            return network.probabilities(broadcast.model, images)

        # What the received model makes of the client: for the thresholds that adapt, and for the record.
        scores = score_cohort(
            probabilities, data.images, examples, batch_size=problem.config.eval_batch_size, weak=problem.weak
        )
        thresholds, kept = jax.vmap(
            lambda s, t, own: class_thresholds(problem.config.threshold, options.threshold, s, t, own)
        )(scores, examples.there, cohort.states)
        labels, qualified = qualify(scores, thresholds[:, None, :], strictly=False)
        size = jnp.sum(examples.there, axis=1)
        order = jax.vmap(lambda key, there: epoch_orders(key, there, config.epochs))(keys, examples.there)
        work = Work(examples.rows, size, order, thresholds)
        report = Report({"classification_head": labels}, qualified & examples.there)
        return Jobs(config.epochs * num_batches(size, config.batch_size), work, report, kept)

    def start(broadcast, work, states) -> Training:
        del work
        return local_sgd.start(config, broadcast, states, CLASSIFIER, ("client_loss", "confident_share"))

    def step(broadcast, data, work, carry, index, key) -> Training:
        epoch, batch = jnp.divmod(index, num_batches(work.size, config.batch_size))
        positions, mask = batch_positions(batch, config.batch_size, work.size)
        positions = work.order[epoch, jnp.minimum(positions, len(work.rows) - 1)]
        images = data.images[work.rows[positions]]
        weak_key, strong_key = jax.random.split(key)
        weak, strong = problem.weak(weak_key, images), problem.strong(strong_key, images)

        def loss_fn(model):
            batch_stats = model.batch_stats
            if one_pass:
                (of_weak, of_strong), batch_stats = network.train(model, (weak, strong), mask)
            elif options.label_mode == "train":
                (of_weak,), batch_stats = network.train(model, (weak,), mask)
            else:
                of_weak = network.predict(model, weak)
            labels, confident = qualify(jax.nn.softmax(of_weak.logits), work.thresholds, strictly=False)
            counted = mask & confident if only_confident else mask
            if not one_pass:
                (of_strong,), batch_stats = network.train(model._replace(batch_stats=batch_stats), (strong,), counted)
            loss = fixmatch_loss(of_strong.logits, labels, confident, counted)
            share = jnp.sum(confident & mask) / jnp.sum(mask)
            return loss, (batch_stats, {"client_loss": loss, "confident_share": share}, jnp.any(counted))

        after, any_counted = local_sgd.step_and_found(config, broadcast, carry, loss_fn, CLASSIFIER)
        if not only_confident:
            return after
        # Without a gradient there would still be weight decay, and the momentum of earlier steps.
        learner = jax.tree.map(lambda new, old: jnp.where(any_counted, new, old), after.learner, carry.learner)
        return after._replace(learner=learner)

    def finish(broadcast, work, carry, num_steps) -> Finished:
        del broadcast, work
        return local_sgd.finish(problem, carry, {}, num_steps, CLASSIFIER)

    return Phase(prepare, start, step, finish)
