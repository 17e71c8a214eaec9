"""What is remembered of compiling: its seconds, which the next start of such a run says, and whole programs alone."""

import os
from unittest import mock

import jax
import numpy as np
import pytest

from fedjax_ssl.run import choices, programs
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.machine import remove_torn
from tests.helpers.runs import make_tiny_config


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A user's cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not choices.is_cached_here()
    monkeypatch.setattr(programs, "is_cached_here", lambda: True)
    return tmp_path


def test_a_start_says_how_long_compiling_took_the_last_time(cache, monkeypatch, capfd):
    experiment, clock = build_experiment(make_tiny_config()), iter([0.0, 22.4, 30.0, 40.0, 43.0, 50.0])
    monkeypatch.setattr(programs.time, "monotonic", lambda: next(clock))
    compiled = {"the first state": 1, "the rounds": 2, "the outputs on test images": 3}
    monkeypatch.setattr(programs, "_compile", lambda *_: compiled)
    for said in ("compiling (a later", "compiling (last time this took 22 s; a later"):
        programs.compile_program(mock.Mock(), [experiment], True, None)
        assert capfd.readouterr().err.startswith(said)
    shape = experiment.data.inputs.shape[1:]
    assert choices.recall_seconds(experiment.problem.config, shape) == 3.0
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


def test_programs_that_a_kill_has_cut_short_are_compiled_and_kept_again(tmp_path):
    """JAX reads such a file in vain, and writes none in its place."""
    own = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in own}
    jax.config.update(own[0], str(tmp_path))
    jax.config.update(own[1], 0.0)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()

    def compiled():
        jax.jit(lambda x: x * 3 + 1).lower(np.zeros(7)).compile()
        (entry,) = tmp_path.glob("*-cache")
        return entry

    try:
        remove_torn(tmp_path)
        entry = compiled()
        whole = entry.read_bytes()
        for kept in (whole[:-9], b""):
            entry.write_bytes(kept)
            with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
                assert compiled().read_bytes() == kept
            remove_torn(tmp_path)
            assert not entry.exists()
            assert len(compiled().read_bytes()) > len(whole) // 2
        remove_torn(tmp_path)
        assert entry.exists()
        entry.write_bytes(b"")
        os.utime(entry, (0, 0))  # looked at before
        remove_torn(tmp_path)
        assert entry.exists()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()
