"""Clients with labels and clients without: a phase on the labelled images, then one on the unlabelled ones.

A role is data: a client takes steps in a phase for the images that it has of that kind, and a lane never computes the
other role's loss. A client with labels only passes its model through the second phase; a client with both kinds
trains on one after the other. Either way the client sends one upload, which says how many labels it comes from.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client.deck import Deck, Examples, Work
from fedjax_ssl.client.local_sgd import Hooks, LossFunction, local_sgd, trained_models
from fedjax_ssl.client.on_labels import jobs_on_labels, loss_on_labels
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import CLASSIFIER, Broadcast, Cohort, Jobs, Phase, Prepare, Previous, Problem
from fedjax_ssl.learning.sgd import Model

LABELLED = "labelled"  # what every upload tells: the client's labelled examples, float32 []


class ByRoleWork(NamedTuple):
    """What one client trains on in the unlabelled phase."""

    deck: Deck  # its unlabelled examples
    rest: Any  # the work that the method laid out, with the same deck
    begin: Model  # the client's model after the labelled phase; the received one if it has no labels
    labelled: jax.Array  # float32 [], its labelled examples


def labelled_phase(problem: Problem, loss: LossFunction | None = None, parts: tuple[str, ...] = CLASSIFIER) -> Phase:
    """`client.epochs` passes over a client's labelled images; the model goes to the next phase.

    Args:
        problem: the run. `client.logit_adjustment` and `client.labelled_views` are of the loss.
        loss: its work is an `OnLabels`; None: cross-entropy.
        parts: of the model that are trained.
    """
    loss = loss or loss_on_labels(problem, "labelled_loss")
    return local_sgd(problem, jobs_on_labels(problem), loss, parts, hooks=Hooks(handed_on=True))


def jobs_without_labels(problem: Problem) -> Prepare:
    """A `prepare` for `unlabelled_phase`: `client.epochs` passes over a client's unlabelled images, and nothing else.

    Returns:
        The function; its work is a `Work`.
    """
    config = problem.config.client

    def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
        del received, previous
        examples = Examples.of(data, cohort)
        deck = Deck.shuffled(examples, examples.unlabelled, examples.keys, config.epochs)
        return Jobs(deck.num_steps(config.batch_size), Work(deck))

    return prepare


def unlabelled_phase(
    problem: Problem,
    prepare: Prepare,
    loss: LossFunction,
    parts: tuple[str, ...] = CLASSIFIER,
    hooks: Hooks = Hooks(),  # noqa: B008, it cannot change
) -> Phase:
    """The phase behind `labelled_phase`: on a client's unlabelled images, and the upload of both.

    Its learning rate and clipping are `client.unlabelled_learning_rate` and `client.unlabelled_clip_norm`. An optimiser
    that survives rounds is one for both phases.

    Args:
        problem: the run.
        prepare: its work has a `Deck` of unlabelled examples named `deck`.
        loss, parts, hooks: as those of `local_sgd`; `loss` and `hooks.metadata` get the work of `prepare`. Training
            goes on from the labelled phase, so that `hooks.begin` is not read.

    Returns:
        The Phase. Every upload tells `LABELLED`.
    """

    def prepare_both(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
        jobs = prepare(received, data, cohort, previous)
        labelled = data.labelled_size[cohort.clients].astype(jnp.float32)
        work = ByRoleWork(jobs.work.deck, jobs.work, trained_models(received, previous), labelled)
        takes_part = jobs.num_steps > 0 if jobs.takes_part is None else jobs.takes_part
        return jobs._replace(work=work, takes_part=previous.took_part | takes_part)

    def metadata(work, model: Model, totals):
        further = {} if hooks.metadata is None else hooks.metadata(work.rest, model, totals)
        return {LABELLED: work.labelled, **further}

    phase = local_sgd(
        unlabelled_problem(problem),
        prepare_both,
        lambda model, batch, at: loss(model, batch, at._replace(work=at.work.rest)),
        parts,
        hooks=hooks._replace(begin=lambda received, work, own: work.begin, metadata=metadata),
    )
    return at_unlabelled_rate(problem, phase)


def at_unlabelled_rate(problem: Problem, phase: Phase) -> Phase:
    """A phase of `local_sgd` at `client.unlabelled_learning_rate`, on the schedule of the broadcast's rate."""
    factor = unlabelled_problem(problem).config.client.learning_rate / problem.config.client.learning_rate

    def at_own_rate(received: Broadcast) -> Broadcast:
        return received._replace(learning_rate=received.learning_rate * factor)

    return phase._replace(
        start=lambda received, *rest: phase.start(at_own_rate(received), *rest),
        step=lambda received, *rest: phase.step(at_own_rate(received), *rest),
    )


def unlabelled_problem(problem: Problem) -> Problem:
    """The problem of the unlabelled phase: `config.client` with the learning rate and the clipping of that role."""
    config = problem.config.copy_and_resolve_references()
    if config.client.unlabelled_learning_rate is not None:
        config.client.learning_rate = config.client.unlabelled_learning_rate
    if config.client.unlabelled_clip_norm is not None:
        config.client.clip_norm = config.client.unlabelled_clip_norm
    return problem._replace(config=config)
