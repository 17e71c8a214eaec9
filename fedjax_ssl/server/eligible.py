"""Rounds in which only some clients are eligible. The others neither send nor receive anything."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import (
    Broadcast,
    Cohort,
    Jobs,
    Method,
    Phase,
    Previous,
    Problem,
    Selection,
    State,
    WireBytes,
)
from fedjax_ssl.learning.trees import tree_bytes, where_rows


def only_eligible(problem: Problem, method: Method, eligible: Callable[[State, FederatedData], jax.Array]) -> Method:
    """Restricts the rounds of a method to eligible clients, drawn uniformly and without replacement.

    A round has room for `clients_per_round` of them. If fewer are eligible, other clients fill the rows; they get no
    message and take no part.

    Args:
        problem: the run's.
        method: without a `personal` message and `wire_bytes` of its own.
        eligible: (state, data) -> bool [K].
    """

    def select(state: State, data: FederatedData, key: jax.Array) -> Selection:
        chosen = eligible(state, data)
        places = jax.random.uniform(key, chosen.shape) + chosen  # eligible clients get 1 or more, the others less
        return Selection(jax.lax.top_k(places, problem.config.clients_per_round)[1])

    return method._replace(
        select=select,
        personal=lambda state, data, clients, key: eligible(state, data)[clients],
        phases=tuple(_of_eligible(phase) for phase in method.phases),
        wire_bytes=WireBytes(
            down=lambda sent, is_eligible: jnp.where(is_eligible, float(tree_bytes(sent)), 0.0),
            up=lambda upload: jnp.float32(tree_bytes(upload)),
        ),
    )


def labelled_clients(data: FederatedData) -> jax.Array:
    """bool [K], the clients with a labelled image."""
    return data.labelled_size > 0


def _of_eligible(phase: Phase) -> Phase:
    """A phase in which clients that are not eligible have no steps and take no part."""

    def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
        jobs, is_eligible = phase.prepare(received, data, cohort, previous), cohort.personal
        report = jobs.report
        if report is not None:
            report = report._replace(qualified=report.qualified & is_eligible[:, None])
        return jobs._replace(
            num_steps=jnp.where(is_eligible, jobs.num_steps, 0),
            takes_part=None if jobs.takes_part is None else is_eligible & jobs.takes_part,
            report=report,
            own={name: where_rows(is_eligible, new, cohort.own[name]) for name, new in jobs.own.items()},
        )

    return phase._replace(prepare=prepare)
