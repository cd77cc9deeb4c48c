"""``@tool``: a tool made of a plain typed function."""

from __future__ import annotations

import copy
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import partial
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, cast, get_origin, overload

from weakincentives.errors import ToolDefinitionError
from weakincentives.prompt.context import ToolContext
from weakincentives.prompt.signatures import hints_of, is_async
from weakincentives.prompt.tool import Reach, Tool, ToolExample, Writes
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.prompt.contracts import Effect, Precondition
    from weakincentives.retry import RetryPolicy

_ARGS = re.compile(r"^(?:Args|Arguments|Parameters):[ \t]*\n((?:[ \t]+.*\n?|\n)+)", re.MULTILINE)
_ARG = re.compile(r"^(\w+)(?: *\(.*?\))?:(.*(?:\n(?:[ \t].*)?)*)", re.MULTILINE)


@overload
def tool(function: Callable[..., Any], /) -> Tool[Any, Any]: ...
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
    title: str = "",
    preconditions: Sequence[Precondition] = (),
    effects: Sequence[Effect] = (),
    retry: RetryPolicy | None = None,
) -> Callable[[Callable[..., Any]], Tool[Any, Any]]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    **options: Any,
) -> Any:
    """Make a tool of a plain typed function, sync or async.

    Its parameters become the tool's (one called ``context`` gets the ToolContext), the first
    paragraph of its docstring the description, and what it returns the result's value. A function
    that takes one dataclass as ``params`` is called with that. Examples may give their input as a
    dict.
    """

    def made(function: Callable[..., Any]) -> Tool[Any, Any]:
        return _tool_of(function, name, description, options)

    return made if function is None else made(function)


def _tool_of(
    function: Callable[..., Any],
    name: str | None,
    description: str | None,
    options: dict[str, Any],
) -> Tool[Any, Any]:
    title = _title(function)
    description = description or _first_paragraph(function)
    if not description:
        raise ToolDefinitionError(f"@tool function {title!r} needs a docstring: the model reads it")
    params_type = _own_params_type(function)
    if params_type is None:
        params_type = _params_of(function, title)
        names: tuple[str, ...] | None = tuple(each.name for each in fields(params_type))
    else:
        names = None
    result_type = hints_of(function).get("return", Any)
    if result_type is ToolResult or get_origin(result_type) is ToolResult:
        result_type = next(iter(getattr(result_type, "__args__", ())), Any)
    return Tool(
        name=name or title,
        description=description,
        handler=_handler_of(function, names),
        params_type=params_type,
        result_type=None if result_type is type(None) else result_type,
        strict=False,
        **options,
    )


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters that a model fills in: not the context, not what a partial holds."""
    parameters = inspect.signature(function).parameters.values()
    held = function.keywords if isinstance(function, partial) else {}
    return [each for each in parameters if each.name != "context" and each.name not in held]


def _own_params_type(function: Callable[..., Any]) -> Any:
    """Return the dataclass of a function that is written as a handler already."""
    hint = hints_of(function).get("params")
    cls = get_origin(hint) or hint
    is_handler = [each.name for each in _parameters(function)] == ["params"]
    return hint if is_handler and isinstance(cls, type) and is_dataclass(cls) else None


def _params_of(function: Callable[..., Any], title: str) -> type:
    """Return a dataclass with a field for each parameter."""
    hints = hints_of(function, extras=True)
    documented = _argument_docs(_doc(function))
    specs: list[tuple[str, Any, Any]] = []
    for parameter in _parameters(function):
        name = parameter.name
        if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(
                f"@tool function {title!r} cannot have the parameter {str(parameter)!r}: "
                "a model gives its arguments by name"
            )
        if name not in hints:
            raise ToolDefinitionError(
                f"parameter {name!r} of @tool function {title!r} needs a type annotation that can "
                "be resolved at module level; decorate a method as tool(instance.method)"
            )
        specs.append((name, *_field_of(parameter, hints[name], documented.get(name))))
    words = "".join(part.capitalize() for part in re.split(r"\W|_", title))
    made = make_dataclass(f"{words}Params", specs, frozen=True, slots=True, kw_only=True)
    # Where it can be found again, by whoever reads a record of a call in another process.
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

    from weakincentives.serde import dump

    # Every call gets a default of its own, and the schema shows it all the same.
    shown = Field(json_schema_extra={"default": dump(default)})
    made = field(default_factory=partial(copy.deepcopy, default), metadata=metadata)
    return Annotated[hint, shown], made


def _handler_of(function: Callable[..., Any], names: tuple[str, ...] | None) -> Any:
    """Return a handler that calls the function with the fields of its parameters, or with them."""
    takes_context = "context" in inspect.signature(function).parameters

    def arguments(params: Any, context: ToolContext) -> dict[str, Any]:
        given = {"params": params} if names is None else {n: getattr(params, n) for n in names}
        return {**given, "context": context} if takes_context else given

    def answer(value: Any) -> ToolResult[Any]:
        if not isinstance(value, ToolResult):
            return ToolResult.ok(value)
        return cast("ToolResult[Any]", value)

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


# What a function says about itself


def _title(function: Callable[..., Any]) -> str:
    return getattr(_called(function), "__name__", None) or type(function).__name__


def _doc(function: Callable[..., Any]) -> str:
    return inspect.getdoc(_called(function)) or ""


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    return _called(function.func) if isinstance(function, partial) else function


def _first_paragraph(function: Callable[..., Any]) -> str:
    return " ".join(_doc(function).split("\n\n")[0].split())


def _argument_docs(doc: str) -> dict[str, str]:
    """Return what an ``Args:`` block of a docstring says about each parameter."""
    block = _ARGS.search(doc)
    if block is None:
        return {}
    entries = _ARG.findall(textwrap.dedent(block.group(1)))
    return {name: " ".join(text.split()) for name, text in entries}
