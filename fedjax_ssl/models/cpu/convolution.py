"""The passes of a convolution on CPUs, built of forward convolutions and matrix products only."""

import functools
import math
import pathlib

import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_ssl.models import passes
from fedjax_ssl.models.cpu import winograd

FEW_CHANNELS = 8  # input channels below which the convolution is one matrix product
MANY_CHANNELS = 32  # channels of input and output from which on Winograd's fewer multiplications pay
TURNED_CHANNELS = 32  # input channels from which on a kernel's gradient is faster with positions last
CACHED_NUMBERS = 200_000  # numbers that a kernel's gradient copies at a time, so that they stay in the caches
CPUINFO = pathlib.Path("/proc/cpuinfo")


def fastest(x, kernel, window):
    """Name of the fastest implementation in `PASSES`."""
    fits = kernel.shape[:2] == (3, 3) and window.strides == (1, 1) and np.max(window.padding) <= 2
    fits = fits and x.dtype == jnp.float32 and not has_wide_vectors()
    # With few positions, transforming the kernel would cost more than it saves.
    many = min(kernel.shape[2:]) >= MANY_CHANNELS and math.prod(x.shape[:3]) >= max(kernel.shape[2:])
    return "winograd" if fits and many else "custom_backward"


@functools.cache
def has_wide_vectors() -> bool:
    """Whether the processor has vectors of 512 bits (AVX-512), according to Linux; False on other systems.

    XLA's library for convolutions has kernels for them; docs/performance.md has its speed.
    """
    return CPUINFO.exists() and "avx512f" in CPUINFO.read_text().split()


def as_product(x, kernel, window):
    """The convolution as one matrix product for 1x1 kernels and few channels, where that is fastest; otherwise None.

    Gradients are the automatic ones.
    """
    if kernel.shape[:2] == (1, 1) and not np.any(window.padding):
        x = x[:, :: window.strides[0], :: window.strides[1]]
        # With more than two axes, the gradient of the kernel would copy the transposed input.
        return jnp.matmul(x.reshape(-1, x.shape[-1]), kernel[0, 0]).reshape(*x.shape[:-1], kernel.shape[3])
    return _conv2d_by_columns(x, kernel, window) if kernel.shape[2] < FEW_CHANNELS else None


def _conv2d_by_columns(x, kernel, window):
    """The convolution as one matrix product of the shifted inputs (im2col), with automatic gradients.

    It is for images, whose few channels leave the fast library little to do. Positions are the last axis of the
    columns, so that whole rows are copied instead of a few channels at a time.
    """
    planes = jnp.pad(x.transpose(3, 0, 1, 2), ((0, 0), (0, 0), *window.padding))
    positions = [range(side - size + 1) for side, size in zip(planes.shape[2:], kernel.shape[:2], strict=True)]
    shifted = [
        planes[:, :, a : a + len(positions[0]) : window.strides[0], b : b + len(positions[1]) : window.strides[1]]
        for a in range(kernel.shape[0])
        for b in range(kernel.shape[1])
    ]  # each [in, N, Ho, Wo]
    columns = jnp.concatenate(shifted)
    product = lax.dot_general(
        columns.reshape(len(columns), -1), kernel.reshape(-1, kernel.shape[3]), (((0,), (0,)), ((), ()))
    )
    return product.reshape(*columns.shape[1:], kernel.shape[3])


def _input_gradient(gradient, kernel, window, input_shape, **_):
    """Gradient with respect to the input, by forward convolutions of stride 1 only.

    Tap a of the kernel connects the input position i = stride * o + a - p with the output position o (p is the
    padding before the first). Positions i = stride * t + r with the same remainder r therefore see only the taps a =
    r + p (mod stride), at the outputs o = t + (r + p - a) / stride. For each pair of remainders this is a small
    convolution of the gradient; their results are interleaved. Stride 1 has one remainder, and the kernel is flipped
    and transposed. (The textbook form for stride 2, a convolution of the gradient with zeros inserted, does four times
    the arithmetic.)
    """
    steps = [-(-size // stride) for size, stride in zip(input_shape[1:3], window.strides, strict=True)]  # values of t

    def taps(axis, remainder):
        """The kernel positions that reach one remainder, in the order of their outputs, and the padding."""
        stride, shift = window.strides[axis], remainder + window.padding[axis][0]
        positions = list(range(shift % stride, kernel.shape[axis], stride))[::-1]
        offsets = [(shift - a) // stride for a in positions]
        missing = steps[axis] - gradient.shape[1 + axis]
        return positions, (-offsets[0], offsets[-1] + missing) if offsets else None

    transposed = kernel.transpose(0, 1, 3, 2)
    rows = []
    for row in range(window.strides[0]):
        row_taps, row_padding = taps(0, row)
        columns = []
        for column in range(window.strides[1]):
            column_taps, column_padding = taps(1, column)
            if not row_taps or not column_taps:  # the kernel is smaller than the stride, and skips these positions
                columns.append(jnp.zeros((len(gradient), *steps, kernel.shape[2]), gradient.dtype))
                continue
            part = transposed[row_taps[0] :: -window.strides[0], column_taps[0] :: -window.strides[1]]
            columns.append(passes.forward(gradient, part, passes.Window((1, 1), (row_padding, column_padding))))
        rows.append(jnp.stack(columns, axis=3))  # [N, Ho, Wo, stride, in]
    if window.strides == (1, 1):
        return columns[0]
    interleaved = jnp.stack(rows, axis=2)
    batch, height, down, width, across, channels = interleaved.shape
    return interleaved.reshape(batch, height * down, width * across, channels)[:, : input_shape[1], : input_shape[2]]


def _kernel_gradient(x, gradient, window, kernel_shape, **_):
    """Gradient with respect to the kernel, by matrix products that sum over examples and positions.

    Tap (a, b) is the sum over positions (i, j) of x[i + a, j + b] gradient[i, j], with x padded.
    """
    # A single product wastes kernel_h - 1 rows on padding and needs joined copies of the gradient, so it is faster only
    # for large images and more than a handful of input channels.
    joined = window.strides == (1, 1) and gradient.shape[1] >= 8 and x.shape[-1] >= 8
    form = _kernel_gradient_in_parts if joined else _kernel_gradient_by_rows
    return form(x, gradient, window, kernel_shape[:2]).astype(gradient.dtype)


def _kernel_gradient_in_parts(x, gradient, window, kernel_size):
    """Sums `_kernel_gradient_joined` over parts of the batch that copy at most `CACHED_NUMBERS` each, or one image."""
    copied = math.prod(gradient.shape[1:3]) * (kernel_size[1] * x.shape[3] + kernel_size[0] * gradient.shape[3])
    most = max(1, CACHED_NUMBERS // copied)
    images = max(size for size in range(1, len(x) + 1) if len(x) % size == 0 and size <= most)

    def add(total, part):
        of_x, of_gradient = part
        return total + _kernel_gradient_joined(of_x, of_gradient, window, kernel_size), None

    parts = [array.reshape(-1, images, *array.shape[1:]) for array in (x, gradient)]
    return lax.scan(add, jnp.zeros((*kernel_size, x.shape[3], gradient.shape[3]), jnp.float32), parts)[0]


def _kernel_gradient_joined(x, gradient, window, kernel_size):
    """All taps in one matrix product, for stride 1.

    The horizontal shifts are joined along the channels of the input, the vertical shifts along the channels of the
    gradient: summing over i' = i + a instead of i turns tap (a, b) into x[i', j + b] gradient[i' - a, j].
    """
    (kernel_height, kernel_width), (height, width, features) = kernel_size, gradient.shape[1:]
    channels, margin = x.shape[-1], kernel_height - 1
    outputs = jnp.pad(gradient, ((0, 0), (margin, margin), (0, 0), (0, 0)))
    outputs = jnp.concatenate([outputs[:, margin - a : 2 * margin - a + height] for a in range(kernel_height)], axis=-1)
    if channels >= TURNED_CHANNELS:
        # The product gains more from having positions last than the transposition costs. The transposition must come
        # before the padding: after it, XLA would merge it into the product.
        planes = jnp.pad(x.transpose(3, 0, 1, 2), ((0, 0), (0, 0), *window.padding))
        inputs = jnp.concatenate([planes[..., b : b + width] for b in range(kernel_width)])
        inputs, outputs = inputs.reshape(len(inputs), -1), outputs.reshape(-1, outputs.shape[-1])
        product = jnp.matmul(inputs, outputs, preferred_element_type=jnp.float32)
    else:
        padded = passes.padded(x, window)
        inputs = jnp.concatenate([padded[:, :, b : b + width] for b in range(kernel_width)], axis=-1)
        product = passes.contract_positions(inputs, outputs)
    return product.reshape(kernel_width, channels, kernel_height, features).transpose(2, 0, 1, 3)


def _kernel_gradient_by_rows(x, gradient, window, kernel_size):
    """One matrix product for each row of taps, with the shifted inputs joined along the channels."""
    kernel_height, kernel_width = kernel_size
    rows_end, columns_end = passes.spans(gradient.shape[1:3], window)
    padded, products = passes.padded(x, window), []
    for a in range(kernel_height):
        rows = padded[:, a : a + rows_end : window.strides[0]]
        inputs = [rows[:, :, b : b + columns_end : window.strides[1]] for b in range(kernel_width)]
        products.append(passes.contract_positions(jnp.concatenate(inputs, axis=-1), gradient))
    return jnp.stack(products).reshape(kernel_height, kernel_width, x.shape[-1], gradient.shape[-1])


# Implementation -> its forward pass, and its gradients with respect to the input and the kernel.
PASSES = {
    "custom_backward": (passes.forward, _input_gradient, _kernel_gradient),
    "winograd": (winograd.forward, winograd.input_gradient, winograd.kernel_gradient),
}
