"""Text in files: telling text from bytes, replacing a part of it, and searching many files.

Ripgrep rules files out where it sees what the call sees. What is found never depends on it: it is
asked only for a text that every match must contain, and each file that may hold a match is read
and matched here.
"""

from __future__ import annotations

import mimetypes
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weakincentives.call import CancellationToken
from weakincentives.contrib.tools.file_values import cut, listed, size_of
from weakincentives.errors import FilesystemError, ToolValidationError
from weakincentives.filesystem import Filesystem, GrepMatch
from weakincentives.filesystem.patterns import matching_lines
from weakincentives.text import linear_matcher

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


MAX_PATTERN = 1_000
MAX_REPEATS = 1_000

WORTH_ASKING = 200
"""From so many files on, starting a program is quicker than reading them."""

_RIPGREP_TIMEOUT = 20.0

_TOKEN = re.compile(
    r"""
    (?P<text>  # a character that stands for itself
        \\(?P<escaped>[-\\.+*?()|\[\]{}^$#&~/"'!%,:;=@_`\ ]) | [^\\.^$*+?{}\[\]()|]
    )
    # a class, or a place
    | \\[dDwWsSbBAz](?!\{) | [.^$] | \[\^?\]?(?:\\.|[^\[\]\\])*\]
    # one or more of the one before
    | \+\??(?![*+?{])
    # perhaps none of it
    | (?P<maybe> [*+?] | \{[^}]*\} )
    """,
    re.VERBOSE,
)


def pattern_matcher(pattern: str, *, ignore_case: bool) -> Callable[[str], bool]:
    """Return whether a line has a match of a model's pattern; a bad one raises InvalidPattern."""
    return linear_matcher(
        pattern, max_length=MAX_PATTERN, max_repeats=MAX_REPEATS, ignore_case=ignore_case
    )


@dataclass(slots=True)
class Search:
    """A search for lines, file by file; it notes which files it could not tell about."""

    files: Filesystem
    signal: CancellationToken
    """Ends the search when nobody waits for it any more."""
    is_match: Callable[[str], bool]
    max_bytes: int
    too_large: list[str] = field(default_factory=list[str])
    not_shown: list[str] = field(default_factory=list[str])
    """Files with a match whose text is in another encoding."""

    def lines(self, names: Iterable[str]) -> Iterator[GrepMatch]:
        for name in names:
            if self.signal.cancelled:
                return
            data = self._read(name)
            for number, line in matching_lines(data, self.is_match):
                yield GrepMatch(path=name, line_number=number, line=line)
            if text_of(data) is None and self._would_match(data):
                self.not_shown.append(name)

    def _read(self, name: str) -> bytes:
        try:
            if self.files.stat(name).size <= self.max_bytes:
                return self.files.read_bytes(name)
        except FilesystemError:
            return b""  # gone meanwhile, or not to be read: there is nothing to be found in it
        self.too_large.append(name)
        return b""

    def _would_match(self, data: bytes) -> bool:
        """Whether a line matches as far as it can be read."""
        readable = data.decode(errors="replace").encode()
        return any(True for _ in matching_lines(readable, self.is_match))

    @property
    def notice(self) -> str:
        notices: list[str] = []
        if self.too_large:
            size = size_of(self.max_bytes)
            notices.append(f"Not searched, larger than {size}: {listed(self.too_large)}")
        if self.not_shown:
            notices.append(f"Not shown, as it is not UTF-8 text: {listed(self.not_shown)}")
        return ". ".join(notices)


def required_text(pattern: str, *, ignore_case: bool = False) -> str:
    """Return the longest text found that every match contains; empty where none is certain.

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
                runs[-1] = runs[-1][:-1]  # the one before may be missing
            runs.append("")
        elif ignore_case and not text.isascii():
            runs.append("")  # its cases are a matter of tables, and those have versions
        else:
            runs[-1] += text
    # A group, or what is not understood, ends the search: what came before it still holds.
    return max(runs, key=len)


def may_match(
    search: Search, path: str, names: Sequence[str], text: str, *, ignore_case: bool
) -> Sequence[str]:
    """Return the files below a directory that are to be looked at for a text; at worst all."""
    if not text or len(names) < WORTH_ASKING:
        return names
    root = _root_on_disk(search.files)
    program = None if root is None else _ripgrep(root)
    if root is None or program is None:
        return names
    inside = search.files.normalize(path)
    where = root / inside
    having = _files_with(program, where, text, ignore_case)
    if having is None:
        return names
    start = 0 if inside == "." else len(inside) + 1
    places = ((name, f"{where}/{name[start:]}") for name in names)
    return [
        name for name, place in places if place in having or _counts_anyway(place, search.max_bytes)
    ]


def _counts_anyway(place: str, max_bytes: int) -> bool:
    """Whether a file is looked at though it was not named: a link, which ripgrep does not follow,
    or a file so large that nothing is said but that.
    """
    try:
        status = os.lstat(place)
    except OSError:
        return True
    return stat.S_ISLNK(status.st_mode) or status.st_size > max_bytes


def _root_on_disk(files: Filesystem) -> Path | None:
    """Return the directory of a workspace, where a program sees what the call sees."""
    from weakincentives.filesystem import HostFilesystem

    if not isinstance(files, HostFilesystem) or not files.shows_disk:
        return None
    return files.root


def _ripgrep(root: Path) -> str | None:
    """Return the program, unless it lies in the workspace: a model may have written that one."""
    program = shutil.which("rg")
    if program is None or not os.path.isabs(program):
        return None
    candidates = (Path(program), Path(os.path.realpath(program)))
    return None if any(each.is_relative_to(root) for each in candidates) else program


def _files_with(program: str, where: Path, text: str, ignore_case: bool) -> set[str] | None:
    """Return the files below a directory that contain a text, or None when that is not certain."""
    # Hidden and ignored files are files like any other; nothing that the user has set counts.
    command = [program, "--no-config", "--no-ignore", "--hidden", "--fixed-strings"]
    command += ["--ignore-case"] if ignore_case else []
    command += ["--files-with-matches", "--null", "--regexp", text, "--", str(where)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_RIPGREP_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired, ValueError):  # ValueError: a NUL in the text
        return None
    if done.returncode not in (0, 1):  # 1 is "none"; 2 may have left something out
        return None
    return set(map(os.fsdecode, done.stdout.split(b"\0")))
