"""origin.json: the code, command, packages and machine of each start of a run.

The diff of a checkout with changes, the config file and the user's own files are copied into origin/, each named by the
first digits of its SHA-256 and its name. The only personal data are the host's name and the command as it was typed.
"""

import concurrent.futures
import datetime
import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import shlex
import socket
import subprocess
import sys
import sysconfig
import types
from typing import Any, NamedTuple

from fedjax_ssl.errors import printable
from fedjax_ssl.files import PACKAGE, make_folder, read_json, replace_file, replaced
from fedjax_ssl.imports import RUN_AS, source_of
from fedjax_ssl.models.cpu.processor import description
from fedjax_ssl.records.workdir import ORIGIN, ORIGIN_FILES

MOST_BYTES, MOST_FILES = 20_000_000, 100  # of a copy; number of copies. Beyond these only checksums are kept
GIT_SECONDS = 10  # time limit for git, after which the repository is ignored
# Packages whose versions can change a result; a resumed run names those that differ.
COMPUTING = ("jax", "jaxlib", "flax", "optax", "numpy", "scikit_learn")


class Start(NamedTuple):
    """One start of a run.

    Attributes:
        command: as it was typed, without the folder of the program; 'a notebook' in a notebook.
        start, end: times in UTC, ISO 8601; the end is None until the last round is done.
        host: its name.
        processor: its model and how many of its cores this process may use.
        python: version.
        commit: of the library's checkout, else of the current folder's repository; None without either.
        dirty: whether its files differ from the commit, or a loaded file of the library is not in it;
            None without a commit.
        diff: SHA-256 of `git diff HEAD`; None without changes.
        library: SHA-256 of the library's Python files.
        files: name -> SHA-256 of config files, the user's methods and backbones, and other loaded files that are
            neither installed nor in the commit.
        packages: name -> version of all installed packages; names have underscores instead of hyphens.
    """

    command: str
    start: str
    end: str | None
    host: str
    processor: str
    python: str
    commit: str | None
    dirty: bool | None
    diff: str | None
    library: str
    files: dict[str, str]
    packages: dict[str, str]

    def code(self) -> str:
        """The code in a few words: 'commit 1a2b3c4d5e6f with changes (origin/...)' or the library's version."""
        version = f"fedjax_ssl {self.packages.get('fedjax_ssl', 'of unknown version')}"
        if self.commit is None:
            return f"{version}, not from a git repository"
        changes = f", diff in {ORIGIN_FILES}/{_copy_name(self.diff, 'changes.diff')}" if self.diff else ""
        return f"{version}, commit {self.commit[:12]}" + (f" with changes{changes}" if self.dirty else "")

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


class _Repository(NamedTuple):
    """What git says about the code, see `Start`; `tracked` has real paths."""

    commit: str | None = None
    diff: bytes = b""
    tracked: frozenset[str] = frozenset()


@functools.cache
def look() -> concurrent.futures.Future[_Repository]:
    """Asks git about the code that this process runs, in a thread, once per process."""
    pool = concurrent.futures.ThreadPoolExecutor(1, "origin")
    found = pool.submit(_repository, PACKAGE, pathlib.Path(_here()))
    pool.shutdown(wait=False)
    return found


def note_start(folder: pathlib.Path) -> None:
    """Adds this process to a run's origin.json, and copies the files that it names.

    Raises:
        OSError: the folder cannot be written to.
    """
    repository, files = look().result(), _own_files()
    untracked = {path: content for path, content in files.items() if path not in repository.tracked}
    contents = {**_named(files), **({"changes.diff": repository.diff} if repository.diff else {})}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    for name, content in list(contents.items())[-MOST_FILES:]:  # the diff is the last
        copy = folder / ORIGIN_FILES / _copy_name(digests[name], name)
        make_folder(copy.parent)
        if len(content) <= MOST_BYTES and not os.path.lexists(copy):
            with replaced(copy) as file:
                file.write(content)
    diff = digests.pop("changes.diff") if repository.diff else None
    start = Start(
        command=_command(),
        start=_now(),
        end=None,
        host=socket.gethostname(),
        processor=_processor(),
        python=platform.python_version(),
        commit=repository.commit,
        dirty=None if repository.commit is None else bool(diff) or any(_in_library(path) for path in untracked),
        diff=diff,
        library=checksum_of_library(),
        files=digests,
        packages=packages(),
    )
    _write(folder, [*read_starts(folder), start])


def note_end(folder: pathlib.Path) -> None:
    """Notes in origin.json that the last round is done.

    Raises:
        OSError: the folder cannot be written to.
    """
    if starts := read_starts(folder):
        _write(folder, [*starts[:-1], starts[-1]._replace(end=_now())])


def read_starts(folder: pathlib.Path) -> list[Start]:
    """The starts in a run's origin.json, the newest last; [] if the file is missing or holds something else."""
    try:
        found = [_parse(entry) for entry in read_json(folder / ORIGIN)]
    except (OSError, ValueError, TypeError):
        return []
    return [start for start in found if start is not None]


def what_differs(folder: pathlib.Path) -> str:
    """How the code of a run's newest start differs from this process's code, in one line; '' if it does not."""
    starts = read_starts(folder)
    if not starts:
        return ""
    then, commit, differ = starts[-1], look().result().commit, []
    if then.library != checksum_of_library():
        commits = [(name or "none")[:12] for name in (then.commit, commit)]
        other = ": commit {} there, {} here".format(*commits) if commits[0] != commits[1] else ", of the same commit"
        differ.append(f"the library{other}")
    differ += _changed_files(then)
    here = {"python": platform.python_version(), **packages()}
    for name, version in {"python": then.python, **then.packages}.items():
        if name in ("python", *COMPUTING) and version != here.get(name):
            differ.append(f"{name} {version} there, {here.get(name, 'none')} here")
    return printable("; ".join(differ))


def changed_files(folder: pathlib.Path) -> list[str]:
    """The names of the user's loaded files that differ from those of a run's newest start."""
    starts = read_starts(folder)
    return _changed_files(starts[-1]) if starts else []


def _changed_files(then: Start) -> list[str]:
    here = {name: hashlib.sha256(content).hexdigest() for name, content in _named(_own_files()).items()}
    return [name for name, digest in here.items() if then.files.get(name, digest) != digest]


@functools.cache
def packages() -> dict[str, str]:
    """Name -> version of the installed packages; names have underscores instead of hyphens.

    They are read from folder names, because reading the metadata of 180 packages takes 0.3 s.
    """
    found: dict[str, str] = {}
    for entry in _metadata_folders():
        name, _, version = entry.name.removesuffix(".dist-info").rpartition("-")
        found.setdefault(re.sub(r"[-_.]+", "_", name).lower(), version)
    return dict(sorted(found.items()))


@functools.cache
def _metadata_folders() -> list[pathlib.Path]:
    return [entry for place in map(pathlib.Path, sys.path) if place.is_dir() for entry in place.glob("*.dist-info")]


@functools.cache
def checksum_of_library() -> str:
    """SHA-256 of the library's Python files."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _repository(package: pathlib.Path, current: pathlib.Path) -> _Repository:
    """The repository of a package's folder if git tracks the package, else that of the current folder."""
    for place, file in ((package, "__init__.py"), (current, None)):
        # If a package is installed somewhere inside a repository, git does not know its file.
        if file is None or _git(place, "ls-files", "--error-unmatch", file) is not None:
            commit, top = _git(place, "rev-parse", "HEAD"), _git(place, "rev-parse", "--show-toplevel")
            tracked, diff = _git(place, "ls-files", "-z", "--full-name", ":/"), _git(place, *_DIFF)
            if commit is not None and top is not None and tracked is not None and diff is not None:
                root = os.path.realpath(os.fsdecode(top.rstrip(b"\n")))
                paths = frozenset(os.path.join(root, os.fsdecode(name)) for name in tracked.split(b"\0") if name)
                return _Repository(commit.decode().strip(), diff, paths)
    return _Repository()


# Of the whole repository, in git's own format: a repository may name programs that write diffs.
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", ":/")


def _git(place: pathlib.Path, *words: str) -> bytes | None:
    """What git prints; None if it fails, is not installed or takes too long."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *words]
    try:
        done = subprocess.run(command, cwd=place, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _loaded() -> dict[str, types.ModuleType]:
    """Real path -> module of loaded files: the library's, and those outside of Python and installed packages."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {str(entry.parent) for entry in _metadata_folders()}  # such as a user's or a cluster's packages
    folders = tuple(f"{path}{os.sep}" for path in {*installed, *map(os.path.realpath, installed)})
    modules = sorted(sys.modules.values(), key=_is_run)  # of several modules of a file the one that was run
    named = {getattr(module, "__file__", None): module for module in modules}
    paths = {path for path in named if path and os.path.isabs(path)}  # modules made at run time have other names
    # Resolving thousands of installed modules would take 0.1 s.
    others = {path for path in paths if path.endswith(".py") and (_in_library(path) or not path.startswith(folders))}
    found = {os.path.realpath(path): named[path] for path in sorted(others)}
    return {path: found[path] for path in sorted(found) if _in_library(path) or not path.startswith(folders)}


def _is_run(module: Any) -> bool:
    """Whether `run_file` made a module."""
    return str(getattr(module, "__name__", "")).startswith(RUN_AS)


def _in_library(path: str) -> bool:
    return path.startswith(f"{PACKAGE}{os.sep}")


def _own_files() -> dict[str, bytes]:
    """Real path -> content, as it ran, of the user's loaded files, see `Start.files`, if they can be read."""
    tracked, contents = look().result().tracked, {}
    is_checkout = str(PACKAGE / "__init__.py") in tracked  # else the library's version identifies its files
    for path, module in _loaded().items():
        is_known = path in tracked or (_in_library(path) and not is_checkout)
        if _is_run(module) or not is_known:
            try:
                contents[path] = source_of(module)
            except OSError:  # it is gone
                continue
    return contents


def _named(files: dict[str, bytes]) -> dict[str, bytes]:
    """Renames the files: to their path relative to the current folder, or to their last part if they are elsewhere."""
    here, found = _here(), {}
    for path, content in files.items():
        name = os.path.relpath(path, here) if path.startswith(f"{here}{os.sep}") else os.path.basename(path)
        if name in found:
            name = f"{name} ({hashlib.sha256(content).hexdigest()[:8]})"
        found[name] = content
    return found


def _here() -> str:
    """The current folder, or the root if it was removed."""
    try:
        return os.path.realpath(os.getcwd())
    except OSError:
        return os.sep


def _copy_name(digest: str, name: str) -> str:
    return f"{digest[:12]}-{os.path.basename(name)}"


def _command() -> str:
    program, *words = sys.argv or ["python"]
    folder, name = os.path.split(program)
    started = ["python", "-m", os.path.basename(folder)] if name == "__main__.py" else [name or "python"]
    return "a notebook" if "ipykernel" in program else shlex.join([*started, *words])


def _processor() -> str:
    lines = [line.partition(":")[2].strip() for line in description().splitlines() if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{lines[0] if lines else platform.machine()}, {cores} core{'s' if cores != 1 else ''}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _write(folder: pathlib.Path, starts: list[Start]) -> None:
    replace_file(folder / ORIGIN, json.dumps([start._asdict() for start in starts], indent=1) + "\n")


def _parse(entry: Any) -> Start | None:
    """A start from an entry of the file; None if the entry is not valid."""
    if not isinstance(entry, dict) or set(entry) != set(Start._fields):
        return None
    texts, others = ("command", "start", "host", "processor", "python", "library"), ("end", "commit", "diff")
    maps = [entry[name] for name in ("files", "packages")]
    is_start = (
        all(isinstance(entry[name], str) for name in texts)
        and all(isinstance(entry[name], str | None) for name in others)
        and isinstance(entry["dirty"], bool | None)
        and all(isinstance(each, dict) and all(isinstance(value, str) for value in each.values()) for each in maps)
    )
    return Start(**entry) if is_start else None
