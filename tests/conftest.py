"""What the tests share: a cache of compiled programs, a tiny federation and finished runs."""

import contextlib
import gc
import json
import pathlib
import shutil
from unittest import mock

import pytest

from tests.helpers.compile_budget import Budget, CompileBudget
from tests.helpers.compiling import use_fast_compiling_and_cache
from tests.helpers.runs import ROOT, SMALL, make_fedanchor_config, make_tiny_config

# The most programs that a session with an empty cache may compile, see tests/test_size.py. New tests should reuse
# programs, or raise the numbers for a reason.
BUDGET = Budget(**json.loads((ROOT / "tests" / "size.json").read_text())["programs"])

# Files whose tests go to workers one by one, because many start processes that take seconds. Other files go to a worker
# whole, because their tests share fixtures. pytest-xdist 3.8 ignores `xdist_group` under pytest 9.2.
ONE_BY_ONE = ("flower/test_federation", "flower/test_processes", "run/test_experiment", "tests/test_notebooks")


def is_one_by_one(file: pathlib.Path) -> bool:
    return file.with_suffix("").as_posix().endswith(ONE_BY_ONE)


def pytest_ignore_collect(collection_path, config):
    """`make test` does not import files of which it runs nothing: PyTorch alone takes eight seconds."""
    if config.getoption("markexpr") == "not test_all" and collection_path.suffix == ".py":
        return "\npytestmark = pytest.mark.test_all" in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(config, items):
    """Leaves out slow tests (official code, accelerators) unless their folder is named; sorts the rest.

    Files in `ONE_BY_ONE` come last: their programs are then in the cache, and workers finish at about the same time.
    """
    if not any(folder in argument for folder in ("official", "accelerators") for argument in config.args):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    items.sort(key=lambda item: is_one_by_one(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class FilesAndSingleTests(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return nodeid if is_one_by_one(ROOT / file) else file

    return FilesAndSingleTests(config, log)


def pytest_collection_finish(session):
    """Excludes everything imported so far from garbage collection, which then runs as rarely as in the program."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_configure(config):
    cache = use_fast_compiling_and_cache()
    budget = CompileBudget(cache, BUDGET)
    config.pluginmanager.register(budget)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        budget.listen()  # the process that only hands out tests needs no JAX


@pytest.fixture(scope="session", autouse=True)
def no_clock():
    """Hides lines about slow steps, which a busy machine would add to compared output."""
    from fedjax_ssl.run.observe import clock

    with mock.patch.object(clock, "FIRST_LINE_SECONDS", 3600.0):
        yield


@pytest.fixture(scope="session", autouse=True)
def no_memory_given_back():
    """Skips the garbage collection after each compilation, which takes half a second among tests; keeps programs."""
    from fedjax_ssl.run import programs
    from fedjax_ssl.sweep import work

    quiet = mock.patch.object(programs, "give_back_memory"), mock.patch.object(work, "give_back_memory")
    with quiet[0], quiet[1], mock.patch.object(programs, "MOST_KEPT", 32):
        yield


@pytest.fixture(scope="module", autouse=True)
def no_imported_files():
    """Forgets users' files that a module's tests imported: each configuration would read all of them once more."""
    from fedjax_ssl.base import imports

    yield
    for file in [file for file in imports._FILES if ROOT not in file.parents]:
        del imports._FILES[file]


@pytest.fixture(scope="module", autouse=True)
def no_pictures(request):
    """Saves empty pictures, except in tests/report, and lays embeddings out without t-SNE: most of a report's time."""
    from matplotlib.figure import Figure

    from fedjax_ssl.report import figures

    def save(figure, file, format, **_):
        file.write('<svg viewBox="0 0 1 1"><g id="1"/></svg>' if format == "svg" else b"")

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(figures, "to_plane", lambda embeddings: embeddings[:, :2]))
        if request.path.parent.name != "report":
            stack.enter_context(mock.patch.object(Figure, "savefig", save))
            stack.enter_context(mock.patch.object(Figure, "draw_without_rendering"))
        yield


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def stub_run(tmp_path_factory):
    """(workdir, state) of a finished run of the stub method, for tests that need a run's folder but no training."""
    from fedjax_ssl import train
    from tests.helpers.stub import make_stub_config

    workdir = tmp_path_factory.mktemp("stub") / "run"
    return workdir, train(make_stub_config(), workdir)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """(workdir, state) of an uninterrupted tiny run."""
    from fedjax_ssl import train

    workdir = tmp_path_factory.mktemp("finished") / "run"
    return workdir, train(make_tiny_config(), workdir)


@pytest.fixture(scope="session")
def finished_fedanchor_run(tmp_path_factory):
    """(workdir, state) of a FedAnchor run, whose records have all that a method can report."""
    from fedjax_ssl import train

    workdir = tmp_path_factory.mktemp("finished_fedanchor") / "run"
    return workdir, train(make_fedanchor_config(**SMALL), workdir)


@pytest.fixture
def registry():
    """Finally removes the methods that a test registers."""
    from fedjax_ssl import methods

    with mock.patch.dict(methods.METHODS):
        yield


@pytest.fixture
def started():
    """A list of the processes that a test starts, which are finally killed."""
    processes = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


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
