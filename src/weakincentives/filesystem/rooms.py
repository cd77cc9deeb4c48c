"""Where things wait while a path is changed: a directory from which one rename puts them in place.

That is the transaction's own directory in the store. What lies on another filesystem than the
store, or on another mount of the same, gets a directory at the top of that one, for as long as the
transaction takes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from weakincentives.filesystem.protocol import Parts
from weakincentives.filesystem.store import Store, checked_parts
from weakincentives.filesystem.tree import (
    Held,
    Mount,
    Tree,
    exchange,
    mount_of,
    without_default_acl,
    write_all,
)

TEMPORARY = ".wink-temporary-"
"""How the names of such directories begin. Nobody else is to be bothered with them."""

NOTE = "rooms"
"""The file that they are noted in, and what it is sealed as."""

logger = logging.getLogger("weakincentives.filesystem")


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """A directory for what was replaced, and for what is about to be put somewhere."""

    tree: Tree
    mount: Mount
    base: Parts = ()

    @property
    def mark(self) -> Parts | None:
        """How a record names it; None for the transaction's own directory."""
        return self.base or None

    def open(self) -> Held:
        """Return its descriptor, to be held in a ``with`` block."""
        return self.tree.directory(self.base)

    def at(self, name: str) -> Parts:
        """Return the path of something in it, below its tree."""
        return (*self.base, name)

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of something in it; None if it is not there."""
        return self.tree.status(self.at(name))

    def remove(self, name: str) -> None:
        """Remove something in it; nothing there is fine."""
        try:
            with self.open() as fd:
                os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            pass
        except OSError:  # a directory
            self.tree.remove_all(self.at(name))

    def take(self, above: int, place: str, name: str) -> None:
        """Move something here, from a name in a directory."""
        with self.open() as fd:
            os.rename(place, name, src_dir_fd=above, dst_dir_fd=fd)

    def put(self, name: str, above: int, place: str) -> None:
        """Move something from here to a name in a directory; a file that is there is replaced."""
        with self.open() as fd:
            os.rename(name, place, src_dir_fd=fd, dst_dir_fd=above)

    def link(self, above: int, place: str, name: str) -> None:
        """Give a file in a directory another name, here."""
        with self.open() as fd:
            link(above, place, fd, name)

    def exchange(self, name: str, above: int, place: str) -> bool:
        """Let something here and one in a directory change places; False if that cannot be."""
        with self.open() as fd:
            return exchange(fd, name, above, place)


class Rooms:
    """The rooms of a transaction: one for each filesystem that it changes."""

    def __init__(self, tree: Tree, store: Store) -> None:
        self._tree = tree
        self._store = store
        self.own = Room(store.tree, store.tree.mount)
        self._by_mount = {self.own.mount: self.own}
        self._times: dict[Parts, int | None] = {}
        """Of each room: the time that the directory it is in is to have, if it may have another."""

    @property
    def _note(self) -> Path:
        """Where the rooms are noted, for whoever comes after a kill."""
        return self._store.path / NOTE

    def on(self, mount: Mount, parent: Parts) -> Room:
        """Return the room for what is in a directory; made if it is the first on its mount."""
        room = self._by_mount.get(mount)
        if room is None:
            room = self._by_mount[mount] = self._make(mount, parent)
        return room

    def of(self, mark: Parts | None) -> Room:
        """Return the room that a record names."""
        if mark is None:
            return self.own
        known = next((room for room in self.made if room.base == mark), None)
        return known or Room(self._tree, self._tree.mount, mark)

    @property
    def made(self) -> list[Room]:
        """The rooms outside of the store."""
        return [room for room in self._by_mount.values() if room is not self.own]

    def recall(self) -> bool:
        """Take over the rooms of a process that is gone; False if there are none."""
        noted = self._noted()
        for base, time in noted:
            # It was killed while it made or removed this one.
            self._settle(base, time)
            with contextlib.suppress(OSError), self._tree.directory(base) as fd:
                self._store.avoid(os.listdir(fd))
                mount = mount_of(fd)
                self._by_mount[mount] = Room(self._tree, mount, base)
                self._times[base] = None
        if noted:
            self._write_note()
        return bool(noted)

    def _noted(self) -> list[tuple[Parts, int | None]]:
        """Return the rooms that a process which is gone has noted; none if that is damaged."""
        try:
            data = self._store.seals(NOTE).unsealed(self._note.read_bytes())
            noted = [(checked_parts(path), time) for path, time in json.loads(data or b"")]
            if not all(base and base[-1].startswith(TEMPORARY) for base, _ in noted):
                raise ValueError("not the name of a room")
        except FileNotFoundError:
            return []
        except ValueError:
            place = self._store.left(("rooms",))
            os.rename(self._note, place)
            logger.error(
                "What says where a killed call kept what it replaced is damaged, and is now %s."
                " Look for directories called %s... in the workspace",
                place,
                TEMPORARY,
            )
            return []
        return noted

    def leave(self) -> None:
        """Remove the rooms that were made. One that cannot be removed is tried again later."""
        if not self._times:
            return
        self._by_mount = {self.own.mount: self.own}
        self._times = {base: self._time_of(base[:-1]) for base in self._times}
        self._write_note()
        left: dict[Parts, int | None] = {}
        for base, time in self._times.items():
            try:
                self._tree.remove_all(base)
                self._settle(base, time)
            except OSError:
                left[base] = None
        self._times = left
        self._write_note()

    def _make(self, mount: Mount, parent: Parts) -> Room:
        """Make a room as far up as possible: no change of a call can move or remove it there."""
        tops = (parent[:depth] for depth in range(len(parent) + 1))
        same = [top for top in tops if self._is_on(mount, top)]
        for top in same:
            try:
                return self._make_in(top, mount)
            except PermissionError:
                if top == same[-1]:
                    raise
        raise FileNotFoundError(parent)

    def _is_on(self, mount: Mount, parts: Parts) -> bool:
        try:
            held = self._tree.directory(parts)
        except PermissionError:
            return False
        with held as fd:
            return mount_of(fd) == mount

    def make_again(self) -> None:
        """Make the rooms again that a program has removed, which saw them in the workspace."""
        for room in self.made:
            status = self._tree.status_if_reached(room.base)
            if status is None or not stat.S_ISDIR(status.st_mode):
                self._tree.remove_all(room.base)
                self._make_at(room.base, room.mount)

    def _make_in(self, top: Parts, mount: Mount) -> Room:
        return self._make_at((*top, f"{TEMPORARY}{os.urandom(6).hex()}"), mount)

    def _make_at(self, base: Parts, mount: Mount) -> Room:
        room, top = Room(self._tree, mount, base), base[:-1]
        # Noted first: whoever comes after a kill knows what to remove, and which time to set.
        self._times[room.base] = self._time_of(top)
        self._write_note()
        try:
            with self._tree.directory(top) as above:
                os.mkdir(room.base[-1], 0o700, dir_fd=above)
        except OSError:
            del self._times[room.base]
            self._write_note()
            raise
        self._settle(room.base, self._times[room.base])
        self._hide(room)
        self._times[room.base] = None
        self._write_note()
        return room

    def _hide(self, room: Room) -> None:
        """Have git overlook a room, and what is made in it take nothing after what is above it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with room.open() as fd:
            without_default_acl(fd)
            file = os.open(".gitignore", flags, 0o600, dir_fd=fd)
            try:
                write_all(file, b"*\n")
            finally:
                os.close(file)

    def _settle(self, base: Parts, time: int | None) -> None:
        """Set the time of the directory that a room is, or was, in."""
        if time is not None:
            set_time(self._tree, base[:-1], time)

    def _time_of(self, parts: Parts) -> int | None:
        status = self._tree.status(parts)
        return None if status is None else status.st_mtime_ns

    def _write_note(self) -> None:
        if not self._times:
            self._note.unlink(missing_ok=True)
            return
        noted = [["/".join(base), time] for base, time in self._times.items()]
        staged = self._store.path / "rooms.new"
        fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_all(fd, self._store.seals(NOTE).sealed(json.dumps(noted).encode()))
            if self._store.safe:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(staged, self._note)


def set_time(tree: Tree, parts: Parts, mtime_ns: int) -> None:
    """Set a directory's time of change; one that is gone is fine."""
    with contextlib.suppress(FileNotFoundError), tree.directory(parts) as fd:
        status = os.fstat(fd)
        if status.st_mtime_ns != mtime_ns:
            os.utime(fd, ns=(status.st_atime_ns, mtime_ns))


def link(source: int, name: str, target: int, place: str) -> None:
    """Give a file, or a link itself, another name."""
    os.link(name, place, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
