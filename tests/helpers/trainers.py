"""The local trainers as the tests call them: of a rule of confidence, and of ACR, batch by batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client import acr
from fedjax_ssl.client.confidence import make_confidence, threshold_of
from fedjax_ssl.client.deck import Batch
from fedjax_ssl.models import Outputs


class Seen(NamedTuple):
    """What a trainer sees of a batch."""

    outputs: Outputs
    batch: Batch
    size: Any
    prior: Any = None


class Trainer(NamedTuple):
    """`targets(state, seen)` returns a target of each classifier and the state after the batch."""

    init: Callable
    targets: Callable
    further: Callable | None = None
    heads: tuple = ()


def make_trainer(problem):
    """The trainer of `config.confidence`."""
    if problem.config.confidence.kind == "acr":
        targets_of = acr.targets(problem)

        def targets(state, seen):
            *targets, after = targets_of(state, seen.outputs, seen.batch.mask, seen.prior)
            return tuple(targets), after

        first = acr.first_estimate(problem)
        return Trainer(lambda n_max: first, targets, heads=(acr.STANDARD,))
    rule = make_confidence(problem, threshold_of(problem))

    def by_rule(state, seen):
        logits, batch = seen.outputs.logits, seen.batch
        weights, after = rule.step(state, jax.nn.softmax(logits), batch.mask, batch.positions, seen.size)
        return (acr.Target(jnp.argmax(logits, axis=-1).astype(jnp.int32), weights),), after

    return Trainer(rule.init, by_rule, rule.regulariser)
