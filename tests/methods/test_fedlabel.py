"""FedLabel's edges against NumPy: images without a step, no label that counts, lost uploads, the only view of an image.

tests/official/fedlabel.py has whole rounds by its paper, with the choices of its code (`fedlabel.as_in_code`) and with
its bug.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.interface import Received, State, Upload
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.methods import METHODS, fedlabel
from fedjax_ssl.run.validation import validate
from tests.helpers.experts_by_hand import choose_by_hand
from tests.helpers.linear_network import divided
from tests.helpers.small_problem import federation, handed_on, phases_of, pixels_of, predicted, sent_down, small_problem
from tests.helpers.small_problem import train as train_client

SOME, ALL, TWO = range(3)
LABELLED_STEPS, UNLABELLED_STEPS, BETA = 4, 5, 0.6
ROUND = jnp.int32(7)


@pytest.fixture(scope="module")
def data():
    return federation([[0, -1, -1, 2, 1, -1, 0, -1, -1], [1, 2, 0], [2, -1, -1, 0]])


def build(**fields):
    steps = {"fedlabel.labelled_steps": LABELLED_STEPS, "fedlabel.unlabelled_steps": UNLABELLED_STEPS}
    problem = small_problem("fedlabel", **{**steps, "confidence.threshold": BETA, **fields})
    validate(problem.config)
    return problem, METHODS["fedlabel"].factory(problem)


class Round(NamedTuple):
    """One client's round: what it received, the results of its first phase, its second job, and that one's results."""

    received: Any
    supervised: Any
    second: Any
    finished: Any


def run(data, client, **fields):
    problem, method = build(**fields)
    received = sent_down(problem, ROUND)
    first, supervised = train_client(phases_of(method)[0], received, data, client)
    before = handed_on(first, supervised)
    second, finished = train_client(phases_of(method)[1], received, data, client, previous=before)
    return Round(received, supervised, second, finished)


def test_images_without_a_step_are_not_looked_at(data):
    """Two steps of three of five images: what is said of the others is nothing, and the report says so."""
    result, size = run(data, SOME, **{"fedlabel.unlabelled_steps": 2, "confidence.debias": "app_u"}), 9
    (deck,) = result.second.work.decks.values()
    positions = np.unique(np.asarray(deck.order)[:, : int(deck.size)])
    assert 3 <= len(positions) < 6
    report = result.second.work.labels.report
    np.testing.assert_array_equal(np.flatnonzero(report.made), positions)
    rows = np.asarray(data.client_index[SOME])
    x, models = pixels_of(data, rows[positions]), (result.received.model, result.supervised.upload.model)
    experts = [predicted(model, x) for model in models]
    experts = [divided(p, p.mean(axis=0)) for p in experts]  # each by its own mean over these images
    labels, probability, *_ = choose_by_hand(*experts, "variance", "both")
    np.testing.assert_array_equal(report.labels[positions], labels)
    for name, p in zip(("global", "local"), experts):
        np.testing.assert_array_equal(report.others[name][positions], p.argmax(axis=1))
    np.testing.assert_allclose(result.second.work.labels.more.probability[positions], probability, rtol=1e-4)
    known = np.flatnonzero(np.asarray(data.visible_labels)[rows[:size]] >= 0)
    np.testing.assert_array_equal(np.flatnonzero(report.qualified), sorted({*positions[probability > BETA], *known}))


def test_without_a_label_that_counts_a_client_sends_its_supervised_model(data):
    """beta = 1 is FedAvg on labels, to the statistics, with weight decay and all; and so is no unlabelled image."""
    for client, fields in ((SOME, {"confidence.threshold": 1.0}), (ALL, {}), (TWO, {"confidence.threshold": 1.0})):
        result = run(data, client, **fields)
        assert result.second.takes_part and np.any(result.finished.metrics["kept"] == 0)
        chex.assert_trees_all_close(result.finished.upload.model, result.supervised.upload.model, atol=1e-7, rtol=0)
        assert result.finished.upload.metadata["used"] == LABELLED_STEPS * (2 if client == TWO else 3)


def test_two_models_are_not_clipped():
    with pytest.raises(UserError, match=r"clip_norm is not for fedlabel\.as_in_code"):
        build(**{"fedlabel.as_in_code": True, "aggregation.clip_norm": 1.0})


def test_a_lost_upload_is_in_neither_mean_of_the_code():
    """1/2 mean w_L + 1/2 sum r w_U / sum r, over the accepted uploads."""
    problem, method = build(**{"fedlabel.as_in_code": True})
    model, rng = sent_down(problem).model, np.random.default_rng(0)
    uploads, local = (jax.tree.map(lambda x: np.float32(rng.normal(size=(3, *x.shape))), model) for _ in range(2))
    told = {"used": jnp.float32([3, 1, 8]), "supervised": local}
    received = Received(Upload(uploads, told), np.array([True, False, True]), np.arange(3), None, *[np.full(3, 9)] * 2)
    after, _ = method.aggregate(State(jnp.int32(0), model), None, received, jax.random.key(0))
    mean = lambda u, w: (3 * u[0] + 8 * u[2]) / 22 + (w[0] + w[2]) / 4  # noqa: E731
    chex.assert_trees_all_close(after.model, jax.tree.map(mean, uploads, local), atol=1e-5)


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
