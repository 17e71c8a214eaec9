"""The two phases of a client with `config.trainer`: training on labels, then on pseudo-labels from weak views."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjax_ssl.client.acr import acr, loss_of_both
from fedjax_ssl.client.by_role import labelled_phase, unlabelled_phase
from fedjax_ssl.client.confidence import MEMORY, make_confidence, states_at_start
from fedjax_ssl.client.deck import Batch, Deck, Examples
from fedjax_ssl.client.labels import debiased, prior_of, score_cohort, told_outputs
from fedjax_ssl.client.local_sgd import At, Hooks, Loss
from fedjax_ssl.client.trainers import Seen, Trainer, by_confidence, pseudo_label_loss
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import CLASSIFIER, Broadcast, Cohort, Jobs, Phase, Previous, Problem, Report
from fedjax_ssl.errors import UserError
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.learning.trees import repeated
from fedjax_ssl.models import Outputs

ACCEPTED = "accepted"  # metadata of every upload: the number of pseudo-labels behind it, see `trainer.accepted`


class SelfTrainingWork(NamedTuple):
    """What one client trains on."""

    deck: Deck  # its unlabelled examples
    # The received model's outputs for a weak view of each example, leaves [n_max, ...], without features; None: the
    # model in training makes the labels (`trainer.labels_from`).
    outputs: Outputs | None
    metadata: Mapping[str, jax.Array]  # further metadata of the upload, by name
    # float32 [C], the prior by which the classifier's probabilities are divided, see `debiased`; None: no division.
    prior: jax.Array | None = None


class Tell(Protocol):
    """Computes further metadata that each client of a cohort sends, by name, leaves [M, ...].

    Args:
        outputs: the received model's outputs for weak views of all the cohort's images, leaves [M, n_max, ...].
        examples: the cohort's examples.
        confident: bool [M, n_max], the images whose largest probability is at least `trainer.threshold`.
    """

    def __call__(self, outputs: Outputs, examples: Examples, confident: jax.Array, /) -> Mapping[str, jax.Array]: ...


def make_trainer(problem: Problem) -> Trainer:
    """The trainer that `trainer.name` names: ACR, which has its own rule, or the rule of `config.confidence`."""
    options = problem.config.trainer
    if options.name == "acr":
        return acr(options, problem.num_classes)
    return by_confidence(make_confidence(problem, options.threshold))


def trained_parts_of(problem: Problem) -> tuple[str, ...]:
    """The parts of the model that clients train and upload."""
    return (*CLASSIFIER, *make_trainer(problem).heads)


def needs_prior(problem: Problem) -> bool:
    """Whether the broadcast's `extra` must be the class shares of the labelled images, float32 [C]."""
    return make_trainer(problem).needs_prior


def own_trainer(problem: Problem, data: FederatedData) -> dict[str, Any]:
    """The entry of `State.clients` for the rule's state, every leaf [K, ...]."""
    num_clients, n_max = data.client_index.shape
    return {MEMORY: repeated(make_trainer(problem).init(n_max), num_clients)}


def states_of_round(problem: Problem, trainer: Trainer, examples: Examples) -> dict[str, Any]:
    """The entry of the clients' memory with the rule's states at the beginning of a round, leaves [M, ...]."""
    if trainer.next_round is not None:
        return {MEMORY: jax.vmap(trainer.next_round)(examples.own[MEMORY])}
    return {MEMORY: states_at_start(problem, trainer, examples)}


def self_training(problem: Problem, tell: Tell | None = None) -> tuple[Phase, Phase]:
    """Makes two phases: `client.epochs` passes over labelled images, then as many over unlabelled images.

    With `trainer.labels_from='received'` the received model, in evaluation mode, labels one weak view of each image
    before the first step. With 'local' the model in training labels a weak view in each step. Training is on strong
    views; a weak view joins the forward pass if it is needed for the label or for running statistics.

    Args:
        problem: the run's `Problem`.
        tell: computes metadata besides `ACCEPTED`; None: none.

    Returns:
        The labelled and the unlabelled phase.

    Raises:
        UserError: a field is set that a trainer with its own heads ignores.
    """
    options, config, network = problem.config.trainer, problem.config.client, problem.network
    trainer, parts = make_trainer(problem), trained_parts_of(problem)
    if trainer.heads and (config.logit_adjustment or config.share_offset or config.labelled_views != "weak"):
        raise UserError(
            f"trainer.name={options.name!r} has a loss of its own on labelled images; leave client.logit_adjustment "
            "and client.share_offset 0, and client.labelled_views 'weak'"
        )
    if trainer.heads and problem.config.confidence.debias != "none":
        raise UserError(f"trainer.name={options.name!r} adjusts its labels itself; leave confidence.debias 'none'")
    by_received = options.labels_from == "received"
    with_weak = not by_received or network.normalisation == "running"

    def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
        del previous
        examples = Examples.of(data, cohort)

        def scores(images) -> Outputs:
            outputs = network.predict(received.model, images)
            return outputs if tell is not None else outputs._replace(features=())

        seen = score_cohort(problem, scores, data.inputs, examples, num_views=1)
        seen = told_outputs(data, examples.rows, seen, trainer.heads)
        prior = prior_of(problem.config.confidence.debias, seen.logits, examples.unlabelled)
        logits = debiased(seen.logits, None if prior is None else prior[:, None])
        probabilities = jax.nn.softmax(logits)
        confident = examples.unlabelled & (jnp.max(probabilities, axis=-1) >= options.threshold)
        deck = Deck.shuffled(examples, examples.unlabelled, examples.keys, config.epochs)
        metadata = {} if tell is None else tell(seen._replace(logits=logits), examples, confident)
        labels = jnp.argmax(probabilities, axis=-1).astype(jnp.int32)
        return Jobs(
            deck.num_steps(config.batch_size),
            SelfTrainingWork(deck, seen._replace(features=()) if by_received else None, metadata, prior),
            Report(labels, confident | examples.labelled),
            states_of_round(problem, trainer, examples),
        )

    def loss(model: Model, batch: Batch, at: At) -> Loss:
        weak_key, *strong_keys = jax.random.split(at.key, 1 + trainer.strong_views)
        images = batch.inputs
        views = [problem.weak(weak_key, images)] if with_weak else []
        views += [problem.strong(strong_key, images) for strong_key in strong_keys]

        outputs, batch_stats = network.train(model, tuple(views), batch.mask)
        if by_received:
            labelling = jax.tree.map(lambda leaf: leaf[batch.positions], at.work.outputs)
        else:
            labelling = jax.lax.stop_gradient(outputs[0])
            labelling = told_outputs(at.data, batch.rows, labelling, trainer.heads)
        labelling = labelling._replace(logits=debiased(labelling.logits, at.work.prior))
        seen = Seen(labelling, batch, at.work.deck.size, at.received.extra if trainer.needs_prior else None)
        targets, state = trainer.targets(at.own[MEMORY], seen)
        value = pseudo_label_loss(trainer, targets, state, outputs[-trainer.strong_views :], batch.mask)
        weight = jnp.sum(targets[0].weights)
        confident = jnp.sum(batch.mask & (jnp.max(seen.probabilities, axis=-1) >= options.threshold))
        metrics = {"unlabelled_loss": value, "mean_weight": weight / jnp.maximum(jnp.sum(batch.mask), 1)}
        accepted = weight if options.accepted == "trained_on" else confident.astype(jnp.float32)
        return Loss(value, batch_stats, metrics, aux=state, sums={ACCEPTED: accepted})

    on_labels = loss_of_both(problem, "labelled_loss") if trainer.heads else None
    hooks = Hooks(
        remember=lambda own, model, state, step: {MEMORY: state},
        metadata=lambda work, model, totals: work.metadata,
    )
    return labelled_phase(problem, on_labels, parts), unlabelled_phase(problem, prepare, loss, parts, hooks)
