"""Policies: declared rules about when a tool may be called.

A policy sees every call before it runs and allows or denies it; it hears of every call that is
about to run and of every success. What it remembers lives in session slices, so that memory of
what happened is rolled back with what happened, and counts of what was tried are not.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from rpds import HashTrieMap, HashTrieSet

from weakincentives.errors import FilesystemError, PolicyDenied
from weakincentives.filesystem import Filesystem
from weakincentives.filesystem.patterns import PathPatterns
from weakincentives.filesystem.protocol import shown
from weakincentives.prompt.signatures import is_async, misfit
from weakincentives.slices import Slice, SlicePolicy, slice_policy

if TYPE_CHECKING:
    from weakincentives.prompt.tool import Tool, ToolContext
    from weakincentives.prompt.tool_result import ToolResult

__all__ = [
    "PolicyDecision",
    "PolicyState",
    "ProtectedPathsPolicy",
    "QuotaPolicy",
    "RateLimitPolicy",
    "ReadBeforeWritePolicy",
    "SequentialDependencyPolicy",
    "ToolPolicy",
]

T = TypeVar("T")
V = TypeVar("V")

_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """Whether a call may proceed, and if not, why: in words for the model."""

    allowed: bool
    reason: str | None = None
    note: str | None = None
    """Kept in the call's record, whatever was decided: who approved it, for example."""

    @classmethod
    def allow(cls) -> PolicyDecision:
        return ALLOWED

    @classmethod
    def deny(cls, reason: str) -> PolicyDecision:
        return cls(allowed=False, reason=reason)


ALLOWED = PolicyDecision(allowed=True)


class ToolPolicy(Protocol):
    """The full form. ``check(tool_name, params, context) -> str | None`` alone works, too.

    A policy may also have ``on_start(tool, params, *, context)``: told of every call that it and
    all others allowed, right before it runs, to count calls whether they succeed or not. With
    ``applies_to(tool)`` it says which tools it is ever asked about. An ``on_result`` that raises
    PolicyDenied refuses what the call did: all of it is undone.
    """

    @property
    def name(self) -> str: ...

    def check(
        self, tool: Tool[Any, Any], params: Any, *, context: ToolContext
    ) -> PolicyDecision: ...

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None: ...


# What policies remember

_NO_NAMES: HashTrieSet[str] = HashTrieSet()
_NO_KEYS: HashTrieSet[tuple[str, str]] = HashTrieSet()
_NO_MOMENTS: HashTrieMap[str, tuple[float, ...]] = HashTrieMap()


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
    recent: Mapping[str, tuple[float, ...]] = _NO_MOMENTS
    """Per tool, the moments at which it was called within the last minute."""


def _ask(cls: type[T], policy_name: str, context: ToolContext, question: Callable[[T], V]) -> V:
    """Ask about what a policy remembers. Calls that run at the same time depend on the answer
    alone: the less it tells, the more of them can be kept as they are.
    """
    return context.session.select(
        cls, lambda states: question(_remembered(cls, policy_name, states))
    )


def _remembered(cls: type[Any], policy_name: str, states: Iterable[Any]) -> Any:
    for state in states:
        if state.policy_name == policy_name:
            return state
    return cls(policy_name)


def _remember(
    cls: type[T], policy_name: str, context: ToolContext, change: Callable[[T], T]
) -> None:
    """Change what a policy remembers; as a function of what it remembers, so that calls merge."""

    def changed(current: Slice[Any]) -> Slice[Any]:
        states = current.all()
        for index, state in enumerate(states):
            if state.policy_name == policy_name:
                return current.replace(*states[:index], change(state), *states[index + 1 :])
        return current.append(change(cast("Any", cls)(policy_name)))

    context.session[cls].update(changed)


def _with(known: AbstractSet[T], item: T) -> AbstractSet[T]:
    """Return a set with one more item, sharing the rest."""
    return (known if isinstance(known, HashTrieSet) else HashTrieSet(known)).insert(item)


def _with_tool(state: PolicyState, name: str) -> PolicyState:
    if name in state.invoked_tools:
        return state
    return replace(state, invoked_tools=_with(state.invoked_tools, name))


def _with_key(state: PolicyState, key: tuple[str, str]) -> PolicyState:
    if key in state.invoked_keys:
        return state
    return replace(state, invoked_keys=_with(state.invoked_keys, key))


def _is_known(policy_name: str, item: str | tuple[str, str], context: ToolContext) -> bool:
    """Whether a success need not be noted again. Beside other calls it always must: they may take
    back, before this one is kept, what is known now.
    """
    session = context.session
    if session.tracks_reads:
        return False
    state = _remembered(PolicyState, policy_name, session.read_slice(PolicyState).all())
    return item in state.invoked_tools or item in state.invoked_keys


def remember_tool(policy_name: str, tool_name: str, context: ToolContext) -> None:
    """Note under a policy's name that a tool has succeeded."""
    _remember(PolicyState, policy_name, context, lambda state: _with_tool(state, tool_name))


# The built-in ones


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
        own = {tool: frozenset(needed) for tool, needed in self.dependencies.items()}
        object.__setattr__(self, "dependencies", own)

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        needed = self.dependencies.get(tool.name)
        if not needed:
            return ALLOWED

        def not_done(state: PolicyState) -> tuple[str, ...]:
            return tuple(sorted(name for name in needed if name not in state.invoked_tools))

        missing = _ask(PolicyState, self.name, context, not_done)
        if not missing:
            return ALLOWED
        return PolicyDecision.deny(
            f"Cannot call '{tool.name}' - missing required tools: {', '.join(missing)}\n"
            f"Call these tools first, then retry {tool.name}."
        )

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        if not _is_known(self.name, tool.name, context):
            remember_tool(self.name, tool.name, context)


@dataclass(frozen=True)
class ReadBeforeWritePolicy:
    """A file that exists may be overwritten once it has been read, or written, in this session."""

    read_tools: AbstractSet[str] = frozenset({"read_file"})
    write_tools: AbstractSet[str] = frozenset({"write_file", "edit_file"})
    path_field: str = "path"
    name: str = "read_before_write"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        if tool.name not in self.write_tools:
            return ALLOWED
        path = self._path(params)
        if path is None:
            return PolicyDecision.deny(
                f"Cannot tell which file '{tool.name}' writes: it has no text parameter "
                f"'{self.path_field}'"
            )
        filesystem = context.resources.find(Filesystem)
        try:
            key = _key(path, filesystem)
            if _ask(PolicyState, self.name, context, lambda state: key in state.invoked_keys):
                return ALLOWED
            if filesystem is not None and not _is_overwritten(path, filesystem):
                return ALLOWED
        except FilesystemError as error:
            return PolicyDecision.deny(str(error))
        return PolicyDecision.deny(f"Cannot write to {path} without reading it first")

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        if tool.name not in self.read_tools and tool.name not in self.write_tools:
            return
        path = self._path(params)
        if path is None:
            return
        try:
            key = _key(path, context.resources.find(Filesystem))
        except FilesystemError:
            return  # the tool read it in a way of its own, not from this filesystem
        if not _is_known(self.name, key, context):
            _remember(PolicyState, self.name, context, lambda state: _with_key(state, key))

    def _path(self, params: object) -> str | None:
        return _text_field(params, self.path_field)


def _text_field(params: object, name: str) -> str | None:
    if isinstance(params, Mapping):
        value = cast("Mapping[str, object]", params).get(name)
    else:
        value = getattr(params, name, None)
    return value if isinstance(value, str) else None


def _is_overwritten(path: str, filesystem: Filesystem) -> bool:
    """Whether a write would replace a file; of a directory the tool itself says that it cannot."""
    return filesystem.exists(path) and filesystem.stat(path).kind != "directory"


def _key(path: str, filesystem: Filesystem | None) -> tuple[str, str]:
    """Return what a file is known by, however its path is spelled."""
    return ("path", path if filesystem is None else filesystem.normalize(path))


# What the file tools change, by the names of their parameters.
_CHANGED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "write_file": ("path",),
    "edit_file": ("path",),
    "delete_file": ("path",),
    "move_file": ("source", "destination"),
    "copy_file": ("destination",),
}


@dataclass(frozen=True)
class ProtectedPathsPolicy:
    """Some paths stay as they are, whatever changes them: a file tool, a command, a program.

    A call that names such a path to a file tool is refused before it runs. Of every other call it
    is looked up, before it is kept, which paths it has changed; one that changed a protected one
    is undone as a whole. Reading is not refused.

    A pattern is a glob of a path from the root, such as ``config/*.yaml``; one without a slash is
    a name at any depth. A directory is protected with all that is in it, and a link with what it
    leads to.

    >>> policy = ProtectedPathsPolicy([".env", ".git", "migrations/**"])
    """

    patterns: Sequence[str]
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _CHANGED_FIELDS)
    """Of tools that are refused before they run: the parameters that name what they change."""
    name: str = "protected_paths"
    _protected: PathPatterns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_protected", PathPatterns(self.patterns))
        object.__setattr__(self, "patterns", tuple(self.patterns))

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        fields = self.fields.get(tool.name)
        filesystem = None if fields is None else context.resources.find(Filesystem)
        if fields is None or filesystem is None:
            return ALLOWED
        for each in fields:
            path = _text_field(params, each)
            try:
                normal = None if path is None else filesystem.normalize(path)
            except FilesystemError:
                continue  # the tool itself says what is wrong with it
            if normal is not None and self._protects_in(filesystem, normal):
                return PolicyDecision.deny(
                    f"Cannot change {shown(normal)}: it is protected. Leave it as it is"
                )
        return ALLOWED

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        if tool.reach == "read" or not self.patterns:
            return
        filesystem: Any = context.resources.find(Filesystem)
        if filesystem is None:
            return
        if not hasattr(filesystem, "changed_here"):
            kind = type(filesystem).__name__
            raise PolicyDenied(f"A {kind} cannot tell what was changed", policy=self.name)
        changed = filesystem.changed_here()
        touched = [path for path in changed if self._protects_in(filesystem, path)]
        if touched:
            more = f" and {len(touched) - 5} more" if len(touched) > 5 else ""
            raise PolicyDenied(
                f"'{tool.name}' changed what is protected: {', '.join(map(shown, touched[:5]))}"
                f"{more}. All that it did is undone. Leave these as they are",
                policy=self.name,
            )

    def _protects_in(self, filesystem: Any, path: str) -> bool:
        """Whether a path is protected, or what a protected one leads to through a link."""
        if self.protects(path):
            return True
        links = getattr(filesystem, "behind_links", None)
        behind = links(self.patterns) if links is not None else ()
        parts = tuple(path.split("/"))
        return any(parts[: len(each)] == each for each in behind)

    def protects(self, path: str) -> bool:
        """Whether a normalised path, or a directory that it is in, matches a pattern."""
        return self._protected.match(path)


@dataclass(frozen=True)
class QuotaPolicy:
    """So many calls may run in a session; failed ones count, refused ones do not."""

    max_calls: int
    name: str = "quota"
    tools: AbstractSet[str] = frozenset()
    """Those whose calls count, all together; every tool that it governs without any."""

    def __post_init__(self) -> None:
        if self.max_calls < 0:
            raise ValueError(f"max_calls must not be negative, got {self.max_calls}")

    def applies_to(self, tool: Tool[Any, Any]) -> bool:
        return not self.tools or tool.name in self.tools

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        def used_up(tally: CallTally) -> int | None:
            return tally.calls if tally.calls >= self.max_calls else None

        calls = _ask(CallTally, self.name, context, used_up)
        if calls is None:
            return ALLOWED
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
    tools: AbstractSet[str] = frozenset()
    """Those that it is about; every tool that it governs without any."""

    def __post_init__(self) -> None:
        if self.max_calls_per_minute < 0:
            raise ValueError(
                f"max_calls_per_minute must not be negative, got {self.max_calls_per_minute}"
            )

    def applies_to(self, tool: Tool[Any, Any]) -> bool:
        return not self.tools or tool.name in self.tools

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        now = context.session.clock.time()

        def used_up(tally: CallTally) -> int | None:
            calls = len(_last_minute(tally, tool.name, now))
            return calls if calls >= self.max_calls_per_minute else None

        calls = _ask(CallTally, self.name, context, used_up)
        if calls is None:
            return ALLOWED
        return PolicyDecision.deny(
            f"Rate limit exceeded: {calls} calls to {tool.name} in last minute\n"
            f"Maximum: {self.max_calls_per_minute} calls per minute\n"
            f"Wait 60 seconds before retrying"
        )

    def on_start(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> None:
        now = context.session.clock.time()

        def counted(tally: CallTally) -> CallTally:
            moments = (*_last_minute(tally, tool.name, now), now)
            recent = cast("HashTrieMap[str, tuple[float, ...]]", tally.recent)
            return replace(tally, recent=recent.insert(tool.name, moments))

        _remember(CallTally, self.name, context, counted)


def _last_minute(tally: CallTally, tool_name: str, now: float) -> tuple[float, ...]:
    moments = tally.recent.get(tool_name, ())
    return moments[bisect_left(moments, now - _MINUTE) :]


# How the pipeline calls them


@dataclass(frozen=True, slots=True)
class AttachedPolicy:
    """A policy of either form as the pipeline calls it. Made once, where it is attached."""

    name: str
    policy: object
    check: Callable[..., Any]
    """``check(tool, params, context=...)`` gives the verdict in the policy's own form."""
    on_start: Callable[..., None] | None
    on_result: Callable[..., None] | None
    is_async: bool
    is_small: bool
    applies_to: Callable[[Tool[Any, Any]], bool] | None = None
    asks_a_person: bool = False
    """Then calls it governs do not run beside others: one that is taken again would ask again."""

    def denial(self, verdict: object) -> str | None:
        """Return why the call is denied, or None; raise when the verdict makes no sense."""
        if isinstance(verdict, PolicyDecision):
            if verdict.allowed is True:
                return None
            return verdict.reason or f"Denied by policy '{self.name}'"
        if self.is_small and verdict is None:
            return None
        if self.is_small and isinstance(verdict, str):
            return verdict or f"Denied by policy '{self.name}'"
        expected = "None or the reason" if self.is_small else "a PolicyDecision"
        raise TypeError(f"policy '{self.name}' must return {expected}, got {verdict!r}")


def attach(policies: Iterable[object]) -> tuple[AttachedPolicy, ...]:
    """Adapt policies of either form; refuse what is neither."""
    return tuple(_attach(policy) for policy in policies)


def _attach(policy: object) -> AttachedPolicy:
    if isinstance(policy, AttachedPolicy):
        return policy
    check = _method(policy, "check")
    if isinstance(policy, type) or check is None:
        raise TypeError(
            f"{policy!r} is not a policy: it takes an instance with a method "
            "check(tool, params, *, context) or check(tool_name, params, context)"
        )
    on_start, on_result = _method(policy, "on_start"), _method(policy, "on_result")
    is_small = _takes_context_by_position(check)
    problems = {
        "check": misfit(check, 1, 2, 3) if is_small else misfit(check, 1, 2, context=3),
        "on_start": on_start and misfit(on_start, 1, 2, context=3),
        "on_result": on_result and misfit(on_result, 1, 2, 3, context=4),
    }
    for name, problem in problems.items():
        if problem:
            raise TypeError(f"the method {name} of policy {policy!r} does not fit: {problem}")
    for listener in (on_start, on_result):
        if listener is not None and is_async(listener):
            raise TypeError(f"policy {policy!r}: only check may be async, {listener!r} may not")
    return AttachedPolicy(
        name=getattr(policy, "name", None) or type(policy).__name__,
        policy=policy,
        check=_by_name(check) if is_small else check,
        on_start=on_start,
        on_result=on_result,
        is_async=is_async(check),
        is_small=is_small,
        applies_to=_method(policy, "applies_to"),
        asks_a_person=getattr(policy, "asks_a_person", False) is True,
    )


def _by_name(check: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt the small form to how the pipeline asks."""

    def adapted(tool: Tool[Any, Any], params: object, *, context: ToolContext) -> Any:
        return check(tool.name, params, context)

    return adapted


def _method(policy: object, name: str) -> Callable[..., Any] | None:
    method = getattr(policy, name, None)
    return method if callable(method) else None


def _takes_context_by_position(check: Callable[..., Any]) -> bool:
    parameters = inspect.signature(check).parameters
    context = parameters.get("context")
    if context is not None:
        return context.kind is not context.KEYWORD_ONLY
    return all(each.kind is not each.VAR_KEYWORD for each in parameters.values())
