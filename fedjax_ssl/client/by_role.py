"""Training by role: a phase on a client's labelled images, then one on its unlabelled images.

A client takes steps in a phase if it has images of that kind, and a lane never computes the loss of the other kind. A
client with only labelled images keeps its model through the second phase; a client with both kinds trains on one after
the other. Each client sends one upload, with its number of labelled examples.
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

LABELLED = "labelled"  # metadata of every upload: the number of the client's labelled examples, float32 []


class ByRoleWork(NamedTuple):
    """What one client trains on in the unlabelled phase."""

    deck: Deck  # its unlabelled examples
    rest: Any  # the work that the method prepared, with the same deck
    begin: Model  # the client's model after the labelled phase; the received model if it has no labels
    labelled: jax.Array  # float32 [], number of the client's labelled examples


def labelled_phase(problem: Problem, loss: LossFunction | None = None, parts: tuple[str, ...] = CLASSIFIER) -> Phase:
    """Makes the phase of `client.epochs` passes over a client's labelled images; the next phase gets the model.

    Args:
        problem: the run's `Problem`. `client.logit_adjustment` and `client.labelled_views` apply to the loss.
        loss: the loss of one step, which reads work of type `OnLabels`; None: cross-entropy.
        parts: the trained parts of the model.
    """
    loss = loss or loss_on_labels(problem, "labelled_loss")
    return local_sgd(problem, jobs_on_labels(problem), loss, parts, hooks=Hooks(handed_on=True))


def jobs_without_labels(problem: Problem) -> Prepare:
    """A `prepare` for `unlabelled_phase`: `client.epochs` passes over a client's unlabelled images.

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
    """Makes the phase after `labelled_phase`: it trains on unlabelled images and makes the upload of both phases.

    Its learning rate and clipping are `client.unlabelled_learning_rate` and `client.unlabelled_clip_norm`. Both phases
    share a persistent optimizer.

    Args:
        problem: the run's `Problem`.
        prepare: makes the work, with a `Deck` of unlabelled examples in its field `deck`.
        loss, parts, hooks: as for `local_sgd`; `loss` and `hooks.metadata` get the work of `prepare`. Training
            continues from the labelled phase, so `hooks.begin` is ignored.

    Returns:
        The Phase. Every upload has the metadata `LABELLED`.
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
    """Sets the learning rate of a phase to `client.unlabelled_learning_rate`, with the schedule of the broadcast."""
    factor = unlabelled_problem(problem).config.client.learning_rate / problem.config.client.learning_rate

    def at_own_rate(received: Broadcast) -> Broadcast:
        return received._replace(learning_rate=received.learning_rate * factor)

    return phase._replace(
        start=lambda received, *rest: phase.start(at_own_rate(received), *rest),
        step=lambda received, *rest: phase.step(at_own_rate(received), *rest),
    )


def unlabelled_problem(problem: Problem) -> Problem:
    """The problem of the unlabelled phase, with its learning rate and clipping in `config.client`."""
    config = problem.config.copy_and_resolve_references()
    if config.client.unlabelled_learning_rate is not None:
        config.client.learning_rate = config.client.unlabelled_learning_rate
    if config.client.unlabelled_clip_norm is not None:
        config.client.clip_norm = config.client.unlabelled_clip_norm
    return problem._replace(config=config)
