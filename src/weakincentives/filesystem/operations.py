"""What a transaction changed, as the values that the log stores: before and after, path by path.

Derived from the journal and from what the commit has at hand, so that its cost follows what
changed. A directory that was removed, moved or put somewhere as a whole is one change:

- a removed one has the content ``@operation/name``: it is kept under that name, unhashed, and what
  is in it is listed when first needed;
- of a moved one a manifest lists what is in it, by stat alone: its files stayed files;
- so does the manifest of one that arrived, with the digests that the commit has at hand.

What a transaction changed in such a directory besides has changes of its own, which are more
specific and win.
"""

from __future__ import annotations

import contextlib
import hashlib
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from weakincentives.filesystem.entry import Entry, capture, matches
from weakincentives.filesystem.journal import Record
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.tree import Tree
from weakincentives.log import Change, Stat, write_manifest
from weakincentives.log import Entry as Value


class Changed(NamedTuple):
    """What a transaction changed."""

    changes: tuple[Change, ...]
    times: tuple[tuple[Parts, int], ...]
    """The times of the directories in which it added or removed names, before that."""
    manifests: tuple[bytes, ...]


def changed(
    operation: str,
    records: Sequence[Record],
    entries: Mapping[int, Entry],
    left: Mapping[Parts, Entry | None],
    kept: Tree,
    tree: Tree,
    linked: Sequence[tuple[str, str, int]] = (),
) -> Changed:
    """Return what a transaction changed.

    Args:
        operation: The id of its operation.
        records: Its journal.
        entries: What records replaced, in full, by their numbers.
        left: What is now at each path in the journal.
        kept: Has what was displaced, by the names in the journal.
        tree: The workspace.
        linked: The hard-linked files in removed directories: under which names these are kept,
            where each is in there, and the inode that it had.
    """
    derivation = _Derivation(operation, records, entries, left, kept, tree)
    for name, inner, ino in linked:
        derivation.include_linked(name, tuple(inner.split("/")), ino)
    return derivation.result()


class _Origins:
    """Where what is at a path was before the transaction, as far as its records have been read."""

    def __init__(self) -> None:
        self.moved: dict[Parts, Parts | None] = {}
        """For the tops of what was moved or is new; None for what is new."""

    def of(self, path: Parts) -> Parts | None:
        if self.moved:
            for depth in reversed(range(len(path) + 1)):
                if path[:depth] in self.moved:
                    top = self.moved[path[:depth]]
                    return None if top is None else (*top, *path[depth:])
        return path

    def make(self, path: Parts) -> None:
        self.moved[path] = None

    def remove(self, path: Parts) -> None:
        """Note that a directory went with everything in it."""
        self._forget(path)
        self.moved[path] = None

    def move(self, origin: Parts, target: Parts) -> None:
        source, inner = self.of(origin), self._forget(origin)
        self._forget(target)
        self.moved[origin], self.moved[target] = None, source
        self.moved.update(((*target, *path), each) for path, each in inner.items() if path)

    def _forget(self, top: Parts) -> dict[Parts, Parts | None]:
        depth = len(top)
        below = [path for path in self.moved if path[:depth] == top]
        return {path[depth:]: self.moved.pop(path) for path in below}


class _Derivation:
    def __init__(
        self,
        operation: str,
        records: Sequence[Record],
        entries: Mapping[int, Entry],
        left: Mapping[Parts, Entry | None],
        kept: Tree,
        tree: Tree,
    ) -> None:
        self._operation = operation
        self._left = left
        self._kept = kept
        self._tree = tree
        self._origins = _Origins()
        self._before: dict[Parts, Entry | None] = {}
        """What was there before the transaction, as far as a record says it."""
        self._removed: dict[Parts, str] = {}
        """Under which names removed directories are kept, by where they were before."""
        self._moved: set[Parts] = set()
        """Where directories were before they were moved."""
        self._arrived: set[Parts] = set()
        """Where directories were put as a whole."""
        self._carried: set[Parts] = set()
        """Where directories were moved to that the transaction itself had made."""
        self._times: dict[Parts, int] = {}
        self._paths: set[Parts] = set()
        self._kept_at: dict[Parts, str] = {}
        """Where files in removed directories are kept that have changes of their own."""
        self._manifests: dict[Parts, tuple[str, bytes]] = {}
        self._groups: dict[int, int] = {}
        for index, record in enumerate(records):
            if record.is_change:
                self._read(record, entries.get(index))

    # Reading the records

    def _read(self, record: Record, entry: Entry | None) -> None:
        origins, path = self._origins, record.path
        for parts, time in record.times:
            if (before := origins.of(parts)) is not None:
                self._times.setdefault(before, time)
        self._paths.update(record.paths)
        if record.origin is not None:
            self._note(origins.of(record.origin), self._with_text(record))
            self._note(origins.of(path), None)
            source = origins.of(record.origin)
            if record.before is not None and record.before.is_directory:
                if source is None:
                    self._carried.add(path)
                else:
                    self._moved.add(source)
            origins.move(record.origin, path)
            return
        before = _in_full(record.before, entry)
        for each in (path, *record.others):
            self._note(origins.of(each), before)
        if before is None:
            origins.make(path)
        elif before.is_directory:
            source = origins.of(path)
            if record.saved is not None:
                if source is not None:
                    self._removed.setdefault(source, record.saved)
                self._note_carried(path, record.saved)
                origins.remove(path)
            elif source is not None:  # a program changed it
                self._times.setdefault(source, before.mtime_ns)
        elif record.after is not None and record.after.is_directory:
            origins.make(path)
        if record.is_whole and record.after is not None:
            self._arrived.add(path)

    def _with_text(self, record: Record) -> Entry | None:
        """Return what was moved, of a link with its text."""
        moved = record.before
        if moved is None or moved.kind != "link" or moved.target is not None:
            return moved
        places = [(self._kept, (record.saved,))] if record.saved is not None else []
        for tree, parts in (*places, (self._tree, record.path)):
            with contextlib.suppress(OSError):
                return moved._replace(target=tree.link_target(parts))
        return moved

    def _note_carried(self, top: Parts, saved: str) -> None:
        """Note where what was moved into a directory is kept: it goes along."""
        for path, source in self._origins.moved.items():
            if source is not None and len(path) > len(top) and path[: len(top)] == top:
                place = (f"@{self._operation}", saved, *path[len(top) :])
                self._kept_at.setdefault(source, "/".join(place))

    def _note(self, origin: Parts | None, entry: Entry | None) -> None:
        if origin is None:
            return
        known = self._before.setdefault(origin, entry)
        if known is None or entry is None or known.digest is not None or entry.digest is None:
            return
        if known.ino == entry.ino and matches(known, entry):  # it was only moved in between
            self._before[origin] = known._replace(digest=entry.digest)

    def include_linked(self, name: str, inner: Parts, ino: int) -> None:
        """Give a file in a removed directory a change of its own, to join its names again."""
        place = (f"@{self._operation}", name, *inner)
        for path, kept in self._kept_at.items():  # it was moved there
            top = tuple(kept.split("/"))
            if place[: len(top)] == top:
                self._include(path, place[len(top) :], place, ino)
                return
        source = next((path for path, saved in self._removed.items() if saved == name), None)
        if source is not None:
            self._include(source, inner, place, ino)

    def _include(self, source: Parts, inner: Parts, place: Parts, ino: int) -> None:
        twins = (each for each in self._before.values() if each is not None and each.ino == ino)
        # The one in the stash has been changed with its other names.
        entry = next(twins, None) or capture(self._kept, place[1:])
        path = (*source, *inner)
        if entry is not None and path not in self._before:
            self._before[path] = entry._replace(ino=ino, links=max(2, entry.links))
            self._kept_at[path] = "/".join(place)

    # Deriving

    def result(self) -> Changed:
        places = {
            source: path for path, source in self._origins.moved.items() if source is not None
        }
        inside = self._inside_arrived()
        changes: list[Change] = []
        for path in sorted({*self._before, *self._paths, *places.values()}):
            found, left = self._entry_before(path, places), self._entry_left(path)
            before, after = self._value(found), self._value(left)
            if before is not None and before.is_directory:
                before = before._replace(content=self._content_before(path, places))
            elif before is not None and before.kind == "file" and not before.content:
                before = before._replace(content=self._kept_at.get(path, ""))
            if after is not None and after.is_directory:
                after = after._replace(content=self._content_left(path, inside))
                if not after.content and not _is_plain(before) and self._came_along(path):
                    after = after._replace(content=self._manifest(path, self._listed(path)))
            if before is not None and before.is_plain_directory and not _is_plain(after):
                before = before._replace(content=self._content_gone(path, places))
            is_idle = before == after and (before is None or before.is_directory)
            if is_idle and not any(path[:depth] in self._paths for depth in range(len(path))):
                continue  # it was there only in between
            origin = self._origins.moved.get(path)
            if origin == path or after is None:
                origin = None
            changes.append(Change(path, before, after, origin, stat_of(found), stat_of(left)))
        manifests = tuple(data for _, data in self._manifests.values())
        return Changed(tuple(changes), tuple(sorted(self._times.items())), manifests)

    def _entry_before(self, path: Parts, places: Mapping[Parts, Parts]) -> Entry | None:
        if path in self._before:
            return self._before[path]
        for depth in reversed(range(len(path))):
            above, below = path[:depth], path[depth:]
            if above in self._removed:
                place = (self._removed[above], *below)
                self._kept_at[path] = "/".join((f"@{self._operation}", *place))
                return capture(self._kept, place)
            if above in self._moved:
                place = places.get(above)
                return None if place is None else capture(self._tree, (*place, *below))
            if above in self._before:
                return None
        return None

    def _entry_left(self, path: Parts) -> Entry | None:
        if path in self._left:
            return self._left[path]
        status = self._tree.status_if_reached(path)
        return None if status is None else capture(self._tree, path, status=status)

    def _content_before(self, path: Parts, places: Mapping[Parts, Parts]) -> str:
        if path in self._removed:
            return f"@{self._operation}/{self._removed[path]}"
        if path in self._moved and path in places:
            return self._manifest(places[path], self._listed(places[path]))
        return self._kept_at.get(path, "") if path in self._moved else ""

    def _content_gone(self, path: Parts, places: Mapping[Parts, Parts]) -> str:
        """Return what was in a directory that went along with another one."""
        for depth in reversed(range(len(path))):
            above, below = path[:depth], path[depth:]
            if above in self._removed:
                place = (self._removed[above], *below)
                there = self._kept.status_if_reached(place)
                is_kept = there is not None and stat.S_ISDIR(there.st_mode)
                return "/".join((f"@{self._operation}", *place)) if is_kept else ""
            if above in self._moved and above in places:
                place = (*places[above], *below)
                there = self._tree.status_if_reached(place)
                is_there = there is not None and stat.S_ISDIR(there.st_mode)
                return self._manifest(place, self._listed(place)) if is_there else ""
        return ""

    def _content_left(self, path: Parts, inside: Mapping[Parts, dict[Parts, Entry]]) -> str:
        if self._origins.moved.get(path) is not None:
            return self._manifest(path, self._listed(path))
        if path in self._carried:
            return self._manifest(path, self._listed(path, read=True))
        for depth in reversed(range(len(path) + 1)):
            if path[:depth] in inside:
                inner, below = path[depth:], inside[path[:depth]].items()
                listed = [(p[len(inner) :], e) for p, e in below if p[: len(inner)] == inner != p]
                return self._manifest(path, iter(listed)) if listed else ""
        return ""

    def _came_along(self, path: Parts) -> bool:
        """Whether what is in a directory came with one that was moved as a whole."""
        above = (path[:depth] for depth in range(len(path)))
        return any(self._origins.moved.get(each) is not None for each in above)

    def _inside_arrived(self) -> dict[Parts, dict[Parts, Entry]]:
        """Return what is in directories that arrived as a whole, as the commit found it."""
        found: dict[Parts, dict[Parts, Entry]] = {top: {} for top in self._arrived}
        if not found:
            return {}
        for path, entry in self._left.items():
            if entry is not None and path not in self._paths:
                for depth in reversed(range(len(path))):
                    if path[:depth] in found:
                        found[path[:depth]][path[depth:]] = entry
                        break
        return found

    def _listed(self, top: Parts, *, read: bool = False) -> Iterator[tuple[Parts, Entry]]:
        """Yield what is in a directory now, by stat alone unless its files are read."""
        for path, status in self._tree.walk(top, lenient=True):
            inner = path[len(top) :]
            if inner and not inner[-1].startswith(TEMPORARY):
                entry = Entry.of(status)
                if entry.kind == "link":
                    with contextlib.suppress(OSError):
                        entry = entry._replace(target=self._tree.link_target(path))
                elif read and entry.kind == "file":
                    with contextlib.suppress(OSError):
                        entry = capture(self._tree, path, read=True) or entry
                yield inner, entry

    def _manifest(self, top: Parts, listed: Iterator[tuple[Parts, Entry]]) -> str:
        known = self._manifests.get(top)
        if known is None:
            rows: dict[Parts, tuple[Value, Stat | None]] = {}
            for path, entry in listed:
                value = self._value(entry)
                if value is not None:
                    rows[path] = value, stat_of(entry)
            data = write_manifest(rows)
            known = self._manifests[top] = hashlib.sha256(data).hexdigest(), data
        return known[0]

    def _value(self, entry: Entry | None) -> Value | None:
        if entry is None:
            return None
        value = value_of(entry)
        if entry.kind != "file" or entry.links < 2:
            return value
        group = self._groups.setdefault(entry.ino, len(self._groups) + 1)
        return value._replace(group=group)


def _is_plain(entry: Value | None) -> bool:
    return entry is not None and entry.is_plain_directory


def value_of(entry: Entry) -> Value:
    """Return an entry as the log stores it; of a directory without what is in it."""
    is_file = entry.kind == "file"
    return Value(
        "pipe" if entry.pipe else entry.kind,
        entry.mode,
        entry.uid,
        entry.gid,
        entry.mtime_ns,
        entry.size if is_file else 0,
        (entry.target or "") if entry.kind == "link" else (entry.digest or "") if is_file else "",
        entry.xattrs,
    )


def stat_of(entry: Entry | None) -> Stat | None:
    """Return what an entry is recognised by; None if its inode is not known."""
    if entry is None or not entry.ino:
        return None
    return Stat(entry.device, entry.ino, entry.ctime_ns, entry.links)


def _in_full(before: Entry | None, entry: Entry | None) -> Entry | None:
    """Return the entry of what was kept, which may be a copy, with the original's identity."""
    if before is None or entry is None:
        return entry or before
    return entry._replace(ino=before.ino, device=before.device, ctime_ns=before.ctime_ns)
