"""Finds what other programs changed in a directory: every status is compared with a manifest.

The manifest has each path as it was, and the pack has each file's content. Where the system tells
which paths were touched, only those are compared.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import stat
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.gc_pause import no_collection
from weakincentives.core.state import no_links
from weakincentives.filesystem.base import Look
from weakincentives.filesystem.entry import Entry
from weakincentives.filesystem.inotify import Watcher
from weakincentives.filesystem.journal import Record
from weakincentives.filesystem.pack import Pack, Place, Row
from weakincentives.filesystem.paths import BARRED, Parts, outermost
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.store import Source, Store, write_whole
from weakincentives.filesystem.tree import Tree, remove_tree, xattrs_of

if TYPE_CHECKING:
    from weakincentives.filesystem.changes import Changes

logger = logging.getLogger("weakincentives.filesystem")

# A file that changes again this soon after it was read may get the same times as before.
RACY_NS = 50_000_000

# A command is killed with the process that started it. How many seconds that may take.
DYING = 10.0

# Files with names elsewhere get one more in the store while programs are at work, up to so many.
MAX_NAMES = 1000

# What undoing may need at once, whatever the handler has opened or filled meanwhile.
SPARE_DESCRIPTORS = 16
RESERVE = 64 << 20

# Nothing is there any more, or something else, such as a link.
_GONE = BARRED | {errno.ENOENT, errno.EINVAL}

_OPENED = (stat.S_IFREG, stat.S_IFDIR)
_OPEN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

Left = Mapping[Parts, Entry | None]
"""What calls left at paths."""

_CHANGED: Place = ("", 0, 0)
"""Stands for a content that is not the known one, and not saved."""


class Noted(NamedTuple):
    """Which changes since the files were noted belong to a transaction."""

    path: Parts | None = None
    """Only those of this path and the directories above it; None for all."""

    def covers(self, parts: Parts) -> bool:
        return self.path is None or parts == self.path[: len(parts)]


class _Spot(NamedTuple):
    """A path to compare more closely."""

    parts: Parts
    status: os.stat_result | None
    above: int = -1
    """An open directory in which ``name`` is this path; -1 for none."""
    name: str = ""
    is_new: bool = False
    """A file without a row: its status is read when it is opened."""


class Manifest:
    """What is at every path of a workspace, kept in the store between calls.

    Args:
        pack: The rows, and the contents of files.
        watch: Whether to have the system tell which paths are touched, where it can.
    """

    def __init__(self, pack: Pack, *, watch: bool = True) -> None:
        self.pack = pack
        self._lock = threading.RLock()
        self._children: dict[Parts, set[str]] = {}
        self._linked: dict[int, set[Parts]] = {}
        for parts, row in pack.rows.items():
            self._remember(parts, row)
        self._watcher: Watcher | None = None
        with contextlib.suppress(OSError):
            self._watcher = Watcher() if watch else None

    def close(self) -> None:
        with self._lock:
            self._stop_watching()
            self.pack.close()

    def refresh(self, tree: Tree, noted: Noted | None = None) -> None:
        """Make the manifest agree with the workspace, and save every content.

        What ``noted`` covers stays as it was noted.
        """
        with self._lock, no_collection():
            if self.pack.is_damaged:
                self._begin_anew()
            if () not in self.pack.rows:
                noted = None  # nothing was noted: all files would be new
            now: dict[Parts, Row | None] = {}
            since = int(SYSTEM_CLOCK.time() * 1e9) - RACY_NS
            saved: dict[int, tuple[Place, int]] = {}
            try:
                with contextlib.closing(self._differing(tree)) as differing:
                    for spot in differing:
                        if noted is None or not noted.covers(spot.parts):
                            now[spot.parts] = self._row_at(tree, spot, saved, since)
                self._save(now)
            except BaseException:
                self.pack.abandon()
                raise
            if self._watcher is not None and noted is None:
                self._watcher.forget()

    def take_out(self, tree: Tree, paths: Iterable[Parts], before: Look[Entry], left: Left) -> None:
        """Have the manifest agree with the workspace at paths that our own calls have changed.

        A path stays as it was noted if other programs had changed it ``before``, or have changed it
        since the calls ``left`` it: then it is their change, too.
        """
        with self._lock, no_collection():
            rows = self.pack.rows
            now: dict[Parts, Row | None] = {}
            since = int(SYSTEM_CLOCK.time() * 1e9) - RACY_NS
            saved: dict[int, tuple[Place, int]] = {}
            try:
                for parts in paths if () in rows else ():
                    status = tree.status_if_reached(parts)
                    found = None if status is None else Entry.of(status)
                    if _is_same(_entry(rows.get(parts)), _node(before, parts)) and (
                        parts not in left or _is_same(found, left[parts])
                    ):
                        now[parts] = self._row_at(tree, _Spot(parts, status), saved, since)
                for above in {parts[:-1] for parts in now if parts} - now.keys():
                    row, status = rows.get(above), tree.status_if_reached(above)
                    if row is not None and row.is_directory and status is not None:
                        now[above] = row._replace(mtime_ns=status.st_mtime_ns, ctime_ns=0)
                self._save(now)
            except BaseException:
                self.pack.abandon()
                raise

    def _save(self, now: Mapping[Parts, Row | None]) -> None:
        rows = self.pack.rows
        was = {parts: rows[parts] for parts in now if parts in rows}
        self.pack.save(now)
        for parts, row in was.items():
            self._forget(parts, row)
        for parts, row in now.items():
            if row is not None:
                self._remember(parts, row)

    def changes(self, tree: Tree) -> list[Record]:
        """Return a record for each changed path, directories before what is in them."""
        with self._lock:
            return [_record(parts, self.pack.rows.get(parts)) for parts in self._changed(tree)]

    def changed(self, tree: Tree) -> list[Parts]:
        """Return the changed paths, without directories of which only the time has changed."""
        return [one.path for one in self.changes(tree) if not self._only_time(tree, one)]

    def state_of_changes(self, tree: Tree) -> frozenset[object]:
        """Return which paths differ from the manifest, and how: equal if nothing happens."""
        found: set[object] = set()
        for parts in self._changed(tree):
            status = tree.status_if_reached(parts)
            how = status and (status.st_ino, status.st_ctime_ns, status.st_size)
            found.add((parts, how))
        return frozenset(found)

    def _changed(self, tree: Tree) -> list[Parts]:
        """Return the paths that differ from the manifest, sorted."""
        found: list[Parts] = []
        with self._lock, contextlib.closing(self._differing(tree)) as differing:
            for spot in differing:
                row = self.pack.rows.get(spot.parts)
                if row is None or _is_changed(row, self._row_at(tree, spot)):
                    found.append(spot.parts)
        return sorted(found)

    def to_undo(self, tree: Tree, found: Sequence[Record]) -> list[Record]:
        """Return what was found, and what else undoing needs, in the reverse of its order.

        What is new is removed first: that frees space. Deleted directories are made again before
        what was in them, and get their times last. Of the names of one file, those that still are
        that file come first; the others join them.
        """
        touched = {one.path[:-1] for one in found if one.path}
        # That entries came and went is no change of a directory: only its time is restored.
        kept = [one for one in found if one.path not in touched or not self._only_time(tree, one)]
        ours = {one.path for one in kept}
        new = [one for one in kept if one.before is None]
        directories = [one for one in kept if one.before is not None and one.before.is_directory]
        others = [one for one in kept if one.before is not None and not one.before.is_directory]
        gone = [one for one in directories if not _is_directory(tree.status_if_reached(one.path))]
        stayed = {one.path: one for one in others if _is_still_linked(tree, one)}
        others = [one for one in others if one.path not in stayed]
        for one in kept:
            for parts in self._linked.get(_linked_inode(one), set[Parts]()) - ours:
                stayed[parts] = _record(parts, self.pack.rows[parts])
        again = map(replace, reversed(gone))  # recorded twice: made first, and given its time last
        ordered = [*directories, *others, *again, *stayed.values(), *new]
        _set_twins(ordered)
        if ordered:
            above = touched - ours
            known = {parts: self.pack.rows[parts] for parts in above if parts in self.pack.rows}
            ordered[0].times = tuple((parts, row.mtime_ns) for parts, row in known.items())
        return ordered

    def open_directories(self, tree: Tree) -> None:
        """Restore the modes of directories that their owner can no longer enter.

        Otherwise what changed in them could not be found, nor undone.
        """
        if os.geteuid() == 0:  # enters them anyway
            return
        with self._lock:
            known = {parts: row.st_mode for parts, row in self.pack.rows.items() if _is_open(row)}
        for parts in sorted(known):
            with contextlib.suppress(PermissionError):  # someone else's
                status = tree.status_if_reached(parts)
                if status is not None and _is_directory(status) and not _is_open(status):
                    tree.chmod(parts, stat.S_IMODE(known[parts]))

    def hold_names(self, tree: Tree) -> None:
        """Give files that have names elsewhere one in the store, so that undoing finds them."""
        held = 0
        for ino, names in self._linked.items():
            parts = min(names)
            if self.pack.rows[parts].nlink <= len(names):
                continue
            held += 1
            if held > MAX_NAMES:
                logger.warning("Too many files in %s have names elsewhere, too", tree.path)
                return
            # Not everybody may do so, nor is that always on the same filesystem.
            with contextlib.suppress(OSError), tree.parent(parts) as above:
                os.link(
                    parts[-1], self.pack.folder / f"l{ino}", src_dir_fd=above, follow_symlinks=False
                )

    def _only_time(self, tree: Tree, one: Record) -> bool:
        row = self.pack.rows.get(one.path)
        if row is None or not row.is_directory:
            return False
        now = self._row_at(tree, _Spot(one.path, tree.status_if_reached(one.path)))
        return now is not None and _plain(now._replace(mtime_ns=row.mtime_ns)) == _plain(row)

    # Comparing statuses

    def _differing(self, tree: Tree) -> Generator[_Spot]:
        """Yield what may have changed: each path whose status is not the known one."""
        if self._watcher is not None:
            self._watcher.drain()
        narrowed = self._touched(tree)
        yield from self._below(tree, ()) if narrowed is None else narrowed

    def _touched(self, tree: Tree) -> list[_Spot] | None:
        """Return what differs among what the system says was touched; None when in doubt."""
        watcher = self._watcher
        if watcher is None or not watcher.complete:
            return None
        trees = set(outermost(parts for parts in watcher.trees if not _is_ours(parts)))
        found = [one for parts in trees for one in self._below(tree, parts)]
        # A file with several names may have been changed through one that is not watched.
        several = (parts for names in self._linked.values() for parts in names)
        for parts in {*watcher.touched, *several}:
            covered = any(parts[:depth] in trees for depth in range(len(parts) + 1))
            if not covered and not _is_ours(parts):
                found.extend(self._one(tree, parts))
        # Where a file got another name, the first one is not known.
        if any(self._is_newly_linked(tree, one) for one in found):
            return None
        return [one._replace(above=-1) for one in found]  # their directories are closed

    def _is_newly_linked(self, tree: Tree, spot: _Spot) -> bool:
        status = tree.status_if_reached(spot.parts) if spot.is_new else spot.status
        return (
            status is not None
            and status.st_nlink > 1
            and not stat.S_ISDIR(status.st_mode)
            and spot.parts not in self._linked.get(status.st_ino, ())
        )

    def _one(self, tree: Tree, parts: Parts) -> Iterator[_Spot]:
        status = tree.status_if_reached(parts)
        row = self.pack.rows.get(parts)
        if _is_directory(status) != (row is not None and row.is_directory):
            yield from self._below(tree, parts)
        elif not _agrees(status, row):
            yield _Spot(parts, status)

    def _below(self, tree: Tree, top: Parts) -> Iterator[_Spot]:
        """Yield what differs at a path and at everything that is or was below it."""
        pending: list[tuple[Parts, os.stat_result | None]] = [(top, tree.status_if_reached(top))]
        while pending:
            parts, status = pending.pop()
            if _is_directory(status):
                yield from self._in_directory(tree, parts, status, pending)
                continue
            if not _agrees(status, self.pack.rows.get(parts)):
                yield _Spot(parts, status)
            names = self._children.get(parts, ())
            pending.extend(((*parts, name), None) for name in names)

    def _in_directory(
        self,
        tree: Tree,
        parts: Parts,
        status: os.stat_result | None,
        pending: list[tuple[Parts, os.stat_result | None]],
    ) -> Iterator[_Spot]:
        """Yield what differs of a directory and of the files in it; add the rest to ``pending``."""
        differs = not _agrees(status, self.pack.rows.get(parts))
        try:
            held = tree.listing(parts)
        except PermissionError:  # not readable: what is in it is as it was
            if differs:
                yield _Spot(parts, status)
            return
        except OSError as error:
            if error.errno not in _GONE:
                raise
            pending.append((parts, None))
            return
        rows = self.pack.rows
        with held as fd:
            # First watch, then read: nothing happens unseen in between.
            self._watch(fd, parts)
            if differs:
                yield _Spot(parts, status, fd, ".")
            missing = set(self._children.get(parts, ()))
            with os.scandir(fd) as entries:
                for entry in entries:
                    name = entry.name
                    if name.startswith(TEMPORARY):
                        continue
                    below = (*parts, name)
                    row = rows.get(below)
                    if row is None and entry.is_file(follow_symlinks=False):
                        yield _Spot(below, None, fd, name, True)
                        continue
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    missing.discard(name)
                    is_directory = stat.S_ISDIR(found.st_mode)
                    if is_directory or (row is not None and row.is_directory):
                        pending.append((below, found))
                    elif not _agrees(found, row):
                        yield _Spot(below, found, fd, name)
            pending.extend(((*parts, name), None) for name in missing)

    # Comparing contents and attributes

    def _row_at(
        self,
        tree: Tree,
        spot: _Spot,
        saved: dict[int, tuple[Place, int]] | None = None,
        since: int = 0,
    ) -> Row | None:
        """Return what is at a path now; None when nothing is.

        Times after ``since``, or of a file that changes while it is read, say nothing.
        """
        fd = self._open(tree, spot)
        if fd is None:
            row = _status_row(tree, spot.parts)
            return row if row is None or row.ctime_ns <= since else row._replace(ctime_ns=0)
        try:
            status = os.fstat(fd)
            source, size = None, status.st_size
            if stat.S_ISREG(status.st_mode):
                source, size = self._content(spot, status, fd, saved)
            trusted = status.st_ctime_ns <= since and size == status.st_size
            ctime_ns = status.st_ctime_ns if trusted else 0
            return _row(status, xattrs_of(fd), None, source, size, ctime_ns)
        finally:
            os.close(fd)

    def _content(
        self,
        spot: _Spot,
        status: os.stat_result,
        fd: int,
        saved: dict[int, tuple[Place, int]] | None,
    ) -> tuple[Place, int]:
        """Return where a file's content is, and its size: as known, if it is unchanged.

        Changed content is added to the pack, and to ``saved`` by inode; without ``saved``, the
        result is ``_CHANGED``.
        """
        known = None if spot.is_new else self.pack.rows.get(spot.parts)
        if known is not None and known.source is not None and self._holds(fd, known):
            return known.source, known.size
        if saved is None:
            return _CHANGED, status.st_size
        if known is not None:
            os.lseek(fd, 0, os.SEEK_SET)
        if status.st_nlink == 1:
            return self.pack.add(fd, status)
        if status.st_ino not in saved:  # else it was read by another of its names
            saved[status.st_ino] = self.pack.add(fd, status)
        return saved[status.st_ino]

    def _holds(self, fd: int, known: Row) -> bool:
        """Tell whether an open file has the known content."""
        if known.source is None or not known.is_file or os.fstat(fd).st_size != known.size:
            return False
        try:
            return Source(*known.source).is_in(self.pack.folder.parent, known.size, fd)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EIO):
                raise
            return False  # it went back to its place, or is damaged

    def _open(self, tree: Tree, spot: _Spot) -> int | None:
        """Open a file or directory; None for anything else, and where that is not allowed."""
        status = spot.status
        if not spot.is_new and (status is None or stat.S_IFMT(status.st_mode) not in _OPENED):
            return None
        try:
            if spot.above >= 0:
                return os.open(spot.name, _OPEN, dir_fd=spot.above)
            return tree.open_file(spot.parts)
        except OSError as error:
            if error.errno in _GONE or isinstance(error, PermissionError):
                return None
            raise

    # Keeping

    def _begin_anew(self) -> None:
        logger.warning("The manifest of the workspace is damaged, and is made again")
        self._children.clear()
        self._linked.clear()
        if self._watcher is not None:
            self._watcher.complete = False
        self.pack.reset()

    def _remember(self, parts: Parts, row: Row) -> None:
        if parts:
            self._children.setdefault(parts[:-1], set()).add(parts[-1])
        if row.nlink > 1 and row.is_file:
            self._linked.setdefault(row.ino, set()).add(parts)

    def _forget(self, parts: Parts, row: Row) -> None:
        if parts:
            names = self._children[parts[:-1]]
            names.discard(parts[-1])
            if not names:
                del self._children[parts[:-1]]
        names_of = self._linked.get(row.ino)
        if names_of is not None:
            names_of.discard(parts)
            if not names_of:
                del self._linked[row.ino]

    def _watch(self, fd: int, parts: Parts) -> None:
        if self._watcher is not None:
            try:
                self._watcher.watch(fd, parts)
            except OSError:
                self._stop_watching()  # more directories than the system allows watches

    def _stop_watching(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()


class External:
    """Changes by other programs during a transaction: found, and journalled as its own.

    From :meth:`begin` on, whatever differs from the manifest is the transaction's. The manifest is
    brought up to date after each change of our own, so the journal has everything in order.

    Everything that undoing needs is in the store before the programs begin: the contents, some
    space on the disk and some descriptors. One rename notes that an undo has begun; from then on
    nothing counts as a change, however often the undo is interrupted.
    """

    def __init__(self, tree: Tree, store: Store) -> None:
        self._tree = tree
        self._store = store
        self._manifest: Manifest | None = None
        self._since = 0
        self._found: int | None = None
        """The first record of the newest scan in the journal, until the manifest has it."""
        self._is_under_way = False
        self._is_settled = False
        self._spare: list[int] = []

    @property
    def manifest(self) -> Manifest:
        """What is known of the workspace; read from the store when first asked for."""
        if self._manifest is None:
            self._manifest = Manifest(_pack_of(self._store))
        return self._manifest

    def expected(self, changes: Changes) -> bool:
        """Tell whether others change files in this transaction."""
        records = changes.records
        return len(records) > self._since and records[self._since].op == "external"

    # Noting how files are, for a later process

    def note(self, serial: int) -> None:
        """Note how all files are after the commit ``serial``, until :meth:`forget_note`."""
        self.manifest.refresh(self._tree)
        write_whole(_note(self._store), b"%d" % serial, safe=False)

    def noted_at(self) -> int | None:
        """Return the newest commit in the noted state; None if nothing is noted."""
        try:
            with open(_note(self._store), "rb", opener=no_links) as file:
                return int(file.read())
        except (FileNotFoundError, ValueError):
            return None

    def take_out(
        self, serial: int, paths: Iterable[Parts], before: Look[Entry], left: Left
    ) -> None:
        """Take what our own calls have changed, up to ``serial``, out of the noted state."""
        self.manifest.take_out(self._tree, paths, before, left)
        write_whole(_note(self._store), b"%d" % serial, safe=False)

    def forget_note(self) -> None:
        _note(self._store).unlink(missing_ok=True)

    # A transaction

    def begin(self, changes: Changes, noted: Noted | None = None) -> None:
        """Expect changes by others from here on, or since they were noted."""
        if self.expected(changes):
            self.settle(changes)
            return
        changes.history.finish_earlier()
        self._is_settled, self._found = False, None
        manifest = self.manifest
        self._is_under_way = True
        try:
            drop_names(self._store)
            # The manifest first: recovery must know it when the record is there.
            manifest.refresh(self._tree, noted)
            manifest.pack.tidy()
            manifest.hold_names(self._tree)
            changes.copy_to_store()
            self._reserve()
            _settled(self._store).unlink(missing_ok=True)
            _unsettled(self._store).touch()
            self._since = len(changes.records)
            changes.expect_external(manifest.pack.mark)
        except BaseException:
            self.end()
            raise

    def settle(self, changes: Changes, *, last: bool = False) -> None:
        """Journal what others changed so far; ``last`` if the transaction ends now."""
        if not self.expected(changes) or self._is_settled:
            return
        if self._found is not None:
            changes.forget_from(self._found)
        self._found = len(changes.records)
        _journal_found(self.manifest, self._tree, changes)
        if not last:
            self.refresh(changes)

    def refresh(self, changes: Changes) -> None:
        """Note a change of our own."""
        if self.expected(changes) and not self._is_settled:
            self.manifest.refresh(self._tree)
            changes.copy_to_store()
            self._found = None

    @contextlib.contextmanager
    def undoing(self, changes: Changes) -> Generator[None]:
        """Journal what others changed, then undo in the block. Can be repeated until it succeeds.

        While its note is there, nothing that is half undone counts as a change.
        """
        if not self.expected(changes):
            yield
            return
        if not self._is_settled:
            self._release()
            self.manifest.open_directories(self._tree)
            self.settle(changes, last=True)
            os.rename(_unsettled(self._store), _settled(self._store))
            self._is_settled, self._found = True, None
        yield
        if changes.is_stuck:
            return
        if self.expected(changes):  # it goes on, from a savepoint
            self.manifest.refresh(self._tree)
            self._reserve()
            os.rename(_settled(self._store), _unsettled(self._store))
        self._is_settled = False

    def end(self) -> None:
        """Release what the transaction might have needed."""
        if self._is_under_way:
            self._release()
            with contextlib.suppress(OSError):  # the rest is removed before the next transaction
                drop_names(self._store)
                _unsettled(self._store).unlink(missing_ok=True)
                _settled(self._store).unlink(missing_ok=True)
            self._is_under_way = False

    def forget(self, before: float) -> bool:
        """Remove the manifest and its contents if they were last used before some time.

        The next scan reads the whole workspace again.
        """
        is_old = self._manifest is None and last_scan(self._store.scan) < before
        if is_old:
            # Away first: a manifest without its contents must not be found. A store removes
            # such names when it is opened.
            gone = self._store.path / f"scan-{os.urandom(4).hex()}.new"
            os.rename(self._store.scan, gone)
            remove_tree(gone)
        return is_old

    def close(self) -> None:
        self._release()
        self.catch_up()

    def catch_up(self) -> None:
        """Read the manifest again when it is needed next: other processes may have changed it."""
        self._since, self._found = 0, None
        self._is_under_way = self._is_settled = False
        if self._manifest is not None:
            self._manifest.close()
            self._manifest = None

    def _reserve(self) -> None:
        """Take descriptors and space, so that undoing has them."""
        while len(self._spare) < SPARE_DESCRIPTORS:
            self._spare.append(os.open(os.devnull, os.O_RDONLY))
        wanted = min(self.manifest.pack.needed, RESERVE)
        fd = os.open(_reserve(self._store), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size > wanted:
                os.ftruncate(fd, wanted)
            elif size < wanted and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, wanted)
        finally:
            os.close(fd)

    def _release(self) -> None:
        while self._spare:
            os.close(self._spare.pop())
        _empty_reserve(self._store)


def _journal_found(manifest: Manifest, tree: Tree, changes: Changes) -> None:
    """Journal everything that differs from the manifest, so that undoing restores it."""
    count = len(changes.records)
    try:
        for one in manifest.to_undo(tree, manifest.changes(tree)):
            changes.found(one)
    except BaseException:
        changes.forget_from(count)
        raise


def find_unfinished(
    tree: Tree, store: Store, changes: Changes, begun: tuple[int, int]
) -> str | None:
    """Journal what other programs changed in a transaction whose process is gone.

    ``begun`` tells which index there was when they began. Returns a sentence if it is missing.
    """
    _empty_reserve(store)
    if _settled(store).exists():
        return None
    if not store.wait_for_programs(DYING):
        logger.warning(
            "A program that was started to work on %s still runs, and may change files", tree.path
        )
    manifest = Manifest(_pack_of(store), watch=False)
    try:
        pack = manifest.pack
        generation, size = pack.mark
        if pack.is_damaged or generation != begun[0] or size < begun[1]:
            return (
                "What other programs changed in an unfinished call is not known: the manifest of"
                " the workspace is damaged. Their changes are left as they are"
            )
        manifest.open_directories(tree)
        _journal_found(manifest, tree, changes)
    finally:
        manifest.close()
    _settled(store).touch()
    return None


def last_scan(folder: Path) -> float:
    """Return when the manifest in a store's directory was last used; infinity if there is none."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
        # Not the contents: they may have the times of their files.
        used = (each for each in found if each.name.startswith(("index-", "reserve")))
        return max((each.stat(follow_symlinks=False).st_mtime for each in used), default=math.inf)
    return math.inf


def drop_names(store: Store) -> None:
    """Remove the names that files of the workspace have in the store."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(store.scan):
            path = store.scan / name
            # A large content that was restored is the workspace's file by now.
            used = name.startswith("o") and os.lstat(path).st_nlink > 1
            if used or name.startswith("l"):
                os.unlink(path)


def _pack_of(store: Store) -> Pack:
    return Pack(store.scan, store.seals("scan"), safe=store.safe)


def _settled(store: Store) -> Path:
    """In the transaction's directory: what others changed is in the journal, and is undone."""
    return store.tx / "settled"


def _unsettled(store: Store) -> Path:
    """The same before that: to rename it takes no space."""
    return store.tx / "unsettled"


def _note(store: Store) -> Path:
    """Says that programs are at work whose changes a later process looks for."""
    return store.scan / "noted"


def _reserve(store: Store) -> Path:
    return store.scan / "reserve"


def _empty_reserve(store: Store) -> None:
    with contextlib.suppress(OSError):  # it only frees space: the next one tries again
        os.truncate(_reserve(store), 0)


def _record(parts: Parts, row: Row | None) -> Record:
    """Return the record of a path that other programs changed."""
    if row is None:
        return Record(op="was", path=parts)
    source = None if row.source is None else Source(*row.source)
    return Record(op="was", path=parts, before=row.entry, source=source)


def _row(
    status: os.stat_result,
    xattrs: tuple[tuple[str, bytes], ...],
    target: str | None,
    source: Place | None,
    size: int,
    ctime_ns: int,
) -> Row:
    return Row(
        status.st_mode,
        status.st_mtime_ns,
        status.st_uid,
        status.st_gid,
        size,
        status.st_ino,
        status.st_nlink,
        ctime_ns,
        xattrs,
        target,
        source,
    )


def _status_row(tree: Tree, parts: Parts) -> Row | None:
    """Return what the status says of a path that is not opened; None for nothing."""
    status = tree.status_if_reached(parts)
    if status is None:
        return None
    try:
        target = tree.link_target(parts) if stat.S_ISLNK(status.st_mode) else None
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    return _row(status, (), target, None, status.st_size, status.st_ctime_ns)


def _is_ours(parts: Parts) -> bool:
    """Tell whether a path is in a scratch directory: nothing there counts as a change."""
    return any(name.startswith(TEMPORARY) for name in parts)


def _linked_inode(one: Record) -> int:
    """Return the inode of the hard-linked file that was at a path; 0 for anything else."""
    before = one.before
    return 0 if before is None or before.is_directory or before.links < 2 else before.ino


def _is_still_linked(tree: Tree, one: Record) -> bool:
    """Tell whether a path still is a name of the file that it and others were names of."""
    ino = _linked_inode(one)
    status = tree.status_if_reached(one.path) if ino else None
    return status is not None and status.st_ino == ino


def _set_twins(ordered: Sequence[Record]) -> None:
    """Give each name of a hard-linked file the name that is restored before it."""
    names: dict[int, Parts] = {}
    for one in reversed(ordered):
        if ino := _linked_inode(one):
            one.twin = names.get(ino)
            names[ino] = one.path


def _is_open(found: Row | os.stat_result) -> bool:
    """Whether it is a directory that its owner can list, enter and change."""
    return stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IRWXU == stat.S_IRWXU


def _is_directory(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISDIR(status.st_mode)


def _agrees(status: os.stat_result | None, row: Row | None) -> bool:
    if status is None or row is None:
        return status is None and row is None
    return (
        row.ctime_ns == status.st_ctime_ns
        and row.ino == status.st_ino
        and row.mtime_ns == status.st_mtime_ns
        and row.size == status.st_size
        and row.st_mode == status.st_mode
    )


def _entry(row: Row | None) -> Entry | None:
    return None if row is None else row.entry


def _node(look: Look[Entry], parts: Parts) -> Entry | None:
    try:
        return look.node(parts)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise


def _is_same(one: Entry | None, other: Entry | None) -> bool:
    """Tell by their statuses whether two entries are the same; of a directory, not what it has."""
    if one is None or other is None or (one.kind, one.mode) != (other.kind, other.mode):
        return one is other
    if one.is_directory:
        return True
    return (one.size, one.mtime_ns) == (other.size, other.mtime_ns)


def _is_changed(before: Row, now: Row | None) -> bool:
    if now is None or _plain(before) != _plain(now):
        return True
    if not before.is_file:
        return False
    if now.size != before.size:
        return True
    if before.ino != now.ino and (before.nlink > 1 or now.nlink > 1):
        return True
    if before.source is None or now.source is None:  # not readable
        return before.ino != now.ino
    return now.source != before.source


def _plain(row: Row) -> tuple[object, ...]:
    """Return what says whether something was changed, but for a file's size and content."""
    return row.st_mode, row.mtime_ns, row.uid, row.gid, row.xattrs, row.target
