"""Lanes packed into channels: a backbone's activations of g clients side by side, as [N, H, W, g*C].

A TPU stores and multiplies 128 channels at a time, so a layer of 32 leaves three quarters of it idle. What treats each
channel by itself, such as batch normalisation and pooling, stays as it is; a convolution is one in g groups. Only the
inside of a backbone is packed: under `jax.vmap` over its parameters `apply` packs what goes in and unpacks what comes
out. It does where `passes.lane_form` is 'packed', the default on TPUs.

As 0 * NaN is NaN, a lane that diverges, or idles on without a valid example, would reach those beside it: see `alone`.
"""

import contextlib
import contextvars
import functools

import jax
import jax.numpy as jnp

from fedjax_ssl.learning.devices import platform
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
        x: [N, H, W, g*C], or what the layer before gave.

    Returns:
        [N, H, W, g*D], or in P parts of the lanes [P, N, H, W, g*D / P]: then the next layer takes them as they are.
        `joined` gives the former.
    """
    width = x.shape[-1] * (len(x) if x.ndim == 5 else 1) // lanes()
    number = lanes() // max(1, CHANNELS // width)
    if number <= 1 or lanes() % number:
        return layer(joined(x), train, mask, num_views)
    one, variables, write = _as_function(layer, train, num_views)
    each = lanes() // number
    x = x if x.shape[0] == number and x.ndim == 5 else _unpack(joined(x)[None], number)
    mask = None if mask is None else _unpack(mask[None], number)
    variables = jax.tree.map(lambda leaf: _by_group(leaf, each), variables)
    with _side_by_side(each):
        features, updated = jax.vmap(one)(variables["params"], x, variables["batch_stats"], mask)
    write(jax.tree.map(lambda leaf: _by_lane(leaf, each), updated))
    return features


def in_turn(layers, x, train, mask, num_views):
    """Equal layers one after the other, each as by `in_parts`.

    In evaluation on a TPU they are a scan, which compiles one of them. In training it would keep the compiler from
    finding that the passes of `_differentiable` compute the same.

    Args:
        layers: bound, with equal shapes of their parameters.
        x, train, mask, num_views: as in `in_parts`.
    """
    scans = platform() == "tpu" and lanes() == 1 and not train and len(layers) > 1
    if not scans or layers[0].is_initializing() or layers[0].is_mutable_collection("moments"):
        for layer in layers:
            x = in_parts(layer, x, train, mask, num_views)
        return x
    functions, variables, writes = zip(*(_as_function(layer, train, num_views) for layer in layers))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *variables)

    def body(x, one):
        return functions[0](one["params"], x, one["batch_stats"], mask)

    x, updated = jax.lax.scan(body, x, stacked)
    for number, write in enumerate(writes):
        write(jax.tree.map(lambda leaf, n=number: leaf[n], updated))
    return x


def joined(x):
    """What `in_parts` gave as [N, H, W, g*C]."""
    return _pack(x, len(x))[0] if x.ndim == 5 else x


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

    forward = _in_lanes(one, g, (True, False, True, False), (False, True))
    backward = _in_lanes(gradient, g, (True, False, True, False, False), (True, False))
    call = jax.custom_vjp(forward)
    call.defvjp(
        lambda *arguments: (forward(*arguments), arguments),
        lambda arguments, cotangents: (*backward(*arguments, cotangents[0]), None, None),
    )
    return call


def _in_lanes(function, most, takes_variables, gives_variables):
    """A function of arrays [..., C] which under `vmap` over its first argument takes them packed, [..., g*C].

    With fewer lanes than `most` g is their number, else the last group is filled up with some of the first lanes.

    Args:
        function: of several trees, to a tuple of trees.
        most: lanes that are packed.
        takes_variables: which arguments are a model's variables: those stay [g, ...], see `of_lanes`.
        gives_variables: which results are.
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
        arguments = _each(_by_group, _pack, takes_variables, arguments, g)
        with _side_by_side(g):
            if number == g:  # no axis of length 1, which would change how the compiler lays arrays out
                first = function(*jax.tree.map(lambda x: x[0], arguments))
                results = jax.tree.map(lambda x: x[None], first)
            else:
                results = jax.vmap(function)(*arguments)
        results = _each(_by_lane, _unpack, gives_variables, results, g)
        return jax.tree.map(lambda x: x[:number], results)

    return over_lanes


def _each(of_variables, of_activations, are_variables, trees, g):
    """Each leaf of several trees by the function for its kind."""
    functions = (of_variables if own else of_activations for own in are_variables)
    return tuple(
        jax.tree.map(functools.partial(function, g=g), tree) for function, tree in zip(functions, trees, strict=True)
    )


def of_lanes(*shape):
    """The shape of a variable inside of a packed layer: [g, ...], a lane after the other, [...] of one lane."""
    return shape if lanes() == 1 else (lanes(), *shape)


def _by_group(x, g):
    """A variable [L, ...] as [G, g, ...], G groups of g lanes, as `of_lanes` has it."""
    x = jnp.concatenate([x, x[: -len(x) % g]])
    return x if g == 1 else x.reshape(len(x) // g, g, *x.shape[1:])


def _by_lane(x, g):
    """[G, g, ...] as [G*g, ...]."""
    return x if g == 1 else x.reshape(-1, *x.shape[2:])


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


def block_diagonal(kernel):
    """The kernels of lanes as those of convolutions that fill `CHANNELS`.

    Args:
        kernel: [g, kernel_h, kernel_w, in, out].

    Returns:
        [P, kernel_h, kernel_w, b*in, b*out], with zeros between the b = g / P lanes that are joined. As many are as
        have `CHANNELS` on the narrower side and divide their number: all sides then end at a multiple of it, where a
        TPU splits arrays for free.
    """
    lanes, *window, inputs, features = kernel.shape
    most = max(1, CHANNELS // min(inputs, features))
    b = next(b for b in range(min(lanes, most), 0, -1) if lanes % b == 0)
    kernel = kernel.reshape(lanes // b, b, *window, inputs, features)
    # Kernels with zeros around them, added up: the compiler has this in one pass, and its gradient, too.
    around = [[(lane * side, (b - 1 - lane) * side) for side in (inputs, features)] for lane in range(b)]
    return sum(jnp.pad(kernel[:, lane], [(0, 0)] * 3 + own) for lane, own in enumerate(around))
