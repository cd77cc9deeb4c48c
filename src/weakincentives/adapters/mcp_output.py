"""Answers of MCP servers, and how the model sees them.

Saved sessions name these types by this module.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from weakincentives.core.media import MAX_MEDIA_BYTES, SNIFFED, Media, sniff
from weakincentives.core.text import harmless, size_of

if TYPE_CHECKING:
    from mcp import types

_MAX_PARTS = 50
"""Media after so many parts of an answer are left out."""


@dataclass(frozen=True, slots=True)
class McpOutput:
    """A server's answer."""

    text: str
    """What the model sees, with a placeholder for each picture or file."""
    structured: Any = None
    """The answer as data, if the server gives it."""
    media: tuple[Media, ...] = ()

    def render(self) -> str:
        return self.text


def output_of(answer: types.CallToolResult, *, limit: int) -> McpOutput:
    """Return an answer with at most ``limit`` characters of text for the model."""
    structured = answer.structured_content
    text, media = _shown(answer.content, limit, structured)
    return McpOutput(text, structured, media)


def contents_of(contents: Iterable[types.ResourceContents], *, limit: int) -> McpOutput:
    """Return the contents of a resource with at most ``limit`` characters of text."""
    from mcp import types

    blocks: list[Any] = [
        types.TextContent(text=each.text)
        if isinstance(each, types.TextResourceContents)
        else types.EmbeddedResource(resource=cast("types.BlobResourceContents", each))
        for each in contents
    ]
    text, media = _shown(blocks, limit, None)
    return McpOutput(text or "(empty)", None, media)


def _shown(
    content: Iterable[types.ContentBlock], limit: int, structured: object
) -> tuple[str, tuple[Media, ...]]:
    parts = list(parts_of(content))
    text = "\n".join(part if isinstance(part, str) else part.render() for part in parts)
    if not text and structured is not None:
        text = json.dumps(structured, ensure_ascii=False)
    if len(text) > limit:
        text = (
            f"{text[:limit]}\n[Truncated: the first {limit} of {len(text)} characters. "
            "Ask for less.]"
        )
    return text, tuple(part for part in parts if isinstance(part, Media))


def parts_of(content: Iterable[types.ContentBlock]) -> Iterator[str | Media]:
    """Yield the texts and the media of an answer; a text about media that cannot be taken."""
    from mcp import types

    left = MAX_MEDIA_BYTES
    for number, part in enumerate(content, 1):
        match part:
            case types.TextContent():
                yield part.text
                continue
            case types.ImageContent() | types.AudioContent():
                data, kind, name = part.data, part.mime_type, ""
            case types.EmbeddedResource(resource=types.BlobResourceContents() as file):
                data, kind, name = file.blob, file.mime_type or "", _name(str(file.uri))
            case types.EmbeddedResource(resource=types.TextResourceContents() as file):
                yield f"[{file.uri}]\n{file.text}"
                continue
            case types.ResourceLink():
                about = f": {part.description}" if part.description else ""
                yield f"[link to {part.title or part.name}, {part.uri}{about}]"
                continue
            case _:
                yield f"[{part.type}: not shown]"
                continue
        made = _media(data, kind, name, left if number <= _MAX_PARTS else 0)
        if isinstance(made, Media):
            left -= len(made.data)
        yield made


def _media(data: str, kind: str, name: str, room: int) -> str | Media:
    """Return media from a server, which is not trusted, or a text that says what is wrong."""
    what = f"{harmless(kind)[:100] or 'binary data'}, {size_of(len(data) * 3 // 4)}"
    if len(data) * 3 // 4 > room:
        return f"[{what}: not shown, the answer is too large]"
    try:
        content = b64decode(data, validate=True)
    except ValueError:
        return f"[{what}: not shown, it is not base64]"
    try:
        media = Media(content, kind or sniff(content) or "application/octet-stream", name)
    except ValueError as error:
        return f"[{what}: not shown, {error}]"
    found = sniff(content)
    if media.media_type in SNIFFED and found != media.media_type:
        if not found.startswith("image/"):
            return f"[{what}: not shown, it is not {media.media_type}]"
        return Media(content, found, name)
    return media


def _name(uri: str) -> str:
    return harmless(unquote(urlsplit(uri).path).rstrip("/").rpartition("/")[2])[:200]
