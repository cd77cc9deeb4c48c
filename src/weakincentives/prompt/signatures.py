"""Signatures of functions, and classes that get their type arguments at construction."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Awaitable, Callable, Coroutine
from types import NoneType, SimpleNamespace
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

UNKNOWN: Any = object()
"""A type that is not annotated, or cannot be resolved."""


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind decorators, partials, methods and callable objects."""
    while True:
        function = inspect.unwrap(function)
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif inspect.isroutine(function) or isinstance(function, type):
            return function
        else:
            function = type(function).__call__


def is_async(function: Callable[..., Any]) -> bool:
    """Whether the result of the function must be awaited."""
    if inspect.iscoroutinefunction(function):
        return True
    # A plain wrapper of an async function returns its coroutine.
    inner = innermost(function)
    returns = hints_of(function).get("return")
    return inspect.iscoroutinefunction(inner) or get_origin(returns) in (Awaitable, Coroutine)


def misfit(function: Callable[..., Any], *args: object, **kwargs: object) -> str | None:
    """Return why the function cannot be called with these arguments, or None."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass  # a built-in without a signature
    return None


def hints_of(function: Callable[..., Any], *, extras: bool = False) -> dict[str, Any]:
    """Return the annotations that can be resolved; leave out the others."""
    inner = innermost(function)
    names = _names_seen_by(inner)
    resolved: dict[str, Any] = {}
    for name, hint in getattr(inner, "__annotations__", {}).items():
        # One at a time: an unknown name must not hide the others.
        holder = SimpleNamespace(__annotations__={name: hint})
        try:
            resolved.update(get_type_hints(holder, names, include_extras=extras))
        except Exception:  # an annotation is code, and may fail in any way
            continue
    return resolved


def _names_seen_by(function: Callable[..., Any]) -> dict[str, Any]:
    names = dict(cast("dict[str, Any]", getattr(function, "__globals__", {})))
    for parameter in getattr(function, "__type_params__", ()):
        names[parameter.__name__] = parameter
    code = getattr(function, "__code__", None)
    for name, cell in zip(
        getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=True
    ):
        try:
            names[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    return names


def is_union(hint: object) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def can_be(given: Any, wanted: Any) -> bool:
    """Whether a value of type ``given`` fits where ``wanted`` is declared; True where unsure."""
    given, wanted = (NoneType if hint is None else hint for hint in (given, wanted))
    if UNKNOWN in (given, wanted) or given is Any or wanted in (Any, object, given):
        return True
    if isinstance(given, TypeVar) or isinstance(wanted, TypeVar):
        return True
    if is_union(given):
        return all(can_be(part, wanted) for part in get_args(given))
    if is_union(wanted):
        return any(can_be(given, part) for part in get_args(wanted))
    cls, base = get_origin(given) or given, get_origin(wanted) or wanted
    if not (isinstance(cls, type) and isinstance(base, type)):
        return True
    if cls is base:
        pairs = zip(get_args(given), get_args(wanted), strict=False)
        return all(can_be(inner, outer) for inner, outer in pairs)
    try:
        return issubclass(cls, base)
    except TypeError:  # a protocol that is not runtime-checkable
        return True


_ANY_CLASS: tuple[type, ...] = (object,)
_ALSO_FITS: dict[Any, tuple[type, ...]] = {float: (int,), complex: (float, int)}
"""What type checkers take for these, too."""


def classes_of(hint: Any) -> tuple[type, ...]:
    """Return the classes of the values that fit a type; ``object`` where unsure.

    Only of the values themselves: a ``list[int]`` is a list, whatever it holds.
    """
    if hint is None:
        return (NoneType,)
    if hasattr(hint, "__supertype__"):  # a NewType
        return classes_of(hint.__supertype__)
    if hasattr(hint, "__value__"):  # a `type` statement
        return classes_of(hint.__value__)
    origin = get_origin(hint)
    if is_union(hint):
        return tuple(dict.fromkeys(cls for part in get_args(hint) for cls in classes_of(part)))
    if origin is Literal:
        return tuple({type(cast("object", value)) for value in get_args(hint)})
    if origin is Annotated:
        return classes_of(get_args(hint)[0])
    cls = origin or hint
    if is_typeddict(cls):
        return (dict,)
    try:
        isinstance(None, cls)
    except TypeError:  # not a class, or a protocol that is not runtime-checkable
        return _ANY_CLASS
    return (cls, *_ALSO_FITS.get(cls, ()))


def show(hint: Any) -> str:
    """Return a type as text for a message."""
    if isinstance(hint, type) and not get_args(hint):
        return "None" if hint is NoneType else hint.__name__
    return repr(hint).replace("typing.", "")


class _TypedAlias(types.GenericAlias):
    """``Tool[A, B]``: an ordinary alias, but calling it passes the type arguments on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return cast("type[TypedConstructor]", self.__origin__).with_types(
            self.__args__, *args, **kwargs
        )


class TypedConstructor:
    """Mixin: ``Class[X](...)`` calls ``Class.with_types((X,), ...)``.

    ``typing.Generic`` sets the type arguments only after ``__init__``, too late for checks.
    """

    def __class_getitem__(cls, item: Any) -> Any:
        return _TypedAlias(cls, item if isinstance(item, tuple) else (item,))

    @classmethod
    def with_types(cls, type_args: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        """Construct with these type arguments."""
        raise NotImplementedError
