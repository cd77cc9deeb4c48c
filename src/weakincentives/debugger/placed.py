"""The calls of a run, joined with the history that it works on: where each stands in it."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from weakincentives.debugger.records import RunRecords
from weakincentives.filesystem.versions import CommitSteps, Versions
from weakincentives.runtime.at import outermost
from weakincentives.runtime.calls import Call

T = TypeVar("T")

UNKNOWN = -1
"""In place of a serial: the history does not have the files of then."""
_CLOCK = 1e-4
"""Seconds by which two clocks may differ: a call's beginning and its duration have one each."""

History = tuple[Versions, frozenset[str]]
"""The commits of the directory or of a branch, and the ids of calls that are undone there."""


class NotFound(LookupError):
    """There is no such run, call, slice or view."""


class RunCalls:
    """The calls of a run, joined with the history that it works on."""

    def __init__(
        self,
        records: RunRecords,
        branch: str,
        main: History,
        own: History,
    ) -> None:
        self.records = records
        self.branch = branch
        """The branch that it works on, if that still exists."""
        self.versions = own[0]
        self.state = len(records.notes), main[0].last, own[0].last, id(own[0])
        """Another one as soon as there are new calls or commits."""
        self.calls = _joined(records.run.calls(), branch, main, own)
        is_lost = bool(records.run.branch) and not branch
        self.places, self.commits = _places(self.calls, self.versions, is_lost=is_lost)
        """Of each call the serials of the commits whose files it found and left. And the numbers of
        calls by serial."""
        self._made: dict[str, Any] = {}
        self._making = threading.RLock()

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return what was made under a name, or make it: it stays as long as this does."""
        with self._making:  # others wait, instead of making it as well
            if name not in self._made:
                self._made[name] = make()
            return self._made[name]

    @property
    def placed(self) -> Iterable[tuple[Call, tuple[int, int]]]:
        """The calls, each with its place."""
        return zip(self.calls, self.places, strict=True)

    @cached_property
    def base(self) -> int:
        """The serial before the first call."""
        known = [before for before, _ in self.places if before != UNKNOWN]
        return min(known, default=self.versions.last)

    @cached_property
    def top(self) -> int:
        """The serial after the last call."""
        return max((after for _, after in self.places), default=self.base)

    @cached_property
    def by_number(self) -> dict[int, tuple[Call, tuple[int, int]]]:
        return {call.number: (call, place) for call, place in self.placed}

    def find(self, number: int) -> tuple[Call, tuple[int, int]]:
        if number not in self.by_number:
            raise NotFound(f"the run has no call {number}")
        return self.by_number[number]

    def commit_of(self, number: int) -> CommitSteps | None:
        serial = self._serials.get(number)
        return None if serial is None else self.versions.commit(serial)

    @cached_property
    def _serials(self) -> dict[int, int]:
        return {number: serial for serial, number in self.commits.items()}

    @cached_property
    def lanes(self) -> dict[int, int]:
        return _lanes(self)


def _joined(
    calls: list[Call],
    branch: str,
    main: History,
    own: History,
) -> list[Call]:
    """Fill in the commits of calls, as ``Calls.of_run`` does."""
    in_main = {each.call.call_id: each.call for each in main[0].commits}
    in_own = {each.call.call_id: each.call for each in own[0].commits} if branch else in_main
    for call in calls:
        if call.is_suspended:  # what its id has in the history is from when it was made again
            continue
        call.committed = in_main.get(call.call_id)
        call.is_undone = call.committed is not None and call.call_id in main[1]
        if call.committed is None and branch and call.call_id in in_own:
            call.committed, call.branch = in_own[call.call_id], branch
            call.is_undone = call.call_id in own[1]
    return calls


def _places(
    calls: Sequence[Call], versions: Versions, *, is_lost: bool
) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Return the place of each call, as ``Calls.place_of`` does, and the call of each commit.

    A call without a commit has the place of the last commit before its end. The order of the run's
    own calls decides first, and then the time.
    """
    by_id: dict[str, list[CommitSteps]] = {}
    for each in versions.commits:
        by_id.setdefault(each.call.call_id, []).append(each)
    own: dict[int, int] = {}
    for number, call in enumerate(calls):
        if call.outer is None and call.record and call.record["success"] and call.call_id in by_id:
            found = by_id[call.call_id]
            later = [each for each in found if each.call.time >= call.time]
            own[number] = (later or found)[0].call.serial
    times = [each.call.time for each in versions.commits]
    serials = [each.call.serial for each in versions.commits]
    # What later calls committed had not happened yet.
    limits = [versions.last + 1] * (len(calls) + 1)
    for number in reversed(range(len(calls))):
        limits[number] = min(limits[number + 1], own.get(number, limits[number + 1]))
    places: dict[int, tuple[int, int]] = {}
    earliest = 0
    for number, call in enumerate(calls):
        if number in own:
            earliest = max(earliest, own[number])
            places[id(call)] = own[number] - 1, own[number]
            continue
        if call.outer is not None:
            continue
        if is_lost:
            places[id(call)] = UNKNOWN, UNKNOWN
            continue
        end = call.time + float((call.record or {}).get("duration", 0.0))
        place = bisect_right(times, end)
        serial = serials[place - 1] if place else versions.oldest
        serial = max(min(serial, limits[number + 1] - 1), earliest)
        is_known = serial > versions.oldest or versions.oldest == 0
        places[id(call)] = (serial, serial) if is_known else (UNKNOWN, UNKNOWN)
    found = [places.get(id(outermost(call)), (UNKNOWN, UNKNOWN)) for call in calls]
    return found, {serial: calls[number].number for number, serial in own.items()}


def turn_of(call: Call, joined: RunCalls) -> int:
    return joined.records.notes[outermost(call).number - 1].turn


def _lanes(joined: RunCalls) -> dict[int, int]:
    """Return a lane for each call; calls of one turn that overlap in time have different ones."""
    groups: dict[tuple[int, int], list[Call]] = {}
    for call in joined.calls:
        outer = 0 if call.outer is None else call.outer.number
        groups.setdefault((turn_of(call, joined), outer), []).append(call)
    lanes: dict[int, int] = {}
    for group in groups.values():
        ends: list[float] = []
        for call in sorted(group, key=lambda call: (call.time, call.number)):
            end = call.time + float((call.record or {}).get("duration", 0.0))
            free = (lane for lane, other in enumerate(ends) if other <= call.time + _CLOCK)
            lane = next(free, len(ends))
            ends[lane : lane + 1] = [end]
            lanes[call.number] = lane
    return lanes
