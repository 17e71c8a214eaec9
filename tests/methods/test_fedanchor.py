"""FedAnchor's steps against NumPy: labels by anchors, the server's two trainings, what travels; and its variants.

A client's local training is in test_fix_mix.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import State
from fedjax_ssl.base.devices import use_platform
from fedjax_ssl.data.federated import Attackers
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fedanchor import HEAD
from fedjax_ssl.methods.fedanchor.client import (
    AnchorEmbeddings,
    along_common_direction,
    class_anchors,
    class_mean_scores,
    leave_one_out_scores,
)
from fedjax_ssl.run.wire import bytes_per_client
from fedjax_ssl.server import training
from tests.helpers.linear_network import in_numpy
from tests.helpers.small_problem import (
    CLASSES,
    HEAD_DIM,
    SmallNetwork,
    federation,
    itself,
    loss_and_gradient,
    mirrored,
    negative,
    phases_of,
    pixels_of,
    prepare,
    sent_down,
    small_problem,
    statistics_of,
)

THRESHOLD = 0.7  # of which some images fall short
SIZE, ANCHORS = 10, (0, 1, 2, 0, 0, 2, 1, 0)


@pytest.fixture(scope="module")
def data():
    return federation([[-1] * 3, [-1] * SIZE], at_server=ANCHORS)


def build(arguments="fedanchor", **fields):
    """(problem, method, a first state)."""
    views = {name: fields.pop(name) for name in ("weak", "strong", "network") if name in fields}
    problem = small_problem(arguments, **{"network": SmallNetwork(HEAD), **views, **fields})
    method = METHODS["fedanchor"].factory(problem)
    return problem, method, State(jnp.int32(0), sent_down(problem).model)


def embeddings_of(model, x, centre=None):
    """The anchor head's outputs by NumPy, by default in evaluation mode."""
    centre = statistics_of(model) if centre is None else centre
    kernel = np.asarray(model.params[HEAD]["kernel"], np.float64)
    return (x - centre) @ kernel + 0.1 * np.sum(in_numpy(model.params)["bias"])


# --- Labels, equations 3 to 5. ---------------------------------------------------------------------------------------


def scores_by_hand(anchors, labels, z, num_classes, centre=0.0):
    """Eq. 3, similarity by similarity; -inf for a class without anchors, 0 for an embedding that is zero."""
    anchors, z = anchors - centre, z - centre
    scores = np.full((len(z), num_classes), -np.inf)
    for i, one in enumerate(z):
        for c in set(np.asarray(labels).tolist()):
            length = np.linalg.norm(one)
            cosines = [one @ a / (length * np.linalg.norm(a)) if length else 0.0 for a in anchors[labels == c]]
            scores[i, c] = np.mean(cosines)
    return scores


def test_labels_are_the_equations(data):
    """Eq. 3 to 5 for a client, from weak views; what qualifies is above the threshold."""
    _, method, state = build(weak=mirrored, **{"confidence.threshold": THRESHOLD, "fedanchor.ensemble_views": 1})
    received = method.broadcast(state, data, None)
    job = prepare(phases_of(method)[0], received, data, 1)
    x = pixels_of(data, data.client_index[1], mirrored)
    anchors = embeddings_of(state.model, pixels_of(data, data.server_index))
    scores = scores_by_hand(anchors, np.array(ANCHORS), embeddings_of(state.model, x), CLASSES)
    logits = (x - statistics_of(state.model)) @ in_numpy(state.model.params)["kernel"]
    by_classifier = (logits + in_numpy(state.model.params)["bias"]).argmax(axis=1)
    np.testing.assert_array_equal(job.work.labels.report.labels, scores.argmax(axis=1))
    np.testing.assert_array_equal(job.work.labels.report.qualified, scores.max(axis=1) > THRESHOLD)
    assert 0 < np.sum(job.work.labels.report.qualified) < SIZE
    assert set(job.work.labels.report.others) == {HEAD, "classification_head"}
    np.testing.assert_array_equal(job.work.labels.report.others[HEAD], job.work.labels.report.labels)
    np.testing.assert_array_equal(job.work.labels.report.others["classification_head"], by_classifier)
    assert np.any(by_classifier != np.asarray(job.work.labels.report.labels))
    false = Attackers(None, jnp.ones(len(data.inputs), bool))
    liar = prepare(phases_of(method)[0], received, data._replace(attackers=false), 1)
    for name, labels in job.work.labels.report.others.items():  # those of an attacker with false labels
        np.testing.assert_array_equal(liar.work.labels.report.others[name], (labels + 1) % CLASSES)
    np.testing.assert_array_equal(liar.work.labels.report.labels, (job.work.labels.report.labels + 1) % CLASSES)


# --- Departures from the paper: centred scores, a threshold that follows them, a penalty. ---------------------------


def leave_one_out_by_hand(anchors, labels, centre=0.0):
    """Each anchor scored as an image against the others, by eq. 3; NaN where its class has no other."""
    scores = np.full(len(anchors), np.nan)
    for i, label in enumerate(labels):
        rest = np.arange(len(anchors)) != i
        if label in labels[rest]:
            scores[i] = scores_by_hand(anchors[rest], labels[rest], anchors[i : i + 1], CLASSES, centre)[0, label]
    return scores


@pytest.mark.parametrize("centred", [False, True])
def test_scores_are_mean_cosines_to_the_anchors_of_a_class(centred):
    rng = np.random.default_rng(1)
    anchors, labels = (rng.normal(size=(9, 16)) + 3).astype(np.float32), np.array([0, 1, 2, 0, 1, 2, 0, 0, 1])
    z, sent = (rng.normal(size=(20, 16)) + 3).astype(np.float32), AnchorEmbeddings(anchors, labels)
    centre = anchors.mean(axis=0) if centred else np.float32(0.0)
    z[7] *= centred
    expected = scores_by_hand(anchors, labels, z, CLASSES + 1, centre)
    assert np.all(expected[:, CLASSES] == -np.inf) and (centred or np.all(expected[7, :CLASSES] == 0))
    by_class = class_anchors(sent, CLASSES + 1, centred)
    np.testing.assert_allclose(class_mean_scores(z, by_class), expected, atol=1e-5)
    assert (by_class.centre is not None) == centred and (expected.max() < 0.6) == centred
    found = leave_one_out_scores(AnchorEmbeddings(anchors[:8], np.array([0, 1, 2, 0, 1, 0, 0, 0])), CLASSES)
    by_hand = leave_one_out_by_hand(anchors[:8], np.array([0, 1, 2, 0, 1, 0, 0, 0]))
    np.testing.assert_allclose(found, by_hand, atol=1e-5)
    assert np.isnan(found[2]) and np.isfinite(np.delete(found, 2)).all()
    of_units = (anchors / np.linalg.norm(anchors, axis=1, keepdims=True)).mean(axis=0)
    mean = anchors.mean(axis=0) if centred else of_units
    cosines = z[:7] @ mean / np.linalg.norm(z[:7], axis=1) / np.linalg.norm(mean)
    np.testing.assert_allclose(along_common_direction(z[:7], by_class), cosines, rtol=1e-5)


@pytest.mark.parametrize(("travels", "centred", "quantile"), [("class_means", True, 0.85), ("all_pairs", True, 0.0)])
def test_labels_by_centred_scores_and_a_following_threshold(data, travels, centred, quantile):
    """What came down is enough for it, and is counted: the centre with the class means, and the threshold."""
    fields = {"travels": travels, "centred": centred, "threshold_quantile": quantile}
    fields = {f"fedanchor.{name}": value for name, value in fields.items()}
    problem, method, state = build(**fields, **{"confidence.threshold": 0.3})
    received = method.broadcast(state, data, None)
    job = prepare(phases_of(method)[0], received, data, 1)
    anchors, labels = embeddings_of(state.model, pixels_of(data, data.server_index)), np.array(ANCHORS)
    centre = anchors.mean(axis=0) if centred else 0.0
    z = embeddings_of(state.model, pixels_of(data, data.client_index[1]))
    scores, threshold = scores_by_hand(anchors, labels, z, CLASSES, centre), 0.3
    if quantile:
        of_anchors = leave_one_out_by_hand(anchors, labels, centre)
        threshold = np.quantile(of_anchors[np.isfinite(of_anchors)], quantile)
        np.testing.assert_allclose(received.extra.threshold, threshold, rtol=1e-4)
    np.testing.assert_array_equal(job.work.labels.report.labels, scores.argmax(axis=1))
    np.testing.assert_array_equal(job.work.labels.report.qualified, scores.max(axis=1) > threshold)
    assert 0 < np.sum(job.work.labels.report.qualified) < SIZE
    _, plain, _ = build(**{"fedanchor.travels": travels})
    more = (HEAD_DIM if centred and travels == "class_means" else 0) + (1 if quantile else 0)
    counted = bytes_per_client(problem, method, state, data).down
    assert counted == bytes_per_client(problem, plain, state, data).down + 4 * more


def test_without_two_anchors_of_a_class_the_threshold_is_the_configured_one(data):
    """A lone anchor has no score."""
    _, method, state = build(**{"fedanchor.threshold_quantile": 0.9, "confidence.threshold": 0.3})
    received = method.broadcast(state, data._replace(server_index=data.server_index[:3]), None)
    assert received.extra.threshold == np.float32(0.3)


def test_the_penalty_joins_the_contrastive_loss(data):
    """In one step, whose length is linear in its weight; the loss that is reported stays eq. 2."""
    fields = {"contrastive_batch_size": len(ANCHORS), "contrastive_learning_rate": 0.3}
    fields = {f"fedanchor.{name}": value for name, value in fields.items()} | {"server.epochs": 0}
    changes, reported = [], []
    for weight in (0.0, 0.5, 1.0):
        _, method, state = build(**fields, **{"fedanchor.common_direction_weight": weight})
        after, metrics = method.server_after(state, data, jax.random.key(0))
        changes.append(leaves(after.model) - leaves(state.model))
        reported.append(metrics["contrastive_loss"])
    np.testing.assert_allclose(reported, reported[0], rtol=1e-6)
    assert np.abs(changes[2] - changes[0]).max() > 1e-3
    np.testing.assert_allclose(changes[2] - changes[1], changes[1] - changes[0], atol=1e-5)  # one step, linear in it


@pytest.mark.parametrize("threshold, qualifies", [(0.0, False), (-1e-6, True)])
def test_a_score_at_the_threshold_falls_short(data, threshold, qualifies):
    """Eq. 5 has 'above': embeddings that are zero score exactly 0."""
    _, method, state = build(**{"confidence.threshold": threshold})
    nothing = jax.tree.map(jnp.zeros_like, state.model)
    job = prepare(phases_of(method)[0], method.broadcast(state._replace(model=nothing), data, None), data, 1)
    assert np.all(np.asarray(job.work.labels.report.qualified) == qualifies)


# --- What travels, Algorithm 1. --------------------------------------------------------------------------------------


def size_of(tree):
    return sum(leaf.size * 4 for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "travels, anchor_bytes",
    [("class_means", CLASSES * HEAD_DIM * 4 + CLASSES * 4), ("all_pairs", len(ANCHORS) * (HEAD_DIM * 4 + 4))],
)
def test_bytes_are_the_sizes_of_what_travels(data, travels, anchor_bytes):
    problem, method, state = build(**{"fedanchor.travels": travels})
    traffic = bytes_per_client(problem, method, state, data)
    assert traffic.down == size_of(state.model) + anchor_bytes + 4  # and the learning rate
    assert traffic.up == size_of(state.model) - size_of(state.model.params[HEAD])
    assert traffic.statistics_down == traffic.statistics_up == 0


@pytest.mark.parametrize("source, exchanging", [("server", 0), ("cohort", 2), ("all", 4)])
def test_statistics_from_clients_are_a_second_exchange(data, source, exchanging):
    fields = {"model.normalisation": "static", "model.statistics": source}
    problem, method, state = build(network=SmallNetwork(HEAD, normalisation="static"), **fields)
    traffic = bytes_per_client(problem, method, state, data)
    assert traffic.statistics_down == exchanging * size_of(state.model.params)
    assert traffic.statistics_up == exchanging * size_of(state.model.batch_stats)
    assert traffic.up == size_of(state.model.params) - size_of(state.model.params[HEAD])  # no statistics


# --- The server: equations 1 and 2, one epoch on each head (section 4.4). --------------------------------------------


def moved(after, before):
    """The parts of a model that are not bit for bit the same."""
    return {name for name in before.params if np.any(leaves(after.params[name]) != leaves(before.params[name]))}


def leaves(tree):
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)])


SERVER = {"server.batch_size": 4, "server.learning_rate": 0.3, "server.augmentation": "weak", "server.epochs": 2}


def test_the_contrastive_epoch_may_train_its_head_alone_at_a_rate_that_follows_the_schedule(data):
    """In round 4 of 8 the cosine has half the rate, and a single step has half the length."""
    fields = {"contrastive_batch_size": len(ANCHORS), "contrastive_trains": "anchor_head"}
    fields = {f"fedanchor.{name}": value for name, value in fields.items()}
    _, method, state = build(schedule="cosine", num_rounds=8, **fields, **{"server.epochs": 0})
    stage = jax.jit(lambda state: method.server_after(state, data, jax.random.key(0))[0].model)
    first, fourth = (stage(state._replace(round=jnp.int32(number))) for number in (0, 4))
    assert moved(first, state.model) == {HEAD}
    before, change = leaves(state.model.params), leaves(first.params) - leaves(state.model.params)
    assert np.abs(change).max() > 1e-3
    np.testing.assert_allclose(leaves(fourth.params) - before, change / 2, atol=1e-6)


@pytest.mark.parametrize("lasts", [True, False])
def test_the_optimizers_of_pre_training_may_last(data, lasts):
    """Both trainings go on with their momentum, or begin at rest."""
    fields = {"pretrain_epochs": 1, "momentum": 0.5, "persistent": True, "pretrain_persistent": lasts}
    _, method, _ = build(**SERVER, **{f"server.{name}": value for name, value in fields.items()})
    state = method.init(data, jax.random.key(3))
    for name in ("classification", "contrastive"):
        assert np.any(leaves(state.server[name])) == lasts


def test_the_server_s_fix_and_mix_losses_are_those_of_the_equations(data, monkeypatch):
    """FedAnchor (mix): L_fix on the batch plus b L_mix with partners from all anchors."""
    drawn = np.array([5, 0, 5, 7])
    monkeypatch.setattr(training, "draw_with_replacement", lambda key, size, count: jnp.asarray(drawn))
    monkeypatch.setattr("fedjax_ssl.ops.augment.mixup.sample_lambda", lambda key, alpha: jnp.float32(0.3))
    problem, _, state = build(weak=itself, strong=negative)
    loss_fn = training.supervised_mixup_loss(problem, data, 0.75, 2.0)
    rows, mask = data.server_index[:4], jnp.array([True, True, True, False])
    loss, (_, metrics) = loss_fn(state.model, rows, data.visible_labels[rows], mask, jax.random.key(0))

    model, one_hot = in_numpy(state.model.params), np.eye(CLASSES)[list(ANCHORS)]
    x, partner = pixels_of(data, rows[:3]), pixels_of(data, drawn[:3])
    mixture = 0.3 * x + 0.7 * partner
    fix = loss_and_gradient(model, 1 - x, (1 - x).mean(axis=0), one_hot[:3] / 3)[0]
    targets = (0.3 * one_hot[:3] + 0.7 * one_hot[drawn[:3]]) / 3
    mix = loss_and_gradient(model, mixture, mixture.mean(axis=0), targets)[0]
    found = [metrics["server_loss"], metrics["server_mix_loss"], loss]
    np.testing.assert_allclose(found, [fix, mix, fix + 2 * mix], rtol=1e-5)


def test_the_server_s_lambdas_are_drawn_before_its_steps_but_on_a_cpu(data, monkeypatch):
    """With the keys of the steps: the same. Beta's loops, which take long to compile, are only traced."""
    _, method, state = build("fedanchor,mix", **{**SERVER, "fedanchor.contrastive": False})
    in_steps, results = [], []
    for platform in ("cpu", "gpu"):
        stage = lambda state: method.server_after(state, data, jax.random.key(3))  # noqa: E731
        with use_platform(platform), monkeypatch.context() as patch:
            scan = next(e for e in jax.make_jaxpr(stage)(state).eqns if e.primitive.name == "scan")
            in_steps.append("random_gamma" in str(scan.params["jaxpr"]))
            of_key = lambda key, alpha: jax.random.uniform(key) ** alpha  # noqa: E731
            patch.setattr("fedjax_ssl.ops.augment.mixup.sample_lambda", of_key)
            results.append(jax.jit(lambda state: method.server_after(state, data, jax.random.key(3)))(state))
    assert in_steps == [True, False]
    assert results[0][1].keys() == {"server_loss", "server_mix_loss"}
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *results)


# --- Variants and choices. -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant, at_clients, at_server",
    [
        ("", {"fix_loss", "mix_loss"}, {"server_loss", "contrastive_loss"}),
        ("mix", {"fix_loss", "mix_loss"}, {"server_loss", "server_mix_loss", "contrastive_loss"}),
        ("no_mixup", {"fix_loss"}, {"server_loss", "contrastive_loss"}),
        ("server_mixup", {"fix_loss"}, {"server_loss", "server_mix_loss", "contrastive_loss"}),
        ("no_contrastive", {"fix_loss", "mix_loss"}, {"server_loss"}),
    ],
)
def test_variants_of_the_losses(data, variant, at_clients, at_server):
    _, method, state = build(f"fedanchor,{variant}" if variant else "fedanchor")
    assert jax.eval_shape(method.server_after, state, data, jax.random.key(0))[1].keys() == at_server
    received = method.broadcast(state, data, None)
    job = jax.eval_shape(lambda: prepare(phases_of(method)[0], received, data, 0))
    carry = jax.eval_shape(phases_of(method)[0].start, received, data, job.work, {})
    assert carry.totals.keys() == {"client_loss", *at_clients}


def test_without_clients_nobody_trains_and_all_label(data):
    _, method, state = build("fedanchor,strong,no_clients", **{"model.normalisation": "running"})
    job = prepare(phases_of(method)[0], method.broadcast(state, data, None), data, 1)
    assert job.num_steps == 0 and len(set(np.asarray(job.work.labels.report.labels))) > 1
