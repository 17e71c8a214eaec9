"""Compilation: only whole programs are kept."""

import os

import jax
import numpy as np
import pytest

from fedjax_ssl.run.machine import remove_torn


@pytest.fixture
def jax_cache(tmp_path):
    """A folder in which JAX caches every program."""
    own = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: jax.config.values[name] for name in own}

    def use(settings):
        for name, value in settings.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()

    use(own)
    yield tmp_path
    use(before)


def test_programs_that_a_kill_has_cut_short_are_compiled_and_kept_again(jax_cache):
    """JAX cannot read such a file and does not replace it."""

    def compiled():
        jax.jit(lambda x: x * 3 + 1).lower(np.zeros(7)).compile()
        (entry,) = jax_cache.glob("*-cache")
        return entry

    remove_torn(jax_cache)
    entry = compiled()
    whole = entry.read_bytes()
    for kept in (whole[:-9], b""):
        entry.write_bytes(kept)
        with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
            assert compiled().read_bytes() == kept
        remove_torn(jax_cache)
        assert not entry.exists()
        assert len(compiled().read_bytes()) > len(whole) // 2
    remove_torn(jax_cache)
    assert entry.exists()
    entry.write_bytes(b"")
    os.utime(entry, (0, 0))  # older than the last check
    remove_torn(jax_cache)
    assert entry.exists()
