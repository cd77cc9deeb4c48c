"""The calls of a run, joined with the history that it works on: where each stands in it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from weakincentives.debugger.records import RunRecords
from weakincentives.filesystem.versions import CommitSteps, Versions
from weakincentives.runtime.at import outermost
from weakincentives.runtime.calls import Call, Commits, join

UNKNOWN = -1
"""In place of a serial: the history does not have the files of then."""
_CLOCK = 1e-4
"""Seconds by which two clocks may differ: a call's beginning and its duration have one each."""


class NotFound(LookupError):
    """There is no such run, call, slice or view."""


class History(NamedTuple):
    """The commits of the directory or of a branch."""

    versions: Versions
    commits: Commits


class Placed(NamedTuple):
    """A call, and where it stands in the history."""

    call: Call
    before: int
    """The serial of the commit whose files it found."""
    after: int
    """The serial of the commit whose files it left."""
    lane: int
    """Calls of one turn that overlap in time have different lanes."""
    ended: float
    """When all calls up to this one had ended."""
    highest: int
    """The highest serial that any call up to this one left."""

    @property
    def has_commit(self) -> bool:
        return self.call.outer is None and self.before != self.after


class RunCalls:
    """The calls of a run, joined with the history that it works on.

    Args:
        branch: The branch that it works on, if that still exists.
        histories: Of the directory, under an empty name, and of the branch.
        known: An earlier join of the run, which is extended: the cost follows what is new.
    """

    def __init__(
        self,
        records: RunRecords,
        branch: str,
        histories: Mapping[str, History],
        known: RunCalls | None = None,
    ) -> None:
        self.records = records
        self.branch = branch
        self.versions = histories[branch].versions
        self._histories = {name: each.commits for name, each in histories.items()}
        self.state = _state(records, histories)
        self.placed: list[Placed] = []
        """Oldest first."""
        self.commits: dict[int, int] = {}
        """The numbers of calls by the serials of their commits."""
        if known is not None and (kept := self._unaffected(known, histories)):
            self.placed, self.commits = known.placed[:kept], dict(known.commits)
        self._place(records.run.calls(self.placed[-1].call.number if self.placed else 0))

    def is_current(self, records: RunRecords, histories: Mapping[str, History]) -> bool:
        return self.records is records and self.state == _state(records, histories)

    @cached_property
    def base(self) -> int:
        """The serial before the first call."""
        return min(self._found - {UNKNOWN}, default=self.versions.last)

    @property
    def is_complete(self) -> bool:
        """Whether the files of all calls are known."""
        return UNKNOWN not in self._found

    @cached_property
    def _found(self) -> set[int]:
        return {each.before for each in self.placed}

    @property
    def top(self) -> int:
        """The serial after the last call."""
        return self.placed[-1].highest if self.placed else self.base

    def until(self, number: int) -> int:
        """Return how many calls have at most this number."""
        return bisect_right(self.placed, number, key=lambda each: each.call.number)

    def find(self, number: int) -> Placed:
        place = self.until(number)
        if not place or self.placed[place - 1].call.number != number:
            raise NotFound(f"the run has no call {number}")
        return self.placed[place - 1]

    def commit_of(self, placed: Placed) -> CommitSteps | None:
        return self.versions.commit(placed.after) if placed.has_commit else None

    def turn_of(self, call: Call) -> int:
        return self.records.notes[outermost(call).number - 1].turn

    # Joining

    def _unaffected(self, known: RunCalls, histories: Mapping[str, History]) -> int:
        """Return how many known calls had ended before anything began that is new."""
        if known.records is not self.records or known.state[0] != self.state[0]:
            return 0
        count = len(known.placed)
        last = known.placed[-1].call.number if count else 0
        new = [(each.call_id, each.time) for each in self.records.run.calls(last)]
        for (size, newest, undone), history in zip(known.state[2], histories.values(), strict=True):
            commits = history.versions.commits
            if commits[:size][-1:] != newest or history.commits.undone != undone:
                return 0
            new += [(each.call.call_id, each.call.time) for each in commits[size:]]
        began = math.inf
        for call_id, time in new:
            if self.records.numbers.get(call_id, last + 1) <= last:
                return 0  # a known call was made again
            own = self._histories[self.branch].by_call.get(call_id, ())
            began = min([began, time, *(each.time for each in own)])
        while count and known.placed[count - 1].ended + _CLOCK >= began:
            count -= 1
            began = min(began, known.placed[count].call.time)
        return count

    def _place(self, calls: Sequence[Call]) -> None:
        """Add calls with their places, which are those of ``Calls.place_of``.

        A call without a commit has the place of the last commit before its end. The order of the
        run's own calls decides first, and then the time.
        """
        own: dict[int, int] = {}
        for call in calls:
            join(call, self._histories)
            found = self._histories[self.branch].by_call.get(call.call_id)
            if found and call.outer is None and call.record and call.record["success"]:
                later = (each for each in found if each.time >= call.time)
                own[call.number] = next(later, found[0]).serial
        # What later calls committed had not happened yet.
        limits, limit = dict[int, int](), self.versions.last
        for call in reversed(calls):
            limits[call.number] = limit
            limit = min(limit, own.get(call.number, limit + 1) - 1)
        ended, highest = self.placed[-1][-2:] if self.placed else (0.0, UNKNOWN)
        places: dict[int, tuple[int, int]] = {}
        earliest = max(highest, 0)
        for call in calls:
            if call.number in own:
                serial = own[call.number]
                earliest = max(earliest, serial)
                places[call.number] = serial - 1, serial
                self.commits[serial] = call.number
            elif call.outer is None:
                serial = self._serial_at(_end(call), earliest, limits[call.number])
                places[call.number] = serial, serial
        lanes = self._lanes(calls)
        for call in calls:
            before, after = places[outermost(call).number]
            ended, highest = max(ended, _end(call)), max(highest, after)
            self.placed.append(Placed(call, before, after, lanes[call.number], ended, highest))

    def _serial_at(self, moment: float, earliest: int, latest: int) -> int:
        """Return the serial of the last commit at a moment, between two others."""
        if self.records.run.branch and not self.branch:
            return UNKNOWN  # the branch is gone
        commits, oldest = self.versions.commits, self.versions.oldest
        place = bisect_right(commits, moment, key=lambda each: each.call.time)
        serial = commits[place - 1].call.serial if place else oldest
        serial = max(min(serial, latest), earliest)
        return serial if serial > oldest or oldest == 0 else UNKNOWN

    def _lanes(self, calls: Sequence[Call]) -> dict[int, int]:
        groups: dict[tuple[int, int], list[Call]] = {}
        for call in calls:
            outer = 0 if call.outer is None else call.outer.number
            groups.setdefault((self.turn_of(call), outer), []).append(call)
        lanes: dict[int, int] = {}
        for group in groups.values():
            ends: list[float] = []
            for call in sorted(group, key=lambda call: (call.time, call.number)):
                free = (lane for lane, other in enumerate(ends) if other <= call.time + _CLOCK)
                lane = next(free, len(ends))
                ends[lane : lane + 1] = [_end(call)]
                lanes[call.number] = lane
        return lanes


_Seen = tuple[int, list[CommitSteps], object]
"""How many commits a history has, the newest, and the calls that are undone."""


def _state(
    records: RunRecords, histories: Mapping[str, History]
) -> tuple[int, int, tuple[_Seen, ...]]:
    """Return what differs as soon as there are new calls or commits."""
    seen = (
        (len(versions.commits), versions.commits[-1:], commits.undone)
        for versions, commits in histories.values()
    )
    return records.rewritten, len(records.notes), tuple(seen)


def _end(call: Call) -> float:
    return call.time + float((call.record or {}).get("duration", 0.0))
