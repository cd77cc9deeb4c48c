"""Random histories of the engine, told as operations: both must say the same of them.

The directory is looked at with ``os`` alone, before and after everything that happens. What differs
is an operation. Looking up a past state, undoing a call and merging a branch by the functions over
operations must then lead to what the engine does in the directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import Files, Manifests, Present, applied, changes_between, with_groups

from chance import THOROUGH
from weakincentives.errors import FilesystemError, MergeConflict, UndoRefused
from weakincentives.filesystem import Filesystem, HostFilesystem, WorkspaceHistory
from weakincentives.filesystem.contents import Contents
from weakincentives.log import (
    Entry,
    Log,
    Operation,
    Parts,
    conflicts,
    inverted,
    merge,
    state_at,
)
from weakincentives.log.operation import OperationKind

# In `make torture` 10,000 histories, in parts that run at once.
PARTS = 10 if THOROUGH else 1

FILES = ("a", "b", "d/a", "d/b", "d/in/c", "e/a")
DIRECTORIES = ("d", "d/in", "e", "f")
NAMES = (*FILES, *DIRECTORIES)

Steps = list[tuple[Any, ...]]


def parts_of(path: str) -> Parts:
    return tuple(path.split("/"))


def look(root: Path) -> Files:
    """Return what is below a directory."""
    found: Files = {}
    for directory, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(directory, name)
            found[path.relative_to(root).parts] = _entry(path)
    return with_groups(found)


def _entry(path: Path) -> Entry:
    status = path.lstat()
    mode, times = stat.S_IMODE(status.st_mode), status.st_mtime_ns
    if stat.S_ISLNK(status.st_mode):
        return Entry("link", 0o777, mtime_ns=times, content=os.readlink(path))
    if stat.S_ISDIR(status.st_mode):
        return Entry("directory", mode, mtime_ns=times)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    group = status.st_ino if status.st_nlink > 1 else 0
    size = status.st_size
    return Entry("file", mode, mtime_ns=times, size=size, content=digest, group=group)


def _known(files: Files, contents: Contents) -> Files:
    """Return a tree with the digests of what is kept unhashed."""
    return {
        path: each._replace(content=hashlib.sha256(contents.read(each.content)).hexdigest())
        if each.kind == "file" and each.content.startswith("@")
        else each._replace(content="" if each.is_directory else each.content)
        for path, each in files.items()
    }


Plain = dict[Parts, tuple[str, int, str]]
"""Kind, mode and content by path: what an undo must restore, and what conflicts are about."""


def plain(files: Files) -> Plain:
    return {
        path: (each.kind, each.mode, "" if each.is_directory else each.content)
        for path, each in files.items()
    }


def differing(one: Plain, other: Plain) -> set[Parts]:
    return {path for path in {*one, *other} if one.get(path) != other.get(path)}


def is_related(path: Parts, others: Iterable[Parts]) -> bool:
    return any(path[: len(each)] == each[: len(path)] for each in others)


class Work:
    """A workspace under the engine, and its history as operations."""

    def __init__(self, place: Path) -> None:
        self.root = place / "work"
        self.count = 0
        for path in FILES[:5]:
            self._put(path, f"{path} at first\n")
        self.manifests = Manifests()
        self.operations: list[Operation] = []
        self.states: list[Files] = [look(self.root)]
        self.moves: list[tuple[Parts, Parts]] = []
        self.serials: dict[int, int] = {}
        """The number of each call in the engine's history, by the number of its operation."""
        self.fs = HostFilesystem(self.root)

    def close(self) -> None:
        self.fs.close()

    def _put(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def text(self, who: str) -> str:
        self.count += 1
        return f"{who} wrote text {self.count}.\n"

    def note(self, kind: OperationKind) -> bool:
        """Append what has changed since the last operation; tells whether something has."""
        files, whole = look(self.root), len(self.operations) % 2 == 0
        changes = tuple(changes_between(self.states[-1], files, self.manifests, whole=whole))
        if not changes:
            return False
        number = len(self.operations) + 1
        self.operations.append(
            Operation(id=f"{number}", number=number, parent=number - 1, kind=kind, changes=changes)
        )
        self.states.append(files)
        return True

    def at(self, number: int, path: Parts) -> Entry | None:
        """Look a past state up."""
        line, later = self.operations[:number][::-1], self.operations[number:]
        known = state_at(path, line, later, self.manifests)
        return self.states[-1].get(path) if known is None else known.entry

    # Calls

    def call(self, how: str, *changes: tuple[str, ...]) -> None:
        self.note("edit")
        before = len(self.fs.history())
        moves = [change for change in changes if change[0] == "move"]
        self.moves += [(parts_of(origin), parts_of(target)) for _, origin, target in moves]
        view = self.fs.fork_in_place()
        if how == "api":
            for change in changes:
                with contextlib.suppress(FilesystemError):
                    self.change(view, *change)
        else:
            view.run("; ".join(f"( {self._command(*change)} ) 2>/dev/null" for change in changes))
        self.fs.merge(view)
        self._note_commit("call", before)

    def _note_commit(self, kind: OperationKind, before: int) -> None:
        # The engine also commits what leaves nothing but another inode.
        files = self.states[-1]
        if self.note(kind) and len(self.fs.history()) > before:
            self.serials[len(self.operations)] = self.fs.history()[-1].serial
            self._check_log(files, self.states[-1])

    def _check_log(self, before: Files, after: Files) -> None:
        """The operation in the log leads from what was there before a call to what is there now."""
        with contextlib.closing(Log(self.fs.store / "log.db")) as log:
            contents = Contents(self.fs.store, log)
            operation = log.read(log.head())
            assert log.head() == self.fs.history()[-1].serial
            for changes, old, new in (
                (operation.changes, before, after),
                (inverted(operation.changes), after, before),
            ):
                known = _known(applied(changes, old, contents.manifest), contents)
                for path in {*known, *new} - {()}:
                    entry, expected = known.get(path), plain(new).get(path)
                    assert entry is not None, (path, operation)
                    assert expected is not None, (path, operation)
                    content = entry.content or expected[2]  # not known: it was only moved
                    assert (entry.kind, entry.mode, content) == expected, (path, operation)

    def change(self, view: HostFilesystem, kind: str, path: str, other: str = "") -> None:
        match kind:
            case "write":
                view.write(path, self.text("an agent"))
            case "delete":
                view.delete(path, recursive=True)
            case "move":
                view.move(path, other, overwrite=True)
            case "copy":
                view.copy(path, other, overwrite=True)
            case "mkdir":
                view.mkdir(path)
            case _:
                view.set_readonly(path)

    def _command(self, kind: str, path: str, other: str = "") -> str:
        text = self.text("an agent").strip()
        return {
            "write": f"mkdir -p $(dirname {path}); echo '{text}' >.new && mv -T .new {path}",
            "delete": f"rm -rf {path}",
            "move": f"mkdir -p $(dirname {other}); mv -T {path} {other}",
            "copy": f"rm -rf {other}; cp -r {path} {other}",
            "mkdir": f"mkdir -p {path}",
            "mode": f"chmod go-rwx {path}",
        }[kind]

    # A person

    def person(self, kind: str, path: str) -> None:
        place = self.root / path
        with contextlib.suppress(OSError):
            match kind:
                case "write":
                    self._put(path, self.text("a person"))
                case "touch":
                    os.utime(place, (1, 1))
                case "delete":
                    place.rmdir() if place.is_dir() else place.unlink()
                case "mkdir":
                    place.mkdir(parents=True)
                case _:
                    place.chmod(0o700)

    # Undoing

    def undo(self, number: int) -> None:
        """Undo a call as the engine does, and compare with what the functions say."""
        self.note("edit")
        if not self.serials:
            return
        number = sorted(self.serials)[number % len(self.serials)]
        changes, now = self.operations[number - 1].changes, self.states[-1]
        found = conflicts(changes, Present(now), self.manifests)
        calls = [call for call in self.fs.history() if call.serial == self.serials[number]]
        before, told = len(self.fs.history()), ()
        try:
            told = self.fs.undo(*calls)
        except UndoRefused as error:
            refused = error.paths
        else:
            refused = {}
        if refused:
            # The engine also asks about paths where a call changed something for a moment only.
            ours = {"/".join(change.path) for change in changes}
            assert found or ours.isdisjoint(refused), refused
            assert plain(look(self.root)) == plain(now)
            return
        after = look(self.root)
        if not found:
            assert told == ()
            expected = applied(inverted(changes), now, self.manifests)
            assert plain(after) == plain(expected)
        else:  # around what was put into a directory that the call removed or moved
            expected, around = self.states[number - 1], set(found)
            self._include_moved(around)
            for path in differing(plain(after), plain(expected)) & {c.path for c in changes}:
                assert is_related(path, around), (path, found, told)
        self._note_commit("undo", before)

    # Looking back

    def look_back(self) -> None:
        self.note("edit")
        paths = {path for files in self.states for path in files}
        for number, files in enumerate(self.states):
            assert {
                path: (entry.kind, entry.mode, "" if entry.is_directory else entry.content)
                for path in paths
                if (entry := self.at(number, path)) is not None
            } == plain(files)
        history = WorkspaceHistory(self.root)
        edits = (each.changes for each in self.operations if each.kind == "edit")
        edited = {change.path for changes in edits for change in changes}
        self._include_moved(edited)
        for number, serial in self.serials.items():
            shown = contents(history.files_at(serial))
            expected = {"/".join(p): each for p, each in self._texts(self.states[number]).items()}
            differ = {path for path in {*shown, *expected} if shown.get(path) != expected.get(path)}
            # The engine does not know when a person changed something, nor what a moved file was
            # before that; an operation does.
            assert all(is_related(parts_of(path), edited) for path in differ)

    def _include_moved(self, paths: set[Parts]) -> None:
        """Add where the files at some paths were, or went to, by a move or its undo."""
        for _ in self.moves:
            for moved in self.moves:
                if any(is_related(path, paths) for path in moved):
                    paths.update(moved)

    def _texts(self, files: Files) -> dict[Parts, str]:
        return {path: each.content for path, each in files.items() if each.kind == "file"}


def contents(fs: Filesystem) -> dict[str, str]:
    """Return the digest of each file."""
    found: dict[str, str] = {}
    pending = ["."]
    while pending:
        for each in fs.list(pending.pop()):
            if each.kind == "directory":
                pending.append(each.path)
            elif each.kind == "file":
                found[each.path] = hashlib.sha256(fs.read_bytes(each.path)).hexdigest()
    return found


# Branches


def tree_of(fs: Filesystem) -> Files:
    """Return what a branch shows; its API has no modes."""
    found: Files = {}
    pending = ["."]
    while pending:
        for each in fs.list(pending.pop()):
            if each.kind == "directory":
                pending.append(each.path)
                found[parts_of(each.path)] = Entry("directory")
            else:
                digest = hashlib.sha256(fs.read_bytes(each.path)).hexdigest()
                found[parts_of(each.path)] = Entry("file", content=digest)
    return found


def merge_beside(ours: Steps, theirs: Steps, *, whole: bool) -> None:
    """Change a workspace and a branch of it, and merge by the engine and by the functions."""
    with tempfile.TemporaryDirectory(prefix="wink-test-") as directory:
        work = Work(Path(directory))
        with contextlib.closing(work), contextlib.closing(work.fs.branch("b")) as branch:
            base = tree_of(branch)
            for fs, steps in ((work.fs, ours), (branch, theirs)):
                for change in steps:
                    with contextlib.suppress(FilesystemError):
                        work.change(fs, *change)
            sides = [
                tuple(changes_between(base, tree_of(fs), work.manifests, whole=whole))
                for fs in (work.fs, branch)
            ]
            merged = merge(sides[0], sides[1], work.manifests)
            expected = applied(merged.changes, tree_of(work.fs), work.manifests)
            before = look(work.root)
            try:
                branch.merge_into(work.fs)
            except MergeConflict:
                assert merged.conflicts
                assert look(work.root) == before
            else:
                assert not merged.conflicts
                assert plain(tree_of(work.fs)) == plain(expected)


file, directory, name = map(st.sampled_from, (FILES, DIRECTORIES, NAMES))
CHANGES = st.one_of(
    st.tuples(st.just("write"), file),
    st.tuples(st.just("delete"), name),
    st.tuples(st.just("move"), name, name),
    st.tuples(st.just("move"), directory, directory),
    st.tuples(st.just("copy"), name, name),
    st.tuples(st.just("mkdir"), directory),
    st.tuples(st.just("mode"), file),
)
KINDS = st.sampled_from(["write", "touch", "delete", "mkdir", "mode"])
STEPS = st.one_of(
    st.tuples(
        st.just("call"),
        st.sampled_from(["api", "api", "command"]),
        st.lists(CHANGES, min_size=1, max_size=3),
    ).map(lambda step: (*step[:2], *step[2])),
    st.tuples(st.just("person"), KINDS, name),
    st.tuples(st.just("undo"), st.integers(0, 4)),
)


@settings(max_examples=max(10, settings.default.max_examples // 3))
@given(steps=st.lists(STEPS, min_size=2, max_size=9))
def test_past_states_and_undos_are_those_of_the_engine(steps: Steps) -> None:
    go_through(steps)


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(PARTS))
@given(steps=st.lists(STEPS, min_size=4, max_size=16))
def test_so_it_is_in_long_histories(part: int, steps: Steps) -> None:
    go_through(steps)


# On a branch, to make a directory that exists is a step of its own, which a merge repeats.
SIDE = st.lists(CHANGES.filter(lambda change: change[0] not in ("mkdir", "mode")), max_size=4)


@settings(max_examples=max(10, settings.default.max_examples // 3))
@given(ours=SIDE, theirs=SIDE, whole=st.booleans())
def test_merges_are_those_of_the_engine(ours: Steps, theirs: Steps, whole: bool) -> None:
    merge_beside(ours, theirs, whole=whole)


def go_through(steps: Steps) -> None:
    with tempfile.TemporaryDirectory(prefix="wink-test-") as directory:
        work = Work(Path(directory))
        with contextlib.closing(work):
            for method, *arguments in steps:
                getattr(work, str(method))(*arguments)
            work.look_back()
