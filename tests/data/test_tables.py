"""csv and parquet files: what is read, and one clear line for whatever is wrong with one."""

import json

import numpy as np
import pandas
import pytest

from fedjax_ssl import UserError
from fedjax_ssl.data import load_dataset, make_partition
from fedjax_ssl.data.kinds import table
from fedjax_ssl.data.sources import dataset_facts
from fedjax_ssl.data.tables import read_columns
from tests.helpers.partitions import data_config

GOOD = "age,colour,who,label\n" + "".join(f"{20 + n},{'rgb'[n % 3]},c{n % 2},{n % 2}\n" for n in range(20))


def load(tmp_path, text, **fields):
    path = tmp_path / "t.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    usual = {"label_column": "label", "ignore_columns": "who"}
    config = data_config(**{"source": "csv", "path": str(path), **usual, **fields})
    return load_dataset(config), config


def test_numbers_categories_and_what_is_missing(tmp_path):
    dataset, _ = load(tmp_path, GOOD.replace("25,", ",").replace("27,", "NA,"))
    assert dataset.kind == "table" and dataset.x_train.shape == (16, 2) and dataset.class_names == ("0", "1")
    assert dataset.details["categories"] == [None, ["b", "g", "r"]] and np.isnan(dataset.x_train[:, 0]).sum() == 2
    assert dataset.mean[0] == pytest.approx(np.nanmean(dataset.x_train[:, 0]))
    assert dataset.std == pytest.approx([np.nanstd(dataset.x_train[:, 0]), 1])


def test_numbers_that_float32_cannot_tell_apart_are_named(tmp_path, capsys):
    rows = "".join(f"{1.6e12 + 1000 * n:.0f},0.1,{n},{n % 2}\n" for n in range(20))
    load(tmp_path, "time,same,age,label\n" + rows, ignore_columns="")
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "column 'time' has numbers from 1600000002000 to 1600000019000" in line
    assert "131072 apart; subtract a constant" in line


def test_a_test_file_and_semicolons(tmp_path):
    other = tmp_path / "test.csv"
    other.write_text(GOOD.replace(",r,", ",violet,").replace(",", ";"))
    dataset, _ = load(tmp_path, GOOD.replace(",", ";"), test_path=str(other))
    assert len(dataset.x_train) == 20 and len(dataset.x_test) == 20
    assert np.isnan(dataset.x_test[:, 1]).sum() == 7  # a category that training did not have


def test_a_category_that_only_a_held_out_row_has_is_unknown(tmp_path):
    text = GOOD.replace("20,r,", "20,violet,")
    dataset, _ = load(tmp_path, text)
    assert dataset.x_test[:, 0].tolist() == [20, 21, 30, 31]  # every fifth of each class
    assert dataset.details["categories"] == [None, ["b", "g", "r"]]
    assert np.isnan(dataset.x_test[0, 1]) and np.isfinite(dataset.x_test[1:]).all()


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("", {}, "cannot be read as csv"),
        ("age,label\n", {}, "has no rows"),
        (b"\xff\xfeage", {}, "cannot be read as csv in UTF-8"),
        (GOOD + "1,2\n", {}, "row 21 has 2 fields, the header 4"),
        ('age,label\n1,"a\n', {}, "cannot be read as csv"),
        (GOOD.replace("colour", "age"), {}, "column 2 has the name 'age' of another"),
        (
            GOOD,
            {"label_column": "lable", "client_column": "clinic", "ignore_columns": "id"},  # all at once
            r"'lable' \(data.label_column\);.*'clinic' \(data.client_column\).*'id' \(data.ignore_columns\)",
        ),
        (GOOD, {"label_column": ""}, r"data\.label_column is empty; known: age, colour"),
        (GOOD, {"text_column": "label"}, "'label' has two uses"),
        (GOOD.replace("25,", "old,"), {}, "column 'age' is of numbers, but has 'old' in row 6"),
        (GOOD.replace("25,", "1e99,"), {}, "column 'age' is of numbers of float32, but has '1e99' in row 6"),
        (GOOD.replace(",0\n", ",\n").replace(",1\n", ",\n"), {}, "all labels are empty"),
        (GOOD, {"ignore_columns": "who,age,colour"}, "has no column but the label's"),
        ("x,z,label\nold,1,0\n" + ",2,0\n,3,1\n" * 4, {"ignore_columns": ""}, "'x' has no value in any training row"),
        (GOOD, {"text_column": "age", "weak_views": 2}, "data.weak_views=2, but each example has 1 view"),
        (GOOD, {"test_path": "nowhere.csv"}, "data.test_path=nowhere.csv does not exist"),
        ("who,,label\n1,2,3\n", {}, "column 2 has no name"),
        (GOOD.replace("c1", ""), {"client_column": "who"}, "'' in row 2 names no client"),
        (GOOD.replace(",", ";").replace("\n2", "\n2,"), {}, "column 'age' has numbers with a comma, such as '2,2'"),
    ],
)
def test_one_line_for_a_malformed_file(tmp_path, text, fields, message):
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path, text, **fields)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_parquet(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        read_columns(str(tmp_path / "bad.parquet"), "data.path")


def partition_of(tmp_path, text, num_clients=100):
    fields = {"client_column": "who", "ignore_columns": "", "partition": "natural", "labels": "clients"}
    dataset, config = load(tmp_path, text, **fields)
    return dataset, make_partition(dataset.y_train, 2, config, num_clients, 0, dataset.owners)


def test_a_natural_partition_needs_clients(tmp_path):
    dataset, config = load(tmp_path, GOOD)
    config.partition = "natural"
    for owners in (None, np.arange(16) % 3):
        with pytest.raises(UserError, match=r"data\.partition='natural' needs data that name each example's client"):
            make_partition(dataset.y_train, 2, config, 2, 0, owners)


def test_a_client_has_a_name_without_spaces_and_a_training_row(tmp_path):
    """Both rows of client c9 are for testing. Names of clients stay in the file."""
    rows = GOOD.replace("c0", " c0 ", 3).replace("20,r, c0 ", "20,r,c9").replace("21,g,c1", "21,g,c9")
    dataset, partition = partition_of(tmp_path, rows, num_clients=2)
    assert dataset.owners.tolist() == [n % 2 for n in range(20) if 20 + n not in dataset.x_test[:, 0]]
    facts = dataset_facts(dataset._replace(row_sums=None))  # checksums have any letters
    assert [len(own) for own in partition.client_rows] == [8, 8] and "c1" not in json.dumps(facts)


def test_a_column_that_numbers_the_rows_and_names_with_commas(tmp_path):
    numbered = [f"{n},{line}" for n, line in enumerate(GOOD.splitlines(), start=-1)]
    text = "\n".join([numbered[0].replace("-1", "").replace("who", '"who, where"'), *numbered[1:]])
    dataset, _ = load(tmp_path, text, ignore_columns='age, "who, where"')
    assert dataset.details["columns"] == ["colour"]


def test_a_blank_line_is_a_value_where_there_is_one_column(tmp_path):
    (tmp_path / "one.csv").write_text("\nnote\na\n\nb\n\n")
    assert read_columns(str(tmp_path / "one.csv"), "csv").to_dict("list") == {"note": ["a", "", "b", ""]}
    (tmp_path / "two.csv").write_text("note,n\n\na,1\n")
    assert read_columns(str(tmp_path / "two.csv"), "csv").to_dict("list") == {"note": ["a"], "n": ["1"]}


def test_a_named_index_of_a_parquet_file_is_a_column(tmp_path):
    """pandas stores a frame's index, and does not read it as a column; selected rows keep their numbers."""
    frame = pandas.DataFrame({"client": ["a", "b"] * 4, "age": [*range(7), np.inf], "label": [0, 1] * 4})
    for name, indexed in {"one": frame.set_index("client"), "two": frame.set_index(["client", "age"])}.items():
        indexed.to_parquet(tmp_path / f"{name}.parquet")
        found = read_columns(str(tmp_path / f"{name}.parquet"), "data.path").astype(object)
        pandas.testing.assert_frame_equal(found[list(frame)], frame.astype(object))
    pandas.concat({"a": frame}, axis=1).to_parquet(tmp_path / "levels.parquet")
    assert "('a', 'age')" in read_columns(str(tmp_path / "levels.parquet"), "data.path")
    frame[4:].to_parquet(tmp_path / "t.parquet")
    with pytest.raises(UserError, match="column 'age' has inf in row 4"):
        load_dataset(data_config(source="csv", path=str(tmp_path / "t.parquet"), label_column="label"))


def columns_of(tmp_path, end="csv", **columns):
    """The categories of columns beside a label, in a file of either format."""
    number = len(next(iter(columns.values())))
    frame = pandas.DataFrame({**columns, "label": np.arange(number) % 2})
    (frame.to_csv if end == "csv" else frame.to_parquet)(tmp_path / f"t.{end}", index=False)
    dataset = load_dataset(data_config(source="csv", path=str(tmp_path / f"t.{end}"), label_column="label"))
    return dict(zip(dataset.details["columns"], dataset.details["categories"])), dataset


def test_series_of_a_dict_are_by_place():
    """pandas would put rows of the same label together."""
    given = {"age": pandas.Series([30, 40], [7, 3]), "bmi": pandas.Series([1, 2], [3, 0])}
    facts = {"columns": ["age", "bmi"], "categories": [None, None]}
    assert table.encode(given, facts).tolist() == [[30, 1], [40, 2]]


def test_categories_that_are_numbers_stay_categories(tmp_path):
    """pandas reads them as numbers from a parquet file, in which it has noted what they are."""
    codes = pandas.Categorical([10, 2, 7, None] * 8, [10, 7, 2])
    categories, dataset = columns_of(tmp_path, "parquet", scanner=codes, age=np.arange(32) % 5)
    assert categories == {"scanner": ["2", "7", "10"], "age": None}
    assert np.isnan(dataset.x_train[:, 0]).any() and np.nanmax(dataset.x_train[:, 0]) == 2


@pytest.mark.parametrize("end", ["csv", "parquet"])
def test_what_is_a_number(tmp_path, end):
    """A declared type counts; in a csv file, digits that begin with 0 are no number."""
    columns = {
        "age": ["10_19", "20_29"] * 10,
        "zip": ["00501", "10115"] * 10,
        "whole": pandas.array([1, None] * 10, "Int64"),
        "half": [1.5, 2.0] * 10,
        "is": [True, False] * 10,
        "text": ["1", "2"] * 10,
        "dependents": ["1", "3+"] * 10,
    }
    found, dataset = columns_of(tmp_path, end, **columns)
    assert found == {
        "age": ["10_19", "20_29"], "zip": ["00501", "10115"], "whole": None, "half": None, "is": ["False", "True"],
        "text": None if end == "csv" else ["1", "2"], "dependents": ["1", "3+"],
    }  # fmt: skip
    rows = np.setdiff1d(np.arange(20), [0, 1, 10, 11])  # every fifth of each class is for testing
    np.testing.assert_array_equal(dataset.x_train[:, 2], np.where(rows % 2 == 0, 1, np.nan))


@pytest.mark.parametrize("place", ["training", "testing", "a test file", "predict"])
def test_digits_after_a_zero_are_no_number_wherever_they_are(tmp_path, place):
    """Among numbers 007 is an error, in the row where it is."""
    values = [str(n) for n in np.random.default_rng(0).integers(0, 1000, 40)]
    good = "x,label\n" + "".join(f"{value},{n % 2}\n" for n, value in enumerate(values))
    dataset, _ = load(tmp_path, good, ignore_columns="")
    tested = [float(value) for n, value in enumerate(values) if n % 10 < 2]
    assert dataset.x_test[:, 0].tolist() == tested
    row = {"training": 5, "testing": 10}.get(place, 7)
    values[row] = "007"
    bad = "x,label\n" + "".join(f"{value},{n % 2}\n" for n, value in enumerate(values))
    (tmp_path / "other.csv").write_text(bad)
    with pytest.raises(UserError, match=f"column 'x' is of numbers.*, but has '007' in row {row + 1}"):
        if place == "predict":
            table.encode(read_columns(str(tmp_path / "other.csv"), "csv"), dataset.details)
        elif place == "a test file":
            load(tmp_path, good, ignore_columns="", test_path=str(tmp_path / "other.csv"))
        else:
            load(tmp_path, bad, ignore_columns="")


def test_a_category_is_the_same_in_every_file(tmp_path):
    """A file for `predict` may have other types: a whole number with a missing value is a float there."""
    found, dataset = columns_of(tmp_path, "parquet", grade=pandas.Categorical(["1", "2"] * 10), is_=[True, False] * 10)
    assert found == {"grade": ["1", "2"], "is_": ["False", "True"]}
    new = {"grade": [1.0, None, 2], "is_": ["true", "FALSE", None]}
    np.testing.assert_array_equal(table.encode(new, dataset.details), [[0, 1], [np.nan, 0], [1, np.nan]])


DAYS = pandas.date_range("2020-01-01", periods=80)
USELESS = {
    "parquet dates": ("parquet", DAYS, "has dates or times, such as '2020-01-"),
    "parquet times": ("parquet", list(DAYS.time), "has dates or times, such as '00:00:00'"),
    "parquet lists": ("parquet", [[n, 1] for n in range(80)], "has lists, such as .*give each of their numbers a col"),
    "dates": ("csv", DAYS, "has dates or times, such as '2020-01-.*days since a date"),
    "German dates": ("csv", DAYS.strftime("%d.%m.%Y"), "has dates or times"),
    "times": ("csv", [f"{n % 24}:30" for n in range(80)], "has dates or times"),
    "lists": ("csv", [[n % 3, 1] for n in range(80)], "has lists"),
    "names": ("csv", [f"n{n}" for n in range(80)], "has 64 different texts in 64 rows, so they are no categories"),
    "names of pairs": ("csv", [f"n{n // 2}" for n in range(80)], "has 32 different texts in 64 rows"),
    "numbers as texts": ("parquet", [str(n) for n in range(80)], "has 64 .*save it as numbers, since the"),
    "bounds": ("csv", ["<5" if n % 6 == 2 else n for n in range(80)], "is of num.* '<5' in row 3, and texts in 11"),
    "mostly bounds": ("csv", [f"<{n % 9}" if n % 6 else n % 7 for n in range(80)], "is of num.* '<2' in row 3, and"),
    "texts among many": ("csv", ["ND" if n % 6 == 2 else n % 37 for n in range(80)], "is of num.* 'ND' in row 3, and"),
    "infinity in a csv": ("csv", ["inf" if n % 6 == 2 else n / 7 for n in range(80)], "is of num.* 'inf' in row 3"),
    "dates in words": ("csv", [f"{n % 28 + 1} March 2020" for n in range(80)], "has dates or times"),
    "percentages": ("csv", [f"{n % 9}%" for n in range(80)], "has numbers with a unit, such as '2%'"),
    "infinity": ("parquet", [np.inf if n % 10 == 2 else n / 7 for n in range(80)], "has inf in row 3; leave it empty"),
}


@pytest.mark.parametrize("case", USELESS)
def test_a_column_of_no_use_is_named_with_the_field_that_leaves_it_out(tmp_path, case):
    end, values, words = USELESS[case]
    with pytest.raises(UserError, match=f"column 'x' {words}") as caught:
        columns_of(tmp_path, end, x=values, y=np.arange(80) % 7)
    assert str(caught.value).endswith("say --config.data.ignore_columns='x'") and "\n" not in str(caught.value)


def test_all_columns_of_no_use_are_told_at_once(tmp_path):
    with pytest.raises(UserError, match=r"column 'day' has dates.*column 'a, b' has 64 diff.*columns='day,\"a, b\"'"):
        columns_of(tmp_path, **{"day": DAYS, "y": np.arange(80) % 7, "a, b": [f"n{n}" for n in range(80)]})


def test_a_number_that_differs_in_each_row_may_be_an_identifier(tmp_path, capsys):
    columns_of(tmp_path, patient=np.random.default_rng(0).permutation(80), size=np.arange(80) / 7)
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "column 'patient' has another whole number in each of 64 rows" in line


def test_categories_that_training_had_not_are_counted(tmp_path, capsys):
    _, dataset = columns_of(tmp_path, colour=list("rgbb") * 5, age=range(20))
    assert not capsys.readouterr().err
    new = {"colour": ["r", "violet", "pink", None, "?"], "age": [1, 2, 3, 4, 5]}
    encoded = table.encode(new, dataset.details, "new.csv")
    np.testing.assert_array_equal(encoded[:, 0], [2] + [np.nan] * 4)
    assert capsys.readouterr().err == (
        "warning: new.csv: of 5 rows these have categories that training had not, which count as missing: "
        "column 'colour' in 2, such as 'violet'\n"
    )


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_commas_in_a_header_and_in_numbers_do_not_separate(tmp_path, delimiter):
    rows = [["age, in years, whole", "label"], *(["1,5", "a"], ["2,5", "b"])]
    (tmp_path / "t.csv").write_text("\n".join(map(delimiter.join, rows)))
    found = read_columns(str(tmp_path / "t.csv"), "csv")
    assert found.to_dict("list") == {"age, in years, whole": ["1,5", "2,5"], "label": ["a", "b"]}


def test_a_field_may_be_long(tmp_path):
    (tmp_path / "t.csv").write_text(f"note,label\n{'long ' * 40_000},a\nshort,b\n")
    assert [len(note) for note in read_columns(str(tmp_path / "t.csv"), "csv")["note"]] == [200_000, 5]


def test_many_classes_of_few_rows(tmp_path):
    rows = "".join(f"{n},{n % 150}.0\n" for n in range(300))
    assert load(tmp_path, "age,label\n" + rows, ignore_columns="")[0].num_classes == 150


def test_labels_stay_where_they_are(tmp_path):
    rows = [line if n % 4 or not n else line.rpartition(",")[0] + "," for n, line in enumerate(GOOD.splitlines())]
    dataset, config = load(tmp_path, "\n".join(rows))
    labels = dataset.y_train
    assert (labels < 0).sum() == 5
    for where, expected in (("clients", (labels >= 0).sum()), ("server", 0)):
        config.update({"labels": where, "server_labels": 4, "partition": "lda", "alpha": 100.0})
        partition = make_partition(labels, 2, config, 2, 0)
        rows = np.concatenate(partition.client_rows)
        assert len(partition.labelled_rows) == np.count_nonzero(labels[rows] >= 0) * (where == "clients")
        assert (labels[partition.server_index] >= 0).all() and len(partition.server_index) == 4 * (where == "server")
        assert expected == 0 or len(partition.labelled_rows) > 0
    config.update({"labels": "some_clients"})
    with pytest.raises(UserError, match="client 0 has some labels"):
        make_partition(labels, 2, config, 2, 0)
    whole = np.array([0, 1, 0, 1, -1, -1])  # of three clients the first two
    config.update({"partition": "natural", "labelled_clients": 1})
    with pytest.raises(UserError, match=r"2 clients have labels, but data\.labelled_clients=1"):
        make_partition(whole, 2, config, 3, 0, np.arange(6) // 2)
    config.update({"partition": "lda", "labels": "clients", "num_labelled": 4})
    with pytest.raises(UserError, match=r"data\.num_labelled=4 is not for data with empty labels"):
        make_partition(labels, 2, config, 2, 0)


@pytest.mark.parametrize("second", ["1", "none"])
def test_labels_clients_and_columns_that_are_wrong_are_told_at_once(tmp_path, second):
    rows = "".join(f"2020-01-{1 + n:02},c{n},{second if n % 2 else 0}\n" for n in range(28)).replace("c5,", ",")
    with pytest.raises(UserError) as caught:
        load(tmp_path, "day,who,label\n" + rows, ignore_columns="", client_column="who")
    lines = str(caught.value).split("; ")
    assert ("'none' in row 2 may be a class" in lines[0]) == (second == "none")
    for words in ("'' in row 6 names no client", "column 'day' has dates or times"):
        assert sum(words in line for line in lines) == 1
