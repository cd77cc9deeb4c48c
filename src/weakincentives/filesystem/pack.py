"""The workspace as it was before other programs changed it: a row per path, and the contents.

Small files are concatenated in one file, the pack: creating a file for each would take far longer
than reading them. Large files are copied to separate files, so that they can be restored without a
copy. The rows are in the index, a log of sealed frames.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weakincentives.core.state import Seals
from weakincentives.filesystem.entry import Entry, copy_content, kind_of, new_file
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.tree import read_all, write_all

LARGE = 256 << 10
"""Files from this size on are copied to separate files."""

WASTE = 16 << 20
"""Unused bytes from which on, if more than are in use, the pack is rewritten."""

_FRAME = struct.Struct(">Q")
_OWN = re.compile(r"o[0-9]+")


Place = tuple[str, int, int]
"""A :class:`~weakincentives.filesystem.store.Source` as a plain tuple."""


class Row(NamedTuple):
    """What was at a path."""

    st_mode: int
    mtime_ns: int
    uid: int
    gid: int
    size: int
    ino: int
    nlink: int
    ctime_ns: int
    """0 if times cannot be trusted; then contents are compared."""
    xattrs: tuple[tuple[str, bytes], ...]
    target: str | None
    source: Place | None
    """Where a file's content is; None if it could not be read."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.st_mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.st_mode)

    @property
    def entry(self) -> Entry:
        """The entry, without its content."""
        return Entry(
            kind=kind_of(self.st_mode),
            mode=stat.S_IMODE(self.st_mode),
            mtime_ns=self.mtime_ns,
            uid=self.uid,
            gid=self.gid,
            xattrs=self.xattrs,
            size=self.size,
            ino=self.ino,
            links=self.nlink,
            target=self.target,
            pipe=stat.S_ISFIFO(self.st_mode),
        )


class Pack:
    """The rows and contents in a directory of the store.

    Args:
        folder: The directory; created if missing.
        seals: The store's, so that another workspace's index is refused.
        safe: Sync to disk.
    """

    def __init__(self, folder: Path, seals: Seals, *, safe: bool = False) -> None:
        self.folder = folder
        self.rows: dict[Parts, Row] = {}
        self.is_damaged = False
        """Whether the index is damaged; then there are no rows."""
        self._seals = seals
        self._safe = safe
        self._buffer: list[bytes] = []
        self._uses: dict[Place, int] = {}
        """Reference counts of the contents."""
        self._live = 0
        """Bytes of the pack in use."""
        self.needed = 0
        """Bytes needed to re-create every small file, including the journal."""
        self._unused: set[str] = set()
        """Content files without references."""
        self._index = self._data = -1
        self._size = 0
        folder.mkdir(mode=0o700, exist_ok=True)
        names = os.listdir(folder)
        self._number = max((int(n[1:]) for n in names if _OWN.fullmatch(n)), default=0)
        known = (int(n[6:]) for n in names if n.startswith("index-") and n[6:].isdigit())
        self._generation = max(known, default=0)
        if self._generation:
            self._open()
            self._load()
        else:
            self.reset()

    def close(self) -> None:
        """Close the files."""
        for fd in (self._index, self._data):
            if fd >= 0:
                os.close(fd)
        self._index = self._data = -1

    @property
    def mark(self) -> tuple[int, int]:
        """Generation and size of the index; a shorter one has lost rows."""
        return self._generation, os.fstat(self._index).st_size

    # Contents

    def add(self, reading: int, status: os.stat_result) -> tuple[Place, int]:
        """Add a file's content; returns its place and size. Permanent once the rows are saved."""
        if status.st_size >= LARGE:
            return self._add_large(reading)
        data = read_all(reading, status.st_size)
        return self._append(data, zlib.crc32(data)), len(data)

    def _append(self, data: bytes, check: int) -> Place:
        place = (self._data_name, self._size, check)
        self._buffer.append(data)
        self._size += len(data)
        if len(self._buffer) >= 256:
            self.flush()
        return place

    def _add_large(self, reading: int) -> tuple[Place, int]:
        self._number += 1
        name = f"o{self._number}"
        path = self.folder / name
        try:
            with new_file(None, path) as writing:
                copy_content(reading, writing)
                if self._safe:
                    os.fsync(writing)
                return (name, 0, 0), os.fstat(writing).st_size
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def flush(self) -> None:
        """Write buffered contents."""
        data = b"".join(self._buffer)
        try:
            if data:
                _write_at(self._data, data, self._size - len(data))
        except BaseException:
            self._size -= len(data)
            raise
        finally:
            self._buffer.clear()

    # Rows

    def save(self, rows: Mapping[Parts, Row | None]) -> None:
        """Save rows, None for nothing at a path, and the added contents."""
        try:
            self.flush()
            if not rows:
                return
            size = os.fstat(self._index).st_size
            try:
                self._write_frame(self._index, rows.items())
            except BaseException:
                os.ftruncate(self._index, size)
                raise
        finally:
            self._buffer.clear()
        for parts, row in rows.items():
            self._set(parts, row)

    def abandon(self) -> None:
        """Discard contents added since the last save."""
        self._size -= sum(map(len, self._buffer))
        self._buffer.clear()

    def _set(self, parts: Parts, row: Row | None) -> None:
        before = self.rows.pop(parts, None)
        if row is not None:
            self.rows[parts] = row
            self._count(row, 1)
        if before is not None:
            self._count(before, -1)

    def _count(self, row: Row, change: int) -> None:
        self.needed += change * 512
        source = row.source
        if source is None:
            return
        uses = self._uses.get(source, 0)
        self._uses[source] = uses + change
        if not uses + change:
            del self._uses[source]
        if uses and uses + change:
            return
        if source[0] == self._data_name:
            self._live += change * row.size
            self.needed += change * -(-row.size // 4096) * 4096
        elif change > 0:
            self._unused.discard(source[0])
        else:
            self._unused.add(source[0])

    def _write_frame(self, fd: int, rows: Iterable[tuple[Parts, Row | None]]) -> None:
        plain = [("/".join(parts), None if row is None else tuple(row)) for parts, row in rows]
        # Loaded only with a valid seal, so marshal data is our own.
        frame = self._seals.sealed(marshal.dumps((self._size, plain), 4))
        if self._safe:
            os.fsync(self._data)
        write_all(fd, _FRAME.pack(len(frame)) + frame)
        if self._safe:
            os.fsync(fd)

    def _load(self) -> None:
        left = memoryview(read_all(self._index, os.fstat(self._index).st_size))
        done = 0
        while len(left) >= _FRAME.size:
            end = _FRAME.size + _FRAME.unpack_from(left)[0]
            if end > len(left):
                break  # incomplete after a kill: nothing depends on it
            plain = self._seals.unsealed(bytes(left[_FRAME.size : end]))
            if plain is None:
                self.is_damaged = True
                self._forget()
                return
            self._apply(marshal.loads(plain))
            left, done = left[end:], done + end
        os.ftruncate(self._index, done)
        used = {source[0] for source in self._uses}
        self._unused = {n for n in os.listdir(self.folder) if _OWN.fullmatch(n)} - used

    def _apply(self, frame: tuple[int, list[tuple[str, Any]]]) -> None:
        self._size = frame[0]
        for path, values in frame[1]:
            parts: Parts = tuple(path.split("/")) if path else ()
            self._set(parts, None if values is None else Row._make(values))

    # Space

    def tidy(self) -> None:
        """Remove unused contents. Only between transactions."""
        for name in self._unused:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / name)
        self._unused.clear()
        frames = os.fstat(self._index).st_size
        waste = self._size - self._live
        if waste > max(self._live, WASTE) or frames > WASTE + 1000 * len(self.rows):
            self._rewrite()

    def _rewrite(self) -> None:
        """Copy the contents in use to a new pack with a new index."""
        old, old_data = self.rows, self._data_name
        reading = os.dup(self._data)
        moved: dict[Place, Place] = {}
        try:
            self._begin_generation()
            rows: dict[Parts, Row] = {}
            for parts, row in old.items():
                source = row.source
                if source is not None and source[0] == old_data:
                    if source not in moved:
                        data = os.pread(reading, row.size, source[1])
                        moved[source] = self._append(data, source[2])
                    row = row._replace(source=moved[source])
                rows[parts] = row
            self._forget()
            self._publish(rows)
        finally:
            os.close(reading)

    def reset(self) -> None:
        """Start over with an empty index."""
        self.is_damaged = False
        self._forget()
        self._begin_generation()
        self._publish({})
        for name in os.listdir(self.folder):
            if _OWN.fullmatch(name):
                os.unlink(self.folder / name)

    def _forget(self) -> None:
        self.rows, self._uses = {}, {}
        self._live = self.needed = 0
        self._unused.clear()

    def _begin_generation(self) -> None:
        self.close()
        self._buffer.clear()
        self._generation += 1
        self._size = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._data = os.open(self.folder / self._data_name, flags, 0o600)
        self._index = os.open(self.folder / "new", flags | os.O_APPEND, 0o600)

    def _publish(self, rows: Mapping[Parts, Row]) -> None:
        """Replace the previous index by a complete new one."""
        self.save(dict(rows))
        os.rename(self.folder / "new", self.folder / f"index-{self._generation}")
        self._remove_older()

    def _open(self) -> None:
        index = self.folder / f"index-{self._generation}"
        self._index = os.open(index, os.O_RDWR | os.O_APPEND)
        self._data = os.open(self.folder / self._data_name, os.O_RDWR | os.O_CREAT, 0o600)
        self._remove_older()

    def _remove_older(self) -> None:
        ours = {f"index-{self._generation}", self._data_name}
        for name in os.listdir(self.folder):
            if name.startswith(("index-", "pack-", "new")) and name not in ours:
                os.unlink(self.folder / name)

    @property
    def _data_name(self) -> str:
        return f"pack-{self._generation}"


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
