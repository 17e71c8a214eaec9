"""Checkpoints: what is saved is restored, an earlier version's names too, and what does not fit is said."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from fedjax_ssl.engine.interface import State
from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.records.checkpoints import Checkpoints


def state_of(number=0):
    """Small, with an entry of every kind; `number` is added to each."""
    model = Model({"backbone": {"kernel": jnp.arange(6.0).reshape(2, 3)}, "classifier": jnp.array([1.0, 2.0])},
                  {"norm": {"mean": jnp.array([0.5])}})  # fmt: skip
    server = {"aggregation": (), "model": jax.tree.map(lambda leaf: leaf + 10, model)}
    clients = {"threshold": {"rounds": jnp.arange(4)}}
    return jax.tree.map(lambda leaf: leaf + number, State(jnp.int32(3), model, server, clients))


def shapes(state):
    return jax.eval_shape(lambda: state)


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, reference in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_array_equal(mine, reference)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def test_the_newest_is_restored_and_old_ones_go(folder):
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest_round() is None
    for number in (1, 2, 3):
        checkpoints.save(number, state_of(number))
    again = Checkpoints(folder)
    assert again.latest_round() == 3 and sorted(path.name for path in folder.iterdir()) == ["2", "3"]
    assert_equal(again.restore(shapes(state_of())).state, state_of(3))
    model = again.restore_part(State(None, shapes(state_of()).model)).state.model
    assert_equal(model, state_of(3).model)


def earlier_name(path):
    """A leaf's name as earlier versions had it: of the global model only, its two parts were entries of the state."""
    name = jax.tree_util.keystr(path)
    return name.replace(".model.", ".", 1) if path[0].name == "model" else name


@pytest.fixture
def earlier(folder):
    """A checkpoint of an earlier version, made with Orbax alone, and the state that is in it."""
    state = state_of(7)
    leaves, _ = jax.tree.flatten_with_path(state)
    item = {f"{number:05d}{earlier_name(path)}": leaf for number, (path, leaf) in enumerate(leaves)}
    assert "00001.params['backbone']['kernel']" in item and "00003.batch_stats['norm']['mean']" in item
    with ocp.CheckpointManager(folder.absolute()) as manager:
        manager.save(5, args=ocp.args.StandardSave(item))
    return folder, state


def test_an_earlier_versions_names_are_known(earlier):
    """To a run that is resumed, and to whoever loads the model alone."""
    folder, state = earlier
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest_round() == 5
    assert_equal(checkpoints.restore(shapes(state)).state, state)
    found = checkpoints.restore_part(State(None, shapes(state).model)).state
    assert_equal(found.model, state.model)


def test_what_does_not_fit_is_said(earlier):
    folder, state = earlier
    checkpoints, like = Checkpoints(folder), shapes(state)
    kernel = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    wider = like._replace(model=Model({**like.model.params, "backbone": {"kernel": kernel}}, like.model.batch_stats))
    cases = [
        (like._replace(clients={}), r"\['rounds'\] is only in the checkpoint"),
        (like._replace(clients={**like.clients, "z": kernel}), r"\.clients\['z'\] is not in the checkpoint"),
        (wider, r"\.model\.params\['backbone'\]\['kernel'\] has shape \(2, 3\), not \(2, 4\)"),
    ]
    for wrong, words in cases:
        with pytest.raises(UserError, match=f"does not fit this configuration: .*{words}"):
            checkpoints.restore(wrong)
    with pytest.raises(UserError, match=r"has shape \(2, 3\), not \(2, 4\)"):
        checkpoints.restore_part(State(None, wider.model))
    with pytest.raises(UserError, match=r"it has no .*head"):
        checkpoints.restore_part(State(None, Model({"head": kernel}, {})))
    with pytest.raises(UserError, match="there is no checkpoint in"):
        Checkpoints(folder.parent / "elsewhere").restore_part(State(None, like.model))
