"""Reports: figures compared with other libraries, missing or unfinished data, and the page in a real browser."""

import contextlib
import csv
import html
import io
import json
import re
import shutil
import xml.dom.minidom
from unittest import mock

import numpy as np
import pytest
import scipy.stats
from PIL import Image

import launch
from fedjax_ssl import UserError, base_config
from fedjax_ssl.config import add_section, flatten
from fedjax_ssl.data import load_dataset
from fedjax_ssl.records.dataset import read_dataset, write_dataset
from fedjax_ssl.records.groups import Group, read_groups, what_differs
from fedjax_ssl.records.lines import METRICS, METRICS_SUM, checksum_of_records, read_rounds, to_line
from fedjax_ssl.records.runs import RunRecords, find_runs, read_run
from fedjax_ssl.report import run_report, style, write_comparison, write_report
from fedjax_ssl.report.comparison import bundles, paired_differences
from fedjax_ssl.report.figures import (
    MOST_COLUMNS,
    accuracy,
    accuracy_over_bytes,
    by_client,
    class_accuracy,
    confusion,
    losses,
    to_plane,
    who_holds_what,
)
from fedjax_ssl.report.look import Look, best_cells, to_csv, to_latex, to_markdown
from fedjax_ssl.report.model_card import model_card
from fedjax_ssl.report.run_report import lead_of
from fedjax_ssl.report.table import INTERVAL, NOTHING, OverSeeds, Row, make_runs_table, make_table, rounds_to
from fedjax_ssl.run.observe.summary import to_record
from fedjax_ssl.run.observe.trackers import curves
from fedjax_ssl.run.wire import Traffic
from tests.helpers.runs import ROOT
from tests.helpers.stub import STUB, make_stub_config

PICTURES = {
    "test_accuracy", "losses", "pseudo_labels", "qualified", "scores", "who_holds_what", "latent_space", "confusion",
    "class_accuracy", "client_accuracy", "bytes", "accuracy_over_bytes", "time",
}  # fmt: skip


DRAWN = {"losses", "who_holds_what", "latent_space", "confusion", "class_accuracy", "time"}  # one of each kind
NAMES = [f"$x_{number}$ <b> &amp; 100 %^~{{}}" for number in range(10)]  # of classes, no mathematics and no markup


@contextlib.contextmanager
def not_drawn(but=()):
    """Draws no pictures but some, since it takes seconds; yields name -> width in inches, and whether it has a PDF."""
    given, real = {}, style.save

    def save(figure, folder, name, pdf=False):
        given[name] = figure.get_size_inches()[0], pdf
        return real(figure, folder, name, pdf) if name in but else "<svg ></svg>"

    with mock.patch.object(style, "save", save):
        yield given


@pytest.fixture
def undrawn():
    with not_drawn() as given:
        yield given


@pytest.fixture(scope="module")
def reported_run(stub_run, tmp_path_factory):
    """A copy of the finished run with its report, the only one whose pictures are drawn, one of each kind."""
    workdir = tmp_path_factory.mktemp("reported") / "run"
    shutil.copytree(stub_run[0], workdir, ignore=shutil.ignore_patterns("checkpoints"))
    write_dataset(workdir, {**read_dataset(workdir), "class_names": NAMES})
    with not_drawn(DRAWN) as given:
        assert launch.main(["report", str(workdir)]) == 0
    assert given.keys() == PICTURES
    return workdir


def changed(folder, **fields):
    """Changes fields of the configuration in a run's folder; those of `data` are added to the others."""
    config = json.loads((folder / "config.json").read_text())
    config["data"].update(fields.pop("data", {}))
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.fixture(scope="module")
def three_runs(stub_run, tmp_path_factory):
    """Two seeds of one configuration and one seed of another, made from a finished run's records."""
    folder = tmp_path_factory.mktemp("three")
    for name, fields, better in (("a/seed_0", {"seed": 0}, 0.0), ("a/seed_1", {"seed": 1}, 0.1),
                                  ("b/seed_0", {"seed": 0, "method": "semifl"}, -0.1)):  # fmt: skip
        shutil.copytree(stub_run[0], folder / name, ignore=shutil.ignore_patterns("checkpoints"))
        changed(folder / name, **fields)
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["test_accuracy"] = 0.5 + 0.1 * line["round"] + better
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        summary = json.loads((folder / name / "summary.json").read_text())
        summary[METRICS_SUM] = checksum_of_records(folder / name, summary["rounds"])
        (folder / name / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture(scope="module")
def compared(three_runs, tmp_path_factory):
    """The page that compares the three runs, and its pictures."""
    out = tmp_path_factory.mktemp("all") / "new" / "compare.html"
    words = [str(three_runs / "a"), str(three_runs / "b"), f"--out={out}", "--target=0.79"]
    with not_drawn() as given:
        assert launch.main(["report", *words]) == 0
    return out, given


def test_a_run_keeps_what_its_report_needs(stub_run):
    workdir, _ = stub_run
    run = read_run(workdir)
    assert run.is_finished
    (kept,) = run.snapshots().values()  # of the last round
    assert np.mean(kept["predictions"] == kept["labels"]) == pytest.approx(run.metrics[-1]["test_accuracy"])
    assert kept["embeddings"].shape == (360, 8) and len(kept["embedding_labels"]) == 360
    counts, labels = run.class_counts(), load_dataset(make_stub_config().data).y_train
    with np.load(workdir / "partition.npz") as partition:
        held = np.split(partition["client_index"], np.cumsum(partition["client_size"])[:-1])
        anchors = partition["server_index"]
    assert counts["clients"].tolist() == [[int(np.sum(labels[rows] == c)) for c in range(10)] for rows in held]
    assert counts["server"].tolist() == [4] * 10 == [int(np.sum(labels[anchors] == c)) for c in range(10)]
    assert counts["train"].sum() == len(labels)


def test_every_picture_is_a_file_of_its_own(reported_run):
    for kind in ("png", "svg"):
        assert {path.stem for path in (reported_run / "figures").glob(f"*.{kind}")} == DRAWN
    for path in (reported_run / "figures").glob("*.png"):
        shades = np.asarray(Image.open(path).convert("L"))
        assert len(np.unique(shades)) > 20, path.name
    page, on_white = (reported_run / "report.html").read_text(), '<rect width="100%" height="100%" fill="#ffffff"/>'
    for path in (reported_run / "figures").glob("*.svg"):
        assert path.read_text().count(on_white) == 1 and on_white not in page
        xml.dom.minidom.parse(str(path))
    assert page.count("<svg ") == len(PICTURES) and "http" not in page.replace("http://www.w3.org/", "")
    assert "stub on digits, seed 0" in page
    card = (reported_run / "MODEL_CARD.md").read_text()
    accuracy = json.loads((reported_run / "summary.json").read_text())["test_accuracy"]
    assert (
        f"| test accuracy | {100 * accuracy:.2f} % of the last model |" in card
        and "(best" not in card
        and str(reported_run) in card
    )
    assert "no round was picked by it" in card and "held out for validation" not in card
    run = read_run(reported_run)
    sent = run._replace(metrics=[{**line, "bytes_down": 3e6, "bytes_up": 1e6} for line in run.metrics])
    assert "| communication | 12.0 MB down, 4.0 MB up |" in model_card(sent)
    assert run_report._main_figures(run)["test accuracy"] == f"{100 * accuracy:.2f} % of 360"
    assert {"down": "12.0 MB", "up": "4.0 MB"}.items() <= run_report._main_figures(sent).items()
    assert all(f"<dt>{name}</dt><dd>{number}</dd>" in page for name, number in run_report._main_figures(run).items())


def test_letters_without_a_font_are_told_once(tmp_path, capfd):
    with style.styled():
        for name in ("one", "two"):
            figure, axes = style.subplots()
            axes.set_title("a private letter: \ue000")
            style.save(figure, tmp_path, name)
    said = capfd.readouterr().err
    assert said.count("letters that no font here has") == 1 and "Glyph" not in said
    assert (tmp_path / "two.svg").exists()


def test_pictures_have_the_sizes_of_a_paper(three_runs, tmp_path, capsys):
    """In inches; the file's are points, 72 to the inch."""
    run = three_runs / "a" / "seed_0"
    with style.styled("column"):
        style.save(losses(read_run(run)), tmp_path, "losses")
    assert re.search(rb"/MediaBox \[ 0 0 (\S+) ", (tmp_path / "losses.pdf").read_bytes())[1] == b"234"
    with not_drawn() as given:
        assert launch.main(["report", str(shutil.copytree(run, tmp_path / "run")), "--figures=column"]) == 0
    widths = {name: width for name, (width, _) in given.items()}
    assert widths == {name: 6.75 if name in ("bytes", "who_holds_what") else 3.25 for name in PICTURES}
    with style.styled("page"):
        assert style.subplots(figsize=style.SMALL)[0].get_size_inches().tolist() == [6.75, 3.2]
    assert launch.main(["report", str(run), "--figures=colum"]) == 2
    assert "the nearest is column" in capsys.readouterr().err


def test_a_picture_is_the_same_when_it_is_drawn_again(reported_run, tmp_path, monkeypatch):
    monkeypatch.setattr(style, "KINDS", ("svg",))
    with style.styled():
        style.save(losses(read_run(reported_run)), tmp_path, "losses")
    assert (tmp_path / "losses.svg").read_bytes() == (reported_run / "figures" / "losses.svg").read_bytes()


COUNTS = {  # 3 clients, 2 classes
    "train": np.array([9, 8]), "server": np.array([0, 0]), "clients": np.array([[5, 2], [0, 4], [4, 1]]),
    "labelled": np.array([[1, 1], [0, 2], [0, 0]]), "validation": np.array([0, 0]),
}  # fmt: skip
AT_SERVER = COUNTS | {"server": np.array([2, 1]), "labelled": np.zeros((3, 2), int)}
SETTINGS = {  # fields of data -> who holds labels
    "40 labels at the server": {},
    "1 label at the server": {"server_labels": 1},
    "every client has labels for 10 % of its images: 4 in all": {"labels": "clients"},
    "every client has labels for 0.5 % of its images: 4 in all": {"labels": "clients", "labelled_share": 0.005},
    "every client has labels for 2 images of each of its classes: 4 in all": {
        "labels": "clients", "labels_per_class": 2
    },
    "clients have labels for 1,000 images, divided apart from the others: 4 in all": {
        "labels": "clients", "num_labelled": 1000
    },
    "clients have labels for the images that mine.npz names: 4 in all": {
        "labels": "clients", "partition_file": "mine.npz"
    },
    "1 of 8 clients has labels for all its images: 4 in all": {"labels": "some_clients"},
    "2 of 8 clients have labels for all their images: 4 in all": {"labels": "some_clients", "labelled_clients": 2},
    "each client has labels for a share of its own of its images, drawn by beta(0.3,0.3): 4 in all": {
        "labels": "profile", "server_labels": 0
    },
    "40 labels at the server, and each client has labels for a share of its own of its images, 0 to 50 %: 4 in all": {
        "labels": "profile", "label_profile": [0, 0.5, 0.1, 0, 0, 0, 0, 0]
    },
    "every client has labels for all its images": {"labels": "some_clients", "reveal_labels": True},
    "40 labels at the server, and every client has labels for all its images": {"reveal_labels": True},
    "the server has all images, with their labels": {"centralised": True},
}  # fmt: skip


def relabelled(folder, fields, counts):
    """Changes the data fields and the class counts of a run's folder."""
    changed(folder, data=fields)
    classes = json.loads((folder / "dataset.json").read_text())["num_classes"]
    of_clients = {name: counts[name] for name in ("unlabelled", "unknown") if name in counts}
    wide = {name: np.pad(of, [(0, 0)] * (of.ndim - 1) + [(0, classes - of.shape[-1])]) for name, of in counts.items()}
    np.savez(folder / "class_counts.npz", **{**wide, **of_clients})
    return read_run(folder)


def test_who_holds_labels_is_said_in_words(three_runs, tmp_path):
    folder = shutil.copytree(three_runs / "a" / "seed_0", tmp_path / "run")
    own = json.loads((folder / "config.json").read_text())["data"]
    for words, fields in SETTINGS.items():
        run = relabelled(folder, {**own, **fields}, COUNTS)
        card = model_card(run)
        assert f"Labels: {words}.\n" in card and f"| labels | {words}" in card
        assert ("the labels of the clients' images were revealed" in card) == run.labels_revealed
        assert f"clients a round, {words}; {folder}" in lead_of(run)
        (folder / "class_counts.npz").unlink()  # the number of labels is unknown
        assert f"clients a round, {words.removesuffix(': 4 in all')}; {folder}" in lead_of(read_run(folder))
    of_data = COUNTS | {"unlabelled": np.array([1, 2, 3]), "unknown": np.array([1, 0, 0]), "server": np.array([3, 2])}
    words = "5 labels at the server, and the data have labels for 4 of the clients' 23 images"
    assert words in lead_of(relabelled(folder, {**own, "labels": "profile"}, of_data))


def test_the_picture_of_clients_shows_which_images_have_labels():
    def drawn(counts):
        with style.styled():
            figure = who_holds_what(counts, ["cat", "dog"])
        heats = {axes.get_title(): axes.images[0].get_array() for axes in figure.axes if axes.images}
        (bars,) = (axes for axes in figure.axes if axes.containers)
        return heats, {bar.get_label(): [(p.get_x(), p.get_width()) for p in bar] for bar in bars.containers}

    heats, bars = drawn(COUNTS)
    assert list(heats) == ["Images at each client", "Those of them that have labels"]
    for title, name in zip(heats, ("clients", "labelled")):
        np.testing.assert_array_equal(heats[title].filled(0), COUNTS[name].T)
        np.testing.assert_array_equal(heats[title].mask, COUNTS[name].T == 0)  # grey, unlike one image
    assert bars == {
        "the training set": [(0, 9), (0, 8)],
        "at clients, with labels": [(0, 1), (0, 3)],
        "at clients, without labels": [(1, 8), (3, 4)],
    }
    for kind in ("unlabelled", "unknown"):
        figure = who_holds_what(COUNTS | {kind: np.array([1, 2, 3])}, ["cat", "dog"], "rows")
        titles = {axes.get_title() for axes in figure.axes}
        assert {"Rows at each client", "22 rows at 3 clients,\nlabels: 4 at clients, 0 at the server"} <= titles
    heats, bars = drawn(AT_SERVER)
    assert list(heats) == ["Images at each client"]
    assert bars == {
        "the training set": [(0, 9), (0, 8)],
        "at clients, without labels": [(0, 9), (0, 7)],
        "at the server, with labels": [(9, 2), (7, 1)],
    }
    _, bars = drawn(COUNTS | {"server": np.array([2, 1])})
    assert list(bars) == [*list(drawn(COUNTS)[1]), "at the server, with labels"]
    assert bars["at the server, with labels"] == [(9, 2), (7, 1)]
    _, bars = drawn(AT_SERVER | {"validation": np.array([1, 3])})
    assert bars["held out for validation"] == [(11, 1), (8, 3)]


def test_the_picture_of_many_clients_counts_those_that_have_so_many_images():
    rng = np.random.default_rng(0)
    clients = np.stack([rng.integers(0, 3, MOST_COLUMNS + 1), rng.zipf(1.5, MOST_COLUMNS + 1).clip(max=500)], axis=1)
    counts = AT_SERVER | {"clients": clients, "labelled": np.zeros_like(clients)}
    with style.styled():
        figure = who_holds_what(counts, ["cat", "dog"])
    axes = next(axes for axes in figure.axes if axes.get_title() == "Images at each client")
    (mesh,) = axes.collections
    shown, edges = mesh.get_array().filled(0), mesh.get_coordinates()[0, :, 0]
    for own, row in zip(clients.T, shown):
        for low, high, number in zip(edges, edges[1:], row):
            assert number == sum(low < have < high for have in own)
        assert row.sum() == sum(own > 0)  # every client with an image of the class is in a column
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog"] and axes.get_xscale() == "log"
    figure = who_holds_what({**counts, "clients": clients[1:], "labelled": counts["labelled"][1:]}, ["cat", "dog"])
    assert next(axes.images for axes in figure.axes if axes.get_title() == "Images at each client")  # one by one


@pytest.mark.parametrize("labels", ["some_clients", "profile"])
def test_a_report_of_labels_at_clients(three_runs, tmp_path, labels, undrawn):
    shutil.copytree(three_runs / "a" / "seed_0", tmp_path / "run", ignore=shutil.ignore_patterns("snapshots"))
    held = np.random.default_rng(0).integers(0, 9, (8, 10))
    labelled = held // 3 if labels != "some_clients" else held * (np.arange(8) == 5)[:, None]
    none = np.zeros(10, int)
    counts = {"train": held.sum(axis=0), "server": none, "clients": held, "labelled": labelled, "validation": none}
    run = relabelled(tmp_path / "run", {"labels": labels}, counts)
    text = write_report(run.folder).read_text()
    without = "7 of 8 clients have no label" if labels == "some_clients" else "0 of 8 clients have no label"
    assert without in text and f"{labelled.sum()} in all" in text


def test_a_comparison_says_who_holds_labels(compared, three_runs, tmp_path, undrawn):
    assert "In all runs: 40 labels at the server." in compared[0].read_text()
    shutil.copytree(three_runs, tmp_path / "runs")
    relabelled(tmp_path / "runs" / "b" / "seed_0", {"labels": "some_clients"}, COUNTS)
    text = write_comparison([tmp_path / "runs"], tmp_path / "two.html").read_text()
    assert "In all runs" not in text
    assert "<td>a</td>" in text and '<td class="long">40 labels at the server</td>' in text
    assert '<td class="long">1 of 8 clients has labels for all its images</td>' in text


def test_an_unfinished_run_is_reported_as_far_as_it_goes(stub_run, tmp_path, undrawn):
    run = shutil.copytree(stub_run[0], tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:30])  # killed while writing
    for name in ("summary.json", "dataset.json", "class_counts.npz"):
        (run / name).unlink()
    shutil.rmtree(run / "snapshots")
    text = write_report(run).read_text()
    assert "not finished: it stands at round 2 of 4" in text
    assert "Unfinished" in (run / "MODEL_CARD.md").read_text()
    missing = {"latent_space", "confusion", "class_accuracy", "client_accuracy", "who_holds_what"}
    assert undrawn.keys() == PICTURES - missing


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


def test_a_number_of_each_client_is_in_the_records_and_a_curve_of_its_own(tmp_path):
    """Client 1 never has one, and client 2 only after the first round."""
    traffic, given = Traffic(1, 0, 0, 0, 0, 1, 1), [[0.75, np.nan, np.nan], [0.5, np.nan, 0.25]]
    metrics = [{"round": 1 + number, "uploads": 1, "weight": of_round} for number, of_round in enumerate(given)]
    lines = [to_record({name: np.array(value) for name, value in of.items()}, traffic) for of in metrics]
    (tmp_path / METRICS).write_text("".join(map(to_line, lines)))
    run = RunRecords(tmp_path, {}, read_rounds(tmp_path / METRICS).lines, [], None)
    assert [line["weight"] for line in run.metrics] == [[0.75, None, None], [0.5, None, 0.25]]
    assert curves(run.metrics[-1]).keys() == {"uploads", "bytes/down", "bytes/up"}
    (values,) = run.by_client().values()
    np.testing.assert_array_equal(values, given)
    with style.styled():
        first, third = by_client(run.values("round"), values, "weight").axes[0].lines
    assert [line.get_label() for line in (first, third)] == ["client 0", "client 2"]
    assert (first.get_xydata().tolist(), third.get_xydata().tolist()) == ([[1, 0.75], [2, 0.5]], [[2, 0.25]])


def test_a_name_of_any_letters_is_in_the_legend(three_runs):
    groups, _ = read_groups([three_runs])
    with style.styled():
        (legend,) = accuracy([groups[0], groups[1]._replace(name="_b")], "test").legends
    assert [text.get_text() for text in legend.texts] == ["a", "\u200b_b"]


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
    again = [tmp_path / place / "again" for place in "xyz"]
    for lanes, path in zip((4, 8, 8), again):
        shutil.copytree(tmp_path / "after", path)
        changed(path, lanes=lanes, data={"alpha": 0.9 if lanes == 8 else 0.5})
    names = [group.name for group in read_groups(again)[0]]
    assert names == ["again (data.alpha=0.5)", *(f"again ({path})" for path in again[1:])]


def test_a_model_card_of_a_run_that_diverged(three_runs):
    run = read_run(three_runs / "b" / "seed_0")
    run.metrics[-1]["test_loss"] = None
    data = run.config["data"]
    assert "| test loss | - |" in model_card(run) and "| division | lda (alpha 0.1), seed 0 |" in model_card(run)
    for fields, words in [
        ({"partition": "dirichlet_clients"}, "dirichlet_clients (alpha 0.1)"),
        ({"partition": "shards"}, "shards (classes_per_client 2)"),
        ({"partition": "iid"}, "iid"),
        ({"partition_file": "mine.npz"}, "as saved in mine.npz"),
    ]:
        card = model_card(run._replace(config={**run.config, "data": {**data, **fields}}))
        assert f"| division | {words}, seed 0 |" in card


def test_where_no_client_sends_anything_the_server_trains_alone(three_runs):
    run = read_run(three_runs / "a" / "seed_0")
    for bytes_up, alone in ((0, True), (1, False)):
        sent = run._replace(metrics=[{**line, "bytes_up": bytes_up} for line in run.metrics])
        card, lead = model_card(sent), lead_of(sent)
        assert ("trained at the server alone" in card) == ("trained at the server alone" in lead) == alone
        assert ("clients each |" in card) == ("clients a round" in lead) == (not alone)


def test_the_card_of_a_method_from_a_file_says_how_to_train_it_again(three_runs, registry, tmp_path, monkeypatch):
    """Also with fields of its own."""
    folder, config = shutil.copytree(three_runs / "a" / "seed_0", tmp_path / "run"), base_config()
    config.method, config.snapshot_rounds = f"{ROOT / 'examples' / 'co_training.py'}:co_training", (1, 2)
    add_section(config)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (code,) = re.findall(r"```python\n(.*?)```", model_card(read_run(folder)).partition("## Train it again")[2], re.S)
    trained = []
    monkeypatch.setattr("fedjax_ssl.train", lambda *given: trained.append(given))
    exec(code)
    ((again, where),) = trained
    assert flatten(again) == flatten(config) and where == "runs/again"


def test_tables_in_three_languages(three_runs):
    run = read_run(three_runs / "a" / "seed_0")
    rows = [Row("50 % & more_", {"data.alpha": 0.1}, [run], 3, True)]
    table = make_table(rows, 0.99)
    shown = dict(zip(table[0], to_markdown(table).splitlines()[2].strip("| ").split(" | ")))
    assert shown["method"] == "50 % & more_ (labels revealed)" and shown["seeds"] == "1 of 3"
    assert shown["rounds to 99 %"] == shown["MB to 99 %"] == "-"
    (row,) = csv.DictReader(io.StringIO(to_csv(table)))
    assert (row["seeds"], row["seeds planned"], row["rounds to 99 %"], row["MB to 99 %"]) == ("1", "3", "", "")
    (line,) = csv.DictReader(io.StringIO(to_csv(make_runs_table(rows, 0.99))))
    for cells in (row, line):  # all cells but the name are numbers or empty
        assert all(name == "method" or text == "" or np.isfinite(float(text)) for name, text in cells.items())
    assert to_markdown(table).splitlines()[1] == "| --- " * len(table[0]) + "|"
    latex = to_latex(table)
    assert r"50 \% \& more\_ (labels revealed) & 0.1 & 1 of 3" in latex and latex.count(r"\\") == 2


def over_seeds(*values, seeds=(0, 1, 2)):
    return OverSeeds(list(values), seeds)


def test_the_best_and_what_chance_may_tell_from_it_is_bold():
    """Compares with SciPy's paired t-test: p above 0.05 counts as equally good."""
    best, close, far, one = [90.0, 92.0, 95.0], [89.0, 92.5, 94.0], [80.0, 83.0, 84.5], [90.0]
    assert scipy.stats.ttest_rel(best, close).pvalue > 0.05 > scipy.stats.ttest_rel(best, far).pvalue
    rows = {"best": over_seeds(*best), "close": over_seeds(*close), "far": over_seeds(*far),
            "other seeds": over_seeds(*close, seeds=(3, 4, 5)), "one": over_seeds(*one, seeds=(0,)),
            "bound (labels revealed)": over_seeds(99.0, 99.0, 99.0)}  # fmt: skip
    low = {"best": over_seeds(1.0, 1.1, 1.2), "far": over_seeds(5.0, 5.1, 5.2)}
    nothing = over_seeds(None, None, None)
    spreads = ("spread over clients", "global model, own tests: spread over clients")
    table = [
        {"method": name, "test accuracy": cell, **dict.fromkeys(spreads, low.get(name, nothing)),
         "seconds": OverSeeds([1.0], (0,), NOTHING)}
        for name, cell in rows.items()
    ]  # fmt: skip
    assert best_cells(table) == {(0, "test accuracy"), (1, "test accuracy"), *((0, name) for name in spreads)}
    assert best_cells(table[:1]) == set()  # a single row has no best
    lines = to_markdown(table, best_cells(table)).splitlines()[2:]
    assert lines[0].startswith(f"| best | **92.33 ± 2.52** |{2 * ' **1.10 ± 0.10** |'} 1 |") and "**" not in lines[2]
    latex = to_latex(table, {(0, "test accuracy")}, r"50 \% of all", "tab:one")
    assert r"best & \textbf{92.33 ± 2.52} &" in latex
    head = [r"\begin{table}", r"\centering", r"\caption{50 \% of all}", r"\label{tab:one}"]
    assert latex.splitlines()[:4] == head and latex.endswith("\\end{tabular}\n\\end{table}\n")


def test_no_bold_letters_across_data_sets_or_for_what_is_no_number():
    high, low, nothing = over_seeds(90.0, 91.0), over_seeds(50.0, 51.0), over_seeds(float("nan"), 99.0)
    of = [("MNIST", high), ("MNIST", low), ("MNIST", nothing), ("CIFAR-10", low), ("CIFAR-10", over_seeds(9.0, 9.5))]
    for column in ("data set", "data.alpha"):
        table = [{"method": "a", column: name, "accuracy": cell} for name, cell in of]
        assert best_cells(table) == {(0, "accuracy"), (3, "accuracy")}


def test_names_that_markdown_or_latex_would_read_as_their_own():
    table = [{"method": name} for name in ("A | x", "*B", "[C]", "~^")]
    assert to_markdown(table).splitlines()[2:5] == [r"| A \| x |", "| *B |", "| [C] |"]
    escaped = r"\textasciitilde \textasciicircum "
    assert to_latex(table).splitlines()[4:8] == [r"A | x \\", r"{}*B \\", r"{}[C] \\", rf"{escaped} \\"]
    angles = to_latex([{"a<b": "x > 0"}], caption="$p < 1$")  # the caption is LaTeX
    assert all(text in angles for text in (r"a\textless{}b \\", r"x \textgreater{} 0 \\", "$p < 1$"))


def test_no_cell_of_a_csv_is_a_formula():
    """Spreadsheets compute a text that begins with one of four signs; numbers stay numbers."""
    named = ["=1+1", "+x", "-x", "@SUM(1)", "-1", "+1.5e3", "plain", "a=b"]
    table = [{"method": name, "=x": -2.5} for name in named]
    rows = list(csv.reader(io.StringIO(to_csv(table))))
    assert rows[0] == ["method", "'=x"] and {row[1] for row in rows[1:]} == {"-2.5"}
    assert [row[0] for row in rows[1:]] == ["'=1+1", "'+x", "'-x", "'@SUM(1)", *named[4:]]


def test_a_run_of_a_kind_that_the_library_lacks_is_one_line(stub_run, tmp_path, capfd):
    from fedjax_ssl.records.dataset import read_dataset, write_dataset

    shutil.copytree(stub_run[0], tmp_path / "run")
    write_dataset(tmp_path / "run", {**read_dataset(tmp_path / "run"), "kind": "sound"})
    for words in (
        ["report", str(tmp_path / "run")],
        ["predict", f"--workdir={tmp_path / 'run'}", "--npz=x", "--out=y.npz", "--allow_code"],
    ):
        assert launch.main(words) == 2
        error = capfd.readouterr().err.splitlines()[-1]
        assert error == "error: the data are of the kind 'sound'; known: image, features, table, text"


def test_intervals_are_those_of_student():
    values = [90.0, 92.0, 95.0]
    low, high = scipy.stats.t.interval(0.95, 2, np.mean(values), scipy.stats.sem(values))
    (row,) = Look(("method", "accuracy"), True).of([{"method": "a", "accuracy": over_seeds(*values), "seconds": 1}])
    assert str(row["accuracy"]) == f"92.33 ± {(high - low) / 2:.2f}" and list(row) == ["method", "accuracy"]
    assert [str(OverSeeds(found, spread=INTERVAL)) for found in ([90.0, None], [None])] == ["90.00 (1 of 2)", "-"]


def test_a_table_of_chosen_columns(three_runs, tmp_path, undrawn):
    out, runs = tmp_path / "all.html", [str(three_runs / "a"), str(three_runs / "b")]
    words = ["--columns=method, seeds,test accuracy", "--interval", "--caption=Ours.", "--label=tab:ours"]
    assert launch.main(["report", *runs, f"--out={out}", *words]) == 0
    lines = (tmp_path / "all.md").read_text().splitlines()
    assert lines[0] == "| method | seeds | test accuracy |" and len(lines) == 4
    latex = (tmp_path / "all.tex").read_text()
    assert r"\caption{Ours.}" in latex and r"\label{tab:ours}" in latex and r"\textbf{" not in latex
    assert "half of the 95 % confidence interval over seeds" in out.read_text()
    (line, _) = csv.DictReader((tmp_path / "all.csv").open())
    assert "seconds" in line and line["method"].count("*") == 0


def test_an_accuracy_of_float32_reaches_its_decimal_number():
    for target in (0.1, 0.9):  # float32 rounds one up, the other one down
        for value in (target, float(np.float32(target))):
            run = RunRecords(None, {"data": {"validation": 0}}, [{"round": 1, "test_accuracy": value}], [], None)
            assert rounds_to(run, target) == 1 and rounds_to(run, target + 1e-6) is None


def test_many_groups_are_drawn_apart():
    groups = [Group(f"method {number}/alpha={alpha}", []) for number in range(14) for alpha in (0.1, 1.0)]
    found = bundles(groups)
    assert list(found) == ["alpha=0.1 (part 1)", "alpha=0.1 (part 2)", "alpha=1.0 (part 1)", "alpha=1.0 (part 2)"]
    assert [group.name for group in found["alpha=0.1 (part 2)"]] == ["method 12", "method 13"]
    assert bundles(groups[:3]) == {"": groups[:3]}


def test_the_pictures_of_classes_show_percent_of_each_class():
    """Of four cats three are right, of two dogs one; the eel is taken for a cat."""
    shown = np.array([0, 0, 0, 0, 1, 1, 2]), np.array([0, 0, 0, 1, 1, 0, 0]), ["cat", "dog", "eel"]
    with style.styled():
        matrix, bars = confusion(*shown).axes[0], class_accuracy(*shown).axes[0]
    np.testing.assert_allclose(matrix.images[0].get_array(), [[75, 25, 0], [50, 50, 0], [100, 0, 0]])
    assert (matrix.get_xlabel(), matrix.get_ylabel()) == ("classified as", "class")
    cells = {(0, 0): "75", (1, 0): "25", (0, 1): "50", (1, 1): "50", (0, 2): "100"}  # (column, row)
    assert {text.get_position(): text.get_text() for text in matrix.texts} == cells
    assert [bar.get_width() for bar in bars.patches] == [75, 50, 0]
    np.testing.assert_allclose(bars.lines[0].get_xdata(), 100 * 4 / 7)


def test_the_plane_keeps_neighbours_together():
    rng = np.random.default_rng(0)
    directions = np.eye(3, 8)[rng.integers(0, 3, 60)]
    embeddings = rng.uniform(1, 9, (60, 1)) * (directions + 0.05 * rng.normal(size=(60, 8)))  # lengths mean nothing
    plane, group = to_plane(embeddings), directions.argmax(axis=1)
    distances = np.linalg.norm(plane[:, None] - plane[None], axis=-1) + 1e9 * np.eye(60)
    assert np.all(group[distances.argmin(axis=1)] == group)
    np.testing.assert_array_equal(to_plane(embeddings[:6]), to_plane(embeddings[:6]))
    for collapsed in (np.zeros((40, 8)), np.ones((40, 8)), rng.uniform(1, 9, (40, 1))):  # t-SNE would crash
        assert to_plane(collapsed).shape == (40, 2) and np.ptp(to_plane(collapsed)) <= 1
    assert to_plane(np.ones((2, 5))).shape == (2, 2) and np.isfinite(to_plane(np.zeros((1, 1)))).all()


def test_bad_input_is_one_line_and_loses_nothing(reported_run, three_runs, tmp_path, capfd, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    for name in ("config.json", "about.json"):
        shutil.copy(reported_run / name, tmp_path / "begun")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for words, line in [
        ([], "which report? python launch.py report RUN..."),
        ([str(tmp_path / "nowhere")], "holds no run"),
        ([str(tmp_path / "empty")], "holds no run"),
        ([str(tmp_path / "begun")], "has not finished a round yet"),
        ([str(tmp_path / "broken")], "cannot read the run"),
        ([str(reported_run), str(tmp_path / "empty"), f"--out={tmp_path / 'c.html'}"], "holds no run"),
        ([str(reported_run), str(reported_run)], "--out=NAME.html"),
        ([str(reported_run), f"--out={tmp_path / 'c.txt'}"], "NAME.html"),
        ([str(reported_run), f"--out={tmp_path / 'c.html'}", "--target=90"], "above 0 and at most 1"),
        ([str(reported_run), f"--out={reported_run / 'config.json' / 'c.html'}"], "cannot write"),
        ([str(reported_run), f"--against={reported_run}"], "--out=NAME.html"),
        ([str(reported_run), "--interval"], "--out=NAME.html"),
        ([str(reported_run), f"--out={tmp_path / 'c.html'}", "--columns=acuracy"], "the table has no column 'acuracy'"),
        ([str(reported_run), f"--out={tmp_path / 'c.html'}", f"--against={three_runs}"], "need one configuration"),
        (
            [str(reported_run), f"--out={tmp_path / 'c.html'}", f"--against={reported_run}"],
            "no other run on the same data set has a seed",
        ),
    ]:
        assert launch.main(["report", *words]) == 2, words
        error = capfd.readouterr().err.strip()
        assert error.startswith("error: ") and line in error and "\n" not in error, error
    assert not (tmp_path / "c.html").exists() and sorted(path.name for path in tmp_path.iterdir()) == [
        "begun", "broken", "empty"
    ]  # fmt: skip

    # Root may write anywhere, so the test itself refuses.
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    page = (reported_run / "report.html").read_text()
    monkeypatch.setattr("fedjax_ssl.report.style.replaced", refuse)
    with pytest.raises(UserError, match=r"cannot write .*report.html: Permission denied"):
        write_report(reported_run)
    assert (reported_run / "report.html").read_text() == page


# Run in the page: what is drawn, and whether something is wider than the window.
LOOK = """() => ({
  overflow: document.documentElement.scrollWidth - window.innerWidth,
  pictures: [...document.querySelectorAll('figure svg')].map(svg => {
    const box = svg.getBoundingClientRect();
    return {name: svg.getAttribute('aria-label'), width: box.width, height: box.height,
            parts: svg.querySelectorAll('path, use, image').length};
  }),
})"""


@pytest.fixture(scope="module")
def drawn(three_runs):
    """The pages of a run and of a comparison, with all pictures."""
    return write_report(three_runs / "a" / "seed_0"), write_comparison([three_runs], three_runs / "compare.html")


@pytest.mark.test_all
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_pages_in_a_browser(browser, drawn, width, scheme):
    for path, count in zip(drawn, (len(PICTURES), 5)):
        tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        complaints, asked = [], []
        tab.on("console", lambda message, seen=complaints: seen.append(message.text))
        tab.on("pageerror", lambda error, seen=complaints: seen.append(str(error)))
        tab.on("request", lambda request, seen=asked: seen.append(request.url))
        tab.goto(path.as_uri())
        seen = tab.evaluate(LOOK)
        assert complaints == [] and [url for url in asked if not url.startswith(("file:", "data:"))] == []
        assert seen["overflow"] <= 0, "the page is wider than the window"
        assert len(seen["pictures"]) == count
        for number, picture in enumerate(seen["pictures"]):
            assert picture["width"] > 250 and picture["height"] > 100 and picture["parts"] > 20, picture
            screenshot = tab.locator("figure svg").nth(number).screenshot()
            shades = np.asarray(Image.open(io.BytesIO(screenshot)).convert("L"))
            ground = int(np.median(shades))
            assert np.mean(np.abs(shades.astype(int) - ground) > 60) > 0.005, picture  # visible ink
            assert (ground > 200) == (scheme == "light") or picture["name"].startswith(("Confusion", "Who")), picture
        if path == drawn[0]:
            fields = tab.get_by_text("client.momentum")
            assert not fields.is_visible()  # folded, like all fields with default values
            tab.get_by_text("fields at their defaults").click()
            assert fields.is_visible()
        tab.close()
