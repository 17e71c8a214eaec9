"""The files of the cache: one that is damaged or another's is not used, and made again with a line."""

import os
import subprocess
import sys

# Two programs of equal shapes; their files are exchanged.
PROCESS = """
import jax
import jax.numpy as jnp
from fedjax_ssl.base.files import cache_folder
from fedjax_ssl.run.machine import use_compilation_cache
use_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
def one(x): return jnp.sin(x)
def two(x): return jnp.cos(x)
def results():
    jax.clear_caches()
    return [float(jax.jit(function)(jnp.float32(1))) for function in (one, two)]
before = results()
files = [next((cache_folder() / "xla").glob(f"jit_{name}-*")) for name in ("one", "two")]
for file, content in zip(files, [file.read_bytes() for file in reversed(files)]):
    file.write_bytes(content)
print(results() == before)
"""


def test_exchanged_programs_are_compiled_again(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "True\n", done.stderr
    for name in ("one", "two"):
        assert f"jit_{name}-" in done.stderr
    assert done.stderr.count("is not what was written; the program is compiled again") == 2
