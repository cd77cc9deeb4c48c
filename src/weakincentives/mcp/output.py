"""What an MCP server answers, and how the model sees it.

Saved sessions name these types by this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mcp import types


@dataclass(frozen=True, slots=True)
class McpMedia:
    """An image, a sound or a file that is no text: not for the model, but for programs."""

    kind: Literal["image", "audio", "resource"]
    mime_type: str
    data: str
    """Base64, as it came."""
    uri: str = ""


@dataclass(frozen=True, slots=True)
class McpOutput:
    """A server's answer."""

    text: str
    """What the model is shown."""
    structured: Any = None
    """The answer as data, where the server gives it as such."""
    media: tuple[McpMedia, ...] = ()

    def render(self) -> str:
        return self.text


def output_of(answer: types.CallToolResult, *, limit: int) -> McpOutput:
    """Return an answer with at most ``limit`` characters of text for the model."""
    structured = answer.structured_content
    text = "\n".join(_texts(answer.content))
    if not text and structured is not None:
        text = json.dumps(structured, ensure_ascii=False)
    if len(text) > limit:
        text = (
            f"{text[:limit]}\n[Cut: these are the first {limit} of {len(text)} characters. "
            "Ask for less.]"
        )
    return McpOutput(text, structured, tuple(_media(answer.content)))


def _texts(content: Iterable[types.ContentBlock]) -> Iterator[str]:
    """Yield what the model sees of each part."""
    from mcp import types

    for part in content:
        match part:
            case types.TextContent():
                yield part.text
            case types.ImageContent() | types.AudioContent():
                yield _placeholder(part.type, part.mime_type, part.data)
            case types.ResourceLink():
                about = f": {part.description}" if part.description else ""
                yield f"[link to {part.title or part.name}, {part.uri}{about}]"
            case types.EmbeddedResource(resource=types.TextResourceContents() as file):
                yield f"[{file.uri}]\n{file.text}"
            case types.EmbeddedResource(resource=types.BlobResourceContents() as file):
                yield _placeholder(file.uri, file.mime_type or "binary", file.blob)
            case _:
                yield f"[{part.type}: not shown]"


def _placeholder(what: str, mime_type: str, data: str) -> str:
    return f"[{what}, {mime_type}, {len(data) * 3 // 4} bytes: not shown]"


def _media(content: Iterable[types.ContentBlock]) -> Iterator[McpMedia]:
    from mcp import types

    for part in content:
        match part:
            case types.ImageContent() | types.AudioContent():
                yield McpMedia(part.type, part.mime_type, part.data)
            case types.EmbeddedResource(resource=types.BlobResourceContents() as file):
                yield McpMedia("resource", file.mime_type or "", file.blob, file.uri)
            case _:
                pass
