"""Runs with validation images: what is measured on them, when the test set is used, and what the records say."""

import json
import shutil

import chex
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import UserError, train
from fedjax_ssl.data import load_dataset
from fedjax_ssl.records.groups import Group
from fedjax_ssl.records.runs import RunRecords, read_run
from fedjax_ssl.report import figures, style, write_report
from fedjax_ssl.report.table import Row, make_table
from fedjax_ssl.run.machine import Machine
from tests.helpers.runs import make_tiny_config
from tests.helpers.stub import make_stub_config

VALIDATION = 50
FIELDS = {"data.validation": VALIDATION, "snapshot_rounds": (0, 2)}
SNAPSHOTS = [(0, "validation"), (2, "validation"), (4, "test")]


def make_config(**overrides):
    return make_stub_config(**{**FIELDS, **overrides})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(workdir, state) of an uninterrupted run."""
    workdir = tmp_path_factory.mktemp("validated") / "run"
    return workdir, train(make_config(), workdir)


@pytest.fixture(scope="module")
def digits():
    return load_dataset(make_config().data)


def summary_of(workdir):
    return json.loads((workdir / "summary.json").read_text())


def rows_of(workdir):
    with np.load(workdir / "partition.npz") as arrays:
        return arrays["validation_index"]


def by_the_predictor(workdir, images, labels):
    """Accuracy and mean cross-entropy of the last model, by NumPy from its predictions."""
    found = fedjax_ssl.load(workdir, allow_code=True)(images)
    right = found.probabilities[np.arange(len(labels)), labels].astype(np.float64)
    return np.mean(found.labels == labels), -np.mean(np.log(right))


def assert_measured(workdir, digits):
    """Checks a finished run's last figures against its last model's on validation rows and test set."""
    rows, summary, last = rows_of(workdir), summary_of(workdir), read_run(workdir).metrics[-1]
    accuracy, loss = by_the_predictor(workdir, digits.x_train[rows], digits.y_train[rows])
    assert len(rows) == VALIDATION and last["validation_accuracy"] == summary["validation_accuracy"]
    np.testing.assert_allclose([last["validation_accuracy"], last["validation_loss"]], [accuracy, loss], rtol=1e-4)
    accuracy, loss = by_the_predictor(workdir, digits.x_test, digits.y_test)
    np.testing.assert_allclose([summary["test_accuracy"], summary["test_loss"]], [accuracy, loss], rtol=1e-4)


def test_rounds_are_measured_on_validation_images_and_the_last_model_on_the_test_set(finished, digits):
    workdir, _ = finished
    assert_measured(workdir, digits)
    lines, summary = read_run(workdir).metrics, summary_of(workdir)
    assert len(lines) == 4 and not [name for line in lines for name in line if name.startswith("test")]
    accuracies = [line["validation_accuracy"] for line in lines]
    assert summary["best_validation_accuracy"] == max(accuracies) and "best_test_accuracy" not in summary
    assert summary["best_round"] == 1 + accuracies.index(max(accuracies))
    (events,) = (workdir / "tensorboard").iterdir()
    assert b"validation/accuracy" in events.read_bytes() and b"test/accuracy" not in events.read_bytes()


@pytest.mark.test_all
def test_seeds_in_one_program_have_their_own_validation_images(finished, digits, tmp_path, monkeypatch):
    monkeypatch.setattr(Machine, "seeds_together", lambda self, num_seeds: num_seeds)
    train(make_config(seeds=(0, 1)), tmp_path)
    alone, folders = finished[0], [tmp_path / "seed_0", tmp_path / "seed_1"]
    assert np.array_equal(rows_of(folders[0]), rows_of(alone)) and not np.array_equal(*map(rows_of, folders))
    for folder in folders:
        assert_measured(folder, digits)
        taken = read_run(folder).snapshots()
        assert [(number, str(each["of"])) for number, each in taken.items()] == SNAPSHOTS
        np.testing.assert_array_equal(taken[2]["labels"], digits.y_train[rows_of(folder)])
        np.testing.assert_array_equal(taken[4]["labels"], digits.y_test)
        accuracy = np.mean(taken[2]["predictions"] == taken[2]["labels"])
        assert accuracy == pytest.approx(read_run(folder).metrics[1]["validation_accuracy"])


def test_a_run_that_goes_on_opens_the_test_set_again_at_its_new_end(finished, digits, tmp_path):
    """It ends like an uninterrupted run; a run without its summary writes the same one again."""
    whole, state = finished
    train(make_config(num_rounds=2), tmp_path)
    assert_measured(tmp_path, digits)
    assert str(read_run(tmp_path).snapshots()[2]["of"]) == "test"
    chex.assert_trees_all_equal(train(make_config(), tmp_path), state)
    assert (tmp_path / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert [(number, str(each["of"])) for number, each in read_run(tmp_path).snapshots().items()] == SNAPSHOTS
    figures = ("test_accuracy", "test_loss", "validation_accuracy", "best_validation_accuracy", "best_round")
    expected = {name: summary_of(whole)[name] for name in figures}
    assert {name: summary_of(tmp_path)[name] for name in figures} == expected
    (tmp_path / "summary.json").unlink()  # as if killed after its last checkpoint
    train(make_config(), tmp_path)
    assert {name: summary_of(tmp_path)[name] for name in figures} == expected


def test_where_the_counts_of_classes_are_damaged_the_summary_has_no_test_figures(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "class_counts.npz").write_bytes(b"no zip")
    train(make_config(), tmp_path / "run")
    assert summary_of(tmp_path / "run")["test_accuracy"] is None


def test_another_number_of_them_is_another_run_and_a_bad_one_none(finished, tmp_path):
    with pytest.raises(UserError, match=r"data.validation: 50 there, 60 here"):
        train(make_config(**{"data.validation": 60}), finished[0])
    with pytest.raises(UserError, match=r"data.validation=55 cannot .* 50 or 60 would do"):
        train(make_config(**{"data.validation": 55}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_report_says_which_figure_is_which(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    text, card, summary = write_report(run).read_text(), (run / "MODEL_CARD.md").read_text(), summary_of(run)
    tested, last, best = (
        f"{100 * summary[name]:.2f} %" for name in ("test_accuracy", "validation_accuracy", "best_validation_accuracy")
    )
    assert f"| test accuracy | {tested} of the last model |" in card
    assert f"| validation accuracy | {last} (best {best}, round {summary['best_round']}) |" in card
    assert "50 of them held out for validation" in card and "no round was picked by it" not in card
    assert "Rounds are measured on 50 validation images" in text and "Test images after round 4" in text
    assert (run / "figures" / "validation_accuracy.png").exists()
    assert not (run / "figures" / "test_accuracy.png").exists()

    # An unfinished run has no test accuracy, and its last snapshot shows validation images.
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(keepends=True)[:3]))
    text, card = write_report(run).read_text(), (run / "MODEL_CARD.md").read_text()
    assert "| test accuracy | - of the last model |\n| test loss | - |" in card and tested not in card
    assert "Validation images after round 2" in text and "1 of 1" not in text
    assert read_run(run).tested("test_accuracy") is None


def made_up(validation, *accuracies, tested=None):
    """Records of a run with these accuracies per round, on validation images or, without them, on the test set."""
    config = {**make_tiny_config().to_dict(), "num_rounds": len(accuracies)}
    config["data"] = {**config["data"], "validation": validation}
    name = "validation_accuracy" if validation else "test_accuracy"
    lines = [{"round": n, name: a, "bytes_down": 1e6, "bytes_up": 5e5} for n, a in enumerate(accuracies, start=1)]
    summary = None if validation and tested is None else {"rounds": len(accuracies), "test_accuracy": tested}
    return RunRecords(None, config, lines, [{"round": 1, "seconds": 1.0}], summary)


def table_of(rows, target):
    return [{name: str(cell) for name, cell in row.items()} for row in make_table(rows, target)]


def test_tables_never_mix_the_two():
    runs = [made_up(50, 0.0, 0.5, 0.8, 0.9, 0.7, 0.6, tested=0.6), made_up(50, 0.5, 0.7, 0.6)]
    held_out = Row("with", {}, runs, 2, False)
    plain = Row("without", {}, [made_up(0, 0.2, 0.4, 0.3)], 1, False)
    (row,) = table_of([held_out], 0.8)
    by_round = {
        "last 5 rounds": "65.00 ± 7.07", "best": "80.00 ± 14.14", "rounds to 80 %": "3 (1 of 2)",
        "MB to 80 %": "4.5 (1 of 2)",
    }  # fmt: skip
    assert row["test accuracy"] == "60.00 (1 of 2)" and row["seeds"] == "2 of 2 (1 unfinished)"
    assert {name: row[f"{name} (validation)"] for name in by_round} == by_round and "best" not in row
    assert (row["MB down"], row["MB up"], row["seconds"]) == ("4.5", "2.25", "1")
    (row,) = table_of([plain], 0.8)
    alone = {"last 5 rounds": "30.00", "best": "40.00", "rounds to 80 %": "-", "MB to 80 %": "-"}
    assert row["test accuracy"] == "30.00" and {name: row[name] for name in alone} == alone
    with_, without = table_of([held_out, plain], 0.8)
    assert list(with_) == list(without) and "best" not in with_
    for name in by_round:
        assert (with_[f"{name} (validation)"], with_[f"{name} (test)"]) == (by_round[name], "-")
        assert (without[f"{name} (validation)"], without[f"{name} (test)"]) == ("-", alone[name])
    (row,) = table_of([held_out._replace(runs=held_out.runs[1:])], 0.8)
    assert row["test accuracy"] == "-"


def test_curves_of_the_two_are_pictures_of_their_own():
    """A curve is the mean over seeds, its band their range; bytes are those of both ways since the beginning."""
    groups = [Group("with", [made_up(50, 0.5, 0.9), made_up(50, 0.3, 0.8)]), Group("without", [made_up(0, 0.2, 0.4)])]
    with style.styled():
        for draw, places in ((figures.accuracy, [1, 2]), (figures.accuracy_over_bytes, [1.5, 3])):
            for measured, heights in (("validation", [40, 85]), ("test", [20, 40])):
                (axes,) = draw(groups, measured).axes
                (line,) = axes.lines
                np.testing.assert_allclose(line.get_xydata(), np.transpose([places, heights]))
                assert axes.get_ylabel() == f"{measured} accuracy (%)"
                if measured == "validation":
                    ((band,),) = (one.get_paths() for one in axes.collections)
                    assert {(x, y) for x, y in band.vertices} == {*zip(places * 2, [30, 80, 50, 90])}
            assert draw(groups[:1], "test") is None
        lines = [[line.get_ydata().tolist() for line in axes.lines] for axes in
                 figures.bytes_over_rounds(groups[1].runs[0]).axes]  # fmt: skip
    assert lines == [[[1, 1], [0.5, 0.5]], [[1, 2], [0.5, 1]]]  # in each round, and in all; down, and up


@pytest.mark.test_all
def test_a_run_that_bytes_have_ended_says_so_and_goes_on_when_they_are_eased(finished, tmp_path, capfd):
    workdir, state = finished
    lines = read_run(workdir).metrics
    used = sum(line["bytes_down"] + line["bytes_up"] for line in lines[:2])
    stopped = make_config(**{"stop.bytes": used + 1.0, "stop.patience": 4})
    assert int(train(stopped, tmp_path / "run").round) == 2
    run = read_run(tmp_path / "run")
    assert run.metrics == lines[:2] and run.is_finished and run.summary["ended_by"] == "bytes"
    assert run.why_ended().startswith("stop.bytes") and summary_of(workdir)["ended_by"] == "rounds"
    capfd.readouterr()
    assert int(train(stopped, tmp_path / "run").round) == 2
    said = capfd.readouterr().err
    assert "run ended in round 2: stop.bytes" in said and "trained; with a larger stop.bytes it goes on" in said
    with pytest.raises(UserError, match=r"stop\.patience: 4 there, 3 here"):
        train(make_config(**{"stop.patience": 3}), tmp_path / "run")
    chex.assert_trees_all_equal(train(make_config(), tmp_path / "run"), state)
    assert read_run(tmp_path / "run").metrics == lines
    with pytest.raises(UserError, match=r"stop\.patience=4 needs validation images"):
        train(make_config(**{"data.validation": 0, "stop.patience": 4}), tmp_path / "other")
