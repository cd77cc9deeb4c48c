"""Which files git ignores, and which are generated: they are counted instead of listed."""

from __future__ import annotations

import os
import re
import stat
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weakincentives.errors import MissingExtra
from weakincentives.filesystem.paths import shown

if TYPE_CHECKING:
    from pathspec.pattern import RegexPattern

_SLASH = "ps_d"
"""Pathspec's name for the slash after the directory of a rule."""


@dataclass(frozen=True, slots=True, eq=False)  # each parse is another one
class IgnoreRules:
    """The rules of one file, for the paths below its directory."""

    directory: str
    rules: tuple[tuple[RegexPattern, int], ...]
    """Each with the length of the longest path that it can be matched with in time."""


def parse_ignore_file(text: str, directory: str) -> IgnoreRules:
    """Return the rules of a ``.gitignore`` in a directory, given as a path or ``"."``."""
    try:
        from pathspec import GitIgnoreSpec
    except ImportError as error:
        raise MissingExtra("files", "pathspec") from error
    lines = text.removeprefix("\ufeff").splitlines()  # git ignores a byte order mark
    rules: list[tuple[RegexPattern, int]] = []
    for line in lines:
        # A rule that git skips, such as "!" or "[z-a]", is an error for pathspec.
        with suppress(ValueError, re.error):
            found = GitIgnoreSpec.from_lines([line]).patterns
            rules += [(each, _longest(each)) for each in found if each.include is not None]
    return IgnoreRules(directory, tuple(rules))


_REPEATED = re.compile(r"(?:\[\^/\]|(?<!\\)\.)[*+]")
"""A part of pathspec's expressions that matches any number of characters."""
_MAX_STEPS = 4_000_000
"""Of one match: fractions of a second."""


def _longest(pattern: RegexPattern) -> int:
    """Return the longest path that is matched with a rule: time grows with the ways to divide it
    among the repeated parts."""
    untyped: Any = pattern  # pathspec has no exact type for its expression
    repeated = len(_REPEATED.findall(untyped.regex.pattern))
    return _longest_of(repeated) if repeated > 2 else sys.maxsize


@lru_cache(maxsize=256)
def _longest_of(repeated: int) -> int:
    return next(n for n in count(repeated) if comb(n + 1, repeated - 1) > _MAX_STEPS)


def is_ignored(path: str, is_directory: bool, rules: Sequence[IgnoreRules]) -> bool:
    """Tell whether git ignores a path whose directory it does not ignore."""
    for each in reversed(rules):  # the nearest file with a match decides
        inside = path if each.directory == "." else path[len(each.directory) + 1 :]
        for pattern, longest in reversed(each.rules):  # and its last matching rule
            if len(inside) <= longest and _matches(pattern, inside, is_directory):
                return bool(pattern.include)
    return False


def _matches(pattern: RegexPattern, path: str, is_directory: bool) -> bool:
    """Tell whether a rule matches the path itself, not a directory above it."""
    found = _match(pattern, path)
    if found is not None and found.groupdict().get(_SLASH) is None:
        return True
    found = _match(pattern, f"{path}/") if is_directory else None
    return found is not None and _SLASH in found.groupdict() and found.start(_SLASH) == len(path)


def _match(pattern: RegexPattern, path: str) -> re.Match[str] | None:
    found: Any = pattern.match_file(path)  # pathspec has no type for it
    return None if found is None else found.match


# The files of a workspace

_GENERATED = """
__pycache__/
*.py[co]
*.egg-info/
.coverage
.eggs/
.hypothesis/
.mypy_cache/
.nox/
.pytest_cache/
.ruff_cache/
.tox/
.venv/
htmlcov/
node_modules/
.gradle/
.next/
.parcel-cache/
.DS_Store
"""
"""Rules for what common tools generate, also outside of a git repository."""
_MAX_RULES = 1 << 20
"""Bytes; a larger file of rules is not read."""


class IgnoredFiles:
    """Tells which paths of a workspace are ignored by git, or generated.

    As in git, a tracked file is never ignored. A ``.gitignore`` is ignored only with the directory
    that it is in: it cannot hide itself. Rules are read when they are first needed; git itself is
    not run. Without pathspec, nothing is ignored.
    """

    def __init__(self, root: Path) -> None:
        above = [root, *root.parents]
        self._top = next((each for each in above if os.path.lexists(each / ".git")), root)
        self._prefix = "".join(f"{part}/" for part in root.relative_to(self._top).parts)
        self._known: dict[str, tuple[str, tuple[IgnoreRules, ...]]] = {}
        """For each directory the ignored directory that it is in, if any, and the rules in it."""

    def __call__(self, path: str) -> bool:
        """Tell whether a path of the workspace is ignored."""
        return bool(self.top(path))

    def top(self, path: str) -> str:
        """Return the ignored path itself, or the directory that is ignored; else nothing."""
        path = self._prefix + path
        above, _, name = path.rpartition("/")
        top, rules = self._directory(above)
        if not top and name != ".gitignore":
            top = path if is_ignored(path, os.path.isdir(self._top / path), rules) else ""
        if not top or path in self._tracked:
            return ""
        return top.removeprefix(self._prefix)

    def summary(self, paths: Iterable[str]) -> str:
        """Return the number of ignored paths among these, and where they are; or nothing."""
        tops = Counter([top for top in map(self.top, paths) if top])
        if not tops:
            return ""
        count = tops.total()
        named = [shown(top) for top, _ in tops.most_common(3)]
        more = ", ..." if len(tops) > 3 else ""
        return f"+ {count} ignored file{'s' * (count > 1)} ({', '.join(named)}{more})"

    def _directory(self, path: str) -> tuple[str, tuple[IgnoreRules, ...]]:
        if path in self._known:
            return self._known[path]
        if "" not in self._known:
            self._known[""] = "", (*self._base, *self._rules(""))
        # Not recursive: a path can have two thousand directories.
        known, end = self._known[""], 0
        while end < len(path):
            end = path.find("/", end + 1)
            end = len(path) if end < 0 else end
            here = path[:end]
            if here not in self._known:
                top, rules = known
                if not top and is_ignored(here, True, rules):
                    top = here
                self._known[here] = top, rules if top else (*rules, *self._rules(here))
            known = self._known[here]
        return known

    @cached_property
    def _base(self) -> tuple[IgnoreRules, ...]:
        """The rules of no directory: generated files, the user's, and those of the repository."""
        texts = [_GENERATED, *map(_text, (_excludes_file(), self._git / "info" / "exclude"))]
        with suppress(MissingExtra):
            return tuple(parse_ignore_file(text, ".") for text in texts if text)
        return ()

    def _rules(self, directory: str) -> Iterator[IgnoreRules]:
        if self._base and (text := _text(self._top / directory / ".gitignore")):
            yield parse_ignore_file(text, directory or ".")

    @cached_property
    def _git(self) -> Path:
        """The directory with the index; in a worktree, a file says where it is."""
        named = re.match("gitdir: (.+)", _text(self._top / ".git"))
        return self._top / (named[1] if named else ".git")

    @cached_property
    def _tracked(self) -> set[str]:
        with suppress(OSError, LookupError, ValueError, struct.error):
            return set(_names_in(_bytes(self._git / "index", 256 << 20)))
        return set()


def _text(path: Path) -> str:
    with suppress(OSError, ValueError):  # a name with a null byte
        return _bytes(path, _MAX_RULES).decode(errors="replace")
    return ""


def _bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file that is not too large; nothing for another."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        return file.read() if stat.S_ISREG(status.st_mode) and status.st_size <= limit else b""


def _excludes_file() -> Path:
    """Return the user's own rules: git's ``core.excludesFile``, or where it is by default."""
    home = Path(os.path.expanduser("~"))
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "git"
    settings = _text(config / "config") + "\n" + _text(home / ".gitconfig")
    core = "\n".join(re.findall(r"(?ims)^[ \t]*\[core\](.*?)(?=^[ \t]*\[|\Z)", settings))
    named = re.findall(r'(?im)^[ \t]*excludesfile[ \t]*=[ \t]*"?([^"\n]+)', core)
    return Path(os.path.expanduser(named[-1].strip())) if named else config / "ignore"


_MAX_NAME = 4096
"""Bytes, as in Linux."""


def _names_in(index: bytes) -> Iterator[str]:
    """Yield the paths in git's index, of versions 2 to 4."""
    signature, version, count = struct.unpack(">4sII", index[:12])
    if signature != b"DIRC" or version not in (2, 3, 4):
        return
    at, name = 12, b""
    for _ in range(count):
        is_extended = version > 2 and index[at + 60] & 0x40
        start = at + (64 if is_extended else 62)
        kept = 0
        if version == 4:  # each name says how much of the end of the last one it replaces
            dropped = -1
            while dropped < 0 or index[start - 1] & 0x80:
                dropped = (dropped + 1 << 7) + (index[start] & 0x7F)
                start += 1
                if dropped > len(name):
                    raise ValueError("the index is damaged")
            kept = len(name) - dropped
        end = index.index(b"\0", start)
        name = name[:kept] + index[start:end]
        if len(name) > _MAX_NAME:  # names that grow with each entry would fill the memory
            raise ValueError("the index is damaged")
        at = end + 1 if version == 4 else at + (end - at + 8) // 8 * 8
        yield os.fsdecode(name)
