"""Our client, as the conformance suite drives it: the suite starts this with the server's URL.

It does what an agent would: a registry with an ``McpToolsSection`` calls the server's tools. What
a scenario wants to be called, and with which account, is the suite's description of the scenario.
"""

# ruff: noqa: E402
from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

# The suite starts all clients at once. One after the other they keep their time limits, also on a
# machine with few processors: so this comes before all that takes time.
SLOT = (Path(tempfile.gettempdir()) / f"wink-conformance-{os.getuid()}-{os.getpid() % 3}").open("w")
fcntl.flock(SLOT, fcntl.LOCK_EX)

import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import httpx2
from mcp.client.auth.extensions.client_credentials import (
    ClientCredentialsOAuthProvider,
    PrivateKeyJWTOAuthProvider,
    SignedJWTParameters,
)
from mcp.client.auth.extensions.identity_assertion import IdentityAssertionOAuthProvider

import weakincentives as wink
from weakincentives.adapters import ScriptedAdapter
from weakincentives.mcp import (
    HttpServer,
    McpPromptSection,
    McpResourcesSection,
    McpToolsSection,
    OAuth,
    TokenFile,
)
from weakincentives.prompt.approval import Approval, ApprovalRequest

SCENARIO = os.environ["MCP_CONFORMANCE_SCENARIO"]
GIVEN: dict[str, Any] = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
URL = sys.argv[-1]
SAMPLES = {"string": "x", "number": 1.5, "integer": 1, "boolean": True}
CLIENT_DOCUMENT = "https://conformance-test.local/client-metadata.json"


def browse(page: str) -> None:
    """Sign in as a browser would: the suite's server consents and sends us back at once."""
    httpx2.get(page, follow_redirects=True).raise_for_status()


def auth(tokens: TokenFile) -> Any:
    """Return how this scenario wants us to sign in."""
    client_id, secret = GIVEN.get("client_id", ""), GIVEN.get("client_secret", "")
    match SCENARIO:
        case "auth/client-credentials-basic":
            return ClientCredentialsOAuthProvider(URL, tokens, client_id, secret)
        case "auth/client-credentials-jwt":
            signed = SignedJWTParameters(
                issuer=client_id,
                subject=client_id,
                signing_key=GIVEN["private_key_pem"],
                signing_algorithm=GIVEN["signing_algorithm"],
            )
            made = signed.create_assertion_provider()
            return PrivateKeyJWTOAuthProvider(URL, tokens, client_id, made)
        case "auth/enterprise-managed-authorization":
            return IdentityAssertionOAuthProvider(
                URL,
                tokens,
                client_id,
                secret,
                issuer(),
                granted,
                token_endpoint_auth_method="client_secret_basic",
            )
        case "auth/pre-registration":
            return OAuth(
                client_id=client_id,
                client_secret=secret,
                issuer=GIVEN["issuer"],
                open_url=browse,
                tokens=tokens,
            )
        case _:
            return OAuth(client_metadata_url=CLIENT_DOCUMENT, open_url=browse, tokens=tokens)


def issuer() -> str:
    """Return the authorization server, which an enterprise would configure."""
    place = httpx2.URL(URL)
    found = httpx2.get(place.copy_with(path=f"/.well-known/oauth-protected-resource{place.path}"))
    return found.json()["authorization_servers"][0]


async def granted(audience: str, resource: str) -> str:
    """Exchange the user's login for a grant, at the identity provider."""
    kinds = "urn:ietf:params:oauth:token-type:"
    async with httpx2.AsyncClient() as client:
        answer = await client.post(
            GIVEN["idp_token_endpoint"],
            data={
                "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
                "requested_token_type": f"{kinds}id-jag",
                "subject_token_type": f"{kinds}id_token",
                "subject_token": GIVEN["idp_id_token"],
                "client_id": GIVEN["idp_client_id"],
                "audience": audience,
                "resource": resource,
            },
        )
    return answer.raise_for_status().json()["access_token"]


def approve(request: ApprovalRequest) -> Approval:
    """Answer a server's question with its own defaults."""
    return Approval(True, "the suite")


def calls(section: McpToolsSection) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what the scenario wants to be called: our name of the tool, and the arguments."""
    if "toolCalls" in GIVEN:
        for call in GIVEN["toolCalls"]:
            yield call["name"], call["arguments"]
        return
    schemas: dict[str, Any] = {tool.name: tool.input_schema for tool in section.tools}
    if SCENARIO == "tools_call":
        yield "add_numbers", {"a": 5, "b": 3}
    elif SCENARIO == "json-schema-2020-12-preservation":
        (echo,) = (name for name in schemas if "echo" in name)
        (focal,) = (name for name in schemas if "echo" not in name)
        yield echo, {"schema": schemas[focal]}
    else:
        for name, schema in schemas.items():
            needed = schema.get("required", ())
            yield name, {each: SAMPLES[schema["properties"][each]["type"]] for each in needed}


def main() -> None:
    # The suite gives no issuer for its service accounts; the SDK wants one in a later version.
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        server = HttpServer(URL, auth=auth(TokenFile(Path(directory) / "tokens.json")))
        with (
            McpToolsSection(
                server=server, ask=approve, model=ScriptedAdapter(["."]), roots=[directory]
            ) as section,
            wink.ToolRegistry.from_section(section) as tools,
        ):
            for name, arguments in calls(section):
                result = tools.execute(name, arguments)
                sys.stdout.write(f"{name}: {result.render()[:500]}\n")
            if SCENARIO == "http-standard-headers":
                about = section.connection.about()
                McpResourcesSection(server=section, include=[about.resources[0][0]])
                McpPromptSection(server=section, prompt=about.prompts[0][0].partition("(")[0])


main()
