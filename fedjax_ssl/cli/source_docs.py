"""Reads fields, methods and arguments from the sources without importing them.

Help and documentation use it, because importing the modules (JAX, Flax, Optax, Orbax) takes too long for help. Tests
compare the result with the modules.
"""

import ast
import functools
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from fedjax_ssl.base.files import PACKAGE


class Field(NamedTuple):
    """A field of the configuration."""

    default: str  # as it is written in Python
    meaning: str  # the comment behind it, or else above it
    # The comment that opened its group: one above a section, or above a field that also has one behind it; or ''.
    group: str = ""


@functools.cache
def read_fields() -> dict[str, Field]:
    """All fields of a configuration by their dotted names, in the order of the source."""
    fields = _fields_of(PACKAGE / "base" / "fields", "shared_fields")
    for name in read_methods():
        own = _fields_of(_file_of(name), "defaults")
        fields.update({f"{name}.{field}": value for field, value in own.items()})
    return fields


@functools.cache
def read_methods() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name of each method -> (what it is, the names of its variants)."""
    methods = {}
    for name in _keys(_tree(PACKAGE / "methods" / "__init__.py"), "NAMES"):
        path = _file_of(name)
        methods[name] = (summary(docstring(path)), tuple(_keys(_tree(path), "VARIANTS")))
    return methods


def _file_of(method: str) -> pathlib.Path:
    """A method's file, or the __init__.py of its folder."""
    path = PACKAGE / "methods" / f"{method}.py"
    return path if path.exists() else path.with_suffix("") / "__init__.py"


def docstring(path: pathlib.Path) -> str:
    """A module's docstring; '' without one."""
    return ast.get_docstring(_tree(path)) or ""


def summary(text: str | None) -> str:
    """The first paragraph, on one line."""
    return " ".join((text or "").strip().partition("\n\n")[0].split())


def _fields_of(path: pathlib.Path, function: str, given: Mapping[str, str] = {}) -> dict[str, Field]:
    """The assignments `section.FIELD = VALUE  # MEANING` in a function.

    Args:
        path: of the module, or of a folder whose modules have functions for sections.
        function: its name; a module without it has no fields.
        given: the function's arguments, as they are written in Python.
    """
    functions = _functions(path)
    if function not in functions:
        return {}
    file, body = functions[function]
    lines, fields, group = file.read_text().splitlines(), {}, ""
    for node in body:
        if not isinstance(node, ast.Assign):
            continue
        value = node.value
        name = ast.unparse(node.targets[0]).partition(".")[2]  # '' for the section itself
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if isinstance(value, ast.Call) and called in functions:  # a section that has its own function
            arguments = {word.arg: ast.unparse(word.value) for word in value.keywords}
            own = _fields_of(path, called, arguments)
            fields.update({f"{name}.{field}".lstrip("."): value for field, value in own.items()})
            group = ""
        elif called == "Section":
            group = _comments(lines, node)[1]
        elif name:
            # Such as 500 from `whole(500, least=1)`.
            default = ast.unparse(value.args[0] if isinstance(value, ast.Call) else value)
            beside, above = _comments(lines, node)
            if above:
                group = above if beside else ""
            fields[name] = Field(given.get(default, default), beside or above, group)
    return fields


@functools.cache
def _functions(path: pathlib.Path) -> dict[str, tuple[pathlib.Path, list[ast.stmt]]]:
    """The functions that return a section, of a module or of all in a folder: name -> (file, statements)."""
    return {
        node.name: (file, node.body)
        for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])
        for node in _tree(file).body
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) == "Section"
    }


def _comments(lines: list[str], node: ast.stmt) -> tuple[str, str]:
    """The comments behind a statement and above it."""
    beside = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().partition("# ")[2]
    above: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip().removeprefix("# "))
    return beside, " ".join(above)


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def _keys(tree: ast.Module, variable: str) -> list[str]:
    """The literal entries of a tuple, or literal keys of a dict, that a module assigns to a variable."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target, value = node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value
        if isinstance(target, ast.Name) and target.id == variable and isinstance(value, ast.Dict | ast.Tuple):
            entries = value.keys if isinstance(value, ast.Dict) else value.elts
            return [str(entry.value) for entry in entries if isinstance(entry, ast.Constant)]
    return []
