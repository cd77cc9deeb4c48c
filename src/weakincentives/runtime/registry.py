"""A registry: tools by name, with the session and resources they work on."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from weakincentives.core.call import RunContext, ToolCall, new_call_id, new_id
from weakincentives.core.text import linear_matcher
from weakincentives.errors import PromptValidationError, ToolDefinitionError, WinkError
from weakincentives.filesystem import Filesystem
from weakincentives.prompt.policies import (
    RUNTIME_TOOLS,
    AnyPolicy,
    AttachedPolicy,
    attach,
    names_of,
    refuse_shared_names,
    refuse_unknown_cascades,
    refuse_unknown_references,
    refuse_unknown_tools,
)
from weakincentives.prompt.prompt import OfferedTool, Prompt, RenderedPrompt
from weakincentives.prompt.section import MarkdownSection, Section
from weakincentives.prompt.tool import Tool, ToolContext, refuse_missing_needs
from weakincentives.resources import Binding, Resolver, ResourceContext, ResourceRegistry, Scope
from weakincentives.runtime.tool_call import (
    aexecute_tool,
    aexecute_tools,
    apply_effects,
    execute_tool,
    execute_tools,
)
from weakincentives.session.session import Session
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.prompt.approval import Approval
    from weakincentives.prompt.contracts import Effect, PreconditionResult
    from weakincentives.runtime.hosted import Admission, OpenCall

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
    """Tools by name, called through the whole pipeline, without a prompt or a model.

    One session serves all calls. A ``MemoryManager`` is bound unless ``resources`` are open already
    or bind one. Use it in a ``with`` block, or call ``close``, to close what it opened.

    A tool in a namespace has two names: ``web:scrape`` and, as providers take no colon,
    ``web__scrape``. Every method takes both; records have the second.

    Registering and unregistering is safe while calls are under way: a call, or all calls of one
    ``execute_tools``, find the tools that were registered when it began.

    Args:
        workspace: A directory for ``context.filesystem``, or one that is open already and stays
            its owner's to close.
        resources: What else tools ask for.
        policies: They govern every tool. One that names a tool which is not registered is refused;
            see ``if_offered``.
        namespace: For tools that are registered without one; names are also looked up in it.
        config: What tools find in ``context.config``.
        run_context: The ids of its calls.
        strict: Whether arguments must have exactly the declared types, for every tool.
        debug: Whether a handler's exception is raised to the caller, once the call is undone.
    """

    def __init__(
        self,
        tools: Iterable[AnyTool] = (),
        *,
        workspace: str | os.PathLike[str] | HostFilesystem | None = None,
        resources: Resources | None = None,
        session: Session | None = None,
        policies: Iterable[AnyPolicy] = (),
        namespace: str | None = None,
        config: Mapping[str, object] | None = None,
        run_context: RunContext | None = None,
        strict: bool = True,
        debug: bool = False,
    ) -> None:
        self.strict = strict
        self.debug = debug
        self.session = Session() if session is None else session
        self._config = dict(config or {})
        self.run_context = run_context
        run_id = new_id()
        self._ids = (run_context or RunContext()).filled(
            run_id=run_id, loop_id="default", agent_id="default", trace_id=run_id
        )
        self.namespace = _checked_namespace(namespace)
        self._policies = attach(policies)
        self._listeners: tuple[AttachedPolicy, ...] = ()
        self._entries: dict[str, _Entry] = {}
        self._named: set[str] = set()
        """The tools that were ever registered: a policy may be about one that is gone."""
        self._checked = False
        self._lock = threading.Lock()
        self._context: ToolContext | None = None
        """What calls get, with the tools registered now; made when first needed."""
        self._closed = False
        self._closing = ExitStack()
        self._memory: Binding[Any] | None = None
        """The binding of its own memory, unless one was given."""
        self._workspace: HostFilesystem | None = None
        if self.register_all(tools):
            self._check_policies()
        # Last: a registry that cannot be made leaves no directory open.
        self._resources = self._opened(workspace, resources)
        try:
            refuse_missing_needs(self.list(), self._resources, "the registry")
        except BaseException:
            self._closing.close()
            raise

    @property
    def workspace(self) -> HostFilesystem:
        """The directory that it was made with: its history, and how to undo calls."""
        if self._workspace is None:
            raise LookupError("this registry has no workspace: make it with workspace=...")
        return self._workspace

    @property
    def policies(self) -> tuple[AnyPolicy, ...]:
        """The policies that govern every tool."""
        return tuple(cast("AnyPolicy", each.policy) for each in self._policies)

    def _opened(
        self, workspace: str | os.PathLike[str] | HostFilesystem | None, resources: Resources | None
    ) -> Resolver:
        if hasattr(resources, "find"):
            if workspace is not None:
                raise TypeError("workspace= cannot be added to resources that are open already")
            return cast("Resolver", resources)  # its owner closes it
        bound = ResourceRegistry.build(cast("Mapping[type[Any], Any]", resources or {}))
        if workspace is not None:
            if Filesystem in bound:
                raise TypeError("give either workspace= or a Filesystem in resources=, not both")
            from weakincentives.filesystem import HostFilesystem

            if not isinstance(workspace, HostFilesystem):
                workspace = HostFilesystem(workspace)
                self._closing.callback(workspace.close)
            self._workspace = workspace
            bound = bound.merge({Filesystem: workspace})
        from weakincentives.session.memory import MemoryManager

        if MemoryManager not in bound:
            self._memory = Binding(MemoryManager, lambda _: MemoryManager())
            bound = bound.merge({MemoryManager: self._memory})
        return self._closing.enter_context(bound.open())

    # Registering and finding

    def register(self, tool: AnyTool, *, namespace: str | None = None) -> AnyTool:
        """Add a tool; returns it under the name that providers take."""
        return self.register_all([tool], namespace=namespace)[0]

    def register_all(
        self, tools: Iterable[AnyTool], *, namespace: str | None = None
    ) -> tuple[AnyTool, ...]:
        """Add tools, or none of them if one cannot be added."""
        if not isinstance(tools, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a registry takes a list of tools, got {tools!r}: write [...]")
        space = self.namespace if namespace is None else _checked_namespace(namespace)
        if not self.strict:
            tools = [
                tool.replace(strict=False) if isinstance(tool, Tool) else tool  # pyright: ignore[reportUnnecessaryIsInstance]
                for tool in tools
            ]
        entries = [_entry(tool, space) for tool in tools]
        if hasattr(self, "_resources"):
            refuse_missing_needs((each.tool for each in entries), self._resources, "the registry")
        return self._add(entries)

    def _add(self, entries: list[_Entry]) -> tuple[AnyTool, ...]:
        with self._lock:
            known = dict(self._entries)
            for entry in entries:
                if known.setdefault(entry.tool.name, entry) is not entry:
                    raise ToolDefinitionError(f"Tool '{entry.qualified}' is already registered")
            self._entries, self._context = known, None
            self._named |= names_of(entry.tool for entry in entries) | RUNTIME_TOOLS
        return tuple(entry.tool for entry in entries)

    def _check_policies(self) -> None:
        """Refuse policies that could not apply as meant.

        Now if there are tools; a registry that gets its tools later is checked at its first use.
        """
        rules, named, where = self._rules(), self._named, "the registry"
        refuse_shared_names(rules, ToolDefinitionError)
        refuse_unknown_tools(rules, named, named, where, ToolDefinitionError)
        refuse_unknown_references(rules, named, where, ToolDefinitionError)
        refuse_unknown_cascades(self.list(), named, where, ToolDefinitionError)
        self._checked = True

    def unregister(self, name: str) -> bool:
        """Remove a tool; returns whether it was registered. Calls under way go on."""
        with self._lock:
            known = dict(self._entries)
            found = self._find(name, known)
            if found is not None:
                del known[found.tool.name]
            self._entries, self._context = known, None
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
        """Return the tools whose name, in either spelling, or description matches.

        The pattern is a regular expression; case does not matter. It takes bounded time: the
        engine never backtracks, so there are no look-around and no back-references, and long
        patterns and large counted repetitions are refused with ``InvalidPattern``.
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
        name: str | AnyTool,
        arguments: object = None,
        context: ToolContext | None = None,
        *,
        call_id: str | None = None,
        once: bool = False,
        approval: Approval | None = None,
    ) -> AnyResult:
        """Run one call and return its result; failures are results, too.

        A tool that is not registered runs under the registry's policies. A context of yours brings
        its own session and resources. With your own ``call_id``, a call that reaches outside is
        safe to repeat: see ``ToolContext.idempotency_key``.

        Args:
            once: A call that is on record, with the same id, tool and arguments, returns its
                recorded answer and runs nothing.
            approval: What a person has decided, after ``admit`` or ``ApprovalNeeded``.
        """
        call, context = self._made(name, arguments, context, call_id)
        return self._with_diff(execute_tool(call, context=context, once=once, approval=approval))

    async def aexecute(
        self,
        name: str | AnyTool,
        arguments: object = None,
        context: ToolContext | None = None,
        *,
        call_id: str | None = None,
        once: bool = False,
        approval: Approval | None = None,
    ) -> AnyResult:
        """Run one call on the caller's event loop."""
        call, context = self._made(name, arguments, context, call_id)
        done = await aexecute_tool(call, context=context, once=once, approval=approval)
        return self._with_diff(done)

    def _with_diff(self, result: AnyResult) -> AnyResult:
        if self._workspace is not None and result.call_id:
            workspace, call_id = self._workspace, result.call_id
            result.attach_diff(lambda: workspace.diff(call_id))
        return result

    def admit(
        self,
        name: str | AnyTool,
        arguments: object = None,
        *,
        call_id: str | None = None,
        once: bool = False,
        approval: Approval | None = None,
    ) -> Admission:
        """Check whether a call may run, and run nothing: refused, needs approval, or ready.

        All other policies come before a person. Executing the call checks again.
        """
        from weakincentives.runtime.hosted import admit

        return admit(*self._made(name, arguments, None, call_id), once=once, approval=approval)

    async def aadmit(
        self,
        name: str | AnyTool,
        arguments: object = None,
        *,
        call_id: str | None = None,
        once: bool = False,
        approval: Approval | None = None,
    ) -> Admission:
        """Check on the caller's event loop whether a call may run."""
        from weakincentives.runtime.hosted import aadmit

        return await aadmit(
            *self._made(name, arguments, None, call_id), once=once, approval=approval
        )

    def refuse(
        self,
        name: str | AnyTool,
        arguments: object,
        reason: str,
        *,
        by: str = "",
        call_id: str | None = None,
    ) -> AnyResult:
        """Record that a call was denied elsewhere, and return the answer for the model."""
        from weakincentives.runtime.hosted import refuse

        return refuse(*self._made(name, arguments, None, call_id), reason, by=by)

    async def arefuse(
        self,
        name: str | AnyTool,
        arguments: object,
        reason: str,
        *,
        by: str = "",
        call_id: str | None = None,
    ) -> AnyResult:
        """Record on the caller's event loop that a call was denied elsewhere."""
        from weakincentives.runtime.hosted import arefuse

        return await arefuse(*self._made(name, arguments, None, call_id), reason, by=by)

    def begin(
        self,
        name: str | AnyTool,
        arguments: object = None,
        *,
        call_id: str | None = None,
        once: bool = False,
        approval: Approval | None = None,
    ) -> OpenCall:
        """Return a call whose work you do yourself, in its ``with`` or ``async with`` block."""
        from weakincentives.runtime.hosted import OpenCall

        call, context = self._made(name, arguments, None, call_id)
        return OpenCall(call, context, once=once, approval=approval)

    def _made(
        self,
        name: str | AnyTool,
        arguments: object,
        context: ToolContext | None,
        call_id: str | None,
    ) -> tuple[ToolCall, ToolContext]:
        """Return a call, and the context it is made in."""
        if isinstance(name, Tool) and not self._checked:
            self._named |= names_of([name])
        ours = self.context()
        if isinstance(name, Tool):
            known = ours.offers.get(name.name)
            if known is None or known.tool is not name:
                rendered = cast("RenderedPrompt", ours.rendering)
                offer = OfferedTool.of(name, self._rules(), rendered.listeners)
                offers = {**rendered.offers, name.name: offer}
                ours = ours.having(rendered_prompt=replace(rendered, offers=offers))
            name = name.name
        return self._call(ours, name, arguments, call_id), _with_tools(ours, context)

    def execute_tools(
        self,
        calls: Iterable[Call],
        context: ToolContext | None = None,
        *,
        max_concurrency: int | None = None,
    ) -> tuple[AnyResult, ...]:
        """Run several calls as those of one turn, concurrently as far as they may."""
        ours = self.context()
        made, context = self._calls(ours, calls), _with_tools(ours, context)
        return execute_tools(made, context=context, max_concurrency=max_concurrency)

    async def aexecute_tools(
        self,
        calls: Iterable[Call],
        context: ToolContext | None = None,
        *,
        max_concurrency: int | None = None,
    ) -> tuple[AnyResult, ...]:
        """Run several calls as those of one turn, on the caller's event loop."""
        ours = self.context()
        made, context = self._calls(ours, calls), _with_tools(ours, context)
        return await aexecute_tools(made, context=context, max_concurrency=max_concurrency)

    def _calls(self, ours: ToolContext, calls: Iterable[Call]) -> Iterator[ToolCall]:
        for call in calls:
            if isinstance(call, ToolCall):
                yield self._call(ours, call.name, call.params, call.id)
            else:
                yield self._call(ours, *call)

    def _call(
        self, ours: ToolContext, name: str, arguments: object, call_id: str | None = None
    ) -> ToolCall:
        offer = self._find(name, ours.offers)
        return ToolCall(
            name if offer is None else offer.tool.name,
            {} if arguments is None else arguments,
            id=call_id or new_call_id(),
        )

    def context(self) -> ToolContext:
        """Return what calls get: the session, the resources, and the tools registered now."""
        if self._closed:
            raise WinkError("this registry is closed; make a new one")
        context = self._context
        if context is None:
            with self._lock:
                context = self._context = self._context or self._make_context()
        return context

    def _make_context(self) -> ToolContext:
        if not self._checked:
            self._check_policies()
        entries = tuple(self._entries.values())
        listeners = _each_once(
            (*(rule for rule in self._rules() if rule.on_result is not None), *self._listeners)
        )
        offers: dict[str, OfferedTool] = {}
        for entry in entries:
            offer = OfferedTool.of(
                entry.tool, _each_once((*entry.rules, *self._policies)), listeners
            )
            offers[entry.tool.name] = offers[entry.qualified] = offer
        return ToolContext(
            session=self.session,
            resources=self._resources,
            rendered_prompt=RenderedPrompt("", self.list(), offers, listeners=listeners),
            run_context=self._ids,
            config=self._config,
            debug=self.debug,
        )

    def _rules(self) -> tuple[AttachedPolicy, ...]:
        """Return the policies that tools brought along, then those of the registry."""
        brought = (rule for entry in self._entries.values() for rule in entry.rules)
        return _each_once((*brought, *self._policies))

    # The parts of a call, by hand

    def validate_preconditions(
        self,
        tool: AnyTool | str,
        context: ToolContext | None = None,
        arguments: object = None,
    ) -> PreconditionResult:
        """Check the preconditions of a tool without running it."""
        from weakincentives.core.loops import run_blocking
        from weakincentives.prompt.contracts import validate_preconditions

        found, context = self._known(tool), _with_tools(self.context(), context)
        params = None if arguments is None else found.parse(arguments)
        return run_blocking(lambda: validate_preconditions(found, context, params))

    def apply_effects(
        self,
        tool: AnyTool | str,
        result: AnyResult,
        context: ToolContext | None = None,
        arguments: object = None,
    ) -> tuple[Effect, ...]:
        """Apply a tool's effects for a result from elsewhere: see ``runtime.apply_effects``."""
        from weakincentives.core.loops import run_blocking

        found, context = self._known(tool), _with_tools(self.context(), context)
        params = None if arguments is None else found.parse(arguments)
        return run_blocking(lambda: apply_effects(found, result, context, params))

    def _known(self, tool: AnyTool | str) -> AnyTool:
        if isinstance(tool, Tool):
            return tool
        found = self.get(tool)
        if found is None:
            raise KeyError(f"Tool '{tool}' not found")
        return found

    # To sections and back

    def as_section(
        self, *, title: str = "Tools", key: str = "", template: str = ""
    ) -> MarkdownSection[Any]:
        """Return a section with the present tools, policies and resources, for a prompt."""
        return MarkdownSection(
            title=title,
            key=key,
            template=template,
            tools=self.list(),
            policies=self._rules(),
            resources=self._shared_resources(),
        )

    def _shared_resources(self) -> ResourceRegistry:
        """Return bindings to the instances that this registry's own calls use."""
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
        workspace: str | os.PathLike[str] | HostFilesystem | None = None,
        resources: Mapping[type[Any], Any] | ResourceRegistry | None = None,
        session: Session | None = None,
        policies: Iterable[AnyPolicy] = (),
        namespace: str | None = None,
    ) -> ToolRegistry:
        """Return a registry of the tools of a section and of all below it, enabled or not.

        Its policies and resources come along; what is given here wins. Tools that a provider runs
        are left out.
        """
        space = _checked_namespace(namespace)
        bound = ResourceRegistry.of()
        entries: list[_Entry] = []
        known: dict[str, AnyTool] = {}
        sections = tuple(_all_below(section))
        names = names_of(tool for each in sections for tool in each.tools) | RUNTIME_TOOLS
        for each in sections:
            each.check_policies(names)
            refuse_unknown_references(each.policies, names, "the section", PromptValidationError)
            bound = bound.merge(each.resources)
            rules = tuple(
                _in_namespace(policy, known) if space else policy for policy in each.policies
            )
            for tool in each.tools:
                if tool.handler is not None:
                    entries.append(_entry(tool, space, rules))
                    known[entries[-1].tool.name] = tool
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
        made._check_policies()
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
        known: dict[str, AnyTool] = {}

        def placed(policies: Iterable[AttachedPolicy]) -> tuple[AttachedPolicy, ...]:
            # The prompt has checked the names: they may be those of disabled sections.
            return tuple(
                _in_namespace(each, known) if made.namespace else each.for_any_tool()
                for each in policies
            )

        made._listeners = placed(each for offer in offers for each in offer.listeners)
        entries: list[_Entry] = []
        for offer in offers:
            if offer.tool.handler is not None:
                entries.append(_entry(offer.tool, made.namespace, placed(offer.rules)))
                known[entries[-1].tool.name] = offer.tool
        made._add(entries)
        return made

    # Its end

    def close(self, error: BaseException | None = None) -> None:
        """Close what the registry opened; it takes no more calls. May be called again."""
        self._closed = True
        self._closing.__exit__(None if error is None else type(error), error, None)

    def __enter__(self) -> ToolRegistry:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)


def _with_tools(ours: ToolContext, context: ToolContext | None) -> ToolContext:
    """Return the registry's context, or the caller's with the registry's tools."""
    return ours if context is None else context.having(rendered_prompt=ours.rendered_prompt)


def _all_below(section: Section[Any]) -> Iterator[Section[Any]]:
    yield section
    for child in section.children:
        yield from _all_below(child)


def _each_once(policies: Iterable[AttachedPolicy]) -> tuple[AttachedPolicy, ...]:
    return tuple({id(policy.policy): policy for policy in policies}.values())


def _in_namespace(policy: AttachedPolicy, known: Mapping[str, AnyTool]) -> AttachedPolicy:
    """Return a policy of a section whose tools are in a namespace: it sees them as they were."""

    def seen_by(method: Callable[..., Any] | None) -> Any:
        def called(tool: AnyTool, *args: object, **context: object) -> Any:
            return cast("Any", method)(known.get(tool.name, tool), *args, **context)

        return None if method is None else called

    return replace(
        policy.for_any_tool(),  # its names are those in the section, and are checked
        check=seen_by(policy.check),
        on_start=seen_by(policy.on_start),
        on_result=seen_by(policy.on_result),
        room=seen_by(policy.room),
        applies_to=seen_by(policy.applies_to),
    )


# Names


def _entry(tool: object, namespace: str | None, rules: tuple[AttachedPolicy, ...] = ()) -> _Entry:
    if not isinstance(tool, Tool):
        raise ToolDefinitionError(
            f"a registry takes tools, got {tool!r}: make one with @tool or Tool[P, R](...)"
        )
    found = cast("AnyTool", tool)
    if found.handler is None:
        raise ToolDefinitionError(f"Tool '{found.name}' must have a handler: a registry runs it")
    if namespace is None:
        return _Entry(found, found.name.replace("__", ":"), rules)
    qualified = f"{namespace}:{found.name}"
    wire = f"{_wire(namespace)}__{found.name}"
    if len(wire) > 64:
        raise ToolDefinitionError(
            f"'{qualified}' is {wire!r} for providers, with {len(wire)} characters; 64 are "
            "allowed: use a shorter namespace or name"
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
