"""Sections: guidance for the model together with the tools, policies and resources it is about."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
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

from weakincentives.errors import PromptValidationError
from weakincentives.prompt.policies import attach
from weakincentives.prompt.signatures import is_async, misfit, show
from weakincentives.prompt.tool import Tool
from weakincentives.prompt.typed import TypedConstructor
from weakincentives.resources import ResourceRegistry

__all__ = ["MarkdownSection", "Section", "SectionOptions"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    from weakincentives.runtime.session import Session

    ParamsT = TypeVarWithDefault("ParamsT", default=Any)
else:
    ParamsT = TypeVar("ParamsT")

_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class SectionOptions(TypedDict, Generic[ParamsT], total=False):
    """What every section takes; for the ``__init__`` of a section of your own."""

    title: str
    key: str
    tools: Sequence[Tool[Any, Any]]
    policies: Sequence[object]
    children: Sequence[Section[Any]]
    enabled: Callable[..., bool] | None
    resources: Mapping[type[Any], Any] | ResourceRegistry | None
    default_params: ParamsT | None
    params_type: type[ParamsT] | None


class Section(TypedConstructor, Generic[ParamsT]):
    """A part of a prompt. Subclass it and give ``body`` to make a suite of your own."""

    _declared_params: Any = None
    """Params of a ``class Mine(Section[Params])``."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin, args = get_origin(base), get_args(base)
            if isinstance(origin, type) and issubclass(origin, Section):
                cls._declared_params = args[0]

    def __init__(
        self,
        *,
        title: str = "",
        key: str = "",
        tools: Sequence[Tool[Any, Any]] = (),
        policies: Sequence[object] = (),
        children: Sequence[Section[Any]] = (),
        enabled: Callable[..., bool] | None = None,
        resources: Mapping[type[Any], Any] | ResourceRegistry | None = None,
        default_params: ParamsT | None = None,
        params_type: type[ParamsT] | None = None,
    ) -> None:
        if key and not _KEY.fullmatch(key):
            raise PromptValidationError(
                f"section key {key!r} must match ^{_KEY.pattern}$: lower-case letters, digits, "
                "'.', '_' and '-'"
            )
        self.key = key
        """What it is addressed by; derived from the title where it is left out."""
        self.title = title or re.sub(r"[-_.]+", " ", key).strip().title()
        self.tools = tuple(tools)
        self.policies = attach(policies)
        self.children = tuple(children)
        self.resources = ResourceRegistry.build({} if resources is None else resources)
        self.enabled = enabled
        self.default_params = default_params
        self.params_type: Any = params_type or self._declared_params
        self._ask_enabled = None if enabled is None else _condition(self.label, enabled)
        self._check_params()
        for tool in cast("tuple[object, ...]", self.tools):
            if not isinstance(tool, Tool):
                raise PromptValidationError(
                    f"section {self.label!r}: {tool!r} is not a Tool; "
                    "make one with Tool[Params, Result](...) or @tool"
                )

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
        """How messages call it."""
        return self.key or self.title or "section"

    def derived_key(self) -> str:
        """Return the key, made from the title where none was given."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")[:64]
        return self.key or slug or "section"

    def is_enabled(self, params: object, session: Session | None) -> bool:
        """Whether it is part of the prompt now; its children and tools go with it."""
        return self._ask_enabled is None or self._ask_enabled(params, session)

    def body(self, params: Any, session: Session | None) -> str:
        """Return the text under the heading."""
        raise NotImplementedError


class MarkdownSection(Section[ParamsT]):
    """A section whose text is a Markdown template: ``$field`` stands for a parameter.

    >>> section = MarkdownSection(title="Deployment", template="Deploy after testing.")
    """

    def __init__(self, *, template: str = "", **options: Unpack[SectionOptions[ParamsT]]) -> None:
        super().__init__(**options)
        self.template = textwrap.dedent(template).strip()
        self._template = Template(self.template)
        if not self._template.is_valid():
            raise PromptValidationError(
                f"section {self.label!r}: the template has a '$' that begins no placeholder; "
                "write '$$' for a dollar sign"
            )
        known = [] if self.params_type is None else [f.name for f in fields(self.params_type)]
        unknown = [f"${name}" for name in self._template.get_identifiers() if name not in known]
        if unknown:
            has = (
                "it has no parameters, write MarkdownSection[Params](...)"
                if self.params_type is None
                else f"{show(self.params_type)} has {', '.join(known) or 'no fields'}"
            )
            raise PromptValidationError(
                f"section {self.label!r}: unknown placeholders {', '.join(unknown)}; {has}; "
                "write '$$' for a dollar sign"
            )

    def body(self, params: Any, session: Session | None) -> str:
        names = () if params is None else (each.name for each in fields(params))
        return self._template.substitute({name: getattr(params, name) for name in names})


def _condition(label: str, enabled: object) -> Callable[[object, Session | None], bool]:
    """Adapt a function of ``params``, of ``session``, of both, or of nothing."""
    if not callable(enabled) or is_async(enabled):
        raise PromptValidationError(
            f"section {label!r}: enabled takes a plain function, got {enabled!r}"
        )
    by_place, by_name = _picks(enabled)
    problem = misfit(enabled, *by_place, **by_name)
    if problem is not None:
        raise PromptValidationError(
            f"section {label!r}: enabled is called with params and session: {problem}"
        )

    def ask(params: object, session: Session | None) -> bool:
        given = {"params": params, "session": session}
        args = [given[what] for what in by_place]
        return bool(enabled(*args, **{name: given[what] for name, what in by_name.items()}))

    return ask


def _picks(function: Callable[..., object]) -> tuple[list[str], dict[str, str]]:
    """Return which of ``params`` and ``session`` each parameter stands for, by place and by name.

    A parameter with another name stands for the next of the two that no name asks for; one with a
    default brings a value of its own, as in ``lambda limit=limit: ...``.
    """
    parameters = inspect.signature(function).parameters.values()
    left = [what for what in ("params", "session") if all(p.name != what for p in parameters)]
    by_place: list[str] = []
    by_name: dict[str, str] = {}
    for parameter in parameters:
        what = parameter.name
        if what not in ("params", "session"):
            is_own = parameter.default is not parameter.empty
            if is_own or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            what = left.pop(0) if left else ""
        if parameter.kind is parameter.POSITIONAL_ONLY:
            by_place.append(what)
        elif what:
            by_name[parameter.name] = what
    return by_place, by_name
