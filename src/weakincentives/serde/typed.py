"""JSON to dataclasses and back, on pydantic's core.

pydantic takes about 95 ms to import, so it is imported when the first type is built, not here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache, partial
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
    overload,
)

from weakincentives.errors import ParseError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
Extra = Literal["forbid", "ignore"]

_TEXT = (str, bytes, bytearray)
_NO_JSON_FORM = " has no JSON form"

# pydantic parses the source of a class for its docstrings, and before Python 3.11.9 and 3.12.3 two
# threads that parse Python at the same time can fail for no reason (SystemError). So one of ours
# builds at a time, and tries again when a thread of somebody else was in the way.
_building = threading.RLock()
_ATTEMPTS = 5


@overload
def parse(target: type[T], data: object, *, extra: Extra = "forbid") -> T: ...
@overload
def parse(target: object, data: object, *, extra: Extra = "forbid") -> Any: ...
def parse(target: Any, data: object, *, extra: Extra = "forbid") -> Any:
    """Return ``data`` as a value of the type ``target``, or raise a ParseError with every problem.

    ``str`` and ``bytes`` are always JSON text; anything else is taken as the JSON it would be
    written as. Nothing is converted on the way: ``"10"``, ``3.0`` and ``True`` are not an ``int``.
    An instance of a dataclass ``target`` comes back as it is. Values for fields with ``init=False``
    are ignored, since the class computes them. What ``__post_init__`` raises besides a ValueError
    (or a failed assert) is the developer's bug, and goes through.
    """
    return validator_for(target, extra)(data)


# Bounded, so that classes made on the fly do not pile up. Weak keys would let go of them at once,
# but are slower to look up, and an alias such as Box[int] lives no longer than the call.
@lru_cache(maxsize=1024)
def validator_for(target: Any, extra: Extra = "forbid") -> Callable[[object], Any]:
    """Return what ``parse`` runs for ``target``: a function from data to a value."""
    if target is None or target is type(None):
        return partial(_parse_none, validator_for(NoArguments | None, extra))

    from pydantic_core import SchemaValidator, ValidationError, to_json

    from weakincentives.serde import problems

    adapter = adapter_for(target, extra)
    core = problems.labelled(cast("problems.Node", adapter.core_schema))
    name = _name(target)
    validate = SchemaValidator(cast("Any", core), cast("Any", _core_config(extra))).validate_json
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
            except Exception as error:  # an object in the data may raise anything at all
                raise _not_json(name, error) from error
        try:
            return validate(text)
        except ValidationError as error:
            computed = problems.computed_keys(core, error)
            if not computed:
                raise misfit(error) from error
        try:
            return validate(write(problems.without(text, computed)))
        except ValidationError as error:
            raise misfit(error) from error

    def misfit(error: ValidationError) -> ParseError:
        return ParseError(f"Data does not fit {name}", problems.explain(core, error))

    return validator


def dump(value: object) -> Any:
    """Return ``value`` as dicts, lists, strings and numbers that ``parse`` reads back.

    Bytes become base64, dates and durations ISO 8601, enum members their values. A float that is
    not finite stays a float, which JSON has no word for and ``parse`` refuses.
    """
    from pydantic_core import to_jsonable_python

    try:
        return to_jsonable_python(
            value, bytes_mode="base64", inf_nan_mode="constants", fallback=_plain
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"Cannot dump {type(value).__qualname__}: {error}") from error


@lru_cache(maxsize=1024)
def adapter_for(target: Any, extra: Extra = "forbid") -> TypeAdapter[Any]:
    """Return pydantic's adapter for ``target``; a TypeError names what it cannot handle."""
    from pydantic import ConfigDict, GetPydanticSchema, TypeAdapter
    from pydantic.errors import (
        PydanticSchemaGenerationError,
        PydanticUndefinedAnnotation,
        PydanticUserError,
    )

    config = ConfigDict(
        strict=True,
        extra=extra,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        val_json_bytes="base64",
        ser_json_bytes="base64",
    )

    # pydantic refuses a config beside a dataclass, but hands one down from an annotation around it.
    def inner(_source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(target)

    def build() -> TypeAdapter[Any]:
        adapter = TypeAdapter[Any](Annotated[Any, GetPydanticSchema(inner)], config=config)
        adapter.rebuild()  # does nothing, or raises for a name that cannot be resolved
        return adapter

    try:
        with _building:
            return _attempted(build)
    except PydanticUndefinedAnnotation as error:
        raise TypeError(
            f"{_name(target)}: the annotation {error.name!r} cannot be resolved; "
            "define it at module level, where the class is defined"
        ) from error
    except PydanticSchemaGenerationError as error:
        raise TypeError(
            f"{_culprit(target)}{_NO_JSON_FORM}; use plain data, an enum or a dataclass"
        ) from error
    except PydanticUserError as error:
        raise TypeError(f"{_name(target)}: {error.message}") from error


def _attempted(build: Callable[[], T]) -> T:
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(SystemError):
            return build()
    return build()


def _core_config(extra: Extra) -> dict[str, object]:
    # Dataclasses carry this already; it is for what stands around them, as in list[Out].
    return {
        "strict": True,
        "extra_fields_behavior": extra,
        "allow_inf_nan": False,
        "val_json_bytes": "base64",
    }


@dataclasses.dataclass(frozen=True, slots=True)
class NoArguments:
    """What a tool without parameters takes: an empty object."""


def _parse_none(validate: Callable[[object], Any], data: object) -> None:
    validate(data)


def _plain(value: object) -> object:
    """Turn what pydantic cannot write into something it can: persistent maps, views, sequences."""
    if isinstance(value, Mapping):
        return dict(cast("Mapping[object, object]", value))
    if isinstance(value, AbstractSet | Sequence):
        return list(cast("Iterable[object]", value))
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}{_NO_JSON_FORM}")


def _not_json(name: str, error: Exception) -> ParseError:
    reason = str(error).removeprefix("Error serializing to JSON: ")
    return ParseError(f"Data does not fit {name}", {"": f"Cannot be written as JSON: {reason}"})


def _is_dataclass_type(target: object) -> bool:
    return isinstance(target, type) and dataclasses.is_dataclass(target)


def _name(target: object) -> str:
    return target.__qualname__ if isinstance(target, type) else str(target).replace("typing.", "")


def _culprit(target: Any) -> str:
    """Name the innermost part that cannot be built, by trying each on its own."""
    parts: list[tuple[str, Any]] = [("", part) for part in get_args(target)]
    if _is_dataclass_type(target):
        hints = get_type_hints(target, include_extras=True)
        names = [field.name for field in dataclasses.fields(target)]
        parts = [(f"{_name(target)}, field {name}: ", hints[name]) for name in names]
    for where, part in parts:
        try:
            adapter_for(part)
        except TypeError as error:
            found = str(error).partition(_NO_JSON_FORM)[0]
            return found if ", field " in found else where + found
    return _name(target)
