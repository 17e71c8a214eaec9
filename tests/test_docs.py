"""The documentation builds without a warning and names every field; its examples run."""

import ast
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_ssl
import launch
from fedjax_ssl import UserError, base_config, methods
from fedjax_ssl.base import imports
from fedjax_ssl.config import flatten, parse_config
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.engine.tracing import one_job
from fedjax_ssl.ops.trees import row
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.wire import bytes_per_client
from tests.helpers.runs import TINY_BACKBONE

# What the examples of a new method leave at its default, made small; compiling takes most of the time.
TINY = {
    "augment.flavour": "none",
    "client.epochs": 1,
    "data.examples_per_client": 33,
    "server.epochs": 0,
    "server.pretrain_epochs": 0,
    "log.report": False,
}

FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def script(root, name):
    """docs/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, root / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_field_is_described(root):
    fields = script(root, "source_docs").read_fields()
    assert {name: ast.literal_eval(field.default) for name, field in fields.items()} == flatten(base_config())
    assert [name for name, field in fields.items() if not field.meaning] == []


def test_descriptions_are_those_of_the_source(root):
    fields = script(root, "source_docs").read_fields()
    assert fields["seed"].meaning == "partition, initialisation, cohorts, everything random"  # behind the code
    assert fields["server.nesterov"].meaning == "Nesterov momentum"  # in a shared section
    assert fields["confidence.kind"].meaning.startswith("The rule: 'fixed', the method's")  # above the code
    assert fields["confidence.kind"].group == ""
    assert fields["devices"].group.startswith("These change speed only.")
    assert fields["fedanchor.client_mixup"].group == "Local training (section 4.3, appendix B)."
    page = "\n".join(script(root, "config_reference").page())
    assert "* `lanes=None` or int \u2265 1: clients trained side by side" in page
    assert "* `iid` sets `data.alpha=1000.0`\n" in page
    ending = script(root, "endings").ending
    assert "* `fedanchor.ensemble_views=0`: n: scores are means" in ending("methods/fedanchor.md")
    assert "* `no_label_set`: `fedil.label_set=False`\n" in ending("methods/fedil.md")
    assert ending("data.md") == ""


def test_what_the_readme_names_exists(root):
    text = (root / "README.md").read_text(encoding="utf-8")
    names = re.findall(r"\]\((?!https?:)([^)#]+)", text) + re.findall(r"python ((?:docs|benchmarks)/\w+\.py)", text)
    assert names and [name for name in names if not (root / name).exists()] == []


def test_the_readme_names_every_method(root):
    text = (root / "README.md").read_text(encoding="utf-8")
    published = set(methods.METHODS) - {"supervised", "server_only"}
    assert f"{len(published)} published methods" in text
    assert [name for name in published if methods.METHODS[name].title.removeprefix("FedAvg with ") not in text] == []


def test_the_sources_name_pages_that_exist(root):
    files = [
        file for folder in ("fedjax_ssl", "configs", "examples", "notebooks") for file in (root / folder).rglob("*")
    ]
    texts = [file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".ipynb", ".toml")]
    pages = set(re.findall(r"\bdocs/[\w/]+\.md", "".join(texts)))
    assert pages and sorted(page for page in pages if not (root / page).exists()) == []


def test_every_method_but_isofed_is_compared_with_its_code(root):
    compared = script(root, "official_code")
    assert {line["method"] for line in compared.read()} == set(methods.METHODS) - {"isofed"}
    assert compared.page().count("\n| ") == len(compared.read()) + 1


@pytest.mark.parametrize("name", ["claims", "leaderboard", "official_code"])
def test_the_pages_of_records_are_what_their_scripts_write(root, name, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "docs"))
    assert (root / "docs" / f"{name}.md").read_text(encoding="utf-8") == script(root, name).page()


@pytest.mark.parametrize("name, picture", [("draw_round", "round.svg"), ("draw_results", "methods.svg")])
def test_the_pictures_are_what_their_scripts_draw(root, name, picture):
    assert (root / "docs" / "images" / picture).read_text(encoding="utf-8") == script(root, name).draw()


def test_the_picture_of_a_round_names_functions_that_exist(root):
    for file, names in re.findall(r'class="code"[^>]*>([\w/]+\.py): ([^<]*)<', script(root, "draw_round").draw()):
        source = (root / "fedjax_ssl" / file).read_text(encoding="utf-8")
        for name in names.split(", "):
            assert f"def {name}(" in source, f"{file} has no {name}"


def test_every_method_has_a_page(root):
    overview = script(root, "endings").ending("methods.md")  # the site's table
    assert {file.stem for file in (root / "docs" / "methods").glob("*.md")} == set(methods.METHODS)
    assert [name for name in methods.METHODS if f"(methods/{name}.md)" not in overview] == []


def make_tiny():
    config = base_config()
    config.update_from_flattened_dict(TINY)
    return config


@pytest.fixture
def adding_a_method(root, tmp_path, monkeypatch):
    """The pages' files by name, their commands by workdir, and the use from Python; the folder has the files."""
    pages = ("tutorials/your_method.md", "how_to/change_a_method.md")
    page = "".join((root / "docs" / name).read_text(encoding="utf-8") for name in pages).replace(" \\\n   ", "")
    files, uses = {}, []
    for text in FENCE.findall(page):
        name = re.match(r"# (\w+\.py)\n", text)
        if name:
            files[name[1]] = text
            (tmp_path / name[1]).write_text(text, encoding="utf-8")
        else:
            uses.append(text)
    (tmp_path / "examples").symlink_to(root / "examples")
    commands = [shlex.split(line)[1:] for line in re.findall(r"^python (launch\.py (?!report).*)$", page, re.MULTILINE)]
    (use,) = uses
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with mock.patch.dict(methods.METHODS):  # removes what a test registers
        yield files, {words[-1].removeprefix("--workdir=runs/"): words for words in commands}, use
    for name in files:
        sys.modules.pop(name.removesuffix(".py"), None)


def check_two_rounds(folder, loss):
    """Checks that clients uploaded and changed the model in both rounds; returns their metrics."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 2
    assert all(line["uploads"] > 0 and line["update_norm"] > 0 and line[loss] > 0 for line in lines)
    return lines


def started(words, **further):
    fields = {**TINY, "num_rounds": 2, "num_clients": 20, "clients_per_round": 5, **further}
    return launch.main([*words, *(f"--config.{name}={value}" for name, value in fields.items())])


def test_the_examples_of_a_new_method_are_as_short_as_their_titles_say(adding_a_method):
    files, commands, _ = adding_a_method
    lengths = {name: sum(bool(line) for line in text.splitlines()[1:]) for name, text in files.items()}
    most = {"consistent.py": 25, "compare.py": 4, "my_fixmatch.py": 9, "my_rising.py": 10, "my_balanced.py": 22}
    assert all(lengths.pop(name) <= most[name] for name in most) and not lengths
    assert list(commands) == ["consistent", "teacher", "compare", "my_fixmatch", "rising", "balanced", "co_training"]


@pytest.mark.test_all
def test_the_example_of_a_new_method_trains(adding_a_method, tmp_path, monkeypatch):
    """The page's command builds it, and it trains as the page registers it from Python."""
    _, commands, use = adding_a_method
    with monkeypatch.context() as patch:
        assert built(commands["consistent"], patch).problem.config.method == "consistent.py:consistent"
    monkeypatch.setattr(fedjax_ssl, "base_config", make_tiny)
    names = {}
    use = use.replace('"cnn"', repr(TINY_BACKBONE))
    exec(compile(use, "your_method.md", "exec"), names)
    assert int(names["state"].round) == 2
    check_two_rounds(tmp_path / "runs" / "registered", "client_loss")


def built(words, monkeypatch):
    """The experiment that a command builds; nothing is compiled."""
    found = []
    monkeypatch.setattr("fedjax_ssl.run.train.train", lambda config, workdir: found.append(build_experiment(config)))
    assert launch.main(words) == 0
    return found[0]


def test_the_example_of_a_comparison_lists_its_runs(adding_a_method, capsys):
    assert launch.main([*adding_a_method[1]["compare"], "--dry_run"]) == 0
    runs = [f"runs/compare/{row}/seed_{seed}" for row in ("mine", "FedAnchor", "labels_alone") for seed in range(3)]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == runs


def test_the_example_of_a_changed_method(adding_a_method, monkeypatch):
    words = adding_a_method[1]["my_fixmatch"]
    config = built(words, monkeypatch).problem.config
    assert config.confidence.threshold == 0.5
    assert methods.find_method(config.method).fields["confidence.threshold"] == 0.8


def test_the_example_of_a_loss_for_the_server_weights_classes_equally(adding_a_method, monkeypatch):
    experiment = built(adding_a_method[1]["balanced"], monkeypatch)
    problem, data = experiment.problem, experiment.data
    state = jax.eval_shape(experiment.method.init, data, jax.random.key(0))
    assert "server_loss" in jax.eval_shape(experiment.method.server_after, state, data, jax.random.key(0))[1]
    images, logits = np.asarray(data.server_index), np.random.default_rng(0).normal(size=(37, 10))
    network = types.SimpleNamespace(train=lambda *_: ((types.SimpleNamespace(logits=jnp.asarray(logits)),), {}))
    loss = imports._FILES[pathlib.Path("my_balanced.py").resolve()].balanced_loss(
        problem._replace(network=network, strong=lambda key, images: images), data
    )
    labels = np.asarray(data.visible_labels)[images]
    found, _ = loss(None, images, jnp.asarray(labels), jnp.ones(37, bool), None)
    each = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(37), labels]
    by_class = [each[labels == c].mean() for c in np.unique(labels)]
    assert len(set(np.bincount(labels))) > 1  # otherwise all weights would be 1
    np.testing.assert_allclose(found, np.sum(by_class) / 10, rtol=1e-5)


@pytest.mark.test_all
def test_the_example_of_a_rule_for_confidence_trains(adding_a_method, tmp_path):
    """Its threshold rises, so fewer labels count in the second round."""
    fields = {"confidence.threshold": 0.95, "model.name": TINY_BACKBONE}
    assert started(adding_a_method[1]["rising"], **fields) == 0
    first, second = check_two_rounds(tmp_path / "runs" / "rising", "client_loss")
    assert first["qualified_share"] == 1 > second["qualified_share"] > 0


def test_the_teacher_of_the_example_is_the_average_of_a_client_s_models(adding_a_method, monkeypatch):
    """Three steps of one client; the average in NumPy, from the first teacher on, which is the server's first model."""
    fields = [f"--config.model.name={TINY_BACKBONE}", "--config.server.pretrain_epochs=0"]
    experiment = built([*adding_a_method[1]["teacher"], *fields, "--config.augment.flavour=none"], monkeypatch)
    (phase,), data = experiment.method.phases, experiment.data
    state = experiment.method.init(data, jax.random.key(0))
    _, received, cohort = one_job(experiment.problem, experiment.method, state, data)
    work, own = row(phase.prepare(received, data, cohort, None).work, 0), row(cohort.own, 0)
    teacher = jax.tree.map(np.asarray, state.model)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, own["teacher"]), teacher)
    carry, step = phase.start(received, data, work, own), jax.jit(phase.step)
    for number in range(3):
        carry = step(received, data, work, carry, jnp.int32(number), jax.random.key(number))
        teacher = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * np.asarray(new), teacher, carry.learner.model)
    kept = phase.finish(received, work, carry, jnp.int32(3)).own["teacher"]
    chex.assert_trees_all_close(jax.tree.map(np.asarray, kept), teacher, rtol=1e-5, atol=1e-6)
    changed = jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), teacher.params, state.model.params))
    assert max(changed) > 0


def test_a_memory_that_nobody_made_is_named(adding_a_method):
    """`own` is left out of the example; a part of the model has another name; arguments lack, or lack names."""
    text = pathlib.Path("examples/mean_teacher.py").read_text()
    for old, new, line in (
        (
            "(phase,), own)",
            "(phase,))",
            "the method reads 'teacher' of a client's memory, which is empty; make the entry",
        ),
        (
            "sizes, after=after",
            "sizes, parts=('clasifier',)",
            "the model has no part 'clasifier'; the nearest is classifier",
        ),
        ("after(own, model)", "after(own)", "line 37 of .*: too many positional arguments"),
        ("sizes, after=after", "sizes, after", "local_training.. takes 4 positional arguments but 5 were given"),
    ):
        assert old in text
        name = f"mistake_{len(new)}"
        pathlib.Path(f"{name}.py").write_text(text.replace(old, new))
        words = [f"--config.method={name}.py:mean_teacher", f"--config.model.name={TINY_BACKBONE}"]
        config = parse_config(launch.QUICKSTART, words)
        with pytest.raises(UserError, match=line):
            experiment = build_experiment(config)
            bytes_per_client(experiment.problem, experiment.method, experiment.state_shape, experiment.data)


def test_a_round_of_the_example_of_two_models(adding_a_method, monkeypatch):
    """Traced only, with a round's clients on the device: both phases upload, and a client remembers how often its
    models agreed.
    """
    at = [f"--config.residence.{name}=host" for name in ("data", "clients")]
    words = [*adding_a_method[1]["co_training"], f"--config.model.name={TINY_BACKBONE}", *at]
    experiment = built(words, monkeypatch)
    round_fn = make_round(experiment.problem, experiment.method, lanes=1)
    state, result = jax.eval_shape(round_fn, experiment.state_shape, experiment.data, experiment.hidden_labels)
    assert {"labelled_loss", "unlabelled_loss", "uploads"} <= set(result.metrics)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, experiment.state_shape)
    assert state.clients["agreement"].shape == experiment.data.ids.shape and "peer" in state.model.params


@pytest.fixture(scope="module")
def site_folder(root, tmp_path_factory):
    """The built site."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers", "latex2mathml"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install -e '.[docs]')")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def site(site_folder):
    """The site's pages by name, such as 'methods/sage.html'."""
    files = {str(file.relative_to(site_folder)): file for file in site_folder.rglob("*.html")}
    return {name: file.read_text(encoding="utf-8") for name, file in files.items()}


@pytest.mark.test_all
def test_the_site_builds_without_a_warning(site, root):
    docs = root / "docs"
    pages = {str(file.relative_to(docs).with_suffix("")) for file in docs.rglob("*.md")}
    assert pages <= {name.removesuffix(".html") for name in site}
    for name in flatten(base_config().to_dict()):
        section = name.partition(".")[0]
        page = f"methods/{section}.html" if section in methods.METHODS else "configs.html"
        assert f"<code>{name}=" in site[page], name


@pytest.mark.test_all
def test_the_page_of_the_api_has_every_public_name(site):
    page = site["reference/api.html"]
    assert [n for n in fedjax_ssl.__all__ if n != "__version__" and not re.search(rf'id="[\w.]+\.{n}"', page)] == []


@pytest.mark.test_all
def test_the_site_fetches_nothing_from_elsewhere(site):
    for name, page in site.items():
        fetched = re.findall(r'<(?!a\b)[^>]*\b(?:src|href)="?((?:https?:)?//[^"\s>]*)', page)
        assert fetched == [], f"{name}: {fetched}"
