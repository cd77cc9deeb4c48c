"""Sections: guidance for the model, together with its tools, policies and resources.

A section may be shown as a summary until the model opens it. The choice lives in the session, so
it follows snapshots, restore and reset. The model calls ``open_sections``, which raises: the call
is rolled back, and the loop stores the choice with ``expand(session, error)`` and renders again.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from string import Template
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    get_args,
    get_origin,
)

from weakincentives.errors import (
    PromptRenderError,
    PromptValidationError,
    ToolDefinitionError,
    ToolValidationError,
    VisibilityExpansionRequired,
)
from weakincentives.prompt.context import ToolContext
from weakincentives.prompt.policies import AnyPolicy, attach, names_of, refuse_unknown_tools
from weakincentives.prompt.signatures import TypedConstructor, is_async, show
from weakincentives.prompt.tool import Tool, ToolExample
from weakincentives.resources import ResourceRegistry
from weakincentives.serde import dump
from weakincentives.session.slices import Reducer, Slice, upsert_by
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    from weakincentives.core.media import Media
    from weakincentives.session.session import Session

    ParamsT = TypeVarWithDefault("ParamsT", default=Any)
else:
    ParamsT = TypeVar("ParamsT")

_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


# Visibility


class SectionVisibility(Enum):
    """How much of a section the model is shown."""

    FULL = "full"
    SUMMARY = "summary"
    """Its heading and summary; neither its children nor its tools."""


@dataclass(frozen=True, slots=True)
class VisibilityState:
    """The choice for one section. A STATE slice: it follows snapshots."""

    section: str
    """The path of the section: the keys from the outermost to its own, joined by "/"."""
    visibility: SectionVisibility


_note: Reducer[VisibilityState] = upsert_by(lambda state: state.section)


def set_visibility(session: Session, section: str, visibility: SectionVisibility) -> None:
    """Choose how the next renderings for this session show the section at a path."""
    state = VisibilityState(section, SectionVisibility(visibility))
    session[VisibilityState].update(lambda current: Slice.of(_note(current, state)))


def expand(session: Session, error: VisibilityExpansionRequired) -> None:
    """Open the sections requested by a call of ``open_sections``; then render again."""
    for section in error.section_keys:
        set_visibility(session, section, SectionVisibility.FULL)


def chosen(session: Session | None) -> dict[str, SectionVisibility]:
    """Return the choices in the session, by path."""
    if session is None:
        return {}
    return {state.section: state.visibility for state in session.read_slice(VisibilityState)}


def how_to_open(path: str) -> str:
    """Return the line below a summary."""
    return (
        f"_This is a summary. To get the whole section and its tools, call `open_sections` with "
        f'`"{path}"`; to only read it, call `read_section`._'
    )


# Sections


class SectionOptions(TypedDict, Generic[ParamsT], total=False):
    """The options of every section; for the ``__init__`` of your own section class."""

    title: str
    key: str
    tools: Sequence[Tool[Any, Any]]
    policies: Sequence[AnyPolicy]
    children: Sequence[Section[Any]]
    enabled: Callable[..., bool] | None
    resources: Mapping[type[Any], Any] | ResourceRegistry | None
    default_params: ParamsT | None
    params_type: type[ParamsT] | None
    accepts_overrides: bool
    visibility: SectionVisibility | Callable[..., SectionVisibility]
    summary: str
    media: Sequence[Media]


class Section(TypedConstructor, Generic[ParamsT]):
    """A part of a prompt. Subclass it and define ``body`` for your own."""

    _declared_params: Any = None
    """``Params`` of a ``class Mine(Section[Params])``."""

    depends_only_on_params = False
    """Whether equal params always give the same text, so that it may be cached."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        speaks_for_itself = {"body", "summary_text"} & cls.__dict__.keys()
        if speaks_for_itself and "depends_only_on_params" not in cls.__dict__:
            # The promise of a base class does not cover another text.
            cls.depends_only_on_params = False
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin, args = get_origin(base), get_args(base)
            if isinstance(origin, type) and issubclass(origin, Section):
                cls._declared_params = args[0]

    def __repr__(self) -> str:
        named = [tool.name for tool in self.tools]
        tools = f", tools: {', '.join(named)}" if named else ""
        return f"<{type(self).__name__} {self.derived_key()!r}{tools}>"

    def __init__(
        self,
        *,
        title: str = "",
        key: str = "",
        tools: Sequence[Tool[Any, Any]] = (),
        policies: Sequence[AnyPolicy] = (),
        children: Sequence[Section[Any]] = (),
        enabled: Callable[..., bool] | None = None,
        resources: Mapping[type[Any], Any] | ResourceRegistry | None = None,
        default_params: ParamsT | None = None,
        params_type: type[ParamsT] | None = None,
        accepts_overrides: bool = True,
        visibility: SectionVisibility | Callable[..., SectionVisibility] = SectionVisibility.FULL,
        summary: str = "",
        media: Sequence[Media] = (),
    ) -> None:
        if key and not _KEY.fullmatch(key):
            raise PromptValidationError(
                f"section key {key!r} must match ^{_KEY.pattern}$: lower-case letters, digits, "
                "'.', '_' and '-'"
            )
        self.key = key
        """Its address; derived from the title if left out."""
        self.title = title or re.sub(r"[-_.]+", " ", key).strip().title()
        if not isinstance(tools, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PromptValidationError(
                f"section {title!r}: tools are a list, got {tools!r}: write tools=[...]"
            )
        self.tools = tuple(tools)
        self.policies = attach(policies)
        self.children = tuple(children)
        self.media = tuple(media)
        """Pictures and files, shown in the first message while the section is open."""
        self.resources = ResourceRegistry.build({} if resources is None else resources)
        self.enabled = enabled
        self.default_params = default_params
        self.accepts_overrides = accepts_overrides
        """Whether overrides may replace the text; each tool has its own option."""
        self.params_type: Any = params_type or self._declared_params
        self._ask_enabled = None if enabled is None else _asked(self.label, "enabled", enabled)
        self._check_params()
        self.visibility = visibility
        """Applies until the session holds a choice."""
        is_fixed = isinstance(visibility, SectionVisibility)
        self._ask_visibility = None if is_fixed else _asked(self.label, "visibility", visibility)
        self.summary = textwrap.dedent(summary).strip()
        self._summary = _template(self.label, "summary", self.summary, self.params_type)
        if visibility is not SectionVisibility.FULL and not self.summary:
            raise PromptValidationError(
                f"section {self.label!r}: a section that may be summarized needs summary=..."
            )
        for tool in cast("tuple[object, ...]", self.tools):
            if not isinstance(tool, Tool):
                raise PromptValidationError(
                    f"section {self.label!r}: {tool!r} is not a Tool; "
                    "make one with Tool[Params, Result](...) or @tool"
                )
        if self.tools:  # a class of your own may add its tools later: the prompt checks again
            self.check_policies()

    def check_policies(self, elsewhere: Collection[str] = ()) -> None:
        """Refuse policies about tools that it does not offer; ``elsewhere`` are others' tools."""
        where = f"section {self.label!r}"
        own = names_of(self.tools)
        refuse_unknown_tools(self.policies, own, elsewhere, where, PromptValidationError)

    def _check_params(self) -> None:
        wanted, default = self.params_type, cast("object", self.default_params)
        if isinstance(wanted, TypeVar) or wanted in (Any, NoneType):
            wanted = None
        if wanted is None and default is not None:
            wanted = type(default)
        self.params_type = wanted
        if wanted is None:
            return
        if not (isinstance(wanted, type) and is_dataclass(wanted)):
            raise PromptValidationError(
                f"section {self.label!r}: parameters must be a dataclass, got {show(wanted)}"
            )
        if default is not None and not isinstance(default, wanted):
            raise PromptValidationError(
                f"section {self.label!r}: default_params must be {show(wanted)}, "
                f"got {show(type(default))}"
            )

    @classmethod
    def with_types(cls, type_args: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        (params_type,) = type_args
        return cls(*args, params_type=params_type, **kwargs)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.key or self.title or "section"

    def derived_key(self) -> str:
        """Return the key, or one made from the title."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")[:64]
        return self.key or slug or "section"

    def is_enabled(self, params: object, session: Session | None) -> bool:
        """Whether it is part of the prompt now, with its children and tools."""
        return self._ask_enabled is None or bool(self._ask_enabled(params, session))

    def visibility_now(self, params: object, session: Session | None) -> SectionVisibility:
        """Return the visibility if the session holds no choice."""
        if self._ask_visibility is None:
            return cast("SectionVisibility", self.visibility)
        answer = self._ask_visibility(params, session)
        try:
            return SectionVisibility(answer)
        except ValueError:
            raise PromptRenderError(
                f"visibility must return a SectionVisibility, got {answer!r}"
            ) from None

    def summary_text(self, params: object, session: Session | None) -> str:
        """Return the summary with the parameters filled in."""
        return _filled(self._summary, params)

    def body(self, params: Any, session: Session | None) -> str:
        """Return the text under the heading."""
        raise NotImplementedError


class MarkdownSection(Section[ParamsT]):
    """A section whose text is a Markdown template: ``$field`` stands for a parameter.

    >>> section = MarkdownSection(title="Deployment", template="Deploy after testing.")
    """

    depends_only_on_params = True

    def __init__(self, *, template: str = "", **options: Unpack[SectionOptions[ParamsT]]) -> None:
        super().__init__(**options)
        self._set_template(template)

    def with_template(self, template: str) -> MarkdownSection[ParamsT]:
        """Return a copy with another text, for the same parameters."""
        copied = copy.copy(self)
        copied._set_template(template)
        return copied

    def _set_template(self, template: str) -> None:
        self.template = textwrap.dedent(template).strip()
        self._template = _template(self.label, "template", self.template, self.params_type)

    def body(self, params: Any, session: Session | None) -> str:
        return _filled(self._template, params)


def _template(label: str, what: str, text: str, params_type: Any) -> Template:
    """Return the template of a text; refuse unknown placeholders."""
    template = Template(text)
    if not template.is_valid():
        raise PromptValidationError(
            f"section {label!r}: the {what} has a '$' without a placeholder; "
            "write '$$' for a dollar sign"
        )
    known = [] if params_type is None else [f.name for f in fields(params_type)]
    unknown = [f"${name}" for name in template.get_identifiers() if name not in known]
    if unknown:
        has = (
            "it has no parameters, write MarkdownSection[Params](...)"
            if params_type is None
            else f"{show(params_type)} has {', '.join(known) or 'no fields'}"
        )
        raise PromptValidationError(
            f"section {label!r}: unknown placeholders {', '.join(unknown)}; {has}; "
            "write '$$' for a dollar sign"
        )
    return template


def _filled(template: Template, params: Any) -> str:
    names = () if params is None else (each.name for each in fields(params))
    return template.substitute({name: getattr(params, name) for name in names})


def _asked(label: str, what: str, function: Any) -> Callable[[object, Session | None], object]:
    """Adapt a function of ``params``, of ``session``, of both, or of nothing.

    It is called with those that it names; if it names neither, with both in this order, as far as
    it has parameters without a default.
    """
    if not callable(function) or is_async(function):
        raise PromptValidationError(
            f"section {label!r}: {what} takes a plain function, got {function!r}"
        )
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.name in ("params", "session")]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    others = [
        p
        for p in parameters
        if p.name not in named and p.default is p.empty and p.kind not in variadic
    ]
    if named and not others:
        return lambda params, session: function(
            **{name: params if name == "params" else session for name in named}
        )
    if named or len(others) > 2:
        raise PromptValidationError(
            f"section {label!r}: {what} is called with params and session, got {function!r}"
        )
    return lambda params, session: function(*(params, session)[: len(others)])


# The tools of a prompt with summaries


@dataclass(frozen=True, slots=True)
class OpenSectionsParams:
    section_keys: tuple[str, ...]
    """The sections to open, as named below their summaries."""
    reason: str
    """Why they are needed, in one sentence."""


@dataclass(frozen=True, slots=True)
class ReadSectionParams:
    section_key: str
    """The section to read, as named below its summary."""


@dataclass(frozen=True, slots=True)
class SectionText:
    section: str
    text: str

    def render(self) -> str:
        return self.text


def _open_sections(params: OpenSectionsParams, *, context: ToolContext) -> ToolResult[None]:
    keys = tuple(dict.fromkeys(params.section_keys))
    _refuse_others(keys, context)
    raise VisibilityExpansionRequired(
        f"Open sections: {', '.join(keys)}. Reason: {params.reason}", section_keys=keys
    )


def _read_section(params: ReadSectionParams, *, context: ToolContext) -> ToolResult[SectionText]:
    path = params.section_key
    _refuse_others((path,), context)
    prompt = context.prompt or context.session.prompt
    if prompt is None:
        raise ToolValidationError("no prompt was rendered for this session")
    return ToolResult.ok(SectionText(path, prompt.section_text(path, context.session)))


def _refuse_others(keys: Sequence[str], context: ToolContext) -> None:
    """Refuse sections that the model was not shown as a summary."""
    rendered = context.rendering
    summarized = () if rendered is None else rendered.summarized
    others = ", ".join(repr(key) for key in keys if key not in summarized)
    if keys and not others:
        return
    if keys:
        problem = f"Not a summarized section: {others}. It does not exist or is already open"
    else:
        problem = "No section was named"
    known = ", ".join(summarized) or "none"
    raise ToolValidationError(f"{problem}. Summarized sections: {known}")


@cache  # made when first needed: declaring a tool loads pydantic
def disclosure_tools() -> tuple[Tool[Any, Any], ...]:
    """Return the tools of a prompt with summarized sections."""
    return (
        Tool[OpenSectionsParams, None](
            name="open_sections",
            description="Show summarized sections in full and get their tools.",
            handler=_open_sections,
            reach="read",
        ),
        Tool[ReadSectionParams, SectionText](
            name="read_section",
            description="Read the full text of a summarized section without opening it.",
            handler=_read_section,
            reach="read",
        ),
    )


# Examples of whole tasks


@dataclass(frozen=True, slots=True)
class TaskStep:
    """One call of a task, checked against the types of its tool."""

    tool: Tool[Any, Any]
    example: ToolExample[Any, Any]

    def __post_init__(self) -> None:
        try:
            self.tool.replace(examples=(self.example,))
        except ToolDefinitionError as error:
            raise PromptValidationError(f"a step of a task: {error}") from error


@dataclass(frozen=True, slots=True)
class TaskExample:
    """A well-done task, from the objective to the outcome."""

    objective: str
    outcome: object
    """Text, or an instance of the prompt's output type."""
    steps: Sequence[TaskStep] = ()

    def __post_init__(self) -> None:
        if not self.objective.strip():
            raise PromptValidationError("the example of a task needs an objective")
        try:
            _as_json(self.outcome)
        except (TypeError, ValueError) as error:
            raise PromptValidationError(
                f"the outcome of task {self.objective!r} cannot be shown as JSON: {error}"
            ) from error
        object.__setattr__(self, "steps", tuple(self.steps))
        for step in cast("tuple[object, ...]", self.steps):
            if not isinstance(step, TaskStep):
                raise PromptValidationError(
                    f"the example of task {self.objective!r}: {step!r} is not a TaskStep"
                )

    def render(self) -> str:
        """Return it as text for the model."""
        calls = [
            f"{number}. {step.example.description}: `{step.tool.name}` with "
            f"`{_as_json(step.example.arguments)}` gives `{_as_json(step.example.output)}`"
            for number, step in enumerate(self.steps, 1)
        ]
        is_text = isinstance(self.outcome, str)
        outcome = self.outcome if is_text else f"`{_as_json(self.outcome)}`"
        parts = (f"**Task**: {self.objective}", "\n".join(calls), f"**Outcome**: {outcome}")
        return "\n\n".join(part for part in parts if part)


class TaskExamplesSection(Section[Any]):
    """A section that shows how whole tasks are done.

    >>> section = TaskExamplesSection(examples=[TaskExample("Say hi", "Hi!")])
    """

    depends_only_on_params = True

    def __init__(
        self, *, examples: Sequence[TaskExample], **options: Unpack[SectionOptions[Any]]
    ) -> None:
        if not options.get("key"):
            options.setdefault("title", "Examples")
        super().__init__(**options)
        self.examples = tuple(examples)

    def body(self, params: Any, session: Session | None) -> str:
        return "\n\n".join(example.render() for example in self.examples)


def _as_json(value: object) -> str:
    return json.dumps(dump(value), ensure_ascii=False)
