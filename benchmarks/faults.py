"""Faults in large numbers: kills, signals, a full disk, flipped bits, exchanged files and data, holes, hostile files.

    python benchmarks/faults.py                          # all parts, a few minutes each
    python benchmarks/faults.py --part=kills --count=50  # one part with its number of tries

A try does a fault to a run of FedAnchor on a folder of the digits, with the clients' memory on disk, or to a copy of a
run that is finished or stopped, which is then resumed, loaded and reported. Outcomes:

right       figures and predictions are those of an undisturbed run, to the bit
told        one clear line (an error or a warning) names what is wrong
silent      other figures or predictions without a line, or a file's code was executed
lost        the run cannot be continued, or a process does not end
tracebacks  a traceback, or a process that crashed

Prints a table by kind of fault. The exit status is 1 if one of the last three occurs.
"""

import argparse
import collections
import contextlib
import io
import os
import pathlib
import pickle
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import fedjax_ssl  # noqa: E402
from benchmarks.harness import describe, write  # noqa: E402
from fedjax_ssl.base.errors import StoppedError  # noqa: E402
from fedjax_ssl.data.sources import load_dataset  # noqa: E402
from fedjax_ssl.report import write_report  # noqa: E402

FIELDS = {
    "num_rounds": 6, "num_clients": 8, "clients_per_round": 4, "checkpoint_every": 2, "data.source": "folder",
    "residence.clients": "disk", "compression.kind": "top_k", "compression.share": 0.5,
    "data.server_labels": 40, "data.examples_per_client": 33, "model.name": "mlp", "augment.flavour": "none",
    "server.augmentation": "weak", "client.epochs": 1, "server.pretrain_epochs": 1, "log.report": False,
    "log.tensorboard": False,
}  # fmt: skip
METHODS = ("fedanchor", "semifl", "fedil", "fixmatch", "sage", "supervised")  # that are killed
OUTCOMES = ("right", "told", "silent", "lost", "tracebacks")
SECONDS = 120  # after which a process does not end
IMAGES = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8)
Outcome = tuple[str, str, str]  # kind of fault, outcome, why


def config_of(**fields):
    """A run of a few seconds."""
    config = fedjax_ssl.base_config()
    config.update_from_flattened_dict({**FIELDS, **fields})
    return config


def results(folder: pathlib.Path) -> tuple[bytes, bytes]:
    """A run's figures and its model's predictions."""
    return (folder / "metrics.jsonl").read_bytes(), fedjax_ssl.load(folder)(IMAGES).probabilities.tobytes()


def write_images(folder: pathlib.Path, digits: fedjax_ssl.data.Dataset) -> None:
    """Writes FOLDER/train/CLASS/ROW.png and FOLDER/test/CLASS/ROW.png."""
    for part in ("train", "test"):
        for row, (image, label) in enumerate(zip(getattr(digits, f"x_{part}"), getattr(digits, f"y_{part}"))):
            file = folder / part / str(label) / f"{row:04}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[..., 0]).save(file)


class Trial:
    """What the parts share: a folder, random numbers, and a finished run that is not touched."""

    def __init__(self, folder: pathlib.Path, seed: int, count: int):
        self.folder, self.rng, self.count = folder, random.Random(seed), count
        self.whole, self.stopped, self.mark = folder / "whole", folder / "stopped", folder / "executed"
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        FIELDS["data.path"] = str(folder / "images")
        write_images(folder / "images", load_dataset(config_of(**{"data.source": "digits", "data.path": ""}).data))
        fedjax_ssl.train(config_of(num_rounds=4), self.stopped)
        shutil.copytree(self.stopped, self.whole)
        fedjax_ssl.train(config_of(), self.whole)
        self.expected = results(self.whole)

    def copy(self, of: pathlib.Path | None = None) -> pathlib.Path:
        """A fresh copy of a run; of the finished one by default."""
        shutil.rmtree(self.folder / "copy", ignore_errors=True)
        return shutil.copytree(of or self.whole, self.folder / "copy")

    def decoded(self) -> pathlib.Path:
        """The run's images in the cache."""
        fedjax_ssl.train(config_of(), self.copy())
        return max((self.folder / "cache" / "fedjax_ssl" / "images").iterdir(), key=os.path.getatime)

    def judged(self, use: Callable[[], object], compare: bool = True) -> tuple[str, str]:
        """The outcome of using files, and why; `compare` results with those of the finished run."""
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                found = use()
        except (fedjax_ssl.UserError, StoppedError, OSError) as error:
            outcome = ("tracebacks" if "\n" in str(error) else "told"), str(error)
        except Exception as error:
            outcome = "tracebacks", repr(error)
        else:
            warnings = [line for line in said.getvalue().splitlines() if "warning" in line]
            equal = not compare or found == self.expected
            outcome = ("right" if equal else "told" if warnings else "silent"), " ".join(warnings)
        if self.mark.exists():
            self.mark.unlink()
            return "silent", "a file's code was executed"
        return outcome

    def used(self, folder: pathlib.Path) -> tuple[str, str]:
        """The outcome of reporting, loading and resuming the run in a folder: the worst of the three."""

        def resume():
            fedjax_ssl.train(config_of(), folder)
            return results(folder)

        uses = ((lambda: write_report(folder), False), (lambda: fedjax_ssl.load(folder), False), (resume, True))
        return max((self.judged(*use) for use in uses), key=lambda found: OUTCOMES.index(found[0]))


# --- Files of a run. --------------------------------------------------------------------------------------------------


def files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def flips(trial: Trial) -> Iterator[Outcome]:
    """One flipped bit in the newest checkpoint, drawn uniformly over all bits of its files, or in another file."""
    decoded = trial.decoded()
    for turn in range(trial.count):
        what = ("a checkpoint", "the clients' memory", "decoded images")[turn % 3]
        folder = trial.copy(None if what == "a checkpoint" else trial.stopped)
        newest = max((folder / "checkpoints").iterdir(), key=lambda path: (path.name.isdigit(), path.name))
        files = {"a checkpoint": files_in(newest), "decoded images": [decoded]}.get(what, [folder / "clients.sqlite"])
        (file,) = trial.rng.choices(files, [path.stat().st_size for path in files])
        content = bytearray(file.read_bytes())
        content[trial.rng.randrange(len(content))] ^= 1 << trial.rng.randrange(8)
        file.write_bytes(content)
        yield f"a flipped bit of {what}", *trial.used(folder)


def holes(trial: Trial) -> Iterator[Outcome]:
    """A piece of the records is lost: one byte, thirty, or all up to the end."""
    for _ in range(trial.count):
        folder = trial.copy()
        file = folder / "metrics.jsonl"
        content, start = file.read_bytes(), trial.rng.randrange(file.stat().st_size)
        file.write_bytes(content[:start] + content[start + trial.rng.choice([1, 30, len(content)]) :])
        yield "a hole in metrics.jsonl", *trial.used(folder)


def exchanges(trial: Trial) -> Iterator[Outcome]:
    """A file of a run with another seed or rate, or of other images, or another row, takes the place of the own one."""
    for name, fields in (("seed", {"seed": 1}), ("rate", {"client.learning_rate": 0.01})):
        fedjax_ssl.train(config_of(**fields), trial.folder / name)
    names = ("config.json", "partition.npz", "dataset.json", "metrics.jsonl", "summary.json", "checkpoints",
             "clients.sqlite")  # fmt: skip
    yield from exchanged_content(trial)
    for turn in range(trial.count):
        name = names[turn % len(names)]
        folder = trial.copy(trial.stopped if name == "clients.sqlite" else None)  # a finished run does not read it
        other = trial.folder / trial.rng.choice(["seed", "rate"]) / name
        if other.is_dir():
            shutil.rmtree(folder / name)
            shutil.copytree(other, folder / name)
        else:
            shutil.copy(other, folder / name)
        yield f"another run's {name}", *trial.used(folder)


def exchanged_content(trial: Trial) -> Iterator[Outcome]:
    """Decoded images of another folder; a client's row is lost or older; two images of a class, then two classes."""
    own, images = trial.decoded(), trial.folder / "images"
    digits = load_dataset(config_of().data)
    write_images(trial.folder / "others", digits._replace(x_train=255 - digits.x_train, x_test=255 - digits.x_test))
    load_dataset(config_of(**{"data.path": str(trial.folder / "others")}).data)
    (other,) = (path for path in own.parent.iterdir() if path != own and path.stat().st_size == own.stat().st_size)
    shutil.copy(other, own)
    yield "other decoded images", *trial.used(trial.copy(trial.stopped))
    for client in range(8):
        with contextlib.closing(sqlite3.connect(trial.copy(trial.stopped) / "clients.sqlite")) as file, file:
            newest = file.execute("SELECT MAX(round) FROM rows WHERE client = ?", (client,)).fetchone()[0]
            file.execute("DELETE FROM rows WHERE client = ? AND round = ?", (client, newest))
        yield "a client's row is lost", *trial.used(trial.folder / "copy")
    first, second = sorted((images / "train" / "3").iterdir())[:2]
    pairs = {"two images of a class": (first, second), "two classes": (images / "train" / "3", images / "train" / "5")}
    for what, (one, two) in pairs.items():
        for _ in range(2):  # there and back
            one.rename(images.parent / "aside")
            two.rename(one)
            (images.parent / "aside").rename(two)
            yield f"{what} are exchanged, or back", *trial.used(trial.copy(trial.stopped))


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, mark: pathlib.Path):
        self.mark = str(mark)

    def __reduce__(self):
        return open, (self.mark, "w")


def hostile(trial: Trial) -> Iterator[Outcome]:
    """A file of a run, a data set or a partition is replaced by one that carries code or is none of its kind."""
    pickled = pickle.dumps(Payload(trial.mark))
    objects, rows = io.BytesIO(), load_dataset(config_of().data)
    arrays = {"x_train": rows.x_train, "y_train": rows.y_train, "x_test": rows.x_test, "y_test": rows.y_test}
    with np.load(trial.whole / "partition.npz") as partition:
        names = {*arrays, *partition.files}
    np.savez(objects, **dict.fromkeys(names, np.array([Payload(trial.mark)] * 9, dtype=object)))
    script = f"open({str(trial.mark)!r}, 'w')\n".encode()
    contents = {
        "a pickle": pickled, "pickled objects among arrays": objects.getvalue(), "a script": script, "nothing": b"",
        "random bytes": random.Random(0).randbytes(5000), "half an archive": objects.getvalue()[:500], "JSON": b"[1]\n",
    }  # fmt: skip
    targets = ("config.json", "partition.npz", "dataset.json", "metrics.jsonl", "summary.json", "class_counts.npz")
    cases = [(what, target) for what in contents for target in (*targets, "npz", "partition_file")]
    trial.rng.shuffle(cases)
    for what, target in cases[: trial.count]:
        file = trial.folder / "hostile.npz"
        file.write_bytes(contents[what])
        if target in targets:
            folder = trial.copy()
            shutil.copy(file, folder / target)
            yield f"{what} as a run's file", *trial.used(folder)
            continue
        fields = {"data.partition_file": str(file)}
        if target == "npz":
            fields = {"data.source": "npz", "data.path": str(file)}
        yield f"{what} as data", *trial.judged(lambda fields=fields: fedjax_ssl.train(config_of(**fields)))


# --- Processes. -------------------------------------------------------------------------------------------------------


def start(workdir: pathlib.Path, limit: int | None = None, method: str = "fedanchor") -> subprocess.Popen:
    """Starts a run by the command line; `limit`: bytes of the largest file that it can write."""
    words = [f"--config.{name}={str(value).lower()}" for name, value in FIELDS.items()]
    command = [sys.executable, str(ROOT / "launch.py"), f"--config={ROOT}/configs/quickstart.py:{method}", *words]
    if limit is not None:
        command = ["prlimit", f"--fsize={limit}", *command]
    return subprocess.Popen([*command, f"--workdir={workdir}"], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen) -> tuple[int | None, str]:
    """Status and stderr of a process; no status if it does not end."""
    try:
        return process.wait(SECONDS), process.communicate()[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return None, process.communicate()[1]


def reference(trial: Trial, method: str = "fedanchor") -> tuple[pathlib.Path, float]:
    """An undisturbed run of the command line, and its seconds with its programs in the cache."""
    for name in (f"{method}_first", method):
        began = time.monotonic()
        status, said = ended(start(trial.folder / name, method=method))
        assert status == 0, said
    return trial.folder / method, time.monotonic() - began


def goes_on(workdir: pathlib.Path, whole: pathlib.Path) -> str:
    """Whether the same command ends a stopped run with the results of an undisturbed one."""
    status, said = ended(start(workdir, method=whole.name))
    if "Traceback" in said:
        return "tracebacks"
    return "right" if status == 0 and results(workdir) == results(whole) else "lost"


def kills(trial: Trial) -> Iterator[Outcome]:
    """SIGKILL at random moments of a method's run, which is started again each time and then left to end."""
    for place, method in enumerate(METHODS):
        number = trial.count // len(METHODS) + (place < trial.count % len(METHODS))
        whole, seconds = reference(trial, method) if number else (None, 0.0)
        workdir = trial.folder / f"{method}_killed"
        for _ in range(number):
            process = start(workdir, method=method)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(trial.rng.uniform(0.3, 1) * seconds)
            process.kill()
            if "Traceback" in (said := ended(process)[1]):
                yield f"SIGKILL, {method}", "tracebacks", said.splitlines()[-1]
        outcome = goes_on(workdir, whole) if number else ""
        yield from number * [(f"SIGKILL, {method}", outcome, "")]


def signals(trial: Trial) -> Iterator[Outcome]:
    """SIGINT and SIGTERM while a run begins, compiles or trains: it ends with its status, and goes on to the bit."""
    whole, seconds = reference(trial)
    for turn in range(trial.count):
        workdir, number = trial.folder / f"signal_{turn}", (signal.SIGINT, signal.SIGTERM)[turn % 2]
        process = start(workdir)
        time.sleep(trial.rng.uniform(0.5, 1) * seconds)
        process.send_signal(number)
        status, said = ended(process)
        if "Traceback" in said or status is None or status not in (0, 128 + number, -number):
            yield number.name, ("lost" if status is None else "tracebacks"), said[-200:]
        else:
            yield number.name, goes_on(workdir, whole), ""


def disk(trial: Trial) -> Iterator[Outcome]:
    """No file can grow beyond a length, as on a full disk: the run ends with a line, and goes on when there is room."""
    whole, _ = reference(trial)
    largest = max(path.stat().st_size for path in files_in(whole))
    for turn in range(trial.count):
        workdir = trial.folder / f"full_{turn}"
        status, said = ended(start(workdir, trial.rng.randrange(100, largest)))
        lines = [line for line in said.splitlines() if line.startswith(("error:", "stopped:", "the run is"))]
        if "Traceback" in said or status not in (0, 2, 4) or (status and len(lines) != 1):
            yield "a full disk", "tracebacks", said[-200:]
        else:
            outcome = goes_on(workdir, whole)
            yield "a full disk", ("told" if lines and outcome == "right" else outcome), " ".join(lines)


PARTS = {flips: 100, holes: 12, exchanges: 60, hostile: 56, kills: 50, signals: 12, disk: 12}  # with their tries


def main() -> None:
    """Reads the arguments, runs the parts, and writes the outcomes."""
    names = {part.__name__: part for part in PARTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=",".join(names), help="names, with commas between; all by default")
    parser.add_argument("--count", type=int, help="tries of each part; each part's own number by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="faults.json")
    options = parser.parse_args()
    found, reasons = collections.defaultdict(collections.Counter), {}
    for name in options.part.split(","):
        with tempfile.TemporaryDirectory(prefix="faults") as folder:
            trial = Trial(pathlib.Path(folder), options.seed, options.count or PARTS[names[name]])
            for kind, outcome, why in names[name](trial):
                found[name, kind][outcome] += 1
                reasons[name, kind, outcome] = " ".join(why.replace(folder, ".").split())[:200]
                if OUTCOMES.index(outcome) > 1:
                    print(f"{kind}: {outcome} {why}", flush=True)
        rows = [
            {"part": part, "fault": kind, "tries": counts.total(), **{name: counts[name] for name in OUTCOMES}}
            for (part, kind), counts in found.items()
        ]
        write(options.out, describe(), rows)  # after each part: a stopped run keeps what it has
    for (_, kind, outcome), why in reasons.items():
        if why:
            print(f"{kind}, {outcome}: {why}")
    bad = sum(row[name] for row in rows for name in OUTCOMES[2:])
    print(f"\n{sum(row['tries'] for row in rows)} tries, {bad} that must not be")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
