"""What a store of sessions provides: logs that grow under a lease, and are read without one.

A log has a head, which identifies the session, and then saves, oldest first. Both are lines of JSON
text; a store does not interpret them. ``FileStore`` and ``SqlStore`` are the two implementations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol, TypeVar

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.errors import SessionInUse, SnapshotError
from weakincentives.runtime.ledger import OutcomeLedger
from weakincentives.serde.exact import StoredBytes

T = TypeVar("T")

_POLL = 0.05
"""Seconds between two attempts to open a session that is in use."""


class SavePlace(NamedTuple):
    """Where a save is in a log: bytes of a file, or the number of a row."""

    start: int
    end: int
    """Where the next save begins."""


@dataclass(frozen=True, slots=True)
class LogPart:
    """Some saves of a log, oldest first."""

    start: int
    texts: list[bytes]
    ends: Sequence[int]
    """Where each of them ends, and the next one begins."""
    damage: str = ""
    """What is wrong with the save that follows, if it cannot be read."""

    @property
    def end(self) -> int:
        return self.ends[-1] if self.texts else self.start

    @property
    def places(self) -> Iterable[SavePlace]:
        return map(SavePlace, chain([self.start], self.ends), self.ends)

    def checked(self) -> LogPart:
        """Return this part, if it is not damaged."""
        if self.damage:
            raise SnapshotError(
                f"{self.damage}, so the session cannot be resumed: calls on record could run twice."
                " `wink log` shows what precedes the damage"
            )
        return self


class SessionLog(Protocol):
    """The log of one session, for reading: also while another process appends to it."""

    @property
    def shown(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def head(self) -> bytes: ...

    @property
    def begin(self) -> int:
        """Where the first save begins."""
        ...

    def read(self, start: int) -> LogPart:
        """Return the complete saves from a place on, up to the first damaged one."""
        ...

    def at(self, places: Iterable[SavePlace]) -> Iterable[bytes]:
        """Yield some saves again."""
        ...

    def media(self, digest: str) -> StoredBytes:
        """Return bytes that a save refers to; they are read when they are needed."""
        ...


class LeasedLog(SessionLog, Protocol):
    """The log of a session that is open here: no other process appends to it."""

    @property
    def token(self) -> int:
        """The fencing token: greater each time that the session is opened. 0 for a file."""
        ...

    def load(self) -> LogPart:
        """Return all saves; what is appended follows them.

        Raises:
            SnapshotError: The log is damaged.
        """
        ...

    def newest_first(self) -> Iterable[bytes]:
        """Yield the saves from the newest on; costs those that are consumed."""
        ...

    def append(self, texts: Sequence[bytes]) -> None:
        """Add saves, all of them or none, with the media stored since.

        Raises:
            LeaseLost: Another process has taken over the session.
        """
        ...

    def replace(self, texts: Sequence[bytes]) -> None:
        """Replace all saves, completely or not at all."""
        ...

    def store(self, data: bytes) -> str:
        """Store the bytes of media, once; returns their digest."""
        ...

    def ledger(self) -> OutcomeLedger | None:
        """Return the ledger of the session's calls that reach outside; None if it has none here."""
        ...

    def confirm(self) -> None:
        """Raise LeaseLost if the lease is not ours any more; else it is renewed."""
        ...

    def close(self) -> None:
        """Release the lease."""
        ...


class SessionStore(Protocol):
    """Sessions by name. A session is open in one process at a time."""

    def create(self, name: str, head: bytes) -> LeasedLog:
        """Begin a log.

        Raises:
            FileExistsError: There is a session of this name.
        """
        ...

    def open(self, name: str, *, wait: float = 0.0) -> LeasedLog:
        """Open a log to append to it; waits so many seconds if it is in use.

        Raises:
            FileNotFoundError: There is no session of this name.
            SessionInUse: Another process, or this one, has it open.
        """
        ...

    def log(self, name: str) -> SessionLog:
        """Return a log to read."""
        ...

    def names(self) -> list[str]:
        """Return the names of the sessions, sorted."""
        ...

    def is_in_use(self, name: str) -> bool: ...

    def delete(self, name: str) -> bool:
        """Delete a session with everything that belongs to it; False if it is in use."""
        ...


def waited(take: Callable[[], T], wait: float) -> T:
    """Return what ``take`` returns; repeat it for ``wait`` seconds while it raises SessionInUse."""
    until = SYSTEM_CLOCK.monotonic() + wait
    while True:
        try:
            return take()
        except SessionInUse:
            if SYSTEM_CLOCK.monotonic() + _POLL > until:
                raise
        threading.Event().wait(_POLL)
