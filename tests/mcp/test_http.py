"""The server over streamable HTTP, on a port of this machine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest

import weakincentives as wink
from weakincentives.runtime import ToolInvoked, ToolRegistry

pytest.importorskip("mcp")

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from weakincentives.mcp import McpServer
from weakincentives.mcp.http import PATH, http_app, listen, serve

TOKEN = "the token"
SECONDS = 240
ERAS = pytest.mark.parametrize("mode", ["auto", "legacy"])
ERAS_TO_BE_SURE = pytest.mark.parametrize(
    "mode", ["auto", pytest.param("legacy", marks=pytest.mark.heavy)]
)
PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


@wink.tool(reach="reversible")
def write(path: str, content: str, *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, content)
    return f"Wrote {path}"


@asynccontextmanager
async def served(tools: ToolRegistry, **options: Any) -> AsyncGenerator[str]:
    """Serve tools in the block; yields the address."""
    with McpServer(tools) as server, listen() as port:
        serving = asyncio.ensure_future(serve(server, port, TOKEN, **options))
        try:
            async with asyncio.timeout(SECONDS):
                yield f"http://127.0.0.1:{port.getsockname()[1]}{PATH}"
        finally:
            serving.cancel()
            await asyncio.wait([serving])


@asynccontextmanager
async def client_of(url: str, mode: Literal["auto", "legacy"]) -> AsyncGenerator[Client]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=SECONDS) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


async def post(url: str, *, content: bytes | None = None, **headers: str) -> httpx2.Response:
    sent = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    async with httpx2.AsyncClient(timeout=SECONDS) as http:
        if content is not None:
            return await http.post(url, content=content, headers={**sent, **headers})
        return await http.post(url, json=PING, headers={**sent, **headers})


def test_clients_that_come_and_go_resume_the_session_of_their_name(tmp_path: Path):
    """In the newest era a connection is no session: who has the same name is the same client."""

    async def work() -> list[str]:
        with ToolRegistry([write], workspace=tmp_path) as tools:
            async with served(tools) as url:
                async with client_of(url, "auto") as client:
                    await client.call_tool("write", {"path": "a.txt", "content": "a"})
                async with client_of(url, "auto") as first, client_of(url, "auto") as second:
                    await asyncio.gather(
                        *(
                            client.call_tool("write", {"path": f"{number}.txt", "content": ""})
                            for number, client in enumerate((first, second) * 5)
                        )
                    )
                    undone = await second.call_tool("undo")
                    assert not undone.is_error
            return [record.tool_name for record in tools.session[ToolInvoked]]

    assert asyncio.run(work()) == ["write"] * 11 + ["undo"]
    assert len(list(tmp_path.iterdir())) == 10


def test_clients_that_are_connected_at_once_undo_only_their_own_calls(tmp_path: Path):
    async def work() -> None:
        with ToolRegistry([write], workspace=tmp_path) as tools:
            async with served(tools) as url:
                async with client_of(url, "legacy") as first, client_of(url, "legacy") as second:
                    await first.call_tool("write", {"path": "a.txt", "content": "a"})
                    await second.call_tool("write", {"path": "b.txt", "content": "b"})
                    assert not (await first.call_tool("undo")).is_error
                    assert (await first.call_tool("undo")).is_error
                # Whoever comes next under the name goes on where the first left.
                async with client_of(url, "legacy") as third:
                    history = await third.call_tool("history")
                    assert "undo" in str(history.content)

    asyncio.run(work())
    assert [path.name for path in tmp_path.iterdir()] == ["b.txt"]


@ERAS
def test_clients_of_one_name_with_addresses_of_their_own_undo_only_their_own_calls(
    tmp_path: Path, mode: Any
):
    async def work() -> None:
        with ToolRegistry([write], workspace=tmp_path) as tools:
            async with (
                served(tools) as url,
                client_of(f"{url}?client=left", mode) as left,
                client_of(f"{url}?client=right", mode) as right,
            ):
                await left.call_tool("write", {"path": "a.txt", "content": "a"})
                await right.call_tool("write", {"path": "b.txt", "content": "b"})
                assert not (await left.call_tool("undo")).is_error
                assert (await left.call_tool("undo")).is_error

    asyncio.run(work())
    assert [path.name for path in tmp_path.iterdir()] == ["b.txt"]


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({}, 401, "Authorization: Bearer TOKEN"),
        ({"Authorization": "Bearer another"}, 401, "Authorization: Bearer TOKEN"),
        ({"Authorization": TOKEN}, 401, "Authorization: Bearer TOKEN"),
        (
            {"Authorization": f"Bearer {TOKEN}", "Host": "evil.example"},
            403,
            "Host header not allowed",
        ),
        (
            {"Authorization": f"Bearer {TOKEN}", "Origin": "https://evil.example"},
            403,
            "Origin header not allowed",
        ),
        (
            {"Authorization": f"Bearer {TOKEN}", "Host": "evil.example@127.0.0.1"},
            403,
            "Host header not allowed",
        ),
        ({"Authorization": f"Bearer {TOKEN}", "Origin": "null"}, 403, "Origin header not allowed"),
        ({"Authorization": f"Bearer {TOKEN}", "Origin": "http://localhost:1"}, 400, ""),
        ({"Authorization": f"bearer {TOKEN}"}, 400, ""),
    ],
)
def test_who_has_no_business_here_is_refused(headers: dict[str, str], status: int, said: str):
    """The last two are let in, and told that a session has to begin with a handshake."""

    async def work() -> httpx2.Response:
        async with served(ToolRegistry([write])) as url:
            return await post(url, **headers)

    answer = asyncio.run(work())

    assert answer.status_code == status
    assert said in answer.text
    assert status != 401 or answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("declared", [True, False])
def test_a_request_that_is_too_long_is_refused_unread(declared: bool):
    async def much() -> AsyncGenerator[bytes]:
        for _ in range(40):
            yield b"x" * (1 << 20)

    async def work() -> httpx2.Response:
        content: Any = b"x" * (40 << 20) if declared else much()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            served(ToolRegistry([write])) as url,
            httpx2.AsyncClient(timeout=SECONDS) as http,
        ):
            return await http.post(url, content=content, headers=headers)

    assert asyncio.run(work()).status_code == 413


@ERAS_TO_BE_SURE
def test_what_is_not_json_is_an_error_and_the_server_goes_on(tmp_path: Path, mode: Any):
    async def work() -> bool:
        with ToolRegistry([write], workspace=tmp_path) as tools:
            async with served(tools) as url:
                for garbage in (b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"jsonrpc": "1.0"}'):
                    answer = await post(url, content=garbage, Authorization=f"Bearer {TOKEN}")
                    assert answer.status_code == 400
                async with client_of(url, mode) as client:
                    done = await client.call_tool("write", {"path": "a.txt", "content": "a"})
                    return done.is_error

    assert asyncio.run(work()) is False


class Waiting:
    """A tool that waits in the middle of its work."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def tool(self) -> Any:
        @wink.tool(reach="reversible")
        def wait(*, context: wink.ToolContext) -> str:
            """Wait."""
            context.filesystem.write("half.txt", "half done")
            self.reached.set()
            self.go_on.wait(SECONDS)
            return "Done"

        return wait


def test_a_call_whose_client_hangs_up_is_rolled_back(tmp_path: Path):
    """In the protocol of 2026 the end of the connection is the end of the request."""
    waiting = Waiting()

    async def work() -> None:
        with ToolRegistry([waiting.tool(), write], workspace=tmp_path) as tools:
            async with served(tools) as url:
                async with client_of(url, "auto") as client:
                    asking = asyncio.ensure_future(client.call_tool("wait"))
                    await asyncio.to_thread(waiting.reached.wait, SECONDS)
                    asking.cancel()
                    await asyncio.wait([asking])
                async with client_of(url, "auto") as client:  # waits until the other is undone
                    await client.call_tool("write", {"path": "a.txt", "content": "a"})
                assert [record.success for record in tools.session[ToolInvoked]] == [False, True]
            waiting.go_on.set()

    asyncio.run(work())
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@ERAS_TO_BE_SURE
def test_a_server_that_is_told_to_end_rolls_back_what_is_under_way(tmp_path: Path, mode: Any):
    waiting = Waiting()

    async def work() -> None:
        with ToolRegistry([waiting.tool()], workspace=tmp_path) as tools:
            async with served(tools) as url:
                holding = asyncio.ensure_future(_call(url, mode))
                await asyncio.to_thread(waiting.reached.wait, SECONDS)
            holding.cancel()
            await asyncio.wait([holding])
            assert [record.success for record in tools.session[ToolInvoked]] == [False]
            waiting.go_on.set()

    async def _call(url: str, mode: Any) -> None:
        async with client_of(url, mode) as client:
            await client.call_tool("wait")

    asyncio.run(work())
    assert list(tmp_path.iterdir()) == []


@ERAS
def test_progress_comes_while_the_call_is_under_way(mode: Any):
    heard = asyncio.Event()

    @wink.tool
    async def work(*, context: wink.ToolContext) -> str:
        """Work until somebody has heard of it."""
        context.beat()
        await asyncio.wait_for(heard.wait(), SECONDS)
        return "Done"

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.set()

    async def run() -> bool:
        async with served(ToolRegistry([work])) as url, client_of(url, mode) as client:
            return (await client.call_tool("work", progress_callback=hear)).is_error

    assert asyncio.run(run()) is False


def test_no_server_without_a_token():
    with pytest.raises(ValueError, match="needs a token"):
        http_app(McpServer(ToolRegistry([write])), "", host="127.0.0.1")


def test_a_port_that_is_taken_is_an_error():
    with listen() as taken, pytest.raises(OSError), listen(port=taken.getsockname()[1]):  # noqa: PT011
        pass


# Clients that only hold on

HALF = (b"", b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"POST /mcp HTTP/1.1\r\nX: ")
UNREAD = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\nhalf"


async def _connect(url: str, first: bytes) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx2.URL(url).port or 0)
    writer.write(first)
    await writer.drain()
    held.append(writer)
    return reader


held: list[asyncio.StreamWriter] = []
"""Kept open while a test runs: a writer that nobody has is closed."""


async def _let_go() -> None:
    while held:
        writer = held.pop()
        writer.close()
        with suppress(OSError):  # the server may have hung up first
            await writer.wait_closed()


async def _to_the_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize("first", [*HALF, UNREAD], ids=["nothing", "head", "line", "no token"])
def test_a_client_that_does_not_finish_its_request_is_let_go(tmp_path: Path, first: bytes):
    # An answer that there is comes before the time is over.
    patience = 3.0 if first is UNREAD else 0.2

    async def work() -> bytes:
        with ToolRegistry([write], workspace=tmp_path) as tools:
            async with served(tools, patience=patience) as url:
                try:
                    return await _to_the_end(await _connect(url, first))
                finally:
                    await _let_go()

    answer = asyncio.run(work())

    assert answer.startswith(b"HTTP/1.1 401 ") if first is UNREAD else answer == b""


def test_bytes_that_trickle_in_give_no_more_time(tmp_path: Path):
    async def work() -> bytes:
        with ToolRegistry([write], workspace=tmp_path) as tools:
            async with served(tools, patience=0.5) as url:
                reader = await _connect(url, b"POST /mcp HTTP/1.1\r\nX: ")
                ended = asyncio.ensure_future(_to_the_end(reader))
                while not ended.done():
                    held[-1].write(b"x")
                    await asyncio.sleep(0.05)
                await _let_go()
                return ended.result()

    assert asyncio.run(work()) == b""


def test_those_that_hold_on_make_room_for_those_that_work(tmp_path: Path):
    """Three times as many as are taken, for as long as they like."""

    async def work() -> tuple[int, str]:
        with ToolRegistry([write], workspace=tmp_path) as tools:
            async with served(tools, patience=SECONDS) as url, client_of(url, "auto") as client:
                first = await client.call_tool("write", {"path": "a.txt", "content": "a"})
                readers = [await _connect(url, HALF[n % 3]) for n in range(384)]
                ends = [asyncio.ensure_future(_to_the_end(each)) for each in readers]
                done, waiting = set[Any](), set[Any](ends)
                while len(waiting) > 128:
                    more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    done |= more
                last = await client.call_tool("write", {"path": "b.txt", "content": "b"})
                for each in waiting:
                    each.cancel()
                await _let_go()
                assert not first.is_error
                return len(waiting), str(last.content)

    left, said = asyncio.run(work())

    assert left <= 128
    assert "Wrote b.txt" in said
