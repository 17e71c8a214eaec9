"""A method with clients that attack, fail and compress, for two rounds; what records and reports say of such runs."""

import types

import chex
import jax
import numpy as np
import pytest

from fedjax_ssl.engine.round import make_round
from fedjax_ssl.engine.untrusted.compression import num_kept
from fedjax_ssl.engine.untrusted.delivery import LATE, LOST
from fedjax_ssl.report.conditions import conditions
from fedjax_ssl.run.loop import to_record
from fedjax_ssl.run.privacy import make_accountant
from fedjax_ssl.run.wire import Traffic, bytes_per_client
from tests.helpers.tiny_methods import build, compiled, make_config

UNTRUSTED = {
    "aggregation.mean": "trimmed_mean",
    "attack.kind": "sign_flip",
    "attack.share": 0.25,
    "availability.never": 0.3,
    "availability.late": 0.3,
    "compression.kind": "top_k",
    "compression.share": 0.1,
}
PRIVATE = {
    "privacy.noise": 4.0,
    "privacy.cohorts": "poisson",
    "aggregation.clip_norm": 0.5,
    "availability.never": 0.2,
    "model.normalisation": "group",
}


@pytest.mark.test_all
def test_clients_that_attack_fail_and_compress():
    config = make_config("fixmatch", "clients", tiny=False)
    config.update_from_flattened_dict({"server.epochs": 0, **UNTRUSTED, "model.normalisation": "group"})
    experiment = build(config)
    data = experiment.data
    states, history = [compiled(experiment.init, data)(data)], []
    arguments = states[0], data, experiment.hidden_labels
    round_fn = compiled(make_round(experiment.problem, experiment.method, lanes=1), *arguments)
    for _ in range(2):
        (state, result), (again, _) = (round_fn(states[-1], *arguments[1:]) for _ in range(2))
        chex.assert_trees_all_equal(again, state)
        chex.assert_tree_all_finite((state.model, state.clients))
        assert result.healthy and result.metrics["dropped_uploads"] == 0
        states.append(state)
        history.append(jax.device_get(result))
    assert np.sum(data.attackers.clients) == 2  # floor(0.25 * 8)
    waited = np.asarray(states[1].server[LATE].waiting)
    for result in history:
        metrics = result.metrics
        assert metrics["byzantine_uploads"] <= metrics["uploads"] <= metrics["answers"] <= config.clients_per_round
        assert 0 <= metrics["late_uploads"] <= metrics["uploads"]
    assert waited.sum() == history[0].metrics["late_uploads"]
    # Who sent something has lost the rest of it: all but k numbers of its update.
    lost = states[1].clients[LOST]
    of_client = np.concatenate([np.reshape(leaf, (8, -1)) for leaf in lost.values()], axis=1)
    senders = np.any(of_client != 0, axis=1)
    assert senders.sum() == history[0].metrics["uploads"]
    kept = num_kept(of_client.shape[1], 0.1)
    assert np.all(np.sum(of_client[senders] == 0, axis=1) >= kept)
    traffic = bytes_per_client(experiment.problem, experiment.method, states[0], data)
    line = to_record(history[0].metrics, traffic)
    assert line["bytes_up"] == traffic.up * line["uploads"]
    assert traffic.up < 0.25 * traffic.down


def test_a_line_counts_the_messages_and_the_privacy_of_its_round():
    """Of six rows five have a job; four clients answer, and three send something."""
    config = make_config("fixmatch")
    config.update_from_flattened_dict(PRIVATE)
    traffic, accountant = Traffic(6, 100, 40, 60, 12, asked=6), make_accountant(config)
    metrics = {"round": 2, "uploads": 3, "answers": 4, "cohort_size": 5}
    line = to_record({name: np.array(value) for name, value in metrics.items()}, traffic, accountant)
    assert (line["bytes_down"], line["bytes_up"]) == (5 * 100 + 5 * 60 // 6, 3 * 40 + 4 * 12 // 6)
    assert line["epsilon"] == accountant.epsilon(2) > accountant.epsilon(1)


def test_reports_say_under_what_conditions_clients_worked():
    """Of an ordinary run nothing, and of each section that is not at its default a sentence."""
    config = make_config("fedanchor")
    lines = [
        {"uploads": 5, "byzantine_uploads": 1, "epsilon": 2.345},
        {"uploads": 4, "byzantine_uploads": 2, "epsilon": 3},
    ]
    values = lambda name: np.array([line[name] for line in lines])  # noqa: E731
    told = lambda: conditions(types.SimpleNamespace(config=config, metrics=lines, values=values))  # noqa: E731
    assert told() == []
    config.update_from_flattened_dict({**UNTRUSTED, **PRIVATE})
    assert told() == [
        "2 of 8 clients attack (attack.kind sign_flip), with 3 of 9 uploads.",
        "The mean of uploads is trimmed_mean.",
        "20 % of each cohort do not answer.",
        "30 % of the uploads are a round late, and count 1 times.",
        "Uploads are compressed: top_k of 10 %.",
        "Noise of 4 times the clipping norm, in poisson cohorts: clients have (3, 1e-05)-differential privacy "
        "by this run alone; the guarantees of further runs on the same clients add up.",
    ]
    config.privacy.reproducible = True
    assert told()[-1].endswith(" only if nobody knows the seed, from which the noise follows (privacy.reproducible).")
