"""The journal of an open transaction: what was at a path, written down before it is changed.

A record says what was there before (``was``) or where something was before (``moved``). The
journal is a stack. A change appends one record that says how to undo it; undoing takes the newest
record, puts back what it says, and cuts it off. So a process that is killed at any moment, also in
the middle of undoing, leaves a journal that says exactly what is still to be undone, and undoing
never needs space.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weakincentives.filesystem.entry import Entry, checked_digest
from weakincentives.filesystem.protocol import Parts
from weakincentives.filesystem.store import Source, Store, checked_parts
from weakincentives.filesystem.tree import write_all
from weakincentives.state import Seals

JOURNAL = "journal"
"""What the records of a transaction are sealed as; each is bound to its place in the file."""

_VERSION = 3
"""What a record begins with; one of an earlier version begins with a word."""

_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: every change needs it


@dataclass(slots=True, kw_only=True)
class Record:
    """One change, and what undoing it takes."""

    op: str
    """``was``, ``moved``, ``external`` (others change files from here on) or ``commit``."""
    path: Parts = ()
    origin: Parts | None = None
    """Of something moved: where it was."""
    others: tuple[Parts, ...] = ()
    """Of a file that is changed in place: its other names in the workspace."""
    before: Entry | None = None
    """What was at the path, or was moved; None for nothing."""
    after: Entry | None = None
    """What we put there; None for nothing, or when others did."""
    kept: str | None = None
    """The name, in a scratch directory, of what was there: the thing itself, or one more name."""
    source: Source | None = None
    """The content before of a file that is changed in place, or that others have changed."""
    room: Parts | None = None
    """The scratch directory that has ``kept``; None for the transaction's own, in the store."""
    times: tuple[tuple[Parts, int], ...] = ()
    """Directories that this was the first to change, with their times before."""
    away: bool = False
    """Whether ``kept`` is the thing itself, taken away, and not a second name of it or a copy."""
    twin: Parts | None = None
    """Of what others changed: another name of the same file, which is brought back before."""
    data: dict[str, Any] | None = None
    """Of a commit: what the history says of it. Of ``external``: which index there is."""
    offset: int = 0
    """Where in the journal the record begins."""
    end: int = 0
    """Where in the journal the next one begins."""

    @property
    def is_change(self) -> bool:
        return self.op in ("was", "moved")

    @property
    def in_place(self) -> bool:
        """Whether a file was changed in place by us: its other names show that."""
        return self.op == "was" and self.source is not None and self.after is not None

    @property
    def is_whole(self) -> bool:
        """Whether the change stands for all that is, or was, below the path."""
        if self.op != "was":
            return self.op == "moved"
        if self.source is not None:
            return False
        return self.kept is not None or (self.after is not None and self.after.ino != 0)

    @property
    def paths(self) -> tuple[Parts, ...]:
        return (self.path, *self.others) if self.origin is None else (self.path, self.origin)

    @property
    def names(self) -> list[str]:
        """The names in scratch directories of what undoing takes."""
        source = None if self.source is None else self.source.name
        return [name for name in (self.kept, source) if name is not None]

    def encode(self) -> bytes:
        """Return the record as text of one line, to be sealed."""
        values = [
            _VERSION,
            self.op,
            "/".join(self.path),
            None if self.origin is None else "/".join(self.origin),
            None if self.before is None else self.before.encode(),
            None if self.after is None else self.after.encode(),
            self.kept,
            self.source,
            None if self.room is None else "/".join(self.room),
            [["/".join(parts), mtime] for parts, mtime in self.times] if self.times else (),
            self.away,
            None if self.twin is None else "/".join(self.twin),
            self.data,
            ["/".join(parts) for parts in self.others] if self.others else (),
        ]
        return _encode(values).encode()

    @classmethod
    def decode(cls, text: bytes) -> Record:
        """Return the record in a text; raises ValueError for one with a name that is none."""
        values = json.loads(text)
        if values[0] != _VERSION:
            values = _from_version_2(values)
        _, op, path, origin, before, after, kept, source, room, times, away, twin, data = values[
            :13
        ]
        return cls(
            op=op,
            path=checked_parts(path),
            origin=None if origin is None else checked_parts(origin),
            before=None if before is None else Entry.decode(before),
            after=None if after is None else Entry.decode(after),
            kept=_checked_kept(kept),
            source=None if source is None else Source.decode(source),
            room=None if room is None else checked_parts(room),
            times=tuple((checked_parts(parts), int(mtime)) for parts, mtime in times),
            away=bool(away),
            twin=None if twin is None else checked_parts(twin),
            data=data,
            others=tuple(map(checked_parts, values[13])),
        )


def _from_version_2(values: list[Any]) -> list[Any]:
    """Return the values of a record of an earlier version in the words of this one."""
    op, path, origin, kept, copy, before, old, new, room, times, away, data = values[:12]
    twin, source, digest = [*values[12:], None, None, None][:3]
    if op == "external":
        data, old = {"index": old[:2]}, None
    after = None if new is None else _known(new, digest, edited=op == "edit")
    if op == "made":
        after = Entry("directory").encode()
    if before is None and old is not None:
        before = _known(old)
    source = source if copy is None else (copy, 0, 0)
    words = {"moved over": "moved", "moved": op, "external": op, "commit": op}
    op = words.get(op, "was")
    changed = [op, path, origin, before, after, kept, source, room, times, away, twin, data]
    return [_VERSION, *changed, ()]


def _known(ident: Sequence[int], digest: object = None, *, edited: bool = False) -> list[Any]:
    """Return what version 2 knew by inode, size and time; -1 for those of a directory."""
    ino, size, mtime_ns = map(int, ident)
    is_directory = size == -1 and not edited
    checked = None if digest is None else checked_digest(digest)
    kind = "directory" if is_directory else "file"
    return Entry(kind, size=size, mtime_ns=mtime_ns, ino=ino, digest=checked).encode()


_KEPT = re.compile("[a-z][0-9]+")


def _checked_kept(name: object) -> str | None:
    """Return a name that ``Store.fresh`` has given."""
    if name is not None and (not isinstance(name, str) or not _KEPT.fullmatch(name)):
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

    def _open(self, flags: int = 0) -> None:
        if self._fd < 0:
            flags |= os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
            self._fd = os.open("journal", flags, 0o600, dir_fd=self.store.tx_fd)
            self._size = os.fstat(self._fd).st_size

    def append(self, record: Record) -> None:
        """Add a record: all of it, or nothing and an error."""
        self._open(os.O_CREAT)
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
        self._open()
        os.ftruncate(self._fd, offset)
        if self.store.safe:
            os.fsync(self._fd)
        self._size = offset

    def move(self, place: str) -> None:
        """Make the journal a file of its own; the next record begins a new one."""
        self.close()
        try:
            os.rename(self.path, place)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(place), 0o700, exist_ok=True)
            os.rename(self.path, place)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
