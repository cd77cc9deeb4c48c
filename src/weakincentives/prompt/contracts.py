"""Contracts of a tool: preconditions, which must hold before it runs, and effects of its success.

State and memory effects belong to the transaction; notifications and cascades follow its commit.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, cast, get_args

from weakincentives.core.logs import get_logger
from weakincentives.core.named import Named, named
from weakincentives.errors import Suspended
from weakincentives.prompt.policies import missing_tools
from weakincentives.prompt.signatures import is_async

if TYPE_CHECKING:
    from weakincentives.prompt.context import ToolContext
    from weakincentives.prompt.tool import Tool
    from weakincentives.session.memory import MemoryManager
    from weakincentives.tool_result import ToolResult

_logger = get_logger(__name__)

T_co = TypeVar("T_co", covariant=True)

MemoryScope = Literal["working", "short-term", "long-term", "short_term", "long_term"]
"""How long something is remembered; the last two are other spellings."""


# The functions of contracts: each is called with what it names.


class _AsksNothing(Protocol[T_co]):
    def __call__(self) -> T_co: ...


class _AsksContext(Protocol[T_co]):
    def __call__(self, *, context: ToolContext) -> T_co: ...


class _AsksParams(Protocol[T_co]):
    def __call__(self, *, params: Any) -> T_co: ...


class _AsksResult(Protocol[T_co]):
    def __call__(self, *, result: ToolResult[Any]) -> T_co: ...


class _AsksContextParams(Protocol[T_co]):
    def __call__(self, *, context: ToolContext, params: Any) -> T_co: ...


class _AsksContextResult(Protocol[T_co]):
    def __call__(self, *, context: ToolContext, result: ToolResult[Any]) -> T_co: ...


class _AsksParamsResult(Protocol[T_co]):
    def __call__(self, *, params: Any, result: ToolResult[Any]) -> T_co: ...


class _AsksAll(Protocol[T_co]):
    def __call__(self, *, context: ToolContext, params: Any, result: ToolResult[Any]) -> T_co: ...


_Before = _AsksNothing[T_co] | _AsksContext[T_co] | _AsksParams[T_co] | _AsksContextParams[T_co]
_After = _AsksResult[T_co] | _AsksContextResult[T_co] | _AsksParamsResult[T_co] | _AsksAll[T_co]

Check = _Before[bool | Awaitable[bool]]
"""Called with those of ``context`` and ``params`` that it names; plain or async."""
Step = _Before[object] | _After[object]
"""Called with those of ``context``, ``params`` and ``result`` that it names; plain or async."""


class _Contract:
    """Checks the fields of a contract when it is declared."""

    type: ClassVar[str] = ""
    _functions: ClassVar[tuple[str, ...]] = ()
    _offered: ClassVar[tuple[str, ...]] = ("context", "params")
    """What the functions may ask for, by name."""
    _names: ClassVar[tuple[str, ...]] = ()
    """The fields that hold a name, which must not be empty."""
    _choices: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = ()

    description: str

    def __post_init__(self) -> None:
        where = f"{type(self).__name__} {self.description!r}"
        for name in self._functions:
            function = getattr(self, name)
            if function is not None:
                made = named(function, self._offered, f"{where}: {name}", "it is called with")
                object.__setattr__(self, f"_call_{name}", made)
        for name in self._names:
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{where}: {name} must be a string that is not empty")
        for name, choices in self._choices:
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{where}: {name} must be one of {choices}, got {value!r}")


# Preconditions


@dataclass(frozen=True, kw_only=True)
class Precondition(_Contract):
    """What must hold before a tool runs."""

    type = "custom"
    _functions = ("check",)
    _names = ("description",)

    description: str
    """For the model, which sees it when the condition does not hold."""
    critical: bool = True
    """Whether the call is refused without it; otherwise it runs in degraded mode."""
    check: Check | None = None
    _call_check: Named = field(init=False, repr=False, compare=False)

    @property
    def is_async(self) -> bool:
        return self.check is not None and is_async(self.check)

    def holds(self, context: ToolContext, params: object) -> Any:
        """Return whether it holds, or an awaitable of that."""
        if self.check is None:
            return self._default(context)
        return self._call_check({"context": context, "params": params})

    def _default(self, context: ToolContext) -> bool:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ResourcePrecondition(Precondition):
    """A resource is there. Without a check: ``resource`` is a type that is bound."""

    type = "resource"
    _choices = (("availability", ("required", "preferred")),)

    resource: str | type
    availability: Literal["required", "preferred"] = "required"

    def __post_init__(self) -> None:
        super().__post_init__()
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
    """A value is as expected. Without a check: looked up in the memory."""

    type = "state"
    _names = ("description", "state")

    state: str
    expected_value: object = True
    """The value, or a predicate on it."""

    def _default(self, context: ToolContext) -> bool:
        memory = _memory(context, self)
        values = (memory.read(scope, self.state) for scope in get_args(MemoryScope)[:3])
        found = next((value for value in values if value is not None), None)
        if callable(self.expected_value):
            return bool(self.expected_value(found))
        return found == self.expected_value


@dataclass(frozen=True, kw_only=True)
class PermissionPrecondition(Precondition):
    """A permission was granted to the session."""

    type = "permission"
    _names = ("description", "permission")

    permission: str

    def _default(self, context: ToolContext) -> bool:
        from weakincentives.session.memory import Permissions

        permissions = context.resources.find(Permissions)
        return permissions is not None and permissions.has(context.session_id, self.permission)


@dataclass(frozen=True, kw_only=True)
class DependencyPrecondition(Precondition):
    """Another tool has succeeded in this session, or is offered with this one."""

    type = "dependency"
    _names = ("description", "tool")
    _choices = (("status", ("completed", "available")),)

    tool: str
    status: Literal["completed", "available"] = "completed"

    def _default(self, context: ToolContext) -> bool:
        name = self.tool.replace(":", "__")  # as providers spell it
        if self.status == "completed":
            return not missing_tools((name,), context)
        rendered = context.rendering
        return rendered is not None and name in rendered.offers


@dataclass(frozen=True, kw_only=True)
class CustomPrecondition(Precondition):
    """Holds if its check says so."""

    id: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.check is None:
            raise ValueError(f"custom precondition {self.description!r} needs a check")


@dataclass(frozen=True, slots=True)
class PreconditionCheck:
    """The outcome of one precondition."""

    precondition: Precondition
    passed: bool
    error: Exception | None = None
    """What the check raised; it then counts as failed."""

    def __str__(self) -> str:
        text = self.precondition.description
        return text if self.error is None else f"{text} (the check failed: {self.error!r})"


@dataclass(frozen=True, slots=True)
class PreconditionResult:
    """The outcome of all preconditions of a call."""

    results: tuple[PreconditionCheck, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failed

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
                if inspect.iscoroutine(answer):
                    answer.close()
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
class Effect(_Contract):
    """What follows from a success."""

    _functions = ("apply", "rollback")
    _offered = ("context", "params", "result")
    after_commit: ClassVar[bool] = False
    """Whether it reaches others, and so must wait until nothing can be undone."""

    description: str = ""
    reversible: bool = True
    """Whether ``rollback`` is called when the call fails after all."""
    apply: Step | None = None
    """Applies it; without one, the fields say what to do."""
    rollback: Step | None = None
    """Undoes what no snapshot covers."""
    _call_apply: Named = field(init=False, repr=False, compare=False)
    _call_rollback: Named = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self) is Effect and self.apply is None:
            raise ValueError(f"effect {self.description!r} needs an apply function")

    @property
    def label(self) -> str:
        """What to call it in messages."""
        return self.description or self.type

    @property
    def is_async(self) -> bool:
        return any(step is not None and is_async(step) for step in (self.apply, self.rollback))

    @property
    def can_roll_back(self) -> bool:
        return self.reversible and self.rollback is not None

    def run(self, context: ToolContext, result: ToolResult[Any], params: object = None) -> object:
        """Apply the effect. The caller awaits what an async one returns."""
        if self.apply is None:
            return self._default(context, result)
        return self._call_apply({"context": context, "params": params, "result": result})

    def roll_back(
        self, context: ToolContext, result: ToolResult[Any], params: object = None
    ) -> object:
        """Call the effect's own rollback. The caller awaits what an async one returns."""
        return self._call_rollback({"context": context, "params": params, "result": result})

    def _default(self, context: ToolContext, result: ToolResult[Any]) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class StateChangeEffect(Effect):
    """Changes a value in the working memory."""

    type = "state_change"
    _names = ("state",)
    _choices = (("change", ("set", "clear", "increment", "decrement")),)

    state: str
    change: Literal["set", "clear", "increment", "decrement"] = "set"
    value: object = None
    """The value or the step, or a function of the result."""

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

    type = "memory"
    _names = ("key",)
    _choices = (
        ("scope", get_args(MemoryScope)),
        ("operation", ("write", "delete", "update")),
    )

    scope: MemoryScope = "working"
    operation: Literal["write", "delete", "update"] = "write"
    key: str
    value: object = None
    """The value, or a function of the result; for an update, of the old value and the result."""

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
    """Emits an event once the call is committed. That cannot be undone."""

    type = "notification"
    after_commit = True

    event: str = ""
    payload: object = None
    """The event's payload, or a function of the result."""
    reversible: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.apply is None and not self.event:
            raise ValueError(f"notification effect {self.description!r} needs its event")

    def _default(self, context: ToolContext, result: ToolResult[Any]) -> None:
        from weakincentives.session.memory import EventBus

        bus = context.resources.find(EventBus)
        if bus is None:
            raise LookupError(f"the event {self.event!r} needs an EventBus: bind one as a resource")
        bus.emit(self.event, _value(self.payload, result))


@dataclass(frozen=True, kw_only=True)
class CascadeEffect(Effect):
    """Calls another tool once the call is committed, as a transaction of its own."""

    type = "cascade"
    after_commit = True

    trigger_tool: str | Tool[Any, Any]
    trigger_condition: Callable[[ToolResult[Any]], bool] | None = None
    """Without one, it follows every success."""
    arguments: object = field(default_factory=dict[str, object])
    """The other tool's arguments, or a function of the result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.trigger_tool:
            raise ValueError(f"cascade effect {self.description!r} needs its trigger_tool")

    def triggers(self, result: ToolResult[Any]) -> bool:
        """Whether a result fulfils the trigger condition, for an ``apply`` of its own, too."""
        return self.trigger_condition is None or bool(self.trigger_condition(result))


def _value(value: object, result: ToolResult[Any]) -> Any:
    return value(result) if callable(value) else value


def _memory(context: ToolContext, contract: _Contract) -> MemoryManager:
    if context.memory is None:
        raise LookupError(
            f"{contract.description or contract.type!r} needs a memory: bind a MemoryManager"
        )
    return context.memory
