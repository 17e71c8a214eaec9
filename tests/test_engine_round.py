"""A round of a toy method: what reaches whom, what is remembered, scored and counted, by hand on a few numbers."""

import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data import stack_seeds
from fedjax_ssl.engine.evaluation import score_pseudo_labels
from fedjax_ssl.engine.interface import Draw, Finished, Jobs, Report, Upload, WireBytes, no_op
from fedjax_ssl.engine.round import (
    RoundKeys,
    _means,
    make_dispatch,
    make_round,
    num_jobs,
    over_seeds,
    too_long,
    uniform,
)
from fedjax_ssl.learning.sgd import Model
from fedjax_ssl.run.wire import bytes_per_client
from toy_federation import (
    CLIENTS,
    DRAWS,
    TRUTH,
    TURNS,
    federation,
    memories,
    problem,
    run,
    toy_method,
    toy_phase,
    toy_state,
)

SIZES = np.array([len(rows) for rows in CLIENTS])


@pytest.fixture(scope="module")
def round_fn():
    """A round of the toy method; jobs with six rows and without groups share its program."""
    return jax.jit(make_round(problem(), toy_method(), lanes=2))


def test_received_says_whose_row_is_whose(round_fn):
    """Rows follow the draw of the method's own `select`; what is told arrives; who sends no number is not accepted."""
    draw = [3, 0, 2, 4, 0, 1]
    state, result = run(round_fn, draw, [False, False, True, False, False, False], group=jnp.arange(6) % 2)
    received = state.server["received"]
    np.testing.assert_array_equal(received["clients"], draw)
    np.testing.assert_array_equal(received["group"], np.arange(6) % 2)
    np.testing.assert_array_equal(received["sizes"], SIZES[draw])
    np.testing.assert_array_equal(received["num_qualified"], SIZES[draw])  # without a report
    np.testing.assert_array_equal(received["accepted"], [False, True, False, True, True, True])  # 3 has no step
    expected = np.where(SIZES[draw] > 0, 1 + SIZES[draw] * (1 + np.array(draw)), 0.0)
    expected[2] = np.nan
    np.testing.assert_array_equal(received["uploads"].model.params["classifier"], expected)
    np.testing.assert_array_equal(received["uploads"].told["client"], [0, 0, 2, 4, 0, 1])
    metrics = result.metrics
    assert (metrics["uploads"], metrics["dropped_uploads"], metrics["local_steps"]) == (5, 1, 11)
    np.testing.assert_allclose(metrics["steps"], (2 + 3 + 2 + 1) / 4)  # mean of the accepted that had a step
    assert result.healthy and metrics["round"] == state.round == 1
    # Without a report nothing is said of pseudo-labels.
    assert not [name for name in metrics if "pseudo_label" in name or "qualified" in name]
    assert metrics["test_accuracy"] == 0.75  # everything is taken for class 1


def test_where_every_upload_is_dropped_the_round_is_not_healthy(round_fn):
    for draw, fails, healthy in (([0] * 6, [True] * 6, False), ([3] * 6, [True] * 6, True)):
        assert bool(run(round_fn, draw, fails, group=jnp.arange(6))[1].healthy) == healthy


def long_by_hand(sent, received, counted, times):
    """Whether each row's change is longer than so many lower medians; float64, a part after the other."""
    found = np.zeros(len(counted), bool)
    for part in range(2):
        lengths = np.sqrt(
            sum(np.square(sent[part][name] - received[part].get(name, 0)).reshape(len(counted), -1).sum(axis=1)
                for name in sent[part])
        )  # fmt: skip
        among = sorted(lengths[counted & (lengths > 0)])
        if among:
            found |= lengths > times * among[(len(among) - 1) // 2]
    return found


@pytest.mark.parametrize("factor, part", [(1, 0), (100, 0), (3e4, 0), (1e30, 0), (3e4, 1), (0, 0)])
def test_an_upload_that_is_far_longer_than_the_others(factor, part):
    """Against NumPy: by parameters, by statistics, with rows that are not counted, and with an entry of its own."""
    rng = np.random.default_rng(int(factor) % 97)
    received = {"w": rng.normal(size=(3, 2)), "b": rng.normal(size=2)}, {"mean": rng.normal(size=3)}
    sent = tuple(
        {name: leaf + rng.normal(size=(6, *leaf.shape)) for name, leaf in entries.items()} for entries in received
    )
    sent[0]["own"] = rng.normal(size=(6, 4))
    counted = np.array([True, True, False, True, True, True])
    for leaf in sent[part].values():
        leaf[2] *= 1e6  # took no part, or is not finite
        leaf[4] *= factor
    assert not factor or long_by_hand(sent, received, counted, 1000)[4] == (factor > 1000)
    as_model = lambda parts: Model(*jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), parts))  # noqa: E731
    found = too_long(as_model(sent), as_model(received), jnp.asarray(counted), 1000.0)
    np.testing.assert_array_equal(found & counted, long_by_hand(sent, received, counted, 1000) & counted)


@pytest.mark.parametrize("lengths, dropped", [
    ([1.0], []), ([1e30], []), ([1.0, 1e30], [1]), ([1e30, 1.0], [0]), ([0.0, 0.0, 5.0], []), ([0.0, 1.0, 1e30], [2]),
    ([1.0, 1.0, 1e30, 1e30], [2, 3]), ([3e38, 3e38, 1.0], []), ([0.0, 0.0], []),
])  # fmt: skip
def test_the_median_is_the_lower_one_of_those_that_moved(lengths, dropped):
    sent = Model({"w": jnp.asarray(lengths, jnp.float32)[:, None]}, {})
    found = too_long(sent, Model({"w": jnp.zeros(1)}, {}), jnp.ones(len(lengths), bool), 1000.0)
    assert np.flatnonzero(found).tolist() == dropped


def test_one_that_is_too_long_is_dropped_counted_and_not_remembered():
    """As one that is not finite; with `longest_update` 0 it is taken."""
    phase = toy_phase()

    def finish(received, work, carry, num_steps):
        finished = phase.finish(received, work, carry, num_steps)
        huge = jax.tree.map(lambda leaf: jnp.where(work["client"] == 4, 1e30, leaf), finished.upload.model)
        return finished._replace(upload=finished.upload._replace(model=huge))

    method, draw = toy_method(phases=(phase._replace(finish=finish),)), [0, 1, 4]
    for times, dropped in ((1000.0, 1), (0.0, 0)):
        toy = problem()
        toy.config.aggregation.longest_update = times
        state, result = run(jax.jit(make_round(toy, method, lanes=2)), draw, [False] * 3)
        assert (result.metrics["uploads"], result.metrics["dropped_uploads"]) == (3, dropped)
        assert result.healthy and state.server["received"]["accepted"].tolist() == [True, True, not dropped]
        assert (state.clients["trained"][4] == 400) == bool(dropped)


def test_what_a_client_remembers(round_fn):
    """Labelling is remembered in any case, steps where the upload was accepted; who was not drawn keeps everything."""
    state, _ = run(round_fn, [3, 0, 2, 4, 0, 1], [False, False, True, False, False, False], group=jnp.zeros(6, int))
    # The client that comes twice, 0, is in rows 1 and 4; row r adds 1 + r by labelling, and 10 + r in each step.
    np.testing.assert_array_equal(state.clients["labelled"], [0 + 5, 100 + 6, 200 + 3, 300 + 1, 400 + 4])
    np.testing.assert_array_equal(state.clients["trained"], [0 + 2 * 14, 100 + 15, 200, 300, 400 + 3 * 13])


def memories_by_hand(turns):
    """Of a client's rows in a turn the last one counts, and for what its steps changed the last accepted one.

    Each turn starts with the memory that the one before left.
    """
    found = []
    for draw, fails in DRAWS:
        labelled, trained = (100 * np.arange(5) for _ in range(2))
        for turn in np.split(np.arange(len(draw)), turns):
            old_labelled, old_trained = labelled.copy(), trained.copy()
            for row, number in enumerate(turn):
                client = draw[number]
                labelled[client] = old_labelled[client] + 1 + row
                if SIZES[client] and not fails[number]:
                    trained[client] = old_trained[client] + SIZES[client] * (10 + row)
        found.append({"trained": trained.tolist(), "labelled": labelled.tolist()})
    return found


def test_the_last_accepted_row_of_a_client_counts():
    """On one device, and on four between which the rows are dealt out, longest first; in one turn and in several."""
    expected = [memories_by_hand(turns) for turns in (1, *TURNS)]
    assert len({str(one["trained"]) for one in expected[0]}) == 3  # three rows, in turn the last accepted
    for turns, by_hand in zip((1, *TURNS), expected):
        assert memories(jax.jit(make_round(problem(), toy_method(turns), lanes=2))) == by_hand
    tests = pathlib.Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    command = [sys.executable, str(tests / "toy_federation.py"), "4"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_all_turns_start_from_one_broadcast_and_arrive_together():
    """Jitted, as a plain loop, and for two seeds in one program; rows are in the order of the draw."""
    draw, fails = [4, 2, 0, 4, 1, 4], [False, False, True, False, False, True]
    round_fn = make_round(problem(), toy_method(turns=2), lanes=2)
    state, result = run(jax.jit(round_fn), draw, fails)
    received = state.server["received"]
    np.testing.assert_array_equal(received["clients"], draw)
    np.testing.assert_array_equal(received["group"], [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(received["accepted"], np.logical_not(fails))
    sent = np.where(fails, np.nan, 1 + SIZES[draw] * (1 + np.array(draw)))
    np.testing.assert_array_equal(received["uploads"].model.params["classifier"], sent)
    assert (result.metrics["uploads"], result.metrics["dropped_uploads"]) == (6, 2)
    assert result.metrics["local_steps"] == SIZES[draw].sum()
    # Two lanes: 3, 3 and then 2 steps in the first turn, 3, 3 and then 1 in the second.
    assert result.lane_steps == 2 * (3 + 2) + 2 * (3 + 1)

    plain, of_plain = run(make_round(problem(), toy_method(turns=2), lanes=1, debug=True), draw, fails)
    jax.tree.map(np.testing.assert_array_equal, plain, state)
    jax.tree.map(np.testing.assert_array_equal, of_plain._replace(lane_steps=0), result._replace(lane_steps=0))

    one = toy_state(draw=jnp.array(draw), fails=jnp.array(fails))
    other = one._replace(model=Model({"classifier": jnp.float32(7)}, {}))
    data = [federation(), federation(seed=6)]
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, other)
    together, _ = jax.jit(over_seeds(round_fn))(both, stack_seeds(data), jnp.array(TRUTH))
    alone = [jax.jit(round_fn)(state, of_seed, jnp.array(TRUTH))[0] for state, of_seed in zip((one, other), data)]
    jax.tree.map(np.testing.assert_array_equal, together, jax.tree.map(lambda *leaves: np.stack(leaves), *alone))


def test_a_client_draws_anew_in_each_turn():
    """Its keys are of the turn, which is the group; groups of the method's own stay."""

    def prepare(received, data, cohort, previous):
        keys = jax.vmap(jax.random.key_data)(cohort.keys())
        return Jobs(jnp.zeros(len(keys), int), keys, takes_part=jnp.ones(len(keys), bool))

    def finish(received, work, carry, num_steps):
        return Finished(Upload(received.model, {"key": work}), {}, {})

    phase = toy_phase()._replace(prepare=prepare, start=lambda *a: (), step=lambda *a: (), finish=finish)
    round_fn = jax.jit(make_round(problem(), toy_method(turns=2, phases=(phase,)), lanes=2))
    of_turns = run(round_fn, [4, 2, 4, 2])[0].server["received"]
    assert len({tuple(key.tolist()) for key in of_turns["uploads"].told["key"]}) == 4
    of_groups = run(round_fn, [4, 2, 4, 2], group=jnp.array([3, 5, 3, 3]))[0].server["received"]
    first, second, third, fourth = (tuple(key.tolist()) for key in of_groups["uploads"].told["key"])
    assert first == third != second != fourth
    np.testing.assert_array_equal(of_groups["group"], [3, 5, 3, 3])


def test_turns_are_of_equal_size():
    with pytest.raises(ValueError, match="2 turns must be of equal size, but the draw has 3 rows"):
        run(make_round(problem(), toy_method(turns=2), lanes=1), [0, 1, 2])


def personal_method(**others):
    """Each client is told ten times its number, alone."""
    return toy_method(personal=lambda state, data, clients, key: 10.0 * clients, **others)


def test_a_message_to_one_client_reaches_it_alone_and_is_counted():
    wire = WireBytes(
        down=lambda broadcast, personal: 100 + personal,
        up=lambda upload: 8.0 + upload.told["client"],
    )
    round_fn = jax.jit(make_round(problem(), personal_method(wire_bytes=wire), lanes=2))
    draw = [4, 3, 0, 4]
    state, result = run(round_fn, draw)
    told = np.asarray(state.server["received"]["uploads"].told["personal"])
    np.testing.assert_array_equal(told, [40, 0, 0, 40])  # client 3 takes no part
    assert result.metrics["bytes_down"] == sum(100 + 10 * client for client in draw)
    assert result.metrics["bytes_up"] == sum(8 + client for client in (4, 0, 4))
    # Without `wire_bytes` a message is as large as its leaves: model and rate, `extra` of 4 bools, what is personal;
    # model, told client and told message.
    state = toy_state(draw=jnp.array(draw), fails=jnp.zeros(4, bool))
    config = types.SimpleNamespace(clients_per_round=3, model=types.SimpleNamespace(statistics="server"), num_clients=5)
    toy_problem = problem()._replace(config=config)
    traffic = bytes_per_client(toy_problem, personal_method(), state, federation())
    assert (traffic.jobs, traffic.down, traffic.up) == (4, 4 + 4 + 4 + 4, 4 + 4 + 4)
    traffic = bytes_per_client(toy_problem, toy_method(), state, federation())
    assert (traffic.down, traffic.up) == (4 + 4 + 4, 4 + 4)


def test_without_a_select_clients_are_drawn_uniformly_without_replacement():
    data, draw = federation(), jax.jit(uniform(3))
    draws = [draw(None, data, jax.random.key(seed)) for seed in range(20)]
    assert all(one.group is None and len(set(one.clients.tolist())) == 3 for one in draws)
    assert set(np.concatenate([one.clients for one in draws]).tolist()) == set(range(5))


def test_every_stage_has_a_key_of_its_own():
    """Eight of them, other ones in every round and for every seed."""
    seen, quiet = {}, toy_method()

    def stage(name, result):
        def call(*arguments):
            seen[name] = jax.random.key_data(arguments[-1])
            return result(*arguments)

        return call

    def prepare(received, data, cohort, previous):
        return Jobs(jnp.zeros(1, int), jax.random.key_data(cohort.key)[None], takes_part=jnp.ones(1, bool))

    def finish(received, work, carry, num_steps):
        return Finished(Upload(received.model, {"key": work}), {}, {})

    def aggregate(state, data, received, key):
        seen["clients"] = received.uploads.told["key"][0]
        return state, {}

    phase = quiet.phases[0]._replace(prepare=prepare, start=lambda *a: (), step=lambda *a: (), finish=finish)
    stages = {
        "select": lambda state, data, key: Draw(jnp.array([1])),
        "server_before": no_op,
        "broadcast": quiet.broadcast,
        "personal": lambda state, data, clients, key: clients,
        "aggregate": aggregate,
        "server_after": no_op,
        "statistics": quiet.statistics,
    }
    method = quiet._replace(phases=(phase,), **{name: stage(name, result) for name, result in stages.items()})
    round_fn = make_round(problem(), method, lanes=1)

    @jax.jit
    def keys_of(number, seed):
        state = toy_state(draw=jnp.array([1]), fails=jnp.zeros(1, bool))._replace(round=number)
        round_fn(state, federation()._replace(seed=seed), jnp.array(TRUTH))
        return dict(seen)

    found = [keys_of(number, seed) for number, seed in ((0, 5), (1, 5), (0, 6))]
    assert all(set(keys) == set(RoundKeys._fields) for keys in found)
    assert len({tuple(key.tolist()) for keys in found for key in keys.values()}) == 3 * 8


def test_metrics_of_all_phases_arrive():
    """The mean of each over the accepted uploads with a step in that phase."""
    first = toy_phase()

    def prepare(*arguments):
        jobs = first.prepare(*arguments)
        clients = arguments[2].clients
        return jobs._replace(num_steps=jnp.where(clients == 0, 0, 4), takes_part=clients >= 0)

    def finish(*arguments):
        finished = first.finish(*arguments)
        return finished._replace(metrics={"later": finished.metrics["steps"] + 0.5})

    method = toy_method(phases=(first, first._replace(prepare=prepare, finish=finish)))
    metrics = run(jax.jit(make_round(problem(), method, lanes=2)), [3, 0, 2], [False, False, False])[1].metrics
    assert metrics["steps"] == (2 + 3) / 2 and metrics["later"] == 4.5
    assert metrics["uploads"] == 3 and metrics["local_steps"] == 5 + 8


def test_clients_without_a_label_are_counted_in_each_round():
    """Clients 2 and 4 have a label, 0 and 3 none."""
    data = federation(visible={0: 0, 6: 0})
    round_fn = jax.jit(make_round(problem(), toy_method(), lanes=2))
    found = [
        run(round_fn, clients, data=data)[1].metrics["clients_without_labels"] for clients in ([2, 4, 0], [3, 0, 2])
    ]
    assert [int(number) for number in found] == [1, 2]
    with_anchors = data._replace(anchor_index=jnp.array([5]))
    assert "clients_without_labels" not in run(round_fn, [2, 4, 0], data=with_anchors)[1].metrics


def test_images_without_a_label_of_any_kind_are_not_scored():
    """Of four unlabelled images two have got a label, and one of these is right."""
    made = jnp.array([[True, True, False, False, True]])
    report = Report(jnp.array([[0, 1, 2, 2, 0]]), jnp.array([[True, False, False, False, True]]), made=made)
    truth, unlabelled = jnp.array([[0, 2, 2, 2, 1]]), jnp.array([[True] * 4 + [False]])
    scored = score_pseudo_labels(report, truth, unlabelled, 1)
    assert (scored["pseudo_label_accuracy"], scored["qualified_share"]) == (0.5, 0.5)
    assert scored["qualified_per_client"] == scored["qualified_accuracy"] == 1
    assert score_pseudo_labels(report._replace(made=None), truth, unlabelled, 1)["pseudo_label_accuracy"] == 0.75


def test_the_rule_in_use_is_scored_whatever_its_name():
    """JAX sorts the keys of a dict on their way through the engine; labelled examples and padding are not scored."""
    given = {0: 0, 6: 0}  # visible: one of client 2's, one of client 4's

    def prepare(received, data, cohort, previous):
        right = jnp.array(TRUTH)[data.client_index[cohort.clients]]
        report = Report(right, jnp.ones(right.shape, bool), {"global": 1 - right, "local": right})
        return toy_phase().prepare(received, data, cohort, previous)._replace(report=report)

    method = toy_method(phases=(toy_phase()._replace(prepare=prepare),))
    data = federation(visible=given)
    state, result = run(jax.jit(make_round(problem(), method, lanes=2)), [2, 4, 3], data=data)
    metrics = result.metrics
    assert metrics["pseudo_label_accuracy"] == metrics["pseudo_label_accuracy_local"] == 1
    assert metrics["pseudo_label_accuracy_global"] == 0
    assert metrics["qualified_accuracy"] == 1 and metrics["qualified_share"] == 1
    np.testing.assert_allclose(metrics["qualified_per_client"], 4 / 3)  # 3 + 3 images, a label each, three clients
    np.testing.assert_array_equal(state.server["received"]["num_qualified"], [3, 3, 3])  # as the report says


def test_scores_by_hand():
    labels = jnp.array([[0, 1, 2], [2, 2, 0]])
    facts = {"score_gap": jnp.array([[0.5, 0.1, jnp.inf], [7.0, 0.3, 0.2]])}  # no second class has a score: no gap
    report = Report(labels, jnp.array([[True, True, False], [True, False, True]]), {"other": 2 - labels}, facts)
    truth = jnp.array([[0, 2, 2], [2, 1, 0]])
    unlabelled = jnp.array([[True, True, True], [False, True, True]])
    found = score_pseudo_labels(report, truth, unlabelled, num_jobs=2)
    expected = {
        "pseudo_label_accuracy": 3 / 5,
        "pseudo_label_accuracy_other": 0 / 5,
        "qualified_accuracy": 2 / 3,
        "qualified_per_client": 3 / 2,
        "qualified_share": 3 / 5,
        "score_gap": (0.5 + 0.1 + 0.3 + 0.2) / 4,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)
    nothing = score_pseudo_labels(report, truth, jnp.zeros((2, 3), bool), num_jobs=2)
    assert nothing["qualified_share"] == 0 and np.isnan(nothing["qualified_accuracy"])


def test_a_dispatch_ends_early():
    """After the rounds that were asked for, at an unhealthy one, or where the method says so."""
    counted = toy_method(
        aggregate=lambda state, data, received, key: (
            state._replace(model=Model({"classifier": state.model.params["classifier"] + 1}, {})), {}
        ),
        broadcast=lambda state, data, key: toy_method().broadcast(
            state._replace(server={"fails": jnp.full(2, state.round == state.server["fails_in"])}), data, key
        ),
    )  # fmt: skip
    over = lambda state: state.round >= state.server["over"]  # noqa: E731
    dispatch = jax.jit(make_dispatch(make_round(problem(), counted, lanes=2), capacity=6, converged=over))
    for num_rounds, fails_in, over_at, done, healthy in (
        (4, 9, 9, 4, True),
        (6, 2, 9, 3, False),
        (6, 9, 2, 2, True),
        (0, 9, 9, 0, True),
    ):
        server = {"draw": jnp.array([0, 4]), "fails_in": jnp.int32(fails_in), "over": jnp.int32(over_at)}
        found = dispatch(toy_state(**server), federation(), jnp.array(TRUTH), num_rounds)
        assert (found.rounds_done, found.state.round, bool(found.healthy)) == (done, done, healthy)
        np.testing.assert_array_equal(found.results.metrics["round"], [*range(1, done + 1)] + [0] * (6 - done))


def test_two_phases_may_not_report_one_metric_under_the_same_name():
    everybody = jnp.ones(2, bool)
    first, second = ({"loss": jnp.ones(2)}, everybody), ({"other": jnp.zeros(2)}, everybody)
    assert _means((first, second), everybody) == {"loss": 1.0, "other": 0.0}
    with pytest.raises(ValueError, match="two phases report the metric 'loss'"):
        _means((first, second, first), everybody)


def test_the_number_of_jobs_is_that_of_the_draw():
    state = toy_state(draw=jnp.array([4, 3, 0, 4]), fails=jnp.zeros(4, bool))
    assert num_jobs(problem(), toy_method(), state, federation()) == 4
    assert num_jobs(problem(), toy_method(turns=2), state, federation()) == 2  # side by side
    config = types.SimpleNamespace(clients_per_round=3)
    uniformly = toy_method()._replace(select=None)
    assert num_jobs(problem()._replace(config=config), uniformly, state, federation()) == 3
