"""Many clients of one server over HTTP, which is killed often; some leave during a call."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("mcp")
pytest.importorskip("typer")

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import Implementation

from chance import dice, is_time_left

pytestmark = pytest.mark.heavy

TOKEN = "a-token-for-this-test"
TOOLS = f"{Path(__file__).parent / 'counting_tools.py'}:tools"
SECONDS = 600
# `make torture` makes 10,000 calls, by 50 clients, with 20 kills.
CALLS = int(os.environ.get("WINK_TORTURE", "120"))
CLIENTS, KILLS = (50, CALLS // 500) if CALLS >= 1000 else (12, 2)
LEAVING = 0.02
"""How likely it is that a client does not wait for the answer to a call."""


class Server:
    """`wink mcp` at one address; started again when it is killed."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.port = 0
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "weakincentives.cli", "mcp", "-w", str(self.workspace)),
            *("--http", "--port", str(self.port), TOOLS),
            env={**os.environ, "WINK_MCP_TOKEN": TOKEN},
            stderr=asyncio.subprocess.PIPE,
        )
        assert self.process.stderr is not None
        said = ""
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)/mcp", said)):
            line = await self.process.stderr.readline()
            assert line, said
            said += line.decode()
        self.port = int(found[1])
        self._rest = asyncio.ensure_future(self.process.stderr.read())

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()
        await self._rest


@asynccontextmanager
async def connected(server: Server, number: int) -> AsyncGenerator[Client]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    info = Implementation(name=f"client-{number}", version="1")
    url = f"http://127.0.0.1:{server.port}/mcp"
    async with (
        httpx2.AsyncClient(headers=headers, timeout=SECONDS) as http,
        Client(streamable_http_client(url, http_client=http), client_info=info) as client,
    ):
        yield client


async def make_calls(server: Server, number: int, left: list[int], done: list[str]) -> None:
    """Make calls until none is left; one without an answer is not made again."""
    chance = dice("client", number)
    while left and is_time_left():
        try:
            async with connected(server, number) as client:
                while left and is_time_left():
                    name = f"{number}-{left.pop()}"
                    stays = chance.random() >= LEAVING
                    async with asyncio.timeout(None if stays else chance.random() / 20):
                        result = await client.call_tool("count", {"name": name})
                    if not result.is_error:
                        done.append(name)
        except Exception:  # the server was killed, or the client has left
            await asyncio.sleep(0.05)


async def torture(workspace: Path) -> tuple[int, list[str]]:
    """Return how many calls were made, and the names of those that were answered."""
    server, left, done = Server(workspace), list(range(CALLS)), list[str]()
    chance = dice("kills")
    await server.start()
    async with asyncio.timeout(max(SECONDS * 3, CALLS * 2)):
        clients = [
            asyncio.ensure_future(make_calls(server, number, left, done))
            for number in range(CLIENTS)
        ]
        for kill in range(KILLS):
            while len(left) > CALLS * (KILLS - kill) / (KILLS + 1) and is_time_left():
                await asyncio.sleep(chance.random() / 20)
            if not is_time_left():
                break
            await server.kill()
            await server.start()
        await asyncio.gather(*clients)
        asked = CALLS - len(left)
        # The next to come finishes what a kill has left.
        await server.kill()
        await server.start()
        async with connected(server, CLIENTS) as client:
            result = await client.call_tool("count", {"name": "last"})
            assert not result.is_error
    await server.kill()
    return asked, done


def test_what_was_answered_is_there_and_every_call_is_there_as_a_whole_or_not_at_all(
    tmp_path: Path,
):
    workspace = tmp_path / "project"
    workspace.mkdir()
    began = time.monotonic()

    asked, done = asyncio.run(torture(workspace))

    there = {path.stem for path in (workspace / "names").iterdir()}
    assert set(done) <= there  # nothing that was answered is lost
    assert (workspace / "total.txt").read_text() == str(len(there))  # as one after the other
    assert len(there) >= asked / 2
    took = time.monotonic() - began
    print(f"{asked} asked, {len(done)} answered, {len(there)} there, {took:.0f} s")  # noqa: T201
