"""Imports a user's code by import path, MODULE:NAME or FILE.py:NAME, and reports its errors in one line."""

import contextlib
import hashlib
import importlib
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

from fedjax_ssl.base.errors import UserError, causes, first_line, nearest
from fedjax_ssl.base.files import expanded, read_whole

CODE_FIELDS = ("method", "model.name", "confidence.kind")  # fields that may name a user's code
RUN_AS = "fedjax_ssl_own_"  # how the modules' names begin that `run_file` makes

_FILES: dict[pathlib.Path, types.ModuleType] = {}  # imported files; one run uses one version of them
_OWN: set[str] = set()  # the files of all code that this process ran for a user


def is_own(name: str) -> bool:
    """Whether a name is an import path."""
    return ":" in name


def name_of(method: str) -> str:
    """A method's name without its path; `method` is a name or an import path."""
    place, _, name = method.rpartition(":")
    return re.split(r"[/\\.]", place.removesuffix(".py"))[-1] if place and name == "ENTRY" else name


def import_own(field: str, name: str) -> tuple[Any, str | None]:
    """Imports the object that a path names; also returns its file, None if the module has none.

    The path `name` is MODULE:NAME or FILE.py:NAME. A module is installed or in the current folder; a file may import
    from its own folder. Raises a UserError, which names the configuration's `field`, if the name leads nowhere, or the
    import fails.
    """
    place, _, attribute = name.rpartition(":")
    path = expanded(place).resolve() if place.endswith(".py") else None
    # Appended, so that these modules replace no installed module. Python itself searches the script's folder only.
    folder = str(path.parent) if path else os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()  # the file may have been written just now
    with one_line(field, name, f"importing {place} fails", str(path) if path else None):
        if path is not None and path not in _FILES:
            _FILES[path] = run_file(path)
        module = importlib.import_module(place) if path is None else _FILES[path]
    file = getattr(module, "__file__", None)  # a folder without an __init__.py has none
    _OWN.add(str(file))
    if not hasattr(module, attribute):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise UserError(f"{field}={name}: {file or place} has no {attribute or 'such name'}{nearest(attribute, known)}")
    return getattr(module, attribute), file


def loaded(name: str) -> types.ModuleType | str:
    """The module that was imported for an import path; another one after its file has changed."""
    place = name.rpartition(":")[0]
    return _FILES.get(expanded(place).resolve(), place)


def forget_changed() -> None:
    """Forgets the imported files that are changed or gone, so that the next import runs them again."""
    for file, module in list(_FILES.items()):
        with contextlib.suppress(OSError):  # it is gone, or may not be read any more
            if file.read_bytes() == source_of(module):
                continue
        _FILES.pop(file, None)


def run_file(file: pathlib.Path) -> types.ModuleType:
    """Runs a Python file, an absolute path, and returns its module. Raises whatever the file raises."""
    source = read_whole(file)
    _OWN.add(str(file))
    # A prefix and a digest, so that a file called random.py, or two of one name, replace no other module.
    module = types.ModuleType(f"{RUN_AS}{file.stem}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:8]}")
    module.__file__ = str(file)
    module.__dict__["__source__"] = source
    sys.modules[module.__name__] = module  # dataclasses, and so Flax modules, look up annotations there
    # These bytes, which the run's origin keeps. Python's own loader may run an older version from its cache instead.
    exec(compile(source, str(file), "exec", dont_inherit=True), vars(module))
    return module


def source_of(module: types.ModuleType) -> bytes:
    """The content of a loaded module's file; what ran, if `run_file` made it. Raises OSError if it cannot be read."""
    return vars(module).get("__source__") or read_whole(pathlib.Path(str(module.__file__)))


def own_error(error: BaseException) -> str | None:
    """One line about an error, or one of those that caused it, that went through a user's code, with the place there.

    None for other errors.
    """
    for each in causes(error):
        frames = [frame for frame in traceback.extract_tb(each.__traceback__) if frame.filename in _OWN]
        if frames:
            return f"{type(each).__name__} in line {frames[-1].lineno} of {frames[-1].filename}: {first_line(each)}"
    return None


@contextlib.contextmanager
def one_line(field: str, name: str, what: str, file: str | None = None) -> Iterator[None]:
    """Turns an error in a user's code into a UserError of one line, which names the place in the code.

    The line names the field, its value `name`, what fails, and the line of the user's `file`; by default of the last
    file of the traceback.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # It is the user's code: it may raise anything.
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == (file or f.filename)]
        frames = [frame for frame in frames if frame.filename != __file__ and frame.filename[0] != "<"]
        where = f" in line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
        raise UserError(f"{field}={name}: {what} ({type(error).__name__}{where}: {first_line(error)})") from error
