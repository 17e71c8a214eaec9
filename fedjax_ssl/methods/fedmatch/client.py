"""Disjoint learning at a client (FedMatch): in each step a labelled batch trains sigma, then an unlabelled one psi."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.client import At, Batches, Examples, Loss, LossFunction, Plan, local_training
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Broadcast, Cohort, Phase, Previous, Problem
from fedjax_ssl.methods.fedmatch.paired_batches import PairedDecks, cut, largest_batch, pair_decks, whole_batches
from fedjax_ssl.methods.fedmatch.phases import PSI, SIGMA, in_turn, merged, with_plateau
from fedjax_ssl.ops.losses import kl_divergence
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import zeros_unless

SIGMA_OPTIMIZER = "sigma_optimizer"  # in a client's memory; psi's optimizer has the usual entry


def disjoint_phase(
    problem: Problem, parts: tuple[str, ...], labelled_loss: LossFunction, unlabelled_loss: LossFunction
) -> Phase:
    """A phase of `client.epochs`. In each step `labelled_loss` trains sigma, then `unlabelled_loss` trains psi.

    The parts are SIGMA and PSI; or only PSI if no client has labels. The learning rate follows a client's metric
    `labelled_loss`, or `client_loss` if it has no labels.
    """
    config, options, with_labels = problem.config.client, problem.config.fedmatch, SIGMA in parts

    def room_of(data: FederatedData) -> int:
        """The length of an unlabelled batch's arrays; it depends on shapes only."""
        return largest_batch(problem, data.width) if with_labels else config.batch_size

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples = Examples.of(data, cohort)
        work = pair_decks(problem, examples, room_of(data), with_labels)._replace(personal=cohort.personal)
        num_steps = jnp.where(jnp.any(examples.present, axis=1), config.epochs * work.batches, 0)
        return Plan({}, num_steps, work)

    # A client has its own batch sizes, so its steps cut their batches themselves.
    def labelled_step(model: Model, batch: Batches, at: At) -> Loss:
        deck, size = at.work.labelled, config.batch_size
        labelled = cut(deck, at.step, whole_batches(deck.size, size), size, size)
        return labelled_loss(model, Batches(labelled=labelled.read(at.data)), at)

    def unlabelled_step(model: Model, batch: Batches, at: At) -> Loss:
        work: PairedDecks = at.work
        unlabelled = cut(work.unlabelled, at.step, work.batches, work.size, room_of(at.data))
        return unlabelled_loss(model, Batches(unlabelled=unlabelled.read(at.data)), at)

    def watched(work: Plan, of_visit) -> jax.Array:
        labelled = work.work.labelled
        if labelled is None:
            return of_visit["client_loss"]
        return jnp.where(labelled.size > 0, of_visit["labelled_loss"], of_visit["client_loss"])

    phases = [local_training(problem, plan, unlabelled_step, {}, parts=(PSI,))]
    if with_labels:
        phases = [local_training(problem, plan, labelled_step, {}, parts=(SIGMA,), memory=SIGMA_OPTIMIZER), *phases]
    phase = in_turn(*phases)
    return with_plateau(phase, watched, options.patience) if options.patience else phase


def helper_logits(problem: Problem, received: Broadcast, personal: Mapping[str, Any], images: jax.Array):
    """Logits of a client's helpers, theta = the received sigma + their psi, in evaluation mode; and which are present.

    `personal` has "helpers", their psi, leaves [H, ...], and "present", bool [H]; both are missing if there are none.
    Logits are float32 [H, B, C], 0 in rounds without helpers.
    """
    present = personal.get("present", jnp.zeros(0, bool))
    if not len(present):
        return jnp.zeros((0, len(images), problem.num_classes)), present
    sigma, batch_stats = received.model.params[SIGMA], received.model.batch_stats

    def logits(psi):
        return problem.network.predict(merged(Model({SIGMA: sigma, PSI: psi}, batch_stats)), images).logits

    return zeros_unless(received.extra, lambda: jax.lax.map(logits, personal["helpers"])), present


def inter_client_consistency(
    helpers: jax.Array, present: jax.Array, logits: jax.Array, confident: jax.Array
) -> jax.Array:
    """1/H sum_j KL(p_j || p), the mean over confident images, bool [B] (FedMatch): float32 [].

    The helpers' logits, float32 [H, B, C], have no gradient; the mean is over those that are present, bool [H], and 0
    without any. The client's own logits are float32 [B, C].
    """
    each = [kl_divergence(of_helper, logits, confident) * here for of_helper, here in zip(helpers, present)]
    return sum(each, start=jnp.float32(0.0)) / jnp.maximum(jnp.sum(present), 1)


def agreed_labels(guess: jax.Array, helpers: jax.Array, present: jax.Array) -> jax.Array:
    """The class with the most votes of the client's model and its helpers, int32 [B]; in a tie the lowest class.

    The guess is the client's predictions, int32 [B], helpers as in `inter_client_consistency`.
    """
    votes = jax.nn.one_hot(jnp.argmax(helpers, axis=-1), helpers.shape[-1]) * present[:, None, None]
    return jnp.argmax(jax.nn.one_hot(guess, helpers.shape[-1]) + jnp.sum(votes, axis=0), axis=-1).astype(jnp.int32)
