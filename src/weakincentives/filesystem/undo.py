"""Show what committed calls changed, and undo them without touching later edits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from weakincentives.core.gc_pause import no_collection
from weakincentives.errors import FilesystemError, LogDamaged, UndoRefused
from weakincentives.filesystem.applied import Application
from weakincentives.filesystem.changes import Changes
from weakincentives.filesystem.diffs import (
    Detail,
    Effort,
    FileChange,
    diff_text,
    file_changes,
)
from weakincentives.filesystem.entry import copy_exactly
from weakincentives.filesystem.history import Committed, History, Past, committed
from weakincentives.filesystem.inverse import Conflict, named, undo_some
from weakincentives.filesystem.layers import (
    Disk,
    Look,
)
from weakincentives.filesystem.paths import Parts, join_path, shown
from weakincentives.filesystem.planned import Plan, Thing
from weakincentives.filesystem.prune import Pruned, to_prune
from weakincentives.filesystem.reserved import Reserved
from weakincentives.filesystem.sides import Backwards, Effects, between
from weakincentives.filesystem.states import DirectoryAt, FilesAt
from weakincentives.filesystem.store import Limits, Note, store_of
from weakincentives.filesystem.tree import Tree
from weakincentives.log import Operation

# Looking

_PATIENCE = 5.0
"""Seconds that a reader waits for a call that is changing files."""


class CallChanges(NamedTuple):
    """A committed call and its changes, file by file."""

    call: Committed
    files: tuple[FileChange, ...]


class WorkspaceHistory:
    """The committed calls of a directory that can be undone.

    It takes no lock and changes nothing, so it can be used while an agent runs. Calls that are
    trimmed meanwhile are skipped.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, store: str | os.PathLike[str] | None = None
    ) -> None:
        self.store = store_of(root, store)
        Note.read(self.store)  # refuses a store that somebody else has planted
        self._past = Past(self.store)
        self._root = Path(root)
        self._disk = Disk(Tree(self._root))

    def calls(self) -> tuple[Committed, ...]:
        """Return the calls, oldest first."""
        with no_collection():
            return tuple(self._past.calls(self._past.serials()))

    def newest_first(self) -> Iterator[Committed]:
        """Yield the calls that are in the history now, newest first; costs those consumed."""
        self._past.refresh()
        return self._past.calls(self._past.after(0))

    def damaged(self) -> tuple[str, ...]:
        """Return a sentence for each damaged call; the other methods skip these."""
        try:
            lost, damaged = self._past.lacks(), self._past.damaged()
        except LogDamaged as error:
            return (f"{error}. The next change in the directory begins a new log",)
        return (*map(str, damaged.values()), *(() if lost is None else (lost,)))

    def to_prune(self, limits: Limits, *, left_too: bool = False) -> Pruned:
        """Return what ``HostFilesystem.prune`` would remove now; compression is not tried."""
        return to_prune(self._past, limits, left_too=left_too)

    def changes(self, detail: Detail | None = None) -> Iterator[CallChanges]:
        """Yield what each call changed, newest first.

        Later changes by others are never shown: such a file is named instead of diffed. So is a
        file of more than 1 MiB, every path for which ``detail`` returns false, and of a call's
        other paths all but the first thousand.
        """
        past = self._past
        past.refresh()
        if not past.serials():
            return
        backwards = Backwards(self._disk.tree, past.contents)
        for number in past.after(0):
            for operation in past.operations([number])[0]:
                before, after = backwards.step(operation)
                sides = backwards.sides(before), backwards.sides(after)
                effort = Effort(largest=1 << 20, files=1000)
                files = file_changes(sorted(before), *sides, detail=detail, effort=effort)
                yield CallChanges(committed(operation), tuple(files))

    def diff(
        self,
        calls: Iterable[Committed],
        *,
        reverse: bool = False,
        detail: Detail | None = None,
        raw: bool = False,
    ) -> tuple[FileChange, ...]:
        """Return what some calls changed together, ordered by path; or the reverse.

        Paths for which ``detail`` returns false are only named. With ``raw``, lines that are not
        UTF-8 have lone surrogates, to be encoded with ``surrogateescape``; else they are binary.
        """
        serials, effort = {call.serial for call in calls}, Effort(raw=raw)
        self._past.refresh()
        tree = self._disk.tree
        return _changes_of(self._past, serials, tree, reverse=reverse, detail=detail, effort=effort)

    def changed_since(self, calls: Iterable[Committed]) -> dict[str, tuple[str, ...]]:
        """Return the paths that differ from how some calls left them.

        Each has the ids of the later calls that changed it; none means that someone else did.
        """
        serials = {call.serial for call in calls}
        return named(self._conflicts(serials))

    def obstacles(self, calls: Iterable[Committed]) -> dict[str, tuple[str, ...]]:
        """Return those of ``changed_since`` for which undoing these calls is refused."""
        serials = {call.serial for call in calls}
        return named(each for each in self._conflicts(serials) if each.is_obstacle)

    def _conflicts(self, serials: Set[int]) -> list[Conflict]:
        if not serials:
            return []
        self._past.refresh()
        later, _ = self._past.operations(self._past.after(min(serials) - 1))
        return undo_some(Plan(self._disk.tree, self._past.contents), later, serials)[1]

    def files_at(self, serial: int) -> FilesAt:
        """Return the files as they were after a commit; serial 0 is before the first.

        Raises:
            LookupError: The history no longer goes back that far, or is damaged since.
        """
        return FilesAt(self, serial, self.look_at(serial), self._disk.tree)

    def diff_between(
        self, one: int, other: int, *, detail: Detail | None = None
    ) -> tuple[FileChange, ...]:
        """Return what differs after one commit from after another, ordered by path."""
        first, last = sorted((one, other))
        past = self._past
        past.refresh()
        paths: set[Parts] = set()
        for operation in past.readable(each for each in past.serials() if first < each <= last):
            paths.update(each.path for each in Effects(operation, past.contents).all())
        before, after = self.look_at(one), self.look_at(other)
        return tuple(file_changes(sorted(paths), before, after, detail=detail))

    def past(self) -> Past:
        """Return the commits themselves; each has its own memory of what was read."""
        return Past(self.store)

    def look_at(self, serial: int) -> Look:
        """Return the directory as it was after a commit; raises LookupError as ``files_at``."""
        root = self._disk.tree.path
        try:
            disk = Disk(Tree(root))
            look = DirectoryAt(self.store, self._past, disk, serial, patience=_PATIENCE)
        except FilesystemError as error:
            raise LookupError(str(error)) from error
        return Reserved(root, store=self.store).without_hidden(look)


def diff_of(past: Past, serials: Iterable[int], tree: Tree) -> str:
    """Return what some calls changed together, as a patch for ``git apply``."""
    return diff_text(_changes_of(past, set(serials), tree))


def _changes_of(
    past: Past,
    serials: set[int],
    tree: Tree,
    *,
    reverse: bool = False,
    detail: Detail | None = None,
    effort: Effort | None = None,
) -> tuple[FileChange, ...]:
    """Compare before the first and after the last of some calls, at the paths they changed."""
    if not serials:
        return ()
    operations, _ = past.operations(past.after(min(serials) - 1))
    before, after, paths = between(Backwards(tree, past.contents), operations, serials)
    sides = (after, before) if reverse else (before, after)
    return tuple(file_changes(paths, *sides, detail=detail, effort=effort))


# Undoing


def go_back(changes: Changes, history: History, serial: int) -> tuple[str, ...]:
    """Undo everything committed after a serial, within an open transaction.

    Returns a sentence for each path that was left alone.
    """
    later = history.after(serial)
    if not later:
        return ()
    undo = _Undo(changes, history, later)
    undo.plan(later)
    return undo.run()


def undo_calls(
    changes: Changes,
    history: History,
    serials: Sequence[int],
    *,
    force: bool,
    leave_edits: bool = False,
) -> tuple[str, ...]:
    """Undo just these committed calls, within an open transaction.

    Raises UndoRefused on a conflict, unless forced: then later changes are replaced, and saved in
    the history. With ``leave_edits``, a path that no other call has changed since is no conflict:
    it is left alone. So is always what someone put into a directory that a call removed or
    replaced. Returns a sentence for each path that could not be restored.
    """
    undo = _Undo(changes, history, history.after(min(serials) - 1), force=force)
    conflicts = undo.plan(serials)
    if not force:
        obstacles = [each for each in conflicts if each.is_obstacle]
        if leave_edits:
            obstacles = [each for each in obstacles if each.calls]
        if obstacles:
            raise UndoRefused(named(obstacles))
    return undo.run()


class _Undo:
    """Undoes operations: a plan, its application, and what to say about it."""

    def __init__(
        self, changes: Changes, history: History, later: Sequence[int], *, force: bool = False
    ) -> None:
        self._changes = changes
        self._contents = history.contents
        self._plan = Plan(changes.tree, self._contents, force=force)
        self._later, self._sentences = history.operations(later)
        """All operations after the oldest that is undone, newest first."""
        self._wanted: list[Operation] = []

    def plan(self, numbers: Iterable[int]) -> list[Conflict]:
        self._wanted, conflicts = undo_some(self._plan, self._later, set(numbers))
        return conflicts

    def run(self) -> tuple[str, ...]:
        """Change the directory; returns a sentence for each thing that is not as it was."""
        plan = self._plan
        # First what is set aside from the directory itself: it is about to change.
        aside = {
            parts: self._set_aside(parts, thing)
            for parts, thing in plan.left.items()
            if thing.here is not None
        }
        application = Application(self._changes, plan, self._contents, self._later)
        application.run()
        if self._wanted == self._later:  # else later calls have changed directories since
            application.set_times(self._times())
        ids = {each.number: each.call.id for each in self._wanted if each.call is not None}
        self._changes.partly.update(ids[number] for number in plan.partly if number in ids)
        edited = [
            f"{shown(join_path(parts))} was changed by someone else since and is left unchanged"
            f"{aside.get(parts) or self._set_aside(parts, thing)}"
            for parts, thing in plan.left.items()
        ]
        return (*edited, *self._sentences, *plan.sentences, *application.sentences)

    def _times(self) -> dict[Parts, int]:
        """Return the times of directories before the oldest operation, by their paths then."""
        found: dict[Parts, int] = {}
        for operation in self._wanted:
            for change in operation.changes:
                if change.origin is not None and change.after and change.after.is_directory:
                    depth = len(change.path)
                    for path in [p for p in found if p[:depth] == change.path]:
                        found[(*change.origin, *path[depth:])] = found.pop(path)
            found.update(operation.times)
        return found

    def _set_aside(self, parts: Parts, thing: Thing) -> str:
        """Set aside the version that would have been restored; returns where, for the message."""
        if thing.entry is None:
            return ""
        place = self._changes.store.left(parts)
        try:
            with contextlib.closing(Tree(place.parent)) as folder:
                if thing.here is not None:
                    copy_exactly(self._changes.tree, thing.here, folder, (place.name,))
                else:
                    self._contents.make(thing.entry, folder, place.name)
        except OSError:
            return ""
        return f"; the previous version is in {place}"
