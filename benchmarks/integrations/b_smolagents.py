"""What a call costs in smolagents, alone and through our integration: CPU time, µs, p10.

One trivial tool of each kind, by the way of the framework itself: a call in a code cell, and a call
of an agent that calls tools as JSON.
"""

import json
import logging
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from smolagents import CodeAgent, LogLevel, Model, ToolCallingAgent, tool

import weakincentives as wink
from weakincentives.integrations.smolagents import WinkExecutor, WinkToolCallingAgent

TIMES, BATCHES = 20, 60
CALLS_IN_A_CELL = 10


@tool
def double(number: int) -> int:
    """Double a number.

    Args:
        number: Which.
    """
    return 2 * number


@wink.tool(name="double", reach="read")
def our_double(number: int) -> str:
    """Double a number."""
    return str(2 * number)


def p10(operation: Callable[[], object], per: int = 1, times: int = TIMES) -> float:
    operation()
    found: list[float] = []
    for _ in range(BATCHES):
        began = time.process_time()
        for _ in range(times):
            operation()
        found.append((time.process_time() - began) / times / per * 1e6)
    return round(sorted(found)[BATCHES // 10], 1)


def main() -> None:
    logging.disable(logging.CRITICAL)
    quiet: dict[str, Any] = {"verbosity_level": LogLevel.OFF}
    with tempfile.TemporaryDirectory() as place:
        for number in range(100):
            (Path(place) / f"{number}.txt").write_text("x")
        model = Model()
        alone = ToolCallingAgent([double], model, **quiet)
        ours = WinkToolCallingAgent([our_double, _renamed()], model, workspace=place, **quiet)
        executor = WinkExecutor(bridge=ours.bridge)
        cells = CodeAgent([double], model, **quiet).python_executor
        cells.send_tools({"double": double})
        executor.send_tools({tool.name: tool for tool in executor.tools})
        empty, full = "x = 1", "x = 1" + "\ndouble(number=1)" * CALLS_IN_A_CELL
        call = {"number": 1}
        in_cells = {
            "alone": p10(lambda: cells(empty)),
            "with": p10(lambda: executor(empty)),
        }
        per_call = {
            "alone": p10(lambda: cells(full), times=5) - in_cells["alone"],
            "with": p10(lambda: executor(full), times=5) - in_cells["with"],
        }
        print(
            json.dumps(
                {
                    "framework": "smolagents",
                    "version": version("smolagents"),
                    "alone_us": p10(lambda: alone.execute_tool_call("double", call)),
                    "with_us": p10(lambda: ours.execute_tool_call("double", call)),
                    "covered_scan_us": p10(lambda: ours.execute_tool_call("triple", call)),
                    "cell_alone_us": in_cells["alone"],
                    "cell_with_us": in_cells["with"],
                    "call_in_cell_alone_us": round(per_call["alone"] / CALLS_IN_A_CELL, 1),
                    "call_in_cell_with_us": round(per_call["with"] / CALLS_IN_A_CELL, 1),
                }
            )
        )
        ours.cleanup()


def _renamed() -> Any:
    @tool
    def triple(number: int) -> int:
        """Triple a number.

        Args:
            number: Which.
        """
        return 3 * number

    return triple


if __name__ == "__main__":
    main()
