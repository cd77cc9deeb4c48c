"""Text of files: whether it is any, its lines, and replacing a part of it."""

from __future__ import annotations

import mimetypes
import re
from dataclasses import dataclass

from weakincentives.contrib.tools.vfs_values import cut, listed, size_of
from weakincentives.errors import ToolValidationError

__all__ = [
    "BYTE_ORDER_MARK",
    "Edit",
    "describe_binary",
    "is_crlf",
    "peculiarities",
    "replace_text",
    "split_lines",
    "text_of",
]

BYTE_ORDER_MARK = "\ufeff"

_BARE_NEWLINE = re.compile(r"(?<!\r)\n")


def text_of(data: bytes) -> str | None:
    """Return the text that bytes stand for, or None."""
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def describe_binary(path: str, data: bytes) -> str:
    kind = mimetypes.guess_type(path)[0] or "unknown type"
    return (
        f"is not UTF-8 text but {size_of(len(data))} of {kind}, which are not shown. They begin "
        f"with {data[:16].hex(' ')}."
    )


def split_lines(text: str) -> list[str]:
    """Return the lines of a text without their ends."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def is_crlf(text: str) -> bool:
    """Whether every line ends in CRLF."""
    return "\r\n" in text and not _BARE_NEWLINE.search(text)


def peculiarities(text: str) -> str:
    """Return what of a text cannot be seen in its lines, to be put behind a message."""
    mark = "; begins with a byte order mark" if text.startswith(BYTE_ORDER_MARK) else ""
    if "\r\n" not in text:
        return mark
    return f"{mark}; {'lines' if is_crlf(text) else 'some lines'} end in CRLF"


@dataclass(frozen=True, slots=True)
class Edit:
    """What came of replacing a text in another one."""

    text: str
    count: int
    """How many were replaced."""
    start: int
    """Where the first one was."""
    end: int
    """Where what took its place ends."""


def replace_text(text: str, old: str, new: str, *, everywhere: bool, where: str) -> Edit:
    """Return a text with one part replaced; raise ToolValidationError when that is not certain.

    In a text whose lines all end in CRLF, a newline in the other two means CRLF. ``where`` is what
    the text is called in messages.
    """
    if is_crlf(text):
        old, new = _BARE_NEWLINE.sub("\r\n", old), _BARE_NEWLINE.sub("\r\n", new)
    if not old:
        raise ToolValidationError(
            "old_string is empty. Give the text to replace, or use write_file for a whole file"
        )
    if old == new:
        raise ToolValidationError("old_string and new_string are the same: nothing would change")
    places = _places(text, old)
    if not places:
        raise ToolValidationError(
            f"old_string was not found in {where}{_similar(text, old)}\n"
            "Read the file again and copy the text exactly, with its indentation and without "
            f"line numbers{_mixed_ends(text, old)}"
        )
    if len(places) > 1 and not everywhere:
        numbers = [str(text.count("\n", 0, place) + 1) for place in places]
        raise ToolValidationError(
            f"old_string was found {len(places)} times in {where}, at lines {listed(numbers)}\n"
            "Give more of the text around the one you mean, or set replace_all=true"
        )
    start = places[0]
    return Edit(text.replace(old, new), text.count(old), start, start + len(new))


def _places(text: str, old: str) -> list[int]:
    """Return where a text is found, also where two of them share characters."""
    places: list[int] = []
    start = text.find(old)
    while start >= 0:
        places.append(start)
        start = text.find(old, start + 1)
    return places


def _mixed_ends(text: str, old: str) -> str:
    """Say what to do where lines end in different ways: a model does not see how."""
    if "\n" not in old or "\r\n" not in text or is_crlf(text):
        return ""
    return ". Some of its lines end in CRLF, others do not: change one line at a time"


def _similar(text: str, old: str) -> str:
    """Say where the first line of a text stands, if only the space around it differs."""
    wanted = next((line.strip() for line in old.splitlines() if line.strip()), "")
    for number, line in enumerate(split_lines(text), start=1):
        if wanted and line.strip() == wanted:
            return f". Line {number} is like its first line: {cut(line, 200)!r}"
    return ""
