"""What an example is: how it is stored, and how it becomes what a network's layers take. Images are the one kind."""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Inputs(Protocol):
    """A kind of inputs. Its weak and strong views are those of the `Problem`.

    Attributes:
        shape: of one stored example, without the axis of the batch.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def to_network(self, inputs: jax.Array) -> jax.Array:
        """Stored examples or views of them, [B, ...], to float32 [B, ...]."""
        ...


class Images(NamedTuple):
    """Images with values in 0..255, stored as uint8."""

    shape: tuple[int, int, int]  # (height, width, channels)
    # mean and std: per channel, in units of [0, 1] pixel values; they belong to the data set.
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def to_network(self, inputs: jax.Array) -> jax.Array:
        """To the data set's mean 0 and deviation 1."""
        return (inputs.astype(jnp.float32) / 255.0 - jnp.array(self.mean)) / jnp.array(self.std)
