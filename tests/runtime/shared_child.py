"""A process that shares a directory with others: it counts in one file, and notes that in another.

Run as ``shared_child.py DIRECTORY NAME CALLS [async]``. It prints the id of each call that has
committed. If CALLS is 0, it goes on until it is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys

import weakincentives as wink
from weakincentives.filesystem import HostFilesystem
from weakincentives.runtime import ToolRegistry

ROOT, NAME, CALLS = sys.argv[1], sys.argv[2], int(sys.argv[3])
TOGETHER = 4


@wink.tool(reach="reversible")
def count(call: str, *, context: wink.ToolContext) -> str:
    """Add one to the number in a file, and a line to a list."""
    return add_one(call, context)


@wink.tool(reach="reversible")
async def count_slowly(call: str, *, context: wink.ToolContext) -> str:
    """Do the same, on an event loop, with calls of the same turn in between."""
    await asyncio.sleep(0)
    return add_one(call, context)


def add_one(call: str, context: wink.ToolContext) -> str:
    files = context.filesystem
    number = int(files.read("number")) + 1
    files.write("number", str(number))
    files.append("list", f"{number} {call}\n")
    return call


def report(result: wink.ToolResult[str]) -> None:
    assert result.success, result.message
    os.write(1, f"{result.value}\n".encode())


def main() -> None:
    with (
        HostFilesystem(ROOT, shared=True) as files,
        ToolRegistry([count, count_slowly], workspace=files) as tools,
    ):
        ids = (f"{NAME}-{number}" for number in itertools.count())
        if sys.argv[4:] == ["async"]:
            asyncio.run(in_turns(tools, [next(ids) for _ in range(CALLS)]))
            return
        for call in itertools.islice(ids, CALLS or None):
            report(tools.execute("count", {"call": call}, call_id=call))


async def in_turns(tools: ToolRegistry, ids: list[str]) -> None:
    for start in range(0, len(ids), TOGETHER):
        turn = ids[start : start + TOGETHER]
        together = (tools.aexecute("count_slowly", {"call": n}, call_id=n) for n in turn)
        for result in await asyncio.gather(*together):
            report(result)


main()
