"""An open transaction on disk: every change is journalled before it is made, and can be undone.

The journal is a stack. A change appends one record that says how to undo it; undoing takes the
newest record, puts back what it says, and cuts it off. So a process that is killed at any moment,
also in the middle of undoing, leaves a journal that says exactly what is still to be undone, and
undoing never needs space.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from weakincentives.call import ToolCall
from weakincentives.errors import FilesystemError, SnapshotExpired
from weakincentives.filesystem.history import History, Mark, mark_of
from weakincentives.filesystem.pack import (
    fill,
    has_content,
    path_of,
    read_exactly,
    second_name,
)
from weakincentives.filesystem.protocol import BARRED, Parts, join_path, shown
from weakincentives.filesystem.records import Record, Source, read_journal
from weakincentives.filesystem.rooms import Room, Rooms, set_time
from weakincentives.filesystem.store import (
    DAMAGED,
    Entry,
    Store,
    apply_entry,
    copy_content,
    copy_exactly,
    digest_of,
    entry_at,
    kind_of,
)
from weakincentives.filesystem.tree import (
    CHUNK,
    PRIVILEGES,
    Held,
    Ident,
    Mount,
    Tree,
    exchange,
    ident_of,
    inherit,
    mount_of,
    mounted_below,
    set_xattrs,
    status_is_directory,
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

_NO_LINKS = (errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
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
class _Undoing:
    """How to undo: for the call itself, or when its process has long been gone."""

    recovering: bool = False
    """Someone else may have changed what we find: look before touching it."""
    tolerant: bool = False
    """The newest change may not have been made."""
    external: bool = False
    """All that happened is the transaction's, and what is replaced is set aside."""
    ours: dict[Parts, set[Ident | None]] = field(default_factory=dict[Parts, "set[Ident | None]"])
    """Of each path, what was there and what we put there."""
    digests: dict[Ident, str] = field(default_factory=dict[Ident, str])
    """What the files hold that we have written."""
    sentences: list[str] = field(default_factory=list[str])


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
        self.rooms = Rooms(tree, self.store)
        self.records: list[Record] = []
        self._marks: dict[int, int] = {}
        self._next_mark = 0
        self._kept: dict[Parts, Record] = {}
        """What was first put at a path since the last mark: what was there before is kept."""
        self._touched: set[Parts] = set()
        """The directories that were changed since the last mark."""
        self._mounts: dict[Parts, Mount] = {}
        """Where directories are mounted: one system call for each until the next mark."""
        self._litter: set[tuple[Room, str]] = set()
        self._contents: dict[Ident, tuple[str, tuple[tuple[str, bytes], ...]]] = {}
        """Of files that were written here: the digest, and the attributes."""
        self._has_programs = False
        """Whether others change files in this transaction, or did."""
        self._safe_until = 0
        """How many of the records keep nothing that only a room has."""
        self.is_stuck = False
        """Whether the last undo could not be finished: the disk did not let it."""
        self._arrived: dict[Ident, Parts] = {}
        """Where files went that have more names in the store, and come from there one by one."""

    # Changing

    def write(self, parts: Parts, data: bytes) -> None:
        """Make the file hold these bytes; mode, owner, attributes and other names of it stay."""
        with self._made_parent(parts) as above:
            status = _status(above, parts[-1])
            digest = hashlib.sha256(data).hexdigest()
            if status is not None and status.st_nlink > 1 and stat.S_ISREG(status.st_mode):
                self._edit(above, parts, status, data, digest)
                return
            room = self._room(above, parts[:-1])
            staged, xattrs = self._stage(room, above, parts, status, data)
            self._put(above, parts, room, staged, status, digest)
            new = self.records[-1].new
            if new is not None:
                self._contents[new] = digest, xattrs

    def put_file(self, parts: Parts, source: Path) -> None:
        """Make the file at ``source`` what is at the path, with all that it is; it is consumed."""
        with self._made_parent(parts) as above:
            staged = self._fresh(self.rooms.own)
            os.rename(source, staged, dst_dir_fd=self.store.tx_fd)
            room = self._room(above, parts[:-1])
            if room is not self.rooms.own:
                self._bring_in(room, parts, staged)
            self._place(above, parts, room, staged)

    def link(self, opened: Path, parts: Parts) -> None:
        """Make the path one more name of a file; ``opened`` is the path of a descriptor of it."""
        with self._made_parent(parts) as above:
            room = self._room(above, parts[:-1])
            staged = self._fresh(room)
            with room.open() as fd:
                os.link(opened, staged, dst_dir_fd=fd)
            self._place(above, parts, room, staged)

    def add_name(self, origin: Parts, parts: Parts) -> None:
        """Make the path one more name of the file at another; what is there is taken away."""
        with self._made_parent(parts) as above, self.tree.parent(origin) as here:
            room = self._room(above, parts[:-1])
            staged = self._fresh(room)
            room.link(here, origin[-1], staged)
            self._place(above, parts, room, staged)

    def put(self, parts: Parts, source: Path) -> None:
        """Like ``put_file``, for anything: a link or a whole directory, too."""
        self.put_file(parts, source)

    def put_symlink(self, parts: Parts, target: str, *, mtime_ns: int | None = None) -> None:
        """Make a symbolic link of what is at the path."""
        with self._made_parent(parts) as above:
            room = self._room(above, parts[:-1])
            staged = self._fresh(room)
            with room.open() as fd:
                os.symlink(target, staged, dir_fd=fd)
                if mtime_ns is not None:
                    times = (mtime_ns, mtime_ns)
                    os.utime(staged, ns=times, dir_fd=fd, follow_symlinks=False)
            self._place(above, parts, room, staged)

    def make_directory(self, parts: Parts, mode: int = 0o777) -> None:
        """Make a directory, and those it needs; one that is there is fine."""
        there = len(parts)
        while there and not _is_directory(self.tree.status(parts[:there])):
            there -= 1
        for depth in range(there + 1, len(parts) + 1):
            here = parts[:depth]
            with self.tree.parent(here) as above:
                record = Record(op="made", path=here, times=self._times(above, here[:-1]))
                with self._change(record):
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
            replaced = _status(there, target[-1])
            if replaced is not None and os.path.samestat(status, replaced):
                # Two names of one file: the system would leave both.
                self._take_away(here, origin, status)
                return
            directories = stat.S_ISDIR(status.st_mode) or _is_directory(replaced)
            if replaced is not None and directories:
                self._take_away(there, target, replaced)
                replaced = None
            if self._mount(here, origin[:-1]) != self._mount(there, target[:-1]):
                self._place_copy(self.tree, origin, there, target)
                self._take_away(here, origin, status)
                return
            if stat.S_ISDIR(status.st_mode):
                self._check_no_mount(origin)
            times = self._times(here, origin[:-1]) + self._times(there, target[:-1])
            if replaced is not None:
                # Always kept anew: undoing the move clears the path.
                self._kept.pop(target, None)
                room = self._room(there, target[:-1])
                record = Record(
                    op="put",
                    path=target,
                    room=room.mark,
                    old=lasting(replaced),
                    new=lasting(status),
                    times=times,
                )
                self._keep(room, there, record)
                with self._change(record):
                    self._take_if_not_kept(there, record)
                times = ()
            record = self._moved_record(here, origin, target, status, times)
            if replaced is not None:
                record.op = "moved over"
            try:
                with self._change(record):
                    os.rename(origin[-1], target[-1], src_dir_fd=here, dst_dir_fd=there)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                # Some cannot be renamed within their filesystem: directories of an overlay's lower
                # layer, or what belongs to another project or subvolume.
                self._place_copy(self.tree, origin, there, target)
                self._take_away(here, origin, status)
                return
            if stat.S_ISDIR(status.st_mode):
                self._forget_below(origin)
            else:
                self._kept.pop(origin, None)
                self._kept.pop(target, None)

    def copy(self, origin: Parts, target: Parts) -> None:
        """Put a copy of a file, link or directory at another path; what is there is taken away."""
        with self._made_parent(target) as there:
            self._place_copy(self.tree, origin, there, target)

    def put_tree(self, source: Tree, origin: Parts, target: Parts) -> None:
        """Put a copy of something elsewhere at a path; what is there is taken away."""
        with self._made_parent(target) as there:
            self._place_copy(source, origin, there, target)

    def set_attributes(
        self,
        parts: Parts,
        *,
        mode: int | None = None,
        mtime_ns: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        xattrs: tuple[tuple[str, bytes], ...] | None = None,
    ) -> None:
        """Change what is given of a file's, link's or directory's attributes, and nothing else."""
        entry = entry_at(self.tree, parts)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), join_path(parts))
        wanted = Entry(
            kind=entry.kind,
            mode=entry.mode if mode is None else mode,
            mtime_ns=entry.mtime_ns if mtime_ns is None else mtime_ns,
            uid=entry.uid if uid is None else uid,
            gid=entry.gid if gid is None else gid,
            xattrs=entry.xattrs if xattrs is None else xattrs,
        )
        if entry.kind == "file":
            with self.tree.parent(parts) as above:
                record = self._edit_record(above, parts, entry)
        else:
            record = Record(op="attributes", path=parts, before=entry, old=entry.ident)
        self._contents.clear()
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
            Record(op="found", path=parts, before=before, source=source, times=times, twin=twin)
        )

    def forget_from(self, count: int) -> None:
        """Take the records from one on out of the journal: nothing is to be undone for them."""
        if len(self.records) > count:
            self.journal.cut(self.records[count].offset)
            del self.records[count:]

    def expect_external(self, known: Ident) -> None:
        """Note that others change files from here on: whatever happens is the transaction's.

        ``known`` tells which list there is of what was there before.
        """
        self._append(Record(op="external", old=known))
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
        return self._undo_from(self._marks[mark], _Undoing())

    def roll_back(self) -> tuple[str, ...]:
        """Undo everything. Returns a sentence for each thing that could not be put back."""
        self._marks.clear()
        sentences = self._undo_from(0, _Undoing())
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
        self._undo_from(count, _Undoing(tolerant=True))
        self._sweep({name for r in self.records for name in (r.kept, r.copy) if name})

    def commit(self, call: ToolCall | None = None, undoes: Sequence[str] = ()) -> int | None:
        """Keep everything; returns the number in the history, or None if nothing was changed."""
        self._marks.clear()
        if not self.records:
            self.rooms.leave()
            return None
        if self.store.safe:
            self._write_through(self.records)
        if self.bring_over(self.records) and self.store.safe:
            sync_all(self.store.tx_fd)
        after, marks = self._left_now()
        serial = self.history.add(self.records, call, after, marks, self.tree, undoes)
        unfinished = self.history.unfinished is not None
        self._sweep(self.history.sources(self.records) if unfinished else frozenset())
        self.rooms.leave()
        self.records = []
        self._forget()
        return serial

    def bring_over(self, records: Sequence[Record]) -> bool:
        """Copy what was replaced on other filesystems to where the history can have it.

        False if nothing was.
        """
        copied = False
        for record in records:
            if record.room is not None and record.op in ("put", "gone"):
                name, room = record.kept or "", self.rooms.of(record.room)
                if self.rooms.own.status(_safe(name)) is not None:
                    self.rooms.own.remove(name)
                    os.rename(
                        _safe(name),
                        name,
                        src_dir_fd=self.store.tx_fd,
                        dst_dir_fd=self.store.tx_fd,
                    )
                    self._litter.add((self.rooms.own, name))
                elif room.status(name) is not None:
                    # What took its place may have come from there, under the same name.
                    self.rooms.own.remove(name)
                    self._litter.add((self.rooms.own, name))
                    copy_exactly(room.tree, room.at(name), self.store.tree, (name,))
                    copied = True
        return copied

    def keep_safe(self) -> None:
        """Copy what rooms keep to the store: programs reach what is in the workspace."""
        self.rooms.make_again()
        for record in self.records[self._safe_until :]:
            if record.room is not None and record.op in ("put", "gone"):
                name, room = record.kept or "", self.rooms.of(record.room)
                if room.status(name) is not None:
                    self._litter.add((self.rooms.own, _safe(name)))
                    self.rooms.own.remove(_safe(name))
                    copy_exactly(room.tree, room.at(name), self.store.tree, (_safe(name),))
        self._safe_until = len(self.records)

    def _left_now(self) -> tuple[dict[Parts, Ident | None], dict[Parts, Mark]]:
        """Return what is now at each path that was changed, by whomever; and what marks it."""
        paths = {record.path for record in self.records}
        paths |= {record.origin for record in self.records if record.origin is not None}
        found: dict[Parts, os.stat_result | None] = {}
        for parts in paths:
            with contextlib.suppress(OSError):
                found[parts] = self.tree.status(parts)
        # What came as a whole is known by all that is in it.
        for top in {record.path for record in self.records if record.op == "put"}:
            if _is_directory(found.get(top)):
                found.update(self.tree.walk(top))
        idents = {p: None if status is None else lasting(status) for p, status in found.items()}
        marks: dict[Parts, Mark] = {}
        left = READ_FOR_MARKS
        for parts, status in found.items():
            if status is None or _is_directory(status):
                continue
            known = None if self._has_programs else self._contents.get(lasting(status))
            if known is not None:
                marks[parts] = Mark.of(status, *known)
                continue
            left -= status.st_size + 4096
            with contextlib.suppress(OSError):
                mark = mark_of(self.tree, parts, status, read=left > 0)
                if mark is not None:
                    marks[parts] = mark
            if left <= 0:
                left += status.st_size + 4096
        return idents, marks

    def _ident(self, parts: Parts) -> Ident | None:
        status = self.tree.status(parts)
        return None if status is None else lasting(status)

    def undo_unfinished(self, records: Sequence[Record]) -> tuple[str, ...]:
        """Undo what a process that is gone has left unfinished."""
        undoing = _Undoing(recovering=True, external=any(r.op == "external" for r in records))
        for record in records:
            undoing.ours.setdefault(record.path, set()).update((record.old, record.new))
            if record.origin is not None:
                undoing.ours.setdefault(record.origin, set()).update((record.old, None))
                undoing.ours[record.path].add(None)
            if record.away:
                undoing.ours[record.path].add(None)
            if record.new is not None and record.digest is not None and record.op != "edit":
                undoing.digests[record.new] = record.digest
        self.records = list(records)
        self._has_programs = undoing.external
        if undoing.external:
            from weakincentives.filesystem.scan import find_unfinished

            # After a record that was not written to its end, nothing could be read.
            self.journal.cut(records[-1].end)
            begun = next(record.old for record in records if record.op == "external")
            sentence = find_unfinished(self.tree, self.store, self, begun)
            if sentence is not None:
                undoing.sentences.append(sentence)
        return self._undo_from(0, undoing)

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
            if record.op == "again":  # its one rename was not made: there is nothing to undo
                self._take_back(record)
            else:
                self._undo_from(len(self.records) - 1, _Undoing(tolerant=True))
            raise

    def _times(self, above: int, parent: Parts) -> tuple[tuple[Parts, int], ...]:
        """Return a directory's time if this is the first change in it since the last mark."""
        if parent in self._touched:
            return ()
        self._touched.add(parent)
        return ((parent, os.fstat(above).st_mtime_ns),)

    def _room(self, above: int, parent: Parts) -> Room:
        """Return the room on a directory's filesystem, from which a rename is enough."""
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

    def _fresh(self, room: Room, mark: str = "n") -> str:
        """Return a free name in a room, for something that is removed at the end."""
        name = self.store.fresh(mark)
        self._litter.add((room, name))
        return name

    def _keep(self, room: Room, above: int, record: Record) -> None:
        """Have a record keep what is about to be replaced, under a second name.

        Where the system does not give one, the thing itself is to be taken away.
        """
        record.kept = self._fresh(room, "k")
        try:
            room.link(above, record.path[-1], record.kept)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            record.away = True

    def _stage(
        self, room: Room, above: int, parts: Parts, status: os.stat_result | None, data: bytes
    ) -> tuple[str, tuple[tuple[str, bytes], ...]]:
        """Write a new file, with all but the content of the one it replaces; one that replaces
        nothing takes after its directory, as if it had been made there.

        Returns its name in the room, and its attributes.
        """
        staged = self._fresh(room)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with room.open() as directory:
            fd = os.open(staged, flags, 0o666, dir_fd=directory)
        try:
            write_all(fd, data)
            if status is not None and stat.S_ISREG(status.st_mode):
                return staged, self._take_after(fd, above, parts[-1], status)
            inherit(fd, above)
            return staged, xattrs_of(fd)
        finally:
            os.close(fd)

    def _take_after(
        self, fd: int, above: int, name: str, status: os.stat_result
    ) -> tuple[tuple[str, bytes], ...]:
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

    def _bring_in(self, room: Room, parts: Parts, staged: str) -> None:
        """Copy something from the store to another room; names of one file stay together."""
        status = os.stat(staged, dir_fd=self.store.tx_fd, follow_symlinks=False)
        ident = lasting(status)
        known = self._arrived.get(ident)
        self._litter.add((room, staged))
        if known is not None and status.st_nlink > 1 and matches(ident, self._ident(known)):
            with self.tree.parent(known) as other:
                room.link(other, known[-1], staged)
            return
        copy_exactly(self.store.tree, (staged,), room.tree, room.at(staged))
        if not _is_directory(status):
            self._arrived[ident] = parts

    def _place(self, above: int, parts: Parts, room: Room, staged: str) -> None:
        """Put something staged at a path, whatever is there."""
        status = _status(above, parts[-1])
        if status is not None and _is_directory(status):
            self._take_away(above, parts, status)
            status = None
        self._put(above, parts, room, staged, status)

    def _put(
        self,
        above: int,
        parts: Parts,
        room: Room,
        staged: str,
        status: os.stat_result | None,
        digest: str | None = None,
    ) -> None:
        """Put something staged at a path, and keep what is there."""
        with room.open() as fd:
            found = os.stat(staged, dir_fd=fd, follow_symlinks=False)
            if self.store.safe and stat.S_ISREG(found.st_mode):
                # Before it is in place: recovery knows what we have put there by what it holds.
                _sync_in(fd, staged)
        new = lasting(found)
        first = self._kept.get(parts)
        record = Record(op="put", path=parts, room=room.mark, new=new, digest=digest)
        if first is not None:
            record.op, record.kept, record.old = "again", first.kept, first.old
        else:
            record.times = self._times(above, parts[:-1])
            record.old = None if status is None else lasting(status)
        if first is None and status is not None and self._exchange(above, room, staged, record):
            self._kept[parts] = record
            return
        if first is None and status is not None:
            self._keep(room, above, record)
        with self._change(record):
            self._take_if_not_kept(above, record)
            room.put(staged, above, parts[-1])
            self._litter.discard((room, staged))
        if first is None:
            self._kept[parts] = record

    def _exchange(self, above: int, room: Room, staged: str, record: Record) -> bool:
        """Let the new and the old change places; False where that cannot be.

        Never is there nothing at the path; and a filesystem that writes a file out to the disk when
        it replaces another, as many do, does not do so here.
        """
        if not self._exchanges(room):
            return False
        record.kept = staged
        self._append(record)
        try:
            if room.exchange(staged, above, record.path[-1]):
                return True
        except BaseException:
            self._take_back(record)
            raise
        self._take_back(record)
        record.kept = None
        return False

    def _exchanges(self, room: Room) -> bool:
        """Tell whether two names can change places here. That is tried once, before any change:
        what a killed process leaves must not depend on it.
        """
        known = self.tree.exchanges.get(room.mount)
        if known is None:
            names = self._fresh(room), self._fresh(room)
            with room.open() as fd:
                for name in names:
                    os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=fd))
                known = exchange(fd, names[0], fd, names[1])
                for name in names:
                    os.unlink(name, dir_fd=fd)
            self.tree.exchanges[room.mount] = known
        return known

    def _take_back(self, record: Record) -> None:
        """Forget the newest record: its change was not made."""
        self.journal.cut(record.offset)
        self.records.pop()

    def _take_if_not_kept(self, above: int, record: Record) -> None:
        """Take a thing away that could not be given a second name."""
        if record.kept is not None and record.away:
            self.rooms.of(record.room).take(above, record.path[-1], record.kept)

    def _place_copy(self, source: Tree, origin: Parts, there: int, target: Parts) -> None:
        """Put a copy of something at a path."""
        room = self._room(there, target[:-1])
        staged = self._fresh(room)
        copy_exactly(source, origin, room.tree, room.at(staged))
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

    def _take_whole(self, above: int, parts: Parts, status: os.stat_result) -> None:
        room = self._room(above, parts[:-1])
        record = self._gone_record(room, above, parts, status)
        with self._change(record):
            room.take(above, parts[-1], record.kept or "")
        self._forget_below(parts)

    def _gone_record(self, room: Room, above: int, parts: Parts, status: os.stat_result) -> Record:
        return Record(
            op="gone",
            path=parts,
            kept=self._fresh(room, "k"),
            room=room.mark,
            old=lasting(status),
            times=self._times(above, parts[:-1]),
        )

    def _take_apart(self, top: Parts) -> None:
        """Take a directory away piece by piece that cannot be renamed.

        Such are those of an overlay's lower layer, as in a container's image.
        """
        pending = [(top, False)]
        while pending:
            parts, is_empty = pending.pop()
            with self.tree.parent(parts) as above:
                status = os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
                if is_empty:
                    self._take_empty(above, parts, status)
                    continue
                try:
                    if parts != top:
                        self._take_whole(above, parts, status)
                        continue
                except OSError as error:
                    if error.errno != errno.EXDEV or not stat.S_ISDIR(status.st_mode):
                        raise
            pending.append((parts, True))
            pending += [((*parts, name), False) for name in self.tree.names(parts)]

    def _take_empty(self, above: int, parts: Parts, status: os.stat_result) -> None:
        """Take an empty directory away: what is kept is another one that is just like it."""
        room = self._room(above, parts[:-1])
        record = self._gone_record(room, above, parts, status)
        copy_exactly(self.tree, parts, room.tree, room.at(record.kept or ""))
        with self._change(record):
            os.rmdir(parts[-1], dir_fd=above)
        self._forget_below(parts)

    def _edit(
        self, above: int, parts: Parts, status: os.stat_result, data: bytes, digest: str
    ) -> None:
        """Change a file in place: it has other names, and they are to see it."""
        record = self._edit_record(above, parts, entry_at(self.tree, parts) or Entry.of(status))
        record.digest = digest
        with self._change(record):
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

    def _edit_record(self, above: int, parts: Parts, entry: Entry) -> Record:
        """Keep a file that is about to be changed in place: a name for it, and its content."""
        room = self._room(above, parts[:-1])
        kept = self._fresh(room, "k")
        copy = self._fresh(self.rooms.own, "c")
        self._kept.pop(parts, None)
        self._copy_content(parts, copy)
        with _links_may_be_refused():  # without one, only the content comes back
            room.link(above, parts[-1], kept)
        return Record(
            op="edit",
            path=parts,
            kept=kept if room.status(kept) is not None else None,
            copy=copy,
            room=room.mark,
            before=entry,
            old=entry.ident,
            new=Ident(entry.ino, -1, -1),
            times=self._times(above, parts[:-1]),
        )

    def _copy_content(self, parts: Parts, copy: str) -> None:
        reading = self.tree.open_file(parts)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            writing = os.open(copy, flags, 0o600, dir_fd=self.store.tx_fd)
            try:
                copy_content(reading, writing)
                if self.store.safe:
                    os.fsync(writing)
            finally:
                os.close(writing)
        finally:
            os.close(reading)

    def _moved_record(
        self,
        here: int,
        origin: Parts,
        target: Parts,
        status: os.stat_result,
        times: tuple[tuple[Parts, int], ...],
    ) -> Record:
        """Keep a name for what is about to be moved, and a small file's content."""
        ident = lasting(status)
        record = Record(op="moved", path=target, origin=origin, old=ident, new=ident, times=times)
        if stat.S_ISDIR(status.st_mode):
            return record
        room = self._room(here, origin[:-1])
        kept = self._fresh(room, "k")
        with _links_may_be_refused():  # without one, it is found again at its new path
            room.link(here, origin[-1], kept)
            record.kept, record.room = kept, room.mark
        if stat.S_ISREG(status.st_mode) and status.st_size <= COPIED_WHEN_MOVED:
            with contextlib.suppress(PermissionError):
                copy = self._fresh(self.rooms.own, "c")
                record.before = entry_at(self.tree, origin)
                self._copy_content(origin, copy)
                record.copy = copy
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

    def _sweep(self, used: AbstractSet[str] = frozenset()) -> None:
        """Remove the transaction's own files but those still used."""
        for room, name in self._litter:
            for _ in range(0 if name in used else 2):
                # A name of the user's file must not stay for one failure.
                with contextlib.suppress(OSError):
                    room.remove(name)
                    break
        self._litter = {one for one in self._litter if one[1] in used}

    def _write_through(self, records: Sequence[Record]) -> None:
        """Have the disk hold every change before the record that says so: contents, then names."""
        paths = {record.path for record in records}
        paths |= {record.origin for record in records if record.origin is not None}
        found = {parts: self.tree.status_if_reached(parts) for parts in paths}
        whole = any(
            _is_directory(found[parts])
            for record in records
            if record.op in ("put", "again", "moved", "moved over")
            for parts in (record.path, record.origin or record.path)
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

    def _undo_from(self, index: int, undoing: _Undoing) -> tuple[str, ...]:
        self._forget()
        self._safe_until = min(self._safe_until, index)
        self.is_stuck = True
        try:
            self.rooms.make_again()
            for record in reversed(self.records[index:]):
                self._undo_and_tell(record, undoing)
                if self.store.safe:
                    self._write_through([record])
                self.journal.cut(record.offset)
                self.records.pop()
            self.is_stuck = False
        except OSError as error:
            if undoing.recovering:
                raise
            # The disk's fault, not the path's: the journal still says what is to be undone.
            undoing.sentences.append(
                f"{shown(join_path(self.records[-1].path))} and what was changed before it could"
                f" not be put back ({error.strerror}). That is tried again before the next change,"
                " and when the directory is opened again"
            )
        for sentence in undoing.sentences:
            logger.error("%s", sentence)
        return tuple(undoing.sentences)

    def _undo_and_tell(self, record: Record, undoing: _Undoing) -> None:
        try:
            self._undo_somehow(record, undoing)
        except OSError as error:
            if error.errno not in _THE_PATHS_OWN:
                raise
            undoing.sentences.append(
                f"{shown(join_path(record.path))} could not be put back"
                f" ({error.strerror}){self._set_aside(record)}"
            )

    def _undo_somehow(self, record: Record, undoing: _Undoing) -> None:
        try:
            self._undo(record, undoing)
        except PermissionError:
            # The call, or what it started, may have closed a directory of ours to writing.
            with self._opened(record.path[:-1]), self._opened((record.origin or record.path)[:-1]):
                self._undo(record, undoing)

    @contextlib.contextmanager
    def _opened(self, parts: Parts) -> Generator[None]:
        """Let the owner write to a directory for a while."""
        status = self.tree.status(parts)
        mode = 0o777 if status is None else stat.S_IMODE(status.st_mode)
        if mode & 0o700 == 0o700:
            yield
            return
        self.tree.chmod(parts, mode | 0o700)
        try:
            yield
        finally:
            self.tree.chmod(parts, mode)

    def _undo(self, record: Record, undoing: _Undoing) -> None:
        """Put back what a record says. Does no harm if the change was not made, or is undone."""
        if undoing.recovering and not undoing.external and self._drifted(record, undoing):
            undoing.sentences.append(
                f"{shown(join_path(record.path))} was changed by someone else since, and is left"
                f" as it is{self._set_aside(record)}"
            )
        else:
            self._undo_one(record, undoing)
        for parts, mtime in record.times:
            set_time(self.tree, parts, mtime)

    def _undo_one(self, record: Record, undoing: _Undoing) -> None:
        match record.op:
            case "put" | "again" | "gone":
                self._put_back(record, undoing)
            case "edit":
                if undoing.recovering and not undoing.external:
                    self._spare_content(record)
                self._revise(record)
                if record.kept is not None and not self._is_lost(record):
                    self._put_back(record, undoing)
            case "moved" | "moved over":
                self._move_back(record, undoing)
            case "made":
                self._unmake(record, undoing)
            case "attributes" if record.before is not None:
                apply_entry(self.tree, record.path, record.before)
            case "found":
                self._bring_back(record, undoing)
            case _:  # external: what came before it says it all
                pass

    def _put_back(self, record: Record, undoing: _Undoing) -> None:
        with self._parent_again(record.path, undoing) as above:
            if record.kept is not None:
                self._return(above, record.path, record, undoing)
            else:
                self._clear(above, record, undoing)

    def _return(self, above: int, parts: Parts, record: Record, undoing: _Undoing) -> None:
        """Put what was kept back to its place; if it is not there, it is in its place already."""
        kept, room = record.kept or "", self.rooms.of(record.room)
        if record.room is not None and not self._is_in_place(above, parts, record):
            self._bring_again(room, kept)
        external = undoing.recovering and undoing.external
        if external and _is_elsewhere(room, kept, above, parts[-1]):
            self._aside(above, parts, undoing)
        if self._was_not_made(above, parts, record, undoing):
            return
        try:
            self._rename_back(room, kept, above, parts, undoing)
        except FileNotFoundError:
            in_place = self._is_in_place(above, parts, record)
            if not (undoing.recovering or undoing.tolerant or in_place):
                raise
            return
        room.remove(kept)  # still there if both names were one file
        self._litter.discard((room, kept))

    def _bring_again(self, room: Room, kept: str) -> None:
        """Have a room hold again what it held, if a program has changed or removed that."""
        own = self.rooms.own
        if own.status(_safe(kept)) is not None and not _is_copy(own, room, kept):
            room.remove(kept)
            copy_exactly(own.tree, own.at(_safe(kept)), room.tree, room.at(kept))

    def _was_not_made(self, above: int, parts: Parts, record: Record, undoing: _Undoing) -> bool:
        """Tell whether a change was only about to be made."""
        if undoing.tolerant and self._is_in_place(above, parts, record):
            return True
        if record.op != "put" or record.new is None or not (undoing.tolerant or undoing.recovering):
            return False
        kept = self.rooms.of(record.room).status(record.kept or "")
        return kept is not None and kept.st_ino == record.new.ino  # they did not change places

    def _is_in_place(self, above: int, parts: Parts, record: Record) -> bool:
        status = _status(above, parts[-1])
        return matches(record.old, None if status is None else lasting(status))

    def _rename_back(
        self, room: Room, kept: str, above: int, parts: Parts, undoing: _Undoing
    ) -> None:
        try:
            room.put(kept, above, parts[-1])
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
            self._aside(above, parts, undoing)
            room.put(kept, above, parts[-1])

    def _clear(self, above: int, record: Record, undoing: _Undoing) -> None:
        """Take away what is at a path where nothing was."""
        name = record.path[-1]
        status = _status(above, name)
        if status is None:
            return
        ours = record.new is not None and record.new.ino == status.st_ino
        if undoing.recovering and undoing.external:
            self._aside(above, record.path, undoing)
        elif not _is_directory(status):
            os.unlink(name, dir_fd=above)
        elif ours:
            self.tree.remove_all(record.path)
        else:
            self._aside(above, record.path, undoing)

    def _aside(self, above: int, parts: Parts, undoing: _Undoing) -> None:
        """Make room at a path. A directory may hold what is not the call's: it is not lost."""
        status = _status(above, parts[-1])
        if status is None:
            return
        if not _is_directory(status) and not undoing.recovering:
            os.unlink(parts[-1], dir_fd=above)
            return
        if _is_directory(status):
            with contextlib.suppress(OSError):
                os.rmdir(parts[-1], dir_fd=above)
                return
        held = f": {self._names_in(parts)}" if _is_directory(status) else ""
        place = self.store.left(parts)
        try:
            if status.st_nlink > 1 and not _is_directory(status):
                # It stays in use by its other names: what is set aside is a copy.
                self._move_by_copy(parts, place)
            else:
                os.rename(parts[-1], place, src_dir_fd=above)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._move_by_copy(parts, place)
        undoing.sentences.append(
            f"{shown(join_path(parts))} had something that the call did not put there, and that"
            f" is now in {place}{held}"
        )

    def _move_by_copy(self, parts: Parts, place: Path) -> None:
        self._copy_out(parts, place)
        self.tree.remove_all(parts)

    def _copy_out(self, parts: Parts, place: Path) -> None:
        folder = Tree(place.parent)
        try:
            copy_exactly(self.tree, parts, folder, (place.name,))
        finally:
            folder.close()

    def _names_in(self, parts: Parts) -> str:
        """Name what is in a directory."""
        names = sorted(self.tree.names(parts)) if status_is_directory(self.tree, parts) else []
        shown_names = [shown(join_path((*parts, name))) for name in names[:10]]
        return ", ".join(shown_names) + (", ..." if len(names) > 10 else "")

    def _revise(self, record: Record) -> None:
        """Give a file that was changed in place its content and attributes back."""
        before, copy = record.before, record.copy
        if before is None or copy is None or _status(self.store.tx_fd, copy) is None:
            return
        room = self.rooms.of(record.room)
        if record.kept is not None and room.status(record.kept) is not None:
            self._refill(room.tree, room.at(record.kept), copy, before)
            return
        status = self.tree.status(record.path)
        if status is not None and status.st_ino == before.ino:
            self._refill(self.tree, record.path, copy, before)
        elif record.kept is None or self._is_lost(record):
            # None of its names is left to us: a copy is all there is.
            staged = self._fresh(room)
            copy_exactly(self.store.tree, (copy,), room.tree, room.at(staged))
            apply_entry(room.tree, room.at(staged), before)
            with self.tree.parent(record.path) as above:
                room.put(staged, above, record.path[-1])

    def _spare_content(self, record: Record) -> None:
        """Set a copy aside of what somebody may have written to a file that we changed in place.

        It may also be the half of what we were about to write. That cannot be told, so it is not
        said that something could not be restored.
        """
        status, before = self.tree.status(record.path), record.before
        if record.copy is None or _status(self.store.tx_fd, record.copy) is None:
            return
        if before is None or status is None or status.st_ino != before.ino:
            return
        reading = os.open(record.copy, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self.store.tx_fd)
        try:
            if not os.fstat(reading).st_mode & stat.S_IWUSR:
                return  # it was about to be filled again
            known = _is_beginning(self.tree, record.path, reading)
            known = known or bool(record.digest and self._holds(record.path, record.digest))
        finally:
            os.close(reading)
        if not known:
            place = self.store.left(record.path)
            self._copy_out(record.path, place)
            logger.warning(
                "%s was half written, or changed by someone else since a call was killed. It is as"
                " it was before that call; what it held is in %s",
                shown(join_path(record.path)),
                place,
            )

    def _is_lost(self, record: Record) -> bool:
        """Tell whether a program has removed, from a room, the name that a file was kept by."""
        if record.room is None or not self._has_programs:
            return False
        return self.rooms.of(record.room).status(record.kept or "") is None

    def _refill(self, tree: Tree, parts: Parts, name: str, before: Entry) -> None:
        """Make a file's content that of one in the store, for all the names it has."""
        reading = os.open(name, os.O_RDONLY, dir_fd=self.store.tx_fd)
        try:
            if not _has_content(tree, parts, reading):
                os.lseek(reading, 0, os.SEEK_SET)
                with contextlib.suppress(OSError):
                    # Should this be cut short, recovery knows whose the mixture is.
                    os.fchmod(reading, stat.S_IRUSR)
                fd = _open_to_change(tree, parts, before.mode)
                try:
                    copy_content(reading, fd)
                    os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR))
                finally:
                    os.close(fd)
        finally:
            os.close(reading)
        apply_entry(tree, parts, before)

    def _move_back(self, record: Record, undoing: _Undoing) -> None:
        origin = record.origin or ()
        if record.kept is None or self._is_lost(record):
            self._rename_to_origin(record, origin, undoing)
            return
        if record.copy is not None:
            self._revise(record)
        with self._parent_again(origin, undoing) as above:
            self._return(above, origin, record, undoing)
        if record.op == "moved over":
            return  # what it replaced takes its place next
        with contextlib.suppress(FileNotFoundError), self.tree.parent(record.path) as above:
            self._clear(above, record, undoing)

    def _rename_to_origin(self, record: Record, origin: Parts, undoing: _Undoing) -> None:
        status, there = self.tree.status(record.path), self.tree.status(origin)
        is_here = self._is_moved(record, record.path)
        if not is_here and self._is_moved(record, origin):
            return
        # Where nothing is at the old path, it is the one that was moved, whatever its inode: not
        # every filesystem keeps these when it is mounted again.
        if status is None or (there is not None and not is_here):
            raise OSError(errno.ENOENT, "it is not where it was moved to")
        with (
            self._parent_again(origin, undoing) as above,
            self.tree.parent(record.path) as below,
        ):
            self._aside(above, origin, undoing)
            os.rename(record.path[-1], origin[-1], src_dir_fd=below, dst_dir_fd=above)

    def _is_moved(self, record: Record, parts: Parts) -> bool:
        """Tell whether what was moved is at a path: itself, or what a scan has made of it."""
        status, new = self.tree.status(parts), record.new
        if status is None or new is None:
            return False
        alike = self._is_lost(record) and matches(new, lasting(status))
        return alike or status.st_ino == new.ino

    def _unmake(self, record: Record, undoing: _Undoing) -> None:
        with contextlib.suppress(FileNotFoundError), self.tree.parent(record.path) as above:
            if _status(above, record.path[-1]) is None:
                return
            try:
                os.rmdir(record.path[-1], dir_fd=above)
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
                if undoing.recovering and not undoing.external:
                    undoing.sentences.append(
                        f"{shown(join_path(record.path))} holds what is not the call's, and is"
                        f" left as it is: {self._names_in(record.path)}"
                    )
                    return
                self._aside(above, record.path, undoing)

    def _bring_back(self, record: Record, undoing: _Undoing) -> None:
        """Make what was at a path again, from what the scan knows of it."""
        before, parts = record.before, record.path
        if before is None:
            self._remove_found(parts, undoing)
            return
        with self._parent_again(parts, undoing) as above:
            status = _status(above, parts[-1]) if parts else os.fstat(above)
            if before.kind == "directory":
                if not _is_directory(status):
                    self._aside(above, parts, undoing)
                    os.mkdir(parts[-1], 0o700, dir_fd=above)
                apply_entry(self.tree, parts, before)
                return
            self._bring_back_file(above, record, before, status, undoing)

    def _remove_found(self, parts: Parts, undoing: _Undoing) -> None:
        try:
            held = self.tree.parent(parts)
        except OSError as error:
            if error.errno not in (errno.ENOENT, *BARRED):
                raise
            return  # its directory is gone, or is again what it was before
        with held as above:
            status = _status(above, parts[-1])
            if status is None:
                return
            if undoing.recovering or _is_directory(status):
                self._aside(above, parts, undoing)
            else:
                os.unlink(parts[-1], dir_fd=above)

    def _bring_back_file(
        self,
        above: int,
        record: Record,
        before: Entry,
        status: os.stat_result | None,
        undoing: _Undoing,
    ) -> None:
        parts, twin = record.path, self._twin(record, before)
        if status is not None and twin is not None and status.st_ino == twin.st_ino:
            return
        if status is not None and twin is None and self._is_back(record, before, status):
            apply_entry(self.tree, parts, before)
            return
        if twin is None and _is_still(status, before):
            self._refill_from(self.tree, parts, record.source, before)
            return
        room = self._room(above, parts[:-1])
        staged = self._fresh(room)
        if twin is None or record.twin is None:
            self._make_again(room, staged, record, before)
        else:
            with self.tree.parent(record.twin) as other:
                room.link(other, record.twin[-1], staged)
        if status is not None and (undoing.recovering or _is_directory(status)):
            self._aside(above, parts, undoing)
        room.put(staged, above, parts[-1])

    def _twin(self, record: Record, before: Entry) -> os.stat_result | None:
        """Return the other name's status, if it was brought back as it should be."""
        if record.twin is None:
            return None
        status = self.tree.status_if_reached(record.twin)
        return status if status is not None and matches(before.ident, lasting(status)) else None

    def _is_back(self, record: Record, before: Entry, status: os.stat_result) -> bool:
        """Tell whether something is what it was: an undo that was cut short has brought it back."""
        if kind_of(status.st_mode) != before.kind:
            return False
        if before.kind == "symlink":
            return self.tree.link_target(record.path) == before.target
        if before.kind != "file":
            return before.kind == "fifo"
        if record.source is None:
            return status.st_ino == before.ino  # it could not be read, so not changed in place
        own = path_of(self.store.scan, record.source)
        with contextlib.suppress(FileNotFoundError):
            if own is not None and os.path.samestat(os.lstat(own), status):
                return True
        if status.st_nlink > 1 or not matches(before.ident, lasting(status)):
            return False
        return self._has_content(self.tree, record.path, record.source, before)

    def _has_content(self, tree: Tree, parts: Parts, source: Source, before: Entry) -> bool:
        try:
            reading = tree.open_file(parts)
        except PermissionError:
            return False
        try:
            return has_content(self.store.scan, source, before.size, reading)
        finally:
            os.close(reading)

    def _refill_from(self, tree: Tree, parts: Parts, source: Source | None, before: Entry) -> None:
        """Give a file that was changed in place its content back, for all the names it has."""
        if source is None:
            raise OSError(errno.ENOENT, "its content was not kept")
        if not self._has_content(tree, parts, source, before):
            fd = _open_to_change(tree, parts, before.mode)
            try:
                fill(self.store.scan, source, before.size, fd)
                os.ftruncate(fd, before.size)
            finally:
                os.close(fd)
        apply_entry(tree, parts, before)

    def _make_again(self, room: Room, staged: str, record: Record, before: Entry) -> None:
        with room.open() as fd:
            match before.kind:
                case "file":
                    self._make_file_again(room, fd, staged, record.source, before)
                case "symlink":
                    os.symlink(before.target or "", staged, dir_fd=fd)
                case "fifo":
                    os.mkfifo(staged, 0o600, dir_fd=fd)
                case _:
                    raise OSError(errno.ENOENT, "its content was not kept")
        apply_entry(room.tree, room.at(staged), before)

    def _make_file_again(
        self, room: Room, above: int, staged: str, source: Source | None, before: Entry
    ) -> None:
        """Make a file again: the same one if it has a name left, without a copy where possible."""
        held = second_name(self.store.scan, before.ino) if before.nlink > 1 else None
        if held is not None and _linked_to(held, above, staged):
            self._refill_from(room.tree, room.at(staged), source, before)
            return
        if source is None:
            raise OSError(errno.ENOENT, "its content was not kept")
        own = path_of(self.store.scan, source, before.size)
        if own is not None and before.nlink == 1 and _linked_to(own, above, staged):
            return
        writing = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=above)
        try:
            fill(self.store.scan, source, before.size, writing)
            if self.store.safe:
                os.fsync(writing)
        finally:
            os.close(writing)

    def _parent_again(self, parts: Parts, undoing: _Undoing) -> Held:
        """Open a directory to put something back into, which may have been taken away."""
        try:
            return self.tree.parent(parts)
        except FileNotFoundError:
            pass
        for depth in range(1, len(parts)):
            if self.tree.status(parts[:depth]) is None:
                with self.tree.parent(parts[:depth]) as above:
                    os.mkdir(parts[depth - 1], dir_fd=above)
                undoing.sentences.append(
                    f"{shown(join_path(parts[:depth]))} had been taken away and was made again,"
                    " without what is not the call's"
                )
        return self.tree.parent(parts)

    def _drifted(self, record: Record, undoing: _Undoing) -> bool:
        """Tell whether a path is neither as we left it nor as it was."""
        if record.op not in ("put", "again", "gone", "edit"):
            return False
        now, ours = self._ident(record.path), undoing.ours[record.path]
        alike = [known for known in ours if matches(known, now)]
        # Size and time are not enough: some editors, and copies, preserve the time.
        digests = [known and undoing.digests.get(known) for known in alike]
        return not any(not each or self._holds(record.path, each) for each in digests)

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

    def _set_aside(self, record: Record) -> str:
        """Keep what could not be put back where it can be found, and say where."""
        room = self.rooms.own if record.op == "edit" else self.rooms.of(record.room)
        source = record.copy if record.op == "edit" else record.kept
        if source is None or room.status(source) is None:
            return ""
        place = self.store.left(record.path)
        with contextlib.suppress(OSError):
            _move_to_left(room, source, place)
            return f"; what was there before is in {place}"
        return ""


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
        from weakincentives.filesystem.scan import forget_unfinished

        forget_unfinished(store)
    history.journal.close()
    rooms.leave()
    return sentences


def _give_up(store: Store, rooms: Rooms) -> tuple[str, ...]:
    """Set everything aside that a journal which cannot be read was about."""
    place = store.left(("journal",))
    place.mkdir()
    for room in (rooms.own, *rooms.made):
        for name in room.tree.names(room.base):
            _move_to_left(room, name, place / name)
    rooms.leave()
    sentence = (
        "The journal of a call that was not finished cannot be read. The directory is left as"
        f" it is; what that call has replaced is in {place}"
    )
    logger.error("%s", sentence)
    return (sentence,)


def _move_to_left(room: Room, name: str, place: Path) -> None:
    try:
        with room.open() as fd:
            os.rename(name, place, src_dir_fd=fd)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        folder = Tree(place.parent)
        try:
            copy_exactly(room.tree, room.at(name), folder, (place.name,))
        finally:
            folder.close()


def _spare(
    history: History, rooms: Rooms, records: Sequence[Record], damage: str
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
    known = {name for record in records for name in (record.kept, record.copy)}
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
        _move_to_left(room, name, place)
        sentence = (
            "The last change of a call that was not finished cannot be told. What it may have"
            f" replaced is in {place}"
        )
        if damage == "torn" or name[0] == "k":
            sentences.append(sentence)
        else:  # more likely it was to be put somewhere, or is a copy of what is there
            logger.warning("%s", sentence)
    return tuple(sentences)


def _is_spare(found: Mapping[str, Room], ours: Counter[tuple[int, int]], name: str) -> bool:
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


def _is_new(store: Store, room: Room, name: str) -> bool:
    """Tell whether something was written after the last record, and so is nothing's original."""
    status, journal = room.status(name), _status(store.tx_fd, "journal")
    last = os.fstat(store.tx_fd) if journal is None else journal
    return status is not None and status.st_mtime_ns >= last.st_mtime_ns


@contextlib.contextmanager
def _links_may_be_refused() -> Generator[None]:
    """Go on without a second name where the system, or the filesystem, does not give any."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EXDEV, *_NO_LINKS):
            raise


def _safe(name: str) -> str:
    """Return the name, in the transaction's directory, of a copy of what a room keeps."""
    return f"b{name}"


def _is_copy(own: Room, room: Room, name: str) -> bool:
    """Tell whether a room still has what was copied from it."""
    there = {parts[len(room.at(name)) :]: lasting(s) for parts, s in room.tree.walk(room.at(name))}
    for parts, status in own.tree.walk(own.at(_safe(name))):
        place = parts[1:]
        known = there.pop(place, None)
        if known is None or _is_directory(status) != (known.size == -1):
            return False
        if not _is_directory(status) and not matches(known, lasting(status)):
            return False
        if stat.S_ISREG(status.st_mode):
            reading = own.tree.open_file(parts)
            try:
                if not _has_content(room.tree, (*room.at(name), *place), reading):
                    return False
            finally:
                os.close(reading)
    return not there


def _linked_to(path: Path, above: int, name: str) -> bool:
    """Give a file in the store another name; False where that cannot be."""
    try:
        os.link(path, name, dst_dir_fd=above, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, *_NO_LINKS):
            raise
        return False
    return True


def _status(above: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        return None


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


def _is_elsewhere(room: Room, kept: str, above: int, name: str) -> bool:
    """Tell whether something was kept, and something else is in its place."""
    old, now = room.status(kept), _status(above, name)
    return old is not None and now is not None and old.st_ino != now.st_ino


def _is_still(status: os.stat_result | None, before: Entry) -> bool:
    """Tell whether a path still is a name of the file that had several."""
    if status is None or before.kind != "file" or before.nlink == 1:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_ino == before.ino


def matches(known: Ident | None, now: Ident | None) -> bool:
    """Tell whether something is what it was known to be, or an exact copy of that."""
    if known is None or now is None:
        return known is now
    if known.size == -1:
        return known.ino == now.ino
    return known.size == now.size and known.mtime_ns == now.mtime_ns


def lasting(status: os.stat_result) -> Ident:
    """Return what tells something from another: of a directory, only that it is this one."""
    return Ident(status.st_ino, -1, -1) if _is_directory(status) else ident_of(status)


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


def _open_to_change(tree: Tree, parts: Parts, mode: int) -> int:
    with tree.parent(parts) as above:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(parts[-1], flags, dir_fd=above)
        except PermissionError:
            tree.chmod(parts, mode | 0o600)
            return os.open(parts[-1], flags, dir_fd=above)


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


def _has_content(tree: Tree, parts: Parts, reading: int) -> bool:
    """Tell whether a file has the content that is left to read."""
    try:
        fd = tree.open_file(parts)
    except PermissionError:
        return False
    try:
        while True:
            data = os.read(fd, CHUNK)
            if data != os.read(reading, CHUNK):
                return False
            if not data:
                return True
    finally:
        os.close(fd)
