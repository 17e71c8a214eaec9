"""A mean teacher at each client: the student is held near the average of its own past, on unlabelled images.

Tarvainen and Valpola, "Mean teachers are better role models", NeurIPS 2017 (arXiv 1703.01780), as RSCFed has it: the
teacher is the client's own, begins as the first model that it receives, and is never reset, while the student begins
each time with the received model.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.client.by_role import jobs_without_labels, unlabelled_phase
from fedjax_ssl.client.deck import Batch
from fedjax_ssl.client.local_sgd import At, Hooks, Loss
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Broadcast, Phase, Problem
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import repeated

TEACHER, STEPS = "teacher", "teacher_steps"  # a client's memory
STATISTICS = ("first", "received", "averaged")  # of a teacher's normalisation
DIVISORS = ("present", "batch_size")  # of the square errors of a batch


def own_teachers(data: FederatedData, model: Model) -> dict[str, Any]:
    """The entries of `State.clients`, leaves [K, ...]: a whole model for each client, and the steps of its teacher."""
    number = len(data.ids)
    return {TEACHER: repeated(model, number), STEPS: jnp.zeros(number, jnp.int32)}


def mean_teacher_phase(
    problem: Problem,
    weight: Callable[[Broadcast], jax.Array | float],
    *,
    temperature: float,
    decay: float,
    statistics: str = "first",
    loss_over: str = "present",
) -> Phase:
    """`client.epochs` passes over a client's unlabelled images: weight sum_i |p(x_i'') - q(x_i')|^2 / B.

    p is the student's prediction of one weak view, q = p_T^(1/T) / sum_c p_T^(1/T) the teacher's of another, in
    evaluation mode. After its step t, from 0 and over all rounds, the teacher is a times itself and 1 - a times the
    student, a = min(1 - 1 / (t + 1), decay): the first step makes it the student.

    Args:
        problem: the run.
        weight: received -> the weight in this round.
        temperature: T.
        decay: of the average, at the most.
        statistics: of the teacher's normalisation: of the 'first' model that the client received; of the one that it
            has 'received' in this round; or 'averaged' as the parameters are.
        loss_over: B, the images that are 'present' in the batch, or the 'batch_size' for a short one, too.

    Returns:
        A phase behind `labelled_phase`; its metric is `unlabelled_loss`, its memory that of `own_teachers`.
    """
    config, network = problem.config.client, problem.network

    def loss(model: Model, batch: Batch, at: At) -> Loss:
        images, (first_key, second_key) = batch.inputs, jax.random.split(at.key)
        is_first = at.own[STEPS] == 0
        teacher = jax.tree.map(lambda new, old: jnp.where(is_first, new, old), at.received.model, at.own[TEACHER])
        if statistics == "received":
            teacher = teacher._replace(batch_stats=at.received.model.batch_stats)
        logits = network.predict(teacher, problem.weak(first_key, images)).logits
        targets = jax.nn.softmax(jax.nn.log_softmax(logits) / temperature)
        views = problem.weak(second_key, images)
        size = jnp.maximum(jnp.sum(batch.mask), 1) if loss_over == "present" else config.batch_size

        (outputs,), batch_stats = network.train(model, (views,), batch.mask)
        errors = jnp.sum(jnp.square(jax.nn.softmax(outputs.logits) - targets), axis=-1)
        value = weight(at.received) * jnp.sum(jnp.where(batch.mask, errors, 0.0)) / size
        return Loss(value, batch_stats, {"unlabelled_loss": value}, aux=teacher)

    def remember(own, model: Model, teacher: Model, step) -> dict[str, Any]:
        del step
        share = jnp.minimum(1 - 1 / (own[STEPS] + 1), decay)
        average = jax.tree.map(lambda old, new: share * old + (1 - share) * new, teacher, model)
        if statistics != "averaged":
            average = average._replace(batch_stats=teacher.batch_stats)
        return {TEACHER: average, STEPS: own[STEPS] + 1}

    return unlabelled_phase(problem, jobs_without_labels(problem), loss, hooks=Hooks(remember=remember))
