"""Who does not answer and what comes late, by the toy federation: what arrives, what is remembered, what counts."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.config import apply_arguments
from fedjax_ssl.data.federated import Attackers
from fedjax_ssl.engine.interface import Received, Selection, State, Upload
from fedjax_ssl.engine.round import _of_those_who_answer, make_round
from fedjax_ssl.engine.untrusted.delivery import LATE, LOST, delivered, first_memory, present_jobs
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.experiment import build_experiment
from tests.helpers.runs import make_tiny_config
from tests.helpers.toy_federation import CLIENTS, TRUTH, federation, problem, run, toy_method, toy_state

DRAW = [4, 2, 0, 1]
SIZES = np.array([len(rows) for rows in CLIENTS])
FULL = 1 + SIZES * (1 + np.arange(5))  # what each client sends of a model that is 1


def test_who_does_not_answer_does_nothing():
    """Others train as they would; nothing is remembered of the rest, not even what labelling remembers.

    The statistics stage sees no image of absent clients; of those who were not drawn it sees what it always does.
    """
    answered, number = [], []

    def statistics(state, data, clients, key):
        return state._replace(server={**state.server, "asked": data.client_size})

    method = toy_method(statistics=statistics)
    round_fn = jax.jit(make_round(problem(4, **{"availability.never": 0.5}), method, lanes=2))
    for seed in range(8):
        state, result = run(round_fn, DRAW, data=federation(seed=seed))
        received = state.server["received"]
        came = np.asarray(received["accepted"])
        np.testing.assert_array_equal(received["uploads"].model.params["classifier"], np.where(came, FULL[DRAW], 0))
        np.testing.assert_array_equal(received["sizes"], np.where(came, SIZES[DRAW], 0))
        absent = np.array(DRAW)[~came]
        np.testing.assert_array_equal(state.server["asked"], np.where(np.isin(np.arange(5), absent), 0, SIZES))
        for name in ("trained", "labelled"):
            np.testing.assert_array_equal(state.clients[name][absent], 100 * absent)
        rows = np.arange(4)[came]
        np.testing.assert_array_equal(
            state.clients["labelled"][np.array(DRAW)[came]], 100 * np.array(DRAW)[came] + 1 + rows
        )
        metrics = result.metrics
        assert metrics["answers"] == metrics["uploads"] == came.sum() and metrics["dropped_uploads"] == 0
        assert metrics["local_steps"] == SIZES[DRAW][came].sum() and result.healthy
        answered.append(tuple(came))
        number.append(came.sum())
    assert len(set(answered)) > 3 and 8 < sum(number) < 24  # of 32


def test_who_is_late_has_nothing_to_do_with_who_answers():
    """Seven in ten answer, and of those one in five is late, whoever they are: within four standard deviations."""
    fields = {"availability.never": 0.3, "availability.late": 0.2, "availability.late_weight": 0.0}
    options, key, clients = problem(4, **fields).config, jax.random.key(0), jnp.arange(2000)
    answers = present_jobs(options, Selection(clients), key)
    received = Received((), answers, clients, None, clients, clients)
    metrics = delivered(options, received, clients, 2000, None, {}, key)[2]
    shares = np.mean(answers), metrics["late_uploads"] / np.sum(answers)
    np.testing.assert_allclose(shares, [0.7, 0.2], atol=4 * np.sqrt(0.7 * 0.3 / 2000))


def test_late_uploads_are_dropped_and_their_clients_remember():
    options = problem(4, **{"availability.late": 0.5, "availability.late_weight": 0.0})
    state, result = run(jax.jit(make_round(options, toy_method(), lanes=2)), DRAW, data=federation(seed=3))
    came = np.asarray(state.server["received"]["accepted"])
    assert 0 < came.sum() < 4 and result.metrics["late_uploads"] == 4 - came.sum()
    assert result.metrics["uploads"] == 4 and LATE not in state.server
    trained = 100 * np.array(DRAW) + SIZES[DRAW] * (10 + np.arange(4))  # the client has trained
    np.testing.assert_array_equal(state.clients["trained"][np.array(DRAW)], trained)


def test_late_uploads_join_the_next_round_with_what_they_changed():
    """Rounds, jitted once: first come the rows that waited, then a round's own. Some of those are not numbers."""
    options = problem(4, **{"availability.late": 0.5, "availability.late_weight": 0.25})
    round_fn = jax.jit(make_round(options, toy_method(), lanes=2))
    shapes = Upload(Model({"classifier": jnp.float32(0)}, ()), {"client": jnp.int32(0), "personal": ()})
    clients, server = first_memory(options.config, shapes, Selection(jnp.array(DRAW)), options.config.num_clients)
    assert clients == {}
    state = toy_state(draw=jnp.array(DRAW, jnp.int32), fails=jnp.zeros(4, bool), **server)
    data, late, was, arrived, superseded = federation(seed=3), np.zeros(4, bool), np.array(DRAW), 0, 0
    draws = [4, 2, 0, 1], [0, 1, 4, 2], [2, 4, 1, 0], [4, 0, 2, 1], [1, 2, 0, 4], [0, 2, 4, 1]
    for number, drawn in enumerate(map(np.array, draws)):
        fails = np.arange(4) < number % 3
        of_round = {"draw": jnp.array(drawn, jnp.int32), "fails": jnp.array(fails)}
        state = state._replace(server={**state.server, **of_round})
        before = float(state.model.params["classifier"])
        state, result = round_fn(state, data, jnp.array(TRUTH))
        received = dict(state.server["received"])
        now = np.asarray(received["accepted"])[4:]
        assert result.metrics["late_uploads"] == np.sum(~now & ~fails)
        changes = FULL[drawn] - 1  # a client adds the same whatever it begins with
        sent = np.asarray(received["uploads"].model.params["classifier"])
        np.testing.assert_array_equal(sent[4:][~fails], (before + changes)[~fails])
        np.testing.assert_array_equal(received["discount"], [0.25] * 4 + [1] * 4)
        # What was late a round ago, but of clients that sent something newer and usable.
        waited, newer = late & ~np.isin(was, drawn[now]), np.asarray(received["sizes"])[:4]
        superseded += np.sum(late & ~waited)
        np.testing.assert_array_equal(received["accepted"][:4], waited)
        np.testing.assert_array_equal(newer, np.where(waited, SIZES[was], 0))
        np.testing.assert_array_equal(sent[:4][waited], before + (FULL[was] - 1)[waited])
        np.testing.assert_array_equal(np.asarray(received["clients"])[:4][waited], was[waited])
        np.testing.assert_array_equal(received["uploads"].metadata["client"][:4][waited], was[waited])
        np.testing.assert_array_equal(np.asarray(received["sizes"])[4:], np.where(now | fails, SIZES[drawn], 0))
        late, was, arrived = ~now & ~fails, drawn, arrived + waited.sum()
        rest = {name: value for name, value in state.server.items() if name != "received"}
        model = Model({"classifier": state.model.params["classifier"] + 7}, {})  # the server moves the model on
        state = State(state.round, model, rest, state.clients)
    assert arrived > 2 and superseded > 2


# --- What is sent, through a round. ----------------------------------------------------------


def with_vector(method):
    """The toy method whose clients also send (1 + client) (1, ..., 5), which did not go down."""

    def finish(received, work, carry, num_steps):
        done = phase.finish(received, work, carry, num_steps)
        params = {**done.upload.model.params, "vector": (1.0 + work["client"]) * jnp.arange(1.0, 6)}
        return done._replace(upload=done.upload._replace(model=Model(params, ())))

    (phase,) = method.phases
    return method._replace(phases=(phase._replace(finish=finish),))


def updates_of(state):
    """What arrived less what went down, by rows: [R, 6]."""
    params = state.server["received"]["uploads"].model.params
    return np.concatenate([np.asarray(params["classifier"])[:, None] - 1, params["vector"]], axis=1)


HONEST = np.concatenate([(FULL - 1)[:, None], (1 + np.arange(5))[:, None] * np.arange(1, 6)], axis=1).astype(float)


def test_attackers_uploads_alone_are_replaced():
    byzantine = np.array([True, False, True, False, False])
    data = federation()._replace(attackers=Attackers(jnp.array(byzantine)))
    options = problem(4, **{"attack.kind": "scaled", "attack.strength": 3.0})
    round_fn = jax.jit(make_round(options, with_vector(toy_method(turns=2)), lanes=2))
    state, result = run(round_fn, DRAW, data=data)
    factors = np.where(byzantine, 3.0, 1.0)[:, None]
    np.testing.assert_allclose(updates_of(state), (factors * HONEST)[DRAW], rtol=1e-6)
    assert result.metrics["byzantine_uploads"] == 2


def test_what_compression_loses_is_remembered_and_sent_later():
    """top_k of 3 numbers of 6, two rounds: against NumPy; a client whose upload is dropped remembers nothing of it."""
    options = problem(4, **{"compression.kind": "top_k", "compression.share": 0.5})
    shapes = Upload(Model({"classifier": jnp.float32(0), "vector": jnp.zeros(5)}, ()), {})
    clients, _ = first_memory(options.config, shapes, Selection(jnp.array(DRAW)), options.config.num_clients)

    def largest(update):
        kept = np.argsort(-np.abs(update), kind="stable")[:3]
        return np.where(np.isin(np.arange(6), kept), update, 0)

    round_fn, lost = jax.jit(make_round(options, with_vector(toy_method(turns=2)), lanes=2)), np.zeros((5, 6))
    memory = {**toy_state().clients, **clients}
    for fails in ([False] * 4, [False, True, False, False]):
        server = {"draw": jnp.array(DRAW, jnp.int32), "fails": jnp.array(fails)}
        state, _ = round_fn(toy_state(**server)._replace(clients=memory), federation(), jnp.array(TRUTH))
        found = updates_of(state)
        for row, client in enumerate(DRAW):
            if not fails[row]:
                wanted = HONEST[client] + lost[client]
                np.testing.assert_allclose(found[row], largest(wanted), rtol=1e-6, err_msg=f"{client}")
                lost[client] = wanted - largest(wanted)
        memory = dict(state.clients)
        left = np.concatenate([np.reshape(leaf, (5, -1)) for leaf in memory[LOST].values()], axis=1)
        np.testing.assert_allclose(left, lost, rtol=1e-6)


def test_the_server_gets_the_clipped_sum_alone(monkeypatch):
    """Hardly any noise: one row, of the uploads that are accepted, over four whatever comes."""
    method = with_vector(toy_method())
    monkeypatch.setattr("fedjax_ssl.engine.round.private_cohort", lambda options: method.select)
    secret = jnp.arange(8, dtype=jnp.uint32).reshape(4, 2)
    data = federation()._replace(secret=secret)
    options = problem(4, **{"privacy.noise": 1e-8, "privacy.cohorts": "fixed"})
    options.config.aggregation.clip_norm = 9.0
    round_fn = jax.jit(make_round(options, method, lanes=2))
    state, result = run(round_fn, DRAW, [False, True, False, False], data=data)
    came = HONEST[[4, 0, 1]]
    lengths = np.linalg.norm(came, axis=1, keepdims=True)
    assert (lengths > 9).any() and (lengths < 9).any()
    np.testing.assert_allclose(updates_of(state), [np.sum(came * np.minimum(1, 9 / lengths), axis=0) / 4], rtol=1e-5)
    assert state.server["received"]["uploads"].metadata == {} and result.healthy
    noise = set()  # alone: of each round and secret its own, whatever the seed is
    for number, more, seed in ((0, 0, 5), (1, 0, 5), (0, 1, 5), (0, 0, 6)):
        state = toy_state(draw=jnp.array(DRAW, jnp.int32), fails=jnp.ones(4, bool))._replace(round=jnp.int32(number))
        own = federation(seed=seed)._replace(secret=secret + jnp.uint32(more))
        state, result = round_fn(state, own, jnp.array(TRUTH))
        assert result.healthy and result.metrics["dropped_uploads"] == 4
        noise.add(updates_of(state).tobytes())
    assert len(noise) == 3


def test_who_answers_in_one_of_its_jobs_is_asked_for_statistics():
    options = problem(4, **{"availability.never": 0.5}).config
    clients, present = jnp.array([4, 4, 2, 2, 0]), jnp.array([True, False, False, True, False])
    result = types.SimpleNamespace(clients=clients, present=present)
    asked = _of_those_who_answer(options, federation(), Selection(clients), result)
    np.testing.assert_array_equal(asked.client_size, np.where(np.arange(5) == 0, 0, SIZES))


@pytest.mark.parametrize("arguments", ["fedmatch", "fedrgd,plain"])
def test_methods_with_a_message_for_each_client_take_late_uploads_only_to_drop_them(arguments):
    config = apply_arguments(make_tiny_config(**{"data.reveal_labels": False}), arguments)
    config.model.normalisation, config.data.labels = "group", "server"
    config.availability.update({"late": 0.5, "late_weight": 0.0})
    build_experiment(config)
    config.availability.late_weight = 0.5
    with pytest.raises(UserError, match=f"availability.late=0.5 is not for {config.method}"):
        build_experiment(config)
