"""``file:write``: write a file of the workspace."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any, Literal, cast

from weakincentives.errors import FilesystemError
from weakincentives.prompt.contracts import NotificationEffect, PermissionPrecondition
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.retry import RetryPolicies, RetryPolicy

__all__ = ["FileWriteParams", "FileWritten", "file_write_tool", "write"]


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
