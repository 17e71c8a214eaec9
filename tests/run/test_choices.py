"""What a machine's cache remembers of earlier starts: how long compiling took."""

import jax
import pytest

from fedjax_ssl.run import choices, programs
from fedjax_ssl.run.experiment import build_experiment
from tests.helpers.runs import make_tiny_config


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return choices.cache_folder()


def test_a_start_says_how_long_compiling_took_the_last_time(cache, monkeypatch, capfd):
    experiment, clock = build_experiment(make_tiny_config()), iter([0.0, 0.0, 22.4, 30.0, 40.0, 40.0, 43.0, 50.0])
    monkeypatch.setattr(programs, "uses_own_cache", lambda: True)
    monkeypatch.setattr(programs.time, "monotonic", lambda: next(clock))
    compiled = {"the first state": 1, "the rounds": 2, "the outputs on test images": 3}
    monkeypatch.setattr(programs, "_compile", lambda *_: compiled)

    class Machine:
        def check_memory(self, *_):
            pass

    for said in ("compiling (a later", "compiling (last time this took 22 s; a later"):
        programs.compile_program(Machine(), [experiment], True, None)
        assert capfd.readouterr().err.startswith(said)
    shape = experiment.data.inputs.shape[1:]
    assert choices.recall_seconds(experiment.problem.config, shape) == 3.0
    assert choices.recall_seconds(experiment.problem.config, (9, 9, 1)) is None


def test_remembered_seconds_are_few_and_a_damaged_file_is_as_none(cache, monkeypatch):
    config, file = make_tiny_config(), cache / "compiled.json"
    file.parent.mkdir()
    for text in ("[", "[1]", "3", '{"a": '):
        file.write_text(text)
        assert choices.recall_seconds(config, (8, 8, 1)) is None
        choices.remember_seconds(config, (8, 8, 1), 5.0)
        assert choices.recall_seconds(config, (8, 8, 1)) == 5.0
    monkeypatch.setattr(choices, "MOST_KEPT", 2)
    for side in (1, 2, 3):
        choices.remember_seconds(config, (side, side, 1), side)
    assert [choices.recall_seconds(config, (side, side, 1)) for side in (1, 2, 3)] == [None, 2.0, 3.0]


def test_a_cache_of_the_user_s_is_not_ours(cache):
    assert not choices.uses_own_cache()  # the tests have one of their own
    assert jax.config.values["jax_compilation_cache_dir"]
