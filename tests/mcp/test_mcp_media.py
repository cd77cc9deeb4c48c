"""Pictures and files over MCP: our server, and servers of others."""

from __future__ import annotations

import asyncio
import base64
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import weakincentives as wink
from weakincentives import Media
from weakincentives.adapters import ScriptedAdapter, calls, says
from weakincentives.prompt import ToolResult

pytest.importorskip("mcp")

from mcp import Client

from weakincentives.mcp import McpServer, McpToolsSection

PNG = b"\x89PNG\r\n\x1a\n\xfb\xff\xfe\rIHDR"


@dataclass(frozen=True)
class Picture:
    title: str
    image: Media


@wink.tool(reach="read")
def everything() -> list[Media]:
    """Return a picture, sound and a file."""
    return [
        Media(PNG, name="a.png"),
        Media(b"ID3...", name="b.mp3"),
        Media(b"PK\3\4", "application/zip", "c d.zip"),
    ]


@wink.tool(reach="read")
def picture(fails: bool = False) -> ToolResult[Picture]:
    """Return a picture in a value, or fail with it."""
    return ToolResult("Drawn", Picture("Sea", Media(PNG)), success=not fails)


def content_of(name: str, **arguments: Any) -> tuple[list[dict[str, Any]], Any]:
    section = wink.MarkdownSection(title="T", template="t", tools=[everything, picture])
    server = McpServer(section)

    async def run() -> Any:
        async with Client(server.protocol) as client:
            await client.list_tools()  # whose schemas the client checks answers against
            return await client.call_tool(name, arguments)

    with server:
        result = asyncio.run(run())
    blocks = [each.model_dump(by_alias=True, exclude_none=True) for each in result.content]
    return blocks, result.structured_content


def test_a_server_returns_media_as_content_blocks():
    (text, image, audio, file), _ = content_of("everything")

    assert text["text"].splitlines() == [
        "[image/png, 16 bytes: a.png]",
        "[audio/mpeg, 6 bytes: b.mp3]",
        "[application/zip, 4 bytes: c d.zip]",
    ]
    b64 = base64.b64encode(PNG).decode()
    assert image == {"type": "image", "data": b64, "mimeType": "image/png"}
    assert audio == {"type": "audio", "data": "SUQzLi4u", "mimeType": "audio/mpeg"}
    assert file["type"] == "resource"
    assert file["resource"]["blob"] == "UEsDBA=="
    assert file["resource"]["uri"].endswith("/c%20d.zip")


def test_a_picture_in_a_value_is_a_block_and_not_also_in_the_data():
    (text, image), structured = content_of("picture")

    assert structured == {
        "title": "Sea",
        "image": {"data": "", "media_type": "image/png", "name": "", "uri": ""},
    }
    assert image["type"] == "image"
    assert base64.b64encode(PNG).decode() not in text["text"]


def test_the_media_of_a_failed_call_are_not_returned():
    blocks, _ = content_of("picture", fails=True)

    assert [each["type"] for each in blocks] == ["text"]


@pytest.mark.heavy
def test_a_picture_makes_the_round_trip_over_stdio(tmp_path: Path):
    (tmp_path / "logo.png").write_bytes(PNG)
    command = [sys.executable, "-m", "weakincentives.cli", "mcp", "--workspace", str(tmp_path)]
    adapter = ScriptedAdapter([calls(("read_file", {"path": "logo.png"})), says("Seen.")])
    with McpToolsSection(server=command, allow=["read_file"], reach="read") as section:
        prompt = wink.Prompt(wink.PromptTemplate(sections=[section]))
        adapter.evaluate(prompt, wink.Session())

    assert adapter.last_request is not None
    (answer,) = [each for each in adapter.last_request.messages if each.role == "tool"]
    assert answer.text.startswith("logo.png is a picture:\n[image/png, 16 bytes: logo.png]")
    assert [(each.data, each.media_type) for each in answer.media] == [(PNG, "image/png")]
