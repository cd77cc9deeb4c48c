"""Restore what a journal record says was at a path, for rollback and for recovery after a kill.

Hard links are preserved.
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
    capture,
    copy_exactly,
    create,
    kind_of,
    link,
    linked,
    matches,
    new_file,
)
from weakincentives.filesystem.journal import Record
from weakincentives.filesystem.paths import BARRED, Parts, join_path, shown
from weakincentives.filesystem.scratch import Scratch, Scratches, set_time
from weakincentives.filesystem.store import DAMAGED, Source, Store, read_exactly
from weakincentives.filesystem.swap import Seen, put_back
from weakincentives.filesystem.tree import (
    CHUNK,
    Held,
    Tree,
    chmod_at,
    mount_of,
    status_at,
)

logger = logging.getLogger("weakincentives.filesystem")

# Errors of one path; others, such as a full disk, are worth a retry.
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
    """Restores records: in the running call, or after its process was killed."""

    tree: Tree
    store: Store
    scratches: Scratches
    programs: bool = False
    """Whether other programs changed files in the transaction."""
    recovering: bool = False
    """The process was killed, and others may have changed files since."""
    tolerant: bool = False
    """The newest change may not have been made."""
    spares_edits: bool = False
    """Set aside what others put at a path during the transaction: not all of it is the call's."""
    ours: dict[Parts, set[Entry | None]] = field(default_factory=dict[Parts, "set[Entry | None]"])
    """When recovering: the entries each path had before or was given by us."""
    sentences: list[str] = field(default_factory=list[str])
    """What could not be restored or was set aside."""

    @property
    def _spares(self) -> bool:
        """Whether to detect and leave alone what others changed since.

        Not if programs were running: their changes belong to the transaction, and whatever is
        replaced is set aside.
        """
        return self.recovering and not self.programs

    def expect(self, record: Record) -> None:
        """Note what the paths of a record may hold if no one else changed them."""
        self.ours.setdefault(record.path, set()).update((record.before, record.after))
        if record.origin is not None:
            self.ours.setdefault(record.origin, set()).update((record.before, None))
        if record.origin is not None or record.away:
            self.ours[record.path].add(None)

    def restore(self, record: Record, *, over: bool = False) -> None:
        """Restore a record. Idempotent, and harmless if the change was never made.

        ``over``: the move replaced something, which is restored to the same path next. Errors of
        this path become sentences; disk errors are raised.
        """
        try:
            try:
                self._restore(record, over)
            except PermissionError:
                # The call may have removed write permission from the directory.
                with self._opened(record.path), self._opened(record.origin or record.path):
                    self._restore(record, over)
        except OSError as error:
            if error.errno not in _THE_PATHS_OWN:
                raise
            self.sentences.append(
                f"{shown(join_path(record.path))} could not be restored"
                f" ({error.strerror}){self._set_aside(record)}"
            )

    @contextlib.contextmanager
    def _opened(self, parts: Parts) -> Generator[None]:
        """Make the directory of a path writable for its owner during the block."""
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
                f"{shown(join_path(record.path))} was changed by someone else since and is left"
                f" unchanged{self._set_aside(record)}"
            )
        elif record.op == "moved":
            self._move_back(record, over)
        elif record.op == "was" and record.before is None:
            self._clear_path(record)
        elif record.op == "was":
            self._restore_original(record)
        for parts, mtime in record.times:
            set_time(self.tree, parts, mtime)

    def _restore_original(self, record: Record) -> None:
        """Restore the original: the saved file itself, or a re-created one."""
        if record.in_place and self._spares:
            self._spare_content(record)
        if record.saved is None or (record.in_place and self._is_lost(record)):
            self._recreate(record)
            return
        if record.source is not None:
            self._restore_content(record)
        with self._recreated_parent(record.path) as above:
            self._return(above, record.path, record)

    # Saved originals

    def _return(self, above: int, parts: Parts, record: Record) -> None:
        """Move the saved original back; if it is gone, it is already in place."""
        saved, scratch = record.saved or "", self.scratches.of(record.scratch)
        if record.scratch is not None and not _is_in_place(above, parts, record):
            self._restore_saved(scratch, saved)
        if self.recovering and self.programs and _is_elsewhere(scratch, saved, above, parts[-1]):
            self._clear_aside(above, parts)
        if self._was_not_made(above, parts, record, scratch):
            return
        if self.spares_edits and self._return_unless_edited(above, record, scratch):
            return
        try:
            try:
                scratch.put(saved, above, parts[-1])
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
                self._clear_aside(above, parts)
                scratch.put(saved, above, parts[-1])
        except FileNotFoundError:
            if self.recovering or self.tolerant or _is_in_place(above, parts, record):
                return
            raise
        scratch.remove(saved)  # still there if both were hard links of one file

    def _restore_saved(self, scratch: Scratch, saved: str) -> None:
        """Restore a saved file that a program changed or removed, from the copy in the store."""
        own, copy = self.scratches.own, safe_name(saved)
        if own.status(copy) is not None and not _is_copy(own, scratch, saved):
            scratch.remove(saved)
            copy_exactly(own.tree, own.at(copy), scratch.tree, scratch.at(saved))

    def _was_not_made(self, above: int, parts: Parts, record: Record, scratch: Scratch) -> bool:
        """Tell whether a recorded change was never made."""
        if self.tolerant and _is_in_place(above, parts, record):
            return True
        if record.op == "moved" or record.in_place or record.after is None:
            return False
        if not (self.tolerant or self.recovering):
            return False
        saved = scratch.status(record.saved or "")
        return saved is not None and saved.st_ino == record.after.ino  # they were not swapped

    def _is_lost(self, record: Record) -> bool:
        """Tell whether a program has removed the saved file from its scratch directory."""
        if record.scratch is None or not self.programs:
            return False
        return self.scratches.of(record.scratch).status(record.saved or "") is None

    def _restore_content(self, record: Record) -> None:
        """Restore content and attributes of a file that may have been changed in place."""
        before, source = record.before, record.source
        assert before is not None
        if source is None or self.scratches.own.status(source.name) is None:
            return
        scratch = self.scratches.of(record.scratch)
        if record.saved is not None and scratch.status(record.saved) is not None:
            self._refill(scratch.tree, scratch.at(record.saved), source, before)
            return
        status = self.tree.status(record.path)
        if status is not None and status.st_ino == before.ino:
            self._refill(self.tree, record.path, source, before)

    # Clearing paths

    def _clear_path(self, record: Record) -> None:
        try:
            held = self.tree.parent(record.path)
        except OSError as error:
            if error.errno == errno.ENOENT or (self.programs and error.errno in BARRED):
                return  # its directory is gone or already restored
            raise
        with held as above:
            self._clear(above, record)

    def _clear(self, above: int, record: Record) -> None:
        """Clear a path where nothing was."""
        parts, name = record.path, record.path[-1]
        status = status_at(above, name)
        if status is None:
            return
        if self.recovering and self.programs:
            self._clear_aside(above, parts)
        elif self.spares_edits and _is_changed_file(record, self.tree):
            self._leave_edit(record)
        elif record.after is not None and record.after.ino == status.st_ino:
            self.tree.remove_all(parts)
        elif record.op == "moved" and self._spares and _is_another_file(record, status):
            self.sentences.append(
                f"{shown(join_path(parts))} was changed by someone else since and is left unchanged"
            )
        elif record.op == "moved" or not self._spares:
            self._clear_aside(above, parts)
        elif record.is_whole:
            os.unlink(name, dir_fd=above)
        else:  # a directory was created there
            try:
                os.rmdir(name, dir_fd=above)
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
                self.sentences.append(
                    f"{shown(join_path(parts))} is left in place, because it holds other files:"
                    f" {self._names_in(parts)}"
                )

    def _return_unless_edited(self, above: int, record: Record, scratch: Scratch) -> bool:
        """Swap the saved original and what we put there; False if nothing can be swapped.

        What someone has changed there since stays, and the original is set aside.
        """
        name, saved, original = (
            record.path[-1],
            record.saved or "",
            scratch.status(record.saved or ""),
        )
        there = status_at(above, name)
        if original is None or there is None or record.op != "was":
            return False
        if record.after is None or _is_changed_file(record, self.tree):
            self._leave_edit(record)
            return True
        if not self.tree.exchanges.get(scratch.mount):
            return False
        if not put_back(scratch, saved, above, name, Seen(record.after, record.after.digest)):
            self._leave_edit(record)
        else:
            scratch.remove(saved)
        return True

    def _leave_edit(self, record: Record) -> None:
        self.sentences.append(
            f"{shown(join_path(record.path))} was changed by someone else during the merge and is"
            f" left unchanged{self._set_aside(record)}"
        )

    def _clear_aside(self, above: int, parts: Parts) -> None:
        """Clear a path; set aside what may not be the call's."""
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
        # A hard-linked file stays in use under its other names: set aside a copy.
        alone = is_directory or status.st_nlink == 1
        if not alone or not _renamed(parts[-1], above, place):
            _copy_out(self.tree, parts, place)
            self.tree.remove_all(parts)
        self.sentences.append(
            f"{shown(join_path(parts))} held something that is not the call's; it is now in"
            f" {place}{held}"
        )

    def _names_in(self, parts: Parts) -> str:
        status = self.tree.status(parts)
        is_directory = status is not None and stat.S_ISDIR(status.st_mode)
        names = sorted(self.tree.names(parts)) if is_directory else []
        shown_names = [shown(join_path((*parts, name))) for name in names[:10]]
        return ", ".join(shown_names) + (", ..." if len(names) > 10 else "")

    # Moves

    def _move_back(self, record: Record, over: bool) -> None:
        origin = record.origin or ()
        if record.saved is None or self._is_lost(record):
            self._rename_to_origin(record, origin)
            return
        self._restore_content(record)
        with self._recreated_parent(origin) as above:
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
        # If nothing is at the old path, this is the moved file, whatever its inode: some
        # filesystems assign new ones on each mount.
        if status is None or (there is not None and not is_here):
            raise OSError(errno.ENOENT, "it is not where it was moved to")
        with self._recreated_parent(origin) as above, self.tree.parent(record.path) as below:
            self._clear_aside(above, origin)
            os.rename(record.path[-1], origin[-1], src_dir_fd=below, dst_dir_fd=above)

    def _is_moved(self, record: Record, status: os.stat_result | None) -> bool:
        """Tell whether a path has the moved file, or one that a scan takes for it."""
        if status is None or record.after is None:
            return False
        alike = self._is_lost(record) and matches(record.after, Entry.of(status))
        return alike or status.st_ino == record.after.ino

    # Re-creating

    def _recreate(self, record: Record) -> None:
        before, parts = record.before, record.path
        assert before is not None
        with self._recreated_parent(parts) as above:
            status = status_at(above, parts[-1]) if parts else os.fstat(above)
            if before.is_directory:
                if status is None or not stat.S_ISDIR(status.st_mode):
                    self._clear_aside(above, parts)
                    create(above, parts[-1], before)
                apply_entry(self.tree, parts, before)
            else:
                self._recreate_file(above, record, before, status)

    def _recreate_file(
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
        scratch = self.scratches.on(mount_of(above), parts[:-1])
        staged = self.store.fresh()
        if twin is None or record.twin is None:
            self._make(scratch, staged, record.source, before)
        else:
            with self.tree.parent(record.twin) as other:
                link(other, record.twin[-1], scratch.fd, staged)
        if status is not None and (
            (self.programs and self.recovering) or stat.S_ISDIR(status.st_mode)
        ):
            self._clear_aside(above, parts)
        scratch.put(staged, above, parts[-1])

    def _twin(self, record: Record, before: Entry) -> os.stat_result | None:
        """Return the status of the other hard link, if it is already restored."""
        if record.twin is None:
            return None
        status = self.tree.status_if_reached(record.twin)
        return status if status is not None and matches(before, Entry.of(status)) else None

    def _is_back(self, record: Record, before: Entry, status: os.stat_result) -> bool:
        """Tell whether an interrupted undo has already restored this."""
        if kind_of(status.st_mode) != before.kind:
            return False
        if before.kind == "link":
            return self.tree.link_target(record.path) == before.target
        if before.kind != "file":
            return stat.S_ISFIFO(status.st_mode) if before.pipe else status.st_ino == before.ino
        if record.source is None:
            return status.st_ino == before.ino  # unreadable, so not changed in place
        own = record.source.path(self.store.path)
        with contextlib.suppress(FileNotFoundError):
            if own is not None and os.path.samestat(os.lstat(own), status):
                return True
        if status.st_nlink > 1 or not matches(before, Entry.of(status)):
            return False
        return self._has_content(self.tree, record.path, record.source, before)

    def _has_content(self, tree: Tree, parts: Parts, source: Source, before: Entry) -> bool:
        with contextlib.suppress(PermissionError), Held(tree.open_file(parts)) as reading:
            return source.is_in(self.store.path, before.size, reading)
        return False

    def _refill(self, tree: Tree, parts: Parts, source: Source | None, before: Entry) -> None:
        """Restore a file's content in place, for all its names, and its attributes."""
        if source is None:
            raise OSError(errno.ENOENT, "its content was not saved")
        if not self._has_content(tree, parts, source, before):
            with contextlib.suppress(OSError):
                # If this is interrupted, recovery knows that the mixture is ours.
                os.chmod(source.name, stat.S_IRUSR, dir_fd=self.store.tx_fd)
            with tree.parent(parts) as above, Held(open_for_writing(above, parts[-1])) as fd:
                source.fill(self.store.path, before.size, fd)
                os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR))
        apply_entry(tree, parts, before)

    def _make(self, scratch: Scratch, staged: str, source: Source | None, before: Entry) -> None:
        """Re-create a file, from a remaining hard link or without a copy if possible."""
        if before.kind == "file":
            held = self.store.scan / f"l{before.ino}"
            if (
                before.links > 1
                and _is_inode(held, before.ino)
                and linked(None, held, scratch.fd, staged)
            ):
                self._refill(scratch.tree, scratch.at(staged), source, before)
                return
            if source is None:
                raise OSError(errno.ENOENT, "its content was not saved")
            own = source.path(self.store.path, before.size)
            if own is None or before.links > 1 or not linked(None, own, scratch.fd, staged):
                with new_file(scratch.fd, staged) as writing:
                    source.fill(self.store.path, before.size, writing)
                    if self.store.safe:
                        os.fsync(writing)
        elif not create(scratch.fd, staged, before):
            raise OSError(errno.ENOENT, "its content was not saved")
        apply_entry(scratch.tree, scratch.at(staged), before)

    def _recreated_parent(self, parts: Parts) -> Held:
        """Open the parent directory, re-creating it if it was removed."""
        try:
            return self.tree.parent(parts)
        except FileNotFoundError:
            pass
        for depth in range(1, len(parts)):
            if self.tree.status(parts[:depth]) is None:
                with self.tree.parent(parts[:depth]) as above:
                    os.mkdir(parts[depth - 1], dir_fd=above)
                self.sentences.append(
                    f"{shown(join_path(parts[:depth]))} had been removed; it was re-created without"
                    " its other entries"
                )
        return self.tree.parent(parts)

    # Changes by others

    def _drifted(self, record: Record) -> bool:
        """Tell whether a path is neither as we left it nor as it was before."""
        if record.op != "was" or not (record.is_whole or record.in_place):
            return False
        status = self.tree.status(record.path)
        now = None if status is None else Entry.of(status)
        for known in self.ours[record.path]:
            if matches(known, now):
                # Size and time are not enough: some programs preserve the time.
                digest = None if known is None or known.size == -1 else known.digest
                if digest is None or self._holds(record.path, digest):
                    return False
        return True

    def _holds(self, parts: Parts, digest: str) -> bool:
        """Tell whether a file has this content, as far as it can be read."""
        now = capture(self.tree, parts, read=True)
        return now is not None and now.digest in (None, digest)

    def _spare_content(self, record: Record) -> None:
        """Set aside a copy of what someone may have written to a file we changed in place.

        It may also be our own incomplete write, so this is logged but not reported.
        """
        status, before, source = self.tree.status(record.path), record.before, record.source
        if source is None or before is None or status is None or status.st_ino != before.ino:
            return
        saved = self.scratches.own.status(source.name)
        if saved is None or not saved.st_mode & stat.S_IWUSR:
            return  # it was already being restored
        digest = None if record.after is None else record.after.digest
        with Held(self.store.tree.open_file((source.name,))) as reading:
            known = _is_beginning(self.tree, record.path, reading)
        if known or (digest and self._holds(record.path, digest)):
            return
        place = self.store.left(record.path)
        _copy_out(self.tree, record.path, place)
        logger.warning(
            "%s was half written, or changed by someone else since a call was killed. It is"
            " restored; its content is in %s",
            shown(join_path(record.path)),
            place,
        )

    def _set_aside(self, record: Record) -> str:
        """Set aside what could not be restored; returns where, for the message."""
        scratch, name = self.scratches.of(record.scratch), record.saved
        if record.in_place and record.source is not None:
            scratch, name = self.scratches.own, record.source.name
        if name is None or scratch.status(name) is None:
            return ""
        place = self.store.left(record.path)
        with contextlib.suppress(OSError):
            move_out(scratch.tree, scratch.at(name), scratch.fd, place)
            return f"; the previous version is in {place}"
        return ""


def _is_changed_file(record: Record, tree: Tree) -> bool:
    """Tell whether someone has changed a file since we put it there."""
    after = record.after
    if after is None or after.kind != "file" or not after.ino:
        return False
    return not Seen(after, after.digest).is_at(tree, record.path)


def _is_another_file(record: Record, status: os.stat_result) -> bool:
    """Tell whether a file cannot be the moved one, whatever its inode number is now."""
    now = Entry.of(status)
    return now.kind != "directory" and not matches(record.after, now)


def safe_name(name: str) -> str:
    """Return the name in the store of the copy of a file that is saved elsewhere."""
    return f"b{name}"


def move_out(tree: Tree, parts: Parts, above: int, place: Path) -> None:
    """Move an entry out of its tree, or copy it to another filesystem."""
    if not _renamed(parts[-1], above, place):
        _copy_out(tree, parts, place)


def _renamed(name: str, above: int, place: Path) -> bool:
    """Rename to another place; False if that is on another filesystem."""
    try:
        os.rename(name, place, src_dir_fd=above)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def _copy_out(tree: Tree, parts: Parts, place: Path) -> None:
    with contextlib.closing(Tree(place.parent)) as folder:
        copy_exactly(tree, parts, folder, (place.name,))


def _is_in_place(above: int, parts: Parts, record: Record) -> bool:
    status = status_at(above, parts[-1])
    return matches(record.before, None if status is None else Entry.of(status))


def _is_elsewhere(scratch: Scratch, saved: str, above: int, name: str) -> bool:
    """Tell whether a saved file exists and another one is in its place."""
    old, now = scratch.status(saved), status_at(above, name)
    return old is not None and now is not None and old.st_ino != now.st_ino


def _is_still(status: os.stat_result | None, before: Entry) -> bool:
    """Tell whether a path is still a link to its hard-linked file."""
    if status is None or before.kind != "file" or before.links == 1:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_ino == before.ino


def _is_inode(path: Path, ino: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_ino == ino
    return False


def _is_copy(own: Scratch, scratch: Scratch, name: str) -> bool:
    """Tell whether a saved file is still the same as its copy in the store."""
    top = scratch.at(name)
    unknown = {parts[len(top) :] for parts, _ in scratch.tree.walk(top)}
    for parts, _ in own.tree.walk(own.at(safe_name(name))):
        known = capture(own.tree, parts, read=True)
        now = capture(scratch.tree, (*top, *parts[1:]), read=True)
        if known is None or now is None or known.kind != now.kind:
            return False
        if not known.is_directory and not (matches(known, now) and known.digest == now.digest):
            return False
        unknown.discard(parts[1:])
    return not unknown


def _is_beginning(tree: Tree, parts: Parts, reading: int) -> bool:
    """Tell whether a file's content is a prefix of what a descriptor has to read.

    True for an unreadable file: no one else is likely to have changed it.
    """
    with contextlib.suppress(PermissionError), Held(tree.open_file(parts)) as fd:
        while data := os.read(fd, CHUNK):
            if data != read_exactly(reading, len(data)):
                return False
    return True


def open_for_writing(above: int, name: str) -> int:
    """Open a file for writing, even our own file without write permission."""
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(name, flags, dir_fd=above)
    except PermissionError:
        mode = stat.S_IMODE(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode)
        if mode & stat.S_IWUSR:
            raise
    chmod_at(above, name, mode | stat.S_IWUSR)
    try:
        return os.open(name, flags, dir_fd=above)
    finally:
        chmod_at(above, name, mode)
