"""Compressed updates against NumPy, and their bytes; through rounds see test_delivery.py."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.untrusted.compression import compressed_bytes, int8, num_kept, top_k
from fedjax_ssl.ops.trees import tree_bytes
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.wire import bytes_per_client
from tests.helpers.runs import make_tiny_config


def an_update(seed=0):
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(5, 4)).astype(np.float32), "b": 10 * rng.normal(size=7).astype(np.float32)}


def test_eight_bits_are_whole_steps_and_right_in_the_mean():
    update = an_update()
    drawn = jax.jit(jax.vmap(lambda key: int8(update, key, 0.0)))(jax.random.split(jax.random.key(0), 4000))
    for name, leaf in update.items():
        step = np.abs(leaf).max() / 127
        levels = np.asarray(drawn[name]) / step
        np.testing.assert_allclose(levels, np.round(levels), atol=1e-3)
        assert np.all(np.abs(drawn[name] - leaf) < step * 1.001)
        # The mean of 4,000 drawings: five standard errors of a step that is up or down.
        assert np.max(np.abs(np.mean(drawn[name], axis=0) - leaf)) < 5 * 0.5 * step / np.sqrt(4000)
    zero = int8({"a": jnp.zeros(3)}, jax.random.key(0), 0.0)
    np.testing.assert_array_equal(zero["a"], np.zeros(3))


@pytest.mark.parametrize("share", [0.01, 0.2, 1.0])
def test_the_largest_numbers_of_all_tensors_together(share):
    update = an_update(1)
    flat = np.concatenate([update["a"].ravel(), update["b"]])
    kept = int(np.ceil(share * len(flat)))
    assert num_kept(len(flat), share) == kept
    smallest = np.sort(np.abs(flat))[-kept]
    found = jax.jit(lambda update: top_k(update, None, share))(update)
    np.testing.assert_array_equal(
        np.concatenate([np.ravel(found["a"]), found["b"]]), np.where(np.abs(flat) >= smallest, flat, 0)
    )


def test_bytes_are_those_of_the_compressed_form():
    params = an_update()
    assert compressed_bytes(types.SimpleNamespace(kind="int8"), params) == 27 + 4 * 2
    assert compressed_bytes(types.SimpleNamespace(kind="top_k", share=0.1), params) == 3 * 8
    ups = {}
    for kind in ("none", "int8"):
        experiment = build_experiment(make_tiny_config(**{"compression.kind": kind}))
        ups[kind] = bytes_per_client(experiment.problem, experiment.method, experiment.state_shape, experiment.data).up
    params = {name: experiment.state_shape.model.params[name] for name in ("backbone", "classifier")}
    assert ups["none"] == tree_bytes(params)
    assert ups["int8"] == tree_bytes(params) // 4 + 4 * len(jax.tree.leaves(params))


def test_methods_that_count_their_bytes_themselves_refuse_it():
    with pytest.raises(UserError, match=r"compression\.kind='int8' is not for fedmatch, which counts its bytes itself"):
        build_experiment(make_tiny_config(**{"compression.kind": "int8", "method": "fedmatch"}))
