"""The tables of a part of the library in a database, created once and changed in steps."""

from __future__ import annotations

from collections.abc import Sequence

from weakincentives.errors import SessionError
from weakincentives.runtime.stores.database import Database, Transaction

_LOCK = 0x77696E6B
"""Taken by whoever creates tables: PostgreSQL does not serialize that."""


def prepare_tables(database: Database, part: str, steps: Sequence[Sequence[str]]) -> None:
    """Apply the steps that the tables of a part lack; each is a list of SQL statements.

    Steps are never changed, only added: databases exist that have applied them.

    Raises:
        SessionError: A newer version of this library has changed the tables.
    """

    def work(transaction: Transaction) -> None:
        if database.is_postgres:
            transaction.execute("SELECT pg_advisory_xact_lock(?)", _LOCK)
        transaction.execute(
            "CREATE TABLE IF NOT EXISTS wink_tables (part TEXT PRIMARY KEY, version BIGINT)"
        )
        rows = transaction.execute("SELECT version FROM wink_tables WHERE part = ?", part)
        version = rows[0][0] if rows else 0
        if version > len(steps):
            raise SessionError(
                f"the tables for {part} in {database.shown} have version {version}, this version of"
                f" weakincentives knows {len(steps)}: update it"
            )
        for statements in steps[version:]:
            for sql in statements:
                transaction.execute(sql)
        if version < len(steps):
            transaction.execute(
                "INSERT INTO wink_tables VALUES (?, ?)"
                " ON CONFLICT (part) DO UPDATE SET version = excluded.version",
                part,
                len(steps),
            )

    database.repeat(work)
