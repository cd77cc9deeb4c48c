"""A server of the ``mcp`` package over streamable HTTP, behind a token: PORT TOKEN ERA."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from mcp import MCPError
from mcp.server.mcpserver import MCPServer

server = MCPServer("web", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def sleep() -> str:
    """Take long."""
    await asyncio.sleep(600)
    return "awake"


@server.tool()
async def err(code: int) -> str:
    """Answer with an error of the protocol."""
    raise MCPError(code, "as you wish")


app = server.streamable_http_app()


async def guarded(scope: Any, receive: Any, send: Any) -> None:
    """Let in whoever knows the token; without the newest revision, if so told."""
    if scope["type"] != "http":
        await app(scope, receive, send)
        return
    headers = dict(scope["headers"])
    if headers.get(b"authorization") != f"Bearer {sys.argv[2]}".encode():
        status = 401
    elif sys.argv[3] == "old" and headers.get(b"mcp-protocol-version", b"") >= b"2026":
        status = 400
    else:
        await app(scope, receive, send)
        return
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
sys.stdout.write(f"{listener.getsockname()[1]}\n")
sys.stdout.flush()
asyncio.run(uvicorn.Server(uvicorn.Config(guarded, log_level="error")).serve([listener]))
