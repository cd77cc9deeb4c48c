"""Starts workers quickly: it has imported everything, and forks one per line that it reads.

Run as ``torture_child.py URL FOLDER``. Reads JSON: ``{"name", "lease", "skew"}`` starts a worker
whose clock is so many seconds wrong and answers its pid; ``{"reap": pid}`` waits for a dead one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import dbos  # noqa: F401
import psycopg  # noqa: F401
import sqlalchemy.dialects.postgresql.psycopg  # noqa: F401
from torture_world import Done, Where, prepare

from weakincentives.core.clock import SystemClock
from weakincentives.durable.dbos import DbosEngine, Worker
from weakincentives.durable.host import Opening
from weakincentives.durable.objects import LocalObjects
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import Runs


def set_clock_wrong(seconds: float) -> None:
    """For us and for whatever else asks for the time in this process."""
    right, right_ns = time.time, time.time_ns
    time.time = lambda: right() + seconds
    time.time_ns = lambda: right_ns() + int(seconds * 1e9)
    SystemClock.time = staticmethod(time.time)


def work(url: str, folder: Path, wanted: dict[str, Any]) -> None:
    name = wanted["name"]
    log = os.open(folder / "logs" / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(0)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(name)s %(message)s")
    if wanted["skew"]:
        set_clock_wrong(wanted["skew"])
    Worker(
        DbosEngine(url, poll=0.3),
        Runs(Database(url)),
        prepare,
        objects=LocalObjects(folder / "objects"),
        cache=folder / f"cache-{wanted.get('machine', name)}",
        name=name,
        machine="here",
        concurrency=3,
        lease=wanted["lease"],
        opening=lambda run: Opening(types=[Done, Where]),
    ).run()


def serve(url: str, folder: Path) -> None:
    for line in sys.stdin:
        wanted = json.loads(line)
        if "reap" in wanted:
            os.waitpid(wanted["reap"], 0)
            continue
        pid = os.fork()
        if not pid:
            try:
                work(url, folder, wanted)
            except BaseException:
                logging.exception("the worker ended")
            finally:
                os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
