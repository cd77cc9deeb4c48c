"""The one description of what is at a path: capture, create and apply it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, get_args

from weakincentives.filesystem.paths import NodeKind, Parts
from weakincentives.filesystem.tree import (
    CHUNK,
    Held,
    Tree,
    chmod_at,
    set_xattrs,
    without_privileges,
    write_all,
    xattrs_of,
)

WORTH_CLONING = 256 << 10
_FICLONE = 0x40049409

_KINDS = frozenset(get_args(NodeKind))
_TYPES: dict[int, NodeKind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
}

Xattrs = tuple[tuple[str, bytes], ...]

File = tuple[int, int]
"""Device and inode: the identity of a file, whatever its name."""


class Attributes(TypedDict, total=False):
    """Fields of an entry that can be changed in place."""

    mode: int
    mtime_ns: int
    uid: int
    gid: int
    xattrs: Xattrs


class Entry(NamedTuple):
    """A file, directory, symbolic link or other node; unknown fields have their defaults."""

    kind: NodeKind
    mode: int = 0
    """Permission bits only."""
    size: int = 0
    """-1 if only the inode is known."""
    mtime_ns: int = 0
    ino: int = 0
    device: int = 0
    links: int = 1
    """The number of hard links, inside and outside the workspace."""
    uid: int = 0
    gid: int = 0
    ctime_ns: int = 0
    """Programs cannot set it: if it is unchanged, so is everything else. 0 if unknown."""
    xattrs: Xattrs = ()
    target: str | None = None
    """The text of a symbolic link."""
    digest: str | None = None
    """SHA-256 of a file's content or a link's text; of a moved directory, see ``listing_of``."""
    pipe: bool = False
    """Whether it is a named pipe: the only other kind that can be re-created."""

    @classmethod
    def of(cls, status: os.stat_result, digest: str | None = None, xattrs: Xattrs = ()) -> Entry:
        """Return the entry for a stat result, and for what else is known."""
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
            xattrs,
            None,
            digest,
            pipe=stat.S_ISFIFO(status.st_mode),
        )

    @property
    def file(self) -> File | None:
        """The identity of a file; None for other kinds."""
        return (self.device, self.ino) if self.kind == "file" else None

    @property
    def readonly(self) -> bool:
        """Whether it is a file without write permission for its owner."""
        return self.kind == "file" and not self.mode & stat.S_IWUSR

    @property
    def is_directory(self) -> bool:
        return self.kind == "directory"

    def is_like(self, other: Entry) -> bool:
        """Compare owner, permissions, extended attributes and, if known, content."""
        if (self.mode, self.uid, self.gid) != (other.mode, other.uid, other.gid):
            return False
        known = self.digest is not None and other.digest is not None
        return self.xattrs == other.xattrs and (not known or self.digest == other.digest)

    def encode(self) -> list[Any]:
        xattrs = [[name, value.hex()] for name, value in self.xattrs] if self.xattrs else ()
        kind = "fifo" if self.pipe else self.kind
        return [
            kind, self.mode, self.mtime_ns, self.uid, self.gid, xattrs, self.size, self.ino,
            self.links, self.target, self.digest, self.ctime_ns,
        ]  # fmt: skip

    @classmethod
    def decode(cls, values: list[Any]) -> Entry:
        """Return the entry that :meth:`encode` wrote; raises ValueError if it is malformed."""
        kind, mode, mtime_ns, uid, gid, xattrs, size, ino, links, target, digest, ctime_ns = values
        numbers = (mode, mtime_ns, uid, gid, size, ino, links, ctime_ns)
        pipe = kind == "fifo"
        kind = "other" if pipe else kind
        if kind not in _KINDS or not all(type(number) is int for number in numbers):
            raise ValueError(f"malformed entry: {values!r}")
        if target is not None and (not isinstance(target, str) or "\0" in target):
            raise ValueError(f"invalid link text: {target!r}")
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


def kind_of(mode: int) -> NodeKind:
    return _TYPES.get(stat.S_IFMT(mode), "other")


def matches(known: Entry | None, now: Entry | None) -> bool:
    """Compare by size and modification time; directories by inode."""
    if known is None or now is None:
        return known is now
    if known.kind == "directory" or known.size == -1:
        return known.ino == now.ino
    return known.size == now.size and known.mtime_ns == now.mtime_ns


def checked_digest(digest: object) -> str:
    """Return a SHA-256 digest in hex; raises ValueError for anything else."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"invalid digest: {digest!r}")
    return digest


_DIGEST = re.compile("[0-9a-f]{64}")


def digest_of(reading: int) -> str:
    """Return the digest of the remaining content of a descriptor."""
    hashed = hashlib.sha256()
    while data := os.read(reading, CHUNK):
        hashed.update(data)
    return hashed.hexdigest()


def listing_of(kinds: Iterable[tuple[str, NodeKind]]) -> str:
    """Return a digest of the names and kinds in a directory: that recognises one made again."""
    return hashlib.sha256(os.fsencode(repr(sorted(kinds)))).hexdigest()


def capture(
    tree: Tree, parts: Parts, *, read: bool = False, status: os.stat_result | None = None
) -> Entry | None:
    """Return the entry at a path with its extended attributes, or None.

    Args:
        read: Whether to add the digest of its content.
        status: Its status, if that is known.
    """
    status = tree.status(parts) if status is None else status
    if status is None:
        return None
    if stat.S_ISLNK(status.st_mode):
        target = tree.link_target(parts)
        digest = hashlib.sha256(os.fsencode(target)).hexdigest() if read else None
        return Entry.of(status)._replace(target=target, digest=digest)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return Entry.of(status)
    try:
        opened = Held(tree.open_file(parts))
    except PermissionError:
        return Entry.of(status)
    with opened as fd:
        digest = digest_of(fd) if read and stat.S_ISREG(status.st_mode) else None
        return Entry.of(os.fstat(fd), digest, xattrs_of(fd))


def create(above: int, name: str, entry: Entry) -> bool:
    """Create a directory, symbolic link or pipe at a free name; False for other kinds."""
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
    """Set owner, permissions, extended attributes and modification time at a path."""
    with tree.parent(parts) as above:
        name = parts[-1] if parts else "."
        status, mode = os.stat(name, dir_fd=above, follow_symlinks=False), entry.mode
        if (status.st_uid, status.st_gid) != (entry.uid, entry.gid):
            try:
                os.chown(name, entry.uid, entry.gid, dir_fd=above, follow_symlinks=False)
            except PermissionError:
                if entry.kind == "file":
                    mode = without_privileges(mode)  # it would run as another owner
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
    with (
        contextlib.suppress(PermissionError),
        Held(tree.open_file(parts) if parts else os.dup(tree.fd)) as fd,
    ):
        if xattrs_of(fd) != entry.xattrs:
            set_xattrs(fd, entry.xattrs)


# Copies


def copy_exactly(source: Tree, origin: Parts, target: Tree, place: Parts) -> None:
    """Copy a file, link or directory with modes, times, attributes and its inner hard links.

    ``place`` must be free. Sockets and devices are skipped: they cannot be re-created.
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
    # Last, inner directories first: adding an entry changes a directory's time.
    for there, entry in reversed(directories):
        apply_entry(target, there, entry)


def link(source: int | None, name: str | Path, target: int, place: str) -> None:
    os.link(name, place, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)


def linked(source: int | None, name: str | Path, target: int, place: str) -> bool:
    """Like :func:`link`; False if the system or filesystem does not allow it."""
    try:
        link(source, name, target, place)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


_NO_LINKS = (errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV)


def new_file(above: int | None, name: str | Path, mode: int = 0o600) -> Held:
    """Create a file at a free name, open for writing."""
    return Held(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=above))


def copy_file(source: Tree, parts: Parts, above: int, name: str, *, safe: bool = False) -> None:
    """Copy a file's content to a free name; ``safe`` syncs it to disk."""
    with Held(source.open_file(parts)) as reading, new_file(above, name) as writing:
        copy_content(reading, writing)
        if safe:
            os.fsync(writing)


def copy_content(reading: int, writing: int) -> None:
    """Copy the remaining content of a descriptor; holes stay holes."""
    status = os.fstat(reading)
    if _is_special(status) and not os.lseek(reading, 0, os.SEEK_CUR):
        if _clone(reading, writing):
            os.lseek(writing, status.st_size, os.SEEK_SET)
            return
        if _has_holes(status):
            _copy_data(reading, writing, status.st_size)
            return
    if hasattr(os, "copy_file_range"):
        with contextlib.suppress(OSError):  # unsupported here: fall back to read and write
            while os.copy_file_range(reading, writing, 1 << 30):
                pass
    while data := os.read(reading, CHUNK):
        write_all(writing, data)


def _is_special(status: os.stat_result) -> bool:
    """Tell whether a file may have holes or is large enough to clone."""
    return sys.platform == "linux" and (status.st_size >= WORTH_CLONING or _has_holes(status))


def _has_holes(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_blocks * 512 < status.st_size


def _clone(reading: int, writing: int) -> bool:
    """Share the blocks of another file; False if unsupported."""
    import fcntl

    try:
        fcntl.ioctl(writing, _FICLONE, reading)
    except OSError:
        return False
    return True


def _copy_data(reading: int, writing: int, size: int) -> None:
    """Copy a whole file without its holes."""
    os.ftruncate(writing, 0)
    position = 0
    while position < size:
        try:
            begin = os.lseek(reading, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # only a hole remains
        position = os.lseek(reading, begin, os.SEEK_HOLE)
        os.lseek(reading, begin, os.SEEK_SET)
        os.lseek(writing, begin, os.SEEK_SET)
        while begin < position and (data := os.read(reading, min(CHUNK, position - begin))):
            write_all(writing, data)
            begin += len(data)
    os.ftruncate(writing, size)
    os.lseek(writing, size, os.SEEK_SET)
