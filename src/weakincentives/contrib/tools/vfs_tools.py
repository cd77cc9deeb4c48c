"""The file tools: how a model reads, finds and changes files, over any ``Filesystem``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

from weakincentives.contrib.tools.files import FileWritten
from weakincentives.contrib.tools.vfs_grep import (
    Search,
    may_match,
    pattern_matcher,
    required_text,
)
from weakincentives.contrib.tools.vfs_text import (
    BYTE_ORDER_MARK,
    Edit,
    describe_binary,
    peculiarities,
    replace_text,
    split_lines,
    text_of,
)
from weakincentives.contrib.tools.vfs_values import (
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
from weakincentives.errors import (
    AlreadyExists,
    BinaryFile,
    NoSuchFile,
    NotAFile,
    ToolValidationError,
)
from weakincentives.filesystem import FileStat, Filesystem, GrepMatch
from weakincentives.filesystem.protocol import encode_text, shown
from weakincentives.prompt.policies import content_digest, is_seen
from weakincentives.prompt.tool import Tool, ToolContext, ToolExample
from weakincentives.prompt.tool_result import ToolResult

__all__ = ["file_tools"]

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
