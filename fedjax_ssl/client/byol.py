"""BYOL at each client: an online network learns to predict a target network's projection of another view.

Grill et al., "Bootstrap Your Own Latent", NeurIPS 2020 (arXiv 2006.07733). The online network has a backbone, projector
and predictor. The target network has a backbone and projector; it is a moving average of the online network and never
leaves its client.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.client.deck import Deck, Examples, of_whole_batches
from fedjax_ssl.client.steps import At, Batches, Loss, Plan, local_training
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import Broadcast, Cohort, Finished, Metrics, Phase, Previous, Problem
from fedjax_ssl.ops.losses import negative_cosine
from fedjax_ssl.ops.sgd import Model, Params
from fedjax_ssl.ops.trees import WITHOUT_PARAMETERS, add_up, moving_average, norm, repeated, select, where

PROJECTOR, PREDICTOR = "projector", "predictor"
ENCODER = ("backbone", PROJECTOR)
ONLINE = (*ENCODER, PREDICTOR)
DECAY = 0.99  # of the target in each step, as in FedU and FedEMA
TARGET, LAST_ROUND = "target", "last_round"  # a client's memory: the target's parameters; int32, -1: never trained


class OnlineRule(NamedTuple):
    """How a client's online model depends on the global model and on the client's own model of earlier rounds."""

    # (received, own) -> the online model with which a client begins, if it has trained before; the first time it
    # begins with the received model.
    begin: Callable[[Broadcast, dict[str, Any]], Model]
    # (received, own, before, after) -> (entries of the client's memory, metrics). `before` and `after` are the models
    # before and after training; in `own` the steps have changed only the target.
    leave: Callable[[Broadcast, dict[str, Any], Model, Model], tuple[dict[str, Any], Metrics]]
    # (received, own) -> bool [], whether the client counts as training for the first time.
    is_new: Callable[[Broadcast, dict[str, Any]], jax.Array] = lambda received, own: own[LAST_ROUND] < 0


def own_targets(data: FederatedData, model: Model) -> dict[str, Any]:
    """The entries of `State.clients` that `byol_phase` reads, leaves [K, ...]."""
    memory = {TARGET: select(model.params, ENCODER), LAST_ROUND: jnp.int32(-1)}
    return repeated(memory, len(data.ids))


def byol_phase(
    problem: Problem, rule: OnlineRule, *, new_target: str = "kept", alias_first_target: bool = False
) -> Phase:
    """Makes the phase of `client.epochs` passes over all of a client's images, in whole batches.

    The loss is L = l(1, 2) + l(2, 1) with l(a, b) = mean_i 2 - 2 cos(q(z_i^a), z'_i^b); z and z' are the online and the
    target projection of a view, q is the predictor. After each step target = 0.99 target + 0.01 online encoder. Both
    networks normalise with batch statistics. Metrics are `byol_loss` and those of the rule. The broadcast's `extra` is
    the number of the round.

    A client begins with the target that it has 'kept' or with the 'received' encoder (`new_target`); the first time it
    is always the latter. With `alias_first_target` the target of a client that trains for the first time is a copy of
    the online encoder after every step.
    """
    config, network = problem.config.client, problem.network
    first_view, second_view = problem.views

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples = Examples.of(data, cohort)
        deck = Deck.shuffled(examples, examples.present, examples.keys, config.epochs)
        deck = of_whole_batches(deck, config.batch_size)
        return Plan({"unlabelled": deck}, deck.num_steps(config.batch_size))

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, mask, (first_key, second_key) = batch.unlabelled.inputs, batch.unlabelled.mask, jax.random.split(at.key)
        views = first_view(first_key, images), second_view(second_key, images)
        target = at.received.model.with_parts(**at.own[TARGET])
        (first, second), _ = network.train(target, views, mask)
        targets = second.heads[PROJECTOR], first.heads[PROJECTOR]  # the projections of the other view

        outputs, batch_stats = network.train(model, views, mask)
        predicted = [each.heads[PREDICTOR] for each in outputs]
        value = add_up(2 + 2 * negative_cosine(one, other, mask) for one, other in zip(predicted, targets))
        return Loss(value, batch_stats, {"byol_loss": value})

    def after(own: Mapping[str, Any], model: Model) -> dict[str, Any]:
        share = jnp.where(own[LAST_ROUND] < 0, 0.0, DECAY) if alias_first_target else DECAY
        return {TARGET: moving_average(own[TARGET], select(model.params, ENCODER), share)}

    def begin(received: Broadcast, own) -> Model:
        return where(rule.is_new(received, own), received.model, rule.begin(received, own))

    sizes = {"unlabelled": config.batch_size}
    phase = local_training(problem, plan, loss, sizes, parts=ONLINE, begin=begin, after=after)

    def start(received: Broadcast, data: FederatedData, work, own):
        target = select(received.model.params, ENCODER)
        if new_target == "kept":
            target = where(rule.is_new(received, own), target, own[TARGET])
        return phase.start(received, data, work, {**own, TARGET: target})

    def finish(received: Broadcast, work, carry, num_steps) -> Finished:
        finished = phase.finish(received, work, carry, num_steps)
        before = begin(received, carry.memory)  # steps change the target only
        left, metrics = rule.leave(received, carry.memory, before, carry.learner.model)
        own = {**finished.own, LAST_ROUND: received.extra, **left}
        return finished._replace(own=own, metrics={**finished.metrics, **metrics})

    return phase._replace(start=start, finish=finish)


def divergence(one: Params, other: Params) -> jax.Array:
    """Distance of two backbones: the mean of |W - W'| over convolution kernels, except those of shortcuts: float32 [].

    Without convolutions it is the mean over all leaves. Raises a UserError if the backbone has no parameters.
    """
    leaves, _ = jax.tree.flatten_with_path(jax.tree.map(jnp.subtract, one, other))
    if not leaves:
        raise UserError(WITHOUT_PARAMETERS)
    convolutions = [leaf for path, leaf in leaves if leaf.ndim == 4 and "shortcut" not in jax.tree_util.keystr(path)]
    lengths = [norm(leaf) for leaf in convolutions or [leaf for _, leaf in leaves]]
    return add_up(lengths) / len(lengths)
