"""What a model is to write as JSON: the arguments of tools, and the final answer.

Where the provider takes it, the schema goes out in strict mode: a model cannot write anything that
does not fit. For that every property is required: one that was optional may be null instead, which
is read back as left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar, cast

from weakincentives.budget import TokenUsage
from weakincentives.call import ToolCall
from weakincentives.prompt import Tool
from weakincentives.prompt.structured_output import output_instructions, output_schema
from weakincentives.runtime.conversation import ModelRequest
from weakincentives.serde import dump
from weakincentives.serde.bounded_schema import BoundedSchema

T = TypeVar("T")
Node: TypeAlias = Mapping[str, Any]

OutputForm: TypeAlias = Literal["schema", "text"]
"""How a structured answer is asked for: by a schema, or in words."""

_NOT_JSON = "not_json"
"""The key under which a model gets back what it wrote as arguments and was no JSON."""

_MAX_DESCRIPTION = 1024
"""Characters that OpenAI takes in the description of a function."""


@dataclass(frozen=True, slots=True)
class Form:
    """A JSON object that a model is to write, as it is asked for and as it is read back."""

    name: str
    description: str
    schema: Mapping[str, Any]
    """As it goes out; not to be changed."""
    is_strict: bool
    declared: Mapping[str, Any]
    """The schema that what the model wrote must fit in the end."""

    def read(self, text: str) -> object:
        """Return the object that a model wrote, or its text where that is none."""
        found = _json_object(text)
        return text if found is None else self._as_declared(found)

    def read_text(self, text: str) -> str:
        """Return an answer as text, without what only strict mode asks for."""
        found = _json_object(text) if self.is_strict else None
        if found is None:
            return text
        read = self._as_declared(found)
        return text if read == found else json.dumps(read, ensure_ascii=False)

    def _as_declared(self, value: dict[str, Any]) -> dict[str, Any]:
        return without_nulls(self.declared, value) if self.is_strict else value


@dataclass(frozen=True, slots=True)
class Forms:
    """All that a model may write in one turn, and how it is read."""

    request: ModelRequest
    tools: Mapping[str, Form]
    """By name, without those that the provider runs."""
    answer: Form | None
    """The final answer; None for plain text, and where it is asked for in words."""
    system: str
    """The prompt, with the form of the answer where it is asked for in words."""

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
        """Return a call as the model made it; one without an id gets its own from the runtime."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        read = self.tools.get(name, _ANYTHING).read(text)
        return ToolCall(name, read, id or "")

    def final_text(self, text: str) -> str:
        return text if self.answer is None else self.answer.read_text(text)


def arguments_of(call: ToolCall) -> str:
    """Return the arguments of a call as it goes back to the model.

    Most servers take nothing but an object there, also where the model wrote something else.
    """
    params = call.params
    if isinstance(params, str):
        found = _json_object(params)
        params = {_NOT_JSON: params} if found is None else found
    return json.dumps(dump(params), ensure_ascii=False)


def tokens(read: int | None, written: int | None) -> TokenUsage:
    """Return what a turn cost; a server may not say, or say nonsense."""
    return TokenUsage(input_tokens=max(0, read or 0), output_tokens=max(0, written or 0))


def in_whole_characters(data: T) -> T:
    """Return data that can be written as UTF-8: half a character is replaced.

    A model can write one, and the name of a file can have one.
    """
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return _replaced(data)
    return data


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_replaced(each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {name: _replaced(each) for name, each in items}
    return value


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the object that a text is as JSON; no text at all is an empty one."""
    try:
        found: object = json.loads(text or "{}", parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_ANYTHING = Form("", "", {}, is_strict=False, declared={})
"""For a tool that was not offered."""


# The same tools and types come by in every turn.


@lru_cache(maxsize=1024)
def _tool_form(tool: Tool[Any, Any], strict: bool) -> Form:
    definition = tool.definition()
    text = definition["description"]
    for example in definition.get("examples", ()):
        shown = f"{text}\n\n{_example(example)}"
        if len(shown) <= _MAX_DESCRIPTION:
            text = shown
    schema = definition["parameters"]
    if len(text) > _MAX_DESCRIPTION:  # all of it stands with the parameters
        schema = {**schema, "description": text}
        text = f"{text[: _MAX_DESCRIPTION - 1]}…"
    return _form(tool.name, text, schema, strict)


def _example(example: Mapping[str, Any]) -> str:
    said = json.dumps(example["input"], ensure_ascii=False)
    return f"Example: {example['description']}\n{said}"


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
_KEPT = frozenset({"type", "enum", "const", "description", "minItems", "maxItems", *_NUMBERS})
_COMMENTS = ("title", "examples", "discriminator", "$schema", "$id", "$comment")
_ELSEWHERE = frozenset({"properties", "required", "additionalProperties", "default", *_COMMENTS})
"""Keywords that are said in another way, or that change nothing."""
_OPEN = frozenset({"allOf", "patternProperties", "unevaluatedProperties", "$dynamicRef"})
"""Keywords that add to what an object may hold."""
_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}


def strict_schema(schema: Node) -> dict[str, Any] | None:
    """Return the schema in the form that strict mode takes; None where that cannot be.

    What strict mode has no keyword for stands in the descriptions. An object with keys that are
    not known, or a value of any type, cannot be said at all.
    """
    try:
        made = _strict(schema, _Root(schema))
    except (_CannotBeStrict, RecursionError):
        return None
    return made if made.get("type") == "object" else None


class _CannotBeStrict(Exception):
    """The schema allows more than strict mode can say, or takes too long to read."""


class _Root:
    """The whole schema, in which references are looked up, so often and no more.

    References can double at each level: a small schema would take forever.
    """

    def __init__(self, schema: Node) -> None:
        self.schema = schema
        self.left = 10_000
        self.read: dict[tuple[str, int], Any] = {}
        """What was read, by the reference and the object that was read by it."""
        self._checks: dict[int, BoundedSchema] = {}

    def fits(self, branch: object, value: object) -> bool:
        """Whether a value fits a part of the schema."""
        try:
            check = self._checks.get(id(branch))
            if check is None:
                whole = {"$defs": self.schema.get("$defs", {}), **cast("Node", branch)}
                check = self._checks[id(branch)] = BoundedSchema(whole)
            return not any(check.errors(value))
        except ValueError as error:  # too much to check
            raise _CannotBeStrict(branch) from error

    def target(self, reference: str) -> Node:
        self.left -= 1
        if self.left < 0:
            raise _CannotBeStrict("too many references")
        if reference == "#":
            return self.schema
        name = reference.removeprefix(_DEFS)
        if name == reference or name not in self.schema.get("$defs", {}):
            raise _CannotBeStrict(reference)
        return self.schema["$defs"][name]


def _strict(node: object, root: _Root) -> dict[str, Any]:
    node = _plain(node)
    made: dict[str, Any] = {}
    notes: list[str] = []
    for keyword, value in node.items():
        if keyword in _KEPT or _is_kept(keyword, value):
            made[keyword] = value
        elif keyword == "$ref":
            root.target(value)
            made[keyword] = value
        elif keyword == "$defs":
            made[keyword] = {name: _strict(each, root) for name, each in value.items()}
        elif keyword == "anyOf":
            made[keyword] = [_strict(each, root) for each in value]
        elif keyword == "items":
            made[keyword] = _strict(value, root)
        elif keyword in _OPEN:
            raise _CannotBeStrict(keyword)
        elif keyword not in _ELSEWHERE:
            notes.append(f"{keyword}: {_json(value)}")
    if "prefixItems" in node:  # each item may be any of them; the order stands in the description
        made["items"] = _any_of([*node["prefixItems"], *_list(node.get("items"))], root)
    if "properties" in node or "object" in _list(node.get("type")):
        made |= _strict_object(node, root)
    if "type" not in made and ("enum" in made or "const" in made):
        made["type"] = _type_of(made.get("enum", [made.get("const")]))
    _check_is_closed(made)
    return _described(made, notes)


def _is_kept(keyword: str, value: Any) -> bool:
    if keyword == "pattern":
        return "(?" not in value  # no looking around
    return keyword == "format" and value in _FORMATS


def _plain(node: object) -> dict[str, Any]:
    """Return a node without the spellings that strict mode does not know."""
    if not isinstance(node, Mapping):  # `true` or `false`
        raise _CannotBeStrict(node)
    plain = dict(cast("Node", node))
    if "oneOf" in plain and "anyOf" not in plain:
        plain["anyOf"] = plain.pop("oneOf")
    if len(plain.get("allOf", ())) == 1:
        (only,) = plain.pop("allOf")
        plain = {**_plain(only), **plain}
    return plain


def _strict_object(node: Node, root: _Root) -> dict[str, Any]:
    if node.get("type") != "object" or node.get("additionalProperties") is not False:
        raise _CannotBeStrict(node)
    required = node.get("required", ())
    properties = cast("dict[str, Any]", node.get("properties", {}))
    unknown = [name for name in required if name not in properties]
    if unknown:
        raise _CannotBeStrict(unknown)
    return {
        "type": "object",
        "properties": {
            name: _property(each, root, is_required=name in required)
            for name, each in properties.items()
        },
        "required": list(properties),
        "additionalProperties": False,
    }


def _property(node: object, root: _Root, *, is_required: bool) -> dict[str, Any]:
    made = _strict(node, root)
    default = cast("Node", node).get("default")
    if is_required:
        return made
    if _takes_null(node, root):
        return made if default is None else _described(made, [f"default: {_json(default)}"])
    text = made.pop("description", None)
    made = {"anyOf": [*made.get("anyOf", [made]), _NULL]}
    if text is not None:
        made["description"] = text
    means = "null leaves it out" if default is None else f"null means {_json(default)}"
    return _described(made, [means])


def _any_of(nodes: Sequence[object], root: _Root) -> dict[str, Any]:
    different = {_json(node): node for node in nodes}.values()
    made = [_strict(node, root) for node in different]
    return made[0] if len(made) == 1 else {"anyOf": made}


def _check_is_closed(made: Node) -> None:
    said = [keyword for keyword in ("type", "anyOf", "$ref") if keyword in made]
    if len(said) != 1 or ("array" in _list(made.get("type")) and "items" not in made):
        raise _CannotBeStrict(made)


def _described(made: dict[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """Return the node with what it cannot say otherwise in its description."""
    text = made.get("description", "")
    if notes:
        said = "; ".join(notes)
        text = f"{text} ({said})" if text else said
    if not text:
        return made
    if "$ref" in made:  # nothing may stand beside it
        made = {"anyOf": [{"$ref": made["$ref"]}]}
    return {**made, "description": text}


def _type_of(values: Sequence[object]) -> str | list[str]:
    if any(type(value) not in _TYPES for value in values):
        raise _CannotBeStrict(values)
    types = list(dict.fromkeys(_TYPES[type(value)] for value in values))
    return types[0] if len(types) == 1 else types


# Reading back


def without_nulls(schema: Node, value: object) -> Any:
    """Return what a model wrote in strict mode, less every null that stands for "left out".

    Those are the nulls of optional properties that cannot be null by the schema itself.
    """
    try:
        return _read(schema, value, _Root(schema))
    except (_CannotBeStrict, RecursionError):
        return value  # for the parser to refuse


def _read(node: object, value: Any, root: _Root) -> Any:
    if not isinstance(value, dict | list):
        return value
    node = _plain(node)
    if "$ref" in node:
        key = (node["$ref"], id(cast("object", value)))
        if key not in root.read:
            root.read[key] = _read(root.target(key[0]), cast("object", value), root)
        return root.read[key]
    if "anyOf" in node:
        return _read_any_of(node["anyOf"], cast("object", value), root)
    if isinstance(value, list):
        return _read_list(node, cast("list[Any]", value), root)
    return _read_object(node, cast("dict[str, Any]", value), root)


def _read_list(node: Node, value: list[Any], root: _Root) -> list[Any]:
    first = node.get("prefixItems", ())
    rest = [node.get("items", {})] * (len(value) - len(first))
    return [_read(each, item, root) for each, item in zip([*first, *rest], value, strict=False)]


def _read_object(node: Node, value: dict[str, Any], root: _Root) -> dict[str, Any]:
    properties, required = node.get("properties", {}), node.get("required", ())
    return {
        name: _read(properties.get(name, {}), each, root)
        for name, each in value.items()
        if each is not None
        or name in required
        or name not in properties
        or _takes_null(properties[name], root)
    }


def _read_any_of(branches: Sequence[object], value: object, root: _Root) -> Any:
    """Read it by the branch that it then fits; what fits none is for the parser to refuse."""
    reads = [(each, _read(each, value, root)) for each in branches if each != _NULL]
    if all(read == reads[0][1] for _, read in reads):  # it does not matter which one fits
        return reads[0][1] if reads else value
    return next((read for branch, read in reads if root.fits(branch, read)), value)


# Both ways


def _takes_null(node: object, root: _Root) -> bool:
    node = _plain(node)
    if "$ref" in node:
        return _takes_null(root.target(node["$ref"]), root)
    if "anyOf" in node:
        return any(_takes_null(each, root) for each in node["anyOf"])
    if "type" in node:
        return "null" in _list(node["type"])
    return None in node.get("enum", [node.get("const")])


def _list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return cast("list[Any]", value)
    return [] if value is None else [value]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
