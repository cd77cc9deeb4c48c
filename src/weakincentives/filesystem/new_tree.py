"""A new directory that is filled entry by entry, and appears complete or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from weakincentives.filesystem.entry import Entry, File, apply_entry, create, link
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.tree import Held, Tree, remove_tree, without_default_acl

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class NewTree:
    """Creates entries in an empty directory that only this user can reach."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._directories: list[tuple[Parts, Entry]] = []
        self._firsts: dict[File, tuple[Parts, int]] = {}
        """The first name of each file, and how many it had."""
        self._names: list[tuple[Parts, Parts]] = []

    def add(self, parts: Parts, entry: Entry) -> bool:
        """Create an entry, directories before what is in them; False for a file or special file.

        The caller creates a file itself, or leaves it out.
        """
        file = (entry.device, entry.ino)
        first, links = self._firsts.get(file, (None, 0))
        # If other names were deleted since, the one that is left has a single link.
        if first is not None and max(links, entry.links) > 1:
            self._names.append((first, parts))
            return True
        if entry.ino and (entry.kind in ("file", "link") or entry.pipe):
            self._firsts[file] = (parts, entry.links)
        if parts or not entry.is_directory:
            with self._tree.parent(parts) as above:
                if not create(above, parts[-1] if parts else ".", entry):
                    return False
        if entry.is_directory:
            self._directories.append((parts, entry))
        else:
            apply_entry(self._tree, parts, entry)
        return True

    def finish(self) -> None:
        """Create the other names of files, and set the attributes of directories."""
        for first, parts in self._names:
            with self._tree.parent(first) as above, self._tree.parent(parts) as other:
                link(above, first[-1], other, parts[-1])
        # Inner directories first: adding an entry changes a directory's time.
        for parts, entry in sorted(self._directories, key=lambda each: each[0], reverse=True):
            apply_entry(self._tree, parts, entry)


@contextlib.contextmanager
def new_directory(target: Path) -> Generator[tuple[Path, int]]:
    """Create a directory to be renamed to ``target``: its path, and its descriptor.

    It is removed on failure. What killed processes have left is removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # a parent that can be written, but not listed
        for name in os.listdir(target.parent):
            if name.startswith(_prefix(target)):
                place = target.with_name(name)
                with contextlib.suppress(OSError), Held(os.open(place, _DIRECTORY)) as fd:
                    if _lock(fd):
                        remove_tree(place)
    staged, fd = _locked_directory(target)
    try:
        without_default_acl(staged)
        yield staged, fd
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(staged)
        raise
    finally:
        os.close(fd)


def _locked_directory(target: Path) -> tuple[Path, int]:
    while True:
        staged = target.with_name(_prefix(target) + os.urandom(6).hex())
        staged.mkdir(mode=0o700)
        # Another process may have taken it for a leftover.
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(staged, _DIRECTORY)
            if _lock(fd) and os.path.lexists(staged):
                return staged, fd
            os.close(fd)


def _lock(fd: int) -> bool:
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _prefix(target: Path) -> str:
    return f".{target.name}.wink-new-"
