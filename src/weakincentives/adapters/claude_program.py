"""The Claude program: its tools, its processes, and our tools in it.

For the adapter, which drives the program, and for the integration, which is a guest in it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.prompt.tool import Tool

if TYPE_CHECKING:
    from mcp.types import Tool as McpTool

SERVER = "wink"
"""The name of the MCP server with our tools."""
PREFIX = f"mcp__{SERVER}__"
CALL_ID = "claudecode/toolUseId"
"""Where the program puts the id of a tool use, in the ``_meta`` of a call over MCP."""
LONG = 24 * 3600
"""Seconds that a hook or a tool may take: our own limits are shorter."""
MUCH = 500_000
"""Characters of an answer that the program does not shorten: its maximum."""
READING = frozenset({"Glob", "Grep", "LS", "NotebookRead", "Read", "WebFetch", "WebSearch"})
"""Native tools that change no file."""
AGENTS = frozenset({"Agent", "Skill", "Task", "Workflow"})
"""Native tools that start a sub-agent."""
NOT_CALLS = AGENTS | {
    *("AskUserQuestion", "BashOutput", "CronCreate", "CronDelete", "CronList", "EnterPlanMode"),
    *("ExitPlanMode", "KillShell", "ListAgents", "ReportFindings", "ScheduleWakeup"),
    *("SendMessage", "SlashCommand", "StructuredOutput", "TaskOutput", "TaskStop", "TodoWrite"),
    "ToolSearch",
}
"""Native tools that change nothing themselves. The calls of a sub-agent have hooks of their own:
if the tool that starts it were a call, they would wait for its end."""
FORMER = MappingProxyType(
    {"Task": "Agent", "KillShell": "TaskStop", "KillBash": "TaskStop", "ListPeers": "ListAgents"}
)
"""Former names of native tools, each with the present one."""
EDITING = frozenset({"Edit", "MultiEdit", "NotebookEdit", "Write"})
"""Native tools that change one file."""
PATIENT = {"MCP_TOOL_TIMEOUT": str(LONG * 1000), "MAX_MCP_OUTPUT_TOKENS": str(MUCH)}
"""The environment in which the program waits for our tools, and shows all that they say."""

_PLACES = ("file_path", "notebook_path")
_MARK = "WINK_CLAUDE_RUN"
"""The environment variable that identifies the program and its child processes."""
_DYING = 60.0
"""Seconds until a killed process must be gone; it takes milliseconds."""
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
"""How many ticks a second has, on the clock of processes."""


def as_mcp_tool(tool: Tool[Any, Any], description: str) -> McpTool:
    """Return one of our tools as the program takes it: never hidden, its answer never cut."""
    from mcp.types import Tool as McpTool
    from mcp.types import ToolAnnotations

    return McpTool(
        name=tool.name,
        description=description,
        input_schema=tool.parameters,
        annotations=ToolAnnotations(read_only_hint=tool.reach == "read"),
        _meta={"anthropic/maxResultSizeChars": MUCH, "anthropic/alwaysLoad": True},
    )


def with_path(params: object, directory: str, root: str, places: Sequence[str] = _PLACES) -> object:
    """Return a native tool's arguments with ``path``, relative to the workspace if inside.

    Args:
        params: As the program has them.
        directory: The program's working directory.
        root: The workspace; empty if there is none.
        places: The arguments that can name the file.
    """
    if not isinstance(params, dict):
        return params
    given = cast("dict[str, object]", params)
    place = next((given[name] for name in places if name in given), None)
    if not isinstance(place, str):
        return given
    # As the program resolves it: relative to its working directory, through symlinks.
    found = Path(os.path.realpath(os.path.join(directory, os.path.expanduser(place))))
    if found.is_relative_to(root):
        found = found.relative_to(root)
    return {**given, "path": str(found)}


def without_path(params: dict[str, Any]) -> dict[str, Any]:
    """Return a native tool's arguments as the program takes them."""
    if params.keys().isdisjoint(_PLACES):
        return params  # Grep has a path of its own
    return {name: value for name, value in params.items() if name != "path"}


def outside(params: object) -> str | None:
    """Return why a native tool must not write where it wants to, or None."""
    path = str(cast("dict[str, object]", params).get("path", ""))
    if not os.path.isabs(path):
        return None
    return f"{path} is outside of the workspace, where changes cannot be rolled back"


class Processes:
    """The program and all processes that it starts, known by a mark in their environment.

    None are found where there is no ``/proc``.

    Args:
        place: The directory they work on: see ``kill_orphans``.
    """

    def __init__(self, place: str = "") -> None:
        owner = os.getpid()
        self._place = hashlib.sha256(place.encode()).hexdigest()[:16]
        self._mark = f"{self._place}.{owner}.{started_at(owner)}.{os.urandom(8).hex()}"
        self.environment = {_MARK: self._mark}
        """For the program; its children inherit it."""

    def kill(self, since: float = 0.0) -> None:
        """Kill all that were started since then; when this returns, none can write any more.

        ``since`` is a time of ``clock.since_boot``.
        """
        ticks = since * _TICKS - 1  # a start is rounded down
        _kill(lambda mark, process: mark == self._mark and started_at(process) > ticks)

    def kill_orphans(self) -> None:
        """Kill what works on the same place for a process of ours that was killed itself."""

        def is_orphan(mark: str, _: int) -> bool:
            place, *owner = mark.split(".")
            return place == self._place and str(started_at(int(owner[0]))) != owner[1]

        _kill(is_orphan)


def _kill(wanted: Callable[[str, int], bool]) -> None:
    until = SYSTEM_CLOCK.monotonic() + _DYING
    pause = threading.Event()
    # Repeated: a process may have started another just before it was killed.
    while (found := [*_marked(wanted)]) and SYSTEM_CLOCK.monotonic() < until:
        for process in found:
            with suppress(OSError):  # it is gone
                os.kill(process, signal.SIGKILL)
        pause.wait(0.001)


def _marked(wanted: Callable[[str, int], bool]) -> Iterator[int]:
    """Yield the processes whose mark is wanted."""
    name = f"{_MARK}=".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it is gone, or not ours
            text, process = entry.read_bytes(), int(entry.parent.name)
            marks = [each for each in text.split(b"\0") if each.startswith(name)]
            if marks and wanted(marks[0].removeprefix(name).decode(), process):
                yield process


def started_at(process: int) -> int:
    """Return when a process was started, in ticks since the system was; zero if it is gone."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return 0
    # The name, in parentheses, may contain anything.
    return int(status.rpartition(b")")[2].split()[19])
