"""What a tool answers, and how the model sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Generic, TypeVar, cast

from weakincentives.logs import get_logger

__all__ = ["ToolError", "ToolMetadata", "ToolResult"]

R = TypeVar("R")

_logger = get_logger(__name__)
_warned_about: set[type] = set()


@dataclass(frozen=True, slots=True)
class ToolError:
    """Why a call failed, for programs: a code to match on, and what may help."""

    code: str
    message: str
    recoverable: bool = True
    """Whether the model can do something about it, or another try may succeed."""
    suggestions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolMetadata:
    """What the runtime knows about a finished call."""

    tool_name: str = ""
    timestamp: float = 0.0
    """When the call began, in unix seconds."""
    duration: float = 0.0
    """Seconds."""
    attempts: int = 1
    undone: tuple[str, ...] = ()
    """What a failed call's rollback covered: the session, and resources by name."""
    not_undone: tuple[str, ...] = ()
    """What it could not take back, in sentences."""


@dataclass(slots=True)
class ToolResult(Generic[R]):
    """What happened (the value) and what to tell the model (the message)."""

    message: str
    """Human-readable status for the model."""
    value: R | None = None
    """Typed payload: a dataclass, mapping, sequence, string, or None."""
    success: bool = True
    exclude_value_from_context: bool = False
    """Hide a large value from the model; the session still records it."""
    failure: ToolError | None = None
    """Set by the runtime on every failed call."""
    metadata: ToolMetadata = field(default_factory=ToolMetadata)
    call_id: str = ""

    @classmethod
    def ok(cls, value: R | None = None, message: str = "") -> ToolResult[R]:
        """Return a success."""
        return cls(message=message, value=value)

    @classmethod
    def error(
        cls,
        message: str,
        *,
        code: str = "EXECUTION_FAILED",
        recoverable: bool = True,
        suggestions: Sequence[str] = (),
    ) -> ToolResult[Any]:
        """Return an expected failure, worded for the model. The call is rolled back."""
        failure = ToolError(code, message, recoverable, tuple(suggestions))
        return ToolResult(message=message, value=None, success=False, failure=failure)

    def render(self) -> str:
        """Return what the model sees: the message, a newline, the value; empty parts left out."""
        value = "" if self.exclude_value_from_context else render_value(self.value)
        return "\n".join(part for part in (self.message, value) if part)


def render_value(value: object) -> str:
    """Return a value as text for the model.

    A dataclass with ``render()`` says it itself; one without becomes JSON, with a warning.
    Mappings become JSON, sequences one line per item, strings stay as they are, None is empty.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    render = getattr(value, "render", None)
    if callable(render) and not isinstance(value, type):
        try:
            return str(render())
        except Exception:
            # The call is done by now: a broken render() must not cost the model its answer.
            _logger.exception("%s.render() failed; its fields are shown as JSON", _name(value))
            return _as_json(value)
    if is_dataclass(value) and not isinstance(value, type):
        _warn_once(type(value))
        return _as_json(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return "\n".join(render_value(item) for item in cast("Sequence[object]", value))
    return _as_json(value)


def _as_json(value: object) -> str:
    from weakincentives.serde import dump

    try:
        if isinstance(value, Mapping):
            value = dict(cast("Mapping[object, object]", value))
        return json.dumps(dump(value), ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)


def _warn_once(cls: type) -> None:
    if cls not in _warned_about:
        _warned_about.add(cls)
        _logger.warning(
            "%s has no render(): the model sees all its fields as JSON; add a render() method "
            "that returns what it needs",
            cls.__name__,
        )


def _name(value: object) -> str:
    return type(value).__name__
