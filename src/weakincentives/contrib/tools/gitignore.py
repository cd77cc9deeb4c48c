"""What the ``.gitignore`` files of a workspace leave out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weakincentives.errors import MissingExtra

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec
    from pathspec.pattern import RegexPattern

__all__ = ["IgnoreRules", "is_ignored", "parse_ignore_file"]

_SLASH = "ps_d"
"""What pathspec calls the slash behind the directory that a rule is about."""


@dataclass(frozen=True, slots=True, eq=False)  # told apart by which file was parsed, and when
class IgnoreRules:
    """The rules of one file, for what is below its directory."""

    directory: str
    spec: GitIgnoreSpec


def parse_ignore_file(text: str, directory: str) -> IgnoreRules:
    """Return the rules of a ``.gitignore`` in a directory, given as a path or ``"."``."""
    try:
        from pathspec import GitIgnoreSpec
    except ImportError as error:
        raise MissingExtra("files", "pathspec") from error
    lines = text.removeprefix("\ufeff").splitlines()  # git does not mind a byte order mark
    return IgnoreRules(directory, GitIgnoreSpec.from_lines(lines))


def is_ignored(path: str, is_directory: bool, rules: Sequence[IgnoreRules]) -> bool:
    """Tell whether git would leave a path out, given that it looks into its directory."""
    for each in reversed(rules):  # the nearest file that says anything decides
        inside = path if each.directory == "." else path[len(each.directory) + 1 :]
        for pattern in reversed(tuple(each.spec.patterns)):  # and the last of its rules
            if pattern.include is not None and _matches(pattern, inside, is_directory):
                return pattern.include
    return False


def _matches(pattern: RegexPattern, path: str, is_directory: bool) -> bool:
    """Tell whether a rule is about a path itself, not about a directory above it."""
    found = _match(pattern, path)
    if found is not None and found.groupdict().get(_SLASH) is None:
        return True
    found = _match(pattern, f"{path}/") if is_directory else None
    return found is not None and _SLASH in found.groupdict() and found.start(_SLASH) == len(path)


def _match(pattern: RegexPattern, path: str) -> re.Match[str] | None:
    found: Any = pattern.match_file(path)  # pathspec does not say what it matches
    return None if found is None else found.match
