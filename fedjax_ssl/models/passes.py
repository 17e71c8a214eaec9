"""The three passes of a convolution (forward, and two gradients) by XLA, and their forms for many lanes at once."""

import contextlib
import contextvars
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_ssl.base.devices import platform

DIMENSIONS = ("NHWC", "HWIO", "NHWC")


class Window(NamedTuple):
    """How a kernel moves over an image, for its height and its width."""

    strides: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]  # rows and columns of zeros (before, after)


def centred(kernel_size, stride):
    """The window of an odd kernel with (size - 1) / 2 zeros on each side."""
    vertical, horizontal = ((size - 1) // 2 for size in kernel_size)
    return Window((stride, stride), ((vertical, vertical), (horizontal, horizontal)))


def forward(x, kernel, window):
    """XLA's convolution, see `layers.conv2d`; grouped if the kernel has fewer inputs than `x` has channels."""
    groups = x.shape[-1] // kernel.shape[2]
    return lax.conv_general_dilated(
        x, kernel, window.strides, window.padding, dimension_numbers=DIMENSIONS, feature_group_count=groups
    )


def input_gradient(gradient, kernel, window, input_shape, **_):
    """XLA's own gradient with respect to the input."""
    like = jax.ShapeDtypeStruct(input_shape, gradient.dtype)
    return jax.linear_transpose(lambda x: forward(x, kernel, window), like)(gradient)[0]


def kernel_gradient(x, gradient, window, kernel_shape, **_):
    """XLA's own gradient with respect to the kernel."""
    like = jax.ShapeDtypeStruct(kernel_shape, gradient.dtype)
    return jax.linear_transpose(lambda kernel: forward(x, kernel, window), like)(gradient)[0]


# --- Lanes: many kernels at once. -------------------------------------------------------------------------------------

# How a pass runs when `vmap` gives every lane its own kernel. 'grouped': XLA's grouped convolution. 'loop': one lane
# after the other. 'packed': the lanes' activations lie side by side throughout the backbone, see `packing`; backbones
# that cannot be packed use 'grouped'.
LANE_FORMS = ("grouped", "loop", "packed")
# By platform; 'grouped' on others. The TPU's default was only compiled, not timed, see docs/performance.md.
DEFAULT_LANE_FORM = {"cpu": "loop", "tpu": "packed"}
_forced_lane_form = contextvars.ContextVar("lane_form", default=None)


@contextlib.contextmanager
def use_lane_form(form):
    """Code that is traced inside this context uses this form of `LANE_FORMS`; for measurements and tests."""
    token = _forced_lane_form.set(form)
    try:
        yield
    finally:
        _forced_lane_form.reset(token)


def lane_form():
    """The form of `LANE_FORMS` in use."""
    return _forced_lane_form.get() or DEFAULT_LANE_FORM.get(platform(), "grouped")


def in_lanes(one_lane, form, window, together=None, **sizes):
    """A pass of two arguments that uses a form of `LANE_FORMS` under `vmap` over both arguments.

    `window` and `sizes` are further arguments of the pass. `together` is the pass that all lanes compute at once unless
    the form is 'loop'; None: `one_lane`.
    """
    one_lane, together = (functools.partial(each, window=window, **sizes) for each in (one_lane, together or one_lane))
    one_pass = jax.custom_batching.custom_vmap(one_lane)

    @one_pass.def_vmap
    def lanes(number, mapped, *arguments):
        if not all(mapped):
            return jax.vmap(one_lane, [0 if is_mapped else None for is_mapped in mapped])(*arguments), True
        if form == "loop":
            return jax.lax.map(lambda one: one_lane(*one), arguments), True
        return jax.vmap(together)(*arguments), True

    return one_pass


def kernel_gradient_by_columns(x, gradient, window, kernel_shape, **_):
    """The gradient with respect to the kernel, as one matrix product with the shifted inputs side by side (im2col)."""
    framed, ends = padded(x, window), spans(gradient.shape[1:3], window)
    columns = [
        framed[:, a : a + ends[0] : window.strides[0], b : b + ends[1] : window.strides[1]]
        for a in range(kernel_shape[0])
        for b in range(kernel_shape[1])
    ]
    product = contract_positions(jnp.concatenate(columns, axis=-1), gradient)
    return product.reshape(kernel_shape).astype(gradient.dtype)


def padded(x, window):
    """Pads each image of x [N, H, W, C] with the window's zeros."""
    return jnp.pad(x, ((0, 0), *window.padding, (0, 0)))


def spans(size, window):
    """How many rows and columns of the padded images one tap of the kernel moves over, for outputs of this size."""
    return [(number - 1) * stride + 1 for number, stride in zip(size, window.strides, strict=True)]


def contract_positions(a, b):
    """Sum of a [N, H, W, I] times b [N, H, W, J] over examples and positions: [I, J], float32."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
