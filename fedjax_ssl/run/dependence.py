"""Which arrays each stage of a server depends on. Its trace shows whether the stage reads clients' data.

No method is listed by name, so methods from outside the library are checked too. One case is not detected: a stage
that reads all of `data.inputs` or `data.visible_labels` without selecting the rows of a client.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from fedjax_ssl.engine.interface import Method, Problem, Received, State
from fedjax_ssl.engine.round import select_of
from fedjax_ssl.ops.trees import repeated

Stage = Callable[..., Any]  # (state, data, received, clients [M]) -> the server's new state, or what it sends


def server_stages(problem: Problem, method: Method) -> dict[str, Stage]:
    """The stages of a method that run at the server, by name. They return the server's part of a state only."""
    key = jax.random.key(0)
    stages = {
        "init": lambda state, data, received, clients: method.init(data, key),
        "select": lambda state, data, received, clients: select_of(problem, method)(state, data, key).clients,
        "server_before": lambda state, data, received, clients: method.server_before(state, data, key),
        "broadcast": lambda state, data, received, clients: method.broadcast(state, data, key),
        "personal": lambda state, data, received, clients: method.personal(state, data, clients, key),
        "aggregate": lambda state, data, received, clients: method.aggregate(state, data, received, key),
        "server_after": lambda state, data, received, clients: method.server_after(state, data, key),
        "statistics": lambda state, data, received, clients: method.statistics(state, data, clients, key),
    }
    if method.personal is None:
        del stages["personal"]
    return {name: lambda *a, f=stage: without_clients(f(*a)) for name, stage in stages.items()}


def some_received(upload: Any, group: Any, number: int) -> Received:
    """A `Received` with `number` rows, none accepted, to trace `aggregate` with; `upload` has leaves [1, ...]."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), upload)
    whole = jnp.zeros(number, jnp.int32)
    return Received(repeated(zeros, number), whole > 0, whole, None if group is None else whole, whole, whole)


def without_clients(result: Any) -> Any:
    """The result of a stage without the clients' part of a state."""
    is_state = lambda node: isinstance(node, State)  # noqa: E731
    return jax.tree.map(lambda node: node._replace(clients={}) if is_state(node) else node, result, is_leaf=is_state)


class Trace(NamedTuple):
    """A traced function."""

    jaxpr: Any  # its operations
    paths: list[str]  # the paths of its arguments' leaves, in the order of the jaxpr's inputs


def trace(stage: Callable[..., Any], *arguments: Any) -> Trace:
    """Traces a function. The arguments are arrays or shapes."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(arguments)]
    return Trace(jax.make_jaxpr(stage)(*arguments).jaxpr, paths)


def reads(traced: Trace) -> set[str]:
    """The paths of the argument leaves that the result depends on."""
    used = _inputs_of(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    return {path for path, is_used in zip(traced.paths, used) if is_used}


def reads_each(traced: Trace) -> list[set[str]]:
    """Like `reads`, for each leaf of the result."""
    number = len(traced.jaxpr.outvars)
    used = (_inputs_of(traced.jaxpr, [place == wanted for place in range(number)]) for wanted in range(number))
    return [{path for path, is_used in zip(traced.paths, one) if is_used} for one in used]


# Calls whose arguments are those of an inner function, with the parameter that holds this function. Every other
# operation counts as reading all of its arguments; a loop only has arguments that it reads.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_vmap_call": "call"}


def _inputs_of(jaxpr: Any, wanted: list[bool]) -> list[bool]:
    """Which inputs the wanted outputs of a traced function depend on."""
    used = {var for var, is_wanted in zip(jaxpr.outvars, wanted) if is_wanted and not isinstance(var, Literal)}
    for equation in reversed(jaxpr.eqns):
        outputs = [var in used for var in equation.outvars]
        if not any(outputs):
            continue
        needed = [True] * len(equation.invars)
        inner = equation.params.get(CALLS.get(equation.primitive.name, ""))
        if inner is not None:
            needed = _inputs_of(inner.jaxpr, outputs)
        used.update(var for var, read in zip(equation.invars, needed) if read and not isinstance(var, Literal))
    return [var in used for var in jaxpr.invars]
