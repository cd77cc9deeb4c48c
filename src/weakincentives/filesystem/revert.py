"""Going back over committed calls, without touching what someone else has changed since."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from weakincentives.errors import UndoRefused
from weakincentives.filesystem.history import Committed, Delta, History, Past
from weakincentives.filesystem.journal import Changes, lasting, matches
from weakincentives.filesystem.layers import Disk, Layer, Look, Node, taken_by, undone, walk
from weakincentives.filesystem.protocol import Parts, join_path, shown
from weakincentives.filesystem.records import Record
from weakincentives.filesystem.store import Entry, apply_entry
from weakincentives.filesystem.tree import Ident, Tree, ident_of

_NO_CHANGES = ("external", "again")
"""Records that only say how something came about."""


def go_back(changes: Changes, history: History, serial: int) -> tuple[str, ...]:
    """Undo all that was committed after a place, as changes of an open transaction.

    Returns a sentence for each thing that was left alone.
    """
    going = _Going(changes, history)
    later = history.after(serial)
    going.sentences += [str(error) for error in history.damaged(later).values()]
    for delta in history.readable(later):
        going.undo(delta)
    going.set_times()
    return tuple(going.sentences)


def take_back(
    changes: Changes, history: History, serials: Sequence[int], *, force: bool
) -> tuple[str, ...]:
    """Undo just these committed calls, as changes of an open transaction.

    Raises UndoRefused where something is not as they left it, unless forced: then it is replaced,
    and so kept in the history. Returns a sentence for each thing that is not as it was before them.
    """
    going = _Going(changes, history, overrules=force, again=_made_again(history, set(serials)))
    newest_first = sorted(serials, reverse=True)
    for serial in newest_first:
        going.undo(history.read(serial))
    if newest_first == history.after(newest_first[-1] - 1):
        going.set_times()  # else what stays has changed directories since
    if going.left and not force:
        raise UndoRefused({join_path(parts): () for parts in going.left})
    return tuple(going.sentences)


def obstacles(past: Past, serials: Iterable[int], disk: Disk) -> dict[str, tuple[str, ...]]:
    """Return what is in the way of undoing just these calls: paths that are not as they left them.

    With each path come the other calls that have changed it since; with none of them, somebody
    else has, and was the last to do so. Nothing is changed, so it can be asked at any time.
    """
    wanted = set(serials)
    found: dict[Parts, tuple[str, ...]] = {}
    others: list[Delta] = []
    known: dict[Parts, Entry] = {}
    undoing: set[Parts] = set()
    again = _made_again(past, wanted)
    layer = Layer(disk)
    with contextlib.ExitStack() as opened:
        for delta in past.readable(past.after(min(wanted) - 1)):
            if delta.committed.serial not in wanted:
                others.append(delta)
                continue
            changes = [record for record in delta.records if record.op not in _NO_CHANGES]
            paths = {parts for record in changes for parts in _paths(record)}
            differing = {
                parts
                for parts in paths & delta.after.keys()
                if not _is_as(parts, delta, known, again, layer)
            }
            inside: set[Parts] = set()
            for top in _put_directories(changes, delta):
                now = {parts: _ident(node) for parts, node in walk(layer, [top])}
                differing |= _changed_inside(top, delta, now)
                inside |= now.keys()
            # Only where it is still this call that says which: else a later one is undone first.
            for parts in (paths | inside) & delta.marks.keys():
                if not _is_within(parts, undoing) and not delta.marks[parts].is_at(
                    disk.tree, parts
                ):
                    differing.add(parts)
            undoing |= paths
            for parts in differing:
                found[parts] = _changed_by(others, parts, disk)
            # What was there before the call: the first of its changes of a path says so.
            known |= {r.path: r.before for r in reversed(changes) if r.before is not None}
            taken = taken_by(past, delta)
            if taken.tree is not None:
                opened.callback(taken.tree.close)
            with contextlib.suppress(OSError):  # what is in the way of that was found above
                layer = undone(Layer(layer), delta.records, taken)
    return {join_path(parts): calls for parts, calls in sorted(found.items())}


def _changed_by(others: Sequence[Delta], parts: Parts, disk: Look) -> tuple[str, ...]:
    """Return the calls, newest first, that changed a path; none if it is not as they left it."""
    left = [each for each in others if parts in each.after]
    if left and not _is_as(parts, left[0], {}, {}, disk):
        return ()
    return tuple(each.committed.call_id for each in others if _touches(each.committed, parts))


def _is_as(
    parts: Parts,
    delta: Delta,
    known: Mapping[Parts, Entry],
    again: Mapping[Parts, int],
    look: Look,
) -> bool:
    """Tell whether something is as a call left it, as far as size and time tell."""
    left = delta.after[parts]
    if _is_known(parts, delta, known.get(parts)):
        return True
    try:
        node = look.node(parts)
    except OSError:
        return False  # something else is in the way
    now = None if node is None else _ident(node)
    if _is_another(parts, delta, known.get(parts)):
        return False
    return matches(left, now) or _is_made_again(left, parts, now, again)


def _is_known(parts: Parts, delta: Delta, entry: Entry | None) -> bool:
    """Tell whether a call left what another, which is undone before it, has then replaced."""
    if entry is None or not _may_be(parts, delta, entry):
        return False
    return matches(delta.after[parts], entry.ident)


def _may_be(parts: Parts, delta: Delta, entry: Entry) -> bool:
    mark = delta.marks.get(parts)
    return mark is None or mark.is_of(entry)


def _is_another(parts: Parts, delta: Delta, entry: Entry | None) -> bool:
    """Tell whether what a later call replaced is not what this one left.

    Of a file with several names nobody can tell: it may have been changed by way of another.
    """
    return entry is not None and entry.nlink == 1 and not _may_be(parts, delta, entry)


def _is_within(parts: Parts, others: Set[Parts]) -> bool:
    return bool(others) and any(parts[:depth] in others for depth in range(len(parts) + 1))


def _ident(node: Node) -> Ident:
    is_directory = node.kind == "directory"
    return Ident(node.ino, -1, -1) if is_directory else Ident(node.ino, node.size, node.mtime_ns)


def _made_again(past: Past, wanted: Set[int]) -> dict[Parts, int]:
    """Return the directories that undoing later calls has made again: their inodes, by path.

    Each is what was there before those calls, though it is another one. Where a call that was not
    undone has been at work since, nobody can tell.
    """
    undone: set[str] = set()
    found: dict[Parts, int] = {}
    others: list[Committed] = []
    for delta in past.readable(past.after(min(wanted))):
        if delta.committed.serial in wanted or delta.committed.call_id in undone:
            continue
        if not delta.committed.undoes:
            others.append(delta.committed)
            continue
        undone.update(delta.committed.undoes)
        for parts, left in delta.after.items():
            if left is not None and left.size == -1:
                found.setdefault(parts, left.ino)
    return {p: ino for p, ino in found.items() if not any(_touches(each, p) for each in others)}


def _is_made_again(
    left: Ident | None, parts: Parts, now: Ident | None, again: Mapping[Parts, int]
) -> bool:
    is_directory = left is not None and left.size == -1
    return is_directory and now is not None and again.get(parts) == now.ino


def _put_directories(changes: Iterable[Record], delta: Delta) -> Iterator[Parts]:
    """Yield the directories that a call has put somewhere as a whole."""
    for record in changes:
        left = delta.after.get(record.path)
        if record.op == "put" and left is not None and left.size == -1:
            yield record.path


def _changed_inside(top: Parts, delta: Delta, now: Mapping[Parts, Ident]) -> set[Parts]:
    """Return what is not as a call left it in a directory that it put there as a whole."""
    depth = len(top)
    left = {parts: each for parts, each in delta.after.items() if parts[:depth] == top and each}
    return {
        parts for parts in left.keys() | now.keys() if not _same(left.get(parts), now.get(parts))
    }


def _same(left: Ident | None, now: Ident | None) -> bool:
    if left is not None and now is not None and left.size == now.size == -1:
        return True  # which directory it is says nothing: what it holds is looked at, too
    return matches(left, now)


def _touches(call: Committed, parts: Parts) -> bool:
    path = join_path(parts)
    return any(
        path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/")
        for other in call.paths
    )


class _Going:
    """What is known on the way back."""

    def __init__(
        self,
        changes: Changes,
        history: History,
        *,
        overrules: bool = False,
        again: Mapping[Parts, int] | None = None,
    ) -> None:
        self.changes = changes
        self.history = history
        self._again = again or {}
        """Directories that an earlier undo made again: each is as good as the one it stands for."""
        self.overrules = overrules
        """Whether what someone else has changed since is replaced."""
        self.sentences: list[str] = []
        self.left: set[Parts] = set()
        """What someone else has changed since, and was left alone."""
        self._state: dict[Parts, Ident | None] = {}
        """What the history says is at the paths that were put back."""
        self._entries: dict[Parts, Entry] = {}
        """The same in full, of what a call had replaced."""
        self._directories: set[Parts] = set()
        """Those that were made here: each is what the history says, though it is another one."""
        self._left: set[Parts] = set()
        self._undone: set[Parts] = set()
        """All that was put back so far, where it was to be."""
        self._times: dict[Parts, int] = {}
        self._former: dict[Parts, int] = {}
        """The names that were made here, with the inode that the file at each had in the history:
        the one it has now may be that of a file that is no more."""
        self._made: dict[int, list[Parts]] = {}
        """The same by inode; some of these may be gone again."""
        self._stayed: dict[int, list[Parts]] | None = None
        """The names of all other files, by inode; looked up when first needed."""

    def undo(self, delta: Delta) -> None:
        """Undo one committed call, as far as things are as it left them."""
        changes = [r for r in reversed(delta.records) if r.op not in _NO_CHANGES]
        checked: set[Parts] = set()
        paths = {parts for record in changes for parts in _paths(record)}
        # All before the first is undone: one name of a file is changed by way of another.
        for record in changes:
            for parts in _paths(record):
                if parts not in checked and not self._is_left(record):
                    if not self.overrules and not self._is_as_left(parts, delta):
                        self.left.add(parts)
                        self._leave(parts, record, delta)
                    checked.add(parts)
        for top in () if self.overrules else _put_directories(changes, delta):
            self._leave_if_changed_inside(top, delta)
        for record in changes:
            if not self._is_left(record):
                try:
                    self._undo(record, delta)
                except OSError as error:
                    if not self.overrules:
                        raise
                    self._left.add(record.path)
                    self.sentences.append(
                        f"{shown(join_path(record.path))} could not be put back as it was:"
                        f" {error.strerror or error}"
                    )
        self._undone |= paths

    def _is_left(self, record: Record) -> bool:
        return any(_is_within(parts, self._left) for parts in _paths(record))

    def _is_as_left(self, parts: Parts, delta: Delta) -> bool:
        """Tell whether what is at a path is what the call left there."""
        if parts not in delta.after:
            return True
        left = delta.after[parts]
        if _is_another(parts, delta, self._entries.get(parts)):
            return False
        if parts in self._state and matches(left, self._state[parts]):
            return True
        if left is not None and left.size == -1 and parts in self._directories:
            return True
        try:
            status = self.changes.tree.status(parts)
        except OSError:
            return False  # something else is in the way
        # Also of what was put back: a file may have been so by another of its names.
        now = None if status is None else ident_of(status)
        if status is not None and not self._has_its_mark(parts, delta):
            return False
        return matches(left, now) or _is_made_again(left, parts, now, self._again)

    def _has_its_mark(self, parts: Parts, delta: Delta) -> bool:
        # Only where it is still this call that says which.
        if parts not in delta.marks or _is_within(parts, self._undone):
            return True
        return delta.marks[parts].is_at(self.changes.tree, parts)

    def _leave_if_changed_inside(self, top: Parts, delta: Delta) -> None:
        if _is_within(top, self._left):
            return
        now = {parts: lasting(status) for parts, status in self.changes.tree.walk(top)}
        changed = _changed_inside(top, delta, now)
        changed |= {parts for parts in now if not self._has_its_mark(parts, delta)}
        if changed:
            self.left |= changed
            self._left.add(top)
            names = ", ".join(shown(join_path(parts)) for parts in sorted(changed)[:3])
            self.sentences.append(
                f"{shown(join_path(top))} is left as it is: someone else has changed {names} in it"
            )

    def _leave(self, parts: Parts, record: Record, delta: Delta) -> None:
        self._left.add(parts)
        kept = ""
        if record.before is not None and parts == record.path:
            place = self.changes.store.left(parts)
            folder = Tree(place.parent)
            try:
                self._make(record, record.before, folder, place.name, delta)
            except OSError:
                pass
            else:
                kept = f"; what was there before is in {place}"
            finally:
                folder.close()
        self.sentences.append(
            f"{shown(join_path(parts))} was changed by someone else since, and is left as it is"
            f"{kept}"
        )

    def _undo(self, record: Record, delta: Delta) -> None:
        before = record.before
        match record.op:
            case "moved" | "moved over" if record.origin is not None:
                self.changes.rename(record.path, record.origin)
                self._entries.pop(record.path, None)
                self._entries.pop(record.origin, None)
                self._follow(record.path, record.origin)
                self._state[record.origin] = record.old
                self._state[record.path] = None
            case "made":
                self._unmake(record)
            case "attributes" if before is not None:
                self._set_attributes(record.path, before)
            case "put" | "gone" | "edit" | "found":
                self._put_back(record, delta)
            case _:
                pass
        for parts, mtime in record.times:
            self._times[parts] = mtime

    def _follow(self, path: Parts, origin: Parts) -> None:
        """Know things by the names they have now that one, or a directory, was moved back."""
        depth = len(path)
        for known in [known for known in self._times if known[:depth] == path]:
            self._times[(*origin, *known[depth:])] = self._times.pop(known)
        for known in [known for known in self._former if known[:depth] == path]:
            self._note((*origin, *known[depth:]), self._former.pop(known))
        moved = {known for known in self._directories if known[:depth] == path}
        self._directories -= moved
        self._directories |= {(*origin, *known[depth:]) for known in moved}
        self._stayed = None

    def _note(self, parts: Parts, ino: int) -> None:
        """Note that a path is a name of what was a file in the history."""
        self._former[parts] = ino
        self._made.setdefault(ino, []).append(parts)

    def _forget(self, parts: Parts, status: os.stat_result | None) -> None:
        """Forget what was made at a path, or below it, and goes now."""
        depth = len(parts)
        self._former.pop(parts, None)
        if status is not None and stat.S_ISDIR(status.st_mode):
            self._former = {p: ino for p, ino in self._former.items() if p[:depth] != parts}
            self._directories = {p for p in self._directories if p[:depth] != parts}
            self._forget_times(parts)

    def _unmake(self, record: Record) -> None:
        if self.changes.tree.status(record.path) is None:
            return
        if self._holds_more(record.path):
            return
        self._remove(record.path)
        self._directories.discard(record.path)
        self._forget_times(record.path)
        self._state[record.path] = None

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
        before, parts, tree = record.before, record.path, self.changes.tree
        status = tree.status(parts)
        # What was found is told path by path: what is in a directory is somebody else's by now.
        was_directory = before is not None and before.kind == "directory"
        is_directory = status is not None and stat.S_ISDIR(status.st_mode)
        if record.op == "found" and is_directory and not was_directory and self._holds_more(parts):
            return
        if before is None:
            if status is not None:
                self._forget(parts, status)
                self._remove(parts)
            self._state[parts] = None
            self._entries.pop(parts, None)
            return
        if before.kind == "directory" and record.op == "found":
            if status is not None and not stat.S_ISDIR(status.st_mode):
                self.changes.remove(parts)
                status = None
            if status is None:
                self.changes.make_directory(parts)
            self._set_attributes(parts, before)
        elif before.kind == "file" and status is not None and self._is_same(parts, status, before):
            self.changes.write(parts, self.changes.store.objects.read(before.digest or ""))
            self._set_attributes(parts, before)
            now = self._file(parts)
            if now is not None and now.st_ino != status.st_ino:
                self._note(parts, before.ino)  # it was the last name: the file is another one now
        elif not self._link(parts, before) and not self._make_again(record, before, delta):
            self._left.add(parts)
            self.sentences.append(
                f"{shown(join_path(parts))} could not be put back: its content was not kept"
            )
            return
        self._state[parts] = before.ident
        self._entries[parts] = before

    def _is_same(self, parts: Parts, status: os.stat_result, before: Entry) -> bool:
        """Tell whether a file with several names is the one it was, or stands for it now."""
        if before.nlink < 2 or before.digest is None or not stat.S_ISREG(status.st_mode):
            return False
        return self._former.get(parts, status.st_ino) == before.ino

    def _make_again(self, record: Record, before: Entry, delta: Delta) -> bool:
        """Put back what a call has replaced; False if it was not kept."""
        parts, store = record.path, self.changes.store
        staged = store.stage()
        try:
            files = self._make(record, before, store.tree, staged.name, delta)
        except FileNotFoundError:
            return False
        others = {
            link.place: other
            for link in delta.links.get(record.kept or "", ())
            if (other := self._other_name(files[link.place])) is not None
        }
        self._forget(parts, self.changes.tree.status(parts))
        self.changes.put(parts, staged)
        self._forget_times(parts)
        for place, file in files.items():
            there, other = (*parts, *place), others.get(place)
            if file.size == -1:
                self._directories.add(there)
            elif other is None or not self._relink(there, other, file.ino):
                self._note(there, file.ino)
        return True

    def _other_name(self, file: Ident) -> Parts | None:
        """Return a name of a file that is as it was: one that stayed, or one that is back."""
        for name in reversed(self._made.get(file.ino, ())):
            if self._former.get(name) == file.ino and self._is(name, file):
                return name
        for name in self._names_of(file.ino):
            if name not in self._former and self._is(name, file, file.ino):
                return name
        return None

    def _names_of(self, ino: int) -> list[Parts]:
        if self._stayed is None:
            self._stayed = {}
            for place, status in self.changes.tree.walk(()):
                if stat.S_ISREG(status.st_mode) and place not in self._former:
                    self._stayed.setdefault(status.st_ino, []).append(place)
        return self._stayed.setdefault(ino, [])

    def _is(self, parts: Parts, file: Ident, ino: int | None = None) -> bool:
        status = self._file(parts)
        if status is None or (ino is not None and status.st_ino != ino):
            return False
        return matches(file, ident_of(status))

    def _file(self, parts: Parts) -> os.stat_result | None:
        try:
            status = self.changes.tree.status(parts)
        except OSError:
            return None  # something else is in the way
        return status if status is not None and stat.S_ISREG(status.st_mode) else None

    def _remove(self, parts: Parts) -> None:
        try:
            self.changes.remove(parts)
        except PermissionError:
            # The call closed the directory to writing; that is undone next.
            self.changes.set_attributes(parts[:-1], mode=0o700)
            self.changes.remove(parts)

    def _link(self, parts: Parts, before: Entry) -> bool:
        """Make a path one more name of the file it was a name of; False where there is none."""
        if before.kind != "file" or before.nlink < 2:
            return False
        other = self._other_name(before.ident)
        if other is None or other == parts:
            return False
        self._forget(parts, self.changes.tree.status(parts))
        return self._add_name(parts, other, before.ino)

    def _relink(self, parts: Parts, other: Parts, ino: int) -> bool:
        """Make a file in a directory that is back one more name of the one that stayed."""
        above = self.changes.tree.status(parts[:-1])
        if above is None or not self._add_name(parts, other, ino):
            return False
        self._times.setdefault(parts[:-1], above.st_mtime_ns)
        return True

    def _add_name(self, parts: Parts, other: Parts, ino: int) -> bool:
        try:
            self.changes.add_name(other, parts)
        except OSError:
            return False  # not everybody may do so, nor on every filesystem
        if other in self._former:
            self._note(parts, ino)
        else:
            self._names_of(ino).append(parts)
        return True

    def _forget_times(self, parts: Parts) -> None:
        """Leave the times of a directory alone that is another one now."""
        self._times = {
            known: mtime for known, mtime in self._times.items() if known[: len(parts)] != parts
        }

    def _make(
        self, record: Record, before: Entry, tree: Tree, name: str, delta: Delta
    ) -> dict[Parts, Ident]:
        """Make again what a call has replaced, at a free name; returns the files it consists of."""
        match before.kind:
            case "file":
                self.history.make_file(before, tree, name)
                return {(): before.ident}
            case "symlink":
                os.symlink(before.target or "", name, dir_fd=tree.fd)
            case "fifo":
                os.mkfifo(name, 0o600, dir_fd=tree.fd)
            case "directory" if record.kept is not None:
                return self.history.copy_tree(delta, record.kept, tree, name)
            case _:
                raise FileNotFoundError(name)
        apply_entry(tree, (name,), before)
        return {}

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


def _paths(record: Record) -> tuple[Parts, ...]:
    return (record.path,) if record.origin is None else (record.path, record.origin)
