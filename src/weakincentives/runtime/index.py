"""Where the calls of a run are: among its records, and among the messages that asked for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from weakincentives.runtime.conversation import Message
from weakincentives.session.events import SUSPENDED, ToolInvoked
from weakincentives.session.session import type_name

if TYPE_CHECKING:
    from weakincentives.session.session import Session

RECORDS, MESSAGES = type_name(ToolInvoked), type_name(Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPosition:
    """When a call of a run was made. A nested one is committed with the outermost: this is it."""

    name: str
    call_id: str
    number: int
    began: float
    end: float
    """Before its changes were committed."""
    success: bool


class CallIndex:
    """The calls of a session, built once and extended as it grows: questions cost no reading.

    Args:
        inherited: How many calls are of the run that this one was forked from.
    """

    def __init__(self, inherited: int = 0) -> None:
        self._inherited = inherited
        self._records = self._messages = 0
        self.first: dict[str, int] = {}
        """The number of the run's first record of each call; an id may be used again."""
        self.last: dict[str, int] = {}
        self.made: dict[str, tuple[float, float]] = {}
        """When each call on record began and ended, unless it is suspended."""
        self.unrecorded: dict[str, int] = {}
        """The calls that the model asked for and that are not on record: where it did."""
        self.asked: dict[str, int] = {}
        """The message that asked for a call, in conversations that are not nested."""
        self.answered: dict[str, int] = {}
        """The first message with the answer to a call."""
        self.sizes: Counter[str] = Counter()
        """How many messages each conversation has that is not nested, marks included."""

    @classmethod
    def of(cls, log: Mapping[str, Sequence[Any]], inherited: int = 0) -> CallIndex:
        """Return the index of frozen values, which are not decoded."""
        index = cls(inherited)
        for fields in map(fields_of, log.get(RECORDS, ())):
            failure = fields_of(fields_of(fields.get("result")).get("failure"))
            index._add_record(
                fields.get("call_id"),
                float(fields.get("timestamp", 0)),
                float(fields.get("duration", 0)),
                is_suspended=failure.get("code") == SUSPENDED,
            )
        for fields in map(fields_of, log.get(MESSAGES, ())):
            asked: dict[str, Any] = fields.get("tool_calls") or {}
            index._add_message(
                fields.get("conversation", "") if not fields.get("depth") else None,
                [fields_of(each)["id"] for each in asked.get("items", ())],
                fields.get("call_id") if fields.get("role") == "tool" else None,
            )
        return index

    def extend(self, session: Session) -> CallIndex:
        """Add what a session has logged since; costs only that. Returns the index."""
        records, messages = session.read_slice(ToolInvoked), session.read_slice(Message)
        if len(records) < self._records or len(messages) < self._messages:
            return CallIndex(self._inherited).extend(session)  # someone has cleared a log
        for record in records.newer_than(self._records):
            self._add_record(
                record.call_id,
                record.timestamp,
                record.duration,
                is_suspended=record.suspended,
            )
        for message in messages.newer_than(self._messages):
            self._add_message(
                None if message.depth else message.conversation,
                [each.id for each in message.tool_calls],
                message.call_id if message.role == "tool" else None,
            )
        return self

    def _add_record(
        self, call_id: str | None, began: float, duration: float, *, is_suspended: bool
    ) -> None:
        self._records += 1
        if call_id is None:  # it could not be saved
            return
        if self._records > self._inherited:
            self.first.setdefault(call_id, self._records)
            self.last[call_id] = self._records
        if not is_suspended:
            self.made[call_id] = began, began + duration
            self.unrecorded.pop(call_id, None)

    def _add_message(
        self, conversation: str | None, asked: Iterable[str], answered: str | None
    ) -> None:
        for call_id in asked:
            if call_id not in self.made:
                self.unrecorded[call_id] = self._messages
            if conversation is not None:
                self.asked[call_id] = self._messages
        if answered is not None:
            self.answered.setdefault(answered, self._messages)
        if conversation is not None:
            self.sizes[conversation] += 1
        self._messages += 1


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a frozen dataclass; none of a value that could not be saved."""
    found = cast("dict[str, Any]", value).get("fields") if isinstance(value, dict) else None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
