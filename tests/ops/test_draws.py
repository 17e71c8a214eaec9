"""Draws without replacement: uniform, in pairs too, and distinct."""

import jax
import numpy as np
import pytest
from scipy import stats

from fedjax_ssl.ops.draws import SORTED, draw_distinct

DRAWS = 4_000


@pytest.fixture(scope="module", params=[SORTED + 1, 2**20])
def drawn(request):
    """(size, int [DRAWS, 10]): draws with as many keys."""
    size = request.param
    keys = jax.random.split(jax.random.key(3), DRAWS)
    return size, np.asarray(jax.jit(jax.vmap(lambda key: draw_distinct(key, size, 10)))(keys))


def test_all_are_different_and_within_range(drawn):
    size, numbers = drawn
    assert numbers.min() >= 0 and numbers.max() < size
    assert (np.diff(np.sort(numbers, axis=1), axis=1) > 0).all()


def test_they_are_uniform(drawn):
    """Each place of a draw on its own, and all together: a chi-square test over 50 equal bins."""
    size, numbers = drawn
    for values in (numbers.ravel(), *numbers.T):
        counts = np.histogram(values, np.linspace(0, size, 51))[0]
        expected = np.diff(np.ceil(np.linspace(0, size, 51))) / size * len(values)
        assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_pairs_are_uniform(drawn):
    """Two clients of a cohort have nothing to do with each other: a chi-square test over 12 x 12 bins."""
    size, numbers = drawn
    for first, second in ((0, 1), (0, 9), (4, 5)):
        table = np.histogram2d(numbers[:, first], numbers[:, second], bins=np.linspace(0, size, 13))[0]
        assert stats.chi2_contingency(table).pvalue > 1e-4
    differences = (numbers[:, 1] - numbers[:, 0]) % size  # neighbours of one permutation
    assert stats.chisquare(np.histogram(differences, 20, (0, size))[0]).pvalue > 1e-4


def test_a_whole_permutation_has_every_number_once():
    size = SORTED + 5
    numbers = np.asarray(draw_distinct(jax.random.key(0), size, size))
    np.testing.assert_array_equal(np.sort(numbers), np.arange(size))


def test_few_are_drawn_by_sorting():
    key = jax.random.key(1)
    expected = jax.random.choice(key, 100, (10,), replace=False)
    np.testing.assert_array_equal(draw_distinct(key, 100, 10), expected)
