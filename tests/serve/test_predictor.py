"""The predictor gives the results of the run's evaluation, and answers bad input with one line."""

import csv
import json
import shutil

import jax
import numpy as np
import pytest
from PIL import Image
from sklearn import metrics

import fedjax_ssl
import launch
from fedjax_ssl import UserError
from fedjax_ssl.data import load_dataset
from fedjax_ssl.records.origin import read_starts
from fedjax_ssl.records.sealed import write_sealed
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.serve.predictor import BATCH_SIZE, predict_file
from tests.helpers.runs import SMALL, forget_manifests, make_fedanchor_config

pytestmark = pytest.mark.test_all


@pytest.fixture(scope="module")
def predict(finished_fedanchor_run):
    return fedjax_ssl.load(finished_fedanchor_run[0], allow_code=True)


@pytest.fixture(scope="module")
def digits():
    return load_dataset(make_fedanchor_config().data)


def test_predictions_are_those_of_the_trained_network(predict, digits, finished_fedanchor_run):
    workdir, state = finished_fedanchor_run
    assert predict.round == 4 and predict.shape == (8, 8, 1) and predict.class_names == tuple("0123456789")
    assert repr(predict) == "Predictor(round 4, images 8 x 8 x 1, 10 classes)"
    found = predict(digits.x_test)  # 360 images: a full batch and part of a second one
    assert BATCH_SIZE < len(digits.x_test) < 2 * BATCH_SIZE
    network = build_experiment(make_fedanchor_config(**SMALL)).problem.network
    outputs = network.predict(state.model, digits.x_test)
    np.testing.assert_allclose(found.probabilities, jax.nn.softmax(outputs.logits), atol=1e-5)
    np.testing.assert_allclose(found.embeddings, outputs.heads["anchor_head"], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(found.labels, np.argmax(found.probabilities, axis=1))
    summary = json.loads((workdir / "summary.json").read_text())
    assert np.mean(found.labels == digits.y_test) == pytest.approx(summary["test_accuracy"])
    # Grey images without a channel axis, and floats in the same range, are the same images.
    again = predict(digits.x_test[:5, :, :, 0].astype(np.float64))
    np.testing.assert_allclose(again.probabilities, found.probabilities[:5], atol=1e-6)


def test_a_file_of_images(predict, digits, finished_fedanchor_run, tmp_path):
    np.savez(tmp_path / "images.npz", other=np.zeros(3), mine=digits.x_test[:7])
    run, images, out = finished_fedanchor_run[0], tmp_path / "images.npz", tmp_path / "new" / "out.npz"
    words = [f"--workdir={run}", f"--npz={images}", f"--out={out}"]
    assert launch.main(["predict", *words, "--key=mine", "--allow_code"]) == 0
    with np.load(out) as out:
        assert set(out) == {"labels", "classes", "probabilities", "embeddings", "class_names"}
        np.testing.assert_array_equal(out["labels"], predict(digits.x_test[:7]).labels)
        assert out["probabilities"].shape == (7, 10) and out["embeddings"].shape == (7, 128)


def test_labels_give_an_accuracy(predict, digits, finished_fedanchor_run, tmp_path, capfd):
    labels = digits.y_test.copy()
    labels[::3] = -1  # unknown
    images, out = tmp_path / "images.npz", tmp_path / "out.npz"
    words = ["predict", f"--workdir={finished_fedanchor_run[0]}", f"--npz={images}", f"--out={out}", "--allow_code"]
    right = predict(digits.x_test).labels == digits.y_test
    accuracy = f"accuracy {100 * right[labels >= 0].mean():.2f} % of 240 images with a label"
    for names in (("x_test", "y_test"), ("images", "labels"), ("test_images", "test_labels"), ("x", "labels")):
        np.savez(images, **dict(zip(names, (digits.x_test, labels[:, None] if "test_labels" in names else labels))))
        assert launch.main(words) == 0
        assert accuracy in (said := capfd.readouterr().out)
    truth, named = labels[labels >= 0], predict(digits.x_test).labels[labels >= 0]
    assert f"macro F1 {100 * metrics.f1_score(truth, named, average='macro'):.2f} %, sensitivity " in said
    assert f"Cohen's kappa {100 * metrics.cohen_kappa_score(truth, named):.2f} %, calibration error " in said
    assert "training set" not in said
    np.savez(images, images=np.concatenate([digits.x_train[:3], digits.x_test[:4]]), labels=np.zeros(7, int))
    assert launch.main(words) == 0
    assert (
        "\n3 of the images are in the training set: their accuracy says nothing of new ones" in capfd.readouterr().out
    )
    np.savez(images, images=digits.x_test, labels=labels)
    assert launch.main(words) == 0
    with np.load(out) as found:
        np.testing.assert_array_equal(found["true_labels"], labels)
        assert found["class_names"].tolist() == list("0123456789")
        assert found["classes"].tolist() == [str(label) for label in found["labels"]]
    for wrong, line in (
        (labels[:5], "labels is int32 (5,); it needs 360 labels, one for each example"),
        (labels + 1, "labels: '10' in row "),
        (labels - 5, "labels: '-6' in row 1 is no class of the training data"),
    ):
        np.savez(images, images=digits.x_test, labels=wrong)
        assert launch.main(words) == 2
        assert line in capfd.readouterr().err


def test_a_folder_of_images(predict, digits, finished_fedanchor_run, tmp_path, capfd):
    """Folders with and without labels; images of the model's size and colours, and of others."""
    for number in range(40):
        pixels = digits.x_test[number, :, :, 0]
        picture = Image.fromarray(pixels)
        if number % 2:  # four times as large and coloured: a box filter restores the image
            picture = Image.fromarray(np.repeat(np.repeat(pixels, 4, axis=0), 4, axis=1)).convert("RGB")
        for file in (
            tmp_path / "flat" / f"{number:02}.png",
            tmp_path / "by" / str(digits.y_test[number]) / f"{number}.png",
        ):
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file)
    words = ["predict", f"--workdir={finished_fedanchor_run[0]}", "--allow_code"]
    assert launch.main([*words, f"--images={tmp_path / 'flat'}", f"--out={tmp_path / 'flat.csv'}"]) == 0
    assert "accuracy" not in capfd.readouterr().out
    lines = list(csv.DictReader((tmp_path / "flat.csv").open()))
    assert [line["image"] for line in lines] == [f"{number:02}.png" for number in range(40)]
    alike = predict(digits.x_test[:40:2])
    assert [line["class"] for line in lines[::2]] == alike.classes.tolist()
    assert [float(line["probability"]) for line in lines[::2]] == pytest.approx(
        alike.probabilities.max(axis=1), abs=1e-5
    )
    assert set(lines[0]) == {"image", "class", "probability"}

    assert launch.main([*words, f"--images={tmp_path / 'by'}", f"--out={tmp_path / 'by.csv'}"]) == 0
    said, found = capfd.readouterr().out, list(csv.DictReader((tmp_path / "by.csv").open()))
    right = np.mean([line["class"] == line["true class"] for line in found])
    assert f"accuracy {100 * right:.2f} % of 40 images" in said
    assert {line["image"].partition("/")[0] == line["true class"] for line in found} == {True}
    by_name = {line["image"]: line for line in lines}
    for line in found:
        name = line["image"].partition("/")[2].removesuffix(".png")
        assert line["class"] == by_name[f"{int(name):02}.png"]["class"]

    (tmp_path / "by" / "eleven").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "by" / "eleven" / "1.png")
    (tmp_path / "mixed" / "1").mkdir(parents=True)
    for name in ("1/1.png", "1.png"):
        Image.new("L", (8, 8)).save(tmp_path / "mixed" / name)
    (tmp_path / "empty").mkdir()
    for folder, line in (
        ("by", "by: 'eleven' in row 41 is no class of the training data"),
        ("mixed", "1.png is in no class's folder"),
        ("empty", "is empty"),
        ("nowhere", "does not exist"),
    ):
        assert launch.main([*words, f"--images={tmp_path / folder}", f"--out={tmp_path / 'no.csv'}"]) == 2
        error = capfd.readouterr().err.strip()
        assert line in error and "\n" not in error and not (tmp_path / "no.csv").exists()


def test_images_of_a_folder_are_fitted_as_those_of_training(predict, digits, finished_fedanchor_run, tmp_path):
    """Images of half the height: 'stretch' resizes the whole image, as Pillow does; 'crop' would cut off its sides."""
    run = tmp_path / "run"
    shutil.copytree(finished_fedanchor_run[0], run)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "data": {**config["data"], "fit": "stretch"}}))
    forget_manifests(run)
    (tmp_path / "wide").mkdir()
    wide = [Image.fromarray(image) for image in digits.x_test[:5, ::2, :, 0]]
    for number, picture in enumerate(wide):
        picture.save(tmp_path / "wide" / f"{number}.png")
    found = predict_file(run, tmp_path / "out.npz", images=str(tmp_path / "wide"), allow_code=True)
    stretched = [np.asarray(picture.resize((8, 8), Image.Resampling.BILINEAR)) for picture in wide]
    expected = predict(np.stack(stretched)).probabilities
    np.testing.assert_allclose(found.prediction.probabilities, expected, atol=1e-6)


def test_images_of_another_kind_are_refused(predict):
    for images, line in [
        (np.zeros((2, 8, 8, 3), np.uint8), r"uint8 \(2, 8, 8, 3\); the model takes .* 8x8x1"),
        (np.zeros((2, 9, 8), np.uint8), "the model takes"),
        (np.zeros((0, 8, 8, 1), np.uint8), "B at least 1"),
        (np.full((1, 8, 8), 256.0), "give pixels from 0 to 255, not normalised"),
        (np.full((1, 8, 8), np.nan), "give pixels from 0 to 255, not normalised"),
        (np.linspace(0, 1, 64).reshape(1, 8, 8), "values from 0 to 1; give pixels"),
        (np.array([[["a"] * 8] * 8]), "the model takes numbers"),
    ]:
        with pytest.raises(UserError, match=line):
            predict(images)


def test_bad_input_is_one_line_and_writes_nothing(finished_fedanchor_run, tmp_path, capfd):
    images, out = tmp_path / "images.npz", tmp_path / "out.npz"
    np.savez(images, images=np.zeros((2, 9, 9), np.uint8))
    np.savez(tmp_path / "good.npz", images=np.zeros((2, 8, 8), np.uint8))
    np.savez(tmp_path / "several.npz", a=np.zeros(2), b=np.zeros(2))
    np.savez(tmp_path / "no_images.npz", images=np.zeros((0, 8, 8), np.uint8), labels=np.zeros(0, int))
    np.savez(tmp_path / "number.npz", images=np.uint8(0), labels=np.zeros(1, int))
    (tmp_path / "text.npz").write_text("no archive")
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
        ({"npz": images, "out": out}, "predict takes --workdir=RUN, "),
        ({"workdir": run, "out": out}, "one of --npz=FILE, --images=FOLDER, --csv=FILE"),
        ({"workdir": run, "npz": images, "images": tmp_path, "out": out}, "one of --npz=FILE"),
        ({"workdir": run, "npz": images, "out": images}, "not be the file that is read"),
        ({"workdir": run, "npz": images, "out": tmp_path / "out.CSV"}, "must end in .csv or .npz"),
        ({"workdir": run, "npz": images, "out": out}, "the model takes"),
        ({"workdir": run, "npz": tmp_path / "nothing.npz", "out": out}, "does not exist"),
        ({"workdir": run, "npz": tmp_path / "text.npz", "out": out}, "cannot be read as an npz file"),
        ({"workdir": run, "npz": tmp_path / "several.npz", "out": out}, "--key=NAME"),
        ({"workdir": run, "npz": tmp_path / "no_images.npz", "out": out}, "B at least 1"),
        ({"workdir": run, "npz": tmp_path / "number.npz", "out": out}, "it needs no labels"),
        ({"workdir": run, "npz": images, "out": out, "key": "pictures"}, "has no pictures"),
        ({"workdir": tmp_path, "npz": images, "out": out}, "its runs are in begun, gone, old"),
        ({"workdir": tmp_path / "old", "npz": images, "out": out}, "dataset.json is damaged"),
        ({"workdir": tmp_path / "begun", "npz": images, "out": out}, "there is no checkpoint"),
        ({"workdir": tmp_path / "own", "npz": images, "out": out}, "method is 'of_a_notebook'"),
        ({"workdir": tmp_path / "gone", "npz": images, "out": out}, "importing gone/mine.py fails (FileNotFoundError"),
        ({"workdir": tmp_path / "torn", "npz": images, "out": out}, "cannot read"),
        ({"workdir": run, "npz": tmp_path / "good.npz", "out": images / "out.npz"}, "cannot write"),
    ]:
        words = [f"--{name}={value}" for name, value in words.items()]
        assert launch.main(["predict", "--allow_code", *words]) == 2, words
        error = capfd.readouterr().err.strip()
        assert error.startswith("error: ") and line in error and "\n" not in error, error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_of_the_user_that_has_changed_is_told(finished_fedanchor_run, tmp_path, capsys):
    shutil.copytree(finished_fedanchor_run[0], tmp_path / "run")
    fedjax_ssl.load(tmp_path / "run", allow_code=True)
    assert "trained with another" not in capsys.readouterr().err
    (start,) = read_starts(tmp_path / "run")
    assert "tests/helpers/tiny_backbone.py" in start.files
    changed = start._replace(files={**start.files, "tests/helpers/tiny_backbone.py": 64 * "0"})
    write_sealed(tmp_path / "run" / "origin.json", {"starts": [changed._asdict()]})
    fedjax_ssl.load(tmp_path / "run", allow_code=True)
    assert "run was trained with another tests/helpers/tiny_backbone.py" in capsys.readouterr().err
