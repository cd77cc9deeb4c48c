"""`wink mcp install` and `uninstall`: our server in the settings of MCP clients."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from commands import Wink

PLACES = {
    "claude-code": ("project/.mcp.json", "mcpServers", "."),
    "claude-desktop": ("home/config/Claude/claude_desktop_config.json", "mcpServers", None),
    "cursor": ("project/.cursor/mcp.json", "mcpServers", "${workspaceFolder}"),
    "vscode": ("project/.vscode/mcp.json", "servers", "${workspaceFolder}"),
    "zed": ("home/config/zed/settings.json", "context_servers", None),
}


@pytest.fixture
def wink(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Wink:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / "config"))
    return Wink(capfd, project)


@pytest.mark.parametrize("client", PLACES)
def test_the_settings_of_a_client_get_our_server_and_lose_it_again(
    client: str, wink: Wink, tmp_path: Path
):
    path, key, place = PLACES[client]
    settings = tmp_path / path

    shown = wink("mcp", "install", client, "--print")
    assert shown.code == 0
    assert f"+++ {settings}" in shown.out
    assert not settings.exists()

    done = wink("mcp", "install", client)
    assert f"wink mcp uninstall {client}" in done.out
    entry = json.loads(settings.read_text())[key]["wink"]
    assert Path(entry["command"]).is_absolute()
    assert entry["args"] == ["mcp", "--workspace", place or str(wink.directory)]

    assert "has this server already" in wink("mcp", "install", client).out
    assert "--- " in wink("mcp", "uninstall", client, "--print").out
    assert wink("mcp", "uninstall", client).code == 0
    assert not settings.exists()
    assert "has no server of wink" in wink("mcp", "uninstall", client).out


def test_other_servers_and_comments_stay_and_the_earlier_file_is_kept(wink: Wink, tmp_path: Path):
    settings = tmp_path / "home" / "config" / "zed" / "settings.json"
    settings.parent.mkdir(parents=True)
    before = '// mine\n{\n  "context_servers": {"other": {"command": "x"}}\n}\n'
    settings.write_text(before)

    done = wink("mcp", "install", "zed")

    assert settings.read_text().startswith("// mine\n")
    (kept,) = settings.parent.glob("*.before-wink-*")
    assert kept.read_text() == before
    assert str(kept) in done.out
    assert wink("mcp", "uninstall", "zed").code == 0
    assert '"other": {"command": "x"}' in settings.read_text()
    assert "wink" not in settings.read_text()


def test_settings_that_are_damaged_and_unknown_clients_are_refused(wink: Wink):
    settings = wink.directory / ".mcp.json"
    settings.write_text('{"mcpServers": [')
    refused = wink("mcp", "install", "claude-code")
    assert (refused.code, refused.out) == (2, "")
    assert "cannot be changed: it is damaged" in refused.err
    assert settings.read_text() == '{"mcpServers": ['

    unknown = wink("mcp", "install", "claude-cod")
    assert "unknown client 'claude-cod'; did you mean claude-code?" in unknown.err


@pytest.mark.heavy
def test_a_client_that_reads_its_settings_can_use_the_server(wink: Wink):
    pytest.importorskip("mcp")
    from mcp import Client, StdioServerParameters

    assert wink("mcp", "install", "claude-code").code == 0
    entry: dict[str, Any] = json.loads((wink.directory / ".mcp.json").read_text())
    server = entry["mcpServers"]["wink"]

    async def use() -> None:
        started = StdioServerParameters(**server, cwd=wink.directory)
        async with Client(started) as client:
            await client.call_tool("write_file", {"path": "a.txt", "content": "hello\n"})

    asyncio.run(use())
    assert (wink.directory / "a.txt").read_text() == "hello\n"
