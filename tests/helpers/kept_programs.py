"""Keeps compiled programs for later runs of the same process with the same programs.

Most runs in tests are about files, signals or output, and repeat the run of `tests.helpers.stub` or the tiny run of
`tests.helpers.runs`; tracing and lowering take most of their time. Runs of several processes, other methods and rules
from files, and tests that replace a traced part, compile as usual. A test file asks for `quick_runs` of conftest.py.
"""

import contextlib
from unittest import mock

import jax

from fedjax_ssl.base.imports import is_own
from fedjax_ssl.config import flatten
from fedjax_ssl.data.sources import dataset_facts
from fedjax_ssl.methods import METHODS
from fedjax_ssl.run.programs import compile_program
from tests.helpers.runs import TINY_BACKBONE
from tests.helpers.stub import STUB, STUB_BACKBONE

BUILT_IN = dict(METHODS)
# No program depends on these fields; what depends on the seed is in its data.
NOT_IN_PROGRAMS = ("checkpoint_every", "seed", "seeds")
# Methods from files whose programs depend on the configuration alone; a test file may add its own.
OWN = {STUB}
READ_THE_LAST_ROUND = ("fedcon", "fedrgd")  # in their own schedules

_kept = {}


@contextlib.contextmanager
def keep_programs():
    """Inside this context, `train` in this process reuses programs of earlier runs."""
    with mock.patch("fedjax_ssl.run.train.compile_program", _compile_or_take):
        yield


def _compile_or_take(machine, experiments, with_init, given):
    key = _key(machine, experiments, given)
    if key is None:
        return compile_program(machine, experiments, with_init, given)
    if key not in _kept or (with_init and _kept[key].init is None):
        _kept[key] = compile_program(machine, experiments, with_init, given)
    else:
        machine.check_memory(list(_kept[key].dispatch.values())[-1])
        if with_init:
            machine.check_memory(_kept[key].init, "the first state")
    return _kept[key]


def _key(machine, experiments, given):
    """What programs depend on; None if they may depend on more than this function knows."""
    first = experiments[0]
    config = first.problem.config
    own_backbone = is_own(config.model.name) and config.model.name not in (TINY_BACKBONE, STUB_BACKBONE)
    if own_backbone or first.problem.own_rule is not None or config.encoder.name != "none":
        return None
    if config.method not in OWN and METHODS.get(config.method) is not BUILT_IN.get(config.method, "not built in"):
        return None
    without = set(NOT_IN_PROGRAMS)
    if config.schedule == "constant" and config.method not in READ_THE_LAST_ROUND and not config.snapshot_rounds:
        without.add("num_rounds")
    fields = {name: value for name, value in flatten(config).items() if name not in without and name[:4] != "log."}
    leaves, structure = jax.tree.flatten((first.state_shape, first.largest, first.hidden_labels, given))
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    others = first.most_test_images, len(experiments), dataset_facts(first.dataset)
    return repr((sorted(fields.items()), machine, shapes, others)), structure
