"""FedLabel: Local or Global, Selective Knowledge Assimilation for Federated Learning with Limited Labels.

Cho, Joshi and Dimitriadis, ICCV 2023 (arXiv 2307.08809). Every client has a few labels. What differs from FedAvg:
  1. a client trains twice from the received model w: tau steps on its labelled images give w_L (eq. 1), then tau' steps
     on its unlabelled ones give w_U (eq. 10);
  2. an unlabelled image gets the label of the more confident of two experts, w and w_L (eq. 3 and 4);
  3. if the other expert agrees with the label, a divergence keeps w_U near that expert's prediction (eq. 6 and 7);
  4. both changes are sent in one upload, with the number r_k of images used, which is its weight.

The experts do not change in the second phase and see raw images. So all drawn images are labelled once a round, which
gives the same labels as in each step. docs/methods/fedlabel.md has our choices and the differences to the public code.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import Section, is_on, real, whole, word
from fedjax_ssl.client import (
    At,
    Batches,
    Deck,
    Examples,
    Loss,
    LossFunction,
    Plan,
    adjusted_cross_entropy,
    global_model,
    local_training,
    own_optimizers,
    threshold_of,
    trained_models,
)
from fedjax_ssl.client.on_labels import adjustment_of
from fedjax_ssl.client.steps import MakeOptimizer, Training
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import (
    CLASSIFIER,
    Augmentation,
    Broadcast,
    Cohort,
    Finished,
    Label,
    Labels,
    Method,
    Phase,
    Previous,
    Problem,
    Report,
    trained_parts,
)
from fedjax_ssl.methods.entry import Entry, Variants, labels_alone
from fedjax_ssl.methods.fedlabel.client import CONFIDENCES, EXPERTS, choose, drawn_deck, score_drawn
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.ops.losses import cross_entropy, mean_square_distances
from fedjax_ssl.ops.sgd import Model, never_cleared
from fedjax_ssl.ops.trees import moving_average, select
from fedjax_ssl.server import fedavg, half_told, weights_told

FIELDS = {"data.labels": "clients"}
VARIANTS: Variants = {
    "paper": {  # the setting of its experiments; the learning rate and the steps are those of its code for CIFAR-100
        "num_rounds": 2000,
        "data.labelled_share": 0.2,
        "data.partition": "dirichlet_classes",
        "model.classifier_init": "torch_linear",
        "augment.flavour": "fedlabel",
        "augment.num_ops": 1,  # (1, 10) behind eq. 5, and in the code
        "augment.magnitude": 10,
        "client.batch_size": 64,
        "client.learning_rate": 0.003,
        "client.momentum": 0.0,
        "client.weight_decay": 0.0,
        "client.clip_norm": 0.0,
    },
    "code": {"fedlabel.as_in_code": True, "fedlabel.unlabelled_from": 50, "augment.border": "zeros"},
    "ten_operations": {"augment.num_ops": 10, "augment.magnitude": 1},  # as in section 5.2, from a pool of 14
    "only_local": {"fedlabel.experts": "local"},  # Table 1
    "only_global": {"fedlabel.experts": "global"},
    "no_consistency": {"fedlabel.consistency_weight": 0.0},  # Figure 5
    "entropy": {"fedlabel.confidence": "entropy"},  # Figure 9
}
BETA = 0.3  # the threshold; a label counts if its probability is above it (eq. 4)
PAPER_RATE = 0.003  # the paper's largest learning rate, without momentum
UNLABELLED = "unlabelled_opt_state"  # a client's memory of the second phase's optimizer
PROXIMAL = 10.0  # the code's weight of the sum over tensors of mean((w_U - w)^2) in the second phase
ONLY_VIEWS = 2**31 - 3  # folds the key of the code's views
SUPERVISED, USED = "supervised", "used"  # w_L and r_k in an upload's metadata


def defaults() -> Section:
    section = Section()
    section.labelled_steps = whole(30, least=1)  # tau, SGD steps on labelled images
    section.unlabelled_steps = whole(10, least=1)  # tau', SGD steps on unlabelled images
    # h, an expert's confidence: the 'variance' of its probabilities (eq. 3), or 'entropy', 1 / (H + 1e-5).
    section.confidence = word("variance", *CONFIDENCES)
    # 'local' or 'global': only this expert labels, without consistency (Table 1).
    section.experts = word("both", *EXPERTS)
    section.consistency_weight = real(0.05, least=0)  # lambda_0 of eq. 7
    # The first round in which clients use unlabelled images; the code's is 50.
    section.unlabelled_from = whole(0, least=0)
    # The choices of the public code in the place of the paper's: docs/methods/fedlabel.md has the table.
    section.as_in_code = False
    # A bug of the code: gradients are never cleared, so step i uses the sum of those of steps 1 to i, like a momentum
    # of 1: ten steps go as far as 55.
    section.replica = False
    return section


def fedlabel(problem: Problem) -> Method:
    """Algorithm 1 as a Method."""
    options = problem.config.fedlabel
    if options.as_in_code and is_on(problem.config.aggregation.clip_norm):
        raise UserError(
            "aggregation.clip_norm is not for fedlabel.as_in_code, which sends two models: it clips only one"
        )
    size = problem.config.client.batch_size
    optimizer = (lambda rate: never_cleared(problem.optimizer(rate))) if options.replica else None

    def labelled_draws(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples = Examples.of(data, cohort)
        deck = drawn_deck(examples, examples.labelled, options.labelled_steps, size)
        return Plan({"labelled": deck}, deck.num_steps(size), adjustment_of(problem, examples))

    def loss_on_labels(model: Model, batch: Batches, at: At) -> Loss:
        known = batch.labelled
        images = view(problem, problem.weak, at.data, known.rows, at.key)
        outputs, batch_stats = problem.network.train(model, (images,), known.mask)
        value = adjusted_cross_entropy(outputs, known.labels, known.mask, at.work)
        return Loss(value, batch_stats, {"client_loss": value})

    supervised = local_training(problem, labelled_draws, loss_on_labels, {"labelled": size})  # tau steps of eq. 1
    own = lambda data, model: own_optimizers(problem, data, model, CLASSIFIER, UNLABELLED, optimizer)  # noqa: E731
    phases = supervised, unlabelled_phase(problem, optimizer)
    method = alternating(problem, phases, own=own, label=labels_of_experts(problem))
    most = (options.labelled_steps + options.unlabelled_steps) * problem.config.client.batch_size
    aggregation = fedavg(
        problem,
        weighted_by=weights_told(USED, lambda received: most),
        combine=half_told(SUPERVISED) if options.as_in_code else None,
    )
    return method._replace(
        aggregate=aggregation.aggregate,
        broadcast=lambda state, data, key: global_model(problem, state, extra=state.round),
    )


def labels_of_experts(problem: Problem) -> Label:
    """Eq. 3 and 4: the labels of the images that are drawn in this round. `Labels.more` is an `ExpertChoice`."""
    options = problem.config.fedlabel

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        examples, local = Examples.of(data, cohort), trained_models(received, previous)
        deck = unlabelled_draws(problem, examples)
        of_global, of_local, made = score_drawn(problem, received.model, local, data, examples, deck)
        choice = choose(of_global, of_local, options.confidence, options.experts)
        if options.as_in_code:  # the other expert is always w_L, chosen or not
            choice = choice._replace(other=jax.nn.log_softmax(of_local))
        kept = made & (choice.probability > threshold_of(problem, BETA))
        of_each = {"global": jnp.argmax(of_global, -1), "local": jnp.argmax(of_local, -1)}
        report = Report(choice.labels, kept | examples.labelled, jax.tree.map(jnp.int32, of_each), made=made)
        return Labels(report, more=choice)

    return label


def unlabelled_draws(problem: Problem, examples: Examples) -> Deck:
    """The unlabelled images of a round's steps."""
    steps, size = problem.config.fedlabel.unlabelled_steps, problem.config.client.batch_size
    return drawn_deck(examples, examples.unlabelled, steps, size)


class FirstPhase(NamedTuple):
    """What a client brings from the phase on its labels."""

    supervised: Model  # w_L
    labelled: jax.Array  # float32 [], number of labelled images in all its steps


def unlabelled_phase(problem: Problem, optimizer: MakeOptimizer | None) -> Phase:
    """tau' steps of eq. 8 on unlabelled images; the upload has both phases' changes, or both models, and r_k."""
    options, size = problem.config.fedlabel, problem.config.client.batch_size

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples = Examples.of(data, cohort)
        deck = unlabelled_draws(problem, examples)
        labelled = options.labelled_steps * jnp.minimum(jnp.sum(examples.labelled, axis=1), size)
        work = FirstPhase(trained_models(received, previous), labelled.astype(jnp.float32))
        num_steps = jnp.where(received.extra >= options.unlabelled_from, deck.num_steps(size), 0)
        return Plan({"unlabelled": deck}, num_steps, work, takes_part=previous.took_part | (num_steps > 0))

    sizes, loss = {"unlabelled": size}, loss_on_kept(problem)
    phase = local_training(problem, plan, loss, sizes, optimizer=optimizer, memory=UNLABELLED)

    def finish(received: Broadcast, work: Plan, carry: Training, num_steps) -> Finished:
        first: FirstPhase = work.work
        learner, kept = carry.learner, carry.totals["kept"]
        if options.as_in_code:
            supervised = trained_parts(problem.network, first.supervised, CLASSIFIER)
            metadata = {USED: jnp.maximum(kept, 1.0), SUPERVISED: supervised}
        else:
            learner = learner._replace(model=both_changes(received, first, learner.model, kept))
            metadata = {USED: first.labelled + kept}
        finished = phase.finish(received, work, carry._replace(learner=learner), num_steps)
        return finished._replace(upload=finished.upload._replace(metadata=metadata))

    return phase._replace(finish=finish)


def loss_on_kept(problem: Problem) -> LossFunction:
    """Eq. 8, the loss of the second phase."""
    options, network = problem.config.fedlabel, problem.network

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, in_batch = batch.unlabelled.inputs, batch.unlabelled.mask
        strong = view(problem, problem.strong, at.data, batch.unlabelled.rows, at.key)
        choice = jax.tree.map(lambda leaf: leaf[batch.unlabelled.positions], at.labels.more)
        kept = in_batch & (choice.probability > threshold_of(problem, BETA))  # eq. 4
        agrees = kept & choice.agrees
        mask = kept if options.as_in_code else in_batch

        # Running statistics take the strong view first, as in the code.
        (of_strong, of_images), batch_stats = network.train(model, (strong, images), mask)
        trained = jax.nn.log_softmax(of_images.logits)
        first, second = (choice.other, trained) if options.as_in_code else (trained, choice.other)
        weights = jnp.where(agrees, options.consistency_weight * choice.ratio, 0.0)  # eq. 7
        number = jnp.maximum(jnp.sum(agrees if options.as_in_code else mask), 1)
        consistency = jnp.sum(weights * optax.losses.kl_divergence_with_log_targets(second, first)) / number  # eq. 6
        value = cross_entropy(of_strong.logits, choice.labels, mask, kept) + consistency  # eq. 8
        if options.as_in_code:
            both = (select(each.params, CLASSIFIER) for each in (model, at.received.model))
            value += PROXIMAL * mean_square_distances(*both)
        metrics = {"unlabelled_loss": value, "consistency_loss": consistency, "kept": jnp.sum(kept)}
        # If no image is accepted, weight decay and momentum would still move the model.
        return Loss(value, batch_stats, metrics, counts=jnp.any(kept))

    return loss


def both_changes(received: Broadcast, first: FirstPhase, model: Model, kept: jax.Array) -> Model:
    """w + (w_L - w) + (w_U - w); statistics are the mean over the phases that took a step."""
    params = jax.tree.map(
        lambda u, local, w: u + (local - w), model.params, first.supervised.params, received.model.params
    )
    share = jnp.where(kept > 0, jnp.where(first.labelled > 0, 0.5, 1.0), 0.0)
    return Model(params, moving_average(model.batch_stats, first.supervised.batch_stats, share))


def view(problem: Problem, augment: Augmentation, data: FederatedData, rows: jax.Array, key: jax.Array) -> jax.Array:
    """A view of some rows, drawn by the step's key; in the code's, the only view of each image."""
    images = data.inputs[rows]
    if not problem.config.fedlabel.as_in_code:
        return augment(key, images)
    factors_key, view_key = jax.random.split(jax.random.fold_in(jax.random.key(data.seed), ONLY_VIEWS))
    factors = jax.random.bits(factors_key, images.shape[1:])

    def only_view(image: jax.Array) -> jax.Array:
        # Its key is a hash of the image, because an image's row in a table depends on where the data are stored.
        bits = jax.lax.bitcast_convert_type(image.astype(jnp.float32), jnp.uint32)
        number = jnp.sum(factors * (bits ^ bits >> 16))  # the lower bits of small whole numbers are 0
        return augment(jax.random.fold_in(view_key, number), image[None])[0]

    return jax.vmap(only_view)(images)


def advice(config) -> str:
    """Warns of rounds on labels alone; else that the sum may overshoot.

    That is at ten times the paper's rate or more, if the server's step is not smaller.
    """
    if warning := labels_alone(config, "fedlabel.unlabelled_from"):
        return warning
    momentum = config.client.momentum if config.client.optimizer == "sgd" else 0.0
    rate = config.client.learning_rate / (1 - momentum)
    server = {"fedavg": 1.0, "fedavgm": config.aggregation.learning_rate / (1 - config.aggregation.momentum)}
    times = server.get(config.aggregation.optimizer, 0.0)  # the steps of other optimizers do not grow with the changes
    if config.fedlabel.as_in_code or times <= 0.5 or rate < 10 * PAPER_RATE:
        return ""
    return (
        f"fedlabel adds two changes of clients that step at {rate:.3g} (client.learning_rate, with sgd over "
        f"1 - momentum; its paper's is {PAPER_RATE}): twice FedAvg's step may overshoot; aggregation.optimizer=fedavgm "
        "with aggregation.learning_rate=0.5 and aggregation.momentum=0 halves it"
    )


ENTRY = Entry(
    fedlabel,
    title="FedLabel",
    paper="https://arxiv.org/abs/2307.08809",
    settings=("clients", "some_clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=("threshold", "debias"),
    advice=advice,
    tiny={"fedlabel.labelled_steps": 3, "fedlabel.unlabelled_steps": 2, "confidence.threshold": 0.1},
)
