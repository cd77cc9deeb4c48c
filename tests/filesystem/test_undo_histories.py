"""Random histories of calls, of undos, and of a person who edits in between.

The model is what was there before and after each entry of the history, and which paths the person
changed since. Going back over the newest entries must restore every path that the person has not
touched, leave what the person has made, and name every path that is not as it was.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trees import look, put

from chance import THOROUGH
from weakincentives.core.call import ToolCall
from weakincentives.errors import FilesystemError, UndoRefused
from weakincentives.filesystem import HostFilesystem, WorkspaceHistory

# In `make torture` 10,000 histories, in parts that run at once.
PARTS = 10 if THOROUGH else 1
PLACES = {"disk": None, "tmpfs": "/dev/shm"}

FILES = ("a", "b", "d/a", "d/b", "d/in/c", "e/a", "e/in/c")
DIRECTORIES = ("d", "d/in", "e", "e/in", "f")
NAMES = (*FILES, *DIRECTORIES)

Steps = list[tuple[Any, ...]]


class Found(NamedTuple):
    """What counts of a path: an undo restores this, and others change it."""

    kind: str
    mode: int
    content: bytes | str | None


State = dict[str, Found]


@dataclass
class Entry:
    """An entry of the history."""

    id: str
    before: State
    after: State
    linked: set[frozenset[str]]
    """The names that were one file before."""
    moves: tuple[tuple[str, str], ...] = ()
    """What it moved as a whole: what someone does to that is done to the original."""
    touched: set[str] = field(default_factory=set[str])
    """What the person has changed since, up to the next entry."""
    edited: bool = False
    """Whether the person has done anything since, up to the next entry."""
    has_new_files: bool = False
    """Whether a rollback since has made a file anew: limits of links: docs/guarantees.md."""


def related(path: str, others: Iterable[str]) -> bool:
    return any(
        path == each or path.startswith(f"{each}/") or each.startswith(f"{path}/")
        for each in others
    )


def is_below(path: str, others: Iterable[str]) -> bool:
    return any(path.startswith(f"{each}/") for each in others)


def is_at(path: str, others: tuple[str, ...]) -> bool:
    return path in others or is_below(path, others)


def differing(one: State, other: State) -> set[str]:
    return {path for path in {*one, *other} if one.get(path) != other.get(path)}


class Work:
    """A workspace, its history and a model of it."""

    def __init__(self, place: Path) -> None:
        self.root = place / "work"
        self.numbers = itertools.count()
        for path in FILES[:5]:
            put(self.root / path, f"{path} at first\n")
        os.link(self.root / "b", self.root / "d/b2")
        (self.root / "e").mkdir()
        self.entries: list[Entry] = []
        self.renewed: set[str] = set()
        """The directories that a rollback has made anew."""
        self.fs = HostFilesystem(self.root)

    def close(self) -> None:
        self.fs.close()

    def reopen(self) -> None:
        self.fs.close()
        self.fs = HostFilesystem(self.root)
        assert not self.fs.recovered

    def state(self) -> State:
        return {
            path: Found(seen.kind, 0 if seen.kind == "symlink" else seen.mode, seen.content)
            for path, seen in look(self.root).items()
        }

    def linked(self) -> set[frozenset[str]]:
        found = (seen for seen in look(self.root).values() if seen.kind == "file")
        return {seen.names for seen in found if len(seen.names) > 1}

    def inodes(self) -> dict[str, int]:
        return {path: (self.root / path).lstat().st_ino for path in self.state()}

    def text(self, who: str) -> str:
        return f"{who} wrote text {next(self.numbers)}.\n"

    # Calls

    def call(self, how: str, *changes: tuple[str, ...]) -> None:
        before, linked = self.state(), self.linked()
        view = self._began()
        moves = self._make(view, how, changes)
        self.fs.merge(view)
        self._note(before, linked, moves)

    def failed_call(self, how: str, *changes: tuple[str, ...]) -> None:
        before, linked, inodes = self.state(), self.linked(), self.inodes()
        view = self._began()
        self._make(view, how, changes)
        assert self.fs.discard(view) == ()
        assert (self.state(), self.linked()) == (before, linked)
        renewed = {path for path, inode in self.inodes().items() if inodes[path] != inode}
        if self.entries and renewed:
            self.entries[-1].has_new_files = True
        self.renewed |= {path for path in renewed if before[path].kind == "directory"}

    def _began(self) -> HostFilesystem:
        view = self.fs.fork_in_place()
        view.call = ToolCall("edit", {}, f"c{next(self.numbers)}")
        return view

    def _make(
        self, view: HostFilesystem, how: str, changes: Iterable[tuple[str, ...]]
    ) -> tuple[tuple[str, str], ...]:
        if how == "api":
            moves: list[tuple[str, str]] = []
            for change in changes:
                with contextlib.suppress(FilesystemError):
                    self._by_api(view, *change)
                    if change[0] == "move":
                        moves.append((change[1], change[2]))
            return tuple(moves)
        script = "; ".join(f"( {self._command(*change)} ) 2>/dev/null" for change in changes)
        if how == "command":
            view.run(["sh", "-c", f"{script}; true"])
        else:
            view.expect_external()
            subprocess.run(["sh", "-c", f"{script}; true"], cwd=self.root, check=True)
        return ()

    def _by_api(self, view: HostFilesystem, kind: str, path: str, other: str = "") -> None:
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
            case "mode":
                view.set_readonly(path)
            case _:
                view.append(path, self.text("an agent"))

    def _command(self, kind: str, path: str, other: str = "") -> str:
        text = f"printf '%s\\n' '{self.text('an agent').strip()}'"
        return {
            "write": f'mkdir -p "$(dirname {path})"; {text} > {path}.new && mv -T {path}.new {path}'
            f" || rm -f {path}.new",
            "delete": f"rm -rf {path}",
            "move": f'mkdir -p "$(dirname {other})"; mv -T {path} {other}',
            "copy": f"rm -rf {other}; cp -r {path} {other}",
            "mkdir": f"mkdir -p {path}",
            "mode": f"chmod go-rwx {path}",
            "link": f"ln -f {path} {other}",
            "symlink": f"ln -sfn {path} {other}",
            "append": f"{text} >> {path}",
        }[kind]

    def _note(
        self, before: State, linked: set[frozenset[str]], moves: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Note what was committed, if anything was."""
        made = self.fs.history()[len(self.entries) :]
        after = self.state()
        assert len(made) <= 1
        assert made or before == after
        for each in made:
            self.entries.append(Entry(each.call_id, before, after, linked, moves))

    # A person, who knows nothing of us

    def person(self, kind: str, path: str, other: str = "") -> None:
        before = self.state()
        self._wait_for_another_time()
        with contextlib.suppress(OSError, shutil.Error):
            self._edit(kind, self.root / path, self.root / other)
        if self.entries:
            self.entries[-1].touched |= differing(before, self.state())
            self.entries[-1].edited = True

    def _wait_for_another_time(self) -> None:
        """Wait until files get other times than those of the last call."""
        clock = self.root.with_name("clock")
        clock.touch()
        last = clock.stat().st_mtime_ns
        while clock.stat().st_mtime_ns <= last:
            os.utime(clock)

    def _edit(self, kind: str, path: Path, other: Path) -> None:
        match kind:
            case "write":
                put(path, self.text("a person"))
            case "same bytes":
                data, mode = path.read_bytes(), path.stat().st_mode
                path.unlink()
                path.write_bytes(data)
                path.chmod(mode & 0o7777)
            case "same directory":
                copy = self.root.with_name("copy")
                shutil.copytree(path, copy, symlinks=True)
                shutil.rmtree(path)
                shutil.move(copy, path)
            case "touch":
                os.utime(path, (1, 1))
            case "delete":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            case "mkdir":
                path.mkdir(parents=True)
            case "move":
                path.rename(other)
            case _:
                path.chmod(0o700)

    # Going back

    def undo(self, count: int, way: str) -> None:
        """Undo the newest entries."""
        undone = self.entries[len(self.entries) - 1 - count % max(1, len(self.entries)) :]
        if not undone or (way == "revert" and len(undone) == len(self.entries)):
            return
        now, linked, expected = self.state(), self.linked(), undone[0].before
        touched, edited = self._touched_since(undone), any(each.edited for each in undone)
        ids, told = [each.id for each in undone], ()
        try:
            if way == "revert":
                told = self.fs.revert_to(self.entries[-1 - len(undone)].id)
            else:
                told = self.fs.undo(*ids, force=way == "force", leave_edits=way == "rewind")
        except UndoRefused as error:
            refused = error.paths
        else:
            refused = {}
        if refused:
            assert way == "undo"
            assert self.state() == now
            assert all(related(path, touched) for path in refused), (refused, touched)
            return
        after = self.state()
        self._note(now, linked, tuple(two[::-1] for each in undone for two in each.moves[::-1]))
        if way == "force":
            self._check_forced(now)
            return
        changed = {
            path
            for place, each in enumerate(undone)
            for path in differing(each.before, each.after) & self._touched_since(undone[place:])
        }
        moved = {origin for each in undone for origin, _ in each.moves}
        touched |= _stayed(undone, touched, after)
        seen = after
        for two in self._not_recognized(undone, touched):
            if any(sentence.startswith(f"{two[0]} could not be restored") for sentence in told):
                expected = {path: each for path, each in expected.items() if not is_at(path, two)}
                seen = {path: each for path, each in seen.items() if not is_at(path, two)}
        self._check(seen, expected, changed, touched, moved, told)
        edits = {path for each in undone for path in each.touched} & now.keys()
        mine = {line for path in edits if _is_persons(now[path]) for line in _first_line(now[path])}
        kept = {line for found in after.values() for line in _first_line(found)}
        assert mine <= kept, "an edit is lost"
        # For several entries, see the limits in docs/guarantees.md.
        if not edited and len(undone) == 1 and not undone[0].has_new_files:
            assert self.linked() == undone[0].linked, (self.linked(), undone[0].linked)

    def _not_recognized(self, undone: list[Entry], touched: set[str]) -> set[tuple[str, str]]:
        """Return the moves of directories that nothing identifies any more.

        A rollback has made them anew, and the person has changed what is in them.
        """
        moves = {two for entry in undone for two in entry.moves}
        return {
            two
            for two in moves
            if two[1] in self.renewed and any(is_below(path, two) for path in touched)
        }

    def _touched_since(self, undone: list[Entry]) -> set[str]:
        """Return what the person has changed, by each path that it had before a move."""
        found: set[str] = set()
        for entry in reversed(undone):
            found |= entry.touched
            for origin, path in reversed(entry.moves):
                below = {each for each in found if each == path or each.startswith(f"{path}/")}
                found |= {f"{origin}{each.removeprefix(path)}" for each in below}
        return found

    def _check(
        self,
        after: State,
        expected: State,
        changed: set[str],
        touched: set[str],
        moved: set[str],
        told: tuple[str, ...],
    ) -> None:
        """What is not as it was is the person's, or in its way.

        It is named if the person changed it after a call had done so, unless it came back with a
        directory that had been moved.
        """
        for path in sorted(differing(after, expected)):
            causes = [each for each in touched if _is_cause(each, path, after)]
            assert causes, f"{path} should be {expected.get(path)}, is {after.get(path)}; {told}"
            if path in changed and path in expected and not is_below(path, moved):
                names = [path, *causes]
                assert any(each in sentence for each in names for sentence in told), (path, told)
        if not touched:
            assert told == (), told

    def _check_forced(self, now: State) -> None:
        """What was replaced comes back when that is undone."""
        after, linked = self.state(), self.linked()
        if after != now:
            forced = self.entries[-1]
            assert self.fs.undo(forced.id) == ()
            assert self.state() == now
            self._note(after, linked, tuple(two[::-1] for two in forced.moves[::-1]))

    def undo_one(self, number: int) -> None:
        """Undo one entry; the later ones stay."""
        if not self.entries:
            return
        place = number % len(self.entries)
        entry, later = self.entries[place], self.entries[place + 1 :]
        now, linked = self.state(), self.linked()
        changed = differing(entry.before, entry.after)
        others = self._touched_since(self.entries[place:])
        for each in later:
            others |= differing(each.before, each.after)
            others |= {path for two in each.moves for path in two}
        # What a call changed for a moment, or only in its links, is not seen here.
        listed = set(self.fs.history()[place].paths)
        is_free = not any(related(path, others) for path in changed | listed)
        is_free = is_free and not any(each.moves for each in later)
        try:
            told = self.fs.undo(entry.id)
        except UndoRefused:
            assert not is_free
            assert self.state() == now
            return
        after = self.state()
        self._note(now, linked, tuple(two[::-1] for two in entry.moves[::-1]))
        if is_free and not any(each.id == entry.id for each in later):
            assert told == (), told
            for path in {*now, *after}:
                expected = entry.before if path in changed else now
                assert after.get(path) == expected.get(path), path

    def redo(self) -> None:
        """Undo the newest entry twice: that changes nothing."""
        if not self.entries or self.entries[-1].edited or self.entries[-1].has_new_files:
            return
        now, linked = self.state(), self.linked()
        self.undo(0, "undo")
        if len(self.entries) and self.state() != now:
            self.undo(0, "undo")
            assert (self.state(), self.linked()) == (now, linked)

    def look_back(self) -> None:
        """Only looking never fails, and says the same as an undo."""
        history = WorkspaceHistory(self.root)
        if not any(each.touched for each in self.entries[-1:]):
            assert history.changed_since(history.calls()[-1:]) == {}
        list(history.changes())


def _is_cause(touched: str, path: str, after: State) -> bool:
    """Whether what a person did at one path explains that another is not as it was."""
    there = after.get(touched)
    if path.startswith(f"{touched}/"):
        return there is not None and there.kind != "directory"
    return path == touched or (touched.startswith(f"{path}/") and there is not None)


def _stayed(undone: list[Entry], touched: set[str], after: State) -> set[str]:
    """Return what cannot be moved back: the person has made something where it was.

    It gives way to what the move had replaced.
    """
    found: set[str] = set()
    for entry in undone:
        for origin, path in entry.moves:
            if path in entry.before:
                continue
            for each in touched:
                if f"{each}/".startswith(f"{origin}/"):
                    here = f"{path}{each.removeprefix(origin)}"
                    found.add(here)
                    if each in after and after[each].kind != "directory":
                        found |= {inner for inner in after if inner.startswith(f"{here}/")}
    return found


def _first_line(found: Found) -> list[bytes]:
    """Return who wrote a file: an agent may have appended to what a person wrote."""
    return found.content.splitlines()[:1] if isinstance(found.content, bytes) else []


def _is_persons(found: Found) -> bool:
    return isinstance(found.content, bytes) and found.content.startswith(b"a person")


file, directory = st.sampled_from(FILES), st.sampled_from(DIRECTORIES)
name = st.sampled_from(NAMES)
CHANGES = st.one_of(
    st.tuples(st.just("write"), file),
    st.tuples(st.just("append"), file),
    st.tuples(st.just("delete"), name),
    st.tuples(st.just("delete"), directory),
    st.tuples(st.just("move"), name, name),
    st.tuples(st.just("move"), directory, directory),
    st.tuples(st.just("copy"), name, name),
    st.tuples(st.just("mkdir"), directory),
    st.tuples(st.just("mode"), file),
)
LINKS = st.one_of(
    st.tuples(st.just("link"), file, file),
    st.tuples(st.just("symlink"), st.sampled_from(["a", "d", "nowhere"]), name),
)
HOW = st.sampled_from(["api", "command", "program"])
EDITS = st.one_of(
    st.tuples(st.just("write"), name),
    st.tuples(st.just("write"), file),
    st.tuples(st.just("same bytes"), file),
    st.tuples(st.just("same directory"), directory),
    st.tuples(st.just("touch"), name),
    st.tuples(st.just("delete"), name),
    st.tuples(st.just("mkdir"), directory),
    st.tuples(st.just("move"), name, name),
    st.tuples(st.just("mode"), name),
)


WAYS = st.sampled_from(["undo", "rewind", "revert", "force"])
KINDS = (
    *["call"] * 8,
    *["person"] * 5,
    *["undo"] * 5,
    *["undo_one", "redo"] * 2,
    *["failed_call", "look_back", "reopen"],
)


@st.composite
def steps_of(draw: st.DrawFn) -> tuple[Any, ...]:
    kind = draw(st.sampled_from(KINDS))
    match kind:
        case "call" | "failed_call":
            how = draw(HOW)
            changes = CHANGES if how == "api" else st.one_of(CHANGES, LINKS)
            return (kind, how, *draw(st.lists(changes, min_size=1, max_size=3)))
        case "person":
            return (kind, *draw(EDITS))
        case "undo":
            return kind, draw(st.integers(0, 3)), draw(WAYS)
        case "undo_one":
            return kind, draw(st.integers(0, 5))
        case _:
            return (kind,)


HISTORIES = st.lists(steps_of(), min_size=4, max_size=14).map(lambda steps: [FIRST, *steps])
FIRST = ("call", "command", ("write", "e/in/c"))
"""So that the first random call can be undone in every way."""


# What random histories have found.
A_LINKED_FILE_MOVED_OVER_ANOTHER = [
    FIRST,
    ("call", "program", ("move", "b", "a")),
    ("undo", 0, "undo"),
]
A_DIRECTORY_DISPLACED_IN_ITS_OWN_CALL = [
    FIRST,
    ("call", "api", ("move", "d/in", "e")),
    ("undo", 0, "undo"),
    ("call", "program", ("mode", "e/in/c")),
    ("undo", 2, "rewind"),
    ("undo", 2, "revert"),
    ("undo", 0, "rewind"),
]
A_DIRECTORY_REPLACED_TWICE_IN_A_CALL = [
    FIRST,
    ("call", "api", ("move", "e/in", "d"), ("append", "e/in/c"), ("move", "e/in", "d")),
    ("undo_one", 1),
    ("undo", 0, "undo"),
]
A_NAME_REPLACED_AFTER_AN_EDIT_THROUGH_ANOTHER = [
    FIRST,
    ("call", "api", ("copy", "d/a", "b")),
    ("call", "command", ("link", "b", "a")),
    ("call", "program", ("mode", "a")),
    ("undo", 2, "revert"),
    ("undo", 3, "rewind"),
    ("undo", 2, "revert"),
]
A_DIRECTORY_RESTORED_INTO_ONE_THAT_ARRIVED = [
    FIRST,
    ("call", "api", ("delete", "d/in")),
    ("undo_one", 1),
    ("call", "api", ("delete", "d")),
    ("undo", 1, "force"),
]
OTHER_PERMISSIONS_OF_A_DIRECTORY_THAT_CAME_BACK = [
    ("call", "command", ("copy", "d", "e/a")),
    ("undo", 0, "force"),
    ("call", "command", ("write", "d/in/c")),
    ("undo", 2, "rewind"),
    ("person", "mode", "e/a"),
    ("undo", 1, "revert"),
]
A_DIRECTORY_MADE_WHERE_ONE_CAME_AND_WENT = [
    FIRST,
    ("undo_one", 0),
    ("undo", 3, "rewind"),
    ("redo",),
    ("call", "command", ("copy", "d", "e/a")),
    ("person", "mkdir", "e/in"),
    ("undo", 2, "rewind"),
]
AN_EDIT_WHERE_A_DIRECTORY_CAME_AND_WENT = [
    FIRST,
    ("call", "api", ("mode", "b")),
    ("undo_one", 0),
    ("undo", 1, "force"),
    ("person", "write", "e/in/c"),
    ("undo", 2, "undo"),
]
A_DIRECTORY_MADE_AGAIN = [
    FIRST,
    ("call", "api", ("write", "a")),
    ("person", "same directory", "e"),
    ("undo", 1, "undo"),
]


A_LINKED_FILE_EDITED_IN_A_DIRECTORY_THAT_CAME_BACK_TWICE = [
    FIRST,
    ("call", "api", ("delete", "d")),
    ("undo", 0, "undo"),
    ("call", "api", ("delete", "d")),
    ("undo", 2, "undo"),
    ("person", "write", "b"),
    ("undo", 0, "undo"),
]


FILES_MADE_WHERE_A_MOVED_DIRECTORY_WAS = [
    FIRST,
    ("call", "api", ("move", "e", "d")),
    ("person", "write", "e/in/c"),
    ("undo", 0, "undo"),
]
A_FILE_MADE_WHERE_A_DIRECTORY_WAS_MOVED_AWAY = [
    FIRST,
    ("call", "api", ("move", "d/in", "f")),
    ("person", "write", "d/in/c"),
    ("undo", 0, "rewind"),
]
EDITS_WHERE_A_DIRECTORY_WAS_AND_WHERE_IT_IS = [
    FIRST,
    ("call", "api", ("move", "d", "e")),
    ("person", "write", "e/in/c"),
    ("person", "write", "d/in/c"),
    ("undo", 0, "revert"),
]
A_FILE_MADE_WHERE_ONE_WAS_MOVED_OVER_ANOTHER = [
    FIRST,
    ("call", "api", ("move", "e/in/c", "b")),
    ("person", "write", "e/in/c"),
    ("undo", 0, "revert"),
]
A_DIRECTORY_THAT_CAME_WAS_MOVED_AND_CAME_AGAIN = [
    FIRST,
    ("call", "api", ("move", "e", "d"), ("delete", "d")),
    ("undo", 0, "revert"),
    ("call", "api", ("delete", "d/b")),
    ("call", "api", ("delete", "e")),
    ("call", "api", ("mkdir", "e/in")),
    ("undo", 3, "undo"),
    ("undo", 0, "revert"),
    ("person", "write", "b"),
    ("undo", 0, "revert"),
]
A_FILE_THAT_CAME_BACK_BESIDE_AN_EDIT_AND_GOES_AGAIN = [
    FIRST,
    ("call", "api", ("mkdir", "d/in"), ("move", "e", "d"), ("delete", "d")),
    ("undo", 2, "revert"),
    ("call", "program", ("move", "d", "e"), ("delete", "d/b")),
    ("call", "command", ("delete", "e")),
    ("call", "api", ("mkdir", "e/in"), ("mode", "b"), ("copy", "d/in", "d/in/c")),
    ("undo", 3, "undo"),
    ("undo", 3, "revert"),
    ("person", "write", "b"),
    ("undo", 1, "revert"),
]
AN_EDIT_OF_WHAT_WAS_WRITTEN_AND_MOVED_WITH_ITS_DIRECTORY = [
    FIRST,
    ("call", "api", ("write", "e/in/c"), ("move", "e", "f")),
    ("person", "write", "f/in/c"),
    ("undo", 0, "undo"),
]
A_DIRECTORY_MADE_AGAIN_AROUND_WHAT_CAME_AND_WENT = [
    FIRST,
    ("call", "api", ("delete", "e/in")),
    ("undo", 1, "undo"),
    ("call", "api", ("delete", "e")),
    ("person", "mkdir", "e"),
    ("undo", 1, "rewind"),
]
EDITS_AFTER_A_FORCED_UNDO = [
    FIRST,
    ("call", "api", ("delete", "d")),
    ("undo", 0, "force"),
    ("person", "write", "d/a"),
    ("undo", 1, "rewind"),
]
A_FILE_REPLACED_BY_A_DIRECTORY_BY_FORCE = [
    FIRST,
    ("call", "api", ("delete", "d")),
    ("person", "write", "d"),
    ("undo", 0, "force"),
]
A_FILE_MADE_WHERE_A_DIRECTORY_WAS = [
    FIRST,
    ("call", "api", ("move", "d", "f")),
    ("undo", 0, "revert"),
    ("person", "write", "f"),
    ("call", "api", ("append", "b")),
    ("undo", 1, "rewind"),
]
A_FILE_MADE_WHERE_ONE_WAS_REMOVED_BEFORE_ITS_DIRECTORY = [
    FIRST,
    ("call", "api", ("delete", "d/in/c")),
    ("call", "api", ("delete", "d")),
    ("person", "write", "d/in/c"),
    ("undo", 1, "rewind"),
]


@example(A_FILE_MADE_WHERE_ONE_WAS_REMOVED_BEFORE_ITS_DIRECTORY, "disk")
@example(A_FILE_MADE_WHERE_ONE_WAS_MOVED_OVER_ANOTHER, "tmpfs")
@example(A_FILE_MADE_WHERE_A_DIRECTORY_WAS, "disk")
@example(A_FILE_REPLACED_BY_A_DIRECTORY_BY_FORCE, "tmpfs")
@example(A_DIRECTORY_THAT_CAME_WAS_MOVED_AND_CAME_AGAIN, "tmpfs")
@example(A_FILE_THAT_CAME_BACK_BESIDE_AN_EDIT_AND_GOES_AGAIN, "disk")
@example(AN_EDIT_OF_WHAT_WAS_WRITTEN_AND_MOVED_WITH_ITS_DIRECTORY, "disk")
@example(EDITS_AFTER_A_FORCED_UNDO, "tmpfs")
@example(A_DIRECTORY_MADE_AGAIN_AROUND_WHAT_CAME_AND_WENT, "tmpfs")
@example(FILES_MADE_WHERE_A_MOVED_DIRECTORY_WAS, "tmpfs")
@example(A_FILE_MADE_WHERE_A_DIRECTORY_WAS_MOVED_AWAY, "disk")
@example(EDITS_WHERE_A_DIRECTORY_WAS_AND_WHERE_IT_IS, "tmpfs")
@example(A_LINKED_FILE_EDITED_IN_A_DIRECTORY_THAT_CAME_BACK_TWICE, "disk")
@example(A_LINKED_FILE_MOVED_OVER_ANOTHER, "disk")
@example(A_DIRECTORY_DISPLACED_IN_ITS_OWN_CALL, "disk")
@example(A_DIRECTORY_REPLACED_TWICE_IN_A_CALL, "disk")
@example(A_NAME_REPLACED_AFTER_AN_EDIT_THROUGH_ANOTHER, "tmpfs")
@example(AN_EDIT_WHERE_A_DIRECTORY_CAME_AND_WENT, "tmpfs")
@example(A_DIRECTORY_MADE_AGAIN, "tmpfs")
@example(A_DIRECTORY_RESTORED_INTO_ONE_THAT_ARRIVED, "tmpfs")
@example(OTHER_PERMISSIONS_OF_A_DIRECTORY_THAT_CAME_BACK, "disk")
@example(A_DIRECTORY_MADE_WHERE_ONE_CAME_AND_WENT, "tmpfs")
@settings(max_examples=max(10, settings.default.max_examples // 3), derandomize=True)
@given(steps=HISTORIES, place=st.sampled_from(sorted(PLACES)))
def test_what_no_one_else_has_touched_comes_back_and_the_rest_is_named(
    steps: Steps, place: str
) -> None:
    go_through(steps, place)


FOUND: list[Steps] = [
    [
        ("call", "command", ("write", "e/in/c")),
        ("undo", 2, "force"),
        ("call", "api", ("move", "e", "f")),
        ("call", "api", ("move", "f", "e/in/c")),
        ("undo", 2, "revert"),
        ("undo", 3, "undo"),
    ],
    [("call", "api", ("delete", "e"), ("move", "d", "e/a")), ("redo",)],
    [("call", "api", ("mkdir", "f")), ("call", "api", ("copy", "d/in", "f")), ("undo", 3, "undo")],
    [
        ("call", "command", ("write", "e/in/c")),
        ("call", "api", ("move", "e", "d")),
        ("undo", 3, "rewind"),
        ("undo", 0, "revert"),
        ("call", "command", ("copy", "d/a", "d/in/c")),
        ("undo", 3, "undo"),
    ],
    [
        ("call", "command", ("write", "e/in/c")),
        ("call", "api", ("delete", "d/in"), ("move", "e", "d")),
        ("undo", 1, "rewind"),
    ],
    [("call", "api", ("delete", "e"), ("move", "b", "e/a")), ("redo",)],
    [
        ("call", "command", ("write", "e/in/c")),
        ("call", "api", ("move", "e", "d"), ("delete", "d/in"), ("delete", "d")),
        ("person", "write", "d/a"),
        ("undo", 0, "undo"),
    ],
    [
        ("call", "command", ("mode", "a")),
        ("call", "api", ("move", "d/in", "e/in/c"), ("move", "e/in", "d/in")),
        ("undo", 2, "revert"),
    ],
    [
        ("call", "api", ("move", "d/in", "e/in")),
        ("undo", 2, "force"),
        ("person", "mkdir", "d/in"),
        ("undo", 1, "rewind"),
    ],
    [("call", "api", ("move", "d/in/c", "e/in/c"), ("move", "d", "f")), ("redo",)],
    [
        ("person", "mkdir", "f"),
        ("call", "api", ("move", "f", "d"), ("move", "b", "d/a")),
        ("redo",),
    ],
    [
        ("call", "command", ("write", "e/in/c")),
        ("call", "api", ("move", "e", "d")),
        ("undo", 3, "force"),
        ("undo", 0, "force"),
        ("undo", 3, "undo"),
    ],
    [
        ("call", "api", ("move", "d", "e/in")),
        ("undo", 1, "force"),
        ("call", "api", ("mkdir", "d"), ("delete", "e")),
        ("undo", 3, "undo"),
    ],
    [("call", "api", ("write", "d/in/c"), ("move", "d", "e")), ("undo", 1, "force")],
    [
        ("call", "command", ("write", "e/in/c")),
        ("call", "api", ("move", "e", "d")),
        ("call", "api", ("append", "b")),
        ("undo", 1, "revert"),
        ("person", "delete", "d/in"),
        ("undo", 0, "rewind"),
    ],
    [("call", "api", ("move", "d", "e/in"), ("move", "e/in", "d/in")), ("redo",)],
    [
        ("call", "command", ("write", "e/in/c")),
        ("call", "api", ("delete", "d/in")),
        ("call", "api", ("move", "e", "d")),
        ("undo", 1, "rewind"),
        ("undo", 0, "undo"),
    ],
    [
        ("call", "command", ("write", "e/in/c")),
        ("call", "api", ("write", "b")),
        ("call", "api", ("append", "e/in/c")),
        ("call", "api", ("move", "e", "d/in")),
        ("undo", 2, "revert"),
        ("undo", 0, "revert"),
    ],
    [
        ("call", "command", ("write", "e/in/c")),
        ("call", "api", ("move", "a", "d/b")),
        ("call", "api", ("copy", "d/in", "e")),
        ("call", "command", ("copy", "d/b", "e/in")),
        ("undo", 3, "rewind"),
    ],
    [
        ("call", "api", ("delete", "d")),
        ("redo",),
        ("call", "program", ("move", "d/b", "d/a")),
        ("person", "write", "d/b"),
        ("undo", 1, "rewind"),
        ("undo", 3, "rewind"),
    ],
    [
        ("call", "command", ("write", "e/in/c")),
        ("call", "api", ("move", "d", "e/in")),
        ("person", "mode", "e/in"),
        ("call", "api", ("write", "e/a")),
        ("undo", 1, "revert"),
    ],
    [
        ("call", "command", ("write", "e/in/c")),
        ("undo", 1, "rewind"),
        ("call", "api", ("delete", "d/in")),
        ("undo", 0, "revert"),
        ("undo_one", 3),
        ("undo", 1, "revert"),
        ("person", "mkdir", "d/in"),
        ("undo", 2, "rewind"),
    ],
    [
        ("call", "command", ("write", "e/in/c")),
        ("call", "api", ("delete", "e")),
        ("call", "api", ("append", "e/in/c")),
        ("call", "api", ("move", "e", "d")),
        ("person", "mode", "d"),
        ("undo", 3, "rewind"),
    ],
    [
        ("call", "command", ("write", "e/in/c")),
        ("call", "api", ("delete", "d/in/c")),
        ("call", "program", ("link", "a", "e/in/c")),
        ("call", "command", ("move", "e", "d/in")),
        ("call", "api", ("move", "d/in", "e/in")),
        ("undo", 3, "revert"),
    ],
]
"""What random histories have found since."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("steps", FOUND, ids=map(str, itertools.count()))
def test_what_random_histories_have_found_stays_right(steps: Steps, place: str) -> None:
    go_through(steps, place)


@pytest.mark.heavy
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("part", range(PARTS))
@settings(max_examples=settings.default.max_examples // 2)
@given(steps=HISTORIES)
def test_so_it_is_after_many_histories(part: int, place: str, steps: Steps) -> None:
    go_through(steps, place)


def go_through(steps: Steps, place: str) -> None:
    above = PLACES[place]
    if above is not None and not os.access(above, os.W_OK):
        above = None
    with tempfile.TemporaryDirectory(prefix="wink-test-", dir=above) as directory:
        work = Work(Path(directory))
        with contextlib.closing(work):
            for method, *arguments in steps:
                getattr(work, str(method))(*arguments)
