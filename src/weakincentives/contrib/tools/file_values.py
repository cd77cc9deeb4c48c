"""Parameters and results of the file tools, and how a model sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import Field

from weakincentives.core.media import Media
from weakincentives.core.text import size_of
from weakincentives.filesystem import FileStat, GrepMatch

Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]

_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """How much of files and lists a model gets at once, and which directories are not searched."""

    max_lines: int = 2_000
    """Lines of a file."""
    max_chars: int = 60_000
    """Characters of a file, or of matching lines."""
    max_line_chars: int = 2_000
    """Characters of one line of a file."""
    max_file_bytes: int = 10_000_000
    """Larger files are not read, edited or searched."""
    max_picture_bytes: int = 3_700_000
    """Larger pictures are not shown: providers refuse them."""
    max_entries: int = 500
    """Entries of a list."""
    unsearched: tuple[str, ...] = (".git", ".hg", ".venv", "__pycache__", "node_modules")
    """Directories that are searched only when the path or the pattern names them."""

    def __post_init__(self) -> None:
        check_positive(self)


def check_positive(config: Any) -> None:
    """Raise ValueError if a field whose default is a number is not above zero."""
    for each in fields(config):
        value = getattr(config, each.name)
        if type(each.default) in (int, float) and not value > 0:
            raise ValueError(f"{each.name} must be positive, got {value}")


# Parameters


@dataclass(frozen=True, slots=True)
class ListDirectoryParams:
    path: str = "."
    """Directory to list."""
    offset: Count = 0
    """Entries to skip."""
    limit: AtLeastOne | None = None
    """Entries to show at most."""


@dataclass(frozen=True, slots=True)
class ReadFileParams:
    path: str
    """File to read."""
    offset: Count = 0
    """Lines to skip: 100 starts at line 101."""
    limit: AtLeastOne | None = None
    """Lines to show at most."""
    column: Count = 0
    """Characters to skip in each line, to see the rest of a very long line."""


@dataclass(frozen=True, slots=True)
class WriteFileParams:
    path: str
    """File to write; missing directories are created."""
    content: str
    """The whole text of the file."""
    overwrite: bool = False
    """Replace the file if it exists; not needed if you have read it."""


@dataclass(frozen=True, slots=True)
class EditFileParams:
    path: str
    """File to change."""
    old_string: str
    """Text to replace, exactly as in the file: with its indentation, without line numbers."""
    new_string: str
    """Replacement text."""
    replace_all: bool = False
    """Replace every occurrence; otherwise there must be exactly one."""


@dataclass(frozen=True, slots=True)
class GlobFilesParams:
    pattern: str
    """Such as '**/*.py': '*' matches within a name, '**' any number of directories."""
    path: str = "."
    """Directory to look in."""
    offset: Count = 0
    """Files to skip."""
    limit: AtLeastOne | None = None
    """Files to show at most."""


@dataclass(frozen=True, slots=True)
class GrepFilesParams:
    pattern: str
    """Regular expression to find in a line. No look-around or back-references."""
    path: str = "."
    """Directory or file to look in."""
    glob: str = "**/*"
    """Only files that match, such as '*.py' at any depth or 'src/**/*.ts'."""
    ignore_case: bool = False
    """Ignore upper and lower case."""
    offset: Count = 0
    """Matching lines to skip."""
    limit: AtLeastOne = 100
    """Lines to show at most."""


@dataclass(frozen=True, slots=True)
class SearchFilesParams:
    query: Annotated[str, Field(min_length=1)]
    """Part of a file name; case is ignored."""
    offset: Count = 0
    """Files to skip."""
    limit: AtLeastOne | None = None
    """Files to show at most."""


@dataclass(frozen=True, slots=True)
class TransferParams:
    source: str
    """File or directory to move or copy."""
    destination: str
    """New path, including the name."""
    overwrite: bool = False
    """Replace an existing destination."""


@dataclass(frozen=True, slots=True)
class DeleteFileParams:
    path: str
    """File or directory to delete."""
    recursive: bool = False
    """Delete a directory with everything in it."""


# Results


@dataclass(frozen=True, slots=True)
class DirectoryListing:
    path: str
    entries: tuple[FileStat, ...]
    notice: str = ""

    def render(self) -> str:
        return _lines(map(_entry_line, self.entries), self.notice)


@dataclass(frozen=True, slots=True)
class FileContent:
    """Lines of a text file, or a picture; neither if it is empty or something else."""

    path: str
    lines: tuple[str, ...]
    """Without line ends."""
    first_line: int = 1
    total_lines: int = 0
    notice: str = ""
    digest: str = ""
    """Of the whole file when it was read; not shown to the model."""
    media: Media | None = None
    """The picture or PDF that the file is."""

    def render(self) -> str:
        if self.media is not None:
            return self.media.render()
        return _lines(_numbered(self.lines, self.first_line), self.notice)


@dataclass(frozen=True, slots=True)
class FileEdited:
    path: str
    replacements: int
    first_line: int
    """Number of the first line of the snippet."""
    snippet: tuple[str, ...]
    """The first change and the lines around it."""

    def render(self) -> str:
        return _lines(_numbered(self.snippet, self.first_line))


@dataclass(frozen=True, slots=True)
class FilesFound:
    paths: tuple[str, ...]
    notice: str = ""

    def render(self) -> str:
        return _lines(map(_printable, self.paths), self.notice)


@dataclass(frozen=True, slots=True)
class LinesFound:
    matches: tuple[GrepMatch, ...]
    notice: str = ""

    def render(self) -> str:
        return _lines(
            (f"{_printable(each.path)}:{each.line_number}: {each.line}" for each in self.matches),
            self.notice,
        )


@dataclass(frozen=True, slots=True)
class FileTransferred:
    source: str
    destination: str

    def render(self) -> str:
        return ""  # the message says it all


@dataclass(frozen=True, slots=True)
class FileDeleted:
    path: str
    files: int
    """The number of files deleted."""

    def render(self) -> str:
        return ""  # the message says it all


def _lines(lines: Iterable[str], notice: str = "") -> str:
    return "\n".join([*lines, *([f"[{notice}]"] if notice else [])])


def _numbered(lines: Sequence[str], first: int) -> Iterator[str]:
    return (f"{number:>6}\t{line}" for number, line in enumerate(lines, first))


def _entry_line(entry: FileStat) -> str:
    name = _printable(entry.path.rpartition("/")[2])
    if entry.kind == "directory":
        return f"{name}/"
    if entry.kind == "link":
        return f"{name} (a broken link, or a link out of the workspace)"
    if entry.kind == "other":
        return f"{name} (not a regular file)"
    return f"{name} ({size_of(entry.size)}{', read-only' if entry.readonly else ''})"


def _printable(path: str) -> str:
    """Return a path on one line."""
    return path if path.isprintable() else ascii(path)


# Wording


def cut(line: str, most: int) -> str:
    """Return the start of a line, and how much is missing."""
    if len(line) <= most:
        return line
    return f"{line[:most]}... ({len(line) - most} more characters)"


def listed(names: Sequence[str]) -> str:
    """Return the first names in one line, and how many more there are."""
    more = len(names) - _LISTED
    return ", ".join(map(_printable, names[:_LISTED])) + (f" and {more} more" if more > 0 else "")
