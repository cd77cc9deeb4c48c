"""A registry: tools by name, with the session and resources they work on, ready to be called."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from weakincentives.call import RunContext, ToolCall, new_call_id, new_id
from weakincentives.errors import ToolDefinitionError, WinkError
from weakincentives.filesystem import Filesystem
from weakincentives.prompt.policies import AttachedPolicy, attach
from weakincentives.prompt.prompt import Offer, Prompt, RenderedPrompt
from weakincentives.prompt.section import MarkdownSection, Section
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.resources import Binding, Resolver, ResourceContext, ResourceRegistry, Scope
from weakincentives.runtime.progress import offers_of
from weakincentives.runtime.session import Session
from weakincentives.runtime.tool_call import (
    aexecute_tool,
    aexecute_tools,
    execute_tool,
    execute_tools,
)
from weakincentives.text import linear_matcher

if TYPE_CHECKING:
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.prompt.contracts import Effect, PreconditionResult

T = TypeVar("T")
AnyTool = Tool[Any, Any]
AnyResult = ToolResult[Any]
Resources = Mapping[type[Any], Any] | ResourceRegistry | Resolver
Call = ToolCall | tuple[str, object]
"""A call, or the name of a tool and its arguments."""

_NAMESPACE = re.compile(r"[a-z0-9_-]+(:[a-z0-9_-]+)*")
_MAX_PATTERN = 200
_MAX_REPEATS = 20


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tool under the name that providers take."""

    tool: AnyTool
    qualified: str
    """The other spelling of its name; the same where it is in no namespace."""
    rules: tuple[AttachedPolicy, ...] = ()
    """The policies it brought along."""


class ToolRegistry:
    """Tools by name, called through the whole pipeline: no prompt and no model are needed.

    ``workspace`` is a directory for ``context.filesystem``; ``resources`` are whatever else tools
    ask for; a ``MemoryManager`` is there in any case, unless the resources are open already. One
    session serves all calls: the one that is given, or one of its own. ``policies`` govern every
    tool, ``config`` and ``run_context`` are what tools find in their context. Use it in a ``with``
    block, or call ``close``, to close what it opened.

    A tool in a namespace has two names: ``web:scrape`` and, as providers take no colon,
    ``web__scrape``. Every method takes both, and records have the second.

    Registering and unregistering is safe while calls are under way: a call, or all calls of one
    ``execute_tools``, find the tools that were there when it began.
    """

    def __init__(
        self,
        tools: Iterable[AnyTool] = (),
        *,
        workspace: str | os.PathLike[str] | None = None,
        resources: Resources | None = None,
        session: Session | None = None,
        policies: Iterable[object] = (),
        namespace: str | None = None,
        config: Mapping[str, object] | None = None,
        run_context: RunContext | None = None,
    ) -> None:
        self.session = Session() if session is None else session
        self._config = dict(config or {})
        self.run_context = run_context
        """The ids that it was given for its calls."""
        run_id = new_id()
        self._ids = (run_context or RunContext()).filled(
            run_id=run_id, loop_id="default", agent_id="default", trace_id=run_id
        )
        self.namespace = _checked_namespace(namespace)
        """Where tools go that are registered without one, and where names are looked for, too."""
        self._policies = attach(policies)
        self._listeners: tuple[AttachedPolicy, ...] = ()
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._view: ToolContext | None = None
        """What calls get, with the tools of now; made when first needed."""
        self._closed = False
        self._own: ResourceContext | None = None
        self._memory: Binding[Any] | None = None
        """The one that nobody gave it."""
        self.workspace: HostFilesystem | None = None
        """The directory, when it was given one: its history, and the way back."""
        self.register_all(tools)
        # Last: a registry that cannot be made leaves no directory open.
        self._resources = self._opened(workspace, resources)

    def _opened(
        self, workspace: str | os.PathLike[str] | None, resources: Resources | None
    ) -> Resolver:
        if hasattr(resources, "find"):
            if workspace is not None:
                raise TypeError(
                    "workspace= needs resources that are not open yet: bind the Filesystem there, "
                    "or pass a mapping"
                )
            return cast("Resolver", resources)  # whoever opened it closes it
        bound = ResourceRegistry.build(
            cast("Mapping[type[Any], Any]", {} if resources is None else resources)
        )
        if workspace is not None:
            if Filesystem in bound:
                raise TypeError("give either workspace= or a Filesystem in resources=, not both")
            from weakincentives.filesystem import HostFilesystem

            self.workspace = HostFilesystem(workspace)
            bound = bound.merge({Filesystem: self.workspace})
        from weakincentives.runtime.memory import MemoryManager

        if MemoryManager not in bound:
            self._memory = Binding(MemoryManager, lambda _: MemoryManager())
            bound = bound.merge({MemoryManager: self._memory})
        self._own = bound.open()
        return self._own

    # What is registered

    def register(self, tool: AnyTool, *, namespace: str | None = None) -> AnyTool:
        """Add a tool; returns it as it is registered, under the name that providers take."""
        return self.register_all([tool], namespace=namespace)[0]

    def register_all(
        self, tools: Iterable[AnyTool], *, namespace: str | None = None
    ) -> tuple[AnyTool, ...]:
        """Add tools, or none of them if one cannot be added."""
        space = self.namespace if namespace is None else _checked_namespace(namespace)
        return self._add([_entry(tool, space) for tool in tools])

    def _add(self, entries: list[_Entry]) -> tuple[AnyTool, ...]:
        with self._lock:
            known = dict(self._entries)
            for entry in entries:
                if known.setdefault(entry.tool.name, entry) is not entry:
                    raise ToolDefinitionError(f"Tool '{entry.qualified}' is already registered")
            self._entries, self._view = known, None
        return tuple(entry.tool for entry in entries)

    def unregister(self, name: str) -> bool:
        """Remove a tool; returns whether it was there. Calls under way go on."""
        with self._lock:
            known = dict(self._entries)
            found = self._find(name, known)
            if found is not None:
                del known[found.tool.name]
            self._entries, self._view = known, None
        return found is not None

    def get(self, name: str) -> AnyTool | None:
        """Return a tool by any spelling of its name, or None."""
        entry = self._find(name, self._entries)
        return None if entry is None else entry.tool

    def _find(self, name: str, among: Mapping[str, T]) -> T | None:
        wire = _wire(name)
        found = among.get(wire)
        if found is None and self.namespace:
            found = among.get(f"{_wire(self.namespace)}__{wire}")
        return found

    def has(self, name: str) -> bool:
        """Whether a tool of that name is registered."""
        return self.get(name) is not None

    def list(self) -> tuple[AnyTool, ...]:
        """Return all tools, in the order they were registered."""
        return tuple(entry.tool for entry in self._entries.values())

    def search(self, pattern: str) -> tuple[AnyTool, ...]:
        """Return the tools whose name, in either spelling, or description has a match.

        The pattern is a regular expression without regard to case. The time it takes is bounded,
        whatever the pattern: it runs on an engine that never backtracks, which therefore has no
        look-around and no back-references; and long patterns and large counted repetitions are
        refused. What cannot be taken is an ``InvalidPattern``.
        """
        matches = linear_matcher(
            pattern, max_length=_MAX_PATTERN, max_repeats=_MAX_REPEATS, ignore_case=True
        )
        return tuple(
            entry.tool
            for entry in self._entries.values()
            if matches(entry.tool.name)
            or matches(entry.qualified)
            or matches(entry.tool.description)
        )

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.has(name)

    def __iter__(self) -> Iterator[AnyTool]:
        return iter(self.list())

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        names = ", ".join(entry.qualified for entry in self._entries.values())
        return f"ToolRegistry({names})"

    # Calling

    def execute(
        self,
        name: str,
        arguments: object = None,
        context: ToolContext | None = None,
        *,
        call_id: str | None = None,
    ) -> AnyResult:
        """Run one call and return its result; failures are results, too.

        With a context of yours, its session and resources are used. A ``call_id`` of yours makes
        a call that reaches outside safe to repeat: see ``ToolContext.idempotency_key``.
        """
        view = self.context()
        call = self._call(view, name, arguments, call_id)
        return execute_tool(call, context=_in(view, context))

    async def aexecute(
        self,
        name: str,
        arguments: object = None,
        context: ToolContext | None = None,
        *,
        call_id: str | None = None,
    ) -> AnyResult:
        """Run one call on the caller's event loop."""
        view = self.context()
        call = self._call(view, name, arguments, call_id)
        return await aexecute_tool(call, context=_in(view, context))

    def execute_tools(
        self,
        calls: Iterable[Call],
        context: ToolContext | None = None,
        *,
        max_concurrency: int | None = None,
    ) -> tuple[AnyResult, ...]:
        """Run several calls as those of one turn, concurrently as far as they may."""
        view = self.context()
        made, context = self._calls(view, calls), _in(view, context)
        return execute_tools(made, context=context, max_concurrency=max_concurrency)

    async def aexecute_tools(
        self,
        calls: Iterable[Call],
        context: ToolContext | None = None,
        *,
        max_concurrency: int | None = None,
    ) -> tuple[AnyResult, ...]:
        """Run several calls as those of one turn, on the caller's event loop."""
        view = self.context()
        made, context = self._calls(view, calls), _in(view, context)
        return await aexecute_tools(made, context=context, max_concurrency=max_concurrency)

    def _calls(self, view: ToolContext, calls: Iterable[Call]) -> Iterator[ToolCall]:
        for call in calls:
            if isinstance(call, ToolCall):
                yield self._call(view, call.name, call.params, call.id)
            else:
                yield self._call(view, *call)

    def _call(
        self, view: ToolContext, name: str, arguments: object, call_id: str | None = None
    ) -> ToolCall:
        offer = self._find(name, offers_of(view))
        return ToolCall(
            name if offer is None else offer.tool.name,
            {} if arguments is None else arguments,
            id=call_id or new_call_id(),
        )

    def context(self) -> ToolContext:
        """Return what calls get: the session, the resources, and the tools of now."""
        if self._closed:
            raise WinkError("this registry is closed; make a new one")
        view = self._view
        if view is None:
            with self._lock:
                view = self._view = self._view or self._seen()
        return view

    def _seen(self) -> ToolContext:
        entries = tuple(self._entries.values())
        listeners = self._all_listeners(entries)
        offers: dict[str, Offer] = {}
        for entry in entries:
            rules = _each_once((*entry.rules, *self._policies))
            offer = Offer.of(entry.tool, rules, listeners)
            offers[entry.tool.name] = offers[entry.qualified] = offer
        return ToolContext(
            session=self.session,
            resources=self._resources,
            rendered_prompt=RenderedPrompt("", self.list(), offers),
            run_context=self._ids,
            config=self._config,
        )

    def _all_listeners(self, entries: Iterable[_Entry]) -> tuple[AttachedPolicy, ...]:
        rules = (*(rule for entry in entries for rule in entry.rules), *self._policies)
        hearing = (rule for rule in rules if rule.on_result is not None)
        return _each_once((*hearing, *self._listeners))

    # The parts of a call, by hand

    def validate_preconditions(
        self,
        tool: AnyTool | str,
        context: ToolContext | None = None,
        arguments: object = None,
    ) -> PreconditionResult:
        """Check what must hold before a tool runs, and run nothing else."""
        from weakincentives.prompt.contracts import validate_preconditions
        from weakincentives.runtime.loops import run_blocking

        found, context = self._known(tool), _in(self.context(), context)
        params = None if arguments is None else found.parse(arguments)
        return run_blocking(lambda: validate_preconditions(found, context, params))

    def apply_effects(
        self, tool: AnyTool | str, result: AnyResult, context: ToolContext | None = None
    ) -> tuple[Effect, ...]:
        """Apply a tool's effects for a result that came about elsewhere; returns which.

        As a transaction: when one fails, session and resources are as before, and the error is
        raised. Those that change something here come first, then notifications, then cascades,
        each a call of its own.
        """
        from weakincentives.prompt.contracts import apply_effects
        from weakincentives.runtime.loops import run_blocking

        found, context = self._known(tool), _in(self.context(), context)
        return run_blocking(lambda: apply_effects(found, result, context))

    def _known(self, tool: AnyTool | str) -> AnyTool:
        if isinstance(tool, Tool):
            return tool
        found = self.get(tool)
        if found is None:
            raise KeyError(f"Tool '{tool}' is not registered")
        return found

    # To sections and back

    def as_section(
        self, *, title: str = "Tools", key: str = "", template: str = ""
    ) -> MarkdownSection[Any]:
        """Return a section with the tools, policies and resources of now, for a prompt."""
        entries = tuple(self._entries.values())
        rules = (*(rule for entry in entries for rule in entry.rules), *self._policies)
        return MarkdownSection(
            title=title,
            key=key,
            template=template,
            tools=[entry.tool for entry in entries],
            policies=_each_once(rules),
            resources=self._shared_resources(),
        )

    def _shared_resources(self) -> ResourceRegistry:
        """Return bindings that give what this registry's own calls get."""
        context = self._resources
        if not isinstance(context, ResourceContext):
            context = cast("ResourceContext", getattr(context, "context"))  # noqa: B009
        return ResourceRegistry.of(
            *(
                Binding.instance(kind, context.get(kind))
                if binding.scope is Scope.SINGLETON
                else binding
                for kind, binding in context.registry.bindings.items()
                if binding is not self._memory
            )
        )

    @classmethod
    def from_section(
        cls,
        section: Section[Any],
        *,
        workspace: str | os.PathLike[str] | None = None,
        resources: Mapping[type[Any], Any] | ResourceRegistry | None = None,
        session: Session | None = None,
        policies: Iterable[object] = (),
        namespace: str | None = None,
    ) -> ToolRegistry:
        """Return a registry of the tools of a section and of all below it, enabled or not.

        Its policies and resources come along; what is given here wins. Tools that a provider runs
        are left out.
        """
        bound = ResourceRegistry.of()
        entries: list[_Entry] = []
        for each in _all_below(section):
            bound = bound.merge(each.resources)
            entries += [
                _entry(tool, _checked_namespace(namespace), each.policies)
                for tool in each.tools
                if tool.handler is not None
            ]
        if workspace is not None:
            bound = ResourceRegistry(
                {kind: each for kind, each in bound.bindings.items() if kind is not Filesystem}
            )
        made = cls(
            workspace=workspace,
            resources=bound.merge({} if resources is None else resources),
            session=session,
            policies=policies,
            namespace=namespace,
        )
        made._add(entries)
        return made

    @classmethod
    def from_prompt(
        cls, prompt: Prompt[Any], *, session: Session | None = None, namespace: str | None = None
    ) -> ToolRegistry:
        """Return a registry of the tools that a prompt offers now, under the same policies.

        It works on the prompt's resources, which stay the prompt's to close. Tools that a provider
        runs are left out.
        """
        made = cls(session=session, resources=prompt.resources, namespace=namespace)
        offers = prompt.render(made.session).offers.values()
        made._listeners = tuple(each for offer in offers for each in offer.listeners)
        made._add(
            [
                _entry(offer.tool, made.namespace, offer.rules)
                for offer in offers
                if offer.tool.handler is not None
            ]
        )
        return made

    # Its end

    def close(self, error: BaseException | None = None) -> None:
        """Close what the registry opened; it takes no calls any more. May be called again."""
        self._closed = True
        try:
            if self._own is not None:
                self._own.close(error)
        finally:
            if self.workspace is not None:
                self.workspace.close()

    def __enter__(self) -> ToolRegistry:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(exc)


def _in(view: ToolContext, context: ToolContext | None) -> ToolContext:
    """Return the registry's context, or the caller's with the registry's tools."""
    return view if context is None else context.having(rendered_prompt=view.rendered_prompt)


def _all_below(section: Section[Any]) -> Iterator[Section[Any]]:
    yield section
    for child in section.children:
        yield from _all_below(child)


def _each_once(policies: Iterable[AttachedPolicy]) -> tuple[AttachedPolicy, ...]:
    return tuple({id(policy.policy): policy for policy in policies}.values())


# Names


def _entry(tool: object, namespace: str | None, rules: tuple[AttachedPolicy, ...] = ()) -> _Entry:
    if not isinstance(tool, Tool):
        raise ToolDefinitionError(
            f"a registry takes tools, got {tool!r}; make one with Tool[Params, Result](...) or "
            "@tool"
        )
    found = cast("AnyTool", tool)
    if found.handler is None:
        raise ToolDefinitionError(
            f"Tool '{found.name}' must have a handler: a registry runs its tools, and this one is "
            "run by the provider"
        )
    if namespace is None:
        return _Entry(found, found.name.replace("__", ":"), rules)
    qualified = f"{namespace}:{found.name}"
    wire = f"{_wire(namespace)}__{found.name}"
    if len(wire) > 64:
        raise ToolDefinitionError(
            f"'{qualified}' is {wire!r} for providers, which has {len(wire)} characters; 64 are "
            "allowed: take a shorter namespace or name"
        )
    named = found.replace(name=wire)
    if named.title == wire:
        named = named.replace(title=qualified)
    return _Entry(named, qualified, rules)


def _wire(name: str) -> str:
    return name.replace(":", "__")


def _checked_namespace(namespace: str | None) -> str | None:
    if not namespace:
        return None
    if not _NAMESPACE.fullmatch(namespace):
        raise ToolDefinitionError(
            f"namespace {namespace!r} must match ^{_NAMESPACE.pattern}$: lower-case letters, "
            "digits, '_' and '-', with ':' between levels"
        )
    return namespace
