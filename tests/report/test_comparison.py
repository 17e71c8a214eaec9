"""Pages that compare runs: what is one configuration, what differs, and figures against NumPy."""

import csv
import html
import json
import re
import shutil

import numpy as np
import pytest

import launch
from fedjax_ssl import UserError
from fedjax_ssl.records.groups import Group, read_groups, what_differs
from fedjax_ssl.records.lines import METRICS_SUM, checksum_of_records
from fedjax_ssl.records.runs import find_runs, read_run
from fedjax_ssl.records.sealed import read_dataset, write_dataset
from fedjax_ssl.report import style, write_comparison
from fedjax_ssl.report.comparison import paired_differences
from fedjax_ssl.report.figures import accuracy_over_bytes
from tests.helpers.reports import COUNTS, changed, not_drawn, relabelled
from tests.helpers.stub import STUB


@pytest.fixture(scope="module")
def compared(three_runs, tmp_path_factory):
    """The page that compares the three runs, and its pictures."""
    out = tmp_path_factory.mktemp("all") / "new" / "compare.html"
    words = [str(three_runs / "a"), str(three_runs / "b"), f"--out={out}", "--target=0.79"]
    with not_drawn() as given:
        assert launch.main(["report", *words]) == 0
    return out, given


def test_a_comparison_says_who_holds_labels(compared, three_runs, tmp_path, undrawn):
    assert "In all runs: 40 labels at the server." in compared[0].read_text()
    shutil.copytree(three_runs, tmp_path / "runs")
    relabelled(tmp_path / "runs" / "b" / "seed_0", {"labels": "some_clients"}, COUNTS)
    text = write_comparison([tmp_path / "runs"], tmp_path / "two.html").read_text()
    assert "In all runs" not in text
    assert "<td>a</td>" in text and '<td class="long">40 labels at the server</td>' in text
    assert '<td class="long">1 of 8 clients has labels for all its images</td>' in text


def test_a_comparison_tells_seeds_from_configurations(compared, three_runs):
    groups, skipped = read_groups([three_runs])
    assert [(group.name, len(group.runs)) for group in groups] == [("a", 2), ("b", 1)] and skipped == []
    out, _ = compared
    rows = list(csv.DictReader(out.with_suffix(".csv").open()))
    assert [row["method"] for row in rows] == ["a", "b"]
    for column, values in {"test accuracy": [90, 100], "last 5 rounds": [75, 85], "rounds to 79 %": [3, 2]}.items():
        found = [float(rows[0][f"{column}{end}"]) for end in ("", " std", " n")]
        assert found == pytest.approx([np.mean(values), np.std(values, ddof=1), 2])
    assert rows[1]["rounds to 79 %"] == "4" and rows[1]["test accuracy std"] == ""  # one seed has no deviation
    each = list(csv.DictReader(out.with_name("compare_runs.csv").open()))
    assert [(line["method"], line["seed"]) for line in each] == [("a", "0"), ("a", "1"), ("b", "0")]
    assert [line["rounds to 79 %"] for line in each] == ["3", "2", "4"]
    assert [float(line["last 5 rounds"]) for line in each] == pytest.approx([75, 85, 65])
    lines = read_run(three_runs / "a" / "seed_0").metrics
    travelled = np.cumsum([(line["bytes_down"] + line["bytes_up"]) / 1e6 for line in lines])
    assert float(rows[0]["MB to 79 %"]) == pytest.approx((travelled[2] + travelled[1]) / 2, rel=1e-3)
    assert float(rows[1]["MB to 79 %"]) == pytest.approx(travelled[3], rel=1e-3)
    text = out.read_text()
    names = {
        "test_accuracy", "test_accuracy_over_bytes", "client_accuracy", "pseudo_label_accuracy", "qualified_per_client",
    }  # fmt: skip
    assert compared[1] == dict.fromkeys(names, (4.8, True)) and text.count("<svg ") == len(names)
    assert "2 configurations, 3 runs" in text
    assert out.with_suffix(".md").read_text().count("|\n") == 4
    assert r"90.00 & 75.00" not in text and r"\toprule" in out.with_suffix(".tex").read_text()


def test_a_comparison_names_the_data_and_what_differs(compared, three_runs, tmp_path, undrawn):
    text = compared[0].read_text()
    assert "Data: digits. " in text and "data set" not in text
    (differs,) = re.findall(r"<h2>What differs</h2>.*?</section>", text)
    assert re.findall(r"<th>(.*?)</th>", differs) == ["method", "method"]
    assert re.findall(r"<td>(.*?)</td>", differs) == ["a", STUB, "b", "semifl"]
    alone = write_comparison([three_runs / "a"], tmp_path / "alone.html").read_text()
    assert "What differs" not in alone  # except the seed
    shutil.copytree(three_runs, tmp_path / "runs")
    shutil.copytree(three_runs / "a", tmp_path / "runs" / "c")
    for path in (tmp_path / "runs" / "c").rglob("config.json"):
        changed(path.parent, data={"alpha": 0.9})
    groups, _ = read_groups([tmp_path / "runs"])
    assert what_differs(groups) == {"method": [STUB, "semifl", STUB], "data.alpha": ["0.1", "0.1", "0.9"]}


def test_data_sets_are_drawn_apart(three_runs, tmp_path, undrawn):
    runs = tmp_path / "runs"
    shutil.copytree(three_runs, runs)
    shutil.copytree(runs / "b", runs / "c")
    for name, path in (("b", "/one/cells.npz"), ("c", "/two/cells.npz")):  # the same name, different data
        changed(runs / name / "seed_0", data={"source": "npz", "path": path})
        facts = {**read_dataset(runs / name / "seed_0"), "name": "cells"}
        write_dataset(runs / name / "seed_0", {**facts, "content": {**facts["content"], "test_inputs": name}})
    out = tmp_path / "compare.html"
    text = write_comparison([runs], out).read_text()
    names = ["digits", "cells (npz, /one/cells.npz, crop)", "cells (npz, /two/cells.npz, crop)"]
    assert "The runs are on 3 data sets, whose accuracies cannot be compared" in text
    assert f"Data: {', '.join(names)}. " in text
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert [caption for caption in captions if "Test accuracy." in caption] == [f"{n}. Test accuracy." for n in names]
    assert len(captions) == 15 == text.count("<svg ")
    assert [row["data set"] for row in csv.DictReader(out.with_suffix(".csv").open())] == names
    assert [row["data set"] for row in csv.DictReader((tmp_path / "compare_runs.csv").open())] == names[:1] + names
    with pytest.raises(UserError, match="no other run on the same data set"):
        write_comparison([runs], out, against=runs / "a")


def test_differences_are_paired_by_seed(three_runs, tmp_path, monkeypatch, undrawn):
    monkeypatch.setenv("HOME", str(tmp_path))
    runs, out = tmp_path / "runs", tmp_path / "compare.html"
    shutil.copytree(three_runs, runs)
    shutil.copytree(runs / "b" / "seed_0", runs / "b" / "seed_1")
    changed(runs / "b" / "seed_1", seed=1)
    assert launch.main(["report", str(runs), f"--out={out}", "--against=~/runs/a"]) == 0
    (row,) = csv.DictReader((tmp_path / "compare_differences.csv").open())
    text = out.read_text()
    of = {name: [read_run(runs / name / f"seed_{seed}") for seed in (0, 1)] for name in "ab"}
    for column, figure in {
        "test accuracy": lambda run: run.metrics[-1]["test_accuracy"],
        "last 5 rounds (test)": lambda run: np.mean([line["test_accuracy"] for line in run.metrics[-5:]]),
    }.items():
        apart = np.array([100 * (figure(b) - figure(a)) for a, b in zip(of["a"], of["b"])])
        assert apart[0] != apart[1]
        error = apart.std(ddof=1) / np.sqrt(2)
        assert [float(row[column]), float(row[f"{column} standard error"])] == pytest.approx([apart.mean(), error])
        above = int((apart > 0).sum())
        assert f"<td>{apart.mean():+.2f} ± {error:.2f} ({above} of 2 above 0)</td>" in text
        assert row[f"{column} above 0"] == str(above)
    assert (row["method"], row["minus"], row["seeds"]) == ("b", "a", "2")
    assert "Differences, paired by seed" in text


def test_a_comparison_says_which_runs_ended_early(three_runs, tmp_path, undrawn):
    """Also those of the reference, and which of its runs could not be read."""
    runs = tmp_path / "runs"
    shutil.copytree(three_runs, runs)
    early = runs / "a" / "seed_1"
    lines = (early / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]
    (early / "metrics.jsonl").write_text("".join(lines))
    summary = json.loads((early / "summary.json").read_text()) | {"rounds": 2, "ended_by": "patience"}
    summary[METRICS_SUM] = checksum_of_records(early, 2)
    (early / "summary.json").write_text(json.dumps(summary))
    shutil.copytree(early, runs / "a" / "seed_2")
    (runs / "a" / "seed_2" / "config.json").write_text("{")
    text = write_comparison([runs / "b"], tmp_path / "page.html", against=runs / "a").read_text()
    text = html.unescape(text)
    assert f"Ended before their last round: {early} (round 2 of 4: stop.patience, 0 rounds without" in text
    assert f"cannot read the run in {runs / 'a' / 'seed_2'}" in text
    (group,), _ = read_groups([runs / "a"])
    with style.styled():
        (curve,) = accuracy_over_bytes([group], "test").axes[0].lines
    assert len(curve.get_xdata()) == 2  # of both runs


def test_last_rounds_on_other_validation_images_are_not_subtracted(three_runs):
    run = read_run(three_runs / "a" / "seed_0")
    lines = [{**line, "validation_accuracy": 0.5} for line in run.metrics]
    one, other = (
        run._replace(metrics=lines, config={**run.config, "data": {**run.config["data"], "validation": number}})
        for number in (500, 1000)
    )
    (row,) = paired_differences([Group("a", [one])], Group("b", [other]))
    assert row["last 5 rounds (validation)"].present == [] and row["test accuracy"].present == [0.0]
    (row,) = paired_differences([Group("a", [one])], Group("b", [one]))
    assert row["last 5 rounds (validation)"].present == [0.0]


def test_what_lies_in_a_run_is_no_further_run(three_runs, tmp_path):
    """For example, an export for the Hub, which has the run's configuration."""
    run = shutil.copytree(three_runs / "b" / "seed_0", tmp_path / "run")
    (run / "hub").mkdir()
    shutil.copy(run / "config.json", run / "hub")
    assert find_runs(tmp_path) == [run]


def test_the_same_run_twice_is_no_further_seed(three_runs, tmp_path):
    """For example, the run before and after a change: two curves without a spread."""
    for name in ("before", "after"):
        shutil.copytree(three_runs / "a" / "seed_0", tmp_path / name)
    groups, _ = read_groups([tmp_path / "before", tmp_path / "after", tmp_path / "before", three_runs / "a"])
    assert [(group.name, len(group.runs)) for group in groups] == [("before, a", 2), ("after", 1), ("a", 1)]
