"""The journal's records and the file they are in: what was changed, and how to undo it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from weakincentives.filesystem.protocol import Parts
from weakincentives.filesystem.store import Entry, Store, checked_parts
from weakincentives.filesystem.tree import Ident, write_all
from weakincentives.state import Seals

JOURNAL = "journal"
"""What the records of a transaction are sealed as; each is bound to its place in the file."""


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
    digest: str | None = None
    """Of a file that we wrote: what we gave it to hold."""
    commit: dict[str, Any] | None = None
    offset: int = 0
    """Where in the journal the record begins."""
    end: int = 0
    """Where in the journal the next one begins."""

    def encode(self) -> bytes:
        """Return the record as text of one line, to be sealed."""
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
            self.digest,
        ]
        return _encode(values).encode()

    @classmethod
    def decode(cls, text: bytes) -> Record:
        """Return the record in a text; raises ValueError for one with a name that is none."""
        values = json.loads(text)
        op, path, origin, kept, copy, before, old, new, room, times, away, commit = values[:12]
        twin, source, digest = [*values[12:], None, None, None][:3]  # older ones have none
        return cls(
            op=op,
            path=checked_parts(path),
            origin=None if origin is None else checked_parts(origin),
            kept=_checked_kept(kept),
            copy=_checked_kept(copy),
            before=None if before is None else Entry.decode(before),
            old=None if old is None else Ident(*map(int, old)),
            new=None if new is None else Ident(*map(int, new)),
            room=None if room is None else checked_parts(room),
            times=tuple((checked_parts(parts), int(mtime)) for parts, mtime in times),
            away=bool(away),
            twin=None if twin is None else checked_parts(twin),
            source=None if source is None else _checked_source(source),
            digest=None if digest is None else str(digest),
            commit=commit,
        )


def _checked_source(values: Any) -> Source:
    """Return where a content is; the name is one that a pack gives to its files."""
    name, offset, check = values
    if not isinstance(name, str) or not _SOURCE.fullmatch(name):
        raise ValueError(f"not the name of a file with contents: {name!r}")
    return Source(name, int(offset), int(check))


_SOURCE = re.compile("o[0-9]+|pack-[0-9]+")
_KEPT = re.compile("[a-z][0-9]+")


def _checked_kept(name: object) -> str | None:
    """Return a name that ``Store.fresh`` has given."""
    if name is None:
        return None
    if not isinstance(name, str) or not _KEPT.fullmatch(name):
        raise ValueError(f"not the name of something that was kept: {name!r}")
    return name


def read_journal(
    path: Path, seals: Seals
) -> tuple[list[Record], Literal["whole", "short", "torn", "broken"]]:
    """Return a journal's records up to the first that cannot be read, and what that means.

    A short journal ends in a record that was not written to its end. A torn one ends in a record
    that is damaged. One with more records after that is broken: no process that was killed leaves
    it so.
    """
    records: list[Record] = []
    offset = 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=_no_links) as lines:
        for line in lines:
            record = _unsealed(line, offset, seals)
            if record is None:
                torn = "torn" if line.endswith(b"\n") else "short"
                return records, "broken" if _goes_on(lines, offset + len(line), seals) else torn
            records.append(record)
            offset = record.end
    return records, "whole"


def _unsealed(line: bytes, offset: int, seals: Seals) -> Record | None:
    """Return the record in a line; None for one that is damaged, or whose names are none."""
    text = seals.unsealed(line[:-1], offset) if line.endswith(b"\n") else None
    if text is None:
        return None
    try:
        record = Record.decode(text)
    except (TypeError, ValueError):
        return None
    record.offset, record.end = offset, offset + len(line)
    return record


def _goes_on(lines: Iterable[bytes], offset: int, seals: Seals) -> bool:
    """Tell whether a record follows one that cannot be read."""
    for line in lines:
        if _unsealed(line, offset, seals) is not None:
            return True
        offset += len(line)
    return False


def _no_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


class Journal:
    """The file a transaction is written to; one at a time, opened when first needed."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.path = store.tx / "journal"
        self.seals = store.seals(JOURNAL)
        self._fd = -1
        self._size = 0

    def append(self, record: Record) -> None:
        """Add a record: all of it, or nothing and an error."""
        if self._fd < 0:
            self._fd = os.open(
                "journal",
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW,
                0o600,
                dir_fd=self.store.tx_fd,
            )
            self._size = os.fstat(self._fd).st_size
        line = self.seals.sealed(record.encode(), self._size) + b"\n"
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
        record.end = self._size

    def cut(self, offset: int) -> None:
        """Forget everything from a record on."""
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
            self._fd = os.open("journal", flags, dir_fd=self.store.tx_fd)
        os.ftruncate(self._fd, offset)
        if self.store.safe:
            os.fsync(self._fd)
        self._size = offset

    def move(self, place: Path) -> None:
        """Make the journal a file of its own; the next record begins a new one."""
        self.close()
        try:
            os.rename(self.path, place)
        except FileNotFoundError:
            place.parent.mkdir(mode=0o700, exist_ok=True)
            os.rename(self.path, place)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
