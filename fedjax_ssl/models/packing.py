"""Lanes packed into channels: a backbone's activations of g clients side by side, as [N, H, W, g*C].

A TPU stores and multiplies 128 channels at a time, so a layer of 32 leaves three quarters of it idle. What treats each
channel by itself, such as batch normalisation and pooling, stays as it is; a convolution is one in g groups. Only the
inside of a backbone is packed: under `jax.vmap` over its parameters `apply` packs what goes in and unpacks what comes
out. It does where `passes.lane_form` is 'packed', the default on TPUs.

As 0 * NaN is NaN, a lane that diverges, or idles on without a valid example, would reach those beside it: see `alone`.
"""

import contextlib
import contextvars

import jax
import jax.numpy as jnp

from fedjax_ssl.models import passes

CHANNELS = 128  # of a TPU's registers and matrix units
_lanes = contextvars.ContextVar("lanes", default=1)


def lanes():
    """g, how many clients the activations that are traced here hold side by side; 1 outside of `apply`."""
    return _lanes.get()


def lanes_together(backbone):
    """How many lanes of a backbone are packed: as many as fill `CHANNELS` with its `narrow_channels`, if any are."""
    narrow = getattr(backbone, "narrow_channels", CHANNELS) if passes.lane_form() == "packed" else CHANNELS
    return max(1, CHANNELS // narrow)


def apply(backbone, images, train, mask, num_views):
    """A backbone's features, see `Heads`; its lanes are packed where that pays.

    Args:
        backbone: bound. With an attribute `narrow_channels`, the channels of its narrowest stage, it can be packed:
            then its layers are those of `layers` and `normalisation`.
        images, train, mask, num_views: as in `Heads`.
    """
    g = lanes_together(backbone)
    if g == 1 or backbone.is_initializing() or backbone.is_mutable_collection("moments"):
        return backbone(images, train, mask, num_views)
    one, variables, write = _as_function(backbone, train, num_views)
    features, updated = _differentiable(one, g)(
        variables["params"], images, variables["batch_stats"], None if mask is None else mask[:, None]
    )
    write(updated)
    return features


def in_parts(layer, x, train, mask, num_views):
    """A layer of a packed backbone on as few of the lanes at a time as fill `CHANNELS`: on dense kernels.

    Args:
        layer: bound, of `x` and the arguments of `apply`; `mask` is [N, g], or None.
        x: [N, H, W, g*C].
    """
    number = lanes() // max(1, CHANNELS // (x.shape[-1] // lanes()))
    if number <= 1 or lanes() % number:
        return layer(x, train, mask, num_views)
    one, variables, write = _as_function(layer, train, num_views)
    arguments = variables["params"], x, variables["batch_stats"], mask
    split = jax.tree.map(lambda leaf: jnp.split(leaf, number, axis=-1), arguments)
    with _side_by_side(lanes() // number):
        results = [one(*jax.tree.map(lambda _, of, part=part: of[part], arguments, split)) for part in range(number)]
    features, updated = jax.tree.map(lambda *of: jnp.concatenate(of, axis=-1), *results)
    write(updated)
    return features


def _as_function(module, train, num_views):
    """A bound module as (a function of (params, x, batch_stats, mask) to (its result, batch_stats), what it holds by
    kind, and a function that writes the batch_stats back).
    """
    unbound, keeps = module.clone(parent=None), module.is_mutable_collection("batch_stats")

    def one(params, x, batch_stats, mask):
        variables = {"params": params, "batch_stats": batch_stats}
        if not keeps:
            return unbound.apply(variables, x, train, mask, num_views), {}
        features, updated = unbound.apply(variables, x, train, mask, num_views, mutable=["batch_stats"])
        return features, updated.get("batch_stats", {})

    def write(updated):
        for name, value in updated.items():
            module.put_variable("batch_stats", name, value)

    return one, {kind: module.variables.get(kind, {}) for kind in ("params", "batch_stats")}, write


@contextlib.contextmanager
def _side_by_side(g):
    """What is traced inside holds so many clients side by side."""
    token = _lanes.set(g)
    try:
        yield
    finally:
        _lanes.reset(token)


def _differentiable(one, g):
    """A function of (params, images, batch_stats, mask) to (features, batch_stats), packed under `vmap`.

    Its backward pass computes the forward pass again, which the compiler finds to be the same.
    """

    def gradient(params, images, batch_stats, mask, cotangent):
        of_features = lambda *trained: one(*trained, batch_stats, mask)  # noqa: E731
        return jax.vjp(of_features, params, images, has_aux=True)[1](cotangent)

    forward, backward = _in_lanes(one, g), _in_lanes(gradient, g)
    call = jax.custom_vjp(forward)
    call.defvjp(
        lambda *arguments: (forward(*arguments), arguments),
        lambda arguments, cotangents: (*backward(*arguments, cotangents[0]), None, None),
    )
    return call


def _in_lanes(function, most):
    """A function of arrays [..., C] which under `vmap` over its first argument takes them packed, [..., g*C].

    With fewer lanes than `most` g is their number, else the last group is filled up with some of the first lanes.
    """
    over_lanes = jax.custom_batching.custom_vmap(function)

    @over_lanes.def_vmap
    def rule(number, mapped, *arguments):
        if all(jax.tree.leaves(mapped[0])):
            whole = jax.tree.map(lambda x, own: x if own else jnp.broadcast_to(x, (number, *x.shape)),
                                 arguments, tuple(mapped))  # fmt: skip
            results = packed(number, whole)
        else:
            results = jax.vmap(function, jax.tree.map(lambda own: 0 if own else None, tuple(mapped)))(*arguments)
        return results, jax.tree.map(lambda _: True, results)

    def packed(number, arguments):
        g = min(most, number)
        with _side_by_side(g):
            results = jax.vmap(function)(*jax.tree.map(lambda x: _pack(x, g), arguments))
        return jax.tree.map(lambda x: _unpack(x, g)[:number], results)

    return over_lanes


def _pack(x, g):
    """[L, ..., C] to [G, ..., g*C], G groups of g lanes."""
    x = jnp.concatenate([x, x[: -len(x) % g]])
    lanes, *middle, channels = x.shape
    by_group = jnp.moveaxis(x.reshape(lanes // g, g, *middle, channels), 1, -2)
    return by_group.reshape(lanes // g, *middle, g * channels)


def _unpack(x, g):
    """[G, ..., g*C] to [G*g, ..., C]."""
    groups, *middle, channels = x.shape
    by_lane = jnp.moveaxis(x.reshape(groups, *middle, g, channels // g), -2, 1)
    return by_lane.reshape(groups * g, *middle, channels // g)


def alone(convolve):
    """A function [..., C] to [..., D] that mixes channels, whose result and gradient have each lane alone.

    Numbers that are not finite count as 0 where they would meet the zeros of another lane. The lane that they are of
    keeps them elsewhere: in normalisation and in the heads.
    """

    def call(x):
        return _with_finite_gradient(convolve(_finite(x)))

    return call


@jax.custom_vjp
def _finite(x):
    return jnp.where(jnp.isfinite(x), x, 0)


_finite.defvjp(lambda x: (_finite(x), ()), lambda _, gradient: (gradient,))


@jax.custom_vjp
def _with_finite_gradient(y):
    return y


_with_finite_gradient.defvjp(lambda y: (y, ()), lambda _, gradient: (_finite(gradient),))


def block_diagonal(kernel, groups):
    """The kernel of a convolution in groups as one of fewer groups, which fill `CHANNELS`.

    Args:
        kernel: [kernel_h, kernel_w, in, groups*out].
        groups: their number.

    Returns:
        [kernel_h, kernel_w, b*in, groups*out], with zeros between the b groups that are joined. As many are as have
        `CHANNELS` on the narrower side and divide their number: all sides then end at a multiple of it, where a TPU
        splits arrays for free.
    """
    inputs, features = kernel.shape[2], kernel.shape[3] // groups
    most = max(1, CHANNELS // min(inputs, features))
    b = next(b for b in range(min(groups, most), 0, -1) if groups % b == 0)
    rows, columns = jnp.arange(b * inputs) // inputs, jnp.arange(groups * features) // features % b
    return jnp.where(rows[:, None] == columns, jnp.tile(kernel, (1, 1, b, 1)), 0)
