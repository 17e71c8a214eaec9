"""Compilation: its time is remembered and shown at the next start of a similar run; only whole programs are kept."""

import os
from unittest import mock

import jax
import numpy as np
import pytest

from fedjax_ssl.run import choices, programs
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.machine import remove_torn
from fedjax_ssl.run.observe.clock import doing
from tests.helpers.runs import make_tiny_config


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not choices.is_cached_here()
    monkeypatch.setattr(programs, "is_cached_here", lambda: True)
    return tmp_path


def test_a_start_says_how_long_compiling_took_when_the_cache_did_not_have_it(cache, monkeypatch, capfd):
    experiment, clock = build_experiment(make_tiny_config()), iter([0.0, 22.4, 23.0, 30.0, 33.0, 40.0, 60.5, 61.0])
    monkeypatch.setattr(programs.time, "monotonic", lambda: next(clock))
    compiled = {"the first state": 1, "the rounds": 2, "the outputs on test images": 3}
    known = "compiling (about 22 s, or less if the cache has these programs)"
    for said, cached in (("compiling (a later", set()), (known, set(compiled)), (known, {"the first state"})):
        monkeypatch.setattr(programs, "_compile", lambda *_, cached=cached: (compiled, cached))
        programs.compile_program(mock.Mock(), [experiment], True, None)
        assert capfd.readouterr().err.startswith(said)
    shape = experiment.data.inputs.shape[1:]
    assert choices.recall_seconds(experiment.problem.config, shape) == 20.5  # not the 3 s of a start from the cache
    assert choices.recall_seconds(experiment.problem.config, (9, 9, 1)) is None


def test_remembered_seconds_are_few_and_a_damaged_file_is_as_none(cache, tmp_path, monkeypatch):
    config, file = make_tiny_config(), tmp_path / "fedjax_ssl" / "compiled.json"
    file.parent.mkdir()
    for text in ("[", "[1]", "3", '{"a": '):
        file.write_text(text)
        assert choices.recall_seconds(config, (8, 8, 1)) is None
        choices.remember_seconds(config, (8, 8, 1), 5.0)
        assert choices.recall_seconds(config, (8, 8, 1)) == 5.0
    monkeypatch.setattr(choices, "MOST_KEPT", 2)
    for side in (1, 2, 3):
        choices.remember_seconds(config, (side, side, 1), side)
    assert [choices.recall_seconds(config, (side, side, 1)) for side in (8, 1, 2, 3)] == [None, None, 2, 3]
    monkeypatch.setattr(choices, "replace_file", mock.Mock(side_effect=OSError(28, "full")))
    choices.remember_seconds(config, (8, 8, 1), 5.0)


@pytest.fixture
def jax_cache(tmp_path):
    """A folder in which JAX caches every program."""
    own = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: jax.config.values[name] for name in own}

    def use(settings):
        for name, value in settings.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()

    use(own)
    yield tmp_path
    use(before)


def test_compilers_know_what_the_cache_had(jax_cache):
    def names(*factors):
        with programs.Compilers() as compilers, doing("compiling") as task:
            for factor in factors:
                lowered = jax.jit(lambda x, factor=factor: x * factor + 1).lower(np.zeros(7))
                compilers.compile(f"times {factor}", lowered, aside=factor == 2)
            compilers.wait(task)
        return compilers.from_cache

    assert names(2, 3) == set()
    assert names(2, 3, 4) == {"times 2", "times 3"}


def test_programs_that_a_kill_has_cut_short_are_compiled_and_kept_again(jax_cache):
    """JAX cannot read such a file and does not replace it."""

    def compiled():
        jax.jit(lambda x: x * 3 + 1).lower(np.zeros(7)).compile()
        (entry,) = jax_cache.glob("*-cache")
        return entry

    remove_torn(jax_cache)
    entry = compiled()
    whole = entry.read_bytes()
    for kept in (whole[:-9], b""):
        entry.write_bytes(kept)
        with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
            assert compiled().read_bytes() == kept
        remove_torn(jax_cache)
        assert not entry.exists()
        assert len(compiled().read_bytes()) > len(whole) // 2
    remove_torn(jax_cache)
    assert entry.exists()
    entry.write_bytes(b"")
    os.utime(entry, (0, 0))  # older than the last check
    remove_torn(jax_cache)
    assert entry.exists()
