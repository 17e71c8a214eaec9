"""The last section of each page in docs/methods/: where labels may be, configurations, variants and fields.

    python docs/method_reference.py          # writes it into the pages

It comes from the registry and from the comments in the methods' files; tests/test_docs.py compares it with the pages.
Likewise the table of methods and kinds of inputs in docs/reference/kinds.md.
"""

import pathlib
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from fedjax_ssl.cli.source_docs import read_fields
from fedjax_ssl.config import ranges
from fedjax_ssl.kinds import IMAGE, KINDS
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.entry import Entry

sys.path.append(str(pathlib.Path(__file__).parent))
import config_reference as reference

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ROOT / "docs" / "methods"
KINDS_PAGE = ROOT / "docs" / "reference" / "kinds.md"
MARK = "<!-- docs/method_reference.py -->"
NEED_A_BACKBONE = ("fedcon", "fedema", "fedtrinet", "fedu")  # methods that have no use for model.name=linear
LEAST = 4  # fields of a variant that another variant names instead of repeating them


def page(name: str) -> str:
    """A method's page: what stands before the mark, and the section as it is now."""
    path = PAGES / f"{name}.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text.partition(MARK)[0].rstrip() + "\n\n" + "\n".join([MARK, *_section(name, METHODS[name])])


def _section(name: str, entry: Entry) -> Iterator[str]:
    yield "\n## Settings\n"
    yield reference.bullet(f"`data.labels`: {', '.join(f'`{setting}`' for setting in entry.settings)}")
    configs = [f"`configs/{path.name}`" for path in sorted((ROOT / "configs").glob(f"{name}_*.py"))]
    if configs:
        yield reference.bullet(f"Configurations: {', '.join(configs)}")
    if entry.fields:
        yield reference.bullet(f"Naming the method as an argument sets {_sets(entry.fields)}")
    if entry.variants:
        yield "\nVariants:\n"
        for variant in entry.variants:
            yield reference.bullet(f"`{variant}`: {_variant(variant, entry.variants)}")
    fields = {field: value for field, value in read_fields().items() if field.startswith(f"{name}.")}
    if fields:
        yield "\nFields:\n"
        may_be, group = ranges(), ""
        for field, value in fields.items():
            if value.group not in ("", group):
                group = value.group
                yield f"\n{textwrap.fill(_cell(group), 100)}\n"
            yield reference.entry(field, value.default, may_be[field], value.meaning, _cell(value.meaning))
    yield ""


def kinds_page() -> str:
    """The page about other inputs than images: what stands before the mark, and which method takes which kind."""
    return KINDS_PAGE.read_text(encoding="utf-8").partition(MARK)[0].rstrip() + "\n\n" + "\n".join([MARK, *_kinds()])


def _kinds() -> Iterator[str]:
    yield "\n## Methods and kinds\n"
    yield f"| method | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}"
    for name, entry in METHODS.items():
        other = "no" if entry.images_alone else "yes"
        vectors = "`mlp`" if name in NEED_A_BACKBONE else other
        takes = {IMAGE: "yes", "features": vectors, "table": vectors, "text": other}
        yield f"| [`{name}`](../methods/{name}.md) | {' | '.join(takes[kind] for kind in KINDS)} |"
    yield ""
    for name, entry in METHODS.items():
        if entry.images_alone:
            yield reference.bullet(f"`{name}` needs images: it {entry.images_alone}.")
    names = ", ".join(f"`{name}`" for name in NEED_A_BACKBONE)
    yield reference.bullet(f"{names} train or exchange parts of a backbone, so they cannot use `model.name=linear`.")
    yield ""


def _variant(name: str, variants: Mapping[str, Mapping[str, Any]]) -> str:
    """What a variant sets; fields that another variant sets alike are that variant's name."""
    changes = variants[name]
    parts = {
        other: fields
        for other, fields in variants.items()
        if other != name and LEAST <= len(fields) < len(changes) and fields.items() <= changes.items()
    }
    part = max(parts, key=lambda other: len(parts[other]), default="")
    rest = {field: value for field, value in changes.items() if field not in parts.get(part, {})}
    return f"as `{part}`; {_sets(rest)}" if part else _sets(rest)


def _sets(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"`{field}={value!r}`" for field, value in changes.items())


def _cell(comment: str) -> str:
    return reference.text(comment).replace("](", "](../")


if __name__ == "__main__":
    for name in METHODS:
        (PAGES / f"{name}.md").write_text(page(name), encoding="utf-8")
    KINDS_PAGE.write_text(kinds_page(), encoding="utf-8")
