"""origin.json: the code, command, packages and machine of each start of a run.

The diff of a checkout with changes, the config file and the user's own files are copied into origin/, each named by the
first digits of its SHA-256 and its name. The only personal data are the host's name and the command as it was typed.
"""

import datetime
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shlex
import socket
import subprocess
import sys
from typing import NamedTuple

from fedjax_ssl.base.errors import printable
from fedjax_ssl.base.files import PACKAGE, replaced
from fedjax_ssl.base.imports import RUN_AS, source_of
from fedjax_ssl.records.sealed import read_sealed, write_sealed
from fedjax_ssl.records.workdir import ORIGIN, ORIGIN_FILES

# Packages whose versions can change a result; a resumed run names those that differ.
COMPUTING = ("jax", "jaxlib", "flax", "optax", "numpy", "scikit-learn")
_DIFF = "changes.diff"


class Start(NamedTuple):
    """One start of a run."""

    command: str  # as it was typed, without the folder of the program; 'a notebook' in a notebook
    start: str  # time in UTC, ISO 8601
    end: str | None  # the same; None until the last round is done
    host: str  # its name
    processor: str  # its model and how many of its cores this process may use
    python: str  # version
    commit: str | None  # of the library's checkout, else of the current folder's repository; None without either
    dirty: bool | None  # whether tracked files differ from the commit; None without a commit
    diff: str | None  # SHA-256 of `git diff HEAD`; None without changes
    library: str  # SHA-256 of the library's Python files
    files: dict[str, str]  # name -> SHA-256 of config files and of the user's files with methods, backbones and rules
    packages: dict[str, str]  # name -> version, of the library and of the packages that compute

    def code(self) -> str:
        """The code in a few words: 'commit 1a2b3c4d5e6f with changes (origin/...)' or the library's version."""
        version = f"fedjax_ssl {self.packages.get('fedjax_ssl', 'of unknown version')}"
        if self.commit is None:
            return f"{version}, not from a git repository"
        changes = f" with changes, diff in {ORIGIN_FILES}/{_copy_name(self.diff, _DIFF)}" if self.diff else ""
        return f"{version}, commit {self.commit[:12]}{changes}"

    def facts(self) -> dict[str, str]:
        """The facts for people, in words. The texts are escaped, since anybody may have written the file."""
        found = {
            "command": self.command,
            "code": self.code(),
            "own files": ", ".join(self.files),
            "machine": f"{self.processor}, host {self.host}",
            "time": f"{self.start} to {self.end or '?'}",
        }
        return {name: printable(value) for name, value in found.items() if value}


def note_start(folder: pathlib.Path) -> None:
    """Adds this process to a run's origin.json, and copies the files that it names."""
    commit, diff = repository(PACKAGE)
    contents = {**_own_files(), **({_DIFF: diff} if diff else {})}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    for name, content in contents.items():
        (folder / ORIGIN_FILES).mkdir(exist_ok=True)
        with replaced(folder / ORIGIN_FILES / _copy_name(digests[name], name)) as file:
            file.write(content)
    start = Start(
        command=_command(),
        start=_now(),
        end=None,
        host=socket.gethostname(),
        processor=_processor(),
        python=platform.python_version(),
        commit=commit,
        dirty=None if commit is None else bool(diff),
        diff=digests.pop(_DIFF, None),
        library=checksum_of_library(),
        files=digests,
        packages=packages(),
    )
    _write(folder, [*read_starts(folder), start])


def note_end(folder: pathlib.Path) -> None:
    """Notes in origin.json that the last round is done."""
    if starts := read_starts(folder):
        _write(folder, [*starts[:-1], starts[-1]._replace(end=_now())])


def read_starts(folder: pathlib.Path) -> list[Start]:
    """The starts in a run's origin.json, the newest last; [] if the file is missing or damaged."""
    try:
        return [Start(**entry) for entry in read_sealed(folder / ORIGIN)["starts"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def what_differs(folder: pathlib.Path) -> str:
    """How the code of a run's newest start differs from this process's code, in one line; '' if it does not."""
    starts = read_starts(folder)
    if not starts:
        return ""
    then, differ = starts[-1], changed_files(folder)
    if then.library != checksum_of_library():
        there, here = ((commit or "none")[:12] for commit in (then.commit, repository(PACKAGE)[0]))
        differ.insert(0, "the library" + (f": commit {there} there, {here} here" if there != here else ""))
    here = {"python": platform.python_version(), **packages()}
    for name, version in {"python": then.python, **then.packages}.items():
        if name != "fedjax_ssl" and version != here.get(name):
            differ.append(f"{name} {version} there, {here.get(name, 'none')} here")
    return printable("; ".join(differ))


def changed_files(folder: pathlib.Path) -> list[str]:
    """The names of the user's loaded files that differ from those of a run's newest start."""
    then = {name: digest for start in read_starts(folder)[-1:] for name, digest in start.files.items()}
    here = {name: hashlib.sha256(content).hexdigest() for name, content in _own_files().items()}
    return [name for name, digest in here.items() if then.get(name, digest) != digest]


@functools.cache
def packages() -> dict[str, str]:
    """Name -> version of the library and of the packages that compute, if they are installed."""
    found = {}
    for name in ("fedjax_ssl", *COMPUTING):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def checksum_of_library() -> str:
    """SHA-256 of the library's Python files."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@functools.cache
def repository(package: pathlib.Path) -> tuple[str | None, bytes]:
    """The commit and `git diff HEAD` of a package's repository, else of the current folder's; else (None, b'')."""
    for place in (package, pathlib.Path(os.curdir)):
        commit = _git(place, "rev-parse", "HEAD")
        if commit is not None:
            diff = _git(place, "diff", "--no-ext-diff", "--no-color", "HEAD", "--", ":/")
            return commit.decode().strip(), diff or b""
    return None, b""


def _git(place: pathlib.Path, *words: str) -> bytes | None:
    """What git prints; None if it fails, is not installed or takes longer than 10 s."""
    command = ["git", "--no-optional-locks", *words]
    try:
        return subprocess.run(command, cwd=place, capture_output=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _own_files() -> dict[str, bytes]:
    """Name -> content, as it ran, of the user's files: their path in the current folder, or else their last part."""
    found: dict[str, bytes] = {}
    for module in [module for name, module in sys.modules.items() if name.startswith(RUN_AS)]:
        path, content = pathlib.Path(module.__file__), source_of(module)
        name = path.relative_to(os.getcwd()).as_posix() if path.is_relative_to(os.getcwd()) else path.name
        if name in found:
            name = f"{name} ({hashlib.sha256(content).hexdigest()[:8]})"
        found[name] = content
    return found


def _copy_name(digest: str, name: str) -> str:
    return f"{digest[:12]}-{os.path.basename(name)}"


def _command() -> str:
    program, *words = sys.argv or ["python"]
    folder, name = os.path.split(program)
    started = ["python", "-m", os.path.basename(folder)] if name == "__main__.py" else [name or "python"]
    return "a notebook" if "ipykernel" in program else shlex.join([*started, *words])


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} core{'s' if cores != 1 else ''}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _write(folder: pathlib.Path, starts: list[Start]) -> None:
    write_sealed(folder / ORIGIN, {"starts": [start._asdict() for start in starts]})
