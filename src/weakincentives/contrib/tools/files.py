"""The file tools: how a model reads, finds and changes files, in memory or in a directory."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast

from weakincentives.clock import SYSTEM_CLOCK, Clock
from weakincentives.contrib.tools.file_search import (
    BYTE_ORDER_MARK,
    Edit,
    Search,
    describe_binary,
    may_match,
    pattern_matcher,
    peculiarities,
    replace_text,
    required_text,
    split_lines,
    text_of,
)
from weakincentives.contrib.tools.file_values import (
    DeleteFileParams,
    DirectoryListing,
    EditFileParams,
    FileContent,
    FileDeleted,
    FileEdited,
    FileLimits,
    FilesFound,
    FileTransferred,
    GlobFilesParams,
    GrepFilesParams,
    LinesFound,
    ListDirectoryParams,
    ReadFileParams,
    SearchFilesParams,
    TransferParams,
    WriteFileParams,
    counted,
    cut,
    listed,
    size_of,
)
from weakincentives.contrib.tools.mounts import HostMount, LeftOut, left_out_text, read_mount
from weakincentives.errors import (
    AlreadyExists,
    BinaryFile,
    FilesystemError,
    NoSuchFile,
    NotAFile,
    ToolValidationError,
)
from weakincentives.filesystem import FileStat, Filesystem, GrepMatch, MemoryFilesystem
from weakincentives.filesystem.protocol import DEFAULT_ROOT, encode_text, shown
from weakincentives.prompt.contracts import NotificationEffect, PermissionPrecondition
from weakincentives.prompt.policies import ReadBeforeWritePolicy, content_digest, is_seen
from weakincentives.prompt.section import Section, SectionOptions
from weakincentives.prompt.tool import Tool, ToolContext, ToolExample
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.resources import Binding, ResourceRegistry
from weakincentives.retry import RetryPolicies, RetryPolicy

if TYPE_CHECKING:
    from weakincentives.runtime.session import Session


@dataclass(frozen=True, slots=True)
class FileWriteParams:
    path: str
    """File path to write to."""
    content: str
    """Content to write."""
    encoding: Literal["utf-8", "ascii", "base64"] = "utf-8"
    """File encoding; base64 is for bytes: the content is decoded."""
    overwrite: bool = False
    """Overwrite existing file."""


@dataclass(frozen=True, slots=True)
class FileWritten:
    """What was written, and where."""

    path: str
    bytes_written: int
    timestamp: float

    def render(self) -> str:
        return ""  # the message has it all


def file_write_tool(
    *, timeout: float = 10.0, retry: RetryPolicy = RetryPolicies.QUICK
) -> Tool[FileWriteParams, FileWritten]:
    """Return the tool ``write``, for the namespace ``file``.

    It needs the permission ``file:write``, and an ``EventBus`` to be heard on: ``file:changed`` is
    told once the call is committed.
    """
    return Tool[FileWriteParams, FileWritten](
        name="write",
        description="Write content to a file",
        handler=_write,
        reach="reversible",
        timeout=timeout,
        retry=retry,
        preconditions=[
            PermissionPrecondition(
                description="File write permission required", permission="file:write"
            ),
        ],
        effects=[
            NotificationEffect(
                description="Notify on file change", event="file:changed", payload=_change
            )
        ],
    )


def _write(params: FileWriteParams, *, context: ToolContext) -> ToolResult[FileWritten]:
    files = context.filesystem
    try:
        if not params.overwrite and files.exists(params.path):
            return ToolResult.error(
                f"File '{params.path}' already exists",
                code="FILE_EXISTS",
                suggestions=("Set overwrite: true", "Choose different path"),
            )
        data = _encoded(params)
        files.write_bytes(params.path, data)
    except (FilesystemError, ValueError) as error:
        return ToolResult.error(str(error), code="WRITE_FAILED", recoverable=False)
    written = FileWritten(files.normalize(params.path), len(data), context.session.clock.time())
    return ToolResult.ok(written, f"Wrote {len(data)} bytes to {written.path}")


def _encoded(params: FileWriteParams) -> bytes:
    if params.encoding == "base64":
        try:
            return base64.b64decode(params.content, validate=True)
        except binascii.Error as error:
            raise ValueError(f"The content is not base64: {error}") from error
    try:
        return params.content.encode(params.encoding)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The character at position {error.start} cannot be written as {params.encoding}"
        ) from error


def _change(result: ToolResult[Any]) -> dict[str, object]:
    written = cast("FileWritten", result.value)
    return {"path": written.path, "action": "write", "timestamp": written.timestamp}


write = file_write_tool()
"""The tool with its defaults."""


T = TypeVar("T")

_SNIPPET_LINES = 3
"""How many lines around a change are shown."""
_SNIPPET_MOST = 40
_GREP_LINE_CHARS = 500
_SIMILAR = 10
_MAX_UNNAMED = 20
_BRACES = "\nBraces stand for themselves in a pattern: make one call for each of the names in them"


# The tools


def file_tools(
    *, limits: FileLimits | None = None, read_only: bool = False
) -> tuple[Tool[Any, Any], ...]:
    """Return the file tools, for a section of your own; they work on the ``Filesystem`` resource.

    ``read_only`` leaves out those that change something. Attach a ``ReadBeforeWritePolicy`` where
    you offer the others.
    """
    suite = _FileTools(limits or FileLimits())
    return suite.reading() if read_only else (*suite.reading(), *suite.writing())


@dataclass(frozen=True, slots=True)
class _FileTools:
    limits: FileLimits

    def reading(self) -> tuple[Tool[Any, Any], ...]:
        return (
            Tool[ListDirectoryParams, DirectoryListing](
                name="list_directory",
                description="List the files and directories in a directory.",
                handler=self.list_directory,
                reach="read",
                concurrent=True,
            ),
            Tool[ReadFileParams, FileContent](
                name="read_file",
                description="Read a text file, with line numbers. A long file comes in parts: "
                "use offset and limit.",
                handler=self.read_file,
                reach="read",
                concurrent=True,
                examples=(_READ_EXAMPLE,),
            ),
            Tool[GlobFilesParams, FilesFound](
                name="glob_files",
                description="Find files by a pattern of their path, such as '**/*.py'.",
                handler=self.glob_files,
                reach="read",
                concurrent=True,
            ),
            Tool[GrepFilesParams, LinesFound](
                name="grep_files",
                description="Find lines in files by a regular expression.",
                handler=self.grep_files,
                reach="read",
                concurrent=True,
                examples=(_GREP_EXAMPLE,),
            ),
            Tool[SearchFilesParams, FilesFound](
                name="search_files",
                description="Find files by a part of their name. To find text in files, use "
                "grep_files.",
                handler=self.search_files,
                reach="read",
                concurrent=True,
            ),
        )

    def writing(self) -> tuple[Tool[Any, Any], ...]:
        return (
            Tool[WriteFileParams, FileWritten](
                name="write_file",
                description="Write a whole file. One that exists must have been read; to change a "
                "part of it, use edit_file.",
                handler=_write_file,
                reach="reversible",
                concurrent=True,
            ),
            Tool[EditFileParams, FileEdited](
                name="edit_file",
                description="Replace a text in a file by another. The text must be found exactly "
                "once, unless replace_all is set. Read the file first.",
                handler=self.edit_file,
                reach="reversible",
                concurrent=True,
                examples=(_EDIT_EXAMPLE,),
            ),
            Tool[TransferParams, FileTransferred](
                name="move_file",
                description="Move or rename a file or directory.",
                handler=_move_file,
                reach="reversible",
                concurrent=True,
            ),
            Tool[TransferParams, FileTransferred](
                name="copy_file",
                description="Copy a file or directory.",
                handler=_copy_file,
                reach="reversible",
                concurrent=True,
            ),
            Tool[DeleteFileParams, FileDeleted](
                name="delete_file",
                description="Delete a file, or a directory with recursive=true.",
                handler=_delete_file,
                reach="reversible",
                concurrent=True,
            ),
        )

    # Looking

    def list_directory(
        self, params: ListDirectoryParams, *, context: ToolContext
    ) -> ToolResult[DirectoryListing]:
        files = context.filesystem
        try:
            entries = files.list(params.path)
        except NoSuchFile as error:
            raise NoSuchFile(
                f"Directory not found: {shown(params.path)}\n"
                "Use list_directory without a path to see where to begin"
            ) from error
        page, notice = self._page(entries, params.offset, params.limit)
        notice = ". ".join(filter(None, (notice, _not_listed(files, params.path))))
        path = files.normalize(params.path)
        where = "The workspace" if path == "." else shown(path)
        how_many = counted(len(entries), "entry", "entries") if entries else "no entries"
        return ToolResult.ok(DirectoryListing(path, page, notice), f"{where} has {how_many}")

    def read_file(self, params: ReadFileParams, *, context: ToolContext) -> ToolResult[FileContent]:
        files = context.filesystem
        data = self._load(files, params.path)
        path = files.normalize(params.path)
        text = text_of(data)
        name = shown(path)
        digest = content_digest(data)
        if text is None:
            content = FileContent(path, (), digest=digest)
            return ToolResult.ok(content, f"{name} {describe_binary(path, data)}")
        lines = split_lines(text.removeprefix(BYTE_ORDER_MARK))
        if not lines:
            return ToolResult.ok(FileContent(path, (), digest=digest), f"{name} is empty")
        if params.offset >= len(lines):
            raise ToolValidationError(
                f"{name} has {counted(len(lines), 'line')}, so offset={params.offset} is after "
                "its end. Give a smaller offset"
            )
        content = replace(self._part(path, lines, params), digest=digest)
        last = params.offset + len(content.lines)
        message = f"{name}: lines {params.offset + 1} to {last} of {len(lines)}"
        message += peculiarities(text)
        return ToolResult.ok(content, message)

    def _part(self, path: str, lines: list[str], params: ReadFileParams) -> FileContent:
        """Return as many of the lines as were asked for and fit."""
        limits = self.limits
        count = min(params.limit or limits.max_lines, limits.max_lines)
        parts: list[str] = []
        too_long = 0
        left = limits.max_chars
        for number, line in enumerate(lines[params.offset : params.offset + count], params.offset):
            part = line[params.column :][: limits.max_line_chars]
            left -= len(part) + 1
            if parts and left < 0:
                break
            parts.append(part)
            if len(line) > params.column + len(part) and not too_long:
                too_long = number + 1
        last = params.offset + len(parts)
        notices: list[str] = []
        if last < len(lines):
            notices.append(
                f"{counted(len(lines) - last, 'more line')}. Call read_file with offset={last} "
                "to go on"
            )
        if too_long:
            notices.append(
                f"Line {too_long} has {len(lines[too_long - 1])} characters and is cut. Call "
                f"read_file with offset={too_long - 1}, limit=1 and "
                f"column={params.column + limits.max_line_chars} for more of it"
            )
        first = params.offset + 1
        return FileContent(path, tuple(parts), first, len(lines), ". ".join(notices))

    def glob_files(
        self, params: GlobFilesParams, *, context: ToolContext
    ) -> ToolResult[FilesFound]:
        files = context.filesystem
        names = self._below(files, params.path, params.pattern)
        if "{" in params.pattern:
            hint = _BRACES
        elif "/" not in params.pattern:
            hint = f"\nTo look in all directories, use the pattern '**/{params.pattern}'"
        else:
            hint = "\nTry a wider pattern, or list_directory to see what is there"
        return self._found(names, params, params.pattern, hint)

    def search_files(
        self, params: SearchFilesParams, *, context: ToolContext
    ) -> ToolResult[FilesFound]:
        names = self._searched(context.filesystem.search(params.query), ".", params.query)
        hint = "\nTry glob_files for pattern matching or grep_files for text search"
        return self._found(names, params, params.query, hint)

    def _found(
        self, names: _Names, params: GlobFilesParams | SearchFilesParams, asked: str, hint: str
    ) -> ToolResult[FilesFound]:
        page, notice = self._page(names.searched, params.offset, params.limit)
        found = FilesFound(page, _joined(notice, names.notice))
        if not names.searched:
            return ToolResult.ok(found, f"No files match '{asked}'{hint}")
        how_many = counted(len(names.searched), "file")
        return ToolResult.ok(found, f"Found {how_many} matching '{asked}'")

    def grep_files(
        self, params: GrepFilesParams, *, context: ToolContext
    ) -> ToolResult[LinesFound]:
        files = context.filesystem
        is_match = pattern_matcher(params.pattern, ignore_case=params.ignore_case)
        search = Search(files, context.signal, is_match, self.limits.max_file_bytes)
        names, candidates = self._to_grep(search, params)
        lines = islice(search.lines(candidates), params.offset, params.offset + params.limit + 1)
        page, is_more = self._fitting(lines, params.limit)
        notice = ""
        if is_more:
            end = params.offset + len(page)
            notice = f"There are more. Call grep_files with offset={end} for the next ones"
        found = LinesFound(page, _joined(notice, names.notice, search.notice))
        if not page and params.offset:
            return ToolResult.ok(found, f"There are no more than {params.offset} matches")
        if not names.searched:
            hint = _BRACES if "{" in params.glob else ""
            where = shown(params.path)
            return ToolResult.ok(found, f"There are no files '{params.glob}' in {where}{hint}")
        if not page:
            return ToolResult.ok(
                found,
                f"No lines match '{params.pattern}' in {counted(len(names.searched), 'file')}\n"
                "Try a shorter pattern, ignore_case=true or another path",
            )
        how_many = counted(len(page), "matching line")
        in_files = counted(len({match.path for match in page}), "file")
        return ToolResult.ok(found, f"Found {how_many} in {in_files}")

    def _to_grep(self, search: Search, params: GrepFilesParams) -> tuple[_Names, Sequence[str]]:
        """Return the files that are searched, and those of them that may have a match."""
        files = search.files
        kind = _stat(files, params.path).kind
        if kind != "directory":
            if kind != "file":
                files.read_bytes(params.path)  # says why it cannot be read
            names = _Names((files.normalize(params.path),))
            return names, names.searched
        glob = params.glob if "/" in params.glob else f"**/{params.glob}"
        names = self._below(files, params.path, glob)
        ignore_case = params.ignore_case
        text = required_text(params.pattern, ignore_case=ignore_case)
        return names, may_match(search, params.path, names.searched, text, ignore_case=ignore_case)

    def _fitting(
        self, found: Iterable[GrepMatch], limit: int
    ) -> tuple[tuple[GrepMatch, ...], bool]:
        """Return as many lines as fit, and whether there are more."""
        page: list[GrepMatch] = []
        left = self.limits.max_chars
        for match in found:
            match = replace(match, line=cut(match.line, _GREP_LINE_CHARS))
            left -= len(match.line) + len(match.path)
            if len(page) == limit or (page and left < 0):
                return tuple(page), True
            page.append(match)
        return tuple(page), False

    def _below(self, files: Filesystem, path: str, pattern: str) -> _Names:
        return self._searched(files.glob(pattern, path), files.normalize(path), pattern)

    def _searched(self, names: Sequence[str], path: str, asked: str) -> _Names:
        """Leave out what is in directories that nobody looks into, unless they were asked for."""
        start = 0 if path == "." else len(path) + 1
        unsearched = {name for name in self.limits.unsearched if name not in asked.split("/")}
        searched: list[str] = []
        left_out: dict[str, int] = {}
        for name in names:
            barred = unsearched.intersection(name[start:].split("/")[:-1])
            if barred:
                left_out[min(barred)] = left_out.get(min(barred), 0) + 1
            else:
                searched.append(name)
        if not left_out:
            return _Names(searched)
        notice = (
            f"{counted(sum(left_out.values()), 'file')} in {', '.join(sorted(left_out))} left "
            "out: glob_files and grep_files look there when path or pattern name it"
        )
        return _Names(searched, notice)

    def _page(
        self, items: Sequence[T], offset: int, limit: int | None
    ) -> tuple[tuple[T, ...], str]:
        """Return a part of a list, and a notice when there is more."""
        most = self.limits.max_entries
        page = tuple(items[offset : offset + min(limit or most, most)])
        end = offset + len(page)
        if len(page) == len(items):
            return page, ""
        if not page:
            return page, f"There are only {len(items)}: give a smaller offset"
        notice = f"{offset + 1} to {end} of {len(items)}"
        if end < len(items):
            notice += f". Call again with offset={end} for more"
        return page, notice

    # Changing

    def edit_file(self, params: EditFileParams, *, context: ToolContext) -> ToolResult[FileEdited]:
        files = context.filesystem
        data = self._load(files, params.path)
        path = files.normalize(params.path)
        text = text_of(data)
        if text is None:
            raise BinaryFile(f"{shown(path)} {describe_binary(path, data)} It cannot be edited")
        edit = replace_text(
            text,
            params.old_string,
            params.new_string,
            everywhere=params.replace_all,
            where=shown(path),
        )
        files.write(path, edit.text)
        first, snippet = self._around(edit)
        edited = FileEdited(path, edit.count, first, snippet)
        return ToolResult.ok(edited, f"Edited {shown(path)}: {counted(edit.count, 'replacement')}")

    def _around(self, edit: Edit) -> tuple[int, tuple[str, ...]]:
        """Return the lines around the first change, and the number of the first of them."""
        first = max(0, edit.text.count("\n", 0, edit.start) - _SNIPPET_LINES)
        last = edit.text.count("\n", 0, edit.end) + _SNIPPET_LINES + 1
        lines = split_lines(edit.text)[first : min(last, first + _SNIPPET_MOST)]
        return first + 1, tuple(cut(line, self.limits.max_line_chars) for line in lines)

    def _load(self, files: Filesystem, path: str) -> bytes:
        """Return a file's bytes, unless there are too many of them."""
        status = _stat(files, path)
        if status.kind == "directory":
            name = shown(files.normalize(path))
            raise NotAFile(f"{name} is a directory\nUse list_directory to see what is in it")
        if status.size > self.limits.max_file_bytes:
            raise ToolValidationError(
                f"{shown(path)} has {size_of(status.size)}; files of up to "
                f"{size_of(self.limits.max_file_bytes)} can be read. Work with a smaller one"
            )
        return files.read_bytes(path)


@dataclass(frozen=True, slots=True)
class _Names:
    """Files that are looked at, and what is said of those that are not."""

    searched: Sequence[str]
    notice: str = ""


def _write_file(params: WriteFileParams, *, context: ToolContext) -> ToolResult[FileWritten]:
    files = context.filesystem
    path = files.normalize(params.path)
    existed = files.exists(path)
    if existed and not params.overwrite:
        status = files.stat(path)
        if status.kind == "file" and not is_seen(path, context):
            raise AlreadyExists(
                f"File already exists: {shown(params.path)} ({size_of(status.size)})\n"
                "Set overwrite=true to replace existing file, or use edit_file to change a part"
            )
    data = encode_text(params.content, path)
    files.write_bytes(path, data)
    written = FileWritten(path, len(data), context.session.clock.time())
    lines = counted(len(split_lines(params.content)), "line")
    done = "Replaced" if existed else "Wrote"
    return ToolResult.ok(written, f"{done} {shown(path)}: {size_of(len(data))}, {lines}")


def _move_file(params: TransferParams, *, context: ToolContext) -> ToolResult[FileTransferred]:
    return _transferred(params, context.filesystem, context.filesystem.move, "Moved")


def _copy_file(params: TransferParams, *, context: ToolContext) -> ToolResult[FileTransferred]:
    return _transferred(params, context.filesystem, context.filesystem.copy, "Copied")


def _transferred(
    params: TransferParams, files: Filesystem, transfer: Callable[..., None], done: str
) -> ToolResult[FileTransferred]:
    _stat(files, params.source)
    transfer(params.source, params.destination, overwrite=params.overwrite)
    source, destination = files.normalize(params.source), files.normalize(params.destination)
    message = f"{done} {shown(source)} to {shown(destination)}"
    return ToolResult.ok(FileTransferred(source, destination), message)


def _not_listed(files: Filesystem, path: str) -> str:
    """Return what is to be said of names on a disk that are not text."""
    unnamed = getattr(files, "unnamed", None)
    names: tuple[str, ...] = () if unnamed is None else unnamed(path)
    if not names:
        return ""
    shown_names = ", ".join(names[:_MAX_UNNAMED]) + (", ..." if len(names) > _MAX_UNNAMED else "")
    is_one = len(names) == 1
    return (
        f"Not listed, since no path can name {'it' if is_one else 'them'}: "
        f"{counted(len(names), 'name')} that {'is' if is_one else 'are'} not UTF-8: {shown_names}. "
        f"A command can rename {'it' if is_one else 'them'}"
    )


def _delete_file(params: DeleteFileParams, *, context: ToolContext) -> ToolResult[FileDeleted]:
    files = context.filesystem
    path = files.normalize(params.path)
    is_directory = _stat(files, params.path).kind == "directory"
    count = len(files.glob("**/*", path)) if is_directory else 1
    files.delete(path, recursive=params.recursive)
    inside = f" with {counted(count, 'file')} in it" if is_directory else ""
    return ToolResult.ok(FileDeleted(path, count), f"Deleted {shown(path)}{inside}")


# What is where


def _stat(files: Filesystem, path: str) -> FileStat:
    try:
        return files.stat(path)
    except NoSuchFile as error:
        name = path.rstrip("/").rpartition("/")[2]
        similar = files.search(name, limit=_SIMILAR) if name else ()
        hint = f"\nFiles with such a name: {listed(similar)}" if similar else ""
        raise NoSuchFile(
            f"File not found: {shown(path)}\nUse list_directory to see available files{hint}"
        ) from error


def _joined(*notices: str) -> str:
    return ". ".join(notice for notice in notices if notice)


# What they teach by example

_READ_EXAMPLE = ToolExample[ReadFileParams, FileContent](
    description="Read the next part of a long file",
    input=ReadFileParams("src/app.py", offset=2000, limit=2),
    output=FileContent(
        "src/app.py",
        ("def main() -> None:", "    run()"),
        2001,
        2400,
        "398 more lines. Call read_file with offset=2002 to go on",
    ),
)
_GREP_EXAMPLE = ToolExample[GrepFilesParams, LinesFound](
    description="Find where a function is defined",
    input=GrepFilesParams(r"def main\(", glob="*.py"),
    output=LinesFound(
        (GrepMatch(path="src/app.py", line_number=2001, line="def main() -> None:"),)
    ),
)
_EDIT_EXAMPLE = ToolExample[EditFileParams, FileEdited](
    description="Change one call; the line before it tells it from the others",
    input=EditFileParams(
        "src/app.py", "def main() -> None:\n    run()", "def main() -> None:\n    run(retries=3)"
    ),
    output=FileEdited("src/app.py", 1, 2000, ("", "def main() -> None:", "    run(retries=3)")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VfsConfig:
    """Where the files come from, and how much of them a model is given at once.

    Without ``workspace`` and ``filesystem`` they live in memory: empty, or filled from ``mounts``
    and then from ``files``. Nothing on the host is ever changed then.
    """

    root: str = DEFAULT_ROOT
    """The virtual prefix below which absolute paths are understood; never a host directory."""
    files: Mapping[str, str | bytes] = field(default_factory=dict[str, "str | bytes"])
    """Content by path."""
    mounts: Sequence[HostMount] = ()
    """Host directories to copy files from."""
    workspace: str | os.PathLike[str] | None = None
    """A host directory to work on directly: every change is made there, and can be undone."""
    filesystem: Filesystem | None = None
    """A filesystem of your own to work on; it has its own prefix, and you close it."""
    read_only: bool = False
    """Offer only the tools that change nothing."""
    limits: FileLimits = field(default_factory=FileLimits)

    def __post_init__(self) -> None:
        in_memory = bool(self.files or self.mounts)
        sources = [in_memory, self.workspace is not None, self.filesystem is not None]
        if sum(sources) > 1:
            raise ValueError(
                "files come from memory (files=, mounts=), from a directory (workspace=) or from "
                "a filesystem of your own (filesystem=): give one of the three"
            )


class VfsToolsSection(Section[None]):
    """Guidance and tools to work on files, with the ``Filesystem`` they work on.

    The filesystem is bound as a resource, so other tools of the prompt share it. A model must read
    a file that exists before it writes to it; pass ``policies`` to have other rules.
    """

    depends_only_on_params = True

    def __init__(
        self,
        *,
        session: Session | None = None,
        config: VfsConfig | None = None,
        **options: Unpack[SectionOptions[None]],
    ) -> None:
        self.config = config = config or VfsConfig()
        self.filesystem: Filesystem | None = config.filesystem
        """What the tools work on; None for a directory, which each prompt opens and closes."""
        self.left_out: tuple[LeftOut, ...] = ()
        """What the mounts did not bring, and why."""
        if self.filesystem is None and config.workspace is None:
            clock = SYSTEM_CLOCK if session is None else session.clock
            self.filesystem, self.left_out = _filled(config, clock)
        options.setdefault("title", "Files")
        options.setdefault("policies", () if config.read_only else (ReadBeforeWritePolicy(),))
        tools = file_tools(limits=config.limits, read_only=config.read_only)
        options["tools"] = (*tools, *options.get("tools", ()))
        bound: dict[type[Any], Any] = {
            Filesystem: _opening(config) if self.filesystem is None else self.filesystem
        }
        options["resources"] = ResourceRegistry.build(bound).merge(options.get("resources") or {})
        super().__init__(**options)

    def body(self, params: None, session: Session | None) -> str:
        guidance = _GUIDANCE.format(root=self.config.root)
        if not self.config.read_only:
            guidance += _WRITING
        return "\n\n".join(filter(None, [guidance, left_out_text(self.left_out)]))


def _filled(config: VfsConfig, clock: Clock) -> tuple[MemoryFilesystem, tuple[LeftOut, ...]]:
    """Return a filesystem in memory with what the configuration asks for."""
    files = MemoryFilesystem(root=config.root, clock=clock)
    left_out: list[LeftOut] = []
    for mount in config.mounts:
        taken, missing = read_mount(mount, config.root)
        left_out += missing
        for file in taken:
            _put(files, file.path, file.data, readonly=file.readonly)
    for path, content in config.files.items():
        _put(files, path, content.encode() if isinstance(content, str) else content)
    return files, tuple(left_out)


def _put(files: MemoryFilesystem, path: str, data: bytes, *, readonly: bool = False) -> None:
    """Store a file, also over one that may only be read."""
    if files.is_readonly(path):
        files.set_readonly(path, False)
    files.write_bytes(path, data)
    if readonly:
        files.set_readonly(path)


def _opening(config: VfsConfig) -> Binding[Any]:
    """Return how to open the directory that is worked on directly."""
    assert config.workspace is not None
    directory = os.path.abspath(config.workspace)  # not where the process is by then

    def opened(_: object) -> Filesystem:
        from weakincentives.filesystem import HostFilesystem

        return HostFilesystem(directory, prefix=config.root)

    return Binding(Filesystem, opened)


_GUIDANCE = """\
Use these tools to read and write files of the workspace. Paths are relative to its root, or \
absolute below {root}; nothing outside can be reached.

- Find out what is there with `list_directory`, `glob_files` (by path), `search_files` (by name) \
and `grep_files` (by content) before you guess a path.
- Read with `read_file`. What is too long is cut, and the answer says how to get the rest.
- Calls that do not depend on each other can be made together, in one turn."""

_WRITING = """
- Read a file before you change it: writing to one that exists and was not read is refused.
- Change a part with `edit_file`. Write a new file, or the whole of one, with `write_file`.
- A call that fails has changed nothing: read its message, correct the call and try again."""
