"""Adopting a store without its user's seal: for a person who knows that it is theirs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from weakincentives import locks
from weakincentives.filesystem.history import NAMED
from weakincentives.filesystem.records import JOURNAL, Record
from weakincentives.filesystem.rooms import NOTE, TEMPORARY
from weakincentives.filesystem.store import (
    Note,
    checked_parts,
    left_in,
    location_of,
    open_store,
    take_store_lock,
    write_note,
    write_whole,
)
from weakincentives.state import Seals


def adopt_store(
    root: str | os.PathLike[str], *, store: str | os.PathLike[str] | None = None
) -> tuple[str, ...]:
    """Seal the store of a workspace; returns a sentence for each record that stays damaged.

    It is for a store that an earlier version wrote, or that was written with a key which is lost:
    nobody can tell such a one from one that was planted. Names that lead out of the store or the
    workspace are never taken over. What runs and calls have on record is adopted by
    ``SavedSession.adopt`` and ``OutcomeLedger.adopt``.

    Raises:
        StoreRefused: It belongs to another user, or has links in it.
        WorkspaceLocked: Somebody has the workspace open.
    """
    root = Path(os.path.realpath(root))
    path = location_of(root) if store is None else Path(os.path.realpath(store))
    fd = open_store(path)
    try:
        lock = take_store_lock(fd, root, 0.0)
    finally:
        os.close(fd)
    try:
        return tuple(_adopt(root, path))
    finally:
        locks.close(lock)


def _adopt(root: Path, path: Path) -> Iterator[str]:
    note = Note(id=os.urandom(8).hex(), path=str(root), ino=os.stat(root).st_ino)
    known = re.search(rb'"id": "([0-9a-f]{16})"', _read(path / "root"))
    before = None if known is None else known[1].decode()
    journals = [path / "tx" / "journal", *_history(path)]
    lines = {journal: _read(journal) for journal in journals}
    earlier = None if before is None else Seals(f"{JOURNAL} {before}")
    # Where one seal is good, the others must be: only without the key that made them are all bad.
    strict = earlier is not None and any(_good(data, earlier) for data in lines.values())
    seals = note.seals(JOURNAL)
    for journal, data in lines.items():
        sealed, texts = b"", list(_texts(data, earlier if strict else None))
        for text in texts:
            sealed += b"damaged\n" if text is None else seals.sealed(text, len(sealed)) + b"\n"
        if None in texts or (data and not data.endswith(b"\n")):
            copy = left_in(path, (journal.name,))
            write_whole(copy, data)
            yield f"{journal} is damaged; what it held is in {copy}"
        if data:
            write_whole(journal, sealed)
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        noted = json.loads(_unmarked((path / NOTE).read_bytes()))
        if all(checked_parts(base)[-1].startswith(TEMPORARY) for base, _ in noted):
            write_whole(path / NOTE, note.seals(NOTE).sealed(json.dumps(noted).encode()))
    write_note(path, note)


def _history(path: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError), os.scandir(path / "history") as found:
        return [
            path / "history" / each.name
            for each in found
            if NAMED.fullmatch(each.name) and each.is_file(follow_symlinks=False)
        ]
    return []


def _texts(data: bytes, strict: Seals | None) -> Iterator[bytes | None]:
    """Yield the text of each whole line, None for one that is damaged or has names that are none.

    A line begins with the checksum of the first version, or with a seal.
    """
    offset = 0
    for line in data.split(b"\n")[:-1]:
        mark, _, text = line.partition(b" ")
        good = len(mark) == 32
        if len(mark) == 8:
            good = mark == b"%08x" % zlib.crc32(text)
        elif strict is not None:
            good = strict.unsealed(line, offset) is not None
        offset += len(line) + 1
        try:
            if good:
                Record.decode(text)
        except (TypeError, ValueError):
            good = False
        yield text if good else None


def _good(data: bytes, seals: Seals) -> bool:
    return seals.unsealed(data.partition(b"\n")[0]) is not None


def _unmarked(line: bytes) -> bytes:
    return line if line.startswith(b"[") else line[33:]


def _read(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    with open(fd, "rb") as file:
        return file.read()
