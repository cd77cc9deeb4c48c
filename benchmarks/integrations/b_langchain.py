"""What our transaction adds to one call of a tool, the way LangGraph's tool node runs it.

    python benchmarks/integrations/b_langchain.py

One JSON line: CPU time of one call in µs, p10 of many, of a trivial async tool in a graph that is
nothing but a tool node. ``alone_us`` is LangChain's own tool, ``with_us`` the same function offered
as a tool of ours; ``covered_read_us`` and ``covered_scan_us`` are LangChain's tool covered by us,
as one that only reads and as one that may change files.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from importlib.metadata import version
from itertools import count
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.tools import tool as their_tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from weakincentives import tool
from weakincentives.integrations.langchain import WinkMiddleware

CALLS, WARM_UP = 1000, 100
ids = count()


@their_tool
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


def graph_of(node: ToolNode) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("tools", node)
    graph.add_edge(START, "tools")
    graph.add_edge("tools", END)
    return graph.compile()


def covering(wink: WinkMiddleware, called: Any) -> Any:
    return graph_of(
        ToolNode([called], wrap_tool_call=wink.wrap_tool_call, awrap_tool_call=wink.awrap_tool_call)
    )


async def measure(graph: Any, name: str, calls: int = CALLS) -> float:
    """Return the CPU time of one call in µs, p10."""
    taken: list[int] = []
    for _ in range(calls):
        call = {"id": f"call_{next(ids)}", "name": name, "args": {"text": "hello"}}
        state = {"messages": [AIMessage("", tool_calls=[call])]}
        start = time.process_time_ns()
        done = await graph.ainvoke(state)
        taken.append(time.process_time_ns() - start)
        assert done["messages"][-1].content == "hello", done
    return round(sorted(taken[min(WARM_UP, calls // 10) :])[len(taken) // 10] / 1000, 1)


async def main() -> None:
    with (
        tempfile.TemporaryDirectory() as place,
        WinkMiddleware(place, tools=[ours], reaches={"theirs": "read"}) as wink,
        WinkMiddleware(place, tools=[]) as scanning,
    ):
        result = {
            "framework": "langchain",
            "version": version("langchain"),
            "langgraph": version("langgraph"),
            "alone_us": await measure(graph_of(ToolNode([theirs])), "theirs"),
            "with_us": await measure(covering(wink, wink.tools[0]), "ours"),
            "covered_read_us": await measure(covering(wink, theirs), "theirs"),
            "covered_scan_us": await measure(covering(scanning, theirs), "theirs", 300),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
