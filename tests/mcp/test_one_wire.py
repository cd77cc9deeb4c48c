"""One client at the other end of a wire, as over standard input and output, in both eras.

In the newest era each request there is a connection of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

import weakincentives as wink
from weakincentives.prompt import ToolContext
from weakincentives.runtime import ToolInvoked, ToolRegistry

pytest.importorskip("mcp")

from mcp import Client
from mcp.shared.memory import create_client_server_memory_streams
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCError, JSONRPCRequest

from weakincentives.mcp import McpServer

ERAS = pytest.mark.parametrize("mode", ["auto", "legacy"])
SECONDS = 240
ABOUT = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


@asynccontextmanager
async def wired(server: McpServer) -> AsyncGenerator[Any]:
    """Serve one end of a wire in the block, and yield the other."""
    async with create_client_server_memory_streams() as (ours, (incoming, outgoing)):
        options = server.protocol.create_initialization_options()
        serving = asyncio.ensure_future(server.protocol.run(incoming, outgoing, options))
        try:
            async with asyncio.timeout(SECONDS):
                yield ours
        finally:
            serving.cancel()
            await asyncio.wait([serving])


def use(
    server: McpServer, work: Callable[[Client], Awaitable[Any]], mode: Literal["auto", "legacy"]
) -> Any:
    async def run() -> Any:
        async with Client(wired(server), mode=mode) as client:
            return await work(client)

    return asyncio.run(run())


@wink.tool(reach="reversible")
async def put(path: str, *, context: ToolContext) -> str:
    """Write a file after a moment, and say in which session."""
    await asyncio.sleep(0.001)
    context.filesystem.write(path, "")
    return context.session_id or ""


@wink.tool(reach="reversible")
async def stall(*, context: ToolContext) -> str:
    """Write a file, and wait until the call is cancelled."""
    context.filesystem.write("stalled.txt", "")
    await asyncio.sleep(SECONDS)
    return "never"


@ERAS
def test_calls_at_once_are_of_one_session_and_can_all_be_undone(
    tmp_path: Path, mode: Literal["auto", "legacy"]
):
    async def work(client: Client) -> set[str]:
        paths = [f"{number}.txt" for number in range(6)]
        calls = [client.call_tool("put", {"path": path}) for path in paths]
        sessions = {each.content[0].text for each in await asyncio.gather(*calls)}
        for _ in paths:
            assert not (await client.call_tool("undo")).is_error
        return sessions

    with ToolRegistry([put], workspace=tmp_path) as tools:
        sessions = use(McpServer(tools), work, mode)
        names = [each.tool_name for each in tools.session[ToolInvoked]]

    assert sessions == {tools.session.session_id}
    assert names == ["put"] * 6 + ["undo"] * 6
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Note:
    number: int


def test_a_cancelled_call_does_not_stand_in_the_way_of_later_ones():
    """More of them follow than there are states to return to; each is undone on its own."""
    reached = asyncio.Event()

    @wink.tool(reach="reversible")
    async def wait() -> str:
        """Wait until the call is cancelled."""
        reached.set()
        await asyncio.sleep(SECONDS)
        return "never"

    @wink.tool(reach="reversible")
    async def note(number: int, *, context: ToolContext) -> str:
        """Keep a number."""
        context.session[Note].seed(Note(number))
        return "kept"

    async def work(client: Client) -> str:
        waiting = asyncio.ensure_future(client.call_tool("wait"))
        await reached.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        for number in range(220):
            assert not (await client.call_tool("note", {"number": number})).is_error
        return (await client.call_tool("undo")).content[0].text

    with ToolRegistry([note, wait]) as tools:
        assert use(McpServer(tools), work, "legacy") == "Undone: 1 call (note)."
        assert tools.session[Note].latest() == Note(218)


def test_an_id_that_is_in_use_is_refused_in_the_newest_era_too(tmp_path: Path):
    async def run() -> list[Any]:
        with ToolRegistry([put, stall], workspace=tmp_path) as tools:
            async with wired(McpServer(tools)) as (incoming, outgoing):
                for name, arguments in (("stall", {}), ("put", {"path": "a.txt"})):
                    params = {"name": name, "arguments": arguments, "_meta": ABOUT}
                    request = JSONRPCRequest(
                        jsonrpc="2.0", id="same", method="tools/call", params=params
                    )
                    await outgoing.send(SessionMessage(request))
                    if name == "stall":
                        while not (tmp_path / "stalled.txt").exists():
                            await asyncio.sleep(0.001)
                return [(await incoming.receive()).message]

    (answer,) = asyncio.run(run())

    assert isinstance(answer, JSONRPCError)
    assert answer.error.message == "another request has the id same"
    assert list(tmp_path.iterdir()) == []
