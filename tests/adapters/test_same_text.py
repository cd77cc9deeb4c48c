"""What a model is told of a failure or a long result is the same through every adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from wire import WireServer

import weakincentives as wink
from weakincentives.adapters import (
    LiteLLMAdapter,
    OpenAIAdapter,
    ScriptedAdapter,
    calls,
    says,
)
from weakincentives.core.call import ToolCall
from weakincentives.errors import PageNotRead
from weakincentives.prompt import ReadBeforeWritePolicy, ToolResult

KEY = "sk-loopback-0123456789"


@wink.tool(reach="reversible")
def write_file(path: str, text: str = "", *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"Wrote {path}"


@wink.tool(reach="reversible")
def explode(how: str, *, context: wink.ToolContext) -> ToolResult[None]:
    """Fail in one way or another, after a change."""
    context.filesystem.write("a.txt", "spoilt")
    if how == "result":
        return ToolResult.error('No: "quotes", \\ and\n\tlines, é 🌍', suggestions=["b"])
    raise {"value": ValueError("no\u2028good"), "page": PageNotRead("gone"), "bug": KeyError("k")}[
        how
    ]


@wink.tool(reach="read", max_result_chars=300)
def print_all() -> str:
    """Print more than is shown at once."""
    return "\n".join(f"line {n}" for n in range(500))


TURN = calls(
    ToolCall("write_file", {"path": 7, "txt": "x"}, "bad-arguments"),
    ToolCall("write_file", '{"path": "a', "not-json"),
    ToolCall("write_file", "[1]", "no-object"),
    ToolCall("write_file", {"path": "a.txt"}, "denied"),
    ToolCall("write_file", {"path": "../b"}, "outside"),
    ToolCall("explode", {"how": "result"}, "result"),
    ToolCall("explode", {"how": "value"}, "value-error"),
    ToolCall("explode", {"how": "page"}, "page"),
    ToolCall("explode", {"how": "bug"}, "bug"),
    ToolCall("wirte_file", {"path": "b"}, "unknown-tool"),
    ToolCall("print_all", {}, "long"),
    text="All at once.",
)


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    with WireServer() as server:
        yield server


def run(adapter: Any, **options: Any) -> None:
    section = wink.MarkdownSection(
        title="Files",
        template="Spoil them.",
        tools=[write_file, explode, print_all],
        policies=[ReadBeforeWritePolicy()],
    )
    files = wink.MemoryFilesystem({"a.txt": "as it was"})
    template = wink.PromptTemplate(sections=[section], resources={wink.Filesystem: files})
    adapter.evaluate(wink.Prompt(template), wink.Session(), **options)
    assert files.read("a.txt") == "as it was"


def scripted_texts() -> list[str]:
    adapter = ScriptedAdapter([TURN, says("Sorry.")])
    run(adapter)
    assert adapter.last_request is not None
    return [each.text for each in adapter.last_request.messages if each.role == "tool"]


def chat(base_url: str) -> Any:
    return OpenAIAdapter("m", api="chat", base_url=base_url, api_key=KEY)


def responses(base_url: str) -> Any:
    return OpenAIAdapter("m", api="responses", base_url=base_url, api_key=KEY)


def litellm(base_url: str) -> Any:
    return LiteLLMAdapter("openai/m", base_url=base_url, api_key=KEY)


@pytest.mark.filterwarnings("ignore:Item .* on TypedDict class")  # LiteLLM's
@pytest.mark.filterwarnings("ignore:Accessing the 'model_")
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "make",
    [
        chat,
        responses,
        pytest.param(
            litellm,
            marks=[
                pytest.mark.heavy,
                pytest.mark.skipif(find_spec("litellm") is None, reason="litellm is missing"),
            ],
        ),
    ],
)
def test_an_answer_reads_the_same_through_every_adapter(
    server: WireServer, make: Callable[[str], Any], streams: bool
):
    expected = scripted_texts()
    script = server.play(TURN, says("Sorry."))

    run(make(script.base_url), on_event=(lambda event: None) if streams else None)

    assert script.problems == []
    assert len(expected) == len(TURN.tool_calls)
    assert all(expected)
    assert expected[-1].endswith('more characters: read_result(call_id="long", offset=293)]')
    assert script.tool_texts() == expected
