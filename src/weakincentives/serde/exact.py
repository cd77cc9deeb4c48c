"""Exact snapshots: any plain value as JSON data, and the equal value back in another process.

Values that JSON can express are written as they are. Everything else is an object whose key
``"$"`` names its kind::

    (1, 2)            {"$": "tuple", "items": [1, 2]}
    Colour.RED        {"$": "enum", "type": "app.paint:Colour", "name": "RED"}
    Step("read")      {"$": "dataclass", "type": "app.plan:Step", "fields": {"title": "read"}}

The data may come from outside: thawing imports no module that the data names and calls no
constructor of the types it names (a dataclass gets its fields set, an enum member is looked up),
and it refuses every other type.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime as dt
import hashlib
import json
import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, Flag
from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias, TypeVar, cast, get_origin

from rpds import HashTrieMap, HashTrieSet

from weakincentives.errors import SnapshotError

T = TypeVar("T")

Known: TypeAlias = dict[str, type[Any]]
"""Classes by name: those passed in, and those found since."""
_Frozen: TypeAlias = dict[str, Any]
_Reader: TypeAlias = Callable[[_Frozen, Known], Any]

# Beyond it other JSON readers round; Python's own refuses numbers of more than 4300 digits.
_SAFE_INT = 2**53
_MAX_STEPS = 20
"""How deep a problem is followed into a value to name its place: each step converts it again."""


def freeze(value: object) -> Any:
    """Return ``value`` as JSON data that keeps every runtime type.

    A dataclass field with ``metadata={"transient": True}`` is left out, and gets its default again
    when the value is thawed.
    """
    try:
        return _freeze(value)
    except RecursionError:
        raise SnapshotError(
            f"Cannot freeze {type(value).__qualname__}: it contains itself, or is nested too deeply"
        ) from None
    except SnapshotError as error:
        raise SnapshotError(f"Cannot freeze {_place(value, _freeze, _parts)}: {error}") from None


def thaw(data: object, *, types: Iterable[Any] = ()) -> Any:
    """Return the value that ``freeze`` wrote as ``data``.

    A dataclass or enum is looked up among ``types``, then by its name in the modules imported so
    far. A SnapshotError names what is missing or does not fit.
    """
    known: Known = {}
    for each in types:
        origin = get_origin(each) or each
        if not isinstance(origin, type):
            raise TypeError(f"types= takes classes, got {each!r}")
        known[_type_name(origin)] = origin
    try:
        return _thaw(data, known)
    except RecursionError:
        raise SnapshotError("Cannot thaw data that is nested too deeply") from None
    except SnapshotError as error:
        place = _place(data, lambda part: _thaw(part, known), _frozen_parts)
        raise SnapshotError(f"Cannot thaw {place}: {error}") from error


def json_of(text: bytes) -> Any:
    """Return what a line of JSON says; twice as fast as ``json.loads`` alone."""
    from pydantic_core import from_json

    try:
        return from_json(text, cache_strings="all")  # names of types are values
    except ValueError:  # half a surrogate pair, or nested too deeply for it, for example
        return json.loads(text)


def plain(value: Any) -> object:
    """Return a value without its type names, for people and machines to read."""
    if isinstance(value, list):
        return [plain(each) for each in cast("list[Any]", value)]
    if isinstance(value, StoredBytes):
        return f"sha256 {value.sha256}"
    if not isinstance(value, dict):
        return value
    data = cast("dict[str, Any]", value)
    if "$" not in data:
        return {key: plain(each) for key, each in data.items()}
    if "fields" in data:
        return {key: plain(each) for key, each in data["fields"].items()}
    if "items" in data:
        return [plain(each) for each in data["items"]]
    if "pairs" in data:
        return {str(plain(key)): plain(each) for key, each in data["pairs"]}
    if data["$"] == "str":  # it has half a surrogate pair, shown as an escape
        text = base64.b64decode(data["base64"]).decode("utf-8", "surrogatepass")
        return text.encode("utf-8", "backslashreplace").decode()
    for key in ("name", "text", "value", "base64", "hex"):
        if key in data:
            return plain(data[key])
    return json.dumps(data)


def _place(
    value: object,
    convert: Callable[[object], object],
    parts: Callable[[Any], Iterator[tuple[str, object]]],
) -> str:
    """Return the path of the innermost part that cannot be converted: ``value.steps[0].title``."""
    place = "value"
    for _ in range(_MAX_STEPS):
        for step, part in parts(value):
            try:
                convert(part)
            except SnapshotError:
                place, value = place + step, part
                break
        else:
            break
    return place


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        yield from ((f".{name}", getattr(value, name, None)) for name in names)
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            yield f" key {reprlib.repr(key)}", key
            yield f"[{reprlib.repr(key)}]", item
    elif type(value) in _WRITERS and isinstance(value, Iterable) and not isinstance(value, _TEXT):
        items = cast("Iterable[object]", value)
        yield from ((f"[{at}]", item) for at, item in enumerate(items))


def _frozen_parts(data: object) -> Iterator[tuple[str, object]]:
    if isinstance(data, dict):
        pairs = cast("dict[object, object]", data).items()
        yield from ((f"[{key!r}]", item) for key, item in pairs)
    elif isinstance(data, list):
        items = cast("list[object]", data)
        yield from ((f"[{at}]", item) for at, item in enumerate(items))


# Writing


def _freeze(value: Any) -> Any:
    kind = cast("type[Any]", type(value))
    if (write := _WRITERS.get(kind)) is not None:
        return write(value)
    if isinstance(value, Enum):
        return _freeze_enum(value)
    if dataclasses.is_dataclass(kind):
        return _freeze_dataclass(value)
    if (tag := _text_tags().get(kind)) is not None:
        return {"$": tag, "text": _freeze_str(str(value))}
    raise SnapshotError(
        f"{kind.__module__}.{kind.__qualname__} has no exact JSON form; use plain data, an enum or "
        'a dataclass, or mark the dataclass field with metadata={"transient": True}'
    )


def _as_is(value: object) -> object:
    return value


def _freeze_int(value: int) -> Any:
    return value if -_SAFE_INT <= value <= _SAFE_INT else {"$": "int", "hex": hex(value)}


def _freeze_float(value: float) -> Any:
    return value if math.isfinite(value) else {"$": "float", "text": repr(value)}


def _freeze_str(value: str) -> Any:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which UTF-8 cannot carry
        return {"$": "str", "base64": _to_base64(value.encode("utf-8", "surrogatepass"))}
    return value


def _freeze_list(value: Iterable[object]) -> list[Any]:
    return [_freeze(item) for item in value]


def _freeze_set(tag: str, value: Iterable[object]) -> Any:
    # Sorted, so that equal sets are equal text whatever the hash seed of the process.
    return {"$": tag, "items": sorted(map(_freeze, value), key=repr)}


def _freeze_dict(value: Mapping[object, object]) -> Any:
    pairs = [[_freeze(key), _freeze(item)] for key, item in value.items()]
    if all(type(key) is str and key != "$" for key, _ in pairs):
        return dict(pairs)
    return {"$": "dict", "pairs": pairs}


def _freeze_map(value: HashTrieMap[object, object]) -> Any:
    pairs = [[_freeze(key), _freeze(item)] for key, item in value.items()]
    return {"$": "HashTrieMap", "pairs": sorted(pairs, key=repr)}


def _freeze_moment(value: dt.datetime | dt.time) -> Any:
    from zoneinfo import ZoneInfo

    frozen: dict[str, Any] = {"$": "datetime" if isinstance(value, dt.datetime) else "time"}
    zone = value.tzinfo
    if isinstance(zone, ZoneInfo) and zone.key is not None:  # pyright: ignore[reportUnnecessaryComparison]
        frozen["zone"] = zone.key
        value = value.replace(tzinfo=None)
    elif zone is not None and zone.utcoffset(None) is None:
        # Not fixed, so the offset of this moment is not enough.
        raise SnapshotError(
            f"the time zone {zone!r} has no name to find it by; use datetime.timezone, or a "
            "zoneinfo.ZoneInfo made from a key"
        )
    frozen["text"] = value.isoformat()
    if value.fold:
        frozen["fold"] = 1
    return frozen


def _freeze_enum(value: Enum) -> Any:
    name = _type_name(type(value))
    if isinstance(value, Flag):  # a combination of members has no name of its own
        return {"$": "flag", "type": name, "value": _freeze(value.value)}
    return {"$": "enum", "type": name, "name": value.name}


def _freeze_dataclass(value: Any) -> Any:
    layout = _layout(cast("type[Any]", type(value)))
    try:
        fields = {name: _freeze(getattr(value, name)) for name in layout.kept}
    except AttributeError as error:
        raise SnapshotError(f"the field {error.name} is not set") from None
    return {"$": "dataclass", "type": layout.name, "fields": fields}


_TEXT = (str, bytes)
_WRITERS: dict[type, Callable[[Any], Any]] = {
    type(None): _as_is,
    bool: _as_is,
    int: _freeze_int,
    float: _freeze_float,
    str: _freeze_str,
    bytes: lambda value: {"$": "bytes", "base64": _to_base64(value)},
    list: _freeze_list,
    tuple: lambda value: {"$": "tuple", "items": _freeze_list(value)},
    dict: _freeze_dict,
    set: partial(_freeze_set, "set"),
    frozenset: partial(_freeze_set, "frozenset"),
    HashTrieSet: partial(_freeze_set, "HashTrieSet"),
    HashTrieMap: _freeze_map,
    dt.datetime: _freeze_moment,
    dt.time: _freeze_moment,
    dt.date: lambda value: {"$": "date", "text": value.isoformat()},
    dt.timedelta: lambda value: {
        "$": "timedelta",
        "parts": [value.days, value.seconds, value.microseconds],
    },
}

_TEXT_TYPES = {
    "Decimal": "decimal",
    "UUID": "uuid",
    "Path": "pathlib",
    "PurePosixPath": "pathlib",
    "PureWindowsPath": "pathlib",
}
"""Types written as text, with their modules: slow to import, and seldom needed."""


def _text_type(tag: str) -> type[Any]:
    return getattr(import_module(_TEXT_TYPES[tag]), tag)


@lru_cache(maxsize=1)
def _text_tags() -> dict[type, str]:
    path: object = _text_type("Path")()  # of the class that this system has
    return {**{_text_type(tag): tag for tag in _TEXT_TYPES}, type(path): "Path"}


# Reading


@dataclasses.dataclass(frozen=True, slots=True)
class StoredBytes:
    """Stands in frozen data for bytes that are stored elsewhere; thawing reads them."""

    place: str
    sha256: str
    load: Callable[[], bytes]

    def read(self) -> bytes:
        try:
            data = self.load()
        except OSError as error:
            raise SnapshotError(f"{self.place} cannot be read: {error}") from error
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise SnapshotError(f"{self.place} is damaged: its digest is wrong")
        return data


_LEAVES = frozenset({type(None), bool, int, float, str})
"""Read as they are. Most values are leaves, so callers check before they call ``_thaw``."""


def _thaw(data: Any, known: Known) -> Any:
    kind = cast("type[Any]", type(data))
    if kind in _LEAVES:
        return data
    if kind is list:
        return [item if type(item) in _LEAVES else _thaw(item, known) for item in data]
    if kind is StoredBytes:
        return data.read()
    if kind is not dict:
        raise SnapshotError(f"{kind.__qualname__} is not JSON data")
    if "$" not in data:
        return {
            key: item if type(item) in _LEAVES else _thaw(item, known) for key, item in data.items()
        }
    tag = data["$"]
    read = _READERS.get(tag) if isinstance(tag, str) else None
    if read is None:
        raise SnapshotError(f"nothing is frozen as {tag!r}")
    try:
        return read(data, known)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise SnapshotError(f"not a frozen {tag} ({type(error).__name__}: {error})") from error


def _from_items(make: Callable[[list[Any]], Any]) -> _Reader:
    return lambda data, known: make(_thaw(_checked(list, data["items"]), known))


def _from_pairs(make: Callable[[list[tuple[Any, Any]]], Any]) -> _Reader:
    return lambda data, known: make(
        [(_thaw(key, known), _thaw(item, known)) for key, item in data["pairs"]]
    )


def _from_text(make: Callable[[str], Any]) -> _Reader:
    return lambda data, known: make(_checked(str, _thaw(data["text"], known)))


def _trie_set(items: list[Any]) -> HashTrieSet[Any]:
    _check_trie_keys(items)
    return HashTrieSet(items)


def _trie_map(pairs: list[tuple[Any, Any]]) -> HashTrieMap[Any, Any]:
    _check_trie_keys(key for key, _ in pairs)
    return HashTrieMap(pairs)


def _check_trie_keys(keys: Iterable[Any]) -> None:
    """Refuse keys that make rpds panic: equal hashes, but not comparable, as 0 and "".

    It takes the NotImplemented of their ``__eq__`` for an answer, and the panic is no Exception.
    """
    by_hash: dict[int, list[Any]] = {}
    for key in keys:
        others = by_hash.setdefault(hash(key), [])
        for other in others:
            if NotImplemented in (key.__eq__(other), other.__eq__(key)):
                raise TypeError(f"{other!r} and {key!r} cannot be keys of one persistent map")
        others.append(key)


def _thaw_moment(kind: type[Any], data: _Frozen, _known: Known) -> dt.datetime | dt.time:
    value = kind.fromisoformat(_checked(str, data["text"]))
    if "zone" in data:
        from zoneinfo import ZoneInfo

        value = value.replace(tzinfo=ZoneInfo(_checked(str, data["zone"])))
    return value.replace(fold=data.get("fold", 0))


def _thaw_enum(data: _Frozen, known: Known) -> Enum:
    return _find(data["type"], known, Enum).__members__[data["name"]]


def _thaw_flag(data: _Frozen, known: Known) -> Enum:
    found = _find(data["type"], known, Flag)
    value = _checked(int, _thaw(data["value"], known))
    flag = found(value)
    if flag.value != value:  # Python 3.11.2 takes a value that the flag does not have for none
        raise ValueError(f"{value} is not a {found.__name__}")
    return flag


def _thaw_dataclass(data: _Frozen, known: Known) -> Any:
    found = _find(data["type"], known)
    layout = _layout(found)
    fields = cast("dict[str, Any]", _checked(dict, data["fields"]))
    added: Iterable[str] = ()
    if fields.keys() != layout.names:
        for retired in getattr(found, "__retired_fields__", ()):
            fields.pop(retired, None)
        added = layout.defaults.keys() - fields.keys()  # fields that are newer than the data
        given = frozenset({*fields, *added})
        if given != layout.names:
            missing = [f"lacks {name}" for name in layout.kept if name not in given]
            unknown = [
                f"has {name}, which the class lacks" for name in fields.keys() - layout.names
            ]
            raise SnapshotError(
                f"the fields of {data['type']} have changed; the data "
                f"{' and '.join(missing + sorted(unknown))}"
            )
    value = object.__new__(found)
    for name, item in fields.items():
        if type(item) not in _LEAVES:
            item = _thaw(item, known)
        object.__setattr__(value, name, item)
    for name in added:
        object.__setattr__(value, name, layout.defaults[name]())
    for name, default in layout.transient:
        object.__setattr__(value, name, default())
    return value


_READERS: dict[str, _Reader] = {
    "int": lambda data, known: int(_checked(str, data["hex"]), 16),
    "float": _from_text(float),
    "str": lambda data, known: _from_base64(data["base64"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda data, known: _from_base64(data["base64"]),
    "tuple": _from_items(tuple),
    "dict": _from_pairs(dict),
    "set": _from_items(set),
    "frozenset": _from_items(frozenset),
    "HashTrieSet": _from_items(_trie_set),
    "HashTrieMap": _from_pairs(_trie_map),
    "datetime": partial(_thaw_moment, dt.datetime),
    "time": partial(_thaw_moment, dt.time),
    "date": _from_text(dt.date.fromisoformat),
    "timedelta": lambda data, known: dt.timedelta(*data["parts"]),
    **{tag: _from_text(lambda text, tag=tag: _text_type(tag)(text)) for tag in _TEXT_TYPES},
    "enum": _thaw_enum,
    "flag": _thaw_flag,
    "dataclass": _thaw_dataclass,
}


# Types


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    name: str
    kept: tuple[str, ...]
    names: frozenset[str]
    transient: tuple[tuple[str, Callable[[], object]], ...]
    """The fields left out, each with a function that makes its default."""
    defaults: Mapping[str, Callable[[], object]]
    """Of the other fields."""


@lru_cache(maxsize=1024)
def _layout(cls: type[Any]) -> _Layout:
    name = _type_name(cls)
    for base in cls.__mro__[:-1]:
        if not base.__flags__ & 1 << 9:  # Py_TPFLAGS_HEAPTYPE: the others are made in C
            raise SnapshotError(f"{name} is a {base.__name__}, whose content is not in its fields")
    kept: list[str] = []
    transient: list[tuple[str, Callable[[], object]]] = []
    defaults: dict[str, Callable[[], object]] = {}
    for field in dataclasses.fields(cls):
        default = field.default_factory
        if default is dataclasses.MISSING and field.default is not dataclasses.MISSING:
            default = partial(_as_is, field.default)
        if not field.metadata.get("transient"):
            kept.append(field.name)
            if default is not dataclasses.MISSING:
                defaults[field.name] = default
        elif default is not dataclasses.MISSING:
            transient.append((field.name, default))
        else:
            raise SnapshotError(f"the transient field {field.name} of {name} has no default")
    return _Layout(name, tuple(kept), frozenset(kept), tuple(transient), defaults)


def _type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def current_name(name: str) -> str:
    """Return the present name of a class, given its name in data that may be older."""
    module, colon, qualname = name.partition(":")
    return f"{_MOVED.get(module, module)}{colon}{qualname}"


_MOVED = {
    "weakincentives.contrib.tools.browser": "weakincentives.contrib.tools.web",
    "weakincentives.contrib.tools.digest_facts": "weakincentives.contrib.tools.digest",
    "weakincentives.contrib.tools.podman": "weakincentives.contrib.tools.sandbox.section",
    "weakincentives.contrib.tools.mounts": "weakincentives.contrib.tools.suite",
    "weakincentives.contrib.tools.vfs_mounts": "weakincentives.contrib.tools.suite",
    "weakincentives.contrib.tools.vfs_values": "weakincentives.contrib.tools.file_values",
    "weakincentives.filesystem.protocol": "weakincentives.filesystem.paths",
    "weakincentives.prompt.tool_result": "weakincentives.tool_result",
    "weakincentives.prompt.visibility": "weakincentives.prompt.section",
    "weakincentives.runtime.events": "weakincentives.session.events",
    "weakincentives.runtime.memory": "weakincentives.session.memory",
    "weakincentives.runtime.session": "weakincentives.session.session",
}
"""Removed modules, with the module that has their classes now."""


def _find(name: object, known: Known, kind: Any = None) -> Any:
    """Return the dataclass of a name, or the class derived from ``kind``."""
    text = _checked(str, name)
    found = known.get(text) or _imported(text) or _imported(current_name(text))
    if found is None:
        raise SnapshotError(
            f"the type {text} is not known here; pass it in types=, or import its module first"
        )
    is_enum = issubclass(found, Enum)
    if not (issubclass(found, kind) if kind else dataclasses.is_dataclass(found) and not is_enum):
        raise SnapshotError(f"{text} is not {'a dataclass' if kind is None else kind.__name__}")
    known[text] = found
    return found


def _imported(name: str) -> type[Any] | None:
    """Look a class up without running any code: no import, no ``__getattr__``.

    The name may lead through classes and objects: a tool holds the class of its parameters.
    """
    module_name, _, qualname = name.partition(":")
    found: object = sys.modules.get(module_name)
    if not isinstance(found, ModuleType):
        return None
    # A lazy module loads itself when asked for anything, so not even its __dict__ is asked for.
    namespace = cast("Mapping[str, object]", object.__getattribute__(found, "__dict__"))
    for part in qualname.split("."):
        found = namespace.get(part)
        look_up = type if isinstance(found, type) else object
        try:
            namespace = look_up.__getattribute__(cast("Any", found), "__dict__")
        except AttributeError:  # nothing there, or nothing in it
            return None
    return cast("type[Any]", found) if isinstance(found, type) else None


def _checked(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _to_base64(value: bytes) -> str:
    return binascii.b2a_base64(value, newline=False).decode()


def _from_base64(value: object) -> bytes:
    return binascii.a2b_base64(_checked(str, value), strict_mode=True)
