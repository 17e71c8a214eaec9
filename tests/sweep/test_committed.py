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


# --- Sweeps of one labelled client among many. ----------------------------------------------------------------------

# Rounds of the warm-up, rounds after it.
ROUNDS = {
    "semianagg_table.py:svhn": (250, 500),
    "semianagg_table.py:cifar100": (500, 1000),
    "semianagg_ablation.py:svhn": (250, 500),
    "semianagg_clients.py:50": (250, 500),
    "semianagg_leave_one_out.py": (250, 500),
    "semianagg_partial.py:svhn": (250, 500),
    "some_clients.py:mnist": (40, 40),
    "some_clients.py:acr_plain_warm_up": (40, 4),
}
BOUNDS = ("FedAvg, all labels", "FedAvg, given labels", "the labelled client")


@pytest.mark.parametrize("name", ROUNDS)
def test_rows_begin_with_the_warm_up_and_have_their_rounds(name):
    """Bounds and CBAFed have more rounds instead of a warm-up run; a role of IsoFed trains in every other round."""
    cells = cells_of(name)
    rows = {cell.name: cell.config for cell in cells}
    warm_ups = {cell.name: cell.warm_up and cell.warm_up.config for cell in cells}
    before, behind = ROUNDS[name]
    for row, config in rows.items():
        if row in BOUNDS or row.startswith("CBAFed"):
            assert warm_ups[row] is None and config.num_rounds == before + behind, row
        else:
            assert warm_ups[row].method == "supervised" and warm_ups[row].num_rounds == before, row
            assert config.num_rounds == (2 * behind if row.startswith("IsoFed") else behind), row
    if "CBAFed" in rows:
        assert rows["CBAFed"].cbafed.warm_up_rounds == before
