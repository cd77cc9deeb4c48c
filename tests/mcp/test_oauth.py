from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weakincentives as wink
from weakincentives.errors import McpServerError
from weakincentives.mcp import HttpServer, McpToolsSection, OAuth, TokenFile

httpx2 = pytest.importorskip("httpx2")
pytest.importorskip("mcp")

SERVER = Path(__file__).with_name("authorization_server.py")


class Guarded:
    """A server behind an authorization server, as programs of their own."""

    def __init__(self, log: Path, lifetime: int = 3600, *options: str) -> None:
        command = [sys.executable, str(SERVER), str(log), str(lifetime), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        places = json.loads(self.process.stdout.readline())
        self.url, self.issuer, self._log = places["url"], places["issuer"], log
        self._before = 0

    @property
    def _noted(self) -> list[str]:
        return self._log.read_text().split() if self._log.exists() else []

    def begin(self) -> None:
        """Forget what was granted to another test."""
        self._before = len(self._noted)

    @property
    def granted(self) -> list[str]:
        return self._noted[self._before :]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    server = Guarded(tmp_path_factory.mktemp("guarded") / "log")
    yield server
    server.end()


@pytest.fixture
def guarded(shared: Guarded) -> Guarded:
    shared.begin()
    return shared


def browse(page: str) -> None:
    """Do as a browser: the user consents at once, and is sent back to us."""
    httpx2.get(page, follow_redirects=True).raise_for_status()


def signing_in(tokens: Path, **options: Any) -> OAuth:
    return OAuth(tokens=TokenFile(tokens), open_url=options.pop("open_url", browse), **options)


def add(url: str, auth: object) -> wink.ToolResult[Any]:
    server = HttpServer(url, auth=auth)  # type: ignore[arg-type]
    with (
        McpToolsSection(server=server) as section,
        wink.ToolRegistry.from_section(section) as tools,
    ):
        return tools.execute("add", {"a": 1, "b": 2})


def test_a_user_signs_in_once_and_the_tokens_are_private(guarded: Guarded, tmp_path: Path):
    tokens = tmp_path / "private" / "tokens.json"

    assert add(guarded.url, signing_in(tokens)).render() == "3"
    assert guarded.granted == ["registered", "authorize", "code"]
    assert stat.S_IMODE(tokens.stat().st_mode) == 0o600
    assert stat.S_IMODE(tokens.parent.stat().st_mode) == 0o700

    # Another program finds the tokens: nobody is asked.
    assert add(guarded.url, signing_in(tokens, open_url=pytest.fail)).render() == "3"
    assert guarded.granted == ["registered", "authorize", "code"]


def test_a_token_that_has_expired_is_refreshed_without_the_user(guarded: Guarded, tmp_path: Path):
    """Also in another process, and where the authorization server is on another machine."""
    tokens = tmp_path / "tokens.json"
    assert add(guarded.url, signing_in(tokens)).success
    stored = json.loads(tokens.read_text())
    tokens.write_text(json.dumps({**stored, "expires_at": time.time() - 1}))

    assert add(guarded.url, signing_in(tokens, open_url=pytest.fail)).render() == "3"
    assert guarded.granted == ["registered", "authorize", "code", "refresh"]
    assert json.loads(tokens.read_text())["tokens"] != stored["tokens"]


def test_without_a_sign_in_the_server_cannot_be_used(guarded: Guarded):
    with pytest.raises(McpServerError, match="401 Unauthorized: check the headers"):
        McpToolsSection(server=guarded.url)


def test_a_user_who_refuses_is_no_mystery(tmp_path: Path):
    server = Guarded(tmp_path / "log", 3600, "refuse")
    try:
        with pytest.raises(McpServerError, match="the sign-in was refused: access_denied"):
            add(server.url, signing_in(tmp_path / "tokens.json"))
    finally:
        server.end()
    assert server.granted == ["registered", "authorize"]


def test_a_user_who_does_not_sign_in_is_waited_for_as_long_as_was_said(
    guarded: Guarded, tmp_path: Path
):
    patient = signing_in(tmp_path / "tokens.json", open_url=str, timeout=0.05)
    with pytest.raises(McpServerError, match=r"nobody signed in within 0\.05 s"):
        add(guarded.url, patient)


def test_only_the_page_that_we_opened_can_send_the_answer(guarded: Guarded, tmp_path: Path):
    """Another program of this machine can reach our port, but does not know the state."""
    seen: list[int] = []

    def disturbed(page: str) -> None:
        back = httpx2.URL(page).params["redirect_uri"]
        seen.append(httpx2.get(f"{back}?code=forged&state=forged").status_code)
        seen.append(httpx2.get(f"{back}?error=access_denied").status_code)
        browse(page)

    assert add(guarded.url, signing_in(tmp_path / "tokens.json", open_url=disturbed)).success
    assert seen == [404, 404]


def test_a_secret_is_only_for_the_issuer_that_it_is_registered_with(
    guarded: Guarded, tmp_path: Path
):
    with pytest.raises(ValueError, match="the issuer that it may be sent to"):
        OAuth(client_id="me", client_secret="secret")

    elsewhere = signing_in(
        tmp_path / "tokens.json",
        client_id="me",
        client_secret="secret",
        issuer="https://login.example.com",
    )
    with pytest.raises(McpServerError, match="names another authorization server"):
        add(guarded.url, elsewhere)
    assert "authorize" not in guarded.granted


def test_what_is_no_way_to_sign_in_is_refused():
    with pytest.raises(McpServerError, match="auth takes an OAuth, a provider"):
        McpToolsSection(server=HttpServer("http://127.0.0.1:9/mcp", auth="secret"))  # type: ignore[arg-type]
    assert "secret" not in repr(OAuth(client_id="a", client_secret="secret", issuer="https://b"))
