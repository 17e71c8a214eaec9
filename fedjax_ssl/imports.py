"""Imports a user's code by import path, MODULE:NAME or FILE.py:NAME, and reports its errors in one line."""

import contextlib
import hashlib
import importlib
import importlib.util
import os
import pathlib
import re
import sys
import traceback
import types
import weakref
from collections.abc import Iterator
from typing import Any

from fedjax_ssl.errors import UserError, first_line, nearest
from fedjax_ssl.files import expanded, read_whole

CODE_FIELDS = ("method", "model.name", "confidence.kind")  # fields that may name a user's code
RUN_AS = "fedjax_ssl_own_"  # how the modules' names begin that `run_file` makes

_FILES: dict[pathlib.Path, types.ModuleType] = {}  # imported files; one run uses one version of them
# Module -> its spec, which a reload replaces, and the result of `source_of`.
_SOURCES: weakref.WeakKeyDictionary[types.ModuleType, tuple[Any, bytes]] = weakref.WeakKeyDictionary()


def is_own(name: str) -> bool:
    """Whether a name is an import path."""
    return ":" in name


def section_of(name: str) -> str:
    """The name of a method's section in the configuration; `name` is a name or an import path."""
    place, _, section = name.rpartition(":")
    return re.split(r"[/\\.]", place.removesuffix(".py"))[-1] if place and section == "ENTRY" else section


def import_own(field: str, name: str, what: tuple[str, str]) -> tuple[Any, str | None]:
    """Imports the object that a path names.

    Args:
        field: the field of the configuration, for messages.
        name: MODULE:NAME or FILE.py:NAME. A module is installed or in the current folder; a file may import from
            its own folder.
        what: what NAME stands for in messages, such as 'FACTORY', with an example: ('FACTORY', 'my_models:MyBackbone').

    Returns:
        The object, and the file that it was imported from; None if the module has no file.

    Raises:
        UserError: the name leads nowhere, or the import fails.
    """
    place, _, attribute = name.rpartition(":")
    kind, example = what
    if not place or not attribute:
        raise UserError(f"{field}={name} must be MODULE:{kind} or FILE.py:{kind}, as in {example}")
    module = _import_file(field, name, place) if place.endswith(".py") else _import_module(field, name, place, kind)
    file = getattr(module, "__file__", None)  # a folder without an __init__.py has none
    if not hasattr(module, attribute):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = nearest(attribute, [key for key in vars(module) if not key.startswith("_")])
        raise UserError(
            f"{field}={name}: {file or place} has no {attribute}{hint}; it has {', '.join(known) or 'none'}"
        )
    return getattr(module, attribute), file


def _import_module(field: str, name: str, module: str, kind: str) -> Any:
    """Imports a module that is installed or in the current folder."""
    _look_for_modules_in(os.getcwd())
    try:
        with one_line(field, name, f"importing {module} fails"):
            return importlib.import_module(module)
    except UserError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{module}.".startswith(f"{cause.name}."):
            raise UserError(
                f"{field}={name}: there is no module {cause.name}, neither installed nor in {os.getcwd()}; a file "
                f"elsewhere is given as path/to/file.py:{kind}"
            ) from cause
        raise


def _import_file(field: str, name: str, path: str) -> Any:
    """Imports a file, which may import from its own folder."""
    file = expanded(path).resolve()
    if (module := _FILES.get(file)) is not None:
        return module
    if not file.is_file():
        seen = "" if os.path.isabs(path) else f", as seen from {os.getcwd()}"
        raise UserError(f"{field}={name}: there is no file {path}{seen}")
    _look_for_modules_in(str(file.parent))
    with one_line(field, name, f"importing {path} fails", str(file)):
        module = _FILES[file] = run_file(file)
    return module


def forget_changed() -> None:
    """Forgets the imported files that are changed or gone, so that the next import runs them again."""
    for file, module in list(_FILES.items()):
        try:
            is_same = read_whole(file) == source_of(module)
        except OSError:
            is_same = False
        if not is_same:
            _FILES.pop(file, None)


def run_file(file: pathlib.Path) -> types.ModuleType:
    """Runs a Python file, and returns its module.

    Args:
        file: an absolute path that ends with .py.

    Raises:
        Exception: whatever the file raises.
    """
    # A prefix and a digest, so that a file called random.py, or two of one name, replace no other module.
    name = f"{RUN_AS}{file.stem}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    source = read_whole(file)
    sys.modules[name] = module  # dataclasses, and so Flax modules, look up annotations there
    _SOURCES[module] = spec, source
    # These bytes, which the run's origin keeps. Python's own loader may run an older version from its cache instead.
    exec(compile(source, str(file), "exec", dont_inherit=True), vars(module))
    return module


def source_of(module: types.ModuleType) -> bytes:
    """The content of a loaded module's file: what ran if `run_file` made the module, else what the first call found.

    Raises:
        OSError: the file cannot be read.
    """
    spec, found = getattr(module, "__spec__", None), _SOURCES.get(module)
    if found is None or found[0] is not spec:
        found = _SOURCES[module] = spec, read_whole(pathlib.Path(module.__file__))
    return found[1]


def _look_for_modules_in(folder: str) -> None:
    """Appends a folder to `sys.path`: its modules become importable, but replace no installed module.

    Python itself searches the folder of the script, launch.py, and not the current folder.
    """
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()  # the file may have been written just now


@contextlib.contextmanager
def one_line(field: str, name: str, what: str, file: str | None = None) -> Iterator[None]:
    """Turns an error in a user's code into a UserError of one line, which names the place in the code.

    Args:
        field: the field of the configuration, for messages.
        name: the import path.
        what: what fails.
        file: the user's file, whose line is named; by default the last file of the traceback.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # It is the user's code: it may raise anything.
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and f.filename[0] != "<"
        ]
        frames = [frame for frame in frames if file in (None, frame.filename)]
        where = f" in line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
        raise UserError(f"{field}={name}: {what} ({type(error).__name__}{where}: {first_line(error)})") from error
