"""The documentation: it builds without a warning, names every field, and its example runs."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

import fedjax_ssl
from fedjax_ssl import base_config
from fedjax_ssl.cli.source_docs import Field, read_fields
from fedjax_ssl.config import flatten

# What the example of a new method leaves at its default, made small: nearly all of the time goes into compiling.
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
    assert fields["threshold.kind"].meaning.startswith("Of pseudo-labels: 'fixed'")  # above the code, two lines
    assert fields["threshold.kind"].group == ""
    assert fields["devices"].group.startswith("Performance only")
    assert fields["fedanchor.mix_weight"] == Field("1.0", "b of eq. 10", "Local training (section 4.3, appendix B).")
    page = reference.page()
    assert "| `fedanchor.threshold` | `0.6` | t of eq. 5" in page
    assert "| `iid` | `data.alpha=1000.0` |" in page
    assert "| `fedil` | `no_label_set` | `fedil.label_set=False` |" in page


def test_the_picture_is_what_its_script_draws(root):
    spec = importlib.util.spec_from_file_location("draw_round", root / "docs" / "draw_round.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (root / "docs" / "images" / "round.svg").read_text(encoding="utf-8") == module.draw()
    for file, names in re.findall(r'class="code"[^>]*>([\w/]+\.py): ([^<]*)<', module.draw()):
        source = (root / file if file == "launch.py" else root / "fedjax_ssl" / file).read_text(encoding="utf-8")
        for name in names.split(", "):
            assert f"def {name}(" in source, f"{file} has no {name}"


def make_tiny():
    config = base_config()
    config.update_from_flattened_dict(TINY)
    return config


def test_the_example_of_a_new_method_trains(root, registry, tmp_path, monkeypatch):
    method, use = FENCE.findall((root / "docs" / "adding_a_method.md").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fedjax_ssl, "base_config", make_tiny)
    names = {}
    exec(compile(method, "agreement.py", "exec"), names)
    exec(compile(use, "adding_a_method.md", "exec"), names)
    assert int(names["state"].round) == 2
    lines = (tmp_path / "runs" / "agreement" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 and '"pseudo_label_accuracy_agreement"' in lines[0]


@pytest.fixture(scope="module")
def site(root, tmp_path_factory):
    """The built site's pages, by name."""
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
    return {file.name: file.read_text(encoding="utf-8") for file in folder.glob("*.html")}


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
