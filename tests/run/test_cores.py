"""Cores as devices: how many, who decides, and how many a run uses. The number is fixed when JAX starts."""

import json
import os
import subprocess
import sys

import pytest

from fedjax_ssl.run.cores import PLAIN_LOOPS, SET_BY_USER, control_groups, usable_cores
from fedjax_ssl.run.machine import memory_limit
from tests.helpers.runs import ROOT

FOUR_CORES = "import os; from fedjax_ssl.run import cores; cores.usable_cores = lambda: 4\n"
START = f"""{FOUR_CORES}
import json
import jax
from fedjax_ssl import base_config, use_every_core
config = base_config()
config.clients_per_round, config.devices = CLIENTS, DEVICES
use_every_core(config)
use_every_core(config)  # a second time changes nothing
found = jax.device_count()
use_every_core(config)  # nor does it when JAX has started
print(json.dumps([found, "multi_thread_eigen=false" in os.environ.get("XLA_FLAGS", "")]))
"""
# How many devices a run uses in a process with four, and how many copies of its data there are.
TAKEN = """
import numpy as np
from fedjax_ssl.data.table import aligned, image_table
from fedjax_ssl.run import machine

def taken(clients, devices=None):
    config.clients_per_round, config.devices = clients, devices
    mesh = machine.find_machine(config).mesh
    return 1 if mesh is None else mesh.size

by_fields = [taken(10), taken(3), taken(1), taken(10, 2)]
with machine.use_machine(config) as two:
    parts = two.share(image_table(aligned(np.zeros((9, 8, 8, 3), np.uint8)))).addressable_shards
print(json.dumps([*by_fields, len(parts), len({part.data.unsafe_buffer_pointer() for part in parts})]))
"""
LATE = f"""{FOUR_CORES}
import jax
from fedjax_ssl import UserError, use_every_core
jax.devices()
try:
    use_every_core()
except UserError as error:
    print(error)
"""


def run_alone(script: str, **environment: str) -> list[str]:
    """What a Python process prints without the tests' own device settings."""
    kept = {name: value for name, value in os.environ.items() if name not in SET_BY_USER}
    kept |= {"PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=kept, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("limit", "cores"), [
    ("max 100000", 4), ("250000 100000", 3), ("50000 100000", 1), ("900000 100000", 4), ("?", 4), (None, 4),
])  # fmt: skip
def test_a_container_may_have_less_time_than_cores(tmp_path, monkeypatch, limit, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit + "\n")
    assert usable_cores([tmp_path]) == cores


@pytest.mark.parametrize(("limits", "expected"), [
    ({"memory.max": "4096000"}, 4096000),
    ({"memory.limit_in_bytes": "4096000"}, 4096000),
    ({"memory.limit_in_bytes": "9223372036854771712"}, None),  # cgroup v1's value for no limit
    ({"memory.max": "?"}, None),
    ({}, None),
])  # fmt: skip
def test_a_container_may_have_less_memory_than_the_machine(tmp_path, limits, expected):
    for name, limit in limits.items():
        (tmp_path / name).write_text(limit + "\n")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_limit([tmp_path]) == (physical if expected is None else expected)


@pytest.mark.parametrize(("own", "groups"), [
    ("0::/\n", [""]),  # a container
    ("0::/system.slice/job_7\n", ["system.slice/job_7", "system.slice", ""]),  # a batch system
    ("9:memory:/docker/c\n0::/\n", ["memory/docker/c", "memory/docker", "memory", ""]),  # cgroup v1
    (None, [""]),
])  # fmt: skip
def test_limits_of_all_groups_around_a_process_hold(tmp_path, own, groups):
    root = tmp_path / "cgroup"
    if own is not None:
        (tmp_path / "own").write_text(own)
    found = control_groups(root, tmp_path / "own")
    assert found == [root / group for group in groups]


def test_the_smallest_limit_of_the_groups_counts(tmp_path):
    inner = tmp_path / "job"
    inner.mkdir()
    (tmp_path / "cpu.max").write_text("max 100000")
    (inner / "cpu.max").write_text("100000 100000")
    assert usable_cores([inner, tmp_path]) == usable_cores([tmp_path, inner]) == 1
    for limits in (("4096000", "8192000"), ("8192000", "4096000")):
        for folder, limit in zip((inner, tmp_path), limits, strict=True):
            (folder / "memory.max").write_text(limit)
        assert memory_limit([inner, tmp_path]) == 4096000


@pytest.mark.parametrize(("clients", "devices", "environment", "expected"), [
    (2, None, {}, [4, False]),  # two clients: an operation may use the other cores
    (10, 1, {}, [1, False]),
    (10, None, {"JAX_NUM_CPU_DEVICES": "3"}, [3, False]),
    (10, None, {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, [2, False]),
])  # fmt: skip
@pytest.mark.test_all
def test_every_core_is_a_device_unless_somebody_has_decided(clients, devices, environment, expected):
    script = START.replace("CLIENTS", str(clients)).replace("DEVICES", str(devices))
    assert json.loads(run_alone(script, **environment)[0]) == expected


@pytest.mark.test_all
def test_a_run_takes_no_more_devices_than_it_has_clients_and_they_share_its_data():
    found, taken = run_alone(START.replace("CLIENTS", "10").replace("DEVICES", "None") + TAKEN)
    assert json.loads(found) == [4, True]
    assert json.loads(taken) == [4, 3, 1, 2, 2, 1]  # two devices read one copy of the data


@pytest.mark.parametrize(("given", "set_to"), [
    ("--xla_dump_to=x", f"--xla_dump_to=x {PLAIN_LOOPS} --xla_cpu_multi_thread_eigen=false"),
    # Options of this kind and decisions about devices that the user has made are kept.
    ("--xla_backend_extra_options=", "--xla_backend_extra_options= --xla_cpu_multi_thread_eigen=false"),
    ("--xla_cpu_multi_thread_eigen=true", f"--xla_cpu_multi_thread_eigen=true {PLAIN_LOOPS}"),
])  # fmt: skip
@pytest.mark.test_all
def test_options_of_xla_are_added_to_those_of_the_user(given, set_to):
    script = f"""{FOUR_CORES}
from fedjax_ssl import use_every_core
use_every_core()
use_every_core()
print(os.environ["XLA_FLAGS"])
"""
    assert run_alone(script, XLA_FLAGS=given) == [set_to]


@pytest.mark.test_all
def test_devices_are_fixed_when_jax_starts():
    (late,) = run_alone(LATE)
    assert late == "use_every_core comes too late: JAX has started; call it before anything is computed"


@pytest.mark.test_all
def test_the_command_line_says_how_many_devices_there_are(tmp_path):
    """A method by role: its second phase has a rate of its own, made of the run's numbers, which are traced."""
    fields = {
        "num_rounds": 1, "num_clients": 6, "clients_per_round": 2, "model.name": "linear",
        "client.unlabelled_learning_rate": 0.01, "log.report": False, "log.tensorboard": False,
    }  # fmt: skip
    words = [f"--config={ROOT / 'configs' / 'quickstart.py'}:fedavg_semi", f"--workdir={tmp_path / 'run'}"]
    words += [f"--config.{name}={value}" for name, value in fields.items()]
    script = f"""{FOUR_CORES}
import sys
from fedjax_ssl.cli.commands import main
sys.stderr = sys.stdout
print(main({words}))
"""
    lines = run_alone(script)
    assert "clients train on 2 devices (cpu)" in lines and lines[-1] == "0"
    assert (tmp_path / "run" / "summary.json").exists()
