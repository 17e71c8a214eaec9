"""The page about the papers' claims, from docs/claims/claims.toml and the runs' records in docs/claims/BOARD.csv.

    python docs/claims.py add WORKDIR BOARD    # the finished runs of a sweep of configs/sweeps/claims.py
    python docs/claims.py    # writes docs/claims.md, and what is gained at our scale into the docstrings of configs/

docs/board_records.py says what a record is, and checks it. A claim may also be answered by the leaderboard's records.
The page has no difference and no verdict that is not computed from records.
"""

import functools
import pathlib
import re
import statistics
import sys
import textwrap
import tomllib
from collections import Counter
from typing import Any

import numpy as np
from board_records import Boards, command, paired, per_seed
from leaderboard import BOARDS as LEADERBOARD

from fedjax_ssl.base.files import replace_file
from fedjax_ssl.records.clients import client_sizes
from fedjax_ssl.records.runs import RunRecords
from fedjax_ssl.report.look import to_markdown
from fedjax_ssl.report.table import LAST, half_interval
from fedjax_ssl.sweep import load_sweep

DOCS = pathlib.Path(__file__).parent
SEEDS, OTHERS = ("FedAnchor", "SemiAnAgg", "FedIL", "FedLabel"), "Other methods"
ACCURACY, DISTANCES = "accuracies", "distances"
HOLDS, NOT, OPEN, TO_DO = "holds", "does not hold", "cannot be told", "not run"
UNKNOWN, UNTRIED = "No reason was found.", " No single change has been tried."
MARGIN = 1.0  # points: less than this is no difference
CONFIGS = sorted((DOCS.parent / "configs").glob("*.py"))
GAIN = re.compile(r"^(At our scale (.+) minus the labels alone is ).*( \(board (.+)\)\.)$", re.MULTILINE)


def mean_of(name: str, rounds: slice = slice(None), percent: float = 100.0) -> Any:
    """The mean of a metric over some rounds, such as all or the last; None if none measured it."""

    def measure(run: RunRecords) -> float | None:
        values = run.values(name)[rounds]
        return percent * float(np.nanmean(values)) if np.isfinite(values).any() else None

    return measure


def weights(run: RunRecords, rounds: slice) -> np.ndarray | None:
    """SemiAnAgg's mean r^k of each client over some rounds, float [K], NaN for those not in each; None without any."""
    found = run.by_client().get("weight_among_unlabelled", np.full((1, 1), np.nan))[rounds].mean(axis=0)
    return found if np.isfinite(found).any() else None


def weight_range(rounds: slice) -> Any:
    """The difference of the largest and the smallest weight, in percent."""

    def measure(run: RunRecords) -> float | None:
        found = weights(run, rounds)
        return None if found is None else 100 * float(np.nanmax(found) - np.nanmin(found))

    return measure


def client_by(pick: Any, figure: Any) -> Any:
    """The number of the client without labels that has the largest or smallest figure."""
    return lambda run: None if (found := weights(run, FIRST)) is None else float(pick(figure(run, found)))


def sizes(run: RunRecords, weight: np.ndarray) -> np.ndarray:
    """The clients' numbers of images, NaN where a client has no weight."""
    return np.where(np.isnan(weight), np.nan, client_sizes(run.class_counts()))


FIRST, FINAL = slice(LAST), slice(-LAST, None)  # rounds
# Columns of these boards' records beyond the leaderboard's: means over all rounds of a run, in percent.
MEASURES = {
    "curve": lambda run: 100 * float(run.accuracy().mean()),  # of all tests: higher if accuracy rises earlier
    "labels right": mean_of("pseudo_label_accuracy"),
    "classifier right": mean_of("pseudo_label_accuracy_classification_head"),
    "passing": mean_of("qualified_share"),
    "first changes": mean_of("update_norm", FIRST, 1.0),  # the norm of the global model's change in a round
    "last changes": mean_of("update_norm", FINAL, 1.0),
    "first weights": weight_range(FIRST),
    "last weights": weight_range(FINAL),
    "heaviest": client_by(np.nanargmax, lambda run, weight: weight),
    "lightest": client_by(np.nanargmin, lambda run, weight: weight),
    "largest": client_by(np.nanargmax, sizes),
    "smallest": client_by(np.nanargmin, sizes),
}
BOARDS = Boards(DOCS.parent / "configs" / "sweeps" / "claims.py", DOCS / "claims", MEASURES)
HEAD = f"""# The papers' claims, tested

What the papers of FedAnchor, SemiAnAgg, FedIL and FedLabel claim in each table, ablation and figure
that has an order, and what we measured. The last section has main claims of other methods.

**Our scale is not the papers'**: small networks, 5 to 50 clients, 30 or 40 rounds, on MNIST,
CIFAR-10 and scikit-learn's digits. A claim that fails here may hold with the papers' networks, data
and rounds. A verdict is about the order, not about the size of the difference.

| verdict | when the interval of the difference |
|---|---|
| {HOLDS} | lies above 0; if the paper claims no difference: lies within {MARGIN:g} point of 0 |
| {NOT} | lies below 0, or below {MARGIN:g} if the paper's gain is larger; if it claims no difference: excludes 0 |
| {OPEN} | is anything else |
| {TO_DO} | is not there yet; minutes are an estimate for one core |

A difference is the mean over five seeds, paired by seed, with its 95 % confidence interval by
Student's t. About one interval in twenty misses the truth by chance. Differences are in points of
test accuracy, or of what stands before a colon:

* `labels right`: pseudo-labels that are right; `classifier right`: those of the classification head
* `passing`: images that pass the threshold; `curve`: the mean accuracy of all tests of a run
* `distances`: of the thirty seeds' accuracies from their median, which tell how much seeds differ
* `first changes`, `last changes`: the norm of the global model's change in the first and last five
  rounds; `first weights`, `last weights`: the difference of the largest and the smallest $r^k$ there
* `MB`: sent both ways, not in percent

Rows of a board have the same data, partitions and cohorts, and six tries each of their settings on
validation images. They differ in the method and in what their names say. On `fedlabel_*` all rows
take the same number of steps. Rows start from fresh weights; on `semianagg_warm_digits` from the
labelled client's model, on `semianagg_unlabelled_digits` from FedU's, trained without labels.
Boards that begin with `leaderboard/` are those of the [leaderboard](leaderboard.md).
[claims.toml](claims/claims.toml) has the claims, the csv files beside it have the runs.

```
python launch.py sweep configs/sweeps/claims.py:BOARD --workdir=runs/BOARD --tries=6
python docs/claims.py add runs/BOARD BOARD
python docs/claims.py    # makes this page
```
"""


def load() -> dict[str, Any]:
    """The claims, the reasons why some do not hold, and the boards' estimates."""
    return tomllib.loads((DOCS / "claims" / "claims.toml").read_text(encoding="utf-8"))


@functools.cache
def read(board: str) -> list[dict[str, str]]:
    """A board's records, also of the leaderboard; [] without any."""
    place, _, name = board.rpartition("/")
    return (LEADERBOARD if place else BOARDS).agreed(name)


def measured(board: str, row: str, measure: str) -> dict[str, float]:
    """Seed -> a measure of a row; 'distances' are those of its accuracies from their median.

    A word in braces is a column of the board's first row, which has the client of each seed.
    """
    if named := re.search(r"\{(\w+)\}", row):
        first = per_seed(read(board), named[1]).get(row.partition(",")[0], {})
        rows = {seed: measured(board, row.replace(named[0], f"{client:g}"), measure) for seed, client in first.items()}
        return {seed: found[seed] for seed, found in rows.items() if seed in found}
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


def each_board(runs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Comparisons of claims.toml, one for each of their boards."""
    return [{**run, "board": board} for run in runs for board in run["on"]]


def compared(run: dict[str, str]) -> str:
    """What is compared, in words."""
    measure, row, than, board = run.get("measure", ""), run["row"], run["than"], run["board"]
    if "than_measure" in run:
        return f"{row}: {measure} minus {run['than_measure']}, `{board}`"
    before = f"{measure}: " if measure else ""
    if "than_board" in run:
        return f"{before}{row}, `{board}`, minus {than}, `{run['than_board']}`"
    if "less" in run:
        return f"{before}{row} minus {than}, `{board}`, minus the same, `{run['less']}`"
    return f"{before}{row} minus {than}, `{board}`"


def difference_of(values: list[float]) -> str:
    """The mean of the seeds' differences with its interval, in points."""
    return f"{statistics.mean(values):+.2f} ± {half_interval(values):.2f}"


def answers(claim: dict[str, Any], minutes: dict[str, int]) -> list[dict[str, str]]:
    """The page's rows of a claim: one for each comparison that was run, or one that says what it would cost."""
    rows, left = [], []
    for run in each_board(claim.get("runs", [])):
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


def reason_of(reason: dict[str, Any]) -> str:
    """Why a claim does not hold, and what single changes gave."""
    tried = {compared(run): list(differences(run).values()) for run in each_board(reason.get("tried", []))}
    figures = [f"{name}: {difference_of(values)}" for name, values in tried.items() if len(values) > 1]
    why = " ".join(reason.get("why", UNKNOWN).split())
    nothing = UNTRIED if why == UNKNOWN else ""
    return why + (f" Tried: {'; '.join(figures)}." if figures else nothing)


def wrapped(item: str) -> str:
    """An item of a list in lines of 100 characters."""
    return textwrap.fill(item, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def page() -> str:
    """The page."""
    read.cache_clear()
    found = load()
    papers: dict[str, list[dict[str, str]]] = {}
    failed: dict[str, dict[str, list[str]]] = {}
    for claim in found["claim"]:
        paper = claim["paper"] if claim["paper"] in SEEDS else OTHERS
        rows = answers(claim, found["core_minutes"])
        if paper == OTHERS:
            rows[0]["where"] = f"{claim['paper']}, {claim['where']}"
        papers.setdefault(paper, []).extend(rows)
        if any(row["verdict"] == NOT for row in rows):
            failed.setdefault(paper, {}).setdefault(claim.get("reason", ""), []).append(f"*{claim['says']}*")
    parts = [HEAD]
    counts = Counter(row["verdict"] for rows in papers.values() for row in rows)
    parts.append("Comparisons: " + ", ".join(f"{counts[name]} {name}" for name in (HOLDS, NOT, OPEN, TO_DO)) + ".\n")
    for paper, rows in papers.items():
        bold = {(place, "verdict") for place, row in enumerate(rows) if row["verdict"] in (HOLDS, NOT)}
        title = f"{paper}, {found['title'][paper]}" if paper in found["title"] else paper
        parts.append(f"## {title}\n\n{to_markdown(rows, bold).rstrip()}\n")
        if paper in failed:
            why = {name: reason_of(found["reason"].get(name, {})) for name in failed[paper]}
            lines = [wrapped(f"* {' '.join(claims)} {why[name]}") for name, claims in failed[paper].items()]
            parts.append("\n".join(["Why a claim does not hold:\n", *lines, ""]))
    parts.append(f"## Boards\n\n{to_markdown(boards_table(found['core_minutes'])).rstrip()}\n")
    return "\n".join(parts)


def boards_table(minutes: dict[str, int]) -> list[dict[str, Any]]:
    """A row for each board: its clients, the mean accuracies of its rows, the best first, and rows without a record."""
    table = []
    for board, time in minutes.items():
        lines, sweep = read(board), load_sweep(f"{BOARDS.sweep}:{board}")
        rows = {row: statistics.mean(seeds.values()) for row, seeds in per_seed(lines).items()}
        left = [row for row in sweep.methods if row not in rows]
        some = "all" if not rows else "; ".join(left) or "-"
        shared = [sweep.common[name] for name in ("clients_per_round", "num_clients", "data.alpha")]
        table.append(
            {
                "board": f"`{board}`",
                "clients": "{} of {}, alpha {:g}".format(*shared),
                "accuracy": "; ".join(f"{row} {rows[row]:.1f}" for row in sorted(rows, key=rows.get, reverse=True)),
                "commit": ", ".join(sorted({line["commit"] for line in lines})),
                "not run": some if time == 0 or not left else f"{some} (about {time} minutes for the board)",
            }
        )
    return table


def with_gain(config: str) -> str:
    """The source of a config whose docstring says by the records what its method gains at our scale."""

    def say(found: re.Match[str]) -> str:
        values = differences({"board": found[4], "row": found[2], "than": "Labels alone"})
        return f"{found[1]}{difference_of(list(values.values()))}{found[3]}"

    return GAIN.sub(say, config)


if __name__ == "__main__":
    command(BOARDS, page)
    for path in CONFIGS if len(sys.argv) == 1 else ():
        replace_file(path, with_gain(path.read_text(encoding="utf-8")))
