"""A run as the page sees it: its file, indexed by call, and its calls, joined with the history.

Both are read once, and later only what was added. Only what lists show stays in memory: texts,
arguments, results and values of slices are read again from the file when they are asked for.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from weakincentives.core.budget import NO_TOKENS, TokenUsage
from weakincentives.core.gc_pause import no_collection
from weakincentives.core.text import summary_of
from weakincentives.filesystem.versions import CommitSteps, Versions
from weakincentives.prompt.policies import CompletedTools
from weakincentives.runtime.at import outermost
from weakincentives.runtime.calls import Call, Commits, Run, join
from weakincentives.runtime.conversation import ContextCompacted, Message
from weakincentives.runtime.index import fields_of
from weakincentives.runtime.rewind import REWIND
from weakincentives.runtime.stores.logs import SavePlace
from weakincentives.runtime.stores.saves import SavedSessionData, Saves
from weakincentives.serde.exact import current_name, plain
from weakincentives.session.events import PromptExecuted, PromptRendered, ToolInvoked
from weakincentives.session.session import type_name

_RECORDS, _MESSAGES, _PROMPTS = map(type_name, (ToolInvoked, Message, PromptRendered))
_COMPACTIONS, _ENDS = type_name(ContextCompacted), type_name(PromptExecuted)
_SHOWN_ELSEWHERE = frozenset({_RECORDS, _MESSAGES, _PROMPTS, type_name(CompletedTools)})
"""Slices that the timeline shows: calls, turns, prompts, and which tools have succeeded."""

_TEXT, _USER, _ERROR, _SUMMARY = 400, 400, 200, 80
"""Characters that stay in memory."""
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

Json = dict[str, Any]


class Item(NamedTuple):
    """Where a value of a LOG slice is in the file."""

    place: SavePlace
    name: str
    """Its slice, as the file spells it."""
    nth: int


class CallNotes(NamedTuple):
    """What lists show of a call, besides its record."""

    item: Item
    summary: str
    error: str
    turn: int
    slices: list[str]
    """The slices that it changed, by key."""


@dataclass(slots=True, kw_only=True)
class TurnNotes:
    """A turn of the model."""

    number: int
    item: Item
    text: str
    user: str
    usage: TokenUsage
    preceding: int
    """How many calls had ended when the model answered."""
    calls: list[int] = field(default_factory=list[int])


class PromptNotes(NamedTuple):
    item: Item
    turn: int
    """The next turn of the model."""


class SliceStep(NamedTuple):
    """A save that changed a slice: so many values stay, and others follow them."""

    call: int
    """The call that changed it; or the last one before the change, if that was between calls."""
    keep: int
    size: int
    """How many follow them."""
    place: SavePlace
    name: str
    kind: str
    """Where the save has it: ``state`` or ``log``."""
    between: bool


@dataclass(slots=True)
class SliceNotes:
    """The history of a slice."""

    key: str
    is_log: bool
    steps: list[SliceStep] = field(default_factory=list[SliceStep])

    @property
    def name(self) -> str:
        return self.key.rpartition(":")[2].rpartition(".")[2]

    def until(self, call: int, *, before: bool = False) -> int:
        """Return how many steps had happened after a call, or just before it."""
        # Just after a call, nothing between it and the next one has happened.
        find = bisect_left if before else bisect_right
        return find(self.steps, (call, False), key=lambda step: (step.call, step.between))


class _Read(Run):
    """A run whose file is read elsewhere."""

    def __init__(self, path: Path, data: SavedSessionData) -> None:
        super().__init__(path)
        self.__dict__["data"] = data


class RunRecords:
    """The file of a run, indexed. Not for several threads at once.

    Raises:
        SnapshotError: The file is not that of a run, or nothing was saved in it yet.
    """

    def __init__(self, path: Path) -> None:
        self._saves = Saves(path)
        data = self._saves.head
        self.run: Run = _Read(path, data)
        """With records that lack arguments, results and texts."""
        self.notes: list[CallNotes] = []
        """By number, from 1: the first is at place 0."""
        self.turns: list[TurnNotes] = []
        self.prompts: list[PromptNotes] = []
        self.slices: dict[str, SliceNotes] = {}
        self.usage = NO_TOKENS
        self.requests = 0
        """Requests to the model, as ``Run.turns``."""
        self.numbers: dict[str, int] = {}
        """The number of the last call with each id."""
        self.rewritten = 0
        """How often known calls have changed: by clearing the log, or using an id again."""
        self._data = data
        self._answers: dict[str, list[Item]] = {}
        self._asked: dict[str, int] = {}
        """The turn that asked for a call, by id."""
        self._user = ""
        self._names: dict[str, str] = {}
        """Present names of slices by those in the file."""
        self._is_rewound = False
        self._rewound: list[tuple[SliceNotes, int]] = []
        """The steps since the conversation was rewound, as places in the steps of slices."""
        self._seen = (0, -1)
        self._over = (-1, False)
        """Whether it was over, and at which version."""
        self.refresh()

    @property
    def version(self) -> int:
        """Another one as soon as something was added."""
        return self._seen[1]

    @property
    def is_over(self) -> bool:
        """Whether the model has finished, or was never asked."""
        if self._over[0] != self.version:
            self._over = self.version, not self.turns or self.run.has_ended
        return self._over[1]

    @property
    def damage(self) -> str:
        return self._saves.damage or self._data.damage

    def refresh(self) -> bool:
        """Read what was added since; False if the file was replaced by another."""
        status = os.stat(self.run.path)
        if self._seen[0] not in (0, status.st_ino) or status.st_size < self._seen[1]:
            return False
        if self._seen == (status.st_ino, status.st_size) or self._data.damage:
            return True
        with no_collection():
            for place, line in self._saves.new():
                try:
                    self._add(place, line)
                except _UNREADABLE as error:
                    self._data.damage = f"a save in {self.run.path} is damaged: {error!r}"
                    break
        self._seen = (status.st_ino, status.st_size)
        return True

    # Reading values

    def fields(self, item: Item) -> Json:
        """Return the fields of a value in a LOG slice, in JSON form."""
        (found,) = self.all_fields([item])
        return found

    def all_fields(self, items: Sequence[Item]) -> Iterator[Json]:
        for item, line in zip(items, self._saves.at(each.place for each in items), strict=True):
            yield fields_of(line["log"][item.name][1][item.nth])

    def answer(self, number: int) -> Item | None:
        """Return the message that the model got for a call, if there is one."""
        item = self.notes[number - 1].item
        call_id = str(self._log(_RECORDS)[number - 1]["fields"].get("call_id", ""))
        later = (each for each in self._answers.get(call_id, ()) if each.place >= item.place)
        return next(later, None)

    def answers(self) -> Iterable[tuple[str, Item]]:
        """Return all messages that answer calls, with the ids of the calls."""
        return [(call_id, each) for call_id, found in self._answers.items() for each in found]

    def value(self, slice_: SliceNotes, steps: int) -> list[Any]:
        """Return the values of a slice after so many of its steps."""
        found: list[tuple[SliceStep, int]] = []
        wanted: int | None = None
        for step in reversed(slice_.steps[:steps]):
            if wanted is None or step.keep < wanted:
                count = step.size if wanted is None else min(step.size, wanted - step.keep)
                found.append((step, count))
                wanted = step.keep
            if not wanted:
                break
        values: list[Any] = []
        for (_, count), added in zip(
            reversed(found), self.added([step for step, _ in reversed(found)]), strict=True
        ):
            values += added[:count]
        return values

    def added(self, steps: Sequence[SliceStep]) -> Iterator[list[Any]]:
        """Yield the values that steps of a slice have added, without the names of types."""
        lines = self._saves.at(each.place for each in steps)
        for step, line in zip(steps, lines, strict=True):
            yield cast("list[Any]", plain(line[step.kind][step.name][1]))

    # Indexing

    def _log(self, name: str) -> list[Any]:
        return self._data.log.setdefault(name, [])

    def _add(self, place: SavePlace, line: Any) -> None:
        """Index one save."""
        data, log, state = self._data, line["log"], line["state"]
        data.at = float(line["at"])
        if not log and not state:
            data.resumed.append(data.at)
        names = self._names
        for kind in (log, state):
            for spelled in kind:
                if spelled not in names:
                    names[spelled] = current_name(spelled)
        fills = False
        for spelled in log if len(log) < 2 else sorted(log, key=lambda each: _order(names[each])):
            name = names[spelled]
            read = _READERS.get(name)
            if read is not None:
                kept, items = log[spelled]
                short = self._log(name)
                if kept > len(short):
                    raise ValueError(f"values are missing in the slice of {name}")
                self.rewritten += kept < len(short)
                del short[kept:]
                for nth, value in enumerate(items, kept):
                    item = Item(place, spelled, nth - kept)
                    short.append({"fields": read(self, item, fields_of(value), nth)})
                fills = fills or (name == _RECORDS and bool(items))
        changed = [*self._rewound_by(fills)] if self._rewound else []
        for kind, slices in (("state", state), ("log", log)):
            for spelled, (kept, items) in slices.items():
                key = names[spelled]
                if key not in _SHOWN_ELSEWHERE:
                    step = SliceStep(
                        len(self.notes), kept, len(items), place, spelled, kind, not fills
                    )
                    self._add_step(key, step)
                    changed.append(key)
        if fills:
            self._is_rewound = False
            if changed:
                self.notes[-1].slices[:] = dict.fromkeys(changed)

    def _add_step(self, key: str, step: SliceStep) -> None:
        slice_ = self.slices.get(key)
        if slice_ is None:
            slice_ = self.slices[key] = SliceNotes(key, step.kind == "log")
        if self._is_rewound and step.between:
            self._rewound.append((slice_, len(slice_.steps)))
        slice_.steps.append(step)

    def _rewound_by(self, fills: bool) -> Iterator[str]:
        """Yield the slices that a rewind has restored: that was saved just before its record."""
        if fills and self._rewound:
            if self._log(_RECORDS)[-1]["fields"].get("tool_name") == REWIND:
                for slice_, index in self._rewound:
                    step = slice_.steps[index]
                    slice_.steps[index] = step._replace(call=len(self.notes), between=False)
                    yield slice_.key
            self._rewound.clear()

    # Each returns what stays in memory of a value, for what the runtime knows about runs.

    def _add_message(self, item: Item, message: Json, number: int) -> Json:
        if message.get("usage") is not None:
            self.usage += _usage(message["usage"])
        role = message.get("role")
        if role == "tool":
            self._answers.setdefault(str(message.get("call_id")), []).append(item)
        elif message.get("depth"):
            pass
        elif message.get("rewound_to") is not None:
            self._is_rewound = True
        elif role == "user":
            self._user = _text(message.get("text", ""))[:_USER]
        elif role == "model":
            self._add_turn(item, message)
        return {name: message.get(name) for name in _OF_MESSAGE}

    def _add_turn(self, item: Item, message: Json) -> None:
        turn = TurnNotes(
            number=len(self.turns) + 1,
            item=item,
            text=_text(message.get("text", ""))[:_TEXT],
            user=self._user,
            usage=_usage(message.get("usage")),
            preceding=len(self.notes),
        )
        self._user = ""
        self.requests += 1
        self.turns.append(turn)
        for call in message.get("tool_calls", {}).get("items", ()):
            self._asked[str(fields_of(call).get("id"))] = turn.number

    def _add_record(self, item: Item, record: Json, number: int) -> Json:
        del self.notes[number:]
        call_id = str(record.get("call_id"))
        self.rewritten += call_id in self.numbers
        self.numbers[call_id] = number + 1
        turn = self._asked.get(call_id, 0)
        if turn:
            self.turns[turn - 1].calls.append(number + 1)
        result = fields_of(record.get("result"))
        error = ""
        if not record.get("success"):
            error = _text(result.get("message", "")).lstrip().partition("\n")[0][:_ERROR]
        summary = summary_of(plain(record.get("params")), _SUMMARY)
        self.notes.append(CallNotes(item, summary, error, turn, []))
        failure, metadata = fields_of(result.get("failure")), fields_of(result.get("metadata"))
        short = {name: record[name] for name in _OF_RECORD if name in record}
        short["result"] = {
            "fields": {
                "failure": {"fields": {"code": failure["code"]}} if "code" in failure else None,
                "retries": int(metadata.get("attempts", 1)) - 1,
            }
        }
        return short

    def _add_prompt(self, item: Item, prompt: Json, number: int) -> Json:
        del self.prompts[number:]
        self.prompts.append(PromptNotes(item, len(self.turns) + 1))
        return {}

    def _add_compaction(self, item: Item, compacted: Json, number: int) -> Json:
        self.usage += _usage(compacted.get("usage"))
        self.requests += bool(compacted.get("summary"))
        return {}

    def _add_end(self, item: Item, end: Json, number: int) -> Json:
        return {"stop_reason": end.get("stop_reason")}


_READERS: Mapping[str, Callable[[RunRecords, Item, Json, int], Json]] = {
    # A message precedes the calls that it asks for, and a prompt the turn that it is for.
    _PROMPTS: RunRecords._add_prompt,  # pyright: ignore[reportPrivateUsage]
    _MESSAGES: RunRecords._add_message,  # pyright: ignore[reportPrivateUsage]
    _COMPACTIONS: RunRecords._add_compaction,  # pyright: ignore[reportPrivateUsage]
    _ENDS: RunRecords._add_end,  # pyright: ignore[reportPrivateUsage]
    _RECORDS: RunRecords._add_record,  # pyright: ignore[reportPrivateUsage]
}

_ORDER = {name: place for place, name in enumerate(_READERS)}


def _order(name: str) -> int:
    return _ORDER.get(name, len(_ORDER))


_OF_RECORD = (
    "tool_name", "success", "timestamp", "duration", "call_id", "ran", "denied_by", "place",
    "attempts", "conflicts", "nested_in",
)  # fmt: skip
_OF_MESSAGE = ("role", "depth", "conversation", "rewound_to", "as_of")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(plain(value))


def _usage(value: Any) -> TokenUsage:
    given = {name: n for name, n in fields_of(value).items() if isinstance(n, int) and n >= 0}
    names = ("input_tokens", "output_tokens", "cached_tokens")
    return TokenUsage(**{name: given[name] for name in names if name in given})


# The calls, joined with the history

UNKNOWN = -1
"""In place of a serial: the history no longer has those files."""
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
        if known.branch != self.branch:  # it was dropped, or has just been made
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
        (commits.count, versions.commits[: commits.count][-1:], commits.undone)
        for versions, commits in histories.values()
    )
    return records.rewritten, len(records.notes), tuple(seen)


def _end(call: Call) -> float:
    return call.time + float((call.record or {}).get("duration", 0.0))
