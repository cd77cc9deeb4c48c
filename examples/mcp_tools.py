"""A scripted model works with another program's tools: under a policy, and with what fails undone.

Run it with `.venv/bin/python examples/mcp_tools.py`. It starts itself a second time, as the MCP
server; any other server would do.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import weakincentives as wink
from weakincentives.adapters import ScriptedAdapter, Turn, calls
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.mcp import McpToolsSection
from weakincentives.prompt import SequentialDependencyPolicy
from weakincentives.runtime import ToolInvoked

SCRIPT: list[Turn] = [
    calls(("pay", {"amount": 30})),  # denied: nobody has looked at the balance
    calls("balance"),
    calls(("pay", {"amount": 500})),  # it is written down, then found to be too much: undone
    calls(("pay", {"amount": 70})),  # the server crashes half-way: undone, and started again
    calls(("pay", {"amount": 30})),
    "30 were paid.",
]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        book = Path(place, "book.txt")
        book.write_text("100\n")
        with (
            HostFilesystem(place) as files,
            McpToolsSection(
                server=[sys.executable, __file__, str(book)],
                title="Accounts",
                deny=["close_account"],
                reach={"balance": "read", "pay": "reversible"},
                writes={"pay": "external"},
                policies=[SequentialDependencyPolicy(dependencies={"pay": {"balance"}})],
            ) as section,
        ):
            session = wink.Session()
            prompt = wink.Prompt(
                wink.PromptTemplate(sections=[section], resources={Filesystem: files})
            )
            answer = ScriptedAdapter(SCRIPT).evaluate(prompt, session)
            for record in session[ToolInvoked].all():
                first, *_ = record.result.render().splitlines()
                print(f"{'ok' if record.success else '--'} {record.tool_name:<8} {first[:90]}")
                if record.ran and not record.success:
                    print(f"            undone: {', '.join(record.result.metadata.undone)}")
            print(f"\n{answer.text} In the book: {book.read_text().strip()}")


# The other program


def serve(book: Path) -> None:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer("accounts", log_level="ERROR")

    @server.tool()
    def balance() -> int:
        """Say what is left."""
        return int(book.read_text())

    @server.tool()
    def pay(amount: int) -> str:
        """Pay an amount."""
        left = int(book.read_text()) - amount
        book.write_text(f"{left}\n")
        if amount == 70:
            os._exit(1)
        if left < 0:
            raise ToolError(f"There is not so much: {left} would be left")
        return f"Paid {amount}; {left} are left."

    @server.tool()
    def close_account() -> str:
        """Close the account for good."""
        book.unlink()
        return "closed"

    server.run()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(Path(sys.argv[1]))
    else:
        main()
