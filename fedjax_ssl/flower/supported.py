"""Which runs a real federation can do: those whose server reads no client's images or memory, and the other way round.

Nothing is listed by name. Every stage is traced, and the trace says which arrays its result depends on, and whether it
takes more of the tables of images and labels than rows. That these rows are its own side's is not seen everywhere.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.interface import Method, Received
from fedjax_ssl.engine.round import one_job, selection
from fedjax_ssl.errors import UserError
from fedjax_ssl.flower.tables import used_whole
from fedjax_ssl.learning.trees import repeated
from fedjax_ssl.run.experiment import Experiment, make_method
from fedjax_ssl.server.statistics import Sums

AT_CLIENTS = ("client_index",)  # without which nothing tells which images are a client's
AT_SERVER = ("anchor_index", "validation_index", "test_images", "test_labels")
DOCS = "see docs/flower.md"
# What befalls messages in a simulation: field -> the only value that it may have.
SIMULATED = {
    "attack.kind": "none",
    "availability.never": 0.0,
    "availability.late": 0.0,
    "compression.kind": "none",
}


def check_supported(experiment: Experiment) -> None:
    """Checks that a run can be one of server and clients that see nothing of each other but messages.

    Raises:
        UserError: it cannot, and why.
    """
    problem, method, data = experiment.problem, experiment.method, experiment.data
    config, state = problem.config, experiment.state_shape
    # How many labels they have clients can tell.
    first = make_method(problem._replace(told_labels=jnp.zeros(problem.num_classes))).init
    name = config.method
    if not method.phases:
        raise UserError(f"method={name} has no clients, so there is nothing for Flower to do")
    if problem.network.normalisation == "static" and config.model.statistics == "all_mixed":
        raise UserError(
            "model.statistics='all_mixed' mixes the images of all clients in a batch, which no client can do; known: "
            "server, cohort, all, or model.normalisation='running'"
        )
    if "shots" in config.eval_measures:
        raise UserError("eval_measures has 'shots', which counts the true labels of all clients; leave it out")

    for field, ordinary in SIMULATED.items():
        section, _, name_of_field = field.partition(".")
        value = config[section][name_of_field]
        if value != ordinary:
            raise UserError(f"{field}={value!r} is of simulated clients; Flower has real ones, and takes {ordinary!r}")
    if config.privacy.noise:
        raise UserError(
            f"privacy.noise={config.privacy.noise} draws its noise from the seed, which every node knows, so that "
            "nobody would be protected; Flower takes 0"
        )

    draw, sent, cohort = jax.eval_shape(
        lambda state, data: ((job := one_job(problem, method, state, data))[0].clients, *job[1:]), state, data
    )
    result = jax.eval_shape(lambda *down: train_cohort(method.phases, *down, 1), sent, data, cohort)
    received = jax.eval_shape(lambda: _received(result, len(draw)))
    key = jax.random.key(0)
    gathered = make_method(problem, gathered=_no_sums(state)) if state.model.batch_stats else method
    stages = {
        "init": lambda state, data, received, clients: first(data, key),
        "select": lambda state, data, received, clients: selection(problem, method)(state, data, key).clients,
        "server_before": lambda state, data, received, clients: method.server_before(state, data, key),
        "broadcast": lambda state, data, received, clients: method.broadcast(state, data, key),
        "personal": lambda state, data, received, clients: _personal(method, state, data, clients, key),
        "aggregate": lambda state, data, received, clients: method.aggregate(state, data, received, key),
        "server_after": lambda state, data, received, clients: method.server_after(state, data, key),
        "statistics": lambda state, data, received, clients: gathered.statistics(state, data, clients, key),
    }
    for stage, function in stages.items():
        arguments = (lambda *a, f=function: _without_clients(f(*a)), state, data, received, draw)
        found = _reads(*arguments)
        for field in AT_CLIENTS:
            if f"[1].{field}" in found:
                raise UserError(
                    f"method={name}: its stage {stage} reads clients' images or labels at the server; {DOCS}"
                )
        if any(path.startswith("[0].clients") for path in found):
            raise UserError(f"method={name}: its stage {stage} reads clients' memory at the server; {DOCS}")
        _check_rows(f"method={name}: its stage {stage}", *arguments)

    def upload(sent, data, cohort):
        result = train_cohort(method.phases, sent, data, cohort, 1)
        return result.upload, result.labelled, result.trained, result.num_steps

    for what, arguments in {
        "work": (upload, sent, data, cohort),
        "first memory": (lambda _, data: method.init(data, key).clients, (), data),
    }.items():
        found = _reads(*arguments)
        for field in AT_SERVER:
            if f"[1].{field}" in found:
                raise UserError(f"method={name}: its clients' {what} depends on images of the server; {DOCS}")
        _check_rows(f"method={name}: its clients' {what}", *arguments)


def asks_for_labels(experiment: Experiment) -> bool:
    """Whether a method begins with the labels that clients were given, whose number in each class they have to tell."""
    key, method = jax.random.key(0), experiment.method
    return "[0].client_index" in _reads(lambda data: _without_clients(method.init(data, key)), experiment.data)


def _check_rows(who: str, stage: Callable, *arguments: Any) -> None:
    for table in used_whole(stage, *arguments):
        raise UserError(f"{who} reads data.{table} as a whole, of which each side has only rows of its own; {DOCS}")


def _personal(method: Method, state: Any, data: Any, clients: Any, key: Any) -> Any:
    return () if method.personal is None else method.personal(state, data, clients, key)


def _received(result: Any, number: int) -> Received:
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), result.upload)
    whole = jnp.zeros(number, jnp.int32)
    group = None if result.group is None else whole
    return Received(repeated(zeros, number), whole > 0, whole, group, whole, whole)


def _no_sums(state: Any) -> Sums:
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state.model.batch_stats)
    return Sums(zeros, jnp.float32(0))


def _without_clients(result: Any) -> Any:
    """The result of a stage, of a state in it the server's part alone."""
    return jax.tree.map(
        lambda node: node._replace(clients={}) if hasattr(node, "clients") and hasattr(node, "server") else node,
        result,
        is_leaf=lambda node: hasattr(node, "clients") and hasattr(node, "server"),
    )


def _reads(stage: Callable, *arguments: Any) -> set[str]:
    """The paths of the arguments' leaves on which the result of a stage depends."""
    jaxpr = jax.make_jaxpr(stage)(*arguments).jaxpr
    used = _inputs_of(jaxpr, [True] * len(jaxpr.outvars))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(arguments)]
    return {path for path, is_used in zip(paths, used) if is_used}


# Calls whose arguments are those of the function inside, by the parameter that holds it. All others are taken to read
# every argument: a loop has no other arguments than those that it reads.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_vmap_call": "call"}


def _inputs_of(jaxpr: Any, wanted: list[bool]) -> list[bool]:
    """Which inputs the wanted outputs of a traced function depend on."""
    used = {var for var, is_wanted in zip(jaxpr.outvars, wanted) if is_wanted and not isinstance(var, Literal)}
    for equation in reversed(jaxpr.eqns):
        outputs = [var in used for var in equation.outvars]
        if not any(outputs):
            continue
        reads = [True] * len(equation.invars)
        inner = equation.params.get(CALLS.get(equation.primitive.name, ""))
        if inner is not None:
            reads = _inputs_of(inner.jaxpr, outputs)
        used.update(var for var, read in zip(equation.invars, reads) if read and not isinstance(var, Literal))
    return [var in used for var in jaxpr.invars]
