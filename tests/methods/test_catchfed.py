"""CATCHFed's energies and hybrid labels against NumPy. Whole rounds are in tests/official/catchfed.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.interface import Cohort
from fedjax_ssl.methods import METHODS
from tests.helpers.linear_network import in_numpy, softmax
from tests.helpers.small_problem import federation, itself, pixels_of, sent_down, small_problem, statistics_of

SIZE, THRESHOLD, ENERGY = 8, 0.6, -2.0


@pytest.fixture(scope="module")
def data():
    return federation([[-1] * SIZE], at_server=[0, 1])


def labels_of(data, **fields):
    """The labels of the first client, and its logits in NumPy."""
    problem = small_problem("catchfed", weak=itself, **{"confidence.threshold": THRESHOLD, **fields})
    received = sent_down(problem)
    cohort = Cohort(jnp.array([0]), {}, jax.random.key(4))
    made = METHODS["catchfed"].factory(problem).label(received, data, cohort, None)
    model = in_numpy(received.model.params)
    x = pixels_of(data, data.client_index[0, :SIZE]) - statistics_of(received.model)
    return made, x @ model["kernel"] + model["bias"]


def accepted_by_hand(logits, energy, adaptive):
    p = softmax(logits)
    label, best = p.argmax(axis=1), p.max(axis=1)
    counts = np.bincount(label[best >= THRESHOLD], minlength=3)
    share = counts / max(counts.max(), len(p) - counts.sum())
    needed = THRESHOLD * (share / (2 - share))[label] if adaptive else THRESHOLD
    return (best >= needed) & (-np.log(np.exp(logits).sum(axis=1)) <= energy)


@pytest.mark.parametrize(("energy", "variant"), [(ENERGY, ""), (np.inf, "no_hybrid"), (ENERGY, "no_adaptive")])
def test_a_label_needs_confidence_and_a_low_energy(data, energy, variant):
    fields = METHODS["catchfed"].variants[variant] if variant else {"confidence.kind": "flexmatch"}
    made, logits = labels_of(data, **{"catchfed.energy": ENERGY, "confidence.kind": "flexmatch", **fields})
    expected = accepted_by_hand(logits, energy, adaptive=variant != "no_adaptive")
    np.testing.assert_array_equal(made.report.qualified[0, :SIZE], expected)
    np.testing.assert_array_equal(made.weights[0, :SIZE], expected)
    np.testing.assert_array_equal(made.report.labels[0, :SIZE], logits.argmax(axis=1))
    np.testing.assert_allclose(made.more[0, :SIZE], softmax(logits), atol=1e-5)
    assert 0 < expected.sum() < SIZE or variant == "no_hybrid"
