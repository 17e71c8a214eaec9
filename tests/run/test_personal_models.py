"""Clients' own test images and own parts of the model, compared with a plain loop over clients without lanes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import UserError, train
from fedjax_ssl.client.personal import OWN_PARTS
from fedjax_ssl.engine.cohort import train_cohort
from fedjax_ssl.engine.interface import Cohort
from fedjax_ssl.engine.round import round_keys, select_of
from fedjax_ssl.engine.tracing import trace_exchange
from fedjax_ssl.methods import find_method
from fedjax_ssl.models import Outputs
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.ops.trees import row, tree_bytes
from fedjax_ssl.records.clients import CLIENT_TESTS
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.run.client_tests import make_client_tests
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.validation import validate
from fedjax_ssl.run.wire import bytes_per_client
from tests.helpers.runs import SMALL, make_fedanchor_config
from tests.helpers.toy_federation import CLIENTS, OneNumber, federation, problem, toy_method, toy_state

pytestmark = pytest.mark.test_all

PERSONAL = {
    "method": "fixmatch",
    "confidence.threshold": 0.2,
    "data.labels": "clients",
    "data.labelled_share": 0.4,
    "data.client_test_share": 0.3,
    "data.alpha": 0.5,
    "personal_parts": ("classifier",),
    "model.normalisation": "group",
    "num_clients": 7,
    "clients_per_round": 3,
    "client.epochs": 1,
    "num_rounds": 2,
    "eval_clients_every": 1,
}


def make_config(**overrides):
    return make_fedanchor_config(**{**SMALL, **PERSONAL, **overrides})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(workdir, state) of a run in which each client keeps a classifier."""
    workdir = tmp_path_factory.mktemp("personal") / "run"
    return workdir, train(make_config(), workdir)


def alone(experiment):
    """The plain method, and a function that trains one client from the global model with its own head."""
    method = find_method(experiment.problem.config.method).factory(experiment.problem)

    @jax.jit
    def train_alone(state, client, head, key):
        sent = method.broadcast(state, experiment.data, key)
        sent = sent._replace(model=sent.model.with_parts(classifier=head))
        cohort = Cohort(client[None], {}, key)
        found = train_cohort(method.phases, sent, experiment.data, cohort, lanes=1, label=method.label)
        return row(found.upload.model.params, 0)

    return method, train_alone


@pytest.fixture(scope="module")
def by_hand():
    """The same run with the plain method, one client after the other: (experiment, train_alone, state, heads)."""
    config = make_config()
    experiment = build_experiment(config)
    (method, train_alone), data = alone(experiment), experiment.data
    state = jax.jit(experiment.init)(data)._replace(clients={})
    heads = [state.model.params["classifier"]] * config.num_clients
    for _ in range(config.num_rounds):
        keys = round_keys(data.seed, state.round)
        clients = np.asarray(select_of(experiment.problem, method)(state, data, keys.select).clients)
        trained = [train_alone(state, client, heads[client], keys.clients) for client in clients]
        sizes = np.asarray(data.client_size)[clients].astype(np.float64)
        mean = lambda *leaves: sum(map(np.multiply, leaves, sizes)) / sizes.sum()  # noqa: E731, B023
        backbone = jax.tree.map(mean, *(params["backbone"] for params in trained))
        for client, params in zip(clients, trained):
            heads[client] = params["classifier"]
        model = state.model.with_parts(backbone=jax.tree.map(jnp.float32, backbone))
        state = state._replace(model=model, round=state.round + 1)
    return experiment, train_alone, state, heads


def assert_close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), one, other)


def test_own_classifiers_are_those_of_a_loop_over_clients(finished, by_hand):
    (_, state), (_, _, expected, heads) = finished, by_hand
    assert_close(state.model.params["backbone"], expected.model.params["backbone"])
    assert_close(state.clients[OWN_PARTS]["classifier"], jax.tree.map(lambda *rows: np.stack(rows), *heads))
    kernels = [np.asarray(head["kernel"]) for head in heads]
    assert any(not np.array_equal(kernels[0], kernel) for kernel in kernels[1:])
    # Aggregation leaves the server's own parts unchanged to the bit.
    first = expected.model.params["classifier"]
    jax.tree.map(np.testing.assert_array_equal, state.model.params["classifier"], first)


def test_each_client_s_accuracy_is_that_of_a_loop_over_clients(finished, by_hand):
    (workdir, _), (experiment, train_alone, state, heads) = finished, by_hand
    dataset, keys = experiment.dataset, round_keys(experiment.data.seed, state.round)
    found = read_run(workdir).client_tests()
    assert list(found) == ["global", "tuned", "personal"]
    for client, rows in enumerate(experiment.partition.client_test_rows):
        params = train_alone(state, jnp.int32(client), heads[client], keys.clients)
        models = {
            "global": state.model,
            "personal": state.model.with_parts(classifier=heads[client]),
            "tuned": state.model.with_parts(**params),
        }
        assert len(rows) > 0
        for name, model in models.items():
            logits = experiment.problem.network.predict(model, jnp.asarray(dataset.x_train[rows])).logits
            assert found[name][client] == np.mean(np.argmax(logits, axis=1) == dataset.y_train[rows])
    assert not np.array_equal(found["tuned"], found["personal"])


def test_figures_over_clients_are_in_the_summary_and_the_lines(finished):
    workdir, _ = finished
    run, tests = read_run(workdir), read_run(workdir).client_tests()
    for model, accuracies in tests.items():
        worst = np.sort(accuracies)[:1].mean()
        expected = {"mean": accuracies.mean(), "worst_tenth": worst, "spread": accuracies.std()}
        for figure, value in expected.items():
            name = f"client_test_{model}_{figure}"
            assert run.summary[name] == pytest.approx(value) and run.metrics[-1][name] == run.summary[name]
            assert len(run.values(name)) == 2 and np.isfinite(run.values(name)).all()
    assert run.client_figures()["fine-tuned, own tests: mean over clients"] == 100 * tests["tuned"].mean()


def test_own_parts_are_in_no_message_and_not_in_the_bytes(finished):
    experiment = build_experiment(make_config())
    problem, method, shape, data = experiment.problem, experiment.method, experiment.state_shape, experiment.data
    exchange = trace_exchange(problem, method, shape, data)
    for model in (exchange.broadcast.model, exchange.upload.model):
        assert list(model.params) == ["backbone"]
    line = read_run(finished[0]).metrics[-1]
    of_model = 3 * tree_bytes(shape.model.params["backbone"])
    assert (line["bytes_down"], line["bytes_up"]) == (of_model + 3 * 4, of_model)
    # Nor in those of statistics, which seven clients send.
    static = build_experiment(make_config(**{"model.normalisation": "static", "model.statistics": "all"}))
    traffic = bytes_per_client(static.problem, static.method, static.state_shape, static.data)
    assert traffic.statistics_down == 7 * tree_bytes(static.state_shape.model.params["backbone"])


def test_nobody_trains_on_test_images_and_they_have_no_label():
    with_tests, without = (build_experiment(make_config(**fields)) for fields in ({}, {"data.client_test_share": 0.0}))
    partition = with_tests.partition
    assert without.partition.client_test_rows == ()
    for rows, tests, whole in zip(partition.client_rows, partition.client_test_rows, without.partition.client_rows):
        assert len(tests) == int(0.3 * len(whole) + 0.5)
        np.testing.assert_array_equal(np.concatenate([rows, tests]), whole)
    at_server = {"method": "supervised", "data.labels": "server"}
    for fields in ({}, {**at_server, "data.reveal_labels": True}, {**at_server, "data.centralised": True}):
        experiment = build_experiment(make_config(**fields))
        data, tests = experiment.data, np.concatenate(experiment.partition.client_test_rows)
        present = np.arange(data.width) < np.asarray(data.client_size)[:, None]
        trained_on = np.concatenate([np.asarray(data.client_index)[present], data.server_index])
        assert len(tests) and not np.isin(tests, trained_on).any()
        assert (np.asarray(data.visible_labels)[tests] < 0).all()


def test_a_run_that_was_stopped_and_moved_goes_on_to_the_same_own_parts(finished, tmp_path, monkeypatch):
    """From the disk to the device."""
    monkeypatch.setattr("fedjax_ssl.run.client_memory.CACHE_BYTES", 100)  # nearly every row goes to the disk
    workdir, state = finished
    train(make_config(num_rounds=1, **{"residence.clients": "disk", "residence.data": "host"}), tmp_path / "run")
    again = train(make_config(), tmp_path / "run")
    assert_close(again, state)
    for name, values in np.load(workdir / CLIENT_TESTS).items():
        np.testing.assert_allclose(np.load(tmp_path / "run" / CLIENT_TESTS)[name], values)


def test_a_rule_that_follows_the_rounds_is_told_their_number():
    """FedPDM's warm-up, with own parts and in clients' tests; nothing is compiled."""
    experiment = build_experiment(make_config(method="fedpdm"))
    problem, method, data = experiment.problem, experiment.method, experiment.data
    trace_exchange(problem, method, experiment.state_shape, data)
    images = np.zeros((2, 3, *data.inputs.shape[1:]), np.uint8)
    found = jax.eval_shape(
        make_client_tests(problem, method, lanes=1), experiment.state_shape, data,
        np.arange(2), np.ones(2, bool), images, np.zeros((2, 3), np.int32),
    )  # fmt: skip
    assert {of.shape for of in found.values()} == {(2,)}


class Centred(OneNumber):
    """An image is of class 1 where the model's number times (pixel - mean) is above 0; the mean is its statistic."""

    normalisation = "static"

    def predict(self, model, images):
        score = model.params["classifier"] * (images[:, 0, 0, 0].astype(jnp.float32) - model.batch_stats["mean"])
        return Outputs(jnp.stack([-score, score], axis=1), {}, score[:, None])

    def batch_statistics(self, model, images, mask):
        return {"mean": jnp.mean(images.astype(jnp.float32), where=mask[:, None, None, None])}


def test_a_fine_tuned_model_trains_at_a_constant_rate_and_has_its_client_s_statistics():
    """Whatever the round's rate. A client without training images, 3, tests the received model."""
    toy, (phase,) = problem(5, **{"client.learning_rate": 0.4})._replace(network=Centred()), toy_method().phases

    def step(received, data, work, carry, index, key):
        return {**carry, "x": carry["x"] - received.learning_rate * (1 + work["client"])}

    state = toy_state(draw=jnp.arange(5), fails=jnp.zeros(5, bool))
    state = state._replace(model=Model({"classifier": jnp.float32(1)}, {"mean": jnp.float32(35)}))
    test = make_client_tests(toy, toy_method(phases=(phase._replace(step=step),)), lanes=2)
    images = np.random.default_rng(0).integers(0, 100, (5, 40, 1, 1, 1)).astype(np.uint8)
    labels = np.random.default_rng(1).integers(0, 2, (5, 40))
    found = jax.jit(test)(state, federation(), jnp.arange(5), jnp.ones(5, bool), images, labels)
    for client, rows in enumerate(CLIENTS):
        tuned = 1 - 0.4 * len(rows) * (1 + client), np.mean(rows) * 10 if rows else 35
        for name, (number, mean) in {"global": (1, 35), "tuned": tuned}.items():
            predictions = number * (images[client].ravel() - float(mean)) > 0
            assert found[name][client] == np.sum(predictions == labels[client]), (name, client)


@pytest.mark.parametrize("fields, words", [
    ({"personal_parts": ("head",)}, "personal_parts has 'head'"),
    ({"method": "server_only", "data.labels": "server"}, "is not for server_only, which has no clients"),
    ({"personal_parts": ("backbone", "classifier")}, "leaves nothing to aggregate"),
    ({"model.normalisation": "running", "personal_parts": ("backbone",)}, "statistics are the server's"),
    ({"data.client_test_share": 0.0}, "eval_clients_every=1 needs test images of clients"),
    ({"data.client_test_share": 0.001}, "client_test_share=0.001 gives no client a test image"),
    ({"stop.patience": 3, "data.validation": 20}, "looks at the global model, whose classifier nobody trains"),
    ({"method": "fedrgd", "data.labels": "server"}, "is not for fedrgd: its message to each client has a"),
    (
        {"method": "orchestra", "data.labels": "server", "personal_parts": ("projector",)},
        "is not for orchestra: its broadcast has a projector as well",
    ),
])  # fmt: skip
def test_what_cannot_work_is_refused_in_a_line(fields, words, tmp_path):
    config = make_config(**fields)
    with pytest.raises(UserError, match=words) as caught:
        validate(config)
        experiment = build_experiment(config)
        trace_exchange(experiment.problem, experiment.method, experiment.state_shape, experiment.data)
    assert "\n" not in str(caught.value)


def test_a_partition_file_has_the_test_images_of_the_run_that_wrote_it(finished, tmp_path):
    file = str(finished[0] / "partition.npz")
    same = build_experiment(make_config(**{"data.partition_file": file, "data.examples_per_client": 0})).partition
    for one, other in zip(same.client_test_rows, build_experiment(make_config()).partition.client_test_rows):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(UserError, match="has test images of clients, which does not fit data"):
        build_experiment(make_config(**{"data.partition_file": file, "data.client_test_share": 0.0}))
