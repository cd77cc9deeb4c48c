"""The Model Context Protocol, both ways: serve tools to any client, use any server's tools.

May know: `adapters`, `contrib`, `core`, `errors`, `filesystem`, `prompt`, `resources`, `retry`,
`runtime`, `serde`, `session`, `tool_result`.
Must not go here: the command line of the server; that is ``cli.mcp``.
"""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.adapters.mcp_output import McpOutput as McpOutput
    from weakincentives.mcp.client_call import end_stream as end_stream
    from weakincentives.mcp.connection import HttpServer as HttpServer
    from weakincentives.mcp.connection import StdioServer as StdioServer
    from weakincentives.mcp.context_sections import McpPromptSection as McpPromptSection
    from weakincentives.mcp.context_sections import McpResourcesSection as McpResourcesSection
    from weakincentives.mcp.elicitation import AskElsewhere as AskElsewhere
    from weakincentives.mcp.elicitation import ask_client as ask_client
    from weakincentives.mcp.oauth import OAuth as OAuth
    from weakincentives.mcp.oauth import TokenFile as TokenFile
    from weakincentives.mcp.server import McpServer as McpServer
    from weakincentives.mcp.server_auth import McpAuth as McpAuth
    from weakincentives.mcp.server_prompts import McpPrompt as McpPrompt
    from weakincentives.mcp.server_resources import McpResource as McpResource
    from weakincentives.mcp.tools_section import LeftOutTool as LeftOutTool
    from weakincentives.mcp.tools_section import McpToolsSection as McpToolsSection
    from weakincentives.mcp.tools_section import McpUndo as McpUndo
    from weakincentives.mcp.tools_section import mcp_sections as mcp_sections
