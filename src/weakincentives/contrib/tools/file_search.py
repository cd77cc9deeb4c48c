"""Text in files: detect it, replace a part of it, and search many files.

Ripgrep rules files out where it sees the same files as the call. The results never depend on it: it
only looks for a text that every match must contain, and each remaining file is read and matched
here.
"""

from __future__ import annotations

import mimetypes
import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weakincentives.contrib.tools.file_values import cut, listed
from weakincentives.core.call import CancellationToken
from weakincentives.core.programs import find_program, safe_environment
from weakincentives.core.text import linear_matcher, size_of
from weakincentives.errors import FilesystemError, ToolValidationError
from weakincentives.filesystem import Filesystem, GrepMatch
from weakincentives.filesystem.patterns import matching_lines

BYTE_ORDER_MARK = "\ufeff"

_BARE_NEWLINE = re.compile(r"(?<!\r)\n")


def text_of(data: bytes) -> str | None:
    """Return bytes decoded as text; None if they are not UTF-8 text."""
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
    """Return the lines of a text without line ends."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def is_crlf(text: str) -> bool:
    """Whether every line ends in CRLF."""
    return "\r\n" in text and not _BARE_NEWLINE.search(text)


def hidden_properties(text: str) -> str:
    """Return the properties of a text that its lines do not show, to append to a message."""
    mark = "; begins with a byte order mark" if text.startswith(BYTE_ORDER_MARK) else ""
    if "\r\n" not in text:
        return mark
    return f"{mark}; {'lines' if is_crlf(text) else 'some lines'} end in CRLF"


@dataclass(frozen=True, slots=True)
class Edit:
    """The result of replacing a part of a text."""

    text: str
    count: int
    """The number of replacements."""
    start: int
    """Where the first replacement starts."""
    end: int
    """Where it ends."""


def replace_text(text: str, old: str, new: str, *, everywhere: bool, where: str) -> Edit:
    """Return a text with one part replaced; raise ToolValidationError if the part is not unique.

    In a text whose lines all end in CRLF, a newline in ``old`` and ``new`` means CRLF. ``where``
    names the text in messages.
    """
    if is_crlf(text):
        old, new = _BARE_NEWLINE.sub("\r\n", old), _BARE_NEWLINE.sub("\r\n", new)
    if not old:
        raise ToolValidationError(
            "old_string is empty: give the text to replace, or use write_file for a whole file"
        )
    if old == new:
        raise ToolValidationError("old_string and new_string are the same: nothing would change")
    places = _places(text, old)
    if not places:
        raise ToolValidationError(
            f"old_string was not found in {where}{_similar(text, old)}\n"
            "Read the file again and copy the text exactly, with its indentation and without line "
            "numbers. Where only some lines end in CRLF, change one line at a time"
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
    """Return where a text is found, overlapping places included."""
    places: list[int] = []
    start = text.find(old)
    while start >= 0:
        places.append(start)
        start = text.find(old, start + 1)
    return places


def _similar(text: str, old: str) -> str:
    """Return a hint if only the whitespace around the first line differs."""
    wanted = next((line.strip() for line in old.splitlines() if line.strip()), "")
    for number, line in enumerate(split_lines(text), start=1):
        if wanted and line.strip() == wanted:
            return f". Line {number} is similar to its first line: {cut(line, 200)!r}"
    return ""


MAX_PATTERN = 1_000
MAX_REPEATS = 1_000

RIPGREP_MIN_FILES = 200
"""Starting ripgrep is faster than reading this many files."""

_RIPGREP_TIMEOUT = 20.0

_TOKEN = re.compile(
    r"""
    (?P<text>  # a literal character
        \\(?P<escaped>[-\\.+*?()|\[\]{}^$#&~/"'!%,:;=@_`\ ]) | [^\\.^$*+?{}\[\]()|]
    )
    # a class, or an anchor
    | \\[dDwWsSbBAz](?!\{) | [.^$] | \[\^?\]?(?:\\.|[^\[\]\\])*\]
    # one or more
    | \+\??(?![*+?{])
    # possibly none
    | (?P<maybe> [*+?] | \{[^}]*\} )
    """,
    re.VERBOSE,
)


def pattern_matcher(pattern: str, *, ignore_case: bool) -> Callable[[str], bool]:
    """Return a function that tells whether a line matches; raise InvalidPattern."""
    return linear_matcher(
        pattern, max_length=MAX_PATTERN, max_repeats=MAX_REPEATS, ignore_case=ignore_case
    )


@dataclass(slots=True)
class Search:
    """A search for lines, file by file; it notes which files it could not search or show."""

    files: Filesystem
    signal: CancellationToken
    """Ends the search when it is cancelled."""
    pattern: str
    ignore_case: bool
    max_bytes: int
    too_large: list[str] = field(default_factory=list[str])
    not_shown: list[str] = field(default_factory=list[str])
    """Files with a match whose text is in another encoding."""

    def lines(self, names: Sequence[str], path: str) -> Iterator[GrepMatch]:
        """Yield the matching lines of files below a path."""
        is_match = pattern_matcher(self.pattern, ignore_case=self.ignore_case)
        for name in self._candidates(names, path):
            if self.signal.cancelled:
                return
            data = self._read(name)
            for number, line in matching_lines(data, is_match):
                yield GrepMatch(path=name, line_number=number, line=line)
            if text_of(data) is None:
                readable = data.decode(errors="replace").encode()
                if any(True for _ in matching_lines(readable, is_match)):
                    self.not_shown.append(name)

    def _read(self, name: str) -> bytes:
        try:
            if self.files.stat(name).size <= self.max_bytes:
                return self.files.read_bytes(name)
        except FilesystemError:
            return b""  # deleted since, or not readable
        self.too_large.append(name)
        return b""

    @property
    def notice(self) -> str:
        notices: list[str] = []
        if self.too_large:
            size = size_of(self.max_bytes)
            notices.append(f"Not searched, larger than {size}: {listed(self.too_large)}")
        if self.not_shown:
            notices.append(f"Not shown, as it is not UTF-8 text: {listed(self.not_shown)}")
        return ". ".join(notices)

    def _candidates(self, names: Sequence[str], path: str) -> Sequence[str]:
        """Return the files that may have a match, as far as ripgrep can tell; at worst all."""
        text = required_text(self.pattern, ignore_case=self.ignore_case)
        root = _root_on_disk(self.files)
        if not text or len(names) < RIPGREP_MIN_FILES or root is None:
            return names
        where = root / self.files.normalize(path)
        having = _files_with(where, text, self.ignore_case) if where.is_dir() else None
        if having is None:
            return names
        return [
            name
            for name in names
            if f"{root}/{name}" in having or self._must_read(f"{root}/{name}")
        ]

    def _must_read(self, place: str) -> bool:
        """Whether to look at a file that ripgrep did not name: it follows no links, and files that
        are too large are reported in any case.
        """
        try:
            status = os.lstat(place)
        except OSError:
            return True
        return stat.S_ISLNK(status.st_mode) or status.st_size > self.max_bytes


def required_text(pattern: str, *, ignore_case: bool = False) -> str:
    """Return the longest text that every match contains; empty where none is certain.

    >>> required_text(r"def \\w+_test\\(self")
    '_test(self'
    """
    if "|" in pattern:
        return ""
    runs = [""]
    position = 0
    while token := _TOKEN.match(pattern, position):
        position = token.end()
        text = token["escaped"] or token["text"]
        if text is None:
            if token["maybe"]:
                runs[-1] = runs[-1][:-1]  # the character before is optional
            runs.append("")
        elif ignore_case and not text.isascii():
            runs.append("")  # how its case folds depends on the version of Unicode
        else:
            runs[-1] += text
    # A group, or unknown syntax, ends the search: the text before it still holds.
    return max(runs, key=len)


def _root_on_disk(files: Filesystem) -> Path | None:
    """Return the directory of a workspace if a program sees the same files as the call."""
    from weakincentives.filesystem import HostFilesystem

    if not isinstance(files, HostFilesystem) or not files.shows_disk:
        return None
    return files.root


def _files_with(where: Path, text: str, ignore_case: bool) -> set[str] | None:
    """Return the files below a directory that contain a text, or None when that is not certain."""
    program = find_program("rg")
    if program is None:
        return None
    # Hidden and ignored files count, the user's settings do not.
    command = [program, "--no-config", "--no-ignore", "--hidden", "--fixed-strings"]
    command += ["--ignore-case"] if ignore_case else []
    command += ["--files-with-matches", "--null", "--regexp", text, "--", str(where)]
    try:
        done = subprocess.run(
            command,
            cwd="/",  # version managers look there for a file that names the program to run
            env=safe_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_RIPGREP_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired, ValueError):  # ValueError: a NUL in the text
        return None
    if done.returncode not in (0, 1):  # 1 is "none"; 2 is an error
        return None
    return set(map(os.fsdecode, done.stdout.split(b"\0")))
