"""A program that is killed in the middle of calls that change files, session and databases.

Run as ``outcome_child.py DIRECTORY WITH_FILES URL...``. For each seed on its standard input, a
forked child resumes the session, prints what it finds, and makes calls until it is killed: with an
odd seed by itself, at a function call that the seed decides, anywhere from the end of a handler to
the next call; with an even seed from outside, at any instant. With the seed -1 it only resumes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import weakincentives as wink
from weakincentives.contrib.databases import Database, SqlDatabase, SqliteDatabase
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.runtime import SavedSession, Session, ToolInvoked

FOLDER, WITH_FILES, URLS = Path(sys.argv[1]), sys.argv[2] == "files", sys.argv[3:]
INSERT = "INSERT INTO entry VALUES (:n)"


@dataclass(frozen=True)
class Entry:
    number: int


class First(SqliteDatabase):
    """A second database of the same kind needs a type of its own."""


KINDS: list[Any] = [Database, First][: len(URLS)]
last = instant = 0
"""The call that is killed, and after how many function calls."""
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
    if number == last:
        left = instant
        sys.setprofile(count_down)
    return number


def opened(url: str) -> Database:
    if url.startswith("sqlite:"):
        return SqliteDatabase(url.removeprefix("sqlite:"))
    import sqlalchemy

    return SqlDatabase(sqlalchemy.create_engine(url, pool_size=1))


def resume_and_call(seed: int, tell: int) -> None:
    global last, instant
    databases = [opened(url) for url in URLS]
    files = HostFilesystem(FOLDER / "work", shared=True)
    place = FOLDER / "session.jsonl"
    saved = SavedSession.open(place) if place.exists() else SavedSession.create(place, Session())
    with saved:
        saved.recover(files, databases=databases)
        os.write(tell, json.dumps(found(saved, databases)).encode())
        os.close(tell)
        begin = max((e.number for e in saved.session[Entry].all()), default=0)
        numbers = itertools.count(begin + 1)
        if seed % 2:
            chance = random.Random(seed)
            last, instant = begin + chance.randint(1, 3), chance.randint(1, 2500)
            numbers = range(begin + 1, last + 2)
        resources = {Filesystem: files, **dict(zip(KINDS, databases, strict=True))}
        tools = wink.ToolRegistry([enter], session=saved.session, resources=resources)
        for n in () if seed < 0 else numbers:
            result = tools.execute("enter", {"number": n})
            assert result.success, result.message


def found(saved: SavedSession, databases: list[Database]) -> dict[str, Any]:
    rows: list[list[int]] = []
    for each in databases:
        with each.transaction(read_only=True) as db:
            rows.append(sorted(row[0] for row in db.execute("SELECT n FROM entry")))
    records = saved.session[ToolInvoked].all()
    return {
        "databases": rows,
        "files": sorted(int(p.stem) for p in (FOLDER / "work").glob("*.txt")),
        "session": sorted(e.number for e in saved.session[Entry].all()),
        "records": sorted(r.result.value for r in records if r.success and r.ran),
        "unknown": sum(not r.success for r in records),
    }


def run(seed: int) -> dict[str, Any]:
    """Let a child run, and return what it found and how it ended."""
    hears, tells = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hears)
        try:
            resume_and_call(seed, tells)
        except BaseException:  # a forked child ends here, with all of its parent's frames
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(tells)
    with os.fdopen(hears) as pipe:
        text = pipe.read()
    if seed >= 0 and seed % 2 == 0:
        time.sleep(random.Random(seed).uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return {"found": json.loads(text or "null"), "end": os.waitstatus_to_exitcode(status)}


for line in sys.stdin:
    sys.stdout.write(json.dumps(run(int(line))) + "\n")
    sys.stdout.flush()
