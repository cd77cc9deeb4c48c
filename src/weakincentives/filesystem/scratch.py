"""Scratch directories: where files are staged and originals saved, one rename from their place.

Normally this is the transaction's directory in the store. Each other filesystem or mount in the
workspace gets a temporary directory at its top for the duration of the transaction.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Mapping
from functools import cached_property

from weakincentives.filesystem.entry import new_file
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.store import Store, checked_parts, write_whole
from weakincentives.filesystem.tree import (
    Mount,
    Tree,
    mount_of,
    status_at,
    without_default_acl,
    write_all,
)

TEMPORARY = ".wink-temporary-"
"""Name prefix of scratch directories in the workspace; these are hidden from callers."""

NOTE = "rooms"
"""The file that lists them, and the kind under which it is sealed."""

logger = logging.getLogger("weakincentives.filesystem")


class Scratch:
    """A directory for staged files and saved originals."""

    def __init__(self, tree: Tree, mount: Mount, base: Parts = ()) -> None:
        self.tree = tree
        self.mount = mount
        self.base = base
        self.mark = base or None
        """Its path in records; None for the directory in the store."""

    @cached_property
    def fd(self) -> int:
        """Its descriptor, opened when first needed."""
        return int(self.tree.directory(self.base))

    def close(self) -> None:
        fd = vars(self).pop("fd", None)
        if fd is not None:
            os.close(fd)

    def at(self, name: str) -> Parts:
        return (*self.base, name)

    def status(self, name: str) -> os.stat_result | None:
        with contextlib.suppress(FileNotFoundError):  # of the directory itself
            return status_at(self.fd, name)
        return None

    def remove(self, name: str) -> None:
        """Remove an entry; a missing one is fine."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            pass
        except OSError:  # a directory
            self.tree.remove_all(self.at(name))

    def put(self, name: str, above: int, place: str) -> None:
        os.rename(name, place, src_dir_fd=self.fd, dst_dir_fd=above)


class Scratches:
    """The scratch directories of a transaction, one for each filesystem it changes."""

    def __init__(self, tree: Tree, store: Store) -> None:
        self._tree = tree
        self._store = store
        self.own = Scratch(store.tree, store.tree.mount)
        self.own.fd = store.tx_fd
        self.made: list[Scratch] = []
        """Those outside the store."""
        self._times: dict[Parts, int | None] = {}
        """The time to restore on the parent directory of each, while it may have changed."""

    def on(self, mount: Mount, parent: Parts) -> Scratch:
        """Return the one for a mount, created if needed."""
        for known in (self.own, *self.made):
            if known.mount == mount:
                return known
        self.made.append(self._make(mount, parent))
        return self.made[-1]

    def of(self, mark: Parts | None) -> Scratch:
        if mark is None:
            return self.own
        known = next((each for each in self.made if each.base == mark), None)
        return known or Scratch(self._tree, self._tree.mount, mark)

    def recall(self) -> bool:
        """Take over those of a killed process; False if there are none."""
        noted = self._noted()
        for base, time in noted.items():
            # It may have been killed while creating or removing this one.
            set_time(self._tree, base[:-1], time)
            with contextlib.suppress(OSError), self._tree.directory(base) as fd:
                self._store.avoid(os.listdir(fd))
                self.made.append(Scratch(self._tree, mount_of(fd), base))
                self._times[base] = None
        if noted:
            self._write_note()
        return bool(noted)

    def _noted(self) -> Mapping[Parts, int | None]:
        """Return the list left by a killed process; empty if it is damaged."""
        note = self._store.path / NOTE
        try:
            data = self._store.seals(NOTE).unsealed(note.read_bytes())
            noted = {checked_parts(path): time for path, time in json.loads(data or b"")}
            if not all(base and base[-1].startswith(TEMPORARY) for base in noted):
                raise ValueError("invalid name of a scratch directory")
        except FileNotFoundError:
            return {}
        except ValueError:
            place = self._store.left(("rooms",))
            os.rename(note, place)
            logger.error(
                "The list of a killed call's scratch directories is damaged; it is now %s."
                " Look for directories named %s... in the workspace",
                place,
                TEMPORARY,
            )
            return {}
        return noted

    def leave(self) -> None:
        """Remove those outside the store; a failure is retried later."""
        if not self._times:
            return
        while self.made:
            self.made.pop().close()
        self._times = {base: self._time_of(base[:-1]) for base in self._times}
        self._write_note()
        left: dict[Parts, int | None] = {}
        for base, time in self._times.items():
            try:
                self._tree.remove_all(base)
                set_time(self._tree, base[:-1], time)
                if self._store.safe:  # the note is on another disk, and goes next
                    with self._tree.directory(base[:-1]) as above:
                        os.fsync(above)
            except OSError:
                left[base] = None
        self._times = left
        self._write_note()

    def _make(self, mount: Mount, parent: Parts) -> Scratch:
        """Create one as far up as possible, where no change of a call can move or remove it."""
        tops = (parent[:depth] for depth in range(len(parent) + 1))
        same = [top for top in tops if self._is_on(mount, top)]
        for top in same:
            made = Scratch(self._tree, mount, (*top, f"{TEMPORARY}{os.urandom(6).hex()}"))
            try:
                self._make_directory(made)
            except PermissionError:
                if top == same[-1]:
                    raise
            else:
                return made
        raise FileNotFoundError(parent)

    def _is_on(self, mount: Mount, parts: Parts) -> bool:
        try:
            held = self._tree.directory(parts)
        except PermissionError:
            return False
        with held as fd:
            return mount_of(fd) == mount

    def recreate(self) -> None:
        """Re-create those that a program has removed from the workspace."""
        for each in self.made:
            status = self._tree.status_if_reached(each.base)
            if (
                status is None
                or not stat.S_ISDIR(status.st_mode)
                or not os.path.samestat(status, os.fstat(each.fd))
            ):
                each.close()
                self._tree.remove_all(each.base)
                self._make_directory(each)

    def _make_directory(self, made: Scratch) -> None:
        base, top = made.base, made.base[:-1]
        # Listed first: recovery then knows what to remove and which time to set.
        time = self._times[base] = self._time_of(top)
        self._write_note()
        try:
            with self._tree.directory(top) as above:
                os.mkdir(base[-1], 0o700, dir_fd=above)
        except OSError:
            del self._times[base]
            self._write_note()
            raise
        set_time(self._tree, base[:-1], time)
        # Hidden from git, and without inherited access control lists.
        without_default_acl(made.fd)
        with new_file(made.fd, ".gitignore") as file:
            write_all(file, b"*\n")
        self._times[base] = None
        self._write_note()

    def _time_of(self, parts: Parts) -> int | None:
        status = self._tree.status(parts)
        return None if status is None else status.st_mtime_ns

    def _write_note(self) -> None:
        note = self._store.path / NOTE
        if not self._times:
            note.unlink(missing_ok=True)
            return
        noted = json.dumps([["/".join(base), time] for base, time in self._times.items()])
        write_whole(note, self._store.seals(NOTE).sealed(noted.encode()), safe=self._store.safe)


def set_time(tree: Tree, parts: Parts, mtime_ns: int | None) -> None:
    """Set a directory's modification time, if it is known; a missing directory is fine."""
    if mtime_ns is None:
        return
    with contextlib.suppress(FileNotFoundError), tree.directory(parts) as fd:
        status = os.fstat(fd)
        if status.st_mtime_ns != mtime_ns:
            os.utime(fd, ns=(status.st_atime_ns, mtime_ns))
