"""The page about the configuration: every field from `base_config()`, every description from its comment in the source.

    python docs/config_reference.py > docs/configs.md

Defaults and ranges are those of the configuration itself. A field's description is the comment behind its assignment,
or, where there is none, the comment above it; a comment above an assignment that has its own opens a group of fields.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fedjax_ssl.cli.source_docs import read_fields
from fedjax_ssl.config import ARGUMENTS, base_config, flatten, ranges
from fedjax_ssl.fields import ARGUMENT_FIELDS
from fedjax_ssl.methods import METHODS

INTRODUCTION = """# Configuration

Every field with its default, what it may be and what it means, taken from `fedjax_ssl/fields/` and
the methods' own files by `python docs/config_reference.py`. Set any of them from the command line. A
misspelt name is answered with the nearest one, and a value out of its range in one line, before
anything is written:

```
python launch.py --config.client.epochs=1 --config.data.alpha=0.3
```

From Python it is an attribute: `config = base_config()`, then `config.client.epochs = 1`.
"""

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


def page() -> str:
    """The page, in Markdown."""
    return "\n".join([INTRODUCTION, *_fields(), *_arguments()])


def _fields() -> Iterator[str]:
    """Every field in a table of its section, or of its group there."""
    values, may_be = flatten(base_config().to_dict()), ranges()
    section = group = None
    for name, field in read_fields().items():
        new_section = name.rpartition(".")[0]
        if new_section != section:
            section, group = new_section, None
            yield f"\n## {SECTIONS.get(section, section)} {{ #{section or 'run'} }}\n"
            if section in METHODS:
                yield f"Fields of the method [{section}](methods/{section}.md).\n"
        if field.group != group:
            group = field.group
            yield f"\n{_text(group)}\n" if group else ""
            yield "| field | default | may be | what it means |\n|---|---|---|---|"
        yield f"| `{name}` | `{values[name]!r}` | {_text(may_be[name].words())} | {_text(field.meaning)} |"


def _arguments() -> Iterator[str]:
    """What a config file takes behind its colon, and which fields each argument sets."""
    yield """
## Arguments of a config file { #arguments }

Behind the file's name and a colon, with commas between them, applied in their order:
`--config=configs/fedanchor_mnist.py:semifl,strong,images=100`. An argument stands for some fields; what follows on the
command line as `--config.FIELD=VALUE` is applied after all of them.

| argument | sets |
|---|---|"""
    for name, field in ARGUMENT_FIELDS.items():
        yield f"| `{name}=...` | `{field}` |"
    yield "\nThe name of another method, for configs with labels where it takes them: methods on the same data:\n"
    yield "| argument | sets |\n|---|---|"
    for name, entry in METHODS.items():
        yield f"| `{name}` | {_assigned(entry.fields)} |"
    yield "\nA [recipe](concepts/recipes.md), a backbone, and the rest:\n"
    yield "| argument | sets |\n|---|---|"
    for name, changes in ARGUMENTS.items():
        yield f"| `{name}` | {_assigned(changes)} |"
    yield "\n### Variants { #variants }\n\nA variant of the method that was named before it:\n"
    yield "| method | argument | sets |\n|---|---|---|"
    for method, entry in METHODS.items():
        for name, changes in entry.variants.items():
            yield f"| `{method}` | `{name}` | {_assigned(changes)} |"


def _assigned(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in fields.items())


def _text(comment: str) -> str:
    """A comment as a cell of a table: pages it names become links, and nothing in it is markup."""
    text = comment.replace("|", "&#124;").replace("<", "&lt;").replace("*", "&#42;")
    text = re.sub(r"\bfedjax_ssl/[\w/]+\.py", lambda found: f"`{found[0]}`", text)
    return re.sub(r"\bdocs/([\w/]+)\.md", r"[\1](\1.md)", text)


if __name__ == "__main__":
    print(page(), end="")
