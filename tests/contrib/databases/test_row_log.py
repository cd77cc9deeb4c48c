"""Undo reaches rows: exactly those that a call changed, or they are named; on every database."""

from __future__ import annotations

import random
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import sqlalchemy.orm
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

import weakincentives as wink
from chance import HEAVY, SEED, THOROUGH, dice, is_time_left
from postgres import Postgres
from weakincentives.contrib.databases import (
    AsyncSqlDatabase,
    Database,
    SqlDatabase,
    SqliteDatabase,
)
from weakincentives.errors import ResourceError, RowUndoRefused
from weakincentives.runtime import Session
from weakincentives.runtime.rows import UndoneRows, by_table

ROUNDS = 1000 if THOROUGH else 200 if HEAVY else 25
SCHEMA = (
    "CREATE TABLE customer (name VARCHAR(20) PRIMARY KEY, credit INTEGER)",
    "CREATE TABLE invoice (number INTEGER PRIMARY KEY, customer VARCHAR(20) REFERENCES customer ON"
    " UPDATE CASCADE, total DOUBLE PRECISION, code VARCHAR(9) UNIQUE)",
    "CREATE TABLE line (invoice INTEGER REFERENCES invoice ON DELETE CASCADE, place INTEGER, note"
    " TEXT, PRIMARY KEY (invoice, place))",
)
TABLES = ("customer", "invoice", "line")


@dataclass
class World:
    """A database of one kind with a tool that runs statements, and a person beside it."""

    database: Database
    engine: sqlalchemy.Engine
    tools: wink.ToolRegistry = field(init=False)

    def __post_init__(self) -> None:
        self.tools = wink.ToolRegistry(
            [run, arun], resources={Database: self.database}, session=Session()
        )

    def call(self, *statements: str) -> str:
        """Run statements in one call, and return its id."""
        name = "arun" if isinstance(self.database, AsyncSqlDatabase) else "run"
        result = self.tools.execute(name, {"statements": statements})
        assert result.success, result.message
        return result.call_id

    def person(self, *statements: str) -> None:
        with self.engine.begin() as connection:
            for each in statements:
                connection.exec_driver_sql(each)

    def rows(self, table: str) -> dict[tuple[Any, ...], dict[str, Any]]:
        """Return the rows of a table by key."""
        with self.engine.connect() as connection:
            found = connection.exec_driver_sql(f"SELECT * FROM {table}").mappings().all()
        size = 2 if table == "line" else 1
        return {tuple(map(str, list(each.values())[:size])): dict(each) for each in found}

    def everything(self) -> dict[tuple[str, tuple[Any, ...]], dict[str, Any]]:
        return {(table, key): row for table in TABLES for key, row in self.rows(table).items()}


@wink.tool(reach="reversible")
def run(statements: list[str], *, context: wink.ToolContext) -> str:
    """Run statements."""
    for each in statements:
        context.resources.get(Database).execute(each)
    return "done"


@wink.tool(reach="reversible")
async def arun(statements: list[str], *, context: wink.ToolContext) -> str:
    """Run statements."""
    for each in statements:
        await context.resources.get(Database).execute(each)
    return "done"


def _enforce(made: Any, _: object) -> None:
    made.execute("PRAGMA foreign_keys=ON")


def make(kind: str, folder: Path, request: pytest.FixtureRequest) -> World:
    if kind.endswith("postgres"):
        server: Postgres = request.getfixturevalue("postgres")
        url = server.new_database().replace("postgresql:", "postgresql+psycopg:")
    else:
        url = f"sqlite:///{folder / 'desk.db'}"
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _enforce)
    with engine.begin() as connection:
        for statement in SCHEMA:
            connection.exec_driver_sql(statement)
    if kind == "sqlite":
        return World(SqliteDatabase(folder / "desk.db"), engine)
    if kind.startswith("sql-"):
        used = sqlalchemy.create_engine(url)
        if kind == "sql-sqlite":
            event.listen(used, "connect", _enforce)
        return World(SqlDatabase(used), engine)
    asynchronous = create_async_engine(url)
    return World(AsyncSqlDatabase(asynchronous), engine)


SYNC = ["sqlite", "sql-sqlite", "sql-postgres"]


@pytest.fixture(params=[*SYNC, "async-postgres"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    world = make(request.param, tmp_path, request)
    world.database.track(*TABLES)
    yield world
    world.database.close()


BILL = (
    "INSERT INTO customer VALUES ('Ann', 100)",
    "INSERT INTO invoice VALUES (1, 'Ann', 0.1, 'a')",
    "INSERT INTO line VALUES (1, 1, 'it''s: a %s \"line\"')",
)


# What is shown


def test_a_call_shows_its_rows_table_by_table(world: World):
    first = world.call(*BILL)
    second = world.call(
        "UPDATE customer SET credit = 99", "INSERT INTO line VALUES (1, 2, NULL)",
        "DELETE FROM line WHERE place = 1", "UPDATE line SET note = 'x' WHERE place = 2",
    )  # fmt: skip

    found = world.database.changes([first, second, "unknown"])

    assert set(map(str, by_table(found[first]))) == {
        "customer: +1 -0",
        "invoice: +1 -0",
        "line: +1 -0",
    }
    assert set(map(str, by_table(found[second]))) == {"customer: +0 -0, 1 changed", "line: +1 -1"}
    changed = next(each for each in found[second] if each.table == "customer")
    assert (changed.before, changed.after) == (
        {"name": "Ann", "credit": 100},
        {"name": "Ann", "credit": 99},
    )
    assert [each.call_id for each in world.database.calls()] == [first, second]


def test_a_call_that_fails_and_what_others_change_leave_no_record(world: World):
    name = "arun" if isinstance(world.database, AsyncSqlDatabase) else "run"
    world.person("INSERT INTO customer VALUES ('Bob', 1)")
    failed = world.tools.execute(
        name, {"statements": ["INSERT INTO customer VALUES ('Ann', 1)", "SELECT nonsense"]}
    )

    assert not failed.success
    assert world.database.calls() == []
    assert world.database.changes([failed.call_id]) == {}


# What is undone


def test_undoing_a_call_takes_back_its_rows_and_undoing_that_brings_them_again(world: World):
    first = world.call(*BILL)
    before = world.everything()
    second = world.call(
        "UPDATE invoice SET total = 1e300 WHERE number = 1",
        "DELETE FROM line",
        "INSERT INTO line VALUES (1, 3, 'three')",
        "UPDATE customer SET name = 'Anna'",  # cascades
    )
    after = world.everything()

    undone = world.database.undo([second], call_id="undo_1")
    assert (undone.notes, world.everything()) == ((), before)
    assert world.database.calls()[-1].undoes == (second,)
    assert world.database.undo([second]).changes == ()  # it is undone already

    assert world.database.undo(["undo_1"]).notes == ()
    assert world.everything() == after
    world.database.undo([first, second])
    assert world.everything() == {}


def test_a_row_that_someone_else_has_changed_since_stays_and_is_named(world: World):
    world.call(*BILL)
    call = world.call(
        "UPDATE customer SET credit = 5", "UPDATE invoice SET total = 7 WHERE number = 1"
    )
    world.person("UPDATE customer SET credit = 6")

    tried = world.database.undo([call], dry_run=True)
    undone = world.database.undo([call])

    assert tried == undone
    assert undone.notes == ("row customer Ann has changed since, and stays",)
    assert world.rows("customer")["Ann",]["credit"] == 6
    assert world.rows("invoice")["1",]["total"] == 0.1
    forced = world.database.undo([call], force=True)
    assert (forced.notes, world.rows("customer")["Ann",]["credit"]) == ((), 100)


def test_a_row_that_a_call_made_and_removed_is_not_taken_from_who_made_it_again(world: World):
    insert = "INSERT INTO customer VALUES ('Ann', 1)"
    call = world.call(insert, "UPDATE customer SET name = 'Bob' WHERE name = 'Ann'")
    world.person(insert)

    undone = world.database.undo([call])

    assert undone.notes == ()
    assert [key for _, key in world.everything()] == [("Ann",)]


def test_a_foreign_key_refuses_the_undo_as_a_whole(world: World):
    call = world.call(
        "INSERT INTO customer VALUES ('Ann', 1)", "INSERT INTO customer VALUES ('Bob', 1)"
    )
    world.person("INSERT INTO invoice VALUES (9, 'Ann', 1, 'z')")
    before = world.everything()

    with pytest.raises(RowUndoRefused, match=r"(?i)foreign key"):
        world.database.undo([call])

    assert world.everything() == before


def test_rows_of_others_are_not_deleted_by_a_cascade(world: World):
    call = world.call(*BILL)
    world.person("INSERT INTO line VALUES (1, 7, 'by hand')")
    before = world.everything()

    with pytest.raises(RowUndoRefused, match="would also change line 1, 7"):
        world.database.undo([call])

    assert world.everything() == before


def test_what_cannot_be_undone_is_named(world: World):
    world.person("CREATE TABLE plain (x INTEGER)")
    with pytest.raises(ResourceError, match="plain cannot be undone: it has no primary key"):
        world.database.track("plain")
    with pytest.raises(ResourceError, match="there is no table 'nothing'"):
        world.database.track("nothing")
    world.database.track("customer")  # once more: it notes the new table, too
    call = world.call(
        "INSERT INTO customer VALUES ('Ann', 1)",
        "INSERT INTO plain VALUES (1)",
        "CREATE TABLE made (x INTEGER)",
    )

    undone = world.database.undo([call])

    assert world.everything() == {}
    assert "the rows of plain are not undone: it is not tracked" in undone.notes
    assert any("the schema was changed" in each for each in undone.notes)


def test_a_table_that_was_made_again_since_is_named(world: World):
    """As migrations do it: the triggers are gone with the old table."""
    call = world.call("INSERT INTO customer VALUES ('Ann', 1)")
    world.person(
        "CREATE TABLE again (invoice INTEGER, place INTEGER, PRIMARY KEY (invoice, place))",
        "DROP TABLE line",
        "ALTER TABLE again RENAME TO line",
    )
    lost = world.call("INSERT INTO line VALUES (1, 1)")

    assert [note for note in world.database.undo([lost]).notes if "line are not recorded" in note]
    world.database.track(*TABLES)

    assert world.database.undo([call]).notes == ()


@pytest.mark.parametrize("world", SYNC, indirect=True)
def test_without_our_tables_a_call_fails_until_they_are_back(world: World):
    """Someone has dropped them: better no call than one that nobody can undo."""
    world.person("DROP TABLE wink_row")
    insert = "INSERT INTO customer VALUES ('Ann', 1)"
    failed = world.tools.execute("run", {"statements": [insert]})
    assert not failed.success
    assert "wink_row" in failed.message
    assert world.everything() == {}

    world.database.track(*TABLES)
    world.database.undo([world.call(insert)])

    assert world.everything() == {}


def test_every_value_comes_back_exactly(world: World):
    is_sqlite = world.engine.dialect.name == "sqlite"
    kind = "BLOB" if is_sqlite else "BYTEA"
    world.person(
        f"CREATE TABLE thing (id INTEGER PRIMARY KEY, a TEXT, b {kind}, c NUMERIC(40, 20))"
    )
    world.database.track("thing")
    insert = sqlalchemy.text("INSERT INTO thing VALUES (:id, :a, :b, :c)")
    values = [
        {"id": 1, "a": "", "b": b"", "c": None},
        {"id": 2, "a": "NULL", "b": bytes(range(256)), "c": 12345678901234567.5},
        {"id": 3, "a": "😀 \n\t\\ ' \" :name %s", "b": None, "c": -0.1},
    ]
    if is_sqlite:
        values += [
            {"id": 4, "a": "nul\0nul", "b": 1.5, "c": float("inf")},
            {"id": 5, "a": 5, "b": "text", "c": 2**62},
        ]
    with world.engine.begin() as connection:
        connection.execute(insert, values)
        before = connection.exec_driver_sql("SELECT * FROM thing ORDER BY id").fetchall()
    call = world.call("DELETE FROM thing WHERE id <> 3", "UPDATE thing SET a = 'x', c = 3")

    assert world.database.undo([call]).notes == ()

    with world.engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT * FROM thing ORDER BY id").fetchall() == before


def dump(world: World, *tables: str) -> dict[str, list[str]]:
    with world.engine.connect() as connection:
        return {
            each: sorted(map(repr, connection.exec_driver_sql(f"SELECT * FROM {each}").fetchall()))
            for each in tables
        }


SQLITE, POSTGRES = "sqlite", "sql-postgres"
HARD: dict[str, tuple[tuple[str, ...], list[str], tuple[str, ...], list[str]]] = {
    # What: databases; schema and rows; tables; the statements of one call
    "a composite key, a generated column, a NULL": (
        (SQLITE, POSTGRES),
        [
            "CREATE TABLE t (x INTEGER, y TEXT, a INTEGER, g INTEGER GENERATED ALWAYS AS (a * 2)"
            " STORED, PRIMARY KEY (x, y))",
            "INSERT INTO t (x, y, a) VALUES (1, 'p', 3), (2, 'q', NULL)",
        ],
        ("t",),
        ["UPDATE t SET a = 9 WHERE x = 1", "UPDATE t SET x = 7 WHERE x = 2", "DELETE FROM t"],
    ),
    "all actions of foreign keys": (
        (SQLITE, POSTGRES),
        [
            "CREATE TABLE p (id INTEGER PRIMARY KEY)",
            "CREATE TABLE t (id INTEGER PRIMARY KEY, p INTEGER REFERENCES p ON DELETE SET NULL, q"
            " INTEGER DEFAULT 1 REFERENCES p ON DELETE SET DEFAULT, r INTEGER REFERENCES p ON"
            " DELETE CASCADE, s INTEGER REFERENCES t ON DELETE CASCADE)",
            "INSERT INTO p VALUES (1), (2), (3)",
            "INSERT INTO t VALUES (1, 2, 2, 1, 1), (2, 1, 2, 2, 1), (3, 3, 3, 3, 2)",
        ],
        ("p", "t"),
        ["DELETE FROM p WHERE id = 2", "DELETE FROM p WHERE id = 3"],
    ),
    "rows that refer to each other": (
        (POSTGRES,),
        [
            "CREATE TABLE p (id INTEGER PRIMARY KEY, t INTEGER)",
            "CREATE TABLE t (id INTEGER PRIMARY KEY, p INTEGER NOT NULL REFERENCES p)",
            "INSERT INTO p VALUES (1, 1)",
            "INSERT INTO t VALUES (1, 1)",
            "ALTER TABLE p ADD CONSTRAINT k FOREIGN KEY (t) REFERENCES t",
        ],
        ("p", "t"),
        ["UPDATE p SET t = NULL", "DELETE FROM t", "DELETE FROM p"],
    ),
    "swapped unique values": (
        (SQLITE, POSTGRES),
        [
            "CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT UNIQUE)",
            "INSERT INTO t VALUES (1, 'x'), (2, 'y')",
        ],
        ("t",),
        [
            "UPDATE t SET a = 'z' WHERE id = 1",
            "UPDATE t SET a = 'x' WHERE id = 2",
            "UPDATE t SET a = 'y' WHERE id = 1",
        ],
    ),
    "swapped keys": (
        (SQLITE, POSTGRES),
        [
            "CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT UNIQUE)",
            "INSERT INTO t VALUES (1, 'x'), (2, 'y')",
        ],
        ("t",),
        [
            "UPDATE t SET id = 9 WHERE id = 1",
            "UPDATE t SET id = 1 WHERE id = 2",
            "UPDATE t SET id = 2 WHERE id = 9",
        ],
    ),
    "keys swapped by one statement": (
        (POSTGRES,),
        [
            "CREATE TABLE t (id INTEGER PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, a INTEGER)",
            "INSERT INTO t VALUES (1, 1), (2, 2)",
        ],
        ("t",),
        ["UPDATE t SET id = 3 - id"],
    ),
    "no rowid, REPLACE": (
        (SQLITE,),
        [
            "CREATE TABLE t (x TEXT, y INTEGER, a TEXT, PRIMARY KEY (x, y)) WITHOUT ROWID",
            "INSERT INTO t VALUES ('a', 1, 'v')",
        ],
        ("t",),
        ["UPDATE t SET x = 'b'", "REPLACE INTO t VALUES ('b', 1, 'r')"],
    ),
    "TRUNCATE": (
        (POSTGRES,),
        [
            "CREATE TABLE p (id INTEGER, k INTEGER, a TEXT, PRIMARY KEY (k, id))",
            "CREATE TABLE t (id INTEGER PRIMARY KEY, x INTEGER, y INTEGER, FOREIGN KEY (x, y)"
            " REFERENCES p)",
            "INSERT INTO p VALUES (1, 2, 'x'), (3, 4, NULL)",
            "INSERT INTO t VALUES (1, 2, 1)",
        ],
        ("p", "t"),
        ["UPDATE p SET a = 'q'", "TRUNCATE p CASCADE", "INSERT INTO p VALUES (1, 2, 'new')"],
    ),
    "partitions": (
        (POSTGRES,),
        [
            "CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT) PARTITION BY RANGE (id)",
            "CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (10)",
            "CREATE TABLE high PARTITION OF t FOR VALUES FROM (10) TO (20)",
            "INSERT INTO t VALUES (1, 'x')",
        ],
        ("t",),
        ["UPDATE t SET id = 15", "INSERT INTO low VALUES (3, 'y')", "TRUNCATE t"],
    ),
    "a column called as our alias": (
        (POSTGRES,),
        [
            "CREATE TABLE r (id INTEGER PRIMARY KEY, t TEXT, r TIME)",
            "INSERT INTO r VALUES (1, 'a')",
        ],
        ("r",),
        ["UPDATE r SET t = 'b'", "DELETE FROM r"],
    ),
}


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for case, (kinds, *_) in HARD.items() for kind in kinds]
)
def test_a_hard_case_is_undone_exactly(
    kind: str, case: str, tmp_path: Path, request: pytest.FixtureRequest
):
    _, schema, tables, statements = HARD[case]
    world = make(kind, tmp_path, request)
    world.person(*schema)
    world.database.track(*tables)
    before = dump(world, *tables)
    call = world.call(*statements)
    after = dump(world, *tables)
    assert after != before

    assert world.database.undo([call], call_id="undo").notes == ()

    assert dump(world, *tables) == before
    world.database.undo(["undo"])
    assert dump(world, *tables) == after
    world.database.close()


def test_rows_are_recorded_whatever_the_search_path(tmp_path: Path, request: pytest.FixtureRequest):
    world = make("sql-postgres", tmp_path, request)
    world.person(
        "CREATE TABLE t (id INTEGER PRIMARY KEY)",
        "CREATE SCHEMA shop",
        'CREATE TABLE shop.t ("it\'s" INTEGER PRIMARY KEY)',
        'CREATE TABLE shop."Order Lines" ("a b" INTEGER PRIMARY KEY)',
    )
    world.database.track("t", "shop.t", 'shop."Order Lines"')
    elsewhere = sqlalchemy.create_engine(
        world.engine.url, connect_args={"options": "-c search_path=shop"}
    )
    database = SqlDatabase(elsewhere)
    tools = wink.ToolRegistry([run], resources={Database: database})
    call = tools.execute(
        "run",
        {
            "statements": [
                "INSERT INTO t VALUES (1)",
                'INSERT INTO "Order Lines" VALUES (2)',
                "INSERT INTO public.t VALUES (3)",
                "SET LOCAL search_path = pg_catalog",
                "INSERT INTO public.t VALUES (4)",
            ]
        },
    ).call_id
    names = ["shop.t 1", 'shop."Order Lines" 2', "t 3", "t 4"]
    for each in (world.database, database):
        ((found),) = each.changes([call]).values()
        assert [change.name for change in found] == names
    database.track("t", "Order Lines")  # in the same tables of ours
    assert world.database.calls() == database.calls()

    undone = database.undo([call])

    assert {each.name for each in undone.changes} == set(names)
    assert undone.notes == ()
    for table in ("t", "shop.t", 'shop."Order Lines"'):
        assert dump(world, table) == {table: []}
    database.close()
    world.database.close()


def test_a_trigger_that_changes_the_row_again_is_named_and_the_rest_is_undone(tmp_path: Path):
    """Created after ours, it changes the row before ours is called for the first change."""
    database = SqliteDatabase(tmp_path / "desk.db")
    with database.transaction() as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a INTEGER, at INTEGER)")
        db.execute("INSERT INTO t VALUES (1, 1, 0)")
        db.track("t")
        db.execute(
            "CREATE TRIGGER stamp AFTER UPDATE OF a ON t BEGIN UPDATE t SET at = at + 1; END"
        )
    tools = wink.ToolRegistry([run], resources={Database: database})
    call = tools.execute("run", {"statements": ["UPDATE t SET a = 5"]}).call_id

    ((change,),) = database.changes([call]).values()
    assert (change.before, change.after) == (
        {"id": 1, "a": 1, "at": 0},
        {"id": 1, "a": 5, "at": 1},
    )
    undone = database.undo([call])

    assert undone.notes == ("row t 1 differs in at, which a trigger sets",)
    with database.transaction() as db:
        assert db.execute("SELECT a FROM t").scalar() == 1
    database.close()


@pytest.mark.parametrize("world", ["sqlite", "sql-sqlite"], indirect=True)
def test_a_trigger_that_changes_its_own_table_works_as_before(world: World):
    """Recursive triggers would call it again and again; they are for REPLACE only."""
    world.person(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a INTEGER, at TEXT)",
        "INSERT INTO t VALUES (1, 1, 'then'), (2, 1, 'then')",
        "CREATE TRIGGER stamp AFTER UPDATE ON t BEGIN UPDATE t SET at = 'now' WHERE id = NEW.id;"
        " END",
    )
    world.database.track("t")
    before = dump(world, "t")

    call = world.call(
        "REPLACE INTO t VALUES (2, 2, 'then')",
        "UPDATE t SET a = 5 WHERE id = 1",
        "INSERT OR REPLACE INTO t VALUES (2, 3, 'then')",
    )

    undone = world.database.undo([call])
    assert undone.notes == (
        "row t 2 differs in at, which a trigger sets",
        "row t 1 differs in at, which a trigger sets",
    )
    assert [each.replace("now", "then") for each in dump(world, "t")["t"]] == before["t"]


@pytest.mark.parametrize("world", ["sqlite", "sql-sqlite"], indirect=True)
def test_what_a_constraint_replaces_is_recorded(world: World):
    world.person(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a INTEGER UNIQUE ON CONFLICT REPLACE)",
        "INSERT INTO t VALUES (1, 1)",
    )
    world.database.track("t")
    before = dump(world, "t")
    call = world.call("INSERT INTO t VALUES (2, 1)")

    assert world.database.undo([call]).notes == ()
    assert dump(world, "t") == before


def test_triggers_of_the_database_may_change_again_what_the_calls_made_them_change(tmp_path: Path):
    database = SqliteDatabase(tmp_path / "desk.db")
    with database.transaction() as db:
        db.executescript("""
            CREATE TABLE t (id INTEGER PRIMARY KEY, a INTEGER);
            CREATE TABLE total (n INTEGER);
            INSERT INTO t VALUES (1, 1);
            INSERT INTO total VALUES (1);
            CREATE TRIGGER sums AFTER UPDATE ON t BEGIN UPDATE total SET n = n + NEW.a - OLD.a; END;
        """)
    database.track("t")
    tools = wink.ToolRegistry([run], resources={Database: database})
    call = tools.execute("run", {"statements": ["UPDATE t SET a = 5"]}).call_id

    undone = database.undo([call])

    assert undone.notes == ("the rows of total are not undone: it is not tracked",)
    with database.transaction() as db:
        assert db.execute("SELECT n FROM total").scalar() == 1
    database.close()


def test_rows_that_no_key_tells_apart_stay_and_are_named(world: World):
    """SQLite has NULL in keys, of several rows; in PostgreSQL, a column of the key was renamed."""
    if world.engine.dialect.name == "sqlite":
        world.person(
            "CREATE TABLE t (x TEXT, y TEXT, a INTEGER, PRIMARY KEY (x, y))",
            "INSERT INTO t VALUES (NULL, 'k', 1), (NULL, 'k', 2), ('x', 'k', 3)",
        )
        world.database.track("t")
    else:
        world.person(
            "CREATE TABLE t (x INTEGER PRIMARY KEY, a INTEGER)",
            "INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)",
        )
        world.database.track("t")
        world.person("ALTER TABLE t RENAME COLUMN x TO y")
    call = world.call("UPDATE t SET a = a + 10 WHERE a <> 2")
    after = dump(world, "t")

    undone = world.database.undo([call])

    assert (
        "rows of t are not undone: a part of their primary key is NULL, or renamed" in undone.notes
    )
    if world.engine.dialect.name == "sqlite":
        assert [each.name for each in undone.changes] == ["t x, k"]
    else:
        assert dump(world, "t") == after


def test_a_column_that_is_newer_than_the_triggers_is_named(tmp_path: Path):
    database = SqliteDatabase(tmp_path / "desk.db")
    with database.transaction() as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT)")
        db.execute("INSERT INTO t VALUES (1, 'old')")
    database.track("t")
    with database.transaction() as db:
        db.execute("ALTER TABLE t ADD COLUMN b TEXT")
        db.execute("CREATE VIRTUAL TABLE words USING fts5(a)")
    tools = wink.ToolRegistry([run], resources={Database: database})
    change = ["UPDATE t SET a = 'new', b = 'new'", "INSERT INTO words VALUES ('new')"]
    call = tools.execute("run", {"statements": change}).call_id

    notes = database.undo([call]).notes

    assert "the column b of t is not restored: it is newer than the last track()" in notes
    assert [each for each in notes if each.startswith("changes of words are not recorded")]
    database.close()


@pytest.mark.parametrize("world", SYNC, indirect=True)
def test_an_orm_and_the_drivers_own_connection_are_recorded_too(world: World):
    class Base(sqlalchemy.orm.DeclarativeBase):
        pass

    class Customer(Base):
        __tablename__ = "customer"
        name: sqlalchemy.orm.Mapped[str] = sqlalchemy.orm.mapped_column(primary_key=True)
        credit: sqlalchemy.orm.Mapped[int]

    @wink.tool(reach="reversible")
    def change(*, context: wink.ToolContext) -> str:
        """Change rows in other ways."""
        db = context.resources.get(Database)
        if isinstance(db, SqlDatabase):
            db.session.add(Customer(name="Ann", credit=1))
        else:
            assert isinstance(db, SqliteDatabase)
            db.connection.execute("REPLACE INTO customer VALUES ('Ann', 1)")
            db.connection.execute("REPLACE INTO customer VALUES ('Ann', 2)")
        return "done"

    tools = wink.ToolRegistry([change], resources={Database: world.database}, session=Session())
    call = tools.execute("change", {})

    assert world.rows("customer").keys() == {("Ann",)}
    assert map_of(world.database, call.call_id) == ["customer: +1 -0"]
    world.database.undo([call.call_id])
    assert world.rows("customer") == {}


def map_of(database: Database, call_id: str) -> list[str]:
    return list(map(str, by_table(database.changes([call_id])[call_id])))


@pytest.mark.parametrize("world", SYNC, indirect=True)
def test_nested_calls_belong_to_the_outer_one(world: World):
    inner = world.tools

    @wink.tool(reach="reversible")
    def outer(*, context: wink.ToolContext) -> str:
        """Make a call that stays, and one that fails."""
        run({"statements": [BILL[0]]}, context=context)
        run({"statements": ["DELETE FROM customer", "nonsense"]}, context=context)
        return "done"

    inner.register(outer)
    call = inner.execute("outer", {})

    assert call.success
    assert map_of(world.database, call.call_id) == ["customer: +1 -0"]
    world.database.undo([call.call_id])
    assert world.everything() == {}


def test_old_records_can_be_forgotten(world: World):
    call = world.call(*BILL)

    assert world.database.forget(days=1) == 0
    assert world.database.forget(days=0) == 1

    assert not world.database.has_committed(call)
    assert world.database.undo([call]).changes == ()


def test_another_sqlite_program_changes_tracked_tables_as_before(tmp_path: Path):
    database = SqliteDatabase(tmp_path / "desk.db")
    with database.transaction() as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    database.track("t")
    other = sqlite3.connect(tmp_path / "desk.db")
    with other:
        other.execute("INSERT INTO t VALUES (1)")
    assert other.execute("SELECT count(*) FROM wink_row").fetchone() == (0,)
    other.close()
    database.close()


# Random histories


def _statement(chance: random.Random) -> str:
    name, number, place = chance.choice("ABC"), chance.randint(1, 4), chance.randint(1, 2)
    code = chance.choice("xyz")
    return chance.choice(
        [
            f"INSERT INTO customer VALUES ('{name}', {chance.randint(0, 9)})",
            f"UPDATE customer SET credit = credit + 1 WHERE name = '{name}'",
            f"UPDATE customer SET name = '{chance.choice('ABC')}' WHERE name = '{name}'",
            f"DELETE FROM customer WHERE name = '{name}'",
            f"INSERT INTO invoice VALUES ({number}, '{name}', {chance.random()}, '{code}')",
            f"UPDATE invoice SET total = total * 1.1, customer = '{name}' WHERE number = {number}",
            f"UPDATE invoice SET code = '{code}' WHERE number = {number}",
            f"DELETE FROM invoice WHERE number = {number}",
            f"INSERT INTO line VALUES ({number}, {place}, '{chance.random()}')",
            f"UPDATE line SET note = '{chance.random()}' WHERE invoice = {number}",
            f"DELETE FROM line WHERE invoice = {number} AND place = {place}",
        ]
    )


def test_rows_are_the_same_whatever_the_connection_has_set(
    tmp_path: Path, request: pytest.FixtureRequest
):
    """Zone, intervals, bytes and floats are written otherwise in the call and in the undo."""
    world = make("sql-postgres", tmp_path, request)
    world.person(
        "CREATE TABLE visit (at timestamptz PRIMARY KEY, until timestamptz, data bytea, took"
        " interval, share float8)",
        "INSERT INTO visit VALUES ('2026-01-01 12:00+00', '2026-01-02 12:00+00', 'a', '1 hour', 1)",
    )
    world.database.track("visit")
    before = world.rows("visit")
    called = world.call(
        "SET LOCAL TimeZone = 'Asia/Tokyo'",
        "SET LOCAL bytea_output = 'escape'",
        "SET LOCAL IntervalStyle = 'iso_8601'",
        "SET LOCAL extra_float_digits = 0",
        "UPDATE visit SET until = now(), data = '\\x00ff', took = '1 day 2 hours', share ="
        " 0.1::float8 + 0.2",
        "INSERT INTO visit VALUES ('2026-02-01 12:00+00', now(), 'b', '-3 days 1 hour', 1.0 / 3)",
    )

    assert world.database.undo([called]).notes == ()
    assert world.rows("visit") == before
    world.database.close()


def _broken(rows: dict[tuple[str, tuple[Any, ...]], dict[str, Any]]) -> bool:
    """Whether rows break a foreign key or a unique column."""
    codes = [row["code"] for (table, _), row in rows.items() if table == "invoice"]
    return len(set(codes)) < len(codes) or any(
        (table == "invoice" and ("customer", (row["customer"],)) not in rows)
        or (table == "line" and ("invoice", (str(row["invoice"]),)) not in rows)
        for (table, _), row in rows.items()
    )


@pytest.mark.parametrize("kind", ["sqlite", "sql-postgres"])
def test_random_histories_are_undone_exactly_or_the_row_is_named(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
):
    world = make(kind, tmp_path, request)
    world.database.track(*TABLES)
    seen = {"undone": 0, "named": 0, "refused": 0}
    for seed in range(ROUNDS):
        if seed and not is_time_left():
            break
        chance = dice("rows", seed)
        world.person(*(f"DELETE FROM {table}" for table in reversed(TABLES)))
        states = [world.everything()]
        makers: list[str] = []
        for _ in range(chance.randint(2, 7)):
            statements = [_statement(chance) for _ in range(chance.randint(1, 3))]
            name = "run"
            if chance.random() < 0.3:
                try:
                    world.person(*statements)
                except DBAPIError:
                    continue
                makers.append("")
            else:
                made = world.tools.execute(name, {"statements": statements})
                if not made.success:
                    continue
                makers.append(made.call_id)
            states.append(world.everything())
        calls = sorted({each for each in makers if each})
        chosen = {each for each in calls if chance.random() < 0.6}
        seen[_undo_and_check(world, states, makers, chosen)] += 1
    assert all(seen.values()) or sum(seen.values()) < 100, seen
    with world.engine.connect() as connection:  # PostgreSQL checks with each statement
        checks = ("integrity_check", "foreign_key_check") if kind == "sqlite" else ()
        found = [connection.exec_driver_sql(f"PRAGMA {each}").fetchall() for each in checks]
    assert found in ([], [[("ok",)], []])
    sys.stdout.write(f"{seen} with the seed {SEED}\n")
    world.database.close()


def _undo_and_check(
    world: World,
    states: list[dict[tuple[str, tuple[Any, ...]], dict[str, Any]]],
    makers: list[str],
    chosen: set[str],
) -> str:
    now = states[-1]
    exact: dict[Any, Any] = {}
    doubtful: set[Any] = set()
    for row in {row for state in states for row in state}:
        changes = [
            (maker, before.get(row), after.get(row))
            for maker, before, after in zip(makers, states, states[1:], strict=False)
            if before.get(row) != after.get(row)
        ]
        ours = [n for n, (maker, _, _) in enumerate(changes) if maker in chosen]
        if ours and all(maker in chosen for maker, _, _ in changes[ours[0] :]):
            exact[row] = changes[ours[0]][1]
        elif ours:
            doubtful.add(row)
    refused, undone = "", UndoneRows()
    try:
        undone = world.database.undo(sorted(chosen), call_id="undo_them")
    except RowUndoRefused as error:
        refused = str(error)
    if refused:
        assert world.everything() == now
        wanted = {**now, **exact}
        kept = {row: value for row, value in wanted.items() if value is not None}
        also = "would also change" in refused
        assert also or doubtful or _broken(kept), (refused, makers, chosen)
        return "refused"
    found = world.everything()
    for row in found.keys() | now.keys() | exact.keys():
        table, key = row
        if row in exact:
            assert found.get(row) == exact[row], (row, makers, chosen)
        elif row not in doubtful:
            assert found.get(row) == now.get(row), (row, makers, chosen)
        elif found.get(row) == now.get(row):
            named = any(each.startswith(f"row {table} {', '.join(key)} ") for each in undone.notes)
            earlier = [state.get(row) for state in states[:-1]]
            assert named or now.get(row) in earlier, (row, undone.notes)
    assert not _broken(found)
    if undone.changes:
        world.database.undo(["undo_them"], call_id="undo_again")
        assert world.everything() == now
    return "named" if undone.notes else "undone"
