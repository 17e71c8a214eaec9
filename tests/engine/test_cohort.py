"""A cohort's phases in lanes against nested Python loops over NumPy numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.interface import Cohort, Finished, Jobs, Labels, Phase, Report

FIRST = np.array([3, 0, 7, 1, 7, 0, 2, 5, 4, 1])  # steps of each client in the first phase
SECOND = np.array([2, 2, 0, 0, 3, 0, 1, 5, 0, 4])  # and in the second
NONE = np.zeros(10, int)
TARGETS = np.arange(10.0) - 3
CLIENTS = np.array([4, 2, 9, 0, 1, 3, 5, 8, 7, 6])
BROADCAST = 2.0


def walk(number):
    """Each client walks from where the phase before left it towards its target, with a little noise of its own.

    Of the data, `steps` says how many steps each client has in each phase, and `part` who takes part in the second;
    in the first it is whoever has a step.
    """

    def prepare(broadcast, data, cohort, previous):
        begin = jnp.zeros(len(cohort.clients)) if previous is None else previous.upload["x"]
        work = {"target": jnp.array(TARGETS, jnp.float32)[cohort.clients], "begin": begin}
        own = {"seen": cohort.own["seen"] + 1}
        takes_part = None if number == 0 else data["part"][cohort.clients]
        return Jobs(data["steps"][number][cohort.clients], work, own=own, takes_part=takes_part)

    def start(broadcast, data, work, own):
        return {"x": broadcast + work["begin"], "visits": own["visits"]}

    def step(broadcast, data, work, carry, index, key):
        x = carry["x"] + 0.1 * (work["target"] - carry["x"]) * (1 + index) + 0.01 * jax.random.normal(key)
        return {"x": x, "visits": carry["visits"] + 1}

    def finish(broadcast, work, carry, num_steps):
        own = {"visits": carry["visits"]}
        return Finished({"x": carry["x"]}, own, {f"steps_{number}": num_steps.astype(jnp.float32)})

    return Phase(prepare, start, step, finish)


def by_hand(first, second, takes_part, clients=CLIENTS, groups=None):
    """The same as nested loops: what is uploaded, and the memory of the steps."""
    xs, visits = np.zeros(len(clients)), 10 + np.array(clients)
    for number, (num_steps, part) in enumerate(((first, first > 0), (second, takes_part))):
        phase_key, after = jax.random.fold_in(jax.random.key(3), 2 * number + 1), []
        for row, client in enumerate(clients):
            client_key = jax.random.fold_in(phase_key, client)
            if groups is not None:
                client_key = jax.random.fold_in(client_key, groups[row])
            x, steps = BROADCAST + xs[row], num_steps[client] if part[client] else 0
            for index in range(steps):
                noise = float(jax.random.normal(jax.random.fold_in(client_key, index)))
                x = x + 0.1 * (TARGETS[client] - x) * (1 + index) + 0.01 * noise
            visits[row] += steps
            after.append(x if part[client] else 0.0)
        xs = np.array(after)
    return xs, visits


def cohort_of(clients=CLIENTS, group=None):
    own = {"visits": 10 + jnp.array(clients), "seen": jnp.array(clients)}
    return Cohort(jnp.array(clients), own, jax.random.key(3), group)


@functools.partial(jax.jit, static_argnums=2)
def run(data, cohort, lanes):
    return train_cohort((walk(0), walk(1)), BROADCAST, data, cohort, lanes)


def train(first, second, takes_part, cohort=None, lanes=3):
    data = {"steps": jnp.array([first, second]), "part": jnp.array(takes_part)}
    return run(data, cohort_of() if cohort is None else cohort, lanes)


@pytest.mark.parametrize("lanes", [1, 3, 50])
def test_lanes_equal_nested_loops(lanes):
    """Two phases, in the second of which some take part without a step, and some with steps do not."""
    part = np.arange(10) % 3 > 0
    result = train(FIRST, SECOND, part, lanes=lanes)
    x, visits = by_hand(FIRST, SECOND, part)
    np.testing.assert_allclose(result.upload["x"], x, atol=1e-5)
    np.testing.assert_array_equal(result.memory_of_steps["visits"], visits)
    np.testing.assert_array_equal(result.memory_of_labels["seen"], CLIENTS + 2)  # whoever takes part
    np.testing.assert_array_equal(result.took_part, part[CLIENTS])
    steps = FIRST, np.where(part, SECOND, 0)
    np.testing.assert_array_equal(result.num_steps, sum(steps)[CLIENTS])
    for number, (metrics, whose) in enumerate(result.metrics):
        np.testing.assert_array_equal(whose, steps[number][CLIENTS] > 0)
        np.testing.assert_array_equal(metrics[f"steps_{number}"], steps[number][CLIENTS])
    np.testing.assert_array_equal(result.job, np.arange(10))
    np.testing.assert_array_equal(result.clients, CLIENTS)
    assert result.group is None and result.report is None and np.all(result.present)
    if lanes != 3:  # one lane is never idle; a lane for each client waits in each phase for the longest
        assert result.lane_steps == (sum(map(sum, steps)) if lanes == 1 else 10 * sum(map(max, steps)))


@pytest.mark.parametrize(("first", "part"), [
    (FIRST, np.ones(10, bool)), (FIRST, np.arange(10) % 3 > 0), (FIRST, np.zeros(10, bool)), (NONE, NONE > 0),
])  # fmt: skip
def test_a_phase_without_any_step_makes_the_upload(first, part):
    """Who takes part is finished as it started; who does not sends zeros, and keeps its memory of the first phase."""
    result = train(first, NONE, part)
    x, visits = by_hand(first, NONE, part)
    np.testing.assert_allclose(result.upload["x"], x, atol=1e-5)
    np.testing.assert_array_equal(result.took_part, part[CLIENTS])
    np.testing.assert_array_equal(result.memory_of_steps["visits"], visits)
    np.testing.assert_array_equal(result.memory_of_labels["seen"], CLIENTS + 2)
    np.testing.assert_array_equal(result.num_steps, first[CLIENTS])


def test_keys_are_of_client_and_group():
    """The same client in two groups draws differently; without groups a key is that of the client alone."""
    clients, group, part = np.array([4, 4, 2, 7]), np.array([0, 1, 0, 1]), np.ones(10, bool)
    twice = cohort_of(clients, jnp.array(group))
    result = train(FIRST, SECOND, part, twice)
    x, _ = by_hand(FIRST, SECOND, part, clients, group)
    np.testing.assert_allclose(result.upload["x"], x, atol=1e-5)
    np.testing.assert_array_equal(result.group, group)
    assert 1e-4 < abs(x[0] - x[1]) < 0.2  # by the noise alone
    client_key = jax.random.fold_in(jax.random.key(3), 4)
    keys = jax.random.key_data(twice.keys())
    np.testing.assert_array_equal(keys[1], jax.random.key_data(jax.random.fold_in(client_key, 1)))
    alone = jax.random.key_data(twice._replace(group=None).keys())
    np.testing.assert_array_equal(alone[:2], [jax.random.key_data(client_key)] * 2)


def test_steps_draw_apart_from_preparing():
    """Shuffles and labels split a client's key of `prepare`; its steps fold from another, or would draw the same."""

    def prepare(broadcast, data, cohort, previous):
        split = jax.vmap(lambda key: jax.random.key_data(jax.random.split(key, 4)))(cohort.keys())
        return Jobs(jnp.full(len(cohort.clients), 3), split)

    def step(broadcast, data, work, carry, index, key):
        return carry + jnp.sum(jnp.all(work == jax.random.key_data(key), axis=-1))

    def finish(broadcast, work, carry, num_steps):
        return Finished({"same": carry}, {}, {})

    phase = Phase(prepare, lambda broadcast, data, work, own: jnp.int32(0), step, finish)
    result = jax.jit(lambda cohort: train_cohort((phase, phase), BROADCAST, None, cohort, 2))(cohort_of())
    np.testing.assert_array_equal(result.upload["same"], np.zeros(len(CLIENTS)))
    np.testing.assert_array_equal(result.num_steps, np.full(len(CLIENTS), 6))


@pytest.mark.parametrize("labels", [None, 5])
def test_labels_are_made_before_the_last_phase(labels):
    """The last phase alone gets them, and the cohort reports them."""
    data = {"steps": jnp.zeros((2, 10), int), "part": jnp.zeros(10, bool)}
    got = []

    def label(broadcast, data, cohort, previous):
        assert previous is not None  # the first phase has ended
        return Labels(Report(jnp.full((2, 2), labels), jnp.ones((2, 2), bool)))

    def watched(phase):
        def prepare(broadcast, data, cohort, previous):
            got.append(cohort.labels is not None)
            return phase.prepare(broadcast, data, cohort, previous)

        return phase._replace(prepare=prepare)

    phases, cohort = (watched(walk(0)), watched(walk(1))), cohort_of(CLIENTS[:2])
    made = None if labels is None else label
    report = train_cohort(phases, BROADCAST, data, cohort, 1, label=made).report
    assert (None if report is None else np.unique(report.labels).item()) == labels
    assert got == [False, labels is not None]
