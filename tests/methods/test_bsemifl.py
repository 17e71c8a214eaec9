"""BSemiFL's closeness of large logits; tests/official/bsemifl.py has whole rounds with the quotient of densities."""

import jax.numpy as jnp
import numpy as np

from fedjax_ssl.methods.bsemifl import closeness


def test_logits_of_any_size_have_a_closeness():
    """exp(200) overflows in float32; a constant added to all logits of a model cancels with its sum."""
    large = jnp.float32([[[200, 0], [190, 0]]])
    found = closeness(large, large - 150, jnp.float32(200), np.ones((1, 2), bool))
    np.testing.assert_allclose(found, np.full((1, 2), 1 / (1 + 1 / (1 + np.exp(-10)))), rtol=1e-4)
