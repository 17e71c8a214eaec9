"""Runs a network written with `flax.linen` by the library's convolutions and pooling, with equal results.

XLA's own gradients of convolutions and of pooling are an order of magnitude slower on CPUs, see `cpu/`, and so are
those of convolutions with a kernel for each lane on GPUs. `apply` traces a backbone that is not the library's to a
jaxpr, JAX's list of primitive operations, and evaluates it with the library's form in place of each operation of
`_FORMS`. So it does not matter who calls the operation: a module of Flax, `flax.linen.max_pool` or the user's own code.
An operation whose parameters the library's form does not have stays as it is.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, primitives

from fedjax_ssl.base.devices import platform
from fedjax_ssl.models import packing, passes
from fedjax_ssl.models.cpu import pooling
from fedjax_ssl.models.layers import conv2d
from fedjax_ssl.models.own import Adapted


def apply(backbone, images, train, mask, num_views):
    """Computes a backbone's features, arguments as in `Heads`; the library's own backbones have its forms already."""
    if not isinstance(backbone, Adapted) or packing.is_plain(backbone):
        return packing.apply(backbone, images, train, mask, num_views)
    one, variables, write = packing.as_function(backbone, train, num_views)
    features, updated = with_forms(one)(variables["params"], images, variables["batch_stats"], mask)
    write(updated)
    return features


def with_forms(function):
    """The function of pytrees of arrays, with the library's form of each operation that has one."""

    def call(*arguments):
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = evaluate(traced.jaxpr, traced.consts, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def evaluate(jaxpr: Jaxpr, constants, *arguments, forms=None) -> list[Any]:
    """The results of a jaxpr, as `jax.core.eval_jaxpr`, with a form in place of each operation that has one.

    `forms` has them by the names of the operations; None: the library's. A form takes the operation's arrays and
    parameters, and gives its results, or None if it does not have these.
    """
    forms = _FORMS if forms is None else forms
    values = dict(zip(itertools.chain(jaxpr.constvars, jaxpr.invars), itertools.chain(constants, arguments)))
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]  # noqa: E731
    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        form = forms.get(equation.primitive.name)
        results = form(*inputs, **equation.params) if form else None
        if results is None:  # unchanged
            names = [atom for atom in equation.invars if not isinstance(atom, Literal)]
            alone = jaxpr.replace(constvars=[], invars=names, outvars=equation.outvars, eqns=[equation])
            results = jax.core.eval_jaxpr(alone, (), *map(read, names))
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _convolution(x, kernel, *, window_strides, padding, rhs_dilation, dimension_numbers, **others):
    """Convolutions over one or two dimensions of positions, of channels that are not in groups."""
    if x.ndim not in (3, 4) or dimension_numbers != _channels_last(x.ndim) or not _is_ordinary(x, kernel, **others):
        return None
    one_dimension = x.ndim == 3
    if one_dimension:  # it becomes the width of images of one row
        x, kernel = x[:, None], kernel[None]
        window_strides, padding, rhs_dilation = (1, *window_strides), ((0, 0), *padding), (1, *rhs_dilation)
    if min(map(min, padding)) < 0:
        return None
    window = passes.Window(tuple(window_strides), tuple(padding))
    if max(rhs_dilation) == 1:
        y = conv2d(x, kernel, window=window)
    elif max(window_strides) == 1:
        y = _dilated(passes.padded(x, window), kernel, rhs_dilation)
    else:
        return None
    return [y[:, 0] if one_dimension else y]


def _channels_last(rank):
    """The dimension numbers of `flax.linen.Conv`: [N, positions ..., C] and [window ..., in, out]."""
    places = tuple(range(1, rank - 1))
    activations = (0, rank - 1, *places)
    return lax.ConvDimensionNumbers(activations, (rank - 1, rank - 2, *range(rank - 2)), activations)


def _is_ordinary(x, kernel, *, lhs_dilation, feature_group_count, batch_group_count, precision, **others):
    """Whether a convolution asks for nothing but a window, a dilation of its kernel, and results like its input."""
    groups = feature_group_count == batch_group_count == 1 and max(lhs_dilation) == 1
    of_one_type = x.dtype == kernel.dtype and others["preferred_element_type"] in (None, x.dtype)
    return groups and of_one_type and precision is None and jnp.issubdtype(x.dtype, jnp.floating)


def _dilated(x, kernel, dilation):
    """Convolves x [N, H, W, C], without padding, with a kernel whose taps are apart: [N, H', W', D].

    Positions that are `dilation` apart are an image by themselves, to which an ordinary convolution applies.
    """
    (batch, *sides, _), (down, across) = x.shape, dilation
    size = [side - (taps - 1) * apart for side, taps, apart in zip(sides, kernel.shape, dilation)]
    x = jnp.pad(x, ((0, 0), *((0, -side % apart) for side, apart in zip(sides, dilation)), (0, 0)))
    x = x.reshape(batch, x.shape[1] // down, down, x.shape[2] // across, across, -1).transpose(0, 2, 4, 1, 3, 5)
    y = conv2d(x.reshape(-1, *x.shape[3:]), kernel, window=passes.Window((1, 1), ((0, 0), (0, 0))))
    y = y.reshape(batch, down, across, *y.shape[1:]).transpose(0, 3, 1, 4, 2, 5)
    return y.reshape(batch, y.shape[1] * down, y.shape[3] * across, -1)[:, : size[0], : size[1]]


MOST_TAPS = 8  # of a pooling window's side, each an operation of the program


def _pooling(pool, outside):
    """The form of pooling on CPUs by a function of `cpu.pooling`; `outside` is the number of the padding."""

    def form(x, *, window_dimensions, window_strides, padding, base_dilation, window_dilation):
        unusual = max(base_dilation + window_dilation) > 1 or max(window_dimensions) > MOST_TAPS
        if platform() != "cpu" or x.dtype != jnp.float32 or unusual or min(map(min, padding)) < 0:
            return None
        return [pool(jnp.pad(x, padding, constant_values=outside), window_dimensions, window_strides)]

    return form


# Operations that contain others: none of them has a form itself, so they change if one inside of them has one.


def _inlined(*inputs, jaxpr: ClosedJaxpr, **_):
    return evaluate(jaxpr.jaxpr, jaxpr.consts, *inputs) if _has_forms(jaxpr.jaxpr) else None


def _rematerialised(*inputs, jaxpr: Jaxpr, prevent_cse, policy, **_):
    if not _has_forms(jaxpr):
        return None
    function = functools.partial(evaluate, jaxpr, ())
    return jax.checkpoint(function, prevent_cse=prevent_cse, policy=policy)(*inputs)


def _scanned(*inputs, jaxpr: ClosedJaxpr, num_consts, num_carry, reverse, length, unroll, **_):
    if not _has_forms(jaxpr.jaxpr):
        return None

    def body(carry, of_step):
        results = evaluate(jaxpr.jaxpr, jaxpr.consts, *inputs[:num_consts], *carry, *of_step)
        return results[:num_carry], results[num_carry:]

    start, steps = list(inputs[num_consts : num_consts + num_carry]), list(inputs[num_consts + num_carry :])
    carry, results = lax.scan(body, start, steps, length=length, reverse=reverse, unroll=unroll)
    return [*carry, *results]


def _has_forms(jaxpr: Jaxpr) -> bool:
    """Whether an operation in a jaxpr, or in those inside of it, has a form."""
    return any(
        equation.primitive.name in _FORMS if (inner := _inner(equation)) is None else _has_forms(inner)
        for equation in jaxpr.eqns
    )


def _inner(equation) -> Jaxpr | None:
    """The jaxpr inside of an operation that calls one."""
    inner = equation.params.get("jaxpr")
    return inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner


_FORMS = {
    primitives.conv_general_dilated_p.name: _convolution,
    primitives.reduce_window_max_p.name: _pooling(pooling.largest, -jnp.inf),
    primitives.reduce_window_sum_p.name: _pooling(pooling.sums, 0),
    primitives.jit_p.name: _inlined,
    primitives.remat_p.name: _rematerialised,
    primitives.scan_p.name: _scanned,
}
