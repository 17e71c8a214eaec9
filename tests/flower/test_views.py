"""The bridge to Flower with many clients, one very large: neither side holds a table of all clients' rows."""

import json
import subprocess
import sys

import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.federated import table_width
from fedjax_ssl.flower.settings import run_config
from fedjax_ssl.flower.views import node_holdings, outline, server_view
from tests.helpers.flower_run import needs_flower, settings
from tests.helpers.runs import ROOT

CLIENTS, LARGEST, LABELS = 20_000, 20_000, 20  # as int32, a table of all clients would take 1.6 GB


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run's config: one image per client, but many for client 7; image i has i in its first two bytes."""
    folder = tmp_path_factory.mktemp("data")
    number = LABELS + CLIENTS - 1 + LARGEST
    images = np.zeros((number, 2, 2, 1), np.uint8)
    images.reshape(number, 4)[:, 0], images.reshape(number, 4)[:, 1] = np.arange(number) % 256, np.arange(number) // 256
    labels = np.arange(number) % 10
    for name, array in {"x_train": images, "y_train": labels, "x_test": images[:50], "y_test": labels[:50]}.items():
        np.save(folder / f"{name}.npy", array)
    sizes = np.ones(CLIENTS, int)
    sizes[7] = LARGEST
    rows = np.random.default_rng(0).permutation(number)
    np.savez(folder / "owners.npz", server_index=rows[:LABELS], client_size=sizes, client_index=rows[LABELS:])
    fields = {"data.source": "npy", "data.path": folder, "data.partition_file": folder / "owners.npz"}
    return settings("fixmatch", **fields, num_clients=CLIENTS, **{"data.examples_per_client": 0, "augment.padding": 0})


def number_of(images):
    """The number i in each image."""
    flat = np.asarray(images).reshape(len(images), 4).astype(int)
    return flat[:, 0] + 256 * flat[:, 1]


def test_each_side_holds_its_own_rows_alone(run):
    config = run_config(run)
    experiment = outline(config)
    rows = experiment.partition.client_rows
    told = np.array([len(own) for own in rows])
    view, labels = server_view(experiment, told, np.zeros(CLIENTS))
    np.testing.assert_array_equal(number_of(view.inputs), experiment.partition.server_index)
    np.testing.assert_array_equal(labels, experiment.partition.server_index % 10)
    np.testing.assert_array_equal(view.client_size, told)
    assert view.client_index.size == 1 and len(view.test_inputs) == 50 and CLIENTS not in view.client_index.shape

    held, _ = node_holdings(config, (19_000, 7, 3))
    assert held.largest_size == LARGEST and held.width == table_width(told)
    assert len(held.inputs) == 1 + 2 + LARGEST  # row 0 is unused
    assert held.sizes.sum() == held.sizes[[3, 7, 19_000]].sum() == 2 + LARGEST
    for client in (3, 7, 19_000):
        np.testing.assert_array_equal(number_of(held.inputs[held.rows_of(client)]), rows[client])


ROUND = """
import json, resource, sys
import jax
from fedjax_ssl.flower.server import Server
from fedjax_ssl.flower.roster import Roster
from fedjax_ssl.flower.settings import digest, run_config
from fedjax_ssl.flower.supported import check_supported
from fedjax_ssl.flower.views import facts_text, outline
from tests.helpers.flower_by_hand import GridByHand

run = json.loads(sys.argv[1])
jax.numpy.zeros(1).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
config = run_config(run)
experiment = outline(config)
check_supported(experiment)
clients = range(config.num_clients)
grid = GridByHand(run, [{"clients": ",".join(map(str, part))} for part in (clients[:10_000], clients[10_000:])])
roster = Roster(grid, config.num_clients, digest(config), facts_text(experiment), 0.0, 600.0)
roster.wait_for_all()
server = Server(experiment, roster)
state, metrics, healthy = server.round(server.first_state())
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([int(metrics["uploads"]), healthy, (after - before) / 1024]))
"""


@needs_flower
@pytest.mark.test_all
def test_a_round_of_many_clients_needs_little_memory(run):
    done = subprocess.run([sys.executable, "-c", ROUND, json.dumps(run)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    uploads, healthy, mebibytes = json.loads(done.stdout.splitlines()[-1])
    assert uploads == 2 and healthy
    assert mebibytes < 800  # half of the table's size


def test_a_partition_that_does_not_fit_is_one_line(run):
    config = run_config(run)
    config.num_clients = CLIENTS + 1
    for opened in (outline, lambda config: node_holdings(config, (0,))):
        with pytest.raises(UserError, match="clients") as caught:
            opened(config)
        assert "\n" not in str(caught.value)
