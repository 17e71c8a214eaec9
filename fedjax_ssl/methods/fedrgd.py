"""FedRGD: Improving Semi-supervised Federated Learning by Reducing the Gradient Diversity of Models.

Zhang et al., IEEE Big Data 2021 (arXiv 2008.11364). What differs from FedAvg+FixMatch:
  1. users (clients) and server train at the same time, and are averaged every T steps instead of epochs: a round is T
     steps;
  2. a round has a place for each of its users. Places form groups, and each group has a replica of the server. First
     each group averages its places and its replica; then the replicas average these group means. A place continues from
     its group's mean. Users are assigned to places at random in each round. Model and momentum belong to the place and
     are sent to its user;
  3. group normalisation instead of batch normalisation.

The tested model is the replicas' model; after averaging all replicas are equal. The paper's text was not available:
this follows its public code (jhcknzzm/SSFL-Benchmarking-Semi-supervised-Federated-Learning 9a18e89).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import Section, is_on, whole, word
from fedjax_ssl.client import (
    At,
    Batches,
    Deck,
    Examples,
    Loss,
    Plan,
    global_model,
    labels_for_report,
    local_training,
    qualify,
    threshold_of,
)
from fedjax_ssl.client.deck import of_whole_batches
from fedjax_ssl.client.steps import OPT_STATE
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import (
    CLASSIFIER,
    Broadcast,
    Cohort,
    Jobs,
    Method,
    Metrics,
    Phase,
    Previous,
    Problem,
    Received,
    Selection,
    State,
    WireBytes,
    no_op,
)
from fedjax_ssl.engine.interface import completed, trained_parts
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.ops.draws import draw_distinct
from fedjax_ssl.ops.losses import cross_entropy, mean_present
from fedjax_ssl.ops.schedule import learning_rate_at, warmed_up
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import moving_average, norm, repeated, row, tree_bytes, where_rows, without
from fedjax_ssl.server import CLASSIFICATION, group_members
from fedjax_ssl.server.aggregation import check_own_mean, client_weights, weighted_mean
from fedjax_ssl.server.training import ServerPlan, supervised_loss, train_on_server_labels

GROUPS = "groups"  # the entry of `State.server` with each group's mean
PLACES = "places"  # the entry of `State.server` with each place's optimizer
FIELDS = {
    "aggregation.weights": "uniform",
    "client.persistent": True,
    "server.persistent": True,
    "server.pretrain_epochs": 0,
    "server.augmentation": "weak",
    "model.normalisation": "group",
}
_SGD = {
    "batch_size": 64,
    "learning_rate": 0.03 * 11 * 64 / 128,  # 0.03 (K + 1) 64 / 128
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 1e-4,
    "clip_norm": 0.0,
}
VARIANTS: Variants = {
    "paper": {  # the setting of its experiments on CIFAR-10; an epoch is 1,024 steps, 64 rounds
        "num_rounds": 300 * 64,
        "num_clients": 10,
        "clients_per_round": 10,
        "data.server_labels": 1000,
        "data.partition": "main_class",
        "data.main_share": 0.4,
        "model.classifier_init": "torch_linear",
        "augment.flavour": "fixmatch",
        "augment.magnitude": 9,  # the code's 10 is never drawn
        "fedrgd.warm_up_rounds": 5 * 64,
        "fedrgd.decay_rounds": 200 * 64,
        **{f"{side}.{field}": value for side in ("client", "server") for field, value in _SGD.items()},
    },
    "no_groups": {"fedrgd.groups": 1},
    "self_training": {"fedrgd.users": "self_training"},
}


def defaults() -> Section:
    section = Section()
    section.steps = whole(16, least=1)  # T, steps of users and replicas between two averagings; epochs are ignored
    # G, each with a replica of the server; 1: one mean of the server and all users. The code has 2 for 10 and 20
    # users, 3 for 30, 5 for 47.
    section.groups = whole(2, least=1)
    # What a user minimises: 'fixmatch'; or 'self_training', cross-entropy of a weak view towards its own label from
    # evaluation mode.
    section.users = word("fixmatch", "self_training")
    # Rounds in which the learning rates of users and server rise in a line, and then follow FixMatch's cosine to a
    # fifth; 0: they follow the shared `schedule`.
    section.decay_rounds = whole(0, least=0)
    section.warm_up_rounds = whole(0, least=0)  # rounds of the linear rise among them
    return section


def check(problem: Problem) -> None:
    """Raises a UserError for more groups than clients, or for a field that needs a single mean of the uploads."""
    config, places = problem.config, problem.config.clients_per_round
    if config.fedrgd.groups > places:
        raise UserError(f"fedrgd.groups is {config.fedrgd.groups}, but clients_per_round = {places}")
    if config.aggregation.optimizer != "fedavg" or is_on(config.aggregation.clip_norm):
        raise UserError(
            "aggregation.optimizer and aggregation.clip_norm are for one model, but fedrgd has one of each group; "
            "leave them 'fedavg' and 0"
        )
    check_own_mean(problem)


def fedrgd(problem: Problem) -> Method:
    """Grouping-based averaging as a Method."""
    config, network, options = problem.config, problem.network, problem.config.fedrgd
    num_groups, places = options.groups, config.clients_per_round
    check(problem)
    # The report has the global model's labels; training makes its own labels in each step.
    label = labels_for_report(problem, threshold_of(problem))
    frame = alternating(problem, (at_place(on_all_images(problem)),), label=label)

    def init(data: FederatedData, key: jax.Array) -> State:
        state = frame.init(data, key)
        server, clients = dict(state.server), dict(state.clients)
        if CLASSIFICATION in server:  # each replica has an optimizer
            server[CLASSIFICATION] = repeated(server[CLASSIFICATION], num_groups)
        if OPT_STATE in clients:
            server[PLACES] = repeated(row(clients.pop(OPT_STATE), 0), places)
        server[GROUPS] = repeated(trained_parts(network, state.model, CLASSIFIER), num_groups)
        return state._replace(server=server, clients=clients)

    def group_of(place):
        """Neighbours are in one group."""
        return place * num_groups // places

    def select(state: State, data: FederatedData, key: jax.Array) -> Selection:
        """Draws the users; the selection's `group` is each user's place."""
        return Selection(draw_distinct(key, config.num_clients, places), jnp.arange(places))

    def broadcast(state: State, data: FederatedData, key: jax.Array):
        rate = rate_at(config, state.round, config.client.learning_rate)
        return global_model(problem, state)._replace(learning_rate=rate)

    def personal(state: State, data: FederatedData, clients: jax.Array, key: jax.Array) -> Place:
        memory = {OPT_STATE: row(state.server[PLACES], slice(len(clients)))} if PLACES in state.server else {}
        return Place(row(state.server[GROUPS], group_of(jnp.arange(len(clients)))), memory)

    def aggregate(state: State, data: FederatedData, received: Received, key: jax.Array) -> tuple[State, Metrics]:
        """Takes the replicas' T steps, then each group's mean, then the mean of these means."""
        rate = rate_at(config, state.round, config.server.learning_rate)
        replicas, state, metrics = train_replicas(problem, state, data, key, rate, num_groups, options.steps)
        replicas = trained_parts(network, replicas, CLASSIFIER)
        if PLACES in state.server:
            back = group_members(received, places)  # [M, R], by number of the place
            newest = back.shape[1] - 1 - jnp.argmax(back[:, ::-1], axis=1)  # late uploads are the first rows
            opt_states = row(received.uploads.metadata[OPT_STATE], newest)
            renewed = where_rows(jnp.any(back, axis=1), opt_states, state.server[PLACES])
            state = state._replace(server={**state.server, PLACES: renewed})
        received = received._replace(group=group_of(received.group))
        weights = client_weights(config.aggregation.weights, received)
        groups = replica_means(received.uploads.model, weights, group_members(received, num_groups), replicas)
        mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), groups)
        change = jax.tree.map(jnp.subtract, mean.params, trained_parts(network, state.model, CLASSIFIER).params)
        state = state._replace(model=completed(state.model, mean), server={**state.server, GROUPS: groups})
        return state, {**metrics, "update_norm": norm(change)}

    return frame._replace(
        init=init,
        select=select,
        broadcast=broadcast,
        personal=personal,
        aggregate=aggregate,
        server_after=no_op,
        # The broadcast's model is not sent: each client gets its place's model instead.
        wire_bytes=WireBytes(
            down=lambda sent, place: jnp.float32(tree_bytes((place, sent.learning_rate))),
            up=lambda upload: jnp.float32(tree_bytes(upload)),
        ),
    )


def rate_at(config: ConfigDict, number: jax.Array, rate: float) -> jax.Array:
    """The learning rate in a round, float32 []; `rate` is the initial one."""
    options = config.fedrgd
    if not options.decay_rounds:
        return learning_rate_at(config, rate, number)
    return warmed_up(rate, number, options.warm_up_rounds, options.decay_rounds, "seven_sixteenths")


# --- Users. -----------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The message to one user."""

    model: Model  # the trained parts of its group's mean
    # The entries of a client's memory that belong to the place instead of the user: the optimizer; {} if it is not
    # persistent.
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
        own = without(finished.own, *of_place)
        return finished._replace(upload=finished.upload._replace(metadata=metadata), own=own)

    return Phase(prepare, start, step, finish)


def on_all_images(problem: Problem) -> Phase:
    """T steps of a user: FixMatch with labels of its current model, or self-training."""
    network, config, options = problem.network, problem.config.client, problem.config.fedrgd
    self_training = options.users == "self_training"

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples = Examples.of(data, cohort)
        deck = Deck.shuffled(examples, examples.present, examples.keys, options.steps)
        deck = of_whole_batches(deck, config.batch_size)
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
        metrics = {"client_loss": value, "confident_share": mean_present(confident, mask)}
        return Loss(value, batch_stats, metrics)

    return local_training(problem, plan, loss, {"unlabelled": config.batch_size})


# --- The server's replicas. -------------------------------------------------------------------------------------------


def train_replicas(
    problem: Problem, state: State, data: FederatedData, key: jax.Array, rate: jax.Array, number: int, steps: int
) -> tuple[Model, State, Metrics]:
    """Trains G copies of the global model for some steps of cross-entropy, each in its own random order.

    Persistent optimizers are the entry `CLASSIFICATION` of `state.server`, leaves [G, ...]. Returns the models, leaves
    [G, ...]; the state with their optimizers; and the mean of their `server_loss`.
    """
    remembers, plan = CLASSIFICATION in state.server, ServerPlan(supervised_loss(problem, data), epochs=0, steps=steps)

    def train(replica):
        own_key, memory = replica
        state_of_own = state._replace(server=memory)
        trained, metrics = train_on_server_labels(problem, state_of_own, data, own_key, rate, plan)
        return trained.model, trained.server, metrics

    memory = {CLASSIFICATION: state.server[CLASSIFICATION]} if remembers else {}
    models, memory, metrics = jax.lax.map(train, (jax.random.split(key, number), memory))
    return models, state._replace(server={**state.server, **memory}), jax.tree.map(jnp.mean, metrics)


def replica_means(uploads: Model, weights: jax.Array, in_group: jax.Array, replicas: Model) -> Model:
    """The mean of each group's uploads and its replica, which has the average weight of the uploads: leaves [G, ...].

    Uploads have leaves [R, ...], and weights, float32 [R], 0 for one that does not count; `in_group` is bool [G, R];
    replicas have leaves [G, ...]. A group without an upload returns its replica.
    """

    def of_group(group):
        members, replica = group
        own = jnp.where(members, weights, 0.0)
        mean = weighted_mean(uploads, own, otherwise=replica)
        return moving_average(replica, mean, 1 / (jnp.sum(own > 0) + 1))

    return jax.lax.map(of_group, (in_group, replicas))


ENTRY = Entry(
    fedrgd,
    title="FedRGD",
    paper="https://arxiv.org/abs/2008.11364",
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=("threshold",),
    tiny={"confidence.threshold": 0.2, "fedrgd.steps": 3},
)
