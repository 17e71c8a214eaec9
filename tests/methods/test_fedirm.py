"""FedIRM's relation matrices, their mean at the server, and a client without labels, against NumPy."""

import autograd.numpy as anp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autograd import grad

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.interface import Received, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fedirm import relations_of
from fedjax_ssl.run.experiment import build_experiment
from tests.helpers.consistency_by_hand import batches
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step, softmax
from tests.helpers.small_problem import (
    CLASSES,
    assert_model,
    federation,
    handed_on,
    mirrored,
    pixels_of,
    sent_down,
    small_problem,
    train,
)
from tests.helpers.tiny_methods import make_config

LABELLED, UNLABELLED, ROUND, RAMP, WEIGHT, RELATIVE, THRESHOLD = 0, 1, 2, 9, 4.0, 0.6, 0.45
FIELDS = {
    "fedirm.ramp_epochs": RAMP, "fedirm.weight": WEIGHT, "fedirm.relation_weight": RELATIVE,
    "fedirm.warm_up_rounds": 0,
    "confidence.threshold": THRESHOLD, "client.persistent": False,
}  # fmt: skip
GIVEN = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]])


@pytest.fixture(scope="module")
def data():
    return federation([[0, 1, 1, 0, 0], [-1] * 7, [-1] * 3])


def by_hand(logits, labels, xp=np):
    """Rows softmax(mean / 2); `labels` has -1 for an image that does not count."""
    rows = []
    for c in range(CLASSES):
        own = np.asarray(labels) == c
        rows.append(xp.mean(logits[own], axis=0) / 2 if own.any() else np.zeros(CLASSES))
    exponentials = xp.exp(xp.array(rows))
    return exponentials / xp.sum(exponentials, axis=1, keepdims=True)


def test_relations_of_a_batch():
    logits = np.random.default_rng(0).normal(size=(6, CLASSES)).astype(np.float32)
    labels, counted = np.array([0, 1, 1, 0, 2, 1]), np.array([1, 1, 0, 1, 0, 1], bool)
    expected = by_hand(logits, np.where(counted, labels, -1))
    np.testing.assert_allclose(relations_of(logits, jnp.array(labels), counted), expected, atol=1e-6)
    np.testing.assert_allclose(expected[2], 1 / 3)  # its only image does not count


def test_a_client_with_labels_sends_the_sum_over_its_steps(data):
    """Five images in batches of 3, twice; class 2 is absent."""
    problem = small_problem("fedirm", **FIELDS)
    phases, received = METHODS["fedirm"].factory(problem).phases, sent_down(problem)
    job, finished = train(phases[0], received, data, LABELLED)
    config, deck = problem.config.client, job.work.decks["labelled"]
    model, velocity, expected = in_numpy(received.model.params), None, np.zeros((CLASSES, CLASSES))
    for batch in batches(np.asarray(deck.order), int(deck.size), config.batch_size):
        rows = np.asarray(deck.rows)[batch]
        labels, x = np.asarray(data.visible_labels)[rows], pixels_of(data, rows, mirrored)
        x = x - x.mean(axis=0)
        logits = x @ model["kernel"] + model["bias"]
        expected += by_hand(logits, labels)
        wrong = (softmax(logits) - 0.9 * np.eye(CLASSES)[labels] - 0.1 / CLASSES) / len(x)  # views draw nothing
        gradient = {"bias": 2 * wrong.sum(axis=0), "kernel": 2 * x.T @ wrong}
        model, velocity = sgd_step(model, gradient, velocity or at_rest(model), config, config.learning_rate)
    assert_model(finished.upload.model, model)
    np.testing.assert_allclose(finished.upload.metadata["relations"], expected, atol=1e-5)


def test_a_client_without_labels(data):
    """The teacher begins as the received model; then it follows the student. Some images are not confident."""
    problem = small_problem("fedirm", **FIELDS)
    method = METHODS["fedirm"].factory(problem)
    received = sent_down(problem, {"relations": jnp.float32(GIVEN), "epochs": jnp.int32(2 * ROUND)})
    own = {"teacher": problem.network.init(jax.random.key(1)), "teacher_steps": jnp.int32(0)}
    before = handed_on(*train(method.phases[0], received, data, UNLABELLED, own))
    last = method.phases[1]
    in_round = last._replace(
        prepare=lambda received, data, cohort, previous: last.prepare(
            received, data, cohort._replace(round=jnp.array([ROUND])), previous
        )
    )
    job, finished = train(in_round, received, data, UNLABELLED, own, before)
    config, deck = problem.config.client, job.work.decks["unlabelled"]
    model = in_numpy(received.model.params)
    teacher, velocity, confident, losses = model, at_rest(model), [], []
    for step, batch in enumerate(batches(np.asarray(deck.order), int(deck.size), config.batch_size)):
        x = pixels_of(data, np.asarray(deck.rows)[batch], mirrored)
        x = x - x.mean(axis=0)
        target = softmax(x @ teacher["kernel"] + teacher["bias"])
        p = softmax(x @ model["kernel"] + model["bias"])
        counts = p.max(axis=1) >= THRESHOLD
        confident.extend(counts)
        labels = np.where(counts, p.argmax(axis=1), -1)
        ramp = np.exp(-5 * (1 - (2 * ROUND + step // 3) / RAMP) ** 2)

        def loss(model, x=x, target=target, labels=labels, ramp=ramp):
            logits = anp.dot(x, model["kernel"]) + model["bias"]
            exponentials = anp.exp(logits)
            p = exponentials / anp.sum(exponentials, axis=1, keepdims=True)
            q = by_hand(logits, labels, anp)
            apart = anp.sum(GIVEN * anp.log(GIVEN / q)) + anp.sum(q * anp.log(q / GIVEN))
            return WEIGHT * ramp * (anp.sum((p - target) ** 2) / len(x) + RELATIVE * apart / (2 * CLASSES))

        losses.append(loss(model))
        model, velocity = sgd_step(model, grad(loss)(model), velocity, config, config.learning_rate)
        share = 1 - 1 / (step + 1)
        teacher = {name: share * leaf + (1 - share) * model[name] for name, leaf in teacher.items()}
    assert 0 < np.mean(confident) < 1 and job.num_steps == 6
    np.testing.assert_allclose(finished.metrics["unlabelled_loss"], np.mean(losses), rtol=1e-4)
    assert_model(finished.upload.model, model)
    assert_model(finished.own["teacher"], teacher)
    assert not np.any(finished.upload.metadata["relations"])


def test_the_server_has_the_mean_over_clients_with_labels(data):
    """Of four uploads one has no labels, one is not accepted, and one has taken twice as many steps."""
    method = METHODS["fedirm"].factory(small_problem("fedirm", **FIELDS))
    state = method.init(data, jax.random.key(0))
    assert not np.any(method.broadcast(state, data, jax.random.key(0)).extra["relations"])
    told = np.stack([GIVEN, 2 * GIVEN[::-1], GIVEN[:, ::-1], GIVEN.T]).astype(np.float32)
    uploads = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state.model)

    def after(state, labelled, accepted):
        upload = Upload(uploads, {"relations": jnp.asarray(told), "labelled": jnp.float32(labelled)})
        sizes = jnp.full(4, 5)
        received = Received(upload, jnp.array(accepted), jnp.arange(4), None, sizes, sizes)
        return method.aggregate(state, data, received, jax.random.key(0))[0]

    state = after(state, [3, 3, 0, 3], [True, True, True, False])
    np.testing.assert_allclose(state.server["relations"], (GIVEN + GIVEN[::-1]) / 2, atol=1e-6)
    kept = after(state, [0, 0, 0, 3], [True, True, True, False])
    np.testing.assert_array_equal(kept.server["relations"], state.server["relations"])


def test_relations_travel_without_noise_so_privacy_is_refused():
    config = make_config("fedirm")
    config.update_from_flattened_dict({
        "privacy.noise": 0.5, "aggregation.clip_norm": 1.0, "model.normalisation": "group",
    })  # fmt: skip
    with pytest.raises(UserError, match=r"^privacy.noise with fedirm: .*relations") as error:
        build_experiment(config)
    assert "\n" not in str(error.value)
