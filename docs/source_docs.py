"""Reads what the comments in the sources say about fields. Tests compare the fields with the program's."""

import ast
import functools
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from fedjax_ssl.base.files import PACKAGE
from fedjax_ssl.methods import NAMES


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
    for name in NAMES:
        file = PACKAGE / "methods" / f"{name}.py"
        own = _fields_of(file if file.exists() else file.with_suffix("") / "__init__.py", "defaults")
        fields.update({f"{name}.{field}": value for field, value in own.items()})
    return fields


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
        for node in ast.parse(file.read_text()).body
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
