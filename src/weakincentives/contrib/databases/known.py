"""The databases that calls in a workspace changed, so that `wink log` and `wink undo` find them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from weakincentives.filesystem.store import location_of, write_whole
from weakincentives.logs import get_logger

if TYPE_CHECKING:
    from weakincentives.contrib.databases.base import Database
    from weakincentives.runtime.rows import RowHistory

_logger = get_logger(__name__)

_FILE = "databases.json"


def remember(store: Path, address: Mapping[str, str]) -> None:
    """Note in the state of a workspace that its calls changed a database."""
    known = _addresses(store)
    if dict(address) not in known:
        write_whole(store / _FILE, json.dumps([*known, dict(address)]).encode(), safe=False)


def known_databases(workspace: Path) -> Sequence[RowHistory]:
    """Return the databases that calls in a workspace changed; none of them is opened yet."""
    found: list[Database] = []
    for address in _addresses(location_of(workspace)):
        try:
            found.append(_at(address))
        except (ImportError, ValueError, OSError) as error:
            _logger.warning("a database is left out: %s", error)
    return cast("Sequence[RowHistory]", found)


def _addresses(store: Path) -> list[dict[str, str]]:
    try:
        return list(json.loads((store / _FILE).read_bytes()))
    except FileNotFoundError:
        return []
    except ValueError:
        _logger.warning("%s is damaged: its databases are left out", store / _FILE)
        return []


def _at(address: Mapping[str, str]) -> Database:
    if "sqlite" in address:
        from weakincentives.contrib.databases.sqlite import SqliteDatabase

        path = Path(address["sqlite"])
        if not path.exists():
            raise FileNotFoundError(f"{path} is gone")
        return SqliteDatabase(path)
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    from weakincentives.contrib.databases.sql import SqlDatabase

    return SqlDatabase(create_engine(address["sqlalchemy"], poolclass=NullPool))
