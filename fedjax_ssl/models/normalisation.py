"""Normalisation of activations under three named policies.

Federated results move by tens of points with the treatment of batch normalisation, so it is a named choice:

* 'static': batch statistics in training, none stored by an ordinary step. Evaluation uses statistics that a
  separate pass over data computes on demand (SemiFL's static batch normalisation, Diao et al., NeurIPS 2022;
  from HeteroFL, Diao et al., ICLR 2021).
* 'running': running averages, updated in training and used in evaluation (Ioffe and Szegedy, ICML 2015;
  conventions of PyTorch).
* 'group': group normalisation (Wu and He, ECCV 2018): statistics of each example alone, nothing stored.
* 'none': no normalisation, and no scale and shift either (FedMatch's networks, Jeong et al., ICLR 2021).
"""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.devices import platform
from fedjax_ssl.models import packing

POLICIES = ("static", "running", "group", "none")
EPSILON = 1e-5
MOMENTUM = 0.1  # new average = 0.9 * old + 0.1 * batch


class Normalisation(nn.Module):
    """Normalises the last axis under one policy, then scales and shifts.

    Parameters `scale` (1) and `bias` (0), each [C]; under 'none' there are none, and the layer does nothing. Under
    'static' and 'running' the collection 'batch_stats' holds `mean` (0) and `var` (1), each [C]. A training pass needs
    that collection only where it is mutable; an evaluation pass always reads it. What a training pass with a mutable
    collection writes:

    * 'static': the mean and the unbiased variance of this batch, which replace the previous ones, so that a
      statistics pass may average them over batches. Several views count as several batches: their plain mean.
    * 'running': 0.9 * old + 0.1 * batch, with the unbiased variance, view by view.

    A view without a single valid example changes neither.

    An evaluation pass with the mutable collection 'moments' writes each example's there, [N, C]: `mean`, that of
    x - m, and `var`, that of (x - m)^2 over its positions, where m is the stored mean. About m and not about 0, for
    E[x^2] - E[x]^2 of a mean that is large beside the deviation would be float32's rounding.
    """

    policy: str = "static"  # 'static', 'running', 'group' or 'none'
    affine: bool = True  # whether it scales and shifts; without, it has no parameters

    @nn.compact
    def __call__(self, x, train=False, mask=None, num_views=1):
        """Normalises.

        Args:
            x: [V*B, ..., C] activations, view-major.
            train: whether batch statistics are used (they are not under 'group').
            mask: bool or float [V*B], 0 for padding rows, which take no part in any statistic; [V*B, g] with one for
              each of g lanes that share the channels; None: all are valid.
            num_views: V, the number of views with separate statistics.

        Returns:
            An array of the shape and dtype of `x`; statistics are computed in float32.

        Raises:
            UserError: the policy is unknown.
        """
        if self.policy not in POLICIES:
            raise UserError(f"unknown normalisation {self.policy!r}; known: {', '.join(POLICIES)}")
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
    """The statistics of all examples together, from the mean over them of their 'moments', see `Normalisation`.

    With m the stored mean, d = E[x - m]: the mean is m + d, the (biased) variance E[(x - m)^2] - d^2, which is the mean
    of the examples' variances plus the variance of their means.

    Args:
        statistics: the collection 'batch_stats' with which the moments were taken.
        moments: the same layers, leaves [C].
    """
    if isinstance(moments.get("var", {}), Mapping):
        return {name: pooled_statistics(statistics[name], part) for name, part in moments.items()}
    shift, square = moments["mean"], moments["var"]
    return {"mean": statistics["mean"] + shift, "var": jnp.maximum(square - jnp.square(shift), 0)}


def batch_normalise(x, scale, bias, mask=None, num_views=1):
    """Normalises by the mean and the biased variance over the valid examples and positions of each view.

    Args:
        x: [V*B, ..., C] activations, view-major.
        scale: [C].
        bias: [C].
        mask: bool or float [V*B] or [V*B, g], see `Normalisation`, or None.
        num_views: V.

    Returns:
        The normalised activations [V*B, ..., C] in the dtype of `x`, and per view the mean [V, C], the biased
        variance [V, C] and the number of values they were taken over, [V, 1] or [V, C], in float32.

    Source: Ioffe and Szegedy, ICML 2015, algorithm 1.
    """
    channels = x.shape[-1]
    values = x.reshape(num_views, x.shape[0] // num_views, -1, channels)
    weights = None
    if mask is not None:
        weights = mask.astype(jnp.float32).reshape(*values.shape[:2], 1, -1)
        if weights.shape[-1] > 1:
            weights = jnp.repeat(weights, channels // weights.shape[-1], axis=-1)
    count = _count(values, weights)
    # max(count, 1): zeros instead of NaN for a view without a valid example.
    y, mean, var = _normalise_views(values, scale, bias, weights, jnp.maximum(count, 1))
    return y.reshape(x.shape), mean, var, count


@jax.custom_vjp
def _normalise_views(values, scale, bias, weights, divisor):
    return _normalise_views_forward(values, scale, bias, weights, divisor)[0]


def _normalise_views_forward(values, scale, bias, weights, divisor):
    x = values.astype(jnp.float32)
    mean = _weighted_sum(x, weights) / divisor
    centred = x - mean[:, None, None]
    if platform() == "tpu" and values.dtype == jnp.bfloat16:
        # In one pass over memory, to within 1e-5 of the mean's square: of a mean of 30 deviations, 1 % of the variance.
        var = jnp.maximum(_weighted_sum(jnp.square(x), weights) / divisor - jnp.square(mean), 0)
    else:
        var = _weighted_sum(jnp.square(centred), weights) / divisor
    inverse_deviation = lax.rsqrt(var + EPSILON)
    y = centred * (scale * inverse_deviation)[:, None, None] + bias
    return (y.astype(values.dtype), mean, var), (values, scale, weights, divisor, mean, inverse_deviation)


def _normalise_views_backward(residuals, cotangents):
    """The closed form of the gradient: about half the passes over memory of the automatic one.

    Mean and variance are statistics for later use, not differentiated.
    """
    values, scale, weights, divisor, mean, inverse_deviation = residuals
    gradient = cotangents[0].astype(jnp.float32)
    normalised = (values.astype(jnp.float32) - mean[:, None, None]) * inverse_deviation[:, None, None]
    bias_gradient = gradient.sum(axis=(1, 2))  # [V, C]
    scale_gradient = (gradient * normalised).sum(axis=(1, 2))
    # What moves through the mean and through the variance reaches the valid examples only.
    through_mean = (bias_gradient / divisor)[:, None, None]
    through_var = normalised * (scale_gradient / divisor)[:, None, None]
    through = through_mean + through_var
    if weights is not None:
        through = through * weights
    x_gradient = (gradient - through) * (scale * inverse_deviation)[:, None, None]
    weights_gradient = None if weights is None else jnp.zeros_like(weights)
    return (
        x_gradient.astype(values.dtype),
        scale_gradient.sum(axis=0),
        bias_gradient.sum(axis=0),
        weights_gradient,
        jnp.zeros_like(divisor),
    )


_normalise_views.defvjp(_normalise_views_forward, _normalise_views_backward)


def _count(values, weights):
    """Number of values behind each statistic, float32 [V, 1], or [V, C] where it differs."""
    if weights is None:
        return jnp.full((len(values), 1), values.shape[1] * values.shape[2], jnp.float32)
    return weights.sum(axis=(1, 2)) * values.shape[2]


def _weighted_sum(x, weights):
    """Sum [V, C] of x [V, B, S, C] over the valid examples and positions."""
    return (x if weights is None else x * weights).sum(axis=(1, 2))


def group_normalise(x, scale, bias):
    """Normalises each example by the mean and the biased variance of each group of channels.

    The number of groups is the largest divisor of the channels that is at most 32 and leaves two or more
    channels a group (32 from 64 channels on, 16 for 32, 8 for 16; a single channel is one group).

    Args:
        x: [N, ..., C].
        scale: [C].
        bias: [C].

    Returns:
        An array of the shape and dtype of `x`.

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
    """The largest divisor of `channels` that is at most 32 and leaves two or more channels a group."""
    limit = max(1, min(32, channels // 2))
    return next(groups for groups in range(limit, 0, -1) if channels % groups == 0)


def _running_average(average, batch, count):
    """Moves the average [C] towards each view's value [V, C] in turn, skipping views without examples."""
    for view in range(batch.shape[0]):
        moved = (1 - MOMENTUM) * average + MOMENTUM * batch[view]
        average = jnp.where(count[view] > 0, moved, average)
    return average


def _mean_over_views(otherwise, batch, count):
    """Plain mean [C] of [V, C] over the views that hold a valid example; `otherwise` [C] where none does."""
    valid = (count > 0).astype(jnp.float32)
    mean = (batch * valid).sum(axis=0) / jnp.maximum(valid.sum(axis=0), 1)
    return jnp.where(valid.sum(axis=0) > 0, mean, otherwise)
