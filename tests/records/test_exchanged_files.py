"""Another run's files in a run's folder, and edited files: never used or shown without a warning."""

import json
import re
import shutil

import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import UserError, train
from fedjax_ssl.base.files import replace_arrays
from fedjax_ssl.data import load_dataset, sources
from fedjax_ssl.data.partition_file import load_partition
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.records.sealed import read_dataset, write_dataset
from fedjax_ssl.run import decided
from tests.helpers.runs import everything_in
from tests.helpers.stub import make_stub_config

FIELDS = {"data.labels": "clients", "data.labelled_share": 0.5}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs with different seeds: RUNS/seed_0 and RUNS/seed_1."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        train(make_stub_config(seed=seed, **FIELDS), folder / f"seed_{seed}")
    return folder


@pytest.fixture
def run(runs, tmp_path):
    shutil.copytree(runs / "seed_0", tmp_path / "run")
    return tmp_path / "run"


def own(**overrides):
    return make_stub_config(**{**FIELDS, **overrides})


def assert_refused(run, words, **fields):
    """Each use of a run gives one line and changes nothing; a report names the damage."""
    before = everything_in(run)
    uses = {
        "resumed": lambda: train(own(num_rounds=5, **fields), run),
        "loaded": lambda: fedjax_ssl.load(run, allow_code=True),
        "begun with": lambda: train(own(init_from=str(run)), run.parent / "other"),
    }
    for use in uses.values():
        with pytest.raises(UserError, match=words) as caught:
            use()
        assert "\n" not in str(caught.value) and str(run) in str(caught.value)
        assert everything_in(run) == before and not (run.parent / "other").exists()
    assert any(re.search(words, line) for line in read_run(run).damages)


def take_checkpoint(run, other):
    shutil.rmtree(run / "checkpoints" / "4")
    shutil.copytree(other / "checkpoints" / "4", run / "checkpoints" / "4")
    shutil.copy(other / "checkpoints" / "4.json", run / "checkpoints")


def take_checkpoint_and_records(run, other):
    shutil.copy(other / "metrics.jsonl", run)
    take_checkpoint(run, other)


def edit_partition(run, edit):
    """Replaces partition.npz by an edited, valid one."""
    arrays = dict(np.load(run / "partition.npz"))
    edit(arrays)
    replace_arrays(run / "partition.npz", **arrays)
    load_partition(run / "partition.npz", 1437, 8)


def swap_rows(arrays):
    first, last = arrays["client_index"][[0, -1]]
    arrays["client_index"][[0, -1]] = last, first


def show_a_label(arrays):
    hidden = np.setdiff1d(arrays["client_index"], arrays["labelled_index"])
    arrays["labelled_index"] = np.append(arrays["labelled_index"], hidden[:1])


def of_other_images(run, _):
    write_dataset(run, {**read_dataset(run), "mean": [0.25]})


def edit_learning_rate(run, _):
    saved = json.loads((run / "config.json").read_text())
    saved["client"]["learning_rate"] = 0.5
    (run / "config.json").write_text(json.dumps(saved))


# A run that starts from this run's model looks for labels that it must not know, before it reads a checkpoint.
ANOTHER_PARTITION = "partition.npz is not what the checkpoint .*/4 was trained with|labels that are hidden in this one"
IS_NOT = r".json is not what the checkpoint .*/4 was trained with"
OF_ANOTHER = r"config.json is not what .*/4 was trained with \(seed: 1 there, 0 here\)"
DAMAGES = {  # how a run is damaged, given another one; words about it; fields that the run is resumed with
    "rows": (lambda run, _: edit_partition(run, swap_rows), ANOTHER_PARTITION, {}),
    "a label": (lambda run, _: edit_partition(run, show_a_label), ANOTHER_PARTITION, {}),
    "a partition": (lambda run, other: shutil.copy(other / "partition.npz", run), ANOTHER_PARTITION, {}),
    "images": (of_other_images, rf"dataset{IS_NOT} \(mean: ", {}),
    "a checkpoint": (take_checkpoint_and_records, OF_ANOTHER, {}),
    "a configuration": (
        lambda run, other: shutil.copy(other / "config.json", run),
        rf"config{IS_NOT} \(seed: 0 there, 1 here\)",
        {"seed": 1},
    ),
    "a field": (
        edit_learning_rate,
        rf"config{IS_NOT} \(client.learning_rate: .* there, 0.5 here\)",
        {"client.learning_rate": 0.5},
    ),
}


@pytest.mark.parametrize("damage, words, fields", DAMAGES.values(), ids=DAMAGES)
def test_what_was_exchanged_is_told(run, runs, damage, words, fields):
    """An edited configuration also if the run is resumed with it, as by `--workdir=RUN` alone."""
    damage(run, runs / "seed_1")
    assert_refused(run, words, **fields)


def test_a_partition_that_is_gone_is_drawn_again(run, tmp_path):
    before = dict(np.load(run / "partition.npz"))
    (run / "partition.npz").unlink()
    train(own(num_rounds=5), run)
    np.testing.assert_equal(dict(np.load(run / "partition.npz")), before)


def test_a_partition_that_would_be_drawn_otherwise_is_noticed(run, monkeypatch):
    """Another version of the library might draw it differently."""
    drawn = decided.make_partition_of
    monkeypatch.setattr(decided, "make_partition_of", lambda *given: drawn(*given[:3], 7))
    (run / "partition.npz").unlink()
    with pytest.raises(UserError, match=r"the partition is not what the checkpoint .*/4 was trained with"):
        train(own(num_rounds=5), run)


def test_what_may_change_may_change(run):
    """Such a run is resumed and loaded. Another machine may round statistics otherwise."""
    fields, facts = {"num_rounds": 5, "snapshot_rounds": (1,)}, read_dataset(run)
    (run / "config.json").write_text(json.dumps({**json.loads((run / "config.json").read_text()), **fields}))
    write_dataset(run, {**facts, "mean": [facts["mean"][0] * (1 + 1e-9)]})
    fedjax_ssl.load(run, allow_code=True)
    assert not read_run(run).damages
    train(own(**fields), run)
    assert fedjax_ssl.load(run, allow_code=True).round == 5 and not read_run(run).damages


@pytest.mark.parametrize("which", ["x_train", "y_train", "x_test", "y_test"])
def test_what_was_exchanged_in_the_data(run, which, monkeypatch):
    """Two images of a class, or two labels: counts, means and the partition file stay the same."""
    read = sources._load_digits

    def read_digits():
        dataset = read()
        labels = dataset.y_train if which.endswith("train") else dataset.y_test
        second = int(np.argmax(labels != labels[0])) if which.startswith("y") else 1
        values = getattr(dataset, which)
        values[[0, second]] = values[[second, 0]]
        return dataset

    before = everything_in(run)
    monkeypatch.setattr(sources, "_load_digits", read_digits)
    with pytest.raises(UserError, match=r"^the data set is not what the checkpoint .*/4 was trained with") as caught:
        train(own(num_rounds=5), run)
    assert "\n" not in str(caught.value) and everything_in(run) == before


def test_data_that_have_moved_are_known_by_their_content(tmp_path):
    """A file under another name is the same data; another file under the same name is not."""
    digits = load_dataset(own().data)
    arrays = {name: getattr(digits, name) for name in ("x_train", "y_train", "x_test", "y_test")}
    replace_arrays(tmp_path / "a.npz", **arrays)
    fields = {"data.source": "npz", "data.path": str(tmp_path / "a.npz")}
    train(own(**fields), tmp_path / "run")
    (tmp_path / "a.npz").rename(tmp_path / "b.npz")
    fields["data.path"] = str(tmp_path / "b.npz")
    train(own(num_rounds=5, **fields), tmp_path / "run")
    assert not read_run(tmp_path / "run").damages
    assert fedjax_ssl.load(tmp_path / "run", allow_code=True).round == 5
    replace_arrays(tmp_path / "b.npz", **{**arrays, "x_test": arrays["x_test"][::-1]})
    with pytest.raises(UserError, match=r"^the data set is not .* \(other test inputs, or in another order\)"):
        train(own(num_rounds=6, **fields), tmp_path / "run")


def test_a_checkpoint_of_another_run(run, runs, capfd):
    """It is not loaded. Training goes back a checkpoint, because the records do not fit this one."""
    take_checkpoint(run, runs / "seed_1")
    with pytest.raises(UserError, match=OF_ANOTHER):
        fedjax_ssl.load(run, allow_code=True)
    assert any(re.search(OF_ANOTHER, line) for line in read_run(run).damages)
    train(own(), run)
    assert "is not what was written; the run goes on from round 2" in capfd.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == (runs / "seed_0" / "metrics.jsonl").read_bytes()


def test_a_summary_of_another_run_is_written_anew(run, runs):
    right = json.loads((run / "summary.json").read_text())
    shutil.copy(runs / "seed_1" / "summary.json", run)
    found = read_run(run)
    assert not found.is_finished and any("summary.json is not of the records" in line for line in found.damages)
    train(own(), run)
    mended = json.loads((run / "summary.json").read_text())
    assert {name: mended[name] for name in ("seed", "test_accuracy")} == {
        name: right[name] for name in ("seed", "test_accuracy")
    }


def test_a_partition_in_a_new_folder_is_not_taken(runs, tmp_path):
    (tmp_path / "new").mkdir()
    shutil.copy(runs / "seed_1" / "partition.npz", tmp_path / "new")
    train(own(num_rounds=1), tmp_path / "new")
    np.testing.assert_equal(
        dict(np.load(tmp_path / "new" / "partition.npz")), dict(np.load(runs / "seed_0" / "partition.npz"))
    )
