"""A server that takes tokens of an OAuth authorization server, a real one on loopback."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import weakincentives as wink
from weakincentives.runtime import Session, ToolInvoked, ToolRegistry

pytest.importorskip("mcp")

import httpx2
import jwt
import uvicorn
from cryptography.hazmat.primitives.asymmetric import rsa
from mcp import Client
from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider
from mcp.client.streamable_http import streamable_http_client
from mcp.server.auth.provider import (
    AccessToken,
    AuthorizationCode,
    OAuthAuthorizationServerProvider,
    RefreshToken,
    construct_redirect_uri,
)
from mcp.server.auth.routes import create_auth_routes
from mcp.server.auth.settings import ClientRegistrationOptions
from mcp.shared.auth import OAuthClientMetadata, OAuthToken
from pydantic import AnyHttpUrl, AnyUrl
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from weakincentives.mcp import McpAuth, McpServer
from weakincentives.mcp.http import PATH, http_app, listen, serve

SECONDS = 240
SCOPES = ["tools"]


class Issuer(OAuthAuthorizationServerProvider[AuthorizationCode, RefreshToken, AccessToken]):
    """Registers every client, whose user consents at once, and signs tokens."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.clients: dict[str, Any] = {}
        self.codes: dict[str, AuthorizationCode] = {}
        self.key = rsa.generate_private_key(65537, 2048)

    def token(self, **claims: Any) -> str:
        usual = {"iss": self.url, "exp": int(time.time()) + 60, "sub": "ann", "client_id": "editor"}
        return jwt.encode({**usual, **claims}, self.key, "RS256", headers={"kid": "one"})

    async def get_client(self, client_id: str) -> Any:
        return self.clients.get(client_id)

    async def register_client(self, client_info: Any) -> None:
        self.clients[client_info.client_id] = client_info

    async def authorize(self, client: Any, params: Any) -> str:
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
        return construct_redirect_uri(str(params.redirect_uri), code=code, state=params.state)

    async def load_authorization_code(self, client: Any, authorization_code: str) -> Any:
        return self.codes.get(authorization_code)

    async def exchange_authorization_code(self, client: Any, authorization_code: Any) -> OAuthToken:
        del self.codes[authorization_code.code]
        scope = " ".join(authorization_code.scopes)
        token = self.token(client_id=client.client_id, aud=authorization_code.resource, scope=scope)
        return OAuthToken(access_token=token, expires_in=60, scope=scope)

    async def load_refresh_token(self, client: Any, refresh_token: str) -> None:
        return None

    async def exchange_refresh_token(self, client: Any, refresh_token: Any, scopes: Any) -> Any:
        raise NotImplementedError

    async def load_access_token(self, token: str) -> None:
        return None

    async def revoke_token(self, token: Any) -> None:
        pass

    def app(self) -> Starlette:
        registration = ClientRegistrationOptions(
            enabled=True, valid_scopes=SCOPES, default_scopes=SCOPES
        )
        routes = create_auth_routes(
            self, AnyHttpUrl(self.url), client_registration_options=registration
        )
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))

        async def keys(request: Any) -> JSONResponse:
            return JSONResponse({"keys": [{**public, "kid": "one", "use": "sig"}]})

        async def about(request: Any) -> JSONResponse:
            return JSONResponse({"issuer": self.url, "jwks_uri": f"{self.url}/keys"})

        places = [("/keys", keys), ("/.well-known/openid-configuration", about)]
        return Starlette(routes=[*routes, *(Route(*place) for place in places)])


@wink.tool(reach="read")
def who(*, context: wink.ToolContext) -> str:
    """Say who calls."""
    return context.agent_id


@asynccontextmanager
async def guarded(tools: ToolRegistry, **options: Any) -> AsyncGenerator[tuple[str, Issuer]]:
    """Serve tools, guarded by an issuer; yields the address and the issuer."""
    with McpServer(tools, **options) as server, listen() as port, listen() as other:
        issuer = Issuer(f"http://127.0.0.1:{other.getsockname()[1]}")
        url = f"http://127.0.0.1:{port.getsockname()[1]}{PATH}"
        auth = McpAuth(issuer=issuer.url, url=url, scopes=SCOPES)
        config = uvicorn.Config(issuer.app(), log_level="error", lifespan="off")
        signing = uvicorn.Server(config)
        tasks = [
            asyncio.ensure_future(serve(server, port, auth=auth)),
            asyncio.ensure_future(signing.serve([other])),
        ]
        try:
            async with asyncio.timeout(SECONDS):
                yield url, issuer
        finally:
            signing.should_exit = True
            tasks[0].cancel()
            await asyncio.wait(tasks)


class Stored:
    """What a client keeps of its registration and its tokens."""

    tokens: OAuthToken | None = None
    client: Any = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> Any:
        return self.client

    async def set_client_info(self, client_info: Any) -> None:
        self.client = client_info


def test_a_client_signs_in_and_calls_tools():
    """With nothing but the address: the metadata leads it to the authorization server."""

    async def work() -> str:
        back: list[str] = []

        async def redirect(url: str) -> None:
            async with httpx2.AsyncClient() as browser:
                answer = await browser.get(url, follow_redirects=False)
                back.append(answer.headers["location"])

        async def returned() -> AuthorizationCodeResult:
            query = parse_qs(urlsplit(back.pop()).query)
            return AuthorizationCodeResult(
                code=query["code"][0], state=query["state"][0], iss=query.get("iss", [None])[0]
            )

        async with guarded(ToolRegistry([who])) as (url, _):
            provider = OAuthClientProvider(
                server_url=url,
                client_metadata=OAuthClientMetadata(
                    client_name="test", redirect_uris=[AnyUrl("http://127.0.0.1:1/callback")]
                ),
                storage=Stored(),
                redirect_handler=redirect,
                callback_handler=returned,
            )
            async with (
                httpx2.AsyncClient(auth=provider, timeout=SECONDS) as http,
                Client(streamable_http_client(url, http_client=http)) as client,
            ):
                return str((await client.call_tool("who")).content)

    assert "mcp" in asyncio.run(work())


def _is_let_in(tokens: ToolRegistry, *wanted: Any) -> list[int]:
    """Return the status for each token, made by functions of the address and the issuer."""

    async def work() -> list[int]:
        async with guarded(tokens) as (url, issuer), httpx2.AsyncClient(timeout=SECONDS) as http:
            found: list[int] = []
            for make in wanted:
                headers = {"accept": "application/json, text/event-stream"}
                token = make(url, issuer)
                if token is not None:
                    headers["authorization"] = f"Bearer {token}"
                info = {"name": "x", "version": "1"}
                params = {
                    "protocolVersion": "2025-11-25",
                    "capabilities": {},
                    "clientInfo": info,
                }
                message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
                answer = await http.post(url, json=message, headers=headers)
                found.append(answer.status_code)
                if answer.status_code in (401, 403):
                    assert "resource_metadata=" in answer.headers["www-authenticate"]
            return found

    return asyncio.run(work())


def test_only_tokens_that_were_made_for_this_server_are_taken():
    another = rsa.generate_private_key(65537, 2048)

    def forged(url: str, issuer: Issuer) -> str:
        claims = {"iss": issuer.url, "aud": url, "exp": int(time.time()) + 60, "scope": "tools"}
        return jwt.encode(claims, another, "RS256", headers={"kid": "one"})

    def unsigned(url: str, issuer: Issuer) -> str:
        claims = {"iss": issuer.url, "aud": url, "exp": int(time.time()) + 60, "scope": "tools"}
        return jwt.encode(claims, None, "none", headers={"kid": "one"})

    statuses = _is_let_in(
        ToolRegistry([who]),
        lambda url, issuer: issuer.token(aud=url, scope="tools"),
        lambda url, issuer: issuer.token(aud=[url, "https://other.example"], scp=["tools"]),
        lambda url, issuer: None,
        lambda url, issuer: "nonsense",
        lambda url, issuer: issuer.token(aud="https://other.example", scope="tools"),
        lambda url, issuer: issuer.token(scope="tools"),
        lambda url, issuer: issuer.token(aud=url, scope="tools", iss="https://other.example"),
        lambda url, issuer: issuer.token(aud=url, scope="tools", exp=int(time.time()) - 60),
        lambda url, issuer: issuer.token(aud=url, scope="mail"),
        forged,
        unsigned,
    )

    assert statuses == [200, 200, 401, 401, 401, 401, 401, 401, 403, 401, 401]


def test_two_users_of_one_client_have_a_session_each():
    """Also after a restart: what makes their sessions is told whose they are."""
    made: dict[str, Session] = {}

    def new_session(client: str) -> Session:
        return made.setdefault(client, Session())

    async def work() -> None:
        tools = ToolRegistry([who])
        async with guarded(tools, new_session=new_session) as (url, issuer):
            for subject in ("ann", "ben", "ann"):
                token = issuer.token(aud=url, scope="tools", sub=subject)
                headers = {"Authorization": f"Bearer {token}"}
                async with (
                    httpx2.AsyncClient(headers=headers, timeout=SECONDS) as http,
                    Client(streamable_http_client(url, http_client=http)) as client,
                ):
                    await client.call_tool("who")

    asyncio.run(work())

    assert [len(session[ToolInvoked]) for session in made.values()] == [2, 1]


def test_a_user_neither_ends_nor_uses_the_session_of_another():
    @wink.tool(reach="reversible")
    def note(*, context: wink.ToolContext) -> str:
        """Be on record."""
        return context.session_id or ""

    async def work() -> tuple[list[int], list[str]]:
        async with (
            guarded(ToolRegistry([note])) as (url, issuer),
            httpx2.AsyncClient(timeout=SECONDS) as http,
        ):

            async def send(subject: str, session: str = "", http_method: str = "POST", **what: Any):
                token = issuer.token(aud=url, scope="tools", sub=subject)
                headers = {
                    "accept": "application/json, text/event-stream",
                    "authorization": f"Bearer {token}",
                    **({"mcp-session-id": session} if session else {}),
                }
                message = {"jsonrpc": "2.0", **what}
                return await http.request(http_method, url, json=message, headers=headers)

            async def begin(subject: str) -> str:
                info = {"name": "editor", "version": "1"}
                params = {
                    "protocolVersion": "2025-11-25",
                    "capabilities": {},
                    "clientInfo": info,
                }
                answer = await send(subject, id=1, method="initialize", params=params)
                session = answer.headers["mcp-session-id"]
                await send(subject, session, method="notifications/initialized")
                return session

            call = {"id": 2, "method": "tools/call", "params": {"name": "note", "arguments": {}}}
            of_ann = await begin("ann")
            await send("ann", of_ann, **call)
            ended = await send("ben", of_ann, "DELETE")
            used = await send("ben", of_ann, **call)
            # A second window of Ann's: the first is still connected.
            second = await begin("ann")
            texts = [(await send("ann", each, **call)).text for each in (of_ann, second)]
            return [ended.status_code, used.status_code], texts

    statuses, texts = asyncio.run(work())

    assert statuses == [404, 404]
    first, second = (re.findall(r'"text":"(\w+)"', each) for each in texts)
    assert len(first) == len(second) == 1
    assert first != second


def test_tokens_that_cannot_be_verified_now_keep_no_tool_waiting():
    """Anyone can send them, while the authorization server does not answer."""

    async def work() -> None:
        with listen() as silent:
            issuer = f"http://127.0.0.1:{silent.getsockname()[1]}"
            auth = McpAuth(issuer=issuer, url="https://mcp.example/mcp")
            made = jwt.encode({"sub": "x"}, "secret" * 9, "HS256", headers={"kid": "one"})
            waiting = [asyncio.ensure_future(auth.verifier.verify_token(made)) for _ in range(50)]
            await asyncio.to_thread(int)
            assert not any(each.done() for each in waiting)
        async with asyncio.timeout(SECONDS):
            assert await asyncio.gather(*waiting) == [None] * 50

    asyncio.run(work())


def test_a_server_has_a_token_or_oauth_and_not_both():
    auth = McpAuth(issuer="https://issuer.example", url="https://mcp.example/mcp")
    server = McpServer(ToolRegistry([who]))

    for options in ({}, {"token": "x", "auth": auth}):
        with pytest.raises(ValueError, match="needs a token, or OAuth, and not both"):
            http_app(server, host="127.0.0.1", **options)
    with pytest.raises(ValueError, match="https"):
        McpAuth(issuer="http://issuer.example", url="https://mcp.example/mcp")
    with pytest.raises(ValueError, match="absolute URL"):
        McpAuth(issuer="issuer.example", url="https://mcp.example/mcp")
