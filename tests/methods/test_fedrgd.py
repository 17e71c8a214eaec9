"""FedRGD against NumPy: groups with a server replica each, lost uploads, draws; tests/official has whole rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.config import apply_arguments, base_config
from fedjax_ssl.engine.interface import Received, State, Upload
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fedrgd import Place, replica_means
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.validation import validate
from tests.helpers.small_problem import (
    MAX_SIZE,
    NUM_CLIENTS,
    SmallNetwork,
    federation,
    phases_of,
    pixels_of,
    predicted,
    prepare,
    sent_down,
    small_problem,
)

ANCHORS, SIZES, STEPS = [0, 1, 2, 0, 1], (3, 6, 4, 5), 3


@pytest.fixture(scope="module")
def data():
    return federation([[-1] * size for size in SIZES], at_server=ANCHORS)


def build(**fields):
    """Every batch is a whole data set, so that no order matters, and no view draws."""
    fields = {
        "clients_per_round": NUM_CLIENTS, "client.batch_size": MAX_SIZE, "server.batch_size": len(ANCHORS),
        "server.learning_rate": 0.3, "server.momentum": 0.5, "fedrgd.steps": STEPS,
        "confidence.threshold": 0.6, **fields,
    }  # fmt: skip
    problem = small_problem("fedrgd", SmallNetwork(normalisation="group"), **fields)
    validate(problem.config)
    return problem, METHODS["fedrgd"].factory(problem)


# --- Means. ----------------------------------------------------------------------------------------------------------


def test_each_group_s_mean_has_its_replica_in_it():
    """Of four groups one has uploads of unlike weights, one lost an upload, one has none, one is of one upload."""
    rng = np.random.default_rng(0)
    uploads, replicas = rng.normal(size=(6, 2, 3)).astype(np.float32), rng.normal(size=(4, 2, 3)).astype(np.float32)
    weights, group = np.float32([1, 3, 0, 2, 5, 0]), np.array([0, 0, 1, 1, 3, 2])
    uploads[weights == 0] = np.nan
    in_group = (group == np.arange(4)[:, None]) & (weights > 0)
    model = lambda leaf: Model({"a": leaf}, ())  # noqa: E731
    found = jax.jit(replica_means)(model(uploads), weights, in_group, model(replicas)).params["a"]
    for number in range(4):
        rows = np.flatnonzero(in_group[number])
        own = np.mean(weights[rows]) if len(rows) else 1.0
        total = own * replicas[number] + sum(weights[i] * uploads[i] for i in rows)
        np.testing.assert_allclose(found[number], total / (own + weights[rows].sum()), rtol=1e-5)


# --- Rounds. ---------------------------------------------------------------------------------------------------------


def test_the_global_model_is_the_mean_of_the_groups_means(data):
    """And users continue from their group's."""
    _, method = build()
    state = jax.jit(method.init)(data, jax.random.key(0))
    clients = jnp.arange(NUM_CLIENTS)
    models = jax.tree.map(lambda leaf: leaf[clients // 2] + clients.reshape(-1, *[1] * (leaf.ndim - 1)),
                          state.server["groups"])  # fmt: skip
    upload, sizes = Upload(models, {"opt_state": state.server["places"]}), jnp.array(SIZES)
    received = Received(upload, jnp.ones(NUM_CLIENTS, bool), clients, clients, sizes, sizes)
    after, _ = method.aggregate(state, data, received, jax.random.key(1))
    groups, mean = (model.params["backbone"]["bias"] for model in (after.server["groups"], after.model))
    np.testing.assert_allclose(np.mean(groups, axis=0), mean, rtol=1e-6)
    assert np.all(groups[0] != groups[1])


def test_a_place_whose_upload_is_lost_keeps_its_momentum(data):
    """Of three places one got no upload, and one a late upload (which comes first) and a new one, which counts."""
    _, method = build(clients_per_round=3)
    state = jax.jit(method.init)(data, jax.random.key(0))

    def of_place(scale, rows=3):
        numbers = scale * (1.0 + jnp.arange(rows))
        fill = lambda leaf: numbers.reshape(-1, *[1] * (leaf.ndim - 1)) + 0 * leaf[:1]  # noqa: E731
        return jax.tree.map(fill, state.server["places"])

    state = state._replace(server={**state.server, "places": of_place(1)})
    models = jax.tree.map(lambda leaf: leaf[jnp.array([1, 0, 0, 1])], state.server["groups"])
    ones = jnp.ones(4, jnp.int32)
    received = Received(
        Upload(models, {"opt_state": of_place(10, rows=4)}), jnp.array([True, True, False, True]),
        jnp.array([2, 3, 0, 1]), jnp.array([2, 0, 1, 2]), ones, ones,
    )  # fmt: skip
    after, _ = method.aggregate(state, data, received, jax.random.key(1))
    for leaf in jax.tree.leaves(after.server["places"]):
        np.testing.assert_array_equal(leaf.reshape(3, -1)[:, 0], [20, 2, 40])


def test_users_are_drawn_without_replacement(data):
    _, method = build(clients_per_round=3)
    draws = [method.select(None, data, jax.random.key(seed)) for seed in range(6)]
    assert all(len(set(np.asarray(draw.clients))) == 3 for draw in draws)
    assert set(np.concatenate([draw.clients for draw in draws])) == set(range(NUM_CLIENTS))


def test_batches_of_a_round_are_disjoint_while_images_last(data):
    """Two of a user's five images in each of three steps: two whole batches of one order, then one of the next."""
    problem, method = build(**{"client.batch_size": 2})
    received = sent_down(problem)
    job = prepare(phases_of(method)[0], received, data, 3, personal=Place(received.model, {}))
    deck = job.work[0].decks["unlabelled"]
    batches = [np.asarray(deck.batch(jnp.int32(index), 2).positions) for index in range(3)]
    assert job.num_steps == STEPS and deck.size == 4
    assert len({*batches[0], *batches[1]}) == 4
    np.testing.assert_array_equal(batches[2], deck.order[1, :2])


def test_the_report_is_of_the_images_that_users_train_on(data):
    """By the global model: those from the threshold on."""
    problem, method = build()
    received = sent_down(problem)
    job = prepare(phases_of(method)[0], received, data, 1, personal=Place(received.model, {}))
    report, p = job.work[0].labels.report, predicted(received.model, pixels_of(data, data.client_index[1]))
    np.testing.assert_array_equal(report.labels, p.argmax(axis=1))
    np.testing.assert_array_equal(report.qualified, (np.arange(MAX_SIZE) < SIZES[1]) & (p.max(axis=1) >= 0.6))
    assert 0 < report.qualified.sum() < SIZES[1]


def test_the_paper_s_rates_are_those_of_its_launcher(data):
    """`--fast 1`: of the peak's rate .784, .195 and nothing after the epochs 100, 200 and 229 of 1,024 steps."""
    config = apply_arguments(base_config(), "fedrgd,paper")
    fields = {f"fedrgd.{name}": config.fedrgd[name] for name in ("warm_up_rounds", "decay_rounds")}
    problem, method = build(**fields)
    model = problem.network.init(jax.random.key(0))
    for epoch, factor in ((100, 0.784), (200, 0.195), (229, 1e-5), (299, 1e-5)):
        rate = method.broadcast(State(jnp.int32(64 * epoch), model), data, None).learning_rate
        assert float(rate) / 0.4 == pytest.approx(factor, abs=5e-4), epoch
    _, shared = build(schedule="cosine", num_rounds=8)
    assert float(shared.broadcast(State(jnp.int32(4), model), data, None).learning_rate) == pytest.approx(0.2)


@pytest.mark.parametrize(("fields", "line"), [
    ({"fedrgd.groups": 4, "clients_per_round": 3}, r"fedrgd\.groups is 4, but clients_per_round = 3"),
    ({"aggregation.optimizer": "fedavgm"}, r"aggregation\.optimizer and .* are for one model"),
])  # fmt: skip
def test_what_groups_cannot_have_is_refused(fields, line):
    with pytest.raises(UserError, match=line):
        build(**fields)
