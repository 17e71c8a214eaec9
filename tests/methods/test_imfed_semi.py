"""imFed-Semi's wanted proportions; tests/official has its sub-banks, banks and training."""

import jax.numpy as jnp
import numpy as np

from fedjax_ssl.methods.imfed_semi import drawn_proportions


def test_wanted_proportions_are_a_client_s_own_and_stay():
    first, again, other = (np.asarray(drawn_proportions(jnp.int32(0), client, 5)) for client in (1, 1, 2))
    np.testing.assert_allclose(first.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(first, again)
    assert np.all(first != other) and first.min() > 0.1 / (5 + 1)
