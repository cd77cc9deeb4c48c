"""Databases that take part in calls: a failed call leaves no row.

>>> from weakincentives.contrib.databases import SqliteDatabase
>>> database = SqliteDatabase(":memory:")
>>> with database.transaction() as db:
...     _ = db.execute("CREATE TABLE invoice (number INTEGER PRIMARY KEY, total INTEGER)")

May know: `core`, `errors`, `filesystem`, `runtime`, `session`.
Must not go here: how rows are undone beside files; that is ``runtime.rows`` and ``runtime.undo``.
"""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.contrib.databases.base import Database as Database
    from weakincentives.contrib.databases.known import known_databases as known_databases
    from weakincentives.contrib.databases.sql import AsyncSqlDatabase as AsyncSqlDatabase
    from weakincentives.contrib.databases.sql import SqlDatabase as SqlDatabase
    from weakincentives.contrib.databases.sqlite import Rows as Rows
    from weakincentives.contrib.databases.sqlite import SqliteDatabase as SqliteDatabase
