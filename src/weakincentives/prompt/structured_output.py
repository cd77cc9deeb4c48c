"""Structured output: the schema for a provider, and the parser of the model's answer.

Providers require an object at the top of a schema. So a ``list[Out]`` is requested as an object
with one key, ``{"items": [...]}``; the parser accepts that and the bare array.
"""

from __future__ import annotations

import json
import re
from dataclasses import make_dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast, overload

from weakincentives.errors import OutputParseError, ParseError
from weakincentives.serde import parse, schema

T = TypeVar("T")

_KEY = "items"
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

    A list is wrapped: ``list[Out]`` gives the schema of ``{"items": [...]}``.
    """
    wrapper = _wrapper(output_type)
    return schema(output_type if wrapper is None else wrapper)


def output_instructions(output_type: Any) -> str:
    """Return instructions for a model whose provider takes no schema."""
    wanted = json.dumps(output_schema(output_type), indent=2, ensure_ascii=False)
    wrapped = "" if _wrapper(output_type) is None else ' The list goes under the key "items".'
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
    wrapper = _wrapper(output_type)
    found = _find_json(text, is_list=wrapper is not None)
    if found is None:
        raise OutputParseError(_TRY_AGAIN, raw=text, details={"": _what_is_missing(text)})
    is_wrapped = wrapper is not None and not isinstance(found.value, list)
    try:
        value = parse(wrapper if is_wrapped else output_type, found.text)
    except ParseError as error:
        raise OutputParseError(_TRY_AGAIN, raw=text, details=error.details) from error
    return value.items if is_wrapped else value


@lru_cache(maxsize=256)
def _wrapper(output_type: Any) -> type[Any] | None:
    """Return the class that wraps a list; None for a type that is an object itself."""
    kind = None if output_type is None else schema(output_type).get("type")
    if kind == "object":
        return None
    if kind != "array":
        raise TypeError(
            f"{output_type!r} cannot be an output type: use a dataclass or a list of them, "
            "and put anything else into a field of a dataclass"
        )
    documented = {"__doc__": "All items of the answer, in one array."}
    return make_dataclass("Items", [(_KEY, output_type)], namespace=documented, frozen=True)


# Finding the JSON


class _Json(NamedTuple):
    """A JSON value and its text."""

    text: str
    value: object

    def fits(self, is_list: bool) -> bool:
        """Whether it has the shape of the answer: a reference such as [1] is an array, too."""
        value = self.value
        if not isinstance(value, dict):
            return is_list and isinstance(value, list)
        return not is_list or _KEY in value


def _find_json(text: str, is_list: bool) -> _Json | None:
    whole = _whole(text)
    if whole is not None:
        return whole
    fences = list(_FENCED.finditer(text))
    blocks = [_whole(fence["body"]) for fence in fences]
    if fences and fences[-1]["end"] is None and blocks[-1] is None:
        blocks = []  # cut off: earlier blocks may be drafts
    fenced = [block for block in blocks if block and isinstance(block.value, dict | list)]
    found = (fenced or _in_prose(text))[::-1]
    return next((each for each in found if each.fits(is_list)), found[0] if found else None)


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
