"""A client's disjoint learning against NumPy: sigma and psi in turn, by FedMatch's losses, each at its own rate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.engine.interface import Broadcast
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fedmatch.phases import PLATEAU, PSI, SIGMA, Plateau, fresh_plateau
from fedjax_ssl.ops.sgd import Model
from tests.helpers.fedmatch_by_hand import ENTRIES, KEY, build, cut, random_params, train_by_hand
from tests.helpers.linear_network import in_numpy
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


@pytest.mark.parametrize(
    ("labels", "threshold", "present", "sizes"),
    [
        ("clients", 0.6, [True, True], [2, 4, 1, 3]),  # 3 labelled images in 2 batches, and 7 others in as many
        ("clients", 1.1, [False, False], [2, 4, 1, 3]),  # nothing is confident: the L1 and L2 terms alone move psi
        ("server", 0.95, [False, True], [4, 4]),  # 10 images are 2.5 batches of 4: two, and two images have no step
    ],
)
def test_a_client_s_training_is_that_of_the_equations(labels, threshold, present, sizes):
    """Two epochs, SGD with all that it has, at the client's own learning rate."""
    problem, method = build(labels, threshold=threshold, smallest=0.5, least_change=0.05, patience=1)
    of_client = [0, -1, -1, 2, -1, -1, 1, -1, -1, -1] if labels == "clients" else [-1] * 10
    data = federation([[-1], of_client], at_server=[0, 1] if labels == "server" else ())
    params = {SIGMA: random_params(problem, 4), PSI: random_params(problem, 5)}
    statistics = problem.network.init(KEY).batch_stats
    rate = problem.config.client.learning_rate
    received = Broadcast(Model(params, statistics), jnp.float32(rate), jnp.bool_(any(present)))
    all_helpers = [random_params(problem, seed) for seed in (6, 7)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *all_helpers)
    personal = {"entries": jnp.float32(0), "helpers": stacked, "present": jnp.array(present)}
    own = {PLATEAU: Plateau(jnp.float32(0.5), jnp.float32(0.0), jnp.int32(0))}  # no loss is below 0

    job, finished = train(phases_of(method)[0], received, data, 1, own, personal=personal)
    helpers = [one for one, here in zip(all_helpers, present) if here]
    work = job.work[0]  # the plateau's state is beside it
    sigma, psi, after, steps, by_hand, confident = train_by_hand(problem, data, received, work, rate / 2, helpers)
    assert job.num_steps == 4 and by_hand == sizes * 2
    assert (sum(confident) > 0) == (threshold < 1) and min(confident) < 4  # some, but not all

    model, told = finished.upload
    np.testing.assert_allclose(statistics_of(model), after, atol=1e-6)
    assert any(np.any(np.abs(leaf) <= 0.5) for leaf in sigma.values())  # which is not cut
    trained = {PSI: psi, **({SIGMA: sigma} if labels == "clients" else {})}
    assert set(model.params) == set(trained)
    entries = 0
    for name, new in trained.items():
        old, uploaded = in_numpy(params[name]), in_numpy(model.params[name])
        compared = cut(new, 0.5) if name == PSI else new
        for leaf in new:
            travels = np.abs(compared[leaf] - old[leaf]) > 0.05
            np.testing.assert_allclose(uploaded[leaf], np.where(travels, new[leaf], old[leaf]), atol=1e-5)
            assert np.all(uploaded[leaf][~travels] == old[leaf][~travels])  # to the bit
            assert name == SIGMA or leaf == "bias" or np.any(travels & (compared[leaf] != new[leaf]))
            entries += travels.sum()
    assert told["entries"] == entries and 0 < entries < ENTRIES // (1 if labels == "clients" else 2)

    names = ("client_loss", "helper_loss", "pseudo_loss", "labelled_loss")[: 4 if labels == "clients" else 3]
    found = [finished.metrics[name] for name in names]
    np.testing.assert_allclose(found, steps.mean(axis=0)[: len(names)], rtol=1e-4, atol=1e-6)
    plateau = finished.own[PLATEAU]  # a patience of one visit is over
    np.testing.assert_allclose(plateau, [0.5 / 3, 0.0, 0.0], rtol=1e-6)


def test_votes_may_be_of_probabilities_without_the_prior():
    """Who is confident, and the label of the vote, of all voters' probabilities divided by the client's prior."""
    problem, _ = build("clients", threshold=0.6, helper_weight=0.0, l1_weight=0.0, l2_weight=0.0)
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
    deck = work.work.decks.deck
    sigma, psi, of_helper = (in_numpy(one) for one in (params[SIGMA], params[PSI], helper))
    theta, other = ({name: sigma[name] + one[name] for name in sigma} for one in (psi, of_helper))
    rows, centre = np.asarray(deck.rows), statistics_of(received.model)
    unlabelled = [place for place in range(10) if data.visible_labels[rows[place]] < 0]
    prior = probabilities(theta, pixels_of(data, rows[unlabelled], mirrored), centre).mean(axis=0)
    np.testing.assert_allclose(work.labels.prior, prior, rtol=1e-5)

    def divided(p):
        return p / prior / (p / prior).sum(axis=1, keepdims=True)

    losses, changed = [], []
    for batch in np.split(np.asarray(deck.order)[0][:7], [4]):
        x, strong = (pixels_of(data, rows[batch], view) for view in (problem.weak, problem.strong))
        plain, by_helper = probabilities(theta, x, x.mean(axis=0)), probabilities(other, x, centre)
        p, q = divided(plain), divided(by_helper)
        votes = np.eye(CLASSES)[p.argmax(axis=1)] + np.eye(CLASSES)[q.argmax(axis=1)]
        confident, labels = p.max(axis=1) >= 0.6, votes.argmax(axis=1)
        of_strong = probabilities(theta, strong, strong.mean(axis=0))[np.arange(len(x)), labels]
        losses.append(np.mean(-np.log(of_strong[confident])) if confident.any() else 0.0)
        votes = np.eye(CLASSES)[plain.argmax(axis=1)] + np.eye(CLASSES)[by_helper.argmax(axis=1)]
        changed += [*(labels != votes.argmax(axis=1)), *(confident != (plain.max(axis=1) >= 0.6))]
    assert any(changed)
    np.testing.assert_allclose(finished.metrics["pseudo_loss"], np.mean(losses), rtol=1e-4)


def test_a_loss_that_falls_keeps_the_rate():
    """L_s of the client's own visit is remembered as the lowest; another client's rate is another number."""
    problem, method = build("clients", patience=2)
    data = federation([[0, -1, -1]])
    params = {SIGMA: random_params(problem, 4), PSI: random_params(problem, 5)}
    received = Broadcast(Model(params, problem.network.init(KEY).batch_stats), jnp.float32(0.1), jnp.bool_(False))
    personal = {"entries": jnp.float32(0)}
    _, finished = train(phases_of(method)[0], received, data, 0, {PLATEAU: fresh_plateau()}, personal=personal)
    plateau = finished.own[PLATEAU]
    assert (float(plateau.factor), int(plateau.waited)) == (1.0, 0)
    assert plateau.lowest == finished.metrics["labelled_loss"] > 0


def test_a_client_without_labels_goes_by_its_unlabelled_loss():
    """Its L_s is 0 in every visit, which would be no new minimum from the second one on."""
    problem, method = build("clients", patience=1, threshold=0.0)
    data = federation([[0, -1, -1], [-1] * 5])
    params = {SIGMA: random_params(problem, 4), PSI: random_params(problem, 5)}
    received = Broadcast(Model(params, problem.network.init(KEY).batch_stats), jnp.float32(0.1), jnp.bool_(False))
    personal = {"entries": jnp.float32(0)}
    before = Plateau(jnp.float32(1.0), jnp.float32(1e3), jnp.int32(0))
    for client, name in ((0, "labelled_loss"), (1, "client_loss")):
        _, finished = train(phases_of(method)[0], received, data, client, {PLATEAU: before}, personal=personal)
        plateau = finished.own[PLATEAU]
        assert plateau.lowest == finished.metrics[name] > 0 and plateau.factor == 1
        rests = jax.tree.map(np.array_equal, finished.upload.model.params[SIGMA], params[SIGMA])
        assert all(jax.tree.leaves(rests)) == (client == 1)  # no labels: nor do momentum and weight decay move sigma
