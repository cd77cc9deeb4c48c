"""What importing a module adds to the start of Python, over fresh interpreters.

Standard library only: it also runs in the peers' environments, as
``python import_time.py --names "from agents import Agent"``.
"""

import argparse
import resource
import subprocess
import sys
import time
from statistics import median

from timing import emit

FIRST_TOOL = """
from dataclasses import dataclass
from weakincentives import Tool, ToolContext, ToolResult
@dataclass(frozen=True)
class Params:
    path: str
    limit: int = 10
def handler(params: Params, *, context: ToolContext) -> ToolResult[Params]:
    return ToolResult.ok(params)
Tool[Params, Params](name="first", description="Do it.", handler=handler)
"""


def run(code: str) -> tuple[float, float]:
    """Return CPU and wall milliseconds of a fresh interpreter."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return cpu * 1e3, (time.perf_counter() - started) * 1e3


def measure(programs: dict[str, str], rounds: int) -> None:
    """Time programs in turn with bare Python, each round giving one difference."""
    for code in programs.values():
        run(code)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(rounds):
        bare_cpu, bare_wall = run("pass")
        for name, code in programs.items():
            cpu, wall = run(code)
            taken[name].append((cpu - bare_cpu, wall - bare_wall))
    for name, pairs in taken.items():
        emit(
            f"import {name}",
            cpu_ms=round(median(cpu for cpu, _ in pairs), 1),
            cpu_ms_p10=round(sorted(cpu for cpu, _ in pairs)[rounds // 10], 1),
            wall_ms=round(median(wall for _, wall in pairs), 1),
            rounds=rounds,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--names", help="the statement that a peer's program starts with")
    options = parser.parse_args()
    programs = (
        {"names": options.names}
        if options.names
        else {"package": "import weakincentives", "first tool": FIRST_TOOL}
    )
    measure(programs, 5 if options.quick else 21)
