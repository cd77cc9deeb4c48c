"""Preconditions and effects as the pipeline honours them."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

import pytest
from small_world import AddStep, Counter, Plan, Step, World, make_tool, raising

from weakincentives.errors import ToolDefinitionError
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import (
    CascadeEffect,
    CustomPrecondition,
    DependencyPrecondition,
    Effect,
    MemoryEffect,
    NotificationEffect,
    PermissionPrecondition,
    Precondition,
    ResourcePrecondition,
    StateChangeEffect,
    StatePrecondition,
    ToolContext,
    ToolResult,
    validate_preconditions,
)
from weakincentives.retry import NoBackoff, RetryPolicy
from weakincentives.runtime import (
    Session,
    ToolCall,
    ToolInvoked,
    ToolRegistry,
    aexecute_tool,
    apply_effects,
    execute_tool,
    execute_tools,
)
from weakincentives.runtime.compose import sequence
from weakincentives.runtime.ledger import CallOutcome
from weakincentives.session.memory import EventBus, MemoryManager, Permissions
from weakincentives.testing import make_context

UNTOUCHED = (Plan(), {}, 0)


def nothing(params: Step, context: ToolContext) -> None:
    pass


def world(*tools: Any, **resources: Any) -> World:
    bound = {
        MemoryManager: resources.get("memory") or MemoryManager(),
        Permissions: resources.get("permissions") or Permissions(),
        EventBus: resources.get("bus") or EventBus(),
    }
    return World(list(tools), resources=bound)


def memory_of(w: World) -> MemoryManager:
    return w.resources[MemoryManager]


# Preconditions


def test_a_critical_precondition_that_fails_refuses_the_call_and_nothing_runs():
    door = CustomPrecondition(description="The door must be open", check=lambda: False)
    w = world(make_tool("work", nothing, preconditions=[door]))

    result = w.call("work")

    assert not result.success
    assert result.message == "Tool preconditions not met: The door must be open"
    assert result.failure is not None
    assert result.failure.code == "PRECONDITION_FAILED"
    assert result.failure.recoverable
    assert result.failure.suggestions == ("The door must be open",)
    assert w.state() == UNTOUCHED
    assert not w.records[-1].ran


def test_one_that_is_not_critical_lets_the_call_run_with_less():
    seen: list[tuple[str, ...]] = []
    fast = CustomPrecondition(description="A cache", critical=False, check=lambda: False)
    tool = make_tool("work", lambda p, c: seen.append(c.degraded), preconditions=[fast])
    w = world(tool)

    result = w.call("work")

    assert result.success
    assert result.message == "done\nRan without: A cache"
    assert result.metadata.degraded == ("A cache",)
    assert seen == [("A cache",)]


def test_a_check_that_raises_counts_as_failed_and_is_shown():
    def check() -> bool:
        raise OSError("no route")

    w = world(
        make_tool("work", nothing, preconditions=[
            CustomPrecondition(description="The service answers", check=check)
        ])
    )  # fmt: skip

    assert w.call("work").message == (
        "Tool preconditions not met: The service answers (the check failed: OSError('no route'))"
    )


def test_a_check_takes_as_much_as_it_asks_for_and_may_be_async():
    seen: list[Any] = []

    async def with_both(context: ToolContext, params: Step) -> bool:
        await asyncio.sleep(0)
        seen.append(params.name)
        return True

    checks: list[Precondition] = [
        CustomPrecondition(description="none", check=lambda: not seen.append(0)),
        CustomPrecondition(
            description="context", check=lambda context: not seen.append(context.call_id)
        ),
        CustomPrecondition(description="both", check=with_both),
    ]
    w = world(make_tool("work", nothing, preconditions=checks))

    execute_tool(ToolCall("work", {"name": "x"}, id="c1"), session=w.session)

    assert seen == [0, "c1", "x"]


@pytest.mark.parametrize(
    ("precondition", "prepare"),
    [
        (
            ResourcePrecondition(description="bound", resource=Permissions),
            None,
        ),
        (
            StatePrecondition(description="ready", state="ready", expected_value=True),
            lambda w: memory_of(w).write("working", "ready", True),
        ),
        (
            StatePrecondition(
                description="left", state="left", expected_value=lambda v: v and v > 0
            ),
            lambda w: memory_of(w).write("short-term", "left", 3),
        ),
        (
            PermissionPrecondition(description="may", permission="file:write"),
            lambda w: w.resources[Permissions].grant("file:*", session=w.session),
        ),
        (
            DependencyPrecondition(description="built", tool="build"),
            lambda w: w.call("build"),
        ),
        (DependencyPrecondition(description="there", tool="build", status="available"), None),
    ],
    ids=["resource", "state", "state predicate", "permission", "completed", "available"],
)
def test_each_kind_knows_by_itself_when_it_holds(precondition: Precondition, prepare: Any):
    w = world(make_tool("work", nothing, preconditions=[precondition]), make_tool("build", nothing))

    if prepare is not None:
        assert not w.call("work").success
        prepare(w)
    assert w.call("work").success


def test_a_dependency_that_failed_or_was_rolled_back_does_not_count():
    needs = DependencyPrecondition(description="built", tool="build")
    w = world(
        make_tool("work", nothing, preconditions=[needs]),
        make_tool("build", raising(ValueError("no"))),
    )
    w.call("build")

    assert not w.call("work").success


def test_a_dependency_counts_that_was_met_before_anyone_waited_for_it():
    """A success from before the dependent tool was registered, or from another prompt."""
    needs = DependencyPrecondition(description="built", tool="build")
    build = make_tool("build", nothing)
    work = make_tool("work", nothing, preconditions=[needs])

    tools = ToolRegistry([build])
    resources = {Filesystem: MemoryFilesystem(), Counter: Counter()}
    context = ToolContext(session=Session(), resources=resources)
    assert tools.execute("build", {"name": "a"}, context=context).success
    tools.register(work)
    assert tools.execute("work", {"name": "b"}, context=context).success

    before, after = world(build), world(work)
    before.call("build")
    after.prompt.render(before.session)
    assert execute_tool(ToolCall("work", {"name": "b"}), session=before.session).success


def test_a_preferred_resource_is_not_critical():
    wanted = ResourcePrecondition(description="a cache", resource=int, availability="preferred")
    w = world(make_tool("work", nothing, preconditions=[wanted]))

    assert w.call("work").metadata.degraded == ("a cache",)


def test_validation_tells_each_check():
    tool = make_tool("work", nothing, preconditions=[
        CustomPrecondition(description="yes", check=lambda: True),
        CustomPrecondition(description="no", critical=False, check=lambda: False),
    ])  # fmt: skip

    found = asyncio.run(validate_preconditions(tool, make_context()))

    assert [(c.precondition.description, c.passed) for c in found.results] == [
        ("yes", True),
        ("no", False),
    ]
    assert (found.passed, found.critical_failed) == (False, False)
    assert (found.can_proceed, found.degraded_mode) == (True, True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CustomPrecondition(description="x"),
        lambda: CustomPrecondition(description=" ", check=lambda: True),
        lambda: ResourcePrecondition(description="x", resource="browser"),
        lambda: ResourcePrecondition(description="x", resource=int, availability="maybe"),  # type: ignore[arg-type]
        lambda: DependencyPrecondition(description="x", tool="t", status="soon"),  # type: ignore[arg-type]
        lambda: StateChangeEffect(state="x", change="double"),  # type: ignore[arg-type]
        lambda: MemoryEffect(key="x", operation="append"),  # type: ignore[arg-type]
    ],
)
def test_a_contract_that_cannot_work_is_refused_where_it_is_written(make: Any):
    with pytest.raises(ValueError):  # noqa: PT011  # each says it in its own words
        make()


def test_a_tool_takes_only_contracts():
    with pytest.raises(ToolDefinitionError, match="tool 'work': preconditions must be"):
        make_tool("work", nothing, preconditions=[lambda: True])


CONTRACTS: list[Any] = [
    lambda function: CustomPrecondition(description="x", check=function),
    lambda function: ResourcePrecondition(description="x", resource="y", check=function),
    lambda function: Effect(description="x", apply=function),
    lambda function: Effect(description="x", apply=lambda: None, rollback=function),
    lambda function: StateChangeEffect(state="x", rollback=function),
    lambda function: CascadeEffect(trigger_tool="x", apply=function),
]


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(
    ("function", "asks_for"),
    [
        (lambda c: True, "c"),
        (lambda context, p: True, "p"),
        (lambda *, parameters: True, "parameters"),
        (lambda context, params, result, more: True, "more"),
        (lambda *args: True, r"\*args"),
        ([].append, "object"),
        (functools.partial(lambda context, x, y: True, x=1), "y"),
        (Permissions.grant, "self"),
    ],
)
def test_what_a_contract_asks_for_beyond_what_there_is_is_refused_where_it_is_written(
    contract: Any, function: Any, asks_for: str
):
    """By position it got whatever stood there, and could be true by accident."""
    with pytest.raises(TypeError, match=rf"asks for .*{asks_for}.*, but it is called with context"):
        contract(function)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_function_whose_parameters_cannot_be_read_is_refused(contract: Any):
    with pytest.raises(TypeError, match="cannot be read; wrap it in a lambda"):
        contract(max)
    with pytest.raises(TypeError, match="must be a function"):
        contract("yes")


def test_a_precondition_cannot_ask_for_a_result():
    with pytest.raises(TypeError, match="asks for result, but it is called with context, params"):
        CustomPrecondition(description="x", check=lambda result: True)


class Checks:
    """Checks in every form that a function can have."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def method(self, params: Step) -> bool:
        self.seen.append(params.name)
        return True

    def __call__(self, *, params: Step, context: ToolContext) -> bool:
        self.seen.append((params.name, context.call_id))
        return True

    def positional(self, params: Step, /) -> bool:
        return self.method(params)

    def with_more(self, limit: int, params: Step, context: ToolContext | None = None) -> bool:
        self.seen.append((limit, params.name, context is not None))
        return True

    def everything(self, **offered: Any) -> bool:
        self.seen.append(sorted(offered))
        return True

    def nothing(self, *_: Any) -> bool:
        self.seen.append("nothing")
        return True

    async def later(self, params: Step) -> bool:
        await asyncio.sleep(0)
        return self.method(params)


def test_a_check_gets_what_it_names_in_whatever_form_and_order_it_is_written():
    """``check=lambda params: ...`` gets the parameters, not the context."""
    checks = Checks()
    seen = checks.seen
    functions: list[tuple[Any, Any]] = [
        (lambda params: not seen.append(params.name), "x"),
        (lambda params, context: not seen.append((params.name, context.call_id)), ("x", "c1")),
        (lambda context, name="mine": not seen.append(name), "mine"),
        (lambda params=None: not seen.append(params.name), "x"),
        (checks.method, "x"),
        (checks, ("x", "c1")),
        (checks.positional, "x"),
        (functools.partial(checks.with_more, 3), (3, "x", True)),
        (functools.partial(checks.with_more, limit=4), (4, "x", True)),
        (functools.partial(checks.with_more, 5, context=None), (5, "x", False)),
        (checks.everything, ["context", "params"]),
        (checks.nothing, "nothing"),
        (checks.later, "x"),
    ]
    preconditions = [CustomPrecondition(description="d", check=each) for each, _ in functions]
    w = world(make_tool("work", nothing, preconditions=preconditions))

    result = execute_tool(ToolCall("work", {"name": "x"}, id="c1"), session=w.session)

    assert result.success, result.message
    assert seen == [expected for _, expected in functions]


def test_effects_and_rollbacks_get_what_they_name_in_any_order():
    seen: list[Any] = []

    def fail(params: Step) -> None:
        raise ValueError(f"no {params.name}")

    w = world(
        make_tool(
            "work",
            nothing,
            effects=[
                Effect(
                    apply=lambda result, params: seen.append((params.name, result.success)),
                    rollback=lambda params: seen.append(f"undo {params.name}"),
                ),
                Effect(
                    apply=lambda **offered: seen.append(sorted(offered)),
                    rollback=lambda result, context, params: seen.append(
                        (params.name, context.call_id, result.success)
                    ),
                ),
                Effect(apply=fail),
            ],
        )
    )

    result = execute_tool(ToolCall("work", {"name": "x"}, id="c1"), session=w.session)

    assert "no x" in result.message
    assert seen == [("x", True), ["context", "params", "result"], ("x", "c1", False), "undo x"]


def test_effects_after_the_commit_and_rollbacks_of_nested_calls_get_their_own_params():
    seen: list[str] = []
    effect = Effect(
        apply=lambda params: seen.append(params.name),
        rollback=lambda params: seen.append(f"undo {params.name}"),
    )
    tell = NotificationEffect(event="told", apply=lambda params: seen.append(f"tell {params.name}"))
    inner = make_tool("inner", nothing, effects=[effect, tell])

    def outer(params: Step, context: ToolContext) -> None:
        inner({"name": "inner"}, context=context)
        if params.name == "fails":
            raise ValueError("no")

    w = world(make_tool("outer", outer))

    assert not w.call("outer", name="fails").success
    assert seen == ["inner", "undo inner"]
    assert w.call("outer", name="works").success
    assert seen[2:] == ["inner", "tell inner"]


def test_effects_applied_by_hand_get_the_arguments_they_are_applied_for():
    seen: list[str] = []
    effect = Effect(apply=lambda params: seen.append(params.name))
    tools = ToolRegistry([make_tool("work", nothing, effects=[effect])])

    tools.apply_effects("work", ToolResult.ok(), arguments={"name": "x"})

    assert seen == ["x"]


# Effects inside the transaction


def test_state_and_memory_effects_apply_with_the_call():
    effects: list[Effect] = [
        StateChangeEffect(state="last", change="set", value=lambda result: result.message),
        StateChangeEffect(state="count", change="increment"),
        StateChangeEffect(state="count", change="increment", value=4),
        StateChangeEffect(state="count", change="decrement", value=2),
        MemoryEffect(scope="long-term", operation="write", key="seen", value=["a"]),
        MemoryEffect(
            scope="long-term", operation="update", key="seen",
            value=lambda old, result: [*old, "b"],
        ),
    ]  # fmt: skip
    w = world(make_tool("work", nothing, effects=effects))

    w.call("work")

    memory = memory_of(w)
    assert memory.read("working", "last") == "done"
    assert memory.read("working", "count") == 3
    assert memory.read("long-term", "seen") == ["a", "b"]


def test_a_failed_call_leaves_no_effect():
    w = world(
        make_tool(
            "work", raising(ValueError("no")), effects=[StateChangeEffect(state="x", value=1)]
        )
    )

    w.call("work")

    assert memory_of(w).read("working", "x") is None


def test_when_an_effect_fails_the_call_fails_and_those_before_it_are_rolled_back_in_reverse():
    order: list[str] = []

    def broken(context: ToolContext) -> None:
        raise ValueError("full")

    effects = [
        StateChangeEffect(
            state=name,
            apply=lambda context, result, name=name: order.append(f"apply {name}"),
            rollback=lambda context, name=name: order.append(f"undo {name}"),
        )
        for name in "ab"
    ]
    effects.append(StateChangeEffect(state="c", apply=broken))
    w = world(make_tool("work", nothing, effects=effects))

    result = w.call("work")

    assert result.message == "full"
    assert order == ["apply a", "apply b", "undo b", "undo a"]
    assert w.state() == UNTOUCHED


def test_the_snapshot_wins_over_what_a_rollback_writes():
    def rollback(context: ToolContext) -> None:
        context.session.dispatch(AddStep("from the rollback"))

    effects = [
        StateChangeEffect(state="a", apply=lambda: None, rollback=rollback),
        StateChangeEffect(state="b", apply=raising_step(ValueError("no"))),
    ]
    w = world(make_tool("work", nothing, effects=effects))

    w.call("work")

    assert w.state() == UNTOUCHED


def raising_step(error: Exception) -> Any:
    def step(context: ToolContext) -> None:
        raise error

    return step


def test_a_rollback_that_fails_is_told_and_the_others_go_on(caplog: pytest.LogCaptureFixture):
    undone: list[str] = []
    effects = [
        StateChangeEffect(state="a", apply=lambda: None, rollback=lambda: undone.append("a")),
        StateChangeEffect(
            state="b", description="lock", apply=lambda: None,
            rollback=raising_step(OSError("gone")),
        ),
        StateChangeEffect(state="c", apply=raising_step(ValueError("no"))),
    ]  # fmt: skip
    w = world(make_tool("work", nothing, effects=effects))

    with caplog.at_level(logging.CRITICAL):
        result = w.call("work")

    assert undone == ["a"]
    assert result.metadata.not_undone == ("the rollback of effect 'lock' failed: gone",)


def test_effects_that_are_not_reversible_are_not_rolled_back():
    undone: list[str] = []
    effects = [
        StateChangeEffect(
            state="a", reversible=False, apply=lambda: None, rollback=lambda: undone.append("a")
        ),
        StateChangeEffect(state="c", apply=raising_step(ValueError("no"))),
    ]
    w = world(make_tool("work", nothing, effects=effects))

    w.call("work")

    assert undone == []


def test_effects_by_hand():
    memory = MemoryManager()
    context = make_context(resources={MemoryManager: memory})
    tool = make_tool("work", nothing, effects=[StateChangeEffect(state="x", value=1)])

    applied = asyncio.run(apply_effects(tool, ToolResult.ok(None), context))

    assert applied == tuple(tool.effects)
    assert memory.read("working", "x") == 1


# What reaches outside


def test_a_compensable_tool_that_fails_is_compensated():
    charged: list[str] = []

    def refund(context: ToolContext) -> None:
        charged.remove(context.idempotency_key)

    def charge(params: Step, context: ToolContext) -> None:
        charged.append(context.idempotency_key)
        raise RuntimeError("lost the connection")

    tool = make_tool(
        "pay", charge, reach="compensable",
        effects=[StateChangeEffect(state="charge", apply=lambda: None, rollback=refund)],
    )  # fmt: skip
    w = world(tool)

    result = w.call("pay")

    assert charged == []
    assert result.metadata.not_undone == ()
    assert [o.outcome for o in w.session[CallOutcome].all()] == ["compensated"]


def test_what_could_not_be_compensated_is_unknown_and_the_result_says_so():
    tool = make_tool(
        "pay", raising(RuntimeError("lost")), reach="compensable",
        effects=[StateChangeEffect(state="charge", apply=lambda: None,
                                   rollback=raising_step(OSError("refund refused")))],
    )  # fmt: skip
    w = world(tool)

    result = w.call("pay")

    assert [o.outcome for o in w.session[CallOutcome].all()] == ["unknown"]
    assert result.metadata.not_undone == (
        "the rollback of effect 'state_change' failed: refund refused",
        "what it did outside the session, files and resources",
    )


def test_a_call_that_took_effect_is_not_run_twice_under_one_id():
    ran: list[str] = []
    w = world(make_tool("mail", lambda p, c: ran.append(p.name), reach="irreversible"))
    call = ToolCall("mail", {"name": "a"}, id="m1")

    first = execute_tool(call, session=w.session)
    second = execute_tool(call, session=w.session)

    assert first.success
    assert second.failure is not None
    assert second.failure.code == "ALREADY_COMMITTED"
    assert ran == ["a"]


def test_a_call_that_broke_off_is_asked_about_not_run_again():
    w = world(make_tool("mail", raising(RuntimeError("lost")), reach="irreversible"))
    call = ToolCall("mail", {"name": "a"}, id="m1")

    execute_tool(call, session=w.session)
    again = execute_tool(call, session=w.session)

    assert again.failure is not None
    assert again.failure.code == "OUTCOME_UNKNOWN"
    assert not w.records[-1].ran


def test_a_handler_that_says_it_did_nothing_may_be_called_again():
    w = world(make_tool("mail", lambda p, c: ToolResult.error("server busy"), reach="irreversible"))
    call = ToolCall("mail", {"name": "a"}, id="m1")

    execute_tool(call, session=w.session)

    assert execute_tool(call, session=w.session).message == "server busy"
    assert w.records[-1].ran


def charging(log: list[str], fails: Any = None) -> Any:
    """A compensable tool that notes what it charged, and takes its note back."""

    def charge(params: Step, context: ToolContext) -> None:
        log.append(context.idempotency_key)

    def refund(context: ToolContext) -> None:
        if fails is not None:
            raise fails
        log.remove(context.idempotency_key)

    return make_tool(
        "charge", charge, reach="compensable",
        effects=[StateChangeEffect(state="charge", apply=lambda: None, rollback=refund)],
    )  # fmt: skip


@pytest.mark.parametrize("fails", [None, OSError("refused")])
def test_a_nested_call_is_compensated_when_the_call_it_belongs_to_fails(fails: Any):
    log: list[str] = []
    composed = sequence([charging(log, fails), make_tool("ship", raising(ValueError("sold out")))])
    w = world(composed)

    call = ToolCall(composed.name, {"name": "a"}, id="order")
    result = execute_tool(call, session=w.session)

    assert not result.success
    newest = {outcome.call_id: outcome.outcome for outcome in w.session[CallOutcome].all()}
    if fails is None:
        assert log == []
        assert set(newest.values()) == {"compensated"}
        assert result.metadata.not_undone == ()
    else:
        assert len(log) == 1
        assert set(newest.values()) == {"unknown"}
        assert "the rollback of effect 'state_change' failed: refused" in result.metadata.not_undone


def test_a_nested_call_that_is_kept_is_not_compensated():
    log: list[str] = []
    composed = sequence([charging(log), make_tool("ship", nothing)])
    w = world(composed)

    execute_tool(ToolCall(composed.name, {"name": "a"}), session=w.session)

    assert len(log) == 1


# After the commit


def test_notifications_leave_after_the_commit_and_only_then():
    bus = EventBus()
    heard: list[Any] = []
    tool = make_tool("work", nothing, effects=[
        NotificationEffect(event="file:changed", payload=lambda result: result.message),
    ])  # fmt: skip
    broken = make_tool("broken", raising(ValueError("no")), effects=tool.effects)
    w = world(tool, broken, bus=bus)
    bus.subscribe("file:*", lambda event, payload: heard.append((event, payload, w.state())))

    w.call("broken")
    assert heard == []

    w.call("work")
    assert heard == [("file:changed", "done", w.state())]


def test_a_subscriber_may_call_tools_itself():
    bus = EventBus()
    w = world(
        make_tool("work", nothing, effects=[NotificationEffect(event="done")]),
        make_tool("next", nothing),
        bus=bus,
    )
    bus.subscribe("done", lambda event, payload: w.call("next", "b"))

    w.call("work")

    assert w.session[Plan].latest() == Plan(("a", "b"))


def test_a_cascade_runs_after_the_commit_as_a_transaction_of_its_own():
    w = world(
        make_tool("work", nothing, effects=[
            CascadeEffect(trigger_tool="after", arguments={"name": "z"},
                          trigger_condition=lambda result: result.message == "done"),
            CascadeEffect(trigger_tool="work", trigger_condition=lambda result: False),
        ]),
        make_tool("after", raising(ValueError("no"))),
    )  # fmt: skip

    result = w.call("work")

    assert result.success
    assert w.state() == (Plan(("a",)), {"a.txt": "written", "journal.txt": "a\n"}, 1)
    assert [(r.tool_name, r.success) for r in w.records] == [("work", True), ("after", False)]


def test_a_cascade_without_end_is_ended():
    w = world(
        make_tool("work", nothing, effects=[
            CascadeEffect(trigger_tool="work", arguments={"name": "again"}),
        ])
    )  # fmt: skip

    w.call("work")

    assert [record.success for record in w.records] == [True] * 9 + [False]
    assert "8 deep at most" in w.records[-1].result.message


def test_what_a_nested_call_announces_waits_for_the_outermost_commit():
    bus = EventBus()
    heard: list[str] = []
    inner = make_tool("inner", nothing, effects=[NotificationEffect(event="inner")])

    def outer(params: Step, context: ToolContext) -> None:
        assert inner({"name": "i"}, context=context).success
        assert heard == []
        if params.name == "fails":
            raise ValueError("no")

    w = world(make_tool("outer", outer), bus=bus)
    bus.subscribe("*", lambda event, payload: heard.append(event))

    w.call("outer", "fails")
    assert heard == []
    w.call("outer", "works")
    assert heard == ["inner"]


def test_an_effect_that_fails_after_the_commit_is_logged_and_the_call_stays(
    caplog: pytest.LogCaptureFixture,
):
    w = world(
        make_tool("work", nothing, effects=[
            NotificationEffect(event="x", description="tell", apply=raising_step(OSError("down"))),
        ])
    )  # fmt: skip

    with caplog.at_level(logging.ERROR):
        assert w.call("work").success

    assert "effect 'tell' failed after the commit" in caplog.text
    assert w.state() != UNTOUCHED


def test_async_effects_and_the_async_way_in():
    order: list[str] = []

    async def apply(context: ToolContext, result: ToolResult[Any]) -> None:
        await asyncio.sleep(0)
        order.append(result.message)

    tool = make_tool("work", nothing, effects=[
        StateChangeEffect(state="x", apply=apply),
        NotificationEffect(event="x", apply=apply),
    ])  # fmt: skip
    w = world(tool)

    async def main() -> None:
        await aexecute_tool(ToolCall("work", {"name": "a"}), session=w.session)

    w.call("work")
    asyncio.run(main())

    assert order == ["done"] * 4


def test_effects_of_calls_in_one_turn_come_in_call_order():
    bus = EventBus()
    heard: list[Any] = []
    tool = make_tool(
        "work", nothing, reach="reversible", concurrent=True,
        effects=[
            StateChangeEffect(state="count", change="increment"),
            NotificationEffect(event="n", payload=lambda result: result.message),
        ],
    )  # fmt: skip
    w = world(tool, bus=bus)
    bus.subscribe("n", lambda event, payload: heard.append(payload))

    execute_tools([ToolCall("work", {"name": str(n)}) for n in range(5)], session=w.session)

    assert memory_of(w).read("working", "count") == 5
    assert len(heard) == 5
    assert w.counter == Counter(5)


def test_the_record_of_a_call_says_how_it_ended_outside():
    w = world(make_tool("mail", nothing, reach="irreversible"))

    execute_tool(ToolCall("mail", {"name": "a"}, id="m1"), session=w.session)

    assert [(o.call_id, o.outcome) for o in w.session[CallOutcome].all()] == [("m1", "committed")]
    later = Session.from_snapshot(w.session.snapshot())
    w.prompt.render(later)
    again = execute_tool(ToolCall("mail", {"name": "a"}, id="m1"), session=later)
    assert again.failure is not None
    assert again.failure.code == "ALREADY_COMMITTED"
    assert len(later[ToolInvoked].all()) == 2


# What is declared wrongly is refused when it is declared


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda: MemoryEffect(scope="bogus", key="k"), "scope must be one of .*'bogus'"),  # type: ignore[arg-type]
        (lambda: MemoryEffect(scope=None, key="k"), "scope must be one of .*None"),  # type: ignore[arg-type]
        (lambda: MemoryEffect(key=""), "key"),
        (lambda: StateChangeEffect(state=""), "state"),
        (lambda: StatePrecondition(description="d", state=""), "state"),
        (lambda: PermissionPrecondition(description="d", permission=""), "permission"),
        (lambda: DependencyPrecondition(description="d", tool=""), "tool"),
        (lambda: NotificationEffect(), "event"),
        (lambda: CascadeEffect(trigger_tool=""), "trigger_tool"),
        (lambda: Effect(), "apply"),
    ],
)
def test_a_contract_that_could_only_fail_is_refused_when_it_is_made(declare, said):
    with pytest.raises(ValueError, match=said):
        declare()


@pytest.mark.parametrize("scope", ["working", "short-term", "long-term", "short_term", "long_term"])
def test_a_memory_effect_takes_every_scope_in_every_spelling(scope):
    w = world(make_tool("work", nothing, effects=[MemoryEffect(scope=scope, key="k", value=1)]))

    assert w.call("work").success
    assert memory_of(w).read(scope, "k") == 1


def test_preconditions_are_checked_before_the_snapshot():
    steps: list[str] = []

    class Watched(Counter):
        def snapshot(self) -> int:
            steps.append("snapshot")
            return super().snapshot()

    door = CustomPrecondition(
        description="The door must be open", check=lambda: bool(steps.append("check")) or True
    )
    w = World([make_tool("work", nothing, preconditions=[door])], counter=Watched())
    w.prompt.resources.get(Counter)

    w.call("work")

    assert steps == ["check", "snapshot"]


@pytest.mark.parametrize("compensates", [True, False])
def test_a_tool_that_reaches_outside_is_retried_only_if_the_try_was_compensated(compensates):
    """Nobody knows whether a try that was not taken back took effect."""
    undone: list[str] = []

    def rollback() -> None:
        if not compensates:
            raise RuntimeError("cannot be taken back")
        undone.append("undone")

    w = world(
        make_tool(
            "work",
            raising(ConnectionError("reset")),
            reach="compensable",
            effects=[Effect(apply=lambda: None, rollback=rollback)],
            retry=RetryPolicy(max_retries=2, backoff=NoBackoff()),
        )
    )

    result = w.call("work")

    assert not result.success
    assert result.metadata.attempts == (3 if compensates else 1)
    assert undone == ["undone"] * 3 * compensates


def test_a_plain_check_that_returns_a_coroutine_does_not_count_as_passed():
    async def ask() -> bool:
        return False

    door = CustomPrecondition(description="The door must be open", check=lambda: ask())
    w = world(make_tool("work", nothing, preconditions=[door]))

    result = w.call("work")

    assert not result.success
    assert "The door must be open" in result.message
    assert w.state() == UNTOUCHED
