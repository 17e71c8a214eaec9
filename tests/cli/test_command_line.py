"""The command line: overrides, and one clear line for each mistake before anything is written."""

import re
import shutil

import pytest

import fedjax_ssl
import launch
from fedjax_ssl import UserError, base_config
from fedjax_ssl.config import apply_arguments, differences, load_config_file, parse_config
from fedjax_ssl.methods import METHODS, NAMES
from fedjax_ssl.run.validation import validate
from tests.helpers.stub import make_stub_config

QUICKSTART = str(launch.QUICKSTART)


@pytest.mark.parametrize(
    "word, line",
    [
        ("--config.sede=1", "unknown field config.sede; the nearest is config.seed"),
        ("--config.learning_rate=1", r"unknown field config.learning_rate; the nearest is config\.\w+\.learning_rate"),
        ("--config.client.lr=1", "unknown field config.client.lr; the nearest is config.client.learning_rate$"),
        (f"--config.data.source={5000 * 'x'}", r"^.{,60}x{1000,1200} \[\.\.\.\] .{,300}$"),
        ("--config.model=1", "config.model is a section; name one of its fields, as in config.model.FIELD$"),
        ("--config.seed=one", "config.seed=one: not a whole number"),
        ("--config.fedanchor.contrastive=maybe", "contrastive=maybe: .*boolean"),
        ("--config=nowhere.py", "there is no config file nowhere.py"),
        ("--wrokdir=x", "wrokdir"),
        ("swep", "cannot make sense of .swep.; the nearest is sweep; see"),
        ("sweep", "cannot make sense of .sweep.; a command is the first word; see"),  # it comes after --config
        ("quickstart.py", "cannot make sense of .quickstart.py.; a config is given as --config=quickstart.py; see"),
        (f"--config={QUICKSTART.replace('start.py', 'strt.py')}", f"the nearest is {QUICKSTART}"),
        (f"--config={QUICKSTART}:semfl", "unknown config argument 'semfl'; the nearest is semifl; known: "),
        (f"--config={QUICKSTART}:method=semfl", "method is 'semfl'; the nearest is semifl; known: "),
        ("--config.method=fedmagic", "method is 'fedmagic'.*; known: .*fedanchor"),
        ("--config.model.name=vgg", "'vgg'; known: .*cnn.*resnet18.*wrn28_2"),
        ("--config.data.source=imagenet", "imagenet.*digits.*cifar10"),
        ("--config.data.server_labels=1790", "server_labels"),
        ("--config.clients_per_round=21", "clients_per_round is 21, .* num_clients = 20"),
        ("--config.devices=100", "devices is 100, but JAX finds 1"),
        ("--config.data.source=folder", "data.path is empty; give a folder of images by class"),
        ("--config.data.partition_file=nowhere.npz", "nowhere.npz"),
    ],
)
def test_bad_input_is_one_line_and_status_2(word, line, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workdir = tmp_path / "run"
    config = [] if word.startswith("--config=") else [f"--config={QUICKSTART}"]
    assert launch.main([*config, f"--workdir={workdir}", word]) == 2
    errors = capfd.readouterr().err.strip()
    assert re.search(line, errors), errors
    assert errors.startswith("error: ") and "\n" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["report", "predict", "export", "convert-weights"])
def test_fields_for_a_command_that_has_no_configuration_are_refused(command, capfd):
    assert launch.main([command, "x", "--config.seed=1"]) == 2
    assert capfd.readouterr().err == f"error: --config.seed=1: {command} takes no fields of a configuration\n"


def test_a_home_folder_in_a_workdir(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert launch.main(["--workdir=~/file"]) == 2
    assert f"{tmp_path / 'file'} is not a folder" in capfd.readouterr().err
    assert launch.main(["--workdir=~nosuchuser/x"]) == 2
    assert "begins with a home folder that is not known" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_home_folder_from_python(stub_run, tmp_path, monkeypatch):
    shutil.copytree(stub_run[0], tmp_path / "run")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert int(fedjax_ssl.train(make_stub_config(), "~/run").round) == 4
    assert fedjax_ssl.load("~/run", allow_code=True).round == 4
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_of_somebody_else_is_left_alone(capfd, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("somebody's\n")
    assert launch.main([f"--workdir={tmp_path}"]) == 2
    assert "metrics.jsonl" in capfd.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_text() == "somebody's\n"


def test_config_arguments():
    config = apply_arguments(base_config(), "cnn,mix,iid,server_labels=250,images=7")
    assert (config.model.name, config.fedanchor.server_mixup, config.data.alpha) == ("cnn", True, 1000.0)
    assert (config.data.server_labels, config.data.examples_per_client) == (250, 7)
    assert apply_arguments(base_config(), "").to_dict() == base_config().to_dict()
    for text, line in {"anchor=5": "known: .*cnn, .*mix, .*server_labels=..., alpha=...", "server_labels=many": "int",
                       "alpha": "known", "cnn=1": "known"}.items():  # fmt: skip
        with pytest.raises(UserError, match=line):
            apply_arguments(base_config(), text)
    # Arguments apply in order: a variant belongs to the method named before it.
    config = apply_arguments(base_config(), "semifl,strong,no_mixup")
    assert (config.method, config.semifl.mixup, config.client.persistent) == ("semifl", False, True)
    with pytest.raises(UserError, match="unknown config argument 'mix'"):
        apply_arguments(base_config(), "semifl,mix")
    assert apply_arguments(base_config(), "supervised,all_labels").data.reveal_labels
    named, by_field = (apply_arguments(base_config(), words) for words in ("fedil,no_cosine", "method=fedil,no_cosine"))
    assert named.to_dict() == by_field.to_dict() and named.aggregation.weights == "uniform"
    assert apply_arguments(base_config(), "centralised").method == "server_only"


@pytest.mark.parametrize("path", sorted(launch.QUICKSTART.parent.glob("*.py")), ids=lambda path: path.stem)
def test_every_config_is_valid_and_says_how_to_run_it(path):
    validate(load_config_file(path))
    source = path.read_text()
    assert f"python launch.py --config=configs/{path.name}" in source or path == launch.QUICKSTART


def test_naming_a_method_leaves_the_rule_for_confidence_of_the_file_behind():
    path = str(launch.QUICKSTART.parent / "fedanchor_cifar10.py")
    found, semifl = load_config_file(f"{path}:surest"), load_config_file(f"{path}:surest,semifl")
    assert (found.confidence.kind, found.confidence.share) == ("share", 0.3)
    assert semifl.confidence.to_dict() == base_config().confidence.to_dict() != found.confidence.to_dict()
    assert semifl.schedule == found.schedule == "cosine"  # the recipe stays


def test_the_variant_paper_undoes_what_was_found():
    path = str(launch.QUICKSTART.parent / "fedanchor_cifar10.py")
    paper = load_config_file(f"{path}:paper")
    paper.model.statistics = "server"  # nothing reads it in this variant
    assert differences(apply_arguments(base_config(), "plain").to_dict(), paper.to_dict()) == {}


def test_a_run_s_config_json_is_a_config(stub_run, tmp_path, capfd):
    """Its values are those of the run, arguments and overrides come on top; code that it names needs a word."""
    file = stub_run[0] / "config.json"
    with pytest.raises(UserError, match=r"the run in .* names code, method=.*stub.py:stub, which would be run; if you"):
        load_config_file(file)
    found = load_config_file(file, allow_code=True)
    assert found.to_dict() == make_stub_config().to_dict()
    found = parse_config(f"{file}:semifl,alpha=0.5", ["--config.seed=3"], allow_code=True)
    assert (found.method, found.data.alpha, found.seed, found.num_clients) == ("semifl", 0.5, 3, 8)
    (tmp_path / "config.json").write_text('{"method": "semifl", "client": {"lr": 0.1}}')
    (tmp_path / "none.json").write_text("[1]")
    for name, line in (
        ("config.json", "client.lr is 0.1"),
        ("none.json", "cannot read the run in .*none.json: it has"),
    ):
        assert launch.main([f"--config={tmp_path / name}", f"--workdir={tmp_path / 'run'}"]) == 2
        assert re.search(line, capfd.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_the_list_of_methods(capfd):
    """A line for each: its name, the values of data.labels that it takes, its variants."""
    assert launch.main(["methods"]) == 0
    head, *lines = capfd.readouterr().out.splitlines()
    assert head.split() == ["method", "labels", "variants"] and [line.split()[0] for line in lines] == list(NAMES)
    for line, name in zip(lines, NAMES):
        listed = {word.strip(",") for word in line.split()[1:]}
        assert listed == {*METHODS[name].settings, *METHODS[name].variants}, name


def test_a_dry_run_shows_the_configuration_and_the_size_of_a_round(tmp_path, monkeypatch, capfd):
    """The linear classifier's numbers by hand: 65 x 10 parameters, which 5 clients receive and send."""
    monkeypatch.chdir(tmp_path)
    words = [f"--config={QUICKSTART}:supervised,all_labels", "--config.model.name=linear"]
    fields = ["--config.client.batch_size=10", "--config.client.epochs=2", "--config.model.normalisation=none"]
    assert launch.main([*words, *fields, "--dry_run"]) == 0
    said = capfd.readouterr().out
    lines = dict(line.split(" = ") for line in said.splitlines() if " = " in line)
    assert lines["method"] == "'supervised'" and lines["client.epochs"] == "2" and "fedanchor.mix" not in said
    assert {name for name in lines if name.startswith("fedanchor.")} == set()
    line = "10 classes; 20 clients with 1,380 training examples, 1,380 labelled; 50 labelled at the server"
    assert f"{line}, 0 for validation, 360 for testing" in said
    assert "model: 650 parameters, 0.00 MB" in said
    assert re.search(r"a round: 5 clients, 0.01 MB to them and 0.01 MB from them", said)
    # The product [10, 64] x [64, 10] and its gradient are 2 x 2 x 6,400 FLOP; a client has 69 images.
    step, together = (float(number.replace(",", "")) for number in re.findall(r"([\d,]+) FLOP, an estimate", said))
    assert 25_600 <= step < 2 * 25_600
    assert "if each client takes 14 steps" in said and together == pytest.approx(5 * 14 * step, rel=1e-4)
    advised = [f"--config={QUICKSTART}:fixmatch", "--config.model.name=linear", "--config.data.labels=some_clients"]
    assert launch.main([*advised, "--config.data.labelled_clients=3", *fields, "--dry_run"]) == 0
    assert "warning: fixmatch counts clients with and without labels alike" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())  # nothing is written
