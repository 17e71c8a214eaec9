"""A method from a file, as a reader tries it from the command line: its fields and words, its runs, its mistakes."""

import json

import numpy as np
import pytest

import launch
from fedjax_ssl import UserError, methods
from fedjax_ssl.config import describe_method, validate
from fedjax_ssl.methods import find_method
from fedjax_ssl.sweep import Sweep, plan
from tests.helpers.runs import TINY_BACKBONE

FILE = """
from fedjax_ssl.methods import Section, whole
from fedjax_ssl.methods.entry import Entry
from fedjax_ssl.methods.frames import alternating


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
wrong = Entry(bare, variants={"high": {"wrong.level": 1}})
semifl = bare
registered = bare
number = 3


def no_method(problem):
    return number


def fails(problem):
    return problem.config.nothing
"""
QUICKSTART = str(launch.QUICKSTART)
SMALL = [f"--config.model.name={TINY_BACKBONE}", "--config.log.report=false", "--config.log.tensorboard=false"]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """In an empty folder with `my.py`; nothing is remembered of files of other folders."""
    monkeypatch.chdir(tmp_path)
    methods._IMPORTED.clear()
    (tmp_path / "my.py").write_text(FILE)
    yield tmp_path
    methods._IMPORTED.clear()


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def start(*words):
    return launch.main([*words, *SMALL])


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
    assert describe_method("my.py:agreement") == ("Agreement", "")

    (own / "my.py").unlink()
    methods._IMPORTED.clear()
    capfd.readouterr()
    assert launch.main(predict) == 2
    line = capfd.readouterr().err.strip()
    assert line.startswith(f"error: the run in {run} needs its method's file: ") and "\n" not in line
    assert line.endswith(f"there is no file my.py, as seen from {own}")
    assert launch.main(["report", str(run)]) == 0
    assert "agreement.views" in (run / "report.html").read_text()
    assert "trained with agreement" in (run / "MODEL_CARD.md").read_text()


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
            "Other": "anchors_only",
        },
    )
    arguments, fields, other = (cell.config for cell in plan(sweep, own / "sweep"))
    assert (arguments.method, arguments.agreement.views, arguments.server.epochs) == ("my.py:agreement", 4, 2)
    assert (fields.method, fields.agreement.views, fields.server.epochs) == ("my.py:agreement", 3, 1)
    assert other.method == "anchors_only" and "agreement" not in other
    with pytest.raises(UserError, match=r"of their own for config\.method"):
        plan(sweep, own / "sweep", ["--config.method=my.py:bare"])
    one = sweep._replace(methods={"All": ""}, fields={"client.epochs": (1, 2)})
    cells = plan(one, own / "sweep", ["--config.method=my.py:agreement", "--config.agreement.views=5"])
    assert [cell.config.agreement.views for cell in cells] == [5, 5]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--config.method=nowhere.py:agreement"], "there is no file nowhere.py, as seen from "),
        (["--config.method=nowhere:agreement"], "there is no module nowhere"),
        (["--config.method=my.py:"], "method=my.py: must be MODULE:NAME or FILE.py:NAME"),
        (["--config.method=my.py:agreemnt"], "my.py has no agreemnt; the nearest is agreement; it has "),
        (["--config.method=my.py:semifl"], "semifl is a method of the library already"),
        (["--config.method=my.py:registered"], "registered is a registered method already"),
        (["--config.method=raises.py:x"], "importing raises.py fails (RuntimeError in line 1 of "),
        (["--config.method=my.py:number"], "method=my.py:number is no function from a Problem to a Method"),
        (["--config.method=my.py:no_method"], "method=my.py:no_method gives a int; it must give a "),
        (["--config.method=my.py:fails"], "method=my.py:fails: cannot be built (AttributeError in line "),
        (["--config.method=my.py:wrong"], "high of wrong sets wrong.level, which is no field"),
        (["--config.method=my.py:agreement", "--config.agreement.vews=3"], "nearest is config.agreement.views"),
        (["--config.method=my.py:agreement", "--config.agreement.views=1"], "agreement.views must be at least 2"),
        (["--config.method=my.py:agreement", "--config.agreement.views=two"], "a value of type int (now 2)"),
        (["--config.method=my.py:bare", "--config.data.labels=clients"], "known to the method bare: 'server'"),
        ([f"--config={QUICKSTART}:method=my.py:agreement,four_vews"], "'four_vews'; the nearest is four_views"),
    ],
)
@pytest.mark.usefixtures("registry")
def test_mistakes_are_one_line_and_write_nothing(words, line, own, capfd):
    (own / "raises.py").write_text('raise RuntimeError("first\\nsecond")')
    methods.register("registered", methods.METHODS["anchors_only"])
    before = {path for path in own.rglob("*") if "__pycache__" not in path.parts}
    assert start(*words) == 2
    error = capfd.readouterr().err.strip()
    assert error.startswith("error: ") and line in error and "\n" not in error, error
    assert {path for path in own.rglob("*") if "__pycache__" not in path.parts} == before


def test_validate_alone_adds_its_section(own):
    """For a configuration that is made in Python, where no word of a command line names the method."""
    from fedjax_ssl import base_config

    config = base_config()
    config.method = "my.py:agreement"
    validate(config)
    assert config.agreement.views == 2
