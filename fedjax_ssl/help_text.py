"""What `python launch.py --help` prints, in 80 columns: commands, examples, configs, methods and fields.

Fields, defaults and meanings are those of `config.py` and the methods. They are read from the sources and not from the
modules, whose import (JAX, Flax, Optax, Orbax) takes longer than anybody wants to wait for help; a test compares.
"""

import ast
import functools
import pathlib
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from fedjax_ssl.recipes import RECIPES

PACKAGE = pathlib.Path(__file__).resolve().parent
CONFIGS = PACKAGE.parent / "configs"
WIDTH = 80

EXAMPLES = """\
  python launch.py                        the quickstart, a few minutes on a CPU
  python launch.py --config=configs/fedanchor_mnist.py --workdir=runs/a
  python launch.py --config=configs/fedanchor_mnist.py:semifl,strong,alpha=0.5
  python launch.py --config=configs/fedanchor_cifar10.py --config.num_rounds=20
  python launch.py --config.seeds='(0, 1, 2)' --workdir=runs/three_seeds
  python launch.py sweep configs/sweeps/mnist_methods.py --workdir=runs/methods
"""

# What most people change; the others are in config.py and the methods' files.
MAIN_FIELDS = (
    "method",
    "num_rounds",
    "num_clients",
    "clients_per_round",
    "seed",
    "seeds",
    "schedule",
    "checkpoint_every",
    "devices",
    "lanes",
    "data.source",
    "data.num_anchors",
    "data.partition",
    "data.alpha",
    "data.examples_per_client",
    "model.name",
    "model.normalisation",
    "client.epochs",
    "client.batch_size",
    "client.learning_rate",
    "client.proximal",
    "server.epochs",
    "server.learning_rate",
    "server.pretrain_epochs",
    "aggregation.optimizer",
    "threshold.kind",
    "log.tensorboard",
    "log.wandb_project",
)


class Command(NamedTuple):
    """A command of launch.py.

    Attributes:
        run: does it, given the flags' values (an absl FlagValues), the words and the overrides of fields. The first
            line of its docstring is in the list of commands, the others in the command's own help.
        flags: name -> (default, meaning).
        words: names of the words that follow the command, as in 'FILE'; one that ends in '...' stands for one or more.
    """

    run: Callable[[Any, list[str], list[str]], None]
    flags: Mapping[str, tuple[Any, str]]
    words: str = ""

    def fits(self, words: list[str]) -> bool:
        """Whether there are as many words as the command takes."""
        names = self.words.split()
        return len(words) >= len(names) if self.words.endswith("...") else len(words) == len(names)


class Field(NamedTuple):
    """A field of the configuration: its default, as it is written in Python, and the comment beside it."""

    default: str
    meaning: str


def overview(commands: Mapping[str, Command]) -> str:
    """The help of launch.py as a whole."""
    fields = read_fields()
    arguments = {
        "methods": f"{', '.join(read_methods())}; then one of the method's variants",
        "recipes": ", ".join(RECIPES),
        "others": ", ".join(read_arguments()),
    }
    return "\n".join(
        [
            "Trains a federated semi-supervised method.",
            "",
            "  python launch.py [COMMAND] [--config=FILE[:ARGUMENTS]] [--workdir=FOLDER]",
            "                   [--config.FIELD=VALUE ...]",
            "",
            "Commands; python launch.py COMMAND --help says more",
            _rows(((name, _summary(command.run.__doc__)) for name, command in commands.items()), 12),
            "Examples",
            EXAMPLES,
            "Configs: --config=FILE",
            _rows(((f"configs/{path.name}", _summary(_docstring(path))) for path in sorted(CONFIGS.glob("*.py"))), 34),
            "Arguments behind a config's colon, with commas between; they apply in order",
            _rows(arguments.items(), 12),
            "Methods and their variants; docs/methods.md",
            _rows(
                ((name, about + (f" Variants: {', '.join(variants)}." if variants else ""))
                 for name, (about, variants) in read_methods().items()), 16,
            ),
            "Fields that most people change: --config.FIELD=VALUE. The defaults are those of",
            "fedjax_ssl/config.py, which has all fields; a config file sets its own.",
            _rows(((f"{name} = {fields[name].default}", fields[name].meaning) for name in MAIN_FIELDS), 34),
        ]
    )  # fmt: skip


def of_command(name: str, command: Command) -> str:
    """The help of one command."""
    summary, _, more = textwrap.dedent(" " * 4 + (command.run.__doc__ or "")).strip().partition("\n")
    flags = []
    for flag, (default, meaning) in command.flags.items():
        takes, number = "" if type(default) is bool else "=...", type(default) is int
        flags.append((f"--{flag}{takes}", meaning + (f"; default: {default}" if number else "")))
    if "config" in command.flags:
        flags.append(("--config.FIELD=...", "overrides any field of the configuration"))
    return "\n".join(
        [
            textwrap.fill(summary, WIDTH),
            "",
            f"  python launch.py {' '.join(filter(None, [name, command.words]))} [FLAGS]",
            "",
            *([textwrap.dedent(more).strip(), ""] if more.strip() else []),
            _rows(flags, 22),
        ]
    )


@functools.cache
def read_fields() -> dict[str, Field]:
    """All fields of `base_config` by their dotted names."""
    fields = _fields_of(PACKAGE / "config.py", "base_config")
    for name in read_methods():
        own = _fields_of(PACKAGE / "methods" / f"{name}.py", "defaults")
        fields.update({f"{name}.{field}": value for field, value in own.items()})
    return fields


@functools.cache
def read_methods() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name of each method -> (what it is, the names of its variants)."""
    methods = {}
    for path in sorted((PACKAGE / "methods").glob("[!_]*.py")):
        methods[path.stem] = (_summary(_docstring(path)), tuple(_keys(_tree(path), "VARIANTS")))
    return methods


def read_arguments() -> list[str]:
    """What every config takes behind its colon, besides methods, recipes and models."""
    tree = _tree(PACKAGE / "config.py")
    return [*_keys(tree, "ARGUMENTS"), "the name of a model", *(f"{name}=" for name in _keys(tree, "ARGUMENT_FIELDS"))]


def _fields_of(path: pathlib.Path, function: str, given: Mapping[str, str] = {}) -> dict[str, Field]:
    """The assignments `section.FIELD = VALUE  # MEANING` in a function.

    Args:
        path: of the module.
        function: its name; a module without it has no fields.
        given: the function's arguments, as they are written in Python.
    """
    lines = path.read_text().splitlines()
    functions = {node.name: node for node in _tree(path).body if isinstance(node, ast.FunctionDef)}
    fields = {}
    for node in functions[function].body if function in functions else ():
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)):
            continue
        name = ast.unparse(node.targets[0]).partition(".")[2]
        called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        if called in functions:  # a section that a function of its own makes
            arguments = {word.arg: ast.unparse(word.value) for word in node.value.keywords}
            own = _fields_of(path, called, arguments)
            fields.update({f"{name}.{field}": value for field, value in own.items()})
        elif called != "ConfigDict":
            default = "None" if called.endswith("placeholder") else ast.unparse(node.value)
            fields[name] = Field(given.get(default, default), _comment(lines, node))
    return fields


def _comment(lines: list[str], node: ast.stmt) -> str:
    """What stands behind a statement, or else above it."""
    beside = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().partition("# ")[2]
    if beside:
        return beside
    above = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip().removeprefix("# "))
    return " ".join(above)


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def _docstring(path: pathlib.Path) -> str:
    return ast.get_docstring(_tree(path)) or ""


def _keys(tree: ast.Module, variable: str) -> list[str]:
    """The keys of a dict that is assigned to a variable anywhere in a module, as far as they are written out."""
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == variable and isinstance(node.value, ast.Dict):
            return [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
    return []


def _summary(docstring: str | None) -> str:
    """The first paragraph, on one line."""
    return " ".join((docstring or "").strip().partition("\n\n")[0].split())


def _rows(rows: Iterable[tuple[str, str]], column: int) -> str:
    """Names on the left and what they mean on the right, from a column on; an empty line at the end."""
    text = []
    for name, meaning in rows:
        start = f"  {name}"
        if len(start) + 2 > column:
            text.append(start)
            start = ""
        indents = {"initial_indent": start.ljust(column), "subsequent_indent": " " * column}
        text += textwrap.wrap(meaning, WIDTH, **indents) or [start] * bool(start)
    return "\n".join(text) + "\n"
