"""Locks on open files, and Ctrl-C deferred during a critical step.

A POSIX record lock is lost when the process closes any descriptor of the file. These locks belong
to one open file: open-file-description locks on Linux, ``flock`` elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
from collections.abc import Generator
from importlib import import_module
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: there are no locks between processes
    fcntl = None

_FORM = "hhqqi4x"
# The module under `signal`, without its enums, which make each call slower.
_signal: Any = import_module("_signal")
_SIGINT: int = _signal.SIGINT


def take(fd: int, *, byte: int | None = None, wait: bool = False) -> bool:
    """Lock an open file, or one byte of it, exclusively; False if another holds the lock."""
    if fcntl is None:
        return True
    try:
        if sys.platform == "linux":
            command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
            fcntl.fcntl(fd, command, _question(fcntl.F_WRLCK, byte))
        elif byte is None:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        else:
            fcntl.lockf(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


def release(fd: int, *, byte: int | None = None) -> None:
    """Release the lock at once, even if a child between fork and exec has the file open."""
    if fcntl is None:
        return
    if sys.platform == "linux":
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _question(fcntl.F_UNLCK, byte))
    elif byte is None:
        fcntl.flock(fd, fcntl.LOCK_UN)
    else:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, byte)


def is_taken(fd: int, *, byte: int | None = None) -> bool:
    """Whether another open file holds the lock."""
    if fcntl is None:
        return False
    if sys.platform == "linux":  # queried, not taken, so that no other process is refused
        question = _question(fcntl.F_WRLCK, byte)
        answer = struct.unpack(_FORM, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question))
        return answer[0] != fcntl.F_UNLCK
    if not take(fd, byte=byte):
        return True
    release(fd, byte=byte)
    return False


def keep_from_forks(fd: int) -> None:
    """Make forked children close a locked file: else the lock would outlive this process."""
    _mine.add(fd)


def close(fd: int) -> None:
    """Release the lock on a file, and close it."""
    _mine.discard(fd)
    with contextlib.suppress(OSError):
        release(fd)
    os.close(fd)


def _question(kind: int, byte: int | None) -> bytes:
    start, length = (0, 0) if byte is None else (byte, 1)
    return struct.pack(_FORM, kind, os.SEEK_SET, start, length, 0)


_mine: set[int] = set()


def _close_in_child() -> None:
    for fd in _mine:
        with contextlib.suppress(OSError):
            os.close(fd)
    _mine.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def undisturbed(needed: bool = True) -> Generator[None]:
    """Defer Ctrl-C until a critical step is done.

    Python raises KeyboardInterrupt in the main thread only, at any point.
    """
    is_main = needed and threading.current_thread() is threading.main_thread()
    before: Any = _signal.getsignal(_SIGINT) if is_main else None
    if not callable(before):
        yield
        return
    came: list[tuple[int, object]] = []

    def note(number: int, frame: object) -> None:
        came.append((number, frame))

    try:
        _signal.signal(_SIGINT, note)
        yield
    finally:
        _signal.signal(_SIGINT, before)
        if came:
            before(*came[-1])
