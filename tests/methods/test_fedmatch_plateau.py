"""The learning rate that falls where a loss has stopped falling, against a plain loop."""

import jax
import numpy as np
import pytest

from fedjax_ssl.methods.fedmatch.phases import LEAST, after_epoch, fresh_plateau


@pytest.mark.parametrize("patience", [1, 3])
def test_the_rate_falls_after_so_many_epochs_without_a_minimum(patience):
    losses = [3.0, 2.0, 2.5, 2.0, 2.2, 1.0, 1.0, 1.5, 1.2, 0.9, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    step, plateau = jax.jit(after_epoch, static_argnums=2), fresh_plateau()
    lowest, left, factor, falls = np.inf, patience, 1.0, 0
    for loss in losses:
        if loss < lowest:
            lowest, left = loss, patience
        else:
            left -= 1
            if left == 0:
                factor, left, falls = factor / 3, patience, falls + 1
        plateau = step(plateau, loss, patience)
        np.testing.assert_allclose(plateau.factor, factor, rtol=1e-5)
        assert (float(plateau.lowest), int(plateau.waited)) == (np.float32(lowest), patience - left)
    assert falls == {1: 12, 3: 4}[patience] and left <= patience


def test_the_rate_does_not_vanish():
    plateau = fresh_plateau()._replace(lowest=np.float32(0.0), factor=np.float32(2 * LEAST))
    np.testing.assert_allclose(after_epoch(plateau, 1.0, 1).factor, LEAST, rtol=1e-6)
