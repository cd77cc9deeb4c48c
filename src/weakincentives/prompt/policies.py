"""Policies: declared rules about when a tool may be called.

A policy sees every call before it runs and allows or denies it; it hears of every call that is
about to run and of every success. What it remembers lives in session slices, so that memory of
what happened is rolled back with what happened, and counts of what was tried are not.
"""

from __future__ import annotations

import hashlib
import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from rpds import HashTrieMap, HashTrieSet

from weakincentives.errors import FilesystemError, PolicyDenied
from weakincentives.filesystem import Filesystem
from weakincentives.filesystem.patterns import PathPatterns
from weakincentives.filesystem.protocol import shown
from weakincentives.prompt.signatures import is_async, misfit
from weakincentives.slices import Slice, SlicePolicy, slice_policy

if TYPE_CHECKING:
    from weakincentives.prompt.context import ToolContext
    from weakincentives.prompt.tool import Tool
    from weakincentives.session import Session
    from weakincentives.tool_result import ToolResult

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
_NO_CONTENTS: HashTrieMap[str, str] = HashTrieMap()
_NO_MOMENTS: HashTrieMap[str, tuple[float, ...]] = HashTrieMap()


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What a policy remembers of successful calls. A STATE slice: it follows snapshots."""

    policy_name: str
    invoked_tools: AbstractSet[str] = _NO_NAMES
    invoked_keys: AbstractSet[tuple[str, str]] = _NO_KEYS
    """The tool, and what it was about: a path, for example."""
    contents: Mapping[str, str] = _NO_CONTENTS
    """By path, the digest of what a file held when it was last read or written."""


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


def _knows(policy_name: str, context: ToolContext, question: Callable[[PolicyState], bool]) -> bool:
    """Whether a success need not be noted again. Beside other calls it always must: they may take
    back, before this one is kept, what is known now.
    """
    session = context.session
    if session.tracks_reads:
        return False
    return question(_remembered(PolicyState, policy_name, session.read_slice(PolicyState).all()))


@dataclass(frozen=True, slots=True)
class CompletedTools:
    """The tools that have succeeded in a session, under whichever prompt. A STATE slice."""

    names: AbstractSet[str] = _NO_NAMES


_NONE_COMPLETED = CompletedTools()


def note_success(tool_name: str, session: Session) -> None:
    """Note that a tool has succeeded, whoever may want to know it later."""
    if not session.tracks_reads:
        noted = session.read_slice(CompletedTools).latest()
        if noted is not None and tool_name in noted.names:
            return

    def added(current: Slice[CompletedTools]) -> Slice[CompletedTools]:
        names = (current.latest() or _NONE_COMPLETED).names
        return current.replace(CompletedTools(_with(names, tool_name)))

    session[CompletedTools].update(added)


def missing_tools(needed: Iterable[str], context: ToolContext) -> tuple[str, ...]:
    """Return those of the tools that have not succeeded in the session, sorted."""

    def not_done(noted: Slice[CompletedTools]) -> tuple[str, ...]:
        done = (noted.latest() or _NONE_COMPLETED).names
        return tuple(sorted(name for name in needed if name not in done))

    return context.session.select(CompletedTools, not_done)


def content_digest(data: bytes) -> str:
    """Return what the content of a file is known by."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def is_seen(path: str, context: ToolContext) -> bool:
    """Whether a policy has noted what a file holds now: the model knows what it replaces."""
    seen = context.session.select(
        PolicyState, lambda states: tuple(s.contents[path] for s in states if path in s.contents)
    )
    return bool(seen) and _digest(path, context.filesystem) in seen


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

        missing = missing_tools(needed, context)
        if missing:  # unless it was noted for this policy alone, by hand

            def not_done(state: PolicyState) -> tuple[str, ...]:
                return tuple(name for name in missing if name not in state.invoked_tools)

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
        if not _knows(self.name, context, lambda state: tool.name in state.invoked_tools):
            _remember(PolicyState, self.name, context, lambda state: _with_tool(state, tool.name))


@dataclass(frozen=True)
class ReadBeforeWritePolicy:
    """A file that exists may be replaced once the model knows what it holds.

    It knows a file that it has read or written in this session, as long as nobody else has changed
    it since. A file that it copies or moves is known at its new place as at the old one.
    """

    read_tools: AbstractSet[str] = frozenset({"read_file"})
    write_tools: AbstractSet[str] = frozenset({"write_file", "edit_file"})
    path_field: str = "path"
    transfer_tools: AbstractSet[str] = frozenset({"copy_file", "move_file"})
    """Those that put a ``source`` in the place of a ``destination``."""
    name: str = "read_before_write"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        is_transfer = tool.name in self.transfer_tools
        if not is_transfer and tool.name not in self.write_tools:
            return ALLOWED
        if is_transfer and _field(params, "overwrite") is False:
            return ALLOWED  # it replaces nothing
        named = "destination" if is_transfer else self.path_field
        path = _text_field(params, named)
        if path is None:
            return PolicyDecision.deny(
                f"Cannot tell which file '{tool.name}' writes: it has no text parameter '{named}'"
            )
        filesystem = context.resources.find(Filesystem)
        try:
            problem = (
                self._unread(path, context)
                if filesystem is None
                else self._unseen(path, filesystem, context, replaces_directories=is_transfer)
            )
        except FilesystemError as error:
            return PolicyDecision.deny(str(error))
        return ALLOWED if problem is None else PolicyDecision.deny(problem)

    def _unread(self, path: str, context: ToolContext) -> str | None:
        """Say what keeps a path from being written where nobody can tell what it holds."""
        tools = (*self.read_tools, *self.write_tools)

        def is_noted(state: PolicyState) -> bool:
            return any((tool, path) in state.invoked_keys for tool in tools)

        return None if _ask(PolicyState, self.name, context, is_noted) else _unread(path)

    def _unseen(
        self,
        path: str,
        filesystem: Filesystem,
        context: ToolContext,
        *,
        replaces_directories: bool,
    ) -> str | None:
        """Say what would be replaced that the model does not know."""
        if self._is_known(path, filesystem, context):  # the usual case, with one look at the file
            return None
        if not filesystem.exists(path):
            return None
        if filesystem.stat(path).kind != "directory":
            return self._unseen_file(path, filesystem, context)
        if not replaces_directories:
            return None  # of a directory the tool itself says that it cannot be written
        for each in filesystem.glob("**/*", path):
            if self._unseen_file(each, filesystem, context) is not None:
                return f"Cannot replace {path}: {shown(each)} in it was not read"
        return None

    def _is_known(self, path: str, filesystem: Filesystem, context: ToolContext) -> bool:
        key = filesystem.normalize(path)
        seen = _ask(PolicyState, self.name, context, lambda state: state.contents.get(key))
        try:
            return seen is not None and seen == _digest(key, filesystem)
        except FilesystemError:
            return False  # it is gone, or a directory by now

    def _unseen_file(self, path: str, filesystem: Filesystem, context: ToolContext) -> str | None:
        key = filesystem.normalize(path)
        seen = _ask(PolicyState, self.name, context, lambda state: state.contents.get(key))
        if seen is None:
            return _unread(path)
        if seen == _digest(key, filesystem):
            return None
        return (
            f"Cannot write to {path}: it has changed since it was last read or written here\n"
            "Read it again, then retry"
        )

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        if tool.name in self.transfer_tools:
            self._note_transfer(params, context)
        elif tool.name in self.read_tools or tool.name in self.write_tools:
            path = _text_field(params, self.path_field)
            if path is not None:
                self._note(tool.name, path, result.value, context)

    def _note(self, tool_name: str, path: str, value: object, context: ToolContext) -> None:
        filesystem = context.resources.find(Filesystem)
        digest = None
        if filesystem is not None:
            try:
                path = filesystem.normalize(path)
                # What the model was shown, where the tool says so: the file may be another by now.
                digest = getattr(value, "digest", None) or _digest(path, filesystem)
            except FilesystemError:
                return  # the tool read it in a way of its own, not from this filesystem
        key = (tool_name, path)

        def is_noted(state: PolicyState) -> bool:
            return key in state.invoked_keys and state.contents.get(path) == digest

        def noted(state: PolicyState) -> PolicyState:
            keys = _with(state.invoked_keys, key)
            seen = {} if digest is None else {path: digest}
            return replace(state, invoked_keys=keys, contents=_updated(state.contents, seen))

        if not _knows(self.name, context, is_noted):
            _remember(PolicyState, self.name, context, noted)

    def _note_transfer(self, params: object, context: ToolContext) -> None:
        paths = _text_field(params, "source"), _text_field(params, "destination")
        filesystem = context.resources.find(Filesystem)
        if filesystem is None or None in paths:
            return
        source, destination = (filesystem.normalize(cast("str", path)) for path in paths)

        def moved(state: PolicyState) -> PolicyState:
            seen = {
                destination + path[len(source) :]: digest
                for path, digest in state.contents.items()
                if path == source or path.startswith(f"{source}/")
            }
            return replace(state, contents=_updated(state.contents, seen)) if seen else state

        _remember(PolicyState, self.name, context, moved)


def _unread(path: str) -> str:
    return f"Cannot write to {path} without reading it first"


def _digest(path: str, filesystem: Filesystem) -> str:
    return content_digest(filesystem.read_bytes(path))


def _updated(known: Mapping[str, str], more: Mapping[str, str]) -> Mapping[str, str]:
    """Return a map with more entries, sharing the rest."""
    own = known if isinstance(known, HashTrieMap) else HashTrieMap(known)
    return own.update(more)


def _text_field(params: object, name: str) -> str | None:
    value = _field(params, name)
    return value if isinstance(value, str) else None


def _field(params: object, name: str) -> object:
    if isinstance(params, Mapping):
        return cast("Mapping[str, object]", params).get(name)
    return getattr(params, name, None)


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


class _CountsCalls:
    """What the policies have in common that count calls: of some tools, or of all they govern."""

    name: str
    tools: AbstractSet[str]

    def __post_init__(self) -> None:
        field = fields(cast("Any", self))[0].name
        if getattr(self, field) < 0:
            raise ValueError(f"{field} must not be negative, got {getattr(self, field)}")

    def applies_to(self, tool: Tool[Any, Any]) -> bool:
        return not self.tools or tool.name in self.tools


@dataclass(frozen=True)
class QuotaPolicy(_CountsCalls):
    """So many calls may run in a session; failed ones count, refused ones do not."""

    max_calls: int
    name: str = "quota"
    tools: AbstractSet[str] = frozenset()
    """Those whose calls count, all together; every tool that it governs without any."""

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        def used_up(tally: CallTally) -> int | None:
            return tally.calls if tally.calls >= self.max_calls else None

        calls = _ask(CallTally, self.name, context, used_up)
        if calls is None:
            return ALLOWED
        return PolicyDecision.deny(f"Quota exceeded: {calls}/{self.max_calls} calls used")

    def on_start(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> None:
        def counted(tally: CallTally) -> CallTally:
            return replace(tally, calls=tally.calls + 1)

        _remember(CallTally, self.name, context, counted)


@dataclass(frozen=True)
class RateLimitPolicy(_CountsCalls):
    """Each tool may run so many times within a minute; failed calls count, refused ones do not."""

    max_calls_per_minute: int
    name: str = "rate_limit"
    tools: AbstractSet[str] = frozenset()
    """Those that it is about; every tool that it governs without any."""

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
