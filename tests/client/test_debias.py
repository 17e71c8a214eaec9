"""FedDB's debiasing, of any method with softmax labels: against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import UserError
from fedjax_ssl.client import Examples, label_cohort, make_confidence
from fedjax_ssl.client.labels import debiased, mean_prediction
from fedjax_ssl.config import apply_arguments, base_config
from fedjax_ssl.methods import METHODS
from fedjax_ssl.run.validation import validate
from tests.helpers.consistency_by_hand import assert_as_by_hand, hard_labels, train_by_hand
from tests.helpers.linear_network import divided, softmax
from tests.helpers.small_problem import (
    federation,
    mirrored,
    phases_of,
    pixels_of,
    predicted,
    prepare,
    sent_down,
    small_problem,
    train,
)

BY_ROLE = {"fedavg_semi", "semianagg", "isofed", "twin_sight"}
BY_CONFIDENCE = {
    "fedanchor", "semifl", "fedmatch", "fixmatch", "uda", "sage", "proxyfl", "fl2", "bsemifl", "catchfed", "feddb",
    "fedopenmatch", "fedpdm", *BY_ROLE,
}  # fmt: skip
BY_SOFTMAX = BY_CONFIDENCE - {"fedanchor"} | {"fedlabel", "fedtrinet", "cbafed"}
THRESHOLD, DEBIASED = 0.6, {"confidence.debias": "app_u"}
SIZE, KNOWN = 9, [0, 3, 4, 6]


@pytest.fixture(scope="module")
def data():
    return federation([[0, -1, -1, 2, 1, -1, 0, -1, -1], [-1] * 7])


def build(method="fixmatch", **fields):
    fields = {"confidence.threshold": THRESHOLD, "data.labels": "clients", **DEBIASED, **fields}
    problem = small_problem(method, **fields)
    validate(problem.config)
    return problem, phases_of(METHODS[method].factory(problem))[0]


def prior_of(data, received, positions):
    """P_k: the received model's mean on the weak views of some of client 0's images."""
    rows = np.asarray(data.client_index[0])[positions]
    return predicted(received.model, pixels_of(data, rows, mirrored)).mean(axis=0)


def test_probabilities_are_divided_by_the_prior():
    logits = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    p = softmax(np.float64(logits))
    for prior in ([0.7, 0.2, 0.1], [0.5, 0.5, 0.0], p.mean(axis=0)):
        found = softmax(np.float64(debiased(logits, np.float32(prior))))
        np.testing.assert_allclose(found, divided(p, np.array(prior)), rtol=1e-4)
    uniform = np.full(3, 1 / 3, np.float32)
    np.testing.assert_allclose(softmax(np.float64(debiased(logits, uniform))), p, rtol=1e-5)


def test_the_prior_is_the_mean_over_what_is_present():
    p = softmax(np.random.default_rng(0).normal(size=(2, 4, 3))).astype(np.float32)
    present = np.array([[True, False, True, False], [False] * 4])
    found = mean_prediction(jnp.where(present[..., None], p, jnp.nan), present)
    np.testing.assert_allclose(found, [p[0, [0, 2]].mean(axis=0), np.zeros(3)], rtol=1e-6)


@pytest.mark.parametrize("include_labelled", [False, True])
def test_a_client_labels_by_what_its_model_does_not_prefer_anyway(data, include_labelled):
    problem, phase = build(**{"consistency.include_labelled": include_labelled})
    received = sent_down(problem)
    job = prepare(phase, received, data, 0)
    unlabelled = [place for place in range(SIZE) if include_labelled or place not in KNOWN]
    prior = prior_of(data, received, unlabelled)
    np.testing.assert_allclose(job.work.labels.prior, prior, rtol=1e-5)
    rows = np.asarray(data.client_index[0])[:SIZE]
    plain = predicted(received.model, pixels_of(data, rows, mirrored))
    p = divided(plain, prior)
    np.testing.assert_array_equal(np.asarray(job.work.labels.report.labels)[:SIZE], p.argmax(axis=1))
    qualified = (p.max(axis=1) >= THRESHOLD) & np.isin(np.arange(SIZE), unlabelled) | np.isin(np.arange(SIZE), KNOWN)
    np.testing.assert_array_equal(np.asarray(job.work.labels.report.qualified)[:SIZE], qualified)
    assert np.any(p.argmax(axis=1) != plain.argmax(axis=1))


def test_local_training_is_that_of_the_divided_probabilities(data):
    problem, phase = build()
    received = sent_down(problem)
    job, finished = train(phase, received, data, 0, jit=True)
    prior = prior_of(data, received, [place for place in range(SIZE) if place not in KNOWN])
    rule = hard_labels(THRESHOLD)
    by_hand = train_by_hand(
        problem, data, received, job.work, lambda p: rule(divided(p, prior)), together=True
    )  # fmt: skip
    assert_as_by_hand(finished, by_hand)
    _, plain = train(build(**{"confidence.debias": "none"})[1], received, data, 0, jit=True)
    assert abs(plain.metrics["unlabelled_loss"] - finished.metrics["unlabelled_loss"]) > 1e-2


def test_labels_of_a_whole_round_take_it_too(data):
    """The labels of SemiFL, by the shared part."""
    problem = small_problem("semifl", **DEBIASED)
    received = sent_down(problem)
    examples = Examples(data.client_index[:1], jnp.arange(10)[None] < SIZE, -jnp.ones((1, 10)), None, {})
    made = label_cohort(problem, received.model, data, examples, make_confidence(problem, THRESHOLD))
    rows = np.asarray(data.client_index[0])[:SIZE]
    p = predicted(received.model, pixels_of(data, rows))
    p = divided(p, p.mean(axis=0))
    np.testing.assert_array_equal(np.asarray(made.report.labels)[0, :SIZE], p.argmax(axis=1))
    np.testing.assert_array_equal(np.asarray(made.report.qualified)[0, :SIZE], p.max(axis=1) >= THRESHOLD)


@pytest.mark.parametrize(("name", "field", "value"), [
    *((name, "debias", "app_u") for name in METHODS if name not in BY_SOFTMAX),
    *((name, "kind", "sat") for name in METHODS if name not in BY_CONFIDENCE),
])  # fmt: skip
def test_a_method_that_does_not_read_a_field_refuses_it(name, field, value):
    config = apply_arguments(base_config(), name)
    config.data.labels = METHODS[name].settings[0]
    validate(config)
    config.confidence[field] = value
    with pytest.raises(UserError, match=rf"^confidence\.{field}='{value}' is not for the method {name}"):
        validate(config)


def test_a_choice_that_does_not_read_it_refuses_it():
    problem = small_problem("semianagg", **DEBIASED, **{"confidence.kind": "acr"})
    with pytest.raises(UserError, match=r"'acr' adjusts its labels itself; leave confidence.debias 'none'"):
        METHODS["semianagg"].factory(problem)
