"""Results of tools, and how the model sees them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakSet

from weakincentives.logs import get_logger

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    V = TypeVarWithDefault("V", default=None)
else:
    V = TypeVar("V")
R_co = TypeVar("R_co", covariant=True)

_logger = get_logger(__name__)
_warned_about: WeakSet[type] = WeakSet()


@dataclass(frozen=True, slots=True)
class ToolError:
    """Why a call failed, for programs: a code to match on, and suggestions."""

    code: str
    message: str
    recoverable: bool = True
    """Whether the model can react to it, or a retry may succeed."""
    suggestions: tuple[str, ...] = ()


@dataclass(slots=True)
class ToolMetadata:
    """The runtime's data about a finished call."""

    tool_name: str = ""
    timestamp: float = 0.0
    """When the call began, in unix seconds."""
    duration: float = 0.0
    """Seconds."""
    attempts: int = 1
    undone: tuple[str, ...] = ()
    """What the rollback of a failed call covered: the session, and resources by name."""
    not_undone: tuple[str, ...] = ()
    """What could not be undone, in sentences."""
    degraded: tuple[str, ...] = ()
    """Failed preconditions that are not critical."""


@dataclass(slots=True)
class ToolResult(Generic[R_co]):
    """The outcome of a call: a message for the model and a value."""

    message: str
    """Human-readable status for the model."""
    value: R_co | None = None
    """Typed payload: a dataclass, mapping, sequence, string, or None."""
    success: bool = True
    exclude_value_from_context: bool = False
    """Hide a large value from the model; the session still records it."""
    failure: ToolError | None = None
    """Set by the runtime on every failed call."""
    metadata: ToolMetadata = field(default_factory=ToolMetadata)
    call_id: str = ""

    @staticmethod
    def ok(value: V | None = None, message: str = "") -> ToolResult[V]:
        """Return a success."""
        return ToolResult(message, value)

    @staticmethod
    def error(
        message: str,
        *,
        code: str = "EXECUTION_FAILED",
        recoverable: bool = True,
        suggestions: Sequence[str] = (),
    ) -> ToolResult[Any]:
        """Return an expected failure, worded for the model. The call is rolled back."""
        failure = ToolError(code, message, recoverable, tuple(suggestions))
        return ToolResult(message, None, success=False, failure=failure)

    def render(self) -> str:
        """Return the text for the model: the message, a newline, the value; no empty parts."""
        value = "" if self.exclude_value_from_context else render_value(self.value)
        return "\n".join(part for part in (self.message, value) if part)


def render_value(value: object) -> str:
    """Return a value as text for the model.

    A dataclass with ``render()`` uses that; one without becomes JSON, with a warning. Mappings
    become JSON, sequences one line per item, strings stay as they are, None is empty.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, type):
        return _as_json(cast("object", value))
    render: Any = getattr(value, "render", None)
    if callable(render):
        try:
            return str(render())
        except Exception:
            # The call has committed: a broken render() must not hide its result.
            name = type(value).__name__
            _logger.exception("%s.render() failed; its fields are shown as JSON", name)
            return _as_json(value)
    if is_dataclass(value):
        _warn_once(type(value))
        return _as_json(value)
    items = _items(value)
    return _as_json(value) if items is None else "\n".join(items)


def _items(value: object) -> list[str] | None:
    """Return the lines of a sequence, or of a set in sorted order; None for anything else."""
    if isinstance(value, AbstractSet):
        return sorted(map(_line, cast("AbstractSet[object]", value)))
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(map(_line, cast("Sequence[object]", value)))
    return None


def _line(item: object) -> str:
    if isinstance(item, str) or hasattr(item, "render"):
        return render_value(item)
    # A row of a table stays one line.
    return render_value(item) if _items(item) is None else _as_json(item)


def _as_json(value: object) -> str:
    from weakincentives.serde import dump

    try:
        return json.dumps(dump(value), ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)


def _warn_once(cls: type) -> None:
    if cls not in _warned_about:
        _warned_about.add(cls)
        _logger.warning(
            "%s has no render(): the model sees all its fields as JSON; add a render() method "
            "that returns a short text",
            cls.__name__,
        )
