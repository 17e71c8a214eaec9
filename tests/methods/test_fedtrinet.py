"""FedTriNet's threshold, spliced network, vote, memory of labels and loss, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import base_config
from fedjax_ssl.engine.interface import Previous, State, Upload
from fedjax_ssl.methods import METHODS, fedtrinet
from fedjax_ssl.methods.fedtrinet import ACCEPTED, LOCAL, Extra
from fedjax_ssl.methods.fedtrinet.client import Accepted, freezing, head_part, splice
from fedjax_ssl.models.network import build_network
from fedjax_ssl.ops.sgd import Model, make_optimizer
from fedjax_ssl.run.validation import validate
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    MAX_SIZE,
    assert_model,
    federation,
    handed_on,
    loss_and_gradient,
    mirrored,
    phases_of,
    pixels_of,
    prepare,
    probabilities,
    running_mean,
    sent_down,
    small_problem,
    statistics_of,
    train,
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
    problem, _ = build(**{"fedtrinet.protection": protection})
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


@pytest.mark.parametrize("reference", ["unlabelled", "test"])
def test_the_confidence_is_measured_once_when_the_rounds_on_labels_are_over(data, reference):
    """The mean of the largest probability, over the clients' unlabelled images or over the test images."""
    problem, method = build(**{"fedtrinet.reference": reference, "fedtrinet.warm_up_rounds": 2})
    model = sent_down(problem).model
    rows = [row for client in range(2) for row in np.asarray(data.client_index[client, : data.client_size[client]])]
    rows = [row for row in rows if data.visible_labels[row] < 0]
    assert len(rows) == 11
    x = pixels_of(data, rows) if reference == "unlabelled" else np.asarray(data.test_inputs).reshape(4, -1) / 255
    m = np.mean(probabilities(in_numpy(model.params), x, statistics_of(model)).max(axis=1))
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
    assert head_part(build_network(config, facts), blocks) == expected


def test_the_head_part_has_the_configured_number_of_blocks(monkeypatch):
    found = []
    monkeypatch.setattr("fedjax_ssl.methods.fedtrinet.head_part", lambda network, blocks: found.append(blocks) or "b")
    build(**{"fedtrinet.head_blocks": 2})
    assert found == [2]


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


@pytest.mark.parametrize("frozen", [True, False])
def test_the_spliced_network_is_tuned_on_labels(data, frozen):
    problem, method = build(**{"fedtrinet.freeze_head": frozen})
    received, own, config = sent(problem), memory(), problem.config.client
    job, finished = train(phases_of(method)[0], received, data, SOME, own)
    assert job.num_steps == 2  # two epochs of three labelled images
    model, statistics, losses = spliced_by_hand(received.model, own), statistics_of(own[LOCAL]), []
    velocity = at_rest(model)
    for epoch in np.asarray(job.work.decks["labelled"].order):
        rows = np.asarray(data.client_index[SOME])[epoch[:3]]
        x = pixels_of(data, rows, mirrored)
        loss, gradient = loss_and_gradient(
            model, x, x.mean(axis=0), np.eye(CLASSES)[np.asarray(data.visible_labels)[rows]] / 3
        )
        if frozen:
            gradient["bias"] = np.zeros(CLASSES)
        moved, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        model = {**moved, "bias": model["bias"]} if frozen else moved
        statistics = running_mean(statistics, x)
        losses.append(loss)
    assert_model(finished.upload.model, model, statistics)
    np.testing.assert_allclose(finished.metrics["tuning_loss"], np.mean(losses), rtol=1e-5)


def test_nothing_is_tuned_while_clients_train_on_labels_alone(data):
    problem, method = build()
    jobs = [prepare(phases_of(method)[0], sent(problem, r), data, SOME, memory()) for r in (-40, -1, 0)]
    assert [int(job.num_steps) for job in jobs] == [0, 0, 2]


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


@pytest.mark.parametrize("client", [SOME, NO_LABELS])
@pytest.mark.parametrize("players", ["three", "one"])
def test_an_image_gets_the_label_of_the_sum_once_and_for_ever(data, client, players):
    """Without labels the spliced network votes untuned. What has a label keeps it, and labelled images get none."""
    problem, method = build(**{"fedtrinet.players": players, "fedtrinet.min_new_labels": 2})
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


def test_while_clients_train_on_labels_alone_nothing_is_accepted(data):
    """They begin with the received model, and their batches are labelled images; who has none takes no part."""
    problem, method = build()
    received = sent(problem, WARM_UP, 4.0)
    nobody = Previous(
        jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape)), Upload(received.model)), jnp.array([False])
    )
    job = prepare(phases_of(method)[1], received, data, SOME, memory(), nobody)
    assert int(job.work.decks["labelled"].size) == 3 and job.num_steps == 2
    assert int(job.work.decks["accepted"].size) == 0
    assert np.all(np.asarray(job.own[ACCEPTED].labels) == -1) and job.own[ACCEPTED].rounds == 0
    assert_model(job.work.start, in_numpy(received.model.params), statistics_of(received.model))
    assert prepare(phases_of(method)[1], received, data, NO_LABELS, memory(), nobody).num_steps == 0


def test_one_player_trains_the_global_model(data):
    """FedAvg with pseudo-labels: two epochs of plain SGD from the received model on labels and accepted images."""
    problem, method = build(**{"fedtrinet.players": "one"})
    received, own = sent(problem, threshold=9.0), {ACCEPTED: memory({1: 2, 4: 0})[ACCEPTED]}
    job, finished = train(phases_of(method)[0], received, data, SOME, own)
    model, statistics, config = in_numpy(received.model.params), statistics_of(received.model), problem.config.client
    velocity, rows = at_rest(model), np.asarray(data.client_index[SOME])
    labels = np.asarray(job.work.labels.more.labels)
    assert int(job.num_steps) == 4  # five images in batches of three, twice
    for epoch in np.asarray(job.work.decks["labelled"].order):
        for batch in (epoch[:3], epoch[3:5]):
            x = pixels_of(data, rows[batch], mirrored)
            targets = np.eye(CLASSES)[labels[batch]] / len(x)
            gradient = loss_and_gradient(model, x, x.mean(axis=0), targets)[1]
            model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
            statistics = running_mean(statistics, x)
    assert_model(finished.upload.model, model, statistics)
    assert finished.own == {}
    assert set(method.init(data, jax.random.key(0)).clients) == {ACCEPTED}


def test_the_vote_may_be_of_probabilities_without_the_prior(data):
    """Each player's are divided by its own mean over the client's unlabelled images."""
    problem, method = build(**{"confidence.debias": "app_u"})
    received, own = sent(problem, threshold=0.0), memory()
    model, previous = tuned_model(problem)
    x, unlabelled = pixels_of(data, np.asarray(data.client_index[SOME])[:9]), np.array(LABELS) < 0
    votes = 0
    for params, statistics in (
        (in_numpy(received.model.params), statistics_of(received.model)),
        (in_numpy(model.params), statistics_of(model)),
        (in_numpy(own[LOCAL].params), statistics_of(own[LOCAL])),
    ):
        p = probabilities(params, x, statistics)
        ratio = p / p[unlabelled].mean(axis=0)
        votes = votes + ratio / ratio.sum(axis=1, keepdims=True)
    job = prepare(phases_of(method)[1], received, data, SOME, own, previous)
    np.testing.assert_array_equal(job.work.labels.report.labels[:9][unlabelled], votes.argmax(axis=1)[unlabelled])
    plain = prepare(phases_of(build()[1])[1], received, data, SOME, own, previous)
    plain = plain.work.labels.report.labels[:9][unlabelled]
    assert np.any(plain != votes.argmax(axis=1)[unlabelled])


# --- The loss. -------------------------------------------------------------------------------------------------------


def weight_by_hand(s):
    """a(s): 0 before 50, then in a line to 0.15 at 150."""
    return 0 if s < 50 else 0.15 * (s - 50) / 100 if s < 150 else 0.15


@pytest.mark.parametrize("number, rounds", [(2, 0), (2, 1), (40, 1), (100, 3)])  # before, on and behind the slope
def test_training_goes_on_from_the_tuned_network_on_labels_and_accepted_images(data, number, rounds):
    """1/2 (CE(all) + a(s) CE(accepted)) once a round has brought many new labels, until then CE(all)."""
    problem, method = build(**{"fedtrinet.min_new_labels": 99})
    config, own = problem.config.client, memory({1: 2, 4: 0, 5: 1, 8: 1}, rounds)
    received = sent(problem, number, threshold=9.0)
    first, tuned = train(phases_of(method)[0], received, data, SOME, own)
    job, finished = train(phases_of(method)[1], received, data, SOME, own, handed_on(first, tuned))
    model, statistics = in_numpy(tuned.upload.model.params), statistics_of(tuned.upload.model)
    velocity, losses, labels = at_rest(model), [], np.asarray(job.work.labels.more.labels)
    assert int(job.num_steps) == 6  # two epochs of seven images in batches of three
    rows = np.asarray(data.client_index[SOME])
    orders = np.asarray(job.work.decks["accepted"].order)
    accepted = [epoch[part] for epoch in orders for part in (slice(0, 3), slice(3, 4))]
    for step in range(6):
        epoch, part = divmod(step, 3)
        of_all = np.asarray(job.work.decks["labelled"].order)[epoch, :7][3 * part : 3 * part + 3]
        more = accepted[step % 4]
        assert set(labels[more]) <= {0, 1, 2} and set(more) <= {1, 4, 5, 8}
        x, also = pixels_of(data, rows[of_all], mirrored), pixels_of(data, rows[more], mirrored)
        loss, gradient = loss_and_gradient(model, x, x.mean(axis=0), np.eye(CLASSES)[labels[of_all]] / len(x))
        statistics = running_mean(statistics, x)
        if rounds:
            targets = np.eye(CLASSES)[labels[more]] / len(also)
            of_more, second = loss_and_gradient(model, also, also.mean(axis=0), targets)
            weight = weight_by_hand(epoch + 2 * number)
            loss = (loss + weight * of_more) / 2
            gradient = {name: (gradient[name] + weight * second[name]) / 2 for name in gradient}
            statistics = running_mean(statistics, also)
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        losses.append(loss)
    assert_model(finished.upload.model, model, statistics)
    assert_model(finished.own[LOCAL], model, statistics)
    np.testing.assert_allclose(finished.metrics["client_loss"], np.mean(losses), rtol=1e-5)
    assert finished.metrics["accepted"] == 4
