"""Results of tools, and how the model sees them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakSet

from weakincentives.core.logs import get_logger
from weakincentives.core.media import Media
from weakincentives.errors import WinkError

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
    """Whether the same call may succeed later; only then is it retried."""
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


class _WithDiff:
    """Knows how files were changed, for a notebook. Not part of the value: never compared, saved or
    copied.
    """

    __slots__ = ("_find_diff",)
    _find_diff: Callable[[], str]

    def attach_diff(self, find: Callable[[], str]) -> None:
        """Say where the patch of the call comes from, if someone looks at it."""
        self._find_diff = find

    @property
    def diff(self) -> str:
        """What the call changed in files, as a patch; empty if that is not known here."""
        try:
            return self._find_diff()
        except (
            AttributeError,
            LookupError,
            WinkError,
        ):  # not attached, or no longer in the history
            return ""


@dataclass(slots=True, repr=False)
class ToolResult(_WithDiff, Generic[R_co]):
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
        if not isinstance(message, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"ToolResult.error takes a message, got {message!r}: write str(...)")
        failure = ToolError(code, message, recoverable, tuple(suggestions))
        return ToolResult(message, None, success=False, failure=failure)

    def unwrap(self) -> R_co:
        """Return the value of a success; raise ToolFailed for a failure.

        >>> ToolResult.ok(3).unwrap()
        3
        """
        if not self.success:
            from weakincentives.errors import ToolFailed

            raise ToolFailed(self)
        return cast("R_co", self.value)

    def __repr__(self) -> str:
        failure, metadata = self.failure, self.metadata
        parts = [
            repr(self.message),
            "" if self.value is None else f"value={self.value!r}",
            "" if self.success else "success=False",
            "" if failure is None else f"code={failure.code!r}",
            f"undone={metadata.undone!r}" if metadata.undone else "",
            f"not_undone={metadata.not_undone!r}" if metadata.not_undone else "",
            f"tool={metadata.tool_name!r}" if metadata.tool_name else "",
            f"call_id={self.call_id!r}" if self.call_id else "",
        ]
        return f"ToolResult({', '.join(filter(None, parts))})"

    def _repr_html_(self) -> str:
        """Show the outcome, the text for the model and the changed files in a notebook."""
        from weakincentives.notebooks import html_of

        return html_of(self)

    def render(self, max_chars: int | None = None) -> str:
        """Return the text for the model: the message, a newline, the value; no empty parts.

        A text longer than ``max_chars`` is cut, and its end says how to read the rest.
        """
        value = "" if self.exclude_value_from_context else render_value(self.value)
        text = "\n".join(part for part in (self.message, value) if part)
        return text if max_chars is None else shortened(text, self.call_id, max_chars)

    @property
    def media(self) -> tuple[Media, ...]:
        """The media in the value, for the model; none of a failed call, which was undone."""
        if not self.success or self.exclude_value_from_context:
            return ()
        found: list[Media] = []
        _find_media(self.value, found, _MAX_DEPTH)
        return tuple(found)


def shortened(text: str, call_id: str, max_chars: int) -> str:
    """Return the first lines of a result, and how to read the rest; a short text as it is."""
    found = _cut_at(text)
    whole = text if found is None else text[: found.start()]
    if len(whole) <= max_chars + min(_SLACK, max_chars):
        return text
    end = whole.rfind("\n", max_chars // 2, max_chars)
    end = max_chars if end < 0 else end
    left = len(whole) - end + (0 if found is None else int(found["left"]))
    where = json.dumps(call_id, ensure_ascii=False)
    return f"{whole[:end]}\n[{left} more characters: read_result(call_id={where}, offset={end})]"


def is_shortened(text: str) -> bool:
    """Whether the end of a text says how to read the rest."""
    return _cut_at(text) is not None


def _cut_at(text: str) -> re.Match[str] | None:
    # Only at the end: a tool could print such a line anywhere.
    return _CUT.fullmatch(text, max(text.rfind("\n["), 0))


_CUT = re.compile(r"\n\[(?P<left>\d{1,15}) more characters: read_result\(call_id=.{1,300}\)\]")
_SLACK = 200
"""A text that is this much too long is not worth cutting."""


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


_MAX_DEPTH = 8
_LEAVES = frozenset({type(None), bool, int, float, str, bytes})
_LEAF_HINTS = frozenset(
    {*_LEAVES, "bool", "int", "float", "str", "bytes", "str | None", "list[str]", "tuple[str, ...]"}
)


def _find_media(value: object, found: list[Media], depth: int) -> None:
    kind = type(value)
    if kind in _LEAVES or depth < 0:
        return
    if isinstance(value, Media):
        found.append(value)
    elif isinstance(value, ToolResult):
        found += cast("ToolResult[object]", value).media  # of a composed call
    elif is_dataclass(kind):
        for name in _open_fields(kind):
            _find_media(getattr(value, name, None), found, depth - 1)
    elif isinstance(value, Mapping):
        _find_media(list(cast("Mapping[object, object]", value).values()), found, depth)
    elif isinstance(value, list | tuple | AbstractSet):
        items = cast("list[object]", value)
        # By type first: of a long list, most often nothing is left to look at.
        kinds = {each for each in set(map(type, items)) - _LEAVES if _may_hold_media(each)}
        for item in items if kinds else ():
            if type(item) in kinds:
                _find_media(item, found, depth - 1)


def _may_hold_media(kind: type) -> bool:
    return kind is Media or not is_dataclass(kind) or bool(_open_fields(kind))


def _open_fields(kind: Any) -> list[str]:
    """Return the fields of a dataclass, without those that are plain by their annotation."""
    return [
        each.name
        for each in kind.__dataclass_fields__.values()
        # Other annotations may have no hash.
        if not isinstance(each.type, str | type) or each.type not in _LEAF_HINTS
    ]


def dump_shown(value: object) -> Any:
    """Return a value as JSON data for the model, without the bytes of media."""
    from weakincentives.serde import dump

    found: list[Media] = []
    _find_media(value, found, _MAX_DEPTH)
    data = dump(value)
    return _without(data, {dump(each.data) for each in found}) if found else data


def _without(data: Any, texts: set[str]) -> Any:
    if isinstance(data, dict):
        return {key: _without(each, texts) for key, each in cast("dict[str, Any]", data).items()}
    if isinstance(data, list):
        return [_without(each, texts) for each in cast("list[Any]", data)]
    return "" if isinstance(data, str) and data in texts else data


def _as_json(value: object) -> str:
    try:
        return json.dumps(dump_shown(value), ensure_ascii=False)
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
