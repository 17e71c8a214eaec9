"""The optimizer that a section of the configuration names, and one step of it; for clients and the server."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import is_on
from fedjax_ssl.ops.trees import select, without

TRUST = 0.001  # of 'lars': the length of a step by the length of the weights, at a learning rate of 1
Params = Any
BatchStats = Any


class Model(NamedTuple):
    """A model's parameters and normalisation statistics, which are trained, sent, averaged and tested."""

    params: Params  # a dict by part ('backbone', 'classifier', a head's name)
    batch_stats: BatchStats  # statistics of the normalisation layers; an empty dict without such statistics

    def with_parts(self, **parts: Any) -> "Model":
        """The model with these parts added or replaced."""
        return self._replace(params={**self.params, **parts})


class Learner(NamedTuple):
    """The carry of a training loop."""

    model: Model  # the whole model
    opt_state: Any  # the optimizer's state, of the trained parts only


def start(optimizer: optax.GradientTransformation, model: Model, parts: tuple[str, ...]) -> Learner:
    """A Learner that trains `parts` of a model's parameters, with a fresh optimizer."""
    return Learner(model, optimizer.init(select(model.params, parts)))


def step(
    loss_fn: Callable[[Model], Any], optimizer: optax.GradientTransformation, learner: Learner, parts: tuple[str, ...]
) -> tuple[Learner, Any]:
    """One update of the named parts by a loss, model -> (loss [], (batch_stats, aux)); the learner after it, and aux.

    All other parts have no gradient, momentum or weight decay. A head that a loss does not use must not decay: PyTorch,
    which the papers use, skips parameters without a gradient.
    """
    params, batch_stats = learner.model
    trained = select(params, parts)

    gradient = jax.grad(lambda own: loss_fn(Model({**params, **own}, batch_stats)), has_aux=True)
    gradients, (statistics, aux) = gradient(trained)
    updates, opt_state = optimizer.update(gradients, learner.opt_state, trained)
    model = Model({**params, **optax.apply_updates(trained, updates)}, statistics)
    return Learner(model, opt_state), aux


def make_optimizer(config, learning_rate, clip_norm: float | None = None) -> optax.GradientTransformation:
    """Gradient clipping, then weight decay added to the gradient, then the optimizer of a section of the configuration.

    'sgd' is PyTorch's SGD; 'adam' (Kingma and Ba, 2015) has no momentum field. 'lars' (You et al., 2017) is SimCLR's,
    which neither decays nor rescales biases and the scales of normalisation layers. A `clip_norm` replaces the
    section's; 0: no clipping. With `spare_classifier` the classifier is neither clipped nor decayed, which 'lars'
    refuses by a UserError. The learning rate may be traced; it is not part of the optimizer's state.
    """
    clip_norm = config.clip_norm if clip_norm is None else clip_norm
    clip = optax.clip_by_global_norm(clip_norm) if is_on(clip_norm) else optax.identity()
    # A 0 leaves its part out, so that its state takes neither memory nor time.
    decay = optax.add_decayed_weights(config.weight_decay) if is_on(config.weight_decay) else optax.identity()
    momentum = optax.trace(config.momentum, config.nesterov) if is_on(config.momentum) else optax.identity()
    name, spares = getattr(config, "optimizer", "sgd"), getattr(config, "spare_classifier", False)
    if spares:
        clip, decay = optax.masked(clip, _but_the_classifier), optax.masked(decay, _but_the_classifier)
    if name == "lars":
        if spares:
            raise UserError("optimizer='lars' decays by its own rule, so spare_classifier cannot be used with it")
        matrices = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
        how = {"trust_ratio_mask": matrices, "momentum": config.momentum, "nesterov": config.nesterov}
        return optax.chain(clip, optax.lars(learning_rate, config.weight_decay, matrices, TRUST, **how))
    if name == "adam":
        return optax.chain(clip, decay, optax.adam(learning_rate, nesterov=config.nesterov))
    return optax.chain(clip, decay, momentum, optax.scale(-learning_rate))


def _but_the_classifier(params: dict[str, Any]) -> dict[str, Any]:
    """Mask of the leaves outside of the classifier."""
    return {part: jax.tree.map(lambda _, own=part != "classifier": own, leaves) for part, leaves in params.items()}


def without_parts(optimizer: optax.GradientTransformation, parts: tuple[str, ...]) -> optax.GradientTransformation:
    """An optimizer that does not change these parts: no weight decay, no momentum from earlier steps.

    Its state for them, such as a persistent momentum, changes as in a step with these gradients.
    """

    def update(gradients, state, params):
        updates, state = optimizer.update(gradients, state, params)
        return {**updates, **{part: jax.tree.map(jnp.zeros_like, updates[part]) for part in parts}}, state

    return optax.GradientTransformation(optimizer.init, update)


def followed_by(
    optimizer: optax.GradientTransformation, follower: str, leaders: tuple[str, ...], decay: float
) -> optax.GradientTransformation:
    """Extends an optimizer to a part that is a moving average of other parts, without gradients.

    In each step follower = decay * follower + (1 - decay) * leaders, with the leaders before the step. The optimizer of
    all other parts does not see the follower, which has an entry for each leader.
    """

    def update(gradients, state, params):
        updates, state = optimizer.update(without(gradients, follower), state, without(params, follower))
        towards = jax.tree.map(lambda own, new: (1 - decay) * (new - own), params[follower], select(params, leaders))
        return {**updates, follower: towards}, state

    return optax.GradientTransformation(lambda params: optimizer.init(without(params, follower)), update)


def never_cleared(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer that in step i uses the sum of the gradients of steps 1 to i, as if they were never zeroed."""
    return optax.chain(optax.trace(1.0), optimizer)
