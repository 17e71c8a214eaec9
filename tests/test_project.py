"""The files around the library that GitHub, citation tools and container tools read are in order."""

import re
import tomllib

import pytest
import yaml

from tests.helpers.runs import ROOT

FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
KINDS = {"input", "textarea", "dropdown", "checkboxes", "markdown"}


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_asks_for(form):
    found = yaml.safe_load(form.read_text())
    assert set(found) == {"name", "description", "labels", "body"}
    ids = [field["id"] for field in found["body"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]+", name) for name in ids)
    for field in found["body"]:
        assert field["type"] in KINDS and field["attributes"]["label"]
        assert set(field) <= {"type", "id", "attributes", "validations"}
        if field["type"] in ("dropdown", "checkboxes"):
            assert field["attributes"]["options"]
    assert any(field.get("validations", {}).get("required") for field in found["body"])


def test_the_citation_names_title_authors_and_the_licence_of_the_package():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= set(found)
    assert found["license"] == project["license"] and all("name" in author for author in found["authors"])


def test_the_extras_of_the_container_file_exist():
    text = (ROOT / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r"EXTRA=(\w+)", text)) | set(re.findall(r"pyproject.toml: ([\w, ]+);", text)[0].split(", "))
    assert named == {"cuda12", "cuda13", "tpu"} and named <= set(extras)


def test_the_commands_of_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([\w-]+)", text)) <= targets
    for path in re.findall(r"\]\(([\w/.]+)\)", text) + re.findall(r"`((?:fedjax_ssl|tests|docs)/[a-z_/]+\.\w+)`", text):
        assert (ROOT / path).exists(), path
