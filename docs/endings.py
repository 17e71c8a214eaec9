"""What the site adds to the end of some pages, from the registry and the comments in the sources.

    python docs/endings.py methods/fixmatch.md    # prints that of a page

A page in docs/methods/ gets where labels may be, configurations, variants and fields; the overviews of methods, sweeps
and kinds of inputs get their tables, configs.md all shared fields.
"""

import ast
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from fedjax_ssl.config import ranges
from fedjax_ssl.data.kinds import IMAGE, KINDS
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.entry import Entry

sys.path.append(str(pathlib.Path(__file__).parent))
import config_reference as reference
import h100
from source_docs import read_fields

ROOT = pathlib.Path(__file__).parents[1]
NEED_A_BACKBONE = ("fedcon", "fedema", "fedtrinet", "fedu")  # methods that have no use for model.name=linear
SOURCE = r" (?=[A-Z][\w, -]*(?: et al\.| and Wang,| and Noble,))| \[arXiv| Eq\. | ICLR 2026"  # where an idea ends
LEAST = 4  # fields of a variant that another variant names instead of repeating them


def ending(page: str) -> str:
    """What the site adds to a page, such as 'methods/sage.md'; '' for most pages."""
    folder, _, name = page.removesuffix(".md").partition("/")
    if folder == "methods" and name in METHODS:
        return "\n".join(_section(name, METHODS[name]))
    tables = {"methods.md": _methods, "tutorials/paper_table.md": _sweeps, "reference/kinds.md": _kinds,
              "configs.md": reference.page}  # fmt: skip
    return "\n".join(tables[page]()) if page in tables else ""


def _methods() -> Iterator[str]:
    """The table of methods, with the beginning of each page up to its source."""
    yield "## All methods\n"
    yield "| method | `data.labels` | idea |\n|---|---|---|"
    for name, entry in METHODS.items():
        title, _, text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8").partition("\n\n")
        sentences = " ".join(text.partition("\n\n")[0].split())
        idea = re.split(SOURCE, sentences)[0]
        idea = re.sub(r"\]\((?!\.\./|http)", "](methods/", idea).replace("](../", "](")
        yield f"| [{title.removeprefix('# ')}](methods/{name}.md) | {', '.join(entry.settings)} | {idea} |"
    yield ""


def _sweeps() -> Iterator[str]:
    """The table of committed sweeps, with the first line of each file and the costs of the papers' tables."""
    yield "## All sweeps\n"
    yield f"{h100.ABOUT}\n"
    yield "| file in `configs/sweeps/` | what it compares | one H100 |\n|---|---|---|"
    for path in sorted((ROOT / "configs" / "sweeps").glob("*.py")):
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        yield f"| `{path.name}` | {reference.text(about.splitlines()[0])} | {h100.cell(path)} |"
    yield ""


def _section(name: str, entry: Entry) -> Iterator[str]:
    yield "## Settings\n"
    yield reference.bullet(f"`data.labels`: {', '.join(f'`{setting}`' for setting in entry.settings)}")
    yield reference.bullet(f"Code: `{_code(name)}`")
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


def _code(name: str) -> str:
    """A method's file, or its folder."""
    file = pathlib.Path("fedjax_ssl", "methods", f"{name}.py")
    return str(file) if (ROOT / file).exists() else f"{file.with_suffix('')}/"


def _kinds() -> Iterator[str]:
    yield "## Methods and kinds\n"
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
    print(ending(sys.argv[1]), end="")
