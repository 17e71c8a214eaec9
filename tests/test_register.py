"""Methods from outside the library: registered, configured and trained like its own; and no trace in other runs."""

import json

import pytest
from ml_collections import ConfigDict

from conftest import make_fedanchor_config as make_tiny_config
from fedjax_ssl import base_config, methods
from fedjax_ssl.config import apply_arguments, complete, for_seed, validate
from fedjax_ssl.errors import UserError
from fedjax_ssl.records.workdir import Workdir
from fedjax_ssl.run.experiment import build_experiment

pytestmark = pytest.mark.usefixtures("registry")


def register(level=0.5, **options):
    """A method that is `anchors_only`, with a section of its own."""
    defaults = lambda: ConfigDict({"level": level})  # noqa: E731
    methods.register("mine", methods.METHODS["anchors_only"], defaults=defaults, **options)


def test_a_registered_method_has_its_section_and_its_words():
    register(fields={"server.epochs": 2}, variants={"high": {"mine.level": 0.9}})
    config = apply_arguments(base_config(), "mine,strong,high")
    assert (config.method, config.server.epochs, config.mine.level) == ("mine", 2, 0.9)
    validate(config)
    with pytest.raises(UserError, match=r"unknown config argument 'low'; known: .*mine.*high"):
        apply_arguments(config, "low")
    assert methods.registered() == {"mine"}


@pytest.mark.parametrize("double_headed", [False, True])
def test_it_is_built_like_the_library_s_own(double_headed):
    register(double_headed=double_headed)
    experiment = build_experiment(make_tiny_config(method="mine"))
    assert ("anchor_head" in experiment.state_shape.params) == double_headed


def test_registering_again_replaces():
    register(variants={"high": {"mine.level": 0.9}}, double_headed=True)
    methods.register("mine", methods.METHODS["anchors_only"])
    assert "mine" not in base_config() and "mine" not in methods.DOUBLE_HEADED
    assert methods.VARIANTS["mine"] == {}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("semifl", "a method of the library"),
        ("client", "a field of the configuration"),
        ("seed", "a field of the configuration"),
        ("strong", "an argument of configs"),
        ("wrn28_2", "an argument of configs"),
        ("my method", "must be a Python name"),
    ],
)
def test_names_that_mean_something_are_refused(name, why):
    before = dict(methods.METHODS), dict(methods.FIELDS)
    with pytest.raises(UserError, match=why):
        methods.register(name, methods.METHODS["anchors_only"])
    assert before == (methods.METHODS, methods.FIELDS)


def test_a_run_keeps_its_own_method_s_section_alone(tmp_path):
    """Or a run of the library's could not be taken up again without the methods that were registered beside it."""

    def begin(method, folder):
        config = for_seed(make_tiny_config(method=method), 0)
        assert config.is_locked
        workdir = Workdir(folder, config.to_dict())  # refuses another configuration
        workdir.begin(0)
        workdir.close()
        return json.loads((folder / "config.json").read_text())

    begin("semifl", tmp_path / "before")
    register()
    for folder in (tmp_path / "before", tmp_path / "with"):
        assert "mine" not in begin("semifl", folder)
        assert "mine" not in complete(json.loads((folder / "config.json").read_text()))
    own = begin("mine", tmp_path / "own")
    assert own["mine"] == complete(own)["mine"] == {"level": 0.5}
    register(level=0.7)
    begin("semifl", tmp_path / "with")
    with pytest.raises(UserError, match=r"mine\.level: 0\.5 there, 0\.7 here"):
        begin("mine", tmp_path / "own")
