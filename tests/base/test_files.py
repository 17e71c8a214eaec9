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


def open_to_all(home):
    home.chmod(0o777)


def open_folder(home):
    (home / "fedjax_ssl" / "programs").mkdir(parents=True)
    (home / "fedjax_ssl" / "programs").chmod(0o777)


def link_for_the_folder(home):
    (home / "elsewhere").mkdir()
    (home / "fedjax_ssl").mkdir()
    (home / "fedjax_ssl" / "programs").symlink_to(home / "elsewhere")


def link_where_all_can_write(home):
    """The author of this link chose a folder of the user's, which has the user's other files."""
    (home / "downloads" / "programs").mkdir(parents=True)
    (home / "open").mkdir()
    (home / "open").chmod(0o777)
    (home / "open" / "fedjax_ssl").symlink_to(home / "downloads")
    os.environ["XDG_CACHE_HOME"] = str(home / "open")  # the fixture restores it


def link_of_another_user(home):
    (home / "downloads").mkdir()
    (home / "fedjax_ssl").symlink_to(home / "downloads")
    if os.getuid():
        pytest.skip("only root can give a link to another user")
    os.lchown(home / "fedjax_ssl", 12345, -1)


def folder_of_another_user(home):
    (home / "fedjax_ssl").mkdir()
    if os.getuid():
        pytest.skip("only root can give a folder to another user")
    os.chown(home / "fedjax_ssl", 12345, -1)


@pytest.mark.parametrize(
    "prepare",
    [open_to_all, open_folder, link_for_the_folder, link_where_all_can_write, link_of_another_user,
     folder_of_another_user],
)  # fmt: skip
def test_a_folder_into_which_others_can_put_files_is_not_used(home, prepare):
    prepare(home)
    assert private_cache("programs", 20) is None


def test_the_users_own_link_is_used(home, tmp_path):
    (tmp_path / "disk").mkdir(0o700)
    (home / "fedjax_ssl").symlink_to(tmp_path / "disk")
    assert private_cache("programs", 20) == home / "fedjax_ssl" / "programs"
