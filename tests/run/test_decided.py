"""What the data decide is not asked, is said in a line, and is known when a run is resumed."""

import json

import numpy as np
import pandas
import pytest

from fedjax_ssl import UserError, base_config, train
from fedjax_ssl.config import parse_config
from fedjax_ssl.data import Partition, load_dataset, make_partition, save_partition
from fedjax_ssl.data.labels import _as_equal
from fedjax_ssl.run.decided import decide, decisions, find_partitions
from fedjax_ssl.run.validation import validate
from fedjax_ssl.sweep.plan import Cell, is_finished
from tests.helpers.runs import make_fedanchor_config
from tests.helpers.stub import make_stub_config

TABLE = "configs/quickstart_table.py"
CLIENTS = np.array(["north", "south", "10", "9"])[np.arange(60) % 7 % 4]


def table(folder, labels=None, clients=CLIENTS):
    """A file with columns of numbers, labels and clients."""
    rng = np.random.default_rng(0)
    columns = {f"x{n}": rng.normal(size=60) for n in range(8)}
    labels = np.arange(60) // 3 % 2 if labels is None else labels
    pandas.DataFrame({**columns, "label": labels, "clinic": clients}).to_csv(folder / "t.csv", index=False)
    return {"data.source": "csv", "data.path": str(folder / "t.csv"), "data.label_column": "label",
            "data.client_column": "clinic"}  # fmt: skip


def arrays(folder):
    rng, labels = np.random.default_rng(0), np.arange(60) % 2
    found = {"x_train": rng.normal(size=(60, 8)), "y_train": labels, "x_test": rng.normal(size=(9, 8)),
             "y_test": labels[:9], "client_train": CLIENTS}  # fmt: skip
    np.savez(folder / "d.npz", **found)
    for name, array in found.items():
        np.save(folder / f"{name}.npy", array)


@pytest.mark.parametrize("source", ["csv", "npz", "npy"])
def test_clients_are_those_that_the_data_name(tmp_path, source):
    arrays(tmp_path)
    fields = table(tmp_path) if source == "csv" else {}
    paths = {"csv": "t.csv", "npz": "d.npz", "npy": ""}
    words = [f"--config.{name}={value}" for name, value in fields.items() if name not in ("data.source", "data.path")]
    words += ["--config.data.server_labels=8"]
    config = parse_config(TABLE, [*words, f"--config.data.path={tmp_path / paths[source]}"])
    assert config.data.source == source
    dataset = load_dataset(config.data)
    found = decisions(config, dataset)
    assert found == {"data.partition": "natural", "num_clients": 4, "clients_per_round": 4}
    (decided,) = decide([config], dataset)
    assert config.num_clients == 20 and decided.num_clients == 4  # the caller's is not changed
    partition = make_partition(dataset.y_train, 2, decided.data, 4, 0, dataset.owners)
    first = {"csv": "x0"}.get(source)
    inputs = pandas.read_csv(tmp_path / "t.csv")[first].to_numpy() if first else np.load(tmp_path / "x_train.npy")[:, 0]
    for client, name in enumerate(("10", "9", "north", "south")):  # not all are numbers
        of_client = set(inputs[name == CLIENTS].astype(np.float32))
        held = [dataset.x_train[row].ravel()[0] for row in partition.client_rows[client]]
        assert held and set(held) <= of_client


def test_a_server_has_at_most_the_labels_that_there_are(tmp_path):
    labels = [n % 2 if n < 15 else -1 for n in range(60)]
    config = make_fedanchor_config(**table(tmp_path, labels))
    dataset = load_dataset(config.data)
    found = decisions(config, dataset)
    assert found["data.server_labels"] == np.count_nonzero(dataset.y_train >= 0) == 11  # four are for testing
    config.data.labels = "clients"
    assert "data.server_labels" not in decisions(config, dataset)
    config.data.labels = "server"
    (decided,) = decide([config], dataset)
    partition = make_partition(dataset.y_train, 2, decided.data, 4, 0, dataset.owners)
    assert sorted(partition.server_index) == np.flatnonzero(dataset.y_train >= 0).tolist()


def test_clients_with_labels_are_those_that_the_data_label(tmp_path):
    labels = [-1 if name == "north" else n // 4 % 2 for n, name in enumerate(CLIENTS)]
    config = make_fedanchor_config(**table(tmp_path, labels), **{"data.labels": "some_clients"})
    dataset = load_dataset(config.data)
    (decided,) = decide([config], dataset)
    assert config.data.labelled_clients == 1 and decided.data.labelled_clients == 3
    partition = make_partition(dataset.y_train, 2, decided.data, 4, 0, dataset.owners)
    assert sorted(partition.labelled_rows) == np.flatnonzero(dataset.y_train >= 0).tolist()


def test_a_partition_file_has_a_number_of_clients(tmp_path):
    rows = np.array_split(np.arange(40, 1437, dtype=np.int32), 3)
    save_partition(tmp_path / "p.npz", Partition(np.arange(40, dtype=np.int32), rows))
    config = make_fedanchor_config(**{"data.partition_file": str(tmp_path / "p.npz"), "data.examples_per_client": 0})
    dataset = load_dataset(config.data)
    assert decisions(config, dataset) == {"num_clients": 3, "clients_per_round": 3}


def divided(**fields):
    """The partition of the digits that a run has."""
    config = make_fedanchor_config(**{f"data.{name}": value for name, value in fields.items()})
    return find_partitions([config], [None], load_dataset(config.data))[0]


def test_a_client_is_left_out_after_all_draws():
    """The others hold what they held, whether it has labels or not."""
    fields = {"labels": "some_clients", "labelled_clients": 2, "client_test_share": 0.2}
    whole = divided(**fields)
    at = [np.isin(rows, whole.labelled_rows).any() for rows in whole.client_rows]
    for client in (at.index(True), at.index(False)):
        found = divided(**fields, left_out=client)
        labelled = np.setdiff1d(whole.labelled_rows, whole.client_rows[client])
        np.testing.assert_array_equal(np.sort(found.labelled_rows), labelled)
        for of, held in ((found.client_rows, whole.client_rows), (found.client_test_rows, whole.client_test_rows)):
            for number, (rows, before) in enumerate(zip(of, held, strict=True)):
                np.testing.assert_array_equal(rows, [] if number == client else before)
    assert sum(at) == 2 and not divided(left_out=0).client_test_rows
    with pytest.raises(UserError, match=r"data.left_out=8, but the 8 clients are 0 to 7"):
        divided(left_out=8)


def test_a_partition_file_s_labels_at_clients_are_hidden_where_nobody_has_labels(tmp_path):
    path = str(tmp_path / "p.npz")
    save_partition(path, divided(labels="some_clients"))
    found, same = divided(server_labels=0, partition_file=path), divided(server_labels=0)
    assert len(found.labelled_rows) == len(same.labelled_rows) == len(found.server_index) == 0
    for one, other in zip(found.client_rows, same.client_rows, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("available", "number"), [([5, 9, 2], 10), ([4, 4, 4], 12), ([1, 0, 30], 20), ([9, 9, 9], 8)])
def test_numbers_of_a_class_are_as_equal_as_the_data_allow(available, number):
    """Against a loop that gives one after the other to a class with the fewest."""
    found, expected = _as_equal(np.array(available), number, np.random.default_rng(0)), [0] * len(available)
    for _ in range(number):
        open_ = [c for c, count in enumerate(expected) if count < available[c]]
        expected[min(open_, key=lambda c: expected[c])] += 1
    assert sorted(found) == sorted(expected) and all(found <= available)


def test_a_run_is_resumed_by_the_command_that_began_it_and_by_its_own_configuration(tmp_path, capfd):
    config = make_stub_config(**table(tmp_path), num_rounds=2, **{"data.server_labels": 8})
    train(config, tmp_path / "run")
    line = "the data decide: data.partition=natural (not lda), num_clients=4 (not 8)"
    assert line in capfd.readouterr().err and line in (tmp_path / "run" / "run.log").read_text()
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["num_clients"] == 4 and saved["data"]["partition"] == "natural" and config.num_clients == 8
    own = make_stub_config(**table(tmp_path), **{"data.server_labels": 8, "data.partition": "natural"})
    own.update({"num_clients": 4, "num_rounds": 3})
    train(own, tmp_path / "run")
    config.num_rounds = 4
    train(config, tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == config.num_rounds
    with pytest.raises(UserError, match="num_clients: 4 there, 9 here"):
        train(make_stub_config(**{**table(tmp_path), "data.server_labels": 8, "num_clients": 9}, num_rounds=6),
              tmp_path / "run")  # fmt: skip
    table(tmp_path, clients=np.arange(60) % 6)
    with pytest.raises(UserError, match=r"partition\.npz has 4 clients, but num_clients=6"):
        train(config, tmp_path / "run")


def test_a_sweep_knows_a_finished_run_by_what_was_asked(tmp_path):
    config = make_stub_config(**table(tmp_path), num_rounds=2, **{"data.server_labels": 8})
    config.seeds = (0,)
    train(config, tmp_path / "row")
    cell = Cell(**{**dict.fromkeys(Cell._fields), "folder": tmp_path / "row", "config": config, "seeds": (0,)})
    assert is_finished(cell, 0)
    config.clients_per_round = 3
    assert not is_finished(cell, 0)


def test_all_fields_that_are_wrong_are_told_at_once():
    config = base_config()
    config.num_rounds, config.client.batch_size = 0, 0
    with pytest.raises(UserError, match=r"num_rounds must be at least 1, not 0; client\.batch_size must be at least 1"):
        validate(config)
    config = base_config()
    config.clients_per_round, config.stop.patience, config.data.imbalance = 101, 3, 0.5
    with pytest.raises(UserError, match=r"data.imbalance must.*; stop.patience=3 needs.*; clients_per_round is 101"):
        validate(config)


def test_a_path_that_a_source_would_not_read(tmp_path):
    """On the command line it decides the source; a configuration is refused."""
    config = base_config()
    config.data.path = str(tmp_path)
    with pytest.raises(UserError, match=r"data\.path=.* is for data.source=npz or npy or folder or datasets or csv"):
        load_dataset(config.data)
    for place, source in {"a/1.png": "folder", "b/state.json": "datasets", "c/x/train.parquet": "datasets"}.items():
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_bytes(b"")
        words = [f"--config.data.path={tmp_path / place[0]}"]
        assert parse_config(TABLE, words).data.source == source
        assert parse_config(TABLE, [*words, "--config.data.source=npy"]).data.source == "npy"
