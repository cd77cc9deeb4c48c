"""Kills, full disks and failing disks at each modifying system call, injected below Python.

SQLite's own calls are among them. `make test` takes a fixed few, `make test-all` kills at each call
and lets some fail, `make torture` does both at each.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import injected_child
import pytest
from injected_child import FAILED, TEXT, change
from trees import Seen, look, put

import weakincentives as wink
from chance import HEAVY, THOROUGH
from injection import Injection, needs_strace, processes, run_forked
from weakincentives.filesystem import HostFilesystem, WorkspaceHistory

KILL = "signal=KILL"
ERRORS = ("error=ENOSPC", "error=EIO", "error=EMFILE")
FEW = 4
"""How many faults `make test` injects into each step."""
BY_PERSON = {"person/notes": "by a person\n", "d/by person": "also by a person\n"}


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> None:
    needs_strace()
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 does not tell it where our modules are, and then loads them in every child.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        processes.set_forkserver_preload(["injected_child", "killed_child", "sqlite3"])
        multiprocessing.forkserver.ensure_running()


Contents = dict[str, tuple[object, ...]]


class Workspace:
    """A directory with files, some calls in its history, and what a person has made since."""

    def __init__(self, place: Path, calls: int, *, person: bool = False) -> None:
        self.root, self.store = place / "work", place / "store"
        for path in ("edited", "d/moved", "removed/one", "removed/two"):
            put(self.root / path, f"{path} at first\n")
        self.states = [self.contents()]
        for number in range(calls):
            with self.open() as fs:
                tools = wink.ToolRegistry([change], workspace=fs)
                assert tools.execute("change", {"text": f"written by call {number}\n"}).success
            self.states.append(self.contents())
        self.by_person = BY_PERSON if person else {}
        for path, text in self.by_person.items():
            put(self.root / path, text)
        self.before = look(self.root)

    def open(self) -> HostFilesystem:
        return HostFilesystem(self.root, store=self.store)

    def make(self, step: str, injection: Injection | None = None) -> tuple[int, list[Injection]]:
        given = (step, str(self.root), str(self.store))
        return run_forked(injected_child.work, *given, injection=injection)

    def contents(self) -> Contents:
        """Return what is there, but for what a person has made."""
        mine = {"person", *BY_PERSON}
        return {p: each for p, each in contents(look(self.root)).items() if p not in mine}

    def check_person(self) -> None:
        for path, text in self.by_person.items():
            assert (self.root / path).read_text() == text

    def undo_all(self) -> None:
        """Undo every call that is in the history, newest first, each exactly."""
        with self.open() as fs:
            for call in reversed(fs.history()):
                assert fs.undo(call.call_id) == ()


def contents(files: dict[str, Seen]) -> Contents:
    return {path: (each.kind, each.mode, each.content) for path, each in files.items()}


def chosen(calls: Sequence[Injection]) -> list[Injection]:
    """Return the faults to inject, given all calls of a step."""
    kills = [each._replace(what=KILL) for each in calls]
    errors = [each._replace(what=what) for each in calls for what in ERRORS]
    if THOROUGH:
        return [*kills, *errors]
    if HEAVY:  # of the errors, each call gets one of ten
        return [*kills, *errors[::10]]
    return [*kills, *errors][:: -(-(len(kills) + len(errors)) // FEW)]


def try_all(step: str, calls: int, check: Callable[[Workspace, int], None]) -> None:
    """Make a step once for each fault at each of its system calls, and look at what is left."""
    with TemporaryDirectory() as place:
        code, found = Workspace(Path(place), calls, person=True).make(step)
    assert (code, len(found) > 20) == (0, True)
    failures: list[str] = []
    faults = chosen(found)
    for injection in faults:
        with TemporaryDirectory() as place:
            workspace = Workspace(Path(place), calls, person=True)
            code, _ = workspace.make(step, injection)
            try:
                assert code in (0, FAILED, -signal.SIGKILL), f"exit code {code}"
                check(workspace, code)
                workspace.check_person()
            except Exception as error:
                failures.append(f"{injection}: {type(error).__name__}: {error}")
    sys.stdout.write(f"{step}: {len(faults)} faults\n")
    assert failures == []


@pytest.mark.parametrize("step", ["call", "command", "external"])
def test_a_call_is_whole_or_nothing_and_says_which(step: str) -> None:
    with TemporaryDirectory() as place:
        reference = Workspace(Path(place), 0, person=True)
        assert reference.make(step)[0] == 0
        after = reference.contents()
    assert step != "call" or after["edited"][2] == TEXT.encode()

    def check(workspace: Workspace, code: int) -> None:
        with workspace.open() as fs:
            committed = len(fs.history())
        assert workspace.contents() == (after if committed else workspace.states[0])
        if not committed:
            now = look(workspace.root)
            assert {path for path in now if now[path] != workspace.before[path]} == set()
        assert code != 0 or committed
        assert code != FAILED or not committed
        workspace.undo_all()
        assert workspace.contents() == workspace.states[0]

    try_all(step, 0, check)


@pytest.mark.parametrize("step", ["undo", "rewind"])
def test_going_back_is_whole_or_nothing_and_can_be_made_again(step: str) -> None:
    calls, back = (1, 0) if step == "undo" else (3, 1)

    def check(workspace: Workspace, code: int) -> None:
        with workspace.open() as fs:
            is_back = len(fs.history()) > calls
        assert workspace.contents() == workspace.states[back if is_back else calls]
        assert code != 0 or is_back
        assert code != FAILED or not is_back
        workspace.undo_all()
        assert workspace.contents() == workspace.states[0]

    try_all(step, calls, check)


def test_whatever_stays_in_a_pruned_history_can_be_undone() -> None:
    def check(workspace: Workspace, code: int) -> None:
        assert look(workspace.root) == workspace.before
        with workspace.open() as fs:
            left = len(fs.history())
        assert WorkspaceHistory(workspace.root, store=workspace.store).damaged() == ()
        assert left == 1 or code != 0
        workspace.undo_all()
        assert workspace.contents() == workspace.states[3 - left]

    try_all("prune", 3, check)


def test_a_persons_new_file_with_a_reused_inode_number_stays() -> None:
    """After a kill, a person replaces what the call had written: never is that taken for ours."""
    with TemporaryDirectory() as place:
        _, found = Workspace(Path(place), 1).make("call")
    reused, failures = 0, list[str]()
    for injection in chosen(found):
        with TemporaryDirectory() as place:
            workspace = Workspace(Path(place), 1)
            workspace.make("call", injection)
            written = [path for path in ("edited", "d/moved") if (workspace.root / path).exists()]
            for path in written:
                reused += replace_by_a_person(workspace.root / path)
            with workspace.open():
                pass
            failures += [
                f"{injection}: {path}"
                for path in written
                if (workspace.root / path).read_text() != "a person's own\n"
            ]
    assert (failures, reused > 0) == ([], True)


def replace_by_a_person(path: Path) -> bool:
    """Replace a file; tells whether the new one has the inode number of the old one."""
    old = path.stat()
    path.unlink()
    path.write_text("a person's own\n")
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns + 1))
    return path.stat().st_ino == old.st_ino


def test_an_injected_fault_reaches_the_program() -> None:
    """The harness itself: the call fails at a full disk, and the process dies by a kill."""
    for what, code in ((KILL, -signal.SIGKILL), ("error=ENOSPC", FAILED)):
        with TemporaryDirectory() as place:
            assert Workspace(Path(place), 0).make("call", Injection("mkdir", 1, what))[0] == code


def test_calls_of_sqlite_are_reached() -> None:
    """Python itself writes to descriptors of its own; SQLite writes pages at their places."""
    with TemporaryDirectory() as place:
        _, found = Workspace(Path(place), 0).make("call")
    assert sum(each.call == "pwrite64" for each in found) > 5
