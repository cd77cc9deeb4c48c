"""Serving an application over HTTP to this machine: sockets, slow clients, foreign requests.

Needs uvicorn and starlette, which the extras ``mcp`` and ``debug`` bring.
"""

from __future__ import annotations

import asyncio
import socket as sockets
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.types import ASGIApp

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANY = ("0.0.0.0", "::")
_GRACE = 1
"""Seconds that running responses have when the server is stopped."""
PATIENCE = 10.0
"""Seconds that a client has to send the whole head of a request."""
_MAX_CONNECTIONS = 128


def listen(host: str = "127.0.0.1", port: int = 0) -> sockets.socket:
    """Open a port, with 0 any free one; raise OSError if that fails."""
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    both = family == sockets.AF_INET6 and sockets.has_dualstack_ipv6()
    listening = sockets.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
    # Connections inherit it. asyncio sets it only for sockets that name TCP as their protocol, and
    # without it a short answer waits 40 ms for the client's acknowledgement.
    listening.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
    return listening


async def serve_app(
    app: ASGIApp,
    listening: sockets.socket,
    *,
    patience: float = PATIENCE,
    on_stop: Callable[[], object] = lambda: None,
) -> None:
    """Serve on an open port until cancelled.

    A connection on which no request comes within ``patience`` seconds is closed. ``on_stop`` is
    called before it waits for running responses.
    """
    config = uvicorn.Config(
        app,
        http=partial(_Connection, patience=patience),  # pyright: ignore[reportArgumentType]
        interface="asgi3",
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
        on_stop()
        running.should_exit = True
        await task
        raise


def foreign(headers: Headers, names: tuple[str, ...], port: int | None = None) -> str | None:
    """Return why a request is refused: its Host or Origin is not ours. None if it is not refused.

    ``names`` are those of the server; a wildcard address takes any. With ``port``, both headers
    must have it, and the Origin must be the same as the Host.
    """
    host, host_port = _place_in(f"//{headers.get('host', '')}")
    # DNS rebinding: a foreign name that resolves to this address.
    if host is None or not (host in names or names[0] in _ANY):
        return "Host header not allowed"
    if port is not None and host_port != port:
        return "Host header not allowed"
    origin = headers.get("origin")
    if origin is None:
        return None
    if port is not None:
        return (
            None if origin == f"http://{headers.get('host', '')}" else "Origin header not allowed"
        )
    return None if _place_in(origin)[0] in (host, *names) else "Origin header not allowed"


@lru_cache(maxsize=256)  # the same few in every request
def _place_in(url: str) -> tuple[str | None, int | None]:
    try:
        parts = urlsplit(url)
        # A header has no user name: `Host: evil.example@127.0.0.1` names no place.
        return (None, None) if "@" in parts.netloc else (parts.hostname, parts.port)
    except ValueError:
        return None, None


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
