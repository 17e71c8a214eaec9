"""The committed sweeps: each is valid and says how to run it; tables have their papers' labels, rounds and rates."""

import functools
import pathlib
import runpy

import pytest

from fedjax_ssl.sweep import Sweep, load_sweep, plan, progress_of
from tests.helpers.runs import ROOT

FOLDER = ROOT / "configs" / "sweeps"
NOWHERE = pathlib.Path("/nowhere")  # planning needs no folder

# Each file with its arguments: data sets, or names of some rows; one without arguments once.
SWEEPS = [
    (path, argument, kind == "DATASETS")
    for path in sorted(FOLDER.glob("*.py"))
    for found in [runpy.run_path(str(path))]
    for kind in [next((kind for kind in ("DATASETS", "ROWS") if kind in found), "")]
    for argument in found.get(kind, [""])
]


@functools.cache
def cells_of(name):
    return plan(load_sweep(f"{FOLDER}/{name}"), NOWHERE)


@pytest.mark.parametrize(
    ("path", "argument", "is_dataset"), SWEEPS, ids=[f"{path.stem}:{argument}" for path, argument, _ in SWEEPS]
)
def test_every_sweep_file_is_valid_and_says_how_to_run_it(path, argument, is_dataset):
    words = f"{path.name}:{argument}" if argument else path.name
    sweep, cells = load_sweep(f"{FOLDER}/{words}"), cells_of(words)
    assert isinstance(sweep, Sweep) and cells
    assert progress_of(cells[0], sweep.seeds[0]) == "to do"
    if is_dataset:
        of = {
            "svhn": "svhn_cropped",
            "emnist": "emnist/byclass",
            "organmnist": "organamnist.npz",
            "cifar100_lt": "cifar100",
            "isic": "ham10000.npz",
            "fmnist": "fashion_mnist",
        }.get(argument, argument.removesuffix("_steps"))
        sources = {cell.config.data.path or cell.config.data.source for cell in cells}
        assert {source.removesuffix(".npz") for source in sources} == {of.removesuffix(".npz")}
    command, text = "python launch.py sweep configs/sweeps/{} --workdir=", path.read_text()
    is_named = any(command.format(word) in text for word in (words, f"{path.name}:BOARD"))
    assert is_named or sweep == load_sweep(str(path))  # the default's name need not be given


def test_a_file_without_an_argument_is_one_of_its_sweeps():
    for path in FOLDER.glob("*.py"):
        own = [load_sweep(f"{each}:{argument}") for each, argument, _ in SWEEPS if each == path and argument]
        assert not own or load_sweep(str(path)) in own, path


def test_what_a_round_costs_is_measured_with_helpers_and_at_named_rates():
    """FedLabel's Table 5: participants have uploaded in the round before. SAGE: each method names its rate."""
    cells = cells_of("fedlabel_table5.py")
    (fedmatch,) = [cell.config for cell in cells if cell.config.method == "fedmatch"]
    assert fedmatch.fedmatch.helper_interval == 1 and fedmatch.num_rounds > 1
    assert fedmatch.clients_per_round == fedmatch.num_clients
    rates = {cell.config.method: cell.config.client.learning_rate for cell in cells_of("sage_table.py")}
    assert rates.pop("fedmatch") == 0.003 and set(rates.values()) == {0.1}
