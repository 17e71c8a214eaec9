"""Words, values and rows with the most mistakes."""

from unittest import mock

import numpy as np

from fedjax_ssl.data.kinds import text
from fedjax_ssl.records.runs import RunRecords
from fedjax_ssl.report import mistakes, run_report

TABLE = {"kind": "table", "columns": ["age", "colour"], "categories": [None, ["red", "blue"]]}


def test_the_category_whose_rows_are_mislabelled_comes_first():
    """The rows without an age are all wrong, but fewer."""
    colours, ages = np.arange(80) % 2, np.arange(80) % 40
    inputs = np.stack([np.where(ages < 12, np.nan, ages), colours], axis=1).astype(np.float32)
    wrong = (colours == 1) & (ages < 39) | (ages < 12)
    found = mistakes.most_mistaken(TABLE, inputs, wrong)
    assert found[:2] == [mistakes.Group("colour = blue", 40, 0.95), mistakes.Group("age is missing", 24, 1.0)]
    assert all(group.number >= mistakes.LEAST and group.share > wrong.mean() for group in found)
    old = mistakes.most_mistaken(TABLE, inputs, np.nan_to_num(inputs[:, 0]) > 32)
    assert old[0] == mistakes.Group("age in (32.25, 39.0]", 14, 1.0)  # a quarter of the ages from 12 to 39
    assert mistakes.shown(TABLE, inputs[1]) == "age missing, colour blue"


def test_tokens_are_those_of_the_library():
    assert (mistakes.UNKNOWN, mistakes.FIRST_WORD) == (text.UNKNOWN, text.FIRST_WORD)


def test_the_word_whose_texts_are_mislabelled_comes_first():
    facts = {"kind": "text", "vocabulary": ["net", "loss"]}
    inputs = np.array([[2, 3, 0], [2, 1, 0]] * 15, np.int32)
    wrong = np.arange(30) % 2 == 0
    assert mistakes.most_mistaken(facts, inputs, wrong) == [mistakes.Group("loss", 15, 1.0)]
    assert mistakes.shown(facts, inputs[1]) == "net (an unknown word)"
    assert mistakes.word({"kind": "text"}, 7) == "token 7"


def test_rows_that_are_wrong_most_often_come_first():
    labels = np.zeros(4, int)
    taken = [{"labels": labels, "predictions": np.array(p)} for p in ([1, 1, 0, 1], [0, 1, 0, 1], [0, 1, 1, 0])]
    assert mistakes.rows_mistaken(taken) == [(1, 3), (2, 1)]


def test_mistakes_are_of_the_last_snapshot_of_the_test_set():
    """Not of validation rows, nor of a test set of another length."""
    sizes = {1: ("test", 3), 2: ("test", 4), 3: ("validation", 4)}
    taken = {
        number: {"of": np.array(of), "labels": np.zeros(size, int), "predictions": np.ones(size, int)}
        for number, (of, size) in sizes.items()
    }
    files = {
        "dataset": TABLE | {"class_names": ["no", "yes"], "num_classes": 2},
        "test_inputs": {"inputs": np.zeros((4, 2), np.float32), "rows": np.arange(4)},
        "snapshots": taken,
        "class_counts": {},
    }
    with mock.patch.multiple(RunRecords, **{name: mock.Mock(return_value=file) for name, file in files.items()}):
        said, *_, rows = run_report._mistakes(RunRecords(None, {}, [{"round": 3}], [], None))
    assert "After round 2, 100.0 % of 4 rows" in said["text"] and "1 of 1" in rows["table"].rows[0]
