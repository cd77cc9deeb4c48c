"""A long run with a scripted model: what a turn costs in time and memory, early and late.

Every turn asks for one call, or for ten, of a tool of three fields with a bound filesystem and a
subscriber. A run keeps what was said and done, so memory grows by what the log holds; how much
that is, is measured by letting go of all the rest.
"""

import gc
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from timing import Samples, emit, is_quick
from weakincentives.adapters import ModelTurn, RunConfig, ScriptedAdapter, calls, says
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Tool,
    ToolContext,
    ToolResult,
)
from weakincentives.runtime import Session, ToolInvoked
from weakincentives.runtime.conversation import Message
from weakincentives.session.events import PromptRendered

FEW, MANY = 1, 10
"""Calls in a turn."""
EDGE = 100
"""Turns at the start of a run, and at its end, that are compared."""
CONFIG = RunConfig(max_turns=None)


@dataclass(frozen=True, slots=True)
class Params:
    a: int
    b: float
    c: str = "x"


def add(params: Params, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult.ok(None, message=f"{params.a + params.b}{params.c}")


ADD = Tool[Params, None](name="add", description="Add.", handler=add, reach="reversible")


class Script:
    """Turns of so many calls each; notes when the model was asked, and the memory in use."""

    def __init__(self, turns: int, size: int) -> None:
        self.turns = turns
        self.size = size
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.memory: dict[int, int] = {}
        self.heard = 0

    def played(self) -> Iterator[ModelTurn]:
        for number in range(self.turns + 1):
            if not tracemalloc.is_tracing():
                self.cpu.append(time.process_time())
                self.wall.append(time.perf_counter())
            elif number in (EDGE, self.turns):
                self.memory[number] = _in_use()
            if number == self.turns:
                yield says("Done.")
            else:
                yield calls(*(("add", {"a": n, "b": 2.5, "c": "z"}) for n in range(self.size)))

    def samples(self, turns: slice) -> Samples:
        """Return what each of some turns took."""
        found = Samples()
        steps = zip(pairwise(self.cpu), pairwise(self.wall), strict=True)
        for (cpu, next_cpu), (wall, next_wall) in list(steps)[turns]:
            found.add(next_cpu - cpu, next_wall - wall)
        return found

    def run(self) -> Session:
        """Play the script to its end and return the session."""
        section = MarkdownSection(title="Work", template="Add numbers.", tools=[ADD])
        files = {Filesystem: MemoryFilesystem({"a.txt": "text"})}
        prompt = Prompt(PromptTemplate(sections=[section])).bind(resources=files)
        session = Session()
        session.dispatcher.subscribe(ToolInvoked, self.hear)
        response = ScriptedAdapter(self.played()).evaluate(prompt, session, config=CONFIG)
        assert response.calls == self.heard == self.turns * self.size
        return session

    def hear(self, event: ToolInvoked) -> None:
        self.heard += 1


def measure_time(turns: int, runs: int) -> None:
    """Time runs of few and of many calls a turn, one after the other."""
    edges: dict[int, list[tuple[Samples, Samples]]] = {FEW: [], MANY: []}
    whole: dict[int, list[float]] = {FEW: [], MANY: []}
    for _ in range(runs):
        for size, found in edges.items():
            script = Script(turns, size)
            script.run()
            # The first turns parse what later ones find prepared.
            found.append((script.samples(slice(5, EDGE)), script.samples(slice(-EDGE, None))))
            whole[size].append((script.cpu[-1] - script.cpu[0]) / turns * 1e6)
    for size, found in edges.items():
        first, last = (_joined([pair[place] for pair in found]) for place in (0, 1))
        ratios = [median(late.cpu) / median(early.cpu) for early, late in found]
        emit(
            "run time",
            turns=turns,
            calls=size,
            first=first.figures(),
            last=last.figures(),
            ratio=round(median(ratios), 2),
            ratio_p10=round(last.figures()["cpu_p10"] / first.figures()["cpu_p10"], 2),
            # All turns with every garbage collection among them, not only the median one.
            mean=round(fmean(whole[size]), 3),
        )
    further = Samples()
    for few, many in zip(edges[FEW], edges[MANY], strict=True):
        cpu = median(many[1].cpu) - median(few[1].cpu)
        wall = median(many[1].wall) - median(few[1].wall)
        further.add(cpu / 1e6, wall / 1e6, MANY - FEW)
    emit("run further", turns=turns, **further.figures())


def _joined(parts: list[Samples]) -> Samples:
    joined = Samples()
    for part in parts:
        joined.cpu += part.cpu
        joined.wall += part.wall
    return joined


def measure_memory(turns: int, size: int) -> None:
    """Compare what a run's memory grows by with what its log holds."""
    Script(EDGE, size).run()  # what is made once is there already
    tracemalloc.start()
    before = _in_use()
    script = Script(turns, size)
    session = script.run()
    growth = (script.memory[turns] - script.memory[EDGE]) / (turns - EDGE)
    log = [session[kind].all() for kind in (Message, ToolInvoked, PromptRendered)]
    records = sum(map(len, log))
    del session, script
    held = (_in_use() - before) / turns
    tracemalloc.stop()
    emit(
        "run memory",
        turns=turns,
        calls=size,
        growth=round(growth),
        log=round(held),
        records=round(records / turns, 2),
        beside_log=round(growth - held),
    )


def _in_use() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


if __name__ == "__main__":
    quick = is_quick()
    for turns, runs in ((1_000, 3),) if quick else ((1_000, 15), (10_000, 5)):
        measure_time(turns, runs)
        for size in (FEW, MANY):
            measure_memory(turns, size)
