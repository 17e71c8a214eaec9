"""What every method of the registry must do: train, the same way each time, blind to hidden labels, by honest bytes.

The methods, their settings and the fields for a tiny run come from the registry: a new method changes nothing here.
"""

import ast
import contextlib
import shutil
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import base_config, train
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.client import LABELLED, Confidence
from fedjax_ssl.config import apply_arguments, flatten
from fedjax_ssl.engine import CLASSIFIER, Received, Upload
from fedjax_ssl.engine.round import make_round, select_of
from fedjax_ssl.engine.untrusted.updates import leaves_by_path, moved_by
from fedjax_ssl.flower.supported import check_supported
from fedjax_ssl.methods import METHODS, NAMES, frames
from fedjax_ssl.methods.entry import check_entry
from fedjax_ssl.methods.fedopenmatch import ONE_VS_ALL
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.train import checkpoint_interval
from fedjax_ssl.run.validation import validate
from fedjax_ssl.run.wire import bytes_per_client
from tests.helpers.runs import make_fedanchor_config as make_tiny_config
from tests.helpers.small_problem import CLASSES, SmallNetwork, federation, phases_of, sent_down, small_problem
from tests.helpers.small_problem import train as train_client
from tests.helpers.tiny_methods import build, compiled, make_config

NUM_CLIENTS, NUM_ROUNDS = 8, 2
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


class Trained(NamedTuple):
    """Two rounds of a method.

    Attributes:
        name: the method's.
        experiment: its parts.
        first_fn: data -> the first state, compiled.
        round_fn: the compiled round.
        states: before the first round, and after each.
        history: a `RoundResult` for each round.
        cohorts: ids of the clients of each round.
        sent: the messages of a round.
        steps: of each phase the arguments of a step but its key: zeros.
    """

    name: str
    experiment: Any
    first_fn: Any
    round_fn: Any
    states: list
    history: list
    cohorts: list
    sent: Message
    steps: dict


@pytest.fixture(scope="module", params=sorted(METHODS))
def trained(request):
    """Each method's two rounds, by one program for the first state and one for a round."""
    config, sent, steps = make_config(request.param), {}, {}
    if request.param == "supervised":
        config.client.labelled_views = "both"
    experiment = build(config)
    method = experiment.method

    def broadcast(state, data, key):
        sent["down"] = method.broadcast(state, data, key)
        return sent["down"]

    def personal(state, data, clients, key):
        sent["personal"] = method.personal(state, data, clients, key)
        return sent["personal"]

    def aggregate(state, data, received, key):
        sent["up"] = received.uploads
        state, metrics = method.aggregate(state, data, received, key)
        return state, {**metrics, **{f"client_of_row_{row}": client for row, client in enumerate(received.clients)}}

    def noted(number, phase):
        def step(*arguments):
            steps[number] = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), arguments[:-1])
            return phase.step(*arguments)

        return phase._replace(step=step)

    phases = tuple(noted(number, phase) for number, phase in enumerate(method.phases))
    spied = method._replace(
        broadcast=broadcast, aggregate=aggregate, personal=method.personal and personal, phases=phases
    )
    first_fn = compiled(experiment.init, experiment.data)
    state = first_fn(experiment.data)
    arguments = state, experiment.data, experiment.hidden_labels
    round_fn = compiled(make_round(experiment.problem, spied, lanes=1), *arguments)
    states, history = [state], []
    for _ in range(NUM_ROUNDS):
        state, result = round_fn(states[-1], experiment.data, experiment.hidden_labels)
        states.append(state)
        history.append(jax.device_get(result))
    rows = [name for name in history[0].metrics if name.startswith("client_of_row_")]
    cohorts = [np.array([result.metrics.pop(name) for name in rows], int) for result in history]
    sent = Message(**jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), sent))
    return Trained(request.param, experiment, first_fn, round_fn, states, history, cohorts, sent, steps)


# --- What a run must do. ---------------------------------------------------------------------------------------------


def test_two_rounds_train_and_stay_finite(trained):
    first, last = trained.states[0], trained.states[-1]
    assert [int(state.round) for state in trained.states] == [0, 1, 2]
    chex.assert_tree_all_finite((last.model, last.clients))
    moved = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), first.model.params, last.model.params)
    assert all(change > 0 for change in jax.tree.leaves(moved)), moved
    missing = []
    for metrics, _, healthy in trained.history:
        assert healthy and metrics["dropped_uploads"] == 0
        assert (metrics["uploads"] > 0) == bool(trained.experiment.method.phases)
        missing.append({name for name, value in metrics.items() if not np.isfinite(value)})
    rests = METHODS[trained.name].rests
    assert [bool(names) for names in missing] == [number in rests for number in range(1, NUM_ROUNDS + 1)]
    assert not set.intersection(*missing)  # what rests in one round works in the other


def test_rounds_are_deterministic_and_blind_to_hidden_labels(trained):
    """Both rounds: in the second, clients have something to remember. What is wrong about a label shows in no model."""
    experiment = trained.experiment
    # Each label is replaced by another: none is right any more.
    others = (experiment.hidden_labels + 1) % experiment.problem.num_classes
    state = trained.states[0]
    for expected, result in zip(trained.states[1:], trained.history):
        state, blind = trained.round_fn(state, experiment.data, others)
        chex.assert_trees_all_equal(state, expected)
        for name, value in result.metrics.items():
            scored = name.startswith(("pseudo_label_accuracy", "qualified_accuracy"))
            assert scored or np.array_equal(value, blind.metrics[name], equal_nan=True), name
    visible = np.asarray(experiment.data.visible_labels) >= 0
    if experiment.problem.config.data.reveal_labels:  # the labels are given to it, and only then
        assert np.all(visible)
    else:
        partition = experiment.partition
        np.testing.assert_array_equal(
            np.flatnonzero(visible), np.sort(np.concatenate([partition.server_index, partition.labelled_rows]))
        )


def test_a_client_may_have_any_share_of_labels(trained):
    """The program is that of the method's first setting: which clients have labels, and how many, is data."""
    settings = METHODS[trained.name].settings
    if "profile" not in settings or settings[0] == "server":
        return
    config = make_config(trained.name, "profile")
    config.data.update({"label_profile": (0, 1, 0.5, 0, 0.1, 1, 0, 0.02), "server_labels": 0})
    experiment = build(config)
    state = trained.first_fn(experiment.data)
    for _ in range(NUM_ROUNDS):
        state, result = trained.round_fn(state, experiment.data, experiment.hidden_labels)
        chex.assert_tree_all_finite((state.model, state.clients))
        assert result.healthy and result.metrics["uploads"] > 0 and result.metrics["dropped_uploads"] == 0


def test_bytes_are_those_of_the_messages(trained):
    """What the round itself sent, leaf by leaf; and who has which head is what the registry says."""
    entry, model = METHODS[trained.name], trained.states[0].model
    heads = entry.heads_of(trained.experiment.problem.config)
    assert set(model.params) == {*CLASSIFIER, *heads, *entry.companions}
    traffic = bytes_per_client(trained.experiment.problem, trained.experiment.method, trained.states[0],
                               trained.experiment.data)  # fmt: skip
    if not trained.experiment.method.phases:
        assert (traffic.jobs, traffic.down, traffic.up) == (0, 0, 0)
        return
    count = lambda tree: sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    jobs = len(trained.cohorts[0])
    assert traffic.jobs == jobs
    assert traffic.down == count(trained.sent.down) + count(trained.sent.personal) / jobs
    assert traffic.up == count(trained.sent.up) / jobs
    assert traffic.down >= count(model) + 4  # the whole model and the learning rate at least, heads included


def test_a_late_upload_counts_by_its_factor(trained):
    """Each upload moves a number of its own: how far the result follows it is how much it counts. Half are late."""
    problem = trained.experiment.problem
    config = problem.config.copy_and_resolve_references()
    config.availability.update({"late": 0.5, "late_weight": 0.25})
    config.aggregation.optimizer = "fedavg"  # the mean itself
    problem = problem._replace(config=config)
    try:
        method = METHODS[trained.name].factory(problem)
    except UserError as error:
        assert "availability.late_weight must be 0" in str(error)
        return
    if not phases_of(method) or method.personal is not None:  # the latter are refused when the run is built
        return
    state, data, key = trained.states[0], trained.experiment.data, jax.random.key(0)
    sent, rng = trained.sent.up, np.random.default_rng(0)
    down, selection = method.broadcast(state, data, key), select_of(problem, method)(state, data, key)
    number = len(selection.clients)
    told = jax.tree.map(lambda leaf: np.float32(rng.uniform(0.1, 0.9, leaf.shape)), dict(sent.metadata))
    told |= {LABELLED: np.float32(np.arange(number) // 2 % 2 * 20)} if LABELLED in told else {}
    statistics = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), sent.model.batch_stats)
    groups, sizes = np.arange(number) * selection.turns // number, np.arange(20, 20 + number, dtype=np.int32)

    def aggregated(state, step, discount):
        changes = {path: jnp.zeros(leaf.shape) for path, leaf in leaves_by_path(sent.model.params).items()}
        path = max(changes, key=lambda path: changes[path].size)
        changes[path] += step * jnp.eye(number, changes[path][0].size).reshape(changes[path].shape)
        upload = Upload(Model(moved_by(changes, sent.model.params, down), statistics), told)
        received = Received(upload, discount > 0, selection.clients, groups, sizes, sizes, discount)
        params = method.aggregate(state, data, received, key)[0].model.params
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(params)])

    in_time, late = np.ones(number, np.float32), np.where(np.arange(number) % 2, 1, np.float32(0.25))
    program = compiled(aggregated, state, 0.01, in_time)
    before, after = (program(state, 0.01, factor) - program(state, 0.0, factor) for factor in (in_time, late))
    factors = np.sort((after / before)[np.abs(before) > 1e-5])
    assert len(factors) >= number
    np.testing.assert_allclose(factors / factors[-1], np.repeat([0.25, 1], len(factors) // 2), rtol=0.01)


def test_only_the_cohort_s_own_memory_changes(trained):
    changed = [set() for _ in trained.cohorts]
    for name in trained.states[0].clients:
        for number, (old, new) in enumerate(zip(trained.states, trained.states[1:])):
            before, after = (jax.tree.leaves(state.clients[name]) for state in (old, new))
            differs = [np.any(np.asarray(a != b).reshape(NUM_CLIENTS, -1), axis=1) for a, b in zip(before, after)]
            changed[number] |= set(np.flatnonzero(np.any(differs, axis=0)))
    for of_round, cohort in zip(changed, trained.cohorts):
        assert of_round <= set(cohort)
    of_places = "places" in trained.states[0].server  # FedRGD: a place of the round remembers, whoever has it
    remember = bool(trained.experiment.method.phases) and not of_places
    assert bool(changed[0]) == bool(trained.states[0].clients) == remember


def test_no_views_of_a_step_share_a_key(trained):
    """A step whose views note their keys gives those alone."""
    seen = []

    def note(key, images):
        if len(images) > 1:  # the keys of `weak_views`, image by image, are not the step's
            seen.append(jax.random.key_data(key))
        return images

    problem = trained.experiment.problem._replace(weak=note, strong=note, views=(note, note))
    for number, phase in enumerate(METHODS[trained.name].factory(problem).phases):

        def keys(key, arguments, step=phase.step):
            seen.clear()
            step(*arguments, key)
            return list(seen)

        found = jax.jit(keys)(jax.random.key(0), trained.steps[number])
        assert len({tuple(key.tolist()) for key in found}) == len(found)


def test_flower_runs_it_or_says_why(trained):
    check_flower(trained.name, trained.experiment)


# --- What the registry says. -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_an_entry_names_what_there_is(name):
    entry = METHODS[name]
    check_entry(name, entry)
    assert entry.title and entry.settings
    assert "profile" in entry.settings or not {"clients", "some_clients"} & set(entry.settings)  # its special cases
    config = apply_arguments(base_config(), name)
    assert config.method == name
    if entry.settings[0] == config.data.labels:
        validate(config)
    for variant, fields in entry.variants.items():
        varied = apply_arguments(base_config(), f"{name},{variant}")
        assert fields.items() <= flatten(varied).items(), variant
        validate(varied)


def test_each_method_s_files_read_every_field_of_its_section(root):
    """A constant in the place of a field would show in no run with the field's default."""
    for name in (name for name in NAMES if METHODS[name].defaults):
        place = root / "fedjax_ssl" / "methods" / name
        files = place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]
        nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
        read = {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in ("options", name)
        }
        assert set(METHODS[name].section().config()) <= read, name


@pytest.mark.parametrize(("name", "labels"), OTHER_SETTINGS)
def test_labels_elsewhere_trace(name, labels):
    """Of the first setting two rounds are run, see `trained`."""
    experiment = build(make_config(name, labels, tiny=False))
    round_fn = make_round(experiment.problem, experiment.method, lanes=1)
    state, _ = jax.eval_shape(round_fn, experiment.state_shape, experiment.data, experiment.hidden_labels)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, experiment.state_shape)
    check_flower(name, experiment)


@pytest.mark.parametrize(("name", "labels"), [("semifl", "clients"), ("rscfed", "server")])
def test_labels_where_a_method_knows_none_are_refused(name, labels):
    config = apply_arguments(base_config(), name)
    config.data.labels = labels
    with pytest.raises(UserError, match=f"^data.labels is '{labels}'; known to the method {name}: ") as refused:
        validate(config)
    assert all(repr(known) in str(refused.value) for known in METHODS[name].settings)


# --- Of some. --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", ["fedil"], indirect=True)
def test_fedil_s_set_grows_and_is_learned_from(trained):
    credibility = [state.clients["credibility"] for state in trained.states]
    sizes = [int(np.sum(one.in_set)) for one in credibility]
    assert sizes[0] == 0 < sizes[1] <= sizes[2]  # k = 1: a credible label joins at once
    losses = [result.metrics["set_loss"] for result in trained.history]
    assert losses[0] == 0 < losses[1]
    in_set = np.asarray(credibility[1].in_set)
    assert np.all(np.asarray(credibility[2].in_set) | ~in_set)  # nobody leaves
    np.testing.assert_array_equal(np.asarray(credibility[2].label)[in_set], np.asarray(credibility[1].label)[in_set])
    norms = [result.metrics["update_norm"] for result in trained.history]
    np.testing.assert_allclose(trained.history[1].metrics["update_norm_average"], np.mean(norms), rtol=1e-5)


def test_centralised_data_are_the_server_s():
    experiment = build_experiment(apply_arguments(make_tiny_config(), "centralised"))
    data = experiment.data
    owned = np.concatenate([experiment.partition.server_index, *experiment.partition.client_rows])
    np.testing.assert_array_equal(np.sort(data.server_index), np.sort(owned))
    np.testing.assert_array_equal(np.asarray(data.visible_labels)[owned], np.asarray(experiment.hidden_labels)[owned])
    assert len(owned) == 40 + NUM_CLIENTS * 33


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("fixmatch", {}),
        ("uda", {}),
        ("sage", {}),
        ("fedopenmatch", {"fedopenmatch.inlier": 0.0}),
        ("proxyfl", {"proxyfl.contrastive_weight": 0.0}),
    ],
)
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


def test_without_clients_normalisation_statistics_are_the_server_s(monkeypatch):
    sources = []
    monkeypatch.setattr(frames, "make_statistics", lambda network, section, source=None: sources.append(source))
    for name in ("server_only", "supervised"):
        METHODS[name].factory(small_problem(name))
    assert sources == ["server", None]


@pytest.mark.parametrize(
    ("words", "every"),
    [
        ("fixmatch", 10),
        ("fixmatch,strong", 50),  # an optimiser with momentum for each client
        ("fedtrinet", 50),  # its last model
        ("fedtrinet,one_player", 10),
        ("fedmatch", 50),  # at the server, its last upload
        ("fedmatch,no_helpers", 50),
    ],
)
def test_states_with_a_model_for_each_client_are_checkpointed_less_often(words, every):
    problem = small_problem(words, **{"data.labels": "clients"})
    method = METHODS[problem.config.method].factory(problem)
    state = jax.eval_shape(method.init, federation([[0, -1], [-1]]), jax.random.key(0))
    assert checkpoint_interval(problem.config, state) == every


def test_own_optimisers_are_checkpointed_at_an_interval_of_their_own_and_resumed(tmp_path):
    config = make_config("supervised")
    config.update_from_flattened_dict({"checkpoint_every": 2, "num_rounds": 4})
    state = train(config, tmp_path)
    assert {folder.name for folder in (tmp_path / "checkpoints").glob("[0-9]*") if folder.is_dir()} == {"2", "4"}
    assert set(state.clients) == {"opt_state"} and set(state.server) == {"aggregation", "classification"}
    metrics = (tmp_path / "metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as if it had been killed in round 4
    resumed = train(config, tmp_path)
    chex.assert_trees_all_equal(resumed, state)
    assert (tmp_path / "metrics.jsonl").read_text() == metrics
