"""The user's cache: compiled programs are code, so nobody else may put files there. Its size is limited."""

import os

import pytest

from fedjax_ssl.base.files import private_cache


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The empty folder that will hold the cache."""
    folder = tmp_path / "home"
    folder.mkdir(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def test_what_was_used_longest_ago_goes(home):
    folder = private_cache("programs", 20)
    assert folder == home / "fedjax_ssl" / "programs" and folder.is_dir()
    for age, name in enumerate(("new", "middle", "old", "read")):
        (folder / name).write_bytes(bytes(9))
        os.utime(folder / name, (1e9 - (age if name != "read" else -1), 1e9 - age))
    assert private_cache("programs", 20) == folder
    assert {path.name for path in folder.iterdir()} == {"new", "read"}


def test_files_that_another_process_takes_away_are_passed_over(home, monkeypatch):
    folder, scan = private_cache("programs", 20), os.scandir
    (folder / "being written.tmp").touch()

    def scan_before_it_goes(path):
        entries = list(scan(path))
        (folder / "being written.tmp").unlink()
        return entries

    monkeypatch.setattr(os, "scandir", scan_before_it_goes)
    assert private_cache("programs", 20) == folder


def open_to_all(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def link(folder):
    folder.parent.mkdir()
    folder.symlink_to(folder.parent)


def of_another_user(folder):
    folder.mkdir(parents=True)
    if os.getuid():
        pytest.skip("only root can give a folder to another user")
    os.chown(folder, 12345, -1)


@pytest.mark.parametrize("prepare", [open_to_all, link, of_another_user])
def test_a_folder_into_which_others_can_put_files_is_not_used(home, prepare):
    prepare(home / "fedjax_ssl" / "programs")
    assert private_cache("programs", 20) is None
