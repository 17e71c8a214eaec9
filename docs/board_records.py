"""The records of a sweep's boards, a csv file for each: finished runs are added, and lines from anybody are checked.

A record is a line for each run: its accuracies of the last tests, bytes and seconds, the row's number of tries and the
fields that they chose, the commit, JAX and processor, and the checksum of the run's metrics. `add` reads runs whose
metrics have their checksum and whose configuration is the board's with the fields of the row's best try, and no others;
all tries of the row must be over. The sweep's words for data and weights, like --config.data.path=FILE, follow the
board's name. Lines of the same method and seed are replaced, so boards may grow on several machines.
"""

import csv
import io
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import CHANGES_NO_RESULT
from fedjax_ssl.base.files import replace_file
from fedjax_ssl.config import differences, for_seed
from fedjax_ssl.records.lines import SUMMARY
from fedjax_ssl.records.runs import RunRecords, read_run
from fedjax_ssl.records.workdir import LOG
from fedjax_ssl.report.table import LAST, costs
from fedjax_ssl.sweep import TRIES, Cell, Sweep, accuracies_of, load_sweep, plan
from fedjax_ssl.sweep.search import row_and_number, tries_of, with_best

WITHOUT_FILES = {"digits", "table", "digits-defaults"}  # parts of the names of boards whose data are no files
OF_DATA = ("data.source", "data.path", "data.flip", "encoder.weights")  # of the other boards
NUMBER, ACCURACY, PAIR = r"\d+(\.\d+)?(e[+-]\d\d)?", r"(100(\.0+)?|\d\d?(\.\d+)?)", r"[\w.]+=[\w.+-]+"
COLUMNS = {  # of a record -> what may be in it, since records come from anybody
    "method": ".+",
    "seed": r"\d+",
    "rounds": r"\d+",
    "accuracies": f"{ACCURACY}( {ACCURACY})*",  # percent
    "MB": NUMBER,
    "seconds": NUMBER,
    "tries": r"\d+",
    "chosen": f"({PAIR}( {PAIR})*)?",
    "commit": "[0-9a-f]*",
    "jax": r"[\w.+]+",
    "processor": r"[\w .,()@+/-]+",
    "records": "[0-9a-f]+",
}


class Boards(NamedTuple):
    """The boards of one sweep file."""

    sweep: pathlib.Path  # the sweep's file
    folder: pathlib.Path  # of the records, BOARD.csv
    # More columns, each an empty cell or a number of a run.
    measures: Mapping[str, Callable[[RunRecords], float | None]] = {}

    def columns(self) -> dict[str, str]:
        """The columns of a record -> what may be in them."""
        return {**COLUMNS, **dict.fromkeys(self.measures, f"({NUMBER})?")}

    def record(self, board: str, workdir: pathlib.Path, overrides: Sequence[str] = ()) -> list[dict[str, str]]:
        """The lines of the finished runs in a sweep's folder.

        Raises:
            UserError: there is none, or one is damaged or not the board's, or a word changes the board.
        """
        sweep = load_sweep(f"{self.sweep}:{board}")
        fields = (*CHANGES_NO_RESULT, *(() if WITHOUT_FILES & set(board.split("_")) else OF_DATA))
        if others := [word for word in overrides if word.removeprefix("--config.").partition("=")[0] not in fields]:
            raise UserError(f"{others[0]!r} would make another board than {board}")
        best, tries, waiting = after_tries(sweep, workdir, overrides)
        lines = []
        for own, cell in zip(plan(sweep, workdir, overrides), plan(best, workdir, overrides)):
            chosen = sorted(differences(own.config.to_dict(), cell.config.to_dict()).items())
            for seed in cell.seeds:
                folder = cell.folder / f"seed_{seed}"
                if not (folder / SUMMARY).exists():
                    continue
                if cell.name in waiting:
                    raise UserError(
                        f"{folder} is not recorded: {waiting[cell.name]!r} is not over, or not of this board"
                    )
                run = read_run(folder)
                if not run.is_finished or run.damages:
                    raise UserError(f"{folder} is not recorded: {'; '.join(run.damages) or 'it is not finished'}")
                if others := differing(cell, seed, run):
                    raise UserError(
                        f"{folder} is not of this board after {tries} tries: it differs in {', '.join(others)}"
                    )
                fields_chosen = " ".join(f"{field}={value}" for field, (_, value) in chosen)
                lines.append({"method": cell.name, "seed": str(seed), **self._figures(run, tries, fields_chosen)})
        if not lines:
            raise UserError(f"{workdir} has no finished run of {board}")
        return lines

    def _figures(self, run: RunRecords, tries: int, chosen: str) -> dict[str, str]:
        """The cells of a run's line behind its row and seed."""
        size, summary = costs(run), run.summary or {}
        measured = {name: measure(run) for name, measure in self.measures.items()}
        return {
            "rounds": str(len(run.metrics)),
            "accuracies": " ".join(f"{100 * accuracy:.3f}" for accuracy in run.accuracy()[-LAST:]),
            "MB": f"{size['MB down'] + size['MB up']:.4g}",
            "seconds": f"{size['seconds']:.4g}",
            "tries": str(tries),
            "chosen": chosen,
            "commit": (summary["commit"] or "")[:12],
            "jax": summary["versions"]["jax"],
            "processor": summary.get("processor", "-"),
            "records": summary["metrics_sha256"][:16],
            **{name: "" if value is None else f"{value:.5g}" for name, value in measured.items()},
        }

    def parse(self, board: str, text: str) -> list[dict[str, str]]:
        """The lines of a board's records, which may come from anybody, checked.

        Raises:
            UserError: there is no such board, or its records are not as `add` writes them.
        """
        sweep, columns = load_sweep(f"{self.sweep}:{board}"), self.columns()
        reader = csv.DictReader(io.StringIO(text), restkey="one more cell", restval="")
        lines = list(reader)
        if reader.fieldnames != list(columns) or not lines:
            raise UserError(f"{board}.csv must have lines with the columns {', '.join(columns)}")
        missing = {(method, str(seed)) for method in sweep.methods for seed in sweep.seeds}
        for line in lines:
            where = f"{board}.csv, {line['method']!r:.40} with seed {line['seed']!r:.9}"
            for name, cell in line.items():
                allowed = re.fullmatch(columns.get(name, "(?!)"), str(cell), re.ASCII)
                if not allowed or (name == "accuracies" and len(cell.split()) != LAST):
                    raise UserError(f"{where}: {name} cannot be {cell!r:.80}")
            if (line["method"], line["seed"]) not in missing:
                raise UserError(f"{where}: the board has no such run, or the file has it twice")
            missing.remove((line["method"], line["seed"]))
        return lines

    def read(self, board: str) -> list[dict[str, str]]:
        """The committed lines of a board; [] without any. Raises a UserError if they are not usable."""
        path = self.folder / f"{board}.csv"
        return self.parse(board, path.read_text(encoding="utf-8", errors="replace")) if path.exists() else []

    def agreed(self, board: str) -> list[dict[str, str]]:
        """The lines of `read`. Raises a UserError if runs differ in what they must share."""
        lines = self.read(board)
        for name in ("tries", "rounds"):
            if len(found := {line[name] for line in lines}) > 1:
                raise UserError(
                    f"{board}.csv has runs of {' and '.join(sorted(found))} {name}; all need the same number"
                )
        if len({line["method"] for line in lines}) < len({(line["method"], line["chosen"]) for line in lines}):
            raise UserError(f"{board}.csv has seeds of one method with different chosen fields; record them anew")
        return lines

    def recorded(self) -> list[str]:
        """The boards that have records."""
        return sorted(path.stem for path in self.folder.glob("*.csv"))

    def add(self, workdir: pathlib.Path, board: str, overrides: Sequence[str] = ()) -> None:
        """Puts the finished runs of a folder into a board's records."""
        new = self.record(board, workdir, overrides)
        lines = {(line["method"], line["seed"]): line for line in [*self.read(board), *new]}
        text = io.StringIO()
        text.write(",".join(self.columns()) + "\n")
        writer = csv.DictWriter(text, list(self.columns()), quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerows(lines.values())
        self.parse(board, text.getvalue())
        self.folder.mkdir(exist_ok=True)
        replace_file(self.folder / f"{board}.csv", text.getvalue())


def differing(cell: Cell, seed: int, run: RunRecords) -> list[str]:
    """The fields in which a run is not the planned one."""
    planned = json.loads(json.dumps(for_seed(cell.config, seed).to_dict()))
    return sorted(set(differences(planned, run.config)) - set(CHANGES_NO_RESULT))


def diverged(cell: Cell, seed: int) -> bool:
    """Whether a planned run has ended because its numbers were not finite."""
    folder = cell.folder / f"seed_{seed}"
    log = (folder / LOG).read_text(encoding="utf-8", errors="replace") if (folder / LOG).exists() else ""
    return "ended by TrainingError" in log[log.rstrip().rfind("\n") :] and not differing(cell, seed, read_run(folder))


def after_tries(sweep: Sweep, workdir: pathlib.Path, overrides: Sequence[str]) -> tuple[Sweep, int, dict[str, str]]:
    """The sweep whose rows have the fields of their best tries, as `run_sweep` makes it.

    Returns:
        The sweep; the number of tries a row, 0 without any; row -> a try of it that has neither finished nor diverged.
    """
    places = [path.name.rpartition("_")[2] for path in (workdir / TRIES).glob("*_try_*")]
    number, seed = max((int(place) + 1 for place in places if place.isdecimal()), default=0), sweep.search.seed
    tries = sweep._replace(methods=tries_of(sweep.methods, sweep.search, number), seeds=(seed,))
    cells = plan(tries, workdir / TRIES, overrides)
    found = accuracies_of(cells)
    left = [cell.name for cell in cells if cell.name not in found and not diverged(cell, seed)]
    best = with_best(sweep.methods, sweep.search, number, found, lambda line: None)
    return sweep._replace(methods=best), number, {row_and_number(name)[0]: name for name in left}


def per_seed(lines: list[dict[str, str]], measure: str = "accuracies") -> dict[str, dict[str, float]]:
    """Row -> seed -> the mean of its accuracies in percent, or another measure where it was measured."""
    rows: dict[str, dict[str, float]] = {}
    for line in lines:
        if line[measure]:
            values = [float(value) for value in line[measure].split()]
            rows.setdefault(line["method"], {})[line["seed"]] = statistics.mean(values)
    return rows


def paired(rows: Mapping[str, Mapping[str, float]], row: str, other: str) -> dict[str, float]:
    """Seed -> a row minus another one, for the seeds that both have."""
    own, others = rows.get(row, {}), rows.get(other, {})
    return {seed: own[seed] - others[seed] for seed in sorted(own.keys() & others.keys())}


def command(boards: Boards, page: Callable[[], str]) -> None:
    """The command of a page: without arguments it writes the page, `add WORKDIR BOARD` adds a sweep's records."""
    try:
        match sys.argv[1:]:
            case []:
                replace_file(boards.folder.with_suffix(".md"), page())
            case ["add", workdir, board, *words]:
                boards.add(pathlib.Path(workdir), board, words)
            case _:
                raise UserError("the arguments are none, or add WORKDIR BOARD and the sweep's --config words")
    except (UserError, csv.Error, OSError) as error:
        raise SystemExit(f"error: {error}") from error
