"""Pseudo-labels of a cohort by any scores, against NumPy. Those by anchors are in tests/methods/test_fedanchor.py."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import base_config
from fedjax_ssl.client import Examples, label_cohort, labels_for_report, make_confidence, score_cohort
from fedjax_ssl.engine.interface import Cohort, Problem
from tests.helpers.toy_federation import federation

CLASSES = 5


# --- A cohort's labels, from digits of one pixel: the score of an image is a row of a table. -------------------------

TABLE = np.random.default_rng(4).uniform(size=(10, CLASSES)).astype(np.float32)
CLIENTS = [[4, 1], [7], [0, 9, 3], []]
DATA = federation(CLIENTS)


def problem_with(weak=None):
    config = base_config()
    config.eval_batch_size = 4  # a cohort takes several batches, the last of them short
    return Problem(config, None, weak, None, CLASSES)


def cohort_of(clients, seed=5):
    return Cohort(jnp.array(clients), {}, jax.random.key(seed))


def examples_of(clients, seed=5):
    return jax.jit(Examples.of)(DATA, cohort_of(clients, seed))


def by_table(images):
    return jnp.array(TABLE)[images[:, 0, 0, 0].astype(jnp.int32) // 10]


def labelled(cohort, threshold, strictly):
    """The labels of a cohort, and the report of a method with a fixed threshold, in one program."""
    problem = problem_with()._replace(network=types.SimpleNamespace(probabilities=lambda model, x: by_table(x)))
    rule, received = make_confidence(problem, threshold, strictly), types.SimpleNamespace(model=None)
    return jax.jit(lambda cohort: (
        label_cohort(problem, None, DATA, Examples.of(DATA, cohort), rule),
        labels_for_report(problem, threshold)(received, DATA, cohort, None).report,
    ))(cohort)  # fmt: skip


def test_labels_of_a_cohort():
    """The largest score's class, and whether it counts: at the threshold where that is asked for, padding never."""
    threshold = float(TABLE[9].max())
    for strictly in (False, True):
        made, report = labelled(cohort_of([2, 3, 0]), threshold, strictly)
        for job, client in enumerate((2, 3, 0)):
            rows = CLIENTS[client]
            best = TABLE[rows].max(axis=1)
            expected = best > threshold if strictly else best >= threshold
            np.testing.assert_array_equal(made.report.labels[job, : len(rows)], TABLE[rows].argmax(axis=1))
            np.testing.assert_array_equal(made.report.qualified[job], [*expected] + [False] * (3 - len(rows)))
            np.testing.assert_array_equal(report.labels[job, : len(rows)], TABLE[rows].argmax(axis=1))
            np.testing.assert_array_equal(report.qualified[job], [*(best >= threshold)] + [False] * (3 - len(rows)))
            top = np.sort(TABLE[rows], axis=1)
            np.testing.assert_allclose(made.report.facts["score_gap"][job, : len(rows)], top[:, -1] - top[:, -2])
        np.testing.assert_array_equal(made.weights, np.float32(made.report.qualified))
    assert made.report.others == {} and made.own == {}


def test_scores_of_several_views_are_their_mean():
    """Each view is drawn anew for each example of each client, whoever else is in the cohort."""

    def weak(key, images):  # one more, or not
        return images + jax.random.bernoulli(key, shape=images.shape)

    views = 3
    score = jax.jit(lambda examples: score_cohort(
        problem_with(weak), lambda x: x[:, 0, 0, 0].astype(jnp.float32), DATA.inputs, examples, views
    ))  # fmt: skip
    raw = [10 * np.array(CLIENTS[client]) for client in (2, 0, 1)]
    found = np.asarray(score(examples_of([2, 0, 1])))
    added = [of_job[: len(images)] - images for of_job, images in zip(found, raw)]
    ones = views * np.concatenate(added)  # how many of each image's views have one more
    np.testing.assert_allclose(ones, np.round(ones), atol=1e-4)
    assert np.all((ones > -0.1) & (ones < views + 0.1)) and len(set(np.round(ones))) > 1
    np.testing.assert_allclose(score(examples_of([1, 2, 0]))[1] - raw[0], added[0], atol=1e-5)
    others = {tuple(np.asarray(score(examples_of([2, 0, 1], seed))[0]).tolist()) for seed in range(8)}
    assert len(others) > 1
