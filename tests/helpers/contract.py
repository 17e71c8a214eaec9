"""What compiled rounds of every method must do: train, the same way each time, blind to hidden labels.

tests/official checks it of each method in the rounds that it compares, tests/methods/test_methods.py of the others.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import numpy as np

from fedjax_ssl.data import FederatedData
from fedjax_ssl.engine.interface import Method, Problem, State
from fedjax_ssl.engine.round import RoundResult


class Rounds(NamedTuple):
    """Rounds of a method, from the first.

    Attributes:
        first_fn: data -> the first state, compiled.
        round_fn: the compiled round.
        states: before the first round, and after each.
        results: of each round.
        rests: the rounds, from 1, in which something rests: a metric is NaN that has a value in others.
    """

    problem: Problem
    method: Method
    first_fn: Callable[..., State]
    round_fn: Callable[..., tuple[State, RoundResult]]
    data: FederatedData
    hidden_labels: Any
    states: list[State]
    results: list[RoundResult]
    rests: Sequence[int]


def check_training(rounds: Rounds) -> None:
    """The rounds train and stay finite, and no upload is dropped."""
    first, last = rounds.states[0], rounds.states[-1]
    assert [int(state.round) for state in rounds.states] == list(range(len(rounds.states)))
    chex.assert_tree_all_finite((last.model, last.clients))
    moved = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), first.model.params, last.model.params)
    assert all(change > 0 for change in jax.tree.leaves(moved)), moved
    missing = []
    for result in rounds.results:
        assert result.healthy and result.metrics["dropped_uploads"] == 0
        assert (result.metrics["uploads"] > 0) == bool(rounds.method.phases)
        absent = {name for name, value in result.metrics.items() if not np.isfinite(value).any()}
        nobody = result.metrics.get("qualified_per_client") == 0  # no label to score
        missing.append(absent - {"qualified_accuracy"} if nobody else absent)
    resting = [number for number, names in enumerate(missing, start=1) if names]
    assert resting == list(rounds.rests), missing
    assert not set.intersection(*missing)  # what rests in one round works in another


def check_hidden_labels(rounds: Rounds) -> None:
    """With other hidden labels, of which none is right any more, each round gives the same state to the bit."""
    others = (rounds.hidden_labels + 1) % rounds.problem.num_classes
    state = rounds.states[0]
    for expected, result in zip(rounds.states[1:], rounds.results):
        state, blind = rounds.round_fn(state, rounds.data, others)
        chex.assert_trees_all_equal(state, expected)
        for name, value in result.metrics.items():
            scored = name.startswith(("pseudo_label_accuracy", "qualified_accuracy"))
            assert scored or np.array_equal(value, blind.metrics[name], equal_nan=True), name


def check_labels_elsewhere(rounds: Rounds, data: FederatedData) -> None:
    """The same programs train with any shares of labels: which clients have labels, and how many, is data."""
    state = rounds.first_fn(data)
    for _ in range(2):
        state, result = rounds.round_fn(state, data, rounds.hidden_labels)
        chex.assert_tree_all_finite((state.model, state.clients))
        assert result.healthy and result.metrics["uploads"] > 0 and result.metrics["dropped_uploads"] == 0
