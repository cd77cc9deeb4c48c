"""OpenAI's formats beyond what every adapter must do: that is in test_adapter_cases."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import pytest
from wire import (
    NO_REASONING,
    Raw,
    Script,
    WireServer,
    chat_sse,
    everything_in,
    responses_sse,
)

import weakincentives as wink
from weakincentives.adapters import (
    Message,
    ModelRequest,
    ModelTurn,
    OpenAIAdapter,
    RunConfig,
    ScriptedAdapter,
    TextDelta,
    calls,
    says,
)
from weakincentives.adapters.failures import without_secrets
from weakincentives.core.budget import TokenUsage
from weakincentives.core.call import ToolCall
from weakincentives.errors import (
    DeadlineExceededError,
    MalformedResponse,
    MissingExtra,
    ProviderError,
    ProviderRejected,
    ProviderThrottled,
    ProviderUnavailable,
)
from weakincentives.prompt import Tool, ToolExample, ToolResult
from weakincentives.retry import RetryPolicies

APIS = ["chat", "responses"]
KEY = "sk-loopback-0123456789"
EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agent.py"
ONCE = RunConfig(retry=RetryPolicies.NONE)


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    with WireServer() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[WireServer]:
    """A server that nobody else is connected to."""
    with WireServer() as server:
        yield server


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def listens(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of a run, with and without somebody who listens."""
    return {"on_event": lambda event: None} if request.param else {}


def adapter_for(script: Script, api: str, **options: Any) -> OpenAIAdapter:
    options = {"api_key": KEY, "model": "m", **options}
    return OpenAIAdapter(api=api, base_url=script.base_url, **options)


def prompt_with(*tools: Tool[Any, Any], output: Any = None) -> wink.Prompt[Any]:
    template = wink.PromptTemplate if output is None else wink.PromptTemplate[output]
    section = wink.MarkdownSection(title="Task", template="Do it.", tools=tools)
    return wink.Prompt(template(sections=[section]))


def request_for(prompt: wink.Prompt[Any], *messages: Message, **fields: Any) -> ModelRequest:
    messages = messages or (Message(role="user", text="Begin."),)
    return ModelRequest(prompt=prompt.render(wink.Session()), messages=messages, **fields)


def turn_of(adapter: OpenAIAdapter, request: ModelRequest) -> ModelTurn:
    return asyncio.run(adapter.complete(request))


@wink.tool
def add(x: int, y: int = 2) -> int:
    """Add two numbers."""
    return x + y


# What goes out


@dataclass(frozen=True)
class Place:
    """Where something is."""

    path: str
    line: int = 1


@dataclass(frozen=True)
class Report:
    title: str
    place: Place | None = None
    tags: tuple[str, ...] = ()


def functions_of(script: Script) -> dict[str, dict[str, Any]]:
    tools = [each.get("function", each) for each in script.bodies[-1]["tools"]]
    return {each["name"]: each for each in tools}


def test_schemas_go_out_in_strict_mode_where_they_can(server: WireServer, api: str):
    @wink.tool
    def label(labels: dict[str, str]) -> str:
        """Label it: any keys."""
        return str(labels)

    script = server.play(says("Done."))

    adapter_for(script, api).evaluate(prompt_with(add, label), wink.Session())

    sent = functions_of(script)
    assert script.problems == []
    assert sent["add"]["strict"] is True
    assert sent["add"]["parameters"]["required"] == ["x", "y"]
    assert not sent["label"].get("strict")
    assert sent["label"]["parameters"] == label.parameters


def test_without_strict_mode_schemas_go_out_as_they_are(server: WireServer, api: str):
    script = server.play(says('{"title": "a"}'))

    adapter = adapter_for(script, api, strict=False)
    response = adapter.evaluate(prompt_with(add, output=Report), wink.Session())

    assert response.output == Report("a")
    assert not functions_of(script)["add"].get("strict")
    assert functions_of(script)["add"]["parameters"] == add.parameters


def test_a_null_for_an_optional_argument_means_that_it_was_left_out(
    server: WireServer, api: str, listens: dict[str, Any]
):
    @wink.tool
    def show(x: int | None = 7, y: int = 2) -> str:
        """Show what came."""
        return f"{x} {y}"

    script = server.play(calls(("show", {"x": None})), says("Done."))

    adapter_for(script, api).evaluate(prompt_with(show), wink.Session(), **listens)

    assert script.tool_texts() == ["None 2"]  # the server, as strict mode does, sent y=null


@pytest.mark.parametrize(
    ("output", "answer", "expected"),
    [
        (Report, '{"title": "a"}', Report("a")),
        (Report, '{"title": "a", "place": {"path": "b"}}', Report("a", Place("b"))),
        (list[Place], '{"items": [{"path": "é"}]}', [Place("é")]),
    ],
)
def test_a_structured_answer_may_have_nulls_for_what_is_left_out(
    server: WireServer, api: str, listens: dict[str, Any], output: Any, answer: str, expected: Any
):
    script = server.play(says(answer), fills_answers=True)

    response = adapter_for(script, api).evaluate(
        prompt_with(output=output), wink.Session(), **listens
    )

    assert response.output == expected
    assert script.problems == []


def test_a_structured_answer_can_be_asked_for_in_words(server: WireServer, api: str):
    script = server.play(says('Here it is: {"title": "a"}'))

    adapter = adapter_for(script, api, output="text")
    response = adapter.evaluate(prompt_with(output=Report), wink.Session())

    assert response.output == Report("a")
    assert "fits this schema" in script.asked()[0].system
    assert not {"response_format", "text"} & script.bodies[0].keys()


def test_examples_stand_in_the_description(server: WireServer, api: str):
    shown = add.replace(examples=[ToolExample("Small numbers", {"x": 1, "y": 1}, 2)])
    script = server.play(says("Done."))

    adapter_for(script, api).evaluate(prompt_with(shown), wink.Session())

    text = functions_of(script)["add"]["description"]
    assert text == 'Add two numbers.\n\nExample: Small numbers\n{"x": 1, "y": 1}'


def test_a_description_that_is_too_long_stands_with_the_parameters(server: WireServer, api: str):
    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    long = Tool.from_schema("long", "word " * 500, closed, lambda params, *, context: None)
    script = server.play(says("Done."))

    adapter_for(script, api).evaluate(prompt_with(long), wink.Session())

    assert script.problems == []
    assert functions_of(script)["long"]["parameters"]["description"] == "word " * 500


def test_tools_that_the_provider_runs_are_named_in_the_options(server: WireServer):
    search = Tool[None, None](name="search", description="Search the web.", handler=None)
    options = {"tools": [{"type": "web_search"}], "temperature": 0.5}
    script = server.play(says("Done."))

    adapter = adapter_for(script, "responses", options=options)
    turn_of(adapter, request_for(prompt_with(search, add)))

    assert [each["type"] for each in script.bodies[0]["tools"]] == ["web_search", "function"]
    assert script.bodies[0]["temperature"] == 0.5


# What comes back


ODD_TURNS = {
    "text": says("Grüße, 世界 🌍\n", usage=TokenUsage(input_tokens=3, output_tokens=4)),
    "nothing": says(""),
    "refusal": says("I will not.", stop_reason="refusal"),
    "cut off": says("Once upon a", stop_reason="max_tokens"),
    "calls": calls(
        ToolCall("add", {"x": 1}, "a"), ToolCall("add", {"x": 2}, "b"), text="Two of them:"
    ),
    "no JSON": calls(ToolCall("add", '{"x": ', "a")),
    "unknown": calls(ToolCall("substract", {"x": 1}, "a")),
    "no object": calls(ToolCall("add", "[1]", "a")),
}


@pytest.mark.parametrize("turn", ODD_TURNS.values(), ids=ODD_TURNS.keys())
def test_a_turn_is_the_same_whole_and_in_pieces(server: WireServer, api: str, turn: ModelTurn):
    script = server.play(turn, turn)
    adapter = adapter_for(script, api)
    heard: list[str] = []

    whole = turn_of(adapter, request_for(prompt_with(add)))
    streamed = turn_of(adapter, request_for(prompt_with(add), on_text=heard.append))

    assert whole == streamed
    assert whole == ModelTurn(
        text=turn.text,
        tool_calls=turn.tool_calls,
        stop_reason=turn.stop_reason,
        usage=turn.usage,
        model="m",
        wire=whole.wire,
    )
    assert "".join(heard) == turn.text


def test_what_a_chat_server_wants_back_is_sent_back(server: WireServer, listens: dict[str, Any]):
    wire = {"chat": {"reasoning_content": "One and two is three."}, "calls": [{}]}
    script = server.play(calls(("add", {"x": 1}), wire=wire), says("Done."))

    adapter_for(script, "chat").evaluate(prompt_with(add), wink.Session(), **listens)

    assert script.problems == []
    assert script.bodies[1]["messages"][2]["reasoning_content"] == "One and two is three."


def test_reasoning_is_sent_back_in_its_place_and_calls_under_our_ids(
    server: WireServer, listens: dict[str, Any]
):
    """The server counts its calls from one again, so the runtime gives them other ids."""
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
    turn = calls(ToolCall("add", {"x": 1}, "1"), wire={"responses": [thought]})
    script = server.play(turn, turn, says("Done."))
    session = wink.Session()

    adapter_for(script, "responses").evaluate(prompt_with(add), session, **listens)

    assert script.problems == []
    items = script.bodies[2]["input"]
    answered = ["reasoning", "function_call", "function_call_output"]
    assert [each.get("type", "user") for each in items] == ["user", *answered, *answered]
    assert items[1] == items[4] == thought
    ids = [call.id for message in session[Message] for call in message.tool_calls]
    assert [items[2]["call_id"], items[5]["call_id"]] == ids
    assert len(set(ids)) == 2
    assert script.bodies[0]["store"] is False
    assert script.bodies[0]["include"] == ["reasoning.encrypted_content"]


def test_a_turn_whose_arguments_were_edited_is_sent_as_it_is_now(
    server: WireServer, api: str, listens: dict[str, Any]
):
    """What the provider said of the other arguments is gone, and it accepts that."""
    script = server.play(says("Done."))
    session = wink.Session()
    edited = (ToolCall("add", {"x": 1}, "1"), ToolCall("add", {"x": 5}, "2"))
    session.dispatch(Message(role="user", text="Add.", is_first=True, conversation="c"))
    session.dispatch(Message(role="model", text="So:", tool_calls=edited, conversation="c"))

    adapter_for(script, api).evaluate(prompt_with(add), session, resume=True, **listens)

    assert script.problems == []
    if api == "chat":
        sent = [each["function"] for each in script.bodies[0]["messages"][2]["tool_calls"]]
    else:
        sent = [each for each in script.bodies[0]["input"] if each.get("type") == "function_call"]
    assert [json.loads(each["arguments"]) for each in sent] == [{"x": 1}, {"x": 5}]


def test_a_model_that_does_not_reason_is_not_asked_for_its_reasoning(
    server: WireServer, listens: dict[str, Any]
):
    script = server.play(calls(("add", {"x": 1})), says("Done."))

    adapter = adapter_for(script, "responses", model=NO_REASONING)
    response = adapter.evaluate(prompt_with(add), wink.Session(), config=ONCE, **listens)

    assert response.text == "Done."
    assert [len(body.get("include", ())) for body in script.bodies] == [1, 0, 0]


@pytest.mark.parametrize(("first", "second"), [APIS, APIS[::-1]])
def test_another_api_can_take_up_a_conversation(server: WireServer, first: str, second: str):
    session, prompt = wink.Session(), prompt_with(add)
    one = server.play(calls(("add", {"x": 1}), text="Let me see."), says("Three."))
    other = server.play(says("It was three."))

    adapter_for(one, first).evaluate(prompt, session)
    adapter_for(other, second).evaluate(prompt, session, resume=True, message="Sure?")

    assert other.problems == []
    texts = [(each.role, each.text) for each in other.asked()[0].messages]
    assert texts[1:] == [
        ("model", "Let me see."),
        ("tool", "3"),
        ("model", "Three."),
        ("user", "Sure?"),
    ]


def test_half_a_character_does_not_end_a_run(server: WireServer, api: str, listens: dict[str, Any]):
    @wink.tool
    def echo(text: str) -> str:
        """Say it again."""
        return f"{text} \udc80"

    half = calls(("echo", {"text": "\ud83d"}), ("echo", {"text": "a"}), text="é\ud83d")
    script = server.play(half, says("Done."))

    response = adapter_for(script, api).evaluate(prompt_with(echo), wink.Session(), **listens)

    assert response.text == "Done."
    assert script.asked()[1].messages[1].text == "é\ufffd"
    refused, answered = script.tool_texts()
    assert "surrogates not allowed" in refused
    assert answered == "a \ufffd"


def test_a_number_that_json_does_not_know_is_for_the_pipeline_to_refuse(
    server: WireServer, api: str
):
    script = server.play(calls(ToolCall("add", '{"x": NaN}', "a")), says("Sorry."))

    adapter_for(script, api).evaluate(prompt_with(add), wink.Session())

    assert "Invalid parameters for tool 'add'" in script.tool_texts()[0]
    assert script.problems == []


def test_a_conversation_of_another_adapter_goes_out_as_objects(server: WireServer, api: str):
    """A script may give arguments as text, or as the tool's own type."""
    made = [ToolCall("add", '{"x": 1}', "a"), ToolCall("show", Place("b"), "b")]

    def show(params: Place, *, context: wink.ToolContext) -> ToolResult[None]:
        return ToolResult.ok(None, params.path)

    shows = Tool[Place, None](name="show", description="Show a place.", handler=show)
    session, prompt = wink.Session(), prompt_with(add, shows)
    ScriptedAdapter([calls(*made), "Done."]).evaluate(prompt, session)
    script = server.play(says("Indeed."))

    adapter_for(script, api).evaluate(prompt, session, resume=True)

    sent = script.asked()[0].messages[1].tool_calls
    assert [call.params for call in sent] == [{"x": 1}, {"path": "b", "line": 1}]
    assert script.problems == []


def test_calls_that_are_not_counted_are_told_apart_by_their_ids(server: WireServer):
    """As some servers send them: each whole, in a piece of its own, all of them the first."""
    pieces = [
        {"index": 0, "id": each, "type": "function", "function": {"name": "add", "arguments": text}}
        for each, text in (("a", '{"x": 1}'), ("b", '{"x": 2}'))
    ]
    chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": [each]}}]} for each in pieces]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    script = server.play(Raw(lines.encode(), content_type="text/event-stream"))

    request = request_for(prompt_with(add), on_text=lambda text: None)
    turn = turn_of(adapter_for(script, "chat"), request)

    assert turn.tool_calls == (ToolCall("add", {"x": 1}, "a"), ToolCall("add", {"x": 2}, "b"))


# What goes wrong


def problem(status: int, text: str = "no", headers: Mapping[str, str] = {}, **fields: Any) -> Raw:
    body = {"error": {"message": text, "type": "some_error", "code": None, **fields}}
    return Raw(json.dumps(body).encode(), status, headers=dict(headers))


IN_A_MINUTE = {
    "Date": "Mon, 16 Nov 2026 10:00:00 GMT",
    "Retry-After": "Mon, 16 Nov 2026 10:01:00 GMT",
}
FAILURES: dict[str, tuple[Raw, type[ProviderError], str]] = {
    "bad key": (problem(401), ProviderRejected, "check the key: api_key=... or OPENAI_API_KEY"),
    "not allowed": (problem(403), ProviderRejected, "check that the key may use this model"),
    "no model": (problem(404), ProviderRejected, "check the model's name and base_url"),
    "bad request": (problem(400), ProviderRejected, "give strict=False"),
    "not processed": (problem(422), ProviderRejected, "give strict=False"),
    "no quota": (problem(429, code="insufficient_quota"), ProviderRejected, "no quota left"),
    "throttled": (problem(429), ProviderThrottled, "rate-limited"),
    "timeout": (problem(408), ProviderUnavailable, "failed (408)"),
    "conflict": (problem(409), ProviderUnavailable, "failed (409)"),
    "server error": (problem(500), ProviderUnavailable, "failed (500)"),
    "bad gateway": (
        Raw(b"<html>", 502, content_type="text/html"),
        ProviderUnavailable,
        "failed (502)",
    ),
    "no JSON": (Raw(b"{"), MalformedResponse, "sent a malformed response"),
    "a page": (Raw(b"<html>", content_type="text/html"), MalformedResponse, "malformed"),
    "no answer in it": (Raw(b'{"object": "list"}'), MalformedResponse, "malformed"),
    "nothing in it": (Raw(b'{"choices": [], "output": 1}'), MalformedResponse, "malformed"),
    "not text": (Raw(b'{"choices": "\xff"}'), MalformedResponse, "malformed"),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_a_failure_says_what_happened_and_what_to_do(
    server: WireServer, api: str, failure: tuple[Raw, type[ProviderError], str]
):
    answer, kind, words = failure
    script = server.play(answer)

    with pytest.raises(kind) as raised:
        turn_of(adapter_for(script, api), request_for(prompt_with()))

    assert words in str(raised.value)
    assert str(raised.value).startswith("The server at 127.0.0.1:")
    assert "for model 'm'" in str(raised.value)
    assert len(script.bodies) == 1  # the client does not try again by itself


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "0.5"}, 0.5),
        ({"Retry-After-Ms": "1500", "Retry-After": "2"}, 1.5),
        (IN_A_MINUTE, 60.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-3"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": "Mon, 16 Nov 2020 10:01:00 GMT"}, 0.0),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_the_wait_that_the_provider_asks_for_is_passed_on(
    server: WireServer, headers: dict[str, str], seconds: float | None, status: int
):
    script = server.play(problem(status, headers=headers))

    with pytest.raises(ProviderError) as raised:
        turn_of(adapter_for(script, "chat"), request_for(prompt_with()))

    assert raised.value.retry_after == seconds


def sse(*events: object) -> Raw:
    lines = [each if isinstance(each, str) else json.dumps(each) for each in events]
    body = "".join(f"data: {line}\n\n" for line in lines)
    return Raw(body.encode(), content_type="text/event-stream")


BROKEN_STREAMS: dict[str, tuple[str, Raw, type[ProviderError]]] = {
    "chat, no end": ("chat", sse({"choices": [{"delta": {"content": "a"}}]}), ProviderUnavailable),
    "chat, empty end": (
        "chat",
        sse({"choices": [{"delta": {"content": "a"}, "finish_reason": ""}]}),
        ProviderUnavailable,
    ),
    "chat, nothing": ("chat", sse("[DONE]"), ProviderUnavailable),
    "chat, no JSON": ("chat", sse("{"), MalformedResponse),
    "chat, no object": ("chat", sse([1]), MalformedResponse),
    "chat, no choices": ("chat", sse({"choices": 5}), MalformedResponse),
    "chat, no text": ("chat", sse({"choices": [{"delta": {"content": 5}}]}), MalformedResponse),
    "chat, no name": (
        "chat",
        sse({"choices": [{"delta": {"tool_calls": [{"function": {"name": 5}}]}}]}),
        MalformedResponse,
    ),
    "chat, error": ("chat", sse({"error": {"message": "x", "code": 502}}), ProviderUnavailable),
    "chat, throttled": (
        "chat",
        sse({"error": {"message": "x", "code": "rate_limit_exceeded"}}),
        ProviderThrottled,
    ),
    "chat, refused": (
        "chat",
        sse({"error": {"message": "x", "code": None, "type": "invalid_request_error"}}),
        ProviderRejected,
    ),
    "responses, no end": (
        "responses",
        sse({"type": "response.output_text.delta", "delta": "a"}),
        ProviderUnavailable,
    ),
    "responses, no JSON": ("responses", sse("{"), MalformedResponse),
    "responses, no object": ("responses", sse([1]), MalformedResponse),
    "responses, no output": (
        "responses",
        sse({"type": "response.completed", "response": {"output": 5}}),
        MalformedResponse,
    ),
    "responses, failed": (
        "responses",
        sse(
            {
                "type": "response.failed",
                "response": {
                    "status": "failed",
                    "output": [],
                    "error": {"code": "server_error", "message": "x"},
                },
            }
        ),
        ProviderUnavailable,
    ),
    "responses, throttled": (
        "responses",
        sse({"type": "error", "code": "rate_limit_exceeded", "message": "x"}),
        ProviderThrottled,
    ),
    "responses, refused": (
        "responses",
        sse({"type": "error", "code": "invalid_prompt", "message": "x"}),
        ProviderRejected,
    ),
}


@pytest.mark.parametrize("broken", BROKEN_STREAMS.values(), ids=BROKEN_STREAMS.keys())
def test_a_broken_stream_is_never_taken_for_an_answer(
    server: WireServer, broken: tuple[str, Raw, type[ProviderError]]
):
    api, answer, kind = broken
    request = request_for(prompt_with(), on_text=lambda text: None)

    with pytest.raises(kind):
        turn_of(adapter_for(server.play(answer), api), request)


@pytest.mark.parametrize("split", [chat_sse, responses_sse], ids=APIS)
def test_a_stream_may_be_cut_anywhere_and_is_then_asked_for_again(
    server: WireServer, split: Callable[[dict[str, Any]], bytes]
):
    api = APIS[split is responses_sse]
    donor = server.play(calls(("add", {"x": 1}), text="Let me see."))
    turn_of(adapter_for(donor, api), request_for(prompt_with(add), on_text=lambda text: None))
    whole = server.sent[-1]

    for end in range(0, len(whole), len(whole) // 9):
        cut = Raw(whole[:end], content_type="text/event-stream", is_cut=True)
        with pytest.raises(ProviderUnavailable) as raised:
            request = request_for(prompt_with(add), on_text=lambda text: None)
            turn_of(adapter_for(server.play(cut), api), request)
        assert raised.value.recoverable


def test_a_server_that_is_not_there_is_unavailable(api: str):
    adapter = OpenAIAdapter("m", api=api, base_url="http://127.0.0.1:9/v1", api_key=KEY)

    with pytest.raises(ProviderUnavailable, match="cannot be reached") as raised:
        turn_of(adapter, request_for(prompt_with()))

    assert raised.value.code == "NETWORK"


def test_a_request_ends_with_its_time(server: WireServer, api: str):
    script = server.play(ProviderUnavailable("never", code="TIMEOUT"))

    with pytest.raises(ProviderUnavailable, match="did not answer in time") as raised:
        turn_of(adapter_for(script, api), request_for(prompt_with(), timeout=0.05))

    assert raised.value.code == "TIMEOUT"


def test_a_deadline_ends_a_run_that_waits_for_the_model(server: WireServer, api: str):
    script = server.play(ProviderUnavailable("never", code="TIMEOUT"))
    config = RunConfig(time_limit=0.05)

    with pytest.raises(DeadlineExceededError):
        adapter_for(script, api).evaluate(prompt_with(), wink.Session(), config=config)


# Keys


def test_a_key_that_the_server_repeats_is_not_shown(server: WireServer, api: str):
    script = server.play(problem(401, f"Incorrect API key provided: {KEY}"))

    with pytest.raises(ProviderRejected) as raised:
        turn_of(adapter_for(script, api), request_for(prompt_with()))

    assert KEY not in str(raised.value)
    assert script.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("status", [400, 401, 429, 500])
@pytest.mark.parametrize("where", ["argument", "environment", "header", "option"])
def test_no_secret_is_left_in_an_error_or_behind_it(
    server: WireServer, api: str, where: str, status: int, monkeypatch: pytest.MonkeyPatch
):
    """The server repeats all that it was sent."""
    secret = "s3cret/of+mine=1234"
    monkeypatch.setenv("OPENAI_API_KEY", secret if where == "environment" else "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret if where == "environment" else "none")
    script = server.play(problem(status, f"you sent {secret} and {quote(secret, safe='')}"))
    options: dict[str, Any] = {
        "argument": {"api_key": secret},
        "environment": {"api_key": None},
        "header": {"client_options": {"default_headers": {"X-Api-Key": secret}}},
        "option": {"options": {"extra_headers": {"Authorization": f"Bearer {secret}"}}},
    }[where]
    adapter = adapter_for(script, api, **options)

    with pytest.raises(ProviderError) as raised:
        turn_of(adapter, request_for(prompt_with()))

    shown = everything_in(raised.value)
    assert "you sent" in shown
    assert quote(secret, safe="") not in shown
    assert secret not in shown


def test_what_is_secret_in_an_address_is_not_shown():
    address = "https://me:p%40ssword1@host/v1?token=abcdefgh1&v=2"
    said = f"no route to {address}, with p@ssword1"

    assert without_secrets(said, {"base_url": address}) == (
        "no route to https://(the key)@host/v1?token=(the key)&v=2, with (the key)"
    )


def test_what_caused_an_error_is_still_told(server: WireServer, api: str):
    script = server.play(problem(401, f"Incorrect API key provided: {KEY}"))

    with pytest.raises(ProviderRejected) as raised:
        turn_of(adapter_for(script, api), request_for(prompt_with()))

    assert "openai.AuthenticationError: Error code: 401" in str(raised.value.__cause__)
    assert "(the key)" in str(raised.value.__cause__)


def test_without_a_key_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)

    with pytest.raises(ProviderRejected, match="set OPENAI_API_KEY or give api_key"):
        OpenAIAdapter("m")


def test_a_server_of_your_own_needs_no_key(
    server: WireServer, api: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    script = server.play(says("Hello."), says("Hello."))

    assert turn_of(adapter_for(script, api, api_key=None), request_for(prompt_with())).text
    monkeypatch.setenv("OPENAI_BASE_URL", script.base_url)
    assert turn_of(OpenAIAdapter("m", api=api), request_for(prompt_with())).text


def test_a_key_is_taken_from_the_environment(server: WireServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-from-the-environment")
    script = server.play(says("Hello."))

    turn_of(adapter_for(script, "chat", api_key=None), request_for(prompt_with()))

    assert script.headers[0]["Authorization"] == "Bearer sk-from-the-environment"


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openai", None)

    with pytest.raises(MissingExtra, match=r"pip install .*\[openai\]"):
        OpenAIAdapter("m", api_key=KEY)


def test_an_api_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match='"chat" or "responses"'):
        OpenAIAdapter("m", api="complete", api_key=KEY)  # type: ignore[arg-type]  # the mistake


# Clients and event loops


def test_one_adapter_works_from_sync_code_and_on_every_loop(own_server: WireServer, api: str):
    script = own_server.play(*[says(f"Hello {n}.") for n in range(6)])

    assert _texts_from_everywhere(adapter_for(script, api)) == [f"Hello {n}." for n in range(6)]

    gc.collect()  # the adapter is gone, and with it its connections
    assert own_server.is_left_alone()


def _texts_from_everywhere(adapter: OpenAIAdapter) -> list[str]:
    def here() -> str:
        return adapter.evaluate(prompt_with(), wink.Session()).text

    async def twice() -> list[str]:
        runs = [await adapter.aevaluate(prompt_with(), wink.Session()) for _ in range(2)]
        return [run.text for run in runs]

    return [here(), *asyncio.run(twice()), *asyncio.run(twice()), here()]


def test_a_loop_closes_its_connections_when_it_ends(own_server: WireServer, api: str):
    adapter = adapter_for(own_server.play(says("Hello.")), api)

    asyncio.run(adapter.aevaluate(prompt_with(), wink.Session()))

    assert own_server.is_left_alone()


def test_a_closed_adapter_can_be_used_again(own_server: WireServer, api: str):
    adapter = adapter_for(own_server.play(says("One."), says("Two.")), api)

    async def run() -> str:
        async with adapter:
            await adapter.aevaluate(prompt_with(), wink.Session())
        assert own_server.is_left_alone()
        return (await adapter.aevaluate(prompt_with(), wink.Session())).text

    assert asyncio.run(run()) == "Two."


@pytest.mark.heavy
def test_a_process_that_ends_leaves_nothing_open(server: WireServer, api: str):
    """A model that was asked from sync code still has its connection then."""
    program = (
        "import sys, weakincentives as wink\n"
        "from weakincentives.adapters import OpenAIAdapter\n"
        "model = OpenAIAdapter('m', api=sys.argv[1], base_url=sys.argv[2], api_key='none')\n"
        "template = wink.PromptTemplate(sections=[wink.MarkdownSection(title='Greet')])\n"
        "print(model.evaluate(wink.Prompt(template), wink.Session()).text)\n"
    )
    script = server.play(says("Hello."))

    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", program, api, script.base_url],
        capture_output=True,
        text=True,
        check=True,
    )

    assert (done.stdout, done.stderr) == ("Hello.\n", "")


def test_a_client_of_your_own_is_used_and_left_open(server: WireServer, api: str):
    script = server.play(problem(503), says("Hello."))

    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=script.base_url, api_key=KEY, max_retries=3, default_headers={"X-Mine": "yes"}
        ) as client:
            adapter = OpenAIAdapter("m", api=api, client=client)
            with pytest.raises(ProviderUnavailable):
                await adapter.complete(request_for(prompt_with()))
            await adapter.complete(request_for(prompt_with()))
            await adapter.aclose()
            assert not client.is_closed()

    asyncio.run(run())

    assert [headers["X-Mine"] for headers in script.headers] == ["yes", "yes"]


def test_options_of_the_client_are_passed_on(server: WireServer, api: str):
    script = server.play(says("Hello."))

    options = {"default_headers": {"X-Mine": "yes"}}
    turn_of(adapter_for(script, api, client_options=options), request_for(prompt_with()))

    assert script.headers[0]["X-Mine"] == "yes"


def test_text_is_told_as_it_comes(server: WireServer, api: str):
    heard: list[str] = []
    script = server.play(calls(("add", {"x": 1}), text="Let me see."), says("It is three."))

    response = adapter_for(script, api).evaluate(
        prompt_with(add),
        wink.Session(),
        on_event=lambda event: heard.append(event.text) if isinstance(event, TextDelta) else None,
    )

    assert "".join(heard) == "Let me see.It is three."
    assert len(heard) > 2
    assert response.text == "It is three."
    assert all(body["stream"] for body in script.bodies)


def test_a_failed_call_goes_back_to_the_model_verbatim(server: WireServer, api: str):
    @wink.tool
    def fail() -> ToolResult[None]:
        """Fail."""
        return ToolResult.error('No: "quotes", \\ and\n\tlines, é 🌍')

    script = server.play(calls("fail"), says("Pity."))

    adapter_for(script, api).evaluate(prompt_with(fail), wink.Session())

    assert script.tool_texts() == ['No: "quotes", \\ and\n\tlines, é 🌍']


@pytest.mark.heavy
def test_the_example_corrects_files(server: WireServer, tmp_path: Path):
    (tmp_path / "a.md").write_text("Teh first. Teh second.\n")
    wrong = {"path": "a.md", "wrong": "Teh", "right": "The"}
    report = {"summary": "One word was wrong.", "corrected": ["Teh"]}
    script = server.play(
        calls(("correct", wrong), text="Let me see."),
        calls(("read_file", {"path": "a.md"})),
        calls(("correct", wrong)),
        says(json.dumps(report), usage=TokenUsage(input_tokens=30, output_tokens=12)),
    )
    environment = {"OPENAI_BASE_URL": script.base_url, "OPENAI_API_KEY": KEY}

    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )

    assert script.problems == []
    assert (tmp_path / "a.md").read_text() == "The first. The second.\n"
    assert "[--] correct: Cannot write to a.md without reading it first" in done.stdout
    assert "One word was wrong.\n- Teh\n(4 turns, 42 tokens)\n" in done.stdout
