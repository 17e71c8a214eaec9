"""SemiAnAgg's cosines and weights, FedAvg-Semi's mean, and their guards, against NumPy; the anchor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import base_config
from fedjax_ssl.data import dataset_facts, load_dataset
from fedjax_ssl.data.kinds import IMAGE, KINDS
from fedjax_ssl.engine.interface import Previous, Received, State, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.semianagg import COSINES, WEIGHT, class_cosines, diversity
from fedjax_ssl.models.network import build_network
from fedjax_ssl.models.untrained import kaiming_model
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.validation import validate
from fedjax_ssl.server.aggregation import role_weights
from fedjax_ssl.sweep import load_sweep, plan
from tests.helpers.linear_network import divided
from tests.helpers.small_problem import (
    CLASSES,
    assert_model,
    federation,
    mirrored,
    phases_of,
    pixels_of,
    predicted,
    prepare,
    sent_down,
    small_problem,
)

BOTH = 2
TAU = 0.45


@pytest.fixture(scope="module")
def data():
    return federation([[0, 2, 1, 0, 0], [-1] * 8, [1, -1, -1, 0, -1, -1]])


# --- The cosines. ----------------------------------------------------------------------------------------------------


def cosines_by_hand(features, anchors, labels, chosen):
    """w_c of one client, image by image."""
    found = []
    for c in range(CLASSES):
        of_class = [
            q @ a / np.linalg.norm(q) / np.linalg.norm(a)
            for q, a, label, counts in zip(features, anchors, labels, chosen)
            if label == c and counts
        ]
        found.append(max(np.mean(of_class), 0) if of_class else 1.0)
    return found


def test_what_a_client_tells_of_its_classes(data):
    """One with images of both kinds tells of those without a label.

    The features of the small network are its centred pixels: those of the anchor take no weak view.
    """
    fields = {"confidence.threshold": TAU, "confidence.kind": "fixed", "confidence.debias": "app_u"}
    problem = small_problem("semianagg", **fields)
    validate(problem.config)
    method, received = METHODS["semianagg"].factory(problem), sent_down(problem)
    # Statistics far from the middle, so that most cosines are positive.
    received = received._replace(model=received.model._replace(batch_stats={"mean": jnp.full(4, -0.1)}))
    own = jax.jit(lambda data: method.init(data, jax.random.key(0)).clients)(data)
    anchor_mean = 0.25  # where the small network's statistics begin
    rows = np.asarray(data.client_index[BOTH])[: int(data.client_size[BOTH])]
    previous = nothing_before(received)
    job = prepare(phases_of(method)[1], received, data, BOTH, jax.tree.map(lambda leaf: leaf[BOTH], own), previous)
    weak, anchors = pixels_of(data, rows, mirrored), pixels_of(data, rows) - anchor_mean
    p = predicted(received.model, weak)
    chosen = np.asarray(data.visible_labels)[rows] < 0
    p = divided(p, p[chosen].mean(axis=0))
    chosen &= p.max(axis=1) >= TAU
    assert 0 < chosen.sum() < len(rows)
    expected = cosines_by_hand(weak + 0.1, anchors, p.argmax(axis=1), chosen)
    np.testing.assert_allclose(job.work.labels.tells[COSINES], expected, atol=1e-5)
    assert min(expected) < 1  # a class has an image


def nothing_before(received):
    """What the labelled phase leaves of a client without labels, with the leading axis of one job."""
    upload = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape)), Upload(received.model))
    return Previous(upload, jnp.array([False]))


def test_a_class_without_an_image_is_like_random_and_no_cosine_is_below_zero():
    cosines = jnp.array([0.5, 0.3, -0.9, 0.2])
    of_client = jax.jit(class_cosines, static_argnums=3)
    found = of_client(cosines, jnp.array([0, 0, 1, 2]), jnp.array([True, True, True, False]), 4)
    np.testing.assert_allclose(found, [0.4, 0, 1, 1], rtol=1e-6)


# --- The weights. ----------------------------------------------------------------------------------------------------


def diversity_by_hand(w):
    """r of the rows of w, class by class (eq. 4 and 5)."""
    num_clients, num_classes = w.shape
    r = np.array([sum(1 - w[k, c] / w[:, c].sum() for c in range(num_classes)) for k in range(num_clients)])
    return r / r.sum()


@pytest.mark.parametrize(("w", "unlabelled", "expected"), [
    ([[0.3, 0.9]], [True], [1.0]),  # one unlabelled client: eq. 5 is 0 / 0
    ([[0.3, 0.9], [0.5, 0.2]], [False, True], [0.0, 1.0]),
    ([[0.0, 0.4], [0.0, 0.4]], [True, True], [0.5, 0.5]),
    ([[0.3, 0.9], [0.5, 0.2]], [False, False], [0.0, 0.0]),
])  # fmt: skip
def test_guards(w, unlabelled, expected):
    np.testing.assert_allclose(jax.jit(diversity)(np.float32(w), np.array(unlabelled)), expected, atol=1e-6)


@pytest.mark.parametrize(("labelled", "unlabelled", "expected"), [
    ([3, 1, 0, 0], [0, 0, 0, 0], [0.75, 0.25, 0, 0]),  # no accepted label: theta_U := theta_L
    ([0, 0, 0, 0], [0, 0, 1, 4], [0, 0, 0.2, 0.8]),  # no labelled client in the cohort
    ([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
    ([2, 2, 0, 0], [1, 0, 3, 0], [0.4, 0.3, 0.3, 0]),  # the first has images of both kinds
])  # fmt: skip
def test_each_role_has_its_share(labelled, unlabelled, expected):
    found = jax.jit(role_weights)(np.float32(labelled), np.float32(unlabelled), 0.6)
    np.testing.assert_allclose(found, expected, atol=1e-6)


# --- The mean. -------------------------------------------------------------------------------------------------------

CLIENTS = [4, 0, 6, 2, 1]  # of seven
SIZES, LABELS = np.array([5, 8, 6, 4, 7]), np.array([5, 0, 2, 0, 0])
ACCEPTED = np.array([0.0, 6.0, 3.0, 1.0, 9.0])
W = np.random.default_rng(3).uniform(0.2, 1, (5, CLASSES)).astype(np.float32)


def aggregated(name, accepted, told, **fields):
    """The model after five uploads, the parameters and statistics of each, stacked, and the weights in the record."""
    problem = small_problem(name, **fields)
    model = problem.network.init(jax.random.key(1))
    rng = np.random.default_rng(4)
    stacked = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=(5, *leaf.shape)), jnp.float32), model)
    received = Received(
        Upload(stacked, {"labelled": jnp.float32(LABELS), **told}),
        jnp.asarray(accepted), jnp.array(CLIENTS), None, jnp.asarray(SIZES), jnp.asarray(SIZES),
    )  # fmt: skip
    state = State(jnp.int32(0), Model(model.params, model.batch_stats))
    method = METHODS[name].factory(problem)
    data = federation([[-1]] * 7)
    after, metrics = jax.jit(lambda *arguments: method.aggregate(*arguments, jax.random.key(0)))(state, data, received)
    rows = {name: np.asarray(leaf, np.float64) for name, leaf in _flat(stacked).items()}
    return after.model, rows, metrics.get(WEIGHT)


def _flat(stacked):
    params = stacked.params
    return {
        "bias": params["backbone"]["bias"],
        "kernel": params["classifier"]["kernel"],
        "mean": stacked.batch_stats["mean"],
    }


def assert_mean(model, stacked, weights):
    mean = {name: np.tensordot(weights, leaf, 1) for name, leaf in stacked.items()}
    statistics = mean.pop("mean")
    assert_model(model, mean, statistics)


def in_shares(labels, scores, share):
    return share * labels / labels.sum() + (1 - share) * scores / scores.sum()


OTHERS = (SIZES - LABELS).astype(float)


@pytest.mark.parametrize(("fields", "weights"), [
    ({"fedavg_semi.unlabelled_weights": "uniform"}, in_shares(LABELS, (OTHERS > 0) * 1.0, 0.5)),
    ({"fedavg_semi.apart": False}, SIZES / SIZES.sum()),  # one mean of all is FedAvg's
])  # fmt: skip
def test_other_means_of_fedavg_semi(fields, weights):
    told = {"accepted": jnp.float32(ACCEPTED)}
    model, stacked, _ = aggregated("fedavg_semi", np.ones(5, bool), told, **fields)
    assert_mean(model, stacked, weights)


def test_semianagg_s_mean_and_a_dropped_upload():
    """Statistics take the weights as well; client 2 has images of both kinds, and is in both means."""
    told = {"accepted": jnp.float32(ACCEPTED), COSINES: jnp.asarray(W)}
    for accepted in (np.ones(5, bool), np.array([1, 1, 1, 0, 1], bool)):
        model, stacked, recorded = aggregated("semianagg", accepted, told, **{"semianagg.labelled_share": 0.6})
        chosen, scores = accepted & (OTHERS > 0), np.zeros(5)
        scores[chosen] = diversity_by_hand(W[chosen].astype(np.float64))
        assert_mean(model, stacked, in_shares(LABELS * accepted, scores, 0.6))
        assert np.ptp(scores[chosen]) > 0.01  # not the uniform mean
        of_clients = np.full(7, np.nan)
        of_clients[np.array(CLIENTS)[chosen]] = scores[chosen]
        np.testing.assert_allclose(recorded, of_clients, rtol=1e-5)


@pytest.mark.parametrize(("without", "told"), [("uniform", 0.0), ("labelled", 0.0), ("labelled", 2.0)])
def test_a_round_in_which_nobody_has_a_pseudo_label(without, told):
    """All cosines are then 1. A dropped upload's labels do not count."""
    accepted, labels = np.array([1, 1, 1, 0, 1], bool), np.array([0.0, told, 0.0, 9.0, 0.0])
    words = {"accepted": jnp.float32(labels), COSINES: jnp.ones((5, CLASSES))}
    model, stacked, _ = aggregated("semianagg", accepted, words, **{"semianagg.without_labels": without})
    of_labelled = LABELS * accepted / LABELS[accepted].sum()
    uniform = in_shares(LABELS * accepted, 1.0 * (accepted & (OTHERS > 0)), 0.5)
    assert_mean(model, stacked, uniform if without == "uniform" or told else of_labelled)


# --- The anchor. -----------------------------------------------------------------------------------------------------


def test_the_anchor_is_one_untrained_network_of_the_seed(data):
    """ResNet-9 itself begins otherwise, with a variance of 1 / fan-in."""
    config = base_config()
    config.update_from_flattened_dict({"data.source": "digits", "model.name": "resnet9", "model.width": 8})
    network = build_network(config, dataset_facts(load_dataset(config.data)), KINDS[IMAGE])
    make = lambda network: jax.jit(lambda key: kaiming_model(network, key))(jax.random.key(0))  # noqa: E731
    anchor = make(network)
    again = make(network._replace(given=jax.tree.map(jnp.ones_like, anchor)))  # of a run with a trained model
    kernels = [leaf for leaf in jax.tree.leaves(anchor.params["backbone"]) if leaf.ndim == 4]
    widest = max(kernels, key=lambda leaf: leaf.size)
    height, width, _, out = widest.shape
    assert np.std(widest) == pytest.approx(np.sqrt(2 / (height * width * out)), rel=0.02)
    assert len(kernels) > 3 and abs(np.mean(widest)) < 0.01 * np.std(widest) * 5
    jax.tree.map(np.testing.assert_array_equal, anchor, again)


# --- Its tables. -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "clients", "labelled", "alphas"), [
    ("5", 5, {1}, {0.8}), ("50", 50, {1}, {0.8}), ("labelled", 10, {1, 2}, {0.8}), ("alpha", 10, {1}, {0.1, 0.8}),
])  # fmt: skip
def test_every_row_begins_with_the_warm_up_of_its_own_federation(root, tmp_path, setting, clients, labelled, alphas):
    cells = plan(load_sweep(f"{root}/configs/sweeps/semianagg_clients.py:{setting}"), tmp_path)
    for cell in cells:
        assert {cell.config.num_clients, cell.config.clients_per_round} == {clients}
        assert cell.warm_up is None or cell.config.data.to_dict() == cell.warm_up.config.data.to_dict()
    assert {cell.config.data.labelled_clients for cell in cells} == labelled
    assert {cell.config.data.alpha for cell in cells} == alphas
