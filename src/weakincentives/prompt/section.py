"""Sections: guidance for the model together with the tools, policies and resources it is about."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from string import Template
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from weakincentives.errors import PromptRenderError, PromptValidationError
from weakincentives.prompt.policies import attach
from weakincentives.prompt.tool import Tool
from weakincentives.prompt.typed import TypedConstructor
from weakincentives.resources import ResourceRegistry

if TYPE_CHECKING:
    from weakincentives.runtime.session import Session

__all__ = ["MarkdownSection", "Section"]

ParamsT = TypeVar("ParamsT")

_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Section(TypedConstructor, Generic[ParamsT]):
    """A part of a prompt. Subclass it and give ``body`` to make a suite of your own."""

    def __init__(
        self,
        *,
        title: str = "",
        key: str = "",
        tools: Sequence[Tool[Any, Any]] = (),
        policies: Sequence[object] = (),
        children: Sequence[Section[Any]] = (),
        enabled: Callable[..., bool] | None = None,
        resources: Mapping[type, object] | None = None,
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
        self.title = title or (key.replace("-", " ").replace("_", " ").title() if key else "")
        self.tools = tuple(tools)
        self.policies = attach(policies)
        self.children = tuple(children)
        self.resources = ResourceRegistry.build(resources or {})
        self.default_params = default_params
        self.params_type: Any = params_type or (type(default_params) if default_params else None)
        self.enabled = enabled
        self._ask_enabled = None if enabled is None else _condition(enabled)
        for tool in self.tools:
            if not isinstance(tool, Tool):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise PromptValidationError(
                    f"section {self.label!r}: {tool!r} is not a Tool; "
                    "make one with Tool[Params, Result](...) or @tool"
                )
        for child in self.children:
            if not isinstance(child, Section):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise PromptValidationError(f"section {self.label!r}: {child!r} is not a Section")
        if self.params_type is not None and not is_dataclass(self.params_type):
            raise PromptValidationError(
                f"section {self.label!r}: parameters must be a dataclass, got {self.params_type!r}"
            )

    @classmethod
    def with_types(cls, type_args: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        (params_type,) = type_args
        if not isinstance(params_type, TypeVar) and params_type is not None:
            kwargs["params_type"] = params_type
        return cls(*args, **kwargs)

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
        return self._ask_enabled is None or bool(self._ask_enabled(params, session))

    def body(self, params: Any, session: Session | None) -> str:
        """Return the text under the heading."""
        raise NotImplementedError


class MarkdownSection(Section[ParamsT]):
    """A section whose text is a Markdown template: ``$field`` stands for a parameter.

    >>> section = MarkdownSection(title="Deployment", template="Deploy after testing.")
    """

    def __init__(self, *, template: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.template = textwrap.dedent(template).strip()
        self._template = Template(self.template)
        if not self._template.is_valid():
            raise PromptValidationError(
                f"section {self.label!r}: the template has a '$' that begins no placeholder; "
                "write '$$' for a dollar sign"
            )
        if self.params_type is not None:
            known = {f.name for f in fields(self.params_type)}
            unknown = sorted(set(self._template.get_identifiers()) - known)
            if unknown:
                raise PromptValidationError(
                    f"section {self.label!r}: unknown placeholders {', '.join(unknown)}; "
                    f"{self.params_type.__name__} has {', '.join(sorted(known)) or 'no fields'}"
                )

    def body(self, params: Any, session: Session | None) -> str:
        values = (
            {f.name: getattr(params, f.name) for f in fields(params)} if is_dataclass(params) else {}
        )
        try:
            return self._template.substitute(values)
        except KeyError as error:
            raise PromptRenderError(
                f"no value for ${error.args[0]}; bind parameters that have this field"
            ) from error


def _condition(enabled: Callable[..., bool]) -> Callable[[object, Session | None], bool]:
    """Adapt ``enabled()``, ``enabled(params)``, ``enabled(params, session)``, also by keyword."""
    parameters = inspect.signature(enabled).parameters
    by_keyword = {
        name
        for name, parameter in parameters.items()
        if name in ("params", "session") and parameter.kind is parameter.KEYWORD_ONLY
    }
    positional = [
        p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    session_only = len(positional) == 1 and positional[0].name == "session"

    def ask(params: object, session: Session | None) -> bool:
        offered = (session,) if session_only else (params, session)[: len(positional)]
        named = {"params": params, "session": session}
        return enabled(*offered, **{name: named[name] for name in by_keyword})

    return ask
