"""Workers that are killed, paused and cut off at random: every run is exact in the end.

``WINK_TORTURE=KILLS`` says how many kills, ``WINK_SEED`` which; see ``make torture``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psycopg
import pytest
from fleet import counting_service
from torture_world import BASE, Done, Turns, Where, expected, is_approved, script

from chance import SEED, is_time_left
from postgres import Postgres
from weakincentives.durable.host import LOCAL, BranchLines
from weakincentives.durable.objects import LocalObjects
from weakincentives.errors import AnswerRefused
from weakincentives.filesystem.portable import Base, materialize, store_tree, unpack_branch
from weakincentives.runtime import SavedSession
from weakincentives.runtime.conversation import Message
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import DurableRun, Runs
from weakincentives.runtime.stores.sql import SqlStore
from weakincentives.session.events import ToolInvoked

pytest.importorskip("dbos")
pytestmark = pytest.mark.heavy

CHILD = Path(__file__).with_name("torture_child.py")
KILLS = int(float(os.environ.get("WINK_TORTURE") or 0)) or 20
LEASE = 3.0
WORKERS = 4
IN_FLIGHT = 12
SETTLES = 180.0
"""Seconds after the last kill within which every run must end."""


class Machinery:
    """Workers, forked from a process that has imported everything, and what is done to them."""

    def __init__(self, url: str, folder: Path, choice: random.Random) -> None:
        self.url, self.folder, self.choice = url, folder, choice
        (folder / "logs").mkdir()
        self.runs = Runs(Database(url))
        self.alive: dict[str, int] = {}
        self.paused: dict[str, float] = {}
        self.skews: dict[str, float] = {}
        self.seen: Counter[str] = Counter()
        self._started = 0
        self._forker = subprocess.Popen(
            [sys.executable, str(CHILD), url, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, skew: float | None = None, lease: float = LEASE) -> str:
        self._started += 1
        name = f"w{self._started}"
        if skew is None:
            skew = self.choice.choice([0, 0, 3600, -3600])
        machine = f"m{self._started % 3}"  # a worker that is started anew finds its old copies
        self._say({"name": name, "lease": lease, "skew": skew, "machine": machine})
        assert self._forker.stdout is not None
        self.skews[name] = skew
        self.alive[name] = int(self._forker.stdout.readline())
        return name

    def kill(self, name: str) -> None:
        working = sum(each.worker == name for each in self.runs.list(status="running"))
        self.seen["kills"] += 1
        self.seen["kills of working workers"] += bool(working)
        self.seen["runs that were hit"] += working
        pid = self.alive.pop(name)
        self.paused.pop(name, None)
        os.kill(pid, signal.SIGKILL)
        self._say({"reap": pid})

    def working(self) -> list[str]:
        """Return the workers that perform a run at this moment."""
        having = {each.worker for each in self.runs.list(status="running")}
        return [name for name in self.alive if name in having]

    def replace_ended(self) -> None:
        """Note workers that ended by themselves, which none should."""
        for name, pid in list(self.alive.items()):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                self.seen["workers that ended by themselves"] += 1
                del self.alive[name]
                self._say({"reap": pid})
                self.start()

    def pause(self, name: str) -> None:
        """Stop a worker beyond its lease; ``wake`` lets it go on."""
        self.seen["pauses"] += 1
        os.kill(self.alive[name], signal.SIGSTOP)
        self.paused[name] = time.monotonic() + LEASE * self.choice.uniform(1.2, 3.0)

    def wake(self, *, all_of_them: bool = False) -> None:
        for name, until in list(self.paused.items()):
            if all_of_them or time.monotonic() > until:
                del self.paused[name]
                os.kill(self.alive[name], signal.SIGCONT)

    def close(self) -> None:
        for name in list(self.alive):
            pid = self.alive.pop(name)
            os.kill(pid, signal.SIGKILL)
            self._say({"reap": pid})
        self._forker.communicate(timeout=30)
        self.runs.database.close()

    def _say(self, wanted: dict[str, Any]) -> None:
        assert self._forker.stdin is not None
        self._forker.stdin.write(json.dumps(wanted) + "\n")
        self._forker.stdin.flush()


class Work:
    """The runs that were submitted, and what must come of them."""

    def __init__(self, runs: Runs, folder: Path, service: str, choice: random.Random) -> None:
        self.runs, self.folder, self.service, self.choice = runs, folder, service, choice
        self.objects = LocalObjects(folder / "objects")
        self.turns: dict[str, Turns] = {}
        self.names: dict[str, str] = {}
        self.open: set[str] = set()
        self._count = 0

    def submit(self) -> None:
        """Submit a run, on a directory of its own or on a stored tree."""
        self._count += 1
        name = f"r{self._count}"
        project = self.folder / "projects" / name / "work"
        for path, text in BASE.items():
            (project / path).parent.mkdir(parents=True, exist_ok=True)
            (project / path).write_text(text)
        turns = script(name, self.service, self.choice)
        about: dict[str, Any] = {
            "turns": turns,
            "service": self.service,
            "delay": self.choice.uniform(0.0, 0.15),
            "whole_run": self.choice.random() < 0.25,
        }
        if self.choice.random() < 0.5:
            about["base"] = {"kind": LOCAL, "workspace": str(project)}
            run = self.runs.submit("Work.", about=about, machine="here")
        else:
            about["base"] = store_tree(project, self.objects).encode()
            run = self.runs.submit("Work.", about=about)
        self.turns[run.id], self.names[run.id] = turns, name
        self.open.add(run.id)

    def answer(self) -> None:
        """Answer what runs wait for, twice: the first answer counts."""
        for asked in self.runs.pending():
            key = asked.request.call_id
            with suppress(AnswerRefused):
                self.runs.answer(asked.id, approved=is_approved(key), digest=asked.digest)
                with pytest.raises(AnswerRefused):
                    self.runs.answer(asked.id, approved=True, digest=asked.digest)

    def look(self) -> None:
        """Forget the runs that have ended."""
        self.open &= {run.id for run in self.runs.list() if not run.has_ended}

    def problems(self) -> list[str]:
        with urlopen(f"{self.service}/all") as response:
            counted = json.load(response)
        found: list[str] = []
        for run in self.runs.list():
            said = self._problems_of(run, counted["counts"], counted["most"])
            found += [f"{run.id} ({self.names[run.id]}): {each}" for each in said]
        keys = {args["key"] for turns in self.turns.values() for turn in turns for _, args in turn}
        found += [f"{key} was ordered, which nobody asked for" for key in {*counted["most"]} - keys]
        return found

    def _problems_of(
        self, run: DurableRun, counts: dict[str, int], most: dict[str, int]
    ) -> Iterator[str]:
        if run.status != "done":
            yield f"{run.status}: {run.detail}"
            return
        turns = self.turns[run.id]
        store = SqlStore(self.runs.database)
        with SavedSession.open(run.id, store=store, wait=20, types=[Done, Where]) as saved:
            records = [e for e in saved.session[ToolInvoked].all() if _is_of_script(e)]
            done = [each.key for each in saved.session[Done].all()]
            messages = [each.role for each in saved.session[Message].all()]
            attached = saved.attached
        ends = {e.call_id: e.result.failure.code if e.result.failure else "" for e in records}
        if len(ends) != len(records):
            twice = Counter(each.call_id for each in records)
            yield "more than one record: " + str(
                [
                    (e.call_id, e.tool_name, str(e.result)[:300])
                    for e in records
                    if twice[e.call_id] > 1
                ]
            )
        if messages.count("model") != len(turns) + 1:
            yield f"{messages.count('model')} turns, not {len(turns) + 1}"
        want = expected(turns, ends, counts, most)
        yield from want.problems
        if done != want.done:
            yield f"the session has {done}, not {want.done}"
        files = self._files_of(run, attached)
        if files != {**BASE, **want.files}:
            yield f"the files are {files}, not {want.files}"

    def _files_of(self, run: DurableRun, attached: tuple[str, ...]) -> dict[str, str]:
        base = run.about["base"]
        if base["kind"] == LOCAL:
            return _tree(Path(base["workspace"]))
        known = BranchLines.of(attached)
        root = self.folder / "checked" / self.names[run.id]
        root.parent.mkdir(exist_ok=True)
        materialize(Base.decode(base), root, self.objects)
        with unpack_branch(
            root, "checked", () if known is None else known.lines, self.objects
        ) as b:
            return {path: b.read(path) for path in b.glob("**/*") if b.stat(path).kind == "file"}


def _is_of_script(event: ToolInvoked) -> bool:
    """Whether an event records a call of the script that was made: not one that waits."""
    failure = event.result.failure
    return event.tool_name != "merge" and (failure is None or failure.code != "SUSPENDED")


def _tree(root: Path) -> dict[str, str]:
    files = (each for each in root.rglob("*") if each.is_file())
    return {str(each.relative_to(root)): each.read_text() for each in files}


class Torture:
    """Does to workers and database what may happen to them, until enough kills were made."""

    def __init__(
        self, machinery: Machinery, work: Work, postgres: Postgres, choice: random.Random
    ) -> None:
        self.machinery, self.work, self.postgres, self.choice = machinery, work, postgres, choice

    def run(self, kills: int, runs: int) -> None:
        machinery, work = self.machinery, self.work
        SqlStore(machinery.runs.database)
        for _ in range(WORKERS):
            machinery.start()
        began, reported = time.monotonic(), 0
        while (machinery.seen["kills"] < kills or len(work.turns) < runs) and is_time_left():
            work.look()
            while len(work.open) < IN_FLIGHT:
                work.submit()
            work.answer()
            machinery.wake()
            machinery.replace_ended()
            self._wait()
            self._strike()
            if machinery.seen["kills"] // 50 > reported:
                reported = machinery.seen["kills"] // 50
                self._report(began)
        machinery.wake(all_of_them=True)
        self.settle()
        self._report(began)

    def _wait(self) -> None:
        """Wait until some more was done, however slow this machine is, and then for an instant."""
        wanted = self._saves() + self.choice.randrange(8)
        until = time.monotonic() + 5.0
        while self._saves() < wanted and time.monotonic() < until:
            time.sleep(0.03)
        time.sleep(self.choice.uniform(0.0, 0.1))

    def _saves(self) -> int:
        database = self.machinery.runs.database
        (row,) = database.repeat(lambda t: t.execute("SELECT sum(last) FROM wink_sessions"))
        return int(row[0] or 0)

    def _strike(self) -> None:
        machinery, choice = self.machinery, self.choice
        what, name = choice.random(), choice.choice(list(machinery.alive))
        if choice.random() < 0.8:  # most are to hit; the others find one that starts, or waits
            name = choice.choice(machinery.working() or [name])
        if what < 0.04 and not machinery.paused:
            machinery.pause(name)
        elif what < 0.07:
            machinery.seen["dropped connections"] += 1
            _drop_connections(self.postgres, machinery.url)
        elif what < 0.08:
            machinery.seen["restarts of the database"] += 1
            self.postgres.restart(choice.choice(["immediate", "fast"]))
        elif what < 0.12:
            machinery.seen["workers taken for dead"] += 1
            machinery.runs.leave(name)
        else:
            others = [each for each in machinery.alive if each != name]
            more = choice.choice([0, 0, 0, 1, 1, 2, len(others) if what < 0.2 else 0])
            for each in [name, *choice.sample(others, more)]:
                machinery.kill(each)
                machinery.start()

    def settle(self) -> None:
        until = time.monotonic() + SETTLES
        while True:
            self.work.look()
            if not self.work.open:
                return
            if time.monotonic() > until:
                stuck = [str(self.machinery.runs.find(each)) for each in self.work.open]
                raise AssertionError("stuck:\n" + "\n".join(stuck))
            self.work.answer()
            time.sleep(0.2)

    def _report(self, began: float) -> None:
        seen = ", ".join(f"{number} {what}" for what, number in self.machinery.seen.items())
        count = len(self.work.turns)
        took = time.monotonic() - began
        print(f"seed {SEED}: {count} runs, {len(self.work.open)} open, {seen}; {took:.0f} s")  # noqa: T201


def _drop_connections(postgres: Postgres, url: str) -> None:
    name = url.rpartition("/")[2]
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
        )


@contextmanager
def tortured(postgres: Postgres, folder: Path, seed: int) -> Iterator[Torture]:
    choice = random.Random(seed)
    with counting_service() as service:
        machinery = Machinery(postgres.new_database(), folder, choice)
        work = Work(machinery.runs, folder, service, choice)
        try:
            yield Torture(machinery, work, postgres, choice)
        finally:
            machinery.close()


def test_torture_of_workers_leaves_every_run_exact(postgres: Postgres, tmp_path: Path):
    with tortured(postgres, tmp_path, SEED) as torture:
        torture.run(KILLS, max(10, KILLS // 8))

        problems = torture.work.problems()
    assert not problems, f"WINK_SEED={SEED} in {tmp_path}:\n" + "\n".join(problems)


def test_workers_whose_clocks_are_hours_wrong_neither_disturb_nor_abandon_each_other(
    postgres: Postgres, tmp_path: Path
):
    with tortured(postgres, tmp_path, SEED) as torture:
        machinery, work = torture.machinery, torture.work
        fast, slow = (machinery.start(skew, lease=10.0) for skew in (3600, -3600))
        for _ in range(6):
            work.submit()
        torture.settle()
        logs = "".join(each.read_text() for each in (tmp_path / "logs").iterdir())
        assert "taking over" not in logs, "both were alive"
        for dead in (fast, slow):
            machinery.start(-machinery.skews[dead], lease=10.0)
            for _ in range(4):
                work.submit()
            until = time.monotonic() + SETTLES
            while dead not in machinery.working() and time.monotonic() < until and work.open:
                work.look()
                work.answer()
            machinery.kill(dead)
            torture.settle()

        problems = work.problems()
    assert not problems, f"WINK_SEED={SEED} in {tmp_path}:\n" + "\n".join(problems)
