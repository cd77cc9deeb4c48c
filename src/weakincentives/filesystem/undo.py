"""Show what committed calls changed, and undo them without touching later edits."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from weakincentives.core.gc_pause import no_collection
from weakincentives.core.state import Seals
from weakincentives.errors import ContentDamaged, FilesystemError, UndoRefused
from weakincentives.filesystem.changes import Changes
from weakincentives.filesystem.conflicts import (
    Conflict,
    arrived,
    find_conflicts,
    is_below,
    is_related,
    is_same,
    named,
    removed_directories,
)
from weakincentives.filesystem.diffs import (
    Detail,
    Effort,
    FileChange,
    changed_paths,
    diff_text,
    file_changes,
)
from weakincentives.filesystem.entry import (
    Entry,
    apply_entry,
    capture,
    copy_exactly,
    create,
    matches,
    new_file,
)
from weakincentives.filesystem.history import MAX_KEPT, Committed, Delta, History, Past
from weakincentives.filesystem.journal import JOURNAL, Record
from weakincentives.filesystem.layers import (
    Cover,
    Disk,
    Forward,
    Layer,
    Look,
    Origin,
    node_at,
)
from weakincentives.filesystem.paths import BARRED, Parts, join_path, shown
from weakincentives.filesystem.prune import Pruned, to_prune
from weakincentives.filesystem.reserved import Reserved
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.states import DirectoryAt, FilesAt, before_call
from weakincentives.filesystem.store import Limits, Note, store_of
from weakincentives.filesystem.tree import Tree, write_all

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
        note = Note.read(self.store)
        self._seals = Seals("nothing") if note is None else note.seals(JOURNAL)
        self._past = Past(self.store, self._seals, room=MAX_KEPT)
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
        return tuple(str(error) for error in self._past.damaged().values())

    def to_prune(self, limits: Limits, *, left_too: bool = False) -> Pruned:
        """Return what ``HostFilesystem.prune`` would remove now; compression is not tried."""
        return to_prune(self._past, limits, left_too=left_too)

    def changes(self, detail: Detail | None = None) -> Iterator[CallChanges]:
        """Yield what each call changed, newest first.

        Later changes by others are never shown: such a file is named instead of diffed. So is a
        file of more than 1 MiB, every path for which ``detail`` returns false, and of a call's
        other paths all but the first thousand.
        """
        for delta, before, after in _backwards(self._past, self._disk):
            left = _Left(self._past, after)
            left.include(delta)
            paths = changed_paths(delta.records, before, after)
            effort = Effort(largest=1 << 20, files=1000)
            files = file_changes(paths, before, left, detail=detail, effort=effort)
            yield CallChanges(delta.committed, tuple(files))

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
        disk = self._disk
        return _changes_of(self._past, serials, disk, reverse=reverse, detail=detail, effort=effort)

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
        found = find_conflicts(self._past, serials, self._disk) if serials else {}
        return [each for some in found.values() for each in some]

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
        deltas = past.readable(each for each in past.serials() if first < each <= last)
        records = [record for delta in deltas for record in delta.records]
        before, after = self.look_at(one), self.look_at(other)
        paths = changed_paths(records, before, after)
        return tuple(file_changes(paths, before, after, detail=detail))

    def past(self) -> Past:
        """Return the commits themselves; each has its own memory of what was read."""
        return Past(self.store, self._seals)

    def look_at(self, serial: int) -> Look:
        """Return the directory as it was after a commit; raises LookupError as ``files_at``."""
        root = self._disk.tree.path
        try:
            disk = Disk(Tree(root))
            look = DirectoryAt(self.store, self._past, disk, serial, patience=_PATIENCE)
        except FilesystemError as error:
            raise LookupError(str(error)) from error
        return Reserved(root, store=self.store).without_hidden(look)


def diff_of(past: Past, serials: Iterable[int], disk: Look) -> str:
    """Return what some calls changed together, as a patch for ``git apply``."""
    return diff_text(_changes_of(past, set(serials), disk))


def _changes_of(
    past: Past,
    serials: set[int],
    disk: Look,
    *,
    reverse: bool = False,
    detail: Detail | None = None,
    effort: Effort | None = None,
) -> tuple[FileChange, ...]:
    """Compare before the first and after the last of some calls, at the paths they changed."""
    paths: set[Parts] = set()
    newest = _Left(past, disk)
    for delta, before, after in _backwards(past, disk):
        serial = delta.committed.serial
        if serial == max(serials):
            newest = _Left(past, after)
        if serial <= max(serials):
            newest.include(delta)
        if serial in serials:
            paths.update(changed_paths(delta.records, before, after))
        if serial == min(serials):
            sides = (newest, before) if reverse else (before, newest)
            return tuple(file_changes(sorted(paths), *sides, detail=detail, effort=effort))
    return ()


class _Left(Forward):
    """The changed paths as calls left them, without later changes by others."""

    def __init__(self, past: Past, look: Look) -> None:
        self.look = look
        self._past = past
        self._after: dict[Parts, tuple[Delta, Entry | None]] = {}
        self._known: dict[Parts, bool] = {}
        """Directories that arrived or went as a whole: whether all their entries are known."""

    def include(self, delta: Delta) -> None:
        """Add an earlier call; what later calls replaced as a whole is not as it left it."""
        for parts, entry in delta.after.items():
            if not any(parts[:depth] in self._known for depth in range(len(parts))):
                self._after.setdefault(parts, (delta, entry))
        for record in delta.records:
            if record.op == "moved":
                self._known.setdefault(record.path, False)
            for parts in record.paths:
                left = delta.after.get(parts)
                was_directory = record.before is not None and record.before.is_directory
                if was_directory and not (left is not None and left.is_directory):
                    self._known.setdefault(parts, True)
        for parts in arrived(delta):
            self._known.setdefault(parts, True)

    def node(self, parts: Parts) -> Entry | None:
        if parts not in self._after:
            now = self.look.node(parts)
            return None if self._is_known(parts) else now
        left, now = self._after[parts][1], node_at(self.look, parts)
        if left is None or now is None or not matches(left, now):
            if left is not None and left.is_directory and self._known.get(parts) is False:
                # It was moved as a whole, and someone has removed it with what was in it.
                raise OSError(errno.ESTALE, "changed since")
            return left
        mode = left.mode if left.ctime_ns else now.mode
        return now._replace(mode=mode, xattrs=left.xattrs, digest=left.digest)

    def _is_known(self, parts: Parts) -> bool:
        """Whether calls are known to have left nothing at a path that they did not record."""
        for depth in reversed(range(len(parts))):
            above = parts[:depth]
            if above in self._after:
                left = self._after[above][1]
                if left is None or not left.is_directory:
                    return True
            if above in self._known:
                return self._known[above]
        return False

    def read(self, parts: Parts) -> bytes:
        delta, left = self._after.get(parts, (None, None))
        if delta is None or left is None or left.digest is None:
            return self.look.read(parts)
        damaged: ContentDamaged | None = None
        try:
            data = self.look.read(parts)
            if hashlib.sha256(data).hexdigest() == left.digest:
                return data
        except ContentDamaged as error:
            damaged = error
        except OSError:
            pass  # someone has removed it since
        try:
            return self._past.left(delta, left)
        except OSError:
            if damaged is None:
                raise
            raise damaged from None

    def link_target(self, parts: Parts) -> str:
        left = self._after.get(parts, (None, None))[1]
        return self.look.link_target(parts) if left is None or left.target is None else left.target


def _backwards(past: Past, disk: Look) -> Iterator[tuple[Delta, Look, Look]]:
    """Yield each call with the state before and after it, newest first."""
    after = Layer(disk)
    for delta in past.readable(past.after(0)):
        try:
            after = _as_moved(past, delta, after)
            before = before_call(past, delta, after)
        except OSError:
            return  # later changes hide what was there
        yield delta, before, after
        after = before


def _as_moved(past: Past, delta: Delta, after: Layer) -> Layer:
    """Return the state after a call with the files that it moved as they were then.

    Of a moved file the record has only the paths: what someone has changed or removed since would
    show as what the call found.
    """
    for record in delta.records:
        left = delta.after.get(record.path)
        if record.op != "moved" or left is None or left.kind not in ("file", "link"):
            continue
        now = node_at(after, record.path)
        if now is not None and left.kind == now.kind and matches(left, now):
            continue
        if left.kind == "link":
            source: Origin = os.fsencode(left.target or "")
        elif left.digest in delta.kept or (left.digest or "") in past.objects:
            source = partial(past.left, delta, left)
        else:
            continue
        after = after.make_directories(record.path[:-1], 0).put(record.path, Cover(left, source))
    return after


# Undoing


def go_back(changes: Changes, history: History, serial: int) -> tuple[str, ...]:
    """Undo everything committed after a serial, within an open transaction.

    Returns a sentence for each path that was left alone.
    """
    later = history.after(serial)
    if not later:
        return ()
    undo = _Undo(changes, history)
    undo.sentences += [str(error) for error in history.damaged(later).values()]
    conflicts = find_conflicts(history, set(later), Disk(changes.tree))
    for delta in history.readable(later):
        undo.call(delta, conflicts.get(delta.committed.serial, ()))
    undo.set_times()
    return undo.report()


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
    conflicts = {} if force else find_conflicts(history, set(serials), Disk(changes.tree))
    obstacles = [each for some in conflicts.values() for each in some if each.is_obstacle]
    if leave_edits:
        obstacles = [each for each in obstacles if each.calls]
    if obstacles:
        raise UndoRefused(named(obstacles))
    undo = _Undo(changes, history, force=force)
    newest_first = sorted(serials, reverse=True)
    for serial in newest_first:
        undo.call(history.read(serial), conflicts.get(serial, ()))
    if newest_first == history.after(newest_first[-1] - 1):
        undo.set_times()  # else later calls have changed directories since
    return undo.report()


class _Times:
    """Modification times of directories, as a tree: a subtree is moved or removed at once."""

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        """By name what is in a directory; its time has the name ``/``."""

    def __iter__(self) -> Iterator[tuple[Parts, int]]:
        pending: list[tuple[Parts, dict[str, Any]]] = [((), self._top)]
        while pending:
            parts, node = pending.pop()
            if "/" in node:
                yield parts, node["/"]
            pending += [((*parts, name), inner) for name, inner in node.items() if name != "/"]

    def set(self, parts: Parts, mtime: int, *, keep: bool = False) -> None:
        node = self._node(parts)
        if not keep or "/" not in node:
            node["/"] = mtime

    def remove(self, parts: Parts) -> dict[str, Any]:
        """Forget a directory that is replaced, and everything below it."""
        found = self._node(parts[:-1]).pop(parts[-1], None)
        return {} if found is None else found

    def move(self, path: Parts, origin: Parts) -> None:
        if found := self.remove(path):
            self._node(origin[:-1])[origin[-1]] = found

    def _node(self, parts: Parts) -> dict[str, Any]:
        node = self._top
        for name in parts:
            node = node.setdefault(name, {})
        return node


Make = Callable[[Tree, str], None]
"""Re-creates the previous version of a path at a free name; raises OSError if it was not saved."""


class _Undo:
    """Undoes committed calls, newest first.

    Path by path: what someone else has changed is left alone, and so it costs no other path.
    """

    def __init__(self, changes: Changes, history: History, *, force: bool = False) -> None:
        self.changes = changes
        self.history = history
        self.force = force
        """Whether to replace what others have changed, report errors and undo the rest."""
        self.sentences: list[str] = []
        self._left: set[Parts] = set()
        """Paths left alone; not what is below them, unless something blocks it."""
        self._shared: set[Parts] = set()
        """Directories that someone made again, and that were restored around what is in them."""
        self._edited: dict[Parts, Make | None] = {}
        """Those that someone else has changed, with the oldest version that was there."""
        self._times = _Times()
        self._links = _Links(changes, history)

    def call(self, delta: Delta, conflicts: Sequence[Conflict] = ()) -> None:
        """Undo one committed call except for its conflicts."""
        one = _OneCall(delta, {each.parts for each in conflicts}, removed_directories(delta))
        for record in reversed(delta.records):
            try:
                self._undo(record, one)
            except OSError as error:
                if not self.force:
                    raise
                path = record.path if record.origin is None else record.origin
                self._left.add(path)
                self.changes.partly.add(delta.committed.call_id)
                self.sentences.append(
                    f"{shown(join_path(path))} could not be restored: {error.strerror or error}"
                )

    def report(self) -> tuple[str, ...]:
        """Return a sentence for each thing that is not as it was, and set aside what edits hide."""
        edited = [
            f"{shown(join_path(parts))} was changed by someone else since and is left unchanged"
            f"{self._set_aside(parts, make)}"
            for parts, make in self._edited.items()
        ]
        return (*edited, *self.sentences)

    def _set_aside(self, parts: Parts, make: Make | None) -> str:
        """Set aside the version that would have been restored; returns where, for the message."""
        if make is None:
            return ""
        place = self.changes.store.left(parts)
        try:
            with contextlib.closing(Tree(place.parent)) as folder:
                make(folder, place.name)
        except OSError:
            return ""
        return f"; the previous version is in {place}"

    def _undo(self, record: Record, one: _OneCall) -> None:
        if record.origin is not None:
            self._move_back(record, record.origin, one)
        else:
            self._put_back_or_leave(record, one)
        one.undone.update(record.paths)
        for parts, mtime in record.times:
            self._times.set(parts, mtime)

    # Leaving alone

    def _leave(self, parts: Parts, one: _OneCall, make: Make | None = None) -> None:
        """Leave a path alone, and name it."""
        self._left.add(parts)
        self._edited[parts] = make
        self.changes.partly.add(one.call_id)

    def _is_left(self, parts: Parts, one: _OneCall, record: Record | None = None) -> bool:
        """Whether a path is not to be touched, because of an edit there or above it."""
        if parts in one.changed or parts in self._left:
            return True
        if parts in one.undone:
            return False
        if record is not None and is_below(parts, one.moved_back):
            # What the call had left there was moved with its directory, and so was an edit of it.
            status = self.changes.tree.status_if_reached(parts)
            moment = self.history.moment(one.delta.committed.serial)
            if status is None or stat.S_ISDIR(status.st_mode) or status.st_mtime_ns < moment:
                return False
            return not is_same(record.after, Disk(self.changes.tree), parts)
        if parts in one.restored or is_below(parts, one.restored):
            return False
        if not is_below(parts, self._left) and not is_below(parts, self._shared):
            return False
        return not is_same(one.delta.after.get(parts), Disk(self.changes.tree), parts)

    def _is_blocked(self, parts: Parts) -> bool:
        """Whether something that was left alone is where a directory above a path would be."""
        above = (parts[:depth] for depth in range(len(parts)))
        return any(each in self._left and not self._has_directory(each) for each in above)

    def _has_directory(self, parts: Parts) -> bool:
        status = self.changes.tree.status_if_reached(parts)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def _is_there(self, parts: Parts) -> bool:
        return self.changes.tree.status_if_reached(parts) is not None

    def _is_free(self, parts: Parts) -> bool:
        """Whether nothing is at a path, nor in the place of a directory above it."""
        try:
            return self.changes.tree.status(parts) is None
        except OSError as error:
            if error.errno not in BARRED:
                raise
            return False

    def _put_back_or_leave(self, record: Record, one: _OneCall) -> None:
        parts, before = record.path, record.before
        if self._is_blocked(parts):
            self.changes.partly.add(one.call_id)
            return
        is_left = self._is_left(parts, one, record)
        was_directory = before is not None and before.is_directory
        if is_left and was_directory and self._is_free(parts):
            is_left = False  # there is nothing to leave: what was in it comes back
        if is_left and not (was_directory and record.saved and self._has_directory(parts)):
            make = None if before is None else partial(self._make, record, before, one.delta)
            self._leave(parts, one, make)
            return
        if is_left:
            self._leave(parts, one)
        self._put_back(record, one)

    # Moving back

    def _move_back(self, record: Record, origin: Parts, one: _OneCall) -> None:
        if self._is_blocked(origin) or self._is_blocked(record.path):
            self.changes.partly.add(one.call_id)
            return
        moved, is_free = record.path, self._is_free(origin)
        if self._is_left(moved, one) or self.changes.tree.status_if_reached(moved) is None:
            self._restore_moved(record, origin, one, is_free=is_free)
        elif is_free or self.force:
            self.changes.rename(moved, origin)
            self._times.move(moved, origin)
            one.restored.add(origin)
            one.moved_back.add(origin)
        elif self._has_directory(origin) and self._has_directory(moved):
            self._move_into(record, origin, one)
        elif self._is_in_the_way(moved, record, one):
            self._set_moved_aside(moved, origin, one)
        else:
            self._left.add(moved)
            self._leave(origin, one)

    def _move_into(self, record: Record, origin: Parts, one: _OneCall) -> None:
        """Move what is in a directory into one that someone made at its previous path."""
        self._shared.add(origin)
        pending = [(record.path, origin)]
        emptied: list[Parts] = []
        while pending:
            here, there = pending.pop()
            emptied.append(here)
            for name in self.changes.tree.names(here):
                source, target = (*here, name), (*there, name)
                if self.changes.tree.status(target) is None:
                    self.changes.rename(source, target)
                    self._times.move(source, target)
                    one.restored.add(target)
                elif self._has_directory(source) and self._has_directory(target):
                    pending.append((source, target))
                elif self._is_copy(self.changes.tree, source, target):
                    self._remove(source)
                elif self._is_in_the_way(source, record, one):
                    self._set_moved_aside(source, target, one)
                else:
                    self._leave(target, one)
                    self.sentences.append(
                        f"{shown(join_path(source))} was not moved back to"
                        f" {shown(join_path(target))}"
                    )
        for here in reversed(emptied):
            if not self.changes.tree.names(here):
                self._remove(here)
            else:
                self._left.add(here)

    def _is_in_the_way(self, parts: Parts, moved: Record, one: _OneCall) -> bool:
        """Whether a call replaced something by what it moved, unchanged since: that comes back."""
        earlier = one.delta.records[: one.delta.records.index(moved)]
        if not any(each.path == moved.path and each.before is not None for each in earlier):
            return False
        moment = self.history.moment(one.delta.committed.serial)
        found = (status for _, status in self.changes.tree.walk(parts))
        return all(stat.S_ISDIR(each.st_mode) or each.st_mtime_ns <= moment for each in found)

    def _set_moved_aside(self, parts: Parts, origin: Parts, one: _OneCall) -> None:
        """Remove what cannot be moved back, and keep it as the previous version of its origin."""
        store = self.changes.store
        staged = store.fresh()
        copy_exactly(self.changes.tree, parts, store.tree, (staged,))
        self._remove(parts)
        self._leave(origin, one, partial(_copy_from, store.tx, (staged,)))

    def _restore_moved(
        self, record: Record, origin: Parts, one: _OneCall, *, is_free: bool
    ) -> None:
        """Restore what was moved away and then changed by someone else; it stays where it is."""
        if not is_free and not self.force:
            self._leave(origin, one)
            return
        staged = self.changes.store.fresh()
        try:
            self._make_moved(record, one.delta, self.changes.store.tree, staged)
        except OSError:
            self._left.add(origin)
            self.changes.partly.add(one.call_id)
            self.sentences.append(
                f"{shown(join_path(origin))} could not be restored: it was moved to"
                f" {shown(join_path(record.path))}, and someone else changed that since"
            )
            return
        self.changes.put_file(origin, self.changes.store.tx / staged)

    def _make_moved(self, record: Record, delta: Delta, tree: Tree, name: str) -> None:
        """Re-create what a call moved, as it was then."""
        before, moved = record.before, record.path
        later = delta.records[delta.records.index(record) + 1 :]
        again = next((each for each in later if each.path == moved), None)
        if before is None or before.is_directory:
            raise FileNotFoundError(name)
        if again is not None and again.before is not None:  # it was changed after the move
            self._make(again, again.before, delta, tree, name)
            return
        left = delta.after.get(moved)
        if left is None or before.kind != "file":
            self._make(record, before, delta, tree, name)
            return
        data = self.history.left(delta, left)
        with new_file(tree.fd, name) as writing:
            write_all(writing, data)
        apply_entry(tree, (name,), before)

    # Putting back

    def _put_back(self, record: Record, one: _OneCall) -> None:
        before, parts = record.before, record.path
        is_directory = self._has_directory(parts)
        if is_directory and before is None and record.is_whole:
            self._take_away(record, one)
            is_directory = self._has_directory(parts)
        status = self.changes.tree.status(parts)
        if before is not None and before.is_directory and record.saved is None:
            if status is not None and not is_directory:
                self._remove(parts)
            if not is_directory:
                self.changes.make_directory(parts)
            self._set_attributes(parts, before)
            self._times.set(parts, before.mtime_ns)
        elif is_directory and before is not None and before.is_directory and not self.force:
            self._restore_into(record, one)
        elif is_directory and self._holds_more(record, one):
            return  # its remaining entries are someone else's
        elif before is None:
            if status is not None:
                self._remove(parts)
        elif not record.names and before.kind != "file" and self._looks_like(parts, before):
            self._set_attributes(parts, before)
        elif _was_edited(record, status) and before.digest is not None:
            self._write_in_place(parts, before, before.digest)
        elif not self._recreate(record, before, one):
            self._left.add(parts)
            self.changes.partly.add(one.call_id)
            self.sentences.append(
                f"{shown(join_path(parts))} could not be restored: its content was not saved"
            )

    def _take_away(self, record: Record, one: _OneCall) -> None:
        """Remove a directory that arrived as a whole; what someone else changed in it stays."""
        tree, top = self.changes.tree, record.path
        if one.arrived.get(top) is not record:
            # The call itself removed it later, so it was just restored; or someone made it again.
            if self.force or not is_related(top, self._left | self._shared):
                self._remove(top)
                return
            for parts in [each for each, _ in tree.walk(top) if each in one.restored]:
                if not is_related(parts, self._left) and self._is_there(parts):
                    self._remove(parts)
                    one.restored.discard(parts)
            return
        found = list(tree.walk(top))
        if self.force or all(self._is_ours(parts, one) for parts, _ in found if parts != top):
            self._remove(top)
            return
        for parts, status in reversed(found):
            if parts in one.changed:
                self._leave(parts, one)
                continue
            is_empty = not stat.S_ISDIR(status.st_mode) or not tree.names(parts)
            if parts != top and is_empty and self._is_ours(parts, one):
                self._remove(parts)

    def _is_ours(self, parts: Parts, one: _OneCall) -> bool:
        """Whether a call left something at a path, or it is from a directory just restored."""
        if parts in one.changed or parts in self._left:
            return False
        restored = is_below(parts, one.removed) and not is_related(parts, self._shared)
        return restored or parts in one.delta.after

    def _holds_more(self, record: Record, one: _OneCall) -> bool:
        """Leave a directory alone that still holds other entries; False if it is empty."""
        parts, before = record.path, record.before
        names = sorted(self.changes.tree.names(parts))
        if not names or (self.force and before is not None and before.is_directory):
            return False
        if parts in one.removed and not self.force:
            return True  # it was a directory before, too: that comes back around these
        inside = any(each[: len(parts)] == parts for each in self._edited)
        self._left.add(parts)
        self.changes.partly.add(one.call_id)
        if inside and before is None:
            return True  # what is in it has its own sentence
        held = ", ".join(shown(join_path((*parts, name))) for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        self.sentences.append(
            f"{shown(join_path(parts))} holds something that is not from these calls"
            f" and is left in place: {held}{more}"
        )
        if before is not None:
            self._edited.setdefault(parts, partial(self._make, record, before, one.delta))
        return True

    def _restore_into(self, record: Record, one: _OneCall) -> None:
        """Restore what was in a directory into one that someone made again."""
        self._shared.add(record.path)
        serial, top, done = one.delta.committed.serial, record.path, set[Parts]()
        with contextlib.closing(Tree(self.history.trees(serial))) as trees:
            for place, status in list(trees.walk((record.saved or "",))):
                parts = (*top, *place[1:])
                if is_below(parts, done) or self._is_blocked(parts):
                    continue
                there = self.changes.tree.status_if_reached(parts)
                if there is None:
                    staged = self.changes.store.fresh()
                    copy_exactly(trees, place, self.changes.store.tree, (staged,))
                    self._put(parts, staged)
                    done.add(parts)
                    one.restored.add(parts)
                elif stat.S_ISDIR(there.st_mode) and stat.S_ISDIR(status.st_mode):
                    if there.st_mode != status.st_mode:
                        self._leave(parts, one)
                elif not self._is_copy(trees, place, parts):
                    make = partial(_copy_from, self.history.trees(serial), place)
                    self._leave(parts, one, make)
        self._join_tree(one.delta, record)

    def _is_copy(self, tree: Tree, place: Parts, parts: Parts) -> bool:
        """Whether a path has the same kind, mode, content and link text as another."""
        known = capture(tree, place, read=True)
        return is_same(known, Disk(self.changes.tree), parts)

    def _looks_like(self, parts: Parts, before: Entry) -> bool:
        now = capture(self.changes.tree, parts)
        return now is not None and (now.kind, now.pipe, now.target) == (
            before.kind,
            before.pipe,
            before.target,
        )

    def _write_in_place(self, parts: Parts, before: Entry, digest: str) -> None:
        """Restore the content of a hard-linked file in place, for all its names."""
        now = capture(self.changes.tree, parts, read=True)
        if now is not None and now.digest != digest:
            self.changes.write(parts, self.changes.store.objects.read(digest))
        if now is None or not now.is_like(before) or now.mtime_ns != before.mtime_ns:
            self._set_attributes(parts, before)

    def _recreate(self, record: Record, before: Entry, one: _OneCall) -> bool:
        """Re-create what a call replaced; False if it was not saved."""
        parts, store, delta = record.path, self.changes.store, one.delta
        twin = self._links.twin(before, delta)
        if twin is not None:
            self._add_name(twin, parts)
            return True
        staged = store.fresh()
        try:
            self._make(record, before, delta, store.tree, staged)
        except FileNotFoundError:
            return False
        if before.is_directory and self.changes.tree.status(parts) is not None:
            self._remove(parts)  # so that it arrives as a whole, which can be undone
        self._put(parts, staged)
        one.restored.add(parts)
        self._links.made(before, parts)
        if before.is_directory:
            self._join_tree(delta, record)
        return True

    def _join_tree(self, delta: Delta, record: Record) -> None:
        """Link the files of a restored directory to their names elsewhere."""
        for place, ino in delta.linked.get(record.saved or "", {}).items():
            parts = (*record.path, *place)
            now = capture(self.changes.tree, parts, read=True)
            twin = None if now is None else self._links.twin(now._replace(ino=ino, links=2), delta)
            if twin is not None:
                self._add_name(twin, parts)
            elif now is not None:
                self._links.made(now._replace(ino=ino), parts)

    def _add_name(self, twin: Parts, parts: Parts) -> None:
        one, other = (self.changes.tree.status(each) for each in (twin, parts))
        if one is None or other is None or not os.path.samestat(one, other):
            self._keep_time_above(parts)
            self._times.remove(parts)
            self.changes.add_name(twin, parts)

    def _put(self, parts: Parts, staged: str) -> None:
        """Move something from the store to a path."""
        self._times.remove(parts)
        self._keep_time_above(parts)
        self.changes.put_file(parts, self.changes.store.tx / staged)

    def _keep_time_above(self, parts: Parts) -> None:
        above = self.changes.tree.status(parts[:-1])
        if above is not None:
            # Another hard link may be in a directory that the call did not change.
            self._times.set(parts[:-1], above.st_mtime_ns, keep=True)

    def _remove(self, parts: Parts) -> None:
        self._times.remove(parts)
        try:
            self.changes.remove(parts)
        except PermissionError:
            # The call removed write permission from the directory; that is undone next.
            self.changes.set_attributes(parts[:-1], mode=0o700)
            self.changes.remove(parts)

    def _make(self, record: Record, before: Entry, delta: Delta, tree: Tree, name: str) -> None:
        """Re-create what a call replaced, at a free name."""
        if before.kind == "file":
            self.history.make_file(before, tree, name)
        elif before.is_directory and record.saved is not None:
            self.history.copy_tree(delta, record.saved, tree, name)
        elif create(tree.fd, name, before):
            apply_entry(tree, (name,), before)
        else:
            raise FileNotFoundError(name)

    def _set_attributes(self, parts: Parts, before: Entry) -> None:
        if self.changes.tree.status(parts) is not None:
            self.changes.set_attributes(
                parts,
                mode=before.mode,
                mtime_ns=before.mtime_ns,
                uid=before.uid,
                gid=before.gid,
                xattrs=before.xattrs,
            )

    def set_times(self) -> None:
        """Restore directory times, after all other changes."""
        for parts, mtime in self._times:
            with contextlib.suppress(OSError):  # gone, or no longer a directory
                status = self.changes.tree.status(parts)
                if status is not None and stat.S_ISDIR(status.st_mode):
                    self.changes.set_attributes(parts, mtime_ns=mtime)


class _OneCall:
    """A call that is being undone."""

    def __init__(self, delta: Delta, changed: Set[Parts], removed: Mapping[Parts, Record]) -> None:
        self.delta = delta
        self.call_id = delta.committed.call_id
        self.changed = changed
        """The paths that differ from how it left them."""
        self.removed = removed
        """The directories that it removed, replaced or moved away."""
        self.arrived = arrived(delta)
        self.undone: set[Parts] = set()
        """The paths with a record that is undone already: they are no longer as it left them."""
        self.moved_back: set[Parts] = set()
        """Where something was moved back to, with all that is in it."""
        self.restored: set[Parts] = set()
        """What came back, also into directories that someone made again, or that hold an edit."""


class _Links:
    """Finds the file that a re-created name was a hard link to."""

    def __init__(self, changes: Changes, history: History) -> None:
        self._changes = changes
        self._history = history
        self._made: dict[int, Parts] = {}
        """Files that this undo has re-created, by the inode that they had before."""
        self._found: dict[int, list[Parts]] | None = None
        """The files in the workspace by inode; read when a hard link is first looked for."""

    def made(self, before: Entry, parts: Parts) -> None:
        if before.kind == "file":
            self._made.setdefault(before.ino, parts)

    def twin(self, before: Entry, delta: Delta) -> Parts | None:
        """Return another name of the file that was at a path, if it still has that content."""
        if before.kind != "file" or before.digest is None:
            return None
        if before.links < 2 and before.ino not in self._made:
            return None
        for parts in self._names(before.ino, delta):
            now = capture(self._changes.tree, parts, read=True)
            # An inode can be used again: content and mode must agree, too.
            known = (before.kind, before.mode, before.digest)
            if now is not None and (now.kind, now.mode, now.digest) == known:
                return parts
        return None

    def _names(self, ino: int, delta: Delta) -> Iterator[Parts]:
        if ino in self._made:
            yield self._made[ino]
        if self._found is None:
            self._found = {}
            for parts, status in self._changes.tree.walk((), lenient=True):
                if stat.S_ISREG(status.st_mode) and not parts[0].startswith(TEMPORARY):
                    self._found.setdefault(status.st_ino, []).append(parts)
        for each in (ino, *self._since(ino, delta)):
            yield from self._found.get(each, ())

    def _since(self, ino: int, delta: Delta) -> list[int]:
        """Return the inodes that a file got when undoing later calls re-created it."""
        found = [ino]
        history = self._history
        later = list(history.readable(history.after(delta.committed.serial)))
        by_id = {each.committed.call_id: each for each in later}
        for undo in reversed(later):
            for undone in (by_id[each] for each in undo.committed.undoes if each in by_id):
                for record in undone.records:
                    if record.before is not None and record.before.ino in found:
                        left = undo.after.get(record.path)
                        if left is not None and left.kind == "file":
                            found.append(left.ino)
        return found[1:]


def _copy_from(folder: Path, place: Parts, tree: Tree, name: str) -> None:
    with contextlib.closing(Tree(folder)) as trees:
        copy_exactly(trees, place, tree, (name,))


def _was_edited(record: Record, status: os.stat_result | None) -> bool:
    """Whether a hard-linked file was changed in place, so that all its names show the change."""
    if record.source is None or record.before is None or status is None:
        return False
    is_linked = stat.S_ISREG(status.st_mode) and status.st_nlink > 1
    # A program may have replaced the file by another that is hard-linked, too.
    return is_linked and (record.in_place or status.st_ino == record.before.ino)
