"""A client's mean teacher, a memory of weights that follow the student's in each step and never start again.

(Tarvainen and Valpola, "Mean teachers are better role models", NeurIPS 2017.)
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.client.steps import At
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import moving_average, repeated

TEACHER, STEPS = "teacher", "teacher_steps"  # entries of a client's memory
TEMPERATURE = 0.5  # T of the teacher's probabilities, p^(1/T) / sum p^(1/T)
LARGEST_DECAY = 0.999


def own_teachers(data: FederatedData, model: Model) -> dict[str, Any]:
    """The entries of `State.clients`, leaves [K, ...]: each client's teacher (a whole model) and number of steps."""
    number = len(data.ids)
    return {TEACHER: repeated(model, number), STEPS: jnp.zeros(number, jnp.int32)}


def teacher_of(at: At, statistics: str) -> Model:
    """A client's teacher in a step, the received model in its first one.

    It has the normalisation statistics of the 'first' model that the client received, or of the one 'received' now.
    """
    is_first = at.own[STEPS] == 0
    teacher = jax.tree.map(lambda new, old: jnp.where(is_first, new, old), at.received.model, at.own[TEACHER])
    return teacher if statistics == "first" else teacher._replace(batch_stats=at.received.model.batch_stats)


def sharpened(logits: jax.Array) -> jax.Array:
    """p^(1/T) / sum_c p^(1/T) of each row, float32 [B, C]."""
    return jax.nn.softmax(jax.nn.log_softmax(logits) / TEMPERATURE)


def follow(own: Mapping[str, Any], model: Model, largest_decay: float | None = None) -> dict[str, Any]:
    """The memory after step t (from 0, over all rounds): teacher = a * teacher + (1 - a) * student.

    a is min(1 - 1 / (t + 1), the largest decay; None: `LARGEST_DECAY`), so that the first step copies the student.
    """
    largest_decay = LARGEST_DECAY if largest_decay is None else largest_decay
    teacher, share = own[TEACHER], jnp.minimum(1 - 1 / (own[STEPS] + 1), largest_decay)
    params = moving_average(teacher.params, model.params, share)
    return {TEACHER: teacher._replace(params=params), STEPS: own[STEPS] + 1}
