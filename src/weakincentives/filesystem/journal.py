"""The undo journal of an open transaction.

Each change first appends a record of what was at the path (``was``) or where it came from
(``moved``). The journal is a stack: undo restores the newest record, then truncates it. So a
process killed at any moment, even during undo, leaves a journal of exactly what remains to be
undone, and undo never needs disk space.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weakincentives.core.state import Seals, no_links
from weakincentives.filesystem.entry import Entry
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.store import Source, Store, checked_parts
from weakincentives.filesystem.tree import write_all
from weakincentives.log import new_id

JOURNAL = "journal"
"""The kind under which records are sealed; each seal also covers the record's offset."""

_VERSION = 3
"""The first value of a record."""

_encode = json.JSONEncoder(separators=(",", ":")).encode  # built once: this is a hot path


@dataclass(slots=True, kw_only=True)
class Record:
    """One change and everything needed to undo it."""

    op: str
    """``was``, ``moved`` or ``external``: other programs change files from here on."""
    path: Parts = ()
    origin: Parts | None = None
    """The previous path of a moved entry."""
    others: tuple[Parts, ...] = ()
    """The other hard links, in the workspace, of a file changed in place."""
    before: Entry | None = None
    """The entry before, or the moved entry; None for nothing."""
    after: Entry | None = None
    """The entry we put there; None for nothing, or if another program did."""
    saved: str | None = None
    """The name of the original in a scratch directory: the file itself, or a hard link to it."""
    source: Source | None = None
    """The previous content of a file changed in place or by another program."""
    scratch: Parts | None = None
    """The scratch directory that holds ``saved``; None for the one in the store."""
    times: tuple[tuple[Parts, int], ...] = ()
    """Modification times of the directories that this record changes first."""
    away: bool = False
    """Whether ``saved`` is the original itself, not a hard link or copy."""
    twin: Parts | None = None
    """For changes by other programs: another hard link, which is restored first."""
    data: dict[str, Any] | None = None
    """For ``external`` the index in use."""
    operation: str = ""
    """The id of the operation in the log that commits the transaction; in its first record only."""
    head: int = 0
    """The last operation before that."""
    offset: int = 0
    """Start of the record in the journal."""
    end: int = 0
    """End of the record in the journal."""

    @property
    def is_change(self) -> bool:
        return self.op in ("was", "moved")

    @property
    def in_place(self) -> bool:
        """Whether we changed a file in place, and so under all its names."""
        return self.op == "was" and self.source is not None and self.after is not None

    @property
    def is_whole(self) -> bool:
        """Whether the change covers everything below the path."""
        if self.op != "was":
            return self.op == "moved"
        if self.source is not None:
            return False
        return self.saved is not None or (self.after is not None and self.after.ino != 0)

    @property
    def paths(self) -> tuple[Parts, ...]:
        return (self.path, *self.others) if self.origin is None else (self.path, self.origin)

    @property
    def names(self) -> list[str]:
        """The names in scratch directories that undo needs."""
        source = None if self.source is None else self.source.name
        return [name for name in (self.saved, source) if name is not None]

    def encode(self) -> bytes:
        values = [
            _VERSION,
            self.op,
            "/".join(self.path),
            None if self.origin is None else "/".join(self.origin),
            None if self.before is None else self.before.encode(),
            None if self.after is None else self.after.encode(),
            self.saved,
            self.source,
            None if self.scratch is None else "/".join(self.scratch),
            [["/".join(parts), mtime] for parts, mtime in self.times] if self.times else (),
            self.away,
            None if self.twin is None else "/".join(self.twin),
            self.data,
            ["/".join(parts) for parts in self.others] if self.others else (),
        ]
        if self.operation:
            values += [self.operation, self.head]
        return _encode(values).encode()

    @classmethod
    def decode(cls, text: bytes) -> Record:
        """Return the record in a line; raises ValueError for an invalid name or value."""
        values = json.loads(text)
        if values[0] != _VERSION:
            raise ValueError(f"a record of another version: {values[0]!r}")
        _, op, path, origin, before, after, saved, source, scratch, times, away, twin, data = (
            values[:13]
        )
        return cls(
            op=op,
            path=checked_parts(path),
            origin=None if origin is None else checked_parts(origin),
            before=None if before is None else Entry.decode(before),
            after=None if after is None else Entry.decode(after),
            saved=_checked_saved(saved),
            source=None if source is None else Source.decode(source),
            scratch=None if scratch is None else checked_parts(scratch),
            times=tuple((checked_parts(parts), int(mtime)) for parts, mtime in times),
            away=bool(away),
            twin=None if twin is None else checked_parts(twin),
            data=data,
            others=tuple(map(checked_parts, values[13])),
            operation=str(values[14]) if len(values) > 14 else "",
            head=int(values[15]) if len(values) > 15 else 0,
        )


_SAVED = re.compile("[a-z][0-9]+")


def _checked_saved(name: object) -> str | None:
    """Return a name made by ``Store.fresh``; raises ValueError for any other."""
    if name is not None and (not isinstance(name, str) or not _SAVED.fullmatch(name)):
        raise ValueError(f"invalid name in a scratch directory: {name!r}")
    return name


def read_journal(
    path: Path, seals: Seals
) -> tuple[list[Record], Literal["whole", "short", "torn", "broken"]]:
    """Return the readable records at the start of a journal, and its condition.

    ``short``: the last record is incomplete. ``torn``: the last record is damaged. ``broken``: a
    readable record follows a damaged one, which no kill can cause.
    """
    records: list[Record] = []
    offset = 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=no_links) as lines:
        for line in lines:
            record = _unsealed(line, offset, seals)
            if record is None:
                torn = "torn" if line.endswith(b"\n") else "short"
                return records, "broken" if _goes_on(lines, offset + len(line), seals) else torn
            records.append(record)
            offset = record.end
    return records, "whole"


def _unsealed(line: bytes, offset: int, seals: Seals) -> Record | None:
    """Return the record in a line, or None if it is damaged or invalid."""
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
    """Tell whether a readable record follows."""
    for line in lines:
        if _unsealed(line, offset, seals) is not None:
            return True
        offset += len(line)
    return False


class Journal:
    """The journal file, opened when first needed."""

    def __init__(self, store: Store, head: Callable[[], int]) -> None:
        self.store = store
        self._head = head
        self.path = store.tx / "journal"
        self.seals = store.seals(JOURNAL)
        self._fd = -1
        self._size = 0

    def _open(self, flags: int = 0) -> None:
        flags |= os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        self._fd = os.open("journal", flags, 0o600, dir_fd=self.store.tx_fd)
        self._size = os.fstat(self._fd).st_size

    def may_be_open(self) -> bool:
        """Tell whether there is anything of a transaction that has not ended."""
        names = self.store.tree.names(())
        return names not in ([], [self.path.name]) or (bool(names) and bool(self._stored_size()))

    def _stored_size(self) -> int:
        return os.stat(self.path.name, dir_fd=self.store.tx_fd, follow_symlinks=False).st_size

    def append(self, record: Record) -> None:
        """Append a record, or raise and append nothing."""
        if self._fd < 0:
            self._open(os.O_CREAT)
        if not self._size:
            head = self._head()  # before anything is changed: the log must be there at the end
            self.store.directory.begin_change()
            record.operation, record.head = new_id(), head
        line = self.seals.sealed(record.encode(), self._size) + b"\n"
        record.offset = self._size
        try:
            if self.store.safe:
                # Files that the record names must be on disk before it.
                os.fsync(self.store.tx_fd)
            write_all(self._fd, line)
            if self.store.safe:
                os.fsync(self._fd)
        except BaseException:
            self.cut(self._size)
            raise
        self._size += len(line)
        record.end = self._size

    def cut(self, offset: int) -> None:
        """Truncate the journal at an offset."""
        if self._fd < 0:
            self._open()
        os.ftruncate(self._fd, offset)
        if self.store.safe:
            os.fsync(self._fd)
        self._size = offset
        if not offset:
            self.store.directory.end_change()

    def drop(self) -> None:
        """Drop the records of a committed transaction; a kill or loss of power may bring them back,
        and then the transaction is finished again.
        """
        if self._fd < 0:
            self._open()
        os.ftruncate(self._fd, 0)
        self._size = 0
        self.store.directory.end_change()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
