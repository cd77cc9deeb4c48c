"""Many clients of one server over HTTP, which is killed again and again."""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mcp")
pytest.importorskip("typer")

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import Implementation

pytestmark = pytest.mark.heavy

TOKEN = "a-token-for-this-test"
TOOLS = f"{Path(__file__).parent / 'counting_tools.py'}:tools"
SECONDS = 600
# `WINK_TORTURE=10000` makes that many calls, by 50 clients, with 20 kills.
CALLS = int(os.environ.get("WINK_TORTURE", "120"))
CLIENTS, KILLS = (50, 20) if CALLS >= 1000 else (12, 2)


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


async def make_calls(server: Server, number: int, left: list[int], done: list[str]) -> None:
    """Make calls until none is left; one without an answer is not made again."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    info = Implementation(name=f"client-{number}", version="1")
    while left:
        url = f"http://127.0.0.1:{server.port}/mcp"
        try:
            async with (
                httpx2.AsyncClient(headers=headers, timeout=SECONDS) as http,
                Client(streamable_http_client(url, http_client=http), client_info=info) as client,
            ):
                while left:
                    name = f"{number}-{left.pop()}"
                    result = await client.call_tool("count", {"name": name})
                    if not result.is_error:
                        done.append(name)
        except Exception:  # the server was killed
            await asyncio.sleep(0.05)


async def torture(workspace: Path) -> list[str]:
    server, left, done = Server(workspace), list(range(CALLS)), list[str]()
    await server.start()
    async with asyncio.timeout(SECONDS * 3):
        clients = [
            asyncio.ensure_future(make_calls(server, number, left, done))
            for number in range(CLIENTS)
        ]
        for kill in range(KILLS):
            while len(left) > CALLS * (KILLS - kill) / (KILLS + 1):
                await asyncio.sleep(random.random() / 20)
            await server.kill()
            await server.start()
        await asyncio.gather(*clients)
        # The next to come finishes what a kill has left.
        await server.kill()
        await server.start()
        left.append(CALLS)
        await make_calls(server, CLIENTS, left, done)
    await server.kill()
    return done


def test_what_was_answered_is_there_and_every_call_is_there_as_a_whole_or_not_at_all(
    tmp_path: Path,
):
    workspace = tmp_path / "project"
    workspace.mkdir()
    began = time.monotonic()

    done = asyncio.run(torture(workspace))

    there = {path.stem for path in (workspace / "names").iterdir()}
    assert set(done) <= there  # nothing that was answered is lost
    assert (workspace / "total.txt").read_text() == str(len(there))  # as one after the other
    assert len(there) >= CALLS / 2
    print(f"{len(done)} answered, {len(there)} there, {time.monotonic() - began:.0f} s")  # noqa: T201
