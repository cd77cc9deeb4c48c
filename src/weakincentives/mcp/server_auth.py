"""Who may use a server over HTTP: tokens of an OAuth 2.1 authorization server, made for it."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from weakincentives.core.logs import get_logger
from weakincentives.errors import MissingExtra

try:
    import jwt
    from mcp.server.auth.provider import AccessToken, TokenVerifier
    from mcp.server.auth.settings import AuthSettings
    from pydantic import AnyHttpUrl
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

if TYPE_CHECKING:
    from jwt import PyJWKClient

_logger = get_logger(__name__)

_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
"""Asymmetric ones: the server holds no secret with which a token could be made."""
_PATIENCE = 10
_THREADS = 4
_MOST_METADATA = 1 << 20
_WELL_KNOWN = ("oauth-authorization-server", "openid-configuration")


@dataclass(frozen=True, kw_only=True)
class McpAuth:
    """OAuth for a server over HTTP, which is a resource server: it verifies tokens, and makes none.

    Clients find the authorization server in the server's protected-resource metadata.
    """

    issuer: str
    """The address of the authorization server."""
    url: str
    """The address of the MCP server as clients see it: what a token must have been made for."""
    scopes: Sequence[str] = ()
    """What a token must allow."""
    verifier: TokenVerifier = field(default=None, repr=False)  # type: ignore[assignment]
    """Says whom a token is for; by default for JSON web tokens, signed with the issuer's keys."""

    def __post_init__(self) -> None:
        for name, address in (("issuer", self.issuer), ("url", self.url)):
            if not urlsplit(address).hostname:
                raise ValueError(f"{name} must be an absolute URL, got {address!r}")
        issuer = urlsplit(self.issuer)
        if issuer.scheme != "https" and issuer.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(f"issuer must be an https URL, got {self.issuer!r}")
        if self.verifier is None:  # pyright: ignore[reportUnnecessaryComparison]
            object.__setattr__(self, "verifier", JwtVerifier(self.issuer, self.url))

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    def settings(self) -> AuthSettings:
        return AuthSettings(
            issuer_url=AnyHttpUrl(self.issuer),
            resource_server_url=AnyHttpUrl(self.url),
            required_scopes=list(self.scopes) or None,
            validate_token_resource=True,
        )


class JwtVerifier(TokenVerifier):
    """Verifies JSON web tokens with the keys that an authorization server publishes."""

    def __init__(self, issuer: str, audience: str) -> None:
        self._issuer, self._audience = issuer, audience
        # Threads of its own: anyone can send tokens, and while the issuer does not answer, each of
        # them may wait. The tools of those who are let in have theirs.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="wink-oauth")

    async def verify_token(self, token: str) -> AccessToken | None:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._verified, token)
        except (jwt.PyJWTError, OSError, ValueError) as error:
            _logger.info("refused a token: %s", error)
            return None

    def _verified(self, token: str) -> AccessToken:
        key = self._keys.get_signing_key_from_jwt(token)
        claims: dict[str, Any] = jwt.decode(
            token,
            key.key,
            algorithms=list(_ALGORITHMS),
            audience=[self._audience, f"{self._audience}/"],
            issuer=[self._issuer, f"{self._issuer}/"],
            options={"require": ["exp", "iss", "aud"]},
        )
        scopes = claims.get("scope") or claims.get("scp") or ()
        return AccessToken(
            token=token,
            client_id=str(claims.get("client_id") or claims.get("azp") or claims.get("sub") or ""),
            scopes=scopes.split() if isinstance(scopes, str) else list(scopes),
            expires_at=int(claims["exp"]),
            resource=self._audience,
            subject=claims.get("sub"),
            claims=claims,
        )

    @cached_property
    def _keys(self) -> PyJWKClient:
        return jwt.PyJWKClient(self._metadata()["jwks_uri"], timeout=_PATIENCE)

    def _metadata(self) -> dict[str, Any]:
        """Return what the authorization server says of itself, from either well-known place."""
        parts = urlsplit(self._issuer)
        path = parts.path.rstrip("/")
        places = [parts._replace(path=f"/.well-known/{name}{path}") for name in _WELL_KNOWN]
        if path:
            places.append(parts._replace(path=f"{path}/.well-known/{_WELL_KNOWN[1]}"))
        for place in places:
            try:
                with urllib.request.urlopen(place.geturl(), timeout=_PATIENCE) as answer:
                    found = json.loads(answer.read(_MOST_METADATA))
            except OSError:
                continue
            same = str(found.get("issuer", "")).rstrip("/") == self._issuer.rstrip("/")
            if same and found.get("jwks_uri"):
                return found
        raise ValueError(f"{self._issuer} publishes no metadata that names its keys")
