"""Sessions in files: JSON lines, each with a seal that only this user can make.

The first line is the head. The seal of a save is valid only for this session and this position in
the file. The bytes of ``Media`` are in files of their own next to it, each once, named by their
digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from weakincentives.core import locks
from weakincentives.core.state import SEAL_SIZE, Seals, no_links
from weakincentives.errors import SessionInUse, SnapshotError
from weakincentives.runtime.ledger import OutcomeLedger
from weakincentives.runtime.stores.logs import LogPart, SavePlace, waited
from weakincentives.serde.exact import StoredBytes

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_HEAD = "session"
_MAX_HEAD = 64 << 20
"""Bytes of the first line, whose seal is checked before anything else is read."""
_BLOCK = 64 << 10
"""Bytes that are read first where a file is read from its end."""


class FileStore:
    """Sessions in the files of a directory; the name of a session is that of its file."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def create(self, name: str, head: bytes) -> OpenFileLog:
        """Begin a log in a new file that only its owner can read."""
        path = self._path(name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL) as fd:
            _write(fd, Seals(_HEAD).sealed(head) + b"\n", path)
            return OpenFileLog(path, fd)

    def open(self, name: str, *, wait: float = 0.0) -> OpenFileLog:
        path = self._path(name)

        def take() -> OpenFileLog:
            with _locked(path, os.O_RDWR | os.O_APPEND) as fd:
                return OpenFileLog(path, fd)

        return waited(take, wait)

    def log(self, name: str) -> FileLog:
        return FileLog(self._path(name))

    def names(self) -> list[str]:
        if not self.directory.is_dir():
            return []
        return sorted(each for each in os.listdir(self.directory) if each.endswith(".jsonl"))

    def is_in_use(self, name: str) -> bool:
        fd = os.open(self._path(name), os.O_RDWR | _NOFOLLOW)
        try:
            return locks.is_taken(fd)
        finally:
            os.close(fd)

    def delete(self, name: str) -> bool:
        """Delete a file with everything that belongs to it; False if it is in use.

        That is every file or directory whose name continues its stem, such as its media. What a
        kill leaves of them, the next call deletes.
        """
        from weakincentives.filesystem.tree import remove_path

        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            try:
                with _locked(path, os.O_RDWR) as fd:
                    # Under the lock: another process finds the session, or that it is gone.
                    path.unlink()
            except SessionInUse:
                return False
            locks.close(fd)
        for each in os.listdir(path.parent):
            if each.startswith(f"{path.stem}."):
                remove_path(path.parent / each)
        return True

    def _path(self, name: str) -> Path:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not the name of a file")
        return self.directory / name


class FileLog:
    """The log in a file.

    Raises:
        SnapshotError: It is not the file of a session, or was not written by this user.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb", opener=no_links) as file:
            first = file.readline(_MAX_HEAD)
        if not first.endswith(b"\n"):
            raise SnapshotError(f"{path} contains no session: nothing was saved in it")
        text = Seals(_HEAD).unsealed(first[:-1])
        if text is None:
            raise SnapshotError(
                f"{path} does not carry your seal: it is not the file of a session, an earlier"
                " version of wink or someone else wrote it, or it is damaged. If it is yours,"
                " adopt it: `wink doctor --adopt-store`, or SavedSession.adopt"
            )
        self.head, self.begin = text, len(first)
        self._seals = _seals_after(text)

    @property
    def shown(self) -> str:
        return str(self.path)

    def read(self, start: int) -> LogPart:
        with open(self.path, "rb", opener=no_links) as file:
            file.seek(start)
            lines = file.read().split(b"\n")[:-1]  # the rest is cut short or new
        texts = self._seals.unsealed_lines(lines, start)
        ends = [*accumulate((len(line) + 1 for line in lines), initial=start)][1:]
        part = LogPart(start, texts, ends[: len(texts)])
        if len(texts) < len(lines):
            number = self._number_of(part.end)
            return replace(part, damage=f"line {number} of {self.path} is damaged or not ours")
        return part

    def _number_of(self, place: int) -> int:
        with open(self.path, "rb", opener=no_links) as file:
            return file.read(place).count(b"\n") + 1

    def at(self, places: Iterable[SavePlace]) -> Generator[bytes]:
        with open(self.path, "rb", opener=no_links) as file:
            for place in places:
                file.seek(place.start)
                text = self._seals.unsealed(file.read(place.end - place.start - 1), place.start)
                if text is None:
                    raise SnapshotError(f"{self.path} has changed while it was read")
                yield text

    def media(self, digest: str) -> StoredBytes:
        path = _media_directory(self.path) / digest

        def read() -> bytes:
            with open(path, "rb", opener=no_links) as file:
                return file.read()

        return StoredBytes(str(path), digest, read)


class OpenFileLog(FileLog):
    """The log in a file that this process has locked. A file has no fencing token: it is a lock."""

    token = 0

    def __init__(self, path: Path, fd: int) -> None:
        super().__init__(path)
        self.full_path = str(path.absolute())
        self._fd = fd
        self._size = self.begin
        """The length of the complete lines."""

    @property
    def size(self) -> int:
        """The length of the complete lines: where the next save begins."""
        return self._size

    def lines_from(self, at: int) -> list[str] | None:
        """Return the texts of the saves from a place on; None if no save begins there."""
        part = self.read(at)
        if at > self._size or part.damage:
            return None
        return [text.decode() for text in part.texts]

    def load(self) -> LogPart:
        part = self.read(self.begin).checked()
        self._size = part.end
        return part

    def newest_first(self) -> Generator[bytes]:
        end, block, rest = self._size, _BLOCK, b""
        while end:
            begin = max(end - block, 0)
            data = os.pread(self._fd, end - begin, begin) + rest
            first, *lines = data.split(b"\n")[:-1]
            place = begin + len(data)
            for line in reversed(lines):
                place -= len(line) + 1
                text = self._seals.unsealed(line, place)
                if text is None:
                    raise SnapshotError(f"{self.path} is damaged at byte {place}")
                yield text
            end, block, rest = begin, block * 2, first + b"\n"  # the last one is the head

    def append(self, texts: Sequence[bytes]) -> None:
        """Add lines in one write, completely or not at all."""
        data = _sealed(self._seals, texts, self._size)
        if os.fstat(self._fd).st_size != self._size:
            os.ftruncate(self._fd, self._size)  # drops an incomplete line
        try:
            _write(self._fd, data, self.path)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def replace(self, texts: Sequence[bytes]) -> None:
        """Replace the file by a new one with other saves, under the lock of both."""
        data = _whole(self.head, *texts)
        fd, staged = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.stem}.new-")
        os.close(fd)
        with contextlib.ExitStack() as undo:
            undo.callback(Path(staged).unlink, missing_ok=True)
            with _locked(Path(staged), os.O_RDWR | os.O_APPEND) as fd:
                _write(fd, data, self.path)
                os.fsync(fd)
                os.replace(staged, self.path)
            undo.pop_all()
        _sync_directory(self.path.parent)
        before, self._fd, self._size = self._fd, fd, len(data)
        locks.close(before)

    def store(self, data: bytes) -> str:
        return store_media(self.path, data)

    def ledger(self) -> OutcomeLedger | None:
        """None: the ledger belongs to the workspace, not to one of its sessions."""
        return None

    def confirm(self) -> None:
        """Nothing to do: the lock on the file is ours until it is closed."""

    def close(self) -> None:
        locks.close(self._fd)


def sealed_size(lines: Iterable[str]) -> int:
    """Return how long saves are in a file."""
    return sum(SEAL_SIZE + 2 + len(line.encode()) for line in lines)


def write_file(path: Path, head: bytes, texts: Sequence[bytes]) -> None:
    """Write a log to a new file, which appears complete or not at all."""
    fd, staged = tempfile.mkstemp(dir=path.parent)
    try:
        with open(fd, "wb") as file:
            file.write(_whole(head, *texts))
        os.link(staged, path)  # fails if it exists
    finally:
        os.unlink(staged)


def share_media(path: Path, target: Path, digests: Iterable[str]) -> None:
    """Link, or copy, media of a session into the directory of another file."""
    for digest in digests:
        source = _media_directory(path) / digest
        if source.is_file() and not source.is_symlink():
            _media_directory(target).mkdir(mode=0o700, exist_ok=True)
            try:
                os.link(source, _media_directory(target) / source.name, follow_symlinks=False)
            except OSError:  # not possible here
                store_media(target, source.read_bytes())


def adopt_file(path: Path, checked: Callable[[bytes], bytes]) -> int:
    """Seal the lines of a file that ``checked`` accepts; returns the number of lines lost.

    Lines after the first one that it refuses, with a ValueError, are left out. A copy of the whole
    file stays next to it.
    """
    with _locked(path, os.O_RDWR) as fd:
        data = path.read_bytes()
        texts: list[bytes] = []
        with contextlib.suppress(ValueError):
            texts.extend(map(checked, _perhaps_sealed(data)))
        if not texts:
            raise SnapshotError(f"{path} is not the file of a session")
        copy = path.with_name(f"{path.name}.before-{os.urandom(4).hex()}")
        copy.touch(mode=0o600, exist_ok=False)
        copy.write_bytes(data)
        sealed = _whole(*texts)
        os.pwrite(fd, sealed, 0)
        os.ftruncate(fd, len(sealed))
        os.fsync(fd)
    locks.close(fd)
    return data.count(b"\n") - len(texts)


def _perhaps_sealed(data: bytes) -> Generator[bytes]:
    """Yield the texts of a file's lines, sealed or not, up to the first invalid seal.

    If the first seal is valid, the others must be: only without the key are all invalid.
    """
    lines = data.split(b"\n")[:-1]
    head = Seals(_HEAD).unsealed(lines[0]) if lines else None
    seals, place = _seals_after(head or b""), 0
    for line in lines:
        if place and head is not None and seals.unsealed(line, place) is None:
            return
        yield line if line.startswith(b"{") else line[SEAL_SIZE + 1 :]
        place += len(line) + 1


def _seals_after(head: bytes) -> Seals:
    """Return the seals of the saves that follow a head."""
    return Seals(f"save of session {Seals(_HEAD).seal(head)}")


def _whole(head: bytes, *texts: bytes) -> bytes:
    """Return the content of a file."""
    first = Seals(_HEAD).sealed(head) + b"\n"
    return first + _sealed(_seals_after(head), texts, len(first))


def _sealed(seals: Seals, texts: Iterable[bytes], start: int) -> bytes:
    data = b""
    for text in texts:
        data += seals.sealed(text, start + len(data)) + b"\n"
    return data


def _write(fd: int, data: bytes, path: Path) -> None:
    written = os.write(fd, data)
    if written < len(data):
        raise OSError(f"only {written} of {len(data)} bytes fit into {path}")


def _media_directory(path: Path) -> Path:
    return path.with_suffix(".media")


def store_media(path: Path, data: bytes) -> str:
    """Store bytes of the session in a file, in another file that their digest names."""
    digest, directory = hashlib.sha256(data).hexdigest(), _media_directory(path)
    path = directory / digest
    if path.is_symlink() or not path.is_file() or path.stat().st_size != len(data):
        directory.mkdir(mode=0o700, exist_ok=True)
        if directory.is_symlink():
            raise OSError(f"{directory} is a link")
        fd, staged = tempfile.mkstemp(dir=directory)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            os.replace(staged, path)
        except BaseException:
            os.unlink(staged)
            raise
    return digest


def _sync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every system has this
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _locked(path: Path, flags: int) -> Generator[int]:
    """Open a file and lock it. Both last until ``locks.close``, or until the block raises."""
    while True:
        fd = os.open(path, flags | _NOFOLLOW, 0o600)
        try:
            if not locks.take(fd):
                raise SessionInUse(
                    f"the session in {path} is in use by another process, or open in this one"
                )
            if not os.path.samestat(os.fstat(fd), os.lstat(path)):
                locks.close(fd)  # it was replaced or deleted in the meantime
                continue
            locks.keep_from_forks(fd)
            yield fd
        except BaseException:
            locks.close(fd)
            raise
        return
