"""Anthropic's Messages API beyond what every adapter must do: that is in test_adapter_cases."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import anthropic
import pytest
from wire import Raw, Script, WireServer, everything_in

import weakincentives as wink
from weakincentives.adapters import (
    AnthropicAdapter,
    Message,
    ModelRequest,
    ModelTurn,
    OpenAIAdapter,
    TextDelta,
    calls,
    says,
)
from weakincentives.core.budget import TokenUsage
from weakincentives.core.call import ToolCall
from weakincentives.core.media import Media
from weakincentives.errors import (
    ContextOverflow,
    MalformedResponse,
    MissingExtra,
    ProviderError,
    ProviderRejected,
    ProviderThrottled,
    ProviderUnavailable,
)
from weakincentives.prompt import ToolResult
from wire_messages import events_as_stream

KEY = "sk-ant-loopback-0123456789"
PNG = Media(
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\6\0\0\0\x1f\x15\xc4\x89", "image/png"
)


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    with WireServer() as server:
        yield server


def adapter_for(script: Script, **options: Any) -> AnthropicAdapter:
    options = {"model": "m", "api_key": KEY, **options}
    return AnthropicAdapter(base_url=script.base_url.removesuffix("/v1"), **options)


def prompt_with(*tools: wink.Tool[Any, Any], output: Any = None) -> wink.Prompt[Any]:
    template = wink.PromptTemplate if output is None else wink.PromptTemplate[output]
    section = wink.MarkdownSection(title="Task", template="Do it.", tools=tools)
    return wink.Prompt(template(sections=[section]))


def request_for(prompt: wink.Prompt[Any], *messages: Message, **fields: Any) -> ModelRequest:
    messages = messages or (Message(role="user", text="Begin."),)
    return ModelRequest(prompt=prompt.render(wink.Session()), messages=messages, **fields)


def turn_of(script: Script, *messages: Message, **fields: Any) -> ModelTurn:
    return asyncio.run(adapter_for(script).complete(request_for(prompt_with(), *messages)))


@wink.tool
def add(x: int, y: int = 2) -> int:
    """Add two numbers."""
    return x + y


# What goes out


@dataclass(frozen=True)
class Place:
    path: str
    line: int = 1


@dataclass(frozen=True)
class Report:
    title: str
    kind: Literal["good", "bad"]
    places: tuple[Place, ...] = ()


def test_a_structured_answer_is_held_to_its_schema(server: WireServer):
    script = server.play(says('{"title": "T", "kind": "bad", "places": [{"path": "a"}]}'))

    response = adapter_for(script, options={"output_config": {"effort": "low"}}).evaluate(
        prompt_with(output=Report), wink.Session()
    )

    assert response.output == Report("T", "bad", (Place("a"),))
    sent = script.bodies[0]["output_config"]
    assert sent["effort"] == "low"
    assert sent["format"]["schema"]["additionalProperties"] is False
    assert script.problems == []


@dataclass(frozen=True)
class Anything:
    numbers: dict[str, int]


@pytest.mark.parametrize(
    ("options", "output", "answer"),
    [
        ({"output": "text"}, Report, Report("T", "bad")),
        ({}, Anything, Anything({"a": 1})),  # the provider cannot hold a model to any keys
    ],
)
def test_where_a_schema_is_not_sent_the_prompt_asks_for_it(
    server: WireServer, options: dict[str, Any], output: Any, answer: object
):
    text = '{"title": "T", "kind": "bad"}' if output is Report else '{"numbers": {"a": 1}}'
    script = server.play(says(text))

    response = adapter_for(script, **options).evaluate(prompt_with(output=output), wink.Session())

    assert response.output == answer
    assert "output_config" not in script.bodies[0]
    assert "JSON" in script.bodies[0]["system"]


def test_tools_are_held_to_their_schemas_on_request(server: WireServer):
    @wink.tool
    def note(entries: dict[str, str]) -> None:
        """Note something."""

    script = server.play(says("Yes."), says("Yes."))
    for strict in (False, True):
        adapter_for(script, strict=strict).evaluate(prompt_with(add, note), wink.Session())

    plain, held = ({each["name"]: each for each in body["tools"]} for body in script.bodies)
    assert plain["add"]["input_schema"] == add.parameters
    assert "strict" not in plain["add"]
    assert held["add"]["strict"] is True
    assert "strict" not in held["note"]  # any key is allowed
    assert held["note"]["input_schema"] == note.parameters
    assert script.problems == []


def test_options_go_along_and_provider_tools_stand_with_ours(server: WireServer):
    script = server.play(says("Yes."))
    search = {"type": "web_search_20250305", "name": "web_search"}
    options = {"temperature": 0.5, "tools": [search], "max_tokens": 100}

    adapter_for(script, options=options).evaluate(prompt_with(add), wink.Session())

    sent = script.bodies[0]
    assert [each["name"] for each in sent["tools"]] == ["web_search", "add"]
    assert (sent["temperature"], sent["max_tokens"]) == (0.5, 100)
    assert script.problems == []


def test_media_are_blocks_in_messages_and_in_answers_of_tools(server: WireServer):
    @wink.tool
    def look() -> ToolResult[Media]:
        """Look."""
        return ToolResult.ok(PNG)

    script = server.play(calls("look"), says("A dot."))
    paper = Media(b"%PDF-1.7 nothing", "application/pdf", name="paper.pdf")
    adapter_for(script).evaluate(
        prompt_with(look), wink.Session(), message=["Compare with this.", paper]
    )

    first, _, answers = script.bodies[1]["messages"]
    assert [block["type"] for block in first["content"]] == ["text", "document"]
    assert first["content"][1]["title"] == "paper.pdf"
    assert [block["type"] for block in answers["content"][0]["content"]] == ["text", "image"]
    assert script.problems == []


def test_a_conversation_of_another_adapter_is_continued(server: WireServer):
    """Ids that the provider would refuse, an empty answer, and arguments that are no object."""
    script = server.play(says("Indeed."))
    messages = [
        Message(role="user", text="Begin."),
        Message(
            role="model",
            tool_calls=(ToolCall("add", {"x": 1}, "call:1|a"), ToolCall("no tool!", "[1", "b")),
            wire={"chat": {}, "calls": []},
        ),
        Message(role="tool", text="3", call_id="call:1|a"),
        Message(role="tool", text="", call_id="b"),
        Message(role="user", text="  "),
        Message(role="model", text=""),
        Message(role="user", text="Go on."),
    ]

    assert turn_of(script, *messages).text == "Indeed."

    assert script.problems == []
    _, made, answered = script.bodies[0]["messages"]
    assert [block["input"] for block in made["content"]] == [{"x": 1}, {"not_json": "[1"}]
    kinds = [block["type"] for block in answered["content"]]
    assert kinds == ["tool_result", "tool_result", "text"]


def test_another_adapter_continues_its_conversation(server: WireServer):
    thought = {"type": "thinking", "thinking": "One and two.", "signature": "c2ln"}
    script = server.play(calls(("add", {"x": 1}), wire={"messages": [thought]}), says("Three."))
    session, prompt = wink.Session(), prompt_with(add)
    adapter_for(script).evaluate(prompt, session)
    other = server.play(says("Indeed."))

    OpenAIAdapter("m", base_url=other.base_url, api_key=KEY).evaluate(
        prompt, session, message="Really?"
    )

    assert other.problems == []


# What comes back


def test_thinking_is_sent_back_in_its_place_and_is_no_text(server: WireServer):
    """The provider counts its calls from one again, so the runtime gives them other ids."""
    thought = {"type": "thinking", "thinking": "One and two is three.", "signature": "c2lnbmVk"}
    hidden = {"type": "redacted_thinking", "data": "aGlkZGVu"}
    turn = calls(ToolCall("add", {"x": 1}, "1"), text="Let me see.", wire={"messages": [thought]})
    script = server.play(turn, turn, says("Done."))
    heard: list[str] = []

    def hear(event: object) -> None:
        if isinstance(event, TextDelta):
            heard.append(event.text)

    session = wink.Session()
    adapter_for(script).evaluate(prompt_with(add), session, on_event=hear)

    assert script.problems == []
    assert "".join(heard) == "Let me see.Let me see.Done."
    assert len(heard) > 4
    sent = script.bodies[2]["messages"]
    assert sent[1]["content"][0] == sent[3]["content"][0] == thought
    used = [sent[n]["content"][2]["id"] for n in (1, 3)]
    ids = [call.id for message in session[Message] for call in message.tool_calls]
    assert used == ids
    assert hidden not in sent[1]["content"]


def test_a_turn_that_the_provider_paused_is_continued(server: WireServer):
    used = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    spent = TokenUsage(input_tokens=10, output_tokens=2)
    pause = says("Searching. ", wire={"messages": [used], "stop": "pause_turn"}, usage=spent)
    script = server.play(pause, says("Found.", wire={"messages": [found]}, usage=spent))

    turn = turn_of(script)

    assert script.problems == []
    assert turn.text == "Searching. Found."
    assert turn.usage == spent + spent
    assert script.bodies[1]["messages"][1]["content"][0] == used
    assert [block["type"] for block in turn.wire["messages"]] == [
        "server_tool_use",
        "text",
        "web_search_tool_result",
        "text",
    ]


def test_cached_tokens_are_part_of_those_that_were_read(server: WireServer):
    spent = TokenUsage(input_tokens=100, output_tokens=5, cached_tokens=90)

    assert turn_of(server.play(says("Yes.", usage=spent))).usage == spent


@pytest.mark.parametrize(
    ("reason", "stop"),
    [
        ("model_context_window_exceeded", "max_tokens"),
        ("stop_sequence", "end_turn"),
        ("new", "end_turn"),
    ],
)
def test_reasons_to_stop(server: WireServer, reason: str, stop: str):
    assert turn_of(server.play(says("Yes", wire={"stop": reason}))).stop_reason == stop


# What goes wrong


def problem(status: int, kind: str, text: str = "no", headers: dict[str, str] | None = None) -> Raw:
    body = {"type": "error", "error": {"type": kind, "message": text}, "request_id": "req_1"}
    return Raw(json.dumps(body).encode(), status, headers=headers or {})


def in_a_stream(kind: str) -> Raw:
    begun = {"id": "1", "type": "message", "role": "assistant", "model": "m", "content": []}
    body = events_as_stream(
        {"type": "message_start", "message": {**begun, "usage": {}}},
        {"type": "error", "error": {"type": kind, "message": "no"}},
    )
    return Raw(body, content_type="text/event-stream")


TOO_LONG = "prompt is too long: 200100 tokens > 200000 maximum"
FAILURES: dict[str, tuple[Raw, type[ProviderError], str]] = {
    "bad key": (problem(401, "authentication_error"), ProviderRejected, "ANTHROPIC_API_KEY"),
    "not allowed": (problem(403, "permission_error"), ProviderRejected, "may use this model"),
    "no model": (problem(404, "not_found_error"), ProviderRejected, "the model's name"),
    "bad request": (problem(400, "invalid_request_error"), ProviderRejected, 'output="text"'),
    "no money": (problem(402, "billing_error"), ProviderRejected, "no quota left"),
    "too long": (problem(400, "invalid_request_error", TOO_LONG), ContextOverflow, "200100"),
    "too large": (problem(413, "request_too_large"), ContextOverflow, "so long"),
    "throttled": (
        problem(429, "rate_limit_error", headers={"Retry-After": "7"}),
        ProviderThrottled,
        "rate-limited",
    ),
    "overloaded": (problem(529, "overloaded_error"), ProviderUnavailable, "failed (529)"),
    "server error": (problem(500, "api_error"), ProviderUnavailable, "failed (500)"),
    "a page": (Raw(b"<html>", 502, content_type="text/html"), ProviderUnavailable, "failed (502)"),
    "overloaded later": (in_a_stream("overloaded_error"), ProviderUnavailable, "failed (529)"),
    "throttled later": (in_a_stream("rate_limit_error"), ProviderThrottled, "rate-limited"),
    "refused later": (in_a_stream("invalid_request_error"), ProviderRejected, "rejected"),
    "failed later": (in_a_stream("api_error"), ProviderUnavailable, "failed (500)"),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_a_failure_says_what_happened_and_what_to_do(
    server: WireServer, failure: tuple[Raw, type[ProviderError], str]
):
    answer, kind, words = failure
    script = server.play(answer)

    with pytest.raises(kind) as raised:
        turn_of(script)

    assert words in str(raised.value)
    assert str(raised.value).startswith("The server at 127.0.0.1:")
    assert len(script.bodies) == 1  # the client does not try again by itself
    assert raised.value.retry_after == (7.0 if "Retry-After" in answer.headers else None)


def stream(*events: dict[str, Any]) -> Raw:
    return Raw(events_as_stream(*events), content_type="text/event-stream")


START: dict[str, Any] = {"type": "message_start", "message": {"model": "m", "usage": {}}}
TEXT: dict[str, Any] = {
    "type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""},
}  # fmt: skip
DELTA: dict[str, Any] = {"type": "content_block_delta", "index": 0}
BROKEN: dict[str, tuple[Raw, type[ProviderError]]] = {
    "nothing": (stream(), ProviderUnavailable),
    "no end": (stream(START, TEXT), ProviderUnavailable),
    "no reason": (stream(START, TEXT, {"type": "message_stop"}), ProviderUnavailable),
    "no block": (
        stream(START, {**DELTA, "delta": {"type": "text_delta", "text": "a"}}),
        MalformedResponse,
    ),
    "no text": (
        stream(START, TEXT, {**DELTA, "delta": {"type": "text_delta", "text": 5}}),
        MalformedResponse,
    ),
    "no JSON": (
        Raw(b"event: message_start\ndata: {\n\n", content_type="text/event-stream"),
        MalformedResponse,
    ),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_stream_is_never_taken_for_an_answer(
    server: WireServer, broken: tuple[Raw, type[ProviderError]]
):
    answer, kind = broken

    with pytest.raises(kind):
        turn_of(server.play(answer))


def test_a_stream_may_be_cut_anywhere_and_is_then_asked_for_again(server: WireServer):
    turn_of(server.play(calls(("add", {"x": 1}), text="Let me see.")))
    whole = server.sent[-1]

    for end in range(0, len(whole), len(whole) // 9):
        cut = Raw(whole[:end], content_type="text/event-stream", is_cut=True)
        with pytest.raises(ProviderUnavailable) as raised:
            turn_of(server.play(cut))
        assert raised.value.recoverable


@pytest.mark.parametrize("status", [400, 401, 429, 500])
def test_no_secret_is_left_in_an_error_or_behind_it(server: WireServer, status: int):
    script = server.play(problem(status, "some_error", f"you sent {KEY}"))

    with pytest.raises(ProviderError) as raised:
        turn_of(script)

    shown = everything_in(raised.value)
    assert script.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert "you sent" in shown
    assert KEY not in shown


# Keys and clients


def test_without_a_key_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(ProviderRejected, match="set ANTHROPIC_API_KEY or give api_key"):
        AnthropicAdapter("m")
    with pytest.raises(ValueError, match="max_tokens must be positive"):
        AnthropicAdapter("m", max_tokens=0, api_key=KEY)


def test_a_server_of_your_own_needs_no_key(server: WireServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_AUTH_TOKEN", raising=False)
    script = server.play(says("One."), says("Two."))
    request = request_for(prompt_with())

    assert asyncio.run(adapter_for(script, api_key=None).complete(request)).text == "One."
    monkeypatch.setenv("ANTHROPIC_BASE_URL", script.base_url.removesuffix("/v1"))
    assert asyncio.run(AnthropicAdapter("m").complete(request)).text == "Two."


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "anthropic", None)

    with pytest.raises(MissingExtra, match=r"pip install .*\[anthropic\]"):
        AnthropicAdapter("m", api_key=KEY)


def test_one_adapter_works_from_sync_code_and_on_every_loop():
    with WireServer() as own:
        said = _texts_from_everywhere(adapter_for(own.play(*[says(f"{n}") for n in range(4)])))
        assert said == ["0", "1", "2", "3"]

        gc.collect()  # the adapter is gone, and with it its connections
        assert own.is_left_alone()


def _texts_from_everywhere(adapter: AnthropicAdapter) -> list[str]:
    def here() -> str:
        return adapter.evaluate(prompt_with(), wink.Session()).text

    async def twice() -> list[str]:
        runs = [await adapter.aevaluate(prompt_with(), wink.Session()) for _ in range(2)]
        return [run.text for run in runs]

    return [here(), *asyncio.run(twice()), here()]


def test_a_client_of_your_own_is_used_and_left_open(server: WireServer):
    script = server.play(problem(503, "api_error"), says("Hello."))

    async def run() -> None:
        async with anthropic.AsyncAnthropic(
            base_url=script.base_url.removesuffix("/v1"),
            api_key=KEY,
            max_retries=3,
            default_headers={"X-Mine": "yes"},
        ) as client:
            adapter = AnthropicAdapter("m", client=client)
            with pytest.raises(ProviderUnavailable):
                await adapter.complete(request_for(prompt_with()))
            await adapter.complete(request_for(prompt_with()))
            await adapter.aclose()
            assert not client.is_closed()

    asyncio.run(run())

    assert [headers["X-Mine"] for headers in script.headers] == ["yes", "yes"]
