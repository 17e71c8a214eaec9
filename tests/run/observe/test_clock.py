"""What is shown while nothing else moves, and warnings that a run gives early."""

import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from fedjax_ssl.methods import find_method
from fedjax_ssl.run.loop import Turn
from fedjax_ssl.run.observe import clock
from fedjax_ssl.run.observe.clock import doing
from fedjax_ssl.run.observe.listeners import Advise
from tests.helpers.runs import ROOT, make_tiny_config

pytestmark = pytest.mark.test_all


def test_elsewhere_a_long_task_has_one_line(monkeypatch, capfd):
    monkeypatch.setattr(clock, "FIRST_LINE_SECONDS", 0.05)
    with doing("quick"):
        pass
    before = set(threading.enumerate())
    with doing("slow") as task:
        task.text = "slow, second part"
        for thread in set(threading.enumerate()) - before:
            thread.join()  # reading while it writes could lose a part of the line
    assert capfd.readouterr().err == "slow, second part\n"


def test_a_terminal_sees_at_once_what_a_command_does():
    """In a real terminal the first line appears before JAX is imported; messages come above it, and it goes."""
    program = (
        "import sys, time\n"
        "from fedjax_ssl.run.observe import log\n"
        "from fedjax_ssl.run.observe.clock import doing\n"
        "import fedjax_ssl.cli.commands as commands\n"
        "def run(*_):\n"
        "    with doing('loading JAX') as task, doing('inner'):\n"
        "        log.say('a message'); task.text = 'other'; time.sleep(0.5)\n"
        "    assert 'jax' not in sys.modules\n"
        "commands.run = run\n"
        "from fedjax_ssl.__main__ import enter\n"
        "sys.exit(enter())\n"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stderr=theirs,
        stdout=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )
    status = process.wait(60)
    os.close(theirs)
    shown = os.read(ours, 10000).decode()
    os.close(ours)
    assert status == 0, shown
    for words in ("loading JAX  0:00:00", "inner  0:00:00", "other  0:00:00", "a message\r\n"):
        assert words in shown
    assert shown.endswith("\x1b[2K"), shown


def advice(capfd, rounds=(), runs=1, **fields):
    """The warnings over rounds, each given as the qualified labels of each run."""
    config = make_tiny_config(**fields)
    listener = Advise(find_method(config.method).advice(config), runs)
    for number, qualified in enumerate(rounds, start=1):
        lines = [[{"round": number, "qualified_per_client": count}] for count in qualified]
        listener.take(Turn(number, False, None, lines, lines, [True] * runs))
    return capfd.readouterr().err.splitlines()


def test_five_rounds_without_a_label_are_told_once(capfd):
    none, some = [0.0], [1.5]
    assert advice(capfd, [none] * 4 + [some] + [none] * 4, method="fixmatch") == []
    (line,) = advice(capfd, [some] + [none] * 12, method="fixmatch")
    assert re.match("warning: no pseudo-label has qualified for 5 rounds.*lower threshold", line)
    assert advice(capfd, [[None]] * 9) == []  # a method without pseudo-labels
    (line,) = advice(capfd, [[3.0, 0.0]] * 6, runs=2, method="fixmatch")  # one of two seeds


def test_rounds_without_an_upload_are_told(capfd):
    """At the first one, and their number at the end; late uploads that count in the next round are no loss."""

    def told(lines, late_count=False):
        listener = Advise("", 1, late_count)
        for number, line in enumerate(lines, start=1):
            listener.take(Turn(number, number == len(lines), None, [[{"round": number, **line}]], [[]], [True]))
        return capfd.readouterr().err.splitlines()

    none, some, late = {"uploads": 0, "answers": 0}, {"uploads": 2, "answers": 2}, {"uploads": 2, "late_uploads": 2}
    first, last = told([some, none, some, none])
    assert first.startswith("warning: round 2 has no upload") and last == "warning: 2 rounds had no upload"
    assert len(told([none, some])) == 1 and told([some] * 3) == [] and told([{"uploads": 0}] * 3) == []
    assert len(told([late, late])) == 2 and told([late, late], late_count=True) == []


@pytest.mark.parametrize("field", ["fedtrinet.warm_up_rounds", "cbafed.warm_up_rounds", "fedlabel.unlabelled_from"])
def test_a_run_that_ends_before_the_unlabelled_images_is_told_first(field, capfd):
    run = {"method": field.split(".")[0], "client.learning_rate": 0.003, "client.momentum": 0.0, "num_rounds": 40}
    assert advice(capfd, **run, **{field: 39}) == []
    (line,) = advice(capfd, **run, **{field: 40})
    assert re.match(f"warning: all 40 rounds train on labels alone, since {field} is 40; lower it", line)


@pytest.mark.parametrize(("method", "start", "told"), [
    ("sage", "counts clients with and without labels alike", ["some_clients"]),
    ("fedu", "trains its backbone without labels, in its paper for 100 rounds", ["server", "some_clients", "clients"]),
])  # fmt: skip
def test_a_method_is_told_what_it_needs(method, start, told, capfd):
    for labels in ("server", "some_clients", "clients"):
        said = advice(capfd, **{"method": method, "data.labels": labels})
        assert len(said) == (labels in told) and all(line.startswith(f"warning: {method} {start}") for line in said)


@pytest.mark.parametrize(("fields", "warns"), [
    ({}, True),  # 0.03 with a momentum of 0.9
    ({"fedlabel.as_in_code": True}, False),
    ({"client.learning_rate": 0.0031}, True),  # an effective rate of 0.031
    ({"client.learning_rate": 0.0029}, False),
    ({"client.learning_rate": 0.0031, "client.optimizer": "adam"}, False),  # which has no such momentum
    ({"aggregation.optimizer": "fedavgm", "aggregation.learning_rate": 0.5, "aggregation.momentum": 0.0}, False),
    ({"aggregation.optimizer": "fedavgm", "aggregation.learning_rate": 0.5, "aggregation.momentum": 0.5}, True),
])  # fmt: skip
def test_a_sum_of_two_long_steps_is_told_before_the_first_round(fields, warns, capfd):
    base = {"method": "fedlabel", "client.learning_rate": 0.03, "client.momentum": 0.9}
    said = advice(capfd, **{**base, **fields})
    assert len(said) == warns
    assert not warns or re.match("warning: fedlabel adds two changes .* aggregation.learning_rate=0.5", said[0])


@pytest.mark.parametrize("method", ["semianagg", "fedavg_semi", "cbafed"])
def test_a_method_for_wholly_labelled_clients_is_told_if_each_has_a_few_labels(method, capfd):
    few, run = {"data.labels": "clients", "data.labelled_share": 0.1}, {"method": method, "num_rounds": 200}
    for change, number in (
        ({"data.labels": "some_clients"}, 0), ({"data.labelled_share": 1.0}, 0), ({"data.reveal_labels": True}, 0),
        ({}, 1), ({"data.labelled_share": 1.0, "data.labels_per_class": 2}, 1),
    ):  # fmt: skip
        said = advice(capfd, **{**run, "data.reveal_labels": False, **few, **change})
        assert len(said) == number and all(
            f"{method} is made for clients that have labels for all" in line for line in said
        )
