"""Arguments validated by a JSON schema as given, for ``Tool.from_schema``."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from weakincentives.errors import ParseError, ToolDefinitionError
from weakincentives.serde import dump
from weakincentives.serde.problems import shown

__all__ = ["plain_schema", "raw_validator"]


def plain_schema(name: str, schema: object) -> dict[str, Any]:
    """Return a copy of an object schema that nobody else holds, or refuse what is none."""
    if not isinstance(schema, Mapping):
        raise ToolDefinitionError(
            f"the parameters of tool {name!r} must be a JSON schema as a dict, got {schema!r}"
        )
    try:
        plain = json.loads(json.dumps(dump(cast("object", schema)), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ToolDefinitionError(f"the parameters of tool {name!r}: {error}") from error
    if plain.get("type") != "object":
        raise ToolDefinitionError(
            f"the parameters of tool {name!r} must be an object schema, "
            f"got type {plain.get('type')!r}"
        )
    return plain


def raw_validator(name: str, schema: dict[str, Any]) -> Callable[[object], dict[str, Any]]:
    """Return a function that gives the arguments as a dict, or a ParseError with all problems."""
    import jsonschema
    from jsonschema.validators import validator_for
    from referencing import Registry

    cls: Any = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        cls.check_schema(schema)
    except jsonschema.SchemaError as error:
        place = ".".join(map(str, error.absolute_path)) or "the top level"
        raise ToolDefinitionError(
            f"the parameters of tool {name!r} are not a valid JSON schema, at {place}: "
            f"{error.message}"
        ) from error
    # An explicit registry: without one, jsonschema fetches remote references from the network.
    validator = cls(schema, registry=Registry[Any]())

    def validate(data: object) -> dict[str, Any]:
        arguments = _from_json(data)
        found: dict[str, dict[str, None]] = {}
        try:
            for error in validator.iter_errors(arguments):
                for path, text in _problems(error):
                    found.setdefault(path, {})[text] = None
        except Exception as error:  # an unresolvable reference, a bad pattern, too deep nesting
            raise ParseError("cannot be checked", {"": f"Cannot be checked: {error}"}) from error
        if found:
            details = {path: "; ".join(texts) for path, texts in found.items()}
            raise ParseError("invalid arguments", details)
        return _with_defaults(arguments, validator) if has_defaults else arguments

    has_defaults = '"default"' in json.dumps(schema)
    return validate


def _with_defaults(arguments: dict[str, Any], validator: Any) -> dict[str, Any]:
    """Return valid arguments with the schema's defaults; as they are where those would not fit."""
    try:
        filled = _filled(arguments, validator)
        return filled if validator.is_valid(filled) else arguments
    except Exception:  # an unresolvable reference, too deep nesting: it is no reason to refuse
        return arguments


def _filled(value: Any, validator: Any) -> Any:
    schema = validator.schema
    if not isinstance(schema, dict):
        return value
    if isinstance(value, dict):
        filled = dict(cast("dict[str, Any]", value))
        for name, part in cast("dict[str, Any]", schema).get("properties", {}).items():
            inner = validator.evolve(schema=part)
            if name in filled:
                filled[name] = _filled(filled[name], inner)
            elif isinstance(part, dict) and "default" in part and inner.is_valid(part["default"]):
                filled[name] = copy.deepcopy(cast("Any", part["default"]))
        return filled
    if isinstance(value, list) and "items" in schema:
        inner = validator.evolve(schema=cast("dict[str, Any]", schema)["items"])
        return [_filled(item, inner) for item in cast("list[Any]", value)]
    return cast("object", value)


def _from_json(data: object) -> Any:
    """Return JSON text, or what could be written as such, as dicts and lists of our own."""
    try:
        text = data if isinstance(data, str | bytes | bytearray) else json.dumps(dump(data))
        return json.loads(text, parse_constant=_no_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParseError("not JSON", {"": f"Not valid JSON: {error}"}) from error


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _problems(error: Any) -> Iterator[tuple[str, str]]:
    """Yield path and sentence for everything that one error of jsonschema stands for."""
    path = ".".join(map(str, error.absolute_path))
    prefix = f"{path}." if path else ""
    rule, wanted, value = error.validator, error.validator_value, error.instance
    if rule in ("anyOf", "oneOf") and error.context:
        yield from _nearest(path, error)
    elif rule == "type":
        yield path, f"Expected type {_either(wanted)}, got {shown(value)}"
    elif rule == "required":
        for name in wanted:
            if name not in value:
                yield prefix + name, "Required field is missing"
    elif rule == "additionalProperties" and wanted is False:
        known = ", ".join(error.schema.get("properties", ()))
        text = f"expected one of: {known}" if known else "no fields are expected"
        for name in _unexpected(value, error.schema):
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


def _nearest(path: str, error: Any) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the branch that a value was most likely meant for."""
    branches: dict[int, list[Any]] = {}
    for each in error.context:
        branches.setdefault(each.relative_schema_path[0], []).append(each)
    alike = [found for found in branches.values() if not any(map(_is_another_type, found))]
    if alike:
        for each in min(alike, key=len):
            yield from _problems(each)
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


def _unexpected(value: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    return [
        name
        for name in value
        if name not in known and not any(re.search(pattern, name) for pattern in patterns)
    ]
