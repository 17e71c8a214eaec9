"""The committed sweeps: each is valid and says how to run it; tables have their papers' labels, rounds and rates."""

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
        }.get(argument, argument)
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


@pytest.mark.parametrize(
    ("table", "dataset", "anchors"),
    [
        ("fedanchor_table1", "cifar10", {250, 500, 5000}),
        ("fedanchor_table2", "cifar100", {2500, 10000}),
        ("fedanchor_table3", "svhn", {1000}),
        ("fedil_table1", "mnist", {600, 6000}),
        ("fedil_table1", "cifar100", {5000}),
    ],
)
def test_tables_have_the_papers_labels_and_classes(table, dataset, anchors):
    """FedIL's non-IID clients have a fifth of the classes; numbers of labels are those in the tables' headers."""
    cells = cells_of(f"{table}.py:{dataset}")
    assert {cell.config.data.server_labels for cell in cells} == anchors
    shards = {cell.config.data.classes_per_client for cell in cells if cell.config.data.partition == "shards"}
    assert shards == ({{"cifar100": 20}.get(dataset, 2)} if table == "fedil_table1" else set())


@pytest.mark.parametrize(
    ("dataset", "backbone", "batch_sizes"),
    [
        ("cifar10", "wrn28_2", {250: 10, 4000: 250}),
        ("svhn", "wrn28_2", {250: 10, 1000: 10}),
        ("cifar100", "wrn28_8", {2500: 250, 10000: 250}),
    ],
)
def test_semifls_table_has_the_papers_rows(dataset, backbone, batch_sizes):
    """As in SemiFL's code, the server trains in batches of 250, or of 10 with 1,000 labels or fewer."""
    configs = {cell.name: cell.config for cell in cells_of(f"semifl_table1.py:{dataset}")}
    assert {config.model.name for config in configs.values()} == {backbone}
    assert {config.model.normalisation for config in configs.values()} == {"static"}
    columns = {  # partition, alpha, classes per client
        "IID": ("iid", None, None),
        "Dir 0.3": ("dirichlet_clients", 0.3, None),
        "Dir 0.1": ("dirichlet_clients", 0.1, None),
        "2 classes": ("shards", None, 2),
    }

    def has(name, method, rounds, epochs, rate, anchors, batch_size, statistics):
        config = configs.pop(name)
        assert (config.method, config.num_rounds, config.data.server_labels) == (method, rounds, anchors)
        assert (config.server.epochs, config.server.learning_rate) == (epochs, rate)
        assert config.server.pretrain_epochs == 0 and config.server.augmentation == "weak"
        assert config.model.statistics == statistics
        assert batch_size is None or config.server.batch_size == batch_size
        return config

    for few, size in batch_sizes.items():
        alone = has(f"Partially supervised, {few} labels", "server_only", 400, 1, 0.1, few, size, "server")
        assert not alone.data.centralised and not alone.data.reveal_labels
    most = max(batch_sizes)
    assert has("Fully supervised", "server_only", 400, 1, 0.1, most, 250, "server").data.centralised
    for column, expected in columns.items():
        rows = [
            has(f"SemiFL, {few} labels, {column}", "semifl", 800, 5, 0.03, few, size, "all_mixed")
            for few, size in batch_sizes.items()
        ]
        classes = 100 if dataset == "cifar100" else 10
        rows.append(has(f"FedAvg with all labels, {column}", "supervised", 800, 0, 0.03, classes, None, "all_mixed"))
        for row in rows:
            found = (row.data.partition, row.data.alpha, row.data.classes_per_client)
            assert all(e in (None, f) for e, f in zip(expected, found))
    assert not configs


# --- Sweeps of one labelled client among many. ----------------------------------------------------------------------

# Rounds of the warm-up, rounds after it.
ROUNDS = {
    "semianagg_table.py:svhn": (250, 500),
    "semianagg_table.py:cifar100": (500, 1000),
    "semianagg_table.py:cifar100_lt": (500, 1000),
    "semianagg_table.py:isic": (250, 500),
    "semianagg_ablation.py:svhn": (250, 500),
    "semianagg_ablation.py:cifar100": (500, 1000),
    "semianagg_ablation.py:cifar100_lt": (500, 1000),
    "semianagg_ablation.py:isic": (250, 500),
    "semianagg_clients.py:50": (250, 500),
    "semianagg_partial.py:svhn": (250, 500),
    "semianagg_partial.py:isic": (250, 500),
    "some_clients.py:mnist": (40, 40),
    "some_clients.py:cifar10_lt": (40, 40),
    "some_clients.py:mnist_one_change": (40, 40),
    "some_clients.py:acr_plain_warm_up": (40, 4),
}
BOUNDS = ("FedAvg, all labels", "FedAvg, given labels", "the labelled client")


@pytest.fixture(scope="module")
def planned():
    """Each sweep's configurations by row name, and those of the warm-ups."""
    rows, warm_ups = {}, {}
    for name in ROUNDS:
        cells = cells_of(name)
        rows[name] = {cell.name: cell.config for cell in cells}
        warm_ups[name] = {cell.name: cell.warm_up and cell.warm_up.config for cell in cells}
    return rows, warm_ups


@pytest.mark.parametrize("name", ROUNDS)
def test_rows_begin_with_the_warm_up_and_have_their_rounds(planned, name):
    """Bounds and CBAFed have more rounds instead of a warm-up run; a role of IsoFed trains in every other round."""
    rows, warm_ups = (each[name] for each in planned)
    before, behind = ROUNDS[name]
    for row, config in rows.items():
        if row in BOUNDS or row.startswith("CBAFed"):
            assert warm_ups[row] is None and config.num_rounds == before + behind, row
        else:
            assert warm_ups[row].method == "supervised" and warm_ups[row].num_rounds == before, row
            assert config.num_rounds == (2 * behind if row.startswith("IsoFed") else behind), row
    if "CBAFed" in rows:
        assert rows["CBAFed"].cbafed.warm_up_rounds == before


@pytest.mark.parametrize("name", ROUNDS)
def test_averages_of_batches_last_for_the_run(planned, name):
    rows, checked = planned[0][name], 0
    for row, config in rows.items():
        if config.confidence.kind in ("freematch", "softmatch"):
            assert config.confidence.memory == "run", row
            steps = 500 * 72 if name.startswith("semianagg") else 40 * 9
            assert config.confidence.momentum**steps < 0.05, row  # the initial value is forgotten
            checked += 1
    assert checked == (
        2 if "ablation" in name or name in ("some_clients.py:mnist", "some_clients.py:cifar10_lt") else 0
    )


@pytest.mark.parametrize("name", ROUNDS)
def test_semianagg_s_rows_differ_in_what_their_names_say(planned, name):
    rows = planned[0][name]
    for row, config in rows.items():
        if "SemiAnAgg" in row:
            assert config.method == "semianagg" and config.confidence.threshold == 0.9, row
            assert config.client.unlabelled_clip_norm == 5.0 and config.client.persistent, row
            assert config.semianagg.anchor_seed == ("another anchor" in row), row
            # Imbalanced data sets use the balanced softmax; so does MNIST, as SemiAnAgg's code always does.
            everywhere = any(part in name for part in ("isic", "_lt", "clients.py:50", ":mnist"))
            balanced = "ACR" not in row and ("code" in row or everywhere)
            assert config.client.logit_adjustment == float(balanced), row


@pytest.mark.parametrize("name", [name for name in ROUNDS if name.startswith("semianagg")])
def test_who_trains_on_both_views_of_a_labelled_image(planned, name):
    """SemiAnAgg's setting trains on both; RSCFed, IsoFed and CBAFed have their own, and ACR its own loss."""
    for row, config in planned[0][name].items():
        of_setting = config.method in ("semianagg", "fedavg_semi", "supervised")
        views = "both" if of_setting and "ACR" not in row else "weak"
        assert (config.client.labelled_views, config.client.spare_classifier) == (views, of_setting), row


@pytest.mark.parametrize("name", ["semianagg_partial.py:svhn", "semianagg_partial.py:isic"])
def test_every_client_has_a_tenth_of_its_labels(planned, name):
    """In all rows and in the warm-up, whatever the method's default."""
    rows, warm_ups = (each[name] for each in planned)
    for config in (*rows.values(), *filter(None, warm_ups.values())):
        assert (config.data.labels, config.data.labelled_share) == ("clients", 0.1)
        assert config.clients_per_round == config.num_clients == 10
    assert {config.method for config in rows.values()} == {"supervised", "rscfed", "cbafed", "fedavg_semi", "semianagg"}
