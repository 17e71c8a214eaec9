"""The coordination service of several hosts, as a process of its own: python coordinator.py PORT PROCESSES SECONDS.

JAX would run it inside the first process, and when that is killed the runtime of all others aborts them at once, with
a stack trace. So it outlives the first process for as long as the others need to see that, and to say so.
"""

import errno
import os
import signal
import socket
import sys
import time

READY = "ready"
# What the first process may say at its end: all have left, or it has told the others why they will. -> seconds to go.
SECONDS_TO_GO = {"done": 1.0, "told": 6.0}
GRACE_SECONDS = 45.0  # after it has gone without a word; longer than `link.SILENCE_SECONDS`


def main(port: str, count: str, seconds: str) -> None:
    """Serves until the standard input ends; prints READY, or why there is no service.

    Args:
        port: to listen at.
        count: of processes.
        seconds: that the port has to become free.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # which a whole group gets: the processes still save their state
        signal.signal(number, signal.SIG_IGN)
    from jaxlib import _jax

    try:
        host = _free(int(port), float(seconds))
        # Other threads serve.
        service = _jax.get_distributed_runtime_service(f"{host}:{port}", int(count), shutdown_timeout=60)
    except Exception as error:  # of JAX's own kind
        print(" ".join(str(error).split()), flush=True)
        return
    print(READY, flush=True)
    time.sleep(SECONDS_TO_GO.get(sys.stdin.read(), GRACE_SECONDS))
    del service
    os._exit(0)


def _free(port: int, seconds: float) -> str:
    """The address to listen at, when nobody else does; the service would share a port with another.

    Raises:
        OSError: somebody does.
    """
    family, host = (socket.AF_INET6, "[::]") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6).close()
            return host
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    main(*sys.argv[1:])
