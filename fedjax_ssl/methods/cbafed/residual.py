"""A residual connection over time: every few epochs a model is averaged with an earlier one (CBAFed).

`with_residual` is of a client's epochs, `residual_over_rounds` of the global model's rounds.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Broadcast, Finished, Phase, Received, State
from fedjax_ssl.learning.batches import num_batches
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import where
from fedjax_ssl.server.aggregation import Flow, Link


def drawn_back(
    model: Any, record: Any, epoch: jax.Array, weight: jax.Array | float, every: int, is_over: jax.Array | bool = True
) -> tuple[Any, Any]:
    """The model and the record behind epoch e: (weight record + model) / (weight + 1) if `every` divides e > 0.

    Args:
        model, record: pytrees of the same form, statistics of normalisation included.
        epoch: int32 [], e.
        weight: of the record against the model's 1.
        every: epochs from one such mean to the next.
        is_over: bool [], whether the epoch is; else nothing changes.
    """
    is_due = is_over & (epoch > 0) & (epoch % every == 0)
    mean = jax.tree.map(lambda old, new: (weight * old + new) / (weight + 1), record, model)
    return where(is_due, mean, model), where(is_due, mean, record)


class Recorded(NamedTuple):
    """The state of a local training loop, and its record."""

    training: Any
    record: Model


def with_residual(phase: Phase, batch_size: int, weight: float, every: int) -> Phase:
    """A phase of `local_sgd`, drawn back behind the epochs that `every` divides; the record is that behind epoch 0.

    Training goes on from the mean, with the optimiser as it is.

    Args:
        phase: whose work has a `deck`.
        batch_size: of its batches.
        weight: of the record against the model's 1.
        every: epochs.
    """

    def start(received: Broadcast, data: FederatedData, work, own) -> Recorded:
        training = phase.start(received, data, work, own)
        return Recorded(training, training.learner.model)

    def step(received: Broadcast, data: FederatedData, work, carry: Recorded, index, key) -> Recorded:
        training = phase.step(received, data, work, carry.training, index, key)
        done, steps = jnp.divmod(index + 1, jnp.maximum(num_batches(work.deck.size, batch_size), 1))
        model, record = drawn_back(training.learner.model, carry.record, done - 1, weight, every, steps == 0)
        record = where((steps == 0) & (done == 1), model, record)
        return Recorded(training._replace(learner=training.learner._replace(model=model)), record)

    def finish(received: Broadcast, work, carry: Recorded, num_steps) -> Finished:
        return phase.finish(received, work, carry.training, num_steps)

    return phase._replace(start=start, step=step, finish=finish)


RECORD = "record"  # the entry of `State.server`: trained parts of a model, which the method puts there


def residual_over_rounds(first_rounds: int, first_weight: float, weight: float, every: int) -> Link:
    """Draws the mean back to a record behind the rounds that `every` divides, counted anew in a second stage.

    The record of the first stage is the model behind its first round, that of the second stage its first model.

    Args:
        first_rounds: of the first stage.
        first_weight, weight: of the record against the model's 1, in the first stage and in the second.
        every: rounds.
    """

    def apply(flow: Flow, current: Model, state: State, data: FederatedData, received: Received, key) -> Flow:
        in_first = state.round < first_rounds
        number = jnp.where(in_first, state.round, state.round - first_rounds)
        record = where(number == 0, where(in_first, flow.model, current), flow.memory[RECORD])
        weight_now = jnp.where(in_first, first_weight, weight)
        model, record = drawn_back(flow.model, record, number, weight_now, every)
        return flow._replace(model=model, memory={**flow.memory, RECORD: record})

    return Link(apply)
