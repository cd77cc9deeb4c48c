"""What the ``.gitignore`` files of a workspace leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weakincentives.errors import MissingExtra

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

__all__ = ["IgnoreRules", "is_ignored", "parse_ignore_file"]


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
    return IgnoreRules(directory, GitIgnoreSpec.from_lines(text.splitlines()))


def is_ignored(path: str, is_directory: bool, rules: Sequence[IgnoreRules]) -> bool:
    """Tell whether git would leave a path out, given that it looks into its directory."""
    for each in reversed(rules):  # the nearest file that says anything decides
        inside = path if each.directory == "." else path[len(each.directory) + 1 :]
        decided = each.spec.check_file(inside + "/" if is_directory else inside).include
        if decided is not None:
            return decided
    return False
