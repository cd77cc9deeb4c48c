"""Which values can be changed in place: a session does not hold them, because no rollback could
restore them.

A snapshot is a reference, so the values that it refers to must never change. What a class is like
is found out once; a value costs a look at each of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any, cast

__all__ = ["changeable"]

_LEAVES: set[type] = {type(None), bool, int, float, complex, str, bytes, range, type(...)}
"""Types whose values have no parts, and never change; filled as classes are seen."""
_NEVER_CHANGED = (Enum, type, FunctionType, BuiltinFunctionType, ModuleType, BaseException)
_MOST_KNOWN = 4096
"""Classes to remember: some programs make them all the time."""
_INSTEAD: dict[type, str] = {
    list: "use a tuple",
    dict: "use a tuple of pairs, or rpds.HashTrieMap",
    set: "use a frozenset",
    bytearray: "use bytes",
}

_PLAIN = "declare it with @dataclass(frozen=True), or give it __eq__ and __hash__"

_Parts = Iterable[tuple[str, object]]
_parts_of: dict[type, Callable[[Any], _Parts] | str] = {}
"""How to get the parts of a value, by its class; or what to use instead of the class."""
_direct_parts: dict[type, Callable[[Any], Iterable[object]]] = {tuple: iter, frozenset: iter}
"""The same for some classes, as a C function that returns the parts without their names."""


def changeable(value: object) -> str | None:
    """Return what can be changed in place in a value and what to use instead; None if nothing can.

    >>> changeable(("a", 1)), changeable(("a", [1]))
    (None, '[1] is a list; use a tuple')
    """
    kind = type(value)
    if kind in _LEAVES:
        return None
    parts = _direct_parts.get(kind)
    if parts is not None and _LEAVES.issuperset(map(type, parts(value))):
        return None  # most values are flat, and every event is looked at
    return _search(value)


def _search(value: object) -> str | None:
    todo: list[tuple[str, object]] = [("", value)]
    seen: set[int] = set()  # by identity, so that a value that contains itself ends, too
    while todo:
        path, part = todo.pop()
        kind = type(part)
        found = _parts_of.get(kind)
        if found is None:
            found = _learn(kind)
            if found is None:
                continue
        if found is _plain and any(True for _ in _plain(part)):
            found = _PLAIN  # its attributes can be set
        if isinstance(found, str):
            return f"{path.lstrip('.') or 'it'} is {_named(kind)}; {found}"
        for name, each in found(part):
            if type(each) not in _LEAVES and id(each) not in seen:
                seen.add(id(each))
                todo.append((path + name, each))
    return None


def refused_class(kind: type) -> str | None:
    """Return what to use instead of a class whose instances can all be changed in place."""
    found = None if kind in _LEAVES else _parts_of.get(kind) or _learn(kind)
    return found if isinstance(found, str) else None


def _learn(kind: type) -> Callable[[Any], _Parts] | str | None:
    """Return what ``_parts_of`` has for a class; None for one whose values have no parts."""
    found = _look_at(kind)
    if len(_parts_of) > _MOST_KNOWN:
        _parts_of.clear()
        _direct_parts.clear()
    if found is not None:
        _parts_of[kind] = found
    elif len(_LEAVES) < _MOST_KNOWN:
        _LEAVES.add(kind)
    return found


def _look_at(kind: Any) -> Callable[[Any], _Parts] | str | None:
    if issubclass(kind, _NEVER_CHANGED):
        return None
    if issubclass(kind, (tuple, frozenset)):
        return _items
    if issubclass(kind, MappingProxyType):
        return _values
    if is_dataclass(cast("object", kind)):
        params: Any = getattr(kind, "__dataclass_params__")  # noqa: B009  # not in the type stubs
        if not params.frozen:
            return "declare it with @dataclass(frozen=True)"
        names = [each.name for each in fields(kind)]
        if names:
            # Twice if there is one: with several names it returns a tuple.
            _direct_parts[kind] = attrgetter(*(names * 2 if len(names) == 1 else names))
        return _attributes(names)
    is_hashable, attrs = kind.__hash__ is not None, getattr(kind, "__attrs_attrs__", None)
    if attrs is not None:
        return _attributes(each.name for each in attrs) if is_hashable else "freeze it"
    if isinstance(getattr(kind, "model_fields", None), dict):  # of pydantic
        return _model if is_hashable else "set frozen=True in its model_config"
    if not is_hashable:
        known = (each for known, each in _INSTEAD.items() if issubclass(kind, known))
        return next(known, "use an immutable value")
    # A class that compares its values promises by __hash__ that they stay as they are.
    return _plain if kind.__hash__ is object.__hash__ else None


def _items(value: Iterable[object]) -> _Parts:
    if _LEAVES.issuperset(map(type, value)):  # most are: a tuple of a million names is fast
        return ()
    return ((f"[{number}]", each) for number, each in enumerate(value))


def _values(value: Mapping[object, object]) -> _Parts:
    return ((f"[{key!r}]", each) for key, each in value.items())


def _model(value: object) -> _Parts:
    return ((f".{name}", each) for name, each in vars(value).items())


def _plain(value: object) -> _Parts:
    """Yield the attributes of an instance of a class that is written in Python."""
    yield from ((f".{name}", each) for name, each in getattr(value, "__dict__", {}).items())
    for each in type(value).__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)


def _attributes(names: Iterable[str]) -> Callable[[Any], _Parts]:
    each_with_path = tuple((name, f".{name}") for name in names)

    def parts(value: Any) -> _Parts:
        return [(path, getattr(value, name, None)) for name, path in each_with_path]

    return parts


def _named(kind: type) -> str:
    return f"a{'n' if kind.__name__[:1].lower() in 'aeiou' else ''} {kind.__name__}"
