"""Which paths below a directory were touched, as Linux tells it: one watch for each directory."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

from weakincentives.filesystem.paths import Parts

IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE = 0x2, 0x4, 0x8
IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 0x40, 0x80, 0x100, 0x200
IN_DELETE_SELF, IN_MOVE_SELF = 0x400, 0x800
IN_UNMOUNT, IN_Q_OVERFLOW, IN_IGNORED = 0x2000, 0x4000, 0x8000
IN_ONLYDIR, IN_ISDIR = 0x1000000, 0x40000000

WATCHED = (
    IN_MODIFY | IN_ATTRIB | IN_CLOSE_WRITE | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE
    | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR
)  # fmt: skip

_EVENT = struct.Struct("iIII")


class Watcher:
    """The paths that were touched: rather too many than too few."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise OSError(errno.ENOSYS, "inotify needs Linux")
        libc = ctypes.CDLL(None, use_errno=True)
        self._add = libc.inotify_add_watch
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _error()
        self._directories: dict[int, Parts] = {}
        self.complete = False
        """Whether every change since the last ``forget`` is known: each directory was watched,
        and no event was lost."""
        self.touched: set[Parts] = set()
        """Paths where something came, went or changed."""
        self.trees: set[Parts] = set()
        """Paths where a directory came or went: anything below may have changed."""

    def watch(self, directory: int, parts: Parts) -> None:
        """Watch a directory, given its descriptor, under this path."""
        watch = self._add(self._fd, b"/proc/self/fd/%d" % directory, WATCHED)
        if watch < 0:
            raise _error()
        self._directories[watch] = parts

    def drain(self) -> None:
        """Read the events."""
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return
            offset = 0
            while offset < len(data):
                watch, mask, _, length = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size
                name = data[offset : offset + length].rstrip(b"\0")
                offset += length
                self._note(watch, mask, name)

    def forget(self) -> None:
        """Begin anew, once every directory has been read and is watched."""
        self.complete = True
        self.touched.clear()
        self.trees.clear()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _note(self, watch: int, mask: int, name: bytes) -> None:
        if mask & (IN_Q_OVERFLOW | IN_UNMOUNT):
            self.complete = False
            return
        if mask & IN_IGNORED:
            self._directories.pop(watch, None)
            return
        parts = self._directories.get(watch)
        if parts is None:
            return
        self.touched.add(parts)
        if name:
            moved = mask & IN_ISDIR and mask & (IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE)
            (self.trees if moved else self.touched).add((*parts, os.fsdecode(name)))


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
