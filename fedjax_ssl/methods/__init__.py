"""The registry of methods: one file each, one line here. `register` takes a method from outside the library."""

from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from fedjax_ssl.engine.interface import Method, Problem
from fedjax_ssl.errors import UserError
from fedjax_ssl.fields import RECIPES, WORDS, shared_fields
from fedjax_ssl.methods import anchors_only, fedanchor, fedil, fixmatch, semifl, supervised
from fedjax_ssl.models import BACKBONES

_MODULES = {
    "anchors_only": anchors_only,
    "fedanchor": fedanchor,
    "fedil": fedil,
    "fixmatch": fixmatch,
    "semifl": semifl,
    "supervised": supervised,
}

# A method's factory has its file's name.
METHODS = {name: getattr(module, name) for name, module in _MODULES.items()}

# The section of the configuration that belongs to a method, where it has one.
DEFAULTS = {name: module.defaults for name, module in _MODULES.items() if hasattr(module, "defaults")}

# Shared fields that a method needs at other values than the default, set by naming it in a config's arguments.
FIELDS: dict[str, dict[str, Any]] = {
    name: {"method": name, **getattr(module, "FIELDS", {})} for name, module in _MODULES.items()
}

# The systems of the papers' tables that differ from a method in a field or two: method -> name -> fields.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {name: module.VARIANTS for name, module in _MODULES.items()}

# Methods whose model has the anchor head; the others have the classifier alone.
DOUBLE_HEADED = {"fedanchor"}


def register(
    name: str,
    factory: Callable[[Problem], Method],
    *,
    defaults: Callable[[], ConfigDict] | None = None,
    fields: Mapping[str, Any] | None = None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    double_headed: bool = False,
) -> None:
    """Makes a method from outside the library, from a notebook say, one that configurations can name.

    It lasts as long as the process: a run of such a method is taken up again where the method has been registered.
    Registering a name once more replaces the method, as running a notebook's cell once more does.

    Args:
        name: of the method, as `config.method` has it.
        factory: what a file in this folder has under its own name.
        defaults: makes the section `config.NAME` of every configuration that is made from now on; None: there is none.
        fields: shared fields that the method needs at other values, set by naming it in a config's arguments.
        variants: name -> fields in which a variant differs from the method.
        double_headed: whether the method's model has the anchor head.

    Raises:
        UserError: the name is no Python name, or it has a meaning already.
    """
    if not name.isidentifier():
        raise UserError(f"a method's name must be a Python name, for it names a section of fields, not {name!r}")
    if name not in METHODS or name in _MODULES:
        for meaning, names in {
            "a method of the library": _MODULES,
            "a field of the configuration": shared_fields(),
            "an argument of configs": {**WORDS, **RECIPES, **BACKBONES},
        }.items():
            if name in names:
                raise UserError(f"{name} is {meaning} already; give the method another name")
    METHODS[name] = factory
    FIELDS[name] = {"method": name, **(fields or {})}
    VARIANTS[name] = {variant: dict(changed) for variant, changed in (variants or {}).items()}
    DEFAULTS.pop(name, None)
    if defaults is not None:
        DEFAULTS[name] = defaults
    DOUBLE_HEADED.discard(name)
    if double_headed:
        DOUBLE_HEADED.add(name)


def registered() -> set[str]:
    """The names of the methods from outside the library."""
    return set(METHODS) - set(_MODULES)
