"""Regular expressions that a model may give: no pattern makes a search take forever."""

from __future__ import annotations

import re
from collections.abc import Callable

from weakincentives.errors import InvalidPattern

__all__ = ["counted_repeats", "linear_matcher"]

_REPEAT = re.compile(r"\{([^}]*)")


def linear_matcher(
    pattern: str, *, max_length: int, max_repeats: int, ignore_case: bool = False
) -> Callable[[str], bool]:
    """Return whether a text has a match, on the regular expressions that pydantic brings along.

    They take time in proportion to the text, times the size of the pattern with its counted
    repetitions written out: so that is bounded, too.
    """
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    if len(pattern) > max_length or "\n" in pattern:
        raise InvalidPattern(
            f"the pattern has {len(pattern)} characters; at most {max_length} are taken, "
            "and one line"
        )
    repeats = counted_repeats(pattern)
    if repeats > max_repeats:
        raise InvalidPattern(
            f"the pattern {pattern!r} repeats too much: its counts make {repeats} together, and "
            f"at most {max_repeats} are taken; use '*' or '+' instead"
        )
    flags = "(?i)" if ignore_case else ""
    schema = core_schema.str_schema(pattern=f"{flags}{pattern}", regex_engine="rust-regex")
    try:
        return SchemaValidator(schema).isinstance_python
    except SchemaError as error:
        reason = str(error).rpartition("error: ")[2].strip().splitlines()[-1]
        raise InvalidPattern(
            f"Not a pattern that can be searched for: {pattern!r} ({reason}). Escape special "
            "characters with a backslash to look for them as they are"
        ) from error


def counted_repeats(pattern: str) -> int:
    """Return by how much a pattern grows, at most, when its counted repetitions are written out."""
    repeats = 1
    for counts in _REPEAT.findall(pattern):
        # Digits may stand apart, as in `a{3 0}`: some flags allow that.
        numbers = (re.sub(r"\D", "", part) for part in counts.split(","))
        repeats *= max(1, *(int(number[:20] or 0) for number in numbers))
    return repeats
