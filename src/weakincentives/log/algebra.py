"""Pure functions over operations: compose, invert, look up, compare and merge them.

Rollback, undo, rewind, diffs, private views and branches are all made of these. Nothing here reads
a disk: a manifest and the present state are asked for through the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from weakincentives.log.operation import (
    Change,
    Entry,
    Operation,
    Parts,
    SessionDelta,
    SliceChange,
    new_id,
)

Manifests = Callable[[str], Mapping[Parts, Entry]]
"""Returns what a manifest lists, by path relative to its directory, for the manifest's digest."""


class State(Protocol):
    """Files as they are now: a directory, or a private view of one."""

    def entry(self, path: Parts) -> Entry | None: ...

    def below(self, path: Parts) -> Iterable[Parts]:
        """Yield every path below a directory; none if it is not one."""
        ...


class Known(NamedTuple):
    """What the log says about a path at one point; ``entry`` None is nothing."""

    entry: Entry | None


class Merged(NamedTuple):
    """The changes that bring their side to ours; with conflicts, nothing may be applied."""

    changes: tuple[Change, ...]
    conflicts: tuple[Parts, ...]


# One operation


def invert(operation: Operation, *, number: int, parent: int) -> Operation:
    """Return the operation that undoes another one: its files and STATE slices."""
    return Operation(
        id=new_id(),
        number=number,
        parent=parent,
        kind="undo",
        changes=inverted(operation.changes),
        session=SessionDelta(
            tuple(SliceChange(s, after, before) for s, before, after in operation.session.state)
        ),
        undoes=(operation.number,),
    )


def inverted(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Return the changes that lead back."""
    changes = tuple(changes)
    moved = {change.origin: change.path for change in changes if change.origin is not None}
    return tuple(
        Change(path, after, before, moved.get(path), left, found)
        for path, before, after, _, found, left in changes
    )


class _Changes:
    """The changes of one operation, by path."""

    def __init__(self, changes: Iterable[Change], manifests: Manifests) -> None:
        self.by_path = {change.path: change for change in changes}
        self._manifests = manifests

    def at(self, path: Parts) -> Change | None:
        """Return what happened at a path, or None if these changes do not concern it."""
        own = self.by_path.get(path)
        if own is not None:
            return own
        above = self._whole_above(path)
        if above is None:
            return None
        inner = path[len(above.path) :]
        return Change(path, self._inside(above.before, inner), self._inside(above.after, inner))

    def _whole_above(self, path: Parts) -> Change | None:
        for depth in reversed(range(len(path))):
            change = self.by_path.get(path[:depth])
            if change is not None and change.is_whole:
                return change
        return None

    def _inside(self, directory: Entry | None, inner: Parts) -> Entry | None:
        if directory is None or not directory.is_directory or not directory.content:
            return None
        return self._manifests(directory.content).get(inner)

    def listed_below(self, change: Change) -> Iterator[Parts]:
        """Yield the paths that the manifests of a change list."""
        for side in (change.before, change.after):
            if side is not None and side.is_directory and side.content:
                for inner in self._manifests(side.content):
                    yield (*change.path, *inner)


# Several operations


def compose(operations: Iterable[Sequence[Change]], manifests: Manifests) -> tuple[Change, ...]:
    """Return the changes of successive operations as those of one."""
    steps = [_Changes(_renumbered(changes, n), manifests) for n, changes in enumerate(operations)]
    found: dict[Parts, Change] = {}
    for path in sorted(_concerned(steps)):
        first = last = None
        for step in steps:
            change = step.at(path)
            if change is not None:
                first, last = first or change, change
        if first is not None and last is not None:
            found[path] = Change(path, first.before, last.after, None, first.found, last.left)
    return tuple(_reduced(_with_origins(found, steps), manifests))


def _concerned(steps: Sequence[_Changes]) -> set[Parts]:
    """Return the paths that need a change of their own.

    That is every path with one already, and what a manifest lists below such a path: there, the
    nearest whole change is no longer the one with the manifest.
    """
    own = {path for step in steps for path in step.by_path}
    partial = {p for step in steps for p, change in step.by_path.items() if not change.is_whole}
    found = set(own)
    for step in steps:
        for path, change in step.by_path.items():
            tops = {each for each in own if _is_below(each, path) and each != path}
            tops.update(partial & {path})
            if tops:
                listed = step.listed_below(change)
                found.update(each for each in listed if any(_is_below(each, top) for top in tops))
    return found


def _reduced(changes: Mapping[Parts, Change], manifests: Manifests) -> Iterator[Change]:
    """Yield the changes without those that say nothing; parents come first."""
    kept = _Changes((), manifests)
    for path, change in changes.items():
        implied = kept.at(path)
        if implied is None:
            implied = Change(path, change.before, change.before)
        is_linked = any(side is not None and side.group for side in (change.before, change.after))
        if is_linked or change.origin or (change.before, change.after) != implied[1:3]:
            kept.by_path[path] = change
    yield from kept.by_path.values()


def _with_origins(found: Mapping[Parts, Change], steps: Iterable[_Changes]) -> dict[Parts, Change]:
    """Name where each moved entry was before the first step."""
    origins: dict[Parts, Parts] = {}
    for step in steps:
        moves = {
            path: _original(change.origin, origins)
            for path, change in step.by_path.items()
            if change.origin is not None
        }
        for path, change in step.by_path.items():
            if change.is_whole:
                origins.pop(path, None)
        origins.update(moves)
    return {
        path: change._replace(origin=origins[path])
        if path in origins and origins[path] != path and change.after is not None
        else change
        for path, change in found.items()
    }


def _original(path: Parts, origins: Mapping[Parts, Parts]) -> Parts:
    for depth in reversed(range(len(path) + 1)):
        if path[:depth] in origins:
            return (*origins[path[:depth]], *path[depth:])
    return path


def _renumbered(changes: Iterable[Change], step: int) -> Iterator[Change]:
    """Make the numbers of hard-linked files distinct among steps."""
    for change in changes:
        before, after = (
            side._replace(group=side.group * _STEPS + step) if side and side.group else side
            for side in change[1:3]
        )
        yield change._replace(before=before, after=after)


_STEPS = 1 << 32


def state_at(
    path: Parts, line: Iterable[Operation], later: Iterable[Operation], manifests: Manifests
) -> Known | None:
    """Return what was at a path at a point of the history, or None if no operation tells.

    ``line`` has the operations up to that point, newest first; ``later`` those after it that led
    to what is checked out, oldest first. A path that no operation has changed is as it is now.
    """
    for operation in line:
        change = _Changes(operation.changes, manifests).at(path)
        if change is not None:
            return Known(change.after)
    for operation in later:
        change = _Changes(operation.changes, manifests).at(path)
        if change is not None:
            return Known(change.before)
    return None


# Comparing with the present


def conflicts(changes: Iterable[Change], now: State, manifests: Manifests) -> tuple[Parts, ...]:
    """Return the paths that are not as some changes left them, sorted.

    Content, kind and mode count, and so does every path that was added below a whole change.
    """
    known = _Changes(changes, manifests)
    found: set[Parts] = set()
    for path, change in known.by_path.items():
        paths = {path}
        if change.is_whole:
            paths.update(known.listed_below(change))
            paths.update(now.below(path))
        for each in paths:
            left = known.at(each)
            if left is not None and not _is_equivalent(left.after, now.entry(each)):
                found.add(each)
    return tuple(sorted(found))


def _is_equivalent(one: Entry | None, other: Entry | None) -> bool:
    return one is other if one is None or other is None else one.is_equivalent(other)


# Merging


def merge(ours: Sequence[Change], theirs: Sequence[Change], manifests: Manifests) -> Merged:
    """Return the changes that add their side to ours, given both sides since a common base."""
    own = _Changes(_expanded(ours, theirs, manifests), manifests)
    other = _Changes(_expanded(theirs, ours, manifests), manifests)
    changes: dict[Parts, Change] = {}
    clashes: set[Parts] = set()
    for path in sorted({*own.by_path, *other.by_path}):
        our, their = own.at(path), other.at(path)
        if their is None or _is_idle(their):
            continue
        if our is None:
            changes[path] = their
        elif _is_idle(our):
            changes[path] = their._replace(before=our.after, found=our.left)
        elif not _is_equivalent(our.after, their.after):
            clashes.add(path)
    clashes.update(_misplaced(own, changes, manifests))
    return Merged(tuple(changes.values()), tuple(sorted(clashes)))


def _is_idle(change: Change) -> bool:
    """Whether a change left kind, mode and content, a directory's manifest included, alone."""
    _, before, after, *_ = change
    if before is None or after is None:
        return before is after
    return before.is_equivalent(after) and before.content == after.content


def _expanded(
    changes: Sequence[Change], others: Iterable[Change], manifests: Manifests
) -> Iterator[Change]:
    """Replace manifests by single changes where the other side changed something, too."""
    known = _Changes(changes, manifests)
    paths = {change.path for change in others}
    for change in changes:
        if not any(_is_below(change.path, p) or _is_below(p, change.path) for p in paths):
            yield change
            continue
        yield change._replace(before=_plain(change.before), after=_plain(change.after))
        for path in set(known.listed_below(change)) - known.by_path.keys():
            inner = known.at(path)
            if inner is not None and inner.before != inner.after:
                yield inner


def _plain(entry: Entry | None) -> Entry | None:
    return entry._replace(content="") if entry is not None and entry.is_directory else entry


def _misplaced(
    own: _Changes, changes: Mapping[Parts, Change], manifests: Manifests
) -> Iterator[Parts]:
    """Yield paths that would be left below something that is no longer a directory."""
    result = _Changes(changes.values(), manifests)
    for path in {*own.by_path, *changes}:
        left = result.by_path.get(path) or own.by_path.get(path)
        if left is None or left.after is None:
            continue
        for depth in range(len(path)):
            above = result.by_path.get(path[:depth]) or own.by_path.get(path[:depth])
            if above is not None and not (above.after is not None and above.after.is_directory):
                yield path


def _is_below(path: Parts, directory: Parts) -> bool:
    """Whether a path is a directory's own or below it."""
    return path[: len(directory)] == directory
