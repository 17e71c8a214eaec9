"""A linear classifier with closed-form gradients in NumPy, float64, so that whole steps and rounds are recomputed.

A batch is [B, pixels] in 0..1, a model {"bias": [C], "kernel": [pixels, C]}. `small_problem.SmallNetwork` is the same
in JAX.
"""

import numpy as np


def in_numpy(params):
    """The parameters of a `SmallNetwork` (or its gradients' momentum)."""
    named = {"bias": params["backbone"]["bias"], "kernel": params["classifier"]["kernel"]}
    return {name: np.asarray(leaf, np.float64) for name, leaf in named.items()}


def softmax(logits):
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def divided(p, prior):
    """p / P, normalised to sum 1."""
    ratio = p / np.maximum(prior, 1e-6)
    return ratio / ratio.sum(axis=1, keepdims=True)


def sgd_step(model, gradient, velocity, config, learning_rate):
    """A step of PyTorch's SGD: clips the whole gradient, then weight decay, momentum, perhaps Nesterov's.

    Returns:
        The model, and the velocity for the next step.
    """
    length = np.sqrt(sum(np.sum(leaf**2) for leaf in gradient.values()))
    factor = min(1, config.clip_norm / length) if config.clip_norm and length else 1
    moved, after = {}, {}
    for name, leaf in model.items():
        g = factor * gradient[name] + config.weight_decay * leaf
        after[name] = config.momentum * velocity[name] + g
        direction = g + config.momentum * after[name] if config.nesterov else after[name]
        moved[name] = leaf - learning_rate * direction
    return moved, after


def at_rest(model):
    """The velocity before the first step."""
    return {name: np.zeros_like(leaf) for name, leaf in model.items()}
