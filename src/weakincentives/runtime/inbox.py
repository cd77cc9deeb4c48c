"""Messages to a run in progress, from other threads and processes.

The file is JSON lines, each with a seal that only this user can make. Lines are only added, so a
message stays until it is delivered: the session's ``Message`` has its id. Two bytes are locked:
one by the writing process, the other by the process whose run accepts messages.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weakincentives.core import locks
from weakincentives.core.call import new_id
from weakincentives.core.logs import get_logger
from weakincentives.core.state import Seals
from weakincentives.errors import SessionError

_logger = get_logger(__name__)

_WRITING, _OPEN = 0, 1
"""The bytes that are locked."""
_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class Inbox:
    """Messages to one session, in a file; pass it to ``adapter.evaluate`` as ``inbox``.

    A run accepts messages from its start to its end, and adds them to the conversation before the
    next turn of the model. A message that a run accepted and could not deliver, because it failed
    or was killed, is delivered by the next run on the session. Each is delivered exactly once.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.is_open = False
        """Whether a run accepts messages with this object."""
        self._fd = -1
        self._read = 0
        """The length of the lines that ``take`` has returned."""
        self._seals = Seals(f"inbox {self.path.name}")
        self._lock = threading.RLock()

    def send(self, text: str) -> None:
        """Send a message to the run.

        Raises:
            SessionError: No run accepts messages: none has begun, or it has ended.
        """
        message = json.dumps({"id": new_id(), "text": text}).encode()
        with self._writing() as fd:
            if not (self.is_open or locks.is_taken(fd, byte=_OPEN)):
                raise SessionError("no run is in progress: the message was not sent")
            end = os.pread(fd, os.fstat(fd).st_size, 0).rpartition(b"\n")
            place = len(end[0] + end[1])
            os.ftruncate(fd, place)  # drops a line that a kill cut short
            line = self._seals.sealed(message, place) + b"\n"
            try:
                if os.pwrite(fd, line, place) < len(line):
                    raise OSError(f"the message does not fit into {self.path}")
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, place)
                raise

    # For the run

    def open(self) -> None:
        """Accept messages from now on."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock:
            if self.is_open:
                raise SessionError(f"another run accepts the messages in {self.path}")
            fd = os.open(self.path, _FLAGS | os.O_CREAT, 0o600)
            if not locks.take(fd, byte=_OPEN):
                os.close(fd)
                raise SessionError(f"another run accepts the messages in {self.path}")
            locks.keep_from_forks(fd)
            self._fd, self.is_open = fd, True

    def take(self) -> list[tuple[str, str]]:
        """Return ids and texts of the messages that this object has not returned yet."""
        messages: list[tuple[str, str]] = []
        for line in self._unread().split(b"\n")[:-1]:
            data = self._seals.unsealed(line, self._read)
            if data is None:
                _logger.warning("a line of %s is damaged or not ours", self.path)
            else:
                message: Any = json.loads(data)
                messages.append((message["id"], message["text"]))
            self._read += len(line) + 1
        return messages

    def close(self, *, if_empty: bool = False) -> bool:
        """Accept no more messages; with ``if_empty``, return False if there is a new one."""
        with self._lock:
            if not self.is_open:
                return True
            with self._writing():
                if if_empty and b"\n" in self._unread():
                    return False
                locks.release(self._fd, byte=_OPEN)
                self.is_open = False
            fd, self._fd = self._fd, -1
            locks.close(fd)
            return True

    def _unread(self) -> bytes:
        size = os.fstat(self._fd).st_size
        return os.pread(self._fd, size - self._read, self._read) if size > self._read else b""

    @contextmanager
    def _writing(self) -> Generator[int]:
        """Lock the file for writing and yield its descriptor."""
        with self._lock:
            try:
                fd = self._fd if self.is_open else os.open(self.path, _FLAGS)
            except FileNotFoundError as error:
                raise SessionError("no run is in progress: the message was not sent") from error
            try:
                locks.take(fd, byte=_WRITING, wait=True)
                yield fd
            finally:
                locks.release(fd, byte=_WRITING)
                if fd != self._fd:
                    os.close(fd)
