"""Structured output: the schema for a provider, and the parser of the model's answer.

Providers require an object at the top of a schema. So a ``list[Out]`` is requested as an object
with one key, ``{"items": [...]}``, and a union, an enum or a number as ``{"result": ...}``; the
parser accepts these and the bare value. A function stands for its parameters, and is called with
them. ``str`` is the text of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, make_dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast, get_args, overload

from pydantic_core import from_json

from weakincentives.errors import (
    ContractError,
    OutputParseError,
    ParseError,
    ToolValidationError,
)
from weakincentives.serde import parse, schema

T = TypeVar("T")

_ITEMS, _RESULT = "items", "result"
_TRY_AGAIN = (
    "The answer does not fit what was asked for. "
    "Answer again, as JSON and nothing else, with all of this corrected:"
)

_FENCED = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})[^\n`]*\n(?P<body>.*?)(?:^[ \t]*(?P<end>(?P=fence))|\Z)",
    re.MULTILINE | re.DOTALL,
)
# The beginnings of an object or array: most brackets in prose and code are neither.
_OPENING = re.compile(r'\{\s*["}]|\[\s*(?:[\[\]{"]|(?P<number>[\d-])|true|false|null)')
_BRACKET = re.compile(r'"(?:[^"\\]|\\.?)*+"?|(?P<open>[\[{])|(?P<close>[\]}])', re.DOTALL)
_decode = json.JSONDecoder().raw_decode


def output_schema(output_type: Any) -> dict[str, Any]:
    """Return a new JSON schema of an answer, always with an object at the top.

    What is no object is wrapped: ``list[Out]`` gives the schema of ``{"items": [...]}``.
    """
    asked = requested_type(output_type)
    return schema(_wrapper(asked) or asked)


def output_instructions(output_type: Any) -> str:
    """Return instructions for a model whose provider takes no schema."""
    wanted = json.dumps(output_schema(output_type), indent=2, ensure_ascii=False)
    key = _key(_wrapper(requested_type(output_type)))
    what = "list" if key == _ITEMS else "answer"
    wrapped = "" if key is None else f' The {what} goes under the key "{key}".'
    return (
        "Give your final answer as one JSON object that fits this schema, "
        f"and nothing else.{wrapped}\n\n```json\n{wanted}\n```"
    )


@overload
def parse_structured_output(text: str, output_type: type[T]) -> T: ...
@overload
def parse_structured_output(text: str, output_type: object) -> Any: ...
def parse_structured_output(text: str, output_type: Any) -> Any:
    """Return a model's answer as a value of the output type.

    The JSON may be the whole text, in a fenced block or in prose; the last one counts. Anything
    else raises an OutputParseError with every problem, worded for the model.
    """
    if output_type is str:
        return text
    asked = requested_type(output_type)
    value = _parsed(text, asked)
    if asked is output_type:
        return value
    try:
        return output_type(**{each.name: getattr(value, each.name) for each in fields(asked)})
    except (ValueError, ToolValidationError, ContractError) as error:
        raise OutputParseError(_TRY_AGAIN, raw=text, details={"": str(error)}) from error


class PartialAnswer:
    """The JSON of an answer while it is streamed; None stands for nothing that is new."""

    def __init__(self, output_type: Any) -> None:
        self._key = _key(_wrapper(output_type))
        self.clear()

    def clear(self) -> None:
        """Forget an answer that is void."""
        self._pieces: list[str] = []
        self._size = self._read_at = 0
        self._last: Any = None

    def add(self, text: str) -> Any:
        """Return the JSON so far, if it has grown; its last text may be incomplete."""
        self._pieces.append(text)
        self._size += len(text)
        if self._size - self._read_at <= self._read_at // 64:  # else a long answer takes forever
            return None
        self._read_at = self._size
        value = self._value("".join(self._pieces))
        if value is None or value == self._last:
            return None
        self._last = value
        return value

    def _value(self, text: str) -> Any:
        start = text.find("{")
        if start < 0:
            return None
        try:
            found: Any = from_json(text[start:], allow_partial="trailing-strings")
        except ValueError:  # something follows it: all of it was read before
            return None
        return found if self._key is None else found.get(self._key)


def validated(output: T, validators: Iterable[Callable[[T], T | None]], text: str) -> T:
    """Return an output as its validators leave it; what they refuse is told to the model."""
    for validator in validators:
        try:
            found = validator(output)
        except (ValueError, ToolValidationError, ContractError) as error:
            raise OutputParseError(_TRY_AGAIN, raw=text, details={"": str(error)}) from error
        output = output if found is None else found
    return output


def requested_type(output_type: Any) -> Any:
    """Return the type that a model is asked for: None for text, the parameters of a function."""
    if output_type is str:
        return None
    return _parameters(output_type) if isinstance(output_type, FunctionType) else output_type


@lru_cache(maxsize=256)
def _parameters(function: Any) -> Any:
    from weakincentives.prompt.signatures import is_async
    from weakincentives.prompt.tool import params_of

    if is_async(function):
        raise TypeError(f"the output function {function.__name__!r} must not be async")
    return params_of(function, function.__name__)


def _parsed(text: str, output_type: Any) -> Any:
    wrapper = _wrapper(output_type)
    key = _key(wrapper)
    or_text = key == _RESULT and str in get_args(output_type)
    found = _find_json(text, key)
    if found is None:
        if or_text:
            return text
        raise OutputParseError(_TRY_AGAIN, raw=text, details={"": _what_is_missing(text)})
    answer: Any = found.value
    has_key = isinstance(answer, dict) and key in answer
    is_wrapped = has_key or (key == _ITEMS and not isinstance(answer, list))
    try:
        value = parse(wrapper if is_wrapped else output_type, found.text)
    except ParseError as error:
        if or_text and not is_wrapped:
            return text
        raise OutputParseError(_TRY_AGAIN, raw=text, details=error.details) from error
    return getattr(value, cast("str", key)) if is_wrapped else value


@lru_cache(maxsize=256)
def _wrapper(output_type: Any) -> type[Any] | None:
    """Return the class that wraps what is no object; None for a type that is one itself."""
    kind = "object" if output_type is None else schema(output_type).get("type")
    if kind == "object":
        return None
    key = _ITEMS if kind == "array" else _RESULT
    said = "All items of the answer, in one array." if kind == "array" else "The answer."
    return make_dataclass("Answer", [(key, output_type)], namespace={"__doc__": said}, frozen=True)


def _key(wrapper: Any) -> str | None:
    return None if wrapper is None else fields(wrapper)[0].name


# Finding the JSON


class _Json(NamedTuple):
    """A JSON value and its text."""

    text: str
    value: object

    def fits(self, key: str | None) -> bool:
        """Whether it has the shape of the answer: a reference such as [1] is an array, too."""
        value = self.value
        if not isinstance(value, dict):
            return key == _ITEMS and isinstance(value, list)
        return key is None or key in value


def _find_json(text: str, key: str | None) -> _Json | None:
    whole = _whole(text)
    if whole is not None:
        return whole
    fences = list(_FENCED.finditer(text))
    blocks = [_whole(fence["body"]) for fence in fences]
    if fences and fences[-1]["end"] is None and blocks[-1] is None:
        blocks = []  # cut off: earlier blocks may be drafts
    fenced = [block for block in blocks if block and isinstance(block.value, dict | list)]
    found = (fenced or _in_prose(text))[::-1]
    return next((each for each in found if each.fits(key)), found[0] if found else None)


def _whole(text: str) -> _Json | None:
    text = text.strip()
    try:
        return _Json(text, json.loads(text))
    except (ValueError, RecursionError):
        return None


def _in_prose(text: str) -> list[_Json]:
    """Return the outermost objects and arrays, in order; none if the last one is cut off."""
    found: list[_Json] = []
    position = 0
    while match := _OPENING.search(text, position):
        start = match.start()
        try:
            value, position = _decode(text, start)
        except (ValueError, RecursionError) as error:
            if match["number"] and isinstance(error, json.JSONDecodeError):
                position = error.pos  # a range such as [0, 1), not an answer
                continue
            # A part of a broken answer must never be taken for the answer.
            position = _end_of(text, start)
            if position < 0:
                return []
        else:
            found.append(_Json(text[start:position], cast("object", value)))
    return found


def _end_of(text: str, start: int) -> int:
    """Return the end of the brackets that open at a position; -1 if they are not closed."""
    depth = 0
    for token in _BRACKET.finditer(text, start):
        if token["open"]:
            depth += 1
        elif token["close"]:
            depth -= 1
            if depth == 0:
                return token.end()
    return -1


def _what_is_missing(text: str) -> str:
    """Say why the text holds no answer, and where its JSON breaks."""
    if not text.strip():
        return "The answer is empty; expected JSON"
    position = 0
    while match := _OPENING.search(text, position):
        try:
            _, position = _decode(text, match.start())
        except json.JSONDecodeError as error:
            position = error.pos
            if not match["number"]:
                place = f"line {error.lineno}, column {error.colno}"
                return f"The JSON is invalid: {error.msg} at {place} of the answer"
        except (ValueError, RecursionError) as error:
            return f"The JSON is invalid: {error}"
    return "The answer holds no JSON object or array"
