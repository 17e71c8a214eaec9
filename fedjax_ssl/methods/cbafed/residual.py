"""Residual connections over time: every few epochs a model is averaged with an earlier one (CBAFed).

`with_residual` counts a client's epochs; `residual_over_rounds` counts the global model's rounds.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Broadcast, Finished, Phase
from fedjax_ssl.ops.batches import num_batches
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import where
from fedjax_ssl.server.aggregation import Flow, Given, Link

# The weight of the recorded model at a labelled client (in the first stage: of the global model), and of the global
# model in the second stage. The model after training has the weight 1.
AT_CLIENT, AT_SERVER = 4.0, 1.0


def drawn_back(
    model: Any, record: Any, epoch: jax.Array, weight: jax.Array | float, every: int, is_over: jax.Array | bool = True
) -> tuple[Any, Any]:
    """Model and record after epoch e: both become (weight record + model) / (weight + 1) if `every` divides e > 0.

    Both are pytrees of the same structure, including normalisation statistics. If the epoch is not over, bool [],
    nothing changes.
    """
    is_due = is_over & (epoch > 0) & (epoch % every == 0)
    mean = jax.tree.map(lambda old, new: (weight * old + new) / (weight + 1), record, model)
    return where(is_due, mean, model), where(is_due, mean, record)


class Recorded(NamedTuple):
    """The state of a local training loop, and its record."""

    training: Any
    record: Model


def with_residual(phase: Phase, batch_size: int, every: int) -> Phase:
    """A `labelled_phase` with a residual connection every few epochs; the first record is the model after epoch 0.

    Training continues from the mean; the optimizer state is unchanged.
    """

    def start(received: Broadcast, data: FederatedData, work, own) -> Recorded:
        training = phase.start(received, data, work, own)
        return Recorded(training, training.learner.model)

    def step(received: Broadcast, data: FederatedData, work, carry: Recorded, index, key) -> Recorded:
        training = phase.step(received, data, work, carry.training, index, key)
        done, steps = jnp.divmod(index + 1, jnp.maximum(num_batches(work.decks["labelled"].size, batch_size), 1))
        model, record = drawn_back(training.learner.model, carry.record, done - 1, AT_CLIENT, every, steps == 0)
        record = where((steps == 0) & (done == 1), model, record)
        return Recorded(training._replace(learner=training.learner._replace(model=model)), record)

    def finish(received: Broadcast, work, carry: Recorded, num_steps) -> Finished:
        return phase.finish(received, work, carry.training, num_steps)

    return phase._replace(start=start, step=step, finish=finish)


RECORD = "record"  # the entry of `State.server` with the recorded model's trained parts; the method adds it


def residual_over_rounds(first_rounds: int, every: int) -> Link:
    """Averages the mean model with a record every few rounds; after `first_rounds` the second stage counts anew.

    The record of the first stage is the model after its first round; that of the second stage is its initial model. A
    round without an upload changes neither model nor record.
    """

    def apply(flow: Flow, given: Given) -> Flow:
        in_first = given.state.round < first_rounds
        number = jnp.where(in_first, given.state.round, given.state.round - first_rounds)
        record = where(number == 0, where(in_first, flow.model, given.current), flow.memory[RECORD])
        weight_now = jnp.where(in_first, AT_CLIENT, AT_SERVER)
        model, record = drawn_back(flow.model, record, number, weight_now, every, flow.moved)
        return flow._replace(model=model, memory={**flow.memory, RECORD: record})

    return Link(apply)
