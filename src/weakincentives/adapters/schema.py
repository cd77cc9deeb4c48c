"""What a model writes as JSON: the arguments of tools, and the final answer.

In strict mode a model cannot write anything that does not fit the schema. Every property is then
required: an optional one may be null instead, and null is read back as left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar, cast

from weakincentives.core.call import ToolCall
from weakincentives.prompt import Tool
from weakincentives.prompt.structured_output import output_instructions, output_schema
from weakincentives.runtime.conversation import ModelRequest
from weakincentives.serde import dump
from weakincentives.serde.bounded_schema import BoundedSchema

T = TypeVar("T")
Node: TypeAlias = Mapping[str, Any]

OutputForm: TypeAlias = Literal["schema", "text"]
"""How a structured answer is asked for: by a schema, or in the prompt."""

_MAX_DESCRIPTION = 1024
"""Characters that OpenAI allows in the description of a function."""


@dataclass(frozen=True, slots=True)
class Form:
    """A JSON object that a model writes."""

    name: str
    description: str
    schema: Mapping[str, Any]
    """The schema that is sent."""
    is_strict: bool
    declared: Mapping[str, Any]
    """The schema of the tool or the output type."""

    def read(self, text: str) -> object:
        """Return the object that a text is as JSON, or the text where it is none."""
        found = json_object(text)
        if found is None:
            return text
        return without_nulls(self.declared, found) if self.is_strict else found


@dataclass(frozen=True, slots=True)
class Forms:
    """Everything a model may write in one turn."""

    request: ModelRequest
    tools: Mapping[str, Form]
    """By name, without those that the provider runs."""
    answer: Form | None
    """The final answer; None for plain text, and where the prompt asks for it."""
    system: str

    @classmethod
    def of(cls, request: ModelRequest, *, strict: bool, output: OutputForm) -> Forms:
        offered = [tool for tool in request.prompt.tools if tool.handler is not None]
        tools = {tool.name: _tool_form(tool, strict) for tool in offered}
        answer, system = None, request.prompt.text
        if request.output_type is not None and output == "schema":
            answer = _answer_form(request.output_type, strict)
        elif request.output_type is not None:
            system = f"{system}\n\n{output_instructions(request.output_type)}"
        return cls(request, tools, answer, system)

    def call(self, name: str, arguments: object, id: str | None) -> ToolCall:  # noqa: A002
        """Return a call as the model made it; the runtime gives an id to a call without one."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        return ToolCall(name, self.tools.get(name, _ANY_OBJECT).read(text), id or "")

    def final_text(self, text: str) -> str:
        """Return the answer without the nulls that only strict mode asks for."""
        if self.answer is None or not self.answer.is_strict:
            return text
        read = self.answer.read(text)
        is_unchanged = isinstance(read, str) or read == json_object(text)
        return text if is_unchanged else json.dumps(read, ensure_ascii=False)


def arguments_of(call: ToolCall) -> str:
    """Return the arguments of a call for a request; most servers only accept an object."""
    params = call.params
    if isinstance(params, str):
        found = json_object(params)
        params = {"not_json": params} if found is None else found
    return json.dumps(dump(params), ensure_ascii=False)


def replace_lone_surrogates(data: T) -> T:
    """Return JSON data that can be encoded as UTF-8; models and file names may not be."""
    text = json.dumps(data, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return data


def json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in a text, None if it is anything else; empty if the text is empty."""
    try:
        found: object = json.loads(text or "{}", parse_constant=_not_a_number)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _not_a_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_ANY_OBJECT = Form("", "", {}, is_strict=False, declared={})


# The same tools and types are sent in every turn.


@lru_cache(maxsize=1024)
def _tool_form(tool: Tool[Any, Any], strict: bool) -> Form:
    text, schema = tool.text(_MAX_DESCRIPTION), tool.parameters
    if len(text) > _MAX_DESCRIPTION:
        schema = {**schema, "description": text}
        text = f"{text[: _MAX_DESCRIPTION - 1]}…"
    return _form(tool.name, text, schema, strict)


@lru_cache(maxsize=256)
def _answer_form(output_type: Any, strict: bool) -> Form:
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", getattr(output_type, "__name__", "answer"))[:64]
    return _form(name, "", output_schema(output_type), strict)


def _form(name: str, description: str, schema: Mapping[str, Any], strict: bool) -> Form:
    made = strict_schema(schema) if strict else None
    return Form(name, description, schema if made is None else made, made is not None, schema)


# Strict mode

_NULL: Node = {"type": "null"}
_DEFS = "#/$defs/"
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SAME = {"type", "enum", "const", "description", "minItems", "maxItems", "$ref", *_NUMBERS}
"""Keywords that strict mode knows."""
_OBJECT = ("properties", "required", "additionalProperties", "default")
_COMMENTS = ("title", "examples", "discriminator", "$schema", "$id", "$comment")
_HANDLED = {"anyOf", "items", "$defs", *_OBJECT, *_COMMENTS}
"""Keywords that are converted, or that constrain nothing; the others become a description."""
_OPEN = {"allOf", "patternProperties", "unevaluatedProperties", "$dynamicRef"}
"""Keywords that add to what an object may hold."""
_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}


class _NotStrict(Exception):
    """The schema allows more than strict mode can express, or costs too much to read."""


class _Root:
    """The whole schema, in which references are looked up a limited number of times.

    References can double at each level: a small schema would take forever.
    """

    def __init__(self, schema: Node) -> None:
        self.schema = schema
        self._lookups_left = 10_000
        self._checks: dict[int, BoundedSchema] = {}

    def target(self, reference: str) -> Node:
        self._lookups_left -= 1
        if self._lookups_left < 0:
            raise _NotStrict("too many references")
        if reference == "#":
            return self.schema
        name = reference.removeprefix(_DEFS)
        if name == reference or name not in self.schema.get("$defs", {}):
            raise _NotStrict(reference)
        return self.schema["$defs"][name]

    def accepts(self, branch: object, value: object) -> bool:
        try:
            if id(branch) not in self._checks:
                whole = {"$defs": self.schema.get("$defs", {}), **cast("Node", branch)}
                self._checks[id(branch)] = BoundedSchema(whole)
            return not any(self._checks[id(branch)].errors(value))
        except ValueError as error:  # too expensive to check
            raise _NotStrict(branch) from error

    def takes_null(self, node: object) -> bool:
        node = _plain(node)
        if "$ref" in node:
            return self.takes_null(self.target(node["$ref"]))
        if "anyOf" in node:
            return any(map(self.takes_null, node["anyOf"]))
        if "type" in node:
            return "null" in _list(node["type"])
        return None in node.get("enum", [node.get("const")])


def strict_schema(schema: Node) -> dict[str, Any] | None:
    """Return the schema in strict form; None where strict mode cannot express it.

    Keywords that strict mode does not have go into the descriptions. An object with unknown keys,
    or a value of any type, cannot be expressed.
    """
    try:
        made = _strict(schema, _Root(schema))
    except (_NotStrict, RecursionError):
        return None
    return made if made.get("type") == "object" else None


def _strict(node: object, root: _Root) -> dict[str, Any]:
    node = _plain(node)
    if _OPEN & node.keys():
        raise _NotStrict(node)
    made = {name: value for name, value in node.items() if _is_known(name, value)}
    notes = [
        f"{name}: {_json(value)}"
        for name, value in node.items()
        if name not in made and name not in _HANDLED
    ]
    if "$ref" in node:
        root.target(node["$ref"])
    if "$defs" in node:
        made["$defs"] = {name: _strict(each, root) for name, each in node["$defs"].items()}
    if "anyOf" in node:
        made["anyOf"] = [_strict(each, root) for each in node["anyOf"]]
    if "prefixItems" in node:  # any of them at each place; the order is in the description
        items = [*node["prefixItems"], *_list(node.get("items"))]
        different = {_json(each): _strict(each, root) for each in items}
        made["items"] = {"anyOf": list(different.values())}
    elif "items" in node:
        made["items"] = _strict(node["items"], root)
    if "properties" in node or "object" in _list(node.get("type")):
        made |= _strict_object(node, root)
    if "type" not in made and ("enum" in made or "const" in made):
        made["type"] = _type_of(made.get("enum", [made.get("const")]))
    is_typed = len({"type", "anyOf", "$ref"} & made.keys()) == 1
    if not is_typed or ("array" in _list(made.get("type")) and "items" not in made):
        raise _NotStrict(node)
    return _described(made, notes)


def _is_known(keyword: str, value: Any) -> bool:
    if keyword == "pattern":
        return "(?" not in value  # no lookaround
    return keyword in _SAME or (keyword == "format" and value in _FORMATS)


def _plain(node: object) -> dict[str, Any]:
    """Return a node without the spellings that strict mode does not know."""
    if not isinstance(node, Mapping):  # `true` or `false`
        raise _NotStrict(node)
    plain = dict(cast("Node", node))
    if "oneOf" in plain and "anyOf" not in plain:
        plain["anyOf"] = plain.pop("oneOf")
    if len(plain.get("allOf", ())) == 1:
        (only,) = plain.pop("allOf")
        plain = {**_plain(only), **plain}
    return plain


def _strict_object(node: Node, root: _Root) -> dict[str, Any]:
    properties = cast("dict[str, Any]", node.get("properties", {}))
    required = set(node.get("required", ()))
    is_closed = node.get("type") == "object" and node.get("additionalProperties") is False
    if not is_closed or not required <= properties.keys():
        raise _NotStrict(node)
    return {
        "type": "object",
        "properties": {
            name: _strict(each, root) if name in required else _optional(each, root)
            for name, each in properties.items()
        },
        "required": list(properties),
        "additionalProperties": False,
    }


def _optional(node: object, root: _Root) -> dict[str, Any]:
    made = _strict(node, root)
    default = cast("Node", node).get("default")
    if root.takes_null(node):
        return made if default is None else _described(made, [f"default: {_json(default)}"])
    text = made.pop("description", "")
    made = {"anyOf": [*made.get("anyOf", [made]), _NULL], "description": text}
    means = "null leaves it out" if default is None else f"null means {_json(default)}"
    return _described(made, [means])


def _described(made: dict[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """Return the node with notes in its description."""
    text, note = made.get("description", ""), "; ".join(notes)
    text = f"{text} ({note})" if text and note else text or note
    if not text:
        return made
    if "$ref" in made:  # it must be the only keyword
        made = {"anyOf": [{"$ref": made["$ref"]}]}
    return {**made, "description": text}


def _type_of(values: Sequence[object]) -> str | list[str]:
    if any(type(value) not in _TYPES for value in values):
        raise _NotStrict(values)
    types = list(dict.fromkeys(_TYPES[type(value)] for value in values))
    return types[0] if len(types) == 1 else types


def without_nulls(schema: Node, value: object) -> Any:
    """Return what a model wrote in strict mode without each null that means "left out".

    Those are the nulls of optional properties that cannot be null by the schema itself.
    """
    try:
        return _read(schema, value, _Root(schema))
    except (_NotStrict, RecursionError):
        return value  # the parser refuses it


def _read(node: object, value: Any, root: _Root) -> Any:
    if not isinstance(value, dict | list):
        return value
    node = _plain(node)
    if "$ref" in node:
        return _read(root.target(node["$ref"]), cast("object", value), root)
    if "anyOf" in node:
        return _read_any_of(node["anyOf"], cast("object", value), root)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        first = node.get("prefixItems", ())
        nodes = [*first, *[node.get("items", {})] * (len(items) - len(first))]
        return [_read(each, item, root) for each, item in zip(nodes, items, strict=False)]
    properties, required = node.get("properties", {}), node.get("required", ())
    return {
        name: _read(properties.get(name, {}), each, root)
        for name, each in cast("dict[str, Any]", value).items()
        if each is not None
        or name in required
        or name not in properties
        or root.takes_null(properties[name])
    }


def _read_any_of(branches: Sequence[object], value: object, root: _Root) -> Any:
    """Read a value by the branch that then accepts it; the parser refuses one that none does."""
    reads = [(each, _read(each, value, root)) for each in branches if each != _NULL]
    if all(read == reads[0][1] for _, read in reads):
        return reads[0][1] if reads else value
    return next((read for branch, read in reads if root.accepts(branch, read)), value)


def _list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return cast("list[Any]", value)
    return [] if value is None else [value]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
