"""What committed calls did to a directory, and undoing them without touching later edits."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from weakincentives.errors import UndoRefused
from weakincentives.filesystem.changes import Changes
from weakincentives.filesystem.diffs import FileChange, changed_paths, file_changes
from weakincentives.filesystem.entry import Entry, apply_entry, capture, create, matches
from weakincentives.filesystem.history import Committed, Delta, History, Past
from weakincentives.filesystem.journal import JOURNAL, Record
from weakincentives.filesystem.layers import Disk, Forward, Layer, Look, taken_by, undone, walk
from weakincentives.filesystem.protocol import Parts, join_path, shown
from weakincentives.filesystem.store import Note, location_of
from weakincentives.filesystem.tree import Tree
from weakincentives.state import Seals

# Looking


class CallChanges(NamedTuple):
    """A committed call, and what it did to each path."""

    call: Committed
    files: tuple[FileChange, ...]


class WorkspaceHistory:
    """The committed calls of a directory that can be undone.

    It takes no lock and changes nothing, so it works while an agent does. Calls that are forgotten
    while it looks are left out.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, store: str | os.PathLike[str] | None = None
    ) -> None:
        self.store = location_of(Path(root)) if store is None else Path(os.path.realpath(store))
        note = Note.read(self.store)
        self._past = Past(self.store, Seals("nothing") if note is None else note.seals(JOURNAL))
        self._disk = Disk(Tree(Path(root)))

    def calls(self) -> tuple[Committed, ...]:
        """Return the calls, oldest first."""
        past = self._past
        return tuple(delta.committed for delta in past.readable(past.serials()))

    def damaged(self) -> tuple[str, ...]:
        """Return a sentence for each call whose record is damaged; the other methods pass it by."""
        return tuple(str(error) for error in self._past.damaged().values())

    def changes(self) -> Iterator[CallChanges]:
        """Yield what each call changed, newest first. What somebody has changed since is no part
        of it: where a file is not as the call left it, that is said instead of a diff.
        """
        for delta, before, after in _backwards(self._past, self._disk):
            left = _Left(after)
            left.include(delta)
            paths = changed_paths(delta.records, before, after)
            yield CallChanges(delta.committed, tuple(file_changes(paths, before, left)))

    def diff(self, calls: Iterable[Committed], *, reverse: bool = False) -> tuple[FileChange, ...]:
        """Return what some calls changed together, in the order of the paths; or its reverse."""
        serials = {call.serial for call in calls}
        return _changes_of(self._past, serials, self._disk, reverse=reverse)

    def changed_since(self, calls: Iterable[Committed]) -> dict[str, tuple[str, ...]]:
        """Return the paths that are not as some calls left them, each with the ids of the other
        calls that have changed it since. Where there are none, somebody else has.
        """
        serials = {call.serial for call in calls}
        conflicts = _conflicts(self._past, serials, self._disk) if serials else {}
        return _named(conflicts.values())


def diff_of(past: Past, serials: Iterable[int], disk: Look) -> str:
    """Return what some calls changed together, as a diff that ``git apply`` takes."""
    return "".join(change.text for change in _changes_of(past, set(serials), disk))


def _changes_of(
    past: Past, serials: set[int], disk: Look, *, reverse: bool = False
) -> tuple[FileChange, ...]:
    """Return what is different between before the first and after the last of some calls, at the
    paths that they changed.
    """
    paths: set[Parts] = set()
    newest = _Left(disk)
    for delta, before, after in _backwards(past, disk):
        serial = delta.committed.serial
        if serial == max(serials):
            newest = _Left(after)
        if serial <= max(serials):
            newest.include(delta)
        if serial in serials:
            paths.update(changed_paths(delta.records, before, after))
        if serial == min(serials):
            sides = (newest, before) if reverse else (before, newest)
            return tuple(file_changes(sorted(paths), *sides))
    return ()


class _Left(Forward):
    """How calls left the paths that they changed: nothing shows of what others did there since."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self._after: dict[Parts, Entry | None] = {}
        self._known: dict[Parts, bool] = {}
        """Directories that came as a whole: whether all that is in them is known."""

    def include(self, delta: Delta) -> None:
        """Know how one more call, earlier than those before, left things."""
        self._after = {**delta.after, **self._after}
        for record in delta.records:
            if record.op == "moved":
                self._known.setdefault(record.path, False)
        for parts in _put_directories(delta):
            self._known.setdefault(parts, True)

    def node(self, parts: Parts) -> Entry | None:
        now = self.look.node(parts)
        if parts not in self._after:
            above = (parts[:depth] for depth in reversed(range(len(parts))))
            is_known = next((self._known[each] for each in above if each in self._known), False)
            return None if is_known else now
        left = self._after[parts]
        return now if matches(left, now) else left

    def read(self, parts: Parts) -> bytes:
        data = self.look.read(parts)
        self._check(parts, data)
        return data

    def link_target(self, parts: Parts) -> str:
        target = self.look.link_target(parts)
        self._check(parts, os.fsencode(target))
        return target

    def _check(self, parts: Parts, data: bytes) -> None:
        left = self._after.get(parts)
        if left is not None and left.digest not in (None, hashlib.sha256(data).hexdigest()):
            raise OSError(errno.ESTALE, "somebody has changed it since")


def _backwards(past: Past, disk: Look) -> Iterator[tuple[Delta, Look, Look]]:
    """Yield each call with how things were before and after it, newest first."""
    after = Layer(disk)
    with contextlib.ExitStack() as opened:
        for delta in past.readable(past.after(0)):
            try:
                before = _before(past, delta, after, opened)
            except OSError:
                return  # somebody else has changed the directory too much to tell what was there
            yield delta, before, after
            after = before


def _before(past: Past, delta: Delta, after: Layer, opened: contextlib.ExitStack) -> Layer:
    """Return how things were before a call."""
    taken = taken_by(past, delta)
    if taken.tree is not None:
        opened.callback(taken.tree.close)
    return undone(after, delta.records, taken)


# Checking


class _Conflict(NamedTuple):
    """A path that is not as a call left it."""

    parts: Parts
    calls: tuple[str, ...]
    """The other calls that have changed it since; with none of them, somebody else was the last."""
    top: Parts | None = None
    """The directory that it is in, if the call put that there as a whole."""


def _conflicts(past: Past, wanted: Set[int], disk: Disk) -> dict[int, list[_Conflict]]:
    """Return, for each of some calls, what is not as it left it, given that the later ones of them
    are undone. Nothing is changed, so it can be asked at any time.
    """
    found: dict[int, list[_Conflict]] = {}
    deltas = list(past.readable(past.after(min(wanted) - 1)))
    others: list[Delta] = []
    undoing: set[Parts] = set()
    again = _made_again(deltas, wanted)
    layer = Layer(disk)
    with contextlib.ExitStack() as opened:
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
                _Conflict(parts, _changed_by(others, parts, disk), top)
                for parts, top in checked.items()
                if not _is_as_left(parts, delta.after.get(parts), layer, again, top)
                # Where a later one changed it, that one is undone first: the history has it.
                or not (_is_within(parts, undoing) or _is_unchanged(parts, delta, layer, disk))
            ]
            undoing |= paths
            with contextlib.suppress(OSError):  # what is in the way of that was found above
                layer = _before(past, delta, layer, opened)
    return found


def _named(conflicts: Iterable[list[_Conflict]]) -> dict[str, tuple[str, ...]]:
    found = {each.parts: each.calls for some in conflicts for each in some}
    return {join_path(parts): calls for parts, calls in sorted(found.items())}


def _changed_by(others: Sequence[Delta], parts: Parts, disk: Look) -> tuple[str, ...]:
    """Return the calls, newest first, that changed a path; none if it is not as they left it."""
    left = [each for each in others if parts in each.after]
    if left and not _is_as_left(parts, left[0].after[parts], disk):
        return ()
    return tuple(each.committed.call_id for each in others if _touches(each.committed, parts))


def _is_as_left(
    parts: Parts,
    left: Entry | None,
    look: Look,
    again: Mapping[Parts, int] = MappingProxyType({}),
    top: Parts | None = None,
) -> bool:
    """Tell whether a look has at a path what a call left there."""
    try:
        now = look.node(parts)
    except OSError:
        return False  # something else is in the way
    if left is None or now is None or not left.is_directory or not now.is_directory:
        if not matches(left, now):
            return False
        # Of a file with several names nobody can tell: another may have been used to change it.
        is_known = left is not None and left.ctime_ns != 0 and now is not None and now.links == 1
        return not is_known or now.digest is None or left.is_like(now)
    # Which directory it is says nothing where what it holds is looked at, too.
    return top is not None or now.ino in (left.ino, again.get(parts))


def _is_unchanged(parts: Parts, delta: Delta, layer: Layer, disk: Disk) -> bool:
    """Tell whether the content and attributes of what is on the disk are as a call left them."""
    left, now = delta.after.get(parts), layer.node(parts)
    if left is None or left.kind not in ("file", "link") or not left.ctime_ns:
        return True
    in_history = now is not None and now.digest is not None
    return in_history or left.is_at(disk.tree, parts)


def _is_within(parts: Parts, others: Set[Parts]) -> bool:
    return bool(others) and any(parts[:depth] in others for depth in range(len(parts) + 1))


def _made_again(deltas: Iterable[Delta], wanted: Set[int]) -> dict[Parts, int]:
    """Return the directories that undoing later calls has made again: their inodes, by path.

    Each is what was there before those calls, though it is another one. Where a call that was not
    undone has been at work since, nobody can tell.
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
    return {p: ino for p, ino in found.items() if not any(_touches(each, p) for each in others)}


def _put_directories(delta: Delta) -> Iterator[Parts]:
    """Yield the directories that a call has put somewhere as a whole."""
    for record in delta.records:
        left = delta.after.get(record.path)
        if record.op == "was" and record.is_whole and left is not None and left.is_directory:
            yield record.path


def _touches(call: Committed, parts: Parts) -> bool:
    path = join_path(parts)
    return any(
        path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/")
        for other in call.paths
    )


# Undoing


def go_back(changes: Changes, history: History, serial: int) -> tuple[str, ...]:
    """Undo all that was committed after a place, as changes of an open transaction.

    Returns a sentence for each thing that was left alone.
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
    return tuple(undo.sentences)


def take_back(
    changes: Changes, history: History, serials: Sequence[int], *, force: bool
) -> tuple[str, ...]:
    """Undo just these committed calls, as changes of an open transaction.

    Raises UndoRefused where something is not as they left it, unless forced: then it is replaced,
    and so kept in the history. Returns a sentence for each thing that is not as it was before them.
    """
    conflicts = (
        {} if force else _named(_conflicts(history, set(serials), Disk(changes.tree)).values())
    )
    if conflicts:
        raise UndoRefused(conflicts)
    undo = _Undo(changes, history, force=force)
    newest_first = sorted(serials, reverse=True)
    for serial in newest_first:
        undo.call(history.read(serial))
    if newest_first == history.after(newest_first[-1] - 1):
        undo.set_times()  # else what stays has changed directories since
    return tuple(undo.sentences)


class _Undo:
    """Undoing committed calls, newest first."""

    def __init__(self, changes: Changes, history: History, *, force: bool = False) -> None:
        self.changes = changes
        self.history = history
        self.force = force
        """Whether what cannot be put back is told, and the rest is undone."""
        self.sentences: list[str] = []
        self._left: set[Parts] = set()
        """What is left alone, with all that is below it."""
        self._times: dict[Parts, int] = {}

    def call(self, delta: Delta, conflicts: Sequence[_Conflict] = ()) -> None:
        """Undo one committed call, but for what is not as it left it."""
        self._leave(delta, conflicts)
        for record in reversed(delta.records):
            if any(_is_within(parts, self._left) for parts in record.paths):
                continue
            try:
                self._undo(record, delta)
            except OSError as error:
                if not self.force:
                    raise
                self._left.add(record.path)
                self.sentences.append(
                    f"{shown(join_path(record.path))} could not be put back as it was:"
                    f" {error.strerror or error}"
                )

    def _leave(self, delta: Delta, conflicts: Sequence[_Conflict]) -> None:
        """Leave alone what is not as a call left it, and say so."""
        changed = {each.parts for each in conflicts if each.top is None}
        for record in reversed(delta.records):
            for parts in record.paths:
                if parts in changed and not _is_within(parts, self._left):
                    self._left.add(parts)
                    self.sentences.append(
                        f"{shown(join_path(parts))} was changed by someone else since, and is left"
                        f" as it is{self._kept_aside(parts, record, delta)}"
                    )
        inside: dict[Parts, list[Parts]] = {}
        for each in conflicts:
            if each.top is not None and not _is_within(each.top, self._left):
                inside.setdefault(each.top, []).append(each.parts)
        for top, parts in inside.items():
            self._left.add(top)
            names = ", ".join(shown(join_path(each)) for each in sorted(parts)[:3])
            self.sentences.append(
                f"{shown(join_path(top))} is left as it is: someone else has changed {names} in it"
            )

    def _kept_aside(self, parts: Parts, record: Record, delta: Delta) -> str:
        """Keep what would have been put back where it can be found, and say where."""
        if record.before is None or parts != record.path:
            return ""
        place = self.changes.store.left(parts)
        folder = Tree(place.parent)
        try:
            self._make(record, record.before, folder, place.name, delta)
        except OSError:
            return ""
        finally:
            folder.close()
        return f"; what was there before is in {place}"

    def _undo(self, record: Record, delta: Delta) -> None:
        if record.op == "moved" and record.origin is not None:
            self.changes.rename(record.path, record.origin)
            self._follow(record.path, record.origin)
        else:
            self._put_back(record, delta)
        self._times.update(record.times)

    def _follow(self, path: Parts, origin: Parts) -> None:
        """Know directories by the names they have now that one was moved back."""
        depth = len(path)
        for known in [known for known in self._times if known[:depth] == path]:
            self._times[(*origin, *known[depth:])] = self._times.pop(known)

    def _forget(self, parts: Parts) -> None:
        """Forget what was made at a path, or below it, and goes now."""
        depth = len(parts)
        self._times = {p: mtime for p, mtime in self._times.items() if p[:depth] != parts}

    def _holds_more(self, parts: Parts) -> bool:
        """Leave a directory alone that is not empty now that what the call put there is gone."""
        names = sorted(self.changes.tree.names(parts))
        if names:
            self._left.add(parts)
            held = ", ".join(shown(join_path((*parts, name))) for name in names[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            self.sentences.append(
                f"{shown(join_path(parts))} holds something that is not from these calls,"
                f" and is left as it is: {held}{more}"
            )
        return bool(names)

    def _put_back(self, record: Record, delta: Delta) -> None:
        before, parts = record.before, record.path
        status = self.changes.tree.status(parts)
        is_directory = status is not None and stat.S_ISDIR(status.st_mode)
        if before is not None and before.is_directory and record.kept is None:
            if status is not None and not is_directory:
                self._remove(parts)
            if not is_directory:
                self.changes.make_directory(parts)
            self._set_attributes(parts, before)
        elif is_directory and not record.is_whole and self._holds_more(parts):
            return  # it is told path by path: what is in it is somebody else's by now
        elif before is None:
            if status is not None:
                self._remove(parts)
        elif not record.names and before.kind != "file" and self._looks_like(parts, before):
            self._set_attributes(parts, before)
        elif record.source is not None and _is_linked(status) and before.digest is not None:
            self._write_in_place(parts, before, before.digest)
        elif not self._make_again(record, before, delta):
            self._left.add(parts)
            self.sentences.append(
                f"{shown(join_path(parts))} could not be put back: its content was not kept"
            )

    def _looks_like(self, parts: Parts, before: Entry) -> bool:
        now = capture(self.changes.tree, parts)
        return now is not None and (now.kind, now.pipe, now.target) == (
            before.kind,
            before.pipe,
            before.target,
        )

    def _write_in_place(self, parts: Parts, before: Entry, digest: str) -> None:
        """Give a file with several names its content back, for all of them."""
        now = capture(self.changes.tree, parts, read=True)
        if now is not None and now.digest != digest:
            self.changes.write(parts, self.changes.store.objects.read(digest))
        if now is None or not now.is_like(before) or now.mtime_ns != before.mtime_ns:
            self._set_attributes(parts, before)

    def _make_again(self, record: Record, before: Entry, delta: Delta) -> bool:
        """Put back what a call has replaced; False if it was not kept."""
        parts, store = record.path, self.changes.store
        staged = store.tx / store.fresh()
        try:
            self._make(record, before, store.tree, staged.name, delta)
        except FileNotFoundError:
            return False
        self._forget(parts)
        above = self.changes.tree.status(parts[:-1])
        if above is not None:  # another name of a file may be in a directory that did not change
            self._times.setdefault(parts[:-1], above.st_mtime_ns)
        self.changes.put_file(parts, staged)
        return True

    def _remove(self, parts: Parts) -> None:
        self._forget(parts)
        try:
            self.changes.remove(parts)
        except PermissionError:
            # The call closed the directory to writing; that is undone next.
            self.changes.set_attributes(parts[:-1], mode=0o700)
            self.changes.remove(parts)

    def _make(self, record: Record, before: Entry, tree: Tree, name: str, delta: Delta) -> None:
        """Make again what a call has replaced, at a free name."""
        if before.kind == "file":
            self.history.make_file(before, tree, name)
        elif before.is_directory and record.kept is not None:
            self.history.copy_tree(delta, record.kept, tree, name)
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
        """Give directories the times they had, now that nothing changes in them any more."""
        for parts, mtime in self._times.items():
            with contextlib.suppress(OSError):  # not there, or not a directory any more
                status = self.changes.tree.status(parts)
                if status is not None and stat.S_ISDIR(status.st_mode):
                    self.changes.set_attributes(parts, mtime_ns=mtime)


def _is_linked(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISREG(status.st_mode) and status.st_nlink > 1
