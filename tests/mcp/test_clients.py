"""The snippets of docs/mcp.md, as they stand there, in the clients that run here."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import weakincentives as wink
from weakincentives.adapters import calls, says
from weakincentives.mcp import HttpServer, McpToolsSection, StdioServer

pytest.importorskip("mcp")
pytest.importorskip("typer")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mcp.md"
BIN = Path(sys.executable).parent
PATH = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
TOKEN = "a-token-for-this-test"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    (place / "a.txt").write_text("hello\n")
    return place


def snippets() -> dict[str, dict[str, Any]]:
    """Return the settings of the page by the heading they stand under."""
    found: dict[str, dict[str, Any]] = {}
    heading = ""
    for part in re.split(r"(?m)^(### .*|```json\n[\s\S]*?^```)$", PAGE.read_text()):
        if part.startswith("### "):
            heading = part[4:]
        elif part.startswith("```json\n"):
            found[heading] = json.loads(part.removeprefix("```json\n").removesuffix("```"))
    return found


def filled_in(settings: dict[str, Any], project: Path) -> dict[str, Any]:
    """Return settings with what a user, or the client, puts in."""
    text = json.dumps(settings)
    for placeholder in ("/path/to/project", "${workspaceFolder}"):
        text = text.replace(placeholder, str(project))
    return json.loads(text)


@pytest.mark.parametrize(
    ("client", "key", "fields"),
    [
        ("Claude Code", "mcpServers", {"command", "args"}),
        ("Claude Desktop", "mcpServers", {"command", "args"}),
        ("Cursor", "mcpServers", {"type", "command", "args"}),
        ("VS Code", "servers", {"type", "command", "args"}),
        ("Zed", "context_servers", {"command", "args", "env"}),
        ("One server for several clients", "mcpServers", {"type", "url", "headers"}),
    ],
)
def test_each_client_finds_the_keys_that_it_looks_for(client: str, key: str, fields: set[str]):
    settings = snippets()[client]

    assert settings.keys() == {key}
    assert settings[key]["wink"].keys() == fields
    assert settings[key]["wink"].get("type") in (None, "stdio", "http")


@pytest.mark.heavy
def test_the_command_of_every_snippet_is_one_and_serves_our_tools(project: Path):
    """All of them say the same in the end, so it is run once."""
    commands = set()
    for settings in snippets().values():
        (servers,) = filled_in(settings, project).values()
        if "command" in servers["wink"]:
            args = [str(project) if arg == "." else arg for arg in servers["wink"]["args"]]
            commands.add((servers["wink"]["command"], *args))
    assert commands == {("wink", "mcp", "--workspace", str(project))}

    assert asyncio.run(_written_and_undone(commands.pop(), project)) == [True, False]


async def _written_and_undone(command: tuple[str, ...], project: Path) -> list[bool]:
    from mcp import Client, StdioServerParameters

    seen: list[bool] = []
    server = StdioServerParameters(command=command[0], args=list(command[1:]), env=PATH)
    # The library looks the program up in its own environment.
    server.command = str(BIN / server.command)
    async with Client(server) as client:
        result = await client.call_tool("write_file", {"path": "new.txt", "content": "x\n"})
        assert not result.is_error
        seen.append((project / "new.txt").exists())
        await client.call_tool("undo")
        seen.append((project / "new.txt").exists())
    return seen


@pytest.mark.heavy
@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_claude_code_uses_our_tools_with_the_settings_of_the_page(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
):
    sdk = pytest.importorskip("claude_agent_sdk", reason="claude-agent-sdk is not installed")
    monkeypatch.syspath_prepend(ROOT / "tests" / "adapters")
    from messages_server import serving

    turns = [
        calls(("write_file", {"path": "new.txt", "content": "by a model\n"})),
        calls(("delete_file", {"path": "missing.txt"})),
        calls(("undo", {})),
        says("Done."),
    ]
    with ExitStack() as stack:
        heading = "Claude Code"
        if transport == "http":
            heading = "One server for several clients"
            port = stack.enter_context(served_over_http(project))
        settings = json.dumps(snippets()[heading])
        if transport == "http":
            settings = settings.replace("8765", str(port))
        (project / ".mcp.json").write_text(settings)
        model = stack.enter_context(serving(turns))
        done = subprocess.run(
            [
                Path(sdk.__file__).parent / "_bundled" / "claude",
                *("-p", "Work.", "--model", "claude-sonnet-5"),
                *("--mcp-config", ".mcp.json", "--strict-mcp-config"),
                *("--disallowedTools", "Write", "Edit", "NotebookEdit", "Bash"),
                *("--allowedTools", "mcp__wink"),
            ],
            cwd=project,
            env={
                **PATH,
                **model.environment,
                "HOME": str(tmp_path),
                "WINK_MCP_TOKEN": TOKEN,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "ENABLE_TOOL_SEARCH": "false",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        wrote, failed, undid = (json.dumps(block) for block in model.tool_results())
        offered = {tool["name"] for tool in model.requests[-1]["tools"]}

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Done."
    assert "new.txt" in wrote
    assert "missing.txt" in failed
    assert '"is_error": true' in failed
    assert "write_file" in undid
    assert sorted(path.name for path in project.iterdir()) == [".mcp.json", "a.txt"]
    assert "Write" not in offered
    assert "mcp__wink__undo" in offered


@contextmanager
def served_over_http(project: Path) -> Iterator[int]:
    """Run the command of the page, on a port that is free."""
    command = [BIN / "wink", "mcp", "--workspace", project, "--http", "--port", "0"]
    server = subprocess.Popen(
        command, env={**os.environ, "WINK_MCP_TOKEN": TOKEN}, stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    try:
        said = ""
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)/mcp", said)):
            line = server.stderr.readline()
            assert line, f"it did not start: {said}"
            said += line
        yield int(found[1])
    finally:
        server.terminate()
        server.communicate(timeout=240)


@pytest.mark.heavy
def test_several_clients_share_one_server_over_http(project: Path):
    settings = snippets()["One server for several clients"]["mcpServers"]["wink"]
    with served_over_http(project) as port:
        url = settings["url"].replace("8765", str(port))
        headers = {
            name: value.replace("${WINK_MCP_TOKEN}", TOKEN)
            for name, value in settings["headers"].items()
        }
        asyncio.run(_two_clients(url, headers, project))

        # Our own section is a client, too.
        with McpToolsSection(server=HttpServer(url, headers), allow=["read_file"]) as section:
            result = wink.ToolRegistry(section.tools).execute("read_file", {"path": "b.txt"})
            assert "from the second" in result.render()


async def _two_clients(url: str, headers: dict[str, str], project: Path) -> None:
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    async with (
        httpx2.AsyncClient(headers=headers, timeout=240) as http,
        Client(streamable_http_client(url, http_client=http)) as first,
        Client(streamable_http_client(url, http_client=http)) as second,
    ):
        for client, path, content in ((first, "c.txt", "first"), (second, "b.txt", "second")):
            arguments = {"path": path, "content": f"from the {content}\n"}
            assert not (await client.call_tool("write_file", arguments)).is_error
    assert (project / "b.txt").read_text() == "from the second\n"
    assert (project / "c.txt").read_text() == "from the first\n"


@pytest.mark.heavy
def test_our_server_through_our_own_section(project: Path):
    """A transaction around a transaction: what is undone here is undone there."""
    server = StdioServer("wink", ["mcp", "--workspace", str(project)], env=PATH)
    with McpToolsSection(server=server, prefix="their_") as section:
        registry = wink.ToolRegistry(section.tools)
        written = registry.execute("their_write_file", {"path": "new.txt", "content": "x\n"})
        refused = registry.execute("their_read_file", {"path": "missing.txt"})

        assert written.success
        assert (project / "new.txt").read_text() == "x\n"
        assert "missing.txt" in refused.message
        assert not refused.success
        assert registry.execute("their_undo").success
        assert not (project / "new.txt").exists()
