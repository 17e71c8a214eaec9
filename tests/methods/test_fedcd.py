"""Edges of FedCD's balance of classes; tests/official/fedcd.py has whole rounds."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.methods.fedcd import balance


@pytest.mark.parametrize(("confident", "ranks", "some"), [
    (0.4, (5, 6), False), (0.0, (0, 4), False), (1.0, (1, 2), True),
])  # fmt: skip
def test_images_that_are_all_or_none_unreliable_have_the_weight_one(confident, ranks, some):
    """Clients of nine, six and no images among nine places. The largest mass of all reaches even a share of 1."""
    logits = np.random.default_rng(4).normal(size=(3, 9, 5)).astype(np.float32) + np.float32([1, 0, 0, 0.5, -1])
    present = np.arange(9) < np.array([9, 6, 0])[:, None]
    found = np.asarray(balance(jnp.asarray(logits), jnp.asarray(present), confident, ranks))
    assert np.all(np.isfinite(found))
    for client in (0, 1):
        assert np.all(found[client][present[client]] == 1) == (not some)


def test_equal_masses_make_no_class_confident():
    np.testing.assert_array_equal(balance(jnp.zeros((4, 3)), jnp.ones(4, bool), 0.4, (0, 2)), np.ones(4))
