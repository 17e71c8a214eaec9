"""What the tests share: one cache of compiled programs, one tiny federation, one finished run."""

import os
import pathlib
import sys
from unittest import mock

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # launch.py


# The files that take longest, longest first: what is left for the end is short, and no worker waits for the other.
# The second file needs none of the programs that the first one compiles meanwhile, and from then on they are there.
FIRST_FILES = ("test_experiment", "test_fix_mix", "test_fedanchor", "test_clients", "test_augment_operations")


def pytest_collection_modifyitems(items):
    rank = {name: number for number, name in enumerate(FIRST_FILES)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))  # stable: the others keep their order


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Programs compiled once serve all tests, all workers and the processes that tests start.

    Small programs are kept too: a process meets hundreds of them. The user's own cache stays untouched.
    """
    import jax

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the one above the workers' own
    settings = {"jax_compilation_cache_dir": str(folder / "xla"), "jax_persistent_cache_min_compile_time_secs": 0.0}
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def root():
    return ROOT


TINY_BACKBONE = f"{ROOT / 'tests' / 'tiny_backbone.py'}:TinyBackbone"


def make_tiny_config(**overrides):
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


@pytest.fixture
def tiny_config():
    return make_tiny_config()


@pytest.fixture(scope="session")
def tiny_experiment():
    """A built experiment and its state before the first round; tests must not donate the state."""
    import jax

    from fedjax_ssl.run.experiment import build_experiment, initialise

    experiment = build_experiment(make_tiny_config())
    return experiment, jax.jit(lambda data: initialise(experiment, data))(experiment.data)


@pytest.fixture(scope="session")
def choosy_experiment(tiny_experiment):
    """The same with a threshold at which some examples of each client qualify and some do not."""
    from fedjax_ssl.run.experiment import build_experiment

    return build_experiment(make_tiny_config(**{"fedanchor.threshold": 0.7})), tiny_experiment[1]


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """(workdir, state) of a run that nobody interrupted."""
    from fedjax_ssl import train

    workdir = tmp_path_factory.mktemp("finished") / "run"
    return workdir, train(make_tiny_config(), workdir)


@pytest.fixture
def registry():
    """Methods that a test registers are forgotten after it."""
    from fedjax_ssl import methods

    with mock.patch.dict(methods.METHODS):
        yield
