"""Warnings of a run: what its method advises, and that no pseudo-label qualifies."""

from ml_collections import ConfigDict

from fedjax_ssl.methods import find_method
from fedjax_ssl.run.loop import Listener, RunsTogether, Turn
from fedjax_ssl.run.observe.log import warn

ROUNDS_WITHOUT_LABELS = 5


class Advise(Listener):
    """Warns once if no pseudo-label qualified for several rounds; first says what the method's entry advises."""

    def __init__(self, config: ConfigDict, group: RunsTogether):
        """Prints the method's advice for the configuration of the runs in training."""
        self._without = [0] * len(group.runs)
        self._has_warned = False
        advice = find_method(config.method).advice(config)
        if advice:
            warn(advice)

    def take(self, turn: Turn) -> None:
        for index, lines in enumerate(turn.lines):
            for line in lines:
                nobody = line.get("qualified_per_client") == 0
                self._without[index] = self._without[index] + 1 if nobody else 0
        if not self._has_warned and max(self._without) >= ROUNDS_WITHOUT_LABELS:
            self._has_warned = True
            warn(
                f"no pseudo-label has qualified for {max(self._without)} rounds: clients learn nothing from unlabelled "
                "images; a lower threshold of the method or more server.pretrain_epochs may help"
            )
