"""The Protocol, member by member: names in ``snake_case``, seconds for milliseconds."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from seed_blocks import document_text
from seed_names import noop_tool
from seed_rows import Row, promise

from weakincentives.contrib.tools import Browser, ScrapedPage, scrape, write
from weakincentives.errors import ToolDefinitionError
from weakincentives.filesystem import Filesystem
from weakincentives.prompt import (
    CascadeEffect,
    CustomPrecondition,
    DependencyPrecondition,
    Effect,
    MemoryEffect,
    NotificationEffect,
    PermissionPrecondition,
    Precondition,
    PreconditionCheck,
    PreconditionResult,
    ResourcePrecondition,
    StateChangeEffect,
    StatePrecondition,
    Tool,
    ToolContext,
    ToolError,
    ToolResult,
    tool,
    validate_preconditions,
)
from weakincentives.retry import (
    ExponentialBackoff,
    FixedBackoff,
    JitteredBackoff,
    LinearBackoff,
    NoBackoff,
    RetryPolicies,
    RetryPolicy,
)
from weakincentives.runtime import (
    ConditionalBranch,
    EventBus,
    MemoryManager,
    Permissions,
    Session,
    ToolComposer,
    ToolInvoked,
    ToolRegistry,
    apply_effects,
)
from weakincentives.testing import FakeClock, make_context, make_vfs

Checks = dict[str, Callable[[], object]]


def named(row: Row, checks: Checks) -> None:
    """Run the check of a row, which must have one."""
    assert row.name in checks, f"write a check for {row}"
    checks[row.name]()


def so(holds: bool) -> None:
    assert holds


def snake(name: str) -> str:
    return re.sub(r"([A-Z])", r"_\1", name).lower()


def echo(params: dict[str, Any], *, context: ToolContext) -> ToolResult[Any]:
    return ToolResult.ok(params)


def raw(properties: dict[str, Any], **schema: Any) -> Tool[Any, Any]:
    return Tool.from_schema("t", "d", {"type": "object", "properties": properties, **schema}, echo)


def doing(body: Callable[..., Any] = lambda context: None, **options: Any) -> Tool[Any, Any]:
    """Return a tool that notes in a file that it ran, and does what it is told."""

    def work(context: ToolContext) -> Any:
        context.filesystem.append("trace.txt", "x")
        return body(context)

    work.__doc__ = "Work."
    if "retry" in options:
        options.setdefault("reach", "reversible")  # otherwise a call is never re-run
    return tool(name="work", **options)(work)


def surroundings(**options: Any) -> ToolContext:
    bound = {MemoryManager: MemoryManager(), EventBus: EventBus(), Permissions: Permissions()}
    return make_context(resources={**bound, **options.pop("resources", {})}, **options)


def outcome(tool: Tool[Any, Any], context: ToolContext | None = None) -> ToolResult[Any]:
    return tool(context=surroundings() if context is None else context)


# Tool interface


@promise("003", "Tool")
def tool_members(row: Row) -> None:
    def execute() -> None:
        context = surroundings()
        assert outcome(doing(lambda context: "value"), context).value == "value"
        assert context.filesystem.read("trace.txt") == "x"

    def times_out() -> None:
        slow = doing(lambda context: context.signal.wait(60), timeout=0.05)
        result = outcome(slow)
        assert result.failure is not None
        assert result.failure.code == "TIMEOUT"

    def fails_once() -> None:
        context = surroundings(session=Session(clock=FakeClock()))
        left = [ConnectionError("reset")]

        def body(context: ToolContext) -> str:
            if left:
                raise left.pop()
            return "done"

        result = outcome(doing(body, retry=RetryPolicies.STANDARD), context)
        assert (result.success, result.metadata.attempts) == (True, 2)
        assert context.filesystem.read("trace.txt") == "x"  # each attempt starts anew

    def refused() -> None:
        closed = CustomPrecondition(description="open", check=lambda: False)
        context = surroundings()
        assert not outcome(doing(preconditions=[closed]), context).success
        assert not context.filesystem.exists("trace.txt")

    def followed() -> None:
        context = surroundings()
        outcome(doing(effects=[StateChangeEffect(state="s", value=1)]), context)
        assert context.resources.get(MemoryManager).read("working", "s") == 1

    named(row, {
        "name": lambda: so(outcome(doing()).metadata.tool_name == "work"),
        "description": lambda: so(doing().description == "Work."),
        "parameters": lambda: raw({"a": {"type": "string"}}).parameters["properties"]["a"],
        "preconditions": refused,
        "effects": followed,
        "timeout": times_out,
        "retry": fails_once,
        "execute": execute,
    })  # fmt: skip


def takes(tool: Tool[Any, Any], good: dict[str, Any], bad: dict[str, Any]) -> None:
    assert tool(good).success
    refused = tool(bad)
    assert refused.failure is not None
    assert refused.failure.code == "INVALID_ARGUMENTS"


@promise("003", "Schema")
def schemas(row: Row) -> None:
    def object_only() -> None:
        for wrong in ({"type": "array"}, {}, None):
            with pytest.raises(ToolDefinitionError):
                Tool.from_schema("t", "d", wrong, echo)  # type: ignore[arg-type]

    number = {"n": {"type": "number"}}
    named(row, {
        "type": object_only,
        "properties": lambda: takes(raw(number), {"n": 1.5}, {"n": "1.5"}),
        "required": lambda: takes(raw(number, required=["n"]), {"n": 1}, {}),
        "additionalProperties": lambda: takes(
            raw(number, additionalProperties=False), {"n": 1}, {"n": 1, "m": 2}
        ),
    })  # fmt: skip


@promise("003", "PropertySchema")
def property_schemas(row: Row) -> None:
    def field(schema: dict[str, Any], good: object, bad: object) -> None:
        takes(raw({"f": schema}), {"f": good}, {"f": bad})

    def types() -> None:
        values = {"string": "s", "number": 1.5, "boolean": True, "array": [1], "object": {"a": 1}}
        for kind, value in values.items():
            for other_kind, other in values.items():
                if kind != other_kind:
                    field({"type": kind}, value, other)

    def described() -> None:
        shown = raw({"f": {"type": "string", "description": "A text."}}).parameters
        assert shown["properties"]["f"]["description"] == "A text."

    def defaults() -> None:
        assert raw({"f": {"type": "number", "default": 5}})({}).value == {"f": 5}

    inner = {"type": "object", "properties": {"a": {"type": "number"}}}
    named(row, {
        "type": types,
        "description": described,
        "enum": lambda: field({"enum": ["utf-8", "ascii"]}, "ascii", "latin-1"),
        "default": defaults,
        "minimum": lambda: field({"minimum": 3}, 3, 2),
        "maximum": lambda: field({"maximum": 3}, 3, 4),
        "minLength": lambda: field({"minLength": 2}, "ab", "a"),
        "maxLength": lambda: field({"maxLength": 2}, "ab", "abc"),
        "pattern": lambda: field({"pattern": "^https?://"}, "http://x", "file:///x"),
        "items": lambda: field({"type": "array", "items": {"type": "string"}}, ["a"], [1]),
        "properties": lambda: field(inner, {"a": 1}, {"a": "1"}),
    })  # fmt: skip


@promise("003", "ToolContext")
def context_members(row: Row) -> None:
    """A call through a registry, without a context, has what ``createDefaultContext`` gives."""
    seen: dict[str, object] = {}

    @tool
    def look(context: ToolContext) -> None:
        """Look around."""
        assert context.memory is not None
        context.memory.write("working", "k", 1)
        seen.update(
            sessionId=context.session_id,
            loopId=context.loop_id,
            agentId=context.agent_id,
            memory=context.memory.read("working", "k"),
            config=dict(context.config),
            signal=context.signal.cancelled,
        )

    registry = ToolRegistry([look])
    assert registry.execute("look").success
    expected = {
        "sessionId": registry.session.session_id,
        "loopId": "default",
        "agentId": "default",
        "memory": 1,
        "config": {"tool_name": "look"},
        "signal": False,
    }
    assert seen[row.name] == expected[row.name]


@promise("003", "ToolResult")
def result_members(row: Row) -> None:
    good = outcome(doing(lambda context: {"url": "x"}))
    bad = outcome(doing(lambda context: ToolResult.error("no", code="X")))

    def metadata() -> None:
        clock = FakeClock(1000.0)
        work = doing(lambda context: clock.advance(2.5))
        found = outcome(work, surroundings(session=Session(clock=clock))).metadata
        assert (found.duration, found.timestamp, found.tool_name) == (2.5, 1000.0, "work")

    named(row, {
        "success": lambda: so((good.success, bad.success) == (True, False)),
        "data": lambda: so((good.value, bad.value) == ({"url": "x"}, None)),
        "error": lambda: so((good.failure, bad.failure) == (None, ToolError("X", "no"))),
        "metadata": metadata,
    })  # fmt: skip


@promise("003", "ToolError")
def error_members(row: Row) -> None:
    """As the handler gave them."""
    given = {"code": "X", "recoverable": False, "suggestions": ("look again",)}
    failure = outcome(doing(lambda context: ToolResult.error("no", **given))).failure
    assert getattr(failure, row.name) == {**given, "message": "no"}[row.name]


# Preconditions


def holds(precondition: Precondition, context: ToolContext | None = None) -> bool:
    """Whether a call runs that has the precondition."""
    return outcome(doing(preconditions=[precondition]), context).success


@promise("003", "Precondition")
@promise("003", "Effect")
def kinds(row: Row) -> None:
    """Each kind is a class of its own, with the Protocol's word as its type."""
    found = globals()[row.name]
    assert issubclass(found, Precondition if row.heading == "Precondition" else Effect)
    text = document_text("003")
    (declared,) = re.findall(rf"interface {row.name} [^}}]*?type: '(\w+)'", text)
    assert found.type == declared


@promise("003", "BasePrecondition")
def base_preconditions(row: Row) -> None:
    def described() -> None:
        closed = CustomPrecondition(description="The door is open", check=lambda: False)
        failure = outcome(doing(preconditions=[closed])).failure
        assert failure is not None
        assert failure.suggestions == ("The door is open",)

    def critical() -> None:
        for is_critical in (True, False):
            closed = CustomPrecondition(description="d", critical=is_critical, check=lambda: False)
            result = outcome(doing(lambda context: context.degraded, preconditions=[closed]))
            assert result.success is not is_critical
            if not is_critical:
                assert result.value == ("d",)  # "tool can proceed with degraded functionality"

    named(row, {
        "type": lambda: so(Precondition.type == "custom"),
        "description": described,
        "critical": critical,
    })  # fmt: skip


def asked(kind: Callable[..., Precondition]) -> None:
    """The check decides, plain or async, whatever the fields say."""

    async def later(context: ToolContext) -> bool:
        return context.filesystem.exists("open")

    for check in (lambda context: context.filesystem.exists("open"), later):
        assert not holds(kind(description="d", check=check))
        assert holds(kind(description="d", check=check), surroundings(fs=make_vfs(["open"])))


def of_type(cls: type[Any], expected: str) -> None:
    assert cls.type == expected


@promise("003", "ResourcePrecondition")
def resource_preconditions(row: Row) -> None:
    class Client:
        pass

    bound = partial(surroundings, resources={Client: Client()})

    def resource() -> None:
        needs = ResourcePrecondition(description="d", resource=Client)
        assert holds(needs, bound())
        assert not holds(needs)

    def availability() -> None:
        preferred = ResourcePrecondition(description="d", resource=Client, availability="preferred")
        assert holds(preferred)
        with pytest.raises(ValueError, match="availability"):
            ResourcePrecondition(description="d", resource=Client, availability="maybe")  # type: ignore[arg-type]

    named(row, {
        "type": partial(of_type, ResourcePrecondition, "resource"),
        "resource": resource,
        "availability": availability,
        "check": lambda: asked(partial(ResourcePrecondition, resource="browser")),
    })  # fmt: skip


@promise("003", "StatePrecondition")
def state_preconditions(row: Row) -> None:
    def state() -> None:
        context = surroundings()
        needs = StatePrecondition(description="d", state="browser.error", expected_value=False)
        memory = context.resources.get(MemoryManager)
        memory.write("working", "browser.error", True)
        assert not holds(needs, context)
        memory.write("working", "browser.error", False)
        assert holds(needs, context)

    def expected() -> None:
        """A value, or a predicate, as in ``expectedValue: (v: number) => v > 0``."""
        context = surroundings()
        left = StatePrecondition(
            description="d", state="left", expected_value=lambda v: v is not None and v > 0
        )
        assert not holds(left, context)
        context.resources.get(MemoryManager).write("short-term", "left", 1)
        assert holds(left, context)

    named(row, {
        "type": partial(of_type, StatePrecondition, "state"),
        "state": state,
        "expectedValue": expected,
        "check": lambda: asked(partial(StatePrecondition, state="s")),
    })  # fmt: skip


@promise("003", "PermissionPrecondition")
def permission_preconditions(row: Row) -> None:
    def permission() -> None:
        """Granted to this session, not to another."""
        context, other = surroundings(), Session()
        needs = PermissionPrecondition(description="d", permission="web:scrape")
        permissions = context.resources.get(Permissions)
        permissions.grant("web:scrape", session=other)
        assert not holds(needs, context)
        permissions.grant("web:scrape", session=context.session)
        assert holds(needs, context)

    named(row, {
        "type": partial(of_type, PermissionPrecondition, "permission"),
        "permission": permission,
        "check": lambda: asked(partial(PermissionPrecondition, permission="p")),
    })  # fmt: skip


@promise("003", "DependencyPrecondition")
def dependency_preconditions(row: Row) -> None:
    def registry(status: Any, *more: Tool[Any, Any]) -> ToolRegistry:
        needs = DependencyPrecondition(description="d", tool="first", status=status)
        resources = {Filesystem: make_vfs()}
        return ToolRegistry([doing(preconditions=[needs]), *more], resources=resources)

    def completed() -> None:
        tools = registry("completed", noop_tool("first"))
        assert not tools.execute("work").success
        tools.execute("first")
        assert tools.execute("work").success

    def available() -> None:
        assert not registry("available").execute("work").success
        assert registry("available", noop_tool("first")).execute("work").success
        with pytest.raises(ValueError, match="status"):
            DependencyPrecondition(description="d", tool="t", status="begun")  # type: ignore[arg-type]

    named(row, {
        "type": partial(of_type, DependencyPrecondition, "dependency"),
        "tool": completed,
        "status": available,
        "check": lambda: asked(partial(DependencyPrecondition, tool="t")),
    })  # fmt: skip


@promise("003", "CustomPrecondition")
def custom_preconditions(row: Row) -> None:
    named(row, {
        "type": partial(of_type, CustomPrecondition, "custom"),
        "id": lambda: so(CustomPrecondition(description="d", id="x", check=lambda: True).id == "x"),
        "check": lambda: asked(CustomPrecondition),
    })  # fmt: skip


def validated(*answers: bool | Exception, critical: bool = True) -> PreconditionResult:
    """Return how preconditions with these answers are found."""

    def check(answer: bool | Exception) -> Callable[[], bool]:
        def ask() -> bool:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask

    preconditions = [
        CustomPrecondition(description=f"d{n}", critical=critical, check=check(answer))
        for n, answer in enumerate(answers)
    ]
    return asyncio.run(validate_preconditions(doing(preconditions=preconditions), surroundings()))


@promise("003", "PreconditionValidator")
@promise("003", "PreconditionResult")
@promise("003", "PreconditionCheck")
def validation(row: Row) -> None:
    """All are asked; one that raises has failed, and says why."""
    error = RuntimeError("unreachable")
    found = validated(True, error, False)
    assert [each.passed for each in found.results] == [True, False, False]
    assert [each.error for each in found.results] == [None, error, None]
    assert [each.precondition.description for each in found.results] == ["d0", "d1", "d2"]
    if row.heading != "PreconditionResult":
        owner = PreconditionCheck if row.heading == "PreconditionCheck" else type(found)
        assert row.name == "validate" or hasattr(owner(*found.results[:1], True), row.name)
        return
    cases: list[tuple[PreconditionResult, dict[str, bool]]] = [
        (validated(True), {"passed": True, "critical_failed": False, "can_proceed": True,
                           "degraded_mode": False}),
        (validated(False), {"passed": False, "critical_failed": True, "can_proceed": False,
                            "degraded_mode": False}),
        (validated(False, critical=False), {"passed": False, "critical_failed": False,
                                            "can_proceed": True, "degraded_mode": True}),
    ]  # fmt: skip
    for result, expected in cases:
        if row.name != "results":
            assert getattr(result, snake(row.name)) is expected[snake(row.name)]
        assert len(result.results) == 1


# Effects


def failing(*effects: Effect) -> tuple[ToolContext, ToolResult[Any]]:
    """Run a tool with these effects and then one that fails."""

    def fail() -> None:
        raise OSError("disk full")

    context = surroundings()
    return context, outcome(doing(effects=[*effects, Effect(apply=fail)]), context)


@promise("003", "BaseEffect")
def base_effects(row: Row) -> None:
    def described() -> None:
        def stuck() -> None:
            raise RuntimeError("stuck")

        _, result = failing(Effect(description="Cache it", apply=lambda: None, rollback=stuck))
        assert result.metadata.not_undone == ("the rollback of effect 'Cache it' failed: stuck",)

    def reversible() -> None:
        for is_reversible in (True, False):
            undone: list[str] = []
            failing(
                Effect(
                    apply=lambda: None,
                    rollback=lambda undone=undone: undone.append("undone"),
                    reversible=is_reversible,
                )
            )
            assert undone == ["undone"] * is_reversible

    named(row, {
        "type": lambda: so({cls.type for cls in Effect.__subclasses__()}
        == {"state_change", "memory", "notification", "cascade"}),
        "description": described,
        "reversible": reversible,
    })  # fmt: skip


def applied(kind: Callable[..., Effect]) -> None:
    """``apply`` takes the place of what the fields say, after the handler, with its result."""
    seen: list[object] = []
    effect = kind(apply=lambda context, result: seen.append((result.value, context.filesystem)))
    context = surroundings()
    outcome(doing(lambda context: "value", effects=[effect]), context)
    assert [value for value, _ in seen] == ["value"]  # type: ignore[misc]


def rolled_back(kind: Callable[..., Effect]) -> None:
    """When the call fails after it was applied, and before the snapshot is restored."""
    seen: list[bool] = []
    failing(
        kind(
            apply=lambda context: None,
            rollback=lambda context: seen.append(context.filesystem.exists("trace.txt")),
        )
    )
    assert seen == [True]


@promise("003", "StateChangeEffect")
def state_changes(row: Row) -> None:
    def after(effect: Effect, before: object = None) -> Any:
        context = surroundings()
        memory = context.resources.get(MemoryManager)
        if before is not None:
            memory.write("working", "s", before)
        assert outcome(doing(lambda context: 5, effects=[effect]), context).success
        return memory.read("working", "s")

    def changes() -> None:
        assert after(StateChangeEffect(state="s", change="set", value=3), 1) == 3
        assert after(StateChangeEffect(state="s", change="clear"), 1) is None
        assert after(StateChangeEffect(state="s", change="increment"), 1) == 2
        assert after(StateChangeEffect(state="s", change="decrement", value=3), 1) == -2
        with pytest.raises(ValueError, match="change"):
            StateChangeEffect(state="s", change="double")  # type: ignore[arg-type]

    def undone() -> None:
        context, _ = failing(StateChangeEffect(state="s", value=1))
        assert context.resources.get(MemoryManager).read("working", "s") is None
        rolled_back(partial(StateChangeEffect, state="s"))

    named(row, {
        "type": partial(of_type, StateChangeEffect, "state_change"),
        "state": lambda: so(after(StateChangeEffect(state="s", value=True))),
        "change": changes,
        "value": lambda: so(after(StateChangeEffect(state="s", value=lambda r: r.value)) == 5),
        "apply": lambda: applied(partial(StateChangeEffect, state="s")),
        "rollback": undone,
    })  # fmt: skip


@promise("003", "MemoryEffect")
def memory_effects(row: Row) -> None:
    def after(scope: str = "working", before: object = None, **options: Any) -> Any:
        context = surroundings()
        memory = context.resources.get(MemoryManager)
        if before is not None:
            memory.write(scope, "k", before)
        effect = MemoryEffect(scope=scope, key="k", **options)  # type: ignore[arg-type]
        assert outcome(doing(lambda context: 5, effects=[effect]), context).success
        return memory.read(scope, "k")

    def scopes() -> None:
        for scope in ("working", "short-term", "long-term"):
            assert after(scope, value=1) == 1
        with pytest.raises(ValueError, match="scope"):
            MemoryEffect(scope="bogus", key="k")  # type: ignore[arg-type]

    def operations() -> None:
        assert after(operation="write", value=2) == 2
        assert after(operation="delete", before=1) is None
        changed = after(operation="update", before=1, value=lambda old, result: old + result.value)
        assert changed == 6
        with pytest.raises(ValueError, match="operation"):
            MemoryEffect(key="k", operation="append")  # type: ignore[arg-type]

    def undone() -> None:
        context, _ = failing(MemoryEffect(key="k", value=1))
        assert context.resources.get(MemoryManager).read("working", "k") is None
        rolled_back(partial(MemoryEffect, key="k"))

    named(row, {
        "type": partial(of_type, MemoryEffect, "memory"),
        "scope": scopes,
        "operation": operations,
        "key": lambda: so(after(value=True)),
        "value": lambda: so(after(value=lambda result: result.value + 1) == 6),
        "apply": lambda: applied(partial(MemoryEffect, key="k")),
        "rollback": undone,
    })  # fmt: skip


@promise("003", "NotificationEffect")
def notifications(row: Row) -> None:
    def heard(effect: Effect, *more: Effect, fails: bool = False) -> list[Any]:
        told: list[Any] = []
        bus = EventBus()
        bus.subscribe("*", lambda event, payload: told.append((event, payload)))
        context = surroundings(resources={EventBus: bus})
        body = (lambda context: ToolResult.error("no")) if fails else (lambda context: 5)
        outcome(doing(body, effects=[effect, *more]), context)
        return told

    def never_undone() -> None:
        """It leaves after the commit only: there is never one to take back."""

        def fail() -> None:
            raise OSError("disk full")

        assert heard(NotificationEffect(event="e"), Effect(apply=fail)) == []
        assert heard(NotificationEffect(event="e"), fails=True) == []
        assert NotificationEffect(event="e").reversible is False

    named(row, {
        "type": partial(of_type, NotificationEffect, "notification"),
        "event": lambda: so(heard(NotificationEffect(event="a:b")) == [("a:b", None)]),
        "payload": lambda: so(heard(NotificationEffect(event="e", payload=lambda r: r.value))
        == [("e", 5)]),
        "apply": lambda: applied(partial(NotificationEffect, event="e")),
        "rollback": never_undone,
    })  # fmt: skip


@promise("003", "CascadeEffect")
def cascades(row: Row) -> None:
    def called(fails: bool = False, **options: Any) -> list[object]:
        numbers: list[object] = []

        def note(number: int) -> None:
            """Note a number."""
            numbers.append(number)

        effect = CascadeEffect(**{"arguments": lambda r: {"number": r.value}, **options})
        body = (lambda context: ToolResult.error("no")) if fails else (lambda context: 5)
        tools = [doing(body, effects=[effect]), tool(name="note")(note)]
        registry = ToolRegistry(tools, resources={Filesystem: make_vfs()})
        registry.execute("work")
        return numbers

    def conditions() -> None:
        assert called(trigger_tool="note", trigger_condition=lambda r: r.value > 1) == [5]
        assert called(trigger_tool="note", trigger_condition=lambda r: r.value > 9) == []
        assert called(trigger_tool="note", fails=True) == []

    def own_apply() -> None:
        """Called in place of the tool, and like it only if the condition holds."""
        applied(partial(CascadeEffect, trigger_tool="note"))
        for least, expected in [(1, [5]), (9, [])]:
            done: list[object] = []
            effect = CascadeEffect(
                trigger_tool="note",
                trigger_condition=lambda r, least=least: r.value > least,
                apply=lambda context, result, done=done: done.append(result.value),
            )
            outcome(doing(lambda context: 5, effects=[effect]))
            assert done == expected
            asyncio.run(apply_effects(doing(effects=[effect]), ToolResult.ok(5), surroundings()))
            assert done == expected * 2

    def undone() -> None:
        """It follows the commit, so only by hand can another effect fail after it."""
        steps: list[str] = []

        def fail() -> None:
            raise OSError("disk full")

        effects = [
            CascadeEffect(
                trigger_tool="note",
                apply=lambda: steps.append("applied"),
                rollback=lambda: steps.append("undone"),
            ),
            NotificationEffect(event="e", apply=fail),
        ]
        outcome(doing(effects=effects))
        assert steps == ["applied"]
        with pytest.raises(OSError, match="disk full"):
            asyncio.run(apply_effects(doing(effects=effects), ToolResult.ok(), surroundings()))
        assert steps == ["applied", "applied", "undone"]

    named(row, {
        "type": partial(of_type, CascadeEffect, "cascade"),
        "triggerTool": lambda: so(called(trigger_tool="note") == [5]),
        "triggerCondition": conditions,
        "apply": own_apply,
        "rollback": undone,
    })  # fmt: skip


@promise("003", "EffectManager", "applyEffects")
def applies_effects(row: Row) -> None:
    """In order; when one fails, those before it are rolled back and the error is raised."""
    steps: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: steps.append(name)

    def fail() -> None:
        raise OSError("disk full")

    effects = [
        Effect(apply=note("a"), rollback=note("a undone")),
        Effect(apply=note("b"), rollback=note("b undone")),
    ]
    context = surroundings()
    done = asyncio.run(apply_effects(doing(effects=effects), ToolResult.ok(), context))
    assert (done, steps) == (tuple(effects), ["a", "b"])
    steps.clear()
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(
            apply_effects(doing(effects=[*effects, Effect(apply=fail)]), ToolResult.ok(), context)
        )
    assert steps == ["a", "b", "b undone", "a undone"]


@promise("003", "EffectManager", "rollbackEffects")
def rolls_effects_back(row: Row) -> None:
    """In reverse order; one that fails does not keep the others from it."""
    steps: list[str] = []

    def stuck() -> None:
        raise RuntimeError("stuck")

    def effect(rollback: Any) -> Effect:
        return Effect(apply=lambda: None, rollback=rollback)

    _, result = failing(
        effect(lambda: steps.append("first")),
        effect(stuck),
        effect(lambda: steps.append("last")),
    )
    assert steps == ["last", "first"]
    assert "stuck" in result.metadata.not_undone[0]


# Retry

TIMEOUT = ToolError("TIMEOUT", "took too long")


@promise("003", "RetryPolicy")
def retry_policies(row: Row) -> None:
    def waits() -> None:
        clock = FakeClock(0.0)
        policy = RetryPolicy(max_retries=2, backoff=LinearBackoff(1.0, 0.5))
        broken = doing(lambda context: ToolResult.error("no"), retry=policy)
        outcome(broken, surroundings(session=Session(clock=clock)))
        assert clock.time() == 1.0 + 1.5

    def times() -> None:
        for most in (0, 1, 3):
            policy = RetryPolicy(max_retries=most)
            result = outcome(doing(lambda context: ToolResult.error("no"), retry=policy))
            assert result.metadata.attempts == most + 1

    def retried(**options: Any) -> bool:
        return RetryPolicy(max_retries=3, **options).retries(TIMEOUT, attempt=0)

    named(row, {
        "maxRetries": times,
        "backoff": waits,
        "retryableErrors": lambda: so((retried(retryable_errors={"TIMEOUT"}),
                                    retried(retryable_errors={"LOCK"})) == (True, False)),
        "nonRetryableErrors": lambda: so((retried(non_retryable_errors={"LOCK"}),
                                       retried(non_retryable_errors={"TIMEOUT"})) == (True, False)),
        "shouldRetry": lambda: so((retried(should_retry=lambda error, attempt: attempt == 0),
                                retried(should_retry=lambda error, attempt: attempt > 0))
        == (True, False)),
    })  # fmt: skip


@promise("003", "BackoffStrategy")
def backoffs(row: Row) -> None:
    """The waits before the first three retries are those of ``calculateBackoff``."""

    def waits(backoff: Any) -> list[float]:
        return [backoff.delay(attempt) for attempt in (1, 2, 3)]

    def jittered() -> None:
        base = FixedBackoff(10.0)
        assert [JitteredBackoff(base, 0.1).delay(1, lambda r=r: r) for r in (0.0, 0.5, 1.0)] == [
            9.0, 10.0, 11.0
        ]  # fmt: skip
        assert all(9.0 <= JitteredBackoff(base, 0.1).delay(1) <= 11.0 for _ in range(100))

    named(row, {
        "none": lambda: so(waits(NoBackoff()) == [0, 0, 0]),
        "fixed": lambda: so(waits(FixedBackoff(2.0)) == [2, 2, 2]),
        "linear": lambda: so(waits(LinearBackoff(1.0, 0.5)) == [1, 1.5, 2]),
        "exponential": lambda: so(waits(ExponentialBackoff(1.0, 3.0, 2.0)) == [1, 2, 3]),
        "jittered": jittered,
    })  # fmt: skip


@promise("003", "RetryPolicies")
def built_in_policies(row: Row) -> None:
    """The numbers are read from the Protocol: milliseconds there, seconds here."""
    text = document_text("003")
    (body,) = re.findall(rf"\n  {row.name}: (.*?)(?:\n  /\*\*|\n\}} as const)", text, re.DOTALL)
    policy: Any = getattr(RetryPolicies, row.name)
    if row.name == "CUSTOM":
        assert body == "(policy: RetryPolicy) => policy"
        mine = RetryPolicy(max_retries=7)
        assert policy(mine) is mine
        return

    def number(name: str) -> float | None:
        found = re.search(rf"{name}: ([\d.]+)", body)
        return None if found is None else float(found[1])

    def seconds(name: str) -> float | None:
        found = number(name)
        return None if found is None else found / 1000

    assert policy.max_retries == number("maxRetries")
    kinds = re.findall(r"type: '(\w+)'", body)
    backoff = policy.backoff
    if kinds[0] == "jittered":
        assert backoff.jitter == number("jitter")
        kinds, backoff = kinds[1:], backoff.base
    assert type(backoff).__name__ == f"{kinds[0].capitalize().replace('None', 'No')}Backoff"
    if kinds[0] == "fixed":
        assert backoff.delay(1) == seconds("delay")
    for name in ("baseDelay", "maxDelay"):
        if (expected := seconds(name)) is not None:
            assert getattr(backoff, snake(name)) == expected
    if (multiplier := number("multiplier")) is not None:
        assert backoff.multiplier == multiplier
    listed = re.findall(r"retryableErrors: \[(.*?)\]", body)
    codes = frozenset(re.findall(r"'(\w+)'", listed[0])) if listed else None
    assert policy.retryable_errors == codes


@promise("003", "RetryExecutor")
def retry_executor(row: Row) -> None:
    def executes() -> None:
        """Waits before each retry, ends with the first success, and answers with the last error."""
        for failures, said in [(0, "done"), (2, "done"), (3, "no 3"), (9, "no 3")]:
            clock, tries = FakeClock(0.0), [0]

            def body(context: ToolContext, tries: Any = tries, failures: int = failures) -> Any:
                tries[0] += 1
                if tries[0] <= failures:
                    return ToolResult.error(f"no {tries[0]}", code="TIMEOUT")
                return ToolResult.ok(message="done")

            policy = RetryPolicy(2, FixedBackoff(1.0), {"TIMEOUT"})
            context = surroundings(session=Session(clock=clock))
            result = outcome(doing(body, retry=policy, reach="reversible"), context)
            assert (result.message, result.metadata.attempts) == (said, min(failures, 2) + 1)
            assert clock.time() == min(failures, 2)

    def retryable() -> None:
        """The printed conditions, in their order; what is not recoverable is never retried."""
        asked: list[tuple[str, int]] = []

        def should(error: ToolError, attempt: int) -> bool:
            asked.append((error.code, attempt))
            return True

        policy = RetryPolicy(1, NoBackoff(), {"TIMEOUT"}, should_retry=should)
        assert policy.retries(TIMEOUT, 0)
        assert not policy.retries(TIMEOUT, 1)  # no retries are left: nothing else is asked
        assert asked == [("TIMEOUT", 0)]
        assert not policy.retries(ToolError("LOCK", "m"), 0)
        assert not policy.retries(ToolError("TIMEOUT", "m", recoverable=False), 0)
        assert not RetryPolicy(1, non_retryable_errors={"TIMEOUT"}).retries(TIMEOUT, 0)

    named(row, {
        "executeWithRetry": executes,
        "calculateBackoff": lambda: so(
            [LinearBackoff(1.0, 0.5).delay(n) for n in (1, 2)] == [1.0, 1.5]
        ),
        "isRetryable": retryable,
    })  # fmt: skip


# Composition


def adding(name: str, number: int, **options: Any) -> Tool[Any, Any]:
    def add(start: int = 0) -> int:
        """Add a number."""
        if number < 0:
            raise ValueError(f"{name} failed")
        return start + number

    return tool(name=name, reach="read", **options)(add)


@promise("003", "ToolComposer")
def composers(row: Row) -> None:
    def sequence() -> None:
        both = ToolComposer.sequence([adding("a", 1), adding("b", 2)])
        assert (both.title, both.description) == (
            "sequence:a→b", "Sequential execution of 2 tools"
        )  # fmt: skip
        assert [r.value for r in both(start=5).value.results] == [6, 7]

    def parallel() -> None:
        both = ToolComposer.parallel([adding("a", 1), adding("b", 2)])
        assert (both.title, both.description) == (
            "parallel:a+b", "Parallel execution of 2 tools"
        )  # fmt: skip
        assert {k: r.value for k, r in both(start=5).value.results.items()} == {"a": 6, "b": 7}

    def conditional() -> None:
        branches = [
            ConditionalBranch(lambda result, context: result.value > 9, [adding("a", 1)]),
            ConditionalBranch(lambda result, context: result.value > 1, [adding("b", 2)]),
        ]
        either = ToolComposer.conditional(branches, [adding("c", 3)])
        assert (either.title, either.description) == (
            "conditional:2branches", "Conditional tool execution based on runtime conditions"
        )  # fmt: skip
        assert [either(start=s).value.result.value for s in (9, 0, -5)] == [10, 2, -2]

    named(row, {"sequence": sequence, "parallel": parallel, "conditional": conditional})


@promise("003", "SequenceOptions")
def sequence_options(row: Row) -> None:
    def stops() -> None:
        members = [adding("a", -1), adding("b", 2)]
        for stop, reached in [(True, 1), (False, 2)]:
            result = ToolComposer.sequence(members, stop_on_error=stop)(start=0)
            assert not result.success
            assert len(result.value.results) == reached
            if stop:  # the Protocol returns the member's own result
                assert result.failure == result.value.results[0].failure

    def transforms() -> None:
        given: list[str] = []

        def transform(output: int, next_tool: Tool[Any, Any]) -> dict[str, int]:
            given.append(next_tool.name)
            return {"start": output}

        members = [adding("a", 1), adding("b", 2), adding("c", 3)]
        result = ToolComposer.sequence(members, transform_output=transform)(start=5)
        assert result.value.results[-1].value == 11
        assert given == ["b", "c"]

    named(row, {"stopOnError": stops, "transformOutput": transforms})


@promise("003", "ParallelOptions")
def parallel_options(row: Row) -> None:
    def stops() -> None:
        members = [adding("a", -1), adding("b", 2)]
        stopped = ToolComposer.parallel(members, stop_on_error=True, max_concurrency=1)(start=0)
        assert stopped.value.not_run == ("b",)
        assert ToolComposer.parallel(members)(start=0).value.not_run == ()

    def times_out() -> None:
        slow = tool(name="slow", reach="read")(waiting)
        result = ToolComposer.parallel([slow], timeout=0.05)(context=make_context())
        assert result.failure is not None
        assert result.failure.code == "TIMEOUT"

    def together() -> None:
        now, most = [0], [0]

        async def count() -> None:
            """Count."""
            now[0] += 1
            most[0] = max(most[0], now[0])
            for _ in range(5):
                await asyncio.sleep(0)
            now[0] -= 1

        members = {f"m{n}": tool(name="count", reach="read")(count) for n in range(1)}
        each = members["m0"]
        for limit, seen in [(1, 1), (2, 2), (None, 4)]:
            most[0] = 0
            keyed = dict.fromkeys(("a", "b", "c", "d"), each)
            assert ToolComposer.parallel(keyed, max_concurrency=limit)(
                context=make_context()
            ).success
            assert most[0] == seen

    named(row, {"maxConcurrency": together, "stopOnError": stops, "timeout": times_out})


# What the Protocol prints of a composed tool


def limited(name: str, seconds: float | None, **options: Any) -> Tool[Any, Any]:
    """Return a tool with a time limit that may run concurrently."""
    return adding(name, 1, timeout=seconds, concurrent=True, **options)


def first_of(*branches: list[Tool[Any, Any]]) -> list[ConditionalBranch]:
    return [ConditionalBranch(lambda result, context: True, tools) for tools in branches]


COMPOSED: dict[str, Callable[..., Tool[Any, Any]]] = {
    "sequence": lambda *tools: ToolComposer.sequence(tools),
    "parallel": lambda *tools: ToolComposer.parallel(tools),
    "conditional": lambda *tools: ToolComposer.conditional(first_of(list(tools))),
}


@promise("003", "sequence")
@promise("003", "parallel")
@promise("003", "conditional")
def composed_members(row: Row) -> None:
    """Each field is as printed, or as DESIGN.md rules: checks and effects stay with the members."""
    compose = COMPOSED[row.heading]

    def named_so() -> None:
        """The title; the name is one that providers take."""
        titles = {
            "sequence": "sequence:a→b",
            "parallel": "parallel:a+b",
            "conditional": "conditional:1branches",
        }
        made = compose(adding("a", 1), adding("b", 2))
        assert made.title == titles[row.heading]
        assert re.fullmatch("[a-z0-9_-]{1,64}", made.name)

    def described() -> None:
        texts = {
            "sequence": "Sequential execution of 2 tools",
            "parallel": "Parallel execution of 2 tools",
            "conditional": "Conditional tool execution based on runtime conditions",
        }
        made = compose(adding("a", 1), adding("b", 2))
        assert made.description == texts[row.heading]

    def parameters() -> None:
        """Of the first tool; of a parallel one, those of all."""

        @tool(reach="read")
        def other(end: int = 0) -> int:
            """Count."""
            return end

        found = compose(adding("a", 1), other).parameters["properties"].keys()
        assert found == ({"start", "end"} if row.heading == "parallel" else {"start"})

    def preconditions() -> None:
        """Ruled: each member's own, when it is its turn, so that one before it can fulfil them."""
        memory = surroundings()
        opens = doing(effects=[StateChangeEffect(state="open", value=True)]).replace(name="opens")
        needs = StatePrecondition(description="It is open", state="open")
        enters = doing(preconditions=[needs]).replace(name="enters")
        made = compose(opens, enters)
        assert made.preconditions == ()
        assert made(context=memory).success
        alone = compose(enters)(context=surroundings())
        assert not alone.success
        assert "It is open" in alone.message

    def effects() -> None:
        """Ruled: each member's own, once."""
        memory = surroundings()
        counts = doing(effects=[StateChangeEffect(state="n", change="increment")])
        made = compose(counts.replace(name="a"), counts.replace(name="b"))
        assert made.effects == ()
        assert made(context=memory).success
        assert memory.resources.get(MemoryManager).read("working", "n") == 2

    def timeout() -> None:
        assert compose(limited("a", 1.0), limited("b", 2.0)).timeout == (
            2.0 if row.heading == "parallel" else 3.0
        )
        assert compose(limited("a", 1.0), limited("b", None)).timeout is None
        # A member's own retries are within it.
        again = limited("b", 2.0, retry=RetryPolicy(1, FixedBackoff(0.5)))
        assert compose(again).timeout == 2 * 2.0 + 0.5
        if row.heading == "parallel":
            two = [limited("a", 1.0), limited("b", 2.0)]
            assert ToolComposer.parallel(two, timeout=9.0).timeout == 9.0
            # Members that cannot run concurrently wait for each other.
            assert ToolComposer.parallel(two, max_concurrency=1).timeout == 3.0
            alone = [each.replace(concurrent=False) for each in two]
            assert ToolComposer.parallel(alone).timeout == 3.0
        if row.heading == "conditional":
            branches = first_of([limited("a", 1.0)], [limited("b", 2.0), limited("c", 4.0)])
            # The longest branch, and the first tools of those before it, which have run by then.
            assert ToolComposer.conditional(branches).timeout == 1.0 + 6.0
            fallback = [limited("d", 9.0)]
            assert ToolComposer.conditional(branches, fallback).timeout == 1.0 + 2.0 + 9.0

    def retry() -> None:
        """Ruled: a member is retried by its own policy; what has succeeded does not run again."""
        runs: list[str] = []

        @tool(reach="read")
        def once() -> str:
            """Run once."""
            runs.append("once")
            return "done"

        @tool(reach="read", retry=RetryPolicy(max_retries=1))
        def twice() -> ToolResult[Any]:
            """Fail the first time."""
            runs.append("twice")
            return ToolResult.ok() if runs.count("twice") == 2 else ToolResult.error("no")

        made = compose(once, twice)
        assert made.retry is None
        assert made(context=surroundings()).success
        assert sorted(runs) == ["once", "twice", "twice"]

        # The whole is, where that is asked for.
        runs.clear()
        whole = compose(once, twice.replace(retry=None)).replace(retry=RetryPolicy(max_retries=1))
        assert whole(context=surroundings()).metadata.attempts == 2
        assert sorted(runs) == ["once", "once", "twice", "twice"]

    named(row, {
        "name": named_so,
        "description": described,
        "parameters": parameters,
        "preconditions": preconditions,
        "effects": effects,
        "timeout": timeout,
        "retry": retry,
    })  # fmt: skip


def waiting(context: ToolContext) -> None:
    """Wait."""
    assert context.signal.wait(60)


@promise("003", "ConditionalBranch")
def branches(row: Row) -> None:
    """The condition is asked with the first tool's result and the context; then the rest runs."""
    seen: list[object] = []

    def condition(result: ToolResult[Any], context: ToolContext) -> bool:
        seen.append((result.value, isinstance(context, ToolContext)))
        return True

    branch = ConditionalBranch(condition, [adding("a", 1), adding("b", 2)])
    result = ToolComposer.conditional([branch])(start=5)
    assert seen == [(6, True)]
    assert [each.value for each in result.value.results] == [6, 7]
    assert hasattr(branch, row.name)


# Registry


@promise("003", "ToolRegistry")
def registry_methods(row: Row) -> None:
    first, second = adding("first", 1), adding("second", 2)

    def register() -> None:
        registry = ToolRegistry([first])
        with pytest.raises(ToolDefinitionError, match="Tool 'first' is already registered"):
            registry.register(first)
        provided = Tool[None, None](name="p", description="d", handler=None)
        with pytest.raises(ToolDefinitionError, match="Tool 'p' must have a handler"):
            registry.register(provided)

    def register_all() -> None:
        registry = ToolRegistry()
        with pytest.raises(ToolDefinitionError):
            registry.register_all([first, second, first])
        assert len(registry) == 0
        registry.register_all([first, second])
        assert len(registry) == 2

    def search() -> None:
        registry = ToolRegistry([first, second])
        assert registry.search("FIR") == (first,)
        assert registry.search("add a number") == (first, second)

    def preconditions() -> None:
        closed = CustomPrecondition(description="d", check=lambda: False)
        registry = ToolRegistry([doing(preconditions=[closed])])
        assert not registry.validate_preconditions("work").can_proceed
        assert registry.session[ToolInvoked].all() == ()

    def effects() -> None:
        told: list[str] = []
        bus = EventBus()
        bus.subscribe("*", lambda event, payload: told.append(event))
        registry = ToolRegistry(
            [doing(effects=[NotificationEffect(event="e"), StateChangeEffect(state="s", value=1)])],
            resources={EventBus: bus, MemoryManager: (memory := MemoryManager())},
        )
        assert len(registry.apply_effects("work", ToolResult.ok())) == 2
        assert (told, memory.read("working", "s")) == (["e"], 1)

    def unregister() -> None:
        registry = ToolRegistry([first])
        registry.unregister("first")
        registry.unregister("first")
        assert not registry.has("first")

    registry = ToolRegistry([first, second])
    named(row, {
        "register": register,
        "registerAll": register_all,
        "get": lambda: so((registry.get("first"), registry.get("none")) == (first, None)),
        "has": lambda: so((registry.has("first"), registry.has("none")) == (True, False)),
        "list": lambda: so(registry.list() == (first, second)),
        "search": search,
        "execute": lambda: so(registry.execute("first", {"start": 4}).value == 5),
        "validatePreconditions": preconditions,
        "applyEffects": effects,
        "unregister": unregister,
    })  # fmt: skip


@promise("003", "ToolRegistryImpl")
def registry_checks(row: Row) -> None:
    def definition() -> None:
        """Each part that the Protocol asks for; the error says which, and of which tool."""
        schema = {"type": "object"}
        wrong: list[tuple[str, tuple[Any, ...]]] = [
            ("name", ("", "d", schema, echo)),
            ("description", ("t", "", schema, echo)),
            ("parameters schema", ("t", "d", None, echo)),
            ("handler", ("t", "d", schema, None)),
        ]
        for part, arguments in wrong:
            with pytest.raises(ToolDefinitionError, match=part):
                ToolRegistry([Tool.from_schema(*arguments)])

    def schema() -> None:
        with pytest.raises(ToolDefinitionError, match="object schema"):
            Tool.from_schema("t", "d", {"type": "array"}, echo)

    def arguments() -> None:
        """All problems, in the Protocol's words, joined as it joins them."""
        fields = {"a": {"type": "string"}, "b": {"type": "boolean"}, "c": {"type": "array"}}
        registry = ToolRegistry([raw(fields, required=["a"])])
        failure = registry.execute("t", {"b": "yes", "c": {}}).failure
        assert failure is not None
        assert sorted(failure.message.split(", ")) == [
            "Field 'b' must be of type boolean",
            "Field 'c' must be of type array",
            "Missing required field: a",
        ]

    def default_context() -> None:
        """``default`` where the Protocol says so, but for the session, which has an id already."""
        registry = ToolRegistry([noop_tool("t")])
        context = registry.context()
        assert (context.loop_id, context.agent_id) == ("default", "default")
        assert context.session_id == registry.session.session_id
        assert context.memory is not None
        assert not context.signal.cancelled

    named(row, {
        "validateToolDefinition": definition,
        "validateSchema": schema,
        "validateArguments": arguments,
        "createDefaultContext": default_context,
    })  # fmt: skip


# Error codes


def scraped() -> ToolResult[Any]:
    """A page that cannot be had, from a tool that is allowed to look."""
    permissions = Permissions()

    class Down(Browser):
        def is_available(self) -> bool:
            return True

        async def read(self, *args: Any, **options: Any) -> Any:
            from weakincentives.errors import PageNotRead

            raise PageNotRead("No element matches the selector")

    registry = ToolRegistry(resources={Browser: Down(), Permissions: permissions})
    registry.register(scrape, namespace="web")
    permissions.grant("web:scrape", session=registry.session)
    return registry.execute("web:scrape", {"url": "http://x"})


def written(**arguments: Any) -> ToolResult[Any]:
    permissions = Permissions()
    bound = {Filesystem: make_vfs({"a.txt": "a", "dir/b.txt": "b"}), Permissions: permissions}
    registry = ToolRegistry(resources={**bound, EventBus: EventBus()})
    registry.register(write, namespace="file")
    permissions.grant("file:write", session=registry.session)
    return registry.execute("file:write", {"content": "x", **arguments})


# The Protocol's two example tools, as printed


def printed(example: str) -> str:
    (body,) = re.findall(
        rf"const {example}: Tool = \{{\n(.*?)\n\s+async execute", document_text("003"), re.DOTALL
    )
    return body


def literals(body: str, name: str) -> list[dict[str, Any]]:
    """Return the fields with plain values of the objects in a list of an example."""
    (listed,) = re.findall(rf"\n  {name}: \[\n(.*?)\n  \]", body, re.DOTALL)
    found = [
        dict(re.findall(r"\n      (\w+): ('[^']*'|true|false)", f"\n{each}"))
        for each in re.findall(r"\{\n(.*?)\n    \}(?:,\n|$)", listed, re.DOTALL)
    ]
    plain = {"true": True, "false": False}
    return [{k: plain.get(v, v.strip("'")) for k, v in each.items()} for each in found]


@promise("003", "webScrapeTool")
@promise("003", "fileWriteTool")
def example_tools(row: Row) -> None:
    ours, namespace = (scrape, "web") if row.heading == "webScrapeTool" else (write, "file")
    body = printed(row.heading)

    def registered() -> None:
        (name,) = re.findall(r"^  name: '(.*)'", body, re.MULTILINE)
        registry = ToolRegistry()
        registry.register(ours, namespace=namespace)
        assert registry.has(name)

    def parameters() -> None:
        """The same names, types, defaults, choices; milliseconds are seconds."""
        schema = ours.parameters
        names = re.findall(r"^      (\w+): \{", body, re.MULTILINE)
        assert list(schema["properties"]) == [snake(name) for name in names]
        (required,) = re.findall(r"^    required: \[(.*)\]", body, re.MULTILINE)
        assert schema["required"] == re.findall(r"'(\w+)'", required)
        for name in names:
            (fields,) = re.findall(rf"\n      {name}: \{{\n(.*?)\n      \}}", body, re.DOTALL)
            found = schema["properties"][snake(name)]
            (text,) = re.findall(r"description: '(.*)'", fields)
            assert found["description"].startswith(text.replace("Milliseconds", "Seconds"))
            if choices := re.findall(r"enum: \[(.*)\]", fields):
                assert found["enum"] == re.findall(r"'([\w-]+)'", choices[0])
            if pattern := re.findall(r"pattern: '(.*)'", fields):
                assert found["pattern"] == pattern[0]
            if default := re.findall(r"default: '?([\w-]+)", fields):
                assert str(found["default"]).lower() in (default[0], f"{default[0]}.0")

    def contracts() -> None:
        """One for each that is printed, with its fields."""
        expected, found = literals(body, row.name), getattr(ours, row.name)
        assert len(found) == len(expected) > 0
        for each, fields in zip(found, expected, strict=True):
            assert {name: getattr(each, snake(name)) for name in fields} == fields

    def rollback() -> None:
        contracts()
        if row.heading == "fileWriteTool":
            return
        # "Remove cache entry"
        context = surroundings()
        page = ScrapedPage(url="http://new", content="c", timestamp=1.0)
        memory = context.resources.get(MemoryManager)
        memory.write("short-term", "web:cache", {"http://old": {"content": "o", "timestamp": 0.0}})
        (effect,) = ours.effects
        effect.run(context, ToolResult.ok(page))
        assert list(memory.read("short-term", "web:cache")) == ["http://old", "http://new"]
        assert effect.can_roll_back
        effect.roll_back(context, ToolResult.ok(page))
        assert list(memory.read("short-term", "web:cache")) == ["http://old"]

    def timeout() -> None:
        (milliseconds,) = re.findall(r"^  timeout: (\d+)", body, re.MULTILINE)
        assert ours.timeout == int(milliseconds) / 1000

    def retry() -> None:
        (name,) = re.findall(r"^  retry: RetryPolicies\.(\w+)", body, re.MULTILINE)
        assert ours.retry is getattr(RetryPolicies, name)

    (description,) = re.findall(r"^  description: '(.*)'", body, re.MULTILINE)
    named(row, {
        "name": registered,
        "description": lambda: so(ours.description == description),
        "parameters": parameters,
        "preconditions": contracts,
        "effects": rollback,
        "timeout": timeout,
        "retry": retry,
    })  # fmt: skip


@promise("003", "error codes")
def error_codes(row: Row) -> None:
    """Each occurs where the Protocol has it, with its words and with its ``recoverable``."""

    def broken() -> None:
        """Break."""
        raise RuntimeError("broken")

    none = ConditionalBranch(lambda result, context: False, [noop_tool("a")])
    closed = CustomPrecondition(description="The door is open", check=lambda: False)
    silent = doing(lambda context: ToolResult("", success=False), retry=RetryPolicy(max_retries=2))
    results: dict[str, Callable[[], ToolResult[Any]]] = {
        "MAX_RETRIES_EXCEEDED": lambda: outcome(silent),
        "EXECUTION_FAILED": lambda: ToolComposer.parallel([tool(broken)])(
            context=make_context()
        ).value.results["broken"],
        "NO_BRANCH_MATCHED": lambda: ToolComposer.conditional([none])(context=make_context()),
        "TOOL_NOT_FOUND": lambda: ToolRegistry().execute("wrok"),
        "INVALID_ARGUMENTS": lambda: raw({"n": {"type": "number"}}, required=["path"])({"n": "1"}),
        "PRECONDITION_FAILED": lambda: outcome(doing(preconditions=[closed])),
        "SCRAPE_FAILED": scraped,
        "FILE_EXISTS": lambda: written(path="a.txt"),
        "WRITE_FAILED": lambda: written(path="dir", overwrite=True),
    }
    words = {
        "MAX_RETRIES_EXCEEDED": "Exceeded maximum retries (2)",
        "EXECUTION_FAILED": "broken",
        "NO_BRANCH_MATCHED": "No conditional branch matched and no fallback provided",
        "TOOL_NOT_FOUND": "Tool 'wrok' not found",
        "INVALID_ARGUMENTS": "Field 'n' must be of type number, Missing required field: path",
        "PRECONDITION_FAILED": "Tool preconditions not met",
        "SCRAPE_FAILED": "No element matches the selector",
        "FILE_EXISTS": "File 'a.txt' already exists",
        "WRITE_FAILED": "dir is a directory. Give the path of a file",
    }
    assert row.name in results, f"write a check for {row}"
    failure = results[row.name]().failure
    assert failure is not None
    assert failure.code == row.name
    assert failure.message == words[row.name]
    text = document_text("003")
    (stated,) = set(
        re.findall(rf"code: '{row.name}',\s+message: [^\n]+\n\s+recoverable: (\w+)", text)
    )
    assert failure.recoverable is (stated == "true")
    suggestions = {
        "PRECONDITION_FAILED": ("The door is open",),
        "SCRAPE_FAILED": ("Check URL validity", "Verify page accessibility"),
        "FILE_EXISTS": ("Set overwrite: true", "Choose different path"),
    }
    assert failure.suggestions == suggestions.get(row.name, ())
