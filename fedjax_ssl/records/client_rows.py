"""RUN/clients.sqlite: the clients' memory, with a row for each client and each checkpoint at which it had changed.

The key of a row is the client and the round that wrote it. A checkpoint of round r sees the newest row up to r of each
client, so resuming from any kept checkpoint is exact. All rows between two checkpoints are one transaction: if the
process is killed, the file has the rows of the last checkpoint. Rows that no kept checkpoint sees are deleted, and
their space is reused. For each kept checkpoint the file has a checksum of the rows that it sees, so that a row that is
lost is noticed.
"""

import contextlib
import functools
import hashlib
import json
import operator
import pathlib
import sqlite3
from collections.abc import Iterator
from typing import Any, NamedTuple

from fedjax_ssl.base.errors import UserError, first_line
from fedjax_ssl.records.workdir import forbidden_changes

# With rowids, a long row shares its last page and is not read when another row is looked up.
_TABLES = """
CREATE TABLE IF NOT EXISTS rows(client INTEGER, round INTEGER, sum BLOB, data BLOB, PRIMARY KEY(client, round));
CREATE INDEX IF NOT EXISTS by_round ON rows(round);
CREATE TABLE IF NOT EXISTS seen(round INTEGER PRIMARY KEY, sum BLOB);
CREATE TABLE IF NOT EXISTS run(name TEXT PRIMARY KEY, value TEXT);
"""
# Of the rows that hide older ones, only those after the checkpoint that was the oldest before are looked at.
_DELETE_HIDDEN = """
DELETE FROM rows WHERE (client, round) IN (
    SELECT older.client, older.round
    FROM rows AS newer JOIN rows AS older ON older.client = newer.client AND older.round < newer.round
    WHERE newer.round > (SELECT CAST(value AS INTEGER) FROM run WHERE name = 'oldest') AND newer.round <= ?
)
"""
_NEWEST = "SELECT round, sum, data FROM rows WHERE client = ? ORDER BY round DESC LIMIT 1"
_NEWEST_SUM = _NEWEST.replace("round, sum, data", "sum")
# With MAX, SQLite takes the other columns from the row that has the largest value.
_SEEN = "SELECT sum, MAX(round) FROM rows WHERE round <= ? GROUP BY client"
MOST_ROW_BYTES = 10**9 - 1000  # SQLite allows 10**9 with the other columns
_SUM_BYTES = 16
_PAGE_BYTES = 8192  # only rows of half a page to a page waste much space


class Owner(NamedTuple):
    """The run that a file belongs to."""

    name: str  # says what it is trained with, such as its partition
    config: dict[str, Any]  # nested dicts, as JSON gives them


class ClientRows:
    """The file of one run. Errors are a `UserError` of one line, or an `OSError` if the disk is full."""

    def __init__(self, path: pathlib.Path, run: Owner, from_round: int | None):
        """Opens the file, which `check_rows` has checked, or makes it.

        `from_round` is the round to resume from; later rows are deleted. None: a new run; all rows are deleted. Raises
        a UserError if the file is damaged, as far as SQLite notices here, and OSError if it cannot be written.
        """
        self._path = path
        if from_round is None:
            path.unlink(missing_ok=True)
        with self._one_line():
            self._file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._file.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            self._file.executescript(_TABLES)
            if from_round is None:
                begin = [("run", run.name), ("config", json.dumps(run.config)), ("oldest", "0"), ("reached", "0")]
                self._file.executemany("INSERT INTO run VALUES (?, ?)", begin)
            else:
                with self._file:
                    self._file.execute("DELETE FROM rows WHERE round > ?", (from_round,))
                    self._file.execute("DELETE FROM seen WHERE round > ?", (from_round,))
                    self._file.execute("UPDATE run SET value = ? WHERE name = 'reached'", (str(from_round),))
            # The exclusive or of the checksums of each client's newest row.
            self._seen = 0 if from_round is None else _seen(self._file, from_round)
            self._file.execute("BEGIN")
        self._committed = -1 if from_round is None else from_round  # the last round that a checkpoint may see

    def read(self, client: int) -> bytes | None:
        """The newest row of a client; None if it has none. Raises a UserError if it is damaged."""
        with self._one_line():
            found = self._file.execute(_NEWEST, (client,)).fetchone()
            if found is None:
                return None
            number, digest, data = found
            is_whole = digest == _sum(client, number, data)
        if not is_whole:
            raise UserError(f"{self._path}: the row of client {client} is not what was written; put a copy back")
        return data

    def write(self, client: int, round_number: int, data: bytes) -> None:
        """Writes a client's row in the current transaction, where it replaces an earlier one; `commit` ends it."""
        row = (client, round_number, _sum(client, round_number, data), data)
        with self._one_line():
            old = self._file.execute(_NEWEST_SUM, (client,)).fetchone()
            self._seen ^= int.from_bytes(row[2]) ^ int.from_bytes(old[0] if old else b"")
            self._file.execute("DELETE FROM rows WHERE client = ? AND round > ?", (client, self._committed))
            self._file.execute("INSERT INTO rows VALUES (?, ?, ?, ?)", row)

    def commit(self, round_number: int, kept: list[int]) -> None:
        """Ends the transaction: the rows up to a round are on the disk, before the round's checkpoint is written.

        Rows that no checkpoint of the `kept` rounds sees are deleted.
        """
        with self._one_line():
            self._file.execute("UPDATE run SET value = ? WHERE name = 'reached'", (str(round_number),))
            self._file.execute(
                "INSERT OR REPLACE INTO seen VALUES (?, ?)", (round_number, self._seen.to_bytes(_SUM_BYTES))
            )
            if kept:
                self._file.execute("DELETE FROM seen WHERE round < ?", (min(kept),))
                self._file.execute(_DELETE_HIDDEN, (min(kept),))
                self._file.execute("UPDATE run SET value = ? WHERE name = 'oldest'", (str(min(kept)),))
            self._file.execute("COMMIT")
            self._file.execute("BEGIN")
        self._committed = round_number

    def close(self) -> None:
        """Closes the file. Rows that were not committed are lost, as if the process had been killed."""
        self._file.close()

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except sqlite3.OperationalError as error:
            raise OSError(f"cannot write {self._path}: {first_line(error)}") from error
        except (sqlite3.DatabaseError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{self._path} is damaged: {first_line(error)}; put a copy back") from error


def _sum(client: int, round_number: int, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_SUM_BYTES, key=f"{client} {round_number}".encode()).digest()


def _seen(file: sqlite3.Connection, round_number: int) -> int:
    sums = (int.from_bytes(row[0]) for row in file.execute(_SEEN, (round_number,)))
    return functools.reduce(operator.xor, sums, 0)


def check_rows(path: pathlib.Path, run: Owner, from_round: int) -> None:
    """Checks every page of a resumed run's file, and that it has all rows.

    It writes nothing, except what SQLite undoes after a kill. Arguments are those of `ClientRows`; the run may differ
    in fields that change no result. Raises a UserError if the file is missing, damaged, read-only or another run's,
    lacks a row, or does not reach the round.
    """
    try:
        odd = "is missing, which has the clients' memory; put it back, or train in another workdir"
        if path.exists():
            with contextlib.closing(sqlite3.connect(path)) as file:
                odd = _what_is_odd(file, run, from_round)
    except (sqlite3.DatabaseError, ValueError, TypeError, KeyError) as error:
        is_read_only = getattr(error, "sqlite_errorname", "").startswith("SQLITE_READONLY")
        what = "cannot be written" if is_read_only else "is damaged"
        odd = f"{what}: {first_line(error)}; put a copy back, which may be written to"
    if odd:
        raise UserError(f"{path} {odd}")


def _what_is_odd(file: sqlite3.Connection, run: Owner, from_round: int) -> str:
    """Why a file is not that of a resumed run, and what to do; '' if it is. Raises SQLite's errors if it is damaged."""
    if (found := file.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(found)
    file.execute("DELETE FROM rows WHERE false")  # deletes nothing, but fails if the file is read-only
    found = dict(file.execute("SELECT name, value FROM run"))
    if found["run"] != run.name or forbidden_changes(json.loads(found["config"]), run.config):
        return "is another run's; put this run's back, or train in another workdir"
    if int(found["oldest"]) <= from_round <= int(found["reached"]):
        kept = file.execute("SELECT sum FROM seen WHERE round = ?", (from_round,)).fetchone()
        is_whole = kept is not None and int.from_bytes(kept[0]) == _seen(file, from_round)
        return "" if is_whole else "lacks rows of clients, or has others than were written; put a copy back"
    return (
        f"has the rounds {found['oldest']} to {found['reached']}, but the checkpoint is of round {from_round}; put the "
        "copy back that was saved with it, or train in another workdir"
    )
