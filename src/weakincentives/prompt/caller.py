"""Who made a call, as far as its handler can turn to them: questions, their model, their folders.

The MCP server hands out one that reaches the client. Elsewhere there is none, or one of yours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from weakincentives.core.media import Content
from weakincentives.errors import ToolValidationError

if TYPE_CHECKING:
    from weakincentives.errors import ProtocolError

LogLevel = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
"""The levels of syslog, as MCP has them."""
SampleMessage: TypeAlias = tuple[Literal["user", "assistant"], Content]
"""A role, and what it says."""


@dataclass(frozen=True, slots=True)
class Root:
    """A folder that the caller works in."""

    uri: str
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """What the caller's model is asked."""

    messages: Sequence[SampleMessage]
    max_tokens: int
    system: str = ""
    temperature: float | None = None
    stop_sequences: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the caller's model answered."""

    text: str
    model: str = ""
    stop_reason: str = ""


class NotAnswered(ToolValidationError):
    """The user of the caller has given no answer that counts."""

    def __init__(self, message: str, by: str = "", *, action: str = "cancel") -> None:
        super().__init__(message)
        self.by = by
        self.action = action
        """``decline`` if they said no, ``cancel`` if they said nothing."""


class Caller:
    """What a handler can ask of the side that made its call. Override what yours can do."""

    can_ask = False
    can_sample = False
    has_roots = False
    refused: ProtocolError | None = None
    """The error that the handler raised for the caller's protocol."""

    async def ask(self, question: str, schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        """Return the fields of a form that the user has filled in, valid by its schema."""
        raise NotAnswered("there is no one to ask")

    async def sample(self, request: SampleRequest, key: str) -> Sample:
        """Return what the model of the caller answers."""
        raise ToolValidationError("there is no model to ask")

    async def roots(self, key: str) -> tuple[Root, ...]:
        """Return the folders that the caller works in."""
        raise ToolValidationError("the caller names no folders")

    def log(self, level: LogLevel, message: object, logger: str) -> None:
        """Show a line of the handler's log."""


NOBODY = Caller()
"""A caller that answers nothing."""
