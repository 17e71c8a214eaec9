"""FedAnchor beyond its paper's algorithm, of which tests/official/fedanchor.py has whole rounds: options and variants.

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
    predicted,
    prepare,
    sent_down,
    small_problem,
    statistics_of,
)

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


def embeddings_of(model, x):
    """The anchor head's outputs in evaluation mode by NumPy."""
    kernel = np.asarray(model.params[HEAD]["kernel"], np.float64)
    return (x - statistics_of(model)) @ kernel + 0.1 * np.sum(in_numpy(model.params)["bias"])


# --- Labels, equations 3 to 5. ---------------------------------------------------------------------------------------


def test_labels_of_both_heads_are_reported_and_an_attacker_s_are_false(data):
    """Of weak views; the labels that count are those of the anchors."""
    _, method, state = build(weak=mirrored, **{"confidence.threshold": 0.7, "fedanchor.ensemble_views": 1})
    received = method.broadcast(state, data, None)
    report = prepare(phases_of(method)[0], received, data, 1).work.labels.report
    by_classifier = predicted(state.model, pixels_of(data, data.client_index[1], mirrored)).argmax(axis=1)
    np.testing.assert_array_equal(report.others["classification_head"], by_classifier)
    np.testing.assert_array_equal(report.others[HEAD], report.labels)
    assert np.any(by_classifier != np.asarray(report.labels)) and set(report.others) == {HEAD, "classification_head"}
    false = data._replace(attackers=Attackers(None, jnp.ones(len(data.inputs), bool)))
    liar = prepare(phases_of(method)[0], received, false, 1).work.labels.report
    for name, labels in {**report.others, "": report.labels}.items():
        np.testing.assert_array_equal(liar.others.get(name, liar.labels), (labels + 1) % CLASSES)


# --- Departures from the paper: centred scores, a penalty. -----------------------------------------------------------


def scores_by_hand(anchors, labels, z, centre):
    """Eq. 3 for each class."""
    anchors, z = anchors - centre, z - centre
    cosines = z @ anchors.T / np.linalg.norm(z, axis=1)[:, None] / np.linalg.norm(anchors, axis=1)
    return np.stack([cosines[:, labels == c].mean(axis=1) for c in range(CLASSES)], axis=1)


@pytest.mark.parametrize("centred", [False, True])
def test_classes_without_anchors_and_the_common_direction(centred):
    rng = np.random.default_rng(1)
    anchors, labels = (rng.normal(size=(8, 16)) + 3).astype(np.float32), np.array([0, 1, 2, 0, 1, 0, 0, 0])
    z, sent = (rng.normal(size=(20, 16)) + 3).astype(np.float32), AnchorEmbeddings(anchors, labels)
    by_class = class_anchors(sent, CLASSES + 1, centred)
    found = np.asarray(class_mean_scores(z, by_class))
    assert np.all(found[:, CLASSES] == -np.inf) and np.isfinite(found[:, :CLASSES]).all()
    mean = anchors.mean(axis=0) if centred else (anchors / np.linalg.norm(anchors, axis=1, keepdims=True)).mean(axis=0)
    cosines = z @ mean / np.linalg.norm(z, axis=1) / np.linalg.norm(mean)
    np.testing.assert_allclose(along_common_direction(z, by_class), cosines, rtol=1e-5)


@pytest.mark.parametrize("travels", ["class_means", "all_pairs"])
def test_labels_by_centred_scores(data, travels):
    """What came down is enough for it, and is counted: the centre with the class means."""
    fields = {"fedanchor.travels": travels, "fedanchor.centred": True, "confidence.threshold": 0.3}
    problem, method, state = build(**fields)
    received = method.broadcast(state, data, None)
    job = prepare(phases_of(method)[0], received, data, 1)
    anchors, labels = embeddings_of(state.model, pixels_of(data, data.server_index)), np.array(ANCHORS)
    centre = anchors.mean(axis=0)
    z = embeddings_of(state.model, pixels_of(data, data.client_index[1]))
    scores = scores_by_hand(anchors, labels, z, centre)
    np.testing.assert_array_equal(job.work.labels.report.labels, scores.argmax(axis=1))
    np.testing.assert_array_equal(job.work.labels.report.qualified, scores.max(axis=1) > 0.3)
    assert 0 < np.sum(job.work.labels.report.qualified) < SIZE
    _, plain, _ = build(**{"fedanchor.travels": travels})
    more = HEAD_DIM if travels == "class_means" else 0
    counted = bytes_per_client(problem, method, state, data).down
    assert counted == bytes_per_client(problem, plain, state, data).down + 4 * more


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


def test_all_pairs_send_every_anchor_with_its_label(data):
    """And the learning rate. Uploads have no anchor head."""
    problem, method, state = build(**{"fedanchor.travels": "all_pairs"})
    traffic, whole = bytes_per_client(problem, method, state, data), size_of(state.model)
    assert traffic.down == whole + len(ANCHORS) * (HEAD_DIM + 1) * 4 + 4
    assert traffic.up == whole - size_of(state.model.params[HEAD])


@pytest.mark.parametrize("source, exchanging", [("server", 0), ("cohort", 2), ("all", 4)])
def test_statistics_from_clients_are_a_second_exchange(data, source, exchanging):
    fields = {"model.normalisation": "static", "model.statistics": source}
    problem, method, state = build(network=SmallNetwork(HEAD, normalisation="static"), **fields)
    traffic = bytes_per_client(problem, method, state, data)
    assert traffic.statistics_down == exchanging * size_of(state.model.params)
    assert traffic.statistics_up == exchanging * size_of(state.model.batch_stats)
    assert traffic.up == size_of(state.model.params) - size_of(state.model.params[HEAD])  # no statistics


# --- The server: equations 1 and 2, one epoch on each head (section 4.4). --------------------------------------------


def leaves(tree):
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)])


SERVER = {"server.batch_size": 4, "server.learning_rate": 0.3, "server.augmentation": "weak", "server.epochs": 2}


def test_the_contrastive_epoch_s_rate_follows_the_schedule(data):
    """In round 4 of 8 the cosine has half the rate, and a single step has half the length."""
    fields = {"fedanchor.contrastive_batch_size": len(ANCHORS), "server.epochs": 0}
    _, method, state = build(schedule="cosine", num_rounds=8, **fields)
    stage = jax.jit(lambda state: method.server_after(state, data, jax.random.key(0))[0].model)
    first, fourth = (stage(state._replace(round=jnp.int32(number))) for number in (0, 4))
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


@pytest.mark.parametrize("variant, at_clients, at_server", [
    ("mix", {"fix_loss", "mix_loss"}, {"server_loss", "server_mix_loss", "contrastive_loss"}),
    ("no_mixup", {"fix_loss"}, {"server_loss", "contrastive_loss"}),
    ("no_contrastive", {"fix_loss", "mix_loss"}, {"server_loss"}),
])  # fmt: skip
def test_variants_of_the_losses(data, variant, at_clients, at_server):
    _, method, state = build(f"fedanchor,{variant}")
    assert jax.eval_shape(method.server_after, state, data, jax.random.key(0))[1].keys() == at_server
    received = method.broadcast(state, data, None)
    job = jax.eval_shape(lambda: prepare(phases_of(method)[0], received, data, 0))
    carry = jax.eval_shape(phases_of(method)[0].start, received, data, job.work, {})
    assert carry.totals.keys() == {"client_loss", *at_clients}


def test_without_clients_nobody_trains_and_all_label(data):
    _, method, state = build("fedanchor,strong,no_clients", **{"model.normalisation": "running"})
    job = prepare(phases_of(method)[0], method.broadcast(state, data, None), data, 1)
    assert job.num_steps == 0 and len(set(np.asarray(job.work.labels.report.labels))) > 1
