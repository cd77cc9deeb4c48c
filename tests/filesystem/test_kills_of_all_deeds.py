"""Whatever a workspace does, a kill at a random instant leaves all of it or nothing.

Each deed is made again on a twin that nobody kills: before or after it, both must hold the same,
and in the end every call of the history must be undone to the same state. The deeds are in
`deeds_child.py`.
"""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import deeds_child
import pytest
from deeds_child import DEEDS, Deed
from trees import look, put

from chance import HEAVY, SEED
from injection import processes
from weakincentives.errors import FilesystemError, UndoRefused
from weakincentives.filesystem import HostFilesystem, WorkspaceHistory, branches_of, drop_branch
from weakincentives.filesystem.tree import wait_until

TORTURE = float(os.environ.get("WINK_TORTURE", "0"))
LIVES = 40 if HEAVY else 8

State = dict[str, tuple[object, ...]]


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 does not tell it where our modules are, and then loads them in every child.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        processes.set_forkserver_preload(["deeds_child", "sqlite3", "weakincentives.cli.entry"])
        multiprocessing.forkserver.ensure_running()


def contents(root: Path) -> State:
    return {path: (each.kind, each.mode, each.content) for path, each in look(root).items()}


class Twins:
    """A workspace whose processes are killed, and one with the same deeds and no kills."""

    def __init__(self, base: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.root, self.twin, self.state = base / "work", base / "twin", base / "state"
        self.kills = self.finished = 0
        self.story: list[object] = []
        self.person: dict[str, str] = {}
        self._takes: defaultdict[str, float] = defaultdict(lambda: 0.02)
        for root in (self.root, self.twin):
            for path in deeds_child.PATHS:
                put(root / path, f"{path} at first\n" * 30)

    def live(self) -> None:
        """Let a process make some deeds, and kill it over one of them."""
        if self.dice.random() < 0.15:
            self._live_by_exec()
            return
        kinds = sorted(DEEDS)
        deeds = [Deed(self.dice.choice(kinds), self.dice.randrange(10**9)) for _ in range(6)]
        at = self.dice.randrange(len(deeds))
        wait = self.dice.random() * 1.3 * self._takes[deeds[at].kind]
        self.story.append((deeds, at, wait))
        told = self._kill(deeds_child.live, (self.root, self.state, deeds), at, wait)
        for deed, ended in zip(deeds, told, strict=False):
            assert self._on_twin(deed) == ended
        self._check(deeds[len(told)] if len(told) < len(deeds) else None)
        self._let_person_edit()

    def _live_by_exec(self) -> None:
        """Kill `wink exec` over a program that changes files."""
        deed, wait = Deed("exec", self.dice.randrange(10**9)), self.dice.random() * 0.4
        self.story.append((deed, wait))
        told = self._kill(deeds_child.execute, (self.root, self.state, deed.seed), 0, wait)
        assert wait_until(lambda: not works_in(self.root), 60)
        if told:
            assert self._on_twin(deed) == told[0]
        self._check(None if told else deed)
        self._let_person_edit()

    def _kill(
        self, target: Callable[..., None], given: tuple[object, ...], at: int, wait: float
    ) -> list[str]:
        """Kill a child a while after so many of its deeds; returns how those ended."""
        receiving, sending = processes.Pipe(duplex=False)
        child = processes.Process(target=target, args=(*given, sending))
        child.start()
        sending.close()
        told: list[str] = []
        killed = False
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                if len(told) == at + 1 and not killed:
                    receiving.poll(wait)
                    end_group(child.pid or 0)
                    killed = True
                told.append(receiving.recv())
        child.join()
        child.close()
        receiving.close()
        self.kills += 1
        assert told, "it was not begun"
        assert not any("Traceback" in each for each in told), told[-1]
        return told[1:]

    def _on_twin(self, deed: Deed) -> str:
        began = time.monotonic()
        if deed.kind == "exec":
            given = (self.twin, self.state, deed.seed)
            (ended,) = self._kill(deeds_child.execute, given, 0, 600)
            self.kills -= 1
        else:
            with HostFilesystem(self.twin) as fs:
                ended = deeds_child.do(fs, deed)
        self.finished += 1
        self._takes[deed.kind] = 0.7 * self._takes[deed.kind] + 0.3 * (time.monotonic() - began)
        return ended

    def _check(self, cut: Deed | None) -> None:
        """Open what the kill has left: it has the whole last deed, or nothing of it."""
        with HostFilesystem(self.root):
            pass
        for branch in branches_of(self.root):  # what the kill has left of a deed
            drop_branch(self.root, branch.name)
        seen, expected = contents(self.root), contents(self.twin)
        if cut is not None and (seen, self._calls(self.root)) != (expected, self._calls(self.twin)):
            self._on_twin(cut)
            expected = contents(self.twin)
        assert differing(seen, expected) == {}
        assert self._calls(self.root) == self._calls(self.twin)
        assert WorkspaceHistory(self.root).damaged() == ()

    def _calls(self, root: Path) -> list[tuple[int, tuple[str, ...]]]:
        return [(each.serial, each.paths) for each in WorkspaceHistory(root).calls()]

    def _let_person_edit(self) -> None:
        path, text = f"person/{len(self.person)}", f"a person wrote {self.dice.random()}\n"
        self.person[path] = text
        for root in (self.root, self.twin):
            put(root / path, text)
        if self.dice.random() < 0.2:
            for root in (self.root, self.twin):
                with contextlib.suppress(OSError):  # a directory is there, or a file is above
                    put(root / "d/a", text)

    def undo_all(self) -> None:
        """Undo each call in both, newest first."""
        with HostFilesystem(self.root) as one, HostFilesystem(self.twin) as other:
            for mine, theirs in zip(
                reversed(one.history()), reversed(other.history()), strict=True
            ):
                told = [self._undo(fs, each) for fs, each in ((one, mine), (other, theirs))]
                assert told[0] == told[1]
                assert differing(contents(self.root), contents(self.twin)) == {}
        for path, text in self.person.items():
            assert (self.root / path).read_text() == text

    def _undo(self, fs: HostFilesystem, call: object) -> object:
        try:
            return len(fs.undo(call))  # type: ignore[arg-type]
        except (FilesystemError, UndoRefused) as error:
            return type(error).__name__


def works_in(root: Path) -> bool:
    """Tell whether a program that the kill has left is still at work there."""
    for each in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if os.readlink(each) == str(root):
                return True
    return False


def end_group(pid: int) -> None:
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def differing(one: State, other: State) -> dict[str, object]:
    paths = {path for path in {*one, *other} if one.get(path) != other.get(path)}
    return {path: (short(one.get(path)), short(other.get(path))) for path in sorted(paths)}


def short(seen: object) -> str:
    text = str(seen)
    return text if len(text) < 120 else f"{text[:60]}...{text[-50:]} ({len(text)})"


def survive(base: Path, seed: int, lives: int) -> Twins:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(base / "state"))
        twins = Twins(base, seed)
        try:
            for _ in range(lives):
                twins.live()
            twins.undo_all()
        except BaseException:
            sys.stderr.write(f"\nseed {seed} failed at {twins.story[-1:]}; see {base}\n")
            raise
    return twins


@pytest.mark.parametrize("seed", range(12 if HEAVY else 1))
def test_a_kill_leaves_all_of_a_deed_or_nothing(tmp_path: Path, seed: int) -> None:
    twins = survive(tmp_path, seed, LIVES)
    assert (twins.kills, twins.finished > 0) == (LIVES, True)


if TORTURE:  # `make torture`: fresh seeds are for finding things, not for passing

    def test_torture() -> None:
        """Fresh seeds until the time is up; a failure names its seed and keeps its directory."""
        end, done, seed = time.monotonic() + TORTURE, Counter[str](), SEED
        while time.monotonic() < end:
            base = Path(tempfile.mkdtemp(prefix=f"wink-deeds-{seed}-"))
            twins = survive(base, seed, 40)
            done.update(kills=twins.kills, deeds=twins.finished, histories=1)
            shutil.rmtree(base)
            seed += 1
        sys.stderr.write(f"\n{dict(done)}\n")
