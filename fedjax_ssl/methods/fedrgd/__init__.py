"""FedRGD: Improving Semi-supervised Federated Learning by Reducing the Gradient Diversity of Models.

Zhang et al., IEEE Big Data 2021 (arXiv 2008.11364). What differs from FedAvg+FixMatch:
  1. users (clients) and server train at the same time, and are averaged every T steps instead of epochs: a round is T
     steps;
  2. grouping-based averaging: a round has a place for each of its users. Places form groups, and each group has a
     replica of the server. First each group averages its places and its replica; then the replicas average these group
     means. A place continues from its group's mean, so that groups learn from each other only through the replicas.
     Users are assigned to places at random in each round. Model and momentum belong to the place and are sent to its
     user;
  3. group normalisation instead of batch normalisation.

The tested model is the replicas' model; after averaging all replicas are equal. The paper's text was not available:
this follows its public code (jhcknzzm/SSFL-Benchmarking-Semi-supervised-Federated-Learning 9a18e89). With
`fedrgd.grouping='fixed'` users stay in their group and keep their momentum. SemiFL's tables use another reading, in
which users continue from the replicas' mean (variant `mean_of_means`). Learning rates change every round; in the code
they change every step.
"""

import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import Section, whole, word
from fedjax_ssl.client import global_model, labels_for_report, threshold_of
from fedjax_ssl.client.steps import OPT_STATE
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import CLASSIFIER, Method, Metrics, Problem, Received, Selection, State, WireBytes, no_op
from fedjax_ssl.engine.interface import completed, trained_parts
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.fedrgd.client import Place, at_place, on_all_images
from fedjax_ssl.methods.fedrgd.server import replica_means, train_replicas
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.ops.draws import draw_distinct
from fedjax_ssl.ops.schedule import learning_rate_at, warmed_up
from fedjax_ssl.ops.trees import norm, repeated, row, tree_bytes, where_rows
from fedjax_ssl.server import CLASSIFICATION, group_members
from fedjax_ssl.server.aggregation import check_own_mean, client_weights

GROUPS = "groups"  # the entry of `State.server` with each group's mean
PLACES = "places"  # the entry of `State.server` with each place's optimizer
FIELDS = {
    "fedrgd.grouping": "random",
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
        "fedrgd.schedule": "warm_up",
        "fedrgd.warm_up_rounds": 5 * 64,
        "fedrgd.decay_rounds": 200 * 64,
        **{f"{side}.{field}": value for side in ("client", "server") for field, value in _SGD.items()},
    },
    "slow": {"fedrgd.decay_rounds": 1024 * 64},  # the code's option `--fast 0`
    "no_groups": {"fedrgd.groups": 1},
    "self_training": {"fedrgd.users": "self_training"},
    "mean_of_means": {"fedrgd.users_go_on_from": "global_mean"},
}


def defaults() -> Section:
    """The section `config.fedrgd`."""
    section = Section()
    section.steps = whole(16, least=1)  # T, steps of users and replicas between two averagings; epochs are ignored
    # G, each with a replica of the server; 1: one mean of the server and all users. The code has 2 for 10 and 20
    # users, 3 for 30, 5 for 47.
    section.groups = whole(2, least=1)
    # How groups are formed: 'random', users are assigned to places at random in each round; or 'fixed', a group has
    # clients with neighbouring numbers.
    section.grouping = word("fixed", "random")
    # The mean from which users continue: their group's, or with 'global_mean' that of the replicas.
    section.users_go_on_from = word("group_mean", "global_mean")
    # What a user minimises: 'fixmatch'; or 'self_training', cross-entropy of a weak view towards its own label from
    # evaluation mode.
    section.users = word("fixmatch", "self_training")
    # Learning rates of users and server: 'shared', by `schedule`; or 'warm_up', a linear rise and FixMatch's cosine.
    section.schedule = word("shared", "warm_up")
    section.warm_up_rounds = whole(0, least=0)  # rounds of the linear rise
    # Rounds of rise and cosine; the cosine ends at a fifth of the rate; 0: num_rounds.
    section.decay_rounds = whole(0, least=0)
    return section


def fedrgd(problem: Problem) -> Method:
    """Grouping-based averaging as a Method.

    Raises:
        UserError: there are more groups than clients, or a server optimizer is set, which would need a single mean.
    """
    config, network, options = problem.config, problem.network, problem.config.fedrgd
    num_groups, at_random = options.groups, options.grouping == "random"
    field = "clients_per_round" if at_random else "num_clients"
    members = config[field]
    if num_groups > members:
        raise UserError(f"fedrgd.groups is {num_groups}, but {field} = {members}")
    if config.aggregation.optimizer != "fedavg":
        name = config.aggregation.optimizer
        raise UserError(
            f"aggregation.optimizer={name!r} moves one model, but fedrgd has one of each group: take 'fedavg'"
        )
    if config.aggregation.clip_norm:
        raise UserError("aggregation.clip_norm is not for fedrgd, whose clients start from their group's model")
    check_own_mean(problem)
    # The report has the global model's labels; training makes its own labels in each step.
    label = labels_for_report(problem, threshold_of(problem))
    frame = alternating(problem, (at_place(on_all_images(problem)),), label=label)

    def init(data: FederatedData, key: jax.Array) -> State:
        state = frame.init(data, key)
        server, clients = dict(state.server), dict(state.clients)
        if CLASSIFICATION in server:  # each replica has an optimizer
            server[CLASSIFICATION] = repeated(server[CLASSIFICATION], num_groups)
        if at_random and OPT_STATE in clients:
            server[PLACES] = repeated(row(clients.pop(OPT_STATE), 0), members)
        server[GROUPS] = repeated(trained_parts(network, state.model, CLASSIFIER), num_groups)
        return state._replace(server=server, clients=clients)

    def group_of(number):
        """The group of a place or a client: neighbours are in one group."""
        return number * num_groups // members

    def select(state: State, data: FederatedData, key: jax.Array) -> Selection:
        """Draws the users; the selection's `group` is each user's place, or its group if groups are fixed."""
        clients = draw_distinct(key, config.num_clients, config.clients_per_round)
        return Selection(clients, jnp.arange(len(clients)) if at_random else group_of(clients))

    def rate_at(number, rate):
        if options.schedule == "shared":
            return learning_rate_at(config, rate, number)
        return warmed_up(
            rate, number, options.warm_up_rounds, options.decay_rounds or config.num_rounds, "seven_sixteenths"
        )

    def broadcast(state: State, data: FederatedData, key: jax.Array):
        rate = rate_at(state.round, config.client.learning_rate)
        return global_model(problem, state)._replace(learning_rate=rate)

    def personal(state: State, data: FederatedData, clients: jax.Array, key: jax.Array) -> Place:
        groups = group_of(jnp.arange(len(clients)) if at_random else clients)
        memory = {OPT_STATE: row(state.server[PLACES], slice(len(clients)))} if PLACES in state.server else {}
        return Place(row(state.server[GROUPS], groups), memory)

    def aggregate(state: State, data: FederatedData, received: Received, key: jax.Array) -> tuple[State, Metrics]:
        """Takes the replicas' T steps, then each group's mean, then the mean of these means."""
        rate = rate_at(state.round, config.server.learning_rate)
        replicas, state, metrics = train_replicas(problem, state, data, key, rate, num_groups, options.steps)
        replicas = trained_parts(network, replicas, CLASSIFIER)
        if PLACES in state.server:
            back = group_members(received, members)  # [M, R], by number of the place
            newest = back.shape[1] - 1 - jnp.argmax(back[:, ::-1], axis=1)  # late uploads are the first rows
            opt_states = row(received.uploads.metadata[OPT_STATE], newest)
            places = where_rows(jnp.any(back, axis=1), opt_states, state.server[PLACES])
            state = state._replace(server={**state.server, PLACES: places})
        if at_random:
            received = received._replace(group=group_of(received.group))
        weights = client_weights(config.aggregation.weights, received.sizes, received.num_qualified, received.accepted)
        groups = replica_means(received.uploads.model, weights, group_members(received, num_groups), replicas)
        mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), groups)
        change = jax.tree.map(jnp.subtract, mean.params, trained_parts(network, state.model, CLASSIFIER).params)
        if options.users_go_on_from == "global_mean":
            groups = repeated(mean, num_groups)
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
