"""What is shown while nothing else moves, and warnings that a run gives early."""

import io
import os
import pty
import re
import subprocess
import sys
import time
import types

import pytest

from fedjax_ssl.run.loop import Turn
from fedjax_ssl.run.observe import clock
from fedjax_ssl.run.observe.advice import Advise
from fedjax_ssl.run.observe.clock import doing
from tests.helpers.runs import ROOT, make_tiny_config


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Screen(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.fixture
def screen(monkeypatch):
    def make(is_terminal):
        screen = Screen(is_terminal)
        monkeypatch.setattr(clock.sys, "stderr", screen)
        monkeypatch.setattr(clock, "REFRESH_SECONDS", 0.01)
        monkeypatch.setattr(clock, "FIRST_LINE_SECONDS", 0.02)
        return screen

    return make


def test_a_terminal_has_one_line_that_moves_and_goes(screen):
    shown = screen(True)
    with doing("outer"):
        wait_until(lambda: shown.getvalue().count("outer  0:00:00") > 2)
        with doing("inner") as task:
            wait_until(lambda: "\rinner  0:00:0" in shown.getvalue())
            task.text = "other"
            wait_until(lambda: "\rother  0:00:0" in shown.getvalue())
        before = shown.getvalue().count("outer")
        wait_until(lambda: shown.getvalue().count("outer") > before)
    assert shown.getvalue().endswith("\r\x1b[K") and "\n" not in shown.getvalue()


def test_elsewhere_lines_come_ever_more_rarely(screen):
    shown = screen(False)
    with doing("quick"):
        pass
    with doing("slow") as task:
        wait_until(lambda: shown.getvalue().count("\n") >= 4)
        assert task.next_line >= 16 * clock.FIRST_LINE_SECONDS
    lines = shown.getvalue().splitlines()
    assert all(re.fullmatch(r"slow  0:00:\d\d", line) for line in lines)


@pytest.mark.processes
def test_a_terminal_sees_at_once_what_a_command_does(tmp_path):
    """In a real terminal the first line appears before JAX is imported; XLA's log stays hidden."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time\n"
        "from fedjax_ssl.run.observe.clock import doing\n"
        "import fedjax_ssl.cli.commands as commands\n"
        "def run(*_):\n"
        "    with doing('loading JAX'): time.sleep(0.5)\n"
        "    assert 'jax' not in sys.modules\n"
        "commands.run = run\n"
        "from fedjax_ssl.__main__ import enter\n"
        "import os\n"
        "status = enter()\n"
        "assert os.environ['TF_CPP_MIN_LOG_LEVEL'] == '3'\n"
        "sys.exit(status)\n"
    )
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}
    process = subprocess.Popen(
        [sys.executable, str(script)], stderr=theirs, stdout=theirs, env={**environment, "PYTHONPATH": str(ROOT)}
    )
    status = process.wait(60)
    os.close(theirs)
    shown = os.read(ours, 10000).decode()
    os.close(ours)
    assert status == 0, shown
    assert shown.startswith("\rloading JAX  0:00:00\x1b[K") and shown.endswith("\r\x1b[K")


def turn(done, qualified, seconds, healthy=True):
    """The listeners' turn after a round; `qualified` has an entry for each run."""
    lines = [[{"round": done, "qualified_per_client": count}] for count in qualified]
    timings = [[{"round": done, "seconds": seconds / len(qualified)}] for _ in qualified]
    return Turn(done, False, None, lines, timings, [healthy] * len(qualified))


def advice(rounds, runs=1, **fields):
    """The warnings over rounds, each given as (qualified of each run, seconds)."""
    said = []
    listener = Advise(make_tiny_config(**fields), types.SimpleNamespace(runs=[None] * runs), said.append)
    listener.take(Turn(0, False, None, [[]] * runs, [[]] * runs, [True] * runs))
    for number, (qualified, seconds) in enumerate(rounds, start=1):
        listener.take(turn(number, qualified, seconds))
    return said


def test_five_rounds_without_a_label_are_told_once():
    none, some = ([0.0], 0.1), ([1.5], 0.1)
    assert advice([none] * 4 + [some] + [none] * 4, method="fixmatch") == []
    (line,) = advice([some] + [none] * 12, method="fixmatch")
    assert re.search("no pseudo-label has qualified for 5 rounds.*lower fixmatch.threshold", line)
    assert advice([([None], 0.1)] * 9) == []  # a method without pseudo-labels
    (line,) = advice([([3.0, 0.0], 0.1)] * 6, runs=2, method="fixmatch")  # one of two seeds


def test_a_run_of_days_is_told_once_by_the_later_rounds():
    rounds = [([1.0], 5000.0)] + [([1.0], 100.0)] * 9  # the first round includes a warm-up
    (line,) = advice(rounds, num_rounds=2000)
    assert re.search(r"at 100 s a round the other 1996 take 2.3 days.*num_rounds, clients_per_round", line)
    assert advice(rounds, num_rounds=800) == []
    (line,) = advice([([1.0, 1.0], 100.0)] * 9, runs=2, num_rounds=2000)
    assert "at 100 s" in line


@pytest.mark.parametrize("field", ["fedtrinet.warm_up_rounds", "cbafed.warm_up_rounds", "fedlabel.unlabelled_from"])
def test_a_run_that_ends_before_the_unlabelled_images_is_told_first(field):
    run = {"method": field.split(".")[0], "client.learning_rate": 0.003, "client.momentum": 0.0, "num_rounds": 40}
    assert advice([], **run, **{field: 39}) == []
    (line,) = advice([], **run, **{field: 40})
    assert re.match(f"warning: all 40 rounds train on labels alone, since {field} is 40; lower it", line)


@pytest.mark.parametrize(("fields", "warns"), [
    ({}, True),  # 0.03 with a momentum of 0.9
    ({"fedlabel.upload": "two_models"}, False),
    ({"client.learning_rate": 0.003, "client.momentum": 0.0}, False),  # the paper's
    ({"client.learning_rate": 0.0031}, True),  # an effective rate of 0.031
    ({"client.learning_rate": 0.0029}, False),
    ({"aggregation.optimizer": "fedavgm", "aggregation.learning_rate": 0.5, "aggregation.momentum": 0.0}, False),
    ({"aggregation.optimizer": "fedavgm", "aggregation.learning_rate": 0.5, "aggregation.momentum": 0.5}, True),
    ({"aggregation.optimizer": "fedadam"}, False),
])  # fmt: skip
def test_a_sum_of_two_long_steps_is_told_before_the_first_round(fields, warns):
    base = {"method": "fedlabel", "client.learning_rate": 0.03, "client.momentum": 0.9}
    said = advice([], **{**base, **fields})
    assert len(said) == warns
    assert not warns or re.match("warning: fedlabel adds two changes .* aggregation.learning_rate=0.5", said[0])
