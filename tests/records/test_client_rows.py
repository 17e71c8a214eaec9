"""The file of the clients' memory: its rounds, its size and its errors."""

import shutil
import signal
import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.records.client_rows import ClientRows, Owner, check_rows

RUN = Owner("run", {})


def rows_of(rows, clients=range(4)):
    return {client: data for client in clients if (data := rows.read(client)) is not None}


def test_a_run_goes_on_from_any_checkpoint_that_is_kept(tmp_path):
    path, states, kept = tmp_path / "clients.sqlite", {}, []
    rows = ClientRows(path, RUN, None)
    for number in range(6):
        if number:
            rows.write(number % 3, number, b"%d" % number * 1000)
        rows.commit(number, kept)
        states[number] = rows_of(rows)
        kept = [*kept, number][-2:]
    rows.write(3, 6, b"lost")
    rows.close()  # as if killed
    for number in (5, 4):
        check_rows(path, RUN, number)
        rows = ClientRows(path, RUN, number)
        assert rows_of(rows) == states[number]
        rows.close()
    with pytest.raises(UserError, match="has the rounds 3 to 4, but the checkpoint is of round 2"):
        check_rows(path, RUN, 2)
    with pytest.raises(UserError, match="to 4, but the checkpoint is of round 5"):
        check_rows(path, RUN, 5)


def test_the_rows_that_stay_are_those_that_a_kept_checkpoint_sees(tmp_path):
    """Every third round has a checkpoint, between which a client has one row; pages of deleted rows are used again."""
    random, path, kept, written = np.random.default_rng(0), tmp_path / "clients.sqlite", [], set()
    rows, committed = ClientRows(path, RUN, None), 0
    for number in range(1, 100):
        for client in random.choice(12, 4, replace=False).tolist():
            rows.write(client, number, bytes(20_000))
            written = {row for row in written if row[0] != client or row[1] <= committed} | {(client, number)}
        if number % 3:
            continue
        rows.commit(number, kept)
        oldest, committed = min(kept, default=0), number
        seen = {
            max((row for row in written if row[0] == client and row[1] <= oldest), default=None) for client in range(12)
        }
        with sqlite3.connect(path) as file:
            found = set(file.execute("SELECT client, round FROM rows").fetchall())
        assert found == (seen - {None}) | {row for row in written if row[1] > oldest}
        kept = [*kept, number][-3:]
        if number in (30, 33, 60):  # opened again after a stop
            rows.write(0, number + 1, b"lost")
            rows.close()
            for each in kept:
                check_rows(path, RUN, each)
            rows = ClientRows(path, RUN, number)
    assert path.stat().st_size < 1.3 * 20_000 * 12 * 5  # the rounds of the kept checkpoints, now, and before
    rows.close()


def test_what_is_wrong_with_the_file_is_one_line(tmp_path):
    path = tmp_path / "clients.sqlite"
    rows = ClientRows(path, RUN, None)
    rows.write(0, 1, b"a" * 200_000)
    rows.write(1, 1, b"b" * 200_000)
    rows.commit(1, [])
    rows.close()

    def copy(name):
        return shutil.copy(path, tmp_path / name)

    with pytest.raises(UserError, match=r"^\S+other is another run's"):
        check_rows(copy("other"), Owner("another", {}), 1)
    with pytest.raises(UserError, match=r"^\S+changed is another run's"):
        check_rows(copy("changed"), Owner("run", {"client": {"learning_rate": 9.0}}), 1)
    check_rows(copy("same"), Owner("run", {"log": {"report": False}}), 1)  # this field changes no result
    with pytest.raises(UserError, match=r"^\S+older has the rounds 0 to 1, but the checkpoint is of round 2"):
        check_rows(copy("older"), RUN, 2)
    with pytest.raises(UserError, match="missing is missing"):
        check_rows(tmp_path / "missing", RUN, 1)
    exchanged = copy("exchanged")
    with sqlite3.connect(exchanged) as file:  # rows with valid checksums, but for each other's clients
        file.execute("UPDATE rows SET client = 3 - client WHERE client < 2")
        file.execute("UPDATE rows SET client = client - 2")
    opened = ClientRows(exchanged, RUN, 1)
    with pytest.raises(UserError, match="row of client 0 is not what was written"):
        opened.read(0)
    for name, change in {
        "short": lambda f: f.truncate(150_000),
        "flipped": lambda f: (f.seek(100), f.write(b"\xff" * 50)),
    }.items():
        with copy(name).open("r+b") as file:
            change(file)
        with pytest.raises(UserError, match=rf"^\S+{name} is damaged: ") as caught:
            check_rows(tmp_path / name, RUN, 1)
        assert "\n" not in str(caught.value)
        with pytest.raises(UserError, match=rf"^\S+{name} is damaged: "):
            rows_of(ClientRows(tmp_path / name, RUN, 1))
    for name, text in {"a_word": "UPDATE rows SET data = 'word'", "nothing": "UPDATE rows SET data = NULL"}.items():
        with sqlite3.connect(copy(name)) as file:
            file.execute(text)
        with pytest.raises(UserError, match=rf"^\S+{name} is damaged: "):
            ClientRows(tmp_path / name, RUN, 1).read(0)
    for name, text in {"a_row_less": "DELETE FROM rows WHERE client = 1", "no_sum": "DELETE FROM seen"}.items():
        with sqlite3.connect(copy(name)) as file:
            file.execute(text)
        with pytest.raises(UserError, match=rf"^\S+{name} lacks rows of clients"):
            check_rows(tmp_path / name, RUN, 1)
    with sqlite3.connect(copy("no_round")) as file:
        file.execute("UPDATE run SET value = NULL WHERE name = 'oldest'")
    with pytest.raises(UserError, match=r"^\S+no_round is damaged: "):
        check_rows(tmp_path / "no_round", RUN, 1)
    assert not (tmp_path / "missing").exists()
    check_rows(path, RUN, 1)
    assert len(rows_of(ClientRows(path, RUN, 1))) == 2


WRITER = """
import sys, pathlib
from fedjax_ssl.records.client_rows import ClientRows, Owner
rows, number = ClientRows(pathlib.Path(sys.argv[1]), Owner("run", {}), None), 0
while True:
    number += 1
    for client in range(20):
        rows.write(client, number, b"%d " % number * 20_000)
    rows.commit(number, [number - 1])
    print(number, flush=True)
"""


@pytest.mark.test_all
def test_kills_while_rows_are_written_lose_and_mix_nothing(tmp_path):
    """Kills at different moments of a round: all rows must be those of the last reported round."""
    for attempt in range(5):
        path = tmp_path / f"{attempt}.sqlite"
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3 + attempt):
            said = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        said = int((writer.communicate()[0].split() or [said])[-1])
        with sqlite3.connect(path) as file:
            reached = int(file.execute("SELECT value FROM run WHERE name = 'reached'").fetchone()[0])
        assert said <= reached <= said + 1
        rows = ClientRows(path, RUN, reached)
        assert rows_of(rows, range(20)) == dict.fromkeys(range(20), b"%d " % reached * 20000)
        rows.close()
