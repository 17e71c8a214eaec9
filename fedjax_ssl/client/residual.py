"""Local training with a residual connection over its epochs, see `fedjax_ssl.learning.residual`."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from fedjax_ssl.engine.interface import Finished, Phase
from fedjax_ssl.learning.batches import num_batches
from fedjax_ssl.learning.residual import drawn_back
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import where


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

    def start(received, work, own) -> Recorded:
        training = phase.start(received, work, own)
        return Recorded(training, training.learner.model)

    def step(received, data, work, carry: Recorded, index, key) -> Recorded:
        training = phase.step(received, data, work, carry.training, index, key)
        done, steps = jnp.divmod(index + 1, jnp.maximum(num_batches(work.deck.size, batch_size), 1))
        model, record = drawn_back(training.learner.model, carry.record, done - 1, weight, every, steps == 0)
        record = where((steps == 0) & (done == 1), model, record)
        return Recorded(training._replace(learner=training.learner._replace(model=model)), record)

    def finish(received, work, carry: Recorded, num_steps) -> Finished:
        return phase.finish(received, work, carry.training, num_steps)

    return phase._replace(start=start, step=step, finish=finish)
