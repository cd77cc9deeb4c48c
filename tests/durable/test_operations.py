"""The queries of the operations guide run on the tables as they are."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from postgres import Postgres
from weakincentives.prompt.approval import ApprovalRequest
from weakincentives.runtime import SavedSession, Session
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import Runs
from weakincentives.runtime.stores.sql import SqlStore

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
BLOCKS = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
NOW = "extract(epoch from now())"


def queries(*, postgres: bool) -> list[str]:
    """Return the statements of the page that anybody may run on this kind of database."""
    anyone = [each for each in BLOCKS if not each.startswith("-- as an administrator")]
    anyone.sort(key=lambda each: "UPDATE" in each or "DELETE" in each)  # the others look first
    if postgres:
        return anyone
    return [each.replace(NOW, "unixepoch()") for each in anyone if "PostgreSQL only" not in each]


def fill(url: str) -> Iterator[Database]:
    """Make a run that runs, one that waits for a person and one that is queued."""
    database = Database(url)
    runs, store = Runs(database), SqlStore(database)
    running, waiting, _ = (runs.submit("a", about={}, machine="m1") for _ in range(3))
    runs.begin(running.id, 1, "w1")
    with SavedSession.create(running.id, Session(), store=store) as saved:
        saved.ledger.begin("call-1", "send", timestamp=1.0)
    runs.ask(
        waiting.id,
        ApprovalRequest(
            tool_name="send", description="", arguments={}, reach="irreversible",
            call_id="call-1", session_id="",
        ),
    )  # fmt: skip
    runs.beat("w1", "m2")
    yield database
    database.close()


def answers(database: Database, sql: str) -> list[tuple[object, ...]]:
    with database.transaction() as transaction:
        return transaction.execute(sql.replace("%", "%%") if database.is_postgres else sql)


def check(database: Database, *, postgres: bool) -> None:
    found = {sql: answers(database, sql) for sql in queries(postgres=postgres)}
    empty = {sql for sql, rows in found.items() if not rows}
    expected = (
        "FROM wink_workers WHERE seen <",
        "s.token >",
        "'failed'",
        "UPDATE",
        "DELETE",
        "dbos.",
    )
    assert [sql for sql in empty if not any(each in sql for each in expected)] == []


@pytest.mark.skipif(sqlite3.sqlite_version_info < (3, 38), reason="needs unixepoch()")
def test_queries_of_the_guide_answer_on_sqlite(tmp_path: Path):
    for database in fill(f"sqlite:///{tmp_path / 'runs.db'}"):
        check(database, postgres=False)


@pytest.mark.heavy
def test_queries_of_the_guide_answer_on_postgresql(postgres: Postgres):
    pytest.importorskip("dbos")
    from dbos._serialization import DBOSPortableJSON
    from dbos._sys_db import SystemDatabase

    url = postgres.new_database()
    system = SystemDatabase.create(
        system_database_url=url.replace("postgresql://", "postgresql+psycopg://"),
        engine_kwargs={}, engine=None, schema=None, serializer=DBOSPortableJSON, executor_id="x",
    )  # fmt: skip
    system.run_migrations()
    for database in fill(url):
        check(database, postgres=True)
    system.destroy()
