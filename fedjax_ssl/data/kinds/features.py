"""Feature vectors, such as the outputs of a frozen encoder: one per example, or V precomputed views of each example.

The first W (`data.weak_views`) of V views are weak, the others strong; one is drawn for each example. If there is only
one weak view, weak views are made from it by Gaussian noise. If there are no strong views, they are made from weak
views by setting a share of the features to their mean.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.kinds.kind import Facts, Kind
from fedjax_ssl.ops.augment import Views

NOISE = 0.1  # of features and tables, both views: Gaussian, in standard deviations
MASKED = 0.2  # strong views: the share of features set to their mean, of a table's values set missing, of tokens masked
View = Callable[[jax.Array, jax.Array], jax.Array]  # (key, inputs) -> one view of each


class Features(NamedTuple):
    """Float vectors, stored as float32; the first of V views represents the example."""

    shape: tuple[int, ...]  # (D,) or (V, D)
    # mean and std: of each of the D features over all views of the training set; features of an encoder share one std.
    mean: np.ndarray
    std: np.ndarray

    def to_network(self, inputs: jax.Array) -> jax.Array:
        """Standardises examples [B, D] or [B, V, D], or views [B, D], by `mean` and `std`: float32 [B, D]."""
        return (first(inputs) - self.mean) / self.std

    @staticmethod
    def together(views: Sequence[jax.Array]) -> jax.Array:
        """Concatenates views [B, D] and the first views of examples [B, V, D] into one batch: float32 [., D]."""
        return jnp.concatenate([first(view).astype(jnp.float32) for view in views])


def first(inputs: jax.Array) -> jax.Array:
    """The first of V views: [B, V, D] to [B, D]."""
    return inputs[:, 0] if inputs.ndim == 3 else inputs


def drawn(key: jax.Array, inputs: jax.Array, start: int, end: int) -> jax.Array:
    """Draws one of the views `start` to `end` - 1 of each example: [B, V, D] to [B, D]."""
    numbers = jax.random.randint(key, (len(inputs),), start, end)
    return jnp.take_along_axis(inputs, numbers[:, None, None], axis=1)[:, 0]


def views_of(num_weak: int, weakened: View, masked: View) -> Views:
    """The views of examples of which the first `num_weak` versions are weak and the others strong.

    If there are several weak versions, a weak view is one of them, otherwise `weakened` of a key and the first version.
    A strong view is a strong version; if there is none, `masked` of a key and a weak view.
    """

    def weak(key: jax.Array, inputs: jax.Array) -> jax.Array:
        return drawn(key, inputs, 0, num_weak) if num_weak > 1 else weakened(key, first(inputs))

    def strong(key: jax.Array, inputs: jax.Array) -> jax.Array:
        if inputs.ndim == 3 and inputs.shape[1] > num_weak:
            return drawn(key, inputs, num_weak, inputs.shape[1])
        weak_key, mask_key = jax.random.split(key)
        return masked(mask_key, weak(weak_key, inputs))

    return Views(weak, strong, (strong, strong))


def noisy(key: jax.Array, inputs: jax.Array, std: np.ndarray) -> jax.Array:
    """Adds Gaussian noise whose deviation is `NOISE` times `std`."""
    return inputs + NOISE * std * jax.random.normal(key, inputs.shape)


def _views(config: Any, facts: Facts) -> Views:
    inputs = _inputs(facts)

    def masked(key: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, MASKED, seen.shape), inputs.mean, seen)

    return views_of(facts["weak_views"], functools.partial(noisy, std=inputs.std), masked)


def _given(features: Any, facts: Facts) -> np.ndarray:
    """Numbers [B, D] or [B, V, D]."""
    features, shape = np.asarray(features), tuple(facts["shape"])
    is_good = features.ndim in (2, 3) and features.dtype.kind in "fiu" and features.size
    if not is_good or features.shape[-1] != shape[-1]:
        raise UserError(f"features are {features.dtype} {features.shape}; the model takes numbers [B, {shape[-1]}]")
    with np.errstate(over="ignore"):
        # Only the first view is kept, so that programs need one shape only.
        features = (features[:, 0] if features.ndim == 3 else features).astype(np.float32)
    if not np.isfinite(features).all():
        raise UserError("features have values that are not finite in float32")
    return features


def _inputs(facts: Facts) -> Features:
    return Features(tuple(facts["shape"]), np.asarray(facts["mean"], np.float32), np.asarray(facts["std"], np.float32))


KIND = Kind(noun="feature vectors", stored=np.float32, inputs=_inputs, views=_views, given=_given)
