"""A database named by a URL: SQLite in a file, or PostgreSQL. One SQL text serves both."""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import unquote

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.programs import loading
from weakincentives.errors import DatabaseUnavailable, MissingExtra, StoreRefused

T = TypeVar("T")

_BUSY = 30.0
"""Seconds to wait for another process that writes to the same SQLite file."""
_MAX_IDLE = 8
"""Connections to PostgreSQL that stay open between transactions."""
_POSTGRES_NOW = "extract(epoch from clock_timestamp())::double precision"
_SQLITE_NOW = "((julianday('now') - 2440587.5) * 86400.0)"
_LOCK = 0x77696E6B
"""The advisory lock under which tables are created: PostgreSQL does not serialize that."""


class Transaction:
    """Statements that take effect together. Parameters are ``?`` in the SQL text."""

    def __init__(self, connection: Any, database: Database) -> None:
        self._connection = connection
        self._is_postgres = database.is_postgres
        self.now = database.now
        self.for_update = " FOR UPDATE" if database.is_postgres else ""
        """Ends a SELECT that locks its rows; SQLite has locked the whole database already."""

    def execute(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""
        cursor = self._connection.execute(self._text(sql), values)
        return [] if cursor.description is None else list(cursor.fetchall())

    def changed(self, sql: str, *values: Any) -> int:
        """Run a statement and return how many rows it changed."""
        return self._connection.execute(self._text(sql), values).rowcount

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run a statement once for each row of parameters."""
        self._connection.cursor().executemany(self._text(sql), rows)

    def _text(self, sql: str) -> str:
        return sql.replace("?", "%s") if self._is_postgres else sql


class Database:
    """A database that any thread may use: ``sqlite:///file.db`` or ``postgresql://...``.

    SQL for both: types are ``TEXT``, ``BIGINT``, ``DOUBLE PRECISION`` and ``BYTEA``.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        scheme, _, rest = url.partition("://")
        self.is_postgres = scheme in ("postgresql", "postgres")
        if not self.is_postgres and not (scheme == "sqlite" and rest.startswith("/")):
            raise ValueError(
                f"expected sqlite:///FILE or postgresql://USER@HOST/NAME, got {scheme}://"
            )
        self.now = _POSTGRES_NOW if self.is_postgres else _SQLITE_NOW
        """The time as an SQL expression, in unix seconds: that of the database, not of a worker."""
        self._path = unquote(rest[1:])
        self._lock = threading.Lock()
        self._idle: list[tuple[int, Any]] = []
        """Open connections, with the process that opened them: a fork must not use them."""
        self._is_closed = False
        weakref.finalize(self, _close_all, self._idle)

    @contextmanager
    def transaction(self) -> Generator[Transaction]:
        """Commit the statements of the block together, or none of them if it raises.

        Raises:
            DatabaseUnavailable: The connection was lost. If that happened while committing, the
                statements may or may not have taken effect.
        """
        with self._connection() as connection:
            connection.execute("BEGIN" if self.is_postgres else "BEGIN IMMEDIATE")
            yield Transaction(connection, self)
            connection.commit()

    def repeat(self, work: Callable[[Transaction], T], *, patience: float = 60.0) -> T:
        """Return what a transaction returns; repeat it while the database cannot be reached.

        It may have taken effect although the connection was lost, so it must be safe to repeat.
        """

        def once() -> T:
            with self.transaction() as transaction:
                return work(transaction)

        return _repeated(once, patience)

    def execute(self, sql: str, *values: Any, patience: float = 60.0) -> list[tuple[Any, ...]]:
        """Return the rows of a statement that is a transaction by itself; see ``repeat``.

        It costs one round trip, where ``repeat`` needs three.
        """

        def once() -> list[tuple[Any, ...]]:
            with self._connection() as connection:
                return Transaction(connection, self).execute(sql, *values)

        return _repeated(once, patience)

    @contextmanager
    def _connection(self) -> Generator[Any]:
        connection = self._connect()
        try:
            yield connection
        except BaseException as error:
            with suppress(Exception):
                connection.rollback()
            if self._is_lost(connection, error):
                with suppress(Exception):
                    connection.close()
                self._drop_idle()
                raise DatabaseUnavailable(f"{self.shown} cannot be used: {error}") from error
            self._give_back(connection)
            raise
        self._give_back(connection)

    @property
    def shown(self) -> str:
        """The URL without a password."""
        scheme, _, rest = self.url.partition("://")
        user, at, place = rest.rpartition("@")
        return f"{scheme}://{user.partition(':')[0]}{at}{place.partition('?')[0]}"

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            self._is_closed = True
            _close_all(self._idle)

    def _connect(self) -> Any:
        with self._lock:
            self._idle[:] = [each for each in self._idle if each[0] == os.getpid()]
            if self._idle:
                return self._idle.pop()[1]
        try:
            return self._new_postgres() if self.is_postgres else self._new_sqlite()
        except (sqlite3.Error, OSError) as error:
            raise DatabaseUnavailable(f"{self.shown} cannot be opened: {error}") from error

    def _new_sqlite(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=_BUSY, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    def _new_postgres(self) -> Any:
        try:
            with loading():
                import psycopg
        except ImportError as error:
            raise MissingExtra("durable", "psycopg") from error
        try:
            return psycopg.connect(self.url, connect_timeout=10, autocommit=True)
        except psycopg.Error as error:
            raise DatabaseUnavailable(f"{self.shown} cannot be reached: {error}") from error

    def _give_back(self, connection: Any) -> None:
        with self._lock:
            if not self._is_closed and len(self._idle) < _MAX_IDLE:
                self._idle.append((os.getpid(), connection))
                return
        connection.close()

    def _drop_idle(self) -> None:
        """Close idle connections: what ended one has ended the others, unnoticed so far.

        Otherwise each of them would fail another transaction, and a lease might end meanwhile.
        """
        with self._lock:
            _close_all(self._idle)

    def _is_lost(self, connection: Any, error: BaseException) -> bool:
        """Whether an error is one of the connection, or an interrupt has left it in the middle."""
        if not self.is_postgres:
            return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
        import psycopg

        lost = (psycopg.OperationalError, psycopg.InterfaceError)
        return bool(connection.closed) or isinstance(error, lost)


def _repeated(work: Callable[[], T], patience: float) -> T:
    began, wait = SYSTEM_CLOCK.monotonic(), 0.05
    while True:
        try:
            return work()
        except DatabaseUnavailable:
            if SYSTEM_CLOCK.monotonic() - began + wait > patience:
                raise
            threading.Event().wait(wait)
            wait = min(wait * 2, 2.0)


def _close_all(idle: list[tuple[int, Any]]) -> None:
    """Close connections, but not those of the process that this one was forked from."""
    while idle:
        pid, connection = idle.pop()
        if pid == os.getpid():
            with suppress(Exception):
                connection.close()


def prepare_tables(
    database: Database, part: str, steps: Sequence[Sequence[str]], *, patience: float = 60.0
) -> None:
    """Apply the steps that the tables of a part lack; each is a list of SQL statements.

    Steps are never changed, only added: databases exist that have applied them.

    Raises:
        StoreRefused: A newer version of this library has changed the tables.
    """

    def work(transaction: Transaction) -> None:
        if database.is_postgres:
            transaction.execute("SELECT pg_advisory_xact_lock(?)", _LOCK)
        transaction.execute(
            "CREATE TABLE IF NOT EXISTS wink_tables (part TEXT PRIMARY KEY, version BIGINT)"
        )
        rows = transaction.execute("SELECT version FROM wink_tables WHERE part = ?", part)
        version = rows[0][0] if rows else 0
        if version > len(steps):
            raise StoreRefused(
                f"the tables for {part} in {database.shown} belong to a newer version of wink: they"
                f" have version {version}, and this one knows {len(steps)}; update it"
            )
        for statements in steps[version:]:
            for sql in statements:
                transaction.execute(sql)
        if version < len(steps):
            transaction.execute(
                "INSERT INTO wink_tables VALUES (?, ?)"
                " ON CONFLICT (part) DO UPDATE SET version = excluded.version",
                part,
                len(steps),
            )

    database.repeat(work, patience=patience)
