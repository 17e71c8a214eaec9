"""Domains of rows: read from every source, divided over server and clients, and measured one by one in the records."""

import json

import datasets
import numpy as np
import pandas
import pytest
from PIL import Image

from fedjax_ssl import UserError, load, train
from fedjax_ssl.data import load_dataset, make_partition
from fedjax_ssl.data.partition import make_partition_of
from fedjax_ssl.data.unknown import set_apart
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.report import write_report
from tests.helpers.partitions import data_config
from tests.helpers.stub import make_stub_config

# Each domain turns grey digits [n, 8, 8] into colour images [n, 8, 8, 3].
DOMAINS = {
    "upright": lambda x: np.repeat(x[..., None], 3, axis=-1),
    "rotated": lambda x: np.repeat(np.rot90(x, axes=(1, 2))[..., None], 3, axis=-1),
    "inverted": lambda x: 255 - np.repeat(x[..., None], 3, axis=-1),
    "coloured": lambda x: np.stack([x, x // 4, 255 - x], axis=-1),
}
NAMES = np.array(sorted(DOMAINS))


def shifted(images):
    """The digits, every fourth of them in one domain; and the domains."""
    names = np.array(list(DOMAINS))[np.arange(len(images)) % 4]
    made = np.zeros((*images.shape[:3], 3), np.uint8)
    for name, change in DOMAINS.items():
        made[names == name] = change(images[names == name, ..., 0])
    return made, names


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The file of the digits in four domains, and its arrays."""
    plain = load_dataset(data_config(source="digits"))
    file, arrays = tmp_path_factory.mktemp("domains") / "digits.npz", {}
    for part, number in (("train", 1437), ("test", 360)):
        arrays[f"y_{part}"] = getattr(plain, f"y_{part}")[:number]
        arrays[f"x_{part}"], arrays[f"domain_{part}"] = shifted(getattr(plain, f"x_{part}")[:number])
    np.savez(file, **arrays)
    return file, arrays


def of_file(file, **fields):
    return data_config(source="npz", path=str(file), **fields)


# --- The partitions. -------------------------------------------------------------------------------------------------


def test_each_client_has_one_domain_and_the_server_another(digits):
    file, arrays = digits
    config = of_file(file, partition="domains", server_domain="upright", server_labels=20)
    partition = make_partition_of(load_dataset(config), config, 8, 0)
    domains = arrays["domain_train"]
    assert set(domains[partition.server_index]) == {"upright"}
    assert np.bincount(arrays["y_train"][partition.server_index]).tolist() == [2] * 10
    held = [domains[rows] for rows in partition.client_rows]
    assert [set(names) for names in held] == [{("coloured", "inverted", "rotated")[client % 3]} for client in range(8)]
    np.testing.assert_array_equal(np.sort(np.concatenate(partition.client_rows)), np.flatnonzero(domains != "upright"))
    for first in range(3):
        assert np.ptp([len(names) for names in held[first::3]]) <= 1
    other = make_partition_of(load_dataset(config), config, 8, 1)
    assert any(set(a) != set(b) for a, b in zip(partition.client_rows, other.client_rows))


@pytest.mark.parametrize("fields", [
    {"partition": "lda"},
    {"partition": "iid", "labels": "clients"},
    {"partition": "domains", "labels": "clients", "num_labelled": 40},
])  # fmt: skip
def test_any_partition_may_leave_out_the_server_s_domain(digits, fields):
    config = of_file(digits[0], server_domain="inverted", server_labels=20, **fields)
    partition = make_partition_of(load_dataset(config), config, 6, 0)
    domains = digits[1]["domain_train"]
    assert "inverted" not in domains[np.concatenate(partition.client_rows)]
    assert set(domains[partition.server_index]) == ({"inverted"} if "labels" not in fields else set())
    if fields["partition"] == "domains":
        assert [set(domains[rows]) for rows in partition.client_rows] == 2 * [{"coloured"}, {"rotated"}, {"upright"}]


def test_all_domains_are_at_clients_without_a_server_s(digits):
    config = of_file(digits[0], partition="domains", server_labels=40)
    partition = make_partition_of(load_dataset(config), config, 4, 0)
    domains = digits[1]["domain_train"]
    assert [set(domains[rows]) for rows in partition.client_rows] == [{name} for name in NAMES]
    assert len(set(domains[partition.server_index])) == 4


def test_what_no_range_can_refuse_is_one_line(digits):
    labels, domains = digits[1]["y_train"], digits[1]["domain_train"]
    for fields, clients, of_rows, line in (
        ({"server_domain": "invertet"}, 4, domains, "data.server_domain is 'invertet'.*inverted"),
        ({"server_domain": "a"}, 4, (), "data.server_domain=a needs data that name each example's domain"),
        ({"partition": "domains"}, 4, (), "data.partition='domains' needs data that name each example's domain"),
        ({"partition": "domains"}, 3, domains, "num_clients=3 clients cannot hold 4 domains"),
    ):
        with pytest.raises(UserError, match=line):
            make_partition(labels, 10, data_config(server_labels=10, **fields), clients, 0, domains=of_rows)


# --- The sources. ----------------------------------------------------------------------------------------------------


def assert_domains(dataset, train, test):
    assert [part.tolist() for part in dataset.domains] == [list(train), list(test)]
    assert dataset.tested_domains == tuple(sorted(set(test)))


def test_arrays_name_domains(tmp_path, digits):
    arrays = {**digits[1], "y_test": np.where(np.arange(360) == 5, -1, digits[1]["y_test"])}
    expected = digits[1]["domain_train"], np.delete(digits[1]["domain_test"], 5)  # a test example without a label
    np.savez(tmp_path / "d.npz", **arrays)
    assert_domains(load_dataset(of_file(tmp_path / "d.npz")), *expected)
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    assert_domains(load_dataset(data_config(source="npy", path=str(tmp_path))), *expected)
    numbered = np.arange(360) % 2
    np.savez(tmp_path / "d.npz", **{**arrays, "domain_train": np.zeros(1437), "domain_test": numbered})
    assert_domains(load_dataset(of_file(tmp_path / "d.npz")), ["0"] * 1437, np.delete(numbered, 5).astype(str))
    for wrong, line in (
        ({"domain_test": arrays["domain_test"][:9]}, r"domain_test must have a name for each of 360 .* \(9,\)"),
        ({"domain_train": np.where(arrays["domain_train"] == "rotated", "", "a")}, "'' in row 2 names no domain"),
        ({"domain_train": None}, "domain_train must have a name for each of 1,437 examples, but it is missing"),
    ):
        np.savez(tmp_path / "d.npz", **{key: each for key, each in (arrays | wrong).items() if each is not None})
        with pytest.raises(UserError, match=line):
            load_dataset(of_file(tmp_path / "d.npz"))


@pytest.mark.parametrize("has_test", [False, True])
def test_a_column_of_a_table_names_domains(tmp_path, has_test):
    """It is no input."""
    rng, number = np.random.default_rng(0), 40
    names = np.array(["b", "a", "10"])[np.arange(number) % 3]
    frame = pandas.DataFrame({"x": rng.normal(size=number), "label": np.arange(number) // 3 % 2, "site": names})
    frame.to_csv(tmp_path / "t.csv", index=False)
    fields = {"source": "csv", "path": str(tmp_path / "t.csv"), "label_column": "label", "domain_column": "site"}
    if has_test:
        frame[::-1].to_csv(tmp_path / "test.csv", index=False)
        fields["test_path"] = str(tmp_path / "test.csv")
    dataset = load_dataset(data_config(**fields))
    assert dataset.details["columns"] == ["x"] and dataset.tested_domains == ("10", "a", "b")
    by_value = dict(zip(frame["x"].astype(np.float32).tolist(), names.tolist()))
    for rows, domains in zip((dataset.x_train, dataset.x_test), dataset.domains, strict=True):
        assert domains.tolist() == [by_value[value] for value in rows[:, 0].tolist()]
    if has_test:
        frame.drop(columns="site").to_csv(tmp_path / "test.csv", index=False)
        with pytest.raises(UserError, match=r"test.csv has no column 'site' \(data.domain_column\)"):
            load_dataset(data_config(**fields))


def written(folder, parts, tables=False):
    """Writes an image of one grey level for each (part, outer, inner), or beside a metadata.csv in each part."""
    for number, names in enumerate(parts):
        path = folder.joinpath(*names) / "0.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), number, np.uint8)).save(path)
    for part in {names[0] for names in parts} if tables else ():
        rows = [(f"{domain}/{label}/0.png", label, domain) for of, domain, label in parts if of == part]
        pandas.DataFrame(rows, columns=["file_name", "label", "place"]).to_csv(folder / part / "metadata.csv")


def grey(images):
    return images[:, 0, 0, 0].tolist()


@pytest.mark.parametrize(("level", "clients"), [("first", ""), ("second", ""), ("first", "first"), ("place", "")])
def test_a_level_of_folders_or_a_metadata_csv_names_domains(tmp_path, caches, level, clients):
    pairs = [(part, domain, label) for part in ("train", "test") for domain in ("x", "y") for label in ("cat", "dog")]
    places = [(part, label, domain) if level == "second" else (part, domain, label) for part, domain, label in pairs]
    written(tmp_path / "images", places, tables=level == "place")
    fields = {"source": "folder", "path": str(tmp_path / "images"), "domain_column": level, "client_column": clients}
    dataset = load_dataset(data_config(**fields))
    for part, images, domains, labels in zip(
        ("train", "test"), (dataset.x_train, dataset.x_test), dataset.domains, (dataset.y_train, dataset.y_test)
    ):
        found = [(part, name, ("cat", "dog")[label]) for name, label in zip(domains.tolist(), labels)]
        assert [pairs[number] for number in grey(images)] == found and len(found) == 4
    assert (dataset.owners is None) == (not clients)
    if clients:
        assert dataset.owners.tolist() == [int(name == "y") for name in dataset.domains[0]]
        with pytest.raises(UserError, match="leave no level for the classes"):
            load_dataset(data_config(**fields | {"domain_column": "second"}))


def test_a_column_of_a_hugging_face_data_set_names_domains(tmp_path, caches):
    images = [Image.fromarray(np.full((4, 4), number, np.uint8)) for number in range(10)]
    rows = {"image": images, "label": ["a", "b"] * 5, "scanner": ["m", "n", "o", "m", "n"] * 2}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    fields = {"source": "datasets", "path": str(tmp_path / "saved"), "label_column": "label"}
    dataset = load_dataset(data_config(**fields, domain_column="scanner"))
    for pixels, domains in zip((dataset.x_train, dataset.x_test), dataset.domains, strict=True):
        assert domains.tolist() == [rows["scanner"][number] for number in grey(pixels)]


def test_unknown_test_images_leave_the_domains(digits):
    config = of_file(digits[0], unknown_classes=(3, 7))
    known = ~np.isin(digits[1]["y_test"], (3, 7))
    assert_domains(set_apart(load_dataset(config), config), digits[1]["domain_train"], digits[1]["domain_test"][known])


# --- The records. ----------------------------------------------------------------------------------------------------


def by_hand(run, images, labels, domains):
    predicted = load(run, allow_code=True)(images).probabilities.argmax(axis=1)
    return {name: np.mean(predicted[domains == name] == labels[domains == name]) for name in DOMAINS}


def test_every_test_has_the_accuracy_on_each_domain(digits, tmp_path):
    file, arrays = digits
    fields = {"data.source": "npz", "data.path": str(file), "data.partition": "domains"}
    fields |= {"data.server_domain": "upright", "eval_every": 2, "num_rounds": 3}
    train(make_stub_config(**fields), tmp_path / "run")
    run = read_run(tmp_path / "run")
    names = [f"test_accuracy_{name}" for name in sorted(DOMAINS)]
    assert [{name for name in line if name in names} for line in run.metrics] == 3 * [set(names)]  # 1, 2 and the last
    last = by_hand(run.folder, arrays["x_test"], arrays["y_test"], arrays["domain_test"])
    for records in (run.metrics[-1], run.summary):
        assert {name: records[f"test_accuracy_{name}"] for name in DOMAINS} == pytest.approx(last)
    assert len(set(last.values())) > 1
    share = np.mean([last[name] for name in arrays["domain_test"]])
    assert run.metrics[-1]["test_accuracy"] == pytest.approx(share)
    page = write_report(run.folder).read_text()
    assert "test accuracy on coloured" in page and f"{100 * last['coloured']:.2f} %" in page
    assert (run.folder / "figures" / "measures.svg").exists()


def test_with_validation_images_rounds_have_theirs_and_the_end_has_the_test_set_s(digits, tmp_path):
    """Two seeds in one program, each with its own validation images."""
    file, arrays = digits
    fields = {"data.source": "npz", "data.path": str(file), "data.validation": 200, "num_rounds": 1, "seeds": (0, 1)}
    train(make_stub_config(**fields), tmp_path / "runs")
    found = []
    for seed in (0, 1):
        folder = tmp_path / "runs" / f"seed_{seed}"
        rows = np.load(folder / "partition.npz")["validation_index"]
        of_rows = (arrays[f"{name}_train"][rows] for name in ("x", "y", "domain"))
        (line,), summary = read_run(folder).metrics, json.loads((folder / "summary.json").read_text())
        for records, of, expected in (
            (line, "validation", by_hand(folder, *of_rows)),
            (summary, "test", by_hand(folder, *(arrays[f"{name}_test"] for name in ("x", "y", "domain")))),
        ):
            assert {name: records[f"{of}_accuracy_{name}"] for name in DOMAINS} == pytest.approx(expected)
        assert "test_accuracy_rotated" not in line
        found.append([line[f"validation_accuracy_{name}"] for name in DOMAINS])
    assert found[0] != found[1]
