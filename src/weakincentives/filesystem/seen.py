"""What a view of files depends on, and the words for when it cannot be changed or merged."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from weakincentives.errors import MergeConflict, ReadOnlyView, ViewClosed
from weakincentives.filesystem.protocol import Parts, join_path, shown

__all__ = ["Seen", "check_open", "conflict"]

_logger = logging.getLogger("weakincentives.filesystem")


@dataclass(slots=True)
class Seen:
    """What a view depends on. It only grows: what has been read cannot be unread."""

    touched: set[Parts] = field(default_factory=set[Parts])
    """Read or written: what is there, with all that is below it, must not have changed."""
    glimpsed: set[Parts] = field(default_factory=set[Parts])
    """Seen to be a directory: it must still be one."""
    cleared: set[Parts] = field(default_factory=set[Parts])
    """Made a directory: no file may have come there, or into the way."""

    def include(self, other: Seen) -> None:
        self.touched |= other.touched
        self.glimpsed |= other.glimpsed
        self.cleared |= other.cleared


def conflict(changed: Iterable[Parts]) -> MergeConflict:
    """Return the error that names what has changed under a view."""
    paths = sorted(join_path(parts) for parts in changed)
    names = ", ".join(shown(path) for path in paths)
    return MergeConflict(f"Changed by another call in the meantime: {names}", paths)


def check_open(
    operation: str, args: tuple[object, ...], sealed: str | None, read_only: str | None
) -> None:
    """Refuse a change through a view that has ended, and log it, or through one that only reads."""
    if sealed is not None:
        about = f" of {shown(args[0])}" if args and isinstance(args[0], str) else ""
        _logger.error("Refused %s%s: %s", operation, about, sealed)
        raise ViewClosed(sealed)
    if read_only is not None:
        raise ReadOnlyView(read_only)
