"""A workspace knows the databases that its calls changed, whoever notes them at the same time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import weakincentives as wink
from weakincentives.contrib.databases import Database, SqliteDatabase, known_databases
from weakincentives.filesystem import HostFilesystem
from weakincentives.runtime import Session


@wink.tool(reach="reversible")
def add(*, context: wink.ToolContext) -> str:
    """Add a row."""
    context.resources.get(Database).execute("INSERT INTO note (text) VALUES ('new')")
    return "done"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


def change(files: HostFilesystem, database: SqliteDatabase) -> None:
    """Change a database by a call in a workspace."""
    with database.transaction() as db:
        db.execute("CREATE TABLE IF NOT EXISTS note (id INTEGER PRIMARY KEY, text TEXT)")
    database.track("note")
    resources = {Database: database, wink.Filesystem: files}
    with wink.ToolRegistry([add], resources=resources, session=Session()) as tools:
        assert tools.execute("add", {}).success


def test_databases_that_are_noted_at_the_same_time_are_all_known(workspace: Path, tmp_path: Path):
    databases = [SqliteDatabase(tmp_path / f"{number}.db") for number in range(8)]
    with HostFilesystem(workspace) as files:
        threads = [threading.Thread(target=change, args=(files, each)) for each in databases]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    assert {each.title for each in known_databases(workspace)} == {each.title for each in databases}


def test_a_damaged_note_costs_only_its_database(workspace: Path, tmp_path: Path):
    first, second = (SqliteDatabase(tmp_path / name) for name in ("a.db", "b.db"))
    with HostFilesystem(workspace) as files:
        change(files, first)
        (note,) = (files.store / "databases").iterdir()
        change(files, second)
        note.write_bytes(b"{")

    assert [each.title for each in known_databases(workspace)] == [second.title]


def test_the_same_database_is_known_once(workspace: Path, tmp_path: Path):
    for _ in range(2):
        with HostFilesystem(workspace) as files:
            change(files, SqliteDatabase(tmp_path / "a.db"))

    assert len(known_databases(workspace)) == 1
