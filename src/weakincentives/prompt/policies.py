"""Policies: declared rules about when a tool may be called.

A policy allows or denies every call before it runs, and is notified when a call starts and when it
succeeds. Its state lives in session slices: knowledge of successes is rolled back with them, counts
of attempts are not.
"""

from __future__ import annotations

import hashlib
import inspect
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast, get_origin

from rpds import HashTrieMap, HashTrieSet

from weakincentives.core.named import Named, named
from weakincentives.errors import FilesystemError, PolicyDenied
from weakincentives.filesystem import Filesystem
from weakincentives.filesystem.paths import shown
from weakincentives.filesystem.patterns import PathPatterns
from weakincentives.prompt import refusals
from weakincentives.prompt.signatures import hints_of, is_async, misfit
from weakincentives.session.slices import Slice, SlicePolicy, slice_policy

if TYPE_CHECKING:
    from weakincentives.prompt.context import ToolContext
    from weakincentives.prompt.tool import Tool
    from weakincentives.session.session import Session
    from weakincentives.tool_result import ToolResult

T = TypeVar("T")
V = TypeVar("V")

_MINUTE = 60.0
_CHANGED = (
    "Cannot {do} {path}: it has changed since it was last read or written here\n"
    "Read it again, then retry"
)


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """Whether a call may proceed, and if not, why: in words for the model."""

    allowed: bool
    reason: str | None = None
    note: str | None = None
    """Stored in the call's record, allowed or not: who approved it, for example."""
    arguments: Mapping[str, Any] | None = None
    """Of an allowed call: run it with these instead. The other policies check them again."""

    @classmethod
    def allow(cls) -> PolicyDecision:
        return ALLOWED

    @classmethod
    def deny(cls, reason: str) -> PolicyDecision:
        return cls(allowed=False, reason=reason)


ALLOWED = PolicyDecision(allowed=True)


class ToolPolicy(Protocol):
    """The full form. ``check(tool_name, params, context) -> str | None`` alone works, too.

    The small form is called with those of ``tool_name``, ``params`` and ``context`` that it names.

    A policy may also have ``on_start(tool, params, *, context)``, called right before an allowed
    call runs, to count attempts; and ``applies_to(tool)``, which limits the tools it governs. An
    ``on_start`` that raises PolicyDenied denies the call: nothing runs. An ``on_result`` that
    raises it undoes the whole call; a text that it returns is added to the result's message, for
    the model.

    ``check`` is called again before the handler runs if a person was asked meanwhile, so it must
    not count. A policy that is about certain tools names them in ``governs``, and tools that it
    only refers to in ``refers_to``: a name that is not offered is then refused where the policy is
    attached.
    """

    @property
    def name(self) -> str: ...

    def check(
        self, tool: Tool[Any, Any], params: Any, *, context: ToolContext
    ) -> PolicyDecision: ...

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> str | None: ...


class _FullCheck(Protocol):
    def check(
        self, tool: Tool[Any, Any], params: Any, /, *, context: ToolContext
    ) -> PolicyDecision | Awaitable[PolicyDecision]: ...


class _SmallCheck(Protocol):
    def check(
        self, *, tool_name: str, params: Any, context: ToolContext
    ) -> str | PolicyDecision | Awaitable[str | PolicyDecision | None] | None: ...


AnyPolicy = ToolPolicy | _FullCheck | _SmallCheck
"""What ``policies=`` takes: a ToolPolicy, or any object with a ``check`` of either form."""


# The tools that a policy names

RUNTIME_TOOLS = frozenset({"open_sections", "read_section", "read_result"})
"""Tools that we add where they are needed: the policies of a prompt govern them, too."""


class _IfOffered(str):
    """The name of a tool that may be missing."""

    __slots__ = ()


def if_offered(tool_name: str) -> str:
    """Return the name of a tool for a policy that may be attached where nothing offers the tool.

    Any other name that is not offered is refused: a policy about it would silently never apply.

    >>> policy = QuotaPolicy(3, tools={"search", if_offered("web_search")})
    """
    return _IfOffered(tool_name)


def tool_names(what: str, given: Iterable[str]) -> frozenset[str]:
    """Return the names of tools as providers take them."""
    if isinstance(given, str):
        raise TypeError(f"{what} must be a set of tool names, got a string")
    return frozenset(map(_wire_name, given))


def _wire_name(name: str) -> str:
    wire = name.replace(":", "__")
    return _IfOffered(wire) if isinstance(name, _IfOffered) else wire


# State


_NO_NAMES: HashTrieSet[str] = HashTrieSet()
_NO_KEYS: HashTrieSet[tuple[str, str]] = HashTrieSet()
_NO_CONTENTS: HashTrieMap[str, str] = HashTrieMap()
_NO_TIMES: HashTrieMap[str, tuple[float, ...]] = HashTrieMap()


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What a policy knows about successful calls. A STATE slice: it follows snapshots."""

    policy_name: str
    invoked_tools: AbstractSet[str] = _NO_NAMES
    invoked_keys: AbstractSet[tuple[str, str]] = _NO_KEYS
    """Pairs of a tool and its subject: a path, for example."""


@dataclass(frozen=True, slots=True)
class KnownFiles:
    """The files whose content the model knows, for a policy. A STATE slice."""

    policy_name: str
    contents: Mapping[str, str] = _NO_CONTENTS
    """By path, the digest of a file when it was last read or written."""
    left: Mapping[str, str] = _NO_CONTENTS
    """By path, the digest of such a file after a command of the agent changed it."""

    def having(self, contents: Mapping[str, str]) -> KnownFiles:
        """Return it with more files, or with what has become of them."""
        return KnownFiles(self.policy_name, _updated(self.contents, contents), self.left)


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class CallTally:
    """The calls that ran, as a policy counts them. A LOG slice: a failed call stays counted."""

    policy_name: str
    calls: int = 0
    recent: Mapping[str, tuple[float, ...]] = _NO_TIMES
    """By tool, the times of its calls within the last minute."""


@dataclass(frozen=True, slots=True)
class CompletedTools:
    """The tools that have succeeded in a session, under any prompt. A STATE slice."""

    names: AbstractSet[str] = _NO_NAMES


_NONE_COMPLETED = CompletedTools()


class _Remembers:
    """Base of the policies that keep state in the session, under their name."""

    name: str
    _state: ClassVar[type[Any]] = PolicyState

    def _ask(
        self, context: ToolContext, question: Callable[[Any], V], kind: type[Any] | None = None
    ) -> V:
        """Return the answer of ``question(state)``.

        Concurrent calls depend on the answer alone: the less it tells, the fewer are re-run.
        """
        kind = kind or self._state
        return context.session.select(kind, lambda states: question(self._mine(states, kind)))

    def _remember(
        self, context: ToolContext, change: Callable[[Any], Any], kind: type[Any] | None = None
    ) -> None:
        """Replace the state by ``change(state)``, as a function, so that concurrent calls merge."""
        kind = kind or self._state

        def changed(current: Slice[Any]) -> Slice[Any]:
            states = current.all()
            for index, state in enumerate(states):
                if state.policy_name == self.name:
                    return current.replace(*states[:index], change(state), *states[index + 1 :])
            return current.append(change(kind(self.name)))

        context.session[kind].update(changed)

    def _noted(self, context: ToolContext, kind: type[Any] | None = None) -> Any:
        """Return the state if there is one: most often it has the note that is to be made.

        None in a concurrent call, which always writes: what is known now may be rolled back before
        it commits.
        """
        if not context.session.tracks_reads:
            for state in context.session.read_slice(kind or self._state).all():
                if state.policy_name == self.name:
                    return state
        return None

    def _mine(self, states: Slice[Any], kind: type[Any]) -> Any:
        for state in states.all():
            if state.policy_name == self.name:
                return state
        return kind(self.name)


def _with(known: AbstractSet[T], item: T) -> AbstractSet[T]:
    return (known if isinstance(known, HashTrieSet) else HashTrieSet(known)).insert(item)


def _updated(known: Mapping[str, T], more: Mapping[str, T]) -> Mapping[str, T]:
    return (known if isinstance(known, HashTrieMap) else HashTrieMap(known)).update(more)


def note_success(tool_name: str, session: Session) -> None:
    """Note that a tool has succeeded; dependencies may ask later."""
    if not session.tracks_reads:
        noted = session.read_slice(CompletedTools).latest()
        if noted is not None and tool_name in noted.names:
            return

    def added(current: Slice[CompletedTools]) -> Slice[CompletedTools]:
        names = (current.latest() or _NONE_COMPLETED).names
        return current.replace(CompletedTools(_with(names, tool_name)))

    session[CompletedTools].update(added)


def missing_tools(needed: Iterable[str], context: ToolContext) -> tuple[str, ...]:
    """Return the needed tools that have not succeeded in the session, sorted."""

    def not_done(noted: Slice[CompletedTools]) -> tuple[str, ...]:
        done = (noted.latest() or _NONE_COMPLETED).names
        return tuple(sorted(filterfalse(done.__contains__, needed)))

    return context.session.select(CompletedTools, not_done)


def content_digest(data: bytes) -> str:
    """Return the digest that ``KnownFiles.contents`` holds for a file."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def is_seen(path: str, context: ToolContext) -> bool:
    """Whether a policy knows the present content of a file: the model has read or written it."""
    seen = context.session.select(
        KnownFiles, lambda known: tuple(k.contents[path] for k in known if path in k.contents)
    )
    return bool(seen) and _digest(path, context.filesystem) in seen


def _digest(path: str, filesystem: Filesystem) -> str | None:
    try:
        return content_digest(filesystem.read_bytes(path))
    except FilesystemError:
        return None  # there is no such file


# The built-in policies


@dataclass(frozen=True)
class SequentialDependencyPolicy(_Remembers):
    """A tool may be called once all the tools it depends on have succeeded.

    >>> policy = SequentialDependencyPolicy(dependencies={"deploy": frozenset({"test", "build"})})
    """

    dependencies: Mapping[str, AbstractSet[str]]
    name: str = "sequential_dependency"

    def __post_init__(self) -> None:
        own = {
            _wire_name(tool): tool_names(f"dependencies[{tool!r}]", needed)
            for tool, needed in self.dependencies.items()
        }
        object.__setattr__(self, "dependencies", own)

    @property
    def governs(self) -> AbstractSet[str]:
        return self.dependencies.keys()

    @property
    def refers_to(self) -> AbstractSet[str]:
        return frozenset(name for needed in self.dependencies.values() for name in needed)

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        needed = self.dependencies.get(tool.name)
        missing = missing_tools(needed, context) if needed else ()
        if missing:  # PolicyState may hold more: a test or a loop can seed it
            missing = self._ask(
                context,
                lambda state: tuple(each for each in missing if each not in state.invoked_tools),
            )
        if not missing:
            return ALLOWED
        return PolicyDecision.deny(
            f"Cannot call '{tool.name}' - missing required tools: {', '.join(missing)}\n"
            f"Call these tools first, then retry {tool.name}."
        )

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        noted = self._noted(context)
        if noted is not None and tool.name in noted.invoked_tools:
            return
        self._remember(
            context,
            lambda state: replace(state, invoked_tools=_with(state.invoked_tools, tool.name)),
        )


@dataclass(frozen=True)
class ReadBeforeWritePolicy(_Remembers):
    """A file may be replaced once the model knows its content.

    The model knows a file that it has read or written in this session, until someone else changes
    it. A file that it copies or moves is known at its new path, too. A file that it knew and that
    someone else has changed must be read again before it is deleted or moved, too. A command may
    change any file, but the model is told if someone else had changed it.
    """

    read_tools: AbstractSet[str] = frozenset({"read_file"})
    write_tools: AbstractSet[str] = frozenset({"write_file", "edit_file"})
    path_field: str = "path"
    transfer_tools: AbstractSet[str] = frozenset({"copy_file", "move_file"})
    """Tools that replace a ``destination`` by a ``source``."""
    name: str = "read_before_write"
    removal_tools: AbstractSet[str] = frozenset({"delete_file", "move_file"})
    """Tools that remove a file, or the ``source`` of a transfer."""

    def __post_init__(self) -> None:
        for what in ("read_tools", "write_tools", "transfer_tools", "removal_tools"):
            object.__setattr__(self, what, tool_names(what, getattr(self, what)))

    @property
    def governs(self) -> AbstractSet[str]:
        named = (*self.write_tools, *self.transfer_tools, *self.removal_tools)
        return frozenset(name for name in named if name not in _FILE_TOOLS)

    @property
    def refers_to(self) -> AbstractSet[str]:
        return self.read_tools - _FILE_TOOLS

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        name, problem = tool.name, None
        try:
            if name in self.removal_tools:
                problem = self._removal_problem(name, params, context)
            if problem is None and (name in self.write_tools or name in self.transfer_tools):
                problem = self._write_problem(name, params, context)
        except FilesystemError as error:
            problem = str(error)
        return ALLOWED if problem is None else PolicyDecision.deny(problem)

    def _removal_problem(self, name: str, params: Any, context: ToolContext) -> str | None:
        is_transfer = name in self.transfer_tools
        path = _field(params, "source" if is_transfer else self.path_field, str)
        files = context.resources.find(Filesystem)
        if path is None or files is None:
            return None
        key = files.normalize(path)
        below = f"{key}/".removeprefix("./")

        def known(files: KnownFiles) -> tuple[tuple[str, str, str | None], ...]:
            return tuple(
                (each, digest, files.left.get(each))
                for each, digest in files.contents.items()
                if each == key or each.startswith(below)
            )

        for each, *digests in self._ask(context, known, KnownFiles):
            now = _digest(each, files)
            if now is not None and now not in digests:
                do = "move" if is_transfer else "delete"
                return _CHANGED.format(do=do, path=path if each == key else shown(each))
        return None

    def _write_problem(self, name: str, params: Any, context: ToolContext) -> str | None:
        is_transfer = name in self.transfer_tools
        if is_transfer and _field(params, "overwrite", bool) is False:
            return None
        named = "destination" if is_transfer else self.path_field
        path = _field(params, named, str)
        if path is None:
            return f"Cannot tell which file '{name}' writes: it has no text parameter '{named}'"
        return self._problem(path, context, replaces_directories=is_transfer)

    def _problem(
        self, path: str, context: ToolContext, *, replaces_directories: bool = False
    ) -> str | None:
        unread = f"Cannot write to {path} without reading it first"
        files = context.resources.find(Filesystem)
        if files is None:  # the content cannot be compared
            keys = [(tool, path) for tool in (*self.read_tools, *self.write_tools)]
            is_noted = self._ask(context, lambda state: any(k in state.invoked_keys for k in keys))
            return None if is_noted else unread
        key = files.normalize(path)
        seen = self._ask(context, lambda known: known.contents.get(key), KnownFiles)
        if seen is not None and seen == _digest(key, files):
            return None
        if not files.exists(key):
            return None
        if files.stat(key).kind != "directory":
            return unread if seen is None else _CHANGED.format(do="write to", path=path)
        if replaces_directories:  # other tools refuse a directory themselves
            for each in files.glob("**/*", key):
                if self._problem(each, context) is not None:
                    return f"Cannot replace {path}: {shown(each)} in it was not read"
        return None

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> str | None:
        name, told = tool.name, None
        is_transfer = name in self.transfer_tools
        replaces = is_transfer or name in self.write_tools
        is_api = tool.writes == "api"
        if is_api and not (replaces or name in self.read_tools or name in self.removal_tools):
            return None
        files = context.resources.find(Filesystem)
        path = _field(params, "destination" if is_transfer else self.path_field, str)
        if path is not None and files is not None:
            try:
                path = files.normalize(path)
            except FilesystemError:
                path = None  # the tool read it elsewhere, not in this filesystem
        # The merge of a concurrent call finds what others have changed meanwhile.
        if files is not None and tool.reach != "read" and not context.session.tracks_reads:
            if not is_api:
                told = self._note_command(files, context)
            elif replaces or name in self.removal_tools:
                # Someone may have changed a file between the check and the call's change.
                target = path if replaces else None
                others, _ = self._replaced(files, context, target, meanwhile=True)
                if others:
                    denied = _CHANGED.format(do="replace", path=shown(others[0]))
                    raise PolicyDenied(denied, policy=self.name)
        if path is not None and is_transfer:
            self._note_transfer(name, params, path, files, context)
        elif path is not None and (replaces or name in self.read_tools):
            self._note(name, path, result.value, files, context)
        return told

    def _note_command(self, files: Filesystem, context: ToolContext) -> str | None:
        """Note what a command has left; return what to tell the model if it replaced a change."""
        others, replaced = self._replaced(files, context)
        digests = {path: _digest(path, files) for path in replaced}
        left = {path: digest for path, digest in digests.items() if digest is not None}
        if left:
            self._remember(
                context, lambda known: replace(known, left=_updated(known.left, left)), KnownFiles
            )
        if not others:
            return None
        names = ", ".join(map(shown, others[:5])) + (" and more" if len(others) > 5 else "")
        return (
            f"Note: someone else had changed {names} since you last read or wrote it, before this "
            "call changed it, too. Read it again"
        )

    def _replaced(
        self,
        files: Filesystem,
        context: ToolContext,
        target: str | None = None,
        *,
        meanwhile: bool = False,
    ) -> tuple[list[str], list[str]]:
        """Return the known files that the call replaced: those that others had changed, and all."""
        session = context.session

        def mine() -> KnownFiles:
            return self._mine(session.read_slice(KnownFiles), KnownFiles)

        def is_known(path: str) -> bool:
            return path == target or path in mine().contents

        found = files.replaced_here(is_known, meanwhile=meanwhile)
        if not found:
            return [], []
        known = mine()
        others = [
            path
            for path, content in found
            if content_digest(content) not in (known.contents.get(path), known.left.get(path))
        ]
        return others, [path for path, _ in found]

    def _note(
        self,
        tool_name: str,
        path: str,
        value: object,
        files: Filesystem | None,
        context: ToolContext,
    ) -> None:
        if files is not None:
            # What the model was shown, if the tool says so: the file may have changed by now.
            digest = getattr(value, "digest", None) or _digest(path, files)
            if digest is None:
                return
            known, read = self._noted(context, KnownFiles), {path: digest}
            if known is None or known.contents.get(path) != digest:
                self._remember(context, lambda known: known.having(read), KnownFiles)
        self._note_key(tool_name, path, context)

    def _note_key(self, tool_name: str, path: str, context: ToolContext) -> None:
        key, noted = (tool_name, path), self._noted(context)
        if noted is None or key not in noted.invoked_keys:

            def added(state: PolicyState) -> PolicyState:
                tools = state.invoked_tools
                if tool_name not in tools:
                    tools = _with(tools, tool_name)
                return PolicyState(self.name, tools, _with(state.invoked_keys, key))

            self._remember(context, added)

    def _note_transfer(
        self,
        tool_name: str,
        params: object,
        new: str,
        files: Filesystem | None,
        context: ToolContext,
    ) -> None:
        self._note_key(tool_name, new, context)
        source = _field(params, "source", str)
        if files is None or source is None:
            return
        old = files.normalize(source)

        def moved(known: KnownFiles) -> KnownFiles:
            seen = {
                new + path[len(old) :]: digest
                for path, digest in known.contents.items()
                if path == old or path.startswith(f"{old}/")
            }
            return known.having(seen) if seen else known

        self._remember(context, moved, KnownFiles)


def _field(params: Any, name: str, kind: type[T]) -> T | None:
    """Return a parameter if it is of this type."""
    value: Any = (
        cast("Any", params).get(name) if isinstance(params, dict) else getattr(params, name, None)
    )
    return value if isinstance(value, kind) else None


_FILE_TOOLS = frozenset(
    {"read_file", "write_file", "edit_file", "copy_file", "move_file", "delete_file"}
)
"""Our own: a policy is about them by default, whichever of them are offered."""

_CHANGED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "write_file": ("path",),
    "edit_file": ("path",),
    "delete_file": ("path",),
    "move_file": ("source", "destination"),
    "copy_file": ("destination",),
}
"""Of each file tool, the parameters that name what it changes."""


@dataclass(frozen=True)
class ProtectedPathsPolicy:
    """No call may change these paths, whether by a file tool, a command or a program.

    A call that names such a path to a file tool is refused before it runs. Any other call that
    has changed a protected path is undone as a whole before it commits. Reading is allowed.

    A pattern is a glob of a path from the root, such as ``config/*.yaml``; one without a slash is
    a name at any depth. A directory is protected with everything in it, and a link with its target.

    >>> policy = ProtectedPathsPolicy([".env", ".git", "migrations/**"])
    """

    patterns: Sequence[str]
    name: str = "protected_paths"
    _protected: PathPatterns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_protected", PathPatterns(self.patterns))
        object.__setattr__(self, "patterns", tuple(self.patterns))

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        fields = _CHANGED_FIELDS.get(tool.name, ())
        files = context.resources.find(Filesystem) if fields else None
        if files is None:
            return ALLOWED
        for path in (_field(params, each, str) for each in fields):
            try:
                normal = None if path is None else files.normalize(path)
            except FilesystemError:
                continue  # the tool itself reports the problem
            if normal is not None and self._protects_in(files, normal):
                return PolicyDecision.deny(
                    f"Cannot change {shown(normal)}: it is protected. Leave it as it is"
                )
        return ALLOWED

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        if tool.reach == "read" or not self.patterns:
            return
        files: Any = context.resources.find(Filesystem)
        if files is None:
            return
        if not hasattr(files, "changed_here"):
            kind = type(files).__name__
            raise PolicyDenied(f"A {kind} cannot tell what was changed", policy=self.name)
        touched = [path for path in files.changed_here() if self._protects_in(files, path)]
        if touched:
            more = f" and {len(touched) - 5} more" if len(touched) > 5 else ""
            raise PolicyDenied(
                f"'{tool.name}' changed protected paths: {', '.join(map(shown, touched[:5]))}"
                f"{more}. The whole call is undone. Leave these paths as they are",
                policy=self.name,
            )

    def _protects_in(self, files: Any, path: str) -> bool:
        """Whether a path is protected, or is the target of a protected link."""
        here = self._in(files)
        if here.protects(path):
            return True
        links = getattr(files, "behind_links", None)
        behind = links(here.patterns) if links is not None else ()
        parts = tuple(path.split("/"))
        return any(parts[: len(each)] == each for each in behind)

    def _in(self, files: Filesystem) -> ProtectedPathsPolicy:
        """Return the policy with patterns that begin at the root of these files.

        It may be spelled as for the file tools: `/workspace/a`, or the path of the directory.
        """
        spelled = tuple(_from_root(each, files) for each in self.patterns)
        return self if spelled == self.patterns else replace(self, patterns=spelled)

    def protects(self, path: str) -> bool:
        """Whether a normalised path, or a directory above it, matches a pattern."""
        return self._protected.match(path)


def _from_root(pattern: str, files: Filesystem) -> str:
    if pattern.startswith("/"):
        with suppress(FilesystemError):  # it begins at the root already
            normal = files.normalize(pattern)
            return "/**" if normal == "." else f"/{normal}"
    return pattern


class _CountsCalls(_Remembers):
    """Base of the policies that count calls of some tools, or of all tools they govern."""

    tools: AbstractSet[str]
    _state: ClassVar[type[Any]] = CallTally

    def __post_init__(self) -> None:
        limit = fields(cast("Any", self))[0].name
        if getattr(self, limit) < 0:
            raise ValueError(f"{limit} must not be negative, got {getattr(self, limit)}")
        object.__setattr__(self, "tools", tool_names("tools", self.tools))

    @property
    def governs(self) -> AbstractSet[str]:
        return self.tools

    def applies_to(self, tool: Tool[Any, Any]) -> bool:
        return not self.tools or tool.name in self.tools

    def room(self, tool: Tool[Any, Any], *, context: ToolContext) -> int:
        """Return how many more calls of a tool are allowed now."""
        raise NotImplementedError


@dataclass(frozen=True)
class QuotaPolicy(_CountsCalls):
    """Limits the calls of a session; failed calls count, refused ones do not."""

    max_calls: int
    name: str = "quota"
    tools: AbstractSet[str] = frozenset()
    """The tools whose calls count, all together; if empty, every tool that it governs."""

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        def used_up(tally: CallTally) -> int | None:
            return tally.calls if tally.calls >= self.max_calls else None

        calls = self._ask(context, used_up)
        if calls is None:
            return ALLOWED
        return PolicyDecision.deny(f"Quota exceeded: {calls}/{self.max_calls} calls used")

    def room(self, tool: Tool[Any, Any], *, context: ToolContext) -> int:
        return self.max_calls - self._ask(context, lambda tally: cast("CallTally", tally).calls)

    def on_start(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> None:
        self._remember(context, lambda tally: replace(tally, calls=tally.calls + 1))


@dataclass(frozen=True)
class RateLimitPolicy(_CountsCalls):
    """Limits the calls of each tool within a minute; failed calls count, refused ones do not."""

    max_calls_per_minute: int
    name: str = "rate_limit"
    tools: AbstractSet[str] = frozenset()
    """The tools that are limited; if empty, every tool that it governs."""

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        now = context.session.clock.time()

        def used_up(tally: CallTally) -> int | None:
            calls = len(_last_minute(tally, tool.name, now))
            return calls if calls >= self.max_calls_per_minute else None

        calls = self._ask(context, used_up)
        if calls is None:
            return ALLOWED
        return PolicyDecision.deny(
            f"Rate limit exceeded: {calls} calls to {tool.name} in last minute\n"
            f"Maximum: {self.max_calls_per_minute} calls per minute\n"
            f"Wait 60 seconds before retrying"
        )

    def room(self, tool: Tool[Any, Any], *, context: ToolContext) -> int:
        now = context.session.clock.time()
        used = self._ask(context, lambda tally: len(_last_minute(tally, tool.name, now)))
        return self.max_calls_per_minute - used

    def on_start(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> None:
        now = context.session.clock.time()

        def counted(tally: CallTally) -> CallTally:
            times = (*_last_minute(tally, tool.name, now), now)
            return replace(tally, recent=_updated(tally.recent, {tool.name: times}))

        self._remember(context, counted)


def _last_minute(tally: CallTally, tool_name: str, now: float) -> tuple[float, ...]:
    times = tally.recent.get(tool_name, ())
    return times[bisect_left(times, now - _MINUTE) :]


# How the pipeline calls them


@dataclass(frozen=True, slots=True)
class AttachedPolicy:
    """A policy of either form as the pipeline calls it."""

    name: str
    policy: object
    check: Callable[..., Any]
    """``check(tool, params, context=...)`` gives the verdict in the policy's own form."""
    on_start: Callable[..., None] | None
    on_result: Callable[..., object] | None
    is_async: bool
    is_small: bool
    applies_to: Callable[[Tool[Any, Any]], bool] | None = None
    asks_a_person: bool = False
    """Then the calls it governs never run concurrently: a re-run would ask again."""
    room: Callable[..., int] | None = None
    """``room(tool, context=...)`` tells how many more calls it allows: no more run concurrently."""
    governs: tuple[str, ...] = ()
    """The tools that it names: each must be offered where it is attached."""
    refers_to: tuple[str, ...] = ()
    """Other tools that it names: each must be offered in the same prompt or registry."""

    def except_for(self, known: Collection[str]) -> AttachedPolicy:
        """Return it for a place where these tools may be missing."""
        governs = tuple(name for name in self.governs if name not in known)
        refers_to = tuple(name for name in self.refers_to if name not in known)
        return replace(self, governs=governs, refers_to=refers_to)

    def for_any_tool(self) -> AttachedPolicy:
        """Return it for a place whose tools are not all known."""
        return replace(self, governs=(), refers_to=())

    def denial(self, verdict: object) -> str | None:
        """Return why the call is denied, or None; raise TypeError for any other verdict."""
        if isinstance(verdict, PolicyDecision):
            if verdict.allowed is True:
                return None
            return verdict.reason or refusals.by_policy(self.name)
        if self.is_small and verdict is None:
            return None
        if self.is_small and isinstance(verdict, str):
            return verdict or refusals.by_policy(self.name)
        expected = "None or the reason" if self.is_small else "a PolicyDecision"
        raise TypeError(f"policy '{self.name}' must return {expected}, got {verdict!r}")


def attach(policies: Iterable[AnyPolicy]) -> tuple[AttachedPolicy, ...]:
    """Adapt policies of either form; refuse anything else."""
    if not isinstance(policies, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"policies are a list, got {policies!r}: write policies=[...]")
    return tuple(_attach(policy) for policy in policies)


def _attach(policy: Any) -> AttachedPolicy:
    if isinstance(policy, AttachedPolicy):
        return policy
    check = getattr(policy, "check", None)
    if isinstance(policy, type) or not callable(check):
        raise TypeError(
            f"{policy!r} is not a policy: it takes an instance with a method "
            "check(tool, params, *, context) or check(tool_name, params, context)"
        )
    is_small = _is_small(check)
    problem, called = None, check
    if is_small:
        called = _by_name(named(check, _OFFERED, f"policy {policy!r}: check", _FORMS))
    else:
        problem = misfit(check, 1, 2, context=3)
    listeners = {"on_start": (1, 2), "on_result": (1, 2, 3)}
    heard = {name: getattr(policy, name, None) for name in listeners}
    mixed = [name for name, each in heard.items() if each is not None] if is_small else []
    if mixed:
        raise TypeError(
            f"policy {policy!r} mixes both forms: with {mixed[0]}, write "
            "check(self, tool, params, *, context) and return a PolicyDecision"
        )
    for name, args in listeners.items():
        listener = heard[name]
        if listener is not None and is_async(listener):
            problem = f"{name} must not be async"
        elif listener is not None:
            problem = problem or misfit(listener, *args, context=0)
    if problem:
        raise TypeError(f"a method of policy {policy!r} does not fit: {problem}")

    return AttachedPolicy(
        name=getattr(policy, "name", None) or type(policy).__name__,
        policy=policy,
        check=called,
        is_async=is_async(check),
        is_small=is_small,
        applies_to=getattr(policy, "applies_to", None),
        asks_a_person=getattr(policy, "asks_a_person", False) is True,
        room=policy.room if isinstance(policy, _CountsCalls) else None,
        governs=_named_by(policy, "governs"),
        refers_to=_named_by(policy, "refers_to"),
        **heard,
    )


_OFFERED = ("tool_name", "params", "context")
_FORMS = "it takes (tool, params, *, context), or by name any of"


def _by_name(check: Named) -> Callable[..., Any]:
    if check.is_in_order(_OFFERED):  # as the Chapter has it: by position, which is faster
        function = check.function

        def in_order(tool: Tool[Any, Any], params: object, *, context: ToolContext) -> Any:
            return function(tool.name, params, context)

        return in_order

    def called(tool: Tool[Any, Any], params: object, *, context: ToolContext) -> Any:
        return check({"tool_name": tool.name, "params": params, "context": context})

    return called


def _named_by(policy: object, attribute: str) -> tuple[str, ...]:
    """Return the tools that a policy names; those that may be missing are left out."""
    given = getattr(policy, attribute, ())
    if callable(given):  # of its own, and not meant for us
        return ()
    return tuple(sorted(n for n in tool_names(attribute, given) if not isinstance(n, _IfOffered)))


def _is_small(check: Callable[..., Any]) -> bool:
    parameters = inspect.signature(check).parameters
    if "tool_name" in parameters:
        return True
    context = parameters.get("context")
    if context is not None and context.kind is context.POSITIONAL_OR_KEYWORD:
        from weakincentives.prompt.tool import Tool

        # Either form could be meant: the annotation of the first parameter decides.
        first = hints_of(check).get(next(iter(parameters)))
        return (get_origin(first) or first) is not Tool
    if context is not None:
        return context.kind is not context.KEYWORD_ONLY
    return all(each.kind is not each.VAR_KEYWORD for each in parameters.values())


# Rules that cannot apply


def refuse_unknown_tools(
    policies: Iterable[AttachedPolicy],
    governed: Collection[str],
    known: Collection[str],
    where: str,
    error: type[Exception],
) -> None:
    """Refuse a policy about a tool that is not offered: it would silently never apply.

    Args:
        governed: The tools whose calls these policies check.
        known: The tools of the whole prompt.
        where: Where they are attached, for the message.
    """
    for policy in policies:
        for name in policy.governs:
            if name in governed:
                continue
            says = (
                f"policy {policy.name!r} is about the tool {name!r}, which {where} does not offer"
            )
            if name in known:
                raise error(f"{says}: attach the policy to the section that does, or to the prompt")
            raise error(f"{says}, so it would never apply; {_hint(name, governed)}")


def refuse_unknown_references(
    policies: Iterable[AttachedPolicy], known: Collection[str], where: str, error: type[Exception]
) -> None:
    """Refuse a policy that refers to a tool that is not offered: it cannot have been called."""
    for policy in policies:
        for name in policy.refers_to:
            if name not in known:
                says = f"policy {policy.name!r} refers to the tool {name!r}"
                raise error(f"{says}, which {where} does not offer; {_hint(name, known)}")


def refuse_unknown_cascades(
    tools: Iterable[Tool[Any, Any]], known: Collection[str], where: str, error: type[Exception]
) -> None:
    """Refuse an effect that calls a tool which is not offered: it would always fail."""
    for tool in tools:
        for effect in tool.effects:
            name = getattr(effect, "trigger_tool", None)
            if isinstance(name, str) and name.replace(":", "__") not in known:
                says = f"an effect of tool {tool.name!r} calls the tool {name!r}"
                raise error(f"{says}, which {where} does not offer; {_near(name, known)}")


def refuse_misspelt_tools(
    policies: Iterable[AttachedPolicy], known: Collection[str], error: type[Exception]
) -> None:
    """Refuse a policy that names almost a known tool, where there may be others, too."""
    from difflib import get_close_matches

    for policy in policies:
        for name in (*policy.governs, *policy.refers_to):
            near = () if name in known else get_close_matches(name, sorted(known), 1, 0.8)
            if near:
                says = f"policy {policy.name!r} names the tool {name!r}; did you mean {near[0]!r}?"
                raise error(f"{says} If not, write if_offered({name!r})")


def _hint(name: str, offered: Collection[str]) -> str:
    return f"{_near(name, offered)} For a tool that may be missing, write if_offered({name!r})"


def _near(name: str, offered: Collection[str]) -> str:
    from difflib import get_close_matches

    own = sorted(set(offered) - RUNTIME_TOOLS)
    local = name.rpartition("__")[2]
    near = [each for each in own if each.rpartition("__")[2] == local]
    near = near or get_close_matches(name, sorted(offered), n=1, cutoff=0.5)
    some = ", ".join(own[:20]) + (f" and {len(own) - 20} more" if len(own) > 20 else "")
    return f"did you mean {near[0]!r}?" if near else f"its tools are {some or 'none'}."


def refuse_shared_names(policies: Iterable[AttachedPolicy], error: type[Exception]) -> None:
    """Refuse two policies of one name that would share a count, or a person's answer."""
    known: dict[str, object] = {}
    for policy in policies:
        if policy.on_start is None and not policy.asks_a_person:
            continue
        if known.setdefault(policy.name, policy.policy) is not policy.policy:
            does, what = ("count calls", "count") if policy.on_start else ("ask a person", "answer")
            raise error(
                f"two policies that {does} are both called {policy.name!r} and would "
                f"share one {what}; rename one: {type(policy.policy).__name__}(..., name=...)"
            )


def names_of(tools: Iterable[Tool[Any, Any]]) -> set[str]:
    """Return the names of tools, and of the members of composed ones: policies govern both."""
    found: set[str] = set()
    for tool in tools:
        found |= {tool.name} | names_of(getattr(tool.handler, "composed_of", ()))
    return found
