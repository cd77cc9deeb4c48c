"""SQLite, with the standard library."""
# The classes of this package are one mechanism:
# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, finalize

from weakincentives.contrib.databases.base import NOT_YOURS, Database, Work, seconds_left
from weakincentives.contrib.databases.dialects import SqliteDialect
from weakincentives.contrib.databases.row_log import RowLog
from weakincentives.core.call import transaction_under_way
from weakincentives.core.gate import Gate, running_loop
from weakincentives.errors import ReadOnlyView, WinkError

Parameters = Sequence[Any] | Mapping[str, Any]

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_gates: WeakValueDictionary[str, _DatabaseGate] = WeakValueDictionary()
_gates_lock = threading.Lock()
_of_parent: list[sqlite3.Connection] = []
"""Connections that a forked child has inherited: it neither uses nor closes them."""
_MOST_IDLE = 8


class Rows(tuple[sqlite3.Row, ...]):
    """The rows of a statement: each by position and by name, as in ``row["total"]``."""

    lastrowid: int | None
    """The key of the row that an INSERT has made."""
    rowcount: int
    """How many rows an INSERT, UPDATE or DELETE has changed; -1 for other statements."""

    @classmethod
    def of(cls, cursor: sqlite3.Cursor) -> Rows:
        made = cls(cursor.fetchall() if cursor.description is not None else ())
        made.lastrowid, made.rowcount = cursor.lastrowid, cursor.rowcount
        return made

    def first(self) -> sqlite3.Row | None:
        """Return the first row, or None."""
        return self[0] if self else None

    def one(self) -> sqlite3.Row:
        """Return the only row; raises LookupError if there is none, or more than one."""
        if len(self) != 1:
            raise LookupError(f"expected one row, got {len(self)}")
        return self[0]

    def scalar(self) -> Any:
        """Return the first value of the first row, or None."""
        return self[0][0] if self else None


class _DatabaseGate(Gate):
    """Writers in this process wait here, first come, first served; SQLite alone is not fair."""

    __slots__ = ("__weakref__", "owner")

    def __init__(self) -> None:
        super().__init__()
        self.owner: Work | None = None

    @property
    def subject_name(self) -> str:
        return "database"


class SqliteDatabase(Database):
    """An SQLite file, or ``":memory:"``.

    A call that may write begins with the write lock, so it never fails half-way because of another
    writer: calls queue. A tool with the reach ``read`` reads a snapshot, and queues for nothing.

    Args:
        path: Created if missing, then in WAL mode. Keep it outside the workspace.
        timeout: Seconds to wait for the lock of another process.
        patience: Seconds for which a reversible call is re-run that could not get a lock.
        prepare: Called with each new connection, to register functions or collations.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        timeout: float = 5.0,
        patience: float = 30.0,
        prepare: Callable[[sqlite3.Connection], object] | None = None,
    ) -> None:
        super().__init__(patience=patience)
        if not timeout >= 0:
            raise ValueError(f"timeout must not be negative, got {timeout!r}")
        self.path = os.fspath(path)
        self.timeout = timeout
        self._prepare = prepare
        self.is_in_memory = self.path == ":memory:"
        if not self.path or self.path.startswith("file:"):
            raise ValueError(f'give the path of a file or ":memory:", got {self.path!r}')
        self._log = RowLog(SqliteDialect())
        self._idle: list[_Connection] = []
        self._closed = [False]
        self._pid = os.getpid()
        finalize(self, _end_all, self._idle, self._pid)
        if self.is_in_memory:
            self.gate_of_writers = _DatabaseGate()
        else:
            self.path = str(Path(self.path).absolute())
            is_new = not Path(self.path).exists()
            with _gates_lock:
                name = os.path.realpath(self.path)
                gate = _gates.get(name)
                if gate is None:
                    gate = _gates[name] = _DatabaseGate()
                self.gate_of_writers = gate
            if is_new:
                made = self.take()
                with suppress(sqlite3.OperationalError):  # another process is doing it
                    sqlite3.Connection.execute(made, "PRAGMA journal_mode=WAL").fetchall()
                self.give(made)

    @property
    def title(self) -> str:
        return self.path if self.is_in_memory else Path(self.path).name

    @property
    def address(self) -> Mapping[str, str] | None:
        return None if self.is_in_memory else {"sqlite": self.path}

    def execute(self, statement: str, parameters: Parameters = (), /) -> Rows:
        """Run one statement in the call's transaction and return its rows."""
        here = self._here()
        with here._using() as work, work.speaking():
            work.expect(statement)
            cursor = sqlite3.Connection.cursor(work.connection)
            return Rows.of(cursor.execute(statement, parameters))

    def executemany(self, statement: str, parameters: Iterable[Parameters], /) -> Rows:
        """Run a statement once for each of the parameters."""
        here = self._here()
        with here._using() as work, work.speaking():
            work.expect(statement)
            cursor = sqlite3.Connection.cursor(work.connection)
            return Rows.of(cursor.executemany(statement, parameters))

    def executescript(self, script: str, /) -> None:
        """Run several statements in the call's transaction."""
        statement = ""
        for part in re.split("(?<=;)", script):
            statement += part
            if sqlite3.complete_statement(statement):  # not in a text, comment or trigger
                self.execute(statement)
                statement = ""
        if statement.strip():
            self.execute(statement)

    @property
    def connection(self) -> sqlite3.Connection:
        """The call's connection, for libraries that need one: it ends with the call."""
        with self._here()._using() as work:
            work.is_shared = True
            return work.connection

    def close(self) -> None:
        self._closed[0] = True
        while self._idle:
            self._idle.pop().end()

    def _new_work(self) -> Work:
        return _SqliteWork(self)

    # Connections

    def take(self) -> _Connection:
        """Return an idle connection, or a new one."""
        if self._closed[0]:
            raise WinkError("this database was closed")
        if os.getpid() != self._pid:
            if self.is_in_memory:
                raise WinkError("a forked child cannot use a database in memory")
            _of_parent.extend(self._idle)
            self._idle.clear()
            self._pid = os.getpid()
        file = self._file()
        with suppress(IndexError):
            while True:
                found = self._idle.pop()
                if found.file == file:
                    return found
                found.end()  # what it writes would be in a file that was removed or replaced
        try:
            made = sqlite3.connect(
                self.path,
                timeout=self.timeout,
                isolation_level=None,
                check_same_thread=False,
                factory=_Connection,
            )
        except sqlite3.OperationalError as error:
            error.args = (f"{error}: {self.path}",)
            raise
        made.file = self._file()
        try:
            made.row_factory = sqlite3.Row
            if self._prepare is not None:
                self._prepare(made)
            sqlite3.Connection.execute(made, "PRAGMA foreign_keys=ON")
            made.set_authorizer(made.authorize)
        except BaseException:
            made.end()
            raise
        return made

    def _file(self) -> tuple[int, int] | None:
        if self.is_in_memory:
            return None
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def give(self, connection: _Connection) -> None:
        """Take a connection back."""
        connection.work = None
        if self.is_in_memory or (len(self._idle) < _MOST_IDLE and not self._closed[0]):
            self._idle.append(connection)
        else:
            connection.end()


class _SqliteWork(Work):
    database: SqliteDatabase
    connection: _Connection
    is_shared = False
    """Whether the handler has the connection itself, or changed more of it than rows."""

    def __init__(self, database: SqliteDatabase) -> None:
        super().__init__(database)
        self._is_inside = False
        self._has_connection = False
        self._refuses_writes = False
        self.refusal: str | None = None

    def begin(self, view: Database) -> None:
        database, reads = self.database, view.read_only is not None
        on_loop = running_loop() is not None  # there, waiting would stop everything else
        if not reads or database.is_in_memory:
            self._enter_gate(on_loop)
        try:
            self.connection, self._has_connection = database.take(), True
            self.connection.work = self
            self._wait_for_locks(0 if on_loop else min(database.timeout, seconds_left()))
            with self.speaking():
                self.run("BEGIN" if reads else "BEGIN IMMEDIATE")
        except BaseException:
            self.close(reuse=True)
            raise

    def _enter_gate(self, on_loop: bool) -> None:
        gate = self.database.gate_of_writers
        if gate.owner is not None and self._is_nested_in(gate, on_loop):
            raise WinkError(
                "the call or block under way is using this database: use the `db` of the block, or "
                "pass on the context of the call, as in tool(params, context=context)"
            )
        try:
            if on_loop:
                taken = not gate.line and gate.lock.acquire(False)
            else:
                taken = gate.acquire(max(0.001, min(self.database.patience, seconds_left())))
        except RuntimeError:  # to wait would stop the event loop of the call inside
            taken = False
        if not taken:
            self.lost_race = True
            raise sqlite3.OperationalError("database is locked by another call")
        gate.loop, gate.holder, gate.owner = running_loop(), threading.get_ident(), self
        self._is_inside = True

    def _is_nested_in(self, gate: _DatabaseGate, on_loop: bool) -> bool:
        """Whether what holds the gate waits for us: the call whose handler runs here."""
        if not on_loop:
            return gate.holder == threading.get_ident()
        around: Any = transaction_under_way.get()
        while around is not None:
            for _, _, view in around.forks:
                if getattr(view, "_work", None) is gate.owner:
                    return True
            outermost = around.lineage[0]
            around = outermost.around.made_in
        return False

    def _wait_for_locks(self, seconds: float) -> None:
        """Set how long SQLite waits for the lock of another process."""
        milliseconds = int(1000 * seconds)
        if milliseconds != self.connection.busy_timeout:
            self._pragma("busy_timeout", milliseconds)
            self.connection.busy_timeout = milliseconds

    def run(self, statement: str) -> None:
        connection = self.connection
        connection.is_ours = True
        try:
            # The comment keeps it apart from a handler's: only new statements are authorized.
            sqlite3.Connection.cursor(connection).execute(f"{statement} -- wink")
        finally:
            connection.is_ours = False

    def ask(self, statement: str, /, **parameters: Any) -> list[Sequence[Any]]:
        connection = self.connection
        connection.is_ours = True
        try:
            cursor = sqlite3.Connection.cursor(connection)
            with self.speaking():
                return cursor.execute(f"{statement} -- wink", parameters).fetchall()
        finally:
            connection.is_ours = False

    def _pragma(self, name: str, value: int) -> None:
        self.run(f"PRAGMA {name}={value}")

    def restrict(self, view: Database) -> None:
        self.refusal = view.read_only
        refuses = view.read_only is not None
        if refuses != self._refuses_writes:
            self._pragma("query_only", int(refuses))
            self._refuses_writes = refuses

    @contextmanager
    def speaking(self) -> Generator[None]:
        """Note a lost race, and word what a handler must not do."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _BUSY:
                self.lost_race = True
            elif code == sqlite3.SQLITE_READONLY and self.refusal is not None:
                raise ReadOnlyView(self.refusal) from error
            elif code == sqlite3.SQLITE_AUTH:
                raise WinkError(self.connection.denied or str(error)) from error
            raise

    def commit(self) -> None:
        with self.speaking():
            self.run("COMMIT")

    def rollback(self) -> None:
        if self.connection.in_transaction:
            self.run("ROLLBACK")

    def interrupt(self) -> None:
        if self._has_connection:
            with suppress(sqlite3.ProgrammingError):
                self.connection.interrupt()

    def close(self, *, reuse: bool) -> None:
        if self._has_connection:
            self._has_connection = False
            connection = self.connection
            try:
                if connection.in_transaction:
                    self.run("ROLLBACK")
                if self._refuses_writes:
                    self._pragma("query_only", 0)
                    self._refuses_writes = False
                if self.is_recursive:
                    self._pragma("recursive_triggers", 0)
            except sqlite3.Error:
                reuse = False
            if self.database.is_in_memory or (reuse and not self.is_shared):
                self.database.give(connection)
            else:
                connection.end()
        if self._is_inside:
            self._is_inside = False
            gate = self.database.gate_of_writers
            gate.holder, gate.owner = 0, None
            gate.release()


_OURS = frozenset({"query_only", "recursive_triggers"})
"""Settings of a connection with which calls are refused writes, and rows recorded."""
_STAYS = frozenset(
    {
        sqlite3.SQLITE_ATTACH,
        sqlite3.SQLITE_CREATE_TEMP_INDEX,
        sqlite3.SQLITE_CREATE_TEMP_TABLE,
        sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
        sqlite3.SQLITE_CREATE_TEMP_VIEW,
    }
)
"""What stays with a connection, so that another call must not get it."""


def _end_all(idle: list[_Connection], pid: int) -> None:
    """Close what a database that was never closed leaves; a forked child closes nothing."""
    while os.getpid() == pid and idle:
        idle.pop().end()


class _Connection(sqlite3.Connection):
    """A connection whose transactions are the call's, and not the handler's."""

    work: _SqliteWork | None = None
    file: tuple[int, int] | None = None
    """Which file it has open."""
    is_ours = False
    busy_timeout = -1
    denied = ""

    def authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if self.is_ours:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_TRANSACTION:
            self.denied = NOT_YOURS
            return sqlite3.SQLITE_DENY
        sets = action == sqlite3.SQLITE_PRAGMA and second is not None
        if sets and first in _OURS:
            self.denied = f"a call cannot change {first}: it depends on it"
            return sqlite3.SQLITE_DENY
        if (sets or action in _STAYS) and self.work is not None:
            self.work.is_shared = True
        return sqlite3.SQLITE_OK

    def cursor(self, factory: Any = None) -> Any:
        return super().cursor(_Cursor if factory is None else factory)

    def commit(self) -> None:
        raise WinkError(NOT_YOURS)

    def rollback(self) -> None:
        raise WinkError(NOT_YOURS)

    def close(self) -> None:
        raise WinkError("the connection is closed when the call ends")

    def end(self) -> None:
        super().close()


class _Cursor(sqlite3.Cursor):
    """A cursor of the call's connection, for a library that was given it."""

    @contextmanager
    def _fenced(self, statement: str = "") -> Generator[None]:
        connection: Any = self.connection
        work: _SqliteWork | None = connection.work
        if work is None:
            raise WinkError("the transaction of this connection has ended")
        with work.view()._using(), work.speaking():
            if statement:
                work.expect(statement)
            yield

    def execute(self, *args: Any) -> Any:
        with self._fenced(args[0]):
            return super().execute(*args)

    def executemany(self, *args: Any) -> Any:
        with self._fenced(args[0]):
            return super().executemany(*args)

    def executescript(self, script: str) -> Any:
        self.connection.work.database.executescript(script)  # type: ignore[attr-defined]
        return self

    def fetchone(self) -> Any:
        with self._fenced():
            return super().fetchone()

    def fetchmany(self, size: int | None = None) -> Any:
        with self._fenced():
            return super().fetchmany(self.arraysize if size is None else size)

    def fetchall(self) -> Any:
        with self._fenced():
            return super().fetchall()

    def __next__(self) -> Any:
        with self._fenced():
            return super().__next__()
