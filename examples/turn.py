"""Four calls in one turn, on one stock: together, and as if one after the other.

Run it with `.venv/bin/python examples/turn.py`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import weakincentives as wink
from weakincentives.runtime import ToolInvoked, execute_tools
from weakincentives.testing import History


@dataclass(frozen=True)
class Stock:
    pieces: int


history = History()


def in_stock(session: wink.Session) -> int:
    return sum(stock.pieces for stock in session[Stock].all())


@wink.tool(reach="read")
async def ask_supplier(*, context: wink.ToolContext) -> str:
    """Ask the supplier when more will come."""
    await asyncio.sleep(0.2)
    return "on Monday"


@wink.tool(reach="reversible")
async def sell(pieces: int, *, context: wink.ToolContext) -> str:
    """Sell some pieces."""
    stock = history.read("stock", in_stock(context.session))
    await asyncio.sleep(0.2)  # asks a payment service: the others run meanwhile
    if stock < pieces:
        raise ValueError(f"only {stock} left")
    context.session[Stock].seed(Stock(stock - pieces))
    history.wrote("stock", stock - pieces)
    return f"sold {pieces}, {stock - pieces} left"


def main() -> None:
    session = wink.Session()
    session[Stock].seed(Stock(10))
    section = wink.MarkdownSection(title="Shop", tools=[sell, ask_supplier])
    wink.Prompt(wink.PromptTemplate(sections=[section])).render(session)
    calls = [
        wink.ToolCall("sell", {"pieces": 8}),
        wink.ToolCall("ask_supplier"),
        wink.ToolCall("sell", {"pieces": 5}),
        wink.ToolCall("sell", {"pieces": 2}),
    ]

    started = time.perf_counter()
    results = execute_tools(calls, session=session)
    took = time.perf_counter() - started

    print("A turn of four calls, each 0.2 s of waiting:")
    for result, record in zip(results, session[ToolInvoked].all(), strict=True):
        again = f"   ran {record.attempts} times: {', '.join(record.conflicts)} had changed"
        print(
            f"  {record.place}. {record.tool_name:<12} {'ok' if result.success else '--'} "
            f"{result.value or result.message}{again if record.attempts > 1 else ''}"
        )
    anomaly = history.check(session, initial={"stock": 10}, final={"stock": in_stock(session)})
    print(f"In stock: {in_stock(session)}. What the checker found: {anomaly}.")
    print(f"Took {took:.1f} s.")


if __name__ == "__main__":
    main()
