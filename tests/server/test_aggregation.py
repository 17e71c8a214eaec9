"""Aggregation against plain NumPy."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from fedjax_ssl.engine.interface import Received, State, Upload
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.server import chain, fedavg, mean, optimizer, screen, weights, weights_told, with_server_model

KEY = jax.random.key(0)


PARAMS = {"classifier": jnp.array([1.0, -2.0]), "anchor_head": jnp.array([7.0])}
PARTS = ("classifier",)


def problem_with(normalisation="static", **options):
    section = ConfigDict({"weights": "size", "clip_norm": 0.0, "optimizer": "fedavg", "learning_rate": 1.0,
                          "momentum": 0.6, "mean": "mean", "byzantine_share": 0.2,
                          "norm_bound": 0.0, **options})  # fmt: skip
    config = types.SimpleNamespace(aggregation=section, availability=types.SimpleNamespace(late=0.0), method="fedavg")
    return types.SimpleNamespace(config=config, network=types.SimpleNamespace(normalisation=normalisation))


def received_of(classifiers, accepted, batch_stats=(), metadata=None):
    """Rows of 30, 10 and 60 examples, of which 1, 3 and 0 qualified, as far as there are uploads."""
    rows = len(classifiers)
    upload = Upload(Model({"classifier": jnp.array(classifiers)}, batch_stats), metadata or {})
    numbers = np.array([30, 10, 60])[:rows], np.array([1, 3, 0])[:rows]
    return Received(upload, jnp.array(accepted), jnp.arange(rows), None, *numbers)


def rounds_of(optimizer, scales=(1, 0, 1), **options):
    """Rounds of aggregation of two clients' updates, a multiple of fixed ones; where it is 0, nobody's is accepted.

    The mean of the first weight's updates is 0.
    """
    aggregation = fedavg(problem_with(optimizer=optimizer, **options), parts=PARTS)
    state = State(jnp.int32(0), Model(PARAMS, {}), aggregation.init(PARAMS))
    updates = np.array([[0.25, 0.4], [-0.75, 0.8]], np.float32)
    trace, norms = [np.asarray(PARAMS["classifier"])], []
    aggregate = jax.jit(lambda state, received: aggregation.aggregate(state, None, received, KEY))
    for scale in scales:
        sent = state.model.params["classifier"] + scale * updates
        state, metrics = aggregate(state, received_of(sent, [scale != 0] * 2))
        trace.append(np.asarray(state.model.params["classifier"]))
        norms.append(float(metrics["update_norm"]))
    np.testing.assert_array_equal(state.model.params["anchor_head"], PARAMS["anchor_head"])
    np.testing.assert_allclose(norms, np.linalg.norm(np.diff(trace, axis=0), axis=1), rtol=1e-5)
    return trace, 0.75 * updates[0] + 0.25 * updates[1]


def test_server_momentum_is_semifl_s():
    """m <- 0.6 m + g with m = g at first, w <- w - m; a round without uploads leaves both as they are."""
    trace, mean = rounds_of("fedavgm")
    np.testing.assert_allclose(trace[1] - trace[0], mean, rtol=1e-5)
    np.testing.assert_array_equal(trace[2], trace[1])
    np.testing.assert_allclose(trace[3] - trace[2], 1.6 * mean, rtol=1e-5)


# Once v has learned of a long update, short ones let it shrink: Yogi's sign takes both values.
SCALES = (1.0, 0.0, 0.05, 0.5)


@pytest.mark.parametrize("rule", ["fedadagrad", "fedadam", "fedyogi"])
def test_adaptive_optimizers(rule):
    """Reddi et al., 2021, Algorithm 2 with optax's first accumulators; it corrects Adam's and Yogi's bias.

    Of Adagrad the adaptivity is below the root, and it has no momentum. A round without uploads does not count.
    """
    trace, mean = rounds_of(rule, SCALES, learning_rate=0.1)
    begin = {"fedadagrad": (0, 0.1), "fedadam": (0, 0), "fedyogi": (0, 1e-6)}[rule]
    (m, v), count, signs = (np.full(2, start) for start in begin), 0, set()
    expected = trace[0].astype(np.float64)
    for scale, found in zip(SCALES, trace[1:]):
        if scale:
            square, count = (scale * mean) ** 2, count + 1
            sign = np.sign(v - square)
            changes = {"fedadagrad": square, "fedadam": 0.01 * (square - v), "fedyogi": -0.01 * square * sign}
            m, v = 0.6 * m + 0.4 * scale * mean, v + changes[rule]
            step = m / (1 - 0.6**count) / (np.sqrt(v / (1 - 0.99**count)) + 1e-3)
            expected = expected + 0.1 * (scale * mean / np.sqrt(v + 1e-3) if rule == "fedadagrad" else step)
            signs |= set(sign)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert rule != "fedyogi" or signs == {-1, 1}


# --- The chain, link by link: three uploads, the last of which is not accepted. --------------------------------------

SENT = np.array([[2.0, 0.0], [4.0, 4.0], [np.nan, 1.0]], np.float32)
START = np.array([1.0, -2.0])
SERVER = np.array([9.0, 5.0])


def aggregate(*links, accepted=(True, True, False), problem=None, batch_stats=(), state_stats=None, memory=None):
    """The state after one aggregation by this chain."""
    aggregation = chain((problem or problem_with()).network, *links, parts=PARTS)
    server = {"own": Model({**PARAMS, "classifier": jnp.float32(SERVER)}, {"mean": jnp.array([8.0])})}
    server |= {"screened": jnp.array([True, False, True]), **aggregation.init(PARAMS)}
    state = State(jnp.int32(0), Model(PARAMS, state_stats or {}), server)
    found, metrics = aggregation.aggregate(state, None, received_of(SENT, accepted, batch_stats), KEY)
    change = np.linalg.norm(np.asarray(found.model.params["classifier"]) - START)
    np.testing.assert_allclose(metrics["update_norm"], change, rtol=1e-5)
    return found


def screened():
    return screen(lambda state, received: state.server["screened"] & (received.clients != 2))


def server_model(problem=None):
    return with_server_model((problem or problem_with()).network, lambda state: state.server["own"], PARTS)


@pytest.mark.parametrize("kind, shares", [("size", [0.75, 0.25]), ("qualified", [0.25, 0.75]), ("uniform", [0.5, 0.5])])
def test_weights_and_mean(kind, shares):
    found = aggregate(weights(kind), mean()).model.params["classifier"]
    np.testing.assert_allclose(found, shares @ SENT[:2], rtol=1e-6)


def test_weights_that_are_told():
    """A number in each upload, of the accepted ones; whatever `aggregation.weights` says. Lies are bounded."""
    aggregation = fedavg(problem_with(), weighted_by=weights_told("used", lambda received: 30), parts=PARTS)
    state = State(jnp.int32(0), Model(PARAMS, {}), aggregation.init(PARAMS))
    for told, shares in (([0.9, 0.1], [0.9, 0.1]), ([10.0, 1e12], [0.25, 0.75]), ([2.0, -1e12], [1.0, 0.0])):
        received = received_of(SENT, [True, True, False], metadata={"used": jnp.array([*told, 5.0])})
        found, _ = aggregation.aggregate(state, None, received, KEY)
        np.testing.assert_allclose(found.model.params["classifier"], shares @ SENT[:2], rtol=1e-6)


def test_who_is_screened_out_has_no_weight():
    found = aggregate(weights("size"), screened(), mean())
    np.testing.assert_allclose(found.model.params["classifier"], SENT[0], rtol=1e-6)


def test_the_server_s_model_has_half_the_weight_or_all():
    links = weights("uniform"), mean(), server_model()
    clients = SENT[:2].mean(axis=0)
    np.testing.assert_allclose(aggregate(*links).model.params["classifier"], (clients + SERVER) / 2, rtol=1e-6)
    alone = aggregate(*links, accepted=(False,) * 3).model.params
    np.testing.assert_array_equal(alone["classifier"], SERVER)
    np.testing.assert_array_equal(alone["anchor_head"], PARAMS["anchor_head"])


@pytest.mark.parametrize("options", [{}, {"optimizer": "fedavgm", "learning_rate": 0.5}])
def test_the_configured_chain(options):
    """Weights, screen, mean, the server's model, the optimiser."""
    problem = problem_with(**options)
    aggregation = fedavg(
        problem,
        screened_by=lambda state, received: received.clients != 1,
        server_model=lambda state: state.server["own"],
        parts=PARTS,
    )
    own = Model({"classifier": jnp.float32(SERVER)}, {})
    state = State(jnp.int32(0), Model(PARAMS, {}), {"own": own, **aggregation.init(PARAMS)})
    found, _ = aggregation.aggregate(state, None, received_of(SENT, [True, True, False]), KEY)
    expected = START + (0.5 if options else 1) * ((SENT[0] + SERVER) / 2 - START)
    np.testing.assert_allclose(found.model.params["classifier"], expected, rtol=1e-6)


def test_statistics_take_the_weights_and_no_optimiser():
    problem = problem_with("running")
    links = weights("size"), mean(), server_model(problem), optimizer(optax.sgd(0.5))
    stats = {"mean": jnp.array([[4.0], [8.0], [np.nan]])}
    found = aggregate(*links, problem=problem, batch_stats=stats, state_stats={"mean": jnp.array([1.0])})
    np.testing.assert_allclose(found.model.batch_stats["mean"], [(5 + 8) / 2], rtol=1e-6)
    # Under another policy they are not sent, and stay.
    found = aggregate(weights("size"), mean(), state_stats={"mean": jnp.array([1.0])})
    np.testing.assert_array_equal(found.model.batch_stats["mean"], [1.0])
