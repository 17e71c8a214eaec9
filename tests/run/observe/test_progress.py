"""What is shown of a run: whole numbers in narrow terminals, the time left, and the run's name."""

import io
import re

import pytest
from rich.console import Console

from fedjax_ssl.run.loop import Turn
from fedjax_ssl.run.observe import progress as module
from fedjax_ssl.run.observe.progress import RoundProgress, describe

METRICS = {
    "test_accuracy": 0.93211,
    "pseudo_label_accuracy": 0.9712,
    "pseudo_label_accuracy_anchor_head": 0.9712,
    "pseudo_label_accuracy_classification_head": 0.95,
    "qualified_per_client": 57.23,
}
FIGURES = "test 93.21 %  labels: anchor 97.1 %, classification 95.0 %  qualified 57.2"


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when set; a round takes two minutes, longer than Rich's own estimates last."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("width", [40, 80])
def test_a_bar_keeps_its_numbers_in_a_narrow_terminal(width, clock):
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, highlight=False, _environ={}, get_time=lambda: clock[0]
    )
    with RoundProgress(400, 98, "seed 1 (2 of 3)", console=console) as progress:
        for number in (100, 102):
            clock[0] += 240
            progress.update({**METRICS, "round": number})
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).split("\r")[-1]
    assert "round 102/400" in shown and "9:56:00" in shown and "…" not in shown
    for part in ("seed 1", "93.21 %", "97.1 %", "95.0 %", "57.2"):
        assert part in shown
    assert max(len(line) for line in shown.splitlines()) <= width
    if width >= 80:
        assert FIGURES in shown and "seed 1 (2 of 3)" in shown


@pytest.fixture
def plain(clock):
    return Console(stderr=True, force_terminal=False, get_time=lambda: clock[0])


def test_plain_lines_say_the_same(clock, plain, capfd):
    with RoundProgress(4, 0, "seed 1 (2 of 3)", console=plain) as progress:
        for number, seconds in [(1, 30), (2, 11), (3, 1), (4, 1)]:
            clock[0] += seconds
            progress.update({**METRICS, "round": number})
    assert capfd.readouterr().err.splitlines() == [
        f"seed 1 (2 of 3)  round 1/4  {FIGURES}",
        f"seed 1 (2 of 3)  round 2/4  0:00:22 left  {FIGURES}",
        f"seed 1 (2 of 3)  round 4/4  {FIGURES}",  # the line between came too soon
    ]


def test_labels_that_nobody_knows_are_not_scored():
    unknown = {"test_accuracy": 0.93211, "pseudo_label_accuracy": float("nan"), "qualified_per_client": 57.23}
    assert describe(unknown) == "test 93.21 %  qualified 57.2"


def test_between_tests_the_newest_accuracy_is_shown_with_its_round(plain, capfd):
    lines = [{"round": 6, "qualified_per_client": 1.0}, {"round": 7, "test_accuracy": 0.5}, {"round": 8}]
    with RoundProgress(8, 5, console=plain) as progress:
        for shown in (lines[:1], lines[1:]):  # the dispatches of a resumed run
            progress.take(Turn(shown[-1]["round"], True, None, [shown], [[]], [True]))
    assert capfd.readouterr().err.splitlines() == ["round 6/8", "round 8/8  test 50.00 % (round 7)"]
