"""What a tool is: a name, a description, typed parameters, and the handler that does the work."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from dataclasses import replace as dataclass_replace
from functools import cached_property
from inspect import signature
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

from weakincentives.errors import InvalidArguments, ParseError, ToolDefinitionError
from weakincentives.prompt.context import ToolContext
from weakincentives.prompt.signatures import (
    UNKNOWN,
    TypedConstructor,
    can_be,
    hints_of,
    is_async,
    is_union,
    misfit,
    show,
)
from weakincentives.serde import dump, parse, schema
from weakincentives.serde.typed import is_plain, validator_for
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.prompt.contracts import Effect, Precondition
    from weakincentives.retry import RetryPolicy

P = TypeVar("P")
R = TypeVar("R")
V = TypeVar("V")
P_contra = TypeVar("P_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

Reach = Literal["read", "reversible", "compensable", "irreversible"]
"""How far a tool's changes go.

``read`` changes nothing; ``reversible`` changes only the session, files and resources that can be
snapshotted; ``compensable`` reaches outside and knows how to take that back; ``irreversible``
reaches outside for good. A tool that states nothing is rolled back as far as can be.
"""

Writes = Literal["api", "command", "external"]
"""How a tool changes files: through our filesystem, by a command we start, or otherwise."""

_NAME = re.compile(r"[a-z0-9_-]{1,64}")
_MAX_DESCRIPTION = 200


class ToolHandler(Protocol[P_contra, R_co]):
    """``handler(params, *, context) -> ToolResult``, plain or async."""

    def __call__(
        self, params: P_contra, /, *, context: ToolContext
    ) -> ToolResult[R_co] | Awaitable[ToolResult[R_co]]: ...


# No slots: with them, frozen and generic, `ToolExample[P, R](...)` is a TypeError on Python 3.11.
@dataclass(frozen=True)
class ToolExample(Generic[P, R]):
    """One representative call: shown to the model, checked against the tool's types."""

    description: str
    input: P
    output: R

    def __post_init__(self) -> None:
        if not 1 <= len(self.description) <= _MAX_DESCRIPTION:
            raise ToolDefinitionError(
                f"an example's description must have 1 to {_MAX_DESCRIPTION} characters, "
                f"got {len(self.description)}"
            )


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Tool(TypedConstructor, Generic[P, R]):
    """A capability offered to a model, with a contract that is checked when it is declared.

    ``Tool[Params, Result](name=..., description=..., handler=...)`` takes dataclasses, or None for
    a tool without parameters or without a structured result. Calling the tool runs the whole
    pipeline: validation, policies, transaction, record.
    """

    name: str
    description: str
    handler: ToolHandler[P, R] | None
    """None declares a tool that the provider runs itself."""
    params_type: Any = UNKNOWN
    result_type: Any = UNKNOWN
    examples: Sequence[ToolExample[Any, Any]] = ()
    accepts_overrides: bool = True
    parameter_descriptions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts for parameters that take the place of those in their type."""
    reach: Reach | None = None
    writes: Writes = "api"
    timeout: float | None = None
    """Seconds the handler may take; a sync handler with a timeout runs in a thread."""
    concurrent: bool | None = None
    """Whether it may run beside other calls of the same turn; by default an async handler may."""
    preconditions: Sequence[Precondition] = ()
    """What must hold before it runs."""
    effects: Sequence[Effect] = ()
    """What follows when it has succeeded."""
    retry: RetryPolicy | None = None
    """How often a failed call is tried again; each try starts from the state before the call."""
    title: str = ""
    input_schema: Mapping[str, Any] | None = None
    """The raw JSON schema of a tool made with ``from_schema``."""
    strict: bool = True
    """Hold the declaration to the contract: dataclasses, a handler that fits, a short text."""

    @classmethod
    def with_types(cls, type_args: tuple[Any, ...], *args: Any, **kwargs: Any) -> Tool[Any, Any]:
        if len(type_args) != 2:
            raise ToolDefinitionError(
                f"Tool takes two types, Tool[Params, Result]; got {len(type_args)}"
            )
        named = zip(("params_type", "result_type"), type_args, strict=True)
        known = {name: arg for name, arg in named if not isinstance(arg, TypeVar)}
        return cls(*args, **known, **kwargs)

    @staticmethod
    def from_schema(
        name: str,
        description: str,
        schema: Mapping[str, Any],
        handler: ToolHandler[dict[str, Any], V] | None,
        **options: Any,
    ) -> Tool[dict[str, Any], V]:
        """Return a tool whose arguments are a dict, validated by the JSON schema as given.

        Arguments that are left out get the schema's defaults.
        """
        return Tool(
            name=name,
            description=description,
            handler=handler,
            params_type=dict,
            result_type=Any,
            input_schema=schema or {},
            strict=False,
            **options,
        )

    def __post_init__(self) -> None:
        self._check_texts()
        self._check_options()
        if self.handler is not None:
            self._check_handler(self.handler)
        if self.strict:
            self._check_contract()
        if self.input_schema is not None:
            from weakincentives.serde.bounded_schema import BoundedSchema

            self._set("input_schema", plain_schema(self.name, self.input_schema))
            try:
                self._set("_validate", BoundedSchema(self.parameters).parse)
            except ValueError as error:
                raise self._wrong(f"its parameters: {error}") from error
        elif not is_plain(self.params_type):
            self._check_params_type()
        self._check_parameter_descriptions()
        self._set("title", self.title or self.name)
        self._set("examples", tuple(self.examples))
        for example in self.examples:
            self._check_example(example)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    # Checks of the declaration

    def _wrong(self, problem: str) -> ToolDefinitionError:
        return ToolDefinitionError(f"tool {self.name!r}: {problem}")

    def _check_texts(self) -> None:
        name, text = cast("object", self.name), cast("object", self.description)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise self._wrong(
                "its name must match ^[a-z0-9_-]{1,64}$: lower-case letters, digits, '_' and '-'"
            )
        if not isinstance(text, str) or not text.strip():
            raise self._wrong("it needs a description for the model")
        if self.strict and len(text) > _MAX_DESCRIPTION:
            raise self._wrong(
                f"its description has {len(text)} characters; {_MAX_DESCRIPTION} are allowed: "
                "put guidance into the section's template"
            )

    def _check_options(self) -> None:
        for name, choices in (("reach", (None, *get_args(Reach))), ("writes", get_args(Writes))):
            if getattr(self, name) not in choices:
                raise self._wrong(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        if self.timeout is not None and not self.timeout > 0:
            raise self._wrong(f"timeout must be positive seconds, got {self.timeout!r}")
        if self.preconditions or self.effects or self.retry is not None:
            self._check_protocol()

    def _check_protocol(self) -> None:
        from weakincentives.prompt.contracts import Effect, Precondition
        from weakincentives.retry import RetryPolicy

        self._set("preconditions", tuple(self.preconditions))
        self._set("effects", tuple(self.effects))
        retries = () if self.retry is None else (self.retry,)
        for name, kind, given in (
            ("preconditions", Precondition, self.preconditions),
            ("effects", Effect, self.effects),
            ("retry", RetryPolicy, retries),
        ):
            for each in given:
                if not isinstance(each, kind):
                    raise self._wrong(f"{name} must be a {kind.__name__}, got {each!r}")
        if self.reach == "irreversible" and self.retry is not None and self.retry.max_retries:
            raise self._wrong(
                "it is irreversible and cannot be retried: a failed attempt may have taken effect"
            )

    def _check_handler(self, handler: Callable[..., Any]) -> None:
        if not callable(handler):
            raise self._wrong(f"its handler is not callable: {handler!r}")
        problem = misfit(handler, object(), context=object())
        if problem is not None:
            raise self._wrong(
                f"its handler must be callable as handler(params, *, context): {problem}"
            )

    def _check_contract(self) -> None:
        """Complete the types from the handler, and compare both."""
        takes, returns = UNKNOWN, UNKNOWN
        if self.handler is not None:
            takes, returns = self._declared_by(self.handler)
        for name, hint in (("params_type", takes), ("result_type", returns)):
            declared = getattr(self, name)
            if declared is UNKNOWN:
                declared = hint
            if declared is NoneType:
                declared = None
            if declared is UNKNOWN:
                raise self._wrong(
                    f"its {name} is not known: write Tool[Params, Result](...) or annotate the "
                    "handler"
                )
            if not (declared is None or _dataclass_of(declared)):
                raise self._wrong(f"its {name} must be a dataclass or None, got {show(declared)}")
            self._set(name, declared)
        if not can_be(self.params_type, takes):
            raise self._wrong(
                f"its handler takes {show(takes)}, but the tool's parameters are "
                f"{show(self.params_type)}"
            )
        # `ToolResult[R | None]` is no more than the value of a result says anyway.
        is_mute = returns is NoneType and self.result_type is not None
        if is_mute or not can_be(returns, Union[self.result_type, None]):  # noqa: UP007
            raise self._wrong(
                f"its handler returns ToolResult[{show(returns)}], but its contract is "
                f"ToolResult[{show(self.result_type)}]"
            )

    def _declared_by(self, handler: Callable[..., Any]) -> tuple[Any, Any]:
        """Return P and R of ``handler(params: P, ...) -> ToolResult[R]``, UNKNOWN if left open."""
        hints = hints_of(handler)
        try:
            first = next(iter(signature(handler).parameters), "")
        except ValueError:  # a built-in without a signature
            first = ""
        returns = hints.get("return", UNKNOWN)
        value = _value_of(returns)
        if value is None:
            raise self._wrong(f"its handler returns {show(returns)}; it must return a ToolResult")
        return hints.get(first, UNKNOWN), value

    def _check_params_type(self) -> None:
        """Refuse a type that no arguments could be parsed into."""
        try:
            validator_for(self.params_type)
        except TypeError as error:
            # A name may be defined further down in its module: looked up when first needed.
            if not isinstance(error.__cause__, NameError):
                raise self._wrong(f"its parameters: {error}") from error

    def _check_parameter_descriptions(self) -> None:
        if not self.parameter_descriptions:
            return
        self._set("parameter_descriptions", dict(self.parameter_descriptions))
        known = described_parameters(self.parameters)
        unknown = [name for name in self.parameter_descriptions if name not in known]
        if unknown:
            raise self._wrong(
                f"there are no parameters {', '.join(unknown)} to describe; "
                f"it has {', '.join(known) or 'none'}"
            )

    def _check_example(self, example: Any) -> None:
        if not isinstance(example, ToolExample):
            raise self._wrong(f"{example!r} is not a ToolExample")
        shown = cast("ToolExample[Any, Any]", example)
        part = "input"
        try:
            # The parameters of a decorated function have no class that a caller could name.
            _check_instance(shown.input, self.params_type, or_mapping=not self.strict)
            self.parse(dump(shown.input))
            part = "output"
            _check_instance(shown.output, self.result_type)
            written = dump(shown.output)
            if _dataclass_of(self.result_type) and _has_json_form(self.result_type):
                parse(self.result_type, written)
        except (TypeError, InvalidArguments, ParseError) as error:
            raise self._wrong(
                f"the {part} of example {shown.description!r} is not valid: {error}"
            ) from error

    # The definition for the model

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the parameters; it is the caller's to change."""
        if self.input_schema is not None:
            shown = copy.deepcopy(dict(self.input_schema))
        else:
            shown = schema(self.params_type)
        if self.parameter_descriptions:
            parameters = described_parameters(shown)
            for name, text in self.parameter_descriptions.items():
                parameters.get(name, {})["description"] = text
        return shown

    def definition(self, *, examples: bool = True) -> dict[str, Any]:
        """Return name, description, parameters and examples as a provider-neutral dict."""
        described: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        if examples and self.examples:
            described["examples"] = [
                {
                    "description": example.description,
                    "input": {} if example.input is None else dump(example.input),
                    "output": dump(example.output),
                }
                for example in self.examples
            ]
        return described

    # For the runtime

    @cached_property
    def value_types(self) -> tuple[type, ...]:
        """What a handler's value is an instance of, unless it is None; none for a tool without."""
        if not self.strict:
            return (object,)
        cls = _dataclass_of(self.result_type)
        return () if cls is None else (cls,)

    @cached_property
    def is_async(self) -> bool:
        """Whether the handler must be awaited."""
        return self.handler is not None and is_async(self.handler)

    @cached_property
    def needs_loop(self) -> bool:
        """Whether something about it may have to be waited for."""
        return (
            self.is_async
            or self.timeout is not None
            or self.retry is not None
            or any(each.is_async for each in self.preconditions)
            # What another tool needs is not known here.
            or any(each.is_async or each.type == "cascade" for each in self.effects)
        )

    def parse(self, arguments: object) -> P:
        """Return the arguments as parameters, or raise InvalidArguments with every problem."""
        try:
            return self._validate(arguments)
        except ParseError as error:
            message = {
                "error": f"Invalid parameters for tool '{self.name}'",
                "details": {path or "arguments": text for path, text in error.details.items()},
            }
            raise InvalidArguments(json.dumps(message, ensure_ascii=False)) from error

    def _validate(self, arguments: object) -> P:
        # Only the first time: the validator takes the place of this method.
        validate = validator_for(self.params_type)
        self._set("_validate", validate)
        return validate(arguments)

    def replace(self, **changes: Any) -> Tool[P, R]:
        """Return a copy with other fields."""
        if "name" in changes and self.title == self.name:
            changes.setdefault("title", "")  # derived from the name again
        return dataclass_replace(self, **changes)

    @property
    def function(self) -> Callable[..., Any] | None:
        """The function that ``@tool`` was put on, to call it directly; else the handler."""
        return getattr(self.handler, "tool_function", self.handler)

    def __call__(
        self, params: object = None, *, context: ToolContext | None = None, **arguments: object
    ) -> ToolResult[R]:
        """Run the call through the pipeline and return its result.

        Without a context it belongs to the call under way; where there is none, it gets a session
        of its own.
        """
        from weakincentives.runtime.tool_call import call_tool

        return call_tool(self, _one_of(params, arguments), context)

    async def acall(
        self, params: object = None, *, context: ToolContext | None = None, **arguments: object
    ) -> ToolResult[R]:
        """Run the call through the pipeline on the caller's event loop."""
        from weakincentives.runtime.tool_call import acall_tool

        return await acall_tool(self, _one_of(params, arguments), context)

    def __repr__(self) -> str:
        return f"<tool {self.title}>"


def plain_schema(name: str, schema: object) -> dict[str, Any]:
    """Return a copy of a tool's object schema, or refuse it."""
    from weakincentives.serde.bounded_schema import bounded_copy

    try:
        if not isinstance(schema, Mapping):
            raise TypeError(f"expected a JSON schema as a dict, got {schema!r}")
        plain = bounded_copy(dump(cast("object", schema)))
        if plain.get("type") != "object":
            raise TypeError(f"expected an object schema, got type {plain.get('type')!r}")
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolDefinitionError(
            f"tool {name!r} must have a valid parameters schema: {error}"
        ) from error
    return plain


def described_parameters(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parameters of an object schema that can carry a description."""
    properties = cast("dict[str, Any]", schema.get("properties") or {})
    return {name: each for name, each in properties.items() if isinstance(each, dict)}


def _one_of(params: object, arguments: dict[str, object]) -> object:
    if params is None:
        return arguments
    if arguments:
        raise TypeError("pass the parameters as one value or by name, not both")
    return params


def _value_of(returns: Any) -> Any:
    """Return R of ``ToolResult[R]``, UNKNOWN where it is left open, None for anything else."""
    if returns is UNKNOWN or returns is Any or isinstance(returns, TypeVar):
        return UNKNOWN
    if is_union(returns):
        values = [_value_of(part) for part in get_args(returns)]
        for undecided in (None, UNKNOWN):
            if undecided in values:
                return undecided
        return Union[tuple(values)]  # noqa: UP007  # made from values, not written down
    origin = get_origin(returns)
    if origin in (Awaitable, Coroutine):
        return _value_of(get_args(returns)[-1])
    if origin is ToolResult:
        return get_args(returns)[0]
    return UNKNOWN if isinstance(returns, type) and issubclass(returns, ToolResult) else None


def _dataclass_of(declared: Any) -> type | None:
    cls = get_origin(declared) or declared
    return cls if isinstance(cls, type) and is_dataclass(cls) else None


def _check_instance(value: object, declared: Any, *, or_mapping: bool = False) -> None:
    cls = NoneType if declared is None else _dataclass_of(declared)
    allowed = (cls, Mapping) if or_mapping else cls
    if cls is not None and not isinstance(value, cast("Any", allowed)):
        raise TypeError(f"expected {show(declared)}, got {show(type(value))}")


def _has_json_form(declared: Any) -> bool:
    try:
        validator_for(declared)
    except TypeError:
        return False
    return True
