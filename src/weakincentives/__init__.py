"""WINK: run an LLM agent's tools as transactions."""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

__version__ = "0.1.0"

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.core.call import ToolCall as ToolCall
    from weakincentives.core.deadlines import Deadline as Deadline
    from weakincentives.core.media import Media as Media
    from weakincentives.filesystem import Filesystem as Filesystem
    from weakincentives.filesystem import MemoryFilesystem as MemoryFilesystem
    from weakincentives.prompt import MarkdownSection as MarkdownSection
    from weakincentives.prompt import Prompt as Prompt
    from weakincentives.prompt import PromptTemplate as PromptTemplate
    from weakincentives.prompt import Tool as Tool
    from weakincentives.prompt import ToolContext as ToolContext
    from weakincentives.prompt import ToolResult as ToolResult
    from weakincentives.prompt.tool import tool as tool  # mypy: `prompt.tool` is a module
    from weakincentives.runtime import Session as Session
    from weakincentives.runtime import ToolRegistry as ToolRegistry
    from weakincentives.runtime import aexecute_tool as aexecute_tool
    from weakincentives.runtime import execute_tool as execute_tool
