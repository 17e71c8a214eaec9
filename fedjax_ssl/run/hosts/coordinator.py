"""JAX's coordination service for several hosts, in its own process: python coordinator.py HOST PORT PROCESSES SECONDS.

JAX would run the service inside the first process. If that process were killed, the runtime would abort all others at
once with a stack trace. This process outlives the first one long enough for the others to notice and print a line.
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

READY, GO = "ready", "go"  # it listens; all processes have connected
VOICE = "fedjax_ssl: "  # starts every line between processes, since anything may connect to a port
HERE = "process {} of {}\n"  # the line a process sends when it connects
TELL_SECONDS = 20.0  # for so long after a failure, processes that connect are told the error
# The first process's last word ('done': all have left; 'told': the others know why it ends) -> seconds until exit.
SECONDS_TO_GO = {"done": 1.0, "told": 6.0}
GRACE_SECONDS = 45.0  # until exit if the first process ends without such a word; longer than `link.SILENCE_SECONDS`


def main(host: str, port: str, count: str, seconds: str) -> None:
    """Serves until standard input closes. Prints READY, and GO once all processes have connected; or the error.

    Args:
        host: the name under which the others look for the service.
        port: to listen at.
        count: number of processes.
        seconds: to wait for the port to become free.
    """
    # Ignores signals that a whole process group gets, since the training processes still save their state.
    for number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
        signal.signal(number, signal.SIG_IGN)
    from jaxlib import _jax

    try:
        family, host = where_to_listen(host)
        with _listen(family, host, int(port), float(seconds)) as server:
            print(READY, flush=True)
            come = call_roll(server, int(count))
        address = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
        # The service runs in other threads.
        service = _jax.get_distributed_runtime_service(address, int(count), shutdown_timeout=60)
    except Exception as error:  # JAX's own type of error
        print(" ".join(str(error).split()), flush=True)
        return
    for connection in come:
        _tell(connection, GO)
    print(GO, flush=True)
    time.sleep(SECONDS_TO_GO.get(sys.stdin.read(), GRACE_SECONDS))
    del service
    os._exit(0)


def call_roll(server: socket.socket, count: int) -> list[socket.socket]:
    """Waits for all processes except the first, which started this one and talks to it through standard input.

    JAX's service would abort all processes with a stack trace if two had the same number. So this function checks the
    numbers first. If they contradict each other, it prints the error, sends it to all processes that have connected or
    connect soon, and exits.

    Args:
        server: a listening socket.
        count: number of processes, as the first process was told.

    Returns:
        A connection to each process.
    """
    come: dict[int, socket.socket] = {}
    while len(come) < count - 1:
        ready = select.select([server, sys.stdin, *come.values()], [], [])[0]
        if sys.stdin in ready:  # the first process has gone before the run began
            os._exit(0)
        for index in [index for index, connection in come.items() if connection in ready]:
            come.pop(index).close()  # this process has gone too, and may connect again
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
    """Accepts one connection: (connection, its number, the count it expects); connection is None for a stranger."""
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
    """Sends a line to a process and closes the connection."""
    if connection is not None:
        with contextlib.suppress(OSError), connection:
            connection.sendall(f"{VOICE}{line}\n".encode())


def where_to_listen(host: str) -> tuple[socket.AddressFamily, str]:
    """The address to listen at, with its family. Anyone who reaches the service may use it, so few should reach it.

    Args:
        host: the name under which the others look for the service. For 'localhost' or an address of this host the
            service listens there only. For any other name it listens at all addresses, as other hosts may resolve the
            name differently.
    """
    for known in ("127.0.0.1", "::1") if host == "localhost" else (host,):
        try:
            family = socket.AF_INET if ipaddress.ip_address(known).version == 4 else socket.AF_INET6
            socket.create_server((known, 0), family=family).close()
            return family, known
        except (ValueError, OSError):  # a name, or an address that is forwarded to this host
            continue
    return (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")


def _listen(family: socket.AddressFamily, host: str, port: int, seconds: float) -> socket.socket:
    """Listens once the port is free; without this check the service would share the port with another process.

    Raises:
        OSError: another process still listens there.
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
