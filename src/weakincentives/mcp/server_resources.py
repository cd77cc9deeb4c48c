"""Resources that a server offers: tools that a client reads by address, without a model.

Reading is a call like any other: through the pipeline, under policies, and on record.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import quote

from weakincentives.adapters.media import mcp_contents
from weakincentives.core.media import Media, sniff
from weakincentives.errors import (
    FilesystemError,
    MissingExtra,
    NoSuchFile,
    ProtocolError,
    ToolDefinitionError,
)
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.filesystem.ignored import IgnoredFiles
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.tool_result import ToolResult

try:
    from mcp.shared.uri_template import InvalidUriTemplate, UriTemplate
    from mcp.types import INVALID_PARAMS, Resource, ResourceTemplate
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

FILES = "wink://files/"

Completer = Callable[[str, Mapping[str, str]], Iterable[str]]
"""``complete(value, other_arguments)`` returns what an argument may be; the rest is left out."""


@dataclass(frozen=True, kw_only=True)
class McpResource:
    """A resource: its address, and the tool that reads it.

    The variables of a template, such as ``notes://{name}``, are the tool's arguments. The tool
    returns a text or ``Media``; its name, title and description are the resource's.
    """

    uri: str
    tool: Tool[Any, Any]
    mime_type: str = "text/plain"
    complete: Mapping[str, Completer] = field(default_factory=dict[str, Completer])
    """What the variables may be, for clients that help their users to fill them in."""
    version: Callable[[ToolContext, str], object] | None = None
    """``version(context, uri)`` differs when the resource has changed: asked after calls, where a
    client has subscribed. None: ``McpServer.notify_of_change`` tells."""

    def __post_init__(self) -> None:
        try:
            names = set(self.template.variable_names)
        except InvalidUriTemplate as error:
            raise ToolDefinitionError(f"resource {self.uri!r}: {error}") from error
        known = set(self.tool.parameters.get("properties", {}))
        if names - known:
            missing = ", ".join(sorted(names - known))
            raise ToolDefinitionError(
                f"resource {self.uri!r}: tool {self.tool.name!r} has no parameter {missing}"
            )

    @cached_property
    def template(self) -> UriTemplate:
        return UriTemplate.parse(self.uri)

    @property
    def is_template(self) -> bool:
        return UriTemplate.is_template(self.uri)

    def arguments(self, uri: str) -> dict[str, Any] | None:
        """Return the arguments in an address; None if it is another resource's."""
        if not self.is_template:
            return {} if uri == self.uri else None
        found = self.template.match(uri)
        return None if found is None else dict(found)

    def listed(self) -> Resource:
        return Resource(
            uri=self.uri,
            name=self.tool.name,
            title=None if self.tool.title == self.tool.name else self.tool.title,
            description=self.tool.description,
            mime_type=self.mime_type,
        )

    def listed_template(self) -> ResourceTemplate:
        return ResourceTemplate(
            uri_template=self.uri,
            name=self.tool.name,
            title=None if self.tool.title == self.tool.name else self.tool.title,
            description=self.tool.description,
            mime_type=self.mime_type or None,
        )

    def contents(self, uri: str, result: ToolResult[Any]) -> dict[str, Any]:
        """Return what the tool returned as the contents of the resource."""
        media = result.media
        if media:
            return mcp_contents(media[0], uri)
        text = result.render()
        return {"uri": uri, "mimeType": self.mime_type or "text/plain", "text": text}


# Files


@dataclass(frozen=True, slots=True)
class FileParams:
    path: str


def _read_file(params: FileParams, *, context: ToolContext) -> ToolResult[Media]:
    path = params.path
    try:
        data = context.filesystem.read_bytes(path)
    except NoSuchFile as error:
        raise ProtocolError(str(error), code=INVALID_PARAMS, data={"uri": uri_of(path)}) from error
    if not data:
        return ToolResult.ok(None, "")
    return ToolResult.ok(Media(data, sniff(data) or _kind_of(path, data), path))


def _kind_of(path: str, data: bytes) -> str:
    try:
        data.decode()
    except UnicodeDecodeError:
        return mimetypes.guess_type(path)[0] or "application/octet-stream"
    guessed = mimetypes.guess_type(path)[0] or ""
    return guessed if guessed.startswith("text/") or guessed == "application/json" else "text/plain"


def _file_version(context: ToolContext, uri: str) -> object:
    files = context.resources.find(Filesystem)
    try:
        found = None if files is None else files.stat(uri.removeprefix(FILES))
    except FilesystemError:
        return None
    return None if found is None else (found.kind, found.size, found.modified)


# Named like the tool of the file suite, whose policies govern it.
FILE = McpResource(
    uri=f"{FILES}{{+path}}",
    tool=Tool[FileParams, Media](
        name="read_file",
        title="File",
        description="A file of the workspace.",
        handler=_read_file,
        reach="read",
        concurrent=True,
        max_result_chars=None,
    ),
    mime_type="",
    version=_file_version,
)


def uri_of(path: str) -> str:
    return FILES + quote(path, safe="/")


def listed_file(path: str) -> Resource:
    kind = mimetypes.guess_type(path)[0]
    return Resource(uri=uri_of(path), name=path, mime_type=kind)


def files_after(files: Filesystem, last: str, limit: int) -> list[str]:
    """Return the next files after a path, in order; neither hidden, ignored nor generated ones."""
    ignored = IgnoredFiles(files.root) if isinstance(files, HostFilesystem) else None
    found: list[str] = []
    for path in _walk(files, ".", last.split("/") if last else [], ignored):
        found.append(path)
        if len(found) == limit:
            break
    return found


def _walk(
    files: Filesystem, directory: str, last: list[str], ignored: Callable[[str], bool] | None
) -> Iterator[str]:
    try:
        entries = files.list(directory)
    except FilesystemError:  # it has gone since, or may not be read
        return
    for entry in sorted(entries, key=lambda each: each.path.rpartition("/")[2]):
        name = entry.path.rpartition("/")[2]
        if name.startswith(".") or (last and name < last[0]):
            continue
        if ignored is not None and ignored(entry.path):
            continue
        is_last = bool(last) and name == last[0]
        if entry.kind == "directory":
            yield from _walk(files, entry.path, last[1:] if is_last else [], ignored)
        elif entry.kind == "file" and not is_last:
            yield entry.path


def complete_path(files: Filesystem, value: str) -> Iterator[str]:
    """Yield the files and directories that begin with a text."""
    directory, _, start = value.rpartition("/")
    try:
        entries = files.list(directory or ".")
    except FilesystemError:
        return
    for entry in entries:
        name = entry.path.rpartition("/")[2]
        if name.startswith(start) and (start or not name.startswith(".")):
            yield f"{entry.path}/" if entry.kind == "directory" else entry.path
