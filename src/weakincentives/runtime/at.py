"""The state at a recorded call: files, session and conversation, just before or after it.

Looking takes no lock and changes nothing. A nested call is committed with the call around it, so
its state is that of the outermost one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from weakincentives.core.call import ToolCall
from weakincentives.filesystem import Committed, FilesAt
from weakincentives.runtime.conversation import Message, still_seen
from weakincentives.runtime.index import MESSAGES, RECORDS, CallIndex, CallPosition
from weakincentives.runtime.stores.saves import SavedSessionData
from weakincentives.session.session import Session
from weakincentives.session.slices import Slice

if TYPE_CHECKING:
    from weakincentives.runtime.calls import Call, Run

NOT_MADE = "Not made: the run was rewound to before this call. It has changed nothing"
_READ_ONLY = "this is the session as it was, and cannot be changed"


@dataclass(frozen=True, kw_only=True)
class StateAt:
    """Files, session and conversation just before or after a call; each is read when asked for."""

    files: FilesAt
    call: Call
    before: bool
    types: tuple[type, ...]
    """Those in the session that no imported module defines."""

    @cached_property
    def session(self) -> Session:
        """Read-only; empty for a call outside of runs. Raises SnapshotError for unknown types."""
        if self.call.run is None:
            return Session()
        data = data_at(self.call, self.call.run, before=self.before)
        snapshot = data.snapshot(self.types)
        session = Session.from_snapshot(snapshot, session_id=data.session_id, tags=data.tags)
        session.read_only = _READ_ONLY
        return session

    @cached_property
    def conversation(self) -> tuple[Message, ...]:
        """What the model had seen, and answers that were ready for it."""
        if self.call.run is None:
            return ()
        return _conversation_at(self.call, self.call.run, before=self.before)


# The session


def data_at(call: Call, run: Run, *, before: bool) -> SavedSessionData:
    """Return what was saved of a run before a call, or up to its end."""
    return run.data.back_to((RECORDS, outermost(call).number - 1), through=not before)


def outermost(call: Call) -> Call:
    """Return the call itself, or the one that it is committed with."""
    while call.outer is not None:
        call = call.outer
    return call


def moment_of(call: Call) -> CallPosition:
    """Return when a call on record was made."""
    call = outermost(call)
    assert call.record is not None
    return CallPosition(
        name=call.name,
        call_id=call.call_id,
        number=call.number,
        began=call.time,
        end=call.time + float(call.record["duration"]),
        success=bool(call.record["success"]),
    )


# The conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """Where the conversation stands at a call."""

    conversation: str
    """Its id; empty if there is none."""
    as_of: int
    """How many messages it had, marks and rewound ones included."""
    open_calls: tuple[ToolCall, ...] = ()
    """Calls of the last turn that were made, and not answered yet."""
    not_made: tuple[ToolCall, ...] = ()
    """Calls of the last turn that were not made yet."""

    def mark(self) -> Message:
        """Return the mark that takes the conversation back to here."""
        return Message(
            role="user",
            conversation=self.conversation,
            rewound_to=self.as_of,
            as_of=self.as_of,
        )

    def not_made_answers(self) -> list[Message]:
        """Return what the model is told of the calls that it asked for and does not get.

        Providers accept a turn only if each of its calls has an answer.
        """
        return [
            Message(role="tool", call_id=each.id, text=NOT_MADE, conversation=self.conversation)
            for each in self.not_made
        ]

    def is_of(self, message: Message) -> bool:
        """Whether a message belongs to the conversation."""
        return not message.depth and message.conversation == self.conversation


def talk_at(
    moment: CallPosition, messages: Slice[Message], index: CallIndex, known: int, *, before: bool
) -> Talk:
    """Return where the conversation stands at a call; costs the messages since.

    Before the first call of a turn, the model has not asked for it. Of later calls of the turn it
    has, and gets the answers to those that were made.

    Args:
        messages: All messages of the run.
        known: How many of them had been saved at the call.
    """
    place = index.asked.get(moment.call_id)
    if place is None:
        earlier = islice(messages.newest_first(), len(messages) - known, None)
        newest = next((each for each in earlier if not each.depth), None)
        if newest is None:
            return Talk(conversation="", as_of=0)
        return _talk(newest.conversation, messages.newer_than(known), index)
    asked, *later = messages.newer_than(place)
    ids = [each.id for each in asked.tool_calls]
    made = ids.index(moment.call_id) + (not before)
    if not made:
        return _talk(asked.conversation, [asked, *later], index)
    talk = _talk(asked.conversation, later, index)
    ended, as_of = {each.id: each for each in asked.tool_calls[:made]}, talk.as_of
    for each in filter(talk.is_of, later):
        if each.role != "tool" or each.call_id not in ended:
            break
        del ended[each.call_id]
        as_of += 1
    return Talk(
        conversation=asked.conversation,
        as_of=as_of,
        open_calls=tuple(ended.values()),
        not_made=asked.tool_calls[made:],
    )


def _talk(conversation: str, later: list[Message], index: CallIndex) -> Talk:
    """Return where a conversation stood without its later messages."""
    talk = Talk(conversation=conversation, as_of=index.sizes[conversation])
    return replace(talk, as_of=talk.as_of - sum(map(talk.is_of, later)))


def _conversation_at(call: Call, run: Run, *, before: bool) -> tuple[Message, ...]:
    """Return the messages that the model had seen, and the answers that were ready for it."""
    moment, messages = moment_of(call), run.messages
    known = data_at(call, run, before=before).log.get(MESSAGES, ())
    talk = talk_at(moment, messages, run.index, len(known), before=before)
    own = [*islice(filter(talk.is_of, messages), talk.as_of)]
    seen = still_seen((each.rewound_to, each.as_of) for each in own)
    wanted = {each.id for each in talk.open_calls}
    shown = {e.call_id: e.shown for e in (run.calls() if wanted else ()) if e.call_id in wanted}
    return (
        *(own[place] for place in seen),
        *(
            Message(
                role="tool",
                call_id=each.id,
                text=shown[each.id],
                conversation=talk.conversation,
            )
            for each in talk.open_calls
        ),
    )


# The files


def serial_at(
    moment: CallPosition, own: CallIndex, newest_first: Iterable[Committed], *, before: bool
) -> int:
    """Return the serial of the commit whose files a call has found, or left.

    A call that changed no files has a place, too: after the last commit before its end. The order
    of the run's own calls decides first, and then the time. Costs the commits since then.

    Args:
        own: The calls of its run.
        newest_first: The history.

    Raises:
        LookupError: The history no longer goes back that far.
    """
    number, call_id = moment.number, moment.call_id
    # An id that is used again is told apart by the time.
    is_unique = own.first[call_id] == own.last[call_id]
    entry: int | None = None
    place: int | None = None
    oldest = 1
    for each in newest_first:
        oldest = each.serial
        is_earlier = own.first.get(each.call_id, number) < number
        is_later = own.last.get(each.call_id, number) > number
        if moment.success and each.call_id == call_id and (is_unique or each.time >= moment.began):
            entry = each.serial
        elif is_later and (not is_earlier or each.time > moment.end):
            place = None
        elif is_earlier or each.time < moment.began:
            place = place or each.serial
            break
        elif place is None and each.time <= moment.end:
            place = each.serial
    if entry is not None:
        return entry - before
    if place is None and oldest > 1:
        raise LookupError(f"the history no longer goes back to {moment.name}")
    return place or 0
