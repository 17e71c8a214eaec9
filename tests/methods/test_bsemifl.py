"""BSemiFL's closeness against the quotient of densities; tests/official/bsemifl.py has whole rounds."""

import jax.numpy as jnp
import numpy as np

from fedjax_ssl.methods.bsemifl import closeness


def test_closeness_is_the_quotient_of_both_densities():
    """Clients of five, three and one image; what is in a place without an image does not matter."""
    rng, sizes = np.random.default_rng(0), np.array([5, 3, 1])
    of_global, of_local = (rng.normal(size=(3, 5, 4)) for _ in range(2))
    present, log_sum = np.arange(5) < sizes[:, None], 3.2
    found = np.asarray(closeness(jnp.asarray(of_global), jnp.asarray(of_local), jnp.float32(log_sum), present))
    for client, size in enumerate(sizes):
        mass, own = (np.exp(logits[client, :size]).sum(axis=1) for logits in (of_global, of_local))
        dense, own = mass / np.exp(log_sum), own / own.sum()
        np.testing.assert_allclose(found[client, :size], dense / (dense + own), rtol=1e-5)
    assert 0.05 < found[present].min() < found[present].max() < 0.95


def test_logits_of_any_size_have_a_closeness():
    """exp(200) overflows in float32; a constant added to all logits of a model cancels with its sum."""
    large = jnp.float32([[[200, 0], [190, 0]]])
    found = closeness(large, large - 150, jnp.float32(200), np.ones((1, 2), bool))
    np.testing.assert_allclose(found, np.full((1, 2), 1 / (1 + 1 / (1 + np.exp(-10)))), rtol=1e-4)
