"""WINK: run an LLM agent's tools as transactions."""

from typing import TYPE_CHECKING

from weakincentives.lazy import lazy_names

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
    from weakincentives.runtime import Session, ToolRegistry, aexecute_tool, execute_tool

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
    "ToolRegistry",
    "ToolResult",
    "aexecute_tool",
    "execute_tool",
    "tool",
]

if not TYPE_CHECKING:  # a type checker shall still find a misspelled name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "call": ["ToolCall"],
            "deadlines": ["Deadline"],
            "filesystem": ["Filesystem", "MemoryFilesystem"],
            "prompt": [
                "MarkdownSection",
                "Prompt",
                "PromptTemplate",
                "Tool",
                "ToolContext",
                "ToolResult",
                "tool",
            ],
            "runtime": ["Session", "ToolRegistry", "aexecute_tool", "execute_tool"],
        },
    )
