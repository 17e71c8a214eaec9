"""Orchestra: Unsupervised Federated Learning via Globally Consistent Clustering.

Lubana et al., ICML 2022 (arXiv 2205.11506). Clients have no labels at all. What differs from FedAvg:
  1. an online network learns to assign a view of an image to the same of G global clusters as the target network, its
     moving average, assigns another view;
  2. against degenerate solutions, a second loss predicts by how many quarter turns a third view was rotated;
  3. a client remembers its last projections, clusters them into a few clusters of about equal size, and sends their
     centroids; the server clusters all clients' centroids into the global clusters;
  4. everything is averaged, including the target, weighted by the clients' numbers of whole batches. In the first round
     clients only cluster, so that there are initial global clusters.

The classifier is a probe at the server (`config.probe`). If a client first takes part after the first round, its memory
is random until it has seen as many images as the memory has rows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import Section, whole
from fedjax_ssl.client import At, Batches, Deck, Examples, Loss, Plan, global_model, local_training
from fedjax_ssl.client.deck import of_whole_batches
from fedjax_ssl.client.steps import MakeOptimizer
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import Broadcast, Cohort, Images, Method, Metrics, Phase, Previous, Problem, Received, State
from fedjax_ssl.methods.entry import Entry, Variants, unlabelled_backbone
from fedjax_ssl.methods.frames import self_supervised
from fedjax_ssl.methods.orchestra import clusters
from fedjax_ssl.methods.orchestra.clusters import CENTROIDS, PROJECTIONS, Ring
from fedjax_ssl.models import Linear, Projector
from fedjax_ssl.models.network import companion_model, with_companion_statistics
from fedjax_ssl.ops.augment import quarter_turns
from fedjax_ssl.ops.losses import cross_entropy, soft_cross_entropy, unit_vectors
from fedjax_ssl.ops.sgd import Model, followed_by
from fedjax_ssl.ops.trees import moving_average, select
from fedjax_ssl.server import fedavg, own_weights

PROJECTOR, ROTATION, TARGET = "projector", "rotation", "target"
ENCODER = ("backbone", PROJECTOR)
PARTS = (*ENCODER, ROTATION, TARGET)
DECAY = 0.996  # of the target in each step
FIELDS = {"model.projector_hidden": 512, "model.projector_dim": 512, "views": "orchestra"}
VARIANTS: Variants = {
    "paper": {  # the cross-device setting of its experiments
        "num_rounds": 101,
        "num_clients": 100,
        "clients_per_round": 50,
        "data.partition": "dirichlet_clients",
        "data.alpha": 0.1,
        "model.classifier_init": "torch_linear",
        "client.epochs": 10,
        "client.batch_size": 16,
        "client.learning_rate": 0.003,
        "client.weight_decay": 1e-4,
        "client.clip_norm": 0.0,
    }
}


def defaults() -> Section:
    section = Section()
    section.clusters = whole(128, least=2)  # G, clusters at the server
    section.local_clusters = whole(16, least=1)  # clusters of each client; at most its memory
    section.memory = whole(128, least=1)  # projections that a client remembers
    return section


class Clusters(NamedTuple):
    """What the server sends with the model."""

    centroids: jax.Array  # float32 [G, D], unit vectors
    round: jax.Array  # int32 [], the number of the round, from 0


def orchestra(problem: Problem) -> Method:
    """Its Algorithm 1 as a Method."""
    options, (height, width) = problem.config.orchestra, problem.network.inputs.shape[:2]
    if height != width:
        raise UserError(f"method=orchestra turns images by quarters, but the data set's are {width} x {height}")
    if options.local_clusters > options.memory:
        raise UserError(
            f"orchestra.local_clusters={options.local_clusters} is more than orchestra.memory={options.memory}"
        )
    dim, num_clients = problem.config.model.projector_dim, problem.config.num_clients
    by_batches = own_weights(lambda received: jnp.maximum(received.sizes // problem.config.client.batch_size, 1))
    mean = fedavg(problem, weighted_by=by_batches, parts=PARTS)
    # In the client's steps the target follows the online encoder.
    optimizer = lambda rate: followed_by(problem.optimizer(rate), TARGET, ENCODER, DECAY)  # noqa: E731
    phases = training(problem, optimizer), clusters.centroids_phase(options.local_clusters)
    method = self_supervised(problem, phases, parts=PARTS, aggregation=mean, optimizer=optimizer)

    def init(data: FederatedData, key: jax.Array) -> State:
        model_key, centroids_key, rings_key = jax.random.split(key, 3)
        state = method.init(data, model_key)
        params, given = state.model.params, problem.network.given
        if given is None or TARGET not in given.params:
            params = {**params, TARGET: select(params, ENCODER)}
        centroids = random_directions(centroids_key, (options.clusters, dim))
        rows = random_directions(rings_key, (num_clients, options.memory, dim))[data.ids]
        return state._replace(
            model=state.model._replace(params=params),
            server={**state.server, CENTROIDS: centroids},
            clients={**state.clients, PROJECTIONS: Ring(rows, jnp.zeros(len(rows), jnp.int32))},
        )

    def aggregate(state: State, data: FederatedData, received: Received, key: jax.Array) -> tuple[State, Metrics]:
        state, metrics = mean.aggregate(state, data, received, key)
        local = unit_vectors(received.uploads.metadata[CENTROIDS])
        vectors, present = local.reshape(-1, dim), jnp.repeat(received.accepted, local.shape[1])
        centroids, loss = clusters.global_centroids(state.server[CENTROIDS], vectors, present)
        return state._replace(server={**state.server, CENTROIDS: centroids}), {**metrics, "clustering_loss": loss}

    def broadcast(state: State, data: FederatedData, key: jax.Array) -> Broadcast:
        return global_model(problem, state, extra=Clusters(state.server[CENTROIDS], state.round))

    return method._replace(init=init, aggregate=aggregate, broadcast=broadcast)


def random_directions(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random unit vectors along the last axis, uniform over directions."""
    return unit_vectors(jax.random.normal(key, shape))


def target_projections(problem: Problem, model: Model, target: Any, images: Images, mask: jax.Array):
    """Unit vectors of the target's projections, with batch statistics, and the model's statistics after that pass."""
    companion = companion_model(model, TARGET)._replace(params=target)
    (outputs,), of_target = problem.network.companions[TARGET].train(companion, (images,), mask)
    return unit_vectors(outputs.heads[PROJECTOR]), with_companion_statistics(model.batch_stats, TARGET, of_target)


def training(problem: Problem, optimizer: MakeOptimizer) -> Phase:
    """`client.epochs` passes over a client's images in whole batches; the first round only fills the memory."""
    config, network = problem.config.client, problem.network
    first_view, second_view = problem.views

    def plan(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Plan:
        examples, is_first = Examples.of(data, cohort), received.extra.round == 0
        deck = Deck.shuffled(examples, examples.present, examples.keys, config.epochs)
        deck = of_whole_batches(deck, config.batch_size)
        steps = jnp.where(is_first, 0, deck.num_steps(config.batch_size))

        def project(key, images, mask):
            target = received.model.params[TARGET]
            return target_projections(problem, received.model, target, first_view(key, images), mask)[0]

        def filled(rings: Ring) -> Ring:
            return clusters.filled(project, data.inputs, examples, rings, config.batch_size)

        rings = jax.lax.cond(is_first, filled, lambda rings: rings, cohort.own[PROJECTIONS])
        takes_part = jnp.any(examples.present, axis=1)
        return Plan({"unlabelled": deck}, steps, own={PROJECTIONS: rings}, takes_part=takes_part)

    def loss(model: Model, batch: Batches, at: At) -> Loss:
        first_key, second_key, third_key, turns_key = jax.random.split(at.key, 4)
        images, mask = batch.unlabelled.inputs, batch.unlabelled.mask
        first, second = first_view(first_key, images), second_view(second_key, images)
        turns = jax.random.randint(turns_key, mask.shape, 0, 4)
        third = quarter_turns(first_view(third_key, images), turns)

        def assigned(vectors: jax.Array) -> jax.Array:
            similarities = jnp.matmul(vectors, at.received.extra.centroids.T, precision="highest")
            return similarities / clusters.TEMPERATURE

        still = jax.lax.stop_gradient(model)
        # The value that the target has after this step of the optimizer.
        target = moving_average(still.params[TARGET], select(still.params, ENCODER), DECAY)
        of_target, batch_stats = target_projections(problem, still, target, first, mask)
        outputs, batch_stats = network.train(model._replace(batch_stats=batch_stats), (second, third), mask)
        projections = unit_vectors(outputs[0].heads[PROJECTOR])
        cluster_loss = soft_cross_entropy(assigned(projections), jax.nn.softmax(assigned(of_target)), mask)
        rotation_loss = cross_entropy(outputs[1].heads[ROTATION], turns, mask)
        metrics = {"cluster_loss": cluster_loss, "rotation_loss": rotation_loss}
        remember = {PROJECTIONS: clusters.pushed(at.own[PROJECTIONS], of_target, mask)}
        return Loss(cluster_loss + rotation_loss, batch_stats, metrics, remember=remember)

    return local_training(problem, plan, loss, {"unlabelled": config.batch_size}, parts=PARTS, optimizer=optimizer)


def _projector(model: ConfigDict) -> functools.partial[Projector]:
    return functools.partial(Projector, model.projector_hidden, model.projector_dim, model.normalisation, True)


ENTRY = Entry(
    orchestra,
    title="Orchestra",
    paper="https://arxiv.org/abs/2205.11506",
    settings=("server",),
    needs_labels=False,
    defaults=defaults,
    fields=FIELDS,
    variants=VARIANTS,
    heads={PROJECTOR: _projector, ROTATION: lambda model: functools.partial(Linear, 4, reads=PROJECTOR)},
    companions={TARGET: lambda config: {PROJECTOR: _projector(config.model)}},
    images_alone="turns images by quarters",
    confidence=(),
    advice=unlabelled_backbone,
    tiny={
        "model.projector_hidden": 8,
        "model.projector_dim": 4,
        "orchestra.clusters": 6,
        "orchestra.local_clusters": 3,
        "orchestra.memory": 25,
    },
    rests=(1,),  # clients cluster and do not train
)
