"""The bytes of ``Media`` in saves: stored once, by digest, not in the line."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

from weakincentives.media import Media
from weakincentives.serde.exact import StoredBytes, json_of
from weakincentives.session import type_name

MEDIA = type_name(Media)
LARGE = 1_000
"""Characters of base64; fewer stay in the line."""
_STORED = "stored"
"""Marks the place of bytes that are stored elsewhere."""
_HAS_STORED = f'"{_STORED}"'.encode()
_DIGESTS = re.compile(rb'"sha256": ?"([0-9a-f]{64})"')


def without_media(data: Any, store: Callable[[bytes], str]) -> Any:
    """Return frozen data with the digests of large media, whose bytes are stored."""

    def stored(node: dict[str, Any]) -> Any:
        if node.get("$") != "dataclass" or node["type"] != MEDIA:
            return None
        text = node["fields"]["data"]["base64"]
        if len(text) <= LARGE:
            return None
        found = {"$": _STORED, "sha256": store(base64.b64decode(text))}
        return {**node, "fields": {**node["fields"], "data": found}}

    return _changed(data, stored)


def parsed(text: bytes, media: Callable[[str], StoredBytes]) -> Any:
    """Return a save as JSON data, with the places of bytes that are stored elsewhere."""

    def found(node: dict[str, Any]) -> StoredBytes | None:
        if node.get("$") != _STORED:
            return None
        digest = str(node["sha256"])
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"{digest!r} is not a digest")
        return media(digest)

    line = json_of(text)
    return _changed(line, found) if _HAS_STORED in text else line


def digests_in(texts: Iterable[bytes]) -> list[str]:
    """Return the digests that saves may refer to."""
    return sorted({each.decode() for text in texts for each in _DIGESTS.findall(text)})


def _changed(data: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Return JSON data in which every object is replaced that ``change`` gives a value for."""
    if isinstance(data, list):
        return [_changed(each, change) for each in cast("list[Any]", data)]
    if not isinstance(data, dict):
        return data
    node = cast("dict[str, Any]", data)
    made = change(node)
    return {key: _changed(each, change) for key, each in node.items()} if made is None else made
