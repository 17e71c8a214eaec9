"""FedTriNet's threshold, spliced network, vote, memory of labels and loss, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import base_config
from fedjax_ssl.data.kinds import IMAGE, KINDS
from fedjax_ssl.engine.interface import Previous, State, Upload
from fedjax_ssl.methods import METHODS, fedtrinet
from fedjax_ssl.methods.fedtrinet import ACCEPTED, LOCAL, Extra
from fedjax_ssl.methods.fedtrinet.client import Accepted, freezing, head_part, splice
from fedjax_ssl.models.network import build_network
from fedjax_ssl.ops.sgd import Model, make_optimizer
from fedjax_ssl.run.validation import validate
from tests.helpers.linear_network import divided, in_numpy
from tests.helpers.small_problem import (
    MAX_SIZE,
    assert_model,
    federation,
    phases_of,
    pixels_of,
    predicted,
    prepare,
    probabilities,
    sent_down,
    small_problem,
    statistics_of,
)

SOME, NO_LABELS = range(2)
LABELS = [0, -1, -1, 2, -1, -1, 0, -1, -1]
VOTING, WARM_UP = 3, -1


@pytest.fixture(scope="module")
def data():
    return federation([LABELS, [-1] * 5])


def build(**fields):
    problem = small_problem("fedtrinet", **fields)
    validate(problem.config)
    return problem, METHODS["fedtrinet"].factory(problem)


def memory(labels=(), rounds=0, seed=9):
    """What a client remembers: another model than the received one, and pseudo-labels by position."""
    table = np.full(MAX_SIZE, -1, np.int32)
    for position, label in dict(labels).items():
        table[position] = label
    problem, _ = build()
    model = problem.network.init(jax.random.key(seed))
    model = model._replace(batch_stats={"mean": model.batch_stats["mean"] + 0.2})
    return {LOCAL: model, ACCEPTED: Accepted(jnp.array(table), jnp.int32(rounds))}


def sent(problem, number=VOTING, threshold=1.5):
    return sent_down(problem, Extra(jnp.int32(number), jnp.float32(threshold)))


# --- The threshold. --------------------------------------------------------------------------------------------------


def test_the_threshold_without_protection():
    """None before round 0; 2.8 m, then (1 - r/50) 2.8 m down to 0. tests/official has the protection."""
    problem, _ = build(**METHODS["fedtrinet"].variants["unprotected"])
    for r in range(-2, 61):
        expected = 4 if r < 0 else 2.8 * 0.4 * (1 if r < 10 else max(1 - r / 50, 0))
        found = fedtrinet.threshold_at(problem.config.fedtrinet, jnp.int32(r), jnp.float32(0.4))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_the_confidence_is_measured_once_when_the_rounds_on_labels_are_over(data):
    """The mean of the largest probability, over the clients' unlabelled images; tests/official has the test images."""
    problem, method = build(**{"fedtrinet.warm_up_rounds": 2})
    model = sent_down(problem).model
    rows = [row for client in range(2) for row in np.asarray(data.client_index[client, : data.client_size[client]])]
    rows = [row for row in rows if data.visible_labels[row] < 0]
    assert len(rows) == 11
    m = np.mean(predicted(model, pixels_of(data, rows)).max(axis=1))
    for number, before, after in ((1, 0.0, 0.0), (2, 0.0, m), (3, 0.25, 0.25)):
        state = State(jnp.int32(number), model, {"confidence": jnp.float32(before)})
        state, metrics = method.server_before(state, data, None)
        np.testing.assert_allclose(state.server["confidence"], after, rtol=1e-5)
        np.testing.assert_allclose(metrics["mean_confidence"], after, rtol=1e-5)
        extra = method.broadcast(state, data, None).extra
        assert extra.round == number - 2
        np.testing.assert_allclose(extra.threshold, 4 if number < 2 else 2.8 * after, rtol=1e-5)


# --- The spliced network. --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, blocks, expected", [
    ("cnn", 1, ("conv0", "norm0")),
    ("resnet8", 1, ("stem_conv", "stem_norm")),
    ("wrn16_1", 2, ("stem_conv", "stage0_block0")),
])  # fmt: skip
def test_the_head_part_is_the_first_block(name, blocks, expected):
    """In the order of the layers, which is not that of their names."""
    config = base_config()
    config.model.name = name
    facts = {"image_shape": (8, 8, 1), "num_classes": 3, "mean": (0.0,), "std": (1.0,)}
    assert head_part(build_network(config, facts, KINDS[IMAGE]), blocks) == expected


def test_splicing_takes_the_statistics_of_spliced_layers_alone():
    """tests/official has a head with statistics."""

    def model(value, statistics):
        params = {"backbone": {"conv": {"kernel": value}, "norm": {"scale": value}}, "classifier": {"kernel": value}}
        return Model(params, statistics)

    one, other = (model(value, {"backbone": {"norm": {"mean": 10 * value}}}) for value in (1, 2))
    assert splice(("conv",), one, other).batch_stats == other.batch_stats
    assert splice(("conv",), model(1, ()), model(2, ())).batch_stats == ()


def test_a_frozen_head_stays_and_is_in_no_norm():
    config = base_config().client
    config.update({"clip_norm": 1.0, "momentum": 0.5, "weight_decay": 0.1})
    params = {
        "backbone": {"conv": jnp.array([3.0]), "rest": jnp.array([2.0])},
        "classifier": {"kernel": jnp.array([1.0])},
    }
    optimizer = freezing(("conv",), functools.partial(make_optimizer, config))(0.5)
    opt_state, expected, velocity = optimizer.init(params), np.array([2.0, 1.0]), np.zeros(2)
    for _ in range(3):
        gradient = {
            "backbone": {"conv": jnp.array([99.0]), "rest": jnp.array([3.0])},
            "classifier": {"kernel": jnp.array([4.0])},
        }
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        params = jax.tree.map(jnp.add, params, updates)
        velocity = 0.5 * velocity + np.array([0.6, 0.8]) + 0.1 * expected  # 3, 4 clipped to length 1
        expected = expected - 0.5 * velocity
    assert params["backbone"]["conv"] == 3
    found = np.concatenate([params["backbone"]["rest"], params["classifier"]["kernel"]])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# --- The vote. -------------------------------------------------------------------------------------------------------


def test_without_labels_the_spliced_network_votes_untuned(data, monkeypatch):
    """What has a label keeps it. The received bias is the whole backbone, and so the head part."""
    monkeypatch.setattr("fedjax_ssl.methods.fedtrinet.client.ENOUGH", 2)
    problem, method = build()
    received, own, x = sent(problem), memory({1: 2, 4: 0}, rounds=5), pixels_of(data, data.client_index[NO_LABELS][:5])
    bias, kernel = (in_numpy(model.params) for model in (received.model, own[LOCAL]))
    spliced = {"bias": bias["bias"], "kernel": kernel["kernel"]}
    votes = predicted(received.model, x) + predicted(own[LOCAL], x)
    votes += probabilities(spliced, x, statistics_of(own[LOCAL]))
    free, labels = [0, 2, 3], np.array([-1, 2, -1, -1, 0])
    threshold = np.sort(votes.max(axis=1)[free])[:2].mean()  # two of three pass it
    for place in free:
        labels[place] = votes[place].argmax() if votes[place].max() >= threshold else -1
    received = sent(problem, threshold=threshold)
    _, nobody = tuned_model(problem, took_part=False)
    job = prepare(phases_of(method)[1], received, data, NO_LABELS, own, nobody)
    np.testing.assert_array_equal(job.own[ACCEPTED].labels[:5], labels)
    assert job.own[ACCEPTED].rounds == 5 + 1
    np.testing.assert_array_equal(job.work.labels.more.labels[:5], labels)
    np.testing.assert_array_equal(job.work.labels.report.qualified[:5], labels >= 0)
    expected = np.where(labels >= 0, labels, votes.argmax(axis=1))
    np.testing.assert_array_equal(job.work.labels.report.labels[:5], expected)
    assert job.work.decks["labelled"].size == job.work.decks["accepted"].size == 4
    assert_model(job.work.start, spliced, statistics_of(own[LOCAL]))


def test_one_player_is_the_received_model(data):
    """The code's FedAvg with pseudo-labels: nothing is spliced, tuned or remembered of a model."""
    problem, method = build(**{"fedtrinet.players": "one"})
    (phase,), unlabelled = phases_of(method), np.array(LABELS) < 0
    p = predicted(sent(problem).model, pixels_of(data, data.client_index[SOME][:9]))
    threshold = p.max(axis=1)[unlabelled].mean()  # some pass it, some do not
    received = sent(problem, threshold=threshold)
    job = prepare(phase, received, data, SOME, {ACCEPTED: memory()[ACCEPTED]})
    new = unlabelled & (p.max(axis=1) >= threshold)
    np.testing.assert_array_equal(job.own[ACCEPTED].labels[:9], np.where(new, p.argmax(axis=1), -1))
    np.testing.assert_array_equal(job.work.labels.report.qualified[:9], new | ~unlabelled)
    assert_model(job.work.start, in_numpy(received.model.params), statistics_of(received.model))


def tuned_model(problem, took_part=True):
    """A model that stands for the tuned one, as the phase before hands it on."""
    model = problem.network.init(jax.random.key(21))
    return model, Previous(jax.tree.map(lambda leaf: leaf[None] * took_part, Upload(model)), jnp.array([took_part]))


def test_the_vote_may_be_of_probabilities_without_the_prior(data):
    """Each player's are divided by its own mean over the client's unlabelled images."""
    problem, method = build(**{"confidence.debias": "app_u"})
    received, own = sent(problem, threshold=0.0), memory()
    model, previous = tuned_model(problem)
    x, unlabelled = pixels_of(data, np.asarray(data.client_index[SOME])[:9]), np.array(LABELS) < 0
    votes, plain = 0, 0
    for player in (received.model, model, own[LOCAL]):
        p = predicted(player, x)
        votes, plain = votes + divided(p, p[unlabelled].mean(axis=0)), plain + p
    job = prepare(phases_of(method)[1], received, data, SOME, own, previous)
    np.testing.assert_array_equal(job.work.labels.report.labels[:9][unlabelled], votes.argmax(axis=1)[unlabelled])
    assert np.any(plain.argmax(axis=1)[unlabelled] != votes.argmax(axis=1)[unlabelled])
