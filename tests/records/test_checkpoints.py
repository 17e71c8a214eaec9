"""Checkpoints: saved states are restored, damage is noticed, earlier names are understood, misfits are reported."""

import hashlib
import os
import shutil

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
    for mine, reference in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_array_equal(mine, reference)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def test_the_newest_is_restored_and_old_ones_go(folder):
    checkpoints = Checkpoints(folder)
    assert checkpoints.rounds() == []
    for number in (1, 2, 3):
        checkpoints.save(number, state_of(number))
    again = Checkpoints(folder)
    assert again.rounds() == [2, 3] and sorted(path.name for path in folder.iterdir()) == ["2", "3"]
    assert_equal(again.restore(shapes(state_of())).state, state_of(3))
    model = again.restore_part(State(None, shapes(state_of()).model)).state.model
    assert_equal(model, state_of(3).model)


def earlier_name(path):
    """A leaf's name in earlier versions, whose state had the global model's two parts as entries."""
    name = jax.tree_util.keystr(path)
    return name.replace(".model.", ".", 1) if path[0].name == "model" else name


@pytest.fixture
def earlier(folder):
    """A checkpoint of an earlier version, made with Orbax alone, and its state."""
    state = state_of(7)
    leaves, _ = jax.tree.flatten_with_path(state)
    item = {f"{number:05d}{earlier_name(path)}": leaf for number, (path, leaf) in enumerate(leaves)}
    assert "00001.params['backbone']['kernel']" in item and "00003.batch_stats['norm']['mean']" in item
    with ocp.CheckpointManager(folder.absolute()) as manager:
        manager.save(5, args=ocp.args.StandardSave(item))
    return folder, state


def test_an_earlier_versions_names_are_known(earlier):
    """For a resumed run, and for loading only the model."""
    folder, state = earlier
    checkpoints = Checkpoints(folder)
    assert checkpoints.rounds() == [5]
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
        with pytest.raises(UserError, match=f"does not fit this configuration in this version: .*{words}"):
            checkpoints.restore(wrong)
    with pytest.raises(UserError, match=r"has shape \(2, 3\), not \(2, 4\)"):
        checkpoints.restore_part(State(None, wider.model))
    with pytest.raises(UserError, match=r"it has no .*head"):
        checkpoints.restore_part(State(None, Model({"head": kernel}, {})))
    with pytest.raises(UserError, match="there is no checkpoint in"):
        Checkpoints(folder.parent / "elsewhere").restore_part(State(None, like.model))


@pytest.fixture
def two(folder):
    """A folder with checkpoints of rounds 2 and 4."""
    checkpoints = Checkpoints(folder)
    for number in (2, 4):
        checkpoints.save(number, state_of(number))
    return folder


def files_of(checkpoint):
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def everything_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_passed_over(folder, words):
    """Readers skip checkpoint 4, the newest, and take 2; reading changes nothing."""
    before, like = everything_in(folder), shapes(state_of())
    found = Checkpoints(folder).restore(like)
    assert_equal(found.state, state_of(2))
    part = Checkpoints(folder).restore_part(State(None, like.model))
    assert_equal(part.state.model, state_of(2).model)
    for restored in (found, part):
        assert restored.round == 2 and len(restored.passed_over) == 1
        assert f"{folder / '4'} is damaged: " in restored.passed_over[0] and words in restored.passed_over[0]
    assert everything_in(folder) == before


def test_the_checksums_are_those_of_the_files(two):
    """Compares them with hashlib's; no file may be left out."""
    listed = dict(reversed(line.split("  ")) for line in (two / "4" / "SHA256SUMS").read_text().splitlines())
    files = {path.relative_to(two / "4").as_posix(): path for path in files_of(two / "4")}
    assert listed.keys() | {"SHA256SUMS"} == files.keys() and len(listed) >= 8
    for name, digest in listed.items():
        assert hashlib.sha256(files[name].read_bytes()).hexdigest() == digest


def test_a_single_bit_in_any_file_is_noticed(two):
    rng = np.random.default_rng(0)
    for file in files_of(two / "4"):
        whole = file.read_bytes()
        place, bit = rng.integers(len(whole)), rng.integers(8)
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        # Here a flipped bit changes a sum or a name.
        assert_passed_over(two, "" if file.name == "SHA256SUMS" else file.name)
        file.write_bytes(whole)
    assert Checkpoints(two).restore(shapes(state_of())).round == 4


def test_what_is_missing_or_too_much_is_noticed(two):
    sums = two / "4" / "SHA256SUMS"
    for damage, words in [
        (lambda: os.truncate(files_of(two / "4")[-1], 5), "is not what was written"),
        (lambda: files_of(two / "4")[3].unlink(), "is missing"),
        (sums.unlink, "there is no SHA256SUMS"),
        (lambda: sums.write_text(""), "is not in SHA256SUMS"),
        (lambda: sums.write_bytes(b"\xff\xfe"), "decode"),
        (lambda: (two / "4" / "state" / "more").write_text("x"), "state/more is not in SHA256SUMS"),
        (lambda: shutil.rmtree(two / "4" / "state"), "is missing"),
        (lambda: (files_of(two / "4")[3].unlink(), os.mkfifo(two / "4" / "state" / "pipe")), "missing"),
        (lambda: (shutil.rmtree(two / "4"), (two / "4").mkdir()), "there is no SHA256SUMS"),
    ]:
        shutil.copytree(two / "4", two.parent / "whole")
        damage()
        assert_passed_over(two, words)
        shutil.rmtree(two / "4")
        os.rename(two.parent / "whole", two / "4")
    (two / "4" / ".DS_Store").write_text("of a file manager")
    assert Checkpoints(two).restore(shapes(state_of())).round == 4


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(two):
    file = files_of(two / "4")[-1]
    file.unlink()
    os.mkfifo(file)
    found = Checkpoints(two).restore(shapes(state_of()))
    assert found.round == 2 and f"{file.name} is not a file" in found.passed_over[0]


def test_a_damaged_one_of_an_earlier_version_is_passed_over_too_if_it_cannot_be_read(earlier):
    """Without checksums only unreadable files are noticed."""
    folder, state = earlier
    shutil.copytree(folder / "5", folder / "7")
    for file in (folder / "7" / "default").rglob("*"):
        if file.is_file() and file.stat().st_size > 20:
            os.truncate(file, file.stat().st_size // 2)
    found = Checkpoints(folder).restore(shapes(state))
    assert_equal(found.state, state)
    assert found.round == 5 and "7 is damaged" in found.passed_over[0]


def test_where_none_is_whole_nothing_is_restored(two):
    for number in (2, 4):
        (two / str(number) / "SHA256SUMS").unlink()
    for read in (
        lambda store: store.restore(shapes(state_of())),
        lambda store: store.restore_part(State(None, shapes(state_of()).model)),
    ):
        with pytest.raises(UserError, match=r"no checkpoint can be used \(.*4 is damaged.*2 is damaged.*another"):
            read(Checkpoints(two))


def test_one_that_is_later_than_the_records_is_passed_over(two):
    like = shapes(state_of())
    found = Checkpoints(two).restore(like, reached=3)
    assert found.round == 2 and "is later than the records, which reach round 3" in found.passed_over[0]
    assert Checkpoints(two).restore(like, reached=4).passed_over == []
    with pytest.raises(UserError, match="later than the records, which reach round 1"):
        Checkpoints(two).restore(like, reached=1)


def test_what_was_passed_over_is_set_aside_and_its_round_saved_again(two):
    checkpoints = Checkpoints(two)
    for again in ("4.set_aside", "4.set_aside_2"):
        (two / "4" / "SHA256SUMS").unlink()
        checkpoints.set_aside(after=2)
        assert checkpoints.rounds() == [2] and (two / again / "state").is_dir()
        checkpoints.save(4, state_of(5))
        assert_equal(checkpoints.restore(shapes(state_of())).state, state_of(5))
    checkpoints.set_aside(after=4)
    assert checkpoints.rounds() == [2, 4]


def test_a_checkpoint_that_cannot_be_written_harms_none(two, monkeypatch):
    """Orbax, the checksums or the final renaming fails; the next checkpoint removes the remains."""
    before = everything_in(two)

    def full(*arguments, **named):
        raise OSError(28, "No space left on device")

    for place, name in [(ocp.Checkpointer, "save"), (os, "fsync"), (os, "rename")]:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            with pytest.raises(OSError, match=r"cannot write the checkpoint .*/6: .*No space left") as caught:
                Checkpoints(two).save(6, state_of(6))
        assert caught.value.errno == 28 and "\n" not in str(caught.value)
        assert {path: text for path, text in everything_in(two).items() if "6.tmp" not in path.parts} == before
        assert Checkpoints(two).rounds() == [2, 4]
    Checkpoints(two).save(6, state_of(6))
    assert sorted(path.name for path in two.iterdir()) == ["4", "6"]


def test_all_is_on_the_disk_before_the_name_says_so(folder, monkeypatch):
    """All files and folders are synced before the renaming, the parent folder after it."""
    done, rename, fsync = [], os.rename, os.fsync

    def synced(number):
        done.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def renamed(old, new):
        done.append("renamed")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    Checkpoints(folder).save(3, state_of())
    at = len(done) - 1 - done[::-1].index("renamed")
    assert done[at + 1 :] == [str(folder)]
    there = {str(path).replace("/3/", "/3.tmp/") for path in (folder / "3").rglob("*")} | {str(folder / "3.tmp")}
    assert there <= set(done[:at])


def test_a_file_in_the_place_of_the_folder_is_said(folder):
    folder.write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        Checkpoints(folder).rounds()
