"""Noise, cohorts and epsilon against formulas, and what is refused; a round's private sum is in test_delivery.py."""

import types

import jax
import numpy as np
import pytest
from scipy.special import gammaln
from scipy.stats import binom

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.config import apply_arguments
from fedjax_ssl.engine.interface import Broadcast, Received, State, Upload
from fedjax_ssl.engine.untrusted.privacy import one_private_upload, private_cohort
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.privacy import Accountant, check_private
from tests.helpers.runs import make_tiny_config

ROWS, M, S = 6, 5, 2.0
SECRET = np.random.default_rng(7).integers(0, 2**32, (4, 2), np.uint32)


def received():
    """(Received, of which nothing is accepted, what went down)."""
    rng = np.random.default_rng(0)
    down = {"b": rng.normal(size=3).astype(np.float32), "w": rng.normal(size=(4, 3)).astype(np.float32)}
    sent = {name: leaf + rng.normal(size=(ROWS, *leaf.shape)).astype(np.float32) for name, leaf in down.items()}
    none = np.zeros(ROWS, np.int32)
    uploads = Upload(Model(sent, ()))
    return Received(uploads, none > 0, none, None, none + 9, none + 4), Broadcast(Model(down, {}), 0.1)


def options(noise):
    return types.SimpleNamespace(
        aggregation=types.SimpleNamespace(clip_norm=S), privacy=types.SimpleNamespace(noise=noise), clients_per_round=M
    )


def test_the_noise_has_its_deviation_and_comes_without_uploads_too():
    nobody, broadcast = received()
    draw = jax.jit(
        jax.vmap(lambda secret, n: one_private_upload(options(1.5), nobody, broadcast, secret, n), in_axes=(None, 0))
    )

    def drawn(secret):
        params = draw(secret, np.arange(3000)).uploads.model.params.items()
        changes = [np.asarray(leaf)[:, 0] - broadcast.model.params[name] for name, leaf in params]
        return np.concatenate([np.reshape(leaf, (3000, -1)) for leaf in changes], axis=1)

    noise = drawn(SECRET)
    deviation = 1.5 * S / M
    np.testing.assert_allclose(noise.std(axis=0), deviation, rtol=0.08)  # 3000 drawings: 1.3 % a standard error
    assert np.max(np.abs(noise.mean(axis=0))) < 5 * deviation / np.sqrt(3000)
    assert np.max(np.abs(np.corrcoef(noise.T) - np.eye(noise.shape[1]))) < 0.1  # each number by itself
    # Each of the four keys changes all of it: none can be tried out alone.
    for number in range(4):
        other = SECRET ^ np.where(np.arange(4) == number, 1, 0)[:, None].astype(np.uint32)
        assert np.all(np.abs(drawn(other)[0] - noise[0]) > 1e-4 * deviation)


def cohorts(kind):
    """2,000 rounds' cohorts of 10 of 40 clients."""
    config = make_tiny_config(**{"num_clients": 40, "clients_per_round": 10, "privacy.cohorts": kind})
    select, data = private_cohort(config), types.SimpleNamespace(secret=SECRET)
    draw = jax.jit(jax.vmap(lambda number: select(State(number, None), data, None)._replace(turns=0)))
    return jax.device_get(draw(np.arange(2000)))


def test_fixed_cohorts_are_drawn_without_replacement():
    drawn = cohorts("fixed").clients
    assert drawn.shape == (2000, 10) and all(len(set(clients)) == 10 for clients in drawn)
    np.testing.assert_allclose(np.bincount(drawn.ravel()) / 2000, 0.25, atol=5 * np.sqrt(0.25 * 0.75 / 2000))


def test_poisson_cohorts_are_each_client_by_itself():
    draw = cohorts("poisson")
    sizes = np.sum(draw.present, axis=1)
    assert draw.clients.shape[1] < 40 and binom.sf(draw.clients.shape[1], 40, 0.25) < 1e-14
    assert abs(sizes.mean() - 10) < 5 * np.sqrt(40 * 0.25 * 0.75 / 2000) and 2 < sizes.std() < 3.5
    counts = np.zeros(40)
    for clients, present in zip(draw.clients, draw.present):
        assert len(set(clients)) == len(clients)
        counts[clients[present]] += 1
    np.testing.assert_allclose(counts / 2000, 0.25, atol=5 * np.sqrt(0.25 * 0.75 / 2000))


def accountant(**fields):
    section = {"privacy.noise": 1.0, "num_clients": 100, "clients_per_round": 10, **fields}
    return Accountant(make_tiny_config(**section))


def poisson_epsilon(q, z, rounds, delta):
    """Mironov et al. (2019), section 3.3, at whole orders: the k-th term of the binomial sum."""
    orders, bounds = np.arange(2, 256), []
    for order in orders:
        terms = [
            log_binomial(order, k) + (order - k) * np.log1p(-q) + k * np.log(q) + (k * k - k) / (2 * z * z)
            for k in range(order + 1)
        ]
        bounds.append(np.logaddexp.reduce(terms) / (order - 1))
    return least_epsilon(rounds * np.array(bounds), orders, delta)


def fixed_epsilon(q, z, rounds, delta):
    """Wang et al. (2019), Theorem 9, for the Gaussian mechanism, at whole orders."""
    orders, bounds = np.arange(2, 128), []
    for order in orders:
        second = min(np.log(4 * np.expm1(1 / z**2)), 1 / z**2 + np.log(2))
        terms = [0.0, 2 * np.log(q) + log_binomial(order, 2) + second]
        terms += [
            j * np.log(q) + log_binomial(order, j) + (j - 1) * j / (2 * z * z) + np.log(2) for j in range(3, order + 1)
        ]
        bounds.append(np.logaddexp.reduce(terms) / (order - 1))
    return least_epsilon(rounds * np.array(bounds), orders, delta)


def log_binomial(n, k):
    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)


def least_epsilon(rdp, orders, delta):
    return np.min(rdp + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1))


def test_epsilon_of_cohorts_is_that_of_their_papers():
    """The figures of docs/how_to/privacy.md. The library has more orders."""
    drawn = accountant(**{"privacy.cohorts": "poisson"}).epsilon(100)
    np.testing.assert_allclose(drawn, poisson_epsilon(0.1, 1.0, 100, 1e-5), rtol=0.02)
    assert f"{drawn:.1f}" == "7.9"
    fixed = accountant(**{"privacy.cohorts": "fixed"}).epsilon(100)
    assert f"{fixed:.0f}" == "84"
    # The sum differs by 2 S: the noise counts for half.
    np.testing.assert_allclose(fixed, fixed_epsilon(0.1, 0.5, 100, 1e-5), rtol=0.02)
    # The bound for cohorts without replacement is never above that of asking everybody.
    everybody, half = (accountant(**{"privacy.cohorts": "fixed", "clients_per_round": size}) for size in (100, 50))
    assert half.epsilon(100) <= everybody.epsilon(100)


PRIVATE = {"privacy.noise": 0.5, "aggregation.clip_norm": 1.0, "model.normalisation": "group"}


@pytest.mark.parametrize(("fields", "words"), [
    ({"aggregation.clip_norm": 0.0}, "needs aggregation.clip_norm"),
    ({"aggregation.mean": "median"}, "set aggregation.mean='mean'"),
    ({"aggregation.norm_bound": 1.0}, "norm_bound=0"),
    ({"availability.late": 0.5}, "availability.late_weight=0"),
    ({"model.normalisation": "running"}, "running statistics travel without noise"),
    ({"model.normalisation": "static", "model.statistics": "cohort"}, "model.statistics='cohort' asks clients"),
    ({"model.normalisation": "static", "model.statistics": "moments"}, "model.statistics='moments' asks clients"),
    ({"method": "orchestra"}, "orchestra: its clients send"),
    ({"method": "rscfed", "data.labels": "some_clients"}, "rscfed: its server has a message for each client, or"),
    ({"method": "fedtrinet"}, "fedtrinet: its stage server_before reads clients' data at the server"),
    ({"method": "server_only"}, "here no client trains"),
    ({"data.centralised": True}, "or the server has their images"),
    ({"attack.kind": "little"}, "attack.kind='little' puts others' updates"),
    ({"compression.kind": "top_k"}, "set compression.error_feedback=False"),
])  # fmt: skip
def test_what_would_break_the_promise_is_refused(fields, words):
    config = make_tiny_config(**PRIVATE)
    if "method" in fields:
        config = apply_arguments(config, fields.pop("method"))
        config.update_from_flattened_dict(PRIVATE)
    config.update_from_flattened_dict(fields)
    with pytest.raises(UserError) as error:
        build_experiment(config)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_late_uploads_that_are_dropped_break_nothing():
    build_experiment(make_tiny_config(**PRIVATE, **{"availability.late": 0.5, "availability.late_weight": 0.0}))


def test_a_stage_of_the_server_that_reads_anything_of_clients_is_refused():
    experiment = build_experiment(make_tiny_config(**PRIVATE))
    data = experiment.data._replace(given_labels=np.ones(10, np.float32))
    check_private(experiment.problem, experiment.method, experiment.state_shape, data)
    for field in ("client_index", "client_size", "labelled_size", "given_labels"):

        def broadcast(state, data, key, field=field):
            sent = experiment.method.broadcast(state, data, key)
            return sent._replace(learning_rate=sent.learning_rate * getattr(data, field).max())

        method = experiment.method._replace(broadcast=broadcast)
        with pytest.raises(UserError, match="its stage broadcast reads clients' data at the server, without noise"):
            check_private(experiment.problem, method, experiment.state_shape, data)
