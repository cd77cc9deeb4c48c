"""What a tool is: a name, a description, typed parameters, and the handler that does the work."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from dataclasses import replace as dataclass_replace
from functools import cached_property
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, get_args, get_origin, overload

from weakincentives.budget import BudgetTracker
from weakincentives.call import CancellationToken, RunContext
from weakincentives.errors import InvalidArguments, ParseError, ToolDefinitionError
from weakincentives.filesystem import Filesystem
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.prompt.typed import TypedConstructor
from weakincentives.resources import Resolver
from weakincentives.resources.opening import as_resolver
from weakincentives.serde import dump, parse, schema
from weakincentives.serde.typed import validator_for

if TYPE_CHECKING:
    from weakincentives.deadlines import Deadline, Heartbeat
    from weakincentives.prompt.prompt import Prompt, RenderedPrompt
    from weakincentives.runtime.session import Session

__all__ = ["Reach", "Tool", "ToolContext", "ToolExample", "ToolHandler", "Writes", "tool"]

P = TypeVar("P")
R = TypeVar("R")

ToolHandler = Callable[..., Any]
"""``handler(params, *, context) -> ToolResult``, plain or async."""

Reach = Literal["read", "reversible", "compensable", "irreversible"]
"""How far a tool's changes go.

``read`` changes nothing; ``reversible`` changes only the session, files and resources that can be
snapshotted; ``compensable`` reaches outside and knows how to take that back; ``irreversible``
reaches outside for good. A tool that states nothing is rolled back as far as can be.
"""

Writes = Literal["api", "command", "external"]
"""How a tool changes files: through our filesystem, by a command we start, or by another program."""

_NAME = re.compile(r"[a-z0-9_-]{1,64}")
_MAX_DESCRIPTION = 200
_UNSET: Any = object()


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a handler, policy or check may use: the session, resources, limits, and who calls.

    In a call the runtime hands out one whose session and resources are bound to that call. Tests
    build one with ``ToolContext(session=session, resources={Filesystem: fs})``.
    """

    session: Session
    prompt: Prompt | None = None
    rendered_prompt: RenderedPrompt | None = None
    adapter: object | None = None
    deadline: Deadline | None = None
    budget_tracker: BudgetTracker | None = None
    """Taken from the resources when not given."""
    resources: Resolver = cast("Resolver", None)  # noqa: RUF009  # made in __post_init__
    """An open resource context; a ResourceRegistry or a plain mapping is opened."""
    heartbeat: Heartbeat | None = None
    run_context: RunContext | None = None
    call_id: str = ""
    memory: object | None = None
    config: Mapping[str, object] = field(default_factory=dict[str, object])
    signal: CancellationToken = field(default_factory=CancellationToken)
    """Set when nobody waits for the call any more."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "resources", as_resolver(self.resources))
        if self.budget_tracker is None:
            object.__setattr__(self, "budget_tracker", self.resources.find(BudgetTracker))

    @property
    def filesystem(self) -> Filesystem:
        """The Filesystem resource."""
        return self.resources.get(Filesystem)  # type: ignore[type-abstract]

    @property
    def session_id(self) -> str:
        return self.session.session_id

    @property
    def loop_id(self) -> str:
        return "" if self.run_context is None else self.run_context.loop_id

    @property
    def agent_id(self) -> str:
        return "" if self.run_context is None else self.run_context.agent_id

    def beat(self) -> None:
        """Say that a long operation is alive."""
        if self.heartbeat is not None:
            self.heartbeat.beat()


@dataclass(frozen=True, slots=True)
class ToolExample(Generic[P, R]):
    """One representative call: shown to the model, checked against the tool's types."""

    description: str
    input: P
    output: R

    def __post_init__(self) -> None:
        if not 1 <= len(self.description) <= _MAX_DESCRIPTION:
            raise ToolDefinitionError(
                f"an example's description has 1 to {_MAX_DESCRIPTION} characters, "
                f"got {len(self.description)}"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Tool(TypedConstructor, Generic[P, R]):
    """A capability offered to a model, with a contract that is checked when it is declared.

    ``Tool[Params, Result](name=..., description=..., handler=...)`` takes dataclasses, or None for
    a tool without parameters or without a structured result. Calling the tool runs the whole
    pipeline: validation, policies, transaction, record.
    """

    name: str
    description: str
    handler: ToolHandler | None
    """None declares a tool that the provider runs itself."""
    params_type: Any = _UNSET
    result_type: Any = _UNSET
    examples: Sequence[ToolExample[Any, Any]] = ()
    accepts_overrides: bool = True
    reach: Reach | None = None
    writes: Writes = "api"
    timeout: float | None = None
    """Seconds the handler may take; a sync handler with a timeout runs in a thread."""
    concurrent: bool = False
    """Whether a sync handler may run beside other calls of the same turn."""
    title: str = ""
    input_schema: Mapping[str, Any] | None = None
    """The raw JSON schema of a tool made with ``from_schema``."""
    strict: bool = True
    """Hold the declaration to the contract: dataclasses, a handler that fits, a short text."""

    @classmethod
    def with_types(cls, type_args: tuple[Any, ...], *args: Any, **kwargs: Any) -> Tool[Any, Any]:
        if len(type_args) != 2:
            raise ToolDefinitionError(f"Tool takes two types, Tool[Params, Result]; got {type_args}")
        known = {
            name: arg
            for name, arg in zip(("params_type", "result_type"), type_args, strict=True)
            if not isinstance(arg, TypeVar)
        }
        return cls(*args, **known, **kwargs)

    @classmethod
    def from_schema(
        cls,
        name: str,
        description: str,
        schema: Mapping[str, Any],
        handler: Callable[..., Any] | None,
        **options: Any,
    ) -> Tool[Any, Any]:
        """Return a tool whose arguments are a dict, validated by the JSON schema as given."""
        return Tool(
            name=name,
            description=description,
            handler=handler,
            params_type=dict,
            result_type=Any,
            input_schema=schema,
            strict=False,
            **options,
        )

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ToolDefinitionError(
                f"tool name {self.name!r} must match ^[a-z0-9_-]{{1,64}}$: "
                "lower-case letters, digits, '_' and '-'"
            )
        self._check_description()
        self._check_options()
        set_field(self, "examples", tuple(self.examples))
        set_field(self, "title", self.title or self.name)
        if self.handler is not None:
            _check_signature(self.name, self.handler)
        if self.input_schema is None:
            if self.strict:
                self._check_contract()
            set_field(self, "_validate", _typed_validator(self.name, self.params_type))
        else:
            from weakincentives.prompt.raw_schema import raw_validator

            set_field(self, "_validate", raw_validator(self.name, self.input_schema))
        for example in self.examples:
            self._check_example(example)

    def _check_description(self) -> None:
        text = self.description
        if not isinstance(text, str) or not text.strip():
            raise ToolDefinitionError(f"tool {self.name!r} needs a description for the model")
        if self.strict and len(text) > _MAX_DESCRIPTION:
            raise ToolDefinitionError(
                f"the description of tool {self.name!r} has {len(text)} characters; "
                f"{_MAX_DESCRIPTION} are allowed: put guidance into the section's template"
            )

    def _check_options(self) -> None:
        if self.reach is not None and self.reach not in get_args(Reach):
            raise ToolDefinitionError(f"reach must be one of {get_args(Reach)}, got {self.reach!r}")
        if self.writes not in get_args(Writes):
            raise ToolDefinitionError(
                f"writes must be one of {get_args(Writes)}, got {self.writes!r}"
            )
        if self.timeout is not None and not self.timeout > 0:
            raise ToolDefinitionError(f"timeout must be positive seconds, got {self.timeout!r}")

    def _check_contract(self) -> None:
        """Complete the types from the handler, and hold both against each other."""
        params_hint, result_hint = (
            (_UNSET, _UNSET) if self.handler is None else _handler_hints(self.handler)
        )
        if self.params_type is _UNSET:
            object.__setattr__(self, "params_type", params_hint)
        if self.result_type is _UNSET:
            object.__setattr__(self, "result_type", _result_type(result_hint))
        for role, declared in (("parameters", self.params_type), ("result", self.result_type)):
            if declared is _UNSET:
                raise ToolDefinitionError(
                    f"the {role} type of tool {self.name!r} is not known: "
                    "write Tool[Params, Result](...) or annotate the handler"
                )
            if not _is_contract_type(declared):
                raise ToolDefinitionError(
                    f"the {role} type of tool {self.name!r} must be a dataclass or None, "
                    f"got {declared!r}"
                )
        if not _accepts(params_hint, self.params_type):
            raise ToolDefinitionError(
                f"the handler of tool {self.name!r} takes {_show(params_hint)}, "
                f"but the tool's parameters are {_show(self.params_type)}"
            )
        if not _returns(result_hint, self.result_type):
            raise ToolDefinitionError(
                f"the handler of tool {self.name!r} returns {_show(result_hint)}, "
                f"but its contract is ToolResult[{_show(self.result_type)}]"
            )

    def _check_example(self, example: ToolExample[Any, Any]) -> None:
        if not isinstance(example, ToolExample):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ToolDefinitionError(f"tool {self.name!r}: {example!r} is not a ToolExample")
        where = f"example {example.description!r} of tool {self.name!r}"
        try:
            self.parse(example.input if self.input_schema else dump(example.input))
        except InvalidArguments as error:
            raise ToolDefinitionError(f"the input of {where} is not valid: {error}") from error
        for part, value, expected in (
            ("input", example.input, self.params_type),
            ("output", example.output, self.result_type),
        ):
            cls = get_origin(expected) or expected
            if cls is None:
                cls = NoneType
            if isinstance(cls, type) and not isinstance(value, cls):
                raise ToolDefinitionError(
                    f"the {part} of {where} must be {_show(expected)}, got {_show(type(value))}"
                )
            if is_dataclass(cls):
                try:
                    parse(expected, dump(value))
                except ParseError as error:
                    raise ToolDefinitionError(f"the {part} of {where} is not valid: {error}") from error

    # What the model is told

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the parameters."""
        if self.input_schema is not None:
            return dict(self.input_schema)
        return schema(self.params_type)

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
                    "input": dump(example.input) if example.input is not None else {},
                    "output": dump(example.output),
                }
                for example in self.examples
            ]
        return described

    # What the runtime needs

    @cached_property
    def is_async(self) -> bool:
        """Whether the handler must be awaited."""
        return self.handler is not None and _is_async(self.handler)

    def parse(self, arguments: object) -> P:
        """Return the arguments as parameters, or raise InvalidArguments with every problem."""
        try:
            return cast("P", self._validate(arguments))  # type: ignore[attr-defined]
        except ParseError as error:
            message = {
                "error": f"Invalid parameters for tool '{self.name}'",
                "details": {path or "arguments": text for path, text in error.details.items()},
            }
            raise InvalidArguments(json.dumps(message, ensure_ascii=False)) from error

    def replace(self, **changes: Any) -> Tool[P, R]:
        """Return a copy with other fields."""
        return dataclass_replace(self, **changes)

    def __call__(
        self, params: object = None, *, context: ToolContext | None = None, **arguments: object
    ) -> ToolResult[R]:
        """Run the call through the pipeline and return its result.

        Without a context it belongs to the call under way; where there is none, it gets a session
        of its own.
        """
        from weakincentives.runtime.tool_call import call_tool

        return call_tool(self, arguments if params is None else params, context)

    async def acall(
        self, params: object = None, *, context: ToolContext | None = None, **arguments: object
    ) -> ToolResult[R]:
        """Run the call through the pipeline on the caller's event loop."""
        from weakincentives.runtime.tool_call import acall_tool

        return await acall_tool(self, arguments if params is None else params, context)

    def __repr__(self) -> str:
        return f"<tool {self.title}>"


# The decorator


@overload
def tool(function: Callable[..., Any]) -> Tool[Any, Any]: ...
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
    concurrent: bool = False,
) -> Callable[[Callable[..., Any]], Tool[Any, Any]]: ...
def tool(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a tool of a plain typed function, sync or async.

    Its parameters become the tool's (a keyword parameter ``context`` gets the ToolContext), the
    first paragraph of its docstring the description, and what it returns the result's value.
    """
    if function is None:
        return lambda decorated: _tool_of(decorated, options)
    return _tool_of(function, options)


def _tool_of(function: Callable[..., Any], options: dict[str, Any]) -> Tool[Any, Any]:
    name = options.pop("name", None) or function.__name__
    description = options.pop("description", None) or _first_paragraph(function)
    if not description:
        raise ToolDefinitionError(
            f"@tool function {function.__name__!r} needs a docstring: the model reads it"
        )
    params_type = _own_params_type(function)
    if params_type is not None:
        handler: Callable[..., Any] = function
    else:
        params_type = _params_of(function, name)
        handler = _handler_of(function, tuple(f.name for f in fields(params_type)))
    hint = _annotations(function).get("return", Any)
    return Tool(
        name=name,
        description=description,
        handler=handler,
        params_type=params_type,
        result_type=_result_type(hint) if _names_tool_result(hint) else hint,
        strict=False,
        **options,
    )


def _own_params_type(function: Callable[..., Any]) -> type | None:
    """Return the dataclass of a function that is written as a handler already."""
    names = [n for n in inspect.signature(function).parameters if n != "context"]
    hint = _annotations(function).get("params")
    if names == ["params"] and isinstance(hint, type) and is_dataclass(hint):
        return hint
    return None


def _params_of(function: Callable[..., Any], name: str) -> type:
    hints = _annotations(function)
    documented = _argument_docs(function)
    specs: list[tuple[str, Any, Any]] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "context":
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolDefinitionError(
                f"@tool function {function.__name__!r} cannot have *{parameter.name}: "
                "a model needs named parameters"
            )
        if parameter.name not in hints:
            raise ToolDefinitionError(
                f"parameter {parameter.name!r} of @tool function {function.__name__!r} needs a "
                "type annotation that can be resolved"
            )
        metadata = {"description": documented[parameter.name]} if parameter.name in documented else {}
        if parameter.default is parameter.empty:
            spec = field(metadata=metadata, kw_only=True)
        elif isinstance(parameter.default, (list, dict, set)):
            default: Any = parameter.default
            spec = field(default_factory=lambda d=default: d.copy(), metadata=metadata, kw_only=True)
        else:
            spec = field(default=parameter.default, metadata=metadata, kw_only=True)
        specs.append((parameter.name, hints[parameter.name], spec))
    title = "".join(part.capitalize() for part in re.split(r"[_-]+", name))
    made = make_dataclass(f"{title}Params", specs, frozen=True, slots=True)
    made.__module__ = function.__module__
    made.__doc__ = None
    return made


def _handler_of(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    takes_context = "context" in inspect.signature(function).parameters

    def arguments(params: Any, context: ToolContext) -> dict[str, Any]:
        values = {name: getattr(params, name) for name in names}
        if takes_context:
            values["context"] = context
        return values

    def answer(value: Any) -> ToolResult[Any]:
        return value if isinstance(value, ToolResult) else ToolResult.ok(value)

    if _is_async(function):

        async def async_handler(params: Any, *, context: ToolContext) -> ToolResult[Any]:
            return answer(await function(**arguments(params, context)))

        return async_handler

    def handler(params: Any, *, context: ToolContext) -> ToolResult[Any]:
        return answer(function(**arguments(params, context)))

    return handler


def _first_paragraph(function: Callable[..., Any]) -> str:
    paragraph = (inspect.getdoc(function) or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def _argument_docs(function: Callable[..., Any]) -> dict[str, str]:
    """Return what an ``Args:`` block of the docstring says about each parameter."""
    block = re.search(
        r"^(?:Args|Arguments|Parameters):\n((?:[ \t]+.*\n?|\n)+)",
        inspect.getdoc(function) or "",
        re.MULTILINE,
    )
    if block is None:
        return {}
    entries = re.split(r"\n(?=[ \t]{1,8}\*{0,2}\w+(?: \([^)]*\))?:)", "\n" + block.group(1))
    found: dict[str, str] = {}
    for entry in entries:
        named = re.match(r"\s*(\w+)(?: \([^)]*\))?:\s*(.+)", entry, re.DOTALL)
        if named is not None:
            found[named.group(1)] = " ".join(named.group(2).split())
    return found


# How handlers are looked at


def _unwrapped(handler: Callable[..., Any]) -> Callable[..., Any]:
    while True:
        inner = getattr(handler, "func", None) or getattr(handler, "__wrapped__", None)
        if inner is None:
            break
        handler = inner
    if not inspect.isroutine(handler):
        handler = getattr(type(handler), "__call__", handler)
    return handler


def _is_async(handler: Callable[..., Any]) -> bool:
    # A sync wrapper of an async function hands its coroutine on, so the innermost one decides.
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(_unwrapped(handler))


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations that can be resolved; one that cannot is left out, not an error."""
    inner = _unwrapped(function)
    names = dict(getattr(inner, "__globals__", {}))
    try:
        names.update(inspect.getclosurevars(cast("Any", inner)).nonlocals)
    except (TypeError, ValueError):
        pass
    resolved: dict[str, Any] = {}
    for name, hint in getattr(inner, "__annotations__", {}).items():
        if isinstance(hint, str):
            try:
                hint = eval(hint, names)  # noqa: PLW2901  # what typing.get_type_hints does
            except Exception:
                continue
        resolved[name] = hint
    return resolved


def _check_signature(name: str, handler: Callable[..., Any]) -> None:
    if not callable(handler):
        raise ToolDefinitionError(f"the handler of tool {name!r} is not callable: {handler!r}")
    try:
        inspect.signature(handler).bind(object(), context=object())
    except TypeError as error:
        raise ToolDefinitionError(
            f"the handler of tool {name!r} must be callable as handler(params, *, context): {error}"
        ) from None
    except ValueError:
        pass  # a built-in without a signature


def _handler_hints(handler: Callable[..., Any]) -> tuple[Any, Any]:
    hints = _annotations(handler)
    first = next(iter(inspect.signature(handler).parameters), "")
    return hints.get(first, _UNSET), hints.get("return", _UNSET)


def _names_tool_result(hint: Any) -> bool:
    return hint is ToolResult or get_origin(hint) is ToolResult


def _result_type(hint: Any) -> Any:
    """Return R of ``ToolResult[R]``, also inside an Awaitable."""
    for arg in get_args(hint):
        if _names_tool_result(arg):
            return _result_type(arg)
    if get_origin(hint) is ToolResult:
        (declared,) = get_args(hint)
        return None if declared is NoneType else declared
    return _UNSET


def _is_contract_type(declared: Any) -> bool:
    if declared is None:
        return True
    cls = get_origin(declared) or declared
    return isinstance(cls, type) and is_dataclass(cls)


def _accepts(hint: Any, params_type: Any) -> bool:
    if hint is _UNSET or hint in (Any, object, params_type) or isinstance(hint, TypeVar):
        return True
    if params_type is None:
        return hint is NoneType
    if isinstance(hint, type) and isinstance(params_type, type):
        return issubclass(params_type, hint)
    return any(_accepts(arg, params_type) for arg in get_args(hint))


def _returns(hint: Any, result_type: Any) -> bool:
    if hint is _UNSET or hint is Any or hint is ToolResult:
        return True
    declared = _result_type(hint)
    if declared is _UNSET:
        return any(arg is ToolResult for arg in get_args(hint))
    if declared is Any or isinstance(declared, TypeVar) or declared == result_type:
        return True
    return (
        isinstance(declared, type)
        and isinstance(result_type, type)
        and issubclass(declared, result_type)
    )


def _show(hint: Any) -> str:
    return getattr(hint, "__name__", None) or repr(hint)


def _typed_validator(name: str, params_type: Any) -> Callable[[object], object]:
    try:
        return validator_for(params_type)
    except TypeError as error:
        if isinstance(error.__cause__, NameError):
            # A type that is defined further down in its module: looked up when first needed.
            return lambda data: validator_for(params_type)(data)
        raise ToolDefinitionError(f"the parameters of tool {name!r}: {error}") from error
