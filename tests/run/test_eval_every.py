"""A run that is not tested in each round: its records, summary, tables and pictures, beside one that is."""

import itertools

import numpy as np
import pytest

from fedjax_ssl import train
from fedjax_ssl.records.groups import Group
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.report import figures, model_card, style
from fedjax_ssl.report.comparison import paired_differences
from fedjax_ssl.report.table import LAST, Row, make_runs_table
from fedjax_ssl.run.machine import Machine
from tests.helpers.stub import make_stub_config

pytestmark = pytest.mark.test_all

TESTED = [1, 3, 6, 8]  # the first round, every third and the last


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of seed 0: always tested, and sometimes, trained beside another seed."""
    folder = tmp_path_factory.mktemp("tests")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Machine, "seeds_together", lambda self, num_seeds: num_seeds)
        train(make_stub_config(num_rounds=8), folder / "always")
        train(make_stub_config(num_rounds=8, eval_every=3, seeds=(0, 1)), folder / "some")
    return read_run(folder / "always"), read_run(folder / "some" / "seed_0")


def test_the_best_round_and_the_table_are_of_the_rounds_with_a_test(runs):
    always, some = runs
    accuracy = {line["round"]: line["test_accuracy"] for line in always.metrics if line["round"] in TESTED}
    best = max(accuracy, key=accuracy.get)
    assert some.best() == (accuracy[best], best) == (some.summary["best_test_accuracy"], some.summary["best_round"])
    assert some.summary["test_accuracy"] == some.tested("test_accuracy") == accuracy[8]
    target = sorted(accuracy.values())[-2]
    (row,) = make_runs_table([Row("some", {}, [some], 1, False)], target)
    assert row["test accuracy"] == 100 * accuracy[8] and row["best"] == 100 * accuracy[best]
    assert row[f"last {LAST} rounds"] == pytest.approx(100 * np.mean(list(accuracy.values())))
    first = next(number for number, value in accuracy.items() if value >= target)
    assert row[f"rounds to {100 * target:g} %"] == first
    (difference,) = paired_differences([Group("some", [some])], Group("always", [always]))
    of_always = [line["test_accuracy"] for line in always.metrics[-LAST:]]
    (found,) = difference[f"last {LAST} rounds (test)"].values
    assert found == pytest.approx(100 * (np.mean(list(accuracy.values())) - np.mean(of_always)), abs=1e-9)
    assert f"| test accuracy | {100 * accuracy[8]:.2f} % of the last model |" in model_card.model_card(some)


def test_curves_lead_from_test_to_test(runs):
    _, some = runs
    with style.styled():
        for figure, line in ((figures.accuracy([Group("some", [some])], "test"), 0), (figures.losses(some), 0)):
            drawn = figure.axes[0].lines[line]
            assert drawn.get_xdata().tolist() == TESTED and np.isfinite(drawn.get_ydata()).all()
        (own,) = [line for line in figures.losses(some).axes[0].lines if line.get_label() == "client"]
        assert own.get_xdata().tolist() == list(range(1, 9))


def test_a_run_that_ends_between_tests_has_the_last_models_test_in_its_summary(runs, tmp_path):
    """Bytes end it in round 5, which has no test; the figures come from the last snapshot."""
    always, some = runs
    used = list(itertools.accumulate(line["bytes_down"] + line["bytes_up"] for line in some.metrics))[4]
    train(make_stub_config(num_rounds=8, eval_every=3, **{"stop.bytes": used + 1.0}), tmp_path)
    run, of_fifth = read_run(tmp_path), always.metrics[4]
    assert run.metrics[-1]["round"] == 5 and not [name for name in run.metrics[-1] if name.startswith("test_")]
    for name in ("test_accuracy", "test_loss"):
        assert run.tested(name) == run.summary[name] == pytest.approx(of_fifth[name], rel=1e-5)
    assert run.summary["best_round"] in (1, 3)
    assert run._replace(summary=None).tested("test_accuracy") is None  # as of a run that a signal has stopped
