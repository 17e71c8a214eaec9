"""Frames that methods share: functions that make a `Method` from a few parts, such as the clients' phases.

To change a stage, use `alternating(...)._replace(...)`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.client import (
    LABELLED,
    LossFunction,
    both_kinds,
    class_counts,
    class_shares,
    global_model,
    is_acr,
    labels_of_received,
    local_training,
    own_confidence,
    own_optimizers,
    own_states,
    self_training,
    trained_parts_of,
)
from fedjax_ssl.client.confidence import Confidence
from fedjax_ssl.client.self_training import Tell
from fedjax_ssl.client.steps import MakeOptimizer
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine import CLASSIFIER, Label, Method, Phase, Problem, Received, State
from fedjax_ssl.models import Outputs
from fedjax_ssl.ops.losses import soft_cross_entropy
from fedjax_ssl.ops.sgd import BatchStats, Model
from fedjax_ssl.ops.trees import add_up
from fedjax_ssl.server import (
    Aggregation,
    MakeServerLoss,
    by_role,
    fedavg,
    make_statistics,
    own_optimizer,
    pretrained_classifier,
    train_classifier,
    with_probe,
)
from fedjax_ssl.server.aggregation import counts_told

# Fields of methods whose clients have labels or none.
BY_ROLE: dict[str, Any] = {
    "data.labels": "some_clients",
    "client.labelled_views": "weak",
    "client.spare_classifier": False,
}
# What the experiments of RSCFed, CBAFed and SemiAnAgg share.
TEN_CLIENTS: dict[str, Any] = {
    "num_clients": 10,
    "clients_per_round": 10,
    "data.partition": "dirichlet_clients",
    "data.alpha": 0.8,
    "data.labelled_rule": "most_classes",
    "model.classifier_init": "torch_linear",
    "client.epochs": 1,
    "client.batch_size": 64,
    "client.learning_rate": 0.03,
    "augment.flip": "always",
    "augment.padding": 0,
    "augment.resized": 40,
}
# (data, model) -> a method's entries of a memory: of the clients', leaves [K, ...], or of the server's.
Own = Callable[[FederatedData, Model], dict[str, Any]]


def alternating(
    problem: Problem,
    phases: tuple[Phase, ...],
    own: Own | None = None,
    *,
    server: Own | None = None,
    label: Label | None = None,
    rule: Confidence | None = None,
    parts: tuple[str, ...] = CLASSIFIER,
    aggregation: Aggregation | None = None,
    server_loss: MakeServerLoss | None = None,
) -> Method:
    """Alternate training (SemiFL, section 3.1): clients' models are averaged, then the server trains on its labels.

    If the server has no labels (`data.labels`), it neither pre-trains nor trains, and this is FedAvg.

    Args:
        own, server: the method's entries of the clients' and of the server's memory.
        phases: a client's work on the global model (`Broadcast`); () if no client takes part.
        label: makes the pseudo-labels of a round; None: there are none.
        rule: which of them count; clients keep its state with `confidence.memory='run'`. None: no such rule.
        parts, aggregation: the parts that clients train, and their aggregation; None: that of `config.aggregation`.
        server_loss: the server's loss, which trains `parts`; None: cross-entropy of backbone and classifier.
    """
    config, aggregation = problem.config, aggregation or fedavg(problem, parts=parts)
    at_server = CLASSIFIER if server_loss is None else parts

    def init(data: FederatedData, key: jax.Array) -> State:
        state = pretrained_classifier(problem, data, key, server_loss, at_server)
        model = state.model
        optimizers = own_optimizers(problem, data, model, parts) if phases else {}
        states = own_confidence(problem, data, rule) if rule else {}
        of_server = {**own_optimizer(problem, model, at_server), **(server(data, model) if server else {})}
        return state._replace(
            server={**aggregation.init(model.params), **of_server, **state.server},
            clients={**optimizers, **states, **(own(data, model) if own else {})},
        )

    return Method(
        init=init,
        broadcast=lambda state, data, key: global_model(problem, state),
        label=label,
        phases=phases,
        aggregate=aggregation.aggregate,
        server_after=lambda state, data, key: train_classifier(problem, state, data, key, server_loss, at_server),
        # Without clients only the server has images.
        statistics=make_statistics(problem.network, config, None if phases else "server"),
    )


def on_both_kinds(
    problem: Problem,
    loss: LossFunction,
    rule: Confidence,
    *,
    parts: tuple[str, ...] = CLASSIFIER,
    label: Label | None = None,
    **others: Any,
) -> Method:
    """`alternating`, whose clients take steps on a labelled and an unlabelled batch, as FixMatch does.

    See `both_kinds` for the fields of `config.consistency`. `loss` is that of one step, `rule` says which labels count,
    `label` is by default `labels_of_received`; `others` are keywords of `alternating`.
    """
    plan, sizes = both_kinds(problem)
    label = label or labels_of_received(problem, rule, problem.config.consistency.include_labelled)
    phases = (local_training(problem, plan, loss, sizes, parts=parts),)
    return alternating(problem, phases, label=label, rule=rule, parts=parts, **others)


def self_supervised(
    problem: Problem,
    phases: tuple[Phase, ...],
    own: Own | None = None,
    *,
    parts: tuple[str, ...],
    aggregation: Aggregation | None = None,
    optimizer: MakeOptimizer | None = None,
) -> Method:
    """Clients train without labels and the server averages. Its labels only fit the classifier `config.probe`.

    The broadcast's `extra` is the number of the round, int32 []; `parts` are without the classifier; the optimizer is
    the clients', see `local_training`. The other arguments are those of `alternating`.
    """
    aggregation = aggregation or fedavg(problem, parts=parts)

    def init(data: FederatedData, key: jax.Array) -> State:
        model = problem.network.init(key)
        memory = {
            **own_optimizers(problem, data, model, parts, optimizer=optimizer),
            **(own(data, model) if own else {}),
        }
        return State(jnp.int32(0), model, aggregation.init(model.params), memory)

    method = Method(
        init=init,
        broadcast=lambda state, data, key: global_model(problem, state, extra=state.round),
        phases=phases,
        aggregate=aggregation.aggregate,
        statistics=make_statistics(problem.network, problem.config),
    )
    return with_probe(problem, method)


PRIOR = "class_prior"  # the entry of `State.server` for trainers that need it


def trained_by_role(
    problem: Problem,
    unlabelled: Callable[[Received], jax.Array] | None,
    share: float,
    *,
    tell: Tell | None = None,
    own: Own | None = None,
) -> Method:
    """FedAvg of clients with labels and clients without, with the local training of `self_training`.

    Labelled clients are weighted by their labelled images (SemiAnAgg, eq. 2 and 6); `share` is the weight of all of
    them together. `unlabelled` is a function of the received uploads to each one's weight among the clients without
    labels, float32 [R]; None: a single mean over all clients, weighted by `aggregation.weights`. For `tell` see
    `self_training`, for `own` see `alternating`. A classifier that a given model lacks (`init_from`) starts as a copy
    of its classifier.

    ACR needs the class shares of the labelled images, so every broadcast contains them. The labelled clients report
    them once, before the first round.
    """
    problem = with_given_heads(problem, trained_parts_of(problem))
    config, parts = problem.config, trained_parts_of(problem)

    def memory(data: FederatedData, model: Model) -> dict[str, Any]:
        return {**own_states(problem, data), **(own(data, model) if own else {})}

    weighted_by = None if unlabelled is None else by_role(labelled_images, unlabelled, share)
    aggregation = fedavg(problem, weighted_by=weighted_by, parts=parts)
    label, phases = self_training(problem, tell)
    if not is_acr(problem):
        return alternating(problem, phases, memory, label=label, parts=parts, aggregation=aggregation)

    def prior(data: FederatedData, model: Model) -> dict[str, Any]:
        return {PRIOR: class_shares(given_labels(problem, data), config.client)}

    method = alternating(problem, phases, memory, server=prior, label=label, parts=parts, aggregation=aggregation)
    return method._replace(broadcast=lambda state, data, key: global_model(problem, state, state.server[PRIOR]))


def with_given_heads(problem: Problem, parts: tuple[str, ...]) -> Problem:
    """Adds linear heads that the problem's given model lacks, as copies of that model's classifier."""
    given = problem.network.given
    if given is None or "classifier" not in given.params:
        return problem
    params = {**dict.fromkeys(parts, given.params["classifier"]), **given.params}
    return problem._replace(network=problem.network._replace(given=given._replace(params=params)))


def two_smoothed_views(
    problem: Problem, model: Model, images: jax.Array, labels: jax.Array, mask: jax.Array, key: jax.Array
) -> tuple[jax.Array, Outputs, BatchStats]:
    """The sum of cross-entropies of two weak views, labels smoothed by 0.1 (the codes of FedIRM and imFed-Semi).

    Returns the loss, float32 [], the first view's outputs and the new normalisation statistics.
    """
    views = tuple(problem.weak(of_view, images) for of_view in jax.random.split(key))
    (first, second), batch_stats = problem.network.train(model, views, mask)
    targets = optax.smooth_labels(jax.nn.one_hot(jnp.where(mask, labels, 0), problem.num_classes), 0.1)
    loss = add_up(soft_cross_entropy(view.logits, targets, mask) for view in (first, second))
    return loss, first, batch_stats


def labelled_images(received: Received) -> jax.Array:
    """The number of labelled images of each upload's client, N_k^L, float32 [R]."""
    return counts_told(received, LABELLED, received.sizes)


def unlabelled_images(received: Received) -> jax.Array:
    """The number of unlabelled images of each upload's client, float32 [R]; 0 for an upload that was not accepted."""
    return jnp.where(received.accepted, jnp.maximum(received.sizes - labelled_images(received), 0.0), 0.0)


def given_labels(problem: Problem, data: FederatedData) -> jax.Array:
    """The number of labels of each class at all clients, float32 [C]; clients report it before the first round."""
    if problem.told_labels is not None:
        return problem.told_labels
    if data.given_labels is not None:
        return data.given_labels
    present = jnp.arange(data.width) < data.client_size[:, None]
    labels = jnp.where(present, data.visible_labels[data.client_index], -1)
    return jnp.sum(class_counts(labels, problem.num_classes), axis=0)
