"""`wink log`, `diff`, `undo` and `rewind` show and undo rows as they do files."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from commands import Wink

import weakincentives as wink_library
from weakincentives.contrib.databases import SqliteDatabase
from weakincentives.runtime.calls import Run, open_run


@wink_library.tool(reach="reversible")
def bill(number: int, total: int, file: str = "", *, context: wink_library.ToolContext) -> int:
    """Write an invoice, and perhaps a file."""
    context.resources.get(SqliteDatabase).execute(
        "INSERT INTO invoice VALUES (:number, :total) ON CONFLICT DO UPDATE SET total = :total",
        {"number": number, "total": total},
    )
    if file:
        context.filesystem.write(file, f"{total}\n")
    return number


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    return project


@pytest.fixture
def wink(project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Wink:
    monkeypatch.chdir(project)
    monkeypatch.setenv("NO_COLOR", "1")
    return Wink(capfd, project)


@pytest.fixture
def run(project: Path) -> Run:
    """Three calls: one changes a row and a file, one only a row, one another row and the file."""
    database = SqliteDatabase(project.parent / "desk.db")
    with database.transaction() as db:
        db.execute("CREATE TABLE invoice (number INTEGER PRIMARY KEY, total INTEGER)")
    database.track("invoice")
    resources = {SqliteDatabase: database}
    with open_run(project, "bills") as saved:
        tools = wink_library.ToolRegistry(
            [bill], workspace=project, session=saved.session, resources=resources
        )
        for arguments in (
            {"number": 1, "total": 5, "file": "a.txt"},
            {"number": 1, "total": 6},
            {"number": 2, "total": 7, "file": "a.txt"},
        ):
            assert tools.execute("bill", arguments).success
        tools.close()
        path = saved.path
    database.close()
    return Run(path)


def rows(project: Path) -> dict[int, int]:
    connection = sqlite3.connect(project.parent / "desk.db")
    found = dict(connection.execute("SELECT * FROM invoice").fetchall())
    connection.close()
    return found


def test_the_log_and_the_diff_show_rows(wink: Wink, run: Run):
    shown = wink("log").out

    assert "invoice: +1 -0\n" in shown
    assert "invoice: +0 -0, 1 changed\n" in shown
    assert shown.count("committed") == 3
    assert "invoice: +0 -0, 1 changed" in wink("show", "2").out
    diff = wink("diff", "2")
    assert diff.code == 0
    assert 'row invoice 1 in desk.db\n- {"number": 1, "total": 5}\n+ {"number": 1, "total": 6}' in (
        diff.out
    )
    last = json.loads(wink("log", "--json").out.splitlines()[-1])
    assert last["rows"] == [
        {
            "database": "desk.db",
            "table": "invoice",
            "key": [2],
            "before": None,
            "after": {"number": 2, "total": 7},
        }
    ]


def test_undo_takes_back_rows_and_files_together_and_can_be_undone(
    wink: Wink, run: Run, project: Path
):
    assert wink("undo", "--last", "--dry-run").code == 0
    assert rows(project) == {1: 6, 2: 7}

    undone = wink("undo", "--last")

    assert (undone.code, rows(project)) == (0, {1: 6})
    assert (project / "a.txt").read_text() == "5\n"
    assert "invoice: +0 -1" in undone.out
    assert wink("undo", "--last").code == 0  # the call that changed only a row
    assert rows(project) == {1: 5}
    name = json.loads(wink("log", "--json").out.splitlines()[-1])["call_id"]
    assert wink("undo", name).code == 0
    assert rows(project) == {1: 6}
    assert wink("undo").code == 0
    assert rows(project) == {}
    assert not (project / "a.txt").exists()
    assert wink("undo").code == 1


def test_a_row_that_someone_else_changed_is_left_alone_and_named(
    wink: Wink, run: Run, project: Path
):
    connection = sqlite3.connect(project.parent / "desk.db")
    with connection:
        connection.execute("UPDATE invoice SET total = 99 WHERE number = 1")
    connection.close()

    undone = wink("undo")

    assert undone.code == 3
    assert "desk.db: row invoice 1 has changed since, and stays" in undone.err
    assert rows(project) == {1: 99}


def test_a_rule_of_the_database_refuses_files_and_rows(wink: Wink, run: Run, project: Path):
    connection = sqlite3.connect(project.parent / "desk.db")
    with connection:
        connection.executescript(
            "CREATE TABLE kept (invoice INTEGER REFERENCES invoice);INSERT INTO kept VALUES (2);"
        )
    connection.close()

    undone = wink("undo", "--last")

    assert undone.code == 1
    assert "nothing was undone: the database refuses it" in undone.err
    assert rows(project) == {1: 6, 2: 7}
    assert (project / "a.txt").read_text() == "7\n"


def test_a_file_that_cannot_be_undone_keeps_the_rows(wink: Wink, run: Run, project: Path):
    (project / "a.txt").write_text("by hand\n")

    undone = wink("undo", "--last")

    assert (undone.code, rows(project)) == (1, {1: 6, 2: 7})


def test_a_rewind_goes_back_and_forward_in_rows(wink: Wink, run: Run, project: Path):
    assert wink("rewind", "1").code == 0
    assert rows(project) == {1: 5}
    assert (project / "a.txt").read_text() == "5\n"

    again = wink("rewind", f"{run.mark}/3")

    assert again.code == 0
    assert rows(project) == {1: 6, 2: 7}
    assert (project / "a.txt").read_text() == "7\n"


def test_a_database_that_is_gone_does_not_hide_the_log(wink: Wink, run: Run, project: Path):
    for each in project.parent.glob("desk.db*"):
        each.unlink()

    shown = wink("log")

    assert shown.code == 0
    assert "a.txt" in shown.out
