"""Signing in to MCP servers: the SDK's OAuth, with the user's browser and private storage.

The SDK finds the authorization server, registers, and gets tokens. Here are the parts around it:
the browser and the page it returns to, the file of the tokens, and clocks that stop meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, urlsplit

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.programs import open_link
from weakincentives.core.state import state_directory
from weakincentives.core.text import harmless
from weakincentives.errors import McpServerError, MissingExtra

try:
    import httpx2
    from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider, OAuthFlowError
    from mcp.shared.auth import (
        OAuthClientInformationFull,
        OAuthClientMetadata,
        OAuthMetadata,
        OAuthToken,
        ProtectedResourceMetadata,
    )
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

if TYPE_CHECKING:
    from mcp.client.auth.oauth2 import OAuthContext

_PATH = "/callback"
_EARLY = 30.0
"""Seconds before its end that a stored token counts as expired."""
_MAX_HEAD = 64_000


def open_in_browser(url: str) -> None:
    """Open a page in the user's browser, and print its address for those who have none here."""
    sys.stderr.write(f"Sign in at {harmless(url)}\n")
    open_link(url)


class TokenFile:
    """Tokens and the registration of a client in a file that only this user can read.

    A ``TokenStorage`` for the OAuth providers of the ``mcp`` package.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._context: OAuthContext | None = None

    @classmethod
    def for_server(cls, url: str, client_id: str = "") -> TokenFile:
        """Return the file for a server in the user's state directory, where no agent can read."""
        directory = state_directory() / "mcp"
        directory.mkdir(mode=0o700, exist_ok=True)
        mark = hashlib.sha256(f"{url}\n{client_id}".encode()).hexdigest()[:32]
        return cls(directory / f"{mark}.json")

    def remember(self, context: OAuthContext) -> None:
        """Also keep where the tokens are from: to refresh them after a restart."""
        self._context = context
        stored = self._read()
        with suppress(ValueError):
            if "issued_by" in stored:
                context.oauth_metadata = OAuthMetadata.model_validate(stored["issued_by"])
            if "issued_for" in stored:
                context.protected_resource_metadata = ProtectedResourceMetadata.model_validate(
                    stored["issued_for"]
                )
                servers = context.protected_resource_metadata.authorization_servers
                context.auth_server_url = str(servers[0])

    def forget(self) -> None:
        """Delete the tokens and the registration: the next use signs in again."""
        self.path.unlink(missing_ok=True)

    async def get_tokens(self) -> OAuthToken | None:
        stored = self._read()
        try:
            tokens = OAuthToken.model_validate(stored["tokens"])
        except (KeyError, ValueError):
            return None
        if SYSTEM_CLOCK.time() > stored.get("expires_at", float("inf")) - _EARLY:
            tokens.access_token = ""  # so that the provider refreshes it before the first request
        return tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        given = {"tokens": tokens.model_dump(mode="json", exclude_none=True)}
        left = tokens.expires_in
        self._write(given | ({} if left is None else {"expires_at": SYSTEM_CLOCK.time() + left}))

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client_info()

    def client_info(self) -> OAuthClientInformationFull | None:
        """Return the registration of the client, if there is one."""
        try:
            return OAuthClientInformationFull.model_validate(self._read()["client"])
        except (KeyError, ValueError):
            return None

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._write({"client": client_info.model_dump(mode="json", exclude_none=True)})

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    def _write(self, changed: dict[str, Any]) -> None:
        stored = self._read()
        if "tokens" in changed:
            stored.pop("expires_at", None)
        stored |= changed
        context = self._context
        for name, found in (
            ("issued_by", context and context.oauth_metadata),
            ("issued_for", context and context.protected_resource_metadata),
        ):
            if found is not None:
                stored[name] = found.model_dump(mode="json", exclude_none=True)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(stored, file)
        made.replace(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuth:
    """How to sign in to a server over HTTP with the user's browser.

    Nothing needs to be given where the authorization server registers clients by itself.
    """

    client_id: str = ""
    """Of a client that you have registered beforehand."""
    client_secret: str = field(default="", repr=False)
    issuer: str = ""
    """The authorization server that the client is registered with. Nobody else gets its secret."""
    client_metadata_url: str = ""
    """An https URL that describes the client, for servers that accept one as its id."""
    redirect_port: int = 0
    """The port on this machine that the browser returns to; 0 is any free one."""
    open_url: Callable[[str], object] = open_in_browser
    """Shows the user a page to sign in at."""
    tokens: TokenFile | None = None
    """By default a file in the user's state directory."""
    timeout: float = 300.0
    """Seconds that the user has to sign in."""

    def __post_init__(self) -> None:
        if self.client_secret and not (self.client_id and self.issuer):
            raise ValueError(
                "a client_secret needs its client_id, and the issuer that it may be sent to"
            )

    def provider(self, url: str) -> OAuthClientProvider:
        """Return a provider of the ``mcp`` package for a server."""
        storage = self.tokens or TokenFile.for_server(url, self.client_id)
        port = self.redirect_port or _port_of(storage.client_info()) or _free_port()
        back = _Redirect(port, self.timeout)
        redirect_uris: Any = [back.url]
        metadata = OAuthClientMetadata(client_name="WINK", redirect_uris=redirect_uris)
        if self.client_id:
            fixed = OAuthClientInformationFull(
                client_id=self.client_id,
                client_secret=self.client_secret or None,
                token_endpoint_auth_method="client_secret_basic" if self.client_secret else "none",
                redirect_uris=redirect_uris,
                issuer=self.issuer or None,
            )
            storage = _Registered(storage, fixed)

        async def go(page: str) -> None:
            await back.listen(page)
            await asyncio.to_thread(self.open_url, page)

        provider = OAuthClientProvider(
            url,
            metadata,
            storage,
            redirect_handler=go,
            callback_handler=back.result,
            client_metadata_url=self.client_metadata_url or None,
        )
        storage.remember(provider.context)
        return provider


class _Registered(TokenFile):
    """The tokens of a client that was registered beforehand."""

    def __init__(self, file: TokenFile, client: OAuthClientInformationFull) -> None:
        super().__init__(file.path)
        self._client = client

    def client_info(self) -> OAuthClientInformationFull | None:
        return self._client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        raise OAuthFlowError(
            f"the client {self._client.client_id} is registered with {self._client.issuer}, but "
            f"the server names another authorization server: {client_info.issuer}"
        )


class _Redirect:
    """The page of this machine that the browser returns to after signing in."""

    def __init__(self, port: int, patience: float) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}{_PATH}"
        self._patience = patience
        self._state = ""
        self._server: asyncio.Server | None = None
        self._found: asyncio.Future[AuthorizationCodeResult] | None = None

    async def listen(self, page: str) -> None:
        """Wait for the browser from now on, to return from this page."""
        await self._end()
        self._state = "".join(parse_qs(urlsplit(page).query).get("state", ()))
        self._found = asyncio.get_running_loop().create_future()
        try:
            self._server = await asyncio.start_server(self._answer, "127.0.0.1", self.port)
        except OSError as error:
            raise OAuthFlowError(
                f"port {self.port}, which the browser returns to, is in use: {error.strerror}"
            ) from error

    async def result(self) -> AuthorizationCodeResult:
        assert self._found is not None
        try:
            async with asyncio.timeout(self._patience):
                return await self._found
        except TimeoutError:
            raise OAuthFlowError(f"nobody signed in within {self._patience:g} s") from None
        finally:
            await self._end()

    async def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            place = urlsplit(head.split(b" ", 2)[1].decode("latin-1"))
            given = {name: values[0] for name, values in parse_qs(place.query).items()}
            status, text = 404, "Not found."
            # Another page or program cannot know the state: what it sends is not an answer.
            if place.path == _PATH and self._state and given.get("state") == self._state:
                status, text = 200, self._take(given)
            body = text.encode()
            writer.write(
                f"HTTP/1.1 {status} X\r\nContent-Type: text/plain; charset=utf-8\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        writer.close()

    def _take(self, given: dict[str, str]) -> str:
        found = self._found
        assert found is not None
        if found.done():
            return "You have signed in already."
        if "code" not in given:
            reason = given.get("error_description") or given.get("error") or "no reason was given"
            found.set_exception(OAuthFlowError(f"the sign-in was refused: {reason[:300]}"))
            return "The sign-in was refused. You can close this page."
        found.set_result(
            AuthorizationCodeResult(code=given["code"], state=given["state"], iss=given.get("iss"))
        )
        return "You have signed in. You can close this page."


def _port_of(client: OAuthClientInformationFull | None) -> int:
    uris = [] if client is None else client.redirect_uris or []
    return next((uri.port for uri in uris if uri.host == "127.0.0.1" and uri.port), 0)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class PatientAuth(httpx2.Auth):
    """Another authentication; while it waits for the user, the clocks of calls stop."""

    requires_response_body = True

    def __init__(
        self,
        inner: httpx2.Auth,
        waiting: Callable[[], AbstractContextManager[None]],
        failed: Callable[[Exception], object],
    ) -> None:
        self._inner, self._waiting, self._failed = inner, waiting, failed

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        flow = self._inner.async_auth_flow(request)
        response: httpx2.Response | None = None
        try:
            while True:
                # What the flow does between two requests is to ask the user, or next to nothing.
                with self._waiting():
                    outgoing = await (
                        flow.__anext__() if response is None else flow.asend(response)
                    )
                response = yield outgoing
        except StopAsyncIteration:
            return
        except Exception as error:
            self._failed(error)
            raise
        finally:
            await flow.aclose()


def as_auth(auth: object, url: str) -> httpx2.Auth:
    """Return how to authenticate at a server."""
    if isinstance(auth, OAuth):
        return auth.provider(url)
    if isinstance(auth, httpx2.Auth):
        return auth
    raise McpServerError(
        f"auth takes an OAuth, a provider of the mcp package, or an httpx2.Auth; got {auth!r}"
    )
