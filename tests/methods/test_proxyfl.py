"""ProxyFL: the contrastive loss, the tuning of the proxies, the prior, and the switches; against NumPy.

The gradient of a step's loss is taken by finite differences of the loss in NumPy.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.config import apply_arguments, base_config
from fedjax_ssl.engine.interface import Received, State, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.proxyfl import COUNTS, FEATURES, PRIOR, PROXIES, VARIANTS, tuned_proxies
from fedjax_ssl.models import Outputs
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.experiment import make_problem
from fedjax_ssl.run.validation import validate
from tests.helpers.linear_heads import gradient_of
from tests.helpers.linear_network import at_rest, sgd_step, softmax
from tests.helpers.runs import TINY_BACKBONE
from tests.helpers.small_problem import (
    CLASSES,
    HEAD_DIM,
    SmallNetwork,
    federation,
    mirrored,
    negative,
    phases_of,
    pixels_of,
    sent_down,
    small_problem,
    statistics_of,
    train,
)

THRESHOLD = 0.6
A_FEW, NO_LABELS = range(2)
PRIOR_SENT = np.array([0.5, 0.2, 0.3])
WEIGHTS = np.array([1, 0.8, 0.7])  # of the three losses


class TwoHeads(SmallNetwork):
    """The small network with both projections: of its features, the centred pixels, and of its classifier's rows."""

    def init(self, key):
        model = super().init(key)
        keys = jax.random.split(jax.random.fold_in(key, 1), 3)
        shape = (self.pixels, HEAD_DIM)
        heads = {
            FEATURES: {"kernel": jax.random.normal(keys[0], shape), "bias": jax.random.normal(keys[1], shape[1:])},
            PROXIES: {"kernel": jax.random.normal(keys[2], shape)},
        }
        return model._replace(params={**model.params, **heads})

    def _outputs(self, params, x):
        outputs = super()._outputs(params, x)
        head = params[FEATURES]
        projected = jnp.matmul(x, head["kernel"], precision="highest") + head["bias"]
        return Outputs(outputs.logits, {FEATURES: projected}, x)


def build(*variants, method="proxyfl", **fields):
    given = functools.reduce(lambda a, b: {**a, **VARIANTS[b]}, variants, {})
    fields = {"data.labels": "clients", "confidence.threshold": THRESHOLD, "client.epochs": 1, **given, **fields}
    problem = small_problem(method, network=TwoHeads(), **fields)
    validate(problem.config)
    return problem, METHODS[method].factory(problem)


@pytest.fixture(scope="module")
def data():
    return federation([[0, -1, -1, 2, 1, -1, 0, -1, -1, -1], [-1] * 7])


def named(params):
    """The parameters by short names, in float64."""
    leaves = {
        "bias": params["backbone"]["bias"],
        "kernel": params["classifier"]["kernel"],
        "features": params[FEATURES]["kernel"],
        "features_bias": params[FEATURES]["bias"],
        "proxies": params[PROXIES]["kernel"],
    }
    return {name: np.asarray(leaf, np.float64) for name, leaf in leaves.items()}


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


class Labels:
    """What a step takes for given: labels, who is confident, candidates, weights; from the models before it.

    With a prior P all probabilities are divided by it.
    """

    def __init__(self, local, received, truth, prior=1.0):
        local, received = (p / prior / np.sum(p / prior, axis=1, keepdims=True) for p in (local, received))
        self.label = received.argmax(axis=1)
        self.sure = received.max(axis=1) >= THRESHOLD
        self.sets = [
            {y} if s else {*np.flatnonzero(p > PRIOR_SENT)} for y, s, p in zip(self.label, self.sure, received)
        ]
        self.weights, self.given_sets = local, [{y} for y in truth]


def loss_by_hand(options, w, given, weak, strong, truth, labels):
    """The three losses of a step, the batch in one pass; everything a loop over images."""
    pool = np.concatenate([given, weak, strong])
    of = lambda x: x - pool.mean(axis=0)  # noqa: E731
    log_p = lambda x: np.log(softmax(of(x) @ w["kernel"] + w["bias"]))  # noqa: E731
    labelled = -np.sum(log_p(given)[np.arange(len(given)), truth]) / max(len(given), 1)
    chosen = [-log_p(strong)[i, labels.label[i]] for i in range(len(strong)) if labels.sure[i]]
    unlabelled = np.sum(chosen) / max(len(chosen) if options.loss_over == "confident" else len(strong), 1)
    z = unit(of(np.concatenate([weak, strong, given])) @ w["features"] + w["features_bias"])
    v = unit(w["kernel"].T @ w["proxies"])
    sets = [*labels.sets, *labels.sets, *labels.given_sets]
    losses = {True: [], False: []}
    for i in range(2 * len(weak)):
        b = i % len(weak)
        if not sets[i]:
            continue
        positive = sum((1 if labels.sure[b] else labels.weights[b, c]) * z[i] @ v[c] for c in sets[i])
        against = [z[i] @ z[j] for j in range(len(z)) if sets[j] and not sets[i] & sets[j]]
        losses[bool(labels.sure[b])].append(np.log(1 + np.sum(np.exp(np.array(against) - positive))))
    if options.contrastive_over == "all":
        contrastive = np.mean(losses[True] + losses[False])
    else:
        contrastive = sum(np.mean(some) if some else 0 for some in losses.values())
    return labelled, unlabelled, contrastive


@pytest.mark.parametrize(("client", "debias"), [(A_FEW, "app_u"), (A_FEW, "none"), (NO_LABELS, "none")])
def test_local_training_is_that_of_the_equations(data, client, debias):
    """As in the paper; tests/official has the details of its code."""
    weights = {"proxyfl.contrastive_weight": 0.7, "consistency.unlabelled_weight": 0.8}
    problem, method = build(**weights, **{"confidence.debias": debias})
    options, config = problem.config.proxyfl, problem.config.client
    received = sent_down(problem, extra=jnp.asarray(PRIOR_SENT, jnp.float32))
    job, finished = train(phases_of(method)[0], received, data, client, jit=True)

    first = named(received.model.params)
    w, velocity, statistics = dict(first), at_rest(first), statistics_of(received.model)
    rows, counts, metrics = np.asarray(job.work.decks["unlabelled"].rows), np.zeros(CLASSES), []
    seen = set()
    of_deck = lambda deck, index: np.asarray(deck.order)[0][index * 3 : min(index * 3 + 3, int(deck.size))]  # noqa: E731
    num_labelled = max(-(-int(job.work.decks["labelled"].size) // 3), 1)
    for index in range(job.num_steps):
        of_unlabelled = rows[of_deck(job.work.decks["unlabelled"], index)]
        of_labelled = rows[of_deck(job.work.decks["labelled"], index % num_labelled)]
        given = pixels_of(data, of_labelled, mirrored)
        weak, strong = pixels_of(data, of_unlabelled, mirrored), pixels_of(data, of_unlabelled, negative)
        truth = np.asarray(data.visible_labels)[of_labelled]
        pool = np.concatenate([given, weak, strong]).mean(axis=0)
        p = lambda x, model, centre: softmax((x - centre) @ model["kernel"] + model["bias"])  # noqa: E731
        prior = 1.0 if job.work.labels.prior is None else np.asarray(job.work.labels.prior, np.float64)
        labels = Labels(p(weak, w, pool), p(weak, first, statistics), truth, prior)
        seen |= {*labels.sure, *(len(s) for s in labels.sets)}
        counts += np.bincount(truth, minlength=CLASSES)
        counts += np.bincount(labels.label[labels.sure], minlength=CLASSES)
        losses = functools.partial(
            loss_by_hand, options, given=given, weak=weak, strong=strong, truth=truth, labels=labels
        )
        metrics.append([WEIGHTS @ losses(w), *losses(w)])
        gradient = gradient_of(lambda w, losses=losses: WEIGHTS @ losses(w), w)
        w, velocity = sgd_step(w, gradient, velocity, config, config.learning_rate)
    found = named(finished.upload.model.params)
    for name, leaf in found.items():
        np.testing.assert_allclose(leaf, w[name], atol=2e-5, err_msg=name)
        # Gradients reach the backbone and both projections.
        assert client == NO_LABELS or np.max(np.abs(leaf - first[name])) > 1e-3, name
    names = ("client_loss", "labelled_loss", "unlabelled_loss", "contrastive_loss")
    for name, value in zip(names, np.mean(metrics, axis=0)):
        np.testing.assert_allclose(finished.metrics[name], value, rtol=1e-4, err_msg=name)
    np.testing.assert_array_equal(finished.upload.metadata[COUNTS], counts)
    assert client == NO_LABELS or {True, False, 2} <= seen  # confident images and others, and one with two candidates


# --- The server. -----------------------------------------------------------------------------------------------------


def test_proxies_of_one_client_move_without_a_number_lost():
    """The distance to a proxy's own point is 0: no gradient comes of it, and no NaN."""
    average = np.eye(3, dtype=np.float32)
    found = np.asarray(tuned_proxies(average, average[None], jnp.array([True]), jax.random.key(0), epochs=5))
    assert np.all(np.isfinite(found))
    # Each proxy is pushed away from the others' points alone.
    gaps = np.linalg.norm(found[:, None] - average, axis=-1)
    assert np.all(gaps[~np.eye(3, dtype=bool)] > np.sqrt(2))


def uploads(problem, seed=0):
    """Four clients' messages of which the second is not accepted, and the state that they meet."""
    rng, state = np.random.default_rng(seed), State(jnp.int32(0), sent_down(problem).model)
    noise = lambda leaf: np.float32(rng.normal(size=(4, *leaf.shape)))  # noqa: E731
    method = METHODS["proxyfl"].factory(problem)
    server = jax.eval_shape(method.init, federation([[0, -1], [-1]]), jax.random.key(0)).server
    told = {COUNTS: np.float32([[3, 0, 1], [np.nan] * 3, [0, 0, 0], [4, 8, 4]])} if PRIOR in server else {}
    model = jax.tree.map(noise, state.model)
    params = {name: part for name, part in model.params.items() if PRIOR in server or name not in (FEATURES, PROXIES)}
    sizes = jnp.array([10, 99, 30, 60])
    accepted = jnp.array([True, False, True, True])
    received = Received(Upload(Model(params, model.batch_stats), told), accepted, jnp.arange(4), None, sizes, sizes)
    if PRIOR in server:
        state = state._replace(server={PRIOR: jnp.asarray(PRIOR_SENT, jnp.float32)})
    return method, state, received


def test_the_prior_is_that_of_the_clients_counts():
    problem, _ = build("no_tuning")
    method, state, received = uploads(problem)
    after, _ = method.aggregate(state, None, received, jax.random.key(0))
    expected = (np.array([3, 0, 1]) / 4 + np.array([4, 8, 4]) / 16) / 2
    np.testing.assert_allclose(after.server[PRIOR], expected, rtol=1e-6)
    np.testing.assert_allclose(np.sum(after.server[PRIOR]), 1, rtol=1e-6)
    broadcast = method.broadcast(after, None, None)
    np.testing.assert_array_equal(broadcast.extra, after.server[PRIOR])  # it goes down in the next round
    nothing = received._replace(uploads=received.uploads._replace(metadata={COUNTS: np.zeros((4, 3), np.float32)}))
    after, _ = method.aggregate(state, None, nothing, jax.random.key(0))
    np.testing.assert_array_equal(after.server[PRIOR], state.server[PRIOR])


# --- The switches. ---------------------------------------------------------------------------------------------------


def test_each_part_is_switched_off_alone(data):
    for tuning, variant in ((True, "no_contrastive"), (False, "plain_proxyfl")):
        problem, _ = build(variant, **({"proxyfl.tuning_epochs": 2} if tuning else {}))
        method, state, received = uploads(problem)
        assert state.server == {} and method.broadcast(state, None, None).extra == ()  # no prior travels
        _, finished = train(phases_of(method)[0], sent_down(problem), data, A_FEW)
        assert finished.upload.metadata == {} and set(finished.upload.model.params) == {"backbone", "classifier"}
        assert "contrastive_loss" not in finished.metrics
        after, _ = method.aggregate(state, None, received, jax.random.key(0))
        mean = np.tensordot([0.1, 0, 0.3, 0.6], received.uploads.model.params["classifier"]["kernel"], axes=1)
        assert np.allclose(after.model.params["classifier"]["kernel"], mean, atol=1e-5) != tuning
        for name in (FEATURES, PROXIES):  # not trained, and not decayed
            np.testing.assert_array_equal(after.model.params[name]["kernel"], state.model.params[name]["kernel"])


def test_a_rule_with_weights_is_for_training_without_the_contrastive_loss():
    fields = {"confidence.kind": "softmatch", "confidence.memory": "run"}
    with pytest.raises(UserError, match="'softmatch' gives weights, but proxyfl has none"):
        build(**fields)
    build("no_contrastive", **fields)


@pytest.mark.parametrize("client", [A_FEW, NO_LABELS])
def test_without_both_it_is_fixmatch_with_global_labels(data, client):
    """The "none" row of its ablation, where the loss is the code's mean over the batch; batch statistics and all."""
    finished = []
    for variants, method, fields in (
        (("plain_proxyfl",), "proxyfl", {"proxyfl.loss_over": "batch"}),
        ((), "fixmatch", {"confidence.labels_from": "received"}),
    ):
        problem, built = build(*variants, method=method, **fields)
        finished.append(train(phases_of(built)[0], sent_down(problem), data, client)[1])
    assert finished[0].metrics.keys() == finished[1].metrics.keys()
    for found, expected in zip(*(jax.tree.leaves((one.metrics, one.upload)) for one in finished)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    of_confident = train(phases_of(build("plain_proxyfl")[1])[0], sent_down(problem), data, client)[1]
    assert (
        client == NO_LABELS
        or of_confident.metrics["unlabelled_loss"] > 1.2 * finished[0].metrics["unlabelled_loss"] > 0
    )


def test_in_the_paper_s_setting_classifier_and_projections_begin_as_the_code_s():
    """The code's are `torch.nn.Linear`'s, P_w without a bias: uniform within 1 / sqrt(fan-in)."""
    config = apply_arguments(base_config(), "sage,paper,proxyfl,code")
    config.model.name, config.model.width = TINY_BACKBONE, 0
    facts = {"num_classes": 3, "image_shape": (8, 8, 1), "mean": (0.5,), "std": (0.25,), "flip": False}
    params = make_problem(config, facts, lacks_labels=False).network.init(jax.random.key(0)).params
    leaves = [params[name]["kernel"] for name in ("classifier", FEATURES, PROXIES)]
    for leaf in (*leaves, params["classifier"]["bias"], params[FEATURES]["bias"]):
        assert 0.08 < np.max(np.abs(leaf)) < 32**-0.5 and np.ptp(leaf) > 0.1
    assert "bias" not in params[PROXIES]
