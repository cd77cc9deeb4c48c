"""The journal's records and the file they are in: what was changed, and how to undo it."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from weakincentives.filesystem.confined import Ident, write_all
from weakincentives.filesystem.protocol import Parts
from weakincentives.filesystem.store import Entry, Store

__all__ = ["Journal", "Record", "Source", "read_journal"]


_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: every change needs it


class Source(NamedTuple):
    """Where the store has a content that a program may have changed."""

    name: str
    """A file in the folder of the scan."""
    offset: int
    check: int
    """The checksum of one that is in a file with others."""


@dataclass(slots=True, kw_only=True)
class Record:
    """One change, and what undoing it takes."""

    op: str
    """put, again, edit, gone, moved, made, attributes, found, external or commit."""
    path: Parts = ()
    origin: Parts | None = None
    """Of something moved: where it was."""
    kept: str | None = None
    """The old thing's name in the room."""
    copy: str | None = None
    """The name, in the transaction's directory, of a copy of the content of what may be changed in
    place."""
    before: Entry | None = None
    old: Ident | None = None
    """What was there; None for nothing."""
    new: Ident | None = None
    """What we put there; None for nothing, or for a directory."""
    room: Parts | None = None
    """The directory that has ``kept``; None for the transaction's own, in the store."""
    times: tuple[tuple[Parts, int], ...] = ()
    """Directories that this was the first to change, with their times before."""
    away: bool = False
    """Whether ``kept`` is the thing itself, taken away, and not a second name of it or a copy."""
    twin: Parts | None = None
    """Of something found: another name of the same file, which is brought back before this one."""
    source: Source | None = None
    """Of a file that was found changed: its content before."""
    commit: dict[str, Any] | None = None
    offset: int = 0
    """Where in the journal the record begins."""
    end: int = 0
    """Where in the journal the next one begins."""

    def encode(self) -> bytes:
        """Return the record as a line with a checksum."""
        values = [
            self.op,
            "/".join(self.path),
            None if self.origin is None else "/".join(self.origin),
            self.kept,
            self.copy,
            None if self.before is None else self.before.encode(),
            self.old,
            self.new,
            None if self.room is None else "/".join(self.room),
            [["/".join(parts), mtime] for parts, mtime in self.times],
            self.away,
            self.commit,
            None if self.twin is None else "/".join(self.twin),
            self.source,
        ]
        text = _encode(values).encode()
        return b"%08x %s\n" % (zlib.crc32(text), text)

    @classmethod
    def decode(cls, line: bytes, offset: int) -> Record | None:
        """Return the record in a line; None for one that was not written to its end."""
        mark, _, text = line.partition(b" ")
        if not line.endswith(b"\n") or mark != b"%08x" % zlib.crc32(text[:-1]):
            return None
        values = json.loads(text)
        op, path, origin, kept, copy, before, old, new, room, times, away, commit = values[:12]
        twin, source = [*values[12:], None, None][:2]  # older ones have none
        return cls(
            op=op,
            path=_split(path),
            origin=None if origin is None else _split(origin),
            kept=kept,
            copy=copy,
            before=None if before is None else Entry.decode(before),
            old=None if old is None else Ident(*old),
            new=None if new is None else Ident(*new),
            room=None if room is None else _split(room),
            times=tuple((_split(parts), mtime) for parts, mtime in times),
            away=away,
            twin=None if twin is None else _split(twin),
            source=None if source is None else Source(*source),
            commit=commit,
            offset=offset,
            end=offset + len(line),
        )


def _split(text: str) -> Parts:
    return tuple(text.split("/")) if text else ()


def read_journal(
    path: Path,
) -> tuple[list[Record], Literal["whole", "short", "torn", "broken"]]:
    """Return a journal's records up to the first that cannot be read, and what that means.

    A short journal ends in a record that was not written to its end, so its change was not made.
    A torn one ends in a record that is damaged. One with more records after that is broken: no
    process that was killed leaves it so.
    """
    records: list[Record] = []
    offset = 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as lines:
        for line in lines:
            record = Record.decode(line, offset)
            if record is None:
                broken = any(Record.decode(later, 0) is not None for later in lines)
                torn = "torn" if line.endswith(b"\n") else "short"
                return records, "broken" if broken else torn
            records.append(record)
            offset += len(line)
    return records, "whole"


class Journal:
    """The file a transaction is written to; one at a time, opened when first needed."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.path = store.tx / "journal"
        self._fd = -1
        self._size = 0

    def append(self, record: Record) -> None:
        """Add a record: all of it, or nothing and an error."""
        if self._fd < 0:
            self._fd = os.open(
                "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600, dir_fd=self.store.tx_fd
            )
            self._size = os.fstat(self._fd).st_size
        line = record.encode()
        record.offset = self._size
        try:
            if self.store.safe:
                # What the record names must be there when the record is.
                os.fsync(self.store.tx_fd)
            write_all(self._fd, line)
            if self.store.safe:
                os.fsync(self._fd)
        except BaseException:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line)

    def cut(self, offset: int) -> None:
        """Forget everything from a record on."""
        if self._fd < 0:
            self._fd = os.open("journal", os.O_WRONLY | os.O_APPEND, dir_fd=self.store.tx_fd)
        os.ftruncate(self._fd, offset)
        if self.store.safe:
            os.fsync(self._fd)
        self._size = offset

    def move(self, place: Path) -> None:
        """Make the journal a file of its own; the next record begins a new one."""
        self.close()
        os.rename(self.path, place)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
