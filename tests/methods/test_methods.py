"""What every method of the registry must do: train, the same way each time, blind to hidden labels, by honest bytes.

The methods, their settings and the fields for a tiny run come from the registry: a new method changes nothing here.
"""

import contextlib
import pathlib
from typing import Any, NamedTuple
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.client import LABELLED, Confidence
from fedjax_ssl.engine import CLASSIFIER, Received, Upload
from fedjax_ssl.engine.round import make_round, select_of
from fedjax_ssl.engine.untrusted.updates import leaves_by_path, moved_by
from fedjax_ssl.flower.supported import check_supported
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fedopenmatch import ONE_VS_ALL
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.dependence import Trace, reads_each
from fedjax_ssl.run.wire import bytes_per_client
from tests.helpers.small_problem import CLASSES, SmallNetwork, federation, phases_of, prepare, sent_down, small_problem
from tests.helpers.small_problem import train as train_client
from tests.helpers.tiny_methods import build, compiled, make_config
from tests.official.harness import check_contract, make_problem
from tests.official.harness import federation as federation_of
from tests.official.harness import train as train_rounds

SCORED = ("[1].metrics['pseudo_label_accuracy", "[1].metrics['qualified_accuracy")
# Traced with labels divided by their mean. The other methods that know this are trained so by hand: test_debias.py,
# test_by_role.py, test_cbafed.py, tests/official/twin_sight.py.
DEBIASED = ("proxyfl", "sage", "fl2", "semifl", "uda", "fedlabel", "fedmatch", "fedtrinet")
OFFICIAL = pathlib.Path(__file__).parents[1] / "official"
# Which clients have labels is data, of which no trace depends: one setting with labels at the server, one without.
OTHER_SETTINGS = [
    (name, next(labels for labels in entry.settings if (labels == "server") != (entry.settings[0] == "server")))
    for name, entry in METHODS.items()
    if "server" in entry.settings and len(entry.settings) > 1
]


def check_flower(name, experiment):
    """A real federation can run it, or says in one line why not."""
    reason = METHODS[name].not_with_flower
    with pytest.raises(UserError, match=reason) if reason else contextlib.nullcontext():
        check_supported(experiment)


class Message(NamedTuple):
    """What was sent, as the round sends it: shapes and types, noted when it is traced.

    Attributes:
        down: to each client of the cohort.
        personal: leaves [M, ...], to one client each.
        up: leaves [R, ...], a row for each client.
    """

    down: Any = ()
    personal: Any = ()
    up: Any = ()


class Traced(NamedTuple):
    """A method's round, traced but not compiled.

    Attributes:
        name: the method's.
        experiment: its parts.
        round: the trace of `round_fn(state, data, hidden_labels)`.
        leaves: the paths of the leaves that it returns.
        state: shapes and types of the state that it returns.
        sent: the messages of the round.
        jobs: clients of the round.
        rewritten: the stages of the server that returned another memory of clients than they got.
        steps: of each phase the arguments of a step but its key: zeros.
    """

    name: str
    experiment: Any
    round: Trace
    leaves: list
    state: Any
    sent: Message
    jobs: int
    rewritten: list
    steps: dict


@pytest.fixture(scope="module", params=sorted(METHODS))
def traced(request):
    config, sent, steps, rewritten = make_config(request.param), {"jobs": 0}, {}, []
    if request.param == "supervised":
        config.client.labelled_views = "both"
    if request.param in DEBIASED:
        config.confidence.debias = "app_u"
    experiment = build(config)
    method = experiment.method

    def noted(name, function):
        def stage(*arguments):
            sent[name] = function(*arguments)
            return sent[name]

        return stage

    def of_server(name, function):
        def stage(state, *arguments):
            if name == "aggregate":
                sent.update(up=arguments[1].uploads, jobs=len(arguments[1].clients))
            result = function(state, *arguments)
            after = result if name == "statistics" else result[0]
            same = [a is b for a, b in zip(jax.tree.leaves(state.clients), jax.tree.leaves(after.clients), strict=True)]
            rewritten.extend([] if all(same) else [name])
            return result

        return stage

    def noted_step(number, phase):
        def step(*arguments):
            steps[number] = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), arguments[:-1])
            return phase.step(*arguments)

        return phase._replace(step=step)

    stages = ("server_before", "aggregate", "server_after", "statistics")
    spied = method._replace(
        broadcast=noted("down", method.broadcast),
        personal=method.personal and noted("personal", method.personal),
        phases=tuple(noted_step(number, phase) for number, phase in enumerate(method.phases)),
        **{name: of_server(name, getattr(method, name)) for name in stages},
    )
    round_fn = make_round(experiment.problem, spied, lanes=1)
    arguments = experiment.state_shape, experiment.data, experiment.hidden_labels
    jaxpr, (state, result) = jax.make_jaxpr(round_fn, return_shape=True)(*arguments)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(arguments)]
    leaves = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path((state, result))]
    jobs = sent.pop("jobs")
    sent = Message(**jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), sent))
    round_trace = Trace(jaxpr.jaxpr, paths)
    return Traced(request.param, experiment, round_trace, leaves, state, sent, jobs, rewritten, steps)


# --- What a round must do: of a compiled one see tests/helpers/contract.py. -------------------------------------------


@pytest.mark.parametrize("name", [name for name in METHODS if not (OFFICIAL / f"{name}.py").exists()])
def test_rounds_keep_the_contract(name):
    """Methods with a comparison in tests/official keep it there, in the same rounds."""
    problem = make_problem(name, **{"data.labelled_clients": 1, "client.epochs": 1, "client.persistent": True})
    check_contract(train_rounds(problem, federation_of([[0, 1, 2, 0, 1], [-1] * 4, [-1] * 7]), rounds=2).compiled)


def _of_profile(name, config):
    """The experiment in which each client has another share of labels."""
    config = make_config(name, "profile")
    config.data.update({"label_profile": (0, 1, 0.5, 0, 0.1, 1, 0, 0.02), "server_labels": 0})
    return build(config)


def test_a_round_keeps_the_shape_of_the_state_and_has_no_other_effect(traced):
    chex.assert_trees_all_equal_shapes_and_dtypes(traced.state, traced.experiment.state_shape)
    assert not traced.round.jaxpr.effects


def test_hidden_labels_reach_no_state(traced):
    """What the trace of a round says. What is wrong about a label shows in no model, and in no other metric."""
    sources = dict(zip(traced.leaves, reads_each(traced.round), strict=True))
    blind = {path for path, read in sources.items() if not any(source.startswith("[2]") for source in read)}
    assert all(path in blind for path in sources if path.startswith("[0]"))
    scored = {path for path in sources if path.startswith(SCORED)}
    assert sources.keys() - blind == scored
    experiment = traced.experiment
    visible = np.asarray(experiment.data.visible_labels) >= 0
    if experiment.problem.config.data.reveal_labels:  # the labels are given to it, and only then
        assert np.all(visible)
    else:
        partition = experiment.partition
        np.testing.assert_array_equal(
            np.flatnonzero(visible), np.sort(np.concatenate([partition.server_index, partition.labelled_rows]))
        )


def test_which_clients_have_labels_and_how_many_is_data(traced):
    """The arrays of such a federation have the shapes of the method's first setting."""
    settings = METHODS[traced.name].settings
    if "profile" in settings and settings[0] != "server":
        data = _of_profile(traced.name, traced.experiment.problem.config).data
        chex.assert_trees_all_equal_shapes_and_dtypes(data, traced.experiment.data)


def test_bytes_are_those_of_the_messages(traced):
    """What the round itself sent, leaf by leaf; and who has which head is what the registry says."""
    entry, experiment = METHODS[traced.name], traced.experiment
    heads = entry.heads_of(experiment.problem.config)
    assert set(traced.state.model.params) == {*CLASSIFIER, *heads, *entry.companions}
    traffic = bytes_per_client(experiment.problem, experiment.method, experiment.state_shape, experiment.data)
    if not experiment.method.phases:
        assert (traffic.jobs, traffic.down, traffic.up) == (0, 0, 0)
        return
    count = lambda tree: sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    assert traffic.jobs == traced.jobs
    assert traffic.down == count(traced.sent.down) + count(traced.sent.personal) / traced.jobs
    assert traffic.up == count(traced.sent.up) / traced.jobs
    assert traffic.down >= count(traced.state.model) + 4  # the whole model and the learning rate at least


def test_a_late_upload_counts_by_its_factor(traced):
    """Each upload moves a number of its own: how far the result follows it is how much it counts. Half are late."""
    problem = traced.experiment.problem
    config = problem.config.copy_and_resolve_references()
    config.availability.update({"late": 0.5, "late_weight": 0.25})
    config.aggregation.optimizer = "fedavg"  # the mean itself
    problem = problem._replace(config=config)
    try:
        method = METHODS[traced.name].factory(problem)
    except UserError as error:
        assert "availability.late_weight must be 0" in str(error)
        return
    if not phases_of(method) or method.personal is not None:  # the latter are refused when the run is built
        return
    data, key, sent, rng = traced.experiment.data, jax.random.key(0), traced.sent.up, np.random.default_rng(0)
    number = traced.jobs
    told = jax.tree.map(lambda leaf: np.float32(rng.uniform(0.1, 0.9, leaf.shape)), dict(sent.metadata))
    told |= {LABELLED: np.float32(np.arange(number) // 2 % 2 * 20)} if LABELLED in told else {}
    statistics = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), sent.model.batch_stats)
    sizes = np.arange(20, 20 + number, dtype=np.int32)

    def drawn(leaf):  # the same for each shape: a server's own model is then the global one
        values = np.random.default_rng(leaf.size).uniform(0.1, 0.9, leaf.shape)
        return (values if leaf.dtype == np.float32 else np.zeros(leaf.shape)).astype(leaf.dtype)

    def aggregated(state, step, discount):
        down, selection = method.broadcast(state, data, key), select_of(problem, method)(state, data, key)
        groups = np.arange(number) * selection.turns // number
        changes = {path: jnp.zeros(leaf.shape) for path, leaf in leaves_by_path(sent.model.params).items()}
        path = max(changes, key=lambda path: changes[path].size)
        changes[path] += step * jnp.eye(number, changes[path][0].size).reshape(changes[path].shape)
        upload = Upload(Model(moved_by(changes, sent.model.params, down), statistics), told)
        received = Received(upload, discount > 0, selection.clients, groups, sizes, sizes, discount)
        params = method.aggregate(state, data, received, key)[0].model.params
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(params)])

    state = jax.tree.map(drawn, traced.experiment.state_shape)
    in_time, late = np.ones(number, np.float32), np.where(np.arange(number) % 2, 1, np.float32(0.25))
    program = compiled(aggregated, state, 0.01, in_time)
    found = [[np.asarray(program(state, step, factor)) for step in (0.01, 0.0)] for factor in (in_time, late)]
    before, after = (moved - still for moved, still in found)
    moved = np.abs(before) > 1e-5
    factors = np.sort(after[moved] / before[moved])
    assert len(factors) >= number
    np.testing.assert_allclose(factors / factors[-1], np.repeat([0.25, 1], len(factors) // 2), rtol=0.01)


def test_only_the_engine_writes_clients_memory(traced):
    """tests/engine/test_turns.py shows that it writes the cohort's own, by hand."""
    assert traced.rewritten == []
    places = {path: index for index, path in enumerate(traced.round.paths)}
    kept = []
    for path, variable in zip(traced.leaves, traced.round.jaxpr.outvars):
        if path.startswith("[0].clients"):
            kept.append(variable is traced.round.jaxpr.invars[places[path]])
    of_places = "places" in traced.state.server  # FedRGD: a place of the round remembers, whoever has it
    remember = bool(traced.experiment.method.phases) and not of_places
    assert bool(kept) == remember and not (kept and all(kept))


def test_no_views_of_a_step_share_a_key(traced):
    """A step whose views note their keys gives those alone."""
    seen = []

    def note(key, images):
        if len(images) > 1:  # the keys of `weak_views`, image by image, are not the step's
            seen.append(jax.random.key_data(key))
        return images

    problem = traced.experiment.problem._replace(weak=note, strong=note, views=(note, note))
    with mock.patch.object(jax, "jit", lambda function, **_: function):  # a trace of its own would hide the keys
        phases = METHODS[traced.name].factory(problem).phases
    for number, phase in enumerate(phases):

        def keys(key, arguments, step=phase.step):
            seen.clear()
            step(*arguments, key)
            return list(seen)

        found = jax.jit(keys)(jax.random.key(0), traced.steps[number])
        assert len({tuple(key.tolist()) for key in found}) == len(found)


@pytest.mark.test_all
def test_flower_runs_it_or_says_why(traced):
    check_flower(traced.name, traced.experiment)


@pytest.mark.parametrize(("name", "labels"), OTHER_SETTINGS)
def test_labels_elsewhere_trace(name, labels):
    """Of the first setting see `traced`."""
    experiment = build(make_config(name, labels, tiny=False))
    round_fn = make_round(experiment.problem, experiment.method, lanes=1)
    state, _ = jax.eval_shape(round_fn, experiment.state_shape, experiment.data, experiment.hidden_labels)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, experiment.state_shape)
    check_flower(name, experiment)


@pytest.mark.parametrize(("name", "fields"), [
    ("fixmatch", {}),
    ("uda", {}),
    ("sage", {}),
    ("fedopenmatch", {"fedopenmatch.inlier": 0.0}),
    ("proxyfl", {"proxyfl.contrastive_weight": 0.0}),
])  # fmt: skip
def test_a_label_of_a_quarter_s_weight_has_a_quarter_of_the_loss(name, fields):
    """With a rule that gives every label the same weight; in a single step."""

    def loss(weight):
        def rule(options, num_classes, threshold, strictly):
            weigh = lambda state, scores, size: jnp.full(scores.shape[:-1], weight)  # noqa: E731
            return Confidence(lambda n_max: (), lambda state, *batch: state, weigh, soft=True)

        problem = small_problem(name, SmallNetwork(ONE_VS_ALL, head_dim=CLASSES), **{"client.epochs": 1, **fields})
        problem = problem._replace(own_rule=rule)
        (phase,) = phases_of(METHODS[name].factory(problem))
        return float(train_client(phase, sent_down(problem), federation([[-1] * 3]), 0)[1].metrics["unlabelled_loss"])

    assert loss(0.25) == pytest.approx(loss(1.0) / 4, rel=1e-5) and loss(0.25) > 0.01


@pytest.mark.parametrize(("name", "counts"), [("fixmatch", True), ("semifl", True), ("fl2", False)])
def test_a_probability_at_the_threshold(name, counts):
    """All are exactly 1/2, whatever the image, so that the mean is that of each."""
    problem = small_problem(name, **{"confidence.threshold": 0.5})
    params = {"backbone": {"bias": jnp.float32([0, 0, -1e9])}, "classifier": {"kernel": jnp.zeros((4, CLASSES))}}
    received = sent_down(problem)
    received = received._replace(model=Model(params, received.model.batch_stats))
    job = prepare(phases_of(METHODS[name].factory(problem))[-1], received, federation([[-1] * 7]), 0)
    assert job.work.labels.report.qualified.sum() == 7 * counts
