"""Pooling by shifted slices, because `reduce_window` has a slow gradient on CPUs."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax


def largest(x, sizes, strides):
    """The largest number of each window of x, without padding.

    Args:
        x: float array.
        sizes, strides: of the windows, for each axis of `x`.

    Returns:
        A float array with (side - size) // stride + 1 numbers along each axis. Among equal numbers the first of a
        window gets the gradient, as in XLA.
    """
    if x.ndim == 4 and sizes == strides and sizes[0] == sizes[3] == 1:
        return _largest_of_blocks(_in_blocks(x, *sizes[1:3]))
    return _combined(_first_of_largest, x, sizes, strides)


def sums(x, sizes, strides):
    """The sum of each window, see `largest`."""
    return _combined(jnp.add, x, sizes, strides)


def _combined(combine, x, sizes, strides):
    """Combines a window's numbers along one axis after the other.

    The last axis comes first: of equal numbers each row offers the one of the first column, and the first row wins.
    """
    for axis, size, stride in reversed(list(zip(range(x.ndim), sizes, strides, strict=True))):
        if size > 1 or stride > 1:
            span = (x.shape[axis] - size) // stride * stride + 1
            x = functools.reduce(combine, [lax.slice_in_dim(x, tap, tap + span, stride, axis) for tap in range(size)])
    return x


def _first_of_largest(x, y):
    """The larger number, or NaN; of equal ones x, which then gets the gradient."""
    return jnp.where((x >= y) | jnp.isnan(x), x, y)


# Windows side by side, the usual ones, have a gradient of their own, which reads each number once.


def _in_blocks(x, down, across):
    """[N, H, W, C] as blocks [N, H / down, down, W / across, across, C]; drops what does not fill a block."""
    batch, height, width, channels = x.shape
    height, width = height // down, width // across
    return x[:, : down * height, : across * width].reshape(batch, height, down, width, across, channels)


@jax.custom_vjp
def _largest_of_blocks(blocks):
    return _apart(functools.reduce(jnp.maximum, _numbers(blocks)))


def _apart(x):
    """x, computed by a loop of its own, which XLA cannot merge with what follows.

    Networks flatten what they have pooled. Merged with that, the loop runs over flat positions, is not vectorised, and
    takes six times as long. Both branches return x, but XLA does not know that: a true number is 1.
    """
    positive = x[(0,) * x.ndim] > 0
    return lax.cond(positive, lambda x: x * positive.astype(x.dtype), lambda x: x, x)


def _numbers(blocks):
    """The numbers of each block in turn, row by row, each [N, H, W, C]."""
    places = itertools.product(range(blocks.shape[2]), range(blocks.shape[4]))
    return [blocks[:, :, row, :, column] for row, column in places]


def _largest_forward(blocks):
    return _largest_of_blocks(blocks), blocks


def _largest_backward(blocks, gradient):
    largest, *others = _numbers(blocks)
    first = jnp.zeros(largest.shape, jnp.int8)
    for place, number in enumerate(others, start=1):
        # Not whether it equals the result: XLA may compute a number twice, and round it differently.
        first = jnp.where(number > largest, jnp.int8(place), first)
        largest = jnp.maximum(largest, number)
    places = jnp.arange(blocks.shape[2] * blocks.shape[4], dtype=jnp.int8)
    of_places = places.reshape(blocks.shape[2], 1, blocks.shape[4], 1)
    return (jnp.where(_apart(first)[:, :, None, :, None] == of_places, gradient[:, :, None, :, None], 0),)


_largest_of_blocks.defvjp(_largest_forward, _largest_backward)
