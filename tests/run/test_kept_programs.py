"""Programs of earlier starts: what they are known by, and that a start which finds its own gives the same run."""

import functools
import hmac
import os
import pickle
import subprocess
import sys
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl.config import call_in_file
from fedjax_ssl.methods import METHODS
from fedjax_ssl.models import BACKBONES
from fedjax_ssl.models.cnn import SmallCNN
from fedjax_ssl.run import choices, kept_programs, programs
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.machine import use_machine
from tests.helpers.runs import ROOT, make_tiny_config


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The module as the command line has it, with a folder of its own."""
    monkeypatch.setattr(kept_programs, "_is_wanted", False)
    monkeypatch.setattr(kept_programs, "_is_beside_xla", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_programs.use_kept_programs()
    return kept_programs


@functools.cache
def experiment_of(*fields):
    return build_experiment(make_tiny_config(**{"model.name": "cnn", **dict(fields)}))


def key(fields=None, change=lambda experiment: experiment, machine=lambda machine: machine):
    experiment = experiment_of(*(fields or {}).items())
    with use_machine(experiment.problem.config) as found:
        return kept_programs.key_of(machine(found), [change(experiment)])


def test_a_program_is_known_by_all_that_it_depends_on(kept, monkeypatch, tmp_path):
    first = key()
    assert first == key() == key({"log.report": True, "log.tensorboard": False})

    def other_data(experiment):
        images = experiment.data.inputs.at[0, 0, 0, 0].add(1)
        return experiment._replace(data=experiment.data._replace(inputs=images))

    def other_mean(experiment):
        network = experiment.problem.network
        network = network._replace(inputs=network.inputs._replace(mean=(0.125,)))
        return experiment._replace(problem=experiment.problem._replace(network=network))

    others = [
        key({"client.learning_rate": 0.02}),
        key({"seed": 1}),
        key({"num_clients": 9}),
        key(change=other_data),
        key(change=other_mean),
        key(machine=lambda machine: machine._replace(most_lanes=2)),
    ]
    with jax.default_matmul_precision("highest"):
        others.append(key())
    for target, name, value in (
        (kept_programs.hosts, "checksum_of_library", lambda: "another"),
        (kept_programs, "description", lambda: "another"),
        (kept_programs.sys, "version", "another"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(target, name, value)
            others.append(key())
    with monkeypatch.context() as changed:
        changed.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false")
        others.append(key())
    (tmp_path / "helper_of_a_user.py").write_text("VALUE = 1\n")
    with monkeypatch.context() as changed:
        changed.syspath_prepend(tmp_path)
        import helper_of_a_user

        others.append(key())
        (tmp_path / "helper_of_a_user.py").write_text("VALUE = 2\n")
        others.append(key())
        (tmp_path / "helper_of_a_user.py").unlink()
        assert key() is None
        del sys.modules[helper_of_a_user.__name__]
    assert len({first, *others}) == 1 + len(others)
    assert first == key()


def test_what_is_not_kept(kept, monkeypatch):
    class Mine(SmallCNN):
        pass

    assert key() is not None
    with monkeypatch.context() as changed:
        changed.setitem(BACKBONES, "mine", Mine)
        assert key({"model.name": "mine"}) is None
    with monkeypatch.context() as changed:
        changed.setitem(METHODS, "mine", METHODS["supervised"])
        assert key(change=lambda e: e._replace(problem=e.problem._replace(config=_named(e, "mine")))) is None
    with monkeypatch.context() as changed:
        changed.setattr(kept_programs, "_is_wanted", False)  # of a script or a notebook
        assert key() is None
    with monkeypatch.context() as changed:
        changed.setattr(kept_programs.hosts, "count", lambda: 2)
        assert kept_programs.key_of(None, [experiment_of()]) is None


def _named(experiment, method):
    config = experiment.problem.config.copy_and_resolve_references()
    config.method = method
    return config


def new_number():
    """One that no program in XLA's cache has."""
    return float(int.from_bytes(os.urandom(3)))


def compile_one(number):
    return kept_programs.compile_fresh(jax.jit(lambda x: {"y": x * number}).lower(jnp.ones(3)))


def multiply(found):
    return found(jnp.ones(3))["y"].tolist()[0]


def test_programs_are_found_as_they_were_written_or_not_at_all(kept, tmp_path, monkeypatch):
    numbers = new_number(), new_number()
    for name, number in zip(("the rounds", "the first state"), numbers):
        kept.keep("key", name, compile_one(number)[0])
    found = kept.find("key", ["the first state", "the rounds", "the outputs on test images"])
    assert {name: multiply(program) for name, program in found.items()} == {
        "the first state": numbers[1], "the rounds": numbers[0],
    }  # fmt: skip
    assert found["the rounds"].memory_analysis() is not None
    assert kept.find("another", ["the rounds"]) == {} == kept.find(None, ["the rounds"])
    folder = tmp_path / "fedjax_ssl" / "programs"
    file, other = folder / "key-the_rounds", folder / "key-the_first_state"
    whole = file.read_bytes()
    for changed in (whole[:-9], b"", whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], other.read_bytes()):
        file.write_bytes(changed)
        assert kept.find("key", ["the rounds"]) == {}
        file.write_bytes(whole)
    assert kept.find("key", ["the rounds"])
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert kept.find("key", ["the rounds"]) == {}


def test_nothing_is_unpickled_that_others_may_have_written(kept, tmp_path, monkeypatch):
    kept.keep("key", "the rounds", compile_one(new_number())[0])
    folder = tmp_path / "fedjax_ssl" / "programs"
    file, secret = folder / "key-the_rounds", folder / "secret"
    monkeypatch.setattr(kept_programs.pickle, "loads", lambda content: pytest.fail("it was unpickled"))
    files = list(folder.iterdir())
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *files))

    def find():
        return kept.find("key", ["the rounds"])

    for path, mode in ((file, 0o622), (file, 0o660), (secret, 0o640), (folder, 0o777), (tmp_path, 0o777)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert find() == {}, path
        path.chmod(before)
    for path in (file, secret, folder):  # a link to the same
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
        assert find() == {}, path
        path.unlink()
        (tmp_path / "moved").rename(path)
    content = secret.read_bytes()
    secret.write_bytes(bytes(32))
    assert find() == {}
    secret.write_bytes(content)
    forged = zlib.compress(pickle.dumps(("anything", None, None)))
    for start in (b"", bytes(32), hmac.digest(bytes(32), b"key-the_rounds\0" + forged, "sha256")):
        file.write_bytes(start + forged)
        assert find() == {}


def test_the_oldest_go_when_there_are_too_many(kept, tmp_path, monkeypatch):
    program, _ = compile_one(new_number())
    folder = tmp_path / "fedjax_ssl" / "programs"
    for number in range(3):
        kept.keep(f"key{number}", "the rounds", program)
        os.utime(folder / f"key{number}-the_rounds", (number + 1, number + 1))
    size = (folder / "key0-the_rounds").stat().st_size
    monkeypatch.setattr(kept_programs, "MOST_BYTES", 3.5 * size)
    assert kept.find("key0", ["the rounds"])  # and is now the newest
    kept.keep("key3", "the rounds", program)
    monkeypatch.setattr(kept_programs, "MOST_BYTES", 2.5 * size)
    kept.find("key3", [])
    assert sorted(file.name[:4] for file in folder.iterdir()) == ["key0", "key3", "secr"]
    monkeypatch.setattr(kept_programs, "replaced", lambda path: (_ for _ in ()).throw(OSError(28, "full")))
    kept.keep("key4", "the rounds", program)  # is no error
    assert kept.find("key4", ["the rounds"]) == {}


def test_a_start_that_is_interrupted_keeps_what_it_has_compiled(kept):
    """All were kept together: after an interruption XLA's cache had some, and none could be kept ever after."""
    number = new_number()
    lowered = jax.jit(lambda x: {"y": x * number}).lower(jnp.ones(3))
    with programs.Compilers("key") as compilers, pytest.raises(KeyboardInterrupt):
        compilers.compile("the first state", lowered)
        while not kept.find("key", ["the first state"]):
            pass
        raise KeyboardInterrupt
    assert multiply(kept.find("key", ["the first state", "the rounds"])["the first state"]) == number


def test_the_code_of_a_config_file_counts(kept, tmp_path):
    """It may change the library in memory."""
    sys.modules.pop("fedjax_ssl_config_mine", None)  # another test may have loaded a file of that name
    file, found = tmp_path / "mine.py", [key()]
    for value in (1, 2):
        file.write_text(f"def get_config():\n    return {value}\n")
        assert call_in_file(str(file), "get_config") == value
        found.append(key())
    del sys.modules["fedjax_ssl_config_mine"]
    assert len(set(found)) == 3 and key() == found[0]


def test_caches_have_a_bound(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = choices.private_cache("xla", 100)
    for number in range(5):
        (folder / f"{number}-cache").write_bytes(bytes(40))
        os.utime(folder / f"{number}-cache", (number + 1, number + 1))
    assert choices.private_cache("xla", 100) == folder
    assert sorted(file.name[0] for file in folder.iterdir()) == ["3", "4"]
    tmp_path.chmod(0o777)
    assert choices.private_cache("xla", 100) is None


def test_a_program_that_xla_s_cache_had_is_known(kept):
    """On a CPU it can be written, but what is read then does not run."""
    number = new_number()
    assert [compile_one(number)[1] for _ in range(2)] == [True, False]


def test_a_start_says_how_long_compiling_took_the_last_time(kept, monkeypatch, capfd):
    experiment, clock = experiment_of(), iter([0.0, 0.0, 22.4, 30.0, 40.0, 40.0, 43.0, 50.0])
    monkeypatch.setattr(programs.time, "monotonic", lambda: next(clock))
    compiled = {"the first state": 1, "the rounds": 2, "the outputs on test images": 3}
    monkeypatch.setattr(programs, "_compile", lambda *_: compiled)
    monkeypatch.setattr(programs.kept_programs, "key_of", lambda *_: None)
    monkeypatch.setattr(programs, "doing", mock.MagicMock())
    for said in ("compiling (a later", "compiling (last time this took 22 s; a later"):
        programs.compile_program(mock.Mock(), [experiment], True, None)
        assert capfd.readouterr().err.startswith(said)
    shape = experiment.data.inputs.shape[1:]
    assert choices.recall_seconds(experiment.problem.config, shape) == 3.0
    assert choices.recall_seconds(experiment.problem.config, (9, 9, 1)) is None


def test_remembered_seconds_are_few_and_a_damaged_file_is_as_none(kept, tmp_path, monkeypatch):
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


def test_a_second_start_finds_the_first_one_s_programs(tmp_path):
    words = [
        "--config=configs/quickstart.py:server_only,server_labels=20",
        "--config.num_rounds=2",
        "--config.log.report=False",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_NUM_CPU_DEVICES": "2"}

    def start(name):
        command = [sys.executable, "launch.py", *words, f"--workdir={tmp_path / name}"]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr, (tmp_path / name / "metrics.jsonl").read_bytes()

    said, first = start("first")
    assert "compiling (a later start takes it from the cache)" in said
    said, second = start("second")
    assert "compiled by an earlier start" in said and "tracing" not in said and "compiling" not in said
    assert second == first
