"""One rule for labels: a table of labels, written as each source has them, and read as the same classes."""

import datetime
import io
from types import SimpleNamespace

import datasets
import numpy as np
import pandas
import pyarrow.parquet
import pytest
from PIL import Image

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data import load_dataset
from fedjax_ssl.data.labels import TEST_EVERY, divide
from fedjax_ssl.serve import predictor
from tests.helpers.partitions import data_config

pytestmark = pytest.mark.usefixtures("caches")

NAN = float("nan")
IMAGES = np.random.default_rng(0).integers(0, 256, (8, 4, 4), np.uint8)
ARRAYS, FRAMES = ("npz", "npy"), ("csv", "parquet", "datasets")
ALL = (*ARRAYS, *FRAMES, "folder")


def write_images(folder, labels):
    for row, label in enumerate(labels):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(IMAGES[row]).save(folder / str(label) / f"{row}.png")


def png(row):
    file = io.BytesIO()
    Image.fromarray(IMAGES[row]).save(file, "png")
    return {"bytes": file.getvalue(), "path": None}


def write(folder, source, train, test):
    """Writes training and test labels with some inputs; returns the fields of the section `data`."""
    if source in ARRAYS:
        arrays = {"x_train": IMAGES[: len(train)], "y_train": np.array(train),
                  "x_test": IMAGES[: len(test)], "y_test": np.array(test)}  # fmt: skip
        np.savez(folder / "d.npz", **arrays)
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        return {"source": source, "path": str(folder / "d.npz" if source == "npz" else folder)}
    if source == "folder":
        write_images(folder / "train", train)
        write_images(folder / "test", test)
        return {"source": source, "path": str(folder)}
    for name, labels in {"train": train, "test": test}.items():
        frame = pandas.DataFrame({"x": np.arange(len(labels)) % 2, "label": labels})
        frame.to_csv(folder / f"{name}.csv", index=False)
        if source == "datasets":
            frame["img"] = [png(row) for row in range(len(labels))]
        frame.to_parquet(folder / f"{name}.parquet")
    if source == "datasets":
        return {"source": source, "path": str(folder), "label_column": "label"}
    files = {field: str(folder / f"{name}.{source}") for field, name in {"path": "train", "test_path": "test"}.items()}
    return {"source": "csv", "label_column": "label", **files}


def read(folder, source, train, test):
    return load_dataset(data_config(**write(folder, source, train, test)))


# Training labels, test labels, where they can be written -> classes in order, training codes, test codes.
GOOD = {
    "whole numbers": ([0, 1, -1, 1], [1, -1, 0], ALL, ("0", "1"), [0, 1, -1, 1], [1, 0]),
    "in the order of numbers": ([10, 2, 2, -1], [2, 10], ALL, ("2", "10"), [1, 0, 0, -1], [0, 1]),
    "floats": ([0.0, 1.0, -1.0, NAN], [1.0, NAN], (*ARRAYS, *FRAMES), ("0", "1"), [0, 1, -1, -1], [1]),
    "numbers as texts": (["1.0", "1", "-1.0", "0"], ["0", "1e0"], ALL, ("0", "1"), [1, 1, -1, 0], [0, 1]),
    "texts": (["b", "a", "unlabelled", "b"], ["a", "b"], ALL, ("a", "b"), [1, 0, -1, 1], [0, 1]),
    "the American word": (["b", "a", "Unlabeled", "b"], ["a"], ALL, ("a", "b"), [1, 0, -1, 1], [0]),
    "texts and -1": (["b", "a", "-1", "b"], ["a"], ALL, ("a", "b"), [1, 0, -1, 1], [0]),
    "empty": (["b", "a", None, "b"], ["a", None], FRAMES, ("a", "b"), [1, 0, -1, 1], [0]),
    "an empty text": (["b", "a", "", "?"], ["a", ""], (*ARRAYS, *FRAMES), ("a", "b"), [1, 0, -1, -1], [0]),
    "booleans": ([True, False, True, True], [False], ALL, ("False", "True"), [1, 0, 1, 1], [0]),
    "booleans of a csv": (["true", "FALSE"], ["True"], ALL, ("False", "True"), [1, 0], [1]),
    "codes": (["01", "1", "1.0", "01"], ["01"], ALL, ("01", "1"), [0, 1, 1, 0], [0]),
    "one accent in two spellings": (["café", "cafe\u0301", "x"], ["cafe\u0301"], ALL, ("café", "x"), [0, 0, 1], [0]),
    "underscores": (["10_19", "1019"], ["1019"], ALL, ("1019", "10_19"), [1, 0], [0]),
    "fractions": ([0.5, 1.5, 0.5, -1.0], [1.5], (*ARRAYS, *FRAMES), ("0.5", "1.5"), [0, 1, 0, -1], [1]),
}  # fmt: skip


@pytest.mark.parametrize(("case", "source"), [(case, source) for case, row in GOOD.items() for source in row[2]])
def test_the_same_labels_are_the_same_classes_in_every_source(tmp_path, case, source):
    train, test, _, names, codes, test_codes = GOOD[case]
    found = read(tmp_path, source, train, test)
    assert found.class_names == names and found.num_classes == len(names)
    if source == "folder":  # whose rows are in the order of folders
        assert sorted(found.y_train) == sorted(codes) and sorted(found.y_test) == sorted(test_codes)
    else:
        assert found.y_train.tolist() == codes and found.y_test.tolist() == test_codes
    assert len(found.x_train) == len(train) and len(found.x_test) == len(test_codes)


# Training labels, where they can be written, words of the line.
BAD = {
    "a list": ([[0, 1], [1, 0]], (*ARRAYS, "parquet", "datasets"), "in row 1 is a list; a label is one number"),
    "a date": ([datetime.date(2020, 1, 1)] * 2, ("parquet", "datasets"), "in row 1 is a date; a label is one number"),
    "a list as text": (["[0, 1]", "[1, 0]"], (*ARRAYS, *FRAMES), r"'\[0, 1\]' in row 1 is a date or a list"),
    "a date as text": (["2020-01-01", "x"], (*ARRAYS, *FRAMES), "'2020-01-01' in row 1 is a date or a list"),
    "a duration": (np.array([1, 2], "m8[s]"), ARRAYS, "in row 1 is a timedelta64; a label is one number"),
    "a negative number": ([0, 1, -2], (*ARRAYS, *FRAMES), "'-2' in row 3 is negative, and so is -1"),
    "one class": ([1, -1, -1], (*ARRAYS, *FRAMES), "the only class is '1', where -1 marks no label"),
    "a word of two meanings": (["a", "b", "none"], (*ARRAYS, *FRAMES), "'none' in row 3 may be a class or a missing"),
    "an unknown class": (["b", "c"], (*ARRAYS, *FRAMES), "'a' in row 1 is no class of the training data; known: b, c"),
    "measurements": (list(np.arange(200) / 8), ("parquet",), "has 200 different numbers, such as '0.125'"),
}


@pytest.mark.parametrize(("case", "source"), [(case, source) for case, row in BAD.items() for source in row[1]])
def test_what_no_label_is_has_one_line_in_every_source(tmp_path, case, source):
    train, _, words = BAD[case]
    with pytest.raises(UserError, match=words) as caught:
        read(tmp_path, source, train, ["a"] if case == "an unknown class" else train)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [*ARRAYS, *FRAMES, "metadata.csv"])
def test_a_test_set_without_labels_is_refused_in_every_source(tmp_path, source):
    train, test = ["a", "b"], ["unlabelled"]
    fields = write(tmp_path, "folder" if source == "metadata.csv" else source, train, test)
    if source == "metadata.csv":
        rows = [f"{part}/{label}/{row}.png,{label}\n" for part, labels in (("train", train), ("test", test))
                for row, label in enumerate(labels)]  # fmt: skip
        (tmp_path / source).write_text("".join(["file_name,label\n", *rows]))
    with pytest.raises(UserError, match=r"has no row with a label to test$"):
        load_dataset(data_config(**fields))


def test_a_name_that_the_source_declares_is_a_class(tmp_path):
    """A folder, and a name of a ClassLabel; not the name of no label."""
    assert read(tmp_path / "f", "folder", ["none", "paper", "unlabelled"], ["none"]).class_names == ("none", "paper")
    names = ["unlabeled", "none", "paper"]
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows = {"img": [png(row) for row in range(6)], "label": [2, 0, -1, 1, 2, None]}
    for name in ("train", "test"):
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{name}.parquet")
    found = load_dataset(data_config(source="datasets", path=str(tmp_path)))
    assert found.class_names == ("none", "paper") and found.y_train.tolist() == [1, -1, -1, 0, 1, -1]
    assert found.y_test.tolist() == [1, 0, 1]
    path = tmp_path / "train.parquet"
    table = pyarrow.parquet.read_table(path)
    table = table.set_column(table.column_names.index("label"), table.schema.field("label"), [[2, 0, 7, 1, 2, 1]])
    pyarrow.parquet.write_table(table, path)  # `datasets` does not check the numbers
    with pytest.raises(UserError, match="7 in row 3 is no position of its 3 class names, nor -1"):
        load_dataset(data_config(source="datasets", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("names", "labels", "codes"),
    [
        (("0", "1"), [1, -1, 0], [1, -1, 0]),
        (("0", "1"), ["1.0", "-1", "0"], [1, -1, 0]),
        (("2", "10"), [10, 2, -1], [1, 0, -1]),
        (("cat", "dog"), ["dog", "unlabeled", "cat"], [1, -1, 0]),
    ],
)
def test_predict_reads_labels_by_the_same_rule(tmp_path, names, labels, codes):
    model = SimpleNamespace(
        class_names=names, image_shape=(4, 4, 1), fit="crop",
        facts={"kind": "table", "columns": ["x"], "categories": [None], "label_column": "label"},
    )  # fmt: skip
    np.savez(tmp_path / "d.npz", x=IMAGES[:3], y=np.array(labels))
    assert predictor._of_npz(model, str(tmp_path / "d.npz"), "")[2].tolist() == codes
    frame = pandas.DataFrame({"x": [1, 2, 3], "label": labels})
    frame.to_csv(tmp_path / "d.csv", index=False)
    frame.to_parquet(tmp_path / "d.parquet")
    for end in ("csv", "parquet"):
        assert predictor._of_csv(model, str(tmp_path / f"d.{end}"))[2].tolist() == codes
    write_images(tmp_path / "pictures", labels)
    _, files, found = predictor._of_folder(model, str(tmp_path / "pictures"))
    by_file = {f"{label}/{row}.png": code for row, (label, code) in enumerate(zip(labels, codes))}
    assert found.tolist() == [by_file[file] for file in files]


def test_numbers_in_an_npz_are_positions_if_no_class_is_a_number(tmp_path):
    model = SimpleNamespace(class_names=("cat", "dog"))
    np.savez(tmp_path / "d.npz", x=IMAGES[:3], y=np.array([1, 0, -1]))
    assert predictor._of_npz(model, str(tmp_path / "d.npz"), "")[2].tolist() == [1, 0, -1]
    np.savez(tmp_path / "d.npz", x=IMAGES[:3], y=np.array([1, 0, 2]))
    with pytest.raises(UserError, match="'2' in row 3 is no class"):
        predictor._of_npz(model, str(tmp_path / "d.npz"), "")


def test_rows_for_testing_are_those_of_a_loop(capsys):
    """A class's only row is for training, which is told; -1 is no class."""
    labels = np.random.default_rng(3).integers(-1, 40, 300)
    labels[labels == 7] = 8
    labels[labels == 9] = 8
    labels[[0, 30]] = 9, 7
    expected, single = [], []
    for label in range(40):
        rows = [row for row, each in enumerate(labels) if each == label]
        expected += rows[::TEST_EVERY] if len(rows) > 1 else []
        single += [f"'n{label}'"] * (len(rows) == 1)
    names = [f"n{label}" for label in range(40)]
    train, test = divide(labels, names, "here")
    assert test.tolist() == sorted(expected) and train.tolist() == sorted(set(range(300)) - set(expected))
    line = f"here: no test example is of {', '.join(single)}: a class's only labelled example is for training\n"
    assert capsys.readouterr().err == line and {0, 30} <= set(train.tolist()) and len(single) in (2, 3)
    for none in (np.full(3, -1), np.arange(5)):
        with pytest.raises(UserError, match="here has no class with two labelled examples"):
            divide(none, names, "here")


def test_rows_with_minus_one_are_counted_in_a_line(tmp_path, capsys):
    read(tmp_path, "csv", [0, 1, -1, 1, -1], [1, 0])
    where = f"{tmp_path / 'train.csv'} (data.label_column='label')"
    line = f"{where}: -1 in 2 of 5 rows marks no label; if it is a class, give it another name\n"
    assert capsys.readouterr().err == line
