"""A round of a toy method: what reaches whom, what is remembered, scored and counted, by hand on a few numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.client.steps import global_model
from fedjax_ssl.engine.cohort import cohort_of
from fedjax_ssl.engine.interface import (
    Finished,
    Jobs,
    Labels,
    Method,
    Report,
    Selection,
    Upload,
    WireBytes,
    no_op,
    write_records,
)
from fedjax_ssl.engine.round import RoundKeys, _means, before_clients, init_key, make_round, round_keys, uniform
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.wire import bytes_per_client
from tests.helpers.toy_federation import CLIENTS, TRUTH, federation, problem, run, toy_method, toy_phase, toy_state

SIZES = np.array([len(rows) for rows in CLIENTS])


@pytest.fixture(scope="module")
def round_fn():
    """A round of the toy method; jobs with six rows and without groups share its program."""
    return jax.jit(make_round(problem(), toy_method(), lanes=2))


@pytest.mark.parametrize("trains", [True, False])
def test_a_schedule_is_in_the_records(trains):
    """The rate of what trains: the clients', or the server's if they do not; a constant rate is in no record."""
    rates = {"client.learning_rate": 0.2, "server.learning_rate": 0.4}
    scheduled = problem(schedule="cosine", num_rounds=8, drop_rounds=(4,), **rates)
    others = {} if trains else {"phases": ()}
    method = toy_method(broadcast=lambda state, data, key: global_model(scheduled, state), **others)
    state = toy_state(draw=jnp.array([0, 1, 2]))
    for number in (0, 3, 6):
        wanted = (0.2 if trains else 0.4) * (1 + np.cos(np.pi * number / 8)) / 2 * (0.1 if number >= 4 else 1)
        at = state._replace(round=jnp.int32(number)), federation(), round_keys(5, number)
        np.testing.assert_allclose(before_clients(scheduled, method, *at)[2]["learning_rate"], wanted, rtol=1e-5)
        assert before_clients(problem(**rates), method, *at)[2] == {}


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
    np.testing.assert_array_equal(received["uploads"].metadata["client"], [0, 0, 2, 4, 0, 1])
    metrics = result.metrics
    assert (metrics["uploads"], metrics["dropped_uploads"], metrics["local_steps"]) == (5, 1, 11)
    np.testing.assert_allclose(metrics["steps"], (2 + 3 + 2 + 1) / 4)  # mean of the accepted that had a step
    assert result.healthy and metrics["round"] == state.round == 1
    # Without a report nothing is said of pseudo-labels.
    assert not [name for name in metrics if "pseudo_label" in name or "qualified" in name]
    assert metrics["test_accuracy"] == 0.75  # everything is taken for class 1


def test_a_cohort_knows_the_round_and_what_its_clients_remember():
    state = toy_state()._replace(round=jnp.int32(7))
    cohort = cohort_of(state, federation(), jnp.array([4, 2]), None, (), jax.random.key(0))
    np.testing.assert_array_equal(cohort.round, [7, 7])
    np.testing.assert_array_equal(cohort.own["labelled"], [400, 200])


def test_where_every_upload_is_dropped_the_round_is_not_healthy(round_fn):
    for draw, fails, healthy in (([0] * 6, [True] * 6, False), ([3] * 6, [True] * 6, True)):
        assert bool(run(round_fn, draw, fails, group=jnp.arange(6))[1].healthy) == healthy


def test_what_a_client_remembers(round_fn):
    """Labelling is remembered in any case, steps where the upload was accepted; who was not drawn keeps everything."""
    state, _ = run(round_fn, [3, 0, 2, 4, 0, 1], [False, False, True, False, False, False], group=jnp.zeros(6, int))
    # The client that comes twice, 0, is in rows 1 and 4; row r adds 1 + r by labelling, and 10 + r in each step.
    np.testing.assert_array_equal(state.clients["labelled"], [0 + 5, 100 + 6, 200 + 3, 300 + 1, 400 + 4])
    np.testing.assert_array_equal(state.clients["trained"], [0 + 2 * 14, 100 + 15, 200, 300, 400 + 3 * 13])


@pytest.mark.parametrize("stage, metrics, line", [
    ("server_after", {"test_accuracy": jnp.float32(1)}, "'test_accuracy' has the name of another one; rename it"),
    ("server_after", {"bytes_up": jnp.float32(1)}, "'bytes_up' has the name of another one; rename it"),
    ("aggregate", {"mine": [1.0, 2.0]}, "'mine' must be a scalar"),
    ("aggregate", {"steps": jnp.float32(1)}, "'steps' has the name of another one; rename it"),
    ("client", {"mine": jnp.ones(2)}, "'mine' must be a scalar"),
    ("client", {"fact": jnp.float32(1)}, "'fact' has the name of another one; rename it"),
    ("report", {"round": jnp.ones((6, 3))}, "'round' has the name of another one; rename it"),
])  # fmt: skip
def test_a_method_s_metrics_are_scalars_with_names_of_their_own(stage, metrics, line):
    phase, facts = toy_phase(), metrics if stage == "report" else {"fact": jnp.ones((6, 3))}

    def label(*_):
        return Labels(Report(jnp.zeros((6, 3), jnp.int32), jnp.ones((6, 3), bool), facts=facts))

    def finish(*arguments):
        finished = phase.finish(*arguments)
        return finished._replace(metrics={**finished.metrics, **(metrics if stage == "client" else {})})

    stages = {stage: lambda state, *_: (state, metrics)} if stage in Method._fields else {}
    method = toy_method(phases=(phase._replace(finish=finish),), label=label, **stages)
    with pytest.raises(UserError, match=f"the method's metric {line}"):
        run(jax.jit(make_round(problem(), method, lanes=2)), [3, 0, 2, 4, 0, 1], [False] * 6, group=jnp.zeros(6, int))


@pytest.mark.parametrize("stage, entries, line", [
    ("labelling", {"zz": jnp.ones(3)}, "writes a client's memory 'zz', which its first state does not have"),
    ("labelling", {"labelled": jnp.ones(3)}, r"'labelled' is int32\[\] in .*, but it writes float32\[\]"),
    ("labelling", {"trained": jnp.ones((3, 2))}, r"is float32\[\] in .*, but it writes float32\[2\]"),
    ("steps", {"trained": {"a": jnp.ones(())}}, r"is float32\[\] in .*, but it writes \['a'\] float32\[\]"),
    ("steps", {"trained": ()}, r"is float32\[\] in the method's first state, but it writes nothing"),
    ("server", {"last": jnp.ones((3, 2))}, r"the server's record 'last' is float32\[\] in .*writes float32\[2\]"),
])  # fmt: skip
def test_clients_entries_stay_like_those_of_the_first_state(stage, entries, line):
    phase, state = toy_phase(), toy_state(draw=jnp.arange(3), fails=jnp.zeros(3, bool))

    def prepare(*arguments):
        jobs = phase.prepare(*arguments)
        return jobs._replace(own={**jobs.own, **(entries if stage == "labelling" else {})})

    def finish(*arguments):
        finished = phase.finish(*arguments)
        return finished._replace(own={**finished.own, **(entries if stage == "steps" else {})})

    def aggregate(state, data, received, key):
        return write_records(state, data, received, entries if stage == "server" else state.records), {}

    method = toy_method(phases=(phase._replace(prepare=prepare, finish=finish),), aggregate=aggregate)
    state = state._replace(records={"last": jnp.zeros(5)})
    with pytest.raises(UserError, match=line):
        jax.eval_shape(make_round(problem(), method, lanes=2), state, federation(), TRUTH)


@pytest.mark.parametrize("stage, line", [
    ({"phases": toy_phase()}, r"phases must be a tuple, also of a single phase: \(phase,\)"),
    ({"select": lambda state, data, key: jnp.arange(3)}, "select must return a Selection"),
])  # fmt: skip
def test_a_stage_of_another_type_is_refused(stage, line):
    state = toy_state(draw=jnp.arange(3), fails=jnp.zeros(3, bool))
    with pytest.raises(UserError, match=line):
        jax.eval_shape(make_round(problem(), toy_method(**stage), lanes=2), state, federation(), TRUTH)


def personal_method(**others):
    """Each client is told ten times its number, alone."""
    return toy_method(personal=lambda state, data, clients, key: 10.0 * clients, **others)


def test_a_message_to_one_client_reaches_it_alone_and_is_counted():
    wire = WireBytes(down=lambda broadcast, personal: 100 + personal, up=lambda upload: 8.0 + upload.metadata["client"])
    round_fn = jax.jit(make_round(problem(), personal_method(wire_bytes=wire), lanes=2))
    draw = [4, 3, 0, 4]
    state, result = run(round_fn, draw)
    told = np.asarray(state.server["received"]["uploads"].metadata["personal"])
    np.testing.assert_array_equal(told, [40, 0, 0, 40])  # client 3 takes no part
    assert result.metrics["bytes_down"] == sum(100 + 10 * client for client in draw)
    assert result.metrics["bytes_up"] == sum(8 + client for client in (4, 0, 4))
    # Without `wire_bytes` a message is as large as its leaves: model and rate, `extra` of 4 bools, what is personal;
    # model, told client and told message.
    state = toy_state(draw=jnp.array(draw), fails=jnp.zeros(4, bool))
    traffic = bytes_per_client(problem(), personal_method(), state, federation())
    assert (traffic.jobs, traffic.down, traffic.up) == (4, 4 + 4 + 4 + 4, 4 + 4 + 4)
    traffic = bytes_per_client(problem(), toy_method(), state, federation())
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
        seen["clients"] = received.uploads.metadata["key"][0]
        return state, {}

    phase = quiet.phases[0]._replace(prepare=prepare, start=lambda *a: (), step=lambda *a: (), finish=finish)
    stages = {
        "select": lambda state, data, key: Selection(jnp.array([1])),
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
    before = jax.random.split(init_key(5))  # as the first training splits it
    assert not np.isin(jax.random.key_data(before), found[0]["select"]).all(axis=1).any()


def test_stages_follow_one_another():
    """Each changes the model's number, by a hundred more if the round were counted by then; the last one is tested."""

    def stage(change):
        def changed(state, *_):
            number = change(state.model.params["classifier"]) + 100 * state.round
            return state._replace(model=Model({"classifier": number}, {}))

        return changed

    def aggregate(state, data, received, key):
        return stage(lambda number: received.uploads.model.params["classifier"][0])(state), {}

    method = toy_method(
        server_before=lambda *given: (stage(lambda number: number + 6)(*given), {}),
        aggregate=aggregate,
        server_after=lambda *given: (stage(lambda number: 3 * number)(*given), {}),
        statistics=stage(lambda number: 5 - number),
    )
    state, result = run(jax.jit(make_round(problem(), method, lanes=1)), [4])
    assert state.model.params["classifier"] == 5 - 3 * (1 + 6 + 3 * 5)  # client 4 adds 5 in each of 3 steps
    assert result.metrics["test_accuracy"] == 0.25  # everything is taken for class 0


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


def test_clients_without_a_label_are_counted_in_each_round(round_fn):
    """Clients 2 and 4 have a label, 0 and 3 none. Where the server has images, nobody is counted."""
    data, group = federation(visible={0: 0, 6: 0}), jnp.arange(6)
    for clients, number in (([2, 4, 0, 2, 4, 4], 1), ([3, 0, 2, 4, 4, 4], 2)):
        assert run(round_fn, clients, data=data, group=group)[1].metrics["clients_without_labels"] == number
    with_anchors = data._replace(server_index=jnp.array([5]))
    of_anchors = jax.eval_shape(lambda data: run(round_fn, clients, data=data, group=group)[1].metrics, with_anchors)
    assert "clients_without_labels" not in of_anchors


def test_the_rule_in_use_is_scored_whatever_its_name():
    """JAX sorts the keys of a dict on their way through the engine. Neither labelled examples nor padding are scored,
    nor is a client that is absent: 0.
    """
    given = {0: 0, 6: 0}  # visible: one of client 2's, one of client 4's

    def label(received, data, cohort, previous):
        right = jnp.array(TRUTH)[data.client_index[cohort.clients]] ^ (cohort.clients == 0)[:, None]  # of 0 wrong
        return Labels(Report(right, jnp.ones(right.shape, bool), {"global": 1 - right, "local": right}))

    def select(state, data, key):
        return Selection(state.server["draw"], present=state.server["draw"] != 0)

    method = toy_method(label=label, select=select)
    data = federation(visible=given)
    state, result = run(jax.jit(make_round(problem(), method, lanes=2)), [2, 4, 0, 3], data=data)
    metrics = result.metrics
    assert metrics["pseudo_label_accuracy"] == metrics["pseudo_label_accuracy_local"] == 1
    assert metrics["pseudo_label_accuracy_global"] == 0
    assert metrics["qualified_accuracy"] == 1 and metrics["qualified_share"] == 1
    np.testing.assert_allclose(metrics["qualified_per_client"], 4 / 3)  # 3 + 3 images, a label each, three clients
    np.testing.assert_array_equal(state.server["received"]["num_qualified"], [3] * 4)  # as the report says


def test_two_phases_may_not_report_one_metric_under_the_same_name():
    everybody = jnp.ones(2, bool)
    first, second = ({"loss": jnp.ones(2)}, everybody), ({"other": jnp.zeros(2)}, everybody)
    assert _means((first, second), everybody) == {"loss": 1.0, "other": 0.0}
    with pytest.raises(UserError, match="the method's metric 'loss' has the name of another one"):
        _means((first, second, first), everybody)
