"""What a call costs in Google ADK, alone and with us: one JSON line.

    .venv-integrations/google-adk/bin/python benchmarks/integrations/b_google_adk.py

CPU µs per call, p10 of many batches, through ADK's own path for the calls of a turn, with a trivial
tool. ``with_us``: one of our tools. ``covered``: ADK's own tool, whose reach is stated as ``read``
(``covered_read_us``), or not stated: then a scan looks for changed files (``covered_scan_us``).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.flows.llm_flows.functions import handle_function_call_list_async
from google.adk.plugins import PluginManager
from google.adk.sessions import InMemorySessionService, Session
from google.adk.tools import FunctionTool
from google.genai import types

from weakincentives import tool
from weakincentives.integrations.google_adk import WinkPlugin

TIMES, BATCHES = 20, 100


async def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


class Host:
    """ADK's path for a call, with or without the plug-in."""

    def __init__(self, offered: Any, plugin: WinkPlugin | None = None) -> None:
        agent = LlmAgent(name="bench", tools=[offered])
        self._context = InvocationContext(
            session_service=InMemorySessionService(),
            invocation_id="bench",
            agent=agent,
            session=Session(id="bench", app_name="bench", user_id="bench"),
            plugin_manager=PluginManager([plugin] if plugin else []),
        )
        self._tools = {offered.name: offered}
        self._name = offered.name
        self._ids = (f"adk-{number}" for number in itertools.count())

    async def call(self) -> None:
        arguments = {"first": 1, "second": 2}
        call = types.FunctionCall(id=next(self._ids), name=self._name, args=arguments)
        event = await handle_function_call_list_async(self._context, [call], self._tools)
        assert event is not None
        assert event.get_function_responses()[0].response["result"] in (3, "3")


async def timed(hosts: dict[str, Host]) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in hosts}
    for batch in range(-2, BATCHES):
        for name, host in hosts.items():
            before = time.process_time()
            for _ in range(TIMES):
                await host.call()
            if batch >= 0:
                samples[name].append((time.process_time() - before) / TIMES * 1e6)
    return {name: round(sorted(each)[len(each) // 10], 1) for name, each in samples.items()}


def main() -> None:
    logging.disable(logging.WARNING)
    ours = tool(reach="read")(add)
    with tempfile.TemporaryDirectory() as place:
        made: list[WinkPlugin] = []

        def plugin(**options: Any) -> WinkPlugin:
            made.append(WinkPlugin(place, run=f"run {len(made)}", **options))
            return made[-1]

        first = plugin(tools=[ours])
        hosts: dict[str, Callable[[], Host]] = {
            "alone_us": lambda: Host(FunctionTool(add)),
            "with_us": lambda: Host(first.tools[0], first),
            "covered_read_us": lambda: Host(
                FunctionTool(add), plugin(tools=[], reaches={"add": "read"})
            ),
            "covered_scan_us": lambda: Host(FunctionTool(add), plugin(tools=[])),
        }
        found = asyncio.run(timed({name: make() for name, make in hosts.items()}))
        for each in made:
            each.bridge.close()
    print(json.dumps({"framework": "google-adk", "version": version("google-adk"), **found}))


if __name__ == "__main__":
    main()
