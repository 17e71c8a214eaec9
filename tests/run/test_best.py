"""The model of the best round on validation images: kept by the run, loaded on request."""

import json
import shutil

import jax
import numpy as np
import pytest

import launch
from fedjax_ssl import UserError, load, train
from fedjax_ssl.data import load_dataset
from fedjax_ssl.run.observe.listeners import KeepBest
from tests.helpers.stub import make_stub_config

FIELDS = {"data.validation": 200, "checkpoint_every": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("best") / "run"
    train(make_stub_config(**FIELDS, num_rounds=7), workdir)
    return workdir


def test_the_best_checkpoint_is_the_model_of_the_best_round(run):
    """The kept model, run on the validation images, has the largest of the recorded accuracies; the newest has not."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["validation_accuracy"] for line in lines]
    best, newest = (load(run, allow_code=True, checkpoint=name) for name in ("best", "newest"))
    assert best.round == 1 + int(np.argmax(accuracies)) < newest.round == 7
    digits, rows = load_dataset(make_stub_config().data), np.load(run / "partition.npz")["validation_index"]
    for predict in (best, newest):
        right = np.mean(predict(digits.x_train[rows]).labels == digits.y_train[rows])
        assert right == pytest.approx(accuracies[predict.round - 1])


def test_a_resumed_run_finds_the_same_best_model(run, tmp_path):
    """It stops after three rounds of seven, and what a later checkpoint wrote is set aside."""
    workdir = tmp_path / "again"
    train(make_stub_config(**FIELDS, num_rounds=3), workdir)
    train(make_stub_config(**FIELDS, num_rounds=7), workdir)
    found, expected = (load(folder, allow_code=True, checkpoint="best") for folder in (workdir, run))
    assert found.round == expected.round
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    assert len(list((workdir / "best").glob("[0-9]*.json"))) <= 2


def test_several_seeds_have_each_their_own(run, tmp_path):
    workdir = tmp_path / "seeds"
    train(make_stub_config(**FIELDS, num_rounds=7, seeds=(0, 1)), workdir)
    for seed in (0, 1):
        summary = json.loads((workdir / f"seed_{seed}" / "summary.json").read_text())
        assert load(workdir / f"seed_{seed}", allow_code=True, checkpoint="best").round == summary["best_round"]
    jax.tree.map(
        np.testing.assert_array_equal, load(workdir / "seed_0", True, "best").params, load(run, True, "best").params
    )


def test_the_command_line_takes_it_on_request(run, tmp_path, capfd):
    digits, best = load_dataset(make_stub_config().data), load(run, True, "best")
    np.savez(tmp_path / "images.npz", images=digits.x_test)
    out = tmp_path / "out.npz"
    words = [f"--workdir={run}", f"--npz={tmp_path / 'images.npz'}", f"--out={out}", "--allow_code"]
    assert launch.main(["predict", *words, "--checkpoint=best"]) == 0
    np.testing.assert_array_equal(np.load(out)["labels"], best(digits.x_test).labels)
    words = ["export", str(run), "--format=hub", f"--out={tmp_path / 'hub'}", "--allow_code", "--checkpoint=best"]
    assert launch.main(words) == 0
    card = (tmp_path / "hub" / "README.md").read_text()
    assert f"The model is that of round {best.round}." in card and "Unfinished" not in card
    last = json.loads((run / "summary.json").read_text())["test_accuracy"]
    assert f"{100 * last:.2f} %" not in card  # the figures of another round
    assert launch.main(["predict", f"--workdir={run}", "--npz=x", "--out=y.csv", "--checkpoint=bset"]) == 2
    assert "checkpoint is 'bset'; the nearest is best; known: newest, best" in capfd.readouterr().err


def test_a_run_without_validation_images_has_none(stub_run, run, tmp_path):
    with pytest.raises(UserError, match=r"has no best checkpoint: validation images choose it, as with data\.valid"):
        load(stub_run[0], allow_code=True, checkpoint="best")
    assert not (stub_run[0] / "best").exists()
    shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "best")
    with pytest.raises(UserError, match=r"there is no checkpoint in .*best; put files of a copy back"):
        load(tmp_path / "copy", allow_code=True, checkpoint="best")


def test_an_accuracy_of_zero_may_be_the_best():
    assert KeepBest._of([{"round": number, "validation_accuracy": 0.0} for number in (1, 2)]) == (0.0, 1)
