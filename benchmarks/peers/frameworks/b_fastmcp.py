import asyncio

from common import ARGUMENTS, make_add, report, time_async
from fastmcp import Client, FastMCP


async def measure(kind):
    server = FastMCP("t")
    server.tool(make_add(kind))
    direct = await time_async(lambda: server.call_tool("add", ARGUMENTS), 33)
    report("direct", kind, direct, "FastMCP.call_tool")
    async with Client(server) as client:
        assert not (await client.call_tool("add", ARGUMENTS)).is_error
        round_trip = await time_async(lambda: client.call_tool("add", ARGUMENTS), 16)
        report("round trip", kind, round_trip, "Client.call_tool in memory")


async def main():
    for kind in ("async", "sync"):
        await measure(kind)


asyncio.run(main())
