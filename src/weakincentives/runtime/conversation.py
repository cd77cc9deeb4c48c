"""What passes between a model and the runtime: messages, turns, the answer of a run, and events.

A conversation is kept in the session, in the LOG slice of ``Message``: a run that was broken off
can be taken up again from there.
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
    from weakincentives.prompt.tool_result import ToolResult
    from weakincentives.runtime.session import Session

    OutT = TypeVarWithDefault("OutT", default=Any)
else:
    OutT = TypeVar("OutT")

StopReason: TypeAlias = Literal["end_turn", "tool_use", "max_tokens", "refusal"]
"""Why the model stopped: it is done, it wants tools run, it was cut off, it does not want to."""


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation. The rendered prompt stands before the first."""

    role: Literal["user", "model", "tool"]
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """What a model's message wants run."""
    call_id: str = ""
    """The call that a tool's message answers."""
    wire: Any = None
    """What the provider wants back with its own message, as JSON; only its adapter reads it."""
    is_first: bool = False
    """Whether a conversation begins here."""
    conversation: str = ""
    """An id that its messages share: a session may hold several at once."""
    depth: int = 0
    """How many calls the conversation is nested in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """What an adapter puts into its provider's format, for one turn."""

    prompt: RenderedPrompt
    """The text, and the tools that are offered now."""
    messages: Sequence[Message]
    output_type: Any = None
    """The type of the final answer; None for plain text."""
    timeout: float | None = None
    """Seconds until the run's deadline."""
    on_text: Callable[[str], None] | None = None
    """Takes text as it comes; None when nobody listens, and streaming would bring nothing."""
    session: Session | None = None
    """Where the run keeps its state, for adapters that look on; None for one made by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTurn:
    """What a model said in one turn."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: StopReason = "end_turn"
    usage: TokenUsage = NO_TOKENS
    model: str = ""
    """Which model answered, as the provider names it."""
    wire: Any = None


# No slots: with them, frozen and generic, `PromptResponse[Out](...)` is a TypeError on Python 3.11.
@dataclass(frozen=True, kw_only=True)
class PromptResponse(Generic[OutT]):
    """What a run, or one step of it, came to."""

    text: str = ""
    output: OutT | None = None
    """The answer as the prompt's output type; None where it has none."""
    usage: TokenUsage = NO_TOKENS
    """All tokens of the run, those of requests that were made again included."""
    stop_reason: StopReason = "end_turn"
    tool_calls: tuple[ToolCall, ...] = ()
    """After a step: what the model wants run."""
    turns: int = 0
    calls: int = 0
    """How many tool calls were made, refused ones included."""


# What a run tells while it goes on


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """The model is asked; the first turn is 1."""

    number: int
    request: ModelRequest


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the model's text, as it comes."""

    text: str


@dataclass(frozen=True, slots=True)
class Retrying:
    """The provider failed and is asked again; text that came of this turn does not count."""

    error: ProviderError
    wait: float
    """Seconds until then."""


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The model has answered."""

    number: int
    turn: ModelTurn


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """A call of the turn is handed to the pipeline."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class ToolEnded:
    """A call has come to its end, one way or another."""

    call: ToolCall
    result: ToolResult[Any]


@dataclass(frozen=True, slots=True)
class SentBack:
    """The model stopped and was told to go on, for this reason."""

    reason: str


RunEvent: TypeAlias = (
    TurnStarted | TextDelta | Retrying | TurnEnded | ToolStarted | ToolEnded | SentBack
)
"""What a listener of a run hears."""
