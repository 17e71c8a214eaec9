"""Runs that start from another run's model: what is taken or refused; resuming does not need the other run."""

import itertools
import json
import shutil

import chex
import jax
import numpy as np
import pytest

import launch
from fedjax_ssl import train
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import replace_arrays
from fedjax_ssl.client import STANDARD
from fedjax_ssl.data import load_dataset
from fedjax_ssl.engine.interface import CLASSIFIER, State
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.records.sealed import read_dataset, write_dataset
from fedjax_ssl.report.model_card import model_card
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.warm_start import find_warm_start
from tests.helpers.runs import SMALL, forget_manifests, make_fedanchor_config, make_tiny_config

pytestmark = pytest.mark.test_all

TWO_STAGES = """
from fedjax_ssl.config import apply_arguments
from tests.helpers.runs import make_tiny_config

SIZES = {"model.projector_hidden": 8, "model.projector_dim": 4, "model.statistics": "cohort", "num_rounds": 1}

def get_config(arguments):
    config = make_tiny_config(**{"data.reveal_labels": False})
    apply_arguments(config, arguments).update_from_flattened_dict(SIZES)
    return config
"""
FRESH = {"server.pretrain_epochs": 0}  # nothing is trained before the first round


def begun(**fields):
    """The experiment of a run that sees all labels, like the finished run."""
    return build_experiment(make_tiny_config(**{"model.statistics": "all", **FRESH, **fields}))


def copied(folder, to, **changes):
    """A copy of a run's folder with some configuration fields changed."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    for name, value in changes.items():
        section, _, field = name.rpartition("/")
        (config[section] if section else config)[field] = value
    (to / "config.json").write_text(json.dumps(config))
    forget_manifests(to)
    return to


def saved_model(folder, like, number):
    return Checkpoints(folder / "checkpoints").restore(State(None, like), round_number=number, part=True).state.model


def test_a_run_begins_with_the_other_s_model_and_is_resumed_without_it(finished_run, tmp_path):
    other, run = tmp_path / "other", tmp_path / "run"
    shutil.copytree(finished_run[0], other)
    config = make_tiny_config(num_rounds=2, checkpoint_every=2, init_from=str(other), **FRESH)
    state = train(config, run)
    trained = finished_run[1].model
    first = saved_model(run, jax.eval_shape(lambda: trained), 0)
    chex.assert_trees_all_equal(first.params, jax.device_get(trained.params))
    chex.assert_trees_all_close(first.batch_stats, jax.device_get(trained.batch_stats), atol=1e-5)  # computed again
    assert json.loads((run / "config.json").read_text())["init_from"] == str(other)
    facts = {"run": str(other.resolve()), "method": "supervised", "round": 4, "parts": ["backbone", "classifier"]}
    facts["private"] = False
    assert json.loads((run / "init_from.json").read_text()) == facts
    with np.load(run / "partition.npz") as arrays:  # the other run has seen all labels
        np.testing.assert_array_equal(arrays["earlier_sums"], np.unique(arrays["row_sums"]))
    assert "the model of another run, other (init_from.json)" in model_card(read_run(run))

    shutil.rmtree(run / "checkpoints" / "2")  # as if killed in its first rounds
    (run / "summary.json").unlink()
    shutil.rmtree(other)
    chex.assert_trees_all_equal(train(config, run), state)
    assert json.loads((run / "init_from.json").read_text()) == facts


def test_a_model_that_learned_without_labels_starts_another_method_by_two_commands(tmp_path, monkeypatch, capsys):
    """SemiAnAgg's self-supervised warm-up on the same clients."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(TWO_STAGES)
    first = ["--config=tiny.py:fedu", "--config.data.labels=server", "--config.data.server_labels=0"]
    second = ["--config=tiny.py:semianagg", "--config.init_from=warm", "--workdir=run"]
    assert launch.main([*first, "--workdir=warm"]) == launch.main(second) == 0
    facts = json.loads((tmp_path / "run" / "init_from.json").read_text())
    assert (facts["method"], facts["round"], facts["parts"]) == ("fedu", 1, ["backbone", "classifier"])
    warm, run = read_run(tmp_path / "warm"), read_run(tmp_path / "run")
    assert warm.who_has_labels() == "nobody has labels"
    like = jax.eval_shape(lambda: begun(**{"model.statistics": "cohort"}).init(begun().data).model)
    both = [saved_model(of.folder, like, number).params["backbone"] for of, number in ((warm, 1), (run, 0))]
    chex.assert_trees_all_equal(*both)
    there, here = (dict(np.load(of.folder / "partition.npz")) for of in (warm, run))
    np.testing.assert_array_equal(there["client_index"], here["client_index"])
    assert not len(there["labelled_index"]) and len(here["labelled_index"]) and not len(here["earlier_sums"])
    np.testing.assert_array_equal(*(of.last_test_outputs()["labels"] for of in (warm, run)))
    assert warm.dataset()["content"] == run.dataset()["content"]


@pytest.mark.parametrize("has_head", [False, True])
def test_a_second_classifier_that_the_given_model_lacks_is_a_copy_of_the_first(has_head):
    """ACR labels images with it from the first round on."""
    fields = {"method": "fedavg_semi", "confidence.kind": "acr", "data.labels": "some_clients"}
    fields |= {"data.server_labels": 0, "model.normalisation": "running"}
    experiment = build_experiment(make_tiny_config(**{"data.reveal_labels": False, **FRESH, **fields}))
    data = experiment.data
    fresh = jax.device_get(experiment.init(data).model)
    given = jax.tree.map(lambda leaf: leaf + 1, fresh)
    if not has_head:
        given = given._replace(params={part: given.params[part] for part in CLASSIFIER})
    begun_with = experiment.init(data, given).model.params
    source = given.params[STANDARD if has_head else "classifier"]
    chex.assert_trees_all_equal(jax.device_get(begun_with[STANDARD]), source)
    chex.assert_trees_all_equal(jax.device_get(begun_with["classifier"]), given.params["classifier"])


def test_a_checkpoint_is_named_by_its_round(finished_run):
    folder = finished_run[0]
    newest = find_warm_start(begun(init_from=str(folder)))
    older = find_warm_start(begun(init_from=f"{folder}/checkpoints/2"))
    assert (newest.facts["round"], older.facts["round"]) == (4, 2)
    moved = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), newest.model.params, older.model.params)
    assert all(change > 0 for change in jax.tree.leaves(moved))
    with pytest.raises(UserError, match="checkpoints/17"):
        find_warm_start(begun(init_from=f"{folder}/checkpoints/17"))


def test_each_seed_has_its_own_and_a_relative_path_is_looked_for_below_the_root(finished_run, tmp_path):
    copied(finished_run[0], tmp_path / "warm" / "seed_0")
    copied(finished_run[0], tmp_path / "warm" / "seed_5", seed=5)
    for seed in (0, 5):
        found = find_warm_start(begun(init_from="warm", seed=seed), root=tmp_path)
        assert found.facts["run"].endswith(f"seed_{seed}")
    with pytest.raises(UserError, match=r"^init_from=warm: warm holds no run"):
        find_warm_start(begun(init_from="warm"))
    with pytest.raises(UserError, match=r"holds no run, nor one of seed 7; name RUN"):
        find_warm_start(begun(init_from="warm", seed=7), root=tmp_path)


@pytest.mark.parametrize("method", ["fedanchor", "fedil", "fedmatch"])
def test_what_a_method_makes_of_its_first_model_it_makes_of_this_one(method, finished_run):
    """Parts that the other run lacks stay newly initialised; copies in the server's memory equal the given model."""
    fields = {"method": method, "init_from": str(finished_run[0]), "data.reveal_labels": True, **SMALL, **FRESH}
    experiment = build_experiment(make_fedanchor_config(**fields))
    given = find_warm_start(experiment).model
    init = experiment.init
    state = init(experiment.data, given)
    params = {name: part for name, part in state.model.params.items() if name != "anchor_head"}
    expected = given.params
    if method == "fedmatch":  # theta = sigma + psi with psi = sigma / 5; entries of psi up to `smallest` count as 0
        smallest = experiment.problem.config.fedmatch.smallest
        expected = jax.tree.map(lambda leaf: np.where(np.abs(leaf / 6) <= smallest, leaf * 5 / 6, leaf), expected)
    chex.assert_trees_all_close(params, expected)
    assert ("anchor_head" in state.model.params) == (method == "fedanchor")
    assert "anchor_head" not in given.params
    if method == "fedil":
        chex.assert_trees_all_equal(state.server["model"].params, given.params)


def test_heads_that_this_method_lacks_are_left_out(finished_run, tmp_path):
    """Such as the projector of a method that learns without labels."""
    folder, state = copied(finished_run[0], tmp_path / "other"), finished_run[1]
    more = state._replace(model=state.model.with_parts(projector={"kernel": np.ones(3, np.float32)}))
    Checkpoints(folder / "checkpoints").save(5, more)
    found = find_warm_start(begun(init_from=str(folder)))
    assert found.facts["parts"] == ["backbone", "classifier"] and found.facts["round"] == 5
    chex.assert_trees_all_equal(found.model, jax.device_get(state.model))


@pytest.mark.parametrize(("facts", "fields", "line"), [
    ({"image_shape": [9, 8, 1]}, {}, "its inputs' image_shape is [9, 8, 1] there, and [8, 8, 1] here"),
    ({"weights": 64 * "0"}, {}, "its inputs' weights is '000"),
    ({"encoder_side": 64}, {}, "its inputs' encoder_side is 64 there"),
    ({}, {"model.normalisation": "group"}, "model.normalisation is 'static' there, and 'group' here"),
    ({}, {"model.name": "resnet8"}, "does not fit this configuration in this version: .model.batch_stats['backbone']"),
    ({}, {"data.normalisation": "none"}, "data.normalisation is 'own' there, and 'none' here"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(facts, fields, line, finished_run, tmp_path):
    folder = copied(finished_run[0], tmp_path / "other")
    write_dataset(folder, {**read_dataset(folder), **facts})
    with pytest.raises(UserError) as error:
        find_warm_start(begun(init_from=str(folder), **fields))
    assert line in str(error.value) and "\n" not in str(error.value)


NPZ = {"data.source": "npz", "data.reveal_labels": False, "data.labels": "server"}


def digits_as(file, order=slice(None), inverted=False, **names):
    """The fields of a run on an npz file of the digits, whose training examples stand in another order."""
    digits = load_dataset(make_tiny_config().data)
    x_train = digits.x_train[order]
    arrays = {"x_train": 255 - x_train if inverted else x_train, "y_train": digits.y_train[order]}
    replace_arrays(file, **arrays, x_test=digits.x_test, y_test=digits.y_test)
    return {**NPZ, "data.path": str(file)}


def test_hidden_labels_are_known_under_any_name_and_in_any_order(finished_run, tmp_path, capsys):
    """The other run has seen 40 labels at the server: the same rows, other rows, or the same images elsewhere."""
    other = copied(finished_run[0], tmp_path / "other", **{"data/reveal_labels": False})

    def begun_with(**fields):
        return begun(init_from=str(other), **{**digits_as(tmp_path / "renamed.npz"), **fields})

    of_digits = begun_with(**{"data.source": "digits", "data.path": ""})
    assert len(find_warm_start(begun_with()).seen) == len(find_warm_start(of_digits).seen)
    backwards = digits_as(tmp_path / "backwards.npz", slice(None, None, -1))
    for fields in ({"seed": 1}, backwards, {**backwards, "seed": 1}):
        experiment = begun_with(**fields)
        with np.load(other / "partition.npz") as arrays:
            there = {image.tobytes() for image in load_dataset(make_tiny_config().data).x_train[arrays["server_index"]]}
        known = {image.tobytes() for image in experiment.dataset.x_train[experiment.partition.server_index]}
        with pytest.raises(UserError, match=f"trained on {len(there - known)} labels that are hidden in this one"):
            find_warm_start(experiment)
    capsys.readouterr()
    assert len(find_warm_start(begun_with(**digits_as(tmp_path / "inverted.npz", inverted=True))).seen) == 40
    assert capsys.readouterr().err == ""
    (tmp_path / "sub").mkdir()
    write_dataset(other, {**read_dataset(other), "name": "mine"})
    find_warm_start(begun_with(**digits_as(tmp_path / "sub" / "mine.npz", inverted=True)))
    assert "its data of the same name have other inputs, perhaps the same in another form" in capsys.readouterr().err


def test_inputs_that_a_data_set_has_twice_are_no_evidence(finished_run, tmp_path):
    """Rows of a small table are often equal by chance: those that occur once in both data sets count, and no others."""
    other = copied(finished_run[0], tmp_path / "other", **{"data/reveal_labels": False})
    with np.load(other / "partition.npz") as arrays:
        there = dict(arrays)
    rows, number = there["server_index"], len(there["row_sums"])
    x_train = load_dataset(make_tiny_config().data).x_train

    def hidden(*twice):
        """The images that the other run saw, of those that occur once, and that are hidden here; and this run."""
        file = digits_as(tmp_path / "digits.npz", np.concatenate([np.arange(number), *twice]).astype(int))
        experiment = begun(init_from=str(other), seed=1, **file)
        here = {image.tobytes() for image in experiment.dataset.x_train[experiment.partition.server_index]}
        once = np.setdiff1d(rows, np.concatenate([[], *twice]))
        return {image.tobytes() for image in x_train[once]} - here, experiment

    for twice in ((), (rows[3:],)):
        images, experiment = hidden(*twice)
        with pytest.raises(UserError, match=f"trained on {len(images)} labels that are hidden in this one"):
            find_warm_start(experiment)
    assert 0 < len(images) <= 3
    find_warm_start(hidden(rows)[1])
    there["row_sums"][np.setdiff1d(np.arange(number), rows)[: len(rows)]] = there["row_sums"][rows]
    replace_arrays(other / "partition.npz", **there)
    assert len(find_warm_start(hidden()[1]).seen) == 0


def test_a_private_run_says_that_its_first_model_was_not_private(finished_run, tmp_path, capsys):
    """Nor is a private run's model that began with such a one, unless it is known that this one was private."""
    private = {"privacy/noise": 1.0, "privacy/reproducible": False}
    own = {"privacy.noise": 1.0, "aggregation.clip_norm": 0.1, "model.statistics": "server"}
    line = "trained without privacy, and this run's guarantee does not cover its examples"
    experiment = begun(**own)

    def says(folder):
        config = experiment.problem.config.copy_and_resolve_references()
        config.init_from = str(folder)
        find_warm_start(experiment._replace(problem=experiment.problem._replace(config=config)))
        return line in capsys.readouterr().err

    assert says(finished_run[0])
    assert not says(copied(finished_run[0], tmp_path / "private", **private))
    second = copied(finished_run[0], tmp_path / "second", **private, init_from="elsewhere")
    assert says(second)
    for was_private in (False, True):
        (second / "init_from.json").write_text(json.dumps({"private": was_private}))
        assert says(second) != was_private


def test_labels_that_an_earlier_run_saw_are_handed_on(finished_run, tmp_path):
    """As if the first run saw the digits' labels, and the second trained on other images."""
    folder = copied(finished_run[0], tmp_path / "second", **{"data/reveal_labels": False})
    with np.load(folder / "partition.npz") as arrays:
        sums = arrays["row_sums"]
        others = {**arrays, "row_sums": sums + np.uint64(1), "earlier_sums": sums}
    replace_arrays(folder / "partition.npz", **others)
    with pytest.raises(UserError, match="labels that are hidden in this one"):
        find_warm_start(begun(**{"init_from": str(tmp_path / "second"), "data.reveal_labels": False}))


def test_classes_are_matched_by_their_names(finished_run, tmp_path, capsys):
    """In another order the classifier's columns move with the names; of other classes only the backbone is taken."""
    folder, experiment = copied(finished_run[0], tmp_path / "other"), begun(init_from=str(tmp_path / "other"))
    plain, names = find_warm_start(experiment).model, list("0123456789")
    order = np.random.default_rng(0).permutation(10).tolist()
    write_dataset(folder, {**read_dataset(folder), "class_names": [names[place] for place in order]})
    found = find_warm_start(experiment)
    assert "its classes stand in another order" in capsys.readouterr().err
    for here, (name, kernel) in itertools.product(range(10), plain.params["classifier"].items()):
        # There, column c is of the class named order[c].
        np.testing.assert_array_equal(found.model.params["classifier"][name][..., order[here]], kernel[..., here])
    chex.assert_trees_all_equal(found.model.params["backbone"], plain.params["backbone"])
    write_dataset(folder, {**read_dataset(folder), "class_names": [*names[:9], "ten"], "num_classes": 10})
    found = find_warm_start(experiment)
    assert found.facts["parts"] == ["backbone"] and "classifier" not in found.model.params
    assert "its classes are others (0, 1" in capsys.readouterr().err
    begun_with = experiment.init(experiment.data, found.model).model.params
    chex.assert_trees_all_equal(jax.device_get(begun_with["backbone"]), plain.params["backbone"])


def test_a_run_without_checksums_may_have_seen_hidden_labels(finished_run, tmp_path, capsys):
    folder = copied(finished_run[0], tmp_path / "other")
    (folder / "partition.npz").unlink()  # as a Flower run
    find_warm_start(begun(**{"init_from": str(folder), "data.reveal_labels": False}))
    assert "hidden in this run is not known: it has no checksums of its data" in capsys.readouterr().err
