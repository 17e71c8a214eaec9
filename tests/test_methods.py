"""What every method of the registry must do: train, the same way each time, blind to hidden labels, by honest bytes."""

import shutil

import chex
import jax
import numpy as np
import pytest

from conftest import TINY_BACKBONE
from conftest import make_fedanchor_config as make_tiny_config
from fedjax_ssl import train
from fedjax_ssl.config import apply_arguments, validate
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.errors import UserError
from fedjax_ssl.methods import FIELDS, METHODS, VARIANTS
from fedjax_ssl.run.experiment import build_experiment, initialise
from fedjax_ssl.run.wire import bytes_per_client

# FedAnchor's contract is in test_fedanchor.py, with steps of its own. Thresholds are low: a tiny run is never sure.
LOW = {
    "semifl.threshold": 0.2,
    "fixmatch.threshold": 0.2,
    "fedil.threshold": 0.2,
    "fedil.successive": 1,
    "client.epochs": 1,
}
SETTINGS = {
    "anchors_only": {},
    "supervised": {"client.proximal": 0.1, "aggregation.optimizer": "fedadam", "aggregation.learning_rate": 0.01},
    "semifl": {"threshold.kind": "freematch"},
    "fixmatch": {"threshold.kind": "client_mean", "fixmatch.server": "parallel"},
    "fedil": {},
}
REVEALED = {"supervised"}


def make_config(method):
    arguments = "semifl,strong" if method == "semifl" else method
    config = apply_arguments(make_tiny_config(**LOW, **{"model.name": TINY_BACKBONE}), arguments)
    config.update_from_flattened_dict(SETTINGS[method])
    validate(config)
    return config


def test_every_method_has_its_settings_here():
    assert {*SETTINGS, "fedanchor"} == set(METHODS) == set(FIELDS) == set(VARIANTS)


@pytest.fixture(scope="module", params=sorted(SETTINGS))
def trained(request):
    """(experiment, the compiled round, states before and after each of two rounds, their results)."""
    experiment = build_experiment(make_config(request.param))
    states, history = [jax.jit(lambda data: initialise(experiment, data))(experiment.data)], []
    round_fn = jax.jit(make_round(experiment.problem, experiment.method, lanes=1))
    for _ in range(2):
        state, result = round_fn(states[-1], experiment.data, experiment.hidden_labels)
        states.append(state)
        history.append(jax.device_get(result))
    return request.param, experiment, round_fn, states, history


def test_two_rounds_train_and_stay_finite(trained):
    method, _, _, states, history = trained
    chex.assert_tree_all_finite((states[-1].params, states[-1].batch_stats, states[-1].clients))
    moved = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), states[0].params, states[-1].params)
    assert all(change > 0 for change in jax.tree.leaves(moved))
    assert "anchor_head" not in states[0].params
    for metrics, _, healthy in history:
        assert healthy and metrics["dropped_uploads"] == 0
        assert metrics["uploads"] == (4 if method != "anchors_only" else 0)
        unfinished = [name for name, value in metrics.items() if not np.isfinite(value)]
        assert unfinished == [], unfinished


def test_rounds_are_deterministic_and_blind_to_hidden_labels(trained):
    """Both rounds: in the second FedIL's clients have their set, and others what they keep."""
    method, experiment, round_fn, states, _ = trained
    permuted = jax.random.permutation(jax.random.key(0), experiment.hidden_labels)
    state = states[0]
    for expected in states[1:]:
        state, _ = round_fn(state, experiment.data, permuted)
        chex.assert_trees_all_equal(state, expected)
    if method in REVEALED:  # the labels are given to it, and only then
        assert np.all(np.asarray(experiment.data.visible_labels) >= 0)
    else:
        visible = np.flatnonzero(np.asarray(experiment.data.visible_labels) >= 0)
        np.testing.assert_array_equal(visible, np.sort(experiment.data.anchor_index))


def test_bytes_are_those_of_the_models_that_travel(trained):
    method, experiment, _, states, _ = trained
    count = lambda tree: sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))  # noqa: E731
    traffic = bytes_per_client(experiment.problem, experiment.method, states[0], experiment.data)
    model = count(states[0].params)
    whole = model + count(states[0].batch_stats)
    models_down = {"anchors_only": 0, "fedil": 2}.get(method, 1)
    assert traffic["down"] == models_down * whole + (4 if models_down else 0)  # and the learning rate
    assert traffic["up"] == (model if models_down else 0)  # 'static' normalisation uploads no statistics


def test_only_the_cohort_s_own_states_change(trained):
    method, _, _, states, _ = trained
    if not states[0].clients:
        pytest.skip(f"the clients of {method} keep nothing here")
    changed = np.zeros(8, bool)
    for old, new in zip(jax.tree.leaves(states[0].clients), jax.tree.leaves(states[1].clients), strict=True):
        changed |= np.any(np.asarray(old != new).reshape(8, -1), axis=1)
    assert changed.sum() == 4


def test_fedil_s_set_grows_and_is_learned_from(trained):
    method, _, _, states, history = trained
    if method != "fedil":
        pytest.skip("of FedIL alone")
    sizes = [int(np.sum(state.clients["credibility"].in_set)) for state in states]
    assert sizes[0] == 0 < sizes[1] <= sizes[2]  # k = 1: a credible label joins at once
    assert history[0].metrics["set_loss"] == 0 < history[1].metrics["set_loss"]
    in_set, later = (state.clients["credibility"].in_set for state in states[1:])
    assert np.all(later | ~in_set)  # nobody leaves
    kept = np.asarray(states[1].clients["credibility"].label)[in_set]
    np.testing.assert_array_equal(np.asarray(states[2].clients["credibility"].label)[in_set], kept)
    norms = [result.metrics["update_norm"] for result in history]
    np.testing.assert_allclose(history[1].metrics["update_norm_average"], np.mean(norms), rtol=1e-5)


@pytest.mark.parametrize(
    "method, fields, words",
    [
        ("fedanchor", {"method": "supervised"}, "data.reveal_labels must be true"),
        ("fixmatch", {"fixmatch.server": "aside"}, "known: alternate, parallel"),
        ("fixmatch", {"fixmatch.label_mode": "odd"}, "known: train, eval"),
        ("fixmatch", {"fixmatch.loss_over": "none"}, "known: batch, confident"),
        ("semifl", {"semifl.label_views": -1}, "label_views"),
        ("semifl", {"threshold.kind": "soft"}, "threshold.kind is 'soft'; known: fixed"),
        ("semifl", {"threshold.momentum": 1.0}, "threshold.momentum"),
        ("semifl", {"aggregation.optimizer": "adamw"}, "aggregation.optimizer is 'adamw'; known: fedavg, fedavgm"),
        ("fedil", {"fedil.count_per": "day"}, "known: epoch, round"),
        ("fedil", {"fedil.labels_from": "server"}, "fedil.labels_from is 'server'; known: local, global"),
        ("fedil", {"fedil.successive": 0}, "fedil.successive must be at least 1"),
    ],
)
def test_wrong_options_are_named(method, fields, words):
    config = apply_arguments(make_tiny_config(), method)
    config.update_from_flattened_dict(fields)
    with pytest.raises(UserError, match=words):
        validate(config)
        build_experiment(config)


def test_centralised_data_are_the_server_s():
    experiment = build_experiment(apply_arguments(make_tiny_config(), "centralised"))
    data = experiment.data
    owned = np.concatenate([experiment.partition.anchor_index, *experiment.partition.client_rows])
    np.testing.assert_array_equal(np.sort(data.anchor_index), np.sort(owned))
    np.testing.assert_array_equal(np.asarray(data.visible_labels)[owned], np.asarray(experiment.hidden_labels)[owned])
    assert len(owned) == 40 + 8 * 33


def test_own_optimisers_are_checkpointed_at_an_interval_of_their_own_and_resumed(tmp_path):
    config = make_config("semifl")
    config.update_from_flattened_dict({"checkpoint_every": 1, "checkpoint_every_persistent": 2, "num_rounds": 4})
    state = train(config, tmp_path)
    assert {folder.name for folder in (tmp_path / "checkpoints").glob("[0-9]*")} == {"2", "4"}
    assert set(state.clients) == {"opt_state", "threshold"} and set(state.server) == {"aggregation", "classification"}
    metrics = (tmp_path / "metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as if it had been killed in round 4
    resumed = train(config, tmp_path)
    chex.assert_trees_all_equal(resumed, state)
    assert (tmp_path / "metrics.jsonl").read_text() == metrics
