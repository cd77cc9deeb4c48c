"""What the seeds' blocks leave out and mean obviously: imports, small data types, simple tools.

A tool that we ship is never stood in for: ``read_file`` and the others are the real ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar

from weakincentives import dbc, filesystem, prompt, resources, runtime, testing
from weakincentives.contrib.tools import file_tools
from weakincentives.contrib.tools.file_values import ReadFileParams, WriteFileParams
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
class FileContents:
    content: str
    path: str = ""
    size: int = 0


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


FILE_TOOLS: dict[str, Tool[Any, Any]] = {tool.name: tool for tool in file_tools()}
"""``read_file``, ``write_file`` and the others, as they are shipped."""


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
                     WriteFileParams, WriteFileResult, Plan, UpdatePlan, search_handler)
    },
    **FILE_TOOLS,
    # Called like its handler, a tool runs the pipeline.
    "write_file_handler": FILE_TOOLS["write_file"],
    "test_tool": noop_tool("test"),
    "build_tool": noop_tool("build"),
    "deploy_tool": noop_tool("deploy"),
    "params": SimpleNamespace(
        path="/workspace/config.json", query="notes", limit=500, date="01/15/2025", service="mail"
    ),
}  # fmt: skip
"""Every block starts with these names; what it imports or defines itself takes their place."""
