"""What the file of a run holds, indexed by call: read once, and later only what was added.

Only what lists show stays in memory. Texts, arguments, results and values of slices are read again
from the file when one of them is asked for.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from weakincentives.budget import NO_TOKENS, TokenUsage
from weakincentives.events import PromptExecuted, PromptRendered, ToolInvoked
from weakincentives.runtime.calls import Run
from weakincentives.runtime.conversation import ContextCompacted, Message
from weakincentives.runtime.rewind import REWIND
from weakincentives.runtime.saved import SavedSessionData, SavePlace, Saves
from weakincentives.serde.exact import current_name, plain
from weakincentives.session import type_name
from weakincentives.text import summary_of

_RECORDS, _MESSAGES, _PROMPTS = map(type_name, (ToolInvoked, Message, PromptRendered))
_COMPACTIONS, _ENDS = type_name(ContextCompacted), type_name(PromptExecuted)
SHOWN_ELSEWHERE = frozenset({_RECORDS, _MESSAGES, _PROMPTS})
"""Slices that are the calls, turns and prompts themselves."""

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
    slices: tuple[str, ...]
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
        self._data = data
        self._answers: dict[str, list[Item]] = {}
        self._asked: dict[str, int] = {}
        """The turn that asked for a call, by id."""
        self._user = ""
        self._rewound: list[tuple[SliceNotes, int]] = []
        """The steps since the conversation was rewound, of slices with places of theirs."""
        self._seen = (0, -1)
        self.refresh()

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
        log = {
            current_name(name): (name, kept, items) for name, (kept, items) in line["log"].items()
        }
        if not line["state"] and not line["log"]:
            self._data.add(line)
        self._data.at = float(line["at"])
        for name, add in _READERS.items():
            if name in log:
                spelled, kept, items = log[name]
                if name in _KEPT:
                    short = [{"fields": _KEPT[name](fields_of(each))} for each in items]
                    self._data.add({"at": line["at"], "state": {}, "log": {name: [kept, short]}})
                places = [Item(place, spelled, index) for index in range(len(items))]
                add(
                    self,
                    kept,
                    [(at, fields_of(each)) for at, each in zip(places, items, strict=True)],
                )
        self._add_slices(place, line, fills=_RECORDS in log and bool(log[_RECORDS][2]))

    def _add_slices(self, place: SavePlace, line: Any, *, fills: bool) -> None:
        calls, changed = len(self.notes), list[str]()
        rewinds = fills and self._log(_RECORDS)[-1]["fields"].get("tool_name") == REWIND
        if rewinds:  # the state was restored just before it was recorded
            for slice_, index in self._rewound:
                slice_.steps[index] = slice_.steps[index]._replace(call=calls, between=False)
                changed.append(slice_.key)
        if fills:
            self._rewound.clear()
        for kind in ("state", "log"):
            for name, (kept, items) in line[kind].items():
                key = current_name(name)
                slice_ = self.slices.setdefault(key, SliceNotes(key, kind == "log"))
                step = SliceStep(calls, kept, len(items), place, name, kind, not fills)
                if self._is_rewound and not fills:
                    self._rewound.append((slice_, len(slice_.steps)))
                slice_.steps.append(step)
                changed.append(key)
        if fills:
            keys = tuple(key for key in dict.fromkeys(changed) if key not in SHOWN_ELSEWHERE)
            self.notes[-1] = self.notes[-1]._replace(slices=keys)
            self._is_rewound = False

    _is_rewound = False

    def _add_messages(self, kept: int, added: Sequence[tuple[Item, Json]]) -> None:
        for item, message in added:
            usage = _usage(message.get("usage"))
            self.usage += usage
            role = message.get("role")
            if role == "tool":
                self._answers.setdefault(str(message.get("call_id")), []).append(item)
            elif message.get("depth"):
                continue
            elif message.get("rewound_to") is not None:
                self._is_rewound = True
            elif role == "user":
                self._user = str(plain(message.get("text", "")))[:_USER]
            elif role == "model":
                self._add_turn(item, message, usage)

    def _add_turn(self, item: Item, message: Json, usage: TokenUsage) -> None:
        turn = TurnNotes(
            number=len(self.turns) + 1,
            item=item,
            text=str(plain(message.get("text", "")))[:_TEXT],
            user=self._user,
            usage=usage,
            preceding=len(self.notes),
        )
        self._user = ""
        self.turns.append(turn)
        for call in cast("list[Any]", plain(message.get("tool_calls") or [])):
            self._asked[str(call.get("id"))] = turn.number

    def _add_records(self, kept: int, added: Sequence[tuple[Item, Json]]) -> None:
        del self.notes[kept:]
        for item, record in added:
            turn = self._asked.get(str(record.get("call_id")), 0)
            if turn:
                self.turns[turn - 1].calls.append(len(self.notes) + 1)
            result = fields_of(record.get("result"))
            failed = not record.get("success")
            error = str(plain(result.get("message", ""))).lstrip().partition("\n")[0]
            self.notes.append(
                CallNotes(
                    item=item,
                    summary=summary_of(plain(record.get("params")), _SUMMARY),
                    error=error[:_ERROR] if failed else "",
                    turn=turn,
                    slices=(),
                )
            )

    def _add_prompts(self, kept: int, added: Sequence[tuple[Item, Json]]) -> None:
        del self.prompts[kept:]
        self.prompts += [PromptNotes(item, len(self.turns) + 1) for item, _ in added]

    def _add_compactions(self, kept: int, added: Sequence[tuple[Item, Json]]) -> None:
        for _, each in added:
            self.usage += _usage(each.get("usage"))

    def _add_ends(self, kept: int, added: Sequence[tuple[Item, Json]]) -> None:
        pass


_READERS: Mapping[str, Callable[[RunRecords, int, Sequence[tuple[Item, Json]]], None]] = {
    # A message precedes the calls that it asks for, and a prompt the turn that it is for.
    _PROMPTS: RunRecords._add_prompts,  # pyright: ignore[reportPrivateUsage]
    _MESSAGES: RunRecords._add_messages,  # pyright: ignore[reportPrivateUsage]
    _COMPACTIONS: RunRecords._add_compactions,  # pyright: ignore[reportPrivateUsage]
    _ENDS: RunRecords._add_ends,  # pyright: ignore[reportPrivateUsage]
    _RECORDS: RunRecords._add_records,  # pyright: ignore[reportPrivateUsage]
}


def fields_of(value: Any) -> Json:
    """Return the fields of a dataclass; none of a value that could not be saved."""
    found = cast("Json", value).get("fields") if isinstance(value, dict) else None
    return cast("Json", found) if isinstance(found, dict) else {}


def _usage(value: Any) -> TokenUsage:
    given = {name: n for name, n in fields_of(value).items() if isinstance(n, int) and n >= 0}
    names = ("input_tokens", "output_tokens", "cached_tokens")
    return TokenUsage(**{name: given[name] for name in names if name in given})


# What stays in memory of values that there are many of

_OF_RECORD = (
    "tool_name", "success", "timestamp", "duration", "call_id", "ran", "denied_by", "place",
    "attempts", "conflicts", "nested_in",
)  # fmt: skip
_OF_MESSAGE = ("role", "depth", "conversation", "rewound_to", "as_of")


def _short_record(record: Json) -> Json:
    result = fields_of(record.get("result"))
    failure, metadata = fields_of(result.get("failure")), fields_of(result.get("metadata"))
    short = {name: record[name] for name in _OF_RECORD if name in record}
    short["result"] = {
        "fields": {
            "failure": {"fields": {"code": failure["code"]}} if "code" in failure else None,
            "retries": int(metadata.get("attempts", 1)) - 1,
        }
    }
    return short


_KEPT: Mapping[str, Callable[[Json], Json]] = {
    _RECORDS: _short_record,
    _MESSAGES: lambda fields: {name: fields.get(name) for name in _OF_MESSAGE},
    _COMPACTIONS: lambda fields: {"summary": bool(fields.get("summary"))},
    _ENDS: lambda fields: {"stop_reason": fields.get("stop_reason")},
}
