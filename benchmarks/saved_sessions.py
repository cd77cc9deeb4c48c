"""Open a saved session of 3,000 records, and save one more, in a file and in a database.

Give the URL of a PostgreSQL database in WINK_BENCH_DATABASE to measure it, too.
"""

import os
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

from timing import compare, emit, is_quick
from weakincentives.prompt import ToolResult
from weakincentives.runtime import (
    Database,
    FileStore,
    SavedSession,
    Session,
    SessionStore,
    SqlStore,
    ToolInvoked,
)

NAME = "run.jsonl"
RECORDS = 3_000


def record(number: int) -> ToolInvoked:
    return ToolInvoked(
        tool_name="write_file",
        params={"path": f"src/{number}.py", "content": "x = 1\n" * 20},
        result=ToolResult.ok(None, f"wrote {number} " + "words of the answer " * 5),
        success=True,
        timestamp=float(number),
        duration=0.1,
        call_id=f"call-{number}",
    )


def filled(store: SessionStore) -> SessionStore:
    """Save a session as a run does: each record on its own."""
    if NAME in store.names():
        SavedSession.delete(NAME, store=store)
    with SavedSession.create(NAME, Session(), store=store) as saved:
        for number in range(RECORDS):
            saved.session.dispatch(record(number))
            saved.save()
    return store


def opening(store: SessionStore) -> Callable[[], object]:
    return lambda: SavedSession.open(NAME, store=store).close()


def saving(store: SessionStore) -> tuple[SavedSession, Callable[[], object]]:
    saved, numbers = SavedSession.open(NAME, store=store), count(RECORDS)

    def save() -> None:
        saved.session.dispatch(record(next(numbers)))
        saved.save()

    return saved, save


if __name__ == "__main__":
    batches = 10 if is_quick() else 40
    with tempfile.TemporaryDirectory() as folder:
        databases = {"sqlite": Database(f"sqlite:///{folder}/wink.db")}
        if url := os.environ.get("WINK_BENCH_DATABASE"):
            databases["postgres"] = Database(url)
        stores: dict[str, SessionStore] = {"file": FileStore(Path(folder))}
        stores |= {name: SqlStore(database) for name, database in databases.items()}
        for name, store in stores.items():
            filled(store)
            samples = compare({name: opening(store)}, times=1, batches=batches)
            emit(f"open {name}", records=RECORDS, open=samples[name].figures())
            saved, save = saving(store)
            with saved:
                samples = compare({name: save}, times=5, batches=batches)
            emit(f"save {name}", records=RECORDS, save=samples[name].figures())
        for database in databases.values():
            database.close()
