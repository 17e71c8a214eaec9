"""FedDB: uploads without weight, the mean by sizes; whose labels count how much.

tests/official/feddb.py has whole rounds: labels, steps, P_k, and the mean by the code's solver.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data.federated import Attackers
from fedjax_ssl.engine import Received, State, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.feddb import APP_U, balancing
from tests.helpers.small_problem import CLASSES, federation, phases_of, prepare, sent_down, small_problem, train


@pytest.mark.parametrize("accepted", [[False] * 3, [True, False, True]])
def test_an_upload_that_is_not_accepted_has_no_weight(accepted):
    """Also if its prior is no number."""
    accepted, none = np.array(accepted), jnp.zeros(3, jnp.int32)
    priors = jnp.array([[0.9, 0.1], [jnp.nan, 1.0], [0.3, 0.7]])
    received = Received(Upload((), {APP_U: priors}), jnp.asarray(accepted), none, None, none, none)
    weights = np.asarray(balancing(received))
    assert np.all(weights[~accepted] == 0) and weights.sum() == pytest.approx(float(accepted.any()), abs=1e-6)


def test_without_a_solver_the_mean_has_the_weights_of_the_sizes():
    problem = small_problem("feddb", **{"feddb.solver": "none"})
    model, priors = sent_down(problem).model, jnp.array([[1, 0, 0], [0, 0.5, 0.5]])
    uploads = Upload(jax.tree.map(lambda leaf: jnp.stack([0 * leaf, 0 * leaf + 1]), model), {APP_U: priors})
    sizes = jnp.array([10, 30])
    received = Received(uploads, jnp.ones(2, bool), jnp.arange(2), None, sizes, sizes)
    method = METHODS["feddb"].factory(problem)
    after, _ = method.aggregate(State(jnp.int32(0), model, {}), None, received, jax.random.key(0))
    for leaf in jax.tree.leaves(after.model):
        np.testing.assert_allclose(leaf, 0.75, atol=1e-6)


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
