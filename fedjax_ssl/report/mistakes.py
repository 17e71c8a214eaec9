"""Finds the words, values and rows of a test set that are mislabelled most, for inputs other than images."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

UNKNOWN, FIRST_WORD = 1, 2  # tokens of texts in test_inputs.npz: an unknown word, the first of the vocabulary; 0 pads
LEAST, MOST = 10, 10  # the least examples of a group; the most groups and rows that are shown
QUARTERS = (0.25, 0.5, 0.75)


class Group(NamedTuple):
    """Examples that have something in common, and how many of them are mislabelled."""

    name: str
    number: int
    share: float  # of them that are mislabelled


def groups(facts: Mapping[str, Any], inputs: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields what examples have in common, and which examples do, bool [T].

    Args:
        facts: of the data set.
        inputs: test examples as they are stored, [T, ...]; only the first of several views is read.
    """
    first = inputs[:, 0] if inputs.ndim == 3 else inputs
    if facts.get("kind") == "text":
        for token in np.unique(first[first >= UNKNOWN]):
            yield word(facts, int(token)), (first == token).any(axis=1)
        return
    categories = facts.get("categories") or [None] * first.shape[1]
    for column, (name, names) in enumerate(zip(columns(facts, first.shape[1]), categories)):
        values = first[:, column]
        if np.isnan(values).any():
            yield f"{name} is missing", np.isnan(values)
        if names is not None:
            for code, category in enumerate(names):
                yield f"{name} = {category}", values == code
        elif np.isfinite(values).any():
            ends = [-np.inf, *np.unique(np.nanquantile(values, QUARTERS)), np.inf]
            for start, end in itertools.pairwise(ends):
                yield f"{start:.4g} < {name} <= {end:.4g}", (values > start) & (values <= end)


def columns(facts: Mapping[str, Any], number: int) -> list[str]:
    """The names of a table's columns, or of features."""
    return list(facts.get("columns") or (f"feature {place}" for place in range(number)))


def word(facts: Mapping[str, Any], token: int) -> str:
    """The word of a token."""
    vocabulary = facts.get("vocabulary")
    if not vocabulary:
        return f"token {token}"
    return vocabulary[token - FIRST_WORD] if token >= FIRST_WORD else "(an unknown word)"


def most_mistaken(facts: Mapping[str, Any], inputs: np.ndarray, wrong: np.ndarray) -> list[Group]:
    """The groups that are mislabelled more often than average, the least likely by chance first.

    Args:
        facts, inputs: see `groups`.
        wrong: bool [T], whether each example is mislabelled.
    """
    overall = wrong.mean()
    found = []
    for name, members in groups(facts, inputs):
        number = int(members.sum())
        if number >= LEAST and (share := float(wrong[members].mean())) > overall:
            found.append(((share - overall) * number**0.5, Group(name, number, share)))
    return [group for _, group in sorted(found, key=lambda entry: -entry[0])[:MOST]]


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
    if facts.get("kind") == "text":
        return " ".join(word(facts, int(token)) for token in example.reshape(-1, example.shape[-1])[0] if token)
    values = example.reshape(-1, example.shape[-1])[0]
    categories = facts.get("categories") or [None] * len(values)
    texts = [
        "missing" if np.isnan(value) else names[int(value)] if value in range(len(names or ())) else f"{value:.4g}"
        for value, names in zip(values, categories)
    ]
    return ", ".join(f"{name} {text}" for name, text in zip(columns(facts, len(values)), texts))
