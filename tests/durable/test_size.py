"""What a run takes in the database: its texts once or twice, never once per step."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

import pytest
from worker_child import make_worker

from weakincentives.runtime import SavedSession
from weakincentives.runtime.conversation import Message
from weakincentives.runtime.stores.sql import SqlStore

pytest.importorskip("dbos")

MOST = 5 << 20
"""Bytes for 100 calls on a conversation of 200,000 tokens."""


@pytest.mark.heavy
def test_100_calls_on_a_long_conversation_take_at_most_5_mb(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'wink.db'}"
    (tmp_path / "project").mkdir()
    worker = make_worker(url, tmp_path, "w")
    turns = [[["produce", {"size": 8_100}]] * 2] * 50
    about = {"workspace": str(tmp_path / "project"), "turns": turns}
    run = worker.runs.submit("Work.", about=about, machine="here")
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        until = time.monotonic() + 300
        while not worker.runs.find(run.id).has_ended:
            assert time.monotonic() < until
            time.sleep(0.2)
    finally:
        worker.stop()
        thread.join()

    assert worker.runs.find(run.id).status == "done"
    with SavedSession.open(run.id, store=SqlStore(worker.runs.database)) as saved:
        messages = saved.session[Message].all()
    characters = sum(len(each.text) for each in messages)
    assert sum(each.role == "tool" for each in messages) == 100
    assert characters >= 4 * 200_000
    worker.runs.database.close()
    sizes = {name: used(tmp_path / name) for name in ("wink.db", "wink.db.dbos")}
    assert sum(sizes.values()) <= MOST, sizes


def used(path: Path) -> int:
    """Return the bytes of the pages in use."""
    with sqlite3.connect(path) as connection:
        ((pages,),) = connection.execute("PRAGMA page_count")
        ((free,),) = connection.execute("PRAGMA freelist_count")
        ((size,),) = connection.execute("PRAGMA page_size")
    print(path.name, (pages - free) * size)  # noqa: T201
    return (pages - free) * size
