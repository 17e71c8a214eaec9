"""The engine: lanes against a plain Python loop, on a toy problem and on a real round of FedAnchor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.interface import Cohort, Finished, Jobs, Phase

NUM_STEPS = np.array([3, 0, 7, 1, 7, 0, 2, 5, 4, 1])
TARGETS = np.arange(10.0) - 3


def toy_phase(record_previous=False):
    """Each client walks from the broadcast towards its target, with a little noise of its own."""

    def prepare(broadcast, data, cohort, previous):
        start = jnp.zeros(10) if previous is None else previous.upload["x"]
        work = {"target": jnp.array(TARGETS)[cohort.clients], "start": start}
        return Jobs(jnp.array(NUM_STEPS)[cohort.clients], work, report=(), kept={"seen": cohort.states + 1})

    def start(broadcast, work, state):
        return {"x": broadcast + work["start"], "visits": state}

    def step(broadcast, data, work, carry, index, key):
        x = carry["x"] + 0.1 * (work["target"] - carry["x"]) * (1 + index) + 0.01 * jax.random.normal(key)
        return {"x": x, "visits": carry["visits"] + 1}

    def finish(broadcast, work, carry, num_steps):
        return Finished({"x": carry["x"]}, carry["visits"], {"steps": num_steps.astype(jnp.float32)})

    return Phase(prepare, start, step, finish)


def by_hand(clients, key, broadcast):
    """The same federation as nested Python loops over NumPy numbers."""
    uploads = []
    phase_key = jax.random.fold_in(key, 0)
    for client in clients:
        client_key = jax.random.fold_in(phase_key, client)
        x = broadcast
        for index in range(NUM_STEPS[client]):
            noise = float(jax.random.normal(jax.random.fold_in(client_key, index)))
            x = x + 0.1 * (TARGETS[client] - x) * (1 + index) + 0.01 * noise
        uploads.append(x if NUM_STEPS[client] else 0.0)
    return np.array(uploads)


@pytest.mark.parametrize("lanes", [1, 3, 4, 10, 50])
def test_lanes_equal_nested_loops(lanes):
    clients = jnp.array([4, 2, 9, 0, 1, 3, 5, 8, 7, 6])
    cohort = Cohort(clients, jnp.arange(10), jax.random.key(3))
    run = jax.jit(lambda broadcast: train_cohort((toy_phase(),), broadcast, None, cohort, lanes))
    result = run(2.0)
    np.testing.assert_allclose(result.finished.upload["x"], by_hand(np.asarray(clients), cohort.key, 2.0), atol=1e-5)
    steps = NUM_STEPS[np.asarray(clients)]
    np.testing.assert_array_equal(result.took_part, steps > 0)
    np.testing.assert_array_equal(result.finished.state, np.where(steps > 0, np.arange(10) + steps, 0))
    np.testing.assert_array_equal(result.kept["seen"], np.arange(10) + 1)  # with or without a step


def test_phases_follow_each_other():
    cohort = Cohort(jnp.arange(10), jnp.zeros(10, jnp.int32), jax.random.key(0))
    once = jax.jit(lambda b: train_cohort((toy_phase(),), b, None, cohort, 3))(1.0)
    twice = jax.jit(lambda b: train_cohort((toy_phase(), toy_phase()), b, None, cohort, 3))(1.0)
    looped = train_cohort((toy_phase(), toy_phase()), 1.0, None, cohort, 3, debug=True)
    assert len(twice.reports) == 2
    moved = NUM_STEPS > 1
    assert np.all(np.abs(twice.finished.upload["x"] - once.finished.upload["x"])[moved] > 1e-3)
    np.testing.assert_allclose(twice.finished.upload["x"], looped.finished.upload["x"], atol=1e-5)


def test_nobody_takes_part():
    phase = toy_phase()
    empty = phase._replace(prepare=lambda *a: phase.prepare(*a)._replace(num_steps=jnp.zeros(10, jnp.int32)))
    cohort = Cohort(jnp.arange(10), jnp.zeros(10, jnp.int32), jax.random.key(0))
    result = jax.jit(lambda b: train_cohort((empty,), b, None, cohort, 4))(1.0)
    assert not np.any(result.took_part)
    assert np.all(np.asarray(result.finished.upload["x"]) == 0)


def test_the_debug_loop_names_the_client():
    def step(broadcast, data, work, carry, index, key):
        raise ZeroDivisionError("deep inside a loss")

    cohort = Cohort(jnp.array([6, 2]), jnp.zeros(2, jnp.int32), jax.random.key(0))
    phase = toy_phase()._replace(step=step)
    phase = phase._replace(
        prepare=lambda *a: Jobs(jnp.array([1, 1]), {"target": jnp.ones(2), "start": jnp.ones(2)}, ())
    )
    with pytest.raises(ZeroDivisionError) as caught:
        train_cohort((phase,), 0.0, None, cohort, 1, debug=True)
    assert "while training client 6" in caught.value.__notes__


def test_a_round_of_fedanchor_in_lanes_equals_the_plain_loop(choosy_experiment):
    experiment, state = choosy_experiment
    data, method = experiment.data, experiment.method
    broadcast = jax.jit(method.broadcast)(state, data)
    cohort = Cohort(jnp.array([5, 0, 3, 6]), (), jax.random.key(7))
    # Its labels come from a compiled program as well; the steps are what is compared.
    labelled_at_once = [phase._replace(prepare=jax.jit(phase.prepare)) for phase in method.phases]
    loop = train_cohort(labelled_at_once, broadcast, data, cohort, 1, debug=True)
    # Different numbers of qualified examples: the case that lanes are for.
    assert len(set(np.asarray(loop.num_steps).tolist())) > 1, loop.num_steps
    for lanes in (1, 3):  # all four at once is one more case of several, which test_lanes_equal_nested_loops has
        result = jax.jit(lambda b, d, n=lanes: train_cohort(method.phases, b, d, cohort, n))(broadcast, data)
        np.testing.assert_array_equal(result.num_steps, loop.num_steps)
        for mine, reference in zip(jax.tree.leaves(result.finished), jax.tree.leaves(loop.finished)):
            np.testing.assert_allclose(mine, reference, atol=1e-4)
