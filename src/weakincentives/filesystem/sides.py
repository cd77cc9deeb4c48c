"""What was at each path before and after some operations, for diffs: as they found and left it.

What someone else has changed since is never shown.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from weakincentives.errors import ContentDamaged, HistoryDamaged
from weakincentives.filesystem.contents import Contents, node_of
from weakincentives.filesystem.entry import Entry as Node
from weakincentives.filesystem.paths import Parts, system_error
from weakincentives.filesystem.store import DAMAGED
from weakincentives.filesystem.tree import Tree
from weakincentives.log import Change, Entry, Operation, Stat


class Effects:
    """What an operation changed at every path, also in directories that it changed as a whole."""

    def __init__(self, operation: Operation, contents: Contents) -> None:
        self.own = {change.path: change for change in operation.changes}
        self._contents = contents

    @cached_property
    def names(self) -> Mapping[Parts, set[str]]:
        """The names that it changed, or listed, in each directory."""
        found: dict[Parts, set[str]] = {}
        for change in self.all():
            for depth in range(len(change.path), 0, -1):
                known = found.setdefault(change.path[: depth - 1], set())
                if change.path[depth - 1] in known:
                    break
                known.add(change.path[depth - 1])
        return found

    def all(self) -> Iterator[Change]:
        for path, change in self.own.items():
            yield change
            for below in self.listed(path):
                if below not in self.own and (inner := self.at(below)) is not None:
                    yield inner

    def listed(self, path: Parts) -> Iterator[Parts]:
        """Yield what the manifests of a change list below its path."""
        change, seen = self.own[path], set[Parts]()
        for side in (change.before, change.after):
            if side is not None and side.is_directory and side.content:
                for inner in self._contents.listed(side.content).keys() - seen:
                    seen.add(inner)
                    yield (*path, *inner)

    def at(self, path: Parts) -> Change | None:
        """Return the change at a path, or what the next one above says of it."""
        if path in self.own:
            return self.own[path]
        for depth in reversed(range(len(path))):
            above, inner = self.own.get(path[:depth]), path[depth:]
            if above is not None and above.is_whole:
                (before, found), (after, left) = (
                    self._contents.listed(side.content).get(inner, (None, None))
                    if side is not None and side.is_directory
                    else (None, None)
                    for side in (above.before, above.after)
                )
                origin = None if above.origin is None else (*above.origin, *inner)
                return Change(path, before, after, after and origin, found, left)
        return None


class Side(NamedTuple):
    """What was at a path at one time."""

    entry: Entry | None
    stat: Stat | None = None
    place: str | Parts | None = None
    """Where its content may be, if it is not stored under its digest: what an entry names as its
    content, or a path in the directory; None if that is not known."""


class Sides:
    """What was at some paths at one time, as :func:`file_changes` looks at it."""

    def __init__(self, tree: Tree, contents: Contents, known: Mapping[Parts, Side]) -> None:
        self._tree = tree
        self._contents = contents
        self._known = known

    def node(self, parts: Parts) -> Node | None:
        side = self._known.get(parts)
        node = None if side is None else node_of(side.entry, side.stat)
        # No other file is taken for one whose inode is not known.
        return node if node is None or node.ino else node._replace(ino=-1 - abs(hash(parts)))

    def link_target(self, parts: Parts) -> str:
        entry = self._known[parts].entry
        if entry is None or entry.kind != "link":
            raise system_error(errno.EINVAL, parts)
        return entry.content

    def read(self, parts: Parts) -> bytes:
        entry, _, place = self._known[parts]
        if entry is None:
            raise system_error(errno.ENOENT, parts)
        try:
            if entry.content:
                return self._contents.read(entry.content)
        except FileNotFoundError:
            pass
        except HistoryDamaged as error:
            raise ContentDamaged(DAMAGED, str(error)) from error
        if isinstance(place, str):
            data = self._contents.read(place)
        elif place is None:
            raise FileNotFoundError(errno.ENOENT, "its content was not saved")
        else:
            data, status = self._tree.read(place)
            if not entry.content and (status.st_size, status.st_mtime_ns) != (
                entry.size,
                entry.mtime_ns,
            ):
                raise OSError(errno.ESTALE, "changed since")
        if entry.content and hashlib.sha256(data).hexdigest() != entry.content:
            raise OSError(errno.ESTALE, "changed since")
        return data


class Backwards:
    """Goes back over operations, the newest first."""

    def __init__(self, tree: Tree, contents: Contents) -> None:
        self.tree = tree
        self._contents = contents
        self._places: dict[Parts, str | Parts | None] = {}
        """Where the content of a path is that later operations have changed."""

    def step(self, operation: Operation) -> tuple[dict[Parts, Side], dict[Parts, Side]]:
        """Return what an operation found and left at each path that it changed."""
        changes = list(Effects(operation, self._contents).all())
        after = {
            each.path: Side(each.after, each.left, self._places.get(each.path, each.path))
            for each in changes
        }
        moved = {each.origin: each.path for each in changes if each.origin is not None}
        before: dict[Parts, Side] = {}
        for path, found, _, _, stat, _ in changes:
            place: str | Parts | None = None
            if found is not None and found.kind == "file":
                place = found.content or None
                target = after.get(moved.get(path, path))
                if place is None and target is not None and target.entry is not None:
                    left = target.entry
                    if (left.size, left.mtime_ns) == (found.size, found.mtime_ns):
                        place = left.content or target.place  # it was only moved
            before[path] = Side(found, stat, place)
        self._places.update((path, side.place) for path, side in before.items())
        return before, after

    def sides(self, known: Mapping[Parts, Side]) -> Sides:
        return Sides(self.tree, self._contents, known)


def between(
    backwards: Backwards, operations: Iterable[Operation], wanted: set[int]
) -> tuple[Sides, Sides, list[Parts]]:
    """Return what was before the first and after the last of some operations, and where they
    changed something. ``operations`` come newest first, with all those after them.
    """
    first: dict[Parts, Side] = {}
    last: dict[Parts, Side] = {}
    paths: set[Parts] = set()
    for operation in operations:
        if operation.number < min(wanted):
            break
        before, after = backwards.step(operation)
        if operation.number > max(wanted):
            continue
        first.update(before)
        last = {**after, **last}
        if operation.number in wanted:
            paths.update(before)
    return backwards.sides(first), backwards.sides(last), sorted(paths)
