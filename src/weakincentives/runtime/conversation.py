"""Messages, turns, answers and events: the types between a model and the runtime.

A conversation is in the session's LOG slice of ``Message``, from which an interrupted run resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from weakincentives.core.budget import NO_TOKENS, TokenUsage
from weakincentives.core.call import ToolCall
from weakincentives.core.media import Media
from weakincentives.errors import NoOutput
from weakincentives.session.slices import SlicePolicy, slice_policy

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    from weakincentives.errors import ProviderError
    from weakincentives.prompt.prompt import RenderedPrompt
    from weakincentives.session.events import ToolInvoked
    from weakincentives.session.session import Session
    from weakincentives.tool_result import ToolResult

    OutT = TypeVarWithDefault("OutT", default=Any)
else:
    OutT = TypeVar("OutT")

StopReason: TypeAlias = Literal["end_turn", "tool_use", "max_tokens", "refusal"]
"""Why the model stopped: it is done, requests tools, was cut off, or refuses."""


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation. The rendered prompt precedes the first."""

    role: Literal["user", "model", "tool"]
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that a model's message requests."""
    call_id: str = ""
    """The call that a tool's message answers."""
    wire: Any = None
    """Provider-specific JSON to send back with its message; only the adapter reads it."""
    is_first: bool = False
    """Whether it begins a conversation."""
    conversation: str = ""
    """The id of the conversation: a session may hold several."""
    depth: int = 0
    """How many calls the conversation is nested in."""
    usage: TokenUsage | None = None
    """The tokens of a model's turn."""
    request_bytes: int = 0
    """The size of the request that a model's message answers."""
    media: tuple[Media, ...] = ()
    """Pictures and files that go with the text, which names each of them."""
    prompt: str = ""
    """In a first message: the namespace and key of the prompt, with a colon between them."""
    sent_id: str = ""
    """The id in the inbox of a message that was sent to a run in progress."""
    rewound_to: int | None = None
    """In a mark that is not sent: how many messages of the conversation precede what follows."""
    as_of: int | None = None
    """In a mark: those of the conversation as it was when it had this many messages, marks and
    rewound ones included; by default as it was just before the mark."""


def last_conversation(
    session: Session, *, depth: int = 0, prompt: str | None = None
) -> list[Message]:
    """Return the last conversation, or the last one of a prompt, without what was rewound.

    That is the conversation continued last: a rewind may have gone back to an older one.
    """
    by_id: dict[str, list[Message]] = {}
    for message in session[Message].newest_first():
        if message.depth != depth:
            continue
        if prompt is None and by_id and message.conversation not in by_id:
            continue
        found = by_id.setdefault(message.conversation, [])
        found.append(message)
        if not message.is_first:
            continue
        if prompt is not None and message.prompt != prompt:
            found.clear()
        for each in by_id.values():
            if each and not each[-1].is_first:
                break  # one that was continued later may still be of this prompt
            if each:
                return [one for _, one in without_rewound(enumerate(reversed(each)))]
    return []


def without_rewound(messages: Iterable[tuple[int, Message]]) -> list[tuple[int, Message]]:
    """Return the messages of a conversation that the model still sees, with their places."""
    given = list(messages)
    return [given[n] for n in still_seen((each.rewound_to, each.as_of) for _, each in given)]


def still_seen(marks: Iterable[tuple[int | None, int | None]]) -> list[int]:
    """Return the places of messages that were not rewound: ``rewound_to`` and ``as_of`` of each."""
    # What was seen after each message, newest first: each has the size, and what came before it.
    states: list[_Seen | None] = [None]
    for place, (rewound_to, as_of) in enumerate(marks):
        seen = states[-1 if as_of is None else min(as_of, place)]
        if rewound_to is None:
            seen = _Seen(place, 1 if seen is None else seen.size + 1, seen)
        else:
            while seen is not None and seen.size > rewound_to:
                seen = seen.older
        states.append(seen)
    found: list[int] = []
    seen = states[-1]
    while seen is not None:
        found.append(seen.place)
        seen = seen.older
    return found[::-1]


class _Seen(NamedTuple):
    place: int
    size: int
    older: _Seen | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One turn's request, which an adapter converts to its provider's format."""

    prompt: RenderedPrompt
    """The text and the tools."""
    messages: Sequence[Message]
    output_type: Any = None
    """The type of the final answer; None for plain text."""
    timeout: float | None = None
    """Seconds until the run's deadline."""
    on_text: Callable[[str], None] | None = None
    """Receives text as it is streamed; None if there is no listener."""
    session: Session | None = None
    """The session of the run, for adapters that need it; None outside a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTurn:
    """The model's answer to one request."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: StopReason = "end_turn"
    usage: TokenUsage = NO_TOKENS
    model: str = ""
    """The provider's name of the model that answered."""
    wire: Any = None
    media: tuple[Media, ...] = ()
    """Pictures or sound that the model made."""


# No slots: with them, frozen and generic, `PromptResponse[Out](...)` is a TypeError on Python 3.11.
@dataclass(frozen=True, kw_only=True)
class PromptResponse(Generic[OutT]):
    """The result of a run, or of one step."""

    text: str = ""
    media: tuple[Media, ...] = ()
    """Pictures or sound in the last answer."""
    output: OutT | None = None
    """The answer as the prompt's output type, if it has one."""
    usage: TokenUsage = NO_TOKENS
    """All tokens of the run, including retries."""
    stop_reason: StopReason = "end_turn"
    tool_calls: tuple[ToolCall, ...] = ()
    """After a step: the calls that the model requests."""
    turns: int = 0
    calls: int = 0
    """How many tool calls were made, including refused ones."""

    def unwrap(self) -> OutT:
        """Return the output, or raise NoOutput if there is none: the model refused to answer, the
        prompt has no output type, or the run has not ended.
        """
        if self.output is None:
            why = "refused to answer" if self.stop_reason == "refusal" else "has given no output"
            raise NoOutput(f"the model {why}: {self.text!r}", self)
        return self.output


# Events of a run


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A request is sent to the model; the first turn is 1."""

    number: int
    request: ModelRequest


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the model's text, as it is streamed."""

    text: str


@dataclass(frozen=True, slots=True)
class PartialOutput:
    """The structured answer as far as it has been streamed."""

    value: Any
    """JSON: not checked yet, and its last text may be incomplete."""


@dataclass(frozen=True, slots=True)
class Retrying:
    """The provider failed and is retried; text of this turn so far is void."""

    error: ProviderError
    wait: float
    """Seconds until the retry."""
    attempt: int = 2
    """Which attempt comes next; the first was 1."""


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The model has answered."""

    number: int
    turn: ModelTurn


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """A call of the turn enters the pipeline."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class ToolProgress:
    """A running call reports progress: see ``ToolContext.report``."""

    call: ToolCall
    message: str
    done: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True)
class ToolEnded:
    """A call has ended: committed, rolled back or refused."""

    call: ToolCall
    result: ToolResult[Any]
    record: ToolInvoked


@dataclass(frozen=True, slots=True)
class ToolCommitted(ToolEnded):
    """A call has succeeded, and its changes are committed."""


@dataclass(frozen=True, slots=True)
class ToolRolledBack(ToolEnded):
    """A call ran, failed, and was rolled back."""

    @property
    def undone(self) -> tuple[str, ...]:
        """What the rollback covered: the session, and resources by name."""
        return self.result.metadata.undone

    @property
    def not_undone(self) -> tuple[str, ...]:
        """What could not be undone, in sentences."""
        return self.result.metadata.not_undone


@dataclass(frozen=True, slots=True)
class ToolRefused(ToolEnded):
    """A call was refused before it ran: denied, invalid or unknown."""


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message that was sent to the run in progress; the next turn of the model sees it."""

    text: str


@dataclass(frozen=True, slots=True)
class SentBack:
    """The model stopped too early and was sent back with this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run has finished; a run that fails raises its error instead."""

    response: PromptResponse[Any]


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCompacted:
    """The model sees a shorter form of the conversation from now on; the session keeps all of it.

    It is in the session's LOG, so a resumed run sends the same requests.
    """

    conversation: str
    shown: tuple[int | Message, ...]
    """What stands for the conversation so far: places of messages in it, or other messages."""
    of_messages: int
    """How many messages the conversation had."""
    digest: int
    """Identifies those messages: after a rewind the conversation has others."""
    shortened: int = 0
    """How many results were cut to their first lines."""
    removed: int = 0
    """How many messages are no longer shown."""
    summary: str = ""
    """What the model wrote of them."""
    usage: TokenUsage = NO_TOKENS
    """The tokens of the summary."""
    model: str = ""
    window: int = 0
    """The tokens of the model's context window."""
    was_rejected: bool = False
    """Whether the provider had rejected the request as too long."""
    tokens_before: int = 0
    tokens_after: int = 0
    """The estimated size of the request."""
    request_bytes: int = 0
    bytes_per_token: float = 0.0
    """What the estimate is based on."""


RunEvent: TypeAlias = (
    TurnStarted
    | TextDelta
    | PartialOutput
    | Retrying
    | TurnEnded
    | ToolStarted
    | ToolProgress
    | ToolCommitted
    | ToolRolledBack
    | ToolRefused
    | MessageReceived
    | SentBack
    | ContextCompacted
    | RunEnded
)
"""An event of a run."""
