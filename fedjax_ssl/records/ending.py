"""Why a run ends: all rounds are done, or `config.stop`.

Patience and bytes depend only on the records of the rounds, so a run that was killed and resumed ends in the same
round.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

ROUNDS, PATIENCE, BYTES, SECONDS = "rounds", "patience", "bytes", "seconds"
VALIDATION_ACCURACY = "validation_accuracy"  # the metric that chooses the best round


class Spent(NamedTuple):
    """What the rules of `config.stop` need to know about the rounds so far."""

    rounds: int = 0
    best: float = -1.0  # validation accuracy
    best_round: int = 0  # the first with `best`
    waited: int = 0  # rounds from `best_round` to the newest round with a test
    used: int = 0  # bytes sent down and up
    largest: int = 0  # bytes of the round with the most

    def after(self, line: Mapping[str, Any]) -> "Spent":
        """Adds one more line of metrics.jsonl."""
        accuracy, sent = line.get(VALIDATION_ACCURACY), line["bytes_down"] + line["bytes_up"]
        rounds, better = self.rounds + 1, accuracy is not None and accuracy > self.best
        best_round = rounds if better else self.best_round
        return Spent(
            rounds=rounds,
            best=accuracy if better else self.best,
            best_round=best_round,
            waited=self.waited if accuracy is None else rounds - best_round,
            used=self.used + sent,
            largest=max(self.largest, sent),
        )

    def reason(self, stop: Mapping[str, Any]) -> str:
        """PATIENCE or BYTES if that rule of `config.stop` ends the run here, else ''."""
        if stop["patience"] and self.waited >= stop["patience"]:
            return PATIENCE
        if stop["bytes"] and self.rounds and self.used + self.largest > stop["bytes"]:
            return BYTES
        return ""


def spent(lines: Iterable[Mapping[str, Any]]) -> Spent:
    """Sums up the lines of metrics.jsonl, from the first round on."""
    return functools.reduce(Spent.after, lines, Spent())


def in_words(ended_by: str, stop: Mapping[str, Any]) -> str:
    """Why a run has fewer rounds than `num_rounds`, in words; '' if it has all."""
    return {
        PATIENCE: f"stop.patience, {stop['patience']} rounds without a better validation accuracy",
        BYTES: f"stop.bytes, one more round could use more than {stop['bytes']:,.0f} bytes in all",
        SECONDS: f"stop.seconds, {stop['seconds']:g} s of rounds are over; another start goes on",
    }.get(ended_by, "")


def fields_to_raise(reasons: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """The fields whose larger values let runs go on that ended for these reasons; see `forbidden_changes`."""
    fields = {PATIENCE: "stop.patience", BYTES: "stop.bytes"}
    if config["schedule"] == "constant":
        fields[ROUNDS] = "num_rounds"
    return [field for reason, field in fields.items() if reason in set(reasons)]
