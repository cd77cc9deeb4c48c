"""The server's undo takes back rows, with files and session, in the database of the call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

import weakincentives as wink
from weakincentives.contrib.databases import SqliteDatabase
from weakincentives.mcp import McpServer


@wink.tool(reach="reversible", needs=(SqliteDatabase,))
def enter(number: int, *, context: wink.ToolContext) -> int:
    """Enter a number."""
    db = context.resources.get(SqliteDatabase)
    db.execute("INSERT INTO entry VALUES (?)", (number,))
    context.filesystem.write(f"{number}.txt", "x")
    return number


@wink.tool(reach="reversible", needs=(SqliteDatabase,))
def clear(*, context: wink.ToolContext) -> int:
    """Remove all numbers, and no file."""
    return context.resources.get(SqliteDatabase).execute("DELETE FROM entry").rowcount


def use(tools: wink.ToolRegistry, *calls: tuple[str, dict[str, Any]]) -> list[tuple[bool, str]]:
    async def work() -> list[tuple[bool, str]]:
        said: list[tuple[bool, str]] = []
        async with Client(McpServer(tools).protocol) as client:
            for name, arguments in calls:
                result: Any = await client.call_tool(name, arguments)
                said.append((result.is_error, result.content[0].text))
        return said

    return asyncio.run(work())


@pytest.fixture
def database(tmp_path: Path) -> SqliteDatabase:
    database = SqliteDatabase(tmp_path / "desk.db")
    with database.transaction() as db:
        db.execute("CREATE TABLE entry (number INTEGER PRIMARY KEY)")
    return database


def numbers(database: SqliteDatabase) -> list[int]:
    with database.transaction(read_only=True) as db:
        return [row[0] for row in db.execute("SELECT number FROM entry ORDER BY 1")]


def test_undo_takes_back_rows_call_by_call(database: SqliteDatabase, tmp_path: Path):
    database.track("entry")
    work = tmp_path / "work"
    work.mkdir()
    resources = {SqliteDatabase: database}
    with wink.ToolRegistry([enter, clear], resources=resources, workspace=work) as tools:
        use(tools, ("enter", {"number": 1}), ("clear", {}))
        assert numbers(database) == []

        said = use(tools, ("undo", {}))
        # Another server, as after a restart: rows are known from the database.
        assert said[0][1].splitlines()[0] == "Undone: 1 call (clear)."
        assert numbers(database) == [1]

        said = use(tools, ("undo", {}), ("undo", {}))
        assert said[0][1].splitlines()[0] == "Undone: 1 call (enter)."
        assert said[1][0]
        assert numbers(database) == []
        assert list(work.iterdir()) == []
    undone = [each.undoes for each in database.calls() if each.undoes]
    assert len(undone) == 2  # so `wink log` shows them as undone, too
    database.close()


def test_rows_that_are_not_recorded_are_named(database: SqliteDatabase, tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    resources = {SqliteDatabase: database}
    with wink.ToolRegistry([enter], resources=resources, workspace=work) as tools:
        said = use(tools, ("enter", {"number": 1}), ("undo", {}))
        assert list(work.iterdir()) == []
    assert numbers(database) == [1]
    assert said[1][1].splitlines() == [
        "Undone: 1 call (enter).",
        "Rows of desk.db that were changed since are not undone: see its track().",
    ]
    database.close()
