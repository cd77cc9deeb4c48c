"""pydantic's validation errors in words: one sentence per path.

A path names fields, keys and indices. pydantic puts the branch of a union into it, too; so the
branches are labelled in a form that no field has, and left out of the path.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    from pydantic_core import ValidationError

Node: TypeAlias = dict[str, Any]
"""A part of pydantic's core schema."""
Path: TypeAlias = tuple[str | int, ...]
_Error: TypeAlias = Mapping[str, Any]

MISSING = "Required field is missing"
_SHOWN = 60
_BRANCH = "\0"
"""Begins the label of a union's branch; its number and the name of its class follow."""
_NUMBERS = (bool, int, float)

_TYPES = {
    "bool": "boolean",
    "bytes": "string",
    "dataclass": "object",
    "dict": "object",
    "float": "number",
    "frozen_set": "array",
    "int": "integer",
    "int_from_float": "integer",
    "iterable": "array",
    "list": "array",
    "mapping": "object",
    "model": "object",
    "none_required": "null",
    "path": "string",
    "set": "array",
    "string": "string",
    "tuple": "array",
}
_JSON_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    tuple: "array",
}
_FORMATS = {
    "bytes_invalid_encoding": "base64 text",
    "date": "an ISO 8601 date",
    "date_from_datetime": "an ISO 8601 date",
    "date_from_datetime_inexact": "an ISO 8601 date",
    "datetime": "an ISO 8601 datetime",
    "datetime_from_date": "an ISO 8601 datetime",
    "decimal": "a decimal number",
    "finite_number": "a finite number",
    "time": "an ISO 8601 time",
    "time_delta": "an ISO 8601 duration",
    "uuid": "a UUID",
}


# Before the validator is built


def prepared(node: Node) -> Node:
    """Return a copy of a core schema with labelled branches and choices that name themselves."""
    copy: Node = dict(node)
    for key, child in node.items():
        if key in {"fields", "definitions", "steps", "choices"} or (
            key == "items_schema" and isinstance(child, list)
        ):
            copy[key] = _each(child)
        elif key == "schema" or (key.endswith("_schema") and key != "keys_schema"):
            copy[key] = prepared(child)
    if node["type"] == "dataclass":
        copy["schema"] = _ignoring_computed(node["cls"], copy["schema"])
    if node["type"] == "union":
        copy["choices"] = [
            (choice, f"{_BRANCH}{index}:{_class_name(choice)}")
            for index, choice in enumerate(copy["choices"])
        ]
    if node["type"] in {"literal", "enum"}:
        return _with_choices(copy)
    return copy


def _each(children: Any) -> Any:
    if isinstance(children, dict):
        return {name: prepared(child) for name, child in cast("dict[str, Node]", children).items()}
    # The fields of a dataclass schema are only names; those of its arguments are nodes.
    return [prepared(cast("Node", c)) if isinstance(c, dict) else c for c in children]


def _ignoring_computed(cls: type[Any], arguments: Node) -> Node:
    """Accept values for fields with ``init=False``, which ``dump`` writes too, and drop them."""
    computed = _computed(cls)
    if not computed or any(field.get("init_only") for field in arguments["fields"]):
        return arguments
    anything = {"type": "default", "schema": {"type": "any"}, "default": None}
    dropped = [
        {"type": "dataclass-field", "name": name, "schema": anything, "init_only": True}
        for name in computed
    ]
    fields = [*arguments["fields"], *dropped]
    return {**arguments, "fields": fields, "collect_init_only": False}


def _computed(cls: Any) -> list[str]:
    fields = getattr(cls, "__dataclass_fields__", {})
    return [name for name, field in fields.items() if not field.init]


def _class_name(node: Node) -> str:
    if node["type"] == "definition-ref":
        return node["schema_ref"].rpartition(":")[0].rpartition(".")[2]
    return node["cls"].__name__ if node["type"] == "dataclass" else ""


def _with_choices(node: Node) -> Node:
    """Report the choices in the error; keep ``true`` and ``1.0`` from passing as the choice 1."""
    reference = {"ref": node.pop("ref")} if "ref" in node else {}  # others refer to the result
    members = node["expected"] if node["type"] == "literal" else node["members"]
    choices = [getattr(member, "value", member) for member in members]
    kinds = set[type](map(type, choices))

    def check(value: object) -> object:
        if type(value) not in kinds:
            raise ValueError("not one of the choices")
        return value

    if not kinds.isdisjoint(_NUMBERS):
        # Behind a function an enum sees a Python value, of which strict mode takes only members.
        relaxed = {**node, "strict": False} if node["type"] == "enum" else node
        function = {"type": "no-info", "function": check}
        node = {"type": "function-before", "function": function, "schema": relaxed}
    return {
        **reference,
        "type": "custom-error",
        "schema": node,
        "custom_error_type": "choices",
        "custom_error_message": "not one of the choices",
        "custom_error_context": {"choices": choices},
    }


# From errors to sentences


def explain(core: Node, failure: ValidationError) -> dict[str, str]:
    """Return one sentence per path for every error in ``failure``."""
    errors = _nearest(cast("list[_Error]", failure.errors(include_url=False)))
    open_unions = [branch[:-1] for branch in {b for error in errors for b in _branches(error)}]
    groups: dict[tuple[Path, str], list[_Error]] = {}
    for error in errors:
        suffix = ""
        for branch in _branches(error)[-1:]:
            name = str(branch[-1]).partition(":")[2]
            if name and open_unions.count(branch[:-1]) > 1 and len(error["loc"]) > len(branch):
                suffix = f" (as {name})"
        groups.setdefault((_without_branches(error["loc"]), suffix), []).append(error)
    details: dict[str, str] = {}
    readings: dict[tuple[str, str], dict[str, None]] = {}
    for (path, suffix), group in groups.items():
        is_key = path[-1:] == ("[key]",)
        place = path[:-1] if is_key else path
        sentences = _sentences(core, "it" if is_key else _last(place), group)
        reading = readings.setdefault((_joined(place), "Key: " if is_key else ""), {})
        reading |= dict.fromkeys(sentence + suffix for sentence in sentences)
    for (path, prefix), reading in readings.items():
        said = details[path] + "; " if path in details else ""
        details[path] = said + prefix + "; or ".join(reading)
    return details


def _is_label(segment: str | int) -> bool:
    return isinstance(segment, str) and segment.startswith(_BRANCH)


def _branches(error: _Error) -> list[Path]:
    """Return where each branch on the way to an error begins, as pydantic counts."""
    loc = error["loc"]
    return [loc[: at + 1] for at, segment in enumerate(loc) if _is_label(segment)]


def _without_branches(loc: Path) -> Path:
    return tuple(segment for segment in loc if not _is_label(segment))


def _joined(path: Path) -> str:
    return ".".join(map(str, path))


def _nearest(errors: list[_Error]) -> list[_Error]:
    """Of each union keep the branches that the data was meant for: right shape and tag, if any."""
    distances: dict[Path, int] = {}
    for error in errors:
        for branch in _branches(error):
            distances[branch] = max(distances.get(branch, 0), _distance(error, branch))
    best: dict[Path, int] = {}
    for branch, distance in distances.items():
        best[branch[:-1]] = min(best.get(branch[:-1], distance), distance)
    return [
        error
        for error in errors
        if all(distances[branch] == best[branch[:-1]] for branch in _branches(error))
    ]


def _distance(error: _Error, branch: Path) -> int:
    if error["loc"] == branch and error["type"] not in {"value_error", "assertion_error"}:
        return 2  # another shape altogether
    is_tag = error["type"] == "choices" and len(error["ctx"]["choices"]) == 1
    return 1 if is_tag and len(error["loc"]) == len(branch) + 1 else 0


def _sentences(core: Node, name: str, group: list[_Error]) -> list[str]:
    """Say what was expected in as few sentences as possible; each branch may expect another."""
    types: dict[str, None] = {}
    formats: dict[str, None] = {}
    choices: dict[str, None] = {}
    others: list[str] = []
    for error in group:
        kind = error["type"].removesuffix("_type").removesuffix("_parsing")
        if kind == "choices":
            allowed = error["ctx"]["choices"]
            choices |= dict.fromkeys(c if isinstance(c, str) else _rendered(c) for c in allowed)
        elif kind in _TYPES:
            types[_TYPES[kind]] = None
        elif kind in _FORMATS:
            formats[_FORMATS[kind]] = None
        else:
            others.append(_sentence(core, error))
    value = group[0]["input"]
    said: list[str] = []
    if types or formats:
        expected = [f"type {' or '.join(types)}"] if types else []
        said.append(f"Expected {' or '.join([*expected, *formats])}, got {shown(value)}")
    if choices:
        said.append(f"{name} must be one of: {', '.join(choices)}, got {_rendered(value)}")
    return said + others


def _sentence(core: Node, error: _Error) -> str:
    match error["type"]:
        case "missing":
            return MISSING
        case "unexpected_keyword_argument" | "extra_forbidden":
            return _unknown(core, error["loc"])
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


def _unknown(core: Node, loc: Path) -> str:
    node = _object_at(core, loc)
    computed = _computed(node.get("cls"))
    names = [name for name in _fields(node) if name not in computed]
    if not names:
        return "Unknown field; no fields are expected"
    near = difflib.get_close_matches(str(loc[-1]), names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"Unknown field; expected one of: {', '.join(names)}{hint}"


def _last(path: Path) -> str:
    """Return the last name in a path, with the index after it: ``tags.0``."""
    names = [at for at, segment in enumerate(path) if isinstance(segment, str)]
    return _joined(path[names[-1] if names else 0 :]) or "value"


def shown(value: object) -> str:
    """Return the JSON type of a value and a short rendering: ``string '10'``."""
    rendered = _rendered(value)
    return rendered if value is None else f"{_json_type(value)} {rendered}"


def _json_type(value: object) -> str:
    return _JSON_TYPES.get(type(value), type(value).__name__)


def _rendered(value: object) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else value[: _SHOWN - 1] + "…")
    text = ""
    for chunk in json.JSONEncoder(ensure_ascii=False, default=repr).iterencode(value):
        text += chunk
        if len(text) > _SHOWN:
            return text[: _SHOWN - 1] + "…"
    return text


# Objects with fields


def _object_at(core: Node, loc: Path) -> Node:
    """Return the schema of the object whose field a location names."""
    definitions = {node["ref"]: node for node in core.get("definitions", ())}
    node = _unwrapped(core, definitions)
    for segment in loc[:-1]:
        node = _unwrapped(_child(node, segment), definitions)
    return node


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
            case {"schema": inner, "type": kind} if kind not in {"dataclass", "model"}:
                node = inner
            case _:
                return node


def _child(node: Node, segment: str | int) -> Node:
    match node:
        case {"type": "union", "choices": choices}:
            return next(choice for choice, label in choices if label == segment)
        case {"type": "dict", "values_schema": inner}:
            return inner
        case {"type": "tuple", "items_schema": items}:
            variadic = node.get("variadic_item_index", len(items))
            return items[min(cast("int", segment), variadic, len(items) - 1)]
        case {"items_schema": inner}:
            return inner
        case _:
            return _fields(node).get(str(segment), {"type": "any"})


def _fields(node: Node) -> dict[str, Node]:
    fields = node.get("fields") or node.get("schema", {}).get("fields", {})
    if node["type"] == "dataclass":
        fields = {field["name"]: field for field in node["schema"]["fields"]}
    return fields
