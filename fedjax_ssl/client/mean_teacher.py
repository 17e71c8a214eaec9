"""A mean teacher at each client: on unlabelled images the student's predictions are kept near the teacher's.

Tarvainen and Valpola, "Mean teachers are better role models", NeurIPS 2017 (arXiv 1703.01780), as used in RSCFed. Each
client keeps its own teacher, a moving average of its student. The teacher starts as the first model that the client
receives and is never reset; the student starts each round from the received model.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.client.by_role import unlabelled_phase
from fedjax_ssl.client.steps import At, Batches, Loss
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Phase, Problem
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import repeated

TEACHER, STEPS = "teacher", "teacher_steps"  # entries of a client's memory
STATISTICS = ("first", "received", "averaged")  # sources of a teacher's normalisation statistics
DIVISORS = ("present", "batch_size")  # divisors of a batch's squared errors


def own_teachers(data: FederatedData, model: Model) -> dict[str, Any]:
    """The entries of `State.clients`, leaves [K, ...]: each client's teacher (a whole model) and number of steps."""
    number = len(data.ids)
    return {TEACHER: repeated(model, number), STEPS: jnp.zeros(number, jnp.int32)}


def mean_teacher_phase(
    problem: Problem,
    weight: float,
    *,
    temperature: float,
    decay: float,
    statistics: str = "first",
    loss_over: str = "present",
) -> Phase:
    """Makes the phase of `client.epochs` passes over a client's unlabelled images.

    The loss is weight * sum_i |p(x_i'') - q(x_i')|^2 / B. p is the student's prediction for one weak view.
    q = p_T^(1/T) / sum_c p_T^(1/T) is the teacher's prediction for another weak view, in evaluation mode. After step t
    (from 0, over all rounds) teacher = a * teacher + (1 - a) * student with a = min(1 - 1 / (t + 1), decay). So the
    first step copies the student.

    Args:
        problem: the run's `Problem`.
        weight: of the loss.
        temperature: T.
        decay: the largest decay of the average.
        statistics: the teacher's normalisation statistics: those of the 'first' model that the client received, of the
            model 'received' in this round, or 'averaged' like the parameters.
        loss_over: whether B is the number of images 'present' in the batch, or always 'batch_size'.

    Returns:
        A phase that follows `labelled_phase`. Its metric is `unlabelled_loss`; its memory is that of `own_teachers`.
    """
    config, network = problem.config.client, problem.network

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, mask, (first_key, second_key) = batch.unlabelled.inputs, batch.unlabelled.mask, jax.random.split(at.key)
        is_first = at.own[STEPS] == 0
        teacher = jax.tree.map(lambda new, old: jnp.where(is_first, new, old), at.received.model, at.own[TEACHER])
        if statistics == "received":
            teacher = teacher._replace(batch_stats=at.received.model.batch_stats)
        logits = network.predict(teacher, problem.weak(first_key, images)).logits
        targets = jax.nn.softmax(jax.nn.log_softmax(logits) / temperature)
        views = problem.weak(second_key, images)
        size = jnp.maximum(jnp.sum(mask), 1) if loss_over == "present" else config.batch_size

        (outputs,), batch_stats = network.train(model, (views,), mask)
        errors = jnp.sum(jnp.square(jax.nn.softmax(outputs.logits) - targets), axis=-1)
        value = weight * jnp.sum(jnp.where(mask, errors, 0.0)) / size
        return Loss(value, batch_stats, {"unlabelled_loss": value}, remember={TEACHER: teacher})

    def after(own: Mapping[str, Any], model: Model) -> dict[str, Any]:
        teacher = own[TEACHER]
        share = jnp.minimum(1 - 1 / (own[STEPS] + 1), decay)
        average = jax.tree.map(lambda old, new: share * old + (1 - share) * new, teacher, model)
        if statistics != "averaged":
            average = average._replace(batch_stats=teacher.batch_stats)
        return {TEACHER: average, STEPS: own[STEPS] + 1}

    return unlabelled_phase(problem, loss, after=after)
