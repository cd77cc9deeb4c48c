"""What can be asked for by type, and how each thing is made."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from weakincentives.errors import ResourceError

if TYPE_CHECKING:
    from weakincentives.resources.context import ResourceContext

__all__ = [
    "Binding",
    "Closeable",
    "PostConstruct",
    "Resolver",
    "ResourceRegistry",
    "Scope",
    "Snapshotable",
]

T = TypeVar("T")
V = TypeVar("V")


class Closeable(Protocol):
    """A resource that needs cleaning up: closed when what it was made for ends."""

    def close(self) -> None: ...


class PostConstruct(Protocol):
    """A resource that needs a second step: called once, before anyone gets the instance."""

    def post_construct(self) -> None: ...


class Snapshotable(Protocol):
    """A resource that takes part in transactions."""

    def snapshot(self) -> object:
        """Return a token for the state as it is now."""
        ...

    def restore(self, token: Any, /) -> None:
        """Put back the state that ``token`` stands for."""
        ...


def can_fork(resource: object) -> bool:
    """Whether calls get views of a resource; all others are changed in place."""
    return hasattr(resource, "fork") and hasattr(resource, "merge")


class Resolver(Protocol):
    """Gives instances by type: a context, a tool call's scope, or what a provider gets."""

    def get(self, kind: type[T]) -> T:
        """Return the instance for ``kind``, making it if need be."""
        ...

    def find(self, kind: type[T]) -> T | None:
        """Return the instance for ``kind``, or None when nothing is bound for it."""
        ...


class Scope(Enum):
    """How long an instance lives."""

    SINGLETON = "singleton"
    """One per opened context."""
    TOOL_CALL = "tool_call"
    """One per tool call."""
    PROTOTYPE = "prototype"
    """A fresh one each time it is asked for."""


# No slots: with them, frozen and generic, `Binding[Config](...)` is a TypeError on Python 3.11.
@dataclass(frozen=True)
class Binding(Generic[T]):
    """How the instance for a type is made, and how long it lives.

    >>> Binding(list, lambda r: [1, 2], scope=Scope.PROTOTYPE).scope
    <Scope.PROTOTYPE: 'prototype'>
    """

    type: builtins.type[T]
    provider: Callable[[Resolver], T]
    """Called when the type is first asked for, with a resolver for what it needs itself."""
    scope: Scope = Scope.SINGLETON

    def __post_init__(self) -> None:
        _check_key(self.type)
        name = self.type.__name__
        if not callable(self.provider):
            raise ResourceError(
                f"The provider of {name} must be callable, like `lambda r: {name}()`, "
                f"got {self.provider!r}; for a ready-made instance use Binding.instance"
            )
        if inspect.iscoroutinefunction(self.provider):
            raise ResourceError(f"The provider of {name} is async; providers are plain functions")
        if not isinstance(self.scope, Scope):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ResourceError(f"The scope of {name} must be a Scope, got {self.scope!r}")

    @staticmethod
    def instance(kind: builtins.type[V], value: V, /) -> Binding[V]:
        """Bind what was made already. Whoever made it closes it."""
        _check_key(kind)
        _check_value(kind, value)
        return Binding(kind, Ready(value))


@dataclass(frozen=True, slots=True)
class Ready:
    """The provider of an instance that was made elsewhere."""

    value: Any

    def __call__(self, resolver: Resolver) -> Any:
        return self.value


class ResourceRegistry:
    """An immutable set of bindings, one per type. Open it to get instances."""

    __slots__ = ("_bindings",)

    def __init__(self, bindings: Mapping[type[Any], Binding[Any]]) -> None:
        """Take bindings by type; ``of`` and ``build`` are the friendlier ways in."""
        for kind, binding in bindings.items():
            _check_key(kind)
            _check_binding(binding)
        # A binding under another key than its own type is the one for that key.
        self._bindings = MappingProxyType(
            {
                kind: binding if binding.type is kind else replace(binding, type=kind)
                for kind, binding in bindings.items()
            }
        )

    @classmethod
    def of(cls, *bindings: Binding[Any]) -> ResourceRegistry:
        """Make a registry of bindings; each type may come once."""
        by_type: dict[type[Any], Binding[Any]] = {}
        for binding in bindings:
            _check_binding(binding)
            if binding.type in by_type:
                raise ResourceError(f"{binding.type.__name__} is bound twice")
            by_type[binding.type] = binding
        return cls(by_type)

    @classmethod
    def build(cls, resources: Mapping[type[Any], Any] | ResourceRegistry) -> ResourceRegistry:
        """Make a registry of ``{type: instance or Binding}``; a registry comes back as it is."""
        if isinstance(resources, ResourceRegistry):
            return resources
        if not isinstance(resources, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ResourceError(
                f"Resources come as {{type: instance or Binding}}, got {type(resources).__name__}"
            )
        bindings: dict[type[Any], Binding[Any]] = {}
        for kind, value in resources.items():
            is_binding = isinstance(value, Binding)
            bindings[kind] = value if is_binding else Binding.instance(kind, value)
        return cls(bindings)

    @property
    def bindings(self) -> Mapping[type[Any], Binding[Any]]:
        return self._bindings

    def merge(self, other: ResourceRegistry | Mapping[type[Any], Any]) -> ResourceRegistry:
        """Return both together; where both bind a type, ``other`` wins."""
        merged = ResourceRegistry.build(other)
        return ResourceRegistry({**self._bindings, **merged.bindings})

    def open(self) -> ResourceContext:
        """Return a context that makes instances when they are asked for, and closes them.

        Use it in a ``with`` block, or call its ``close`` yourself.
        """
        from weakincentives.resources.context import ResourceContext

        return ResourceContext(self)

    def __contains__(self, kind: object) -> bool:
        return kind in self._bindings

    def __iter__(self) -> Iterator[type[Any]]:
        return iter(self._bindings)

    def __repr__(self) -> str:
        return f"ResourceRegistry({', '.join(kind.__name__ for kind in self._bindings)})"


def _check_key(kind: object) -> None:
    if not isinstance(kind, type):
        raise ResourceError(f"Resources are bound and found by type; {kind!r} is not a class")


def _check_binding(binding: object) -> None:
    if not isinstance(binding, Binding):
        raise ResourceError(
            f"Expected a Binding, got {binding!r}; "
            "for a ready-made instance use Binding.instance(type, value)"
        )


def _check_value(kind: type, value: object) -> None:
    """Refuse what is surely not the instance that was meant."""
    name = kind.__name__
    if value is None:
        raise ResourceError(f"{name} is bound to None; leave it out and use find(), or bind one")
    if isinstance(value, type) and kind in value.__mro__:
        raise ResourceError(
            f"{name} is bound to the class {value.__name__}; pass an instance, "
            f"or Binding({name}, lambda r: {value.__name__}(...))"
        )
    takes_functions = any("__call__" in vars(base) for base in kind.__mro__)
    if isinstance(value, FunctionType) and not takes_functions and kind is not FunctionType:
        raise ResourceError(
            f"{name} is bound to a function; if that makes the instance, "
            f"write Binding({name}, {value.__name__})"
        )
