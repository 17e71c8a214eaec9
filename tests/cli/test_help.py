"""The help texts: they describe the program, appear at once and fit into 80 columns."""

import subprocess
import sys

import pytest

import launch
from fedjax_ssl.base.fields import ARGUMENT_FIELDS, RECIPES, WORDS
from tests.helpers.runs import ROOT


def test_overview(capsys):
    assert launch.main(["--help"]) == 0
    text = capsys.readouterr().out
    arguments = [*RECIPES, *WORDS, *(f"{name}=" for name in ARGUMENT_FIELDS)]
    assert [word for word in (*launch.COMMANDS, *arguments, "--workdir", "Examples") if word not in text] == []
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", launch.COMMANDS)
def test_each_command_has_its_own_help(command, capsys):
    assert launch.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"python launch.py {command}" in text and max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 24
    for flag, (_, meaning) in launch.COMMANDS[command].flags.items():
        assert f"--{flag}" in text and " ".join(meaning.split()) in " ".join(text.split())


@pytest.mark.test_all
def test_help_waits_for_no_library():
    program = (
        "import launch, sys; launch.main(['--help']); launch.main(['sweep', '--help']);"
        "sys.exit(not {'jax', 'numpy', 'rich', 'tensorboardX'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.test_all
def test_training_waits_for_no_library_of_other_commands():
    program = (
        "import sys; from fedjax_ssl import train; from fedjax_ssl.data.packages import read_digits; read_digits();"
        "sys.exit(not {'scipy.stats', 'sklearn', 'matplotlib', 'PIL', 'tensorboardX'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
