"""A file of another run in a run's folder, or a file with an edited value; the run is resumed, loaded and reported.

'right': model, state and figures are those of the run as it was (a summary, for example, is written again). 'told': a
use that does not give them says why in a line. 'silent': something else was used without a message. The runs differ in
their seed, a learning rate or their images.
"""

import collections
import contextlib
import io
import json
import pathlib
import random
import shutil
from collections.abc import Iterator

import numpy as np

import fedjax_ssl
from fedjax_ssl import UserError, train
from fedjax_ssl.data.sources import load_dataset
from fedjax_ssl.files import replace_arrays
from fedjax_ssl.records.dataset import write_dataset
from fedjax_ssl.records.runs import read_run

from .common import ROUNDS, Row, Trial, config_of, row_of, same

MINUTES, COUNT = 15, 100
KINDS = (
    "config.json", "partition.npz", "dataset.json", "metrics.jsonl", "summary.json", "a checkpoint", "all checkpoints",
    "a checkpoint's number", "a field of config.json", "rows of partition.npz", "labels of partition.npz",
    "a figure of dataset.json",
)  # fmt: skip


def run(trial: Trial) -> Iterator[Row]:
    """Yields the part's rows."""
    runs = _runs(trial.folder)
    expected = {name: _used(workdir, config)[0] for name, (workdir, config) in runs.items()}
    outcomes = collections.defaultdict(collections.Counter)
    for number in range(trial.count):
        if not trial.goes_on():
            break
        kind = KINDS[number % len(KINDS)]
        mine, other = trial.rng.sample(sorted(runs), 2)
        folder = trial.folder / "exchanged"
        shutil.copytree(runs[mine][0], folder)
        _exchange(kind, folder, runs[other][0], trial.rng)
        try:
            found, said = _used(folder, runs[mine][1])
            wrong = [use for use in found if found[use] is not None and not same(found[use], expected[mine][use])]
            outcome = "silent" if any(use not in said for use in wrong) else "told" if said else "right"
        except Exception as error:
            outcome = "tracebacks"
            print(kind, repr(error)[:300], flush=True)
        outcomes[kind][outcome] += 1
        shutil.rmtree(folder)
    for kind, counts in outcomes.items():
        yield row_of(f"exchanged: {kind}", counts)


def _runs(folder: pathlib.Path) -> dict:
    """Finished runs: name -> workdir, configuration."""
    digits = load_dataset(config_of("supervised", 2).data)
    inverted = {name: getattr(digits, name) for name in ("x_train", "y_train", "x_test", "y_test")}
    inverted |= {name: 255 - inverted[name] // 2 for name in ("x_train", "x_test")}
    np.savez(folder / "inverted.npz", **inverted)
    changes = {
        "seed 0": {},
        "seed 1": {"seed": 1},
        "another rate": {"client.learning_rate": 0.01},
        "other images": {"data.source": "npz", "data.path": str(folder / "inverted.npz")},
    }
    runs = {}
    for name, fields in changes.items():
        config = config_of("supervised", 2)
        clients = {"data.labels": "clients", "data.labelled_share": 0.5, "model.normalisation": "running"}
        config.update_from_flattened_dict({**clients, **fields})
        runs[name] = folder / name.replace(" ", "_"), config
        train(config, runs[name][0])
    return runs


def _used(folder: pathlib.Path, config) -> tuple[dict, dict]:
    """The result of each use of a run, None if it is refused; and its messages."""
    found, said = {}, {}
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8), np.uint8)

    def report():
        run = read_run(folder)
        if run.damages:
            said["report"] = run.damages
        figures = {name: run.values(name) for name in ("test_accuracy", "test_loss")}
        facts, summary = run.dataset(), run.summary or {}
        figures |= {"mean": np.array(facts["mean"]), "best": np.array(summary.get("best_test_accuracy", np.nan))}
        return {**figures, "rate": np.array([run.config["client"]["learning_rate"], run.config["seed"]])}

    uses = {
        "report": report,
        "load": lambda: fedjax_ssl.load(folder).__call__(images).probabilities,
        "resume": lambda: train(config, folder),
        "report after it": report,
    }
    for use, function in uses.items():
        lines = io.StringIO()
        try:
            with contextlib.redirect_stderr(lines):
                found[use] = function()
        except UserError as error:
            found[use], said[use] = None, str(error)
            assert "\n" not in str(error)
        if "warning" in lines.getvalue():
            said[use] = lines.getvalue()
    if "report" in said:  # its line stays
        said.setdefault("report after it", said["report"])
    return found, said


def _exchange(kind: str, folder: pathlib.Path, other: pathlib.Path, rng: random.Random) -> None:
    checkpoints = folder / "checkpoints"
    last = checkpoints / str(ROUNDS)
    if kind in ("a checkpoint", "all checkpoints"):
        for checkpoint in [last] if kind == "a checkpoint" else sorted(checkpoints.glob("*[0-9]")):
            shutil.rmtree(checkpoint)
            shutil.copytree(other / "checkpoints" / checkpoint.name, checkpoint)
            shutil.copy(other / "checkpoints" / f"{checkpoint.name}.json", checkpoints)
    elif kind == "a checkpoint's number":
        former = checkpoints / str(ROUNDS - 2)
        shutil.rmtree(last)
        if rng.random() < 0.5:
            shutil.copytree(former, last)
        else:
            former.rename(last)
    elif kind == "a field of config.json":
        saved = json.loads((folder / "config.json").read_text())
        section, name, value = rng.choice([
            ("client", "learning_rate", 0.5), ("client", "batch_size", 5), ("data", "labelled_share", 0.25),
            ("model", "width", 0.5), ("augment", "padding", 2), ("server", "momentum", 0.5),
        ])  # fmt: skip
        saved[section][name] = value
        (folder / "config.json").write_text(json.dumps(saved))
    elif kind.endswith("partition.npz") and kind != "partition.npz":
        with np.load(folder / "partition.npz") as archive:
            arrays = dict(archive)
        if kind.startswith("labels"):
            arrays["labelled_index"] = np.delete(arrays["labelled_index"], rng.randrange(9))
        else:
            places = rng.sample(range(len(arrays["client_index"])), 2)
            arrays["client_index"][places] = arrays["client_index"][places[::-1]]
        replace_arrays(folder / "partition.npz", **arrays)
    elif kind == "a figure of dataset.json":
        facts = json.loads((folder / "dataset.json").read_text())
        del facts["sha256"]
        write_dataset(folder, {**facts, "mean": [facts["mean"][0] + rng.choice((-0.1, 0.01))]})
    else:
        shutil.copy(other / kind, folder / kind)
