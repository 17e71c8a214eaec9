"""The coordination service of several hosts as a process of its own: python coordinator.py HOST PORT PROCESSES SECONDS.

JAX would run it inside the first process, and when that is killed the runtime of all others aborts them at once, with
a stack trace. So it outlives the first process for as long as the others need to see that, and to say so.
"""

import contextlib
import errno
import ipaddress
import os
import re
import select
import signal
import socket
import sys
import time

READY, GO = "ready", "go"  # it listens; all processes have come
VOICE = "fedjax_ssl: "  # how all lines between processes begin, for anybody may be at a port
HERE = "process {} of {}\n"  # what a process says when it comes
TELL_SECONDS = 20.0  # that processes are told, as they come, what is wrong with the others
# What the first process may say at its end: all have left, or it has told the others why they will. -> seconds to go.
SECONDS_TO_GO = {"done": 1.0, "told": 6.0}
GRACE_SECONDS = 45.0  # after it has gone without a word; longer than `link.SILENCE_SECONDS`


def main(host: str, port: str, count: str, seconds: str) -> None:
    """Serves until the standard input ends; prints READY and, when all have come, GO; or why there is no service.

    Args:
        host: where the others look for it.
        port: to listen at.
        count: of processes.
        seconds: that the port has to become free.
    """
    # Which a whole group gets: the processes still save their state.
    for number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
        signal.signal(number, signal.SIG_IGN)
    from jaxlib import _jax

    try:
        family, host = where_to_listen(host)
        with _listen(family, host, int(port), float(seconds)) as server:
            print(READY, flush=True)
            come = call_roll(server, int(count))
        address = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
        # Other threads serve.
        service = _jax.get_distributed_runtime_service(address, int(count), shutdown_timeout=60)
    except Exception as error:  # of JAX's own kind
        print(" ".join(str(error).split()), flush=True)
        return
    for connection in come:
        _tell(connection, GO)
    print(GO, flush=True)
    time.sleep(SECONDS_TO_GO.get(sys.stdin.read(), GRACE_SECONDS))
    del service
    os._exit(0)


def call_roll(server: socket.socket, count: int) -> list[socket.socket]:
    """Waits for all processes except the first, which started this one and talks to it through the standard input.

    JAX's service would abort all processes, with a stack trace, where two have the same number.

    Args:
        server: listens.
        count: of processes in all, as the first one was told.

    Returns:
        A connection to each.

    What they say of themselves may contradict each other: then this process prints that, tells those that have come
    and, for a while, those that come later, and ends.
    """
    come: dict[int, socket.socket] = {}
    while len(come) < count - 1:
        ready = select.select([server, sys.stdin, *come.values()], [], [])[0]
        if sys.stdin in ready:  # the first process has gone, and nothing has begun
            os._exit(0)
        for index in [index for index, connection in come.items() if connection in ready]:
            come.pop(index).close()  # it has gone, too, and may come again
        connection, index, told = _hear(server) if server in ready else (None, 0, 0)
        if connection is None:
            continue
        if told == count and 0 < index < count and index not in come:
            come[index] = connection
            continue
        wrong = f"two processes have --process_id={index}"
        if told != count:
            wrong = f"process {index} was started with --num_processes={told}, process 0 with {count}"
        print(wrong, flush=True)
        for each in (*come.values(), connection):
            _tell(each, wrong)
        end = time.monotonic() + TELL_SECONDS
        while select.select([server], [], [], max(0.0, end - time.monotonic()))[0]:
            _tell(_hear(server)[0], wrong)
        os._exit(0)
    return list(come.values())


def _hear(server: socket.socket) -> tuple[socket.socket | None, int, int]:
    """The next process that connects: connection, number, and how many processes it expects; None for a stranger."""
    connection, _ = server.accept()
    connection.settimeout(5.0)
    try:
        with connection.makefile("rb") as file:
            said = file.readline(100).decode(errors="replace")
    except OSError:
        said = ""
    who = re.fullmatch(VOICE + HERE.format("([0-9]{1,9})", "([0-9]{1,9})"), said)
    if who is None:
        connection.close()
        return None, 0, 0
    return connection, int(who[1]), int(who[2])


def _tell(connection: socket.socket | None, line: str) -> None:
    """Says a line to a process, and closes the connection."""
    if connection is not None:
        with contextlib.suppress(OSError), connection:
            connection.sendall(f"{VOICE}{line}\n".encode())


def where_to_listen(host: str) -> tuple[socket.AddressFamily, str]:
    """The address to listen at, with its family. Anyone may use the service, so as few as possible should reach it.

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


def _listen(family: socket.AddressFamily, host: str, port: int, seconds: float) -> socket.socket:
    """Listens once the port is free; otherwise the service would share it with another process.

    Raises:
        OSError: somebody does.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=host == "::")
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    main(*sys.argv[1:])
