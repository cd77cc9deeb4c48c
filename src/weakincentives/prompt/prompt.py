"""Prompts: a tree of sections, bound to parameters and resources, rendered for a model."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from weakincentives.errors import PromptRenderError, PromptValidationError
from weakincentives.prompt.policies import AttachedPolicy, attach
from weakincentives.prompt.section import MarkdownSection, Section
from weakincentives.prompt.tool import Tool
from weakincentives.prompt.typed import TypedConstructor
from weakincentives.resources import ResourceContext, ResourceRegistry

if TYPE_CHECKING:
    from weakincentives.runtime.session import Session

__all__ = ["Prompt", "PromptResources", "PromptTemplate", "RenderedPrompt"]

T = TypeVar("T")
OutT = TypeVar("OutT")


@dataclass(frozen=True, slots=True)
class _Node:
    """A section at its place in the tree."""

    section: Section[Any]
    path: tuple[str, ...]
    title: str
    children: tuple[_Node, ...]

    def walk(self) -> Iterator[_Node]:
        yield self
        for child in self.children:
            yield from child.walk()


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
        needs_loop = (
            tool.is_async or tool.timeout is not None or any(p.is_async for p in policies)
        )
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
        resources: Mapping[type, object] | None = None,
        key: str = "",
        ns: str = "",
        name: str = "",
        output_type: Any = None,
    ) -> None:
        self.sections = tuple(sections)
        self.policies = attach(policies)
        self.resources = ResourceRegistry.build(resources or {})
        self.nodes = _nodes(self.sections, ())
        self.name = name or (self.nodes[0].title if self.nodes else "prompt")
        self.key = key or re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "prompt"
        self.ns = ns or "default"
        self.output_type = output_type
        _refuse_duplicates(_always_offered(self.nodes))

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
        with self._lock:
            if self._context is None:
                self._context = self.registry.open()
            return self._context

    def get(self, key: type[T]) -> T:
        """Return the resource bound for a type."""
        return self.context.get(key)

    def find(self, key: type[T]) -> T | None:
        """Return the resource bound for a type, or None."""
        return self.context.find(key)

    def __enter__(self) -> PromptResources:
        _ = self.context
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
            context.__exit__(exc_type, exc, traceback)


class Prompt(Generic[OutT]):
    """A template with its parameters and resources."""

    def __init__(self, template: PromptTemplate[OutT]) -> None:
        self.template = template
        self._params: dict[type, object] = {}
        self._sections: tuple[Section[Any], ...] = ()
        self._nodes = template.nodes
        self._bound = ResourceRegistry.build({})
        self._resources: PromptResources | None = None
        self._rendered: RenderedPrompt | None = None

    def bind(
        self,
        *params: object,
        resources: Mapping[type, object] | None = None,
        sections: Sequence[Section[Any]] = (),
        extra_tools: Sequence[Tool[Any, Any]] = (),
    ) -> Prompt[OutT]:
        """Return this prompt with parameters, resources and sections added.

        Parameters are dataclass instances; each section takes the one of its own type. What is
        bound here wins over what a section brings, and that over the template's.
        """
        bound = Prompt(self.template)
        bound._params = {**self._params, **{type(p): p for p in params if p is not None}}
        bound._bound = self._bound.merge(ResourceRegistry.build(resources or {}))
        added = tuple(sections)
        if extra_tools:
            warnings.warn(
                "extra_tools offers tools without guidance; put them into a section instead",
                stacklevel=2,
            )
            added = (*added, MarkdownSection(title="Extra tools", tools=extra_tools))
        bound._sections = (*self._sections, *added)
        bound._nodes = _nodes((*self.template.sections, *bound._sections), ())
        _refuse_duplicates(_always_offered(bound._nodes))
        return bound

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
        if self._resources is None:
            registry = self.template.resources
            for top in self._nodes:
                for node in top.walk():
                    registry = registry.merge(node.section.resources)
            self._resources = PromptResources(registry.merge(self._bound))
        return self._resources

    @property
    def rendered(self) -> RenderedPrompt:
        """The last rendering; rendered now if there is none."""
        return self._rendered or self.render()

    def render(self, session: Session | None = None) -> RenderedPrompt:
        """Return the text and tools for a model.

        With a session, that session is told: its calls find the tools of this rendering.
        """
        blocks: list[str] = []
        offered: list[tuple[Tool[Any, Any], Section[Any]]] = []
        self._render(self._nodes, "", session, blocks, offered)
        _refuse_duplicates((tool, section.label) for tool, section in offered)
        policies = [p for _, section in self._enabled(session) for p in section.policies]
        listeners = tuple(
            p for p in (*policies, *self.template.policies) if p.on_result is not None
        )
        rendered = RenderedPrompt(
            text="\n\n".join(blocks),
            tools=tuple(tool for tool, _ in offered),
            offers={
                tool.name: Offer.of(tool, (*section.policies, *self.template.policies), listeners)
                for tool, section in offered
            },
        )
        self._rendered = rendered
        if session is not None:
            session.offer(self, rendered)
        return rendered

    def _enabled(self, session: Session | None) -> Iterator[tuple[_Node, Section[Any]]]:
        def walk(nodes: Sequence[_Node]) -> Iterator[tuple[_Node, Section[Any]]]:
            for node in nodes:
                if node.section.is_enabled(self._params_of(node), session):
                    yield node, node.section
                    yield from walk(node.children)

        return walk(self._nodes)

    def _render(
        self,
        nodes: Sequence[_Node],
        prefix: str,
        session: Session | None,
        blocks: list[str],
        offered: list[tuple[Tool[Any, Any], Section[Any]]],
    ) -> None:
        number = 0
        for node in nodes:
            params = self._params_of(node)
            if not node.section.is_enabled(params, session):
                continue
            number += 1
            numbering = f"{prefix}{number}."
            heading = f"{'#' * min(1 + len(node.path), 6)} {numbering} {node.title}"
            try:
                body = node.section.body(params, session)
            except PromptRenderError as error:
                raise PromptRenderError(f"section {'/'.join(node.path)}: {error}") from error
            blocks.append(f"{heading}\n\n{body}" if body else heading)
            offered.extend((tool, node.section) for tool in node.section.tools)
            self._render(node.children, numbering, session, blocks, offered)

    def _params_of(self, node: _Node) -> object:
        wanted = node.section.params_type
        if wanted is None:
            return None
        params = self._params.get(wanted, node.section.default_params)
        if params is None:
            raise PromptRenderError(
                f"section {'/'.join(node.path)} needs {wanted.__name__}; "
                f"pass one: prompt.bind({wanted.__name__}(...))"
            )
        return params


def _nodes(sections: Sequence[Section[Any]], above: tuple[str, ...]) -> tuple[_Node, ...]:
    explicit = [s.key for s in sections if s.key]
    repeated = sorted({key for key in explicit if explicit.count(key) > 1})
    if repeated:
        place = "/".join(above) or "the prompt"
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
        path = (*above, key)
        title = section.title or key.replace("-", " ").title()
        nodes.append(_Node(section, path, title, _nodes(section.children, path)))
    return tuple(nodes)


def _always_offered(nodes: Sequence[_Node]) -> Iterator[tuple[Tool[Any, Any], str]]:
    for node in nodes:
        if node.section.enabled is None:
            for tool in node.section.tools:
                yield tool, "/".join(node.path)
            yield from _always_offered(node.children)


def _refuse_duplicates(offered: Any) -> None:
    seen: dict[str, str] = {}
    for tool, where in offered:
        if tool.name in seen:
            raise PromptValidationError(
                f"two tools are called {tool.name!r}: one in section {seen[tool.name]!r}, "
                f"one in {where!r}"
            )
        seen[tool.name] = where
