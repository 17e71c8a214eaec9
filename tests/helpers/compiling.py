"""How the tests compile: XLA's flags, and a cache of compiled programs."""

import hashlib
import importlib.metadata
import os
import pathlib
import subprocess
import sys

from tests.helpers.runs import ROOT

# Most of the tests' time is compiling. Without LLVM's optimisation, and with XLA's plain code instead of its MLIR
# emitters for fused operations, a round of FedAnchor compiles in 2.9 s of CPU time instead of 13, with the same numbers
# up to rounding. Level 0 alone takes 5.8 s. The third flag is the command line's own (`PLAIN_LOOPS`), so its processes
# find the same programs in the cache. The last, one LLVM module for a whole program instead of 32, saves an eighth. JAX
# 0.12 no longer has the second flag.
FAST_COMPILING = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling",
    "--xla_cpu_parallel_codegen_split_count=1",
)
CACHE = ROOT / ".pytest_cache"


def use_fast_compiling_and_cache() -> pathlib.Path:
    """Sets XLA's flags and JAX's cache for this process and its children; returns the cache's folder.

    The cache outlives the session and includes small programs, of which a process uses hundreds. It is not the user's.
    """
    given = os.environ.get("FEDJAX_SSL_TESTS_CACHE")  # set by the parent process
    if given is None:
        own = os.environ.get("XLA_FLAGS", "")
        flags = " ".join([*FAST_COMPILING, own]).strip()
        if not _folder(flags).exists():
            flags = " ".join([*filter(_is_known, FAST_COMPILING), own]).strip()
        given = _folder(flags)
        given.mkdir(parents=True, exist_ok=True)
        os.environ["XLA_FLAGS"] = flags
        os.environ["FEDJAX_SSL_TESTS_CACHE"] = str(given)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(given)
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        # By default the command line gives a run every core, and so a different program on each machine.
        os.environ["JAX_NUM_CPU_DEVICES"] = "1"
    return pathlib.Path(given)


def _folder(flags: str) -> pathlib.Path:
    digest = hashlib.sha256(flags.encode()).hexdigest()[:8]
    return CACHE / f"xla-{importlib.metadata.version('jax')}-{digest}"


def _is_known(flag: str) -> bool:
    """Whether this XLA knows a flag; an unknown flag ends the process."""
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(command, env={**os.environ, "XLA_FLAGS": flag}, capture_output=True).returncode == 0
