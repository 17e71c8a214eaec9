"""CBAFed's acceptance of labels, by how frequent their classes are, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.methods.cbafed.client import Acceptance, accept, acceptance


@pytest.mark.parametrize("num_classes, cap", [(3, 0.95), (10, 0.9), (100, 0.85)])
def test_thresholds_follow_the_shares_of_the_classes(num_classes, cap):
    """T_c = min(P_c + 0.84 - std(P), cap), the deviation unbiased, P times C / 10; rare is below 0.03."""
    counts = np.random.default_rng(num_classes).integers(0, 60, num_classes) ** 2
    counts[1] = 0
    thresholds, rare = acceptance(jnp.array(counts, jnp.float32), base=0.84, cap=cap, rare=0.03)
    p = counts / counts.sum() * num_classes / 10
    deviation = np.sqrt(np.sum((p - p.mean()) ** 2) / (num_classes - 1))
    np.testing.assert_allclose(thresholds, [min(x + 0.84 - deviation, cap) for x in p], rtol=1e-5)
    np.testing.assert_array_equal(rare, p < 0.03)
    assert rare[1] and not rare.all() and np.any(thresholds < cap)
    assert num_classes == 3 or np.any(np.asarray(thresholds) == np.float32(cap))


def test_the_second_class_counts_where_it_is_rare():
    """A probability must exceed its class's threshold; else the second class may, if it is one of the rare ones."""
    p = jnp.array([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2], [0.3, 0.5, 0.2], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]])
    by = Acceptance(jnp.array([0.5, 0.7, 0.65]), jnp.array([True, False, False]))
    labels, accepted = accept(p, by, second_labels=True)
    #                                 above, at 0.5 with a second one that is not rare, a rare second one, none, above
    np.testing.assert_array_equal(accepted, [True, False, True, False, True])
    np.testing.assert_array_equal(labels, [0, 0, 0, 1, 2])
    labels, accepted = accept(p, by, second_labels=False)
    np.testing.assert_array_equal(accepted, [True, False, False, False, True])
    np.testing.assert_array_equal(labels, [0, 0, 1, 1, 2])
