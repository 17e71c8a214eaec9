"""Twin-sight's views and what it refuses; tests/official has whole rounds."""

import jax
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.twin_sight import TWIN, views
from tests.helpers.linear_heads import DIM, LinearHeads
from tests.helpers.small_problem import mirrored, negative, small_problem


def problem_of(arguments="", **fields):
    network = LinearHeads({}, companions={TWIN: LinearHeads({"projector": ("", DIM)}, classes=0)})
    return small_problem(f"twin_sight{arguments}", network, **fields)


def test_the_views_and_freematch_are_those_of_the_code():
    images = np.zeros((2, 2, 2, 1), np.uint8)
    for word, expected in (("strong", [mirrored, negative]), ("weak", [mirrored, mirrored]), ("views", [negative] * 2)):
        problem = problem_of(",freematch", **{"twin_sight.second_view": word})._replace(views=(negative, negative))
        for view, of in zip(views(problem)(jax.random.key(0), images), expected):
            np.testing.assert_array_equal(view, of(None, images))
    assert problem.config.confidence.fairness_weight == 0


def test_a_trainer_with_a_second_classifier_is_refused():
    with pytest.raises(UserError, match=r"confidence.kind='acr' trains a second classifier"):
        METHODS["twin_sight"].factory(problem_of(**{"confidence.kind": "acr"}))
