"""Anthropic's Messages API: what an answer looks like, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from weakincentives.adapters import Message, ModelTurn
from weakincentives.core.call import ToolCall
from weakincentives.testing import Asked

_FIELDS = frozenset(
    [
        "model",
        "max_tokens",
        "messages",
        "system",
        "tools",
        "tool_choice",
        "output_config",
        "stream",
        "temperature",
        "thinking",
        "cache_control",
    ]
)
_HELD_KEYWORDS = {"type", "properties", "required", "additionalProperties", "items", "anyOf"}
_HELD_KEYWORDS |= {"allOf", "enum", "const", "$ref", "$defs", "description", "title", "default"}
_HELD_KEYWORDS |= {"format", "minItems"}
"""What the provider knows of a schema that it holds a model to."""
_MEDIA = {
    "image": r"image/(png|jpeg|gif|webp)",
    "document": r"application/pdf",
}


# An answer


def stream_of(body: dict[str, Any], turn: ModelTurn, number: int) -> bytes:
    """Return the answer as a stream of small pieces."""
    spent = turn.usage
    usage = {
        "input_tokens": spent.input_tokens - spent.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": spent.cached_tokens,
        "output_tokens": 0,
    }
    message = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": turn.model or body["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message},
        {"type": "ping"},
    ]
    for index, (start, deltas) in enumerate(_blocks(turn)):
        at = {"index": index}
        events.append({"type": "content_block_start", **at, "content_block": start})
        events += [{"type": "content_block_delta", **at, "delta": each} for each in deltas]
        events.append({"type": "content_block_stop", **at})
    stop = "tool_use" if turn.tool_calls else turn.stop_reason
    stop = (turn.wire or {}).get("stop", stop)
    events += [
        {
            "type": "message_delta",
            "delta": {"stop_reason": stop, "stop_sequence": None},
            "usage": {"output_tokens": spent.output_tokens},
        },
        {"type": "message_stop"},
    ]
    return events_as_stream(*events)


def events_as_stream(*events: dict[str, Any]) -> bytes:
    lines = [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events]
    return "".join(lines).encode()


def _blocks(turn: ModelTurn) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    for block in (turn.wire or {}).get("messages", ()):
        if block["type"] == "thinking":
            deltas = [{"type": "thinking_delta", "thinking": p} for p in pieces(block["thinking"])]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
            yield {"type": "thinking", "thinking": "", "signature": ""}, deltas
        else:
            yield block, []
    if turn.text:
        deltas = [{"type": "text_delta", "text": piece} for piece in pieces(turn.text)]
        yield {"type": "text", "text": ""}, deltas
    for call in turn.tool_calls:
        start = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        written = call.params if isinstance(call.params, str) else json.dumps(call.params)
        deltas = [{"type": "input_json_delta", "partial_json": p} for p in ["", *pieces(written)]]
        yield start, deltas


def pieces(text: str) -> list[str]:
    return [text[n : n + 7] for n in range(0, len(text), 7)]


# What is refused


def messages_problems(body: dict[str, Any]) -> Iterator[str]:
    """Yield what Anthropic's Messages API would not take."""
    for name in body.keys() - _FIELDS:
        yield f"{name}: Extra inputs are not permitted"
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] < 1:
        yield "max_tokens: Field required"
    if body.get("system") is not None and not body["system"].strip():
        yield "system: text content blocks must contain non-whitespace text"
    messages = body["messages"]
    if not messages or messages[0]["role"] != "user":
        yield "messages: first message must use the user role"
    roles = [each["role"] for each in messages]
    if any(a == b for a, b in pairwise(roles)):
        yield "messages: roles must alternate between user and assistant"
    yield from _content_problems(messages)
    names = [each["name"] for each in body.get("tools", ())]
    if len(set(names)) < len(names):
        yield "tools: Tool names must be unique."
    for n, each in enumerate(body.get("tools", ())):
        if "type" in each:  # one that the provider runs
            continue
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,128}", each["name"]):
            yield f"tools.{n}.name: String should match pattern"
        if each["input_schema"].get("type") != "object":
            yield f"tools.{n}.input_schema.type: Input should be 'object'"
        if each.get("strict"):
            yield from held_problems(each["input_schema"])
    if form := body.get("output_config", {}).get("format"):
        yield from held_problems(form["schema"])


def _content_problems(messages: list[dict[str, Any]]) -> Iterator[str]:
    waiting: list[str] = []
    for n, message in enumerate(messages):
        blocks = message["content"]
        if not blocks and n < len(messages) - 1:
            yield f"messages.{n}: all messages must have non-empty content"
        answered = [each["tool_use_id"] for each in blocks if each["type"] == "tool_result"]
        first = [each["type"] for each in blocks][: len(answered)]
        if sorted(answered) != sorted(waiting) or first != ["tool_result"] * len(answered):
            yield (
                f"messages.{n}: `tool_use` ids were found without `tool_result` blocks "
                f"immediately after: {waiting}, {answered}"
            )
        waiting = [each["id"] for each in blocks if each["type"] == "tool_use"]
        for block in blocks:
            yield from _block_problems(n, block, message["role"])


def _block_problems(n: int, block: dict[str, Any], role: str) -> Iterator[str]:
    match block["type"]:
        case "text":
            if not block["text"].strip():
                yield f"messages.{n}: text content blocks must contain non-whitespace text"
        case "tool_use":
            if not re.fullmatch(r"[a-zA-Z0-9_-]+", block["id"]):
                yield f"messages.{n}.tool_use.id: String should match pattern"
            if not isinstance(block["input"], dict):
                yield f"messages.{n}.tool_use.input: Input should be a valid dictionary"
            for name in block.keys() - {"type", "id", "name", "input"}:
                yield f"messages.{n}.tool_use.{name}: Extra inputs are not permitted"
        case "tool_result":
            for each in block.get("content", ()):
                yield from _block_problems(n, each, role)
        case "image" | "document" as kind:
            if not re.fullmatch(_MEDIA[kind], block["source"]["media_type"]):
                yield f"messages.{n}.{kind}.source.media_type: Input should be {_MEDIA[kind]}"
        case "thinking":
            if role != "assistant" or not block["signature"]:
                yield f"messages.{n}: Invalid `signature` in `thinking` block"
        case "server_tool_use" | "web_search_tool_result":
            if role != "assistant":
                yield f"messages.{n}: {block['type']} in a message of the user"
        case kind:
            yield f"messages.{n}: Input tag '{kind}' does not match any of the expected tags"


def held_problems(node: Any) -> Iterator[str]:
    """Yield what the provider would not take of a schema that it holds a model to."""
    for name in node.keys() - _HELD_KEYWORDS:
        yield f"schema: For '{node.get('type')}' type, property '{name}' is not supported"
    if node.get("type") == "object" and node.get("additionalProperties") is not False:
        yield "schema: For 'object' type, 'additionalProperties' must be explicitly set to false"
    inner = [*node.get("properties", {}).values(), *node.get("$defs", {}).values()]
    inner += [*node.get("anyOf", ()), *node.get("allOf", ())]
    for each in [*inner, *([node["items"]] if "items" in node else [])]:
        yield from held_problems(each)


# A request read back


def read_messages(body: dict[str, Any]) -> Asked:
    found: list[Message] = []
    for message in body["messages"]:
        blocks, text = message["content"], _text_of(message["content"])
        if message["role"] == "assistant":
            calls = [
                ToolCall(b["name"], b["input"].get("not_json", b["input"]), b["id"])
                for b in blocks
                if b["type"] == "tool_use"
            ]
            found.append(Message(role="model", text=text, tool_calls=tuple(calls)))
            continue
        found += [
            Message(role="tool", text=_text_of(b.get("content", ())), call_id=b["tool_use_id"])
            for b in blocks
            if b["type"] == "tool_result"
        ]
        found += [Message(role="user", text=b["text"]) for b in blocks if b["type"] == "text"]
    tools = [each["name"] for each in body.get("tools", ())]
    return Asked(system=body["system"], messages=found, tools=tools)


def _text_of(blocks: Any) -> str:
    return "".join(each["text"] for each in blocks if each["type"] == "text")
