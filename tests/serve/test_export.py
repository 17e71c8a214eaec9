"""Exported models: each format gives the predictor's output, and bad input gives one line."""

import contextlib
import functools
import json
import runpy
import shutil
import subprocess
import sys
from unittest import mock

import flax.linen as nn
import jax
import jax.export
import numpy as np
import pytest
import yaml
from flax.traverse_util import flatten_dict
from safetensors import safe_open

import fedjax_ssl
import launch
from fedjax_ssl import UserError
from fedjax_ssl.data import load_dataset
from fedjax_ssl.data.kinds import IMAGE, KINDS
from fedjax_ssl.models.network import build_network
from fedjax_ssl.serve.export import check, hub, programs
from fedjax_ssl.serve.predictor import Predictor
from tests.helpers.runs import ROOT, make_fedanchor_config

pytestmark = pytest.mark.test_all

NUMBER = 1000  # images whose labels are compared


def import_onnx():
    for package in ("jax2onnx", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[onnx]'")
    import onnxruntime

    return onnxruntime


@pytest.fixture(scope="module")
def predict(finished_fedanchor_run):
    return fedjax_ssl.load(finished_fedanchor_run[0], allow_code=True)


@pytest.fixture(scope="module")
def images():
    """The test images of the digits, filled up with further images."""
    dataset = load_dataset(make_fedanchor_config().data)
    return np.concatenate([dataset.x_test, dataset.x_train])[:NUMBER]


@pytest.fixture
def export(finished_fedanchor_run, tmp_path):
    def run(format, *words, out="out", status=0):
        found = launch.main(
            ["export", str(finished_fedanchor_run[0]), f"--format={format}", f"--out={tmp_path / out}", *words]
        )
        assert found == status
        return tmp_path / out

    return run


def test_safetensors_hold_every_number_and_what_they_mean(export, predict):
    with safe_open(export("safetensors", "--allow_code"), "numpy") as file:
        found, facts = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    trees = {"params": predict.params, "batch_stats": predict.batch_stats}
    real = {".".join(key.key for key in path): leaf for path, leaf in jax.tree.leaves_with_path(trees)}
    assert found.keys() == real.keys() and "params.classifier.kernel" in found
    for name, leaf in real.items():
        np.testing.assert_array_equal(found[name], leaf)
    assert json.loads(facts["class_names"]) == list("0123456789") and json.loads(facts["image_shape"]) == [8, 8, 1]
    assert facts["backbone"] == "tiny_backbone.py:TinyBackbone" and facts["round"] == "4"


def test_the_example_of_the_documentation_reads_them_without_jax(export, predict, images):
    """The test computes the tiny backbone's classifier by hand: preprocessing and names suffice."""
    file = export("safetensors", "--allow_code")
    page = (ROOT / "docs" / "how_to" / "export.md").read_text(encoding="utf-8")
    (example,) = [text for text in page.split("```python\n")[1:] if "safe_open" in text]
    example = example.partition("```")[0]
    assert len(example.splitlines()) <= 10
    hidden = """
x = ((images / 255 - mean) / std).reshape(len(images), -1) @ tensors["params.backbone.hidden.kernel"]
norm = {key.rpartition(".")[2]: value for key, value in tensors.items() if ".norm." in key}
x = np.maximum((x - norm["mean"]) * norm["scale"] / np.sqrt(norm["var"] + 1e-5) + norm["bias"], 0)
logits = x @ tensors["params.classifier.kernel"] + tensors["params.classifier.bias"]
np.save("labels.npy", logits.argmax(axis=1))
assert "jax" not in sys.modules and class_names == list("0123456789")
"""
    np.save(file.parent / "images.npy", images)
    program = f"import sys\nimport numpy as np\n{example}\nimages = np.load('images.npy')\n{hidden}"
    shutil.copy(file, file.parent / "model.safetensors")
    subprocess.run([sys.executable, "-c", program], cwd=file.parent, check=True)
    np.testing.assert_array_equal(np.load(file.parent / "labels.npy"), predict(images).labels)


def test_stablehlo_classifies_any_number_of_raw_images_on_any_platform(export, predict, images):
    loaded = jax.export.deserialize(export("stablehlo", "--allow_code").read_bytes())
    assert loaded.platforms == ("cpu", "cuda", "tpu")
    for number in (7, NUMBER):
        found = np.asarray(loaded.call(images[:number]))
        expected = predict(images[:number])
        np.testing.assert_allclose(found, expected.probabilities, atol=1e-6)
        np.testing.assert_array_equal(found.argmax(axis=1), expected.labels)


def test_onnx_runtime_gives_the_same_labels(export, predict, images):
    onnxruntime = import_onnx()
    session = onnxruntime.InferenceSession(export("onnx", "--allow_code"))
    (probabilities,) = session.run(["probabilities"], {"images": images})
    expected = predict(images)
    assert len(images) == NUMBER and np.sum(probabilities.argmax(axis=1) == expected.labels) == NUMBER
    np.testing.assert_allclose(probabilities, expected.probabilities, atol=1e-4)
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["class_names"]) == list("0123456789") and metadata["round"] == "4"


@pytest.fixture(scope="module")
def random_cnn(images):
    """The network of model.name=cnn, a random model, and its probabilities for 100 images."""
    config = make_fedanchor_config()
    facts = {"image_shape": [8, 8, 1], "num_classes": 10, "mean": [0.3], "std": [0.4]}
    network = build_network(config, facts, KINDS[IMAGE])
    model = jax.jit(network.init)(jax.random.key(0))
    kernel = model.params["classifier"]["kernel"]
    far_apart = {**model.params["classifier"], "kernel": jax.random.normal(jax.random.key(1), kernel.shape)}
    means = jax.tree.map(lambda leaf: leaf + 0.1, model.batch_stats)
    model = model._replace(params={**model.params, "classifier": far_apart}, batch_stats=means)
    expected = np.asarray(jax.jit(network.probabilities)(model, images[:100]))
    assert len(set(expected.argmax(axis=1))) > 1 and expected.std() > 0.01
    return network, model, expected


def test_the_example_in_numpy_is_the_cnn(random_cnn, images):
    _, model, expected = random_cnn
    scores = runpy.run_path(str(ROOT / "examples" / "exported_cnn.py"))["scores"]
    tensors = flatten_dict({"params": model.params, "batch_stats": model.batch_stats}, sep=".")
    found = scores(tensors, [0.3], [0.4], images[:100])
    np.testing.assert_allclose(jax.nn.softmax(found), expected, atol=1e-5)


def test_a_model_in_bfloat16_is_no_onnx(predict):
    pytest.importorskip("jax2onnx", reason="jax2onnx is not installed: pip install '.[onnx]'")
    with pytest.raises(UserError, match=r"model\.dtype is bfloat16"):
        programs.onnx(predict, {"dtype": "bfloat16"})


def test_a_folder_for_the_hub_has_a_header_that_machines_read(export, predict, images, finished_fedanchor_run):
    folder = export("hub", "--allow_code", "--license=cc-by-4.0")
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "config.json", "model.safetensors", "model.stablehlo"
    }  # fmt: skip
    card = (folder / "README.md").read_text()
    _, header, body = card.split("---\n", 2)
    fields, summary = yaml.safe_load(header), json.loads((finished_fedanchor_run[0] / "summary.json").read_text())
    assert fields["license"] == "cc-by-4.0" and fields["library_name"] == "fedjax_ssl"
    assert {"federated-learning", "fedanchor"} <= set(fields["tags"]) and fields["metrics"] == ["accuracy"]
    (result,) = fields["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == summary["test_accuracy"] and result["dataset"]["name"] == "digits"
    assert "## Data" in body and str(finished_fedanchor_run[0].parent) not in body.replace(summary["command"], "")
    program = body.partition("```python\n")[2].partition("```")[0]
    assert "(1, 8, 8, 1)" in program
    with contextlib.chdir(folder):
        exec(compile(program, "README.md", "exec"), names := {})
    np.testing.assert_allclose(names["probabilities"].sum(), 1, atol=1e-6)
    assert json.loads((folder / "config.json").read_text())["class_names"] == list("0123456789")
    export("hub", "--allow_code")  # a second export may overwrite its own files
    assert 'license: "unknown"' in (folder / "README.md").read_text()


def test_a_hostile_name_stays_inside_its_field(finished_fedanchor_run, tmp_path):
    """No text in a run's files can add a field to the header."""
    from fedjax_ssl.records.runs import read_run

    run = read_run(finished_fedanchor_run[0])
    name = 'x"\n---\nlicense: mit\n\x1b[2J: {a'
    with mock.patch.object(type(run), "dataset", lambda self: {"name": name}):
        _, header, _ = hub.header(run, "unknown").split("---\n", 2)
    assert yaml.safe_load(header)["license"] == "unknown" and "\x1b" not in header


@pytest.mark.parametrize(
    "words, line",
    [
        ([], "export needs --format (safetensors, stablehlo, onnx or hub), --out (output file; for hub a folder)"),
        (["--format=onnx"], "export needs --out"),
        (["--format=pickle", "--out=OUT/new"], "--format is 'pickle'; known: safetensors, stablehlo, onnx, hub"),
        (["--format=safetensor", "--out=OUT/new"], "the nearest is safetensors"),
        (["--format=safetensors", "--out=OUT", "--allow_code"], "Is a directory"),
        (["--format=hub", "--out=OUT/file", "--allow_code"], "File exists"),
        (["--format=hub", "--out=OUT/theirs"], "README.md is not from an export for the Hub"),
        (["--format=hub", "--out=OUT/run"], "config.json is not from an export for the Hub"),
        (["--format=safetensors", "--out=OUT/new"], "names code, "),
        (["--format=safetensors", "--out=OUT/file/new", "--allow_code"], "cannot write"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(words, line, finished_fedanchor_run, tmp_path, capfd):
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "README.md").write_text("# My thesis\n")
    before = sorted(tmp_path.rglob("*"))
    words = [word.replace("OUT", str(tmp_path)) for word in words]
    assert launch.main(["export", str(finished_fedanchor_run[0]), *words]) == 2
    error = capfd.readouterr().err.strip()
    assert error.startswith("error: ") and line in error and "\n" not in error, error
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "theirs" / "README.md").read_text() == "# My thesis\n"


def test_an_export_with_other_outputs_is_refused(finished_fedanchor_run, tmp_path, capfd):
    """The converter changes one layer's numbers; nothing is written."""
    right = programs.stablehlo

    def wrong(predictor):
        changed = {**predictor.params, "classifier": jax.tree.map(lambda x: 1.5 * x, predictor.params["classifier"])}
        return right(predictor._replace(model=predictor.model._replace(params=changed)))

    with mock.patch.object(programs, "stablehlo", wrong):
        words = [str(finished_fedanchor_run[0]), "--format=stablehlo", f"--out={tmp_path / 'out'}", "--allow_code"]
        assert launch.main(["export", *words]) == 2
    error = capfd.readouterr().err
    assert "error: stablehlo cannot hold this model: its outputs differ from the predictor's by up to" in error
    assert "nothing was written" in error and not list(tmp_path.iterdir())


class Pooled(nn.Module):
    """Convolutions and Flax's own pooling, as in its examples."""

    normalisation: str = "none"

    @nn.compact
    def __call__(self, inputs, train=False, mask=None, num_views=1):
        x = nn.max_pool(nn.Conv(4, (3, 3), name="first")(inputs), (2, 2), (2, 2))
        x = nn.max_pool(nn.Conv(4, (3, 3), name="second")(x), (3, 3), (1, 1), "SAME")
        x = nn.Conv(4, (3, 3), name="third")(nn.avg_pool(x, (2, 2), (2, 2)))
        return x.reshape(len(inputs), -1)


def checked_onnx(images):
    facts = {"image_shape": [8, 8, 1], "num_classes": 10, "mean": [0.3], "std": [0.4]}
    network = build_network(make_fedanchor_config(), facts, KINDS[IMAGE], backbone=Pooled())
    model = jax.jit(network.init)(jax.random.key(0))
    outputs = jax.jit(lambda images: (network.probabilities(model, images), ()))
    predictor = Predictor(facts, tuple("0123456789"), 0, network, model, outputs, "crop")
    write = functools.partial(programs.onnx, facts={})
    return check.checked("onnx", write, check.run_onnx, predictor, images[:100], 0.01), predictor


def test_the_pooling_of_flax_is_exported(images):
    """ONNX Runtime refused to run what jax2onnx makes of it."""
    import_onnx()
    content, predictor = checked_onnx(images)
    expected = predictor.network.probabilities(predictor.model, images[:100])
    np.testing.assert_allclose(check.run_onnx(content, predictor)(images[:100]), expected, atol=1e-4)


def test_a_missing_package_is_named_before_the_model_is_loaded(export, capfd):
    with mock.patch.dict(sys.modules, {"jax2onnx": None}):
        assert not export("onnx", status=2).exists()
    assert "pip install 'fedjax_ssl[onnx]'" in capfd.readouterr().err
