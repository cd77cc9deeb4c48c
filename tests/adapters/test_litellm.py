"""LiteLLM's ways beyond what every adapter must do: that is in test_adapter_cases."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from wire import Raw, Script, WireServer, everything_in

import weakincentives as wink
from weakincentives.adapters import (
    LiteLLMAdapter,
    Message,
    ModelRequest,
    ModelTurn,
    calls,
    says,
)
from weakincentives.core.budget import TokenUsage
from weakincentives.core.call import ToolCall
from weakincentives.errors import (
    MissingExtra,
    ProviderError,
    ProviderRejected,
    ProviderThrottled,
    ProviderUnavailable,
)

KEY = "sk-loopback-0123456789"
EXAMPLE = Path(__file__).parents[2] / "examples" / "litellm_agent.py"

# Its import takes seconds. What it does with pydantic and coroutines is not for us to mend.
its_own = [
    pytest.mark.heavy,
    pytest.mark.skipif(find_spec("litellm") is None, reason="litellm is not installed"),
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict class"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings"),
]


def heavy(test: Any) -> Any:
    for mark in its_own:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    with WireServer() as server:
        yield server


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def on_text(request: pytest.FixtureRequest) -> Any:
    return (lambda text: None) if request.param else None


def adapter_for(script: Script, **options: Any) -> LiteLLMAdapter:
    return LiteLLMAdapter("openai/m", base_url=script.base_url, **{"api_key": KEY, **options})


def prompt_with(*tools: Any, output: Any = None) -> wink.Prompt[Any]:
    template = wink.PromptTemplate if output is None else wink.PromptTemplate[output]
    section = wink.MarkdownSection(title="Task", template="Do it.", tools=tools)
    return wink.Prompt(template(sections=[section]))


def request_for(prompt: wink.Prompt[Any], **fields: Any) -> ModelRequest:
    messages = [Message(role="user", text="Begin.")]
    return ModelRequest(prompt=prompt.render(wink.Session()), messages=messages, **fields)


def turn_of(adapter: LiteLLMAdapter, request: ModelRequest) -> ModelTurn:
    return asyncio.run(adapter.complete(request))


@dataclass(frozen=True)
class Report:
    title: str
    pages: int = 1


@wink.tool
def add(x: int, y: int = 2) -> int:
    """Add two numbers."""
    return x + y


@heavy
def test_strict_schemas_go_out_and_nulls_are_read_as_left_out(server: WireServer, on_text: Any):
    script = server.play(calls(("add", {"x": 1})), says('{"title": "a"}'), fills_answers=True)

    response = adapter_for(script).evaluate(
        prompt_with(add, output=Report), wink.Session(), on_event=on_text
    )

    assert response.output == Report("a")
    assert script.problems == []
    assert script.tool_texts() == ["3"]
    function = script.bodies[0]["tools"][0]["function"]
    assert function["strict"] is True
    assert function["parameters"]["required"] == ["x", "y"]
    assert script.bodies[0]["response_format"]["json_schema"]["strict"] is True


@heavy
@pytest.mark.parametrize(
    "turn",
    [
        says("Grüße, 世界 🌍\n", usage=TokenUsage(input_tokens=3, output_tokens=4)),
        says("Once upon a", stop_reason="max_tokens"),
        calls(ToolCall("add", {"x": 1}, "a"), ToolCall("add", {"x": 2}, "b"), text="Two:"),
        calls(ToolCall("add", '{"x": ', "a")),
    ],
)
def test_a_turn_is_the_same_whole_and_in_pieces(server: WireServer, turn: ModelTurn):
    script = server.play(turn, turn)
    heard: list[str] = []

    whole = turn_of(adapter_for(script), request_for(prompt_with(add)))
    streamed = turn_of(adapter_for(script), request_for(prompt_with(add), on_text=heard.append))

    assert whole == streamed
    assert (whole.text, whole.tool_calls) == (turn.text, turn.tool_calls)
    assert (whole.stop_reason, whole.usage) == (turn.stop_reason, turn.usage)
    assert "".join(heard) == turn.text


@heavy
def test_reasoning_that_the_provider_wants_back_is_sent_back(server: WireServer, on_text: Any):
    wire = {"chat": {"reasoning_content": "One and two is three."}, "calls": [{}]}
    script = server.play(calls(("add", {"x": 1}), wire=wire), says("Done."))

    adapter_for(script).evaluate(prompt_with(add), wink.Session(), on_event=on_text)

    assert script.problems == []
    assert script.bodies[1]["messages"][2]["reasoning_content"] == "One and two is three."


def problem(status: int, code: str, text: str, **headers: str) -> Raw:
    body = {"error": {"message": text, "type": "invalid_request_error", "code": code}}
    return Raw(json.dumps(body).encode(), status, headers=headers)


FAILURES: dict[str, tuple[Raw, type[ProviderError], str]] = {
    "bad key": (
        problem(401, "invalid_api_key", f"Incorrect API key provided: {KEY}"),
        ProviderRejected,
        "check the key: api_key=... or the provider's environment variable",
    ),
    "no model": (problem(404, "model_not_found", "no"), ProviderRejected, "check the model's name"),
    "bad request": (problem(400, "bad", "no"), ProviderRejected, "give strict=False"),
    "throttled": (
        problem(429, "rate_limit_exceeded", "no", **{"Retry-After": "7"}),
        ProviderThrottled,
        "rate-limited",
    ),
    "server error": (problem(503, "server_error", "no"), ProviderUnavailable, "failed"),
}


@heavy
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_a_failure_says_what_happened_and_what_to_do(
    server: WireServer,
    failure: tuple[Raw, type[ProviderError], str],
    on_text: Any,
    capsys: pytest.CaptureFixture[str],
):
    answer, kind, words = failure
    script = server.play(answer)

    with pytest.raises(kind) as raised:
        turn_of(adapter_for(script), request_for(prompt_with(), on_text=on_text))

    assert words in str(raised.value)
    assert KEY not in str(raised.value)
    assert raised.value.retry_after == (7.0 if kind is ProviderThrottled else None)
    assert len(script.bodies) == 1  # LiteLLM does not try again by itself
    assert capsys.readouterr().out == ""


@heavy
@pytest.mark.parametrize("where", ["argument", "environment", "header", "module"])
def test_no_secret_is_left_in_an_error_or_behind_it(
    server: WireServer, where: str, on_text: Any, monkeypatch: pytest.MonkeyPatch
):
    import litellm

    secret = "s3cret-of-mine-1234"
    options: dict[str, Any] = {"api_key": secret if where == "argument" else "none"}
    if where == "environment":
        monkeypatch.setenv("OPENAI_API_KEY", secret)
        options["api_key"] = None
    elif where == "header":
        options["options"] = {"extra_headers": {"X-Api-Key": secret}}
    elif where == "module":
        monkeypatch.setattr(litellm, "openai_key", secret)
        options["api_key"] = None
    script = server.play(problem(401, "invalid_api_key", f"Incorrect API key: {secret}"))

    with pytest.raises(ProviderRejected, match="Incorrect API key") as raised:
        turn_of(adapter_for(script, **options), request_for(prompt_with(), on_text=on_text))

    shown = everything_in(raised.value)
    assert secret not in shown
    assert "Incorrect API key: (the key)" in shown


@heavy
def test_a_request_ends_with_its_time(server: WireServer):
    script = server.play(ProviderUnavailable("never", code="TIMEOUT"))

    with pytest.raises(ProviderUnavailable, match="did not answer in time"):
        turn_of(adapter_for(script), request_for(prompt_with(), timeout=0.2))


@heavy
def test_without_a_key_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    with pytest.raises(ProviderRejected, match="set OPENAI_API_KEY or give api_key"):
        LiteLLMAdapter("openai/gpt-4o")


@heavy
def test_a_server_of_your_own_needs_no_key(server: WireServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    script = server.play(says("Hello."))

    adapter = LiteLLMAdapter("openai/m", base_url=script.base_url)

    assert turn_of(adapter, request_for(prompt_with())).text == "Hello."


@heavy
def test_one_adapter_works_on_every_loop_and_leaves_no_connection():
    """LiteLLM knows a loop by its id only; the next loop may well have the same."""
    with WireServer() as server:
        script = server.play(*[says(f"Hello {n}.") for n in range(8)])
        adapter = adapter_for(script)
        texts = [
            asyncio.run(adapter.aevaluate(prompt_with(), wink.Session())).text for _ in range(8)
        ]

        assert texts == [f"Hello {n}." for n in range(8)]
        assert server.is_left_alone()
    gc.collect()  # a connection that is left would be a warning here


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "litellm", None)

    with pytest.raises(MissingExtra, match=r"pip install .*\[litellm\]"):
        LiteLLMAdapter("openai/m")


@heavy
def test_a_planted_env_file_does_not_say_where_keys_are_sent(tmp_path: Path):
    """LiteLLM looks for one from its own place upwards, so in a project that it is installed in."""
    (tmp_path / ".env").write_text("OPENAI_API_BASE=http://evil.example\n")
    program = (
        "import os\nfrom weakincentives.adapters import LiteLLMAdapter\n"
        "LiteLLMAdapter('openai/small', api_key='k')\nprint(os.environ.get('OPENAI_API_BASE'))"
    )
    environment = {
        k: v for k, v in os.environ.items() if k not in ("LITELLM_MODE", "OPENAI_API_BASE")
    }

    done = subprocess.run(  # a program without a file: LiteLLM then begins in the directory
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "None\n"


@heavy
def test_the_example_finds_the_answer(server: WireServer, tmp_path: Path):
    (tmp_path / "app.py").write_text("import os\n\nport = 8080\n")
    answer = {"text": "It is set in app.py.", "places": [{"path": "app.py", "line": 3}]}
    script = server.play(
        calls(("search", {"pattern": "^port"})),
        calls(("read_lines", {"path": "app.py"})),
        says(json.dumps(answer)),
    )
    environment = {"OPENAI_BASE_URL": script.base_url, "OPENAI_API_KEY": KEY}
    question = "Where is the port set?"

    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path), question],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "It is set in app.py.\n- app.py, line 3\n"
    assert script.problems == []
    assert script.asked()[0].messages[0].text == question
    assert script.tool_texts() == ["app.py:3: port = 8080", "1: import os\n2: \n3: port = 8080"]
