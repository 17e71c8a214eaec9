"""The fields that all methods share: defaults, ranges, meanings; recipes. Does not import JAX, so that help is fast.

A field is declared with its default and its range (`section.py`). Methods declare their own sections in the same way.
"""

from fedjax_ssl.base.fields.recipes import ARGUMENT_FIELDS, RECIPES, WORDS
from fedjax_ssl.base.fields.section import (
    MOST_SEED,
    Range,
    Section,
    differences,
    flatten,
    is_on,
    real,
    several,
    share,
    whole,
    word,
)
from fedjax_ssl.base.fields.shared import CHANGES_NO_RESULT, shared_fields
