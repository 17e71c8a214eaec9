"""Connects a process to those of other hosts: it waits for them, checks that they live, and tells them how it ends.

The processes talk through JAX's coordination service, which runs in a process of its own, see `coordinator.py`.
"""

import atexit
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import jax

from fedjax_ssl.base.errors import StoppedError, UserError, first_line
from fedjax_ssl.run.hosts.cluster import Place
from fedjax_ssl.run.hosts.coordinator import GO, HERE, READY, VOICE
from fedjax_ssl.run.observe import clock, log
from fedjax_ssl.run.signals import leave
from fedjax_ssl.run.under_way import resume_command

MEETING_SECONDS = 300.0  # how long processes wait for each other at the start
PORT_SECONDS = 60.0  # how long to wait for the first process's port, which a killed run's service holds for a while
BEAT_SECONDS = 2.0
SILENCE_SECONDS = 30.0  # a process without a sign of life for so long counts as gone
_FOREVER = 7 * 24 * 3600 * 1000  # milliseconds: a process that waits is ended by the watching thread
_WATCH, _TALK = "fedjax_ssl/watch/", "fedjax_ssl/talk/"
# Words in errors of the service and the libraries that sum over hosts, if another process does not answer.
_LOST_WORDS = ("Gloo", "gloo", "NCCL", "Connection", "Socket closed", "UNAVAILABLE", "DEADLINE_EXCEEDED")


class HostLink:
    """One process among those of all hosts.

    Attributes:
        place: this process's place.
        leaving: whether this process is about to end; it then ignores that others end.
        stopping: whether all processes have agreed to stop after a signal.
    """

    def __init__(self, place: Place):
        """Waits until all processes have connected.

        Raises:
            UserError: some do not connect, their numbers or counts contradict each other, or JAX has started.
        """
        self.place, self.leaving, self.stopping = place, False, False
        self._talks = 0
        self._resume: str | None = None  # the command that resumes the run in progress, on the first host
        self._service = _start_service(place) if place.index == 0 else None
        who = f"{place.count} processes" if place.index == 0 else f"process 0 at {place.coordinator}"
        late = f"error: waited {MEETING_SECONDS:.0f} seconds in vain for {who}"
        # JAX's runtime would report this by aborting.
        timer = threading.Timer(MEETING_SECONDS, leave, (2, late))
        timer.daemon = True
        timer.start()
        try:
            with clock.doing(f"waiting for {who}"):
                _meet_first(place, self._service)
                # JAX's own handler of SIGTERM would replace ours.
                jax.config.update("jax_enable_preemption_service", False)
                try:
                    jax.distributed.initialize(
                        place.coordinator,
                        place.count,
                        place.index,
                        place.local_devices,
                        cluster_detection_method="deactivate",
                        initialization_timeout=int(2 * MEETING_SECONDS),
                        shutdown_timeout_seconds=60,
                        coordinator_bind_address="localhost:0",  # of an unused service: ours is running already
                    )
                except RuntimeError as error:
                    self.tell_service("told")
                    raise UserError(f"cannot train on several hosts: {first_line(error)}") from error
        finally:
            timer.cancel()
        from jax._src import distributed  # JAX has no public name for what its processes talk through

        self._client = distributed.global_state.client
        self._heard = time.monotonic()
        if place.index:
            log.set_level(log.QUIET)  # the first process speaks for all
        atexit.register(self._exit)  # before JAX's own handler, which would wait for the others
        self._closed = threading.Event()
        for work in (self._beat, self._guard):
            threading.Thread(target=work, name="hosts", daemon=True).start()

    def meet(self, text: str = "") -> list[str]:
        """Waits for all processes; returns the text of each, by process number."""
        self._talks += 1
        here = f"{_TALK}{self._talks}/"
        self._client.key_value_set(f"{here}{self.place.index}", text)
        self._client.wait_at_barrier("fedjax_ssl", _FOREVER)
        said = dict(self._client.key_value_dir_get(here))
        # All processes have read the previous message, or they would not be here.
        self._client.key_value_delete(f"{_TALK}{self._talks - 1}/{self.place.index}")
        return [said[f"{here}{index}"] for index in range(self.place.count)]

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process ends because of an error of its own.

        If the error is that another process does not answer, the watching thread first finds out which, and ends this
        one.
        """
        told = isinstance(error, UserError | StoppedError)
        if not told and any(word in str(error) for word in _LOST_WORDS):
            time.sleep(SILENCE_SECONDS + 3 * BEAT_SECONDS)
        self.leaving = True
        kind = "stopped" if isinstance(error, StoppedError) else "error" if told else type(error).__name__
        ended = json.dumps([2 if isinstance(error, UserError) else 4, f"{kind}: {first_line(error)}"])
        with contextlib.suppress(Exception):  # the service may have gone
            self._client.key_value_set(f"{_WATCH}{self.place.index}/ended", ended, allow_overwrite=True)
        self.tell_service("told")

    def close(self) -> None:
        """Leaves together with the other processes."""
        self.leaving = True
        self._closed.set()
        jax.distributed.shutdown()
        self.tell_service("done")

    def tell_service(self, word: str) -> None:
        """Tells the service how the run ended, see `coordinator.SECONDS_TO_GO`."""
        if self._service is not None:
            with contextlib.suppress(OSError):
                self._service.stdin.write(word)
                self._service.stdin.close()

    def _exit(self) -> None:
        """Runs when the interpreter exits: a process that exits early must not wait for the others."""
        if not self._closed.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _beat(self) -> None:
        """Repeatedly reports that this process lives and checks the others."""
        beats, since = 0, {index: (None, time.monotonic()) for index in range(self.place.count)}
        while not self._closed.wait(BEAT_SECONDS):
            now, beats = time.monotonic(), beats + 1
            self._resume = resume_command() or self._resume  # an error about a lost host would clear it
            try:
                self._client.key_value_set(f"{_WATCH}{self.place.index}/beat", str(beats), allow_overwrite=True)
                said = dict(self._client.key_value_dir_get(_WATCH))
            except Exception:
                self._leave(4, "stopped: host 0 has gone, or the network")
                return
            if time.monotonic() - self._heard > 5 * BEAT_SECONDS:  # this process itself was suspended
                since = {index: (beat, now) for index, (beat, _) in since.items()}
            self._heard = time.monotonic()
            for index in range(self.place.count):
                if f"{_WATCH}{index}/ended" in said:
                    status, why = json.loads(said[f"{_WATCH}{index}/ended"])
                    self._leave(status, f"host {index} has ended: {why}")
                beat = said.get(f"{_WATCH}{index}/beat")
                if beat != since[index][0]:
                    since[index] = (beat, now)
                elif now - since[index][1] > SILENCE_SECONDS:
                    self._leave(4, f"stopped: host {index} has gone: no word of it for {SILENCE_SECONDS:.0f} seconds")

    def _guard(self) -> None:
        """Ends the process if the service does not answer."""
        last = time.monotonic()
        while not self._closed.wait(BEAT_SECONDS):
            now = time.monotonic()
            if now - last > 5 * BEAT_SECONDS:  # this process itself was suspended
                self._heard = max(self._heard, now)
            elif now - self._heard > SILENCE_SECONDS:
                self._leave(4, f"stopped: host 0 has gone: no answer for {SILENCE_SECONDS:.0f} seconds")
            last = now

    def _leave(self, status: int, text: str) -> None:
        if self.leaving or self._closed.is_set():
            return
        kept = f"; the last checkpoint is kept, and {self._resume} resumes from it" if self._resume else ""
        leave(status, text + kept)


def _start_service(place: Place) -> subprocess.Popen[str]:
    """Starts the coordination service on this host."""
    host, port = place.address
    file = pathlib.Path(__file__).with_name("coordinator.py")
    command = [sys.executable, "-P", str(file), host, str(port), str(place.count), str(PORT_SECONDS)]
    service = subprocess.Popen(
        command,
        text=True,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with clock.doing(f"waiting for port {port}"):
        said = service.stdout.readline().strip()
    if said != READY:
        service.kill()
        raise UserError(f"process 0 cannot listen at port {port}: {said}")
    return service


def _meet_first(place: Place, service: subprocess.Popen[str] | None) -> None:
    """Waits until the service has heard of all processes. The caller limits the time.

    Args:
        place: this process's place.
        service: the service's process, in the first process.

    Raises:
        UserError: numbers or counts contradict each other, or something else answers at the service's address.
    """
    said = service.stdout.readline().strip() if service is not None else ""
    ends = time.monotonic() + PORT_SECONDS  # another program may still be there, such as the service of a killed run
    while service is None and not said:
        answer = _say_hello(place)
        if answer.startswith(VOICE):
            said = answer.removeprefix(VOICE).strip()
        elif not answer:
            ends = time.monotonic() + PORT_SECONDS
        elif time.monotonic() > ends:
            said = f"at {place.coordinator} is a run that began without this process, or something else"
        time.sleep(0 if said else 0.2)
    if said != GO:
        raise UserError(f"cannot train on several hosts: {said}")


def _say_hello(place: Place) -> str:
    """Tells the service that this process is here; returns its answer, after a wait, or '' if there is no service."""
    try:
        with socket.create_connection(place.address, 5.0) as connection:
            connection.sendall(f"{VOICE}{HERE.format(place.index, place.count)}".encode())
            connection.settimeout(None)
            with connection.makefile("rb") as file:
                return file.readline(1000).decode(errors="replace")
    except OSError:  # no process listens yet, or the name cannot be resolved yet
        return ""
