"""The format of OpenAI's responses API: requests and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weakincentives.adapters.forms import Form, Forms, arguments_of, in_whole_characters, tokens
from weakincentives.call import ToolCall
from weakincentives.runtime.conversation import Message, ModelTurn, StopReason
from weakincentives.serde import parse

__all__ = ["Failure", "ResponseEvent", "read_response", "responses_body"]

_STOP_REASONS: Mapping[str | None, StopReason] = {
    "max_output_tokens": "max_tokens",
    "content_filter": "refusal",
}

# Requests


def responses_body(forms: Forms, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request; the options may offer tools that the provider runs."""
    body = {"store": False, **options}
    body["instructions"] = forms.system
    items = [item for message in forms.request.messages for item in _items(message)]
    body["input"] = in_whole_characters(items)
    tools = [*options.get("tools", ()), *map(_function, forms.tools.values())]
    if tools:
        body["tools"] = tools
    if forms.answer is not None:
        form = {"type": "json_schema", "name": forms.answer.name, "schema": forms.answer.schema}
        body["text"] = {
            **options.get("text", {}),
            "format": {**form, "strict": forms.answer.is_strict},
        }
    return body


def _function(form: Form) -> dict[str, Any]:
    return {
        "type": "function",
        "name": form.name,
        "description": form.description,
        "parameters": form.schema,
        "strict": form.is_strict,
    }


def _items(message: Message) -> Iterator[dict[str, Any]]:
    if message.role == "user":
        yield {"role": "user", "content": message.text}
    elif message.role == "tool":
        yield {"type": "function_call_output", "call_id": message.call_id, "output": message.text}
    elif _is_ours(message.wire):
        yield from _as_given(message)
    else:
        if message.text or not message.tool_calls:
            yield {"role": "assistant", "content": message.text}
        yield from map(_call, message.tool_calls)


def _is_ours(wire: object) -> bool:
    return isinstance(wire, dict) and "responses" in wire


def _as_given(message: Message) -> Iterator[dict[str, Any]]:
    """Yield the items of an answer as they came, reasoning included; calls under our ids."""
    calls = iter(message.tool_calls)
    items: list[dict[str, Any]] = message.wire["responses"]
    for item in items:
        yield {**item, **_call(next(calls))} if item["type"] == "function_call" else item


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments_of(call),
    }


# Answers


@dataclass(frozen=True)
class Failure:
    """What a provider says of a failure, in an answer or in a stream."""

    code: str | int | None = None
    message: str | None = None


@dataclass(frozen=True)
class _Incomplete:
    reason: str | None = None


@dataclass(frozen=True)
class _Usage:
    input_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class _Response:
    output: tuple[dict[str, Any], ...]
    status: str | None = None
    error: Failure | None = None
    incomplete_details: _Incomplete | None = None
    model: str | None = None
    usage: _Usage | None = None


@dataclass(frozen=True)
class _FunctionCall:
    name: str
    arguments: str | dict[str, Any] | None = None
    call_id: str | None = None


@dataclass(frozen=True)
class _Part:
    type: str
    text: str | None = None
    refusal: str | None = None


@dataclass(frozen=True)
class _Said:
    content: tuple[_Part, ...]


@dataclass(frozen=True)
class ResponseEvent(Failure):
    """One event of a stream; only some say something to us."""

    type: str = ""
    delta: Any = None
    response: dict[str, Any] | None = None


def read_response(forms: Forms, data: Any) -> ModelTurn | Failure:
    """Return an answer as a turn, or what the provider says of its failure.

    What does not fit the format raises a ParseError.
    """
    response = parse(_Response, data, extra="ignore")
    if response.status in {"failed", "cancelled"}:
        return response.error or Failure(message=response.status)
    items = [item for item in response.output if "type" in item]
    calls = tuple(_read_call(forms, item) for item in items if item["type"] == "function_call")
    said = [parse(_Said, item, extra="ignore") for item in items if item["type"] == "message"]
    parts = [part for each in said for part in each.content]
    text = "".join(part.text or "" for part in parts)
    refusal = "".join(part.refusal or "" for part in parts)
    incomplete, usage = response.incomplete_details or _Incomplete(), response.usage or _Usage()
    reason = _STOP_REASONS.get(incomplete.reason, "tool_use" if calls else "end_turn")
    return ModelTurn(
        text=refusal or (text if calls else forms.final_text(text)),
        tool_calls=calls,
        stop_reason="refusal" if refusal else reason,
        usage=tokens(usage.input_tokens, usage.output_tokens),
        model=response.model or "",
        wire={"responses": items},
    )


def _read_call(forms: Forms, item: Mapping[str, Any]) -> ToolCall:
    call = parse(_FunctionCall, item, extra="ignore")
    return forms.call(call.name, call.arguments, call.call_id)
