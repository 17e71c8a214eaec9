"""Packs lanes into channels: a backbone's activations for g clients lie side by side, as [N, H, W, g*C].

Lanes are the slots in which clients train in parallel. A TPU stores and multiplies 128 channels at a time, so a layer
of 32 channels leaves three quarters of it idle. Packing changes no layer that treats each channel by itself, such as
batch normalisation and pooling; a convolution becomes one with g groups. Only the inside of a backbone is packed: under
`jax.vmap` over the parameters, `apply` packs the inputs and unpacks the outputs if `passes.lane_form` is 'packed', the
default on TPUs.

Because 0 * NaN is NaN, a lane that diverges, or an idle lane without a valid example, would corrupt the lanes packed
with it; `alone` prevents this.
"""

import contextlib
import contextvars
import functools

import jax
import jax.numpy as jnp

from fedjax_ssl.base.devices import platform
from fedjax_ssl.models import passes

CHANNELS = 128  # of a TPU's registers and matrix units
_lanes = contextvars.ContextVar("lanes", default=1)


def lanes():
    """g, the number of clients side by side in the activations being traced; 1 outside of `apply`."""
    return _lanes.get()


def apply(backbone, images, train, mask, num_views):
    """Computes a backbone's features, arguments as in `Heads`; packs lanes if the backbone is narrow enough.

    It can be packed if it has an attribute `narrow_channels`: as many lanes are packed as fill `CHANNELS` with it. It
    is the channels of a residual network's first stage, or of SmallCNN's second convolution. Its layers must then be
    those of `layers` and `normalisation`.
    """
    narrow = getattr(backbone, "narrow_channels", CHANNELS) if passes.lane_form() == "packed" else CHANNELS
    g = max(1, CHANNELS // narrow)
    if g == 1 or is_plain(backbone):
        return backbone(images, train, mask, num_views)
    one, variables, write = as_function(backbone, train, num_views)
    features, updated = _differentiable(one, g)(
        variables["params"], images, variables["batch_stats"], None if mask is None else mask[:, None]
    )
    write(updated)
    return features


def in_parts(layer, x, train, mask, num_views):
    """Runs a layer of a packed backbone on as few lanes at a time as fill `CHANNELS`, so that kernels are dense.

    The layer is a bound module that takes `x`, [N, H, W, g*C] or the result of the previous layer, and the other
    arguments of `apply`; `mask` is [N, g], or None. The result is [N, H, W, g*D], or, with the lanes split into P
    parts, [P, N, H, W, g*D / P]; `joined` turns the second form into the first.
    """
    width = x.shape[-1] * (len(x) if x.ndim == 5 else 1) // lanes()
    number = lanes() // max(1, CHANNELS // width)
    if number <= 1 or lanes() % number:
        return layer(joined(x), train, mask, num_views)
    one, variables, write = as_function(layer, train, num_views)
    each = lanes() // number
    x = x if x.shape[0] == number and x.ndim == 5 else _unpack(joined(x)[None], number)
    mask = None if mask is None else _unpack(mask[None], number)
    variables = jax.tree.map(lambda leaf: _by_group(leaf, each), variables)
    with _side_by_side(each):
        features, updated = jax.vmap(one)(variables["params"], x, variables["batch_stats"], mask)
    write(jax.tree.map(lambda leaf: _by_lane(leaf, each), updated))
    return features


def in_turn(layers, x, train, mask, num_views):
    """Runs layers of equal shapes one after the other, each by `in_parts`.

    In evaluation on a TPU the layers become a scan, so that only one is compiled. In training a scan would keep the
    compiler from finding that the two forward passes of `_differentiable` are the same.
    """
    scans = platform() == "tpu" and lanes() == 1 and not train and len(layers) > 1
    if not scans or is_plain(layers[0]):
        for layer in layers:
            x = in_parts(layer, x, train, mask, num_views)
        return x
    functions, variables, writes = zip(*(as_function(layer, train, num_views) for layer in layers))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *variables)

    def body(x, one):
        return functions[0](one["params"], x, one["batch_stats"], mask)

    x, updated = jax.lax.scan(body, x, stacked)
    for number, write in enumerate(writes):
        write(jax.tree.map(lambda leaf, n=number: leaf[n], updated))
    return x


def joined(x):
    """The result of `in_parts` as [N, H, W, g*C]."""
    return _pack(x, len(x))[0] if x.ndim == 5 else x


def is_plain(module):
    """Whether a bound module is to be called as it is: it draws its parameters, or collects moments."""
    return module.is_initializing() or module.is_mutable_collection("moments")


def as_function(module, train, num_views):
    """Splits a bound module into a function from (params, x, batch_stats, mask) to (result, batch_stats), its variables
    as a dict with 'params' and 'batch_stats', and a function that writes batch_stats back.
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
    """Code traced inside this context has g clients side by side."""
    token = _lanes.set(g)
    try:
        yield
    finally:
        _lanes.reset(token)


def _differentiable(one, g):
    """A differentiable function from (params, images, batch_stats, mask) to (features, batch_stats).

    It is packed under `vmap`. The backward pass contains the forward pass again; the compiler finds that both are the
    same.
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
    """Makes a function of arrays [..., C] receive packed arrays [..., g*C] under `vmap` over its first argument.

    g is the number of lanes, but at most `most`; the last group is then filled up with some of the first lanes. A
    model's variables among arguments (`takes_variables`) and results (`gives_variables`) stay [g, ...], see `of_lanes`.
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
            if number == g:  # without vmap, because an axis of length 1 would change the layout of arrays
                first = function(*jax.tree.map(lambda x: x[0], arguments))
                results = jax.tree.map(lambda x: x[None], first)
            else:
                results = jax.vmap(function)(*arguments)
        results = _each(_by_lane, _unpack, gives_variables, results, g)
        return jax.tree.map(lambda x: x[:number], results)

    return over_lanes


def _each(of_variables, of_activations, are_variables, trees, g):
    """Applies to each leaf the function for variables or the one for activations."""
    functions = (of_variables if own else of_activations for own in are_variables)
    return tuple(
        jax.tree.map(functools.partial(function, g=g), tree) for function, tree in zip(functions, trees, strict=True)
    )


def of_lanes(*shape):
    """The shape of a variable inside a packed layer: [g, ...] for g lanes, the given shape for one lane."""
    return shape if lanes() == 1 else (lanes(), *shape)


def _by_group(x, g):
    """A variable [L, ...] as [G, g, ...], G groups of g lanes; without the axis g if g is 1, see `of_lanes`."""
    x = jnp.concatenate([x, x[: -len(x) % g]])
    return x if g == 1 else x.reshape(len(x) // g, g, *x.shape[1:])


def _by_lane(x, g):
    """Undoes `_by_group`: [G, g, ...] to [G*g, ...]."""
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
    """Wraps a function that mixes channels, [..., C] to [..., D], so that lanes cannot corrupt each other.

    Non-finite numbers become 0 before they are multiplied by the zeros of other lanes. A diverged lane still keeps its
    non-finite numbers elsewhere: in normalisation and in the heads.
    """
    return lambda x: _with_finite_gradient(convolve(_finite(x)))


@jax.custom_vjp
def _finite(x):
    return jnp.where(jnp.isfinite(x), x, 0)


_finite.defvjp(lambda x: (_finite(x), ()), lambda _, gradient: (gradient,))


@jax.custom_vjp
def _with_finite_gradient(y):
    return y


_with_finite_gradient.defvjp(lambda y: (y, ()), lambda _, gradient: (_finite(gradient),))


def block_diagonal(kernel):
    """Joins the kernels of lanes into block-diagonal kernels that fill `CHANNELS`.

    [g, kernel_h, kernel_w, in, out] becomes [P, kernel_h, kernel_w, b*in, b*out], with zeros between the b = g / P
    lanes that are joined. b is the largest divisor of g for which the narrower side has at most `CHANNELS` channels.
    Sides then usually end at a multiple of `CHANNELS`, where a TPU splits arrays for free.
    """
    lanes, *window, inputs, features = kernel.shape
    most = max(1, CHANNELS // min(inputs, features))
    b = next(b for b in range(min(lanes, most), 0, -1) if lanes % b == 0)
    kernel = kernel.reshape(lanes // b, b, *window, inputs, features)
    # The sum of kernels padded with zeros: the compiler computes it, and its gradient, in one pass.
    around = [[(lane * side, (b - 1 - lane) * side) for side in (inputs, features)] for lane in range(b)]
    return sum(jnp.pad(kernel[:, lane], [(0, 0)] * 3 + own) for lane, own in enumerate(around))
