"""The server that stands in for a provider refuses what the provider would refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from wire import WireServer, strict_problems

from weakincentives.adapters import says

SYSTEM = {"role": "system", "content": "Do it."}
USER = {"role": "user", "content": "Begin."}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}},
        {"id": "b", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ],
}
ANSWER_A = {"role": "tool", "tool_call_id": "a", "content": "1"}
ANSWER_B = {"role": "tool", "tool_call_id": "b", "content": "2"}
ITEM_A = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
OUTPUT_A = {"type": "function_call_output", "call_id": "a", "output": "1"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": []}
OPEN = {"type": "object", "properties": {"x": {"type": "integer", "default": 1}}}


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    with WireServer() as server:
        yield server


def send(server: WireServer, api: str, **body: Any) -> None:
    async def ask() -> None:
        script = server.play(says("Hello."))
        async with openai.AsyncOpenAI(base_url=script.base_url, api_key="none") as client:
            create: Any = {"chat": client.chat.completions, "responses": client.responses}[api]
            await create.create(model="m", **body)

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([USER], "system message stands first"),
        ([SYSTEM, USER, CALLED, ANSWER_A], "must be followed by answers"),
        ([SYSTEM, USER, CALLED, ANSWER_A, USER], "must be followed by answers"),
        ([SYSTEM, USER, ANSWER_A], "must answer a preceding message"),
        ([SYSTEM, USER, CALLED, ANSWER_A, ANSWER_A], "must answer a preceding message"),
        ([SYSTEM, USER, CALLED, ANSWER_A, ANSWER_B, CALLED, ANSWER_A, ANSWER_B], "was there"),
        ([SYSTEM, {"role": "assistant", "content": None}], "content is null"),
        ([SYSTEM, {**USER, "mood": "good"}], "unknown field"),
    ],
)
def test_a_conversation_in_the_wrong_order_is_refused(
    server: WireServer, messages: list[Any], words: str
):
    with pytest.raises(openai.BadRequestError, match=words):
        send(server, "chat", messages=messages)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([USER, ITEM_A], "No tool output found"),
        ([USER, ITEM_A, USER], "No tool output found"),
        ([USER, OUTPUT_A], "No tool call found"),
        ([USER, ITEM_A, OUTPUT_A, ITEM_A, OUTPUT_A], "was there before"),
        ([USER, {**ITEM_A, "arguments": "{"}, OUTPUT_A], "Failed to parse"),
        ([USER, THOUGHT], "not persisted"),
    ],
)
def test_items_in_the_wrong_order_are_refused(server: WireServer, items: list[Any], words: str):
    with pytest.raises(openai.BadRequestError, match=words):
        send(server, "responses", instructions="Do it.", input=items, store=False)


def test_a_schema_that_is_not_strict_is_refused(server: WireServer):
    function = {"name": "add", "description": "Add.", "parameters": OPEN, "strict": True}

    with pytest.raises(openai.BadRequestError, match="'additionalProperties' is required"):
        send(
            server,
            "chat",
            messages=[SYSTEM, USER],
            tools=[{"type": "function", "function": function}],
        )


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"type": "integer", "default": 1}, "'default' is not permitted"),
        ({"type": "object", "properties": {}}, "'additionalProperties' is required"),
        ({"$ref": "#/$defs/a", "description": "x"}, "cannot have keywords"),
        ({"$ref": "#/$defs/a"}, "not found"),
        ({"type": "string", "format": "uri"}, "not a valid format"),
        ({"type": "array"}, "missing items"),
        ({}, "must have a 'type' key"),
        ({"oneOf": []}, "'oneOf' is not permitted"),
    ],
)
def test_strict_mode_has_rules(node: dict[str, Any], words: str):
    whole = {"type": "object", "properties": {"a": node}, "required": ["a"]}
    problems = list(strict_problems({**whole, "additionalProperties": False}))

    assert any(words in problem for problem in problems)
    missing = {**whole, "required": [], "additionalProperties": False}
    assert any("'required' must be" in problem for problem in strict_problems(missing))
