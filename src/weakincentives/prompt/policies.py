"""Policies: declared rules about when a tool may be called.

A policy sees every call before it runs and allows or denies it; it hears of every call that is
about to run and of every success. What it remembers lives in session slices, so that memory of
what happened is rolled back with what happened, and counts of what was tried are not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from rpds import HashTrieMap, HashTrieSet, Queue

from weakincentives.errors import FilesystemError
from weakincentives.slices import Slice, SlicePolicy, slice_policy

if TYPE_CHECKING:
    from weakincentives.prompt.tool import Tool, ToolContext
    from weakincentives.prompt.tool_result import ToolResult

__all__ = [
    "PolicyDecision",
    "PolicyState",
    "QuotaPolicy",
    "RateLimitPolicy",
    "ReadBeforeWritePolicy",
    "SequentialDependencyPolicy",
    "ToolPolicy",
]


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """Whether a call may proceed, and if not, why: in words for the model."""

    allowed: bool
    reason: str | None = None

    @classmethod
    def allow(cls) -> PolicyDecision:
        return _ALLOWED

    @classmethod
    def deny(cls, reason: str) -> PolicyDecision:
        return cls(allowed=False, reason=reason)


_ALLOWED = PolicyDecision(allowed=True)


_NO_NAMES: HashTrieSet[str] = HashTrieSet()
_NO_KEYS: HashTrieSet[tuple[str, str]] = HashTrieSet()
_NO_MOMENTS: HashTrieMap[str, Any] = HashTrieMap()


class ToolPolicy(Protocol):
    """The full form. ``check(tool_name, params, context) -> str | None`` alone works, too."""

    @property
    def name(self) -> str: ...

    def check(
        self, tool: Tool[Any, Any], params: Any, *, context: ToolContext
    ) -> PolicyDecision: ...

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What a policy remembers of successful calls. A STATE slice: it follows snapshots."""

    policy_name: str
    invoked_tools: AbstractSet[str] = _NO_NAMES
    invoked_keys: AbstractSet[tuple[str, str]] = _NO_KEYS


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class CallTally:
    """What a policy counts of calls that ran. A LOG slice: a failed call stays counted."""

    policy_name: str
    calls: int = 0
    recent: Mapping[str, Any] = _NO_MOMENTS
    """Per tool, a queue of the moments at which it was called within the last minute."""


def _remembered(cls: type[Any], policy_name: str, context: ToolContext) -> Any:
    for state in context.session.read_slice(cls).all():
        if state.policy_name == policy_name:
            return state
    return cls(policy_name)


def _remember(
    cls: type[Any], policy_name: str, context: ToolContext, change: Callable[[Any], Any]
) -> None:
    """Change what a policy remembers; as a function of what it remembers, so that calls merge."""

    def changed(current: Slice[Any]) -> Slice[Any]:
        states = current.all()
        for index, state in enumerate(states):
            if state.policy_name == policy_name:
                return Slice.of((*states[:index], change(state), *states[index + 1 :]))
        return current.append(change(cls(policy_name)))

    context.session[cls].update(changed)


@dataclass(frozen=True)
class SequentialDependencyPolicy:
    """A tool may be called once all the tools it depends on have succeeded.

    >>> policy = SequentialDependencyPolicy(dependencies={"deploy": frozenset({"test", "build"})})
    """

    dependencies: Mapping[str, AbstractSet[str]]
    name: str = "sequential_dependency"

    def __post_init__(self) -> None:
        for tool, needed in self.dependencies.items():
            if isinstance(needed, str):
                raise TypeError(f"dependencies[{tool!r}] must be a set of tool names, got a string")

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        needed = self.dependencies.get(tool.name)
        if not needed:
            return _ALLOWED
        done = _remembered(PolicyState, self.name, context).invoked_tools
        missing = sorted(name for name in needed if name not in done)
        if not missing:
            return _ALLOWED
        return PolicyDecision.deny(
            f"Cannot call '{tool.name}' - missing required tools: {', '.join(missing)}\n"
            f"Call these tools first, then retry {tool.name}."
        )

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        if tool.name in _remembered(PolicyState, self.name, context).invoked_tools:
            return
        _remember(
            PolicyState,
            self.name,
            context,
            lambda state: replace(state, invoked_tools=state.invoked_tools.insert(tool.name)),
        )


@dataclass(frozen=True)
class ReadBeforeWritePolicy:
    """A file that exists may be overwritten once it has been read, or written, in this session."""

    read_tools: frozenset[str] = frozenset({"read_file"})
    write_tools: frozenset[str] = frozenset({"write_file", "edit_file"})
    path_field: str = "path"
    name: str = "read_before_write"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        if tool.name not in self.write_tools:
            return _ALLOWED
        path = self._path(params)
        if path is None:
            return PolicyDecision.deny(
                f"Cannot tell which file '{tool.name}' writes: it has no text parameter "
                f"'{self.path_field}'"
            )
        filesystem = context.filesystem
        if filesystem is not None:
            try:
                if not filesystem.exists(path):
                    return _ALLOWED
            except FilesystemError as error:
                return PolicyDecision.deny(str(error))
        known = _remembered(PolicyState, self.name, context).invoked_keys
        if ("path", self._key(path, context)) in known:
            return _ALLOWED
        return PolicyDecision.deny(f"Cannot write to {path} without reading it first")

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        if tool.name not in self.read_tools and tool.name not in self.write_tools:
            return
        path = self._path(params)
        if path is None:
            return
        key = ("path", self._key(path, context))
        if key in _remembered(PolicyState, self.name, context).invoked_keys:
            return
        _remember(
            PolicyState,
            self.name,
            context,
            lambda state: replace(state, invoked_keys=state.invoked_keys.insert(key)),
        )

    def _path(self, params: object) -> str | None:
        if isinstance(params, Mapping):
            path = cast("Mapping[str, object]", params).get(self.path_field)
        else:
            path = getattr(params, self.path_field, None)
        return path if isinstance(path, str) else None

    def _key(self, path: str, context: ToolContext) -> str:
        """Return the one spelling under which a file is known."""
        filesystem = context.filesystem
        return path if filesystem is None else filesystem.normalize(path)


@dataclass(frozen=True)
class QuotaPolicy:
    """So many calls may run in a session; failed ones count, refused ones do not."""

    max_calls: int
    name: str = "quota"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        calls = _remembered(CallTally, self.name, context).calls
        if calls < self.max_calls:
            return _ALLOWED
        return PolicyDecision.deny(f"Quota exceeded: {calls}/{self.max_calls} calls used")

    def on_start(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> None:
        _remember(
            CallTally, self.name, context, lambda tally: replace(tally, calls=tally.calls + 1)
        )


@dataclass(frozen=True)
class RateLimitPolicy:
    """Each tool may run so many times within a minute; failed calls count, refused ones do not."""

    max_calls_per_minute: int
    name: str = "rate_limit"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        tally: CallTally = _remembered(CallTally, self.name, context)
        calls = len(self._last_minute(tally, tool.name, context.session.clock.time()))
        if calls < self.max_calls_per_minute:
            return _ALLOWED
        return PolicyDecision.deny(
            f"Rate limit exceeded: {calls} calls to {tool.name} in last minute\n"
            f"Maximum: {self.max_calls_per_minute} calls per minute\n"
            f"Wait 60 seconds before retrying"
        )

    def on_start(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> None:
        now = context.session.clock.time()

        def counted(tally: CallTally) -> CallTally:
            moments = self._last_minute(tally, tool.name, now).enqueue(now)
            return replace(
                tally, recent=cast("HashTrieMap[str, Any]", tally.recent).insert(tool.name, moments)
            )

        _remember(CallTally, self.name, context, counted)

    @staticmethod
    def _last_minute(tally: CallTally, tool_name: str, now: float) -> Queue[float]:
        moments: Queue[float] = tally.recent.get(tool_name) or Queue()
        while len(moments) and moments.peek() < now - 60:
            moments = moments.dequeue()
        return moments


@dataclass(frozen=True, slots=True)
class AttachedPolicy:
    """A policy of either form as the pipeline calls it. Made once, where it is attached."""

    name: str
    policy: object
    check: Callable[..., Any]
    on_start: Callable[..., None] | None
    on_result: Callable[..., None] | None
    is_async: bool
    is_small: bool

    def ask(self, tool: Tool[Any, Any], params: object, context: ToolContext) -> Any:
        """Return the policy's verdict in its own form (or an awaitable of it)."""
        if self.is_small:
            return self.check(tool.name, params, context)
        return self.check(tool, params, context=context)

    def denial(self, verdict: object) -> str | None:
        """Return why the call is denied, or None; raise when the verdict makes no sense."""
        if isinstance(verdict, PolicyDecision):
            return None if verdict.allowed else verdict.reason or f"Denied by policy {self.name!r}"
        if self.is_small and (verdict is None or isinstance(verdict, str)):
            return verdict
        expected = "None or the reason" if self.is_small else "a PolicyDecision"
        raise TypeError(f"policy {self.name!r} must return {expected}, got {verdict!r}")


def attach(policies: Iterable[object]) -> tuple[AttachedPolicy, ...]:
    """Adapt policies of either form; refuse what is neither."""
    return tuple(_attach(policy) for policy in policies)


def _attach(policy: object) -> AttachedPolicy:
    if isinstance(policy, AttachedPolicy):
        return policy
    check = getattr(policy, "check", None)
    if isinstance(policy, type) or not callable(check):
        raise TypeError(
            f"{policy!r} is not a policy: it takes an instance with a method "
            "check(tool, params, *, context) or check(tool_name, params, context)"
        )
    context = inspect.signature(check).parameters.get("context")
    return AttachedPolicy(
        name=getattr(policy, "name", None) or type(policy).__name__,
        policy=policy,
        check=check,
        on_start=getattr(policy, "on_start", None),
        on_result=getattr(policy, "on_result", None),
        is_async=inspect.iscoroutinefunction(check),
        is_small=context is None or context.kind is not inspect.Parameter.KEYWORD_ONLY,
    )
