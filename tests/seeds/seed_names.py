"""What the seeds' blocks leave out and mean obviously: imports, small data types, simple tools."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar

from weakincentives import dbc, filesystem, prompt, resources, runtime, testing
from weakincentives.dbc import require
from weakincentives.prompt import Tool, ToolContext, ToolResult
from weakincentives.runtime import Session, Slice

ParamsT = TypeVar("ParamsT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class SearchParams:
    query: str
    limit: int = 10


@dataclass(frozen=True, slots=True)
class SearchResult:
    matches: tuple[str, ...]
    total_count: int = 0


@dataclass(frozen=True, slots=True)
class ReadFileParams:
    path: str


@dataclass(frozen=True, slots=True)
class FileContents:
    content: str
    path: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class WriteFileParams:
    path: str
    content: str = ""
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class WriteFileResult:
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    steps: tuple[str, ...] = ()
    status: str = "new"


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    status: str


@require(lambda params: 1 <= params.limit <= 100, "limit must be between 1 and 100")
@require(lambda params: len(params.query.strip()) > 0, "query cannot be empty")
def search_handler(params: SearchParams, *, context: ToolContext) -> ToolResult[SearchResult]:
    """The Chapter's search handler: its contract and its empty results in one."""
    matches = context.filesystem.search(params.query, limit=params.limit)
    if not matches:
        return ToolResult.ok(SearchResult(()), message=f"No files match '{params.query}'")
    return ToolResult.ok(
        SearchResult(tuple(matches), len(matches)),
        message=f"Found {len(matches)} files matching '{params.query}'",
    )


def write_file_handler(
    params: WriteFileParams, *, context: ToolContext
) -> ToolResult[WriteFileResult]:
    """Write a file; the Chapter's rule is that replacing one is asked for."""
    if context.filesystem.exists(params.path) and not params.overwrite:
        return ToolResult.error(
            f"File already exists: {params.path}\nSet overwrite=true to replace existing file"
        )
    context.filesystem.write(params.path, params.content)
    size = len(params.content)
    return ToolResult.ok(WriteFileResult(params.path, size), message=f"Wrote {size} bytes")


def read_file_handler(params: ReadFileParams, *, context: ToolContext) -> ToolResult[FileContents]:
    content = context.filesystem.read(params.path)
    return ToolResult.ok(FileContents(content), message=f"Read {len(content)} bytes")


def overwrite_file_handler(
    params: WriteFileParams, *, context: ToolContext
) -> ToolResult[WriteFileResult]:
    """Write a file whatever is there: it is for a policy to say no."""
    return write_file_handler(replace(params, overwrite=True), context=context)


def tool_of(handler: Callable[..., Any], name: str = "a_tool", *types: Any) -> Tool[Any, Any]:
    """Return a handler as a tool; the types come from its annotations when not given."""
    kind = Tool[types] if types else Tool
    return kind(name=name, description="A tool of a seed.", handler=handler)


def noop_tool(name: str) -> Tool[Any, Any]:
    """Return a tool without parameters that just succeeds."""

    def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok(message=f"{name} done")

    return tool_of(handler, name)


def session_with_plan(plan: Plan) -> Session:
    """Return a session that holds a plan, and knows how to update it."""
    session = Session()
    session[Plan].seed(plan)

    def update(current: Slice[Plan], event: UpdatePlan) -> Slice[Plan]:
        latest = current.latest()
        assert latest is not None
        return current.replace(replace(latest, status=event.status))

    session[Plan].register(UpdatePlan, update)
    return session


def _public(module: Any) -> dict[str, object]:
    return {name: getattr(module, name) for name in module.__all__}


LEFT_OUT: dict[str, object] = {
    "dataclass": dataclass,
    "field": field,
    "os": os,
    "time": time,
    **_public(dbc),
    **_public(filesystem),
    **_public(prompt),
    **_public(resources),
    **_public(runtime),
    **_public(testing),
    **{
        each.__name__: each
        for each in (ParamsT, ResultT, SearchParams, SearchResult, ReadFileParams, FileContents,
                     WriteFileParams, WriteFileResult, Plan, UpdatePlan, search_handler,
                     write_file_handler)
    },
    "read_file": tool_of(read_file_handler, "read_file"),
    "write_file": tool_of(write_file_handler, "write_file"),
    "list_directory": noop_tool("list_directory"),
    "test_tool": noop_tool("test"),
    "build_tool": noop_tool("build"),
    "deploy_tool": noop_tool("deploy"),
    "params": SimpleNamespace(
        path="/workspace/config.json", query="notes", limit=500, date="01/15/2025", service="mail"
    ),
}  # fmt: skip
"""Every block starts with these names; what it imports or defines itself takes their place."""
