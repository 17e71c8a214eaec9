"""Finds the words, values and rows of a test set that are mislabelled most, for inputs other than images."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

UNKNOWN, FIRST_WORD = 1, 2  # tokens of texts in test_inputs.npz: an unknown word, the first of the vocabulary; 0 pads
LEAST, MOST = 10, 10  # the least examples of a group; the most groups and rows that are shown


class Group(NamedTuple):
    """Examples that have something in common, and how many of them are mislabelled."""

    name: str
    number: int
    share: float  # of them that are mislabelled


def most_mistaken(facts: Mapping[str, Any], inputs: np.ndarray, wrong: np.ndarray) -> list[Group]:
    """The groups that are mislabelled more often than average, the least likely by chance first.

    A group shares a word, a category, a missing value, or a quarter of a column's numbers.

    Args:
        facts: of the data set.
        inputs: test examples as they are stored, [T, ...]; only the first of several views is read.
        wrong: bool [T], whether each example is mislabelled.
    """
    import pandas

    first = pandas.DataFrame(inputs[:, 0] if inputs.ndim == 3 else inputs)
    if facts.get("kind") == "text":
        held = first.stack()
        held = held[held >= UNKNOWN].map(lambda token: word(facts, int(token)))
    else:
        held = first.apply(lambda values: _groups(values, *columns(facts, first.shape[1])[values.name])).stack()
    pairs = held.rename("name").rename_axis(["example", None]).reset_index("example").drop_duplicates()
    pairs["wrong"] = wrong[pairs["example"]]
    found = pairs.groupby("name")["wrong"].agg(["size", "mean"])
    found = found[(found["size"] >= LEAST) & (found["mean"] > wrong.mean())]
    found = found.loc[((wrong.mean() - found["mean"]) * found["size"] ** 0.5).sort_values(kind="stable").index]
    return [Group(name, int(number), float(share)) for name, number, share in found.head(MOST).itertuples()]


def _groups(values: Any, name: str, categories: Sequence[str] | None) -> Any:
    """The name of the group of each value of a column, both a pandas Series."""
    import pandas

    if categories is not None:
        groups = f"{name} = " + values.map(dict(enumerate(categories)))
    else:
        groups = f"{name} in " + pandas.qcut(values, 4, duplicates="drop", precision=4).astype(str)
    return groups.where(values.notna(), f"{name} is missing")


def columns(facts: Mapping[str, Any], number: int) -> list[tuple[str, Sequence[str] | None]]:
    """The name of each column or feature, and the names of its categories; None: it has numbers."""
    names = facts.get("columns") or [f"feature {place}" for place in range(number)]
    return list(zip(names, facts.get("categories") or [None] * number))


def word(facts: Mapping[str, Any], token: int) -> str:
    """The word of a token."""
    vocabulary = facts.get("vocabulary")
    if not vocabulary:
        return f"token {token}"
    return vocabulary[token - FIRST_WORD] if token >= FIRST_WORD else "(an unknown word)"


def rows_mistaken(snapshots: Sequence[Mapping[str, np.ndarray]]) -> list[tuple[int, int]]:
    """Rows of the test set that the last snapshot mislabels, and how many snapshots mislabel each, the most first.

    Args:
        snapshots: of the test set, in order of rounds.
    """
    wrong = np.stack([taken["predictions"] != taken["labels"] for taken in snapshots])
    times = np.where(wrong[-1], wrong.sum(axis=0), 0)
    return [(int(row), int(times[row])) for row in np.argsort(-times, kind="stable")[:MOST] if times[row]]


def shown(facts: Mapping[str, Any], example: np.ndarray) -> str:
    """One line of text for an example."""
    values = example.reshape(-1, example.shape[-1])[0]
    if facts.get("kind") == "text":
        return " ".join(word(facts, int(token)) for token in values if token)
    return ", ".join(
        f"{name} missing" if np.isnan(value) else f"{name} {names[int(value)] if names else format(value, '.4g')}"
        for value, (name, names) in zip(values, columns(facts, len(values)))
    )
