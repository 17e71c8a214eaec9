"""What a kind of inputs defines: how examples are stored, what a network takes, and which views there are."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedjax_ssl.ops.augment import Views

Facts = Mapping[str, Any]  # of a data set, see `fedjax_ssl.data.dataset_facts`


class Inputs(Protocol):
    """The inputs of one data set. The `Problem` has their weak and strong views.

    Four attributes are optional. `mix`, (a, b, lambda) -> mixtures, is mixup for kinds whose stored numbers cannot be
    averaged; `mix_order` is its order for kinds whose mixtures have no weak view. `together`, (views) -> one batch,
    float32, is for kinds whose stored examples or mixtures differ in shape from views. `keywords` are keyword arguments
    for the backbone's factory.

    Attributes:
        shape: shape of one stored example, without the batch axis.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def to_network(self, inputs: jax.Array) -> jax.Array:
        """Converts stored examples or their views, [B, ...], to the backbone's input, [B, ...]."""
        ...


class Kind(NamedTuple):
    """A kind of inputs: an entry of the registry `KINDS`."""

    noun: str  # plural noun for examples, for messages
    stored: type[np.generic]  # dtype of stored examples
    inputs: Callable[[Facts], Inputs]  # facts of a data set -> its inputs
    views: Callable[[Any, Facts], Views]  # configuration, facts -> the views
    # Examples that a user gives to a trained model, facts -> stored examples. Raises a UserError.
    given: Callable[[Any, Facts], np.ndarray]
