"""Which pictures and files a model takes; it is told about the others in words."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote

from weakincentives.core.logs import get_logger
from weakincentives.core.media import Media
from weakincentives.errors import ProviderError
from weakincentives.runtime.conversation import ModelRequest, ModelTurn

IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
AUDIO = ("audio/wav", "audio/mpeg")
PDF = ("application/pdf",)

_logger = get_logger(__name__)
_MAX_BYTES = 20_000_000
_MAX_COUNT = 50
"""How many media, and how many bytes of them, are in one request: providers refuse more."""
_TOO_LARGE = "{} is not shown: the request would be too large. Ask for it again to see it."
_MAX_TEXT = 60_000
"""Characters of a text file that the model sees."""
_TEXTS = frozenset({"application/json", "application/xml", "application/toml", "application/yaml"})
_ABOUT_MEDIA = re.compile(r"image|audio|vision|multimodal|modalit|media|file|pdf", re.IGNORECASE)


class MediaFilter:
    """What one model takes. If the provider rejects a request, it is asked again in words.

    Args:
        takes: Media types; ``*`` is a wildcard.
    """

    def __init__(self, takes: Iterable[str]) -> None:
        self._takes = tuple(takes)
        self._accepted: set[str] = set()
        """Media types and digests in requests that were answered."""
        self._refused: set[str] = set()
        """Media types, and digests of single media, that the provider rejected."""

    async def ask(
        self, request: ModelRequest, ask: Callable[[ModelRequest], Awaitable[ModelTurn]]
    ) -> ModelTurn:
        """Ask with the media that the model takes; after a rejection, once more without them."""
        fitted = self.fitted(request)
        sent = [each for m in fitted.messages if m.role != "model" for each in m.media]
        try:
            turn = await ask(fitted)
        except ProviderError as error:
            if not sent or not _may_be_about_media(error):
                raise
            # Once a type was accepted, only a single item of it can be wrong.
            new = {
                each.digest if each.media_type in self._accepted else each.media_type
                for each in sent
                if each.digest not in self._accepted
            } or {each.media_type for each in sent}
            self._refused |= new
            try:
                turn = await ask(self.fitted(request))
            except BaseException:
                self._refused -= new  # they were not the reason
                raise
            _logger.warning("pictures or files were rejected, so they go as words: %s", error)
        for each in filter(self.takes, sent):
            self._accepted |= {each.media_type, each.digest}
        return turn

    def takes(self, media: Media) -> bool:
        kind = media.media_type
        if not any(fnmatchcase(kind, pattern) for pattern in self._takes):
            return False
        return kind not in self._refused and not (self._refused and media.digest in self._refused)

    def fitted(self, request: ModelRequest) -> ModelRequest:
        """Return the request with texts for media that the model does not take, or no longer.

        The media of the prompt are in the user's first message. When all together are too large
        for a request, the oldest of the others are left out.
        """
        always, messages = request.prompt.media, list(request.messages)
        if not always and not any(message.media for message in messages):
            return request
        first = next((n for n, each in enumerate(messages) if each.role == "user"), 0)
        messages[first] = replace(messages[first], media=(*always, *messages[first].media))
        room = _MAX_BYTES - sum(len(each.data) for each in always)
        count = _MAX_COUNT - len(always)
        for place in reversed(range(len(messages))):
            kept, words = list[Media](), list[str]()
            message = messages[place]
            for each in () if message.role == "model" else reversed(message.media):
                if not self.takes(each):
                    words.append(in_words(each))
                elif any(each is one for one in always):
                    kept.append(each)
                elif len(each.data) > room or count <= 0:
                    words.append(_TOO_LARGE.format(each.render()))
                else:
                    kept.append(each)
                    room, count = room - len(each.data), count - 1
            if words:
                text = "\n\n".join(filter(None, [message.text, *reversed(words)]))
                messages[place] = replace(message, text=text, media=tuple(reversed(kept)))
        return replace(request, messages=messages)


def _may_be_about_media(error: ProviderError) -> bool:
    if error.code not in ("REJECTED", "SERVER_ERROR"):
        return False
    # Some servers report a model without vision as not found, or as a failure of the server.
    return error.status in (400, 413, 415, 422) or bool(_ABOUT_MEDIA.search(str(error)))


def in_words(media: Media) -> str:
    """Return what a model is told about media that it cannot be given."""
    if media.media_type.startswith("text/"):
        text = media.data.decode("utf-8", "replace")
        more = f"\n[{len(text) - _MAX_TEXT} more characters]" if len(text) > _MAX_TEXT else ""
        return f"{media.render()}\n{text[:_MAX_TEXT]}{more}"
    return f"{media.render()} is not shown: you cannot be given {media.media_type} here."


def mcp_block(media: Media) -> dict[str, Any]:
    """Return media as a content block of MCP; a text file as its text."""
    kind = media.media_type.partition("/")[0]
    if kind in ("image", "audio") and not media.uri:
        return {"type": kind, "data": media.base64, "mimeType": media.media_type}
    uri = media.uri or f"media:{media.digest[:16]}/{quote(media.name, safe='', errors='replace')}"
    return {"type": "resource", "resource": mcp_contents(media, uri)}


def mcp_contents(media: Media, uri: str) -> dict[str, Any]:
    """Return media as the contents of an MCP resource."""
    contents = {"uri": uri, "mimeType": media.media_type}
    if media.media_type.startswith("text/") or media.media_type in _TEXTS:
        with suppress(UnicodeDecodeError):
            return {**contents, "text": media.data.decode()}
    return {**contents, "blob": media.base64}
