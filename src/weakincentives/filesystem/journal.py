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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from weakincentives.core.state import Seals, no_links
from weakincentives.filesystem.entry import Entry
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.store import Source, Store, checked_parts
from weakincentives.filesystem.tree import write_all
from weakincentives.serde.exact import json_of

JOURNAL = "journal"
"""The kind under which records are sealed; each seal also covers the record's offset."""

_VERSION = 3
"""The first value of a record."""

_encode = json.JSONEncoder(separators=(",", ":")).encode  # built once: this is a hot path


@dataclass(slots=True, kw_only=True)
class Record:
    """One change and everything needed to undo it."""

    op: str
    """``was``, ``moved``, ``external`` (other programs change files from here on) or ``commit``."""
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
    """For ``commit`` the history's metadata; for ``external`` the index in use."""
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


def read_paths(path: Path, seals: Seals) -> tuple[dict[str, Any], set[str]] | None:
    """Return the data of a commit and the paths that it changed; several times as fast.

    None if the journal is damaged, incomplete or gone.
    """
    values = _read_values(path, seals)
    if values is None:
        return None
    paths: set[str] = set()
    saved: set[str] = set()
    for each in values:
        # Later records with the same saved file only say what else the call put there.
        if each[1] in ("was", "moved") and each[6] not in saved:
            found = (each[2], *each[13]) if each[3] is None else each[2:4]
            paths.update(path or "." for path in found)
        if each[6] is not None:
            saved.add(each[6])
    return values[-1][12], paths


def read_commit(path: Path, seals: Seals) -> dict[str, Any] | None:
    """Return the data of a commit; None where ``read_paths`` returns it."""
    values = _read_values(path, seals)
    return None if values is None else values[-1][12]


def read_entries(
    path: Path, seals: Seals
) -> tuple[dict[str, Any], dict[str, tuple[EncodedEntry, EncodedEntry]]] | None:
    """Return the data of a commit and, by path, what was there before and after, as encoded.

    None where ``read_paths`` returns it, and for a commit that moved something, removed a directory
    or changed a hard-linked file: there it takes more than the records.
    """
    values = _read_values(path, seals)
    if values is None:
        return None
    data: dict[str, Any] = values[-1][12]
    full = dict(data["entries"])
    before: dict[str, EncodedEntry] = {}
    for index, each in enumerate(values[:-1]):
        if each[1] == "was":
            entry = each[4]
            if entry is not None and index in full:  # with the identity of the original
                entry = [*full[index][:7], entry[7], *full[index][8:11], *entry[11:]]
            if each[13] or (entry is not None and entry[0] == "directory" and each[6] is not None):
                return None
            before.setdefault(each[2], entry)
        elif each[1] == "moved":
            return None
    after = dict(data["left"])
    return data, {path: (before.get(path), after.get(path)) for path in {**before, **after}}


EncodedEntry: TypeAlias = list[Any] | None
"""What ``Entry.encode`` returns; None for nothing."""


def _read_values(path: Path, seals: Seals) -> list[list[Any]] | None:
    """Return the values of all records of a commit, in order."""
    try:
        with open(path, "rb", opener=no_links) as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    found: list[list[Any]] = []
    offset = 0
    for line in lines[:-1]:
        text = seals.unsealed(line, offset)
        values = [None] if text is None else json_of(text)
        if values[0] != _VERSION:
            return None
        offset += len(line) + 1
        found.append(values)
    return None if lines[-1] or not found or found[-1][1] != "commit" else found


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

    def __init__(self, store: Store) -> None:
        self.store = store
        self.path = store.tx / "journal"
        self.seals = store.seals(JOURNAL)
        self._fd = -1
        self._size = 0

    def _open(self, flags: int = 0) -> None:
        flags |= os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        self._fd = os.open("journal", flags, 0o600, dir_fd=self.store.tx_fd)
        self._size = os.fstat(self._fd).st_size

    def append(self, record: Record) -> None:
        """Append a record, or raise and append nothing."""
        if self._fd < 0:
            self._open(os.O_CREAT)
        if not self._size:
            self.store.directory.begin_change()
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

    def move(self, place: str) -> None:
        """Move the journal file; the next record starts a new one."""
        self.close()
        try:
            os.rename(self.path, place)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(place), 0o700, exist_ok=True)
            os.rename(self.path, place)
        self.store.directory.end_change()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
