"""A linear classifier with closed-form gradients, so that NumPy can recompute whole steps and rounds."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.models import Outputs
from fedjax_ssl.ops.sgd import Model


class LinearNetwork:
    """Logits (x - c) @ kernel + bias of the pixels x in 0..1, in place of a `Network`.

    As in batch normalisation, c is the mean of each view's batch in training, and the statistics in evaluation.
    """

    normalisation = "group"  # statistics are neither uploaded nor refreshed

    def __init__(self, pixels, classes):
        self.shapes = {"backbone": {"bias": (classes,)}, "classifier": {"kernel": (pixels, classes)}}

    def init(self, key):
        leaves, treedef = jax.tree.flatten(self.shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
        drawn = [0.3 * jax.random.normal(k, shape) for k, shape in zip(jax.random.split(key, len(leaves)), leaves)]
        return Model(jax.tree.unflatten(treedef, drawn), jnp.zeros(self.shapes["classifier"]["kernel"][0]))

    def predict(self, model, images):
        x = images.astype(jnp.float32).reshape(len(images), -1) / 255 - model.batch_stats
        kernel, bias = model.params["classifier"]["kernel"], model.params["backbone"]["bias"]
        return Outputs(jnp.matmul(x, kernel, precision="highest") + bias, {}, x)

    def probabilities(self, model, images):
        return jax.nn.softmax(self.predict(model, images).logits)

    def train(self, model, views, mask):
        def mean(view):
            return jnp.mean(view.astype(jnp.float32).reshape(len(view), -1) / 255, axis=0, where=mask[:, None])

        outputs = [self.predict(model._replace(batch_stats=mean(view)), view) for view in views]
        return tuple(outputs), model.batch_stats


# The same in NumPy, float64. A batch is [B, pixels] in 0..1, a model {"bias": [C], "kernel": [pixels, C]}.


def in_numpy(params):
    """The parameters of a `LinearNetwork` (or its gradients' momentum)."""
    named = {"bias": params["backbone"]["bias"], "kernel": params["classifier"]["kernel"]}
    return {name: np.asarray(leaf, np.float64) for name, leaf in named.items()}


def softmax(logits):
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def divided(p, prior):
    """p / P, normalised to sum 1."""
    ratio = p / np.maximum(prior, 1e-6)
    return ratio / ratio.sum(axis=1, keepdims=True)


def probabilities(model, x, centre):
    return softmax((x - centre) @ model["kernel"] + model["bias"])


def loss_and_gradient(model, x, targets):
    """The batch mean of sum_c -targets_c log p_c in training, and its gradient; target rows may sum to less than 1."""
    p, centred = probabilities(model, x, x.mean(axis=0)), x - x.mean(axis=0)
    wrong = (p * targets.sum(axis=1, keepdims=True) - targets) / len(x)
    loss = -np.sum(targets * np.log(p)) / len(x)
    return loss, {"bias": wrong.sum(axis=0), "kernel": centred.T @ wrong}


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
