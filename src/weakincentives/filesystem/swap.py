"""Swap two files while others may change them: the newest version ends up in place."""

from __future__ import annotations

import os
from typing import NamedTuple

from weakincentives.filesystem.entry import Entry, digest_of
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.scratch import Scratch
from weakincentives.filesystem.tree import Held, Tree, exchange, is_being_written


class Seen(NamedTuple):
    """What was at a path at some moment."""

    node: Entry | None
    digest: str | None = None
    """Of a file that was changed at that very moment: then its status alone proves nothing."""

    @classmethod
    def at(cls, tree: Tree, parts: Parts) -> Seen:
        """Return what is at a path, with the content of a file."""
        status = tree.status(parts)
        if status is None or Entry.of(status).kind != "file":
            return cls(None if status is None else Entry.of(status))
        with Held(tree.open_file(parts)) as fd:
            return cls(Entry.of(os.fstat(fd)), digest_of(fd))

    def is_at(self, tree: Tree, parts: Parts) -> bool:
        """Tell whether it is at a path, maybe another one by now, and nobody is changing it."""
        status, node = tree.status(parts), self.node
        if status is None or node is None:
            return status is node
        now = Entry.of(status)
        if now.kind != node.kind or node.is_directory:
            return now.kind == node.kind
        was = node.ino, node.size, node.mtime_ns, node.mode
        if (now.ino, now.size, now.mtime_ns, now.mode) != was:
            return False
        if now.kind != "file":
            return True
        with Held(tree.open_file(parts)) as fd:
            if is_being_written(fd):
                return False
            return self.digest is None or self.digest == digest_of(fd)


def put_back(scratch: Scratch, name: str, above: int, place: str, ours: Seen) -> bool:
    """Swap what is in a scratch directory and what we put at a place, which others may change.

    For filesystems that can swap names.

    Returns whether the scratch directory has ours now. If not, someone has changed it: then the
    newest version is in place, and the one that it replaced is in the scratch directory.
    """
    tree, parts = scratch.tree, scratch.at(name)
    expected, placed = ours, Seen.at(tree, parts)
    exchange(scratch.fd, name, above, place)
    while not expected.is_at(tree, parts):
        # It was changed where it was: so it is newer than what is in its place now.
        expected, placed = placed, Seen.at(tree, parts)
        exchange(scratch.fd, name, above, place)
    return expected is ours
