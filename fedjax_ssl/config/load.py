"""Loads a configuration from a config file and the words of a command line; errors have one line."""

import difflib
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.base.fields import flatten
from fedjax_ssl.base.files import CONFIGS, expanded
from fedjax_ssl.base.imports import one_line, run_file
from fedjax_ssl.config.base import add_section, apply_arguments, typed
from fedjax_ssl.data.sources import READ_BY, source_of
from fedjax_ssl.methods import METHODS, find_method, section_of
from fedjax_ssl.records.workdir import read_config, refuse_code

OVERRIDE = "--config."


def parse_config(config_file: str | os.PathLike[str], overrides: list[str], allow_code: bool = False) -> ConfigDict:
    """The configuration of a file, see `load_config_file`, with overrides, words like '--config.seed=1'.

    Raises UserError if there is no such file or field, or a value is of the wrong type.
    """
    return override(load_config_file(config_file, allow_code), overrides)


def override(config: ConfigDict, overrides: list[str]) -> ConfigDict:
    """A configuration with fields replaced by words like '--config.seed=1'; see `parse_config`."""
    methods = [word.partition("=")[2] for word in overrides if word.startswith(f"{OVERRIDE}method=")]
    if methods:
        config.method = methods[-1]
    add_section(config)  # before its fields are checked
    if not overrides:
        return config  # absl would convert the whole configuration to text, twice
    for field in overridden_fields(overrides):
        _check_field(config, field)
    parsed = flags.FlagValues()
    holder = config_flags.DEFINE_config_dict("config", config, flag_values=parsed, sys_argv=["", *overrides])
    try:
        left_over = parsed(["", *overrides])[1:]
    except (flags.Error, TypeError, ValueError) as error:
        line = " ".join(str(error).split()).replace("invalid literal for int() with base 10:", "not a whole number:")
        raise UserError(line) from error
    if left_over:
        raise UserError(f"cannot make sense of {left_over[0]!r}")
    config, given = holder.value, overridden_fields(overrides)
    path_alone = config.data.path and "data.path" in given and "data.source" not in given
    if path_alone and config.data.source not in READ_BY["path"]:
        config.data.source = source_of(config.data.path)
    return config


def overlooked(config: ConfigDict, overrides: Iterable[str]) -> list[str]:
    """What overrides such as '--config.method=semifl' leave as it is, though a user may expect otherwise, a line each.

    The configuration has these overrides already.
    """
    given, fields, lines = overridden_fields(overrides), flatten(config.to_dict()), []
    if "method" in given:
        of_method = {name: value for name, value in find_method(config.method).fields.items() if name not in given}
        left = [f"{name}={fields[name]!r}" for name, value in of_method.items() if fields[name] != value]
        if left:
            lines.append(
                f"--config.method changes the method alone and leaves {', '.join(left)}; as an argument, as in "
                f"--config=configs/quickstart.py:method={config.method}, it also sets the method's own fields"
            )
    own = section_of(config.method)
    if "confidence.threshold" in given and "threshold" not in find_method(config.method).confidence:
        lines.append(f"--config.confidence.threshold changes nothing: the method {config.method} does not read it")
    for name in given:
        if name.partition(".")[0] in METHODS.keys() - {own} and "." in name:
            lines.append(f"--config.{name} is of another method and changes nothing; this method's section is {own}")
    return lines


def overridden_fields(overrides: Iterable[str]) -> list[str]:
    """The names of the fields in words like '--config.seed=1'."""
    return [word.removeprefix(OVERRIDE).partition("=")[0] for word in overrides if word.startswith(OVERRIDE)]


def load_config_file(config_file: str | os.PathLike[str], allow_code: bool = False) -> ConfigDict:
    """Loads a configuration.

    Args:
        config_file: a Python file with `get_config(arguments='')`, or a run's config.json; arguments after a colon.
        allow_code: whether to import code that a config.json names as FILE.py:NAME; somebody else may have written it.

    Raises:
        UserError: there is no such file or function, it fails, or it names code and that is not allowed.
    """
    path, _, arguments = os.fspath(config_file).partition(":")
    if not path.endswith(".json"):
        return call_in_file(config_file, "get_config")
    file = pathlib.Path(find_config_file(path))
    saved = read_config(file.parent, file.name)
    if not allow_code:
        refuse_code(file.parent, saved, "if you trust it, say allow_code=True, or --allow_code on the command line")
    return apply_arguments(typed(saved, file), arguments)


def call_in_file(file: str | os.PathLike[str], name: str) -> Any:
    """Calls a function in a Python file, see `find_config_file`, and returns its result.

    A text after the file's colon is the function's argument. Raises a UserError if there is no such file or function,
    or it fails.
    """
    given, colon, argument = os.fspath(file).partition(":")
    path = pathlib.Path(find_config_file(given)).absolute()
    if path.suffix != ".py":
        raise UserError(f"{given} is not a Python file")
    with one_line("config", given, "running it fails", str(path)):
        module = run_file(path)
    if not hasattr(module, name):
        raise UserError(f"{given} has no function {name}")
    with one_line("config", given, f"{name} fails"):
        return getattr(module, name)(*([argument] if colon else []))


def find_config_file(path: str) -> str:
    """A config file's path: as it is given, or in the library's own folder, whatever the current folder.

    Raises UserError if there is no such file.
    """
    places = (expanded(path), CONFIGS.parent / path, CONFIGS / path)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        folders, name = (CONFIGS, pathlib.Path("configs"), pathlib.Path(path).parent), pathlib.Path(path).name
        files = {file.name: file for folder in folders for file in folder.glob("*.py")}
        match = difflib.get_close_matches(name, files, n=1)
        raise UserError(f"there is no config file {path}{f'; the nearest is {files[match[0]]}' if match else ''}")
    return str(found)


def _check_field(config: ConfigDict, field: str) -> None:
    fields = flatten(config)
    if field in fields:
        return
    if field in {name.rpartition(".")[0] for name in fields}:
        raise UserError(f"config.{field} is a section; name one of its fields, as in config.{field}.FIELD")
    section, _, last = field.rpartition(".")
    # An abbreviation, as in client.lr; the nearest by the whole name; else by the last part, which people remember.
    initials = lambda name: "".join(word[0] for word in name.rpartition(".")[2].split("_") if word)  # noqa: E731
    nearest = [name for name in fields if name.rpartition(".")[0] == section and initials(name) == last]
    nearest = nearest or difflib.get_close_matches(field, fields, n=1, cutoff=0.6)
    if not nearest:
        by_last = {name.rpartition(".")[2]: name for name in fields}
        nearest = [by_last[n] for n in difflib.get_close_matches(last, by_last, n=1, cutoff=0)]
    raise UserError(f"unknown field config.{field}; the nearest is config.{nearest[0]}")
