"""A program that is killed in the middle of calls that change files, session and databases.

Run as ``outcome_child.py DIRECTORY SEED WITH_FILES URL...``: ends by SIGKILL at an instant that the
seed decides, anywhere from the end of a handler to the next call. With the seed -1 it only resumes,
and prints what it finds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import weakincentives as wink
from weakincentives.contrib.databases import Database, SqlDatabase, SqliteDatabase
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.runtime import SavedSession, Session, ToolInvoked

FOLDER, SEED, WITH_FILES = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "files"
INSERT = "INSERT INTO entry VALUES (:n)"


@dataclass(frozen=True)
class Entry:
    number: int


class First(SqliteDatabase):
    """A second database of the same kind needs a type of its own."""


left = -1


def count_down(*_: object) -> None:
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)


@wink.tool(reach="reversible")
def enter(number: int, *, context: wink.ToolContext) -> int:
    """Enter a number everywhere."""
    global left
    context.session.dispatch(Entry(number))
    for kind in KINDS:
        context.resources.get(kind).execute(INSERT, {"n": number})
    if WITH_FILES:
        context.filesystem.write(f"{number}.txt", "x")
    if number == LAST:
        left = INSTANT
        sys.setprofile(count_down)
    return number


def opened(url: str) -> Database:
    if url.startswith("sqlite:"):
        name = url.removeprefix("sqlite:")
        return SqliteDatabase(name)
    import sqlalchemy

    return SqlDatabase(sqlalchemy.create_engine(url, pool_size=1))


databases = [opened(url) for url in sys.argv[4:]]
KINDS: list[Any] = [Database, First][: len(databases)]
chance = random.Random(SEED)
LAST, INSTANT = chance.randint(1, 3), chance.randint(1, 2500)

saved_file = FOLDER / "session.jsonl"
files = HostFilesystem(FOLDER / "work", shared=True)
if saved_file.exists():
    saved = SavedSession.open(saved_file)
else:
    saved = SavedSession.create(saved_file, Session())
with saved:
    saved.recover(files, databases=databases)
    if SEED < 0:
        numbers: list[list[int]] = []
        for each in databases:
            with each.transaction(read_only=True) as db:
                numbers.append(sorted(row[0] for row in db.execute("SELECT n FROM entry")))
        records = [r for r in saved.session[ToolInvoked].all() if r.success and r.ran]
        found = {
            "databases": numbers,
            "files": sorted(int(p.stem) for p in (FOLDER / "work").glob("*.txt")),
            "session": sorted(e.number for e in saved.session[Entry].all()),
            "records": sorted(r.result.value for r in records),
            "unknown": sum(not r.success for r in saved.session[ToolInvoked].all()),
        }
        sys.stdout.write(json.dumps(found))
    else:
        resources = {Filesystem: files, **dict(zip(KINDS, databases, strict=True))}
        tools = wink.ToolRegistry([enter], session=saved.session, resources=resources)
        begin = max((e.number for e in saved.session[Entry].all()), default=0)
        LAST += begin
        for n in range(begin + 1, LAST + 2):
            result = tools.execute("enter", {"number": n})
            assert result.success, result.message
