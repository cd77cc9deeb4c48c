"""Removes runs that have ended, and finds the objects that the others still need.

>>> removed = remove_runs(runs, older_than=90 * DAY)  # doctest: +SKIP
>>> collect(objects, needed_objects(runs, objects))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weakincentives.durable.host import EMPTY, LOCAL, BranchLines, base_of_run
from weakincentives.errors import SnapshotError
from weakincentives.filesystem.portable import Base, line_keys, stored_keys
from weakincentives.filesystem.transfer import ObjectStorage
from weakincentives.runtime.stores.database import Transaction
from weakincentives.runtime.stores.runs import DurableRun, Runs
from weakincentives.runtime.stores.saves import SavedSessionData
from weakincentives.runtime.stores.sql import SqlStore

DAY = 86_400.0
_BATCH = 500


def remove_runs(runs: Runs, *, older_than: float = 90 * DAY) -> list[str]:
    """Remove the runs that ended so many seconds ago, with their sessions; returns their ids.

    What DBOS has of them stays. A run whose session is open somewhere stays, too.
    """
    database, store = runs.database, SqlStore(runs.database)
    ended = (
        "SELECT id FROM wink_runs WHERE status IN ('done', 'failed', 'cancelled')"
        f" AND updated_at < {database.now} - ? AND id > ? ORDER BY id LIMIT {_BATCH:d}"
    )
    removed: list[str] = []
    last = ""
    while found := database.execute(ended, older_than, last):
        for (run_id,) in found:
            if store.delete(run_id):
                database.repeat(lambda t, run_id=run_id: _delete(t, run_id))
                removed.append(run_id)
            last = run_id
    return removed


def needed_objects(runs: Runs, objects: ObjectStorage) -> set[str]:
    """Return the keys of all objects that the runs of a database need, for ``collect``."""
    store = SqlStore(runs.database)
    needed: set[str] = set()
    for run in runs.list():
        needed |= _of_base(run, objects)
        try:
            log = store.log(run.id)
        except FileNotFoundError:  # it has not begun
            continue
        branch = BranchLines.of(SavedSessionData.read(log).files)
        if branch is not None:
            needed |= line_keys(branch.lines)
    return needed


def _of_base(run: DurableRun, objects: ObjectStorage) -> set[str]:
    try:
        base: Mapping[str, Any] = base_of_run(run)
    except SnapshotError:  # it works on nothing
        return set()
    if base["kind"] in (LOCAL, EMPTY):
        return set()
    return stored_keys(objects, Base.decode(base))


def _delete(transaction: Transaction, run_id: str) -> None:
    transaction.execute("DELETE FROM wink_approvals WHERE run = ?", run_id)
    transaction.execute("DELETE FROM wink_runs WHERE id = ?", run_id)
