"""A model taken away: it says what the run's own evaluation said, and meets bad input with one line."""

import json
import os
import shutil

import jax
import numpy as np
import pytest

import fedjax_ssl
import launch
from conftest import SMALL, make_fedanchor_config
from fedjax_ssl import UserError
from fedjax_ssl.data import load_dataset
from fedjax_ssl.predictor import BATCH_SIZE
from fedjax_ssl.run.experiment import build_experiment


@pytest.fixture(scope="module")
def predict(finished_fedanchor_run):
    return fedjax_ssl.load(finished_fedanchor_run[0], allow_code=True)


@pytest.fixture(scope="module")
def digits():
    return load_dataset(make_fedanchor_config().data)


def test_predictions_are_those_of_the_trained_network(predict, digits, finished_fedanchor_run):
    workdir, state = finished_fedanchor_run
    assert predict.round == 4 and predict.image_shape == (8, 8, 1) and predict.class_names == tuple("0123456789")
    found = predict(digits.x_test)  # 360 images: a whole batch and a part of one
    assert BATCH_SIZE < len(digits.x_test) < 2 * BATCH_SIZE
    network = build_experiment(make_fedanchor_config(**SMALL)).problem.network
    outputs = network.predict(state.model, digits.x_test)
    np.testing.assert_allclose(found.probabilities, jax.nn.softmax(outputs.logits), atol=1e-5)
    np.testing.assert_allclose(found.embeddings, outputs.heads["anchor_head"], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(found.labels, np.argmax(found.probabilities, axis=1))
    summary = json.loads((workdir / "summary.json").read_text())
    assert np.mean(found.labels == digits.y_test) == pytest.approx(summary["test_accuracy"])
    # Grey images without their channel axis, and floats of the same range, are the same images.
    again = predict(digits.x_test[:5, :, :, 0].astype(np.float64))
    np.testing.assert_allclose(again.probabilities, found.probabilities[:5], atol=1e-6)


def test_a_file_of_images(predict, digits, finished_fedanchor_run, tmp_path):
    np.savez(tmp_path / "images.npz", other=np.zeros(3), mine=digits.x_test[:7])
    words = [
        "predict",
        f"--workdir={finished_fedanchor_run[0]}",
        f"--npz={tmp_path / 'images.npz'}",
        "--key=mine",
        "--allow_code",
    ]
    assert launch.main([*words, f"--out={tmp_path / 'new' / 'out.npz'}"]) == 0
    with np.load(tmp_path / "new" / "out.npz") as out:
        assert set(out) == {"labels", "probabilities", "embeddings"}
        np.testing.assert_array_equal(out["labels"], predict(digits.x_test[:7]).labels)
        assert out["probabilities"].shape == (7, 10) and out["embeddings"].shape == (7, 128)


def test_images_of_another_kind_are_refused(predict):
    for images, line in [
        (np.zeros((2, 8, 8, 3), np.uint8), r"shape \(2, 8, 8, 3\); the model takes .* 8x8x1"),
        (np.zeros((2, 9, 8), np.uint8), "the model takes"),
        (np.zeros((0, 8, 8, 1), np.uint8), "there are no images"),
        (np.full((1, 8, 8), 256.0), "outside of 0 to 255"),
        (np.full((1, 8, 8), np.nan), "outside of 0 to 255"),
        (np.linspace(0, 1, 64).reshape(1, 8, 8), "no value above 1"),
        (np.array([[["a"] * 8] * 8]), "numbers from 0 to 255"),
    ]:
        with pytest.raises(UserError, match=line):
            predict(images)


def test_bad_input_is_one_line_and_writes_nothing(finished_fedanchor_run, tmp_path, capfd):
    images, out = tmp_path / "images.npz", tmp_path / "out.npz"
    np.savez(images, images=np.zeros((2, 9, 9), np.uint8))
    np.savez(tmp_path / "several.npz", a=np.zeros(2), b=np.zeros(2))
    (tmp_path / "text.npz").write_text("no archive")
    np.save(tmp_path / "single.npy", np.zeros(2))
    for name in ("old", "begun", "torn", "own", "gone"):
        shutil.copytree(finished_fedanchor_run[0], tmp_path / name)
    (tmp_path / "old" / "dataset.json").unlink()
    shutil.rmtree(tmp_path / "begun" / "checkpoints")
    (tmp_path / "torn" / "config.json").write_text('{"method": ')
    own = json.loads((tmp_path / "own" / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps({**own, "method": "of_a_notebook"}))
    (tmp_path / "gone" / "config.json").write_text(json.dumps({**own, "method": "gone/mine.py:mine"}))
    before = sorted(tmp_path.rglob("*"))
    run = finished_fedanchor_run[0]
    for words, line in [
        ({"workdir": run, "npz": images}, "--out is missing"),
        ({"npz": images, "out": out}, "--workdir is missing"),
        ({"workdir": run, "npz": images, "out": out}, "the model takes"),
        ({"workdir": run, "npz": tmp_path / "nothing.npz", "out": out}, "does not exist"),
        ({"workdir": run, "npz": tmp_path / "text.npz", "out": out}, "not an npz file"),
        ({"workdir": run, "npz": tmp_path / "single.npy", "out": out}, "not an npz file"),
        ({"workdir": run, "npz": tmp_path / "several.npz", "out": out}, "--key=NAME"),
        ({"workdir": run, "npz": images, "out": out, "key": "pictures"}, "has no pictures"),
        ({"workdir": tmp_path, "npz": images, "out": out}, "its runs are in begun, gone, old"),
        ({"workdir": tmp_path / "old", "npz": images, "out": out}, "has no dataset.json"),
        ({"workdir": tmp_path / "begun", "npz": images, "out": out}, "there is no checkpoint"),
        ({"workdir": tmp_path / "own", "npz": images, "out": out}, "'of_a_notebook', which is not registered"),
        (
            {"workdir": tmp_path / "gone", "npz": images, "out": out},
            f"no file gone/mine.py, as seen from {os.getcwd()}",
        ),
        ({"workdir": tmp_path / "torn", "npz": images, "out": out}, "cannot read"),
    ]:
        assert launch.main(["predict", "--allow_code", *(f"--{name}={value}" for name, value in words.items())]) == 2, (
            words
        )
        error = capfd.readouterr().err.strip()
        assert error.startswith("error: ") and line in error and "\n" not in error, error
    assert sorted(tmp_path.rglob("*")) == before


def test_an_output_that_cannot_be_written(finished_fedanchor_run, tmp_path, capfd):
    np.savez(tmp_path / "images.npz", np.zeros((2, 8, 8), np.uint8))
    words = ["predict", f"--workdir={finished_fedanchor_run[0]}", f"--npz={tmp_path / 'images.npz'}", "--allow_code"]
    assert launch.main([*words, f"--out={tmp_path / 'images.npz' / 'out.npz'}"]) == 2
    assert "cannot write" in capfd.readouterr().err
