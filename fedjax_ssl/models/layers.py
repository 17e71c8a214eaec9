"""Convolution and pooling. GPUs and TPUs use XLA's convolution, CPUs the one in `cpu/`."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_ssl.base.devices import platform
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.models import packing, passes
from fedjax_ssl.models.cpu import convolution as on_cpu
from fedjax_ssl.models.cpu import pooling

# Kaiming normal over the fan-out: standard deviation sqrt(2 / (kernel_h * kernel_w * out)), not truncated.
convolution_init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")

# Implementation -> its forward pass, and its gradients with respect to the input and the kernel.
_PASSES = {"lax": (passes.forward, passes.input_gradient, passes.kernel_gradient), **on_cpu.PASSES}


class Conv(nn.Module):
    """Convolution without bias; parameter `kernel` [kernel_h, kernel_w, in, out], float32."""

    features: int  # output channels
    kernel_size: tuple[int, int] = (3, 3)  # (height, width), odd
    strides: int = 1  # 1 or 2
    dtype: DTypeLike = jnp.float32  # dtype of the computation and of the output
    # Initialiser of the kernel.
    init: nn.initializers.Initializer = convolution_init  # type: ignore[assignment]  # in place of Module.init

    @nn.compact
    def __call__(self, x):
        shape = packing.of_lanes(*self.kernel_size, x.shape[-1] // packing.lanes(), self.features)
        kernel = self.param("kernel", self.init, shape, jnp.float32)
        return conv2d(x.astype(self.dtype), kernel.astype(self.dtype), self.strides)


def conv2d(x, kernel, stride=1, implementation=None, window=None):
    """Two-dimensional convolution (cross-correlation) without bias, by default with symmetric padding.

    Each side is padded by (kernel size - 1) / 2, as `padding=1` for 3x3 in PyTorch, even if the stride is 2 (XLA's
    "SAME" would pad one side only). A side of n therefore becomes ceil(n / stride). `jax.vmap` over kernels (one for
    each lane) uses the form that `passes.lane_form` returns.

    Args:
        x: [N, H, W, in] activations.
        kernel: [kernel_h, kernel_w, in, out], odd sizes, of the dtype of `x`. For g lanes side by side (see `packing`)
          [g, kernel_h, kernel_w, in / g, out / g]; these are always convolved with 'lax'.
        stride: for both sides.
        implementation: 'lax' (XLA's convolution and its gradients), or, for CPUs, 'custom_backward' or 'winograd' (see
          `cpu/`; 'winograd' is for 3x3, stride 1 and at most two zeros on a side). None: the fastest on a CPU, 'lax' on
          other devices.
        window: a `passes.Window` in place of `stride` and symmetric padding; sizes may then be even.

    Returns:
        [N, ceil(H / stride), ceil(W / stride), out], or as the window says.

    Raises:
        UserError: the implementation is unknown, or does not have this kernel or stride.
    """
    window = window or passes.centred(kernel.shape[-4:-2], stride)
    if kernel.ndim == 5:
        kernels = packing.block_diagonal(kernel)

        def convolve(x):
            pairs = zip(jnp.split(x, len(kernels), -1), kernels)
            return jnp.concatenate([_conv2d(own, its, window, "lax", "grouped") for own, its in pairs], -1)

        return packing.alone(convolve)(x)
    if implementation is None:
        implementation = on_cpu.fastest(x, kernel, window) if platform() == "cpu" else "lax"
    product = None if implementation == "lax" else on_cpu.as_product(x, kernel, window)
    return _conv2d(x, kernel, window, implementation, passes.lane_form()) if product is None else product


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _conv2d(x, kernel, window, implementation, lane_form):
    return passes.in_lanes(_PASSES[implementation][0], lane_form, window)(x, kernel)


def _conv2d_forward(x, kernel, window, implementation, lane_form):
    return _conv2d(x, kernel, window, implementation, lane_form), (x, kernel)


def _conv2d_backward(window, implementation, lane_form, residuals, gradient):
    x, kernel = residuals
    _, to_input, to_kernel = _PASSES[implementation]
    sizes = {"input_shape": x.shape, "kernel_shape": kernel.shape}
    # XLA would turn grouped kernel gradients on GPUs into convolutions with windows as large as the images.
    together = passes.kernel_gradient_by_columns if platform() == "gpu" else None
    return (
        passes.in_lanes(to_input, lane_form, window, **sizes)(gradient, kernel),
        passes.in_lanes(to_kernel, lane_form, window, together, **sizes)(x, gradient),
    )


_conv2d.defvjp(_conv2d_forward, _conv2d_backward)


class FlatDense(nn.Dense):
    """A linear layer without bias from activations [N, H, W, C] to [N, features]; `kernel` is [H*W*C, features]."""

    use_bias: bool = False

    def __call__(self, x):
        lanes, positions = packing.lanes(), math.prod(x.shape[1:3])
        if lanes == 1:
            return super().__call__(x.reshape(len(x), -1))
        kernel: jax.Array = self.get_variable("params", "kernel").reshape(lanes, positions, -1, self.features)
        x = x.reshape(len(x), positions, lanes, -1)
        y = jnp.einsum("npgc,gpco->ngo", x.astype(self.dtype), kernel.astype(self.dtype))
        return y.reshape(len(x), -1)


def check_sides(name, images, least):
    """Raises a UserError that names the backbone if a side of images [N, H, W, C] has fewer than `least` pixels."""
    if min(images.shape[1:3]) < least:
        shape = f"{images.shape[1]}x{images.shape[2]}"
        raise UserError(f"model.name={name} is for images of {least}x{least} or more, not {shape}")


def max_pool2d(x):
    """Largest value of each 2x2 window of [N, H, W, C]; an odd last row or column is dropped."""
    return pooling.largest(x, (1, 2, 2, 1), (1, 2, 2, 1))


def overlapping_max_pool2d(x):
    """Largest value of each 3x3 window with stride 2, as PyTorch's MaxPool2d(3, 2, padding=1).

    [N, H, W, C] becomes [N, ceil(H / 2), ceil(W / 2), C].
    """
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    return pooling.largest(padded, (1, 3, 3, 1), (1, 2, 2, 1))


def global_average_pool(x):
    """Mean over all positions: [N, H, W, C] to [N, C], accumulated in float32."""
    return x.astype(jnp.float32).mean(axis=(1, 2)).astype(x.dtype)
