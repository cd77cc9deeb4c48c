"""``Tool.from_schema``: arguments checked by a JSON schema as given."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives.errors import ToolDefinitionError
from weakincentives.prompt import Tool, ToolContext, ToolExample, ToolResult
from weakincentives.testing import make_context

SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "minLength": 1, "maxLength": 20},
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "order": {"enum": ["name", "size", 3]},
        "range": {
            "type": "object",
            "properties": {"start": {"type": "integer"}, "end": {"type": "integer"}},
            "required": ["start", "end"],
        },
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    },
    "required": ["query"],
    "additionalProperties": False,
}


def echo(params: dict[str, Any], *, context: ToolContext) -> ToolResult[dict[str, Any]]:
    return ToolResult.ok(params)


def raw(schema: Any = SEARCH, **options: Any) -> Tool[Any, Any]:
    return Tool.from_schema("search", "Search.", schema, echo, **options)


def run(arguments: object, schema: Any = SEARCH) -> ToolResult[Any]:
    return raw(schema)(arguments, context=make_context())


def problems(arguments: object, schema: Any = SEARCH) -> dict[str, str]:
    result = run(arguments, schema)
    assert not result.success
    message = json.loads(result.message)
    assert message["error"] == "Invalid parameters for tool 'search'"
    return message["details"]


def test_arguments_that_fit_reach_the_handler_as_a_dict():
    arguments = {"query": "x", "limit": 5, "tags": ["a", "b"], "range": {"start": 1, "end": 2}}

    assert run(arguments).value == arguments


def test_text_and_data_are_taken_alike():
    for arguments in ({"query": "x"}, '{"query": "x"}', b'{"query": "x"}'):
        assert run(arguments).value == {"query": "x"}
    assert run(MappingProxyType({"query": "x", "tags": ("a",)})).value == {
        "query": "x",
        "tags": ["a"],
    }


@dataclass
class Query:
    query: str


def test_a_dataclass_is_taken_as_the_object_it_is_written_as():
    assert run(Query("x")).value == {"query": "x"}


def test_the_handler_gets_data_of_its_own():
    arguments = {"query": "x", "tags": ["a"]}

    run(arguments).value["tags"].append("b")

    assert arguments == {"query": "x", "tags": ["a"]}


def test_all_problems_come_back_at_once_each_with_its_path():
    assert problems(
        {
            "limit": "10",
            "order": "date",
            "range": {"start": 1.5},
            "tags": ["a", 2, 3],
            "colour": "red",
        }
    ) == {
        "query": "Required field is missing",
        "limit": "Expected type integer, got string '10'",
        "order": "order must be one of: name, size, 3, got string 'date'",
        "range.start": "Expected type integer, got number 1.5",
        "range.end": "Required field is missing",
        "tags.1": "Expected type string, got integer 2",
        "tags.2": "Expected type string, got integer 3",
        "colour": "Unknown field; expected one of: query, limit, order, range, tags",
    }


def test_every_missing_field_is_named_once():
    schema = {"type": "object", "required": ["a", "b", "c"]}

    assert problems({"b": 1}, schema) == dict.fromkeys("ac", "Required field is missing")


def test_several_problems_at_one_place_are_told_together():
    schema = {"type": "object", "properties": {"n": {"minimum": 3, "multipleOf": 2}}}

    assert problems({"n": 1}, schema) == {
        "n": "Expected minimum 3, got integer 1; Expected multipleOf 2, got integer 1"
    }


def test_a_long_value_is_not_repeated_in_full():
    long = "x" * 100_000

    assert len(json.dumps(problems({"query": long, "limit": long, "order": long}))) < 1000


def test_fields_that_match_a_pattern_are_known():
    schema = {
        "type": "object",
        "properties": {"a": {}},
        "patternProperties": {"^x-": {"type": "string"}},
        "additionalProperties": False,
    }

    assert run({"a": 1, "x-1": "one"}, schema).success
    assert problems({"x-1": 1, "b": 2}, schema) == {
        "x-1": "Expected type string, got integer 1",
        "b": "Unknown field; expected one of: a",
    }


def test_a_schema_without_fields_takes_none():
    schema = {"type": "object", "additionalProperties": False}

    assert run({}, schema).value == {}
    assert problems({"a": 1}, schema) == {"a": "Unknown field; no fields are expected"}


def test_additional_fields_have_the_type_the_schema_gives_them():
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}

    assert run({"a": 1}, schema).success
    assert problems({"a": "1"}, schema) == {"a": "Expected type integer, got string '1'"}


def test_a_choice_of_schemas_is_explained_by_what_fits_best():
    named = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    one_of = {"oneOf": [{"type": "integer", "minimum": 0}, named]}
    schema = {
        "type": "object",
        "properties": {
            "who": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "what": one_of,
            "where": one_of,
            "when": one_of,
        },
    }

    assert problems({"who": 3, "what": {"name": 4}, "where": -1, "when": "now"}, schema) == {
        "who": "Expected type string or null, got integer 3",
        "what.name": "Expected type string, got integer 4",
        "where": "Expected minimum 0, got integer -1",
        "when": "Expected type integer or object, got string 'now'",
    }


def test_a_value_that_no_schema_allows_is_shown():
    schema = {"type": "object", "properties": {"never": False}}

    assert problems({"never": 1}, schema) == {"arguments": "Not allowed, got integer 1"}


@pytest.mark.parametrize("arguments", ["{", b"\xff", "[1]", "3", [1], 7, {"query": object()}])
def test_arguments_that_are_no_json_object_are_explained(arguments: object):
    assert problems(arguments).keys() == {"arguments"}


@pytest.mark.parametrize("arguments", ['{"limit": NaN, "query": "x"}', {"limit": float("inf")}])
def test_numbers_that_json_does_not_know_are_refused(arguments: object):
    assert "is not a JSON number" in problems(arguments)["arguments"]


def test_true_is_not_an_integer():
    assert problems({"query": "x", "limit": True}) == {
        "limit": "Expected type integer, got boolean true"
    }


def test_references_within_the_schema_are_followed():
    schema = {
        "type": "object",
        "properties": {"node": {"$ref": "#/$defs/node"}},
        "$defs": {
            "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}},
        },
    }

    assert run({"node": {"next": {"next": {}}}}, schema).success
    assert problems({"node": {"next": {"next": 1}}}, schema) == {
        "node.next.next": "Expected type object, got integer 1"
    }


def test_a_remote_reference_is_never_fetched(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> Any:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    schema = {"type": "object", "properties": {"a": {"$ref": "https://example.invalid/a.json"}}}

    assert "https://example.invalid/a.json" in problems({"a": 1}, schema)["arguments"]


# Schemas that would take forever


def doubling(keyword: str, **leaf: Any) -> dict[str, Any]:
    """Return a small schema with two to the power of thirty branches."""
    twice = {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
    return {"type": "object", "$ref": "#/$defs/d0", "$defs": {**twice, "d30": leaf}}


def elsewhere(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose parts name another dialect each."""
    named = {"$schema": "https://json-schema.org/draft/2019-09/schema"}
    return {**schema, "$defs": {name: named | each for name, each in schema["$defs"].items()}}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        (doubling("allOf"), {}),
        (doubling("anyOf", required=["a"]), {}),
        (doubling("oneOf", required=["a"]), {}),
        (doubling("allOf") | {"unevaluatedProperties": False}, {"a": 1}),
        (elsewhere(doubling("allOf")), {}),
        ({"type": "object", "$ref": "#"}, {}),
        ({"type": "object", "allOf": [{"$ref": "#"}, {"$ref": "#"}]}, {}),
        ({"type": "object", "$dynamicAnchor": "n", "not": {"$dynamicRef": "#n"}}, {}),
        (
            {"type": "object", "properties": {"a": {"pattern": "^(a{300}){300}$"}}},
            {"a": "a" * 1_000_000},
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"items": {"enum": [[n] for n in range(9000)]}}},
            },
            {"a": [[-1]] * 5000},
        ),
        (
            {
                "type": "object",
                "$defs": {f"d{n}": {"$anchor": f"a{n}"} for n in range(1500)},
                "properties": {"a": {"items": {"$ref": "#a7"}}},
            },
            {"a": [1] * 20_000},
        ),
    ],
)
def test_a_schema_that_takes_forever_to_check_fails_the_call_instead(
    schema: dict[str, Any], arguments: dict[str, Any]
):
    assert problems(arguments, schema)["arguments"].startswith("Cannot be checked: ")


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"pattern": "^(a+)+$"}}},
        {"properties": {"a": {"anyOf": [{"pattern": "^(a|a)*$"}, {"type": "null"}]}}},
        {"properties": {"default": {"pattern": "never"}, "a": {"pattern": "^(a|aa)+$"}}},
    ],
)
def test_patterns_that_explode_elsewhere_just_do_not_match(schema: dict[str, Any]):
    found = problems({"a": "a" * 5000 + "!"}, {"type": "object", **schema})

    assert found["a"].startswith("Expected pattern")


@pytest.mark.parametrize("last", [False, {"type": "integer"}])
def test_patterns_of_names_are_matched_in_linear_time_too(last: Any):
    schema = {
        "type": "object",
        "patternProperties": {"^(a+)+$": {"type": "string"}},
        "additionalProperties": last,
    }
    name = "a" * 5000

    assert run({name: "x"}, schema).success
    assert problems({f"{name}!": "x"}, schema)
    assert problems({name: 1}, schema)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a": {"pattern": "(?=a)"}}}, "look-around.* linear time"),
        ({"properties": {"a": {"pattern": "(a)\\1"}}}, "linear time"),
        ({"patternProperties": {"(?<!a)b": {}}}, "linear time"),
        ({"properties": {"a": {"pattern": "(a{1000}){1000}"}}}, "repeats too much"),
        ({"properties": {"a": {"pattern": "x" * 3000}}}, "at most 2000"),
        ({"patternProperties": {"a": {}}, "unevaluatedProperties": False}, "cannot be checked"),
        ({"description": "x" * 300_000}, "at most 262,144"),
        ({"properties": {f"p{n}": {"allOf": [{}] * 20} for n in range(900)}}, "200,000 steps"),
    ],
)
def test_a_schema_that_cannot_be_checked_in_time_is_refused_where_the_tool_is_made(
    schema: Any, problem: str
):
    with pytest.raises(ToolDefinitionError, match=problem):
        raw({"type": "object", **schema})


@pytest.mark.parametrize("depth", [120, 100_000])
def test_a_schema_that_is_nested_too_deeply_is_refused(depth: int):
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}

    with pytest.raises(ToolDefinitionError, match=r"nested|depth"):
        raw({"type": "object", "properties": {"a": schema}})


def test_many_items_are_compared_in_linear_time_and_as_json():
    schema = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    many = [{"n": n} for n in range(20_000)]

    assert run({"a": many}, schema).success
    assert problems({"a": [*many, {"n": 7.0}]}, schema).keys() == {"a"}
    assert run({"a": [1, True, "1", [1], {"1": 1}]}, schema).success


def test_what_many_problems_say_stays_short():
    schema = {
        "type": "object",
        "properties": {"a": {"items": {"enum": ["x" * 50] * 500 + ["y"]}}},
    }
    found = problems({"a": list(range(1000))}, schema)

    assert len(found) == 101
    assert found["arguments"] == "These are 100 of 1000 problems"
    assert all(len(text) <= 1000 for text in found.values())


def test_the_draft_that_a_schema_names_is_the_one_that_counts():
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 3, "exclusiveMinimum": True}},
    }

    assert problems({"n": 3}, schema).keys() == {"n"}


def test_the_schema_is_shown_as_given():
    assert raw().parameters == SEARCH
    assert raw().definition()["parameters"] == SEARCH


def test_the_schema_cannot_be_changed_from_outside():
    schema = json.loads(json.dumps(SEARCH))
    tool = raw(schema)

    schema["properties"]["query"]["type"] = "integer"
    schema["required"].clear()
    tool.parameters["required"].clear()
    tool.definition()["parameters"]["properties"].clear()

    assert tool.parameters == SEARCH
    assert not tool({}, context=make_context()).success
    assert tool({"query": "x"}, context=make_context()).success


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("text", "expected a JSON schema as a dict"),
        ({"type": "string"}, "expected an object schema, got type 'string'"),
        ({"properties": {}}, "expected an object schema, got type None"),
        ([], "expected an object schema"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, r"at properties\.a\.type"),
        ({"type": "object", "required": "a"}, "not a valid JSON schema, at required"),
        ({"type": "object", "default": object()}, "tool 'search' must have a valid"),
        ({"type": "object", "default": float("nan")}, "tool 'search' must have a valid"),
    ],
)
def test_a_schema_that_is_none_is_refused_where_the_tool_is_made(schema: Any, problem: str):
    with pytest.raises(ToolDefinitionError, match=problem):
        raw(schema)


def test_a_description_of_any_length_is_fine():
    tool = Tool.from_schema("search", "x" * 5000, SEARCH, echo)

    assert len(tool.description) == 5000


def test_options_are_those_of_every_tool():
    tool = raw(reach="read", timeout=3.0)

    assert (tool.reach, tool.timeout) == ("read", 3.0)
    assert tool.replace(description="Look.")({"query": "x"}, context=make_context()).success


def test_examples_are_checked_by_the_schema():
    example = ToolExample(description="One", input={"query": "x"}, output={"query": "x"})
    wrong = ToolExample(description="None", input={"limit": 1}, output=None)

    assert raw(examples=[example]).definition()["examples"][0]["input"] == {"query": "x"}
    with pytest.raises(ToolDefinitionError, match="Required field is missing"):
        raw(examples=[wrong])


def test_an_async_handler_is_awaited():
    async def later(params: dict[str, Any], *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(params["query"])

    assert Tool.from_schema("later", "Later.", SEARCH, later)({"query": "x"}).value == "x"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.sampled_from([*SEARCH["properties"], "other"]), JSON))
def test_whatever_comes_the_answer_is_a_result_and_valid_arguments_come_through(
    arguments: dict[str, Any],
):
    """A handler runs only with arguments that the schema allows, and gets them as they are."""
    result = run(arguments)

    if result.success:
        assert result.value == arguments
        assert isinstance(arguments["query"], str)
    else:
        assert json.loads(result.message)["details"]


def test_a_tool_needs_a_schema():
    """The Protocol: "Tool must have parameters schema"."""
    with pytest.raises(ToolDefinitionError, match="must have a valid parameters schema"):
        raw(None)


# Defaults

WRITE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "encoding": {"type": "string", "enum": ["utf-8", "ascii"], "default": "utf-8"},
        "overwrite": {"type": "boolean", "default": False},
        "tags": {"type": "array", "items": {"type": "string"}, "default": []},
        "options": {
            "type": "object",
            "properties": {"mode": {"type": "integer", "default": 420}},
        },
        "steps": {
            "type": "array",
            "items": {"type": "object", "properties": {"wait": {"type": "number", "default": 0}}},
        },
    },
    "required": ["path"],
}


def test_defaults_of_the_schema_are_what_the_handler_gets():
    assert run({"path": "a"}, WRITE).value == {
        "path": "a",
        "encoding": "utf-8",
        "overwrite": False,
        "tags": [],
    }
    given = {"path": "a", "encoding": "ascii", "overwrite": True, "tags": ["x"]}
    assert run(given, WRITE).value == given


def test_defaults_reach_into_objects_and_lists_that_are_given():
    value = run({"path": "a", "options": {}, "steps": [{}, {"wait": 2}]}, WRITE).value

    assert value["options"] == {"mode": 420}
    assert value["steps"] == [{"wait": 0}, {"wait": 2}]


def test_every_call_gets_defaults_of_its_own():
    def spoil(params: dict[str, Any], *, context: ToolContext) -> ToolResult[Any]:
        params["tags"].append("spoiled")
        return ToolResult.ok(len(params["tags"]))

    tool = Tool.from_schema("spoil", "Spoil.", WRITE, spoil)

    assert [tool({"path": "a"}).value for _ in range(2)] == [1, 1]


def test_a_required_field_is_missing_although_it_has_a_default():
    schema = {"type": "object", "properties": {"a": {"default": 1}}, "required": ["a"]}

    assert problems({}, schema) == {"a": "Required field is missing"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "default": None}}},
        {
            "type": "object",
            "properties": {"a": {"default": 1}, "b": {"default": 2}},
            "maxProperties": 1,
        },
    ],
)
def test_a_default_that_would_not_fit_is_left_out(schema):
    arguments = {"b": 3} if "b" in schema["properties"] else {}

    assert run(arguments, schema).value == arguments
