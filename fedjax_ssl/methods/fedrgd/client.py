"""A user's training at a place of a group; it continues the place's model."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client import At, Batches, Deck, Examples, Loss, Plan, local_training, qualify, threshold_of
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Broadcast, Cohort, Jobs, Phase, Previous, Problem
from fedjax_ssl.engine.interface import completed
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model


class Place(NamedTuple):
    """The message to one user."""

    model: Model  # the trained parts of its group's mean
    # The entries of a client's memory that belong to the place instead of the user: the optimizer; {} if groups are
    # fixed or no optimizer is persistent.
    memory: dict[str, Any]


def at_place(phase: Phase) -> Phase:
    """A phase of `local_training` that starts from a `Place`; the place's memory returns to the server with the upload.

    `prepare`, which runs once for the whole cohort, sees the broadcast's model.
    """

    def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
        jobs = phase.prepare(received, data, cohort, previous)
        return jobs._replace(work=(jobs.work, cohort.personal))

    def seen(received: Broadcast, place: Place):
        return received._replace(model=completed(received.model, place.model))

    def start(received: Broadcast, data: FederatedData, work, own):
        return phase.start(seen(received, work[1]), data, work[0], {**own, **work[1].memory})

    def step(received: Broadcast, data: FederatedData, work, carry, index: jax.Array, key: jax.Array):
        return phase.step(seen(received, work[1]), data, work[0], carry, index, key)

    def finish(received: Broadcast, work, carry, num_steps):
        finished, of_place = phase.finish(seen(received, work[1]), work[0], carry, num_steps), work[1].memory
        metadata = {name: value for name, value in finished.own.items() if name in of_place}
        own = {name: value for name, value in finished.own.items() if name not in of_place}
        return finished._replace(upload=finished.upload._replace(metadata=metadata), own=own)

    return Phase(prepare, start, step, finish)


def on_all_images(problem: Problem) -> Phase:
    """T steps of a user: FixMatch with labels of its current model, or self-training."""
    network, config, options = problem.network, problem.config.client, problem.config.fedrgd
    self_training = options.users == "self_training"

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        del received, previous
        examples = Examples.of(data, cohort)
        deck = Deck.shuffled(examples, examples.present, examples.keys, options.steps)
        deck = deck.of_whole_batches(config.batch_size)
        return Plan({"unlabelled": deck}, jnp.where(deck.size > 0, options.steps, 0))

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        weak_key, strong_key = jax.random.split(at.key)
        images, mask = batch.unlabelled.inputs, batch.unlabelled.mask
        weak = problem.weak(weak_key, images)
        views = (weak,) if self_training else (weak, problem.strong(strong_key, images))

        outputs, batch_stats = network.train(model, views, mask)
        guess = network.predict(model, weak).logits if self_training else outputs[0].logits
        guess = jax.lax.stop_gradient(jax.nn.softmax(guess))
        labels, confident = qualify(guess, threshold_of(problem), strictly=False)
        value = cross_entropy(outputs[-1].logits, labels, mask, confident)
        count = jnp.maximum(jnp.sum(mask), 1)
        metrics = {"client_loss": value, "confident_share": jnp.sum(confident & mask) / count}
        return Loss(value, batch_stats, metrics)

    return local_training(problem, plan, loss, {"unlabelled": config.batch_size})
