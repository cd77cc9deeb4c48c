"""Locks on open files, and Ctrl-C deferred during a critical step.

A POSIX record lock is lost when the process closes any descriptor of the file. These locks belong
to one open file: open-file-description locks on Linux, ``flock`` elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import sys
import threading
from collections.abc import Callable, Generator
from importlib import import_module
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: there are no locks between processes
    fcntl = None

TAKEN = (BlockingIOError, PermissionError)
OWN_FILE: int = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags that open or create a file of ours, not through a link that someone has planted."""
_FORM = "hhqqi4x"
# The module under `signal`, without its enums, which make each call slower.
_signal: Any = import_module("_signal")
_SIGINT: int = _signal.SIGINT


def take(fd: int, *, byte: int | None = None, wait: bool = False, shared: bool = False) -> bool:
    """Lock an open file, or one byte of it; False if another holds the lock.

    A ``shared`` lock excludes only the others.
    """
    try:
        taker(fd, byte=byte, wait=wait, shared=shared)()
    except TAKEN:
        return False
    return True


def taker(
    fd: int, *, byte: int | None = None, wait: bool = False, shared: bool = False
) -> Callable[[], object]:
    """Return a C function that locks an open file, or raises one of ``TAKEN``."""
    if fcntl is None:
        return bool
    if sys.platform == "linux":
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        question = _question(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, byte)
        return functools.partial(fcntl.fcntl, fd, command, question)
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    if byte is None:
        return functools.partial(fcntl.flock, fd, kind)
    return functools.partial(fcntl.lockf, fd, kind, 1, byte)


def release(fd: int, *, byte: int | None = None) -> None:
    """Release the lock at once, even if a child between fork and exec has the file open."""
    releaser(fd, byte=byte)()


def releaser(fd: int, *, byte: int | None = None) -> Callable[[], object]:
    """Return a C function that releases the lock: in ``finally``, no interrupt comes before it."""
    if fcntl is None:
        return bool
    if sys.platform == "linux":
        unlocked = _question(fcntl.F_UNLCK, byte)
        return functools.partial(fcntl.fcntl, fd, fcntl.F_OFD_SETLK, unlocked)
    if byte is None:
        return functools.partial(fcntl.flock, fd, fcntl.LOCK_UN)
    return functools.partial(fcntl.lockf, fd, fcntl.LOCK_UN, 1, byte)


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
def defer_interrupts(needed: bool = True) -> Generator[None]:
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
