"""Your own tools for any MCP client: served over stdio, and driven here by the official client.

The tool asks the client's user before it changes several files.

python examples/mcp_server.py            # this program starts itself as a server, and uses it
python examples/mcp_server.py serve DIR  # what a client's settings would start
"""

import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mcp import Client, StdioServerParameters
from mcp.client import ClientRequestContext
from mcp.types import ElicitRequestParams, ElicitResult, TextContent, TextResourceContents

from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.mcp import McpServer
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Tool,
    ToolContext,
    ToolResult,
)


@dataclass(frozen=True)
class RenameParams:
    old: str
    """The name that is there."""
    new: str
    """The name to put in its place, in every Python file."""


@dataclass(frozen=True)
class Renamed:
    paths: tuple[str, ...]

    def render(self) -> str:
        return f"Changed: {', '.join(self.paths)}"


@dataclass(frozen=True)
class Confirmation:
    go_on: bool


async def rename(params: RenameParams, *, context: ToolContext) -> ToolResult[Renamed]:
    files = context.filesystem
    changed: list[str] = []
    for path in files.glob("**/*.py"):
        before = files.read(path)
        after = before.replace(params.old, params.new)
        if after != before:
            files.write(path, after)
            changed.append(path)
            try:
                compile(after, path, "exec")
            except SyntaxError as error:  # every file is as it was, byte for byte
                return ToolResult.error(f"{path} would not compile: {error.msg}")
        context.report(path)  # the client sees progress
    if len(changed) > 1:
        # A client of the newest protocol repeats the call with the answer: what was written until
        # here is rolled back, and written again.
        answer = await context.ask(f"Change {' and '.join(changed)}?", Confirmation)
        if not answer.go_on:
            return ToolResult.error("The user does not want that")
    return ToolResult.ok(Renamed(tuple(changed)), f"{params.old} is {params.new} now.")


REFACTORING = MarkdownSection(
    title="Refactoring",
    template="Rename with `rename`: it changes every file, or none if one would not compile.",
    tools=[
        Tool[RenameParams, Renamed](
            name="rename",
            description="Rename something in every Python file.",
            handler=rename,
            reach="reversible",
        )
    ],
)


async def serve(directory: str) -> None:
    """Serve the section for a directory, to the client that started this program."""
    template = PromptTemplate(
        sections=[REFACTORING], resources={Filesystem: HostFilesystem(directory)}
    )
    await McpServer(Prompt(template), name="refactoring").run_stdio()


async def confirm(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
    """Be the client's user."""
    print(f"  asked: {params.message}")
    return ElicitResult(action="accept", content={"go_on": True})


async def use(directory: Path) -> None:
    """Be a client."""
    server = StdioServerParameters(command=sys.executable, args=[__file__, "serve", str(directory)])
    async with Client(server, elicitation_callback=confirm) as client:
        print("Tools:", ", ".join(tool.name for tool in (await client.list_tools()).tools))
        for arguments in ({"old": "total", "new": "amount"}, {"old": "amount", "new": "class"}):
            result = await client.call_tool("rename", arguments)
            print("failed:" if result.is_error else "ok:", said(result.content[0]).splitlines()[0])
            print("  shop.py:", (directory / "shop.py").read_text().strip())
        diff = (await client.read_resource("wink://diff")).contents[0]
        assert isinstance(diff, TextResourceContents)
        print("Changed so far:", *(line for line in diff.text.splitlines() if line[:4] == "+++ "))
        print(said((await client.call_tool("undo")).content[0]))
        print("  shop.py:", (directory / "shop.py").read_text().strip())


def said(content: object) -> str:
    assert isinstance(content, TextContent)
    return content.text


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            project = Path(folder, "project")
            project.mkdir()
            (project / "shop.py").write_text("total = 1\n")
            (project / "main.py").write_text("from shop import total\n")
            asyncio.run(use(project))
