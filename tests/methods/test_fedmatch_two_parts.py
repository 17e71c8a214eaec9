"""A client's disjoint learning in FedMatch: what several models say of the same images, and its own learning rate.

tests/official/fedmatch.py has the steps of sigma and psi, and the sparse uploads.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.interface import Broadcast
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fedmatch.client import agreed_labels
from fedjax_ssl.methods.fedmatch.phases import LEAST, PLATEAU, PSI, SIGMA, Plateau, after_epoch, fresh_plateau
from fedjax_ssl.ops.sgd import Model
from tests.helpers.fedmatch_by_hand import KEY, build, random_params
from tests.helpers.linear_network import divided, in_numpy
from tests.helpers.small_problem import (
    CLASSES,
    federation,
    mirrored,
    phases_of,
    pixels_of,
    probabilities,
    statistics_of,
    train,
)


def logits_of(labels, top=3.0):
    return top * jnp.eye(CLASSES)[jnp.array(labels)]


def test_the_label_is_the_vote_s():
    guess = jnp.array([0, 2, 1, 2])
    helpers = jnp.stack([logits_of([1, 2, 0, 1]), logits_of([1, 0, 2, 0])])
    both, first, nobody = (jnp.array(present) for present in ([True, True], [True, False], [False, False]))
    np.testing.assert_array_equal(agreed_labels(guess, helpers, both), [1, 2, 0, 0])  # ties: the first class
    np.testing.assert_array_equal(agreed_labels(guess, helpers, first), [0, 2, 0, 1])
    np.testing.assert_array_equal(agreed_labels(guess, helpers, nobody), guess)
    np.testing.assert_array_equal(agreed_labels(guess, helpers[:0], both[:0]), guess)


@pytest.mark.test_all
def test_votes_may_be_of_probabilities_without_the_prior():
    """Who is confident, and the label of the vote, of all voters' probabilities divided by the client's prior."""
    problem, _ = build("clients", threshold=0.6)
    problem.config.confidence.debias, problem.config.client.epochs = "app_u", 1
    method = METHODS["fedmatch"].factory(problem)  # a method reads `debias` when it is made
    data = federation([[0, -1, -1, 2, -1, -1, 1, -1, -1, -1]])
    params = {SIGMA: random_params(problem, 4), PSI: random_params(problem, 5)}
    received = Broadcast(Model(params, problem.network.init(KEY).batch_stats), jnp.float32(1e-9), jnp.bool_(True))
    helper = random_params(problem, 6)
    personal = {
        "entries": jnp.float32(0),
        "helpers": jax.tree.map(lambda leaf: leaf[None], helper),
        "present": jnp.ones(1, bool),
    }
    job, finished = train(phases_of(method)[0], received, data, 0, {PLATEAU: fresh_plateau()}, personal=personal)
    work = job.work[0]
    deck = work.work.unlabelled
    sigma, psi, of_helper = (in_numpy(one) for one in (params[SIGMA], params[PSI], helper))
    theta, other = ({name: sigma[name] + one[name] for name in sigma} for one in (psi, of_helper))
    rows, centre = np.asarray(deck.rows), statistics_of(received.model)
    unlabelled = [place for place in range(10) if data.visible_labels[rows[place]] < 0]
    prior = probabilities(theta, pixels_of(data, rows[unlabelled], mirrored), centre).mean(axis=0)
    np.testing.assert_allclose(work.labels.prior, prior, rtol=1e-5)

    losses, changed = [], []
    for batch in np.split(np.asarray(deck.order)[0][:7], [4]):
        x, strong = (pixels_of(data, rows[batch], view) for view in (problem.weak, problem.strong))
        plain, by_helper = probabilities(theta, x, x.mean(axis=0)), probabilities(other, x, centre)
        p, q = divided(plain, prior), divided(by_helper, prior)
        votes = np.eye(CLASSES)[p.argmax(axis=1)] + np.eye(CLASSES)[q.argmax(axis=1)]
        confident, labels = p.max(axis=1) >= 0.6, votes.argmax(axis=1)
        of_strong = probabilities(theta, strong, strong.mean(axis=0))[np.arange(len(x)), labels]
        losses.append(np.mean(-np.log(of_strong[confident])) if confident.any() else 0.0)
        votes = np.eye(CLASSES)[plain.argmax(axis=1)] + np.eye(CLASSES)[by_helper.argmax(axis=1)]
        changed += [*(labels != votes.argmax(axis=1)), *(confident != (plain.max(axis=1) >= 0.6))]
    assert any(changed)
    np.testing.assert_allclose(finished.metrics["pseudo_loss"], np.mean(losses), rtol=1e-4)


def test_the_rate_falls_after_so_many_epochs_without_a_minimum():
    losses, patience = [3.0, 2.0, 2.5, 2.0, 2.2, 1.0, 1.0, 1.5, 1.2, 0.9, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0], 3
    step, plateau = jax.jit(after_epoch, static_argnums=2), fresh_plateau()
    lowest, left, factor, falls = np.inf, patience, 1.0, 0
    for loss in losses:
        if loss < lowest:
            lowest, left = loss, patience
        else:
            left -= 1
            if left == 0:
                factor, left, falls = factor / 3, patience, falls + 1
        plateau = step(plateau, loss, patience)
        np.testing.assert_allclose(plateau.factor, factor, rtol=1e-5)
        assert (float(plateau.lowest), int(plateau.waited)) == (np.float32(lowest), patience - left)
    assert falls == 4


def test_the_rate_does_not_vanish():
    plateau = fresh_plateau()._replace(lowest=np.float32(0.0), factor=np.float32(2 * LEAST))
    np.testing.assert_allclose(after_epoch(plateau, 1.0, 1).factor, LEAST, rtol=1e-6)


def visit(problem, method, data, client, plateau, rate=0.1):
    """The results of a client's training, and the parameters that it received."""
    params = {SIGMA: random_params(problem, 4), PSI: random_params(problem, 5)}
    received = Broadcast(Model(params, problem.network.init(KEY).batch_stats), jnp.float32(rate), jnp.bool_(False))
    personal = {"entries": jnp.float32(0)}
    return train(phases_of(method)[0], received, data, client, {PLATEAU: plateau}, None, personal, jit=True)[1], params


@pytest.mark.test_all
def test_a_client_trains_at_its_own_rate_which_falls_after_visits_without_a_minimum():
    problem, method = build("clients", patience=1)
    data = federation([[0, -1, -1]])
    slow, _ = visit(problem, method, data, 0, Plateau(jnp.float32(0.5), jnp.float32(0.0), jnp.int32(0)))
    plain, _ = visit(problem, method, data, 0, fresh_plateau(), rate=0.05)
    jax.tree.map(np.testing.assert_array_equal, slow.upload, plain.upload)
    np.testing.assert_allclose(slow.own[PLATEAU], [0.5 / 3, 0.0, 0.0], rtol=1e-6)  # no loss is below 0
    assert plain.own[PLATEAU].factor == 1 and plain.own[PLATEAU].lowest == plain.metrics["labelled_loss"] > 0


def test_a_client_without_labels_goes_by_its_unlabelled_loss():
    """Its L_s is 0 in every visit, which would be no new minimum from the second one on."""
    problem, method = build("clients", patience=1, threshold=0.0)
    before = Plateau(jnp.float32(1.0), jnp.float32(1e3), jnp.int32(0))
    finished, received = visit(problem, method, federation([[0], [-1] * 5]), 1, before)
    plateau = finished.own[PLATEAU]
    assert plateau.lowest == finished.metrics["client_loss"] > 0 and plateau.factor == 1
    for leaf, other in zip(*(jax.tree.leaves(model[SIGMA]) for model in (finished.upload.model.params, received))):
        np.testing.assert_array_equal(leaf, other)  # no labels: nor do momentum and weight decay move sigma
