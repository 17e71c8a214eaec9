"""A tiny run of any method of the registry."""

import jax

from fedjax_ssl.config import apply_arguments, validate
from fedjax_ssl.methods import METHODS
from fedjax_ssl.run.experiment import build_experiment, initialiser
from tests.helpers.runs import TINY_BACKBONE, make_fedanchor_config

# Of all methods. Optimisers that survive rounds give everybody something to remember; pre-training is the very training
# that the server does in a round, compiled once more.
SMALL = {
    "model.name": TINY_BACKBONE,
    "client.epochs": 1,
    "client.persistent": True,
    "server.persistent": True,
    "server.epochs": 5,
    "server.pretrain_epochs": 0,
}
UNOPTIMISED = {"xla_backend_optimization_level": 0}  # these programs run for less than they are compiled


def make_config(name, labels=None, tiny=True):
    """A tiny run of a method, with labels where it has them first, or elsewhere."""
    entry = METHODS[name]
    config = make_fedanchor_config(**SMALL, **{"data.labels": labels or entry.settings[0]})
    config = apply_arguments(config, name)
    if tiny:
        config.update_from_flattened_dict({**entry.tiny})
    if config.data.labels != "server":  # which then has no images to take statistics from
        config.model.statistics = "cohort"
    validate(config)
    return config


def identity(key, images):
    """An augmentation that leaves images as they are, and compiles to nothing."""
    del key
    return images


def build(config):
    """The parts of a run, without augmentations."""
    experiment = build_experiment(config)
    problem = experiment.problem._replace(weak=identity, strong=identity, views=(identity, identity))
    method = METHODS[config.method].factory(problem)
    return experiment._replace(problem=problem, method=method, init=initialiser(problem, method))


def compiled(function, *arguments):
    """A function for arguments of these shapes, in a third less time than the compiler takes for a fast program."""
    return jax.jit(function).lower(*arguments).compile(compiler_options=UNOPTIMISED)
