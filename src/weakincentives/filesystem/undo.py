"""Show what committed calls changed, and undo them without touching later edits."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from weakincentives.collector import no_collection
from weakincentives.errors import FilesystemError, UndoRefused
from weakincentives.filesystem.changes import Changes
from weakincentives.filesystem.diffs import (
    Detail,
    Effort,
    FileChange,
    changed_paths,
    diff_text,
    file_changes,
)
from weakincentives.filesystem.entry import Entry, apply_entry, capture, create, matches
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
    walk,
)
from weakincentives.filesystem.paths import Parts, join_path, shown
from weakincentives.filesystem.prune import Pruned, to_prune
from weakincentives.filesystem.reserved import Reserved
from weakincentives.filesystem.states import DirectoryAt, FilesAt, before_call
from weakincentives.filesystem.store import Limits, Note, store_of
from weakincentives.filesystem.tree import Tree
from weakincentives.state import Seals

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
        conflicts = _conflicts(self._past, serials, self._disk) if serials else {}
        return _named(conflicts.values())

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
        for parts in _put_directories(delta):
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
        with contextlib.suppress(OSError):
            data = self.look.read(parts)
            if hashlib.sha256(data).hexdigest() == left.digest:
                return data
        return self._past.left(delta, left)  # someone has changed or removed it since

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
            source = functools.partial(past.left, delta, left)
        else:
            continue
        after = after.make_directories(record.path[:-1], 0).put(record.path, Cover(left, source))
    return after


# Checking


class _Conflict(NamedTuple):
    """A path that differs from how a call left it."""

    parts: Parts
    calls: tuple[str, ...]
    """The other calls that changed it since; none if someone else changed it last."""
    top: Parts | None = None
    """The directory above it that the call put there as a whole."""


def _conflicts(past: Past, wanted: Set[int], disk: Disk) -> dict[int, list[_Conflict]]:
    """Return the conflicts of each call, given that the later ones of these are undone first."""
    found: dict[int, list[_Conflict]] = {}
    deltas = list(past.readable(past.after(min(wanted) - 1)))
    others: list[Delta] = []
    undoing: set[Parts] = set()
    again = _recreated(deltas, wanted)
    touched = _Touched()
    layer = Layer(disk)
    for delta in deltas:
        if delta.committed.serial not in wanted:
            others.append(delta)
            continue
        paths = {parts for record in delta.records for parts in record.paths}
        checked: dict[Parts, Parts | None] = dict.fromkeys(paths & delta.after.keys())
        for top in _put_directories(delta):
            left_there = {parts for parts in delta.after if parts[: len(top)] == top}
            for parts in left_there.union(parts for parts, _ in walk(layer, [top])):
                checked.setdefault(parts, top)
        found[delta.committed.serial] = [
            _Conflict(parts, _changed_by(others, parts, disk, touched), top)
            for parts, top in checked.items()
            if not _is_as_left(parts, delta.after.get(parts), layer, again, top)
            # A path that a later call changed is checked against the history only.
            or not (_is_within(parts, undoing) or _is_unchanged(parts, delta, layer, disk))
        ]
        undoing |= paths
        with contextlib.suppress(OSError):  # the conflict is already found
            layer = before_call(past, delta, layer)
    return found


def _named(conflicts: Iterable[list[_Conflict]]) -> dict[str, tuple[str, ...]]:
    found = {each.parts: each.calls for some in conflicts for each in some}
    return {join_path(parts): calls for parts, calls in sorted(found.items())}


def _changed_by(
    others: Sequence[Delta], parts: Parts, disk: Look, touched: _Touched
) -> tuple[str, ...]:
    """Return the calls that changed a path, newest first; none if it has changed since."""
    left = [each for each in others if parts in each.after]
    if left and not _is_as_left(parts, left[0].after[parts], disk):
        return ()
    return tuple(each.committed.call_id for each in others if touched.by(each.committed, parts))


def _is_as_left(
    parts: Parts,
    left: Entry | None,
    look: Look,
    again: Mapping[Parts, int] = MappingProxyType({}),
    top: Parts | None = None,
) -> bool:
    """Tell whether a path has what a call left there, by kind, size, time and known content."""
    try:
        now = look.node(parts)
    except OSError:
        return False  # something else blocks the path
    if left is None or now is None:
        return left is now
    if left.is_directory and now.is_directory:
        # Inside a directory that arrived as a whole, entries are compared one by one.
        return top is not None or now.ino in (left.ino, again.get(parts))
    # A hard-linked file may have been changed through another name: size and time decide.
    is_known = left.ctime_ns != 0 and now.links == 1 and now.digest is not None
    return matches(left, now) and (not is_known or left.is_like(now))


def _is_unchanged(parts: Parts, delta: Delta, layer: Layer, disk: Disk) -> bool:
    """Tell whether content and attributes on disk are as a call left them."""
    left, now = delta.after.get(parts), layer.node(parts)
    if left is None or left.kind not in ("file", "link") or not left.ctime_ns:
        return True
    in_history = now is not None and now.digest is not None
    return in_history or left.is_at(disk.tree, parts)


def _is_within(parts: Parts, others: Set[Parts]) -> bool:
    return bool(others) and any(parts[:depth] in others for depth in range(len(parts) + 1))


def _recreated(deltas: Iterable[Delta], wanted: Set[int]) -> dict[Parts, int]:
    """Return the inodes of directories that undoing later calls has re-created, by path.

    Paths that another call has changed since are excluded.
    """
    undone: set[str] = set()
    found: dict[Parts, int] = {}
    others: list[Committed] = []
    for delta in deltas:
        if delta.committed.serial in wanted or delta.committed.call_id in undone:
            continue
        if not delta.committed.undoes:
            others.append(delta.committed)
            continue
        undone.update(delta.committed.undoes)
        for parts, left in delta.after.items():
            if left is not None and left.is_directory:
                found.setdefault(parts, left.ino)
    touched = _Touched()
    return {p: ino for p, ino in found.items() if not any(touched.by(each, p) for each in others)}


def _put_directories(delta: Delta) -> Iterator[Parts]:
    """Yield the directories that a call put somewhere as a whole."""
    for record in delta.records:
        left = delta.after.get(record.path)
        if record.op == "was" and record.is_whole and left is not None and left.is_directory:
            yield record.path


class _Touched:
    """The paths that calls changed, by call."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[set[str], set[str]]] = {}

    def by(self, call: Committed, parts: Parts) -> bool:
        """Tell whether a call changed a path, or something above or below it."""
        if call.serial not in self._known:
            above = {each[: m.start()] for each in call.paths for m in re.finditer("/", each)}
            self._known[call.serial] = set(call.paths), above
        paths, above = self._known[call.serial]
        path = join_path(parts)
        return (
            path in above
            or any(join_path(parts[:depth]) in paths for depth in range(len(parts), 0, -1))
            or path in paths
        )


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
    conflicts = _conflicts(history, set(later), Disk(changes.tree))
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
    it is left alone. Returns a sentence for each path that could not be restored.
    """
    conflicts = {} if force else _conflicts(history, set(serials), Disk(changes.tree))
    refused = _named(conflicts.values())
    if leave_edits:
        refused = {path: calls for path, calls in refused.items() if calls}
    if refused:
        raise UndoRefused(refused)
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


class _Undo:
    """Undoes committed calls, newest first."""

    def __init__(self, changes: Changes, history: History, *, force: bool = False) -> None:
        self.changes = changes
        self.history = history
        self.force = force
        """Whether to report what cannot be restored and undo the rest."""
        self.sentences: list[str] = []
        self._left: set[Parts] = set()
        """Paths left alone, with everything below them."""
        self._edited: dict[Parts, tuple[Record, Delta]] = {}
        """Those that someone else has changed, with the oldest record of what was there."""
        self._times = _Times()

    def call(self, delta: Delta, conflicts: Sequence[_Conflict] = ()) -> None:
        """Undo one committed call except for its conflicts."""
        self._leave(delta, conflicts)
        for record in reversed(delta.records):
            if any(_is_within(parts, self._left) for parts in record.paths):
                if record.path in self._edited:
                    self._edited[record.path] = record, delta
                continue
            try:
                self._undo(record, delta)
            except OSError as error:
                if not self.force:
                    raise
                self._left.add(record.path)
                self.sentences.append(
                    f"{shown(join_path(record.path))} could not be restored:"
                    f" {error.strerror or error}"
                )

    def _leave(self, delta: Delta, conflicts: Sequence[_Conflict]) -> None:
        """Leave conflicts alone and report them."""
        changed = {each.parts for each in conflicts if each.top is None}
        for record in reversed(delta.records):
            for parts in record.paths:
                if parts in changed and not _is_within(parts, self._left):
                    self._left.add(parts)
                    self._edited[parts] = record, delta
        inside: dict[Parts, list[Parts]] = {}
        for each in conflicts:
            if each.top is not None and not _is_within(each.top, self._left):
                inside.setdefault(each.top, []).append(each.parts)
        for top, parts in inside.items():
            self._left.add(top)
            names = ", ".join(shown(join_path(each)) for each in sorted(parts)[:3])
            self.sentences.append(
                f"{shown(join_path(top))} is left unchanged: someone else changed {names} in it"
            )

    def report(self) -> tuple[str, ...]:
        """Return a sentence for each thing that is not as it was, and set aside what edits hide."""
        edited = [
            f"{shown(join_path(parts))} was changed by someone else since and is left unchanged"
            f"{self._set_aside(parts, record, delta)}"
            for parts, (record, delta) in self._edited.items()
        ]
        return (*edited, *self.sentences)

    def _set_aside(self, parts: Parts, record: Record, delta: Delta) -> str:
        """Set aside the version that would have been restored; returns where, for the message."""
        if record.before is None or parts != record.path:
            return ""
        place = self.changes.store.left(parts)
        try:
            with contextlib.closing(Tree(place.parent)) as folder:
                self._make(record, record.before, folder, place.name, delta)
        except OSError:
            return ""
        return f"; the previous version is in {place}"

    def _undo(self, record: Record, delta: Delta) -> None:
        if record.op == "moved" and record.origin is not None:
            self.changes.rename(record.path, record.origin)
            self._times.move(record.path, record.origin)
        else:
            self._put_back(record, delta)
        for parts, mtime in record.times:
            self._times.set(parts, mtime)

    def _holds_more(self, parts: Parts) -> bool:
        """Leave a directory alone that still holds other entries; False if it is empty."""
        names = sorted(self.changes.tree.names(parts))
        if names:
            self._left.add(parts)
            held = ", ".join(shown(join_path((*parts, name))) for name in names[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            self.sentences.append(
                f"{shown(join_path(parts))} holds something that is not from these calls"
                f" and is left in place: {held}{more}"
            )
        return bool(names)

    def _put_back(self, record: Record, delta: Delta) -> None:
        before, parts = record.before, record.path
        status = self.changes.tree.status(parts)
        is_directory = status is not None and stat.S_ISDIR(status.st_mode)
        if before is not None and before.is_directory and record.saved is None:
            if status is not None and not is_directory:
                self._remove(parts)
            if not is_directory:
                self.changes.make_directory(parts)
            self._set_attributes(parts, before)
            self._times.set(parts, before.mtime_ns)
        elif is_directory and not self._is_all_ours(record) and self._holds_more(parts):
            return  # its remaining entries are someone else's
        elif before is None:
            if status is not None:
                self._remove(parts)
        elif not record.names and before.kind != "file" and self._looks_like(parts, before):
            self._set_attributes(parts, before)
        elif record.source is not None and _is_linked(status) and before.digest is not None:
            self._write_in_place(parts, before, before.digest)
        elif not self._recreate(record, before, delta):
            self._left.add(parts)
            self.sentences.append(
                f"{shown(join_path(parts))} could not be restored: its content was not saved"
            )

    def _is_all_ours(self, record: Record) -> bool:
        """Whether a directory arrived as a whole, and nothing in it was left alone."""
        depth = len(record.path)
        return record.is_whole and not any(each[:depth] == record.path for each in self._left)

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

    def _recreate(self, record: Record, before: Entry, delta: Delta) -> bool:
        """Re-create what a call replaced; False if it was not saved."""
        parts, store = record.path, self.changes.store
        staged = store.tx / store.fresh()
        try:
            self._make(record, before, store.tree, staged.name, delta)
        except FileNotFoundError:
            return False
        self._times.remove(parts)
        above = self.changes.tree.status(parts[:-1])
        if above is not None:
            # Another hard link may be in a directory that the call did not change.
            self._times.set(parts[:-1], above.st_mtime_ns, keep=True)
        self.changes.put_file(parts, staged)
        return True

    def _remove(self, parts: Parts) -> None:
        self._times.remove(parts)
        try:
            self.changes.remove(parts)
        except PermissionError:
            # The call removed write permission from the directory; that is undone next.
            self.changes.set_attributes(parts[:-1], mode=0o700)
            self.changes.remove(parts)

    def _make(self, record: Record, before: Entry, tree: Tree, name: str, delta: Delta) -> None:
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


def _is_linked(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISREG(status.st_mode) and status.st_nlink > 1
