"""The databases that calls in a workspace changed, so that `wink log` and `wink undo` find them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from weakincentives.contrib.databases.noted import FOLDER, identity_of
from weakincentives.core.logs import get_logger
from weakincentives.filesystem.store import location_of

if TYPE_CHECKING:
    from weakincentives.contrib.databases.base import Database
    from weakincentives.runtime.rows import RowHistory

_logger = get_logger(__name__)


def known_databases(workspace: Path) -> Sequence[RowHistory]:
    """Return the databases that calls in a workspace changed; none of them is opened yet.

    Each has the calls of this workspace only: others may use the same database.
    """
    store = location_of(workspace)
    found: list[Database] = []
    for address in _addresses(store):
        try:
            found.append(_at(address))
            found[-1].workspace = identity_of(store)
        except (ImportError, ValueError, OSError) as error:
            _logger.warning("a database is left out: %s", error)
    return cast("Sequence[RowHistory]", found)


def _addresses(store: Path) -> list[dict[str, str]]:
    """Return where the databases are, the one that was noted first first."""
    found: list[tuple[int, dict[str, str]]] = []
    with contextlib.suppress(FileNotFoundError):
        for each in (store / FOLDER).iterdir():
            if not _NAMED.fullmatch(each.name):  # being written
                continue
            try:
                found.append((each.stat().st_mtime_ns, dict(json.loads(each.read_bytes()))))
            except (OSError, ValueError) as error:
                _logger.warning("%s is damaged: its database is left out: %s", each, error)
    return [address for _, address in sorted(found, key=lambda each: each[0])]


_NAMED = re.compile("[0-9a-f]{32}")


def _at(address: Mapping[str, str]) -> Database:
    if "sqlite" in address:
        from weakincentives.contrib.databases.sqlite import SqliteDatabase

        path = Path(address["sqlite"])
        if not path.exists():
            raise FileNotFoundError(f"{path} is gone")
        return SqliteDatabase(path)
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    from weakincentives.contrib.databases.sql import AsyncSqlDatabase, SqlDatabase

    engine = create_engine(address["sqlalchemy"], poolclass=NullPool)
    if engine.dialect.is_async:
        from sqlalchemy.ext.asyncio import AsyncEngine

        return AsyncSqlDatabase(AsyncEngine(engine))
    return SqlDatabase(engine)
