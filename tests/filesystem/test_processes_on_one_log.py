"""Several processes on one workspace: their calls come one after the other, and none is lost."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from trees import look

from chance import HEAVY
from injection import processes
from weakincentives.filesystem import Branch, HostFilesystem, WorkspaceHistory

PROCESSES, CALLS = 8, 20 if HEAVY else 6


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 does not tell it where our modules are, and then loads them in every child.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        multiprocessing.forkserver.ensure_running()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    root.mkdir()
    (root / "shared").write_text("")
    return root


def append(root: Path, store: Path, name: str, calls: int, reports: Connection) -> None:
    """Add lines to a file that all of them change; undo one's own call now and then."""
    try:
        waits: list[float] = []
        with HostFilesystem(root, store=store, shared=True) as fs:
            reports.send("open")
            reports.recv()
            for number in range(calls):
                asked = time.monotonic()
                with fs.gate:
                    waits.append(time.monotonic() - asked)
                    view = fs.fork_in_place()
                    count = len(view.read("shared").splitlines())
                    view.append("shared", f"{name} {number} saw {count}\n")
                    view.write(f"own/{name}", f"{number}\n")
                    fs.merge(view)
                    if number % 5 == 4:
                        assert fs.undo(fs.history()[-1]) == ()
        reports.send(waits)
    except Exception as error:
        reports.send(f"{type(error).__name__}: {error}")


def sleep_on_a_branch(root: Path, store: Path, reports: Connection) -> None:
    """Work on a branch, wait in the middle of that, and merge when told to."""
    try:
        branch = Branch.create(root, "slow", store=store)
        branch.write("by the sleeper", "begun\n")
        reports.send("asleep")
        reports.recv()
        branch.append("by the sleeper", "done\n")
        with HostFilesystem(root, store=store, shared=True) as fs:
            branch.merge_into(fs)
        branch.close()
        reports.send("merged")
    except Exception as error:
        reports.send(f"{type(error).__name__}: {error}")


def started(target: Callable[..., None], *given: object) -> Iterator[Connection]:
    ours, its = processes.Pipe()
    process = processes.Process(target=target, args=(*given, its))
    process.start()
    its.close()
    yield ours
    process.join()
    process.close()
    ours.close()


def test_calls_of_many_processes_are_in_one_order_and_none_is_lost(root: Path) -> None:
    store = root.parent / "store"
    names = [f"p{number}" for number in range(PROCESSES)]
    running = [started(append, root, store, name, CALLS) for name in names]
    reports = [next(each) for each in running]
    assert [each.recv() for each in reports] == ["open"] * PROCESSES
    for each in reports:
        each.send("go")
    told = [each.recv() for each in reports]
    for each in running:
        assert next(each, None) is None
    assert [each for each in told if isinstance(each, str)] == [], "no error reaches a user"

    waits = sorted(wait for each in told for wait in each)
    sys.stdout.write(f"longest wait {waits[-1]:.2f} s, median {waits[len(waits) // 2]:.2f} s\n")
    lines = (root / "shared").read_text().splitlines()
    kept = {f"{name} {n}" for name in names for n in range(CALLS) if n % 5 != 4}
    assert {line.partition(" saw ")[0] for line in lines} == kept
    assert [line.partition(" saw ")[2] for line in lines] == [str(n) for n in range(len(lines))]
    history = WorkspaceHistory(root, store=store)
    calls = history.calls()
    assert [each.serial for each in calls] == list(range(1, len(calls) + 1))
    assert len(calls) == PROCESSES * (CALLS + CALLS // 5)
    assert history.damaged() == ()
    with HostFilesystem(root, store=store) as fs:
        for call in reversed(fs.history()):
            assert fs.undo(call) == ()
    assert sorted(look(root)) == [".", "shared"]


def test_another_process_appends_while_a_tool_sleeps(root: Path) -> None:
    store = root.parent / "store"
    running = started(sleep_on_a_branch, root, store)
    sleeper = next(running)
    assert sleeper.recv() == "asleep"
    with HostFilesystem(root, store=store, shared=True) as fs:
        for number in range(3):
            fs.write("a", f"{number}\n")
        assert len(fs.history()) == 3
        sleeper.send("go on")
        assert sleeper.recv() == "merged"
        assert fs.read("by the sleeper") == "begun\ndone\n"
        assert [each.paths for each in fs.history()] == [("a",)] * 3 + [("by the sleeper",)]
    assert next(running, None) is None
    assert (root / "a").read_text() == "2\n"
    assert WorkspaceHistory(root, store=store).damaged() == ()
