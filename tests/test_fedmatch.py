"""FedMatch against NumPy, written from its equations: local training, server training, messages, helpers, the mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.client.agreement import agreed_labels, inter_client_consistency
from fedjax_ssl.client.compose import PLATEAU
from fedjax_ssl.config import apply_arguments, base_config, validate
from fedjax_ssl.engine.interface import Broadcast, Cohort, Received, Upload
from fedjax_ssl.learning.plateau import Plateau, fresh_plateau
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.methods import METHODS, fedmatch
from fedjax_ssl.methods.fedmatch import PARTS, PSI, SIGMA, UPLOADS
from fedjax_ssl.server.similar_clients import Uploads, nearest_clients, noise_image
from linear_network import at_rest, in_numpy, sgd_step
from small_problem import (
    CLASSES,
    NUM_CLIENTS,
    PIXELS,
    federation,
    itself,
    loss_and_gradient,
    mirrored,
    pixels_of,
    probabilities,
    running_mean,
    small_problem,
    statistics_of,
    train,
)

KEY = jax.random.key(0)
WEIGHTS = {"labelled_weight": 1.3, "helper_weight": 0.7, "pseudo_weight": 0.9, "l1_weight": 0.02, "l2_weight": 0.03}
ENTRIES = 2 * (CLASSES + PIXELS * CLASSES)  # of sigma and psi


def build(labels, weak=mirrored, **fields):
    """A problem with labels at 'clients' or at the 'server', and its method."""
    fields = {f"fedmatch.{name}": value for name, value in {**WEIGHTS, **fields}.items()}
    size = 2 if labels == "clients" else 4
    problem = small_problem("fedmatch", weak=weak, **{"data.labels": labels, "client.batch_size": size, **fields})
    return problem, METHODS["fedmatch"].factory(problem)


def random_params(problem, seed):
    return problem.network.init(jax.random.key(seed)).params


def numbers(tree):
    """A pytree as one vector; rows of leaves [R, ...] as a table by `jax.vmap`'s order of axes."""
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def cut(x, smallest):
    return {name: np.where(np.abs(leaf) <= smallest, 0, leaf) for name, leaf in x.items()}


# --- A client. -------------------------------------------------------------------------------------------------------


def train_by_hand(problem, data, received, work, rate, helpers):
    """The client's epochs on unpadded batches: in each step sigma by L_s, if it has labels, then psi by L_u.

    Args:
        problem, data, received: those of the phase.
        work: the client's; its orders are read.
        rate: the client's learning rate.
        helpers: their psi.

    Returns:
        sigma, psi, the statistics, and of each step (L_u, helper loss, pseudo loss, CE of the labelled images), sizes
        of its batches, and how many images were confident.
    """
    config, options = problem.config.client, problem.config.fedmatch
    sigma, psi = (in_numpy(received.model.params[name]) for name in (SIGMA, PSI))
    helper_models = [{name: sigma[name] + one[name] for name in sigma} for one in map(in_numpy, helpers)]
    received_statistics = statistics = statistics_of(received.model)
    velocities, rows, one_hot = [at_rest(sigma), at_rest(psi)], np.asarray(work.deck.rows), np.eye(CLASSES)
    weak, strong = pixels_of(data, rows, problem.weak), pixels_of(data, rows, problem.strong)
    truth, unlabelled = np.asarray(data.visible_labels)[rows], int(work.deck.size)
    labelled = 0 if work.labelled is None else int(work.labelled.size)
    per_epoch = round((labelled or unlabelled) / config.batch_size)
    size = -(-unlabelled // per_epoch) if labelled else config.batch_size
    steps, sizes, confident_images = [], [], []
    for epoch in range(config.epochs):
        for number in range(per_epoch):
            supervised, added = 0.0, []
            if labelled:
                batch = np.asarray(work.labelled.order)[epoch][:labelled]
                batch = batch[number * config.batch_size : (number + 1) * config.batch_size]
                theta, x = {name: sigma[name] + psi[name] for name in psi}, weak[batch]
                targets = one_hot[truth[batch]] / len(batch)
                supervised, gradient = loss_and_gradient(theta, x, x.mean(axis=0), targets)
                gradient = {name: options.labelled_weight * leaf for name, leaf in gradient.items()}
                sigma, velocities[0] = sgd_step(sigma, gradient, velocities[0], config, rate)
                added, sizes = [x], [*sizes, len(batch)]
            batch = np.asarray(work.deck.order)[epoch][:unlabelled][number * size : (number + 1) * size]
            theta = {name: sigma[name] + psi[name] for name in psi}
            x, x_strong = weak[batch], strong[batch]
            p = probabilities(theta, x, x.mean(axis=0))
            confident = p.max(axis=1) >= options.threshold
            share = confident[:, None] / max(confident.sum(), 1)
            of_helpers = [probabilities(model, x, received_statistics) for model in helper_models]
            votes = one_hot[p.argmax(axis=1)] + sum(one_hot[q.argmax(axis=1)] for q in of_helpers)
            gradient = {name: np.zeros_like(leaf) for name, leaf in psi.items()}
            helper_loss = 0.0
            for q in of_helpers:
                loss, by_helper = loss_and_gradient(theta, x, x.mean(axis=0), q * share / len(of_helpers))
                helper_loss += loss + np.sum(q * np.log(q) * share) / len(of_helpers)
                for name in psi:
                    gradient[name] += options.helper_weight * by_helper[name]
            pseudo_loss, by_vote = loss_and_gradient(
                theta, x_strong, x_strong.mean(axis=0), one_hot[votes.argmax(axis=1)] * share
            )
            value = options.helper_weight * helper_loss + options.pseudo_weight * pseudo_loss
            for name in psi:
                gradient[name] += options.pseudo_weight * by_vote[name]
                gradient[name] += options.l1_weight * np.sign(psi[name])
                gradient[name] += 2 * options.l2_weight * (psi[name] - sigma[name])
                value += options.l1_weight * np.abs(psi[name]).sum()
                value += options.l2_weight * np.sum((sigma[name] - psi[name]) ** 2)
            psi, velocities[1] = sgd_step(psi, gradient, velocities[1], config, rate)
            statistics = running_mean(statistics, *added, x, x_strong)
            steps.append((value, helper_loss, pseudo_loss, supervised))
            sizes, confident_images = [*sizes, len(batch)], [*confident_images, int(confident.sum())]
    return sigma, psi, statistics, np.array(steps), sizes, confident_images


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
    data = federation([[-1], of_client], anchors=[0, 1] if labels == "server" else ())
    params = {SIGMA: random_params(problem, 4), PSI: random_params(problem, 5)}
    statistics = problem.network.init(KEY).batch_stats
    rate = problem.config.client.learning_rate
    received = Broadcast(Model(params, statistics), jnp.float32(rate), jnp.bool_(any(present)))
    all_helpers = [random_params(problem, seed) for seed in (6, 7)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *all_helpers)
    personal = {"entries": jnp.float32(0), "helpers": stacked, "present": jnp.array(present)}
    own = {PLATEAU: Plateau(jnp.float32(0.5), jnp.float32(0.0), jnp.int32(0))}  # no loss is below 0

    job, finished = train(method.phases[0], received, data, 1, own, personal=personal)
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
    problem, method = build("clients", threshold=0.6, helper_weight=0.0, l1_weight=0.0, l2_weight=0.0)
    problem.config.threshold.debias, problem.config.client.epochs = "app_u", 1
    data = federation([[0, -1, -1, 2, -1, -1, 1, -1, -1, -1]])
    params = {SIGMA: random_params(problem, 4), PSI: random_params(problem, 5)}
    received = Broadcast(Model(params, problem.network.init(KEY).batch_stats), jnp.float32(1e-9), jnp.bool_(True))
    helper = random_params(problem, 6)
    personal = {
        "entries": jnp.float32(0),
        "helpers": jax.tree.map(lambda leaf: leaf[None], helper),
        "present": jnp.ones(1, bool),
    }
    job, finished = train(method.phases[0], received, data, 0, {PLATEAU: fresh_plateau()}, personal=personal)
    work = job.work[0]
    sigma, psi, of_helper = (in_numpy(one) for one in (params[SIGMA], params[PSI], helper))
    theta, other = ({name: sigma[name] + one[name] for name in sigma} for one in (psi, of_helper))
    rows, centre = np.asarray(work.deck.rows), statistics_of(received.model)
    unlabelled = [place for place in range(10) if data.visible_labels[rows[place]] < 0]
    prior = probabilities(theta, pixels_of(data, rows[unlabelled], mirrored), centre).mean(axis=0)
    np.testing.assert_allclose(work.prior, prior, rtol=1e-5)

    def divided(p):
        return p / prior / (p / prior).sum(axis=1, keepdims=True)

    losses, changed = [], []
    for batch in np.split(np.asarray(work.deck.order)[0][:7], [4]):
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
    _, finished = train(method.phases[0], received, data, 0, {PLATEAU: fresh_plateau()}, personal=personal)
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
        _, finished = train(method.phases[0], received, data, client, {PLATEAU: before}, personal=personal)
        plateau = finished.own[PLATEAU]
        assert plateau.lowest == finished.metrics[name] > 0 and plateau.factor == 1


@pytest.mark.parametrize(
    ("bound", "labelled", "unlabelled", "steps", "size"),
    [
        (0, 3, 7, 2, 4),  # 1.5 labelled batches of 2 are two; so are the unlabelled images
        (0, 5, 5, 2, 3),  # 2.5 are two as well
        (0, 1, 9, 1, 9),
        (4, 1, 9, 3, 3),  # one, but of unlabelled images at most 4 are in a batch
        (0, 0, 10, 1, 10),
        (4, 0, 10, 3, 4),
        (0, 4, 0, 2, 0),
        (0, 0, 0, 0, 0),  # takes no part
    ],
)
def test_an_epoch_has_as_many_batches_of_both_kinds(bound, labelled, unlabelled, steps, size):
    problem, method = build("clients", unlabelled_batch=bound)
    problem.config.data.partition_file = "saved.npz"  # who has how many labels is not said
    data = federation([[1] * labelled + [-1] * unlabelled])
    job = prepared(problem, method, data, KEY)
    assert job.num_steps == 2 * steps  # epochs
    assert steps == 0 or job.work[0].size == size


def prepared(problem, method, data, key):
    """The job of client 0."""
    params = {SIGMA: random_params(problem, 4), PSI: random_params(problem, 5)}
    model = Model(params, problem.network.init(KEY).batch_stats)
    cohort = Cohort(jnp.array([0]), {PLATEAU: fresh_plateau((1,))}, key, personal={"entries": jnp.zeros(1)})
    received = Broadcast(model, jnp.float32(0.1), jnp.bool_(False))
    return jax.tree.map(lambda leaf: leaf[0], method.phases[0].prepare(received, data, cohort, None))


@pytest.mark.parametrize(
    ("expected", "fields"),
    [
        (1125, {"data.num_labelled": 5000, "data.partition": "dirichlet_pairs", "client.batch_size": 128}),  # SAGE's
        (225, {"data.labels_per_class": 25, "data.partition": "stratified", "client.batch_size": 25}),
        (2250, {"data.labels_per_class": 25, "data.partition": "profiles", "client.batch_size": 250}),
        # A client of 477 images, 95 of them labelled, has 1.48 batches of 64: its 382 others are one batch.
        (382, {"data.labelled_share": 0.2, "client.batch_size": 64}),
        (2500, {"data.labels_per_class": 5, "client.batch_size": 10}),  # a client may have no labelled image
        (2500, {"data.num_labelled": 5000, "data.partition": "dirichlet_classes"}),
        (2500, {"data.labelled_share": 0.2, "data.partition_file": "saved.npz"}),
        (1, {"data.reveal_labels": True}),
    ],
)
def test_the_largest_batch_is_that_of_the_client_with_the_fewest_labels_beside_it(expected, fields):
    problem = small_problem("fedmatch", **{"data.labels": "clients", "num_clients": 20, **fields})
    problem = problem._replace(num_classes=10)
    assert fedmatch.largest_batch(problem, 2500) == expected


def test_the_room_of_a_batch_changes_nothing():
    data, found = federation([[0, -1, -1, 2, -1, -1, 1, -1, -1, -1]]), []
    for bound in (0, 4):
        problem, method = build("clients", unlabelled_batch=bound, threshold=0.6)
        params = {SIGMA: random_params(problem, 4), PSI: random_params(problem, 5)}
        received = Broadcast(Model(params, problem.network.init(KEY).batch_stats), jnp.float32(0.1), jnp.bool_(False))
        personal = {"entries": jnp.float32(0)}
        found.append(train(method.phases[0], received, data, 0, {PLATEAU: fresh_plateau()}, personal=personal)[1])
    np.testing.assert_allclose(numbers(found[0].upload), numbers(found[1].upload), atol=1e-6)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_of_batches_may_be_the_same_in_every_round(shuffle):
    problem, method = build("clients", shuffle=shuffle)
    data = federation([[0, 1, 2] + [-1] * 7])
    works = [prepared(problem, method, data, key).work[0] for key in jax.random.split(KEY, 2)]
    for of_round in zip(*((work.deck.order, work.labelled.order) for work in works)):
        assert np.array_equal(*of_round) == (not shuffle)


# --- Labels by votes, and agreement. ---------------------------------------------------------------------------------


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


def test_helpers_that_agree_cost_nothing():
    logits = jax.random.normal(KEY, (4, CLASSES))
    confident, present = jnp.array([True, False, True, True]), jnp.array([True, True])
    other = logits.at[1].add(jnp.arange(CLASSES))  # another opinion where nobody is confident
    helpers = jnp.stack([logits, other])
    np.testing.assert_allclose(inter_client_consistency(helpers, present, logits, confident), 0, atol=1e-6)
    assert inter_client_consistency(helpers, present, logits, ~confident) > 0.01
    assert inter_client_consistency(helpers, ~present, logits, ~confident) == 0


# --- The server. -----------------------------------------------------------------------------------------------------


def test_at_first_psi_is_a_fifth_of_sigma():
    _, method = build("clients", smallest=0.3)
    state = method.init(federation([[0]]), KEY)
    sigma, psi = (in_numpy(state.server[PARTS][name]) for name in (SIGMA, PSI))
    for name in sigma:
        np.testing.assert_allclose(psi[name], 0.2 * sigma[name], rtol=1e-6)
    tested = {name: sigma[name] + cut(psi, 0.3)[name] for name in sigma}
    assert 0 < sum(np.sum(np.abs(leaf) <= 0.3) for leaf in psi.values()) < ENTRIES // 2
    for name, leaf in in_numpy(state.model.params).items():
        np.testing.assert_allclose(leaf, tested[name], rtol=1e-6)


def test_a_server_with_labels_trains_sigma_alone():
    """One step on all anchors; then a lower rate, for no loss is below the lowest."""
    problem, method = build("server", weak=itself, patience=1)
    config = problem.config.server
    config.update({"epochs": 1, "batch_size": 4, "augmentation": "weak", "learning_rate": 0.2, "clip_norm": 0.0})
    anchors = [0, 1, 2, 2]
    data = federation([[-1] * 3], anchors)
    state = method.init(data, KEY)
    lowest = Plateau(jnp.float32(0.5), jnp.float32(0.0), jnp.int32(0))
    state = state._replace(server={**state.server, PLATEAU: lowest})
    after, metrics = method.server_before(state, data, KEY)
    sigma, psi = (in_numpy(state.server[PARTS][name]) for name in (SIGMA, PSI))
    theta, x = {name: sigma[name] + psi[name] for name in psi}, pixels_of(data, range(4))
    loss, gradient = loss_and_gradient(theta, x, x.mean(axis=0), np.eye(CLASSES)[anchors] / 4)
    gradient = {name: 1.3 * leaf for name, leaf in gradient.items()}
    expected, _ = sgd_step(sigma, gradient, at_rest(sigma), config, 0.1)
    np.testing.assert_allclose(metrics["server_loss"], loss, rtol=1e-5)
    found = in_numpy(after.server[PARTS][SIGMA])
    for name in sigma:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
        np.testing.assert_array_equal(in_numpy(after.server[PARTS][PSI])[name], psi[name])
        np.testing.assert_allclose(in_numpy(after.model.params)[name], expected[name] + psi[name], atol=1e-4)
    np.testing.assert_allclose(after.server[PLATEAU], [0.5 / 3, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_server_s_batches_may_be_the_same_in_every_round(shuffle):
    problem, method = build("server", shuffle=shuffle)
    problem.config.server.update({"epochs": 1, "batch_size": 2})
    data = federation([[-1] * 3], anchors=[0, 1, 2, 2])
    state = method.init(data, KEY)
    first, second = (method.server_before(state, data, key)[0].server[PARTS] for key in jax.random.split(KEY, 2))
    assert np.array_equal(numbers(first[SIGMA]), numbers(second[SIGMA])) == (not shuffle)


def test_a_server_without_labels_does_not_train():
    _, method = build("clients")
    data = federation([[0, -1]])
    state = method.init(data, KEY)
    after, metrics = method.server_before(state, data, KEY)
    assert not metrics
    np.testing.assert_array_equal(numbers(after), numbers(state))


@pytest.mark.parametrize("labels", ["clients", "server"])
def test_uploads_are_averaged_uniformly_and_remembered(labels):
    problem, method = build(labels, smallest=0.2)
    data = federation([[-1] * 3, [-1] * 2, [-1], [-1]], anchors=[0] if labels == "server" else ())
    state = method.init(data, KEY)
    before = state.server[PARTS]
    names = (SIGMA, PSI) if labels == "clients" else (PSI,)
    rows = [{name: random_params(problem, 10 * seed + len(name)) for name in names} for seed in range(3)]
    statistics = {"mean": jnp.array([[0.1] * PIXELS, [0.9] * PIXELS, [0.3] * PIXELS])}
    uploads = Upload(
        Model(jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows), statistics), {"entries": jnp.ones(3)}
    )
    accepted = jnp.array([True, False, True])
    received = Received(uploads, accepted, jnp.array([2, 1, 0]), None, jnp.array([1, 2, 3]), jnp.array([1, 2, 3]))
    after, _ = jax.jit(method.aggregate)(state, data, received, KEY)
    parts, memory = after.server[PARTS], after.server[UPLOADS]
    for name in (SIGMA, PSI):
        expected = (numbers(rows[0][name]) + numbers(rows[2][name])) / 2 if name in names else numbers(before[name])
        np.testing.assert_allclose(numbers(parts[name]), expected, rtol=1e-5)
    psi = numbers(parts[PSI])
    tested = numbers(parts[SIGMA]) + np.where(np.abs(psi) <= 0.2, 0, psi)
    np.testing.assert_allclose(numbers(after.model.params), tested, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(memory.seen, [True, False, True, False])
    pixels = np.asarray(noise_image((2, 2, 1)), np.float64).reshape(1, PIXELS) / 255
    for client, row in ((2, 0), (0, 2)):
        sigma, psi = (in_numpy(rows[row].get(name, before[name])) for name in (SIGMA, PSI))
        theta = {name: sigma[name] + psi[name] for name in psi}
        expected = probabilities(theta, pixels, np.asarray(statistics["mean"][row], np.float64))[0]
        np.testing.assert_allclose(memory.vectors[client], expected, atol=1e-5)
        for name in (SIGMA, PSI):
            held = jax.tree.map(lambda leaf, client=client: leaf[client], memory.params[name])
            np.testing.assert_array_equal(numbers(held), numbers(rows[row].get(name, before[name])))
    assert not numbers(jax.tree.map(lambda leaf: leaf[1], memory.params)).any()  # it was not accepted


# --- Helpers and messages. -------------------------------------------------------------------------------------------


def test_the_noise_is_one_image():
    noise = np.asarray(noise_image((32, 32, 3)))
    assert noise.shape == (1, 32, 32, 3) and noise.min() >= 0 and noise.max() <= 255
    np.testing.assert_array_equal(noise, noise_image((32, 32, 3)))
    # A normal distribution of mean and deviation 125 between -1 and 1.04 deviations.
    np.testing.assert_allclose([noise.mean(), noise.std()], [127.1, 68.1], atol=3)


def test_helpers_are_the_nearest_clients():
    vectors = np.array([[0.0, 0], [1, 0], [0, 3], [0, 1], [9, 9], [0, 0.5]])
    seen = np.array([True, True, True, True, True, False])
    uploads = Uploads({}, jnp.array(vectors, jnp.float32), jnp.array(seen))
    find = jax.jit(nearest_clients, static_argnums=2)
    near, present = find(uploads, jnp.array([0, 2, 5, 4]), 2)
    np.testing.assert_array_equal(near[:2], [[1, 3], [3, 0]])  # of 0 the equally distant 1 and 3, in their order
    np.testing.assert_array_equal(present, [[True] * 2, [True] * 2, [False] * 2, [True] * 2])
    for client, found in zip((0, 2, 4), np.asarray(near)[[0, 1, 3]]):
        distances = np.linalg.norm(vectors - vectors[client], axis=1)
        distances[[client, 5]] = np.inf
        np.testing.assert_array_equal(found, np.argsort(distances, kind="stable")[:2])
    few = uploads._replace(seen=jnp.array([True, True] + [False] * 4))
    np.testing.assert_array_equal(find(few, jnp.array([0, 1, 2, 3]), 2)[1], [[True, False]] * 2 + [[False] * 2] * 2)


@pytest.mark.parametrize("sparse_down", [True, False])
@pytest.mark.parametrize("round_number", [8, 9])
def test_what_travels_down_is_counted_entry_by_entry(round_number, sparse_down):
    """In round 9 client 1 gets the psi of clients 3 and 2; client 0 has never uploaded and gets both parts whole."""
    problem, method = build("clients", smallest=0.2, least_change=0.3, sparse_down=sparse_down, index_bytes=2)
    state = method.init(federation([[0, -1]]), KEY)
    state = state._replace(round=jnp.int32(round_number))
    names = (SIGMA, PSI) if sparse_down else (PSI,)
    held = [
        {name: random_params(problem, 100 + 10 * client + len(name)) for name in names} for client in range(NUM_CLIENTS)
    ]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *held)
    vectors = jnp.array([[0.0, 0, 1], [0.2, 0.3, 0.5], [0.9, 0, 0.1], [0.2, 0.4, 0.4]])
    uploads = Uploads(params, vectors, jnp.array([False, True, True, True]))
    state = state._replace(server={**state.server, UPLOADS: uploads})
    clients = jnp.array([1, 0])
    sent = method.broadcast(state, None, None)
    message = jax.jit(method.personal)(state, None, clients, KEY)
    assert bool(sent.extra) == (round_number == 9)
    np.testing.assert_array_equal(message["present"], [[round_number == 9] * 2, [False] * 2])
    for place, helper in enumerate((3, 2)):
        psi = jax.tree.map(lambda leaf, place=place: leaf[0, place], message["helpers"])
        expected = numbers(held[helper][PSI]) if round_number == 9 else 0  # they are not even looked up
        np.testing.assert_array_equal(numbers(psi), expected)

    cut_off = lambda x: np.where(np.abs(x) <= 0.2, 0, x)  # noqa: E731
    parts = {name: numbers(state.server[PARTS][name]) for name in (SIGMA, PSI)}
    entries = ENTRIES
    if sparse_down:
        entries = np.sum(np.abs(parts[SIGMA] - numbers(held[1][SIGMA])) > 0.3)
        entries += np.sum(np.abs(cut_off(parts[PSI]) - cut_off(numbers(held[1][PSI]))) > 0.3)
        assert 0 < entries < ENTRIES
    if round_number == 9:
        own = cut_off(numbers(held[1][PSI]))
        for helper in (3, 2):
            psi = cut_off(numbers(held[helper][PSI]))
            entries += np.sum((psi != 0) & (np.abs(psi - own) > 0.3))
    np.testing.assert_array_equal(message["entries"], [entries, ENTRIES])
    one = jax.tree.map(lambda leaf: leaf[0], message)
    others = 4 + 4 * PIXELS  # the learning rate, and the running mean
    assert method.wire_bytes.down(sent, one) == 6 * entries + others
    upload = Upload(Model({}, sent.model.batch_stats), {"entries": jnp.float32(7)})
    assert method.wire_bytes.up(upload) == 6 * 7 + 4 * PIXELS


def test_without_helpers_nothing_but_a_count_is_personal():
    _, method = build("clients", helpers=0)
    state = method.init(federation([[0, -1]]), KEY)
    assert set(jax.jit(method.personal)(state, None, jnp.array([1, 0]), KEY)) == {"entries"}


# --- The paper's settings. -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "labels"), [("labels_at_client", "clients"), ("labels_at_server", "server")])
def test_a_setting_of_the_paper_is_a_word(setting, labels):
    config = apply_arguments(base_config(), f"fedmatch,{setting},non_iid")
    validate(config)
    assert (config.data.labels, config.model.name, config.data.partition) == (labels, "resnet9", "profiles")
    assert apply_arguments(base_config(), f"fedmatch,{setting}").data.partition == "stratified"
    assert config.client.momentum == config.server.weight_decay == config.client.clip_norm == 0
