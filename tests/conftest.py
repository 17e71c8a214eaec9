"""What the tests share: one cache of compiled programs, one tiny federation, one finished run."""

import gc
import hashlib
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
from unittest import mock

import pytest

from compile_budget import Budget, CompileBudget

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # launch.py

# Most of the tests' time is compiling. Without LLVM's optimisation, and with XLA's plain code for fused operations in
# place of its MLIR emitters, a round of FedAnchor compiles in 2.9 s of CPU time instead of 13, and gives the same
# numbers but for rounding. Level 0 alone takes 5.8 s.
# The third is the command line's own (`PLAIN_LOOPS`): its processes find the same programs in the cache.
FAST_COMPILING = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling"
)
CACHE = ROOT / ".pytest_cache"


def use_fast_compiling_and_cache() -> pathlib.Path:
    """Sets XLA's flags and JAX's cache for this process and all that it starts; returns the cache's folder.

    The cache outlives the session. Small programs are cached too: a process meets hundreds of them. The user's own
    cache stays untouched.
    """
    given = os.environ.get("FEDJAX_SSL_TESTS_CACHE")  # by the process that started this one
    if given is None:
        flags = f"{FAST_COMPILING} {os.environ.get('XLA_FLAGS', '')}".strip()
        given = _folder(flags)
        if not given.exists() and not _are_known(flags):
            flags = os.environ.get("XLA_FLAGS", "")
            given = _folder(flags)
        given.mkdir(parents=True, exist_ok=True)
        os.environ["XLA_FLAGS"] = flags
        os.environ["FEDJAX_SSL_TESTS_CACHE"] = str(given)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(given)
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        # The command line would give a run every core, and on each machine another program.
        os.environ["JAX_NUM_CPU_DEVICES"] = "1"
    return pathlib.Path(given)


def _folder(flags: str) -> pathlib.Path:
    digest = hashlib.sha256(flags.encode()).hexdigest()[:8]
    return CACHE / f"xla-{importlib.metadata.version('jax')}-{digest}"


def _are_known(flags: str) -> bool:
    """Whether this XLA takes the flags: with one that it does not know it ends the process."""
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True).returncode == 0


# What a session may compile that finds nothing in the cache: for all methods together (of which with Flower, on several
# hosts and by clients that nobody trusts 65 large programs), and for each of them.
BASE, FOR_EACH_METHOD = Budget(large=215, small=3450), Budget(large=7, small=60)

# Files whose tests go to the workers one by one, for many of them start processes that take seconds; of the others a
# worker gets whole files, whose tests share fixtures. pytest-xdist 3.8 reads no `xdist_group` under pytest 9.2.
ONE_BY_ONE = ("test_experiment", "test_flower", "test_flower_processes", "test_notebooks")


def pytest_collection_modifyitems(config, items):
    """Leaves out slow comparisons with official code, unless they are asked for; sorts.

    Files of `ONE_BY_ONE` come last: they find their programs in the cache, and no worker waits long for the other.
    """
    if not any("official" in argument for argument in config.args):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    items.sort(key=lambda item: item.path.stem in ONE_BY_ONE)  # stable


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class FilesAndSingleTests(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return nodeid if pathlib.PurePath(file).stem in ONE_BY_ONE else file

    return FilesAndSingleTests(config, log)


def pytest_collection_finish(session):
    """What is imported by now stays: the search for garbage leaves it out, and comes as rarely as in the program."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_configure(config):
    cache = use_fast_compiling_and_cache()
    budget = CompileBudget(cache, base=BASE, for_each_method=FOR_EACH_METHOD)
    config.pluginmanager.register(budget)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        budget.listen()  # the process that only hands tests out needs no JAX


@pytest.fixture(scope="session", autouse=True)
def no_clock():
    """No lines from things that take long on a busy machine among those that tests compare."""
    from fedjax_ssl.run.observe import clock

    with mock.patch.object(clock, "FIRST_LINE_SECONDS", float("inf")):
        yield


@pytest.fixture(scope="session", autouse=True)
def no_memory_given_back():
    """After each compilation the program looks for all garbage, which takes half a second with what tests hold."""
    from fedjax_ssl import sweep
    from fedjax_ssl.run import programs

    with mock.patch.object(programs, "give_back_memory"), mock.patch.object(sweep, "give_back_memory"):
        yield


@pytest.fixture(scope="session")
def root():
    return ROOT


TINY_BACKBONE = f"{ROOT / 'tests' / 'tiny_backbone.py'}:TinyBackbone"


def make_fedanchor_config(**overrides):
    """FedAnchor on 8x8 digits with a few clients: a round takes well under a second."""
    from fedjax_ssl import base_config

    config = base_config()
    config.num_rounds = 4
    config.num_clients = 8
    config.clients_per_round = 4
    config.checkpoint_every = 2
    config.data.source = "digits"
    config.data.num_anchors = 40
    config.data.examples_per_client = 33
    config.model.name = "cnn"
    config.augment.padding = 1
    config.augment.num_ops = 1
    config.client.epochs = 2
    config.server.pretrain_epochs = 2
    config.model.normalisation = "static"  # running averages need more steps than a tiny run has
    config.server.augmentation = "weak"
    config.fedanchor.threshold = 0.5
    config.log.report = False  # pictures take longer than such a run
    config.update_from_flattened_dict(overrides)
    return config


# What makes a program small without changing what it is about: no RandAugment, one hidden layer. The crop stays, for
# without it the random keys of single steps would change nothing.
SMALL = {"augment.flavour": "none", "model.name": TINY_BACKBONE}


def make_tiny_config(**overrides):
    """The cheapest run in which clients and server train, for tests that care for no method: FedAvg, all labels."""
    return make_fedanchor_config(**{**SMALL, "method": "supervised", "data.reveal_labels": True, **overrides})


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """(workdir, state) of the tiny run that nobody interrupted."""
    from fedjax_ssl import train

    workdir = tmp_path_factory.mktemp("finished") / "run"
    return workdir, train(make_tiny_config(), workdir)


@pytest.fixture(scope="session")
def finished_fedanchor_run(tmp_path_factory):
    """The same of FedAnchor, whose records have all that a method can report."""
    from fedjax_ssl import train

    workdir = tmp_path_factory.mktemp("finished_fedanchor") / "run"
    return workdir, train(make_fedanchor_config(**SMALL), workdir)


def forget_manifests(run):
    """Makes of a run one of an earlier version, whose checkpoints do not say what they were trained with."""
    from fedjax_ssl.records.manifest import MANIFEST

    for sums in (run / "checkpoints").glob("*/SHA256SUMS"):
        (sums.parent / MANIFEST).unlink()
        lines = sums.read_text().splitlines(keepends=True)
        sums.write_text("".join(line for line in lines if MANIFEST not in line))


@pytest.fixture
def registry():
    """Methods that a test registers are forgotten after it."""
    from fedjax_ssl import methods

    with mock.patch.dict(methods.METHODS):
        yield


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium, driven by Playwright."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no browser on this machine: install Debian's package chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync"]  # fmt: skip
        started = driver.chromium.launch(executable_path=path, args=quiet)
        yield started
        started.close()
