"""The bridge to Flower: what a federation of nodes trains is what the simulation trains.

Once with Flower's own processes on this machine, as a user starts them; and by a grid of this process, which hands
messages over as bytes, for what takes more rounds or more methods.
"""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import ROOT, TINY_BACKBONE
from fedjax_ssl import train
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.errors import TrainingError, UserError
from fedjax_ssl.flower.settings import digest, node_settings, run_config
from fedjax_ssl.flower.supported import asks_for_labels, check_supported
from fedjax_ssl.flower.tables import used_whole
from fedjax_ssl.flower.views import own_view
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.run.dependence import trace
from fedjax_ssl.run.experiment import build_experiment, initialise
from fedjax_ssl.run.summary import to_record
from fedjax_ssl.run.wire import bytes_per_client
from test_methods import compiled, make_config

try:
    import flwr
except ImportError:
    flwr = None
needs_flower = pytest.mark.skipif(flwr is None, reason="Flower is not installed: pip install '.[flower]'")

FIELDS = {
    "num_rounds": 2,
    "num_clients": 2,
    "clients_per_round": 2,
    "client.epochs": 1,
    "client.persistent": True,  # each client remembers its optimiser
    "server.epochs": 1,
    "server.pretrain_epochs": 1,
    "data.num_anchors": 20,
    "data.examples_per_client": 33,
    "model.name": TINY_BACKBONE,
    "model.normalisation": "static",
    "augment.flavour": "none",
    "log.report": False,
}


def settings(method="fedanchor", **fields):
    """The run's config of the quickstart with a method and fields, small."""
    words = [f"--config.{name}={value}" for name, value in {**FIELDS, **fields}.items()]
    return {"config": f"configs/quickstart.py:{method}", "overrides": " ".join(f"'{word}'" for word in words)}


# --- What needs no Flower. -------------------------------------------------------------------------------------------

# Which methods can be run: test_methods.py.


def test_what_the_documentation_says_to_change():
    config = make_config("fedtrinet")
    config.fedtrinet.reference = "test"
    check_supported(build_experiment(config))


def test_what_is_refused_whatever_the_method():
    experiment = build_experiment(make_config("fedanchor"))
    problem = experiment.problem
    for fields, words in (
        ({"eval_measures": ("shots",)}, "eval_measures has 'shots'"),
        ({"model.statistics": "all_mixed"}, "model.statistics='all_mixed'"),
        ({"availability.never": 0.1}, "availability.never=0.1 is of simulated clients"),
        # A client would compute the noise and take it off: it has the seed, and so the round's keys.
        ({"privacy.noise": 1.0}, "privacy.noise=1.0 draws its noise from the seed, which every node knows"),
    ):
        changed = problem.config.copy_and_resolve_references()
        changed.update_from_flattened_dict(fields)
        with pytest.raises(UserError, match=words):
            check_supported(experiment._replace(problem=problem._replace(config=changed)))


def test_a_client_that_reads_the_servers_images_is_refused():
    experiment = build_experiment(make_config("fedanchor"))
    method = experiment.method
    phase = method.phases[0]

    def prepare(broadcast, data, cohort, previous):
        jobs = phase.prepare(broadcast, data, cohort, previous)
        return jobs._replace(num_steps=jobs.num_steps + data.anchor_index[0])

    spying = method._replace(phases=(phase._replace(prepare=prepare), *method.phases[1:]))
    with pytest.raises(UserError, match="its clients' work depends on images of the server"):
        check_supported(experiment._replace(method=spying))
    looking = method._replace(server_after=lambda state, data, key: (state, {"sum": sum(map(np.sum, [0])) + sum(
        jax.tree.leaves(jax.tree.map(lambda leaf: leaf.sum(), state.clients)))}))  # fmt: skip
    with pytest.raises(UserError, match="its stage server_after reads clients' memory"):
        check_supported(experiment._replace(method=looking))


def test_a_stage_that_reads_a_whole_table_is_refused():
    """The server's view has its own rows alone, so that it would go on with another mean, and nobody would know."""
    experiment = build_experiment(make_config("fixmatch", "clients", tiny=False))
    method, phase = experiment.method, experiment.method.phases[0]

    def server_after(state, data, key):
        return state, {"shown": jnp.sum(jnp.where(data.visible_labels >= 0, 1, 0))}

    def prepare(broadcast, data, cohort, previous):
        jobs = phase.prepare(broadcast, data, cohort, previous)
        return jobs._replace(num_steps=jobs.num_steps + jnp.max(data.images).astype(jnp.int32))

    for changed, words in (
        (method._replace(server_after=server_after), "stage server_after reads data.visible_labels as a whole"),
        (method._replace(phases=(phase._replace(prepare=prepare),)), "clients' work reads data.images as a whole"),
    ):
        with pytest.raises(UserError, match=words):
            check_supported(experiment._replace(method=changed))


class Tables(NamedTuple):
    images: jax.Array
    visible_labels: jax.Array
    anchor_index: jax.Array


BY_ROWS = {
    "rows": lambda data: data.images[data.anchor_index],
    "a shape": lambda data: jnp.zeros(jax.eval_shape(lambda images: images + 1, data.images[:1]).shape),
    "in a jit": lambda data: jax.jit(lambda images, rows: images[rows])(data.images, data.anchor_index),
    "one by one": lambda data: jax.lax.map(lambda row: data.visible_labels[row], data.anchor_index),
    "as long as": lambda data: jax.lax.while_loop(
        lambda i: i < data.anchor_index[1], lambda i: i + 1 + data.visible_labels[i], 0
    ),
    "if": lambda data: jax.lax.cond(
        data.anchor_index[0] > 0, lambda: data.images[data.anchor_index], lambda: data.images[data.anchor_index + 1]
    ),
}
WHOLE = {
    "a mask": lambda data: jnp.where(data.visible_labels >= 0, 1, 0),
    "rows and all": lambda data: data.visible_labels[data.anchor_index] + data.visible_labels.sum(),
    "one by one": lambda data: jax.lax.map(lambda row: data.visible_labels.sum() + row, data.anchor_index),
    "as long as": lambda data: jax.lax.while_loop(
        lambda i: i < data.anchor_index[1], lambda i: i + 1 + data.visible_labels.sum(), 0
    ),
    "if": lambda data: jax.lax.cond(
        data.anchor_index[0] > 0, lambda: data.visible_labels[::2], lambda: data.anchor_index
    ),
}


def test_what_is_taken_of_a_table():
    data = Tables(jnp.zeros((4, 2, 2, 1), jnp.uint8), jnp.zeros(4, jnp.int32), jnp.arange(2))
    for stages, wanted in ((BY_ROWS, []), (WHOLE, ["visible_labels"])):
        for what, stage in stages.items():
            assert used_whole(trace(lambda _, data, stage=stage: stage(data), (), data)) == wanted, what


def test_the_words_of_a_run(tmp_path, monkeypatch):
    config = run_config(settings("semifl", seed=3))
    assert (config.method, config.seed, config.num_clients) == ("semifl", 3, 2)
    # A file in the project's folder, which Flower puts on Python's path.
    (tmp_path / "mine.py").write_text((ROOT / "configs" / "quickstart.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    assert run_config({"config": "mine.py:semifl"}).method == "semifl"
    # Two machines compare what changes a result; where files lie and how many devices there are does not.
    same, other = run_config(settings("semifl", seed=3, devices=1)), run_config(settings("semifl", seed=4))
    assert digest(config) == digest(same) != digest(other)
    for given, words in (
        ({"overrides": "seed=1"}, "overrides of the run's config are --config.FIELD=VALUE"),
        ({"overrides": "--config.sed=1"}, "nearest is config.seed"),
        ({"overrides": "--config.seeds='(0,1)'"}, "a Flower run has one"),
        ({"overrides": "--config.init_from=runs/a"}, "init_from is not for a Flower run"),
        ({"config": "nowhere.py"}, "there is no config file"),
    ):
        with pytest.raises(UserError, match=words):
            run_config(given)


def test_the_words_of_a_node():
    assert node_settings({"partition-id": 3, "num-partitions": 4}, 4).clients == (3,)
    assert node_settings({"clients": "0,2"}, 4).clients == (0, 2)
    for given, words in (
        ({}, "names no client"),
        ({"client": 1}, "nearest is clients"),
        ({"clients": "0,x"}, "give client ids"),
        ({"clients": "0,4"}, "4 is no client of num_clients = 4"),
        ({"clients": "1,1"}, "1 is named twice"),
        ({"clients": "0,1", "data": "a.npz"}, "is one client's, but the node is 2"),
    ):
        with pytest.raises(UserError, match=words):
            node_settings(given, 4)


def test_without_flower_one_line_says_what_to_install():
    code = "import sys; sys.modules['flwr'] = None; import fedjax_ssl.flower.client"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode and last.endswith(
        "UserError: Flower 1.41 or newer is not installed: pip install 'fedjax_ssl[flower]'"
    ), last


# --- By a grid of this process. --------------------------------------------------------------------------------------


class ByHand:
    """A run whose nodes are in this process, and the simulation of the same run, for those who look at it."""

    def __init__(self, run, nodes):
        from fedjax_ssl.data import dataset_facts
        from fedjax_ssl.flower.roster import Roster
        from fedjax_ssl.flower.server import Server
        from fedjax_ssl.flower.views import facts_text
        from flower_by_hand import GridByHand

        config = run_config(run)
        self.experiment = experiment = build_experiment(config)
        check_supported(experiment)
        self.grid = GridByHand(run, nodes)
        facts = facts_text(dataset_facts(experiment.dataset), experiment.data)
        num_classes = experiment.problem.num_classes if asks_for_labels(experiment) else 0
        self.roster = Roster(self.grid, config.num_clients, digest(config), facts, 0.0, 60.0, num_classes)
        self.roster.wait_for_all()
        self.server = Server(experiment, self.roster)
        self.state = self.server.first_state()
        self.traffic = bytes_per_client(experiment.problem, experiment.method, experiment.state_shape, experiment.data)

    @functools.cached_property
    def simulated(self):
        """The simulation's state, of as many rounds as `both_rounds` has made."""
        experiment, data = self.experiment, self.experiment.data
        return compiled(lambda data: initialise(experiment, data), data)(data)

    @functools.cached_property
    def _simulated_round(self):
        arguments = self.simulated, self.experiment.data, self.experiment.hidden_labels
        return compiled(make_round(self.experiment.problem, self.experiment.method, 1), *arguments)

    def round(self):
        """A round of the nodes: its line of metrics.jsonl."""
        from fedjax_ssl.flower.records import COUNTED

        self.state, metrics, self.healthy = self.server.round(self.state)
        return to_record(metrics, COUNTED)

    def both_rounds(self):
        """A round of the nodes and of the simulation: both lines."""
        line, experiment = self.round(), self.experiment
        self.simulated, result = self._simulated_round(self.simulated, experiment.data, experiment.hidden_labels)
        assert self.healthy == bool(result.healthy)
        return line, to_record(jax.device_get(result.metrics), self.traffic)

    def assert_equal(self):
        assert self.state.clients == {}  # the server has none of it
        mine = self.simulated._replace(clients={})
        chex.assert_trees_all_close(self.state, mine, atol=1e-4)


@needs_flower
def test_turns_memory_and_the_exchange_of_statistics():
    """RSCFed: a client may be in two of a round's turns, and the second begins with the memory that the first left."""
    run = settings(
        "rscfed", **{"rscfed.groups": 2, "rscfed.group_size": 2, "num_clients": 3, "data.labels": "some_clients",
                     "data.labelled_clients": 1, "model.statistics": "cohort", "data.num_anchors": 0},
    )  # fmt: skip
    both = ByHand(run, [{"partition-id": 0}, {"clients": "1,2"}])
    both.assert_equal()  # the statistics of the first model are of all clients
    for _ in range(2):
        line, simulated = both.both_rounds()
        both.assert_equal()
        for name in ("uploads", "local_steps", "dropped_uploads", "test_accuracy", "clients_without_labels"):
            assert line[name] == simulated[name], name
    assert both.experiment.state_shape.clients  # there is memory


@needs_flower
def test_a_memory_waits_for_the_word_of_the_server():
    """IsoFed: some clients hear nothing for a round; what they learned in the one before counts when they are asked."""
    run = settings("isofed", **{"num_clients": 4, "clients_per_round": 4, "data.labels": "some_clients",
                   "data.labelled_clients": 2, "trainer.threshold": 0.2, "data.num_anchors": 0,
                   "model.statistics": "cohort"})  # fmt: skip
    both = ByHand(run, [{"clients": "0,1"}, {"clients": "2,3"}])
    for _ in range(3):
        line, simulated = both.both_rounds()
        both.assert_equal()
        assert line["uploads"] == simulated["uploads"] < 4


@needs_flower
def test_clients_tell_how_many_labels_they_have(capsys):
    """CBAFed's server begins with the number of labels in each class."""
    run = settings("cbafed", **{"data.labels": "some_clients", "data.labelled_clients": 2, "num_clients": 3,
                   "data.num_anchors": 0, "model.statistics": "all"})  # fmt: skip
    both = ByHand(run, [{"partition-id": 0}, {"clients": "1,2"}])
    data = both.experiment.data
    told = np.bincount(data.visible_labels[data.visible_labels >= 0], minlength=10)
    np.testing.assert_array_equal(both.roster.labels(), told)
    both.assert_equal()
    both.both_rounds()
    both.assert_equal()

    def change(node, kind, content):
        if node == 100 and kind == "query.statistics":
            content["count"]["count"] = float("inf")

    both.grid.change = change
    both.round()  # of the other node's statistics, in good health
    assert "the statistics of node 100 are not used" in capsys.readouterr().err


@needs_flower
def test_the_exchange_leaves_a_second_networks_statistics_alone():
    run = settings("twin_sight", **{"data.labels": "clients", "data.num_anchors": 0, "model.statistics": "all"})
    both = ByHand(run, [{"clients": "0,1"}])
    assert set(both.state.model.batch_stats) & set(both.experiment.problem.network.companions)
    both.assert_equal()


@needs_flower
def test_a_node_with_images_of_its_own(tmp_path):
    """Each has a file; they are those of the partition, so that the simulation of all is known."""
    run = settings(**{"data.partition": "iid"})
    experiment = build_experiment(run_config(run))
    nodes = []
    for client, rows in enumerate(experiment.partition.client_rows):
        np.savez(tmp_path / f"{client}.npz", images=experiment.dataset.x_train[rows])
        nodes.append({"partition-id": client, "data": str(tmp_path / f"{client}.npz")})
    both = ByHand(run, nodes)
    line, simulated = both.both_rounds()
    both.assert_equal()
    assert line["bytes_down"] == simulated["bytes_down"] and line["bytes_up"] == simulated["bytes_up"]


@needs_flower
def test_an_answer_that_does_not_come(capsys):
    """The round is of the other client, and what the lost one learned does not count."""
    both = ByHand(settings(), [{"partition-id": 0}, {"partition-id": 1}])
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
        """Node 100 says that it took part, and sends no upload; node 101 sends numbers that are none."""
        if node == 100:
            content["figures-0"]["took-part"] = 1
            content.pop("upload-0", None)
        if node in bad:
            content["figures-0"]["num-examples"] = float("nan")

    both.grid.change, bad = change, set()
    assert both.round()["uploads"] == 1
    bad = {100, 101}
    with pytest.raises(TrainingError, match="no node sent anything of use"):
        both.round()
    assert "what client 1 at node 101 sent is not used: num-examples has nan" in capsys.readouterr().err


@needs_flower
def test_nodes_that_do_not_fit(capsys):
    """Nobody else hears of a node that does not fit, and it is asked once; started anew, it is another node."""
    from fedjax_ssl.flower.roster import Roster
    from flower_by_hand import GridByHand

    run = settings()
    grid = GridByHand(run, [{"partition-id": 0}, {"partition-id": 1}, {"partition-id": 1, "data": "nowhere.npz"}])
    grid.contexts[101].run_config["overrides"] += " --config.seed=9"
    roster = Roster(grid, 2, digest(run_config(run)), json.dumps({}), 0.0, 1.0)
    with pytest.raises(TrainingError, match="1 of num_clients = 2 clients have no node: 1; start flower-supernode"):
        roster.wait_for_all()
    said = capsys.readouterr().err
    assert "node 101 is not taken: it has another configuration" in said and "data=nowhere.npz is no file" in said

    # Two come that fit; the answer of the first does not come before the next round.
    fitting = GridByHand(run, [{"partition-id": 0}, {"partition-id": 1}]).contexts
    grid.contexts |= {103: fitting[100], 104: fitting[101]}
    grid.lost = {103}
    roster.wait_for_all()
    assert roster.nodes_of([0, 1]) == {100: [0], 104: [1]}
    grid.lost = set()
    roster.welcome()
    assert roster.nodes_of([0, 1]) == {103: [0], 104: [1]}
    assert grid.asked == [100, 101, 102, 103, 104]


TWO = {"clients": [0, 2], "sizes": [5, 7], "labelled": [5, 0], "digest": "0123", "classes": [2, 0, 3]}
ODD_HELLOS = {
    "another configuration": {"digest": "0124"},
    "no digest": {"digest": None},
    "no such client": {"clients": [0, 3]},
    "a negative id": {"clients": [-1, 2]},
    "twice": {"clients": [2, 2]},
    "nobody": {"clients": [], "sizes": [], "labelled": []},
    "no list": {"clients": 0},
    "no whole number": {"sizes": [5.0, 7]},
    "beyond int32": {"sizes": [5, 2**31]},
    "too few": {"sizes": [5]},
    "more labels than images": {"labelled": [6, 0]},
    "a class too many": {"classes": [2, 0, 3, 0]},
    "fewer than none": {"classes": [2, -1, 3]},
}


@needs_flower
def test_hellos_that_cannot_be():
    from fedjax_ssl.flower.answers import read_hello

    assert read_hello({"node": TWO}, "0123", 3, 3) == ([0, 2], [5, 7], [5, 0], [2, 0, 3])
    assert read_hello({"node": TWO}, "0123", 3, 0).classes is None
    for odd in [{"node": {**TWO, **change}} for change in ODD_HELLOS.values()] + [{}, {"node": {"digest": "0123"}}]:
        with pytest.raises(UserError):
            read_hello(odd, "0123", 3, 3)


def arrays(**named):
    """An ArrayRecord as `to_record` names its arrays."""
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({f"['{name}']": Array(np.asarray(value)) for name, value in named.items()})


@needs_flower
def test_uploads_and_figures_that_cannot_be():
    from flwr.app import Array, ArrayRecord

    from fedjax_ssl.flower.answers import read_reply

    upload = {"w": jax.ShapeDtypeStruct((1, 2), jnp.bfloat16), "n": jax.ShapeDtypeStruct((1,), jnp.int32)}
    like = SimpleNamespace(upload=upload, metrics=(({"loss": None}, None),))
    good = {"w": np.array([1, 2], jnp.bfloat16), "n": np.int32(3)}
    told = {"num-examples": 5, "num-qualified": 4, "num-steps": 3, "stepped-0": 1, "metric-0-loss": float("nan")}
    reply = read_reply({"upload-1": arrays(**good), "figures-1": told}, 1, like)
    np.testing.assert_array_equal(reply.upload["w"].astype(float), [1, 2])
    assert reply.upload["n"] == 3 and set(reply.figures) == set(told)
    assert read_reply({"figures-1": told, "upload-0": arrays(**good)}, 1, like).upload is None

    garbled = ArrayRecord({**arrays(**good), "['n']": Array("int32", (), "numpy.ndarray", b"no array")})
    pickled = ArrayRecord({**arrays(**good), "['n']": Array("int32", (), "pickle", b"")})
    odd_uploads = [
        arrays(w=good["w"]),
        arrays(**good, more=1),
        arrays(**{**good, "w": np.zeros(3, "V3")}),  # is no bfloat16
        arrays(**{**good, "w": np.array([[1, 2]], jnp.bfloat16)}),
        arrays(**{**good, "n": np.zeros(1, np.int32)}),  # NumPy would stretch it
        arrays(**{**good, "n": 3.0}),
        garbled,
        pickled,
        dict.fromkeys(garbled, 1.0),  # a MetricRecord
    ]
    odd_figures = [
        {name: value for name, value in told.items() if name != "num-steps"},
        *({**told, "num-examples": odd} for odd in (float("nan"), 5.0, [5], -1, 2**31, None)),
        *({**told, "metric-0-loss": odd} for odd in ([0.5], None)),
    ]
    for odd in (
        *({"upload-0": odd, "figures-0": told} for odd in odd_uploads),
        *({"upload-0": arrays(**good), "figures-0": odd} for odd in odd_figures),
        {"upload-0": arrays(**good)},
    ):
        with pytest.raises(UserError):
            read_reply(odd, 0, like)


@needs_flower
def test_statistics_that_cannot_be():
    from fedjax_ssl.flower.answers import read_statistics

    like = {"mean": np.zeros(2, np.float32), "var": np.zeros(2, np.float32)}
    good = {"mean": np.float32([-1, 2]), "var": np.float32([0, 3])}
    total, count = read_statistics({"sums": arrays(**good), "count": {"count": 2.0}}, like, 2)
    chex.assert_trees_all_equal(total, good)
    assert count == 2
    odd_counts = ({"count": odd} for odd in (-1.0, 3.0, float("nan"), float("inf"), [1.0], None))
    odd_sums = ({"mean": odd} for odd in (np.float32([np.inf, 0]), np.zeros(1, np.float32), np.zeros(2)))
    for sums, counted in (
        *((good, odd) for odd in odd_counts),
        *(({**good, **odd}, {"count": 2.0}) for odd in odd_sums),
        ({**good, "var": np.float32([-1, 1])}, {"count": 2.0}),
        (good, {}),
    ):
        with pytest.raises(UserError):
            read_statistics({"sums": arrays(**sums), "count": counted}, like, 2)
    with pytest.raises(UserError):
        read_statistics({}, like, 2)


BAD = {
    "no images": ({"labels": np.zeros(3, int)}, "has no images"),
    "floats": ({"images": np.zeros((3, 8, 8))}, "they must be uint8"),
    "another shape": (
        {"images": np.zeros((3, 7, 8), np.uint8)},
        r"an image is \[7, 8, 1\], the server's are \[8, 8, 1\]",
    ),
    "a label too many": (
        {"images": np.zeros((3, 8, 8), np.uint8), "labels": np.array([0, 10, 1])},
        r"labels must be integers \[3\] below 10",
    ),
}


@pytest.mark.parametrize("arrays, words", BAD.values(), ids=BAD)
def test_files_of_nodes_that_cannot_be_used(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    facts = {"image_shape": [8, 8, 1], "num_classes": 10, "num_anchors": 20}
    with pytest.raises(UserError, match=words):
        own_view(run_config(settings()), 0, str(tmp_path / "a.npz"), facts)


def test_labels_of_a_file_are_read_where_clients_have_labels(tmp_path):
    labels = np.array([3, -1, 0])
    np.savez(tmp_path / "a.npz", images=np.full((3, 8, 8), 7, np.uint8), labels=labels)
    facts = {"image_shape": [8, 8, 1], "num_classes": 10, "num_anchors": 0}
    for at, shown in (("server", [-1, -1, -1]), ("clients", [3, -1, 0])):
        fields = {"data.labels": at, "data.num_anchors": 20 if at == "server" else 0, "num_clients": 3}
        data = own_view(run_config(settings("fixmatch", **fields)), 1, str(tmp_path / "a.npz"), facts)
        assert data.client_size.tolist() == [0, 3, 0] and data.labelled_size[1] == np.sum(np.array(shown) >= 0)
        rows = data.client_index[1]
        assert data.visible_labels[rows].tolist() == shown and np.all(data.images[rows] == 7)


# --- By Flower's processes. ------------------------------------------------------------------------------------------

SECONDS = 400  # for the whole run on a busy machine


class Processes:
    """Processes that are stopped in any case, with all that they started."""

    def __init__(self, folder, environment):
        self._folder, self._environment, self._started = folder, environment, []

    def start(self, name, *words):
        log = (self._folder / f"{name}.log").open("w")
        command = [shutil.which(words[0], path=self._environment["PATH"]), *map(str, words[1:])]
        process = subprocess.Popen(
            command, env=self._environment, cwd=self._folder, stdout=log, stderr=subprocess.STDOUT
        )
        self._started.append((process, log))
        return process

    def stop(self):
        import psutil

        everybody = []
        for process, _ in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                everybody += [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for process, _ in reversed(self._started):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(everybody, timeout=10)
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        for process, log in self._started:
            process.wait(timeout=10)
            log.close()

    def logs(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self._folder.glob("*.log")))


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def until(what, seconds, processes):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, processes.logs()
        time.sleep(0.2)


def answers(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def processes(tmp_path):
    scripts = pathlib.Path(sys.executable).parent
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        # Nothing reaches outside, nothing is installed.
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "JAX_PLATFORMS": "cpu",
    }
    started = Processes(tmp_path, environment)
    yield started
    started.stop()


@needs_flower
def test_two_rounds_of_real_processes_equal_the_simulation(tmp_path, processes, monkeypatch):
    # The project as a user copies it, with a config of its own, which Flower hands to the nodes.
    project = tmp_path / "project"
    shutil.copytree(ROOT / "configs" / "flower", project)
    shutil.copy(ROOT / "configs" / "quickstart.py", project / "mine.py")
    monkeypatch.syspath_prepend(project)
    port, *of_nodes = (free_port() for _ in range(3))
    (tmp_path / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    processes.start("superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", port)
    until(lambda: answers(port), 60, processes)
    for client, of_node in enumerate(of_nodes):
        processes.start(
            f"node{client}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--host",
            "127.0.0.1", "--port", of_node, "--node-config", f"partition-id={client} num-partitions=2",
        )  # fmt: skip
    workdir = tmp_path / "run"
    run = {**settings(), "config": "mine.py:fedanchor", "workdir": str(workdir)}
    (tmp_path / "run.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in run.items()))
    started = processes.start("run", "flwr", "run", project, "here", "--stream", "--run-config", tmp_path / "run.toml")
    until(lambda: started.poll() is not None or (workdir / "summary.json").exists(), SECONDS, processes)
    assert (workdir / "summary.json").exists(), processes.logs()

    config = run_config(run)
    simulated = train(config, tmp_path / "simulated")
    assert simulated.clients  # each client remembers its optimiser
    state = simulated._replace(clients={})
    found = Checkpoints(workdir / "checkpoints").restore(state).state
    chex.assert_trees_all_close(found, state, atol=1e-4)
    lines, wanted = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (workdir, tmp_path / "simulated")
    )
    assert len(lines) == len(wanted) == 2
    for line, simulated_line in zip(lines, wanted):
        for name in ("bytes_down", "bytes_up", "uploads", "local_steps"):
            assert line[name] == simulated_line[name] > 0, name
        for name in set(line) & set(simulated_line):
            assert line[name] == pytest.approx(simulated_line[name], rel=1e-3, abs=1e-4), name
