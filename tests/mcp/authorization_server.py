"""An authorization server, and an MCP server that it guards: LOG LIFETIME [refuse].

Both are on loopback, with ports of their own; their addresses are printed as JSON. What is
granted is noted in the log, one word a line. Tokens are valid for LIFETIME seconds, and for one
resource. ``refuse`` refuses every user.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.auth.provider import (
    AccessToken,
    AuthorizationCode,
    AuthorizationParams,
    OAuthAuthorizationServerProvider,
    RefreshToken,
    TokenError,
    construct_redirect_uri,
)
from mcp.server.auth.routes import create_auth_routes
from mcp.server.auth.settings import AuthSettings, ClientRegistrationOptions
from mcp.server.mcpserver import MCPServer
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from pydantic import AnyHttpUrl
from starlette.applications import Starlette

LOG, LIFETIME, REFUSES = Path(sys.argv[1]), int(sys.argv[2]), "refuse" in sys.argv


def note(word: str) -> None:
    with LOG.open("a") as file:
        file.write(f"{word}\n")


class Accounts(OAuthAuthorizationServerProvider[AuthorizationCode, RefreshToken, AccessToken]):
    """Clients and tokens, in memory. Whoever asks is the one user, who consents."""

    def __init__(self) -> None:
        self.clients: dict[str, OAuthClientInformationFull] = {}
        self.codes: dict[str, AuthorizationCode] = {}
        self.access: dict[str, AccessToken] = {}
        self.refresh: dict[str, RefreshToken] = {}

    async def get_client(self, client_id: str) -> OAuthClientInformationFull | None:
        return self.clients.get(client_id)

    async def register_client(self, client_info: OAuthClientInformationFull) -> None:
        note("registered")
        self.clients[client_info.client_id] = client_info

    async def authorize(
        self, client: OAuthClientInformationFull, params: AuthorizationParams
    ) -> str:
        note("authorize")
        back = str(params.redirect_uri)
        if REFUSES:
            return construct_redirect_uri(back, error="access_denied", state=params.state)
        code = secrets.token_urlsafe(32)
        self.codes[code] = AuthorizationCode(
            code=code,
            scopes=params.scopes or [],
            expires_at=time.time() + 60,
            client_id=client.client_id,
            code_challenge=params.code_challenge,
            redirect_uri=params.redirect_uri,
            redirect_uri_provided_explicitly=params.redirect_uri_provided_explicitly,
            resource=params.resource,
        )
        return construct_redirect_uri(back, code=code, state=params.state)

    async def load_authorization_code(
        self, client: OAuthClientInformationFull, authorization_code: str
    ) -> AuthorizationCode | None:
        return self.codes.get(authorization_code)

    async def exchange_authorization_code(
        self, client: OAuthClientInformationFull, authorization_code: AuthorizationCode
    ) -> OAuthToken:
        note("code")
        if self.codes.pop(authorization_code.code, None) is None:
            raise TokenError("invalid_grant", "the code was used before")
        return self._granted(client, authorization_code.scopes, authorization_code.resource)

    async def load_refresh_token(
        self, client: OAuthClientInformationFull, refresh_token: str
    ) -> RefreshToken | None:
        return self.refresh.get(refresh_token)

    async def exchange_refresh_token(
        self, client: OAuthClientInformationFull, refresh_token: RefreshToken, scopes: list[str]
    ) -> OAuthToken:
        note("refresh")
        del self.refresh[refresh_token.token]
        return self._granted(client, scopes, refresh_token.resource)

    async def load_access_token(self, token: str) -> AccessToken | None:
        return self.access.get(token)

    async def verify_token(self, token: str) -> AccessToken | None:
        return self.access.get(token)

    async def revoke_token(self, token: AccessToken | RefreshToken) -> None:
        self.access.pop(token.token, None)
        self.refresh.pop(token.token, None)

    def _granted(
        self, client: OAuthClientInformationFull, scopes: list[str], resource: str | None
    ) -> OAuthToken:
        common: dict[str, Any] = {
            "client_id": client.client_id,
            "scopes": scopes,
            "resource": resource,
        }
        ends = int(time.time()) + LIFETIME
        access = AccessToken(token=secrets.token_urlsafe(32), expires_at=ends, **common)
        refresh = RefreshToken(token=secrets.token_urlsafe(32), **common)
        self.access[access.token], self.refresh[refresh.token] = access, refresh
        return OAuthToken(
            access_token=access.token,
            expires_in=LIFETIME,
            refresh_token=refresh.token,
            scope=" ".join(scopes),
        )


def listen() -> tuple[socket.socket, str]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


async def main() -> None:
    accounts = Accounts()
    (issuing, issuer), (serving, place) = listen(), listen()
    scopes = ["notes"]
    routes = create_auth_routes(
        accounts,
        AnyHttpUrl(issuer),
        client_registration_options=ClientRegistrationOptions(
            enabled=True, valid_scopes=scopes, default_scopes=scopes
        ),
    )
    server = MCPServer(
        "notes",
        log_level="ERROR",
        token_verifier=accounts,
        auth=AuthSettings(
            issuer_url=AnyHttpUrl(issuer),
            resource_server_url=AnyHttpUrl(f"{place}/mcp"),
            required_scopes=scopes,
            validate_token_resource=True,
        ),
    )

    @server.tool()
    def add(a: int, b: int) -> int:  # pyright: ignore[reportUnusedFunction]
        """Add two numbers."""
        return a + b

    def run(app: Starlette, listener: socket.socket) -> Coroutine[Any, Any, None]:
        config = uvicorn.Config(app, log_level="error")
        return uvicorn.Server(config).serve([listener])

    sys.stdout.write(json.dumps({"url": f"{place}/mcp", "issuer": issuer}) + "\n")
    sys.stdout.flush()
    guarded = server.streamable_http_app()
    await asyncio.gather(run(Starlette(routes=routes), issuing), run(guarded, serving))


asyncio.run(main())
