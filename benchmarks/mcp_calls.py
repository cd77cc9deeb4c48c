"""Calls over MCP: our server beside those of the mcp and fastmcp packages.

One tool only answers, the other writes a file. Ours does both in a transaction: a policy, history
on disk, undo, a saved session. The others just answer, or write the file. Over standard input and
output each server is a program of its own; the client is that of the mcp package, and asks all of
them in turn. fastmcp is measured over stdio where its environment is there: run the peer fastmcp
first.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

import mcp_servers
from environments import BENCHMARKS, HOME
from timing import emit, is_quick

WARM = 30
OLDER = "2025-11-25"
BATCH = 20
"""Calls to one server before the next one has its turn: after a change the caches are cold."""


TOOLS = {"echo": "text", "write": "content"}
"""The tools, and the argument of each that takes a text."""


class Asked:
    """A client of one server, and how long its calls of each tool took, in µs."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.walls: dict[str, list[float]] = {tool: [] for tool in TOOLS}

    async def call(self, tool: str, number: int) -> None:
        arguments = {TOOLS[tool]: f"content {number}\n" * 20}
        arguments |= {"path": "a.txt"} if tool == "write" else {}
        began = time.perf_counter()
        result = await self.client.call_tool(tool, arguments)
        self.walls[tool].append((time.perf_counter() - began) * 1e6)
        assert not result.is_error, result

    def figures(self, tool: str) -> dict[str, float]:
        walls = sorted(self.walls[tool][WARM:])
        return {
            "wall": round(median(walls), 1),
            "wall_p10": round(walls[len(walls) // 10], 1),
            "calls": len(walls),
        }


def programs() -> dict[str, str]:
    """Return the Python of each server's environment."""
    fastmcp = HOME / "fastmcp" / "bin" / "python"
    found = {"ours": sys.executable, "mcp": sys.executable}
    return {**found, "fastmcp": str(fastmcp)} if fastmcp.exists() else found


def over_stdio(python: str, server: str, kind: str, directory: Path, mode: str = "auto") -> Client:
    script = str(BENCHMARKS / "mcp_servers.py")
    arguments = [script, server, str(directory), kind]
    return Client(StdioServerParameters(command=python, args=arguments), mode=mode)


@asynccontextmanager
async def over_http(server: str, kind: str, directory: Path, mode: str):
    command = [sys.executable, BENCHMARKS / "mcp_servers.py", server, directory, kind, "http"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        headers = {"Authorization": f"Bearer {mcp_servers.TOKEN}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            Client(streamable_http_client(url, http_client=http), mode=mode) as client,
        ):
            yield client
    finally:
        process.kill()
        process.communicate()


def in_memory(server: str, kind: str, directory: Path) -> Client:
    if server == "ours":
        return Client(mcp_servers.ours(directory, kind).protocol)
    return Client(mcp_servers.sdk(directory, kind))


async def measure(calls: int) -> None:
    async with AsyncExitStack() as stack:
        asked: dict[tuple[str, str, str], Asked] = {}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        async def add(way: str, kind: str, server: str, make) -> None:
            directory = folder / f"{way}-{kind}-{server}"
            directory.mkdir()
            client = await stack.enter_async_context(make(directory))
            asked[way, kind, server] = Asked(client)

        for kind in mcp_servers.KINDS:
            for server, python in programs().items():
                await add("stdio", kind, server, lambda d: over_stdio(python, server, kind, d))  # noqa: B023
            for server in ("ours", "mcp"):
                # With a handshake it is the revision before the newest.
                await add(
                    f"stdio {OLDER}",
                    kind,
                    server,
                    lambda d: over_stdio(sys.executable, server, kind, d, "legacy"),  # noqa: B023
                )
                for way, mode in (("http", "auto"), (f"http {OLDER}", "legacy")):
                    await add(way, kind, server, lambda d: over_http(server, kind, d, mode))  # noqa: B023
                await add("memory", kind, server, lambda d: in_memory(server, kind, d))  # noqa: B023
        for tool in TOOLS:
            for each in asked.values():
                for number in range(WARM):
                    await each.call(tool, number)
            for first in range(0, calls, BATCH):
                for each in asked.values():
                    for number in range(first, first + BATCH):
                        await each.call(tool, number)
            for (way, kind, server), each in asked.items():
                about = {"tool": tool, "way": way, "kind": kind, "server": server}
                emit("mcp call", **about, **each.figures(tool))


if __name__ == "__main__":
    asyncio.run(measure(100 if is_quick() else 400))
