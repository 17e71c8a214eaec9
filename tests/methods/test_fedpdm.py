"""FedPDM's matching, against plain scaling of a matrix."""

import numpy as np
import pytest

from fedjax_ssl.methods.fedpdm import match

RNG = np.random.default_rng(0)
SHARES = np.array([0.1, 0.2, 0.7])


def scaled(p, shares, sharpness, iterations=2_000):
    """The conditional probabilities of the transport plan: rows and columns of the kernel scaled in turn."""
    number, num_classes = p.shape
    kernel = np.ones((number + 1, num_classes + 1))
    kernel[:-1, :-1] = (np.exp(p) / np.exp(p).sum(axis=1, keepdims=True)) ** sharpness
    rows, columns = np.append(np.ones(number), num_classes + 1), np.append(1 + number * shares, 1)
    a = np.ones(number + 1)
    for _ in range(iterations):
        b = columns / (kernel.T @ a)
        a = rows / (kernel @ b)
    plan = a[:, None] * kernel * b
    np.testing.assert_allclose(plan.sum(axis=0), columns, rtol=1e-6)
    return plan[:-1, :-1]


@pytest.mark.parametrize("sharpness", [3.0, 10.0])
def test_matching_is_optimal_transport(sharpness):
    p = RNG.dirichlet([4, 1, 1], 30).astype(np.float32)  # the model prefers a class that is rare
    mask = np.arange(30) < 24
    found = np.asarray(match(p, mask, SHARES.astype(np.float32), sharpness))
    expected = scaled(np.float64(p[mask]), SHARES, sharpness)
    np.testing.assert_allclose(found[mask], expected, atol=0.03)  # it ends when columns miss by 1 %
    assert np.abs(expected - p[mask]).max() > 0.5  # which is far from what the model said
    garbage = np.where(mask[:, None], p, 7.0).astype(np.float32)
    np.testing.assert_array_equal(
        np.asarray(match(garbage, mask, SHARES.astype(np.float32), sharpness))[mask], found[mask]
    )
