"""What the registry says of the methods: entries, sections, settings; and how some are saved."""

import ast
import shutil

import chex
import jax
import numpy as np
import pytest

from fedjax_ssl import base_config, train
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.config import apply_arguments, flatten
from fedjax_ssl.methods import METHODS, NAMES
from fedjax_ssl.methods.entry import check_entry
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.train import checkpoint_interval
from fedjax_ssl.run.validation import validate
from tests.helpers.runs import make_fedanchor_config as make_tiny_config
from tests.helpers.small_problem import federation, small_problem
from tests.helpers.tiny_methods import make_config

NUM_CLIENTS = 8


# --- What the registry says. -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_an_entry_names_what_there_is(name):
    entry = METHODS[name]
    check_entry(name, entry)
    assert entry.title and entry.settings
    assert "profile" in entry.settings or not {"clients", "some_clients"} & set(entry.settings)  # its special cases
    config = apply_arguments(base_config(), name)
    assert config.method == name
    if entry.settings[0] == config.data.labels:
        validate(config)
    for variant, fields in entry.variants.items():
        varied = apply_arguments(base_config(), f"{name},{variant}")
        assert fields.items() <= flatten(varied).items(), variant
        validate(varied)


def test_each_method_s_files_read_every_field_of_its_section(root):
    """A constant in the place of a field would show in no run with the field's default."""
    for name in (name for name in NAMES if METHODS[name].defaults):
        place = root / "fedjax_ssl" / "methods" / name
        files = place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]
        nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
        read = {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in ("options", name)
        }
        assert set(METHODS[name].section().config()) <= read, name


@pytest.mark.parametrize(("name", "labels"), [("semifl", "clients"), ("rscfed", "server")])
def test_labels_where_a_method_knows_none_are_refused(name, labels):
    config = apply_arguments(base_config(), name)
    config.data.labels = labels
    with pytest.raises(UserError, match=f"^data.labels is '{labels}'; known to the method {name}: ") as refused:
        validate(config)
    assert all(repr(known) in str(refused.value) for known in METHODS[name].settings)
    others = str(refused.value).partition("; methods that take it: ")[2].split(", ")
    assert set(others) == {other for other, entry in METHODS.items() if labels in entry.settings} and name not in others


# --- Of some. --------------------------------------------------------------------------------------------------------


def test_centralised_data_are_the_server_s():
    experiment = build_experiment(apply_arguments(make_tiny_config(), "centralised"))
    data = experiment.data
    owned = np.concatenate([experiment.partition.server_index, *experiment.partition.client_rows])
    np.testing.assert_array_equal(np.sort(data.server_index), np.sort(owned))
    np.testing.assert_array_equal(np.asarray(data.visible_labels)[owned], np.asarray(experiment.hidden_labels)[owned])
    assert len(owned) == 40 + NUM_CLIENTS * 33


@pytest.mark.parametrize(("words", "every"), [
    ("fixmatch", 10),
    ("fixmatch,strong", 50),  # an optimiser with momentum for each client
    ("fedtrinet", 50),  # its last model
    ("fedmatch", 50),  # at the server, its last upload
])  # fmt: skip
def test_states_with_a_model_for_each_client_are_checkpointed_less_often(words, every):
    problem = small_problem(words, **{"data.labels": "clients"})
    method = METHODS[problem.config.method].factory(problem)
    state = jax.eval_shape(method.init, federation([[0, -1], [-1]]), jax.random.key(0))
    assert checkpoint_interval(problem.config, state) == every


@pytest.mark.test_all
def test_own_optimisers_are_checkpointed_at_an_interval_of_their_own_and_resumed(tmp_path):
    config = make_config("supervised")
    config.update_from_flattened_dict({"checkpoint_every": 2, "num_rounds": 4})
    state = train(config, tmp_path)
    assert {folder.name for folder in (tmp_path / "checkpoints").glob("[0-9]*") if folder.is_dir()} == {"2", "4"}
    assert set(state.clients) == {"opt_state"} and set(state.server) == {"aggregation", "classification"}
    metrics = (tmp_path / "metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as if it had been killed in round 4
    resumed = train(config, tmp_path)
    chex.assert_trees_all_equal(resumed, state)
    assert (tmp_path / "metrics.jsonl").read_text() == metrics
