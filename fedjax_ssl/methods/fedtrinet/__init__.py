"""FedTriNet: A Pseudo Labeling Method with Three Players for Federated Semi-Supervised Learning.

Che et al., IEEE Big Data 2021 (arXiv 2109.05612), following its public code with the dynamic threshold, as the
paper's equations were not available. Every client has a few labels. What differs from FedAvg:
  1. in the first rounds clients train on their labels only. Then m is measured, the mean over a reference set of the
     global model's largest probability; it determines the threshold of each later round r;
  2. from then on a client splices a network from the averaged head part (the backbone's first block, see `head_part`)
     and the rest of its own last model, and tunes it on its labels with the head part frozen;
  3. three players vote: the client's last model, the spliced model and the global model. If the sum of their
     probabilities reaches the threshold, an image gets its label permanently;
  4. training continues from the spliced network, on labels and accepted images. Once a client has had a round with ten
     acceptances, each step also has a batch of accepted images with a growing weight.

The public code tunes on the TRUE labels of accepted images, so the paper's figures cannot be reproduced:
docs/methods/fedtrinet.md.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import Section, real, whole, word
from fedjax_ssl.client import (
    At,
    Batches,
    Deck,
    Examples,
    Loss,
    Plan,
    global_model,
    labelled_plan,
    local_training,
    loss_on_labels,
    own_optimizers,
    train_views,
    trained_models,
)
from fedjax_ssl.client.steps import MakeOptimizer
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import (
    CLASSIFIER,
    Broadcast,
    Cohort,
    Label,
    Labels,
    Method,
    Metrics,
    Phase,
    Previous,
    Problem,
    Report,
    State,
)
from fedjax_ssl.methods.entry import Entry, Variants, labels_alone
from fedjax_ssl.methods.fedtrinet.client import accept, freezing, head_part, mean_confidence, no_labels, splice, vote
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.ops.losses import cross_entropy
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import repeated, where_rows, zeros_unless

FIELDS = {"data.labels": "clients", "aggregation.weights": "uniform"}
VARIANTS: Variants = {
    "paper": {  # the setting of its code, except its network
        "num_rounds": 100,
        "num_clients": 10,
        "clients_per_round": 5,
        "data.labelled_share": 0.01,
        "data.partition": "iid",
        "model.classifier_init": "torch_linear",
        "client.batch_size": 50,
        "client.learning_rate": 0.01,
        "client.momentum": 0.5,
        "client.weight_decay": 0.0,
        "client.clip_norm": 0.0,
    },
    "one_player": {"fedtrinet.players": "one", "fedtrinet.factor": 1.1},  # the code's FedAvg with pseudo-labels
    "unprotected": {"fedtrinet.protected_from": 1_000_000},
}
PLAYERS = {"one": 1, "three": 3}
CONFIDENCE = "confidence"  # the server's entry of m
LOCAL, ACCEPTED = "local_model", "accepted"  # entries of a client's memory
TUNING = "tuning_opt_state"  # a client's entry of the optimizer that tunes the spliced network
ACCEPTED_WEIGHT = 0.15  # the full weight of the loss on batches of accepted images, as in the code


def defaults() -> Section:
    section = Section()
    section.warm_up_rounds = whole(40, least=0)  # rounds with labels only, before round r = 0
    # m is measured on the clients' unlabelled images; 'test': on the test images, as in the code. Labels then depend on
    # the images that measure the accuracy.
    section.reference = word("unlabelled", "test")
    # The threshold of round 0 is factor times m; it is for the sum of the players' probabilities.
    section.factor = real(2.8, above=0)
    section.full_rounds = whole(10, least=0)  # rounds in which the threshold stays at this value
    section.decay_rounds = whole(50, least=1)  # afterwards it is (1 - r / decay_rounds) factor m
    section.protected_from = whole(35, least=0)  # from this round on it is factor m / 2
    # Who votes: 'three', the last local, the spliced and the global model; 'one', only the global model. Then training
    # continues from the global model, without splicing.
    section.players = word("three", *PLAYERS)
    section.head_blocks = whole(1, least=1)  # backbone blocks in the head part; 2 in the code's demo and for MNIST
    # Local epochs, counted from r = 0, in which the weight of the loss on batches of accepted images is 0.
    section.ramp_from = whole(50, least=0)
    section.ramp_epochs = whole(100, least=1)  # further epochs until the full weight
    return section


class Extra(NamedTuple):
    """What the server sends besides the global model."""

    round: jax.Array  # int32 [], r, below 0 while clients train on labels only
    threshold: jax.Array  # float32 [], for the sum of the players' probabilities


def fedtrinet(problem: Problem) -> Method:
    """The code's rounds as a Method."""
    options = problem.config.fedtrinet
    head = head_part(problem.network, options.head_blocks)
    splices = options.players != "one"
    optimizer = freezing(head, problem.optimizer)
    if splices and not head:
        raise UserError(
            "fedtrinet takes the head part of the global model's backbone, which has no parameter; take another one, "
            "or set fedtrinet.players='one'"
        )

    def own(data: FederatedData, model: Model) -> dict[str, Any]:
        memory = {ACCEPTED: no_labels(data)}
        if splices:
            memory |= own_optimizers(problem, data, model, CLASSIFIER, TUNING, optimizer)
            memory[LOCAL] = repeated(model, len(data.ids))
        return memory

    phases = (tuning(problem, head, optimizer), training(problem)) if splices else (training(problem),)
    confidence = lambda data, model: {CONFIDENCE: jnp.float32(0.0)}  # noqa: E731
    frame = alternating(problem, phases, own, server=confidence, label=labels_of_players(problem, head))

    def server_before(state: State, data: FederatedData, key: jax.Array) -> tuple[State, Metrics]:
        """Measures m when the rounds on labels only are over."""
        images, counted = data.test_inputs, jnp.ones(len(data.test_inputs), bool)
        if options.reference == "unlabelled":
            instead = "fedtrinet.reference='test', by which labels depend on the test images"
            owned = data.at_clients("fedtrinet.reference='unlabelled'", instead)
            images, counted = data.inputs, owned & (data.visible_labels < 0)
        now = jax.lax.cond(
            state.round == options.warm_up_rounds,
            lambda: mean_confidence(problem.network, state.model, images, counted, problem.config.eval_batch_size),
            lambda: state.server[CONFIDENCE],
        )
        return state._replace(server={**state.server, CONFIDENCE: now}), {"mean_confidence": now}

    def broadcast(state: State, data: FederatedData, key: jax.Array) -> Broadcast:
        r = state.round - options.warm_up_rounds
        return global_model(problem, state, Extra(r, threshold_at(options, r, state.server[CONFIDENCE])))

    return frame._replace(server_before=server_before, broadcast=broadcast)


def threshold_at(options: ConfigDict, r: jax.Array, confidence: jax.Array) -> jax.Array:
    """The threshold of round r, int32 []; before r = 0 it is larger than any sum of probabilities.

    `confidence` is m, float32 [].
    """
    full = options.factor * confidence
    threshold = jnp.where(r < options.full_rounds, full, jnp.maximum(1 - r / options.decay_rounds, 0.0) * full)
    threshold = jnp.where(r < options.protected_from, threshold, full / 2)
    return jnp.where(r < 0, PLAYERS[options.players] + 1.0, threshold)


def tuning(problem: Problem, head: tuple[str, ...], optimizer: MakeOptimizer) -> Phase:
    """Local epochs of the spliced network on the labels."""
    on_labels, sizes = labelled_plan(problem), {"labelled": problem.config.client.batch_size}

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        planned = on_labels(received, data, cohort, previous)
        return planned._replace(num_steps=jnp.where(received.extra.round >= 0, planned.num_steps, 0))

    return local_training(
        problem,
        plan,
        loss_on_labels(problem, "tuning_loss"),
        sizes,
        begin=lambda received, own: splice(head, received.model, own[LOCAL]),
        optimizer=optimizer,
        memory=TUNING,
    )


class Voted(NamedTuple):
    """What the vote gives to a client's training."""

    start: Model  # the model to start from, w_s
    labels: jax.Array  # int32 [n_max], visible and accepted labels
    accepted: jax.Array  # bool [n_max], the images with an accepted label
    apart: jax.Array  # bool [], whether each step also has a batch of accepted images


def labels_of_players(problem: Problem, head: tuple[str, ...]) -> Label:
    """The vote of the three players. `Labels.more` is a `Voted`."""
    options = problem.config.fedtrinet

    def label(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Labels:
        examples, old, w = Examples.of(data, cohort), cohort.own[ACCEPTED], received.model
        voting = received.extra.round >= 0
        if options.players == "one":
            w_s, players = repeated(w, len(old.rounds)), ()
        else:
            # A client without labels to tune on takes the spliced network as it is.
            w_m = cohort.own[LOCAL]
            spliced = jax.vmap(lambda local: splice(head, w, local))(w_m)
            w_s = where_rows(previous.took_part | ~voting, trained_models(received, previous), spliced)
            players = w_s, w_m

        votes = zeros_unless(voting, lambda: vote(problem, w, players, data.inputs, examples))
        accepted, chosen = accept(old, votes, received.extra.threshold, examples.unlabelled)

        has_one = accepted.labels >= 0
        labels = jnp.where(has_one, accepted.labels, jnp.where(voting, chosen, -1))
        visible = jnp.where(examples.labelled, examples.labels, accepted.labels)
        more = Voted(w_s, visible, has_one, accepted.rounds > 0)
        return Labels(Report(labels, examples.labelled | has_one), {ACCEPTED: accepted}, more=more)

    return label


def training(problem: Problem) -> Phase:
    """Local epochs on labels and accepted images; the batch `labelled` has both, and `accepted` only the latter."""
    options, config, network = problem.config.fedtrinet, problem.config.client, problem.network

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples, voted = Examples.of(data, cohort), cohort.labels.more
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(examples.keys)
        deck = Deck.shuffled(examples, examples.labelled | voted.accepted, examples.keys, config.epochs)
        decks = {"labelled": deck, "accepted": Deck.shuffled(examples, voted.accepted, keys, config.epochs)}
        return Plan(decks, deck.num_steps(config.batch_size), start=voted.start)

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        key, accepted_key = jax.random.split(at.key)
        known, more, voted = batch.labelled, batch.accepted, at.labels.more
        mask = more.mask & voted.apart
        views = (([problem.weak(key, known.inputs)], known.mask), ([problem.weak(accepted_key, more.inputs)], mask))
        epoch = known.epoch + config.epochs * at.received.extra.round  # s
        weight = ACCEPTED_WEIGHT * jnp.clip((epoch - options.ramp_from) / options.ramp_epochs, 0.0, 1.0)

        (of_batch, of_accepted), after = train_views(network, model, list(views))
        both_loss = cross_entropy(of_batch.logits, voted.labels[known.positions], known.mask)
        accepted_loss = cross_entropy(of_accepted.logits, voted.labels[more.positions], mask)
        value = jnp.where(voted.apart, 0.5 * (both_loss + weight * accepted_loss), both_loss)
        metrics = {"client_loss": value, "accepted_loss": accepted_loss, "accepted": at.decks["accepted"].size}
        return Loss(value, after.batch_stats, metrics)

    after = None if options.players == "one" else lambda own, model: {LOCAL: model}
    return local_training(problem, plan, loss, dict.fromkeys(("labelled", "accepted"), config.batch_size), after=after)


ENTRY = Entry(
    fedtrinet,
    title="FedTriNet",
    paper="https://arxiv.org/abs/2109.05612",
    settings=("clients", "some_clients", "profile"),
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=("debias",),
    advice=lambda config: labels_alone(config, "fedtrinet.warm_up_rounds"),
    tiny={"fedtrinet.warm_up_rounds": 0, "fedtrinet.factor": 1.5, "fedtrinet.ramp_from": 0},
    not_with_flower="its stage server_before reads clients' images or labels at the server",
)
