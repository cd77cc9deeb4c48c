"""The inverse of operations, planned path by path: what comes back, and what is left alone.

Operations are taken one by one, the newest first, and each is compared with what there is: the
directory, as the plan so far would change it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from weakincentives.filesystem.paths import Parts, join_path, shown
from weakincentives.filesystem.planned import NOTHING, Plan, Thing
from weakincentives.log import Change, Entry, Operation, Stat


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


def named(conflicts: Iterable[Conflict]) -> dict[str, tuple[str, ...]]:
    """Return the paths in conflict, sorted, with the calls that changed each."""
    found = {each.parts: each.calls for each in conflicts}
    return {join_path(parts): calls for parts, calls in sorted(found.items())}


def undo_some(
    plan: Plan, operations: Iterable[Operation], wanted: Collection[int]
) -> tuple[list[Operation], list[Conflict]]:
    """Plan the inverses of some of the newest operations; returns these, and the conflicts.

    Given that the later ones of these are undone first. ``operations`` come newest first.
    """
    undone: list[Operation] = []
    others: list[Operation] = []
    conflicts: list[Conflict] = []
    for operation in operations:
        if operation.number in wanted:
            conflicts += _undo(plan, operation, others)
            undone.append(operation)
        else:
            others.append(operation)
    return undone, conflicts


def _undo(plan: Plan, operation: Operation, others: Sequence[Operation]) -> list[Conflict]:
    """Plan the inverse of an operation; returns what differs from how it left it.

    ``others`` are the later operations that are not undone, newest first.
    """
    one = _One(plan, operation)
    one.go_through()
    plan.goals_from(one.updates)
    conflicts = [
        Conflict(parts, _changed_by(plan, others, parts), inside)
        for parts, inside in sorted(one.found.items())
    ]
    if conflicts or one.is_partly:
        plan.partly.add(operation.number)
    return conflicts


def _changed_by(plan: Plan, others: Sequence[Operation], parts: Parts) -> tuple[str, ...]:
    """Return the calls that changed a path, newest first; none if it has changed since."""
    newest = (each for other in others for each in other.changes if each.path == parts)
    left = next(newest, None)
    if left is not None and not plan.is_same(left.after, left.left, plan.on_disk(parts)):
        return ()
    return tuple(
        other.call.id
        for other in others
        if other.call is not None
        and any(
            parts[: len(each.path)] == each.path[: len(parts)]
            for each in other.changes
            if each.path
        )
    )


class _One:
    """An operation that is being undone."""

    def __init__(self, plan: Plan, operation: Operation) -> None:
        self.plan = plan
        self.number = operation.number
        self.changes = operation.changes
        self.by_path = {change.path: change for change in operation.changes}
        self.updates: dict[Parts, Thing] = {}
        self.found: dict[Parts, bool] = {}
        """What differs from how the call left it: whether it is in a directory that it removed."""
        self.is_partly = False
        self.moved = {c.origin: c for c in operation.changes if c.origin is not None}
        """By where it was: what the call moved."""
        plan.removed.update(
            change.path
            for change in operation.changes
            if change.before is not None and change.before.is_directory and change.is_whole
        )
        self.removed = plan.removed
        self._done: set[Parts] = set()
        self.taken: set[Parts] = set()
        """What goes along with what is moved back."""

    def go_through(self) -> None:
        for change in self.changes:
            if change.origin is not None and _is_dir(change.after):
                self._move_back(change, change.origin)
        for change in self.changes:
            if change.path not in self._done:
                self._undo(change)
        self._leave_in_moved()

    # Moved directories: as a whole, with whatever has been done to what is in them

    def _move_back(self, change: Change, origin: Parts) -> None:
        plan, now = self.plan, self.plan.at(change.path)
        there, gone = plan.at(origin), self.by_path.get(origin)
        self._done |= {change.path, origin}
        if not self._is_it(change, now):
            self._step(change.path, change.before, change.after, change.left, change.found)
            if plan.force or (now.entry is None and change.before is not None):
                self.updates[change.path] = Thing(change.before)
                plan.left.pop(change.path, None)
            self._cannot(origin, f"it was moved to {_shown(change.path)}, and someone else"
                         " changed that since")  # fmt: skip
            return
        is_free = plan.is_same(None if gone is None else gone.after, None, there)
        if gone is not None and _is_dir(gone.after):
            is_free = is_free and self._is_untouched(gone)
        if is_free or plan.force or there.entry is None:
            before = change.after if gone is None or gone.before is None else gone.before
            assert before is not None
            self._find_edits(change, origin)
            moved = self._moved(now, before)
            if not plan.force and not plan.is_same(change.after, None, now):
                self.found[change.path] = self.is_partly = True
                moved = moved._replace(mode=0 if now.entry is None else now.entry.mode)
                plan.sentences.append(f"{_shown(origin)} keeps the mode that someone else gave it")
            self._take(origin, change.path, now._replace(entry=moved))
            self.updates[change.path] = self._before(change)
        elif there.is_directory:
            self._merge_back(change, origin, now)
            if gone is not None and _is_dir(gone.after):
                self._remove_untouched(gone)
        else:
            self._conflict(origin, None)

    def _remove_untouched(self, gone: Change) -> None:
        """Remove what the call put where a directory is moved back to."""
        for path in self._listed(gone):
            before, _, _ = self._inside(path)
            is_known = path in self.updates or path in self.by_path
            if before is None and not is_known and self._is_as_left(path):
                self.updates[path] = Thing(None, is_soft=self.plan.at(path).is_directory)

    def _is_as_left(self, path: Parts) -> bool:
        """Whether what the call itself put at a path is still there."""
        _, after, seen = self._inside(path)
        return after is not None and self.plan.is_same(after, seen, self.plan.at(path))

    def _find_edits(self, change: Change, origin: Parts) -> None:
        """Leave alone what someone has changed since the call wrote it and moved its directory."""
        after, depth = change.after, len(origin)
        listed = self.plan.contents.listed("" if after is None else after.content)
        for path, own in self.by_path.items():
            entry, seen = listed.get(path[depth:], (None, None))
            there = (*change.path, *path[depth:])
            is_inside = len(path) > depth and path[:depth] == origin
            if not is_inside or there in self.by_path or entry is None or entry.kind != "file":
                continue
            if own.before is not None and not own.before.content:  # it was only moved with that
                if self.plan.is_same(own.after, own.left, self.plan.at(path)):
                    self._done.add(path)
                continue
            if not self.plan.is_same(entry, seen, self.plan.at(there)):
                self._done.add(path)
                self.found[path] = True
                self.plan.left[path] = Thing(own.before, own.found)

    def _moved(self, now: Thing, before: Entry) -> Entry:
        """Return a directory with its earlier attributes, and what is in it as it is now."""
        content = "" if now.here is not None or now.entry is None else now.entry.content
        return before._replace(content=content)

    def _take(self, origin: Parts, path: Parts, thing: Thing) -> None:
        """Take something along with what the plan has below it."""
        depth = len(path)
        if thing.is_directory and not thing.covers:
            if not thing.is_new and self.plan.is_on_disk(path):
                thing = thing._replace(here=path)  # only its attributes are other ones
            else:
                for inner in self.plan.inside(thing, path):
                    self.updates[(*origin, *inner)] = self.plan.at((*path, *inner))
                    self.taken.add((*origin, *inner))
                thing = thing._replace(is_new=True)
        self.updates[origin] = thing
        for each, goal in self.plan.goals.items():
            if len(each) > depth and each[:depth] == path:
                self.updates[(*origin, *each[depth:])] = goal
                self.taken.add((*origin, *each[depth:]))

    def _is_it(self, change: Change, now: Thing) -> bool:
        """Whether a directory is the one that the call moved, or looks like it."""
        after = change.after
        if after is None or now.entry is None or not now.is_directory:
            return False
        seen = change.left
        if seen is not None and now.stat is not None and seen[:2] == now.stat[:2]:
            return True
        if not self.plan.is_same(after, None, now):
            return False
        if not after.content:
            return True
        listed = {
            (path[0], entry.kind)
            for path, (entry, _) in self.plan.contents.listed(after.content).items()
            if len(path) == 1
        }
        depth = len(change.path) + 1
        inside = (path for path in self.plan.below(change.path) if len(path) == depth)
        kinds = {
            (path[-1], thing.entry.kind)
            for path in inside
            if (thing := self.plan.at(path)).entry is not None
        }
        return kinds == listed

    def _merge_back(self, change: Change, origin: Parts, now: Thing) -> None:
        """Move what is in a directory into one that someone made at its previous path."""
        plan, path = self.plan, change.path
        staying: set[Parts] = set()
        pending: list[Parts] = [()]
        while pending:
            inner = pending.pop()
            depth = len(path) + len(inner) + 1
            below = list(plan.below((*path, *inner)))
            for source in [each for each in below if len(each) == depth]:
                target, thing = (*origin, *source[len(path) :]), plan.at(source)
                there = plan.at(target)
                self.updates[source] = NOTHING
                is_ours = not there.is_directory and self._is_as_left(target)
                if there.entry is None or is_ours:
                    self._take(target, source, thing)
                elif there.is_directory and thing.is_directory:
                    pending.append(source[len(path) :])
                    self.updates[source] = Thing(None, is_soft=True)
                elif plan.is_same(self._full(thing), None, there):
                    pass
                elif change.before is not None and self._is_as_moved(change, source):
                    self._conflict(target, None, inside=True)
                    plan.left[target] = thing  # set aside: what it had replaced comes back
                else:
                    self._conflict(target, None, inside=True)
                    del self.updates[source]
                    staying.add(source)
                    plan.sentences.append(
                        f"{_shown(source)} was not moved back to {_shown(target)}"
                    )
        if not staying:
            if change.before is not None:  # it comes in the place of all that
                depth = len(path)
                for each in [p for p in self.updates if len(p) > depth and p[:depth] == path]:
                    del self.updates[each]
            self.updates[path] = self._before(change)
            return
        self.updates[path] = Thing(_plain(change.before), is_soft=change.before is None)
        for each in self._listed(change) if _has_manifest(change.before) else ():
            before = self._inside(each)[0]
            if before is not None and not _is_below(each, staying) and each not in staying:
                self.updates[each] = Thing(_plain(before))

    def _is_as_moved(self, change: Change, source: Parts) -> bool:
        """Whether nobody has changed something in a moved directory since."""
        plan, after = self.plan, change.after
        listed = plan.contents.listed("" if after is None else after.content)
        for path in (source, *plan.below(source)):
            entry, seen = listed.get(path[len(change.path) :], (None, None))
            if not plan.is_same(entry, seen, plan.at(path)):
                return False
        return True

    def _full(self, thing: Thing) -> Entry | None:
        entry = thing.entry
        if entry is None or thing.here is None:
            return entry
        if entry.kind == "link":
            return entry._replace(content=self.plan.text(thing) or "")
        return (
            entry._replace(content=self.plan.digest(thing) or "") if entry.kind == "file" else entry
        )

    def _leave_in_moved(self) -> None:
        """What someone has changed in a directory that is moved back is left alone there, too."""
        for origin, change in self.moved.items():
            if change.after is None or not change.after.is_directory or origin not in self.updates:
                continue
            depth = len(change.path)
            for path in [p for p in self.found if len(p) > depth and p[:depth] == change.path]:
                there = (*origin, *path[depth:])
                self.updates.pop(there, None)
                thing = self.plan.left.pop(path, NOTHING)
                gone = self.by_path.get(there)
                self.plan.left[there] = thing if gone is None else Thing(gone.before, gone.found)

    # All others

    def _undo(self, change: Change) -> None:
        plan, path, before = self.plan, change.path, change.before
        now = plan.at(path)
        same = plan.is_same(change.after, change.left, now)
        if plan.force and (same or not _is_made(change)):
            self.updates[path] = self._before(change)
            return
        is_free = path not in plan.left and not self._is_blocked(path)
        was_whole = _has_manifest(before) and _is_dir(change.after)
        whole = was_whole or _has_manifest(change.after)
        may_stay = now.is_soft and _has_manifest(before)  # with what is left alone in it
        if same and is_free and self._holds_more(change):
            self._leave_around_others(change)
            return
        if same and is_free and not may_stay and (not whole or self._is_untouched(change)):
            goal = self.updates[path] = self._before(change)
            drops = change.is_whole and goal.covers
            for each in [p for p in self.taken if drops and _is_below(p, {path})]:
                self.taken.discard(each)
                self.updates.pop(each, None)  # the call itself had put it there
            if whole:
                self._done.update(self._listed(change))
                self._restore_below(change)
            return
        if not same and is_free and now.entry is None and _is_dir(before):
            self.found[path] = _is_below(path, self.removed)
            self.updates[path] = self._before(change)  # there is nothing to leave
            return
        self._step(path, before, change.after, change.left, change.found)
        if (now.is_directory or may_stay) and (whole or _has_manifest(before)):
            self._undo_below(change)

    def _holds_more(self, change: Change) -> bool:
        """Whether someone has changed something in a directory that took the place of a file."""
        took_its_place = change.before is not None and not change.before.is_directory
        return took_its_place and _is_dir(change.after) and not self._is_untouched(change)

    def _leave_around_others(self, change: Change) -> None:
        """Leave a directory with what is not from the call; the file cannot come back."""
        self._conflict(change.path, change.before, inside=True)
        listed = self._listed(change)
        for each in listed:
            self._done.add(each)
            before, after, seen = self._inside(each)
            self._step(each, before, after, seen, None)
        for each in self.plan.below(change.path):
            if each not in listed:
                self._conflict(each, None, inside=True)

    def _restore_below(self, change: Change) -> None:
        """Undo what a call did in a directory before it went as a whole."""
        if not _is_dir(change.before):
            return
        for path in self._listed(change):
            own = self.by_path.get(path)
            if path in self.moved and path in self.updates:
                continue  # that is moved back
            if own is not None:
                self.updates[path] = self._before(own)
            elif not _has_manifest(change.before):  # it came with what is there now
                self.updates[path] = NOTHING

    def _undo_below(self, change: Change) -> None:
        """Undo path by path what is in a directory that came or went as a whole."""
        plan, path, listed = self.plan, change.path, self._listed(change)
        known = set(listed)
        for each in listed:
            self._done.add(each)
            own = self.by_path.get(each)
            before, after, seen = self._inside(each)
            self._step(each, before, after, seen, None if own is None else own.found)
        if change.after is not None and change.after.is_directory:
            for each in plan.below(path):
                if each not in known and not self._is_under_conflict(each):
                    self._conflict(each, None)

    def _listed(self, change: Change) -> list[Parts]:
        """Return the paths below a change that covers them, sorted."""
        depth = len(change.path)
        own = [p for p in self.by_path if len(p) > depth and p[:depth] == change.path]
        paths = set(own)
        for each in (change.path, *own):
            for side in self.by_path[each].before, self.by_path[each].after:
                if side is not None and _has_manifest(side):
                    paths.update(
                        (*each, *inner) for inner in self.plan.contents.listed(side.content)
                    )
        return sorted(paths)

    def _inside(self, path: Parts) -> tuple[Entry | None, Entry | None, Stat | None]:
        """Return what was at a path before and after, by the change there or the next above."""
        own = self.by_path.get(path)
        if own is not None:
            return own.before, own.after, own.left
        for depth in reversed(range(len(path))):
            above = self.by_path.get(path[:depth])
            if above is not None and above.is_whole:
                before, after = (
                    self.plan.contents.listed(side.content).get(path[depth:], (None, None))
                    if side is not None and _has_manifest(side)
                    else (None, None)
                    for side in (above.before, above.after)
                )
                return before[0], after[0], after[1]
        return None, None, None

    def _is_untouched(self, change: Change) -> bool:
        """Whether a directory that came as a whole holds what it did then, and nothing else."""
        plan, listed = self.plan, self._listed(change)
        for path in listed:
            _, after, seen = self._inside(path)
            if path in plan.left or not plan.is_same(after, seen, plan.at(path)):
                return False
        known = set(listed)
        return all(path in known for path in plan.below(change.path))

    def _step(
        self,
        path: Parts,
        before: Entry | None,
        after: Entry | None,
        seen: Stat | None,
        was: Stat | None,
    ) -> None:
        """Undo at one path alone, or leave it alone."""
        plan = self.plan
        if self._is_blocked(path) or self._is_under_conflict(path):
            self.is_partly = True
            return
        now = plan.at(path)
        inside = _is_below(path, self.removed)
        goal = Thing(_plain(before), was, is_soft=before is None and now.is_directory)
        if before is not None and path in plan.goals and not self._is_whole(path):
            goal = _with_attributes(now, before)
        if path in plan.left:
            plan.left[path] = goal
            self.is_partly = True
        elif plan.force or plan.is_same(after, seen, now):
            if before is not None or after is not None:
                self.updates[path] = goal
        elif (inside or path in self.removed) and now.is_directory and _is_dir(before):
            if now.entry is not None and before is not None and now.entry.mode != before.mode:
                self._conflict(path, before, inside=True)
        elif not (inside and plan.is_same(before, None, now)):
            self._conflict(path, before, inside=inside)

    def _is_blocked(self, path: Parts) -> bool:
        return self.plan.is_blocked(path, self.updates)

    def _is_whole(self, path: Parts) -> bool:
        return path not in self.by_path or self.by_path[path].is_whole

    def _is_under_conflict(self, path: Parts) -> bool:
        above = (path[:depth] for depth in range(len(path)))
        return any(each in self.found and not self.plan.at(each).is_directory for each in above)

    def _conflict(self, path: Parts, before: Entry | None, *, inside: bool | None = None) -> None:
        is_inside = _is_below(path, self.removed) if inside is None else inside
        self.found[path] = is_inside
        if before is not None or self.plan.at(path).entry is not None:
            self.plan.left[path] = Thing(before)

    def _cannot(self, path: Parts, why: str) -> None:
        self.is_partly = True
        self.plan.sentences.append(f"{_shown(path)} could not be restored: {why}")

    def _before(self, change: Change) -> Thing:
        """Return what was there before a change: from where it was moved to, if it was moved."""
        before = change.before
        if before is None:
            soft = change.after is not None and change.after.is_plain_directory
            return Thing(None, is_soft=soft)
        if not change.is_whole and change.path in self.plan.goals:
            return _with_attributes(self.plan.goals[change.path], before)
        moved = self.moved.get(change.path)
        if moved is not None and before.kind in ("file", "link") and moved.after is not None:
            after, now = moved.after, self.plan.at(moved.path)
            if (before.size, before.mtime_ns) == (after.size, after.mtime_ns):
                before = before._replace(content=before.content or after.content)
                if now.here is not None and self.plan.is_same(after, moved.left, now):
                    return Thing(before, change.found, now.here)
        after = change.after
        if _has_manifest(before) and after is not None and after.content == before.content:
            now = self.plan.at(change.path)  # it was moved away and back
            if now.here is not None:
                return Thing(_plain(before), change.found, now.here)
        above = (path[:depth] for path in [change.path] for depth in range(len(path)))
        if (
            _has_manifest(before)
            and before.content[0] != "@"
            and any(p in self.moved for p in above)
        ):
            return Thing(_plain(before), change.found)  # it went along with that, and comes with it
        if before.kind == "file" and not before.content:
            return Thing(before, change.found, self._went_to(change.path, before))
        return Thing(before, change.found)

    def _went_to(self, path: Parts, before: Entry) -> Parts | None:
        """Return where a file is now that went along with a directory."""
        for depth in reversed(range(len(path))):
            moved = self.moved.get(path[:depth])
            if moved is not None:
                now = self.plan.at((*moved.path, *path[depth:]))
                same = now.entry is not None and self.plan.is_same(before, None, now)
                return now.here if same else None
        return None


def _with_attributes(goal: Thing, before: Entry) -> Thing:
    """Return a directory as it is planned, with other attributes."""
    content = "" if goal.entry is None else goal.entry.content
    return goal._replace(entry=before._replace(content=content), is_soft=False)


def _has_manifest(entry: Entry | None) -> bool:
    return entry is not None and entry.is_directory and bool(entry.content)


def _is_dir(entry: Entry | None) -> bool:
    return entry is not None and entry.is_directory


def _is_made(change: Change) -> bool:
    """Whether a change only made a directory: what is in it has changes of its own."""
    return change.before is None and change.after is not None and change.after.is_plain_directory


def _plain(entry: Entry | None) -> Entry | None:
    return entry._replace(content="") if entry is not None and entry.is_directory else entry


def _is_below(parts: Parts, others: set[Parts]) -> bool:
    return bool(others) and any(parts[:depth] in others for depth in range(len(parts)))


def _shown(parts: Parts) -> str:
    return shown(join_path(parts))
