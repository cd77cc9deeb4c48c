"""What the file tools take and give, and how a model sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from weakincentives.filesystem import FileStat, GrepMatch

Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]

_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """How much of files and lists a model is given at once, and what is not searched."""

    max_lines: int = 2_000
    """Lines of a file."""
    max_chars: int = 60_000
    """Characters of a file, or of lines that were found."""
    max_line_chars: int = 2_000
    """Characters of one line of a file."""
    max_file_bytes: int = 10_000_000
    """A larger file is not read, edited or searched."""
    max_entries: int = 500
    """Entries of a list."""
    unsearched: tuple[str, ...] = (".git", ".hg", ".venv", "__pycache__", "node_modules")
    """Directories that are not searched unless the path or the pattern names them."""

    def __post_init__(self) -> None:
        for name in ("max_lines", "max_chars", "max_line_chars", "max_file_bytes", "max_entries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


# What a model gives


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
    """Lines to skip: 100 begins with line 101."""
    limit: AtLeastOne | None = None
    """Lines to show at most."""
    column: Count = 0
    """Characters to skip in each line, to see the rest of a very long one."""


@dataclass(frozen=True, slots=True)
class WriteFileParams:
    path: str
    """File to write; missing directories are made."""
    content: str
    """The whole text of the file."""
    overwrite: bool = False
    """Replace the file if it exists; not needed for one that was read."""


@dataclass(frozen=True, slots=True)
class EditFileParams:
    path: str
    """File to change."""
    old_string: str
    """Text to replace, exactly as in the file: with its indentation, without line numbers."""
    new_string: str
    """Text to put in its place."""
    replace_all: bool = False
    """Replace every occurrence; otherwise there must be exactly one."""


@dataclass(frozen=True, slots=True)
class GlobFilesParams:
    pattern: str
    """Such as '**/*.py': '*' stays within a name, '**' is any number of directories."""
    path: str = "."
    """Directory to look in."""
    offset: Count = 0
    """Files to skip."""
    limit: AtLeastOne | None = None
    """Files to show at most."""


@dataclass(frozen=True, slots=True)
class GrepFilesParams:
    pattern: str
    """Regular expression to find in a line. No look-around, no back-references."""
    path: str = "."
    """Directory or file to look in."""
    glob: str = "**/*"
    """Only files that match, such as '*.py' at any depth or 'src/**/*.ts'."""
    ignore_case: bool = False
    """Take upper and lower case as the same."""
    offset: Count = 0
    """Lines found to skip."""
    limit: AtLeastOne = 100
    """Lines to show at most."""


@dataclass(frozen=True, slots=True)
class SearchFilesParams:
    query: Annotated[str, Field(min_length=1)]
    """Part of a file's name, in any case."""
    offset: Count = 0
    """Files to skip."""
    limit: AtLeastOne | None = None
    """Files to show at most."""


@dataclass(frozen=True, slots=True)
class TransferParams:
    source: str
    """File or directory to take."""
    destination: str
    """Where to put it: the whole path, with its name."""
    overwrite: bool = False
    """Replace what is at the destination."""


@dataclass(frozen=True, slots=True)
class DeleteFileParams:
    path: str
    """File or directory to delete."""
    recursive: bool = False
    """Delete a directory with all that is in it."""


# What a model gets


@dataclass(frozen=True, slots=True)
class DirectoryListing:
    path: str
    entries: tuple[FileStat, ...]
    notice: str = ""

    def render(self) -> str:
        return _lines(map(_entry_line, self.entries), self.notice)


@dataclass(frozen=True, slots=True)
class FileContent:
    """Some lines of a text file; none of one that is empty, or not text."""

    path: str
    lines: tuple[str, ...]
    """Without their ends."""
    first_line: int = 1
    total_lines: int = 0
    notice: str = ""
    digest: str = ""
    """Of the whole file as it was then; not shown to the model."""

    def render(self) -> str:
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
        return ""  # the message has it all


@dataclass(frozen=True, slots=True)
class FileDeleted:
    path: str
    files: int
    """How many files went with it."""

    def render(self) -> str:
        return ""  # the message has it all


def _lines(lines: Iterable[str], notice: str = "") -> str:
    return "\n".join([*lines, *([f"[{notice}]"] if notice else [])])


def _numbered(lines: Sequence[str], first: int) -> Iterator[str]:
    return (f"{number:>6}\t{line}" for number, line in enumerate(lines, first))


def _entry_line(entry: FileStat) -> str:
    name = _printable(entry.path.rpartition("/")[2])
    if entry.kind == "directory":
        return f"{name}/"
    if entry.kind == "link":
        return f"{name} (a link that leads nowhere, or out of the workspace)"
    if entry.kind == "other":
        return f"{name} (not a regular file)"
    return f"{name} ({size_of(entry.size)}{', read-only' if entry.readonly else ''})"


def _printable(path: str) -> str:
    """Return a path on one line, whatever is in it."""
    return path if path.isprintable() else ascii(path)


# Words


def counted(count: int, thing: str, things: str = "") -> str:
    """Return how many there are: ``1 file``, ``2 files``."""
    return f"1 {thing}" if count == 1 else f"{count} {things or thing + 's'}"


def size_of(count: int) -> str:
    """Return a number of bytes as a person says it."""
    if count < 1_000:
        return counted(count, "byte")
    return f"{count / 1_000:.1f} kB" if count < 1_000_000 else f"{count / 1_000_000:.1f} MB"


def cut(line: str, most: int) -> str:
    """Return the beginning of a line, and how much is missing."""
    if len(line) <= most:
        return line
    return f"{line[:most]}... ({len(line) - most} more characters)"


def listed(names: Sequence[str]) -> str:
    """Return some names in one line, and how many more there are."""
    more = len(names) - _LISTED
    return ", ".join(map(_printable, names[:_LISTED])) + (f" and {more} more" if more > 0 else "")
