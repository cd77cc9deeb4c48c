"""What a session's file lacks until it is next saved, kept in the record that commits a call.

The record of a commit is the commit point of a call: its changes to files, and what the session and
the ledger have to note. A process that is killed right after it has not saved its session yet:
resuming the session appends these lines to its file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from weakincentives.filesystem.store import Note, Objects, write_whole

if TYPE_CHECKING:
    from weakincentives.core.state import Seals

_KIND = "redo"
_INLINE = 32 << 10
"""Characters of lines that a commit record holds; longer ones become an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redo:
    """The lines that a session's file has after a call."""

    session: str
    """Identifies the file's first line."""
    file: str
    at: int
    """Where the lines begin in the file."""
    end: int
    call_id: str
    lines: tuple[str, ...] = ()

    def encode(self) -> dict[str, Any]:
        return {  # written out: ``asdict`` copies everything, for each call
            "session": self.session,
            "file": self.file,
            "at": self.at,
            "end": self.end,
            "call_id": self.call_id,
            "lines": self.lines,
        }

    @classmethod
    def decode(cls, values: Mapping[str, Any]) -> Redo:
        """Return what was encoded; raises an error of the usual kinds for anything else."""
        return cls(
            session=str(values["session"]),
            file=str(values["file"]),
            at=int(values["at"]),
            end=int(values["end"]),
            call_id=str(values["call_id"]),
            lines=tuple(map(str, values["lines"])),
        )

    @property
    def is_needed(self) -> bool:
        """Whether the session's file lacks something of it; a deleted file lacks nothing."""
        with contextlib.suppress(OSError):
            return os.stat(self.file).st_size < self.end
        return False


MakeRedo: TypeAlias = Callable[[], Redo | None]
"""Returns what to put into a commit record, or None. Called when everything else is ready."""


def pack(redo: Redo | None, objects: Objects, *, safe: bool) -> dict[str, Any] | None:
    """Return what a commit record holds: long lines are stored as an object, before the record."""
    if redo is None:
        return None
    values = redo.encode()
    if sum(map(len, redo.lines)) > _INLINE:
        values["lines"] = objects.add(json.dumps(redo.lines).encode(), safe=safe)
    return values


def object_in(values: Mapping[str, Any]) -> str | None:
    """Return the digest of the object that holds the lines of a commit record, if one does."""
    return values["lines"] if isinstance(values["lines"], str) else None


def unpack(values: Mapping[str, Any] | None, objects: Objects) -> Redo | None:
    """Return what a commit record holds; None for nothing, or if it is lost."""
    if values is None:
        return None
    with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
        digest = object_in(values)
        lines = values["lines"] if digest is None else json.loads(objects.read(digest))
        return Redo.decode({**values, "lines": lines})
    return None


# Of commit records that are removed


def keep(store: Path, redo: Redo | None) -> None:
    """Keep the lines of a commit record that is about to be removed, if a session needs them."""
    if redo is None or not redo.is_needed:
        return
    (store / _KIND).mkdir(mode=0o700, exist_ok=True)
    for known, path in _read_all(store):
        if not known.is_needed:
            path.unlink(missing_ok=True)
    data = _seals(store).sealed(json.dumps(redo.encode()).encode())
    write_whole(_file_of(store, redo), data)


def kept(store: Path, session: str) -> list[Redo]:
    """Return what ``keep`` has kept for a session."""
    return [redo for redo, _ in _read_all(store) if redo.session == session]


def forget(store: Path, redo: Redo) -> None:
    """Remove what ``keep`` has kept."""
    _file_of(store, redo).unlink(missing_ok=True)


def _file_of(store: Path, redo: Redo) -> Path:
    name = hashlib.sha256(redo.session.encode("utf-8", "surrogatepass")).hexdigest()
    return store / _KIND / f"{name[:32]}-{redo.at}"


def _read_all(store: Path) -> list[tuple[Redo, Path]]:
    found: list[tuple[Redo, Path]] = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(store / _KIND)):
            path = store / _KIND / name
            with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
                text = _seals(store).unsealed(path.read_bytes())
                found.append((Redo.decode(json.loads(text or b"")), path))
    return found


def _seals(store: Path) -> Seals:
    note = Note.read(store)
    assert note is not None
    return note.seals(_KIND)
