"""The three passes of a convolution (forward, and two gradients) by XLA, and their forms for many lanes at once."""

import contextlib
import contextvars
import functools

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_ssl.base.devices import platform

DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def forward(x, kernel, stride):
    """XLA's convolution, see `layers.conv2d`; grouped if the kernel has fewer inputs than `x` has channels."""
    padding = [((size - 1) // 2, (size - 1) // 2) for size in kernel.shape[:2]]
    groups = x.shape[-1] // kernel.shape[2]
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=DIMENSIONS, feature_group_count=groups
    )


def input_gradient(gradient, kernel, stride, input_shape, **_):
    """XLA's own gradient with respect to the input."""
    of_input = jax.linear_transpose(
        lambda x: forward(x, kernel, stride), jax.ShapeDtypeStruct(input_shape, gradient.dtype)
    )
    return of_input(gradient)[0]


def kernel_gradient(x, gradient, stride, kernel_shape, **_):
    """XLA's own gradient with respect to the kernel."""
    of_kernel = jax.linear_transpose(
        lambda kernel: forward(x, kernel, stride), jax.ShapeDtypeStruct(kernel_shape, gradient.dtype)
    )
    return of_kernel(gradient)[0]


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


def in_lanes(one_lane, form, stride, together=None, **sizes):
    """A pass of two arguments that uses a form of `LANE_FORMS` under `vmap` over both arguments.

    `stride` and `sizes` are further arguments of the pass. `together` is the pass that all lanes compute at once unless
    the form is 'loop'; None: `one_lane`.
    """
    one_lane, together = (functools.partial(each, stride=stride, **sizes) for each in (one_lane, together or one_lane))
    one_pass = jax.custom_batching.custom_vmap(one_lane)

    @one_pass.def_vmap
    def lanes(number, mapped, *arguments):
        if not all(mapped):
            return jax.vmap(one_lane, [0 if is_mapped else None for is_mapped in mapped])(*arguments), True
        if form == "loop":
            return jax.lax.map(lambda one: one_lane(*one), arguments), True
        return jax.vmap(together)(*arguments), True

    return one_pass


def kernel_gradient_by_columns(x, gradient, stride, kernel_shape, **_):
    """The gradient with respect to the kernel, as one matrix product with the shifted inputs side by side (im2col)."""
    height, width = x.shape[1:3]
    framed = padded(x, kernel_shape[:2])
    columns = [
        framed[:, a : a + height : stride, b : b + width : stride]
        for a in range(kernel_shape[0])
        for b in range(kernel_shape[1])
    ]
    product = contract_positions(jnp.concatenate(columns, axis=-1), gradient)
    return product.reshape(kernel_shape).astype(gradient.dtype)


def padded(x, kernel_size):
    """Pads each image of x [N, H, W, C] with zeros, for a kernel of this size."""
    vertical, horizontal = (kernel_size[0] - 1) // 2, (kernel_size[1] - 1) // 2
    return jnp.pad(x, ((0, 0), (vertical, vertical), (horizontal, horizontal), (0, 0)))


def contract_positions(a, b):
    """Sum of a [N, H, W, I] times b [N, H, W, J] over examples and positions: [I, J], float32."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
