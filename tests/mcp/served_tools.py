"""Tools for servers that the tests start as programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import weakincentives as wink


@dataclass(frozen=True)
class Total:
    value: int = 0


@wink.tool(reach="reversible")
def write(path: str, content: str, *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, content)
    return f"Wrote {len(content)} characters to {path}"


@wink.tool(reach="reversible")
def add(value: int, *, context: wink.ToolContext) -> str:
    """Add to a sum in a file and to one in the session."""
    files = context.filesystem
    total = (int(files.read("total.txt")) if files.exists("total.txt") else 0) + value
    files.write("total.txt", str(total))
    now = context.session[Total].latest() or Total()
    context.session[Total].seed(Total(now.value + value))
    return f"{total} {now.value + value}"


@wink.tool(reach="reversible")
def wait(signs: str, *, context: wink.ToolContext) -> str:
    """Change a file, leave a sign outside of the workspace, and wait for another one there."""
    context.filesystem.write("half.txt", "half done")
    (Path(signs) / "reached").touch()
    while not (Path(signs) / "go on").exists():
        context.beat()
        if context.signal.wait(0.02):
            break
    context.filesystem.write("other.txt", "other half")
    return "Done"


@wink.tool
def chatter(*, context: wink.ToolContext) -> str:
    """Print in every way that there is."""
    print("printed by the tool", flush=True)  # noqa: T201
    sys.stdout.write("written by the tool\n")
    os.write(1, b"written to the descriptor\n")
    subprocess.run(["echo", "printed by a program"], check=True)
    return sys.stdin.read() + "Done"


tools = [write, add, wait, chatter]
print("printed when loaded")  # noqa: T201
