"""A call with two statements beside the same statements in a plain transaction.

On SQLite, and on the PostgreSQL of ``DATABASE_URL`` (an empty database), if that is set.

`tracked` is a call whose rows are recorded so that they can be undone; `asks nothing` is a call of
a registry that has the database and does not use it, beside `no database`.
"""

import os
import sqlite3
import tempfile
from collections.abc import Callable
from typing import Any

import weakincentives as wink
from timing import compare, emit, is_quick
from weakincentives.contrib.databases import Database, SqliteDatabase
from weakincentives.runtime import Session

SCHEMA = "CREATE TABLE {} (number INTEGER PRIMARY KEY, total INTEGER)"
UPDATE = "UPDATE {} SET total = total + 1 WHERE number = :n"
SELECT = "SELECT total FROM {} WHERE number = :n"


@wink.tool(reach="reversible")
def change(table: str, *, context: wink.ToolContext) -> str:
    """Run two statements."""
    database = context.resources.get(Database)
    database.execute(SELECT.format(table), {"n": 1})
    database.execute(UPDATE.format(table), {"n": 1})
    return "done"


@wink.tool(reach="reversible")
def idle(table: str, *, context: wink.ToolContext) -> str:
    """Do nothing."""
    return "done"


def calling(
    tool: wink.Tool[Any, Any], database: Database | None, table: str
) -> Callable[[], object]:
    resources = {} if database is None else {Database: database}
    tools = wink.ToolRegistry([tool], resources=resources, session=Session())
    arguments = {"table": table}

    def call() -> None:
        if not tools.execute(tool.name, arguments).success:
            raise RuntimeError("the call failed")

    return call


def in_sqlite(path: str) -> tuple[Callable[[], object], SqliteDatabase, SqliteDatabase]:
    """Return a plain transaction, and two databases of which one is tracked."""
    plain, tracked = SqliteDatabase(f"{path}/plain.db"), SqliteDatabase(f"{path}/tracked.db")
    for each in (plain, tracked):
        with each.transaction() as db:
            db.execute(SCHEMA.format("entry"))
            db.execute("INSERT INTO entry VALUES (1, 0)")
    tracked.track("entry")
    connection = sqlite3.connect(f"{path}/plain.db", isolation_level=None)
    select, update = SELECT.format("entry"), UPDATE.format("entry")

    def transact() -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(select, {"n": 1}).fetchall()
        connection.execute(update, {"n": 1})
        connection.execute("COMMIT")

    return transact, plain, tracked


def in_postgres(url: str) -> tuple[Callable[[], object], Database, Database]:
    import sqlalchemy

    from weakincentives.contrib.databases import SqlDatabase

    engine = sqlalchemy.create_engine(url)
    plain, tracked = SqlDatabase(engine), SqlDatabase(engine)
    with plain.transaction() as db:
        for table in ("entry", "followed"):
            db.execute(SCHEMA.format(table))
            db.execute(f"INSERT INTO {table} VALUES (1, 0)")
    serializable = engine.execution_options(isolation_level="SERIALIZABLE")
    select, update = (sqlalchemy.text(each.format("entry")) for each in (SELECT, UPDATE))

    def transact() -> None:
        with serializable.begin() as connection:
            connection.execute(select, {"n": 1}).fetchall()
            connection.execute(update, {"n": 1})

    return transact, plain, tracked


if __name__ == "__main__":
    quick = is_quick()
    batches = 10 if quick else 100
    with tempfile.TemporaryDirectory() as folder:
        transact, plain, tracked = in_sqlite(folder)
        operations = {
            "plain": transact,
            "call": calling(change, plain, "entry"),
            "tracked": calling(change, tracked, "entry"),
            "no database": calling(idle, None, "entry"),
            "asks nothing": calling(idle, plain, "entry"),
        }
        samples = compare(operations, times=20, batches=batches)
        emit("databases", on="sqlite", **{n: s.figures() for n, s in samples.items()})
    if url := os.environ.get("DATABASE_URL"):
        transact, plain, tracked = in_postgres(url)
        operations = {"plain": transact, "call": calling(change, plain, "entry")}
        samples = compare(operations, times=20, batches=batches)
        tracked.track("followed")
        followed = {"tracked": calling(change, tracked, "followed")}
        samples |= compare(followed, times=20, batches=batches)
        emit("databases", on="postgres", **{n: s.figures() for n, s in samples.items()})
