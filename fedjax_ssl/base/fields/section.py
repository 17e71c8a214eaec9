"""Sections of a configuration. Each field is declared with its default and its range.

    section = Section()
    section.views = whole(2, least=2)  # views that must agree
    section.temperature = real(0.5, above=0)
    section.order = word("first", "last")  # the first one is the default
    section.mix = True

Validation, help and the configuration's page use these ranges. A field without a declared range, such as `mix`, takes
any value of its default's type. Numbers must be finite and fit into 32 bits, in which computations run.
"""

import ctypes
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict, config_dict

from fedjax_ssl.base.errors import UserError, known_are

MOST_SEED = 2**32 - 1  # uint32, because PRNG keys need it
_MOST = {int: 2**31 - 1, float: 3.4e38}  # int32, float32
_LEAST_NORMAL = 2.0**-126  # smaller numbers count as 0 on most devices
_KINDS = {int: "a whole number", float: "a finite number", bool: "True or False", str: "a text", tuple: "a tuple"}
_MANY = {int: "whole numbers", float: "finite numbers", str: "words"}


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that a field may have."""

    kind: type  # int, float, bool, str or tuple; object for anything
    optional: bool = False  # whether it may be None
    # least, above, most, below: a number's bounds; None: only those of 32 bits.
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()  # of a text; () for any text
    each: "Range | None" = None  # range of a tuple's entries; None: anything
    distinct: bool = False  # whether all entries must differ
    code: bool = False  # whether the import path of a user's code is allowed instead of a choice
    # Whether compiled programs take the value as an argument, so that another value needs no compilation.
    traced: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raises UserError with one line that begins with the field's name if the value is not allowed."""
        wrong = self._wrong(value)
        if wrong:
            raise UserError(f"{name} {wrong}")

    def _wrong(self, value: Any) -> str:
        """What is wrong with a value; '' if it is allowed."""
        if self.optional and value is None:
            return ""
        if self.choices:
            known = value in self.choices or (self.code and ":" in str(value))
            return "" if known else f"is {value!r}{known_are(value, self.choices)}"
        if not self._is_of_kind(value):
            return f"must be {_KINDS[self.kind]}, not {value!r}"
        if self.kind in _MOST:
            return self._wrong_number(value)
        if self.each is None or not (
            any(map(self.each._wrong, value)) or (self.distinct and len(set(value)) < len(value))
        ):
            return ""
        return f"must be {self.words()}, not {tuple(value)}"

    def words(self) -> str:
        """The range in words, as in 'whole, at least 1'."""
        if self.choices:
            return ", ".join([*map(repr, self.choices), *["or FILE.py:NAME"] * self.code])
        ends = self._ends()
        if self.each is not None:
            ends = self.each._ends()
            of = f" of {', '.join(self.each.choices)}" if self.each.choices else f", each {ends}" if ends else ""
            words = f"{'different ' if self.distinct else ''}{_MANY[self.each.kind]}{of}"
        elif ends:
            words = f"whole, {ends}" if self.kind is int else ends
        else:
            words = _KINDS.get(self.kind, "anything")
        return f"{words}; or None" if self.optional else words

    def _is_of_kind(self, value: Any) -> bool:
        if self.kind is tuple:
            return isinstance(value, tuple | list)
        if self.kind is float:  # whole numbers are allowed
            return type(value) is int or (isinstance(value, float) and math.isfinite(value))
        return isinstance(value, self.kind) and (self.kind is bool or type(value) is not bool)

    def _wrong_number(self, value: float) -> str:
        limit = max(_MOST[self.kind], self.most or 0)
        if not self._holds(value):
            return f"must be {self._ends()}, not {value}"
        if abs(value) > limit:
            return f"must be at most {limit} in size, not {value}"
        if self.kind is float and not self._holds(_single(value)):
            return f"must be {self._ends()}, not {value}, which is {_single(value):g} in computations"
        return ""

    def _holds(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def _ends(self) -> str:
        ends = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{words} {end}" for words, end in ends.items() if end is not None)


class Declared(NamedTuple):
    """A field's default and range."""

    default: Any
    range: Range


def whole(
    default: int | None = None, *, least: int | None = None, most: int | None = None, traced: bool = False
) -> Declared:
    """A whole number; None is allowed if it is the default.

    It may decide shapes and branches of a program. With `traced` it may not, see `real`.
    """
    return Declared(default, Range(int, default is None, least=least, most=most, traced=traced))


def real(
    default: float | None = None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    static: bool = False,
) -> Declared:
    """A finite number; None is allowed if it is the default.

    While a program is traced the field is a JAX scalar, so that another value needs no compilation. Code must not
    branch on it, except that 0 and None stay as they are: `is_on(field)`. With `static` it stays a Python number.
    """
    return Declared(default, Range(float, default is None, least, above, most, below, traced=not static))


def share(default: float, static: bool = False) -> Declared:
    """A number from 0 to 1; see `real`."""
    return real(default, least=0, most=1, static=static)


def is_on(number: Any) -> bool:
    """Whether a number that switches something off with 0 or None is neither; for traced numbers, which are neither."""
    return not isinstance(number, int | float | None) or bool(number)


def word(default: str, *others: str, code: bool = False) -> Declared:
    """One of several words; `others` may repeat the default. With `code`, or the import path of a user's code."""
    return Declared(default, Range(str, choices=tuple(dict.fromkeys((default, *others))), code=code))


def several(default: tuple[Any, ...], each: Declared, *, distinct: bool = False) -> Declared:
    """A tuple of entries as `each` declares them, such as `whole(least=0)`; with `distinct`, all must differ."""
    return Declared(default, Range(tuple, each=each.range, distinct=distinct))


class Section:
    """Fields with their ranges, in the order of assignment; a field may itself be a section."""

    def __init__(self):
        object.__setattr__(self, "_fields", {})

    def __setattr__(self, name: str, value: Any):
        if not isinstance(value, Section | Declared):  # without a range: any value of the default's type
            kind = type(value) if type(value) in _KINDS else object
            value = Declared(value, Range(kind, traced=kind is float))
        if isinstance(value, Declared):
            value.range.check(f"the default of {name}", value.default)
        self._fields[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def __getattr__(self, name: str) -> Any:
        """A field's default, or a section."""
        try:
            field = self.__dict__["_fields"][name]
        except KeyError:
            raise AttributeError(f"the section has no field {name}") from None
        return field if isinstance(field, Section) else field.default

    def copy(self) -> "Section":
        """The same fields; others can be added without changing this section."""
        section = Section()
        section._fields.update(self._fields)
        return section

    def config(self, given: ConfigDict | None = None) -> ConfigDict:
        """The fields with their defaults; or `given`, to which those that it lacks are added."""
        config = ConfigDict() if given is None else given
        for name, field in self._fields.items():
            if isinstance(field, Section):
                # `get` looks for names like a missing one, which is slow.
                config[name] = field.config(config[name] if name in config else None)  # noqa: SIM401
            elif name not in config:
                config[name] = config_dict.placeholder(field.range.kind) if field.default is None else field.default
        return config

    def ranges(self) -> dict[str, Range]:
        """The range of each field, by dotted name."""
        fields = self._fields.items()
        return flatten({name: field.ranges() if isinstance(field, Section) else field.range for name, field in fields})


def flatten(nested: Mapping[str, Any] | ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Flattens a nested dict to dotted names."""
    flat = {}
    for name, value in nested.items():
        if isinstance(value, dict | ConfigDict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The fields in which two configurations (as nested dicts) differ: name -> (old value, new value)."""
    flat_old, flat_new = flatten(old), flatten(new)
    missing = "(no such field)"
    pairs = {name: (flat_old.get(name, missing), flat_new.get(name, missing)) for name in {**flat_old, **flat_new}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _single(value: float) -> float:
    """A number rounded to single precision."""
    single = ctypes.c_float(value).value
    return single if abs(single) >= _LEAST_NORMAL else 0.0
