"""Checkpoints: saved states are restored, damage is noticed, misfits are reported."""

import hashlib
import json
import os
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.interface import State
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.records.checkpoints import Checkpoints
from tests.helpers.runs import everything_in, files_of_at_most


def state_of(number=0):
    """A small state with entries of every kind; `number` is added to each."""
    model = Model({"backbone": {"kernel": jnp.arange(6.0).reshape(2, 3)}, "classifier": jnp.array([1.0, 2.0])},
                  {"norm": {"mean": jnp.array([0.5])}})  # fmt: skip
    server = {"aggregation": (), "model": jax.tree.map(lambda leaf: leaf + 10, model)}
    clients = {"threshold": {"rounds": jnp.arange(4)}}
    return jax.tree.map(lambda leaf: leaf + number, State(jnp.int32(3), model, server, clients))


def shapes(state):
    return jax.eval_shape(lambda: state)


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def test_the_newest_is_restored_and_old_ones_go(folder):
    checkpoints = Checkpoints(folder)
    assert checkpoints.rounds() == []
    for number in (1, 2, 3):
        checkpoints.save(number, state_of(number))
    again = Checkpoints(folder)
    assert again.rounds() == [2, 3]
    assert sorted(path.name for path in folder.iterdir()) == ["2", "2.json", "3", "3.json"]
    assert_equal(again.restore(shapes(state_of())).state, state_of(3))
    model = again.restore(State(None, shapes(state_of()).model), part=True).state.model
    assert_equal(model, state_of(3).model)


def test_what_does_not_fit_is_said(folder):
    state = state_of()
    checkpoints, like = Checkpoints(folder), shapes(state)
    checkpoints.save(5, state)
    kernel = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    wider = like._replace(model=Model({**like.model.params, "backbone": {"kernel": kernel}}, like.model.batch_stats))
    of_kernel = r"\.model\.params\['backbone'\]\['kernel'\] is \(2, 3\) there, and \(2, 4\) here"
    cases = [
        (like._replace(clients={}), r"\['rounds'\] is \(4,\) there, and unknown here"),
        (like._replace(clients={**like.clients, "z": kernel}), r"\.clients\['z'\] is missing there"),
        (wider, of_kernel),
    ]
    for wrong, words in cases:
        with pytest.raises(UserError, match=f"does not fit this configuration in this version: .*{words}"):
            checkpoints.restore(wrong)
    with pytest.raises(UserError, match=of_kernel):
        checkpoints.restore(State(None, wider.model), part=True)
    with pytest.raises(UserError, match=r"head.* is missing there"):
        checkpoints.restore(State(None, Model({"head": kernel}, {})), part=True)
    with pytest.raises(UserError, match="there is no checkpoint in"):
        Checkpoints(folder.parent / "elsewhere").restore(State(None, like.model), part=True)
    with pytest.raises(UserError, match="there is no checkpoint 7 in"):
        checkpoints.restore(State(None, like.model), round_number=7, part=True)


@pytest.fixture
def two(folder):
    """A folder with checkpoints of rounds 2 and 4."""
    checkpoints = Checkpoints(folder)
    for number in (2, 4):
        checkpoints.save(number, state_of(number))
    return folder


def files_of(checkpoint):
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def assert_passed_over(folder, words):
    """Readers skip checkpoint 4, the newest, and take 2; reading changes nothing."""
    before, like = everything_in(folder), shapes(state_of())
    found = Checkpoints(folder).restore(like)
    assert_equal(found.state, state_of(2))
    part = Checkpoints(folder).restore(State(None, like.model), part=True)
    assert_equal(part.state.model, state_of(2).model)
    for restored in (found, part):
        assert restored.round == 2 and len(restored.passed_over) == 1
        assert f"{folder / '4'} is damaged: " in restored.passed_over[0] and words in restored.passed_over[0]
    assert everything_in(folder) == before


def test_the_checksums_are_those_of_the_files(two):
    """Compares them with hashlib's; no file may be left out."""
    listed = json.loads((two / "4.json").read_text())["files"]
    files = {path.relative_to(two / "4").as_posix(): path for path in files_of(two / "4")}
    assert listed.keys() == files.keys() and len(listed) >= 8
    for name, digest in listed.items():
        assert hashlib.sha256(files[name].read_bytes()).hexdigest() == digest


def test_a_single_bit_in_any_file_is_noticed(two):
    rng = np.random.default_rng(0)
    for file in [*files_of(two / "4"), two / "4.json"]:
        whole = file.read_bytes()
        if not whole:
            continue
        place, bit = rng.integers(len(whole)), rng.integers(8)
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        assert_passed_over(two, file.name)
        file.write_bytes(whole)
    assert Checkpoints(two).restore(shapes(state_of())).round == 4


def test_what_is_missing_or_too_much_is_noticed(two):
    manifest = two / "4.json"
    for damage, words in [
        (lambda: os.truncate(files_of(two / "4")[-1], 5), "is not what was written"),
        (lambda: files_of(two / "4")[3].unlink(), "is missing"),
        (manifest.unlink, "4.json"),
        (lambda: manifest.write_text("[]"), "it is not what was written"),
        (lambda: (two / "4" / "more").write_text("x"), "more is not what was written"),
        (lambda: (shutil.rmtree(two / "4"), (two / "4").mkdir()), "is missing"),
        (lambda: (shutil.rmtree(two / "4"), shutil.copytree(two / "2", two / "4")), "is not what was written"),
        (lambda: shutil.copy(two / "2.json", manifest), "its state is that of round 2"),
    ]:
        shutil.copytree(two, two.parent / "whole")
        damage()
        assert_passed_over(two, words)
        shutil.rmtree(two)
        os.rename(two.parent / "whole", two)
    (two / "4" / ".DS_Store").write_text("of a file manager")
    assert Checkpoints(two).restore(shapes(state_of())).round == 4


def test_what_was_passed_over_is_set_aside_and_its_round_saved_again(two):
    checkpoints = Checkpoints(two)
    for again in ("4.set_aside", "4.set_aside_2"):
        (two / "4.json").unlink()
        checkpoints.set_aside(after=2)
        assert checkpoints.rounds() == [2] and (two / again).is_dir()
        checkpoints.save(4, state_of(5))
        assert_equal(checkpoints.restore(shapes(state_of())).state, state_of(5))
    checkpoints.set_aside(after=4)
    assert checkpoints.rounds() == [2, 4]


def test_a_checkpoint_that_cannot_be_written_harms_none(two):
    """The disk is full; the next checkpoint removes the remains."""
    large = state_of(6)._replace(records={"large": np.random.default_rng(0).random(100_000)})
    with files_of_at_most(200_000), pytest.raises(OSError, match=r"cannot write the checkpoint .*/6: ") as caught:
        Checkpoints(two).save(6, large)
    assert "\n" not in str(caught.value)
    assert Checkpoints(two).rounds() == [2, 4]
    assert_equal(Checkpoints(two).restore(shapes(state_of())).state, state_of(4))
    Checkpoints(two).save(6, state_of(6))
    assert sorted(path.name for path in two.iterdir()) == ["4", "4.json", "6", "6.json"]


def test_a_killed_process_leaves_what_the_next_one_can_use(two):
    """Before the manifest is written, a checkpoint counts as damaged."""
    killed = mock.patch("fedjax_ssl.records.checkpoints.write_manifest", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        Checkpoints(two).save(6, state_of(6))
    found = Checkpoints(two).restore(shapes(state_of()))
    assert found.round == 4 and "6 is damaged" in found.passed_over[0]
    assert_equal(found.state, state_of(4))
