"""Starts the command line in a checkout, see `python launch.py --help`. The installed command is `fedjax-ssl`."""

import importlib.util
import os
import pathlib
import shlex
import sys

if __name__ == "__main__":
    # `python` may be the system's interpreter, which lacks the packages that `make quickstart` installs into .venv.
    mine = pathlib.Path(__file__).resolve().parent / ".venv" / "bin" / "python"
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("absl") is None:
        if not mine.exists() or pathlib.Path(sys.prefix) == mine.parent.parent:
            sys.exit("error: fedjax_ssl is not installed for this Python; make quickstart, or pip install --editable .")
        os.execv(mine, [str(mine), *sys.argv])
    from fedjax_ssl.__main__ import enter

    sys.exit(enter(f"python {shlex.quote(sys.argv[0])}"))
else:
    from fedjax_ssl.cli.commands import COMMANDS, QUICKSTART, main  # noqa: F401
