"""MCP servers with a tool that answers and one that writes a file: ours, and its peers.

``python mcp_servers.py ours DIRECTORY`` serves over standard input and output. With
``sync http`` at the end it serves HTTP, and prints its port.
"""

import asyncio
import sys
from pathlib import Path

KINDS = ("sync", "async")
TOKEN = "a-token"


def plain_write(directory: Path, kind: str):
    """Return the tool as a function that writes, and nothing more."""

    def write(path: str, content: str) -> str:
        """Write a file."""
        (directory / path).write_text(content)
        return f"Wrote {path}"

    async def write_async(path: str, content: str) -> str:
        """Write a file."""
        return write(path, content)

    write_async.__name__ = "write"
    return write if kind == "sync" else write_async


def plain_echo(kind: str):
    """Return a tool that only answers."""

    def echo(text: str) -> str:
        """Return a text."""
        return text

    async def echo_async(text: str) -> str:
        """Return a text."""
        return text

    echo_async.__name__ = "echo"
    return echo if kind == "sync" else echo_async


def ours(directory: Path, kind: str = "sync"):
    """Return our server: a policy, a transaction with history on disk, undo, a saved session."""
    from weakincentives.filesystem import Filesystem, HostFilesystem
    from weakincentives.mcp import McpServer
    from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate, ReadBeforeWritePolicy
    from weakincentives.prompt import tool as as_tool
    from weakincentives.prompt.tool import ToolContext
    from weakincentives.runtime import SavedSession, Session

    def write(path: str, content: str, *, context: ToolContext) -> str:
        """Write a file."""
        context.filesystem.write(path, content)
        return f"Wrote {path}"

    async def write_async(path: str, content: str, *, context: ToolContext) -> str:
        """Write a file."""
        context.filesystem.write(path, content)
        return f"Wrote {path}"

    tool = as_tool(reach="reversible", name="write")(write if kind == "sync" else write_async)
    echo = as_tool(reach="read", concurrent=True)(plain_echo(kind))
    files = HostFilesystem(directory)
    session = Session()
    saved = SavedSession.create(files.store / "session.jsonl", session)
    section = MarkdownSection(title="Files", tools=[tool, echo], policies=[ReadBeforeWritePolicy()])
    template = PromptTemplate(sections=[section], resources={Filesystem: files})
    server = McpServer(Prompt(template), session=session)
    server.kept = (files, saved)
    return server


def sdk(directory: Path, kind: str = "sync"):
    """Return the server of the mcp package."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("peer", log_level="ERROR")
    server.tool()(plain_write(directory, kind))
    server.tool()(plain_echo(kind))
    return server


def fastmcp(directory: Path, kind: str = "sync"):
    """Return the server of the fastmcp package."""
    from fastmcp import FastMCP

    server = FastMCP("peer")
    server.tool(plain_write(directory, kind))
    server.tool(plain_echo(kind))
    return server


def main(name: str, directory: str, kind: str = "sync", way: str = "stdio") -> None:
    made = {"ours": ours, "mcp": sdk, "fastmcp": fastmcp}[name](Path(directory), kind)
    if way == "http":
        asyncio.run(over_http(name, made))
    elif name == "ours":
        asyncio.run(made.run_stdio())
    elif name == "mcp":
        asyncio.run(made.run_stdio_async())
    else:
        made.run(show_banner=False)


async def over_http(name: str, made) -> None:
    from weakincentives.mcp.http import listen, serve

    with listen() as port:
        print(port.getsockname()[1], flush=True)
        if name == "ours":
            with made:
                await serve(made, port, TOKEN)
        else:
            import uvicorn

            config = uvicorn.Config(made.streamable_http_app(), log_level="error")
            await uvicorn.Server(config).serve([port])


if __name__ == "__main__":
    main(*sys.argv[1:])
