"""A run's report and card: figures, missing or unfinished data, and the pages in a real browser."""

import io
import json
import re
import shutil
import xml.dom.minidom

import numpy as np
import pytest
from PIL import Image

import launch
from fedjax_ssl import UserError, base_config
from fedjax_ssl.config import add_section, flatten
from fedjax_ssl.records.runs import read_run
from fedjax_ssl.records.sealed import read_dataset, write_dataset
from fedjax_ssl.report import run_report, style, write_comparison, write_report
from fedjax_ssl.report.figures import losses
from fedjax_ssl.report.model_card import model_card
from fedjax_ssl.report.run_report import lead_of
from tests.helpers.reports import COUNTS, PICTURES, not_drawn, relabelled
from tests.helpers.runs import ROOT

DRAWN = {"losses", "who_holds_what", "latent_space", "confusion", "class_accuracy", "time"}  # one of each kind
NAMES = [f"$x_{number}$ <b> &amp; 100 %^~{{}}" for number in range(10)]  # of classes, no mathematics and no markup


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


SETTINGS = {  # fields of data -> who holds labels
    "40 labels at the server": {},
    "every client has labels for 10 % of its images: 4 in all": {"labels": "clients"},
    "every client has labels for 2 images of each of its classes: 4 in all": {
        "labels": "clients", "labels_per_class": 2
    },
    "clients have labels for 1,000 images, divided separately: 4 in all": {
        "labels": "clients", "num_labelled": 1000
    },
    "clients have labels for the images that mine.npz names: 4 in all": {
        "labels": "clients", "partition_file": "mine.npz"
    },
    "1 of 8 clients has labels for all its images: 4 in all": {"labels": "some_clients"},
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


def test_a_model_card_of_a_run_that_diverged(three_runs):
    run = read_run(three_runs / "b" / "seed_0")
    run.metrics[-1]["test_loss"] = None
    data = run.config["data"]
    assert "| test loss | - |" in model_card(run) and "| division | lda (alpha 0.1), seed 0 |" in model_card(run)
    for fields, words in [
        ({"partition": "dirichlet_clients"}, "dirichlet_clients (alpha 0.1)"),
        ({"partition_file": "mine.npz"}, "as saved in mine.npz"),
    ]:
        card = model_card(run._replace(config={**run.config, "data": {**data, **fields}}))
        assert f"| division | {words}, seed 0 |" in card


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


def test_a_run_of_a_kind_that_the_library_lacks_is_one_line(stub_run, tmp_path, capfd):
    shutil.copytree(stub_run[0], tmp_path / "run")
    write_dataset(tmp_path / "run", {**read_dataset(tmp_path / "run"), "kind": "sound"})
    for words in (
        ["report", str(tmp_path / "run")],
        ["predict", f"--workdir={tmp_path / 'run'}", "--npz=x", "--out=y.npz", "--allow_code"],
    ):
        assert launch.main(words) == 2
        error = capfd.readouterr().err.splitlines()[-1]
        assert error == "error: the data are of the kind 'sound'; known: image, features, table, text"


def test_bad_input_is_one_line_and_loses_nothing(reported_run, three_runs, tmp_path, capfd, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    for name in ("config.json", "about.json"):
        shutil.copy(reported_run / name, tmp_path / "begun")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for words, line in [
        ([], "which report? python launch.py report RUN..."),
        ([str(tmp_path / "empty")], "holds no run"),
        ([str(tmp_path / "begun")], "has not finished a round yet"),
        ([str(tmp_path / "broken")], "cannot read the run"),
        ([str(reported_run), str(reported_run)], "--out=NAME.html"),
        ([str(reported_run), f"--out={tmp_path / 'c.txt'}"], "NAME.html"),
        ([str(reported_run), f"--out={tmp_path / 'c.html'}", "--target=90"], "above 0 and at most 1"),
        ([str(reported_run), f"--out={reported_run / 'config.json' / 'c.html'}"], "cannot write"),
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
