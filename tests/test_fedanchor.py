"""FedAnchor's round: its contract as a method, and each step against plain NumPy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from conftest import TINY_BACKBONE
from conftest import make_fedanchor_config as make_tiny_config
from fedjax_ssl import State, UserError
from fedjax_ssl.engine.interface import Cohort, ModelUpload, Received
from fedjax_ssl.engine.round import make_dispatch, make_round, round_key
from fedjax_ssl.models import Outputs
from fedjax_ssl.run.experiment import build_experiment, initialise
from fedjax_ssl.run.programs import DISPATCH_CAPACITY
from fedjax_ssl.run.wire import bytes_per_client
from fedjax_ssl.server import training


@pytest.fixture(scope="module")
def two_rounds(tiny_experiment):
    """The compiled round, and what two rounds from the first state give."""
    experiment, state = tiny_experiment
    round_fn = jax.jit(make_round(experiment.problem, experiment.method, lanes=1))
    history = []
    for _ in range(2):
        state, result = round_fn(state, experiment.data, experiment.hidden_labels)
        history.append(result)
    return round_fn, state, history


def test_every_figure_of_a_round_is_there_and_finite(two_rounds):
    _, state, history = two_rounds
    expected = {
        "test_accuracy", "test_loss", "pseudo_label_accuracy", "pseudo_label_accuracy_anchor_head",
        "pseudo_label_accuracy_classification_head", "qualified_accuracy", "qualified_per_client", "client_loss",
        "fix_loss", "mix_loss", "server_loss", "contrastive_loss", "uploads", "dropped_uploads",
    }  # fmt: skip
    for metrics, lane_steps, healthy in history:
        assert healthy and int(lane_steps) == int(metrics["local_steps"])  # one lane is never idle
        assert expected <= metrics.keys()
        assert all(np.isfinite(value) for value in metrics.values()), metrics
    chex.assert_tree_all_finite(state)
    assert int(state.round) == 2


def test_rounds_are_deterministic_and_blind_to_hidden_labels(tiny_experiment, two_rounds):
    experiment, state = tiny_experiment
    round_fn, expected, history = two_rounds
    permuted = jax.random.permutation(jax.random.key(0), experiment.hidden_labels)
    for _ in range(2):
        state, result = round_fn(state, experiment.data, permuted)
    chex.assert_trees_all_equal(state, expected)  # not one bit differs
    accuracies = [float(one.metrics["pseudo_label_accuracy"]) for one in (result, history[-1])]
    assert accuracies[0] != accuracies[1]  # but the scorer sees it


def test_clients_cannot_see_a_label(tiny_experiment):
    data = tiny_experiment[0].data
    visible = np.flatnonzero(np.asarray(data.visible_labels) >= 0)
    np.testing.assert_array_equal(np.sort(data.anchor_index), visible)


def test_dispatch_of_several_rounds_equals_round_by_round(tiny_experiment, two_rounds):
    experiment, state = tiny_experiment
    _, expected, history = two_rounds
    # The very program of a run with this configuration, which other tests compile too.
    round_fn = make_round(experiment.problem, experiment.method, lanes=1)
    dispatch = jax.jit(make_dispatch(round_fn, DISPATCH_CAPACITY), donate_argnums=0)
    result = dispatch(jax.tree.map(jnp.copy, state), experiment.data, experiment.hidden_labels, jnp.int32(2))
    assert int(result.rounds_done) == 2 and bool(result.healthy)
    chex.assert_trees_all_close(result.state, expected, atol=1e-5)
    one_by_one = jax.tree.map(lambda *values: np.stack(values), *history)
    for values, alone in zip(jax.tree.leaves(result.results), jax.tree.leaves(one_by_one), strict=True):
        np.testing.assert_allclose(values[:2], alone, rtol=1e-3, atol=1e-4)
        assert np.all(np.asarray(values[2:]) == 0)


def test_labels_are_the_equations(choosy_experiment):
    """Eq. 3 to 5 for a whole cohort, from the network's plain outputs."""
    experiment, state = choosy_experiment
    data, network = experiment.data, experiment.problem.network
    broadcast = experiment.method.broadcast(state, data)
    clients = jnp.array([1, 4])
    jobs = experiment.method.phases[0].prepare(broadcast, data, Cohort(clients, (), jax.random.key(0)), None)
    embed = functools.partial(network.predict, state.params, state.batch_stats)
    unit = lambda z: np.asarray(z) / np.linalg.norm(z, axis=1, keepdims=True)  # noqa: E731
    anchors = unit(embed(data.images[data.anchor_index]).embeddings)
    anchor_labels = np.asarray(data.visible_labels)[np.asarray(data.anchor_index)]
    for job, client in enumerate(clients):
        size = int(data.client_size[client])
        outputs = embed(data.images[data.client_index[client, :size]])
        similarity = unit(outputs.embeddings) @ anchors.T
        scores = np.stack([similarity[:, anchor_labels == c].mean(axis=1) for c in range(10)], axis=1)
        np.testing.assert_array_equal(jobs.report.pseudo_labels["anchor_head"][job, :size], scores.argmax(axis=1))
        by_classifier = jobs.report.pseudo_labels["classification_head"][job, :size]
        np.testing.assert_array_equal(by_classifier, outputs.logits.argmax(axis=1))
        qualified = scores.max(axis=1) > 0.7
        np.testing.assert_array_equal(jobs.report.qualified[job, :size], qualified)
        assert not np.any(jobs.report.qualified[job, size:])
        assert jobs.work.num_fix[job] == qualified.sum()
        assert jobs.num_steps[job] == 2 * int(np.ceil(qualified.sum() / 10))
        for epoch in range(2):  # every qualified example once an epoch
            order = np.asarray(jobs.work.fix_order[job, epoch, : qualified.sum()])
            np.testing.assert_array_equal(np.sort(order), np.flatnonzero(qualified))
        assert np.all((np.asarray(jobs.work.mix[job]) >= 0) & (np.asarray(jobs.work.mix[job]) < size))


def test_aggregation_weighs_by_size_and_leaves_the_anchor_head():
    """Algorithm 1: w_{t+1} = sum_m n_m / sum n_m w_m, over the clients that sent something finite."""
    experiment = build_experiment(make_tiny_config(**{"model.normalisation": "running"}))
    state = State(jnp.int32(0), *experiment.problem.network.init(jax.random.key(0)))
    rng = np.random.default_rng(0)

    def three_random(tree):
        return jax.tree.map(lambda leaf: rng.normal(size=(3, *leaf.shape)).astype(np.float32), tree)

    def expected(tree):
        return jax.tree.map(lambda leaf: 0.75 * leaf[0] + 0.25 * leaf[2], tree)

    trained = three_random({name: state.params[name] for name in ("backbone", "classifier")})
    statistics = three_random(state.batch_stats)
    accepted = jnp.array([True, False, True])
    received = Received(ModelUpload(trained, statistics), accepted, jnp.array([30, 99, 10]), jnp.array([1, 1, 1]))
    after, metrics = experiment.method.aggregate(state, received)
    assert after.params.keys() == state.params.keys()
    for name in trained:
        chex.assert_trees_all_close(after.params[name], expected(trained[name]), rtol=1e-5)
    chex.assert_trees_all_equal(after.params["anchor_head"], state.params["anchor_head"])
    change = [np.asarray(after.params[n]["kernel"] - state.params[n]["kernel"]).ravel() for n in ("classifier",)]
    assert metrics["update_norm"] > np.linalg.norm(np.concatenate(change))
    chex.assert_trees_all_close(after.batch_stats, expected(statistics), rtol=1e-5)


def test_no_qualified_example_means_no_upload_and_the_server_trains_alone(tiny_experiment, two_rounds):
    experiment, state = tiny_experiment
    # Each class's four anchors are of four classes: no image is like them on average, and no score above 0.5.
    anchors = np.asarray(experiment.data.anchor_index)
    labels = np.array(experiment.data.visible_labels)
    labels[anchors[np.argsort(labels[anchors], kind="stable")]] = np.arange(40) % 10
    data = experiment.data._replace(visible_labels=jnp.asarray(labels))
    after, (metrics, *_) = two_rounds[0](state, data, experiment.hidden_labels)
    assert int(metrics["uploads"]) == 0 and int(metrics["dropped_uploads"]) == 0
    assert int(metrics["local_steps"]) == 0 and float(metrics["qualified_per_client"]) == 0
    assert np.isnan(metrics["client_loss"]) and np.isnan(metrics["qualified_accuracy"])
    chex.assert_tree_all_finite(after)
    # What the clients were sent is what the server went on from.
    keys = jax.random.split(round_key(data.seed, 0), 4)
    alone, _ = jax.jit(experiment.method.server_after)(state, data, keys[3])
    chex.assert_trees_all_close(after.params, alone.params, atol=1e-5)


def test_a_non_finite_upload_is_dropped_and_counted(tiny_experiment):
    experiment, state = tiny_experiment
    phase = experiment.method.phases[0]

    def poisoned_finish(broadcast, work, carry, num_steps):
        finished = phase.finish(broadcast, work, carry, num_steps)
        bad = work.rows[0] == experiment.data.client_index[3, 0]  # client 3
        spoil = lambda x: jnp.where(bad, jnp.nan, x)  # noqa: E731
        return finished._replace(upload=jax.tree.map(spoil, finished.upload))

    # Nobody trains, which takes long to compile and has no part in this.
    idle = phase._replace(step=lambda broadcast, data, work, carry, index, key: carry, finish=poisoned_finish)
    poisoned = experiment.method._replace(phases=(idle,), server_after=lambda state, data, key: (state, {}))
    problem = experiment.problem
    # The whole federation is the cohort, so that client 3 is in it.
    config = ConfigDict(problem.config)
    config.clients_per_round = 8
    round_fn = jax.jit(make_round(problem._replace(config=config), poisoned, lanes=1))
    after, (metrics, *_) = round_fn(state, experiment.data, experiment.hidden_labels)
    assert int(metrics["uploads"]) == 8 and int(metrics["dropped_uploads"]) == 1
    assert np.isfinite(metrics["client_loss"])
    chex.assert_tree_all_finite(after)
    chex.assert_trees_all_close(after.params, state.params, rtol=1e-5)  # the mean of the seven others


@pytest.mark.parametrize(
    "overrides",
    [
        {"fedanchor.server_mixup": True, "fedanchor.client_mixup": False, "fedanchor.contrastive": False,
         "fedanchor.travels": "all_pairs", "model.normalisation": "group"},
        {"fedanchor.ensemble_views": 2, "fedanchor.mix_order": "augment_then_mix", "schedule": "cosine",
         "fedanchor.contrastive_trains": "model", "fedanchor.contrastive_augmentation": "weak",
         "fedanchor.negatives": "class", "client.clip_norm": 0.0, "client.nesterov": True,
         "aggregation.weights": "qualified", "augment.flavour": "usb", "model.normalisation": "static",
         "model.statistics": "cohort", "model.dtype": "bfloat16"},
    ],
    ids=["mix-at-server-without-contrastive", "ensemble-and-options"],
)  # fmt: skip
def test_variants_train(overrides):
    experiment = build_experiment(make_tiny_config(**overrides, **{"model.name": TINY_BACKBONE}))
    state = jax.jit(lambda data: initialise(experiment, data))(experiment.data)
    round_fn = jax.jit(make_round(experiment.problem, experiment.method, lanes=1))
    after, (metrics, *_) = round_fn(state, experiment.data, experiment.hidden_labels)
    chex.assert_tree_all_finite(after)
    assert int(metrics["uploads"]) > 0
    assert ("mix_loss" in metrics) == experiment.problem.config.fedanchor.client_mixup
    assert ("contrastive_loss" in metrics) == experiment.problem.config.fedanchor.contrastive
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), after.params, state.params)
    assert all(jax.tree.leaves(moved["classifier"])) and all(jax.tree.leaves(moved["backbone"]))
    # Without the contrastive loss nothing trains the anchor head.
    head = any(jax.tree.leaves(moved["anchor_head"]))
    assert head == experiment.problem.config.fedanchor.contrastive


def npz_config(tmp_path, shape, num_classes, num_anchors, **overrides):
    """A config over a made-up data set of the right shape: shapes are all that counting bytes needs."""
    rng = np.random.default_rng(0)
    labels = np.arange(num_anchors + num_classes * 20) % num_classes
    images = rng.integers(0, 256, (len(labels), *shape), dtype=np.uint8)
    path = tmp_path / "made_up.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images[:num_classes], y_test=labels[:num_classes])
    return make_tiny_config(**{
        "data.source": "npz", "data.path": str(path), "data.num_anchors": num_anchors, "data.partition": "iid",
        "data.examples_per_client": 0, "model.name": "resnet18", "fedanchor.travels": "all_pairs", **overrides,
    })  # fmt: skip


@pytest.mark.parametrize(
    "num_classes, num_anchors, percent",
    [(10, 250, 0.29), (10, 500, 0.57), (10, 1000, 1.15), (10, 5000, 5.73), (100, 2500, 2.85), (100, 10000, 11.41)],
)
def test_table_4_comes_out_of_the_leaves(tmp_path, num_classes, num_anchors, percent):
    """Table 4: anchor embeddings over the model's parameters without the anchor head, downstream, in percent."""
    experiment = build_experiment(npz_config(tmp_path, (8, 8, 3), num_classes, num_anchors))
    state = jax.eval_shape(lambda data: initialise(experiment, data), experiment.data)
    broadcast = jax.eval_shape(experiment.method.broadcast, state, experiment.data)
    model = {name: leaves for name, leaves in broadcast.params.items() if name != "anchor_head"}
    overhead = 100 * broadcast.anchors.embeddings.size / sum(leaf.size for leaf in jax.tree.leaves(model))
    assert round(overhead, 2) == percent


def test_bytes_are_the_sizes_of_what_travels(tiny_experiment):
    experiment, state = tiny_experiment
    count = lambda tree: sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))  # noqa: E731
    traffic = bytes_per_client(experiment.problem, experiment.method, state, experiment.data)
    class_anchors = 10 * 128 * 4 + 10 * 4
    learning_rate = 4
    assert traffic["down"] == count(state.params) + count(state.batch_stats) + class_anchors + learning_rate
    # Under 'static' normalisation no statistics are uploaded.
    assert traffic["up"] == count(state.params) - count(state.params["anchor_head"])
    assert traffic["statistics_down"] == traffic["statistics_up"] == 0  # they are taken from the server's images


@pytest.mark.parametrize("source", ["all", "all_mixed"])
def test_statistics_from_clients_are_a_second_exchange(source):
    experiment = build_experiment(make_tiny_config(**{"model.statistics": source}))
    state = State(jnp.int32(0), *experiment.problem.network.init(jax.random.key(0)))
    traffic = bytes_per_client(experiment.problem, experiment.method, state, experiment.data)
    count = lambda tree: sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))  # noqa: E731
    assert traffic["statistics_down"] == 8 * count(state.params)
    assert traffic["statistics_up"] == 8 * count(state.batch_stats)


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("fedanchor.travels", "pigeons", "class_means, all_pairs"),
        ("fedanchor.temperature", 0.0, "temperature"),
        ("fedanchor.mix_order", "never", "mix_then_augment"),
        ("model.anchor_dim", 0, "anchor_dim"),
    ],
)
def test_wrong_options_are_named(field, value, words):
    with pytest.raises(UserError, match=words):
        build_experiment(make_tiny_config(**{field: value}))


def test_the_servers_fix_and_mix_losses_are_those_of_the_equations(tiny_experiment, monkeypatch):
    """FedAnchor (mix): L_fix on the batch plus b L_mix with partners from all anchors, by NumPy, for a linear model."""
    experiment, _ = tiny_experiment
    data = experiment.data
    drawn = np.array([5, 0, 5, 39])
    monkeypatch.setattr(training, "draw_with_replacement", lambda key, size, count: jnp.asarray(drawn))
    monkeypatch.setattr("fedjax_ssl.augment.mixup.sample_lambda", lambda key, alpha: jnp.float32(0.3))

    class Linear:
        def train(self, params, batch_stats, views, mask):
            flat = [view.astype(jnp.float32).reshape(len(view), -1) for view in views]
            return tuple(Outputs(x @ params, None) for x in flat), batch_stats

    itself = lambda key, images: images  # noqa: E731
    problem = experiment.problem._replace(network=Linear(), weak=itself, strong=lambda key, images: 255 - images)
    loss_fn = training.supervised_mixup_loss(problem, data, "strong", 0.75, 2.0, "mix_then_augment")
    params = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32) / 500
    rows, mask = np.asarray(data.anchor_index)[:4], np.array([True, True, True, False])
    labels = np.asarray(data.visible_labels)[rows]
    loss, (_, metrics) = loss_fn(jnp.asarray(params), {}, rows, labels, jnp.asarray(mask), jax.random.key(0))

    images = np.asarray(data.images, np.float64).reshape(len(data.images), -1)
    partners = np.asarray(data.anchor_index)[drawn]

    def log_probabilities(x):
        logits = x @ params.astype(np.float64)
        return logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))

    def nll(x, y):
        return -log_probabilities(x)[np.arange(3), y[:3]]

    fix = np.mean(nll(255 - images[rows[:3]], labels))
    mixture = 0.3 * images[rows[:3]] + 0.7 * images[partners[:3]]
    mix = np.mean(0.3 * nll(mixture, labels) + 0.7 * nll(mixture, np.asarray(data.visible_labels)[partners]))
    found = [metrics["server_loss"], metrics["server_mix_loss"], loss]
    np.testing.assert_allclose(found, [fix, mix, fix + 2 * mix], rtol=1e-4)
