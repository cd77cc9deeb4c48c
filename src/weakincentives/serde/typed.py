"""JSON to dataclasses and back, and the JSON schemas of dataclasses, on pydantic's core.

pydantic takes about 95 ms to import, so it is imported when the first type is built, not here.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache, partial
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from weakincentives.errors import ParseError

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

T = TypeVar("T")
Extra = Literal["forbid", "ignore"]

_TEXT = (str, bytes, bytearray)

# pydantic parses the source of a class for its docstrings, and before Python 3.11.9 and 3.12.3 two
# threads that parse Python concurrently can fail with a SystemError. So only one of our threads
# builds at a time, and it retries in case another thread interfered.
_building = threading.RLock()
_ATTEMPTS = 5


@overload
def parse(target: type[T], data: object, *, extra: Extra = "forbid", strict: bool = True) -> T: ...
@overload
def parse(target: object, data: object, *, extra: Extra = "forbid", strict: bool = True) -> Any: ...
def parse(target: Any, data: object, *, extra: Extra = "forbid", strict: bool = True) -> Any:
    """Return ``data`` as a value of the type ``target``, or raise a ParseError with every problem.

    ``str`` and ``bytes`` are always JSON text; other data is read as its JSON form. Nothing is
    converted: ``"10"``, ``3.0`` and ``True`` are not an ``int``, unless ``strict=False``.
    An instance of a dataclass ``target`` comes back as it is. Values for fields with ``init=False``
    are ignored, since the class computes them. Errors of ``__post_init__`` other than ValueError
    and AssertionError are bugs, and pass through.
    """
    return validator_for(target, extra, strict)(data)


# Bounded, because classes can be made on the fly. Weak keys are slower to look up, and an alias
# such as Box[int] lives no longer than the call.
@lru_cache(maxsize=1024)
def validator_for(
    target: Any, extra: Extra = "forbid", strict: bool = True
) -> Callable[[object], Any]:
    """Return the function that ``parse`` calls for ``target``."""
    if target is None or target is type(None):
        return partial(_parse_none, validator_for(NoArguments | None, extra, strict))
    if target is dict:
        return _parse_object
    return _compiled(target, extra, strict)


def _parse_object(data: object) -> Any:
    """Return any JSON object, without pydantic as long as it is one."""
    if type(data) is dict:
        try:
            text = json.dumps(cast("object", data), ensure_ascii=False, allow_nan=False)
            text.encode()  # not all text is Unicode
            return json.loads(text)
        except (TypeError, ValueError, RecursionError):
            pass  # which pydantic explains, or can write
    return _compiled(dict, "forbid", True)(cast("object", data))


@lru_cache(maxsize=1024)
def _compiled(target: Any, extra: Extra, strict: bool) -> Callable[[object], Any]:
    _import_pydantic()
    from pydantic_core import SchemaValidator, ValidationError, to_json

    from weakincentives.serde import problems

    adapter = adapter_for(target, extra, strict=strict)
    core = problems.prepared(cast("problems.Node", adapter.core_schema))
    name = _name(target)
    config = _core_config(extra, strict)
    validate = SchemaValidator(cast("Any", core), cast("Any", config)).validate_json
    write = partial(to_json, bytes_mode="base64", inf_nan_mode="constants", fallback=_plain)
    itself = target if _is_dataclass_type(target) else ()

    def validator(data: object) -> Any:
        if isinstance(data, itself):
            return data
        if isinstance(data, _TEXT):
            text = data
        else:
            try:
                text = write(data)
            except Exception as error:  # an object in the data may raise anything
                reason = str(error).removeprefix("Error serializing to JSON: ")
                details = {"": f"Cannot be written as JSON: {reason}"}
                raise ParseError(f"Data does not fit {name}", details) from error
        try:
            return validate(text)
        except ValidationError as error:
            details = problems.explain(core, error)
            raise ParseError(f"Data does not fit {name}", details) from error

    return validator


_PLAIN = (str, int, float, bool, type(None), None, Any)


def is_plain(target: Any, above: tuple[type, ...] = ()) -> bool:
    """Whether ``parse`` surely supports the type: then pydantic is not imported to find out."""
    if any(target is each for each in (*_PLAIN, *above)):
        return True
    origin, args = get_origin(target), get_args(target)
    if origin is Literal:
        return all(type(each) in (str, int) for each in args)
    if origin is Annotated:
        return is_plain(args[0], above) and all(isinstance(each, str) for each in args[1:])
    if origin is dict:
        return args[0] is str and is_plain(args[1], above)
    if origin in (list, tuple, Union, UnionType):
        return all(each is ... or is_plain(each, above) for each in args)
    if not _is_dataclass_type(target):
        return False
    try:
        hints = get_type_hints(target, include_extras=True)
    except Exception:  # an annotation is code, and may fail in any way
        return False
    return all(
        is_plain(hints[field.name], (*above, target))
        # A default may also be one of pydantic's, with rules of its own.
        and (field.default is dataclasses.MISSING or type(field.default) in _PLAIN)
        for field in dataclasses.fields(target)
    )


def dump(value: object) -> Any:
    """Return ``value`` as dicts, lists, strings and numbers that ``parse`` reads back.

    Bytes become base64, dates and durations ISO 8601, enum members their values. A float that is
    not finite stays a float, which has no JSON form and which ``parse`` refuses.
    """
    from pydantic_core import to_jsonable_python

    try:
        return to_jsonable_python(
            value, bytes_mode="base64", inf_nan_mode="constants", fallback=_plain
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"Cannot dump {type(value).__qualname__}: {error}") from error


_importing = threading.Lock()


def _import_pydantic() -> None:
    """Import pydantic, one thread at a time: two at once can see it half initialised."""
    with _importing:
        for name in ("pydantic", "pydantic.errors", "pydantic.json_schema"):
            importlib.import_module(name)


@lru_cache(maxsize=1024)
def adapter_for(
    target: Any, extra: Extra = "forbid", *, describe: bool = False, strict: bool = True
) -> TypeAdapter[Any]:
    """Return pydantic's adapter for ``target``; a TypeError names an unsupported type.

    Only a schema needs descriptions, and finding them parses the file that defines each class.
    """
    _import_pydantic()
    from pydantic import ConfigDict, GetPydanticSchema, TypeAdapter
    from pydantic.errors import (
        PydanticSchemaGenerationError,
        PydanticUndefinedAnnotation,
        PydanticUserError,
    )

    config = ConfigDict(
        strict=strict,
        extra=extra,
        allow_inf_nan=False,
        use_attribute_docstrings=describe,
        val_json_bytes="base64",
        ser_json_bytes="base64",
    )

    # pydantic refuses a config for a dataclass, but inherits one from an annotation around it.
    def inner(_source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(target)

    def build(attempts: int) -> TypeAdapter[Any]:
        try:
            adapter = TypeAdapter[Any](Annotated[Any, GetPydanticSchema(inner)], config=config)
        except SystemError:
            if attempts > 1:
                return build(attempts - 1)
            raise
        adapter.rebuild()  # does nothing, or raises for a name that cannot be resolved
        return adapter

    try:
        with _building:
            return build(_ATTEMPTS)
    except PydanticUndefinedAnnotation as error:
        raise TypeError(
            f"{_name(target)}: the annotation {error.name!r} cannot be resolved; "
            "define it at module level, where the class is defined"
        ) from error
    except PydanticSchemaGenerationError as error:
        culprit = str(error).partition(" schema for ")[2].partition(". Set ")[0]
        raise TypeError(
            f"{_name(target)}: {culprit} has no JSON form; use plain data, an enum or a dataclass"
        ) from error
    except PydanticUserError as error:
        raise TypeError(f"{_name(target)}: {error.message}") from error


def _core_config(extra: Extra, strict: bool) -> dict[str, object]:
    # Dataclasses have this already; it is for types around them, as in list[Out].
    return {
        "strict": strict,
        "extra_fields_behavior": extra,
        "allow_inf_nan": False,
        "val_json_bytes": "base64",
    }


@dataclasses.dataclass(frozen=True, slots=True)
class NoArguments:
    """The arguments of a tool without parameters: an empty object."""


def _parse_none(validate: Callable[[object], Any], data: object) -> None:
    validate(data)


def _plain(value: object) -> object:
    """Convert persistent maps, views and other sequences, which pydantic cannot write."""
    if isinstance(value, Mapping):
        return dict(cast("Mapping[object, object]", value))
    if isinstance(value, AbstractSet | Sequence):
        return list(cast("Iterable[object]", value))
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} has no JSON form")


def _is_dataclass_type(target: object) -> bool:
    return isinstance(target, type) and dataclasses.is_dataclass(target)


def _name(target: object) -> str:
    return target.__qualname__ if isinstance(target, type) else str(target).replace("typing.", "")


# JSON schemas for models


def schema(target: Any) -> dict[str, Any]:
    """Return a new JSON schema of the data that ``parse(target, …)`` accepts.

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
        full = adapter_for(target, describe=True).json_schema(schema_generator=_generator())
    except PydanticInvalidForJsonSchema as error:
        raise TypeError(f"{target!r} has no JSON schema: {error.message}") from error
    return _with_top_inlined(full)


@lru_cache(maxsize=1)
def _generator() -> type[GenerateJsonSchema]:
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def dataclass_schema(self, schema: Any) -> dict[str, Any]:
            found = super().dataclass_schema(schema)
            found.pop("title", None)
            found["additionalProperties"] = False  # which older pydantic does not say
            if text := _own_docstring(schema["cls"]):
                found["description"] = text
            for name, text in _annotated_texts(schema["cls"]).items():
                if name in found.get("properties", {}):
                    found["properties"][name].setdefault("description", text)
            return found

        def enum_schema(self, schema: Any) -> dict[str, Any]:
            found = super().enum_schema(schema)
            found.pop("title", None)
            return found

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

        def field_is_present(self, field: Any) -> bool:
            return field.get("init", True) and super().field_is_present(field)

        def get_default_value(self, schema: Any) -> Any:
            # An empty list is a default worth showing; a clock or a random id is not.
            if schema.get("default_factory") in (list, dict, tuple, set, frozenset):
                return schema["default_factory"]()
            return super().get_default_value(schema)

        def emit_warning(self, kind: Any, detail: str) -> None:
            """Leave out a default that has no JSON form, without a warning."""

    return Generator


def _own_docstring(cls: type) -> str:
    """Return the docstring of a dataclass, but not the signature generated for it."""
    text = vars(cls).get("__doc__") or ""
    return "" if text.startswith(f"{cls.__name__}(") else inspect.cleandoc(text)


def _annotated_texts(cls: type) -> dict[str, str]:
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError:  # pydantic found the name elsewhere
        hints = {field.name: field.type for field in dataclasses.fields(cls)}
    texts: dict[str, str] = {}
    for name, hint in hints.items():
        metadata = cast("tuple[object, ...]", getattr(hint, "__metadata__", ()))
        text = next((entry for entry in metadata if isinstance(entry, str)), None)
        if text is not None:
            texts[name] = text
    return texts


def _with_top_inlined(full: dict[str, Any]) -> dict[str, Any]:
    """Expand a recursive type at the top: providers require an object there, not a reference."""
    if "$ref" not in full:
        return full
    name = full["$ref"].removeprefix("#/$defs/")
    return {**copy.deepcopy(full["$defs"][name]), "$defs": full["$defs"]}
