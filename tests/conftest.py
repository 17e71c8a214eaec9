"""What the tests share: one cache of compiled programs, one tiny federation, one finished run."""

import gc
import pathlib
import shutil
from unittest import mock

import pytest

from tests.helpers.compile_budget import Budget, CompileBudget
from tests.helpers.compiling import use_fast_compiling_and_cache
from tests.helpers.runs import ROOT, SMALL, make_fedanchor_config, make_tiny_config

# What a session may compile that finds nothing in the cache: for all methods together (with Flower, on several hosts,
# with Byzantine clients 69 large programs, of lanes packed into channels 28, of encoders, kinds of inputs, residences,
# personal models and the notebook for accelerators 54), and for each of them. It is a little
# above what there is: who adds a test that compiles reuses programs of others, or raises it for a reason.
BASE, FOR_EACH_METHOD = Budget(large=334, small=4480), Budget(large=7, small=60)

# Files whose tests go to the workers one by one, for many of them start processes that take seconds; of the others a
# worker gets whole files, whose tests share fixtures. pytest-xdist 3.8 reads no `xdist_group` under pytest 9.2.
ONE_BY_ONE = ("flower/test_federation", "flower/test_processes", "run/test_experiment", "tests/test_notebooks")


def is_one_by_one(file: pathlib.Path) -> bool:
    return file.with_suffix("").as_posix().endswith(ONE_BY_ONE)


def pytest_collection_modifyitems(config, items):
    """Leaves out slow tests, of official code and of accelerators, unless their folder is asked for; sorts.

    Files of `ONE_BY_ONE` come last: they find their programs in the cache, and no worker waits long for the other.
    """
    if not any(folder in argument for folder in ("official", "accelerators") for argument in config.args):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    items.sort(key=lambda item: is_one_by_one(item.path))  # stable


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class FilesAndSingleTests(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return nodeid if is_one_by_one(ROOT / file) else file

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
    from fedjax_ssl.run import programs
    from fedjax_ssl.sweep import work

    with mock.patch.object(programs, "give_back_memory"), mock.patch.object(work, "give_back_memory"):
        yield


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="module")
def quick_runs():
    """For files that are about neither programs nor t-SNE: runs take programs of earlier ones, a report draws two
    coordinates of its embeddings.
    """
    from fedjax_ssl.report import run_report
    from tests.helpers.kept_programs import keep_programs

    with keep_programs(), mock.patch.object(run_report, "to_plane", lambda embeddings: embeddings[:, :2]):
        yield


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """(workdir, state) of the tiny run that nobody interrupted."""
    from fedjax_ssl import train
    from tests.helpers.kept_programs import keep_programs

    workdir = tmp_path_factory.mktemp("finished") / "run"
    with keep_programs():
        return workdir, train(make_tiny_config(), workdir)


@pytest.fixture(scope="session")
def finished_fedanchor_run(tmp_path_factory):
    """The same of FedAnchor, whose records have all that a method can report."""
    from fedjax_ssl import train
    from tests.helpers.kept_programs import keep_programs

    workdir = tmp_path_factory.mktemp("finished_fedanchor") / "run"
    with keep_programs():
        return workdir, train(make_fedanchor_config(**SMALL), workdir)


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
