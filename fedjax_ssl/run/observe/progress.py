"""Progress of a run: a bar in a terminal, plain lines elsewhere."""

import datetime
import math
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from fedjax_ssl.engine.evaluation import RULE
from fedjax_ssl.run.loop import Listener, Turn
from fedjax_ssl.run.observe.clock import terminal
from fedjax_ssl.run.observe.log import NORMAL, VERBOSE, note, say, shows

SECONDS_BETWEEN_LINES = 10.0


class RoundProgress(Listener):
    """Shows the progress of a group's first run in rounds; a context manager."""

    def __init__(
        self, num_rounds: int, done: int, title: str = "", measured: str = "test", console: Console | None = None
    ):
        """Shows nothing until the context is entered. `measured` is the set that is evaluated each round."""
        console = console or terminal()
        self._num_rounds, self._title, self._measured = num_rounds, title, measured
        self._has_bar, self._last_line = console.is_interactive and shows(NORMAL), -math.inf
        self._test: dict[str, Any] | None = None  # the newest line with a test
        # In a narrow terminal the title wraps and the bar shrinks; the numbers stay complete.
        self._bar = _Bar(
            *([TextColumn("{task.description}", markup=False, table_column=Column())] if title else []),
            TextColumn("round {task.completed}/{task.total}"),
            BarColumn(None, table_column=Column(min_width=4, max_width=24)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console,
            disable=not self._has_bar,
            speed_estimate_period=math.inf,  # a round may take longer than Rich's period
        )
        self._task = self._bar.add_task(title, total=num_rounds, completed=done, figures="")

    def __enter__(self) -> "RoundProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def take(self, turn: Turn) -> None:
        tests = [line for line in turn.lines[0] if f"{self._measured}_accuracy" in line]
        self._test = tests[-1] if tests else self._test
        if turn.lines[0]:
            self.update(turn.lines[0][-1], turn.is_last)

    def update(self, metrics: dict[str, Any], is_last: bool = False) -> None:
        """Shows a round's figures and the estimated time left; a rule may make a round before `num_rounds` the last."""
        done, figures = metrics["round"], describe(metrics, self._measured, self._test)
        self._bar.update(self._task, completed=done, figures=figures)
        seconds = self._bar.tasks[0].time_remaining
        left = f"{datetime.timedelta(seconds=seconds)} left" if seconds else ""
        line = "  ".join(filter(None, [self._title, f"round {done}/{self._num_rounds}", left, figures]))
        due = shows(VERBOSE) or time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES
        if not self._has_bar and (due or is_last or done == self._num_rounds):
            self._last_line = time.monotonic()
            say(line)
        else:
            note(line)


class _Bar(Progress):
    """The bar with the figures below it, since both do not fit on one line of 80 columns."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        for task in self.tasks:
            yield Text(task.fields["figures"])


def describe(metrics: dict[str, Any], measured: str = "test", test: dict[str, Any] | None = None) -> str:
    """A round's figures as short text: at most 80 characters for two labelling rules on the test set.

    If the newest `test` is another round's, that round is named.

    If there are several rules, the accuracy of labels is shown for each. 'qualified' is the mean number of
    pseudo-labels per client that pass the threshold. If the true labels are unknown, only 'qualified' is shown.
    """
    rules = {
        name.removeprefix(RULE).removesuffix("_head"): value for name, value in metrics.items() if name.startswith(RULE)
    }
    if not rules and "pseudo_label_accuracy" in metrics:
        rules = {"": metrics["pseudo_label_accuracy"]}
    words = [f"{name.replace('_', ' ')} {100 * value:.1f} %".strip() for name, value in rules.items() if value == value]
    labels = f"  labels: {', '.join(words)}" if words else ""
    qualified = f"  qualified {metrics['qualified_per_client']:.1f}" if rules else ""
    test, name = test or metrics, f"{measured}_accuracy"
    when = "" if test is metrics else f" (round {test['round']})"
    accuracy = f"{measured} {100 * test[name]:.2f} %{when}" if name in test else ""  # none since a run was resumed
    return f"{accuracy}{labels}{qualified}".strip()


def title_of(seeds: tuple[int, ...], together: list[int]) -> str:
    """Which of the runs of `seeds` is shown, the first of those in training `together`; '' for a single run."""
    if not seeds:
        return ""
    shown, *others = together
    if others:
        return f"seed {shown} (with {', '.join(map(str, others))})"
    return f"seed {shown}" + (f" ({seeds.index(shown) + 1} of {len(seeds)})" if len(seeds) > 1 else "")
