"""Compressed updates against NumPy, their bytes, and error feedback through rounds."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.untrusted.compression import compressed, compressed_bytes, int8, num_kept, remembers, top_k
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


def test_what_was_left_out_comes_later():
    """Error feedback: over rounds, what arrived and what is still lost are all that was learned."""
    options = types.SimpleNamespace(kind="top_k", share=0.2, error_feedback=True)
    assert remembers(options) and not remembers(types.SimpleNamespace(kind="int8", error_feedback=True))
    compress = jax.jit(lambda updates, lost, keys: compressed(options, updates, lost, keys))
    lost = jax.tree.map(lambda leaf: np.zeros((3, *leaf.shape), np.float32), an_update())
    learned, arrived_in_all = (jax.tree.map(np.zeros_like, lost) for _ in range(2))
    keys = jax.random.split(jax.random.key(0), 3)
    for number in range(6):
        updates = jax.tree.map(lambda *leaves: np.stack(leaves), *(an_update(10 * number + row) for row in range(3)))
        arrived, lost = jax.device_get(compress(updates, lost, keys))
        learned = jax.tree.map(np.add, learned, updates)
        arrived_in_all = jax.tree.map(np.add, arrived_in_all, arrived)
        sent = sum(np.count_nonzero(np.reshape(leaf, (3, -1)), axis=1) for leaf in arrived.values())
        np.testing.assert_array_equal(sent, [num_kept(27, 0.2)] * 3)
    for name in learned:
        np.testing.assert_allclose(arrived_in_all[name] + lost[name], learned[name], rtol=1e-5, atol=1e-5)
    plain, nothing = compress(updates, None, keys)
    assert nothing is None
    sent = sum(np.count_nonzero(np.reshape(leaf, (3, -1)), axis=1) for leaf in plain.values())
    np.testing.assert_array_equal(sent, [num_kept(27, 0.2)] * 3)
    for name, leaf in plain.items():
        np.testing.assert_array_equal(leaf, np.where(leaf != 0, updates[name], 0))


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
