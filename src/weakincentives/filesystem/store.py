"""The directory beside a workspace: its lock, the open transaction, old contents and history."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import sys
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from weakincentives import locks
from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.errors import ContentDamaged, StoreRefused, WorkspaceLocked
from weakincentives.filesystem.protocol import Parts
from weakincentives.filesystem.tree import (
    CHUNK,
    Ident,
    Mount,
    Tree,
    chmod_at,
    mount_of,
    read_all,
    set_xattrs,
    without_default_acl,
    without_privileges,
    write_all,
    xattrs_of,
)
from weakincentives.state import Seals, state_path

logger = logging.getLogger("weakincentives.filesystem")
WORTH_CLONING = 256 << 10
_FICLONE = 0x40049409

Kind = Literal["file", "directory", "symlink", "fifo", "other"]
_KINDS = frozenset(get_args(Kind))

DAMAGED = errno.EBADMSG
"""What reading a content that was kept fails with if it is not what it was."""


# What comes out of a record is checked before it is used as a name: a seal says who wrote it, not
# that it makes sense.


def checked_name(name: object) -> str:
    """Return a name that is just that, and leads nowhere; else raises ValueError."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"not a name: {name!r}")
    return name


def checked_parts(path: object) -> Parts:
    """Return the names of a relative path; raises ValueError for one that leads elsewhere."""
    if not isinstance(path, str):
        raise ValueError(f"not a path: {path!r}")
    return tuple(map(checked_name, path.split("/"))) if path else ()


def checked_digest(digest: object) -> str:
    """Return a digest as :class:`Objects` gives it; else raises ValueError."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"not a digest: {digest!r}")
    return digest


_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What was at a path: all that is needed to make it again."""

    kind: Kind
    mode: int
    """Permission bits only."""
    mtime_ns: int
    uid: int
    gid: int
    xattrs: tuple[tuple[str, bytes], ...] = ()
    size: int = 0
    ino: int = 0
    nlink: int = 1
    target: str | None = None
    """Of a symbolic link: its text."""
    digest: str | None = None
    """Of a file: the object that holds its content."""

    @classmethod
    def of(
        cls,
        status: os.stat_result,
        *,
        xattrs: tuple[tuple[str, bytes], ...] = (),
        target: str | None = None,
        digest: str | None = None,
    ) -> Entry:
        """Return the entry that a status describes."""
        return cls(
            kind=kind_of(status.st_mode),
            mode=stat.S_IMODE(status.st_mode),
            mtime_ns=status.st_mtime_ns,
            uid=status.st_uid,
            gid=status.st_gid,
            xattrs=xattrs,
            size=status.st_size,
            ino=status.st_ino,
            nlink=status.st_nlink,
            target=target,
            digest=digest,
        )

    @property
    def ident(self) -> Ident:
        return Ident(self.ino, self.size, self.mtime_ns)

    def encode(self) -> list[Any]:
        """Return the entry as JSON takes it."""
        xattrs = [[name, value.hex()] for name, value in self.xattrs]
        return [
            self.kind, self.mode, self.mtime_ns, self.uid, self.gid, xattrs, self.size, self.ino,
            self.nlink, self.target, self.digest,
        ]  # fmt: skip

    @classmethod
    def decode(cls, values: list[Any]) -> Entry:
        """Return the entry that :meth:`encode` wrote; raises ValueError for anything else."""
        kind, mode, mtime_ns, uid, gid, xattrs, size, ino, nlink, target, digest = values
        numbers = (mode, mtime_ns, uid, gid, size, ino, nlink)
        if kind not in _KINDS or not all(type(number) is int for number in numbers):
            raise ValueError(f"not what is at a path: {values!r}")
        if target is not None and (not isinstance(target, str) or "\0" in target):
            raise ValueError(f"not the text of a link: {target!r}")
        return cls(
            kind=kind,
            mode=mode,
            mtime_ns=mtime_ns,
            uid=uid,
            gid=gid,
            xattrs=tuple((name, bytes.fromhex(value)) for name, value in xattrs),
            size=size,
            ino=ino,
            nlink=nlink,
            target=target,
            digest=None if digest is None else checked_digest(digest),
        )


def kind_of(mode: int) -> Kind:
    match stat.S_IFMT(mode):
        case stat.S_IFREG:
            return "file"
        case stat.S_IFDIR:
            return "directory"
        case stat.S_IFLNK:
            return "symlink"
        case stat.S_IFIFO:
            return "fifo"
        case _:
            return "other"


def entry_at(tree: Tree, parts: Parts) -> Entry | None:
    """Return what is at a path, without a file's content; None for nothing."""
    status = tree.status(parts)
    if status is None:
        return None
    if stat.S_ISLNK(status.st_mode):
        return Entry.of(status, target=tree.link_target(parts))
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return Entry.of(status)
    try:
        fd = tree.open_file(parts)
    except PermissionError:
        return Entry.of(status)
    try:
        return Entry.of(os.fstat(fd), xattrs=xattrs_of(fd))
    finally:
        os.close(fd)


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
        if entry.kind in ("file", "directory", "fifo"):
            status = os.stat(name, dir_fd=above, follow_symlinks=False)
            if stat.S_IMODE(status.st_mode) != mode:
                chmod_at(above, name, mode)
        if status.st_mtime_ns != entry.mtime_ns:
            times = (status.st_atime_ns, entry.mtime_ns)
            os.utime(name, ns=times, dir_fd=above, follow_symlinks=False)


def _apply_xattrs(tree: Tree, parts: Parts, entry: Entry) -> None:
    try:
        fd = tree.open_file(parts) if parts else os.dup(tree.fd)
    except PermissionError:
        return
    try:
        if xattrs_of(fd) != entry.xattrs:
            set_xattrs(fd, entry.xattrs)
    finally:
        os.close(fd)


def copy_exactly(source: Tree, origin: Parts, target: Tree, place: Parts) -> None:
    """Copy a file, link or whole directory: bytes, modes, times, attributes, hard links within.

    ``place`` must be free. Sockets and devices are left out: nobody can make them again.
    """
    links: dict[int, Parts] = {}
    directories: list[tuple[Parts, Entry]] = []
    for parts, status in source.walk(origin):
        there = (*place, *parts[len(origin) :])
        entry = entry_at(source, parts)
        if entry is None:
            continue
        known = links.get(entry.ino) if entry.nlink > 1 and entry.kind != "directory" else None
        with target.parent(there) as above:
            name = there[-1]
            if known is not None:
                with target.parent(known) as other:
                    os.link(
                        known[-1],
                        name,
                        src_dir_fd=other,
                        dst_dir_fd=above,
                        follow_symlinks=False,
                    )
                continue
            if entry.kind == "directory":
                os.mkdir(name, 0o700, dir_fd=above)
                directories.append((there, entry))
            elif entry.kind == "file":
                _copy_content(source, parts, above, name)
            elif entry.kind == "symlink":
                os.symlink(entry.target or "", name, dir_fd=above)
            elif entry.kind == "fifo":
                os.mkfifo(name, 0o600, dir_fd=above)
            else:
                continue
        if entry.kind != "directory":
            apply_entry(target, there, entry)
            links[status.st_ino] = there
    # Last, and inner ones first: what is put into a directory changes its time.
    for there, entry in reversed(directories):
        apply_entry(target, there, entry)


def _copy_content(source: Tree, parts: Parts, above: int, name: str) -> None:
    reading = source.open_file(parts)
    try:
        writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=above)
        try:
            copy_content(reading, writing)
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


class Objects:
    """Contents by what they are: the same bytes are kept once.

    What is read is compared with its name first, so a content is what it was, or none at all.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def path(self, digest: str) -> Path:
        """Return where a content is, or would be."""
        return Path(self._place(digest))

    def _place(self, digest: str) -> str:
        return f"{self._path}/{digest[:2]}/{digest[2:]}"

    def __contains__(self, digest: str) -> bool:
        return os.path.exists(self._place(digest))

    def open(self, digest: str) -> int:
        """Return a descriptor to read a content from; raises ContentDamaged for another one."""
        fd = os.open(self.path(checked_digest(digest)), os.O_RDONLY | _NOFOLLOW)
        try:
            if digest_of(fd) != digest:
                raise ContentDamaged(DAMAGED, "its kept content is damaged", str(self.path(digest)))
            os.lseek(fd, 0, os.SEEK_SET)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read(self, digest: str) -> bytes:
        """Return a content; raises ContentDamaged if it is not what it was."""
        fd = self.open(digest)
        try:
            return read_all(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def add(self, data: bytes, *, safe: bool = False) -> str:
        """Keep bytes; returns their digest."""
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self:
            staged = self._staged()
            fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                write_all(fd, data)
                if safe:
                    os.fsync(fd)
            finally:
                os.close(fd)
            self.take(staged, digest)
        return digest

    def add_open(self, reading: int, *, safe: bool = False) -> str:
        """Keep what is left to read from a descriptor; returns its digest."""
        staged = self._staged()
        hashed = hashlib.sha256()
        fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            while data := os.read(reading, CHUNK):
                hashed.update(data)
                write_all(fd, data)
            if safe:
                os.fsync(fd)
        except BaseException:
            os.unlink(staged)
            raise
        finally:
            os.close(fd)
        digest = hashed.hexdigest()
        self.take(staged, digest)
        return digest

    def take(self, source: Path, digest: str) -> None:
        """Make a file that nobody else has a name for the object with this digest."""
        place = self._place(digest)
        try:
            os.rename(source, place)
        except FileNotFoundError:
            Path(place).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.rename(source, place)

    def remove(self, digest: str) -> None:
        """Forget a content; one that is not there is fine."""
        self.path(digest).unlink(missing_ok=True)

    def digests(self, folder: str) -> Iterable[str]:
        """Yield every digest that is kept and begins with the two letters of a folder."""
        with contextlib.suppress(FileNotFoundError):
            for rest in os.listdir(self._path / folder):
                with contextlib.suppress(ValueError):
                    yield checked_digest(folder + rest)

    def tidy(self) -> None:
        """Remove what a killed process has left unfinished; refuse links that nobody here made."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._path) as found:
            for each in found:
                if each.is_symlink():
                    raise _refused(self._path / each.name, "is a symbolic link")
                if each.name.startswith("new-"):
                    os.unlink(each)

    def _staged(self) -> Path:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._path / f"new-{os.urandom(8).hex()}"


@dataclass(frozen=True, slots=True)
class Content:
    """A content that is read when it is needed."""

    objects: Objects
    digest: str

    def read(self) -> bytes:
        """Return its bytes; raises ContentDamaged if they are not what they were."""
        return self.objects.read(self.digest)


def digest_of(reading: int) -> str:
    """Return the digest of what is left to read."""
    hashed = hashlib.sha256()
    while data := os.read(reading, CHUNK):
        hashed.update(data)
    return hashed.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Which workspace a store is for; its seal says that this user wrote it."""

    id: str
    """Made once for each store: what is sealed for one is nothing to another."""
    path: str
    ino: int

    def seals(self, kind: str) -> Seals:
        """Return the seals for one kind of record in the store."""
        return Seals(f"{kind} {self.id}")

    def encode(self) -> bytes:
        """Return the note as it is written."""
        values = {"version": VERSION, "id": self.id, "path": self.path, "ino": self.ino}
        return Seals(_NOTE).sealed(json.dumps(values).encode())

    @classmethod
    def read(cls, store: Path) -> Note | None:
        """Return the note of a store; None if there is no store, or it holds nothing yet.

        Raises:
            StoreRefused: It is not certain that this user wrote the store.
        """
        with contextlib.suppress(FileNotFoundError):
            fd = open_store(store)
            try:
                return cls.read_from(fd, store)
            finally:
                os.close(fd)
        return None

    @classmethod
    def read_from(cls, fd: int, store: Path) -> Note | None:
        """Like :meth:`read`, of a store that is open."""
        try:
            reading = os.open("root", os.O_RDONLY | _NOFOLLOW, dir_fd=fd)
        except FileNotFoundError:
            if set(os.listdir(fd)) <= _BEFORE_THE_NOTE:
                return None
            raise _unsealed(store) from None
        with open(reading, "rb") as file:
            data = Seals(_NOTE).unsealed(file.read())
        if data is None:
            raise _unsealed(store)
        values = json.loads(data)
        if values["version"] != VERSION:
            raise _refused(store, f"has version {values['version']}, and this is {VERSION}")
        return cls(id=values["id"], path=values["path"], ino=values["ino"])


VERSION = 2
"""Of what is in a store. Version 1 had no seals."""
_NOTE = "store"
_BEFORE_THE_NOTE = frozenset({"lock", "root.new", "runs", "outcomes.jsonl", "outcomes.jsonl.lock"})
"""What there may be before the note: a process was killed, or it has seals of its own."""
_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC if os.name == "posix" else 0


def open_store(path: Path) -> int:
    """Return a descriptor of a store that only this user can have filled; else StoreRefused."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise _refused(path, "is not a directory, or is a symbolic link") from None
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise _refused(path, "belongs to another user")
        if status.st_mode & 0o077:
            os.fchmod(fd, 0o700)
        for name in os.listdir(fd):
            with contextlib.suppress(FileNotFoundError):
                _check_inside(path / name, os.stat(name, dir_fd=fd, follow_symlinks=False))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_inside(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise _refused(path, "is a symbolic link")
    if status.st_uid != os.geteuid():
        raise _refused(path, "belongs to another user")
    if not stat.S_ISDIR(status.st_mode) and (
        not stat.S_ISREG(status.st_mode) or status.st_nlink > 1
    ):
        raise _refused(path, "is not a file that only the store has a name for")


def _refused(path: Path, reason: str) -> StoreRefused:
    return StoreRefused(
        f"{path} {reason}, so nothing in the store is used. Delete the store if you do not know"
        " where it comes from, or name another place for it with store="
    )


def _unsealed(path: Path) -> StoreRefused:
    return StoreRefused(
        f"The store {path} does not carry your seal: an earlier version of wink wrote it, somebody"
        " else planted it, it is damaged, or XDG_STATE_HOME was different then. If it is yours,"
        " adopt it with `wink doctor --adopt-store`; else delete it. Until then nothing in it is"
        " used"
    )


class Store:
    """What is kept beside a workspace, for the one process that has its lock.

    Args:
        root: The workspace.
        path: Where to keep it; beside the workspace by default.
        wait: Seconds to wait for another process that has the workspace open.
        safe: Write through to the disk, so that nothing is lost with the power.

    Raises:
        StoreRefused: It is not certain that this user wrote what is there.
    """

    def __init__(
        self, root: Path, *, path: Path | None = None, wait: float = 0.0, safe: bool = False
    ) -> None:
        self.root = Path(os.path.realpath(root))
        self.safe = safe
        self.path = location_of(self.root) if path is None else Path(os.path.realpath(path))
        if self.path == self.root or self.root in self.path.parents:
            raise ValueError(f"the store {self.path} must not be inside the workspace {self.root}")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = open_store(self.path)
        try:
            Note.read_from(fd, self.path)  # before anything is written into it
            self._lock_fd = take_store_lock(fd, self.root, wait)
        finally:
            os.close(fd)
        self.pid = os.getpid()
        try:
            self._note = self._claim()
            self.tx = self.path / "tx"
            self.scan = self.path / "scan"
            without_default_acl(self.path)
            self.tx.mkdir(mode=0o700, exist_ok=True)
            without_default_acl(self.tx)
            self.objects = Objects(self.path / "objects")
            self._tidy()
            self.tree = Tree(self.tx)
        except BaseException:
            self._unlock()
            raise
        self._count = 0
        self.avoid(self.tree.names(()))

    def seals(self, kind: str) -> Seals:
        """Return the seals for one kind of record in this store."""
        return self._note.seals(kind)

    @property
    def tx_fd(self) -> int:
        """The directory of the open transaction."""
        return self.tree.fd

    def fresh(self, mark: str = "n") -> str:
        """Return a name that nothing in the transaction's directory has."""
        self._count += 1
        return f"{mark}{self._count}"

    def avoid(self, names: Iterable[str]) -> None:
        """Give no name that a killed process has given: these are what it has left."""
        self._count = max([self._count, *(_number(name) for name in names)])

    def stage(self) -> Path:
        """Return a free path, on the store's filesystem, to build something at."""
        return self.tx / self.fresh()

    def left(self, parts: Parts) -> Path:
        """Return a free path in ``left``, for something that belongs at ``parts``."""
        return left_in(self.path, parts)

    @contextlib.contextmanager
    def running(self) -> Generator[int]:
        """Give a descriptor: while a program that was started with it lives, others can tell."""
        import fcntl

        fd = self._open_running()
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            yield fd
        finally:
            os.close(fd)

    def wait_for_programs(self, seconds: float) -> bool:
        """Wait for the programs that a process which is gone has started; False if they live on."""
        import fcntl

        until = SYSTEM_CLOCK.monotonic() + seconds
        pause = threading.Event()
        fd = self._open_running()
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                if SYSTEM_CLOCK.monotonic() >= until:
                    return False
                pause.wait(0.005)
        finally:
            os.close(fd)

    def _open_running(self) -> int:
        # To be locked, not written: commands have it, too.
        return os.open(self.path / "running", os.O_RDONLY | os.O_CREAT, 0o600)

    def close(self) -> None:
        """Let others have the workspace."""
        if self.pid == os.getpid():
            self._unlock()
        self.tree.close()

    def _unlock(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            locks.close(fd)

    def _claim(self) -> Note:
        """Note which workspace this is for, or refuse one that belongs to another."""
        known = Note.read(self.path)
        path, ino = str(self.root), os.stat(self.root).st_ino
        if known is not None and path != known.path and ino != known.ino:
            raise ValueError(
                f"the store {self.path} belongs to the workspace {known.path}, not to"
                f" {self.root}. Give this workspace a store of its own"
            )
        mine = Note(id=os.urandom(8).hex() if known is None else known.id, path=path, ino=ino)
        if mine != known:
            write_note(self.path, mine)
        return mine

    def _tidy(self) -> None:
        """Remove what killed processes have left half made."""
        self.objects.tidy()
        own = Tree(self.path)
        try:
            for name in own.names(()):
                if name.startswith("probe-") or name.endswith(".new"):
                    own.remove_all((name,))
        finally:
            own.close()


def write_note(store: Path, note: Note) -> None:
    """Put the note into a store, in one step."""
    write_whole(store / "root", note.encode())


def write_whole(path: Path, data: bytes) -> None:
    """Make a file hold this, and be on the disk: all of it, or as it was."""
    staged = path.with_name(f"{path.name}.new")
    staged.unlink(missing_ok=True)
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o600)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(staged, path)


def _number(name: str) -> int:
    """Return the number in a name that :meth:`Store.fresh` gave; 0 for any other."""
    return int(name[1:]) if name[1:].isdecimal() else 0


def left_in(store: Path, parts: Parts) -> Path:
    """Return a free path in a store's ``left``, for something that belongs at ``parts``."""
    folder = store / "left"
    folder.mkdir(mode=0o700, exist_ok=True)
    name = parts[-1].encode(errors="surrogateescape")[:120].decode(errors="replace")
    return folder / f"{os.urandom(4).hex()}-{name}"


def location_of(root: Path) -> Path:
    """Return where to keep a workspace's things: beside it, if files can be renamed to there.

    A store that is beside it already stays in use: it may have what repairs the workspace.
    """
    root = Path(os.path.realpath(root))
    parent = root.parent
    beside = parent / f".{root.name}.wink"
    if beside.is_dir() and os.stat(parent).st_dev == os.stat(root).st_dev:
        if _may_write(beside):
            return beside
    elif root != parent and _mount_at(parent) == _mount_at(root) and _may_write(parent):
        return beside
    mark = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    return state_path() / f"{root.name or 'root'}-{mark}"


def _mount_at(directory: Path) -> Mount:
    flags = getattr(os, "O_PATH", os.O_RDONLY)  # it need not be readable
    fd = os.open(directory, flags | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return mount_of(fd)
    finally:
        os.close(fd)


def _may_write(directory: Path) -> bool:
    effective = os.access in os.supports_effective_ids
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=effective)


def take_store_lock(store: int, root: Path, wait: float) -> int:
    """Take the lock, or raise with the name of who has it."""
    begun = SYSTEM_CLOCK.monotonic()
    pause = threading.Event()
    fd = os.open("lock", os.O_RDWR | os.O_CREAT | _NOFOLLOW, 0o600, dir_fd=store)
    try:
        while not locks.take(fd):
            patience = max(wait, _FOR_CHILDREN) if _is_gone(lock_owner(fd)) else wait
            if SYSTEM_CLOCK.monotonic() >= begun + patience:
                raise _locked(fd, root)
            pause.wait(0.02)
        locks.keep_from_forks(fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "since": SYSTEM_CLOCK.time()}).encode(), 0)
    except BaseException:
        locks.close(fd)
        raise
    return fd


_FOR_CHILDREN = 10.0
"""Seconds that the children of a killed owner get to close the lock, as they do once they run."""


def _is_gone(pid: int | None) -> bool:
    """Tell whether an owner has ended: then only a child that it was just starting has its lock."""
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except ProcessLookupError:
        return True
    except OSError:  # it is another user's, or there is no such file on this system
        return False
    return status.rpartition(b") ")[2][:1] in b"ZX"  # nobody has waited for it yet


def _locked(fd: int, root: Path) -> WorkspaceLocked:
    owner = lock_owner(fd)
    who = f"this process ({owner})" if owner == os.getpid() else f"process {owner}"
    return WorkspaceLocked(
        f"{root} is open in {who}. Close it there, or pass wait= to wait for it", owner
    )


def lock_owner(fd: int) -> int | None:
    """Return the process that has noted itself in a lock file; None if that cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(os.pread(fd, 1000, 0))["pid"])
    return None
