"""IsoFed's alternation and its adaptation against NumPy; rounds of eligible clients alone."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.client import STANDARD
from fedjax_ssl.engine.interface import Received, Selection, State, Upload
from fedjax_ssl.engine.round import _of_those_who_answer
from fedjax_ssl.methods import METHODS
from tests.helpers.consistency_by_hand import batches
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    NUM_CLIENTS,
    SmallNetwork,
    assert_model,
    federation,
    handed_on,
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

LABELLED, UNLABELLED, NOBODY = 0, 1, 3


@pytest.fixture(scope="module")
def data():
    return federation([[0, 2, 1, 0, 1], [-1] * 4, [-1] * 3])


def method_of(arguments="", **fields):
    problem = small_problem(f"isofed{arguments}", **{"client.epochs": 1, "confidence.threshold": 0.4, **fields})
    return problem, METHODS["isofed"].factory(problem)


# --- Who has a turn. -------------------------------------------------------------------------------------------------


def test_late_uploads_of_the_other_role_are_refused():
    method_of(**{"availability.late": 0.5, "availability.late_weight": 0.0})
    with pytest.raises(UserError, match="late_weight must be 0 for isofed"):
        method_of(**{"availability.late": 0.5, "availability.late_weight": 0.5})


def test_a_round_draws_those_who_have_a_turn_and_nobody_else_is_present(data):
    _, method = method_of(clients_per_round=3)
    drawn = {True: set(), False: set()}
    select = jax.jit(lambda number, data, key: method.select(State(number, None), data, key))
    for number in range(20):
        is_labelled = number % 2 == 0
        selection = select(jnp.int32(number), data, jax.random.key(number))
        clients, present = np.asarray(selection.clients), np.asarray(selection.present)
        assert len(set(clients)) == 3
        np.testing.assert_array_equal(present, (clients == LABELLED) == is_labelled)
        assert sorted(present, reverse=True) == list(present) and present.sum() == (1 if is_labelled else 3)
        drawn[is_labelled] |= {tuple(clients)}
    assert len(drawn[True]) > 1 and len(drawn[False]) > 1  # at random
    all_labelled = federation([[0, 2], [1], [0, 0]])
    for number in range(2):  # in the turn of nobody, too
        selection = select(jnp.int32(number), all_labelled, jax.random.key(0))
        np.testing.assert_array_equal(selection.present, selection.clients < 3)


def test_images_of_clients_without_a_turn_enter_no_statistics(data):
    """Those who are drawn to fill the cohort count as absent; clients that are not drawn stay as they are."""
    result = SimpleNamespace(clients=jnp.array([LABELLED, 1]), present=jnp.array([True, False]))
    selection = Selection(result.clients, present=result.present)
    config = SimpleNamespace(availability=SimpleNamespace(never=0.0))
    sizes = np.asarray(_of_those_who_answer(config, data, selection, result).client_size)
    expected = np.asarray(data.client_size).copy()
    assert LABELLED != 1 and expected[1] > 0
    expected[1] = 0
    np.testing.assert_array_equal(sizes, expected)


# --- What they train. ------------------------------------------------------------------------------------------------


def information_gradient(model, x):
    """Of mean H(p_i) less H(mean p_i), by the derivative of an entropy."""
    centre = x.mean(axis=0)
    p = probabilities(model, x, centre)
    each, mean = -np.sum(p * np.log(p), axis=1, keepdims=True), p.mean(axis=0)
    of_p = np.log(mean) + 1  # of -H(mean) by p, times the number of images
    of_logits = p * (of_p - np.sum(p * of_p, axis=1, keepdims=True)) - p * (np.log(p) + each)
    of_logits /= len(x)
    return each.mean() + np.sum(mean * np.log(mean)), {
        "bias": of_logits.sum(axis=0),
        "kernel": (x - centre).T @ of_logits,
    }


def adapted_by_hand(problem, data, client, received, deck):
    """A pass over all images with the rate and the clipping of the client's role."""
    config, model = problem.config.client.copy_and_resolve_references(), in_numpy(received.model.params)
    if client != LABELLED:
        config.learning_rate = config.unlabelled_learning_rate or config.learning_rate
        config.clip_norm = config.unlabelled_clip_norm or config.clip_norm
    statistics, velocity, losses = statistics_of(received.model), at_rest(model), []
    for batch in batches(np.asarray(deck.order), int(deck.size), config.batch_size):
        x = pixels_of(data, np.asarray(data.client_index[client])[batch], mirrored)
        loss, gradient = information_gradient(model, x)
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
        statistics = running_mean(statistics, x)
        losses.append(loss)
    return model, statistics, losses


@pytest.mark.parametrize("client", [LABELLED, UNLABELLED])
def test_the_adaptation_looks_at_no_label(client, data):
    problem, method = method_of(**{"client.unlabelled_learning_rate": 0.2, "client.unlabelled_clip_norm": 0.1})
    received = sent_down(problem)
    phases = [phases_of(method)[0]] if client == LABELLED else phases_of(method)[:3]
    job, finished = through(phases, received, data, client)[-1]
    work, role = (job.work, "labelled") if client == LABELLED else (job.work, "unlabelled")
    assert int(job.num_steps) == 2 and int(work.decks["unlabelled"].size) == (5 if client == LABELLED else 4)
    model, statistics, losses = adapted_by_hand(problem, data, client, received, work.decks["unlabelled"])
    assert_model(finished.upload.model, model, statistics)
    np.testing.assert_allclose(finished.metrics[f"{role}_adaptation_loss"], np.mean(losses), rtol=1e-4)
    if client == UNLABELLED:  # goes on from there, after a labelled phase in which it has no step
        before, turn = handed_on(job, finished), jnp.bool_(True)
        after = prepare(phases_of(method)[3], received, data, UNLABELLED, {"confidence": ()}, before, turn)
        assert_model(after.work.start, model, statistics)
        assert int(after.num_steps) == 2
    hidden = data._replace(visible_labels=jnp.full_like(data.visible_labels, -1))
    blind = through(phases, received, hidden, client)[-1][1]
    jax.tree.map(np.testing.assert_array_equal, blind.upload, finished.upload)


def through(phases, received, data, client):
    """What a client with a turn does in phases that follow each other: of each its job, and what it leaves behind."""
    done, before = [], None
    for phase in phases:
        done.append(train(phase, received, data, client, {}, before, personal=jnp.bool_(True)))
        before = handed_on(*done[-1])
    return done


def test_the_adaptation_has_an_optimiser_of_its_own_and_a_second_classifier_rests(data):
    """No momentum of it reaches training, and no loss of it the head, which weight decay would shrink."""
    fields = {"client.persistent": True, "client.weight_decay": 0.5, "confidence.kind": "acr"}
    network = SmallNetwork(STANDARD, head_dim=CLASSES)
    problem = small_problem("isofed", network, **{"client.epochs": 1, **fields})
    method, received = METHODS["isofed"].factory(problem), sent_down(problem)
    phase = phases_of(method)[0]
    _, finished = train(phase, received, data, LABELLED, personal=jnp.bool_(True))
    assert "opt_state" not in finished.own
    old, new = received.model.params, finished.upload.model.params
    np.testing.assert_array_equal(new[STANDARD]["kernel"], old[STANDARD]["kernel"])
    assert np.any(new["classifier"]["kernel"] != old["classifier"]["kernel"])


def test_a_phase_that_goes_on_begins_with_a_fresh_optimiser(data):
    problem, method = method_of(",no_adaptation")
    assert len(phases_of(method)) == 2
    phase = phases_of(method_of()[1])[1]  # the same training, after an adaptation
    received, turn = sent_down(problem), jnp.bool_(True)
    other = sent_down(problem, seed=9)
    nothing = handed_on(*train(phases_of(method)[0], received, data, UNLABELLED, personal=turn))
    alone = train(phase, received, data, LABELLED, previous=nothing, personal=turn)[1]
    plain = train(phases_of(method)[0], received, data, LABELLED, personal=turn)[1]
    jax.tree.map(np.testing.assert_array_equal, alone.upload, plain.upload)  # nobody came before
    before = nothing._replace(
        took_part=jnp.array([True]), upload=nothing.upload._replace(model=jax.tree.map(lambda x: x[None], other.model))
    )
    _, after = train(phase, received, data, LABELLED, previous=before, personal=turn)
    from_other = train(phases_of(method)[0], other, data, LABELLED, personal=turn)[1]
    jax.tree.map(np.testing.assert_array_equal, after.upload, from_other.upload)


def test_clients_of_a_role_are_averaged_by_their_images(data):
    """In either turn, whatever number of pseudo-labels a client tells."""
    problem, method = method_of()
    model, sizes = sent_down(problem).model, jnp.array([4, 3])
    uploads = jax.tree.map(lambda leaf: jnp.stack([0 * leaf, 0 * leaf + 1]), model)
    for labelled in (0, sizes):
        told = {"labelled": jnp.zeros(2) + labelled, "accepted": jnp.array([0.0, 1.0])}
        received = Received(Upload(uploads, told), jnp.ones(2, bool), jnp.arange(2), None, sizes, sizes)
        after, _ = method.aggregate(State(jnp.int32(0), model, {}), data, received, jax.random.key(0))
        for leaf in jax.tree.leaves(after.model):
            np.testing.assert_allclose(leaf, 3 / 7, rtol=1e-6)


# --- The bounds of the setting. --------------------------------------------------------------------------------------


def test_cohorts_of_labelled_clients(data):
    draws = {}
    for arguments in ("supervised", "supervised,labelled_cohorts"):
        method = METHODS["supervised"].factory(small_problem(arguments, clients_per_round=1))
        select = method.select
        draws[arguments] = select and {
            int(select(State(jnp.int32(0), None), data, jax.random.key(seed)).clients[0]) for seed in range(10)
        }
    assert draws == {"supervised": None, "supervised,labelled_cohorts": {LABELLED}}
    assert NUM_CLIENTS > 1
