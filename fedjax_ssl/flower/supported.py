"""Checks that a run can be a real federation, in which server and clients do not read each other's images or memory.

No method is listed by name. Every stage is traced. The trace shows which arrays its result depends on, and whether it
uses the tables of images and labels other than by rows. It does not always show that these rows are of the stage's own
side.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.tracing import one_job
from fedjax_ssl.run.dependence import Trace, reads, server_stages, some_received, trace, without_clients
from fedjax_ssl.run.experiment import Experiment, make_method
from fedjax_ssl.server.statistics import Sums

# What a side may not read -> what it would do: fields of the data, [1], and of the state, [0], in a traced stage.
NOT_AT_SERVER = {
    "[1].client_index": "reads clients' images or labels at the server",  # only this says which images a client has
    "[0].clients": "reads clients' memory at the server",
}
NOT_AT_CLIENTS = {
    f"[1].{field}": "depends on images of the server"
    for field in ("server_index", "validation_index", "test_inputs", "test_labels", "unknown_inputs")
}
# Tables of which a side has only its own rows, and operations that read rows of their first argument, at indices from
# the others.
TABLES = ("inputs", "visible_labels")
ROWS = ("gather", "dynamic_slice")


def check_supported(experiment: Experiment) -> None:
    """Checks that a run can be split into a server and clients that see only each other's messages.

    Raises UserError if it cannot; the message says why.
    """
    problem, method, data = experiment.problem, experiment.method, experiment.data
    config, state, name = problem.config, experiment.state_shape, problem.config.method
    mixes = problem.network.normalisation == "static" and config.model.statistics == "all_mixed"
    for words, is_so in {
        f"method={name} has no clients, so there is nothing for Flower to do": not method.phases,
        "model.statistics='all_mixed' mixes the images of all clients in a batch, which no client can do; known: "
        "server, cohort, all, or model.normalisation='running'": mixes,
        "eval_measures has 'shots', which counts the true labels of all clients; leave it out": (
            "shots" in config.eval_measures
        ),
    }.items():
        if is_so:
            raise UserError(words)

    selection, sent, cohort = jax.eval_shape(
        lambda state, data: ((job := one_job(problem, method, state, data))[0].clients, *job[1:]), state, data
    )
    train = functools.partial(train_cohort, method.phases, lanes=0, label=method.label)
    result = jax.eval_shape(train, sent, data, cohort)
    received = jax.eval_shape(lambda: some_received(result.upload, result.group, len(selection)))
    # With Flower, the first state uses the labels that clients tell, and statistics use the clients' sums.
    first = make_method(problem._replace(told_labels=jnp.zeros(problem.num_classes)))
    zeros = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), state.model.batch_stats)
    gathered = make_method(problem, gathered=Sums(zeros, jnp.zeros(1))) if zeros else method
    stages = server_stages(problem, method) | {
        "init": server_stages(problem, first)["init"],
        "statistics": server_stages(problem, gathered)["statistics"],
    }
    for stage, function in stages.items():
        traced = trace(function, state, data, received, selection)
        _check(f"method={name}: its stage {stage}", traced, NOT_AT_SERVER)

    def work(sent, data, cohort):
        result = train_cohort(method.phases, sent, data, cohort, 1, label=method.label)
        return result.upload, result.memory_of_labels, result.memory_of_steps, result.num_steps

    def first_memory(_, data):
        return method.init(data, jax.random.key(0)).clients

    _check(f"method={name}: its clients' work", trace(work, sent, data, cohort), NOT_AT_CLIENTS)
    _check(f"method={name}: its clients' first memory", trace(first_memory, (), data), NOT_AT_CLIENTS)


def asks_for_labels(experiment: Experiment) -> bool:
    """Whether a method's first state depends on clients' labels, whose number in each class nodes must then tell."""
    key, method = jax.random.key(0), experiment.method
    traced = trace(lambda data: without_clients(method.init(data, key)), experiment.data)
    return "[0].client_index" in reads(traced)


def _check(who: str, traced: Trace, forbidden: Mapping[str, str]) -> None:
    """Raises a UserError if a stage reads what is forbidden, or a table of which each side has only rows of its own."""
    does = [what for start, what in forbidden.items() if any(path.startswith(start) for path in reads(traced))]
    does += [
        f"reads data.{name} as a whole, of which each side has only rows of its own" for name in used_whole(traced)
    ]
    if does:
        raise UserError(f"{who} {does[0]}; see docs/reference/flower.md")


def used_whole(traced: Trace) -> list[str]:
    """The tables that a stage reads other than by row indices, such as with a mask or a mean over all rows.

    The stage's second argument is the federation's data. It does not check where the indices come from.
    """
    jaxpr, paths = traced
    return [name for name in TABLES if _is_used_whole(jaxpr, [path == f"[1].{name}" for path in paths])]


def _is_used_whole(jaxpr: Any, is_table: list[bool]) -> bool:
    tables = {var for var, is_one in zip(jaxpr.invars, is_table) if is_one}
    read = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    if tables & read:
        return True
    for equation in reversed(jaxpr.eqns):
        if read.isdisjoint(equation.outvars):
            continue  # only its shape is used
        read.update(var for var in equation.invars if not isinstance(var, Literal))
        given = [not isinstance(var, Literal) and var in tables for var in equation.invars]
        if not any(given) or (equation.primitive.name in ROWS and not any(given[1:])):
            continue
        # A loop's first arguments are constants of its condition. The body of a loop and the branches of a condition
        # take the last arguments; other calls take all.
        of_condition = equation.params.get("cond_nconsts", 0)
        inner = [
            getattr(one, "jaxpr", one)
            for name, value in equation.params.items()
            for one in (value if isinstance(value, tuple) else (value,))
            if hasattr(one, "eqns") and name != "cond_jaxpr"
        ]
        if any(given[:of_condition]) or not inner:
            return True
        if any(_is_used_whole(each, given[-len(each.invars) :]) for each in inner):
            return True
    return False
