"""The values in users' files: what is missing, what is a number, and which text a value is."""

import decimal
import functools
import numbers
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

import numpy as np

MISSING = ("", "<na>", "na", "n/a", "nan", "nat", "null", "none", "?")  # missing values, in lower case
DATE = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[ T].*)?|\d{1,2}[-/]\d{1,2}[-/]\d{2,4}(?: .*)?|\d{1,2}\.\d{1,2}\.\d{4}(?: .*)?"
LIST = r"\[.*\]|\{.*\}"
# Neither 007, which may be a code, nor 10_19, which Python reads as 1019.
NUMBER = re.compile(r"(?!0[0-9]+\Z)[-+]?(?:[0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})(?:[eE][-+]?[0-9]{1,2})?")


def is_missing(text: str) -> bool:
    """Whether a text is a missing value."""
    return text.strip().lower() in MISSING


def is_number(text: str) -> bool:
    """Whether a text is a finite number, the same in all columns and all sources: 007 and 10_19 are none."""
    return bool(NUMBER.fullmatch(text))


def text_of(value: Any) -> str | None:
    """A value as a text: 'a' for ' a ', '3' for 3 and 3.0, 'True' for True, '' for None and NaN; None: it is no scalar.

    Lists, dates and times are no scalars.
    """
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace").strip()
    if value is None:
        return ""
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, np.timedelta64):  # which NumPy counts as a number
        return None
    if isinstance(value, numbers.Real | decimal.Decimal):
        return "" if value != value else same(str(value))
    return None


@functools.lru_cache(maxsize=2**16)
def same(text: str) -> str:
    """One spelling of equal numbers, '1' for '1.0', '+1' and '1e0'; 'True' for 'true'; of accents, that of NFC."""
    if is_number(text):
        exact = decimal.Decimal(text)
        return str(int(exact)) if exact == exact.to_integral_value() else f"{exact.normalize():f}"
    return text.capitalize() if text.lower() in ("true", "false") else unicodedata.normalize("NFC", text)


def in_order(texts: Iterable[str]) -> tuple[str, ...]:
    """Different texts in the order of numbers if all are numbers, else of their letters' code points."""
    names = set(texts)
    by_value = all(map(is_number, names))
    return tuple(sorted(names, key=(lambda name: (decimal.Decimal(name), name)) if by_value else None))
