"""A pytest plugin that lists what each test file compiled, and fails a session that compiled too much.

Compiling takes nearly all the time of the tests, so the number of large programs must stay small. Events of
`jax.monitoring` tell compiled programs from those in the persistent cache. The size of a new cache entry tells large
programs from the hundreds of single operations. Sizes and counts depend on no clock.
"""

import collections
import importlib.metadata
import os
import pathlib
import threading
from typing import NamedTuple

import pytest

LARGE = 32 * 1024  # bytes of a compiled program in the cache; a round has 200 to 1,000 kB, `jnp.add` 4
SOON = 0.02  # seconds; faster compiled programs count as small: looking up every size took half a minute
HIT = "/jax/compilation_cache/cache_hits"
COMPILED = "/jax/core/compile/backend_compile_duration"  # also of programs in the cache
OUTSIDE = "processes of tests"
COUNTED_WITH = "0.10."  # the version of JAX for which the budget holds; others cut programs differently


class Budget(NamedTuple):
    """The most programs that a session, including processes of its tests, may compile."""

    large: int
    small: int


class Compiled(NamedTuple):
    """A program that was not in the cache."""

    name: str
    seconds: float
    size: int  # bytes of its cache entry; 0 without one, or if compiled too fast to be large


class CompileBudget:
    """Counts the programs compiled in this process, its workers and the processes that tests start.

    Args:
        cache: folder of the persistent cache.
        budget: programs allowed in a session.
    """

    def __init__(self, cache: pathlib.Path, budget: Budget):
        self.cache, self.budget = cache, budget
        self.before = self.entries()
        self.seen = set(self.before)
        self.compiled: dict[str, list[Compiled]] = collections.defaultdict(list)  # by test file
        self.hits: collections.Counter[str] = collections.Counter()
        self.file = "before the tests"
        self.local = threading.local()  # programs are compiled in several threads
        self.lock = threading.Lock()

    def entries(self) -> dict[str, int]:
        """Name -> bytes of the cache's entries."""
        with os.scandir(self.cache) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith("-cache")}

    def listen(self) -> None:
        import jax

        jax.monitoring.register_event_listener(self.on_event)
        jax.monitoring.register_event_duration_secs_listener(self.on_duration)

    def on_event(self, event: str, **_) -> None:
        if event == HIT:
            self.local.hit = True

    def on_duration(self, event: str, seconds: float, fun_name: str = "", **_) -> None:
        if event != COMPILED:
            return
        hit, self.local.hit = getattr(self.local, "hit", False), False
        with self.lock:
            if hit:
                self.hits[self.file] += 1
            else:
                size = 0 if seconds < SOON else self.size_of_new(fun_name)
                self.compiled[self.file].append(Compiled(fun_name, seconds, size))

    def size_of_new(self, fun_name: str) -> int:
        """Bytes of the newest cache entry for a program's name: 'jit(f)' makes jit_f-HASH-cache."""
        prefix = "".join(c if c.isalnum() else "_" for c in fun_name).strip("_") + "-"
        names = [name for name in os.listdir(self.cache) if name.startswith(prefix) and name not in self.seen]
        self.seen.update(names)
        return max(((self.cache / name).stat().st_size for name in names), default=0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.file = nodeid.partition("::")[0]

    def pytest_testnodedown(self, node) -> None:
        """Takes over what a worker compiled, when it ends."""
        compiled, hits = getattr(node, "workeroutput", {}).get("compiled", ({}, {}))
        for file, programs in compiled.items():
            self.compiled[file] += [Compiled(*program) for program in programs]
        self.hits.update(hits)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            compiled = {file: [tuple(program) for program in own] for file, own in self.compiled.items()}
            output["compiled"] = compiled, dict(self.hits)
            return
        seen = collections.Counter(program.size for own in self.compiled.values() for program in own)
        for name, size in ((name, size) for name, size in self.new().items() if size > LARGE):
            seen[size] -= 1
            if seen[size] < 0:
                self.compiled[OUTSIDE].append(Compiled(name.rpartition("-")[0].rpartition("-")[0], 0.0, size))
        if self.over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def new(self) -> dict[str, int]:
        """Name -> bytes of the cache entries that the session's processes added."""
        return {name: size for name, size in self.entries().items() if name not in self.before}

    def counts(self) -> tuple[int, int]:
        """(large, small) programs compiled; one compiled by two processes at once counts once."""
        sizes = self.new().values()
        large = sum(size > LARGE for size in sizes)
        return large, len(sizes) - large

    def over(self) -> bool:
        """Whether more was compiled than the budget allows; it holds for one version of JAX."""
        if not importlib.metadata.version("jax").startswith(COUNTED_WITH):
            return False
        return any(number > most for number, most in zip(self.counts(), self.budget))

    def pytest_terminal_summary(self, terminalreporter) -> None:
        large, small = self.counts()
        over = self.over()
        word = "more programs than the budget allows" if over else "compiled programs"
        most = self.budget
        terminalreporter.section(f"{word}: {large} large (at most {most.large}), {small} small ({most.small})")
        rows = [
            (sum(p.seconds for p in own), file, [p for p in own if p.size > LARGE], len(own), self.hits[file])
            for file, own in ((file, self.compiled.get(file, [])) for file in {*self.compiled, *self.hits})
        ]
        rows.sort(key=lambda row: row[:2], reverse=True)
        for seconds, file, programs, number, hits in rows if over else rows[:10]:
            names = collections.Counter(program.name for program in programs)
            listed = ", ".join(f"{count} {name}" for name, count in names.most_common()) if over else ""
            few = number - len(programs)
            terminalreporter.write_line(
                f"{seconds:6.1f} s {len(programs):3} large {few:4} small {hits:4} cached  {file} {listed}".rstrip()
            )
