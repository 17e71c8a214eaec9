"""The coordination service of several hosts as a process of its own: python coordinator.py HOST PORT PROCESSES SECONDS.

JAX would run it inside the first process, and when that is killed the runtime of all others aborts them at once, with
a stack trace. So it outlives the first process for as long as the others need to see that, and to say so.
"""

import errno
import ipaddress
import os
import signal
import socket
import sys
import time

READY = "ready"
# What the first process may say at its end: all have left, or it has told the others why they will. -> seconds to go.
SECONDS_TO_GO = {"done": 1.0, "told": 6.0}
GRACE_SECONDS = 45.0  # after it has gone without a word; longer than `link.SILENCE_SECONDS`


def main(host: str, port: str, count: str, seconds: str) -> None:
    """Serves until the standard input ends; prints READY, or why there is no service.

    Args:
        host: where the others look for it.
        port: to listen at.
        count: of processes.
        seconds: that the port has to become free.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # which a whole group gets: the processes still save their state
        signal.signal(number, signal.SIG_IGN)
    from jaxlib import _jax

    try:
        family, host = where_to_listen(host)
        _wait_until_free(family, host, int(port), float(seconds))
        address = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
        # Other threads serve.
        service = _jax.get_distributed_runtime_service(address, int(count), shutdown_timeout=60)
    except Exception as error:  # of JAX's own kind
        print(" ".join(str(error).split()), flush=True)
        return
    print(READY, flush=True)
    time.sleep(SECONDS_TO_GO.get(sys.stdin.read(), GRACE_SECONDS))
    del service
    os._exit(0)


def where_to_listen(host: str) -> tuple[socket.AddressFamily, str]:
    """The address to listen at, with its family: as few others as possible are to reach a service that lets anyone in.

    Args:
        host: where the others look for the service. At 'localhost', or at an address that this host has, it listens
            there alone. At any other name it listens at all addresses: other hosts may know another one by that name.
    """
    for known in ("127.0.0.1", "::1") if host == "localhost" else (host,):
        try:
            family = socket.AF_INET if ipaddress.ip_address(known).version == 4 else socket.AF_INET6
            socket.create_server((known, 0), family=family).close()
            return family, known
        except (ValueError, OSError):  # a name, or an address that only leads here
            continue
    return (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")


def _wait_until_free(family: socket.AddressFamily, host: str, port: int, seconds: float) -> None:
    """Waits until nobody else listens there; the service would share a port with another.

    Raises:
        OSError: somebody does.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_server((host, port), family=family, dualstack_ipv6=host == "::").close()
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    main(*sys.argv[1:])
