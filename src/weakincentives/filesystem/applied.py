"""Apply the plan of an undo through an open transaction: it is journalled like any change."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping

from weakincentives.filesystem.changes import Changes
from weakincentives.filesystem.contents import Contents
from weakincentives.filesystem.entry import capture, copy_exactly
from weakincentives.filesystem.paths import BARRED, Parts, join_path, shown
from weakincentives.filesystem.planned import Plan, Thing, holds
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.log import Entry as Value
from weakincentives.log import Operation


class Application:
    """Brings a directory to what a plan says, one path after the other, directories first."""

    def __init__(
        self, changes: Changes, plan: Plan, contents: Contents, later: list[Operation]
    ) -> None:
        self.changes = changes
        self.plan = plan
        self.contents = contents
        self.sentences: list[str] = []
        self._staged: dict[Parts, str] = {}
        """Things that are moved, but not by a single rename: copies of them."""
        self._copied: set[Parts] = set()
        """Where they are: nothing of them stays there."""
        self._parked: dict[Parts, tuple[Parts, Parts]] = {}
        """Things that are moved by two renames, because something else has to happen in between:
        where each is meanwhile, and where it was."""
        self._renamed: set[Parts] = set()
        self._made: set[Parts] = set()
        """Directories that were restored before what is moved into them."""
        self._attributes: dict[Parts, Value] = {}
        """Of directories; set last, because a change in a directory changes its time."""
        self.times: dict[Parts, int] = {}
        """The times of directories before they were changed; restored after all else."""
        self._links = _Links(changes, later)

    def set_times(self, times: Mapping[Parts, int]) -> None:
        """Restore directory times, after all other changes."""
        for path, mtime in sorted({**self.times, **times}.items(), reverse=True):
            with contextlib.suppress(OSError):  # gone, or no longer a directory
                status = self.changes.tree.status_if_reached(path)
                is_directory = status is not None and stat.S_ISDIR(status.st_mode)
                if status is not None and is_directory and status.st_mtime_ns != mtime:
                    self.changes.set_attributes(path, mtime_ns=mtime)

    def run(self) -> None:
        goals = self.plan.goals
        moves = {
            path: goal.here
            for path, goal in goals.items()
            if goal.here is not None and (goal.here != path or self._goes_above(path))
        }
        soft: list[Parts] = []
        self._move(moves, soft)
        for path in sorted(goals):
            if path not in self._made:
                self._try_to_bring(path, goals[path], soft)
        for path, (place, origin) in sorted(self._parked.items()):  # it could not be put there
            self.changes.rename(place, origin)
            self._cannot(path, f"it stays at {shown(join_path(origin))}")
        for path in reversed(soft):
            self._remove_if_empty(path)
        for path in sorted(self._attributes, reverse=True):
            self._set_attributes(path, self._attributes[path])

    def _goes_above(self, path: Parts) -> bool:
        """Whether a directory above a path is replaced as a whole."""
        above = [path[:depth] for depth in range(len(path))]
        goals = ((each, self.plan.goals.get(each)) for each in above)
        return any(goal is not None and goal.covers and goal.here != each for each, goal in goals)

    def _try_to_bring(self, path: Parts, goal: Thing, soft: list[Parts]) -> None:
        try:
            self._bring(path, goal, soft)
        except OSError as error:
            if not self.plan.force:
                raise
            self._cannot(path, error.strerror or str(error))

    # Moves

    def _move(self, moves: dict[Parts, Parts], soft: list[Parts]) -> None:
        """Move by rename what can be; of the rest, take copies before anything is changed."""
        simple: list[tuple[Parts, Parts]] = []
        parked: list[tuple[Parts, Parts]] = []
        above = {each for path in moves for each in self._restored_above(path, moves)}
        for path, origin in sorted(moves.items()):
            if self._is_simple(path, origin, moves, above):
                simple.append((origin, path))
            elif self._may_leave(path, origin, moves):
                parked.append((origin, path))
            else:
                self._copied.add(origin)
                staged = self._staged[path] = self.changes.store.fresh()
                copy_exactly(self.changes.tree, origin, self.changes.store.tree, (staged,))
        for origin, path in sorted(parked, key=_depth, reverse=True):  # the inner ones first
            self._keep_time(origin[:-1])
            self._keep_time(())
            place = (f"{TEMPORARY}{os.urandom(8).hex()}",)
            self.changes.rename(origin, place)
            self._parked[path] = place, origin
        for path in sorted(above):
            self._try_to_bring(path, self.plan.goals[path], soft)
            self._made.add(path)
        for origin, path in simple:
            if not self._is_free(path):
                self._remove(path)
            self._keep_time(origin[:-1])
            self._keep_time(path[:-1])
            self.changes.rename(origin, path)
            self._renamed.add(path)

    def _may_leave(self, path: Parts, origin: Parts, moves: dict[Parts, Parts]) -> bool:
        """Whether nothing of what is moved is to stay where it is."""
        if not origin or sum(1 for each in moves.values() if each == origin) > 1:
            return False
        if self._holds_left(origin) or origin in self.plan.left:
            return False
        goal = self.plan.goals.get(origin)
        if goal is not None and not (goal.entry is not None and goal.here == origin != path):
            return True
        return self._goes_above(origin)

    def _restored_above(self, path: Parts, moves: dict[Parts, Parts]) -> Iterator[Parts]:
        """Yield the directories above a path that are restored from what is kept.

        Not those where something is now that is moved.
        """
        for depth in range(len(path)):
            goal = self.plan.goals.get(path[:depth])
            is_kept = goal is not None and goal.here is None and goal.covers and goal.is_directory
            if is_kept and not any(_nested(path[:depth], each) for each in moves.values()):
                yield path[:depth]

    def _is_simple(
        self, path: Parts, origin: Parts, moves: dict[Parts, Parts], made: set[Parts]
    ) -> bool:
        """Whether a rename leads from one path to another, and disturbs no other goal."""
        goals = self.plan.goals
        leaves = goals.get(origin)
        if leaves is None or leaves.here is not None:
            return False
        is_known = moves.values()
        if sum(1 for each in is_known if each == origin) > 1 or any(
            _nested(each, other)
            for each in (path, origin)
            for pair in moves.items()
            if pair != (path, origin)
            for other in pair
        ):
            return False
        if _nested(path, origin) or not self._can_give_way(path):
            return False
        above = (goals.get(p) for p in (path[:d] for d in range(len(path))) if p not in made)
        return not any(each is not None and each.covers for each in above)

    def _is_free(self, path: Parts) -> bool:
        return self.changes.tree.status(path) is None

    def _can_give_way(self, path: Parts) -> bool:
        """Whether nothing is at a path, or nothing that stays."""
        try:
            return self._is_free(path) or not self._holds_left(path)
        except OSError as error:
            if error.errno not in BARRED:
                raise
            return False

    # One path

    def _bring(self, path: Parts, goal: Thing, soft: list[Parts]) -> None:
        entry, status = goal.entry, self.changes.tree.status_if_reached(path)
        is_directory = status is not None and stat.S_ISDIR(status.st_mode)
        if entry is None:
            if status is None:
                return
            is_soft = goal.is_soft and path not in self._copied
            if is_directory and (is_soft or self._holds_left(path)):
                soft.append(path)
            else:
                self._remove(path)
        elif path in self._staged:
            self._put(path, self._staged[path])
            self._finish(path, entry)
        elif path in self._parked:
            place, _ = self._parked[path]
            if status is not None:
                self._remove(path)
            self._keep_time(path[:-1])
            self.changes.rename(place, path)
            del self._parked[path]
            self._finish(path, entry)
        elif path in self._renamed or (goal.here is not None and entry.is_directory):
            self._finish(path, entry)  # it is there already, with everything in it
        elif entry.is_directory:
            self._bring_directory(path, entry, is_directory, status)
        elif is_directory and self._holds_left(path):
            self._hold(path)
        elif entry.kind == "file":
            self._bring_file(path, goal, entry, status)
        elif not self._is_there(path, entry):
            self._create(path, entry)
        else:
            self._set_attributes(path, entry)

    def _finish(self, path: Parts, entry: Value) -> None:
        if entry.is_directory:
            self._attributes[path] = entry
        else:
            self._set_attributes(path, entry)

    def _bring_directory(
        self, path: Parts, entry: Value, is_directory: bool, status: os.stat_result | None
    ) -> None:
        if entry.content:
            staged = self.changes.store.fresh()
            try:
                self.contents.make(entry, self.changes.store.tree, staged)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise
                self._cannot(path, "its content was not saved")
                return
            self._put(path, staged)
        elif not is_directory:
            if status is not None:
                self._remove(path)
            self._keep_time(path[:-1])
            self.changes.make_directory(path)
        self._attributes[path] = entry._replace(content="")

    def _bring_file(
        self, path: Parts, goal: Thing, entry: Value, status: os.stat_result | None
    ) -> None:
        if goal.here == path:
            self._set_attributes(path, entry)
            return
        digest = self.contents.digest(entry.content)
        twin = self._links.twin(goal, entry, digest)
        if twin is not None:
            self._add_name(twin, path)
        elif not self._is_as_wanted(path, goal, status, digest):
            ino = None if goal.stat is None else goal.stat.inode
            if status is not None and status.st_nlink > 1 and status.st_ino == ino:
                self.changes.write(path, self.contents.read(entry.content))  # for all its names
            else:
                self._create(path, entry)
        self._set_attributes(path, entry)
        self._links.made(goal, path)

    def _is_as_wanted(
        self, path: Parts, goal: Thing, status: os.stat_result | None, digest: str | None
    ) -> bool:
        """Whether a file has the content already, and is not linked to another by now."""
        if status is None or not stat.S_ISREG(status.st_mode) or digest is None:
            return False
        if goal.stat is not None and status.st_nlink > 1 and status.st_ino != goal.stat.inode:
            return False
        now = capture(self.changes.tree, path, read=True)
        return now is not None and now.digest == digest

    def _create(self, path: Parts, entry: Value) -> None:
        staged = self.changes.store.fresh()
        try:
            self.contents.make(entry, self.changes.store.tree, staged)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            self._cannot(path, "its content was not saved")
            return
        self._put(path, staged)

    def _is_there(self, path: Parts, entry: Value) -> bool:
        now = self.plan.on_disk(path)
        return self.plan.is_same(entry, None, now)

    # Changing

    def _put(self, path: Parts, staged: str) -> None:
        self._keep_time(path[:-1])
        self.changes.put_file(path, self.changes.store.tx / staged)

    def _remove(self, path: Parts) -> None:
        self._keep_time(path[:-1])
        try:
            self.changes.remove(path)
        except PermissionError:
            # The call removed write permission from the directory; that is undone next.
            self.changes.set_attributes(path[:-1], mode=0o700)
            self.changes.remove(path)

    def _add_name(self, twin: Parts, path: Parts) -> None:
        one, other = (self.changes.tree.status_if_reached(each) for each in (twin, path))
        if one is None or other is None or not os.path.samestat(one, other):
            self._keep_time(path[:-1])
            self.changes.add_name(twin, path)

    def _keep_time(self, path: Parts) -> None:
        """Note the time of a directory in which something is changed for the first time."""
        if path not in self.times:
            status = self.changes.tree.status_if_reached(path)
            if status is not None:
                self.times[path] = status.st_mtime_ns

    def _set_attributes(self, path: Parts, entry: Value) -> None:
        status = self.changes.tree.status_if_reached(path)
        if status is None:
            return
        now = capture(self.changes.tree, path)
        known = (entry.mode, entry.uid, entry.gid, entry.mtime_ns, entry.xattrs)
        if now is None or (now.kind == "link" and (now.uid, now.gid, now.mtime_ns) == known[1:4]):
            return
        if (now.mode, now.uid, now.gid, now.mtime_ns, now.xattrs) != known:
            self.changes.set_attributes(
                path,
                mode=entry.mode,
                uid=entry.uid,
                gid=entry.gid,
                mtime_ns=entry.mtime_ns,
                xattrs=entry.xattrs,
            )

    # What stays

    def _holds_left(self, path: Parts) -> bool:
        """Whether something that is left alone is in a directory."""
        depth = len(path)
        return any(
            len(each) > depth
            and each[:depth] == path
            and self.changes.tree.status_if_reached(each) is not None
            for each in self.plan.left
        )

    def _remove_if_empty(self, path: Parts) -> None:
        status = self.changes.tree.status_if_reached(path)
        if status is None or not stat.S_ISDIR(status.st_mode):
            return
        if self.changes.tree.names(path):
            self._hold(path)
        else:
            self._remove(path)

    def _hold(self, path: Parts) -> None:
        """Name a directory that holds what is not from these calls."""
        if self._holds_left(path):
            return  # that has its own sentence
        self.sentences.append(holds(path, self.changes.tree.names(path)))

    def _cannot(self, path: Parts, why: str) -> None:
        self.sentences.append(f"{shown(join_path(path))} could not be restored: {why}")


def _nested(one: Parts, other: Parts) -> bool:
    """Whether one path is at or below the other."""
    depth = min(len(one), len(other))
    return one[:depth] == other[:depth]


def _depth(two: tuple[Parts, Parts]) -> int:
    return len(two[0])


class _Links:
    """Finds the file that a re-created name was a hard link to."""

    def __init__(self, changes: Changes, later: list[Operation]) -> None:
        self._changes = changes
        self._later = later
        """All operations after the oldest that is undone, the newest first."""
        self._made: dict[int, Parts] = {}
        """Files that this undo has re-created, by the inode that they had before."""
        self._found: dict[int, list[Parts]] | None = None
        """The files in the workspace by inode; read when a hard link is first looked for."""

    def made(self, goal: Thing, path: Parts) -> None:
        if goal.stat is not None:
            self._made.setdefault(goal.stat.inode, path)

    def twin(self, goal: Thing, entry: Value, digest: str | None) -> Parts | None:
        """Return another name of the file that was at a path, if it still has that content."""
        known = goal.stat
        if known is None or digest is None or (known.links < 2 and known.inode not in self._made):
            return None
        for parts in self._names(known.inode):
            now = capture(self._changes.tree, parts, read=True)
            # An inode can be used again: content and mode must agree, too.
            wanted = ("file", entry.mode, digest)
            if now is not None and (now.kind, now.mode, now.digest) == wanted:
                return parts
        return None

    def _names(self, ino: int) -> Iterator[Parts]:
        if ino in self._made:
            yield self._made[ino]
        if self._found is None:
            self._found = {}
            for parts, status in self._changes.tree.walk((), lenient=True):
                if stat.S_ISREG(status.st_mode) and not parts[0].startswith(TEMPORARY):
                    self._found.setdefault(status.st_ino, []).append(parts)
        for each in (ino, *self._since(ino)):
            yield from self._found.get(each, ())

    def _since(self, ino: int) -> list[int]:
        """Return the inodes that a file got when undoing later calls re-created it."""
        found = [ino]
        by_number = {each.number: each for each in self._later}
        for undo in reversed(self._later):
            left = {each.path: each.left for each in undo.changes}
            for undone in (by_number[n] for n in undo.undoes if n in by_number):
                for change in undone.changes:
                    now = left.get(change.path)
                    if change.found is not None and change.found.inode in found and now is not None:
                        found.append(now.inode)
        return found[1:]
