"""The invoice desk for any MCP client: ``python examples/invoice_desk/server.py desk.db``.

pip install 'wink-runtime[mcp]'
"""

from __future__ import annotations

import asyncio
import sys

from desk import open_desk

from weakincentives.mcp import McpServer


def main() -> None:
    with open_desk(sys.argv[1] if len(sys.argv) > 1 else ":memory:") as desk:
        asyncio.run(McpServer(desk, name="invoice desk").run_stdio())


if __name__ == "__main__":
    main()
