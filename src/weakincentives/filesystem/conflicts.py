"""Which paths differ from how calls left them: by kind, mode, content and link text alone.

Times, owners, extended attributes and inode numbers never make a conflict.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from weakincentives.filesystem.entry import Entry, listing_of, matches
from weakincentives.filesystem.history import Committed, Delta, Past
from weakincentives.filesystem.journal import Record
from weakincentives.filesystem.layers import Disk, Layer, Look, node_at, walk
from weakincentives.filesystem.paths import Parts, join_path
from weakincentives.filesystem.states import before_call


class Conflict(NamedTuple):
    """A path that differs from how a call left it."""

    parts: Parts
    calls: tuple[str, ...]
    """The other calls that changed it since; none if someone else changed it last."""
    is_inside: bool = False
    """Whether it is in a directory that the call removed, replaced or moved away."""

    @property
    def is_obstacle(self) -> bool:
        """Whether the call is not undone because of it.

        What someone else put into a removed directory stays; the rest comes back around it.
        """
        return bool(self.calls) or not self.is_inside


def find_conflicts(past: Past, wanted: Set[int], disk: Disk) -> dict[int, list[Conflict]]:
    """Return the conflicts of each call, given that the later ones of these are undone first."""
    found: dict[int, list[Conflict]] = {}
    others: list[Delta] = []
    touched = _Touched()
    now = Layer(disk)
    for delta in past.readable(past.after(min(wanted) - 1)):
        if delta.committed.serial not in wanted:
            others.append(delta)
            continue
        before: Layer | None = None
        with contextlib.suppress(OSError):  # later changes hide what was there
            before = before_call(past, delta, now)
        found[delta.committed.serial] = [
            Conflict(parts, _changed_by(others, parts, disk, touched), is_inside)
            for parts, is_inside in _differing(delta, now, before).items()
        ]
        now = before or now
    return found


def named(conflicts: Iterable[Conflict]) -> dict[str, tuple[str, ...]]:
    """Return the paths in conflict, sorted, with the calls that changed each."""
    found = {each.parts: each.calls for each in conflicts}
    return {join_path(parts): calls for parts, calls in sorted(found.items())}


def _changed_by(
    others: Sequence[Delta], parts: Parts, disk: Look, touched: _Touched
) -> tuple[str, ...]:
    """Return the calls that changed a path, newest first; none if it has changed since."""
    left = [each for each in others if parts in each.after]
    if left and not is_same(left[0].after[parts], disk, parts):
        return ()
    return tuple(each.committed.call_id for each in others if touched.by(each.committed, parts))


class _Touched:
    """The paths that calls changed, by call."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[set[str], set[str]]] = {}

    def by(self, call: Committed, parts: Parts) -> bool:
        """Tell whether a call changed a path, or something above or below it."""
        if call.serial not in self._known:
            above = {each[: m.start()] for each in call.paths for m in re.finditer("/", each)}
            self._known[call.serial] = set(call.paths), above
        paths, above = self._known[call.serial]
        path = join_path(parts)
        return (
            path in above
            or any(join_path(parts[:depth]) in paths for depth in range(len(parts), 0, -1))
            or path in paths
        )


# The paths of one call


def _differing(delta: Delta, now: Layer, before: Layer | None) -> dict[Parts, bool]:
    """Return the paths that differ from how a call left them: whether each is in a directory that
    the call removed, replaced or moved away.
    """
    found: dict[Parts, bool] = {}
    paths = {parts for record in delta.records for parts in record.paths}
    inside = {each for top in arrived(delta) for each in _at_or_below(top, delta, now)}
    removed = removed_directories(delta)
    moved = {each.path for each in delta.records if each.op == "moved"}
    blocked: set[Parts] = set()
    """Where something else than a directory is: nothing is below."""
    for parts in sorted(paths & delta.after.keys() | inside):
        if is_below(parts, blocked):
            continue
        left, is_inside = delta.after.get(parts), is_below(parts, removed)
        if _is_as_left(left, now, parts, moved=parts in moved):
            if parts in removed and (left is None or not left.is_directory):
                blocked.add(parts)
            continue
        if before is not None and (is_inside or parts in removed):
            if _is_directory(now, parts) and _is_directory(before, parts):
                if parts in removed:
                    found.update(dict.fromkeys(_in_the_way(now, before, parts), True))
                elif _mode(now, parts) != _mode(before, parts):
                    found[parts] = True
                continue
            if is_inside and _is_alike(before, now, parts):
                continue
        found[parts] = is_inside
        if not _is_directory(now, parts):
            blocked.add(parts)
    return found


def arrived(delta: Delta) -> dict[Parts, Record]:
    """Return the directories that a call put somewhere as a whole, and left there."""
    found: dict[Parts, Record] = {}
    for record in delta.records:
        if not record.is_whole:
            continue
        if found and record.before is not None and record.before.is_directory:
            gone = record.path if record.origin is None else record.origin
            found = {each: known for each, known in found.items() if each[: len(gone)] != gone}
        left = delta.after.get(record.path)
        if record.before is None and left is not None and left.is_directory:
            found[record.path] = record
    return found


def removed_directories(delta: Delta) -> dict[Parts, Record]:
    """Return the directories that a call removed, replaced or moved away."""
    found: dict[Parts, Record] = {}
    for record in delta.records:
        if record.before is None or not record.before.is_directory:
            continue
        left = delta.after.get(record.path)
        if record.origin is not None:
            found.setdefault(record.origin, record)
        elif record.saved is not None or left is None or not left.is_directory:
            found.setdefault(record.path, record)
    return found


def is_below(parts: Parts, others: Set[Parts] | Mapping[Parts, object]) -> bool:
    """Tell whether one of some paths is above another."""
    return bool(others) and any(parts[:depth] in others for depth in range(len(parts)))


def is_related(parts: Parts, others: Iterable[Parts]) -> bool:
    """Tell whether a path is, or is above or below, one of some others."""
    return any(each[: len(parts)] == parts[: len(each)] for each in others)


def _at_or_below(top: Parts, delta: Delta, now: Layer) -> set[Parts]:
    found = {parts for parts, _ in walk(now, [top])}
    return found.union(parts for parts in delta.after if parts[: len(top)] == top)


def _in_the_way(now: Look, before: Look, top: Parts) -> Iterator[Parts]:
    """Yield what someone put into a removed directory where something else was before."""
    others: set[Parts] = set()
    for parts, node in walk(now, [top]):
        was = node_at(before, parts)
        if was is None or is_below(parts, others):
            continue
        if was.is_directory and node.is_directory:
            if was.mode != node.mode:
                yield parts
        elif not _is_alike(before, now, parts):
            others.add(parts)
            yield parts


# Comparing


def _is_as_left(left: Entry | None, look: Look, parts: Parts, *, moved: bool) -> bool:
    if not is_same(left, look, parts):
        return False
    if left is None or not (moved and left.is_directory):
        return True
    # What is in it was moved along, and nothing else says what that was.
    now = node_at(look, parts)
    is_it = now is not None and now.ino == left.ino
    return is_it or left.digest in (None, listing_of(look.kinds(parts)))


def is_same(known: Entry | None, look: Look, parts: Parts) -> bool:
    """Tell whether a path has something of this kind, mode, content and link text."""
    try:
        now = look.node(parts)
    except OSError:
        return False  # something else blocks the path
    if known is None or now is None:
        return known is now
    if (known.kind, known.pipe) != (now.kind, now.pipe):
        return False
    if known.kind == "link":
        target = look.link_target(parts)
        return matches(known, now) if known.target is None else known.target == target
    if known.mode != now.mode:
        return False
    return known.kind != "file" or _has_content(known, now, look, parts)


def _has_content(known: Entry, now: Entry, look: Look, parts: Parts) -> bool:
    """Tell whether a file has known content; times say nothing if the content can be compared."""
    if known.size != now.size:
        return False
    if known.digest is not None and now.digest is not None:
        return known.digest == now.digest
    if known.digest is not None:
        with contextlib.suppress(OSError):
            return hashlib.sha256(look.read(parts)).hexdigest() == known.digest
    return known.mtime_ns == now.mtime_ns


def _is_alike(one: Look, other: Look, parts: Parts) -> bool:
    """Tell whether two looks have the same at a path."""
    known = node_at(one, parts)
    if known is None:
        return node_at(other, parts) is None
    try:
        if known.kind == "link":
            known = known._replace(target=one.link_target(parts))
        elif known.kind == "file" and known.digest is None:
            known = known._replace(digest=hashlib.sha256(one.read(parts)).hexdigest())
    except OSError:
        return False
    return is_same(known, other, parts)


def _is_directory(look: Look, parts: Parts) -> bool:
    node = node_at(look, parts)
    return node is not None and node.is_directory


def _mode(look: Look, parts: Parts) -> int | None:
    node = node_at(look, parts)
    return None if node is None else node.mode
