"""Twin-sight: two models at each client against NumPy, whose gradients are differences of the written losses."""

import jax
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.client import own_states
from fedjax_ssl.methods import METHODS, twin_sight
from fedjax_ssl.methods.twin_sight import TWIN, views
from tests.helpers.consistency_by_hand import batches
from tests.helpers.linear_heads import DIM, LinearHeads, gradient_of, unit
from tests.helpers.linear_network import at_rest, divided, sgd_step, softmax
from tests.helpers.small_problem import (
    CLASSES,
    KEPT,
    PIXELS,
    federation,
    handed_on,
    mirrored,
    negative,
    phases_of,
    pixels_of,
    prepare,
    sent_down,
    small_problem,
    train,
)
from tests.helpers.trainers_by_hand import FreeMatch, fairness_by_hand

UNLABELLED, BOTH = 1, 2


# --- By hand. --------------------------------------------------------------------------------------------------------


def in_numpy(params):
    """The kernels of a model and its twin, and the classifier's bias."""
    twin = params[TWIN]
    leaves = {"k": params["backbone"], "w": params["classifier"], "k2": twin["backbone"], "p2": twin["projector"]}
    model = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in leaves.items()}
    return {**model, "b": np.asarray(params["classifier"]["bias"], np.float64)}


def contrastive(model, first, second, temperature):
    """InfoNCE of centred views, view by view and candidate by candidate."""
    z = unit(np.concatenate([first, second]) @ model["k2"] @ model["p2"])
    losses = []
    for i in range(len(z)):
        others = [np.exp(z[i] @ z[j] / temperature) for j in range(len(z)) if j != i]
        losses.append(-np.log(np.exp(z[i] @ z[(i + len(first)) % len(z)] / temperature) / np.sum(others)))
    return np.mean(losses)


def neighbourhood(model, first, xor):
    grams = [unit(first @ model[name]) @ unit(first @ model[name]).T for name in ("k", "k2")]
    by = max(len(first) ^ 2, 1) if xor else len(first) ** 2
    return np.sum((grams[0] - grams[1]) ** 2) / by


def log_p(model, x):
    return np.log(softmax(x @ model["k"] @ model["w"] + model["b"]))


def by_hand(problem, data, client, model, means, deck, supervised):
    """SGD on 0.5 L_i + L_n and a loss of the supervised model's views.

    Args:
        problem, data, client: whose training it is.
        model, means: parameters, and the running means of both models.
        deck: its order is read.
        supervised: (model, start, rows, first, second) -> the supervised model's loss on centred views; labels are
            taken from `start`, the model before the step.

    Returns:
        Parameters, running means, and the loss of each step.
    """
    options, config = problem.config.twin_sight, problem.config.client
    velocity, losses = at_rest(model), []
    for batch in batches(np.asarray(deck.order), int(deck.size), config.batch_size):
        rows = np.asarray(data.client_index[client])[batch]
        first, second, centre = centred_views(data, rows)
        start = model

        def loss(model, rows=rows, first=first, second=second, start=start):
            value = options.contrastive_weight * contrastive(model, first, second, 0.5)
            value += options.neighbourhood_weight * neighbourhood(model, first, options.replica)
            return value + supervised(model, start, rows, first, second)

        losses.append(loss(model))
        model, velocity = sgd_step(model, gradient_of(loss, model), velocity, config, config.learning_rate)
        means = {name: KEPT * mean + (1 - KEPT) * centre for name, mean in means.items()}
    return model, means, losses


def centred_views(data, rows):
    """Both views of some rows less the mean of both, and that mean."""
    views = [pixels_of(data, rows, mirrored), pixels_of(data, rows, negative)]
    centre = np.concatenate(views).mean(axis=0)
    return *(view - centre for view in views), centre


def assert_same(upload, model, means):
    for name, leaf in in_numpy(upload.params).items():
        np.testing.assert_allclose(leaf, model[name], atol=3e-5, err_msg=name)
    np.testing.assert_allclose(upload.batch_stats["mean"], means["own"], atol=1e-6)
    np.testing.assert_allclose(upload.batch_stats[TWIN]["mean"], means["twin"], atol=1e-6)


def problem_of(arguments="", **fields):
    fields = {"client.clip_norm": 0.3, "confidence.threshold": 0.5, "twin_sight.contrastive_weight": 0.8, **fields}
    network = LinearHeads({}, companions={TWIN: LinearHeads({"projector": ("", DIM)}, classes=0)})
    return small_problem(f"twin_sight{arguments}", network, **fields)


def both_phases(problem, data, client, jit=True):
    """A client's two phases: the jobs, and what each leaves."""
    first, second = phases_of(METHODS["twin_sight"].factory(problem))
    received, own = sent_down(problem), {"confidence": ()} if problem.config.twin_sight.pseudo_weight else {}
    labelled = train(first, received, data, client, own, jit=jit)
    unlabelled = train(second, received, data, client, own, handed_on(*labelled), jit=jit)
    return received, labelled, unlabelled


def start_of(received):
    means = {"own": np.full(PIXELS, 0.25), "twin": np.full(PIXELS, 0.25)}
    return in_numpy(received.model.params), means


@pytest.fixture(autouse=True)
def temperature(monkeypatch):
    """The paper's makes losses too steep for differences."""
    monkeypatch.setattr(twin_sight, "TEMPERATURE", 0.5)


@pytest.fixture(scope="module")
def data():
    return federation([[0, 2, 1, 0], [-1] * 5, [1, -1, 0, -1, -1]])


def cross_entropy_of(data):
    def supervised(model, start, rows, first, second):
        labels = np.asarray(data.visible_labels)[rows]
        return -np.mean([log_p(model, x)[np.arange(len(rows)), labels] for x in (first, second)])

    return supervised


def pseudo_labels_of(problem, prior):
    options = problem.config.twin_sight

    def supervised(model, start, rows, first, second):
        labelling, trained = (first, second) if options.labels_from == "weak" else (second, first)
        p = np.exp(log_p(start, labelling))
        p = divided(p, prior)
        counts = p.max(axis=1) >= problem.config.confidence.threshold
        found.append(counts.sum())
        chosen = -log_p(model, trained)[np.arange(len(rows)), p.argmax(axis=1)]
        return options.pseudo_weight * np.sum(chosen * counts) / len(rows)

    found = supervised.found = []
    return supervised


def freematch_of(problem):
    """FreeMatch's loss of the second view with its fairness term; its averages move once in each step."""
    options = problem.config.confidence
    rule, step = FreeMatch(CLASSES, options.momentum), {}

    def supervised(model, start, rows, first, second):
        p = np.exp(log_p(start, first))
        if step.get("start") is not start:
            step.update(start=start, weights=rule.weigh(p, rows))
        weights, logits = step["weights"], log_p(model, second)
        found.append(weights.mean())
        value = -np.sum(weights * logits[np.arange(len(rows)), p.argmax(axis=1)]) / len(rows)
        if np.any(weights):
            value += options.fairness_weight * fairness_by_hand(rule.by_class, rule.histogram, logits[weights > 0])
        return problem.config.twin_sight.pseudo_weight * value

    found = supervised.found = []
    supervised.rule = rule
    return supervised


def test_freematch_s_averages_and_its_term(data):
    fields = {"confidence.momentum": 0.3, "confidence.fairness_weight": 0.4, "confidence.memory": "run"}
    problem = problem_of(",freematch", **fields)
    phases, received = phases_of(METHODS["twin_sight"].factory(problem)), sent_down(problem)
    own = jax.tree.map(lambda leaf: leaf[UNLABELLED], own_states(problem, data))
    idle = handed_on(*train(phases[0], received, data, UNLABELLED, own))
    job, finished = train(phases[1], received, data, UNLABELLED, own, idle, jit=True)
    freematch = freematch_of(problem)
    *expected, losses = by_hand(problem, data, UNLABELLED, *start_of(received), job.work.decks["unlabelled"], freematch)
    assert 0 < np.mean(freematch.found) < 1
    assert_same(finished.upload.model, *expected)
    np.testing.assert_allclose(finished.metrics["unlabelled_loss"], np.mean(losses), rtol=1e-4)
    averages, rule = finished.own["confidence"], freematch.rule
    np.testing.assert_allclose(averages.level, rule.level, rtol=1e-4)
    np.testing.assert_allclose(averages.by_class, rule.by_class, rtol=1e-4)
    again = prepare(phases[1], received, data, UNLABELLED, finished.own, idle)
    np.testing.assert_allclose(again.own.get("confidence", averages).level, rule.level, rtol=1e-4)


def test_without_pseudo_labels_the_classifier_stays(data):
    """Its weights do not decay either."""
    problem = problem_of(",code")
    received, _, (job, finished) = both_phases(problem, data, UNLABELLED)
    assert job.work.labels is None
    model, means = start_of(received)
    still = {**model}
    velocity, config = at_rest(model), problem.config.client
    assert config.weight_decay > 0
    for batch in batches(np.asarray(job.work.decks["unlabelled"].order), 5, 3):
        rows = np.asarray(data.client_index[UNLABELLED])[batch]
        first, second, centre = centred_views(data, rows)

        def loss(model, first=first, second=second):
            return 0.8 * contrastive(model, first, second, 0.5) + neighbourhood(model, first, True)

        model, velocity = sgd_step(model, gradient_of(loss, model), velocity, config, config.learning_rate)
        model.update(w=still["w"], b=still["b"])
        means = {name: KEPT * mean + (1 - KEPT) * centre for name, mean in means.items()}
    assert_same(finished.upload.model, model, means)


def test_a_client_of_both_kinds_trains_on_one_after_the_other(data):
    """Both views are trained on labels; pseudo-labels are without the prior of its images without a label."""
    fields = {"client.proximal": 0.0, "confidence.debias": "app_u", "client.labelled_views": "both"}
    problem = problem_of(",code,partial", **fields)
    received, (job, handed), (after, finished) = both_phases(problem, data, BOTH)
    assert (int(job.num_steps), int(after.num_steps)) == (2, 2)
    model, means, _ = by_hand(
        problem, data, BOTH, *start_of(received), job.work.decks["labelled"], cross_entropy_of(data)
    )
    assert_same(handed.upload.model, model, means)
    first, centres = start_of(received)
    rows = np.asarray(data.client_index[BOTH])[[1, 3, 4]]
    prior = np.exp(log_p(first, pixels_of(data, rows, mirrored) - centres["own"])).mean(axis=0)
    pseudo = pseudo_labels_of(problem, prior)
    model, means, _ = by_hand(problem, data, BOTH, model, means, after.work.decks["unlabelled"], pseudo)
    assert problem.config.twin_sight.pseudo_weight == 5.0
    assert_same(finished.upload.model, model, means)


def test_the_views_and_freematch_are_those_of_the_code():
    images = np.zeros((2, 2, 2, 1), np.uint8)
    for word, expected in (("strong", [mirrored, negative]), ("weak", [mirrored, mirrored]), ("views", [negative] * 2)):
        problem = problem_of(",freematch", **{"twin_sight.second_view": word})._replace(views=(negative, negative))
        for view, of in zip(views(problem)(jax.random.key(0), images), expected):
            np.testing.assert_array_equal(view, of(None, images))
    assert problem.config.confidence.fairness_weight == 0


def test_a_trainer_with_a_second_classifier_is_refused():
    with pytest.raises(UserError, match=r"confidence.kind='acr' trains a second classifier"):
        METHODS["twin_sight"].factory(problem_of(**{"confidence.kind": "acr"}))
