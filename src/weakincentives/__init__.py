"""WINK: run an LLM agent's tools as transactions."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weakincentives.call import ToolCall
    from weakincentives.deadlines import Deadline
    from weakincentives.filesystem import Filesystem, MemoryFilesystem
    from weakincentives.prompt import (
        MarkdownSection,
        Prompt,
        PromptTemplate,
        Tool,
        ToolContext,
        ToolResult,
        tool,
    )
    from weakincentives.runtime import Session, aexecute_tool, execute_tool

__version__ = "0.1.0"

__all__ = [
    "Deadline",
    "Filesystem",
    "MarkdownSection",
    "MemoryFilesystem",
    "Prompt",
    "PromptTemplate",
    "Session",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolResult",
    "aexecute_tool",
    "execute_tool",
    "tool",
]

# Loaded when first asked for: a program pays for what it uses.
_HOMES = {
    "call": ["ToolCall"],
    "deadlines": ["Deadline"],
    "filesystem": ["Filesystem", "MemoryFilesystem"],
    "prompt": ["MarkdownSection", "Prompt", "PromptTemplate", "Tool", "ToolContext", "ToolResult",
               "tool"],
    "runtime": ["Session", "aexecute_tool", "execute_tool"],
}  # fmt: skip


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
