"""The store of a workspace: lock, open transaction, saved contents and history."""

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
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from weakincentives.core import locks
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.gate import ProcessLock
from weakincentives.core.state import Seals, claim_store, state_directory, workspace_store
from weakincentives.errors import ContentDamaged, FilesystemError, StoreRefused
from weakincentives.filesystem.entry import checked_digest, copy_content, digest_of, new_file
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.tree import (
    CHUNK,
    Held,
    Mount,
    Tree,
    mount_of,
    read_all,
    remove_tree,
    wait_until,
    without_default_acl,
    write_all,
)

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
            yield from iter(lambda: os.read(fd, CHUNK), b"")


_SOURCE = re.compile("[co][0-9]+|pack-[0-9]+")


def read_exactly(reading: int, size: int) -> bytes:
    """Return the next ``size`` bytes, fewer only at the end."""
    data = os.read(reading, size)
    while len(data) < size and (more := os.read(reading, size - len(data))):
        data += more
    return data


def _content_damaged(path: str) -> ContentDamaged:
    return ContentDamaged(DAMAGED, "its saved content is damaged", path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is kept: the oldest that exceed one of these limits are removed."""

    size: int = 256 << 20
    """Bytes, before compression."""
    count: int = 10_000
    days: float = 90.0
    newest: int = 100
    """How many of the newest stay, whatever their age."""

    def oldest(self, now: float) -> float:
        """Return the time before which something is too old."""
        return now - self.days * 86_400

    def are_exceeded(self, size: int, count: int, oldest: Callable[[], float], now: float) -> bool:
        """Tell whether the oldest of so many must go; ``oldest`` returns its time."""
        if size > self.size or count > (self.count if self.size > 0 else 0):
            return True
        return count > self.newest and oldest() < self.oldest(now)


HISTORY_LIMITS = Limits()


class Objects:
    """Content-addressed files: the same bytes are stored once.

    An object is a file with just its content, or a compressed one, which has a suffix. Both forms
    may exist for a moment. Content is verified against its digest before it is returned.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def _place(self, digest: str) -> str:
        return f"{self.path}/{digest[:2]}/{digest[2:]}"

    def __contains__(self, digest: str) -> bool:
        place = self._place(digest)
        return _is_there(place) or _is_there(place + _COMPRESSED)

    def __iter__(self) -> Iterator[str]:
        """Yield the digests of all objects, in no order; one with both forms may come twice."""
        with contextlib.suppress(FileNotFoundError):
            for folder in os.listdir(self.path):
                if re.fullmatch("[0-9a-f]{2}", folder):
                    for name in os.listdir(self.path / folder):
                        if named := _OBJECT.fullmatch(name):
                            yield folder + named[1]

    def open(self, digest: str) -> int:
        """Return a descriptor for reading; raises ContentDamaged if the digest does not match."""
        try:
            return self._open_plain(checked_digest(digest))
        except FileNotFoundError:
            # Compressed before this content was removed, so one of the two forms is there.
            return _nameless_file(self._decompressed(digest))

    def read(self, digest: str) -> bytes:
        """Return the content; raises ContentDamaged if the digest does not match."""
        try:
            with Held(self._open_plain(checked_digest(digest))) as fd:
                return read_all(fd, os.fstat(fd).st_size)
        except FileNotFoundError:
            return self._decompressed(digest)

    def _open_plain(self, digest: str) -> int:
        fd = os.open(self._place(digest), os.O_RDONLY | _NOFOLLOW)
        try:
            if digest_of(fd) != digest:
                raise _content_damaged(self._place(digest))
            os.lseek(fd, 0, os.SEEK_SET)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _decompressed(self, digest: str) -> bytes:
        place = self._place(digest) + _COMPRESSED
        with Held(os.open(place, os.O_RDONLY | _NOFOLLOW)) as fd:
            data = read_exactly(fd, MAX_COMPRESSED)
        with contextlib.suppress(zlib.error):  # then the digest does not match
            data = zlib.decompressobj().decompress(data, MAX_COMPRESSED)
        if hashlib.sha256(data).hexdigest() != digest:
            raise _content_damaged(place)
        return data

    def add(self, content: bytes | int, *, safe: bool = False) -> str:
        """Store bytes or the remaining content of a descriptor; returns the digest."""
        if isinstance(content, bytes):
            digest = hashlib.sha256(content).hexdigest()
            if digest in self:
                return digest
            return self.add_chunks([content], safe=safe)
        return self.add_chunks(iter(lambda: os.read(content, CHUNK), b""), safe=safe)

    def add_chunks(
        self, chunks: Iterable[bytes], *, expected: str | None = None, safe: bool = False
    ) -> str:
        """Store content that comes in pieces; returns the digest.

        Raises:
            ContentDamaged: It is not the expected one; nothing is stored.
        """
        hashed = hashlib.sha256()
        staged = self._stage(_hashing(chunks, hashed.update), safe=safe)
        if expected not in (None, hashed.hexdigest()):
            staged.unlink()
            raise _content_damaged(self._place(str(expected)))
        self.take(staged, hashed.hexdigest())
        return hashed.hexdigest()

    def _stage(self, chunks: Iterable[bytes], *, safe: bool) -> Path:
        """Write a new file, which :meth:`tidy` removes after a kill."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        staged = self.path / f"new-{os.urandom(8).hex()}"
        try:
            with new_file(None, staged) as fd:
                for data in chunks:
                    write_all(fd, data)
                if safe:
                    os.fsync(fd)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        return staged

    def take(self, source: str | Path, digest: str) -> None:
        """Move a file without other hard links to the object with this digest."""
        place = self._place(digest)
        try:
            os.rename(source, place)
        except FileNotFoundError:
            Path(place).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.rename(source, place)

    def compress(self, digest: str, *, safe: bool = False) -> bool:
        """Compress an object if that frees at least a fifth of its blocks; tell whether it did.

        The compressed file is complete before the other one is removed. A damaged or missing
        object stays as it is.
        """
        place = self._place(digest)
        try:
            status = os.lstat(place)
            size = status.st_size
            # A file that takes less than its size has holes, or its filesystem compresses.
            if not may_compress(size) or status.st_blocks * 512 < size:
                return False
            with Held(self._open_plain(digest)) as fd:
                data = zlib.compress(read_exactly(fd, size), 1)
        except (FileNotFoundError, ContentDamaged):
            return False
        if _blocks(len(data)) > 0.8 * _blocks(size):
            return False
        staged = self._stage([data], safe=safe)
        os.rename(staged, place + _COMPRESSED)
        if safe:
            with Held(os.open(os.path.dirname(place), os.O_RDONLY)) as above:
                os.fsync(above)
        os.unlink(place)
        return True

    def remove(self, digest: str) -> None:
        """Remove an object; a missing one is fine."""
        for place in (self._place(digest), self._place(digest) + _COMPRESSED):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place)

    def tidy(self) -> None:
        """Remove leftovers of killed processes; refuse symbolic links."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as found:
            for each in found:
                if each.is_symlink():
                    raise _refused(self.path / each.name, "is a symbolic link")
                if each.name.startswith("new-"):
                    os.unlink(each)


_COMPRESSED = ".z"
_OBJECT = re.compile(r"([0-9a-f]{62})(?:\.z)?")
MAX_COMPRESSED = 4 << 20
"""Bytes; larger objects stay as they are, so that filesystems with shared blocks can clone them."""
_BLOCK = 4096


def _blocks(size: int) -> int:
    """Return how many blocks of a disk so many bytes take, on most filesystems."""
    return -(-size // _BLOCK)


def may_compress(size: int) -> bool:
    """Tell whether content of this size is worth an attempt: one block cannot become less."""
    return _BLOCK < size <= MAX_COMPRESSED


def _nameless_file(data: bytes) -> int:
    """Return a descriptor of a temporary file with these bytes, at its start."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("wink")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        write_all(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _hashing(chunks: Iterable[bytes], update: Callable[[bytes], object]) -> Iterator[bytes]:
    for data in chunks:
        update(data)
        yield data


_VERSION = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Which workspace a store is for, sealed by this user."""

    id: str
    """Unique to each store: seals of one store are invalid in another."""
    path: str
    ino: int
    version: int = _VERSION
    """The store format."""

    def seals(self, kind: str) -> Seals:
        return Seals(f"{kind} {self.id}")

    def encode(self) -> bytes:
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
        if values["version"] != _VERSION:
            raise _refused(
                store, f"has the format {values['version']}, and this wink reads {_VERSION} only"
            )
        return cls(**values)


_NOTE = "store"
_BEFORE_THE_NOTE = frozenset(
    {"lock", "turn", "root.new", "runs", "outcomes.jsonl", "outcomes.jsonl.lock"}
)
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
        f"The store {path} does not carry your seal: somebody else planted it, it is damaged, or"
        " XDG_STATE_HOME has changed. If it is yours, adopt it"
        " with `wink doctor --adopt-store`; otherwise delete it. Until then nothing in it is used"
    )


_READERS, _CHANGE = 0, 1
_FOR_READERS, FOR_CHANGES = 30.0, 600.0
"""Seconds to wait for commands on branches to end, and for calls that change the directory."""


class DirectoryLock:
    """Keeps the changes of one process and the reads of others apart, for one workspace.

    Both sides say that they are there, and then look for the other: a change while the directory
    holds uncommitted changes, a reader while a branch reads it or a command runs over it. A reader
    that finds a change goes back and waits, so a change has its turn.
    """

    _changing: ClassVar[dict[str, int]] = {}
    """The threads of this process that are changing a workspace, by its lock."""

    def __init__(self, store: Path) -> None:
        self.path = f"{store}/directory.lock"
        self._fd = -1
        self._is_changing = False
        self._readers = 0
        self._counting = threading.Lock()

    def begin_change(self) -> None:
        """Wait until the directory has no readers, and keep readers out.

        Raises:
            FilesystemError: A command of a branch still runs.
        """
        if self._fd < 0:
            self.open()
        self._begin()
        try:
            if locks.is_taken(self._fd, byte=_READERS):
                self._wait(lambda: not locks.is_taken(self._fd, byte=_READERS), _FOR_READERS)
        except BaseException:
            self._end()
            raise
        self._is_changing = True
        self._changing[self.path] = threading.get_ident()

    def end_change(self) -> None:
        """Let others read. May be called again."""
        if self._is_changing:
            self._is_changing = False
            self._changing.pop(self.path, None)
            self._end()

    @property
    def is_ours(self) -> bool:
        """Whether this thread is changing the directory."""
        return self._changing.get(self.path) == threading.get_ident()

    @contextlib.contextmanager
    def reading(self, patience: float = FOR_CHANGES) -> Generator[None]:
        """Read the directory in the block; another process does not change it meanwhile.

        Raises:
            FilesystemError: A call is changing it, and has not ended after so many seconds.
        """
        with self._counting:
            if not self._readers:
                self.open()
                self._wait(self._enter, patience)
            self._readers += 1
        try:
            yield
        finally:
            with self._counting:
                self._readers -= 1
                if not self._readers:
                    locks.release(self._fd, byte=_READERS)

    def close(self) -> None:
        self.end_change()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            locks.close(fd)

    def open(self) -> None:
        """Open the lock's file, unless it is open."""
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | _NOFOLLOW, 0o600)
            locks.keep_from_forks(self._fd)
            # Shared: the lock of the workspace keeps changes apart, and one may be left over.
            self._begin = locks.taker(self._fd, byte=_CHANGE, wait=True, shared=True)
            self._end = locks.releaser(self._fd, byte=_CHANGE)

    def _enter(self) -> bool:
        locks.take(self._fd, byte=_READERS, shared=True)
        if not locks.is_taken(self._fd, byte=_CHANGE):
            return True
        locks.release(self._fd, byte=_READERS)
        return False

    def _wait(self, take: Callable[[], bool], seconds: float) -> None:
        if not wait_until(take, seconds):
            raise FilesystemError(
                "Another agent is using this directory: a command runs on a branch, or a call"
                " changes files. Try again when it has ended"
            )


class Store:
    """The store of a workspace, for a process that has the workspace open.

    It opens with the lock held, so no other process changes anything.

    Args:
        root: The workspace.
        path: The location; in the state directory by default.
        wait: Seconds to wait for another process: see ``ProcessLock``.
        safe: Sync to disk, to survive a power loss.
        shared: Whether other processes may take the lock while this one has the store open.

    Raises:
        StoreRefused: The store is not provably written by this user.
    """

    def __init__(
        self,
        root: Path,
        *,
        path: Path | None = None,
        wait: float | None = None,
        safe: bool = False,
        shared: bool = False,
    ) -> None:
        self.root = Path(os.path.realpath(root))
        self.safe = safe
        if path is None:
            state_directory()
        self.path = location_of(self.root) if path is None else Path(os.path.realpath(path))
        if self.path == self.root or self.root in self.path.parents:
            raise ValueError(
                f"the store {self.path} must not be inside the workspace {self.root}. Set"
                " XDG_STATE_HOME to a directory outside of it, or give store="
            )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with Held(open_store(self.path)) as fd:
            Note.read_from(fd, self.path)  # before anything is written
            self.lock = ProcessLock(fd, self.root, wait=wait, alone=not shared)
        self.pid = os.getpid()
        self.own = self.path / _OPEN / os.urandom(8).hex()
        """A directory for what only this process uses; it has a lock while the store is open."""
        self._own_lock = -1
        try:
            self.note = self._claim()
            self.tx = self.path / "tx"
            self.scan = self.path / "scan"
            without_default_acl(self.path)
            self.tx.mkdir(mode=0o700, exist_ok=True)
            without_default_acl(self.tx)
            self.objects = Objects(self.path / "objects")
            self.directory = DirectoryLock(self.path)
            self.directory.open()
            self._tidy()
            self._make_own()
            self.tree = Tree(self.tx)
            self.tx_fd = self.tree.fd
        except BaseException:
            self._leave()
            raise
        self._count = 0
        self.avoid(self.tree.names(()))

    def seals(self, kind: str) -> Seals:
        return self.note.seals(kind)

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

        def have_ended() -> bool:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        with Held(self._open_running()) as fd:
            return wait_until(have_ended, seconds)

    def _open_running(self) -> int:
        # Opened for locking only: commands inherit it.
        return os.open(self.path / "running", os.O_RDONLY | os.O_CREAT, 0o600)

    def close(self) -> None:
        """Release the workspace."""
        if self.pid == os.getpid():
            self.directory.close()
            self._leave()
        self.tree.close()

    def _leave(self) -> None:
        self.lock.close()
        # What an abandoned call still uses stays, for the next process that opens the store.
        with contextlib.suppress(OSError):
            for folder in (self.own / "commands", self.own / "views"):
                with contextlib.suppress(FileNotFoundError):
                    folder.rmdir()
            os.unlink(self.own / _LOCK)
            self.own.rmdir()
        fd, self._own_lock = self._own_lock, -1
        if fd >= 0:
            locks.close(fd)

    def _make_own(self) -> None:
        """Make this process's directory and lock it; remove those of dead processes."""
        for folder, pid in _opened(self.path):
            if pid is None:
                _discard(folder)
        self.own.mkdir(mode=0o700, parents=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOFOLLOW
        fd = self._own_lock = os.open(self.own / _LOCK, flags, 0o600)
        locks.keep_from_forks(fd)
        locks.take(fd)
        os.pwrite(fd, b"%d" % self.pid, 0)

    def others(self) -> tuple[int, ...]:
        """Return the ids of the other processes that have the workspace open."""
        return tuple(pid for folder, pid in _opened(self.path) if pid and folder != self.own)

    def _claim(self) -> Note:
        """Note which workspace this is for; refuse the store of another."""
        known = Note.read(self.path)
        path, ino = str(self.root), os.stat(self.root).st_ino
        if known is None and os.path.exists(self.root.parent / f".{self.root.name}.wink" / "root"):
            logger.warning(
                "%s is a store of an earlier version. It is left untouched, and its calls cannot be"
                " undone any more; delete it when you like",
                self.root.parent / f".{self.root.name}.wink",
            )
        if known is not None and path != known.path and ino != known.ino:
            raise ValueError(
                f"the store {self.path} belongs to the workspace {known.path}, not to"
                f" {self.root}. Use a separate store for each workspace"
            )
        mine = Note(id=os.urandom(8).hex() if known is None else known.id, path=path, ino=ino)
        if mine != known:
            # Before the note: after a kill between the two, both are done again.
            claim_store(path, str(self.path), None if known is None else known.path)
            write_note(self.path, mine)
        return mine

    def _tidy(self) -> None:
        self.objects.tidy()
        with contextlib.closing(Tree(self.path)) as own:
            for name, status in own.scan(()):
                # Another process may be trying whether an overlay works.
                is_old = SYSTEM_CLOCK.time() - status.st_mtime > _PROBED
                if (name.startswith("probe-") and is_old) or name.endswith(".new"):
                    own.remove_all((name,))


_PROBED = 60.0
"""Seconds after which a trial of an overlay has ended."""
_OPEN = "open"
"""The directory with one directory for each process that has the store open."""
_LOCK = "lock"


def present_in(
    root: str | os.PathLike[str], *, store: str | os.PathLike[str] | None = None
) -> tuple[int, ...]:
    """Return the ids of the processes that have a workspace open; takes no lock."""
    return tuple(pid for _, pid in _opened(store_of(root, store)) if pid)


def _opened(store: Path) -> Iterator[tuple[Path, int | None]]:
    """Yield the directories of processes, each with the process, or None if it is gone."""
    try:
        names = os.listdir(store / _OPEN)
    except OSError:
        return
    for name in names:
        yield store / _OPEN / name, _owner_of(store / _OPEN / name)


def _owner_of(folder: Path) -> int | None:
    flags = os.O_RDWR | _NOFOLLOW | getattr(os, "O_NONBLOCK", 0)
    with contextlib.suppress(OSError, ValueError), Held(os.open(folder / _LOCK, flags)) as fd:
        if locks.is_taken(fd):
            return int(os.pread(fd, 20, 0))
    return None


def _discard(folder: Path) -> None:
    """Remove what a killed process has left: nothing of it has reached the workspace."""
    try:
        if _mount_at(folder) != _mount_at(folder.parent):
            raise OSError(errno.EBUSY, "something is mounted there")
        remove_tree(folder)
    except Exception as error:
        logger.warning("%s could not be removed: %s", folder, error)


def write_note(store: Path, note: Note) -> None:
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


def store_of(root: str | os.PathLike[str], store: str | os.PathLike[str] | None) -> Path:
    """Return the store of a workspace: the given one, or the default."""
    return location_of(Path(root)) if store is None else Path(os.path.realpath(store))


def location_of(root: Path) -> Path:
    """Return the default store of a workspace, in the user's private state directory."""
    return Path(workspace_store(os.path.realpath(root)))


def _mount_at(directory: Path) -> Mount:
    flags = getattr(os, "O_PATH", os.O_RDONLY)  # works without read permission
    with Held(os.open(directory, flags | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        return mount_of(fd)


_EFFECTIVE = os.access in os.supports_effective_ids


def _is_there(path: str) -> bool:
    """Tell whether a file exists; half the time of ``os.path.exists`` if it does not."""
    return os.access(path, os.F_OK, effective_ids=_EFFECTIVE)
