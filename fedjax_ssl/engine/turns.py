"""Trains the cohorts of a selection one after the other, and updates their clients' memory."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.base.devices import num_devices
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.cohort import CohortResult, cohort_of, train_cohort
from fedjax_ssl.engine.interface import Broadcast, Method, Selection, State
from fedjax_ssl.engine.untrusted.delivery import present_jobs, transmitted
from fedjax_ssl.engine.untrusted.screening import accepted_rows, longest_update
from fedjax_ssl.ops.trees import with_rows


class Sent(NamedTuple):
    """The server's messages in a round, and the clients that get them."""

    selection: Selection  # the jobs
    broadcast: Broadcast  # to every client
    personal: Any  # the message to each client, leaves [M, ...]; () if there is none


def train_clients(
    options: Any,
    method: Method,
    state: State,
    data: FederatedData,
    sent: Sent,
    key: jax.Array,
    lanes: int,
) -> tuple[State, CohortResult, jax.Array]:
    """Trains the cohorts of a selection one after the other in one program (`lax.scan`).

    Memory that training updated is written back if the upload is accepted; memory that labelling updated is always
    written back. The next turn starts with this memory. `options` is the configuration; `key` is the round's for the
    clients, the same in all turns, since jobs fold client and group into it; the others are as in `train_cohort`.

    Returns:
        The state with the memory after the last turn; the results of all turns, without the memory; and which uploads
        are accepted, bool [R], see `accepted_rows`, whose medians are over one turn. On one device the rows are in the
        order of the selection.
    """
    broadcast, selection = sent.broadcast, sent.selection

    def take_turn(memory, rows):
        clients, group, personal, present = rows
        cohort = cohort_of(state._replace(clients=memory), data, clients, group, personal, key)
        stages = method.phases, broadcast, data, cohort, lanes, present, method.label, method.of_data
        result = train_cohort(*stages)
        with jax.named_scope("aggregate"):
            result = transmitted(options, result, broadcast, data, memory, key)
            accepted = accepted_rows(result, broadcast, longest_update(options))
            memory = _write_back(data, memory, result.memory_of_labels, result, result.present)
            memory = _write_back(data, memory, result.memory_of_steps, result, accepted)
        return memory, (result._replace(memory_of_labels={}, memory_of_steps={}), accepted)

    present = present_jobs(options, selection, key)
    if selection.turns == 1:
        everyone = selection.clients, selection.group, sent.personal, present
        memory, (result, accepted) = take_turn(state.clients, everyone)
        return state._replace(clients=memory), result, accepted
    num_rows = len(selection.clients) // selection.turns
    group = jnp.repeat(jnp.arange(selection.turns), num_rows) if selection.group is None else selection.group
    rows = jax.tree.map(
        lambda leaf: leaf.reshape(selection.turns, num_rows, *leaf.shape[1:]),
        (selection.clients, group, sent.personal, present),
    )
    memory, (results, accepted) = jax.lax.scan(take_turn, state.clients, rows)
    lane_steps = jnp.sum(results.lane_steps)
    job = results.job + num_rows * jnp.arange(selection.turns)[:, None]
    merged = jax.tree.map(_merge_turns, results._replace(job=job, lane_steps=None))
    return state._replace(clients=memory), merged._replace(lane_steps=lane_steps), _merge_turns(accepted)


def _merge_turns(leaf: jax.Array) -> jax.Array:
    """Reshapes [turns, R, ...] to [turns * R, ...]. With several devices rows of the turns alternate, so that each row
    stays on its device."""
    if num_devices() > 1:
        leaf = jnp.swapaxes(leaf, 0, 1)
    return leaf.reshape(-1, *leaf.shape[2:])


def _write_back(
    data: FederatedData, memory: Mapping[str, Any], entries: Mapping[str, Any], result: CohortResult, counted: jax.Array
) -> Mapping[str, Any]:
    """Writes entries of the cohort's memory back, from the rows `counted`, bool [R].

    If a client has several such rows, the last one in the order of the selection is written.
    """
    if not entries:
        return memory
    same = result.clients[:, None] == result.clients[None, :]
    is_later = counted[None, :] & (result.job[None, :] > result.job[:, None])
    last = counted & ~jnp.any(same & is_later, axis=1)
    old = {name: memory[name] for name in entries}
    return {**memory, **with_rows(old, data.place(result.clients), entries, last)}
