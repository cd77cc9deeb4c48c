"""MCP over streamable HTTP: on loopback by default, and only with the token."""

from __future__ import annotations

import asyncio
import hmac
import socket as sockets
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from weakincentives.errors import MissingExtra
from weakincentives.mcp.stdio import MAX_MESSAGE

try:
    import uvicorn
    from mcp.server.transport_security import TransportSecuritySettings
    from starlette.datastructures import Headers
    from starlette.responses import PlainTextResponse
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from weakincentives.mcp.server import McpServer

PATH = "/mcp"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANY = ("0.0.0.0", "::")
_GRACE = 1
"""Seconds that running responses have when the server is stopped."""
_PATIENCE = 10.0
"""Seconds that a client has to send the whole head of a request."""
_MAX_CONNECTIONS = 128


def listen(host: str = "127.0.0.1", port: int = 0) -> sockets.socket:
    """Open a port, with 0 any free one; raise OSError if that fails."""
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    both = family == sockets.AF_INET6 and sockets.has_dualstack_ipv6()
    return sockets.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)


async def serve(
    server: McpServer, listening: sockets.socket, token: str, *, patience: float = _PATIENCE
) -> None:
    """Serve on an open port until cancelled; running calls are then rolled back.

    A connection on which no request comes within ``patience`` seconds is closed.
    """
    config = uvicorn.Config(
        http_app(server, token, host=listening.getsockname()[0]),
        http=partial(_Connection, patience=patience),  # pyright: ignore[reportArgumentType]
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=_GRACE,
    )
    running = _Uvicorn(config)
    task = asyncio.ensure_future(running.serve(sockets=[listening]))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        running.should_exit = True
        await task
        raise


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the program."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Connection(H11Protocol):
    """Closes a connection on which no request comes in time.

    Uvicorn limits the time between requests, but not the time for the head of one.
    """

    def __init__(self, *, patience: float, **options: Any) -> None:
        super().__init__(**options)
        self._patience = patience
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > _MAX_CONNECTIONS:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)

    @property
    def _is_busy(self) -> bool:
        cycle = cast("Any", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _watch(self) -> None:
        if self._is_busy:
            if self._limit is not None:
                self._limit.cancel()
                self._limit = None
        elif self._limit is None:
            self._limit = self.loop.call_later(self._patience, self.transport.abort)

    def _make_room(self) -> None:
        """Close the connection that has been idle longest, or this one if none is idle."""
        others = [cast("_Connection", each) for each in self.connections if each is not self]
        waiting = [(each._limit.when(), n, each) for n, each in enumerate(others) if each._limit]
        (min(waiting)[2] if waiting else self).transport.abort()


def http_app(server: McpServer, token: str, *, host: str) -> ASGIApp:
    """Return the server as an ASGI application that requires the token.

    ``host`` is the address it is served at; requests for another host are refused, unless it is a
    wildcard address.
    """
    if not token:
        raise ValueError("a server over HTTP needs a token: its clients can change files")
    app = server.protocol.streamable_http_app(
        streamable_http_path=PATH,
        max_request_body_size=MAX_MESSAGE,
        # The guard does that.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return _Guard(app, token, _LOOPBACK if host in _LOOPBACK else (host,))


class _Guard:
    """Refuses a foreign Host or Origin header, and a missing or wrong token."""

    def __init__(self, app: ASGIApp, token: str, names: tuple[str, ...]) -> None:
        self._app = app
        self._token = token.encode()
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, headers: Headers) -> PlainTextResponse | None:
        host = _name_in(f"//{headers.get('host', '')}")
        # DNS rebinding: a foreign name that resolves to this address.
        if host is None or not (host in self._names or self._names[0] in _ANY):
            return PlainTextResponse("Host header not allowed\n", 403)
        origin = headers.get("origin")
        if origin is not None and _name_in(origin) not in (host, *self._names):
            return PlainTextResponse("Origin header not allowed\n", 403)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token):
            return PlainTextResponse(
                "Send the header `Authorization: Bearer TOKEN`\n",
                401,
                headers={"www-authenticate": "Bearer"},
            )
        return None


def _name_in(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
