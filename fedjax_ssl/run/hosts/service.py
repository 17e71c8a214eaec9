"""JAX's coordination service for several hosts, in its own process: python service.py PORT PROCESSES.

JAX would run the service inside the first process. If that process were killed, the runtime would abort all others at
once with a stack trace. This process outlives the first one long enough for the others to notice and print a line.
"""

import os
import signal
import sys
import time

READY = "ready"
TOLD_SECONDS = 6.0  # until exit, if the first process ends and has told the others why
KILLED_SECONDS = 45.0  # if it was killed; longer than `link.SILENCE_SECONDS`


def main(port: str, count: str) -> None:
    """Serves a port, on all addresses, until standard input closes. Prints READY once it listens, or the error."""
    # A whole process group gets these signals, and the training processes still save their state.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from jaxlib import _jax

    try:  # recoverable: the service does not abort the others if one is lost
        service = _jax.get_distributed_runtime_service(f"[::]:{port}", int(count), recoverable=True)
    except Exception as error:  # JAX's own type of error
        print(" ".join(str(error).split()), flush=True)
        return
    print(READY, flush=True)  # the service runs in other threads
    time.sleep(TOLD_SECONDS if sys.stdin.read() else KILLED_SECONDS)
    del service
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
