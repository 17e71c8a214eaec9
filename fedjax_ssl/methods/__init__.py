"""The registry of methods. Each method is a file or a folder of this package, with one line in `NAMES`.

`find_method` also finds methods from outside the library: those registered in this process, and import paths such as
FILE.py:NAME. Methods never access the disk.
"""

import dataclasses
import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fedjax_ssl.engine import Method, Problem
from fedjax_ssl.errors import UserError, nearest
from fedjax_ssl.fields import RECIPES, WORDS, Section, real, several, share, shared_fields, whole, word
from fedjax_ssl.imports import import_own, is_own, one_line, section_of
from fedjax_ssl.methods.entry import Entry, check_entry, named
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.models import BACKBONES

__all__ = [
    "METHODS",
    "NAMES",
    "Entry",
    "Section",
    "alternating",
    "find_method",
    "real",
    "register",
    "registered",
    "section_of",
    "several",
    "share",
    "whole",
    "word",
]

# Names of methods, and of their files or folders.
NAMES = (
    "cbafed",
    "fedanchor",
    "fedavg_semi",
    "fedcon",
    "feddb",
    "feddure",
    "fedema",
    "fedil",
    "fedlabel",
    "fedmatch",
    "fedopenmatch",
    "fedpdm",
    "fedrgd",
    "fedtrinet",
    "fedu",
    "fixmatch",
    "fl2",
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

METHODS: dict[str, Entry] = {name: importlib.import_module(f"{__name__}.{name}").ENTRY for name in NAMES}


def find_method(name: str) -> Entry:
    """Returns the entry of a method.

    Args:
        name: the name of a library or registered method; or an import path MODULE:NAME or FILE.py:NAME, where NAME is
            an `Entry` or a function from a Problem to a Method. A method with an import path is called NAME, or FILE
            if the path is FILE.py:ENTRY, as in the library's own files.

    Raises:
        UserError: no method has this name.
    """
    if name in METHODS:
        return METHODS[name]
    if is_own(name):
        return _import_method(name)
    raise UserError(
        f"method is {name!r}{nearest(name, METHODS)}; known: {', '.join(METHODS)}, or your own FILE.py:NAME"
    )


def _import_method(name: str) -> Entry:
    method, file = import_own("method", name, ("NAME", "my_method.py:my_method"))
    where, section = f"method={name}: ", section_of(name)
    _check_name(section, where, {"a registered method": registered()})
    if not callable(method) and not isinstance(method, Entry):
        raise UserError(f"method={name} is neither a function from a Problem to a Method nor an Entry with one")
    with one_line("method", name, "its Entry cannot be used", file):
        entry = _under(section, method if isinstance(method, Entry) else Entry(method))
        check_entry(section, entry, where)

    def factory(problem: Problem) -> Method:
        with one_line("method", name, "cannot be built", file):
            built = entry.factory(problem)
        if not isinstance(built, Method):
            raise UserError(f"method={name} returns a {type(built).__name__}, not a fedjax_ssl.engine.Method")
        return built

    return dataclasses.replace(entry, factory=factory)


def register(name: str, factory: Callable[[Problem], Method] | Entry, **entry) -> None:
    """Registers a method from outside the library, such as a notebook's, under a name for configurations.

    Registration lasts for this process; register the method again before resuming its runs. A second registration
    under the same name replaces the first.

    Args:
        name: the value of `config.method` that selects the method.
        factory: a function from a Problem to a Method, or a whole `Entry`.
        entry: fields of `Entry`: `defaults`, `fields`, `variants`, `heads`, ...

    Raises:
        UserError: the name is not a Python name or is taken, or the entry is invalid, see `check_entry`.
    """
    if name not in METHODS or name in NAMES:
        _check_name(name)
    new = _under(name, factory if isinstance(factory, Entry) else Entry(factory, **entry))
    check_entry(name, new)
    METHODS[name] = new


def _under(name: str, entry: Entry) -> Entry:
    """The entry of a user's method. The code of a derived method may use its original's section name."""
    if entry.defaults is None:
        return entry
    is_version = entry.known_as != name and (entry.reads or entry.known_as in METHODS)
    return named(name, entry) if is_version else dataclasses.replace(entry, reads=name)


def _check_name(name: str, where: str = "", taken: Mapping[str, Collection[str]] = {}) -> None:
    if not name.isidentifier():
        raise UserError(f"{where}a method's name must be a Python name, for it names a section of fields, not {name!r}")
    meanings: dict[str, Any] = {  # meaning -> names that have it
        "a method of the library": NAMES,
        "a field of the configuration": shared_fields(),
        "an argument of configs": {**WORDS, **RECIPES, **BACKBONES},
        **taken,
    }
    for meaning, names in meanings.items():
        if name in names:
            raise UserError(f"{where}{name} is {meaning} already; give the method another name")


def registered() -> set[str]:
    """The names of registered methods that are not the library's own."""
    return set(METHODS) - set(NAMES)
