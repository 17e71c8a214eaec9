"""What a person sees while a run goes on: a progress bar in a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class RoundProgress:
    """Progress in rounds, as a context manager."""

    def __init__(self, num_rounds: int, done: int, console: Console | None = None):
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._num_rounds = num_rounds
        self._last_line = 0.0
        self._bar = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=num_rounds, completed=done, figures="compiling")

    def __enter__(self) -> "RoundProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def update(self, metrics: dict[str, Any]) -> None:
        """Shows a round's figures."""
        figures = describe(metrics)
        self._bar.update(self._task, completed=metrics["round"], figures=figures)
        due = time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES
        if not self._console.is_terminal and (due or metrics["round"] == self._num_rounds):
            self._last_line = time.monotonic()
            self.say(f"round {metrics['round']}/{self._num_rounds}  {figures}")


def describe(metrics: dict[str, Any]) -> str:
    """The figures of a round in a few words: the labels' accuracies are rule by rule, the one in use first."""
    prefix = "pseudo_label_accuracy_"
    labels = ", ".join(
        f"{name.removeprefix(prefix).replace('_', ' ')} {100 * value:.1f} %"
        for name, value in metrics.items()
        if name.startswith(prefix)
    )
    test = f"test {100 * metrics['test_accuracy']:.2f} %"
    return f"{test}  labels: {labels}  qualified {metrics['qualified_per_client']:.1f}" if labels else test
