"""The entry point of the program. It watches for signals before it imports anything large."""

import gc
import os
import sys
import threading
from typing import Any

from fedjax_ssl.run.signals import watch_signals


def enter(program: str = "python -m fedjax_ssl") -> int:
    """Runs the command line of this process; for `program` and the exit status see `fedjax_ssl.cli.commands.main`."""
    # XLA logs slow compilation as an error, with advice for its developers. Real errors are also raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Tracing makes millions of long-lived objects: with Python's defaults, garbage collection is 1/8 of the start.
    gc.set_threshold(20_000, 20, 20)
    argv = sys.argv[1:]

    def farewell() -> str:
        commands = sys.modules.get("fedjax_ssl.cli.commands")
        if not hasattr(commands, "farewell"):  # it is being imported
            return "nothing has been written or changed"
        return commands.farewell(argv).replace("python launch.py", program)

    watch_signals(farewell)
    from absl import logging

    from fedjax_ssl.cli.commands import main

    logging.set_verbosity(logging.FATAL)  # Orbax logs each traceback of its threads, and raises the error
    sys.unraisablehook = leave_out_callbacks
    status = main(argv, program)
    if any(thread.name.startswith(("compiler", "hosts")) for thread in threading.enumerate()):
        # After an error. The interpreter would wait for these threads, which compile unused programs or wait for hosts.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def leave_out_callbacks(unraisable: Any) -> None:
    """Prints unraisable errors as Python does, except those of TensorStore after a failed checkpoint.

    For `sys.unraisablehook`. TensorStore calls back into an event loop that has ended; the failure itself is raised
    elsewhere.
    """
    trace = unraisable.exc_traceback
    is_callback = trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"  # called from C++
    if not (is_callback and isinstance(unraisable.exc_value, RuntimeError)):
        sys.__unraisablehook__(unraisable)


def installed() -> int:
    """The command `fedjax-ssl`."""
    return enter("fedjax-ssl")


if __name__ == "__main__":
    sys.exit(enter())
