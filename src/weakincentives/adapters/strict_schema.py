"""JSON schemas as providers take them in strict mode, and what a model wrote to fit them.

In strict mode a model cannot write anything that does not fit. For that every property is required:
one that was optional may be null instead, which is read back as left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, cast

__all__ = ["strict_schema", "without_nulls"]

Node: TypeAlias = Mapping[str, Any]

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

    __slots__ = ("left", "schema")

    def __init__(self, schema: Node) -> None:
        self.schema = schema
        self.left = 10_000

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
        return _read(root.target(node["$ref"]), cast("object", value), root)
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
    from weakincentives.serde.bounded_schema import BoundedSchema

    branches = [each for each in branches if each != _NULL]
    for branch in branches:
        read = _read(branch, value, root)
        if len(branches) == 1:
            return read
        whole = {"$defs": root.schema.get("$defs", {}), **cast("Node", branch)}
        with suppress(ValueError):  # it cannot be checked, so that it does not fit
            if not any(BoundedSchema(whole).errors(read)):
                return read
    return value


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
    if value is None:
        return []
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
