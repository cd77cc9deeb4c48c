"""Glob patterns and regular expressions, the same for every filesystem."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence

from weakincentives.errors import FilesystemError
from weakincentives.filesystem.paths import Parts, shown, split_path

_ANY_DEPTH = "**"


class GlobPattern:
    """A glob pattern to walk a tree with.

    The walk carries the positions in the pattern that the path so far has reached. A directory
    without positions cannot contain a match, so it is never entered.
    """

    def __init__(self, pattern: str, root: Parts = (), real: Sequence[Parts] = ()) -> None:
        if ".." in pattern.split("/"):
            raise FilesystemError(f"A pattern cannot contain '..': {shown(pattern)}")
        segments = split_path(pattern, root, real)
        if segments and segments[-1] == _ANY_DEPTH:
            # "a/**" is what is below a, never a file called a.
            segments = (*segments, "*")
        self._absolute = pattern.startswith("/")
        self._segments = segments
        self._tests = tuple(re.compile(fnmatch.translate(segment)).match for segment in segments)
        self._onward = _onward(segments)
        self._always = frozenset({0, 1, 2}) if segments == (_ANY_DEPTH, "*") else None
        """The positions after any name in the pattern of all files."""
        self._literal = tuple(not any(c in segment for c in "*?[") for segment in segments)

    def start(self, directory: Parts) -> frozenset[int]:
        """Return the positions to begin with in a directory.

        A relative pattern begins there, an absolute one at the root.
        """
        positions = self._onward[0]
        for name in directory if self._absolute else ():
            positions = self.step(positions, name)
        return positions

    def step(self, positions: frozenset[int], name: str) -> frozenset[int]:
        """Return the positions one name further down."""
        if self._always is not None:
            return self._always
        reached: set[int] = set()
        for position in positions:
            if position == len(self._segments):
                continue
            if self._segments[position] == _ANY_DEPTH:
                reached |= self._onward[position]
            elif self._tests[position](name):
                reached |= self._onward[position + 1]
        return frozenset(reached)

    def matched(self, positions: frozenset[int]) -> bool:
        """Tell whether a path with these positions matches."""
        return bool(self._segments) and len(self._segments) in positions

    def covers(self, path: str) -> bool:
        """Tell whether a normalised path matches as a whole."""
        positions = self._onward[0]
        for name in path.split("/"):
            positions = self.step(positions, name)
        return self.matched(positions)

    def names(self, positions: frozenset[int]) -> frozenset[str] | None:
        """Return the only names that can lead on from here, or None when any might."""
        ahead = [position for position in positions if position < len(self._segments)]
        if all(self._literal[position] for position in ahead):
            return frozenset(self._segments[position] for position in ahead)
        return None


class PathPatterns:
    """Globs of paths, each with everything below it.

    A pattern with a slash starts at the root, such as ``config/*.yaml``; one without is a name at
    any depth.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        if isinstance(patterns, str):
            raise TypeError(f"patterns takes several globs, got a string: [{patterns!r}]")
        named = [(each if _is_path(each) else f"**/{each}").strip("/") for each in patterns]
        self._globs = tuple(map(GlobPattern, named))
        plain = [each for each in patterns if not any(c in each for c in "*?[")]
        self.literals = [tuple(each.strip("/").split("/")) for each in plain if _is_path(each)]
        """The patterns that are plain paths."""
        self.any_depth = len(self.literals) < len(self._globs)
        """Whether a match can be at any depth."""

    def match(self, path: str) -> bool:
        """Tell whether a normalised path, or a directory that it is in, matches a pattern."""
        parts = path.split("/")
        return any(_is_matched(glob, parts) for glob in self._globs)


def _is_path(pattern: str) -> bool:
    return "/" in pattern.rstrip("/")


def _is_matched(glob: GlobPattern, parts: Sequence[str]) -> bool:
    positions = glob.start(())
    for part in parts:
        positions = glob.step(positions, part)
        if glob.matched(positions):
            return True
    return False


def _onward(segments: Parts) -> tuple[frozenset[int], ...]:
    """Return the positions that each position implies: ``**`` may also match no directory."""
    onward = [frozenset({len(segments)})]
    for position in reversed(range(len(segments))):
        skipped: frozenset[int] = onward[0] if segments[position] == _ANY_DEPTH else frozenset()
        onward.insert(0, skipped | {position})
    return tuple(onward)


def compile_regex(pattern: str) -> re.Pattern[str]:
    """Return the compiled expression; raise FilesystemError, worded for the model."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise FilesystemError(
            f"Not a valid regular expression: {shown(pattern)} ({error}). Escape special"
            " characters with a backslash to match them literally"
        ) from error


def matching_lines(data: bytes, found: Callable[[str], object]) -> Iterator[tuple[int, str]]:
    """Yield number and text of each matching line; none of binary data."""
    if not data or b"\0" in data:
        return
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    text = text.removeprefix("\ufeff")  # a byte order mark is not part of the first line
    # Not splitlines(): form feeds and Unicode separators do not start a line in any editor.
    lines = text.removesuffix("\n").split("\n")
    if "\r" in text:
        lines = [line.removesuffix("\r") for line in lines]
    for number, line in enumerate(lines, start=1):
        if found(line):
            yield number, line


def check_limit(limit: int | None) -> None:
    if limit is not None and limit < 0:
        raise FilesystemError(f"limit must not be negative, got {limit}")
