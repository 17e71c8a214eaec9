"""The two phases of a client whose trainer is `config.trainer`: on labels, then on pseudo-labels of weak views."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjax_ssl.client.acr import acr, loss_of_both
from fedjax_ssl.client.by_role import labelled_phase, unlabelled_phase
from fedjax_ssl.client.confidence import MEMORY, make_confidence
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

ACCEPTED = "accepted"  # what every upload tells: of how many pseudo-labels it comes, see `trainer.accepted`


class SelfTrainingWork(NamedTuple):
    """What one client trains on."""

    deck: Deck  # its unlabelled examples
    # Of the received model for a weak view of each, leaves [n_max, ...], without features; None: the model in training
    # labels (`trainer.labels_from`).
    outputs: Outputs | None
    metadata: Mapping[str, jax.Array]  # what the client tells besides, by name
    # float32 [C], by which the classifier's probabilities are divided, see `debiased`; None: by nothing.
    prior: jax.Array | None = None


class Tell(Protocol):
    """What each client of a cohort tells, by name, leaves [M, ...].

    Args:
        outputs: of the received model for weak views of all the cohort's images, leaves [M, n_max, ...].
        examples: of the cohort.
        confident: bool [M, n_max], those at or above `trainer.threshold`.
    """

    def __call__(self, outputs: Outputs, examples: Examples, confident: jax.Array, /) -> Mapping[str, jax.Array]: ...


def make_trainer(problem: Problem) -> Trainer:
    """The trainer that `trainer.name` names: by `config.confidence`, or ACR, whose rule is its own."""
    options = problem.config.trainer
    if options.name == "acr":
        return acr(options, problem.num_classes)
    return by_confidence(make_confidence(problem, options.threshold))


def trained_parts_of(problem: Problem) -> tuple[str, ...]:
    """The parts of the model that clients train and upload."""
    return (*CLASSIFIER, *make_trainer(problem).heads)


def needs_prior(problem: Problem) -> bool:
    """Whether the broadcast's `extra` must be the shares of classes among the labelled images, float32 [C]."""
    return make_trainer(problem).needs_prior


def own_trainer(problem: Problem, data: FederatedData) -> dict[str, Any]:
    """The entry of `State.clients` for the rule's state, every leaf [K, ...]."""
    num_clients, n_max = data.client_index.shape
    return {MEMORY: fresh_states(make_trainer(problem), num_clients, n_max)}


def fresh_states(trainer: Trainer, num_clients: int, n_max: int) -> Any:
    """The rule's states of clients that have seen nothing, every leaf [num_clients, ...]."""
    return repeated(trainer.start(n_max), num_clients)


def self_training(problem: Problem, tell: Tell | None = None) -> tuple[Phase, Phase]:
    """`client.epochs` passes over a client's labelled images, then as many over its unlabelled ones.

    With `trainer.labels_from` = 'received' all labels are made before the first step, by the received model in
    evaluation mode, from one weak view of each image; with 'local' in each step, by the model in training. The student
    sees a weak view too where that labels the image or moves running statistics, and strong views.

    Args:
        problem: the run.
        tell: what each client tells besides `ACCEPTED`; None: nothing.

    Returns:
        The labelled and the unlabelled phase.

    Raises:
        UserError: fields of the losses that a trainer with heads of its own does not read.
    """
    options, config, network = problem.config.trainer, problem.config.client, problem.network
    trainer, parts = make_trainer(problem), trained_parts_of(problem)
    if trainer.heads and (config.logit_adjustment or config.labelled_views != "weak"):
        raise UserError(
            f"trainer.name={options.name!r} has a loss of its own on labelled images; leave client.logit_adjustment 0 "
            "and client.labelled_views 'weak'"
        )
    if trainer.heads and problem.config.confidence.debias != "none":
        raise UserError(f"trainer.name={options.name!r} adjusts its labels itself; leave confidence.debias 'none'")
    by_received = options.labels_from == "received"
    with_weak = not by_received or network.normalisation == "running"

    def begun(states: Any, shape: tuple[int, ...]) -> Any:
        """The states of a cohort at the beginning of a round."""
        if trainer.next_round is not None:
            return jax.vmap(trainer.next_round)(states)
        return fresh_states(trainer, *shape) if problem.config.confidence.memory == "round" else states

    def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
        del previous
        examples = Examples.of(data, cohort)

        def scores(images) -> Outputs:
            outputs = network.predict(received.model, images)
            return outputs if tell is not None else outputs._replace(features=())

        seen = score_cohort(problem, scores, data.inputs, examples, num_views=1)
        seen = told_outputs(data, examples.rows, seen, trainer.heads)
        prior = prior_of(problem.config.confidence.debias, seen.logits, examples.unlabelled)
        probabilities = jax.nn.softmax(debiased(seen.logits, None if prior is None else prior[:, None]))
        confident = examples.unlabelled & (jnp.max(probabilities, axis=-1) >= options.threshold)
        deck = Deck.shuffled(examples, examples.unlabelled, examples.keys, config.epochs)
        metadata = {} if tell is None else tell(seen, examples, confident)
        labels = jnp.argmax(probabilities, axis=-1).astype(jnp.int32)
        return Jobs(
            deck.num_steps(config.batch_size),
            SelfTrainingWork(deck, seen._replace(features=()) if by_received else None, metadata, prior),
            Report(labels, confident | examples.labelled),
            {MEMORY: begun(cohort.own[MEMORY], examples.rows.shape)},
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
