"""FedCon: A Contrastive Framework for Federated Semi-Supervised Learning.

Long, Wang, Wang, Xiao and Ma, 2021 (arXiv 2109.04533). Clients have no labels and make none. What differs from FedAvg:
  1. a client learns by BYOL: from one weak view its backbone and a projector predict the features of another view, as
     computed by its target, a slow moving average of the backbone. Projector and target stay at the client;
  2. only backbones are averaged; the classifier belongs to the server;
  3. the server trains on two weak views of its images, with cross-entropy and consistency with a second network, the
     moving average of the first.

The paper's text was not available; this follows the public code. docs/methods/fedcon.md has its bugs, and which of them
`replica` and the variant `code` have.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.base.fields import Section, real, word
from fedjax_ssl.client import At, Batches, Deck, Examples, Loss, Plan, global_model, local_training, own_optimizers
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import CLASSIFIER, Broadcast, Cohort, Method, Metrics, Phase, Previous, Problem, State
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.models import Projector, heads_drawn
from fedjax_ssl.ops.losses import cross_entropy, kl_divergence, negative_cosine
from fedjax_ssl.ops.schedule import learning_rate_at, warmed_up
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import moving_average, repeated, row, select, where_rows
from fedjax_ssl.server import ServerPlan, train_on_server_labels
from fedjax_ssl.server.training import ServerLoss, ServerLossResult

# A client's projector, which is in its memory and among the parts that it trains; a client's target, and whether it has
# one; the server's second network.
PROJECTOR, TARGET, SEEN, STUDENT = "projector", "target", "target_seen", "student"
TRAINED, SENT = ("backbone", PROJECTOR), ("backbone",)
# The public code's numbers.
TARGET_DECAY = 0.999  # a client's target: target = decay * target + (1 - decay) * backbone in each step
WARM_UP_ROUNDS = 10  # rounds of the linear rise of the clients' learning rate
RAMP_ROUNDS = 100  # R of the ramp exp(-5 (1 - t / R)^2)
STUDENT_SPEED = 4e-4  # the largest share of the network that is added to the student in a step
STEPS_OF_A_ROUND, HALF_PERIOD = 1000, 20_000  # the student's speed oscillates over steps

FIELDS = {
    "aggregation.weights": "uniform",
    "server.augmentation": "weak",  # in pre-training; this method has no strong views
}
_OPTIMISERS = {
    "client.optimizer": "lars",
    "client.learning_rate": 0.3 * 10 / 256,
    "client.momentum": 0.9,
    "client.nesterov": False,
    "client.weight_decay": 1.5e-6,
    "client.clip_norm": 0.0,
    "client.persistent": False,
    "fedcon.client_schedule": "warm_up",
    "server.learning_rate": 0.01,
    "server.pretrain_learning_rate": 0.01,
    "server.momentum": 0.5,
    "server.nesterov": False,
    "server.weight_decay": 0.0,
    "server.clip_norm": 0.0,
    "server.persistent": False,
}
VARIANTS: Variants = {
    "paper": {  # the setting of the public code, IID
        **_OPTIMISERS,
        "num_rounds": 200,
        "data.server_draw": "random",
        "data.partition": "iid",
        "model.classifier_init": "torch_linear",
        "client.epochs": 1,
        "client.batch_size": 50,
        "server.epochs": 1,
        "server.batch_size": 10,
        "server.pretrain_epochs": 1,
    },
    "own_optimisers": _OPTIMISERS,  # LARS at clients and a slower server, for the setting of another config file
    "code": {"fedcon.replica": True, "client.momentum": 0.0},
    "no_consistency": {"fedcon.consistency_weight": 0.0},
}


def defaults() -> Section:
    section = Section()
    # The clients' learning rate: 'shared', by `schedule`; or 'warm_up', a linear rise and a cosine over the run.
    section.client_schedule = word("shared", "warm_up")
    section.consistency_weight = real(1.0, least=0)  # weight of the server's consistency after the ramp
    # Two bugs of the code: consistency is with the network's own predictions of the other view instead of the
    # student's, and the student is not renewed in later rounds.
    section.replica = False
    return section


def fedcon(problem: Problem) -> Method:
    """Its algorithm as a Method."""
    config, network, options = problem.config, problem.network, problem.config.fedcon
    frame = alternating(problem, (between_views(problem),), parts=SENT)

    def init(data: FederatedData, key: jax.Array) -> State:
        state = frame.init(data, key)
        features = jax.eval_shape(lambda images: network.predict(state.model, images).features, data.inputs[:1])
        keys = jax.random.split(jax.random.fold_in(key, 1), config.num_clients)[data.ids]
        first = lambda k: projector_of(problem).init(k, jnp.zeros(features.shape))["params"]  # noqa: E731
        drawn = jax.vmap(lambda k: heads_drawn(config.model.classifier_init, first(k), k))(keys)
        backbones = repeated(state.model.params["backbone"], len(keys))
        trained = state.model.with_parts(**{PROJECTOR: row(drawn, 0)})
        clients = {PROJECTOR: drawn, TARGET: backbones, SEEN: jnp.zeros(len(keys), bool)}
        server = {STUDENT: select(state.model.params, CLASSIFIER)} if options.replica else {}
        return state._replace(
            server={**state.server, **server}, clients={**clients, **own_optimizers(problem, data, trained, TRAINED)}
        )

    def broadcast(state: State, data: FederatedData, key: jax.Array):
        received = global_model(problem, state)
        if options.client_schedule == "shared":
            return received
        rate = warmed_up(config.client.learning_rate, state.round, WARM_UP_ROUNDS, config.num_rounds)
        return received._replace(learning_rate=rate)

    def server_after(state: State, data: FederatedData, key: jax.Array) -> tuple[State, Metrics]:
        """Trains on L_server. Meanwhile the student is a part of the model that has no gradient."""
        number = state.round + 1  # the pre-training is number 0
        student = state.server.get(STUDENT, select(state.model.params, CLASSIFIER))
        plan = ServerPlan(
            two_view_loss(problem, data, number),
            config.server.epochs,
            after_step=lambda before, after, index: moved_student(number, before, after, index),
        )
        with_student = state._replace(model=state.model.with_parts(**{STUDENT: student}))
        rate = learning_rate_at(config, config.server.learning_rate, state.round)
        both, metrics = train_on_server_labels(problem, with_student, data, key, rate, plan)
        params = dict(both.model.params)
        student = params.pop(STUDENT)
        server = {**both.server, **({STUDENT: student} if STUDENT in state.server else {})}
        return both._replace(model=both.model._replace(params=params), server=server), metrics

    return frame._replace(init=init, broadcast=broadcast, server_after=server_after)


# --- The server. -----------------------------------------------------------------------------------------------------


def two_view_loss(problem: Problem, data: FederatedData, number: jax.Array) -> ServerLoss:
    """L_server = (CE(y, z1) + CE(y, z2)) / 2 + w(t) (KL(s2, z1) + KL(s1, z2)) / 2 in the server's t-th training.

    z are the network's predictions of two weak views, s the student's; w(t) = exp(-5 (1 - min(t, R) / R)^2).
    """
    network, options = problem.network, problem.config.fedcon
    ramp = jnp.exp(-5 * (1 - jnp.minimum(number / RAMP_ROUNDS, 1.0)) ** 2)

    def loss_fn(model: Model, rows: jax.Array, labels: jax.Array, mask: jax.Array, key: jax.Array) -> ServerLossResult:
        images = data.inputs[rows]
        views = tuple(problem.weak(own_key, images) for own_key in jax.random.split(key))
        (one, two), batch_stats = network.train(model, views, mask)
        seen = one, two
        if not options.replica:
            averaged = model.with_parts(**model.params[STUDENT])
            seen = network.train(averaged, views, mask)[0]
        loss = 0.5 * (cross_entropy(one.logits, labels, mask) + cross_entropy(two.logits, labels, mask))
        consistency = 0.5 * (
            kl_divergence(seen[1].logits, one.logits, mask) + kl_divergence(seen[0].logits, two.logits, mask)
        )
        value = loss + options.consistency_weight * ramp * consistency
        return value, (batch_stats, {"server_loss": loss, "server_consistency": consistency})

    return loss_fn


def moved_student(number: jax.Array, before: Model, after: Model, index: jax.Array) -> Model:
    """The model after a step, with its student moved towards the network before the step.

    tau_k = 1 - 4e-4 (cos(pi k / 20000) + 1) / 2 with k = 1000 t + step, so that the speed oscillates, as in the code.
    """
    k = STEPS_OF_A_ROUND * number + index
    decay = 1 - STUDENT_SPEED * 0.5 * (jnp.cos(jnp.pi * k / HALF_PERIOD) + 1)
    student = moving_average(before.params[STUDENT], select(before.params, CLASSIFIER), decay)
    return after.with_parts(**{STUDENT: student})


# --- A client. -------------------------------------------------------------------------------------------------------


def projector_of(problem: Problem) -> Projector:
    """h, which maps features to vectors of the same size; its hidden layer is three times as wide, as in the code."""
    return Projector(0, 0, problem.config.model.normalisation)


def between_views(problem: Problem) -> Phase:
    """L_client = D(h(g(x1)), g_t(x2)) / 2 + D(h(g(x2)), g_t(x1)) / 2 of two weak views, D the negative cosine."""
    network, config = problem.network, problem.config.client

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        """At its first visit a client's target is the backbone that it receives."""
        examples, seen = Examples.of(data, cohort), cohort.own[SEEN]
        deck = Deck.shuffled(examples, examples.present, examples.keys, config.epochs)
        target = where_rows(seen, cohort.own[TARGET], received.model.params["backbone"])
        own = {TARGET: target, SEEN: jnp.ones_like(seen)}
        return Plan({"unlabelled": deck}, deck.num_steps(config.batch_size), own=own)

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        images, mask = batch.unlabelled.inputs, batch.unlabelled.mask
        views = tuple(problem.weak(own_key, images) for own_key in jax.random.split(at.key))
        (of_one, of_two), _ = network.train(at.received.model.with_parts(backbone=at.own[TARGET]), views, mask)

        seen, batch_stats = network.train(model, views, mask)
        one, two = project(problem, model.params[PROJECTOR], [outputs.features for outputs in seen], mask)
        value = 0.5 * (negative_cosine(one, of_two.features, mask) + negative_cosine(two, of_one.features, mask))
        return Loss(value, batch_stats, {"client_loss": value})

    def after(own: Mapping[str, Any], model: Model) -> dict[str, Any]:
        target = moving_average(own[TARGET], model.params["backbone"], TARGET_DECAY)
        return {TARGET: target, PROJECTOR: model.params[PROJECTOR]}

    return local_training(
        problem,
        plan,
        loss,
        {"unlabelled": config.batch_size},
        parts=TRAINED,
        sent=SENT,
        begin=lambda received, own: received.model.with_parts(**{PROJECTOR: own[PROJECTOR]}),
        after=after,
    )


def project(problem: Problem, params: Any, views: list[jax.Array], mask: jax.Array) -> list[jax.Array]:
    """The projections of some views' features [B, F], each view with its own batch statistics: [B, F] each."""
    stacked, masks = jnp.concatenate(views), jnp.tile(mask, len(views))
    projected: Any = projector_of(problem).apply({"params": params}, stacked, True, masks, len(views))
    return jnp.split(projected, len(views))


ENTRY = Entry(
    fedcon,
    title="FedCon",
    paper="https://arxiv.org/abs/2109.04533",
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    confidence=(),
)
