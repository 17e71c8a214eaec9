"""Shapes of a round's messages and jobs, by tracing: what one client receives, does and sends. Computes nothing."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.cohort import cohort_of, train_cohort
from fedjax_ssl.engine.interface import Broadcast, Cohort, Method, Problem, Selection, State
from fedjax_ssl.engine.round import select_of
from fedjax_ssl.engine.turns import Sent


def num_jobs(problem: Problem, method: Method, state: State, data: FederatedData) -> int:
    """The number of jobs that can train side by side: the rows of one turn of a `Selection`. Only traces shapes."""
    drawn: list[Selection] = []
    select = select_of(problem, method)
    jax.eval_shape(lambda state, data: drawn.append(select(state, data, jax.random.key(0))), state, data)
    return len(drawn[0].clients) // drawn[0].turns


class Exchange(NamedTuple):
    """The messages that one client receives and sends in a round, as shapes."""

    selection: Selection  # the jobs of the round
    broadcast: Broadcast  # the message to all clients
    personal: Any  # the message to the client, leaves [...]
    upload: Any  # what the client sends, leaves [...]


def trace_exchange(problem: Problem, method: Method, state: State, data: FederatedData) -> Exchange:
    """Traces the messages of a round as shapes; computes nothing."""
    told: list[Exchange] = []

    def exchange(state: State, data: FederatedData):
        selection, broadcast, cohort = one_job(problem, method, state, data)
        uploads = train_cohort(method.phases, broadcast, data, cohort, lanes=0, label=method.label).upload
        told.append(exchange_of(Sent(selection, broadcast, cohort.personal), uploads))

    jax.eval_shape(exchange, state, data)
    return told[0]


def exchange_of(sent: Sent, uploads: Any) -> Exchange:
    """The messages of one client in a round that is being traced, see `make_round`."""
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # noqa: E731
    jobs = sent.selection
    clients, group, broadcast = jax.tree.map(shape, (jobs.clients, jobs.group, sent.broadcast))
    of_one = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)  # noqa: E731
    personal, upload = jax.tree.map(of_one, (sent.personal, uploads))
    return Exchange(Selection(clients, group, jobs.turns), broadcast, personal, upload)


def one_job(problem: Problem, method: Method, state: State, data: FederatedData) -> tuple[Selection, Any, Cohort]:
    """A round's selection, its broadcast, and a cohort of one job, for tracing what one client does."""
    key, client = jax.random.key(0), jnp.zeros((1,), jnp.int32)
    selection = select_of(problem, method)(state, data, key)
    group = client if selection.turns > 1 and selection.group is None else selection.group
    personal = () if method.personal is None else method.personal(state, data, client, key)
    cohort = cohort_of(state, data, client, None if group is None else group[:1], personal, key)
    return selection, method.broadcast(state, data, key), cohort._replace(step_key=key)
