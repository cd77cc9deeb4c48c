"""Prompts: a tree of sections, bound to parameters and resources, rendered for a model."""

from __future__ import annotations

import copy
import json
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from weakincentives.errors import PromptRenderError, PromptValidationError
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
from weakincentives.prompt.section import (
    MarkdownSection,
    Section,
    SectionVisibility,
    chosen,
    disclosure_tools,
    how_to_open,
)
from weakincentives.prompt.signatures import TypedConstructor
from weakincentives.prompt.tool import Tool, refuse_missing_needs
from weakincentives.resources import ResourceContext, ResourceRegistry
from weakincentives.serde import dump

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    from weakincentives.core.media import Media
    from weakincentives.prompt.context import ToolContext
    from weakincentives.prompt.overrides import PromptOverrides
    from weakincentives.session.session import Session

    OutT = TypeVarWithDefault("OutT", default=Any)
else:
    OutT = TypeVar("OutT")

Resources = Mapping[type[Any], Any] | ResourceRegistry


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A section at its place in the tree."""

    section: Section[Any]
    path: str
    depth: int
    title: str
    children: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as it is offered in a rendered prompt, with the policies that govern it."""

    tool: Tool[Any, Any]
    policies: tuple[AttachedPolicy, ...] = ()
    """Checked before a call: the policies of the tool's section first, then the prompt's; those
    that ask a person come last."""
    listeners: tuple[AttachedPolicy, ...] = ()
    """Notified of a success: every policy of the prompt that has ``on_result``."""
    counters: tuple[AttachedPolicy, ...] = ()
    """The policies that have ``on_start``: notified right before a call runs."""
    needs_loop: bool = False
    may_run_concurrently: bool = False
    """Whether a call may run concurrently with others of its turn."""
    rules: tuple[AttachedPolicy, ...] = ()
    """All policies, also those that do not apply to this tool: members of a composed tool inherit
    them."""
    names: tuple[str, ...] = ()
    """The names of ``policies``."""

    @classmethod
    def of(
        cls,
        tool: Tool[Any, Any],
        policies: tuple[AttachedPolicy, ...] = (),
        listeners: tuple[AttachedPolicy, ...] = (),
    ) -> OfferedTool:
        rules = policies
        policies = tuple(p for p in rules if p.applies_to is None or p.applies_to(tool))
        # A person is asked about what all others allow.
        policies = tuple(sorted(policies, key=lambda policy: policy.asks_a_person))
        needs_loop = tool.needs_loop or any(policy.is_async for policy in policies)
        counters = tuple(policy for policy in policies if policy.on_start is not None)
        composed: Any = getattr(tool.handler, "composed_of", ())
        is_composed = type(composed) in (tuple, list)  # a mock has every attribute
        members = [cls.of(each, rules) for each in composed] if is_composed else []
        may_run_concurrently = (
            tool.reach in ("read", "reversible")
            and (tool.is_async if tool.concurrent is None else tool.concurrent)
            and tool.writes == "api"  # a scan cannot attribute changes to a call
            and tool.handler is not None
            and not any(policy.asks_a_person for policy in policies)
            and all(each.may_run_concurrently and not each.is_counted for each in members)
        )
        names = tuple(policy.name for policy in policies)
        return cls(
            tool, policies, listeners, counters, needs_loop, may_run_concurrently, rules, names
        )

    @property
    def is_counted(self) -> bool:
        return any(policy.room is not None for policy in self.counters)

    def may_join(self, others: int, context: ToolContext) -> bool:
        """Tell whether a call may run concurrently with as many others of its turn.

        Those that a policy counts are counted when they are committed.
        """
        if not self.may_run_concurrently:
            return False
        rooms = (each.room(self.tool, context=context) for each in self.counters if each.room)
        return all(room > others for room in rooms)

    def asked_until(self, policy: AttachedPolicy) -> tuple[str, ...]:
        """Return the names of the policies up to this one."""
        return self.names[: [each is policy for each in self.policies].index(True) + 1]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The text and the tools for a model, in the order of their declaration."""

    text: str
    tools: tuple[Tool[Any, Any], ...]
    offers: Mapping[str, OfferedTool] = field(repr=False, default_factory=dict[str, OfferedTool])
    summarized: tuple[str, ...] = ()
    """Paths of the sections shown as a summary."""
    overrides_tag: str = ""
    """The tag of the overrides in use, if any."""
    listeners: tuple[AttachedPolicy, ...] = field(repr=False, default=())
    """The policies of the prompt that have ``on_result``."""
    media: tuple[Media, ...] = ()
    """Of the open sections; adapters send them with the first message."""
    sections: tuple[tuple[str, int], ...] = ()
    """The path of each section in the text, and its length; two line ends are between them."""

    def __str__(self) -> str:
        return self.text

    def with_provider_tools(
        self, tools: Iterable[Tool[Any, Any]], policies: tuple[AttachedPolicy, ...]
    ) -> RenderedPrompt:
        """Return this rendering with tools that the provider runs, so that calls find them.

        If a section declares such a tool with ``handler=None``, its policies apply as well.
        """
        offers = dict(self.offers)
        for tool in tools:
            declared = offers.get(tool.name)
            if declared is not None and declared.tool.handler is not None:
                raise PromptValidationError(
                    f"the prompt and the provider both have a tool {tool.name!r}: rename one"
                )
            rules = policies if declared is None else declared.rules
            offers[tool.name] = OfferedTool.of(tool, rules, self.listeners)
        return replace(self, offers=offers)

    def with_tools(
        self, tools: Iterable[Tool[Any, Any]], policies: tuple[AttachedPolicy, ...]
    ) -> RenderedPrompt:
        """Return this rendering with tools of the runtime; a tool of the user replaces ours."""
        added = [tool for tool in tools if tool.name not in self.offers]
        offers = {tool.name: OfferedTool.of(tool, policies, self.listeners) for tool in added}
        return replace(self, tools=(*self.tools, *added), offers={**self.offers, **offers})

    def only(self, wanted: Collection[str] | Callable[[Tool[Any, Any]], bool]) -> RenderedPrompt:
        """Return this rendering with some of its tools; a name that none has is refused."""
        if callable(wanted):
            kept = tuple(tool for tool in self.tools if wanted(tool))
        else:
            names = names_of(self.tools)
            unknown = sorted(set(wanted) - names)
            if unknown:
                offered = ", ".join(sorted(names)) or "none"
                raise PromptValidationError(
                    f"the run names the tool {unknown[0]!r}, which the prompt does not offer: its "
                    f"tools are {offered}"
                )
            kept = tuple(tool for tool in self.tools if tool.name in wanted)
        offers = {name: each for name, each in self.offers.items() if each.tool in kept}
        return replace(self, tools=kept, offers=offers)

    def says_the_same_as(self, other: RenderedPrompt) -> bool:
        """Whether both give a model the same text and tools."""
        same = self.text == other.text and self.tools == other.tools
        return same and self.media == other.media


class PromptTemplate(TypedConstructor, Generic[OutT]):
    """The part of a prompt that does not change between runs.

    Args:
        output_type: What the model's answer is parsed into: a dataclass, a list, a union, a plain
            type, or a function, which is called with the answer. ``str`` is its text.
        output_validators: Each is called with the output, and may return another one. A ValueError
            is sent back to the model, to answer again.
    """

    def __init__(
        self,
        *,
        sections: Sequence[Section[Any]] = (),
        policies: Sequence[AnyPolicy] = (),
        resources: Resources | None = None,
        key: str = "",
        ns: str = "",
        name: str = "",
        output_type: Any = None,
        output_validators: Sequence[Callable[[Any], Any]] = (),
    ) -> None:
        self.sections = tuple(sections)
        self.policies = attach(policies)
        self.resources = ResourceRegistry.build({} if resources is None else resources)
        self.nodes = _nodes(self.sections)
        self.name = name or (self.nodes[0].title if self.nodes else "prompt")
        self.key = key or re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "prompt"
        self.ns = ns or "default"
        # Any means "not stated" where a type must be written; the answer is then plain text.
        self.output_type = None if output_type is Any else output_type
        self.output_validators = tuple(output_validators)
        self.original: PromptTemplate[OutT] | None = None
        """The template before overrides were applied, if any were."""
        _check(self.nodes, self.policies)

    @classmethod
    def with_types(cls, type_args: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        (output_type,) = type_args
        kwargs.setdefault("output_type", output_type)  # a function that returns it may be given
        return cls(*args, **kwargs)

    def __repr__(self) -> str:
        sections = ", ".join(section.derived_key() for section in self.sections)
        return f"<{type(self).__name__} {self.ns}/{self.key}: {sections}>"

    def with_sections(
        self, change: Callable[[str, Section[Any]], Section[Any]]
    ) -> PromptTemplate[OutT]:
        """Return a copy with each section replaced by ``change(path, section)``; the same tree."""

        def changed(node: _Node) -> _Node:
            section = change(node.path, node.section)
            children = tuple(changed(child) for child in node.children)
            placed = tuple(child.section for child in children)
            if any(new is not old for new, old in zip(placed, section.children, strict=True)):
                section = copy.copy(section)
                section.children = placed
            return replace(node, section=section, children=children)

        made = copy.copy(self)
        made.nodes = tuple(changed(node) for node in self.nodes)
        made.sections = tuple(node.section for node in made.nodes)
        made.original = self.original or self
        return made


class PromptResources:
    """``prompt.resources``: opens resources lazily and closes them at the end of ``with``."""

    def __init__(self, registry: ResourceRegistry) -> None:
        self.registry = registry
        self._context: ResourceContext | None = None
        self._depth = 0
        self._lock = threading.Lock()

    @property
    def context(self) -> ResourceContext:
        """The open context; opened on first use."""
        context = self._context
        if context is not None:  # without the lock: every call gets here
            return context
        with self._lock:
            if self._context is None:
                self._context = self.registry.open()
            return self._context

    def get(self, kind: type[T]) -> T:
        return self.context.get(kind)

    def find(self, kind: type[T]) -> T | None:
        return self.context.find(kind)

    def __enter__(self) -> PromptResources:
        with self._lock:
            self._depth += 1
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth > 0:
                return
            context, self._context = self._context, None
        if context is not None:
            context.close(exc)


class Prompt(Generic[OutT]):
    """A template with its parameters and resources."""

    def __init__(
        self, template: PromptTemplate[OutT], *, overrides: PromptOverrides | None = None
    ) -> None:
        self.template = template if overrides is None else overrides.apply(template)
        self.overrides = overrides
        self._params: tuple[object, ...] = ()
        self._sections: tuple[Section[Any], ...] = ()
        self._given: dict[_Node, tuple[Any, bool]] = {}
        """The parameters of each section, and whether they are immutable."""
        self._bound = ResourceRegistry.of()
        self._rendered: RenderedPrompt | None = None
        self._place_sections()

    def __repr__(self) -> str:
        return f"<Prompt of {self.template!r}>"

    def bind(
        self,
        *params: object,
        resources: Resources | None = None,
        sections: Sequence[Section[Any]] = (),
        extra_tools: Sequence[Tool[Any, Any]] = (),
    ) -> Prompt[OutT]:
        """Return this prompt with parameters, resources and sections added.

        Parameters are dataclass instances; each section takes the one of its own type. Resources
        bound here win over those of a section, and those over the template's.
        """
        params = tuple(value for value in params if value is not None)
        for value in params:
            if isinstance(value, type) or not is_dataclass(value):
                raise PromptValidationError(
                    f"parameters are dataclass instances, got {value!r}; "
                    "write prompt.bind(Params(...))"
                )
        added = tuple(sections)
        if extra_tools:
            warnings.warn(
                "extra_tools offers tools without guidance; put them into a section instead",
                stacklevel=2,
            )
            added = (*added, MarkdownSection(title="Extra tools", tools=extra_tools))
        bound = copy.copy(self)
        bound._params = (*reversed(params), *self._params)
        bound._given = {}
        bound._bound = self._bound.merge({} if resources is None else resources)
        bound._rendered = None
        if added:
            bound._sections = (*self._sections, *added)
            bound._place_sections()
        else:  # the same tree, and so the same cache
            bound._resources = PromptResources(self._registry.merge(bound._bound))
        return bound

    def _place_sections(self) -> None:
        self._nodes = _nodes((*self.template.sections, *self._sections))
        _check(self._nodes, self.template.policies)
        registry = self.template.resources
        for node in walk(self._nodes):
            registry = registry.merge(node.section.resources)
        self._registry = registry
        self._resources = PromptResources(registry.merge(self._bound))
        self._cache = _Cache(self._nodes, self.template.policies)

    @property
    def ns(self) -> str:
        return self.template.ns

    @property
    def key(self) -> str:
        return self.template.key

    @property
    def policies(self) -> tuple[AttachedPolicy, ...]:
        return self.template.policies

    @property
    def resources(self) -> PromptResources:
        """The resources for tools. Use it in a ``with`` statement to close them."""
        return self._resources

    @property
    def rendered(self) -> RenderedPrompt:
        """The last rendering; made now if there is none."""
        return self._rendered or self.render()

    def render(self, session: Session | None = None, *, examples: bool = False) -> RenderedPrompt:
        """Return the text and tools for a model.

        With a session, the calls of that session find the tools of this rendering. With
        ``examples``, the text includes the tools' examples, for a provider whose schema has no
        place for them.
        """
        shown = list(self._shown(self._nodes, "", session, chosen(session)))
        cache = self._cache
        blocks = [cache.block(each, session, examples) for each in shown]
        text = "\n\n".join(blocks)
        tools, offers = cache.offered(shown)
        summarized = tuple([each.node.path for each in shown if not each.is_open])
        media = tuple([each for s in shown if s.is_open for each in s.node.section.media])
        rendered = self._rendered
        # A run renders before every turn: an unchanged rendering stays the same object.
        if (
            rendered is None
            or rendered.text != text
            or rendered.offers is not offers
            or rendered.summarized != summarized
            or rendered.media != media
        ):
            tag = "" if self.overrides is None else self.overrides.tag
            refuse_missing_needs(tools, self._resources.registry, "the prompt")
            sections = tuple((s.node.path, len(b)) for s, b in zip(shown, blocks, strict=True))
            rendered = self._rendered = RenderedPrompt(
                text, tools, offers, summarized, tag, cache.listeners, media, sections
            )
        if session is not None:
            session.offer(self, rendered)
        return rendered

    def section_text(self, path: str, session: Session | None = None) -> str:
        """Return the section at a path and those below it, as if they were open."""
        choices = chosen(session)
        for node in walk(self._nodes):
            if f"{node.path}/".startswith(f"{path}/") or path.startswith(f"{node.path}/"):
                choices[node.path] = SectionVisibility.FULL
        found = [
            self._cache.block(each, session, False)
            for each in self._shown(self._nodes, "", session, choices)
            if f"{each.node.path}/".startswith(f"{path}/")
        ]
        if not found:
            raise PromptRenderError(f"section {path!r} does not exist or is disabled")
        return "\n\n".join(found)

    def _shown(
        self,
        nodes: Sequence[_Node],
        prefix: str,
        session: Session | None,
        choices: Mapping[str, SectionVisibility],
    ) -> Iterator[_Shown]:
        """Yield the enabled sections that are not below a summary, in order."""
        count = 0
        for node in nodes:
            given = self._given.get(node)
            if given is None:
                params = self._params_of(node)
                given = self._given[node] = params, _are_settled(params)
            params, is_settled = given
            section = node.section
            if not section.is_enabled(params, session):
                continue
            count += 1
            number = f"{prefix}{count}."
            visibility = choices.get(node.path)
            if visibility is None:
                try:
                    visibility = section.visibility_now(params, session)
                except PromptRenderError as error:
                    raise PromptRenderError(f"section {node.path}: {error}") from error
            is_open = visibility is SectionVisibility.FULL
            yield _Shown(number, node, params, is_settled, is_open)
            if is_open and node.children:
                yield from self._shown(node.children, number, session, choices)

    def _params_of(self, node: _Node) -> object:
        wanted = node.section.params_type
        if wanted is None:
            return None
        fitting = [params for params in self._params if isinstance(params, wanted)]
        fitting.sort(key=lambda params: type(params) is not wanted)
        params = fitting[0] if fitting else node.section.default_params
        if params is None:
            bound = ", ".join(type(each).__name__ for each in self._params) or "nothing"
            raise PromptRenderError(
                f"section {node.path} needs {wanted.__name__}, but bound is {bound}; "
                f"write prompt.bind({wanted.__name__}(...))"
            )
        return params


# What renderings share

_SETTLED = (str, int, float, bool, bytes, type(None))


def _is_settled(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_settled, cast("tuple[object, ...]", value)))
    return type(value) in _SETTLED


def _are_settled(params: Any) -> bool:
    if params is None:
        return True
    values = (getattr(params, each.name) for each in fields(params))
    return params.__dataclass_params__.frozen and all(map(_is_settled, values))


class _Shown(NamedTuple):
    """A section in one rendering."""

    number: str
    node: _Node
    params: Any
    is_settled: bool
    is_open: bool


class _Cache:
    """What the renderings of one tree of sections share: texts, tools and offers.

    Prompts that differ only in their parameters use it, maybe in several threads: so entries are
    replaced as a whole, never changed.
    """

    def __init__(self, nodes: Sequence[_Node], policies: tuple[AttachedPolicy, ...]) -> None:
        self._policies = policies
        # Those of disabled sections listen, too: a section may be enabled later.
        every = (*(p for node in walk(nodes) for p in node.section.policies), *policies)
        self.listeners = _each_once(p for p in every if p.on_result is not None)
        self._texts: dict[_Node, tuple[_Shown, bool, str]] = {}
        """By section, its text and what it was made from."""
        self._offered: tuple[object, tuple[Tool[Any, Any], ...], Mapping[str, OfferedTool]]
        self._offered = (None, (), {})

    def offered(
        self, shown: Sequence[_Shown]
    ) -> tuple[tuple[Tool[Any, Any], ...], Mapping[str, OfferedTool]]:
        """Return the tools of all open sections, and those that open the others."""
        # With the tools they have now: a section of a server's tools may get others.
        places: list[tuple[_Node | None, tuple[Tool[Any, Any], ...]]]
        places = [(each.node, each.node.section.tools) for each in shown if each.is_open]
        if len(places) < len(shown):
            places.append((None, disclosure_tools()))
        made_from, tools, offers = self._offered
        if made_from != places:
            _refuse_duplicates((tool, node) for node, tools in places for tool in tools)
            offers = {
                tool.name: OfferedTool.of(tool, policies, self.listeners)
                for node, tools in places
                for policies in [self._policies_at(node)]
                for tool in tools
            }
            tools = tuple(offer.tool for offer in offers.values())
            self._offered = places, tools, offers
        return tools, offers

    def _policies_at(self, node: _Node | None) -> tuple[AttachedPolicy, ...]:
        return _each_once((*(node.section.policies if node else ()), *self._policies))

    def block(self, shown: _Shown, session: Session | None, with_examples: bool) -> str:
        """Return heading and text of a section."""
        node, cached = shown.node, self._texts.get(shown.node)
        if cached is not None:
            made_from, had_examples, text = cached
            if (
                made_from.params is shown.params
                and made_from.number == shown.number
                and made_from.is_open is shown.is_open
                and had_examples is with_examples
            ):
                return text
        heading = f"{'#' * min(1 + node.depth, 6)} {shown.number} {node.title}"
        try:
            parts = (heading, *self._parts(shown, session, with_examples))
        except PromptRenderError as error:
            raise PromptRenderError(f"section {node.path}: {error}") from error
        text = "\n\n".join([part for part in parts if part])
        if shown.is_settled and node.section.depends_only_on_params:
            self._texts[node] = shown, with_examples, text
        return text

    def _parts(
        self, shown: _Shown, session: Session | None, with_examples: bool
    ) -> tuple[str, ...]:
        node = shown.node
        if not shown.is_open:
            return node.section.summary_text(shown.params, session), how_to_open(node.path)
        parts = [node.section.body(shown.params, session)]
        parts += [each.render() for each in node.section.media]
        return (*parts, _examples_text(node.section.tools)) if with_examples else tuple(parts)


@lru_cache(maxsize=256)
def _examples_text(tools: tuple[Tool[Any, Any], ...]) -> str:
    """Return the examples of tools as text; empty if there are none."""
    lines: list[str] = []
    for tool in tools:
        for example in tool.examples:
            lines.append(f"- `{tool.name}`: {example.description}")
            lines.append(f"  - call: `{json.dumps(example.arguments, ensure_ascii=False)}`")
            if example.output is not None:
                answer = json.dumps(dump(example.output), ensure_ascii=False)
                lines.append(f"  - result: `{answer}`")
    return "\n".join(["**Examples**", "", *lines]) if lines else ""


# The tree


def _nodes(
    sections: Sequence[Section[Any]], above: str = "", around: tuple[Section[Any], ...] = ()
) -> tuple[_Node, ...]:
    place = above.rstrip("/") or "the prompt"
    for section in cast("Sequence[object]", sections):
        if not isinstance(section, Section):
            raise PromptValidationError(f"in {place}: {section!r} is not a Section")
        if section in around:
            raise PromptValidationError(f"in {place}: section {section.label!r} contains itself")
    explicit = [s.key for s in sections if s.key]
    repeated = sorted({key for key in explicit if explicit.count(key) > 1})
    if repeated:
        raise PromptValidationError(f"duplicate section keys in {place}: {', '.join(repeated)}")
    taken = set(explicit)
    nodes: list[_Node] = []
    for section in sections:
        key = section.derived_key()
        if not section.key:
            number = 2
            while key in taken:
                key = f"{section.derived_key()}-{number}"
                number += 1
            taken.add(key)
        path = f"{above}{key}"
        title = section.title or key.replace("-", " ").title()
        children = _nodes(section.children, f"{path}/", (*around, section))
        nodes.append(_Node(section, path, len(around) + 1, title, children))
    return tuple(nodes)


def walk(nodes: Iterable[_Node]) -> Iterator[_Node]:
    for node in nodes:
        yield node
        yield from walk(node.children)


def check_prompt(prompt: object) -> None:
    """Refuse a template, or anything else, where a Prompt is expected."""
    if isinstance(prompt, PromptTemplate):
        raise TypeError("expected a Prompt, got a PromptTemplate: write Prompt(template)")
    if not isinstance(prompt, Prompt):
        raise TypeError(f"expected a Prompt, got {prompt!r}")


def _check(nodes: Sequence[_Node], policies: Iterable[AttachedPolicy]) -> None:
    """Refuse problems that do not depend on which sections are enabled."""
    _refuse_duplicates(_always_offered(nodes))
    sections = [node.section for node in walk(nodes)]
    every = (*(policy for section in sections for policy in section.policies), *policies)
    refuse_shared_names(every, PromptValidationError)
    known = names_of(tool for section in sections for tool in section.tools) | RUNTIME_TOOLS
    for section in sections:
        section.check_policies(known)
    refuse_unknown_tools(policies, known, known, "the prompt", PromptValidationError)
    refuse_unknown_references(every, known, "the prompt", PromptValidationError)
    tools = (tool for section in sections for tool in section.tools)
    refuse_unknown_cascades(tools, known, "the prompt", PromptValidationError)


def _each_once(policies: Iterable[AttachedPolicy]) -> tuple[AttachedPolicy, ...]:
    return tuple({id(policy.policy): policy for policy in policies}.values())


def _always_offered(nodes: Iterable[_Node]) -> Iterator[tuple[Tool[Any, Any], _Node]]:
    for node in nodes:
        if node.section.enabled is None:
            yield from ((tool, node) for tool in node.section.tools)
            yield from _always_offered(node.children)


def _refuse_duplicates(offered: Iterable[tuple[Tool[Any, Any], _Node | None]]) -> None:
    seen: dict[str, str] = {}
    for tool, node in offered:
        where = "the tools that open sections" if node is None else repr(node.path)
        if tool.name in seen:
            raise PromptValidationError(
                f"two tools are called {tool.name!r}: one in section {seen[tool.name]}, "
                f"one in {where}"
            )
        seen[tool.name] = where
