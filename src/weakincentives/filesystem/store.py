"""The store beside a workspace: lock, open transaction, saved contents and history."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import threading
import zlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from weakincentives import locks
from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.errors import ContentDamaged, StoreRefused, WorkspaceLocked
from weakincentives.filesystem.entry import checked_digest, copy_content, digest_of, new_file
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.tree import (
    CHUNK,
    Held,
    Mount,
    Tree,
    mount_of,
    read_all,
    without_default_acl,
    write_all,
)
from weakincentives.state import Seals, state_path

logger = logging.getLogger("weakincentives.filesystem")

DAMAGED = errno.EBADMSG
"""The errno for saved content that is damaged."""


# Names in records are checked before use: a seal proves who wrote a record, not that it is valid.


def checked_name(name: object) -> str:
    """Return a plain file name; raises ValueError for anything else."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"invalid name: {name!r}")
    return name


def checked_parts(path: object) -> Parts:
    """Return the parts of a relative path; raises ValueError if it leads elsewhere."""
    if not isinstance(path, str):
        raise ValueError(f"invalid path: {path!r}")
    return tuple(map(checked_name, path.split("/"))) if path else ()


class Source(NamedTuple):
    """Where the store has the previous content of a file changed in place or by a program."""

    name: str
    """A copy in the transaction's directory, a file in the scan's directory, or a pack."""
    offset: int = 0
    check: int = 0
    """The checksum of content in a pack."""

    @classmethod
    def decode(cls, values: Any) -> Source:
        """Return a decoded source; raises ValueError for an invalid name."""
        name, offset, check = values
        if not isinstance(name, str) or not _SOURCE.fullmatch(name):
            raise ValueError(f"invalid content file: {name!r}")
        return cls(name, int(offset), int(check))

    def path(self, store: Path, size: int | None = None) -> str | None:
        """Return the file with just this content; None if it is in a pack.

        Raises:
            ContentDamaged: It has the wrong size.
        """
        if self.name.startswith("pack-"):
            return None
        if not self.name.startswith("o"):
            return f"{store}/tx/{self.name}"
        path = f"{store}/scan/{self.name}"
        # No checksum: reading a large file would take as long as copying it.
        if size is not None and os.lstat(path).st_size != size:
            raise _content_damaged(path)
        return path

    def read(self, store: Path, size: int) -> bytes:
        """Return the content."""
        return b"".join(self._chunks(store, size))

    def fill(self, store: Path, size: int, writing: int) -> None:
        """Write the content to an empty file; holes stay holes."""
        own = self.path(store, size)
        if own is None:
            write_all(writing, self.read(store, size))
            return
        with Held(os.open(own, os.O_RDONLY | _NOFOLLOW)) as reading:
            copy_content(reading, writing)

    def is_in(self, store: Path, size: int, reading: int) -> bool:
        """Tell whether the remaining content of a descriptor is this."""
        for data in self._chunks(store, size):
            if read_exactly(reading, len(data)) != data:
                return False
        return not os.read(reading, 1)

    def _chunks(self, store: Path, size: int) -> Iterator[bytes]:
        own = self.path(store)
        path = own or f"{store}/scan/{self.name}"
        with Held(os.open(path, os.O_RDONLY | _NOFOLLOW)) as fd:
            if own is None:
                data = os.pread(fd, size, self.offset)
                if len(data) != size or zlib.crc32(data) != self.check:
                    raise _content_damaged(path)
                yield data
                return
            while data := os.read(fd, CHUNK):
                yield data


_SOURCE = re.compile("[co][0-9]+|pack-[0-9]+")


def read_exactly(reading: int, size: int) -> bytes:
    """Return the next ``size`` bytes, fewer only at the end."""
    data = os.read(reading, size)
    while len(data) < size and (more := os.read(reading, size - len(data))):
        data += more
    return data


def _content_damaged(path: str) -> ContentDamaged:
    return ContentDamaged(DAMAGED, "its saved content is damaged", path)


class Objects:
    """Content-addressed files: the same bytes are stored once.

    Content is verified against its digest before it is returned.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def _place(self, digest: str) -> str:
        return f"{self._path}/{digest[:2]}/{digest[2:]}"

    def __contains__(self, digest: str) -> bool:
        return os.path.exists(self._place(digest))

    def open(self, digest: str) -> int:
        """Return a descriptor for reading; raises ContentDamaged if the digest does not match."""
        fd = os.open(self._place(checked_digest(digest)), os.O_RDONLY | _NOFOLLOW)
        try:
            if digest_of(fd) != digest:
                raise ContentDamaged(DAMAGED, "its saved content is damaged", self._place(digest))
            os.lseek(fd, 0, os.SEEK_SET)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read(self, digest: str) -> bytes:
        """Return the content; raises ContentDamaged if the digest does not match."""
        with Held(self.open(digest)) as fd:
            return read_all(fd, os.fstat(fd).st_size)

    def add(self, content: bytes | int, *, safe: bool = False) -> str:
        """Store bytes or the remaining content of a descriptor; returns the digest."""
        if isinstance(content, bytes):
            digest = hashlib.sha256(content).hexdigest()
            if digest in self:
                return digest
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        staged = self._path / f"new-{os.urandom(8).hex()}"
        hashed = hashlib.sha256()
        chunks = [content] if isinstance(content, bytes) else _read_chunks(content)
        try:
            with new_file(None, staged) as fd:
                for data in chunks:
                    hashed.update(data)
                    write_all(fd, data)
                if safe:
                    os.fsync(fd)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        self.take(staged, hashed.hexdigest())
        return hashed.hexdigest()

    def take(self, source: str | Path, digest: str) -> None:
        """Move a file without other hard links to the object with this digest."""
        place = self._place(digest)
        try:
            os.rename(source, place)
        except FileNotFoundError:
            Path(place).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.rename(source, place)

    def remove(self, digest: str) -> None:
        """Remove an object; a missing one is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._place(digest))

    def tidy(self) -> None:
        """Remove leftovers of killed processes; refuse symbolic links."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._path) as found:
            for each in found:
                if each.is_symlink():
                    raise _refused(self._path / each.name, "is a symbolic link")
                if each.name.startswith("new-"):
                    os.unlink(each)


def _read_chunks(reading: int) -> Iterator[bytes]:
    while data := os.read(reading, CHUNK):
        yield data


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Which workspace a store is for, sealed by this user."""

    id: str
    """Unique to each store: seals of one store are invalid in another."""
    path: str
    ino: int
    version: int = 3
    """The store format. Version 1 had no seals; records of version 2 can still be read."""

    def seals(self, kind: str) -> Seals:
        """Return the seals for one kind of record."""
        return Seals(f"{kind} {self.id}")

    def encode(self) -> bytes:
        """Return the sealed note."""
        return Seals(_NOTE).sealed(json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, store: Path) -> Note | None:
        """Return the note of a store; None if there is no store or it is empty.

        Raises:
            StoreRefused: The store is not provably written by this user.
        """
        with contextlib.suppress(FileNotFoundError), Held(open_store(store)) as fd:
            return cls.read_from(fd, store)
        return None

    @classmethod
    def read_from(cls, fd: int, store: Path) -> Note | None:
        """Like :meth:`read`, for an open store."""
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
        if values["version"] not in _READABLE:
            raise _refused(
                store, f"has version {values['version']}; this wink reads up to {_READABLE[-1]}"
            )
        return cls(**values)


_READABLE = (2, 3)
_NOTE = "store"
_BEFORE_THE_NOTE = frozenset({"lock", "root.new", "runs", "outcomes.jsonl", "outcomes.jsonl.lock"})
"""Files that may exist without a note: leftovers of a kill, or files with their own seals."""
_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC if os.name == "posix" else 0


def open_store(path: Path) -> int:
    """Open a store that only this user can have written; raises StoreRefused otherwise."""
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
        raise _refused(path, "is hard-linked elsewhere or not a regular file")


def _refused(path: Path, reason: str) -> StoreRefused:
    return StoreRefused(
        f"{path} {reason}, so nothing in the store is used. Delete the store if you do not know"
        " where it comes from, or choose another place with store="
    )


def _unsealed(path: Path) -> StoreRefused:
    return StoreRefused(
        f"The store {path} does not carry your seal: an earlier version of wink wrote it, somebody"
        " else planted it, it is damaged, or XDG_STATE_HOME has changed. If it is yours, adopt it"
        " with `wink doctor --adopt-store`; otherwise delete it. Until then nothing in it is used"
    )


class Store:
    """The store of a workspace, for the one process that holds its lock.

    Args:
        root: The workspace.
        path: The location; beside the workspace by default.
        wait: Seconds to wait for another process that has the workspace open.
        safe: Sync to disk, to survive a power loss.

    Raises:
        StoreRefused: The store is not provably written by this user.
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
        with Held(open_store(self.path)) as fd:
            Note.read_from(fd, self.path)  # before anything is written
            self._lock_fd = take_store_lock(fd, self.root, wait)
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
            self.tx_fd = self.tree.fd
        except BaseException:
            self._unlock()
            raise
        self._count = 0
        self.avoid(self.tree.names(()))

    def seals(self, kind: str) -> Seals:
        """Return the seals for one kind of record."""
        return self._note.seals(kind)

    def fresh(self, mark: str = "n") -> str:
        """Return an unused name for the scratch directories."""
        self._count += 1
        return f"{mark}{self._count}"

    def avoid(self, names: Iterable[str]) -> None:
        """Skip names that a killed process has used."""
        self._count = max([self._count, *(_number(name) for name in names)])

    def left(self, parts: Parts) -> Path:
        """Return a free path in ``left`` for the entry at ``parts``."""
        return left_in(self.path, parts)

    @contextlib.contextmanager
    def running(self) -> Generator[int]:
        """Yield a descriptor to pass to programs: others can tell while one of them is running."""
        import fcntl

        with Held(self._open_running()) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH)
            yield fd

    def wait_for_programs(self, seconds: float) -> bool:
        """Wait for programs of a killed process; False if some are still running."""
        import fcntl

        until = SYSTEM_CLOCK.monotonic() + seconds
        pause = threading.Event()
        with Held(self._open_running()) as fd:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                if SYSTEM_CLOCK.monotonic() >= until:
                    return False
                pause.wait(0.005)

    def _open_running(self) -> int:
        # Opened for locking only: commands inherit it.
        return os.open(self.path / "running", os.O_RDONLY | os.O_CREAT, 0o600)

    def close(self) -> None:
        """Release the workspace."""
        if self.pid == os.getpid():
            self._unlock()
        self.tree.close()

    def _unlock(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            locks.close(fd)

    def _claim(self) -> Note:
        """Note which workspace this is for; refuse the store of another."""
        known = Note.read(self.path)
        path, ino = str(self.root), os.stat(self.root).st_ino
        if known is not None and path != known.path and ino != known.ino:
            raise ValueError(
                f"the store {self.path} belongs to the workspace {known.path}, not to"
                f" {self.root}. Use a separate store for each workspace"
            )
        mine = Note(id=os.urandom(8).hex() if known is None else known.id, path=path, ino=ino)
        if mine != known:
            write_note(self.path, mine)
        return mine

    def _tidy(self) -> None:
        """Remove unfinished files of killed processes."""
        self.objects.tidy()
        own = Tree(self.path)
        try:
            for name in own.names(()):
                if name.startswith("probe-") or name.endswith(".new"):
                    own.remove_all((name,))
        finally:
            own.close()


def write_note(store: Path, note: Note) -> None:
    """Write the note of a store atomically."""
    write_whole(store / "root", note.encode())


def write_whole(path: Path, data: bytes, *, safe: bool = True) -> None:
    """Replace a file atomically; ``safe`` syncs it to disk."""
    staged = path.with_name(f"{path.name}.new")
    staged.unlink(missing_ok=True)
    with new_file(None, staged) as fd:
        write_all(fd, data)
        if safe:
            os.fsync(fd)
    os.rename(staged, path)


def _number(name: str) -> int:
    """Return the number in a name from :meth:`Store.fresh`; 0 for any other name."""
    return int(name[1:]) if name[1:].isdecimal() else 0


def left_in(store: Path, parts: Parts) -> Path:
    """Return a free path in a store's ``left`` for the entry at ``parts``."""
    folder = store / "left"
    folder.mkdir(mode=0o700, exist_ok=True)
    name = parts[-1].encode(errors="surrogateescape")[:120].decode(errors="replace")
    return folder / f"{os.urandom(4).hex()}-{name}"


def location_of(root: Path) -> Path:
    """Return the default store of a workspace: beside it, if files can be renamed to there.

    An existing store beside it stays in use: it may be needed for recovery.
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
    flags = getattr(os, "O_PATH", os.O_RDONLY)  # works without read permission
    with Held(os.open(directory, flags | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        return mount_of(fd)


def _may_write(directory: Path) -> bool:
    effective = os.access in os.supports_effective_ids
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=effective)


def take_store_lock(store: int, root: Path, wait: float) -> int:
    """Take the lock, or raise with the process that holds it."""
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
"""Seconds to wait for children of a killed owner, which close the lock once they run."""


def _is_gone(pid: int | None) -> bool:
    """Tell whether an owner has ended: then only a child it was starting holds the lock."""
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except ProcessLookupError:
        return True
    except OSError:  # another user's process, or no /proc
        return False
    return status.rpartition(b") ")[2][:1] in b"ZX"  # a zombie


def _locked(fd: int, root: Path) -> WorkspaceLocked:
    owner = lock_owner(fd)
    who = f"this process ({owner})" if owner == os.getpid() else f"process {owner}"
    return WorkspaceLocked(
        f"{root} is open in {who}. Close it there, or pass wait= to wait for it", owner
    )


def lock_owner(fd: int) -> int | None:
    """Return the process id in a lock file; None if unreadable."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(os.pread(fd, 1000, 0))["pid"])
    return None
