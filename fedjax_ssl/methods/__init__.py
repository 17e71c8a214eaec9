"""The registry of methods. Each method is a file or a folder of this package, with one line in `NAMES`.

`find_method` also finds methods from outside the library: those registered in this process, and import paths such as
FILE.py:NAME. Methods never access the disk.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from fedjax_ssl.base.errors import UserError, nearest
from fedjax_ssl.base.fields import RECIPES, WORDS, Section, is_on, real, several, share, shared_fields, whole, word
from fedjax_ssl.base.imports import import_own, is_own, name_of, one_line
from fedjax_ssl.engine import Method, Problem
from fedjax_ssl.methods.entry import Entry, check_entry
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.models import BACKBONES

# Names of methods, and of their files or folders.
NAMES = (
    "bsemifl",
    "catchfed",
    "cbafed",
    "fed_consist",
    "fedanchor",
    "fedavg_semi",
    "fedcd",
    "fedcon",
    "feddb",
    "feddure",
    "fedema",
    "fedil",
    "fedirm",
    "fedlabel",
    "fedmatch",
    "fedopenmatch",
    "fedpdm",
    "fedrgd",
    "fedtrinet",
    "fedu",
    "fixmatch",
    "fl2",
    "imfed_semi",
    "isofed",
    "orchestra",
    "proxyfl",
    "rscfed",
    "sage",
    "semianagg",
    "semifl",
    "server_only",
    "supervised",
    "twin_sight",
    "uda",
)

_IMPORTED: dict[str, Entry] = {}  # by import path; see `known_method`
METHODS: dict[str, Entry] = {
    name: dataclasses.replace(importlib.import_module(f"{__name__}.{name}").ENTRY, reads=name) for name in NAMES
}


def find_method(name: str) -> Entry:
    """The entry of a library or registered method, or of an import path MODULE:NAME or FILE.py:NAME; else a UserError.

    There NAME is an `Entry` or a function from a Problem to a Method. Such a method is called NAME, or FILE if the path
    is FILE.py:ENTRY, as in the library's own files.
    """
    if name in METHODS:
        return METHODS[name]
    if is_own(name):
        return _import_method(name)
    raise UserError(
        f"method is {name!r}{nearest(name, METHODS)}; known: {', '.join(METHODS)}, or your own FILE.py:NAME"
    )


def section_of(method: str) -> str:
    """The name of the section of the configuration that a method reads; `method` is as in `find_method`."""
    entry = known_method(method)
    return (entry and entry.reads) or name_of(method)


def known_method(name: str) -> Entry | None:
    """The entry of a registered or already imported method, else None. A name from a run's folder is never imported."""
    return METHODS.get(name, _IMPORTED.get(name))


def _import_method(method: str) -> Entry:
    found, file = import_own("method", method)
    where, name = f"method={method}: ", name_of(method)
    with one_line("method", method, "its Entry cannot be used", file):
        entry = found if isinstance(found, Entry) else Entry(found)
        _check_name(name, entry, where)
        check_entry(name, entry, where)

    def factory(problem: Problem) -> Method:
        with one_line("method", method, "cannot be built", file):
            built = entry.factory(problem)
        if not isinstance(built, Method):
            raise UserError(f"method={method} returns a {type(built).__name__}, not a fedjax_ssl.engine.Method")
        return built

    _IMPORTED[method] = dataclasses.replace(entry, factory=factory)
    return _IMPORTED[method]


def register(name: str, factory: Callable[[Problem], Method] | Entry, **entry) -> None:
    """Registers a method from outside the library, such as a notebook's, under a name for configurations.

    It lasts for this process, and replaces an earlier one of the name. `factory` is a whole `Entry`; or a function from
    a Problem to a Method, with fields of `Entry` in `entry`.

    Raises:
        UserError: the name is not a Python name or is taken, or the entry is invalid, see `check_entry`.
    """
    new = factory if isinstance(factory, Entry) else Entry(factory, **entry)
    if name not in registered():
        _check_name(name, new)
    check_entry(name, new)
    METHODS[name] = new


def _check_name(name: str, entry: Entry, where: str = "") -> None:
    if not name.isidentifier():
        raise UserError(f"{where}a method's name must be a Python name, for it names a section of fields, not {name!r}")
    meanings: dict[str, Any] = {  # meaning -> names that have it
        "a method": METHODS,
        "a field of the configuration": shared_fields(),
        "an argument of configs": {**WORDS, **RECIPES, **BACKBONES},
    }
    for meaning, names in meanings.items():
        if name in names:
            raise UserError(f"{where}{name} is {meaning} already; give the method another name")
    copied = getattr(entry.factory, "__name__", "")
    is_copy = copied in NAMES and entry.factory is not METHODS[copied].factory
    if is_copy and not entry.reads and entry.defaults is not None:
        raise UserError(f"{where}its code is that of {copied}; write {name} for {copied} in its file, fields included")


def registered() -> set[str]:
    """The names of registered methods that are not the library's own."""
    return set(METHODS) - set(NAMES)
