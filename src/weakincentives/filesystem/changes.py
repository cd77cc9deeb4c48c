"""An open transaction on a directory: every change is journalled before it is made."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Unpack

from weakincentives.core.call import ToolCall
from weakincentives.core.state import is_our_code
from weakincentives.errors import (
    FilesystemError,
    HistoryDamaged,
    LogDamaged,
    LogUnavailable,
    MergeConflict,
    SnapshotExpired,
)
from weakincentives.filesystem.entry import (
    Attributes,
    Entry,
    Xattrs,
    apply_entry,
    capture,
    copy_exactly,
    copy_file,
    link,
    linked,
    listing_of,
    matches,
    new_file,
)
from weakincentives.filesystem.history import History
from weakincentives.filesystem.journal import Record, read_journal
from weakincentives.filesystem.paths import BARRED, Parts, join_path, shown, system_error
from weakincentives.filesystem.redo import MakeRedo
from weakincentives.filesystem.restore import Restore, move_out, open_for_writing, safe_name
from weakincentives.filesystem.scratch import TEMPORARY, Scratch, Scratches
from weakincentives.filesystem.store import Source, Store
from weakincentives.filesystem.swap import Seen, put_back
from weakincentives.filesystem.tree import (
    PRIVILEGES,
    Held,
    Mount,
    Near,
    Tree,
    exchange,
    inherit,
    mount_of,
    mounted_below,
    read_all,
    rename_to_new,
    set_xattrs,
    status_at,
    sync,
    sync_all,
    without_privileges,
    write_all,
    xattrs_of,
)

logger = logging.getLogger("weakincentives.filesystem")

SYNCED_ONE_BY_ONE = 64
"""Above this number of changed paths, sync the whole filesystem instead of each path."""

READ_FOR_MARKS = 32 << 20
"""Bytes to read at commit so that undo can compare contents. Beyond this limit a file counts as
changed as soon as its change time differs."""

KEPT_FILE, KEPT, KEPT_FILES = 1 << 20, 16 << 20, 500
"""Bytes of one file, and bytes and number of all files, whose content a commit keeps as it left
them: so later edits by someone else do not hide what the call wrote."""

COPIED_WHEN_MOVED = 8 << 20
"""Moved files up to this size are copied, so that rollback also undoes later edits."""


class ChangedMeanwhile(MergeConflict):
    """Someone changed a path between the plan of a merge and its change there."""

    def __init__(self, parts: Parts) -> None:
        path = join_path(parts)
        super().__init__(f"Changed by someone else in the meantime: {shown(path)}", [path])


class Changes:
    """An open transaction. Paths are canonical: links are already resolved.

    Nothing is written before the first change. Every method makes one change, or raises an OSError
    and changes nothing.
    """

    def __init__(self, tree: Tree, history: History) -> None:
        self.tree = tree
        self.history = history
        self.store = history.store
        self.journal = history.journal
        self.scratches = Scratches(tree, self.store)
        self.records: list[Record] = []
        self._marks: dict[int, int] = {}
        self._next_mark = 0
        self._saved: dict[Parts, Record] = {}
        """The first record of each path since the last savepoint: its original is saved."""
        self._touched: set[Parts] = set()
        """Directories changed since the last savepoint."""
        self._scratch_of: dict[Parts, Scratch] = {}
        """The scratch directory for each directory, cached until the next savepoint."""
        self._written: dict[int, tuple[Entry, Xattrs]] = {}
        """Files written in this transaction, by inode."""
        self._contents: dict[str, bytes] = {}
        """Their contents by digest, as far as they are small."""
        self._kept = 0
        self.has_programs = False
        """Whether other programs change files in this transaction."""
        self._safe_until = 0
        """How many records have all their saved files in the store."""
        self.is_stuck = False
        """Whether the last undo failed part-way because of a disk error."""
        self.was_committed = False
        """Whether it is committed although something interrupted that."""
        self.partly: set[str] = set()
        """The calls that are undone in this transaction, but not at all their paths."""
        self.expected: dict[Parts, Seen] | None = None
        """What a merge expects to replace: where it does not, it raises ChangedMeanwhile."""
        self._displaced: list[tuple[Parts, Tree, Parts, Seen]] = []
        """What it has replaced, and where that is now."""
        self._arrived: dict[int, Parts] = {}
        """Paths of files that arrived from the store and have more hard links there."""

    # Changing

    def write(self, parts: Parts, data: bytes) -> None:
        """Replace a file's content; mode, owner, attributes and hard links are preserved."""
        with self._made_parent(parts) as above:
            status = status_at(above, parts[-1])
            digest = hashlib.sha256(data).hexdigest()
            is_linked = status is not None and status.st_nlink > 1 and not is_our_code(status)
            if status is not None and is_linked and stat.S_ISREG(status.st_mode):
                self._edit(above, parts, status, data, digest)
                return
            scratch = self._scratch(above, parts[:-1])
            staged, xattrs = self._stage(scratch, above, parts, status, data)
            after = self._put(above, parts, scratch, staged, status, digest)
            self._written[after.ino] = after, xattrs
            self._keep(digest, data)

    def _keep(self, digest: str, data: bytes) -> None:
        """Remember a content until the commit."""
        fits = len(data) <= KEPT_FILE and self._kept + len(data) <= KEPT
        if fits and len(self._contents) < KEPT_FILES and digest not in self._contents:
            self._contents[digest] = data
            self._kept += len(data)

    def put_file(self, parts: Parts, source: Path | str) -> None:
        """Move the file at ``source`` to the path, with all its attributes."""
        if self._put_new_file(parts, source):
            return
        with self._placed(parts) as (scratch, staged):
            os.rename(source, staged, dst_dir_fd=self.store.tx_fd)
            if scratch is not self.scratches.own:
                self._copy_in(scratch, parts, staged)

    def _put_new_file(self, parts: Parts, source: Path | str) -> bool:
        """Move a file to a free path in one step; False where it must be staged first.

        Staged files are synced, copied to another filesystem, or exchanged for what is there.
        """
        if self.store.safe or self.expected is not None or parts in self._saved:
            return False
        with self._made_parent(parts) as above:
            scratch = self._scratch(above, parts[:-1])
            if scratch is not self.scratches.own or status_at(above, parts[-1]) is not None:
                return False
            after, times = Entry.of(os.lstat(source)), self._times(above, parts[:-1])
            record = Record(op="was", path=parts, after=after, scratch=scratch.mark, times=times)
            with self._change(record):
                os.rename(source, parts[-1], dst_dir_fd=above)
        self._saved[parts] = record
        return True

    def link(self, opened: Path, parts: Parts) -> None:
        """Hard-link a file to the path; ``opened`` is the path of a descriptor of it."""
        with self._placed(parts) as (scratch, staged):
            os.link(opened, staged, dst_dir_fd=scratch.fd)

    def add_name(self, origin: Parts, parts: Parts) -> None:
        """Hard-link the file at ``origin`` to the path, replacing what is there."""
        with self._placed(parts) as (scratch, staged), self.tree.parent(origin) as here:
            link(here, origin[-1], scratch.fd, staged)

    def make_directory(self, parts: Parts, mode: int = 0o777) -> None:
        """Create a directory and its missing parents; an existing one is fine."""
        there = len(parts)
        while there and not _is_directory(self.tree.status(parts[:there])):
            there -= 1
        for depth in range(there + 1, len(parts) + 1):
            here = parts[:depth]
            with self.tree.parent(here) as above:
                times, made = self._times(above, here[:-1]), Entry("directory")
                with self._change(Record(op="was", path=here, after=made, times=times)):
                    os.mkdir(here[-1], mode if depth == len(parts) else 0o777, dir_fd=above)
            self._expect(here, made)

    def remove(self, parts: Parts) -> None:
        """Remove a file, link or whole directory with one rename."""
        with self.tree.parent(parts) as above:
            status = os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
            self._remove(above, parts, status)

    def rename(self, origin: Parts, target: Parts) -> None:
        with self._made_parent(target) as there, self.tree.parent(origin) as here:
            status = os.stat(origin[-1], dir_fd=here, follow_symlinks=False)
            replaced = status_at(there, target[-1])
            if replaced is not None and os.path.samestat(status, replaced):
                # Hard links of one file: rename would leave both.
                self._remove(here, origin, status)
                return
            if replaced is not None and (_is_directory(status) or _is_directory(replaced)):
                self._remove(there, target, replaced)
                replaced = None
            try:
                if mount_of(here) != mount_of(there):
                    raise system_error(errno.EXDEV, origin)
                self._rename(here, origin, there, target, status, replaced)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                # Directories of an overlay's lower layer cannot be renamed, nor can entries of
                # another project or subvolume.
                self.copy(origin, target)
                self._remove(here, origin, status)

    def _rename(
        self,
        here: int,
        origin: Parts,
        there: int,
        target: Parts,
        status: os.stat_result,
        replaced: os.stat_result | None,
    ) -> None:
        if _is_directory(status):
            self._check_no_mount(origin)
        times = self._times(here, origin[:-1]) + self._times(there, target[:-1])
        if replaced is not None:
            # Always saved again: undoing the move clears the path.
            self._saved.pop(target, None)
            scratch = self._scratch(there, target[:-1])
            record = Record(
                op="was",
                path=target,
                before=Entry.of(replaced),
                after=Entry.of(status),
                scratch=scratch.mark,
                times=times,
            )
            self._save(scratch, there, record)
            with self._change(record):
                if record.away:
                    self._move_away(there, record)
            times = ()
        moved = self._moved_record(here, origin, target, status, times)
        if self.expected is not None:
            self._move_expected(here, there, moved, self.expected)
        else:
            with self._change(moved):
                os.rename(origin[-1], target[-1], src_dir_fd=here, dst_dir_fd=there)
        if _is_directory(status):
            self._forget_below(origin)
        else:
            self._saved.pop(origin, None)
            self._saved.pop(target, None)

    def copy(self, origin: Parts, target: Parts) -> None:
        with self._placed(target) as (scratch, staged):
            copy_exactly(self.tree, origin, scratch.tree, scratch.at(staged))

    def set_attributes(self, parts: Parts, **given: Unpack[Attributes]) -> None:
        entry = capture(self.tree, parts)
        if entry is None:
            raise system_error(errno.ENOENT, parts)
        wanted = entry._replace(**given)
        if entry.kind == "file":
            with self.tree.parent(parts) as above:
                record = self._edit_record(above, parts, entry)
        else:
            record = Record(op="was", path=parts, before=entry)
        with self._change(record):
            apply_entry(self.tree, parts, wanted)
        self._expect_edited(parts)

    def found(self, record: Record) -> None:
        """Record that another program changed a path.

        Directories come before their entries. The ``twin`` of a hard link is recorded later and so
        restored earlier.
        """
        self._forget_below(record.path)
        self._append(record)

    def forget_from(self, count: int) -> None:
        """Drop all records after the first ``count`` without undoing them."""
        if len(self.records) > count:
            self.journal.cut(self.records[count].offset)
            del self.records[count:]

    def expect_external(self, index: tuple[int, int]) -> None:
        """Record that other programs change files from here on, as part of the transaction.

        ``index`` identifies the list of what was there before.
        """
        self._append(Record(op="external", data={"index": index}))
        self.has_programs = True

    # Savepoints and the end

    def mark(self) -> int:
        self._next_mark += 1
        self._marks[self._next_mark] = len(self.records)
        # From here on, originals must be saved again.
        self._forget()
        return self._next_mark

    def since(self, mark: int | None) -> list[Record]:
        """Return the records since a savepoint, or all of them."""
        return self.records[0 if mark is None else self._marks[mark] :]

    def undo_to(self, mark: int) -> tuple[str, ...]:
        """Roll back to a savepoint; later savepoints expire.

        Returns a sentence for each path that could not be restored.
        """
        if mark not in self._marks:
            raise SnapshotExpired("an older snapshot was restored since this one was taken")
        for later in [known for known in self._marks if known > mark]:
            del self._marks[later]
        return self._undo_from(self._marks[mark])

    def roll_back(self) -> tuple[str, ...]:
        """Roll back everything. Returns a sentence for each path that could not be restored."""
        self._marks.clear()
        if self.records and self.history.is_in_doubt:
            try:
                self.was_committed = self.history.is_committed(self.records[0])
            except (LogUnavailable, HistoryDamaged):
                return self._leave_in_doubt()
            self.history.is_in_doubt, self.history.interrupt = False, None
            if self.was_committed:
                self._finish_committed()
                return ()
        sentences = self._undo_from(0)
        if self.records:
            self.history.unfinished = self._finish_undoing
        else:
            self._sweep()
            self.scratches.leave()
        return sentences

    def _finish_undoing(self) -> None:
        """Retry a rollback that failed part-way."""
        if self.roll_back():
            raise OSError(errno.EIO, "what an earlier call changed could not be undone")

    def _leave_in_doubt(self) -> tuple[str, ...]:
        """Leave everything as it is until the log can say whether the call is committed."""
        self.is_stuck = True
        self.history.unfinished = self._settle
        sentence = (
            "Whether this call is committed is not known, because the log cannot be read. Its files"
            " are as the call left them. Nothing more is changed until the log can be read"
        )
        logger.error("%s", sentence)
        return (sentence,)

    def _settle(self) -> None:
        """Finish or roll back a transaction, whichever the log says."""
        is_committed = self.history.is_committed(self.records[0])
        self.history.is_in_doubt = False
        if not is_committed:
            self._finish_undoing()
            return
        self._finish_committed()

    def _finish_committed(self) -> None:
        """Finish what the log has; if the disk fails, before the next change."""
        records = self.records
        try:
            self.history.finish_committed(records)
        except OSError as error:
            logger.warning("The originals of a committed call will be kept later: %s", error)
            self.history.unfinished = lambda: self.history.finish_committed(records)
        self.records, self.is_stuck = [], False
        self.scratches.leave()

    def save_anew(self) -> None:
        """Have later records save originals again, as after a savepoint."""
        self._saved.clear()

    def undo_since(self, count: int) -> None:
        """Undo a failed operation: all but the first ``count`` records."""
        self._undo_from(count, tolerant=True)
        self._sweep()

    def commit(
        self,
        call: ToolCall | None = None,
        undoes: Sequence[str] = (),
        redo: MakeRedo | None = None,
    ) -> int | None:
        """Commit; returns the serial in the history, or None if nothing changed."""
        self._marks.clear()
        if not self.records:
            self.scratches.leave()
            return None
        if self.store.safe:
            self._write_through(self.records)
        if self.scratches.made and self._copy_saved() and self.store.safe:
            sync_all(self.store.tx_fd)
        left = self._left_now()
        needed = {each.digest for each in left.values() if each is not None}
        kept = {digest: data for digest, data in self._contents.items() if digest in needed}
        partly = [each for each in undoes if each in self.partly]
        serial = self.history.add(self.records, call, left, self.tree, undoes, kept, redo, partly)
        self.records, self.history.is_in_doubt = [], False
        self._sweep()
        self.scratches.leave()
        interrupt, self.history.interrupt = self.history.interrupt, None
        if interrupt is not None:
            raise interrupt
        return serial

    def _copy_saved(self) -> bool:
        """Copy files saved on other filesystems to the store. Returns whether there were any."""
        copied, own = False, self.scratches.own
        for name, scratch in self._saved_elsewhere(self.records):
            if own.status(safe_name(name)) is not None:
                own.remove(name)
                os.rename(safe_name(name), name, src_dir_fd=own.fd, dst_dir_fd=own.fd)
            elif scratch.status(name) is not None:
                # Its replacement may have been staged in the store under the same name.
                own.remove(name)
                copy_exactly(scratch.tree, scratch.at(name), own.tree, (name,))
                copied = True
                self._undo_edits(scratch, name)
        return copied

    def _undo_edits(self, scratch: Scratch, name: str) -> None:
        """Give files in a copied directory their content from when it was removed.

        They may have been edited since through another hard link.
        """
        saved = next(n for n, record in enumerate(self.records) if record.saved == name)
        later = [r for r in self.records[saved:] if r.in_place and r.before and r.source]
        edited = {r.before.ino: r for r in reversed(later) if r.before is not None}
        if not edited:
            return
        for parts, status in scratch.tree.walk(scratch.at(name)):
            record = edited.get(status.st_ino) if stat.S_ISREG(status.st_mode) else None
            if record is not None and record.before is not None and record.source is not None:
                place = (name, *parts[len(scratch.base) + 1 :])
                with (
                    self.store.tree.parent(place) as above,
                    Held(open_for_writing(above, place[-1])) as fd,
                ):
                    os.ftruncate(fd, 0)
                    record.source.fill(self.store.path, record.before.size, fd)
                apply_entry(self.store.tree, place, record.before)

    def copy_to_store(self) -> None:
        """Copy files saved in the workspace to the store, where programs cannot reach them."""
        self.scratches.recreate()
        own = self.scratches.own
        for name, scratch in self._saved_elsewhere(self.records[self._safe_until :]):
            if scratch.status(name) is not None:
                own.remove(safe_name(name))
                copy_exactly(scratch.tree, scratch.at(name), own.tree, (safe_name(name),))
        self._safe_until = len(self.records)

    def _saved_elsewhere(self, records: Sequence[Record]) -> Iterator[tuple[str, Scratch]]:
        """Yield the names and scratch directories of files saved outside the store."""
        saved = {
            r.saved: r.scratch for r in records if r.op == "was" and r.scratch and r.source is None
        }
        for name, scratch in saved.items():
            if name is not None:
                yield name, self.scratches.of(scratch)

    def _left_now(self) -> dict[Parts, Entry | None]:
        """Return the present entry at each changed path."""
        with contextlib.closing(Near(self.tree)) as near:
            return self._left_at(near)

    def _left_at(self, near: Near) -> dict[Parts, Entry | None]:
        found: dict[Parts, os.stat_result | None] = {}
        for record in self.records:
            for parts in record.paths:
                if parts not in found:
                    with contextlib.suppress(OSError):
                        found[parts] = near.status(parts)
        # A directory that arrived as a whole is recorded with everything in it.
        for record in self.records:
            if record.op == "was" and _is_directory(found.get(record.path)) and record.is_whole:
                found.update(self.tree.walk(record.path))
        moved = {record.path for record in self.records if record.op == "moved"}
        left: dict[Parts, Entry | None] = {}
        budget = READ_FOR_MARKS
        for parts, status in found.items():
            if status is None:
                left[parts] = None
                continue
            known, xattrs = self._written.get(status.st_ino, (None, ()))
            if (
                known is not None
                and (known.size, known.mtime_ns) == (status.st_size, status.st_mtime_ns)
                and stat.S_ISREG(status.st_mode)
                and not self.has_programs
            ):
                left[parts] = Entry.of(status, known.digest, xattrs)
                continue
            entry = left[parts] = Entry.of(status)
            if entry.is_directory and parts in moved:
                with contextlib.suppress(OSError):
                    left[parts] = entry._replace(digest=listing_of(self.tree.kinds(parts)))
            if entry.kind not in ("file", "link"):
                continue
            cost = entry.size + 4096
            with contextlib.suppress(OSError):
                left[parts] = self._captured(near, parts, status, read=budget > cost)
            budget -= cost if budget > cost else 0
        return left

    def _captured(
        self, near: Near, parts: Parts, status: os.stat_result, *, read: bool
    ) -> Entry | None:
        """Return the entry at a path; of a file that is read, keep the content."""
        if not read or not stat.S_ISREG(status.st_mode) or status.st_size > KEPT_FILE:
            return capture(self.tree, parts, read=read, status=status)
        with Held(near.open_file(parts)) as fd:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size > KEPT_FILE:  # replaced meanwhile
                return capture(self.tree, parts, read=True)
            data = read_all(fd, found.st_size)
            digest = hashlib.sha256(data).hexdigest()
            self._keep(digest, data)
            return Entry.of(found, digest, xattrs_of(fd))

    # Making one change

    def _made_parent(self, parts: Parts) -> Held:
        try:
            return self.tree.parent(parts)
        except FileNotFoundError:
            self.make_directory(parts[:-1])
            return self.tree.parent(parts)

    def _append(self, record: Record) -> None:
        if not self.records and self.history.unfinished is not None:
            self.history.finish_earlier()
        if self.store.safe and record.scratch is not None:
            with self.tree.directory(record.scratch) as fd:
                os.fsync(fd)
        self.journal.append(record)
        self.records.append(record)

    @contextlib.contextmanager
    def _change(self, record: Record) -> Generator[None]:
        """Journal a record; undo it if the change in the block fails."""
        self._append(record)
        try:
            yield
        except BaseException:
            self._undo_from(len(self.records) - 1, tolerant=True)
            raise

    def _times(self, above: int, parent: Parts) -> tuple[tuple[Parts, int], ...]:
        """Return a directory's time if this is the first change in it since the last savepoint."""
        if parent in self._touched:
            return ()
        self._touched.add(parent)
        return ((parent, os.fstat(above).st_mtime_ns),)

    def _scratch(self, above: int, parent: Parts) -> Scratch:
        """Return the scratch directory on the same filesystem as a directory."""
        scratch = self._scratch_of.get(parent)
        if scratch is None:
            scratch = self._scratch_of[parent] = self.scratches.on(mount_of(above), parent)
        return scratch

    def _check_no_mount(self, parts: Parts) -> None:
        """Raise if something is mounted in a directory: it would move along."""
        mounted = mounted_below(f"{self.tree.path}/{join_path(parts)}")
        if mounted is not None:
            raise FilesystemError(
                f"{shown(join_path(parts))} cannot be moved or deleted: another filesystem is"
                f" mounted in it at {shown(mounted)}. Move or delete its entries instead"
            )

    def _save(self, scratch: Scratch, above: int, record: Record) -> None:
        """Save the original by a hard link; if the system refuses one, it has to be moved."""
        record.saved = self.store.fresh("k")
        # A link would not hold what someone puts there before it is replaced.
        record.away = self.expected is not None or not linked(
            above, record.path[-1], scratch.fd, record.saved
        )

    def _stage(
        self, scratch: Scratch, above: int, parts: Parts, status: os.stat_result | None, data: bytes
    ) -> tuple[str, Xattrs]:
        """Write a new file with the attributes of the one it replaces, or else of its directory.

        Returns its name in the scratch directory and its extended attributes.
        """
        staged = self.store.fresh()
        with new_file(scratch.fd, staged, 0o666) as fd:
            write_all(fd, data)
            if status is not None and stat.S_ISREG(status.st_mode):
                return staged, self._inherit_attributes(fd, above, parts[-1], status)
            inherit(fd, above)
            return staged, xattrs_of(fd)

    def _inherit_attributes(self, fd: int, above: int, name: str, status: os.stat_result) -> Xattrs:
        """Copy owner, mode and extended attributes from the replaced file; returns the latter."""
        made = os.fstat(fd)
        if (made.st_uid, made.st_gid) != (status.st_uid, status.st_gid):
            with contextlib.suppress(PermissionError):
                os.fchown(fd, status.st_uid, status.st_gid)
        mode = without_privileges(status.st_mode)
        if made.st_mode != mode:
            os.fchmod(fd, stat.S_IMODE(mode))
        present = xattrs_of(fd)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with Held(os.open(name, flags, dir_fd=above)) as replaced:
                xattrs = xattrs_of(replaced)
        except PermissionError:
            return present
        if xattrs == present:
            return present
        set_xattrs(fd, tuple(one for one in xattrs if one[0] != PRIVILEGES))
        return xattrs_of(fd)

    def _copy_in(self, scratch: Scratch, parts: Parts, staged: str) -> None:
        """Copy a staged file from the store to another filesystem; hard links stay linked."""
        status = os.stat(staged, dir_fd=self.store.tx_fd, follow_symlinks=False)
        known = self._arrived.get(status.st_ino) if status.st_nlink > 1 else None
        there = None if known is None else self.tree.status(known)
        if known is not None and there is not None and matches(Entry.of(status), Entry.of(there)):
            with self.tree.parent(known) as other:
                link(other, known[-1], scratch.fd, staged)
            return
        copy_exactly(self.store.tree, (staged,), scratch.tree, scratch.at(staged))
        if not _is_directory(status):
            self._arrived[status.st_ino] = parts

    @contextlib.contextmanager
    def _placed(self, parts: Parts) -> Generator[tuple[Scratch, str]]:
        """Give a scratch directory and a name to create an entry there in the block.

        It is then moved to the path, replacing even a directory.
        """
        with self._made_parent(parts) as above:
            scratch, staged = self._scratch(above, parts[:-1]), self.store.fresh()
            yield scratch, staged
            status = status_at(above, parts[-1])
            if status is not None and _is_directory(status):
                self._remove(above, parts, status)
                status = None
            self._put(above, parts, scratch, staged, status)

    def _put(
        self,
        above: int,
        parts: Parts,
        scratch: Scratch,
        staged: str,
        status: os.stat_result | None,
        digest: str | None = None,
    ) -> Entry:
        """Move a staged file to a path and save the original; returns the new entry."""
        found = os.stat(staged, dir_fd=scratch.fd, follow_symlinks=False)
        if self.store.safe and stat.S_ISREG(found.st_mode):
            # Before the move: recovery identifies our files by content.
            _sync_in(scratch.fd, staged)
        after, first = Entry.of(found, digest), self._saved.get(parts)
        if first is not None:
            # The original is already saved; this only records what we put there.
            record = Record(
                op="was",
                path=parts,
                before=first.before,
                after=after,
                saved=first.saved,
                scratch=first.scratch,
            )
            self._append(record)
            try:
                if self.expected is None or not self._exchange_expected(
                    above, scratch, staged, parts, Seen(after, digest)
                ):
                    scratch.put(staged, above, parts[-1])
            except BaseException:
                self._drop_record(record)  # the rename failed: there is nothing to undo
                raise
            self._expect(parts, after)
            return after
        before = None if status is None else Entry.of(status)
        times = self._times(above, parts[:-1])
        record = Record(
            op="was", path=parts, before=before, after=after, scratch=scratch.mark, times=times
        )
        if before is None or not self._exchanged(above, scratch, staged, record):
            if before is not None:
                self._save(scratch, above, record)
            with self._change(record):
                if record.away:
                    self._move_away(above, record)
                self._put_at(scratch, staged, above, parts)
        self._saved[parts] = record
        self._expect(parts, after)
        return after

    def _put_at(self, scratch: Scratch, staged: str, above: int, parts: Parts) -> None:
        if self.expected is None:
            scratch.put(staged, above, parts[-1])
            return
        try:
            rename_to_new(scratch.fd, staged, above, parts[-1])
        except FileExistsError as error:
            raise ChangedMeanwhile(parts) from error

    # What a merge expects

    def _expect(self, parts: Parts, entry: Entry | None) -> None:
        """Expect what was just put at a path: from now on it is ours."""
        if self.expected is None:
            return
        self.expected[parts] = Seen(entry, None if entry is None else entry.digest)
        if entry is not None and entry.is_directory:  # with everything in it
            for path, status in self.tree.walk(parts):
                self.expected[path] = Seen(Entry.of(status))

    def _expect_edited(self, parts: Parts) -> None:
        """Expect a file as it was just changed in place, under all its names."""
        status = None if self.expected is None else self.tree.status(parts)
        if self.expected is None or status is None:
            return
        entry = Entry.of(status)
        for path, seen in self.expected.items():
            is_linked = entry.file and seen.node is not None and seen.node.file == entry.file
            if path == parts or is_linked:
                self.expected[path] = Seen(entry)

    def _check_displaced(self, parts: Parts, scratch: Scratch, name: str) -> None:
        """Raise ChangedMeanwhile unless what was replaced is what a merge has seen there."""
        if self.expected is None:
            return
        found = list(scratch.tree.walk(scratch.at(name)))
        depth = len(scratch.at(name))
        inside = {(*parts, *each[depth:]): each for each, _ in found}
        inside.setdefault(parts, scratch.at(name))
        for path, place in inside.items():
            seen = self.expected.get(path)
            if seen is None and path == parts:
                continue  # not of the merge's own: it was not looked at
            if seen is None or not seen.is_at(scratch.tree, place):
                raise ChangedMeanwhile(path)
            if seen.node is not None and seen.node.kind == "file" and seen.node.links == 1:
                self._displaced.append((path, scratch.tree, place, seen))

    def check_displaced(self) -> None:
        """Raise ChangedMeanwhile if someone still writes to what a merge has replaced."""
        for parts, tree, place, seen in self._displaced:
            if tree.status(place) is not None and not seen.is_at(tree, place):
                raise ChangedMeanwhile(parts)

    def _exchange_expected(
        self, above: int, scratch: Scratch, staged: str, parts: Parts, ours: Seen
    ) -> bool:
        """Swap a new file and what a merge has put there before; False if that is not possible."""
        if not self.tree.exchanges.get(scratch.mount):
            return False
        if not exchange(scratch.fd, staged, above, parts[-1]):
            return False
        self._put_back_unexpected(above, scratch, staged, parts, ours)
        return True

    def _put_back_unexpected(
        self, above: int, scratch: Scratch, name: str, parts: Parts, ours: Seen
    ) -> None:
        """Raise ChangedMeanwhile, and swap again, unless a merge has replaced what it has seen."""
        try:
            self._check_displaced(parts, scratch, name)
        except ChangedMeanwhile:
            if not put_back(scratch, name, above, parts[-1], ours):
                place = self.store.left(parts)
                move_out(scratch.tree, scratch.at(name), scratch.fd, place)
                logger.error(
                    "%s was changed more than once during a merge; an earlier version is in %s",
                    shown(join_path(parts)),
                    place,
                )
            raise

    def _move_expected(
        self, here: int, there: int, record: Record, expected: dict[Parts, Seen]
    ) -> None:
        """Move something to a free path, and back again if it is not what a merge has seen."""
        assert record.origin is not None
        origin, target = record.origin, record.path
        seen = expected.get(origin)
        self._append(record)
        try:
            rename_to_new(here, origin[-1], there, target[-1])
        except BaseException as error:
            self._drop_record(record)
            if isinstance(error, FileExistsError):
                raise ChangedMeanwhile(target) from error
            raise
        if seen is not None and not seen.is_at(self.tree, target):
            rename_to_new(there, target[-1], here, origin[-1])
            self._drop_record(record)
            raise ChangedMeanwhile(origin)
        depth = len(origin)
        for parts in [each for each in expected if each[:depth] == origin]:
            expected[(*target, *parts[depth:])] = expected[parts]
            expected[parts] = Seen(None)

    def _exchanged(self, above: int, scratch: Scratch, staged: str, record: Record) -> bool:
        """Swap the new file and the original; False if the filesystem cannot.

        The path is never empty, and filesystems that flush a file when it is replaced by a rename
        do not flush it here.
        """
        if scratch.mount not in self.tree.exchanges:
            self.tree.exchanges[scratch.mount] = self._can_exchange(scratch)
        if not self.tree.exchanges[scratch.mount]:
            return False
        record.saved = staged
        self._append(record)
        try:
            if exchange(scratch.fd, staged, above, record.path[-1]):
                after = record.after
                ours = Seen(after, None if after is None else after.digest)
                self._put_back_unexpected(above, scratch, staged, record.path, ours)
                return True
        except BaseException:
            self._drop_record(record)
            raise
        self._drop_record(record)
        record.saved = None
        return False

    def _can_exchange(self, scratch: Scratch) -> bool:
        """Tell whether a filesystem can swap two names, by trying it."""
        names = self.store.fresh(), self.store.fresh()
        for name in names:
            os.close(new_file(scratch.fd, name))
        can = exchange(scratch.fd, names[0], scratch.fd, names[1])
        for name in names:
            os.unlink(name, dir_fd=scratch.fd)
        return can

    def _drop_record(self, record: Record) -> None:
        """Drop the newest record: its change was not made, or is undone."""
        self.journal.cut(record.offset)
        self.records.pop()

    def _move_away(self, above: int, record: Record) -> None:
        """Move an original that could not be hard-linked."""
        scratch, name = self.scratches.of(record.scratch), record.saved or ""
        os.rename(record.path[-1], name, src_dir_fd=above, dst_dir_fd=scratch.fd)
        self._check_displaced(record.path, scratch, name)

    def _remove(self, above: int, parts: Parts, status: os.stat_result) -> None:
        if not stat.S_ISDIR(status.st_mode):
            self._remove_whole(above, parts, status)
            return
        self._check_no_mount(parts)
        try:
            self._remove_whole(above, parts, status)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._remove_piecewise(parts)

    def _remove_whole(
        self, above: int, parts: Parts, status: os.stat_result, *, empty: bool = False
    ) -> None:
        """Remove an entry by renaming it; of an empty directory, save a copy instead."""
        scratch, saved = self._scratch(above, parts[:-1]), self.store.fresh("k")
        record = Record(
            op="was",
            path=parts,
            before=Entry.of(status),
            saved=saved,
            scratch=scratch.mark,
            times=self._times(above, parts[:-1]),
        )
        if empty:
            copy_exactly(self.tree, parts, scratch.tree, scratch.at(saved))
        with self._change(record):
            if empty:
                os.rmdir(parts[-1], dir_fd=above)
            else:
                os.rename(parts[-1], saved, src_dir_fd=above, dst_dir_fd=scratch.fd)
                self._check_displaced(parts, scratch, saved)
        self._expect(parts, None)
        self._forget_below(parts)

    def _remove_piecewise(self, top: Parts) -> None:
        """Remove a directory entry by entry, such as one of an overlay's lower layer."""
        pending = [(top, False)]
        while pending:
            parts, is_empty = pending.pop()
            with self.tree.parent(parts) as above:
                status = os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
                try:
                    if is_empty or parts != top:
                        self._remove_whole(above, parts, status, empty=is_empty)
                        continue
                except OSError as error:
                    if error.errno != errno.EXDEV or is_empty or not stat.S_ISDIR(status.st_mode):
                        raise
            pending.append((parts, True))
            pending += [((*parts, name), False) for name in self.tree.names(parts)]

    def _edit(
        self, above: int, parts: Parts, status: os.stat_result, data: bytes, digest: str
    ) -> None:
        """Change a hard-linked file in place, so that its other names show the change."""
        entry = capture(self.tree, parts) or Entry.of(status)
        record = self._edit_record(above, parts, entry, digest)
        self._check_unchanged(parts)
        with self._change(record), Held(open_for_writing(above, parts[-1])) as fd:
            _overwrite(fd, data)
            mode = stat.S_IMODE(status.st_mode)
            if mode != without_privileges(mode):
                with contextlib.suppress(PermissionError):  # then the system has already done it
                    os.fchmod(fd, without_privileges(mode))
            if self.store.safe:
                os.fsync(fd)
        self._expect_edited(parts)

    def _check_unchanged(self, parts: Parts) -> None:
        """Raise ChangedMeanwhile unless a path has what a merge has seen there."""
        seen = None if self.expected is None else self.expected.get(parts)
        if seen is not None and not seen.is_at(self.tree, parts):
            raise ChangedMeanwhile(parts)

    def _edit_record(
        self, above: int, parts: Parts, entry: Entry, digest: str | None = None
    ) -> Record:
        """Save a file that is about to be changed in place: a hard link and a copy."""
        scratch = self._scratch(above, parts[:-1])
        saved, copy = self.store.fresh("k"), self.store.fresh("c")
        others = () if entry.links == 1 else self._other_names(parts, entry)
        for each in (parts, *others):  # what is put there later replaces this file, not the first
            self._saved.pop(each, None)
        self._written.pop(entry.ino, None)
        copy_file(self.tree, parts, self.store.tx_fd, copy, safe=self.store.safe)
        # Without a hard link, only the content is restored.
        is_saved = linked(above, parts[-1], scratch.fd, saved)
        return Record(
            op="was",
            path=parts,
            before=entry,
            after=Entry("file", size=-1, ino=entry.ino, digest=digest),
            saved=saved if is_saved else None,
            source=Source(copy),
            scratch=scratch.mark,
            times=self._times(above, parts[:-1]),
            others=others,
        )

    def _other_names(self, parts: Parts, entry: Entry) -> tuple[Parts, ...]:
        """Return the other hard links of a file in the workspace."""
        found = self.tree.walk((), lenient=True)
        same = (other for other, each in found if (each.st_dev, each.st_ino) == entry.file)
        return tuple(
            other
            for other in same
            if other != parts and not any(name.startswith(TEMPORARY) for name in other)
        )

    def _moved_record(
        self,
        here: int,
        origin: Parts,
        target: Parts,
        status: os.stat_result,
        times: tuple[tuple[Parts, int], ...],
    ) -> Record:
        """Save a hard link to what is about to be moved, and the content of a small file."""
        moved = Entry.of(status)
        record = Record(
            op="moved", path=target, origin=origin, before=moved, after=moved, times=times
        )
        if moved.is_directory:
            return record
        scratch, saved = self._scratch(here, origin[:-1]), self.store.fresh("k")
        if linked(here, origin[-1], scratch.fd, saved):  # else undo finds it at its new path
            record.saved, record.scratch = saved, scratch.mark
        if moved.kind == "file" and moved.size <= COPIED_WHEN_MOVED:
            with contextlib.suppress(PermissionError):
                record.before, copy = capture(self.tree, origin) or moved, self.store.fresh("c")
                copy_file(self.tree, origin, self.store.tx_fd, copy, safe=self.store.safe)
                record.source = Source(copy)
        return record

    def _forget_below(self, parts: Parts) -> None:
        """Forget what is known below a replaced directory, so that it is saved again."""
        depth = len(parts)
        self._saved = {k: first for k, first in self._saved.items() if k[:depth] != parts}
        self._touched = {k for k in self._touched if k[:depth] != parts}
        self._scratch_of = {k: each for k, each in self._scratch_of.items() if k[:depth] != parts}

    def _forget(self) -> None:
        self._saved.clear()
        self._touched.clear()
        self._scratch_of.clear()

    def _sweep(self) -> None:
        """Remove files from the scratch directories that no record needs."""
        if self.history.unfinished is not None:
            return  # an earlier transaction may still need it
        used: set[str] = set()
        for record in self.records:
            used.update(record.names)
            used.update(map(safe_name, record.names))
        found: list[tuple[Scratch, str]] = []
        with contextlib.suppress(OSError):  # swept another time
            found += [(self.scratches.own, name) for name in os.listdir(self.store.tx)]
            for scratch in self.scratches.made:
                found += [(scratch, name) for name in scratch.tree.names(scratch.base)]
        for scratch, name in found:
            for _ in range(2 if name[-1].isdecimal() and name not in used else 0):
                # Retried once: a hard link to a user's file must not stay.
                with contextlib.suppress(OSError):
                    scratch.remove(name)
                    break

    def _write_through(self, records: Sequence[Record]) -> None:
        """Sync every change to disk, contents before names."""
        paths = {parts for record in records for parts in record.paths}
        found = {parts: self.tree.status_if_reached(parts) for parts in paths}
        whole = any(
            _is_directory(found[parts])
            for record in records
            if record.is_whole and (record.after is not None or record.op == "moved")
            for parts in record.paths
        )
        parents = {parts[:-1] for parts in paths}
        if whole or len(paths) > SYNCED_ONE_BY_ONE:
            self._sync_all(parents)
            return
        for parts, status in found.items():
            if status is not None and stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFDIR):
                self._sync(parts)
        for parts in parents - paths:
            self._sync(parts)

    def _sync(self, parts: Parts) -> None:
        try:
            with self.tree.parent(parts) as above:
                _sync_in(above, parts[-1] if parts else ".")
        except OSError as error:
            if error.errno not in (errno.ENOENT, *BARRED):
                raise  # else it went with its directory

    def _sync_all(self, directories: AbstractSet[Parts]) -> None:
        done: set[Mount] = set()
        for parts in directories | {()}:
            try:
                held = self.tree.directory(parts)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EACCES, *BARRED):
                    raise
                continue  # gone, or on the same filesystem as its parent
            with held as fd:
                mount = mount_of(fd)
                if mount not in done:
                    done.add(mount)
                    sync_all(fd)

    # Undoing

    def _undo_from(
        self, index: int, restore: Restore | None = None, *, tolerant: bool = False
    ) -> tuple[str, ...]:
        """Undo all but the first ``index`` records, newest first."""
        if restore is None:
            restore = Restore(
                self.tree,
                self.store,
                self.scratches,
                self.has_programs,
                tolerant=tolerant,
                spares_edits=self.expected is not None,
            )
        self._forget()
        self._safe_until = min(self._safe_until, index)
        self.is_stuck = True
        try:
            self.scratches.recreate()
            while len(self.records) > index:
                record = self.records[-1]
                restore.restore(record, over=self._is_over(record))
                if self.store.safe:
                    self._write_through([record])
                self._drop_record(record)
            self.is_stuck = False
        except OSError as error:
            if restore.recovering:
                raise
            # A disk error: the journal still has what remains to be undone.
            restore.sentences.append(
                f"{shown(join_path(self.records[-1].path))} and earlier changes could not be"
                f" restored ({error.strerror}). This is retried before the next change and when the"
                " directory is next opened"
            )
        for sentence in restore.sentences:
            logger.error("%s", sentence)
        return tuple(restore.sentences)

    def _is_over(self, record: Record) -> bool:
        """Tell whether a move replaced something, which is restored next."""
        earlier = self.records[-2] if len(self.records) > 1 else record
        if record.op != "moved" or (earlier.op, earlier.path) != ("was", record.path):
            return False
        return (
            earlier.after is not None
            and record.after is not None
            and (earlier.after.ino == record.after.ino)
        )

    def undo_unfinished(self, records: Sequence[Record]) -> tuple[str, ...]:
        begun = next((record.data for record in records if record.op == "external"), None)
        self.has_programs = begun is not None
        restore = Restore(self.tree, self.store, self.scratches, self.has_programs, recovering=True)
        for record in records:
            restore.expect(record)
        self.records = list(records)
        if begun is not None:
            from weakincentives.filesystem.scan import find_unfinished

            # Nothing after an incomplete record would be readable.
            self.journal.cut(records[-1].end)
            generation, size = begun["index"]
            sentence = find_unfinished(self.tree, self.store, self, (generation, size))
            if sentence is not None:
                restore.sentences.append(sentence)
        return self._undo_from(0, restore)


# After a kill


def recover(tree: Tree, history: History) -> tuple[str, ...]:
    """Undo or finish the transaction of a killed process.

    Returns a sentence for each path that could not be restored.
    """
    store = history.store
    changes = Changes(tree, history)
    scratches = changes.scratches
    if not scratches.recall() and not history.journal.may_be_open():
        return ()
    records, damage = read_journal(history.journal.path, history.journal.seals)
    if damage == "broken":
        return _set_all_aside(store, scratches)
    committed = False
    if records:
        try:
            committed = history.is_committed(records[0])
        except (HistoryDamaged, LogDamaged):
            return _set_all_aside(store, scratches)
        except LogUnavailable as error:
            raise LogUnavailable(
                f"Whether an unfinished call is committed is not known: {error}. Nothing is changed"
                " until the log can be read"
            ) from error
    else:
        history.finish_last()
    sentences: tuple[str, ...] = ()
    if not committed:
        # First: undo may remove the evidence that nothing is missing.
        sentences = _save_unrecorded(history, scratches, records, damage)
    if damage != "whole":
        history.journal.cut(records[-1].end if records else 0)
    if committed:
        history.finish_committed(records)
    elif records:
        sentences += changes.undo_unfinished(records)
    for name in store.tree.names(()):
        if name != "journal":
            store.tree.remove_all((name,))
    if any(record.op == "external" for record in records):
        from weakincentives.filesystem.scan import drop_names

        drop_names(store)
    history.journal.close()
    scratches.leave()
    return sentences


def _set_all_aside(store: Store, scratches: Scratches) -> tuple[str, ...]:
    """Set aside everything that an unreadable journal may refer to."""
    place = store.left(("journal",))
    place.mkdir()
    for scratch in (scratches.own, *scratches.made):
        for name in scratch.tree.names(scratch.base):
            move_out(scratch.tree, scratch.at(name), scratch.fd, place / name)
    scratches.leave()
    sentence = (
        "The journal of an unfinished call is unreadable. The directory is unchanged; the files"
        f" that the call replaced are in {place}"
    )
    logger.error("%s", sentence)
    return (sentence,)


def _save_unrecorded(
    history: History, scratches: Scratches, records: Sequence[Record], damage: str
) -> tuple[str, ...]:
    """Set aside saved files that no record names, unless they certainly exist elsewhere.

    Normally they do: a change is made only after its record is written. But even a journal that
    looks whole may have lost its last records.
    """
    store = history.store
    found = {
        name: scratch
        for scratch in (scratches.own, *scratches.made)
        for name in scratch.tree.names(scratch.base)
        if name[0] in "kcn" and name[1:].isdecimal()
    }
    known = {name for record in records for name in record.names}
    known |= history.leftovers()
    statuses = [scratch.status(name) for name, scratch in found.items()]
    ours = Counter((each.st_dev, each.st_ino) for each in statuses if each is not None)
    sentences: list[str] = []
    for name, scratch in sorted(found.items()):
        if name in known or _is_elsewhere_too(found, ours, name):
            continue
        if name[0] == "n" and damage == "whole" and _is_new(store, scratch, name):
            continue  # staged, and not yet moved into place
        place = store.left((name,))
        move_out(scratch.tree, scratch.at(name), scratch.fd, place)
        sentence = (
            "The last change of an unfinished call is unknown. What it may have replaced is in"
            f" {place}"
        )
        if damage == "torn" or name[0] == "k":
            sentences.append(sentence)
        else:  # more likely staged, or a copy
            logger.warning("%s", sentence)
    return tuple(sentences)


def _is_elsewhere_too(
    found: Mapping[str, Scratch], ours: Counter[tuple[int, int]], name: str
) -> bool:
    """Tell whether a saved file certainly exists elsewhere; ``ours`` counts its names here."""
    scratch = found.get(name)
    if scratch is None:
        return False
    if not name.startswith("c"):
        status = scratch.status(name)
        if status is None:
            return False
        if _is_directory(status):
            return not scratch.tree.names(scratch.at(name))  # empty: nothing to lose
        return status.st_nlink > ours[status.st_dev, status.st_ino]
    original = f"k{int(name[1:]) - 1}"  # a copy is made together with a hard link
    if not _is_elsewhere_too(found, ours, original):
        return False
    other = found[original]
    return other.tree.read(other.at(original))[0] == scratch.tree.read(scratch.at(name))[0]


def _is_new(store: Store, scratch: Scratch, name: str) -> bool:
    """Tell whether a file was written after the last record, and so is not an original."""
    status, journal = scratch.status(name), status_at(store.tx_fd, "journal")
    last = os.fstat(store.tx_fd) if journal is None else journal
    return status is not None and status.st_mtime_ns >= last.st_mtime_ns


def _sync_in(above: int, name: str) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with Held(os.open(name, flags, dir_fd=above)) as fd:
            sync(fd)
    except PermissionError:  # cannot be opened: sync everything
        sync_all(above)


def _is_directory(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISDIR(status.st_mode)


def _overwrite(fd: int, data: bytes) -> None:
    """Replace a file's content; truncated first, so that recovery can recognise a prefix."""
    if os.fstat(fd).st_size > len(data):
        os.ftruncate(fd, len(data))
    write_all(fd, data)
