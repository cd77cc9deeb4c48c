"""What is wrong with data, in words: pydantic's errors as one sentence per path.

A path names fields, keys and indices only. pydantic also puts the branch of a union into it, under
a name that a field could have too; so the branches are labelled by number before the validator is
built, and every error is followed through the schema that raised it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    from pydantic_core import ValidationError

Node: TypeAlias = dict[str, Any]
"""A part of pydantic's core schema."""
Path: TypeAlias = tuple[str | int, ...]

_SHOWN = 60
_NUMBERS = (bool, int, float)

_JSON_TYPES = {
    "bool_parsing": "boolean",
    "bool_type": "boolean",
    "bytes_type": "string",
    "dataclass_type": "object",
    "dict_type": "object",
    "float_parsing": "number",
    "float_type": "number",
    "frozen_set_type": "array",
    "int_from_float": "integer",
    "int_parsing": "integer",
    "int_type": "integer",
    "iterable_type": "array",
    "list_type": "array",
    "mapping_type": "object",
    "model_type": "object",
    "none_required": "null",
    "path_type": "string",
    "set_type": "array",
    "string_type": "string",
    "tuple_type": "array",
}

_FORMATS = {
    "bytes_invalid_encoding": "base64 text",
    "date_from_datetime_inexact": "an ISO 8601 date",
    "date_from_datetime_parsing": "an ISO 8601 date",
    "date_parsing": "an ISO 8601 date",
    "date_type": "an ISO 8601 date",
    "datetime_from_date_parsing": "an ISO 8601 datetime",
    "datetime_parsing": "an ISO 8601 datetime",
    "datetime_type": "an ISO 8601 datetime",
    "decimal_parsing": "a decimal number",
    "decimal_type": "a decimal number",
    "finite_number": "a finite number",
    "time_delta_parsing": "an ISO 8601 duration",
    "time_delta_type": "an ISO 8601 duration",
    "time_parsing": "an ISO 8601 time",
    "time_type": "an ISO 8601 time",
    "uuid_parsing": "a UUID",
    "uuid_type": "a UUID",
}

_UNKNOWN = {"unexpected_keyword_argument", "extra_forbidden"}
_STRUCTURAL = {"missing", "json_invalid", "string_unicode", *_UNKNOWN}
"""Errors that say nothing about the choices of the place they are at."""


# Before the validator is built


def labelled(node: Node) -> Node:
    """Return a copy of a core schema with numbered union branches and strict choices."""
    copy: Node = dict(node)
    for key, child in node.items():
        if key in {"fields", "definitions", "steps", "choices"} or (
            key == "items_schema" and isinstance(child, list)
        ):
            copy[key] = _each(child)
        elif key == "schema" or (key.endswith("_schema") and key != "keys_schema"):
            copy[key] = labelled(child)
    if node["type"] == "union":
        copy["choices"] = [(choice, str(i)) for i, choice in enumerate(copy["choices"])]
    if node["type"] in {"literal", "enum"}:
        return _strict_choices(copy)
    return copy


def _each(children: Any) -> Any:
    if isinstance(children, dict):
        named = cast("dict[str, Node]", children)
        return {name: labelled(child) for name, child in named.items()}
    # The fields of a dataclass schema are only names; those of its arguments are nodes.
    return [labelled(cast("Node", c)) if isinstance(c, dict) else c for c in children]


def _strict_choices(node: Node) -> Node:
    """Keep ``true`` and ``1.0`` from passing as the choice ``1``, which they equal in Python."""
    kinds = set[type](map(type, _choices(node)))
    if kinds.isdisjoint(_NUMBERS):
        return node

    def check(value: object) -> object:
        if type(value) not in kinds:
            raise ValueError("not one of the choices")
        return value

    # Behind a function an enum sees a Python value, of which strict mode takes only members.
    relaxed = {**node, "strict": False} if node["type"] == "enum" else node
    function = {"type": "no-info", "function": check}
    return {"type": "function-before", "function": function, "schema": relaxed}


# Where an error is


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    node: Node
    """The schema that was not met; for an unknown field, that of the object it is in."""
    is_key: bool
    branches: tuple[tuple[Path, Path], ...]
    """For every union on the way: where it is, and where its branch begins, as pydantic counts."""
    as_type: str
    """The class that the innermost branch stands for."""


def _locate(root: Node, loc: Path) -> _Place:
    definitions: dict[str, Node] = {node["ref"]: node for node in root.get("definitions", ())}
    node = _unwrapped(root, definitions)
    path: list[str | int] = []
    branches: list[tuple[Path, Path]] = []
    as_type = ""
    is_key = False
    for at, segment in enumerate(loc):
        if node["type"] in {"union", "tagged-union"}:
            branches.append((loc[:at], loc[: at + 1]))
            node = _unwrapped(_branch(node, segment), definitions)
            as_type = node["cls"].__name__ if node["type"] == "dataclass" else ""
            continue
        path.append(segment)
        if node["type"] == "dict" and loc[at + 1 : at + 2] == ("[key]",):
            node = _unwrapped(node["keys_schema"], definitions)
            is_key = True
            break
        child = _child(node, segment)
        if child is None:
            break
        node = _unwrapped(child, definitions)
    return _Place(tuple(path), node, is_key, tuple(branches), as_type)


def _unwrapped(node: Node, definitions: Mapping[str, Node]) -> Node:
    """Step through everything that adds no segment to a location."""
    while True:
        match node:
            case {"type": "definition-ref", "schema_ref": ref}:
                node = definitions[ref]
            case {"type": "lax-or-strict", "strict_schema": inner}:
                node = inner
            case {"type": "json-or-python", "json_schema": inner}:
                node = inner
            case {"type": "chain", "steps": [*_, inner]}:
                node = inner
            case {"type": "dataclass" | "model"}:
                return node
            case {"schema": inner}:
                node = inner
            case _:
                return node


def _branch(node: Node, label: str | int) -> Node:
    if node["type"] == "union":
        return node["choices"][int(label)][0]
    tagged = cast("dict[object, Node]", node["choices"])
    return next((choice for tag, choice in tagged.items() if str(tag) == label), node)


def _child(node: Node, segment: str | int) -> Node | None:
    match node:
        case {"type": "dataclass" | "model" | "typed-dict"}:
            field = _fields(node).get(str(segment), {})
            return field if field and field.get("init", True) else None
        case {"type": "dict", "values_schema": inner}:
            return inner
        case {"type": "tuple", "items_schema": items} if isinstance(segment, int):
            variadic = node.get("variadic_item_index", len(items))
            return items[min(segment, variadic, len(items) - 1)] if items else None
        case {"items_schema": inner}:
            return inner
        case _:
            return None


def _fields(node: Node) -> dict[str, Node]:
    match node:
        case {"type": "dataclass", "schema": {"fields": fields}}:
            return {field["name"]: field for field in fields}
        case {"type": "model", "schema": {"fields": fields}}:
            return fields
        case {"type": "typed-dict", "fields": fields}:
            return fields
        case _:
            return {}


# What is said about it


def explain(core: Node, failure: ValidationError) -> dict[str, str]:
    """Return one sentence per path for everything that ``failure`` holds."""
    readings: dict[tuple[str, str], dict[str, None]] = {}
    for (path, prefix, suffix), group in _grouped(core, failure).items():
        for sentence in _sentences(group):
            readings.setdefault((path, prefix), {})[sentence + suffix] = None
    details: dict[str, str] = {}
    for (path, prefix), sentences in readings.items():
        said = details[path] + "; " if path in details else ""
        details[path] = said + prefix + "; or ".join(sentences)
    return details


_Found: TypeAlias = tuple[_Place, Mapping[str, Any]]


def _grouped(core: Node, failure: ValidationError) -> dict[tuple[str, str, str], list[_Found]]:
    """Bring the errors together that one sentence can tell: same path, same reading of the data."""
    errors = cast("list[dict[str, Any]]", failure.errors(include_url=False))
    found = _nearest([(_locate(core, error["loc"]), error) for error in errors])
    open_unions = [union for union, _ in {b for place, _ in found for b in place.branches}]
    groups: dict[tuple[str, str, str], list[_Found]] = {}
    for place, error in found:
        suffix = ""
        if place.as_type and place.branches:
            union, branch = place.branches[-1]
            if open_unions.count(union) > 1 and len(error["loc"]) > len(branch):
                suffix = f" (as {place.as_type})"
        path = ".".join(map(str, place.path))
        prefix = "Key: " if place.is_key else ""
        groups.setdefault((path, prefix, suffix), []).append((place, error))
    return groups


def _nearest(found: list[_Found]) -> list[_Found]:
    """Of each union keep the branches that the data was meant for: right shape and tag, if any."""
    unions = {union for place, _ in found for union, _ in place.branches}
    for union in sorted(unions, key=len):
        distances: dict[Path, int] = {}
        for place, error in found:
            for at, branch in place.branches:
                if at == union:
                    distance = _distance(place, error, branch)
                    distances[branch] = max(distances.get(branch, 0), distance)
        best = min(distances.values(), default=0)
        found = [
            (place, error)
            for place, error in found
            if all(at != union or distances[branch] == best for at, branch in place.branches)
        ]
    return found


def _distance(place: _Place, error: Mapping[str, Any], branch: Path) -> int:
    if error["loc"] == branch and error["type"] not in {"value_error", "assertion_error"}:
        return 2  # another shape altogether
    is_tag = len(error["loc"]) == len(branch) + 1 and len(_choices(place.node)) == 1
    return 1 if is_tag and error["type"] != "missing" else 0


def _sentences(group: Sequence[_Found]) -> list[str]:
    """Say what was expected in as few sentences as possible; each branch may expect another."""
    types: dict[str, None] = {}
    formats: dict[str, None] = {}
    choices: dict[str, None] = {}
    others: list[str] = []
    for place, error in group:
        kind = error["type"]
        if kind not in _STRUCTURAL and (allowed := _choices(place.node)):
            choices |= dict.fromkeys(c if isinstance(c, str) else _rendered(c) for c in allowed)
        elif kind in _JSON_TYPES:
            types[_JSON_TYPES[kind]] = None
        elif kind in _FORMATS:
            formats[_FORMATS[kind]] = None
        else:
            others.append(_sentence(place, error))
    place, error = group[0]
    said: list[str] = []
    if types or formats:
        expected = [f"type {' or '.join(types)}"] if types else []
        said.append(f"Expected {' or '.join([*expected, *formats])}, got {shown(error['input'])}")
    if choices:
        name = "it" if place.is_key else _last(place.path)
        said.append(f"{name} must be one of: {', '.join(choices)}, got {_rendered(error['input'])}")
    return said + others


def _sentence(place: _Place, error: Mapping[str, Any]) -> str:
    match error["type"]:
        case "missing":
            return "Required field is missing"
        case "unexpected_keyword_argument" | "extra_forbidden":
            return _unknown(str(place.path[-1]), place.node)
        case "json_invalid":
            return f"Not valid JSON: {error['ctx']['error']}"
        case "string_unicode":
            return "Not valid JSON: the text is not valid Unicode"
        case "too_long":
            most, came = error["ctx"]["max_length"], error["ctx"]["actual_length"]
            return f"Expected at most {most} items, got {came or 'more'}"
        case "value_error" | "assertion_error":
            problem = error["ctx"]["error"]
            return str(problem) or type(problem).__name__
        case _:
            return f"{error['msg']}, got {shown(error['input'])}"


def _unknown(name: str, node: Node) -> str:
    names = [known for known, field in _fields(node).items() if field.get("init", True)]
    if not names:
        return "Unknown field" + ("; no fields are expected" if node["type"] == "dataclass" else "")
    near = difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"Unknown field; expected one of: {', '.join(names)}{hint}"


def _choices(node: Node) -> list[Any]:
    match node:
        case {"type": "literal", "expected": expected}:
            return [getattr(choice, "value", choice) for choice in expected]
        case {"type": "enum", "members": members}:
            return [member.value for member in members]
        case _:
            return []


def _last(path: Path) -> str:
    """Return the last name in a path, with the index after it: ``tags.0``."""
    names = [at for at, segment in enumerate(path) if isinstance(segment, str)]
    return ".".join(map(str, path[names[-1] if names else 0 :])) or "value"


def shown(value: object) -> str:
    """Return the JSON type of a value and a short rendering: ``string '10'``."""
    rendered = _rendered(value)
    return rendered if value is None else f"{_json_type(value)} {rendered}"


def _json_type(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
        case list() | tuple():
            return "array"
        case _:
            return type(value).__name__


def _rendered(value: object) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else value[: _SHOWN - 1] + "…")
    text = ""
    for chunk in json.JSONEncoder(ensure_ascii=False, default=repr).iterencode(value):
        text += chunk
        if len(text) > _SHOWN:
            return text[: _SHOWN - 1] + "…"
    return text


# Fields that a class computes itself


def computed_keys(core: Node, failure: ValidationError) -> list[Path]:
    """Return the paths of values for fields with ``init=False``, which ``dump`` writes too."""
    found: list[Path] = []
    for error in failure.errors(include_url=False, include_context=False):
        if error["type"] in _UNKNOWN:
            place = _locate(core, error["loc"])
            # Not from the schema, which leaves such a field out when it has no default.
            fields = getattr(place.node.get("cls"), "__dataclass_fields__", {})
            if (field := fields.get(place.path[-1])) is not None and not field.init:
                found.append(place.path)
    return found


def without(text: str | bytes | bytearray, paths: Iterable[Path]) -> Any:
    """Return the data of a JSON text less what stands at ``paths``."""
    from pydantic_core import from_json

    data = from_json(text)
    for path in paths:
        parent = data
        for segment in path[:-1]:
            parent = parent[segment]
        parent.pop(path[-1], None)
    return data
