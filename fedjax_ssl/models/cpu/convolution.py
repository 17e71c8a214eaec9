"""The passes of a convolution on a CPU, in forward convolutions and matrix products only."""

import math

import jax.numpy as jnp
from jax import lax

from fedjax_ssl.models import passes
from fedjax_ssl.models.cpu import processor, winograd

FEW_CHANNELS = 8  # of the input: below, a CPU convolves by one matrix product
MANY_CHANNELS = 32  # on both sides: from here on fewer multiplications pay
TURNED_CHANNELS = 32  # of the input: from here on a kernel's gradient is faster with positions last
CACHED_NUMBERS = 200_000  # what a kernel's gradient copies at a time, so that its product finds them in the caches


def fastest(x, kernel, stride):
    """The implementation of `PASSES` to take."""
    fits = (*kernel.shape[:2], stride) == (3, 3, 1) and x.dtype == jnp.float32
    # Transforming the kernel is the same work for few positions as for many.
    many = min(kernel.shape[2:]) >= MANY_CHANNELS and math.prod(x.shape[:3]) >= max(kernel.shape[2:])
    return "winograd" if fits and many and not processor.has_wide_vectors() else "custom_backward"


def as_product(x, kernel, stride):
    """The convolution as one matrix product, where that is the fastest: of 1x1 kernels and of few channels; else None.

    Its gradients are the automatic ones.
    """
    if kernel.shape[:2] == (1, 1):
        x = x[:, ::stride, ::stride]
        # Two axes: with more, the gradient of the kernel copies the transposed input.
        return jnp.matmul(x.reshape(-1, x.shape[-1]), kernel[0, 0]).reshape(*x.shape[:-1], kernel.shape[3])
    return _conv2d_by_columns(x, kernel, stride) if kernel.shape[2] < FEW_CHANNELS else None


def _conv2d_by_columns(x, kernel, stride):
    """The convolution as one matrix product of the shifted inputs (im2col), its gradient the automatic one.

    For images, whose few channels leave the fast library little to do. The columns are laid out with the
    positions last: whole rows are copied, instead of a few channels at a time.
    """
    vertical, horizontal = (kernel.shape[0] - 1) // 2, (kernel.shape[1] - 1) // 2
    _, height, width, _ = x.shape
    planes = jnp.pad(x.transpose(3, 0, 1, 2), ((0, 0), (0, 0), (vertical, vertical), (horizontal, horizontal)))
    shifted = [
        planes[:, :, a : a + height : stride, b : b + width : stride]
        for a in range(kernel.shape[0])
        for b in range(kernel.shape[1])
    ]  # each [in, N, Ho, Wo]
    columns = jnp.concatenate(shifted)
    product = lax.dot_general(
        columns.reshape(len(columns), -1), kernel.reshape(-1, kernel.shape[3]), (((0,), (0,)), ((), ()))
    )
    return product.reshape(*columns.shape[1:], kernel.shape[3])


def _input_gradient(gradient, kernel, stride, input_shape, kernel_shape):
    """Gradient with respect to the input, by forward convolutions of stride 1 only.

    Input position i = stride * o + a - p meets output position o through tap a (p is the padding). The
    positions i = stride * t + r of one remainder r therefore see only the taps a = r + p (mod stride), at
    the outputs o = t + (r + p - a) / stride: a small convolution of the gradient for each pair of
    remainders, whose results are interleaved. Stride 1 is the case of one remainder: the flipped, transposed
    kernel. (The textbook form for stride 2, a convolution of the gradient with zeros inserted, does four
    times the arithmetic.)
    """

    del kernel_shape

    def taps(remainder, length):
        """The kernel positions that reach one remainder, in the order of their outputs, and the padding."""
        first = (remainder + (length - 1) // 2) % stride
        positions = list(range(first, length, stride))[::-1]
        offsets = [(remainder + (length - 1) // 2 - a) // stride for a in positions]
        return positions, (-offsets[0], offsets[-1])

    transposed = kernel.transpose(0, 1, 3, 2)
    rows = []
    for row in range(stride):
        row_taps, row_padding = taps(row, kernel.shape[0])
        columns = []
        for column in range(stride):
            column_taps, column_padding = taps(column, kernel.shape[1])
            part = transposed[row_taps[0] :: -stride, column_taps[0] :: -stride]
            columns.append(
                lax.conv_general_dilated(
                    gradient, part, (1, 1), (row_padding, column_padding), dimension_numbers=passes.DIMENSIONS
                )
            )
        rows.append(jnp.stack(columns, axis=3))  # [N, Ho, Wo, stride, in]
    if stride == 1:
        return columns[0]
    batch, height, width, channels = columns[0].shape
    interleaved = jnp.stack(rows, axis=2).reshape(batch, stride * height, stride * width, channels)
    return interleaved[:, : input_shape[1], : input_shape[2]]


def _kernel_gradient(x, gradient, stride, input_shape, kernel_shape):
    """Gradient with respect to the kernel, by matrix products that sum over examples and positions.

    Tap (a, b) is the sum over positions (i, j) of x[i + a, j + b] gradient[i, j], with x padded.
    """
    del input_shape
    # One product wastes (kernel_h - 1) of its rows on padding, and pays for joined copies of the gradient,
    # so it is the faster form for large images and for more than a handful of input channels only.
    joined = stride == 1 and gradient.shape[1] >= 8 and x.shape[-1] >= 8
    if joined:
        product = _kernel_gradient_in_parts(x, gradient, kernel_shape[:2])
    else:
        product = _kernel_gradient_by_rows(x, gradient, stride, kernel_shape[:2])
    return product.astype(gradient.dtype)


def _kernel_gradient_in_parts(x, gradient, kernel_size):
    """The sum of `_kernel_gradient_joined` over parts of the batch: of images that copy `CACHED_NUMBERS`, or of one."""
    copied = math.prod(gradient.shape[1:3]) * (kernel_size[1] * x.shape[3] + kernel_size[0] * gradient.shape[3])
    most = max(1, CACHED_NUMBERS // copied)
    images = max(size for size in range(1, len(x) + 1) if len(x) % size == 0 and size <= most)

    def add(total, part):
        of_x, of_gradient = part
        return total + _kernel_gradient_joined(of_x, of_gradient, kernel_size), None

    parts = [array.reshape(-1, images, *array.shape[1:]) for array in (x, gradient)]
    return lax.scan(add, jnp.zeros((*kernel_size, x.shape[3], gradient.shape[3]), jnp.float32), parts)[0]


def _kernel_gradient_joined(x, gradient, kernel_size):
    """All taps in one matrix product, for stride 1.

    The horizontal shifts are joined along the channels of the input, the vertical ones along those of the
    gradient: summing over i' = i + a instead of i turns tap (a, b) into x[i', j + b] gradient[i' - a, j].
    """
    kernel_height, kernel_width = kernel_size
    height, width, features = gradient.shape[1:]
    channels = x.shape[-1]
    margin = kernel_height - 1
    outputs = jnp.pad(gradient, ((0, 0), (margin, margin), (0, 0), (0, 0)))
    outputs = jnp.concatenate([outputs[:, margin - a : 2 * margin - a + height] for a in range(kernel_height)], axis=-1)
    if channels >= TURNED_CHANNELS:
        # The product gains more from positions that come last than turning them costs. XLA must meet the turn first:
        # behind the padding it would make it the product's.
        margins = [((size - 1) // 2, (size - 1) // 2) for size in kernel_size]
        planes = jnp.pad(x.transpose(3, 0, 1, 2), ((0, 0), (0, 0), *margins))
        inputs = jnp.concatenate([planes[..., b : b + width] for b in range(kernel_width)])
        inputs, outputs = inputs.reshape(len(inputs), -1), outputs.reshape(-1, outputs.shape[-1])
        product = jnp.matmul(inputs, outputs, preferred_element_type=jnp.float32)
    else:
        padded = passes.padded(x, kernel_size)
        inputs = jnp.concatenate([padded[:, :, b : b + width] for b in range(kernel_width)], axis=-1)
        product = passes.contract_positions(inputs, outputs)
    product = product.reshape(kernel_width, channels, kernel_height, features)
    return product.transpose(2, 0, 1, 3)


def _kernel_gradient_by_rows(x, gradient, stride, kernel_size):
    """One matrix product for each row of taps, whose shifted inputs are joined along the channels."""
    kernel_height, kernel_width = kernel_size
    height, width, features = gradient.shape[1:]
    rows_end, columns_end = (height - 1) * stride + 1, (width - 1) * stride + 1
    padded, products = passes.padded(x, kernel_size), []
    for a in range(kernel_height):
        rows = padded[:, a : a + rows_end : stride]
        inputs = [rows[:, :, b : b + columns_end : stride] for b in range(kernel_width)]
        products.append(passes.contract_positions(jnp.concatenate(inputs, axis=-1), gradient))
    return jnp.stack(products).reshape(kernel_height, kernel_width, x.shape[-1], features)


def _winograd_forward(x, kernel, stride):
    del stride
    return winograd.forward(x, kernel)


def _winograd_input_gradient(gradient, kernel, stride, input_shape, kernel_shape):
    del stride, input_shape, kernel_shape
    return winograd.input_gradient(gradient, kernel)


def _winograd_kernel_gradient(x, gradient, stride, input_shape, kernel_shape):
    del stride, input_shape, kernel_shape
    return winograd.kernel_gradient(x, gradient)


# Implementation -> its forward pass, and its gradients with respect to the input and to the kernel.
PASSES = {
    "custom_backward": (passes.forward, _input_gradient, _kernel_gradient),
    "winograd": (_winograd_forward, _winograd_input_gradient, _winograd_kernel_gradient),
}
