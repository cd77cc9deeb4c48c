"""What our transaction adds to one call of a function tool, the way the framework invokes it.

    python benchmarks/integrations/b_openai_agents.py

One JSON line: CPU time of one call in µs, p10 of many, of a trivial async tool. ``alone_us`` is the
framework's own tool, ``with_us`` the same function offered as a tool of ours, and ``covered_us``
the framework's tool covered by us, once as one that only reads, once with a scan for changes.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from importlib.metadata import version
from itertools import count

from agents import Agent, FunctionTool, function_tool, set_tracing_disabled
from agents.tool import invoke_function_tool
from agents.tool_context import ToolContext

from weakincentives import tool
from weakincentives.integrations.openai_agents import Wink

CALLS, WARM_UP = 2000, 200
ids = count()


@function_tool
async def theirs(text: str) -> str:
    """Return the text."""
    return text


@tool(reach="read")
async def ours(text: str) -> str:
    """Return the text.

    Args:
        text: What to return.
    """
    return text


async def measure(called: FunctionTool, calls: int = CALLS) -> float:
    """Return the CPU time of one call in µs, p10."""
    arguments = json.dumps({"text": "hello"})
    taken: list[int] = []
    for _ in range(calls):
        call_id = f"call_{next(ids)}"
        context = ToolContext(
            None, tool_name=called.name, tool_call_id=call_id, tool_arguments=arguments
        )
        start = time.process_time_ns()
        answer = await invoke_function_tool(
            function_tool=called, context=context, arguments=arguments
        )
        taken.append(time.process_time_ns() - start)
        assert answer == "hello", answer
    return round(sorted(taken[min(WARM_UP, calls // 10) :])[len(taken) // 10] / 1000, 1)


async def main() -> None:
    set_tracing_disabled(True)
    with tempfile.TemporaryDirectory() as place, Wink(place, tools=[ours]) as wink:
        agent = Agent(name="Bench", tools=[theirs])
        (reading,) = wink.cover(agent, reads=["theirs"]).tools
        (scanned,) = wink.cover(agent).tools
        assert isinstance(reading, FunctionTool)
        assert isinstance(scanned, FunctionTool)
        result = {
            "framework": "openai-agents",
            "version": version("openai-agents"),
            "alone_us": await measure(theirs),
            "with_us": await measure(wink.tools()[0]),
            "covered_read_us": await measure(reading),
            "covered_scan_us": await measure(scanned, 300),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
