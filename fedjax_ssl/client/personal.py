"""Parts of the model that each client keeps for itself, `config.personal_parts`, for any method.

A client puts its own parts into the model that it receives, trains them with the rest, and keeps them in its memory.
Source: FedPer, arXiv 1912.00818.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from fedjax_ssl.base.errors import UserError, known_are
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.engine.interface import (
    Broadcast,
    Cohort,
    Finished,
    Jobs,
    Method,
    Metrics,
    Phase,
    Previous,
    Problem,
    Received,
    State,
)
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import repeated, select, without

OWN_PARTS = "own_parts"  # entry of the clients' memory: parameters of these parts, leaves [K, ...]


def with_own_parts(problem: Problem, method: Method) -> Method:
    """Changes a method so that clients keep the parts `config.personal_parts` of the model for themselves.

    Every client begins with the parts of the initial model. The server's own copy stays unchanged, unless the server
    trains it on its labels; it is not sent. Labels that are made once a round are made by each client's own model, one
    client after the other.

    Raises a UserError if the method has no clients; or when traced, if there is no such part, or messages need it.
    """
    parts, name = tuple(problem.config.personal_parts), problem.config.method
    if not method.phases:
        raise UserError(f"personal_parts={parts} is not for {name}, which has no clients")

    refuse_copies = functools.partial(_refuse_copies, problem)

    def init(data: FederatedData, key: jax.Array) -> State:
        state = method.init(data, key)
        _check_parts(parts, state.model)
        own = repeated(select(state.model.params, parts), len(data.ids))
        return state._replace(clients={**state.clients, OWN_PARTS: own})

    def broadcast(state: State, data: FederatedData, key: jax.Array) -> Broadcast:
        sent = method.broadcast(state, data, key)
        if not isinstance(sent, Broadcast):
            raise UserError(f"personal_parts={parts} is not for {name}: it sends a {type(sent).__name__}, no Broadcast")
        model = _without(sent.model, parts)
        refuse_copies((sent.extra, model.params), "its broadcast")
        return sent._replace(model=model)

    def personal(state: State, data: FederatedData, clients: jax.Array, key: jax.Array) -> Any:
        message = method.personal(state, data, clients, key)
        refuse_copies(message, "its message to each client")
        return message

    def keep(finished: Finished) -> Finished:
        upload = finished.upload
        refuse_copies(upload.metadata, "what its clients tell")
        for part in set(parts) - set(upload.model.params):
            raise UserError(f"personal_parts has {part!r}, which clients of {name} do not upload")
        if len(parts) == len(upload.model.params):
            raise UserError(f"personal_parts={parts} leaves nothing to aggregate: clients of {name} upload no more")
        model = _without(upload.model, parts)
        refuse_copies(model.params, "its clients' upload")
        own = {**finished.own, OWN_PARTS: select(upload.model.params, parts)}
        return finished._replace(upload=upload._replace(model=model), own=own)

    def aggregate(state: State, data: FederatedData, received: Received, key: jax.Array) -> tuple[State, Metrics]:
        # To the method it looks as if every client returned the server's own parts unchanged.
        own, uploads = select(state.model.params, parts), received.uploads
        whole = uploads.model.with_parts(**repeated(own, len(received.clients)))
        state, metrics = method.aggregate(state, data, received._replace(uploads=uploads._replace(model=whole)), key)
        return state._replace(model=state.model.with_parts(**own)), metrics  # undoes the mean's rounding

    *before, last = map(_with_own, method.phases)
    finish = last.finish
    return method._replace(
        init=init,
        label=None if method.label is None else _of_own_models(method.label),
        broadcast=broadcast,
        personal=None if method.personal is None else personal,
        phases=(*before, last._replace(finish=lambda *arguments: keep(finish(*arguments)))),
        aggregate=aggregate,
    )


def _check_parts(parts: tuple[str, ...], model: Model) -> None:
    for part in parts:
        if part not in model.params:
            raise UserError(f"personal_parts has {part!r}{known_are(part, tuple(model.params))}")
        if part in model.batch_stats:
            raise UserError(
                f"personal_parts has {part!r}, whose normalisation statistics are the server's; set "
                "model.normalisation='group'"
            )


def _refuse_copies(problem: Problem, message: Any, of: str) -> None:
    parts, name = problem.config.personal_parts, problem.config.method
    for path, _ in jax.tree_util.tree_flatten_with_path(message)[0]:
        for part in parts:
            if any(part == getattr(key, "key", None) for key in path):
                raise UserError(f"personal_parts={tuple(parts)} is not for {name}: {of} has a {part} as well")


def _without(model: Model, parts: tuple[str, ...]) -> Model:
    return model._replace(params=without(model.params, *parts))


def _whole(received: Broadcast, parts: dict[str, Any]) -> Any:
    """The broadcast with a client's own parts in its model."""
    return received._replace(model=received.model.with_parts(**parts))


def _of_own_models(make: Callable[..., Any]) -> Callable[..., Any]:
    """A `label` or a `prepare` that works with each client's own model, one client after the other."""

    def of_all(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Any:
        def of_one(row: Any) -> Any:
            one, left = jax.tree.map(lambda leaf: leaf[None], row)
            mine = jax.tree.map(lambda leaf: leaf[0], one.own[OWN_PARTS])
            one = one._replace(own=without(one.own, OWN_PARTS), key=cohort.key, step_key=cohort.step_key)
            return jax.tree.map(lambda leaf: leaf[0], make(_whole(received, mine), data, one, left))

        return jax.lax.map(of_one, (cohort._replace(key=None, step_key=None), previous))

    return of_all


def _with_own(phase: Phase) -> Phase:
    """Changes a phase so that every client receives the model with its own parts."""

    def prepare(received: Broadcast, data: FederatedData, cohort: Cohort, previous: Previous | None) -> Jobs:
        jobs = _of_own_models(phase.prepare)(received, data, cohort, previous)
        return jobs._replace(work=(jobs.work, cohort.own[OWN_PARTS]))

    def start(received: Broadcast, data: FederatedData, work: Any, own: Any) -> Any:
        return phase.start(_whole(received, work[1]), data, work[0], without(own, OWN_PARTS))

    def step(received: Broadcast, data: FederatedData, work: Any, carry: Any, index: jax.Array, key: jax.Array) -> Any:
        return phase.step(_whole(received, work[1]), data, work[0], carry, index, key)

    def finish(received: Broadcast, work: Any, carry: Any, num_steps: jax.Array) -> Finished:
        return phase.finish(_whole(received, work[1]), work[0], carry, num_steps)

    return Phase(prepare, start, step, finish)
