"""Every version of every file in a history: what each commit found and left, read without a lock.

Commits are read once; later looks read only those added since.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from weakincentives.core.gc_pause import no_collection
from weakincentives.errors import ContentDamaged, HistoryDamaged
from weakincentives.filesystem.branch_log import BranchHistory, BranchInfo, changed_between
from weakincentives.filesystem.contents import node_of
from weakincentives.filesystem.diffs import changed_nodes
from weakincentives.filesystem.entry import Entry
from weakincentives.filesystem.history import Committed, committed
from weakincentives.filesystem.layers import Look
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.sides import Effects
from weakincentives.filesystem.store import DAMAGED
from weakincentives.filesystem.undo import WorkspaceHistory

MAX_CONTENT = 32 << 20
"""Bytes; a larger file is not read."""


class FileStep(NamedTuple):
    """What a commit did at one path: a file, link or pipe before, after, or both."""

    parts: Parts
    before: Entry | None
    after: Entry | None
    origin: Parts | None = None
    """Where it was before, if the commit moved it; ``before`` is what was there."""

    @property
    def found_at(self) -> Parts:
        """The path of what was there before."""
        return self.parts if self.origin is None else self.origin

    @property
    def paths(self) -> tuple[Parts, ...]:
        return (self.parts,) if self.origin is None else (self.parts, self.origin)


class CommitSteps(NamedTuple):
    """A commit, and what it did to files."""

    call: Committed
    steps: tuple[FileStep, ...]

    def at(self, parts: Parts) -> FileStep | None:
        """Return what it did at a path: changed or moved something there, or moved it away."""
        found = [each for each in self.steps if parts in each.paths]
        return next((each for each in found if each.parts == parts), found[0] if found else None)


class Versions(ABC):
    """The commits of a history, and the content of each file before and after each.

    One thread may refresh it while others read.
    """

    def __init__(self) -> None:
        self.commits: list[CommitSteps] = []
        """Oldest first; ``refresh`` adds new ones."""
        self._touching: dict[Parts, list[int]] = {}
        """For each path the commits that changed it, as places in ``commits``."""

    @abstractmethod
    def refresh(self) -> None:
        """Read the commits that were added since."""

    @abstractmethod
    def before(self, commit: CommitSteps, step: FileStep) -> bytes:
        """Return what a file had before a commit; raises OSError if that is not known."""

    @abstractmethod
    def after(self, commit: CommitSteps, step: FileStep) -> bytes:
        """Return what a file had after a commit; raises OSError if that is not known."""

    @property
    def oldest(self) -> int:
        """The serial before the first commit that is known."""
        return self.commits[0].call.serial - 1 if self.commits else 0

    @property
    def last(self) -> int:
        return self.commits[-1].call.serial if self.commits else 0

    def commit(self, serial: int) -> CommitSteps:
        """Return the commit with this serial, or else the next."""
        return self.commits[bisect_left(self.commits, serial, key=_serial)]

    def since(self, serial: int) -> Sequence[CommitSteps]:
        """Return the commits after one."""
        return self.commits[bisect_left(self.commits, serial + 1, key=_serial) :]

    def touching(self, parts: Parts) -> list[tuple[CommitSteps, FileStep]]:
        """Return the commits that changed a path, or moved something from it, oldest first."""
        places = self._touching.get(parts, ())
        found = ((self.commits[place], self.commits[place].at(parts)) for place in places)
        return [(commit, step) for commit, step in found if step is not None]

    def paths_at(self, serial: int, present: Iterable[Parts]) -> set[Parts]:
        """Return the paths of files after a commit, given those that are there now.

        What no commit changed is taken to be as it is now.
        """
        paths = set(present)
        for commit in reversed(self.since(serial)):
            for step in commit.steps:
                if step.after is not None:
                    paths.discard(step.parts)
            paths.update(step.found_at for step in commit.steps if step.before is not None)
        return paths

    def _add(self, commit: CommitSteps) -> None:
        self.commits.append(commit)
        for parts in {parts for step in commit.steps for parts in step.paths}:
            self._touching.setdefault(parts, []).append(len(self.commits) - 1)


def _serial(commit: CommitSteps) -> int:
    return commit.call.serial


class WorkspaceVersions(Versions):
    """The versions of files in the history of a directory."""

    def __init__(self, history: WorkspaceHistory) -> None:
        super().__init__()
        self._history = history
        self._past = history.past()
        """Replaced by each refresh: others may be reading."""
        self._looking = threading.Lock()
        """The history is not for several threads at once."""
        self._changed_at = (-1, -1)

    def refresh(self) -> None:
        changed_at = self._past.changed_at()
        if changed_at == self._changed_at:
            return
        past = self._past = self._history.past()
        with no_collection():
            for serial in reversed(past.after(self.last)):
                for operation in past.operations([serial])[0]:
                    steps = tuple(_steps(Effects(operation, past.contents)))
                    self._add(CommitSteps(committed(operation), steps))
        self._changed_at = changed_at

    def before(self, commit: CommitSteps, step: FileStep) -> bytes:
        entry = step.before
        if entry is None or entry.target is not None:
            return _target(entry)
        _check_size(entry)
        if entry.digest is not None:
            return self._stored(entry.digest)
        return self._seen(commit.call.serial - 1, step.found_at)

    def after(self, commit: CommitSteps, step: FileStep) -> bytes:
        entry = step.after
        if entry is None or entry.target is not None:
            return _target(entry)
        _check_size(entry)
        if entry.digest is not None:
            with suppress(FileNotFoundError):
                return self._stored(entry.digest)
        data = self._seen(commit.call.serial, step.parts)
        if entry.digest not in (None, hashlib.sha256(data).hexdigest()):
            raise FileNotFoundError(errno.ENOENT, "it was changed since by somebody else")
        return data

    def _seen(self, serial: int, parts: Parts) -> bytes:
        """Return a file as the directory shows it, without what later calls did."""
        with self._looking:
            return self._history.look_at(serial).read(parts)

    def _stored(self, digest: str) -> bytes:
        try:
            return self._past.contents.read(digest)
        except HistoryDamaged as error:
            raise ContentDamaged(DAMAGED, str(error)) from error


def _steps(effects: Effects) -> Iterator[FileStep]:
    changes = list(effects.all())
    before = {each.path: node_of(each.before, each.found) for each in changes}
    after = {each.path: node_of(each.after, each.left) for each in changes}
    return _paired(before, after)


def _paired(
    before: Mapping[Parts, Entry | None], after: Mapping[Parts, Entry | None]
) -> Iterator[FileStep]:
    two = {
        parts: (_no_directory(before[parts]), _no_directory(after[parts]))
        for parts in sorted(before)
    }
    # A file that is gone at one path and came at another was moved.
    gone = {old.ino: parts for parts, (old, new) in two.items() if old and old.ino and new is None}
    origins = {
        parts: gone.pop(new.ino)
        for parts, (old, new) in two.items()
        if new is not None and old is None and new.ino in gone
    }
    moved = set(origins.values())
    for parts, (old, new) in two.items():
        origin = origins.get(parts)
        if origin is not None:
            yield FileStep(parts, two[origin][0], new, origin)
        elif parts not in moved and (old, new) != (None, None) and not _is_same(old, new):
            yield FileStep(parts, old, new)


def _no_directory(entry: Entry | None) -> Entry | None:
    return None if entry is None or entry.is_directory else entry


def _is_same(old: Entry | None, new: Entry | None) -> bool:
    if old is None or new is None or None in (old.digest, new.digest):
        return False
    return old.kind == new.kind and old.is_like(new)


def _target(entry: Entry | None) -> bytes:
    if entry is None:
        raise FileNotFoundError(errno.ENOENT, "there was no file")
    return os.fsencode(entry.target or "")


def _check_size(entry: Entry) -> None:
    if entry.kind not in ("file", "link"):
        raise OSError(errno.EINVAL, "not a regular file")
    if entry.size > MAX_CONTENT:
        raise OSError(errno.EFBIG, "too large to show")


class BranchVersions(Versions):
    """The versions of files on a branch. Make a new one when the branch has changed."""

    def __init__(self, root: Path, info: BranchInfo, known: BranchVersions | None = None) -> None:
        super().__init__()
        self.info = info
        self._branch = BranchHistory(root, info)
        same = known is not None and (known.info.base, known.info.began) == (info.base, info.began)
        self._known = known.commits if known is not None and same else []
        self._reading = threading.Lock()
        """The base of a branch is not for several threads at once."""
        self.refresh()

    def refresh(self) -> None:
        for number, call in enumerate(self.info.commits[len(self.commits) :], len(self.commits)):
            if number < len(self._known) and self._known[number].call == call:
                self._add(self._known[number])
                continue
            before, after = self._branch.points[number : number + 2]
            steps = (
                FileStep(parts, _no_directory(old), _no_directory(new), origin)
                for parts, origin, old, new in changed_nodes(
                    changed_between(before, after), before, after
                )
            )
            self._add(CommitSteps(call, tuple(s for s in steps if (s.before, s.after) != _NONE)))

    def before(self, commit: CommitSteps, step: FileStep) -> bytes:
        with self._reading:
            look = self._branch.points[commit.call.serial - 1]
            return _read(look, step.found_at, step.before)

    def after(self, commit: CommitSteps, step: FileStep) -> bytes:
        with self._reading:
            return _read(self._branch.points[commit.call.serial], step.parts, step.after)


_NONE = (None, None)


def _read(look: Look, parts: Parts, entry: Entry | None) -> bytes:
    if entry is not None and entry.kind == "link":
        return os.fsencode(look.link_target(parts))
    if entry is None:
        return _target(entry)
    _check_size(entry)
    return look.read(parts)
