"""What an installation contains: the command and the configs; and launch.py finds the Python of a checkout."""

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib

import pytest

import launch
from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.files import CONFIGS
from fedjax_ssl.config import find_config_file, parse_config
from tests.helpers.runs import ROOT


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the files of the wheel."""
    folder = tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("fedjax_ssl", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib=lib"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "lib"


@pytest.mark.test_all
def test_an_installation_has_every_module_and_every_config(built):
    def names(folder):
        return {path.relative_to(folder) for path in folder.rglob("*") if path.suffix in (".py", ".toml", ".jinja")}

    assert names(ROOT / "configs") == names(built / "fedjax_ssl" / "configs") != set()
    assert names(ROOT / "fedjax_ssl") == {n for n in names(built / "fedjax_ssl") if n.parts[0] != "configs"}
    assert [path.name for path in built.iterdir()] == ["fedjax_ssl"]
    assert (built / "fedjax_ssl" / "py.typed").exists()


def test_what_is_imported_on_demand_is_listed_for_people_and_editors():
    import fedjax_ssl

    source = ast.parse((ROOT / "fedjax_ssl" / "__init__.py").read_text())
    (block,) = (node for node in source.body if isinstance(node, ast.If))
    homes = {a.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert homes == {name: f"fedjax_ssl.{home}" for name, home in fedjax_ssl._HOMES.items()}
    assert {*homes, "__version__"} <= set(fedjax_ssl.__all__) <= set(dir(fedjax_ssl))


def test_packages_that_do_not_fit_are_named(monkeypatch):
    def module_of_other_version(name):
        raise AttributeError("module 'jax' has no attribute 'moved'")

    monkeypatch.setattr("importlib.import_module", module_of_other_version)
    with pytest.raises(ImportError, match="train cannot be imported: module 'jax' has no attribute 'moved'"):
        from fedjax_ssl import train  # noqa: F401


def test_the_version_is_that_of_the_installation(capsys, monkeypatch):
    import fedjax_ssl

    assert fedjax_ssl.__version__ == importlib.metadata.version("fedjax_ssl")
    assert launch.main(["--version"]) == 0
    assert capsys.readouterr().out == f"fedjax_ssl {fedjax_ssl.__version__}\n"

    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    assert fedjax_ssl.__version__ == "0+unknown"


@pytest.mark.test_all
def test_the_command_takes_configs_from_any_folder(built, tmp_path):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["fedjax-ssl"].partition(":")
    words = ["--config=configs/fedanchor_mnist.py:semifl", "--config.seed=one"]
    code = f"import sys; sys.argv[1:] = {words!r}; import {module} as program; sys.exit(program.{function}())"
    environment = {**os.environ, "PYTHONPATH": str(built)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "--config.seed=" in done.stderr, done.stderr
    helped = subprocess.run(
        [sys.executable, "-m", "fedjax_ssl", "sweep", "--help"], cwd=tmp_path, env=environment, capture_output=True
    )
    assert b"python -m fedjax_ssl sweep FILE" in helped.stdout and b"launch.py" not in helped.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_config_is_found_from_any_folder_and_the_users_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    library = CONFIGS / "quickstart.py"
    assert find_config_file("configs/quickstart.py") == find_config_file("quickstart.py") == str(library)
    assert find_config_file("configs/sweeps/mnist_methods.py") == str(CONFIGS / "sweeps" / "mnist_methods.py")
    assert parse_config("configs/quickstart.py:semifl", []).method == "semifl"
    (tmp_path / "quickstart.py").write_text("def get_config(): return {}")
    assert find_config_file("quickstart.py") == "quickstart.py"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_config_file("~/quickstart.py") == str(tmp_path / "quickstart.py")
    with pytest.raises(UserError, match=r"there is no config file quickstar\.py; the nearest is"):
        find_config_file("quickstar.py")


@pytest.mark.parametrize("has_venv", [True, False])
def test_launch_py_of_a_python_without_libraries(has_venv, tmp_path):
    """After `make quickstart`, the system's Python hands over to .venv's; before, it says what to do."""
    shutil.copy(ROOT / "launch.py", tmp_path)
    if has_venv:
        python = tmp_path / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\necho "handed over: $*"\n')
        python.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    bare = [sys.executable, "-S", "-I", str(tmp_path / "launch.py"), "--workdir=runs/a b"]  # -S: no installed libraries
    done = subprocess.run(bare, env=environment, capture_output=True, text=True, cwd=tmp_path)
    if has_venv:
        assert done.stdout == f"handed over: {tmp_path / 'launch.py'} --workdir=runs/a b\n" and done.returncode == 0
    else:
        assert done.returncode == 1 and done.stderr.startswith(
            "error: fedjax_ssl is not installed for this Python; make"
        )
