"""3x3 convolutions of stride 1 with half of the multiplications, and both gradients, as pure functions of arrays.

Minimal filtering computes m outputs of three taps with m + 2 products instead of 3 m; here along the height, with
m = 4. Small constant matrices combine blocks of m + 2 input rows, the three rows of the kernel, and blocks of m output
rows (Winograd 1980; Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016, section 4.1):

    y = A^T [(G k) * (B^T x)],

where * is an ordinary convolution along the width for each of the m + 2 entries. The gradients use the same three
linear maps, transposed. Filtering along both axes needs a quarter of the multiplications, but is little faster and
takes twice as long to compile; docs/performance.md has the figures and the rounding error. At most two zeros are padded
on each side. The functions ignore the shapes, which other implementations need.
"""

import functools

import jax.numpy as jnp
from jax import lax

from fedjax_ssl.models import passes

ROWS = 4  # m
# B^T, G and A^T, by interpolation at 0, 1, -1, 2, -2 and infinity.
OF_INPUT = (
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
OF_KERNEL = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
OF_PRODUCTS = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))


def forward(x, kernel, window):
    """The convolution: x [N, H, W, in] and kernel [3, 3, in, out] to [N, H', W', out]."""
    return _convolve(x, _combine(OF_KERNEL, [kernel[a : a + 1] for a in range(3)], axis=0), window.padding)


def input_gradient(gradient, kernel, window, **_):
    """Gradient with respect to the input, [N, H, W, in], from that of the output, [N, H', W', out].

    It is the convolution with the kernel rotated by 180 degrees and its channel axes exchanged.
    """
    turned = [kernel[2 - a : 3 - a, ::-1].transpose(0, 1, 3, 2) for a in range(3)]
    padding = [(2 - before, 2 - after) for before, after in window.padding]
    return _convolve(gradient, _combine(OF_KERNEL, turned, axis=0), padding)


def kernel_gradient(x, gradient, window, **_):
    """Gradient with respect to the kernel, [3, 3, in, out], from x [N, H, W, in] and `gradient` [N, H', W', out]."""
    batch, height, width, features = gradient.shape
    blocks = -(-height // ROWS)
    padded = jnp.pad(gradient, ((0, 0), (0, ROWS * blocks - height), (0, 0), (0, 0)))
    padded = padded.reshape(batch, blocks, ROWS, width, features)
    outputs = _combine(tuple(zip(*OF_PRODUCTS)), [padded[:, :, row] for row in range(ROWS)], axis=0)
    inputs = _side_by_side(_of_input(x, window.padding), window.padding[1])
    outputs = outputs.reshape(ROWS + 2, -1, features)
    products = lax.dot_general(inputs, outputs, (((1,), (1,)), ((0,), (0,))))  # [m + 2, 3 in, out]
    return _combine(tuple(zip(*OF_KERNEL)), list(products), axis=0).reshape(3, 3, x.shape[3], features)


def _convolve(x, factors, padding):
    """The convolution of x with the transformed kernel G k, `factors` [m + 2, 1, 3, in, out]."""
    window = passes.Window((1, 1), ((0, 0), padding[1]))
    products = [passes.forward(*pair, window) for pair in zip(_of_input(x, padding), factors, strict=True)]
    y = _combine(OF_PRODUCTS, products, axis=2)
    return y.reshape(len(x), -1, *y.shape[-2:])[:, : x.shape[1] + sum(padding[0]) - 2]


def _of_input(x, padding):
    """B^T x for all blocks of rows, [m + 2, N, blocks, W, in]; blocks overlap by two rows."""
    height = x.shape[1] + sum(padding[0]) - 2  # of the output
    blocks = -(-height // ROWS)
    padded = jnp.pad(x, ((0, 0), (padding[0][0], padding[0][1] + ROWS * blocks - height), (0, 0), (0, 0)))
    last = ROWS * (blocks - 1) + 1
    return _combine(OF_INPUT, [padded[:, row : row + last : ROWS] for row in range(ROWS + 2)], axis=0)


def _side_by_side(rows, padding):
    """The inputs of the three taps of a row, joined along the channels: [m + 2, positions, 3 in]."""
    padded = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), padding, (0, 0)))
    shifted = [padded[:, :, :, b : b + padded.shape[3] - 2] for b in range(3)]
    return jnp.concatenate(shifted, axis=-1).reshape(len(rows), -1, 3 * rows.shape[-1])


def _combine(matrix, arrays, axis):
    """Multiplies the matrix with the list of arrays; the results are stacked along a new axis.

    It is written as products with columns of constants, which XLA turns into one loop. A loop for each row would be no
    faster and take up to twice as long to compile.
    """

    def column(number):
        shape = [1] * (arrays[0].ndim + 1)
        shape[axis] = len(matrix)
        return jnp.asarray([row[number] for row in matrix], arrays[0].dtype).reshape(shape)

    terms = (column(number) * jnp.expand_dims(array, axis) for number, array in enumerate(arrays))
    return functools.reduce(jnp.add, terms)
