"""Text of others, made safe to show: nothing in it acts on a terminal, and nothing is invisible."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

__all__ = ["harmless", "visible"]

# Blank on a screen though Python calls them printable: fillers, joiners, variation selectors, and
# two symbols that are drawn as nothing. The rest of what cannot be seen is not printable.
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U0001d159\U000e0100-\U000e01ef]"
)
_MARKS = ("Mn", "Me", "Mc")
_MOST_MARKS = 2
"""Combining marks on one character; a pile of them covers the lines around it."""
_LONG_RUN = re.compile(" {33,}| +$", re.MULTILINE)


def harmless(text: str, *, lines: bool = False) -> str:
    """Return a text in which nothing can act on a terminal: what is not printable is spelled out.

    On one line, unless ``lines`` are kept.
    """
    text = text.replace("\r\n", "\n").replace("\t", "    ").replace("\xa0", " ")
    if not lines:
        text = " ".join(text.split())
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") else _spelled(c) for c in text)


def visible(text: str) -> str:
    """Return a text of which everything can be seen; only line ends are kept as they are.

    Spaces at the end of a line, and many in a row, are counted: ``\\s{80}``. If the backslashes of
    the text were doubled before, what comes out stands for one text only.
    """
    if not (text.isascii() and text.isprintable()):
        text = "".join(_seen(text))
    return _LONG_RUN.sub(lambda run: f"\\s{{{len(run[0])}}}", text)


def _seen(text: str) -> Iterator[str]:
    marks = 0
    for c in text:
        marks = marks + 1 if c > "\u02ff" and unicodedata.category(c) in _MARKS else 0
        is_seen = c.isprintable() and not _BLANK.match(c) and marks <= _MOST_MARKS
        yield c if is_seen or c == "\n" else _spelled(c)


def _spelled(character: str) -> str:
    return ascii(character)[1:-1]
