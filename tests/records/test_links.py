"""Nothing is written through links in a run's folder or a cache: anybody may have made the folder."""

import os
import shutil

import pytest

from fedjax_ssl import UserError, files, train
from fedjax_ssl.cli import commands
from fedjax_ssl.records.checkpoints import Checkpoints
from fedjax_ssl.records.snapshots import save_snapshot
from fedjax_ssl.records.workdir import (
    CHECKPOINTS,
    FIGURES,
    LOCK,
    LOG,
    METRICS,
    ORIGIN_FILES,
    SNAPSHOTS,
    TENSORBOARD,
    Workdir,
)
from fedjax_ssl.report import write_report
from tests.helpers.runs import make_tiny_config

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture
def run(finished_run, tmp_path):
    shutil.copytree(finished_run[0], tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def mine(tmp_path):
    """A user's folder with a file."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "letter").write_text("dear")
    return folder


def assert_untouched(mine):
    assert [path.name for path in mine.iterdir()] == ["letter"] and (mine / "letter").read_text() == "dear"


def put_link(path, target):
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", [LOCK, LOG, CHECKPOINTS, SNAPSHOTS, TENSORBOARD, FIGURES, ORIGIN_FILES])
@pytest.mark.parametrize("there", [True, False])
def test_a_run_folder_with_a_link_is_refused_in_a_line(run, mine, name, there):
    target = mine / "letter" if name in (LOCK, LOG) else mine
    put_link(run / name, target if there else mine / "nobody")
    with pytest.raises(UserError, match=rf"{name} is a link, through which nothing is written"):
        train(make_tiny_config(), run)
    assert_untouched(mine)


def test_a_hard_link_and_a_pipe_for_a_lock(run, mine):
    (run / LOCK).unlink(missing_ok=True)
    os.link(mine / "letter", run / LOCK)
    train(make_tiny_config(), run)
    assert_untouched(mine)
    (run / LOCK).unlink()
    os.mkfifo(run / LOCK)
    with pytest.raises(UserError, match="cannot write to the workdir"):
        train(make_tiny_config(), run)


def test_files_take_the_place_of_links(run, mine):
    """Also for the copy of damaged records and its replacement."""
    (run / f"{METRICS}.set_aside").symlink_to(mine / "new")
    lines = (run / METRICS).read_bytes()
    (mine.parent / "elsewhere").write_bytes(lines.splitlines(keepends=True)[0] + b"{}\n")
    put_link(run / METRICS, mine.parent / "elsewhere")
    folder = Workdir(run, make_tiny_config().to_dict())
    folder.begin(0)
    folder.close()
    assert_untouched(mine)
    assert (run / f"{METRICS}.set_aside_2").read_bytes().endswith(b"{}\n")
    assert not (run / METRICS).is_symlink()


def test_pictures_snapshots_logs_and_checkpoints(run, mine):
    put_link(run / FIGURES, mine)
    with pytest.raises(UserError, match="figures is a link"):
        write_report(run)
    put_link(run / SNAPSHOTS, mine)
    with pytest.raises(OSError, match="snapshots is a link"):
        save_snapshot(run / SNAPSHOTS, 1, "test", {})
    put_link(run / CHECKPOINTS, mine)
    with pytest.raises(OSError, match="checkpoints is a link"):
        Checkpoints(run / CHECKPOINTS).save(9, {})
    (run / "error.log").symlink_to(mine / "letter")
    assert commands.write_log(ValueError("what happened"), run) == run / "error.log"
    assert "what happened" in (run / "error.log").read_text()
    assert_untouched(mine)


def test_a_link_in_the_place_of_a_checkpoint_is_removed_alone(tmp_path, mine):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for name in ("3", "4.tmp"):
        (checkpoints / name).symlink_to(mine)
    for path in checkpoints.iterdir():
        files.remove_folder(path)
    assert_untouched(mine)


def test_seeds_and_sweeps(tmp_path, mine):
    config = make_tiny_config()
    config.seeds = (0, 1)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "seed_1").symlink_to(mine)
    with pytest.raises(UserError, match="seed_1 is a link"):
        train(config, tmp_path / "runs")
    assert_untouched(mine)


def test_a_folder_that_the_user_names_may_be_a_link(run, tmp_path):
    (tmp_path / "name").symlink_to(run)
    train(make_tiny_config(), tmp_path / "name")


def test_nothing_is_made_where_a_run_was(run, tmp_path):
    """A run whose folder is moved ends at its next file; snapshots once made a folder in the old place."""
    os.rename(run, tmp_path / "elsewhere")
    for write in (
        lambda: save_snapshot(run / SNAPSHOTS, 1, "test", {}),
        lambda: Checkpoints(run / CHECKPOINTS).save(9, {}),
    ):
        with pytest.raises(OSError, match="No such file"):
            write()
    assert not run.exists()
