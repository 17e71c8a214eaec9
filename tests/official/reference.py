"""The building blocks of the references, in float64: NumPy, with gradients by the package `autograd`.

A model is {'params': tree, 'batch_stats': tree} with the library's names. Conventions are PyTorch's, as in the official
codes: training uses the batch's statistics with the biased variance; the running statistics take a tenth of the new
mean and unbiased variance.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import autograd.numpy as np
import jax
from autograd import grad
from autograd.tracer import getval

Tree = Any


def in_float64(model: Any) -> dict[str, Tree]:
    """A `Model` in NumPy."""
    return jax.tree.map(lambda leaf: np.array(leaf, np.float64), {**model._asdict()})


def pixels(images: Any) -> Any:
    """uint8 [B, H, W, 1] as network inputs [B, H W], normalised with mean 0.5 and deviation 0.25 of 0..1."""
    return (np.array(images, np.float64).reshape(len(images), -1) / 255 - 0.5) / 0.25


def normalise(layer: Tree, statistics: Tree, x: Any, train: bool) -> tuple[Any, Tree]:
    """Batch normalisation [B, D], with `layer` {'scale', 'bias'} or {} for none; also returns the running statistics.

    A batch of one example has no unbiased variance: the library then uses the biased variance, 0.
    """
    mean, var = statistics["mean"], statistics["var"]
    if train:
        mean = np.mean(x, axis=0)
        var = np.mean((x - mean) ** 2, axis=0)
        unbiased = var * len(x) / max(len(x) - 1, 1)
        new = {"mean": mean, "var": unbiased}
        statistics = {name: 0.9 * statistics[name] + 0.1 * new[name] for name in statistics}
    y = (x - mean) / np.sqrt(var + 1e-5)
    return (y * layer["scale"] + layer["bias"] if layer else y), statistics


def backbone(params: Tree, statistics: Tree, images: Any, train: bool) -> tuple[Any, Tree]:
    """`TwoLayers`: params and statistics of the part 'backbone', images [B, H, W, 1] -> features, new statistics."""
    x, new = pixels(images), {}
    for name in ("first", "second"):
        layer, x = f"{name}_norm", x @ params[name]["kernel"]
        if layer in params:  # not with model.normalisation='none'
            x, new[layer] = normalise(params[layer], statistics[layer], x, train)
        x = relu(x)
    return x, new


def projector(params: Tree, statistics: Tree, x: Any, train: bool) -> tuple[Any, Tree]:
    """`Projector`: linear, normalised, ReLU, linear; outputs, new statistics."""
    x, norm = normalise(params["norm"], statistics["norm"], linear(params["first"], x), train)
    return linear(params["second"], relu(x)), {"norm": norm}


def relu(x: Any) -> Any:
    """max(x, 0) with slope 0 at 0, as in PyTorch; `np.maximum` has slope a half there."""
    return np.where(x > 0, x, 0)


def linear(layer: Tree, x: Any) -> Any:
    """x @ kernel, plus the bias if there is one."""
    y = x @ layer["kernel"]
    return y + layer["bias"] if "bias" in layer else y


def classify(params: Tree, statistics: Tree, images: Any, train: bool) -> tuple[Any, Tree]:
    """Logits [B, C] by backbone and classifier, and all statistics after the pass."""
    features, new = backbone(params["backbone"], statistics.get("backbone"), images, train)
    return linear(params["classifier"], features), {**statistics, "backbone": new}


def log_softmax(logits: Any) -> Any:
    """Over the last axis."""
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def softmax(logits: Any) -> Any:
    """Over the last axis."""
    return np.exp(log_softmax(logits))


def cross_entropy(logits: Any, labels: Any) -> Any:
    """The cross-entropy of each example, [B], for integer labels."""
    return -log_softmax(logits)[np.arange(len(labels)), labels]


def fairness(rule: Any, logits: Any, predicted: Any, weights: Any) -> Any:
    """FreeMatch's term for the images with a weight: sum a log b, see `trainers_by_hand`, with gradients.

    Args:
        rule: a `trainers_by_hand.FreeMatch`.
        logits: [B, C] of the views in training.
        predicted: the classes of their largest logits, without gradient.
        weights: of the pseudo-labels, [B].
    """
    chosen = np.flatnonzero(weights)
    if not len(chosen):
        return 0.0
    shares = np.bincount(predicted[chosen], minlength=logits.shape[1]) / len(chosen)
    inverse = np.array([1 / share if share else 0.0 for share in shares])
    wanted, found = rule.by_class / rule.histogram, np.mean(softmax(logits[chosen]), axis=0) * inverse
    return np.sum(wanted / wanted.sum() * np.log(found / np.sum(found) + 1e-12))


def gradient(loss: Callable[[Tree], Any], params: Tree) -> tuple[Tree, Any]:
    """The gradient of a loss, and its aux.

    Args:
        loss: params -> (loss, aux), aux a pytree of arrays or None.
        params: where to differentiate.

    Returns:
        The gradient, and aux.
    """
    leaves, treedef = jax.tree.flatten(params)
    kept = []

    def value(*leaves):
        value, aux = loss(jax.tree.unflatten(treedef, leaves))
        kept.append(jax.tree.map(detached, aux))
        return value

    slopes = grad(value, argnum=tuple(range(len(leaves))))(*leaves)
    return jax.tree.unflatten(treedef, slopes), kept[-1]


def detached(leaf: Any) -> Any:
    """The array without its gradient."""
    while (inner := getval(leaf)) is not leaf:
        leaf = inner
    return leaf


class SGD:
    """PyTorch's SGD; gradients are first clipped to a total length, as in `clip_grad_norm_`."""

    def __init__(self, rate, momentum=0.0, weight_decay=0.0, nesterov=False, clip_norm=0.0):
        self.rate, self.momentum, self.weight_decay = rate, momentum, weight_decay
        self.nesterov, self.clip_norm, self.velocity = nesterov, clip_norm, None

    @classmethod
    def of(cls, section: Any, rate: float | None = None) -> "SGD":
        """The optimizer of `config.client` or `config.server`."""
        rate = section.learning_rate if rate is None else rate
        return cls(rate, section.momentum, section.weight_decay, section.nesterov, section.clip_norm)

    def step(self, params: Tree, gradient: Tree) -> Tree:
        """The parameters after a step; parts without a gradient stay unchanged."""
        trained = {name: params[name] for name in gradient}
        if self.clip_norm:
            length = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
            factor = min(1.0, self.clip_norm / (length + 1e-6))
            gradient = jax.tree.map(lambda g: factor * g, gradient)
        gradient = jax.tree.map(lambda g, p: g + self.weight_decay * p, gradient, trained)
        if self.momentum:
            first = self.velocity is None
            old = gradient if first else self.velocity
            self.velocity = gradient if first else jax.tree.map(lambda v, g: self.momentum * v + g, old, gradient)
            moved = jax.tree.map(lambda v, g: g + self.momentum * v if self.nesterov else v, self.velocity, gradient)
        else:
            moved = gradient
        return {**params, **jax.tree.map(lambda p, m: p - self.rate * m, trained, moved)}


def trained(model: dict[str, Tree], sgd: SGD, batches: Iterable[Any], loss: Callable[..., Any]) -> dict[str, Tree]:
    """A model after a step for each batch; `loss` takes (params, statistics, batch), and returns its value and the new
    statistics.
    """
    params, statistics = model["params"], model["batch_stats"]
    for batch in batches:
        slope, statistics = gradient(functools.partial(loss, statistics=statistics, batch=batch), params)
        params = sgd.step(params, slope)
    return {"params": params, "batch_stats": statistics}


def unit(rows: Any) -> Any:
    """Rows scaled to length 1; a row of zeros, which such small networks may give, stays one."""
    squares = np.sum(rows**2, axis=-1, keepdims=True)
    return rows / np.sqrt(np.where(squares > 0, squares, 1.0))


def weighted_mean(trees: list[Tree], weights: Any) -> Tree:
    """sum_k w_k tree_k / sum_k w_k."""
    shares = np.array(weights, np.float64) / np.sum(weights)
    return jax.tree.map(lambda *leaves: sum(share * leaf for share, leaf in zip(shares, leaves)), *trees)
