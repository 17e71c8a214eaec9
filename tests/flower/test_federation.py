"""The bridge to Flower: a federation of nodes trains the same model as the simulation.

A grid in this process passes messages on as bytes. tests/flower/test_processes.py uses Flower's own processes.
"""

import functools

import chex
import jax
import numpy as np
import pytest

from fedjax_ssl.base.errors import TrainingError
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.flower.settings import digest, run_config
from fedjax_ssl.flower.supported import asks_for_labels, check_supported
from fedjax_ssl.ops.trees import tree_bytes
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.observe.summary import to_record
from fedjax_ssl.run.wire import bytes_per_client
from tests.helpers.flower_run import needs_flower, settings
from tests.helpers.tiny_methods import compiled

pytestmark = [needs_flower, pytest.mark.test_all]


class ByHand:
    """A run with nodes in this process, and the simulation of the same run."""

    def __init__(self, run, nodes):
        from fedjax_ssl.flower.roster import Roster
        from fedjax_ssl.flower.server import Server
        from fedjax_ssl.flower.views import facts_text, outline
        from tests.helpers.flower_by_hand import GridByHand

        config = run_config(run)
        self.experiment, experiment = build_experiment(config), outline(config)
        check_supported(experiment)
        self.grid = GridByHand(run, nodes)
        num_classes = experiment.problem.num_classes if asks_for_labels(experiment) else 0
        known = config.num_clients, digest(config), facts_text(experiment)
        self.roster = Roster(self.grid, *known, 0.0, 60.0, num_classes)
        self.roster.wait_for_all()
        self.server = Server(experiment, self.roster)
        self.state = self.server.first_state()
        self.traffic = bytes_per_client(experiment.problem, experiment.method, experiment.state_shape, experiment.data)

    @functools.cached_property
    def simulated(self):
        """The simulation's state after the rounds of `both_rounds`."""
        experiment, data = self.experiment, self.experiment.data
        return compiled(experiment.init, data)(data)

    @functools.cached_property
    def _simulated_round(self):
        arguments = self.simulated, self.experiment.data, self.experiment.hidden_labels
        return compiled(make_round(self.experiment.problem, self.experiment.method, 1), *arguments)

    def round(self):
        """Runs a round of the nodes; returns its line of metrics.jsonl."""
        from fedjax_ssl.flower.records import COUNTED

        self.state, metrics, self.healthy = self.server.round(self.state)
        return to_record(metrics, COUNTED)

    def both_rounds(self):
        """Runs a round of the nodes and of the simulation; returns both lines."""
        line, experiment = self.round(), self.experiment
        self.simulated, result = self._simulated_round(self.simulated, experiment.data, experiment.hidden_labels)
        assert self.healthy == bool(result.healthy)
        simulated = to_record(jax.device_get(result).measured(), self.traffic)
        assert ("test_accuracy" in line) == ("test_accuracy" in simulated)
        for name, value in simulated.items():
            # No node tells which of its labels are right; a node of several clients is sent less.
            if not name.startswith(("pseudo_label", "qualified", "score_gap", "bytes")):
                np.testing.assert_allclose(line[name], value, rtol=1e-4, atol=1e-4, err_msg=name)
        return line, simulated

    def assert_equal(self):
        assert self.state.clients == {}  # the server holds no clients' memory
        mine = self.simulated._replace(clients={})
        chex.assert_trees_all_close(self.state, mine, atol=1e-4)


def test_turns_memory_and_the_exchange_of_statistics():
    """RSCFed: a client may be in two turns of a round; its second turn begins with the memory that the first left.

    If no answer of one turn comes, the round goes on with those of the other.
    """
    run = settings(
        "rscfed", **{"rscfed.groups": 2, "rscfed.group_size": 2, "num_clients": 5, "data.labels": "some_clients",
                     "data.labelled_clients": 1, "model.statistics": "cohort", "data.server_labels": 0},
    )  # fmt: skip
    both = ByHand(run, [{"partition-id": 0}, {"clients": "1,2,3,4"}])
    both.assert_equal()  # the first model's statistics come from all clients
    rows, finish = [], both.server._finish
    both.server._finish = lambda *of: rows.append(len(of[-1].count)) or finish(*of)
    for _ in range(2):
        both.both_rounds()
        both.assert_equal()
    assert rows == [4, 4]  # the sums of the round's jobs, however many clients the federation has
    assert both.experiment.state_shape.clients  # the method has clients' memory
    both.grid.lost = {101}  # in this round the second turn has clients 1 and 2
    assert both.round()["uploads"] == 1 and both.healthy


def test_a_memory_waits_for_the_word_of_the_server():
    """IsoFed: some clients hear nothing for a round. What they learned the round before counts once they are asked.

    Each node has one client that takes part, so that bytes equal the simulation's, too.
    """
    run = settings("isofed", **{"num_clients": 4, "clients_per_round": 4, "data.labels": "some_clients",
                   "data.labelled_clients": 2, "confidence.threshold": 0.2, "data.server_labels": 0,
                   "model.statistics": "all", "eval_every": 3, "num_rounds": 3})  # fmt: skip
    both = ByHand(run, [{"clients": "0,1"}, {"clients": "2,3"}])
    for number in range(3):
        line, simulated = both.both_rounds()
        both.assert_equal()
        assert line["uploads"] < 4 and ("test_accuracy" in line) == (number != 1)
        for name in ("bytes_down", "bytes_up"):
            assert line[name] == simulated[name], name


def test_records_of_each_client():
    """FedMatch: the server has a record of each client, and draws each client's helpers from the others' records."""
    run = settings("fedmatch", **{"num_clients": 3, "clients_per_round": 3, "client.persistent": False,
                   "fedmatch.helper_interval": 1, "fedmatch.sparse_down": False,
                   "aggregation.clip_norm": 0.1})  # fmt: skip
    both = ByHand(run, [{"partition-id": 0}, {"clients": "1,2"}])
    for _ in range(2):
        both.both_rounds()
        both.assert_equal()


def test_clients_tell_how_many_labels_they_have():
    """CBAFed's server starts with the number of labels in each class."""
    run = settings("cbafed", **{"data.labels": "some_clients", "data.labelled_clients": 2, "num_clients": 3,
                   "data.server_labels": 0, "model.statistics": "all", "aggregation.mean": "median"})  # fmt: skip
    both = ByHand(run, [{"partition-id": 0}, {"clients": "1,2"}])
    data = both.experiment.data
    told = np.bincount(data.visible_labels[data.visible_labels >= 0], minlength=10)
    np.testing.assert_array_equal(both.roster.labels(), told)
    both.assert_equal()


def test_moments_are_exchanged_in_passes(capsys):
    """Results and bytes equal the simulation's. A node lost in one pass is not asked in the next."""
    model = "tests/helpers/tiny_backbone.py:TwoLayers"
    run = settings("semifl", **{"model.name": model, "model.statistics": "moments", "confidence.threshold": 0.4,
                   "aggregation.weights": "qualified"})  # fmt: skip
    both = ByHand(run, [{"partition-id": 0}, {"partition-id": 1}])
    both.assert_equal()  # before the first round there is a pass for each layer
    line, simulated = both.both_rounds()
    both.assert_equal()
    model, more = both.state.model, both.traffic
    params, statistics = tree_bytes(model.params), tree_bytes(model.batch_stats)
    assert statistics == 2 * 2 * 16 * 4
    # Two clients: parameters are sent once, statistics in both passes.
    assert (more.statistics_down, more.statistics_up) == (2 * (params + 2 * statistics), 2 * 2 * statistics)
    assert (line["bytes_down"], line["bytes_up"]) == (simulated["bytes_down"], simulated["bytes_up"])

    from flwr.app import Array

    asked = []

    def change(node, kind, content):
        if kind == "query.statistics":
            asked.append(node)
            if node == 100:
                content["sums-0"][".count"] = Array(np.array(np.nan, np.float32))

    both.grid.change = change
    both.round()
    assert asked == [100, 101, 101] and both.healthy
    assert "the statistics of client 0 at node 100 are not used: it counts nan, not 33" in capsys.readouterr().err


def test_the_exchange_leaves_a_second_networks_statistics_alone():
    run = settings("twin_sight", **{"data.labels": "clients", "data.server_labels": 0, "model.statistics": "all",
                   "aggregation.mean": "krum"})  # fmt: skip
    both = ByHand(run, [{"clients": "0,1"}])
    assert set(both.state.model.batch_stats) & set(both.experiment.problem.network.companions)
    both.assert_equal()


def test_an_answer_that_does_not_come(capsys):
    """Only the other client's upload is used, and the lost client's learning does not count. The same holds if a node
    repeats an answer or trains on more images than its first answer said.
    """
    from flwr.app import Array

    run = settings("supervised", **{"data.reveal_labels": True})
    both = ByHand(run, [{"partition-id": 0}, {"partition-id": 1}])
    both.grid.lost = {100}
    line = both.round()
    assert line["uploads"] == 1 and "node 100 gave no answer in round 1 (train)" in capsys.readouterr().err
    kept = both.grid.contexts[100].state
    before = {name: array.numpy() for name, array in kept["memory-0"].items()}
    assert any(np.any(array.numpy() != before[name]) for name, array in kept["pending-0"].items())
    both.grid.lost = set()
    both.round()
    for name, array in kept["memory-0"].items():
        np.testing.assert_array_equal(array.numpy(), before[name])

    def change(node, kind, content):
        """Node 100 sends no upload; nodes in `bad` tell impossible numbers."""
        if node == 100:
            content.pop("upload-0", None)
        if node in bad:
            content["figures-0"][".num_steps"] = Array(np.array(-1, np.int32))

    both.grid.change, bad = change, set()
    assert both.round()["uploads"] == 1
    earlier = {}

    def repeat(node, kind, content):
        if node == 101 and kind == "train":
            earlier.setdefault("answer", dict(content))
            content.update(earlier["answer"])

    both.grid.change = repeat
    assert [both.round()["uploads"] for _ in range(2)] == [2, 1]
    assert "what client 1 at node 101 sent is not used: it is of turn 4 of the run, not of turn 5" in (
        capsys.readouterr().err
    )
    both.grid.change, bad = change, {100, 101}
    with pytest.raises(TrainingError, match="no node sent anything of use"):
        both.round()
    assert "what client 1 at node 101 sent is not used: it tells 33 images" in capsys.readouterr().err
