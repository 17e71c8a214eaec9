"""Local training on unlabelled images by pseudo-labels: FixMatch, FlexMatch, FreeMatch and SoftMatch, batch by batch.

The strong view of an image is trained towards the class that a model gives its weak view. The trainers differ in how
much each image counts, by a state at the client that moves with every batch: it lasts for a round or for the whole run
(`trainer.counters`). Nothing of it travels. (`config.threshold` has rules that look at all of a client's images at
once.)
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.client.by_role import unlabelled_phase
from fedjax_ssl.client.deck import Batch, Deck, Examples
from fedjax_ssl.client.labels import score_cohort
from fedjax_ssl.client.local_sgd import Loss
from fedjax_ssl.engine.interface import Jobs, Phase, Problem, Report
from fedjax_ssl.learning.losses import cross_entropy

MEMORY = "trainer"  # the entry of the state in a client's memory
ACCEPTED = "accepted"  # what every upload tells: how many pseudo-labels it comes from, see `trainer.accepted`


class Trainer(NamedTuple):
    """A rule of how much each image of a batch counts.

    Attributes:
        start: n_max -> the state of a client that has seen nothing.
        weigh: (state, probabilities [B, C] of the weak views, batch, size) -> (weights float32 [B] from 0 to 1, the
            state after the batch); `size` is the number of the client's unlabelled images.
        further: (state, logits of the strong views [B, C], weights, mask) -> float32 [], a loss besides cross-entropy,
            by the state after the batch; None: there is none.
    """

    start: Callable[[int], Any]
    weigh: Callable[..., tuple[jax.Array, Any]]
    further: Callable[..., jax.Array] | None = None


class Work(NamedTuple):
    """What one client trains on.

    Attributes:
        deck: its unlabelled examples.
        probabilities: float32 [n_max, C], of the received model for a weak view of each; None: the model in training
            labels (`trainer.labels_from`).
        told: what the client tells besides, by name.
    """

    deck: Deck
    probabilities: jax.Array | None
    told: Mapping[str, jax.Array]


def fixmatch(options, num_classes: int) -> Trainer:
    """1[max p >= tau] (Sohn et al., NeurIPS 2020)."""
    del num_classes

    def weigh(state, probabilities, batch: Batch, size):
        del batch, size
        return (jnp.max(probabilities, axis=-1) >= options.threshold).astype(jnp.float32), state

    return Trainer(lambda n_max: (), weigh)


TRAINERS = {"fixmatch": fixmatch}


def own_trainer(problem: Problem, data) -> dict[str, Any]:
    """The trainer's entry of `State.clients`, every leaf [K, ...]."""
    num_clients, n_max = data.client_index.shape
    return {MEMORY: _fresh(problem, num_clients, n_max)}


def _fresh(problem: Problem, num_clients: int, n_max: int) -> Any:
    state = make_trainer(problem).start(n_max)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_clients, *jnp.shape(leaf))), state)


def make_trainer(problem: Problem) -> Trainer:
    """The trainer that `trainer.name` names."""
    options = problem.config.trainer
    return TRAINERS[options.name](options, problem.num_classes)


def trainer_phase(problem: Problem, tell: Callable | None = None) -> Phase:
    """A client's passes over its unlabelled images with `config.trainer`, behind `labelled_phase`.

    Args:
        problem: the run.
        tell: (Outputs of the received model for weak views of the cohort's images, leaves [M, n_max, ...]; examples;
            those that are confident, bool [M, n_max]) -> what each client tells besides `ACCEPTED`, by name, leaves
            [M, ...]. None: nothing.

    Returns:
        The Phase.
    """
    options, config, network = problem.config.trainer, problem.config.client, problem.network
    trainer = make_trainer(problem)
    by_received = options.labels_from == "received"
    # A pass of the weak view labels it, or moves running averages; else it would change nothing.
    with_weak = not by_received or network.normalisation == "running"

    def prepare(received, data, cohort, previous) -> Jobs:
        del previous
        examples = Examples.of(data, cohort)
        scored = score_cohort(
            problem, lambda images: network.predict(received.model, images), data.images, examples, num_views=1
        )
        probabilities = jax.nn.softmax(scored.logits)
        confident = examples.unlabelled & (jnp.max(probabilities, axis=-1) >= options.threshold)
        deck = Deck.shuffled(examples, examples.unlabelled, examples.keys, config.epochs)
        told = {} if tell is None else tell(scored, examples, confident)
        labels = jnp.argmax(probabilities, axis=-1).astype(jnp.int32)
        own = {}
        if options.counters == "per_round":
            own = {MEMORY: _fresh(problem, *examples.rows.shape)}
        return Jobs(
            deck.num_steps(config.batch_size),
            Work(deck, probabilities if by_received else None, told),
            Report(labels, confident | examples.labelled),
            own,
        )

    def loss(received, data, work: Work, batch: Batch, own, key):
        del received
        weak_key, strong_key = jax.random.split(key)
        images = data.images[batch.rows]
        views = (problem.weak(weak_key, images),) if with_weak else ()
        views += (problem.strong(strong_key, images),)

        def of(model) -> Loss:
            outputs, batch_stats = network.train(model, views, batch.mask)
            if by_received:
                probabilities = work.probabilities[batch.positions]
            else:
                probabilities = jax.nn.softmax(jax.lax.stop_gradient(outputs[0].logits))
            weights, state = trainer.weigh(own[MEMORY], probabilities, batch, work.deck.size)
            weights = jnp.where(batch.mask, weights, 0.0)
            logits = outputs[-1].logits
            value = cross_entropy(logits, jnp.argmax(probabilities, axis=-1), batch.mask, weights)
            if trainer.further is not None:
                value += trainer.further(state, logits, weights, batch.mask)
            confident = batch.mask & (jnp.max(probabilities, axis=-1) >= options.threshold)
            accepted = jnp.sum(weights if options.accepted == "trained_on" else confident)
            share = jnp.sum(weights) / jnp.maximum(jnp.sum(batch.mask), 1)
            metrics = {"unlabelled_loss": value, "mean_weight": share}
            return Loss(value, batch_stats, metrics, aux=state, sums={ACCEPTED: accepted})

        return of

    return unlabelled_phase(
        problem,
        prepare,
        loss,
        metrics=("unlabelled_loss", "mean_weight"),
        told=lambda work, model, totals: work.told,
        sums={ACCEPTED: ()},
        remember=lambda own, model, state, index: {MEMORY: state},
    )
