"""The passes of a convolution, forward and two gradients, as XLA has them, and their forms under lanes."""

import contextlib
import contextvars
import functools

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.devices import platform

DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def forward(x, kernel, stride):
    """XLA's convolution, see `layers.conv2d`; in groups if the kernel has fewer inputs than `x` channels."""
    padding = [((size - 1) // 2, (size - 1) // 2) for size in kernel.shape[:2]]
    groups = x.shape[-1] // kernel.shape[2]
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=DIMENSIONS, feature_group_count=groups
    )


def input_gradient(gradient, kernel, stride, input_shape, kernel_shape):
    """XLA's own gradient with respect to the input."""
    del kernel_shape
    of_input = jax.linear_transpose(
        lambda x: forward(x, kernel, stride), jax.ShapeDtypeStruct(input_shape, gradient.dtype)
    )
    return of_input(gradient)[0]


def kernel_gradient(x, gradient, stride, input_shape, kernel_shape):
    """XLA's own gradient with respect to the kernel."""
    del input_shape
    of_kernel = jax.linear_transpose(
        lambda kernel: forward(x, kernel, stride), jax.ShapeDtypeStruct(kernel_shape, gradient.dtype)
    )
    return of_kernel(gradient)[0]


# --- Lanes: many kernels at once. -------------------------------------------------------------------------------------

# How a pass runs when `vmap` gives every lane a kernel of its own: 'grouped', XLA's grouped convolution; 'im2col', the
# shifted inputs side by side and one batched matrix product; 'loop', one lane after the other; 'packed', the lanes'
# activations side by side throughout the backbone, see `packing`, and 'grouped' in backbones that cannot be packed.
LANE_FORMS = ("grouped", "im2col", "loop", "packed")
# 'grouped' elsewhere. A CPU's was measured, see docs/performance.md; a TPU's compiled, see docs/accelerators.md.
DEFAULT_LANE_FORM = {"cpu": "loop", "tpu": "packed"}
_forced_lane_form = contextvars.ContextVar("lane_form", default=None)


@contextlib.contextmanager
def use_lane_form(form):
    """Code that is traced inside takes this form of `LANE_FORMS`: for measurements and tests."""
    token = _forced_lane_form.set(form)
    try:
        yield
    finally:
        _forced_lane_form.reset(token)


def lane_form():
    """The form of `LANE_FORMS` that is taken here."""
    form = _forced_lane_form.get() or DEFAULT_LANE_FORM.get(platform(), "grouped")
    if form not in LANE_FORMS:
        raise UserError(f"unknown form of convolutions in lanes {form!r}; known: {', '.join(LANE_FORMS)}")
    return form


def kernel_gradient_form(form):
    """That of a kernel's gradient: XLA makes a GPU's grouped ones convolutions whose windows are as large as images."""
    return "im2col" if form in ("grouped", "packed") and platform() == "gpu" else form


def in_lanes(one_lane, by_columns, form, stride, **sizes):
    """A pass of two arguments which under `vmap` over both of them takes the given form."""
    one_lane, by_columns = (functools.partial(function, stride=stride, **sizes) for function in (one_lane, by_columns))
    one_pass = jax.custom_batching.custom_vmap(one_lane)

    @one_pass.def_vmap
    def lanes(number, mapped, *arguments):
        in_axes = [0 if is_mapped else None for is_mapped in mapped]
        if form in ("grouped", "packed") or not all(mapped):
            return jax.vmap(one_lane, in_axes)(*arguments), True
        if form == "im2col":
            return jax.vmap(by_columns, in_axes)(*arguments), True
        return jax.lax.map(lambda one: one_lane(*one), arguments), True

    return one_pass


def _columns(x, kernel_size, stride):
    """The shifted inputs side by side (im2col): [N, Ho, Wo, kernel_h * kernel_w * C]."""
    height, width = x.shape[1:3]
    framed = padded(x, kernel_size)
    return jnp.concatenate(
        [
            framed[:, a : a + height : stride, b : b + width : stride]
            for a in range(kernel_size[0])
            for b in range(kernel_size[1])
        ],
        axis=-1,
    )


def forward_by_columns(x, kernel, stride):
    """The convolution by one matrix product."""
    return jnp.matmul(_columns(x, kernel.shape[:2], stride), kernel.reshape(-1, kernel.shape[3]))


def input_gradient_by_columns(gradient, kernel, stride, input_shape, kernel_shape):
    """Its gradient with respect to the input, likewise."""
    del kernel_shape
    if stride > 1:  # The gradient with zeros between its rows and columns, in the size of the input.
        batch, height, width, channels = gradient.shape
        spread = jnp.zeros((batch, *input_shape[1:3], channels), gradient.dtype)
        gradient = spread.at[:, : stride * height : stride, : stride * width : stride].set(gradient)
    flipped = kernel[::-1, ::-1].transpose(0, 1, 3, 2)
    return forward_by_columns(gradient, flipped, 1)


def kernel_gradient_by_columns(x, gradient, stride, input_shape, kernel_shape):
    """Its gradient with respect to the kernel, likewise."""
    del input_shape
    product = contract_positions(_columns(x, kernel_shape[:2], stride), gradient)
    return product.reshape(kernel_shape).astype(gradient.dtype)


def padded(x, kernel_size):
    """x [N, H, W, C] with zeros around each image, for a kernel of this size."""
    vertical, horizontal = (kernel_size[0] - 1) // 2, (kernel_size[1] - 1) // 2
    return jnp.pad(x, ((0, 0), (vertical, vertical), (horizontal, horizontal), (0, 0)))


def contract_positions(a, b):
    """Sum over examples and positions of a [N, H, W, I] times b [N, H, W, J]: [I, J], float32."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
