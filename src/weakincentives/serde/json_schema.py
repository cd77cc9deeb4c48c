"""JSON schemas of dataclasses, as a model is shown them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast, get_type_hints

from weakincentives.serde.typed import adapter_for

if TYPE_CHECKING:
    from pydantic.json_schema import GenerateJsonSchema

_BY_NAME = ("properties", "$defs", "patternProperties", "dependentSchemas")
"""Keywords under which the keys are names, not keywords."""
_DATA = ("default", "examples", "const", "enum", "discriminator")


def schema(target: Any) -> dict[str, Any]:
    """Return the JSON schema of what ``parse(target, …)`` accepts; it is the caller's to change.

    A field's description is its ``field(metadata={"description": …})``, else the string under it,
    else a string in its ``Annotated``.
    """
    return copy.deepcopy(_schema(target))


@lru_cache(maxsize=1024)
def _schema(target: Any) -> dict[str, Any]:
    from pydantic.errors import PydanticInvalidForJsonSchema

    if target is None or target is type(None):
        return {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        full = adapter_for(target).json_schema(schema_generator=_generator())
    except PydanticInvalidForJsonSchema as error:
        raise TypeError(f"{target!r} has no JSON schema: {error.message}") from error
    _drop_titles(full)
    return _with_top_inlined(full)


@lru_cache(maxsize=1)
def _generator() -> type[GenerateJsonSchema]:
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def dataclass_schema(self, schema: Any) -> dict[str, Any]:
            found = super().dataclass_schema(schema)
            found["additionalProperties"] = False  # which older pydantic does not say
            if text := _own_docstring(schema["cls"]):
                found["description"] = text
            for name, text in _annotated_texts(schema["cls"]).items():
                if name in found.get("properties", {}):
                    found["properties"][name].setdefault("description", text)
            return found

        def field_is_present(self, field: Any) -> bool:
            return field.get("init", True) and super().field_is_present(field)

        def get_default_value(self, schema: Any) -> Any:
            # An empty list is a default worth showing; a clock or a random id is not.
            if schema.get("default_factory") in (list, dict, tuple, set, frozenset):
                return schema["default_factory"]()
            return super().get_default_value(schema)

        def emit_warning(self, kind: Any, detail: str) -> None:
            """A default that JSON cannot say is left out; nobody needs to be told."""

    return Generator


def _own_docstring(cls: type) -> str:
    """Return the docstring that was written for a dataclass, not the signature made up for it."""
    text = vars(cls).get("__doc__") or ""
    return "" if text.startswith(f"{cls.__name__}(") else inspect.cleandoc(text)


def _annotated_texts(cls: type) -> dict[str, str]:
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError:  # pydantic found the name in another place
        hints = {field.name: field.type for field in dataclasses.fields(cls)}
    texts: dict[str, str] = {}
    for name, hint in hints.items():
        metadata = cast("tuple[object, ...]", getattr(hint, "__metadata__", ()))
        text = next((entry for entry in metadata if isinstance(entry, str)), None)
        if text is not None:
            texts[name] = text
    return texts


def _drop_titles(node: Any) -> None:
    """Remove every title that pydantic made up, but no property of that name."""
    if isinstance(node, list):
        for item in cast("list[Any]", node):
            _drop_titles(item)
    elif isinstance(node, dict):
        keywords = cast("dict[str, Any]", node)
        keywords.pop("title", None)
        for key, value in keywords.items():
            if key in _BY_NAME:
                for child in value.values():
                    _drop_titles(child)
            elif key not in _DATA:
                _drop_titles(value)


def _with_top_inlined(full: dict[str, Any]) -> dict[str, Any]:
    """Spell out a recursive type at the top: providers want an object there, not a reference."""
    if "$ref" not in full:
        return full
    name = full["$ref"].removeprefix("#/$defs/")
    return {**copy.deepcopy(full["$defs"][name]), "$defs": full["$defs"]}
