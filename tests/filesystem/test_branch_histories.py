"""Random histories of calls, branches, merges, undone calls, kills and a person's edits.

The model is a dict from path to text, the calls with what each replaced, and for each branch what
it changed. Every text is unique, so whatever the person wrote can be looked for.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import branch_child
import pytest
from branch_child import Change, Deed
from forks import processes
from hypothesis import example, given
from hypothesis import strategies as st
from killed_child import Death

from chance import THOROUGH
from weakincentives.errors import MergeConflict, UndoRefused
from weakincentives.filesystem import (
    Branch,
    Filesystem,
    HostFilesystem,
    WorkspaceHistory,
    branches_of,
)

pytestmark = pytest.mark.usefixtures("forkserver")

# In `make torture` 10,000 histories with kills, in parts that run at once.
PARTS = 10 if THOROUGH else 1

PATHS = ("a", "b", "d/a", "d/b", "e/f/a")
NAMES = ("x", "y")

Files = dict[str, str]


@dataclass
class Call:
    """What a committed call replaced, and left."""

    id: str
    before: dict[str, str | None]
    after: dict[str, str | None]
    moment: int
    undone: bool = False


@dataclass
class Fork:
    """A branch: where it begins, what it changed, and what was there before."""

    base: int
    moment: int
    changed: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    was: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    moved: set[str] = field(default_factory=set[str])


class Work:
    """A workspace with its branches, and a model of both."""

    def __init__(self, place: Path) -> None:
        self.root = place / "work"
        self.root.mkdir()
        self.numbers = itertools.count()
        self.disk: Files = {}
        self.calls: list[Call] = []
        self.forks: dict[str, Fork] = {}
        self.open: dict[str, Branch] = {}
        self.of_person: set[str] = set()
        self.moved: set[str] = set()
        """Texts that a call moved: if a person changes them, earlier states show that."""
        self.death: Death | None = None
        """Kills the process that does the next deed."""
        self.told: object = ()
        """What the last deed returned."""
        for path in PATHS[:3]:
            self.person(path)
        self.fs = HostFilesystem(self.root)

    def close(self) -> None:
        for branch in self.open.values():
            branch.close()
        self.open.clear()
        self.fs.close()

    def reopen(self) -> None:
        self.close()
        self.fs = HostFilesystem(self.root)
        assert not self.fs.recovered

    def text(self, who: str) -> str:
        return f"{who} wrote text {next(self.numbers)}.\n"

    # A person, who knows nothing of us

    def person(self, path: str) -> None:
        if self.disk.get(path) in self.moved:
            return
        self._pass_time()
        self.of_person.discard(self.disk.get(path, ""))
        self.disk[path] = self.text("a person")
        self.of_person.add(self.disk[path])
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(self.disk[path])

    def _pass_time(self) -> None:
        """Return when files that are changed now have a later time than those before."""
        probe, began = self.root.with_name("probe"), 0
        while True:
            probe.touch()
            now = probe.stat().st_mtime_ns
            began = began or now
            if now > began:
                return

    # Deeds

    def _do(self, deed: Deed) -> bool:
        """Do it, or let a process do it that is killed over it; tells whether it is done."""
        death, self.death = self.death, None
        if death is None:
            self.told = deed(self.fs, self.opened)
            return True
        before = self._evidence()
        self.close()
        process = processes.Process(target=branch_child.do_and_die, args=(self.root, deed, death))
        process.start()
        process.join()
        code = process.exitcode
        process.close()
        self.fs, self.told = HostFilesystem(self.root), ()
        assert not self.fs.recovered
        assert code in (0, branch_child.REFUSED, -signal.SIGKILL)
        return code == 0 or self._evidence() != before

    def _evidence(self) -> object:
        """What is another one after every deed."""
        found = branches_of(self.root)
        forks = {each.name: (each.base, each.moment, len(each.commits)) for each in found}
        return len(self.fs.history()), forks

    def killed(self, instant: int, method: str, *arguments: object) -> None:
        """Let a process make a step, and kill it at one of its system calls."""
        self.death = Death(instant, torn=instant % 2 == 0)
        getattr(self, method)(*arguments)
        self.death = None

    # Calls

    def call(self, path: str, other: str, how: int) -> None:
        before = dict(self.disk)
        change = self._planned(self.disk, path, other, how)
        if self._do(partial(branch_child.change_in_call, change)):
            self._make(change, self.disk, self.moved)
            self._note(before)

    def _planned(self, files: Files, path: str, other: str, how: int) -> Change:
        """Plan to write, delete or move a file, having read it."""
        reads = tuple((each, files[each]) for each in (path, other) if each in files)
        if how == 0 or path not in files or (how == 2 and path == other):
            return Change(path, text=self.text("an agent"), reads=reads)
        return Change(path, to=None if how == 1 else other, reads=reads)

    def _make(self, change: Change, files: Files, moved: set[str]) -> None:
        if change.to is not None:
            files[change.to] = files.pop(change.path)
            moved.add(files[change.to])
        elif change.text is not None:
            files[change.path] = change.text
        else:
            del files[change.path]

    def _note(self, before: Files) -> None:
        """Note what a call changed; one that only went back may have changed but a time."""
        changed = {p for p in PATHS if before.get(p) != self.disk.get(p)}
        made = self.fs.history()[len(self.calls) :]
        assert bool(changed) <= len(made) <= 1
        for each in made:
            touched = changed.union(each.paths).intersection(PATHS)  # some only for a moment
            replaced = {path: before.get(path) for path in touched}
            left = {path: self.disk.get(path) for path in touched}
            self.calls.append(Call(each.call_id, replaced, left, next(self.numbers)))

    def without_calls_after(self, serial: int) -> Files:
        """What is there now, without what later calls did."""
        found: dict[str, str | None] = {path: self.disk.get(path) for path in PATHS}
        for call in reversed(self.calls[serial:]):
            found.update(call.before)
        return {path: text for path, text in found.items() if text is not None}

    def state_at(self, serial: int, moment: int | None = None) -> Files:
        """What was there after a call: where calls left something, no later edit of a person."""
        if moment is None:
            moment = self.calls[serial - 1].moment if serial else -1
        found: dict[str, str | None] = dict(self.without_calls_after(serial))
        for path in PATHS:
            left = [call.after[path] for call in self.calls[:serial] if path in call.after]
            if left and self._moment_of(found.get(path)) > moment:
                found[path] = left[-1]
        return {path: text for path, text in found.items() if text is not None}

    def _moment_of(self, text: str | None) -> int:
        """When a person wrote a text; -1 if nobody did."""
        if text is None or not text.startswith("a person"):
            return -1
        return int(text.rstrip(".\n").rpartition(" ")[2])

    def undo(self, number: int) -> None:
        wanted = [call for call in self.calls if not call.undone]
        if not wanted:
            return
        call, before = wanted[-1 - number % min(2, len(wanted))], dict(self.disk)
        as_left = all(self.disk.get(path) == text for path, text in call.after.items())
        try:
            if not self._do(partial(branch_child.undo, call.id)):
                return
        except UndoRefused:
            assert not as_left, "nothing has changed since"
            return
        assert as_left, "something has changed since"
        call.undone = True
        for path, text in call.before.items():
            self.disk.pop(path, None)
            if text is not None:
                self.disk[path] = text
        self._note(before)

    def rewind(self, number: int) -> None:
        """Undo every call after one; what a person changed after one of them stays."""
        if not self.calls:
            return
        serial, before = number % len(self.calls) + 1, dict(self.disk)
        later = self.calls[serial:]
        if not self._do(partial(branch_child.rewind, self.calls[serial - 1].id)):
            return
        kept = {path: text for path in PATHS if (text := self._edit_since(later, path)) is not None}
        assert bool(self.told) <= bool(kept)
        if kept:
            # What was moved from or to there depends on it.
            found = self.on_disk()
            assert {path: found.get(path) for path in kept} == kept
            self.disk = found
        else:
            self.disk = self.without_calls_after(serial)
        for call in later:
            call.undone = True
        self._note(before)

    def _edit_since(self, calls: list[Call], path: str) -> str | None:
        """What a person put there after one of these calls; None if nobody did."""
        now = self.disk.get(path)
        for call in reversed(calls):
            if path in call.after:
                if now != call.after[path]:
                    return now
                now = call.before[path]
        return None

    # Branches

    def branch(self, name: str, at: int) -> None:
        if name in self.forks:
            self.open.pop(name).close() if name in self.open else None
            if at % 2 and self._do(partial(branch_child.drop, name)):
                del self.forks[name]
            return
        serial = len(self.calls) if at % 2 else at % (len(self.calls) + 1)
        if self._do(partial(branch_child.create, name, serial)):
            self.forks[name] = Fork(serial, self.calls[serial - 1].moment if serial else -1)

    def opened(self, name: str) -> Branch:
        if name not in self.open:
            self.open[name] = Branch.open(self.root, name)
        return self.open[name]

    def shown_by(self, fork: Fork) -> Files:
        found: dict[str, str | None] = {**self.state_at(fork.base, fork.moment), **fork.changed}
        return {path: text for path, text in found.items() if text is not None}

    def on_branch(self, name: str, path: str, other: str, how: int) -> None:
        if name not in self.forks:
            return
        fork = self.forks[name]
        before, base = self.shown_by(fork), self.state_at(fork.base, fork.moment)
        files = dict(before)
        change = self._planned(files, path, other, how)
        if not self._do(partial(branch_child.change_on_branch, change, name)):
            return
        self._make(change, files, fork.moved)
        for each in PATHS:
            if before.get(each) != files.get(each):
                fork.was.setdefault(each, base.get(each))
                fork.changed[each] = files.get(each)

    def conflicts(self, fork: Fork, theirs: Files) -> set[str]:
        ours = self.shown_by(fork)
        return {
            path
            for path, was in fork.was.items()
            if ours.get(path) != was != theirs.get(path) != ours.get(path)
        }

    def merged(self, fork: Fork, theirs: Files) -> Files:
        ours, found = self.shown_by(fork), dict(theirs)
        for path, was in fork.was.items():
            if ours.get(path) != was:
                found.pop(path, None)
                if path in ours:
                    found[path] = ours[path]
        return found

    def merge(self, name: str, anew: int) -> None:
        if name not in self.forks:
            return
        fork, before = self.forks[name], dict(self.disk)
        if self._is_refused(fork, partial(branch_child.merge, name)):
            return
        self.disk = self.merged(fork, before)
        self.moved |= fork.moved
        self._note(before)
        if anew % 2:
            self.begin_anew(name)

    def begin_anew(self, name: str) -> None:
        if name in self.forks and self._do(partial(branch_child.begin_anew, name)):
            self.forks[name] = Fork(len(self.calls), next(self.numbers))

    def rebase(self, name: str) -> None:
        if name not in self.forks:
            return
        fork, now = self.forks[name], dict(self.disk)
        if self._is_refused(fork, partial(branch_child.rebase, name)):
            return
        merged = self.merged(fork, now)
        self.forks[name] = Fork(
            len(self.calls),
            next(self.numbers),
            {path: merged.get(path) for path in fork.was},
            {path: now.get(path) for path in fork.was},
            fork.moved,
        )

    def _is_refused(self, fork: Fork, deed: Deed) -> bool:
        """Do it, and tell whether it was not done, for the conflicts there are or for a kill."""
        conflicts = self.conflicts(fork, self.disk)
        if self.death is not None or not conflicts:
            done = self._do(deed)
            assert not (done and conflicts)
            return not done
        with pytest.raises(MergeConflict) as refused:
            self._do(deed)
        assert set(refused.value.paths) == conflicts
        return True

    # Looking

    def on_disk(self) -> Files:
        return {
            path: (self.root / path).read_text() for path in PATHS if (self.root / path).exists()
        }

    def check(self) -> None:
        assert self.on_disk() == self.disk
        for name, fork in self.forks.items():
            assert shown(self.opened(name)) == self.shown_by(fork), name
        assert {each.name for each in branches_of(self.root)} == set(self.forks)

    def check_past(self) -> None:
        history = WorkspaceHistory(self.root)
        for serial in range(len(self.calls) + 1):
            assert shown(history.files_at(serial)) == self.state_at(serial), serial

    def check_person(self) -> None:
        """Whatever the person wrote, and did not replace, is somewhere."""
        places = itertools.chain(self.root.rglob("*"), self.fs.store.rglob("*"))
        kept = b"".join(each.read_bytes() for each in places if each.is_file())
        assert [text for text in self.of_person if text.encode() not in kept] == []


def shown(files: Filesystem) -> Files:
    return {path: files.read(path) for path in PATHS if files.exists(path)}


path, number, name = st.sampled_from(PATHS), st.integers(0, 5), st.sampled_from(NAMES)
DEEDS = (
    st.tuples(st.just("on_branch"), name, path, path, st.integers(0, 2)),
    st.tuples(st.just("call"), path, path, st.integers(0, 2)),
    st.tuples(st.just("branch"), name, number),
    st.tuples(st.just("merge"), name, number),
    st.tuples(st.just("rebase"), name),
    st.tuples(st.just("begin_anew"), name),
    st.tuples(st.just("undo"), number),
    st.tuples(st.just("rewind"), number),
)
STEPS = (*DEEDS, st.tuples(st.just("person"), path), st.tuples(st.just("reopen")))
KILLS = st.tuples(st.integers(1, 60), st.one_of(DEEDS)).map(lambda two: ("killed", two[0], *two[1]))

Steps = list[tuple[object, ...]]


UNDO_OF_AN_UNDO: Steps = [
    ("call", "d/a", "a", 0),
    ("undo", 0),
    ("person", "d/a"),
    ("rewind", 0),  # leaves the person's file, and restores the time of its directory
    ("person", "d/a"),
]


@example(UNDO_OF_AN_UNDO)
@given(st.lists(st.one_of(STEPS), min_size=4, max_size=25))
def test_every_state_equals_the_model_and_nothing_of_the_person_is_lost(steps: Steps) -> None:
    go_through(steps)


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(PARTS))
@given(steps=st.lists(st.one_of(*STEPS, KILLS, KILLS), min_size=4, max_size=25))
def test_so_it_is_when_processes_are_killed(part: int, steps: Steps) -> None:
    go_through(steps)


def go_through(steps: Steps) -> None:
    with tempfile.TemporaryDirectory(prefix="wink-test-") as place:
        work = Work(Path(place))
        with contextlib.closing(work):
            work.branch("x", 1)
            for method, *arguments in steps:
                getattr(work, str(method))(*arguments)
                work.check()
            work.check_past()
            work.check_person()
