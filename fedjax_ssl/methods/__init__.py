"""The registry of methods: one file each, one line here."""

from typing import Any

from fedjax_ssl.methods import anchors_only, fedanchor, fedil, fixmatch, semifl, supervised

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
DOUBLE_HEADED = ("fedanchor",)
