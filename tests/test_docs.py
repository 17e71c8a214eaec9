"""The documentation: it builds without a warning, names every field, and its examples run."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from unittest import mock

import pytest

import fedjax_ssl
import launch
from fedjax_ssl import base_config, methods
from fedjax_ssl.cli.source_docs import Field, read_fields
from fedjax_ssl.config import add_section, flatten, validate
from fedjax_ssl.errors import UserError
from fedjax_ssl.run.experiment import build_experiment

# What the examples of a new method leave at their defaults, made small: nearly all of the time goes into compiling.
TINY = {
    "augment.num_ops": 1,
    "augment.padding": 1,
    "client.epochs": 1,
    "data.examples_per_client": 33,
    "server.epochs": 0,
    "server.pretrain_epochs": 0,
    "log.report": False,
}

FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def reference(root):
    """docs/config_reference.py, which makes the configuration's page."""
    spec = importlib.util.spec_from_file_location("config_reference", root / "docs" / "config_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_field_is_described():
    described = {name: field.meaning for name, field in read_fields().items()}
    assert set(described) == set(flatten(base_config().to_dict()))
    assert [name for name, meaning in described.items() if not meaning] == []


def test_descriptions_are_those_of_the_source(reference):
    fields = read_fields()
    assert fields["seed"].meaning == "partition, initialisation, cohorts, everything random"  # behind the code
    assert fields["server.nesterov"].meaning == "Nesterov's form of the momentum"  # in a section that is shared
    assert fields["confidence.kind"].meaning.startswith("Of pseudo-labels: 'fixed'")  # above the code, two lines
    assert fields["confidence.kind"].group == ""
    assert fields["devices"].group.startswith("Performance only")
    assert fields["fedanchor.mix_weight"] == Field("1.0", "b of eq. 10", "Local training (section 4.3, appendix B).")
    page = reference.page()
    assert "| `fedanchor.threshold` | `0.6` | at least -1 | t of eq. 5" in page
    assert "| `lanes` | `None` | whole, at least 1; or None | clients trained side by side" in page
    assert "| `iid` | `data.alpha=1000.0` |" in page
    assert "| `fedil` | `no_label_set` | `fedil.label_set=False` |" in page


def test_the_picture_is_what_its_script_draws(root):
    spec = importlib.util.spec_from_file_location("draw_round", root / "docs" / "draw_round.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (root / "docs" / "images" / "round.svg").read_text(encoding="utf-8") == module.draw()
    for file, names in re.findall(r'class="code"[^>]*>([\w/]+\.py): ([^<]*)<', module.draw()):
        source = (root / "fedjax_ssl" / file).read_text(encoding="utf-8")
        for name in names.split(", "):
            assert f"def {name}(" in source, f"{file} has no {name}"


def make_tiny():
    config = base_config()
    config.update_from_flattened_dict(TINY)
    return config


@pytest.fixture
def adding_a_method(root, tmp_path, monkeypatch):
    """The page's blocks (agreement.py, its use, confidence.py) and its commands, in an empty folder with both files."""
    page = (root / "docs" / "adding_a_method.md").read_text(encoding="utf-8")
    blocks = FENCE.findall(page)
    (tmp_path / "agreement.py").write_text(blocks[0], encoding="utf-8")
    (tmp_path / "confidence.py").write_text(blocks[2], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with mock.patch.dict(methods.METHODS):  # what a test registers is forgotten
        yield blocks, re.findall(r"^python (launch\.py .*)$", page, re.MULTILINE)


def check_two_rounds(folder):
    """Clients uploaded and moved the model, in each of two rounds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 2
    assert all(line["uploads"] > 0 and line["update_norm"] > 0 and line["client_loss"] > 0 for line in lines)
    return lines


def test_the_examples_of_a_new_method_are_short_and_import_from_three_places(adding_a_method):
    (agreement, _, confidence), _ = adding_a_method
    assert len(agreement.splitlines()) <= 50 and len(confidence.splitlines()) <= 40
    for text in (agreement, confidence):
        places = re.findall(r"^from (fedjax_ssl\S*) import", text, re.MULTILINE)
        assert places == ["fedjax_ssl.client", "fedjax_ssl.engine", "fedjax_ssl.methods"]


def test_the_example_of_a_new_method_trains(adding_a_method, tmp_path, monkeypatch):
    (agreement, use, _), _ = adding_a_method
    monkeypatch.setattr(fedjax_ssl, "base_config", make_tiny)
    names = {}
    exec(compile(agreement, "agreement.py", "exec"), names)
    exec(compile(use, "adding_a_method.md", "exec"), names)
    assert int(names["state"].round) == 2
    lines = check_two_rounds(tmp_path / "runs" / "agreement")
    # Only images whose views agree are trained on.
    assert all(0 < line["qualified_share"] < 1 and 0 <= line["qualified_accuracy"] <= 1 for line in lines)


def test_the_example_is_named_by_its_file(adding_a_method, monkeypatch):
    _, (command, _) = adding_a_method
    built = []
    monkeypatch.setattr("fedjax_ssl.run.train.train", lambda config, workdir: built.append(build_experiment(config)))
    assert launch.main(shlex.split(command)[1:]) == 0
    assert built[0].problem.config["agreement"].views == 3
    with pytest.raises(UserError, match=r"agreement\.views must be at least 2, not 1"):
        load_and_validate("agreement.py:agreement", {"agreement.views": 1})


def test_the_example_of_a_loss_of_its_own_trains(adding_a_method, tmp_path):
    _, (_, command) = adding_a_method
    small = {"num_rounds": 2, "num_clients": 20, "clients_per_round": 5, **TINY}
    words = [f"--config.{name}={value}" for name, value in small.items()]
    assert launch.main([*shlex.split(command)[1:], *words]) == 0
    check_two_rounds(tmp_path / "runs" / "confidence")


def load_and_validate(method, fields):
    config = base_config()
    config.method = method
    add_section(config).update_from_flattened_dict(fields)
    validate(config)


@pytest.fixture(scope="module")
def site_folder(root, tmp_path_factory):
    """The built site."""
    for package in ("mkdocs", "material", "latex2mathml"):
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
    """Its pages, by name."""
    return {file.name: file.read_text(encoding="utf-8") for file in site_folder.glob("*.html")}


def test_the_site_builds_without_a_warning(site, root):
    pages = {file.stem for file in (root / "docs").glob("*.md")} | {"configs"}
    assert pages <= {name.removesuffix(".html") for name in site}
    assert [
        name for name in flatten(base_config().to_dict()) if f"<code>{name}</code>" not in site["configs.html"]
    ] == []


def test_equations_are_mathml(site):
    assert site["methods.html"].count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') > 20
    assert [name for name, page in site.items() if "arithmatex" in page] == []


def test_the_site_fetches_nothing_from_elsewhere(site):
    for name, page in site.items():
        fetched = re.findall(r'<(?!a\b)[^>]*\b(?:src|href)="?((?:https?:)?//[^"\s>]*)', page)
        assert fetched == [], f"{name}: {fetched}"


def test_the_search_works_from_a_file(site_folder, browser):
    tab = browser.new_page()
    asked = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto((site_folder / "index.html").as_uri())
    tab.locator("input.md-search__input").click()
    tab.locator("input.md-search__input").press_sequentially("pseudo", delay=50)
    found = tab.locator("a.md-search-result__link").first
    found.wait_for(state="visible", timeout=30_000)
    assert (site_folder / found.get_attribute("href").partition("?")[0].rpartition("/")[2]).exists()
    assert [url for url in asked if not url.startswith(("file:", "data:", "about:"))] == []
    tab.close()
