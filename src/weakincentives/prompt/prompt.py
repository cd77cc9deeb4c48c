"""Prompts: a tree of sections, bound to parameters and resources, rendered for a model."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from weakincentives.errors import PromptRenderError, PromptValidationError
from weakincentives.prompt.policies import AttachedPolicy, attach
from weakincentives.prompt.section import MarkdownSection, Section
from weakincentives.prompt.tool import Tool
from weakincentives.prompt.typed import TypedConstructor
from weakincentives.resources import ResourceContext, ResourceRegistry

__all__ = ["Prompt", "PromptResources", "PromptTemplate", "RenderedPrompt"]

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    from weakincentives.runtime.session import Session

    OutT = TypeVarWithDefault("OutT", default=Any)
else:
    OutT = TypeVar("OutT")

Resources = Mapping[type[Any], Any] | ResourceRegistry


@dataclass(frozen=True, slots=True)
class _Node:
    """A section at its place in the tree."""

    section: Section[Any]
    path: str
    depth: int
    title: str
    children: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool as it is offered in a rendered prompt, with the policies that govern it."""

    tool: Tool[Any, Any]
    policies: tuple[AttachedPolicy, ...] = ()
    """Asked before a call: those of the tool's section first, then the prompt's."""
    listeners: tuple[AttachedPolicy, ...] = ()
    """Told of a success: every policy of the prompt that wants to know."""
    needs_loop: bool = False

    @classmethod
    def of(
        cls,
        tool: Tool[Any, Any],
        policies: tuple[AttachedPolicy, ...] = (),
        listeners: tuple[AttachedPolicy, ...] = (),
    ) -> Offer:
        needs_loop = tool.is_async or tool.timeout is not None or any(p.is_async for p in policies)
        return cls(tool, policies, listeners, needs_loop)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """What the model is given: the text, and the tools in the order they were declared."""

    text: str
    tools: tuple[Tool[Any, Any], ...]
    offers: Mapping[str, Offer] = field(repr=False, default_factory=dict[str, Offer])

    def __str__(self) -> str:
        return self.text


class PromptTemplate(TypedConstructor, Generic[OutT]):
    """The part of a prompt that does not change between runs."""

    def __init__(
        self,
        *,
        sections: Sequence[Section[Any]] = (),
        policies: Sequence[object] = (),
        resources: Resources | None = None,
        key: str = "",
        ns: str = "",
        name: str = "",
        output_type: Any = None,
    ) -> None:
        self.sections = tuple(sections)
        self.policies = attach(policies)
        self.resources = ResourceRegistry.build({} if resources is None else resources)
        self.nodes = _nodes(self.sections)
        self.name = name or (self.nodes[0].title if self.nodes else "prompt")
        self.key = key or re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "prompt"
        self.ns = ns or "default"
        self.output_type = output_type
        _check(self.nodes, self.policies)

    @classmethod
    def with_types(cls, type_args: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        (output_type,) = type_args
        return cls(*args, output_type=output_type, **kwargs)


class PromptResources:
    """``prompt.resources``: opens what is bound, lazily, and closes it at the end of ``with``."""

    def __init__(self, registry: ResourceRegistry) -> None:
        self.registry = registry
        self._context: ResourceContext | None = None
        self._depth = 0
        self._lock = threading.Lock()

    @property
    def context(self) -> ResourceContext:
        """The open context; opened now if it was not."""
        context = self._context
        if context is not None:  # without the lock: every call asks
            return context
        with self._lock:
            if self._context is None:
                self._context = self.registry.open()
            return self._context

    def get(self, kind: type[T]) -> T:
        """Return the resource bound for a type."""
        return self.context.get(kind)

    def find(self, kind: type[T]) -> T | None:
        """Return the resource bound for a type, or None."""
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

    def __init__(self, template: PromptTemplate[OutT]) -> None:
        self.template = template
        self._params: tuple[object, ...] = ()
        self._sections: tuple[Section[Any], ...] = ()
        self._bound = ResourceRegistry.of()
        self._rendered: RenderedPrompt | None = None
        self._place_sections()

    def bind(
        self,
        *params: object,
        resources: Resources | None = None,
        sections: Sequence[Section[Any]] = (),
        extra_tools: Sequence[Tool[Any, Any]] = (),
    ) -> Prompt[OutT]:
        """Return this prompt with parameters, resources and sections added.

        Parameters are dataclass instances; each section takes the one of its own type. What is
        bound here wins over what a section brings, and that over the template's.
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
        bound = Prompt(self.template)
        bound._params = (*reversed(params), *self._params)
        bound._sections = (*self._sections, *added)
        bound._bound = self._bound.merge({} if resources is None else resources)
        bound._place_sections()
        return bound

    def _place_sections(self) -> None:
        self._nodes = _nodes((*self.template.sections, *self._sections))
        _check(self._nodes, self.template.policies)
        registry = self.template.resources
        for node in _walk(self._nodes):
            registry = registry.merge(node.section.resources)
        self._resources = PromptResources(registry.merge(self._bound))

    @property
    def ns(self) -> str:
        return self.template.ns

    @property
    def key(self) -> str:
        return self.template.key

    @property
    def policies(self) -> tuple[AttachedPolicy, ...]:
        """The prompt-level policies."""
        return self.template.policies

    @property
    def resources(self) -> PromptResources:
        """What tools can ask for. Use it in a ``with`` statement to close it at the end."""
        return self._resources

    @property
    def rendered(self) -> RenderedPrompt:
        """The last rendering; rendered now if there is none."""
        return self._rendered or self.render()

    def render(self, session: Session | None = None) -> RenderedPrompt:
        """Return the text and tools for a model.

        With a session, that session is told: its calls find the tools of this rendering.
        """
        enabled = list(self._enabled(self._nodes, "", session))
        offered = [(tool, node) for _, node, _ in enabled for tool in node.section.tools]
        _refuse_duplicates(offered)
        ours = self.template.policies
        # Those of sections that are not enabled now hear, too: they may be later.
        every = (*(p for node in _walk(self._nodes) for p in node.section.policies), *ours)
        listeners = _each_once(p for p in every if p.on_result is not None)
        self._rendered = rendered = RenderedPrompt(
            text="\n\n".join(_block(*each, session) for each in enabled),
            tools=tuple(tool for tool, _ in offered),
            offers={
                tool.name: Offer.of(tool, _each_once((*node.section.policies, *ours)), listeners)
                for tool, node in offered
            },
        )
        if session is not None:
            session.offer(self, rendered)
        return rendered

    def _enabled(
        self, nodes: Sequence[_Node], prefix: str, session: Session | None
    ) -> Iterator[tuple[str, _Node, object]]:
        """Yield number, section and parameters of all that is enabled, in order."""
        count = 0
        for node in nodes:
            params = self._params_of(node)
            if node.section.is_enabled(params, session):
                count += 1
                number = f"{prefix}{count}."
                yield number, node, params
                yield from self._enabled(node.children, number, session)

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
                f"section {node.path} needs {wanted.__name__}, and what is bound is {bound}; "
                f"write prompt.bind({wanted.__name__}(...))"
            )
        return params


def _block(number: str, node: _Node, params: object, session: Session | None) -> str:
    heading = f"{'#' * min(1 + node.depth, 6)} {number} {node.title}"
    try:
        body = node.section.body(params, session)
    except PromptRenderError as error:
        raise PromptRenderError(f"section {node.path}: {error}") from error
    return f"{heading}\n\n{body}" if body else heading


def _nodes(sections: Sequence[Section[Any]], above: str = "", depth: int = 1) -> tuple[_Node, ...]:
    place = above.rstrip("/") or "the prompt"
    for section in cast("Sequence[object]", sections):
        if not isinstance(section, Section):
            raise PromptValidationError(f"in {place}: {section!r} is not a Section")
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
        children = _nodes(section.children, f"{path}/", depth + 1)
        nodes.append(_Node(section, path, depth, title, children))
    return tuple(nodes)


def _walk(nodes: Iterable[_Node]) -> Iterator[_Node]:
    for node in nodes:
        yield node
        yield from _walk(node.children)


def _check(nodes: Sequence[_Node], policies: Iterable[AttachedPolicy]) -> None:
    """Refuse what is wrong whatever will be enabled."""
    _refuse_duplicates(_always_offered(nodes))
    counting: dict[str, object] = {}
    for policy in (*(p for node in _walk(nodes) for p in node.section.policies), *policies):
        if policy.on_start is not None:
            other = counting.setdefault(policy.name, policy.policy)
            if other is not policy.policy:
                raise PromptValidationError(
                    f"two policies that count calls are both called {policy.name!r}, so they would "
                    f"count together; give one another name: {type(policy.policy).__name__}"
                    f"(..., name=...)"
                )


def _each_once(policies: Iterable[AttachedPolicy]) -> tuple[AttachedPolicy, ...]:
    """Return the policies in order; one that is attached in several places comes once."""
    return tuple({id(policy.policy): policy for policy in policies}.values())


def _always_offered(nodes: Iterable[_Node]) -> Iterator[tuple[Tool[Any, Any], _Node]]:
    for node in nodes:
        if node.section.enabled is None:
            yield from ((tool, node) for tool in node.section.tools)
            yield from _always_offered(node.children)


def _refuse_duplicates(offered: Iterable[tuple[Tool[Any, Any], _Node]]) -> None:
    seen: dict[str, str] = {}
    for tool, node in offered:
        if tool.name in seen:
            raise PromptValidationError(
                f"two tools are called {tool.name!r}: one in section {seen[tool.name]!r}, "
                f"one in {node.path!r}"
            )
        seen[tool.name] = node.path
