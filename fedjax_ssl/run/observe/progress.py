"""Progress of a run: a bar in a terminal, plain lines elsewhere."""

import collections
import contextlib
import datetime
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from fedjax_ssl.engine.evaluation import RULE
from fedjax_ssl.run.observe.clock import doing
from fedjax_ssl.run.observe.log import NORMAL, QUIET, VERBOSE, note, shows

SECONDS_BETWEEN_LINES = 10.0
UPDATES_FOR_SPEED = 20  # only the latest ones, as the speed of rounds changes


class RoundProgress:
    """Shows the progress in rounds; a context manager."""

    def __init__(
        self, num_rounds: int, done: int, title: str = "", console: Console | None = None, measured: str = "test"
    ):
        """Shows nothing until the context is entered.

        Args:
            num_rounds: of the whole run.
            done: rounds that are already done.
            title: names the run among several.
            console: where to print; default: stderr.
            measured: the set that is evaluated each round, see `fedjax_ssl.records.words.measured_each_round`.
        """
        self._console = console or _Console(file=sys.stderr, highlight=False)
        self._num_rounds, self._title, self._measured = num_rounds, title, measured
        self._last_line = -math.inf
        self._first_round = contextlib.ExitStack()
        # (time, rounds done) of the latest updates. Rich's own estimate disappears if a round takes long.
        self._seen = collections.deque([(time.monotonic(), done)], maxlen=UPDATES_FOR_SPEED)
        # In a narrow terminal the title wraps and the bar shrinks; the numbers stay complete.
        self._bar = _Bar(
            *([TextColumn("{task.description}", markup=False, table_column=Column())] if title else []),
            TextColumn("round {task.completed}/{task.total}"),
            BarColumn(None, table_column=Column(min_width=4, max_width=24)),
            _Left(table_column=Column(no_wrap=True)),
            console=self._console,
            disable=not (self._console.is_interactive and shows(NORMAL)),
        )
        self._task = self._bar.add_task(title, total=num_rounds, completed=done, left="", figures="")

    def __enter__(self) -> "RoundProgress":
        self._seen[0] = (time.monotonic(), self._seen[0][1])
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._first_round.close()
        self._bar.stop()

    def begin(self) -> None:
        """Marks the start of the first round: the time before it does not count for the estimate."""
        self._seen[0] = (time.monotonic(), self._seen[0][1])
        if not self._console.is_interactive:
            self._first_round.enter_context(doing(f"round {self._seen[0][1] + 1}"))

    def say(self, text: str) -> None:
        """Prints a line above the bar and in run.log."""
        note(text)
        if shows(QUIET if text.startswith("warning: ") else NORMAL):
            with contextlib.suppress(OSError):  # as in `log.show`
                self._console.print(text, markup=False, soft_wrap=True)

    def update(self, metrics: dict[str, Any], is_last: bool = False) -> None:
        """Shows a round's figures and the estimated time left; a rule may make a round before `num_rounds` the last."""
        self._first_round.close()
        done, figures = metrics["round"], describe(metrics, self._measured)
        self._seen.append((time.monotonic(), done))
        is_last = is_last or done == self._num_rounds
        left = "" if is_last else self._time_left()
        self._bar.update(self._task, completed=done, left=left, figures=figures)
        due = shows(VERBOSE) or time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES
        line = "  ".join(filter(None, [self._title, f"round {done}/{self._num_rounds}", left, figures]))
        if not self._console.is_interactive and (due or is_last):
            self._last_line = time.monotonic()
            self.say(line)
        else:
            note(line)

    def _time_left(self) -> str:
        (before, first), (now, done) = self._seen[0], self._seen[-1]
        if done == first:
            return ""
        seconds = (now - before) / (done - first) * (self._num_rounds - done)
        return f"{datetime.timedelta(seconds=math.ceil(seconds))} left"


class _Console(Console):
    """A console that says no more when its reader has ended; Rich's own would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class _Left(ProgressColumn):
    """The time left; until it is known, the time so far."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["left"] or str(datetime.timedelta(seconds=int(task.elapsed or 0))))


class _Bar(Progress):
    """The bar with the figures below it, since both do not fit on one line of 80 columns."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        for task in self.tasks:
            if task.fields["figures"]:
                yield Text(task.fields["figures"])


def describe(metrics: dict[str, Any], measured: str = "test") -> str:
    """A round's figures as short text: at most 80 characters for two labelling rules on the test set.

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
    return f"{measured} {100 * metrics[f'{measured}_accuracy']:.2f} %{labels}{qualified}"


def title_of(seeds: tuple[int, ...], together: list[int]) -> str:
    """Which of several seeds' runs is shown; '' for a single run.

    Args:
        seeds: of the whole command, in their order.
        together: those in training now; the figures of the first one are shown.
    """
    if not seeds:
        return ""
    shown, *others = together
    if others:
        return f"seed {shown} (with {', '.join(map(str, others))})"
    return f"seed {shown}" + (f" ({seeds.index(shown) + 1} of {len(seeds)})" if len(seeds) > 1 else "")
