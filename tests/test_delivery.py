"""Who does not answer and what comes late, by the toy federation: what arrives, what is remembered, what counts."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data import stack_seeds
from fedjax_ssl.engine.delivery import LATE, first_memory
from fedjax_ssl.engine.dispatch import over_seeds
from fedjax_ssl.engine.interface import Draw, Received, State, Upload
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.server import fedavg
from fedjax_ssl.server.aggregation import chain, mean, own_weights
from toy_federation import CLIENTS, TRUTH, federation, problem, run, toy_method, toy_state

DRAW = [4, 2, 0, 1]
SIZES = np.array([len(rows) for rows in CLIENTS])
FULL = 1 + SIZES * (1 + np.arange(5))  # what each client sends of a model that is 1


def failing(seed, **fields):
    """A round of the draw, in which clients fail, with the data's seed."""
    round_fn = jax.jit(make_round(problem(4, **fields), toy_method(), lanes=2))
    return run(round_fn, DRAW, data=federation(seed=seed))


def test_who_does_not_answer_does_nothing():
    """Others train as they would; nothing is remembered of the rest, not even what labelling remembers."""
    answered, number = [], []
    round_fn = jax.jit(make_round(problem(4, **{"availability.never": 0.5}), toy_method(), lanes=2))
    for seed in range(8):
        state, result = run(round_fn, DRAW, data=federation(seed=seed))
        received = state.server["received"]
        came = np.asarray(received["accepted"])
        np.testing.assert_array_equal(received["uploads"].model.params["classifier"], np.where(came, FULL[DRAW], 0))
        np.testing.assert_array_equal(received["sizes"], np.where(came, SIZES[DRAW], 0))
        absent = np.array(DRAW)[~came]
        for name in ("trained", "labelled"):
            np.testing.assert_array_equal(state.clients[name][absent], 100 * absent)
        rows = np.arange(4)[came]
        np.testing.assert_array_equal(
            state.clients["labelled"][np.array(DRAW)[came]], 100 * np.array(DRAW)[came] + 1 + rows
        )
        metrics = result.metrics
        assert metrics["answers"] == metrics["uploads"] == came.sum() and metrics["dropped_uploads"] == 0
        assert metrics["local_steps"] == SIZES[DRAW][came].sum() and result.healthy
        answered.append(tuple(came))
        number.append(came.sum())
        again, _ = run(round_fn, DRAW, data=federation(seed=seed))
        jax.tree.map(np.testing.assert_array_equal, again, state)
    assert len(set(answered)) > 3 and 8 < sum(number) < 24  # of 32

    two = over_seeds(make_round(problem(4, **{"availability.never": 0.5}), toy_method(), lanes=2))
    one = toy_state(draw=jnp.array(DRAW, jnp.int32), fails=jnp.zeros(4, bool))
    both = jax.jit(two)(
        jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), one),
        stack_seeds([federation(seed=0), federation(seed=1)]),
        jnp.array(TRUTH),
    )[0]
    for seed in range(2):
        assert tuple(both.server["received"]["accepted"][seed]) == answered[seed]


def test_late_uploads_are_dropped_and_their_clients_remember():
    state, result = failing(3, **{"availability.late": 0.5, "availability.late_weight": 0.0})
    came = np.asarray(state.server["received"]["accepted"])
    assert 0 < came.sum() < 4 and result.metrics["late_uploads"] == 4 - came.sum()
    assert result.metrics["uploads"] == 4 and LATE not in state.server
    trained = 100 * np.array(DRAW) + SIZES[DRAW] * (10 + np.arange(4))  # the client has trained
    np.testing.assert_array_equal(state.clients["trained"][np.array(DRAW)], trained)


def test_late_uploads_join_the_next_round_with_what_they_changed():
    """Two rounds, jitted once: the second one's rows are those that waited, then its own."""
    options = problem(4, **{"availability.late": 0.5, "availability.late_weight": 0.25})
    round_fn = jax.jit(make_round(options, toy_method(), lanes=2))
    shapes = Upload(Model({"classifier": jnp.float32(0)}, ()), {"client": jnp.int32(0), "personal": ()})
    clients, server = first_memory(options.config, shapes, Draw(jnp.array(DRAW)))
    assert clients == {}
    state, late, in_time = toy_state(draw=jnp.array(DRAW, jnp.int32), fails=jnp.zeros(4, bool), **server), [], 0
    data = federation(seed=3)
    for number in range(4):
        before = float(state.model.params["classifier"])
        state, result = round_fn(state, data, jnp.array(TRUTH))
        received = dict(state.server["received"])
        now = np.asarray(received["accepted"])[4:]
        assert result.metrics["late_uploads"] == 4 - now.sum()
        changes = np.array(FULL[DRAW] - 1)  # a client adds the same whatever it begins with
        sent = np.asarray(received["uploads"].model.params["classifier"])
        np.testing.assert_array_equal(sent[4:], before + changes)
        np.testing.assert_array_equal(received["discount"], [0.25] * 4 + [1] * 4)
        if number:  # what was late a round ago
            np.testing.assert_array_equal(received["accepted"][:4], late)
            np.testing.assert_array_equal(sent[:4][late], before + changes[late])
            np.testing.assert_array_equal(np.asarray(received["clients"])[:4][late], np.array(DRAW)[late])
            np.testing.assert_array_equal(np.asarray(received["sizes"])[:4][late], SIZES[DRAW][late])
            np.testing.assert_array_equal(received["uploads"].told["client"][:4][late], np.array(DRAW)[late])
        else:
            assert not np.asarray(received["accepted"])[:4].any()
        late, in_time = ~now, in_time + now.sum()
        rest = {name: value for name, value in state.server.items() if name != "received"}
        model = Model({"classifier": state.model.params["classifier"] + 7}, {})  # the server moves the model on
        state = State(state.round, model, rest, state.clients)
    assert 4 <= in_time <= 12


def test_late_uploads_count_for_less():
    section = {"weights": "size", "mean": "mean", "malicious_share": 0.2, "norm_bound": 0.0, "optimizer": "fedavg"}
    config = types.SimpleNamespace(aggregation=types.SimpleNamespace(**section))
    toy = types.SimpleNamespace(config=config, network=types.SimpleNamespace(normalisation="none"))
    kernels, sizes = np.array([1.0, 2.0, 4.0], np.float32), np.array([10, 30, 20])
    received = Received(
        Upload(Model({"classifier": jnp.array(kernels)}, ())),
        jnp.ones(3, bool), jnp.arange(3), None, jnp.array(sizes), jnp.array(sizes), jnp.array([1.0, 0.5, 1.0]),
    )  # fmt: skip
    state = State(jnp.int32(0), Model({"classifier": jnp.float32(0)}, ()))
    plain = chain(toy, own_weights(lambda received: received.sizes * 1.0), mean(), parts=("classifier",))
    for aggregation in (fedavg(toy, parts=("classifier",)), plain):
        after, _ = jax.jit(aggregation.aggregate)(state, None, received, jax.random.key(0))
        weights = sizes * [1, 0.5, 1]
        np.testing.assert_allclose(after.model.params["classifier"], np.average(kernels, weights=weights), rtol=1e-6)
