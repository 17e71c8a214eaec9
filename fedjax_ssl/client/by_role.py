"""Training by role: a phase on a client's labelled images, then one on its unlabelled images.

A client takes steps in a phase if it has images of that kind, and a lane never computes the loss of the other kind. A
client with only labelled images keeps its model through the second phase; a client with both kinds trains on one after
the other. Each client sends one upload, with its number of labelled examples.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.client.deck import Deck, Examples
from fedjax_ssl.client.on_labels import labelled_plan, loss_on_labels
from fedjax_ssl.client.steps import After, LossFunction, MakeOptimizer, MakePlan, Plan, local_training
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import CLASSIFIER, Broadcast, Cohort, Phase, Previous, Problem

LABELLED = "labelled"  # metadata of every upload: the number of the client's labelled examples, float32 []


def labelled_phase(
    problem: Problem,
    loss: LossFunction | None = None,
    parts: tuple[str, ...] = CLASSIFIER,
    *,
    plan: MakePlan | None = None,
) -> Phase:
    """Makes the phase of `client.epochs` passes over a client's labelled images; the next phase gets the model.

    `loss` is that of one step on the batch `labelled`, by default cross-entropy with `client.logit_adjustment` and
    `client.labelled_views`; `parts` are trained; `plan` is by default `labelled_plan`.
    """
    loss, sizes = loss or loss_on_labels(problem, "labelled_loss"), {"labelled": problem.config.client.batch_size}
    return local_training(problem, plan or labelled_plan(problem), loss, sizes, parts=parts)


def unlabelled_plan(problem: Problem, warm_up_rounds: int = 0) -> MakePlan:
    """The plan of `client.epochs` passes over a client's unlabelled images, the batch `unlabelled`.

    In the first `warm_up_rounds` there are no steps, so only clients with labels train.
    """
    config = problem.config.client

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples = Examples.of(data, cohort)
        deck = Deck.shuffled(examples, examples.unlabelled, examples.keys, config.epochs)
        steps = deck.num_steps(config.batch_size)
        if warm_up_rounds:
            steps = jnp.where(cohort.round >= warm_up_rounds, steps, 0)
        return Plan({"unlabelled": deck}, steps)

    return plan


def unlabelled_phase(
    problem: Problem,
    loss: LossFunction,
    parts: tuple[str, ...] = CLASSIFIER,
    *,
    plan: MakePlan | None = None,
    after: After | None = None,
    optimizer: MakeOptimizer | None = None,
) -> Phase:
    """Makes the phase after `labelled_phase`: it trains on unlabelled images and makes the upload of both phases.

    Both phases share a persistent optimizer. Every upload has the metadata `LABELLED`. `loss` is that of one step on
    the batch `unlabelled`; the plan is by default `unlabelled_plan`, the optimizer `unlabelled_optimizer`; for parts
    and `after` see `local_training`.
    """
    unlabelled = plan or unlabelled_plan(problem)

    def with_number(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        planned = unlabelled(received, data, cohort, previous)
        number = data.labelled_size[cohort.clients].astype(jnp.float32)
        return planned._replace(tells={LABELLED: number, **planned.tells})

    return local_training(
        problem,
        with_number,
        loss,
        {"unlabelled": problem.config.client.batch_size},
        parts=parts,
        after=after,
        optimizer=optimizer or unlabelled_optimizer(problem),
        continues=True,
    )


def unlabelled_optimizer(problem: Problem) -> MakeOptimizer:
    """The optimizer of the unlabelled phase: `client.unlabelled_learning_rate` and `client.unlabelled_clip_norm`.

    Its learning rate has the schedule of the broadcast's.
    """
    config = problem.config.client
    rate = config.learning_rate if config.unlabelled_learning_rate is None else config.unlabelled_learning_rate
    factor = rate / config.learning_rate

    def optimizer(learning_rate: jax.Array | float) -> optax.GradientTransformation:
        return problem.optimizer(learning_rate * factor, config.unlabelled_clip_norm)

    return optimizer
