"""Follows the pages about own data and backbones command by command, as a reader would."""

import json
import re
import runpy
import shlex
import sys

import numpy as np
import pytest
from ml_collections import config_dict
from PIL import Image
from sklearn.datasets import load_digits

import launch
from fedjax_ssl import base_config
from fedjax_ssl.data import make_partition
from fedjax_ssl.run.experiment import build_experiment
from tests.helpers.runs import ROOT

pytestmark = pytest.mark.test_all

# Makes any run last a few seconds.
TINY = {
    "num_rounds": 1, "num_clients": 4, "clients_per_round": 2, "data.examples_per_client": 20, "data.alpha": 10.0,
    "client.epochs": 1, "server.pretrain_epochs": 1, "augment.flavour": "none",
    "fedanchor.client_mixup": False, "fedanchor.contrastive": False,
}  # fmt: skip


def blocks(page):
    """(language, text) of a page's code blocks."""
    return re.findall(r"```(\w*)\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A reader in an empty folder who follows pages: runs their Python, saves their modules, starts their commands.

    `launch.main` runs the commands with small numbers. Commands with a workdir outside `trained` stop before compiling;
    returns the experiments that they built.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def follow(*pages, trained=()):
        built = {}
        for language, text in (block for page in pages for block in blocks(page)):
            file = re.match(r"# (\w+\.py)\n", text)
            if file:
                (tmp_path / file[1]).write_text(text)
            elif language == "python":
                exec(text, {})
            for line in text.splitlines():
                if line.startswith("python examples/"):
                    runpy.run_path(str(ROOT / line.split()[1]), run_name="__main__")
                if not line.startswith("python launch.py"):
                    continue
                words = shlex.split(line)[2:]
                with monkeypatch.context() as patch:
                    if not any(f"--workdir={workdir}" in words for workdir in trained):
                        build = lambda config, workdir: built.update({workdir: build_experiment(config)})  # noqa: E731
                        patch.setattr("fedjax_ssl.run.train.train", build)
                    assert launch.main([*words, *(f"--config.{name}={value}" for name, value in TINY.items())]) == 0
        return built

    yield follow
    sys.modules.pop("my_models", None)


def write_lesions(folder):
    """A small HAM10000: its table, and landscape photographs, 30 of the commonest class and 20 of each other class."""
    rng, lines = np.random.default_rng(0), ["lesion_id,image_id,dx,dx_type,age,sex,localization"]
    (folder / "HAM10000").mkdir()
    for number, kind in enumerate(["nv"] * 10 + ["akiec", "bcc", "bkl", "df", "mel", "nv", "vasc"] * 20):
        lines.append(f"HAM_{number:07},ISIC_{number:07},{kind},histo,50.0,female,back")
        pixels = rng.integers(0, 256, (6, 8, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "HAM10000" / f"ISIC_{number:07}.jpg")
    (folder / "HAM10000_metadata.csv").write_text("\n".join(lines) + "\n")


def test_own_data(reader, tmp_path):
    write_lesions(tmp_path)
    built = reader("tutorials/your_data.md", "how_to/own_data.md")
    lesions = built.pop("runs/ham10000")
    counts = np.bincount(lesions.hidden_labels) + np.bincount(lesions.data.test_labels)
    assert counts.tolist() == [20, 20, 20, 20, 20, 30, 20] and len(lesions.data.test_labels) == 30
    assert lesions.problem.network.inputs.shape == (224, 224, 3) and "auc" in lesions.problem.config.eval_measures
    by_class = [np.unique(lesions.hidden_labels[rows]) for rows in lesions.partition.client_rows]
    labelled = [k for k, rows in enumerate(lesions.partition.client_rows) if rows[0] in lesions.partition.labelled_rows]
    assert len(labelled) == 1 and len(by_class[labelled[0]]) == max(map(len, by_class))
    words = {"labels": "clients", "partition_file": str(tmp_path / "mine_partition.npz")}  # as the page names it
    partition = make_partition(np.zeros(1437, int), 10, config_dict.ConfigDict({**base_config().data, **words}), 2, 0)
    assert [np.isin(rows, partition.labelled_rows).sum() for rows in partition.client_rows] == [50, 50]
    digits = (load_digits().images * 15).astype(np.uint8)
    npz, folder = built["runs/npz"], built["runs/folder"]
    np.testing.assert_array_equal(npz.data.inputs[..., 0], digits[:1437])
    np.testing.assert_array_equal(npz.data.test_inputs[..., 0], digits[1437:])
    # The same images in another order, divided into the same classes by their names, too.
    rows = lambda images: sorted(image.tobytes() for image in np.asarray(images))  # noqa: E731
    assert rows(np.concatenate([folder.data.inputs, folder.data.test_inputs])) == rows(digits)
    counts = np.bincount(folder.hidden_labels) + np.bincount(folder.data.test_labels)
    np.testing.assert_array_equal(counts, np.bincount(load_digits().target))
    assert {experiment.problem.num_classes for experiment in built.values()} == {10}


def test_own_model(reader, tmp_path):
    reader("how_to/own_backbone.md", trained=["runs/own_model"])
    lines = (tmp_path / "runs" / "own_model" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 1 and json.loads(lines[0])["uploads"] > 0
    config = base_config()
    config.model.name, config.data.source, config.data.server_labels = "my_normalised.py:TwoLayers", "digits", 50
    normalised = build_experiment(config)
    assert normalised.problem.network.normalisation == "running" and normalised.state_shape.model.batch_stats


def test_every_line_of_the_pages_is_a_command_that_is_run():
    """Only half of a command broken over two lines would be run."""
    for page, number in {"tutorials/your_data.md": 2, "how_to/own_data.md": 2, "how_to/own_backbone.md": 1}.items():
        commands = [line for _, text in blocks(page) for line in text.splitlines() if "launch.py" in line]
        assert len(commands) == number and all("--workdir=" in line for line in commands)
