"""Tab completion: what bash offers for a line."""

import shutil
import subprocess

import pytest

import launch
from fedjax_ssl.cli.source_docs import read_fields
from tests.helpers.runs import ROOT


@pytest.fixture
def offered(capsys, tmp_path):
    assert launch.main(["completion", "bash"]) == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)

    def complete(line):
        program = f"source {tmp_path / 'completion'}; COMP_LINE={line!r}; COMP_POINT={len(line)}; compopt() {{ :; }}; "
        program += "_fedjax_ssl; printf '%s\\n' \"${COMPREPLY[@]}\""
        done = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    return complete


@pytest.mark.parametrize(
    "line, found",
    [
        ("fedjax-ssl ex", ["export"]),
        ("fedjax-ssl export runs/a --f", ["--format="]),
        ("fedjax-ssl sweep configs/sweeps/mnist_met", ["configs/sweeps/mnist_methods.py"]),
        # bash keeps the text before the =
        ("fedjax-ssl --config=configs/quick", [f"configs/quickstart{more}.py" for more in ("", "_table", "_text")]),
        ("fedjax-ssl --config.client.learning_ra", ["--config.client.learning_rate="]),
        ("fedjax-ssl --seed=1 --config.data.partition=dirichlet_p", ["dirichlet_pairs"]),
        ("fedjax-ssl sweep configs/sweeps/mnist_methods.py --config.method=semif", ["semifl"]),
        ("fedjax-ssl predict --workdir=REA", ["README.md"]),
        ("fedjax-ssl report pyproj", ["pyproject.toml"]),
        ("fedjax-ssl report --config.cl", []),
    ],
)
def test_bash_offers(line, found, offered):
    assert offered(line) == found


def test_every_command_and_every_field_is_offered(offered):
    assert set(launch.COMMANDS) <= set(offered("fedjax-ssl "))
    assert {f"--config.{name}=" for name in read_fields()} == set(offered("fedjax-ssl profile --config."))


def test_the_script_for_zsh_is_valid(capsys, tmp_path):
    assert launch.main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef fedjax-ssl") and "--config.client.learning_rate=" in text
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "completion").write_text(text)
    subprocess.run([zsh, "-n", tmp_path / "completion"], check=True)


def test_another_shell_is_an_error(capfd):
    assert launch.main(["completion", "fish"]) == 2
    assert capfd.readouterr().err == "error: no completion for 'fish'; known: bash, zsh\n"
