"""Connects a process to those of other hosts: it waits for them, checks that they live, and tells them how it ends.

The processes talk through JAX's coordination service, which runs in a process of its own, see `service.py`.
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
from typing import Any

import jax

# JAX has no public names for what its processes talk through, for the start of the service, and for a cluster's size.
from jax._src import distributed
from jax._src.clusters import ClusterEnv

from fedjax_ssl.base.errors import StoppedError, UserError, first_line
from fedjax_ssl.run.hosts.service import READY
from fedjax_ssl.run.observe import clock, log
from fedjax_ssl.run.signals import leave
from fedjax_ssl.run.under_way import resume_command

MEETING_SECONDS = 300.0  # how long processes wait for each other at the start
PORT_SECONDS = 60.0  # how long to wait for the first process's port, which a killed run's service holds for a while
BEAT_SECONDS = 2.0
SILENCE_SECONDS = 30.0  # a process without a sign of life for so long counts as gone
CLUSTERS = ("slurm", "gketpu", "gcetpu")  # JAX's names of SLURM and two kinds of TPU pods
_FOREVER = 7 * 24 * 3600 * 1000  # milliseconds: a process that waits is ended by the watching thread
_WATCH, _TALK = "fedjax_ssl/watch/", "fedjax_ssl/talk/"
# Words in errors of the service and the libraries that sum over hosts, if another process does not answer.
_LOST_WORDS = ("Gloo", "gloo", "NCCL", "Connection", "Socket closed", "UNAVAILABLE", "DEADLINE_EXCEEDED")


def find_cluster() -> str | None:
    """JAX's name of the cluster that has started this process together with others; None: there is none."""
    kinds = {kind.name: kind for kind in ClusterEnv._cluster_types}
    return next((n for n in CLUSTERS if kinds[n].is_env_present() and kinds[n].get_process_count() > 1), None)


def gpus_of_task() -> list[int] | None:
    """The numbers of a SLURM task's GPUs: an equal share of those that it sees. None: JAX chooses."""
    seen = len([name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name])
    if not seen or "SLURM_LOCALID" not in os.environ:
        return None
    tasks = int(os.environ["SLURM_NTASKS"]) // int(os.environ["SLURM_STEP_NUM_NODES"])
    share = seen // tasks  # 0: each task sees its own GPUs only
    first = int(os.environ["SLURM_LOCALID"]) * share
    return list(range(first, first + share)) or list(range(seen))


class HostLink:
    """One process among those of all hosts.

    Attributes:
        count: number of processes.
        index: number of this process, from 0.
        leaving: whether this process is about to end; it then ignores that others end.
        stopping: whether all processes have agreed to stop after a signal.
    """

    def __init__(self, coordinator: str | None, count: int | None, index: int | None, cluster: str | None):
        """Waits until all processes have connected.

        JAX asks the cluster, see `find_cluster`, for the other arguments that are None. Raises a UserError if they are
        invalid, the port is in use, or JAX has started.
        """
        self.leaving, self.stopping, self._talks = False, False, 0
        self._resume: str | None = None  # the command that resumes the run in progress, on the first host
        self._service: subprocess.Popen[str] | None = None
        # JAX's runtime would report this by aborting.
        late = f"error: waited {MEETING_SECONDS:.0f} seconds in vain for the other processes"
        timer = threading.Timer(MEETING_SECONDS, leave, (2, late))
        timer.daemon = True
        timer.start()
        # JAX's own handler of SIGTERM would replace ours.
        jax.config.update("jax_enable_preemption_service", False)
        try:
            with clock.doing("waiting for the other processes"):
                distributed._jax.get_distributed_runtime_service = self._start_service
                jax.distributed.initialize(
                    coordinator,
                    count,
                    index,
                    gpus_of_task() if cluster == "slurm" else None,
                    cluster_detection_method=cluster or "deactivate",
                    initialization_timeout=int(2 * MEETING_SECONDS),
                )
                self._client: Any = distributed.global_state.client
                self.count, self.index = distributed.global_state.num_processes, distributed.global_state.process_id
                self._come()
        except (RuntimeError, ValueError) as error:
            self.tell_service()
            raise UserError(f"cannot train on several hosts: {first_line(error)}") from error
        finally:
            timer.cancel()
        if self.index:
            log.set_level(log.QUIET)  # the first process speaks for all
        atexit.register(self._exit)  # before JAX's own handler, which would wait for the others
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="hosts", daemon=True).start()

    def _come(self) -> None:
        """Meets the others for the first time.

        Raises a RuntimeError if two processes have the same number, or another number of processes.
        """
        try:
            self._client.key_value_set(f"fedjax_ssl/here/{self.index}", str(self.count))
        except RuntimeError as error:
            raise RuntimeError(
                f"two processes have --process_id={self.index}; or a run that was killed less than a minute ago still "
                f"holds {distributed.global_state.coordinator_address}"
            ) from error
        counts = self.meet(str(self.count))
        if len({*counts}) > 1:
            raise RuntimeError(f"the processes were started with --num_processes={' and '.join(sorted({*counts}))}")

    def meet(self, text: str = "") -> list[str]:
        """Waits for all processes; returns the text of each, by process number."""
        self._talks += 1
        here = f"{_TALK}{self._talks}/"
        self._client.key_value_set(f"{here}{self.index}", text)
        self._client.wait_at_barrier("fedjax_ssl", _FOREVER)
        said = dict(self._client.key_value_dir_get(here))
        # All processes have read the previous message, or they would not be here.
        self._client.key_value_delete(f"{_TALK}{self._talks - 1}/{self.index}")
        return [said[name] for name in sorted(said, key=lambda name: int(name.removeprefix(here)))]

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process ends because of an error of its own.

        If it is that another does not answer, the watching thread first finds out which, and ends this process.
        """
        told = isinstance(error, UserError | StoppedError)
        if not told and any(word in str(error) for word in _LOST_WORDS):
            time.sleep(SILENCE_SECONDS + 3 * BEAT_SECONDS)
        self.leaving = True
        kind = "stopped" if isinstance(error, StoppedError) else "error" if told else type(error).__name__
        ended = json.dumps([2 if isinstance(error, UserError) else 4, f"{kind}: {first_line(error)}"])
        with contextlib.suppress(Exception):  # the service may have gone
            self._client.key_value_set(f"{_WATCH}{self.index}/ended", ended, allow_overwrite=True)
        self.tell_service()

    def close(self) -> None:
        """Leaves together with the other processes."""
        self.leaving = True
        self._closed.set()
        jax.distributed.shutdown()

    def shutdown(self) -> None:
        """Called by JAX at its end, for the service."""
        self.tell_service()

    def tell_service(self) -> None:
        """Tells the service that the others know why this process ends."""
        if self._service is not None and not self._service.stdin.closed:
            with contextlib.suppress(OSError):
                self._service.stdin.write("told")
                self._service.stdin.close()

    def _exit(self) -> None:
        """Runs when the interpreter exits: a process that exits early must not wait for the others."""
        if not self._closed.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _watch(self) -> None:
        """Repeatedly reports that this process lives and checks the others."""
        beats = 0
        last: dict[int, str] = {}  # each host's beat
        quiet = dict.fromkeys(range(self.count), 0)  # own beats since it; a process that was suspended has none
        while not self._closed.wait(BEAT_SECONDS):
            beats += 1
            self._resume = resume_command() or self._resume  # an error about a lost host would clear it
            no_answer = f"stopped: host 0 has gone: no answer for {SILENCE_SECONDS:.0f} seconds"
            guard = threading.Timer(SILENCE_SECONDS, self._leave, (4, no_answer))
            guard.daemon = True
            guard.start()
            try:
                self._client.key_value_set(f"{_WATCH}{self.index}/beat", str(beats), allow_overwrite=True)
                said = dict(self._client.key_value_dir_get(_WATCH))
            except Exception:
                self._leave(4, "stopped: host 0 has gone, or the network")
                return
            finally:
                guard.cancel()
            for index in quiet:
                if f"{_WATCH}{index}/ended" in said:
                    status, why = json.loads(said[f"{_WATCH}{index}/ended"])
                    self._leave(status, f"host {index} has ended: {why}")
                beat = said.get(f"{_WATCH}{index}/beat", "")
                quiet[index] = quiet[index] + 1 if beat == last.get(index) else 0
                last[index] = beat
                if quiet[index] * BEAT_SECONDS > SILENCE_SECONDS:
                    self._leave(4, f"stopped: host {index} has gone: no word of it for {SILENCE_SECONDS:.0f} seconds")

    def _leave(self, status: int, text: str) -> None:
        if self.leaving or self._closed.is_set():
            return
        kept = f"; the last checkpoint is kept, and {self._resume} resumes from it" if self._resume else ""
        leave(status, text + kept)

    def _start_service(self, address: str, count: int, **_: Any) -> "HostLink":
        """Starts the coordination service in a process of its own, where JAX would start it in the first process."""
        port = int(address.rsplit(":", 1)[1])
        ends = time.monotonic() + PORT_SECONDS
        while True:
            try:  # without this check the service would share the port with another process
                socket.create_server(("", port)).close()
                break
            except (OSError, OverflowError) as error:
                if time.monotonic() > ends:
                    raise RuntimeError(f"process 0 cannot listen at port {port}: {error}") from error
                time.sleep(0.2)
        command = [sys.executable, "-P", str(pathlib.Path(__file__).with_name("service.py")), str(port), str(count)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._service = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
        said = self._service.stdout.readline().strip()
        if said != READY:
            raise RuntimeError(f"process 0 cannot listen at port {port}: {said}")
        return self
