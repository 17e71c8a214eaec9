"""Warnings during a run: no pseudo-label qualifies, or training would take days."""

from collections.abc import Callable

from ml_collections import ConfigDict

from fedjax_ssl.imports import name_of
from fedjax_ssl.methods import find_method
from fedjax_ssl.run.loop import Listener, RunsTogether, Turn

ROUNDS_WITHOUT_LABELS = 5
ROUNDS_FOR_SPEED = 3  # after as many rounds the time left is estimated; the first round does not count
DAY = 24 * 60 * 60


class Advise(Listener):
    """Warns once if no pseudo-label qualified for several rounds, and once if the run will take longer than a day.

    Before the first round it prints what the method's entry advises for the configuration.
    """

    def __init__(self, config: ConfigDict, group: RunsTogether, say: Callable[[str], None]):
        """Prints the method's advice.

        Args:
            config: of the whole command.
            group: the runs in training.
            say: prints a line.
        """
        self._config, self._say = config, say
        self._without = [0] * len(group.runs)
        self._seconds: list[float] = []
        self._has_warned = self._has_foretold = False
        advice = find_method(config.method).advice(config)
        if advice:
            say(f"warning: {advice}")

    def take(self, turn: Turn) -> None:
        for index, lines in enumerate(turn.lines):
            for line in lines:
                nobody = line.get("qualified_per_client") == 0
                self._without[index] = self._without[index] + 1 if nobody else 0
        # A dispatch's seconds are divided among its rounds and runs.
        self._seconds += [sum(each["seconds"] for each in of_round) for of_round in zip(*turn.timings)]
        if not self._has_warned and max(self._without) >= ROUNDS_WITHOUT_LABELS:
            self._has_warned = True
            self._say(
                f"warning: no pseudo-label has qualified for {max(self._without)} rounds: clients learn nothing from "
                f"unlabelled images; {self._what_helps()}"
            )
        if not self._has_foretold and len(self._seconds) > ROUNDS_FOR_SPEED:
            self._has_foretold = True
            self._foretell(turn.done)

    def _what_helps(self) -> str:
        section = name_of(self._config.method)
        has_field = section in self._config and "threshold" in self._config[section]
        field = f"{section}.threshold" if has_field else "threshold of the method"
        return f"a lower {field} or more server.pretrain_epochs may help"

    def _foretell(self, done: int) -> None:
        each = sum(self._seconds[1:]) / len(self._seconds[1:])
        rest = each * (self._config.num_rounds - done)
        if rest <= DAY:
            return
        self._say(
            f"warning: at {each:.0f} s a round the other {self._config.num_rounds - done} take {rest / DAY:.1f} days "
            "on this machine; shorter: fewer num_rounds, clients_per_round, client.epochs or data.examples_per_client, "
            "a smaller model.name, or a GPU"
        )
