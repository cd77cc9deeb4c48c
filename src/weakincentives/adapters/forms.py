"""What a model is to write as JSON: the arguments of tools, and the final answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar, cast

from weakincentives.adapters.strict_schema import strict_schema, without_nulls
from weakincentives.budget import TokenUsage
from weakincentives.call import ToolCall
from weakincentives.prompt.structured_output import output_instructions, output_schema
from weakincentives.prompt.tool import Tool
from weakincentives.runtime.conversation import ModelRequest
from weakincentives.serde import dump

__all__ = ["Form", "Forms", "OutputForm", "arguments_of", "in_whole_characters", "tokens"]

T = TypeVar("T")

OutputForm: TypeAlias = Literal["schema", "text"]
"""How a structured answer is asked for: by a schema, or in words."""

_NOT_JSON = "not_json"
"""The key under which a model gets back what it wrote as arguments and was no JSON."""

_MAX_DESCRIPTION = 1024
"""Characters that OpenAI takes in the description of a function."""


@dataclass(frozen=True, slots=True)
class Form:
    """A JSON object that a model is to write, as it is asked for and as it is read back."""

    name: str
    description: str
    schema: Mapping[str, Any]
    """As it goes out; not to be changed."""
    is_strict: bool
    declared: Mapping[str, Any]
    """The schema that what the model wrote must fit in the end."""

    def read(self, text: str) -> object:
        """Return the object that a model wrote, or its text where that is none."""
        found = _json_object(text)
        return text if found is None else self._as_declared(found)

    def read_text(self, text: str) -> str:
        """Return an answer as text, without what only strict mode asks for."""
        found = _json_object(text) if self.is_strict else None
        if found is None:
            return text
        read = self._as_declared(found)
        return text if read == found else json.dumps(read, ensure_ascii=False)

    def _as_declared(self, value: dict[str, Any]) -> dict[str, Any]:
        return without_nulls(self.declared, value) if self.is_strict else value


@dataclass(frozen=True, slots=True)
class Forms:
    """All that a model may write in one turn, and how it is read."""

    request: ModelRequest
    tools: Mapping[str, Form]
    """By name, without those that the provider runs."""
    answer: Form | None
    """The final answer; None for plain text, and where it is asked for in words."""
    system: str
    """The prompt, with the form of the answer where it is asked for in words."""

    @classmethod
    def of(cls, request: ModelRequest, *, strict: bool, output: OutputForm) -> Forms:
        offered = [tool for tool in request.prompt.tools if tool.handler is not None]
        tools = {tool.name: _tool_form(tool, strict) for tool in offered}
        answer, system = None, request.prompt.text
        if request.output_type is not None and output == "schema":
            answer = _answer_form(request.output_type, strict)
        elif request.output_type is not None:
            system = f"{system}\n\n{output_instructions(request.output_type)}"
        return cls(request, tools, answer, system)

    def call(self, name: str, arguments: object, id: str | None) -> ToolCall:  # noqa: A002
        """Return a call as the model made it; one without an id gets its own from the runtime."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        read = self.tools.get(name, _ANYTHING).read(text)
        return ToolCall(name, read, id or "")

    def final_text(self, text: str) -> str:
        return text if self.answer is None else self.answer.read_text(text)


def arguments_of(call: ToolCall) -> str:
    """Return the arguments of a call as it goes back to the model.

    Most servers take nothing but an object there, also where the model wrote something else.
    """
    params = call.params
    if isinstance(params, str):
        found = _json_object(params)
        params = {_NOT_JSON: params} if found is None else found
    return json.dumps(dump(params), ensure_ascii=False)


def tokens(read: int | None, written: int | None) -> TokenUsage:
    """Return what a turn cost; a server may not say, or say nonsense."""
    return TokenUsage(input_tokens=max(0, read or 0), output_tokens=max(0, written or 0))


def in_whole_characters(data: T) -> T:
    """Return data that can be written as UTF-8: half a character is replaced.

    A model can write one, and the name of a file can have one.
    """
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return _replaced(data)
    return data


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_replaced(each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {name: _replaced(each) for name, each in items}
    return value


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the object that a text is as JSON; no text at all is an empty one."""
    try:
        found: object = json.loads(text or "{}", parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_ANYTHING = Form("", "", {}, is_strict=False, declared={})
"""For a tool that was not offered."""


# The same tools and types come by in every turn.


@lru_cache(maxsize=1024)
def _tool_form(tool: Tool[Any, Any], strict: bool) -> Form:
    definition = tool.definition()
    text = definition["description"]
    for example in definition.get("examples", ()):
        shown = f"{text}\n\n{_example(example)}"
        if len(shown) <= _MAX_DESCRIPTION:
            text = shown
    schema = definition["parameters"]
    if len(text) > _MAX_DESCRIPTION:  # all of it stands with the parameters
        schema = {**schema, "description": text}
        text = f"{text[: _MAX_DESCRIPTION - 1]}…"
    return _form(tool.name, text, schema, strict)


def _example(example: Mapping[str, Any]) -> str:
    said = json.dumps(example["input"], ensure_ascii=False)
    return f"Example: {example['description']}\n{said}"


@lru_cache(maxsize=256)
def _answer_form(output_type: Any, strict: bool) -> Form:
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", getattr(output_type, "__name__", "answer"))[:64]
    return _form(name, "", output_schema(output_type), strict)


def _form(name: str, description: str, schema: Mapping[str, Any], strict: bool) -> Form:
    made = strict_schema(schema) if strict else None
    return Form(name, description, schema if made is None else made, made is not None, schema)
