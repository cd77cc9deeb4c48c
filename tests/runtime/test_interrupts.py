"""KeyboardInterrupt at every line of the pipeline: the call happened, or it never did."""

from __future__ import annotations

import asyncio
import gc
import linecache
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from small_world import Noted, Plan, Step, World, make_tool, raising

import weakincentives
from chance import STRIDE
from weakincentives.core.gate import gate_of
from weakincentives.filesystem import HostFilesystem
from weakincentives.prompt import (
    PolicyDecision,
    QuotaPolicy,
    SequentialDependencyPolicy,
    ToolResult,
    if_offered,
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


def raise_here() -> None:
    """Raise where we are. Where signals are held back this is no interrupt that can come, so the
    function that holds them back is spared."""
    raise KeyboardInterrupt


def signal_here() -> None:
    """What Ctrl-C does: the interpreter raises as soon as its handler lets it."""
    signal.raise_signal(signal.SIGINT)


def interrupted_at(
    line: int,
    run: Callable[[], Any],
    *,
    sparing: frozenset[str] | set[str] = frozenset(),
    interrupt: Callable[[], None] = raise_here,
) -> tuple[bool, BaseException | None]:
    """Run with an interrupt at the nth line of our code; returns whether there was such a line."""
    left = line
    spared = {*sparing, "defer_interrupts", "note"}

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(SOURCE) or frame.f_code.co_name in spared:
            return None
        if event == "line" and not _leaves_with(frame.f_code, frame.f_lasti, frame.f_lineno):
            left -= 1
            if left == 0:
                interrupt()
        return trace

    # What an earlier test left would be collected in between, and its end is our code, too.
    gc.disable()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except BaseException as error:
        return left <= 0, error
    finally:
        sys.settrace(before)
        gc.enable()
    return left <= 0, None


class Deny:
    name = "deny"

    def check(self, tool: Any, params: Any, *, context: Any) -> PolicyDecision:
        return PolicyDecision.deny("no")


def nested(params: Step, context: Any) -> None:
    make_tool("inner", lambda p, c: None)(Step("inner"), context=context)


def policies() -> list[Any]:
    after = SequentialDependencyPolicy(dependencies={if_offered("other"): {"work"}})
    return [after, QuotaPolicy(max_calls=9)]


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
    assert not gate_of(world.counter).locked(), where


@pytest.mark.heavy
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


@pytest.mark.heavy
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

        reached, error = interrupted_at(line, run, sparing={"_ain_turn", "enter", "release"})
        check(world, scenario, error, line)
        if not reached:
            break
    assert line > 100


@pytest.mark.heavy
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("scenario", ["succeeds", "raises"])
def test_ctrl_c_at_any_line_of_a_call_on_disk_leaves_all_or_nothing(
    scenario: str, shared: bool, tmp_path: Path
):
    """Real signals: what changes several files cannot be one assignment, so they are held back.

    Where a call leaves the lock between processes, there is only a C function in `finally`, and
    the interpreter raises nothing before that.
    """
    line = 0
    step = STRIDE
    while True:
        line += step
        root = tmp_path / f"w{line}"
        root.mkdir()
        (root / "journal.txt").write_text("")
        (root / "journal.txt").chmod(0o640)
        body = raising(ValueError("no")) if scenario == "raises" else lambda p, c: None
        with HostFilesystem(root, shared=shared) as disk:
            world = World([make_tool("work", body)], fs=disk)
            reached, error = interrupted_at(
                line,
                lambda w=world: w.call("work"),
                sparing={"_between", "take"},
                interrupt=signal_here,
            )
            where = f"interrupted at line {line}: {error!r}"
            steps = world.state()[0].steps
            assert steps in ((), ("a",)), where
            expected = {"journal.txt": "a\n", "a.txt": "written"} if steps else {"journal.txt": ""}
            found = {path.name: path.read_text() for path in root.iterdir()}
            assert found == expected, where
            assert world.counter.value == len(steps), where
            assert bool(steps) == any(r.success for r in world.records), where
            assert (root / "journal.txt").stat().st_mode & 0o777 == 0o640, where
            assert not disk.gate.locked(), where
            if shared:
                with HostFilesystem(root) as other:  # it does not wait
                    assert other.recovered == (), where
            again = world.call("work", "again")
            assert again.success == (scenario == "succeeds"), where
        with HostFilesystem(root) as reopened:
            assert reopened.recovered == (), where
        if not reached:
            break
    assert line > 300
