"""Arguments validated by a JSON schema as given, for ``Tool.from_schema``."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from weakincentives.errors import ParseError, ToolDefinitionError
from weakincentives.serde import dump
from weakincentives.serde.bounded_schema import BoundedSchema, bounded_copy
from weakincentives.serde.problems import shown


def plain_schema(name: str, schema: object) -> dict[str, Any]:
    """Return a copy of an object schema that nobody else holds, or refuse what is none."""
    if not isinstance(schema, Mapping):
        raise ToolDefinitionError(
            f"the parameters of tool {name!r} must be a JSON schema as a dict, got {schema!r}"
        )
    try:
        plain = bounded_copy(dump(cast("object", schema)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolDefinitionError(f"the parameters of tool {name!r}: {error}") from error
    if plain.get("type") != "object":
        raise ToolDefinitionError(
            f"the parameters of tool {name!r} must be an object schema, "
            f"got type {plain.get('type')!r}"
        )
    return plain


def raw_validator(name: str, schema: dict[str, Any]) -> Callable[[object], dict[str, Any]]:
    """Return a function that gives the arguments as a dict, or a ParseError with all problems."""
    try:
        bounded = BoundedSchema(schema)
    except ValueError as error:
        raise ToolDefinitionError(f"the parameters of tool {name!r}: {error}") from error

    def validate(data: object) -> dict[str, Any]:
        arguments = _from_json(data)
        found: dict[str, dict[str, None]] = {}
        try:
            for error in bounded.errors(arguments):
                for path, text in _problems(error, bounded):
                    found.setdefault(path, {})[text] = None
        except Exception as error:  # too much, an unresolvable reference, too deep nesting
            text = f"Cannot be checked: {str(error)[:_MAX_TEXT]}"
            raise ParseError("cannot be checked", {"": text}) from error
        if found:
            raise ParseError("invalid arguments", _details(found))
        return _with_defaults(arguments, bounded) if has_defaults else arguments

    has_defaults = '"default"' in json.dumps(schema)
    return validate


def _with_defaults(arguments: dict[str, Any], bounded: BoundedSchema) -> dict[str, Any]:
    """Return valid arguments with the schema's defaults; as they are where those would not fit."""
    filled = _filled(arguments, bounded.schema)
    try:
        return arguments if any(bounded.errors(filled)) else filled
    except Exception:  # too much, an unresolvable reference: it is no reason to refuse
        return arguments


def _filled(value: Any, schema: Any) -> Any:
    if not isinstance(schema, dict):
        return value
    if isinstance(value, dict):
        filled = dict(cast("dict[str, Any]", value))
        for name, part in cast("dict[str, Any]", schema).get("properties", {}).items():
            if name in filled:
                filled[name] = _filled(filled[name], part)
            elif isinstance(part, dict) and "default" in part:
                filled[name] = copy.deepcopy(cast("Any", part["default"]))
        return filled
    if isinstance(value, list) and "items" in schema:
        inner = cast("dict[str, Any]", schema)["items"]
        return [_filled(item, inner) for item in cast("list[Any]", value)]
    return cast("object", value)


_MAX_PROBLEMS = 100
_MAX_TEXT = 1000
"""Characters of a sentence about one: a schema, and the names in it, may be long."""


def _details(found: Mapping[str, Mapping[str, None]]) -> dict[str, str]:
    told = {
        path[:_MAX_TEXT]: "; ".join(texts)[:_MAX_TEXT]
        for path, texts in list(found.items())[:_MAX_PROBLEMS]
    }
    if len(found) > _MAX_PROBLEMS:
        more = f"These are {_MAX_PROBLEMS} of {len(found)} problems"
        told[""] = f"{told['']}; {more}" if "" in told else more
    return told


def _from_json(data: object) -> Any:
    """Return JSON text, or what could be written as such, as dicts and lists of our own."""
    try:
        text = data if isinstance(data, str | bytes | bytearray) else json.dumps(dump(data))
        return json.loads(text, parse_constant=_no_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParseError("not JSON", {"": f"Not valid JSON: {error}"}) from error


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _problems(error: Any, schema: BoundedSchema) -> Iterator[tuple[str, str]]:
    """Yield path and sentence for everything that one error of jsonschema stands for."""
    path = ".".join(map(str, error.absolute_path))
    prefix = f"{path}." if path else ""
    rule, wanted, value = error.validator, error.validator_value, error.instance
    if rule in ("anyOf", "oneOf") and error.context:
        yield from _nearest(path, error, schema)
    elif rule == "type":
        yield path, f"Expected type {_either(wanted)}, got {shown(value)}"
    elif rule == "required":
        for name in wanted:
            if name not in value:
                yield prefix + name, "Required field is missing"
    elif rule == "additionalProperties" and wanted is False:
        known = ", ".join(error.schema.get("properties", ()))
        text = f"expected one of: {known}" if known else "no fields are expected"
        for name in _unexpected(value, error.schema, schema):
            yield prefix + name, f"Unknown field; {text}"
    elif rule == "enum":
        choices = ", ".join(c if isinstance(c, str) else json.dumps(c) for c in wanted)
        name = path.rsplit(".", 1)[-1] or "value"
        yield path, f"{name} must be one of: {choices}, got {shown(value)}"
    elif rule is None:  # the schema `false`
        yield path, f"Not allowed, got {shown(value)}"
    else:
        # Not jsonschema's own sentence: it repeats the value, however long.
        yield path, f"Expected {rule} {json.dumps(wanted, ensure_ascii=False)}, got {shown(value)}"


def _nearest(path: str, error: Any, schema: BoundedSchema) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the branch that a value was most likely meant for."""
    branches: dict[int, list[Any]] = {}
    for each in error.context:
        branches.setdefault(each.relative_schema_path[0], []).append(each)
    alike = [found for found in branches.values() if not any(map(_is_another_type, found))]
    if alike:
        for each in min(alike, key=len):
            yield from _problems(each, schema)
    else:
        wanted = (each.validator_value for each in error.context if _is_another_type(each))
        yield (
            path,
            f"Expected type {' or '.join(map(_either, wanted))}, got {shown(error.instance)}",
        )


def _is_another_type(error: Any) -> bool:
    return error.validator == "type" and not error.relative_path


def _either(types: str | list[str]) -> str:
    return types if isinstance(types, str) else " or ".join(types)


def _unexpected(
    value: Mapping[str, Any], node: Mapping[str, Any], schema: BoundedSchema
) -> list[str]:
    known, patterns = node.get("properties", {}), node.get("patternProperties", {})
    return [
        name
        for name in value
        if name not in known and not any(schema.matches(pattern, name) for pattern in patterns)
    ]
