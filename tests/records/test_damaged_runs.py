"""A run's folder after damage: training, loading and reports use the last good state, or say in a line what is wrong.

Each fault once went unnoticed or ended in a traceback.
"""

import json
import os
import shutil

import chex
import jax
import numpy as np
import pytest

import fedjax_ssl
import launch
from fedjax_ssl import UserError, train
from fedjax_ssl.base.errors import printable
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.lines import METRICS, TIMINGS, read_records, read_rounds
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.records.sealed import read_dataset, write_dataset
from fedjax_ssl.records.workdir import Workdir
from fedjax_ssl.report import write_comparison, write_report
from fedjax_ssl.report.model_card import model_card
from tests.helpers.runs import everything_in
from tests.helpers.stub import make_stub_config


@pytest.fixture
def run(stub_run, tmp_path):
    """A copy of the finished run with checkpoints of rounds 2 and 4."""
    shutil.copytree(stub_run[0], tmp_path / "run")
    return tmp_path / "run"


def flip(path, place=-1):
    """Flips one bit of a file."""
    whole = bytearray(path.read_bytes())
    whole[place] ^= 4
    path.write_bytes(whole)


def a_large_file_of(checkpoint):
    return max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def assert_as_if_nothing_had_happened(run, stub_run, state):
    reference, expected = stub_run
    chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(expected))
    assert (run / METRICS).read_bytes() == (reference / METRICS).read_bytes()
    assert Checkpoints(run / "checkpoints").rounds() == [2, 4]
    timed = [line["round"] for line in read_records(run / TIMINGS).lines if "seconds" in line]
    assert timed == [1, 2, 3, 4]
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (run, reference))
    figures = ("rounds", "test_accuracy", "best_test_accuracy", "bytes_up", "bytes_down")
    assert [ours[name] for name in figures] == [theirs[name] for name in figures]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run, stub_run, capfd):
    """The run ends bit for bit as without damage; the checkpoint is renamed, not deleted."""
    flip(a_large_file_of(run / "checkpoints" / "4"))
    (run / "checkpoints" / "9999").mkdir()
    damaged = everything_in(run / "checkpoints" / "4")
    state = train(make_stub_config(), run)
    said = capfd.readouterr().err
    assert f"warning: the checkpoint {run / 'checkpoints' / '4'} is damaged" in said
    assert "goes on from round 2" in said
    assert_as_if_nothing_had_happened(run, stub_run, state)
    aside = run / "checkpoints" / "4.set_aside"
    assert {path.relative_to(aside): text for path, text in everything_in(aside).items()} == {
        path.relative_to(run / "checkpoints" / "4"): text for path, text in damaged.items()
    }


def cut_last_line(path):
    path.write_bytes(path.read_bytes()[:-9])


def spoil_third_line(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"round": 3, "test_\xff\n', *lines[3:]]))


def change_a_figure(path, number=3):
    lines = path.read_bytes().splitlines(keepends=True)
    record = json.loads(lines[number - 1])
    lines[number - 1] = json.dumps({**record, "test_accuracy": record["test_accuracy"] / 2}).encode() + b"\n"
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    "damage, words",
    [
        (cut_last_line, "4 is later than the records, which reach round"),
        (spoil_third_line, "4 is later than the records, which reach round"),
        (change_a_figure, f"{METRICS} is not what was written"),  # a checkpoint has a checksum of the lines before it
    ],
)
def test_damaged_records_send_the_run_back_to_where_they_reach(run, stub_run, damage, words, capfd):
    damage(run / METRICS)
    damaged = (run / METRICS).read_bytes()
    state = train(make_stub_config(), run)
    said = capfd.readouterr().err
    assert words in said and "goes on from round 2" in said
    assert_as_if_nothing_had_happened(run, stub_run, state)
    assert (run / "checkpoints" / "4.set_aside").is_dir()
    if damage is not cut_last_line:  # a kill leaves this behind
        assert f"{run / METRICS}" in said and (run / f"{METRICS}.set_aside").read_bytes() == damaged


def test_a_figure_that_no_checkpoint_is_before_is_said(run, stub_run, capfd):
    """The state is intact, so the run continues; the lost line is reported."""
    change_a_figure(run / METRICS, 1)
    assert f"{run / METRICS} is not what was written" in read_run(run).damages
    chex.assert_trees_all_equal(train(make_stub_config(), run), stub_run[1])
    assert f"{run / METRICS} is not what was written; the run goes on from round 4" in capfd.readouterr().err


def flip_all(run):
    for number in ("2", "4"):
        flip(a_large_file_of(run / "checkpoints" / number))


@pytest.mark.parametrize(
    "damage, words",
    [
        (flip_all, "no checkpoint can be used .*put files of a copy back"),
        (lambda run: (run / METRICS).unlink(), "which reach round 0"),
        (lambda run: os.truncate(run / METRICS, (run / METRICS).read_bytes().index(b"\n") + 1), "which reach round 1"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "but no checkpoint"),
    ],
)
def test_where_no_checkpoint_can_be_used_the_run_stops_in_one_line_and_changes_nothing(run, damage, words):
    damage(run)
    before = everything_in(run)
    with pytest.raises(UserError, match=words) as caught:
        train(make_stub_config(), run)
    assert "\n" not in str(caught.value) and everything_in(run) == before


def test_seconds_that_are_lost_are_said(run, stub_run, capfd):
    """Seconds are not part of the state, so the run does not go back. A damaged summary is written anew."""
    (run / TIMINGS).write_text('no line\n{"round": 1, "seconds": 1.0}\n{"round": 2, "seconds": null}\n')
    (run / "summary.json").write_text('{"rounds": 4, "versions": 3}')
    chex.assert_trees_all_equal(train(make_stub_config(), run), stub_run[1])
    assert "no seconds of 3 of 4 rounds" in capfd.readouterr().err
    assert json.loads((run / "summary.json").read_text())["seconds"] == 1.0


def test_lines_are_on_the_disk_before_the_checkpoint_that_stands_on_them(tmp_path, monkeypatch):
    """Both files are synced after their last write, by the order of system calls."""
    done, fsync, append, save = [], os.fsync, Workdir.append, Checkpoints.save

    def synced(number):
        done.append(f"synced {os.path.basename(os.readlink(f'/proc/self/fd/{number}'))}")
        fsync(number)

    def saved(self, number, *given):
        done.append(f"checkpoint {number}")
        save(self, number, *given)

    monkeypatch.setattr(Workdir, "append", lambda self, name, lines: (done.append(name), append(self, name, lines)))
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Checkpoints, "save", saved)
    train(make_stub_config(num_rounds=2), tmp_path / "run")
    for number in (0, 2):
        until = done[: done.index(f"checkpoint {number}")]
        for name in (METRICS, TIMINGS):
            assert f"synced {name}" in until
            after = until[len(until) - 1 - until[::-1].index(f"synced {name}") :]
            assert name not in after, (number, name)


def test_lines_are_read_up_to_the_first_hole(tmp_path):
    path = tmp_path / METRICS
    assert read_rounds(path).lines == []
    rounds = [{"round": number, "a": None} for number in (1, 2, 3, 4)]
    for text, good, damage in [
        ("\n".join(map(json.dumps, rounds)) + "\n", 4, ""),
        ("\n".join(map(json.dumps, rounds)), 3, ""),
        ("\n".join(map(json.dumps, rounds[1:])) + "\n", 0, "round 1 is missing"),
        ('{"round": 1}\n[]\n{"round": 2}\n3\n{"round": true}\n', 2, "line 2, 4, 5 of"),
        ('{"round": 1}\n{"round": 1}\n', 1, "round 2 is missing"),
        ('{"round": 1}\n{"round": 2, "a": "\u2028"}\n', 1, "line 2 of"),
    ]:
        path.write_text(text, newline="\n")
        found = read_rounds(path)
        assert [line["round"] for line in found.lines] == list(range(1, good + 1)), text
        assert damage in found.damage and bool(damage) == bool(found.damage)


# --- Loading. --------------------------------------------------------------------------------------------------------


def load(folder):
    return fedjax_ssl.load(folder, allow_code=True)


def test_a_damaged_checkpoint_is_not_loaded(run, capfd):
    """The checkpoint before it is loaded, with a warning; loading writes nothing."""
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8), np.uint8)
    flip(a_large_file_of(run / "checkpoints" / "4"))
    before = everything_in(run)
    predictor = load(run)
    said = capfd.readouterr().err
    assert predictor.round == 2 and "4 is damaged" in said and "the model is that of round 2" in said
    shutil.rmtree(run / "checkpoints" / "4")
    np.testing.assert_array_equal(predictor(images).probabilities, load(run)(images).probabilities)
    assert {path for path in before if "/4/" not in str(path)} == set(everything_in(run))


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("config.json", "[]", "config.json: it has no method"),
        ("config.json", "[" * 100_000, "too many brackets"),
        ("config.json", '{"method": 3}', "config.json: it has no method"),
        ("config.json", '{"method": "semifl", "model": 3}', "model is|is 'missing'|another configuration"),
        ("dataset.json", "{}", "dataset.json is damaged"),
        ("dataset.json", "\xff", "dataset.json is damaged"),
    ],
)
def test_a_foreign_file_is_one_line_for_everybody(run, name, text, words):
    (run / name).write_text(text, "latin-1")
    uses = [load]
    if name == "config.json":  # without the data set's facts a report shows less, and training writes them anew
        uses += [write_report, lambda folder: train(make_stub_config(), folder)]
    for use in uses:
        before = everything_in(run)
        with pytest.raises(UserError, match=words) as caught:
            use(run)
        assert str(run) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 1000
        assert everything_in(run) == before


@pytest.mark.parametrize("field, form", [("method", "{0}/evil.py:Evil"), ("model.name", "evil_{1}:Evil")])
def test_no_code_that_a_folder_names_is_run(run, field, form, tmp_path, monkeypatch, capfd):
    """Code in a file or module of the current folder, as method or backbone: load, predict and report do not run it."""
    trace, file = tmp_path / "it_ran", "evil.py" if "/" in form else f"evil_{field[-4:]}.py"
    (tmp_path / file).write_text(f"open({str(trace)!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    config = json.loads((run / "config.json").read_text())
    config["method"], config["model"]["name"] = "fedanchor", "cnn"
    *section, name = field.split(".")
    (config[section[0]] if section else config)[name] = form.format(tmp_path, field[-4:])
    (run / "config.json").write_text(json.dumps(config))
    np.savez("images.npz", np.zeros((2, 8, 8), np.uint8))

    with pytest.raises(UserError, match=rf"names code, {field}=.*evil.*allow_code=True, or --allow_code"):
        fedjax_ssl.load(run)
    assert launch.main(["predict", f"--workdir={run}", "--npz=images.npz", "--out=out.npz"]) == 2
    assert "names code" in capfd.readouterr().err
    assert "trained with" in model_card(read_run(run))
    assert not trace.exists()
    with pytest.raises(UserError):  # it is run, but gives nothing usable
        load(run)
    assert trace.exists()


# --- Reports. --------------------------------------------------------------------------------------------------------


def test_a_report_shows_a_damaged_run_as_far_as_it_can_be_read(run):
    (run / "summary.json").write_text("{")
    os.truncate(run / "class_counts.npz", 100)
    (run / "dataset.json").write_text("[]")
    (snapshot,) = (run / "snapshots").glob("*.npz")
    flip(snapshot, place=snapshot.stat().st_size // 2)
    (run / "profile").mkdir()
    (run / "profile" / "profile.json").write_text('{"config": 3, "seconds_by_stage": {}}')
    page = write_report(run).read_text()
    for words in ("summary.json is damaged", "class_counts.npz", "dataset.json is damaged", snapshot.name):
        assert words in page, words
    card = (run / "MODEL_CARD.md").read_text()
    assert "**Damaged:** summary.json is damaged" in card and (run / "figures" / "losses.png").exists()
    spoil_third_line(run / METRICS)
    page = write_report(run).read_text()
    assert "2 of 4" in page and "not finished" in page and "line 3 of" in page
    out = write_comparison([run], run.parent / "page.html").read_text()
    assert "line 3 of" in out and "summary.json is damaged" in out


def test_where_nothing_can_be_read_the_report_says_why(run):
    (run / METRICS).write_bytes(b"\xff\xff\n")
    with pytest.raises(UserError, match=r"line 1 of .* is damaged"):
        read_run(run)
    (run / "about.json").unlink()
    with pytest.raises(UserError, match=r"cannot read .*about\.json"):
        read_run(run)


def test_a_report_of_fewer_rounds_goes_when_the_run_goes_on(run):
    for name in ("report.html", "MODEL_CARD.md"):
        (run / name).write_text("40 of 40")
    longer = Workdir(run, make_stub_config(num_rounds=9).to_dict())
    longer.begin(4)  # and is killed
    longer.close()
    assert not any((run / name).exists() for name in ("report.html", "MODEL_CARD.md", "summary.json"))
    assert read_run(run).standing() == "round 4 of 9" and not read_run(run).is_finished


@pytest.mark.filterwarnings("ignore:Glyph")
def test_any_class_name_can_be_shown(run):
    """Dollar signs, which matplotlib reads as mathematics; bytes that are not UTF-8; control characters; markup."""
    names = ["$x_1$", "$", "\udcff\udcfe", "a\x00b\x1b[31m", "<script>alert(1)</script>", "a\nb", "\u202eabc", "&amp;",
             "100 %_^~{}\\", "猫"]  # fmt: skip
    write_dataset(run, {**read_dataset(run), "name": "$a\udcff\x07<script>|[b](c)`", "class_names": names})
    page = write_report(run).read_bytes().decode()
    assert "<script>" not in page and not set(map(chr, range(32))) - {"\n"} & set(page)
    card = (run / "MODEL_CARD.md").read_bytes().decode()
    assert r"$a\udcff\x07" in page and "<script>" not in card
    assert r"| data set | $a\\udcff\\x07&lt;script&gt;\|\[b\](c)\` |" in card


def test_what_is_shown_has_no_letter_that_acts():
    assert printable("a\x00\n\udcff\u202e") == r"a\x00\n\udcff\u202e"
    assert printable("naïve 猫 👩\u200d🔬 $x$") == "naïve 猫 👩\u200d🔬 $x$"


def arrays_of(classes, embedding=0.0):
    """Arrays of a snapshot and of class counts in one."""
    rows, number = np.full(3, classes - 1), np.ones(classes, int)
    of_clients = dict.fromkeys(("clients", "labelled"), np.ones((8, classes), int))
    snapshot = dict.fromkeys(("labels", "predictions", "embedding_labels"), rows) | {"of": np.array("test")}
    counts = dict.fromkeys(("train", "server", "validation"), number)
    return {**snapshot, **counts, **of_clients, "embeddings": np.full((3, 2), embedding)}


OTHERS = {
    "labels alone": {"labels": np.zeros(3, int)},
    "other classes": arrays_of(71),
    "embeddings that are no numbers": arrays_of(10, np.nan) | {"clients": np.ones((8, 10))},
    "tests that are no shares": {"round": np.array(4), "global": np.array("a")},
}


@pytest.mark.parametrize("arrays", OTHERS.values(), ids=OTHERS)
def test_whole_files_with_other_arrays_are_named(arrays, run):
    """The run has ten classes. The summary, written again, leaves out the figures of these arrays."""
    (snapshot,) = (run / "snapshots").glob("*.npz")
    names = ["client_tests.npz"] if "round" in arrays else ["class_counts.npz", f"snapshots/{snapshot.name}"]
    for name in names:
        np.savez(run / name, **arrays)
    lines = "\n".join(read_run(run).unreadable())
    assert all(name.rpartition("/")[2] in lines for name in names)
    (run / "summary.json").unlink()
    train(make_stub_config(), run)
    assert (run / "summary.json").exists()
