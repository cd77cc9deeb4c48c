"""What the peers' scripts share: the tool they all run, and timing for coroutines and turns.

A peer is driven through its own tool path: a direct call, a turn of a scripted model with one tool
call, and each further call in that turn.
"""

import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

# At the end: a module of ours must never stand before one of the peer's.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from timing import Samples, emit

__all__ = [
    "ARGUMENTS",
    "JSON_ARGUMENTS",
    "further_calls",
    "make_add",
    "report",
    "time_async",
    "time_sync",
]

ARGUMENTS = {"a": 1, "b": 2.5, "c": "z"}
JSON_ARGUMENTS = json.dumps(ARGUMENTS)

SECONDS = 2.0
"""Wall time spent on one measurement."""
MIN_BATCHES = 12
FEW, MANY = 1, 21
"""Calls in the turns whose difference gives the cost of a further call."""


def make_add(kind: str) -> Callable[..., object]:
    """Return the tool's function, sync or async, new each time."""

    def add(a: int, b: float, c: str = "x") -> str:
        """Add.

        Args:
            a: first
            b: second
            c: suffix
        """
        return f"{a + b}{c}"

    if kind == "sync":
        return add

    async def add_async(a: int, b: float, c: str = "x") -> str:
        return f"{a + b}{c}"

    add_async.__name__, add_async.__doc__ = "add", add.__doc__
    return add_async


def report(path: str, kind: str, samples: dict[str, float], detail: str = "") -> None:
    """Print one figure; ``path`` is direct, turn or further."""
    emit(path, kind=kind, detail=detail, **samples)


def _enough(samples: Samples, started: float) -> bool:
    return len(samples.cpu) >= MIN_BATCHES and time.perf_counter() - started > SECONDS


def time_sync(operation: Callable[[], object], times: int) -> dict[str, float]:
    """Time a function in batches of so many calls."""
    for _ in range(max(3, times)):
        operation()
    samples, started = Samples(), time.perf_counter()
    while not _enough(samples, started):
        samples.batch(operation, times)
    return samples.figures()


async def time_async(operation: Callable[[], Awaitable[object]], times: int) -> dict[str, float]:
    """Time a coroutine function in batches of so many calls."""
    for _ in range(max(3, times)):
        await operation()
    samples, started = Samples(), time.perf_counter()
    while not _enough(samples, started):
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(times):
            await operation()
        samples.add(time.process_time() - cpu, time.perf_counter() - wall, times)
    return samples.figures()


async def further_calls(turn: Callable[[int], Awaitable[object]]) -> dict[str, float]:
    """Return what each further call in one turn costs; ``turn`` takes the number of calls."""
    for _ in range(3):
        await turn(MANY)
    few, many, started = Samples(), Samples(), time.perf_counter()
    while not _enough(many, started):
        for samples, calls in ((few, FEW), (many, MANY)):
            wall, cpu = time.perf_counter(), time.process_time()
            await turn(calls)
            samples.add(time.process_time() - cpu, time.perf_counter() - wall)
    low, high = few.figures(), many.figures()
    figures = {
        name: round((high[name] - low[name]) / (MANY - FEW), 3)
        for name in ("cpu", "cpu_p10", "wall")
    }
    return {**figures, "batches": high["batches"]}
