from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire import strict_problems

from weakincentives.adapters.schema import strict_schema, without_nulls
from weakincentives.serde import dump, parse, schema


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Leaf:
    """A leaf."""

    size: int
    name: str = "leaf"


@dataclass(frozen=True)
class Flower:
    kind: Literal["flower"]
    petals: int = 5


@dataclass(frozen=True)
class Tree:
    leaf: Annotated[Leaf, "The first one."]
    leaves: tuple[Leaf, ...] = ()
    parent: Tree | None = None
    part: Leaf | Flower | None = None
    pair: tuple[int, Leaf] = (1, Leaf(1))
    colour: Colour = Colour.RED
    either: Leaf | Flower = Leaf(2)
    day: dt.date | None = None
    raw: bytes = b""
    mixed: Literal["a", 1] = "a"
    height: float = 1.5
    made: str = field(default_factory=lambda: "now")


# Values of all kinds, with fields that may be left out


leaves = st.builds(Leaf, st.integers(), st.text())
flowers = st.builds(Flower, st.just("flower"), st.integers())
VALUES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, st.integers()),
    (str, st.text()),
    (bool, st.booleans()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (int | None, st.none() | st.integers()),
    (Colour, st.sampled_from(Colour)),
    (Literal["a", "b"], st.sampled_from(["a", "b"])),
    (Leaf, leaves),
    (Leaf | None, st.none() | leaves),
    (Leaf | Flower, leaves | flowers),
    (tuple[Leaf, ...], st.lists(leaves, max_size=3).map(tuple)),
    (tuple[int, Leaf], st.tuples(st.integers(), leaves)),
    (list[Leaf | Flower | None], st.lists(st.none() | leaves | flowers, max_size=3)),
    (dt.date, st.dates()),
    (bytes, st.binary()),
]


@st.composite
def written(draw: st.DrawFn) -> tuple[type, Any, Any]:
    """Draw a dataclass, a value of it, and what a model in strict mode writes for that value."""
    kinds = draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=5))
    names = [f"f{n}" for n in range(len(kinds))]
    required = draw(st.integers(0, len(kinds)))
    fields: list[Any] = []
    for n, (name, (kind, values)) in enumerate(zip(names, kinds, strict=True)):
        if n < required:
            fields.append((name, kind))
        else:
            default = draw(values)
            fields.append((name, kind, field(default_factory=lambda default=default: default)))
    cls = make_dataclass("Made", fields, frozen=True)
    value = cls(**{name: draw(values) for name, (_, values) in zip(names, kinds, strict=True)})
    return cls, value, _as_written(draw, value)


def _as_written(draw: st.DrawFn, value: Any) -> Any:
    """Write a value with every key, and null for some of those that have their default."""
    if isinstance(value, tuple | list):
        return [_as_written(draw, each) for each in value]
    if not dataclasses.is_dataclass(value):
        return dump(value)
    found: dict[str, Any] = {}
    for each in dataclasses.fields(value):
        item = getattr(value, each.name)
        default = each.default
        if each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        # A null of a field that may be None is that None.
        left_out = default == item and type(default) is type(item) and draw(st.booleans())
        may_be_none = "None" in str(each.type)
        found[each.name] = None if left_out and not may_be_none else _as_written(draw, item)
    return found


@given(written())
def test_what_a_strict_model_writes_is_read_back_as_the_value(made: tuple[type, Any, Any]):
    cls, value, data = made
    declared = schema(cls)
    strict = strict_schema(declared)

    assert strict is not None
    assert list(strict_problems(strict)) == []
    jsonschema.Draft202012Validator(strict).validate(data)
    assert parse(cls, without_nulls(declared, data)) == value


@given(written())
def test_what_leaves_nothing_out_is_not_changed(made: tuple[type, Any, Any]):
    cls, value, _ = made

    assert without_nulls(schema(cls), dump(value)) == dump(value)


def test_a_type_with_everything_fits_strict_mode():
    declared = schema(Tree)
    strict = strict_schema(declared)

    assert strict is not None
    assert list(strict_problems(strict)) == []
    json.dumps(strict)


def test_what_strict_mode_cannot_say_stands_in_the_description():
    shown = strict_schema(schema(Tree))
    assert shown is not None
    properties = shown["properties"]

    assert properties["leaf"] == {
        "anyOf": [{"$ref": "#/$defs/Leaf"}],
        "description": "The first one.",
    }
    assert properties["height"] == {
        "anyOf": [{"type": "number"}, {"type": "null"}],
        "description": "null means 1.5",
    }
    assert properties["made"]["description"] == "null leaves it out"
    assert properties["pair"]["description"].startswith("prefixItems: ")
    assert properties["raw"]["description"].startswith("format: ")


CLOSED = {"type": "object", "additionalProperties": False}


def obj(**properties: Any) -> dict[str, Any]:
    return {**CLOSED, "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("node", "strict"),
    [
        ({"type": "string", "minLength": 2}, {"type": "string", "description": "minLength: 2"}),
        ({"type": "string", "format": "uri"}, {"type": "string", "description": 'format: "uri"'}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        ({"type": "string", "pattern": "a+"}, {"type": "string", "pattern": "a+"}),
        (
            {"type": "string", "pattern": "(?=a)"},
            {"type": "string", "description": 'pattern: "(?=a)"'},
        ),
        (
            {"oneOf": [{"type": "integer"}, {"type": "string"}]},
            {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        ),
        ({"allOf": [{"type": "integer"}], "title": "N"}, {"type": "integer"}),
        ({"enum": ["a", 1, None]}, {"enum": ["a", 1, None], "type": ["string", "integer", "null"]}),
        ({"const": True}, {"const": True, "type": "boolean"}),
        ({"type": ["integer", "null"]}, {"type": ["integer", "null"]}),
        (
            {"type": "integer", "not": {"const": 3}},
            {"type": "integer", "description": 'not: {"const": 3}'},
        ),
    ],
)
def test_a_schema_of_any_origin_is_said_in_strict_mode(node: Any, strict: Any):
    assert strict_schema(obj(a=node)) == obj(a=strict)


@pytest.mark.parametrize(
    "node",
    [
        {},
        True,
        {"type": "object"},
        {"type": "object", "properties": {"b": {"type": "string"}}},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {**CLOSED, "patternProperties": {"^x": {"type": "string"}}},
        {**CLOSED, "properties": {}, "required": ["b"]},
        {"type": "array"},
        {"type": "array", "items": {}},
        {"allOf": [{"type": "integer"}, {"minimum": 1}]},
        {"$ref": "#/definitions/b"},
        {"$ref": "#/$defs/missing"},
        {"type": ["object", "null"], "additionalProperties": False},
        {"enum": [[1]]},
    ],
)
def test_what_allows_anything_cannot_be_strict(node: Any):
    assert strict_schema(obj(a=node)) is None


def test_a_schema_that_leads_to_itself_is_left_alone():
    endless = {"$ref": "#/$defs/a"}

    assert strict_schema({**obj(), "properties": {"a": endless}, "$defs": {"a": endless}}) is None


def test_nulls_are_dropped_by_the_branch_that_then_fits():
    declared = schema(Tree)
    data = {"leaf": {"size": 1, "name": None}, "either": {"kind": "flower", "petals": None}}

    read = without_nulls(declared, data)

    assert read == {"leaf": {"size": 1}, "either": {"kind": "flower"}}
    assert parse(Tree, read).either == Flower("flower")


def test_what_fits_nothing_is_left_for_the_parser_to_refuse():
    data = {"leaf": None, "either": {"kind": "tree"}, "colour": 3, "more": None}

    assert without_nulls(schema(Tree), data) == data


def test_a_schema_whose_references_double_is_not_made_strict():
    """Neither made nor read back: both would take forever."""
    twice = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]}
        for n in range(30)
    }
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d0"}},
        "additionalProperties": False,
        "$defs": {**twice, "d30": {"type": "array", "items": {"type": "string"}}},
    }

    assert strict_schema(schema) is None
    assert without_nulls(schema, {"a": [1]}) == {"a": [1]}


def test_a_pattern_that_explodes_is_no_trouble_when_an_answer_is_read():
    texts = {"type": "array", "items": {"type": "string", "pattern": "^(a+)+$"}}
    numbers = {"type": "array", "items": {"type": "integer"}}
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [texts, numbers]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    value = {"a": ["a" * 5000 + "!"]}

    assert without_nulls(schema, value) == value
