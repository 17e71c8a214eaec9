"""One federated round as a pure function that calls the stages in order."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import is_on
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.cohort import CohortResult
from fedjax_ssl.engine.evaluation import measure_if_due, score_report
from fedjax_ssl.engine.interface import (
    Method,
    Metrics,
    Problem,
    Received,
    Select,
    Selection,
    State,
    WireBytes,
    checked_metrics,
    joined,
)
from fedjax_ssl.engine.turns import Sent, train_clients
from fedjax_ssl.engine.untrusted.attacks import told_counts
from fedjax_ssl.engine.untrusted.delivery import delivered
from fedjax_ssl.engine.untrusted.privacy import one_private_upload, private_cohort
from fedjax_ssl.ops.draws import draw_distinct
from fedjax_ssl.ops.schedule import learning_rate_at
from fedjax_ssl.ops.trees import all_finite


class RoundKeys(NamedTuple):
    """A PRNG key for each stage of a round.

    A field's position is the index of its key in the split: another order of the fields would change every result.
    """

    select: jax.Array
    server_before: jax.Array
    clients: jax.Array
    server_after: jax.Array
    broadcast: jax.Array
    personal: jax.Array
    aggregate: jax.Array
    statistics: jax.Array


def uniform(clients_per_round: int) -> Select:
    """The `select` of FedAvg: draws clients uniformly, without replacement."""

    def select(state: State, data: FederatedData, key: jax.Array) -> Selection:
        del state
        return Selection(draw_distinct(key, len(data.client_size), clients_per_round))

    return select


def select_of(problem: Problem, method: Method) -> Select:
    """The `select` of a run: with privacy noise `private_cohort`, else the method's own, or FedAvg's if it has none.

    It raises a UserError if the method's own returns another type than a Selection.
    """
    config = problem.config
    if is_on(config.privacy.noise):
        return private_cohort(config)
    select = method.select or uniform(config.clients_per_round)

    def checked(state: State, data: FederatedData, key: jax.Array) -> Selection:
        selection = select(state, data.seen, key)
        if not isinstance(selection, Selection):
            raise UserError("a method's select must return a Selection, such as Selection(clients)")
        return selection

    return checked


def round_keys(seed: jax.Array, round_number: jax.Array | int) -> RoundKeys:
    """The keys of a round's stages."""
    return RoundKeys(*jax.random.split(round_key(seed, round_number), len(RoundKeys._fields)))


def round_key(seed: jax.Array, round_number: jax.Array | int) -> jax.Array:
    """The key of a round; no key is carried from round to round."""
    return jax.random.fold_in(jax.random.key(seed), round_number + 1)


def init_key(seed: jax.Array) -> jax.Array:
    """The key of initialisation and pre-training, before the first round."""
    return jax.random.fold_in(jax.random.key(seed), 0)


class RoundResult(NamedTuple):
    """What a round returns besides the state."""

    metrics: Metrics  # scalars, or [K] with a number for each client, by their names in metrics.jsonl
    lane_steps: jax.Array  # int32 [], steps of all lanes, including idle ones; depends on the machine
    healthy: jax.Array  # bool [], whether the model is finite and not every upload was dropped
    lacks: Mapping[str, jax.Array] = {}  # bool [], names of metrics that some rounds lack -> whether this one does

    def measured(self) -> Metrics:
        """The metrics that the round does not lack; only on the host."""
        return {name: value for name, value in self.metrics.items() if not self.lacks.get(name, False)}


# (state, data, hidden labels int32 [N], which only evaluation reads) -> the state after a round, and its result.
RoundFunction = Callable[[State, FederatedData, jax.Array], tuple[State, RoundResult]]


def make_round(problem: Problem, method: Method, lanes: int, tell: Any = None) -> RoundFunction:
    """Makes the function that runs a round of a method, with so many clients side by side.

    While a round is traced, `tell` gets what the server sends, a `Sent`, and the uploads, with a row for each job.
    """
    config = problem.config

    def round_fn(state: State, data: FederatedData, hidden_labels: jax.Array) -> tuple[State, RoundResult]:
        keys = round_keys(data.seed, state.round)

        # Select a cohort, train the server, and make the broadcast.
        state, sent, before = before_clients(problem, method, state, data, keys)

        # The clients make pseudo-labels, train and upload; the uploads that arrive are aggregated.
        from_clients = {name: jnp.int32(0) for name in ("uploads", "dropped_uploads", "local_steps")}
        lane_steps, usable, scored = jnp.int32(0), jnp.bool_(True), {}
        if method.phases:
            state, result, accepted = train_clients(config, method, state, data, sent, keys.clients, lanes)
            lane_steps = result.lane_steps
            if tell is not None:
                tell(sent, result.upload)
            received = received_rows(config, data, result, accepted)
            state, from_clients, usable = aggregate_uploads(problem, method, state, data, sent, result, received, keys)

        # The server trains the new model; the normalisation statistics are updated.
        with jax.named_scope("server"):
            state, after = method.server_after(state, data.seen, keys.server_after)
        with jax.named_scope("statistics"):
            asked = data.seen if not method.phases else _of_those_who_answer(config, data.seen, sent.selection, result)
            state = method.statistics(state, asked, sent.selection.clients, keys.statistics)
        state = state._replace(round=state.round + 1)

        with jax.named_scope("evaluate"):
            measured, lacks = measure_if_due(problem, state.model, data, hidden_labels, state.round)
            if method.phases and result.report is not None:
                scored = score_report(result.report, result.clients, result.present, data, hidden_labels)
        others = joined({"round": state.round}, measured, scored, from_clients)
        metrics = {**joined(others, checked_metrics(before)), **joined(others, checked_metrics(after))}
        return state, RoundResult(metrics, lane_steps, all_finite(state.model) & usable, lacks)

    return round_fn


def before_clients(
    problem: Problem, method: Method, state: State, data: FederatedData, keys: RoundKeys
) -> tuple[State, Sent, Metrics]:
    """The stages before local training; returns the state, the messages, and the metrics of the server's training.

    With a schedule they have `learning_rate`, that of local training, or of the server's if no client trains.
    """
    config = problem.config
    selection, data = select_of(problem, method)(state, data, keys.select), data.seen
    with jax.named_scope("server"):
        state, metrics = method.server_before(state, data, keys.server_before)
        broadcast, personal = method.broadcast(state, data, keys.broadcast), ()
    if method.phases and method.personal is not None:
        personal = method.personal(state, data, selection.clients, keys.personal)
    if config.schedule != "constant" or config.drop_rounds or config.warm_up_rounds:
        rate = learning_rate_at(config, config.server.learning_rate, state.round)
        metrics = {**metrics, "learning_rate": broadcast.learning_rate if method.phases else rate}
    return state, Sent(selection, broadcast, personal), metrics


def received_rows(config: Any, data: FederatedData, result: CohortResult, accepted: jax.Array) -> Received:
    """A cohort's uploads, also those not `accepted`, with ids and example counts; attackers may lie about counts."""
    sizes = jnp.where(result.present, data.client_size[result.clients], 0)  # 0 for padding
    num_qualified = sizes if result.report is None else jnp.sum(result.report.qualified, axis=1)
    if data.attackers is not None:
        lies = data.attackers.clients[result.clients]
        sizes, num_qualified = (told_counts(config.attack, counts, lies) for counts in (sizes, num_qualified))
    return Received(result.upload, accepted, result.clients, result.group, sizes, num_qualified)


@jax.named_scope("aggregate")
def aggregate_uploads(
    problem: Problem,
    method: Method,
    state: State,
    data: FederatedData,
    sent: Sent,
    result: CohortResult,
    received: Received,
    keys: RoundKeys,
) -> tuple[State, Metrics, jax.Array]:
    """Makes the new model from the uploads. Uploads that are not accepted are dropped and counted.

    The state's model is the one that was sent. Returns the state, the metrics, and whether the round is usable (False
    if every upload was dropped).
    """
    config, num_jobs = problem.config, len(sent.selection.clients)
    arrived, late, of_delivery = delivered(
        config, received, result.job, num_jobs, sent.broadcast, state.server, keys.clients
    )
    if is_on(config.privacy.noise):
        arrived = one_private_upload(config, arrived, sent.broadcast, data.secret, state.round)
    state, aggregated = method.aggregate(state, data.seen, arrived, keys.aggregate)
    state = state._replace(server={**state.server, **late})
    counts = _counts(config, data, sent, result, received)
    means = _means(result.metrics, received.accepted)
    metrics = joined(counts, of_delivery, means, checked_metrics(aggregated))
    if method.wire_bytes is not None:
        metrics |= _count_bytes(method.wire_bytes, sent, result)
    # With noise the model always changes, and whether the run continues must not depend on the clients' data.
    uploads, dropped = counts["uploads"], counts["dropped_uploads"]
    usable = (dropped == 0) | (dropped < uploads) | is_on(config.privacy.noise)
    return state, metrics, usable


def _counts(config: Any, data: FederatedData, sent: Sent, result: CohortResult, received: Received) -> Metrics:
    """How many clients, uploads and steps a round has."""
    counts = {
        "uploads": jnp.sum(result.took_part),
        "dropped_uploads": jnp.sum(result.took_part & ~received.accepted),
        "local_steps": jnp.sum(result.num_steps),
    }
    if data.attackers is not None:
        counts["byzantine_uploads"] = jnp.sum(result.took_part & data.attackers.clients[result.clients])
    if is_on(config.availability.never):
        counts["answers"] = jnp.sum(result.present)
    if sent.selection.present is not None:
        counts["cohort_size"] = jnp.sum(sent.selection.present)
    if not len(data.server_index):  # all labels are at clients
        counts["clients_without_labels"] = jnp.sum((data.labelled_size[result.clients] == 0) & result.present)
    return counts


def _of_those_who_answer(config: Any, data: FederatedData, selection: Selection, result: CohortResult) -> FederatedData:
    """The data without the images of clients that do not answer in this round, for the exchange of statistics.

    A client with several jobs answers if at least one of them is run.
    """
    if not is_on(config.availability.never) and selection.present is None:
        return data
    answers = jnp.zeros(len(data.client_size), bool).at[result.clients].max(result.present)
    drawn = jnp.zeros(len(data.client_size), bool).at[result.clients].set(True)
    return data._replace(client_size=jnp.where(drawn & ~answers, 0, data.client_size))


def _means(phases: tuple[tuple[Metrics, jax.Array], ...], accepted: jax.Array) -> Metrics:
    """The mean of each metric over jobs with a step and an accepted upload; NaN if there is no such job."""
    means: Metrics = {}
    for metrics, had_a_step in phases:
        counted = accepted & had_a_step
        count = jnp.sum(counted)
        of_jobs = checked_metrics(metrics, axes=1).items()
        means = joined(means, {name: jnp.sum(jnp.where(counted, values, 0.0)) / count for name, values in of_jobs})
    return means


def _count_bytes(wire_bytes: WireBytes, sent: Sent, result: CohortResult) -> Metrics:
    """Bytes sent to and from the whole cohort; float32, because the sum may exceed int32."""
    num_jobs = len(sent.selection.clients)
    down = jax.vmap(lambda one: wire_bytes.down(sent.broadcast, one), axis_size=num_jobs)(sent.personal)
    up = jax.vmap(wire_bytes.up)(result.upload)
    return {"bytes_down": jnp.sum(down), "bytes_up": jnp.sum(jnp.where(result.took_part, up, 0.0))}
