"""Small things that applications ask for: unwrap, needs, coercion, debug, tools of one run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest

import weakincentives as wink
from weakincentives.adapters import OpenAIAdapter, ScriptedAdapter, calls
from weakincentives.errors import (
    PromptValidationError,
    ProviderRejected,
    ToolDefinitionError,
    ToolFailed,
)
from weakincentives.runtime import MainLoopConfig, Session, ToolInvoked, ToolRegistry
from weakincentives.testing import MadeUpAdapter, made_up, no_model_requests


class Stock:
    """A resource."""


@wink.tool
def add(number: int, *, context: wink.ToolContext) -> int:
    """Add."""
    return number


@wink.tool
def fails() -> int:
    """Fail."""
    raise LookupError("the shelf is gone")


@wink.tool(needs=(Stock,))
def sell(item: str, *, context: wink.ToolContext) -> str:
    """Sell."""
    return item


def prompt(*tools: Any, **fields: Any) -> wink.Prompt[Any]:
    section = wink.MarkdownSection(title="Desk", tools=tools)
    return wink.Prompt(wink.PromptTemplate(sections=[section], **fields))


def test_unwrap_gives_the_value_or_raises_what_failed():
    tools = ToolRegistry([add, fails])

    assert tools.execute("add", {"number": 3}).unwrap() == 3
    with pytest.raises(ToolFailed, match="the shelf is gone") as caught:
        tools.execute("fails").unwrap()
    assert caught.value.result.failure.code == "INTERNAL_ERROR"


def test_a_tool_that_needs_a_resource_is_refused_where_there_is_none():
    with pytest.raises(
        ToolDefinitionError, match=r"needs Stock, which is not bound.*Stock: \.\.\."
    ):
        ToolRegistry([sell])
    with pytest.raises(ToolDefinitionError, match="needs Stock"):
        ToolRegistry([add]).register(sell)
    with pytest.raises(ToolDefinitionError, match="not bound in the prompt"):
        prompt(sell).render()
    with pytest.raises(ToolDefinitionError, match="needs resources by type"):
        sell.replace(needs=("Stock",))

    assert ToolRegistry([sell], resources={Stock: Stock()}).execute("sell", {"item": "a"}).success
    assert prompt(sell).bind(resources={Stock: Stock()}).render().tools == (sell,)


def test_arguments_are_coerced_where_asked():
    @wink.tool(strict=False)
    def lax(number: int, ratio: float = 0.5, really: bool = False) -> str:
        """Take anything that reads as the type."""
        return f"{number} {ratio} {really}"

    assert lax({"number": "10", "ratio": "1.5", "really": "true"}).value == "10 1.5 True"
    assert "Expected type integer" in lax({"number": "ten"}).message
    assert not add({"number": "10"}).success
    assert ToolRegistry([add], strict=False).execute("add", {"number": "10"}).value == 10


def test_debug_raises_what_a_handler_raised_once_the_call_is_undone():
    @wink.tool(reach="reversible")
    def note(*, context: wink.ToolContext) -> None:
        """Note, and fail."""
        context.session.dispatch(Note("lost"))
        raise LookupError("the shelf is gone")

    @wink.tool
    def told() -> None:
        """Say no."""
        raise ValueError("not today")

    tools = ToolRegistry([note, told], debug=True)

    with pytest.raises(LookupError, match="the shelf is gone"):
        tools.execute("note")
    assert tools.session[Note].all() == ()
    assert [each.success for each in tools.session[ToolInvoked].all()] == [False]
    assert tools.execute("told").message == "not today"
    with pytest.raises(LookupError):
        asyncio.run(tools.aexecute("note"))
    with pytest.raises(LookupError):
        ScriptedAdapter([calls("fails"), "done"]).evaluate(
            prompt(fails), Session(), config=MainLoopConfig(debug=True)
        )


@dataclass(frozen=True)
class Note:
    text: str


@pytest.mark.parametrize("wanted", [["add"], lambda tool: tool.name == "add"])
def test_a_run_offers_the_tools_that_it_names(wanted: Any):
    adapter = ScriptedAdapter([calls("fails"), calls(("add", {"number": 1})), "done"])
    session = Session()

    adapter.evaluate(prompt(add, fails), session, config=MainLoopConfig(tools=wanted))

    assert adapter.last_request is not None
    assert [tool.name for tool in adapter.last_request.prompt.tools] == ["add"]
    records = session[ToolInvoked].all()
    assert [(each.tool_name, each.success) for each in records] == [("fails", False), ("add", True)]


def test_a_run_that_names_no_tool_of_its_prompt_is_refused():
    with pytest.raises(PromptValidationError, match="names the tool 'ad', which the prompt"):
        ScriptedAdapter(["a"]).evaluate(prompt(add), Session(), config=MainLoopConfig(tools={"ad"}))


# A model without a script


@dataclass(frozen=True)
class Line:
    kind: Literal["item", "discount"]
    amount: int
    parent: Line | None = None


@dataclass(frozen=True)
class Invoice:
    lines: tuple[Line, ...]
    note: str | None
    rates: dict[str, float]


def test_a_made_up_model_calls_every_tool_with_valid_arguments_and_answers():
    seen: list[object] = []

    @wink.tool
    def bill(invoice: Invoice, by: str = "ann") -> None:
        """Bill."""
        seen.append(invoice)

    adapter, session = MadeUpAdapter(), Session()
    response = adapter.evaluate(prompt(add, bill, output_type=Line), session)

    assert response.unwrap() == Line("item", 1)
    assert seen == [Invoice((), "a", {})]
    assert [each.success for each in session[ToolInvoked].all()] == [True, True]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 7, "multipleOf": 5},
        {"type": "number", "exclusiveMaximum": 0},
        {"type": "string", "minLength": 3},
        {"type": "string", "format": "uuid"},
        {"type": "array", "items": {"enum": ["b", "c"]}, "minItems": 2},
        {"anyOf": [{"type": "null"}, {"type": "string"}]},
        {"$defs": {"a": {"const": 4}}, "$ref": "#/$defs/a"},
    ],
)
def test_a_value_that_is_made_up_fits_its_schema(schema: dict[str, Any]):
    made_up(schema)  # it checks itself


def test_what_cannot_be_made_up_is_said():
    with pytest.raises(ValueError, match="give the model a script"):
        made_up({"type": "string", "pattern": "^[0-9]{4}$"})


@pytest.fixture
def offline() -> Iterator[None]:
    with no_model_requests():
        yield


@pytest.mark.usefixtures("offline")
def test_tests_can_refuse_requests_to_real_models():
    with pytest.raises(ProviderRejected, match="use a ScriptedAdapter"):
        OpenAIAdapter(model="m", api_key="none").evaluate(prompt(add), Session())
    assert ScriptedAdapter(["hello"]).evaluate(prompt(add), Session()).text == "hello"
