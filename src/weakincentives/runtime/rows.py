"""Text by key in an SQLite file: whole transactions, several processes, full-text search."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

from weakincentives.errors import ResourceError
from weakincentives.retry import LOCK, code_of

if TYPE_CHECKING:
    from sqlite3 import Connection

_BUSY_SECONDS = 30.0
_APPLICATION = 0x57494E4B  # "WINK": says whose file it is
_VERSION = 1
_TABLES = """
CREATE TABLE memory (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, value TEXT NOT NULL, folded TEXT NOT NULL
);
CREATE TABLE memory_state (revision INTEGER NOT NULL, indexed INTEGER NOT NULL);
INSERT INTO memory_state VALUES (0, 0);
"""
# Triples of characters: they find a word also inside another one, as plain comparing does.
_INDEX = (
    "CREATE VIRTUAL TABLE IF NOT EXISTS memory_text "
    "USING fts5(folded, tokenize='trigram case_sensitive 1')"
)
_SHORTEST_INDEXED = 3


class RowStore:
    """Text by key, in one SQLite file.

    Any number of threads and processes may have the same file open. A transaction is kept whole or
    not at all, whatever happens to the process.

    Args:
        path: The file. It is made if missing, with the directories that lead to it.
        index: Whether to keep an index for ``search``, where SQLite can. Without one the file is
            smaller, writing is faster, and searching reads every row.
    """

    def __init__(self, path: str | os.PathLike[str], *, index: bool = True) -> None:
        self.path: str = os.path.abspath(os.fspath(path))
        self._index = index
        self._lock = threading.RLock()
        self._depth = 0
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._open()

    # Reading

    def get(self, key: str) -> str | None:
        """Return the text at a key, or None."""
        found = self._rows("SELECT value FROM memory WHERE key = ?", key)
        return found[0][0] if found else None

    peek = get
    """As a call sees the file, there is a difference."""

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with a prefix, sorted."""
        with self._lock:
            rows = self._connected().execute(
                "SELECT key FROM memory WHERE key >= ? ORDER BY key", (prefix,)
            )
            return list(takewhile(lambda key: key.startswith(prefix), (row[0] for row in rows)))

    def search(self, words: tuple[str, ...]) -> list[str]:
        """Return the keys of the rows that hold every word; words are folded already."""
        query = "SELECT key FROM memory WHERE " + " AND ".join(["instr(folded, ?)"] * len(words))
        indexed = [word for word in words if len(word) >= _SHORTEST_INDEXED]
        if not (self._index and indexed):
            return [key for (key,) in self._rows(query, *words)]
        self._renew_index()
        query += " AND id IN (SELECT rowid FROM memory_text WHERE memory_text MATCH ?)"
        quoted = " AND ".join('"' + word.replace('"', '""') + '"' for word in indexed)
        return [key for (key,) in self._rows(query, *words, quoted)]

    def revision(self) -> int:
        """Return a number that grows whenever anything is changed, by whichever process."""
        return self._rows("SELECT revision FROM memory_state")[0][0]

    # Writing

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Keep all that is done inside, or none of it. Transactions inside join the outer one."""
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

    def put(self, rows: Mapping[str, str | None]) -> None:
        """Make keys hold these texts, and nothing for None."""
        with self.transaction():
            run = self._connected().execute
            revision, indexed = self._rows("SELECT revision, indexed FROM memory_state")[0]
            index = self._index and indexed == revision
            for key, text in rows.items():
                if index:
                    run("DELETE FROM memory_text WHERE rowid = (SELECT id FROM memory WHERE key = ?)", (key,))  # fmt: skip  # noqa: E501
                if text is None:
                    run("DELETE FROM memory WHERE key = ?", (key,))
                    continue
                folded = search_text(key, text)
                run(
                    "INSERT INTO memory (key, value, folded) VALUES (?, ?, ?) ON CONFLICT (key) "
                    "DO UPDATE SET value = excluded.value, folded = excluded.folded",
                    (key, text, folded),
                )
                if index:
                    run(
                        "INSERT INTO memory_text (rowid, folded) "
                        "SELECT id, folded FROM memory WHERE key = ?",
                        (key,),
                    )
            run(
                "UPDATE memory_state SET revision = ?, indexed = ?",
                (revision + 1, revision + 1 if index else indexed),
            )

    def close(self) -> None:
        """Let go of the file. What is in it stays."""
        with self._lock:
            self._finalizer()
            self._connection = None

    # The file

    def _rows(self, query: str, *values: object) -> list[Any]:
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
            self._set_up(self._connection)
        except BaseException as error:
            self.close()
            if isinstance(error, sqlite3.DatabaseError) and code_of(error) != LOCK:
                raise ResourceError(f"{self.path} cannot be used as a memory: {error}") from error
            raise

    def _set_up(self, connection: Connection) -> None:
        _use_write_ahead_log(connection)
        with self.transaction():
            found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in _MARKS]
            if found == [0, 0] and not _has_tables(connection):
                for statement in _TABLES.split(";"):
                    connection.execute(statement)
                for name, value in _MARKS.items():
                    connection.execute(f"PRAGMA {name} = {value}")
            elif found != [*_MARKS.values()]:
                raise ResourceError(
                    f"{self.path} is not a memory that this version can read: it belongs to "
                    "another program, or to a newer version. Choose another path"
                )
            if self._index:
                self._index = _make_index(connection)

    def _renew_index(self) -> None:
        """Bring the index up to date with what was written by somebody who keeps none."""
        revision, indexed = self._rows("SELECT revision, indexed FROM memory_state")[0]
        if revision == indexed:
            return
        with self.transaction():
            run = self._connected().execute
            run("DELETE FROM memory_text")
            run("INSERT INTO memory_text (rowid, folded) SELECT id, folded FROM memory")
            run("UPDATE memory_state SET indexed = revision")


_MARKS = {"application_id": _APPLICATION, "user_version": _VERSION}


def _close(connection: Connection, pid: int) -> None:
    if pid == os.getpid():
        connection.close()


def _use_write_ahead_log(connection: Connection) -> None:
    """Switch the file over. That needs it alone for a moment, and SQLite does not wait for it."""
    for attempt in range(100):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except Exception as error:
            if code_of(error) != LOCK or attempt == 99:
                raise
        threading.Event().wait(0.05)


def _has_tables(connection: Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None


def _make_index(connection: Connection) -> bool:
    """Make the index, if there is none yet; returns whether SQLite can."""
    try:
        connection.execute(_INDEX)
        return True
    except Exception as error:
        if "no such module" in str(error) or "no such tokenizer" in str(error):
            return False
        raise


# What is searched


def search_text(key: str, text: str) -> str:
    """Return what a search looks at: the key and all text in a value, folded."""
    return fold("\n".join([key, *_texts(json.loads(text))]))


def fold(text: str) -> str:
    """Return text as it is compared, in any case."""
    plain = text.casefold().replace("\0", "\ufffd")
    return plain.encode("utf-8", "replace").decode()  # SQLite takes no half of a surrogate pair


def _texts(data: object) -> Generator[str]:
    """Yield the texts and numbers in frozen data, and the names they have there."""
    if isinstance(data, list):
        for item in cast("list[object]", data):
            yield from _texts(item)
    elif isinstance(data, dict):
        fields = cast("dict[str, object]", data)
        tagged = "$" in fields
        for name, item in fields.items():
            if not (tagged and name in ("$", "type", "base64")):
                if not tagged:
                    yield name
                yield from _texts(item)
    elif isinstance(data, (str, int, float)):
        yield str(data)
