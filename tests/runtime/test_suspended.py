"""Suspended calls: a framework's control-flow exceptions roll the call back and pass through."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from small_world import Plan, Step, World, make_tool, raising

import weakincentives as wink
from weakincentives.adapters import ScriptedAdapter, calls
from weakincentives.errors import Suspended
from weakincentives.prompt import CustomPrecondition, Effect, PolicyDecision
from weakincentives.resources import Binding, ResourceRegistry
from weakincentives.runtime import (
    OutcomeLedger,
    Session,
    ToolInvoked,
    aexecute_tool,
    execute_tools,
    sequence,
)

NOTHING = (Plan(), {}, 0)


class GraphInterrupt(Exception):
    """What a framework raises to stop a node until a person has answered."""


class Bubble(BaseException):
    """What another framework raises: not even an Exception."""


Suspended.register(GraphInterrupt)
Suspended.register(Bubble)


class OwnSuspension(Suspended):
    """What a user of ours raises."""


@pytest.mark.parametrize("kind", [GraphInterrupt, Bubble, OwnSuspension])
def test_a_suspended_call_is_rolled_back_recorded_and_passes_through(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
):
    error = kind("who approves?")
    w = World([make_tool("work", raising(error))])

    with caplog.at_level(logging.INFO), pytest.raises(kind) as caught:
        w.call("work")

    assert caught.value is error
    assert w.state() == NOTHING
    [record] = w.records
    assert record.suspended
    assert not record.success
    assert record.result.failure.code == "SUSPENDED"
    assert "session" in record.result.metadata.undone
    assert "Internal error" not in record.result.message
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING]


def test_other_exceptions_are_failures_as_before():
    w = World([make_tool("work", raising(RuntimeError("broken")))])

    assert w.call("work").message == "Internal error: broken"
    assert not w.records[0].suspended


def test_an_async_handler_may_suspend_its_call():
    @wink.tool(reach="reversible")
    async def work(name: str, *, context: wink.ToolContext) -> str:
        """Write, then wait for a person."""
        context.filesystem.write("a.txt", "half")
        await asyncio.sleep(0)
        raise GraphInterrupt

    w = World([work])
    with pytest.raises(GraphInterrupt):
        w.call("work")
    with pytest.raises(GraphInterrupt):
        asyncio.run(aexecute_tool(wink.ToolCall("work", {"name": "a"}), session=w.session))

    assert w.state() == NOTHING
    assert [record.suspended for record in w.records] == [True, True]


@pytest.mark.parametrize("where", ["check", "on_result", "precondition", "effect", "provider"])
def test_whatever_is_part_of_a_call_may_suspend_it(where: str):
    """An approval that a framework asks for stands in a policy, a precondition or an effect."""

    def interrupt(*_: object, **__: object) -> Any:
        raise GraphInterrupt

    class Policy:
        name = "approval"

        def check(self, tool: object, params: object, *, context: object) -> PolicyDecision:
            return interrupt() if where == "check" else PolicyDecision.allow()

        def on_result(self, *_: object, context: object) -> None:
            if where == "on_result":
                interrupt()

    class Asked:
        pass

    options: dict[str, Any] = {}
    if where == "precondition":
        options["preconditions"] = [CustomPrecondition(description="approved", check=interrupt)]
    if where == "effect":
        options["effects"] = [Effect(description="tell", apply=lambda: interrupt())]

    def body(params: Step, context: wink.ToolContext) -> None:
        if where == "provider":
            context.resources.get(Asked)

    tool = make_tool("work", body, **options)
    asked = ResourceRegistry.of(Binding(Asked, interrupt)).bindings[Asked]
    w = World([tool], policies=[Policy()], resources={Asked: asked})

    with pytest.raises(GraphInterrupt):
        w.call("work")

    assert w.state() == NOTHING
    assert [record.suspended for record in w.records] == [True]


def test_a_call_that_is_nested_in_others_suspends_them_all():
    inner = make_tool("inner", raising(GraphInterrupt()))

    def nest(params: Step, context: wink.ToolContext) -> None:
        inner({"name": "b"}, context=context)

    w = World([make_tool("outer", nest), sequence([make_tool("first", _nothing), inner])])

    for name in ("outer", w.prompt.rendered.tools[1].name):
        with pytest.raises(GraphInterrupt):
            w.call(name)

    assert w.state() == NOTHING
    outermost = [r for r in w.records if r.tool_name not in ("inner", "first")]
    assert [record.suspended for record in outermost] == [True, True]


def _nothing(params: Step, context: wink.ToolContext) -> None:
    pass


def test_calls_before_it_in_the_turn_are_kept_and_those_after_it_do_not_run():
    w = World([make_tool("work", _nothing), make_tool("wait", raising(GraphInterrupt()))])
    turn = [wink.ToolCall(name, {"name": name}) for name in ("work", "wait", "work")]

    with pytest.raises(GraphInterrupt):
        execute_tools(turn, session=w.session)

    assert [(r.tool_name, r.success) for r in w.records] == [("work", True), ("wait", False)]


def test_a_call_that_reaches_outside_may_run_again_after_it_was_suspended(tmp_path: Any):
    """The handler chose to stop: it knows that it has not done what it is for."""
    answers: list[str] = []

    @wink.tool(reach="irreversible")
    def pay(name: str, *, context: wink.ToolContext) -> str:
        """Pay once a person has agreed."""
        if not answers:
            raise GraphInterrupt
        return "paid"

    ledger = OutcomeLedger(tmp_path / "outcomes.jsonl")
    w = World([pay], resources={OutcomeLedger: ledger})
    call = wink.ToolCall("pay", {"name": "a"}, id="pay-1")
    with pytest.raises(GraphInterrupt):
        wink.execute_tool(call, session=w.session)
    assert ledger.unsettled() == ()

    answers.append("yes")
    assert wink.execute_tool(call, session=w.session).success
    assert ledger.find("pay-1").outcome == "committed"


def test_a_run_that_was_suspended_makes_the_call_when_it_is_resumed():
    answers: list[str] = []

    def ask(params: Step, context: wink.ToolContext) -> None:
        if not answers:
            raise GraphInterrupt

    w = World([make_tool("work", _nothing), make_tool("ask", ask)])
    turn = calls(("work", {"name": "a"}), ("ask", {"name": "b"}))
    adapter = ScriptedAdapter([turn, "Done."])
    with pytest.raises(GraphInterrupt):
        adapter.evaluate(w.prompt, w.session)

    answers.append("yes")
    response = adapter.evaluate(w.prompt, w.session, resume=True)

    assert response.text == "Done."
    assert w.state() == (
        Plan(("a", "b")),
        {"a.txt": "written", "b.txt": "written", "journal.txt": "a\nb\n"},
        2,
    )
    assert [(r.tool_name, r.success) for r in w.records] == [
        ("work", True),
        ("ask", False),
        ("ask", True),
    ]


def test_a_session_that_is_read_back_still_knows_what_was_suspended():
    w = World([make_tool("work", raising(GraphInterrupt()))])
    with pytest.raises(GraphInterrupt):
        w.call("work")

    text = w.session.snapshot().to_json()
    again = Session.from_snapshot(wink.runtime.Snapshot.from_json(text))

    assert again[ToolInvoked].latest().suspended
