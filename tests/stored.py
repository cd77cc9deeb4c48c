"""What tests do to the log in a store that no public name does: damage calls, make them older."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from weakincentives.log import Log
from weakincentives.log import database as rows

DAY = 86_400.0


def damage(store: Path, *serials: int) -> None:
    """Damage some calls, by default all."""
    with closing(sqlite3.connect(store / "log.db")) as log, log:
        numbers = log.execute("SELECT number FROM operation").fetchall()
        for serial in serials or [number for (number,) in numbers]:
            log.execute("UPDATE change SET path = path || 'z' WHERE number = ?", (serial,))


def damage_contents(store: Path) -> None:
    """Damage all contents that calls replaced, wherever they are stored."""
    with closing(sqlite3.connect(store / "log.db")) as log, log:
        for each in (store / "objects").rglob("*"):
            if each.is_file():
                each.write_bytes(each.read_bytes().swapcase())
                log.execute(
                    "UPDATE content SET data = CAST(data || 'z' AS BLOB) WHERE digest = ?",
                    (each.parent.name + each.name.removesuffix(".z"),),
                )


def make_calls_older(store: Path, days: float) -> None:
    """Make all committed calls look older."""
    path = store / "log.db"
    with closing(Log(path)) as log, closing(sqlite3.connect(path)) as database, database:
        for summary in log.summaries():
            operation = log.read(summary.number)
            database.execute(
                "UPDATE operation SET started = started - ? WHERE number = ?",
                (days * DAY, summary.number),
            )
            values = database.execute(
                f"SELECT {rows._COLUMNS} FROM operation WHERE number = ?",  # pyright: ignore
                (summary.number,),
            ).fetchone()
            changes = [rows._change_row(each) for each in operation.changes]  # pyright: ignore
            checksum = rows._checksum(values, changes)  # pyright: ignore
            database.execute(
                "UPDATE operation SET checksum = ? WHERE number = ?", (checksum, summary.number)
            )
