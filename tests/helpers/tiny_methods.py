"""Tiny runs of any method of the registry."""

import jax

from fedjax_ssl.config import apply_arguments
from fedjax_ssl.methods import METHODS
from fedjax_ssl.run.experiment import build_experiment, initialiser
from fedjax_ssl.run.validation import validate
from tests.helpers.runs import TINY_BACKBONE, make_fedanchor_config

# For all methods. Persistent optimizers give all a memory. Pre-training is the server's training compiled once more.
SMALL = {
    "model.name": TINY_BACKBONE,
    "client.epochs": 1,
    "client.persistent": True,
    "server.persistent": True,
    "server.epochs": 5,
    "server.pretrain_epochs": 0,
}
UNOPTIMISED = {"xla_backend_optimization_level": 0}  # these programs compile longer than they run


def make_config(name, labels=None, tiny=True):
    """A tiny run of a method, with labels at the given place or the method's first."""
    entry = METHODS[name]
    config = make_fedanchor_config(**SMALL, **{"data.labels": labels or entry.settings[0]})
    config = apply_arguments(config, name)
    if tiny:
        config.update_from_flattened_dict({**entry.tiny})
    if config.data.labels != "server":  # the server then has no images for statistics
        config.model.statistics = "cohort"
    validate(config)
    return config


def identity(key, images):
    """An augmentation that leaves images unchanged and compiles to nothing."""
    del key
    return images


def build(config):
    """A run's experiment without augmentations."""
    experiment = build_experiment(config)
    problem = experiment.problem._replace(weak=identity, strong=identity, views=(identity, identity))
    method = METHODS[config.method].factory(problem)
    return experiment._replace(problem=problem, method=method, init=initialiser(problem))


def compiled(function, *arguments):
    """Compiles for arguments of these shapes, in a third less time than with default options."""
    return jax.jit(function).lower(*arguments).compile(compiler_options=UNOPTIMISED)
