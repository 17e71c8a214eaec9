"""The fields that all methods share: defaults, ranges, meanings; recipes. Imports no JAX, for help reads it.

A field says beside its default what it may be (`section.py`). Methods declare their own sections with the same words.
"""

from fedjax_ssl.fields.recipes import ARGUMENT_FIELDS, IID_ALPHA, RECIPES, WORDS
from fedjax_ssl.fields.section import MOST_SEED, Range, Section, real, several, share, whole, word
from fedjax_ssl.fields.shared import CHANGES_NO_RESULT, shared_fields

__all__ = [
    "ARGUMENT_FIELDS",
    "CHANGES_NO_RESULT",
    "IID_ALPHA",
    "MOST_SEED",
    "RECIPES",
    "WORDS",
    "Range",
    "Section",
    "real",
    "several",
    "share",
    "shared_fields",
    "whole",
    "word",
]
