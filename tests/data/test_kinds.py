"""Features, tables and texts: every method takes them or says why not; what their views change in an example."""

import functools
import json
import re
import runpy
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest
from tokenizers import Tokenizer, models

from fedjax_ssl import UserError, base_config, train
from fedjax_ssl.config import parse_config
from fedjax_ssl.data import federate, load_dataset, make_partition
from fedjax_ssl.data.kinds import KINDS, features, kind_of, table, text
from fedjax_ssl.data.sources import dataset_facts
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.methods import METHODS
from fedjax_ssl.models.network import build_network
from fedjax_ssl.ops.augment.mixup import MIX_ORDERS, mix_inputs
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.report.model_card import _use, model_card
from fedjax_ssl.run.experiment import make_method, make_problem
from fedjax_ssl.run.validation import validate
from fedjax_ssl.serve.predictor import load, predict_file
from tests.helpers.stub import make_stub_config
from tests.helpers.tiny_methods import make_config

CLASSES, FEATURES, LENGTH = 3, 6, 5
BACKBONES = {"features": "linear", "table": "mlp", "text": "transformer"}
ROWS = "age,colour,hospital,label,note\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A kind's name -> the fields of a data set of 240 examples in 3 classes; a fifth of the table has labels."""
    folder, rng = tmp_path_factory.mktemp("kinds"), np.random.default_rng(0)
    y = np.arange(240) % CLASSES
    x = (np.eye(CLASSES, FEATURES)[y] * 4 + rng.normal(size=(240, FEATURES))).astype(np.float32)
    views = x[:, None] + 0.1 * rng.normal(size=(240, 4, FEATURES)).astype(np.float32)
    np.savez(folder / "features.npz", x_train=views, y_train=y, x_test=views[:30, 0], y_test=y[:30])
    tokens = np.concatenate([y[:, None] + 1, rng.integers(0, 9, (240, LENGTH - 1))], axis=1)
    np.savez(folder / "text.npz", x_train=tokens, y_train=y, x_test=tokens[:30], y_test=y[:30])
    ages = np.where(rng.random(240) < 0.1, "", (20 + 10 * y + rng.normal(size=240)).round(1).astype(str))
    lines = [
        f"{ages[row]},{('red', 'green', 'blue')[y[row]]},h{row % 8},{('low', 'mid', 'high')[y[row]]},a word{y[row]}"
        for row in range(240)
    ]
    (folder / "full.csv").write_text(ROWS + "\n".join(lines))
    known = np.arange(240) % 5 == 0
    without = [",".join([*line.split(",")[:3], "", line.split(",")[4]]) for line in lines]
    (folder / "table.csv").write_text(ROWS + "\n".join(np.where(known, lines, without)))
    npz = {"data.source": "npz", "data.weak_views": 1}
    csv = {"data.source": "csv", "data.label_column": "label", "data.ignore_columns": "note,hospital"}
    return {
        "features": {**npz, "data.path": str(folder / "features.npz"), "data.weak_views": 2},
        "text": {**npz, "data.path": str(folder / "text.npz")},
        "table": {**csv, "data.path": str(folder / "full.csv")},
        "labels where they are": {
            **csv,
            "data.path": str(folder / "table.csv"),
            "data.ignore_columns": "note",
            "data.client_column": "hospital",
            "data.partition": "natural",
            "num_clients": 8,
            "data.labels": "clients",
        },
    }


def config_of(method, fields, kind):
    config = make_config(method)
    config.update_from_flattened_dict({
        "model.name": BACKBONES[kind], "model.normalisation": "group",
        "data.partition": "iid",
        **fields,
    })  # fmt: skip
    if config.data.labels == "server":
        config.data.server_labels = 30
    if kind == "features":
        config.model.normalisation = "none"
    validate(config)
    return config


@functools.cache
def federation(data_section, num_clients):
    """A data set and its federation for a data section as JSON, cached."""
    data = base_config().data
    data.update(json.loads(data_section))
    dataset = load_dataset(data)
    partition = make_partition(dataset.y_train, dataset.num_classes, data, num_clients, 0, dataset.owners)
    return dataset, *federate(dataset, partition, seed=0)


def shapes_of_a_round(config):
    """The metrics' shapes of a round, traced but not compiled."""
    dataset, data, hidden = federation(json.dumps(config.data.to_dict()), config.num_clients)
    problem = make_problem(config, dataset_facts(dataset), dataset.lacks_labels)
    method = make_method(problem)
    state = jax.eval_shape(lambda data: method.init(data, jax.random.key(0)), data)
    return jax.eval_shape(make_round(problem, method, lanes=2), state, data, hidden)[1].metrics


@pytest.fixture(scope="module")
def cells(root):
    """(method, kind) -> the cell of the table at the end of the site's page on kinds."""
    ending = runpy.run_path(str(root / "docs" / "endings.py"))["ending"]
    lines = ending("reference/kinds.md").partition("| method |")[2].splitlines()
    kinds = [word.strip() for word in lines[0].split("|")[:-1]]
    rows = [re.fullmatch(r"\| \[`(\w+)`\]\(.*?\) \| (.*) \|", line) for line in lines]
    return {(row[1], kind): cell for row in rows if row for kind, cell in zip(kinds, row[2].split(" | "))}


def test_the_table_has_every_method_and_kind(cells):
    assert set(cells) == {(method, kind) for method in METHODS for kind in KINDS}


@pytest.mark.test_all
@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_takes_every_kind_or_says_why_not(files, cells, method):
    """Of the kinds that it takes one in turn is traced, with mixup all."""
    taken = []
    for kind, backbone in BACKBONES.items():
        config, cell = config_of(method, files[kind], kind), cells[method, kind]
        if cell == "no":
            with pytest.raises(UserError, match=f"method={method} {METHODS[method].images_alone}, but the data are"):
                shapes_of_a_round(config)
        elif cell == "`mlp`" and backbone == "linear":
            with pytest.raises(UserError, match=r"backbone.*, which has no parameter"):
                shapes_of_a_round(config)
        else:
            assert cell in ("yes", f"`{backbone}`")
            taken.append(config)
    one = [taken[sorted(METHODS).index(method) % len(taken)]] if taken else []
    for config in taken if method in ("fixmatch", "fedanchor", "semifl") else one:
        assert "test_accuracy" in shapes_of_a_round(config)


@pytest.mark.test_all
@pytest.mark.parametrize("kind", ["table", "text"])
def test_a_quickstart_has_a_round(root, kind):
    words = [f"--config.{field}=4" for field in ("num_clients", "clients_per_round")]
    words += ["--config.data.examples_per_client=12", "--config.data.server_labels=40", "--config.model.width=32"]
    config = parse_config(str(root / "configs" / f"quickstart_{kind}.py"), words)
    assert "test_accuracy" in shapes_of_a_round(config)


@pytest.mark.parametrize(("kind", "name"), [("table", "transformer"), ("text", "mlp"), ("features", "resnet8")])
def test_a_backbone_of_another_kind_is_refused(files, kind, name):
    with pytest.raises(UserError, match=rf"={name} is not for {KINDS[kind].noun}; those for them: "):
        shapes_of_a_round(config_of("fixmatch", {**files[kind], "model.name": name}, kind))


def test_transformers_refuse_statistics_of_a_batch(files):
    with pytest.raises(UserError, match=r"transformer takes model\.normalisation=.group. alone"):
        shapes_of_a_round(config_of("fixmatch", {**files["text"], "model.normalisation": "static"}, "text"))


def test_a_csv_with_few_labels_trains_a_federation_by_its_column(files, tmp_path):
    """Labels stay in their rows, their number need not be given, and `predict` writes a csv."""
    config = make_stub_config(**files["labels where they are"], **{"num_rounds": 1, "log.tensorboard": False})
    train(config, tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "dataset.json").read_text())
    assert facts["columns"] == ["age", "colour"] and facts["categories"] == [None, ["blue", "green", "red"]]
    partition = np.load(tmp_path / "run" / "partition.npz")
    dataset = load_dataset(config.data)
    assert len(partition["labelled_index"]) == np.count_nonzero(dataset.y_train >= 0)
    owners = np.repeat(np.arange(8), partition["client_size"])
    assert np.array_equal(dataset.owners[partition["client_index"]], owners)
    found = predict_file(tmp_path / "run", tmp_path / "out.csv", csv=config.data.path, allow_code=True)
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[0] == "row,class,probability,true class" and len(lines) == 241 and found.labelled == 48
    assert lines[1].endswith(",low") and lines[2].endswith(",")
    # 16 rows of each class have a label; 4 of them are test rows.
    held = read_run(tmp_path / "run").who_has_labels()
    assert held == "the data have labels for 36 of the clients' 228 rows"
    assert "\n| rows | 2 columns, 3 classes |\n" in model_card(read_run(tmp_path / "run"))
    by_name = load(tmp_path / "run", allow_code=True)({"age": ["25.0", ""], "colour": ["red", "violet"]})
    assert by_name.probabilities.shape == (2, CLASSES) and np.isfinite(by_name.probabilities).all()


def views_of(files, kind):
    config = config_of("fixmatch", files[kind], kind)
    dataset = load_dataset(config.data)
    facts = dataset_facts(dataset)
    return dataset.x_train[:40], kind_of(facts).views(config, facts), kind_of(facts).inputs(facts)


def test_views_of_features_are_drawn_from_the_weak_and_the_strong_ones(files):
    x, views, inputs = views_of(files, "features")
    for view, allowed in ((views.weak, (0, 1)), (views.strong, (2, 3))):
        drawn = np.asarray(view(jax.random.key(0), x))
        numbers = [next(v for v in range(4) if np.array_equal(x[row, v], drawn[row])) for row in range(len(x))]
        assert set(numbers) == set(allowed)
    for taken in (inputs.to_network(x), inputs.to_network(x[:, 0])):
        np.testing.assert_allclose(taken, (x[:, 0] - inputs.mean) / inputs.std, atol=1e-5)
    # With a single view the weak one is noisy, and the strong one has some features at their mean, too.
    facts = {"shape": [FEATURES], "weak_views": 1, "mean": inputs.mean, "std": inputs.std}
    views = features.KIND.views(None, facts)
    weak, strong = (np.asarray(view(jax.random.key(0), x[:, 0])) for view in (views.weak, views.strong))
    np.testing.assert_allclose(np.std((weak - x[:, 0]) / inputs.std, axis=0), 0.1, rtol=0.4)
    assert 0.1 < np.mean(strong == inputs.mean) < 0.3


def test_views_of_tables_corrupt_by_other_rows_and_hide(files, monkeypatch):
    monkeypatch.setattr(features, "NOISE", 0.0)
    x, views, inputs = views_of(files, "table")
    np.testing.assert_array_equal(views.weak(jax.random.key(0), x), x)
    seen = np.asarray(views.strong(jax.random.key(0), x))
    for column in range(x.shape[1]):
        kept = seen[:, column][~np.isnan(seen[:, column])]
        assert np.isin(kept, x[:, column]).all() and (seen[:, column] != x[:, column]).any()
    assert 0.1 < np.isnan(seen[:, 1]).mean() < 0.35
    # A number, three categories and two bits for missing values; no NaN is left.
    taken = np.asarray(inputs.to_network(seen))
    assert taken.shape == (40, 6) and np.isfinite(taken).all()
    np.testing.assert_array_equal(taken[:, 4:], np.isnan(seen))
    ages = np.where(np.isnan(seen[:, 0]), 0, (seen[:, 0] - inputs.mean[0]) / inputs.std[0])
    np.testing.assert_allclose(taken[:, 0], ages, atol=1e-5)
    np.testing.assert_array_equal(taken[:, 1:4], seen[:, 1:] == np.arange(CLASSES))
    monkeypatch.setattr(features, "NOISE", 0.5)
    noisy = np.asarray(views.weak(jax.random.key(0), x))
    np.testing.assert_array_equal(noisy[:, 1], x[:, 1])
    assert 0.3 < np.nanstd(noisy[:, 0] - x[:, 0]) / inputs.std[0] < 0.7
    a, b = np.array([[1.0, 0], [np.nan, 1]], np.float32), np.array([[5.0, 2], [3, 2]], np.float32)
    np.testing.assert_allclose(inputs.mix(a, b, jnp.float32(0.25)), [[4.0, 2], [np.nan, 2]])


def test_views_of_texts_delete_and_mask(files):
    x, views, inputs = views_of(files, "text")
    weak, strong = (np.asarray(view(jax.random.key(0), x)) for view in (views.weak, views.strong))
    assert np.all((weak == x) | (weak == 0)) and 0.03 < np.mean(weak[x > 0] == 0) < 0.2
    mask = inputs.num_tokens
    assert np.all((strong == x) | (strong == 0) | (strong == mask)) and np.all(strong[x == 0] == 0)
    assert 0.08 < np.mean(strong == mask) < 0.3


@pytest.mark.parametrize("order", MIX_ORDERS)
def test_mixup_of_texts_averages_embeddings_place_by_place(files, order, monkeypatch):
    """Compares with new token ids embedded at the averages; padding is 0, and unmixed texts keep their embeddings."""
    monkeypatch.setattr("fedjax_ssl.ops.augment.mixup.sample_lambda", lambda key, alpha: jnp.float32(0.25))
    monkeypatch.setattr(text, "DELETED", 0.0)
    config = config_of("fixmatch", files["text"], "text")
    facts = dataset_facts(load_dataset(config.data))
    network = build_network(config, facts, kind_of(facts))
    model, predict = jax.jit(network.init)(jax.random.key(0)), jax.jit(network.predict)
    a, b = jnp.array([[1, 4, 0, 0, 0]], jnp.int32), jnp.array([[3, 2, 5, 0, 0]], jnp.int32)
    weak = kind_of(facts).views(config, facts).weak
    mixture, _ = mix_inputs(network.inputs, weak, jax.random.key(1), a, b, 0.75, order)
    (beside, mixed), _ = jax.jit(network.train)(model, (a, mixture), jnp.array([True]))
    (alone, _), _ = jax.jit(network.train)(model, (a, b), jnp.array([True]))
    np.testing.assert_allclose(beside.logits, alone.logits, atol=1e-6)
    table = np.array(model.params["backbone"]["embed"]["embedding"])
    table[6:8], table[8] = 0.25 * table[[1, 4]] + 0.75 * table[[3, 2]], 0.75 * table[5]
    backbone = {**model.params["backbone"], "embed": {"embedding": table}}
    other = model._replace(params={**model.params, "backbone": backbone})
    by_hand = predict(other, jnp.array([[6, 7, 8, 0, 0]]))
    np.testing.assert_allclose(mixed.logits, by_hand.logits, atol=1e-6)


TABLE_FACTS = {"columns": ["a", "c"], "categories": [None, ["x", "y"]], "mean": [0.0, 0.0], "std": [1.0, 1.0]}
TOKENIZER = Tokenizer(models.WordLevel({"[UNK]": 0, "nan": 1, "none": 2}, unk_token="[UNK]")).to_str()
TEXT_FACTS = {"shape": [5], "weak_views": 1, "num_tokens": 4, "tokenizer": TOKENIZER}
FEATURE_FACTS = {"shape": [2], "weak_views": 1, "mean": [0.0, 0.0], "std": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("kind", "facts", "given", "line"),
    [
        ("table", TABLE_FACTS, {"a": [1, 2], "c": ["x"]}, "is not a list of values for each column"),
        ("table", TABLE_FACTS, {"a": [], "c": []}, r"a table of float32 \(0, 2\)"),
        ("table", TABLE_FACTS, np.array([[1e300, 0]]), "column 'a' has inf; its values are finite in float32"),
        ("table", TABLE_FACTS, np.array([[7, 1], [0, 2]]), "column 'c' has 2; its values are codes 0 to 1"),
        ("features", FEATURE_FACTS, np.array([[1e300, 0]]), "not finite in float32"),
        ("text", TEXT_FACTS, "good film", "the model takes a list of texts, or token ids"),
    ],
)
def test_what_a_model_does_not_take_is_one_line(kind, facts, given, line):
    with pytest.raises(UserError, match=line) as caught:
        KINDS[kind].given(given, facts)
    assert "\n" not in str(caught.value)


def test_a_missing_text_is_empty():
    for missing in (None, float("nan")):
        assert KINDS["text"].given(["nan", missing], TEXT_FACTS).tolist() == [[2, 0, 0, 0, 0], [0] * 5]


def test_booleans_and_missing_numbers_of_pandas_are_those_of_any_file():
    facts = {"columns": ["a", "c"], "categories": [None, ["FALSE", "TRUE"]]}
    rows = {"a": pandas.array([1, None, 2, 3, 4], "Int64"), "c": [True, False, "true", " FALSE", None]}
    np.testing.assert_array_equal(table.encode(rows, facts), [[1, 1], [np.nan, 0], [2, 1], [3, 0], [4, np.nan]])


def test_a_model_card_has_a_command_that_is_not_refused():
    """Texts without a column's name, such as token ids of an npz file, are not read from a csv file."""
    for facts, flag in (({}, "npz"), ({"text_column": "note"}, "csv")):
        of_texts = {"kind": "text", **TEXT_FACTS, **facts}
        run = SimpleNamespace(folder="run", kind="text", noun="texts", dataset=lambda of_texts=of_texts: of_texts)
        assert _use(run)["flag"] == flag
