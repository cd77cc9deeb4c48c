"""A tool whose calls depend on each other, for servers that many clients share."""

from __future__ import annotations

import weakincentives as wink


@wink.tool(reach="reversible")
async def count(name: str, *, context: wink.ToolContext) -> str:
    """Note a name, and count it."""
    files = context.filesystem
    total = int(files.read("total.txt")) if files.exists("total.txt") else 0
    files.write(f"names/{name}.txt", "")
    files.write("total.txt", str(total + 1))
    return str(total + 1)


tools = [count]
