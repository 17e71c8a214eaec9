"""CATCHFed without one of the two conditions for a label. Whole rounds are in tests/official/catchfed.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.interface import Cohort
from fedjax_ssl.methods import METHODS
from tests.helpers.linear_network import in_numpy, softmax
from tests.helpers.small_problem import federation, itself, pixels_of, sent_down, small_problem, statistics_of

SIZE, THRESHOLD, ENERGY = 8, 0.6, -2.0


@pytest.mark.parametrize("variant", ["no_hybrid", "no_adaptive"])
def test_a_label_needs_confidence_and_a_low_energy(variant):
    """Unless it is `no_hybrid`; the threshold falls with a class's labels, unless it is `no_adaptive`."""
    data = federation([[-1] * SIZE], at_server=[0, 1])
    fields = {"confidence.kind": "flexmatch", **METHODS["catchfed"].variants[variant]}
    fields |= {"confidence.threshold": THRESHOLD, "catchfed.energy": ENERGY}
    problem = small_problem("catchfed", weak=itself, **fields)
    received, cohort = sent_down(problem), Cohort(jnp.array([0]), {}, jax.random.key(4))
    made = METHODS["catchfed"].factory(problem).label(received, data, cohort, None)

    model = in_numpy(received.model.params)
    logits = (pixels_of(data, data.client_index[0, :SIZE]) - statistics_of(received.model)) @ model["kernel"]
    logits += model["bias"]
    p = softmax(logits)
    label, best = p.argmax(axis=1), p.max(axis=1)
    counts = np.bincount(label[best >= THRESHOLD], minlength=3)
    share = counts / max(counts.max(), SIZE - counts.sum())
    by_class, low_energy = THRESHOLD * (share / (2 - share))[label], -np.log(np.exp(logits).sum(axis=1)) <= ENERGY
    expected = (best >= THRESHOLD) & low_energy if variant == "no_adaptive" else best >= by_class
    assert np.any(expected != (best >= by_class) & low_energy)
    np.testing.assert_array_equal(made.report.qualified[0, :SIZE], expected)
    np.testing.assert_array_equal(made.weights[0, :SIZE], expected)
