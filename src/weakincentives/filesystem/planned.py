"""The plan of an undo: what is to be at which path, and what is left alone.

It looks like a directory: as it is now, with what is planned so far. Nothing is changed here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from weakincentives.filesystem.contents import Contents
from weakincentives.filesystem.entry import Entry as Node
from weakincentives.filesystem.entry import digest_of
from weakincentives.filesystem.operations import stat_of, value_of
from weakincentives.filesystem.paths import BARRED, Parts, join_path, shown
from weakincentives.filesystem.tree import Held, Tree
from weakincentives.log import Entry, Stat

LARGE = 1 << 20
"""Bytes; a larger file that nobody has touched is recognised by its status, and not read."""


class Thing(NamedTuple):
    """What is at a path, or is to be there."""

    entry: Entry | None
    stat: Stat | None = None
    """The file that it is, or was before it was replaced."""
    here: Parts | None = None
    """Where it is in the directory now, with its content and what is in it."""
    is_soft: bool = False
    """Of nothing: a directory that is there goes only if nothing is left in it."""
    is_new: bool = False
    """Whether a directory holds only what is planned: one that is there now is another one."""

    @property
    def is_directory(self) -> bool:
        return self.entry is not None and self.entry.is_directory

    @property
    def covers(self) -> bool:
        """Whether it also says what is below the path."""
        if self.entry is None:
            return not self.is_soft
        return not self.entry.is_plain_directory or self.here is not None

    def is_like(self, other: Thing | None) -> bool:
        """Whether another one has the same in it: it differs in attributes only."""
        return (
            other is not None
            and other.entry is not None
            and self.entry is not None
            and other.here == self.here
            and other.entry.content == self.entry.content
        )


NOTHING = Thing(None)


class Plan:
    """What undoing some operations would change."""

    def __init__(self, tree: Tree, contents: Contents, *, force: bool = False) -> None:
        self.tree = tree
        self.contents = contents
        self.force = force
        """Whether to replace what has changed since."""
        self.goals: dict[Parts, Thing] = {}
        self.left: dict[Parts, Thing] = {}
        """What is left alone, with the oldest version that would have come back."""
        self.removed: set[Parts] = set()
        """The directories that the undone operations removed, replaced or moved away."""
        self.partly: set[int] = set()
        """The operations of which something is left."""
        self.sentences: list[str] = []
        self._digests: dict[Parts, str | None] = {}

    # Looking

    def at(self, parts: Parts) -> Thing:
        """Return what the plan so far has at a path."""
        for depth in range(len(parts), -1, -1):
            goal = self.goals.get(parts[:depth])
            if goal is None or (depth < len(parts) and not goal.covers):
                continue
            return goal if depth == len(parts) else self._inside(goal, parts[depth:])
        return self.on_disk(parts)

    def on_disk(self, parts: Parts) -> Thing:
        """Return what is at a path now; its content is read when it matters."""
        status = self.tree.status_if_reached(parts)
        return NOTHING if status is None else found(status, parts)

    def _inside(self, goal: Thing, inner: Parts) -> Thing:
        if goal.entry is None or not goal.entry.is_directory:
            return NOTHING
        if goal.here is not None:
            return self.on_disk((*goal.here, *inner))
        entry, known = self.contents.listed(goal.entry.content).get(inner, (None, None))
        return Thing(entry, known)

    def below(self, parts: Parts) -> Iterator[Parts]:
        """Yield what the plan so far has below a directory."""
        top = self.at(parts)
        depth = len(parts)
        planned = {p for p in self.goals if len(p) > depth and p[:depth] == parts}
        if top.is_directory:
            planned.update((*parts, *inner) for inner in self.inside(top, parts))
        yield from sorted(p for p in planned if self.at(p).entry is not None)

    def inside(self, top: Thing, parts: Parts) -> Iterator[Parts]:
        """Yield what is in a directory but for goals in it, by relative paths."""
        inner: Parts = ()
        if top.is_new:
            return
        if not top.covers:  # what is in it is what the next one above says
            for depth in reversed(range(len(parts))):
                above = self.goals.get(parts[:depth])
                if above is not None and above.covers:
                    top, inner = above, parts[depth:]
                    break
        here = (*top.here, *inner) if top.here is not None else None if top.covers else parts
        if here is None:
            listed = () if top.entry is None else self.contents.listed(top.entry.content)
            yield from (
                each[len(inner) :] for each in listed if each[: len(inner)] == inner != each
            )
        elif self._is_there(here):
            for path, _ in self.tree.walk(here, lenient=True):
                if path != here:
                    yield path[len(here) :]

    def _is_there(self, parts: Parts) -> bool:
        status = self.tree.status_if_reached(parts)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def is_on_disk(self, parts: Parts) -> bool:
        """Whether what the plan has in a directory is what is in it now, but for goals below."""
        above = (self.goals.get(parts[:depth]) for depth in range(len(parts)))
        return self._is_there(parts) and not any(each is not None and each.covers for each in above)

    def is_same(self, known: Entry | None, seen: Stat | None, now: Thing) -> bool:
        """Compare kind, mode, content and link text: nothing else makes a conflict."""
        entry = now.entry
        if known is None or entry is None:
            return known is entry
        if known.kind != entry.kind:
            return False
        if known.kind == "link":
            return known.content == self.text(now)
        if known.mode != entry.mode:
            return False
        if known.kind != "file":
            return True
        if known.size != entry.size:
            return False
        is_it = seen is not None and now.stat is not None and seen[:3] == now.stat[:3]
        if is_it and known.mtime_ns == entry.mtime_ns and known.size > LARGE:
            return True
        digest = self.contents.digest(known.content) if known.content else None
        if digest is None:
            return known.mtime_ns == entry.mtime_ns
        return digest == self.digest(now)

    def digest(self, thing: Thing) -> str | None:
        """Return the digest of a file's content; None if it cannot be read."""
        if thing.here is None:
            entry = thing.entry
            return self.contents.digest(entry.content) if entry and entry.content else None
        if thing.here not in self._digests:
            try:
                with Held(self.tree.open_file(thing.here)) as fd:
                    self._digests[thing.here] = digest_of(fd)
            except OSError:
                self._digests[thing.here] = None
        return self._digests[thing.here]

    def text(self, thing: Thing) -> str | None:
        """Return the text of a link."""
        if thing.here is None:
            return None if thing.entry is None else thing.entry.content
        try:
            return self.tree.link_target(thing.here)
        except OSError:
            return None

    # Goals

    def goals_from(self, updates: Mapping[Parts, Thing]) -> None:
        restored: dict[Parts, Thing] = {}
        for parts in sorted(updates):
            thing, depth = updates[parts], len(parts)
            known = self.goals.get(parts)
            if thing.entry is None and thing.is_soft and known is not None and known.covers:
                restored[parts] = known
            if thing.covers and not thing.is_like(known):
                below = [p for p in self.goals if len(p) > depth and p[:depth] == parts]
                for path in below:
                    del self.goals[path]
            self.goals[parts] = thing
        for parts in sorted(restored, reverse=True):
            self._remove_restored(parts, restored[parts])

    def _remove_restored(self, parts: Parts, known: Thing) -> None:
        """Have a directory go that would have been restored, unless something stays in it.

        What is in the one that is there now does not matter: that one goes as a whole.
        """
        self.goals[parts] = known
        if held := [path[len(parts)] for path in self.below(parts) if len(path) == len(parts) + 1]:
            if not any(path[: len(parts)] == parts for path in self.left):  # else that is named
                self.sentences.append(holds(parts, held))
            return
        for path in [p for p in self.goals if p[: len(parts)] == parts]:
            del self.goals[path]
        self.goals[parts] = NOTHING

    def is_blocked(self, parts: Parts, coming: Collection[Parts] = ()) -> bool:
        """Whether something that stays is where a directory above a path would be.

        ``coming`` are paths where something is restored besides the goals.
        """
        above = [parts[:depth] for depth in range(len(parts))]
        if any(each in self.left and not self._is_there(each) for each in above):
            return True
        try:
            self.tree.status(parts)
        except OSError as error:
            if error.errno not in BARRED:
                raise
            return not any(each in self.goals or each in coming for each in above)
        return False


def holds(parts: Parts, names: Collection[str]) -> str:
    """Say that a directory stays because of what is in it."""
    held = ", ".join(shown(join_path((*parts, name))) for name in sorted(names)[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{shown(join_path(parts))} holds something that is not from these calls"
        f" and is left in place: {held}{more}"
    )


def found(status: os.stat_result, parts: Parts) -> Thing:
    """Return what a status says of a path, without its content."""
    entry = Node.of(status)
    return Thing(value_of(entry), stat_of(entry), parts)
