"""A round: the stages of a federation, in order, as one pure function; and many rounds as one dispatch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import SEED_AXES
from fedjax_ssl.engine.cohort import CohortResult, train_cohort
from fedjax_ssl.engine.evaluation import evaluate, score_pseudo_labels
from fedjax_ssl.engine.interface import Cohort, Method, Problem, Received, State
from fedjax_ssl.learning.trees import all_finite

Metrics = dict[str, jax.Array]


class RoundResult(NamedTuple):
    """What a round gives apart from the state.

    Attributes:
        metrics: scalars, by their names in metrics.jsonl.
        lane_steps: int32 [], steps of all lanes, those of idle lanes included; they depend on the machine.
        healthy: bool [], whether the round left a state to go on from.
    """

    metrics: Metrics
    lane_steps: jax.Array
    healthy: jax.Array


def make_round(problem: Problem, method: Method, lanes: int, debug: bool = False) -> Callable:
    """One round of a method.

    Args:
        problem: the run.
        method: what is particular to it.
        lanes: how many clients train side by side.
        debug: train the clients in a plain Python loop (call the round without jit then).

    Returns:
        round_fn(state, data, hidden_labels) -> (state, RoundResult). Only the scoring reads `hidden_labels`.
    """
    config = problem.config

    def round_fn(state: State, data, hidden_labels) -> tuple[State, RoundResult]:
        select_key, before_key, client_key, after_key = jax.random.split(round_key(data.seed, state.round), 4)

        # Select a cohort.
        num_clients = len(data.client_size)
        clients = jax.random.choice(select_key, num_clients, (config.clients_per_round,), replace=False)
        own_states = jax.tree.map(lambda leaf: leaf[clients], state.clients)

        # The server trains, and broadcasts.
        with jax.named_scope("server"):
            state, before = method.server_before(state, data, before_key)
            broadcast = method.broadcast(state, data)

        # The clients label, train and upload; what arrives is aggregated.
        from_clients = {name: jnp.int32(0) for name in ("uploads", "dropped_uploads", "local_steps")}
        lane_steps, usable = jnp.int32(0), jnp.bool_(True)
        if method.phases:
            cohort = Cohort(clients, own_states, client_key)
            result = train_cohort(method.phases, broadcast, data, cohort, lanes, debug)
            lane_steps = result.lane_steps
            with jax.named_scope("aggregate"):
                state, from_clients, usable = _aggregate(method, state, data, result)

        # The server trains on the new model; normalisation statistics are brought up to date.
        with jax.named_scope("server"):
            state, after = method.server_after(state, data, after_key)
        with jax.named_scope("statistics"):
            state = method.statistics(state, data, clients)
        state = state._replace(round=state.round + 1)

        with jax.named_scope("evaluate"):
            tested = evaluate(problem.network, state, data, config.eval_batch_size)
            scored = {}
            if method.phases:
                rows, sizes = data.client_index[result.clients], _sizes(data, result)
                scored = score_pseudo_labels(result.reports[0], rows, sizes, hidden_labels, config.clients_per_round)
        metrics = {"round": state.round, **tested, **scored, **before, **from_clients, **after}
        healthy = all_finite((state.params, state.batch_stats)) & usable
        return state, RoundResult(metrics, lane_steps, healthy)

    return round_fn


def over_seeds(round_fn: Callable) -> Callable:
    """The same round for several seeds at once: states and results have a leading axis, and so has what of the data
    differs from seed to seed (see `SEED_AXES`). Their clients go through the same lanes."""
    return jax.vmap(round_fn, in_axes=(0, SEED_AXES, None))


class Dispatch(NamedTuple):
    """What several rounds in one dispatch give.

    Attributes:
        state: after the last round that ran.
        results: leaves [capacity, ...]; the first `rounds_done` entries are filled.
        rounds_done: int32 [].
        healthy: bool [], whether the last round left a state to go on from, for every seed.
    """

    state: State
    results: RoundResult
    rounds_done: jax.Array
    healthy: jax.Array


def make_dispatch(round_fn: Callable, capacity: int, converged: Callable | None = None) -> Callable:
    """Up to `capacity` rounds as one program; how many is traced, so that any number runs without compiling.

    Args:
        round_fn: a round, of one seed or of several.
        capacity: size of the buffer of results.
        converged: the method's, see `Method`; for one seed only.

    Returns:
        dispatch(state, data, hidden_labels, num_rounds) -> Dispatch. It ends early when a round leaves a state that
        is not finite, when every upload of a round was dropped, or when the method says that the run is over.
    """

    round_fn = jax.jit(round_fn)  # traced once, for its shapes and in the loop

    def dispatch(state, data, hidden_labels, num_rounds) -> Dispatch:
        shapes = jax.eval_shape(round_fn, state, data, hidden_labels)[1]
        buffer = jax.tree.map(lambda leaf: jnp.zeros((capacity, *leaf.shape), leaf.dtype), shapes)

        def body(so_far: Dispatch) -> Dispatch:
            state, result = round_fn(so_far.state, data, hidden_labels)
            buffer = jax.tree.map(lambda all_, one: all_.at[so_far.rounds_done].set(one), so_far.results, result)
            return Dispatch(state, buffer, so_far.rounds_done + 1, jnp.all(result.healthy))

        def goes_on(so_far: Dispatch) -> jax.Array:
            over = False if converged is None else converged(so_far.state)
            return (so_far.rounds_done < num_rounds) & so_far.healthy & ~jnp.bool_(over)

        return jax.lax.while_loop(goes_on, body, Dispatch(state, buffer, jnp.int32(0), jnp.bool_(True)))

    return dispatch


def round_key(seed: jax.Array, round_number: jax.Array | int) -> jax.Array:
    """The key of a round: nothing random is carried from round to round."""
    return jax.random.fold_in(jax.random.key(seed), round_number + 1)


def init_key(seed: jax.Array) -> jax.Array:
    """The key of the initialisation and the pre-training, before the first round."""
    return jax.random.fold_in(jax.random.key(seed), 0)


def _aggregate(method: Method, state: State, data, result: CohortResult) -> tuple[State, Metrics, jax.Array]:
    """What arrived becomes the new model. An upload that is not finite is dropped, and counted.

    What a client learned in training it keeps if its upload is used; what it kept of labelling, in any case.

    Returns:
        The state, the metrics, and whether anything could be used: False where all uploads were dropped.
    """
    finished = result.finished
    accepted = result.took_part & all_finite(finished.upload, batch_ndim=1)
    num_qualified = jnp.sum(result.reports[0].qualified, axis=1)
    received = Received(finished.upload, accepted, _sizes(data, result), num_qualified)
    state, aggregated = method.aggregate(state, received)
    own_states = _write_back(state.clients, result.kept, result.clients, result.there)
    own_states = _write_back(own_states, finished.state, result.clients, accepted)
    state = state._replace(clients=own_states)
    uploads, dropped = jnp.sum(result.took_part), jnp.sum(result.took_part & ~accepted)
    metrics = {
        **_means(finished.metrics, accepted),
        **aggregated,
        "uploads": uploads,
        "dropped_uploads": dropped,
        "local_steps": jnp.sum(result.num_steps),
    }
    return state, metrics, (dropped == 0) | (dropped < uploads)


def _sizes(data, result: CohortResult) -> jax.Array:
    """Examples of each row's client, 0 for a row that only fills a device up."""
    return jnp.where(result.there, data.client_size[result.clients], 0)


def _write_back(all_states: Any, new_entries: Any, clients: jax.Array, counted: jax.Array) -> Any:
    """Entries of the cohort's own states, back to their places, from the rows that count: bool [R]."""
    if not new_entries:
        return all_states
    place = jnp.where(counted, clients, jnp.iinfo(jnp.int32).max)
    put = lambda old, new: old.at[place].set(new, mode="drop")  # noqa: E731
    return {**all_states, **{name: jax.tree.map(put, all_states[name], new) for name, new in new_entries.items()}}


def _means(metrics: Metrics, accepted: jax.Array) -> Metrics:
    """The cohort's mean of each metric over the accepted uploads; NaN where there are none."""
    count = jnp.sum(accepted)
    return {name: jnp.sum(jnp.where(accepted, values, 0.0)) / count for name, values in metrics.items()}
