"""An unknown tool and bad arguments are answered in the same words, whichever way a call comes in.

The Chapter's flow: "Find Tool in Registry: Return Error", "Validate Params: Return Error". The
Protocol's registry has the words.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from weakincentives.adapters import ScriptedAdapter, calls
from weakincentives.core.call import ToolCall
from weakincentives.prompt import (
    CascadeEffect,
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Tool,
    ToolContext,
    ToolError,
    ToolResult,
)
from weakincentives.runtime import (
    Session,
    ToolInvoked,
    ToolRegistry,
    aexecute_tool,
    execute_tool,
    execute_tools,
)


@dataclass(frozen=True)
class Params:
    path: str
    limit: int = 10


def read(params: Params, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult.ok(message="read")


TOOL = Tool[Params, None](name="read_it", description="Read it.", handler=read)


def rendered() -> Session:
    section = MarkdownSection(title="Files", tools=[TOOL])
    session = Session()
    Prompt(PromptTemplate(sections=[section])).render(session)
    return session


def alone(name: str, arguments: object) -> ToolResult[Any]:
    return execute_tool(ToolCall(name, arguments), session=rendered())


def on_a_loop(name: str, arguments: object) -> ToolResult[Any]:
    return asyncio.run(aexecute_tool(ToolCall(name, arguments), session=rendered()))


def in_a_turn(name: str, arguments: object) -> ToolResult[Any]:
    (result,) = execute_tools([ToolCall(name, arguments)], session=rendered())
    return result


def registered(name: str, arguments: object) -> ToolResult[Any]:
    return ToolRegistry([TOOL]).execute(name, arguments)


def admitted(name: str, arguments: object) -> ToolResult[Any]:
    result = ToolRegistry([TOOL]).admit(name, arguments).result
    assert result is not None
    return result


def begun(name: str, arguments: object) -> ToolResult[Any]:
    with ToolRegistry([TOOL]).begin(name, arguments) as call:
        pass
    assert call.result is not None
    return call.result


def adapted(name: str, arguments: object) -> ToolResult[Any]:
    """As the adapter tells the model, with the failure that is on record."""
    told: list[str] = []
    turns = calls(ToolCall(name, arguments)), lambda r: told.append(r.messages[-1].text) or "Sorry."
    session = Session()
    section = MarkdownSection(title="Files", tools=[TOOL])
    ScriptedAdapter(turns).evaluate(Prompt(PromptTemplate(sections=[section])), session)
    (record,) = session[ToolInvoked].all()
    return ToolResult(told[0], success=False, failure=record.result.failure)


def cascaded(name: str, arguments: object) -> ToolResult[Any]:
    """The call of an effect."""
    effect = CascadeEffect(trigger_tool=name, arguments=arguments)
    first = Tool[None, None](
        name="first",
        description="d",
        handler=lambda params, *, context: ToolResult.ok(),
        effects=[effect],
    )
    registry = ToolRegistry([TOOL])
    assert registry.execute(first).success
    result = registry.session[ToolInvoked].all()[-1].result
    # This call offers one tool more, as it is not registered.
    return ToolResult(result.message.replace("first, ", ""), success=False, failure=result.failure)


def bridged(name: str, arguments: object) -> ToolResult[Any]:
    """As the integrations make calls."""
    import tempfile

    from weakincentives.integrations.bridge import Bridge

    with (
        tempfile.TemporaryDirectory() as directory,
        Bridge(directory, tools=[TOOL.replace(max_result_chars=None)]) as bridge,
    ):
        return bridge.call(name, arguments)


def served(name: str, arguments: object) -> ToolResult[Any]:
    """As an MCP client reads it."""
    pytest.importorskip("mcp")
    from mcp import Client

    from weakincentives.mcp import McpServer

    async def ask(server: Any) -> Any:
        async with asyncio.timeout(60), Client(server.protocol) as client:
            return await client.call_tool(name, arguments)

    tools = ToolRegistry([TOOL.replace(max_result_chars=None)])
    with McpServer(tools, undo=False) as server:
        answer = asyncio.run(ask(server))
    assert answer.is_error
    failure = tools.session[ToolInvoked].all()[-1].result.failure
    return ToolResult(answer.content[0].text, success=False, failure=failure)


WAYS = [
    alone,
    on_a_loop,
    in_a_turn,
    registered,
    admitted,
    begun,
    adapted,
    cascaded,
    bridged,
    served,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_unknown_tool_is_answered_in_the_same_words(way: Callable[..., ToolResult[Any]]):
    result = way("raed_it", {"path": "a"})

    assert result.message == (
        "Tool 'raed_it' not found. Did you mean 'read_it'? Available tools: read_it"
    )
    assert result.failure == ToolError(
        "TOOL_NOT_FOUND", "Tool 'raed_it' not found", recoverable=False, suggestions=("read_it",)
    )


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_bad_arguments_are_answered_in_the_same_words(way: Callable[..., ToolResult[Any]]):
    """The message is the Chapter's, the failure the Protocol's."""
    result = way("read_it", {"limit": "10", "more": 1})

    assert json.loads(result.message) == {
        "error": "Invalid parameters for tool 'read_it'",
        "details": {
            "path": "Required field is missing",
            "limit": "Expected type integer, got string '10'",
            "more": "Unknown field; expected one of: path, limit",
        },
    }
    assert result.failure == ToolError(
        "INVALID_ARGUMENTS",
        "Missing required field: path, Field 'limit' must be of type integer, "
        "Field 'more': Unknown field; expected one of: path, limit",
        recoverable=False,
    )


@pytest.mark.parametrize("way", [alone, in_a_turn, registered, admitted, begun, bridged])
def test_a_call_without_arguments_is_answered_in_the_same_words(
    way: Callable[..., ToolResult[Any]],
):
    failure = way("read_it", None).failure

    assert failure == ToolError(
        "INVALID_ARGUMENTS", "Missing required field: path", recoverable=False
    )


def test_a_registry_names_each_tool_once_as_the_caller_spells_it():
    registry = ToolRegistry()
    registry.register(TOOL, namespace="file")

    for name, known in [("file:raed_it", "file:read_it"), ("file__raed_it", "file__read_it")]:
        result = registry.execute(name, {})
        assert result.message == (
            f"Tool '{name}' not found. Did you mean '{known}'? Available tools: {known}"
        )
