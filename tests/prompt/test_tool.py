"""A tool is checked where it is declared, and says what it is."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from unittest.mock import Mock

import pytest

from weakincentives.dbc import require
from weakincentives.errors import InvalidArguments, ToolDefinitionError, UnboundResource
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import Tool, ToolContext, ToolExample, ToolResult
from weakincentives.resources import Binding, ResourceRegistry
from weakincentives.runtime import Session, ToolInvoked
from weakincentives.testing import make_context

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Query:
    text: str


@dataclass(frozen=True, slots=True)
class LongQuery(Query):
    limit: int = 10


@dataclass(frozen=True, slots=True)
class Found:
    count: int

    def render(self) -> str:
        return f"{self.count} found"


@dataclass(frozen=True, slots=True)
class FoundMore(Found):
    more: int = 0


@dataclass(frozen=True)
class Box(Generic[T]):
    content: T


class HasText(Protocol):
    text: str


def search(params: Query, *, context: ToolContext) -> ToolResult[Found]:
    return ToolResult.ok(Found(len(params.text)), message="Searched")


def declare(handler: Any, params: Any = Query, result: Any = Found, **options: Any) -> Any:
    options = {"name": "search", "description": "Search for a text.", **options}
    return Tool[params, result](handler=handler, **options)


def ask(tool: Any, arguments: object = None, **options: Any) -> ToolResult[Any]:
    return tool(
        {"text": "abc"} if arguments is None else arguments, context=make_context(**options)
    )


# Names, descriptions, options


@pytest.mark.parametrize("name", ["a", "read_file", "read-file", "0", "x" * 64])
def test_a_name_of_lower_case_letters_digits_and_dashes_is_fine(name: str):
    assert declare(search, name=name).name == name


@pytest.mark.parametrize(
    "name", ["", "x" * 65, "Read", "read file", "web:scrape", "é", "a\n", None]
)
def test_any_other_name_is_refused(name: Any):
    with pytest.raises(ToolDefinitionError, match="must match"):
        declare(search, name=name)


@pytest.mark.parametrize("description", ["x", "x" * 200])
def test_a_description_has_up_to_200_characters(description: str):
    assert declare(search, description=description).description == description


@pytest.mark.parametrize("description", ["", "  \n", "x" * 201, None])
def test_a_missing_or_longer_description_is_refused(description: Any):
    with pytest.raises(ToolDefinitionError, match="description"):
        declare(search, description=description)


@pytest.mark.parametrize(
    "option", [{"reach": "far"}, {"writes": "never"}, {"timeout": 0}, {"timeout": -1.0}]
)
def test_an_option_that_makes_no_sense_is_refused(option: dict[str, Any]):
    with pytest.raises(ToolDefinitionError, match=next(iter(option))):
        declare(search, **option)


def test_a_definition_error_is_a_type_error_and_a_value_error():
    """Whichever of the two a caller expects from a constructor."""
    for expected in (TypeError, ValueError):
        with pytest.raises(expected):
            declare(search, name="No")


# Types


@pytest.mark.parametrize("wrong", [str, dict, list[str], int | None, Any])
def test_parameters_that_are_no_dataclass_are_refused(wrong: Any):
    with pytest.raises(ToolDefinitionError, match=r"params_type must be"):
        declare(None, params=wrong)


@pytest.mark.parametrize("wrong", [str, dict[str, int], tuple[Found, ...]])
def test_a_result_that_is_no_dataclass_is_refused(wrong: Any):
    with pytest.raises(ToolDefinitionError, match="result_type must be"):
        declare(None, result=wrong)


def test_a_tool_takes_two_types():
    with pytest.raises(ToolDefinitionError, match=r"Tool\[Params, Result\]; got 1"):
        Tool[Query](name="search", description="Search.", handler=search)


def test_none_stands_for_no_parameters_and_no_result():
    def ping(params: None, *, context: ToolContext) -> ToolResult[None]:
        assert params is None
        return ToolResult.ok(message="pong")

    for nothing in (None, type(None)):
        tool = declare(ping, nothing, nothing)

        assert (tool.params_type, tool.result_type) == (None, None)
        assert ask(tool, {}).render() == "pong"
        assert ask(tool, "{}").success
        assert not ask(tool, {"text": "x"}).success


def test_parameters_that_cannot_come_from_json_are_refused():
    @dataclass
    class Odd:
        lock: Mock

    with pytest.raises(ToolDefinitionError, match=r"tool 'search': its parameters.*Mock"):
        declare(None, params=Odd)


def test_a_tool_without_a_handler_is_the_providers_to_run():
    tool = declare(None)

    assert "no handler here" in ask(tool).message


# The handler against the types


def takes_found(params: Found, *, context: ToolContext) -> ToolResult[Found]: ...
def takes_long(params: LongQuery, *, context: ToolContext) -> ToolResult[Found]: ...
def takes_list(params: list[Query], *, context: ToolContext) -> ToolResult[Found]: ...
def takes_none(params: None, *, context: ToolContext) -> ToolResult[Found]: ...
def takes_quoted(params: "Found", *, context: ToolContext) -> "ToolResult[Found]": ...  # noqa: UP037


@pytest.mark.parametrize("handler", [takes_found, takes_long, takes_list, takes_none, takes_quoted])
def test_a_handler_that_takes_something_else_is_refused(handler: Any):
    with pytest.raises(ToolDefinitionError, match=r"takes .*, but the tool's parameters are Query"):
        declare(handler)


def takes_base(params: Query, *, context: ToolContext) -> ToolResult[Found]: ...
def takes_any(params: Any, *, context: ToolContext) -> ToolResult[Found]: ...
def takes_object(params: object, *, context: ToolContext) -> ToolResult[Found]: ...
def takes_union(params: LongQuery | Found, *, context: ToolContext) -> ToolResult[Found]: ...
def takes_protocol(params: HasText, *, context: ToolContext) -> ToolResult[Found]: ...
def takes_typevar(params: T, *, context: ToolContext) -> ToolResult[Found]: ...
def takes_missing(params: NoSuchName, *, context: ToolContext) -> ToolResult[Found]: ...  # noqa: F821
def says_nothing(params, *, context): ...
def takes_context_by_place(params: LongQuery, context: ToolContext) -> ToolResult[Found]: ...
def takes_anything(*args: Any, **kwargs: Any) -> Any: ...
def takes_nested_quotes(params: "LongQuery", *, context: Any) -> "ToolResult['Found']": ...  # noqa: UP037


@pytest.mark.parametrize(
    "handler",
    [
        takes_base,
        takes_any,
        takes_object,
        takes_union,
        takes_protocol,
        takes_typevar,
        takes_missing,
        says_nothing,
        takes_context_by_place,
        takes_anything,
        takes_nested_quotes,
    ],
)
def test_a_handler_that_may_take_the_parameters_is_fine(handler: Any):
    """Also one whose annotation cannot be resolved: it is not checked."""
    assert declare(handler, params=LongQuery).handler is handler


def gives_found(params: Query, *, context: ToolContext) -> ToolResult[Found]: ...
def gives_none(params: Query, *, context: ToolContext) -> ToolResult[None]: ...
def gives_either(params: Query, *, context: ToolContext) -> ToolResult[FoundMore | Query]: ...
def gives_two(params: Query, *, context: ToolContext) -> ToolResult[Query] | ToolResult[None]: ...
async def gives_later(params: Query, *, context: ToolContext) -> ToolResult[Query]: ...


@pytest.mark.parametrize("handler", [gives_found, gives_none, gives_either, gives_two, gives_later])
def test_a_handler_that_gives_something_else_is_refused(handler: Any):
    with pytest.raises(ToolDefinitionError, match=r"its contract is ToolResult\[FoundMore\]"):
        declare(handler, result=FoundMore)


def gives_plain(params: Query, *, context: ToolContext) -> Found: ...
def gives_nothing(params: Query, *, context: ToolContext) -> None: ...
def gives_maybe(params: Query, *, context: ToolContext) -> ToolResult[Found] | None: ...


@pytest.mark.parametrize("handler", [gives_plain, gives_nothing, gives_maybe])
def test_a_handler_that_gives_no_tool_result_is_refused(handler: Any):
    with pytest.raises(ToolDefinitionError, match="must return a ToolResult"):
        declare(handler)


def gives_more(params: Query, *, context: ToolContext) -> ToolResult[FoundMore]: ...
def gives_optional(params: Query, *, context: ToolContext) -> ToolResult[Found | None]: ...
def gives_open(params: Query, *, context: ToolContext) -> ToolResult: ...
def gives_any(params: Query, *, context: ToolContext) -> ToolResult[Any]: ...
def gives_sum(params: Query, *, context: ToolContext) -> ToolResult[Found] | ToolResult[None]: ...
async def gives_async(params: Query, *, context: ToolContext) -> ToolResult[Found]: ...
def gives_awaitable(params: Query, *, context: ToolContext) -> Awaitable[ToolResult[Found]]: ...
def gives_missing(params: Query, *, context: ToolContext) -> ToolResult[NoSuchName]: ...  # noqa: F821


@pytest.mark.parametrize(
    "handler",
    [
        gives_more,
        gives_optional,
        gives_open,
        gives_any,
        gives_sum,
        gives_async,
        gives_awaitable,
        gives_missing,
    ],
)
def test_a_handler_that_may_give_the_result_is_fine(handler: Any):
    assert declare(handler).handler is handler


def test_types_that_are_left_out_come_from_the_handler():
    tool = Tool(name="search", description="Search.", handler=search)

    assert (tool.params_type, tool.result_type) == (Query, Found)
    assert ask(tool).value == Found(3)


def test_types_that_nobody_gives_are_asked_for():
    with pytest.raises(ToolDefinitionError, match=r"params_type is not known"):
        Tool(name="search", description="Search.", handler=says_nothing)


def test_generic_parameters_are_told_apart_by_their_arguments():
    def unpack(params: Box[int], *, context: ToolContext) -> ToolResult[Box[str]]:
        return ToolResult.ok(Box(str(params.content)))

    def unpack_any(params: Box, *, context: ToolContext) -> ToolResult[Box]:
        return ToolResult.ok(Box(str(params.content)))

    tool = declare(unpack, Box[int], Box[str])
    assert ask(tool, {"content": 3}).value == Box("3")
    assert "Expected type integer" in ask(tool, {"content": "3"}).message
    assert ask(declare(unpack_any, Box[int], Box[str]), {"content": 3}).value == Box("3")
    with pytest.raises(ToolDefinitionError, match="takes"):
        declare(unpack, Box[str], Box[str])
    with pytest.raises(ToolDefinitionError, match="returns"):
        declare(unpack, Box[int], Box[int])


# The shapes a handler comes in


def no_context(params: Query) -> ToolResult[Found]: ...
def no_params(*, context: ToolContext) -> ToolResult[Found]: ...
def one_more(params: Query, other: int, *, context: ToolContext) -> ToolResult[Found]: ...


@pytest.mark.parametrize("handler", [no_context, no_params, one_more, lambda: None, Found])
def test_a_handler_that_cannot_be_called_with_params_and_context_is_refused(handler: Any):
    with pytest.raises(ToolDefinitionError, match=r"callable as handler\(params, \*, context\)"):
        declare(handler)


def test_what_is_not_callable_is_no_handler():
    with pytest.raises(ToolDefinitionError, match="is not callable: 'search'"):
        declare("search")


def test_a_decorated_handler_is_looked_at_through_its_decorators():
    """``require`` and its like stand for the function they wrap."""
    wrapped = require(lambda params: params.text, "text cannot be empty")(search)

    assert (
        ask(declare(wrapped), {"text": ""}).message == "Precondition failed: text cannot be empty"
    )
    assert ask(declare(wrapped)).value == Found(3)
    with pytest.raises(ToolDefinitionError, match="takes Query"):
        declare(wrapped, params=Found)
    with pytest.raises(ToolDefinitionError, match=r"handler\(params, \*, context\)"):
        declare(require(lambda params: True)(no_context))


class Index:
    """Gives handlers as methods, and is one itself."""

    func = "an attribute of that name means nothing"

    def __init__(self, weight: int) -> None:
        self.weight = weight

    def search(self, params: Query, *, context: ToolContext) -> ToolResult[Found]:
        return ToolResult.ok(Found(self.weight))

    @require(lambda params: params.text != "no", "not that")
    async def search_later(self, params: Query, *, context: ToolContext) -> ToolResult[Found]:
        return ToolResult.ok(Found(self.weight))

    def __call__(self, params: Query, *, context: ToolContext) -> ToolResult[Found]:
        return ToolResult.ok(Found(self.weight))


class LateIndex:
    @require(lambda params: params.text != "no", "not that")
    async def __call__(self, params: Query, *, context: ToolContext) -> ToolResult[Found]:
        return ToolResult.ok(Found(7))


def weighted(weight: int, params: Query, *, context: ToolContext) -> ToolResult[Found]:
    return ToolResult.ok(Found(weight))


async def weighted_later(params: Query, *, weight: int, context: ToolContext) -> ToolResult[Found]:
    return ToolResult.ok(Found(weight))


@pytest.mark.parametrize(
    ("handler", "is_async"),
    [
        (Index(7).search, False),
        (Index(7).search_later, True),
        (Index(7), False),
        (LateIndex(), True),
        (functools.partial(weighted, 7), False),
        (functools.partial(weighted_later, weight=7), True),
        (functools.partial(Index(7).search_later), True),
    ],
)
def test_methods_partials_and_callable_objects_are_handlers(handler: Any, is_async: bool):
    """They are checked like functions, and run as what they are."""
    tool = declare(handler)

    assert tool.is_async is is_async
    assert tool(Query("abc"), context=make_context()).value == Found(7)
    with pytest.raises(ToolDefinitionError, match="takes Query"):
        declare(handler, params=Found)
    with pytest.raises(ToolDefinitionError, match="returns"):
        declare(handler, result=Query)


def test_a_plain_function_that_hands_on_a_coroutine_is_awaited():
    @functools.wraps(gives_async)
    def wrapper(params: Query, *, context: ToolContext) -> Any:
        return answer(params, context)

    def annotated(params: Query, *, context: ToolContext) -> Awaitable[ToolResult[Found]]:
        return answer(params, context)

    async def answer(params: Query, context: ToolContext) -> ToolResult[Found]:
        return ToolResult.ok(Found(1))

    for handler in (wrapper, annotated):
        assert ask(declare(handler)).value == Found(1)


def test_a_mock_is_a_handler():
    handler = Mock(return_value=ToolResult.ok(Found(5)))

    assert ask(declare(handler)).value == Found(5)
    assert handler.call_args.args == (Query("abc"),)


def test_local_types_are_resolved_where_the_handler_sees_them():
    @dataclass
    class Local:
        text: str

    def handler(params: Local, *, context: ToolContext) -> ToolResult[Local]:
        return ToolResult.ok(Local(params.text))

    assert ask(declare(handler, Local, Local)).value == Local("abc")
    with pytest.raises(ToolDefinitionError, match="takes Local"):
        declare(handler, Query, Local)


def test_parameters_may_name_a_type_that_is_defined_later():
    """As a module does whose classes refer to each other."""
    globals().pop("Later", None)

    @dataclass
    class Early:
        later: Later  # noqa: F821

    def handler(params: Early, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok(message=params.later.text)

    tool = declare(handler, Early, None)
    globals()["Later"] = Query

    assert ask(tool, {"later": {"text": "now"}}).message == "now"


# Calling a tool


def test_calling_a_tool_runs_the_pipeline():
    session = Session()

    result = declare(search)(Query("abc"), context=make_context(session=session))

    assert result.value == Found(3)
    assert [call.tool_name for call in session[ToolInvoked].all()] == ["search"]


def test_a_tool_is_called_with_parameters_in_any_form():
    tool = declare(search)

    for arguments in (Query("abc"), {"text": "abc"}, '{"text": "abc"}', b'{"text": "abc"}'):
        assert ask(tool, arguments).value == Found(3)
    assert tool(text="abc").value == Found(3)
    with pytest.raises(TypeError, match="not both"):
        tool(Query("abc"), text="abc")


def test_all_problems_with_arguments_come_back_at_once():
    message = json.loads(ask(declare(search), {"txt": 1}).message)

    assert message["error"] == "Invalid parameters for tool 'search'"
    assert message["details"].keys() == {"text", "txt"}


def test_arguments_that_are_no_object_are_explained():
    with pytest.raises(InvalidArguments) as caught:
        declare(search).parse("[1]")

    assert json.loads(str(caught.value))["details"].keys() == {"arguments"}


def test_replace_returns_a_tool_that_is_checked_again():
    tool = declare(search)

    assert tool.replace(description="Look.").description == "Look."
    assert tool.description == "Search for a text."
    assert ask(tool.replace(timeout=600.0)).value == Found(3)
    with pytest.raises(ToolDefinitionError):
        tool.replace(name="No")


def test_tools_are_told_apart_by_identity_and_shown_by_title():
    one, other = declare(search), declare(search)

    assert one != other
    assert len({one, other, one}) == 2
    assert repr(one) == "<tool search>"
    assert repr(declare(search, title="sequence:a→b")) == "<tool sequence:a→b>"


# Examples


@dataclass(slots=True, frozen=True)
class NowParams:
    """Parameters of the Chapter's example."""

    tz: str = "UTC"
    """Timezone name (e.g., 'UTC', 'America/New_York')"""


@dataclass(slots=True, frozen=True)
class NowResult:
    iso: str


def now(params: NowParams, *, context: ToolContext) -> ToolResult[NowResult]:
    return ToolResult.ok(NowResult("2025-01-01T00:00:00+00:00"))


def now_tool(*examples: Any) -> Tool[NowParams, NowResult]:
    return Tool[NowParams, NowResult](
        name="now",
        description="Return current UTC time in ISO 8601 format.",
        handler=now,
        examples=examples,
    )


GOOD = ToolExample(
    description="Get current UTC time",
    input=NowParams(tz="UTC"),
    output=NowResult(iso="2025-01-01T00:00:00+00:00"),
)


def test_a_definition_is_what_the_chapter_shows():
    """With defaults and additionalProperties, which the Chapter's sketch leaves out."""
    assert now_tool(GOOD).definition() == {
        "name": "now",
        "description": "Return current UTC time in ISO 8601 format.",
        "parameters": {
            "type": "object",
            "description": "Parameters of the Chapter's example.",
            "properties": {
                "tz": {
                    "type": "string",
                    "default": "UTC",
                    "description": "Timezone name (e.g., 'UTC', 'America/New_York')",
                }
            },
            "additionalProperties": False,
        },
        "examples": [
            {
                "description": "Get current UTC time",
                "input": {"tz": "UTC"},
                "output": {"iso": "2025-01-01T00:00:00+00:00"},
            }
        ],
    }


def test_a_definition_leaves_examples_out_where_there_are_none_or_none_are_wanted():
    assert "examples" not in now_tool().definition()
    assert "examples" not in now_tool(GOOD).definition(examples=False)


def test_a_definition_is_the_callers_to_change():
    tool = now_tool(GOOD)
    definition = tool.definition()
    definition["parameters"]["properties"].clear()
    definition["examples"].clear()
    tool.parameters.clear()

    assert tool.definition()["parameters"]["properties"].keys() == {"tz"}
    assert len(tool.definition()["examples"]) == 1


def test_an_example_without_parameters_shows_an_empty_input():
    def ping(params: None, *, context: ToolContext) -> ToolResult[None]: ...

    tool = declare(ping, None, None, examples=[ToolExample("Ping", None, None)])

    assert tool.definition()["examples"] == [{"description": "Ping", "input": {}, "output": None}]


@pytest.mark.parametrize(
    ("example", "problem"),
    [
        (
            ToolExample("x", {"tz": "UTC"}, NowResult("now")),
            "input .* expected NowParams, got dict",
        ),
        (ToolExample("x", NowResult("now"), NowResult("now")), "input .* expected NowParams"),
        (ToolExample("x", None, NowResult("now")), "input .* expected NowParams, got None"),
        (ToolExample("x", NowParams(), NowParams()), "output .* expected NowResult, got NowParams"),
        (ToolExample("x", NowParams(), None), "output .* expected NowResult"),
        (ToolExample("x", NowParams(tz=3), NowResult("now")), "input .*Expected type string"),
        (ToolExample("x", NowParams(), NowResult(iso=3)), "output .*Expected type string"),
        (ToolExample("x", NowParams(), NowResult(iso=object())), "output .* not valid"),
        ({"description": "x"}, "is not a ToolExample"),
    ],
)
def test_an_example_that_does_not_fit_its_tool_is_refused(example: Any, problem: str):
    with pytest.raises(ToolDefinitionError, match=f"(?s){problem}"):
        now_tool(example)


@pytest.mark.parametrize("description", ["", "x" * 201])
def test_the_description_of_an_example_has_1_to_200_characters(description: str):
    with pytest.raises(ToolDefinitionError, match="1 to 200"):
        ToolExample(description, NowParams(), NowResult("now"))


def test_an_example_can_be_written_with_its_types():
    example = ToolExample[NowParams, NowResult]("x", NowParams(), NowResult("now"))

    assert now_tool(example).examples == (example,)


def test_the_result_of_an_example_may_hold_what_json_cannot_say():
    """Only what can be written is shown, so only that is checked."""

    @dataclass
    class Rich:
        text: str
        extra: Mock | None = None

    def handler(params: Query, *, context: ToolContext) -> ToolResult[Rich]: ...

    tool = declare(handler, result=Rich, examples=[ToolExample("x", Query("a"), Rich("b"))])

    assert tool.definition()["examples"][0]["output"] == {"text": "b", "extra": None}


# Contexts


class Settings:
    pass


def test_a_context_takes_resources_in_every_form():
    settings = Settings()
    registry = ResourceRegistry.of(Binding.instance(Settings, settings))

    for resources in ({Settings: settings}, registry, registry.open()):
        context = ToolContext(session=Session(), resources=resources)

        assert context.resources.get(Settings) is settings
        with pytest.raises(UnboundResource):
            _ = context.filesystem


def test_a_context_is_frozen_and_has_a_default_for_everything_but_the_session():
    context = ToolContext(session=Session(session_id="s1"))

    assert context.session_id == "s1"
    assert (context.prompt, context.adapter, context.deadline, context.memory) == (None,) * 4
    assert (context.loop_id, context.agent_id) == ("", "")
    assert not context.signal.cancelled
    context.beat()
    with pytest.raises(AttributeError):
        context.adapter = object()


def test_the_filesystem_of_a_context_is_the_bound_one():
    fs = MemoryFilesystem({"a.txt": "hello"})

    assert ToolContext(session=Session(), resources={Filesystem: fs}).filesystem is fs


def test_resources_in_any_other_form_are_refused():
    with pytest.raises(TypeError, match="resources must be"):
        ToolContext(session=Session(), resources=7)


def test_field_descriptions_reach_the_model():
    """From the string under a field, its metadata, or Annotated."""

    def handler(params: Described, *, context: ToolContext) -> ToolResult[None]: ...

    properties = declare(handler, Described, None).parameters["properties"]

    assert {name: each["description"] for name, each in properties.items()} == {
        "under": "Below the field.",
        "metadata": "In its metadata.",
    }


@dataclass
class Described:
    under: str
    """Below the field."""
    metadata: str = field(metadata={"description": "In its metadata."})
