"""Cohorts of a draw in turns: who remembers what, and what arrives."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data import stack_seeds
from fedjax_ssl.engine.dispatch import over_seeds
from fedjax_ssl.engine.interface import Labels, Report
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.ops.sgd import Model
from tests.helpers.runs import ROOT
from tests.helpers.toy_federation import (
    CLIENTS,
    DRAWS,
    TRUTH,
    TURNS,
    arrivals,
    failing_round,
    federation,
    memories,
    problem,
    run,
    toy_method,
    toy_state,
)

SIZES = np.array([len(rows) for rows in CLIENTS])


def memories_by_hand(turns):
    """Of a client's rows in a turn the last one counts, and for what its steps changed the last accepted one.

    Each turn starts with the memory that the one before left.
    """
    found = []
    for draw, fails in DRAWS:
        labelled, trained = (100 * np.arange(5) for _ in range(2))
        for turn in np.split(np.arange(len(draw)), turns):
            old_labelled, old_trained = labelled.copy(), trained.copy()
            for row, number in enumerate(turn):
                client = draw[number]
                labelled[client] = old_labelled[client] + 1 + row
                if SIZES[client] and not fails[number]:
                    trained[client] = old_trained[client] + SIZES[client] * (10 + row)
        found.append({"trained": trained.tolist(), "labelled": labelled.tolist()})
    return found


@pytest.mark.test_all
def test_the_last_accepted_row_of_a_client_counts():
    """On one device, and on four between which the rows are dealt out, longest first; in one turn and in several."""
    expected = [memories_by_hand(turns) for turns in (1, TURNS)]
    assert len({str(one["trained"]) for one in expected[0]}) == 3  # three rows, in turn the last accepted
    for turns, by_hand in zip((1, TURNS), expected):
        assert memories(jax.jit(make_round(problem(), toy_method(turns), lanes=2))) == by_hand
    expected.append(arrivals(failing_round()))  # of one device, which test_delivery.py tests
    values = [number for of_draw in expected[-1] for _, number in of_draw]
    assert max(values) < 0 < len(values) < sum(len(draw) for draw, _ in DRAWS)
    command = [sys.executable, "-m", "tests.helpers.toy_federation", "4"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


@pytest.mark.test_all
def test_all_turns_start_from_one_broadcast_and_arrive_together():
    """Jitted, as a plain loop, and for two seeds in one program; rows are in the order of the draw."""

    def label(received, data, cohort, previous):
        """Labels that depend on what a seed has of its own: its model, and its number."""
        told = data.rows_of(cohort.clients) // received.model.params["classifier"].astype(int) + data.seed
        return Labels(Report(told % 2, told % 3 == 0))

    draw, fails = [4, 2, 0, 4, 1, 4], [False, False, True, False, False, True]
    method = toy_method(turns=2, label=label)
    round_fn = make_round(problem(), method, lanes=2)
    state, result = run(jax.jit(round_fn), draw, fails)
    received = state.server["received"]
    np.testing.assert_array_equal(received["clients"], draw)
    np.testing.assert_array_equal(received["group"], [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(received["accepted"], np.logical_not(fails))
    sent = np.where(fails, np.nan, 1 + SIZES[draw] * (1 + np.array(draw)))
    np.testing.assert_array_equal(received["uploads"].model.params["classifier"], sent)
    assert (result.metrics["uploads"], result.metrics["dropped_uploads"]) == (6, 2)
    assert result.metrics["local_steps"] == SIZES[draw].sum()
    # Two lanes: 3, 3 and then 2 steps in the first turn, 3, 3 and then 1 in the second.
    assert result.lane_steps == 2 * (3 + 2) + 2 * (3 + 1)

    one = toy_state(draw=jnp.array(draw), fails=jnp.array(fails))
    other = one._replace(model=Model({"classifier": jnp.float32(7)}, {}))
    data = [federation(), federation(seed=6)]
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, other)
    together, of_both = jax.jit(over_seeds(round_fn))(both, stack_seeds(data), jnp.array(TRUTH))
    alone_fn = jax.jit(round_fn)
    alone, of_each = zip(*(alone_fn(state, of_seed, jnp.array(TRUTH)) for state, of_seed in zip((one, other), data)))
    jax.tree.map(np.testing.assert_array_equal, together, jax.tree.map(lambda *leaves: np.stack(leaves), *alone))
    for name in ("local_steps", "uploads", "test_accuracy", "pseudo_label_accuracy", "qualified_share"):
        np.testing.assert_array_equal(of_both.metrics[name], [result.metrics[name] for result in of_each])
    assert len(set(of_both.metrics["pseudo_label_accuracy"].tolist())) == 2
    # One queue for both seeds: 16 jobs' steps in two lanes, which wait less for one another than in two queues.
    assert of_both.lane_steps[0] <= sum(result.lane_steps for result in of_each)
