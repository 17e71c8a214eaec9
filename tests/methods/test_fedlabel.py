"""FedLabel's two phases and its aggregation, against NumPy.

tests/official/fedlabel.py has whole rounds with the choices of its code (`fedlabel.as_in_code`) and with its bug.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.interface import Previous, Received, State, Upload
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.methods import METHODS, fedlabel
from fedjax_ssl.run.validation import validate
from tests.helpers.experts_by_hand import choose_by_hand
from tests.helpers.linear_network import at_rest, divided, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    assert_model,
    federation,
    handed_on,
    loss_and_gradient,
    mirrored,
    negative,
    phases_of,
    pixels_of,
    predicted,
    prepare,
    probabilities,
    running_mean,
    sent_down,
    small_problem,
    statistics_of,
    train,
)

SOME, NO_LABELS, ALL, TWO = range(4)
LABELLED_STEPS, UNLABELLED_STEPS, BETA = 4, 5, 0.6
ROUND = jnp.int32(7)


@pytest.fixture(scope="module")
def data():
    return federation([[0, -1, -1, 2, 1, -1, 0, -1, -1], [-1] * 5, [1, 2, 0], [2, -1, -1, 0]])


def build(**fields):
    steps = {"fedlabel.labelled_steps": LABELLED_STEPS, "fedlabel.unlabelled_steps": UNLABELLED_STEPS}
    problem = small_problem("fedlabel", **{**steps, "confidence.threshold": BETA, **fields})
    validate(problem.config)
    return problem, METHODS["fedlabel"].factory(problem)


class Round(NamedTuple):
    """One client's round: of each phase its job and what it leaves."""

    problem: Any
    received: Any
    first: Any
    supervised: Any
    second: Any
    finished: Any


def run(data, client, extra=ROUND, **fields):
    problem, method = build(**fields)
    received = sent_down(problem, extra)
    first, supervised = train(phases_of(method)[0], received, data, client)
    second, finished = train(phases_of(method)[1], received, data, client, previous=handed_on(first, supervised))
    return Round(problem, received, first, supervised, second, finished)


# --- The two phases. -------------------------------------------------------------------------------------------------


def drawn_rows(work):
    """The rows of the image table of each step, and their positions."""
    (deck,) = work.decks.values()
    size, order = int(deck.size), np.asarray(deck.order)
    return [(np.asarray(deck.rows)[batch[:size]], batch[:size]) for batch in order] if size else []


def supervised_by_hand(result, data):
    """tau steps of eq. 1."""
    config, model = result.problem.config.client, in_numpy(result.received.model.params)
    velocity, statistics, losses = at_rest(model), statistics_of(result.received.model), []
    for rows, _ in drawn_rows(result.first.work):
        x = pixels_of(data, rows, mirrored)
        targets = np.eye(CLASSES)[np.asarray(data.visible_labels)[rows]] / len(rows)
        loss, gradient = loss_and_gradient(model, x, x.mean(axis=0), targets)
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        statistics = running_mean(statistics, x)
        losses.append(loss)
    return model, statistics, losses


def divergence_and_gradient(model, x, centre, other, weights):
    """sum_i weights_i KL(p, s) of row i, and its gradient: dKL/dz = p (log p - log s - KL)."""
    p, logs = probabilities(model, x, centre), np.log(other)
    of_row = np.sum(p * (np.log(p) - logs), axis=1)
    wrong = weights[:, None] * p * (np.log(p) - logs - of_row[:, None])
    return weights @ of_row, {"bias": wrong.sum(axis=0), "kernel": (x - centre).T @ wrong}


def unlabelled_by_hand(result, data, supervised):
    """tau' steps of eq. 8: the model, its statistics, each metric's mean, and how many images agree in each step."""
    options, config = result.problem.config.fedlabel, result.problem.config.client
    first = in_numpy(result.received.model.params)
    model, velocity, statistics = dict(first), at_rest(first), statistics_of(result.received.model)
    local, local_statistics = supervised
    centre, history, agreed = statistics, [], []
    for rows, _ in drawn_rows(result.second.work):
        x, strong = pixels_of(data, rows), pixels_of(data, rows, negative)
        labels, probability, other, ratio = choose_by_hand(
            probabilities(first, x, centre), probabilities(local, x, local_statistics), options.confidence, "both"
        )
        kept = probability > result.problem.config.confidence.threshold
        agrees = kept & (other.argmax(axis=1) == labels)
        agreed.append(agrees.sum())
        if not kept.any():
            history.append([0, 0, 0])
            continue
        targets = kept[:, None] * np.eye(CLASSES)[labels] / len(x)
        entropy, gradient = loss_and_gradient(model, strong, strong.mean(axis=0), targets)
        weights = agrees * options.consistency_weight * ratio / len(x)
        divergence, more = divergence_and_gradient(model, x, x.mean(axis=0), other, weights)
        gradient = {name: leaf + more[name] for name, leaf in gradient.items()}
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        statistics = running_mean(statistics, strong, x)
        history.append([entropy + divergence, divergence, kept.sum()])
    return model, statistics, np.array(history), agreed


@pytest.mark.parametrize(
    "client, fields",
    [
        (SOME, {}),
        (NO_LABELS, {}),
        (SOME, {"fedlabel.confidence": "entropy"}),
        (SOME, {"confidence.threshold": 0.65}),  # with steps in which nothing counts, and a velocity from earlier ones
    ],
)
def test_both_phases_are_those_of_the_equations(data, client, fields):
    """Models, statistics, metrics; and the upload is w and both changes, with r_k."""
    result = run(data, client, **{"fedlabel.consistency_weight": 0.5, **fields})
    local, local_statistics, losses = supervised_by_hand(result, data)
    model, statistics, history, agreed = unlabelled_by_hand(result, data, (local, local_statistics))
    kept = history[:, 2]
    assert any(0 < count < 3 for count in kept)
    assert any(agreed) if "confidence.threshold" not in fields else 0 in kept[1:]
    if losses:
        assert result.first.num_steps == LABELLED_STEPS and result.second.num_steps == UNLABELLED_STEPS
        assert_model(result.supervised.upload.model, local, local_statistics)
        np.testing.assert_allclose(result.supervised.metrics["client_loss"], np.mean(losses), rtol=1e-5)
    first = in_numpy(result.received.model.params)
    both = {name: first[name] + (local[name] - first[name]) + (model[name] - first[name]) for name in first}
    mean = (local_statistics + statistics) / 2 if losses else statistics
    assert_model(result.finished.upload.model, both, mean)
    labelled = LABELLED_STEPS * 3 if losses else 0
    assert result.finished.upload.metadata == {"used": labelled + kept.sum()}
    names = ("unlabelled_loss", "consistency_loss", "kept")
    if not (kept == 0).any():  # the loss of a step that is not taken is still reported
        for name, value in zip(names, history.mean(axis=0)):
            np.testing.assert_allclose(result.finished.metrics[name], value, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("fields", [{}, {"confidence.debias": "app_u"}])
def test_images_without_a_step_are_not_looked_at(data, fields):
    """Two steps of three of five images: what is said of the others is nothing, and the report says so."""
    steps = {"fedlabel.unlabelled_steps": 2, **fields}
    result, size = run(data, SOME, **steps), 9
    drawn = {position for _, positions in drawn_rows(result.second.work) for position in positions}
    assert 3 <= len(drawn) < 6
    report = result.second.work.labels.report
    np.testing.assert_array_equal(np.flatnonzero(report.made), sorted(drawn))
    positions = np.array(sorted(drawn))
    x = pixels_of(data, np.asarray(data.client_index[SOME])[positions])
    local, local_statistics, _ = supervised_by_hand(result, data)
    experts = predicted(result.received.model, x), probabilities(local, x, local_statistics)
    if fields:  # each expert's, divided by its own mean over these images
        experts = [divided(p, p.mean(axis=0)) for p in experts]
    labels, probability, *_ = choose_by_hand(*experts, "variance", "both")
    np.testing.assert_array_equal(report.labels[positions], labels)
    for name, p in zip(("global", "local"), experts):
        np.testing.assert_array_equal(report.others[name][positions], p.argmax(axis=1))
    np.testing.assert_allclose(result.second.work.labels.more.probability[positions], probability, rtol=1e-4)
    known = np.flatnonzero(np.asarray(data.visible_labels)[np.asarray(data.client_index[SOME])[:size]] >= 0)
    np.testing.assert_array_equal(np.flatnonzero(report.qualified), sorted({*positions[probability > BETA], *known}))


def test_without_a_label_that_counts_a_client_sends_its_supervised_model(data):
    """beta = 1 is FedAvg on labels, to the statistics, with weight decay and all; and so is no unlabelled image."""
    for client, fields in ((SOME, {"confidence.threshold": 1.0}), (ALL, {}), (TWO, {"confidence.threshold": 1.0})):
        result = run(data, client, **fields)
        assert result.second.takes_part and np.any(result.finished.metrics["kept"] == 0)
        for sent, supervised in zip(
            *map(jax.tree.leaves, (result.finished.upload.model, result.supervised.upload.model))
        ):
            np.testing.assert_allclose(sent, supervised, atol=1e-7)
        assert result.finished.upload.metadata["used"] == LABELLED_STEPS * (2 if client == TWO else 3)


def test_unlabelled_images_wait_for_their_round(data):
    """Before it a client makes its labelled steps alone, and still uploads; so the round travels."""
    problem, method = build(**{"fedlabel.unlabelled_from": 3})
    for number, steps in ((2, 0), (3, UNLABELLED_STEPS)):
        received = sent_down(problem, jnp.int32(number))
        previous = Previous(jax.tree.map(lambda leaf: leaf[None], Upload(received.model)), jnp.array([True]))
        job = prepare(phases_of(method)[1], received, data, SOME, previous=previous)
        assert job.num_steps == steps and job.takes_part
    assert method.broadcast(State(ROUND, problem.network.init(jax.random.key(0))), data, None).extra == 7


def test_two_models_are_not_clipped():
    with pytest.raises(UserError, match=r"clip_norm is not for fedlabel\.as_in_code"):
        build(**{"fedlabel.as_in_code": True, "aggregation.clip_norm": 1.0})


# --- The server. -----------------------------------------------------------------------------------------------------


def random_like(tree, *axes, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.float32(rng.normal(size=(*axes, *leaf.shape))), tree)


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def rows_of(tree, count):
    return np.stack([flat(jax.tree.map(lambda leaf, m=m: np.asarray(leaf)[m], tree)) for m in range(count)])


@pytest.mark.parametrize("as_in_code", [False, True])
def test_the_server_adds_the_changes_weighted_by_what_was_used(as_in_code):
    """w + sum_k r_k dw_k / sum r; the code: 1/2 mean w_L + 1/2 sum r w_U / sum r, over the accepted uploads."""
    problem, method = build(**{"fedlabel.as_in_code": as_in_code})
    model = sent_down(problem).model
    uploads, local = random_like(model, 3), random_like(model, 3, seed=1)
    told = {"used": jnp.float32([3, 1, 8]), **({"supervised": local} if as_in_code else {})}
    sizes, accepted = np.array([30, 99, 10]), np.array([True, False, True])
    received = Received(Upload(uploads, told), accepted, np.arange(3), None, sizes, sizes)
    after, _ = method.aggregate(State(jnp.int32(0), model), None, received, jax.random.key(0))
    expected = np.array([3, 0, 8]) / 11 @ rows_of(uploads, 3)
    if as_in_code:
        expected = 0.5 * expected + 0.5 * np.array([0.5, 0, 0.5]) @ rows_of(local, 3)
    np.testing.assert_allclose(flat(after.model), expected, atol=1e-5)


# --- Options. --------------------------------------------------------------------------------------------------------


def test_an_image_may_have_one_view_for_the_whole_run(data):
    """Whatever the step's key and its row of the table; otherwise each step draws."""

    def noise(key, images):
        return images + jax.random.uniform(key, images.shape)

    rows = np.array([4, 2, 4, 9])
    views = {}
    for once in (False, True):
        problem, _ = build(**{"fedlabel.as_in_code": once})
        view = jax.jit(lambda key, problem=problem: fedlabel.view(problem, noise, data, rows, key))
        views[once] = [np.asarray(view(jax.random.key(k))) for k in (0, 1)]
    assert np.all(views[False][0] != views[False][1]) and np.all(views[False][0][0] != views[False][0][2])
    np.testing.assert_array_equal(views[True][0], views[True][1])
    np.testing.assert_array_equal(views[True][0][0], views[True][0][2])
    drawn = views[True][0] - np.asarray(data.inputs)[rows]
    assert np.all(drawn[0] != drawn[1]) and np.all((drawn >= 0) & (drawn < 1))
    elsewhere = data._replace(inputs=data.inputs[::-1])
    moved = fedlabel.view(problem, noise, elsewhere, len(data.inputs) - 1 - rows, jax.random.key(0))
    np.testing.assert_array_equal(moved, views[True][0])


def test_a_round_with_optimisers_that_survive(data):
    """Each phase's optimiser has its entry, that of gradients which are never cleared with one tensor more."""
    fields = {"client.persistent": True, "fedlabel.replica": True}
    problem = small_problem("fedlabel,code", **fields, **{"fedlabel.labelled_steps": 2})
    method = METHODS["fedlabel"].factory(problem)
    state = jax.eval_shape(method.init, data, jax.random.key(0))
    count = lambda tree: len(jax.tree.leaves(tree))  # noqa: E731
    assert count(state.clients["unlabelled_opt_state"]) == 2 * count(state.clients["opt_state"])
    after, result = jax.eval_shape(make_round(problem, method, lanes=2), state, data, data.visible_labels)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert {"client_loss", "unlabelled_loss", "pseudo_label_accuracy_local"} <= result.metrics.keys()
