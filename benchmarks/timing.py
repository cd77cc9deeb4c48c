"""How everything here is timed: many short batches, CPU and wall time, medians.

The machine is shared. A short batch is rarely interrupted, and the CPU time of this process leaves
out what others use, so the median over many batches stays close to what an idle machine gives.
The garbage collector stays on: it is part of what a call costs.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from statistics import fmean, median


class Samples:
    """CPU and wall time of one operation in µs, one entry per batch."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def batch(self, operation: Callable[[], object], times: int) -> None:
        """Run the operation so many times and note what one of them took."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(times):
            operation()
        self.add(time.process_time() - cpu, time.perf_counter() - wall, times)

    def add(self, cpu: float, wall: float, times: int = 1) -> None:
        """Note a batch that was timed elsewhere, in seconds."""
        self.cpu.append(cpu / times * 1e6)
        self.wall.append(wall / times * 1e6)

    def figures(self) -> dict[str, float]:
        """Return medians; the mean as well, since a collection falls into few batches."""
        return {
            "cpu": round(median(self.cpu), 3),
            "cpu_p10": round(sorted(self.cpu)[len(self.cpu) // 10], 3),
            "cpu_mean": round(fmean(self.cpu), 3),
            "wall": round(median(self.wall), 3),
            "batches": len(self.cpu),
        }


def compare(
    operations: Mapping[str, Callable[[], object]], *, times: int, batches: int
) -> dict[str, Samples]:
    """Time operations in turn, batch by batch, so that noise falls on all of them alike."""
    samples = {name: Samples() for name in operations}
    for operation in operations.values():
        for _ in range(times):
            operation()
    for _ in range(batches):
        for name, operation in operations.items():
            samples[name].batch(operation, times)
    return samples


def reference() -> dict[str, float]:
    """Time a fixed piece of plain Python: tells how fast the machine was at that moment."""

    def work() -> int:
        table = {str(number): number for number in range(100)}
        return sum(sorted(table.values(), reverse=True))

    return compare({"work": work}, times=50, batches=50)["work"].figures()


def emit(what: str, **figures: object) -> None:
    """Print one measurement as a line of JSON."""
    print(json.dumps({"what": what, **figures}), flush=True)


def is_quick() -> bool:
    """Tell whether the script was started with ``--quick``: fewer batches, short histories."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args().quick
