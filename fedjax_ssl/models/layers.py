"""Convolution and pooling, with the implementation chosen per backend in one place.

XLA's CPU backend runs the forward convolution through a fast library, but the backward convolutions that
automatic differentiation makes take a naive path as soon as they stand inside a loop (scan, while, fori):
one to two orders of magnitude slower than the forward pass. Training loops live inside such loops here, so
on CPU the convolution brings its own backward pass, written in forward convolutions and matrix products
only; where that is faster both passes are those of `winograd.py`. The same holds for `reduce_window`, hence
pooling by reshape.
"""

import contextlib
import contextvars
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_ssl.errors import UserError
from fedjax_ssl.models import processor, winograd

FEW_CHANNELS = 8  # of the input: below, a CPU convolves by one matrix product
MANY_CHANNELS = 32  # on both sides: from here on fewer multiplications pay
TURNED_CHANNELS = 32  # of the input: from here on a kernel's gradient is faster with positions last
CACHED_NUMBERS = 200_000  # what a kernel's gradient copies at a time, so that its product finds them in the caches
_DIMENSIONS = ("NHWC", "HWIO", "NHWC")

# Kaiming normal over the fan-out: standard deviation sqrt(2 / (kernel_h * kernel_w * out)), not truncated.
convolution_init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


def conv2d(x, kernel, stride=1, implementation=None):
    """Two-dimensional convolution (cross-correlation) with symmetric padding and no bias.

    Each side is padded by (kernel size - 1) / 2, as `padding=1` for 3x3 in PyTorch, also where the stride is
    2 (XLA's "SAME" would pad one side only), so a side of n becomes ceil(n / stride). Under `jax.vmap` over
    kernels (one a lane) the form of `LANE_FORMS` in use is taken.

    Args:
        x: [N, H, W, in] activations.
        kernel: [kernel_h, kernel_w, in, out], odd sizes, of the dtype of `x`.
        stride: 1 or 2, for both sides.
        implementation: 'lax' (XLA's convolution and its gradients), 'custom_backward' (see the module's
          docstring) or 'winograd' (see `winograd.py`; 3x3 with stride 1). None chooses the fastest: 'lax' but on a CPU.
          Where nothing is differentiated all are XLA's convolution.

    Returns:
        [N, ceil(H / stride), ceil(W / stride), out].

    Raises:
        UserError: the implementation is unknown, or does not have this kernel or stride.
    """
    if implementation is None:
        implementation = _fastest(x, kernel, stride)
    if implementation not in _PASSES:
        raise UserError(f"unknown convolution {implementation!r}; known: {', '.join(sorted(_PASSES))}")
    if implementation == "winograd" and (*kernel.shape[:2], stride) != (3, 3, 1):
        raise UserError(f"winograd convolves 3x3 with stride 1, not {kernel.shape[0]}x{kernel.shape[1]} with {stride}")
    if implementation != "lax":
        if kernel.shape[:2] == (1, 1):
            x = x[:, ::stride, ::stride]
            # Two axes: with more, the gradient of the kernel copies the transposed input.
            return jnp.matmul(x.reshape(-1, x.shape[-1]), kernel[0, 0]).reshape(*x.shape[:-1], kernel.shape[3])
        if kernel.shape[2] < FEW_CHANNELS:
            return _conv2d_by_columns(x, kernel, stride)
    return _conv2d(x, kernel, stride, implementation, _lane_form())


def _fastest(x, kernel, stride):
    """The implementation to take on this backend."""
    if jax.default_backend() != "cpu":
        return "lax"
    fits = (*kernel.shape[:2], stride) == (3, 3, 1) and x.dtype == jnp.float32
    # Transforming the kernel is the same work for few positions as for many.
    many = min(kernel.shape[2:]) >= MANY_CHANNELS and math.prod(x.shape[:3]) >= max(kernel.shape[2:])
    return "winograd" if fits and many and not processor.has_wide_vectors() else "custom_backward"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _conv2d(x, kernel, stride, implementation, lane_form):
    """Where nothing is differentiated: the plain form, which compiles faster, whatever the implementation."""
    return _in_lanes(_forward, _forward_by_columns, lane_form, stride)(x, kernel)


def _conv2d_forward(x, kernel, stride, implementation, lane_form):
    forward = _PASSES[implementation][0]
    return _in_lanes(forward, _forward_by_columns, lane_form, stride)(x, kernel), (x, kernel)


def _conv2d_backward(stride, implementation, lane_form, residuals, gradient):
    x, kernel = residuals
    _, to_input, to_kernel = _PASSES[implementation]
    sizes = {"input_shape": x.shape, "kernel_shape": kernel.shape}
    return (
        _in_lanes(to_input, _input_gradient_by_columns, lane_form, stride, **sizes)(gradient, kernel),
        _in_lanes(to_kernel, _kernel_gradient_by_columns, lane_form, stride, **sizes)(x, gradient),
    )


_conv2d.defvjp(_conv2d_forward, _conv2d_backward)


# --- Lanes: many kernels at once. -------------------------------------------------------------------------------------

# How a pass runs when `vmap` gives every lane a kernel of its own: 'grouped', XLA's grouped convolution; 'im2col', the
# shifted inputs side by side and one batched matrix product; 'loop', one lane after the other.
LANE_FORMS = ("grouped", "im2col", "loop")
DEFAULT_LANE_FORM = {"cpu": "loop"}  # measured, see docs/performance.md; 'grouped' elsewhere
_forced_lane_form = contextvars.ContextVar("lane_form", default=None)


@contextlib.contextmanager
def use_lane_form(form):
    """Code that is traced inside takes this form of `LANE_FORMS`: for measurements and tests."""
    token = _forced_lane_form.set(form)
    try:
        yield
    finally:
        _forced_lane_form.reset(token)


def _lane_form():
    form = _forced_lane_form.get() or DEFAULT_LANE_FORM.get(jax.default_backend(), "grouped")
    if form not in LANE_FORMS:
        raise UserError(f"unknown form of convolutions in lanes {form!r}; known: {', '.join(LANE_FORMS)}")
    return form


def _in_lanes(one_lane, by_columns, form, stride, **sizes):
    """A pass of two arguments which under `vmap` over both of them takes the given form."""
    one_lane, by_columns = (functools.partial(function, stride=stride, **sizes) for function in (one_lane, by_columns))
    one_pass = jax.custom_batching.custom_vmap(one_lane)

    @one_pass.def_vmap
    def lanes(number, mapped, *arguments):
        in_axes = [0 if is_mapped else None for is_mapped in mapped]
        if form == "grouped" or not all(mapped):
            return jax.vmap(one_lane, in_axes)(*arguments), True
        if form == "im2col":
            return jax.vmap(by_columns, in_axes)(*arguments), True
        return jax.lax.map(lambda one: one_lane(*one), arguments), True

    return one_pass


def _columns(x, kernel_size, stride):
    """The shifted inputs side by side (im2col): [N, Ho, Wo, kernel_h * kernel_w * C]."""
    height, width = x.shape[1:3]
    padded = _padded(x, kernel_size)
    return jnp.concatenate(
        [
            padded[:, a : a + height : stride, b : b + width : stride]
            for a in range(kernel_size[0])
            for b in range(kernel_size[1])
        ],
        axis=-1,
    )


def _forward_by_columns(x, kernel, stride):
    return jnp.matmul(_columns(x, kernel.shape[:2], stride), kernel.reshape(-1, kernel.shape[3]))


def _input_gradient_by_columns(gradient, kernel, stride, input_shape, kernel_shape):
    del kernel_shape
    if stride > 1:  # The gradient with zeros between its rows and columns, in the size of the input.
        batch, height, width, channels = gradient.shape
        spread = jnp.zeros((batch, *input_shape[1:3], channels), gradient.dtype)
        gradient = spread.at[:, : stride * height : stride, : stride * width : stride].set(gradient)
    flipped = kernel[::-1, ::-1].transpose(0, 1, 3, 2)
    return _forward_by_columns(gradient, flipped, 1)


def _kernel_gradient_by_columns(x, gradient, stride, input_shape, kernel_shape):
    del input_shape
    product = _contract_positions(_columns(x, kernel_shape[:2], stride), gradient)
    return product.reshape(kernel_shape).astype(gradient.dtype)


# --- One lane. --------------------------------------------------------------------------------------------------------


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


def _forward(x, kernel, stride):
    padding = [((size - 1) // 2, (size - 1) // 2) for size in kernel.shape[:2]]
    return lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=_DIMENSIONS)


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
                    gradient, part, (1, 1), (row_padding, column_padding), dimension_numbers=_DIMENSIONS
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
        return total + _kernel_gradient_joined(*part, kernel_size), None

    parts = [array.reshape(-1, images, *array.shape[1:]) for array in (x, gradient)]
    return lax.scan(add, jnp.zeros((*kernel_size, x.shape[3], gradient.shape[3]), jnp.float32), parts)[0]


def _padded(x, kernel_size):
    vertical, horizontal = (kernel_size[0] - 1) // 2, (kernel_size[1] - 1) // 2
    return jnp.pad(x, ((0, 0), (vertical, vertical), (horizontal, horizontal), (0, 0)))


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
        padded = _padded(x, kernel_size)
        inputs = jnp.concatenate([padded[:, :, b : b + width] for b in range(kernel_width)], axis=-1)
        product = _contract_positions(inputs, outputs)
    product = product.reshape(kernel_width, channels, kernel_height, features)
    return product.transpose(2, 0, 1, 3)


def _kernel_gradient_by_rows(x, gradient, stride, kernel_size):
    """One matrix product for each row of taps, whose shifted inputs are joined along the channels."""
    kernel_height, kernel_width = kernel_size
    height, width, features = gradient.shape[1:]
    rows_end, columns_end = (height - 1) * stride + 1, (width - 1) * stride + 1
    padded, products = _padded(x, kernel_size), []
    for a in range(kernel_height):
        rows = padded[:, a : a + rows_end : stride]
        inputs = [rows[:, :, b : b + columns_end : stride] for b in range(kernel_width)]
        products.append(_contract_positions(jnp.concatenate(inputs, axis=-1), gradient))
    return jnp.stack(products).reshape(kernel_height, kernel_width, x.shape[-1], features)


def _contract_positions(a, b):
    """Sum over examples and positions of a [N, H, W, I] times b [N, H, W, J]: [I, J], float32."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _lax_input_gradient(gradient, kernel, stride, input_shape, kernel_shape):
    """XLA's own gradient with respect to the input."""
    del kernel_shape
    of_input = jax.linear_transpose(
        lambda x: _forward(x, kernel, stride), jax.ShapeDtypeStruct(input_shape, gradient.dtype)
    )
    return of_input(gradient)[0]


def _lax_kernel_gradient(x, gradient, stride, input_shape, kernel_shape):
    """XLA's own gradient with respect to the kernel."""
    del input_shape
    of_kernel = jax.linear_transpose(
        lambda kernel: _forward(x, kernel, stride), jax.ShapeDtypeStruct(kernel_shape, gradient.dtype)
    )
    return of_kernel(gradient)[0]


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
_PASSES = {
    "custom_backward": (_forward, _input_gradient, _kernel_gradient),
    "lax": (_forward, _lax_input_gradient, _lax_kernel_gradient),
    "winograd": (_winograd_forward, _winograd_input_gradient, _winograd_kernel_gradient),
}


class Conv(nn.Module):
    """Convolution without bias; parameter `kernel` [kernel_h, kernel_w, in, out], float32.

    Attributes:
        features: output channels.
        kernel_size: (height, width), odd.
        strides: 1 or 2.
        dtype: dtype of the computation and of the output.
        init: initialiser of the kernel.
    """

    features: int
    kernel_size: tuple[int, int] = (3, 3)
    strides: int = 1
    dtype: jnp.dtype = jnp.float32
    init: nn.initializers.Initializer = convolution_init

    @nn.compact
    def __call__(self, x):
        shape = (*self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", self.init, shape, jnp.float32)
        return conv2d(x.astype(self.dtype), kernel.astype(self.dtype), self.strides)


def max_pool2d(x):
    """Largest value of each 2x2 window; an odd last row or column is dropped.

    Args:
        x: [N, H, W, C].

    Returns:
        [N, H // 2, W // 2, C].
    """
    batch, height, width, channels = x.shape
    height, width = height // 2, width // 2
    return _largest_of_windows(x[:, : 2 * height, : 2 * width].reshape(batch, height, 2, width, 2, channels))


def overlapping_max_pool2d(x):
    """Largest value of each 3x3 window, two positions apart, as PyTorch's MaxPool2d(3, 2, padding=1).

    By comparing shifted slices, three for each axis: `reduce_window` has a slow gradient on a CPU. Equal largest values
    share the gradient, where PyTorch gives it to the first; after a ReLU those are zeros, which pass none on.

    Args:
        x: [N, H, W, C].

    Returns:
        [N, ceil(H / 2), ceil(W / 2), C].
    """
    for axis in (1, 2):
        length = x.shape[axis]
        padding = [(1, 1) if a == axis else (0, 0) for a in range(4)]
        padded = jnp.pad(x, padding, constant_values=-jnp.inf)
        shifted = (lax.slice_in_dim(padded, shift, shift + length, 2, axis) for shift in range(3))
        x = functools.reduce(jnp.maximum, shifted)
    return x


@jax.custom_vjp
def _largest_of_windows(windows):
    """The largest of the four in [N, H, 2, W, 2, C]; equal ones share the gradient, as under `max`.

    The same gradient as the automatic one, without its reductions over axes of two: two to three times as fast.
    """
    upper, lower = windows[:, :, 0], windows[:, :, 1]
    return jnp.maximum(
        jnp.maximum(upper[:, :, :, 0], upper[:, :, :, 1]), jnp.maximum(lower[:, :, :, 0], lower[:, :, :, 1])
    )


def _largest_forward(windows):
    largest = _largest_of_windows(windows)
    return largest, (windows, largest)


def _largest_backward(residuals, gradient):
    windows, largest = residuals
    chosen = windows == largest[:, :, None, :, None]
    number = sum(chosen[:, :, row, :, column].astype(gradient.dtype) for row in range(2) for column in range(2))
    return (jnp.where(chosen, (gradient / number)[:, :, None, :, None], 0),)


_largest_of_windows.defvjp(_largest_forward, _largest_backward)


def global_average_pool(x):
    """Mean over all positions: [N, H, W, C] to [N, C], accumulated in float32."""
    return x.astype(jnp.float32).mean(axis=(1, 2)).astype(x.dtype)
