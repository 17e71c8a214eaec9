"""The tests compile as fast as possible, which must give the same numbers as users get."""

import os

import jax
import numpy as np

from fedjax_ssl.engine.round import make_round
from fedjax_ssl.run.experiment import build_experiment, initialise
from tests.helpers.runs import make_fedanchor_config

# XLA's defaults of the flags with which the tests compile, see `FAST_COMPILING` of tests/helpers/compiling.py.
DEFAULTS = {"xla_backend_optimization_level": "3", "xla_cpu_use_fusion_emitters": "True"}
AS_USERS = {name: value for name, value in DEFAULTS.items() if name in os.environ["XLA_FLAGS"]}


def test_a_round_compiled_as_users_do_has_the_same_numbers():
    """Compares convolutions, gradients, pseudo-labels, aggregation and evaluation from the same state."""
    small = {
        "method": "fixmatch",
        "augment.flavour": "none",
        "confidence.threshold": 0.2,
        "client.epochs": 1,
        "server.epochs": 0,
    }
    experiment = build_experiment(make_fedanchor_config(**small))
    state = jax.jit(lambda data: initialise(experiment, data))(experiment.data)
    arguments = state, experiment.data, experiment.hidden_labels
    lowered = jax.jit(make_round(experiment.problem, experiment.method, 1)).lower(*arguments)
    quick, optimised = lowered.compile(), lowered.compile(AS_USERS)
    sizes = {len(program.runtime_executable().serialize()) for program in (quick, optimised)}
    assert len(sizes) == 2  # two different programs
    (first, result), (second, expected) = quick(*arguments), optimised(*arguments)
    for name, value in expected.metrics.items():
        np.testing.assert_allclose(result.metrics[name], value, rtol=1e-4, err_msg=name)
    moved = 0.0
    for mine, reference, start in zip(*(jax.tree.leaves(s.model.params) for s in (first, second, state))):
        np.testing.assert_allclose(mine, reference, atol=1e-5)
        moved = max(moved, float(np.max(np.abs(reference - start))))
    assert moved > 1e-3
