"""The list of fields in configs.md: every field from `base_config()`, every description from its comment in the source.

    python docs/config_reference.py    # prints it; the site adds it to the page

Defaults and ranges are those of the configuration itself. A field's description is the comment behind its assignment,
or, where there is none, the comment above it; a comment above an assignment that has its own opens a group of fields.
A method's own fields and variants are on its page alone (`endings.py`).
"""

import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from fedjax_ssl.base.fields import ARGUMENT_FIELDS, Range
from fedjax_ssl.config import ARGUMENTS, base_config, flatten, ranges
from fedjax_ssl.methods import METHODS

sys.path.append(str(pathlib.Path(__file__).parent))
from source_docs import read_fields

SECTIONS = {
    "": "The run",
    "data": "data: whose images, and how they are divided",
    "model": "model",
    "augment": "augment: the strong and the weak augmentation",
    "client": "client: local training",
    "server": "server: training on the anchors",
    "aggregation": "aggregation: from uploads to one model",
    "confidence": "confidence: which pseudo-labels count, and how much",
    "log": "log: what a run shows",
}


def page() -> Iterator[str]:
    """The list, in lines of Markdown."""
    yield from _fields()
    yield from _arguments()


def _fields() -> Iterator[str]:
    """Every shared field in a list of its section, or of its group there."""
    values, may_be, described = flatten(base_config().to_dict()), ranges(), {}
    section = group = None
    for name, field in read_fields().items():
        new_section = name.rpartition(".")[0]
        if new_section in METHODS:
            continue
        opens = new_section != section
        if opens:
            section = new_section
            yield f"\n## {SECTIONS.get(section, section)} {{ #{section or 'run'} }}"
        if opens or field.group not in ("", group):
            group = field.group
            yield f"\n{textwrap.fill(text(group), 100)}\n" if group else ""
        first = described.setdefault((name.rpartition(".")[2], field.meaning), name)
        meaning = text(field.meaning) if first == name else f"as `{first}`"
        yield entry(name, repr(values[name]), may_be[name], field.meaning, meaning)


def _arguments() -> Iterator[str]:
    """What a config file takes behind its colon, and which fields each argument sets."""
    yield """
## Arguments of a config file { #arguments }

An argument is short for some fields. Write arguments after the config file's name and a colon, as in
`--config=configs/fedanchor_mnist.py:semifl,strong,images=100`. They are applied in this order, and
then the fields as `--config.FIELD=VALUE`. An argument is

* another method's name, such as `semifl`, then one of its variants;
* the name of a backbone: it sets `model.name`;
* one of these:
"""
    for name, field in ARGUMENT_FIELDS.items():
        yield bullet(f"`{name}=...` sets `{field}`")
    for name, changes in ARGUMENTS.items():
        if changes != {"model.name": name}:
            yield bullet(f"`{name}` sets {_assigned(changes)}")


def _assigned(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in fields.items())


def text(comment: str) -> str:
    """A comment as Markdown: pages it names become links, and nothing in it is markup."""
    comment = comment.replace("|", "&#124;").replace("<", "&lt;").replace("*", "&#42;")
    comment = re.sub(r"\bfedjax_ssl/[\w/]+\.py", lambda found: f"`{found[0]}`", comment)
    return re.sub(r"\bdocs/([\w/]+)\.md", r"[\1](\1.md)", comment)


def bullet(text: str) -> str:
    """An entry of a list, in lines of at most 100 characters."""
    return textwrap.fill(f"* {text}", 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def entry(name: str, value: str, values: Range, meaning: str, shown: str) -> str:
    """A field with its default, its other values and its meaning as shown; no words that the meaning quotes."""
    return bullet(f"`{name}={value}`{_others(value, values, meaning)}: {shown}")


def _others(value: str, values: Range, meaning: str) -> str:
    if values.each is not None:
        return f", each {_bounds(values.each)}" if _bounds(values.each) else ""
    if values.choices:
        quoted = all(f"'{choice}'" in meaning for choice in values.choices)
        others = text(", ".join(repr(choice) for choice in values.choices if repr(choice) != value))
        return "" if quoted else f" or {others}"
    if values.kind not in (int, float):
        return ""
    bounds = _bounds(values)
    if value == "None":
        return f" or {'int ' if values.kind is int else ''}{bounds or 'a number'}"
    return f", {bounds}" if bounds else ""


def _bounds(values: Range) -> str:
    low, high = (values.least, values.above), (values.most, values.below)
    if low == high == (None, None):
        return "" if values.kind is str else "any number"
    if high == (None, None):
        return "" if values.least == 0 else f"\u2265 {values.least}" if values.above is None else f"> {values.above}"
    opening = f"[{values.least}" if values.above is None else f"({values.above}"
    return f"in {opening}, {values.most}]" if values.below is None else f"in {opening}, {values.below})"


if __name__ == "__main__":
    print("\n".join(page()), end="")
