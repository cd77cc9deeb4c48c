"""Text from outside: made safe to show, and matched in linear time."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from weakincentives.errors import InvalidPattern

# Blank on a screen, but printable for Python: fillers, joiners, variation selectors, and two
# symbols without a shape. Other invisible characters are not printable.
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U0001d159\U000e0100-\U000e01ef]"
)
_MARKS = ("Mn", "Me", "Mc")
_MOST_MARKS = 2
"""Combining marks on one character; more of them cover the lines around it."""
_LONG_RUN = re.compile(" {33,}| +$", re.MULTILINE)
_REPEAT = re.compile(r"\{([^}]*)")


def harmless(text: str, *, lines: bool = False) -> str:
    """Return a text that cannot control a terminal: other than printable characters are escaped.

    It is on one line, unless ``lines`` is true.
    """
    text = text.replace("\r\n", "\n").replace("\t", "    ").replace("\xa0", " ")
    if not lines:
        text = " ".join(text.split())
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") else _spelled(c) for c in text)


def visible(text: str) -> str:
    """Return a text with every invisible character escaped, except line ends.

    Trailing and long runs of spaces are counted: ``\\s{80}``. If the backslashes of the text were
    doubled before, the result is unambiguous.
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


def counted(count: int, thing: str, things: str = "") -> str:
    """Return a number of things: ``1 file``, ``2 files``."""
    return f"1 {thing}" if count == 1 else f"{count} {things or thing + 's'}"


def size_of(count: int) -> str:
    """Return a number of bytes: ``1 byte``, ``20.5 kB``."""
    if count < 1_000:
        return counted(count, "byte")
    unit, size = ("kB", 1_000) if count < 1_000_000 else ("MB", 1_000_000)
    return f"{round(count / size, 1):g} {unit}"


def linear_matcher(
    pattern: str, *, max_length: int, max_repeats: int, ignore_case: bool = False
) -> Callable[[str], bool]:
    """Return a function that tells whether a text has a match, by pydantic's regex engine.

    Its time is linear in the text, times the size of the pattern with its counted repetitions
    expanded: so that is bounded, too.
    """
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    if len(pattern) > max_length or "\n" in pattern:
        raise InvalidPattern(
            f"the pattern has {len(pattern)} characters; at most {max_length} on one line are "
            "allowed"
        )
    repeats = counted_repeats(pattern)
    if repeats > max_repeats:
        raise InvalidPattern(
            f"the pattern {pattern!r} repeats too much: its counts multiply to {repeats}, at most "
            f"{max_repeats} are allowed; use '*' or '+' instead"
        )
    flags = "(?i)" if ignore_case else ""
    schema = core_schema.str_schema(pattern=f"{flags}{pattern}", regex_engine="rust-regex")
    try:
        return SchemaValidator(schema).isinstance_python
    except SchemaError as error:
        reason = str(error).rpartition("error: ")[2].strip().splitlines()[-1]
        raise InvalidPattern(
            f"Not a valid pattern: {pattern!r} ({reason}). Escape special characters with a "
            "backslash to search for them"
        ) from error


def counted_repeats(pattern: str) -> int:
    """Return the factor by which expanded counted repetitions enlarge a pattern, at most."""
    repeats = 1
    for counts in _REPEAT.findall(pattern):
        # Some flags allow spaces between digits, as in `a{3 0}`.
        numbers = (re.sub(r"\D", "", part) for part in counts.split(","))
        repeats *= max(1, *(int(number[:20] or 0) for number in numbers))
    return repeats


def letters(data: bytes) -> str:
    """Return a letter or digit for each byte, none that looks like another: a name to type.

    It begins with a letter: a number means a call.
    """
    chosen = (_LETTERS if number else _LETTERS[:-8] for number in range(len(data)))
    return "".join(each[byte % len(each)] for each, byte in zip(chosen, data, strict=True))


_LETTERS = "abcdefghjkmnpqrstuvwxyz" + "23456789"


# What people read of a call


def shortened(text: str, limit: int) -> str:
    """Return a text on one line of at most ``limit`` characters."""
    start = harmless(text[: 4 * limit])
    if len(start) <= limit and len(text) <= 4 * limit:
        return start
    return f"{start[: limit - 3]}..."


_MAIN_ARGUMENTS = (
    "command",
    "path",
    "source",
    "pattern",
    "query",
    "code",
    "objective",
    "step",
    "branch",
)


def summary_of(arguments: object, limit: int = 60) -> str:
    """Return the main argument of a call, or all of them, on one short line."""
    if not isinstance(arguments, Mapping):
        return "" if arguments is None else shortened(str(arguments), limit)
    given = cast("Mapping[str, object]", arguments)
    if "source" in given and "destination" in given:
        return shortened(f"{given['source']} -> {given['destination']}", limit)
    if "step" in given and "status" in given:
        return shortened(f"{given['step']} {given['status']}", limit)
    main = next((given[name] for name in _MAIN_ARGUMENTS if given.get(name)), None)
    if isinstance(main, (list, tuple)):
        main = " ".join(map(str, cast("Sequence[object]", main)))
    if main is None:
        main = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return shortened(str(main), limit)
