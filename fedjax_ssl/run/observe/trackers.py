"""Live curves of a run: TensorBoard event files and, if configured, Weights & Biases.

They show the records in the workdir. A writer first gets the records of earlier rounds, then each round's as it is
written. A writer that fails is dropped, and the run continues.
"""

import contextlib
import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from fedjax_ssl.config import flatten
from fedjax_ssl.engine.evaluation import RULE
from fedjax_ssl.engine.measures import MEASURES, OPEN_SET, words_of
from fedjax_ssl.files import make_folder, refuse_link, replace_file
from fedjax_ssl.records.clients import TESTED, test_figures
from fedjax_ssl.records.words import measured_each_round
from fedjax_ssl.records.workdir import METRICS, TENSORBOARD, TIMINGS, Workdir
from fedjax_ssl.run.observe.log import warn

MEASURED = ("accuracy", "loss", *words_of(MEASURES), *OPEN_SET, "attacked_class")  # figures of a set of images
WANDB_ID = "wandb_id"  # a file in the workdir

# Name in metrics.jsonl -> group and name of the curve; other names are the method's own metrics.
TAGS = {
    **{f"{of}_{name}": f"{of}/{name}" for of in ("test", "validation") for name in MEASURED},
    "pseudo_label_accuracy": "pseudo_labels/in_use",
    "qualified_accuracy": "pseudo_labels/qualified",
    "score_gap": "pseudo_labels/score_gap",
    "common_direction": "pseudo_labels/common_direction",
    "qualified_per_client": "clients/qualified",
    "qualified_share": "clients/qualified_share",
    "qualified_unknown_share": "clients/qualified_unknown_share",
    "client_loss": "clients/loss",
    "fix_loss": "clients/fix_loss",
    "mix_loss": "clients/mix_loss",
    "local_steps": "clients/local_steps",
    "uploads": "clients/uploads",
    "dropped_uploads": "clients/dropped_uploads",
    "byzantine_uploads": "clients/byzantine_uploads",
    "late_uploads": "clients/late_uploads",
    "answers": "clients/answers",
    "cohort_size": "clients/cohort_size",
    "clients_without_labels": "clients/without_labels",
    **{name: name.replace("client_test_", "client_tests/") for name in test_figures(dict.fromkeys(TESTED, np.ones(1)))},
    "attack_success": "attack/success",
    "epsilon": "privacy/epsilon",
    "server_loss": "server/loss",
    "contrastive_loss": "server/contrastive_loss",
    "update_norm": "server/update_norm",
    "bytes_down": "wire/bytes_down",
    "bytes_up": "wire/bytes_up",
    "seconds": "time/seconds_per_round",
}


class Trackers:
    """The writers of one run; a context manager that closes them."""

    def __init__(self, openers: dict[str, Callable[[], Any]]):
        """Opens the writers.

        Args:
            openers: name for warnings -> makes a writer, an object with `write(rows)` and `close(went_well)`.
        """
        self._writers: dict[str, Any] = {}
        for name, opener in openers.items():
            writer = self._guard(name, opener)
            if writer is not None:
                self._writers[name] = writer

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        for name, writer in list(self._writers.items()):
            self._guard(name, writer.close, kind is None)
        self._writers.clear()

    def write(self, lines: list[dict[str, Any]], timings: list[dict[str, Any]]) -> None:
        """Passes the lines of rounds to the writers.

        Args:
            lines: of metrics.jsonl.
            timings: of timings.jsonl, for at least the same rounds.
        """
        seconds = {line["round"]: line["seconds"] for line in timings if "seconds" in line}
        rows = [{**line, "seconds": seconds.get(line["round"])} for line in lines]
        for name, writer in list(self._writers.items()):
            if rows:
                self._guard(name, writer.write, rows)

    def _guard(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # any error: a failed curve must not end a run
            self._writers.pop(name, None)
            why = " ".join(f"{type(error).__name__}: {error}".split())
            warn(f"the run goes on without {name} ({why})")
            return None


def open_trackers(config: ConfigDict, folder: Workdir) -> Trackers:
    """Opens the writers that a configuration asks for and gives them the rounds in the folder's records.

    Args:
        config: of the run, or of all its seeds.
        folder: of a run that has begun; its records are already cut back to the round where it resumes.
    """
    openers: dict[str, Callable[[], Any]] = {}
    if config.log.tensorboard:
        openers["TensorBoard"] = lambda: TensorBoardWriter(folder)
    if config.log.wandb_project:
        openers["Weights & Biases"] = lambda: WandbWriter(folder, config.log.wandb_project)
    trackers = Trackers(openers)
    trackers.write(folder.read(METRICS), folder.read(TIMINGS))
    return trackers


def curves(row: dict[str, Any]) -> dict[str, float]:
    """A round's figures by the names of their curves. A figure that could not be measured is left out."""
    points = {}
    for name, value in row.items():
        if name != "round" and value is not None and math.isfinite(value):
            rule = f"pseudo_labels/{name.removeprefix(RULE)}" if name.startswith(RULE) else f"method/{name}"
            points[TAGS.get(name, rule)] = value
    return points


class TensorBoardWriter:
    """TensorBoard event files, rewritten from the records whenever a run begins or resumes, so that no round repeats.

    The events are written directly to the file: `tensorboardX.SummaryWriter` writes in a thread and hangs after that
    thread has failed on a full disk.
    """

    def __init__(self, folder: Workdir):
        with _without_torch():
            from tensorboardX import event_file_writer, summary  # imported only if a run needs it
            from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        path = folder.path / TENSORBOARD
        make_folder(path)
        for old in path.glob("events.out.tfevents.*"):
            old.unlink()
        self._file = event_file_writer.EventsWriter(str(path / "events"))
        # A TensorBoard that shows the old file discards its points.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._file.write_event(self._event(step=0, wall_time=time.time(), session_log=start))
        fields = {name: _plain(value) for name, value in flatten(folder.config).items()}
        experiment, begin, self._end = summary.hparams(fields, {f"{measured_each_round(folder.config)}/accuracy": None})
        text = "".join(f"    {line}\n" for line in json.dumps(folder.config, indent=2).splitlines())
        for item in (experiment, begin, summary.text("config", text)):
            self._add(item, 0, time.time())
        self._file.flush()

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Adds rounds. They may arrive together or late, so their times are computed backwards from now."""
        moment = time.time() - sum(row["seconds"] or 0.0 for row in rows)
        for row in rows:
            moment += row["seconds"] or 0.0
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in curves(row).items()]
            self._add(self._summary(value=values), row["round"], moment)
        self._file.flush()

    def close(self, went_well: bool) -> None:
        """Closes the file."""
        if went_well:
            self._add(self._end, 0, time.time())
        self._file.close()

    def _add(self, summary: Any, step: int, moment: float) -> None:
        self._file.write_event(self._event(step=step, wall_time=moment, summary=summary))


class WandbWriter:
    """A run of Weights & Biases, resumed with the workdir's run.

    W&B's environment variables apply, such as WANDB_MODE=offline. Its steps are rounds. Rounds that W&B already has are
    not sent again. Offline it has none, and a later `wandb sync` replaces the online run.
    """

    def __init__(self, folder: Workdir, project: str):
        import wandb

        path = folder.path.resolve()
        for name in ("wandb", ".wandb"):  # where W&B writes its files
            refuse_link(path / name)
        if not (path / WANDB_ID).exists():
            replace_file(path / WANDB_ID, secrets.token_hex(8) + "\n")
        is_one_of_several = path.name == f"seed_{folder.config['seed']}"
        self._run = wandb.init(
            project=project,
            id=(path / WANDB_ID).read_text().strip(),
            name="/".join(path.parts[-2:]),
            group=path.parent.name if is_one_of_several else None,
            dir=str(path),
            config=folder.config,
            allow_val_change=True,  # a resumed run may have more rounds
            resume="allow",
            reinit="create_new",  # seeds that train together are open together
        )

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Sends rounds."""
        for row in rows:
            if row["round"] >= self._run.step:
                self._run.log(curves(row), step=row["round"], commit=True)

    def close(self, went_well: bool) -> None:
        """Ends the run. A stopped run counts as failed until it is resumed."""
        self._run.finish(exit_code=0 if went_well else 1)


def _plain(value: Any) -> str | bool | int | float:
    """A field's value in a type that TensorBoard's table of hyperparameters accepts."""
    return value if isinstance(value, str | bool | int | float) else str(value)


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Hides PyTorch from tensorboardX, which would import it, if installed, for a type annotation.

    The import takes seconds and loads a second set of CUDA libraries.
    """
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]
