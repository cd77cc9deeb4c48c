"""Which of a composed tool's arguments each of its members gets, and the schema of them all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

from weakincentives.errors import ToolDefinitionError
from weakincentives.prompt.tool import Tool
from weakincentives.serde import dump

__all__ = ["as_dict", "check_given", "given_to", "named_by", "union_of"]

AnyTool = Tool[Any, Any]
Schema = dict[str, Any]

_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
_REMARKS = ("description", "title", "default", "examples")
"""What a schema says besides what fits it."""
_REFERENCE = "#/$defs/"

_names: WeakKeyDictionary[AnyTool, frozenset[str]] = WeakKeyDictionary()


def as_dict(params: object) -> dict[str, Any]:
    """Return parameters as the arguments they were made from."""
    return {} if params is None else cast("dict[str, Any]", dump(params))


def named_by(tool: AnyTool, arguments: object) -> dict[str, Any]:
    """Return those of the arguments that a tool's parameters name."""
    names = _names.get(tool)
    if names is None:
        names = _names[tool] = frozenset(_properties(tool))
    return {name: value for name, value in as_dict(arguments).items() if name in names}


def given_to(key: str, by_key: Mapping[str, AnyTool], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a parallel member's arguments; those of a tool that comes twice are under its key."""
    tool = by_key[key]
    return arguments.get(key, {}) if _is_repeated(tool, by_key) else named_by(tool, arguments)


def check_given(where: str, first: AnyTool, others: Iterable[AnyTool]) -> None:
    """Refuse a member that could never be called with the first one's arguments."""
    others = tuple(others)
    known = _properties(first) if others else {}
    for tool in others:
        _properties(tool)
        missing = [name for name in tool.parameters.get("required", ()) if name not in known]
        if missing:
            raise ToolDefinitionError(
                f"{where}: {tool.name!r} needs {', '.join(missing)}, which the parameters of "
                f"{first.name!r} do not have; "
                "rename one of them, or give a sequence transform_output=..."
            )


def union_of(by_key: Mapping[str, AnyTool]) -> Schema:
    """Return one schema for the arguments of all members of a parallel tool."""
    properties: dict[str, Any] = {}
    owners: dict[str, str] = {}
    required: dict[str, None] = {}
    definitions: dict[str, Any] = {}
    for key, tool in by_key.items():
        offered = _properties(tool)
        schema = _with_shared_definitions(key, tool.parameters, definitions)
        needed: list[str] = schema.get("required", [])
        if _is_repeated(tool, by_key):
            needed = [key] if needed else []
            offered = {key: schema}
        else:
            offered = {name: schema["properties"][name] for name in offered}
        for name, found in offered.items():
            owner = owners.setdefault(name, key)
            if owner != key:
                found = _shared(name, (owner, properties[name]), (key, found))
            properties[name] = found
        required.update(dict.fromkeys(needed))
    union: Schema = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return {**union, "$defs": definitions} if definitions else union


def _properties(tool: AnyTool) -> dict[str, Any]:
    schema = tool.parameters
    if any(word in schema for word in _COMBINED):
        raise ToolDefinitionError(
            f"the parameters of tool {tool.name!r} cannot be told from those of others: "
            "its schema must list them as 'properties' at the top, and nowhere else"
        )
    return schema.get("properties") or {}


def _is_repeated(tool: AnyTool, by_key: Mapping[str, AnyTool]) -> bool:
    return sum(other is tool for other in by_key.values()) > 1


def _shared(name: str, one: tuple[str, Any], other: tuple[str, Any]) -> Any:
    """Return the schema of a parameter that two members have."""
    (key, first), (other_key, second) = one, other
    rules, other_rules = _rules(first), _rules(second)
    if rules != other_rules:
        raise ToolDefinitionError(
            f"parallel: {key!r} and {other_key!r} both have the parameter {name!r}, but not the "
            f"same: {json.dumps(rules)} and {json.dumps(other_rules)}; rename it in one of them"
        )
    if rules is first or first.get("default") == second.get("default"):
        return first
    # Each has its own when it is left out.
    return {k: v for k, v in cast("Schema", first).items() if k != "default"}


def _rules(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {k: v for k, v in cast("Schema", schema).items() if k not in _REMARKS}


def _with_shared_definitions(key: str, schema: Schema, definitions: dict[str, Any]) -> Schema:
    """Move a schema's definitions to those of all; one that is not the same gets another name."""
    own: dict[str, Any] = schema.pop("$defs", {})
    names = {
        name: name if definitions.get(name, found) == found else f"{name}-{key}"
        for name, found in own.items()
    }
    for name, found in own.items():
        definitions[names[name]] = _renamed(found, names)
    return cast("Schema", _renamed(schema, names))


def _renamed(node: Any, names: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {k: _renamed(v, names) for k, v in cast("Schema", node).items()}
    if isinstance(node, list):
        return [_renamed(each, names) for each in cast("list[Any]", node)]
    if isinstance(node, str) and node.startswith(_REFERENCE):
        name = node.removeprefix(_REFERENCE)
        return f"{_REFERENCE}{names.get(name, name)}"
    return node
