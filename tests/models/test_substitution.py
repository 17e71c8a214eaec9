"""Flax's layers by the library's forms against Flax itself: results and gradients, for lanes with kernels of their own.

Layers of a kind are one program, for most of the time is compiling.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.models.substitution import with_forms

LANES, IMAGES, SEQUENCES = 2, (3, 9, 8), (3, 11)  # batch, height, width


class Scanned(nn.Module):
    """The same layer three times, each with a kernel of its own."""

    @nn.compact
    def __call__(self, x):
        step = lambda module, carry, _: (nn.relu(nn.Conv(8, (3, 3))(carry)), None)  # noqa: E731
        return nn.scan(step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(self, x, None)[0]


class Pooled(nn.Module):
    """Whole numbers, many of them equal, so that it matters which of them gets the gradient; then `pool`."""

    pool: functools.partial

    @nn.compact
    def __call__(self, x):
        return self.pool(jnp.round(x) * self.param("scale", nn.initializers.ones, (x.shape[-1],)))


MASK = np.random.default_rng(0).random((3, 3, 8, 5)) < 0.5
# Kind -> (shape of the inputs, layers).
LAYERS = {
    "sizes and padding": ((*IMAGES, 8), [
        nn.Conv(5, (1, 1)), nn.Conv(5, (1, 1), 2, use_bias=False), nn.Conv(5, (1, 1), 3, ((1, 2), (0, 1))),
        nn.Conv(5, (2, 2), 2), nn.Conv(5, (2, 2), 3, "VALID"), nn.Conv(5, (2, 2)),
        nn.Conv(5, (3, 3)), nn.Conv(5, (3, 3), 2), nn.Conv(5, (3, 3), padding=((2, 0), (1, 3)), use_bias=False),
        nn.Conv(5, (5, 5), padding="VALID"), nn.Conv(5, (5, 5), 2), nn.Conv(5, (3, 5), (2, 1), 1),
    ]),
    "few channels": ((*IMAGES, 3), [
        nn.Conv(5, (3, 3)), nn.Conv(5, (3, 3), 2, "VALID"), nn.Conv(5, (4, 4), 4), nn.Conv(5, (5, 5), 2, ((0, 3), 1)),
    ]),
    "others": ((*IMAGES, 8), [
        nn.Conv(5, (3, 3), kernel_dilation=2), nn.Conv(5, (3, 2), 1, "VALID", kernel_dilation=(2, 3)),
        nn.Conv(5, (3, 3), padding="CIRCULAR"), nn.Conv(5, (3, 3), 2, "REFLECT"), nn.Conv(5, (3, 3), mask=MASK),
        nn.remat(nn.Conv)(5, (3, 3)), nn.jit(nn.Conv)(5, (3, 3)), Scanned(),
    ]),
    "sequences": ((*SEQUENCES, 8), [
        nn.Conv(5, (3,)), nn.Conv(5, (4,), 2, "VALID"), nn.Conv(5, (3,), padding="CAUSAL", kernel_dilation=2),
    ]),
    "pooling": ((*IMAGES, 4), [Pooled(functools.partial(pool, **words)) for pool, words in (
        (nn.max_pool, {"window_shape": (2, 2), "strides": (2, 2)}),
        (nn.max_pool, {"window_shape": (3, 2), "strides": (3, 2), "padding": "SAME"}),
        (nn.max_pool, {"window_shape": (3, 3), "strides": (2, 2), "padding": ((1, 1), (0, 2))}),
        (nn.max_pool, {"window_shape": (2, 3)}),
        (nn.avg_pool, {"window_shape": (2, 2), "strides": (2, 2)}),
        (nn.avg_pool, {"window_shape": (3, 3), "strides": (2, 2), "padding": "SAME"}),
        (nn.avg_pool, {"window_shape": (3, 3), "padding": "SAME", "count_include_pad": False}),
        (nn.avg_pool, {"window_shape": (8, 8)}),
    )]),
}  # fmt: skip


def draw(shapes, lanes=()):
    """Normal numbers, for each lane by itself."""
    draws = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: draws.standard_normal((*lanes, *leaf.shape)).astype(np.float32), shapes)


def both_ways(function, variables, x, gradient):
    y, vjp = jax.vjp(function, variables, x)
    return y, vjp(gradient)


@pytest.mark.parametrize(
    ("kind", "platform"), [*((kind, "cpu") for kind in LAYERS), ("sizes and padding", "gpu"), ("sequences", "gpu")]
)
def test_results_and_gradients_are_those_of_flax(kind, platform):
    shape, layers = LAYERS[kind]
    image = jax.ShapeDtypeStruct(shape, jnp.float32)
    variables = [jax.eval_shape(layer.init, jax.random.key(0), image) for layer in layers]
    outputs = [jax.eval_shape(layer.apply, *given, image) for layer, *given in zip(layers, variables)]
    inputs = draw((variables, [image] * len(layers), outputs), (LANES,))

    def every(wrap, *inputs):
        return [both_ways(wrap(layer.apply), *given) for layer, *given in zip(layers, *inputs, strict=True)]

    def in_lanes(wrap):
        return jax.vmap(functools.partial(every, wrap))

    with use_platform(platform):
        actual, expected = jax.jit(lambda *inputs: (in_lanes(with_forms)(*inputs), in_lanes(lambda f: f)(*inputs)))(
            *inputs
        )
        unlike = [str(jax.make_jaxpr(with_forms(f))(v, image)) != str(jax.make_jaxpr(f)(v, image))
                  for f, v in ((layer.apply, v) for layer, v in zip(layers, variables))]  # fmt: skip
    assert all(unlike)  # a form was taken
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=2e-6 * np.abs(e).max())


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv(16, (3, 3), feature_group_count=4),
        nn.Conv(5, (3, 3), 2, kernel_dilation=2),
        nn.Conv(5, (3, 3), padding=2, input_dilation=2),
        nn.Conv(5, (3, 3), padding=-1),
        nn.Conv(5, (3, 3), precision="highest"),
        nn.ConvTranspose(5, (3, 3), (2, 2)),
        nn.ConvLocal(5, (3, 3)),
        nn.Dense(3),
        nn.GroupNorm(4),
        Pooled(functools.partial(nn.max_pool, window_shape=(9, 8))),
    ],
    ids=lambda layer: " ".join(str(layer).split())[:60],
)
def test_what_has_no_form_stays_as_it_is(layer):
    image = jax.ShapeDtypeStruct((*IMAGES, 8), jnp.float32)
    variables = jax.eval_shape(layer.init, jax.random.key(0), image)
    actual, expected = (str(jax.make_jaxpr(f)(variables, image)) for f in (with_forms(layer.apply), layer.apply))
    assert actual == expected


def test_a_lane_that_diverged_stays_so():
    """Also where a number that is larger follows NaN."""
    x = jnp.asarray([[np.nan, 1], [2, 3]]).reshape(1, 2, 2, 1)
    for size, strides in (((2, 2), (2, 2)), ((2, 2), (1, 1))):
        assert np.isnan(with_forms(lambda x, s=size, t=strides: nn.max_pool(x, s, t))(x)).all()
