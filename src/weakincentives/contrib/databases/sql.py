"""Any database that SQLAlchemy speaks, through an engine, sync or async."""
# The classes of this package are one mechanism:
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast

from weakincentives.contrib.databases.base import NOT_YOURS, Database, Work, seconds_left
from weakincentives.contrib.databases.dialects import PostgresDialect, SqliteDialect
from weakincentives.contrib.databases.row_log import RowLog
from weakincentives.core.gate import running_loop
from weakincentives.errors import MissingExtra, ReadOnlyView, ResourceError, WinkError

try:
    import sqlalchemy
    from sqlalchemy import event
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.exc import TimeoutError as PoolTimeout
except ImportError as error:
    raise MissingExtra("sql", "sqlalchemy") from error

if TYPE_CHECKING:
    from sqlalchemy import Connection, CursorResult, Engine, Executable, Result
    from sqlalchemy.engine import ExceptionContext
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.orm import Session

    from weakincentives.runtime.rows import CallRows, KeptCall, RowChange, UndoneRows

T = TypeVar("T")
Parameters = Mapping[str, Any] | Sequence[Mapping[str, Any]]

_LOST_RACE = frozenset({"40001", "40P01", "55P03"})
"""SQLSTATE of a serialization failure, a deadlock, and a lock that was not available."""
_READ_ONLY = "25006"
_ENDS = re.compile(
    r"\s*(COMMIT|BEGIN|END|ABORT|START|PREPARE\s+TRANSACTION|ROLLBACK(?!\s+TO))\b", re.IGNORECASE
)
_MAY_END = re.compile(r"\b(COMMIT|BEGIN|END|ABORT|START|PREPARE|ROLLBACK)\b", re.IGNORECASE)
_NO_WORDS = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|\$(\w*)\$.*?\$\1\$|--[^\n]*|/\*.*?\*/""", re.DOTALL
)
"""Texts, quoted names and comments."""
_HAS_A_BODY = re.compile(r"\s*CREATE\b", re.IGNORECASE)
_LONGEST_LOCK = 5.0
"""Seconds that SQLite waits for a lock, if nobody has said otherwise."""
_FOR_CANCELLED = 2.0
"""Seconds for a cancelled statement to end."""
_WORK = "wink_work"
_using_view: ContextVar[Any] = ContextVar("wink_database_view", default=None)
"""The view whose statement is being run, where the call under way does not tell."""


class SqlDatabase(Database):
    """The database of a SQLAlchemy engine.

    >>> import sqlalchemy
    >>> from weakincentives.contrib.databases import SqlDatabase
    >>> engine = sqlalchemy.create_engine("sqlite://")
    >>> with SqlDatabase(engine).transaction() as db:
    ...     db.execute("SELECT 1").scalar_one()
    1
    >>> engine.dispose()

    Args:
        engine: Its pool is shared; the engine itself is not changed.
        isolation_level: Of the transactions of calls, except on SQLite, where they are
            serializable anyway. None leaves it to the engine.
        patience: Seconds for which a reversible call is re-run after a serialization failure, a
            deadlock or a lock timeout.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        isolation_level: str | None = "SERIALIZABLE",
        patience: float = 30.0,
    ) -> None:
        super().__init__(patience=patience)
        if not isinstance(engine, sqlalchemy.Engine):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"SqlDatabase takes a SQLAlchemy Engine, got {type(engine).__name__}; an "
                "AsyncEngine goes into AsyncSqlDatabase"
            )
        self.is_sqlite = engine.dialect.name == "sqlite"
        options = {} if isolation_level is None or self.is_sqlite else {
            "isolation_level": isolation_level
        }  # fmt: skip
        # A copy with listeners of its own, on the same pool.
        self.engine = engine.execution_options(**options)
        event.listen(self.engine, "before_cursor_execute", _before)
        event.listen(self.engine, "after_cursor_execute", _after)
        event.listen(self.engine, "handle_error", _failed)
        event.listen(self.engine, "commit", _refuse_end)
        event.listen(self.engine, "rollback", _refuse_end)
        self._orm: Session | None = None
        if self.is_sqlite or engine.dialect.name == "postgresql":
            self._log = RowLog(SqliteDialect() if self.is_sqlite else PostgresDialect())

    @property
    def title(self) -> str:
        url = self.engine.url
        return str(url.database or url.drivername).rpartition("/")[2]

    @property
    def address(self) -> Mapping[str, str] | None:
        url = self.engine.url
        if self.is_sqlite:
            file = url.database
            return {"sqlite": os.path.realpath(file)} if file and file != ":memory:" else None
        # The password is left to the environment of who opens it: PGPASSWORD, ~/.pgpass.
        return {"sqlalchemy": url.set(password=None).render_as_string()}

    def execute(
        self, statement: Executable | str, parameters: Parameters | None = None, /
    ) -> CursorResult[Any]:
        """Run a statement in the call's transaction; a string is SQL with ``:names``."""
        here = self._here()
        with here._using() as work, _on_behalf_of(here):
            made = sqlalchemy.text(statement) if isinstance(statement, str) else statement
            return work.connection.execute(made, parameters)

    @property
    def connection(self) -> Connection:
        """The call's connection; it ends with the call."""
        with self._here()._using() as work:
            return work.connection

    @property
    def session(self) -> Session:
        """An ORM session on the call's connection. It is flushed when the call ends."""
        here = self._here()
        with here._using() as work:
            if here._orm is None:
                from sqlalchemy.orm import Session

                here._orm = Session(
                    work.connection, join_transaction_mode="create_savepoint", autoflush=True
                )
            return here._orm

    def close(self) -> None:
        self.engine.dispose()

    def fork(self) -> Any:
        view = super().fork()
        view._orm = None
        return view

    def _new_work(self) -> Work:
        return _SqlWork(self)

    def _finish(self) -> None:
        if self._orm is not None:
            with cast("_SqlWork", self._work).on_its_own():
                self._orm.commit()
                self._orm.close()

    def _drop(self) -> None:
        if self._orm is not None:
            orm, self._orm = self._orm, None
            with cast("_SqlWork", self._work).on_its_own(), suppress(Exception):
                orm.close()


class _SqlWork(Work):
    database: SqlDatabase
    connection: Connection
    is_ours = False
    """Whether a statement, or the end of the transaction, is ours and not the handler's."""
    busy: int | None = None
    """The thread that is running a statement."""
    refusal: str | None = None
    was_ended = False
    """Whether the handler tried to end the transaction."""
    is_committing = False
    had_error = False
    """Whether a statement failed: some databases have then rolled everything back."""
    _has_connection = False
    _refuses_writes = False
    _busy_timeout: int | None = None

    def begin(self, view: Database) -> None:
        engine = self.database.engine
        try:
            if not engine.dialect.is_async and running_loop() is not None:
                _refuse_to_wait(engine.pool)
            self.connection = engine.connect().execution_options(**{_WORK: self})
        except PoolTimeout:
            self.lost_race = True
            raise
        self._has_connection = True
        reads = view.read_only is not None
        try:
            self.connection.begin()
            if _is_autocommit(self.connection.connection.dbapi_connection):
                raise ResourceError(
                    "the engine is in autocommit mode, so no row could be rolled back: create it "
                    'without isolation_level="AUTOCOMMIT" and without autocommit'
                )
            if self.database.is_sqlite:
                self._begin_sqlite(reads)
        except BaseException:
            self.close(reuse=True)
            raise

    def _begin_sqlite(self, reads: bool) -> None:
        """Begin at the driver, which would do so only before the first change."""
        fairy: Any = self.connection.connection
        if not getattr(fairy.driver_connection, "in_transaction", False):
            left = 0.0 if running_loop() is not None else seconds_left()
            if left < _LONGEST_LOCK:  # 0: to wait would stop the event loop
                with self.on_its_own():
                    pragma = self.connection.exec_driver_sql
                    self._busy_timeout = pragma("PRAGMA busy_timeout").scalar_one()
                    pragma(f"PRAGMA busy_timeout={int(1000 * left)}")
            self.run("BEGIN" if reads else "BEGIN IMMEDIATE")

    def run(self, statement: str) -> None:
        with self.on_its_own():
            self.connection.exec_driver_sql(statement)

    def ask(self, statement: str, /, **parameters: Any) -> list[Sequence[Any]]:
        with self.on_its_own():
            if parameters:
                found = self.connection.execute(sqlalchemy.text(statement), parameters)
            else:
                found = self.connection.exec_driver_sql(statement)
            return [tuple(row) for row in found] if found.returns_rows else []

    @contextmanager
    def on_its_own(self) -> Generator[None]:
        before, self.is_ours = self.is_ours, True
        try:
            yield
        finally:
            self.is_ours = before

    def restrict(self, view: Database) -> None:
        self.refusal = view.read_only
        refuses = view.read_only is not None
        if refuses == self._refuses_writes:
            return
        if self.database.is_sqlite:
            self.run(f"PRAGMA query_only={int(refuses)}")
        elif refuses:  # in a nested call, this ends with its savepoint
            self.run("SET TRANSACTION READ ONLY")
        self._refuses_writes = refuses

    def commit(self) -> None:
        if self.was_ended:
            raise WinkError(NOT_YOURS)
        with self.on_its_own():
            if self.had_error and not self.database.is_sqlite:
                try:
                    self.connection.exec_driver_sql("SELECT 1")
                except DBAPIError as error:
                    raise WinkError(
                        "an earlier statement failed, so the database commits nothing: put a "
                        "statement that may fail into `with db.transaction() as db:`"
                    ) from error
            self.is_committing = True
            self.connection.commit()

    def rollback(self) -> None:
        with self.on_its_own():
            self.connection.rollback()

    def interrupt(self) -> None:
        if self._has_connection:
            with suppress(Exception):
                driver: Any = cast("Any", self.connection.connection).driver_connection
                stop = getattr(driver, "cancel_safe", None) or getattr(driver, "interrupt", None)
                if stop is not None:
                    stop()

    def hold(self) -> bool:
        if not super().hold():
            return False
        me, waits = threading.get_ident(), 0
        while self.busy not in (None, me) and waits < 100:
            self.interrupt()
            threading.Event().wait(0.02)
            waits += 1
        return True

    def close(self, *, reuse: bool) -> None:
        if not self._has_connection:
            return
        self._has_connection = False
        with self.on_its_own():
            try:
                if self._refuses_writes and self.database.is_sqlite:
                    self.connection.exec_driver_sql("PRAGMA query_only=0")
                if self.is_recursive:
                    self.connection.exec_driver_sql("PRAGMA recursive_triggers=0")
                if self._busy_timeout is not None:
                    timeout, self._busy_timeout = self._busy_timeout, None
                    self.connection.exec_driver_sql(f"PRAGMA busy_timeout={timeout}")
            except Exception:
                reuse = False
            try:
                if not reuse or self.busy is not None:
                    self.connection.invalidate()
            finally:
                self.connection.close()


def _refuse_to_wait(pool: Any) -> None:
    """Raise if all connections are in use: to wait would stop the event loop."""
    if isinstance(pool, sqlalchemy.QueuePool):
        most = getattr(pool, "_max_overflow", -1)
        if 0 <= most <= pool.overflow() and not pool.checkedin():
            raise PoolTimeout("all connections of the engine's pool are in use")


def _ends_transaction(sql: str) -> bool:
    """Whether a statement, or one of several, would end the transaction or begin another."""
    if _MAY_END.search(sql) is None:
        return False
    first, *more = _NO_WORDS.sub(" ", sql).split(";")
    statements = [first] if _HAS_A_BODY.match(first) else [first, *more]
    return any(_ENDS.match(each) for each in statements)


def _is_autocommit(connection: Any) -> bool:
    """Whether a connection of a driver commits each statement at once; drivers differ."""
    of_mysql = getattr(connection, "get_autocommit", None)
    return getattr(connection, "autocommit", False) is True or (
        of_mysql is not None and bool(of_mysql())
    )


@contextmanager
def _on_behalf_of(view: Database) -> Generator[None]:
    before = _using_view.set(view)
    try:
        yield
    finally:
        _using_view.reset(before)


# What the engine tells of each statement, whoever makes it: the view, its connection, the ORM


def _work_of(connection: Any) -> _SqlWork | None:
    return connection.get_execution_options().get(_WORK)


def _before(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
    work = _work_of(connection)
    if work is None or work.is_ours:
        return
    if _ends_transaction(statement):
        raise WinkError(NOT_YOURS)
    view = _using_view.get()
    if view is None or view._work is not work:
        view = work.view()
    view.check_open("a statement")
    with work.lock:
        view._enter()
        work.expect(statement)
    work.busy = threading.get_ident()


def _after(connection: Connection, *_: Any) -> None:
    work = _work_of(connection)
    if work is not None:
        work.busy = None
        _expect_transaction(work, connection)


def _expect_transaction(work: _SqlWork, connection: Connection) -> None:
    """Raise if a statement of the handler has ended the transaction, in whatever way."""
    if not work.is_ours and not work.was_committed and _is_idle(connection):
        work.was_committed = work.was_ended = True
        raise WinkError(NOT_YOURS)


def _is_idle(connection: Connection) -> bool:
    """Whether the driver knows that it is in no transaction."""
    driver: Any = cast("Any", connection.connection).driver_connection
    status = getattr(getattr(driver, "info", None), "transaction_status", None)  # psycopg
    if status is not None:
        return int(status) == 0
    of_asyncpg = getattr(driver, "is_in_transaction", None)
    if of_asyncpg is not None:
        return not of_asyncpg()
    return getattr(driver, "in_transaction", None) is False  # SQLite


def _failed(context: ExceptionContext) -> None:
    work = None if context.connection is None else _work_of(context.connection)
    if work is None:
        return
    work.busy, work.had_error = None, True
    found: Any = context.original_exception
    state = getattr(found, "sqlstate", None) or getattr(found, "pgcode", None)
    busy = getattr(found, "sqlite_errorcode", 0) & 0xFF
    # With the connection, all that the transaction did is gone; a COMMIT may have been carried out.
    is_lost = context.is_disconnect and not work.is_committing
    if state in _LOST_RACE or busy in (5, 6) or is_lost:
        work.lost_race = True
    elif (state == _READ_ONLY or busy == 8) and work.refusal is not None:
        raise ReadOnlyView(work.refusal) from found
    elif context.connection is not None and not context.is_disconnect:
        _expect_transaction(work, context.connection)


def _refuse_end(connection: Connection) -> None:
    work = _work_of(connection)
    if work is not None and not work.is_ours:
        work.was_ended = True
        raise WinkError(NOT_YOURS)


# Async


class AsyncSqlDatabase(Database):
    """The database of a SQLAlchemy ``AsyncEngine``, for async handlers.

    Its connections live on an event loop of its own, so that calls on any loop can use it: give it
    an engine that nothing else uses.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        isolation_level: str | None = "SERIALIZABLE",
        patience: float = 30.0,
    ) -> None:
        sync = getattr(engine, "sync_engine", None)
        if sync is None:
            raise TypeError(
                f"AsyncSqlDatabase takes an AsyncEngine, got {type(engine).__name__}; an Engine "
                "goes into SqlDatabase"
            )
        self._sync = SqlDatabase(sync, isolation_level=isolation_level, patience=patience)
        self._loop = _Loop()
        self._turn: asyncio.Lock | None = None
        """Of the calls that share a transaction, one statement at a time."""
        super().__init__(patience=patience)

    async def execute(
        self, statement: Executable | str, parameters: Parameters | None = None, /
    ) -> Result[Any]:
        """Run a statement in the call's transaction; its rows have been fetched."""
        return await self.run(lambda db: db.execute(statement, parameters))

    async def run(self, work: Callable[[SqlDatabase], T], /) -> T:
        """Run a function that uses the database synchronously, its ORM session for example."""
        here = self._here()
        here.check_open("a statement")

        def on_behalf() -> T:
            with _on_behalf_of(here._sync):
                return work(here._sync)

        return await asyncio.wrap_future(self._loop.start(on_behalf, here._turn))

    def close(self) -> None:
        self._loop.start(self._sync.close).result()
        self._loop.stop()

    @property
    def title(self) -> str:
        return self._sync.title

    @property
    def address(self) -> Mapping[str, str] | None:
        return self._sync.address

    @property
    def workspace(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._sync.workspace

    @workspace.setter
    def workspace(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, identity: str
    ) -> None:
        self._sync.workspace = identity

    @property
    def may_record(self) -> bool:
        return self._sync.may_record

    def record_calls(self) -> None:
        self._wait(self._sync.record_calls)

    def track(self, *tables: str) -> None:
        self._wait(self._sync.track, *tables)

    def has_committed(self, call_id: str) -> bool:
        return self._wait(self._sync.has_committed, call_id)

    def kept(self, session: str) -> Sequence[KeptCall]:
        return self._wait(self._sync.kept, session)

    def settle(self, kept: KeptCall) -> None:
        self._wait(self._sync.settle, kept)

    @property
    def records_every_table(self) -> bool:
        return self._wait(lambda: self._sync.records_every_table)

    def commit_with(self, redo: Callable[[], Any]) -> None:
        self._sync.commit_with(redo)

    def calls(self) -> Sequence[CallRows]:
        return self._wait(self._sync.calls)

    def changes(self, call_ids: Iterable[str]) -> Mapping[str, Sequence[RowChange]]:
        return self._wait(self._sync.changes, call_ids)

    def undo(self, call_ids: Sequence[str], **options: Any) -> UndoneRows:
        return self._wait(lambda: self._sync.undo(call_ids, **options))

    def forget(self, days: float) -> int:
        return self._wait(self._sync.forget, days)

    # As a participant: the view of the sync database, on the other loop

    def _new_work(self) -> Work:
        raise NotImplementedError

    def fork(self) -> Any:
        view = self.__copy__()
        view._parent = self
        view._sync = self._sync.fork()
        view._turn = self._turn or asyncio.Lock()
        view._sealed = None
        return view

    @property
    def read_only(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._sync.read_only

    @read_only.setter
    def read_only(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, reason: str | None
    ) -> None:
        self._sync.read_only = reason

    @property
    def lost_race(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._sync.lost_race

    def seal(self, reason: str) -> None:
        super().seal(reason)
        self._sync.seal(reason)

    def merge(self, view: Any) -> None:
        view._wait(self._sync.merge, view._sync)

    def discard(self, view: Any) -> Sequence[str]:
        return view._wait(self._sync.discard, view._sync)

    def snapshot_here(self) -> Any:
        return self._wait(self._sync.snapshot_here)

    def restore_here(self, token: Any, /) -> None:
        self._wait(self._sync.restore_here, token)

    def _wait(self, function: Callable[..., T], *args: Any) -> T:
        return self._loop.start(lambda: function(*args), self._turn, must=True).result()


class _Loop:
    """An event loop in a thread, which starts with the first statement."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(
        self, function: Callable[[], T], turn: asyncio.Lock | None = None, *, must: bool = False
    ) -> Any:
        """Run sync code of SQLAlchemy on the loop, in turn; returns a future of any thread.

        What ``must`` run does not wait for a statement that goes on although it was cancelled.
        """
        from sqlalchemy.util import greenlet_spawn

        async def spawned() -> T:
            is_inside = False
            try:
                if turn is not None:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_FOR_CANCELLED if must else None):
                            is_inside = await turn.acquire()
                return await greenlet_spawn(function)
            finally:
                if is_inside and turn is not None:
                    turn.release()

        work: Coroutine[Any, Any, T] = spawned()
        return asyncio.run_coroutine_threadsafe(work, self._running())

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="wink-database", daemon=True
                )
                self._thread.start()
            return self._loop

    def stop(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(_FOR_CANCELLED)
            if not self._thread.is_alive():
                loop.close()
