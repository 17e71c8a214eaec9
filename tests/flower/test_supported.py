"""The bridge to Flower before anything is sent: supported runs, settings of runs and nodes, nodes' own files."""

import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.flower.settings import digest, node_settings, run_config
from fedjax_ssl.flower.supported import check_supported, used_whole
from fedjax_ssl.flower.views import own_holdings
from fedjax_ssl.run.dependence import trace
from fedjax_ssl.run.experiment import build_experiment
from tests.helpers.flower_run import settings
from tests.helpers.runs import ROOT
from tests.helpers.tiny_methods import make_config

# test_methods.py checks which methods can be run.


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
        return jobs._replace(num_steps=jobs.num_steps + data.server_index[0])

    spying = method._replace(phases=(phase._replace(prepare=prepare), *method.phases[1:]))
    with pytest.raises(UserError, match="its clients' work depends on images of the server"):
        check_supported(experiment._replace(method=spying))
    looking = method._replace(server_after=lambda state, data, key: (state, {"sum": sum(map(np.sum, [0])) + sum(
        jax.tree.leaves(jax.tree.map(lambda leaf: leaf.sum(), state.clients)))}))  # fmt: skip
    with pytest.raises(UserError, match="its stage server_after reads clients' memory"):
        check_supported(experiment._replace(method=looking))


def test_a_stage_that_reads_a_whole_table_is_refused():
    """The server's view has only its own rows, so a mean over the table would be wrong."""
    experiment = build_experiment(make_config("fixmatch", "clients", tiny=False))
    method, phase = experiment.method, experiment.method.phases[0]

    def server_after(state, data, key):
        return state, {"shown": jnp.sum(jnp.where(data.visible_labels >= 0, 1, 0))}

    def prepare(broadcast, data, cohort, previous):
        jobs = phase.prepare(broadcast, data, cohort, previous)
        return jobs._replace(num_steps=jobs.num_steps + jnp.max(data.inputs).astype(jnp.int32))

    for changed, words in (
        (method._replace(server_after=server_after), "stage server_after reads data.visible_labels as a whole"),
        (method._replace(phases=(phase._replace(prepare=prepare),)), "clients' work reads data.inputs as a whole"),
    ):
        with pytest.raises(UserError, match=words):
            check_supported(experiment._replace(method=changed))


class Tables(NamedTuple):
    inputs: jax.Array
    visible_labels: jax.Array
    server_index: jax.Array


BY_ROWS = {
    "rows": lambda data: data.inputs[data.server_index],
    "a shape": lambda data: jnp.zeros(jax.eval_shape(lambda images: images + 1, data.inputs[:1]).shape),
    "in a jit": lambda data: jax.jit(lambda images, rows: images[rows])(data.inputs, data.server_index),
    "one by one": lambda data: jax.lax.map(lambda row: data.visible_labels[row], data.server_index),
    "as long as": lambda data: jax.lax.while_loop(
        lambda i: i < data.server_index[1], lambda i: i + 1 + data.visible_labels[i], 0
    ),
    "if": lambda data: jax.lax.cond(
        data.server_index[0] > 0, lambda: data.inputs[data.server_index], lambda: data.inputs[data.server_index + 1]
    ),
}
WHOLE = {
    "a mask": lambda data: jnp.where(data.visible_labels >= 0, 1, 0),
    "one by one": lambda data: jax.lax.map(lambda row: data.visible_labels.sum() + row, data.server_index),
    "as long as": lambda data: jax.lax.while_loop(
        lambda i: i < data.server_index[1], lambda i: i + 1 + data.visible_labels.sum(), 0
    ),
    "if": lambda data: jax.lax.cond(
        data.server_index[0] > 0, lambda: data.visible_labels[::2], lambda: data.server_index
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
    # The digest covers what changes a result, not paths or the number of devices.
    same, other = run_config(settings("semifl", seed=3, devices=1)), run_config(settings("semifl", seed=4))
    assert digest(config) == digest(same) != digest(other)
    # A partition file counts by what is in it, wherever it lies.
    for name, server in (("one", [0]), ("other", [1])):
        np.savez(tmp_path / f"{name}.npz", server_index=server)
    (tmp_path / "copy.npz").write_bytes((tmp_path / "one.npz").read_bytes())
    given = [
        settings("semifl", **{"data.partition_file": tmp_path / name}) for name in ("one.npz", "copy.npz", "other.npz")
    ]
    one, copy, other = map(digest, map(run_config, given))
    assert one == copy != other
    with pytest.raises(UserError, match=r"data.partition_file=nowhere.npz: No such file"):
        digest(run_config(settings("semifl", **{"data.partition_file": "nowhere.npz"})))
    for given, words in (
        ({"overrides": "seed=1"}, "overrides of the run's config are --config.FIELD=VALUE"),
        ({"overrides": "--config.sed=1"}, "nearest is config.seed"),
        ({"overrides": "--config.seeds='(0,1)'"}, "seeds=.* is not for a Flower run"),
        ({"overrides": "--config.init_from=runs/a"}, "init_from='runs/a' is not for a Flower run"),
        ({"overrides": "--config.availability.never=0.1"}, "availability.never=0.1 is not for a Flower run"),
        # A client could subtract the noise: it has the seed and therefore the round's keys.
        ({"overrides": "--config.privacy.noise=1.0 --config.aggregation.clip_norm=1.0"}, "privacy.noise=1.0 is not"),
        ({"config": "nowhere.py"}, "there is no config file"),
    ):
        with pytest.raises(UserError, match=words):
            run_config(given)


def test_the_words_of_a_node():
    assert node_settings({"partition-id": 3, "num-partitions": 4}, 4) == ((3,), "")
    assert node_settings({"clients": "0,2"}, 4) == ((0, 2), "")
    for given, words in (
        ({}, "give different ids below num_clients = 4"),
        ({"client": 1}, "nearest is clients"),
        ({"clients": "0,x"}, "give different ids"),
        ({"clients": "0,4"}, "give different ids"),
        ({"clients": "1,1"}, "give different ids"),
        ({"clients": "0,1", "data": "a.npz"}, "a node with data has one client"),
    ):
        with pytest.raises(UserError, match=words):
            node_settings(given, 4)


@pytest.mark.test_all
def test_without_flower_one_line_says_what_to_install():
    code = "import sys; sys.modules['flwr'] = None; import fedjax_ssl.flower.client"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode and last.endswith(
        "UserError: Flower 1.41 or newer is not installed: pip install 'fedjax_ssl[flower]'"
    ), last


BAD = {
    "no images": ({"labels": np.zeros(3, int)}, "has no images"),
    "none": ({"images": np.zeros((0, 8, 8), np.uint8), "labels": np.zeros(0, int)}, "the server's are uint8"),
    "floats": ({"images": np.zeros((3, 8, 8))}, "the server's are uint8"),
    "another shape": ({"images": np.zeros((3, 7, 8), np.uint8)}, r"images are uint8 \(3, 7, 8, 1\); .*'n', 8, 8, 1"),
    "a negative label": (
        {"images": np.zeros((3, 8, 8), np.uint8), "labels": np.array([0, -5, 1])},
        "labels: '-5' in row 2 is no class of the training data",
    ),
    "a label too many": (
        {"images": np.zeros((3, 8, 8), np.uint8), "labels": np.array([0, 10, 1])},
        "labels: '10' in row 2 is no class of the training data; the nearest is 1; known: 0, 1, 2",
    ),
}


@pytest.mark.parametrize("arrays, words", BAD.values(), ids=BAD)
def test_files_of_nodes_that_cannot_be_used(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    facts = {"image_shape": [8, 8, 1], "num_classes": 10, "server_labels": 20}
    with pytest.raises(UserError, match=words):
        own_holdings(run_config(settings()), 0, str(tmp_path / "a.npz"), facts)


def test_labels_of_a_file_are_read_where_clients_have_labels(tmp_path):
    labels = np.array([3, -1, 0])
    np.savez(tmp_path / "a.npz", images=np.full((3, 8, 8), 7, np.uint8), labels=labels)
    facts = {"image_shape": [8, 8, 1], "num_classes": 10, "server_labels": 0}
    for at, shown in (("server", [-1, -1, -1]), ("clients", [3, -1, 0])):
        fields = {"data.labels": at, "data.server_labels": 20 if at == "server" else 0, "num_clients": 3}
        held = own_holdings(run_config(settings("fixmatch", **fields)), 1, str(tmp_path / "a.npz"), facts)
        assert held.sizes.tolist() == [0, 3, 0] and held.labelled_size[1] == np.sum(np.array(shown) >= 0)
        rows = held.rows_of(1)
        assert held.visible_labels[rows].tolist() == shown and np.all(held.inputs[rows] == 7)
