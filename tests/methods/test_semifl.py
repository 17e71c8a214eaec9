"""SemiFL's pseudo-labels, equation 4, against NumPy: by the received model, over weakly augmented views."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.client import labels
from fedjax_ssl.engine.interface import Cohort
from fedjax_ssl.methods import METHODS
from fedjax_ssl.ops.sgd import Model
from tests.helpers.linear_network import in_numpy
from tests.helpers.small_problem import (
    federation,
    itself,
    mirrored,
    negative,
    phases_of,
    pixels_of,
    prepare,
    probabilities,
    sent_down,
    small_problem,
    statistics_of,
)

VIEWS = (itself, mirrored, negative)
SIZES = (7, 4, 8)


def one_of_three(key, images):
    """A weak view that draws: the image itself, mirrored or negative."""
    stacked = jnp.stack([view(None, images) for view in VIEWS])
    return stacked[jax.random.randint(key, (len(images),), 0, 3), jnp.arange(len(images))]


@pytest.fixture(scope="module")
def data():
    return federation([[-1] * size for size in SIZES], at_server=[0, 1])


@pytest.fixture(scope="module")
def label(data):
    """label(broadcast, clients): SemiFL's report, and the scores behind it."""
    scores, score_cohort = [], labels.score_cohort

    def recorded(*arguments):
        scores.append(score_cohort(*arguments))
        return scores[-1]

    @jax.jit
    def run(received, clients):
        problem = small_problem("semifl", weak=one_of_three, **{"confidence.threshold": 0.5})
        cohort = Cohort(clients, {}, jax.random.key(5))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(labels, "score_cohort", recorded)
            jobs = phases_of(METHODS["semifl"].factory(problem))[0].prepare(received, data, cohort, None)
        report = jobs.work.labels.report
        return report.labels, report.qualified, scores.pop()

    return lambda received, clients: map(np.asarray, run(received, jnp.array(clients)))


def test_a_cohort_s_labels_are_those_of_a_weak_view_of_each_image(data, label):
    received, clients = sent_down(small_problem("semifl")), (2, 0)
    found, qualified, scores = label(received, clients)
    drawn, model, centre = [], in_numpy(received.model.params), statistics_of(received.model)
    for job, client in enumerate(clients):
        rows = np.asarray(data.client_index[client])[: SIZES[client]]
        p = np.stack([probabilities(model, pixels_of(data, rows, view), centre) for view in VIEWS])  # [views, n, C]
        for place in range(len(rows)):
            distances = np.abs(p[:, place] - scores[job, place]).max(axis=-1)
            assert distances.min() < 1e-6
            drawn.append(distances.argmin())
            expected = p[drawn[-1], place]
            assert found[job, place] == expected.argmax()
            assert qualified[job, place] == (expected.max() >= 0.5)
        assert not np.any(qualified[job, len(rows) :])
    assert len(set(drawn)) == 3
    assert 0 < qualified.sum() < SIZES[2] + SIZES[0]
    # What a client draws does not depend on who else is in the cohort.
    np.testing.assert_allclose(list(label(received, (0, 2)))[2], scores[::-1], atol=1e-6)


def test_a_probability_at_the_threshold_counts(label):
    received = sent_down(small_problem("semifl"))
    two_classes = jnp.float32([0, 0, -1e9])  # probabilities of exactly 1/2, whatever the image
    params = {"backbone": {"bias": two_classes}, "classifier": {"kernel": jnp.zeros((4, 3))}}
    received = received._replace(model=Model(params, received.model.batch_stats))
    _, qualified, scores = label(received, (2, 0))
    assert np.all(scores[..., :2] == 0.5)
    np.testing.assert_array_equal(qualified.sum(axis=1), [SIZES[2], SIZES[0]])


def test_lambda_s_distribution_is_that_of_the_paper(data, monkeypatch):
    alphas = []
    note = lambda key, a: alphas.append(a) or jnp.float32(0.3)  # noqa: E731
    monkeypatch.setattr("fedjax_ssl.ops.augment.mixup.sample_lambda", note)
    problem = small_problem("semifl")
    received, (phase,) = sent_down(problem), phases_of(METHODS["semifl"].factory(problem))

    def step():
        job = prepare(phase, received, data, 0)
        carry = phase.start(received, data, job.work, {})
        return phase.step(received, data, job.work, carry, jnp.int32(0), jax.random.key(0))

    jax.eval_shape(step)
    assert set(alphas) == {0.75}  # of eq. 6
