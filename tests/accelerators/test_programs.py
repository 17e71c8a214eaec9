"""Compiles a tiny round of every method for TPUs and a GPU that are not here; runs nothing.

`make test-accelerators`; a part: `pytest tests/accelerators -k 'tpu and 1-chip and fedanchor'`.
"""

import contextlib

import pytest

from fedjax_ssl.methods import METHODS, NAMES
from tests.accelerators.process import Compiler, accelerators, is_number


def kinds(name):
    """(variant, labels) for each place of the labels, and for each variant that sets more than numbers."""
    entry = METHODS[name]
    words = {
        variant: not all(is_number(value) for value in fields.values()) for variant, fields in entry.variants.items()
    }
    return [("", labels) for labels in entry.settings] + [(variant, None) for variant in words if words[variant]]


KINDS = [pytest.param(name, *kind, id=f"{name}-{kind[0] or kind[1]}") for name in NAMES for kind in kinds(name)]


@pytest.fixture(scope="module")
def compile_for():
    """(target, chips, program) -> the output of `accelerators.describe`, cached."""
    with contextlib.ExitStack() as stack:
        compilers, found = {}, {}

        def ask(target, chips, **program):
            if accelerators.missing(target):
                pytest.skip(accelerators.missing(target))
            key = (target, chips, *sorted(program.items()))
            if key not in found:
                if (target, chips) not in compilers:
                    compilers[target, chips] = stack.enter_context(Compiler(target, chips))
                found[key] = compilers[target, chips](**program)
            return found[key]

        yield ask


@pytest.mark.slow
@pytest.mark.parametrize("chips", [1, 4], ids=["1-chip", "4-chips"])
@pytest.mark.parametrize(("name", "variant", "labels"), KINDS)
def test_a_round_compiles_for_a_tpu(compile_for, name, variant, labels, chips):
    program = {"method": name, "variant": variant, "labels": labels, "model": "", "part": "dispatch", "lanes": 2}
    found = compile_for("v5e", chips, **program)
    assert sum(found["milliseconds_by_stage"].values()) > 0
    assert (found["milliseconds_per_client"] > 0) == (name != "server_only")
    assert bool(found["collectives"]) == (chips > 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_copies_no_image_table_and_has_kernel_gradients_of_its_own_in_lanes(compile_for, name):
    """A cohort with the small CNN in two lanes."""
    part = "dispatch" if name == "server_only" else "step"
    found = compile_for("h100", 1, method=name, variant="", labels=None, model="cnn", part=part, lanes=2)
    assert found["convolutions"] and found["image_table_copies"] == 0
    for kind in found["convolutions_of_a_step"] if name != "server_only" else ():
        way, window, *groups = kind.split()
        assert way != "Forward" or max(map(int, window.split("x"))) < 8, kind
        assert way != "BackwardFilter" or not groups, kind
