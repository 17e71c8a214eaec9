"""Turns uploads into one model by a chain of links: weights, screening, mean, the server's model, server optimizer."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import is_on
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import (
    CLASSIFIER,
    Aggregate,
    Metrics,
    Problem,
    Received,
    State,
    completed,
    trained_parts,
)
from fedjax_ssl.models.network import Network
from fedjax_ssl.ops.sgd import BatchStats, Model
from fedjax_ssl.ops.trees import add_up, all_finite, column, moving_average, norm, select, weighted_sum, where
from fedjax_ssl.server import robust

WEIGHTS = ("size", "qualified", "uniform")
ADAPTIVITY = 1e-3  # tau of the adaptive optimizers (Reddi et al., 2021)
# The server's step along the mean of the clients' updates, with optax.
OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation | None]] = {
    "fedavg": lambda options: None,  # the mean itself (McMahan et al., 2017)
    "fedavgm": lambda options: optax.sgd(options.learning_rate, options.momentum),  # SemiFL's server momentum
    "fedadagrad": lambda options: optax.adagrad(options.learning_rate, eps=ADAPTIVITY),
    "fedadam": lambda options: optax.adam(options.learning_rate, options.momentum, 0.99, ADAPTIVITY),
    "fedyogi": lambda options: from_rest(optax.yogi(options.learning_rate, options.momentum, 0.99, ADAPTIVITY)),
}
# (a pytree of uploads, weights, what to return if no upload counts, the share of clients that may lie) -> one of them.
MEANS: dict[str, Callable[[Any, jax.Array, Any, float], Any]] = {
    "mean": lambda uploads, weights, otherwise, share: weighted_mean(uploads, weights, otherwise),
    "median": robust.coordinate_median,
    "trimmed_mean": robust.trimmed_mean,
    "krum": robust.krum,
    "multi_krum": robust.multi_krum,
    "geometric_median": robust.geometric_median,
}
OPT_STATE = "aggregation"  # the server optimizer's entry in `State.server`


class Flow(NamedTuple):
    """The value that is passed along the chain.

    Links set `scores` and read `weights`, so that every link takes account of late uploads and of those not accepted.
    """

    # float32 [R], unnormalised weight of each upload before `shares`; any value for an upload that is not accepted.
    scores: jax.Array
    # float32 [R], factor of each score: 0 if the upload is not accepted, else `Received.discount`.
    shares: jax.Array
    model: Model  # the trained parts; at first as the clients received them
    moved: jax.Array  # bool [], whether a link has changed `model`
    memory: Mapping[str, Any]  # entries of `State.server`

    @property
    def weights(self) -> jax.Array:
        """float32 [R], the unnormalised weight of each upload: its score times its share."""
        return jnp.where(self.shares > 0, self.scores * self.shares, 0.0)


class Given(NamedTuple):
    """What a link may read besides the value."""

    current: Model  # the trained parts as the clients received them
    state: State  # before the aggregation
    received: Received
    key: jax.Array  # for this link


class Link(NamedTuple):
    """One link of the chain."""

    apply: Callable[[Flow, Given], Flow]  # maps the value to the next value
    # Params -> the entries of `State.server` that the link needs.
    init: Callable[[Any], dict[str, Any]] = lambda params: {}


class Aggregation(NamedTuple):
    """An aggregation as two pure functions."""

    init: Callable[[Any], dict[str, Any]]  # params -> the entries of `State.server` for the aggregation
    aggregate: Aggregate  # the method's stage


def chain(network: Network, *links: Link, parts: tuple[str, ...] = CLASSIFIER) -> Aggregation:
    """Makes an aggregation from a chain of links, applied in this order, for uploads of these parts of the model.

    Its metric is `update_norm`, the Euclidean length of the model's change.
    """

    def init(params) -> dict[str, Any]:
        return {name: entry for link in links for name, entry in link.init(select(params, parts)).items()}

    def aggregate(state: State, data: FederatedData, received: Received, key: jax.Array) -> tuple[State, Metrics]:
        current = trained_parts(network, state.model, parts)
        shares = jnp.where(received.accepted, 1.0 if received.discount is None else received.discount, 0.0)
        flow = Flow(jnp.ones_like(shares), shares, current, jnp.bool_(False), state.server)
        for link, own_key in zip(links, jax.random.split(key, len(links))):
            flow = link.apply(flow, Given(current, state, received, own_key))
        change = norm(jax.tree.map(jnp.subtract, flow.model.params, current.params))
        return state._replace(model=completed(state.model, flow.model), server=flow.memory), {"update_norm": change}

    return Aggregation(init, aggregate)


def fedavg(
    problem: Problem,
    *,
    weighted_by: Link | None = None,
    screened_by: Callable[[State, Received], jax.Array] | None = None,
    combine: Link | None = None,
    server_model: Callable[[State], Model] | None = None,
    after_mean: tuple[Link, ...] = (),
    parts: tuple[str, ...] = CLASSIFIER,
) -> Aggregation:
    """Makes the chain of `config.aggregation`: its weights, its mean, its server optimizer.

    By default this is FedAvg: the mean of the uploads, weighted by the clients' sizes. Statistics of normalisation
    layers are averaged by the same rule and weights, without the optimizer. Without an accepted upload the model and
    the optimizer state do not change.

    Args:
        weighted_by: the method's own weights, such as `weights_told`; None: `aggregation.weights`.
        screened_by, server_model: see `screen` and `with_server_model`.
        combine: a method's own mean of the uploads; None: `config.aggregation.mean`.
        after_mean: links of the method between the mean and the server's model.
        parts: the parts of the model in the uploads.

    Raises:
        UserError: the method has its own mean, and the configuration names another mean.
    """
    options = problem.config.aggregation
    if combine is not None:
        check_own_mean(problem)
        availability = problem.config.availability
        if is_on(availability.late) and availability.late_weight not in (0.0, 1.0):
            raise UserError(
                f"availability.late_weight must be 0 or 1 for {problem.config.method}, whose mean is its own"
            )
    rule = OPTIMIZERS[options.optimizer](options)
    links = [weighted_by or weights(options.weights)]
    links += [] if screened_by is None else [screen(screened_by)]
    links += [combine or mean(options.mean, options.byzantine_share, options.norm_bound), *after_mean]
    links += [] if server_model is None else [with_server_model(problem.network, server_model, parts)]
    links += [] if rule is None else [optimizer(rule)]
    return chain(problem.network, *links, parts=parts)


def weights(kind: str) -> Link:
    """Sets the weights of uploads, see `client_weights`."""
    return own_weights(functools.partial(client_weights, kind))


def own_weights(rule: Callable[[Received], jax.Array]) -> Link:
    """Sets the weights of uploads by a method's rule: received -> float32 [R]; ignored for uploads not accepted."""
    return Link(lambda flow, given: flow._replace(scores=rule(given.received)))


def weights_told(name: str, most: Callable[[Received], Any]) -> Link:
    """Sets the weight of each upload to a count that the client sends, float32 [] in `Upload.metadata`.

    `most` is the largest possible count, a number or [R]; see `counts_told`.
    """
    return own_weights(lambda received: counts_told(received, name, most(received)))


def by_role(
    labelled: Callable[[Received], jax.Array], unlabelled: Callable[[Received], jax.Array], share: float
) -> Link:
    """Sets the weights w_k = l1 n_k / sum_L n + (1 - l1) u_k / sum_U u, FedAvg-Semi's mean (SemiAnAgg, eq. 2).

    A client with images of both kinds uploads one model, whose weight is the sum of both terms. If no upload counts in
    one role, the other role has all the weight. `labelled` and `unlabelled` give n_k and u_k of the received uploads,
    float32 [R], not negative; l1 is `share`.
    """

    def rule(received: Received) -> jax.Array:
        counts, scores = (jnp.where(received.accepted, of(received), 0.0) for of in (labelled, unlabelled))
        return role_weights(counts, scores, share)

    return own_weights(rule)


def role_weights(labelled: jax.Array, unlabelled: jax.Array, share: float) -> jax.Array:
    """The weights of `by_role`, float32 [R], from n_k and u_k. They sum to 1, or are all 0 if no upload counts."""
    of_labelled, of_unlabelled = jnp.sum(labelled), jnp.sum(unlabelled)
    first = jnp.where(of_labelled > 0, jnp.where(of_unlabelled > 0, share, 1.0), 0.0)
    second = jnp.where(of_unlabelled > 0, jnp.where(of_labelled > 0, 1.0 - share, 1.0), 0.0)
    parts = (first, labelled, of_labelled), (second, unlabelled, of_unlabelled)
    return add_up(weight * scores / jnp.where(total > 0, total, 1.0) for weight, scores, total in parts)


def counts_told(received: Received, name: str, most: Any) -> jax.Array:
    """Counts that clients send in `Upload.metadata`, float32 [R] or [R, C], as far as they are possible.

    A negative count is 0, and a client's counts are reduced so that they add up to at most `most`, a number or [R].
    """
    counts = jnp.maximum(received.uploads.metadata[name], 0)
    totals = jnp.sum(counts.reshape(len(counts), -1), axis=1)
    return counts * column(jnp.minimum(1.0, most / jnp.maximum(totals, 1)), counts)


def most_examples(problem: Problem, received: Received) -> jax.Array:
    """A bound of the examples of one kind in a client's local epochs, int32 [R]: a last batch may be filled up."""
    client = problem.config.client
    return client.epochs * (received.sizes + client.batch_size)


def screen(rule: Callable[[State, Received], jax.Array]) -> Link:
    """Multiplies the weights by a method's rule: (state, received) -> float32 or bool [R]."""
    return Link(lambda flow, given: flow._replace(scores=flow.scores * rule(given.state, given.received)))


def mean(kind: str = "mean", share: float = 0.0, norm_bound: float = 0.0) -> Link:
    """Averages the uploads into one model; if all weights are 0, the model does not change.

    `kind` is a name of `MEANS`, `share` that of the clients that may lie, for the robust means. Updates are first
    clipped to the length `norm_bound`; 0: no bound.
    """

    def apply(flow: Flow, given: Given) -> Flow:
        uploads = given.received.uploads.model
        if is_on(norm_bound):
            uploads = robust.bounded(uploads, given.current, norm_bound)
        params = MEANS[kind](uploads.params, flow.weights, flow.model.params, share)
        model = Model(params, mean_statistics(kind, uploads.batch_stats, flow.weights, flow.model.batch_stats, share))
        return flow._replace(model=model, moved=flow.moved | (jnp.sum(flow.weights) > 0))

    return Link(apply)


def mean_statistics(
    kind: str, uploads: BatchStats, weights: jax.Array, otherwise: BatchStats, share: float
) -> BatchStats:
    """The mean of clients' statistics, leaves [R, ...], by the rule of their parameters, but chosen by the statistics.

    A client may lie in its statistics alone, beside honest parameters. For the units see `robust.units`, for the other
    arguments `robust.coordinate_median`.
    """
    if kind == "mean" or not jax.tree.leaves(uploads):
        return weighted_mean(uploads, weights, otherwise)
    units = robust.units(uploads, weights)
    uploads, otherwise = (jax.tree.map(jnp.divide, tree, units) for tree in (uploads, otherwise))
    return jax.tree.map(jnp.multiply, MEANS[kind](uploads, weights, otherwise, share), units)


def check_own_mean(problem: Problem) -> None:
    """Raises a UserError if the configuration sets a mean for a method that has its own."""
    options, name = problem.config.aggregation, problem.config.method
    if options.mean != "mean" or is_on(options.norm_bound):
        raise UserError(f"aggregation.mean and aggregation.norm_bound are not for {name}, whose mean is its own")


def half_told(name: str) -> Link:
    """Takes half the weighted mean of the uploads, half the plain mean of the model `name` in the clients' metadata.

    Source: FedLabel's code.
    """

    def apply(flow: Flow, given: Given) -> Flow:
        uploads, accepted = given.received.uploads, given.received.accepted
        of_told = weighted_mean(uploads.metadata[name], accepted.astype(jnp.float32), otherwise=flow.model)
        of_uploads = weighted_mean(uploads.model, flow.weights, otherwise=flow.model)
        return flow._replace(model=moving_average(of_told, of_uploads, 0.5), moved=flow.moved | jnp.any(accepted))

    return Link(apply)


def with_server_model(
    network: Network, model_of: Callable[[State], Model], parts: tuple[str, ...] = CLASSIFIER
) -> Link:
    """Gives the server's model half the weight, or all the weight if no client changed the model."""

    def apply(flow: Flow, given: Given) -> Flow:
        own = trained_parts(network, model_of(given.state), parts)
        half = moving_average(flow.model, own, 0.5)
        return flow._replace(model=where(flow.moved, half, own), moved=jnp.bool_(True))

    return Link(apply)


def optimizer(rule: optax.GradientTransformation) -> Link:
    """Takes an optax step along the parameters' change so far, instead of this change; no step if nothing changed."""

    def apply(flow: Flow, given: Given) -> Flow:
        # The optimizer takes the negative mean update as the gradient.
        old, opt_state = given.current.params, flow.memory[OPT_STATE]
        gradient = jax.tree.map(jnp.subtract, old, flow.model.params)
        updates, new_opt_state = rule.update(gradient, opt_state, old)
        stepped = optax.apply_updates(old, updates), new_opt_state
        params, opt_state = where(flow.moved, stepped, (old, opt_state))
        return flow._replace(model=flow.model._replace(params=params), memory={**flow.memory, OPT_STATE: opt_state})

    return Link(apply, lambda params: {OPT_STATE: rule.init(params)})


def from_rest(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Lets the first moment begin with 0 (Reddi et al., 2021).

    optax 0.2.8 begins both moments of Yogi with 1e-6 (`scale_by_yogi`), so that weights move that no client moves.
    """

    def init(params: Any) -> Any:
        return optax.tree_utils.tree_set(rule.init(params), mu=jax.tree.map(jnp.zeros_like, params))

    return optax.GradientTransformation(init, rule.update)


def client_weights(kind: str, received: Received) -> jax.Array:
    """The unnormalised weight of each upload, float32 [R], 0 for one that was not accepted.

    `kind` is 'size', the number n_m of the client's examples (FedAvg; FedAnchor's n_m / sum n_m); 'qualified', the
    number of examples that it trained on, from its report; or 'uniform', 1 (SemiFL, FedIL).
    """
    by_kind = {"size": received.sizes, "qualified": received.num_qualified, "uniform": jnp.ones_like(received.sizes)}
    return jnp.where(received.accepted, by_kind[kind].astype(jnp.float32), 0.0)


def group_members(received: Received, num_groups: int) -> jax.Array:
    """The accepted uploads of each group, 0 to G - 1: bool [G, R]; without groups all belong to the first group."""
    group = jnp.zeros_like(received.clients) if received.group is None else received.group
    return (group == jnp.arange(num_groups)[:, None]) & received.accepted


def weighted_mean(uploads: Any, weights: jax.Array, otherwise: Any) -> Any:
    """sum_m w_m upload_m / sum_m w_m over the leading axis, FedAvg's aggregation; `otherwise` if all weights are 0.

    Uploads have leaves [R, ...], weights are float32 [R], not negative; a row of weight 0 is ignored, even if it is not
    finite.
    """
    if not jax.tree.leaves(uploads):
        return otherwise
    total = jnp.sum(weights)
    shares = weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)

    def of_counted() -> Any:
        counted = jax.tree.map(lambda stacked: jnp.where(column(weights > 0, stacked), stacked, 0), uploads)
        return jax.tree.map(functools.partial(weighted_sum, shares), counted)

    # 0 times a finite number is 0, so that only other numbers need a copy of the uploads in which they are 0.
    plain = jax.tree.map(functools.partial(weighted_sum, shares), uploads)
    found = jax.lax.cond(all_finite(plain), lambda: plain, of_counted)
    return jax.tree.map(lambda mean, fallback: jnp.where(total > 0, mean, fallback), found, otherwise)
