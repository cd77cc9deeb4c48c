"""What committed calls changed: for each path what was there before, up to a limit in bytes."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weakincentives import locks
from weakincentives.call import ToolCall
from weakincentives.clock import SYSTEM_CLOCK, Clock
from weakincentives.errors import HistoryDamaged, StoreRefused
from weakincentives.filesystem.entry import (
    Entry,
    apply_entry,
    capture,
    copy_content,
    copy_exactly,
    digest_of,
)
from weakincentives.filesystem.journal import JOURNAL, Journal, Record, read_journal
from weakincentives.filesystem.protocol import Parts, join_path
from weakincentives.filesystem.scratch import NOTE, TEMPORARY
from weakincentives.filesystem.store import (
    Note,
    Objects,
    Source,
    Store,
    checked_parts,
    left_in,
    location_of,
    open_store,
    take_store_lock,
    write_note,
    write_whole,
)
from weakincentives.filesystem.tree import Tree, remove_tree
from weakincentives.state import Seals

logger = logging.getLogger("weakincentives.filesystem")

DEFAULT_LIMIT = 256 << 20
MAX_ENTRIES = 10_000


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


@dataclass(frozen=True, slots=True)
class Delta:
    """A committed call with its changes, in order; each says what was there before."""

    committed: Committed
    records: tuple[Record, ...]
    after: Mapping[Parts, Entry | None]
    """What was at each path when it was committed."""


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
        meta = records[-1].data if records else None
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
        entries = {int(index): Entry.decode(entry) for index, entry in meta["entries"]}
        # Later records of what is kept already say only what else the call put there.
        firsts = _firsts(records)
        changes = tuple(
            replace(
                record, path=path, others=(), before=_in_full(record.before, entries.get(index))
            )
            for index, record in enumerate(records)
            if record.is_change and firsts.get(record.kept, index) == index
            for path in (record.path, *record.others)
        )
        committed = Committed(
            serial=meta["serial"],
            call_id=meta["call"],
            tool=meta["tool"],
            time=meta["time"],
            paths=tuple(sorted({join_path(p) for record in changes for p in record.paths})),
            size=meta["size"],
            undoes=tuple(meta.get("undoes", ())),
        )
        return Delta(committed, changes, _after(meta))

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

    def copy_tree(self, delta: Delta, kept: str, tree: Tree, name: str) -> None:
        """Make a copy of a directory that a call took away."""
        trees = Tree(self.trees(delta.committed.serial))
        try:
            copy_exactly(trees, (kept,), tree, (name,))
        finally:
            trees.close()

    # Adding

    def add(
        self,
        records: Sequence[Record],
        call: ToolCall | None,
        after: Mapping[Parts, Entry | None],
        tree: Tree,
        undoes: Sequence[str] = (),
    ) -> int | None:
        """Commit: from here on the changes stay. Returns their place, or None if there are none.

        ``after`` is what is at the changed paths now. ``tree`` is the workspace, which may have
        scratch directories with what was replaced. ``undoes`` are the calls that are taken back.
        """
        if not any(record.is_change for record in records):
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
            "entries": [(index, entries[index].encode()) for index in sorted(entries)],
            "left": [["/".join(parts), each and each.encode()] for parts, each in after.items()],
            "size": size,
            "undoes": list(undoes),
        }
        commit = Record(op="commit", data=meta)
        self.journal.append(commit)
        finish = functools.partial(self.finish, [*records, commit], entries)
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

    def finish(self, records: Sequence[Record], entries: Mapping[int, Entry] | None = None) -> None:
        """Move what a committed transaction kept to its place. Does no harm when done twice."""
        meta: dict[str, Any] = records[-1].data or {}
        serial, size = int(meta["serial"]), int(meta["size"])
        if entries is None:
            entries = {int(index): Entry.decode(encoded) for index, encoded in meta["entries"]}
        edits = [index for index in sorted(entries) if records[index].in_place]
        # First what was changed in place: what was taken away may be the same file.
        for index in [*edits, *(entries.keys() - edits)]:
            record, entry = records[index], entries[index]
            if entry.is_directory:
                # What files in it were before they were changed later, by another name.
                edited = {entries[n].ino: entries[n] for n in reversed(edits) if n > index}
                self._settle_directory(record.kept or "", serial, edited)
            else:
                self._settle_file(record.source or Source(record.kept or ""), entry)
        self.journal.move(f"{self._path}/{serial:012d}-{size}")
        if self._sizes is not None and serial not in self._sizes:
            self._sizes[serial] = size
            self._total = None if self._total is None else self._total + size
            if self._uses is not None:
                self._uses.expect(serial)
        self._last = max(self._last, serial)

    def leftovers(self) -> set[str]:
        """Return the names that a transaction which is over may have in its directory.

        Only for a store without a journal: the last one was committed, and is in the history.
        """
        if self.journal.path.exists():
            # Without a history, a journal is emptied to commit.
            return set(self.store.tree.names(())) if self._limit <= 0 else set()
        records = [delta.records for delta in self.readable([self.last] if self.last else [])]
        return {name for each in records for record in each for name in record.names}

    def _entries(self, records: Sequence[Record], tree: Tree) -> tuple[dict[int, Entry], int]:
        """Return what the records replaced, in full, and how many bytes that takes anew."""
        entries: dict[int, Entry] = {}
        total = 0
        found = [
            (index, record.before, record.source)
            for index, record in enumerate(records)
            if record.source is not None and record.after is None and record.before is not None
        ]
        taken = replaced(records, self.store.tree, tree)
        for index, entry, source in [*found, *((i, e, Source(name)) for i, e, name in taken)]:
            if entry.is_directory:
                total += sum(each.st_size for _, each in self.store.tree.walk((source.name,)))
            elif entry.kind == "file" and (entry.size <= self._limit or self.needed() is not None):
                digest = self._digest(source, entry.size)
                total += 0 if digest in self.store.objects else entry.size
                entry = entry._replace(digest=digest)
            entries[index] = entry
        return entries, total

    def _digest(self, source: Source, size: int) -> str:
        own = source.path(self.store.path, size)
        if own is None:
            return hashlib.sha256(source.read(self.store.path, size)).hexdigest()
        fd = _open_own(own)
        try:
            return digest_of(fd)
        finally:
            os.close(fd)

    def _settle_file(self, source: Source, entry: Entry) -> None:
        """Make the content that a file had one of the history's."""
        objects, own = self.store.objects, source.path(self.store.path)
        if entry.digest is None:
            return
        if own is None:
            objects.add(source.read(self.store.path, entry.size), safe=self.store.safe)
            return
        try:
            links = os.lstat(own).st_nlink
        except FileNotFoundError:
            return  # it is there already, from an earlier try
        # One that is there is replaced, because it may be damaged; but not by a file that was
        # changed since through another of its names: then a copy has its content.
        if entry.digest in objects and (
            links > 1 or self._digest(source, entry.size) != entry.digest
        ):
            return
        if links == 1:
            os.chmod(own, 0o600)
            objects.take(own, entry.digest)
            return
        # It has other names, and may be changed through them.
        fd = _open_own(own)
        try:
            objects.add(fd, safe=self.store.safe)
        finally:
            os.close(fd)

    def _settle_directory(self, name: str, serial: int, edited: Mapping[int, Entry]) -> None:
        if self.store.tree.status((name,)) is not None:
            self._part_links(name, edited)
            trees = self.trees(serial)
            trees.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.rename(name, trees / name, src_dir_fd=self.store.tx_fd)

    def _part_links(self, name: str, edited: Mapping[int, Entry]) -> None:
        """Give each file with other names an inode of its own: it would change with them."""
        tree = self.store.tree
        linked = [
            (parts, status.st_ino)
            for parts, status in tree.walk((name,))
            if stat.S_ISREG(status.st_mode) and (status.st_nlink > 1 or status.st_ino in edited)
        ]
        for parts, ino in linked:
            staged = self.store.fresh()
            if ino in edited:
                self.make_file(edited[ino], tree, staged)
            else:
                copy_exactly(tree, parts, tree, (staged,))
            with tree.parent(parts) as above:
                before = os.fstat(above)
                # Renamed over it: at no moment is the history without the file.
                os.rename(staged, parts[-1], src_dir_fd=tree.fd, dst_dir_fd=above)
                os.utime(above, ns=(before.st_atime_ns, before.st_mtime_ns))

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
    firsts = _firsts(records)
    for index in reversed(range(len(records))):
        record = records[index]
        if record.in_place and record.before is not None:
            edited[record.before.ino] = record.before, record.names[-1]
            yield index, *edited[record.before.ino]
        elif record.op == "was" and record.kept is not None and firsts[record.kept] == index:
            entry = capture(*kept_at(record, own, workspace))
            if entry is not None:
                # It may have been changed since, through another name of the file.
                taken = edited.get(entry.ino) if entry.kind == "file" else None
                entry, name = taken or (entry, record.kept)
                yield index, _in_full(record.before, entry) or entry, name


def _in_full(before: Entry | None, entry: Entry | None) -> Entry | None:
    """Return what was replaced, as what is kept of it says; that may be a copy."""
    if before is None or entry is None:
        return entry or before
    return entry._replace(ino=before.ino)


def _firsts(records: Sequence[Record]) -> dict[str | None, int]:
    """Return which record was the first to keep something, by its name."""
    firsts: dict[str | None, int] = {}
    for index, record in enumerate(records):
        if record.kept is not None:
            firsts.setdefault(record.kept, index)
    return firsts


def _open_own(path: str) -> int:
    """Open a file of the transaction's, also one that may not be read."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except PermissionError:
        os.chmod(path, 0o600)
        return os.open(path, flags)


def _after(meta: Mapping[str, Any]) -> dict[Parts, Entry | None]:
    if "left" in meta:
        return {
            checked_parts(path): None if entry is None else Entry.decode(entry)
            for path, entry in meta["left"]
        }
    # Version 2 knew inode, size and time; of a directory only the inode; of most files more.
    marks = dict(meta.get("marks", ()))
    return {
        checked_parts(path): None if ident is None else _as_marked(ident, marks.get(path))
        for path, ident in meta["after"]
    }


def _as_marked(ident: Sequence[int], mark: Sequence[Any] | None) -> Entry:
    ino, size, mtime_ns = map(int, ident)
    entry = Entry("directory" if size == -1 else "file", 0, size, mtime_ns, ino)
    if mark is None:
        return entry
    mode, uid, gid, ctime_ns, digest, xattrs = mark
    decoded = tuple((name, bytes.fromhex(value)) for name, value in xattrs)
    return entry._replace(
        mode=mode, uid=uid, gid=gid, ctime_ns=ctime_ns, digest=digest, xattrs=decoded
    )


# Adopting


def adopt_store(
    root: str | os.PathLike[str], *, store: str | os.PathLike[str] | None = None
) -> tuple[str, ...]:
    """Seal the store of a workspace; returns a sentence for each record that stays damaged.

    It is for a store that an earlier version wrote, or that was written with a key which is lost:
    nobody can tell such a one from one that was planted. Names that lead out of the store or the
    workspace are never taken over. What runs and calls have on record is adopted by
    ``SavedSession.adopt`` and ``OutcomeLedger.adopt``.

    Raises:
        StoreRefused: It belongs to another user, or has links in it.
        WorkspaceLocked: Somebody has the workspace open.
    """
    root = Path(os.path.realpath(root))
    path = location_of(root) if store is None else Path(os.path.realpath(store))
    fd = open_store(path)
    try:
        lock = take_store_lock(fd, root, 0.0)
    finally:
        os.close(fd)
    try:
        return tuple(_adopt(root, path))
    finally:
        locks.close(lock)


def _adopt(root: Path, path: Path) -> Iterator[str]:
    note = Note(id=os.urandom(8).hex(), path=str(root), ino=os.stat(root).st_ino)
    known = re.search(rb'"id": "([0-9a-f]{16})"', _read(path / "root"))
    before = None if known is None else known[1].decode()
    journals = [path / "tx" / "journal", *_history(path)]
    lines = {journal: _read(journal) for journal in journals}
    earlier = None if before is None else Seals(f"{JOURNAL} {before}")
    # Where one seal is good, the others must be: only without the key that made them are all bad.
    strict = earlier is not None and any(_good(data, earlier) for data in lines.values())
    seals = note.seals(JOURNAL)
    for journal, data in lines.items():
        sealed, texts = b"", list(_texts(data, earlier if strict else None))
        for text in texts:
            sealed += b"damaged\n" if text is None else seals.sealed(text, len(sealed)) + b"\n"
        if None in texts or (data and not data.endswith(b"\n")):
            copy = left_in(path, (journal.name,))
            write_whole(copy, data)
            yield f"{journal} is damaged; what it held is in {copy}"
        if data:
            write_whole(journal, sealed)
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        noted = json.loads(_unmarked((path / NOTE).read_bytes()))
        if all(checked_parts(base)[-1].startswith(TEMPORARY) for base, _ in noted):
            write_whole(path / NOTE, note.seals(NOTE).sealed(json.dumps(noted).encode()))
    write_note(path, note)


def _history(path: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError), os.scandir(path / "history") as found:
        return [
            path / "history" / each.name
            for each in found
            if NAMED.fullmatch(each.name) and each.is_file(follow_symlinks=False)
        ]
    return []


def _texts(data: bytes, strict: Seals | None) -> Iterator[bytes | None]:
    """Yield the text of each whole line, None for one that is damaged or has names that are none.

    A line begins with the checksum of the first version, or with a seal.
    """
    offset = 0
    for line in data.split(b"\n")[:-1]:
        mark, _, text = line.partition(b" ")
        good = len(mark) == 32
        if len(mark) == 8:
            good = mark == b"%08x" % zlib.crc32(text)
        elif strict is not None:
            good = strict.unsealed(line, offset) is not None
        offset += len(line) + 1
        try:
            if good:
                Record.decode(text)
        except (TypeError, ValueError):
            good = False
        yield text if good else None


def _good(data: bytes, seals: Seals) -> bool:
    return seals.unsealed(data.partition(b"\n")[0]) is not None


def _unmarked(line: bytes) -> bytes:
    return line if line.startswith(b"[") else line[33:]


def _read(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    with open(fd, "rb") as file:
        return file.read()
