"""Messages, turns, answers and events: the types between a model and the runtime.

A conversation is in the session's LOG slice of ``Message``, from which an interrupted run resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from weakincentives.budget import NO_TOKENS, TokenUsage
from weakincentives.call import ToolCall
from weakincentives.slices import SlicePolicy, slice_policy

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    from weakincentives.errors import ProviderError
    from weakincentives.prompt.prompt import RenderedPrompt
    from weakincentives.session import Session
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


# No slots: with them, frozen and generic, `PromptResponse[Out](...)` is a TypeError on Python 3.11.
@dataclass(frozen=True, kw_only=True)
class PromptResponse(Generic[OutT]):
    """The result of a run, or of one step."""

    text: str = ""
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
class Retrying:
    """The provider failed and is retried; text of this turn so far is void."""

    error: ProviderError
    wait: float
    """Seconds until the retry."""


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
class ToolEnded:
    """A call has ended, in any way."""

    call: ToolCall
    result: ToolResult[Any]


@dataclass(frozen=True, slots=True)
class SentBack:
    """The model stopped too early and was sent back with this reason."""

    reason: str


RunEvent: TypeAlias = (
    TurnStarted | TextDelta | Retrying | TurnEnded | ToolStarted | ToolEnded | SentBack
)
"""An event of a run."""
