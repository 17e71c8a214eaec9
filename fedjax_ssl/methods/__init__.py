"""The registry of methods: one file each, one line here. Methods know client, server and engine, and no disk.

`find_method` also takes a method from outside the library: one that `register` has been given in this process, or a
file's, FILE.py:NAME.
"""

import functools
import importlib
from collections.abc import Callable

from fedjax_ssl.engine import Method, Problem
from fedjax_ssl.errors import UserError
from fedjax_ssl.fields import RECIPES, WORDS, shared_fields
from fedjax_ssl.imports import import_own, is_own
from fedjax_ssl.methods.entry import Entry
from fedjax_ssl.methods.frames import alternating as alternating
from fedjax_ssl.models import BACKBONES

# A file has the method's name.
NAMES = (
    "anchors_only",
    "fedanchor",
    "fedil",
    "fixmatch",
    "semifl",
    "supervised",
    "uda",
)

METHODS: dict[str, Entry] = {name: importlib.import_module(f"{__name__}.{name}").ENTRY for name in NAMES}


def find_method(name: str) -> Entry:
    """The entry of a method.

    Args:
        name: of the library's, of a registered one, or MODULE:NAME or FILE.py:NAME, where NAME is an `Entry`, or a
            function from a Problem to a Method that needs nothing else.

    Raises:
        UserError: there is none of this name.
    """
    if name in METHODS:
        return METHODS[name]
    if is_own(name):
        return _import_method(name)
    raise UserError(f"method is {name!r}; known: {', '.join(METHODS)}, or your own FILE.py:NAME")


def section_of(name: str) -> str:
    """The section of the configuration that belongs to a method: its name, without the file."""
    return name.rpartition(":")[2]


@functools.cache  # a process has one version of a file
def _import_method(name: str) -> Entry:
    method, _ = import_own("method", name, ("NAME", "my_method.py:my_method"))
    section = section_of(name)
    _check_name(section, f"method={name}: ")
    entry = method if isinstance(method, Entry) else Entry(method)
    if not callable(entry.factory):
        raise UserError(f"method={name} is no function from a Problem to a Method, and no Entry with one")
    return entry


def register(name: str, factory: Callable[[Problem], Method] | Entry, **entry) -> None:
    """Makes a method from outside the library, from a notebook say, one that configurations can name.

    Registration lasts for this process; register the method again before resuming its runs. A second registration
    under the same name replaces the first.

    Args:
        name: of the method, as `config.method` has it.
        factory: what a file in this folder has under its own name; or a whole `Entry`.
        entry: fields of `Entry`: `defaults`, `fields`, `variants`, `heads`, ...

    Raises:
        UserError: the name is no Python name, or it has a meaning already.
    """
    if name not in METHODS or name in NAMES:
        _check_name(name)
    METHODS[name] = factory if isinstance(factory, Entry) else Entry(factory, **entry)


def _check_name(name: str, where: str = "") -> None:
    if not name.isidentifier():
        raise UserError(f"{where}a method's name must be a Python name, for it names a section of fields, not {name!r}")
    for meaning, names in {
        "a method of the library": NAMES,
        "a field of the configuration": shared_fields(),
        "an argument of configs": {**WORDS, **RECIPES, **BACKBONES},
    }.items():
        if name in names:
            raise UserError(f"{where}{name} is {meaning} already; give the method another name")


def registered() -> set[str]:
    """The names of the methods from outside the library that were registered."""
    return set(METHODS) - set(NAMES)
