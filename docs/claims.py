"""The page about the papers' claims, from docs/claims/claims.toml and the runs' records in docs/claims/BOARD.csv.

    python docs/claims.py add WORKDIR BOARD    # the finished runs of a sweep of configs/sweeps/claims.py
    python docs/claims.py    # prints the page; the site has it as claims.md

docs/board_records.py says what a record is, and checks it. A claim may also be answered by the leaderboard's records.
The page has no difference and no verdict that is not computed from records.
"""

import functools
import pathlib
import statistics
import tomllib
from collections import Counter
from typing import Any

import numpy as np
from board_records import Boards, command, paired, per_seed
from leaderboard import BOARDS as LEADERBOARD

from fedjax_ssl.records.runs import RunRecords
from fedjax_ssl.report.look import to_markdown
from fedjax_ssl.report.table import LAST, half_interval
from fedjax_ssl.sweep import load_sweep

DOCS = pathlib.Path(__file__).parent
SEEDS, OTHERS = ("FedAnchor", "SemiAnAgg", "FedIL", "FedLabel"), "Other methods"
ACCURACY, DISTANCES = "accuracies", "distances"
HOLDS, NOT, OPEN, TO_DO = "holds", "does not hold", "cannot be told", "not run"
UNKNOWN = "No reason was found; no single change has been tried."
MARGIN = 1.0  # points: less than this is no difference


def mean_of(name: str, rounds: slice = slice(None), percent: float = 100.0) -> Any:
    """The mean of a metric over some rounds, such as all or the last; None if none measured it."""

    def measure(run: RunRecords) -> float | None:
        values = run.values(name)[rounds]
        return percent * float(np.nanmean(values)) if np.isfinite(values).any() else None

    return measure


# Columns of these boards' records beyond the leaderboard's: means over all rounds of a run, in percent.
MEASURES = {
    "curve": lambda run: 100 * float(run.accuracy().mean()),  # of all tests: higher if accuracy rises earlier
    "labels right": mean_of("pseudo_label_accuracy"),
    "classifier right": mean_of("pseudo_label_accuracy_classification_head"),
    "passing": mean_of("qualified_share"),
    "first changes": mean_of("update_norm", slice(LAST), 1.0),  # the norm of the global model's change in a round
    "last changes": mean_of("update_norm", slice(-LAST, None), 1.0),
}
BOARDS = Boards(DOCS.parent / "configs" / "sweeps" / "claims.py", DOCS / "claims", MEASURES)
HEAD = f"""# The papers' claims, tested

What the papers of FedAnchor, SemiAnAgg, FedIL and FedLabel claim, each table, ablation and figure
with an order in it, and what we measured: small networks, 20 clients, 30 or 40 rounds, on MNIST and
scikit-learn's digits. **Our scale is not the papers'**: a claim that fails here may hold with their
networks, data and rounds. Then follows a main claim of some other methods.

All rows of a board have the same clients, labels and numbers of steps, and as many tries of their
settings on validation images. They start from fresh weights, on `semianagg_warm_digits` from the
labelled client's model, on `semianagg_unlabelled_digits` from FedU's, trained without labels. Five
seeds, thirty on `spread_digits`, where the distances of a row's accuracies from their median say how
much seeds differ. A difference is paired by seed, with its 95 % confidence interval by Student's t.
`claims.toml` in `docs/claims/` has the claims, the csv files the runs.

| verdict | if the interval of the difference |
|---|---|
| {HOLDS} | is above 0; if the paper claims no difference: is within {MARGIN:g} point of 0 |
| {NOT} | is below 0, or below {MARGIN:g} if the paper's gain is larger; if it claims no difference: excludes 0 |
| {OPEN} | is anything else |
| {TO_DO} | is not there yet; minutes are an estimate for one core |

With this many intervals about one of twenty misses by chance.

```
python launch.py sweep configs/sweeps/claims.py:BOARD --workdir=runs/BOARD --tries=6
python docs/claims.py add runs/BOARD BOARD
python docs/claims.py    # makes this page
```
"""


def load() -> dict[str, Any]:
    """The claims and the boards' estimates."""
    return tomllib.loads((DOCS / "claims" / "claims.toml").read_text(encoding="utf-8"))


@functools.cache
def read(board: str) -> list[dict[str, str]]:
    """A board's records, also of the leaderboard; [] without any."""
    place, _, name = board.rpartition("/")
    return (LEADERBOARD if place else BOARDS).agreed(name)


def measured(board: str, row: str, measure: str) -> dict[str, float]:
    """Seed -> a measure of a row; 'distances' are those of its accuracies from their median."""
    values = per_seed(read(board), ACCURACY if measure == DISTANCES else measure).get(row, {})
    if measure != DISTANCES or not values:
        return values
    middle = statistics.median(values.values())
    return {seed: abs(value - middle) for seed, value in values.items()}


def differences(run: dict[str, str]) -> dict[str, float]:
    """A comparison of claims.toml: seed -> a row minus another, for the seeds that both have."""
    if "less" in run:
        other = {**run, "board": run["less"]}
        parts = [differences({name: each[name] for name in each if name != "less"}) for each in (run, other)]
        return paired({"own": parts[0], "less": parts[1]}, "own", "less")
    measure, board = run.get("measure", ACCURACY), run["board"]
    own = measured(board, run["row"], measure)
    than = measured(run.get("than_board", board), run["than"], run.get("than_measure", measure))
    return paired({"own": own, "than": than}, "own", "than")


def verdict(values: list[float], points: float | None) -> str:
    """The verdict by the rule of the page.

    Args:
        values: the difference of each seed, at least two.
        points: the paper's gain; 0: it claims no difference; None: a gain without a figure.
    """
    mean, half = statistics.mean(values), half_interval(values)
    low, high = mean - half, mean + half
    if points == 0:
        return HOLDS if max(-low, high) <= MARGIN else NOT if low > 0 or high < 0 else OPEN
    if low > 0:
        return HOLDS
    return NOT if high < 0 or (high < MARGIN and (points or 0) > MARGIN) else OPEN


def compared(run: dict[str, str]) -> str:
    """What is compared, in words."""
    measure = f"{run['measure']}: " if "measure" in run else ""
    row, than = run["row"], run["than"]
    if "than_measure" in run:
        measure, row, than = f"{row}: ", run["measure"], run["than_measure"]
    boards = f"`{run['board']}`" + "".join(f" minus `{run[name]}`" for name in ("than_board", "less") if name in run)
    return f"{measure}{row} minus {than}, {boards}"


def difference_of(values: list[float]) -> str:
    """The mean of the seeds' differences with its interval, in points."""
    return f"{statistics.mean(values):+.2f} ± {half_interval(values):.2f}"


def answers(claim: dict[str, Any], minutes: dict[str, int]) -> list[dict[str, str]]:
    """The page's rows of a claim: one for each comparison that was run, or one that says what it would cost."""
    rows, left = [], []
    for run in claim.get("runs", []):
        values = list(differences(run).values())
        if len(values) > 1:
            found = verdict(values, claim.get("points"))
            rows.append({"ours": compared(run), "difference": difference_of(values), "verdict": found})
        else:
            needed = {run[name] for name in ("board", "than_board", "less") if name in run}
            left.append((sum(minutes.get(board, 0) for board in needed), compared(run)))
    if not rows:
        time, ours = min(left) if left else (0, claim["cost"])
        rows = [{"ours": ours, "difference": f"about {time} minutes" if time else "-", "verdict": TO_DO}]
    said = {"where": claim["where"], "the paper says": claim["says"]}
    return [{**(dict.fromkeys(said, "") if place else said), **row} for place, row in enumerate(rows)]


def changes(claim: dict[str, Any]) -> list[str]:
    """The single changes that were tried for a claim, each with what it changed."""
    tried = {compared(run): list(differences(run).values()) for run in claim.get("tried", [])}
    return [f"{name}: {difference_of(values)}." for name, values in tried.items() if len(values) > 1]


def page() -> str:
    """The page."""
    read.cache_clear()
    found = load()
    papers: dict[str, list[dict[str, str]]] = {}
    reasons: dict[str, list[str]] = {}
    for claim in found["claim"]:
        paper = claim["paper"] if claim["paper"] in SEEDS else OTHERS
        rows = answers(claim, found["core_minutes"])
        if paper == OTHERS:
            rows[0]["where"] = f"{claim['paper']}, {claim['where']}"
        papers.setdefault(paper, []).extend(rows)
        if any(row["verdict"] == NOT for row in rows):
            why = " ".join([*claim.get("why", "").split(), *changes(claim)]) or UNKNOWN
            reasons.setdefault(paper, []).append(f"* *{claim['says']}* {why}")
    parts = [HEAD]
    counts = Counter(row["verdict"] for rows in papers.values() for row in rows)
    parts.append("Comparisons: " + ", ".join(f"{counts[name]} {name}" for name in (HOLDS, NOT, OPEN, TO_DO)) + ".\n")
    for paper, rows in papers.items():
        bold = {(place, "verdict") for place, row in enumerate(rows) if row["verdict"] in (HOLDS, NOT)}
        parts.append(f"## {paper}\n\n{to_markdown(rows, bold).rstrip()}\n")
        if paper in reasons:
            parts.append("\n".join(["Why a claim does not hold:\n", *reasons[paper], ""]))
    parts.append(f"## Boards\n\n{to_markdown(boards_table(found['core_minutes'])).rstrip()}\n")
    return "\n".join(parts)


def boards_table(minutes: dict[str, int]) -> list[dict[str, Any]]:
    """A row for each board: the mean accuracies of its rows, the best first, and the rows without a record."""
    table = []
    for board, time in minutes.items():
        lines = read(board)
        rows = {row: statistics.mean(seeds.values()) for row, seeds in per_seed(lines).items()}
        left = [row for row in load_sweep(f"{BOARDS.sweep}:{board}").methods if row not in rows]
        some = "all" if not rows else ", ".join(left) or "-"
        table.append(
            {
                "board": f"`{board}`",
                "accuracy": "; ".join(f"{row} {rows[row]:.1f}" for row in sorted(rows, key=rows.get, reverse=True)),
                "tries": lines[0]["tries"] if lines else "",
                "commit": ", ".join(sorted({line["commit"] for line in lines})),
                "not run": some if time == 0 or not left else f"{some} (about {time} minutes for the board)",
            }
        )
    return table


if __name__ == "__main__":
    command(BOARDS, page)
