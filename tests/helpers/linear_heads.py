"""A linear backbone with linear heads, for self-supervised methods by hand; gradients are differences of losses."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.kinds import Images
from fedjax_ssl.models import Outputs
from fedjax_ssl.ops.sgd import Model
from tests.helpers.linear_network import at_rest, sgd_step
from tests.helpers.small_problem import CLASSES, PIXELS, SIDE, SmallNetwork

FEATURES, DIM = 3, 2


class LinearHeads(SmallNetwork):
    """Features (x - c) @ kernel, and heads without bias on the features or the projector's outputs.

    Args:
        heads: name -> (its input, '' for the features; width).
        classes: of a classifier with a bias; 0: none.
        companions: other such networks, by name.
    """

    inputs = Images((SIDE, SIDE, 1), (0.0,), (1.0,))

    def __init__(self, heads, classes=CLASSES, companions=None):
        super().__init__(classes=classes)
        self.heads, self.companions = heads, companions or {}

    def init(self, key):
        width = {"": FEATURES, **{name: width for name, (_, width) in self.heads.items()}}
        shapes = {"backbone": (PIXELS, FEATURES), **{n: (width[reads], w) for n, (reads, w) in self.heads.items()}}
        if self.classes:
            shapes["classifier"] = (FEATURES, self.classes)
        keys = jax.random.split(key, len(shapes))
        params = {
            name: {"kernel": 2 * jax.random.normal(own_key, shape)}
            for own_key, (name, shape) in zip(keys, shapes.items())
        }
        if self.classes:
            params["classifier"]["bias"] = jnp.zeros(self.classes)
        batch_stats = {"mean": jnp.full(PIXELS, 0.25)}
        for number, (name, companion) in enumerate(self.companions.items()):
            model = companion.init(jax.random.fold_in(key, number))
            params, batch_stats = {**params, name: model.params}, {**batch_stats, name: model.batch_stats}
        return Model(params, batch_stats)

    def _outputs(self, params, x):
        product = lambda a, name: jnp.matmul(a, params[name]["kernel"], precision="highest")  # noqa: E731
        found = {"": product(x, "backbone")}
        for name, (reads, _) in self.heads.items():
            found[name] = product(found[reads], name)
        features = found.pop("")
        logits = product(features, "classifier") + params["classifier"]["bias"] if self.classes else features[:, :0]
        return Outputs(logits, found, features)

    def train(self, model, views, mask):
        outputs, after = super().train(model, views, mask)
        return outputs, {**model.batch_stats, **after}


# --- In NumPy, float64. ----------------------------------------------------------------------------------------------


def kernels(params, *names):
    """The kernels of some parts."""
    return {name: np.asarray(params[name]["kernel"], np.float64) for name in names}


def unit(rows):
    """Rows scaled to length 1; zero rows, as of a batch of one image, stay zero."""
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def gradient_of(loss, model):
    """Computes the gradient by central differences."""
    gradient = {}
    for name, leaf in model.items():
        gradient[name] = np.zeros_like(leaf)
        for place in np.ndindex(leaf.shape):
            moved = []
            for step in (1e-6, -1e-6):
                other = {**model, name: leaf.copy()}
                other[name][place] += step
                moved.append(loss(other))
            gradient[name][place] = (moved[0] - moved[1]) / 2e-6
    return gradient


def descend(model, losses, config, after_step=lambda model: None):
    """SGD on the losses in turn, each a function of the model; returns the model and the losses."""
    velocity, values = at_rest(model), []
    for loss in losses:
        values.append(loss(model))
        model, velocity = sgd_step(model, gradient_of(loss, model), velocity, config, config.learning_rate)
        after_step(model)
    return model, values


def assert_kernels(params, expected, atol=3e-5):
    for name, leaf in expected.items():
        np.testing.assert_allclose(params[name]["kernel"], leaf, atol=atol, err_msg=name)
