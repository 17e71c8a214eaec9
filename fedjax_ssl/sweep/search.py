"""Random search for the rows of a sweep, `sweep --tries=N`: the same number of tries for every row.

A try is a run of one seed, with validation images. A row is then run with the fields of its best try, by the validation
accuracy of the last rounds. The test set is not used.
"""

import fnmatch
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class LogUniform(NamedTuple):
    """A log-uniform distribution between two numbers; draws are rounded to three digits."""

    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> float:
        """Draws a number."""
        return float(f"{math.exp(rng.uniform(math.log(self.low), math.log(self.high))):.3g}")


Values = LogUniform | tuple[Any, ...]  # what a field is drawn from: a range, or a tuple of values


class Search(NamedTuple):
    """What tries draw, and how they are run."""

    # Names of rows, with * and ? as in file names -> field -> what it is drawn from. A row draws the fields of all
    # names that match it; later entries replace earlier ones.
    space: Mapping[str, Mapping[str, Values]]
    # Fields of all tries, which need validation images. Fewer rounds than those of the rows save time.
    fields: Mapping[str, Any]
    seed: int = 1000  # of the tries; no row of the table should have their data and weights

    def of(self, row: str) -> dict[str, Values]:
        """The fields that are drawn for a row."""
        fitting = [fields for name, fields in self.space.items() if is_named(row, name)]
        return {field: values for fields in fitting for field, values in fields.items()}

    def draw(self, row: str, number: int) -> dict[str, Any]:
        """The fields of a row's try number 0, 1, ...; try 0 has the row's own values."""
        if number == 0:
            return {}
        rng = np.random.default_rng([number, zlib.crc32(row.encode())])
        return {
            field: values.draw(rng) if isinstance(values, LogUniform) else values[rng.integers(len(values))]
            for field, values in sorted(self.of(row).items())
        }


Methods = Mapping[str, str | tuple[str, Mapping[str, Any]]]  # as in `Sweep.methods`


def is_named(row: str, pattern: str) -> bool:
    """Whether a pattern, with * and ? as in file names, fits a row's name; the name itself does, even with brackets."""
    return row == pattern or fnmatch.fnmatchcase(row, pattern)


def tries_of(methods: Methods, search: Search, number: int) -> Methods:
    """The rows of a sweep's tries: `NAME, try 0`, `NAME, try 1`, ... for each; one for a row without drawn fields."""
    return {
        _name(row, place): changed(method, {**search.draw(row, place), **search.fields})
        for row, method in methods.items()
        for place in range(number if search.of(row) else 1)
    }


def with_best(
    methods: Methods, search: Search, number: int, accuracies: Mapping[str, float], say: Callable[[str], object]
) -> Methods:
    """The rows with the fields of the best of their `number` tries, which is told in a line each.

    A row without a finished try keeps its own values. `accuracies`: name of a finished try -> its validation accuracy,
    a share.
    """
    chosen = dict(methods)
    for row, method in methods.items():
        tried = {place: accuracies.get(_name(row, place), math.nan) for place in range(number)}
        tried = {place: accuracy for place, accuracy in tried.items() if math.isfinite(accuracy)}
        if not tried:
            continue
        best = max(tried, key=lambda place: tried[place])
        drawn = search.draw(row, best)
        chosen[row] = changed(method, drawn)
        values = ", ".join(f"{field}={value}" for field, value in drawn.items()) or "its own values"
        say(f"{row}: try {best} of {len(tried)}, {100 * tried[best]:.2f} % on validation images: {values}")
    return chosen


def row_and_number(name: str) -> tuple[str, str]:
    """The row and the number of a try, from its name."""
    row, _, number = name.rpartition(", try ")
    return row, number


def changed(method: str | tuple[str, Mapping[str, Any]], fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A row with further fields."""
    arguments, own = (method, {}) if isinstance(method, str) else method
    return arguments, {**own, **fields}


def _name(row: str, place: int) -> str:
    return f"{row}, try {place}"
