"""The command line of a checkout: `python launch.py --help` says what it takes. Installed, it is `fedjax-ssl`."""

import importlib.util
import os
import pathlib
import sys

if __name__ == "__main__":
    # `python` may be the system's, which has nothing installed, while `make quickstart` has made a folder that has.
    mine = pathlib.Path(__file__).resolve().parent / ".venv" / "bin" / "python"
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("absl") is None:
        if not mine.exists() or pathlib.Path(sys.prefix) == mine.parent.parent:
            sys.exit("error: fedjax_ssl is not installed for this Python; make quickstart, or pip install --editable .")
        os.execv(mine, [str(mine), *sys.argv])
    from fedjax_ssl.__main__ import enter

    sys.exit(enter("python launch.py"))
else:
    from fedjax_ssl.cli.commands import COMMANDS, QUICKSTART, main  # noqa: F401
