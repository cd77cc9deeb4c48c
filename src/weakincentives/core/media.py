"""Pictures, sound, PDFs and other bytes that tools return and messages contain."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, cast

from weakincentives.core.text import harmless, size_of

if TYPE_CHECKING:
    import os

MAX_MEDIA_BYTES = 20_000_000
"""The most bytes of one ``Media``: providers refuse larger requests."""

_MEDIA_TYPE = re.compile(r"[a-z]+/[a-z0-9][a-z0-9.+-]{0,100}")
_ALIASES = {
    "audio/mp3": "audio/mpeg",
    "audio/wave": "audio/wav",
    "audio/x-wav": "audio/wav",
    "image/jpg": "image/jpeg",
}
_SIGNATURES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF.{4}WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb"%PDF-"), "application/pdf"),
    (re.compile(rb"RIFF.{4}WAVE", re.DOTALL), "audio/wav"),
    (re.compile(rb"ID3|\xff[\xfb\xf3\xf2]"), "audio/mpeg"),
)
SNIFFED = frozenset(found for _, found in _SIGNATURES)
"""The media types that ``sniff`` knows."""


def sniff(data: bytes) -> str:
    """Return the media type that the first bytes prove; "" if they prove none.

    >>> sniff(b"GIF89a...")
    'image/gif'
    """
    return next((found for pattern, found in _SIGNATURES if pattern.match(data)), "")


@dataclass(frozen=True, repr=False)
class Media:
    """Bytes with a media type: a picture, sound, a PDF or another file.

    A tool returns it as its value or in a field of it; a message or a section contains it. Where
    there is only text, ``render`` stands for it.

    >>> Media(b"GIF89a...", name="plot.gif").render()
    '[image/gif, 9 bytes: plot.gif]'
    """

    data: bytes
    media_type: str = ""
    """Such as ``image/png``. Left out, it is found in the data: PNG, JPEG, GIF, WebP, PDF, WAV
    and MP3."""
    name: str = ""
    """The name of the file, if there is one."""
    uri: str = ""
    """Its address, if it has one: for MCP clients, which show it as an embedded resource."""

    def __post_init__(self) -> None:
        data = cast("object", self.data)
        if not isinstance(data, bytes):
            raise TypeError(f"the data of Media must be bytes, got {type(data).__name__}")
        if not data:
            raise ValueError("the data of Media is empty")
        if len(data) > MAX_MEDIA_BYTES:
            raise ValueError(
                f"{self.name or 'the data'} has {size_of(len(data))}; Media holds at most "
                f"{size_of(MAX_MEDIA_BYTES)}: make it smaller, or save it and return its path"
            )
        given = self.media_type.partition(";")[0].strip().lower() or sniff(data)
        if not _MEDIA_TYPE.fullmatch(given):
            wrong = f"got {self.media_type!r}" if self.media_type else "the data is of no known one"
            raise ValueError(f"media_type must be one like 'image/png'; {wrong}")
        object.__setattr__(self, "media_type", _ALIASES.get(given, given))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], media_type: str = "") -> Media:
        """Return a file, with the media type of its content or else of its name."""
        import mimetypes
        from pathlib import Path

        path = Path(path)
        if (size := path.stat().st_size) > MAX_MEDIA_BYTES:
            raise ValueError(
                f"{path} has {size_of(size)}; Media holds at most {size_of(MAX_MEDIA_BYTES)}"
            )
        data = path.read_bytes()
        by_name = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        return cls(data, media_type or sniff(data) or by_name, path.name)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the data."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def base64(self) -> str:
        return b64encode(self.data).decode()

    @property
    def data_url(self) -> str:
        return f"data:{self.media_type};base64,{self.base64}"

    def render(self) -> str:
        """Return the text that stands for it: ``[image/png, 12 kB: plot.png]``."""
        name = f": {harmless(self.name)[:200]}" if self.name else ""
        return f"[{self.media_type}, {size_of(len(self.data))}{name}]"

    def __repr__(self) -> str:
        return f"Media({self.media_type!r}, {size_of(len(self.data))}, name={self.name!r})"


Content: TypeAlias = str | Media | Sequence[str | Media]
"""A message to the model: a text, or texts and media in order."""


def split_content(content: Content) -> tuple[str, tuple[Media, ...]]:
    """Return the text of a message, where each medium is a placeholder, and the media."""
    if isinstance(content, str):
        return content, ()
    parts = (content,) if isinstance(content, Media) else content
    lines = [part if isinstance(part, str) else part.render() for part in parts]
    return "\n".join(lines), tuple(part for part in parts if isinstance(part, Media))
