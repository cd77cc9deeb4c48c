"""An open transaction on a directory: each change is journalled before it is made."""

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

from weakincentives.call import ToolCall
from weakincentives.errors import FilesystemError, SnapshotExpired
from weakincentives.filesystem.entry import (
    Entry,
    Xattrs,
    apply_entry,
    capture,
    copy_exactly,
    copy_file,
    link,
    linked,
    matches,
)
from weakincentives.filesystem.history import History
from weakincentives.filesystem.journal import Record, read_journal
from weakincentives.filesystem.protocol import BARRED, Parts, join_path, shown
from weakincentives.filesystem.restore import (
    Restore,
    move_out,
    open_to_change,
    safe_name,
    status_at,
)
from weakincentives.filesystem.scratch import TEMPORARY, Scratch, Scratches
from weakincentives.filesystem.store import Source, Store
from weakincentives.filesystem.tree import (
    PRIVILEGES,
    Held,
    Mount,
    Tree,
    exchange,
    inherit,
    mount_of,
    mounted_below,
    set_xattrs,
    sync,
    sync_all,
    without_privileges,
    write_all,
    xattrs_of,
)

logger = logging.getLogger("weakincentives.filesystem")

SYNCED_ONE_BY_ONE = 64
"""More changed paths than this are written to the disk with all that its filesystem has."""

READ_FOR_MARKS = 32 << 20
"""Bytes to read at most when a call is kept, so that undoing can compare contents. What is beyond
counts as changed as soon as its change time is another one."""

COPIED_WHEN_MOVED = 8 << 20
"""A moved file up to this size is copied, so that it comes back as it was even if it was edited."""


class Changes:
    """An open transaction. Paths are canonical: links are resolved before.

    Nothing is written before the first change. Every method makes one change, or raises the
    system's error and changes nothing.
    """

    def __init__(self, tree: Tree, history: History) -> None:
        self.tree = tree
        self.history = history
        self.store = history.store
        self.journal = history.journal
        self.rooms = Scratches(tree, self.store)
        self.records: list[Record] = []
        self._marks: dict[int, int] = {}
        self._next_mark = 0
        self._kept: dict[Parts, Record] = {}
        """What was first put at a path since the last mark: what was there before is kept."""
        self._touched: set[Parts] = set()
        """The directories that were changed since the last mark."""
        self._mounts: dict[Parts, Mount] = {}
        """Where directories are mounted: one system call for each until the next mark."""
        self._written: dict[int, Entry] = {}
        """The files that were written here, by inode."""
        self._has_programs = False
        """Whether others change files in this transaction, or did."""
        self._safe_until = 0
        """How many of the records keep nothing that only a scratch directory elsewhere has."""
        self.is_stuck = False
        """Whether the last undo could not be finished: the disk did not let it."""
        self._arrived: dict[int, Parts] = {}
        """Where files went that have more names in the store, and come from there one by one."""

    # Changing

    def write(self, parts: Parts, data: bytes) -> None:
        """Make the file hold these bytes; mode, owner, attributes and other names of it stay."""
        with self._made_parent(parts) as above:
            status = status_at(above, parts[-1])
            digest = hashlib.sha256(data).hexdigest()
            if status is not None and status.st_nlink > 1 and stat.S_ISREG(status.st_mode):
                self._edit(above, parts, status, data, digest)
                return
            room = self._room(above, parts[:-1])
            staged, xattrs = self._stage(room, above, parts, status, data)
            self._put(above, parts, room, staged, status, digest)
            after = self.records[-1].after
            if after is not None:
                self._written[after.ino] = after._replace(xattrs=xattrs)

    def put_file(self, parts: Parts, source: Path) -> None:
        """Make what is at ``source`` be at the path, with all that it is; it is consumed."""
        with self._made_parent(parts) as above:
            staged = self.store.fresh()
            os.rename(source, staged, dst_dir_fd=self.store.tx_fd)
            room = self._room(above, parts[:-1])
            if room is not self.rooms.own:
                self._bring_in(room, parts, staged)
            self._place(above, parts, room, staged)

    def link(self, opened: Path, parts: Parts) -> None:
        """Make the path one more name of a file; ``opened`` is the path of a descriptor of it."""
        with self._made_parent(parts) as above:
            room, staged = self._room(above, parts[:-1]), self.store.fresh()
            os.link(opened, staged, dst_dir_fd=room.fd)
            self._place(above, parts, room, staged)

    def add_name(self, origin: Parts, parts: Parts) -> None:
        """Make the path one more name of the file at another; what is there is taken away."""
        with self._made_parent(parts) as above, self.tree.parent(origin) as here:
            room, staged = self._room(above, parts[:-1]), self.store.fresh()
            link(here, origin[-1], room.fd, staged)
            self._place(above, parts, room, staged)

    def make_directory(self, parts: Parts, mode: int = 0o777) -> None:
        """Make a directory, and those it needs; one that is there is fine."""
        there = len(parts)
        while there and not _is_directory(self.tree.status(parts[:there])):
            there -= 1
        for depth in range(there + 1, len(parts) + 1):
            here = parts[:depth]
            with self.tree.parent(here) as above:
                times, made = self._times(above, here[:-1]), Entry("directory")
                with self._change(Record(op="was", path=here, after=made, times=times)):
                    os.mkdir(here[-1], mode if depth == len(parts) else 0o777, dir_fd=above)

    def remove(self, parts: Parts) -> None:
        """Take a file, link or whole directory away: one rename, however much is in it."""
        with self.tree.parent(parts) as above:
            status = os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
            self._take_away(above, parts, status)

    def rename(self, origin: Parts, target: Parts) -> None:
        """Give a file, link or directory another path; what is there is taken away."""
        with self._made_parent(target) as there, self.tree.parent(origin) as here:
            status = os.stat(origin[-1], dir_fd=here, follow_symlinks=False)
            replaced = status_at(there, target[-1])
            if replaced is not None and os.path.samestat(status, replaced):
                # Two names of one file: the system would leave both.
                self._take_away(here, origin, status)
                return
            if replaced is not None and (_is_directory(status) or _is_directory(replaced)):
                self._take_away(there, target, replaced)
                replaced = None
            try:
                if self._mount(here, origin[:-1]) != self._mount(there, target[:-1]):
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                self._rename(here, origin, there, target, status, replaced)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                # Some cannot be renamed within their filesystem: directories of an overlay's lower
                # layer, or what belongs to another project or subvolume.
                self._place_copy(origin, there, target)
                self._take_away(here, origin, status)

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
            # Always kept anew: undoing the move clears the path.
            self._kept.pop(target, None)
            room = self._room(there, target[:-1])
            record = Record(
                op="was",
                path=target,
                before=Entry.of(replaced),
                after=Entry.of(status),
                room=room.mark,
                times=times,
            )
            self._keep(room, there, record)
            with self._change(record):
                self._take_if_not_kept(there, record)
            times = ()
        with self._change(self._moved_record(here, origin, target, status, times)):
            os.rename(origin[-1], target[-1], src_dir_fd=here, dst_dir_fd=there)
        if _is_directory(status):
            self._forget_below(origin)
        else:
            self._kept.pop(origin, None)
            self._kept.pop(target, None)

    def copy(self, origin: Parts, target: Parts) -> None:
        """Put a copy of a file, link or directory at another path; what is there is taken away."""
        with self._made_parent(target) as there:
            self._place_copy(origin, there, target)

    def set_attributes(
        self,
        parts: Parts,
        *,
        mode: int | None = None,
        mtime_ns: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        xattrs: Xattrs | None = None,
    ) -> None:
        """Change what is given of a file's, link's or directory's attributes, and nothing else."""
        entry = capture(self.tree, parts)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), join_path(parts))
        given = {"mode": mode, "mtime_ns": mtime_ns, "uid": uid, "gid": gid, "xattrs": xattrs}
        wanted = entry._replace(**{k: value for k, value in given.items() if value is not None})
        if entry.kind == "file":
            with self.tree.parent(parts) as above:
                record = self._edit_record(above, parts, entry)
        else:
            record = Record(op="was", path=parts, before=entry)
        with self._change(record):
            apply_entry(self.tree, parts, wanted)

    def found(
        self,
        parts: Parts,
        before: Entry | None,
        source: Source | None = None,
        times: tuple[tuple[Parts, int], ...] = (),
        twin: Parts | None = None,
    ) -> None:
        """Note that somebody else changed a path: undoing brings ``before`` back.

        Directories come before what is in them. ``source`` has the content of a file, ``times``
        are directories' times, set last. The ``twin``, another name of the same file, was found
        later: so it is back before.
        """
        self._forget_below(parts)
        self._append(
            Record(op="was", path=parts, before=before, source=source, times=times, twin=twin)
        )

    def forget_from(self, count: int) -> None:
        """Take the records from one on out of the journal: nothing is to be undone for them."""
        if len(self.records) > count:
            self.journal.cut(self.records[count].offset)
            del self.records[count:]

    def expect_external(self, index: tuple[int, int]) -> None:
        """Note that others change files from here on: whatever happens is the transaction's.

        ``index`` tells which list there is of what was there before.
        """
        self._append(Record(op="external", data={"index": index}))
        self._has_programs = True

    # Savepoints and the end

    def mark(self) -> int:
        """Return a savepoint."""
        self._next_mark += 1
        self._marks[self._next_mark] = len(self.records)
        # From here on what is there is to be kept anew.
        self._forget()
        return self._next_mark

    def since(self, mark: int | None) -> list[Record]:
        """Return what was changed since a savepoint; all of it without one."""
        return self.records[0 if mark is None else self._marks[mark] :]

    def undo_to(self, mark: int) -> tuple[str, ...]:
        """Undo what was done since a savepoint; later savepoints are gone.

        Returns a sentence for each thing that could not be put back.
        """
        if mark not in self._marks:
            raise SnapshotExpired("an older snapshot was restored since this one was taken")
        for later in [known for known in self._marks if known > mark]:
            del self._marks[later]
        return self._undo_from(self._marks[mark])

    def roll_back(self) -> tuple[str, ...]:
        """Undo everything. Returns a sentence for each thing that could not be put back."""
        self._marks.clear()
        sentences = self._undo_from(0)
        if self.records:
            self.history.unfinished = self._finish_undoing
        else:
            self._sweep()
            self.rooms.leave()
        return sentences

    def _finish_undoing(self) -> None:
        """Undo what could not be undone before; raises when it still cannot."""
        if self.roll_back():
            raise OSError(errno.EIO, "what an earlier call changed could not be undone")

    def keep_anew(self) -> None:
        """Have every later record say what was there, as if nothing had been kept before."""
        self._kept.clear()

    def undo_since(self, count: int) -> None:
        """Undo all but the first ``count`` changes: those of an operation that failed."""
        self._undo_from(count, tolerant=True)
        self._sweep()

    def commit(self, call: ToolCall | None = None, undoes: Sequence[str] = ()) -> int | None:
        """Keep everything; returns the number in the history, or None if nothing was changed."""
        self._marks.clear()
        if not self.records:
            self.rooms.leave()
            return None
        if self.store.safe:
            self._write_through(self.records)
        if self._bring_over() and self.store.safe:
            sync_all(self.store.tx_fd)
        serial = self.history.add(self.records, call, self._left_now(), self.tree, undoes)
        self.records = []
        self._sweep()
        self.rooms.leave()
        self._forget()
        return serial

    def _bring_over(self) -> bool:
        """Copy what was replaced on other filesystems to where the history can have it.

        False if nothing was.
        """
        copied, own = False, self.rooms.own
        for name, room in self._kept_elsewhere(self.records):
            if own.status(safe_name(name)) is not None:
                own.remove(name)
                os.rename(safe_name(name), name, src_dir_fd=own.fd, dst_dir_fd=own.fd)
            elif room.status(name) is not None:
                # What took its place may have come from there, under the same name.
                own.remove(name)
                copy_exactly(room.tree, room.at(name), own.tree, (name,))
                copied = True
                self._undo_edits(room, name)
        return copied

    def _undo_edits(self, room: Scratch, name: str) -> None:
        """Give files in a copied directory what they held when it was taken away.

        They may have been changed since, by another of their names.
        """
        kept = next(n for n, record in enumerate(self.records) if record.kept == name)
        later = [r for r in self.records[kept:] if r.in_place and r.before and r.source]
        edited = {r.before.ino: r for r in reversed(later) if r.before is not None}
        if not edited:
            return
        for parts, status in room.tree.walk(room.at(name)):
            record = edited.get(status.st_ino) if stat.S_ISREG(status.st_mode) else None
            if record is not None and record.before is not None and record.source is not None:
                place = (name, *parts[len(room.base) + 1 :])
                fd = open_to_change(self.store.tree, place, record.before.mode)
                try:
                    os.ftruncate(fd, 0)
                    record.source.fill(self.store.path, record.before.size, fd)
                finally:
                    os.close(fd)
                apply_entry(self.store.tree, place, record.before)

    def keep_safe(self) -> None:
        """Copy what is kept elsewhere to the store: programs reach what is in the workspace."""
        self.rooms.make_again()
        own = self.rooms.own
        for name, room in self._kept_elsewhere(self.records[self._safe_until :]):
            if room.status(name) is not None:
                own.remove(safe_name(name))
                copy_exactly(room.tree, room.at(name), own.tree, (safe_name(name),))
        self._safe_until = len(self.records)

    def _kept_elsewhere(self, records: Sequence[Record]) -> Iterator[tuple[str, Scratch]]:
        """Yield what records keep outside of the store: its name, and where that is."""
        kept = {r.kept: r.room for r in records if r.op == "was" and r.room and r.source is None}
        for name, room in kept.items():
            if name is not None:
                yield name, self.rooms.of(room)

    def _left_now(self) -> dict[Parts, Entry | None]:
        """Return what is now at each path that was changed, by whomever."""
        found: dict[Parts, os.stat_result | None] = {}
        for parts in {parts for record in self.records for parts in record.paths}:
            with contextlib.suppress(OSError):
                found[parts] = self.tree.status(parts)
        # What came as a whole is known by all that is in it.
        for record in self.records:
            if record.op == "was" and record.is_whole and _is_directory(found.get(record.path)):
                found.update(self.tree.walk(record.path))
        left: dict[Parts, Entry | None] = {}
        budget = READ_FOR_MARKS
        for parts, status in found.items():
            entry = left[parts] = None if status is None else Entry.of(status)
            if entry is None or entry.kind not in ("file", "link"):
                continue
            known = None if self._has_programs else self._written.get(entry.ino)
            if known is not None and matches(known, entry):
                left[parts] = entry._replace(digest=known.digest, xattrs=known.xattrs)
                continue
            cost = entry.size + 4096
            with contextlib.suppress(OSError):
                left[parts] = capture(self.tree, parts, read=budget > cost)
            budget -= cost if budget > cost else 0
        return left

    # Making one change

    def _made_parent(self, parts: Parts) -> Held:
        try:
            return self.tree.parent(parts)
        except FileNotFoundError:
            self.make_directory(parts[:-1])
            return self.tree.parent(parts)

    def _append(self, record: Record) -> None:
        if not self.records:
            self.history.finish_earlier()
        if self.store.safe and record.room is not None:
            with self.tree.directory(record.room) as fd:
                os.fsync(fd)
        self.journal.append(record)
        self.records.append(record)

    @contextlib.contextmanager
    def _change(self, record: Record) -> Generator[None]:
        """Journal the record, and take it back when the change in the block fails."""
        self._append(record)
        try:
            yield
        except BaseException:
            self._undo_from(len(self.records) - 1, tolerant=True)
            raise

    def _times(self, above: int, parent: Parts) -> tuple[tuple[Parts, int], ...]:
        """Return a directory's time if this is the first change in it since the last mark."""
        if parent in self._touched:
            return ()
        self._touched.add(parent)
        return ((parent, os.fstat(above).st_mtime_ns),)

    def _room(self, above: int, parent: Parts) -> Scratch:
        """Return the directory on a directory's filesystem from which a rename is enough."""
        return self.rooms.on(self._mount(above, parent), parent)

    def _mount(self, fd: int, parts: Parts) -> Mount:
        """Return where a directory is mounted."""
        mount = self._mounts.get(parts)
        if mount is None:
            mount = self._mounts[parts] = mount_of(fd)
        return mount

    def _check_no_mount(self, parts: Parts) -> None:
        """Raise if something is mounted in a directory: it would go along with it."""
        mounted = mounted_below(f"{self.tree.path}/{join_path(parts)}")
        if mounted is not None:
            raise FilesystemError(
                f"{shown(join_path(parts))} cannot be moved or deleted: another filesystem is"
                f" mounted in it at {shown(mounted)}. Name what is in it"
            )

    def _keep(self, room: Scratch, above: int, record: Record) -> None:
        """Have a record keep what is about to be replaced, under a second name.

        Where the system does not give one, the thing itself is to be taken away.
        """
        record.kept = self.store.fresh("k")
        record.away = not linked(above, record.path[-1], room.fd, record.kept)

    def _stage(
        self, room: Scratch, above: int, parts: Parts, status: os.stat_result | None, data: bytes
    ) -> tuple[str, Xattrs]:
        """Write a new file, with all but the content of the one it replaces; one that replaces
        nothing takes after its directory, as if it had been made there.

        Returns its name in the scratch directory, and its attributes.
        """
        staged = self.store.fresh()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        fd = os.open(staged, flags, 0o666, dir_fd=room.fd)
        try:
            write_all(fd, data)
            if status is not None and stat.S_ISREG(status.st_mode):
                return staged, self._take_after(fd, above, parts[-1], status)
            inherit(fd, above)
            return staged, xattrs_of(fd)
        finally:
            os.close(fd)

    def _take_after(self, fd: int, above: int, name: str, status: os.stat_result) -> Xattrs:
        """Give a new file the owner, mode and attributes of the one it replaces.

        Returns the attributes.
        """
        made = os.fstat(fd)
        if (made.st_uid, made.st_gid) != (status.st_uid, status.st_gid):
            with contextlib.suppress(PermissionError):
                os.fchown(fd, status.st_uid, status.st_gid)
        mode = without_privileges(status.st_mode)
        if made.st_mode != mode:
            os.fchmod(fd, stat.S_IMODE(mode))
        present = xattrs_of(fd)
        with contextlib.suppress(PermissionError):
            replaced = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
            try:
                xattrs = tuple(one for one in xattrs_of(replaced) if one[0] != PRIVILEGES)
            finally:
                os.close(replaced)
            if xattrs != present:
                set_xattrs(fd, xattrs)
                present = xattrs_of(fd)
        return present

    def _bring_in(self, room: Scratch, parts: Parts, staged: str) -> None:
        """Copy something from the store to another filesystem; names of one file stay together."""
        status = os.stat(staged, dir_fd=self.store.tx_fd, follow_symlinks=False)
        known = self._arrived.get(status.st_ino) if status.st_nlink > 1 else None
        there = None if known is None else self.tree.status(known)
        if known is not None and there is not None and matches(Entry.of(status), Entry.of(there)):
            with self.tree.parent(known) as other:
                link(other, known[-1], room.fd, staged)
            return
        copy_exactly(self.store.tree, (staged,), room.tree, room.at(staged))
        if not _is_directory(status):
            self._arrived[status.st_ino] = parts

    def _place(self, above: int, parts: Parts, room: Scratch, staged: str) -> None:
        """Put something staged at a path, whatever is there."""
        status = status_at(above, parts[-1])
        if status is not None and _is_directory(status):
            self._take_away(above, parts, status)
            status = None
        self._put(above, parts, room, staged, status)

    def _put(
        self,
        above: int,
        parts: Parts,
        room: Scratch,
        staged: str,
        status: os.stat_result | None,
        digest: str | None = None,
    ) -> None:
        """Put something staged at a path, and keep what is there."""
        found = os.stat(staged, dir_fd=room.fd, follow_symlinks=False)
        if self.store.safe and stat.S_ISREG(found.st_mode):
            # Before it is in place: recovery knows what we have put there by what it holds.
            _sync_in(room.fd, staged)
        after, first = Entry.of(found)._replace(digest=digest), self._kept.get(parts)
        if first is not None:
            # What was there is kept already: this only says what else is ours.
            record = Record(
                op="was",
                path=parts,
                before=first.before,
                after=after,
                kept=first.kept,
                room=first.room,
            )
            self._append(record)
            try:
                room.put(staged, above, parts[-1])
            except BaseException:
                self._take_back(record)  # the one rename was not made: there is nothing to undo
                raise
            return
        before = None if status is None else Entry.of(status)
        times = self._times(above, parts[:-1])
        record = self._kept[parts] = Record(
            op="was", path=parts, before=before, after=after, room=room.mark, times=times
        )
        try:
            if status is None or not self._exchanged(above, room, staged, record):
                if status is not None:
                    self._keep(room, above, record)
                with self._change(record):
                    self._take_if_not_kept(above, record)
                    room.put(staged, above, parts[-1])
        except BaseException:
            self._kept.pop(parts, None)
            raise

    def _exchanged(self, above: int, room: Scratch, staged: str, record: Record) -> bool:
        """Let the new and the old change places; False where that cannot be.

        Never is there nothing at the path; and a filesystem that writes a file out to the disk when
        it replaces another, as many do, does not do so here.
        """
        if not self._exchanges(room):
            return False
        record.kept = staged
        self._append(record)
        try:
            if exchange(room.fd, staged, above, record.path[-1]):
                return True
        except BaseException:
            self._take_back(record)
            raise
        self._take_back(record)
        record.kept = None
        return False

    def _exchanges(self, room: Scratch) -> bool:
        """Tell whether two names can change places here. That is tried once, before any change:
        what a killed process leaves must not depend on it.
        """
        known = self.tree.exchanges.get(room.mount)
        if known is None:
            names = self.store.fresh(), self.store.fresh()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            for name in names:
                os.close(os.open(name, flags, 0o600, dir_fd=room.fd))
            known = exchange(room.fd, names[0], room.fd, names[1])
            for name in names:
                os.unlink(name, dir_fd=room.fd)
            self.tree.exchanges[room.mount] = known
        return known

    def _take_back(self, record: Record) -> None:
        """Forget the newest record: its change was not made."""
        self.journal.cut(record.offset)
        self.records.pop()

    def _take_if_not_kept(self, above: int, record: Record) -> None:
        """Take a thing away that could not be given a second name."""
        if record.kept is not None and record.away:
            room = self.rooms.of(record.room)
            os.rename(record.path[-1], record.kept, src_dir_fd=above, dst_dir_fd=room.fd)

    def _place_copy(self, origin: Parts, there: int, target: Parts) -> None:
        """Put a copy of something at a path."""
        room, staged = self._room(there, target[:-1]), self.store.fresh()
        copy_exactly(self.tree, origin, room.tree, room.at(staged))
        self._place(there, target, room, staged)

    def _take_away(self, above: int, parts: Parts, status: os.stat_result) -> None:
        if not stat.S_ISDIR(status.st_mode):
            self._take_whole(above, parts, status)
            return
        self._check_no_mount(parts)
        try:
            self._take_whole(above, parts, status)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._take_apart(parts)

    def _take_whole(
        self, above: int, parts: Parts, status: os.stat_result, *, empty: bool = False
    ) -> None:
        """Take something away; of an empty directory, another one that is just like it is kept."""
        room, kept = self._room(above, parts[:-1]), self.store.fresh("k")
        record = Record(
            op="was",
            path=parts,
            before=Entry.of(status),
            kept=kept,
            room=room.mark,
            times=self._times(above, parts[:-1]),
        )
        if empty:
            copy_exactly(self.tree, parts, room.tree, room.at(kept))
        with self._change(record):
            if empty:
                os.rmdir(parts[-1], dir_fd=above)
            else:
                os.rename(parts[-1], kept, src_dir_fd=above, dst_dir_fd=room.fd)
        self._forget_below(parts)

    def _take_apart(self, top: Parts) -> None:
        """Take a directory away piece by piece that cannot be renamed.

        Such are those of an overlay's lower layer, as in a container's image.
        """
        pending = [(top, False)]
        while pending:
            parts, is_empty = pending.pop()
            with self.tree.parent(parts) as above:
                status = os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
                try:
                    if is_empty or parts != top:
                        self._take_whole(above, parts, status, empty=is_empty)
                        continue
                except OSError as error:
                    if error.errno != errno.EXDEV or is_empty or not stat.S_ISDIR(status.st_mode):
                        raise
            pending.append((parts, True))
            pending += [((*parts, name), False) for name in self.tree.names(parts)]

    def _edit(
        self, above: int, parts: Parts, status: os.stat_result, data: bytes, digest: str
    ) -> None:
        """Change a file in place: it has other names, and they are to see it."""
        entry = capture(self.tree, parts) or Entry.of(status)
        with self._change(self._edit_record(above, parts, entry, digest)):
            fd = _open_to_edit(above, parts[-1], status)
            try:
                _overwrite(fd, data)
                mode = stat.S_IMODE(status.st_mode)
                if mode != without_privileges(mode):
                    with contextlib.suppress(PermissionError):  # then the system has done so
                        os.fchmod(fd, without_privileges(mode))
                if self.store.safe:
                    os.fsync(fd)
            finally:
                os.close(fd)

    def _edit_record(
        self, above: int, parts: Parts, entry: Entry, digest: str | None = None
    ) -> Record:
        """Keep a file that is about to be changed in place: a name for it, and its content."""
        room = self._room(above, parts[:-1])
        kept, copy = self.store.fresh("k"), self.store.fresh("c")
        self._kept.pop(parts, None)
        self._written.pop(entry.ino, None)
        copy_file(self.tree, parts, self.store.tx_fd, copy, safe=self.store.safe)
        # Without a name, only the content comes back.
        is_kept = linked(above, parts[-1], room.fd, kept)
        return Record(
            op="was",
            path=parts,
            before=entry,
            after=Entry("file", size=-1, ino=entry.ino, digest=digest),
            kept=kept if is_kept else None,
            source=Source(copy),
            room=room.mark,
            times=self._times(above, parts[:-1]),
            others=() if entry.links == 1 else self._other_names(parts, entry),
        )

    def _other_names(self, parts: Parts, entry: Entry) -> tuple[Parts, ...]:
        """Return the other names of a file in the workspace."""
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
        """Keep a name for what is about to be moved, and a small file's content."""
        moved = Entry.of(status)
        record = Record(
            op="moved", path=target, origin=origin, before=moved, after=moved, times=times
        )
        if moved.is_directory:
            return record
        room, kept = self._room(here, origin[:-1]), self.store.fresh("k")
        if linked(here, origin[-1], room.fd, kept):  # else it is found again at its new path
            record.kept, record.room = kept, room.mark
        if moved.kind == "file" and moved.size <= COPIED_WHEN_MOVED:
            with contextlib.suppress(PermissionError):
                record.before, copy = capture(self.tree, origin) or moved, self.store.fresh("c")
                copy_file(self.tree, origin, self.store.tx_fd, copy, safe=self.store.safe)
                record.source = Source(copy)
        return record

    def _forget_below(self, parts: Parts) -> None:
        """Keep anew what is below a directory that is another one now."""
        depth = len(parts)
        self._kept = {k: first for k, first in self._kept.items() if k[:depth] != parts}
        self._touched = {k for k in self._touched if k[:depth] != parts}
        self._mounts = {k: mount for k, mount in self._mounts.items() if k[:depth] != parts}

    def _forget(self) -> None:
        self._kept.clear()
        self._touched.clear()
        self._mounts.clear()

    def _sweep(self) -> None:
        """Remove what the scratch directories hold that no record needs."""
        if self.history.unfinished is not None:
            return  # an earlier transaction may still need it
        used: set[str] = set()
        for record in self.records:
            used.update(record.names)
            used.update(map(safe_name, record.names))
        found: list[tuple[Scratch, str]] = []
        with contextlib.suppress(OSError):  # what cannot be listed is swept another time
            found += [(self.rooms.own, name) for name in os.listdir(self.store.tx)]
            for room in self.rooms.made:
                found += [(room, name) for name in room.tree.names(room.base)]
        for room, name in found:
            for _ in range(2 if name[-1].isdecimal() and name not in used else 0):
                # A name of the user's file must not stay for one failure.
                with contextlib.suppress(OSError):
                    room.remove(name)
                    break

    def _write_through(self, records: Sequence[Record]) -> None:
        """Have the disk hold every change before the record that says so: contents, then names."""
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
                raise  # else it went with the directory it was in

    def _sync_all(self, directories: AbstractSet[Parts]) -> None:
        """Have the disk hold all of the filesystems that some directories are on."""
        done: set[Mount] = set()
        for parts in directories | {()}:
            try:
                held = self.tree.directory(parts)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EACCES, *BARRED):
                    raise
                continue  # it is gone, or it is on the same as what is above it
            with held as fd:
                mount = mount_of(fd)
                if mount not in done:
                    done.add(mount)
                    sync_all(fd)

    # Undoing

    def _undo_from(
        self, index: int, restore: Restore | None = None, *, tolerant: bool = False
    ) -> tuple[str, ...]:
        """Undo all but the first changes; the journal says at every moment what is left to undo."""
        if restore is None:
            restore = Restore(
                self.tree, self.store, self.rooms, self._has_programs, tolerant=tolerant
            )
        self._forget()
        self._safe_until = min(self._safe_until, index)
        self.is_stuck = True
        try:
            self.rooms.make_again()
            while len(self.records) > index:
                record = self.records[-1]
                restore.restore(record, over=self._is_over(record))
                if self.store.safe:
                    self._write_through([record])
                self._take_back(record)
            self.is_stuck = False
        except OSError as error:
            if restore.recovering:
                raise
            # The disk's fault, not the path's: the journal still says what is to be undone.
            restore.sentences.append(
                f"{shown(join_path(self.records[-1].path))} and what was changed before it could"
                f" not be put back ({error.strerror}). That is tried again before the next change,"
                " and when the directory is opened again"
            )
        for sentence in restore.sentences:
            logger.error("%s", sentence)
        return tuple(restore.sentences)

    def _is_over(self, record: Record) -> bool:
        """Tell whether what was moved took the place of something, which comes back next."""
        earlier = self.records[-2] if len(self.records) > 1 else record
        if record.op != "moved" or (earlier.op, earlier.path) != ("was", record.path):
            return False
        return (
            earlier.after is not None
            and record.after is not None
            and (earlier.after.ino == record.after.ino)
        )

    def undo_unfinished(self, records: Sequence[Record]) -> tuple[str, ...]:
        """Undo what a process that is gone has left unfinished."""
        begun = next((record.data for record in records if record.op == "external"), None)
        self._has_programs = begun is not None
        restore = Restore(self.tree, self.store, self.rooms, self._has_programs, recovering=True)
        for record in records:
            restore.expect(record)
        self.records = list(records)
        if begun is not None:
            from weakincentives.filesystem.scan import find_unfinished

            # After a record that was not written to its end, nothing could be read.
            self.journal.cut(records[-1].end)
            generation, size = begun["index"]
            sentence = find_unfinished(self.tree, self.store, self, (generation, size))
            if sentence is not None:
                restore.sentences.append(sentence)
        return self._undo_from(0, restore)


# After a kill


def recover(tree: Tree, history: History) -> tuple[str, ...]:
    """Undo, or finish, what a process that is gone has left; says what could not be put back."""
    store = history.store
    changes = Changes(tree, history)
    rooms = changes.rooms
    if not rooms.recall() and not store.tree.names(()):
        return ()
    records, damage = read_journal(history.journal.path, history.journal.seals)
    if damage == "broken":
        return _give_up(store, rooms)
    committed = bool(records) and records[-1].op == "commit"
    sentences: tuple[str, ...] = ()
    if not committed:
        # First of all: what is undone may take away what shows that nothing is missing.
        sentences = _spare(history, rooms, records, damage)
    if damage != "whole":
        history.journal.cut(records[-1].end if records else 0)
    if committed:
        history.finish(records)
    elif records:
        sentences += changes.undo_unfinished(records)
    for name in store.tree.names(()):
        if name != "journal":
            store.tree.remove_all((name,))
    if any(record.op == "external" for record in records):
        from weakincentives.filesystem.scan import drop_names

        drop_names(store)
    history.journal.close()
    rooms.leave()
    return sentences


def _give_up(store: Store, rooms: Scratches) -> tuple[str, ...]:
    """Set everything aside that a journal which cannot be read was about."""
    place = store.left(("journal",))
    place.mkdir()
    for room in (rooms.own, *rooms.made):
        for name in room.tree.names(room.base):
            move_out(room.tree, room.at(name), room.fd, place / name)
    rooms.leave()
    sentence = (
        "The journal of a call that was not finished cannot be read. The directory is left as"
        f" it is; what that call has replaced is in {place}"
    )
    logger.error("%s", sentence)
    return (sentence,)


def _spare(
    history: History, rooms: Scratches, records: Sequence[Record], damage: str
) -> tuple[str, ...]:
    """Set aside what a record that is lost may have been about, if it may be the only one.

    A change is made after its record was written: what is kept has its place in the workspace, too.
    A journal that looks whole, or just not written to its end, may also have lost its last records.
    """
    store = history.store
    found = {
        name: room
        for room in (rooms.own, *rooms.made)
        for name in room.tree.names(room.base)
        if name[0] in "kcn" and name[1:].isdecimal()
    }
    known = {name for record in records for name in record.names}
    known |= history.leftovers()
    statuses = [room.status(name) for name, room in found.items()]
    ours = Counter((each.st_dev, each.st_ino) for each in statuses if each is not None)
    sentences: list[str] = []
    for name, room in sorted(found.items()):
        if name in known or _is_spare(found, ours, name):
            continue
        if name[0] == "n" and damage == "whole" and _is_new(store, room, name):
            continue  # it was to be put somewhere, and was not yet
        place = store.left((name,))
        move_out(room.tree, room.at(name), room.fd, place)
        sentence = (
            "The last change of a call that was not finished cannot be told. What it may have"
            f" replaced is in {place}"
        )
        if damage == "torn" or name[0] == "k":
            sentences.append(sentence)
        else:  # more likely it was to be put somewhere, or is a copy of what is there
            logger.warning("%s", sentence)
    return tuple(sentences)


def _is_spare(found: Mapping[str, Scratch], ours: Counter[tuple[int, int]], name: str) -> bool:
    """Tell whether what was kept is certainly elsewhere as well; ``ours`` counts its names here."""
    room = found.get(name)
    if room is None:
        return False
    if not name.startswith("c"):
        status = room.status(name)
        if status is None:
            return False
        if _is_directory(status):
            return not room.tree.names(room.at(name))  # there is nothing in it to be lost
        return status.st_nlink > ours[status.st_dev, status.st_ino]
    original = f"k{int(name[1:]) - 1}"  # a copy is made together with a name of what it is of
    if not _is_spare(found, ours, original):
        return False
    other = found[original]
    return other.tree.read(other.at(original))[0] == room.tree.read(room.at(name))[0]


def _is_new(store: Store, room: Scratch, name: str) -> bool:
    """Tell whether something was written after the last record, and so is nothing's original."""
    status, journal = room.status(name), status_at(store.tx_fd, "journal")
    last = os.fstat(store.tx_fd) if journal is None else journal
    return status is not None and status.st_mtime_ns >= last.st_mtime_ns


def _sync_in(above: int, name: str) -> None:
    """Have the disk hold a file's content."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
    except PermissionError:  # it cannot even be opened: everything, then
        sync_all(above)
        return
    try:
        sync(fd)
    finally:
        os.close(fd)


def _is_directory(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISDIR(status.st_mode)


def _open_to_edit(above: int, name: str, status: os.stat_result) -> int:
    """Open a file to change it in place, also one of our own that may not be written now."""
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(name, flags, dir_fd=above)
    except PermissionError:
        mode = stat.S_IMODE(status.st_mode)
        if mode & stat.S_IWUSR:
            raise
    reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
    try:
        os.fchmod(reading, mode | stat.S_IWUSR)
        try:
            return os.open(name, flags, dir_fd=above)
        finally:
            os.fchmod(reading, mode)
    finally:
        os.close(reading)


def _overwrite(fd: int, data: bytes) -> None:
    """Make a file hold these bytes; cut short first, so that recovery can tell what it finds."""
    if os.fstat(fd).st_size > len(data):
        os.ftruncate(fd, len(data))
    write_all(fd, data)
