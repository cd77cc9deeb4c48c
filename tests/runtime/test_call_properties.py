"""Whatever calls come, the state is that of the committed ones alone."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import Noted, Plan, Step, World, changing_everything, make_tool, raising

from weakincentives.errors import PromptEvaluationError
from weakincentives.prompt import PolicyDecision, Tool, ToolContext, ToolResult
from weakincentives.runtime import ToolCall, create_snapshot, execute_tool, restore_snapshot


class NotOnMondays:
    name = "not_on_mondays"

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
        return PolicyDecision(tool.name != "denied", "not on mondays")


async def async_ok(params: Step, *, context: ToolContext) -> ToolResult[None]:
    await asyncio.sleep(0)
    changing_everything(params, context)
    return ToolResult.ok(None, message="done")


async def async_cancelled(params: Step, *, context: ToolContext) -> ToolResult[None]:
    changing_everything(params, context)
    raise asyncio.CancelledError


async def async_hang(params: Step, *, context: ToolContext) -> ToolResult[None]:
    changing_everything(params, context)
    await asyncio.Event().wait()
    return ToolResult.ok(None)


def hang(params: Step, context: ToolContext) -> None:
    context.signal.wait(120)


def savepoint(params: Step, context: ToolContext) -> None:
    """Roll a part of itself back by hand, and keep the rest."""
    snapshot = create_snapshot(context.session, context.resources)
    changing_everything(Step(f"{params.name}-undone"), context)
    restore_snapshot(context.session, context.resources, snapshot)


def nested_ok(params: Step, context: ToolContext) -> None:
    make_tool("inner", raising(ValueError("inner")))(Step(f"{params.name}-inner"), context=context)


TOOLS: list[Tool[Any, Any]] = [
    make_tool("ok", lambda p, c: None),
    make_tool("savepoint", savepoint),
    make_tool("nested", nested_ok),
    make_tool("raises", raising(ValueError("no"))),
    make_tool("crashes", raising(RuntimeError("boom"))),
    make_tool("fails", lambda p, c: ToolResult.error("expected")),
    make_tool("interrupted", raising(KeyboardInterrupt())),
    make_tool("exits", raising(SystemExit())),
    make_tool("stops", raising(PromptEvaluationError("stop"))),
    make_tool("hangs", hang, timeout=0.02),
    make_tool("denied", lambda p, c: None),
    Tool[Step, None](name="async_ok", description="Async.", handler=async_ok),
    Tool[Step, None](name="cancelled", description="Async.", handler=async_cancelled),
    Tool[Step, None](name="async_hangs", description="Async.", handler=async_hang, timeout=0.02),
]
COMMITS = {"ok", "savepoint", "nested", "async_ok"}
CALLS = st.sampled_from([t.name for t in TOOLS] + ["unknown", "badly_called"])


@given(st.lists(CALLS, max_size=12))
@settings(max_examples=40)
def test_state_equals_replaying_only_the_committed_calls(calls: list[str]):
    world = World(TOOLS, [NotOnMondays()])
    model_steps: list[str] = []

    for number, name in enumerate(calls):
        step = f"s{number}"
        arguments = {"nam": step} if name == "badly_called" else {"name": step}
        target = "ok" if name == "badly_called" else name
        with suppress(KeyboardInterrupt, SystemExit, asyncio.CancelledError, PromptEvaluationError):
            execute_tool(ToolCall(target, arguments, id=step), session=world.session)
        if name in COMMITS:
            model_steps.append(step)

        plan, files, count = world.state()
        assert list(plan.steps) == model_steps
        assert files == {
            **{f"{s}.txt": "written" for s in model_steps},
            **({"journal.txt": "".join(f"{s}\n" for s in model_steps)} if model_steps else {}),
        }
        assert count == len(model_steps)

    own = [r for r in world.records if r.tool_name != "inner"]
    assert [r.call_id for r in own] == [f"s{n}" for n in range(len(calls))]
    assert [r.success for r in own] == [c in COMMITS for c in calls]
    # What ran logged something, whether it was kept or not; but for one whose time was up before
    # its thread came to that.
    logged = {n.text for n in world.session[Noted].all()}
    assert logged >= {r.call_id for r in own if r.ran and r.tool_name != "hangs"}


@pytest.mark.parametrize("keep", [True, False])
def test_a_finished_call_holds_on_to_nothing_but_its_record(keep: bool):
    """A dropped view, snapshot or resource scope is freed."""
    views: list[weakref.ref[Any]] = []

    def body(params: Step, context: ToolContext) -> None:
        views.append(weakref.ref(context.session))
        views.append(weakref.ref(context.filesystem))
        if not keep:
            raise ValueError("no")

    world = World([make_tool("work", body)])
    world.call("work")
    gc.collect()

    assert [view() for view in views] == [None, None]


def test_a_dropped_snapshot_is_freed():
    world = World([])
    world.session[Plan].seed(Plan(("kept by the snapshot only",)))
    snapshot = create_snapshot(world.session, world.prompt.resources)
    freed = weakref.ref(snapshot.session)
    world.session[Plan].clear()

    del snapshot
    gc.collect()

    assert freed() is None
