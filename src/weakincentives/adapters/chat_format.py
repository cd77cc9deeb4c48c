"""The chat completions format: requests, answers, and answers that come in pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from weakincentives.adapters.forms import Form, Forms, arguments_of, in_whole_characters, tokens
from weakincentives.errors import ParseError
from weakincentives.runtime.conversation import Message, ModelTurn, StopReason
from weakincentives.serde import parse

__all__ = ["WANTED_BACK", "ChatPieces", "chat_body", "read_chat"]

WANTED_BACK = (
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    "thinking_blocks",
    "extra_content",
    "provider_specific_fields",
)
"""What providers put beside a message or a call, and want to see again with it."""

_STOP_REASONS: Mapping[str | None, StopReason] = {
    "length": "max_tokens",
    "content_filter": "refusal",
}

# Requests


def chat_body(forms: Forms, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request; the options may offer tools that the provider runs."""
    body = dict(options)
    system = {"role": "system", "content": forms.system}
    body["messages"] = in_whole_characters([system, *map(_message, forms.request.messages)])
    tools = [*options.get("tools", ()), *map(_function, forms.tools.values())]
    if tools:
        body["tools"] = tools
    if forms.answer is not None:
        form = {"name": forms.answer.name, "schema": forms.answer.schema}
        strict = {"strict": forms.answer.is_strict}
        body["response_format"] = {"type": "json_schema", "json_schema": form | strict}
    return body


def _function(form: Form) -> dict[str, Any]:
    function = {"name": form.name, "description": form.description, "parameters": form.schema}
    # Only said where it is so: some servers do not know it.
    return {"type": "function", "function": function | ({"strict": True} if form.is_strict else {})}


def _message(message: Message) -> dict[str, Any]:
    if message.role == "user":
        return {"role": "user", "content": message.text}
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.call_id, "content": message.text}
    beside, beside_calls = _kept(message)
    made: dict[str, Any] = {"role": "assistant", "content": message.text, **beside}
    if message.tool_calls:
        made["content"] = message.text or None
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call)},
                **(beside_calls[n] if n < len(beside_calls) else {}),
            }
            for n, call in enumerate(message.tool_calls)
        ]
    return made


def _kept(message: Message) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """Return what the provider wants back; another adapter's message has nothing of the kind."""
    wire = message.wire
    if not isinstance(wire, Mapping) or "chat" not in wire:
        return {}, []
    wire = cast("Mapping[str, Any]", wire)
    return wire["chat"], wire["calls"]


# Answers


@dataclass(frozen=True)
class _Function:
    name: str
    arguments: str | dict[str, Any] | None = None


@dataclass(frozen=True)
class _Call:
    function: _Function
    id: str | None = None


@dataclass(frozen=True)
class _Answer:
    content: str | None = None
    refusal: str | None = None
    tool_calls: tuple[_Call, ...] | None = None


@dataclass(frozen=True)
class _Choice:
    message: _Answer
    finish_reason: str | None = None


@dataclass(frozen=True)
class _Usage:
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True)
class _Completion:
    choices: tuple[_Choice, ...]
    model: str | None = None
    usage: _Usage | None = None


def read_chat(forms: Forms, data: Any) -> ModelTurn:
    """Return an answer as a turn, or raise a ParseError that says what is wrong with it."""
    completion = parse(_Completion, data, extra="ignore")
    if not completion.choices:
        raise ParseError("The answer is empty", {"choices": "Expected at least one"})
    choice, usage = completion.choices[0], completion.usage or _Usage()
    answer = choice.message
    calls = tuple(
        forms.call(each.function.name, each.function.arguments, each.id)
        for each in answer.tool_calls or ()
    )
    text = answer.content or ""
    reason = _STOP_REASONS.get(choice.finish_reason, "tool_use" if calls else "end_turn")
    if answer.refusal:
        text, reason = answer.refusal, "refusal"
    return ModelTurn(
        text=text if calls else forms.final_text(text),
        tool_calls=calls,
        stop_reason=reason,
        usage=tokens(usage.prompt_tokens, usage.completion_tokens),
        model=completion.model or "",
        wire=_wire(data["choices"][0]["message"]),
    )


def _wire(message: Mapping[str, Any]) -> dict[str, Any] | None:
    beside = _beside(message)
    beside_calls = [_beside(call) for call in message.get("tool_calls") or ()]
    return {"chat": beside, "calls": beside_calls} if beside or any(beside_calls) else None


def _beside(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in WANTED_BACK if _says_something(given.get(name))}


def _says_something(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_says_something, cast("Mapping[str, Any]", value).values()))
    return bool(value)


# Answers that come in pieces


@dataclass(frozen=True)
class _PieceOfFunction:
    name: str | None = None
    arguments: str | None = None


@dataclass(frozen=True)
class _PieceOfCall:
    index: int | None = None
    id: str | None = None
    function: _PieceOfFunction | None = None


@dataclass(frozen=True)
class _Delta:
    content: str | None = None
    refusal: str | None = None
    tool_calls: tuple[_PieceOfCall, ...] | None = None


@dataclass(frozen=True)
class _PieceOfChoice:
    delta: _Delta | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class _Chunk:
    choices: tuple[_PieceOfChoice, ...] = ()


@dataclass(slots=True)
class ChatPieces:
    """Puts the pieces of an answer together, as if it had come at once."""

    is_finished: bool = False
    _message: dict[str, Any] = field(default_factory=dict[str, Any])
    _calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _finish_reason: str | None = None
    _about: dict[str, Any] = field(default_factory=dict[str, Any])

    def add(self, data: Any) -> str:
        """Take a piece; return the text in it, or raise a ParseError for one that is none."""
        chunk = parse(_Chunk, data, extra="ignore")
        self._about |= {name: data[name] for name in ("model", "usage") if data.get(name)}
        if not chunk.choices:  # about the request, or its cost
            return ""
        choice = chunk.choices[0]
        if choice.finish_reason:  # some servers send an empty one with every piece
            self.is_finished, self._finish_reason = True, choice.finish_reason
        if choice.delta is None:
            return ""
        raw = data["choices"][0]["delta"]
        _merge(self._message, raw, {"content", "refusal", *WANTED_BACK})
        for n, piece in enumerate(choice.delta.tool_calls or ()):
            self._add_call(piece, raw["tool_calls"][n])
        return choice.delta.content or choice.delta.refusal or ""

    def _add_call(self, piece: _PieceOfCall, raw: Mapping[str, Any]) -> None:
        call = self._call_of(piece)
        _merge(call, raw, set(WANTED_BACK))
        if piece.function is not None:
            call["function"]["name"] = call["function"]["name"] or piece.function.name or ""
            call["function"]["arguments"] += piece.function.arguments or ""

    def _call_of(self, piece: _PieceOfCall) -> dict[str, Any]:
        """Return the call that a piece belongs to: a new one, or one that has begun.

        Some servers count every call as the first, or do not count: then a new id begins one.
        """
        same = [call for call in self._calls if call["index"] == piece.index]
        if same and (not piece.id or piece.id == same[-1]["id"]):
            return same[-1]
        function = {"name": "", "arguments": ""}
        begun = {"index": piece.index, "id": piece.id, "function": function}
        self._calls.append(begun)
        return begun

    def completion(self) -> dict[str, Any]:
        """Return the whole answer."""
        message = {**self._message, "tool_calls": self._calls}
        choice = {"message": message, "finish_reason": self._finish_reason}
        return {**self._about, "choices": [choice]}


def _merge(whole: dict[str, Any], piece: Mapping[str, Any], names: set[str]) -> None:
    """Add a piece: texts and lists go on, anything else is replaced."""
    for name in names & piece.keys():
        old, new = whole.get(name), piece[name]
        if isinstance(old, str | list) and type(new) is type(cast("object", old)):
            whole[name] = cast("Any", old) + new
        elif new is not None:
            whole[name] = new
