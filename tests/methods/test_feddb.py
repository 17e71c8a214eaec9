"""FedDB: the server's exact weights, for which the clients' mean prediction is uniform; whose labels count how much.

tests/official/feddb.py has whole rounds: labels, steps, P_k, and the mean by the code's solver.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from fedjax_ssl.data.federated import Attackers
from fedjax_ssl.engine import Received, State, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.feddb import APP_U, balancing
from tests.helpers.small_problem import CLASSES, federation, phases_of, prepare, sent_down, small_problem, train

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


def test_the_exact_weights_are_the_minimum_over_the_simplex():
    exact = weights_of("exact", ACCEPTED)
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


def test_without_an_accepted_upload_nobody_has_weight():
    broken = PRIORS.copy()
    broken[0] = np.nan
    for solver in ("code", "exact"):
        np.testing.assert_array_equal(weights_of(solver, np.zeros(6, bool), broken), 0)


@pytest.mark.parametrize(("solver", "expected", "tolerance"), [("none", 0.75, 1e-6), ("exact", 2 / 3, 1e-3)])
def test_the_mean_has_the_weights_of_the_solver(solver, expected, tolerance):
    """Without one those of the sizes. A third of the first prior and two of the second are uniform."""
    problem = small_problem("feddb", **{"feddb.solver": solver})
    model, priors = sent_down(problem).model, jnp.array([[1, 0, 0], [0, 0.5, 0.5]])
    uploads = Upload(jax.tree.map(lambda leaf: jnp.stack([0 * leaf, 0 * leaf + 1]), model), {APP_U: priors})
    sizes = jnp.array([10, 30])
    received = Received(uploads, jnp.ones(2, bool), jnp.arange(2), None, sizes, sizes)
    method = METHODS["feddb"].factory(problem)
    after, _ = method.aggregate(State(jnp.int32(0), model, {}), None, received, jax.random.key(0))
    for leaf in jax.tree.leaves(after.model):
        np.testing.assert_allclose(leaf, expected, atol=tolerance)


@pytest.mark.test_all
def test_a_label_counts_as_its_rule_says_and_an_attacker_s_is_false():
    data = federation([[0, -1, -1, 2, 1, -1, -1, -1, -1]])
    problem = small_problem("feddb", **{"confidence.threshold": 0.48, "client.epochs": 1})
    received = sent_down(problem)
    (phase,) = phases_of(METHODS["feddb"].factory(problem))
    job = prepare(phase, received, data, 0)
    liar = prepare(phase, received, data._replace(attackers=Attackers(None, jnp.ones(len(data.inputs), bool))), 0)
    made = job.work.labels.report.labels
    np.testing.assert_array_equal(liar.work.labels.report.labels, (made + 1) % CLASSES)

    def loss(factor):
        def weighted(*arguments):
            jobs = phase.prepare(*arguments)
            labels = jobs.work.labels
            labels = labels._replace(weights=labels.weights * factor)
            return jobs._replace(work=jobs.work._replace(labels=labels))

        return train(phase._replace(prepare=weighted), received, data, 0)[1].metrics["unlabelled_loss"]

    assert float(loss(0.25)) == pytest.approx(float(loss(1.0)) / 4, rel=1e-5) and loss(0.25) > 0.01
