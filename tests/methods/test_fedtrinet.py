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


@pytest.mark.parametrize("protection", [True, False])
def test_the_threshold_of_each_round(protection):
    """2.8 m, then (1 - r/50) 2.8 m, from round 35 on 1.4 m; without protection down to 0; none before round 0."""
    problem, _ = build(**({} if protection else METHODS["fedtrinet"].variants["unprotected"]))
    m = 0.4
    for r in range(-2, 61):
        if r < 0:
            expected = 4
        elif r < 10:
            expected = 2.8 * m
        elif r < 35 or not protection:
            expected = max(1 - r / 50, 0) * 2.8 * m
        else:
            expected = 1.4 * m
        found = fedtrinet.threshold_at(problem.config.fedtrinet, jnp.int32(r), jnp.float32(m))
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


@pytest.mark.parametrize(
    "name, blocks, expected",
    [
        ("cnn", 1, ("conv0", "norm0")),
        ("cnn", 2, ("conv0", "norm0", "conv1", "norm1")),
        ("resnet8", 1, ("stem_conv", "stem_norm")),
        ("wrn16_1", 2, ("stem_conv", "stage0_block0")),
    ],
)
def test_the_head_part_is_the_first_block(name, blocks, expected):
    """In the order of the layers, which is not that of their names."""
    config = base_config()
    config.model.name = name
    facts = {"image_shape": (8, 8, 1), "num_classes": 3, "mean": (0.0,), "std": (1.0,)}
    assert head_part(build_network(config, facts, KINDS[IMAGE]), blocks) == expected


def test_splicing_takes_parameters_and_statistics():
    def model(value, statistics):
        params = {"backbone": {"conv": {"kernel": value}, "norm": {"scale": value}}, "classifier": {"kernel": value}}
        return Model(params, statistics)

    one = model(1, {"backbone": {"norm": {"mean": 10}}})
    spliced = splice(("conv", "norm"), one, model(2, {"backbone": {"norm": {"mean": 20}}}))
    assert spliced.params == {"backbone": one.params["backbone"], "classifier": {"kernel": 2}}
    assert spliced.batch_stats == one.batch_stats
    assert splice(("conv",), one, model(2, {"backbone": {"norm": {"mean": 20}}})).batch_stats["backbone"]["norm"] == {
        "mean": 20
    }
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


def spliced_by_hand(received, own):
    """The received bias, which is the whole backbone and so the head part; the client's kernel."""
    return {"bias": in_numpy(received.params)["bias"], "kernel": in_numpy(own[LOCAL].params)["kernel"]}


# --- The vote. -------------------------------------------------------------------------------------------------------


def tuned_model(problem, client=SOME):
    """A model that stands for the tuned one, as the phase before hands it on; NO_LABELS has none."""
    model = problem.network.init(jax.random.key(21))
    took_part = jnp.array([client == SOME])
    return model, Previous(jax.tree.map(lambda leaf: leaf[None] * took_part[0], Upload(model)), took_part)


def votes_by_hand(data, client, players, received, own, tuned):
    """The sum of the probabilities of the first so many of: the global model, the spliced one, the last local one."""
    x = pixels_of(data, np.asarray(data.client_index[client])[: int(data.client_size[client])])
    every = [
        (in_numpy(received.params), statistics_of(received)),
        tuned,
        (in_numpy(own[LOCAL].params), statistics_of(own[LOCAL])),
    ]
    return sum(probabilities(params, x, statistics) for params, statistics in every[:players])


@pytest.mark.parametrize(("client", "players"), [(NO_LABELS, "three"), (SOME, "one")])
def test_an_image_gets_the_label_of_the_sum_once_and_for_ever(data, client, players, monkeypatch):
    """Without labels the spliced network votes untuned. What has a label keeps it, and labelled images get none."""
    monkeypatch.setattr("fedjax_ssl.methods.fedtrinet.client.ENOUGH", 2)
    problem, method = build(**{"fedtrinet.players": players})
    number, received = fedtrinet.PLAYERS[players], sent(problem, threshold=0.0)
    own = memory({1: 2, 4: 0}, rounds=5)
    model, previous = tuned_model(problem, client)
    tuned = in_numpy(model.params), statistics_of(model)
    if client == NO_LABELS:
        tuned = spliced_by_hand(received.model, own), statistics_of(own[LOCAL])
    votes = votes_by_hand(data, client, number, received.model, own, tuned)
    labels, visible = np.asarray(own[ACCEPTED].labels).copy(), np.array(LABELS if client == SOME else [-1] * 5)
    free = [i for i in range(len(votes)) if visible[i] < 0 and labels[i] < 0]
    sums = np.sort(votes.max(axis=1)[free])
    threshold = (sums[len(sums) // 2 - 1] + sums[len(sums) // 2]) / 2  # some pass it, some do not
    received = received._replace(extra=Extra(jnp.int32(VOTING), jnp.float32(threshold)))
    if players == "one":  # the code's FedAvg with pseudo-labels: nothing is spliced, tuned or remembered of a model
        own, previous, tuned = (
            {ACCEPTED: own[ACCEPTED]},
            None,
            (in_numpy(received.model.params), statistics_of(received.model)),
        )
        assert len(phases_of(method)) == 1
    job = prepare(phases_of(method)[-1], received, data, client, own, previous)
    new = [i for i in free if votes[i].max() >= threshold]
    for i in new:
        labels[i] = votes[i].argmax()
    assert 0 < len(new) < len(free) < len(votes)
    np.testing.assert_array_equal(job.own[ACCEPTED].labels, labels)
    assert job.own[ACCEPTED].rounds == 5 + (len(new) >= 2)
    known = np.where(visible >= 0, visible, labels[: len(votes)])
    np.testing.assert_array_equal(job.work.labels.more.labels[: len(votes)], known)
    has_one = labels[: len(votes)] >= 0
    np.testing.assert_array_equal(job.work.labels.report.qualified[: len(votes)], has_one | (visible >= 0))
    expected = np.where(has_one, labels[: len(votes)], votes.argmax(axis=1))
    np.testing.assert_array_equal(job.work.labels.report.labels[: len(votes)], expected)
    assert int(job.work.decks["labelled"].size) == np.sum(has_one | (visible >= 0))
    assert int(job.work.decks["accepted"].size) == np.sum(has_one)
    assert_model(job.work.start, *tuned)


def test_the_vote_may_be_of_probabilities_without_the_prior(data):
    """Each player's are divided by its own mean over the client's unlabelled images."""
    problem, method = build(**{"confidence.debias": "app_u"})
    received, own = sent(problem, threshold=0.0), memory()
    model, previous = tuned_model(problem)
    x, unlabelled = pixels_of(data, np.asarray(data.client_index[SOME])[:9]), np.array(LABELS) < 0
    votes = 0
    for player in (received.model, model, own[LOCAL]):
        p = predicted(player, x)
        votes = votes + divided(p, p[unlabelled].mean(axis=0))
    job = prepare(phases_of(method)[1], received, data, SOME, own, previous)
    np.testing.assert_array_equal(job.work.labels.report.labels[:9][unlabelled], votes.argmax(axis=1)[unlabelled])
    plain = prepare(phases_of(build()[1])[1], received, data, SOME, own, previous)
    plain = plain.work.labels.report.labels[:9][unlabelled]
    assert np.any(plain != votes.argmax(axis=1)[unlabelled])
