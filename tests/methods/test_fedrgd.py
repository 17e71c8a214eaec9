"""FedRGD against NumPy: self-training users, groups with a server replica each; tests/official has whole rounds."""

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
from tests.helpers.linear_network import at_rest, in_numpy, sgd_step
from tests.helpers.small_problem import (
    CLASSES,
    MAX_SIZE,
    NUM_CLIENTS,
    SmallNetwork,
    assert_model,
    federation,
    loss_and_gradient,
    mirrored,
    phases_of,
    pixels_of,
    prepare,
    probabilities,
    sent_down,
    small_problem,
    statistics_of,
    train,
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


def test_a_user_may_train_itself(data):
    """On a weak view towards its own label from evaluation mode; the momentum is its place's."""
    problem, method = build(**{"fedrgd.users": "self_training"})
    received, config = sent_down(problem), problem.config.client
    place = Place(received.model, {"opt_state": problem.optimizer(0.0).init(received.model.params)})
    _, finished = train(phases_of(method)[0], received, data, 1, personal=place, jit=True)
    model, rows, counted = in_numpy(received.model.params), np.asarray(data.client_index[1])[: SIZES[1]], []
    velocity, x = at_rest(model), pixels_of(data, rows, mirrored)
    for _ in range(STEPS):
        p = probabilities(model, x, statistics_of(received.model))
        counted.append(p.max(axis=1) >= 0.6)
        targets = counted[-1][:, None] * np.eye(CLASSES)[p.argmax(axis=1)] / len(rows)
        _, gradient = loss_and_gradient(model, x, x.mean(axis=0), targets)
        model, velocity = sgd_step(model, gradient, velocity, config, config.learning_rate)
    assert_model(finished.upload.model, model)
    assert 0 < np.mean(counted) < 1 and finished.own == {} and "opt_state" in finished.upload.metadata


def test_users_may_continue_from_the_mean_of_all_replicas(data):
    """One model and its momentum travel to each user and from it, and the learning rate down."""
    _, method = build()
    state = jax.jit(method.init)(data, jax.random.key(0))
    clients = jnp.arange(NUM_CLIENTS)
    models = jax.tree.map(lambda leaf: leaf[clients // 2] + clients.reshape(-1, *[1] * (leaf.ndim - 1)),
                          state.server["groups"])  # fmt: skip
    upload, sizes = Upload(models, {"opt_state": state.server["places"]}), jnp.array(SIZES)
    received = Received(upload, jnp.ones(NUM_CLIENTS, bool), clients, clients, sizes, sizes)
    for kind, one_of_all in (("group_mean", False), ("global_mean", True)):
        go_on = build(**{"fedrgd.users_go_on_from": kind})[1]
        after, _ = go_on.aggregate(state, data, received, jax.random.key(1))
        groups, mean = (model.params["backbone"]["bias"] for model in (after.server["groups"], after.model))
        np.testing.assert_allclose(np.mean(groups, axis=0), mean, rtol=1e-6)
        assert np.array_equal(groups, [mean] * 2) == one_of_all
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state.model.params))
    place = jax.tree.map(lambda leaf: leaf[0], method.personal(state, data, clients, None))
    assert method.wire_bytes.down(method.broadcast(state, data, None), place) == 4 * (2 * numbers + 1)
    assert method.wire_bytes.up(jax.tree.map(lambda leaf: leaf[0], upload)) == 4 * 2 * numbers
    assert "opt_state" not in state.clients


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


def test_users_of_a_group_get_its_model(data):
    """By the place of the draw; who takes part is drawn without replacement."""
    _, method = build(clients_per_round=3)
    draws = [method.select(None, data, jax.random.key(seed)) for seed in range(6)]
    for draw in draws:
        assert len(set(np.asarray(draw.clients))) == 3
        np.testing.assert_array_equal(draw.group, [0, 1, 2])
    assert set(np.concatenate([draw.clients for draw in draws])) == set(range(NUM_CLIENTS))
    groups = Model({"a": jnp.float32([[1, 2], [3, 4]])}, ())
    state = State(jnp.int32(0), groups, {"groups": groups, "places": {"v": jnp.arange(3)}})
    found = method.personal(state, data, jnp.array([3, 0, 1]), None)
    np.testing.assert_array_equal(found.model.params["a"], [[1, 2], [1, 2], [3, 4]])
    np.testing.assert_array_equal(found.memory["opt_state"]["v"], [0, 1, 2])


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


def test_the_rates_of_users_and_server_follow_fixmatch_s_cosine(data):
    problem, method = build(**{"fedrgd.decay_rounds": 12, "fedrgd.warm_up_rounds": 4})
    model = problem.network.init(jax.random.key(0))
    for number, factor in ((0, 0.25), (3, 1.0), (8, np.cos(7 * np.pi / 32)), (100, 1e-5)):
        rate = method.broadcast(State(jnp.int32(number), model), data, None).learning_rate
        assert float(rate) == pytest.approx(0.4 * factor, rel=1e-5), number
    _, shared = build(schedule="cosine", num_rounds=8)
    assert float(shared.broadcast(State(jnp.int32(4), model), data, None).learning_rate) == pytest.approx(0.2)


def test_the_report_is_of_the_images_that_users_train_on(data):
    """By the global model: those from the threshold on, in self-training, too."""
    p, counted = None, {}
    for users in ("fixmatch", "self_training"):
        problem, method = build(**{"fedrgd.users": users})
        received = sent_down(problem)
        job = prepare(phases_of(method)[0], received, data, 1, personal=Place(received.model, {}))
        report = job.work[0].labels.report
        p = probabilities(in_numpy(received.model.params), pixels_of(data, data.client_index[1]), 0.25)
        np.testing.assert_array_equal(report.labels, p.argmax(axis=1))
        counted[users] = np.asarray(report.qualified)
    present = np.arange(MAX_SIZE) < SIZES[1]
    for users in counted:
        np.testing.assert_array_equal(counted[users], present & (p.max(axis=1) >= 0.6))
    assert 0 < counted["fixmatch"].sum() < SIZES[1]


def test_the_paper_s_rates_are_those_of_its_launcher(data):
    """`--fast 1`: of the peak's rate .784, .195 and nothing after the epochs 100, 200 and 229 of 1,024 steps."""
    config = apply_arguments(base_config(), "fedrgd,paper")
    fields = {f"fedrgd.{name}": config.fedrgd[name] for name in ("warm_up_rounds", "decay_rounds")}
    problem, method = build(**fields)
    model = problem.network.init(jax.random.key(0))
    for epoch, factor in ((100, 0.784), (200, 0.195), (229, 1e-5), (299, 1e-5)):
        rate = method.broadcast(State(jnp.int32(64 * epoch), model), data, None).learning_rate
        assert float(rate) / 0.4 == pytest.approx(factor, abs=5e-4), epoch


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"fedrgd.groups": 4, "clients_per_round": 3}, r"fedrgd\.groups is 4, but clients_per_round = 3"),
        ({"aggregation.optimizer": "fedavgm"}, r"aggregation\.optimizer and .* are for one model"),
    ],
)
def test_what_groups_cannot_have_is_refused(fields, line):
    with pytest.raises(UserError, match=line):
        build(**fields)
