"""Every field with its default and range, and the arguments of config files."""

import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError, nearest
from fedjax_ssl.base.fields import ARGUMENT_FIELDS, RECIPES, WORDS, Range, Section, flatten, shared_fields
from fedjax_ssl.base.imports import forget_changed, is_own
from fedjax_ssl.methods import METHODS, find_method, registered, section_of
from fedjax_ssl.models import BACKBONES

# Arguments after the colon of any config file, besides methods and their variants.
ARGUMENTS = {**RECIPES, **{name: {"model.name": name} for name in BACKBONES}, **WORDS}


def base_config() -> ConfigDict:
    """All fields with their defaults, locked: FedAnchor as in its paper on CIFAR-10; `data` sets whether it is IID."""
    return _all_fields().config().lock()


def ranges(method: str = "") -> dict[str, Range]:
    """The range of every field, by dotted names; with the section of a method from a file if it is given."""
    return _all_fields(method).ranges()


def _all_fields(method: str = "") -> Section:
    fields = _shared().copy()
    entries = {name: entry for name, entry in METHODS.items() if entry.reads in ("", name)}  # others read one of these
    if method:
        own = find_method(method)
        entries[section_of(method)] = own
    for name, entry in entries.items():
        if entry.defaults is not None:
            setattr(fields, name, _section(entry.defaults))
    return fields


# Made once: a sweep plans hundreds of configurations.
_shared = functools.cache(shared_fields)


@functools.cache
def _section(defaults: Callable[[], Section]) -> Section:
    return defaults()


def numbers_of(config: ConfigDict) -> dict[str, float]:
    """The numbers that the programs of a run take as arguments, by dotted names.

    All other fields decide what the programs are. So does a number that is 0 or None, which switches something off.
    """
    known = ranges(config.method)
    return {name: value for name, value in flatten(config).items() if value and known[name].traced}


def replace_numbers(config: ConfigDict, numbers: Mapping[str, Any]) -> ConfigDict:
    """A copy of a configuration in which other values stand for some numbers, such as the arguments of a program."""
    copy = ConfigDict(config.to_dict(), type_safe=False)
    copy.update_from_flattened_dict(numbers)
    return copy


def add_section(config: ConfigDict) -> ConfigDict:
    """The configuration with the section of its own method. What it lacks of it is added, as for a method from a file.

    From here on a file that was imported and has changed since is imported again. Raises UserError if there is no such
    method.
    """
    forget_changed()
    defaults = find_method(config.method).defaults  # imports a file, so that the next lines know its section
    section = defaults and _section(defaults)
    name = section_of(config.method)
    given = config[name] if name in config else None  # noqa: SIM401  # `get` is slow for a missing name
    if section is not None and flatten(section.config()).keys() - flatten(given or {}).keys():
        with config.unlocked():  # which a frozen one refuses
            config[name] = section.config(given)
    return config


def for_seed(config: ConfigDict, seed: int) -> ConfigDict:
    """The configuration of one of the runs in `config.seeds`, as if it were run alone.

    It has no sections of other registered methods: a run must be resumed if these are missing or have changed.
    """
    config = config.copy_and_resolve_references()
    config.seed, config.seeds = seed, ()
    with config.unlocked():
        for name in registered() & set(config) - {section_of(config.method)}:
            del config[name]
    return config


def typed(saved: dict[str, Any], where: str | pathlib.Path, seeds: tuple[int, ...] = ()) -> ConfigDict:
    """Converts a configuration that was read from JSON to the types of its fields. Imports the code that it names.

    Raises a UserError that names the file `where` if a field does not exist or does not accept its value. If there are
    `seeds`, they are those of the result.
    """
    config = base_config()
    config.method = saved.get("method", config.method)
    add_section(config)
    known = flatten(config)
    for name, value in flatten(saved).items():
        if name not in known:
            raise UserError(f"{where}: {name} is {value!r}, but there is no such field")
        try:
            config.update_from_flattened_dict({name: tuple(value) if isinstance(value, list) else value})
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: {name} is {value!r}: {' '.join(str(error).split())}") from error
    if seeds:
        config.seeds, config.seed = seeds, base_config().seed
    return config


def apply_arguments(config: ConfigDict, arguments: str) -> ConfigDict:
    """Applies the part of `--config=FILE:ARGUMENTS` after the colon: 'semifl,strong,wrn28_2,server_labels=500'.

    Arguments are separated by commas and applied in order, to the configuration itself, which is returned. They are:
    name=value pairs of `ARGUMENT_FIELDS`; the name of a method, which replaces the file's, or method=FILE.py:NAME (both
    reset `confidence`); a variant of the method; a recipe; a backbone or its import path; 'iid'; 'two_classes', for
    each client; 'centralised', the fully supervised upper bound without a federation.

    Raises a UserError for an unknown name, or a value that is not of the field's type.
    """
    fields = ARGUMENT_FIELDS
    for argument in filter(None, arguments.split(",")):
        variants = {**ARGUMENTS, **find_method(config.method).variants}
        name, equals, text = argument.partition("=")
        if argument in METHODS or (equals and name == "method"):
            config.method = text if equals else name
            # Its rule and threshold were chosen for the file's method.
            config.confidence.update(_shared().confidence.config().to_dict())
            add_section(config).update_from_flattened_dict(find_method(config.method).fields)
        elif equals and name in fields:
            kind = type(flatten(config)[fields[name]])
            try:
                config.update_from_flattened_dict({fields[name]: kind(text)})
            except ValueError:
                raise UserError(f"config argument {name} takes a value of type {kind.__name__}, not {text!r}") from None
        elif not equals and name in variants:
            config.update_from_flattened_dict(variants[name])
        elif is_own(argument):
            config.model.name = argument
        else:
            words = [*METHODS, *variants]
            known = [*words, "method=FILE.py:NAME", *(f"{field}=..." for field in fields)]
            hint = nearest(name, [*words, *fields])
            raise UserError(f"unknown config argument {argument!r}{hint}; known: {', '.join(known)}")
    return config
