"""Databases in calls: all of a call's rows are there, or none; for each kind of database."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import sqlalchemy.orm
from sqlalchemy.ext.asyncio import create_async_engine

import weakincentives as wink
from chance import HEAVY, THOROUGH, is_time_left
from postgres import Postgres
from weakincentives.contrib.databases import (
    AsyncSqlDatabase,
    Database,
    SqlDatabase,
    SqliteDatabase,
)
from weakincentives.core.deadlines import Deadline
from weakincentives.errors import ResourceError, ViewClosed, WinkError
from weakincentives.prompt import PolicyDecision
from weakincentives.runtime import Session, tool_transaction

WAIT = 60
ROUNDS = 1000 if THOROUGH else 25 if HEAVY else 2
SCHEMA = (
    "CREATE TABLE invoice (number INTEGER PRIMARY KEY, total INTEGER)",
    "CREATE TABLE line (number INTEGER REFERENCES invoice DEFERRABLE INITIALLY DEFERRED)",
    "CREATE TABLE counter (total INTEGER)",
    "INSERT INTO counter VALUES (0)",
)
NEW = "INSERT INTO invoice VALUES (:number, :number)"


def psycopg(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")


@dataclass
class World:
    """A database of one kind, and another way to look into it."""

    database: Database
    engine: sqlalchemy.Engine

    def numbers(self) -> list[int]:
        with self.engine.connect() as connection:
            found = connection.execute(sqlalchemy.text("SELECT number FROM invoice ORDER BY 1"))
            return list(found.scalars())

    def total(self) -> int:
        with self.engine.connect() as connection:
            return connection.execute(sqlalchemy.text("SELECT total FROM counter")).scalar_one()

    def tools(self, *tools: Any, **options: Any) -> wink.ToolRegistry:
        options.setdefault("session", Session())
        return wink.ToolRegistry(tools, resources={Database: self.database}, **options)


def make(kind: str, folder: Path, request: pytest.FixtureRequest) -> World:
    if kind.endswith("postgres"):
        server: Postgres = request.getfixturevalue("postgres")
        url = psycopg(server.new_database())
    else:
        url = f"sqlite:///{folder / 'desk.db'}"
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    with engine.begin() as connection:
        for statement in SCHEMA:
            connection.execute(sqlalchemy.text(statement))
    if kind == "sqlite":
        return World(SqliteDatabase(folder / "desk.db"), engine)
    if kind.startswith("sql-"):
        used = sqlalchemy.create_engine(url, pool_size=50)
        if kind == "sql-sqlite":
            sqlalchemy.event.listen(
                used, "connect", lambda made, _: made.execute("PRAGMA foreign_keys=ON")
            )
        return World(SqlDatabase(used), engine)
    url = url.replace("sqlite:", "sqlite+aiosqlite:")
    return World(AsyncSqlDatabase(create_async_engine(url)), engine)


SYNC = ["sqlite", "sql-sqlite", "sql-postgres"]
ASYNC = ["async-sqlite", "async-postgres"]


@pytest.fixture(params=SYNC)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    world = make(request.param, tmp_path, request)
    yield world
    world.database.close()


@pytest.fixture(params=ASYNC)
def async_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    world = make(request.param, tmp_path, request)
    yield world
    world.database.close()


@wink.tool(reach="reversible")
def add(number: int, fails: bool = False, *, context: wink.ToolContext) -> int:
    """Add an invoice and count it."""
    db = context.resources.get(Database)
    count = next(iter(db.execute("SELECT total FROM counter")))[0]
    db.execute(NEW, {"number": number})
    db.execute("UPDATE counter SET total = :total", {"total": count + 1})
    if fails:
        raise ValueError("the customer is unknown")
    return count + 1


@wink.tool(reach="reversible")
async def later(number: int, fails: bool = False, *, context: wink.ToolContext) -> int:
    """Add an invoice and count it."""
    db = context.resources.get(Database)
    count = (await db.execute("SELECT total FROM counter")).scalar_one()
    await db.execute(NEW, {"number": number})
    await asyncio.sleep(0)
    await db.execute("UPDATE counter SET total = :total", {"total": count + 1})
    if fails:
        raise ValueError("the customer is unknown")
    return count + 1


# How a call ends


def test_a_call_that_succeeds_commits_its_rows_and_one_that_fails_leaves_none(world: World):
    tools = world.tools(add)

    assert tools.execute("add", {"number": 1}).value == 1
    failed = tools.execute("add", {"number": 2, "fails": True})

    assert world.numbers() == [1]
    assert world.total() == 1
    assert failed.message == "the customer is unknown"
    assert "Database" in failed.metadata.undone


def test_every_way_to_fail_leaves_no_row(world: World):
    class Strict:
        name = "strict"

        def check(self, tool: Any, params: Any, *, context: Any) -> PolicyDecision:
            return PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: Any, *, context: Any) -> None:
            raise RuntimeError("no")

    @wink.tool
    def ends(how: str, *, context: wink.ToolContext) -> wink.ToolResult[Any]:
        """End in some way."""
        context.resources.get(Database).execute(NEW, {"number": 9})
        if how == "exit":
            raise SystemExit(3)
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "crash":
            raise ZeroDivisionError
        return wink.ToolResult.error("no") if how == "error" else wink.ToolResult.ok(object())

    tools = world.tools(ends)
    for how in ("error", "crash"):
        assert not tools.execute("ends", {"how": how}).success
    for how, kind in (("exit", SystemExit), ("interrupt", KeyboardInterrupt)):
        with pytest.raises(kind):
            tools.execute("ends", {"how": how})
    assert not world.tools(ends, policies=[Strict()]).execute("ends", {"how": "denied"}).success

    assert world.numbers() == []


def test_rows_files_and_session_are_undone_together_when_the_commit_fails(
    world: World, tmp_path: Path
):
    """A foreign key that is checked at COMMIT is the last thing that can fail."""

    @dataclass(frozen=True)
    class Note:
        text: str

    @wink.tool(reach="reversible")
    def note(number: int, *, context: wink.ToolContext) -> str:
        """Note a line of an invoice."""
        context.filesystem.write("note.txt", f"{number}")
        context.session.dispatch(Note(f"{number}"))
        context.resources.get(Database).execute(
            "INSERT INTO line VALUES (:number)", {"number": number}
        )
        return "noted"

    folder = tmp_path / "workspace"
    folder.mkdir()
    with world.tools(add, note, workspace=folder) as tools:
        failed = tools.execute("note", {"number": 404})
        assert not failed.success
        assert not (folder / "note.txt").exists()
        assert tools.session[Note].all() == ()

        tools.execute("add", {"number": 404})
        assert tools.execute("note", {"number": 404}).success
        assert (folder / "note.txt").read_text() == "404"
        assert tools.session[Note].all() == (Note("404"),)


def test_a_call_that_asks_for_no_database_opens_no_connection(tmp_path: Path):
    opened: list[object] = []
    database = SqliteDatabase(":memory:", prepare=opened.append)
    engine = sqlalchemy.create_engine("sqlite://")
    sqlalchemy.event.listen(engine, "connect", lambda *_: opened.append("engine"))

    @wink.tool(reach="reversible")
    def asks(*, context: wink.ToolContext) -> None:
        """Ask, and use nothing."""
        context.resources.get(SqliteDatabase)
        context.resources.get(SqlDatabase)

    resources = {SqliteDatabase: database, SqlDatabase: SqlDatabase(engine)}
    tools = wink.ToolRegistry([asks], resources=resources)
    assert tools.execute("asks").success

    assert opened == []


# Nested calls and blocks


def test_a_nested_call_is_a_savepoint(world: World):
    @wink.tool(reach="reversible")
    def batch(*, context: wink.ToolContext) -> list[bool]:
        """Add several."""
        context.resources.get(Database).execute(NEW, {"number": 10})
        done = [add(number=n, fails=n == 12, context=context).success for n in (11, 12, 13)]
        context.resources.get(Database).execute(NEW, {"number": 14})
        return done

    assert world.tools(batch).execute("batch").value == [True, False, True]
    assert world.numbers() == [10, 11, 13, 14]
    assert world.total() == 2


def test_a_call_that_fails_takes_its_nested_calls_with_it(world: World):
    @wink.tool(reach="reversible")
    def batch(*, context: wink.ToolContext) -> None:
        """Add one, and fail."""
        assert add(number=11, context=context).success
        raise ValueError("no")

    assert not world.tools(batch).execute("batch").success
    assert world.numbers() == []


def test_a_block_in_a_call_is_a_savepoint(world: World):
    @wink.tool(reach="reversible")
    def tries(*, context: wink.ToolContext) -> None:
        """Try something."""
        db = context.resources.get(Database)
        with db.transaction():
            db.fork  # noqa: B018
        with pytest.raises(ZeroDivisionError), db.transaction() as inner:
            inner.execute(NEW, {"number": 1})
            raise ZeroDivisionError
        with db.transaction() as inner:
            inner.execute(NEW, {"number": 2})
        with (
            pytest.raises(ZeroDivisionError),
            tool_transaction(context.session, context.resources),
        ):
            db.execute(NEW, {"number": 3})
            raise ZeroDivisionError
        db.execute(NEW, {"number": 4})

    assert world.tools(tries).execute("tries").success
    assert world.numbers() == [2, 4]


def test_a_block_outside_calls_is_a_transaction(world: World):
    with world.database.transaction() as db:
        db.execute(NEW, {"number": 1})
    with pytest.raises(ZeroDivisionError), world.database.transaction() as db:
        db.execute(NEW, {"number": 2})
        raise ZeroDivisionError
    with pytest.raises(ViewClosed):
        db.execute(NEW, {"number": 3})
    with pytest.raises(WinkError, match=r"outside a call.*`with database\.transaction\(\) as db:`"):
        world.database.execute(NEW, {"number": 4})

    assert world.numbers() == [1]


def test_a_block_by_hand_names_rows_that_calls_have_committed_in_it(world: World):
    tools = world.tools(add)
    with (
        pytest.raises(ResourceError, match="committed rows since"),
        tool_transaction(tools.session, tools.context().resources),
    ):
        tools.execute("add", {"number": 1})
        raise ZeroDivisionError


# What a handler must not do


def test_a_tool_that_only_reads_cannot_change_rows(world: World):
    @wink.tool(reach="read")
    def sneaks(*, context: wink.ToolContext) -> None:
        """Write all the same."""
        context.resources.get(Database).execute(NEW, {"number": 1})

    @wink.tool(reach="reversible")
    def asks(*, context: wink.ToolContext) -> bool:
        """Ask one that only reads, then write."""
        context.resources.get(Database).execute(NEW, {"number": 2})
        done = sneaks(context=context).success
        context.resources.get(Database).execute(NEW, {"number": 3})
        return done

    tools = world.tools(sneaks, asks)
    assert "reach 'read'" in tools.execute("sneaks").message
    assert tools.execute("asks").value is False
    assert world.numbers() == [2, 3]


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK", " begin", "-- so\n/* it */ COMMIT"])
def test_a_handler_neither_commits_nor_rolls_back(world: World, statement: str):
    @wink.tool(reach="reversible")
    def ends(*, context: wink.ToolContext) -> None:
        """End the transaction."""
        db = context.resources.get(Database)
        db.execute(NEW, {"number": 1})
        db.execute(statement)

    assert "leave out COMMIT, ROLLBACK and BEGIN" in world.tools(ends).execute("ends").message
    assert world.numbers() == []


@pytest.mark.parametrize("world", ["sql-sqlite", "sql-postgres"], indirect=True)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_handler_cannot_end_the_transaction_of_its_connection(world: World, end: str):
    @wink.tool(reach="reversible")
    def ends(*, context: wink.ToolContext) -> None:
        """End it, whatever is said."""
        connection = context.resources.get(Database).connection  # type: ignore[attr-defined]
        connection.execute(sqlalchemy.text(NEW), {"number": 1})
        with pytest.raises(WinkError, match="leave out"):
            getattr(connection, end)()

    tools = world.tools(ends, add)
    assert not tools.execute("ends").success
    assert world.numbers() == []
    assert tools.execute("add", {"number": 2}).success


@pytest.mark.parametrize(
    "statement",
    ["SELECT 1; COMMIT", "SELECT ';'; /* ; */ end", "PREPARE TRANSACTION 'x'", "SELECT 1;ABORT"],
)
@pytest.mark.parametrize("world", ["sql-postgres"], indirect=True)
def test_of_several_statements_none_ends_the_transaction(world: World, statement: str):
    @wink.tool(reach="reversible")
    def ends(*, context: wink.ToolContext) -> None:
        """End the transaction, as a model may that writes SQL."""
        db = context.resources.get(SqlDatabase)
        db.execute(NEW, {"number": 1})
        db.connection.exec_driver_sql(statement)

    tools = wink.ToolRegistry([ends], resources={SqlDatabase: world.database}, session=Session())
    assert "leave out COMMIT, ROLLBACK and BEGIN" in tools.execute("ends").message
    assert world.numbers() == []


@pytest.mark.parametrize("world", ["sql-postgres"], indirect=True)
def test_a_commit_that_is_not_recognized_is_noticed_and_said(world: World):
    """Hidden behind a statement with a body: the driver tells that the transaction is over."""

    @wink.tool(reach="reversible")
    def ends(*, context: wink.ToolContext) -> None:
        """End the transaction."""
        connection = context.resources.get(SqlDatabase).connection
        connection.exec_driver_sql("INSERT INTO invoice VALUES (1, 1)")
        with contextlib.suppress(WinkError):
            connection.exec_driver_sql("CREATE TEMP TABLE t (x INTEGER); COMMIT")
        connection.exec_driver_sql("INSERT INTO invoice VALUES (2, 2)")

    resources = {SqlDatabase: world.database, Database: world.database}
    tools = wink.ToolRegistry([ends, add], resources=resources, session=Session())
    done = tools.execute("ends")

    assert not done.success
    assert world.numbers() == [1]
    assert any("has committed them" in each for each in done.metadata.not_undone)
    assert tools.execute("add", {"number": 3}).success


@pytest.mark.parametrize("world", ["sql-sqlite", "sql-postgres"], indirect=True)
def test_words_in_texts_names_and_bodies_end_nothing(world: World):
    statements = [
        "INSERT INTO invoice VALUES (1, 1)",
        "SELECT 'a; COMMIT', 1 AS \"x; ROLLBACK\" -- ; END",
        "SELECT CASE WHEN 1 = 1 THEN 1 END",
    ]
    if world.engine.dialect.name == "sqlite":
        statements.append(
            "CREATE TRIGGER t AFTER INSERT ON invoice BEGIN UPDATE counter SET total = 9; END"
        )
    else:
        statements.append("DO $x$ BEGIN PERFORM 1; END; $x$")

    @wink.tool(reach="reversible")
    def runs(*, context: wink.ToolContext) -> None:
        """Run them."""
        for each in statements:
            context.resources.get(SqlDatabase).connection.exec_driver_sql(each)

    tools = wink.ToolRegistry([runs], resources={SqlDatabase: world.database}, session=Session())
    done = tools.execute("runs")
    assert done.success, done.message
    assert world.numbers() == [1]


@pytest.mark.parametrize("on_loop", [False, True], ids=["threads", "loop"])
def test_a_call_that_finds_no_connection_in_the_pool_is_re_run(on_loop: bool, tmp_path: Path):
    """On an event loop it does not wait for one: what has it may be a call on the same loop."""
    engine = sqlalchemy.create_engine(
        f"sqlite:///{tmp_path / 'desk.db'}",
        poolclass=sqlalchemy.QueuePool,
        pool_size=1,
        max_overflow=0,
        pool_timeout=WAIT if on_loop else 0.01,
    )
    with engine.begin() as connection:
        for statement in SCHEMA:
            connection.execute(sqlalchemy.text(statement))
    database = SqlDatabase(engine, patience=WAIT)
    held = engine.connect()
    tries: list[int] = []

    def insert(context: wink.ToolContext) -> None:
        if len(tries) == 1:  # the first time somebody else has the connection
            held.close()
        tries.append(1)
        context.resources.get(SqlDatabase).execute(NEW, {"number": 1})

    @wink.tool(reach="reversible")
    def adds(*, context: wink.ToolContext) -> None:
        """Add an invoice."""
        insert(context)

    @wink.tool(reach="reversible")
    async def adds_later(*, context: wink.ToolContext) -> None:
        """Add an invoice, on an event loop."""
        insert(context)

    resources = {SqlDatabase: database}
    tools = wink.ToolRegistry([adds, adds_later], resources=resources, session=Session())
    done = asyncio.run(tools.aexecute("adds_later", {})) if on_loop else tools.execute("adds")

    assert done.success, done.message
    assert len(tries) == 2
    engine.dispose()


def test_an_engine_that_commits_each_statement_is_refused(request: pytest.FixtureRequest):
    """No rollback would take its rows back."""
    url = psycopg(request.getfixturevalue("postgres").new_database())
    create = sqlalchemy.create_engine
    for database in (
        SqlDatabase(create(url), isolation_level="AUTOCOMMIT"),
        SqlDatabase(create(url, isolation_level="AUTOCOMMIT"), isolation_level=None),
        SqlDatabase(create(url, connect_args={"autocommit": True}), isolation_level=None),
        AsyncSqlDatabase(create_async_engine(url), isolation_level="AUTOCOMMIT"),
    ):
        tool = later if isinstance(database, AsyncSqlDatabase) else add
        with wink.ToolRegistry([tool], resources={Database: database}) as tools:
            assert "autocommit mode" in tools.execute(tool.name, {"number": 1}).message
        database.close()


def test_an_autocommit_engine_still_has_transactions_in_calls(
    tmp_path: Path, request: pytest.FixtureRequest
):
    """By default the calls have their own isolation level."""
    for url in (
        psycopg(request.getfixturevalue("postgres").new_database()),
        f"sqlite:///{tmp_path / 'b.db'}",
    ):
        engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            for statement in SCHEMA:
                connection.execute(sqlalchemy.text(statement))
        world = World(SqlDatabase(engine), engine)
        tools = world.tools(add)

        assert tools.execute("add", {"number": 1}).success
        assert not tools.execute("add", {"number": 2, "fails": True}).success
        assert world.numbers() == [1]
        engine.dispose()


def test_what_a_call_leaves_on_its_connection_is_not_there_for_the_next_one(tmp_path: Path):
    database = SqliteDatabase(tmp_path / "desk.db")

    @wink.tool(reach="reversible")
    def leaves(statement: str, *, context: wink.ToolContext) -> None:
        """Change more than rows."""
        context.resources.get(SqliteDatabase).execute(statement)

    @wink.tool(reach="read")
    def looks(*, context: wink.ToolContext) -> list[str]:
        """Look what is there."""
        db = context.resources.get(SqliteDatabase)
        found = db.execute("SELECT name FROM pragma_database_list")
        more = db.execute("SELECT name FROM sqlite_temp_master")
        cache = db.execute("PRAGMA cache_size").scalar()
        return sorted([*(row[0] for row in (*found, *more)), str(cache)])

    tools = wink.ToolRegistry([leaves, looks], resources={SqliteDatabase: database})
    with tools:
        before = tools.execute("looks").value
        for statement in (
            "CREATE TEMP TABLE t (x)",
            "ATTACH ':memory:' AS other",
            "PRAGMA cache_size = 7",
        ):
            assert tools.execute("leaves", {"statement": statement}).success
            assert tools.execute("looks").value == before
        refused = tools.execute("leaves", {"statement": "PRAGMA recursive_triggers = 0"})
        assert "a call cannot change recursive_triggers" in refused.message
    database.close()


def test_the_connection_of_a_call_takes_part_too(world: World):
    class Base(sqlalchemy.orm.DeclarativeBase):
        pass

    class Invoice(Base):
        __tablename__ = "invoice"
        number = sqlalchemy.Column(sqlalchemy.Integer, primary_key=True)
        total = sqlalchemy.Column(sqlalchemy.Integer)

    kept: list[Any] = []

    @wink.tool(reach="reversible")
    def raw(number: int, fails: bool = False, *, context: wink.ToolContext) -> None:
        """Use the connection itself."""
        db: Any = context.resources.get(Database)
        kept.append(db.connection)
        if isinstance(db, SqlDatabase):
            db.session.add(Invoice(number=number, total=0))
            kept[-1].execute(sqlalchemy.text(NEW), {"number": number + 100})
        else:
            kept[-1].execute(NEW, {"number": number})
            kept[-1].cursor().execute(NEW, {"number": number + 100})
            assert len(kept[-1].execute("SELECT * FROM invoice").fetchall()) >= 2
            with pytest.raises(WinkError, match="leave out"):
                kept[-1].commit()
        if fails:
            raise ValueError("no")

    tools = world.tools(raw)
    assert tools.execute("raw", {"number": 1}).success
    assert not tools.execute("raw", {"number": 2, "fails": True}).success
    assert world.numbers() == [1, 101]
    for connection in kept:
        with pytest.raises(Exception, match=r"ended|closed"):
            connection.execute(NEW if isinstance(world.database, SqliteDatabase) else
                               sqlalchemy.text(NEW), {"number": 7})  # fmt: skip
    assert world.numbers() == [1, 101]


@pytest.mark.parametrize("world", ["sql-postgres"], indirect=True)
def test_a_statement_that_failed_is_not_forgotten(world: World):
    """PostgreSQL takes COMMIT for ROLLBACK then, and says nothing."""

    @wink.tool(reach="reversible")
    def hides(*, context: wink.ToolContext) -> None:
        """Hide an error."""
        db = context.resources.get(Database)
        db.execute(NEW, {"number": 1})
        with pytest.raises(sqlalchemy.exc.IntegrityError):
            db.execute(NEW, {"number": 1})

    @wink.tool(reach="reversible")
    def handles(*, context: wink.ToolContext) -> None:
        """Handle an error."""
        db = context.resources.get(Database)
        db.execute(NEW, {"number": 2})
        with pytest.raises(sqlalchemy.exc.IntegrityError), db.transaction() as inner:
            inner.execute(NEW, {"number": 2})

    tools = world.tools(hides, handles)
    assert "put a statement that may fail into" in tools.execute("hides").message
    assert tools.execute("handles").success
    assert world.numbers() == [2]


# Abandoned handlers


def test_an_abandoned_handler_is_fenced_and_blocks_nobody(world: World):
    goes_on, done = threading.Event(), threading.Event()
    said: list[object] = []

    @wink.tool(reach="reversible", timeout=1.0)
    def slow(*, context: wink.ToolContext) -> None:
        """Go on after the timeout."""
        db = context.resources.get(Database)
        db.execute(NEW, {"number": 1})
        goes_on.wait(WAIT)
        try:
            db.execute(NEW, {"number": 2})
        except Exception as error:
            said.append(error)
        done.set()

    tools = world.tools(slow, add)
    assert tools.execute("slow").failure.code == "TIMEOUT"  # type: ignore[union-attr]
    assert world.tools(add).execute("add", {"number": 3}).success
    goes_on.set()
    assert done.wait(WAIT)

    assert [type(each) for each in said] == [ViewClosed]
    assert world.numbers() == [3]


@pytest.mark.parametrize("world", ["sqlite", "sql-postgres"], indirect=True)
def test_a_statement_of_an_abandoned_handler_is_stopped(world: World):
    endless = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
        if isinstance(world.database, SqliteDatabase)
        else "SELECT pg_sleep(600)"
    )
    done = threading.Event()

    @wink.tool(reach="reversible", timeout=1.0)
    def slow(*, context: wink.ToolContext) -> None:
        """Run a statement without an end."""
        try:
            db = context.resources.get(Database)
            db.execute(NEW, {"number": 1})
            db.execute(endless)
        finally:
            done.set()

    assert world.tools(slow).execute("slow").failure.code == "TIMEOUT"  # type: ignore[union-attr]
    assert done.wait(WAIT)
    assert world.tools(add).execute("add", {"number": 3}).success
    assert world.numbers() == [3]


# Races


def two_at_once(world: World, tool: Any) -> list[Any]:
    """Call a tool from two sessions at once."""
    results: list[Any] = [None, None]

    def call(number: int) -> None:
        results[number] = world.tools(tool).execute(tool.name, {"number": number})

    threads = [threading.Thread(target=call, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    return results


def counting(reach: Any) -> Any:
    """Return a tool whose first two runs read the same count before either writes."""
    both, runs = threading.Barrier(2), iter(range(100))

    @wink.tool(reach=reach)
    def count(number: int, *, context: wink.ToolContext) -> None:
        """Count up."""
        db = context.resources.get(Database)
        total = next(iter(db.execute("SELECT total FROM counter")))[0]
        if next(runs) < 2:
            both.wait(WAIT)
        db.execute("UPDATE counter SET total = :total", {"total": total + 1})

    return count


@pytest.mark.parametrize("world", ["sql-postgres"], indirect=True)
def test_a_reversible_call_that_lost_a_race_is_re_run(world: World):
    results = two_at_once(world, counting("reversible"))

    assert [each.success for each in results] == [True, True]
    assert world.total() == 2


@pytest.mark.parametrize("world", ["sql-postgres"], indirect=True)
def test_a_call_that_must_not_be_re_run_says_that_it_lost_a_race(world: World):
    results = two_at_once(world, counting(None))

    assert sorted(each.success for each in results) == [False, True]
    (lost,) = [each for each in results if not each.success]
    assert lost.failure.code == "CONFLICT"
    assert lost.message.startswith("another transaction was changing the same data")
    assert world.total() == 1


def losing(reach: Any, engine: sqlalchemy.Engine, tries: list[int]) -> Any:
    @wink.tool(reach=reach)
    def loses(number: int, *, context: wink.ToolContext) -> str:
        """Lose the connection after a statement, the first time."""
        db = context.resources.get(Database)
        db.execute(NEW, {"number": number})
        tries.append(number)
        if len(tries) == 1:
            server = db.execute("SELECT pg_backend_pid()").scalar_one()
            with engine.begin() as other:
                other.exec_driver_sql(f"SELECT pg_terminate_backend({server}, 60000)")
        db.execute("SELECT 1")
        return "done"

    return loses


@pytest.mark.parametrize("world", ["sql-postgres"], indirect=True)
@pytest.mark.parametrize("reach", ["reversible", None])
def test_a_call_that_loses_its_connection_is_re_run_if_it_may_be(world: World, reach: Any):
    tries: list[int] = []
    tools = world.tools(losing(reach, world.engine, tries), add)

    result = tools.execute("loses", {"number": 1})

    assert (result.success, world.numbers()) == ((True, [1]) if reach else (False, []))
    assert len(tries) == (2 if reach else 1)
    assert tools.execute("add", {"number": 2}).success  # no other connection of the pool is in use


@pytest.mark.parametrize("world", ["sql-postgres"], indirect=True)
def test_after_a_restart_of_the_database_calls_go_on(world: World):
    tools = world.tools(add)
    assert tools.execute("add", {"number": 1}).success
    with world.engine.begin() as other:
        other.exec_driver_sql(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname ="
            " current_database() AND pid <> pg_backend_pid()"
        )

    assert tools.execute("add", {"number": 2}).success
    assert world.numbers() == [1, 2]


def test_a_file_that_was_removed_or_replaced_is_not_written_to_any_more(tmp_path: Path):
    place = tmp_path / "desk.db"
    database = SqliteDatabase(place)

    def create(numbers: list[int]) -> None:
        with sqlite3.connect(place) as made:
            made.execute("CREATE TABLE t (n INTEGER)")
            made.executemany("INSERT INTO t VALUES (?)", [(n,) for n in numbers])
        made.close()

    def seen() -> list[int]:
        with database.transaction() as db:
            return [row[0] for row in db.execute("SELECT n FROM t")]

    create([1])
    assert seen() == [1]
    place.unlink()
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        seen()
    place.unlink()
    create([2])
    assert seen() == [2]
    database.close()


def test_a_lock_held_elsewhere_is_waited_for_until_the_deadline(world: World):
    with world.engine.connect() as other:
        other.execute(sqlalchemy.text("UPDATE counter SET total = 0"))
        tools = world.tools(add)
        context = tools.context().having(deadline=Deadline.after(0.5))
        with pytest.raises(Exception, match=r"deadline|another transaction") as caught:
            result = tools.execute("add", {"number": 1}, context)
            raise RuntimeError(result.message)
        assert caught.value
    assert world.numbers() == []
    assert world.tools(add).execute("add", {"number": 2}).success


def test_concurrent_calls_of_one_turn_commit_in_call_order(world: World):
    @wink.tool(reach="reversible", concurrent=True)
    def together(number: int, *, context: wink.ToolContext) -> int:
        """Count up."""
        return add(number=number, fails=number == 2, context=context).value or -1

    tools = world.tools(together)
    results = tools.execute_tools([("together", {"number": number}) for number in range(5)])

    assert [each.value for each in results] == [1, 2, -1, 3, 4]
    assert world.numbers() == [0, 1, 3, 4]


def many(world: World, rounds: int, threads: int = 40, start: int = 0) -> int:
    """Make calls from many threads, each with a session of its own; half of them fail.

    Returns how many rounds there were time for.
    """
    for n in range(rounds):
        if n and not is_time_left():
            return n
        before = world.total()
        results: dict[int, Any] = {}
        begins = threading.Barrier(threads)

        def call(each: int, n: int = n, results: Any = results, begins: Any = begins) -> None:
            number = start + n * threads + each
            tools = world.tools(add)
            begins.wait(WAIT)
            results[number] = tools.execute("add", {"number": number, "fails": each % 2 == 1})

        running = [threading.Thread(target=call, args=(each,)) for each in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(WAIT)
        made = {number for number, each in results.items() if each.success}
        last = start + (n + 1) * threads
        assert made == {m for m in range(last - threads, last) if m % 2 == 0}, [
            each.message for each in results.values() if not each.success
        ]
        assert set(world.numbers()) >= made
        if start == 0:
            assert world.total() == before + len(made)
    return rounds


def test_forty_threads_on_one_database_leave_exactly_what_was_committed(world: World):
    rounds = many(world, ROUNDS)
    assert world.numbers() == list(range(0, 40 * rounds, 2))


def in_process(url: str, start: int, rounds: int) -> None:
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    if url.startswith("sqlite"):
        database: Database = SqliteDatabase(url.removeprefix("sqlite:///"), timeout=WAIT)
    else:
        database = SqlDatabase(sqlalchemy.create_engine(url, pool_size=20), patience=WAIT)
    done = many(World(database, engine), rounds, threads=10, start=start)
    assert done == rounds or not is_time_left()


@pytest.mark.heavy
@pytest.mark.parametrize("world", ["sqlite", "sql-postgres"], indirect=True)
def test_four_processes_on_one_database_lose_no_update(world: World):
    url = world.engine.url.render_as_string(hide_password=False)
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=in_process, args=(url, 1_000_000 * (n + 1), ROUNDS))
        for n in range(4)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()

    assert [child.exitcode for child in children] == [0] * 4
    made = len(world.numbers())
    assert made == world.total()
    assert made == 4 * 5 * ROUNDS or not is_time_left()


# Async handlers


def test_async_calls_commit_or_leave_nothing(async_world: World):
    async def run() -> list[Any]:
        tools = async_world.tools(later)
        one = await tools.aexecute("later", {"number": 1})
        two = await tools.aexecute("later", {"number": 2, "fails": True})
        many = await asyncio.gather(
            *(
                async_world.tools(later).aexecute("later", {"number": n, "fails": n % 2 == 1})
                for n in range(10, 30)
            )
        )
        return [one, two, *many]

    results = asyncio.run(run())

    assert [each.success for each in results[2:]] == [True, False] * 10, [
        each.message for each in results
    ]
    assert async_world.numbers() == [1, *range(10, 30, 2)]
    assert async_world.total() == 11


def test_an_async_call_that_is_cancelled_leaves_no_row(async_world: World):
    @wink.tool(reach="reversible")
    async def waits(*, context: wink.ToolContext) -> None:
        """Wait for ever."""
        await context.resources.get(Database).execute(NEW, {"number": 1})
        await asyncio.sleep(WAIT)

    @wink.tool(reach="reversible", timeout=0.2)
    async def slow(*, context: wink.ToolContext) -> None:
        """Take too long."""
        await context.resources.get(Database).execute(NEW, {"number": 2})
        await asyncio.sleep(WAIT)

    async def run() -> None:
        task = asyncio.create_task(async_world.tools(waits).aexecute("waits"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await async_world.tools(slow).aexecute("slow")).failure.code == "TIMEOUT"  # type: ignore[union-attr]
        assert (await async_world.tools(later).aexecute("later", {"number": 3})).success

    asyncio.run(run())
    assert async_world.numbers() == [3]


def test_async_calls_of_one_turn_commit_in_call_order_and_nest(async_world: World):
    @wink.tool(reach="reversible")
    async def batch(number: int, *, context: wink.ToolContext) -> list[bool]:
        """Add two."""
        results = [
            await later.acall({"number": number + n, "fails": n == 1}, context=context)
            for n in range(3)
        ]
        return [each.success for each in results]

    async def run() -> Any:
        tools = async_world.tools(batch)
        return await tools.aexecute_tools([("batch", {"number": n}) for n in (10, 20)])

    assert [each.value for each in asyncio.run(run())] == [[True, False, True]] * 2
    assert async_world.numbers() == [10, 12, 20, 22]


def test_the_orm_works_in_async_handlers(async_world: World):
    @wink.tool(reach="reversible")
    async def counts(*, context: wink.ToolContext) -> int:
        """Count."""
        db = context.resources.get(AsyncSqlDatabase)
        await db.execute(NEW, {"number": 5})
        return await db.run(
            lambda db: db.session.execute(
                sqlalchemy.text("SELECT count(*) FROM invoice")
            ).scalar_one()
        )

    tools = wink.ToolRegistry([counts], resources={AsyncSqlDatabase: async_world.database})
    assert asyncio.run(tools.aexecute("counts")).value == 1


# SQLite alone


def test_rows_are_found_by_name_and_position(tmp_path: Path):
    database = SqliteDatabase(tmp_path / "a.db")
    with database.transaction() as db:
        db.executescript(
            "CREATE TABLE t (a, b TEXT DEFAULT ';'); -- one; two\nINSERT INTO t VALUES (1, ';')"
        )
        assert db.execute("INSERT INTO t (a) VALUES (2)").lastrowid == 2
        rows = db.execute("SELECT * FROM t ORDER BY a")
    assert [(row["a"], row[1]) for row in rows] == [(1, ";"), (2, ";")]
    assert (rows.first()["a"], rows.scalar()) == (1, 1)  # type: ignore[index]
    with pytest.raises(LookupError, match="expected one row, got 2"):
        rows.one()


def test_a_database_in_memory_is_one_for_all_calls():
    database = SqliteDatabase(":memory:")
    with database.transaction() as db:
        for statement in SCHEMA:
            db.execute(statement)
    tools = wink.ToolRegistry([add], resources={Database: database})
    assert [tools.execute("add", {"number": n, "fails": n == 1}).success for n in range(3)] == [
        True, False, True,
    ]  # fmt: skip
    with database.transaction(read_only=True) as db:
        assert [row[0] for row in db.execute("SELECT number FROM invoice")] == [0, 2]


def test_a_forked_child_uses_connections_of_its_own(tmp_path: Path):
    database = SqliteDatabase(tmp_path / "a.db")
    with database.transaction() as db:
        db.execute("CREATE TABLE t (a)")
    child = os.fork()
    if not child:
        code = 1
        try:
            with database.transaction() as db:
                db.execute("INSERT INTO t VALUES (1)")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    with database.transaction() as db:
        db.execute("INSERT INTO t VALUES (2)")
        assert [row[0] for row in db.execute("SELECT a FROM t")] == [1, 2]
