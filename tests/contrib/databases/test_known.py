"""A workspace knows the databases that its calls changed, whoever notes them at the same time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import weakincentives as wink
from weakincentives.contrib.databases import Database, SqliteDatabase, known_databases
from weakincentives.filesystem import HostFilesystem
from weakincentives.resources import Binding
from weakincentives.runtime import Session
from weakincentives.runtime.calls import Calls


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
        notes = [each for each in (files.store / "databases").iterdir() if each.name != "identity"]
        change(files, second)
    (note,) = notes
    note.write_bytes(b"{")

    assert [each.title for each in known_databases(workspace)] == [second.title]


def test_the_same_database_is_known_once(workspace: Path, tmp_path: Path):
    for _ in range(2):
        with HostFilesystem(workspace) as files:
            change(files, SqliteDatabase(tmp_path / "a.db"))

    assert len(known_databases(workspace)) == 1


def test_of_a_shared_database_a_workspace_lists_its_own_calls_and_what_undid_them(tmp_path: Path):
    """Else `wink undo` would undo the call that somebody else has made since."""
    own, other = tmp_path / "own", tmp_path / "other"
    for each in (own, other):
        each.mkdir()
        with HostFilesystem(each) as files:
            change(files, SqliteDatabase(tmp_path / "a.db"))
    (mine,), (theirs,) = (
        Calls(each, databases=known_databases(each)).changed() for each in (own, other)
    )

    assert mine.tool == theirs.tool == "add"
    assert mine.call_id != theirs.call_id
    assert not mine.rows_are_undone
    database = SqliteDatabase(tmp_path / "a.db")
    assert {each.call_id for each in database.calls()} == {mine.call_id, theirs.call_id}

    database.undo([mine.call_id], call_id="undo_mine")
    database.undo([theirs.call_id], call_id="undo_theirs")
    (seen, undo) = Calls(own, databases=known_databases(own)).changed()
    assert seen.rows_are_undone
    assert (undo.call_id, undo.undoes) == ("undo_mine", (mine.call_id,))


def test_a_workspace_that_a_call_itself_opens_lists_the_call(workspace: Path, tmp_path: Path):
    @wink.tool(reach="reversible")
    def first_rows(*, context: wink.ToolContext) -> str:
        """Add a row, then look for a file."""
        context.resources.get(Database).execute("INSERT INTO note (text) VALUES ('new')")
        return str(context.filesystem.exists("a"))

    database = SqliteDatabase(tmp_path / "a.db")
    with database.transaction() as db:
        db.execute("CREATE TABLE note (id INTEGER PRIMARY KEY, text TEXT)")
    database.track("note")
    opens = Binding(wink.Filesystem, lambda _: HostFilesystem(workspace))
    resources = {Database: database, wink.Filesystem: opens}
    with wink.ToolRegistry([first_rows], resources=resources, session=Session()) as tools:
        assert tools.execute("first_rows", {}).success

    (call,) = Calls(workspace, databases=known_databases(workspace)).changed()
    assert call.tool == "first_rows"
