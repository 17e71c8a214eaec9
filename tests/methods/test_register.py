"""Methods from outside the library: registered, configured and trained like its own; and no trace in other runs."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from ml_collections import FrozenConfigDict

from fedjax_ssl import base_config, methods
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.config import apply_arguments, for_seed
from fedjax_ssl.methods.entry import Entry
from fedjax_ssl.models.heads import Linear
from fedjax_ssl.records.workdir import Workdir
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.validation import validate
from tests.helpers.runs import make_fedanchor_config as make_tiny_config

pytestmark = pytest.mark.usefixtures("registry")


def register(level=0.5, extra=None, **options):
    """A method that is `server_only`, with a section of its own."""

    def defaults():
        section = methods.Section()
        section.level = methods.share(level)
        if extra is not None:
            section.extra, section.inner = extra, methods.Section()
            section.inner.extra = extra
        return section

    methods.register("mine", methods.METHODS["server_only"].factory, defaults=defaults, **options)


def test_a_registered_method_has_its_section_and_its_words():
    register(fields={"server.epochs": 2}, variants={"high": {"mine.level": 0.9}})
    config = apply_arguments(base_config(), "mine,strong,high")
    assert (config.method, config.server.epochs, config.mine.level) == ("mine", 2, 0.9)
    validate(config)
    with pytest.raises(UserError, match=r"unknown config argument 'low'; known: .*mine.*high"):
        apply_arguments(config, "low")
    assert methods.registered() == {"mine"}


def test_it_is_built_like_the_library_s_own():
    register(heads={"projector": lambda model: functools.partial(Linear, 128)}, embedding="projector")
    experiment = build_experiment(make_tiny_config(method="mine"))
    params = experiment.state_shape.model.params
    assert set(params) == {"backbone", "classifier", "projector"}
    assert params["projector"]["kernel"].shape[-1] == 128
    images = jax.ShapeDtypeStruct((3, 8, 8, 1), "uint8")
    outputs = jax.eval_shape(experiment.problem.network.predict, experiment.state_shape.model, images)
    assert experiment.problem.network.embeddings(outputs).shape == (3, 128)


@pytest.mark.parametrize(("part", "entry", "line"), [
    ("server", jax.random.key(0), "server['x'] is a PRNG key, which no checkpoint can hold: fold keys from"),
    ("clients", jnp.zeros((8, 0)), "clients['x'] has the shape (8, 0): no checkpoint can hold an array without"),
    ("clients", jnp.zeros(3), "clients['x'] has the shape (3,); it needs a row for each client, as many as data.ids"),
])  # fmt: skip
def test_a_first_state_that_no_run_can_keep_is_refused(part, entry, line):
    def build(problem):
        method = methods.METHODS["server_only"].factory(problem)
        return method._replace(init=lambda data, key: method.init(data, key)._replace(**{part: {"x": entry}}))

    methods.register("mine", build)
    with pytest.raises(UserError, match=re.escape(f"method=mine: in its first state {line}")):
        build_experiment(make_tiny_config(method="mine", num_clients=8))


def test_registering_again_replaces_and_a_configuration_gets_the_new_fields():
    register()
    config = base_config()
    config.method, config.mine.level = "mine", 0.1
    register(extra=7)
    validate(config)
    assert config.mine.to_dict() == {"level": 0.1, "extra": 7, "inner": {"extra": 7}} and config.mine.is_locked
    validate(FrozenConfigDict(config))
    entry = Entry(methods.METHODS["server_only"].factory, title="Mine")
    methods.register("mine", entry)
    assert "mine" not in base_config() and methods.METHODS["mine"] is entry


@pytest.mark.parametrize(("options", "line"), [
    ({"settings": ("server", "moon")}, "settings of mine names 'moon'; known: server, clients, some_clients"),
    ({"embedding": "projector"}, "embedding of mine names 'projector'; known: none"),
    ({"fields": {"server.epoch": 2}}, "fields of mine sets server.epoch to 2: no such field"),
    (
        {"variants": {"high": {"mine.level": "h"}}},
        "high of mine sets mine.level to 'h': no such field, or one of another type",
    ),
    ({"variants": {"high": {"mine.level": 2.0}}}, "high of mine: mine.level must be at least 0 and at most 1"),
    ({"tiny": {"client.epochs": 0}}, "tiny of mine: client.epochs must be at least 1, not 0"),
])  # fmt: skip
def test_an_entry_that_names_what_there_is_not_is_refused(options, line):
    with pytest.raises(UserError, match=re.escape(line)):
        register(**options)
    assert "mine" not in methods.METHODS


@pytest.mark.parametrize(("name", "why"), [
    ("semifl", "a method already"),
    ("client", "a field of the configuration"),
    ("strong", "an argument of configs"),
    ("my method", "must be a Python name"),
])  # fmt: skip
def test_names_that_mean_something_are_refused(name, why):
    before = dict(methods.METHODS)
    with pytest.raises(UserError, match=why):
        methods.register(name, methods.METHODS["server_only"])
    assert before == methods.METHODS


def test_a_run_keeps_its_own_method_s_section_alone(tmp_path):
    """Or a run of the library's could not be resumed without the methods that were registered beside it."""

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
        assert "mine" not in json.loads((folder / "config.json").read_text())
    own = begin("mine", tmp_path / "own")
    assert own["mine"] == {"level": 0.5}
    register(level=0.7)
    begin("semifl", tmp_path / "with")
    with pytest.raises(UserError, match=r"mine\.level: 0\.5 there, 0\.7 here"):
        begin("mine", tmp_path / "own")
