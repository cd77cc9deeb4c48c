"""What other programs changed in a directory: a look at every status, against what was there.

The manifest knows each path as it was, and the store has each file's content. Where the system
tells which paths were touched, only those are looked at.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.filesystem.confined import BARRED, Tree, xattrs_of
from weakincentives.filesystem.inotify import Watcher
from weakincentives.filesystem.protocol import Parts
from weakincentives.filesystem.rooms import TEMPORARY
from weakincentives.filesystem.store import Entry, Objects, Store, digest_of

if TYPE_CHECKING:
    from weakincentives.filesystem.journal import Changes

__all__ = ["External", "Found", "Manifest", "digests_in", "find_unfinished"]

logger = logging.getLogger("weakincentives.filesystem")

# A file that changes again this soon after it was looked at may get the same times as before.
RACY_NS = 50_000_000

# A command is killed with the process that started it. How many seconds that may take.
DYING = 10.0

# Nothing is there any more, or something else, such as a link.
_GONE = BARRED | {errno.ENOENT, errno.EINVAL}

SETTLED = "settled"
"""In the transaction's directory: what others changed is in the journal, and is being undone."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    path BLOB PRIMARY KEY, entry TEXT NOT NULL, ctime_ns INTEGER NOT NULL
) WITHOUT ROWID
"""


class Found(NamedTuple):
    """A path that is not as the manifest knows it."""

    parts: Parts
    before: Entry | None
    """What was there; None for nothing."""
    times: tuple[tuple[Parts, int], ...] = ()
    """Times that undoing sets when all else is done, of directories that are as they were."""
    twin: Parts | None = None
    """Another name of the same file, which undoing brings back before this one."""


class _Known(NamedTuple):
    entry: Entry
    ctime_ns: int
    """0 when the times cannot be trusted: then the content is compared."""


class Manifest:
    """What is at every path of a workspace, kept in the store between calls.

    Args:
        file: The database.
        objects: Where the contents of files go.
        watch: Whether to have the system tell which paths are touched, where it can.
    """

    def __init__(self, file: Path, objects: Objects, *, watch: bool = True) -> None:
        import sqlite3  # not for those who never need it

        self._objects = objects
        self._lock = threading.RLock()
        self._database = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        # A killed process leaves a journal that the next one goes back by; power is not its case.
        self._database.execute("PRAGMA synchronous=OFF")
        self._database.execute(SCHEMA)
        self._known: dict[Parts, _Known] = {}
        self._children: dict[Parts, set[str]] = {}
        self._linked: dict[int, set[Parts]] = {}
        for path, entry, ctime_ns in self._database.execute("SELECT * FROM entries"):
            self._remember(_split(path), _Known(Entry.decode(json.loads(entry)), ctime_ns))
        self._wants_watcher = watch
        self._watcher: Watcher | None = None
        self._covered = False

    def close(self) -> None:
        """Close the database and stop watching."""
        with self._lock:
            self._stop_watching()
            self._database.close()

    @property
    def watching(self) -> bool:
        """Whether the next look is narrowed to what the system says was touched."""
        return self._covered

    def refresh(self, tree: Tree) -> None:
        """Make the manifest agree with the workspace, and keep every content."""
        with self._lock:
            if self._watcher is None and self._wants_watcher:
                self._start_watching()
            now: dict[Parts, _Known | None] = {}
            since = int(SYSTEM_CLOCK.time() * 1e9) - RACY_NS
            for parts, status in self._differing(tree):
                now[parts] = None if status is None else self._look(tree, parts, since)
            self._save(now)
            if self._watcher is not None:
                self._watcher.forget()
                self._covered = True

    def changes(self, tree: Tree) -> list[Found]:
        """Return the paths that differ from the manifest, directories before what is in them."""
        with self._lock:
            found: list[Found] = []
            for parts, status in self._differing(tree):
                known = self._known.get(parts)
                if known is None or status is None or self._differs(tree, parts, known):
                    found.append(Found(parts, None if known is None else known.entry))
            return sorted(found, key=_by_path)

    def to_undo(self, tree: Tree, found: Sequence[Found]) -> list[Found]:
        """Return what was found, and what else must be known, so that undoing in reverse works.

        Directories that went are made again before what was in them, and get their times when all
        else is done. Of the names of one file, those that still are that file come first; the
        others join them.
        """
        touched = {one.parts[:-1] for one in found if one.parts}
        # That entries came and went is no change of a directory: only its time is put back.
        only = {one.parts for one in found if one.parts in touched and self._only_time(tree, one)}
        kept = [one for one in found if one.parts not in only]
        ours = {one.parts for one in kept}
        directories = [one for one in kept if _was_directory(one)]
        others = [one for one in kept if not _was_directory(one)]
        gone = [one for one in directories if not _is_directory(tree.status_if_reached(one.parts))]
        stayed = {one.parts: one for one in others if _is_still_linked(tree, one)}
        others = [one for one in others if one.parts not in stayed]
        for one in kept:
            for parts in self._other_names(one) - ours:
                stayed[parts] = Found(parts, self._known[parts].entry)
        ordered = _with_twins([*directories, *others, *reversed(gone), *stayed.values()])
        if ordered:
            above = touched - ours
            known = {parts: self._known[parts] for parts in above if parts in self._known}
            times = tuple((parts, one.entry.mtime_ns) for parts, one in known.items())
            ordered[0] = ordered[0]._replace(times=times)
        return ordered

    def _other_names(self, one: Found) -> set[Parts]:
        if one.before is None or _was_directory(one) or one.before.nlink == 1:
            return set()
        return self._linked.get(one.before.ino, set())

    def _only_time(self, tree: Tree, one: Found) -> bool:
        found = _entry(tree, one.parts, None)
        if found is None or one.before is None or one.before.kind != "directory":
            return False
        return _plain(replace(found[0], mtime_ns=one.before.mtime_ns)) == _plain(one.before)

    # Looking

    def _differing(self, tree: Tree) -> Iterator[tuple[Parts, os.stat_result | None]]:
        """Yield what may have changed: each path whose status is not the known one."""
        if self._watcher is not None:
            self._watcher.drain()
            if self._watcher.lost:
                self._stop_watching()
                self._start_watching()
        narrowed = self._touched(tree)
        yield from self._below(tree, ()) if narrowed is None else narrowed

    def _touched(self, tree: Tree) -> list[tuple[Parts, os.stat_result | None]] | None:
        """Return what differs among what the system says was touched; None when in doubt."""
        watcher = self._watcher
        if watcher is None or not self._covered:
            return None
        trees = _topmost(parts for parts in watcher.trees if not _is_ours(parts))
        found = [one for parts in trees for one in self._below(tree, parts)]
        # A file with several names may have been changed by one that nobody watches.
        several = (parts for names in self._linked.values() for parts in names)
        for parts in {*watcher.touched, *several}:
            covered = any(parts[:depth] in trees for depth in range(len(parts) + 1))
            if not covered and not _is_ours(parts):
                found.extend(self._one(tree, parts))
        # Where a file got another name, nobody tells which its first one is.
        return None if any(self._is_newly_linked(*one) for one in found) else found

    def _is_newly_linked(self, parts: Parts, status: os.stat_result | None) -> bool:
        return (
            status is not None
            and status.st_nlink > 1
            and not stat.S_ISDIR(status.st_mode)
            and parts not in self._linked.get(status.st_ino, ())
        )

    def _one(self, tree: Tree, parts: Parts) -> Iterator[tuple[Parts, os.stat_result | None]]:
        status = tree.status_if_reached(parts)
        known = self._known.get(parts)
        if _is_directory(status) != (known is not None and known.entry.kind == "directory"):
            yield from self._below(tree, parts)
        elif not _agrees(status, known):
            yield parts, status

    def _below(self, tree: Tree, top: Parts) -> Iterator[tuple[Parts, os.stat_result | None]]:
        """Yield what differs at a path and at all that is or was below it."""
        pending: list[tuple[Parts, os.stat_result | None]] = [(top, tree.status_if_reached(top))]
        while pending:
            parts, status = pending.pop()
            if not _agrees(status, self._known.get(parts)):
                yield parts, status
            known = self._children.get(parts, ())
            if not _is_directory(status):
                pending.extend(((*parts, name), None) for name in known)
                continue
            listed = self._list(tree, parts)
            if listed is not None:
                pending.extend(((*parts, name), found) for name, found in listed.items())
                pending.extend(((*parts, name), None) for name in known if name not in listed)

    def _list(self, tree: Tree, parts: Parts) -> dict[str, os.stat_result] | None:
        """Return what is in a directory by name; None for one that may not be looked into."""
        listed: dict[str, os.stat_result] = {}
        try:
            with tree.listing(parts) as fd:
                # First the watch, then the look: nothing happens unseen in between.
                self._watch(fd, parts)
                with os.scandir(fd) as entries:
                    for entry in entries:
                        if entry.name.startswith(TEMPORARY):
                            continue
                        with contextlib.suppress(FileNotFoundError):
                            listed[entry.name] = entry.stat(follow_symlinks=False)
        except PermissionError:
            return None
        except OSError as error:
            if error.errno in _GONE:
                return {}
            raise
        return listed

    def _look(self, tree: Tree, parts: Parts, since: int) -> _Known | None:
        """Return what is at a path now, its content kept; None when it is gone again."""
        found = _entry(tree, parts, self._objects)
        if found is None:
            return None
        entry, ctime_ns = found
        return _Known(entry, 0 if ctime_ns > since else ctime_ns)

    def _differs(self, tree: Tree, parts: Parts, known: _Known) -> bool:
        found = _entry(tree, parts, None)
        if found is None:
            return True
        before, now = known.entry, found[0]
        if before.kind == "file" == now.kind:
            if now.size != before.size or _relinked(before, now):
                return True
            now = replace(now, digest=before.digest)
        if _plain(before) != _plain(now):
            return True
        return before.kind == "file" and _digest(tree, parts) != before.digest

    # Keeping

    def _save(self, now: dict[Parts, _Known | None]) -> None:
        if not now:
            return
        with self._transaction():
            for parts, known in now.items():
                path = os.fsencode("/".join(parts))
                self._forget(parts)
                if known is None:
                    self._database.execute("DELETE FROM entries WHERE path = ?", (path,))
                else:
                    self._remember(parts, known)
                    self._database.execute(
                        "INSERT OR REPLACE INTO entries VALUES (?, ?, ?)",
                        (path, json.dumps(known.entry.encode()), known.ctime_ns),
                    )

    @contextlib.contextmanager
    def _transaction(self) -> Generator[None]:
        self._database.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _remember(self, parts: Parts, known: _Known) -> None:
        self._known[parts] = known
        if parts:
            self._children.setdefault(parts[:-1], set()).add(parts[-1])
        if known.entry.kind == "file" and known.entry.nlink > 1:
            self._linked.setdefault(known.entry.ino, set()).add(parts)

    def _forget(self, parts: Parts) -> None:
        known = self._known.pop(parts, None)
        if known is None:
            return
        if parts:
            names = self._children[parts[:-1]]
            names.discard(parts[-1])
            if not names:
                del self._children[parts[:-1]]
        names_of = self._linked.get(known.entry.ino)
        if names_of is not None:
            names_of.discard(parts)
            if not names_of:
                del self._linked[known.entry.ino]

    # Watching

    def _start_watching(self) -> None:
        """Have the system tell what is touched, once the next refresh has looked at everything."""
        try:
            self._watcher = Watcher()
        except OSError:
            self._wants_watcher = False

    def _watch(self, fd: int, parts: Parts) -> None:
        if self._watcher is not None:
            try:
                self._watcher.watch(fd, parts)
            except OSError:
                # Too many directories for this system: every look is a full one from now on.
                self._stop_watching()
                self._wants_watcher = False

    def _stop_watching(self) -> None:
        watcher, self._watcher = self._watcher, None
        self._covered = False
        if watcher is not None:
            watcher.close()


class External:
    """Changes by other programs during a transaction: found, and journalled as its own.

    From :meth:`begin` on, whatever differs from the manifest is the transaction's. The manifest is
    brought up to date after each change of our own, so the journal has everything in its order.
    """

    def __init__(self, tree: Tree, store: Store) -> None:
        self._tree = tree
        self._store = store
        self._manifest: Manifest | None = None
        self._settled = store.tx / SETTLED
        self._since = 0

    @property
    def manifest(self) -> Manifest:
        """What is known of the workspace; read from the store when first asked for."""
        if self._manifest is None:
            self._manifest = Manifest(self._store.path / "manifest.db", self._store.objects)
        return self._manifest

    def expected(self, changes: Changes) -> bool:
        """Tell whether others change files in this transaction."""
        records = changes.records
        return len(records) > self._since and records[self._since].op == "external"

    def begin(self, changes: Changes) -> None:
        """Expect changes by others from here on."""
        if self.expected(changes):
            self.settle(changes)
            return
        # The manifest first: what recovery goes back to must be known when the record is there.
        self.manifest.refresh(self._tree)
        self._since = len(changes.records)
        changes.expect_external()

    def settle(self, changes: Changes) -> None:
        """Journal what others changed so far."""
        if self.expected(changes):
            journal_found(self.manifest, self._tree, changes)
            self.manifest.refresh(self._tree)

    def refresh(self, changes: Changes) -> None:
        """Take note of a change of our own."""
        if self.expected(changes):
            self.manifest.refresh(self._tree)

    @contextlib.contextmanager
    def undoing(self, changes: Changes) -> Generator[None]:
        """Journal what others changed, then undo in the block.

        While a note of it is there, recovery does not take what is half undone for a change.
        """
        if not self.expected(changes):
            yield
            return
        self.settle(changes)
        self._settled.touch()
        yield
        self.refresh(changes)
        self._settled.unlink()

    def close(self) -> None:
        """Close the manifest."""
        if self._manifest is not None:
            self._manifest.close()
            self._manifest = None


def journal_found(manifest: Manifest, tree: Tree, changes: Changes) -> None:
    """Journal all that differs from the manifest, so that undoing brings it back."""
    for one in manifest.to_undo(tree, manifest.changes(tree)):
        changes.found(one.parts, one.before, one.times, one.twin)


def find_unfinished(tree: Tree, store: Store, changes: Changes) -> None:
    """Journal what other programs changed in a transaction whose process is gone."""
    settled = store.tx / SETTLED
    file = store.path / "manifest.db"
    if settled.exists() or not file.exists():
        return
    if not store.wait_for_programs(DYING):
        logger.warning(
            "A program that was started to work on %s still runs, and may change files", tree.path
        )
    manifest = Manifest(file, store.objects, watch=False)
    try:
        journal_found(manifest, tree, changes)
    finally:
        manifest.close()
    settled.touch()


def _is_ours(parts: Parts) -> bool:
    """Tell whether a path is in a room: nothing there is a change of anybody."""
    return any(name.startswith(TEMPORARY) for name in parts)


def _by_path(found: Found) -> Parts:
    return found.parts


def _was_directory(found: Found) -> bool:
    return found.before is not None and found.before.kind == "directory"


def _is_still_linked(tree: Tree, one: Found) -> bool:
    """Tell whether a path still is a name of the file that it and others were names of."""
    if one.before is None or one.before.nlink == 1:
        return False
    status = tree.status_if_reached(one.parts)
    return status is not None and status.st_ino == one.before.ino


def _with_twins(ordered: Sequence[Found]) -> list[Found]:
    """Let each name of a file know the one that comes back before it: the next in this order."""
    names: dict[int, Parts] = {}
    done: list[Found] = []
    for one in reversed(ordered):
        twin = None
        if one.before is not None and one.before.nlink > 1 and not _was_directory(one):
            twin = names.get(one.before.ino)
            names[one.before.ino] = one.parts
        done.append(one._replace(twin=twin))
    return done[::-1]


def _is_directory(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISDIR(status.st_mode)


def _agrees(status: os.stat_result | None, known: _Known | None) -> bool:
    if status is None or known is None:
        return status is None and known is None
    entry = known.entry
    return (
        known.ctime_ns == status.st_ctime_ns
        and entry.ino == status.st_ino
        and entry.mtime_ns == status.st_mtime_ns
        and entry.size == status.st_size
        and entry.mode == stat.S_IMODE(status.st_mode)
    )


def _entry(tree: Tree, parts: Parts, objects: Objects | None) -> tuple[Entry, int] | None:
    """Return what is at a path with its change time, and its content's digest when it is kept."""
    status = tree.status_if_reached(parts)
    if status is None:
        return None
    try:
        if stat.S_ISLNK(status.st_mode):
            return Entry.of(status, target=tree.link_target(parts)), status.st_ctime_ns
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            return Entry.of(status), status.st_ctime_ns
        fd = tree.open_file(parts) if parts else os.dup(tree.fd)
    except PermissionError:
        return Entry.of(status), status.st_ctime_ns
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    try:
        status = os.fstat(fd)
        digest = None
        if objects is not None and stat.S_ISREG(status.st_mode):
            digest = objects.add_open(fd)
            if os.fstat(fd).st_ctime_ns != status.st_ctime_ns:
                return Entry.of(status, xattrs=xattrs_of(fd), digest=digest), 0
        return Entry.of(status, xattrs=xattrs_of(fd), digest=digest), status.st_ctime_ns
    finally:
        os.close(fd)


def _digest(tree: Tree, parts: Parts) -> str | None:
    try:
        fd = tree.open_file(parts)
    except OSError:
        return None
    try:
        return digest_of(fd)
    finally:
        os.close(fd)


def _relinked(before: Entry, now: Entry) -> bool:
    return before.ino != now.ino and (before.nlink > 1 or now.nlink > 1)


def _plain(entry: Entry) -> Entry:
    """Return an entry without what says nothing about whether it was changed."""
    size = entry.size if entry.kind == "file" else 0
    return replace(entry, ino=0, nlink=0, size=size)


def _topmost(paths: Iterable[Parts]) -> set[Parts]:
    """Return the paths that are not below another of them."""
    kept: set[Parts] = set()
    for parts in sorted(paths):
        if not any(parts[:depth] in kept for depth in range(len(parts))):
            kept.add(parts)
    return kept


def _split(path: bytes) -> Parts:
    return tuple(os.fsdecode(path).split("/")) if path else ()


def digests_in(file: Path) -> set[str]:
    """Return the contents that the manifest in a database needs."""
    import sqlite3

    database = sqlite3.connect(file)
    try:
        rows = database.execute("SELECT entry FROM entries").fetchall()
    except sqlite3.OperationalError:
        return set()  # it was made a moment ago, and has no tables yet
    finally:
        database.close()
    found = (Entry.decode(json.loads(entry)).digest for (entry,) in rows)
    return {digest for digest in found if digest is not None}
