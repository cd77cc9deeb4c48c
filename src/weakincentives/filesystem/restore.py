"""Putting back, on the disk, what a record of the journal says was there.

This serves a rollback and the recovery after a kill. It preserves which names are one file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from weakincentives.filesystem.entry import (
    Entry,
    apply_entry,
    copy_exactly,
    create,
    digest_of,
    kind_of,
    link,
    linked,
    matches,
)
from weakincentives.filesystem.journal import Record
from weakincentives.filesystem.protocol import BARRED, Parts, join_path, shown
from weakincentives.filesystem.scratch import Scratch, Scratches, set_time
from weakincentives.filesystem.store import DAMAGED, Source, Store, read_exactly
from weakincentives.filesystem.tree import CHUNK, Held, Tree, mount_of

logger = logging.getLogger("weakincentives.filesystem")

# What a path is to blame for; anything else, such as a full disk, may be better later.
_THE_PATHS_OWN = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR),
        *(errno.ENOTEMPTY, errno.EEXIST, errno.ENAMETOOLONG, errno.EINVAL, errno.EBUSY),
        DAMAGED,
    }
)
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)


@dataclass(slots=True)
class Restore:
    """How to put things back: for the call itself, or when its process has long been gone."""

    tree: Tree
    store: Store
    rooms: Scratches
    programs: bool = False
    """Whether other programs changed files in the transaction."""
    recovering: bool = False
    """The process that made the changes is gone, and others may have been at work since."""
    tolerant: bool = False
    """The newest change may not have been made."""
    ours: dict[Parts, set[Entry | None]] = field(default_factory=dict[Parts, "set[Entry | None]"])
    """When recovering: of each path, what was there and what we put there."""
    sentences: list[str] = field(default_factory=list[str])
    """What could not be put back, or was set aside."""

    @property
    def _spares(self) -> bool:
        """Whether what others may have changed since is to be looked for, and left alone.

        Not where programs were at work: then all that happened is the transaction's, and what is
        replaced is set aside.
        """
        return self.recovering and not self.programs

    def expect(self, record: Record) -> None:
        """Note what the paths of a record may hold without anybody else's doing."""
        self.ours.setdefault(record.path, set()).update((record.before, record.after))
        if record.origin is not None:
            self.ours.setdefault(record.origin, set()).update((record.before, None))
        if record.origin is not None or record.away:
            self.ours[record.path].add(None)

    def restore(self, record: Record, *, over: bool = False) -> None:
        """Put back what a record says. Does no harm if the change was not made, or is undone.

        ``over`` if something else was at the path of what was moved, and comes back there next.
        What only this path is to blame for is told; the disk's faults are raised.
        """
        try:
            try:
                self._restore(record, over)
            except PermissionError:
                # The call, or what it started, may have closed a directory of ours to writing.
                with self._opened(record.path), self._opened(record.origin or record.path):
                    self._restore(record, over)
        except OSError as error:
            if error.errno not in _THE_PATHS_OWN:
                raise
            self.sentences.append(
                f"{shown(join_path(record.path))} could not be put back"
                f" ({error.strerror}){self._set_aside(record)}"
            )

    @contextlib.contextmanager
    def _opened(self, parts: Parts) -> Generator[None]:
        """Let the owner write to the directory of a path for a while."""
        above = parts[:-1]
        status = self.tree.status(above)
        mode = 0o777 if status is None else stat.S_IMODE(status.st_mode)
        if mode & 0o700 == 0o700:
            yield
            return
        self.tree.chmod(above, mode | 0o700)
        try:
            yield
        finally:
            self.tree.chmod(above, mode)

    def _restore(self, record: Record, over: bool) -> None:
        if self._spares and self._drifted(record):
            self.sentences.append(
                f"{shown(join_path(record.path))} was changed by someone else since, and is left"
                f" as it is{self._set_aside(record)}"
            )
        elif record.op == "moved":
            self._move_back(record, over)
        elif record.op == "was" and record.before is None:
            self._clear_path(record)
        elif record.op == "was":
            self._bring_back(record)
        for parts, mtime in record.times:
            set_time(self.tree, parts, mtime)

    def _bring_back(self, record: Record) -> None:
        """Have what was at a path there again: the thing itself, or made as it was."""
        if record.in_place and self._spares:
            self._spare_content(record)
        if record.kept is None or (record.in_place and self._is_lost(record)):
            self._make_as_it_was(record)
            return
        if record.source is not None:
            self._revise(record)
        with self._parent_again(record.path) as above:
            self._return(above, record.path, record)

    # What was kept

    def _return(self, above: int, parts: Parts, record: Record) -> None:
        """Put what was kept back to its place; if it is not there, it is in its place already."""
        kept, room = record.kept or "", self.rooms.of(record.room)
        if record.room is not None and not _is_in_place(above, parts, record):
            self._bring_again(room, kept)
        if self.recovering and self.programs and _is_elsewhere(room, kept, above, parts[-1]):
            self._aside(above, parts)
        if self._was_not_made(above, parts, record, room):
            return
        try:
            try:
                room.put(kept, above, parts[-1])
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
                self._aside(above, parts)
                room.put(kept, above, parts[-1])
        except FileNotFoundError:
            if self.recovering or self.tolerant or _is_in_place(above, parts, record):
                return
            raise
        room.remove(kept)  # still there if both names were one file

    def _bring_again(self, room: Scratch, kept: str) -> None:
        """Have a scratch directory hold what it held, if a program has changed or removed that."""
        own, copy = self.rooms.own, safe_name(kept)
        if own.status(copy) is not None and not _is_copy(own, room, kept):
            room.remove(kept)
            copy_exactly(own.tree, own.at(copy), room.tree, room.at(kept))

    def _was_not_made(self, above: int, parts: Parts, record: Record, room: Scratch) -> bool:
        """Tell whether a change was only about to be made."""
        if self.tolerant and _is_in_place(above, parts, record):
            return True
        if record.op == "moved" or record.in_place or record.after is None:
            return False
        if not (self.tolerant or self.recovering):
            return False
        kept = room.status(record.kept or "")
        return kept is not None and kept.st_ino == record.after.ino  # they did not change places

    def _is_lost(self, record: Record) -> bool:
        """Tell whether a program has removed, from a scratch directory, what a file was kept by."""
        if record.room is None or not self.programs:
            return False
        return self.rooms.of(record.room).status(record.kept or "") is None

    def _revise(self, record: Record) -> None:
        """Give a file that may have been changed in place its content and attributes back."""
        before, source = record.before, record.source
        assert before is not None
        if source is None or self.rooms.own.status(source.name) is None:
            return
        room = self.rooms.of(record.room)
        if record.kept is not None and room.status(record.kept) is not None:
            self._refill(room.tree, room.at(record.kept), source, before)
            return
        status = self.tree.status(record.path)
        if status is not None and status.st_ino == before.ino:
            self._refill(self.tree, record.path, source, before)

    # What was made, or put where nothing was

    def _clear_path(self, record: Record) -> None:
        try:
            held = self.tree.parent(record.path)
        except OSError as error:
            if error.errno == errno.ENOENT or (self.programs and error.errno in BARRED):
                return  # its directory is gone, or is again what it was before
            raise
        with held as above:
            self._clear(above, record)

    def _clear(self, above: int, record: Record) -> None:
        """Take away what is at a path where nothing was."""
        parts, name = record.path, record.path[-1]
        status = status_at(above, name)
        if status is None:
            return
        if self.recovering and self.programs:
            self._aside(above, parts)
        elif record.after is not None and record.after.ino == status.st_ino:
            self.tree.remove_all(parts)
        elif record.op == "moved" or not self._spares:
            self._aside(above, parts)
        elif record.is_whole:
            os.unlink(name, dir_fd=above)
        else:  # a directory was made there
            try:
                os.rmdir(name, dir_fd=above)
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
                self.sentences.append(
                    f"{shown(join_path(parts))} holds what is not the call's, and is left as it"
                    f" is: {self._names_in(parts)}"
                )

    def _aside(self, above: int, parts: Parts) -> None:
        """Make room at a path. A directory may hold what is not the call's: it is not lost."""
        status = status_at(above, parts[-1])
        if status is None:
            return
        is_directory = stat.S_ISDIR(status.st_mode)
        if not is_directory and not self.recovering:
            os.unlink(parts[-1], dir_fd=above)
            return
        if is_directory:
            with contextlib.suppress(OSError):
                os.rmdir(parts[-1], dir_fd=above)
                return
        held = f": {self._names_in(parts)}" if is_directory else ""
        place = self.store.left(parts)
        # One with other names stays in use by them: what is set aside is a copy.
        alone = is_directory or status.st_nlink == 1
        if not alone or not _renamed(parts[-1], above, place):
            _copy_out(self.tree, parts, place)
            self.tree.remove_all(parts)
        self.sentences.append(
            f"{shown(join_path(parts))} had something that the call did not put there, and that"
            f" is now in {place}{held}"
        )

    def _names_in(self, parts: Parts) -> str:
        """Name what is in a directory."""
        status = self.tree.status(parts)
        is_directory = status is not None and stat.S_ISDIR(status.st_mode)
        names = sorted(self.tree.names(parts)) if is_directory else []
        shown_names = [shown(join_path((*parts, name))) for name in names[:10]]
        return ", ".join(shown_names) + (", ..." if len(names) > 10 else "")

    # What was moved

    def _move_back(self, record: Record, over: bool) -> None:
        origin = record.origin or ()
        if record.kept is None or self._is_lost(record):
            self._rename_to_origin(record, origin)
            return
        self._revise(record)
        with self._parent_again(origin) as above:
            self._return(above, origin, record)
        if over:
            return
        with contextlib.suppress(FileNotFoundError), self.tree.parent(record.path) as above:
            self._clear(above, record)

    def _rename_to_origin(self, record: Record, origin: Parts) -> None:
        status, there = self.tree.status(record.path), self.tree.status(origin)
        is_here = self._is_moved(record, status)
        if not is_here and self._is_moved(record, there):
            return
        # Where nothing is at the old path, it is the one that was moved, whatever its inode: not
        # every filesystem keeps these when it is mounted again.
        if status is None or (there is not None and not is_here):
            raise OSError(errno.ENOENT, "it is not where it was moved to")
        with self._parent_again(origin) as above, self.tree.parent(record.path) as below:
            self._aside(above, origin)
            os.rename(record.path[-1], origin[-1], src_dir_fd=below, dst_dir_fd=above)

    def _is_moved(self, record: Record, status: os.stat_result | None) -> bool:
        """Tell whether what was moved is at a path: itself, or what a scan has made of it."""
        if status is None or record.after is None:
            return False
        alike = self._is_lost(record) and matches(record.after, Entry.of(status))
        return alike or status.st_ino == record.after.ino

    # What has to be made again

    def _make_as_it_was(self, record: Record) -> None:
        before, parts = record.before, record.path
        assert before is not None
        with self._parent_again(parts) as above:
            status = status_at(above, parts[-1]) if parts else os.fstat(above)
            if before.is_directory:
                if status is None or not stat.S_ISDIR(status.st_mode):
                    self._aside(above, parts)
                    create(above, parts[-1], before)
                apply_entry(self.tree, parts, before)
            else:
                self._make_file_as_it_was(above, record, before, status)

    def _make_file_as_it_was(
        self, above: int, record: Record, before: Entry, status: os.stat_result | None
    ) -> None:
        parts, twin = record.path, self._twin(record, before)
        if status is not None and twin is not None and status.st_ino == twin.st_ino:
            return
        if status is not None and twin is None and self._is_back(record, before, status):
            apply_entry(self.tree, parts, before)
            return
        if twin is None and _is_still(status, before):
            self._refill(self.tree, parts, record.source, before)
            return
        room = self.rooms.on(mount_of(above), parts[:-1])
        staged = self.store.fresh()
        if twin is None or record.twin is None:
            self._make(room, staged, record.source, before)
        else:
            with self.tree.parent(record.twin) as other:
                link(other, record.twin[-1], room.fd, staged)
        if status is not None and (
            (self.programs and self.recovering) or stat.S_ISDIR(status.st_mode)
        ):
            self._aside(above, parts)
        room.put(staged, above, parts[-1])

    def _twin(self, record: Record, before: Entry) -> os.stat_result | None:
        """Return the other name's status, if it was brought back as it should be."""
        if record.twin is None:
            return None
        status = self.tree.status_if_reached(record.twin)
        return status if status is not None and matches(before, Entry.of(status)) else None

    def _is_back(self, record: Record, before: Entry, status: os.stat_result) -> bool:
        """Tell whether something is what it was: an undo that was cut short has brought it back."""
        if kind_of(status.st_mode) != before.kind:
            return False
        if before.kind == "link":
            return self.tree.link_target(record.path) == before.target
        if before.kind != "file":
            return stat.S_ISFIFO(status.st_mode) if before.pipe else status.st_ino == before.ino
        if record.source is None:
            return status.st_ino == before.ino  # it could not be read, so not changed in place
        own = record.source.path(self.store.path)
        with contextlib.suppress(FileNotFoundError):
            if own is not None and os.path.samestat(os.lstat(own), status):
                return True
        if status.st_nlink > 1 or not matches(before, Entry.of(status)):
            return False
        return self._has_content(self.tree, record.path, record.source, before)

    def _has_content(self, tree: Tree, parts: Parts, source: Source, before: Entry) -> bool:
        try:
            reading = tree.open_file(parts)
        except PermissionError:
            return False
        try:
            return source.is_in(self.store.path, before.size, reading)
        finally:
            os.close(reading)

    def _refill(self, tree: Tree, parts: Parts, source: Source | None, before: Entry) -> None:
        """Give a file its content back, for all the names it has, and its attributes."""
        if source is None:
            raise OSError(errno.ENOENT, "its content was not kept")
        if not self._has_content(tree, parts, source, before):
            with contextlib.suppress(OSError):
                # Should this be cut short, recovery knows whose the mixture is.
                os.chmod(source.name, stat.S_IRUSR, dir_fd=self.store.tx_fd)
            fd = open_to_change(tree, parts, before.mode)
            try:
                source.fill(self.store.path, before.size, fd)
                os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR))
            finally:
                os.close(fd)
        apply_entry(tree, parts, before)

    def _make(self, room: Scratch, staged: str, source: Source | None, before: Entry) -> None:
        """Make something again: the same file if it has a name left, no copy where possible."""
        if before.kind == "file":
            held = self.store.scan / f"l{before.ino}"
            if (
                before.links > 1
                and _is_inode(held, before.ino)
                and linked(None, held, room.fd, staged)
            ):
                self._refill(room.tree, room.at(staged), source, before)
                return
            if source is None:
                raise OSError(errno.ENOENT, "its content was not kept")
            own = source.path(self.store.path, before.size)
            if own is None or before.links > 1 or not linked(None, own, room.fd, staged):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                writing = os.open(staged, flags, 0o600, dir_fd=room.fd)
                try:
                    source.fill(self.store.path, before.size, writing)
                    if self.store.safe:
                        os.fsync(writing)
                finally:
                    os.close(writing)
        elif not create(room.fd, staged, before):
            raise OSError(errno.ENOENT, "its content was not kept")
        apply_entry(room.tree, room.at(staged), before)

    def _parent_again(self, parts: Parts) -> Held:
        """Open a directory to put something back into, which may have been taken away."""
        try:
            return self.tree.parent(parts)
        except FileNotFoundError:
            pass
        for depth in range(1, len(parts)):
            if self.tree.status(parts[:depth]) is None:
                with self.tree.parent(parts[:depth]) as above:
                    os.mkdir(parts[depth - 1], dir_fd=above)
                self.sentences.append(
                    f"{shown(join_path(parts[:depth]))} had been taken away and was made again,"
                    " without what is not the call's"
                )
        return self.tree.parent(parts)

    # What others did since

    def _drifted(self, record: Record) -> bool:
        """Tell whether a path is neither as we left it nor as it was."""
        if record.op != "was" or not (record.is_whole or record.in_place):
            return False
        status = self.tree.status(record.path)
        now = None if status is None else Entry.of(status)
        for known in self.ours[record.path]:
            if matches(known, now):
                # Size and time are not enough: some editors, and copies, preserve the time.
                digest = None if known is None or known.size == -1 else known.digest
                if digest is None or self._holds(record.path, digest):
                    return False
        return True

    def _holds(self, parts: Parts, digest: str) -> bool:
        """Tell whether a file holds what it was given to hold, as far as it can be read."""
        try:
            reading = self.tree.open_file(parts)
        except PermissionError:
            return True
        try:
            return digest_of(reading) == digest
        finally:
            os.close(reading)

    def _spare_content(self, record: Record) -> None:
        """Set a copy aside of what somebody may have written to a file that we changed in place.

        It may also be the half of what we were about to write. That cannot be told, so it is not
        said that something could not be restored.
        """
        status, before, source = self.tree.status(record.path), record.before, record.source
        if source is None or before is None or status is None or status.st_ino != before.ino:
            return
        kept = self.rooms.own.status(source.name)
        if kept is None or not kept.st_mode & stat.S_IWUSR:
            return  # it was about to be filled again
        digest = None if record.after is None else record.after.digest
        reading = os.open(source.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self.store.tx_fd)
        try:
            known = _is_beginning(self.tree, record.path, reading)
        finally:
            os.close(reading)
        if known or (digest and self._holds(record.path, digest)):
            return
        place = self.store.left(record.path)
        _copy_out(self.tree, record.path, place)
        logger.warning(
            "%s was half written, or changed by someone else since a call was killed. It is as"
            " it was before that call; what it held is in %s",
            shown(join_path(record.path)),
            place,
        )

    def _set_aside(self, record: Record) -> str:
        """Keep what could not be put back where it can be found, and say where."""
        room, name = self.rooms.of(record.room), record.kept
        if record.in_place and record.source is not None:
            room, name = self.rooms.own, record.source.name
        if name is None or room.status(name) is None:
            return ""
        place = self.store.left(record.path)
        with contextlib.suppress(OSError):
            move_out(room.tree, room.at(name), room.fd, place)
            return f"; what was there before is in {place}"
        return ""


def safe_name(name: str) -> str:
    """Return the name, in the transaction's directory, of a copy of what is kept elsewhere."""
    return f"b{name}"


def status_at(above: int, name: str) -> os.stat_result | None:
    """Return the status of a name in a directory, of a link itself; None for nothing."""
    try:
        return os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        return None


def move_out(tree: Tree, parts: Parts, above: int, place: Path) -> None:
    """Move something to a place outside of its tree; across filesystems it is copied."""
    if not _renamed(parts[-1], above, place):
        _copy_out(tree, parts, place)


def _renamed(name: str, above: int, place: Path) -> bool:
    """Move something elsewhere; False if that is on another filesystem."""
    try:
        os.rename(name, place, src_dir_fd=above)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def _copy_out(tree: Tree, parts: Parts, place: Path) -> None:
    folder = Tree(place.parent)
    try:
        copy_exactly(tree, parts, folder, (place.name,))
    finally:
        folder.close()


def _is_in_place(above: int, parts: Parts, record: Record) -> bool:
    status = status_at(above, parts[-1])
    return matches(record.before, None if status is None else Entry.of(status))


def _is_elsewhere(room: Scratch, kept: str, above: int, name: str) -> bool:
    """Tell whether something was kept, and something else is in its place."""
    old, now = room.status(kept), status_at(above, name)
    return old is not None and now is not None and old.st_ino != now.st_ino


def _is_still(status: os.stat_result | None, before: Entry) -> bool:
    """Tell whether a path still is a name of the file that had several."""
    if status is None or before.kind != "file" or before.links == 1:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_ino == before.ino


def _is_inode(path: Path, ino: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_ino == ino
    return False


def _is_copy(own: Scratch, room: Scratch, name: str) -> bool:
    """Tell whether a scratch directory still has what was copied from it."""
    top = room.at(name)
    there = {parts[len(top) :]: Entry.of(status) for parts, status in room.tree.walk(top)}
    for parts, status in own.tree.walk(own.at(safe_name(name))):
        now, known = there.pop(parts[1:], None), Entry.of(status)
        if now is None or now.kind != known.kind:
            return False
        if known.is_directory:
            continue
        if not matches(known, now):
            return False
        if known.kind == "file" and not _is_same_content(
            own.tree, parts, room.tree, (*top, *parts[1:])
        ):
            return False
    return not there


def _is_same_content(one: Tree, parts: Parts, other: Tree, place: Parts) -> bool:
    reading = one.open_file(parts)
    try:
        there = other.open_file(place)
    except PermissionError:
        os.close(reading)
        return False
    try:
        return digest_of(reading) == digest_of(there)
    finally:
        os.close(there)
        os.close(reading)


def _is_beginning(tree: Tree, parts: Parts, reading: int) -> bool:
    """Tell whether all that a file holds is what there is to read, or how that begins.

    Also of one that may not be read: whoever has changed it since would have to read it.
    """
    try:
        fd = tree.open_file(parts)
    except PermissionError:
        return True
    try:
        while data := os.read(fd, CHUNK):
            if data != read_exactly(reading, len(data)):
                return False
        return True
    finally:
        os.close(fd)


def open_to_change(tree: Tree, parts: Parts, mode: int) -> int:
    with tree.parent(parts) as above:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(parts[-1], flags, dir_fd=above)
        except PermissionError:
            tree.chmod(parts, mode | 0o600)
            return os.open(parts[-1], flags, dir_fd=above)
