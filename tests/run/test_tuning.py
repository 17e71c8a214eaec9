"""`tune`: the choices that are measured, the one taken, and the runs that use it."""

import contextlib
from unittest import mock

import jax
import pytest

from fedjax_ssl.base.devices import platform, use_platform
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.config import load_config_file
from fedjax_ssl.run import choices, machine, tuning
from fedjax_ssl.run.choices import Choice, recall, remember
from fedjax_ssl.run.experiment import build_experiment, initialise
from fedjax_ssl.run.tuning import STEPS, Measured, cohort_steps, fastest, first_choices, search, tune
from tests.helpers.runs import ROOT, make_tiny_config

SHAPE = (8, 8, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedjax_ssl" / choices.TUNED


def on(name, devices):
    """Pretends that the machine has these devices."""
    stack = contextlib.ExitStack()
    stack.enter_context(use_platform(name))
    stack.enter_context(mock.patch.object(jax, "device_count", lambda: devices))
    return stack


def test_on_a_processor_cores_and_options_are_tried_with_one_lane():
    config = make_tiny_config(clients_per_round=3, num_clients=8)
    options = {"an_option": "1"}
    with on("cpu", 16), mock.patch.object(tuning, "compiler_option_sets", lambda: [{}, options]):
        found = first_choices(config, build_experiment(config), 3)
    assert found == [Choice(1, 1), Choice(1, 1, "", options), Choice(3, 1), Choice(3, 1, "", options)]


@pytest.mark.parametrize(
    ("devices", "jobs", "on_gpu", "on_tpu"),
    [(1, 12, [1, 3, 10, 12], [1, 4, 10, 12]), (8, 12, [1, 2], [1, 2]), (4, 3, [1], [1])],
)
def test_elsewhere_more_and_more_lanes_on_all_devices(devices, jobs, on_gpu, on_tpu):
    config = make_tiny_config(**{"model.name": "cnn"})
    with on("gpu", devices):
        assert first_choices(config, None, jobs) == [Choice(devices, number, "grouped") for number in on_gpu]
    with on("tpu", devices):
        assert first_choices(config, None, jobs) == [Choice(devices, number, "packed") for number in on_tpu]


def table_of(seconds):
    """A measurement that looks up its seconds, and the list of choices that it was asked for."""
    asked = []

    def measure(choice):
        asked.append(choice)
        return Measured(choice, "float32", seconds.get((choice.lanes, choice.lane_form)), 0.0)

    return measure, asked


def test_other_forms_are_tried_around_the_fastest():
    first = [Choice(1, lanes, "grouped") for lanes in (1, 3, 10)]
    measure, asked = table_of({(1, "grouped"): 3.0, (3, "grouped"): 2.0, (3, "im2col"): 1.0, (3, "loop"): 4.0})
    measured = search(first, 10, measure)  # ten lanes do not fit
    assert asked == [*first, Choice(1, 3, "loop"), Choice(1, 3, "im2col")]
    assert fastest(measured).choice == Choice(1, 3, "im2col")
    with on("tpu", 1):
        first = [Choice(1, lanes, "packed") for lanes in (1, 3, 10)]
        measure, asked = table_of({(1, "packed"): 3.0, (3, "packed"): 2.0, (3, "loop"): 4.0})
        search(first, 10, measure)
    assert asked == [*first, Choice(1, 3, "grouped"), Choice(1, 3, "loop")]
    # One lane has no forms; those of two lanes are tried if a device has two jobs.
    for jobs, more in ((2, [Choice(1, 2, "loop"), Choice(1, 2, "im2col")]), (1, [])):
        measure, asked = table_of({(1, ""): 1.0})
        assert fastest(search([Choice(1, 1)], jobs, measure)).choice == Choice(1, 1)
        assert asked == [Choice(1, 1), *more]
    with pytest.raises(UserError, match="no choice fits into the memory"):
        search(first, 10, table_of({})[0])


def test_a_choice_is_remembered_for_runs_like_this_one(cache):
    config = make_tiny_config(**{"model.dtype": "float32"})
    assert recall(config, SHAPE) is None
    choice = Choice(1, 2, "im2col", {"an_option": "1"})
    assert remember(config, SHAPE, choice) == cache
    assert recall(config, SHAPE) == choice
    remember(make_tiny_config(clients_per_round=3), SHAPE, Choice(1, 1))
    assert recall(config, SHAPE) == choice and recall(make_tiny_config(clients_per_round=3), SHAPE) == Choice(1, 1)
    assert (
        recall(config, (16, 16, 1)) is None and recall(make_tiny_config(**{"model.dtype": "bfloat16"}), SHAPE) is None
    )
    for field, value in {"model.depth": 2, "model.patch": 2, "encoder.name": "vit_s16", "encoder.side": 32}.items():
        others = {"encoder.name": "vit_b16"} if field == "encoder.side" else {}
        plain, other = make_tiny_config(**others), make_tiny_config(**{**others, field: value})
        assert choices._key(plain, SHAPE) != choices._key(other, SHAPE)
    remember(config, SHAPE, Choice(jax.device_count() + 1, 1))  # as from a machine with more devices
    assert recall(config, SHAPE) is None
    remember(config, SHAPE, choice)
    whole = cache.read_text()
    for damage in ('"lanes": 0', '"lanes": "two"', '"lanes": {}'):
        cache.write_text(whole.replace('"lanes": 2', damage))
        assert recall(config, SHAPE) is None and damage in cache.read_text()
    cache.write_text("[1")
    assert recall(config, SHAPE) is None
    remember(config, SHAPE, choice)
    assert recall(config, SHAPE) == choice


def test_a_run_takes_it_unless_it_says_otherwise():
    config = make_tiny_config()
    data = build_experiment(config).data
    assert not machine.find_machine(config, data).is_tuned
    remember(config, SHAPE, Choice(1, 2, "loop", {"an_option": "1"}))
    found = machine.find_machine(config, data)
    assert (found.most_lanes, found.lane_form, found.compiler_options) == (2, "loop", {"an_option": "1"})
    assert str(found) == "1 device (cpu), laid out as tune found it to be fastest"
    for field in ("lanes", "devices"):
        named = machine.find_machine(make_tiny_config(**{field: 1}), data)
        assert not named.is_tuned and named.most_lanes == 1


def test_every_job_makes_as_many_steps():
    config = make_tiny_config(num_clients=8, clients_per_round=3)  # 33 images: four batches an epoch, two epochs
    experiment = build_experiment(config)
    state = jax.jit(lambda data: initialise(experiment, data))(experiment.data)
    upload, num_steps = jax.jit(lambda state, data: cohort_steps(experiment, 3, 1, state, data))(state, experiment.data)
    assert num_steps.tolist() == [STEPS] * 3 and STEPS < 2 * 4
    moved = jax.tree.map(
        lambda new, old: abs(new - old).max(axis=range(1, new.ndim)), upload.model.params, state.model.params
    )
    assert all((leaf > 0).all() for leaf in jax.tree.leaves(moved))


def test_what_is_found_is_printed_and_remembered(cache, capsys, monkeypatch):
    config = make_tiny_config(num_clients=8, clients_per_round=3)
    monkeypatch.setattr(tuning, "first_choices", lambda *_: [Choice(1, 1)])
    monkeypatch.setattr(tuning, "search", lambda first, jobs, measure: [measure(first[0])])
    measured = tune(config, repeats=1)
    assert [(one.choice, one.dtype) for one in measured] == [(Choice(1, 1), "float32"), (Choice(1, 1), "bfloat16")]
    assert all(one.seconds > 0 for one in measured)
    assert recall(config, SHAPE) == Choice(1, 1)
    printed = capsys.readouterr().out
    assert "| 1 device, 1 lane on each | float32 |" in printed and f"take it from now on ({cache})" in printed


def test_a_backbone_of_one_dtype_is_measured_in_it_alone(cache, capsys, monkeypatch):
    def refuse(config):
        raise UserError("takes no keyword dtype")

    monkeypatch.setattr(tuning, "first_choices", lambda *_: [Choice(1, 1)])
    monkeypatch.setattr(tuning, "search", lambda first, jobs, measure: [measure(first[0])])
    monkeypatch.setattr(tuning, "time_steps", lambda _, choice, **__: Measured(choice, "float32", 0.1, 1.0))
    monkeypatch.setattr(tuning, "build_experiment", refuse)
    config = make_tiny_config()
    assert len(tune(config, repeats=1)) == 1 and recall(config, SHAPE) == Choice(1, 1)
    assert "| 1 device, 1 lane on each | float32 | 100 | 1.00 |" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["configs/quickstart_text.py", "configs/quickstart_table.py"])
def test_inputs_without_channels_fill_none_on_a_tpu(name):
    with use_platform("tpu"):
        assert machine.most_lanes(load_config_file(str(ROOT / name))) is None


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"method": "server_only"}, "trains no clients: there is nothing to tune"),
        ({"lanes": 2}, "devices and lanes are what tune looks for"),
    ],
)
def test_what_cannot_be_tuned(fields, line):
    with pytest.raises(UserError, match=line):
        tune(make_tiny_config(**fields))


def test_programs_are_for_the_platform_of_the_machine():
    here = machine.machine_of(Choice(1, 1), make_tiny_config())
    with machine.use(here._replace(platform="tpu")):
        assert platform() == "tpu"
    assert platform() == here.platform == jax.default_backend()
