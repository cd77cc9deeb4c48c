"""``@tool`` makes a tool of a plain typed function."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType, Protocol, TypedDict, TypeVar

import pytest

from weakincentives.errors import ToolDefinitionError
from weakincentives.prompt import Tool, ToolContext, ToolExample, ToolResult, tool
from weakincentives.testing import make_context, make_context_with_files

T = TypeVar("T")


def details(result: ToolResult[Any]) -> dict[str, str]:
    return json.loads(result.message)["details"]


@tool(reach="reversible")
def rename(old: str, new: str, *, context: ToolContext) -> str:
    """Rename a symbol
    in every file.

    This paragraph is for people.
    """
    fs = context.filesystem
    for path in fs.glob("**/*"):
        fs.write(path, fs.read(path).replace(old, new))
    if new == "class":
        raise ValueError("class is a keyword")
    return f"Renamed {old} to {new}"


def test_a_function_is_called_with_its_own_parameters():
    context = make_context_with_files({"a.py": "foo()"})

    result = rename({"old": "foo", "new": "bar"}, context=context)

    assert isinstance(rename, Tool)
    assert result.success
    assert result.value == "Renamed foo to bar"
    assert result.render() == "Renamed foo to bar"
    assert context.filesystem.read("a.py") == "bar()"


def test_a_function_that_raises_leaves_nothing_behind():
    context = make_context_with_files({"a.py": "foo()"})

    result = rename({"old": "foo", "new": "class"}, context=context)

    assert (result.success, result.message) == (False, "class is a keyword")
    assert context.filesystem.read("a.py") == "foo()"


def test_name_description_and_options_come_from_the_function_or_the_decorator():
    assert (rename.name, rename.description, rename.reach) == (
        "rename",
        "Rename a symbol in every file.",
        "reversible",
    )

    @tool(name="other", description="Something else.", timeout=5.0, concurrent=True, title="Other")
    def function() -> None:
        """Not this."""

    assert (function.name, function.description, function.title) == (
        "other",
        "Something else.",
        "Other",
    )
    assert (function.timeout, function.concurrent) == (5.0, True)


def test_one_decorator_makes_several_tools():
    reading = tool(description="Read.", reach="read")

    def one() -> None: ...
    def two() -> None: ...

    made = [reading(one), reading(two)]

    assert [(t.name, t.description, t.reach) for t in made] == [
        ("one", "Read.", "read"),
        ("two", "Read.", "read"),
    ]


def test_a_description_may_be_longer_than_200_characters():
    @tool(description="x" * 5000)
    def talkative() -> None: ...

    assert len(talkative.description) == 5000


def test_arguments_are_strict_and_all_problems_come_at_once():
    result = rename({"old": 1, "nwe": "x"}, context=make_context())

    assert details(result).keys() == {"old", "new", "nwe"}
    assert details(result)["old"] == "Expected type string, got integer 1"


def test_the_schema_shows_types_defaults_and_descriptions():
    @tool
    def find(
        text: str,
        kind: Literal["file", "directory"] = "file",
        limit: Annotated[int, "How many at most."] = 10,
        tags: list[str] = [],  # noqa: B006
        weights: dict[str, float] = {"name": 1.0},  # noqa: B006
        root: str | None = None,
    ) -> list[str]:
        """Find files.

        Args:
            text: What to look for,
                in any case.
                Example: readme

            kind (Literal["file", "directory"], optional): What to find.

        Returns:
            tags: not a parameter's text.
        """
        return [text, kind, str(limit), *tags, *weights]

    assert find.parameters == {
        "type": "object",
        "properties": {
            "text": {
                "type": "string",
                "description": "What to look for, in any case. Example: readme",
            },
            "kind": {
                "type": "string",
                "enum": ["file", "directory"],
                "default": "file",
                "description": "What to find.",
            },
            "limit": {"type": "integer", "default": 10, "description": "How many at most."},
            "tags": {"type": "array", "items": {"type": "string"}, "default": []},
            "weights": {
                "type": "object",
                "additionalProperties": {"type": "number"},
                "default": {"name": 1.0},
            },
            "root": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["text"],
        "additionalProperties": False,
    }
    assert find({"text": "x"}).value == ["x", "file", "10", "name"]


@dataclass
class Options:
    names: list[str] = field(default_factory=list)


def test_a_mutable_default_is_not_shared_between_calls():
    shared = Options()

    @tool
    def collect(item: str, into: list[str] = [], options: Options = shared) -> list[str]:  # noqa: B006
        """Collect items."""
        into.append(item)
        options.names.append(item)
        return [*into, *options.names]

    assert collect({"item": "a"}).value == ["a", "a"]
    assert collect({"item": "b"}).value == ["b", "b"]
    assert shared.names == []


def test_a_parameter_without_a_default_may_follow_one_with_a_default():
    @tool
    def write(path: str = "out.txt", *, content: str) -> str:
        """Write."""
        return f"{path}: {content}"

    assert write({"content": "x"}).value == "out.txt: x"


def test_a_function_may_want_the_context_or_not_by_place_or_by_name():
    @tool
    def by_name(text: str, *, context: ToolContext) -> str:
        """Use the context."""
        return context.filesystem.read(text)

    @tool
    def by_place(context: ToolContext, text: str) -> str:
        """Use the context."""
        return context.filesystem.read(text)

    @tool
    def without(text: str) -> str:
        """Use nothing."""
        return "content"

    for each in (by_name, by_place, without):
        assert each.parameters["properties"].keys() == {"text"}
        context = make_context_with_files({"a.txt": "content"})
        assert each({"text": "a.txt"}, context=context).value == "content"


def test_a_tool_is_called_with_the_functions_own_arguments():
    context = make_context_with_files({"a.py": "foo()"})

    assert rename("foo", "bar", context=context).value == "Renamed foo to bar"
    assert rename("bar", new="baz", context=context).value == "Renamed bar to baz"
    assert rename(new="foo", old="baz", context=context).value == "Renamed baz to foo"
    params = rename.params_type(old="foo", new="bar")
    assert rename(params, context=context).value == "Renamed foo to bar"
    assert context.filesystem.read("a.py") == "bar()"
    assert details(rename("foo", nwe="bar", context=context)).keys() == {"new", "nwe"}
    with pytest.raises(TypeError, match="rename takes 2 arguments, got 3"):
        rename("foo", "bar", context)
    with pytest.raises(TypeError, match="several values for old"):
        rename("foo", old="bar")
    with pytest.raises(TypeError, match="takes a ToolContext as its context, got 3"):
        rename("foo", "bar", context=3)
    with pytest.raises(TypeError, match="one value or by name, not both"):
        rename({"old": "foo"}, new="bar")


def test_an_argument_that_is_a_mapping_is_given_by_name():
    """A single mapping by place gives all arguments, as a model does."""

    @tool
    def total(prices: dict[str, int]) -> int:
        """Add."""
        return sum(prices.values())

    assert total(prices={"a": 1, "b": 2}).value == 3
    assert total({"prices": {"a": 1, "b": 2}}).value == 3
    assert "Unknown field" in details(total({"a": 1}))["a"]


@tool
def by_type(text: str, ctx: ToolContext) -> str:
    """Use the context."""
    return ctx.filesystem.read(text)


@tool
def by_type_first(ctx: ToolContext, text: str) -> str:
    """Use the context."""
    return ctx.filesystem.read(text)


@tool
def by_annotated_type(text: str, *, ctx: Annotated[ToolContext, "The call's own."]) -> str:
    """Use the context."""
    return ctx.filesystem.read(text)


@tool
def by_optional_type(text: str, ctx: ToolContext | None = None) -> str:
    """Use the context."""
    assert ctx is not None
    return ctx.filesystem.read(text)


if TYPE_CHECKING:
    import weakincentives as only_for_checkers


@tool
def by_unresolved_type(text: str, ctx: only_for_checkers.ToolContext) -> str:
    """Use the context."""
    return ctx.filesystem.read(text)


@tool
def by_name_alone(text: str, context) -> str:
    """Use the context."""
    return context.filesystem.read(text)


@pytest.mark.parametrize(
    "made",
    [
        by_type,
        by_type_first,
        by_annotated_type,
        by_optional_type,
        by_unresolved_type,
        by_name_alone,
    ],
)
def test_a_parameter_annotated_with_the_context_gets_it_whatever_its_name(made: Any):
    context = make_context_with_files({"a.txt": "content"})
    name = next(n for n in ("ctx", "context") if n in inspect.signature(made.function).parameters)

    assert made.parameters["properties"].keys() == {"text"}
    assert made({"text": "a.txt"}, context=context).value == "content"
    assert made(text="a.txt", **{name: context}).value == "content"
    assert not made({"text": "a.txt", name: None}, context=context).success


def test_a_parameter_that_is_only_called_context_is_for_the_model():
    @tool
    def quote(line: str, context: str, call: ToolContext) -> str:
        """Quote."""
        return f"{line} ({context}) {call.filesystem.read('a.txt')}"

    given = make_context_with_files({"a.txt": "content"})

    assert quote.parameters["properties"].keys() == {"line", "context"}
    assert quote("a", "b", given).value == "a (b) content"
    assert quote(line="a", context="b", call=given).value == "a (b) content"
    assert quote({"line": "a", "context": "b"}, context=given).value == "a (b) content"


def test_a_nested_call_without_a_context_is_part_of_the_call_under_way():
    @tool
    def outer(*, context: ToolContext) -> str | None:
        """Rename."""
        return rename({"old": "foo", "new": "bar"}).value

    context = make_context_with_files({"a.py": "foo()"})

    assert outer(context=context).value == "Renamed foo to bar"
    assert context.filesystem.read("a.py") == "bar()"


def test_a_function_without_parameters_takes_an_empty_object():
    @tool
    def ping() -> str:
        """Ping."""
        return "pong"

    assert ping({}).value == ping(None).value == ping().value == "pong"
    assert not ping({"x": 1}).success


def test_what_a_function_returns_is_the_value_unless_it_is_a_tool_result():
    @tool
    def plain(n: int) -> dict[str, int]:
        """Count."""
        return {"n": n}

    @tool
    def whole(n: int) -> ToolResult[int]:
        """Count."""
        return ToolResult.ok(n, message="Counted") if n else ToolResult.error("Nothing to count")

    @tool
    def nothing() -> None:
        """Do nothing."""

    assert plain({"n": 3}).render() == '{"n": 3}'
    assert whole({"n": 3}).render() == "Counted\n3"
    assert whole({"n": 0}).message == "Nothing to count"
    assert nothing().success
    assert [t.result_type for t in (plain, whole, nothing)] == [dict[str, int], int, None]


def test_a_result_type_that_is_left_open_is_any():
    @tool
    def bare() -> ToolResult:
        """Answer."""
        return ToolResult.ok(1)

    @tool
    def silent():
        """Answer."""
        return 1

    assert (bare.result_type, silent.result_type) == (Any, Any)
    assert bare().value == silent().value == 1


@dataclass(frozen=True)
class Found:
    count: int


class Answers(Protocol):
    def answer(self) -> str: ...


class Row(TypedDict):
    name: str


UserId = NewType("UserId", int)


def returning(declared: Any, value: object) -> ToolResult[Any]:
    """Call a tool that is declared to return one type, and returns some value."""

    def answer() -> Any:
        """Answer."""
        return value

    answer.__annotations__["return"] = declared
    return tool(answer)()


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (str, 3),
        (int, "3"),
        (int, 3.0),
        (bool, 1),
        (float, "3.5"),
        (list[str], "text"),
        (dict[str, int], [1]),
        (Sequence[int], {1}),
        (Found, {"count": 1}),
        (Found | str, 3),
        (Found | None, 3),
        (Literal["a", "b"], 3),
        (Row, [("name", "x")]),
        (UserId, "x"),
        (Annotated[int, "a count"], "x"),
        (None, "text"),
        (ToolResult[int], ToolResult.ok("text")),
        (ToolResult[None], ToolResult.ok("text")),
        (ToolResult[Found] | ToolResult[None], ToolResult.ok(3)),
        (ToolResult[Found] | str, 3),
    ],
)
def test_a_value_of_another_type_than_declared_is_a_failure(declared: Any, value: object):
    result = returning(declared, value)

    assert not result.success
    assert result.failure is not None
    assert result.failure.code == "TYPE_ERROR"
    assert "Tool 'answer' failed on a value of the wrong type: the handler returned" in (
        result.message
    )


@pytest.mark.parametrize(
    "declared", [str, Found, list[int], Literal["a"], ToolResult[int], ToolResult[None], Row]
)
def test_a_forgotten_return_is_a_failure(declared: Any):
    result = returning(declared, None)

    assert result.failure is not None
    assert result.failure.code == "TYPE_ERROR"
    assert "returned None" in result.message


def test_an_async_function_is_held_to_its_result_type_too():
    @tool
    async def later() -> str:
        """Answer."""
        return 3  # type: ignore[return-value]

    @tool
    def handed_on() -> Awaitable[str]:
        """Answer."""
        return asyncio.sleep(0, "text")

    assert later().failure.code == "TYPE_ERROR"  # type: ignore[union-attr]
    assert handed_on().value == "text"


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (float, 3),
        (complex, 1.5),
        (int, True),
        (str, type("Text", (str,), {})("x")),
        (Found, type("More", (Found,), {})(1)),
        (Found | None, None),
        (str | None, None),
        (None, None),
        (object, None),
        (Any, None),
        (T, None),
        (Answers, 3),
        (Sequence[int], (1, 2)),
        (Iterable[str], ["a"]),
        (Mapping[str, int], {"a": 1}),
        (Row, {"name": "x"}),
        (UserId, 3),
        (Literal["a", 1], 1),
        (Callable[[], int], len),
        (type[Found], Found),
        (ToolResult[int], ToolResult.ok(3)),
        (ToolResult[int], ToolResult.ok(message="nothing to count")),
        (ToolResult[Found] | str, "text"),
        (ToolResult[Found] | str, ToolResult.ok(Found(1))),
        ("Missing", 3),
    ],
)
def test_a_value_that_fits_its_declared_type_is_taken(declared: Any, value: Any):
    result = returning(declared, value)

    assert result.success, result.message
    assert result.value == (value.value if isinstance(value, ToolResult) else value)


def test_an_async_function_is_awaited():
    @tool
    async def later(n: int, *, context: ToolContext) -> int:
        """Count."""
        return n + 1

    assert later.is_async
    assert later({"n": 1}).value == 2
    assert asyncio.run(later.acall(1, context=make_context())).value == 2


@dataclass(frozen=True)
class Query:
    text: str
    """What to look for."""


def test_a_function_that_is_written_as_a_handler_keeps_its_parameters():
    @tool
    def search(params: Query, *, context: ToolContext) -> ToolResult[str]:
        """Search."""
        return ToolResult.ok(params.text)

    @tool
    async def short(params: Query) -> str:
        """Search."""
        return params.text

    for each in (search, short):
        assert each.params_type is Query
        assert each({"text": "x"}).value == each(Query("x")).value == "x"
        assert each(params=Query("x")).value == each(text="x").value == "x"
        assert each.parameters["properties"]["text"]["description"] == "What to look for."


def test_params_that_are_no_dataclass_are_a_parameter_like_any_other():
    @tool
    def count(params: list[int]) -> int:
        """Count."""
        return sum(params)

    assert count({"params": [1, 2]}).value == 3


class Shelf:
    """Holds books."""

    def __init__(self, *books: str) -> None:
        self.books = books

    def find(self, title: str) -> bool:
        """Find a book."""
        return title in self.books

    def __call__(self, title: str) -> bool:
        return title in self.books


def test_a_bound_method_is_a_tool():
    find = tool(Shelf("Emma").find)

    assert (find.name, find.description) == ("find", "Find a book.")
    assert find({"title": "Emma"}).value is True


def test_a_callable_object_is_a_tool():
    shelf = tool(name="shelf")(Shelf("Emma"))

    assert shelf.description == "Holds books."
    assert shelf({"title": "Emma"}).value is True


def test_what_a_partial_holds_is_hidden_from_the_model():
    def fetch(url: str, *, key: str) -> str:
        """Fetch a page."""
        return f"{url} with {key}"

    made = tool(functools.partial(fetch, key="secret"))

    assert (made.name, made.description) == ("fetch", "Fetch a page.")
    assert made.parameters["properties"].keys() == {"url"}
    assert made({"url": "x"}).value == "x with secret"
    assert not made({"url": "x", "key": "mine"}).success


def test_a_decorated_function_is_looked_at_through_its_decorators():
    @tool
    @functools.lru_cache
    def square(n: int) -> int:
        """Square a number."""
        return n * n

    assert square({"n": 3}).value == 9
    assert not square({"n": "3"}).success


def test_examples_give_their_input_as_a_dict():
    example = ToolExample(description="Foo to bar", input={"old": "foo", "new": "bar"}, output="ok")

    @tool(examples=[example])
    def swap(old: str, new: str) -> str | None:
        """Swap names."""

    assert swap.definition()["examples"] == [
        {"description": "Foo to bar", "input": {"old": "foo", "new": "bar"}, "output": "ok"}
    ]


def test_an_example_that_does_not_fit_is_refused():
    example = ToolExample(description="Foo", input={"old": 1}, output=None)

    with pytest.raises(ToolDefinitionError, match="tool 'swap': the input of example 'Foo'"):

        @tool(examples=[example])
        def swap(old: str) -> None:
            """Swap names."""


def test_a_function_without_a_docstring_is_refused():
    with pytest.raises(ToolDefinitionError, match="'quiet' needs a docstring"):

        @tool
        def quiet() -> None: ...


def test_a_parameter_without_a_type_is_refused():
    with pytest.raises(
        ToolDefinitionError, match="'text' of @tool function 'untyped' needs a type"
    ):

        @tool
        def untyped(text) -> None:
            """Do it."""


def test_a_type_that_cannot_be_resolved_is_refused():
    with pytest.raises(ToolDefinitionError, match=r"'text' of @tool .* can be resolved"):

        @tool
        def unresolved(text: NoSuchName) -> None:  # noqa: F821
            """Do it."""


def test_a_type_that_has_no_json_form_is_refused():
    with pytest.raises(ToolDefinitionError, match="tool 'odd': its parameters"):

        @tool
        def odd(shelf: Shelf) -> None:
            """Do it."""


def takes_args(*texts: str) -> None:
    """Do it."""


def takes_kwargs(**texts: str) -> None:
    """Do it."""


def takes_by_place(text: str, /) -> None:
    """Do it."""


@pytest.mark.parametrize("function", [takes_args, takes_kwargs, takes_by_place])
def test_a_parameter_that_has_no_name_for_a_model_is_refused(function: Any):
    with pytest.raises(ToolDefinitionError, match=r"text.* gives arguments by name"):
        tool(function)


def test_a_method_that_is_not_bound_is_refused_with_a_hint():
    with pytest.raises(ToolDefinitionError, match=r"'self'.*tool\(instance.method\)"):

        class Suite:
            @tool
            def act(self, text: str) -> None:
                """Do it."""


def test_a_function_whose_name_no_provider_takes_is_refused():
    with pytest.raises(ToolDefinitionError, match="'doIt': its name must match"):

        @tool
        def doIt() -> None:  # noqa: N802
            """Do it."""


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="colour"):

        @tool(colour="red")
        def paint() -> None:
            """Paint it."""


def test_the_plain_function_can_still_be_called():
    @tool
    def shout(text: str) -> str:
        """Shout."""
        return text.upper()

    assert shout.function is not None
    assert shout.function("hey") == "HEY"
