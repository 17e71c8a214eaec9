"""One step of stochastic gradient descent, the same for clients and server."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from fedjax_ssl.learning.trees import select

Params = Any
BatchStats = Any


class Model(NamedTuple):
    """A model's numbers: what is trained, travels, is averaged and tested.

    Attributes:
        params: the parameters, a dict by part ('backbone', 'classifier', a head's name).
        batch_stats: the statistics of its normalisation layers; an empty dict if the policy has none.
    """

    params: Params
    batch_stats: BatchStats

    def with_parts(self, **parts: Any) -> "Model":
        """The model with these parts in place of its own, or besides them."""
        return self._replace(params={**self.params, **parts})


class Learner(NamedTuple):
    """What a training loop carries.

    Attributes:
        model: all of it.
        opt_state: of the parts that are trained, and of those only.
    """

    model: Model
    opt_state: Any


def start(optimizer: optax.GradientTransformation, model: Model, parts: tuple[str, ...]) -> Learner:
    """A Learner that will train `parts` of a model's parameters, with a fresh optimiser."""
    return Learner(model, optimizer.init(select(model.params, parts)))


def step(
    loss_fn: Callable[[Model], Any], optimizer: optax.GradientTransformation, learner: Learner, parts: tuple[str, ...]
) -> tuple[Learner, Any]:
    """One update of the named parts; the others take no gradient, no momentum and no weight decay.

    A head that a loss does not touch must not decay: PyTorch, on which the papers' figures rest, skips
    parameters without a gradient.

    Args:
        loss_fn: model -> (loss [], (batch_stats, aux)).
        optimizer: whose state the learner holds.
        learner: before the step.
        parts: names of top-level entries of `params`.

    Returns:
        The learner after the step, and aux.
    """
    params, batch_stats = learner.model
    trained = select(params, parts)

    def loss_of_trained(trained):
        return loss_fn(Model({**params, **trained}, batch_stats))

    gradients, (batch_stats, aux) = jax.grad(loss_of_trained, has_aux=True)(trained)
    updates, opt_state = optimizer.update(gradients, learner.opt_state, trained)
    model = Model({**params, **optax.apply_updates(trained, updates)}, batch_stats)
    return Learner(model, opt_state), aux
