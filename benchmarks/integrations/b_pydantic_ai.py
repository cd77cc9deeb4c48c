"""What a call costs in pydantic-ai, alone and with us: one JSON line.

    .venv-integrations/pydantic-ai/bin/python benchmarks/integrations/b_pydantic_ai.py

CPU µs per call, p10 of many batches, through pydantic-ai's own path for a call, with a trivial
tool. ``with_us``: one of our tools. ``covered_read_us``: pydantic-ai's own tool, whose reach is
stated as ``read``. ``covered_scan_us``: not stated, so a scan looks for changed files.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from pydantic_ai import FunctionToolset, RunContext, ToolCallPart
from pydantic_ai.capabilities import AbstractCapability, CombinedCapability
from pydantic_ai.models.test import TestModel
from pydantic_ai.tool_manager import ToolManager
from pydantic_ai.toolsets import AbstractToolset
from pydantic_ai.usage import RunUsage

from weakincentives import tool
from weakincentives.integrations.pydantic_ai import Wink

TIMES, BATCHES = 20, 100


async def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


class Host:
    """The framework's path for a call, with or without our capability."""

    def __init__(
        self, toolset: AbstractToolset[Any], capabilities: Sequence[AbstractCapability[Any]] = ()
    ) -> None:
        self._manager = ToolManager(toolset, CombinedCapability(capabilities))
        self._ids = (f"call-{number}" for number in itertools.count())

    async def prepare(self) -> None:
        context = RunContext(deps=None, model=TestModel(), usage=RunUsage(), conversation_id="b")
        self._manager = await self._manager.for_run_step(context)

    async def call(self) -> None:
        call = ToolCallPart("add", '{"first": 1, "second": 2}', tool_call_id=next(self._ids))
        assert await self._manager.handle_call(call) in (3, "3")


async def timed(hosts: dict[str, Host]) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in hosts}
    for host in hosts.values():
        await host.prepare()
    for batch in range(-2, BATCHES):
        for name, host in hosts.items():
            before = time.process_time()
            for _ in range(TIMES):
                await host.call()
            if batch >= 0:
                samples[name].append((time.process_time() - before) / TIMES * 1e6)
    return {name: round(sorted(each)[len(each) // 10], 1) for name, each in samples.items()}


def main() -> None:
    own = FunctionToolset[Any]([add])
    with (
        tempfile.TemporaryDirectory() as place,
        Wink(place, tools=[tool(reach="read")(add)]) as ours,
        Wink(place, tools=[], reaches={"add": "read"}, run="read") as stated,
        Wink(place, tools=[], run="unstated") as unstated,
    ):
        hosts = {
            "alone": Host(own),
            "with": Host(ours.toolset, [ours]),
            "read": Host(own, [stated]),
            "unstated": Host(own, [unstated]),
        }
        found = asyncio.run(timed(hosts))
    report = {
        "alone_us": found["alone"],
        "with_us": found["with"],
        "covered_read_us": found["read"],
        "covered_scan_us": found["unstated"],
    }
    print(
        json.dumps({"framework": "pydantic-ai", "version": version("pydantic-ai-slim"), **report})
    )


if __name__ == "__main__":
    main()
