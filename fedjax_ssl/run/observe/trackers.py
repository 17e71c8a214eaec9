"""Live curves of a run: TensorBoard event files and, if configured, Weights & Biases.

They show the lines of metrics.jsonl from the round on at which a run begins or resumes; earlier ones are there already.
"""

import contextlib
import json
import math
import pathlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from ml_collections import ConfigDict

from fedjax_ssl.base.files import replace_file
from fedjax_ssl.records.workdir import TENSORBOARD, Workdir

WANDB_ID = "wandb_id"  # a file in the workdir

Write = Callable[[list[dict[str, Any]]], None]  # takes rounds, as lines of metrics.jsonl with their seconds


@contextlib.contextmanager
def open_trackers(config: ConfigDict, folder: Workdir, done: int) -> Iterator[list[Write]]:
    """Opens what a configuration asks for; `done` rounds are done before."""
    with contextlib.ExitStack() as stack:
        writers = []
        if config.log.tensorboard:
            writers.append(stack.enter_context(_tensorboard(folder, done)))
        if config.log.wandb_project:
            writers.append(stack.enter_context(_wandb(folder, config.log.wandb_project)))
        yield writers


def curves(row: dict[str, Any]) -> dict[str, float]:
    """A round's figures by the names of their curves: test_accuracy is test/accuracy, so that pages group them by word.

    A figure that could not be measured is left out, as are those with a number for each client.
    """
    figures = {name: value for name, value in row.items() if name != "round" and isinstance(value, int | float)}
    return {name.replace("_", "/", 1): value for name, value in figures.items() if math.isfinite(value)}


@contextlib.contextmanager
def _tensorboard(folder: Workdir, done: int) -> Iterator[Write]:
    # `tensorboardX.SummaryWriter` writes in a thread, and blocks for ever once a full disk has ended that thread.
    from tensorboardX import summary
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary

    path = folder.path / TENSORBOARD
    path.mkdir(exist_ok=True)
    with contextlib.closing(EventsWriter(str(path / "events"), f".{done}")) as file:

        def add(step: int, **what: Any) -> None:
            file.write_event(Event(step=step, wall_time=time.time(), **what))

        def write(rows: list[dict[str, Any]]) -> None:
            for row in rows:
                values = [Summary.Value(tag=tag, simple_value=value) for tag, value in curves(row).items()]
                add(row["round"], summary=Summary(value=values))
            file.flush()

        # TensorBoard discards later points of a run that was killed after its last checkpoint.
        add(done + 1, session_log=SessionLog(status=SessionLog.START))
        add(0, summary=summary.text("config", f"```\n{json.dumps(folder.config, indent=2)}\n```"))
        yield write


def _wandb_id(path: pathlib.Path) -> str:
    """The id of a workdir's run of Weights & Biases; a copied workdir gets a new one, a moved one keeps its own."""
    file = path / WANDB_ID
    own, folder = (*file.read_text().split("\n"), "")[:2] if file.exists() else ("", "")
    if not own or (folder not in ("", str(path)) and (pathlib.Path(folder) / WANDB_ID).exists()):
        own = secrets.token_hex(8)
    replace_file(file, f"{own}\n{path}\n")
    return own


@contextlib.contextmanager
def _wandb(folder: Workdir, project: str) -> Iterator[Write]:
    """A run of Weights & Biases, resumed with the workdir's run. Its steps are rounds, and none is sent twice."""
    import wandb

    path = folder.path.resolve()
    is_one_of_several = path.name == f"seed_{folder.config['seed']}"
    run = wandb.init(
        project=project,
        id=_wandb_id(path),
        name="/".join(path.parts[-2:]),
        group=path.parent.name if is_one_of_several else None,
        dir=str(path),
        config=folder.config,
        allow_val_change=True,  # a resumed run may have more rounds
        resume="allow",
        reinit="create_new",  # seeds that train together are open together
    )

    def write(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["round"] >= run.step:
                run.log(curves(row), step=row["round"], commit=True)

    failed = True  # a stopped run counts as failed until it is resumed
    try:
        yield write
        failed = False
    finally:
        run.finish(exit_code=int(failed))
