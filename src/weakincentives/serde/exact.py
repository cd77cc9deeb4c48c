"""Exact snapshots: any plain value as JSON data, and the equal value back in another process.

What JSON has a word for is written as it is. Everything else is an object with the key ``"$"``,
which says what it is::

    (1, 2)            {"$": "tuple", "items": [1, 2]}
    Colour.RED        {"$": "enum", "type": "app.paint:Colour", "name": "RED"}
    Step("read")      {"$": "dataclass", "type": "app.plan:Step", "fields": {"title": "read"}}

The data may come from outside: thawing imports no module of its choosing and calls no constructor
of the types it names (a dataclass gets its fields set, an enum member is looked up), and it refuses
every other type.
"""

from __future__ import annotations

import binascii
import dataclasses
import datetime as dt
import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, Flag
from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias, TypeVar, cast, get_origin

from rpds import HashTrieMap, HashTrieSet

from weakincentives.errors import SnapshotError

T = TypeVar("T")
Where: TypeAlias = "tuple[Where, str, object] | None"
"""The way into a value, last step first: cheap to extend, and only spelled out for an error."""

Known: TypeAlias = dict[str, type[Any]]
"""Classes by their names: those that were passed in, and those that were found since."""

# Beyond it other JSON readers round; Python's own refuses numbers of more than 4300 digits.
_SAFE_INT = 2**53


def freeze(value: object) -> Any:
    """Return ``value`` as JSON data that keeps every runtime type.

    A dataclass field with ``metadata={"transient": True}`` is left out, and gets its default again
    when the value is thawed.
    """
    try:
        return _freeze(value, None)
    except RecursionError:
        raise SnapshotError(
            f"Cannot freeze {type(value).__qualname__}: it contains itself, or is nested too deeply"
        ) from None


def thaw(data: object, *, types: Iterable[Any] = ()) -> Any:
    """Return the value that ``freeze`` wrote as ``data``.

    A dataclass or enum is looked for among ``types``, then by its name in the modules imported so
    far. A SnapshotError names what is missing or does not fit.
    """
    known: Known = {}
    for each in types:
        origin = get_origin(each) or each
        if not isinstance(origin, type):
            raise TypeError(f"types= takes classes, got {each!r}")
        known[_type_name(origin)] = origin
    try:
        return _thaw(data, None, known)
    except RecursionError:
        raise SnapshotError("Cannot thaw data that is nested too deeply") from None


# Writing


def _freeze(value: Any, where: Where) -> Any:
    kind = cast("type[Any]", type(value))
    if (write := _WRITERS.get(kind)) is not None:
        return write(value, where)
    if isinstance(value, Enum):
        return _freeze_enum(value, where)
    if dataclasses.is_dataclass(kind):
        return _freeze_dataclass(value, where)
    if (tag := _text_tags().get(kind)) is not None:
        return {"$": tag, "text": _freeze_str(str(value), where)}
    raise SnapshotError(
        f"Cannot freeze {_spelled(where)}: {kind.__module__}.{kind.__qualname__} has no exact JSON "
        "form; use plain data, an enum or a dataclass, or mark the dataclass field with "
        'metadata={"transient": True}'
    )


def _as_is(value: object, _where: Where) -> object:
    return value


def _freeze_int(value: int, _where: Where) -> Any:
    return value if -_SAFE_INT <= value <= _SAFE_INT else {"$": "int", "hex": hex(value)}


def _freeze_float(value: float, _where: Where) -> Any:
    return value if math.isfinite(value) else {"$": "float", "text": repr(value)}


def _freeze_str(value: str, _where: Where) -> Any:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which UTF-8 cannot carry
        return {"$": "str", "base64": _to_base64(value.encode("utf-8", "surrogatepass"))}
    return value


def _freeze_bytes(value: bytes, _where: Where) -> Any:
    return {"$": "bytes", "base64": _to_base64(value)}


def _freeze_list(value: Iterable[object], where: Where) -> list[Any]:
    return [_freeze(item, (where, "[{}]", at)) for at, item in enumerate(value)]


def _freeze_tuple(value: tuple[object, ...], where: Where) -> Any:
    return {"$": "tuple", "items": _freeze_list(value, where)}


def _set_writer(tag: str) -> Callable[[Any, Where], Any]:
    def write(value: Iterable[object], where: Where) -> Any:
        # Sorted, so that equal sets are equal text whatever the hash seed of the process.
        items = [_freeze(item, (where, "{{{}}}", item)) for item in value]
        return {"$": tag, "items": sorted(items, key=repr)}

    return write


def _freeze_dict(value: Mapping[object, object], where: Where) -> Any:
    pairs = _freeze_pairs(value, where)
    if all(type(key) is str and key != "$" for key, _ in pairs):
        return dict(pairs)
    return {"$": "dict", "pairs": [list(pair) for pair in pairs]}


def _freeze_map(value: HashTrieMap[object, object], where: Where) -> Any:
    pairs = sorted(_freeze_pairs(value, where), key=repr)
    return {"$": "HashTrieMap", "pairs": [list(pair) for pair in pairs]}


def _freeze_pairs(value: Mapping[object, object], where: Where) -> list[tuple[Any, Any]]:
    return [
        (_freeze(key, (where, " key {}", key)), _freeze(item, (where, "[{}]", key)))
        for key, item in value.items()
    ]


def _freeze_timedelta(value: dt.timedelta, _where: Where) -> Any:
    return {"$": "timedelta", "parts": [value.days, value.seconds, value.microseconds]}


def _freeze_date(value: dt.date, _where: Where) -> Any:
    return {"$": "date", "text": value.isoformat()}


def _freeze_moment(value: dt.datetime | dt.time, where: Where) -> Any:
    frozen: dict[str, Any] = {"$": "datetime" if isinstance(value, dt.datetime) else "time"}
    zone = value.tzinfo
    if zone is not None and type(zone) is not dt.timezone:
        if (key := _zone_key(zone)) is not None:
            frozen["zone"] = key
            value = value.replace(tzinfo=None)
        elif zone.utcoffset(None) is None:  # not fixed, so the offset of this moment is not enough
            raise SnapshotError(
                f"Cannot freeze {_spelled(where)}: the time zone {zone!r} has no name to find it "
                "by; use datetime.timezone, or a zoneinfo.ZoneInfo made from a key"
            )
    frozen["text"] = value.isoformat()
    if value.fold:
        frozen["fold"] = 1
    return frozen


def _zone_key(zone: dt.tzinfo) -> str | None:
    from zoneinfo import ZoneInfo

    return zone.key if isinstance(zone, ZoneInfo) else None


def _freeze_enum(value: Enum, where: Where) -> Any:
    name = _type_name(type(value))
    if isinstance(value, Flag):  # a combination of members has no name of its own
        return {"$": "flag", "type": name, "value": _freeze(value.value, where)}
    return {"$": "enum", "type": name, "name": value.name}


def _freeze_dataclass(value: Any, where: Where) -> Any:
    layout = _layout(cast("type[Any]", type(value)))
    fields: dict[str, Any] = {}
    for name in layout.kept:
        step = (where, ".{}", name)
        try:
            item = getattr(value, name)
        except AttributeError:
            raise SnapshotError(f"Cannot freeze {_spelled(step)}: the field is not set") from None
        fields[name] = _freeze(item, step)
    return {"$": "dataclass", "type": layout.name, "fields": fields}


_WRITERS: dict[type, Callable[[Any, Where], Any]] = {
    type(None): _as_is,
    bool: _as_is,
    int: _freeze_int,
    float: _freeze_float,
    str: _freeze_str,
    bytes: _freeze_bytes,
    list: _freeze_list,
    tuple: _freeze_tuple,
    dict: _freeze_dict,
    set: _set_writer("set"),
    frozenset: _set_writer("frozenset"),
    HashTrieSet: _set_writer("HashTrieSet"),
    HashTrieMap: _freeze_map,
    dt.datetime: _freeze_moment,
    dt.time: _freeze_moment,
    dt.date: _freeze_date,
    dt.timedelta: _freeze_timedelta,
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


_LEAVES = frozenset({type(None), bool, int, float, str})
"""Read as they are. Most of what is read: so whoever holds some looks before it calls."""


def _thaw(data: Any, where: Where, known: Known) -> Any:
    kind = cast("type[Any]", type(data))
    if kind in _LEAVES:
        return data
    if kind is list:
        return [
            item if type(item) in _LEAVES else _thaw(item, (where, "[{}]", at), known)
            for at, item in enumerate(data)
        ]
    if kind is not dict:
        raise SnapshotError(f"Cannot thaw {_spelled(where)}: {kind.__qualname__} is not JSON data")
    if "$" not in data:
        return {key: _thaw(item, (where, "[{}]", key), known) for key, item in data.items()}
    tag = data["$"]
    read = _READERS.get(tag) if isinstance(tag, str) else None
    if read is None:
        raise SnapshotError(f"Cannot thaw {_spelled(where)}: nothing is frozen as {tag!r}")
    try:
        return read(data, where, known)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise SnapshotError(
            f"Cannot thaw {_spelled(where)}: not a frozen {tag} ({type(error).__name__}: {error})"
        ) from error


_Frozen: TypeAlias = dict[str, Any]
_Reader: TypeAlias = Callable[[_Frozen, Where, Known], Any]


def _items_reader(make: Callable[[list[Any]], Any]) -> _Reader:
    def read(data: _Frozen, where: Where, known: Known) -> Any:
        return make(_thaw(_checked(list, data["items"]), where, known))

    return read


def _pairs_reader(make: Callable[[list[tuple[Any, Any]]], Any]) -> _Reader:
    def read(data: _Frozen, where: Where, known: Known) -> Any:
        return make(
            [
                (_thaw(key, (where, " key {}", at), known), _thaw(item, (where, "[{}]", at), known))
                for at, (key, item) in enumerate(data["pairs"])
            ]
        )

    return read


def _trie_set(items: list[Any]) -> HashTrieSet[Any]:
    _check_trie_keys(items)
    return HashTrieSet(items)


def _trie_map(pairs: list[tuple[Any, Any]]) -> HashTrieMap[Any, Any]:
    _check_trie_keys(key for key, _ in pairs)
    return HashTrieMap(pairs)


def _check_trie_keys(keys: Iterable[Any]) -> None:
    """Refuse what makes rpds panic: keys of one hash that do not know each other, as 0 and "" do.

    It takes the NotImplemented of their ``__eq__`` for an answer, and the panic is no Exception.
    """
    by_hash: dict[int, list[Any]] = {}
    for key in keys:
        others = by_hash.setdefault(hash(key), [])
        for other in others:
            if NotImplemented in (key.__eq__(other), other.__eq__(key)):
                raise TypeError(f"{other!r} and {key!r} cannot be keys of one persistent map")
        others.append(key)


def _text_reader(make: Callable[[str], Any]) -> _Reader:
    def read(data: _Frozen, where: Where, known: Known) -> Any:
        return make(_checked(str, _thaw(data["text"], where, known)))

    return read


def _from_text(tag: str, text: str) -> Any:
    return _text_type(tag)(text)


def _thaw_int(data: _Frozen, _where: Where, _known: Known) -> int:
    return int(_checked(str, data["hex"]), 16)


def _thaw_str(data: _Frozen, _where: Where, _known: Known) -> str:
    return _from_base64(data["base64"]).decode("utf-8", "surrogatepass")


def _thaw_bytes(data: _Frozen, _where: Where, _known: Known) -> bytes:
    return _from_base64(data["base64"])


def _thaw_timedelta(data: _Frozen, _where: Where, _known: Known) -> dt.timedelta:
    days, seconds, microseconds = data["parts"]
    return dt.timedelta(days, seconds, microseconds)


def _moment_reader(make: Callable[[str], dt.datetime | dt.time]) -> _Reader:
    def read(data: _Frozen, _where: Where, _known: Known) -> dt.datetime | dt.time:
        value = make(_checked(str, data["text"]))
        if "zone" in data:
            from zoneinfo import ZoneInfo

            value = value.replace(tzinfo=ZoneInfo(_checked(str, data["zone"])))
        return value.replace(fold=data.get("fold", 0))

    return read


def _thaw_enum(data: _Frozen, where: Where, known: Known) -> Enum:
    found = _find(data["type"], where, known)
    if not issubclass(found, Enum):
        raise TypeError(f"{data['type']} is not an enum")
    return found.__members__[data["name"]]


def _thaw_flag(data: _Frozen, where: Where, known: Known) -> Enum:
    found = _find(data["type"], where, known)
    if not issubclass(found, Flag):
        raise TypeError(f"{data['type']} is not a flag")
    value = _checked(int, _thaw(data["value"], where, known))
    flag = found(value)
    if flag.value != value:  # Python 3.11.2 takes a value that the flag does not have for none
        raise ValueError(f"{value} is not a {found.__name__}")
    return flag


def _thaw_dataclass(data: _Frozen, where: Where, known: Known) -> Any:
    found = _find(data["type"], where, known)
    if issubclass(found, Enum):
        raise TypeError(f"{data['type']} is an enum")
    layout = _layout(found)
    fields = cast("dict[str, Any]", _checked(dict, data["fields"]))
    if fields.keys() != layout.names:
        for retired in getattr(found, "__retired_fields__", ()):
            fields.pop(retired, None)
    if fields.keys() != layout.names:
        missing = [f"lacks {name}" for name in layout.kept if name not in fields]
        unknown = [f"has {name}, which the class lacks" for name in fields.keys() - {*layout.kept}]
        raise SnapshotError(
            f"Cannot thaw {_spelled(where)}: the fields of {data['type']} have changed; the data "
            f"{' and '.join(missing + sorted(unknown))}"
        )
    value = object.__new__(found)
    for name, item in fields.items():
        if type(item) not in _LEAVES:
            item = _thaw(item, (where, ".{}", name), known)
        object.__setattr__(value, name, item)
    for name, default in layout.transient:
        object.__setattr__(value, name, default())
    return value


_READERS: dict[str, _Reader] = {
    "int": _thaw_int,
    "float": _text_reader(float),
    "str": _thaw_str,
    "bytes": _thaw_bytes,
    "tuple": _items_reader(tuple),
    "dict": _pairs_reader(dict),
    "set": _items_reader(set),
    "frozenset": _items_reader(frozenset),
    "HashTrieSet": _items_reader(_trie_set),
    "HashTrieMap": _pairs_reader(_trie_map),
    "datetime": _moment_reader(dt.datetime.fromisoformat),
    "time": _moment_reader(dt.time.fromisoformat),
    "date": _text_reader(dt.date.fromisoformat),
    "timedelta": _thaw_timedelta,
    **{tag: _text_reader(partial(_from_text, tag)) for tag in _TEXT_TYPES},
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
    """The fields left out, each with what makes its default."""


@lru_cache(maxsize=1024)
def _layout(cls: type[Any]) -> _Layout:
    name = _type_name(cls)
    for base in cls.__mro__[:-1]:
        if not base.__flags__ & 1 << 9:  # Py_TPFLAGS_HEAPTYPE: the others are made in C
            raise SnapshotError(
                f"Cannot freeze or thaw {name}: it is a {base.__name__}, whose content is not in "
                "its fields"
            )
    kept: list[str] = []
    transient: list[tuple[str, Callable[[], object]]] = []
    for field in dataclasses.fields(cls):
        if not field.metadata.get("transient"):
            kept.append(field.name)
        elif field.default_factory is not dataclasses.MISSING:
            transient.append((field.name, field.default_factory))
        elif field.default is not dataclasses.MISSING:
            transient.append((field.name, _constant(field.default)))
        else:
            raise SnapshotError(
                f"Cannot freeze or thaw {name}: its transient field {field.name} has no default"
            )
    return _Layout(name, tuple(kept), frozenset(kept), tuple(transient))


def _constant(value: object) -> Callable[[], object]:
    return lambda: value


def _type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def current_name(name: str) -> str:
    """Return what a class is called now, given its name in data that may be older."""
    module, colon, qualname = name.partition(":")
    return f"{_MOVED.get(module, module)}{colon}{qualname}"


_MOVED = {
    "weakincentives.contrib.tools.digest_facts": "weakincentives.contrib.tools.digest",
    "weakincentives.contrib.tools.podman": "weakincentives.contrib.tools.sandbox.section",
    "weakincentives.contrib.tools.vfs_mounts": "weakincentives.contrib.tools.mounts",
    "weakincentives.contrib.tools.vfs_values": "weakincentives.contrib.tools.file_values",
    "weakincentives.prompt.tool_result": "weakincentives.tool_result",
    "weakincentives.prompt.visibility": "weakincentives.prompt.section",
    "weakincentives.runtime.events": "weakincentives.events",
}
"""Modules that are gone, with the one that has their classes now."""


def _find(name: object, where: Where, known: Known) -> type[Any]:
    text = _checked(str, name)
    found = known.get(text) or _imported(text) or _imported(current_name(text))
    if found is None:
        raise SnapshotError(
            f"Cannot thaw {_spelled(where)}: the type {text} is not known here; pass it in types=, "
            "or import its module first"
        )
    if not (dataclasses.is_dataclass(found) or issubclass(found, Enum)):
        raise SnapshotError(
            f"Cannot thaw {_spelled(where)}: {text} is neither a dataclass nor an enum"
        )
    known[text] = found
    return found


def _imported(name: str) -> type[Any] | None:
    """Look a class up without running any code: no import, no ``__getattr__``.

    On the way to it may stand classes, and objects that hold it: a tool holds the class of its
    parameters.
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


# Small things


def _spelled(where: Where) -> str:
    """Return the way into a value as one would write it: ``value.steps[0].title``."""
    steps: list[str] = []
    while where is not None:
        where, form, step = where
        steps.append(form.format(step if form == ".{}" else reprlib.repr(step)))
    return "value" + "".join(reversed(steps))


def _checked(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def _to_base64(value: bytes) -> str:
    return binascii.b2a_base64(value, newline=False).decode()


def _from_base64(value: object) -> bytes:
    return binascii.a2b_base64(_checked(str, value), strict_mode=True)
