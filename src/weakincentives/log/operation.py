"""The values of the log: an operation is the commit point of a call, and says what it changed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Literal, NamedTuple

Parts = tuple[str, ...]
"""A normalised path, name by name; the root is the empty tuple."""

Kind = Literal["file", "directory", "link", "pipe", "other"]
"""``other`` is a socket or device, which can be moved but not re-created."""

Xattrs = tuple[tuple[str, bytes], ...]

OperationKind = Literal["call", "undo", "rewind", "merge", "edit", "event"]
"""``edit``: a change that WINK found but did not make. ``event``: a change of the session only."""

Outcome = Literal["committed", "failed", "denied", "suspended", "unknown"]


class Entry(NamedTuple):
    """What is at a path: exactly what a rollback restores."""

    kind: Kind
    mode: int = 0
    """Permission bits only."""
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    content: str = ""
    """SHA-256 of a file's content; the text of a link; of a directory that stands for everything
    below it, SHA-256 of its manifest. ``@operation/name`` and what is below that while it is kept
    unhashed: the path of the thing itself among what operations displaced. Empty for a file: not
    stored and not hashed."""
    xattrs: Xattrs = ()
    group: int = 0
    """Entries of one operation with the same number are names of one hard-linked file."""

    @property
    def is_directory(self) -> bool:
        return self.kind == "directory"

    @property
    def is_plain_directory(self) -> bool:
        """Whether it is a directory on its own: what is below it has changes of its own."""
        return self.kind == "directory" and not self.content

    def is_equivalent(self, other: Entry) -> bool:
        """Compare kind, mode and content: owners, times and attributes never block an undo."""
        if self.kind != other.kind or self.mode != other.mode:
            return False
        return self.is_directory or self.content == other.content


class Stat(NamedTuple):
    """An observation that recognises an unchanged file cheaply; it never leaves the machine."""

    device: int
    inode: int
    ctime_ns: int
    links: int = 1


class Change(NamedTuple):
    """What was at a path before an operation and after it; None is nothing.

    A change is *whole* if it covers everything below its path: each side then has what its
    manifest lists and nothing else. Only a change of a directory's own attributes is not. A change
    below a whole one is more specific and wins.
    """

    path: Parts
    before: Entry | None
    after: Entry | None
    origin: Parts | None = None
    """The path it was moved from; for rename and diffs, never needed for correctness."""
    found: Stat | None = None
    """What ``before`` was recognised by, in the directory."""
    left: Stat | None = None
    """The same for ``after``."""

    @property
    def is_whole(self) -> bool:
        return not all(
            side is not None and side.is_plain_directory for side in (self.before, self.after)
        )


class SliceChange(NamedTuple):
    """The values of a STATE slice before and after, as exact JSON; None if it had none."""

    slice: str
    before: str | None
    after: str | None


class SessionDelta(NamedTuple):
    """What an operation changed in a session: an unsaved session has none."""

    state: tuple[SliceChange, ...] = ()
    appended: tuple[tuple[str, str], ...] = ()
    """Slice and value of each event added to a LOG slice; these are never taken away."""


NO_DELTA = SessionDelta()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """The call that an operation commits."""

    id: str
    """Unique in its session."""
    session: str | None = None
    """None while a session keeps its own file: then an id may come again."""
    tool: str = ""
    """Empty for changes outside of any call."""
    arguments: str = ""
    """As JSON."""
    answer: str = ""
    """As the model saw it."""
    outcome: Outcome = "committed"
    started: float = 0.0
    """Seconds since the epoch; of changes to files, when they were committed."""
    duration: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The commit point of a call: one stored form of everything it changed."""

    id: str
    """Random: recovery asks for it. Numbers can be used again after a loss of power."""
    number: int
    parent: int
    """The operation before it on its line; 0 for the first."""
    merged: int | None = None
    """The second parent of a merge."""
    kind: OperationKind = "call"
    call: CallRecord | None = None
    changes: tuple[Change, ...] = ()
    """Sorted by path; at most one for each."""
    session: SessionDelta = NO_DELTA
    undoes: tuple[int, ...] = ()
    undone: tuple[str, ...] = ()
    """The ids of the calls that it undoes: known even when their operations are gone."""
    partly: tuple[str, ...] = ()
    """Those of them of which it left something: what others had changed since."""
    times: tuple[tuple[Parts, int], ...] = ()
    """Modification times, before it, of the directories in which it added or removed a name; by
    their paths before it. Undoing the newest operations restores them."""
    size: int = 0
    """Bytes stored so that it can be undone, before compression."""
    moment: int = 0
    """When it was committed, by the clock that files have, in nanoseconds."""
    redo: str | None = None
    """JSON: what a session's file lacks until it is next saved."""


def new_id() -> str:
    """Return an operation id that no other operation has, on any machine."""
    return secrets.token_hex(16)
