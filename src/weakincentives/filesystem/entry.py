"""What is at a path: captured with all that it takes to make it again, and made again."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from weakincentives.filesystem.protocol import Parts
from weakincentives.filesystem.tree import (
    CHUNK,
    Tree,
    chmod_at,
    set_xattrs,
    without_privileges,
    write_all,
    xattrs_of,
)

WORTH_CLONING = 256 << 10
_FICLONE = 0x40049409

Kind = Literal["file", "directory", "link", "other"]
_KINDS = frozenset(get_args(Kind))
_TYPES: dict[int, Kind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
}

Xattrs = tuple[tuple[str, bytes], ...]

File = tuple[int, int]
"""Device and inode: what tells a file from all others, under whichever of its names."""


class Entry(NamedTuple):
    """What is at a path, links not followed; as much of it as somebody needs to know."""

    kind: Kind
    mode: int = 0
    """Permission bits only."""
    size: int = 0
    """-1 for a file of which only the inode is known."""
    mtime_ns: int = 0
    ino: int = 0
    device: int = 0
    links: int = 1
    """How many names a file has, wherever they are."""
    uid: int = 0
    gid: int = 0
    ctime_ns: int = 0
    """Nobody can set it: while it is the same, so is all else. 0 if it is not known."""
    xattrs: Xattrs = ()
    target: str | None = None
    """Of a symbolic link: its text."""
    digest: str | None = None
    """Of a file's content, or of a link's text."""
    pipe: bool = False
    """Whether it is a named pipe: of all others, only these can be made again."""

    @classmethod
    def of(cls, status: os.stat_result) -> Entry:
        """Return the entry that a status describes."""
        return cls(
            _TYPES.get(stat.S_IFMT(status.st_mode), "other"),
            stat.S_IMODE(status.st_mode),
            status.st_size,
            status.st_mtime_ns,
            status.st_ino,
            status.st_dev,
            status.st_nlink,
            status.st_uid,
            status.st_gid,
            status.st_ctime_ns,
            pipe=stat.S_ISFIFO(status.st_mode),
        )

    @property
    def file(self) -> File | None:
        """Which file this is; None for anything else."""
        return (self.device, self.ino) if self.kind == "file" else None

    @property
    def readonly(self) -> bool:
        """Whether it is a file that may only be read."""
        return self.kind == "file" and not self.mode & stat.S_IWUSR

    @property
    def is_directory(self) -> bool:
        return self.kind == "directory"

    def is_like(self, other: Entry) -> bool:
        """Tell whether owner, permissions, attributes and content are the same, as far as known."""
        if (self.mode, self.uid, self.gid) != (other.mode, other.uid, other.gid):
            return False
        known = self.digest is not None and other.digest is not None
        return self.xattrs == other.xattrs and (not known or self.digest == other.digest)

    def is_at(self, tree: Tree, parts: Parts) -> bool:
        """Tell whether a file or link is at a path as it was, whatever its times say."""
        status = tree.status_if_reached(parts)
        if status is None or status.st_ctime_ns == self.ctime_ns:
            return status is not None
        now = capture(tree, parts, read=True)
        return now is not None and None not in (self.digest, now.digest) and self.is_like(now)

    def encode(self) -> list[Any]:
        """Return the entry as JSON takes it."""
        xattrs = [[name, value.hex()] for name, value in self.xattrs] if self.xattrs else ()
        kind = "fifo" if self.pipe else self.kind
        return [
            kind, self.mode, self.mtime_ns, self.uid, self.gid, xattrs, self.size, self.ino,
            self.links, self.target, self.digest, self.ctime_ns,
        ]  # fmt: skip

    @classmethod
    def decode(cls, values: list[Any]) -> Entry:
        """Return the entry that :meth:`encode` wrote; raises ValueError for anything else."""
        kind, mode, mtime_ns, uid, gid, xattrs, size, ino, links, target, digest = values[:11]
        ctime_ns = values[11] if len(values) > 11 else 0  # version 2 of the store has none
        numbers = (mode, mtime_ns, uid, gid, size, ino, links, ctime_ns)
        pipe = kind == "fifo"
        kind = "link" if kind == "symlink" else "other" if pipe else kind
        if kind not in _KINDS or not all(type(number) is int for number in numbers):
            raise ValueError(f"not what is at a path: {values!r}")
        if target is not None and (not isinstance(target, str) or "\0" in target):
            raise ValueError(f"not the text of a link: {target!r}")
        return cls(
            kind,
            mode,
            size,
            mtime_ns,
            ino,
            0,
            links,
            uid,
            gid,
            ctime_ns,
            tuple((name, bytes.fromhex(value)) for name, value in xattrs),
            target,
            None if digest is None else checked_digest(digest),
            pipe,
        )


def kind_of(mode: int) -> Kind:
    return _TYPES.get(stat.S_IFMT(mode), "other")


def matches(known: Entry | None, now: Entry | None) -> bool:
    """Tell whether something is what it was known to be, or an exact copy of that."""
    if known is None or now is None:
        return known is now
    if known.is_directory or known.size == -1:
        return known.ino == now.ino
    return known.size == now.size and known.mtime_ns == now.mtime_ns


def checked_digest(digest: object) -> str:
    """Return a digest as :func:`digest_of` gives it; else raises ValueError."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"not a digest: {digest!r}")
    return digest


_DIGEST = re.compile("[0-9a-f]{64}")


def digest_of(reading: int) -> str:
    """Return the digest of what is left to read."""
    hashed = hashlib.sha256()
    while data := os.read(reading, CHUNK):
        hashed.update(data)
    return hashed.hexdigest()


def capture(tree: Tree, parts: Parts, *, read: bool = False) -> Entry | None:
    """Return what is at a path, with its attributes; with its digest if it is to be read.

    None for nothing.
    """
    status = tree.status(parts)
    if status is None:
        return None
    if stat.S_ISLNK(status.st_mode):
        target = tree.link_target(parts)
        digest = hashlib.sha256(os.fsencode(target)).hexdigest() if read else None
        return Entry.of(status)._replace(target=target, digest=digest)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return Entry.of(status)
    try:
        fd = tree.open_file(parts)
    except PermissionError:
        return Entry.of(status)
    try:
        digest = digest_of(fd) if read and stat.S_ISREG(status.st_mode) else None
        return Entry.of(os.fstat(fd))._replace(xattrs=xattrs_of(fd), digest=digest)
    finally:
        os.close(fd)


def create(above: int, name: str, entry: Entry) -> bool:
    """Make a directory, link or pipe at a free name; False for anything else."""
    match entry.kind:
        case "directory":
            os.mkdir(name, 0o700, dir_fd=above)
        case "link":
            os.symlink(entry.target or "", name, dir_fd=above)
        case "other" if entry.pipe:
            os.mkfifo(name, 0o600, dir_fd=above)
        case _:
            return False
    return True


def apply_entry(tree: Tree, parts: Parts, entry: Entry) -> None:
    """Give what is at a path an entry's owner, permissions, attributes and time."""
    with tree.parent(parts) as above:
        name = parts[-1] if parts else "."
        status, mode = os.stat(name, dir_fd=above, follow_symlinks=False), entry.mode
        if (status.st_uid, status.st_gid) != (entry.uid, entry.gid):
            try:
                os.chown(name, entry.uid, entry.gid, dir_fd=above, follow_symlinks=False)
            except PermissionError:
                if entry.kind == "file":
                    mode = without_privileges(mode)  # it would act for another one than it did
        if entry.kind in ("file", "directory"):
            _apply_xattrs(tree, parts, entry)
        if entry.pipe or entry.kind in ("file", "directory"):
            status = os.stat(name, dir_fd=above, follow_symlinks=False)
            if stat.S_IMODE(status.st_mode) != mode:
                chmod_at(above, name, mode)
        if status.st_mtime_ns != entry.mtime_ns:
            times = (status.st_atime_ns, entry.mtime_ns)
            os.utime(name, ns=times, dir_fd=above, follow_symlinks=False)


def _apply_xattrs(tree: Tree, parts: Parts, entry: Entry) -> None:
    with contextlib.suppress(PermissionError):
        fd = tree.open_file(parts) if parts else os.dup(tree.fd)
        try:
            if xattrs_of(fd) != entry.xattrs:
                set_xattrs(fd, entry.xattrs)
        finally:
            os.close(fd)


# Copies


def copy_exactly(source: Tree, origin: Parts, target: Tree, place: Parts) -> None:
    """Copy a file, link or whole directory: bytes, modes, times, attributes, hard links within.

    ``place`` must be free. Sockets and devices are left out: nobody can make them again.
    """
    links: dict[int, Parts] = {}
    directories: list[tuple[Parts, Entry]] = []
    for parts, _ in source.walk(origin):
        there = (*place, *parts[len(origin) :])
        entry = capture(source, parts)
        if entry is None:
            continue
        known = links.get(entry.ino) if entry.links > 1 and not entry.is_directory else None
        with target.parent(there) as above:
            name = there[-1]
            if known is not None:
                with target.parent(known) as other:
                    link(other, known[-1], above, name)
                continue
            if entry.kind == "file":
                copy_file(source, parts, above, name)
            elif not create(above, name, entry):
                continue
        if entry.is_directory:
            directories.append((there, entry))
        else:
            apply_entry(target, there, entry)
            links[entry.ino] = there
    # Last, and inner ones first: what is put into a directory changes its time.
    for there, entry in reversed(directories):
        apply_entry(target, there, entry)


def link(source: int, name: str, target: int, place: str) -> None:
    """Give a file, or a link itself, another name."""
    os.link(name, place, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)


def linked(source: int | None, name: str | Path, target: int, place: str) -> bool:
    """Like :func:`link`; False where the system, or the filesystem, gives no second name."""
    try:
        os.link(name, place, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


_NO_LINKS = (errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV)


def copy_file(source: Tree, parts: Parts, above: int, name: str, *, safe: bool = False) -> None:
    """Copy a file's content to a free name, written through to the disk if it must be safe."""
    reading = source.open_file(parts)
    try:
        writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=above)
        try:
            copy_content(reading, writing)
            if safe:
                os.fsync(writing)
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def copy_content(reading: int, writing: int) -> None:
    """Copy all that is left to read from one descriptor to another; holes stay holes."""
    status = os.fstat(reading)
    if _is_special(status) and not os.lseek(reading, 0, os.SEEK_CUR):
        if _clone(reading, writing):
            os.lseek(writing, status.st_size, os.SEEK_SET)
            return
        if _has_holes(status):
            _copy_data(reading, writing, status.st_size)
            return
    if hasattr(os, "copy_file_range"):
        with contextlib.suppress(OSError):  # not between these two: the plain way says why
            while os.copy_file_range(reading, writing, 1 << 30):
                pass
    while data := os.read(reading, CHUNK):
        write_all(writing, data)


def _is_special(status: os.stat_result) -> bool:
    """Tell whether a file may have holes, or is so large that it is worth trying to clone it."""
    return sys.platform == "linux" and (status.st_size >= WORTH_CLONING or _has_holes(status))


def _has_holes(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_blocks * 512 < status.st_size


def _clone(reading: int, writing: int) -> bool:
    """Let a file share the blocks of another; False where that cannot be."""
    import fcntl

    try:
        fcntl.ioctl(writing, _FICLONE, reading)
    except OSError:
        return False
    return True


def _copy_data(reading: int, writing: int, size: int) -> None:
    """Copy a file from its beginning, but not its holes."""
    os.ftruncate(writing, 0)
    position = 0
    while position < size:
        try:
            begin = os.lseek(reading, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # only a hole is left
        position = os.lseek(reading, begin, os.SEEK_HOLE)
        os.lseek(reading, begin, os.SEEK_SET)
        os.lseek(writing, begin, os.SEEK_SET)
        while begin < position and (data := os.read(reading, min(CHUNK, position - begin))):
            write_all(writing, data)
            begin += len(data)
    os.ftruncate(writing, size)
    os.lseek(writing, size, os.SEEK_SET)
