"""MCP over streamable HTTP: on loopback by default, and only with a token."""

from __future__ import annotations

import hmac
import socket as sockets
from collections.abc import Callable
from typing import TYPE_CHECKING

from weakincentives.errors import MissingExtra
from weakincentives.mcp.stdio import MAX_MESSAGE

try:
    from mcp.server.transport_security import TransportSecuritySettings
    from starlette.datastructures import Headers
    from starlette.responses import PlainTextResponse

    from weakincentives.core.serving import LOOPBACK, PATIENCE, foreign, serve_app
    from weakincentives.core.serving import listen as listen
    from weakincentives.mcp.http_events import RecentEvents
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from weakincentives.mcp.server import McpServer
    from weakincentives.mcp.server_auth import McpAuth

PATH = "/mcp"
_RETRY = 1000
"""Milliseconds after which a client that lost a stream comes back for the rest."""


async def serve(
    server: McpServer,
    listening: sockets.socket,
    token: str | None = None,
    *,
    auth: McpAuth | None = None,
    patience: float = PATIENCE,
) -> None:
    """Serve on an open port until cancelled; running calls are then rolled back.

    A connection on which no request comes within ``patience`` seconds is closed.
    """
    app = http_app(server, token, host=listening.getsockname()[0], auth=auth)
    await serve_app(app, listening, patience=patience)


def http_app(
    server: McpServer, token: str | None = None, *, host: str, auth: McpAuth | None = None
) -> ASGIApp:
    """Return the server as an ASGI application that requires the token, or those of OAuth.

    ``host`` is the address it is served at; requests for another host are refused, unless it is a
    wildcard address.
    """
    if bool(token) == (auth is not None):
        raise ValueError(
            "a server over HTTP needs a token, or OAuth, and not both: its clients can change files"
        )
    app = server.protocol.streamable_http_app(
        streamable_http_path=PATH,
        max_request_body_size=MAX_MESSAGE,
        event_store=RecentEvents(),
        retry_interval=_RETRY,
        # The guard does that.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        auth=None if auth is None else auth.settings(),
        token_verifier=None if auth is None else auth.verifier,
    )
    names = LOOPBACK if host in LOOPBACK else (host,)
    if auth is not None:
        names = (*names, auth.host)
    return _Guard(app, token, names, server.end_session)


class _Guard:
    """Refuses a foreign Host or Origin header, and a missing or wrong token."""

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        names: tuple[str, ...],
        on_end: Callable[[str], object],
    ) -> None:
        self._app = app
        self._on_end = on_end
        self._token = None if token is None else token.encode()
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else None
        refusal = None if headers is None else self._refusal(headers)
        if headers is not None and refusal is None and scope["method"] == "DELETE":
            send = self._noting_the_end(headers.get("mcp-session-id", ""), send)
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _noting_the_end(self, session_id: str, send: Send) -> Send:
        """Note that a session has ended if that is the answer: not everyone may end it."""

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 300:
                self._on_end(session_id)
            await send(message)

        return noting

    def _refusal(self, headers: Headers) -> PlainTextResponse | None:
        if refused := foreign(headers, self._names):
            return PlainTextResponse(f"{refused}\n", 403)
        if self._token is None:
            return None  # the application asks for one of OAuth's
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token):
            return PlainTextResponse(
                "Send the header `Authorization: Bearer TOKEN`\n",
                401,
                headers={"www-authenticate": "Bearer"},
            )
        return None
