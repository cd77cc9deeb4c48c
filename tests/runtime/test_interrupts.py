"""KeyboardInterrupt at every line of the pipeline: the call happened, or it never did."""

from __future__ import annotations

import asyncio
import linecache
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from agents import Noted, Plan, Step, World, make_tool, raising

import weakincentives
from weakincentives.prompt import (
    PolicyDecision,
    QuotaPolicy,
    SequentialDependencyPolicy,
    ToolResult,
)
from weakincentives.runtime import ToolCall, aexecute_tool

SOURCE = str(Path(weakincentives.__file__).parent)


@cache
def _leaves_with(code: CodeType, offset: int, line: int) -> bool:
    """Whether this is the way out of a ``with`` block, on to ``__exit__``.

    A trace function can raise there; a signal cannot: the interpreter looks for signals only
    after calls and on jumps back, and between the block and ``__exit__`` there are none.
    """
    if not linecache.getline(code.co_filename, line).lstrip().startswith("with "):
        return False
    return offset != min(start for start, _, at in code.co_lines() if at == line)


def interrupted_at(
    line: int, run: Callable[[], Any], *, sparing: str = ""
) -> tuple[bool, BaseException | None]:
    """Run with an interrupt at the nth line of our code; returns whether there was such a line."""
    left = line

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(SOURCE) or frame.f_code.co_name == sparing:
            return None
        if event == "line" and not _leaves_with(frame.f_code, frame.f_lasti, frame.f_lineno):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except BaseException as error:
        return left <= 0, error
    finally:
        sys.settrace(before)
    return left <= 0, None


class Deny:
    name = "deny"

    def check(self, tool: Any, params: Any, *, context: Any) -> PolicyDecision:
        return PolicyDecision.deny("no")


def nested(params: Step, context: Any) -> None:
    make_tool("inner", lambda p, c: None)(Step("inner"), context=context)


def policies() -> list[Any]:
    return [SequentialDependencyPolicy(dependencies={"other": {"work"}}), QuotaPolicy(max_calls=9)]


SCENARIOS: dict[str, Callable[[], World]] = {
    "succeeds": lambda: World([make_tool("work", lambda p, c: None)], policies()),
    "raises": lambda: World([make_tool("work", raising(ValueError("no")))], policies()),
    "answers that it failed": lambda: World(
        [make_tool("work", lambda p, c: ToolResult.error("no"))]
    ),
    "is denied": lambda: World([make_tool("work", lambda p, c: None)], [Deny()]),
    "calls another tool": lambda: World([make_tool("work", nested)]),
}

ALL = ("a", "inner")


def check(world: World, scenario: str, error: BaseException | None, line: int) -> None:
    where = f"interrupted at line {line}: {error!r}"
    plan, files, count = world.state()
    steps = plan.steps
    own = [r for r in world.records if r.tool_name == "work"]

    # All or nothing, and all parts agree.
    whole = ("a", "inner") if scenario == "calls another tool" else ("a",)
    assert steps in ((), whole), where
    assert set(files) == {f"{s}.txt" for s in steps} | ({"journal.txt"} if steps else set()), where
    assert files.get("journal.txt", "") == "".join(f"{s}\n" for s in steps), where
    assert count == len(steps), where

    # One record, and it tells the truth. None only when the call had not begun.
    assert len(own) <= 1, where
    assert bool(steps) == any(r.success for r in own), where
    if not own:
        assert world.session[Noted].all() == (), where

    # And the world goes on.
    world.session[Plan].clear()
    world.fs.write("after.txt", "x")
    assert world.fs.read("after.txt") == "x", where
    assert world.session[Plan].all() == (), where
    again = world.call("work", "again")
    assert again.message, where
    gate = world.session.gate
    assert gate is not None
    assert not gate.locked(), where


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_interrupt_at_any_line_leaves_all_or_nothing(scenario: str):
    line = 0
    unrecorded = 0
    while True:
        line += 1
        world = SCENARIOS[scenario]()
        reached, error = interrupted_at(line, lambda w=world: w.call("work"))
        unrecorded += not [r for r in world.records if r.tool_name == "work"]
        check(world, scenario, error, line)
        if not reached:
            break

    assert line > 100  # the injection did happen, all through the call
    assert unrecorded < line / 2  # only before the call has begun


@pytest.mark.parametrize("scenario", ["succeeds", "raises"])
def test_an_interrupt_at_any_line_of_an_async_call_leaves_all_or_nothing(scenario: str):
    """But for the function that waits for its turn on the caller's loop: asyncio turns a signal
    into a cancellation, which can only come where that function awaits, and is tested elsewhere.
    """
    line = 0
    while True:
        line += 1
        world = SCENARIOS[scenario]()

        def run(w: World = world) -> None:
            asyncio.run(aexecute_tool(ToolCall("work", {"name": "a"}), session=w.session))

        reached, error = interrupted_at(line, run, sparing="_ain_turn")
        check(world, scenario, error, line)
        if not reached:
            break
    assert line > 100
