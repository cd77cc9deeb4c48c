"""The calls of one turn: waiting at the same time, and what each further call costs.

A turn of calls that wait 10 ms each stands beside ``asyncio.gather`` on the bare handlers. A
further call is what the peers are asked for, too: a turn of 21 calls over a turn of one, for the
same tool of three fields; ours with a bound filesystem, a subscriber and a transaction for each.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median

from timing import Samples, emit, is_quick
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Tool,
    ToolContext,
    ToolResult,
)
from weakincentives.runtime import Session, ToolCall, ToolInvoked, aexecute_tools

FEW, MANY = 1, 21
"""Calls in the turns whose difference gives the cost of a further call."""
WAITING = 20
"""Calls in the turn that waits."""
SECONDS = 0.01
"""What each of them waits."""

ARGUMENTS = {"a": 1, "b": 2.5, "c": "z"}


@dataclass(frozen=True, slots=True)
class Params:
    a: int
    b: float
    c: str = "x"


@dataclass(frozen=True, slots=True)
class Total:
    value: int


def add(params: Params, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult.ok(None, message=f"{params.a + params.b}{params.c}")


async def add_async(params: Params, *, context: ToolContext) -> ToolResult[None]:
    return add(params, context=context)


async def pausing(params: Params, *, context: ToolContext) -> ToolResult[None]:
    await asyncio.sleep(0)
    return add(params, context=context)


async def conflicting(params: Params, *, context: ToolContext) -> ToolResult[None]:
    """Read, let others run, write: all but the first are taken twice."""
    latest = context.session[Total].latest()
    await asyncio.sleep(0)
    context.session[Total].seed(Total(params.a + (0 if latest is None else latest.value)))
    return add(params, context=context)


async def waiting(params: Params | None, *, context: ToolContext | None) -> ToolResult[None]:
    await asyncio.sleep(SECONDS)
    return ToolResult.ok(None, message="done")


def tool(name: str, handler: Callable[..., object], **options: object) -> Tool[Params, None]:
    return Tool[Params, None](
        name=name, description="Add.", handler=handler, reach="reversible", **options
    )


TOOLS = {
    "sync": tool("add", add),
    "async": tool("add_async", add_async),
    "async that pauses": tool("pausing", pausing),
    "async, taken twice": tool("conflicting", conflicting),
    "sync in a thread": tool("threaded", add, concurrent=True),
    "waiting": tool("waiting", waiting),
}


class Desk:
    """A session that runs turns of one tool."""

    def __init__(self, kind: str) -> None:
        self.session = Session()
        section = MarkdownSection(title="Work", tools=list(TOOLS.values()))
        prompt = Prompt(PromptTemplate(sections=[section])).bind(
            resources={Filesystem: MemoryFilesystem({"a.txt": "text"})}
        )
        prompt.render(self.session)
        self.heard = 0
        self.session.dispatcher.subscribe(ToolInvoked, self.hear)
        self.name = TOOLS[kind].name

    def hear(self, event: ToolInvoked) -> None:
        self.heard += 1

    async def turn(self, size: int) -> None:
        calls = [ToolCall(self.name, ARGUMENTS) for _ in range(size)]
        results = await aexecute_tools(calls, session=self.session)
        assert all(result.success for result in results)


async def measure_waiting(batches: int) -> None:
    """Time a turn that waits and the bare handlers in turn."""
    desk = Desk("waiting")

    async def bare() -> None:
        await asyncio.gather(*(waiting(None, context=None) for _ in range(WAITING)))

    await desk.turn(WAITING)
    turn, gather = Samples(), Samples()
    for _ in range(batches):
        await _batch(gather, bare)
        await _batch(turn, lambda: desk.turn(WAITING))
    ratios = [ours / theirs for ours, theirs in zip(turn.wall, gather.wall, strict=True)]
    emit(
        "turn waiting",
        calls=WAITING,
        turn=turn.figures(),
        gather=gather.figures(),
        ratio=round(median(ratios), 2),
        ratio_p10=round(sorted(ratios)[len(ratios) // 10], 2),
    )


async def measure_further(kind: str, batches: int) -> None:
    """Time a long turn and a short one in turn; the rest is what the calls in between cost."""
    desk = Desk(kind)
    few, many, further = Samples(), Samples(), Samples()
    for _ in range(3):
        await desk.turn(MANY)
    for _ in range(batches):
        await _batch(few, lambda: desk.turn(FEW))
        await _batch(many, lambda: desk.turn(MANY))
        cpu, wall = many.cpu[-1] - few.cpu[-1], many.wall[-1] - few.wall[-1]
        further.add(cpu / 1e6, wall / 1e6, MANY - FEW)
    assert desk.heard == len(desk.session[ToolInvoked])
    emit("turn further", kind=kind, **further.figures())


async def _batch(samples: Samples, operation: Callable[[], Awaitable[object]]) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    await operation()
    samples.add(time.process_time() - cpu, time.perf_counter() - wall)


if __name__ == "__main__":
    quick = is_quick()
    asyncio.run(measure_waiting(10 if quick else 60))
    for kind in TOOLS:
        if kind != "waiting":
            asyncio.run(measure_further(kind, 30 if quick else 200))
