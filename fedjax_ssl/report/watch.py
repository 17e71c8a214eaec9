"""Serves a page that shows runs while they train. The server reads the runs' files and writes none."""

import contextlib
import datetime
import http.server
import math
import pathlib
import re
import threading
import time
from typing import Any

import numpy as np

from fedjax_ssl.errors import UserError, printable
from fedjax_ssl.records.groups import Group, name_data_sets, read_groups
from fedjax_ssl.records.runs import RunRecords, find_runs
from fedjax_ssl.records.workdir import CONFIG, METRICS, SUMMARY
from fedjax_ssl.report import figures, page, style
from fedjax_ssl.report.comparison import bundles

SECONDS_BETWEEN_LOOKS = 2
ROUNDS_FOR_SPEED = 20  # only the latest ones: the speed of rounds changes
LOCAL = ("localhost", "127.0.0.1", "[::1]")
# All pictures are replaced if anything has changed. Without an answer, the page says so and keeps its content.
_SCRIPT = """
let shown = "";
async function look() {
  let state = "";
  try {
    const answer = await fetch("content", {cache: "no-store"});
    const text = await answer.text();
    if (text !== shown) document.querySelector("main").innerHTML = shown = text;
  } catch { state = "The server has ended; this is what it showed last."; }
  document.querySelector("#state").textContent = state;
}
look(); setInterval(look, MILLISECONDS);
"""


def watch(folders: list[str], host: str = "localhost", port: int = 8000) -> None:
    """Serves the page until Ctrl-C.

    Args:
        folders: runs, or folders of runs. Runs that begin later in them appear by themselves.
        host: the address to listen on. Other machines can open the page unless it is one of `LOCAL`.
        port: 0 takes a free one.

    Raises:
        UserError: a folder does not exist, or the address cannot be taken.
    """
    with serving(folders, host, port) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"http://{host}:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def serving(folders: list[str], host: str, port: int) -> http.server.ThreadingHTTPServer:
    """Makes the server of `watch`; it listens, but does not answer yet."""
    paths = [pathlib.Path(folder) for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}")
    content, allowed = _Content(paths), {*LOCAL, host} if host in LOCAL else None

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Otherwise a foreign page whose name resolves to this machine (DNS rebinding) could read the answers.
            name = re.sub(r":\d+$", "", self.headers.get("Host", ""))
            if allowed is not None and name not in allowed:
                self.send_error(403)
            elif self.path in ("/", "/content"):
                self._answer(content.text() if self.path == "/content" else _page())
            else:
                self.send_error(404)

        def _answer(self, text: str) -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the reader has gone
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Prints nothing for a request."""

    try:
        return http.server.ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot listen on {host}:{port} ({reason}); --port=0 takes a free port") from error


def _page() -> str:
    script = _SCRIPT.replace("MILLISECONDS", str(1000 * SECONDS_BETWEEN_LOOKS))
    return page.document("Runs", "Refreshed as they grow.", f'<p id="state"></p><main></main><script>{script}</script>')


class _Content:
    """The inner part of the page; it is renewed when a file of a run has changed."""

    def __init__(self, folders: list[pathlib.Path]):
        self._folders = folders
        self._lock = threading.Lock()  # there may be several readers, and drawing takes a while
        self._seen: object = None
        self._text = ""

    def text(self) -> str:
        with self._lock:
            seen = _traces(self._folders)
            if seen != self._seen:
                try:
                    self._text, self._seen = content(self._folders), seen
                except OSError as error:  # a folder was deleted while it was read; the next request shows what is left
                    return page.note(f"{error.filename} cannot be read: {error.strerror}")
            return self._text


def _traces(folders: list[pathlib.Path]) -> object:
    """Sizes and times of files that change with a round or at the end, and the minute, as the page tells silence."""
    found: list[object] = [time.time() // 60]
    for folder in folders:
        with contextlib.suppress(UserError):
            for run in find_runs(folder):
                for name in (CONFIG, METRICS, SUMMARY):
                    with contextlib.suppress(OSError):
                        status = (run / name).stat()
                        found.append((str(run), name, status.st_size, status.st_mtime_ns))
    return found


def content(folders: list[pathlib.Path]) -> str:
    """The table and the curves of all runs as HTML, and a line for each run that cannot be shown."""
    readable, notes = [], []
    for folder in folders:
        try:
            find_runs(folder)
        except UserError as error:  # the first run may come later
            notes.append(str(error))
        else:
            readable.append(folder)
    try:
        groups, skipped = read_groups(readable) if readable else ([], [])
    except UserError as error:  # no run has finished a round yet
        groups, skipped = [], [str(error)]
    runs = [(group.name, run) for group in groups for run in group.runs]
    runs.sort(key=lambda pair: pair[1].is_finished)  # a stable sort: runs that train come first
    rows = [[name, run.config["seed"], *_standing(run)] for name, run in runs]
    columns = ["run", "seed", "round", "left", "accuracy", "best", "pseudo-labels right", "seconds a round"]
    parts = [page.note(printable(line)) for line in [*notes, *skipped]]
    parts += [page.table(columns, rows)] if rows else []
    return "".join([*parts, *_curves(groups)])


def _standing(run: RunRecords) -> list[str]:
    """A run's state: round, time left, accuracy, best accuracy, pseudo-label accuracy, seconds per round."""
    last, (best, best_round), rounds = run.metrics[-1], run.best(), run.config["num_rounds"]
    timed = [line for line in run.timings if line.get("seconds") is not None][-ROUNDS_FOR_SPEED:]
    seconds = [line["seconds"] * (line.get("seeds") or 1) for line in timed]  # seeds in one program wait for each other
    each = float(np.mean(seconds)) if seconds else math.nan
    if run.is_finished:
        left = "finished"
    elif seconds:
        left = str(datetime.timedelta(seconds=math.ceil(each * (rounds - last["round"]))))
        silent = time.time() - (run.folder / METRICS).stat().st_mtime
        if silent > 60 + 5 * each:  # it was stopped, or its processor is busy with something else
            left += f" (no new round for {datetime.timedelta(seconds=int(silent))})"
    else:
        left = "-"
    labels = last.get("pseudo_label_accuracy")
    return [
        f"{last['round']}/{rounds}",
        left,
        f"{100 * run.accuracy()[-1]:.2f} % ({run.measured})",
        f"{100 * best:.2f} % in {best_round}",
        "-" if labels is None else f"{100 * labels:.1f} %",
        "-" if math.isnan(each) else f"{each:.2f}",
    ]


def _curves(groups: list[Group]) -> list[str]:
    """A part of the page for each data set; many curves are divided over several parts."""
    names, parts = name_data_sets(groups), []
    sets = {data: [group for group, name in zip(groups, names) if name == data] for data in dict.fromkeys(names)}
    with style.styled():
        for title, own in ((f"{data} {of}".strip(), own) for data in sets for of, own in bundles(sets[data]).items()):
            made = {f"{measured} accuracy": figures.accuracy(own, measured) for measured in ("test", "validation")}
            made["pseudo-labels"] = figures.pseudo_labels(own[0].runs[0]) if len(own) == 1 else None
            made["qualified examples"] = figures.qualified(own)
            shown = [
                page.Picture(style.inline(figure, name), f"{name.capitalize()} over rounds.")
                for name, figure in made.items()
                if figure is not None
            ]
            parts.append(page.section(title, page.pictures(shown)))
    return parts
