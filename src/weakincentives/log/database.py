"""The log in a SQLite database: append operations, and read them back checked.

Only SQLite opens the files of the database: closing any other descriptor of them would drop its
locks. ``schema.sql`` beside this module says what the rows mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weakincentives.errors import HistoryDamaged, LogUnavailable, StaleHead, StoreRefused
from weakincentives.log.operation import (
    NO_DELTA,
    CallRecord,
    Change,
    Entry,
    Operation,
    Parts,
    SessionDelta,
    SliceChange,
)

if TYPE_CHECKING:
    import sqlite3

APPLICATION = 0x57494E4B  # "WINK"
VERSION = 1
_WAIT = 10.0
"""Seconds that a transaction waits for another process; ours queue before they ask SQLite."""

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode


class Log:
    """The operations of a workspace or of a session, in one database.

    ``safe`` makes each commit survive a loss of power; without it, the last ones may be lost, and
    the database stays whole. For several threads; a forked child must open its own.
    """

    def __init__(self, path: Path, *, safe: bool = False) -> None:
        import sqlite3

        self.path = path
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._errors = sqlite3.Error
        try:
            self._connection = sqlite3.connect(
                path, timeout=_WAIT, isolation_level=None, check_same_thread=False
            )
            try:
                self._set_up(safe=safe)
            except BaseException:
                self._connection.close()
                raise
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def _set_up(self, *, safe: bool) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute(f"PRAGMA synchronous = {'FULL' if safe else 'NORMAL'}")
        self._connection.execute("PRAGMA foreign_keys = ON")
        with self._transaction():
            (application,) = self._row("PRAGMA application_id")
            (version,) = self._row("PRAGMA user_version")
            if (application, version) == (0, 0) and not self._row(
                "SELECT count(*) FROM sqlite_master"
            )[0]:
                for statement in _schema():
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA application_id = {APPLICATION}")
                self._connection.execute(f"PRAGMA user_version = {VERSION}")
            elif (application, version) != (APPLICATION, VERSION):
                raise StoreRefused(
                    f"{self.path} is not a log of this version of wink. It is left as it is"
                )

    def close(self) -> None:
        """Close the database; what was appended stays."""
        with self._lock:
            self._connection.close()

    # Appending

    def append(
        self, operation: Operation, *, line: str = "", contents: Iterable[bytes] = ()
    ) -> Operation:
        """Commit an operation and make it the head of its line; returns it with its number.

        If this raises ``LogUnavailable``, only :meth:`has` tells whether it was committed.

        Raises:
            StaleHead: ``operation.parent`` is not the head of the line.
            LogUnavailable: The database cannot be written.
        """
        rows = [_change_row(change) for change in operation.changes]
        with self._transaction():
            head = self.head(line)
            if head != operation.parent:
                raise StaleHead(
                    f"operation {operation.parent} is not the head of {line or 'the workspace'}: "
                    f"that is {head}"
                )
            (last,) = self._row("SELECT coalesce(max(number), 0) FROM operation")
            operation = replace(operation, number=last + 1)
            values = _operation_row(operation)
            self._connection.execute(_INSERT, (*values, len(rows), _checksum(values, rows)))
            self._connection.executemany(
                "INSERT INTO change (path, number, before, after, origin) VALUES (?, ?, ?, ?, ?)",
                [(path, operation.number, *rest) for path, *rest in rows],
            )
            self._connection.executemany(
                "INSERT OR IGNORE INTO content VALUES (?, ?)",
                [(hashlib.sha256(data).hexdigest(), data) for data in contents],
            )
            self._connection.execute(
                "INSERT INTO head VALUES (?, ?) ON CONFLICT DO UPDATE SET number = excluded.number",
                (line, operation.number),
            )
        return operation

    # Reading

    def head(self, line: str = "") -> int:
        """Return the newest operation of a line; 0 if it has none."""
        found = self._rows("SELECT number FROM head WHERE line = ?", (line,))
        return found[0][0] if found else 0

    def has(self, operation_id: str) -> bool:
        """Tell whether an operation is committed."""
        return bool(self._rows("SELECT 1 FROM operation WHERE id = ?", (operation_id,)))

    def read(self, number: int) -> Operation:
        """Return an operation.

        Raises:
            LookupError: There is none with this number.
            HistoryDamaged: The rows are not as they were written.
        """
        found = self._rows(
            f"SELECT {_COLUMNS}, changes, checksum FROM operation WHERE number = ?", (number,)
        )
        if not found:
            raise LookupError(f"the log has no operation {number}")
        *values, count, checksum = found[0]
        rows = self._rows(
            "SELECT path, before, after, origin FROM change WHERE number = ? ORDER BY path",
            (number,),
        )
        if len(rows) != count or _checksum(values, rows) != checksum:
            raise HistoryDamaged(f"operation {number} is damaged: it is neither shown nor undone")
        return _operation(values, rows)

    def line(self, number: int) -> Iterator[Operation]:
        """Yield an operation and those before it on its line, newest first."""
        while number:
            operation = self.read(number)
            yield operation
            number = operation.parent

    def content(self, digest: str) -> bytes:
        """Return a stored content.

        Raises:
            LookupError: It is not stored here.
            HistoryDamaged: It is not what was stored.
        """
        found = self._rows("SELECT data FROM content WHERE digest = ?", (digest,))
        if not found:
            raise LookupError(f"the log has no content {digest}")
        data: bytes = found[0][0]
        if hashlib.sha256(data).hexdigest() != digest:
            raise HistoryDamaged(f"content {digest} is damaged: it is neither shown nor restored")
        return data

    # SQLite

    @contextmanager
    def _transaction(self) -> Generator[None]:
        with self._lock:
            self._check_process()
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
            except self._errors as error:
                raise self._translated(error) from error

    def _rows(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            self._check_process()
            try:
                return self._connection.execute(statement, values).fetchall()
            except self._errors as error:
                raise self._translated(error) from error

    def _row(self, statement: str) -> tuple[Any, ...]:
        return self._rows(statement)[0]

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(f"{self.path} was opened before a fork. Open it in this process")

    def _translated(self, error: sqlite3.Error) -> LogUnavailable:
        return LogUnavailable(f"{self.path}: {error}")


@cache
def _schema() -> tuple[str, ...]:
    """Return the statements of the schema."""
    import sqlite3

    statements: list[str] = []
    pending = ""
    for text in files("weakincentives.log").joinpath("schema.sql").read_text().splitlines(True):
        pending += text
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return tuple(statements)


# Rows

_FIELDS = (
    *("number", "id", "parent", "merged", "kind", "session", "call_id", "tool", "arguments"),
    *("answer", "outcome", "started", "duration", "delta", "undoes"),
)
_COLUMNS = ", ".join(_FIELDS)
_INSERT = (
    f"INSERT INTO operation ({_COLUMNS}, changes, checksum) "
    f"VALUES ({', '.join('?' * (len(_FIELDS) + 2))})"
)


def _operation_row(operation: Operation) -> tuple[Any, ...]:
    call, delta = operation.call, operation.session
    of_call: tuple[Any, ...] = (None,) * 8
    if call is not None:
        of_call = (
            call.session, call.id, call.tool, call.arguments, call.answer, call.outcome,
            call.started, call.duration,
        )  # fmt: skip
    return (
        operation.number,
        operation.id,
        operation.parent,
        operation.merged,
        operation.kind,
        *of_call,
        None if delta == NO_DELTA else _encode(delta),
        _encode(operation.undoes) if operation.undoes else None,
    )


def _operation(values: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Operation:
    number, identity, parent, merged, kind, *of_call, delta, undoes = values
    session, call_id, tool, arguments, answer, outcome, started, duration = of_call
    state, appended = ((), ()) if delta is None else json.loads(delta)
    return Operation(
        id=identity,
        number=number,
        parent=parent,
        merged=merged,
        kind=kind,
        call=None
        if call_id is None
        else CallRecord(
            id=call_id,
            session=session,
            tool=tool,
            arguments=arguments,
            answer=answer,
            outcome=outcome,
            started=started,
            duration=duration,
        ),
        changes=tuple(sorted(map(_change, rows))),
        session=SessionDelta(
            tuple(SliceChange(*each) for each in state),
            tuple((name, text) for name, text in appended),
        ),
        undoes=() if undoes is None else tuple(json.loads(undoes)),
    )


def _change_row(change: Change) -> tuple[Any, ...]:
    origin = None if change.origin is None else stored_path(change.origin)
    return stored_path(change.path), _stored(change.before), _stored(change.after), origin


def _change(row: Sequence[Any]) -> Change:
    path, before, after, origin = row
    return Change(
        read_path(path), _read(before), _read(after), None if origin is None else read_path(origin)
    )


def _stored(entry: Entry | None) -> str | None:
    if entry is None:
        return None
    fields = entry._asdict()
    fields["xattrs"] = [[name, value.hex()] for name, value in entry.xattrs]
    return _encode({name: value for name, value in fields.items() if value not in (0, "", [])})


def _read(text: str | None) -> Entry | None:
    if text is None:
        return None
    fields = json.loads(text)
    xattrs = tuple((name, bytes.fromhex(value)) for name, value in fields.pop("xattrs", ()))
    return Entry(**fields, xattrs=xattrs)


def stored_path(parts: Parts) -> str:
    """Return a path as text; bytes that are not UTF-8 as ``\\udcXX``, a backslash as two."""
    text = "/".join(parts).replace("\\", "\\\\")
    return text.encode("utf-8", "backslashreplace").decode()


def read_path(text: str) -> Parts:
    """Return the path that :func:`stored_path` wrote."""
    if "\\" in text:
        text = _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else "\\", text)
    return tuple(text.split("/")) if text else ()


_ESCAPED = re.compile(r"\\(?:u(dc[89a-f][0-9a-f])|\\)")


def _checksum(values: Sequence[Any], rows: Iterable[Sequence[Any]]) -> int:
    ordered = sorted(list(row) for row in rows)
    return zlib.crc32(_encode([list(values), ordered]).encode())
