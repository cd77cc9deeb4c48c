"""The log in a SQLite database: append operations, and read them back checked.

Only SQLite opens the files of the database: closing any other descriptor of them would drop its
locks. ``schema.sql`` beside this module says what the rows mean.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import threading
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weakincentives.errors import (
    ContentDamaged,
    HistoryDamaged,
    LogDamaged,
    LogUnavailable,
    StaleHead,
    StoreRefused,
)
from weakincentives.log.operation import (
    NO_DELTA,
    CallRecord,
    Change,
    Entry,
    Operation,
    Parts,
    SessionDelta,
    SliceChange,
    Stat,
)

if TYPE_CHECKING:
    import sqlite3

APPLICATION = 0x57494E4B  # "WINK"
VERSION = 1
_WAIT = 10.0
"""Seconds that a transaction waits for another process; ours queue before they ask SQLite."""

_ERROR, _CORRUPT, _NOT_A_DATABASE = 1, 11, 26

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode


class Summary(NamedTuple):
    """An operation without what it changed."""

    number: int
    id: str
    parent: int
    size: int
    time: float


class Garbage(NamedTuple):
    """What removed operations leave behind, outside of the database."""

    ids: tuple[str, ...]
    """The ids of the operations: what each displaced is kept under its id."""
    contents: frozenset[str]
    """The digests that no other operation needs."""


class Log:
    """The operations of a workspace or of a session, in one database.

    ``safe`` makes each commit survive a loss of power; without it, the last ones may be lost, and
    the database stays whole. Without ``create``, it is only read, and a missing one is a
    LookupError. For several threads; a forked child must open its own.
    """

    def __init__(self, path: Path, *, safe: bool = False, create: bool = True) -> None:
        import sqlite3

        self.path = path
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._errors = sqlite3.Error
        self.is_damaged = False
        """Whether SQLite has called it malformed."""
        try:
            self._connection = sqlite3.connect(
                f"{Path(os.path.abspath(path)).as_uri()}?mode={'rwc' if create else 'rw'}",
                timeout=_WAIT,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
            # A damaged text is read as well: its checksum shows that.
            self._connection.text_factory = _text
            try:
                self._inode = os.stat(path).st_ino
                self._set_up(safe=safe) if create else self._check()
            except BaseException:
                self._connection.close()
                raise
        except sqlite3.Error as error:
            if not create and not path.exists():
                raise LookupError(f"there is no log at {path}") from error
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
                raise self._refused()

    def _check(self) -> None:
        """Raise unless this is a log; for readers, who change nothing."""
        self._connection.execute("PRAGMA query_only = ON")
        (application,) = self._row("PRAGMA application_id")
        (version,) = self._row("PRAGMA user_version")
        if (application, version) == (0, 0):
            raise LookupError(f"{self.path} has not been begun")
        if (application, version) != (APPLICATION, VERSION):
            raise self._refused()

    def _refused(self) -> StoreRefused:
        return StoreRefused(
            f"{self.path} is not a log of this version of wink, or is damaged. It is left as it is;"
            " move it and the files beside it away, and a new log begins. Files of the workspace"
            " are not affected"
        )

    def is_at_its_path(self) -> bool:
        """Tell whether the database is still where it was opened."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the database; what was appended stays."""
        with self._lock:
            self._connection.close()

    # Appending

    def append(
        self,
        operation: Operation,
        *,
        line: str = "",
        contents: Iterable[bytes] = (),
        needs: Iterable[str] = (),
    ) -> Operation:
        """Commit an operation and make it the head of its line; returns it with its number.

        That is the next one, or ``operation.number`` if that is higher. ``contents`` are stored by
        their digests; ``needs`` are the digests of those that are stored elsewhere. If this raises
        ``LogUnavailable``, only :meth:`has` tells whether it was committed.

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
            operation = replace(operation, number=max(self.last + 1, operation.number))
            values = _operation_row(operation)
            self._connection.execute(_INSERT, (*values, len(rows), _checksum(values, rows)))
            number = (operation.number,)
            if not self._rows("SELECT 1 FROM operation WHERE number = ?", number):
                self.is_damaged = True  # rows out of order, which SQLite does not notice
                raise LogDamaged(f"{self.path}: a new row cannot be found")
            self._connection.executemany(
                "INSERT INTO change (path, number, before, after, origin, stats)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                [(path, operation.number, *rest) for path, *rest in rows],
            )
            rows_of = {hashlib.sha256(data).hexdigest(): data for data in contents}
            self._connection.executemany(
                "INSERT OR IGNORE INTO content VALUES (?, ?)", rows_of.items()
            )
            self._connection.executemany(
                "INSERT INTO need VALUES (?, ?)",
                [(digest, operation.number) for digest in {*rows_of, *needs}],
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

    @property
    def removed(self) -> int:
        """The newest operation that was removed; 0 if none was."""
        found = self._rows("SELECT number FROM removed WHERE line = ''")
        return found[0][0] if found else 0

    @property
    def last(self) -> int:
        """The highest number that an operation has had; 0 if there was none."""
        found = self._row(
            "SELECT max(coalesce((SELECT max(number) FROM operation), 0),"
            " coalesce((SELECT max(number) FROM head), 0))"
        )
        return found[0]

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
            "SELECT path, before, after, origin, stats FROM change WHERE number = ? ORDER BY path",
            (number,),
        )
        try:
            is_whole = len(rows) == count and _checksum(values, rows) == checksum
        except TypeError:  # a flipped bit has made a text a blob, for example
            is_whole = False
        if not is_whole:
            raise HistoryDamaged(f"operation {number} is damaged: it is neither shown nor undone")
        return _operation(values, rows)

    def number(self, operation_id: str) -> int:
        """Return the number of an operation; raises LookupError if there is none with this id."""
        found = self._rows("SELECT number FROM operation WHERE id = ?", (operation_id,))
        if not found:
            raise LookupError(f"the log has no operation {operation_id}")
        return found[0][0]

    def numbers_of(self, call_id: str) -> list[int]:
        """Return the operations of a call, newest first."""
        found = self._rows(
            "SELECT number FROM operation WHERE call_id = ? ORDER BY number DESC", (call_id,)
        )
        return [number for (number,) in found]

    def touching(self, path: Parts, *, below: bool = False) -> list[int]:
        """Return the operations that changed a path or something above it, oldest first.

        With ``below``, also those that changed something below it.
        """
        where = [stored_path(path[:depth]) for depth in range(len(path) + 1)]
        marks = ", ".join("?" * len(where))
        statement = f"SELECT number FROM change WHERE path IN ({marks})"
        if below and path:  # "0" is the character after "/"
            statement += " UNION SELECT number FROM change WHERE path > ? AND path < ?"
            where += [f"{stored_path(path)}/", f"{stored_path(path)}0"]
        elif below:
            statement, where = "SELECT number FROM change", []
        found = self._rows(f"SELECT DISTINCT number FROM ({statement}) ORDER BY number", where)
        return [number for (number,) in found]

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
            ContentDamaged: It is not what was stored.
        """
        found = self._rows("SELECT data FROM content WHERE digest = ?", (digest,))
        if not found:
            raise LookupError(f"the log has no content {digest}")
        data: object = found[0][0]
        if not isinstance(data, bytes) or hashlib.sha256(data).hexdigest() != digest:
            raise ContentDamaged(errno.EBADMSG, "its saved content is damaged", digest)
        return data

    def summaries(self) -> list[Summary]:
        """Return what each operation takes, oldest first."""
        found = self._rows(
            "SELECT number, id, parent, size, started FROM operation ORDER BY number"
        )
        return [
            Summary(
                number,
                str(identity),
                parent if isinstance(parent, int) else 0,
                size if isinstance(size, int) else 0,  # a damaged row: `read` says so
                started if isinstance(started, float | int) else 0.0,
            )
            for number, identity, parent, size, started in found
        ]

    def position(self) -> tuple[int, int]:
        """Return a value that differs whenever operations were appended or removed."""
        last, count = self._row("SELECT coalesce(max(number), 0), count(*) FROM operation")
        return last, count

    # Garbage

    def remove(
        self, numbers: Iterable[int], *, gone: Iterable[str] = (), safe: bool = False
    ) -> Garbage:
        """Remove operations, and the rows that only they needed, in one transaction.

        Returns what only they needed besides; :meth:`garbage` has that, too, until it is ``gone``.
        With ``safe`` the removal is on disk before this returns: only then may files go.
        """
        numbers = list(numbers)
        ids: list[str] = []
        needed: set[str] = set()
        with self._synced() if safe else nullcontext(), self._transaction():
            for number in numbers:
                found = self._rows("SELECT digest FROM need WHERE number = ?", (number,))
                needed.update(digest for (digest,) in found)
                removed = "DELETE FROM operation WHERE number = ? RETURNING id"
                ids += [identity for (identity,) in self._rows(removed, (number,))]
            if numbers:
                self._connection.execute(
                    "INSERT INTO removed VALUES ('', ?) ON CONFLICT DO UPDATE"
                    " SET number = max(number, excluded.number)",
                    (max(numbers),),
                )
            still = "SELECT 1 FROM need WHERE digest = ? LIMIT 1"
            unused = {digest for digest in needed if not self._rows(still, (digest,))}
            self._connection.executemany(
                "DELETE FROM content WHERE digest = ?", [(digest,) for digest in unused]
            )
            self._connection.executemany(
                "DELETE FROM garbage WHERE name = ?", [(name,) for name in gone]
            )
            self._connection.executemany(
                "INSERT OR IGNORE INTO garbage VALUES (?)", [(name,) for name in (*ids, *unused)]
            )
        return Garbage(tuple(ids), frozenset(unused))

    def compact(self) -> None:
        """Give the disk back what removed rows took, where that is worth it and there is room."""
        (free,) = self._row("PRAGMA freelist_count")
        (pages,) = self._row("PRAGMA page_count")
        if free * 2 > pages:
            with suppress(LogUnavailable):  # a full disk, for example
                self._rows("VACUUM")
                self._rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def garbage(self) -> set[str]:
        """Return the ids of removed operations, and the digests that no operation needs."""
        return {name for (name,) in self._rows("SELECT name FROM garbage")} - self.needed()

    def needed(self) -> set[str]:
        """Return the digests that operations need."""
        return {digest for (digest,) in self._rows("SELECT DISTINCT digest FROM need")}

    # SQLite

    @contextmanager
    def _synced(self) -> Generator[None]:
        """Have what is committed in the block, and before, on disk when it ends."""
        with self._lock:
            (usual,) = self._row("PRAGMA synchronous")
            self._rows("PRAGMA synchronous = FULL")
            try:
                yield
            finally:
                self._rows(f"PRAGMA synchronous = {usual}")

    @contextmanager
    def _transaction(self) -> Generator[None]:
        with self._lock:
            self._check_process()
            try:
                if self._connection.in_transaction:  # what failed could not be rolled back, either
                    self._connection.execute("ROLLBACK")
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
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        # Our statements are right: an error in one is a damaged schema.
        is_malformed = code in (_CORRUPT, _NOT_A_DATABASE) or (
            code == _ERROR and "transaction" not in str(error)
        )
        is_malformed = is_malformed or "FOREIGN KEY" in str(error)  # a row of ours is not found
        self.is_damaged = self.is_damaged or is_malformed
        kind = LogDamaged if is_malformed else LogUnavailable
        return kind(f"{self.path}: {error}")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


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
    *("answer", "outcome", "started", "duration", "delta", "undoes", "undone"),
    *("partly", "times", "size", "moment", "redo"),
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
        _encode(operation.undone) if operation.undone else None,
        _encode(operation.partly) if operation.partly else None,
        _encode([(stored_path(path), time) for path, time in operation.times])
        if operation.times
        else None,
        operation.size,
        operation.moment,
        operation.redo,
    )


def _operation(values: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Operation:
    number, identity, parent, merged, kind, *rest = values
    *of_call, delta, undoes, undone, partly, times, size, moment, redo = rest
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
        undone=() if undone is None else tuple(json.loads(undone)),
        partly=() if partly is None else tuple(json.loads(partly)),
        times=()
        if times is None
        else tuple((read_path(path), time) for path, time in json.loads(times)),
        size=size,
        moment=moment,
        redo=redo,
    )


def _change_row(change: Change) -> tuple[Any, ...]:
    path, before, after, origin, found, left = change
    return (
        stored_path(path),
        _stored(before),
        _stored(after),
        None if origin is None else stored_path(origin),
        None if found is None and left is None else _encode((found, left)),
    )


def _change(row: Sequence[Any]) -> Change:
    path, before, after, origin, stats = row
    found, left = (None, None) if stats is None else map(_stat, json.loads(stats))
    return Change(
        read_path(path),
        _read(before),
        _read(after),
        None if origin is None else read_path(origin),
        found,
        left,
    )


def _stat(values: Sequence[int] | None) -> Stat | None:
    return None if values is None else Stat(*values)


def _stored(entry: Entry | None) -> str | None:
    return None if entry is None else _encode(_fields(entry))


def _fields(entry: Entry) -> dict[str, Any]:
    """Return what differs from the defaults: the rows are for people, too."""
    fields: dict[str, Any] = {
        name: value for name, value in zip(Entry._fields, entry, strict=True) if value not in _NONE
    }
    if entry.xattrs:
        fields["xattrs"] = [[name, value.hex()] for name, value in entry.xattrs]
    return fields


_NONE = (0, "", ())


def _read(text: str | None) -> Entry | None:
    return None if text is None else _entry(json.loads(text))


def _entry(fields: dict[str, Any]) -> Entry:
    xattrs = tuple((name, bytes.fromhex(value)) for name, value in fields.pop("xattrs", ()))
    return Entry(**fields, xattrs=xattrs)


# Manifests


def write_manifest(listed: Mapping[Parts, tuple[Entry, Stat | None]]) -> bytes:
    """Return the content that lists everything below a directory, by relative path.

    It is compressed JSON: for each path, sorted, the entry and what it is recognised by.
    """
    rows = [(stored_path(path), _fields(entry), stat) for path, (entry, stat) in listed.items()]
    rows.sort(key=itemgetter(0))
    return zlib.compress(_encode(rows).encode(), 1)


def read_manifest(data: bytes) -> dict[Parts, tuple[Entry, Stat | None]]:
    """Return what :func:`write_manifest` wrote."""
    return {
        read_path(path): (_entry(fields), _stat(stat))
        for path, fields, stat in json.loads(zlib.decompress(data))
    }


# Paths


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
