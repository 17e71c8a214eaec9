"""What a run would be: its configuration, and how large a round is. Nothing is trained or written."""

import math

import jax
from ml_collections import ConfigDict

from fedjax_ssl.base.fields import flatten
from fedjax_ssl.base.imports import name_of
from fedjax_ssl.config import for_seed
from fedjax_ssl.data import dataset_facts
from fedjax_ssl.data.kinds import kind_of
from fedjax_ssl.methods import METHODS, section_of
from fedjax_ssl.ops.trees import tree_bytes
from fedjax_ssl.records.words import who_has_labels
from fedjax_ssl.run.experiment import Experiment, build_experiment
from fedjax_ssl.run.machine import use_machine
from fedjax_ssl.run.observe.clock import doing
from fedjax_ssl.run.observe.profiling import step_flops
from fedjax_ssl.run.validation import validate
from fedjax_ssl.run.wire import bytes_per_client


def dry_run(config: ConfigDict) -> str:
    """Describes the run of a configuration, of its first seed: a line for each field, then the size of a round.

    Raises a UserError if the configuration or the data cannot be used.
    """
    validate(config)
    config = for_seed(config, (config.seeds or (config.seed,))[0])
    with doing("reading and dividing the data"):
        experiment = build_experiment(config)
    others = METHODS.keys() - {section_of(config.method)}
    fields = flatten(experiment.problem.config)  # with what the data decide
    lines = [f"{name} = {value!r}" for name, value in fields.items() if name.partition(".")[0] not in others]
    return "\n".join([*lines, "", *describe(experiment)])


def describe(experiment: Experiment) -> list[str]:
    """The size of a run's model and of a round, a line each."""
    problem, state, data = experiment.problem, experiment.state_shape, experiment.largest
    config, params = problem.config, jax.tree.leaves(state.model.params)
    parameters = sum(leaf.size for leaf in params)
    lines = [
        f"{name_of(config.method)}: {who_has_labels(config, kind_of(dataset_facts(experiment.dataset)).noun)}",
        experiment.examples,
        f"model: {parameters:,} parameters, {_bytes(tree_bytes(params))}",
    ]
    if not experiment.method.phases:
        return [*lines, "a round: the server alone trains"]
    with doing("tracing a client's step, to count its operations"), use_machine(config):
        traffic = bytes_per_client(problem, experiment.method, state, data)
        flops = step_flops(experiment, state, data)
    sizes = [len(rows) for rows in experiment.partition.client_rows]
    mean = sum(sizes) / len(sizes)
    steps = config.client.epochs * math.ceil(mean / config.client.batch_size)
    several = len(experiment.method.phases) > 1
    first, more = (" of its first phase", "the other phases, ") if several else ("", "")
    more += "tests and the server come on top"
    down = traffic.jobs * traffic.down + traffic.statistics_down
    up = traffic.jobs * traffic.up + traffic.statistics_up
    return [
        *lines,
        f"a round: {traffic.jobs} clients, {_bytes(down)} to them and {_bytes(up)} from them",
        f"a client's step{first}: {flops:,.0f} FLOP, an estimate (the compiler's count before it optimises)",
        f"a round's local training: about {traffic.jobs * steps * flops:,.0f} FLOP, an estimate, if each client "
        f"takes {steps} steps (client.epochs of its {mean:.0f} examples on average); {more}",
    ]


def _bytes(number: float) -> str:
    return f"{number / 1e6:,.2f} MB"
