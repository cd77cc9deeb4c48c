"""MCP over streamable HTTP: on loopback unless told otherwise, and only with the token."""

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
"""Seconds that answers on their way have when the server is told to end."""
_PATIENCE = 10.0
"""Seconds that a client has to send the head of a request; more bytes do not give it more."""
_MAX_CONNECTIONS = 128


def listen(host: str = "127.0.0.1", port: int = 0) -> sockets.socket:
    """Open a port, with 0 any free one; close it, or use it in a ``with`` block.

    Raises:
        OSError: The port is in use, or there is no such address here.
    """
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    both = family == sockets.AF_INET6 and sockets.has_dualstack_ipv6()
    return sockets.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)


async def serve(
    server: McpServer, listening: sockets.socket, token: str, *, patience: float = _PATIENCE
) -> None:
    """Serve on an open port until cancelled; calls under way are rolled back then.

    A connection on which no request comes within ``patience`` seconds is closed.
    """
    config = uvicorn.Config(
        http_app(server, token, host=listening.getsockname()[0]),
        http=partial(_Connection, patience=patience),  # pyright: ignore[reportArgumentType]  # it is only called
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
    """A server that leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Connection(H11Protocol):
    """A connection that is not kept for a client that asks for nothing.

    Uvicorn limits the time between requests, and not the time until the head of one has come.
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
        """Close the connection that has waited longest for a request; this one where none does."""
        others = [cast("_Connection", each) for each in self.connections if each is not self]
        waiting = [(each._limit.when(), n, each) for n, each in enumerate(others) if each._limit]
        (min(waiting)[2] if waiting else self).transport.abort()


def http_app(server: McpServer, token: str, *, host: str) -> ASGIApp:
    """Return the server as an ASGI application that lets in who knows the token.

    ``host`` is the address it is served at: clients must know it by that name. At an address that
    stands for all of the machine's, they may know it by any.
    """
    if not token:
        raise ValueError("a server over HTTP needs a token: whoever has it can change files")
    app = server.protocol.streamable_http_app(
        streamable_http_path=PATH,
        max_request_body_size=MAX_MESSAGE,
        # Looked at before anything else, by the guard.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return _Guard(app, token, _LOOPBACK if host in _LOOPBACK else (host,))


class _Guard:
    """Refuses who comes by a wrong name, from a page in a browser, or without the token."""

    def __init__(self, app: ASGIApp, token: str, names: tuple[str, ...]) -> None:
        self._app = app
        self._token = token.encode()
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, headers: Headers) -> PlainTextResponse | None:
        host = _name_in(f"//{headers.get('host', '')}")
        # A page whose own name was made to lead here comes with that name.
        if host is None or not (host in self._names or self._names[0] in _ANY):
            return PlainTextResponse("This server is not known by that name\n", 403)
        origin = headers.get("origin")
        if origin is not None and _name_in(origin) not in (host, *self._names):
            return PlainTextResponse("Pages of other sites are not served\n", 403)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token):
            return PlainTextResponse(
                "Send the header `Authorization: Bearer TOKEN` with the server's token\n",
                401,
                headers={"www-authenticate": "Bearer"},
            )
        return None


def _name_in(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
