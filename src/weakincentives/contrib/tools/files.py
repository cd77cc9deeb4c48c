"""The file tools: read, find and change files, in memory or in a directory."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast

from weakincentives.contrib.tools.file_search import (
    BYTE_ORDER_MARK,
    Edit,
    Search,
    describe_binary,
    hidden_properties,
    replace_text,
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
    cut,
    listed,
)
from weakincentives.contrib.tools.suite import (
    MountedFile,
    WorkspaceConfig,
    WorkspaceSection,
    suite_tool,
)
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.media import Media, sniff
from weakincentives.core.text import counted, size_of
from weakincentives.errors import (
    AlreadyExists,
    BinaryFile,
    FilesystemError,
    NoSuchFile,
    NotAFile,
    ToolValidationError,
)
from weakincentives.filesystem import FileStat, Filesystem, GrepMatch, MemoryFilesystem
from weakincentives.filesystem.paths import DEFAULT_ROOT, encode_text, shown
from weakincentives.prompt.approval import CallPreview
from weakincentives.prompt.contracts import (
    NotificationEffect,
    PermissionPrecondition,
    StatePrecondition,
)
from weakincentives.prompt.policies import ReadBeforeWritePolicy, content_digest, is_seen
from weakincentives.prompt.section import SectionOptions
from weakincentives.prompt.tool import Tool, ToolContext, ToolExample
from weakincentives.retry import RetryPolicies, RetryPolicy
from weakincentives.tool_result import ToolError, ToolResult

if TYPE_CHECKING:
    from weakincentives.session.session import Session


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
    """A file that was written."""

    path: str
    bytes_written: int
    timestamp: float

    def render(self) -> str:
        return ""  # the message says it all


def file_write_tool(
    *, timeout: float = 10.0, retry: RetryPolicy = RetryPolicies.QUICK
) -> Tool[FileWriteParams, FileWritten]:
    """Return the tool ``write``, for the namespace ``file``.

    It needs the permission ``file:write``. The event ``file:changed`` is sent to the ``EventBus``
    once the call is committed.
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
            # The handler checks it, on the files of the call.
            StatePrecondition(
                description="File must not exist unless overwrite is true",
                state="file:exists",
                critical=False,
                check=lambda: True,
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
        if params.encoding == "base64":
            data = base64.b64decode(params.content, validate=True)
        else:
            data = params.content.encode(params.encoding)
        files.write_bytes(params.path, data)
    except (FilesystemError, ValueError) as error:
        message = f"Cannot write {shown(params.path)} as {params.encoding}: {error}"
        failure = ToolError("WRITE_FAILED", str(error), recoverable=False)
        return ToolResult(message, success=False, failure=failure)
    written = FileWritten(files.normalize(params.path), len(data), context.session.clock.time())
    return ToolResult.ok(written, f"Wrote {len(data)} bytes to {written.path}")


def _change(result: ToolResult[Any]) -> dict[str, object]:
    written = cast("FileWritten", result.value)
    return {"path": written.path, "action": "write", "timestamp": written.timestamp}


write = file_write_tool()
"""The tool with its defaults."""


T = TypeVar("T")

_SNIPPET_LINES = 3
"""Lines shown around a change."""
_SNIPPET_MOST = 40
_GREP_LINE_CHARS = 500
_SIMILAR = 10
_MOST_COMPARED = 1 << 20
"""Bytes of a file that is shown as a diff."""
_MOST_LISTED = 1000
"""Files of a directory that are listed one by one."""


# The tools


def file_tools(
    *, limits: FileLimits | None = None, read_only: bool = False
) -> tuple[Tool[Any, Any], ...]:
    """Return the file tools, for a section of your own; they work on the ``Filesystem`` resource.

    ``read_only`` leaves out the tools that change files. Attach a ``ReadBeforeWritePolicy`` where
    you offer those.
    """
    suite = _FileTools(limits or FileLimits())
    look = partial(suite_tool, reach="read", concurrent=True)
    change = partial(suite_tool, reach="reversible", concurrent=True)
    looking = (
        look(suite.list_directory),
        look(suite.read_file, examples=(_READ_EXAMPLE,)),
        look(suite.glob_files),
        look(suite.grep_files, examples=(_GREP_EXAMPLE,)),
        look(suite.search_files),
    )
    if read_only:
        return looking
    return (
        *looking,
        change(_write_file, preview=_preview_write),
        change(suite.edit_file, examples=(_EDIT_EXAMPLE,), preview=suite.preview_edit),
        change(_move_file, preview=partial(_preview_transfer, "rename")),
        change(_copy_file, preview=partial(_preview_transfer, "copy")),
        change(_delete_file, preview=_preview_delete),
    )


@dataclass(frozen=True, slots=True)
class _FileTools:
    """The tools with limits. A model reads the docstrings of the handlers."""

    limits: FileLimits

    def list_directory(
        self, params: ListDirectoryParams, *, context: ToolContext
    ) -> ToolResult[DirectoryListing]:
        """List the files and directories in a directory."""
        files = context.filesystem
        try:
            entries = files.list(params.path)
        except NoSuchFile as error:
            raise NoSuchFile(
                f"Directory not found: {shown(params.path)}\n"
                "Use list_directory without a path to see the top of the workspace"
            ) from error
        page, notice = self._page(entries, params.offset, params.limit)
        notice = _joined(notice, _not_listed(files, params.path))
        path = files.normalize(params.path)
        where = "The workspace" if path == "." else shown(path)
        how_many = counted(len(entries), "entry", "entries") if entries else "no entries"
        return ToolResult.ok(DirectoryListing(path, page, notice), f"{where} has {how_many}")

    def read_file(self, params: ReadFileParams, *, context: ToolContext) -> ToolResult[FileContent]:
        """Read a text file, with line numbers, or look at a picture or PDF. A long text comes in
        parts: use offset and limit.
        """
        files = context.filesystem
        data = self._load(files, params.path)
        path = files.normalize(params.path)
        text = text_of(data)
        name = shown(path)
        digest = content_digest(data)
        if text is None or data.startswith(b"%PDF-"):
            content = FileContent(path, (), digest=digest)
            kind = sniff(data)
            if not kind.startswith("image/") and kind != "application/pdf":
                return ToolResult.ok(content, f"{name} {describe_binary(path, data)}")
            what = "a picture" if kind.startswith("image/") else "a PDF"
            most = self.limits.max_picture_bytes
            if what == "a picture" and len(data) > most:
                return ToolResult.ok(
                    content,
                    f"{name} is a picture, {kind}, and with {size_of(len(data))} too large to "
                    f"show: the limit is {size_of(most)}. Make a smaller copy and read that",
                )
            content = replace(content, media=Media(data, kind, path))
            return ToolResult.ok(content, f"{name} is {what}:")
        lines = split_lines(text.removeprefix(BYTE_ORDER_MARK))
        if not lines:
            return ToolResult.ok(FileContent(path, (), digest=digest), f"{name} is empty")
        if params.offset >= len(lines):
            raise ToolValidationError(
                f"{name} has {counted(len(lines), 'line')}, so offset={params.offset} is after "
                "its end. Use a smaller offset"
            )
        content = replace(self._part(path, lines, params), digest=digest)
        last = params.offset + len(content.lines)
        message = f"{name}: lines {params.offset + 1} to {last} of {len(lines)}"
        message += hidden_properties(text)
        return ToolResult.ok(content, message)

    def _part(self, path: str, lines: list[str], params: ReadFileParams) -> FileContent:
        """Return the requested lines, as many as fit."""
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
                "to continue"
            )
        if too_long:
            notices.append(
                f"Line {too_long} has {len(lines[too_long - 1])} characters and is truncated. Call "
                f"read_file with offset={too_long - 1}, limit=1 and "
                f"column={params.column + limits.max_line_chars} for more of it"
            )
        first = params.offset + 1
        return FileContent(path, tuple(parts), first, len(lines), ". ".join(notices))

    def glob_files(
        self, params: GlobFilesParams, *, context: ToolContext
    ) -> ToolResult[FilesFound]:
        """Find files by a pattern of their path, such as '**/*.py'."""
        names, notice = self._below(context.filesystem, params.path, params.pattern)
        hint = "Try a wider pattern: '**/' looks in all directories, and braces have no meaning"
        return self._found(names, notice, params, params.pattern, hint)

    def search_files(
        self, params: SearchFilesParams, *, context: ToolContext
    ) -> ToolResult[FilesFound]:
        """Find files by a part of their name. To find text in files, use grep_files."""
        names, notice = self._searched(context.filesystem.search(params.query), ".", params.query)
        hint = "Try glob_files for pattern matching or grep_files for text search"
        return self._found(names, notice, params, params.query, hint)

    def _found(
        self,
        names: Sequence[str],
        notice: str,
        params: GlobFilesParams | SearchFilesParams,
        asked: str,
        hint: str,
    ) -> ToolResult[FilesFound]:
        page, more = self._page(names, params.offset, params.limit)
        found = f"Found {counted(len(names), 'file')} matching '{asked}'"
        message = found if names else f"No files match '{asked}'\n{hint}"
        return ToolResult.ok(FilesFound(page, _joined(more, notice)), message)

    def grep_files(
        self, params: GrepFilesParams, *, context: ToolContext
    ) -> ToolResult[LinesFound]:
        """Find lines in files by a regular expression."""
        files, path = context.filesystem, params.path
        search = Search(
            files, context.signal, params.pattern, params.ignore_case, self.limits.max_file_bytes
        )
        kind = _stat(files, path).kind
        if kind == "directory":
            glob = params.glob if "/" in params.glob else f"**/{params.glob}"
            names, notice = self._below(files, path, glob)
        else:
            if kind != "file":
                files.read_bytes(path)  # raises, with the reason
            names, notice = (files.normalize(path),), ""
        page, more = self._fitting(search.lines(names, path), params.offset, params.limit)
        found = LinesFound(page, _joined(more, notice, search.notice))
        if page:
            in_files = counted(len({match.path for match in page}), "file")
            message = f"Found {counted(len(page), 'matching line')} in {in_files}"
        else:
            message = (
                f"No {'more ' if params.offset else ''}lines match '{params.pattern}' in "
                f"{counted(len(names), 'file')}\n"
                "Try a shorter pattern, ignore_case=true, or another path or glob"
            )
        return ToolResult.ok(found, message)

    def _fitting(
        self, found: Iterable[GrepMatch], offset: int, limit: int
    ) -> tuple[tuple[GrepMatch, ...], str]:
        """Return as many lines as fit, and a notice when there are more."""
        page: list[GrepMatch] = []
        left = self.limits.max_chars
        for match in islice(found, offset, offset + limit + 1):
            match = replace(match, line=cut(match.line, _GREP_LINE_CHARS))
            left -= len(match.line) + len(match.path)
            if len(page) == limit or (page and left < 0):
                end = offset + len(page)
                return tuple(page), f"There are more. Call grep_files with offset={end} to continue"
            page.append(match)
        return tuple(page), ""

    def _below(self, files: Filesystem, path: str, pattern: str) -> tuple[Sequence[str], str]:
        return self._searched(files.glob(pattern, path), files.normalize(path), pattern)

    def _searched(self, names: Sequence[str], path: str, asked: str) -> tuple[Sequence[str], str]:
        """Leave out the files in unsearched directories, with a notice, unless asked for."""
        start = 0 if path == "." else len(path) + 1
        unsearched = {name for name in self.limits.unsearched if name not in asked.split("/")}
        searched: list[str] = []
        left_out: set[str] = set()
        for name in names:
            barred = unsearched.intersection(name[start:].split("/")[:-1])
            left_out |= barred
            if not barred:
                searched.append(name)
        if not left_out:
            return searched, ""
        count = counted(len(names) - len(searched), "file")
        return searched, (
            f"{count} in {', '.join(sorted(left_out))} left out: glob_files and grep_files look "
            "there when path or pattern name it"
        )

    def _page(
        self, items: Sequence[T], offset: int, limit: int | None
    ) -> tuple[tuple[T, ...], str]:
        """Return one page of a list, and a notice when there is more."""
        most = self.limits.max_entries
        page = tuple(items[offset : offset + min(limit or most, most)])
        end = offset + len(page)
        if len(page) == len(items):
            return page, ""
        if not page:
            return page, f"There are only {len(items)}: use a smaller offset"
        more = f". Call again with offset={end} for more" if end < len(items) else ""
        return page, f"{offset + 1} to {end} of {len(items)}{more}"

    def edit_file(self, params: EditFileParams, *, context: ToolContext) -> ToolResult[FileEdited]:
        """Replace a text in a file. The text must be found exactly once, unless replace_all is
        set. Read the file first.
        """
        files = context.filesystem
        path, edit = self._edit(files, params)
        files.write(path, edit.text)
        first, snippet = self._around(edit)
        edited = FileEdited(path, edit.count, first, snippet)
        return ToolResult.ok(edited, f"Edited {shown(path)}: {counted(edit.count, 'replacement')}")

    def preview_edit(self, params: EditFileParams, *, context: ToolContext) -> CallPreview:
        path, edit = self._edit(context.filesystem, params)
        shown_in_diff = ("old_string", "new_string", "replace_all")
        return _preview(context.filesystem, path, encode_text(edit.text, path), shown_in_diff)

    def _edit(self, files: Filesystem, params: EditFileParams) -> tuple[str, Edit]:
        data = self._load(files, params.path)
        path = files.normalize(params.path)
        text = text_of(data)
        if text is None:
            raise BinaryFile(f"{shown(path)} {describe_binary(path, data)} It cannot be edited")
        return path, replace_text(
            text,
            params.old_string,
            params.new_string,
            everywhere=params.replace_all,
            where=shown(path),
        )

    def _around(self, edit: Edit) -> tuple[int, tuple[str, ...]]:
        """Return the lines around the first change, after the number of the first line."""
        first = max(0, edit.text.count("\n", 0, edit.start) - _SNIPPET_LINES)
        last = edit.text.count("\n", 0, edit.end) + _SNIPPET_LINES + 1
        lines = split_lines(edit.text)[first : min(last, first + _SNIPPET_MOST)]
        return first + 1, tuple(cut(line, self.limits.max_line_chars) for line in lines)

    def _load(self, files: Filesystem, path: str) -> bytes:
        """Return the bytes of a file that is not too large."""
        status = _stat(files, path)
        if status.kind == "directory":
            name = shown(files.normalize(path))
            raise NotAFile(f"{name} is a directory\nUse list_directory to see what is in it")
        if status.size > self.limits.max_file_bytes:
            raise ToolValidationError(
                f"{shown(path)} has {size_of(status.size)}; files of up to "
                f"{size_of(self.limits.max_file_bytes)} can be read"
            )
        return files.read_bytes(path)


def _write_file(params: WriteFileParams, *, context: ToolContext) -> ToolResult[FileWritten]:
    """Write a whole file. An existing file must have been read; to change a part, use edit_file."""
    files = context.filesystem
    path = files.normalize(params.path)
    existed = files.exists(path)
    data = _content_to_write(params, path, context)
    files.write_bytes(path, data)
    written = FileWritten(path, len(data), context.session.clock.time())
    lines = counted(len(split_lines(params.content)), "line")
    done = "Replaced" if existed else "Wrote"
    return ToolResult.ok(written, f"{done} {shown(path)}: {size_of(len(data))}, {lines}")


def _content_to_write(params: WriteFileParams, path: str, context: ToolContext) -> bytes:
    files = context.filesystem
    if not params.overwrite and files.exists(path):
        status = files.stat(path)
        if status.kind == "file" and not is_seen(path, context):
            raise AlreadyExists(
                f"File already exists: {shown(params.path)} ({size_of(status.size)})\n"
                "Set overwrite=true to replace existing file, or use edit_file to change a part"
            )
    return encode_text(params.content, path)


def _move_file(params: TransferParams, *, context: ToolContext) -> ToolResult[FileTransferred]:
    """Move or rename a file or directory."""
    return _transferred(params, context.filesystem, context.filesystem.move, "Moved")


def _copy_file(params: TransferParams, *, context: ToolContext) -> ToolResult[FileTransferred]:
    """Copy a file or directory."""
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
    """Return a notice on the names in a directory that no path can express."""
    unnamed = getattr(files, "unnamed", None)
    names: tuple[str, ...] = () if unnamed is None else unnamed(path)
    return (
        f"Not listed, because their names are not UTF-8: {listed(names)}. A command can rename them"
        if names
        else ""
    )


def _delete_file(params: DeleteFileParams, *, context: ToolContext) -> ToolResult[FileDeleted]:
    """Delete a file, or a directory with recursive=true."""
    files = context.filesystem
    path = files.normalize(params.path)
    is_directory = _stat(files, params.path).kind == "directory"
    count = len(files.glob("**/*", path)) if is_directory else 1
    files.delete(path, recursive=params.recursive)
    inside = f" with {counted(count, 'file')} in it" if is_directory else ""
    return ToolResult.ok(FileDeleted(path, count), f"Deleted {shown(path)}{inside}")


def _stat(files: Filesystem, path: str) -> FileStat:
    try:
        return files.stat(path)
    except NoSuchFile as error:
        name = path.rstrip("/").rpartition("/")[2]
        similar = files.search(name, limit=_SIMILAR) if name else ()
        hint = f"\nFiles with a similar name: {listed(similar)}" if similar else ""
        raise NoSuchFile(
            f"File not found: {shown(path)}\nUse list_directory to see available files{hint}"
        ) from error


def _joined(*notices: str) -> str:
    return ". ".join(notice for notice in notices if notice)


# Previews: what a call would change, for the person who approves it


def _preview_write(params: WriteFileParams, *, context: ToolContext) -> CallPreview:
    files = context.filesystem
    path = files.normalize(params.path)
    return _preview(files, path, _content_to_write(params, path, context), ("content",))


def _preview_transfer(verb: str, params: TransferParams, *, context: ToolContext) -> CallPreview:
    files, moved = context.filesystem, verb == "rename"
    _stat(files, params.source)
    source = files.real_path(params.source, follow=not moved)
    target = files.real_path(params.destination, follow=False)
    lines = [f"{verb} from {shown(source)}", f"{verb} to {shown(target)}"]
    for place, done in ((source, f"{verb} with"), (target, "replaces")):
        if files.exists(place) and (place == target or files.stat(place).kind == "directory"):
            lines.append(f"{done} {_size_at(files, place)}")
    return CallPreview(
        diff="".join(f"{line}\n" for line in lines),
        paths=(source, target) if moved else (target,),
        state=_state(files, source, target),
    )


def _preview_delete(params: DeleteFileParams, *, context: ToolContext) -> CallPreview:
    files = context.filesystem
    status = _stat(files, params.path)
    path, target = files.real_path(params.path, follow=False), files.real_path(params.path)
    if path != target:
        link = f"deleted: {shown(path)}, a link to {shown(target)}\n"
        return CallPreview(diff=link, paths=(path,), state=target)
    if status.kind == "file":
        return _preview(files, path, None)
    lines = [f"deleted: {shown(path)}, {_size_at(files, path)}\n"]
    names = files.glob("**/*", path) if status.kind == "directory" else ()
    lines += (f"-{shown(name)}\n" for name in names[:_MOST_LISTED])
    if len(names) > _MOST_LISTED:
        lines.append(f"and {len(names) - _MOST_LISTED} more files\n")
    return CallPreview(diff="".join(lines), paths=(path,), state=_state(files, path))


def _preview(
    files: Filesystem, path: str, after: bytes | None, in_diff: tuple[str, ...] = ()
) -> CallPreview:
    """Return how a file would change to other bytes, or to nothing."""
    from weakincentives.filesystem.diffs import Effort, hunks

    where = files.real_path(path, follow=after is not None)
    exists = files.exists(where)
    is_small = not exists or files.stat(where).size <= _MOST_COMPARED
    before = files.read_bytes(where) if exists and is_small else b""
    texts = [text_of(each) for each in (before, after or b"")]
    name = shown(where)
    if not is_small or len(after or b"") > _MOST_COMPARED or None in texts:
        old = _size_at(files, where) if exists else "nothing"
        new = "nothing" if after is None else size_of(len(after))
        return CallPreview(
            diff=f"{name}: {old} becomes {new}\n", paths=(where,), state=_state(files, where)
        )
    old, new = (re.findall(r"[^\n]*\n|[^\n]+", cast("str", text)) for text in texts)
    lines = [f"--- a/{name}\n" if exists else "--- /dev/null\n"]
    lines += "+++ /dev/null\n" if after is None else f"+++ b/{name}\n", *hunks(old, new, Effort())
    if exists and before == after:
        lines.append("(the content stays the same)\n")
    if name == path:  # spelled as the diff spells it
        in_diff = ("path", *in_diff)
    # Of the bytes that are shown: the file may change at any time.
    state = content_digest(before) if exists else ""
    return CallPreview(diff="".join(lines), in_diff=in_diff, paths=(where,), state=state)


def _size_at(files: Filesystem, path: str) -> str:
    status = files.stat(path)
    if status.kind == "directory":
        return f"a directory of {counted(len(files.glob('**/*', path)), 'file')}"
    return f"a file of {size_of(status.size)}"


def _state(files: Filesystem, *paths: str) -> str:
    """Return a digest of what is at some paths now."""
    found: list[str] = []
    for path in paths:
        if not files.exists(path):
            found.append("nothing")
            continue
        status = files.stat(path)
        if status.kind == "file" and status.size <= _MOST_COMPARED:
            found.append(content_digest(files.read_bytes(path)))
            continue
        below = files.glob("**/*", path) if status.kind == "directory" else ()
        found += below
        stats = (status, *(files.stat(name) for name in below[:_MOST_LISTED]))
        found += (f"{each.kind} {each.size} {each.modified}" for each in stats)
    return content_digest("\0".join(found).encode(errors="surrogateescape"))


# Examples

_READ_EXAMPLE = ToolExample[ReadFileParams, FileContent](
    description="Read the next part of a long file",
    input=ReadFileParams("src/app.py", offset=2000, limit=2),
    output=FileContent(
        "src/app.py",
        ("def main() -> None:", "    run()"),
        2001,
        2400,
        "398 more lines. Call read_file with offset=2002 to continue",
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
    description="Change one call; the line before it makes the text unique",
    input=EditFileParams(
        "src/app.py", "def main() -> None:\n    run()", "def main() -> None:\n    run(retries=3)"
    ),
    output=FileEdited("src/app.py", 1, 2000, ("", "def main() -> None:", "    run(retries=3)")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VfsConfig(WorkspaceConfig):
    """Where the files come from, and how much of them a model gets at once.

    Without ``workspace`` and ``filesystem`` they live in memory: empty, or filled from ``mounts``
    and then from ``files``. Nothing on the host changes then.
    """

    root: str = DEFAULT_ROOT
    """The virtual prefix of absolute paths; never a host directory."""
    read_only: bool = False
    """Offer only the tools that change nothing."""
    limits: FileLimits = field(default_factory=FileLimits)


class VfsToolsSection(WorkspaceSection):
    """Guidance and tools to work on files, with the ``Filesystem`` they work on.

    The filesystem is bound as a resource, so other tools of the prompt share it. A model must read
    an existing file before it writes to it; pass ``policies`` to have other rules.
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
        clock = SYSTEM_CLOCK if session is None else session.clock

        def fill(files: Mapping[str, MountedFile]) -> MemoryFilesystem:
            content = {path: file.data for path, file in files.items()}
            readonly = [path for path, file in files.items() if file.readonly]
            return MemoryFilesystem(content, root=config.root, readonly=readonly, clock=clock)

        options.setdefault("title", "Files")
        options.setdefault("policies", () if config.read_only else (ReadBeforeWritePolicy(),))
        tools = file_tools(limits=config.limits, read_only=config.read_only)
        super().__init__(config, tools, fill, root=config.root, **options)

    def body(self, params: None, session: Session | None) -> str:
        guidance = _GUIDANCE.format(root=self.config.root)
        if not self.config.read_only:
            guidance += _WRITING
        return self.with_left_out(guidance)


_GUIDANCE = """\
Use these tools to read and write files of the workspace. Paths are relative to its root, or \
absolute below {root}; nothing outside can be reached.

- Explore with `list_directory`, `glob_files` (by path), `search_files` (by name) and `grep_files` \
(by content) instead of guessing paths.
- Read with `read_file`. Long output is truncated, and the answer says how to get the rest.
- Make independent calls together, in one turn."""

_WRITING = """
- Read a file before you change it: writing to an existing file that was not read is refused.
- Change a part with `edit_file`. Write a new or a whole file with `write_file`.
- A failed call has changed nothing: read its message, correct the call and retry."""
