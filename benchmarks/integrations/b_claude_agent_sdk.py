"""What our transaction adds to one call in the Claude Agent SDK, on our side of its program.

    python benchmarks/integrations/b_claude_agent_sdk.py

One JSON line: CPU time of one call in µs, p10 of many, of a trivial async tool in an MCP server of
this process, as the SDK calls it. ``alone_us`` is the SDK's own tool, ``with_us`` the same function
as a tool of ours, with the hook before it; ``covered_read_us`` and ``covered_scan_us`` are the
hooks before and after a tool of the program, as one that only reads and as one that may change
files. The program itself takes 10 to 60 ms for a call.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from itertools import count
from typing import Any

from claude_agent_sdk import create_sdk_mcp_server
from claude_agent_sdk import tool as their_tool
from mcp.types import CallToolRequestParams

from weakincentives import tool
from weakincentives.integrations.claude import WinkClient

CALLS, WARM_UP = 1000, 100
ids = count()


@their_tool("echo", "Return the text.", {"text": str})
async def theirs(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": arguments["text"]}]}


@tool(reach="read")
async def echo(text: str) -> str:
    """Return the text.

    Args:
        text: What to return.
    """
    return text


async def measure(call: Callable[[str], Awaitable[object]], calls: int = CALLS) -> float:
    """Return the CPU time of one call in µs, p10."""
    taken: list[int] = []
    for _ in range(calls):
        use_id = f"toolu_{next(ids)}"
        start = time.process_time_ns()
        await call(use_id)
        taken.append(time.process_time_ns() - start)
    return round(sorted(taken[min(WARM_UP, calls // 10) :])[len(taken) // 10] / 1000, 1)


async def call(server: Any, use_id: str) -> None:
    entry = server.get_request_handler("tools/call")
    meta = {"claudecode/toolUseId": use_id}
    params = CallToolRequestParams.model_validate(
        {"name": "echo", "arguments": {"text": "hello"}, "_meta": meta}
    )
    done = await entry.handler(None, params)
    assert done.content[0].text == "hello", done


async def main() -> None:
    alone = create_sdk_mcp_server("alone", tools=[theirs])["instance"]
    with tempfile.TemporaryDirectory() as place:
        client = WinkClient(workspace=place, tools=[echo])
        hooks: Any = client.options.hooks
        servers: Any = client.options.mcp_servers
        before, after = (hooks[event][-1].hooks[0] for event in ("PreToolUse", "PostToolUse"))

        async def ours(use_id: str) -> None:
            given = {"tool_name": "mcp__wink__echo", "tool_input": {"text": "hello"}}
            await before(given, use_id, {})
            await call(servers["wink"]["instance"], use_id)

        async def covered(name: str, given: dict[str, Any], use_id: str) -> None:
            hook_input = {
                "tool_name": name,
                "tool_input": given,
                "tool_response": {"text": "hello"},
            }
            await before(hook_input, use_id, {})
            await after({**hook_input, "hook_event_name": "PostToolUse"}, use_id, {})

        result = {
            "framework": "claude-agent-sdk",
            "version": version("claude-agent-sdk"),
            "alone_us": await measure(lambda use_id: call(alone, use_id)),
            "with_us": await measure(ours),
            "covered_read_us": await measure(
                lambda use_id: covered("Read", {"file_path": f"{place}/a.txt"}, use_id)
            ),
            "covered_scan_us": await measure(
                lambda use_id: covered("Bash", {"command": "true"}, use_id), 300
            ),
        }
        await client.disconnect()
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
