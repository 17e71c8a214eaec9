"""Normalisation of activations under four named policies.

The treatment of batch normalisation changes federated results by tens of points, so it is a named choice:

* 'static': batch statistics in training; ordinary steps store none. Evaluation uses statistics that a separate pass
  over data computes on demand (SemiFL's static batch normalisation, Diao et al., NeurIPS 2022; from HeteroFL, Diao et
  al., ICLR 2021).
* 'running': running averages, updated in training and used in evaluation (Ioffe and Szegedy, ICML 2015;
  conventions of PyTorch).
* 'group': group normalisation (Wu and He, ECCV 2018): statistics of each example by itself, nothing stored.
* 'none': no normalisation, no scale and no shift (FedMatch's networks, Jeong et al., ICLR 2021).
"""

import functools
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_ssl.base.devices import platform
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.models import packing

POLICIES = ("static", "running", "group", "none")
EPSILON = 1e-5
MOMENTUM = 0.1  # new average = 0.9 * old + 0.1 * batch


def require_policy(name, policy, only):
    """Raises a UserError unless the policy is the only one that this backbone takes."""
    if policy != only:
        raise UserError(f"model.name={name} takes model.normalisation={only!r} alone, not {policy!r}")


class Normalisation(nn.Module):
    """Normalises the last axis under one policy, then scales and shifts.

    The parameters are `scale` (initially 1) and `bias` (0), each [C]. Under 'none' the layer has no parameters and does
    nothing. Under 'static' and 'running' the collection 'batch_stats' holds `mean` (initially 0) and `var` (1), each
    [C]. An evaluation pass always reads that collection; a training pass needs it only if it is mutable. A training
    pass with a mutable collection writes:

    * 'static': the mean and the unbiased variance of this batch, which replace the previous ones. A statistics pass can
      thus average them over batches. Several views count as several batches: their plain mean is written.
    * 'running': 0.9 * old + 0.1 * batch, with the unbiased variance, view by view.

    A view without valid examples changes no statistics.

    An evaluation pass with the mutable collection 'moments' writes the moments of each example there, [N, C]: `mean` is
    the mean of x - m and `var` the mean of (x - m)^2 over its positions, where m is the stored mean. Moments about 0
    would not do: E[x^2] - E[x]^2 loses its precision in float32 if the mean is large compared with the deviation.
    """

    policy: str = "static"  # 'static', 'running', 'group' or 'none'
    affine: bool = True  # whether the layer scales and shifts; if not, it has no parameters

    @nn.compact
    def __call__(self, x, train=False, mask=None, num_views=1):
        """Normalises activations x [V*B, ..., C], view-major; the result has their shape and dtype.

        Statistics are computed in float32.

        Args:
            x, num_views: the activations; V, the number of views with separate statistics.
            train: whether batch statistics are used ('group' never uses them).
            mask: bool or float [V*B], 0 for padding rows, which statistics exclude; [V*B, g] holds one mask for each of
                g lanes that share the channels; None: all rows are valid.
        """
        if self.policy == "none":
            return x
        channels = x.shape[-1]
        shape = packing.of_lanes(channels // packing.lanes())
        scale, bias = jnp.ones(channels), jnp.zeros(channels)
        if self.affine:
            scale = self.param("scale", nn.initializers.ones, shape, jnp.float32).reshape(-1)
            bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32).reshape(-1)
        if self.policy == "group":
            return group_normalise(x, scale, bias)

        keeps = self.is_mutable_collection("batch_stats")
        if keeps or not train:
            mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
            var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        if not train:
            if self.is_mutable_collection("moments") and not self.is_initializing():
                centred = (x.astype(jnp.float32) - mean.value).reshape(x.shape[0], -1, channels)
                self.put_variable("moments", "mean", centred.mean(axis=1))
                self.put_variable("moments", "var", jnp.square(centred).mean(axis=1))
            multiplier = scale * lax.rsqrt(var.value.reshape(-1) + EPSILON)
            return ((x - mean.value.reshape(-1)) * multiplier + bias).astype(x.dtype)

        y, batch_mean, batch_var, count = batch_normalise(x, scale, bias, mask, num_views)
        if keeps and not self.is_initializing():
            unbiased = batch_var * (count / jnp.maximum(count - 1, 1))
            combined = _mean_over_views if self.policy == "static" else _running_average
            for statistic, batch in ((mean, batch_mean), (var, unbiased)):
                statistic.value = combined(statistic.value.reshape(-1), batch, count).reshape(shape)
        return y


def pooled_statistics(statistics, moments):
    """Statistics of all examples together, from the mean of their 'moments', leaves [C], see `Normalisation`.

    With the stored mean m and d = E[x - m], the mean is m + d. The (biased) variance is E[(x - m)^2] - d^2, which is
    the mean of the examples' variances plus the variance of their means. `statistics` is the collection 'batch_stats'
    with which the moments were computed.
    """
    if isinstance(moments.get("var", {}), Mapping):
        return {name: pooled_statistics(statistics[name], part) for name, part in moments.items()}
    shift, square = moments["mean"], moments["var"]
    return {"mean": statistics["mean"] + shift, "var": jnp.maximum(square - jnp.square(shift), 0)}


def batch_normalise(x, scale, bias, mask=None, num_views=1):
    """Normalises by the mean and the biased variance over the valid examples and positions of each view.

    Arguments are those of `Normalisation`, with scale and bias [C]. Returns the normalised activations [V*B, ..., C] in
    the dtype of `x`, and for each view the mean [V, C], the biased variance [V, C] and the number of values behind
    them, [V, 1] or [V, C], in float32. Source: Ioffe and Szegedy, ICML 2015, algorithm 1.
    """
    channels = x.shape[-1]
    values = x.reshape(len(x), -1, channels)
    weights = jnp.ones((len(x), 1)) if mask is None else mask.astype(jnp.float32).reshape(len(x), -1)
    if weights.shape[1] > 1:
        weights = jnp.repeat(weights, channels // weights.shape[1], axis=1)
    count = _over_view(weights, num_views) * values.shape[1]
    # max(count, 1): zeros instead of NaN for a view without a valid example.
    y, mean, var = _normalise_views(values, scale, bias, weights, jnp.maximum(count, 1), num_views)
    mean, var, count = (statistic[:: len(x) // num_views] for statistic in (mean, var, count))
    return y.reshape(x.shape), mean, var, count


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _normalise_views(values, scale, bias, weights, divisor, num_views):
    """Normalises values [N, S, C]; also returns the mean and the variance of each example's view, [N, C]."""
    return _normalise_views_forward(values, scale, bias, weights, divisor, num_views)[0]


def _normalise_views_forward(values, scale, bias, weights, divisor, num_views):
    x = values.astype(jnp.float32)
    mean = _over_view(x.sum(axis=1) * weights, num_views) / divisor
    centred = x - mean[:, None]
    if platform() == "tpu" and values.dtype == jnp.bfloat16:
        # One pass over memory. The error is up to 1e-5 of the squared mean: 1 % of the variance for a mean of 30
        # deviations.
        square = _over_view(jnp.square(x).sum(axis=1) * weights, num_views) / divisor
        var = jnp.maximum(square - jnp.square(mean), 0)
    else:
        var = _over_view(jnp.square(centred).sum(axis=1) * weights, num_views) / divisor
    inverse_deviation = lax.rsqrt(var + EPSILON)
    y = centred * (scale * inverse_deviation)[:, None] + bias
    return (y.astype(values.dtype), mean, var), (values, scale, weights, divisor, mean, inverse_deviation)


def _normalise_views_backward(num_views, residuals, cotangents):
    """The gradient in closed form, with about half as many passes over memory as the automatic one.

    Gradients with respect to the returned mean and variance are ignored: these are statistics for later use.
    """
    values, scale, weights, divisor, mean, inverse_deviation = residuals
    gradient = cotangents[0].astype(jnp.float32)
    normalised = (values.astype(jnp.float32) - mean[:, None]) * inverse_deviation[:, None]
    bias_gradient = gradient.sum(axis=1)  # of each example, [N, C]
    scale_gradient = (gradient * normalised).sum(axis=1)
    # Gradients through the mean and the variance reach valid examples only.
    through_mean = _over_view(bias_gradient, num_views) / divisor * weights
    through_var = _over_view(scale_gradient, num_views) / divisor * weights
    through = through_mean[:, None] + normalised * through_var[:, None]
    x_gradient = (gradient - through) * (scale * inverse_deviation)[:, None]
    return (
        x_gradient.astype(values.dtype),
        scale_gradient.sum(axis=0),
        bias_gradient.sum(axis=0),
        jnp.zeros_like(weights),
        jnp.zeros_like(divisor),
    )


_normalise_views.defvjp(_normalise_views_forward, _normalise_views_backward)


def _over_view(x, num_views):
    """Gives each example the sum over all examples of its view: [N, C] to [N, C], view-major."""
    size = len(x) // num_views
    if platform() == "tpu":  # a product: XLA would split a sum and its repetition into many small operations
        same_view = np.kron(np.eye(num_views, dtype=np.float32), np.ones((size, size), np.float32))
        return jnp.matmul(same_view, x, precision=lax.Precision.HIGHEST)
    return jnp.repeat(x.reshape(num_views, size, -1).sum(axis=1), size, axis=0)


def group_normalise(x, scale, bias):
    """Normalises each example, [N, ..., C], by the mean and the biased variance of each group of channels.

    The number of groups is the largest divisor of the number of channels that is at most 32 and leaves two or more
    channels in each group (32 groups for 64, 128, ... channels, 16 for 32, 8 for 16; a single channel is one group).

    Source: Wu and He, ECCV 2018, equations 1, 2 and 7.
    """
    channels = x.shape[-1]
    groups = packing.lanes() * number_of_groups(channels // packing.lanes())
    values = x.astype(jnp.float32).reshape(x.shape[0], -1, groups, channels // groups)
    centred = values - values.mean(axis=(1, 3), keepdims=True)
    var = jnp.square(centred).mean(axis=(1, 3), keepdims=True)
    y = (centred * lax.rsqrt(var + EPSILON)).reshape(x.shape)
    return (y * scale + bias).astype(x.dtype)


def number_of_groups(channels):
    """The largest divisor of `channels` that is at most 32 and leaves two or more channels in each group."""
    limit = max(1, min(32, channels // 2))
    return next(groups for groups in range(limit, 0, -1) if channels % groups == 0)


def _running_average(average, batch, count):
    """Moves the average [C] towards each view's value [V, C] in turn, skipping views without examples."""
    for view in range(batch.shape[0]):
        moved = (1 - MOMENTUM) * average + MOMENTUM * batch[view]
        average = jnp.where(count[view] > 0, moved, average)
    return average


def _mean_over_views(otherwise, batch, count):
    """Plain mean [C] of [V, C] over the views with valid examples; `otherwise` [C] if no view has any."""
    valid = (count > 0).astype(jnp.float32)
    mean = (batch * valid).sum(axis=0) / jnp.maximum(valid.sum(axis=0), 1)
    return jnp.where(valid.sum(axis=0) > 0, mean, otherwise)
