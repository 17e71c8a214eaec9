"""What a kind of inputs says of itself: how an example is stored, how a network takes it, which views it has."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedjax_ssl.augment import Views

Mix = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Facts = Mapping[str, Any]  # of a data set, see `fedjax_ssl.data.dataset_facts`


class Inputs(Protocol):
    """The inputs of one data set. Their weak and strong views are those of the `Problem`.

    Four attributes are optional. `mix`, (a, b, lambda) -> mixtures, is mixup where stored numbers cannot be averaged;
    `mix_order` is its order where mixtures have no weak view. `together`, (views) -> one batch, float32, is for kinds
    whose stored examples or mixtures have another shape than views. `keywords` are keyword arguments that a backbone's
    factory gets.

    Attributes:
        shape: of one stored example, without the axis of the batch.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def to_network(self, inputs: jax.Array) -> jax.Array:
        """Stored examples or views of them, [B, ...], to what a backbone takes, [B, ...]."""
        ...


class Kind(NamedTuple):
    """A kind of inputs: its file's entry in the registry."""

    noun: str  # of many examples, for messages
    stored: type[np.generic]  # of the numbers of an example
    inputs: Callable[[Facts], Inputs]  # facts of a data set -> its inputs
    views: Callable[[Any, Facts], Views]  # configuration, facts -> the views
    wrong: Callable[[Facts], str]  # facts that were read from a file -> what is wrong with them, or ''
    # What a user gives a trained model, and the facts -> stored examples. Raises a UserError.
    given: Callable[[Any, Facts], np.ndarray]


def are_numbers(values: Any, number: int, above: float = -math.inf) -> bool:
    """Whether a value from a file is a list of so many finite numbers, all above a bound."""
    return (
        isinstance(values, list)
        and len(values) == number
        and all(type(value) in (int, float) and math.isfinite(value) and value > above for value in values)
    )


def are_sizes(values: Any, *numbers: int) -> bool:
    """Whether a value from a file is a list of whole numbers from 1 on, as many as one of `numbers` says."""
    return isinstance(values, list) and len(values) in numbers and all(type(v) is int and v > 0 for v in values)
