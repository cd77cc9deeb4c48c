"""The Model Context Protocol, both ways: serve our tools to any client, use any server's tools."""

from typing import TYPE_CHECKING

from weakincentives.lazy import lazy_names

if TYPE_CHECKING:
    from weakincentives.mcp.connection import HttpServer, StdioServer
    from weakincentives.mcp.output import McpMedia, McpOutput
    from weakincentives.mcp.server import McpServer
    from weakincentives.mcp.tools_section import LeftOutTool, McpToolsSection, McpUndo

__all__ = [
    "HttpServer",
    "LeftOutTool",
    "McpMedia",
    "McpOutput",
    "McpServer",
    "McpToolsSection",
    "McpUndo",
    "StdioServer",
]

if not TYPE_CHECKING:  # a type checker shall still find a misspelled name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "connection": ["HttpServer", "StdioServer"],
            "output": ["McpMedia", "McpOutput"],
            "server": ["McpServer"],
            "tools_section": ["LeftOutTool", "McpToolsSection", "McpUndo"],
        },
    )
