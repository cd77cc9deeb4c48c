"""Forms for a person: a flat dataclass, or a schema, and what was filled in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from weakincentives.errors import InvalidArguments, ParseError, ToolValidationError
from weakincentives.serde import parse, schema

_KINDS = ("string", "number", "integer", "boolean")


def schema_of_form(form: type[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a form; a dataclass that is no form raises TypeError."""
    if isinstance(form, Mapping):
        return dict(form)
    if not is_dataclass(form):
        raise TypeError(f"a form is a dataclass or a JSON schema, got {form!r}")
    found = schema(form)
    fields = {name: _field(form, name, each) for name, each in found["properties"].items()}
    return {"type": "object", "properties": fields, "required": found.get("required", [])}


def _field(form: type[Any], name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    kinds = [each for each in found.get("anyOf", ()) if each != {"type": "null"}]
    if len(kinds) == 1:  # `str | None`: a field that may stay empty
        found = {**{key: value for key, value in found.items() if key != "anyOf"}, **kinds[0]}
    if found.get("default", 0) is None:
        found = {key: value for key, value in found.items() if key != "default"}
    if "enum" in found:
        found = {"type": "string", **found}
    is_choice = found.get("type") == "array" and "enum" in found.get("items", {})
    if is_choice:
        found = {**found, "items": {"type": "string", **found["items"]}}
    if not is_choice and found.get("type") not in _KINDS:
        raise TypeError(
            f"{form.__name__}.{name} cannot be asked in a form: use str, int, float, bool, a "
            "Literal of texts, or a list of such Literals"
        )
    return dict(found)


def read_form(form: type[Any] | Mapping[str, Any], answer: Mapping[str, Any]) -> Any:
    """Return what was filled in; raise ToolValidationError if it does not fit."""
    try:
        if not isinstance(form, Mapping):
            return parse(form, {name: each for name, each in answer.items() if each is not None})
        from weakincentives.serde.bounded_schema import bounded_schema

        return bounded_schema(json.dumps(form)).parse(dict(answer))
    except (ParseError, InvalidArguments, ValueError) as error:
        raise ToolValidationError(f"The answer does not fit the form: {error}") from error
