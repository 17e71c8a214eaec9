"""The convolution's passes against one another and NumPy; overlapping pooling against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.models.cpu import convolution
from fedjax_ssl.models.layers import conv2d, overlapping_max_pool2d
from fedjax_ssl.models.passes import Window, use_lane_form


def arrays(shape, kernel_shape, stride):
    """Images, a kernel, and a gradient of the output's shape."""
    size = [-(-side // stride) for side in shape[1:3]]
    draws = np.random.default_rng(0)  # JAX would compile a program for each shape
    shapes = (shape, kernel_shape, (shape[0], *size, kernel_shape[-1]))
    return tuple(jnp.asarray(draws.standard_normal(shape).astype(np.float32)) for shape in shapes)


def pass_both_ways(x, kernel, gradient, stride, implementation, window=None):
    y, vjp = jax.vjp(lambda x, kernel: conv2d(x, kernel, stride, implementation, window), x, kernel)
    return (y, *vjp(gradient))


compiled_both_ways = jax.jit(pass_both_ways, static_argnums=(3, 4, 5))


def assert_close(actual, expected):
    """Every array agrees to 1e-5 of the largest expected value."""
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        np.testing.assert_allclose(a, e, rtol=0, atol=1e-5 * np.abs(e).max() + 1e-7)


@pytest.mark.parametrize(
    ("implementation", "size", "window", "channels", "stride"),
    [
        *(("custom_backward", *sizes, stride) for stride in (1, 2) for sizes in (
            ((9, 12), 3, 8), ((3, 2), 3, 8), ((1, 1), 3, 1), ((7, 8), 1, 4), ((11, 8), 7, 3),
        )),
        # Also where blocks of four rows do not fill the image.
        *(("winograd", size, 3, 8, 1) for size in ((9, 12), (3, 2), (1, 1))),
    ],
)  # fmt: skip
def test_both_passes_equal_plain_convolution(implementation, size, window, channels, stride):
    inputs = arrays((2, *size, channels), (window, window, channels, 4), stride)
    actual, expected = (compiled_both_ways(*inputs, stride, which) for which in (implementation, "lax"))
    assert_close(actual, expected)


@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((2, 0), (0, 1))])
def test_fewer_multiplications_have_any_padding(padding):
    x, kernel, gradient = arrays((2, 9, 12, 8), (3, 3, 8, 4), 1)
    (above, below), (left, right) = padding
    gradient = gradient[:, : 7 + above + below, : 10 + left + right]
    window = Window((1, 1), padding)
    actual, expected = (compiled_both_ways(x, kernel, gradient, 1, which, window) for which in ("winograd", "lax"))
    assert_close(actual, expected)


@pytest.mark.parametrize("channels", [8, convolution.TURNED_CHANNELS])
def test_a_kernels_gradient_is_the_sum_over_parts_of_the_batch(monkeypatch, channels):
    """Of as many images as divide the batch, here of six, and may be copied at a time."""
    x, kernel, gradient = arrays((6, 8, 9, channels), (3, 3, channels, 4), 1)

    def of_kernel(x, kernel, gradient):
        return jax.vjp(lambda kernel: conv2d(x, kernel, implementation="custom_backward"), kernel)[1](gradient)[0]

    def traced():
        # A new function each time, for JAX keeps a function's trace.
        return str(jax.make_jaxpr(lambda *inputs: of_kernel(*inputs))(x, kernel, gradient))

    for copied_images, parts in ((0.5, 6), (5, 2), (6, 1), (2.5, 3)):
        monkeypatch.setattr(convolution, "CACHED_NUMBERS", int(copied_images * 8 * 9 * 3 * (channels + 4)))
        assert f"length={parts}\n" in traced()
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    expected = np.zeros(kernel.shape)
    for a, b in np.ndindex(3, 3):
        expected[a, b] = np.einsum("nijc,nijd->cd", padded[:, a : a + 8, b : b + 9], gradient)
    assert_close([jax.jit(of_kernel)(x, kernel, gradient)], [expected])


def test_error_of_fewer_multiplications_is_that_of_rounding():
    """Against float64: a layer of Wide-ResNet-28-2, both passes."""
    inputs = arrays((4, 16, 16, 64), (3, 3, 64, 64), 1)
    x, kernel, gradient = (np.asarray(a, np.float64) for a in inputs)
    padded, padded_gradient = (np.pad(a, ((0, 0), (1, 1), (1, 1), (0, 0))) for a in (x, gradient))
    y, x_gradient, kernel_gradient = np.zeros(gradient.shape), np.zeros(x.shape), np.zeros(kernel.shape)
    for a, b in np.ndindex(3, 3):
        y += padded[:, a : a + 16, b : b + 16] @ kernel[a, b]
        x_gradient += padded_gradient[:, 2 - a : 18 - a, 2 - b : 18 - b] @ kernel[a, b].T
        kernel_gradient[a, b] = np.einsum("nijc,nijd->cd", padded[:, a : a + 16, b : b + 16], gradient)
    for actual, expected in zip(compiled_both_ways(*inputs, 1, "winograd"), (y, x_gradient, kernel_gradient)):
        error = np.abs(np.asarray(actual, np.float64) - expected).max() / np.abs(expected).max()
        assert 0 < error < 5e-6


def test_a_cpu_convolves_by_fewer_multiplications_where_that_is_faster(monkeypatch):
    monkeypatch.setattr(convolution, "has_wide_vectors", lambda: False)
    x, kernel, _ = arrays((2, 8, 8, 32), (3, 3, 32, 32), 1)

    def is_split(x, kernel, stride=1, platform="cpu"):
        """Whether the forward pass of a training step, one convolution, has become six."""
        forward = lambda x, kernel: jax.vjp(lambda x, kernel: conv2d(x, kernel, stride), x, kernel)[0]  # noqa: E731
        with use_platform(platform):
            return str(jax.make_jaxpr(forward)(x, kernel)).count("conv_general") == 6

    assert is_split(x, kernel)
    assert str(jax.make_jaxpr(conv2d)(x, kernel)).count("conv_general") == 6  # also of evaluation
    assert not is_split(x, kernel, stride=2)
    assert not is_split(x[:1, :5, :6], kernel)  # fewer positions than channels: transforming the kernel takes longer
    assert not is_split(x[..., :16], kernel[:, :, :16])
    assert not is_split(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16))
    assert not is_split(x, jnp.ones((5, 5, 32, 32)))
    with monkeypatch.context() as patch:
        patch.setattr(convolution, "has_wide_vectors", lambda: True)
        assert not is_split(x, kernel)
    assert not is_split(x, kernel, platform="gpu")


@pytest.mark.parametrize(
    ("flags", "expected"), [("fpu avx2 avx512f avx512bw", True), ("fpu avx2 avx", False), ("", False)]
)
def test_wide_vectors_are_among_the_processors_flags(monkeypatch, flags, expected, tmp_path):
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\nmodel name : a processor\n")
    monkeypatch.setattr(convolution, "CPUINFO", tmp_path / "cpuinfo")
    assert convolution.has_wide_vectors.__wrapped__() == expected


@pytest.mark.parametrize(
    ("form", "kernels_too", "implementation", "stride", "platform"),
    [
        ("grouped", True, "custom_backward", 2, "cpu"),
        ("loop", True, "custom_backward", 1, "cpu"),
        ("loop", True, "winograd", 1, "cpu"),
        (None, False, "winograd", 1, "cpu"),
        (None, True, "lax", 2, "gpu"),  # whose kernel gradients are matrix products
    ],
)
def test_lanes_equal_one_by_one(form, kernels_too, implementation, stride, platform):
    x, kernel, gradient = arrays((6, 9, 8, 8), (3, 3, 8, 5), stride)
    x, gradient = (a.reshape(3, 2, *a.shape[1:]) for a in (x, gradient))
    kernels = jnp.stack([kernel, 2 * kernel, kernel - 1]) if kernels_too else jnp.stack([kernel] * 3)

    def one(x, kernel, gradient):
        return pass_both_ways(x, kernel, gradient, stride, implementation)

    with use_lane_form(form), use_platform(platform):
        lanes = jax.vmap(one, (0, 0 if kernels_too else None, 0))
        actual = jax.jit(lanes)(x, kernels if kernels_too else kernel, gradient)
    expected = [compiled_both_ways(*lane, stride, "lax") for lane in zip(x, kernels, gradient)]
    assert_close(actual, [jnp.stack(arrays) for arrays in zip(*expected)])


@pytest.mark.parametrize("shape", [(2, 7, 8, 3), (1, 1, 2, 1), (2, 6, 5, 2)])
def test_overlapping_pooling_and_its_gradient_by_loops(shape):
    """All values differ, so that each window has one largest position, which gets its gradient."""
    rng = np.random.default_rng(0)
    x = rng.permutation(np.prod(shape)).reshape(shape).astype(np.float32) - 20
    weights = rng.normal(size=jax.eval_shape(overlapping_max_pool2d, x).shape).astype(np.float32)

    def both(x, weights):
        pooled, vjp = jax.vjp(overlapping_max_pool2d, x)
        return pooled, vjp(weights)[0]

    pooled, actual = jax.jit(both)(x, weights)
    expected, gradient = np.zeros(pooled.shape), np.zeros(shape)
    assert pooled.shape == (shape[0], -(-shape[1] // 2), -(-shape[2] // 2), shape[3])
    for n, i, j, c in np.ndindex(*pooled.shape):
        window = [(a, b) for a in range(2 * i - 1, 2 * i + 2) for b in range(2 * j - 1, 2 * j + 2)]
        a, b = max((p for p in window if 0 <= p[0] < shape[1] and 0 <= p[1] < shape[2]), key=lambda p: x[n, *p, c])
        expected[n, i, j, c] = x[n, a, b, c]
        gradient[n, a, b, c] += weights[n, i, j, c]
    np.testing.assert_array_equal(pooled, expected)
    np.testing.assert_allclose(actual, gradient, atol=1e-6)
