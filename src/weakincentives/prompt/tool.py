"""Tools: a name, a description, typed parameters, and a handler; and ``@tool`` to declare one."""

from __future__ import annotations

import copy
import inspect
import json
import re
import textwrap
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from dataclasses import replace as dataclass_replace
from functools import cached_property, partial
from inspect import Parameter
from itertools import starmap
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    overload,
)

from weakincentives.errors import InvalidArguments, ParseError, ToolDefinitionError
from weakincentives.prompt.context import ToolContext as ToolContext
from weakincentives.prompt.signatures import (
    UNKNOWN,
    TypedConstructor,
    can_be,
    classes_of,
    hints_of,
    innermost,
    is_async,
    is_union,
    misfit,
    show,
)
from weakincentives.serde import dump, parse, schema
from weakincentives.serde.typed import is_plain, validator_for
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.prompt.approval import CallPreview
    from weakincentives.prompt.contracts import Effect, Precondition
    from weakincentives.retry import RetryPolicy

P = TypeVar("P")
R = TypeVar("R")
V = TypeVar("V")
A = ParamSpec("A")
P_contra = TypeVar("P_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

Reach = Literal["read", "reversible", "compensable", "irreversible"]
"""How far a tool's changes go.

``read`` changes nothing; ``reversible`` changes only the session, files and resources that can be
snapshotted; ``compensable`` reaches outside and can compensate for it; ``irreversible`` reaches
outside for good. A tool that states nothing is rolled back as far as possible, and is never
re-run: it cannot have a ``retry``.
"""

Writes = Literal["api", "command", "external"]
"""How a tool changes files: through our filesystem, by a command we start, or by another program.
"""

Recovery: TypeAlias = ToolResult[Any] | Literal["rolled_back"] | None
"""What became of a call whose outcome was unknown: its result, ``"rolled_back"`` if it did not take
effect, or None if that is still unknown."""

DEFAULT_MAX_RESULT_CHARS = 100_000
_NAME = re.compile(r"[a-z0-9_-]{1,64}")
_MAX_DESCRIPTION = 200
_CONTEXT = re.compile(r"([\w.]+\.)?ToolContext( *\| *None)?")
_ARGS = re.compile(r"^(?:Args|Arguments|Parameters):[ \t]*\n((?:[ \t]+.*\n?|\n)+)", re.MULTILINE)
_ARG = re.compile(r"^(\w+)(?: *\(.*?\))?:(.*(?:\n(?:[ \t].*)?)*)", re.MULTILINE)


class ToolHandler(Protocol[P_contra, R_co]):
    """``handler(params, *, context) -> ToolResult``, plain or async."""

    def __call__(
        self, params: P_contra, /, *, context: ToolContext
    ) -> ToolResult[R_co] | Awaitable[ToolResult[R_co]]: ...


# No slots: with them, frozen and generic, `ToolExample[P, R](...)` is a TypeError on Python 3.11.
@dataclass(frozen=True)
class ToolExample(Generic[P, R]):
    """A representative call: shown to the model, checked against the tool's types."""

    description: str
    input: P
    output: R

    def __post_init__(self) -> None:
        if not 1 <= len(self.description) <= _MAX_DESCRIPTION:
            raise ToolDefinitionError(
                f"an example's description must have 1 to {_MAX_DESCRIPTION} characters, "
                f"got {len(self.description)}"
            )

    @property
    def arguments(self) -> Any:
        """The input as a model gives it."""
        return {} if self.input is None else dump(self.input)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Tool(TypedConstructor, Generic[P, R]):
    """A capability for a model, with a contract that is checked at its declaration.

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
    """Descriptions that replace those of the parameters' type."""
    reach: Reach | None = None
    writes: Writes = "api"
    timeout: float | None = None
    """Seconds the handler may take; a sync handler with a timeout runs in a thread."""
    concurrent: bool | None = None
    """Whether it may run concurrently with other calls of a turn; by default if it is async."""
    preconditions: Sequence[Precondition] = ()
    """Conditions that must hold before it runs."""
    effects: Sequence[Effect] = ()
    """Effects of a success."""
    retry: RetryPolicy | None = None
    """When a failed call is retried; each attempt starts from the state before the call."""
    max_result_chars: int | None = DEFAULT_MAX_RESULT_CHARS
    """Characters of a result that the model sees at once; it can read the rest. None: no limit."""
    preview: Callable[..., CallPreview] | None = None
    """``preview(params, *, context)`` says what a call would do: for a person who approves it."""
    idempotent: bool = False
    """Whether a call whose outcome is unknown may be made again, with the same id: its handler
    gives ``context.idempotency_key`` to the service, which does nothing twice."""
    recover: Callable[..., Recovery | Awaitable[Recovery]] | None = None
    """``recover(outcome, context)`` is asked about such a call, plain or async. It returns the
    call's result if it took effect, ``"rolled_back"`` if it did not, so that it runs now, or None
    if that cannot be found out. ``outcome`` is a ``CallOutcome``."""
    title: str = ""
    input_schema: Mapping[str, Any] | None = None
    """The raw JSON schema of a tool made with ``from_schema``."""
    checked: bool = True
    """Check the contract: dataclasses, a handler that fits, a short description."""
    strict: bool = True
    """Whether arguments must have exactly the declared types; False takes ``"10"`` for 10."""
    needs: Sequence[type] = ()
    """The resources that its handler asks for: checked where the tool is registered or offered."""

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

        Omitted arguments get the schema's defaults.
        """
        return Tool(
            name=name,
            description=description,
            handler=handler,
            params_type=dict,
            result_type=Any,
            input_schema=schema or {},
            checked=False,
            **options,
        )

    def __post_init__(self) -> None:
        self._check_texts()
        self._check_options()
        if self.handler is not None:
            self._check_handler(self.handler)
        if self.checked:
            self._check_contract()
        if self.input_schema is not None:
            from weakincentives.serde.bounded_schema import bounded_schema

            self._set("input_schema", plain_schema(self.name, self.input_schema))
            try:
                self._set("_validate", bounded_schema(json.dumps(self.parameters)).parse)
            except ValueError as error:
                raise self._wrong(f"its parameters: {error}") from error
        elif not is_plain(self.params_type):
            self._check_params_type()
        self._check_parameter_descriptions()
        self._set("title", self.title or self.name)
        self._set("examples", tuple(self.examples))
        self._set("needs", tuple(self.needs))
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
        if self.checked and len(text) > _MAX_DESCRIPTION:
            raise self._wrong(
                f"its description has {len(text)} characters; {_MAX_DESCRIPTION} are allowed: "
                "put guidance into the section's template"
            )

    def _check_options(self) -> None:
        for name, choices in (("reach", (None, *get_args(Reach))), ("writes", get_args(Writes))):
            if getattr(self, name) not in choices:
                raise self._wrong(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        for each in self.needs:
            if not isinstance(each, type):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise self._wrong(f"it needs resources by type, got {each!r}")
        if self.timeout is not None and not self.timeout > 0:
            raise self._wrong(f"timeout must be positive seconds, got {self.timeout!r}")
        if self.max_result_chars is not None and self.max_result_chars < 1:
            raise self._wrong(f"max_result_chars must be at least 1, got {self.max_result_chars}")
        if self.preview is not None:
            problem = misfit(self.preview, object(), context=object())
            if problem or is_async(self.preview):
                problem = problem or "it must not be async"
                raise self._wrong(f"its preview must fit preview(params, *, context): {problem}")
        if self.idempotent or self.recover is not None:
            self._check_recovery()
        if self.preconditions or self.effects or self.retry is not None:
            self._check_protocol()

    def _check_recovery(self) -> None:
        if self.reach not in ("compensable", "irreversible"):
            raise self._wrong(
                "idempotent and recover are for a tool that reaches outside: state the reach"
                f' "compensable" or "irreversible", got {self.reach!r}'
            )
        if self.idempotent and self.recover is not None:
            raise self._wrong(
                "it is idempotent, so a call whose outcome is unknown is made again: recover would"
                " never be asked"
            )
        problem = None if self.recover is None else misfit(self.recover, object(), object())
        if problem is not None:
            raise self._wrong(f"its recover must fit recover(outcome, context): {problem}")

    def _check_protocol(self) -> None:
        from weakincentives.prompt.contracts import Effect, Precondition
        from weakincentives.retry import RetryPolicy

        self._set("preconditions", tuple(self.preconditions))
        self._set("effects", tuple(self.effects))
        declared: list[tuple[str, type, Sequence[object]]] = [
            ("preconditions", Precondition, self.preconditions),
            ("effects", Effect, self.effects),
            ("retry", RetryPolicy, () if self.retry is None else (self.retry,)),
        ]
        for name, kind, given in declared:
            for each in given:
                if not isinstance(each, kind):
                    raise self._wrong(f"{name} must be a {kind.__name__}, got {each!r}")
        retries = self.retry is not None and self.retry.max_retries
        if self.reach == "irreversible" and retries and not self.idempotent:
            raise self._wrong(
                "it is irreversible and cannot be retried: a failed attempt may have taken effect"
            )
        if self.reach is None and retries:
            raise self._wrong(
                "a call that may reach outside is never re-run: state its reach, or leave out retry"
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
            first = next(iter(inspect.signature(handler).parameters), "")
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
            _check_instance(shown.input, self.params_type, or_mapping=not self.checked)
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
        """A new JSON schema of the parameters."""
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
                    "input": example.arguments,
                    "output": dump(example.output),
                }
                for example in self.examples
            ]
        return described

    def text(self, most: int | None = None) -> str:
        """Return the description with its examples: as many as fit into ``most`` characters.

        For a model whose tool definitions have no place for examples.
        """
        text = self.description
        for example in self.examples:
            shown = json.dumps(example.arguments, ensure_ascii=False)
            longer = f"{text}\n\nExample: {example.description}\n{shown}"
            if most is None or len(longer) <= most:
                text = longer
        return text

    # For the runtime

    @cached_property
    def value_types(self) -> tuple[type, ...]:
        """The classes that a handler's value may have, unless it is None."""
        return tuple(cls for cls in classes_of(self.result_type) if cls is not NoneType)

    @cached_property
    def is_async(self) -> bool:
        """Whether the handler must be awaited."""
        return self.handler is not None and is_async(self.handler)

    @cached_property
    def needs_loop(self) -> bool:
        """Whether a call may have to wait."""
        return (
            self.is_async
            or self.timeout is not None
            or self.retry is not None
            or any(each.is_async for each in self.preconditions)
            # Another tool may have to wait.
            or any(each.is_async or each.type == "cascade" for each in self.effects)
        )

    def parse(self, arguments: object) -> P:
        """Return the arguments as parameters, or raise InvalidArguments with every problem."""
        try:
            return self._validate(arguments)
        except ParseError as error:
            if arguments is None:  # no arguments, as a call without any
                return self.parse({})
            details = {path or "arguments": text for path, text in error.details.items()}
            message = {"error": f"Invalid parameters for tool '{self.name}'", "details": details}
            raise InvalidArguments(
                json.dumps(message, ensure_ascii=False),
                recoverable=False,
                problem=", ".join(starmap(_problem, details.items())),
            ) from error

    def _validate(self, arguments: object) -> P:
        # Only the first time: the validator replaces this method.
        validate = validator_for(self.params_type, strict=self.strict)
        self._set("_validate", validate)
        return validate(arguments)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other fields."""
        if "name" in changes and self.title == self.name:
            changes.setdefault("title", "")  # derived from the name again
        return dataclass_replace(self, **changes)

    @property
    def function(self) -> Callable[..., Any] | None:
        """The function that ``@tool`` decorates, or the handler."""
        return getattr(self.handler, "tool_function", self.handler)

    def __call__(
        self, params: object = None, *, context: ToolContext | None = None, **arguments: object
    ) -> ToolResult[R]:
        """Run the call through the pipeline and return its result.

        Without a context it is part of the current call; outside of any call it gets a new session.
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


class FunctionTool(Tool[Any, R], Generic[A, R]):
    """A tool that ``@tool`` made: it is called with the function's own arguments.

    A single mapping gives all arguments at once, as a model does. ``context=`` is always taken.
    """

    # A function's own arguments stand in place of ``params``: no override could say so.
    @overload
    def __call__(self, *args: A.args, **kwargs: A.kwargs) -> ToolResult[R]: ...
    @overload
    def __call__(
        self, params: Mapping[str, object], /, *, context: ToolContext | None = None
    ) -> ToolResult[R]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> ToolResult[R]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the call through the pipeline and return its result.

        Without a context it is part of the current call; outside of any call it gets a new session.
        """
        from weakincentives.runtime.tool_call import call_tool

        return call_tool(self, *self._given(args, kwargs))

    @overload
    async def acall(self, *args: A.args, **kwargs: A.kwargs) -> ToolResult[R]: ...
    @overload
    async def acall(
        self, params: Mapping[str, object], /, *, context: ToolContext | None = None
    ) -> ToolResult[R]: ...
    async def acall(self, *args: Any, **kwargs: Any) -> ToolResult[R]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the call through the pipeline on the caller's event loop."""
        from weakincentives.runtime.tool_call import acall_tool

        return await acall_tool(self, *self._given(args, kwargs))

    def _given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[object, ToolContext | None]:
        """Return the arguments of a call for the pipeline, and its context."""
        positional, contexts, is_handler = self._own_parameters
        whole: Any = None
        given = kwargs
        first = cast("object", args[0]) if len(args) == 1 else None
        if args == (None,) and not positional:
            pass
        elif isinstance(first, Mapping) or type(first) is self.params_type:
            whole = args[0]
            contexts = (*contexts, "context")  # beside a mapping, that is no argument
        else:
            if len(args) > len(positional):
                raise TypeError(f"{self.name} takes {len(positional)} arguments, got {len(args)}")
            given = dict(zip(positional, args, strict=False))
            twice = sorted(given.keys() & kwargs.keys())
            if twice:
                raise TypeError(f"{self.name} got several values for {', '.join(twice)}")
            given.update(kwargs)
            whole = given.pop("params", None) if is_handler else None
        found = [given.pop(name, None) for name in contexts]
        context = next((each for each in found if each is not None), None)
        if not isinstance(context, ToolContext | None):
            raise TypeError(f"{self.name} takes a ToolContext as its context, got {context!r}")
        return _one_of(whole, given), context

    @cached_property
    def _own_parameters(self) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
        """The function's positional parameters, those for the context, and if it is a handler."""
        function = self.function
        if function is None:
            return (), ("context",), False
        parameters = inspect.signature(function).parameters
        contexts = context_parameters(function)
        if "context" not in parameters:
            contexts += ("context",)
        names = [n for n, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        return tuple(names), contexts, _own_params_type(function) is not None


def refuse_missing_needs(tools: Iterable[Tool[Any, Any]], resources: Any, where: str) -> None:
    """Refuse a tool that needs a resource which is not bound."""
    context = getattr(resources, "context", resources)
    bindings: Any = getattr(context, "bindings", None)
    if bindings is None:  # of a class that is not ours
        return
    for tool in tools:
        for kind in tool.needs:
            if kind not in bindings:
                bound = ", ".join(sorted(each.__name__ for each in bindings)) or "nothing"
                raise ToolDefinitionError(
                    f"tool {tool.name!r} needs {kind.__name__}, which is not bound in {where}: "
                    f"give resources={{{kind.__name__}: ...}}. Bound there: {bound}"
                )


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
    """Return the parameters of an object schema that can have a description."""
    properties = cast("dict[str, Any]", schema.get("properties") or {})
    return {name: each for name, each in properties.items() if isinstance(each, dict)}


def _problem(path: str, text: str) -> str:
    """Return a problem of the arguments in the Protocol's words."""
    from weakincentives.serde.problems import MISSING

    if text == MISSING:
        return f"Missing required field: {path}"
    expected = text.partition(", got ")[0].removeprefix("Expected type ")
    if text.startswith("Expected type "):
        return f"Field '{path}' must be of type {expected}"
    return f"Field '{path}': {text}"


def _one_of(params: object, arguments: dict[str, object]) -> object:
    if params is None:
        return arguments
    if arguments:
        raise TypeError("pass the parameters as one value or by name, not both")
    return params


def _value_of(returns: Any) -> Any:
    """Return R of ``ToolResult[R]``, UNKNOWN if left open, None for anything else."""
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


# ``@tool``


class _Decorator(Protocol):
    """``tool(...)`` with options: keeps the signature of the function, and names its value."""

    @overload
    def __call__(
        self, function: Callable[A, Awaitable[ToolResult[R]]], /
    ) -> FunctionTool[A, R]: ...
    @overload
    def __call__(self, function: Callable[A, Awaitable[R]], /) -> FunctionTool[A, R]: ...
    @overload
    def __call__(self, function: Callable[A, ToolResult[R]], /) -> FunctionTool[A, R]: ...
    @overload
    def __call__(self, function: Callable[A, R], /) -> FunctionTool[A, R]: ...


@overload
def tool(function: Callable[A, Awaitable[ToolResult[R]]], /) -> FunctionTool[A, R]: ...
@overload
def tool(function: Callable[A, Awaitable[R]], /) -> FunctionTool[A, R]: ...
@overload
def tool(function: Callable[A, ToolResult[R]], /) -> FunctionTool[A, R]: ...
@overload
def tool(function: Callable[A, R], /) -> FunctionTool[A, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    examples: Sequence[ToolExample[Any, Any]] = (),
    accepts_overrides: bool = True,
    reach: Reach | None = None,
    writes: Writes = "api",
    timeout: float | None = None,
    concurrent: bool | None = None,
    max_result_chars: int | None = DEFAULT_MAX_RESULT_CHARS,
    title: str = "",
    preconditions: Sequence[Precondition] = (),
    effects: Sequence[Effect] = (),
    retry: RetryPolicy | None = None,
    preview: Callable[..., CallPreview] | None = None,
    idempotent: bool = False,
    recover: Callable[..., Recovery | Awaitable[Recovery]] | None = None,
    strict: bool = True,
    needs: Sequence[type] = (),
) -> _Decorator: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    **options: Any,
) -> Any:
    """Make a tool from a plain typed function, sync or async.

    Its parameters become the tool's; one annotated ``ToolContext`` gets the context. The first
    paragraph of its docstring is the description, its return value the result's value. A function
    whose only parameter is a dataclass called ``params`` gets that. Examples may give their input
    as a dict.
    """

    def made(function: Callable[..., Any]) -> FunctionTool[..., Any]:
        return _tool_of(function, name, description, options)

    return made if function is None else made(function)


def _tool_of(
    function: Callable[..., Any],
    name: str | None,
    description: str | None,
    options: dict[str, Any],
) -> FunctionTool[..., Any]:
    if isinstance(function, Tool):
        raise ToolDefinitionError(
            f"{function!r} is a tool already: apply @tool once; a variant is tool.replace(...)"
        )
    title = _title(function)
    description = description or _first_paragraph(function)
    if not description:
        raise ToolDefinitionError(f"@tool function {title!r} needs a docstring: the model reads it")
    params_type = _own_params_type(function)
    if params_type is None:
        params_type = params_of(function, title)
        names: tuple[str, ...] | None = tuple(each.name for each in fields(params_type))
    else:
        names = None
    returns = hints_of(function).get("return", Any)
    result_type = _plain_value_of(returns)
    return FunctionTool(
        name=name or title,
        description=description,
        handler=_handler_of(function, names, returns),
        params_type=params_type,
        result_type=None if result_type is NoneType else result_type,
        checked=False,
        **options,
    )


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters for the model: not the context, not those bound by a partial."""
    parameters = inspect.signature(function).parameters.values()
    hidden = {*context_parameters(function)}
    if isinstance(function, partial):
        hidden.update(function.keywords)
    return [each for each in parameters if each.name not in hidden]


def context_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameters that get the context: those annotated ``ToolContext``.

    One called ``context`` also gets it if its annotation is missing or allows it.
    """
    hints = hints_of(function)
    raw = getattr(innermost(function), "__annotations__", {})

    def gets_it(name: str) -> bool:
        hint = hints.get(name, UNKNOWN)
        if hint is UNKNOWN and _CONTEXT.fullmatch(str(raw.get(name))):
            return True  # imported for the type checker only
        parts = get_args(hint) if is_union(hint) else (hint,)
        if ToolContext in parts:
            return all(each in (ToolContext, NoneType) for each in parts)
        return name == "context" and can_be(ToolContext, hint)

    return tuple(name for name in inspect.signature(function).parameters if gets_it(name))


def _own_params_type(function: Callable[..., Any]) -> Any:
    """Return the dataclass of a function that has the form of a handler."""
    hint = hints_of(function).get("params")
    cls = get_origin(hint) or hint
    is_handler = [each.name for each in _parameters(function)] == ["params"]
    return hint if is_handler and isinstance(cls, type) and is_dataclass(cls) else None


def params_of(function: Callable[..., Any], title: str) -> type:
    """Return a dataclass with a field for each parameter."""
    hints = hints_of(function, extras=True)
    documented = _argument_docs(_doc(function))
    specs: list[tuple[str, Any, Any]] = []
    for parameter in _parameters(function):
        name = parameter.name
        if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(
                f"@tool function {title!r} cannot have the parameter {str(parameter)!r}: "
                "a model gives arguments by name"
            )
        if name not in hints:
            raise ToolDefinitionError(
                f"parameter {name!r} of @tool function {title!r} needs a type annotation that can "
                "be resolved at module level; decorate a method as tool(instance.method)"
            )
        specs.append((name, *_field_of(parameter, hints[name], documented.get(name))))
    words = "".join(part.capitalize() for part in re.split(r"\W|_", title))
    made = make_dataclass(f"{words}Params", specs, frozen=True, slots=True, kw_only=True)
    # So that another process finds it when it reads the record of a call.
    made.__module__ = function.__module__
    if hasattr(function, "__qualname__"):
        made.__qualname__ = f"{function.__qualname__}.params_type"
    made.__doc__ = None
    return made


def _field_of(parameter: Parameter, hint: Any, text: str | None) -> tuple[Any, Any]:
    metadata = {} if text is None else {"description": text}
    default = parameter.default
    if default is Parameter.empty:
        return hint, field(metadata=metadata)
    if type(default).__hash__ is not None:
        return hint, field(default=default, metadata=metadata)
    from pydantic import Field

    # Each call gets a copy of the default, and the schema still shows it.
    shown = Field(json_schema_extra={"default": dump(default)})
    made = field(default_factory=partial(copy.deepcopy, default), metadata=metadata)
    return Annotated[hint, shown], made


def _plain_value_of(returns: Any) -> Any:
    """Return the type of a function's value: what it returns, or R of ``ToolResult[R]``."""
    if is_union(returns):
        return Union[tuple(map(_plain_value_of, get_args(returns)))]  # noqa: UP007
    origin = get_origin(returns)
    if origin in (Awaitable, Coroutine):
        return _plain_value_of(get_args(returns)[-1])
    if origin is ToolResult:
        return get_args(returns)[0]
    return Any if returns is ToolResult else returns


def _handler_of(function: Callable[..., Any], names: tuple[str, ...] | None, returns: Any) -> Any:
    """Return a handler that calls the function with its parameters' fields, or with ``params``."""
    contexts = context_parameters(function)
    while get_origin(returns) in (Awaitable, Coroutine):
        returns = get_args(returns)[-1]
    may_be_none = not {NoneType, object}.isdisjoint(classes_of(returns))

    def arguments(params: Any, context: ToolContext) -> dict[str, Any]:
        given = {"params": params} if names is None else {n: getattr(params, n) for n in names}
        for name in contexts:
            given[name] = context
        return given

    def answer(value: Any) -> ToolResult[Any]:
        if isinstance(value, ToolResult):
            return cast("ToolResult[Any]", value)
        if value is None and not may_be_none:
            raise TypeError(
                f"the handler returned None, but it is declared to return {show(returns)}; "
                "is a return statement missing?"
            )
        return ToolResult.ok(value)

    if is_async(function):

        async def async_handler(params: Any, *, context: ToolContext) -> ToolResult[Any]:
            return answer(await function(**arguments(params, context)))

        made: Any = async_handler
    else:

        def handler(params: Any, *, context: ToolContext) -> ToolResult[Any]:
            return answer(function(**arguments(params, context)))

        made = handler
    made.tool_function = function
    return made


# Names and docstrings


def _title(function: Callable[..., Any]) -> str:
    return getattr(_called(function), "__name__", None) or type(function).__name__


def _doc(function: Callable[..., Any]) -> str:
    return inspect.getdoc(_called(function)) or ""


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    return _called(function.func) if isinstance(function, partial) else function


def _first_paragraph(function: Callable[..., Any]) -> str:
    return " ".join(_doc(function).split("\n\n")[0].split())


def _argument_docs(doc: str) -> dict[str, str]:
    """Return the description of each parameter in the ``Args:`` block of a docstring."""
    block = _ARGS.search(doc)
    if block is None:
        return {}
    entries = _ARG.findall(textwrap.dedent(block.group(1)))
    return {name: " ".join(text.split()) for name, text in entries}
