"""Where a federation's arrays lie changes no result, also of a run resumed elsewhere; too large arrays are reported
first.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import sqlite3
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.base.errors import StoppedError, UserError
from fedjax_ssl.data import views
from fedjax_ssl.engine.interface import Finished, Jobs, Phase, Selection, read_records, write_records
from fedjax_ssl.ops.trees import tree_bytes
from fedjax_ssl.records.client_rows import ClientRows
from fedjax_ssl.run import experiment, residence
from fedjax_ssl.run.experiment import build_experiment, build_whole
from fedjax_ssl.run.feed import cohort_of
from fedjax_ssl.run.machine import use_machine
from fedjax_ssl.run.programs import lower_dispatch
from fedjax_ssl.run.residence import choose
from fedjax_ssl.run.train import train
from tests.helpers.runs import SMALL, everything_in, make_fedanchor_config
from tests.helpers.stub import make_stub_config, stub

pytestmark = pytest.mark.test_all


def remember(problem):
    """The stub with memory: clients add up their images' light and know their number; the server keeps their last sums.

    In every second round a client hears the sum of the client after it, whether that one trains or not.
    """
    plain = stub.factory(problem)
    (phase,) = plain.phases

    def init(data, key):
        own = {"light": jnp.zeros((len(data.ids), data.width)), "number": 0.1 * data.ids}
        return plain.init(data, key)._replace(clients=own, records={"last": jnp.zeros(len(data.record_ids))})

    def recalls(state, clients):
        return jnp.where(state.round % 2 == 1, (clients[:, None] + 1) % len(CLIENTS), -1)

    def personal(state, data, clients, key):
        near = recalls(state, clients)[:, 0]
        return jnp.where(near >= 0, read_records(state, data, jnp.maximum(near, 0))["last"], 0.0)

    def prepare(received, data, cohort, previous):
        rows = data.rows_of(cohort.clients)
        owned = jnp.arange(data.width) < data.client_size[cohort.clients][:, None]
        light = jnp.where(owned, jnp.mean(data.inputs[rows] / 255, axis=(2, 3, 4)), 0)
        light = cohort.own["light"] + light
        total = cohort.own["number"] + 0.1 * jnp.sum(light, axis=1) + 0.5 * cohort.personal
        return Jobs(jnp.ones_like(cohort.clients), total, {"light": light})

    def step(received, data, work, model, number, key):
        return jax.tree.map(lambda leaf: leaf + 0.01 * work, phase.step(received, data, work, model, number, key))

    def finish(received, work, model, steps):
        done = phase.finish(received, work, model, steps)
        upload, metrics = done.upload._replace(metadata={"last": work}), {**done.metrics, "sum": work}
        return Finished(upload, {"number": 0.1 * work}, metrics)

    def aggregate(state, data, received, key):
        state, metrics = plain.aggregate(state, data, received, key)
        return write_records(state, data, received, dict(received.uploads.metadata)), metrics

    phases = (Phase(prepare, phase.start, step, finish),)
    return plain._replace(init=init, recalls=recalls, personal=personal, phases=phases, aggregate=aggregate)


CLIENTS = range(8)
remembering = dataclasses.replace(stub, factory=remember)
REMEMBERING = f"{__file__}:remembering"
# The server remembers each client's last upload; a client receives the uploads of the clients most like it.
FEDMATCH = {
    "method": "fedmatch",
    "model.normalisation": "running",
    "clients_per_round": 2,
    "client.epochs": 1,
    "schedule": "constant",
    "confidence.threshold": 0.15,
    "fedmatch.helper_interval": 2,
    "data.labels": "clients",
}


def config_of(num_rounds=4, **fields):
    own = {"method": REMEMBERING, "schedule": "constant", "data.alpha": 0.3}
    return make_stub_config(**{"num_rounds": num_rounds, **own, **fields})


def assert_same(one, other):
    """Compares up to rounding: with the tests' flags XLA fuses programs of different shapes in different ways.

    With the program's own flags they are equal to the bit.
    """
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)  # noqa: E731
    jax.tree.map(close, one, other)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(last state, records) of a run that is on the device as a whole."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    state = train(config_of(), folder)
    assert not (folder / "clients.sqlite").exists()
    return state, lines_of(folder)


def test_a_run_goes_on_elsewhere_as_if_it_had_always_been_there(whole, tmp_path, monkeypatch):
    monkeypatch.setattr("fedjax_ssl.run.client_memory.CACHE_BYTES", 100)  # nearly every row goes to the disk
    for num_rounds, place in enumerate(("device", "host", "disk", "device"), start=1):
        images = "device" if place == "device" else "host"
        at = {"residence.clients": place, "residence.data": images}
        state = train(config_of(num_rounds, **at), tmp_path / "run")
        assert bool(jax.tree.leaves(state.of_clients)) == (place == "device")
    assert_same(state, whole[0])
    assert_same(lines_of(tmp_path / "run"), whole[1])


def test_a_run_that_has_moved_goes_back_past_records_that_have_changed(whole, tmp_path):
    """Goes from a checkpoint that holds the clients' memory back to one whose memory is in the file, which is kept."""
    run, on_disk = tmp_path / "run", {"residence.data": "host", "residence.clients": "disk"}
    train(config_of(2, **on_disk), run)
    train(config_of(3), run)
    of_before = (run / "clients.sqlite").read_bytes()
    train(config_of(4, **on_disk), shutil.copytree(run, tmp_path / "further"))
    assert (tmp_path / "further" / "clients.sqlite.set_aside").read_bytes() == of_before
    lines = lines_of(run)
    lines[2]["test_accuracy"] /= 2
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert_same(train(config_of(), run), whole[0])
    assert_same(lines_of(run), whole[1])


def test_a_file_of_the_clients_memory_that_is_not_the_runs_stops_it_and_loses_nothing(whole, tmp_path, monkeypatch):
    """Before anything is compiled or written."""
    run, fields = tmp_path / "run", {"residence.data": "host", "residence.clients": "disk"}
    train(config_of(2, **fields), run)
    file, kept = run / "clients.sqlite", tmp_path / "kept"
    shutil.copy(file, kept)

    def cut():
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2)

    def exchange():
        with sqlite3.connect(file) as opened:
            opened.execute("UPDATE run SET value = 'seed 1, partition 0' WHERE name = 'run'")

    damages = {cut: "damaged", file.unlink: "is missing", exchange: "another run's"}
    for damage, words in damages.items():
        damage()
        before = everything_in(run)
        with monkeypatch.context() as patched, pytest.raises(UserError, match=words) as caught:
            patched.setattr("fedjax_ssl.run.train.compile_program", None)
            train(config_of(4, **fields), run)
        assert "\n" not in str(caught.value) and everything_in(run) == before
        file.unlink(missing_ok=True)
        shutil.copy(kept, file)
    assert_same(train(config_of(4, **fields), run), whole[0]._replace(clients={}, records={}))
    assert_same(lines_of(run), whole[1])


def test_a_disk_that_is_full_of_clients_rows_is_one_line_and_loses_nothing(whole, tmp_path, monkeypatch):
    run, fields = tmp_path / "run", {"residence.data": "host", "residence.clients": "disk"}
    fields["checkpoint_every"] = 1
    write = ClientRows.write

    def fill(rows, client, number, data):
        if number == 3:  # the file may not grow by the size of this row
            rows._file.execute("PRAGMA max_page_count = 1")
            data = bytes(10**6)
        write(rows, client, number, data)

    with monkeypatch.context() as patched, pytest.raises(StoppedError) as caught:
        patched.setattr(ClientRows, "write", fill)
        train(config_of(4, **fields), run)
    said = str(caught.value)
    assert caught.value.by_disk and "\n" not in said and f"{run / 'clients.sqlite'}: database or disk is full" in said
    assert f"--workdir={run} --allow_code resumes from it" in said
    assert max(int(folder.name) for folder in (run / "checkpoints").iterdir() if folder.is_dir()) == 2
    assert_same(train(config_of(4, **fields), run), whole[0]._replace(clients={}, records={}))
    assert_same(lines_of(run), whole[1])


@pytest.mark.parametrize("closed", [".", "clients.sqlite"])
def test_what_cannot_be_written_to_is_one_line_and_loses_nothing(whole, closed, monkeypatch):
    """The folder or only the file. Permissions do not stop root, so root becomes another user."""
    fields, user = {"residence.data": "host", "residence.clients": "disk"}, os.geteuid()
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        run = pathlib.Path(folder) / "run"
        train(config_of(2, **fields), run)
        pathlib.Path(folder).chmod(0o755)
        for path in (run, *run.rglob("*")):
            path.chmod(0o777)
        (run / closed).chmod(0o555)
        before = everything_in(run)
        try:
            if user == 0:
                os.seteuid(65534)
            with (
                monkeypatch.context() as patched,
                pytest.raises(UserError, match=r"cannot (write|be written)") as caught,
            ):
                patched.setattr("fedjax_ssl.run.train.compile_program", None)
                train(config_of(4, **fields), run)
        finally:
            os.seteuid(user)
            (run / closed).chmod(0o755)
        assert "\n" not in str(caught.value) and str(run / closed) in str(caught.value)
        assert everything_in(run) == before
        assert_same(train(config_of(4, **fields), run), whole[0]._replace(clients={}, records={}))
        assert_same(lines_of(run), whole[1])


def test_several_seeds_are_each_as_if_it_had_been_alone_on_the_device(whole, tmp_path):
    first = config_of().seed
    fields = {"residence.data": "host", "residence.clients": "disk", "seeds": (first, first + 1)}
    states = train(config_of(**fields), tmp_path / "both")
    other = train(config_of(seed=first + 1), tmp_path / "other"), lines_of(tmp_path / "other")
    for seed, state, (expected, lines) in zip(fields["seeds"], states, (whole, other)):
        assert_same(state, expected._replace(clients={}, records={}))
        assert_same(lines_of(tmp_path / "both" / f"seed_{seed}"), lines)
    assert lines_of(tmp_path / "both" / f"seed_{first}") != lines_of(tmp_path / "both" / f"seed_{first + 1}")


def test_a_method_that_draws_its_clients_by_its_state_is_refused(monkeypatch):
    make = experiment.make_method

    def make_by_state(problem, **of_network):
        method = make(problem, **of_network)
        return method._replace(select=lambda state, data, key: Selection(jnp.argsort(state.server["loss"])[:4]))

    monkeypatch.setattr(experiment, "make_method", make_by_state)
    with pytest.raises(UserError, match="draws its clients by the state of the round before, so all must be on the"):
        build_experiment(config_of(**{"residence.data": "host"}))


def test_late_uploads_of_clients_whose_records_are_elsewhere_are_refused():
    late = {"availability.late": 0.5, "availability.late_weight": 0.5}
    late_of_all = make_stub_config(**late)  # without messages to single clients
    with pytest.raises(UserError, match=r"^availability.late=0.5 .* on the device: set residence") as caught:
        build_experiment(config_of(**late, **{"residence.data": "host"}))
    assert "\n" not in str(caught.value)
    build_experiment(late_of_all)


def test_clients_of_several_widths(tmp_path, monkeypatch):
    """Images on the device and on the host, a resumed run, and rows as wide as the client's number of images."""
    for module in (views, experiment, residence):
        monkeypatch.setattr(module, "MOST_ENTRIES", 1)
    sizes = np.array([9, 150, 10, 12, 8, 11, 10, 12])
    rows = np.random.default_rng(0).permutation(1437)[: 40 + sizes.sum()]
    np.savez(tmp_path / "mine.npz", server_index=rows[:40], client_size=sizes, client_index=rows[40:])
    fields = {"data.partition_file": str(tmp_path / "mine.npz"), "data.examples_per_client": 0, "clients_per_round": 2}
    built = build_experiment(config_of(**fields))
    assert built.views.widths == (12, 160) and not built.residence.whole
    cohort = cohort_of(built.problem, built.method, built.data)
    assert {built.views.width_for(cohort(number)) for number in range(4)} == {12, 160}
    records, states = [], []
    for images, parts in (("device", (4,)), ("host", (3, 4))):
        folder = tmp_path / images
        for num_rounds in parts:
            state = train(config_of(num_rounds, **fields, **{"residence.data": images}), folder)
        states.append(state)
        records.append(lines_of(folder))
    assert_same(*states)
    assert_same(*records)


def test_a_device_holds_the_records_of_a_round_alone():
    """2 clients that each hear of one more: the round's program has no record of the other clients."""
    config = config_of(**{"clients_per_round": 2, "residence.clients": "host", "residence.data": "host"})
    with use_machine(config) as machine:
        lowered = lower_dispatch(machine, [build_experiment(config)])
    state = lowered.args_info[0][0]
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state.records)} == {2 + 2}
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state.clients)} == {2}


def test_uploads_that_the_server_remembers_count_like_the_clients_memory(monkeypatch):
    """One or two models for each client."""
    needed = []

    def chosen(config, held, memory_bytes, *more):
        needed.append(memory_bytes)
        return choose(config, held, memory_bytes, *more)

    monkeypatch.setattr(experiment, "choose", chosen)
    fields = {**SMALL, **FEDMATCH, "residence.data": "device", "residence.clients": "device"}
    build_experiment(make_fedanchor_config(**fields))
    one = build_experiment(make_fedanchor_config(**fields, **{"fedmatch.sparse_down": False}))
    assert needed[0] - needed[1] == one.problem.config.num_clients * tree_bytes(one.state_shape.model.params)


def test_what_measures_or_serves_a_whole_federation_says_so():
    with pytest.raises(UserError, match=r"profile takes a federation .* residence.data is 'host'"):
        build_whole(config_of(**{"residence.data": "host"}), "profile")
