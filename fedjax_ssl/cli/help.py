"""What `python launch.py --help` prints, in 80 columns: commands, examples, and the words after a config's colon."""

import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from fedjax_ssl.base.fields import ARGUMENT_FIELDS, RECIPES, WORDS

WIDTH = 80

EXAMPLES = """\
  python launch.py                        the quickstart, a few minutes on a CPU
  python launch.py --config=configs/fedanchor_mnist.py --workdir=runs/a
  python launch.py --config=configs/fedanchor_mnist.py:semifl,strong,alpha=0.5
  python launch.py --config=configs/fedanchor_cifar10.py --config.num_rounds=20
  python launch.py --workdir=runs/a       resumes a run that was stopped
  python launch.py --config.seeds='(0, 1, 2)' --workdir=runs/three_seeds
  python launch.py sweep configs/sweeps/mnist_methods.py --workdir=runs/methods
  python launch.py methods                all methods with their variants
"""


class Command(NamedTuple):
    """A command of launch.py."""

    # Runs the command, given the flags' values (an absl FlagValues), the words and the overrides of fields. The first
    # line of its docstring is in the list of commands, the others are in the command's own help.
    run: Callable[[Any, list[str], list[str]], None]
    flags: Mapping[str, tuple[Any, str]]  # name -> (default, meaning)
    # Names of the words that follow the command, as in 'FILE'; one that ends in '...' stands for one or more.
    words: str = ""
    needs: tuple[str, ...] = ()  # flags without a default that must be given


def overview(commands: Mapping[str, Command]) -> str:
    """The help of launch.py as a whole."""
    words = ", ".join([*WORDS, "the name of a model", *(f"{name}=" for name in ARGUMENT_FIELDS)])
    arguments = {"methods": "a name, or method=FILE.py:NAME; then one of its variants", "recipes": ", ".join(RECIPES)}
    summaries = ((name, (command.run.__doc__ or "").partition("\n\n")[0]) for name, command in commands.items())
    return "\n".join(
        [
            "Trains a federated semi-supervised method.",
            "",
            "  python launch.py [COMMAND] [--config=FILE[:ARGUMENTS]] [--workdir=FOLDER]",
            "                   [--config.FIELD=VALUE ...]",
            "  python launch.py --version",
            "",
            "Each command takes --quiet (only warnings and errors) and --verbose.",
            "",
            "Commands; details: python launch.py COMMAND --help",
            _rows(summaries, 12),
            "Examples",
            EXAMPLES,
            "Arguments after a config's colon, separated by commas, applied in order",
            _rows([*arguments.items(), ("others", words)], 12),
            "Fields: python launch.py --dry_run shows all with their values. Their meaning:",
            "python docs/config_reference.py, or the page configs.md of the site.",
        ]
    )


def of_command(name: str, command: Command) -> str:
    """The help of one command."""
    first, _, more = textwrap.dedent(" " * 4 + (command.run.__doc__ or "")).strip().partition("\n")
    flags = []
    for flag, (default, meaning) in command.flags.items():
        takes, number = "" if type(default) is bool else "=...", type(default) in (int, float)
        flags.append((f"--{flag}{takes}", meaning + (f"; default: {default}" if number else "")))
    if "config" in command.flags:
        flags.append(("--config.FIELD=...", "overrides any field of the configuration"))
    return "\n".join(
        [
            textwrap.fill(first, WIDTH),
            "",
            f"  python launch.py {' '.join(filter(None, [name, command.words]))} [FLAGS]",
            "",
            *([textwrap.dedent(more).strip(), ""] if more.strip() else []),
            _rows(flags, 22),
        ]
    )


def _rows(rows: Iterable[tuple[str, str]], column: int) -> str:
    """Lines with names on the left and meanings from a column on; an empty line at the end."""
    text = []
    for name, meaning in rows:
        start = f"  {name}"
        if len(start) + 2 > column:
            text.append(start)
            start = ""
        first, others = start.ljust(column), " " * column
        text += textwrap.wrap(meaning, WIDTH, initial_indent=first, subsequent_indent=others) or [start] * bool(start)
    return "\n".join(text) + "\n"
