"""Kills, full disks and failing disks at each modifying system call, injected below Python."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import injected_child
import pytest
from injected_child import FAILED, TEXT, change
from trees import Seen, look, put

import weakincentives as wink
from chance import THOROUGH
from injection import Injection, injections, needs_strace, run
from weakincentives.filesystem import HostFilesystem

pytestmark = pytest.mark.heavy

EVERY = 1 if THOROUGH else 5
"""`make torture` injects at every system call."""
FAULTS = ("signal=KILL", "error=ENOSPC", "error=EIO", "error=EMFILE")


class Workspace:
    """A directory with files, and some calls in its history."""

    def __init__(self, place: Path, calls: int) -> None:
        self.root, self.store = place / "work", place / "store"
        for path in ("edited", "d/moved", "removed/one", "removed/two"):
            put(self.root / path, f"{path} at first\n")
        self.states = [look(self.root)]
        for number in range(calls):
            with self.open() as fs:
                tools = wink.ToolRegistry([change], workspace=fs)
                assert tools.execute("change", {"text": f"written by call {number}\n"}).success
            self.states.append(look(self.root))

    def open(self) -> HostFilesystem:
        return HostFilesystem(self.root, store=self.store)

    def program(self, step: str) -> list[str | Path]:
        return [injected_child.__file__, step, self.root, self.store]

    def undo_all(self) -> None:
        """Undo every call that is in the history, newest first, each exactly."""
        with self.open() as fs:
            for call in reversed(fs.history()):
                assert fs.undo(call.call_id) == ()


def contents(files: dict[str, Seen]) -> dict[str, object]:
    return {path: (each.kind, each.mode, each.content) for path, each in files.items()}


def try_all(step: str, calls: int, check: Callable[[Workspace, int], None]) -> None:
    """Make a step once for each fault at each of its system calls, and look at what is left."""
    needs_strace()
    with TemporaryDirectory() as place:
        found = injections(Workspace(Path(place), calls).program(step), *FAULTS)
    assert len(found) > 40
    failures: list[str] = []
    for injection in found[::EVERY]:
        with TemporaryDirectory() as place:
            workspace = Workspace(Path(place), calls)
            code = run(workspace.program(step), injection)
            try:
                assert code in (0, FAILED, -signal.SIGKILL), f"exit code {code}"
                check(workspace, code)
            except Exception as error:
                failures.append(f"{injection}: {type(error).__name__}: {error}")
    sys.stdout.write(f"{step}: {len(found[::EVERY])} faults\n")
    assert failures == []


def test_a_call_is_whole_or_nothing_and_says_which() -> None:
    def check(workspace: Workspace, code: int) -> None:
        with workspace.open() as fs:
            committed = len(fs.history())
        now = look(workspace.root)
        if committed:
            assert (workspace.root / "edited").read_text() == TEXT
            assert (workspace.root / "new/moved").exists()
            assert not (workspace.root / "removed").exists()
        else:
            assert now == workspace.states[0]
        assert code != 0 or committed
        assert code != FAILED or not committed
        workspace.undo_all()
        assert look(workspace.root) == workspace.states[0]

    try_all("call", 0, check)


def test_an_undo_is_whole_or_nothing_and_can_be_made_again() -> None:
    def check(workspace: Workspace, code: int) -> None:
        with workspace.open() as fs:
            undone = len(fs.history()) > 1
        now = look(workspace.root)
        assert contents(now) == contents(workspace.states[0 if undone else 1])
        assert code != 0 or undone
        workspace.undo_all()
        assert contents(look(workspace.root)) == contents(workspace.states[0])

    try_all("undo", 1, check)


def test_whatever_stays_in_a_pruned_history_can_be_undone() -> None:
    def check(workspace: Workspace, code: int) -> None:
        before = look(workspace.root)
        with workspace.open() as fs:
            left = len(fs.history())
        assert look(workspace.root) == before == workspace.states[3]
        assert left == 1 or code != 0
        workspace.undo_all()
        assert contents(look(workspace.root)) == contents(workspace.states[3 - left])

    try_all("prune", 3, check)


def test_an_injected_fault_reaches_the_program() -> None:
    """The harness itself: the call fails at a full disk, and the process dies by a kill."""
    needs_strace()
    with TemporaryDirectory() as place:
        workspace = Workspace(Path(place), 0)
        program = workspace.program("call")
        assert run(program, Injection("mkdir", 1, "signal=KILL")) == -signal.SIGKILL
