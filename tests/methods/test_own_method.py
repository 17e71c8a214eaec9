"""A method from a file, as a reader tries it from the command line: its fields and words, its runs, its mistakes."""

import hashlib
import importlib
import json
import pathlib
import sys

import numpy as np
import pytest

import launch
from fedjax_ssl import UserError, base_config, methods
from fedjax_ssl.base import imports
from fedjax_ssl.client import make_confidence
from fedjax_ssl.config import overlooked, parse_config
from fedjax_ssl.engine import no_op
from fedjax_ssl.methods import find_method
from fedjax_ssl.records.origin import note_start, read_starts
from fedjax_ssl.records.workdir import refuse_code
from fedjax_ssl.run.experiment import build_experiment
from fedjax_ssl.run.validation import validate
from fedjax_ssl.sweep import Sweep, plan
from tests.helpers.runs import TINY_BACKBONE

FILE = """
import dataclasses

from fedjax_ssl.methods import METHODS, Section, whole
from fedjax_ssl.methods.entry import Entry
from fedjax_ssl.methods.frames import alternating
from fedjax_ssl.run.validation import validate


def defaults():
    section = Section()
    section.views = whole(2, least=2)
    return section


def bare(problem):
    return alternating(problem, ())


def build(problem):
    assert problem.config.agreement.views >= 2
    return bare(problem)


agreement = Entry(
    build,
    title="Agreement",
    defaults=defaults,
    fields={"server.epochs": 2},
    variants={"four_views": {"agreement.views": 4}},
)
mistaken = dataclasses.replace(METHODS["supervised"], fields={"supervised.cohrt": "labelled"})
semifl = bare
number = 3


def no_method(problem):
    return number


def fails(problem):
    return problem.config.nothing


def rule(options, num_classes, threshold, strictly):
    from fedjax_ssl.client import Confidence

    weigh = lambda state, scores, size: (scores[..., 0] >= threshold + strictly).astype("float32")
    return Confidence(lambda n_max: (), lambda state, *seen: state, weigh)


def changed(**functions):
    return rule({}, 10, 0.5, False)._replace(**functions)


soft = lambda *_: changed(weigh=lambda state, scores, size: scores.max(axis=-1))
few = lambda *_: changed(update=lambda state, scores: state)
flat = lambda *_: changed(weigh=lambda state, scores, size: scores)
other = lambda *_: changed(update=lambda state, *seen: seen[0])


def no_rule(*arguments):
    return number


def raises(*arguments):
    return 1 / 0
"""
CHANGED = """
import dataclasses

from fedjax_ssl.methods import METHODS, real

FIXMATCH, SEEN = METHODS["fixmatch"], None


def defaults():
    section = FIXMATCH.section()
    section.gamma = real(0.5, above=0)
    return section


def build(problem):
    global SEEN
    SEEN = problem.config
    return FIXMATCH.factory(problem)


fields = {**FIXMATCH.fields, "confidence.threshold": 0.7, "client.proximal": 0.25}
my_fixmatch = dataclasses.replace(FIXMATCH, factory=build, defaults=defaults, fields=fields)
"""
QUICKSTART = str(launch.QUICKSTART)
SEMIFL = f"--config={QUICKSTART}:semifl"
SMALL = [f"--config.model.name={TINY_BACKBONE}", "--config.log.report=false", "--config.log.tensorboard=false"]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """In an empty folder with `my.py`; nothing is remembered of files of other folders."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(FILE)
    return tmp_path


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def start(*words):
    return launch.main([*words, *SMALL])


@pytest.mark.test_all
def test_it_trains_resumes_predicts_and_is_reported(own, capfd):
    """With a section, a variant and fields of its own; and what is left to do with its runs when the file is gone."""
    words = [f"--config={QUICKSTART}:method=my.py:agreement,four_views", "--config.agreement.views=3"]
    assert start(*words, "--config.num_rounds=1") == 0
    run = own / "runs" / "agreement-001"  # the method's name without its path
    config = config_of(run)
    assert config["method"] == "my.py:agreement" and config["agreement"] == {"views": 3}
    assert config["server"]["epochs"] == 2
    assert start(*words, f"--workdir={run}", "--config.num_rounds=2") == 0
    assert f"workdir {run}, from round 1" in capfd.readouterr().err
    assert [json.loads(line)["round"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert start(*words, f"--workdir={run}", "--config.num_rounds=2", "--config.agreement.views=4") == 2
    assert "agreement.views: 3 there, 4 here" in capfd.readouterr().err

    np.savez("images.npz", images=np.zeros((2, 8, 8), np.uint8))
    predict = ["predict", f"--workdir={run}", "--npz=images.npz", "--out=out.npz", "--allow_code"]
    assert launch.main(predict) == 0
    assert json.loads((run / "about.json").read_text())["title"] == "Agreement"

    (own / "my.py").unlink()
    capfd.readouterr()
    assert launch.main(predict) == 2
    line = capfd.readouterr().err.strip()
    assert line.startswith("error: method=my.py:agreement: importing my.py fails (FileNotFound") and "\n" not in line
    assert launch.main(["report", str(run)]) == 0
    assert "agreement.views" in (run / "report.html").read_text()
    assert "trained with Agreement" in (run / "MODEL_CARD.md").read_text()


def test_a_function_and_a_module_are_methods_too(own):
    assert start(f"--config={QUICKSTART}", "--config.method=my:bare", "--config.num_rounds=1", "--workdir=run") == 0
    assert "bare" not in config_of(own / "run")
    assert find_method("my:bare").settings == ("server",)


def test_a_sweep_names_it_by_arguments_fields_or_an_override(own):
    sweep = Sweep(
        config=QUICKSTART,
        methods={
            "Arguments": "method=my.py:agreement,four_views",
            "Fields": ("", {"agreement.views": 3, "method": "my.py:agreement"}),
            "Other": "server_only",
        },
    )
    arguments, fields, other = (cell.config for cell in plan(sweep, own / "sweep"))
    assert (arguments.method, arguments.agreement.views, arguments.server.epochs) == ("my.py:agreement", 4, 2)
    assert (fields.method, fields.agreement.views, fields.server.epochs) == ("my.py:agreement", 3, 1)
    assert other.method == "server_only" and "agreement" not in other
    with pytest.raises(UserError, match=r"of their own for config\.method"):
        plan(sweep, own / "sweep", ["--config.method=my.py:bare"])
    one = sweep._replace(methods={"All": ""}, fields={"client.epochs": (1, 2)})
    cells = plan(one, own / "sweep", ["--config.method=my.py:agreement", "--config.agreement.views=5"])
    assert [cell.config.agreement.views for cell in cells] == [5, 5]


def built(words):
    """What a command line builds, up to compiling."""
    config = parse_config(words[0], words[1:])
    validate(config)
    return build_experiment(config)


def test_a_changed_method_reads_the_section_of_the_original(own):
    (own / "changed.py").write_text(CHANGED)
    words = [f"{QUICKSTART}:method=changed.py:my_fixmatch,lpl,parallel", f"--config.model.name={TINY_BACKBONE}"]
    config = built(words).problem.config
    assert "my_fixmatch" not in config
    assert (config.confidence.threshold, config.fixmatch.server, config.fixmatch.gamma) == (0.7, "parallel", 0.5)
    assert config.confidence.labels_from == "local" and config.client.proximal == 0.25
    assert imports._FILES[pathlib.Path("changed.py").resolve()].SEEN.fixmatch.gamma == 0.5
    assert built([*words, "--config.confidence.threshold=0.6"]).method.server_after is no_op
    assert imports._FILES[pathlib.Path("changed.py").resolve()].SEEN.confidence.threshold == 0.6
    with pytest.raises(UserError, match=r"fixmatch\.gamma must be above 0, not -1"):
        built([*words, "--config.fixmatch.gamma=-1"])
    assert "gamma" not in base_config().fixmatch


def test_an_edited_file_is_imported_again_for_the_next_run_and_the_origin_has_what_ran(own, monkeypatch):
    """Each of several files of one name."""
    for folder in ("a", "b"):
        (own / folder).mkdir()
        (own / folder / "my.py").write_text(FILE)
        find_method(f"{folder}/my.py:bare")
    monkeypatch.delitem(sys.modules, "my", raising=False)
    for default in (3, 4):  # files of one size, written within a second: Python's own cache does not tell them apart
        text = FILE.replace("whole(2,", f"whole({default},")
        (own / "my.py").write_text(text)
        config = base_config()
        config.method = "my.py:agreement"
        validate(config)
        assert config.agreement.views == default
        importlib.import_module("my")  # a second module of the file, as of a notebook that imports it
        note_start(own)
    (own / "my.py").write_text("during the run")
    assert find_method("my.py:agreement").section().views == 4
    note_start(own)
    files = read_starts(own)[-1].files
    assert {"a/my.py", "b/my.py"} <= set(files) and hashlib.sha256(text.encode()).hexdigest() in files.values()
    with pytest.raises(UserError, match=r"importing my\.py fails \(SyntaxError"):
        validate(config)


def test_what_an_override_leaves_as_it_is_is_said(own):
    (own / "changed.py").write_text(CHANGED)
    words = ["--config.method=changed.py:my_fixmatch", "--config.uda.temperature=0.1", "--config.client.epochs=1"]
    proximal, other = overlooked(parse_config(QUICKSTART, words), words)
    assert (
        "leaves confidence.threshold=None, client.proximal=0.0; as an" in proximal
        and ":method=changed.py:my_fixmatch" in proximal
    )
    assert other.startswith("--config.uda.temperature is of another method and changes nothing; ")
    assert other.endswith("section is fixmatch")
    words = ["--config.confidence.threshold=0.5"]
    assert "the method rscfed does not read it" in overlooked(parse_config(f"{QUICKSTART}:rscfed", words), words)[0]
    words = ["--config.client.proximal=0.0"]
    assert overlooked(parse_config(f"{QUICKSTART}:method=changed.py:my_fixmatch", words), words) == []


def test_a_copy_of_a_methods_file_has_a_name_of_its_own(own):
    source = (pathlib.Path(methods.__file__).parent / "uda.py").read_text()
    (own / "my_copy.py").write_text(source)
    with pytest.raises(UserError, match="its code is that of uda; write my_copy for uda in its file"):
        built([f"{QUICKSTART}:method=my_copy.py:ENTRY"])
    source = source.replace("temperature = real(0.4", "temperature = real(0.5")
    (own / "my_copy.py").write_text(source.replace("uda", "my_copy"))
    config = built([f"{QUICKSTART}:method=my_copy.py:ENTRY"]).problem.config
    assert config.my_copy.temperature == 0.5 and config.uda.temperature == 0.4


def test_a_rule_for_confidence_from_a_file(own):
    """It labels as it says; other users' runs and hosts with such a rule name code, as those of a method's file do."""
    words = [f"{QUICKSTART}:semifl", "--config.confidence.kind=my.py:rule", "--config.confidence.threshold=0.25"]
    problem = built(words).problem
    confidence = make_confidence(problem, problem.config.confidence.threshold)
    scores = np.array([[0.25, 0.75], [0.2, 0.8]])
    np.testing.assert_array_equal(confidence.weigh((), scores, 2), [1, 0])
    with pytest.raises(UserError, match=r"names code, confidence\.kind=my\.py:rule, which would be run; ask"):
        refuse_code(own, problem.config.to_dict(), "ask")


@pytest.mark.parametrize(("words", "line"), [
    (["--config.method=nowhere.py:agreement"], "importing nowhere.py fails (FileNotFoundError"),
    (["--config.method=my.py:"], "my.py has no such name"),
    (["--config.method=my.py:agreemnt"], "my.py has no agreemnt; the nearest is agreement"),
    (["--config.method=my.py:semifl"], "semifl is a method already"),
    (["--config.method=raises.py:x"], "importing raises.py fails (RuntimeError in line 1 of "),
    (["--config.method=my.py:number"], "method=my.py:number: cannot be built (TypeError"),
    (["--config.method=my.py:no_method"], "method=my.py:no_method returns a int, not a "),
    (["--config.method=my.py:fails"], "method=my.py:fails: cannot be built (AttributeError in line "),
    (["--config.method=my.py:mistaken"], "mistaken sets supervised.cohrt to 'labelled': no such field"),
    ([SEMIFL, "--config.confidence.kind=my.py:rul"], "my.py has no rul"),
    (
        [SEMIFL, "--config.confidence.kind=my.py:no_rule"],
        "confidence.kind=my.py:no_rule returns a int; it must return a Conf",
    ),
    ([SEMIFL, "--config.confidence.kind=my.py:raises"], "cannot be built (ZeroDivisionError in line "),
    (["--config.confidence.kind=my.py:soft"], "kind='my.py:soft' gives weights, but fedanchor has none"),
    ([SEMIFL, "--config.confidence.kind=my.py:few"], "confidence.kind=my.py:few: fails (TypeError"),
    ([SEMIFL, "--config.confidence.kind=my.py:flat"], "weigh returns float32 [256, 10]; it must return float32 [256]"),
    ([SEMIFL, "--config.confidence.kind=my.py:other"], "its update returns float32 [256, 10]; it must return ()"),
    (["--config.method=my.py:agreement", "--config.agreement.vews=3"], "nearest is config.agreement.views"),
    (["--config.method=my.py:agreement", "--config.agreement.views=1"], "agreement.views must be at least 2"),
])  # fmt: skip
def test_mistakes_are_one_line_and_write_nothing(words, line, own, capfd):
    (own / "raises.py").write_text('raise RuntimeError("first\\nsecond")')
    before = {path for path in own.rglob("*") if "__pycache__" not in path.parts}
    assert start(*words) == 2
    error = capfd.readouterr().err.strip()
    assert error.startswith("error: ") and line in error and "\n" not in error, error
    assert {path for path in own.rglob("*") if "__pycache__" not in path.parts} == before
