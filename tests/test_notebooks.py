"""The notebooks run from the top in a small setting, and are stored without outputs."""

import json
import os

import nbformat
import numpy as np
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from fedjax_ssl.config import differences, load_config_file
from tests.helpers.runs import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.py"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS_FOR_A_CELL = 600  # on a busy machine

# Small and quick to compile.
SMALL = {
    "augment.flavour": "none",
    "client.epochs": 1,
    "fedanchor.contrastive": False,
    "fedanchor.client_mixup": False,
    "log.report": False,
    "server.augmentation": "weak",
    "server.pretrain_epochs": 1,
}


def read(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def tagged(notebook, tag):
    """The index of the only cell with this tag."""
    (place,) = (place for place, cell in enumerate(notebook.cells) if tag in cell.metadata.get("tags", ()))
    return place


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Executes a notebook in an empty folder, with other values for the variables in its cell `parameters`.

    They are set in a cell after it, as papermill does.
    """
    for name, value in {
        "PYTHONPATH": ROOT,
        "IPYTHONDIR": tmp_path / "ipython",
        "JUPYTER_RUNTIME_DIR": tmp_path / "jupyter",
    }.items():
        monkeypatch.setenv(name, str(value))

    def run(name, **parameters):
        notebook = read(name)
        place = tagged(notebook, "parameters")
        assert all(f"\n{variable} = " in notebook.cells[place].source for variable in parameters)
        source = "\n".join(f"{variable} = {value!r}" for variable, value in parameters.items())
        cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["injected-parameters"]})
        notebook.cells.insert(place + 1, cell)
        client = NotebookClient(
            notebook, timeout=SECONDS_FOR_A_CELL, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
        )
        # No folder of kernels: use this Python, whatever kernel the user's Jupyter calls `python3`.
        client.create_kernel_manager().kernel_spec_manager = KernelSpecManager(kernel_dirs=[])
        client.execute(env=dict(os.environ))
        return notebook

    return run


def shown(notebook, kind):
    """What the cells have shown with this MIME type."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]


def printed(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.test_all
def test_quickstart(execute, tmp_path):
    fields = {**SMALL, "log.report": True}
    notebook = execute("quickstart", NUM_ROUNDS=2, NUM_CLIENTS=8, CLIENTS_PER_ROUND=2, FIELDS=fields)
    assert len(metrics(tmp_path / "runs" / "quickstart")) == 2
    assert len(shown(notebook, "image/png")) == 7 + 1  # of the report, and the test images
    assert "JAX" in printed(notebook) and "of 360 test images are classified correctly" in printed(notebook)


@pytest.fixture
def npz(tmp_path):
    """A file of random images of CIFAR-10's size."""
    rng = np.random.default_rng(0)
    images = lambda number: rng.integers(0, 256, (number, 32, 32, 3), np.uint8)  # noqa: E731
    labels = lambda number: np.arange(number) % 10  # noqa: E731
    file = tmp_path / "images.npz"
    np.savez(file, x_train=images(300), y_train=labels(300), x_test=images(20), y_test=labels(20))
    return str(file)


@pytest.mark.test_all
def test_accelerator(execute, npz, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    notebook = execute(
        "accelerator",
        SOURCE="npz",
        PATH=npz,
        BACKBONE="cnn",
        NUM_ROUNDS=2,
        NUM_CLIENTS=4,
        CLIENTS_PER_ROUND=2,
        LOCAL_EPOCHS=1,
        FIELDS={**SMALL, "log.report": True},
    )
    assert len(metrics(tmp_path / "runs" / "accelerator")) == 2
    assert "No TPU or GPU" in printed(notebook)
    assert "1 of 2 clients side by side on each device" in printed(notebook) and "s a round" in printed(notebook)
    assert "<svg" in shown(notebook, "text/html")[-1].replace("&lt;", "<")


@pytest.mark.test_all
def test_fedanchor_cifar10(execute, npz, tmp_path):
    notebook = execute(
        "fedanchor_cifar10",
        SOURCE="npz",
        PATH=npz,
        SEEDS=(0, 1),
        NUM_ROUNDS=2,
        BACKBONE="cnn",
        NUM_ANCHORS=20,
        NUM_CLIENTS=4,
        CLIENTS_PER_ROUND=2,
        LOCAL_EPOCHS=1,
        FIELDS=SMALL,
    )
    workdir = tmp_path / "runs" / "fedanchor_cifar10"
    for name in ("fedanchor", "server_only"):
        assert [len(metrics(workdir / name / f"seed_{seed}")) for seed in (0, 1)] == [2, 2]
    (table,) = shown(notebook, "text/markdown")
    assert "| fedanchor | 2 of 2 |" in table and "| server only | 2 of 2 |" in table
    assert "<svg" in shown(notebook, "text/html")[-1].replace("&lt;", "<")
    assert "seed 1: " in printed(notebook)


@pytest.mark.test_all
def test_new_method(execute, tmp_path):
    notebook = execute(
        "new_method",
        SEEDS=(0,),
        NUM_ROUNDS=2,
        NUM_CLIENTS=4,
        CLIENTS_PER_ROUND=2,
        OTHERS=("server_only",),
        FIELDS={**SMALL, "entropy_gate.max_entropy": 1.0, "entropy_gate.mixup_alpha": 0.0},
    )
    workdir = tmp_path / "runs" / "new_method"
    lines = metrics(workdir / "entropy_gate" / "seed_0")
    assert [line["uploads"] for line in lines] == [2, 2]
    # Up to the largest entropy every label counts.
    assert all(line["qualified_share"] == 1 and 0 <= line["pseudo_label_accuracy"] <= 1 for line in lines)
    assert json.loads((workdir / "entropy_gate" / "seed_0" / "config.json").read_text())["entropy_gate"]["views"] == 2
    assert "entropy_gate" not in json.loads((workdir / "server_only" / "seed_0" / "config.json").read_text())
    (table,) = shown(notebook, "text/markdown")
    assert "| entropy gate | 1 of 1 |" in table and "| server only | 1 of 1 |" in table


@pytest.mark.parametrize(
    ("name", "config_file"),
    [
        ("quickstart", f"{QUICKSTART}"),
        ("fedanchor_cifar10", f"{ROOT}/configs/fedanchor_cifar10.py:wrn28_2,server_labels=250,alpha=0.1"),
    ],
)
def test_a_notebook_trains_what_its_config_file_says(name, config_file):
    notebook, names = read(name), {}
    for tag in ("parameters", "configuration"):
        exec(notebook.cells[tagged(notebook, tag)].source, names)
    found = differences(load_config_file(config_file).to_dict(), names["config"].to_dict())
    assert set(found) <= {"seeds"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_as_it_was_written(path):
    notebook = json.loads(path.read_text())
    nbformat.validate(notebook)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert all("execution" not in cell["metadata"] for cell in code)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_the_notebooks_install_the_package_in_the_same_way():
    assert [path.stem for path in NOTEBOOKS] == ["accelerator", "fedanchor_cifar10", "new_method", "quickstart"]
    notebooks = [read(path.stem) for path in NOTEBOOKS]
    (source,) = {notebook.cells[tagged(notebook, "install")].source for notebook in notebooks}
    assert source.count("%pip install") == 2
    # JAX is not used before it is installed and its platform chosen.
    for notebook in notebooks:
        before = "".join(cell.source for cell in notebook.cells[: tagged(notebook, "install") + 1])
        assert "import jax" not in before and "import fedjax_ssl" not in before
