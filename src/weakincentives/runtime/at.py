"""The state at a recorded call: files, session and conversation, just before or after it.

Looking takes no lock and changes nothing. A nested call is committed with the call around it, so
its state is that of the outermost one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weakincentives.call import ToolCall
from weakincentives.events import ToolInvoked
from weakincentives.filesystem import Committed, FilesAt
from weakincentives.runtime.conversation import Message, still_seen
from weakincentives.runtime.saved import SavedSessionData
from weakincentives.serde import thaw
from weakincentives.session import Session, type_name

if TYPE_CHECKING:
    from weakincentives.runtime.calls import Call, Run

_RECORDS, _MESSAGES = type_name(ToolInvoked), type_name(Message)
NOT_MADE = "Not made: the run was rewound to before this call. It has changed nothing"
_READ_ONLY = "this is the session as it was, and cannot be changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAt:
    """Files, session and conversation just before or after a call."""

    files: FilesAt
    session: Session
    """Read-only; empty for a call outside of runs."""
    conversation: tuple[Message, ...]
    """What the model had seen, and answers that were ready for it."""


# The session


def session_at(call: Call, run: Run, *, before: bool, types: Iterable[type] = ()) -> Session:
    """Return the session at a call, read-only; raises SnapshotError for unknown types."""
    data = data_at(call, run, before=before)
    snapshot = data.snapshot(types)
    session = Session.from_snapshot(snapshot, session_id=data.session_id, tags=data.tags)
    session.read_only = _READ_ONLY
    return session


def data_at(call: Call, run: Run, *, before: bool) -> SavedSessionData:
    """Return what was saved of a run before a call, or up to its end."""
    until = (_RECORDS, outermost(call).number - 1)
    return SavedSessionData.read(run.path, partly=True, until=until, through=not before)


def outermost(call: Call) -> Call:
    """Return the call itself, or the one that it is committed with."""
    while call.outer is not None:
        call = call.outer
    return call


# The conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """Where the conversation stands at a call."""

    conversation: str
    """Its id; empty if there is none."""
    as_of: int
    """How many messages it had, marks and rewound ones included."""
    seen: tuple[Message, ...]
    open_calls: tuple[ToolCall, ...] = ()
    """Calls of the last turn that were made, and not answered yet."""
    not_made: tuple[ToolCall, ...] = ()
    """Calls of the last turn that were not made yet."""

    def mark(self) -> Message:
        """Return the mark that takes the conversation back to here."""
        return Message(
            role="user",
            conversation=self.conversation,
            rewound_to=len(self.seen),
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


def talk_at(call: Call, messages: Sequence[Message], known: int, *, before: bool) -> Talk:
    """Return where the conversation stands at a call.

    Before the first call of a turn, the model has not asked for it. Of later calls of the turn it
    has, and gets the answers to those that were made.

    Args:
        messages: All messages of the run.
        known: How many of them had been saved at the call.
    """
    wanted = outermost(call).call_id
    for place in reversed(range(len(messages))):
        asked = messages[place]
        ids = [each.id for each in asked.tool_calls]
        if wanted in ids and not asked.depth:
            return _within_turn(messages, place, ids.index(wanted) + (not before))
    newest = next((each for each in reversed(messages[:known]) if not each.depth), None)
    if newest is None:
        return Talk(conversation="", as_of=0, seen=())
    own = _of_conversation(messages[:known], newest.conversation)
    return Talk(conversation=newest.conversation, as_of=len(own), seen=_seen(own))


def _within_turn(messages: Sequence[Message], place: int, made: int) -> Talk:
    """Return where the conversation stands after some of the calls that a message asks for."""
    asked = messages[place]
    own = _of_conversation(messages, asked.conversation)
    as_of = len(_of_conversation(messages[:place], asked.conversation))
    if not made:
        return Talk(conversation=asked.conversation, as_of=as_of, seen=_seen(own[:as_of]))
    ended = {each.id: each for each in asked.tool_calls[:made]}
    as_of += 1
    while as_of < len(own) and own[as_of].role == "tool" and own[as_of].call_id in ended:
        del ended[own[as_of].call_id]
        as_of += 1
    return Talk(
        conversation=asked.conversation,
        as_of=as_of,
        seen=_seen(own[:as_of]),
        open_calls=tuple(ended.values()),
        not_made=asked.tool_calls[made:],
    )


def _of_conversation(messages: Sequence[Message], conversation: str) -> list[Message]:
    return [each for each in messages if not each.depth and each.conversation == conversation]


def _seen(own: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(own[n] for n in still_seen((each.rewound_to, each.as_of) for each in own))


def messages_of(data: SavedSessionData) -> tuple[Message, ...]:
    """Return all messages in the file of a session."""
    return tuple(thaw(each) for each in data.log.get(_MESSAGES, ()))


def conversation_at(call: Call, run: Run, *, before: bool) -> tuple[Message, ...]:
    """Return the messages that the model had seen, and the answers that were ready for it."""
    known = len(data_at(call, run, before=before).log.get(_MESSAGES, ()))
    talk = talk_at(call, messages_of(run.data), known, before=before)
    shown = {each.call_id: each.shown for each in run.calls()} if talk.open_calls else {}
    return (
        *talk.seen,
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
    call: Call, own: Sequence[Call], newest_first: Iterable[Committed], *, before: bool
) -> int:
    """Return the serial of the commit whose files a call has found, or left.

    A call that changed no files has a place, too: after the last commit before its end. The order
    of the run's own calls decides first, and then the time. Costs the commits since then.

    Args:
        own: All calls of its run, oldest first.
        newest_first: The history.

    Raises:
        LookupError: The history no longer goes back that far.
    """
    call = outermost(call)
    if call.record is None:
        assert call.committed is not None
        return call.committed.serial - before
    began, end = call.time, call.time + float(call.record["duration"])
    earlier = {each.call_id for each in own if each.number < call.number}
    later = {each.call_id for each in own if each.number > call.number}
    # An id that is used again is told apart by the time.
    is_unique = call.call_id not in earlier | later
    entry: int | None = None
    place: int | None = None
    oldest = 1
    for each in newest_first:
        oldest = each.serial
        is_own = call.record["success"] and each.call_id == call.call_id
        if is_own and (is_unique or each.time >= began):
            entry = each.serial
        elif each.call_id in later and (each.call_id not in earlier or each.time > end):
            place = None
        elif each.call_id in earlier or each.time < began:
            place = place or each.serial
            break
        elif place is None and each.time <= end:
            place = each.serial
    if entry is not None:
        return entry - before
    if place is None and oldest > 1:
        raise LookupError(f"the history no longer goes back to {call.name}")
    return place or 0
