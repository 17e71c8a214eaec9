"""FedDB's server: the weights for which the clients' mean prediction is near uniform."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from fedjax_ssl.engine import Received, Upload
from fedjax_ssl.methods.feddb import APP_U, balancing

RNG = np.random.default_rng(0)
PRIORS = RNG.dirichlet(np.full(10, 0.3), 6).astype(np.float32)
ACCEPTED = np.array([True, True, False, True, True, True])


def weights_of(solver, accepted, priors=PRIORS):
    number = len(priors)
    none = jnp.zeros(number, jnp.int32)
    upload = Upload((), {APP_U: jnp.asarray(priors)})
    return np.asarray(balancing(solver, Received(upload, jnp.asarray(accepted), none, None, none, none)))


def miss(weights, priors):
    return np.mean((weights @ priors - 1 / priors.shape[1]) ** 2)


@pytest.fixture(scope="module")
def exact():
    return weights_of("exact", ACCEPTED)


def test_the_exact_weights_are_the_minimum_over_the_simplex(exact):
    priors = np.asarray(PRIORS[ACCEPTED], np.float64)
    found = scipy.optimize.minimize(
        lambda a: 100 * miss(a, priors),
        np.full(len(priors), 1 / len(priors)),
        bounds=[(0, 1)] * len(priors),
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
        options={"ftol": 1e-12},
    )
    np.testing.assert_allclose(exact[ACCEPTED], found.x, atol=2e-3)
    assert exact[2] == 0 and exact.sum() == pytest.approx(1, abs=1e-5)
    assert np.ptp(found.x) > 0.1  # they are far from equal


def test_the_code_s_weights_stay_near_equal_ones(exact):
    code = weights_of("code", ACCEPTED)
    assert code[2] == 0 and code.sum() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(code[ACCEPTED], 0.2, atol=0.01)
    priors, equal = PRIORS[ACCEPTED], np.full(5, 0.2)
    assert miss(exact[ACCEPTED], priors) < miss(code[ACCEPTED], priors) < miss(equal, priors)


def test_without_an_accepted_upload_nobody_has_weight():
    broken = PRIORS.copy()
    broken[0] = np.nan
    for solver in ("code", "exact"):
        np.testing.assert_array_equal(weights_of(solver, np.zeros(6, bool), broken), 0)
