"""What committed calls changed: for each path what was there before, up to a limit in bytes."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from weakincentives.call import ToolCall
from weakincentives.clock import SYSTEM_CLOCK, Clock
from weakincentives.errors import HistoryDamaged, StoreRefused
from weakincentives.filesystem.pack import data_of, path_of
from weakincentives.filesystem.protocol import Parts, join_path
from weakincentives.filesystem.records import JOURNAL, Journal, Record, Source, read_journal
from weakincentives.filesystem.store import (
    Entry,
    Objects,
    Store,
    apply_entry,
    checked_name,
    checked_parts,
    copy_content,
    copy_exactly,
    digest_of,
    entry_at,
)
from weakincentives.filesystem.tree import Ident, Tree, ident_of, remove_tree, xattrs_of
from weakincentives.state import Seals

logger = logging.getLogger("weakincentives.filesystem")

DEFAULT_LIMIT = 256 << 20
MAX_ENTRIES = 10_000

CHANGES = ("put", "gone", "edit", "moved", "moved over", "made", "attributes", "found")
"""The records that are changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A call that changed files, and was kept."""

    serial: int
    """Its place in the history of the workspace; the first is 1."""
    call_id: str
    tool: str
    """Empty for changes that were made outside of any call."""
    time: float
    """Seconds since the epoch."""
    paths: tuple[str, ...]
    """What it changed, sorted; a directory stands for all that is in it."""
    size: int
    """Bytes that are kept only so that it can be undone."""
    undoes: tuple[str, ...] = ()
    """The calls that it took back."""


class Mark(NamedTuple):
    """What tells whether somebody else has changed a file since, whatever they did to its times."""

    mode: int
    uid: int
    gid: int
    ctime_ns: int
    """Nobody can set it: while it is the same, so is all else."""
    digest: str | None
    """Of the content, or of a link's text; None where that was too much to read."""
    xattrs: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(
        cls, status: os.stat_result, digest: str | None, xattrs: tuple[tuple[str, bytes], ...]
    ) -> Mark:
        """Return the mark of something with this status."""
        mode = stat.S_IMODE(status.st_mode)
        return cls(mode, status.st_uid, status.st_gid, status.st_ctime_ns, digest, xattrs)

    def encode(self) -> list[Any]:
        """Return the mark as JSON takes it."""
        return [*self[:5], [[name, value.hex()] for name, value in self.xattrs]]

    @classmethod
    def decode(cls, values: Sequence[Any]) -> Mark:
        """Return the mark that :meth:`encode` wrote."""
        mode, uid, gid, ctime_ns, digest, xattrs = values
        decoded = tuple((name, bytes.fromhex(value)) for name, value in xattrs)
        return cls(mode, uid, gid, ctime_ns, digest, decoded)

    def is_of(self, entry: Entry) -> bool:
        """Tell whether something that a later call replaced was as it is marked."""
        if entry.kind != "file":
            return True
        if (entry.mode, entry.uid, entry.gid) != self[:3] or entry.xattrs != self.xattrs:
            return False
        return entry.digest is None or self.digest is None or entry.digest == self.digest

    def is_at(self, tree: Tree, parts: Parts) -> bool:
        """Tell whether what is at a path is as it is marked."""
        status = tree.status_if_reached(parts)
        if status is None:
            return False
        if status.st_ctime_ns == self.ctime_ns:
            return True
        now = mark_of(tree, parts, status)
        return (
            now is not None
            and self.digest is not None
            and now[:3] == self[:3]
            and ((now.digest, now.xattrs) == (self.digest, self.xattrs))
        )


def mark_of(tree: Tree, parts: Parts, status: os.stat_result, *, read: bool = True) -> Mark | None:
    """Return the mark of what is at a path; None for what is neither a file nor a link."""
    if stat.S_ISLNK(status.st_mode):
        return Mark.of(status, _digest_of_text(tree.link_target(parts)), ())
    if not stat.S_ISREG(status.st_mode):
        return None
    try:
        fd = tree.open_file(parts)
    except PermissionError:
        return Mark.of(status, None, ())
    try:
        return Mark.of(os.fstat(fd), digest_of(fd) if read else None, xattrs_of(fd))
    finally:
        os.close(fd)


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()


class Link(NamedTuple):
    """A file in a directory that a call took away, and that stayed under another name."""

    place: Parts
    """Where it is in the directory."""
    ino: int
    """Of the file that stayed; in the directory is a copy of what it was."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A committed call with its changes, in order; each says what was there before."""

    committed: Committed
    records: tuple[Record, ...]
    after: Mapping[Parts, Ident | None]
    """What was at each path when it was committed."""
    marks: Mapping[Parts, Mark]
    """More about the files and links among these: it shows what size and time do not."""
    links: Mapping[str, tuple[Link, ...]]
    """The files in each directory it took away that had names elsewhere, too."""


class Past:
    """The committed calls that a store knows, for those who look: it needs no lock.

    Calls may be committed, and the oldest forgotten, while somebody looks.
    """

    def __init__(self, store: Path, seals: Seals) -> None:
        self.objects = Objects(store / "objects")
        self._path = store / "history"
        self._seals = seals
        self._sizes: dict[int, int] | None = None
        self._last = 0
        self._told: set[int] = set()

    @property
    def last(self) -> int:
        """The newest place; 0 before the first."""
        self._known()
        return self._last

    def serials(self) -> list[int]:
        """Return the places that are still known, oldest first."""
        return sorted(self._known())

    def after(self, serial: int) -> list[int]:
        """Return the places after one, newest first."""
        return [known for known in reversed(self.serials()) if known > serial]

    def read(self, serial: int) -> Delta:
        """Return what a call changed.

        Raises:
            FileNotFoundError: It was forgotten meanwhile.
            HistoryDamaged: Its record is not what was written.
        """
        path = self._file(serial)
        records, damage = read_journal(path, self._seals)
        if not records and not path.exists():
            raise FileNotFoundError(errno.ENOENT, "it was forgotten", str(path))
        meta = records[-1].commit if records else None
        if damage != "whole" or meta is None or meta.get("serial") != serial:
            raise _damaged(path, serial)
        try:
            return self._delta(records[:-1], meta)
        except (LookupError, TypeError, ValueError) as error:
            raise _damaged(path, serial) from error

    def readable(self, serials: Iterable[int]) -> Iterator[Delta]:
        """Yield what each of some calls changed, but those forgotten meanwhile, or damaged."""
        for serial in serials:
            try:
                yield self.read(serial)
            except FileNotFoundError:
                continue
            except HistoryDamaged as error:
                if serial not in self._told:
                    self._told.add(serial)
                    logger.error("%s", error)

    def damaged(self, serials: Iterable[int] | None = None) -> dict[int, HistoryDamaged]:
        """Return what is wrong with each call that cannot be read; by default of all."""
        found: dict[int, HistoryDamaged] = {}
        for serial in self.serials() if serials is None else serials:
            try:
                self.read(serial)
            except FileNotFoundError:
                continue
            except HistoryDamaged as error:
                found[serial] = error
        return found

    def _delta(self, records: Sequence[Record], meta: Mapping[str, Any]) -> Delta:
        before = {int(index): Entry.decode(entry) for index, entry in meta["entries"]}
        changes = tuple(
            replace(record, before=before.get(index, record.before))
            for index, record in enumerate(records)
        )
        paths = {join_path(record.path) for record in changes if record.op in CHANGES}
        paths |= {join_path(r.origin) for r in changes if r.origin is not None}
        committed = Committed(
            serial=meta["serial"],
            call_id=meta["call"],
            tool=meta["tool"],
            time=meta["time"],
            paths=tuple(sorted(paths)),
            size=meta["size"],
            undoes=tuple(meta.get("undoes", ())),
        )
        after = {
            checked_parts(path): None if ident is None else Ident(*map(int, ident))
            for path, ident in meta["after"]
        }
        marks = {checked_parts(path): Mark.decode(mark) for path, mark in meta.get("marks", ())}
        return Delta(committed, changes, after, marks, _links_in(meta))

    def trees(self, serial: int) -> Path:
        """Return where the directories are that a call took away."""
        return self._path / f"{serial:012d}.trees"

    def _known(self) -> dict[int, int]:
        if self._sizes is None:
            self._sizes = {}
            with contextlib.suppress(FileNotFoundError), os.scandir(self._path) as found:
                for each in found:
                    if each.is_symlink():
                        raise StoreRefused(f"{each.path} is a symbolic link: nobody here made it")
                    if named := NAMED.fullmatch(each.name):
                        self._sizes[int(named[1])] = int(named[2])
            self._last = max(self._sizes, default=0)
        return self._sizes

    def _file(self, serial: int) -> Path:
        return self._path / f"{serial:012d}-{self._known()[serial]}"


NAMED = re.compile("([0-9]{12,})-([0-9]+)")
"""How an entry's file is called: its place, and the bytes that it takes."""


def _damaged(path: Path, serial: int) -> HistoryDamaged:
    return HistoryDamaged(
        f"The record of the change with number {serial} is damaged ({path}): it can be neither"
        " shown nor undone. The others are not affected"
    )


class History(Past):
    """The committed calls of a workspace, the oldest forgotten when they take too much space."""

    def __init__(
        self, store: Store, *, limit: int = DEFAULT_LIMIT, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(store.path, store.seals(JOURNAL))
        self.store = store
        self.journal = Journal(store)
        self.needed: Callable[[], int | None] = lambda: None
        """Tells the place that everything after is still to be kept, whatever the limit."""
        self.unfinished: Callable[[], object] | None = None
        """What is still to be done about an earlier transaction before another can begin."""
        self._limit = limit
        self._clock = clock
        self._total: int | None = None
        self._uses: _Uses | None = None

    def copy_tree(self, delta: Delta, kept: str, tree: Tree, name: str) -> dict[Parts, Ident]:
        """Make a copy of a directory that a call took away; returns what was in it.

        Of a directory, size and time are -1.
        """
        trees = Tree(self.trees(delta.committed.serial))
        stayed = {link.place: link.ino for link in delta.links.get(kept, ())}
        try:
            copy_exactly(trees, (kept,), tree, (name,))
            return {
                parts[1:]: Ident(status.st_ino, -1, -1)
                if stat.S_ISDIR(status.st_mode)
                else ident_of(status)._replace(ino=stayed.get(parts[1:], status.st_ino))
                for parts, status in trees.walk((kept,))
            }
        finally:
            trees.close()

    # Adding

    def add(
        self,
        records: Sequence[Record],
        call: ToolCall | None,
        after: Mapping[Parts, Ident | None],
        marks: Mapping[Parts, Mark],
        tree: Tree,
        undoes: Sequence[str] = (),
    ) -> int | None:
        """Commit: from here on the changes stay. Returns their place, or None if there are none.

        ``tree`` is the workspace, in which rooms may have what was replaced; ``undoes`` are the
        calls that these changes take back.
        """
        if not any(record.op in CHANGES for record in records):
            self.journal.cut(0)
            return None
        if self._limit <= 0 and self.needed() is None:
            self._trim()
            self.journal.cut(0)  # nobody can ever ask for it: forgetting how to undo is to commit
            return None
        serial = self.last + 1
        entries, size = self._entries(records, tree)
        meta = {
            "serial": serial,
            "call": f"{'undo' if undoes else 'direct'}_{serial}" if call is None else call.id,
            "tool": "" if call is None else call.name,
            "time": self._clock.time(),
            "entries": [(index, entry.encode()) for index, entry in entries],
            "after": [["/".join(parts), ident] for parts, ident in after.items()],
            "marks": [["/".join(parts), mark.encode()] for parts, mark in marks.items()],
            "size": size,
            "links": self._links(records, entries, tree),
            "undoes": list(undoes),
        }
        commit = Record(op="commit", commit=meta)
        self.journal.append(commit)
        finish = functools.partial(self.finish, [*records, commit])
        try:
            finish()
        except OSError as error:
            # It is committed all the same.
            logger.warning("The history of %s is kept later: %s", meta["call"], error)
            self.unfinished = finish
            self._last = serial
            return None
        self._trim()
        return serial

    def finish_earlier(self) -> None:
        """Finish what an earlier transaction could not; raises when it still cannot."""
        if self.unfinished is not None:
            self.unfinished()
            self.unfinished = None

    def finish(self, records: Sequence[Record]) -> str:
        """Move what a committed transaction kept to its place. Does no harm when done twice."""
        meta: dict[str, Any] = records[-1].commit or {}
        serial, size = int(meta["serial"]), int(meta["size"])
        entries = {int(index): Entry.decode(encoded) for index, encoded in meta["entries"]}
        edits = [index for index in sorted(entries) if records[index].op == "edit"]
        # First what was changed in place: what was taken away may be the same file.
        for index in [*edits, *(entries.keys() - edits)]:
            entry = entries[index]
            if records[index].op == "found":
                self._settle_found(records[index].source, entry)
            elif entry.kind == "directory":
                later = [entries[edit] for edit in edits if edit > index]
                links = _links_in(meta).get(records[index].kept or "", ())
                self._settle_directory(records[index], serial, links, later)
            else:
                self._settle_file(records[index], entry)
        self.journal.move(self._path / f"{serial:012d}-{size}")
        if self._sizes is not None and serial not in self._sizes:
            self._sizes[serial] = size
            self._total = None if self._total is None else self._total + size
            if self._uses is not None:
                self._uses.expect(serial)
        self._last = max(self._last, serial)
        return meta["call"]

    def sources(self, records: Sequence[Record]) -> set[str]:
        """Return the names, in the transaction's directory, of what a history is made from."""
        return {_source(record) for record in records if record.op in ("put", "gone", "edit")}

    def leftovers(self) -> set[str]:
        """Return the names that a transaction which is over may have in its directory.

        Only for a store without a journal: the last one was committed, and is in the history.
        """
        if self.journal.path.exists():
            # Without a history, a journal is emptied to commit.
            return set(self.store.tree.names(())) if self._limit <= 0 else set()
        records = [delta.records for delta in self.readable([self.last] if self.last else [])]
        return {name for each in records for r in each for name in (r.kept, r.copy) if name}

    def _entries(
        self, records: Sequence[Record], tree: Tree
    ) -> tuple[list[tuple[int, Entry]], int]:
        """Return what the records replaced, in full, and how many bytes that takes anew."""
        entries: list[tuple[int, Entry]] = []
        total = 0
        for index, entry, source in replaced(records, self.store.tree, tree):
            entry, size = self._complete(entry, source)
            entries.append((index, entry))
            total += size
        for index, record in enumerate(records):
            if record.op == "found" and record.before is not None and record.source is not None:
                entry, size = self._complete_found(record.before, record.source)
                entries.append((index, entry))
                total += size
        return entries[::-1], total

    def _complete_found(self, entry: Entry, source: Source) -> tuple[Entry, int]:
        if entry.size > self._limit and self.needed() is None:
            return entry, 0
        own = path_of(self.store.scan, source, entry.size)
        if own is None:
            data = data_of(self.store.scan, source, entry.size)
            digest = hashlib.sha256(data).hexdigest()
        else:
            fd = os.open(own, os.O_RDONLY)
            try:
                digest = digest_of(fd)
            finally:
                os.close(fd)
        return replace(entry, digest=digest), 0 if digest in self.store.objects else entry.size

    def _settle_found(self, source: Source | None, entry: Entry) -> None:
        """Make the content that a file had before others changed it one of the history's."""
        if source is None or entry.digest is None or entry.digest in self.store.objects:
            return
        own = path_of(self.store.scan, source)
        if own is None:
            data = data_of(self.store.scan, source, entry.size)
            self.store.objects.add(data, safe=self.store.safe)
        elif own.exists():  # else it is there already, from an earlier try
            self.store.objects.take(own, entry.digest)

    def _complete(self, entry: Entry, name: str) -> tuple[Entry, int]:
        """Return an entry with its digest, and how many bytes it takes to keep it."""
        if entry.kind == "directory":
            return entry, sum(status.st_size for _, status in self.store.tree.walk((name,)))
        if entry.kind != "file" or (entry.size > self._limit and self.needed() is None):
            return entry, 0
        digest = self._digest((name,))
        return replace(entry, digest=digest), 0 if digest in self.store.objects else entry.size

    def _links(
        self, records: Sequence[Record], entries: Sequence[tuple[int, Entry]], tree: Tree
    ) -> list[tuple[str, list[tuple[str, int]]]]:
        """Return which files in directories that were taken away have names elsewhere, too."""
        own = self.store.tree
        taken = [records[index] for index, entry in entries if entry.kind == "directory"]
        linked = [(record, _linked(*kept_at(record, own, tree))) for record in taken]
        if not any(files for _, files in linked):
            return []
        # Names that are only for undoing do not count.
        undoing = [r for r in records if r.kept and r.op in ("edit", "moved", "moved over")]
        statuses = [
            own_tree.status(parts)
            for own_tree, parts in (kept_at(record, own, tree) for record in undoing)
        ]
        ours = Counter(status.st_ino for status in statuses if status is not None)
        found: list[tuple[str, list[tuple[str, int]]]] = []
        for record, files in linked:
            # What a room has is copied: every file is another one in the history.
            links = [
                ("/".join(place), ino)
                for ino, (places, names) in files.items()
                if record.room is not None or names > len(places) + ours[ino]
                for place in places
            ]
            found += [(record.kept or "", links)] if links else []
        return found

    def _digest(self, source: Parts) -> str:
        try:
            fd = self.store.tree.open_file(source)
        except PermissionError:
            self.store.tree.chmod(source, 0o600)
            fd = self.store.tree.open_file(source)
        try:
            return digest_of(fd)
        finally:
            os.close(fd)

    def _settle_file(self, record: Record, entry: Entry) -> None:
        name = _source(record)
        status = self.store.tree.status((name,))
        if status is None or entry.digest is None:
            return
        # One that is there is replaced, because it may be damaged; but not by a file that was
        # changed since through another of its names: then a copy has its content.
        if entry.digest not in self.store.objects or (
            status.st_nlink == 1 and self._digest((name,)) == entry.digest
        ):
            self._make_object(name, status, entry.digest)

    def _settle_directory(
        self, record: Record, serial: int, links: Sequence[Link], later: Sequence[Entry]
    ) -> None:
        name = record.kept or ""
        if self.store.tree.status((name,)) is not None:
            self._part_links(name, links, later)
            trees = self.trees(serial)
            trees.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.rename(name, trees / name, src_dir_fd=self.store.tx_fd)

    def _part_links(self, name: str, links: Sequence[Link], later: Sequence[Entry]) -> None:
        """Give files that have names outside a directory an inode of their own in it.

        They would change with what is in the workspace. ``later`` tells, in order, which were
        changed after the directory had been taken away.
        """
        tree = self.store.tree
        taken = {entry.ino: entry for entry in reversed(later)}
        files: dict[int, list[Parts]] = {}
        for link in links:
            files.setdefault(link.ino, []).append((name, *link.place))
        for ino, places in files.items():
            status = tree.status(places[0])
            if ino not in taken and status is not None and status.st_nlink == len(places):
                continue
            staged = self.store.fresh()
            if ino in taken:
                self.make_file(taken[ino], tree, staged)
            else:
                copy_exactly(tree, places[0], tree, (staged,))
            for place in places:
                with tree.parent(place) as above:
                    before = os.fstat(above)
                    # Renamed over it: at no moment is the history without the file.
                    spare = self.store.fresh()
                    os.link(staged, spare, src_dir_fd=tree.fd, dst_dir_fd=tree.fd)
                    os.rename(spare, place[-1], src_dir_fd=tree.fd, dst_dir_fd=above)
                    os.utime(above, ns=(before.st_atime_ns, before.st_mtime_ns))
            os.unlink(staged, dir_fd=tree.fd)

    def make_file(self, entry: Entry, tree: Tree, name: str) -> None:
        """Make a file again, at a free name; raises FileNotFoundError if it was not kept."""
        if entry.digest is None:
            raise FileNotFoundError(errno.ENOENT, "its content was not kept", name)
        reading = self.store.objects.open(entry.digest)
        try:
            writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=tree.fd)
            try:
                copy_content(reading, writing)
            finally:
                os.close(writing)
        finally:
            os.close(reading)
        apply_entry(tree, (name,), entry)

    def _make_object(self, name: str, status: os.stat_result, digest: str) -> None:
        if status.st_nlink == 1:
            os.chmod(name, 0o600, dir_fd=self.store.tx_fd)
            self.store.objects.take(self.store.tx / name, digest)
            return
        # It has other names, and may be changed through them.
        fd = self.store.tree.open_file((name,))
        try:
            self.store.objects.add_open(fd, safe=self.store.safe)
        finally:
            os.close(fd)

    # Forgetting

    def _trim(self) -> None:
        """Forget the oldest while there is too much: a bounded piece of work at each call.

        The call is committed already, so nothing that goes wrong here is its failure.
        """
        try:
            if self._is_full():
                self._trim_some()
        except OSError as error:
            logger.warning("The history could not be trimmed, which is tried again: %s", error)

    def _is_full(self) -> bool:
        sizes = self._known()
        if self._total is None:
            self._total = sum(sizes.values())
        most = MAX_ENTRIES if self._limit > 0 else 0
        return self._total > self._limit or len(sizes) > most

    def _trim_some(self) -> None:
        sizes = self._known()
        if self._uses is None:
            self._uses = _Uses(self, sizes)
        if not self._uses.count(TRIMMED_AT_ONCE):
            return
        floor = self.needed()
        oldest = sorted(sizes)[:TRIMMED_AT_ONCE]
        for serial in oldest:
            if not self._is_full() or (floor is not None and serial > floor):
                break
            self._forget(serial, self._uses)
        self._drop(self._uses.unused())

    def _forget(self, serial: int, uses: _Uses) -> None:
        uses.forget(serial)
        self._file(serial).unlink(missing_ok=True)
        remove_tree(self.trees(serial))
        size = self._known().pop(serial)
        self._total = None if self._total is None else self._total - size

    def _drop(self, unused: set[str]) -> None:
        """Remove contents that nothing in the history refers to any more."""
        for digest in unused:
            self.store.objects.remove(digest)


TRIMMED_AT_ONCE = 64
"""How many entries one call reads, and how many it forgets, where there are too many."""


class _Uses:
    """Which contents the entries of a history refer to, counted a few entries at a time."""

    def __init__(self, history: Past, serials: Iterable[int]) -> None:
        self._history = history
        self._uncounted = sorted(serials)
        self._counts: Counter[str] = Counter()
        self._damaged: set[int] = set()
        """What these refer to is not known: while one of them is there, nothing is unused."""
        self._candidates: set[str] = set()
        self._folders = [f"{number:02x}" for number in range(256)]
        """Where contents may be that nothing refers to since a process was killed."""

    def expect(self, serial: int) -> None:
        """Count one more entry, later."""
        self._uncounted.append(serial)

    def count(self, most: int) -> bool:
        """Count some entries; True when there are none left."""
        for _ in range(min(most, len(self._uncounted))):
            serial = self._uncounted.pop()
            try:
                self._counts.update(self._digests(serial))
            except HistoryDamaged:
                self._damaged.add(serial)
            except FileNotFoundError:
                continue
        return not self._uncounted

    def forget(self, serial: int) -> None:
        """Note that an entry is about to be forgotten."""
        if serial in self._damaged:
            self._damaged.discard(serial)
            self._folders = [f"{number:02x}" for number in range(256)]
            return
        with contextlib.suppress(HistoryDamaged, FileNotFoundError):
            digests = self._digests(serial)
            self._counts.subtract(digests)
            self._candidates |= digests

    def unused(self) -> set[str]:
        """Return some contents that no entry refers to."""
        if self._damaged:
            return set()
        found, self._candidates = self._candidates, set()
        if self._folders:
            found.update(self._history.objects.digests(self._folders.pop()))
        return {digest for digest in found if self._counts[digest] <= 0}

    def _digests(self, serial: int) -> set[str]:
        befores = [record.before for record in self._history.read(serial).records]
        return {each.digest for each in befores if each is not None and each.digest is not None}


def kept_at(record: Record, own: Tree, workspace: Tree) -> tuple[Tree, Parts]:
    """Return where a transaction has what a record keeps: in its own directory, or in a room."""
    if record.room is None:
        return own, (record.kept or "",)
    return workspace, (*record.room, record.kept or "")


def replaced(
    records: Sequence[Record], own: Tree, workspace: Tree
) -> Iterator[tuple[int, Entry, str]]:
    """Yield what each record replaced, newest first: number, what it was, what has its content."""
    edited: dict[int, tuple[Entry, str]] = {}
    for index in reversed(range(len(records))):
        record = records[index]
        if record.op == "edit" and record.before is not None and record.copy is not None:
            edited[record.before.ino] = record.before, record.copy
            yield index, record.before, record.copy
        elif record.op in ("put", "gone") and record.kept is not None:
            entry = entry_at(*kept_at(record, own, workspace))
            if entry is not None:
                # It may have been changed since, through another name of the file.
                taken = edited.get(entry.ino) if entry.kind == "file" else None
                yield index, *(taken or (entry, record.kept))


def _linked(tree: Tree, top: Parts) -> dict[int, tuple[list[Parts], int]]:
    """Return the files below a directory that have several names: those in it, how many in all."""
    linked: dict[int, tuple[list[Parts], int]] = {}
    for parts, status in tree.walk(top):
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            places, _ = linked.setdefault(status.st_ino, ([], status.st_nlink))
            places.append(parts[len(top) :])
    return linked


def _links_in(meta: Mapping[str, Any]) -> dict[str, tuple[Link, ...]]:
    return {
        checked_name(kept): tuple(Link(checked_parts(place), int(ino)) for place, ino in links)
        for kept, links in meta.get("links", ())
    }


def _source(record: Record) -> str:
    return (record.copy if record.op == "edit" else record.kept) or ""
