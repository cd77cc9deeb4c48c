"""Arguments validated by a JSON schema as given, for ``Tool.from_schema``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from weakincentives.errors import ParseError, ToolDefinitionError
from weakincentives.serde.problems import shown

__all__ = ["raw_validator"]


def raw_validator(name: str, schema: Mapping[str, Any]) -> Callable[[object], dict[str, Any]]:
    """Return a function that gives the arguments as a dict, or raises ParseError with all problems."""
    import jsonschema
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    if schema.get("type") != "object":
        raise ToolDefinitionError(
            f"the parameters of tool {name!r} must be an object schema, "
            f"got type {schema.get('type')!r}"
        )
    cls: Any = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        cls.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ToolDefinitionError(
            f"the parameters of tool {name!r} are not a valid JSON schema: {error.message}"
        ) from error
    # An explicit registry: without one, jsonschema fetches remote references from the network.
    validator = cls(schema, registry=REGISTRY)

    def validate(data: object) -> dict[str, Any]:
        if isinstance(data, (str, bytes)):
            try:
                data = json.loads(data, parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                raise ParseError("not JSON", {"": f"Expected a JSON object: {error}"}) from error
        if isinstance(data, Mapping):
            data = dict(cast("Mapping[str, Any]", data))
        details: dict[str, str] = {}
        try:
            for error in validator.iter_errors(data):
                for path, text in _problems(error):
                    details[path] = f"{details[path]}; {text}" if path in details else text
        except Exception as error:  # an unresolvable reference, a bad pattern, too deep nesting
            raise ParseError(
                "cannot be validated", {"": f"{type(error).__name__}: {error}"}
            ) from error
        if details:
            raise ParseError("invalid arguments", details)
        return cast("dict[str, Any]", data)

    return validate


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _problems(error: Any) -> list[tuple[str, str]]:
    path = ".".join(str(part) for part in error.absolute_path)
    value: object = error.instance
    rule, wanted = error.validator, error.validator_value
    if rule == "type":
        names = wanted if isinstance(wanted, str) else " or ".join(wanted)
        return [(path, f"Expected type {names}, got {shown(value)}")]
    if rule == "required":
        prefix = f"{path}." if path else ""
        missing = [name for name in wanted if name not in cast("Mapping[str, Any]", value)]
        return [(prefix + name, "Required field is missing") for name in missing]
    if rule == "enum":
        choices = ", ".join(str(choice) for choice in wanted)
        name = path.rsplit(".", 1)[-1] or "value"
        return [(path, f"{name} must be one of: {choices}, got {shown(value)}")]
    if rule == "additionalProperties" and wanted is False:
        prefix = f"{path}." if path else ""
        known = error.schema.get("properties", {})
        extra = [name for name in cast("Mapping[str, Any]", value) if name not in known]
        text = f"Unknown field; expected one of: {', '.join(known)}"
        return [(prefix + name, text) for name in extra]
    return [(path, error.message)]
