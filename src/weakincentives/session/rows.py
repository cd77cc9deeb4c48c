"""Text by key in an SQLite file that threads and processes share."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weakincentives.errors import ResourceError
from weakincentives.retry import LOCK, code_of

if TYPE_CHECKING:
    from sqlite3 import Connection

_BUSY_SECONDS = 30.0
_MARKS = {"application_id": 0x57494E4B, "user_version": 2}  # "WINK": whose file it is
_TABLES = """
CREATE TABLE memory (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, value TEXT NOT NULL, folded TEXT NOT NULL
);
CREATE TABLE memory_state (revision INTEGER NOT NULL);
INSERT INTO memory_state VALUES (0);
CREATE TABLE memory_changes (
    revision INTEGER NOT NULL, key TEXT NOT NULL, PRIMARY KEY (revision, key)
) WITHOUT ROWID;
"""
_KNOWN_REVISIONS = 1000
"""How many of the last revisions name the keys that they changed."""


class RowStore:
    """Text by key, each with the folded text that is searched.

    A transaction is written whole or not at all, even if the process is killed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: str = os.path.abspath(os.fspath(path))
        self._lock = threading.RLock()
        self._depth = 0
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._open()

    def revision(self) -> int:
        """Return a number that grows with every change, whichever process makes it."""
        return self._rows("SELECT revision FROM memory_state")[0][0]

    def load(self) -> dict[str, str]:
        return dict(self._rows("SELECT key, value FROM memory"))

    def changed_since(self, revision: int) -> dict[str, str | None] | None:
        """Return the text of each key changed since, None if deleted. None if that is unknown."""
        newer = "FROM memory_changes WHERE revision > ?"
        known = self._rows(
            f"SELECT (SELECT revision FROM memory_state) - ? = count(DISTINCT revision) {newer}",
            revision,
            revision,
        )
        if not known[0][0]:
            return None
        keys = f"(SELECT DISTINCT key {newer})"
        return dict(
            self._rows(f"SELECT key, value FROM {keys} LEFT JOIN memory USING (key)", revision)
        )

    def search(self, words: Sequence[str]) -> list[str]:
        """Return the keys of the rows whose folded text contains every word."""
        conditions = " AND ".join(["instr(folded, ?)"] * len(words))
        return [key for (key,) in self._rows(f"SELECT key FROM memory WHERE {conditions}", *words)]

    def put(self, rows: Mapping[str, tuple[str, str] | None]) -> int:
        """Set rows, delete those that are None, and return the new revision."""
        with self.transaction():
            run = self._connected().execute
            for key, row in rows.items():
                if row is None:
                    run("DELETE FROM memory WHERE key = ?", (key,))
                else:
                    run(
                        "INSERT INTO memory (key, value, folded) VALUES (?, ?, ?) ON CONFLICT (key)"
                        " DO UPDATE SET value = excluded.value, folded = excluded.folded",
                        (key, *row),
                    )
            run("UPDATE memory_state SET revision = revision + 1")
            revision = self.revision()
            run("DELETE FROM memory_changes WHERE revision <= ?", (revision - _KNOWN_REVISIONS,))
            for key in rows:
                run("INSERT INTO memory_changes VALUES (?, ?)", (revision, key))
            return revision

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Write everything in the block, or nothing. Inner transactions join the outer one."""
        with self._lock:
            connection = self._connected()
            if self._depth:
                yield
                return
            try:
                connection.execute("BEGIN IMMEDIATE")
                self._depth = 1
                yield
                connection.execute("COMMIT")
            except BaseException:  # an interrupt must not leave a transaction open
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            finally:
                self._depth = 0

    def close(self) -> None:
        with self._lock:
            self._finalizer()
            self._connection = None

    def _rows(self, query: str, *values: str | int) -> list[Any]:
        with self._lock:
            return self._connected().execute(query, values).fetchall()

    def _connected(self) -> Connection:
        if self._pid != os.getpid():
            self._open()  # a forked child must not use its parent's connection
        if self._connection is None:
            raise ResourceError(f"The memory in {self.path} is closed")
        return self._connection

    def _open(self) -> None:
        import sqlite3  # slow to import, and memory need not be on disk

        self._pid = os.getpid()
        self._connection: Connection | None = sqlite3.connect(
            self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        self._finalizer = weakref.finalize(self, _close, self._connection, self._pid)
        try:
            _use_write_ahead_log(self._connection)
            with self.transaction():
                self._set_up(self._connection)
        except BaseException as error:
            self.close()
            if isinstance(error, sqlite3.DatabaseError) and code_of(error) != LOCK:
                raise ResourceError(f"{self.path} cannot be used as a memory: {error}") from error
            raise

    def _set_up(self, connection: Connection) -> None:
        found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in _MARKS]
        tables = connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
        if found == [0, 0] and tables is None:
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            for name, value in _MARKS.items():
                connection.execute(f"PRAGMA {name} = {value}")
        elif found != [*_MARKS.values()]:
            raise ResourceError(
                f"{self.path} is not a memory that this version can read: it belongs to "
                "another program, or to another version. Choose another path"
            )


def _close(connection: Connection, pid: int) -> None:
    if pid == os.getpid():
        connection.close()


def _use_write_ahead_log(connection: Connection) -> None:
    """Switch the journal mode. This needs an exclusive lock, which SQLite does not wait for."""
    for attempt in range(100):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except Exception as error:
            if code_of(error) != LOCK or attempt == 99:
                raise
        threading.Event().wait(0.05)
