"""The history of committed calls: what was at each changed path, up to a size limit."""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from weakincentives.core.call import ToolCall
from weakincentives.core.clock import SYSTEM_CLOCK, Clock
from weakincentives.core.gate import ProcessLock
from weakincentives.core.gc_pause import no_collection
from weakincentives.core.state import SEAL_SIZE, Seals, no_links
from weakincentives.errors import (
    ContentDamaged,
    HistoryDamaged,
    StoreRefused,
    WorkspaceLocked,
)
from weakincentives.filesystem.entry import (
    Entry,
    apply_entry,
    capture,
    checked_digest,
    copy_content,
    copy_exactly,
    digest_of,
    link,
    new_file,
)
from weakincentives.filesystem.journal import (
    JOURNAL,
    EncodedEntry,
    Journal,
    Record,
    read_commit,
    read_entries,
    read_journal,
    read_paths,
)
from weakincentives.filesystem.paths import Parts, join_path
from weakincentives.filesystem.redo import MakeRedo, Redo, keep, object_in, pack, unpack
from weakincentives.filesystem.scratch import NOTE, TEMPORARY
from weakincentives.filesystem.store import (
    HISTORY_LIMITS,
    Limits,
    Note,
    Objects,
    Source,
    Store,
    checked_parts,
    left_in,
    may_compress,
    open_store,
    present_in,
    store_of,
    write_note,
    write_whole,
)
from weakincentives.filesystem.tree import Held, Tree, remove_tree, write_all

logger = logging.getLogger("weakincentives.filesystem")

T = TypeVar("T")

MAX_KEPT = 100_000
"""Records in memory, of about one kilobyte each, while the history is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A committed call that changed files."""

    serial: int
    """Its number in the history of the workspace, from 1."""
    call_id: str
    tool: str
    """Empty for changes outside of any call."""
    time: float
    """Seconds since the epoch."""
    paths: tuple[str, ...]
    """The changed paths, sorted; a directory stands for everything in it."""
    size: int
    """Bytes stored so that it can be undone."""
    undoes: tuple[str, ...] = ()
    """The calls that it undid."""
    partly: tuple[str, ...] = ()
    """Those of them of which it left something: what others had changed since."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A committed call with its records, in order."""

    committed: Committed
    records: tuple[Record, ...]
    after: Mapping[Parts, Entry | None]
    """The entry at each path at commit."""
    kept: Mapping[str, bytes | None]
    """Contents that the call left, by digest; None for those among the objects."""
    linked: Mapping[str, Mapping[Parts, int]]
    """For each removed directory its hard-linked files, with the inode that each had."""


BRANCHES = "branches"
"""The folder with the branches of a workspace, each with a file ``log``."""


class _Bases:
    """The call that the oldest branch of a workspace begins at: its base needs all later ones."""

    def __init__(self, store: Path) -> None:
        self._folder = store / BRANCHES
        self._known: tuple[int, int | None] = (0, None)

    def __call__(self) -> int | None:
        try:
            changed = os.stat(self._folder).st_mtime_ns
        except FileNotFoundError:
            return None
        if changed != self._known[0]:
            found = (self._base(name) for name in os.listdir(self._folder))
            bases = [base for base in found if base is not None]
            self._known = changed, min(bases, default=None)
        return self._known[1]

    def _base(self, name: str) -> int | None:
        # The seal is not checked: a planted branch can only keep calls from being removed.
        with (
            contextlib.suppress(OSError, ValueError, LookupError, TypeError),
            open(self._folder / name / "log", "rb", opener=no_links) as file,
        ):
            return int(json.loads(file.readline()[SEAL_SIZE + 1 :])["base"])
        return None


_NEVER = (-1, -1)


class Past:
    """Read access to the committed calls in a store, without a lock.

    Calls may be committed or trimmed at any time.
    """

    def __init__(self, store: Path, seals: Seals, *, room: int = 0) -> None:
        self.objects = Objects(store / "objects")
        self.needed_by: list[Callable[[], int | None]] = [_Bases(store)]
        """Each returns the call after which nothing may be removed; None if it needs none."""
        self._path = store / "history"
        self._seals = seals
        self._sizes: dict[int, int] | None = None
        """The size of each entry, oldest first."""
        self._total: int | None = None
        self._seen_at = _NEVER
        self._index: tuple[tuple[int, int], Mapping[int, Touched]] = _NEVER, {}
        self._timed = (0, 0.0)
        """A serial and its time: each commit asks for that of the oldest."""
        self._last = 0
        self._logged: set[int] = set()
        self._kept: dict[int, Delta] = {}
        self._room = room
        """How many records may still be kept in memory, because they are read several times."""

    @contextlib.contextmanager
    def keeping(self) -> Generator[None]:
        """Keep what is read in the block in memory."""
        self._room = MAX_KEPT
        try:
            yield
        finally:
            self._room = 0
            self._kept.clear()

    @property
    def last(self) -> int:
        """The newest serial; 0 if there is none."""
        self._known()
        return self._last

    def serials(self) -> list[int]:
        """Return the serials still in the history, oldest first."""
        return sorted(self._known())

    def after(self, serial: int) -> list[int]:
        """Return the serials after one, newest first."""
        return [known for known in reversed(self.serials()) if known > serial]

    def read(self, serial: int) -> Delta:
        """Return what a call changed.

        Raises:
            FileNotFoundError: It has been trimmed.
            HistoryDamaged: Its record is damaged.
        """
        path = self._file(serial)
        if serial in self._kept and path.exists():
            return self._kept[serial]
        records, damage = read_journal(path, self._seals)
        if not records and not path.exists():
            raise FileNotFoundError(errno.ENOENT, "trimmed from the history", str(path))
        meta = records[-1].data if records else None
        if damage != "whole" or meta is None or meta.get("serial") != serial:
            raise _damaged(path, serial)
        try:
            delta = self._delta(records[:-1], meta)
        except (LookupError, TypeError, ValueError) as error:
            raise _damaged(path, serial) from error
        if len(delta.records) < self._room:
            self._room -= len(delta.records)
            self._kept[serial] = delta
        return delta

    def readable(self, serials: Iterable[int]) -> Iterator[Delta]:
        """Yield what some calls changed; skip trimmed and damaged ones."""
        return self._readable(serials, self.read)

    def calls(self, serials: Iterable[int]) -> Iterator[Committed]:
        """Yield some calls without what they changed, which is faster."""
        return self._readable(serials, self._call)

    def _call(self, serial: int) -> Committed:
        found = read_paths(self._file(serial), self._seals)
        if found is None or found[0].get("serial") != serial:
            return self.read(serial).committed
        return _committed(*found)

    def redo(self, serial: int) -> Redo | None:
        """Return what a call's record holds for its session; None for nothing."""
        try:
            meta = read_commit(self._file(serial), self._seals)
        except FileNotFoundError:  # trimmed
            return None
        return None if meta is None else unpack(meta.get("redo"), self.objects)

    def entries(
        self, serial: int
    ) -> tuple[Committed, dict[str, tuple[EncodedEntry, EncodedEntry]]] | None:
        """Return a call, and what was at each path before and after it, without decoding that.

        None if that is not so easy: then ``read`` it.
        """
        found = read_entries(self._file(serial), self._seals)
        if found is None or found[0].get("serial") != serial:
            return None
        return _committed(found[0], found[1].keys()), found[1]

    def _readable(self, serials: Iterable[int], read: Callable[[int], T]) -> Iterator[T]:
        for serial in serials:
            try:
                yield read(serial)
            except FileNotFoundError:
                continue
            except HistoryDamaged as error:
                if serial not in self._logged:
                    self._logged.add(serial)
                    logger.error("%s", error)

    def damaged(self, serials: Iterable[int] | None = None) -> dict[int, HistoryDamaged]:
        """Return the error of each damaged call, by default of all calls."""
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
        # Later records with the same saved file only say what else the call put there.
        firsts = _firsts(records)
        changes = tuple(
            replace(
                record, path=path, others=(), before=_in_full(record.before, entries.get(index))
            )
            for index, record in enumerate(records)
            if record.is_change and firsts.get(record.saved, index) == index
            for path in (record.path, *record.others)
        )
        paths = {join_path(parts) for record in changes for parts in record.paths}
        kept = {
            checked_digest(digest): None if text is None else base64.b64decode(text)
            for digest, text in meta.get("kept", {}).items()
        }
        linked: dict[str, dict[Parts, int]] = {}
        for saved, path, ino in meta.get("linked", ()):
            linked.setdefault(str(saved), {})[checked_parts(path)] = int(ino)
        return Delta(_committed(meta, paths), changes, _after(meta), kept, linked)

    def left(self, delta: Delta, entry: Entry) -> bytes:
        """Return the content of a file as a call left it.

        Raises:
            FileNotFoundError: It was not kept.
        """
        digest = entry.digest or ""
        data = delta.kept.get(digest)
        if data is None:
            return self.objects.read(digest)
        if hashlib.sha256(data).hexdigest() != digest:
            raise ContentDamaged(errno.EBADMSG, "its saved content is damaged")
        return data

    def moment(self, serial: int) -> int:
        """Return when a call was committed, by the clock that files have, in nanoseconds."""
        return os.stat(self._file(serial)).st_mtime_ns

    def trees(self, serial: int) -> Path:
        """Return the folder with the directories that a call removed."""
        return self._path / f"{serial:012d}.trees"

    def look_again(self) -> None:
        """Read the names of the entries again: other processes may have added and trimmed some."""
        self._sizes = None

    def refresh(self) -> None:
        """Look again, if anything has changed since the last time; for readers without the lock."""
        changed_at = self.changed_at()
        if changed_at != self._seen_at:
            self.look_again()
            self._seen_at = changed_at

    def changed_at(self) -> tuple[int, int]:
        """Return a value that differs after every commit and trim."""
        changed = size = 0
        with contextlib.suppress(FileNotFoundError):
            changed = os.stat(self._path).st_mtime_ns
            # Two commits may have the same time: it advances by milliseconds.
            size = os.stat(self._path / INDEX).st_size
        return changed, size

    def index(self) -> Mapping[int, Touched]:
        """Return the paths that each call changed, without reading what it changed there."""
        changed_at = self.changed_at()
        if changed_at == self._index[0]:
            return self._index[1]
        found: dict[int, Touched] = {}
        with no_collection():
            for values in self._index_lines():
                with contextlib.suppress(ValueError, TypeError):
                    serial, paths, moves = values
                    moved = tuple((str(origin), str(path)) for origin, path in moves)
                    found[int(serial)] = Touched(None if paths is None else frozenset(paths), moved)
        self._index = changed_at, found
        return found

    def oldest_needed(self) -> int | None:
        """Return the call after which nothing may be removed; None if none is needed."""
        found = [serial for each in self.needed_by if (serial := each()) is not None]
        return min(found, default=None)

    def beyond(self, limits: Limits, now: float) -> Iterator[int]:
        """Yield the calls beyond some limits, oldest first, up to the oldest one still needed."""
        sizes = self._known()
        if self._total is None:
            self._total = sum(sizes.values())
        total, count = self._total, len(sizes)
        needed: float | None = None
        for serial, size in sizes.items():
            if not limits.are_exceeded(total, count, functools.partial(self._time, serial), now):
                return
            if needed is None:  # asked only then: every commit comes here
                oldest = self.oldest_needed()
                needed = math.inf if oldest is None else oldest
            # That call itself stays, too: serials go on from the newest.
            if serial >= needed:
                return
            yield serial
            total, count = total - size, count - 1

    def uses(self) -> Uses:
        """Return how many calls refer to each object."""
        uses = self._counting()
        uses.count(sys.maxsize)
        return uses

    def _counting(self) -> Uses:
        return Uses(self, self._known())

    def _time(self, serial: int) -> float:
        """Return when a call was committed, without reading its entry; 0 if the entry is gone."""
        if self._timed[0] != serial:
            with contextlib.suppress(FileNotFoundError):
                self._timed = (serial, os.stat(self._file(serial)).st_mtime)
                return self._timed[1]
            return 0.0
        return self._timed[1]

    def _index_lines(self) -> Iterator[Any]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self._path / INDEX).read_bytes().split(b"\n")[:-1]
            try:
                yield from json.loads(b"[%b]" % b",".join(lines))  # several times as fast
            except ValueError:  # a line was cut short by a kill
                for line in lines:
                    with contextlib.suppress(ValueError):
                        yield json.loads(line)

    def _known(self) -> dict[int, int]:
        if self._sizes is None:
            sizes: dict[int, int] = {}
            with contextlib.suppress(FileNotFoundError), os.scandir(self._path) as found:
                for each in found:
                    if each.is_symlink():
                        raise StoreRefused(
                            f"{each.path} is a symbolic link, which wink never creates"
                        )
                    if named := NAMED.fullmatch(each.name):
                        sizes[int(named[1])] = int(named[2])
            self._sizes = dict(sorted(sizes.items()))
            self._last = max(self._sizes, default=0)
        return self._sizes

    def _file(self, serial: int) -> Path:
        size = self._known().get(serial)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "trimmed from the history", str(serial))
        return self._path / f"{serial:012d}-{size}"


NAMED = re.compile("([0-9]{12,})-([0-9]+)")
"""The file name of an entry: its serial and its size."""
INDEX = "index"
"""The file with the paths that each call changed. It only saves time, so it has no seals."""
_MOST_INDEXED = 1000
_INLINE = 16 << 10
"""Bytes; contents of up to this size are kept in the record of a call, not as objects."""


class Touched(NamedTuple):
    """The paths that a call changed."""

    paths: frozenset[str] | None
    """None if there are many."""
    moves: tuple[tuple[str, str], ...] = ()
    """What it moved: from where to where."""


def _touched(serial: int, records: Sequence[Record]) -> bytes:
    """Return a call's line in the index."""
    changes = [record for record in records if record.is_change]
    paths = {"/".join(parts) for record in changes for parts in record.paths}
    moves = [("/".join(r.origin), "/".join(r.path)) for r in changes if r.origin is not None]
    few = len(paths) <= _MOST_INDEXED
    return json.dumps([serial, sorted(paths) if few else None, moves if few else []]).encode()


def _committed(meta: Mapping[str, Any], paths: Iterable[str]) -> Committed:
    return Committed(
        serial=meta["serial"],
        call_id=meta["call"],
        tool=meta["tool"],
        time=meta["time"],
        paths=tuple(sorted(paths)),
        size=meta["size"],
        undoes=tuple(meta.get("undoes", ())),
        partly=tuple(meta.get("partly", ())),
    )


def _damaged(path: Path, serial: int) -> HistoryDamaged:
    return HistoryDamaged(
        f"The record of change {serial} is damaged ({path}): it can be neither shown nor undone."
        " The others are not affected"
    )


class History(Past):
    """The committed calls of a workspace; the oldest are trimmed to a size limit."""

    def __init__(
        self, store: Store, *, limits: Limits = HISTORY_LIMITS, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(store.path, store.seals(JOURNAL))
        self.store = store
        self.journal = Journal(store)
        self.unfinished: Callable[[], object] | None = None
        """Finishes an earlier transaction; called before the next one begins."""
        self.limits = limits
        self._clock = clock
        self._uses: Uses | None = None
        self._new: list[tuple[int, str]] = []
        """Size and digest of objects that are new since the workspace was opened."""
        self.own: set[int] = set()
        """The serials of what this process has committed."""

    def look_again(self) -> None:
        before, self._sizes, self._total = self._sizes, None, None
        if before is not None and self._uses is not None:
            now = self._known()
            for serial in before.keys() - now.keys():
                self._uses.forget(serial)
            for serial in now.keys() - before.keys():
                self._uses.expect(serial)

    def catch_up(self) -> None:
        """Drop what other processes may have changed; one of them has finished what we had not."""
        self.journal.close()
        self.unfinished = None
        self.look_again()

    def copy_tree(self, delta: Delta, saved: str, tree: Tree, name: str) -> None:
        """Copy a directory that a call removed."""
        with contextlib.closing(Tree(self.trees(delta.committed.serial))) as trees:
            copy_exactly(trees, (saved,), tree, (name,))

    # Adding

    def add(
        self,
        records: Sequence[Record],
        call: ToolCall | None,
        after: Mapping[Parts, Entry | None],
        tree: Tree,
        undoes: Sequence[str] = (),
        contents: Mapping[str, bytes] | None = None,
        redo: MakeRedo | None = None,
        partly: Sequence[str] = (),
    ) -> int | None:
        """Commit. Returns the serial, or None if nothing is stored.

        ``after`` has the present entries at the changed paths. ``tree`` is the workspace, which may
        have scratch directories. ``undoes`` are the ids of the undone calls, ``partly`` those of
        which something is left. ``contents`` are to be kept, by digest. ``redo`` returns what the
        record holds for the session of the call.
        """
        if not [record for record in records if record.op in ("was", "moved")]:
            self.journal.cut(0)
            return None
        if self.limits.size <= 0 and self.oldest_needed() is None:
            self._trim()
            self.journal.cut(0)  # no history: dropping the journal is the commit
            return None
        serial = self.last + 1
        self.own.add(serial)
        entries, size, linked = self._entries(records, tree)
        meta: dict[str, Any] = {
            "serial": serial,
            "call": f"{'undo' if undoes else 'direct'}_{serial}" if call is None else call.id,
            "tool": "" if call is None else call.name,
            "time": self._clock.time(),
            "entries": [(index, entries[index].encode()) for index in sorted(entries)],
            "left": [["/".join(parts), each and each.encode()] for parts, each in after.items()],
            "size": size + sum(map(len, (contents or {}).values())),
            "undoes": list(undoes),
            "kept": {digest: self._content(data) for digest, data in (contents or {}).items()},
        }
        if partly:
            meta["partly"] = list(partly)
        if linked:
            meta["linked"] = linked
        packed = None if redo is None else pack(redo(), self.objects, safe=self.store.safe)
        if packed is not None:
            meta["redo"] = packed
            if digest := object_in(packed):
                meta["kept"][digest] = None  # counted like other contents
        commit = Record(op="commit", data=meta)
        self.journal.append(commit)
        finish = functools.partial(self.finish, [*records, commit], entries)
        try:
            finish()
        except OSError as error:
            # It is committed nevertheless.
            logger.warning("The history of %s will be saved later: %s", meta["call"], error)
            self.unfinished = finish
            self._last = serial
            return None
        self._trim()
        if self._seen_at != _NEVER:  # no other process can have added anything meanwhile
            self._seen_at = self.changed_at()
        return serial

    def _content(self, data: bytes) -> str | None:
        """Return a small content as text; others become objects."""
        if len(data) <= _INLINE:
            return base64.b64encode(data).decode()
        self.objects.add(data, safe=self.store.safe)
        return None

    def finish_earlier(self) -> None:
        """Finish an earlier transaction, or raise if that still fails."""
        if self.unfinished is not None:
            self.unfinished()
            self.unfinished = None

    def finish(self, records: Sequence[Record], entries: Mapping[int, Entry] | None = None) -> None:
        """Move the saved files of a committed transaction into the history. Idempotent."""
        meta: dict[str, Any] = records[-1].data or {}
        serial, size = int(meta["serial"]), int(meta["size"])
        if entries is None:
            entries = {int(index): Entry.decode(encoded) for index, encoded in meta["entries"]}
        edits = [index for index in sorted(entries) if records[index].in_place]
        # Files changed in place first: a removed file may be the same one.
        for index in [*edits, *(entries.keys() - edits)]:
            record, entry = records[index], entries[index]
            if entry.kind == "directory":
                # The files in it that were edited later through another hard link.
                edited = {entries[n].ino: entries[n] for n in reversed(edits) if n > index}
                self._settle_directory(record.saved or "", serial, edited)
            else:
                self._settle_file(record.source or Source(record.saved or ""), entry)
        # First: readers take the size of the index for a sign of a commit.
        self._add_to_index(_touched(serial, records))
        self.journal.move(f"{self._path}/{serial:012d}-{size}")
        if self._sizes is not None and serial not in self._sizes:
            self._sizes[serial] = size
            self._total = None if self._total is None else self._total + size
            if self._uses is not None:
                self._uses.expect(serial)
        self._last = max(self._last, serial)

    def _add_to_index(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # without the line, the entry itself is read
            try:
                append_line(self._path / INDEX, line)
            except FileNotFoundError:
                self._path.mkdir(mode=0o700)
                append_line(self._path / INDEX, line)

    def leftovers(self) -> set[str]:
        """Return the names that a finished transaction may have left in its directory."""
        if self.journal.path.exists():
            # Without a history, an empty journal is a commit.
            return set(self.store.tree.names(())) if self.limits.size <= 0 else set()
        records = [delta.records for delta in self.readable([self.last] if self.last else [])]
        return {name for each in records for record in each for name in record.names}

    def _entries(
        self, records: Sequence[Record], tree: Tree
    ) -> tuple[dict[int, Entry], int, list[tuple[str, str, int]]]:
        """Return the full entries that the records replaced, the bytes to be added, and the
        hard-linked files in removed directories: where each is, and its inode.
        """
        entries: dict[int, Entry] = {}
        linked: list[tuple[str, str, int]] = []
        total = 0
        limit = self.limits.size if self.oldest_needed() is None else sys.maxsize
        found = list(replaced(records, self.store.tree, tree, limit))
        for index, record in enumerate(records):
            if record.source is not None and record.after is None and record.before is not None:
                found.append((index, record.before, record.source))
        for index, entry, source in found:
            if entry.kind == "directory":
                inside = list(self.store.tree.walk((source.name,)))
                total += sum(each.st_size for _, each in inside)
                top: Parts = (source.name,)
                if records[index].scratch is not None:  # the store has a copy of it
                    place, top = saved_at(records[index], self.store.tree, tree)
                    inside = place.walk(top)
                linked += [
                    (source.name, "/".join(parts[len(top) :]), each.st_ino)
                    for parts, each in inside
                    if each.st_nlink > 1 and stat.S_ISREG(each.st_mode)
                ]
            elif entry.kind == "file" and entry.size <= limit:
                digest = entry.digest or self._digest(source, entry.size)
                total += 0 if digest in self.store.objects else entry.size
                entry = entry._replace(digest=digest)
            entries[index] = entry
        return entries, total, linked[:_LINKED]

    def _digest(self, source: Source, size: int) -> str:
        own = source.path(self.store.path, size)
        if own is None:
            return hashlib.sha256(source.read(self.store.path, size)).hexdigest()
        with Held(_open_own(own)) as fd:
            return digest_of(fd)

    def _settle_file(self, source: Source, entry: Entry) -> None:
        """Move the previous content of a file to the objects."""
        objects, own = self.store.objects, source.path(self.store.path)
        if entry.digest is None:
            return
        if may_compress(entry.size) and len(self._new) < COMPRESSED_AT_ONCE:
            self._new.append((entry.size, entry.digest))
        if own is None:
            objects.add(source.read(self.store.path, entry.size), safe=self.store.safe)
            return
        try:
            links = os.lstat(own).st_nlink
        except FileNotFoundError:
            return  # done in an earlier attempt
        # An existing object is replaced, because it may be damaged; but not by a file that was
        # changed since through another hard link: then a copy has its content.
        if entry.digest in objects and (
            links > 1 or self._digest(source, entry.size) != entry.digest
        ):
            return
        if links == 1:
            os.chmod(own, 0o600)
            objects.take(own, entry.digest)
            return
        # It may be changed through its other hard links.
        with Held(_open_own(own)) as fd:
            objects.add(fd, safe=self.store.safe)

    def _settle_directory(self, name: str, serial: int, edited: Mapping[int, Entry]) -> None:
        if self.store.tree.status((name,)) is not None:
            self._part_links(name, edited)
            trees = self.trees(serial)
            trees.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Of a call with the same serial, whose removal a kill has cut short.
            remove_tree(trees / name)
            os.rename(name, trees / name, src_dir_fd=self.store.tx_fd)

    def _part_links(self, name: str, edited: Mapping[int, Entry]) -> None:
        """Separate files from their other hard links, through which they could still change."""
        tree = self.store.tree
        linked = [
            (parts, status.st_ino)
            for parts, status in tree.walk((name,))
            if stat.S_ISREG(status.st_mode) and (status.st_nlink > 1 or status.st_ino in edited)
        ]
        copies: dict[int, Parts] = {}
        for parts, ino in linked:
            staged = self.store.fresh()
            if ino in copies:
                with tree.parent(copies[ino]) as other:
                    link(other, copies[ino][-1], tree.fd, staged)
            elif ino in edited:
                self.make_file(edited[ino], tree, staged)
            else:
                copy_exactly(tree, parts, tree, (staged,))
            copies[ino] = parts
            with tree.parent(parts) as above:
                before = os.fstat(above)
                # One rename, so that the history always has the file.
                os.rename(staged, parts[-1], src_dir_fd=tree.fd, dst_dir_fd=above)
                os.utime(above, ns=(before.st_atime_ns, before.st_mtime_ns))

    def make_file(self, entry: Entry, tree: Tree, name: str) -> None:
        """Re-create a file at a free name; raises FileNotFoundError if it was not saved."""
        if entry.digest is None:
            raise FileNotFoundError(errno.ENOENT, "its content was not saved", name)
        with (
            Held(self.store.objects.open(entry.digest)) as reading,
            new_file(tree.fd, name) as writing,
        ):
            copy_content(reading, writing)
        apply_entry(tree, (name,), entry)

    # Trimming

    def _trim(self) -> None:
        """Remove the oldest entries beyond the limits, a bounded number at each commit.

        The call is already committed, so an error here does not fail it.
        """
        try:
            self._remove_beyond(self.limits, TRIMMED_AT_ONCE)
        except OSError as error:
            logger.warning("The history could not be trimmed; this will be retried: %s", error)

    def prune(self, limits: Limits) -> int:
        """Remove all entries beyond some limits at once; returns how many."""
        return self._remove_beyond(limits, sys.maxsize)

    def _counting(self) -> Uses:
        self._uses = self._uses or super()._counting()
        return self._uses

    def remove_stray_trees(self) -> None:
        """Remove directories whose entry was trimmed just before a kill."""
        known = {self.trees(serial).name for serial in self._known()}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._path):
                if name.endswith(".trees") and name not in known:
                    remove_tree(self._path / name)

    def _remove_beyond(self, limits: Limits, most: int) -> int:
        """Remove up to ``most`` entries, after counting up to ``most`` for their references."""
        beyond = list(itertools.islice(self.beyond(limits, self._clock.time()), most))
        if not beyond:
            return 0
        uses = self._counting()
        if not uses.count(most):
            return 0
        try:
            self._remove(beyond, uses, safe=self.store.safe or most == sys.maxsize)
        except BaseException:
            self._uses = None  # count again: an entry may still be there
            raise
        return len(beyond)

    def _remove(self, serials: Iterable[int], uses: Uses, *, safe: bool) -> None:
        """Remove entries, then what only they needed: a kill leaves no entry that lacks something.

        What it leaves of the rest, the next ``prune`` removes.
        """
        unused: set[str] = set()
        trees: list[Path] = []
        for serial in serials:
            keep(self.store.path, self.redo(serial))
            self._file(serial).unlink(missing_ok=True)
            unused |= uses.forget(serial)
            trees.append(self.trees(serial))
            size = self._known().pop(serial)
            self.own.discard(serial)
            self._total = None if self._total is None else self._total - size
        if safe:
            with Held(os.open(self._path, os.O_RDONLY)) as fd:
                os.fsync(fd)
        for digest in unused:
            self.store.objects.remove(digest)
        for each in trees:
            remove_tree(each)
        self._shorten_index()

    def _shorten_index(self) -> None:
        """Drop the trimmed calls from the index, once they are most of it."""
        index = self._path / INDEX
        with contextlib.suppress(FileNotFoundError):
            if os.path.getsize(index) < _SHORT:
                return
            lines = index.read_bytes().split(b"\n")[:-1]
            first = min(self._known(), default=0)
            found = ((each, re.match(rb"\[([0-9]+),", each)) for each in lines)
            kept = [line for line, serial in found if serial and int(serial[1]) >= first]
            if len(kept) * 2 < len(lines):
                write_whole(index, b"".join(each + b"\n" for each in kept), safe=False)

    # Compressing

    def compress_new(self) -> None:
        """Compress objects that are new since the workspace was opened, a bounded number.

        Not at commit: there an object is only a renamed file. Not for a store that syncs: that
        would take too long. `wink gc` compresses the others.
        """
        room = 0 if self.store.safe else COMPRESSED_BYTES
        try:
            for size, digest in self._new:
                room -= size
                if room < 0:
                    break
                self.store.objects.compress(digest)
        except OSError as error:
            logger.debug("Contents were not compressed: %s", error)
        self._new.clear()


COMPRESSED_AT_ONCE = 256
COMPRESSED_BYTES = 4 << 20
"""How many objects, and bytes of them, are compressed when a workspace is closed."""

_LINKED = 1000
"""How many hard-linked files in removed directories a commit notes, to link them again."""
_SHORT = 64 << 10
"""Bytes; a shorter index is left as it is."""
TRIMMED_AT_ONCE = 64
"""How many entries one commit may read, and how many it may remove."""


class Uses:
    """Reference counts of objects, built a few entries at a time."""

    def __init__(self, history: Past, serials: Iterable[int]) -> None:
        self._history = history
        self._uncounted = sorted(serials)
        self._counts: Counter[str] = Counter()
        self._counted: dict[int, set[str]] = {}
        """The objects of each counted entry: another process may trim it."""
        self.damaged: set[int] = set()
        """Unreadable entries: while one is left, no object is known to be unused."""

    def __getitem__(self, digest: str) -> int:
        """Return how many counted entries refer to an object."""
        return self._counts[digest]

    def expect(self, serial: int) -> None:
        """Add an entry to be counted later."""
        self._uncounted.append(serial)

    def count(self, most: int) -> bool:
        """Count some entries; True when all are counted."""
        for _ in range(min(most, len(self._uncounted))):
            serial = self._uncounted.pop()
            try:
                digests = self._counted[serial] = self._digests(serial)
                self._counts.update(digests)
            except HistoryDamaged:
                self.damaged.add(serial)
            except FileNotFoundError:
                continue
        return not self._uncounted

    def forget(self, serial: int) -> set[str]:
        """Remove an entry from the counts; returns the objects that are now unused."""
        self.damaged.discard(serial)
        if serial in self._uncounted:
            self._uncounted.remove(serial)
        digests = self._counted.pop(serial, set())
        self._counts.subtract(digests)
        return set() if self.damaged else {each for each in digests if self._counts[each] <= 0}

    def _digests(self, serial: int) -> set[str]:
        delta = self._history.read(serial)
        befores = [record.before for record in delta.records]
        found = {each.digest for each in befores if each is not None and each.digest is not None}
        return found.union(digest for digest, data in delta.kept.items() if data is None)


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file, completely or not at all."""
    with Held(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)) as fd:
        size = os.fstat(fd).st_size
        try:
            write_all(fd, line + b"\n")
        except BaseException:
            os.ftruncate(fd, size)
            raise


def saved_at(record: Record, own: Tree, workspace: Tree) -> tuple[Tree, Parts]:
    """Return the tree and path of a saved file."""
    if record.scratch is None:
        return own, (record.saved or "",)
    return workspace, (*record.scratch, record.saved or "")


def replaced(
    records: Sequence[Record], own: Tree, workspace: Tree, hashed: int = -1
) -> Iterator[tuple[int, Entry, Source]]:
    """Yield index, entry and content of what each record replaced, newest first.

    Files of up to ``hashed`` bytes get a digest.
    """
    edited: dict[int, tuple[Entry, Source]] = {}
    firsts = _firsts(records)
    for index in reversed(range(len(records))):
        record = records[index]
        before = record.before
        if before is None or record.op != "was":
            continue
        if record.source is not None and record.after is not None:
            edited[before.ino] = before, record.source
            yield index, *edited[before.ino]
        elif record.saved is not None and firsts[record.saved] == index:
            read = before.kind == "file" and before.size <= hashed
            entry = capture(*saved_at(record, own, workspace), read=read)
            if entry is not None:
                # It may have been changed since through another hard link.
                known = edited.get(entry.ino) if entry.kind == "file" else None
                entry, source = known or (entry, Source(record.saved))
                yield index, entry._replace(ino=before.ino), source


def _in_full(before: Entry | None, entry: Entry | None) -> Entry | None:
    """Return the entry of the saved file, which may be a copy, with the original's identity."""
    if before is None or entry is None:
        return entry or before
    return entry._replace(ino=before.ino, ctime_ns=before.ctime_ns)


def _firsts(records: Sequence[Record]) -> dict[str | None, int]:
    """Return the first record of each saved file, by name."""
    firsts: dict[str | None, int] = {}
    for index, record in enumerate(records):
        if record.saved is not None:
            firsts.setdefault(record.saved, index)
    return firsts


def _open_own(path: str) -> int:
    """Open a saved file, even one without read permission."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except PermissionError:
        os.chmod(path, 0o600)
        return os.open(path, flags)


def _after(meta: Mapping[str, Any]) -> dict[Parts, Entry | None]:
    return {
        checked_parts(path): None if entry is None else Entry.decode(entry)
        for path, entry in meta["left"]
    }


# Adopting


def adopt_store(
    root: str | os.PathLike[str], *, store: str | os.PathLike[str] | None = None
) -> tuple[str, ...]:
    """Seal the store of a workspace; returns a sentence for each damaged record.

    For a store that is damaged, or whose key is lost: wink cannot distinguish it from a planted
    one. Names that lead out of the store or workspace are never accepted. Sessions
    and ledgers are adopted by ``SavedSession.adopt`` and ``OutcomeLedger.adopt``.

    Raises:
        StoreRefused: It belongs to another user or contains links.
        WorkspaceLocked: The workspace is open elsewhere.
    """
    root = Path(os.path.realpath(root))
    path = store_of(root, store)
    with Held(open_store(path)) as fd:
        lock = ProcessLock(fd, root, wait=None, alone=True)
    try:
        if pids := present_in(root, store=path):
            # They would go on with the old seals.
            raise WorkspaceLocked(f"{root} is open in process {pids[0]}. Close it there", pids[0])
        return tuple(_adopt(root, path))
    finally:
        lock.close()


def _adopt(root: Path, path: Path) -> Iterator[str]:
    note = Note(id=os.urandom(8).hex(), path=str(root), ino=os.stat(root).st_ino)
    known = re.search(rb'"id": "([0-9a-f]{16})"', _read(path / "root"))
    before = None if known is None else known[1].decode()
    journals = [path / "tx" / "journal", *_history(path)]
    lines = {journal: _read(journal) for journal in journals}
    earlier = None if before is None else Seals(f"{JOURNAL} {before}")
    # If one seal is valid, all must be: only with a lost key are all invalid.
    strict = earlier is not None and any(_good(data, earlier) for data in lines.values())
    seals = note.seals(JOURNAL)
    for journal, data in lines.items():
        sealed, texts = b"", list(_texts(data, earlier if strict else None))
        for text in texts:
            sealed += b"damaged\n" if text is None else seals.sealed(text, len(sealed)) + b"\n"
        if None in texts or (data and not data.endswith(b"\n")):
            copy = left_in(path, (journal.name,))
            write_whole(copy, data)
            yield f"{journal} is damaged; its content is in {copy}"
        if data:
            write_whole(journal, sealed)
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        noted = json.loads((path / NOTE).read_bytes()[SEAL_SIZE + 1 :])
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
    """Yield the text of each complete line, or None if it is damaged or invalid."""
    offset = 0
    for line in data.split(b"\n")[:-1]:
        mark, _, text = line.partition(b" ")
        good = len(mark) == SEAL_SIZE
        if strict is not None:
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


def _read(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=no_links) as file:
        return file.read()
    return b""
