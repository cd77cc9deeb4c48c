"""Builds a prompt, a session and files of the public package ``weakincentives``, and drives them.

Runs in that package's own environment, where ours is not installed.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

# At the end: a module of ours must never stand before one of the peer's.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from timing import Samples, compare, emit
from weakincentives.filesystem import Filesystem
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Tool,
    ToolContext,
    ToolResult,
)
from weakincentives.runtime import Session

__all__ = [
    "VERSION",
    "Desk",
    "Found",
    "Params",
    "Samples",
    "Session",
    "ToolResult",
    "compare",
    "emit",
    "plain",
]

VERSION = version("weakincentives")
logging.getLogger().setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True)
class Params:
    path: str
    limit: int = 10
    recursive: bool = False
    ratio: float = 0.5
    kinds: tuple[str, ...] = ()
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    count: int

    def render(self) -> str:
        return f"{self.count} found"


def plain(params: Params, *, context: ToolContext) -> ToolResult[Found]:
    return ToolResult.ok(Found(params.limit), message="done")


class Desk:
    """A prompt with one tool, a session, and files where this release has some."""

    def __init__(self, fs: object = None, policies: tuple[object, ...] = ()) -> None:
        self.tool = Tool[Params, Found](name="look_up", description="Do nothing.", handler=plain)
        section = MarkdownSection(
            title="Files", key="files", template="Hello", tools=(self.tool,), policies=policies
        )
        self.prompt = Prompt(PromptTemplate(ns="bench", key="bench", sections=[section]))
        self.prompt.bind(resources={} if fs is None else {Filesystem: fs})
        self.session = Session()

    def bridge(self) -> Callable[[dict], object]:
        """Return the way all adapters of this release call a tool."""
        from weakincentives.adapters._shared._bridge import create_bridged_tools

        (call,) = create_bridged_tools(
            (self.tool,),
            session=self.session,
            adapter=object(),
            prompt=self.prompt,
            rendered_prompt=None,
            deadline=None,
            budget_tracker=None,
        )
        return call
