"""The program: signals are watched from its first moment on, before anything large is imported."""

import os
import sys
import threading
from types import TracebackType

from fedjax_ssl.run.signals import watch_signals


def enter(program: str = "python -m fedjax_ssl") -> int:
    """Runs the command line of this process.

    Args:
        program: how it was started, for what is printed.

    Returns:
        The exit status, see `fedjax_ssl.commands.main`.
    """
    # XLA tells of slow compilation as of an error, with advice for its developers. Its errors are raised as well.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    argv = sys.argv[1:]

    def farewell() -> str:
        commands = sys.modules.get("fedjax_ssl.commands")
        if not hasattr(commands, "farewell"):  # it is being imported
            return "nothing has been written or changed"
        return commands.farewell(argv).replace("python launch.py", program)

    with watch_signals(farewell):
        from absl import logging

        from fedjax_ssl.commands import main

        logging.set_verbosity(logging.FATAL)  # Orbax logs each traceback of its threads, and raises the error
        sys.excepthook = leave_out_callbacks
        status = main(argv, program)
    if any(thread.name.startswith("compiler") for thread in threading.enumerate()):
        # After an error: an interpreter waits for its threads, and nobody needs what they compile.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def leave_out_callbacks(kind: type, error: BaseException, trace: TracebackType | None) -> None:
    """Prints an error as Python does, but for those of TensorStore's callbacks that come after their checkpoint failed.

    The failure itself is raised. For `sys.excepthook`, which threads of C++ call as well.
    """
    if threading.current_thread() is threading.main_thread() or "Event loop is closed" not in str(error):
        sys.__excepthook__(kind, error, trace)


def installed() -> int:
    """The command `fedjax-ssl`."""
    return enter("fedjax-ssl")


if __name__ == "__main__":
    sys.exit(enter())
