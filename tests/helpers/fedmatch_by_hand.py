"""FedMatch's small problem, in two parts."""

import jax
import numpy as np

from fedjax_ssl.methods import METHODS
from tests.helpers.small_problem import CLASSES, PIXELS, mirrored, small_problem

KEY = jax.random.key(0)
ENTRIES = 2 * (CLASSES + PIXELS * CLASSES)  # of sigma and psi


def build(labels, weak=mirrored, threshold=None, **fields):
    """A problem with labels at 'clients' or at the 'server', and its method."""
    fields = {f"fedmatch.{name}": value for name, value in fields.items()}
    fields["confidence.threshold"] = threshold
    size = 2 if labels == "clients" else 4
    problem = small_problem("fedmatch", weak=weak, **{"data.labels": labels, "client.batch_size": size, **fields})
    return problem, METHODS["fedmatch"].factory(problem)


def random_params(problem, seed):
    return problem.network.init(jax.random.key(seed)).params


def numbers(tree):
    """A pytree as one vector; `jax.vmap` gives rows of leaves [R, ...] as a table."""
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
