"""Contracts of a tool: what must hold before it runs, and what follows when it has succeeded.

A precondition says whether the call may run, or may run with less than it could have. An effect
is applied after the handler succeeded: state and memory inside the transaction, notifications and
cascades once it is committed.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

from weakincentives.errors import Suspended
from weakincentives.logs import get_logger
from weakincentives.prompt.policies import missing_tools
from weakincentives.prompt.signatures import is_async

if TYPE_CHECKING:
    from weakincentives.prompt.context import MemoryManager, ToolContext
    from weakincentives.prompt.tool import Tool
    from weakincentives.prompt.tool_result import ToolResult

_logger = get_logger(__name__)

MemoryScope = Literal["working", "short-term", "long-term", "short_term", "long_term"]
"""How long something is remembered; the last two are other spellings."""
Check = Callable[..., "bool | Awaitable[bool]"]
"""Called with as many of ``(context, params)`` as it must be given."""
Step = Callable[..., object]
"""Called with as many of ``(context, result)`` as it must be given; may be async."""


# Preconditions


@dataclass(frozen=True, kw_only=True)
class Precondition:
    """What must hold before a tool runs."""

    type: ClassVar[str] = "custom"

    description: str
    """For the model, which is told it when the condition does not hold."""
    critical: bool = True
    """Whether the call is refused without it; otherwise it runs with less than it could have."""
    check: Check | None = None

    def __post_init__(self) -> None:
        if not self.description.strip():
            raise ValueError(f"a {self.type} precondition needs a description for the model")
        if self.check is not None:
            _adapted(self.check, f"the check of precondition {self.description!r}")
        elif isinstance(self, CustomPrecondition):
            raise ValueError(f"custom precondition {self.description!r} needs a check")

    @cached_property
    def is_async(self) -> bool:
        return self.check is not None and is_async(self.check)

    def holds(self, context: ToolContext, params: object) -> Any:
        """Return whether it holds, or an awaitable of that."""
        return self._default(context) if self.check is None else self._ask(context, params)

    @cached_property
    def _ask(self) -> Check:
        return _adapted(cast("Check", self.check))

    def _default(self, context: ToolContext) -> bool:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ResourcePrecondition(Precondition):
    """A resource is there. Without a check: ``resource`` is a type that is bound."""

    type: ClassVar[str] = "resource"

    resource: str | type
    availability: Literal["required", "preferred"] = "required"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice("availability", self.availability, "required", "preferred")
        if self.availability == "preferred":
            object.__setattr__(self, "critical", False)
        if self.check is None and isinstance(self.resource, str):
            raise ValueError(
                f"resource precondition {self.description!r}: name a type to look for, or give "
                "a check"
            )

    def _default(self, context: ToolContext) -> bool:
        return context.resources.find(cast("type[Any]", self.resource)) is not None


@dataclass(frozen=True, kw_only=True)
class StatePrecondition(Precondition):
    """Something has the value it should have. Without a check: looked up in the memory."""

    type: ClassVar[str] = "state"

    state: str
    expected_value: object = True
    """The value, or a predicate that is asked about it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_named(f"state precondition {self.description!r}", "state", self.state)

    def _default(self, context: ToolContext) -> bool:
        memory = context.memory
        if memory is None:
            raise LookupError("no memory is bound: bind a MemoryManager, or give a check")
        found = next(
            (value for scope in ("working", "short-term", "long-term")
             if (value := memory.read(scope, self.state)) is not None),
            None,
        )  # fmt: skip
        if callable(self.expected_value):
            return bool(self.expected_value(found))
        return found == self.expected_value


@dataclass(frozen=True, kw_only=True)
class PermissionPrecondition(Precondition):
    """A permission was granted to the session."""

    type: ClassVar[str] = "permission"

    permission: str

    def __post_init__(self) -> None:
        super().__post_init__()
        what = f"permission precondition {self.description!r}"
        _check_named(what, "permission", self.permission)

    def _default(self, context: ToolContext) -> bool:
        from weakincentives.runtime.memory import Permissions

        permissions = context.resources.find(Permissions)
        return permissions is not None and permissions.has(context.session_id, self.permission)


@dataclass(frozen=True, kw_only=True)
class DependencyPrecondition(Precondition):
    """Another tool has succeeded in this session, or is offered beside this one."""

    type: ClassVar[str] = "dependency"

    tool: str
    status: Literal["completed", "available"] = "completed"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_named(f"dependency precondition {self.description!r}", "tool", self.tool)
        _check_choice("status", self.status, "completed", "available")

    @property
    def wire_name(self) -> str:
        """The tool's name in calls: ``web:scrape`` is called as ``web__scrape``."""
        return self.tool.replace(":", "__")

    def _default(self, context: ToolContext) -> bool:
        if self.status == "available":
            rendered = context.rendering
            return rendered is not None and self.wire_name in rendered.offers
        return not missing_tools((self.wire_name,), context)


@dataclass(frozen=True, kw_only=True)
class CustomPrecondition(Precondition):
    """Whatever its check says."""

    id: str = ""


@dataclass(frozen=True, slots=True)
class PreconditionCheck:
    """How one precondition was found."""

    precondition: Precondition
    passed: bool
    error: Exception | None = None
    """What the check raised; it then counts as failed."""

    def __str__(self) -> str:
        text = self.precondition.description
        return text if self.error is None else f"{text} (the check failed: {self.error!r})"


@dataclass(frozen=True, slots=True)
class PreconditionResult:
    """How all preconditions of a call were found."""

    results: tuple[PreconditionCheck, ...] = ()

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.results)

    @property
    def failed(self) -> tuple[PreconditionCheck, ...]:
        return tuple(each for each in self.results if not each.passed)

    @property
    def critical_failed(self) -> bool:
        return any(each.precondition.critical for each in self.failed)

    @property
    def can_proceed(self) -> bool:
        return not self.critical_failed

    @property
    def degraded_mode(self) -> bool:
        return self.can_proceed and not self.passed


async def validate_preconditions(
    tool: Tool[Any, Any], context: ToolContext, params: object = None
) -> PreconditionResult:
    """Check every precondition of a tool; one that raises counts as failed, and is shown."""
    results: list[PreconditionCheck] = []
    for precondition in tool.preconditions:
        error: Exception | None = None
        passed = False
        try:
            answer = precondition.holds(context, params)
            if precondition.is_async:
                answer = await answer
            elif inspect.isawaitable(answer):  # which would count as passed
                _discard(answer)
                raise TypeError("a plain check returned a coroutine: make it `async def`")
            passed = bool(answer)
        except Exception as raised:
            if isinstance(raised, Suspended):
                raise
            _logger.warning("the check of %r failed", precondition.description, exc_info=raised)
            error = raised
        results.append(PreconditionCheck(precondition, passed, error))
    return PreconditionResult(tuple(results))


# Effects


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What follows from a success."""

    type: ClassVar[str] = ""
    after_commit: ClassVar[bool] = False
    """Whether it reaches others, and so must wait until nothing can be taken back."""

    description: str = ""
    reversible: bool = True
    """Whether ``rollback`` is called when the call fails after all."""
    apply: Step | None = None
    """Does it; without one, the fields say what is done."""
    rollback: Step | None = None
    """Takes back what no snapshot covers."""

    def __post_init__(self) -> None:
        for name, step in (("apply", self.apply), ("rollback", self.rollback)):
            if step is not None:
                _adapted(step, f"{name} of {self.type} effect {self.description!r}")
        if type(self) is Effect and self.apply is None:
            raise ValueError(f"effect {self.description!r} needs an apply, or to be of some kind")

    def _check(self, name: str, value: object) -> None:
        """Refuse a field that the effect cannot do without."""
        _check_named(f"{self.type} effect {self.description!r}", name, value)

    @cached_property
    def is_async(self) -> bool:
        return any(step is not None and is_async(step) for step in (self.apply, self.rollback))

    @property
    def can_roll_back(self) -> bool:
        return self.reversible and self.rollback is not None

    async def run(self, context: ToolContext, result: ToolResult[Any]) -> None:
        """Apply the effect."""
        if self.apply is None:
            self._default(context, result)
        else:
            await _call(self.apply, context, result)

    async def take_back(self, context: ToolContext, result: ToolResult[Any]) -> None:
        """Call the effect's own rollback."""
        if self.rollback is not None:
            await _call(self.rollback, context, result)

    def _default(self, context: ToolContext, result: ToolResult[Any]) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class StateChangeEffect(Effect):
    """Changes a value in the working memory."""

    type: ClassVar[str] = "state_change"

    state: str
    change: Literal["set", "clear", "increment", "decrement"] = "set"
    value: object = None
    """The value or the step; a function is asked for it with the result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("state", self.state)
        _check_choice("change", self.change, "set", "clear", "increment", "decrement")

    def _default(self, context: ToolContext, result: ToolResult[Any]) -> None:
        memory = _memory(context, self)
        value = _value(self.value, result)
        if self.change == "clear":
            memory.delete("working", self.state)
        elif self.change == "set":
            memory.write("working", self.state, value)
        else:
            step = 1 if value is None else value
            step = step if self.change == "increment" else -step

            def changed(old: Any) -> Any:
                return (old or 0) + step

            memory.update("working", self.state, changed)


@dataclass(frozen=True, kw_only=True)
class MemoryEffect(Effect):
    """Writes to the memory."""

    type: ClassVar[str] = "memory"

    scope: MemoryScope = "working"
    operation: Literal["write", "delete", "update"] = "write"
    key: str
    value: object = None
    """The value, or a function of the result; for an update, of the old value and the result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scope not in (known := get_args(MemoryScope)):
            names = ", ".join(map(repr, known))
            raise ValueError(f"unknown memory scope {self.scope!r}: use one of {names}")
        self._check("key", self.key)
        _check_choice("operation", self.operation, "write", "delete", "update")

    def _default(self, context: ToolContext, result: ToolResult[Any]) -> None:
        memory = _memory(context, self)
        if self.operation == "delete":
            memory.delete(self.scope, self.key)
        elif self.operation == "write":
            memory.write(self.scope, self.key, _value(self.value, result))
        else:

            def changed(old: Any) -> Any:
                return self.value(old, result) if callable(self.value) else self.value

            memory.update(self.scope, self.key, changed)


@dataclass(frozen=True, kw_only=True)
class NotificationEffect(Effect):
    """Tells others, once the call is committed. That cannot be taken back."""

    type: ClassVar[str] = "notification"
    after_commit: ClassVar[bool] = True

    event: str = ""
    payload: object = None
    """What is told, or a function of the result."""
    reversible: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.apply is None:
            self._check("event", self.event)

    def _default(self, context: ToolContext, result: ToolResult[Any]) -> None:
        self.emit(context, result)

    def emit(self, context: ToolContext, result: ToolResult[Any]) -> None:
        """Put the event on the bus."""
        from weakincentives.runtime.memory import EventBus

        bus = context.resources.find(EventBus)
        if bus is None:
            raise LookupError(f"nobody carries the event {self.event!r}: bind an EventBus")
        bus.emit(self.event, _value(self.payload, result))


@dataclass(frozen=True, kw_only=True)
class CascadeEffect(Effect):
    """Calls another tool, once the call is committed, as a transaction of its own."""

    type: ClassVar[str] = "cascade"
    after_commit: ClassVar[bool] = True

    trigger_tool: str | Tool[Any, Any]
    trigger_condition: Callable[[ToolResult[Any]], bool] | None = None
    arguments: object = field(default_factory=dict[str, object])
    """The other tool's arguments, or a function of the result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name = getattr(self.trigger_tool, "name", self.trigger_tool)
        self._check("trigger_tool", name)


async def apply_effects(
    tool: Tool[Any, Any], result: ToolResult[Any], context: ToolContext
) -> tuple[Effect, ...]:
    """Apply a tool's effects for a result from elsewhere; returns those that were applied.

    As a transaction: when one fails, those before it are rolled back, session and resources are
    as before, and the error goes on. Those that change something here come first, then
    notifications, then cascades, each a call of its own.
    """
    from weakincentives.runtime.tool_call import run_cascade
    from weakincentives.runtime.transactions import tool_transaction

    applied: list[Effect] = []
    cascades: list[CascadeEffect] = []
    with tool_transaction(context.session, context.resources, tag=f"effects:{tool.name}"):
        try:
            await apply_each(tool, result, context, applied)
            for effect in tool.effects:
                if isinstance(effect, CascadeEffect) and effect.apply is None:
                    cascades.append(effect)
                elif effect.after_commit:
                    await effect.run(context, result)
                    applied.append(effect)
        except BaseException:
            await roll_back_effects(applied, result, context)
            raise
    for cascade in cascades:
        if await run_cascade(cascade, result, context) is not None:
            applied += (cascade,)
    return tuple(applied)


async def apply_each(
    tool: Tool[Any, Any], result: ToolResult[Any], context: ToolContext, applied: list[Effect]
) -> None:
    """Apply what belongs inside the transaction, noting each: the caller rolls back."""
    for effect in tool.effects:
        if not effect.after_commit:
            await effect.run(context, result)
            applied.append(effect)


async def roll_back_effects(
    effects: Iterable[Effect], result: ToolResult[Any], context: ToolContext
) -> tuple[str, ...]:
    """Call the effects' own rollbacks, the last first; returns what failed, in sentences."""
    failures: list[str] = []
    for effect in reversed(tuple(effects)):
        if effect.can_roll_back:
            try:
                await effect.take_back(context, result)
            except Exception as error:
                _logger.exception("the rollback of effect %r failed", effect.description)
                name = effect.description or effect.type
                failures.append(f"the rollback of effect {name!r} failed: {error}")
    return tuple(failures)


# What both share


async def _call(step: Step, context: ToolContext, result: ToolResult[Any]) -> None:
    answer = _adapted(step)(context, result)
    if not inspect.isawaitable(answer):
        return
    from weakincentives.runtime.loops import run_blocking
    from weakincentives.runtime.tool_call import may_wait

    if await may_wait():
        await answer
        return
    # A sync call takes back what a call nested in it did; it may have been made on a loop.

    async def done() -> None:
        await answer

    run_blocking(done)


def _discard(answer: Any) -> None:
    """Close a coroutine that nobody will await."""
    if inspect.iscoroutine(answer):
        answer.close()


def _check_named(what: str, name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} needs its {name}: a string that is not empty, got {value!r}")


def _check_choice(name: str, value: object, *choices: str) -> None:
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")


def _adapted(function: Callable[..., Any], what: str = "it") -> Callable[[Any, Any], Any]:
    """Return a function of two arguments that hands on as many as the given one must have."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in that does not say what it takes
        return lambda first, _: function(first)
    # One with a default is its author's own: `lambda context, name=name: ...` in a loop.
    needed = sum(
        each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        and each.default is each.empty
        for each in parameters
    )
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        needed = 2
    if needed > 2:
        raise TypeError(f"{what} takes at most two arguments, got {function!r}")
    return lambda first, second: function(*(first, second)[:needed])


def _value(value: object, result: ToolResult[Any]) -> Any:
    return value(result) if callable(value) else value


def _memory(context: ToolContext, effect: Effect) -> MemoryManager:
    if context.memory is None:
        raise LookupError(
            f"effect {effect.description or effect.type!r} needs a memory: bind a MemoryManager"
        )
    return context.memory
