"""What other programs changed in a directory: a look at every status, against what was there.

The manifest knows each path as it was, and the pack has each file's content. Where the system
tells which paths were touched, only those are looked at.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import stat
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.filesystem.entry import Entry
from weakincentives.filesystem.inotify import Watcher
from weakincentives.filesystem.pack import Pack, Place, Row
from weakincentives.filesystem.protocol import BARRED, Parts
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.store import Source, Store
from weakincentives.filesystem.tree import Tree, xattrs_of

if TYPE_CHECKING:
    from weakincentives.filesystem.changes import Changes

logger = logging.getLogger("weakincentives.filesystem")

# A file that changes again this soon after it was looked at may get the same times as before.
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


class Found(NamedTuple):
    """A path that is not as the manifest knows it."""

    parts: Parts
    before: Entry | None
    """What was there; None for nothing."""
    source: Source | None = None
    """Where the content is that a file had."""
    times: tuple[tuple[Parts, int], ...] = ()
    """Times that undoing sets when all else is done, of directories that are as they were."""
    twin: Parts | None = None
    """Another name of the same file, which undoing brings back before this one."""


class _Spot(NamedTuple):
    """A path to look at more closely."""

    parts: Parts
    status: os.stat_result | None
    above: int = -1
    """An open directory in which ``name`` is this path; -1 for none."""
    name: str = ""
    is_new: bool = False
    """A file that no row is known of: its status is asked for when it is opened."""


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
        self._wants_watcher = watch
        self._watcher: Watcher | None = None
        self._covered = False

    def close(self) -> None:
        """Close the pack and stop watching."""
        with self._lock:
            self._stop_watching()
            self.pack.close()

    @property
    def watching(self) -> bool:
        """Whether the next look is narrowed to what the system says was touched."""
        return self._covered

    def refresh(self, tree: Tree) -> None:
        """Make the manifest agree with the workspace, and keep every content."""
        with self._lock, _no_collection():
            if self.pack.is_damaged:
                self._begin_anew()
            if self._watcher is None and self._wants_watcher:
                self._start_watching()
            now: dict[Parts, Row | None] = {}
            since = int(SYSTEM_CLOCK.time() * 1e9) - RACY_NS
            kept: dict[int, tuple[Place, int]] = {}
            try:
                with contextlib.closing(self._differing(tree)) as differing:
                    for place in differing:
                        now[place.parts] = self._look(tree, place, since, kept)
                rows = self.pack.rows
                was = {parts: rows[parts] for parts in now if parts in rows}
                self.pack.save(now)
            except BaseException:
                self.pack.abandon()
                raise
            for parts, row in was.items():
                self._forget(parts, row)
            for parts, row in now.items():
                if row is not None:
                    self._remember(parts, row)
            if self._watcher is not None:
                self._watcher.forget()
                self._covered = True

    def changes(self, tree: Tree) -> list[Found]:
        """Return the paths that differ from the manifest, directories before what is in them."""
        with self._lock:
            found: list[Found] = []
            with contextlib.closing(self._differing(tree)) as differing:
                for place in differing:
                    row = self.pack.rows.get(place.parts)
                    if row is None:
                        found.append(Found(place.parts, None))
                    elif place.status is None or self._differs(tree, place, row):
                        found.append(_found(place.parts, row))
            return sorted(found, key=_by_path)

    def to_undo(self, tree: Tree, found: Sequence[Found]) -> list[Found]:
        """Return what was found, and what else must be known, so that undoing in reverse works.

        What is new is removed first: that gives space. Directories that went are made again before
        what was in them, and get their times when all else is done. Of the names of one file,
        those that still are that file come first; the others join them.
        """
        touched = {one.parts[:-1] for one in found if one.parts}
        # That entries came and went is no change of a directory: only its time is put back.
        only = {one.parts for one in found if one.parts in touched and self._only_time(tree, one)}
        kept = [one for one in found if one.parts not in only]
        ours = {one.parts for one in kept}
        new = [one for one in kept if one.before is None]
        directories = [one for one in kept if _was_directory(one)]
        others = [one for one in kept if one.before is not None and not _was_directory(one)]
        gone = [one for one in directories if not _is_directory(tree.status_if_reached(one.parts))]
        stayed = {one.parts: one for one in others if _is_still_linked(tree, one)}
        others = [one for one in others if one.parts not in stayed]
        for one in kept:
            for parts in self._other_names(one) - ours:
                stayed[parts] = _found(parts, self.pack.rows[parts])
        ordered = _with_twins([*directories, *others, *reversed(gone), *stayed.values(), *new])
        if ordered:
            above = touched - ours
            known = {parts: self.pack.rows[parts] for parts in above if parts in self.pack.rows}
            times = tuple((parts, row.mtime_ns) for parts, row in known.items())
            ordered[0] = ordered[0]._replace(times=times)
        return ordered

    def hold_names(self, tree: Tree) -> None:
        """Give files that have names elsewhere one in the store: so they can be had again."""
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

    def _other_names(self, one: Found) -> set[Parts]:
        if one.before is None or _was_directory(one) or one.before.links == 1:
            return set()
        return self._linked.get(one.before.ino, set())

    def _only_time(self, tree: Tree, one: Found) -> bool:
        row = self.pack.rows.get(one.parts)
        if row is None or not row.is_directory:
            return False
        now = self._status_row(tree, _Spot(one.parts, tree.status_if_reached(one.parts)))
        return now is not None and _plain(now._replace(mtime_ns=row.mtime_ns)) == _plain(row)

    # Looking

    def _differing(self, tree: Tree) -> Generator[_Spot]:
        """Yield what may have changed: each path whose status is not the known one."""
        if self._watcher is not None:
            self._watcher.drain()
            if self._watcher.lost:
                self._stop_watching()
                self._start_watching()
        narrowed = self._touched(tree)
        yield from self._below(tree, ()) if narrowed is None else narrowed

    def _touched(self, tree: Tree) -> list[_Spot] | None:
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
        if any(self._is_newly_linked(tree, one) for one in found):
            return None
        return [one._replace(above=-1) for one in found]  # their directories are closed

    def _is_newly_linked(self, tree: Tree, place: _Spot) -> bool:
        status = tree.status_if_reached(place.parts) if place.is_new else place.status
        return (
            status is not None
            and status.st_nlink > 1
            and not stat.S_ISDIR(status.st_mode)
            and place.parts not in self._linked.get(status.st_ino, ())
        )

    def _one(self, tree: Tree, parts: Parts) -> Iterator[_Spot]:
        status = tree.status_if_reached(parts)
        row = self.pack.rows.get(parts)
        if _is_directory(status) != (row is not None and row.is_directory):
            yield from self._below(tree, parts)
        elif not _agrees(status, row):
            yield _Spot(parts, status)

    def _below(self, tree: Tree, top: Parts) -> Iterator[_Spot]:
        """Yield what differs at a path and at all that is or was below it."""
        pending: list[tuple[Parts, os.stat_result | None]] = [(top, tree.status_if_reached(top))]
        while pending:
            parts, status = pending.pop()
            if not _is_directory(status):
                if not _agrees(status, self.pack.rows.get(parts)):
                    yield _Spot(parts, status)
                names = self._children.get(parts, ())
                pending.extend(((*parts, name), None) for name in names)
                continue
            yield from self._in_directory(tree, parts, status, pending)

    def _in_directory(
        self,
        tree: Tree,
        parts: Parts,
        status: os.stat_result | None,
        pending: list[tuple[Parts, os.stat_result | None]],
    ) -> Iterator[_Spot]:
        """Yield what differs of a directory and of the files in it; others are to be looked at."""
        differs = not _agrees(status, self.pack.rows.get(parts))
        try:
            held = tree.listing(parts)
        except PermissionError:  # it may not be looked into: what is in it is as it was
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
            # First the watch, then the look: nothing happens unseen in between.
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

    def _look(
        self, tree: Tree, place: _Spot, since: int, kept: dict[int, tuple[Place, int]]
    ) -> Row | None:
        """Return what is at a path now, its content kept; None when it is gone again."""
        fd = self._open(tree, place)
        if fd is None:
            row = self._status_row(tree, place)
            return row if row is None or row.ctime_ns <= since else row._replace(ctime_ns=0)
        try:
            status = os.fstat(fd)
            content, size = None, status.st_size
            if stat.S_ISREG(status.st_mode):
                content, size = self._keep(place, status, fd, kept)
            # Times that are too new, or of a file that changes while it is read, say nothing.
            trusted = status.st_ctime_ns <= since and size == status.st_size
            ctime_ns = status.st_ctime_ns if trusted else 0
            return _row(status, xattrs_of(fd), None, content, size, ctime_ns)
        finally:
            os.close(fd)

    def _keep(
        self, place: _Spot, status: os.stat_result, fd: int, kept: dict[int, tuple[Place, int]]
    ) -> tuple[Place, int]:
        """Return where a file's content is, and its size: where it was, if it is the same."""
        row = None if place.is_new else self.pack.rows.get(place.parts)
        if row is not None and row.is_file and row.source is not None:
            if self._has_content(row.source, row.size, fd):
                return row.source, row.size
            os.lseek(fd, 0, os.SEEK_SET)
        if status.st_nlink == 1:
            return self.pack.add(fd, status)
        if status.st_ino not in kept:  # else it was read by another of its names
            kept[status.st_ino] = self.pack.add(fd, status)
        return kept[status.st_ino]

    def _has_content(self, place: Place, size: int, fd: int) -> bool:
        if os.fstat(fd).st_size != size:
            return False
        try:
            return Source(*place).is_in(self.pack.folder.parent, size, fd)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EIO):
                raise
            return False  # it went back to its place, or is damaged

    def _differs(self, tree: Tree, place: _Spot, before: Row) -> bool:
        fd = self._open(tree, place)
        try:
            now = self._status_row(tree, place) if fd is None else _open_row(fd)
            if now is None or _plain(before) != _plain(now):
                return True
            if not before.is_file:
                return False
            if now.size != before.size or _relinked(before, now):
                return True
            if fd is None or before.source is None:
                return before.ino != now.ino
            return not self._has_content(before.source, before.size, fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _open(self, tree: Tree, place: _Spot) -> int | None:
        """Open a file or directory; None for anything else, and where that may not be."""
        status = place.status
        if not place.is_new and (status is None or stat.S_IFMT(status.st_mode) not in _OPENED):
            return None
        try:
            if place.above >= 0:
                return os.open(place.name, _OPEN, dir_fd=place.above)
            return tree.open_file(place.parts) if place.parts else os.dup(tree.fd)
        except PermissionError:
            return None
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise

    def _status_row(self, tree: Tree, place: _Spot) -> Row | None:
        """Return what a path's status says, for what is not to be opened; None for nothing."""
        status = tree.status_if_reached(place.parts)
        if status is None:
            return None
        target = None
        if stat.S_ISLNK(status.st_mode):
            try:
                target = tree.link_target(place.parts)
            except OSError as error:
                if error.errno in _GONE:
                    return None
                raise
        elif _is_directory(status):
            with contextlib.suppress(PermissionError), tree.directory(place.parts) as fd:
                return _row(status, xattrs_of(fd))
        return _row(status, (), target)

    # Keeping

    def _begin_anew(self) -> None:
        logger.warning("What was known of the workspace is damaged, and is read again")
        self._children.clear()
        self._linked.clear()
        self._stop_watching()
        self.pack.reset()

    def _remember(self, parts: Parts, row: Row) -> None:
        if parts:
            self._children.setdefault(parts[:-1], set()).add(parts[-1])
        if row.nlink > 1 and row.is_file:
            self._linked.setdefault(row.ino, set()).add(parts)

    def _forget(self, parts: Parts, row: Row | None) -> None:
        if row is None:
            return
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


@contextlib.contextmanager
def _no_collection() -> Generator[None]:
    """Collect no garbage meanwhile: a manifest is many objects, and none of them is any."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class External:
    """Changes by other programs during a transaction: found, and journalled as its own.

    From :meth:`begin` on, whatever differs from the manifest is the transaction's. The manifest is
    brought up to date after each change of our own, so the journal has everything in its order.

    Everything that undoing takes is in the store before the programs begin: the contents, some
    space on the disk and some descriptors. That an undo has begun is noted by one rename; from
    then on nothing is taken for a change, however often the undo is interrupted.
    """

    def __init__(self, tree: Tree, store: Store) -> None:
        self._tree = tree
        self._store = store
        self._manifest: Manifest | None = None
        self._since = 0
        self._found: int | None = None
        """From which record on the newest look is in the journal, until the manifest knows it."""
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

    def begin(self, changes: Changes) -> None:
        """Expect changes by others from here on."""
        if self.expected(changes):
            self.settle(changes)
            return
        changes.history.finish_earlier()
        self._is_settled, self._found = False, None
        manifest = self.manifest
        self._is_under_way = True
        try:
            _drop_names(self._store)
            # The manifest first: what recovery goes back to must be known when the record is there.
            manifest.refresh(self._tree)
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
        journal_found(self.manifest, self._tree, changes)
        if not last:
            self.refresh(changes)

    def refresh(self, changes: Changes) -> None:
        """Take note of a change of our own."""
        if self.expected(changes) and not self._is_settled:
            self.manifest.refresh(self._tree)
            changes.copy_to_store()
            self._found = None

    @contextlib.contextmanager
    def undoing(self, changes: Changes) -> Generator[None]:
        """Journal what others changed, then undo in the block. May be done again until it is done.

        While a note of it is there, nobody takes what is half undone for a change.
        """
        if not self.expected(changes):
            yield
            return
        if not self._is_settled:
            self._release()
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
        """Give back what a transaction that has ended might have needed."""
        if self._is_under_way:
            self._release()
            with contextlib.suppress(OSError):  # what is left is removed before the next
                _drop_names(self._store)
                _unsettled(self._store).unlink(missing_ok=True)
                _settled(self._store).unlink(missing_ok=True)
            self._is_under_way = False

    def close(self) -> None:
        """Close the manifest."""
        self._release()
        if self._manifest is not None:
            self._manifest.close()
            self._manifest = None

    def _reserve(self) -> None:
        """Take descriptors and space, so that undoing has them."""
        while len(self._spare) < SPARE_DESCRIPTORS:
            self._spare.append(os.open(os.devnull, os.O_RDONLY))
        fd = os.open(_reserve(self._store), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            wanted = min(self.manifest.pack.needed, RESERVE)
            status = os.fstat(fd)
            if status.st_size > wanted:
                os.ftruncate(fd, wanted)
            if status.st_size < wanted:
                _allocate(fd, wanted)
        finally:
            os.close(fd)

    def _release(self) -> None:
        while self._spare:
            os.close(self._spare.pop())
        with contextlib.suppress(FileNotFoundError):
            os.truncate(_reserve(self._store), 0)


def journal_found(manifest: Manifest, tree: Tree, changes: Changes) -> None:
    """Journal all that differs from the manifest, so that undoing brings it back; or nothing."""
    count = len(changes.records)
    try:
        for one in manifest.to_undo(tree, manifest.changes(tree)):
            changes.found(one.parts, one.before, one.source, one.times, one.twin)
    except BaseException:
        changes.forget_from(count)
        raise


def find_unfinished(
    tree: Tree, store: Store, changes: Changes, begun: tuple[int, int]
) -> str | None:
    """Journal what other programs changed in a transaction whose process is gone.

    ``begun`` tells which index there was when they began. Returns a sentence if it is not there.
    """
    with contextlib.suppress(FileNotFoundError):
        os.truncate(_reserve(store), 0)
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
                "What other programs changed in a call that was not finished cannot be told: the"
                " list of what was there before is damaged. What they changed is left as it is"
            )
        journal_found(manifest, tree, changes)
    finally:
        manifest.close()
    _settled(store).touch()
    return None


def forget_unfinished(store: Store) -> None:
    """Remove what was only for undoing a transaction whose process is gone."""
    _drop_names(store)


def _pack_of(store: Store) -> Pack:
    return Pack(store.scan, store.seals("scan"), safe=store.safe)


def _settled(store: Store) -> Path:
    """In the transaction's directory: what others changed is in the journal, and is undone."""
    return store.tx / "settled"


def _unsettled(store: Store) -> Path:
    """The same before that: to rename it takes no space."""
    return store.tx / "unsettled"


def _reserve(store: Store) -> Path:
    return store.scan / "reserve"


def _drop_names(store: Store) -> None:
    """Remove the names that files of the workspace have in the store."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(store.scan):
            path = store.scan / name
            # A large content that was put back is the workspace's file by now.
            used = name.startswith("o") and os.lstat(path).st_nlink > 1
            if used or name.startswith("l"):
                os.unlink(path)


def _allocate(fd: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)


def _found(parts: Parts, row: Row | None) -> Found:
    if row is None:
        return Found(parts, None)
    return Found(parts, row.entry, None if row.source is None else Source(*row.source))


def _row(
    status: os.stat_result,
    xattrs: tuple[tuple[str, bytes], ...],
    target: str | None = None,
    content: Place | None = None,
    size: int | None = None,
    ctime_ns: int | None = None,
) -> Row:
    return Row(
        status.st_mode,
        status.st_mtime_ns,
        status.st_uid,
        status.st_gid,
        status.st_size if size is None else size,
        status.st_ino,
        status.st_nlink,
        status.st_ctime_ns if ctime_ns is None else ctime_ns,
        xattrs,
        target,
        content,
    )


def _open_row(fd: int) -> Row:
    return _row(os.fstat(fd), xattrs_of(fd))


def _is_ours(parts: Parts) -> bool:
    """Tell whether a path is in a room: nothing there is a change of anybody."""
    return any(name.startswith(TEMPORARY) for name in parts)


def _by_path(found: Found) -> Parts:
    return found.parts


def _was_directory(found: Found) -> bool:
    return found.before is not None and found.before.kind == "directory"


def _is_still_linked(tree: Tree, one: Found) -> bool:
    """Tell whether a path still is a name of the file that it and others were names of."""
    if one.before is None or one.before.links == 1:
        return False
    status = tree.status_if_reached(one.parts)
    return status is not None and status.st_ino == one.before.ino


def _with_twins(ordered: Sequence[Found]) -> list[Found]:
    """Let each name of a file know the one that comes back before it: the next in this order."""
    names: dict[int, Parts] = {}
    done: list[Found] = []
    for one in reversed(ordered):
        twin = None
        if one.before is not None and one.before.links > 1 and not _was_directory(one):
            twin = names.get(one.before.ino)
            names[one.before.ino] = one.parts
        done.append(one._replace(twin=twin))
    return done[::-1]


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


def _relinked(before: Row, now: Row) -> bool:
    return before.ino != now.ino and (before.nlink > 1 or now.nlink > 1)


def _plain(row: Row) -> tuple[object, ...]:
    """Return what says whether something was changed, but for a file's size and content."""
    return row.st_mode, row.mtime_ns, row.uid, row.gid, row.xattrs, row.target


def _topmost(paths: Iterable[Parts]) -> set[Parts]:
    """Return the paths that are not below another of them."""
    kept: set[Parts] = set()
    for parts in sorted(paths):
        if not any(parts[:depth] in kept for depth in range(len(parts))):
            kept.add(parts)
    return kept
